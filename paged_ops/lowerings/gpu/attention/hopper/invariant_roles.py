"""The roles of hopper/invariant.py: its items and its consumers.

Longer than 500 lines: the consumers' state passes through all of their functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper.consumer import (
    LOG2E,
    Sums,
    as_column,
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
from paged_ops.lowerings.gpu.attention.hopper.invariant_sums import as_sums, row_sums, thread_sums
from paged_ops.lowerings.gpu.attention.hopper.producer import await_rows, begin_rows, not_kept, prefetch_ids
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, release, stage_of, wait_empty, wait_full
from paged_ops.lowerings.gpu.attention.hopper.segments import fold_weights, segment_tiles, segments_of
from paged_ops.lowerings.gpu.attention.hopper.work import (
    Item,
    end_items,
    first_item,
    item_at,
    light_programs,
    next_tiles,
    read_item,
    take,
    write_item,
)
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, keys_of_rows, needs_mask

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


class Items(NamedTuple):
    """The items of a batch per key/value head, and how programs take them: see Work of work.py."""

    segmented: Any  # whether the workspace holds the states of all segments; else each item is a tile of rows
    tiles: Any  # all items
    full: Any  # of them segments, other than last ones of less than half the keys,
    last: Any  # and these; tiles of rows are the others
    few: Any
    programs: Any
    counters: Any


@gluon.jit
def items_of(start, segmented, batch, DECODES: gl.constexpr, SPEC: gl.constexpr, PLAN: gl.constexpr,
             SHAPE: gl.constexpr):  # fmt: skip
    """The items of a key/value head of sequences from ``start`` on, as many as are counted at once: the segments, but
    not the last one if it has less than half the keys; this one; and tiles of rows; the states of all their segments;
    and the sequences. DECODES: those of the decoder; else those of the consumers."""
    CUTS: gl.constexpr = PLAN.cuts
    DIVISION: gl.constexpr = PLAN.division
    # Up to 4 sequences per lane lie in every warp, so that no sum needs another warp.
    each: gl.constexpr = DIVISION.at_once // 32 if DIVISION.at_once <= 128 else 1
    lanes: gl.constexpr = gl.BlockedLayout([each], [32], [SHAPE.warps], [0])
    s = start + gl.arange(0, DIVISION.at_once, lanes)
    live = s < batch.numbers.S
    _row_start, q_len, seq_len = lengths(s, live, batch)
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    tiles, segments, whole = segments_of(q_len, seq_len, SPEC.G, TOKENS, DIVISION.rows, CUTS, SHAPE.N)
    states = gl.where(segmented, segments, 0)
    whole = gl.where(states > 0, 0, whole)
    of_decoder = q_len * SPEC.G <= PLAN.beside
    if DECODES:
        segments = gl.where(of_decoder, states, 0)
    else:
        segments = gl.where(of_decoder, 0, states)
    short = 2 * (seq_len - (segments - 1) * (tiles * SHAPE.N)) < tiles * SHAPE.N
    last = gl.where(short, gl.minimum(segments, 1), 0)
    return segments - last, last, whole, states, s


@gluon.jit
def total_items(segmented, batch, DECODES: gl.constexpr, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The items of a key/value head of all sequences, and the states: see :func:`items_of`."""
    full = 0
    last = 0
    tiles = 0
    states = 0
    for start in range(0, batch.numbers.S, PLAN.division.at_once):
        full_, last_, tiles_, states_, _s = items_of(start, segmented, batch, DECODES, SPEC, PLAN, SHAPE)
        full += gl.sum(full_, 0)
        last += gl.sum(last_, 0)
        tiles += gl.sum(tiles_, 0)
        states += gl.sum(states_, 0)
    return full, last, tiles, states


