"""Attention on the CPU. Letters as in :mod:`paged_ops.ops`; also G = H/K, n keys of a sequence and q rows of a tile.

One C++ function (:mod:`paged_ops.lowerings.cpu.fused`) serves a call if it was compiled and supports the features. Else
this module computes one sequence after the other: it gathers blocks into scratch that fits the processor's cache, and
calls PyTorch's flash kernel for the CPU, or, if that does not support the features, float32 matmuls over tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import (
    SMALLEST,
    Features,
    in_use,
    kept_keys,
    key_parts,
    masks_in_use,
    refuse_others,
    with_value_scale,
)
from paged_ops.fp8 import dequantise_rows, quantise
from paged_ops.layouts import PagedKV, element_dtype, has_row_scales, paged_kv
from paged_ops.lowerings.cpu import fused, invariant, prepared, processor, selected
from paged_ops.lowerings.cpu.cache import FORMATS, bytes_of_fp8, real_of, take

# The supported arguments of attention, by name, and the supported formats of the cache.
APPLIES = FORMATS | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale"),
    *masks.NAMES,
    *("soft_cap", "alibi_slopes", "sinks", "batch_invariant", "selected_keys", "selected_block_size"),
}
# The masks that _oldest_key and _opened bound. With any other mask, every tile applies the predicate.
BOUNDED = frozenset({"causal", "sliding_window", "attention_chunk", "bidirectional_ranges", "ranges_in_window"})
# Bytes of keys (and of values) that decode gathers at once, so that they stay in a shared processor cache.
SCRATCH_BYTES = 1 << 22
# A sequence with at least PREFILL_ROWS rows gathers larger chunks, which need fewer merges.
PREFILL_ROWS, PREFILL_BYTES = 64, 1 << 24
# Logits of one tile of the matmul path, in elements: 16 MiB of float32.
TILE_ELEMENTS = 1 << 22
# Elements of partial results merged at once, so that they stay in the processor's cache.
MERGED_ELEMENTS = 1 << 16
# Rows of a masked tile. More rows compute more hidden keys; fewer rows make smaller matmuls.
MASKED_ROWS = 128


def paged_attention(query: Tensor, *args: Any, out: Tensor | None = None, **features: Any) -> Tensor:
    output = fake.paged_attention(query, *args, out=out, **features)
    if prepared.first(query, args, features, output) is not None:
        return output
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return _attend(Features(**features), output, lse, out is not None, query, *args)[0]


def paged_attention_with_lse(
    query: Tensor, *args: Any, out: tuple[Tensor, Tensor] | None = None, **features: Any
) -> tuple[Tensor, Tensor]:
    output, lse = fake.paged_attention_with_lse(query, *args, out=out, **features)
    if prepared.first(query, args, features, output, lse) is not None:
        return output, lse
    return _attend(Features(**features), output, lse, out is not None, query, *args)


paged_attention.repeat = prepared.repeat  # type: ignore[attr-defined]
paged_attention_with_lse.repeat = prepared.repeat_with_lse  # type: ignore[attr-defined]


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    output, lse = fake.merge_attention_states(out_a, lse_a, out_b, lse_b, out=out)
    lse_a, lse_b = (side.masked_fill(side == torch.inf, -torch.inf) for side in (lse_a, lse_b))
    # An empty side's output is not read: 0 * NaN would be NaN.
    sides = ((out_a, lse_a, lse_b), (out_b, lse_b, lse_a))
    part_a, part_b = (
        (_share(lse, other) * part).masked_fill_((lse == -torch.inf)[..., None], 0.0) for part, lse, other in sides
    )
    output.copy_(part_a.add_(part_b))
    torch.logaddexp(lse_a, lse_b, out=lse)
    return output, lse


def _attend(
    f: Features,
    out: Tensor,
    lse: Tensor,
    given: bool,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Fill and return out and lse, sequence by sequence; then apply the output scale.

    If one sequence has all rows and the caller passed no ``out`` (``given`` is False), the results of that sequence are
    returned without a copy.
    """
    refuse_others(f, kv_cache, APPLIES, "attention on the CPU")
    if query.stride(2) != 1:
        query = query.contiguous()  # the flash kernel assumes this
    f = with_value_scale(f, kv_cache)
    paged = bytes_of_fp8(paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype))
    scaled_rows = kv_cache if has_row_scales(f.kv_cache_dtype) else None
    empty = not (query.numel() and paged.key.numel() and paged.value.numel())
    stored, N, B = element_dtype(kv_cache, f.kv_cache_dtype), paged.num_blocks, max(paged.block_size, 1)
    # Copies: another thread may write the caller's tensors between check and use.
    starts, ns, M = query_start_loc.tolist(), [0] * len(seq_lens) if empty else seq_lens.tolist(), block_tables.shape[1]
    block_tables = block_tables.narrow(1, 0, min(max(-(-max(ns, default=0) // B), 0), M)).clone()
    if not _surely_valid(block_tables, ns, starts, len(query), N, M * B):
        lens, ranges = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (ns, starts))
        checks.lengths("seq_lens", lens, M, B)
        checks.query_ranges(ranges, len(query))
        checks.needed_blocks(block_tables, lens, N, B)
    if f.selected_keys is not None:
        checks.distinct_entries(f.selected_keys[: starts[-1]])
    live = [s for s in range(len(ns)) if starts[s] < starts[s + 1]]
    flash = in_use(f) <= prepared.FLASH and paged.head_size == paged.value_head_size
    served = live if not empty and fused.serves(stored, f) else []
    if prepared.flash_serves_long(flash, query.dtype):
        served = [s for s in served if starts[s + 1] - starts[s] <= prepared.MATRIX_ROWS]
    real = out if f.output_scale is None else torch.empty_like(out, dtype=torch.float32)
    if starts[-1] < len(query):
        real[starts[-1] :] = 0
    lse.fill_(-torch.inf)
    if f.sinks is not None:
        lse[: starts[-1]] = f.sinks  # for live rows that see no key
    if served:
        fused.attend(query, paged, stored, block_tables, ns, starts, served, scale, f, real, lse)
    rest = sorted({*live} - {*served})
    if f.batch_invariant or f.selected_keys is not None:
        attend = invariant.attend if f.selected_keys is None else selected.attend
        attend(query, paged, scaled_rows, stored, block_tables, ns, starts, rest, scale, f, real, lse)
        rest = []
    max_len = max((ns[s] for s in rest), default=0)
    sequence: Callable[..., tuple[Tensor, Tensor]] = functools.partial(_sequence, _flash if flash else _matmul)
    if f.block_sparse is not None:
        sequence = _sparse_sequence

    @functools.cache
    def cache(prefill: bool) -> _Cache:
        dtype = query.dtype if flash and query.dtype == torch.bfloat16 else processor.matmul_dtype()
        row_bytes = 4 * paged.num_kv_heads * max(paged.head_size, paged.value_head_size)
        blocks = (PREFILL_BYTES if prefill else SCRATCH_BYTES) // (row_bytes * paged.block_size)
        return _Cache(paged, f, stored, dtype, min(max(1, blocks), -(-max_len // paged.block_size)), scaled_rows)

    for s in rest:
        n, start, end = ns[s], starts[s], starts[s + 1]
        first = n - (end - start)  # the position of the first row
        if first < 0 and (f.causal or n == 0):  # rows at negative positions see nothing
            real[start : start - first] = 0
            start, first = start - first, 0
        if start < end:
            q = query[start:end].view(end - start, paged.num_kv_heads, -1, paged.head_size)
            own = f if f.bidirectional_ranges is None else f._replace(bidirectional_ranges=f.bidirectional_ranges[s])
            part, part_lse = sequence(q, first, n, cache(len(q) >= PREFILL_ROWS), block_tables[s], scale, own)
            if len(q) == len(query) and not given and f.sinks is None and part.dtype == out.dtype:
                return part.flatten(1, 2).contiguous(), part_lse.flatten(1).contiguous()
            if f.sinks is not None:
                sinks = f.sinks.view(part_lse.shape[1:])
                part, part_lse = part * _share(part_lse, sinks), torch.logaddexp(part_lse, sinks)
            real[start:end].view(part.shape).copy_(part)
            lse[start:end].view(part_lse.shape).copy_(part_lse)
    if f.output_scale is not None:
        out.copy_(quantise(real, f.output_scale, out.dtype))
    return out, lse


def _surely_valid(block_tables: Tensor, ns: list[int], starts: list[int], T: int, N: int, most: int) -> bool:
    """A quick test of a batch, ten times as fast as the checks. True: it is valid. False: the checks must decide."""
    if not (block_tables.numel() and min(ns) >= 0 and max(ns) <= most):
        return False
    low, high = block_tables.aminmax()  # includes entries that no length needs
    return starts[0] == 0 and starts[-1] <= T and starts == sorted(starts) and int(low) >= 0 and int(high) < N


class _Plane:
    """The keys or the values of a cache, with scratch for one gathered chunk in the dtype of the matmuls.

    Rows of the scratch are one cache line longer than K*D: rows with a stride of a power of two bytes share one set of
    the processor's cache, and a matmul over them would evict its own operands.
    """

    def __init__(self, cells: Tensor, stored: torch.dtype, scale: Tensor | None, scratch: Tensor):
        self.cells, self.stored, self.scale = cells, stored, scale
        blocks, (B, K), width = len(scratch), cells.shape[1:3], math.prod(cells.shape[2:])
        rows = scratch.flatten(0, 1)[:, :width]
        self.scratch = rows.view(blocks, B, *cells.shape[2:])  # as cells
        self.tokens = rows.view(len(rows), K, width // K).transpose(0, 1)  # [K, n, D]
        self.staging = cells.new_empty(0 if stored == rows.dtype else blocks, *cells.shape[1:])

    def read(self, blocks: Tensor) -> Tensor:
        """The tokens of some blocks, dequantised: ``[K, n, D]``. Rows past them hold old contents of the scratch."""
        direct = self.stored == self.scratch.dtype
        cells = take(self.cells, blocks, out=(self.scratch if direct else self.staging)[: len(blocks)])
        if not direct:
            self.scratch[: len(blocks)].copy_(real_of(cells, self.stored))
        if self.scale is not None:
            self.tokens[:, : len(blocks) * self.cells.shape[1]].mul_(self.scale[:, None, None])
        return self.tokens


class _ScaledRows(_Plane):
    """Keys of rows with their own scales: ``rows [N, B, 656]`` as ``cells [N, B, 1, 1, 576]``."""

    def __init__(self, rows: Tensor, cells: Tensor, scratch: Tensor):
        super().__init__(cells, scratch.dtype, None, scratch)
        self.rows, self.staging = rows, rows.new_empty(len(scratch), *rows.shape[1:])

    def read(self, blocks: Tensor) -> Tensor:
        rows = take(self.rows, blocks, out=self.staging[: len(blocks)])
        self.scratch[: len(blocks), :, 0, 0] = dequantise_rows(rows, self.scratch.dtype)
        return self.tokens


class _Cache:
    """The keys and values of a cache, with scratch for chunks of ``blocks_per_chunk`` blocks in the dtype of the
    matmuls. ``scaled_rows``: the cache itself, if its rows have their own scales."""

    def __init__(
        self,
        paged: PagedKV,
        f: Features,
        stored: torch.dtype,
        dtype: torch.dtype,
        blocks_per_chunk: int,
        scaled_rows: Tensor | None = None,
    ):
        self.paged, self.f, self.stored, self.dtype, self.blocks_per_chunk = paged, f, stored, dtype, blocks_per_chunk
        self.scaled_rows = scaled_rows
        self.one_scale = f.k_scale is f.v_scale
        padded = paged.num_kv_heads * max(paged.head_size, paged.value_head_size) + 64 // dtype.itemsize
        # One allocation: the allocator keeps its pages for the next call; it would return the pages of two.
        scratch = torch.empty(2, blocks_per_chunk, paged.block_size, padded, dtype=dtype, device="cpu")
        if scaled_rows is None:
            self.key = _Plane(paged.key, stored, f.k_scale, scratch[0])
        else:
            self.key = _ScaledRows(scaled_rows, paged.key, scratch[0])
        self.value = _Plane(paged.value, stored, f.v_scale, scratch[1])

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some blocks, as :meth:`_Plane.read` returns them."""
        keys, (key, value) = self.key.read(blocks), self.paged
        if key.data_ptr() == value.data_ptr() and key.stride()[:2] == value.stride()[:2] and self.one_scale:
            return keys, keys[..., : value.shape[3]]  # a latent cache: values are columns of keys
        return keys, self.value.read(blocks)

    @functools.cached_property
    def heads(self) -> list[_Cache]:
        """One cache per key/value head."""

        def of(h: int, each: Tensor | None, dim: int) -> Any:
            return each if each is None or each.shape[dim] == 1 else each.narrow(dim, h, 1)

        return [
            _Cache(
                PagedKV(of(h, self.paged.key, 2), of(h, self.paged.value, 2)),
                self.f._replace(k_scale=of(h, self.f.k_scale, 0), v_scale=of(h, self.f.v_scale, 0)),
                self.stored,
                self.dtype,
                self.blocks_per_chunk,
                self.scaled_rows,
            )
            for h in range(self.paged.num_kv_heads)
        ]


def _sequence(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    first: int,
    n: int,
    cache: _Cache,
    block_table: Tensor,
    scale: float,
    f: Features,
) -> tuple[Tensor, Tensor]:
    """Out ``[q, K, G, Dv]`` and lse ``[q, K, G]`` of rows ``q [q, K, G, D]``; the first row is at position ``first`` of
    a sequence of n tokens.

    Keys are gathered in chunks and computed in tiles of rows; partial results are merged by their lse."""
    q, B, chunk = q.to(cache.dtype), cache.paged.block_size, cache.blocks_per_chunk * cache.paged.block_size
    total = None
    for start, end, own, a in _chunks(first, len(q), n, chunk, B, f):
        b = min(a + chunk, end)
        blocks = block_table[a // B : -(-b // B)]
        k, v = cache.read(blocks)
        for r, stop, low, high in _tiles(q, first, max(a, start), b, own, kernel is _flash):
            part = kernel(q[r:stop], k[:, low - a : high - a], v[:, low - a : high - a], first + r, low, scale, own)
            if total is None and stop - r == len(q):
                total = part
            elif total is not None and stop - r == len(q) and high == n:  # the last part: no need for float32
                _merge_into(part, slice(None), total)
                total = part
            else:
                total = (total[0].float(), total[1]) if total else _nothing(q, v)
                _merge_into(total, slice(r, stop), part)
    assert total is not None, "a live row without keys"
    return total


def _chunks(first: int, rows: int, n: int, chunk: int, B: int, f: Features) -> Iterator[tuple[int, int, Features, int]]:
    """The chunks of keys that rows from position ``first`` see: (start, end and features of a part, first key)."""
    for start, end, own in key_parts(f, n):
        oldest = max(start, _reach(first, rows, own)[0])
        for a in range(oldest // B * B, end, chunk) if oldest < end else ():
            yield start, end, own, a


def _tiles(q: Tensor, first: int, a: int, b: int, f: Features, flash: bool) -> Iterator[tuple[int, int, int, int]]:
    """The tiles of the rows of q with keys a to b: (row, end of rows, key, end of keys)."""
    rows, K, G, _ = q.shape
    oldest, last = _oldest_key(first, f), first + rows - 1
    alike = _oldest_key(last, f) == oldest and not _opened(first, rows, f)
    a = max(a, _reach(first, rows, f)[0])
    if not flash or not alike:
        step = MASKED_ROWS if flash else max(1, TILE_ELEMENTS // (K * G * (b - a)))
        before = f.causal and not _opened(first, rows, f)  # rows at positions before key a see none of these keys
        for r in range(max(0, a - first) if before else 0, rows, step):
            stop = min(r + step, rows)
            low, high = _reach(first + r, stop - r, f)
            low, high = max(a, low), min(b, high) if f.causal else b
            if low < high:
                yield r, stop, low, high
    elif rows == 1 or not f.causal:
        yield 0, rows, a, b
    else:
        if a < first:  # earlier keys: every row sees all
            yield 0, rows, a, min(b, first)
        a = max(a, first)
        if a < b:
            yield a - first, b - first, a, b  # the diagonal
        if a < b <= last:
            yield b - first, rows, a, b  # below the diagonal


def _flash(q: Tensor, k: Tensor, v: Tensor, i: int, j: int, scale: float, f: Features) -> tuple[Tensor, Tensor]:
    """A tile through PyTorch's flash kernel (D = Dv, no cap, no bias): rows from position i, keys from position j."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (rows, K, G, _), n, wide = q.shape, k.shape[1], torch.promote_types(q.dtype, torch.float32)
    if scale < 0:  # the kernel masks before it scales: hidden keys would get +inf
        q, scale = -q, -scale
    if scale < SMALLEST:  # 0 in float32, and 0 * -inf would be NaN
        q, scale = q * scale, 1.0
    if _all_seen(rows, n, i, j, f):  # the query heads of a group are rows of one matmul
        folded = q.transpose(0, 1).reshape(1, K, rows * G, -1)
        out, lse = flash(folded, k[None], v[None], scale=scale)
        return out.view(K, rows, G, -1).transpose(0, 1), lse.view(K, rows, G).transpose(0, 1).float()
    heads = q.flatten(1, 2).transpose(0, 1)[None], k[None], v[None]  # [1, H, q, D], [1, K, n, D]
    bounded = masks_in_use(f) <= BOUNDED
    if bounded and i == j and _oldest_key(i + rows - 1, f) <= j and not _opened(i, rows, f):
        out, lse = flash(*heads, is_causal=True, scale=scale)
        unsure = not math.isfinite(out[:, :, -1].sum())  # the last row sees all values
    else:
        kept = _kept(rows, n, i, j, f)
        bias = q.new_zeros(kept.shape, dtype=wide).masked_fill_(~kept, -torch.inf)
        out, lse = flash(*heads, attn_mask=bias, scale=scale)
        lse = lse.masked_fill(~kept.any(1), -torch.inf)  # the kernel gives 0 for a row that sees nothing
        unsure = _may_have_nan(out) or _may_have_nan(lse)
    if unsure:  # NaN may come from a key or value that the row does not see: 0 * NaN is NaN
        few, k, v = max(1, TILE_ELEMENTS // (K * G * n)), k.to(wide), v.to(wide)
        parts = [
            _softmax(q[r : r + few].to(wide), k, v, scale, _kept(min(few, rows - r), n, i + r, j, f), f)
            for r in range(0, rows, few)
        ]
        out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
        return out, lse
    return out[0].transpose(0, 1).view(q.shape), lse[0].T.view(q.shape[:3]).float()


def _may_have_nan(tensor: Tensor) -> bool:  # or infinities of both signs; ten times as fast as isnan
    return math.isnan(tensor.sum())


def _matmul(q: Tensor, k: Tensor, v: Tensor, i: int, j: int, scale: float, f: Features) -> tuple[Tensor, Tensor]:
    """A tile by matmuls, for soft cap, ALiBi or Dv != D: rows from position i, keys from position j."""
    rows, n = len(q), k.shape[1]
    kept = None if _all_seen(rows, n, i, j, f) else _kept(rows, n, i, j, f)
    distance = None if f.alibi_slopes is None else _positions(j, j + n) - _positions(i, i + rows)[:, None]
    return _softmax(q, k, v, scale, kept, f, distance)


def _sparse_sequence(
    q: Tensor, first: int, n: int, cache: _Cache, block_table: Tensor, scale: float, f: Features
) -> tuple[Tensor, Tensor]:
    """:func:`_sequence` with the block-sparse mask: reads only blocks that some row and head of a tile sees."""
    assert f.block_sparse is not None
    q, B, (rows, K, G, _) = q.to(cache.dtype), cache.paged.block_size, q.shape
    sparse = masks.check_block_sparse(f.block_sparse, B)
    offsets = torch.tensor(masks.block_sparse_offsets(sparse, K * G, K), device="cpu").view(K, G, 1, 1)
    total = _nothing(q, cache.value.tokens)
    # Heads with one pattern are computed together; else each key/value head skips its own blocks.
    together = bool((offsets == offsets[0, 0]).all())
    groups = [(slice(0, K), cache)] if together else [(slice(h, h + 1), head) for h, head in enumerate(cache.heads)]
    for r in range(0, rows, sparse.block_size):
        tile = slice(r, min(r + sparse.block_size, rows))
        i = _positions(first + tile.start, first + tile.stop)[:, None]
        kb = _positions(0, int(i[-1]) + 1, B) // sparse.block_size
        near = kb > int(i[0]) // sparse.block_size - sparse.local_blocks
        for heads, group in groups:
            far = ((kb + offsets[heads]) % sparse.vert_stride == 0).flatten(0, 2).any(0)
            seen = (near | far).nonzero().squeeze(1)
            for blocks in seen.split(group.blocks_per_chunk) if len(seen) else ():
                j = (blocks[:, None] * B + _positions(0, B)).flatten()
                k, v = (plane[:, : len(j)] for plane in group.read(block_table[blocks]))
                v.masked_fill_((j >= n)[:, None], 0.0)  # the tail of the last block: 0 * NaN would be NaN
                kept = masks.causal(i, j) & masks.block_sparse(i, j, offsets[heads], sparse)  # [K, G, q, n]
                _merge_into(total, tile, _softmax(q[tile, heads], k, v, scale, kept, f), heads)
    return total


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Tensor | None, f: Features, distance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``softmax(logits) v`` by matmuls; kept and distance (j - i) are ``[..., q, n]``; lse is float32."""
    K, G = q.shape[1:3]
    # The query heads of a group are rows of one matmul: broadcasting would copy the keys for each head.
    logits = torch.bmm((q.permute(1, 2, 0, 3) * scale).flatten(1, 2), k.mT).unflatten(1, (G, -1))  # [K, G, q, n]
    if f.soft_cap:
        logits = logits.div_(f.soft_cap).tanh_().mul_(f.soft_cap)
    if distance is not None and f.alibi_slopes is not None:
        logits += f.alibi_slopes.view(K, G, 1, 1) * distance
    if kept is not None:
        logits = logits.masked_fill_(~kept, -torch.inf)
    lse = logits.logsumexp(3)
    weights = logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    out = torch.bmm(weights.flatten(1, 2), v).unflatten(1, (G, -1))
    if kept is not None and _may_have_nan(out):  # perhaps from a hidden value: 0 * NaN is NaN
        out = torch.bmm(weights.flatten(1, 2), v.where(v.isfinite(), 0.0)).unflatten(1, (G, -1))
        seen = kept.expand(weights.shape).to(v.dtype).flatten(1, 2)
        for number, where in ((torch.inf, v == torch.inf), (-torch.inf, v == -torch.inf), (torch.nan, v.isnan())):
            reached = torch.bmm(seen, where.to(v.dtype)).view(out.shape) > 0
            out = out + torch.zeros_like(out).masked_fill_(reached, number)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1).float()


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of rows that have seen no key yet."""
    empty = functools.partial(q.new_full, dtype=torch.float32)
    return empty((*q.shape[:3], v.shape[-1]), 0.0), empty(q.shape[:3], -torch.inf)


def _merge_into(
    total: tuple[Tensor, Tensor], rows: slice, part: tuple[Tensor, Tensor], heads: slice = slice(None)
) -> None:
    """Merge a partial result into the running one, in place.

    A few rows at a time: they stay in the processor's cache, and no large buffer is allocated.
    """
    (out, lse), (part_out, part_lse) = (each[rows, heads] for each in total), part
    share, step = _share(part_lse, lse), max(1, MERGED_ELEMENTS // max(1, out[0].numel()))
    for tile, part_tile, share_tile in zip(*(each.split(step) for each in (out, part_out, share)), strict=True):
        tile.copy_(tile.float().lerp_(part_tile.float(), share_tile))
    torch.logaddexp(lse, part_lse, out=lse)


def _opened(i: int, rows: int, f: Features) -> list[tuple[int, int]]:
    """The bidirectional ranges that contain any of the rows from position i; f holds the ranges of one sequence."""
    pairs = () if f.bidirectional_ranges is None else f.bidirectional_ranges.tolist()
    return [(a, b) for a, b in pairs if 0 <= a < b and a < i + rows and i < b]


def _reach(i: int, rows: int, f: Features) -> tuple[int, int]:
    """The interval of keys that the rows from position i see with causality: its first key and its end."""
    starts, ends = zip((_oldest_key(i, f), i + rows), *_opened(i, rows, f), strict=True)
    return starts[0] if f.ranges_in_window else min(starts), max(ends)


def _oldest_key(i: int, f: Features) -> int:  # ignores bidirectional ranges
    return masks.oldest_key(i, f.sliding_window, f.attention_chunk)


def _all_seen(rows: int, n: int, i: int, j: int, f: Features) -> bool:
    """Whether all rows from position i see all n keys from position j."""
    if not masks_in_use(f) <= BOUNDED:
        return False
    return not f.causal or (j + n - 1 <= i and _oldest_key(i + rows - 1, f) <= j)


def _kept(rows: int, n: int, i: int, j: int, f: Features) -> Tensor:
    ranges = None if f.bidirectional_ranges is None else f.bidirectional_ranges[None]
    own = f._replace(bidirectional_ranges=ranges)
    return kept_keys(own, 0, _positions(i, i + rows), _positions(j, j + n), 1, 1, 1)[0]


def _positions(start: int, end: int, step: int = 1) -> Tensor:
    return torch.arange(start, end, step, dtype=torch.int64, device="cpu")


def _share(lse: Tensor, other: Tensor) -> Tensor:
    """The weight of a partial result in a merge, ``exp(lse) / (exp(lse) + exp(other))``; 0 if it is empty."""
    return torch.sub(lse, other).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)[..., None]
