"""Matmuls of 64 rows on a GPU: the kernel of lowerings/gpu/linear.py with several tiles, next to cuBLAS.

    python benchmarks/gpu_products.py --out benchmarks/data/products.jsonl

Weights of the shape of Llama-3-8B, whole and halved between two GPUs. One captured graph has calls over different
weights, at least 400 MB together; the median of replays. Each tile is checked against cuBLAS first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from paged_ops.lowerings.gpu.linear import few_row_linear_kernel
from paged_ops.lowerings.gpu.target import FUSED

ROWS = 64
WEIGHTS = {  # outputs and inputs
    "gate and up": (28672, 4096),
    "logits": (128256, 4096),
    "gate and up, half": (14336, 4096),
    "logits, half": (64128, 4096),
    "queries, keys and values": (6144, 4096),
    "queries, keys and values, half": (3072, 4096),
}
TILES = tuple(
    dict(ROWS=ROWS, BN=BN, BK=BK, STAGES=stages, num_warps=warps)
    for BN, BK, stages, warps in ((128, 128, 4, 8), (128, 64, 5, 4), (128, 64, 7, 8), (64, 128, 4, 4), (64, 64, 8, 4))
)


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, captured together."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(19)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events[3:])]
    return round(statistics.median(times) / len(calls), 2)


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: dict[str, int]) -> torch.Tensor:
    (O, C) = weight.shape
    few_row_linear_kernel[(O // tile["BN"],)](x, weight, out, ROWS, O, C, **tile, launch_pdl=True, **FUSED)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, commit=options.commit)
    about["date"] = time.strftime("%Y-%m-%d")
    torch.manual_seed(0)
    for name, (O, C) in WEIGHTS.items():
        new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        weights = [new(O, C) for _ in range(max(2, int(4e8 / (2 * O * C))))]
        x, out = new(ROWS, C), new(ROWS, O)
        want = F.linear(x, weights[0]).float()
        us = {"cuBLAS": microseconds([functools.partial(F.linear, x, weight) for weight in weights])}
        for tile in TILES:
            error = float((product(x, weights[0], out, tile).float() - want).norm() / want.norm())
            assert error < 0.01, (name, tile, error)
            key = "outputs {BN}, inputs {BK}, stages {STAGES}, warps {num_warps}".format(**tile)
            us[key] = microseconds([functools.partial(product, x, weight, out, tile) for weight in weights])
        record = {"product": name, "rows": ROWS, "outputs": O, "inputs": C, "us": us, **about}
        print(json.dumps(record), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
