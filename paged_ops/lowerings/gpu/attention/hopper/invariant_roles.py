"""The roles of hopper/invariant.py: its items and its consumers."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper.consumer import (
    Sums,
    multiply_keys,
    multiply_values,
    positions,
    release_tile,
    scaled,
    skip,
    store_item,
    sums_layout,
    wait_for,
    zero_sums,
    zero_values,
)
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP, first_of, widths_of
from paged_ops.lowerings.gpu.attention.hopper.producer import not_kept, take_items
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, release, wait_full
from paged_ops.lowerings.gpu.attention.hopper.work import Item, Work, item_at, light_programs, next_tiles, read_item
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, keys_of_rows, needs_mask
from paged_ops.lowerings.gpu.attention.shared.segments import fold_weights, segment_tiles, segments_of

LOG2E = gl.constexpr(1.4426950408889634)
ANY_LENGTH = gl.constexpr(1 << 30)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def lengths(s, live, batch):
    """The first row of sequences, their rows and their keys; 0 past the last sequence."""
    tensors = batch.tensors
    row_start = gl.load(tensors.query_start_loc + s, mask=live, other=0)
    q_len = gl.load(tensors.query_start_loc + s + 1, mask=live, other=0) - row_start
    return row_start, q_len, gl.load(tensors.seq_lens + s, mask=live, other=0)


@gluon.jit
def items_of(start, segmented, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, CUTS: gl.constexpr,
             SHAPE: gl.constexpr):  # fmt: skip
    """The items of a key/value head of sequences from ``start`` on, DIVISION.at_once of them, and the sequences."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [SHAPE.warps], [0])
    s = start + gl.arange(0, DIVISION.at_once, lanes)
    live = s < batch.numbers.S
    _row_start, q_len, seq_len = lengths(s, live, batch)
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    _tiles, units, whole = segments_of(q_len, seq_len, SPEC.G, TOKENS, DIVISION.rows, CUTS, SHAPE.N)
    return gl.where(live, gl.where(segmented, units, whole), 0), s


@gluon.jit
def total_items(segmented, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr):
    """The items of a key/value head of all sequences."""
    total = 0
    for start in range(0, batch.numbers.S, DIVISION.at_once):
        units, _s = items_of(start, segmented, batch, SPEC, DIVISION, CUTS, SHAPE)
        total += gl.sum(units, 0)
    return total


