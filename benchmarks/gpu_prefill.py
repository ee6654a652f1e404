"""Prefill on Hopper by head size: is it right, and how fast is it next to the Triton kernel and other head sizes.

    python benchmarks/gpu_prefill.py --out benchmarks/data/gpu_prefill.jsonl          # all, three minutes
    python benchmarks/gpu_prefill.py --only fp8 --part cases,bits,times               # over fp8 caches, two minutes

First, in several processes, cases of ``paged_ops.testing`` with many sizes, forms and features against the float64
reference, with NaN in everything that must not be read; these processes also compile the timed kernels (``--part
compile``: only that). ``bits``: many runs of the same call must have the same bits; also their distance from the Triton
kernel's result. Then the times, one record per kernel, in TFLOP/s; ``shape`` names changes to the kernel's choice.
Needs torch, triton and numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import paged_ops
from paged_ops import testing
from paged_ops.bench import cases, measure
from paged_ops.lowerings.gpu.attention import call, choose
from paged_ops.lowerings.gpu.attention.hopper import dense
from paged_ops.lowerings.gpu.attention.hopper.launch import HopperLaunch

DEVICE = "cuda"
SIZES = ((192, 128), (192, 192), (96, 96), (80, 80), (112, 112))
MORE_SIZES = ((64, 64), (128, 128), (256, 256), (128, 64), (96, 64), (160, 160), (256, 128), (224, 208))
BATCH = ((300, 1000), (1, 900), (129, 129), (70, 2000), (0, 5), (3, 40), (260, 261))
PREFILL = {
    "1x8192": ((8192, 8192),),
    "8x2048": ((2048, 2048),) * 8,
    "2048@16384": ((2048, 18432),),
}
FP8_PREFILL = {name: cases.PREFILL[name] for name in ("1x8192", "8x1024@4096")}
FP8_SIZES = (128, 64)
STORED = {"e4m3": testing.F8_E4M3, "e5m2": testing.F8_E5M2, "bf16": torch.bfloat16}
RUNS = 25  # runs of one call, whose bits are compared


def checked(only: str = "") -> list[testing.AttentionCase]:
    """Of each size several forms, block sizes, groups and features."""
    found = []

    def add(D: int, Dv: int, name: str, H: int, form: str = "nhd", **changes: Any) -> None:
        features = tuple(testing.FEATURES[each] for each in changes.pop("features", ()))
        strided = changes.pop("strided_query", False)
        sizes = {"head_size": D, "value_head_size": None if D == Dv else Dv}
        spec = testing.CacheSpec(form="separate" if D != Dv else form, **{"dtype": torch.bfloat16, **sizes, **changes})
        name = f"{D}-{Dv}-{name}"
        found.append(testing.AttentionCase(name, BATCH, spec, H, features, strided_query=strided))

    for D, Dv in (*SIZES, *MORE_SIZES):
        add(D, Dv, "sinks", 8, strided_query=True, features=("sinks",))
        if (D, Dv) in SIZES:
            add(D, Dv, "alone-window-cap", 4, "hnd", num_kv_heads=4, block_size=8, features=("window", "cap"))
            add(D, Dv, "ranges", 12, "plane_first", block_size=48, dtype=torch.float16, features=("ranges",))
            add(D, Dv, "noncausal", 5, "interleaved", num_kv_heads=1, block_size=64, features=("noncausal",))
            add(D, Dv, "chunk", 6, "separate", num_kv_heads=3, block_size=128, features=("chunk",))
    for D in FP8_SIZES:
        e4m3, e5m2 = ({"cache_dtype": STORED[name], "scales": "tensor"} for name in ("e4m3", "e5m2"))
        half = {"dtype": torch.float16}
        add(D, D, "fp8-sinks", 8, strided_query=True, features=("sinks",), **e4m3)
        add(D, D, "fp8-float16", 8, block_size=64, **half, **e4m3)
        add(D, D, "fp8-alone-window-cap", 4, "hnd", num_kv_heads=4, block_size=8, features=("window", "cap"), **e4m3)
        add(D, D, "fp8-ranges", 12, "plane_first", block_size=48, features=("ranges",), **half, **e5m2)
        add(D, D, "fp8-noncausal", 5, "interleaved", num_kv_heads=1, block_size=64, features=("noncausal",), **e5m2)
        add(D, D, "fp8-chunk", 6, "separate", num_kv_heads=3, block_size=128, features=("chunk",), **half, **e4m3)
    return [case for case in found if only in case.name]


def check(case: testing.AttentionCase) -> dict[str, Any]:
    """One case; ``served`` counts the launches of the Hopper kernel that go through Triton."""
    launches = []
    launch = HopperLaunch.__call__
    HopperLaunch.__call__ = lambda self, *given: (launches.append(1), launch(self, *given))[1]
    record: dict[str, Any] = {"part": "cases", "case": case.name}
    try:
        testing.check("paged_attention_with_lse", case, DEVICE)
        return {**record, "right": True, "served": len(launches)}
    except Exception as error:
        traceback.print_exc(limit=-2)
        return {**record, "right": False, "served": len(launches), "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        HopperLaunch.__call__ = launch


def views(D: int = 192, Dv: int = 128, K: int = 4) -> dict[str, Any]:
    """Keys that lie head by head, and values that are parts of wider rows, give the bits of plain caches."""
    torch.manual_seed(0)
    rows, B = 1024, 16
    key = torch.randn(K, rows, D, device=DEVICE).bfloat16().transpose(0, 1).unflatten(0, (-1, B))
    value = torch.randn(rows, K, Dv + 128, device=DEVICE).bfloat16().unflatten(0, (-1, B))[..., 128:]
    query = torch.randn(900, K, D, device=DEVICE).bfloat16()
    tables = torch.randperm(rows // B, device=DEVICE, dtype=torch.int32)[None]
    lens, starts = (torch.tensor(each, device=DEVICE, dtype=torch.int32) for each in ([1000], [0, 900]))
    results = [
        paged_ops.paged_attention(query, *caches[:1], tables, lens, starts, 0.1, value_cache=caches[1])
        for caches in ((key, value), (key.contiguous(), value.contiguous()))
    ]
    return {"part": "cases", "case": f"{D}-{Dv}-views", "right": torch.equal(*results), "served": 2}


class Job(NamedTuple):
    """A case, and what is changed of the kernel's choice."""

    case: cases.Case
    change: str


