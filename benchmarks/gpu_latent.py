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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import paged_ops
from paged_ops import testing
from paged_ops.bench import cache_ops, cases, measure, run, tune
from paged_ops.lowerings.gpu.attention import latent, plan
from paged_ops.lowerings.gpu.target import target_of
from paged_ops.registry import OPS

# By kind of element and packed query rows: keys, warps, stages, programs per multiprocessor, parts of the columns.
VARIANTS: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "16bit": {
        16: ((64, 4, 5, 1), (32, 4, 5, 2), (32, 4, 5, 2, 4), (32, 4, 7, 1, 4), (16, 4, 7, 2, 4), (16, 4, 5, 3, 4)),
        32: ((64, 8, 5, 1), (32, 4, 5, 1), (32, 4, 5, 1, 4), (16, 4, 5, 2, 4), (64, 16, 5, 1)),
        64: ((64, 8, 2, 1), (64, 16, 2, 1)),
    },
    "fp8": {
        16: ((64, 8, 5, 2), (64, 8, 5, 1), (64, 4, 5, 2), (32, 4, 5, 2, 4), (32, 4, 5, 3, 4), (32, 4, 7, 3, 4)),
        32: ((32, 8, 5, 2), (64, 8, 5, 1), (64, 8, 5, 2), (32, 4, 5, 2)),
        64: ((32, 8, 1, 1), (32, 8, 2, 1)),
    },
}
HEADS_OF_ROWS = {16: (16,), 32: (32, 128), 64: (64, 128)}
DEVICE = "cuda"
KERNELS = plan._kernels


def latent_cases() -> list[tuple[str, Any]]:
    """Every latent case of every op; attention in the form with lse, and a few in the form without."""
    found = []
    for op, of_op in testing.CASES.items():
        for case in of_op:
            spec = getattr(case, "cache", None)
            few = op != "paged_attention" or case.name in testing.COMPILED[op]
            if spec is not None and spec.latent and few:
                found.append((op, case))
    return found


def check_cases(part: int, parts: int) -> Iterator[dict[str, Any]]:
    for op, case in latent_cases()[part::parts]:
        record: dict[str, Any] = {"op": op, "case": case.name}
        try:
            testing.check(op, case, DEVICE, OPS[op])
            yield {**record, "right": True}
        except Exception as error:
            traceback.print_exc(limit=-2)
            yield {**record, "right": False, "error": f"{type(error).__name__}: {error}"[:300]}


