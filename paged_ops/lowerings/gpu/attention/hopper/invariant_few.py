"""Batch-invariant decodes on Hopper (sm_90) in Gluon: invariant.py's items of at most 16 query rows. Keys are the rows
of the matmuls, and query rows their 8 or 16 columns.

A ``wgmma`` of 64 rows takes as long for one row as for 64: 0.6 µs more per tile of 128 keys than here. The bits equal
those of invariant_roles.py, as in invariant_mixed.py: matmuls add in the same order, and everything else that rounds is
the same arithmetic.

One program per multiprocessor. A warp takes items and loads query rows, one loads tiles by TMA, and a warpgroup
computes. All sums fit its registers, also those of the segments that were folded.

Programs of ``invariant_states_kernel`` are launched when each program of this kernel runs. They get a place on the same
multiprocessors, and wait there until this kernel has ended. It does end, as it waits for nothing that they hold: a
program has its warps, registers and shared memory from the start, and no warp asks for registers later (REGISTERS).
Roles wait only for each other, at barriers in shared memory, and for memory. Items are taken by a counter, so that no
program waits for another one. The next kernel is launched when all programs of the fold are at their end. The first of
them has waited for this kernel.

Letters: as in dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper import dense
from paged_ops.lowerings.gpu.attention.hopper.consumer import LOG2E, zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import HopperShape, tiles_of
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import tile_layout
from paged_ops.lowerings.gpu.attention.hopper.invariant_items import Items, count_items, counters_of, item_of
from paged_ops.lowerings.gpu.attention.hopper.invariant_sums import column_sums, tile_sums
from paged_ops.lowerings.gpu.attention.hopper.loader import load_tiles
from paged_ops.lowerings.gpu.attention.hopper.producer import load_rows, prefetch_ids
from paged_ops.lowerings.gpu.attention.hopper.ring import (
    begin_kernel,
    fill,
    release,
    release_each,
    ring_of,
    signal_of,
    stage_of,
    wait_full,
)
from paged_ops.lowerings.gpu.attention.hopper.segments import common_segment, fold_weights, segment_tiles
from paged_ops.lowerings.gpu.attention.hopper.softmax import LEAST, normaliser, raised
from paged_ops.lowerings.gpu.attention.hopper.work import end_items, next_tiles, places_of_items, read_item, write_item
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, keys_of_rows, needs_mask
from paged_ops.lowerings.gpu.attention.shared.tile import LN2, Batch
from paged_ops.lowerings.gpu.spec import Numbers, Spec

SLOTS = 2  # items that are published ahead, with their query rows
SEQUENCES = 128  # sequences that the scheduler's registers hold
REGISTERS = (512, 512)  # more than there are: then Triton lets warps keep what they start with, without setmaxnreg


def shape_of(spec: Spec, rows: int, shared_memory: int) -> HopperShape:
    """128 keys per tile, and as many tiles as fit."""
    M, whole = max(rows, 8), dense.shape_of(spec, shared_memory)
    D, width = spec.k_side.size, spec.k_side.size + spec.v_side.size
    space = (shared_memory - 2 * dense.OTHERS) // spec.dtype.itemsize - M * (SLOTS * D + whole.N)
    stages = space // (whole.N * width)
    return whole._replace(M=M, stages=stages, slots=SLOTS, row_slots=SLOTS, registers=REGISTERS, warps=1)


class Memory(NamedTuple):
    """The contents of shared memory."""

    items: Any  # their fields
    item_ring: Any
    queries: Any  # of each item that is published
    rows_full: Any  # per item: its query rows have arrived
    k: Any  # TileRing
    v: Any
    weights: Any  # of a tile


class State(NamedTuple):
    """Of a segment, or of the segments that were folded: sums of values ``[Dv, M]``, maxima, sums of weights."""

    acc: Any
    m: Any
    l: Any


@gluon.jit
def memory_of(dtype: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory. A role releases a tile by each of its threads."""
    M: gl.constexpr = SHAPE.M
    D: gl.constexpr = SHAPE.k.size
    SLOTS: gl.constexpr = SHAPE.slots
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    items = places_of_items(SLOTS)
    queries = gl.allocate_shared_memory(dtype, [SLOTS, M, D], tile_layout(M, D))
    weights = gl.allocate_shared_memory(dtype, [M, SHAPE.N], tile_layout(M, SHAPE.N))
    keys = tiles_of(dtype, K_PARTS, SHAPE, 128)
    values = tiles_of(dtype, V_PARTS, SHAPE, 128)
    return Memory(items, ring_of(SLOTS, 1, 2), queries, signal_of(SLOTS), keys, values, weights)


