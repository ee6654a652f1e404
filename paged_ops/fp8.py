"""fp8: ``stored = real / scale``, rounded to nearest even and saturated; and rows with their own scales."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.layouts import FP8_DTYPES, ROW_BYTES, ROW_GROUP, row_parts


def quantise(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``real / scale`` as ``dtype``. For fp8: in float32, nearest even, saturated, NaN kept; scale [1] or [K]."""
    return saturated(real, scale, dtype).to(dtype)


def saturated(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``real / scale`` in float32, clamped to the finite range of ``dtype``, if that is fp8; else ``real``."""
    if dtype not in FP8_DTYPES:
        return real
    if scale is None or real.dtype == torch.float64:
        real = real.float()
    if scale is not None:
        real = real / scale[:, None]  # float32, as scale is
    largest = torch.finfo(dtype).max
    return real.clamp(-largest, largest)


def dequantise(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``stored * scale`` in ``dtype``; computed in float32 at least."""
    if scale is None:
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scale[:, None].to(wide)).to(dtype)


def quantise_rows(latent: Tensor, rotated: Tensor) -> Tensor:
    """Latents ``[..., 512]`` and rotated columns ``[..., 64]`` as rows with scales, uint8 ``[..., 656]``.

    A group of 128 columns has the scale ``max(amax / 448, 2**-126)`` in float32: amax is its largest magnitude,
    ignoring NaN, with infinity as the largest float32. Its elements are ``real / scale`` as :func:`quantise` rounds
    them. Rotated columns are rounded to bfloat16. Source: vLLM's writer, which has the same scales for finite input.
    """
    limits = torch.finfo(torch.float32)
    groups = latent.float().unflatten(-1, (-1, ROW_GROUP))
    largest = groups.abs().nan_to_num(0.0, limits.max).amax(-1)
    # Divided by a tensor: by a scalar, torch on CUDA would multiply by its reciprocal.
    scales = (largest / torch.full_like(largest, 448.0)).clamp(min=limits.tiny)
    rows = torch.empty((*latent.shape[:-1], ROW_BYTES), dtype=torch.uint8, device=latent.device)
    parts = row_parts(rows)
    parts.latent.copy_(saturated(groups / scales[..., None], None, parts.latent.dtype).flatten(-2))
    parts.scales.copy_(scales)
    parts.rotated.copy_(rotated)
    return rows


def quantise_index(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Index keys ``[..., 128]`` as e4m3, and their scales ``[...]``: the power of two at or above ``max(amax, 1e-4) /
    448``, where amax is the largest magnitude, ignoring NaN, with infinity as the largest float32.

    Source: vLLM's writer of DeepSeek-V3.2's index cache (scales in ue8m0), which has the same scales for finite input.
    """
    real = keys.float()
    largest = real.abs().nan_to_num(0.0, torch.finfo(torch.float32).max).amax(-1).clamp(min=1e-4)
    least = largest / torch.full_like(largest, 448.0)
    scales = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return saturated(real / scales[..., None], None, torch.float8_e4m3fn).to(torch.float8_e4m3fn), scales


def dequantise_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows with scales, uint8 ``[..., 656]``, as ``[..., 576]`` in ``dtype``; computed in float32 at least."""
    latent, scales, rotated = row_parts(rows)
    wide = torch.promote_types(dtype, torch.float32)
    real = latent.to(wide).unflatten(-1, (-1, ROW_GROUP)) * scales.to(wide)[..., None]
    return torch.cat([real.flatten(-2).to(dtype), rotated.to(dtype)], -1)
