"""The consumers of the Hopper kernels: matmuls and softmax of 64 query rows of an item per warpgroup.

Letters, and the roles of warps: see dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_ops.lowerings.gpu.attention.hopper.head_chunks import (
    WARPGROUP,
    column_in_pair,
    first_in_part,
    first_of,
    part_with,
    pieces_of,
    value_pieces_of,
    widths_of,
)
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, release, release_each, stage_of, wait_full
from paged_ops.lowerings.gpu.attention.hopper.softmax import (
    LEAST,
    by_threads,
    normaliser,
    rows_by_threads,
    rows_layout,
    scaled_if_raised,
    softmax_tile,
)
from paged_ops.lowerings.gpu.attention.hopper.work import OLDEST, column_of, field_of, head_of, next_tiles, read_item
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, keys_of_rows, needs_mask, place_at

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


class Rows(NamedTuple):
    """A consumer's query rows of an item."""

    which: Any  # of the consumers
    tile: Any  # of query rows, in shared memory
    i: Any  # the last key that each row sees, if causal
    low: Any  # the first
    factor: Any  # of scores, to base 2; of each row, or one number
    cap: Any  # soft cap: cap[0] * tanh(cap[1] * score); cap[1] of each row, or one number


class Sums(NamedTuple):
    """A consumer's results of the key tiles so far."""

    acc: Any  # the sums of weighted values, a tuple: each has some columns
    p16: Any  # the weights of the last tile, whose values are not added yet
    m: Any  # the maxima in use, see softmax.py
    l: Any  # each thread's sums of weights


@gluon.jit
def as_column(factor, BY_ROWS: gl.constexpr):
    """A factor of scores ``[M, N]``, which is one number, or one per row."""
    if BY_ROWS:
        factor = factor[:, None]
    return factor


@gluon.jit
def factor_of(numbers, SPEC: gl.constexpr):
    """The factor of scores, to base 2, and the soft cap."""
    factor = numbers.scale * LOG2E
    cap = (0.0, 0.0)
    if SPEC.logits.soft_cap:
        factor = 1.0
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    return factor, cap


@gluon.jit
def apply_soft_cap(scores, cap):
    """``cap[0] * tanh(cap[1] * scores)``, to base 2."""
    return cap[0] - 2.0 * cap[0] / (gl.exp2(scores * cap[1]) + 1.0)


@gluon.jit
def hide(scores, low, i, j, seq_len, MASKS: gl.constexpr):
    """-inf in place of the scores of keys ``j`` that a row does not see."""
    return gl.where(keep_seen(j[None, :], low[:, None], i[:, None], seq_len, MASKS), scores, float("-inf"))


@gluon.jit
def positions(item, which: gl.constexpr, G: gl.constexpr, layout: gl.constexpr):
    """Of a consumer's rows, among the keys."""
    first_i = item.seq_len - item.q_len + item.first_token
    return first_i + (which * WARPGROUP + gl.arange(0, WARPGROUP, layout)) // G


@gluon.jit
def multiply_keys(shared, q_tile, at, PIECES: gl.constexpr):
    """Begin the matmul of query rows and the at-th tile of keys: the scores."""
    N: gl.constexpr = shared.k.tiles[0].shape[1]
    stage = stage_of(shared.k.ring, at)
    s = gl.full([WARPGROUP, N], 0.0, gl.float32, sums_layout(N))
    for n in gl.static_range(len(PIECES)):
        if len(shared.k.tiles) == len(PIECES):
            k_tile = shared.k.tiles[n].index(stage).permute((1, 0))
        else:  # a pair
            k_tile = shared.k.tiles[0].index(stage).permute((1, 0))
            k_tile = k_tile.slice(column_in_pair(PIECES, n), PIECES[n], dim=0)
        s = warpgroup_mma(shared.q_tiles[n].index(q_tile), k_tile, s, use_acc=n > 0, is_async=True)
    return s


