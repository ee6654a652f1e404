"""Batch-invariant attention on Hopper (sm_90) in Gluon, prompts and decodes at the same time: invariant.py's items, and
next to them a decoder in each program, as in mixed.py.

The decoder computes the segments of sequences with few rows. Keys are the rows of its matmuls and query rows the
columns. The bits equal those of a consumer: the tensor cores add in the same order, and everything else that rounds is
the same arithmetic (scores, weights and factors of a tile of 128 keys, and sums of weights in the order of
invariant_sums.py). Chunks have 64 keys, so a tile is two halves. The decoder leaves the state of each segment, also
where a sequence has only one, and ``invariant_states_kernel`` folds them.

Whether a batch has decoders changes no bit. Letters: as in dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper import latent_roles, mixed, ring
from paged_ops.lowerings.gpu.attention.hopper.consumer import LOG2E, zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import BLOCK_M, HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.invariant_items import (
    Items,
    counters_of,
    item_of,
    scheduler,
    total_items,
)
from paged_ops.lowerings.gpu.attention.hopper.invariant_roles import consumer
from paged_ops.lowerings.gpu.attention.hopper.invariant_sums import column_sums, tile_sums
from paged_ops.lowerings.gpu.attention.hopper.loader import load_tiles
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, rows_of
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, release, signal_of, stage_of
from paged_ops.lowerings.gpu.attention.hopper.softmax import LEAST, raised
from paged_ops.lowerings.gpu.attention.hopper.work import end_items, next_tiles, places_of_items, read_item, write_item
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, keys_of_rows, needs_mask
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.spec import Numbers, Spec
from paged_ops.lowerings.gpu.target import Target

ROWS = mixed.ROWS
KEYS = 128  # of a tile, as in invariant.py
HALVES = gl.constexpr(KEYS // mixed.KEYS)
WIDTH = mixed.WIDTH
REGISTERS = (208, 208, 32, 32, 32)  # of a thread of the consumers and of the single warps; the decoder has the rest
SLOTS = 2  # items, and segments, that are published ahead


def takes(spec: Spec, target: Target, T: int, S: int) -> bool:
    """Whether a batch may have prompts with an item for each program, and decodes."""
    rows = T * spec.G
    enough = rows // BLOCK_M * spec.K >= target.processors and rows > mixed.MOST_ROWS * S
    return spec.G <= ROWS and mixed.FEWEST <= S <= mixed.MOST and enough


def shape_of(shape: HopperShape) -> HopperShape:
    """One tile of query rows and two of keys and values, which leave the space of the decoder's ring."""
    return shape._replace(stages=2, slots=SLOTS, row_slots=1, registers=REGISTERS, warps=1)


