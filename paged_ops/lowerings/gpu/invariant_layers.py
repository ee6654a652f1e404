"""Linear layers and norms whose results do not depend on the number of rows.

One program computes each tile of outputs and adds BK products at a time in float32, from the first feature to the last.
The matrix units of a device then add in one order for every tile shape (on an H200 measured for each of
:func:`tile_of`), so the tile may follow the number of rows. With few rows the weight is the left operand: wgmma needs
64 rows there. Split-K, which cuBLAS chooses by the number of rows, would change the order.

Letters: T rows, C input features, O output features, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_ops import fake
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.target import FUSED, on_device, target_of

BK = 64  # changes the order of sums, so it is one number for all tiles
SWIZZLE = tl.constexpr(8)  # tiles of rows that share the weight in the L2 cache


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = fake.invariant_linear(x, weight, bias)
    O, C = weight.shape
    rows, target = x.reshape(-1, C), target_of(x.device)
    T = len(rows)
    if not out.numel():
        return out
    strides = *rows.stride(), 0, *weight.stride(), 0 if bias is None else bias.stride(0)
    with on_device(target.device):
        for tile in tiles_of(T, O, x.dtype):
            grid = (triton.cdiv(T, tile["ROWS"]) * triton.cdiv(O, tile["BO"]),)
            invariant_linear_kernel[grid](
                rows, weight, bias, out, None, None, T, O, C, *strides, E=0, BE=1, **tile, **FUSED
            )
    return out


def invariant_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    out = fake.invariant_expert_linear(x, weight, experts, bias)
    (E, O, C), T, target = weight.shape, len(x), target_of(x.device)
    if not out.numel():
        return out
    # Rows are sorted by expert, and tiles do not cross experts. The grid has room for a part of a tile per expert.
    order = experts.argsort(stable=True)
    counts = torch.zeros(E, dtype=torch.int64, device=x.device).scatter_add_(0, experts, torch.ones_like(experts))
    # without a bias, its strides are not used
    strides = *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(1)
    if bias is not None:
        bias = bias.contiguous()
    tensors, BE = (x, weight, bias, out, order, counts), triton.next_power_of_2(E)
    with on_device(target.device):
        for tile in tiles_of(-(-T // E), O, x.dtype):
            grid = (min(T, triton.cdiv(T, tile["ROWS"]) + E) * triton.cdiv(O, tile["BO"]),)
            invariant_linear_kernel[grid](*tensors, T, O, C, *strides, E=E, BE=BE, **tile, **FUSED)
    return out


def tiles_of(T: int, O: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The fastest tile for T rows and O outputs; all tiles where kernels are noted (precompile.py), so that none is
    compiled later: each gives the same bits."""
    all_sizes = precompile.notes() is not None
    tiles = [tile_of(each, O, dtype) for each in ((16, 32, 64, 128, 256, 257) if all_sizes else (T,))]
    return [tile for n, tile in enumerate(tiles) if tile not in tiles[:n]]


def tile_of(T: int, O: int, dtype: torch.dtype) -> dict[str, Any]:
    """The fastest tile for T rows and O outputs."""
    if dtype == torch.float32:
        return dict(ROWS=32, BO=64, LEFT=False, BK=BK, STAGES=2, num_warps=4)
    if T <= 64:
        rows = 16 if T <= 16 else 32 if T <= 32 else 64
        if O > 8192:
            return dict(ROWS=rows, BO=128, LEFT=True, BK=BK, STAGES=5, num_warps=4)
        return dict(ROWS=rows, BO=64, LEFT=True, BK=BK, STAGES=8 if rows < 64 else 6, num_warps=4)
    if T <= 128 or O <= 1024:
        return dict(ROWS=64, BO=64, LEFT=False, BK=BK, STAGES=5, num_warps=4)
    if T <= 256:
        return dict(ROWS=128, BO=128, LEFT=False, BK=BK, STAGES=4, num_warps=8)
    return dict(ROWS=256, BO=128, LEFT=False, BK=BK, STAGES=3, num_warps=8)


