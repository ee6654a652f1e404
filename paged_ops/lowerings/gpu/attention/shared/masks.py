"""Masks of the attention kernels, for Triton and for Gluon: which keys a row sees, and which key tiles it visits.

``i`` are positions of query rows, ``j`` of keys; N keys are a tile. MASKS is ``Masks`` of gpu/spec.py, ``numbers`` are
the call's numbers. A mask that is off compiles away. Gluon kernels call the same functions, with tensors of any layout.
Only vectors over ranges need a layout of their own there: :func:`widen_by_ranges` is a loop instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The masks that the functions here apply, by the names of spec.Masks. A Gluon kernel names its own.
MASKS_APPLIED = frozenset({"causal", "window", "chunk", "ranges", "sparse", "pattern", "first", "later"})


class KeyTiles(NamedTuple):
    """The tiles of keys that a tile of query rows visits."""

    count: Any  # of tiles, at least one
    end: Any
    full_start: Any  # the range of tiles that need no mask
    full_end: Any
    oldest: Any  # no row sees a key before it


@triton.jit
def keep(rows, j, live, numbers, MASKS: tl.constexpr):
    """Whether query rows (:class:`Rows` of tile.py) see keys at ``j``, of which ``live`` exist; operands broadcast."""
    if rows.sees is None:
        kept = keep_in_order(rows.i, j, live, numbers, MASKS)
    else:
        kept = live & (j >= rows.sees[0]) & (j < rows.sees[1])
        if MASKS.first:
            kept = kept | keep_in_order(rows.i, j, live, numbers, MASKS)
    if MASKS.sparse:
        PATTERN: tl.constexpr = MASKS.pattern
        block = j // PATTERN.block
        near = rows.i // PATTERN.block - block < PATTERN.local_blocks
        kept = kept & (near | ((block + rows.offset) % PATTERN.vert_stride == 0))
    return kept


@triton.jit
def keep_in_order(i, j, live, numbers, MASKS: tl.constexpr):
    """Whether queries at positions ``i`` see keys at ``j`` by causality, window and chunk."""
    kept = live
    if MASKS.causal:
        kept = kept & (j <= i)
    if MASKS.window:
        near = i - j < numbers.window
        if MASKS.first:
            near = near | (j < MASKS.first)
        kept = kept & near
    if MASKS.chunk:
        kept = kept & (i // numbers.chunk == j // numbers.chunk)
    return kept


@triton.jit
def stripe_offset(head, MASKS: tl.constexpr):
    """The offset of the block-sparse stripes of query heads."""
    PATTERN: tl.constexpr = MASKS.pattern
    return PATTERN.first_offset + head // PATTERN.heads * PATTERN.offset_step


@triton.jit
def next_seen_tile(tile, first_i, offset, MASKS: tl.constexpr, N: tl.constexpr):
    """The first of the tiles of N keys from ``tile`` on in which a row may see a key by a block-sparse pattern.

    The rows' positions are at least ``first_i``; the first row sees most local blocks. Their heads have ``offset``.
    """
    PATTERN: tl.constexpr = MASKS.pattern
    block = tile * N // PATTERN.block
    near = tl.maximum(block, first_i // PATTERN.block - PATTERN.local_blocks + 1)
    stripe = tl.min(block + (PATTERN.vert_stride - 1 - (block + offset - 1) % PATTERN.vert_stride), 0)
    return tl.maximum(tile, tl.minimum(near, stripe) * PATTERN.block // N)


@triton.jit
def oldest_key(first_i, numbers, MASKS: tl.constexpr):
    """The first key that the query at ``first_i``, and so any later query, may see by window and chunk."""
    first_i = tl.maximum(first_i, 0)
    oldest = first_i * 0
    if MASKS.window:
        oldest = tl.maximum(oldest, first_i - numbers.window + 1)
    if MASKS.chunk:
        oldest = tl.maximum(oldest, first_i // numbers.chunk * numbers.chunk)
    return oldest


class Hidden(NamedTuple):
    """The keys ``start : oldest``, which no row of a tile sees. Without first tokens the start is 0."""

    start: Any
    oldest: Any
    first_tile: Any  # of the walk


@triton.jit
def hidden_keys(oldest, first_i, first_tile, walk_i, numbers, MASKS: tl.constexpr):
    """:class:`Hidden` for rows from position ``first_i`` on, in a walk over the key tiles of rows from ``walk_i`` on,
    which begins with ``first_tile`` of :func:`first_key_tile`. ``oldest``: of :func:`oldest_key`, or of ranges."""
    start, _ = first_tokens(oldest, walk_i, numbers, MASKS)
    _, oldest = first_tokens(oldest, first_i, numbers, MASKS)
    return Hidden(start, oldest, first_tile)


@triton.jit
def first_tokens(oldest, first_i, numbers, MASKS: tl.constexpr):
    """The end of the first tokens that rows from position ``first_i`` on see past their window, and ``oldest``. If
    their chunk begins among the first tokens, they see all keys from there on."""
    FIRST: tl.constexpr = MASKS.first
    end = FIRST
    if FIRST and MASKS.chunk:
        of_chunk = tl.maximum(first_i, 0) // numbers.chunk * numbers.chunk
        oldest = tl.where((of_chunk > 0) & (of_chunk < FIRST), tl.minimum(oldest, of_chunk), oldest)
        end = tl.where(of_chunk > 0, 0, FIRST)
    return end, oldest


@triton.jit
def first_key_tile(oldest, first_i, numbers, MASKS: tl.constexpr, N: tl.constexpr):
    """The first key tile of rows from position ``first_i`` on. A walk counts the tiles from here to the newest one;
    :func:`place_of` says where each tile lies."""
    end, oldest = first_tokens(oldest, first_i, numbers, MASKS)
    tile = oldest // N
    if MASKS.first:
        tile = tl.maximum(tile - tl.cdiv(end, N), 0)
    return tile


@triton.jit
def place_of(tile, hidden, MASKS: tl.constexpr, N: tl.constexpr):
    """The tile of the sequence at a place of a walk: the first tokens' tiles come right before the others."""
    if MASKS.first:
        at = tile - hidden.first_tile
        tile = tl.where(at < tl.cdiv(hidden.start, N), at, tile)
    return tile


