"""The consumers of hopper/invariant.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper.consumer import (
    LOG2E,
    Sums,
    hide,
    multiply_keys,
    multiply_values,
    positions,
    scaled,
    skip,
    store_item,
    sums_layout,
    wait_for,
    zero_past,
    zero_sums,
)
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP, first_of, widths_of
from paged_ops.lowerings.gpu.attention.hopper.invariant_sums import as_sums, row_sums, thread_sums
from paged_ops.lowerings.gpu.attention.hopper.producer import not_kept
from paged_ops.lowerings.gpu.attention.hopper.ring import release, release_each, stage_of, wait_full
from paged_ops.lowerings.gpu.attention.hopper.segments import common_segment, fold_weights, segment_tiles
from paged_ops.lowerings.gpu.attention.hopper.softmax import (
    LEAST,
    by_threads,
    normaliser,
    rows_by_threads,
    rows_layout,
    scaled_if_raised,
    weights_of,
)
from paged_ops.lowerings.gpu.attention.hopper.work import next_tiles, read_item
from paged_ops.lowerings.gpu.attention.shared.masks import keys_of_rows, needs_mask


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
    m: Any  # the maxima in use, see softmax.py
    l: Any  # each thread's sums of weights


class Total(NamedTuple):
    """The state of the segments that were folded; its sums are in the workspace."""

    m: Any
    l: Any


@gluon.jit
def softmax_tile(
    s, m, tile, item, masked, rows, BY_ROWS: gl.constexpr, FEW: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """As ``softmax_tile`` of softmax.py, with the sums of invariant_sums.py, for scores ``s`` of a tile of keys, which
    rows may not see all of if ``masked``."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = s.shape[1]
    j = tile * N + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
    if masked:  # a branch with all of the softmax, as in ``step`` of consumer.py
        p, m, decay = weights_of(hide(s, rows.low, rows.i, j, item.seq_len, MASKS), m, rows.factor, BY_ROWS)
        l = thread_sums(p, FEW)
    else:
        p, m, decay = weights_of(s, m, rows.factor, BY_ROWS)
        l = thread_sums(p, FEW)
    return p, m, l, decay


