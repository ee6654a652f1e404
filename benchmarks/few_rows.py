"""Matmuls of one or two rows on a GPU, with what is fused into them, next to cuBLAS and the kernel for up to 16 rows.

    python benchmarks/few_rows.py --out benchmarks/data/few_rows.jsonl

The weights of Llama-3-8B: one captured graph has each kind of matmul over different weights, at least 400 MB together;
and one has the chain of a step, 129 matmuls, in which each depends on the one before. cuBLAS and the kernel for up to
16 rows multiply alone, without norms, gates and residual adds. Results are checked against float64 first.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_products import microseconds
from torch import Tensor

from paged_ops import reference
from paged_ops.lowerings.gpu import linear
from paged_ops.lowerings.gpu.target import FUSED

SHAPES = {  # outputs and inputs; whether a norm comes before, a gate or a residual after
    "queries, keys and values": (6144, 4096, True, False, False),
    "output": (4096, 4096, False, False, True),
    "gate and up": (28672, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "logits": (128256, 4096, True, False, False),
}
LAYERS, BYTES_PER_SECOND = 32, 4556e9
few_row_linear: Any = functools.partial(torch.ops.paged_ops_models.few_row_linear.default, constant=True)


def up_to_16_rows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    (T, C), O = x.shape, len(weight)
    tile: Any = linear.tile_of(T, O, torch.cuda.get_device_properties(x.device).multi_processor_count)
    linear.few_row_linear_kernel[(O // tile["BN"],)](x, weight, out, T, O, C, **tile, launch_pdl=True, **FUSED)


def chain(x: Tensor, weights: dict[str, list[Tensor]], norms: dict[str, Tensor | None]) -> None:
    """A step's matmuls, and what is fused into them; the first columns of queries, keys and values attend for all."""
    *names, logits = SHAPES
    for qkv, output, gate_up, down in zip(*(weights[name] for name in names), strict=True):
        rows = few_row_linear(x, qkv, norms[names[0]], None, 1e-5)[:, : x.shape[1]]
        x = few_row_linear(rows, output, None, x)
        x = few_row_linear(few_row_linear(x, gate_up, norms[names[2]], None, 1e-5, True), down, None, x)
    few_row_linear(x, weights[logits][0], norms[logits], None, 1e-5)


def alone(inputs: dict[int, Tensor], weights: dict[str, list[Tensor]]) -> None:
    for i in range(LAYERS):
        for each in weights.values():
            if i < len(each):
                F.linear(inputs[each[i].shape[1]], each[i])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, commit=options.commit)
    about["date"] = time.strftime("%Y-%m-%d")
    torch.manual_seed(0)
    new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)

    def add(record: dict[str, Any]) -> None:
        print(json.dumps(record | about), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(record | about) + "\n")

    weights = {
        name: [new(O, C).mul_(C**-0.5) for _ in range(1 if name == "logits" else LAYERS)]
        for name, (O, C, *_) in SHAPES.items()
    }
    norms = {name: new(C) if has_norm else None for name, (_, C, has_norm, *_) in SHAPES.items()}
    for T in options.rows:
        for name, (O, C, _, gated, adds) in SHAPES.items():
            x, out, residual = new(T, C), new(T, O), new(T, O) if adds else None
            args = norms[name], residual, 1e-5, gated
            want = reference.few_row_linear(x, weights[name][0], *args).double()
            error = float((few_row_linear(x, weights[name][0], *args).double() - want).norm() / want.norm())
            assert error < 0.003, (name, error)
            several = weights[name] * (3 if name == "logits" else 1)
            us = {
                "fused": microseconds([functools.partial(few_row_linear, x, each, *args) for each in several]),
                "up to 16 rows": microseconds([functools.partial(up_to_16_rows, x, each, out) for each in several]),
                "cuBLAS": microseconds([functools.partial(F.linear, x, each) for each in several]),
                "floor": round(2e6 * O * C / BYTES_PER_SECOND, 2),
            }
            add({"matmul": name, "rows": T, "outputs": O, "inputs": C, "error": error, "us": us})
        inputs = {C: new(T, C) for C in (4096, 14336)}
        both = functools.partial(chain, inputs[4096], weights, norms), functools.partial(alone, inputs, weights)
        ms = {name: microseconds([run]) / 1e3 for name, run in zip(("fused", "cuBLAS"), both, strict=True)}
        add({"matmul": "all of a step", "rows": T, "ms": ms})


if __name__ == "__main__":
    with torch.no_grad():
        main()