def decode_shape(spec: Spec, shape: HopperShape, shared_memory: int) -> HopperShape:
    """The halves of tiles of decodes: as many as shared memory holds next to prompts."""
    halves = mixed.decode_shape(spec, shape, shared_memory, KEYS)
    return halves._replace(stages=halves.stages // (spec.k_side.size // WIDTH.value))


class DecodeMemory(NamedTuple):
    """The decoder's shared memory."""

    items: Any  # the fields of its segments, which are items of invariant_items.py
    item_ring: Any
    queries: Any  # chunks of a segment's query rows
    halves: Any  # TileRing: of tiles of keys and of values, in chunks of some columns
    weights: Any  # of the halves of a tile


@gluon.jit
def decode_memory(dtype: gl.constexpr, SHAPE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SLOTS: gl.constexpr = SHAPE.slots
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    PLACES: gl.constexpr = SHAPE.stages * CHUNKS
    items = places_of_items(SLOTS)
    queries = gl.allocate_shared_memory(dtype, [CHUNKS, SHAPE.M, WIDTH], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (SHAPE.N // SHAPE.page), SHAPE.page, WIDTH], layout)
    tiles = reinterpret(pages, dtype, [PLACES, SHAPE.N, WIDTH], layout)
    weights = gl.allocate_shared_memory(dtype, [HALVES, SHAPE.M, SHAPE.N], layout)
    halves = TileRing(pages, tiles, ring.ring_of(SHAPE.stages, 1, 1))
    return DecodeMemory(items, ring.ring_of(SLOTS, 1, 1), queries, halves, weights)


@gluon.jit
def load_half(desc, ids, item, half, n, halves, COLUMNS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to copy half a tile of keys, or of values: the n-th."""
    CHUNKS: gl.constexpr = COLUMNS.size // WIDTH
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    MATRIX: gl.constexpr = COLUMNS.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    j = (half * SHAPE.N + lane % PAGES * SHAPE.page) % SPEC.B
    rows = rows_of(ids, item.kh, j, lane, PAGES, MATRIX, 1)
    ring.wait_empty(halves.ring, n)
    ring.expect(halves.ring, n, SHAPE.N * COLUMNS.size * 2)
    for chunk in gl.static_range(CHUNKS):
        column = item.kh * MATRIX.columns_head + chunk * WIDTH
        for page in gl.static_range(PAGES):
            to = halves.pages.index((stage_of(halves.ring, n) * CHUNKS + chunk) * PAGES + page)
            load_box(desc, [rows[page], column], ring.full_of(halves.ring, n), to)


@gluon.jit
def load_segments(
    descs, batch, memory, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, DECODES: gl.constexpr
):  # fmt: skip
    """Takes segments by the fourth counter, publishes them, and loads their keys and values, the last tile first."""
    K_SHAPE: gl.constexpr = DECODES.k
    V_SHAPE: gl.constexpr = DECODES.v
    programs = gl.num_programs(0)
    counters = counters_of(batch.tensors)
    full, last, _tiles, states = total_items(programs > 0, batch, True, SPEC, PLAN, SHAPE)
    fits = states * SPEC.K <= PLAN.cuts.states
    work = Items(fits, full + last, full, last, 0 * programs, programs, counters)
    count = gl.where(fits, (full + last) * SPEC.K, 0)
    unit = gl.program_id(0)
    n = 0
    at = 0  # halves of tiles so far
    while unit < count:
        item = item_of(unit, work, batch, True, SPEC, PLAN, SHAPE)
        write_item(memory, n, item, 1)
        fill(memory.item_ring, n)
        half = item.end_tile * HALVES - 1
        ids1 = latent_roles.load_ids(item, half, batch, SPEC, DECODES)
        ids0 = latent_roles.load_ids(item, half - 1, batch, SPEC, DECODES)
        for t in range(item.tiles):
            half = (item.end_tile - 1 - t) * HALVES
            now0, now1 = ids0, ids1
            later = gl.maximum(half - HALVES, 0)  # one tile ahead, to hide their latency
            ids0 = latent_roles.load_ids(item, later, batch, SPEC, DECODES)
            ids1 = latent_roles.load_ids(item, later + 1, batch, SPEC, DECODES)
            load_half(descs[0], now0, item, half, at, memory.halves, K_SHAPE, SPEC, DECODES)
            load_half(descs[0], now1, item, half + 1, at + 1, memory.halves, K_SHAPE, SPEC, DECODES)
            load_half(descs[1], now0, item, half, at + HALVES, memory.halves, V_SHAPE, SPEC, DECODES)
            load_half(descs[1], now1, item, half + 1, at + (HALVES + 1), memory.halves, V_SHAPE, SPEC, DECODES)
            at += 2 * HALVES
        n += 1
        unit = programs + gl.atomic_add(counters + 3, 1)
    end_items(memory, n, 1)


@gluon.jit
def multiply_keys(n, zero, memory, SHAPE: gl.constexpr):
    """The scores ``[64, M]`` of half a tile of keys, the n-th."""
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    ring.wait_full(memory.halves.ring, n)
    scores = zero
    for chunk in gl.static_range(CHUNKS):
        keys = memory.halves.tiles.index(stage_of(memory.halves.ring, n) * CHUNKS + chunk)
        rows = memory.queries.index(chunk).permute((1, 0))
        scores = warpgroup_mma(keys, rows, scores, use_acc=chunk > 0, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release(memory.halves.ring, n)
    return scores


@gluon.jit
def multiply_values(acc, n, half: gl.constexpr, memory, SHAPE: gl.constexpr):
    """``acc``, a tuple of ``[64, M]``, with the values of half a tile, the n-th, multiplied by their weights."""
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    ring.wait_full(memory.halves.ring, n)
    made: gl.tuple = ()
    for chunk in gl.static_range(CHUNKS):
        columns = memory.halves.tiles.index(stage_of(memory.halves.ring, n) * CHUNKS + chunk).permute((1, 0))
        weights = memory.weights.index(half).permute((1, 0))
        made += (warpgroup_mma(columns, weights, acc[chunk], is_async=True),)
    if CHUNKS == 1:
        made = (warpgroup_mma_wait(0, deps=made),)
    else:
        made = warpgroup_mma_wait(0, deps=made)
    release(memory.halves.ring, n)
    return made


@gluon.jit
def zero_past(n, begin, seq_len, memory, SHAPE: gl.constexpr):
    """Zero the values past the sequence in half a tile, the n-th, whose first key is ``begin``."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    PLACES: gl.constexpr = SHAPE.v.size // WIDTH * PAGES
    ring.wait_full(memory.halves.ring, n)
    for place in range(PLACES):
        first = begin + place % PAGES * SHAPE.page
        if first + SHAPE.page > seq_len:
            zero_rows(memory.halves.pages.index(stage_of(memory.halves.ring, n) * PLACES + place), first, 0, seq_len)


@gluon.jit
def store_state(acc, l, m, item, batch, SPEC: gl.constexpr, CUTS: gl.constexpr, SHAPE: gl.constexpr):
    """Write the state of a segment."""
    Dv: gl.constexpr = SHAPE.v.size
    layout: gl.constexpr = acc[0].type.layout
    r = gl.arange(0, SHAPE.M, gl.SliceLayout(0, layout))
    live = r < item.q_len * SPEC.G
    row = item.oldest.to(gl.int64) * CUTS.rows + r
    for chunk in gl.static_range(Dv // WIDTH):
        d = chunk * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
        gl.store(batch.tensors.parts + row[None, :] * Dv + d[:, None], acc[chunk], mask=live[None, :])
    gl.store(batch.tensors.part_lse + row * 2, m, mask=live)
    gl.store(batch.tensors.part_lse + row * 2 + 1, l, mask=live)


@gluon.jit
def attend_segment(item, total, batch, memory, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The state of a segment, whose tiles are the ``total``-th and following."""
    CUTS: gl.constexpr = PLAN.cuts
    MASKS: gl.constexpr = SPEC.masks
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = HALVES * SHAPE.N
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    factor = batch.numbers.scale * LOG2E
    r = gl.arange(0, M, row_layout)
    low, i = keys_of_rows(item.seq_len - item.q_len + r // SPEC.G, 0, None, batch.numbers, MASKS)
    zero = gl.full([SHAPE.N, M], 0.0, gl.float32, layout)
    m = gl.full([M], LEAST, gl.float32, row_layout)
    l = tile_sums(zero)
    acc: gl.tuple = ()
    for _chunk in gl.static_range(CHUNKS):
        acc += (zero,)
    mixed.take_queries(item, None, batch, memory, SPEC, SHAPE)
    for t in range(item.tiles):
        tile = item.end_tile - 1 - t
        at = (total + t) * (2 * HALVES)  # halves of keys, then of values
        s0 = multiply_keys(at, zero, memory, SHAPE)
        s1 = multiply_keys(at + 1, zero, memory, SHAPE)
        if needs_mask(tile, item.full_start, item.full_end, MASKS) | (t == 0):
            j = tile * N + gl.arange(0, SHAPE.N, gl.SliceLayout(1, layout))
            kept = keep_seen(j[:, None], low[None, :], i[None, :], item.seq_len, MASKS)
            s0 = gl.where(kept, s0, float("-inf"))
            kept = keep_seen(j[:, None] + SHAPE.N, low[None, :], i[None, :], item.seq_len, MASKS)
            s1 = gl.where(kept, s1, float("-inf"))
            if tile * N + N > item.seq_len:
                for half in range(HALVES):
                    zero_past(at + HALVES + half, tile * N + half * SHAPE.N, item.seq_len, memory, SHAPE)
        m, decay = raised(m, gl.max(gl.maximum(s0, s1), 0) * factor)
        p0 = gl.exp2(gl.fma(s0, factor, -m[None, :]))
        p1 = gl.exp2(gl.fma(s1, factor, -m[None, :]))
        memory.weights.index(0).permute((1, 0)).store(p0.to(memory.weights.dtype))
        memory.weights.index(1).permute((1, 0)).store(p1.to(memory.weights.dtype))
        fence_async_shared()
        l = gl.fma(l, gl.convert_layout(decay, gl.SliceLayout(0, l.type.layout))[None, :], tile_sums(p0 + p1))
        scaled: gl.tuple = ()
        for chunk in gl.static_range(CHUNKS):
            scaled += (acc[chunk] * decay[None, :],)
        acc = multiply_values(scaled, at + HALVES, 0, memory, SHAPE)
        acc = multiply_values(acc, at + (HALVES + 1), 1, memory, SHAPE)
    l = gl.convert_layout(column_sums(l), row_layout)
    store_state(acc, l, m, item, batch, SPEC, CUTS, SHAPE)


@gluon.jit
def decoder(batch, memory, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The states of the segments of sequences with few rows."""
    tiles = next_tiles(memory, 0, 4)
    n = 0
    total = 0
    while tiles > 0:
        attend_segment(read_item(memory, n, tiles, 4), total, batch, memory, SPEC, PLAN, SHAPE)
        release(memory.item_ring, n)
        total += tiles
        n += 1
        tiles = next_tiles(memory, n, 4)


@gluon.jit(do_not_specialize=Numbers._fields)
def invariant_mixed_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc, k_chunk_desc, v_chunk_desc,
    SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, DECODES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``invariant_items_kernel`` of invariant.py."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    shared = Shared(*shared_memory(dtype, SPEC, SHAPE), None, signal_of(1))  # type: ignore[call-arg]
    memory = decode_memory(dtype, DECODES)
    ending = signal_of(SHAPE.slots)
    ring.begin_kernel(PDL)
    gl.warp_specialize(
        [
            (decoder, (batch, memory, SPEC, PLAN, DECODES)),
            (consumer, (0, batch, shared, SPEC, PLAN, SHAPE)),
            (consumer, (1, batch, shared, SPEC, PLAN, SHAPE)),
            (scheduler, (batch, shared, ending, SPEC, PLAN, SHAPE)),
            (load_tiles, (((k_desc,), (v_desc,)), batch, shared, ending, 2, SPEC, PLAN, SHAPE, SPEC)),
            (load_segments, ((k_chunk_desc, v_chunk_desc), batch, memory, SPEC, PLAN, SHAPE, DECODES)),
        ],
        [4, 4, 1, 1, 1],
        SHAPE.registers,
    )