@gluon.jit
def load_total(total, rows, which: gl.constexpr, batch, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the sums of the segments that were folded; 0 if there are none."""
    WIDTHS: gl.constexpr = widths_of(SHAPE.v.parts)
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        layout: gl.constexpr = sums_layout(WIDTHS[n])
        known = gl.convert_layout(rows.live & (total.m > LEAST), gl.SliceLayout(1, layout))[:, None]
        made += (gl.load(total_at(which, layout, n, batch, SPEC, CUTS, SHAPE), mask=known, other=0.0),)
    return made


@gluon.jit
def of_rows(m, l, layout: gl.constexpr):
    """The maximum and the sum of weights of each row."""
    return gl.convert_layout(gl.max(m, 1), layout), gl.convert_layout(row_sums(l), layout)


@gluon.jit
def fold(total, before, acc, m, l, folds, WIDTHS: gl.constexpr):
    """Fold a segment into the total of the rows that ``folds``: the new total, and its sums. A segment without keys
    changes no bit."""
    rows: gl.constexpr = total.m.type.layout
    m, l_part = of_rows(m, l, rows)
    m_new, decay, weight = fold_weights(total.m, m)
    takes = folds & (m > LEAST)
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
def fold_first(acc, m, l, folds, WIDTHS: gl.constexpr):
    """:func:`fold` into nothing, with the same bits, of rows that see keys of the segment."""
    made: gl.tuple = ()
    for n in gl.static_range(len(WIDTHS)):
        made += (acc[n] + 0.0,)  # no -0.0
    rows: gl.constexpr = folds.type.layout
    m, l = of_rows(m, l, rows)
    return Total(gl.where(folds, m, LEAST), gl.where(folds, l, 0.0)), made


@gluon.jit
def total_at(which: gl.constexpr, layout: gl.constexpr, n: gl.constexpr, batch, SPEC: gl.constexpr,
             CUTS: gl.constexpr, SHAPE: gl.constexpr):  # fmt: skip
    """The addresses of some columns of a consumer's total."""
    Dv: gl.constexpr = SPEC.v_side.size
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    r = gl.arange(0, WARPGROUP, gl.SliceLayout(1, layout))
    d = first_of(WIDTHS, n, Dv) + gl.arange(0, WIDTHS[n], gl.SliceLayout(0, layout))
    # 8 rows of 8 columns lie together, as a warp has them, else a load or store would touch 8 lines instead of 2
    row = r // 16 * (16 * Dv) + r // 8 % 2 * 64 + r % 8 * 8
    first = CUTS.states * CUTS.rows + gl.program_id(0) * SHAPE.M + which * WARPGROUP
    return not_kept(batch.tensors.parts) + first * Dv + row[:, None] + (d // 8 * 128 + d % 8)[None, :]


@gluon.jit
def end_step(acc, p16, m, l, l_tile, decay, V_PARTS: gl.constexpr):
    """The state after a tile, from that before it with all its values."""
    made: gl.tuple = ()
    for n in gl.static_range(len(widths_of(V_PARTS))):
        made += (scaled_if_raised(acc[n], decay),)
    return Sums(made, p16, m, gl.fma(l, as_sums(decay, l_tile), l_tile))


@gluon.jit
def first_step(s, state, tile, item, rows, shared, FEW: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The state after the first tile of a segment, with scores ``s``; its values are not added yet."""
    MASKS: gl.constexpr = SPEC.masks
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    V_PARTS: gl.constexpr = SHAPE.v.parts
    WIDTHS: gl.constexpr = widths_of(V_PARTS)
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS) | (tile == item.end_tile - 1)
    p, m, l_tile, decay = softmax_tile(s, state.m, tile, item, masked, rows, BY_ROWS, FEW, SPEC)
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
    release_each(shared.k.ring, at)
    masked = needs_mask(tile, item.full_start, item.full_end, MASKS)
    p, m, l_tile, decay = softmax_tile(s, sums.m, tile, item, masked, rows, BY_ROWS, FEW, SPEC)
    acc = wait_for(acc, V_PARTS)
    release_each(shared.v.ring, at - 1)
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
    m = gl.where(gl.convert_layout(folds, gl.SliceLayout(1, m.type.layout))[:, None], LEAST, m)
    return State(accs, m, gl.where(as_sums(m, l) == LEAST, 0.0, l))


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
    no_scores = gl.full([WARPGROUP, N], 0.0, gl.float32, s_layout)
    of_threads: gl.constexpr = rows_layout(by_threads(no_scores).type.layout)
    row_factor = factor
    if shared.rows_full is not None:
        wait_full(shared.rows_full, n)
    if BY_ROWS:
        row_factor = rows_by_threads(factor * factors_of_rows(shared, n, which, s_rows), of_threads)
    rows = Rows(n % ROW_SLOTS * (SHAPE.M // WARPGROUP) + which, i, low, position, live, row_factor)
    segment = common_segment(item, TOKENS, CUTS)
    zero = gl.full([WARPGROUP], 0.0, gl.float32, s_rows)
    nothing = gl.full([WARPGROUP, 4], LEAST, gl.float32, of_threads)
    total = Total(zero + LEAST, zero)
    FEW: gl.constexpr = SPEC.storage.dtype != SPEC.dtype
    no_weights = thread_sums(no_scores, FEW)
    state = State(zero_sums(WIDTHS), nothing, no_weights)
    zero_past(which, n, total_tiles, item, shared, SHAPE)
    wait_full(shared.k.ring, total_tiles)
    s = warpgroup_mma_wait(0, deps=[multiply_keys(shared, rows.tile, total_tiles, K_PARTS)])
    release_each(shared.k.ring, total_tiles)
    t = 0  # tiles so far
    # What one round leaves for the next is set on both ways through it: else it would take registers all the time.
    while t < item.tiles:
        begin = t
        stop = gl.minimum(t + 1 + (item.end_tile - t - 1) % segment, item.tiles)
        sums = first_step(s, state, item.end_tile - 1 - t, item, rows, shared, FEW, SPEC, SHAPE)
        for u in range(t + 1, stop):
            sums = step(sums, total_tiles + u, item.end_tile - 1 - u, item, rows, shared, FEW, SPEC, SHAPE)
        t = stop
        at = total_tiles + stop - 1
        wait_full(shared.v.ring, at)
        pending = multiply_values(sums.p16, shared.v, at, sums.acc, V_PARTS)
        before = zero_sums(WIDTHS)
        if begin > 0:
            before = load_total(total, rows, which, batch, SPEC, CUTS, SHAPE)
        acc = wait_for(pending, V_PARTS)
        release_each(shared.v.ring, at)
        if t < item.tiles:
            folds = (item.end_tile - t) % segment_tiles(position, CUTS) == 0
            if begin > 0:
                total, made = fold(total, before, acc, sums.m, sums.l, folds, WIDTHS)
            else:
                total, made = fold_first(acc, sums.m, sums.l, folds, WIDTHS)
            state = without(acc, sums.m, sums.l, folds, V_PARTS)
            store_total(made, folds, rows, which, batch, SPEC, CUTS, SHAPE)
            wait_full(shared.k.ring, at + 1)
            s = warpgroup_mma_wait(0, deps=[multiply_keys(shared, rows.tile, at + 1, K_PARTS)])
            release_each(shared.k.ring, at + 1)
        else:
            release(shared.item_ring, n)
            if item.oldest < 0:
                if (begin > 0) | (item.seq_len < item.q_len):  # some rows may see no key of this segment
                    whole, of_all = fold(total, before, acc, sums.m, sums.l, live, WIDTHS)
                else:
                    whole, of_all = fold_first(acc, sums.m, sums.l, live, WIDTHS)
                share, lse2 = normaliser(whole.m, whole.l)
                if batch.tensors.v_scale is not None:
                    share *= gl.load(batch.tensors.v_scale)
                store_item(scaled(of_all, share, V_PARTS), lse2, item, 0, batch, which, False, SPEC, SHAPE)
            else:
                m, l = of_rows(sums.m, sums.l, s_rows)
                store_state(acc, l, m, item, batch, which, SPEC, CUTS, SHAPE)
            total, state = Total(zero + LEAST, zero), State(zero_sums(WIDTHS), nothing, no_weights)
            s = no_scores


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
            skip(item, total, shared)
            release(shared.item_ring, n)
        else:
            attend(item, n, total, factor, which, batch, shared, SPEC, PLAN, SHAPE)
        total += tiles
        n += 1
        tiles = next_tiles(shared, n, 4)