@gluon.jit
def item_of(at, work, batch, DECODES: gl.constexpr, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The at-th item of the decoders, or of the consumers. Its field ``oldest`` is the place of its state; -1: it is a
    whole tile of rows.

    Heads come first. Of their items, long segments come first, then short last ones, then tiles of rows, of which later
    ones see more keys. So they are taken longest first if programs for short sequences begin at
    the front, and the others at the back; if none is for short ones, all begin at the back.
    """
    CUTS: gl.constexpr = PLAN.cuts
    DIVISION: gl.constexpr = PLAN.division
    K: gl.constexpr = SPEC.K
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    kh = at % K
    of_segments = work.full + work.last
    unit = at // K
    unit = gl.where((work.few == 0) & (work.tiles > of_segments), work.tiles - 1 - unit, unit)
    is_full = unit < work.full
    is_tile = unit >= of_segments
    unit -= gl.where(is_full, 0, gl.where(is_tile, of_segments, work.full))
    s = 0
    before = 0  # items of the same kind of the sequences before s
    states = 0  # segments of these sequences
    passed_items = 0
    for start in range(0, batch.numbers.S, DIVISION.at_once):
        full, last, tiles_, states_, s_ = items_of(start, work.segmented, batch, DECODES, SPEC, PLAN, SHAPE)
        units = gl.where(is_full, full, gl.where(is_tile, tiles_, last))
        passed = (passed_items + gl.associative_scan(units, 0, add) <= unit) & (s_ < batch.numbers.S)
        s += gl.sum(passed.to(gl.int32), 0)
        before += gl.sum(gl.where(passed, units, 0), 0)
        states += gl.sum(gl.where(passed, states_, 0), 0)
        passed_items += gl.sum(units, 0)
    row_start = gl.load(batch.tensors.query_start_loc + s)
    q_len = gl.load(batch.tensors.query_start_loc + s + 1) - row_start
    seq_len = gl.load(batch.tensors.seq_lens + s)
    tiles, segments, _whole = segments_of(q_len, seq_len, SPEC.G, TOKENS, DIVISION.rows, CUTS, SHAPE.N)
    segment = gl.where(is_full, unit - before, segments - 1)
    WHOLE: gl.constexpr = 0 if DECODES else 1  # segments that are no item with a state
    by_segment = (unit >= 0) & (segments > WHOLE) & (is_full | (is_tile == 0))
    first_token = gl.where(is_tile, (unit - before) * TOKENS, 0)
    item = item_at(kh, s, row_start, q_len, seq_len, first_token, True, batch, SPEC, SHAPE)
    begin = gl.where(by_segment, segment * tiles, item.end_tile - item.tiles)
    # A segment that no row sees has one tile, masked like the last one of a sequence without keys.
    end = gl.where(by_segment, gl.maximum(gl.minimum(begin + tiles, item.end_tile), begin + 1), item.end_tile)
    place = gl.where(by_segment, (states + segment) * K + kh, -1)
    return Item(
        kh, s, row_start, q_len, seq_len, first_token, end - begin, end, item.full_start, item.full_end, place
    )  # fmt: skip


@gluon.jit
def scheduler(batch, shared, ending, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """Takes items, and copies their query rows. ``ending``: see :func:`take_in_time`."""
    DIVISION: gl.constexpr = PLAN.division
    programs = gl.num_programs(0)
    full, last, tiles, states = total_items(programs > 0, batch, False, SPEC, PLAN, SHAPE)
    fits = states * SPEC.K <= PLAN.cuts.states
    if not fits:
        full, last, tiles, states = total_items(fits, batch, False, SPEC, PLAN, SHAPE)
    LEAST: gl.constexpr = PLAN.beside // SPEC.G
    few = light_programs(batch, ANY_LENGTH, programs, SPEC.G, DIVISION, DIVISION.rows, SHAPE.M, SHAPE.warps, LEAST)
    few = gl.where(full + last > 0, gl.maximum(few, -few), 0)  # short sequences are at the front of the items
    counters = batch.tensors.taken
    if batch.tensors.arrived is not None:
        counters = batch.tensors.arrived
    work = Items(fits, full + last + tiles, full, last, few, programs, counters)
    take_in_time(work, batch, shared, ending, SPEC, PLAN, SHAPE)


@gluon.jit
def take_in_time(work, batch, shared, ending, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """As ``take_items`` of producer.py, but each item is taken when the producer fills ``ending``: it has PLAN.lead
    tiles of the one before still to load. So programs end at about the same time, and their loads do not stop. With
    fewer places for rows than for items, keys can come before the query rows."""
    ROWS_LATER: gl.constexpr = SHAPE.row_slots < SHAPE.slots
    last = work.tiles * SPEC.K - 1
    reverse, start, at = first_item(work.few, work.programs)
    ticket = gl.program_id(0)
    n = 0
    while ticket <= last:
        item = item_of(gl.where(reverse, last - at, at), work, batch, False, SPEC, PLAN, SHAPE)
        write_item(shared, n, item, SHAPE.warps)
        prefetch_ids(batch, item, item.end_tile - item.tiles, SPEC, SHAPE)
        if ROWS_LATER:
            fill(shared.item_ring, n)
            wait_empty(shared.item_ring, n + SHAPE.slots - 1)  # the item before, by the consumers
            begin_rows(not_kept(batch.tensors.query), item, shared.q_groups, 0, SPEC, SHAPE, SHAPE.warps)
            await_rows()
            fill(shared.rows_full, n)
        else:
            slot = stage_of(shared.item_ring, n)
            begin_rows(batch.tensors.query, item, shared.q_groups, slot, SPEC, SHAPE, SHAPE.warps)
            await_rows()
            fill(shared.item_ring, n)
        wait_full(ending, n)
        ticket, at = take(work.counters, reverse, start, work.programs, last)
        n += 1
    end_items(shared, n, SHAPE.warps)


class Rows(NamedTuple):
    """A consumer's query rows of an item."""

    tile: Any  # of query rows, in shared memory
    i: Any  # the last key that each row sees, if causal
    low: Any
    at: Any  # their positions
    live: Any
    factor: Any  # of scores, to base 2; of each row, or one number


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
def softmax_tile(
    qk, m, rows, j, seq_len, MASKED: gl.constexpr, BY_ROWS: gl.constexpr, FEW: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """As ``softmax_tile`` of softmax.py, with each multiply-add written as one."""
    MASKS: gl.constexpr = SPEC.masks
    if MASKED:
        kept = keep_seen(j[None, :], rows.low[:, None], rows.i[:, None], seq_len, MASKS)
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * rows.factor
    p = gl.exp2(gl.fma(qk, as_column(rows.factor, BY_ROWS), -shift[:, None]))
    decay = gl.exp2(gl.fma(m, rows.factor, -shift))
    return p, m_new, thread_sums(p, FEW), decay


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
    l_part = gl.convert_layout(row_sums(l), m.type.layout)
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
    return Sums(scaled(acc, decay, V_PARTS), p16, m, gl.fma(l, as_sums(decay, l_tile), l_tile))


@gluon.jit
def first_step(s, state, tile, item, rows, shared, FEW: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The state after the first tile of a segment, with scores ``s``; its values are not added yet."""
    MASKS: gl.constexpr = SPEC.masks
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    j = tile * SHAPE.N + gl.arange(0, SHAPE.N, gl.SliceLayout(0, s.type.layout))
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS) | (tile == item.end_tile - 1)
    if masked:
        p, m, l_tile, decay = softmax_tile(s, state.m, rows, j, item.seq_len, True, BY_ROWS, FEW, SPEC)
    else:
        p, m, l_tile, decay = softmax_tile(s, state.m, rows, j, item.seq_len, False, BY_ROWS, FEW, SPEC)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(WIDTHS[0]), 2)
    p16 = gl.convert_layout(p.to(shared.q_tiles[0].dtype), p_layout)
    return end_step(state.acc, p16, m, state.l, l_tile, decay, V_PARTS)


@gluon.jit
def step(sums, at, tile, item, rows, shared, FEW: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """As ``step`` of consumer.py."""
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    MASKS: gl.constexpr = SPEC.masks
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    wait_full(shared.k.ring, at)
    s = multiply_keys(shared, rows.tile, at, K_PARTS)
    wait_full(shared.v.ring, at - 1)
    acc = multiply_values(sums.p16, shared.v, at - 1, sums.acc, V_PARTS)
    s = warpgroup_mma_wait(len(widths_of(V_PARTS)), deps=[s])
    release_tile(shared.k.ring, at, SHAPE)
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS)
    j = tile * SHAPE.N + gl.arange(0, SHAPE.N, gl.SliceLayout(0, s.type.layout))
    if masked:
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows, j, item.seq_len, True, BY_ROWS, FEW, SPEC)
    else:
        p, m, l_tile, decay = softmax_tile(s, sums.m, rows, j, item.seq_len, False, BY_ROWS, FEW, SPEC)
    acc = wait_for(acc, V_PARTS)
    release_tile(shared.v.ring, at - 1, SHAPE)
    p16 = gl.convert_layout(p.to(sums.p16.dtype), sums.p16.type.layout)
    return end_step(acc, p16, m, sums.l, l_tile, decay, V_PARTS)


@gluon.jit
def store_total(
    made, folds, rows, which: gl.constexpr, batch, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr
):
    """Write the sums of the segments that were folded, of the rows that ``folds``."""
    for n in gl.static_range(len(made)):
        layout: gl.constexpr = made[n].type.layout
        stored = gl.convert_layout(folds & rows.live, gl.SliceLayout(1, layout))
        gl.store(total_at(which, layout, n, batch, SPEC, CUTS, SHAPE), made[n], mask=stored[:, None])


@gluon.jit
def without(acc, m, l, folds, V_PARTS: gl.constexpr):
    """The state at the beginning of a segment of the rows that ``folds``; that of others stays."""
    accs: gl.tuple = ()
    for n in gl.static_range(len(widths_of(V_PARTS))):
        row_layout: gl.constexpr = gl.SliceLayout(1, acc[n].type.layout)
        accs += (gl.where(gl.convert_layout(folds, row_layout)[:, None], 0.0, acc[n]),)
    return State(accs, gl.where(folds, float("-inf"), m), gl.where(as_sums(folds, l), 0.0, l))


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
def factors_of_rows(shared, n, which: gl.constexpr, layout: gl.constexpr):
    """What a consumer's query rows of the n-th item were divided by, see ``halve_rows`` of fp8.py."""
    exponents = shared.row_factors.index(stage_of(shared.item_ring, n)).slice(which * WARPGROUP, WARPGROUP)
    return (exponents.load(layout).to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def attend(
    item, n, total_tiles, factor, which: gl.constexpr, batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of the n-th item, whose tiles are the ``total_tiles``-th and following."""
    CUTS: gl.constexpr = PLAN.cuts
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    ROW_SLOTS: gl.constexpr = SHAPE.row_slots
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    s_layout: gl.constexpr = sums_layout(N)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    position = positions(item, which, SPEC.G, s_rows)
    low, i = keys_of_rows(position, 0, None, batch.numbers, MASKS)
    r = which * WARPGROUP + gl.arange(0, WARPGROUP, s_rows)
    live = (r < TOKENS * SPEC.G) & (r // SPEC.G < item.q_len - item.first_token)
    row_factor = factor
    if shared.rows_full is not None:
        wait_full(shared.rows_full, n)
    if BY_ROWS:
        row_factor = factor * factors_of_rows(shared, n, which, s_rows)
    rows = Rows(n % ROW_SLOTS * (SHAPE.M // WARPGROUP) + which, i, low, position, live, row_factor)
    first_i = item.seq_len - item.q_len + item.first_token
    last_i = first_i + gl.minimum(TOKENS, item.q_len - item.first_token) - 1
    segment = segment_tiles(first_i, CUTS)
    segment = gl.where(segment == segment_tiles(last_i, CUTS), segment, CUTS.tiles)
    zero = gl.full([WARPGROUP], 0.0, gl.float32, s_rows)
    nothing = zero - float("inf")
    total = Total(nothing, zero)
    FEW: gl.constexpr = SPEC.storage.dtype != SPEC.dtype
    no_weights = thread_sums(gl.full([WARPGROUP, N], 0.0, gl.float32, s_layout), FEW)
    state = State(zero_sums(WIDTHS), nothing, no_weights)
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
    # What one round leaves for the next is set on both ways through it: else it would take registers all the time.
    while t < item.tiles:
        stop = gl.minimum(t + 1 + (item.end_tile - t - 1) % segment, item.tiles)
        sums = first_step(s, state, item.end_tile - 1 - t, item, rows, shared, FEW, SPEC, SHAPE)
        for u in range(t + 1, stop):
            sums = step(sums, total_tiles + u, item.end_tile - 1 - u, item, rows, shared, FEW, SPEC, SHAPE)
        t = stop
        at = total_tiles + stop - 1
        wait_full(shared.v.ring, at)
        pending = multiply_values(sums.p16, shared.v, at, sums.acc, V_PARTS)
        before = load_total(total, rows, which, batch, SPEC, CUTS, SHAPE)
        acc = wait_for(pending, V_PARTS)
        release_tile(shared.v.ring, at, SHAPE)
        m = sums.m
        if BY_ROWS:  # as if query rows had not been divided: by powers of two, so no bit is lost
            m *= factors_of_rows(shared, n, which, s_rows)
        if t < item.tiles:
            folds = (item.end_tile - t) % segment_tiles(position, CUTS) == 0
            total, made = fold(total, before, acc, m, sums.l, folds, factor, WIDTHS)
            state = without(acc, sums.m, sums.l, folds, V_PARTS)
            store_total(made, folds, rows, which, batch, SPEC, CUTS, SHAPE)
            wait_full(shared.k.ring, at + 1)
            s = warpgroup_mma_wait(0, deps=[multiply_keys(shared, rows.tile, at + 1, K_PARTS)])
            release_tile(shared.k.ring, at + 1, SHAPE)
        else:
            release(shared.item_ring, n)
            if item.oldest < 0:
                whole, of_all = fold(total, before, acc, m, sums.l, live, factor, WIDTHS)
                seen = whole.l != 0.0
                share = gl.where(seen, 1.0 / gl.where(seen, whole.l, 1.0), 0.0)
                if batch.tensors.v_scale is not None:
                    share *= gl.load(batch.tensors.v_scale)
                lse2 = gl.where(seen, gl.fma(whole.m, factor, gl.log2(gl.where(seen, whole.l, 1.0))), float("-inf"))
                store_item(scaled(of_all, share, V_PARTS), lse2, item, 0, batch, which, False, SPEC, SHAPE)
            else:
                l_rows = gl.convert_layout(row_sums(sums.l), s_rows)
                store_state(acc, l_rows, m, item, batch, which, SPEC, CUTS, SHAPE)
            total, state = Total(nothing, zero), State(zero_sums(WIDTHS), nothing, no_weights)
            s = gl.full([WARPGROUP, N], 0.0, gl.float32, s_layout)


@gluon.jit
def consumer(which: gl.constexpr, batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """64 of the rows of each item: their matmuls, softmax and output."""
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
            attend(item, n, total, factor, which, batch, shared, SPEC, PLAN, SHAPE)
        total += tiles
        n += 1
        tiles = next_tiles(shared, n, 4)
