"""What the processor and torch's settings mean for matmuls."""

from __future__ import annotations

import torch


def has_matrix_unit() -> bool:
    """Whether the processor has Intel AMX."""
    return torch.cpu._is_amx_tile_supported()


def matmul_dtype() -> torch.dtype:
    """The dtype in which matmuls keep float32's precision. It is float64 if ``torch.set_float32_matmul_precision`` lets
    torch round float32 operands to bfloat16."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return torch.float32 if precision in ("none", "ieee") else torch.float64