def shaped(**changes: int) -> Callable[[], None]:
    """The kernel with another shape."""
    chosen = CHOSEN

    def changed(*given: Any) -> Any:
        return chosen(*given)._replace(**changes)

    def choose() -> None:
        dense.shape_of = changed

    return choose


def without_gluon() -> None:
    choose.hopper_kernels = lambda: ()


CHOSEN, HOPPER = dense.shape_of, choose.hopper_kernels
CHANGES: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "triton": without_gluon,
    "heads 128": shaped(heads=128),
    "heads 32": shaped(heads=32),
    "heads 8": shaped(heads=8),
    "stages 3, slots 1": shaped(stages=3, slots=1),
}


def all_jobs(only: str = "") -> list[Job]:
    """What is timed, the most important first."""

    def case(name: str, D: int, Dv: int, H: int, K: int) -> cases.Case:
        sizes = {"head_size": D, "value_head_size": None if D == Dv else Dv}
        return cases.Case("prefill", f"{name} D {D} and {Dv}", PREFILL[name], H, K, **sizes)

    def fp8(name: str, D: int, stored: str, dtype: torch.dtype = torch.bfloat16) -> cases.Case:
        """Also bf16, the baseline of fp8."""
        words = f"{name} D {D} {stored}{'' if dtype == torch.bfloat16 else ', float16 queries'}"
        return cases.Case("fp8", words, FP8_PREFILL[name], head_size=D, dtype=dtype, cache_dtype=STORED[stored])

    groups = [
        (D, Dv, 32, 8) for D, Dv in ((128, 128), (192, 192), (96, 96), (80, 80), (112, 112), (64, 64), (256, 256))
    ]
    latent = [(192, 128, 16, 16), (128, 128, 16, 16)]
    many = [(192, 128, 128, 128), (128, 128, 32, 32)]
    jobs = [Job(case("1x8192", *each), "") for each in (*groups, *latent, *many)]
    jobs += [Job(case("1x8192", *many[0]), f"heads {n}") for n in (128, 8)]
    jobs += [Job(case("1x8192", *many[1]), f"heads {n}") for n in (32, 8)]
    jobs += [Job(case("1x8192", 192, 192, 32, 8), "stages 3, slots 1")]
    jobs += [Job(case("1x8192", *each), "triton") for each in (latent[0], *groups[:5])]
    jobs += [Job(case(name, *each), "") for name in list(PREFILL)[1:] for each in (*groups[:5], latent[0])]
    jobs += [Job(case("1x8192", *many[0]), "triton")]
    jobs += [Job(case(name, *each), "triton") for name in list(PREFILL)[1:] for each in (*groups[1:5], latent[0])]
    both = [(name, D) for name in FP8_PREFILL for D in FP8_SIZES]
    jobs += [Job(fp8(*each, stored), "") for each in both for stored in ("e4m3", "bf16")]
    jobs += [Job(fp8(*each, "e4m3"), "triton") for each in both]
    jobs += [Job(fp8(*each, "e4m3", torch.float16), change) for each in both for change in ("", "triton")]
    jobs += [Job(fp8(*each, "e5m2"), "") for each in both]
    return [job for job in jobs if only in f"{job.case.key} {job.change}"]