@gluon.jit
def item_of(at, work, batch, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The at-th item. Heads come first, then segments, or tiles of rows from the last one on, then sequences. Its field
    ``oldest`` is the place of its state; -1: it is a whole tile of rows."""
    CUTS: gl.constexpr = PLAN.cuts
    DIVISION: gl.constexpr = PLAN.division
    K: gl.constexpr = SPEC.K
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    segmented = work.short > 0
    kh = at % K
    unit = at // K
    s = 0
    before = 0
    passed_items = 0
    for start in range(0, batch.numbers.S, DIVISION.at_once):
        units, s_ = items_of(start, segmented, batch, SPEC, DIVISION, CUTS, SHAPE)
        passed = (passed_items + gl.associative_scan(units, 0, add) <= unit) & (s_ < batch.numbers.S)
        s += gl.sum(passed.to(gl.int32), 0)
        before += gl.sum(gl.where(passed, units, 0), 0)
        passed_items += gl.sum(units, 0)
    row_start = gl.load(batch.tensors.query_start_loc + s)
    q_len = gl.load(batch.tensors.query_start_loc + s + 1) - row_start
    seq_len = gl.load(batch.tensors.seq_lens + s)
    tiles, units, whole = segments_of(q_len, seq_len, SPEC.G, TOKENS, DIVISION.rows, CUTS, SHAPE.N)
    by_segment = segmented & (units > whole)
    first_token = gl.where(by_segment, 0, (whole - 1 - unit + before) * TOKENS)
    item = item_at(kh, s, row_start, q_len, seq_len, first_token, True, batch, SPEC, SHAPE)
    begin = gl.where(by_segment, (unit - before) * tiles, item.end_tile - item.tiles)
    # A segment that no row sees has one tile, masked like the last one of a sequence without keys.
    end = gl.where(by_segment, gl.maximum(gl.minimum(begin + tiles, item.end_tile), begin + 1), item.end_tile)
    place = gl.where(by_segment, at, -1)
    return Item(
        kh, s, row_start, q_len, seq_len, first_token, end - begin, end, item.full_start, item.full_end, place
    )  # fmt: skip


@gluon.jit
def scheduler(batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """Takes items, and copies their query rows."""
    CUTS: gl.constexpr = PLAN.cuts
    DIVISION: gl.constexpr = PLAN.division
    programs = gl.num_programs(0)
    units = total_items(programs > 0, batch, SPEC, DIVISION, CUTS, SHAPE)
    segmented = units * SPEC.K <= CUTS.states
    if not segmented:
        units = total_items(segmented, batch, SPEC, DIVISION, CUTS, SHAPE)
    few = light_programs(batch, ANY_LENGTH, programs, SPEC.G, DIVISION, DIVISION.rows, SHAPE.M, SHAPE.warps)
    counters = batch.tensors.taken
    if batch.tensors.arrived is not None:
        counters = batch.tensors.arrived
    work = Work(units, few, programs, counters, segmented.to(gl.int32))
    take_items(item_of, work, batch, shared, SPEC, PLAN, SHAPE, 1 if SHAPE.M == WARPGROUP else 2)


class Rows(NamedTuple):
    """A consumer's query rows of an item."""

    tile: Any  # of query rows, in shared memory
    i: Any  # the last key that each row sees, if causal
    low: Any
    at: Any  # their positions
    live: Any
    factor: Any  # of scores, to base 2


class State(NamedTuple):
    """A consumer's state of a segment, with all values added."""

    acc: Any
    m: Any
    l: Any  # each thread's sums of weights


class Total(NamedTuple):
    """The state of the segments that were folded; its sums are in the workspace."""

    m: Any
    l: Any


@gluon.jit
def softmax_tile(qk, m, rows, j, seq_len, MASKED: gl.constexpr, SPEC: gl.constexpr):
    """As ``softmax_tile`` of consumer.py, with each multiply-add written as one."""
    MASKS: gl.constexpr = SPEC.masks
    if MASKED:
        kept = keep_seen(j[None, :], rows.low[:, None], rows.i[:, None], seq_len, MASKS)
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * rows.factor
    p = gl.exp2(gl.fma(qk, rows.factor, -shift[:, None]))
    decay = gl.exp2(gl.fma(m, rows.factor, -shift))
    return p, m_new, thread_sums(p), decay


@gluon.jit
def thread_sums(p):
    """The sums over the columns of each thread."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def load_total(total, rows, which: gl.constexpr, batch, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the sums of the segments that were folded; 0 if there are none."""
    WIDTHS: gl.constexpr = widths_of(SHAPE.v.parts)
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        layout: gl.constexpr = sums_layout(WIDTHS[n])
        known = gl.convert_layout(rows.live & (total.m != float("-inf")), gl.SliceLayout(1, layout))[:, None]
        made += (gl.load(total_at(which, layout, n, batch, SPEC, CUTS, SHAPE), mask=known, other=0.0),)
    return made


@gluon.jit
def fold(total, before, acc, m, l, folds, factor, WIDTHS: gl.constexpr):
    """Fold a segment into the total of the rows that ``folds``: the new total, and its sums. A segment without keys
    changes no bit."""
    l_part = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    m_new, decay, weight = fold_weights(total.m, m, factor)
    takes = folds & (m != float("-inf"))
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        row_layout: gl.constexpr = gl.SliceLayout(1, acc[n].type.layout)
        decays = gl.convert_layout(decay, row_layout)[:, None]
        weights = gl.convert_layout(weight, row_layout)[:, None]
        after = gl.fma(before[n], decays, acc[n] * weights)
        made += (gl.where(gl.convert_layout(takes, row_layout)[:, None], after, before[n]),)
    l = gl.where(takes, gl.fma(total.l, decay, l_part * weight), total.l)
    return Total(gl.where(takes, m_new, total.m), l), made


@gluon.jit
def total_at(which: gl.constexpr, layout: gl.constexpr, n: gl.constexpr, batch, SPEC: gl.constexpr,
             CUTS: gl.constexpr, SHAPE: gl.constexpr):  # fmt: skip
    """The addresses of some columns of a consumer's total."""
    Dv: gl.constexpr = SPEC.v_side.size
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    r = gl.program_id(0) * SHAPE.M + which * WARPGROUP + gl.arange(0, WARPGROUP, gl.SliceLayout(1, layout))
    d = first_of(WIDTHS, n, Dv) + gl.arange(0, WIDTHS[n], gl.SliceLayout(0, layout))
    return not_kept(batch.tensors.parts) + CUTS.states * CUTS.rows * Dv + r[:, None] * Dv + d[None, :]


@gluon.jit
def end_step(acc, p16, m, l, l_tile, decay, V_PARTS: gl.constexpr):
    """The state after a tile, from that before it with all its values."""
    decay_l = gl.convert_layout(decay, gl.SliceLayout(1, l_tile.type.layout))
    return Sums(scaled(acc, decay, V_PARTS), p16, m, gl.fma(l, decay_l[:, None], l_tile))


@gluon.jit
def first_step(s, state, tile, item, rows, dtype: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The state after the first tile of a segment, with scores ``s``; its values are not added yet."""
    MASKS: gl.constexpr = SPEC.masks
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    j = tile * SHAPE.N + gl.arange(0, SHAPE.N, gl.SliceLayout(0, s.type.layout))
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS) | (tile == item.end_tile - 1)
    if masked:
        p, m, l_tile, decay = softmax_tile(s, state.m, rows, j, item.seq_len, True, SPEC)
    else:
        p, m, l_tile, decay = softmax_tile(s, state.m, rows, j, item.seq_len, False, SPEC)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(WIDTHS[0]), 2)
    p16 = gl.convert_layout(p.to(dtype), p_layout)
    return end_step(state.acc, p16, m, state.l, l_tile, decay, V_PARTS)


@gluon.jit
def step(sums, at, tile, item, rows, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """As ``step`` of consumer.py."""
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    MASKS: gl.constexpr = SPEC.masks
    wait_full(shared.k.ring, at)
    s = multiply_keys(shared, rows.tile, at, K_PARTS)
    wait_full(shared.v.ring, at - 1)
    acc = multiply_values(sums.p16, shared.v, at - 1, sums.acc, V_PARTS)
    s = warpgroup_mma_wait(len(widths_of(V_PARTS)), deps=[s])
    release_tile(shared.k.ring, at, SHAPE)
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS)
    j = tile * SHAPE.N + gl.arange(0, SHAPE.N, gl.SliceLayout(0, s.type.layout))
    if masked:
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows, j, item.seq_len, True, SPEC)
    else:
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows, j, item.seq_len, False, SPEC)
    acc = wait_for(acc, V_PARTS)
    release_tile(shared.v.ring, at - 1, SHAPE)
    p16 = gl.convert_layout(p.to(sums.p16.dtype), sums.p16.type.layout)
    return end_step(acc, p16, m, sums.l, l_tile, decay, V_PARTS)


@gluon.jit
def end_segment(total, acc, sums, rows, tile, which: gl.constexpr, batch, SPEC: gl.constexpr, CUTS: gl.constexpr,
                SHAPE: gl.constexpr):  # fmt: skip
    """Fold the segments that begin with a tile, and start again."""
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    folds = tile % segment_tiles(rows.at, CUTS) == 0
    before = load_total(total, rows, which, batch, SPEC, CUTS, SHAPE)
    after, made = fold(total, before, acc, sums.m, sums.l, folds, rows.factor, WIDTHS)
    accs: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        layout: gl.constexpr = acc[n].type.layout
        row_layout: gl.constexpr = gl.SliceLayout(1, layout)
        stored = gl.convert_layout(folds & rows.live, row_layout)
        gl.store(total_at(which, layout, n, batch, SPEC, CUTS, SHAPE), made[n], mask=stored[:, None])
        accs += (gl.where(gl.convert_layout(folds, row_layout)[:, None], 0.0, acc[n]),)
    m = gl.where(folds, float("-inf"), sums.m)
    l_folds = gl.convert_layout(folds, gl.SliceLayout(1, sums.l.type.layout))
    return after, State(accs, m, gl.where(l_folds[:, None], 0.0, sums.l))


@gluon.jit
def store_state(
    acc, l, m, item, batch, which: gl.constexpr, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr
):
    """Write the state of a segment."""
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    Dv: gl.constexpr = SPEC.v_side.size
    first = item.oldest.to(gl.int64) * CUTS.rows
    for n in gl.static_range(len(WIDTHS)):
        layout: gl.constexpr = acc[n].type.layout
        r = which * WARPGROUP + gl.arange(0, WARPGROUP, gl.SliceLayout(1, layout))
        d = first_of(WIDTHS, n, Dv) + gl.arange(0, WIDTHS[n], gl.SliceLayout(0, layout))
        at = batch.tensors.parts + (first + r)[:, None] * Dv + d[None, :]
        gl.store(at, acc[n], mask=(r < item.q_len * SPEC.G)[:, None])
    r = which * WARPGROUP + gl.arange(0, WARPGROUP, m.type.layout)
    at = batch.tensors.part_lse + (first + r) * 2
    gl.store(at, m, mask=r < item.q_len * SPEC.G)
    gl.store(at + 1, l, mask=r < item.q_len * SPEC.G)


@gluon.jit
def attend(
    item, n, total_tiles, factor, which: gl.constexpr, batch, shared, SPEC: gl.constexpr, CUTS: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of the n-th item, whose tiles are the ``total_tiles``-th and following."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    DTYPE: gl.constexpr = shared.q_tiles[0].dtype
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    ROW_SLOTS: gl.constexpr = SHAPE.row_slots
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    s_layout: gl.constexpr = sums_layout(N)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    position = positions(item, which, SPEC.G, s_rows)
    low, i = keys_of_rows(position, 0, None, batch.numbers, MASKS)
    r = which * WARPGROUP + gl.arange(0, WARPGROUP, s_rows)
    live = (r < TOKENS * SPEC.G) & (r // SPEC.G < item.q_len - item.first_token)
    rows = Rows(n % ROW_SLOTS * (SHAPE.M // WARPGROUP) + which, i, low, position, live, factor)
    first_i = item.seq_len - item.q_len + item.first_token
    last_i = first_i + gl.minimum(TOKENS, item.q_len - item.first_token) - 1
    segment = segment_tiles(first_i, CUTS)
    segment = gl.where(segment == segment_tiles(last_i, CUTS), segment, CUTS.tiles)
    zero = gl.full([WARPGROUP], 0.0, gl.float32, s_rows)
    nothing = zero - float("inf")
    total = Total(nothing, zero)
    state = State(zero_sums(WIDTHS), nothing, thread_sums(gl.full([WARPGROUP, N], 0.0, gl.float32, s_layout)))
    # Values past the sequence may be NaN: the first warpgroup zeroes them once.
    past = item.end_tile * N > item.seq_len
    if past:
        wait_full(shared.v.ring, total_tiles)
        if which == 0:
            zero_values(shared.v, total_tiles, 0, N, (item.end_tile - 1) * N, 0, item.seq_len, V_PARTS)
            fence_async_shared()
    if which == 0:
        fill(shared.newest_clean, n)
    if past:
        wait_full(shared.newest_clean, n)
    wait_full(shared.k.ring, total_tiles)
    s = warpgroup_mma_wait(0, deps=[multiply_keys(shared, rows.tile, total_tiles, K_PARTS)])
    release_tile(shared.k.ring, total_tiles, SHAPE)
    t = 0  # tiles so far
    before = state.acc
    while t < item.tiles:
        stop = gl.minimum(t + 1 + (item.end_tile - t - 1) % segment, item.tiles)
        sums = first_step(s, state, item.end_tile - 1 - t, item, rows, DTYPE, SPEC, SHAPE)
        for u in range(t + 1, stop):
            sums = step(sums, total_tiles + u, item.end_tile - 1 - u, item, rows, shared, SPEC, SHAPE)
        t = stop
        at = total_tiles + stop - 1
        wait_full(shared.v.ring, at)
        if t < item.tiles:  # the first scores of the next segment are computed while this one is folded
            wait_full(shared.k.ring, at + 1)
            pending = multiply_values(sums.p16, shared.v, at, sums.acc, V_PARTS)
            s = multiply_keys(shared, rows.tile, at + 1, K_PARTS)
            done = (warpgroup_mma_wait(1, deps=pending),)
            release_tile(shared.v.ring, at, SHAPE)
            total, state = end_segment(
                total, done, sums, rows, item.end_tile - t, which, batch, SPEC, CUTS, SHAPE
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            release_tile(shared.k.ring, at + 1, SHAPE)
        else:
            last = multiply_values(sums.p16, shared.v, at, sums.acc, V_PARTS)
            before = load_total(total, rows, which, batch, SPEC, CUTS, SHAPE)
            done = wait_for(last, V_PARTS)
            release_tile(shared.v.ring, at, SHAPE)
            state = State(done, sums.m, sums.l)
    release(shared.item_ring, n)
    if item.oldest < 0:
        whole, of_all = fold(total, before, state.acc, state.m, state.l, rows.live, factor, WIDTHS)
        seen = whole.l != 0.0
        share = gl.where(seen, 1.0 / gl.where(seen, whole.l, 1.0), 0.0)
        lse2 = gl.where(seen, gl.fma(whole.m, factor, gl.log2(gl.where(seen, whole.l, 1.0))), float("-inf"))
        store_item(scaled(of_all, share, V_PARTS), lse2, item, 0, batch, which, False, SPEC, SHAPE)
    else:
        l_rows = gl.convert_layout(gl.sum(state.l, 1), s_rows)
        store_state(state.acc, l_rows, state.m, item, batch, which, SPEC, CUTS, SHAPE)


@gluon.jit
def consumer(which: gl.constexpr, batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """64 of the rows of each item: their matmuls, softmax and output."""
    CUTS: gl.constexpr = PLAN.cuts
    factor = batch.numbers.scale * LOG2E
    tiles = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    while tiles > 0:
        item = read_item(shared, n, tiles, 4)
        if which * WARPGROUP >= gl.minimum(SHAPE.M // SPEC.G, item.q_len - item.first_token) * SPEC.G:
            skip(item, total, shared, SHAPE)
            release(shared.item_ring, n)
        else:
            attend(item, n, total, factor, which, batch, shared, SPEC, CUTS, SHAPE)
        total += tiles
        n += 1
        tiles = next_tiles(shared, n, 4)