@gluon.jit
def multiply_values(p16, values, at, acc, PARTS: gl.constexpr):
    """Begin to add the matmuls of weights and the at-th tile of values to ``acc``, each of whose tensors has some
    columns."""
    WIDTHS: gl.constexpr = widths_of(PARTS)
    stage = stage_of(values.ring, at)
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        if len(values.tiles) == len(PARTS):
            v_tile = values.tiles[part_with(PARTS, n)].index(stage)
            v_tile = v_tile.slice(first_in_part(PARTS, n), WIDTHS[n], dim=1)
        else:  # a pair in pieces
            v_tile = values.tiles[0].index(stage).slice(column_in_pair(PARTS, n), WIDTHS[n], dim=1)
        # The weights stay where they are: sums of any width want the same registers.
        weights = gl.convert_layout(p16, gl.DotOperandLayout(0, acc[n].type.layout, 2))
        made += (warpgroup_mma(weights, v_tile, acc[n], is_async=True),)
    return made


@gluon.jit
def wait_for(acc, PARTS: gl.constexpr):
    """Wait for all matmuls."""
    if len(widths_of(PARTS)) == 1:
        made = (warpgroup_mma_wait(0, deps=acc),)
    else:
        made = warpgroup_mma_wait(0, deps=acc)
    return made


@gluon.jit
def scaled(acc, factors, PARTS: gl.constexpr):
    """Sums times a factor per row."""
    made: gl.tuple = ()
    for n in gl.static_range(len(widths_of(PARTS))):
        made += (acc[n] * gl.convert_layout(factors, gl.SliceLayout(1, acc[n].type.layout))[:, None],)
    return made


@gluon.jit
def take_turn(turns, which: gl.constexpr, n):
    """Wait for a consumer's n-th turn to begin matmuls, if there are turns."""
    if turns is not None:
        mbarrier.wait(turns[which].index(0), (n & 1) ^ (which == 0))


@gluon.jit
def pass_turn(turns, which: gl.constexpr):
    """The other consumer's turn, if there are turns."""
    if turns is not None:
        async_copy.mbarrier_arrive(turns[1 - which].index(0), increment_count=False)


@gluon.jit
def zero_values(
    values, at, row: gl.constexpr, rows: gl.constexpr, j, low, end, PARTS: gl.constexpr, FIRST: gl.constexpr = 0
):  # fmt: skip
    """Zero the values of keys outside ``low : end`` in some rows of the at-th tile; the first of these rows is key j.
    No query row sees them and their weights are 0, but 0 * NaN would be NaN. FIRST tokens stay."""
    for n in gl.static_range(len(PARTS)):
        zero_rows(values.tiles[n].index(stage_of(values.ring, at)).slice(row, rows, dim=0), j, low, end, FIRST)


