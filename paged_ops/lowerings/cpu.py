"""How every op runs on the CPU: torch ops, one sequence at a time. Letters as in :mod:`paged_ops.ops`; also G = H/K,
the query heads that share a key/value head, n keys of a sequence and q rows of a tile.

Attention gathers the blocks of a sequence into scratch that stays warm in cache, then runs the CPU flash kernel of
PyTorch where the features allow it and plain float32 matmuls over tiles where they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import Features
from paged_ops.layouts import FP8_DTYPES, PagedKV, element_dtype, paged_kv
from paged_ops.lowerings.cascade import cascade_attention

__all__ = [
    "attention_schedule",
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
]

# Logits that are held at once, in elements: 16 MiB of float32.
TILE_ELEMENTS = 1 << 22
# Copies between blocks go through a buffer of this many bytes.
COPY_BYTES = 1 << 24
# attention_schedule counts tiles of this many packed query rows and this many keys.
SCHEDULE_TILE = 128


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    fake.reshape_and_cache(
        key,
        value,
        kv_cache,
        slot_mapping,
        value_cache=value_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
    )
    stored = element_dtype(kv_cache, kv_cache_dtype)
    paged = _bytes_of_fp8(paged_kv(kv_cache, value_cache))
    if not kv_cache.numel() or not slot_mapping.numel():
        return
    checks.slots(slot_mapping, paged.num_blocks * paged.block_size)
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows].long()
    block, offset = slots // paged.block_size, slots % paged.block_size
    for cache, real, scale in ((paged.key, key, k_scale), (paged.value, value, v_scale)):
        cells = _quantise(real[rows], scale, stored)
        cache[block, offset] = cells.view(cache.dtype).view(-1, *cache.shape[2:])


def paged_attention(query: Tensor, *args: Any, out: Tensor | None = None, **features: Any) -> Tensor:
    out = fake.paged_attention(query, *args, out=out, **features)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    _attend(Features(**features), out, lse, query, *args)
    return out


def paged_attention_with_lse(
    query: Tensor, *args: Any, out: tuple[Tensor, Tensor] | None = None, **features: Any
) -> tuple[Tensor, Tensor]:
    output, lse = fake.paged_attention_with_lse(query, *args, out=out, **features)
    _attend(Features(**features), output, lse, query, *args)
    return output, lse


def attention_schedule(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    schedule = fake.attention_schedule(
        seq_lens,
        query_start_loc,
        num_heads,
        num_kv_heads,
        head_size,
        causal=causal,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        out=out,
    )
    q_lens = query_start_loc.diff()
    first = (seq_lens - q_lens).clamp(min=0)  # the first row's position decides how far back keys are seen
    oldest = torch.zeros_like(first)
    if sliding_window:
        oldest = oldest.maximum(first - sliding_window + 1)
    if attention_chunk:
        oldest = oldest.maximum(first // attention_chunk * attention_chunk)
    query_tiles = (q_lens * (num_heads // num_kv_heads) + SCHEDULE_TILE - 1) // SCHEDULE_TILE
    key_tiles = (seq_lens - oldest + SCHEDULE_TILE - 1) // SCHEDULE_TILE
    schedule[0] = 0
    schedule[1:] = (query_tiles * key_tiles).cumsum(0)
    return schedule


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    output, lse = fake.merge_attention_states(out_a, lse_a, out_b, lse_b, out=out)
    lse_a, lse_b = (side.masked_fill(side == torch.inf, -torch.inf) for side in (lse_a, lse_b))
    merged = torch.logaddexp(lse_a, lse_b)
    a, b = (_weighted(side, side_lse, merged) for side, side_lse in ((out_a, lse_a), (out_b, lse_b)))
    output.copy_(a.add_(b))
    lse.copy_(merged)
    return output, lse


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.copy_blocks(kv_caches, block_mapping)
    caches = [cache for cache in kv_caches if cache.numel()]
    for cache in caches:
        checks.block_mapping(block_mapping, len(cache), len(cache), same_cache=True)
    for cache in caches:
        _copy_blocks(cache, cache, block_mapping)


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.swap_blocks(src_caches, dst_caches, block_mapping)
    pairs = [(src, dst) for src, dst in zip(src_caches, dst_caches, strict=True) if src.numel() and dst.numel()]
    for src, dst in pairs:
        same = src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr() and src.data_ptr() == dst.data_ptr()
        checks.block_mapping(block_mapping, len(src), len(dst), same_cache=same)
    for src, dst in pairs:
        _copy_blocks(src, dst, block_mapping)


def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    key, value = fake.gather_kv(
        kv_cache,
        block_tables,
        seq_lens,
        num_tokens,
        value_cache=value_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        out=out,
    )
    stored = element_dtype(kv_cache, kv_cache_dtype)
    paged = _bytes_of_fp8(paged_kv(kv_cache, value_cache))
    key.zero_(), value.zero_()
    if not kv_cache.numel():
        return key, value
    B = paged.block_size
    checks.in_range("seq_lens", seq_lens, 0, block_tables.shape[1] * B + 1, "lengths that the block tables can hold,")
    checks.needed_blocks(block_tables, seq_lens, paged.num_blocks, B)
    row = 0
    for s, n in enumerate(seq_lens.tolist()):
        n = min(n, num_tokens - row)
        blocks = block_tables[s, : -(-n // B)]
        for result, cache, scale in ((key, paged.key, k_scale), (value, paged.value, v_scale)):
            result[row : row + n] = _dequantise(_gather(cache, blocks)[:n], scale, stored, result.dtype)
        row += n
    return key, value


def _attend(
    f: Features,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> None:
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    paged = _bytes_of_fp8(paged_kv(kv_cache, f.value_cache))
    T, H, _ = query.shape
    N, B, K = paged.num_blocks, paged.block_size, paged.num_kv_heads
    empty = not (query.numel() and paged.key.numel() and paged.value.numel())
    lens = torch.zeros_like(seq_lens) if empty else seq_lens
    checks.batch(block_tables, lens, query_start_loc, T, N, B)
    real = out if f.output_scale is None else torch.empty_like(out, dtype=query.dtype)
    real.zero_()
    lse.fill_(-torch.inf)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    starts = query_start_loc.tolist()
    for s, n in enumerate(lens.tolist()):
        start, end = starts[s], starts[s + 1]
        first = n - (end - start)  # the position of the first row
        if f.causal and first < 0:
            start, first = start - first, 0  # rows before the sequence's start see nothing
        if start >= end or n == 0:
            continue
        low = _oldest_key(first, f) // B * B
        blocks = block_tables[s, low // B : -(-n // B)]
        k = _dequantise(_gather(paged.key, blocks)[: n - low], f.k_scale, stored, query.dtype)
        v = _dequantise(_gather(paged.value, blocks)[: n - low], f.v_scale, stored, query.dtype)
        rows = max(1, TILE_ELEMENTS // (H * (n - low)))
        for row in range(start, end, rows):
            stop = min(row + rows, end)
            i = first + row - start
            a = _oldest_key(i, f) - low
            b = (i + stop - row if f.causal else n) - low
            q = query[row:stop].unflatten(1, (K, H // K))  # [q, K, G, D]
            _general(
                q, k[a:b], v[a:b], i, low + a, scale, f, sparse, real[row:stop].view(*q.shape[:3], -1), lse[row:stop]
            )
    if f.sinks is not None:
        live = starts[-1]
        total = torch.logaddexp(lse[:live], f.sinks)
        real[:live] = _weighted(real[:live], lse[:live], total)
        lse[:live] = total
    if f.output_scale is not None:
        out.copy_(_quantise(real, f.output_scale, out.dtype))


def _general(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: int,
    j: int,
    scale: float,
    f: Features,
    sparse: masks.SparsePattern | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention with any feature in float32: rows from position i over keys from position j."""
    rows, K, G, _ = q.shape
    positions, keys = torch.arange(i, i + rows), torch.arange(j, j + len(k))
    logits = torch.matmul(q.float().permute(1, 2, 0, 3).mul(scale), k.float().permute(1, 2, 0)[:, None])  # [K, G, q, n]
    if f.soft_cap:
        logits = logits.div_(f.soft_cap).tanh_().mul_(f.soft_cap)
    if f.alibi_slopes is not None:
        logits += f.alibi_slopes.view(K, G, 1, 1) * (keys - positions[:, None])
    kept = masks.keep(
        positions,
        keys,
        K * G,
        K,
        is_causal=f.causal,
        window=f.sliding_window,
        chunk=f.attention_chunk,
        sparse=sparse,
    )
    logits.masked_fill_(~(kept if len(kept) == 1 else kept.view(K, G, rows, -1)), -torch.inf)
    total = torch.logsumexp(logits, 3, keepdim=True)
    weights = logits.sub_(total.nan_to_num(neginf=0.0)).exp_()
    out.copy_(torch.matmul(weights, v.float().transpose(0, 1)[:, None]).permute(2, 0, 1, 3))
    lse.copy_(total.view(K * G, rows).T)


