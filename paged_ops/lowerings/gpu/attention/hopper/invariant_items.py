"""The items of hopper/invariant.py, and how its programs take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.hopper.producer import await_rows, begin_rows, not_kept, prefetch_ids
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, stage_of, wait_empty, wait_full
from paged_ops.lowerings.gpu.attention.hopper.segments import segments_of
from paged_ops.lowerings.gpu.attention.hopper.work import (
    Item,
    end_items,
    first_item,
    item_at,
    light_programs,
    take,
    write_item,
)

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
    of_decoder = q_len * SPEC.G <= PLAN.decoder_rows
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
def counters_of(tensors):
    """The counters of taken items, which are zero at the start."""
    counters = tensors.taken
    if tensors.arrived is not None:
        counters = tensors.arrived
    return counters


@gluon.jit
def count_items(batch, DECODES: gl.constexpr, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """Whether the workspace holds the states of all segments, and the items of a key/value head, as in
    :class:`Items`. The decoders' sequences have no tiles of rows."""
    programs = gl.num_programs(0)
    full, last, tiles, states = total_items(programs > 0, batch, DECODES, SPEC, PLAN, SHAPE)
    fits = states * SPEC.K <= PLAN.cuts.states
    if DECODES:
        tiles = 0 * tiles
    if not fits:
        full, last, tiles, states = total_items(fits, batch, DECODES, SPEC, PLAN, SHAPE)
        if DECODES:
            tiles = 0 * tiles
    return fits, full, last, tiles


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
    LEAST: gl.constexpr = PLAN.decoder_rows // SPEC.G
    programs = gl.num_programs(0)
    fits, full, last, tiles = count_items(batch, False, SPEC, PLAN, SHAPE)
    few = light_programs(batch, ANY_LENGTH, programs, SPEC.G, DIVISION, DIVISION.rows, SHAPE.M, SHAPE.warps, LEAST)
    few = gl.where(full + last > 0, gl.maximum(few, -few), 0)  # short sequences are at the front of the items
    work = Items(fits, full + last + tiles, full, last, few, programs, counters_of(batch.tensors))
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
