"""Which CPU implementation of attention serves a call, and why: for :func:`paged_ops.explain`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paged_ops import fake
from paged_ops.features import Features, in_use, refuse_others, with_value_scale
from paged_ops.layouts import element_dtype, paged_kv
from paged_ops.lowerings.cpu import fused
from paged_ops.lowerings.cpu.attention import APPLIES
from paged_ops.lowerings.cpu.prepared import FLASH, MATRIX_ROWS, flash_serves_long
from paged_ops.support import Explanation

INVARIANT = "torch ops on single elements, segment by segment"


def explain(
    op: str,
    query: Tensor,
    kv_cache: Tensor,
    *batch: Any,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    **features: Any,
) -> Explanation:
    """As :func:`paged_ops.explain`."""
    getattr(fake, op)(query, kv_cache, *batch, out=out, **features)
    f = with_value_scale(Features(**features), kv_cache)
    refuse_others(f, kv_cache, APPLIES, "attention on the CPU")
    paged = paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype)
    fused_reasons = fused.reasons_against(element_dtype(kv_cache, f.kv_cache_dtype), f)
    flash_reasons = sorted(in_use(f) - FLASH)
    if paged.head_size != paged.value_head_size:
        flash_reasons.append(f"value_head_size: expected {paged.head_size}, got {paged.value_head_size}")
    kernels = {
        "the C++ function": fused_reasons,
        "PyTorch's flash kernel, per sequence": flash_reasons,
        INVARIANT if f.batch_invariant else "float32 matmuls over tiles, per sequence": [],
    }
    kernel = next(name for name, reasons in kernels.items() if not reasons)
    if not fused_reasons and flash_serves_long(not flash_reasons, query.dtype):
        kernel += f"; PyTorch's flash kernel for sequences of more than {MATRIX_ROWS} rows, as it uses the matrix unit"
    others = {name: reasons or ["serves this call too, but is slower"] for name, reasons in kernels.items()}
    refused = tuple((name, tuple(reasons)) for name, reasons in others.items() if not kernel.startswith(name))
    return Explanation(op, "cpu", kernel, (), refused)
