"""Latent attention on a GPU: is it right, and which tiles are fastest. Needs torch, triton and numpy alone.

    python benchmarks/gpu_latent.py --out benchmarks/data/gpu_latent.jsonl          # both, two minutes
    python benchmarks/gpu_latent.py --part times --heads 16,128 --blocks 64         # some

``cases`` runs the latent cases of ``paged_ops.testing`` against the float64 reference, in several processes. ``times``
measures the latent cases of ``paged_ops bench`` with the configured tiles and with others, one record for each, and
``cache`` the ops of the cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import paged_ops
from paged_ops import testing
from paged_ops.bench import cache_ops, cases, measure, run, tune
from paged_ops.layouts import FP8_DS_MLA
from paged_ops.lowerings.gpu.attention import choose as choose_kernel
from paged_ops.lowerings.gpu.attention.triton import latent
from paged_ops.lowerings.gpu.target import target_of
from paged_ops.registry import OPS

# By kind of element and packed query rows: keys, warps, stages, programs per multiprocessor.
VARIANTS: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "16bit": {
        16: ((64, 4, 5, 1), (32, 4, 5, 2), (32, 4, 7, 1), (16, 4, 7, 2), (16, 4, 5, 3)),
        32: ((64, 8, 5, 1), (32, 4, 5, 1), (64, 16, 5, 1)),
        64: ((64, 8, 2, 1), (64, 16, 2, 1)),
    },
    "fp8": {
        16: ((64, 8, 5, 2), (64, 8, 5, 1), (64, 4, 5, 2), (32, 4, 5, 3), (64, 8, 7, 1)),
        32: ((32, 8, 5, 2), (64, 8, 5, 1), (64, 8, 5, 2), (32, 4, 5, 2)),
        64: ((32, 8, 1, 1), (32, 8, 2, 1)),
    },
    "rows": {  # fp8_ds_mla
        16: ((32, 8, 5, 1), (64, 8, 5, 1), (16, 4, 5, 4)),
        32: ((32, 8, 5, 2),),
        64: ((32, 8, 3, 1),),
    },
}
HEADS_OF_ROWS = {16: (16,), 32: (32, 128), 64: (64, 128)}
DEVICE = "cuda"
KERNELS = choose_kernel.kernels_of


def latent_cases(only: str = "") -> list[tuple[str, Any]]:
    """Every latent case of every op; attention in the form with lse, and a few in the form without. ``only``: a part of
    the cases' names."""
    found = []
    for op, of_op in testing.CASES.items():
        for case in of_op:
            spec = getattr(case, "cache", None)
            few = op != "paged_attention" or case.name in testing.COMPILED[op]
            if spec is not None and spec.latent and few and only in case.name:
                found.append((op, case))
    return found


def check_cases(part: int, parts: int, only: str) -> Iterator[dict[str, Any]]:
    for op, case in latent_cases(only)[part::parts]:
        record: dict[str, Any] = {"op": op, "case": case.name}
        try:
            testing.check(op, case, DEVICE, OPS[op])
            yield {**record, "right": True}
        except Exception as error:
            traceback.print_exc(limit=-2)
            yield {**record, "right": False, "error": f"{type(error).__name__}: {error}"[:300]}


class Job(NamedTuple):
    """A case, and the tiles that it is timed with; None is what is configured."""

    kind: str  # of the cache's elements
    H: int
    B: int
    batch: str
    tiles: tuple[tuple[int, tuple[int, ...]] | None, ...]  # rows and numbers
    width: int = 1  # tokens of each sequence

    @property
    def case(self) -> cases.Case:
        name = self.batch if self.width == 1 else f"{self.batch} {self.width} tokens each"
        return self.with_batch(name, tuple((self.width, seq_len) for _, seq_len in cases.LATENT[self.batch]))

    def with_batch(self, name: str, seqs: cases.Seqs) -> cases.Case:
        of_rows = torch.uint8, f" {FP8_DS_MLA}"
        stored, word = {"fp8": (cases.FP8, " fp8"), "rows": of_rows, "groups": of_rows}.get(self.kind, (None, ""))
        sizes = {**cases.LATENT_SIZES, "block_size": self.B, "cache_dtype": stored}
        if stored == torch.uint8:
            sizes["kv_cache_dtype"] = FP8_DS_MLA
        return cases.Case("latent", f"{name} block {self.B}{word}", tuple(seqs), self.H, 1, **sizes)