def settings(kind: str, heads: list[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Heads, rows of a tile, and the numbers of a variant."""
    for rows, variants in VARIANTS[kind].items():
        for H in HEADS_OF_ROWS[rows]:
            for numbers in variants if H in heads else ():
                yield H, rows, numbers


def choose(kind: str, rows: int, numbers: tuple[int, ...] | None, configured: dict[str, Any]) -> None:
    """Use these numbers, for tiles of so many rows; None: as configured."""
    tree = target_of(torch.device(DEVICE, torch.cuda.current_device())).tiles
    tree["latent"] = json.loads(json.dumps(configured))
    plan._kernels = KERNELS
    if numbers is not None:  # as the largest tile, of the Triton kernel on Hopper, too
        tree["latent"][kind] = {str(rows): list(numbers)}
        plan._kernels = lambda target: iter((latent,))
    tune.forget()


def of_kind(kind: str) -> dict[str, Any]:
    return {**cases.LATENT_SIZES, "cache_dtype": cases.FP8 if kind == "fp8" else None}


def warm(kind: str, heads: list[int], blocks: list[int], part: int, parts: int) -> None:
    """Compile a share of what ``times`` launches, for Triton's cache on disk."""
    configured = target_of(torch.device(DEVICE, torch.cuda.current_device())).tiles["latent"]
    todo = [(*setting, B, S) for setting in settings(kind, heads) for B in blocks for S in (8, 128)]
    for H, rows, numbers, B, S in todo[part::parts]:
        case = cases.Case("latent", "warm", cases.decode(S, 64), H, 1, block_size=B, **of_kind(kind))
        choose(kind, rows, numbers, configured)
        (inputs, *_) = cases.make_inputs(case, torch.device(DEVICE), 0, most=2)
        try:
            paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
        except Exception as error:
            print(f"{H} {rows} {numbers} {B}: {error}"[:200], flush=True)


def times(kind: str, heads: list[int], blocks: list[int], match: str, repeats: int) -> Iterator[dict[str, Any]]:
    device = torch.device(DEVICE, torch.cuda.current_device())
    ceilings = measure.measure_ceilings(device)
    yield from run.ceiling_records(ceilings)
    configured = target_of(device).tiles["latent"]
    for B in blocks:
        for H in heads:
            for name, seqs in cases.LATENT.items():
                if match not in name:
                    continue
                case = cases.Case("latent", f"{name} block {B}", seqs, H, 1, block_size=B, **of_kind(kind))
                sets = measure.inputs_of(case, device)
                tried = [(0, None), *((rows, numbers) for _, rows, numbers in settings(kind, [H]))]
                for rows, numbers in tried:
                    choose(kind, rows, numbers, configured)
                    record = {**run.describe(case), "rows": rows, "tile": numbers or "configured"}
                    try:
                        calls = [functools.partial(paged_ops.paged_attention, *s.args, **s.kwargs) for s in sets]
                        yield {**record, **measure.measure(calls, sets, ceilings, repeats)}
                    except Exception as error:
                        yield {**record, "failed": f"{type(error).__name__}: {error}".strip()[:300]}
                del sets
    choose(kind, 0, None, configured)


def in_processes(arguments: list[str], count: int, seconds: float) -> list[str]:
    """What this script prints in several processes, each with its share."""
    command = [sys.executable, __file__, *arguments]
    running = [
        subprocess.Popen([*command, "--share", f"{n}/{count}"], stdout=subprocess.PIPE, text=True) for n in range(count)
    ]
    lines: list[str] = []
    until = time.monotonic() + seconds
    for each in running:
        lines += said_by(each, until)
    return lines


def said_by(process: subprocess.Popen[str], until: float) -> list[str]:
    try:
        return process.communicate(timeout=max(1.0, until - time.monotonic()))[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        return [*process.communicate()[0].splitlines(), "a process ran past its time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="cases,times")
    parser.add_argument("--kind", default="16bit", choices=VARIANTS, help="the elements of the cache")
    parser.add_argument("--heads", default="16,32,64,128")
    parser.add_argument("--blocks", default="64,16")
    parser.add_argument("--cases", default="", help="a part of the names of the batches to time")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=110.0, help="after so long nothing more is timed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", help="for its own processes")
    args = parser.parse_args()
    heads, blocks = ([int(each) for each in value.split(",")] for value in (args.heads, args.blocks))
    torch.set_grad_enabled(False)
    if args.share:
        part, parts = map(int, args.share.split("/"))
        torch.set_num_threads(1)
        if args.part == "cases":
            for record in check_cases(part, parts):
                print(json.dumps(record), flush=True)
        else:
            warm(args.kind, heads, blocks, part, parts)
        return

    start = time.monotonic()
    about = run.about(torch.device(DEVICE, torch.cuda.current_device()))

    def keep(record: dict[str, Any]) -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps({**record, **about}) + "\n")

    if "cases" in args.part:
        lines = in_processes(["--part", "cases"], args.processes, 60.0)
        records = [json.loads(line) for line in lines if line.startswith("{")]
        wrong = [record for record in records if not record["right"]]
        for record in wrong:
            print("wrong:", record, flush=True)
        counts = {"group": "latent cases", "checked": len(records), "of": len(latent_cases()), "wrong": wrong}
        keep(counts)
        print(f"cases: {len(records)} of {counts['of']} ran, {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    if "cache" in args.part:
        for row in (*cache_ops.writes(), *cache_ops.gathers()):
            if "latent" in row["op"] + row["case"]:
                keep({"group": "cache", **row})
                print(
                    row["op"],
                    row["case"],
                    f"{row['us']:.2f} us,",
                    f"{row['bytes'] / row['us'] / 1e3:.0f} GB/s,",
                    row["right"],
                )
    if "times" in args.part:
        own = ["--part", "warm", "--kind", args.kind, "--heads", args.heads, "--blocks", args.blocks]
        for line in in_processes(own, args.processes, 60.0):
            print("warm:", line)
        print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
        for record in times(args.kind, heads, blocks, args.cases, args.repeats):
            keep(record)
            if "failed" in record:
                print(
                    "failed:", record["heads"], record["case"], record["rows"], record["tile"], record["failed"][:150]
                )
            elif "us" in record:
                words = record["heads"], record["case"], record["rows"], record["tile"]
                print(*words, f"{record['us']} us, floor {record['floor_us']}", flush=True)
            if time.monotonic() - start > args.seconds:
                print("stopped: out of time")
                break
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
