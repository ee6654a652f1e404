"""Merging two partial attention results on GPUs, in one pass over both outputs. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import fake
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.target import target_of


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    merged, lse = fake.merge_attention_states(out_a, lse_a, out_b, lse_b, out=out)
    T, H, Dv = out_a.shape
    if T * H:
        strides = out_a.stride(), lse_a.stride(), out_b.stride(), lse_b.stride()
        launcher, rows = _launcher(H, Dv, *strides, out_a.dtype, out_a.device)
        if precompile.notes() is not None:
            merged.zero_(), lse.zero_()
        launcher((-(-T * H // rows), 1, 1), (merged, lse, out_a, lse_a, out_b, lse_b), (T * H,))
    return merged, lse


@functools.lru_cache(maxsize=1024)
def _launcher(
    H: int,
    Dv: int,
    out_a: tuple[int, ...],
    lse_a: tuple[int, ...],
    out_b: tuple[int, ...],
    lse_b: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Launcher, int]:
    """The kernel for these strides and dtype, and the rows per program."""
    target = target_of(device)
    numbers = target.numbers["merge_attention_states"]
    BLOCK_D = triton.next_power_of_2(max(Dv, 1))
    ROWS = max(1, numbers["elements"] // BLOCK_D)
    constants = {
        "H": H,
        "Dv": Dv,
        "BLOCK_D": BLOCK_D,
        "ROWS": ROWS,
        "OUT_A": out_a,
        "LSE_A": lse_a,
        "OUT_B": out_b,
        "LSE_B": lse_b,
        "num_warps": numbers["num_warps"],
        **target.overlap(),
    }
    return Launcher(merge_states_kernel, constants, device, can_wait=True), ROWS


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    tensors,  # out [T, H, Dv] and lse [T, H], contiguous; then out and lse of side a, and of side b
    num_rows,  # T * H
    H: tl.constexpr,
    Dv: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    OUT_A: tl.constexpr,  # strides
    LSE_A: tl.constexpr,
    OUT_B: tl.constexpr,
    LSE_B: tl.constexpr,
    PDL: tl.constexpr,
):
    out, lse, out_a, lse_a, out_b, lse_b = tensors
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, h = row // H, row % H
    live = row < num_rows
    a = tl.load(lse_a + t * LSE_A[0] + h * LSE_A[1], mask=live, other=float("-inf"))
    b = tl.load(lse_b + t * LSE_B[0] + h * LSE_B[1], mask=live, other=float("-inf"))
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & (d < Dv)
    # Loaded without waiting for the lse; an empty side is dropped below.
    address_a = (out_a + t * OUT_A[0] + h * OUT_A[1])[:, None] + d * OUT_A[2]
    address_b = (out_b + t * OUT_B[0] + h * OUT_B[1])[:, None] + d * OUT_B[2]
    side_a = tl.load(address_a, mask=mask).to(tl.float32)
    side_b = tl.load(address_b, mask=mask).to(tl.float32)

    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(a - shift), tl.exp(b - shift)
    total = weight_a + weight_b
    some = total != 0.0
    merged_lse = tl.where(some, shift + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    scale = 1.0 / tl.where(some, total, 1.0)
    side_a = tl.where((a == float("-inf"))[:, None], 0.0, side_a * (weight_a * scale)[:, None])
    side_b = tl.where((b == float("-inf"))[:, None], 0.0, side_b * (weight_b * scale)[:, None])
    tl.store((out + row * Dv)[:, None] + d, (side_a + side_b).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, merged_lse, mask=live)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting
