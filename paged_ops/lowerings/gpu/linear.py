"""Linear layers of decode steps with few rows: a kernel that overlaps with the previous one.

A matmul of up to 16 rows is bound by loading its weight. cuBLAS loads small weights at 2.6 to 3.7 TB/s on an H200, in
two kernels with split-K. One Triton kernel that starts before the previous kernel has ended (programmatic dependent
launch) is faster; for 17 to 64 rows only with many outputs. ``torch.nn.functional.linear`` serves everything else.

Letters: T rows, C input features, O output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.fake.models import few_row_shape
from paged_ops.lowerings.cpu.linear import few_row_linear as by_torch
from paged_ops.lowerings.gpu import one_row, precompile
from paged_ops.lowerings.gpu.target import FUSED, on_device, target_of

FEW_ROWS, MOST_ROWS = 16, 64
MANY_OUTPUTS = 8192  # the fewest outputs with more than FEW_ROWS rows
STEPS = 64, 256  # O and C must be multiples


def few_row_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    constant: bool = False,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    (T, C), target = rows.shape, target_of(x.device)
    O = weight.shape[0]
    serves = x.dtype == weight.dtype and serves_weight(weight) and target.is_hopper
    shape = few_row_shape(x, weight, norm, residual, gated)
    if serves and precompile.notes() is not None:  # a warm-up, whose steps may have more rows than later ones
        with on_device(target.device):
            one_row.compile_all(rows, weight, constant)
    tile = one_row.tile_of(T, O, C) if serves else None
    if tile is not None:
        out = x.new_empty(shape)
        tensors = rows, weight, norm, residual, out
        with on_device(target.device):
            one_row.launch(tensors, eps, gated, constant, tile)
        return out
    is_plain = norm is None is residual and not gated
    tile = tile_of(T, O, target.processors) if serves and is_plain else None
    if tile is None:
        return by_torch(x, weight, norm, residual, eps, gated)
    out = x.new_empty(shape)
    with on_device(target.device):
        few_row_linear_kernel[(O // tile["BN"],)](rows, weight, out, T, O, C, **tile, launch_pdl=True, **FUSED)
    return out


def tile_of(T: int, O: int, processors: int) -> dict[str, int] | None:
    """The fastest tile for T rows and O outputs; None if torch's matmul is faster."""
    if not 0 < T <= MOST_ROWS:
        return None
    if T > FEW_ROWS:
        if O < MANY_OUTPUTS or O % 128:
            return None
        if O // 128 > processors:
            return dict(ROWS=64, BN=128, BK=128, STAGES=4, num_warps=8)
        return dict(ROWS=64, BN=128, BK=64, STAGES=5, num_warps=4)
    # 32 outputs per program if that gives at most one program per multiprocessor; else 64, which loads x less often.
    if 32 * processors >= O:
        return dict(ROWS=16, BN=32, BK=256, STAGES=6, num_warps=4)
    if O <= 8192 or O % 128:
        return dict(ROWS=16, BN=64, BK=128, STAGES=5, num_warps=4)
    return dict(ROWS=16, BN=128, BK=128, STAGES=4, num_warps=4)


def serves_weight(weight: Tensor) -> bool:
    O, C = weight.shape
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    return is_half and weight.is_contiguous() and O % STEPS[0] == C % STEPS[1] == 0


@triton.jit(do_not_specialize=["T"])
def few_row_linear_kernel(
    x,
    weight,
    out,
    T,
    O,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p: outputs p*BN to (p+1)*BN of all rows. wgmma needs 64 rows in its left operand: the weight, if x has
    fewer rows and the tile is wide."""
    WEIGHT_LEFT: tl.constexpr = ROWS < 64 and BN > 32
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    t = tl.arange(0, ROWS)
    x_at = x + t[:, None] * C + c[None, :]
    weight_at = weight + n[:, None].to(tl.int64) * C + c[None, :]
    # When a kernel starts after this point, everything before this kernel has completed.
    gdc_wait()
    gdc_launch_dependents()
    if WEIGHT_LEFT:
        total = tl.zeros([BN, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, BN], tl.float32)
    for start in tl.range(0, C, BK, num_stages=STAGES):
        a = tl.load(x_at + start, mask=(t < T)[:, None], other=0.0)
        b = tl.load(weight_at + start)
        if WEIGHT_LEFT:
            total = tl.dot(b, tl.trans(a), total)
        else:
            total = tl.dot(a, tl.trans(b), total)
    if WEIGHT_LEFT:
        total = tl.trans(total)
    out_at = out + t[:, None] * O + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(t < T)[:, None])
