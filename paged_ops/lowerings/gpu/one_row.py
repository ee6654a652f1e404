"""Linear layers of decode steps with one or two rows: RMSNorm, matmul, gate and residual add in one kernel.

Reading the weight takes nearly all the time, so no tensor cores: loads of 16 bytes go to registers. The first of them
are issued before the previous kernel has ended (programmatic dependent launch). Each program has few rows of the weight
and all of its columns, so the order of additions is fixed. From 4 rows on the arithmetic takes longer than the loads
(benchmarks/notes/decode-step.md).

Letters: T rows, C input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.fake.models import MOST_ROWS
from paged_ops.lowerings.gpu.target import FUSED


def tile_of(T: int, O: int, C: int) -> dict[str, int] | None:
    """The fastest tile; None if this kernel does not serve these sizes."""
    if not 0 < T <= MOST_ROWS or C % 1024 or O % 8:
        return None
    if C % 2048 or (C <= 4096 and O * T <= 8192):
        return dict(ROWS=8, BC=1024, AHEAD=min(2, C // 1024), num_warps=4)
    return dict(ROWS=4, BC=2048, AHEAD=min(2, C // 2048), num_warps=4)


def launch(tensors: tuple[Tensor | None, ...], eps: float, gated: bool, constant: bool, tile: dict[str, int]) -> None:
    x, weight, norm, residual, out = tensors
    assert x is not None is not weight
    assert out is not None
    (T, C), O = x.shape, out.shape[-1]
    packed = (None if each is None else each.contiguous().view(torch.int32) for each in (x, weight, norm))
    residual = None if residual is None else residual.contiguous()
    sizes: dict[str, Any] = dict(C=C, T=T, GATED=gated, EARLY=constant, PDL=True, **tile)
    grid = (weight.shape[0] // tile["ROWS"],)
    one_row_kernel[grid](*packed, residual, out, O, eps, launch_pdl=True, **sizes, **FUSED)


_compiled: set[tuple[object, ...]] = set()


def compile_all(rows: Tensor, weight: Tensor, constant: bool) -> None:
    """Launches the kernel of a plain matmul for each number of rows, once for each shape: later launches compile
    nothing."""
    (O, C), key = weight.shape, (weight.device, weight.dtype, weight.shape, constant)
    if key in _compiled:
        return
    for T in range(1, MOST_ROWS + 1):
        tile = tile_of(T, O, C)
        if tile is not None:
            launch((rows.new_zeros(T, C), weight, None, None, rows.new_empty(T, O)), 0.0, False, constant, tile)
    _compiled.add(key)


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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: ROWS rows of the weight, for ROWS outputs; with GATED ROWS // 2 of both halves, for ROWS // 2 outputs.

    ``x``, ``weight`` and ``norm`` are int32 that hold two numbers each; C and BC count numbers. AHEAD tiles [ROWS, BC]
    of the weight are loaded ahead; EARLY: the first before the previous kernel has ended.
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
    if PDL and not EARLY:
        gdc_wait()
    tiles = ()  # type: tuple[Any, ...]
    for i in tl.static_range(AHEAD):
        tiles += (tl.load(weight_at + i * P, eviction_policy="evict_first"),)
    if PDL:
        if EARLY:
            gdc_wait()
        # When a kernel starts after this point, everything before this kernel has completed.
        gdc_launch_dependents()
    totals, squares = (), ()  # type: tuple[Any, ...], tuple[Any, ...]
    for _ in tl.static_range(T):
        totals += (tl.zeros([ROWS, P // 4], tl.float32),)
        squares += (tl.zeros([1, P // 4], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            tiles += (tl.load(weight_at + (i + AHEAD) * P, eviction_policy="evict_first"),)
        w = _quarters(tiles[i], ROWS, P)
        if norm is not None:
            scale = _quarters(tl.load(norm + i * P + c)[None, :], 1, P)
        sums, more = (), ()  # type: tuple[Any, ...], tuple[Any, ...]
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
            sums += (total,)
            more += (square,)
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
