"""What the ops mean, from the specification alone: short, vectorised, in any dtype (float64 is the truth).

Shares no code with the package. Letters: W sequences, R rows of each (padded), L keys of each (padded), H query heads,
K key/value heads, G = H/K, D and Dv head sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Mantissa bits, least exponent, largest finite value.
FP8 = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


class Features(NamedTuple):
    """What changes the logits and which keys are seen."""

    scale: float
    causal: bool = True
    window: int = 0
    chunk: int = 0
    cap: float = 0.0
    slopes: Tensor | None = None  # [H]
    sinks: Tensor | None = None  # [H]
    sparse: list[int] | None = None
    ranges: Tensor | None = None  # [W, R, Q, 2]: of each row's sequence
    later: bool = False  # these add only keys after the row
    selected: Tensor | None = None  # [W, R, 1 or K, entries], of blocks of so many keys:
    block: int = 1


def seen(f: Features, i: Tensor, n: Tensor, L: int, H: int, K: int) -> Tensor:
    """Which of L keys, n ``[W, R]`` of them real, rows at ``i [W, R]`` see: bool ``[W, 1 or K, R, 1 or G, L]``."""
    j = torch.arange(L, device=i.device)
    i, n = i[:, None, :, None, None], n[:, None, :, None, None]
    keep = j < n
    if f.causal:
        keep = keep & (j <= i)
    if f.window:
        keep = keep & (i - j < f.window)
    if f.chunk:
        keep = keep & (torch.div(i, f.chunk, rounding_mode="floor") == torch.div(j, f.chunk, rounding_mode="floor"))
    if f.sparse is not None:
        size, local, stride, homo, by_group, rank, world = f.sparse
        if homo:
            offset = torch.ones(H, dtype=torch.int64)
        else:
            heads = K if by_group else H
            step = max(1, int(stride / (world * heads)))
            own = torch.arange(H) // (H // K) if by_group else torch.arange(H)
            offset = (rank * heads + own) * step + 1
        offset = offset.to(i.device).view(1, K, 1, H // K, 1)
        qb, kb = torch.div(i, size, rounding_mode="floor"), torch.div(j, size, rounding_mode="floor")
        keep = keep & ((qb - kb < local) | ((kb + offset) % stride == 0))
    if f.selected is not None:
        chosen = f.selected.transpose(1, 2)[..., None] == torch.div(j, f.block, rounding_mode="floor")
        keep = keep & chosen.any(3)[:, :, :, None]
    for q in range(0 if f.ranges is None else f.ranges.shape[2]):
        start, end = f.ranges[:, None, :, None, None, q].unbind(-1)
        first = i if f.later else start
        keep = keep | ((start >= 0) & (start <= i) & (i < end) & (first <= j) & (j < end) & (j < n))
    return keep


def attend(
    f: Features, q: Tensor, k: Tensor, v: Tensor, i: Tensor, n: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of ``q [W, R, H, D]`` over ``k [W, L, K, D]``, ``v [W, L, K, Dv]``: out and lse in ``dtype``, and the
    largest magnitude of what is computed on the way to the logits that are seen."""
    (W, R, H, D), (L, K) = q.shape, k.shape[1:3]
    G, Dv = H // K, v.shape[3]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rows = q.view(W, R, K, G, D).transpose(1, 2).reshape(W * K, R * G, D)
    logits = (rows @ k.permute(0, 2, 3, 1).reshape(W * K, D, L)).view(W, K, R, G, L) * f.scale
    # By the lengths of the two vectors: a product errs by its terms, however small their sum.
    terms = torch.stack([each.norm(dim=-1).amax() for each in (rows, k)]).prod() * abs(f.scale)
    if f.cap:
        logits = f.cap * torch.tanh(logits / f.cap)
    if f.slopes is not None:
        away = torch.arange(L, device=i.device) - i[:, :, None]  # [W, R, L]
        logits = logits + f.slopes.to(dtype).view(1, K, 1, G, 1) * away.to(dtype)[:, None, :, None, :]
    visible = seen(f, i, n, L, H, K)
    peak = logits.masked_fill(~visible, 0.0).abs().amax().clamp(min=max(f.cap, 1.0))
    peak = torch.maximum(peak, terms)
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits, -1)  # [W, K, R, G]
    if f.sinks is not None:
        lse = torch.logaddexp(lse, f.sinks.to(dtype).view(1, K, 1, G))
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(logits - lse[..., None]))
    out = weights.view(W * K, R * G, L) @ v.permute(0, 2, 1, 3).reshape(W * K, L, Dv)
    if f.sinks is not None:
        peak = torch.maximum(peak, f.sinks.abs().amax().to(dtype))
    out = out.view(W, K, R, G, Dv).transpose(1, 2).reshape(W, R, H, Dv)
    return out, lse.transpose(1, 2).reshape(W, R, H), peak


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions as one, in the dtype of the outputs; +inf is read as -inf."""
    empty = -torch.inf
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, empty) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for side, own in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(own - lse)[..., None].to(side.dtype)
        out = out + torch.where(own[..., None] == empty, 0.0, weight * side)
    return out, lse


def fp8(real: Tensor, kind: torch.dtype) -> Tensor:
    """float32 numbers rounded to nearest even in an fp8 format, saturated, NaN kept: as float64."""
    bits, least, largest = FP8[kind]
    x = real.double().clamp(-largest, largest)
    exponent = (torch.frexp(x.nan_to_num(1.0)).exponent - 1).clamp(min=least)
    step = power_of_two(exponent - bits)
    return torch.round(x / step) * step


def scaled_rows(real: Tensor) -> tuple[Tensor, Tensor]:
    """Latents ``[..., 512]``, with or without 64 rotated columns, as rows that hold their scales: the numbers that they
    keep, in float64, and their bytes (those of the 512 numbers, if there are no rotated columns)."""
    groups = real[..., :512].float().unflatten(-1, (4, 128))
    size = groups.abs()
    size = torch.where(size.isnan(), 0.0, size.clamp(max=3.4028234663852886e38)).amax(-1, keepdim=True)
    scales = torch.maximum(size / torch.full_like(size, 448.0), torch.full_like(size, 2.0**-126))
    codes = fp8(groups / scales, torch.float8_e4m3fn)
    held = (codes * scales.double()).flatten(-2)
    bits = codes.float().to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    if real.shape[-1] == 512:
        return held, bits
    rotated = real[..., 512:].to(torch.bfloat16)
    parts = bits, scales[..., 0].contiguous().view(torch.uint8), rotated.contiguous().view(torch.uint8)
    return torch.cat([held, rotated.double()], -1), torch.cat(parts, -1)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` in float64, exactly, on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def by_head(scale: Tensor | None) -> Any:
    """A scale ``[1]`` or ``[K]`` as a factor of ``[..., K, D]``."""
    return 1.0 if scale is None else scale[:, None]
