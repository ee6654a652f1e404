"""Attention to selected keys on the CPU in torch ops: the keys of each row are gathered, so the time grows with their
number. Letters as in :mod:`paged_ops.ops`; also n = k * selected_block_size keys of a row, and q rows of a tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_ops import masks
from paged_ops.features import Features
from paged_ops.fp8 import dequantise_rows
from paged_ops.layouts import PagedKV
from paged_ops.lowerings.cpu import invariant, processor
from paged_ops.lowerings.cpu.cache import real_of

# Gathered keys of one tile, in elements: 16 MiB of float32.
TILE_ELEMENTS = 1 << 22


def attend(
    query: Tensor,
    paged: PagedKV,
    scaled_rows: Tensor | None,
    stored: torch.dtype,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    sequences: Sequence[int],
    scale: float,
    f: Features,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill the rows of ``sequences`` in out ``[T, H, Dv]`` and lse ``[T, H]``, which holds the sinks or -inf. Values of
    the batch must be valid. ``scaled_rows``: the cache, if its rows have their own scales."""
    assert f.selected_keys is not None
    K, D, Dv = paged.num_kv_heads, paged.head_size, paged.value_head_size
    n = f.selected_keys.shape[2] * f.selected_block_size
    step = 1 if f.batch_invariant else max(1, TILE_ELEMENTS // (K * max(n * max(D, Dv), 1)))
    for s in sequences:
        start, end, length = query_start_loc[s], query_start_loc[s + 1], seq_lens[s]
        out[start:end] = 0
        if not (length and n):
            continue
        for row in range(start, end, step):
            rows = slice(row, min(row + step, end))
            i = torch.arange(rows.start, rows.stop, device="cpu") + (length - end)
            j, kept = _positions(i, length, f._replace(selected_keys=f.selected_keys[rows]))  # [q, G, n] each
            k, v = _gather(paged, scaled_rows, stored, block_tables[s], j, f)  # [q, K, n, D], [q, K, n, Dv]
            q = query[rows].float().view(len(i), K, -1, D)
            compute = _by_segments if f.batch_invariant else _softmax
            values, total = compute(q, k, v.masked_fill_(~kept[..., None], 0.0), i, j, kept, scale, f)
            out[rows], lse[rows] = values.flatten(1, 2), total.flatten(1)


def _positions(i: Tensor, length: int, f: Features) -> tuple[Tensor, Tensor]:
    """The positions of the selected keys of rows at positions i, ``[q, G, n]``, and whether the rows see them. A key
    that is not seen has position 0."""
    entries, B = f.selected_keys, f.selected_block_size
    assert entries is not None
    j = (entries.long()[..., None] * B + torch.arange(B, device="cpu")).flatten(2)
    numbers = {name: getattr(f, name) for name in masks.NUMBERS}
    kept = masks.in_order(i[:, None, None], j, is_causal=f.causal, **numbers) & (j >= 0) & (j < length)
    return j.masked_fill(~kept, 0), kept


def _gather(
    paged: PagedKV, scaled_rows: Tensor | None, stored: torch.dtype, table: Tensor, j: Tensor, f: Features
) -> tuple[Tensor, Tensor]:
    """Keys ``[q, K, n, D]`` and values ``[q, K, n, Dv]`` at positions ``j [q, G, n]``, dequantised, in float32."""
    block, offset = table[j // paged.block_size].long(), j % paged.block_size
    if scaled_rows is not None:
        key = dequantise_rows(scaled_rows[block, offset], torch.float32)
        return key, key[..., : paged.value_head_size].clone()
    heads = torch.arange(paged.num_kv_heads, device="cpu")[:, None]

    def real(plane: Tensor, scale: Tensor | None) -> Tensor:
        tokens = real_of(plane[block, offset, heads], stored).flatten(3).float()
        return tokens if scale is None else tokens * scale[:, None, None]

    return real(paged.key, f.k_scale), real(paged.value, f.v_scale)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, kept: Tensor, scale: float, f: Features
) -> tuple[Tensor, Tensor]:
    """Values ``[q, K, G, Dv]`` and lse ``[q, K, G]`` of rows ``q [q, K, G, D]``."""
    wide = processor.matmul_dtype()
    logits = ((q * scale).to(wide) @ k.mT.to(wide)).float()  # [q, K, G, n]
    if f.soft_cap:
        logits = logits.div_(f.soft_cap).tanh_().mul_(f.soft_cap)
    if f.alibi_slopes is not None:
        logits += f.alibi_slopes.view(q.shape[1:3])[..., None] * (j - i[:, None, None])[:, :, None]
    logits = logits.masked_fill_(~kept[:, :, None], -torch.inf)
    lse = logits.logsumexp(3)
    if f.sinks is not None:
        lse = torch.logaddexp(lse, f.sinks.view(q.shape[1:3]))
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    return (weights.to(wide) @ v.to(wide)).float(), lse


def _by_segments(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, kept: Tensor, scale: float, f: Features
) -> tuple[Tensor, Tensor]:
    """:func:`_softmax` of one row in the steps of :mod:`.invariant`, with cuts at fixed indices of the list."""
    _, K, G, _ = q.shape
    pad = -k.shape[2] % invariant.SEGMENT
    k, v = (torch.nn.functional.pad(each[0], (0, 0, 0, pad)) for each in (k, v))
    kept = torch.nn.functional.pad(kept, (0, pad))[:, :, None].expand(1, K, G, -1)
    j = torch.nn.functional.pad(j, (0, pad))
    state = invariant.nothing_seen(q, v.shape[-1])
    for first in range(0, k.shape[1], invariant.SEGMENT):
        part = slice(first, first + invariant.SEGMENT)
        distances = None if f.alibi_slopes is None else (j[..., part] - i[:, None, None]).float()[:, :, None]
        added = invariant.segment(q, k[:, part], v[:, part], kept[..., part], distances, scale, f)
        state = invariant.merged(state, added)
    return invariant.normalised(state, f)