@triton.jit
def place_at(at, UNIT: tl.constexpr, oldest, MASKS: tl.constexpr, N: tl.constexpr):
    """:func:`place_of` without a chunk, for tiles (UNIT 1) or keys (UNIT N). No row sees keys between the first tokens
    and key ``oldest``."""
    if MASKS.first:
        FIRST: tl.constexpr = MASKS.first
        from_first = at - first_key_tile(oldest, 0, None, MASKS, N) * UNIT
        at = tl.where(from_first < tl.cdiv(FIRST, N) * UNIT, from_first, at)
    return at


@triton.jit
def only_seen(live, j, KEYS: tl.constexpr, hidden, MASKS: tl.constexpr):
    """``live``, but False where no row sees any of the ``KEYS`` keys from j on: their blocks may be freed."""
    if MASKS.window or MASKS.chunk:
        if KEYS == 1:
            seen = j >= hidden.oldest
        else:
            seen = j + KEYS > hidden.oldest
        if MASKS.first:
            seen = seen | (j < hidden.start)
        live = live & seen
    return live


@triton.jit
def ranges_at(bidirectional_ranges, RANGES: tl.constexpr):
    """The addresses for :class:`Batch`. Only called if there are ranges: in triton 3.6 a function cannot return
    None."""
    n = tl.arange(0, triton.next_power_of_2(RANGES))
    return bidirectional_ranges + tl.minimum(n, RANGES - 1) * 2


@triton.jit
def reach_of_ranges(ranges, s, first_i, end_i, low, high, MASKS: tl.constexpr):
    """Widen the keys ``low : high`` of queries ``first_i : end_i`` of sequences ``s``, all of one shape, by the
    bidirectional ranges that hold one of these queries; only ``high``, if ranges add only later keys.

    The ranges that hold a query also hold its own key, so all keys that it sees are one interval.
    """
    AXIS: tl.constexpr = len(low.shape)
    at = ranges + tl.expand_dims((s + first_i * 0).to(tl.int64), AXIS) * (MASKS.ranges * 2)
    start = tl.load(at)
    end = tl.load(at + 1)
    holds = (start >= 0) & (start < end)
    holds = holds & (start < tl.expand_dims(end_i, AXIS)) & (end > tl.expand_dims(first_i, AXIS))
    if not MASKS.later:
        low = tl.minimum(low, tl.min(tl.where(holds, start, 2147483647), AXIS))
    high = tl.maximum(high, tl.max(tl.where(holds, end, -1), AXIS))
    return low, high


@triton.jit
def reach_of_rows(batch, s, i, MASKS: tl.constexpr):
    """The first key that each of the rows at positions ``i [M]`` of sequence ``s`` sees, and the end of those: ``[M]``
    each, with all masks."""
    return reach_of_ranges(batch.ranges, s, i, i + 1, oldest_key(i, batch.numbers, MASKS), i + 1, MASKS)


