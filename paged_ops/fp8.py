"""Numbers in fp8: ``stored = real / scale``, rounded to nearest even and saturated."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.layouts import FP8_DTYPES


def quantise(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``real / scale`` as ``dtype``. For fp8: in float32, nearest even, saturated, NaN kept; scale [1] or [K]."""
    return saturated(real, scale, dtype).to(dtype)


def saturated(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What :func:`quantise` rounds: in float32, within the finite range of ``dtype``, for fp8; else ``real`` itself."""
    if dtype not in FP8_DTYPES:
        return real
    if scale is None or real.dtype == torch.float64:
        real = real.float()
    if scale is not None:
        real = real / scale[:, None]  # float32, as scale is
    largest = torch.finfo(dtype).max
    return real.clamp(-largest, largest)


def dequantise(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``stored * scale`` in ``dtype``; the product is taken in float32 at least."""
    if scale is None:
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scale[:, None].to(wide)).to(dtype)