@gluon.jit
def zero_rows(values, j, low, end, FIRST: gl.constexpr = 0):
    """Zero rows ``[rows, columns]`` outside ``low : end``, but not of the FIRST tokens; the first row is key j."""
    COLUMNS: gl.constexpr = min(values.shape[1], 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    keys = j + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    kept = (keys >= low) & (keys < end)
    if FIRST:
        kept = kept | (keys < FIRST)
    values.store(gl.where(kept[:, None], values.load(layout), 0.0))


@gluon.jit
def zero_past(which: gl.constexpr, n, total, item, shared, SHAPE: gl.constexpr):
    """Zero the values past the sequence, which may be NaN, in the newest tile of the n-th item, the total-th: the first
    consumer does it for all."""
    N: gl.constexpr = SHAPE.N
    V_PARTS: gl.constexpr = SHAPE.v.parts
    past = item.end_tile * N > item.seq_len
    if past:
        wait_full(shared.v.ring, total)
        if which == 0:
            zero_values(shared.v, total, 0, N, (item.end_tile - 1) * N, 0, item.seq_len, V_PARTS)
            fence_async_shared()
    if which == 0:
        fill(shared.newest_clean, n)
    if past:
        wait_full(shared.newest_clean, n)


@gluon.jit
def zero_before(which: gl.constexpr, at, first, oldest, item, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Zero the values in the at-th tile, which begins with key ``first``, that no row sees, as key ``oldest`` is the
    oldest that one sees besides the first tokens."""
    FIRST: gl.constexpr = SPEC.masks.first
    V_PARTS: gl.constexpr = SHAPE.v.parts
    wait_full(shared.v.ring, at)
    if which == 0:
        # 16 rows at a time, as the registers are full of sums
        for part in gl.static_range(SHAPE.N // 16):
            begin = first + part * 16
            if begin < oldest:
                zero_values(shared.v, at, part * 16, 16, begin, oldest, item.seq_len, V_PARTS, FIRST)
        fence_async_shared()


@gluon.jit
def zero_hidden(which: gl.constexpr, n, total, item, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """:func:`zero_before` in the oldest tile, the last of the n-th item; with first tokens, in the tile of the oldest
    key and in the next one, which comes last among the first tokens'."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    first, oldest = (item.end_tile - item.tiles) * N, field_of(shared, n, OLDEST, 4)
    if MASKS.first:
        hidden = oldest > MASKS.first
        for each in gl.static_range(2):
            t = item.end_tile - 1 - oldest // N + each
            first = place_at((item.end_tile - 1 - t) * N, N, oldest, MASKS, N)
            if hidden & (t >= 0) & (t < item.tiles):
                zero_before(which, total + t, first, oldest, item, shared, SPEC, SHAPE)
    else:
        hidden = first < oldest
        if hidden:
            zero_before(which, total + item.tiles - 1, first, oldest, item, shared, SPEC, SHAPE)
    if which == 0:
        fill(shared.oldest_clean, n)
    if hidden:
        wait_full(shared.oldest_clean, n)


@gluon.jit
def step(
    sums, at, tile, item, n, rows, batch, which: gl.constexpr, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Computes the scores of the next key tile, the at-th, while the matmul with the previous tile's values runs."""
    PIECES: gl.constexpr = pieces_of(SHAPE.k.size)
    V_PIECES: gl.constexpr = value_pieces_of(SHAPE.v.parts, SHAPE.v.size)
    MASKS: gl.constexpr = SPEC.masks
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    wait_full(shared.k.ring, at)
    take_turn(shared.turns, which, at - 1 - n)
    s = multiply_keys(shared, rows.tile, at, PIECES)
    wait_full(shared.v.ring, at - 1)
    acc = multiply_values(sums.p16, shared.v, at - 1, sums.acc, V_PIECES)
    pass_turn(shared.turns, which)
    s = warpgroup_mma_wait(len(widths_of(V_PIECES)), deps=[s])
    release_each(shared.k.ring, at)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and it would no longer run
    # during the matmul with the values.
    tile = place_at(tile, 1, item.oldest, MASKS, SHAPE.N)
    if SOFT_CAP:
        s = apply_soft_cap(s, (rows.cap[0], as_column(rows.cap[1], BY_ROWS)))
    if needs_mask(tile, item.full_start, item.full_end, MASKS):
        j = tile * SHAPE.N + gl.arange(0, SHAPE.N, gl.SliceLayout(0, s.type.layout))
        low, i = rows.low, rows.i
        if SHAPE.M > 2 * WARPGROUP and not MASKS.ranges:  # again for each such tile, as registers are few
            layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
            low, i = keys_of_rows(positions(item, rows.which, SPEC.G, layout), 0, None, batch.numbers, MASKS)
        s = hide(s, low, i, j, item.seq_len, MASKS)
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows.factor, BY_ROWS and not SOFT_CAP)
    else:
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows.factor, BY_ROWS and not SOFT_CAP)
    acc = wait_for(acc, V_PIECES)
    release_each(shared.v.ring, at - 1)
    p16 = gl.convert_layout(p.to(sums.p16.dtype), sums.p16.type.layout)
    made: gl.tuple = ()
    for n in gl.static_range(len(acc)):
        made += (scaled_if_raised(acc[n], decay),)
    return Sums(made, p16, m, sums.l * decay + l_tile)


@gluon.jit
def zero_sums(WIDTHS: gl.constexpr):
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        made += (gl.full([WARPGROUP, WIDTHS[n]], 0.0, gl.float32, sums_layout(WIDTHS[n])),)
    return made


@gluon.constexpr_function
def sums_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def store_columns(
    acc, item, place, batch, which: gl.constexpr, FIRST: gl.constexpr, PART: gl.constexpr, SPEC: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Write some columns of the rows. PART: to a place among the parts."""
    G: gl.constexpr = SPEC.G
    layout: gl.constexpr = acc.type.layout
    r = which * WARPGROUP + gl.arange(0, WARPGROUP, gl.SliceLayout(1, layout))
    live = (r < SHAPE.M // G * G) & (r // G < item.q_len - item.first_token)
    if PART:
        to = batch.tensors.parts
        row = place.to(gl.int64) * SHAPE.M + r
    else:
        to = batch.tensors.out
        row = (item.row_start.to(gl.int64) + item.first_token + r // G) * (SPEC.K * G)
        row = row + head_of(item, SHAPE) * G + r % G
    d = FIRST + column_of(item, SHAPE) + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    if acc.shape[1] > SPEC.v_side.size:  # a pair
        d -= gl.where(d < acc.shape[1] // 2, 0, acc.shape[1] - SPEC.v_side.size)
    at = to + row[:, None] * SPEC.v_side.size + d[None, :]
    gl.store(at, acc.to(to.dtype.element_ty), mask=live[:, None])


@gluon.jit
def store_item(
    acc, lse2, item, place, batch, which: gl.constexpr, PART: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Write the result and the lse of a consumer's rows. PART: to a place among the parts."""
    G: gl.constexpr = SPEC.G
    WIDTHS: gl.constexpr = widths_of(value_pieces_of(SHAPE.v.parts, SHAPE.v.size))
    for n in gl.static_range(len(WIDTHS)):
        store_columns(acc[n], item, place, batch, which, first_of(WIDTHS, n, SHAPE.v.size), PART, SPEC, SHAPE)
    if SPEC.lse or PART:
        r = which * WARPGROUP + gl.arange(0, WARPGROUP, lse2.type.layout)
        token = item.first_token + r // G
        live = (r < SHAPE.M // G * G) & (token < item.q_len)
        if PART:
            gl.store(batch.tensors.part_lse + place * SHAPE.M + r, lse2, mask=live)
        else:
            row = (item.row_start + token).to(gl.int64) * (SPEC.K * G) + head_of(item, SHAPE) * G + r % G
            gl.store(batch.tensors.lse + row, lse2 * LN2, mask=live)


@gluon.jit
def skip(item, total, shared, which: gl.constexpr = 0, n=0):
    """Release the tiles of the n-th item, and pass on its turns, if a consumer has no rows in it."""
    for t in range(item.tiles):
        wait_full(shared.k.ring, total + t)
        if t > 0:
            take_turn(shared.turns, which, total + t - 1 - n)
            pass_turn(shared.turns, which)
        release_each(shared.k.ring, total + t)
        wait_full(shared.v.ring, total + t)
        release_each(shared.v.ring, total + t)


@gluon.jit
def attend(
    item, n, total, factor, cap, which: gl.constexpr, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """A consumer's rows of the n-th item, whose tiles are the total-th and following: scores times ``factor``."""
    PIECES: gl.constexpr = pieces_of(SHAPE.k.size)
    tensors, numbers = batch.tensors, batch.numbers
    MASKS: gl.constexpr = SPEC.masks
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    N: gl.constexpr = SHAPE.N
    V_PARTS: gl.constexpr = SHAPE.v.parts
    V_PIECES: gl.constexpr = value_pieces_of(V_PARTS, SHAPE.v.size)
    WIDTHS: gl.constexpr = widths_of(V_PIECES)
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    ROW_SLOTS: gl.constexpr = SHAPE.row_slots
    s_layout: gl.constexpr = sums_layout(N)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    slot = stage_of(shared.item_ring, n)
    if shared.places is not None:
        place = gl.sum(shared.places.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    s_of = 0
    if MASKS.ranges:
        s_of = item.s
    i = positions(item, which, SPEC.G, s_rows)
    low, i = keys_of_rows(i, s_of, tensors.bidirectional_ranges, numbers, MASKS)
    if BY_ROWS:
        wait_full(shared.rows_full, n)
        of_rows = shared.row_factors.index(slot).slice(which * WARPGROUP, WARPGROUP).load(s_rows)
        if SOFT_CAP:
            cap = (cap[0], cap[1] * of_rows)
        else:
            factor = factor * of_rows
    sink = gl.full([WARPGROUP], float("-inf"), gl.float32, s_rows)
    if SPEC.logits.sinks:
        head = (which * WARPGROUP + gl.arange(0, WARPGROUP, s_rows)) % SPEC.G
        sink = gl.load(tensors.sinks + head_of(item, SHAPE) * SPEC.G + head) * LOG2E
        if shared.places is not None:  # the first part includes the sink
            sink = gl.where((place < 0) | (place % 2 == 1), sink, float("-inf"))
    acc = zero_sums(WIDTHS)

    # the last tile first: it needs the mask
    if shared.rows_full is not None and not BY_ROWS:
        wait_full(shared.rows_full, n)
    wait_full(shared.k.ring, total)
    q_tile = n % ROW_SLOTS * (SHAPE.M // WARPGROUP) + which
    s = warpgroup_mma_wait(0, deps=[multiply_keys(shared, q_tile, total, PIECES)])
    release_each(shared.k.ring, total)
    if SOFT_CAP:
        s = apply_soft_cap(s, (cap[0], as_column(cap[1], BY_ROWS)))
    j = place_at((item.end_tile - 1) * N, N, item.oldest, MASKS, N) + gl.arange(0, N, gl.SliceLayout(0, s_layout))
    s = hide(s, low, i, j, item.seq_len, MASKS)
    four: gl.constexpr = rows_layout(by_threads(s).type.layout)
    m = gl.full([WARPGROUP, 4], LEAST, gl.float32, four)
    if SPEC.logits.sinks:
        m = rows_by_threads(gl.maximum(sink, LEAST), four)
    if BY_ROWS and not SOFT_CAP:
        factor = rows_by_threads(factor, four)
    rows = Rows(which, q_tile, i, low, factor, cap)
    p, m, l, _decay = softmax_tile(s, m, factor, BY_ROWS and not SOFT_CAP)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(WIDTHS[0]), 2)
    p16 = gl.convert_layout(p.to(shared.q_tiles[0].dtype), p_layout)
    zero_past(which, n, total, item, shared, SHAPE)
    sums = Sums(acc, p16, m, l)
    last = total + item.tiles - 1
    # The oldest tile, which comes last, may begin before the keys that the rows see. With first tokens the next tile
    # may end after them: both are zeroed before the first of them is multiplied.
    at = item.tiles
    if MASKS.first:
        at = gl.minimum(gl.maximum(item.end_tile - item.oldest // N, 1), item.tiles)
    for t in range(1, at):
        sums = step(sums, total + t, item.end_tile - 1 - t, item, n, rows, batch, which, shared, SPEC, SHAPE)
    if MASKS.window or MASKS.chunk:
        zero_hidden(which, n, total, item, shared, SPEC, SHAPE)
    if MASKS.first:
        for t in range(at, item.tiles):
            sums = step(sums, total + t, item.end_tile - 1 - t, item, n, rows, batch, which, shared, SPEC, SHAPE)
    release(shared.item_ring, n)
    wait_full(shared.v.ring, last)
    acc = wait_for(multiply_values(sums.p16, shared.v, last, sums.acc, V_PIECES), V_PIECES)
    release_each(shared.v.ring, last)

    l = gl.convert_layout(gl.sum(sums.l, 1), s_rows)
    m = gl.convert_layout(gl.max(sums.m, 1), s_rows)
    if SPEC.logits.sinks:
        l += gl.where(sink > float("-inf"), gl.exp2(sink - m), 0.0)
    share, lse2 = normaliser(m, l)
    if tensors.v_scale is not None:
        share *= gl.load(tensors.v_scale)
    acc = scaled(acc, share, V_PIECES)
    if shared.places is None:
        store_item(acc, lse2, item, 0, batch, which, False, SPEC, SHAPE)
    elif place < 0:  # a whole unit
        store_item(acc, lse2, item, 0, batch, which, False, SPEC, SHAPE)
    else:
        store_item(acc, lse2, item, place, batch, which, True, SPEC, SHAPE)


@gluon.jit
def consumer(which: gl.constexpr, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """64 of the rows of each item: their matmuls, softmax and output."""
    factor, cap = factor_of(batch.numbers, SPEC)
    tiles = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    while tiles > 0:
        item = read_item(shared, n, tiles, 4)
        if which * WARPGROUP >= gl.minimum(SHAPE.M // SPEC.G, item.q_len - item.first_token) * SPEC.G:
            skip(item, total, shared, which, n)
            release(shared.item_ring, n)
        else:
            attend(item, n, total, factor, cap, which, batch, shared, SPEC, SHAPE)
        total += tiles
        n += 1
        tiles = next_tiles(shared, n, 4)