@triton.jit
def seen_whole(sees, first_i, last_i, seq_len, first_tile, numbers, MASKS: tl.constexpr, N: tl.constexpr):
    """For a walk from ``first_tile`` on of rows ``first_i`` to ``last_i``, which see the keys ``sees`` if there are
    ranges: the range of tiles that every row sees whole, empty for a mask with holes, and the end of the walk."""
    newest = seq_len
    full_end = seq_len // N
    if MASKS.ranges:
        newest = tl.minimum(seq_len, tl.max(sees[1], 0))
        full_end = tl.minimum(tl.maximum(tl.min(sees[1], 0), 0) // N, full_end)
    elif MASKS.causal:
        newest = tl.minimum(seq_len, last_i + 1)
        full_end = tl.maximum(first_i + 1, 0) // N
    end_tile = tl.maximum(tl.cdiv(newest, N), first_tile)
    if MASKS.ranges:
        full_first = tl.cdiv(tl.max(sees[0], 0), N)
    else:
        full_first = tl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    full_first = tl.minimum(tl.maximum(full_first, first_tile), end_tile)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end_tile)
    return full_first, full_end, end_tile


@triton.jit
def widen_by_ranges(ranges, s, first_i, last_i, low, end, MASKS: tl.constexpr):
    """As :func:`reach_of_ranges`, for queries ``first_i`` to ``last_i`` of one sequence, or one by one."""
    for n in range(MASKS.ranges):
        at = ranges + (s.to(tl.int64) * MASKS.ranges + n) * 2
        start = tl.load(at)
        stop = tl.load(at + 1)
        holds = (start >= 0) & (start < stop) & (start <= last_i) & (stop > first_i)
        if not MASKS.later:
            low = tl.where(holds, tl.minimum(low, start), low)
        end = tl.where(holds, tl.maximum(end, stop), end)
    return low, end


@triton.jit
def full_tiles(first_i, last_i, seq_len, numbers, MASKS: tl.constexpr, N: tl.constexpr):
    """The range of the tiles that rows ``first_i`` to ``last_i`` see whole, and the oldest key that a row sees; all
    without ranges."""
    full_start = 0
    oldest = 0
    full_end = seq_len // N
    if MASKS.causal:
        full_end = tl.minimum(tl.maximum(first_i + 1, 0) // N, full_end)
    if MASKS.window or MASKS.chunk:
        oldest = oldest_key(first_i, numbers, MASKS)
        full_start = tl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    return full_start, full_end, oldest


@triton.jit
def key_tiles(s, first_i, last_i, seq_len, ranges, numbers, MASKS: tl.constexpr, N: tl.constexpr):
    """:class:`KeyTiles` of rows ``first_i`` to ``last_i`` of sequence s. ``ranges``: the tensor of all sequences."""
    full_start, full_end, oldest = full_tiles(first_i, last_i, seq_len, numbers, MASKS, N)
    newest = seq_len
    if MASKS.causal:
        newest = tl.minimum(seq_len, last_i + 1)
    opened = seq_len
    if MASKS.ranges:
        opened, newest = widen_by_ranges(ranges, s, first_i, last_i, opened, newest, MASKS)
        newest = tl.minimum(newest, seq_len)
    end = tl.maximum(tl.cdiv(newest, N), 1)  # one masked tile, if no key is seen
    count = end
    if MASKS.window or MASKS.chunk:
        if MASKS.ranges:
            oldest = tl.minimum(oldest, opened)
        count = tl.maximum(end - first_key_tile(oldest, first_i, numbers, MASKS, N), 1)
    return KeyTiles(count, end, full_start, full_end, oldest)


@triton.jit
def needs_mask(tile, full_start, full_end, MASKS: tl.constexpr):
    """Whether some row does not see some key of a tile."""
    masked = tile >= full_end
    if MASKS.window or MASKS.chunk:
        masked = masked | (tile < full_start)
    return masked


@triton.jit
def keys_of_rows(i, s, ranges, numbers, MASKS: tl.constexpr):
    """The first key and, if causal, the last key that each row at positions i sees, for :func:`keep_seen`."""
    low = i
    if MASKS.window or MASKS.chunk:
        low = oldest_key(i, numbers, MASKS)
    if MASKS.ranges:
        low, end = widen_by_ranges(ranges, s, i, i, low, i + 1, MASKS)
        i = end - 1
    return low, i


@triton.jit
def keep_seen(j, low, i, seq_len, MASKS: tl.constexpr):
    """Whether rows see keys at j, from :func:`keys_of_rows`; operands broadcast."""
    kept = j < seq_len
    if MASKS.causal:
        kept = kept & (j <= i)
    if MASKS.first:
        kept = kept & ((j >= low) | (j < MASKS.first))
    elif MASKS.window or MASKS.chunk:
        kept = kept & (j >= low)
    return kept
