"""Linear layers of decode steps with 1 to 4 rows, without tensor cores.

Letters: T rows, C input features, O output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.target import FUSED

MOST_ROWS = 4


def tile_of(T: int, O: int, C: int, gated: bool) -> dict[str, int] | None:
    """The fastest tile; None if this kernel does not serve these sizes."""
    if not 0 < T <= MOST_ROWS or C % 2048:
        return None
    return dict(ROWS=8, BC=2048, AHEAD=2, num_warps=8)


def launch(tensors: tuple[Tensor | None, ...], eps: float, gated: bool, tile: dict[str, int]) -> None:
    x, weight, norm, residual, out = tensors
    assert x is not None and weight is not None and out is not None
    (T, C), O = x.shape, out.shape[-1]
    grid = (weight.shape[0] // tile["ROWS"],)
    packed = (None if each is None else each.view(torch.int32) for each in (x, weight, norm))
    residual = None if residual is None else residual.contiguous()
    one_row_kernel[grid](
        *packed, residual, out, O, eps, C=C, T=T, GATED=gated, PDL=True, launch_pdl=True, **tile, **FUSED
    )


@triton.jit
def _numbers(packed, HALF: tl.constexpr):
    """The two float32 of each int32 that holds two numbers of 16 bits."""
    if HALF == tl.bfloat16:
        return (packed << 16).to(tl.float32, bitcast=True), (packed & -65536).to(tl.float32, bitcast=True)
    low, high = packed.to(tl.int16), (packed >> 16).to(tl.int16)
    return low.to(HALF, bitcast=True).to(tl.float32), high.to(HALF, bitcast=True).to(tl.float32)


@triton.jit
def _quarters(packed, R: tl.constexpr, P: tl.constexpr):
    """The int32 of each thread's loads of 16 bytes: four tensors [R, P // 4]."""
    even, odd = tl.split(tl.reshape(packed, [R, P // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit(do_not_specialize=["eps"])
def one_row_kernel(
    x,
    weight,
    norm,
    residual,
    out,
    O,
    eps,
    C: tl.constexpr,
    T: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: ROWS rows of the weight, for ROWS outputs; with GATED ROWS // 2 of both halves, for ROWS // 2 outputs.

    ``x``, ``weight`` and ``norm`` are int32 that hold two numbers each: C counts numbers. The first AHEAD tiles
    [ROWS, BC] of the weight are loaded before the previous kernel has ended; no kernel writes them.
    """
    HALF: tl.constexpr = out.dtype.element_ty
    TILES: tl.constexpr = C // BC
    P: tl.constexpr = BC // 2
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, ROWS)
    if GATED:
        row = tl.program_id(0) * OUTPUTS + r // 2 + (r % 2) * O
    else:
        row = tl.program_id(0) * OUTPUTS + r
    c = tl.arange(0, P)
    weight_at = weight + row[:, None].to(tl.int64) * (C // 2) + c[None, :]
    tiles, scales = (), ()
    for i in tl.static_range(AHEAD):
        tiles = tiles + (tl.load(weight_at + i * P, eviction_policy="evict_first"),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    totals, squares = (), ()
    for t in tl.static_range(T):
        totals = totals + (tl.zeros([ROWS, P // 4], tl.float32),)
        squares = squares + (tl.zeros([1, P // 4], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            tiles = tiles + (tl.load(weight_at + (i + AHEAD) * P, eviction_policy="evict_first"),)
        w = _quarters(tiles[i], ROWS, P)
        if norm is not None:
            scale = _quarters(tl.load(norm + i * P + c)[None, :], 1, P)
        sums, more = (), ()
        for t in tl.static_range(T):
            a = _quarters(tl.load(x + t * (C // 2) + i * P + c)[None, :], 1, P)
            total, square = totals[t], squares[t]
            for q in tl.static_range(4):
                low, high = _numbers(a[q], HALF)
                if norm is not None:
                    square += low * low + high * high
                    low_scale, high_scale = _numbers(scale[q], HALF)
                    low, high = low * low_scale, high * high_scale
                w_low, w_high = _numbers(w[q], HALF)
                total += w_low * low
                total += w_high * high
            sums, more = sums + (total,), more + (square,)
        totals, squares = sums, more
    for t in tl.static_range(T):
        total = tl.sum(totals[t], 1)
        if norm is not None:
            total *= 1.0 / tl.sqrt_rn(tl.sum(tl.ravel(squares[t]), 0) / C + eps)
        if GATED:
            gate, up = tl.split(tl.reshape(total, [OUTPUTS, 2]))
            total = gate / (1.0 + tl.exp(-gate)) * up
        if residual is not None:
            total += tl.load(residual + t * O + n).to(tl.float32)
        tl.store(out + t * O + n, total.to(HALF))
