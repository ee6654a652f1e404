"""Times tiles of the attention kernels on a device, shape by shape.

    python benchmarks/tune_attention.py decode --block-n 64,128 --stages 3 > tiles.jsonl

Every line is one measurement: shape, tiles, microseconds (median of graph replays over rotated data several times the
L2), and the bytes or operations per second that it means. Candidates that do not compile or give another result say so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops.lowerings.gpu import attention, tiles

L2_BYTES = 60 << 20
HEADS = {"32/8": (32, 8), "64/8": (64, 8), "32/32": (32, 32), "8/1": (8, 1)}


def ragged(n: int) -> list[int]:
    """Lengths from 16 to 16384, log-uniform."""
    generator = random.Random(0)
    return [int(math.exp(generator.uniform(math.log(16), math.log(16384)))) for _ in range(n)]


DECODE = {
    "1x131072": [131072],
    "8x8192": [8192] * 8,
    "64x4096": [4096] * 64,
    "256x1024": [1024] * 256,
    "ragged128": ragged(128),
    "1x1024": [1024],
}
PREFILL = {  # (q_len, seq_len) of each sequence
    "1x8192": [(8192, 8192)],
    "8x1024@4096": [(1024, 4096)] * 8,
    "chunk2048@8192+63x4096": [(2048, 8192)] + [(1, 4096)] * 63,
}


def make(
    seqs: Sequence[tuple[int, int]], H: int, K: int, D: int, B: int, dtype: torch.dtype, stored: torch.dtype
) -> list[tuple[Any, ...]]:
    """The arguments of several calls over different blocks of one cache, together several times the L2."""
    needed = [-(-n // B) for _, n in seqs]
    call_bytes = sum(needed) * B * K * D * 2 * stored.itemsize
    calls = max(4, min(16, math.ceil(4 * L2_BYTES / call_bytes)))
    N = calls * sum(needed)
    if stored.itemsize == 1:
        cache = torch.randint(0, 0x70, (N, 2, B, K, D), dtype=torch.uint8, device="cuda").view(stored)
    else:
        cache = torch.randn(N, 2, B, K, D, dtype=dtype, device="cuda")
    ids = torch.randperm(N, dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(q for q, _ in seqs)], dtype=torch.int32, device="cuda")
    lens = torch.tensor([n for _, n in seqs], dtype=torch.int32, device="cuda")
    made, at = [], 0
    for _ in range(calls):
        tables = torch.zeros(len(seqs), max(needed), dtype=torch.int32)
        for s, blocks in enumerate(needed):
            tables[s, :blocks] = ids[at : at + blocks]
            at += blocks
        query = torch.randn(sum(q for q, _ in seqs), H, D, dtype=dtype, device="cuda")
        made.append((query, cache, tables.cuda(), lens, starts, D**-0.5))
    return made


def graph_time(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median microseconds of one replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for n in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if n >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def measure(
    name: str, calls: list[tuple[Any, ...]], plan: tiles.Plan | None, want: Tensor | None, **info: Any
) -> Tensor | None:
    """Time one plan (None: what ships) and print its line; returns the result of the first call."""
    shipped = tiles.plan
    if plan is not None:
        tiles.plan = lambda *_: plan  # type: ignore[assignment]
    result = None
    line = {
        "case": name,
        **info,
        "plan": plan and {"split": [*plan.split], "programs": plan.programs, "prefill": [*plan.prefill]},
    }
    try:
        result = attention.paged_attention(*calls[0])
        if want is not None:
            line["error"] = relative_error(result, want)
            assert line["error"] < 0.01, line["error"]

        def run() -> None:
            for arguments in calls:
                attention.paged_attention(*arguments)

        line["us"] = round(graph_time(run, 20 if plan is None else 10) / len(calls), 2)
        if "bytes" in info:
            line["GB/s"] = round(info["bytes"] / line["us"] / 1e3)
        if "flop" in info:
            line["TFLOP/s"] = round(info["flop"] / line["us"] / 1e6)
    except Exception as error:
        line["failed"] = f"{type(error).__name__}: {error}"[:200]
    finally:
        tiles.plan = shipped
    print(json.dumps(line), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["decode", "prefill"])
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--cases", default="")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--block-n", default="")
    parser.add_argument("--warps", default="4")
    parser.add_argument("--stages", default="")
    parser.add_argument("--per-sm", default="2")
    parser.add_argument("--block-m", default="")
    parser.add_argument("--registers", default="0")
    parser.add_argument("--programs", default="0", help="instead of --per-sm")
    options = parser.parse_args()
    tried = ("block_n", "warps", "stages", "per_sm", "block_m", "registers", "programs")
    numbers = {name: [int(n) for n in getattr(options, name).split(",") if n] for name in tried}
    D, dtype = 128, torch.bfloat16
    stored = torch.float8_e4m3fn if options.fp8 else dtype
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = options.cases.split(",") if options.cases else None
    for heads in options.heads.split(","):
        H, K = HEADS[heads]
        shapes = {k: [(1, n) for n in v] for k, v in DECODE.items()} if options.what == "decode" else PREFILL
        for case, seqs in shapes.items():
            if chosen and case not in chosen:
                continue
            calls = make(seqs, H, K, D, options.block_size, dtype, stored)
            info: dict[str, Any] = {"heads": heads, "sms": sms, "block_size": options.block_size, "stored": str(stored)}
            info["bytes"] = sum(n for _, n in seqs) * K * D * 2 * stored.itemsize
            if options.what == "prefill":
                info["flop"] = sum(4 * H * D * (q * (n - q) + q * (q + 1) // 2) for q, n in seqs)
            T, S = calls[0][0].shape[0], len(seqs)
            shipped = tiles.plan(dtype, stored, T, S, H // K, D, D, calls[0][0].device)
            want = measure(case, calls, None, None, **info)
            for block_n, warps, stages, per_sm, block_m, registers, programs in itertools.product(
                numbers["block_n"],
                numbers["warps"],
                numbers["stages"],
                numbers["per_sm"],
                numbers["block_m"] or [0],
                numbers["registers"],
                numbers["programs"],
            ):
                if options.what == "decode":
                    tile = tiles.Tile(shipped.split.block_m, block_n, warps, stages, registers)
                    plan = shipped._replace(split=tile, programs=programs or per_sm * sms)
                else:
                    plan = shipped._replace(
                        prefill=tiles.Tile(block_m or shipped.prefill.block_m, block_n, warps, stages, registers)
                    )
                measure(case, calls, plan, want, **info)
            del calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