@triton.jit(do_not_specialize=["T"])
def invariant_linear_kernel(
    x,
    weight,
    bias,
    out,
    order,
    counts,
    T,
    O,
    C,
    x_t,
    x_c,
    weight_e,
    weight_o,
    weight_c,
    bias_o,
    E: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    BO: tl.constexpr,
    LEFT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of ROWS rows and BO outputs. With E experts, of rows ``order[first : last]``, which have one expert."""
    columns = tl.cdiv(O, BO)
    if E:
        tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
        e = tl.arange(0, BE)
        of_expert = tl.load(counts + e, mask=e < E, other=0).to(tl.int32)
        tiles = (of_expert + ROWS - 1) // ROWS
        ends = tl.cumsum(tiles, 0)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        if expert >= E:
            return
        before = tl.sum(tl.where(e < expert, of_expert, 0), 0)
        tile -= tl.sum(tl.where(e < expert, tiles, 0), 0)
        last = before + tl.sum(tl.where(e == expert, of_expert, 0), 0)
        place = before + tile * ROWS + tl.arange(0, ROWS)
        live = place < last
        t = tl.load(order + place, mask=live, other=0)
        weight += expert.to(tl.int64) * weight_e
    else:
        # SWIZZLE tiles of rows at a time, column by column
        tiles_of_rows = tl.cdiv(T, ROWS)
        wide = tl.program_id(0) // (SWIZZLE * columns)
        height = tl.minimum(tiles_of_rows - wide * SWIZZLE, SWIZZLE)
        within = tl.program_id(0) % (SWIZZLE * columns)
        t = (wide * SWIZZLE + within % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = within // height
        live = t < T
    o = column * BO + tl.arange(0, BO)
    c = tl.arange(0, BK)
    x_at = x + t[:, None] * x_t + c[None, :] * x_c
    weight_at = weight + o[:, None].to(tl.int64) * weight_o + c[None, :] * weight_c
    if LEFT:
        total = tl.zeros([BO, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, BO], tl.float32)
    for start in tl.range(0, C, BK, num_stages=STAGES):
        a = tl.load(x_at, mask=live[:, None] & (c < C - start)[None, :], other=0.0)
        b = tl.load(weight_at, mask=(o < O)[:, None] & (c < C - start)[None, :], other=0.0)
        if LEFT:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        x_at += BK * x_c
        weight_at += BK * weight_c
    if LEFT:
        total = tl.trans(total)
    if bias is not None:
        if E:
            bias += expert * O
        total += tl.load(bias + o * bias_o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    out_at = out + t[:, None].to(tl.int64) * O + o[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=live[:, None] & (o < O)[None, :])


def invariant_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounds_first: bool = False
) -> Tensor:
    out = fake.invariant_rms_norm(x, weight, eps, weight_offset, rounds_first)
    C, target = x.shape[-1], target_of(x.device)
    rows = x.reshape(-1, C)
    if not out.numel():
        return out
    BC = triton.next_power_of_2(C)
    warps = min(max(BC // 512, 1), 16)
    strides = *rows.stride(), 0 if weight is None else weight.stride(0)
    with on_device(target.device):
        norm_kernel[(len(rows),)](
            rows, weight, out, C, eps, weight_offset, *strides, ROUNDS=rounds_first, BC=BC, num_warps=warps, **FUSED
        )
    return out


@triton.jit(do_not_specialize=["eps", "weight_offset"])
def norm_kernel(
    x, weight, out, C, eps, weight_offset, x_t, x_c, weight_c, ROUNDS: tl.constexpr, BC: tl.constexpr
):  # one row
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    wide = tl.load(x + row * x_t + c * x_c, mask=c < C, other=0.0).to(tl.float32)
    quotient = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / C + eps))
    if ROUNDS:
        quotient = quotient.to(out.dtype.element_ty).to(tl.float32)
    if weight is not None:
        quotient *= weight_offset + tl.load(weight + c * weight_c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, quotient.to(out.dtype.element_ty), mask=c < C)
