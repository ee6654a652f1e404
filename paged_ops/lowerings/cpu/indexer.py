"""The indexer on the CPU in torch ops. Letters as in :mod:`paged_ops.ops`; also q rows of a tile, E entries of a chunk.

Keys are read in chunks. Each row keeps the best k entries so far, so the memory depends neither on lengths nor on T. An
entry is compared as one int64: its score, as an integer in the same order, above its position counted downwards. All
these integers differ, so that :func:`torch.topk` is exact, and the lower position wins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake
from paged_ops.features import IndexOptions, refuse_others
from paged_ops.layouts import element_dtype, has_index_scales, index_parts
from paged_ops.lowerings.cpu import processor
from paged_ops.lowerings.cpu.cache import INDEX_FORMATS, real_of, storage

APPLIES = INDEX_FORMATS | frozenset(IndexOptions._fields)
# Scores of one tile, in elements: 16 MiB of float32.
TILE_ELEMENTS = 1 << 22
# Keys of a chunk, at least, so that few chunks are merged.
CHUNK = 2048
LARGEST = 2**31 - 1  # the order of an entry that always wins
NEVER = -(2**63)  # less than any entry


def select_keys(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    batch = block_tables, seq_lens, query_start_loc
    selected = fake.select_keys(index_query, index_cache, *batch, k, out=out, **options)
    o = IndexOptions(**options)
    refuse_others(o, index_cache, APPLIES, "the indexer on the CPU")
    if not (index_query.numel() and index_cache.numel()):
        return selected.fill_(-1)
    # Copies: another thread may write the caller's tensors between check and use.
    N, B, _ = index_cache.shape
    seq_lens, query_start_loc = seq_lens.clone(), query_start_loc.clone()
    checks.lengths("seq_lens", seq_lens, block_tables.shape[1], B)
    block_tables = block_tables.narrow(1, 0, -(-int(seq_lens.max()) // B) if len(seq_lens) else 0).clone()
    checks.batch(block_tables, seq_lens, query_start_loc, len(index_query), N, B)
    selected.fill_(-1)
    starts, step = query_start_loc.tolist(), _rows_at_once(index_query, k)
    for s, n in enumerate(seq_lens.tolist()):
        for start in range(starts[s], starts[s + 1] if n else starts[s], step):
            rows = slice(start, min(start + step, starts[s + 1]))
            i = torch.arange(rows.start, rows.stop, device="cpu") + (n - starts[s + 1])  # positions
            selected[rows] = _best(index_query[rows], rows, i, index_cache, block_tables[s], n, k, o)
    return selected


def _rows_at_once(index_query: Tensor, k: int) -> int:
    heads, size = index_query.shape[1:]
    return max(1, TILE_ELEMENTS // (heads * max(CHUNK, size, 4 * k)))


def _best(
    query: Tensor, rows: slice, i: Tensor, index_cache: Tensor, table: Tensor, n: int, k: int, o: IndexOptions
) -> Tensor:
    """The entries ``[q, G, k]`` of rows ``query [q, Hi, Di]`` at positions i of a sequence of n tokens."""
    wide = processor.matmul_dtype()
    factor = o.scale if o.k_scale is None else o.scale * o.k_scale
    query = (query.float() * factor).to(wide)
    weights = None if o.weights is None else o.weights[rows].float()
    last = min(int(i[-1]), n - 1) if o.causal else n - 1
    chunk = max(TILE_ELEMENTS // max(len(i) * query.shape[1], query.shape[2]), 1)
    chunk = -(-chunk // o.block_size) * o.block_size
    best = torch.empty(len(i), query.shape[1] if o.per_head else 1, 0, dtype=torch.int64, device="cpu")
    for first in range(0, last + 1, chunk):
        j = torch.arange(first, min(first + chunk, last + 1), device="cpu")
        seen = (j <= i[:, None]) if o.causal else torch.ones(len(i), len(j), dtype=torch.bool, device="cpu")  # [q, n]
        found = _entries(_scores(query, _keys(index_cache, table, j, o).to(wide), weights, o), seen, first, i, o)
        best = torch.cat([best, found], 2)
        best = best.topk(min(k, best.shape[2]), dim=2, sorted=False).values
    entries = (LARGEST - (best & LARGEST)).masked_fill_(best == NEVER, LARGEST).sort(2).values
    entries = entries.masked_fill_(entries == LARGEST, -1).to(torch.int32)
    return torch.nn.functional.pad(entries, (0, k - entries.shape[2]), value=-1)


def _keys(index_cache: Tensor, table: Tensor, j: Tensor, o: IndexOptions) -> Tensor:
    """The keys ``[n, Di]`` at adjacent positions, in float32, without k_scale."""
    B = index_cache.shape[1]
    first, last = int(j[0]) // B, int(j[-1]) // B
    blocks, tokens = table[first : last + 1], slice(int(j[0]) - first * B, int(j[-1]) + 1 - first * B)
    keys, scales = index_cache, None
    if has_index_scales(o.kv_cache_dtype):
        keys, scales = index_parts(index_cache)
    cells = storage(keys).index_select(0, blocks).flatten(0, 1)[tokens]
    real = real_of(cells, element_dtype(index_cache, o.kv_cache_dtype)).float()
    return real if scales is None else real * scales.index_select(0, blocks).flatten()[tokens, None]


def _scores(query: Tensor, keys: Tensor, weights: Tensor | None, o: IndexOptions) -> Tensor:
    """float32 ``[q, G, n]``."""
    scores = (query.flatten(0, 1) @ keys.T).float().view(*query.shape[:2], -1)
    if o.relu:
        scores = scores.relu_()
    if o.per_head:
        return scores
    if weights is None:
        return scores.sum(1, keepdim=True)
    wide = query.dtype
    return (weights[:, None].to(wide) @ scores.to(wide)).float()


def _entries(scores: Tensor, seen: Tensor, first: int, i: Tensor, o: IndexOptions) -> Tensor:
    """Entries as int64 ``[q, G, E]`` of the keys from position ``first`` on, a multiple of the block size, for rows at
    positions i. ``seen [q, n]``: the keys that each row sees."""
    scores = _without_nan(scores).masked_fill_(~seen[:, None], -torch.inf)
    count = seen
    if o.pool != "none":
        pad = -scores.shape[2] % o.block_size
        blocks = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf).unflatten(2, (-1, o.block_size))
        count = torch.nn.functional.pad(seen, (0, pad)).unflatten(1, (-1, o.block_size)).sum(2)  # [q, E]
        if o.pool == "max":
            scores = blocks.amax(3)
        else:
            inside = torch.nn.functional.pad(seen, (0, pad)).unflatten(1, (-1, o.block_size))[:, None]
            scores = _without_nan(blocks.where(inside, 0.0).sum(3) / count[:, None])
    order = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    order ^= (order >> 31) & LARGEST  # in the order of the numbers
    e = first // o.block_size + torch.arange(scores.shape[2], device="cpu")
    own = i.div(o.block_size, rounding_mode="floor")[:, None]
    order.masked_fill_(((e <= own) & (e > own - o.local_blocks))[:, None], LARGEST)
    entries = (order.long() << 31) | (LARGEST - e)
    return entries.masked_fill_((count == 0)[:, None], NEVER)


def _without_nan(scores: Tensor) -> Tensor:
    return scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