def choose(change: str) -> None:
    dense.shape_of, choose.hopper_kernels = CHOSEN, HOPPER
    CHANGES[change]()
    call.forget()


def warm(job: Job) -> None:
    """Compile the kernels of a job, for Triton's cache on disk."""
    choose(job.change)
    (inputs, *_) = cases.make_inputs(job.case, torch.device(DEVICE), 0, most=2)
    paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
    torch.cuda.synchronize()
    choose("")


def work(part: int, parts: int, what: str, only: str) -> Iterator[dict[str, Any]]:
    """A share of what is done in parallel."""
    tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    if any(each in what for each in ("compile", "bits", "times")):
        # Tokens and sequences choose among kernels, too.
        kinds = {
            (dataclasses.replace(job.case, name="", seqs=()), job.case.num_tokens, len(job.case.seqs), job.change): job
            for job in all_jobs(only)
        }
        tasks += [(warm, (job,)) for job in kinds.values()]
    if "cases" in what:
        tasks += [(views, ())] * (not only) + [(check, (case,)) for case in checked(only)]
    for function, arguments in tasks[part::parts]:
        try:
            record = function(*arguments)
        except Exception as error:
            traceback.print_exc(limit=-3)
            record = {"part": "cases", "case": str(arguments)[:200], "error": f"{type(error).__name__}: {error}"[:400]}
        if record is not None:
            yield record


def in_parallel(processes: int, seconds: float, *options: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, *options, "--processes", str(processes), "--worker"]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(processes)]
    end = time.monotonic() + seconds
    for process in running:
        try:
            out, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            yield {"part": "cases", "case": "a process", "error": f"took more than {seconds} s"}
        yield from (json.loads(line) for line in out.splitlines() if line.startswith("{"))


def bits(case: cases.Case) -> dict[str, Any]:
    """Many runs of one call: the number of rows that differ from the first run, and the least and the largest distance
    from the Triton kernel's result."""
    record: dict[str, Any] = {"part": "bits", "case": case.key, "runs": RUNS}
    try:
        (inputs, *_) = cases.make_inputs(case, torch.device(DEVICE, torch.cuda.current_device()), 0, most=2)
        choose("triton")
        wanted = paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
        choose("")
        results = (paged_ops.paged_attention(*inputs.args, **inputs.kwargs) for _ in range(RUNS))
        first = next(results)
        differ, distances = 0, [measure.relative_error(first, wanted)]
        for result in results:
            differ += int((result.view(torch.int16) != first.view(torch.int16)).any(-1).sum())
            distances.append(measure.relative_error(result, wanted))
        return {**record, "rows_that_differ": differ, "from_triton": [min(distances), max(distances)]}
    except Exception as error:
        traceback.print_exc(limit=-3)
        return {**record, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        choose("")


def times(job: Job, ceilings: measure.Ceilings, repeats: int) -> dict[str, Any]:
    record = {"part": "times", "case": job.case.key, "shape": job.change}
    try:
        choose(job.change)
        sets = measure.inputs_of(job.case, torch.device(DEVICE, torch.cuda.current_device()))[:4]
        calls = [lambda each=each: paged_ops.paged_attention(*each.args, **each.kwargs) for each in sets]
        return {**record, **measure.measure(calls, sets, ceilings, repeats)}
    except Exception as error:
        traceback.print_exc(limit=-3)
        return {**record, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        choose("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="-")
    parser.add_argument("--part", default="cases,times", help="of cases, compile, bits, times")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=180, help="of everything: what has not begun by then is left")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="part of the name of a case, or the shape of what is timed")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        for record in work(given.worker, given.processes, given.part, given.only):
            print(json.dumps(record), flush=True)
        os._exit(0)
    begin = time.monotonic()
    stamp = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "time": time.strftime("%F %H:%M")}

    def write(record: dict[str, Any]) -> None:
        line = json.dumps({**stamp, **record})
        print(line, flush=True)
        if given.out != "-":
            with open(given.out, "a") as file:
                file.write(line + "\n")

    for record in in_parallel(given.processes, 0.6 * given.seconds, "--part", given.part, "--only", given.only):
        write(record)
    write({"part": "parallel", "seconds": round(time.monotonic() - begin, 1)})
    for job in all_jobs(given.only) if "bits" in given.part else ():
        if job.change == "triton" and time.monotonic() - begin < given.seconds:
            write(bits(job.case))
    ceilings = measure.Ceilings(4.5e12, 4.2e12, 7e14)
    for job in all_jobs(given.only) if "times" in given.part else ():
        if time.monotonic() - begin < given.seconds:
            write(times(job, ceilings, given.repeats))


if __name__ == "__main__":
    main()
