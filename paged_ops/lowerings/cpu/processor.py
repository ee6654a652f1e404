"""What this machine's processor, and torch's settings for it, do with matrix products."""

from __future__ import annotations

import torch


def has_matrix_unit() -> bool:
    return torch.cpu._is_amx_tile_supported()


def product_dtype() -> torch.dtype:
    """The dtype of matrix products that keep float32's precision: ``torch.set_float32_matmul_precision`` may let torch
    round float32 operands to bfloat16."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return torch.float32 if precision in ("none", "ieee") else torch.float64
