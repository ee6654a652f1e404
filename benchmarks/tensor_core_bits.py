"""Whether mma.sync and wgmma give the same bits on sm_90, which batch-invariant decodes over fp8 caches rely on.

    python benchmarks/tensor_core_bits.py --out DIR/tensor_core_bits.json

Compiles tensor_core_bits.cu with nvcc, and computes tiles of 64 x 64 results, of 16 to 128 products each, by chains of
``mma.sync.m16n8k16`` and of ``wgmma.m64n64k16``: float16 and bfloat16, accumulators that begin at zero and not, numbers
of several ranges. Counts the float32s whose bits differ: between the two instructions; with the first operand in
registers or in shared memory; with operands exchanged; and with products in another order, within each 8 and 16, which
one instruction adds, or at all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")
TILES = 1024
MMA, WGMMA, WGMMA_OF_SHARED = range(3)
KINDS = "normal", "spread4", "spread10", "weights_fp8", "subnormal"
Run = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def compiled(folder: str) -> Run:
    """The function of tensor_core_bits.cu."""
    library = f"{folder}/tensor_core_bits.so"
    options = ["-O2", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *options, "-o", library, str(SOURCE)], check=True, capture_output=True)
    function = ctypes.CDLL(library).run
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 4

    def run(a: Tensor, b: Tensor, c: Tensor, mode: int) -> Tensor:
        d = torch.full_like(c, torch.nan)
        torch.cuda.synchronize()
        numbers = TILES, a.shape[2], mode, int(a.dtype == torch.bfloat16)
        failed = function(a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), *numbers)
        if failed:
            raise RuntimeError(f"tensor_core_bits.cu: CUDA error {failed}")
        return d

    return run


def operands(kind: str, k: int, dtype: torch.dtype, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """``[TILES, 64, k]`` twice: normal numbers, times powers of two; weights and an fp8 cache's values; subnormals."""
    shape = TILES, 64, k

    def power(most: int) -> Tensor:
        return torch.exp2(torch.randint(-most, most + 1, shape, device="cuda", generator=dice).float())

    a, b = (torch.randn(shape, device="cuda", generator=dice) for _ in "ab")
    if kind == "spread4":
        a, b = a * power(4), b * power(4)
    elif kind == "spread10":
        most = 10 if dtype == torch.float16 else 30
        a, b = a * power(most) / 64, b * power(most) / 64
    elif kind == "weights_fp8":
        a = torch.exp2(-torch.rand(shape, device="cuda", generator=dice) * 14)
        b = (b * 16).to(torch.float8_e4m3fn).float()
    elif kind == "subnormal":
        a, b = a * 2.0**-16, b * 4.0
    return a.to(dtype), b.to(dtype)


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def in_other_order(x: Tensor, each: int, dice: torch.Generator) -> Tensor:
    """The columns of x, each so many of them in another order, the same for all rows."""
    parts = [torch.randperm(each, generator=dice) + first for first in range(0, x.shape[2], each)]
    return x[:, :, torch.cat(parts).to(x.device)].contiguous()


def row(run: Run, dtype: torch.dtype, k: int, kind: str, zero: bool, dice: torch.Generator) -> dict[str, Any]:
    a, b = operands(kind, k, dtype, dice)
    c = torch.zeros(TILES, 64, 64, device="cuda")
    if not zero:
        c = torch.randn(c.shape, device="cuda", generator=dice)
        c *= torch.exp2(torch.randint(-8, 9, c.shape, device="cuda", generator=dice).float())
    mma, wgmma = run(a, b, c, MMA), run(a, b, c, WGMMA)
    exchanged = {name: run(b, a, c.mT.contiguous(), mode).mT.contiguous() for name, mode in (("m", MMA), ("w", WGMMA))}
    record = {
        "dtype": str(dtype), "k": k, "kind": kind, "zero": zero, "values": mma.numel(),
        "mma_vs_wgmma": differing(mma, wgmma),
        "rs_vs_ss": differing(wgmma, run(a, b, c, WGMMA_OF_SHARED)),
        "mma_swapped": differing(mma, exchanged["m"]), "wgmma_swapped": differing(wgmma, exchanged["w"]),
    }  # fmt: skip
    for name, each in (("perm8", 8), ("perm16", 16), ("perm_all", k)):
        for instruction, mode, first in (("mma", MMA, mma), ("wgmma", WGMMA, wgmma)):
            x, y = (in_other_order(part, each, torch.Generator().manual_seed(k)) for part in (a, b))
            record[f"{name}_{instruction}"] = differing(first, run(x, y, c, mode))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dice, rows = torch.Generator("cuda").manual_seed(1), []
    with tempfile.TemporaryDirectory() as folder:
        run = compiled(folder)
        for dtype in (torch.float16, torch.bfloat16):
            for k in (16, 64, 128):
                for kind in KINDS:
                    rows += [row(run, dtype, k, kind, zero, dice) for zero in (True, False)]
                    print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    return int(any(each["mma_vs_wgmma"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