def _oldest_key(i: int, f: Features) -> int:
    """The first key that a row at position i may see."""
    window = i - f.sliding_window + 1 if f.sliding_window else 0
    chunk = i // f.attention_chunk * f.attention_chunk if f.attention_chunk else 0
    return max(window, chunk, 0)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """The tokens of blocks, one after the other: ``[len(blocks) * B, K, D]``."""
    return cache.index_select(0, blocks).flatten(0, 1).flatten(2)


def _weighted(side: Tensor, side_lse: Tensor, total: Tensor) -> Tensor:
    """A side's share of a merged output, in float32; nothing of an empty side, whatever it holds."""
    weight = torch.exp(side_lse - total)[..., None]
    return torch.where(side_lse[..., None] == -torch.inf, 0.0, weight * side)


def _copy_blocks(src: Tensor, dst: Tensor, mapping: Tensor) -> None:
    src, dst = _storage(src), _storage(dst)
    block_bytes = src[0].numel() * src.element_size()
    for pairs in mapping.split(max(1, COPY_BYTES // block_bytes)):
        dst.index_copy_(0, pairs[:, 1], src.index_select(0, pairs[:, 0]))


def _quantise(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``real / scale``, saturated, NaN kept; scale is ``[1]`` or one a head of ``real [T, K, D]``."""
    if dtype not in FP8_DTYPES:
        return real.contiguous()
    wide = real.float() if scale is None else real / scale[:, None]
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype)


def _dequantise(cells: Tensor, scale: Tensor | None, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """``stored * scale`` in ``dtype``."""
    if stored not in FP8_DTYPES:
        return cells.to(dtype)
    if scale is None:
        return cells.view(stored).to(dtype)
    return (cells.view(stored).float() * scale[:, None]).to(dtype)


def _storage(cache: Tensor) -> Tensor:
    """fp8 as bytes: indexing knows few float8 types."""
    return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache


def _bytes_of_fp8(paged: PagedKV) -> PagedKV:
    return PagedKV(_storage(paged.key), _storage(paged.value))