def all_jobs(kind: str, heads: list[int], blocks: list[int], match: str) -> list[Job]:
    """Every tile on every batch."""

    def tiles(H: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((rows, each) for rows, them in VARIANTS[kind].items() if H in HEADS_OF_ROWS[rows] for each in them)

    batches = [name for name in cases.LATENT if match in name]
    return [Job(kind, H, B, name, (None, *tiles(H))) for B in blocks for H in heads for name in batches]


def quick_jobs() -> list[Job]:
    """What is configured, the most important first, and few tiles of 16 rows."""
    few: Any = tuple((16, numbers) for numbers in ((32, 4, 5, 2), (64, 4, 5, 1)))
    fp8: Any = tuple((16, numbers) for numbers in ((64, 4, 5, 2), (32, 4, 5, 3)))
    jobs = [
        Job("16bit", H, 64, name, (None, *(few if H == 16 else ()))) for H in (16, 32, 128) for name in cases.LATENT
    ]
    jobs += [Job("16bit", H, 16, name, (None,)) for H in (16, 32, 128) for name in cases.LATENT]
    jobs += [Job("16bit", 64, 64, name, (None,)) for name in cases.LATENT]
    jobs += [Job("16bit", H, 64, "64x4096", (None,), n) for H, n in ((16, 2), (16, 4), (32, 2), (64, 2), (128, 2))]
    names = ("64x4096", "ragged128")
    jobs += [Job("fp8", 16, 64, name, (None, *fp8)) for name in names]
    jobs += [Job("fp8", 128, 64, name, (None, (64, (32, 8, 1, 1)))) for name in names]
    jobs += [Job("rows", H, 64, name, (None,)) for H in (16, 128) for name in names]
    return jobs + [Job("16bit", 64, 16, name, (None,)) for name in cases.LATENT]


def choose(kind: str, tile: tuple[int, tuple[int, ...]] | None, configured: dict[str, Any]) -> None:
    """Use these numbers for tiles of so many rows; None: as configured."""
    tree = target_of(torch.device(DEVICE, torch.cuda.current_device())).tiles
    tree["latent"] = json.loads(json.dumps(configured))
    choose_kernel.kernels_of = KERNELS
    if tile is not None:  # as the largest tile, of the Triton kernel on Hopper, too
        rows, numbers = tile
        tree["latent"][kind] = {str(rows): list(numbers)}
        choose_kernel.kernels_of = lambda target: (latent,)
    tune.forget()


def warm(jobs: list[Job], part: int, parts: int) -> None:
    """Compile a share of what ``times`` launches, for Triton's cache on disk."""
    configured = target_of(torch.device(DEVICE, torch.cuda.current_device())).tiles["latent"]
    todo = {
        (job._replace(batch=""), tile, S): None
        for job in jobs
        for tile in job.tiles
        for S in (128 if len(job.case.seqs) > 64 else 8,)
    }
    for job, tile, S in [(each._replace(tiles=()), *rest) for each, *rest in list(todo)[part::parts]]:
        case = job.with_batch("warm", ((job.width, 64),) * S)
        choose(job.kind, tile, configured)
        (inputs, *_) = cases.make_inputs(case, torch.device(DEVICE), 0, most=2)
        try:
            paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
        except Exception as error:
            print(f"{job} {tile}: {error}"[:300], flush=True)


def times(jobs: list[Job], repeats: int) -> Iterator[dict[str, Any]]:
    device = torch.device(DEVICE, torch.cuda.current_device())
    ceilings = measure.measure_ceilings(device)
    yield from run.ceiling_records(ceilings)
    configured = target_of(device).tiles["latent"]
    for job in jobs:
        sets = measure.inputs_of(job.case, device)
        for tile in job.tiles:
            choose(job.kind, tile, configured)
            record = {**run.describe(job.case), "tile": tile or "configured"}
            try:
                calls = [functools.partial(paged_ops.paged_attention, *s.args, **s.kwargs) for s in sets]
                yield {**record, **measure.measure(calls, sets, ceilings, repeats)}
            except Exception as error:
                yield {**record, "failed": f"{type(error).__name__}: {error}".strip()[:300]}
        del sets
    choose("16bit", None, configured)


def started(arguments: list[str], count: int) -> list[subprocess.Popen[str]]:
    """This script in several processes, each with its share."""
    command = [sys.executable, __file__, *arguments]
    shares = [[*command, "--share", f"{n}/{count}"] for n in range(count)]
    return [subprocess.Popen(share, stdout=subprocess.PIPE, text=True) for share in shares]


def said_by(process: subprocess.Popen[str], until: float) -> list[str]:
    try:
        return process.communicate(timeout=max(1.0, until - time.monotonic()))[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        return [*process.communicate()[0].splitlines(), "a process ran past its time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="cases,times")
    parser.add_argument("--quick", action="store_true", help="time little more than what is configured")
    parser.add_argument("--kind", default="16bit", choices=VARIANTS, help="the elements of the cache")
    parser.add_argument("--heads", default="16,32,64,128")
    parser.add_argument("--blocks", default="64,16")
    parser.add_argument("--cases", default="", help="a part of the names of the batches to time")
    parser.add_argument("--only", default="", help="a part of the names of the cases to check")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=110.0, help="after so long nothing more is timed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", help="for its own processes")
    args = parser.parse_args()
    heads, blocks = ([int(each) for each in value.split(",")] for value in (args.heads, args.blocks))
    jobs = quick_jobs() if args.quick else all_jobs(args.kind, heads, blocks, args.cases)
    torch.set_grad_enabled(False)
    if args.share:
        part, parts = map(int, args.share.split("/"))
        torch.set_num_threads(1)
        if args.part == "cases":
            for record in check_cases(part, parts, args.only):
                print(json.dumps(record), flush=True)
        else:
            warm(jobs, part, parts)
        return

    start = time.monotonic()
    # Both at once, as both mostly compile.
    ways = {"cases": ("cases", args.processes * 2 // 3), "times": ("warm", args.processes // 3)}
    same = [
        "--kind",
        args.kind,
        "--heads",
        args.heads,
        "--blocks",
        args.blocks,
        "--cases",
        args.cases,
        "--only",
        args.only,
    ]
    same += ["--quick"] if args.quick else []
    running = {
        part: started(["--part", own, *same], max(1, count)) for part, (own, count) in ways.items() if part in args.part
    }
    about = run.about(torch.device(DEVICE, torch.cuda.current_device()))

    def keep(record: dict[str, Any]) -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps({**record, **about}) + "\n")

    def said(part: str) -> list[str]:
        return [line for each in running[part] for line in said_by(each, start + 60.0)]

    if "cases" in running:
        records = [json.loads(line) for line in said("cases") if line.startswith("{")]
        wrong = [record for record in records if not record["right"]]
        for record in wrong:
            print("wrong:", record, flush=True)
        counts = {"group": "latent cases", "checked": len(records), "of": len(latent_cases(args.only)), "wrong": wrong}
        keep(counts)
        seconds = time.monotonic() - start
        print(f"cases: {len(records)} of {counts['of']} ran, {len(wrong)} wrong, {seconds:.0f} s", flush=True)
    if "cache" in args.part:
        for row in (*cache_ops.writes(), *cache_ops.gathers()):
            if "latent" in row["op"] + row["case"]:
                keep({"group": "cache", **row})
                speed = f"{row['us']:.2f} us, {row['bytes'] / row['us'] / 1e3:.0f} GB/s"
                print(row["op"], row["case"], speed, row["right"], flush=True)
    if "times" in running:
        for line in said("times"):
            print("warm:", line)
        print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
        for record in times(jobs, args.repeats):
            keep(record)
            if "failed" in record:
                print("failed:", record["heads"], record["case"], record["tile"], record["failed"][:150], flush=True)
            elif "us" in record:
                words = record["heads"], record["case"], record["tile"]
                print(*words, f"{record['us']} us, floor {record['floor_us']}", flush=True)
            if time.monotonic() - start > args.seconds:
                print("stopped: out of time")
                break
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