@gluon.jit
def take_rows(item, n, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Copy the n-th item's query rows to where matmuls read them."""
    D: gl.constexpr = SPEC.k_side.size
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    rows = load_rows(item, batch, layout, SPEC, SHAPE.M)
    memory.queries.index(stage_of(memory.item_ring, n)).store(rows)
    fence_async_shared()


@gluon.jit
def scheduler(batch, memory, ending, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """Takes items, each when the producer fills ``ending``: it has PLAN.lead tiles of the one before still to load."""
    programs = gl.num_programs(0)
    fits, full, last, tiles = count_items(batch, False, SPEC, PLAN, SHAPE)
    work = Items(fits, full + last + tiles, full, last, 0 * programs, programs, counters_of(batch.tensors))
    count = work.tiles * SPEC.K
    at = gl.program_id(0)
    n = 0
    while at < count:
        item = item_of(at, work, batch, False, SPEC, PLAN, SHAPE)
        write_item(memory, n, item, 1)
        fill(memory.item_ring, n)  # keys can come before the query rows
        take_rows(item, n, batch, memory, SPEC, SHAPE)
        fill(memory.rows_full, n)
        prefetch_ids(batch, item, item.end_tile - item.tiles, SPEC, SHAPE)
        wait_full(ending, n)
        at = programs + gl.atomic_add(work.counters, 1)
        n += 1
    end_items(memory, n, 1)


@gluon.jit
def begin_keys(at, n, zero, memory):
    """Begin to multiply the at-th tile of keys by the n-th item's query rows: the scores ``[128, M]``."""
    wait_full(memory.k.ring, at)
    keys = memory.k.tiles[0].index(stage_of(memory.k.ring, at))
    rows = memory.queries.index(stage_of(memory.item_ring, n)).permute((1, 0))
    return warpgroup_mma(keys, rows, zero, use_acc=False, is_async=True)


@gluon.jit
def zero_past(at, begin, seq_len, memory, SHAPE: gl.constexpr):
    """Zero the values past the sequence in the at-th tile, whose first key is ``begin``. Their weights are 0, but they
    may be NaN."""
    ROWS: gl.constexpr = 32
    wait_full(memory.v.ring, at)
    tile = memory.v.tiles[0].index(stage_of(memory.v.ring, at))
    for part in gl.static_range(SHAPE.N // ROWS):
        if begin + (part + 1) * ROWS > seq_len:
            zero_rows(tile.slice(part * ROWS, ROWS, dim=0), begin + part * ROWS, 0, seq_len)


@gluon.jit
def step(
    s, state, tile, at, n, low, i, item, factor, memory, NEXT: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """The state after a tile with scores ``s``, whose keys are the at-th; and the scores of the next tile, whose keys
    are multiplied during this tile's softmax, if there is a NEXT one."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    M: gl.constexpr = SHAPE.M
    layout: gl.constexpr = s.type.layout
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    following = zero
    if NEXT:
        following = begin_keys(at + 1, n, zero, memory)
    if needs_mask(tile, item.full_start, item.full_end, MASKS) | (tile == item.end_tile - 1):
        j = tile * N + gl.arange(0, N, gl.SliceLayout(1, layout))
        kept = keep_seen(j[:, None], low[None, :], i[None, :], item.seq_len, MASKS)
        s = gl.where(kept, s, float("-inf"))
        if tile * N + N > item.seq_len:
            zero_past(at, tile * N, item.seq_len, memory, SHAPE)
    m, decay = raised(state.m, gl.max(s, 0) * factor)
    p = gl.exp2(gl.fma(s, factor, -m[None, :]))
    memory.weights.permute((1, 0)).store(p.to(memory.weights.dtype))
    fence_async_shared()
    wait_full(memory.v.ring, at)
    columns = memory.v.tiles[0].index(stage_of(memory.v.ring, at)).permute((1, 0))
    weights = memory.weights.permute((1, 0))
    acc = warpgroup_mma(columns, weights, state.acc * decay[None, :], is_async=True)
    of_tile = tile_sums(gl.sum(p.reshape([2, N // 2, M]), 0))
    l = gl.fma(state.l, gl.convert_layout(decay, gl.SliceLayout(0, state.l.type.layout))[None, :], of_tile)
    if NEXT:
        acc, following = warpgroup_mma_wait(0, deps=[acc, following])
        release_each(memory.k.ring, at + 1)
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    release_each(memory.v.ring, at)
    return following, State(acc, m, l)


@gluon.jit
def fold(total, state, folds):
    """The total with the segments of the columns that ``folds``."""
    l_part = gl.convert_layout(column_sums(state.l), state.m.type.layout)
    m_new, decay, weight = fold_weights(total.m, state.m)
    takes = folds & (state.m > LEAST)
    acc = gl.fma(total.acc, decay[None, :], state.acc * weight[None, :])
    l = gl.where(takes, gl.fma(total.l, decay, l_part * weight), total.l)
    return State(gl.where(takes[None, :], acc, total.acc), gl.where(takes, m_new, total.m), l)


@gluon.jit
def store_state(state, item, batch, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr):
    """Write the state of a segment."""
    Dv: gl.constexpr = SPEC.v_side.size
    layout: gl.constexpr = state.acc.type.layout
    r = gl.arange(0, SHAPE.M, gl.SliceLayout(0, layout))
    d = gl.arange(0, Dv, gl.SliceLayout(1, layout))
    live = r < item.q_len * SPEC.G
    row = item.oldest.to(gl.int64) * CUTS.rows + r
    gl.store(batch.tensors.parts + row[None, :] * Dv + d[:, None], state.acc, mask=live[None, :])
    gl.store(batch.tensors.part_lse + row * 2, state.m, mask=live)
    l = gl.convert_layout(column_sums(state.l), state.m.type.layout)
    gl.store(batch.tensors.part_lse + row * 2 + 1, l, mask=live)


@gluon.jit
def store_rows(total, item, batch, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Write the results of an item whose segments were folded."""
    G: gl.constexpr = SPEC.G
    Dv: gl.constexpr = SPEC.v_side.size
    layout: gl.constexpr = total.acc.type.layout
    share, lse2 = normaliser(total.m, total.l)
    r = gl.arange(0, SHAPE.M, gl.SliceLayout(0, layout))
    d = gl.arange(0, Dv, gl.SliceLayout(1, layout))
    token = item.first_token + r // G
    live = (r < SHAPE.M // G * G) & (token < item.q_len)
    row = (item.row_start + token).to(gl.int64) * (SPEC.K * G) + item.kh * G + r % G
    result = (total.acc * share[None, :]).to(batch.tensors.out.dtype.element_ty)
    gl.store(batch.tensors.out + row[None, :] * Dv + d[:, None], result, mask=live[None, :])
    if SPEC.lse:
        gl.store(batch.tensors.lse + row, lse2 * LN2, mask=live)


@gluon.jit
def attend(item, n, first, batch, memory, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The n-th item, whose tiles are the ``first``-th and following."""
    CUTS: gl.constexpr = PLAN.cuts
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    M: gl.constexpr = SHAPE.M
    TOKENS: gl.constexpr = M // SPEC.G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    factor = batch.numbers.scale * LOG2E
    r = gl.arange(0, M, of_rows)
    position = item.seq_len - item.q_len + item.first_token + r // SPEC.G
    low, i = keys_of_rows(position, 0, None, batch.numbers, MASKS)
    live = (r < TOKENS * SPEC.G) & (r // SPEC.G < item.q_len - item.first_token)
    segment = common_segment(item, TOKENS, CUTS)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    no_values = gl.full([SPEC.v_side.size, M], 0.0, gl.float32, layout)
    no_weight = gl.full([M], 0.0, gl.float32, of_rows)
    nothing = State(no_values, no_weight + LEAST, tile_sums(gl.sum(zero.reshape([2, N // 2, M]), 0)))
    total = State(no_values, no_weight + LEAST, no_weight)
    state = nothing
    wait_full(memory.rows_full, n)
    s = warpgroup_mma_wait(0, deps=[begin_keys(first, n, zero, memory)])
    release_each(memory.k.ring, first)
    for t in range(item.tiles - 1):
        tile = item.end_tile - 1 - t
        s, state = step(s, state, tile, first + t, n, low, i, item, factor, memory, True, SPEC, SHAPE)
        if tile % segment == 0:
            folds = live & (tile % segment_tiles(position, CUTS) == 0)
            total = fold(total, state, folds)
            of_sums: gl.constexpr = gl.SliceLayout(0, state.l.type.layout)
            acc = gl.where(folds[None, :], 0.0, state.acc)
            l = gl.where(gl.convert_layout(folds, of_sums)[None, :], 0.0, state.l)
            state = State(acc, gl.where(folds, LEAST, state.m), l)
    t = item.tiles - 1
    tile = item.end_tile - 1 - t
    _s, state = step(s, state, tile, first + t, n, low, i, item, factor, memory, False, SPEC, SHAPE)
    release(memory.item_ring, n)
    if item.oldest < 0:
        store_rows(fold(total, state, live), item, batch, SPEC, SHAPE)
    else:
        store_state(state, item, batch, SPEC, CUTS, SHAPE)


@gluon.jit
def consumer(batch, memory, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """Computes the items."""
    tiles = next_tiles(memory, 0, 4)
    n = 0
    total = 0
    while tiles > 0:
        attend(read_item(memory, n, tiles, 4), n, total, batch, memory, SPEC, PLAN, SHAPE)
        total += tiles
        n += 1
        tiles = next_tiles(memory, n, 4)


@gluon.jit(do_not_specialize=Numbers._fields)
def invariant_few_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc,
    SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``invariant_items_kernel`` of invariant.py."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    memory = memory_of(tensors.query.dtype.element_ty, SHAPE)
    ending = signal_of(SHAPE.slots)
    begin_kernel(PDL)
    gl.warp_specialize(
        [
            (consumer, (batch, memory, SPEC, PLAN, SHAPE)),
            (scheduler, (batch, memory, ending, SPEC, PLAN, SHAPE)),
            (load_tiles, (((k_desc,), (v_desc,)), batch, memory, ending, 2, SPEC, PLAN, SHAPE, SPEC)),
        ],
        [1, 1],
        SHAPE.registers,
    )
