"""Batch-invariant decodes on Hopper over fp8 caches: the items and the loads of invariant_fp8.py, with a consumer for
few query rows, which converts keys and values in registers and multiplies them by ``mma.sync``.

The bits equal those of 64 rows by ``wgmma``: on sm_90 a chain of matrix instructions gives the same float32s whatever
the instruction and the side of an operand (measured, see benchmarks/notes/gpu-designs.md), as long as each step of 16
numbers has the same numbers. So a tile has the same 128 keys here, columns of keys are in the same order
(``reordered`` of fp8.py), and the softmax takes the same instructions; weights are added by keys in one order.

Each of the consumer's warps has 32 keys of a tile for the scores, and a quarter of the columns for the values. They
exchange maxima, then weights, so a tile has two barriers. A program needs few registers and little shared memory:
several share a multiprocessor, and compute while others wait.

Letters: as in dense.py; here the rows of matmuls are keys, or columns of values, and the columns are query rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from paged_ops.lowerings.gpu.attention.hopper import fp8, ring, softmax
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.dense import HopperShape, Shared
from paged_ops.lowerings.gpu.attention.hopper.fp8 import LEAST, bytes_of
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import as_tiles, query_places, rows_at_once, tile_layout
from paged_ops.lowerings.gpu.attention.hopper.invariant_items import Items, count_items, counters_of, item_of
from paged_ops.lowerings.gpu.attention.hopper.loader import load_tiles
from paged_ops.lowerings.gpu.attention.hopper.producer import await_rows, begin_rows, prefetch_ids
from paged_ops.lowerings.gpu.attention.hopper.segments import common_segment, fold_weights, segment_tiles
from paged_ops.lowerings.gpu.attention.hopper.work import end_items, next_tiles, places_of_items, read_item, write_item
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, needs_mask
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.fp8 import widen_halves, widen_pairs
from paged_ops.lowerings.gpu.gluon_names import reinterpret
from paged_ops.lowerings.gpu.spec import Numbers, Spec

REGISTERS = 56, 56  # of a thread of the scheduler and the producer; the consumer has the rest
SLOTS = 2  # items that are published ahead, with their query rows
OTHERS = 8 << 10  # bytes of shared memory for query rows, weights, maxima, barriers and Triton; 1 KB is the system's
MOST_STAGES = 8


def shapes_of(spec: Spec, M: int, programs: int, shared_memory: int) -> tuple[HopperShape, HopperShape]:
    """The shape of the tile, and of the tiles of bytes."""
    shape, of_bytes = fp8.shapes_of(fp8.in_pairs(spec), shared_memory)
    shape = shape._replace(M=M, slots=SLOTS, row_slots=SLOTS, registers=REGISTERS)
    space = (shared_memory + 1024) // programs - 1024 - OTHERS
    stages = min(MOST_STAGES, space // (shape.N * (spec.k_side.size + spec.v_side.size)))
    return shape, of_bytes._replace(stages=stages)


class Tiles(NamedTuple):
    """The consumer's shared memory, next to what other roles have."""

    rows: Any  # of queries
    k: Any  # pairs of bytes
    v: Any
    peaks: Any  # each warp's maxima of a tile
    weights: Any


@gluon.constexpr_function
def sums_layout():
    """The layout of scores ``[128, M]`` and of sums of values ``[columns, M]``."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@gluon.constexpr_function
def all_peaks(M):
    """The layout of the warps' maxima ``[4, M]``: each thread has the maxima of its columns of scores."""
    columns = [[0, 8]] if M > 8 else []
    return gl.DistributedLinearLayout(
        [[0, 1], *columns, [1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, M]
    )


@gluon.jit
def take_rows(n, tiles, ring_, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The query rows of the n-th item, as float16 operands: the first two columns of each four, and the last two; and
    what the rows were divided by, as ``halve_rows`` of fp8.py does."""
    M: gl.constexpr = SHAPE.M
    D: gl.constexpr = SPEC.k_side.size
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    operand: gl.constexpr = gl.DotOperandLayout(1, sums_layout(), 2)
    columns: gl.constexpr = gl.SliceLayout(0, sums_layout())
    q = tiles.rows.index(ring.stage_of(ring_, n)).slice(0, M, dim=0).load(layout)
    factors = gl.full([M], 1.0, gl.float32, columns)
    if q.dtype == gl.bfloat16:
        row = q.to(gl.float32)
        power = gl.max(gl.abs(row), 1).to(gl.int32, bitcast=True) & 0x7F800000
        power = gl.minimum(gl.maximum(power, LEAST << 23), 253 << 23)
        q = (row * ((254 << 23) - power).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        factors = gl.convert_layout(power.to(gl.float32, bitcast=True), columns)
    first, last = q.reshape([M, D // 4, 2, 2]).permute((0, 1, 3, 2)).split()
    first = gl.convert_layout(first.reshape([M, D // 2]).permute((1, 0)), operand)
    last = gl.convert_layout(last.reshape([M, D // 2]).permute((1, 0)), operand)
    ring.release(ring_, n)
    return first, last, factors


@gluon.jit
def weigh(scores, m, factor, tiles):
    """The weights of a tile's keys, the maxima with them, and the factor of the state before. A row's maximum is taken
    by each warp, then over all."""
    M: gl.constexpr = scores.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, sums_layout())
    tiles.peaks.store(gl.max(gl.max(scores.reshape([2, 4, 16, M]), 0), 1))
    most = gl.max(tiles.peaks.load(all_peaks(M)), 0)
    m, decay = softmax.raised(m, gl.convert_layout(most, columns) * factor)
    p = gl.exp2(gl.fma(scores, factor[None, :], -m[None, :]))
    return p, m, decay


@gluon.jit
def tile_sums(p):
    """As ``thread_sums`` of invariant_sums.py, by keys: ``[4, 4, M]``."""
    sums = gl.sum(gl.sum(p.reshape([2, 4, 2, 4, 2, p.shape[1]]), 2), 0)
    return gl.sum(sums, 2)


@gluon.jit
def row_sums(l):
    """As ``row_sums`` of invariant_sums.py."""
    sums = gl.sum(gl.sum(l.reshape([2, 2, 2, 2, l.shape[2]]), 1), 0)
    return gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), gl.SliceLayout(0, sums_layout()))


class State(NamedTuple):
    """The state of a segment, or of the segments that were folded."""

    even: Any  # sums of values, even columns
    odd: Any
    m: Any
    l: Any  # sums of weights, [4, 4, M] in a segment


@gluon.jit
def see_tile(state, q, factor, tile, at, i, item, tiles, shared, E4M3: gl.constexpr, SPEC: gl.constexpr,
             SHAPE: gl.constexpr):  # fmt: skip
    """The state with the at-th tile of keys and values."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = sums_layout()
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ring.wait_full(shared.k.ring, at)
    k0, k1 = widen_halves(tiles.k.index(ring.stage_of(shared.k.ring, at)).load(operand), E4M3)
    zero = gl.full([N, SHAPE.M], 0.0, gl.float32, layout)
    scores = mma_v2(k1, q[1], mma_v2(k0, q[0], zero))
    last = tile == item.end_tile - 1
    if needs_mask(tile, item.full_start, item.full_end, MASKS) | last:
        j = tile * N + gl.arange(0, N, gl.SliceLayout(1, layout))
        scores = gl.where(keep_seen(j[:, None], None, i[None, :], item.seq_len, MASKS), scores, float("-inf"))
    ring.wait_full(shared.v.ring, at)
    v = tiles.v.index(ring.stage_of(shared.v.ring, at)).permute((1, 0)).load(operand)
    if last:  # past the sequence they may be NaN
        j = tile * N + gl.arange(0, N, gl.SliceLayout(0, operand))
        v = gl.where((j < item.seq_len)[None, :], v, 0)
    p, m, decay = weigh(scores, state.m, factor, tiles)
    ring.release_each(shared.k.ring, at)
    tiles.weights.store(p.to(gl.float16))
    v_even, v_odd = widen_pairs(v, E4M3)
    l_tile = tile_sums(p)
    decays = gl.convert_layout(decay, gl.SliceLayout(0, gl.SliceLayout(1, l_tile.type.layout)))[None, None, :]
    p16 = tiles.weights.load(gl.DotOperandLayout(1, layout, 2))
    ring.release_each(shared.v.ring, at)
    even = mma_v2(v_even, p16, state.even * decay[None, :])
    odd = mma_v2(v_odd, p16, state.odd * decay[None, :])
    return State(even, odd, m, gl.fma(state.l, decays, l_tile))


@gluon.jit
def nothing(SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The state of no keys."""
    layout: gl.constexpr = sums_layout()
    sums = gl.full([SPEC.v_side.size // 2, SHAPE.M], 0.0, gl.float32, layout)
    weights = tile_sums(gl.full([SHAPE.N, SHAPE.M], 0.0, gl.float32, layout))
    return State(sums, sums, gl.full([SHAPE.M], softmax.LEAST, gl.float32, gl.SliceLayout(0, layout)), weights)


@gluon.jit
def fold(total, state, folds):
    """Fold a segment into the total of the rows that ``folds``; a segment without keys changes no bit."""
    m_new, decay, weight = fold_weights(total.m, state.m)
    takes = folds & (state.m > softmax.LEAST)
    even = gl.fma(total.even, decay[None, :], state.even * weight[None, :])
    odd = gl.fma(total.odd, decay[None, :], state.odd * weight[None, :])
    l = gl.fma(total.l, decay, row_sums(state.l) * weight)
    even, odd = gl.where(takes[None, :], even, total.even), gl.where(takes[None, :], odd, total.odd)
    return State(even, odd, gl.where(takes, m_new, total.m), gl.where(takes, l, total.l))


@gluon.jit
def without(state, folds):
    """The state at the beginning of a segment of the rows that ``folds``; that of others stays."""
    even, odd = gl.where(folds[None, :], 0.0, state.even), gl.where(folds[None, :], 0.0, state.odd)
    of_sums = gl.convert_layout(folds, gl.SliceLayout(0, gl.SliceLayout(1, state.l.type.layout)))[None, None, :]
    return State(even, odd, gl.where(folds, softmax.LEAST, state.m), gl.where(of_sums, 0.0, state.l))


@gluon.jit
def store_columns(to, even, odd, live):
    """Store sums of values of rows, which begin at ``to [M]``."""
    d = 2 * gl.arange(0, even.shape[0], gl.SliceLayout(1, sums_layout()))
    at = to[None, :] + d[:, None]
    dtype: gl.constexpr = to.dtype.element_ty
    gl.store(at, even.to(dtype), mask=live[None, :])
    gl.store(at + 1, odd.to(dtype), mask=live[None, :])


@gluon.jit
def attend(
    item, n, total_tiles, factor, tiles, batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """The n-th item, whose tiles are the ``total_tiles``-th and following: the state of a segment, or the result of a
    tile of rows."""
    CUTS: gl.constexpr = PLAN.cuts
    G: gl.constexpr = SPEC.G
    Dv: gl.constexpr = SPEC.v_side.size
    TOKENS: gl.constexpr = SHAPE.M // G
    E4M3: gl.constexpr = batch.tensors.key_cache.dtype.element_ty == gl.float8e4nv
    columns: gl.constexpr = gl.SliceLayout(0, sums_layout())
    tensors = batch.tensors
    r = gl.arange(0, SHAPE.M, columns)
    token = item.first_token + r // G
    live = (r < TOKENS * G) & (token < item.q_len)
    i = item.seq_len - item.q_len + token
    segment = common_segment(item, TOKENS, CUTS)
    first, last, row_factor = take_rows(n, tiles, shared.item_ring, SPEC, SHAPE)
    state = nothing(SPEC, SHAPE)
    total = State(state.even, state.odd, state.m, 0.0 * row_factor)
    cut = (item.end_tile - 1) // segment * segment  # the oldest tile of a segment
    for t in range(item.tiles):
        tile = item.end_tile - 1 - t
        state = see_tile(
            state, (first, last), factor * row_factor, tile, total_tiles + t, i, item, tiles, shared, E4M3, SPEC, SHAPE
        )  # fmt: skip
        if (tile == cut) & (t < item.tiles - 1):
            cut -= segment
            folds = tile % segment_tiles(i, CUTS) == 0
            total = fold(total, state, folds)
            state = without(state, folds)
    if item.oldest >= 0:
        row = item.oldest.to(gl.int64) * CUTS.rows + r
        store_columns(tensors.parts + row * Dv, state.even, state.odd, live)
        gl.store(tensors.part_lse + row * 2, state.m, mask=live)
        gl.store(tensors.part_lse + row * 2 + 1, row_sums(state.l), mask=live)
    else:
        total = fold(total, state, live)
        seen = total.l != 0.0
        share = gl.where(seen, 1.0 / gl.where(seen, total.l, 1.0), 0.0)
        if tensors.v_scale is not None:
            share *= gl.load(tensors.v_scale)
        row = (item.row_start + token).to(gl.int64) * SPEC.heads + item.kh * G + r % G
        store_columns(tensors.out + row * Dv, total.even * share[None, :], total.odd * share[None, :], live)
        if SPEC.lse:
            lse2 = gl.where(seen, total.m + gl.log2(gl.where(seen, total.l, 1.0)), float("-inf"))
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)


@gluon.jit
def decoder(tiles, batch, shared, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The consumer's role."""
    factor = batch.numbers.scale * LOG2E
    count = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    while count > 0:
        item = read_item(shared, n, count, 4)
        attend(item, n, total, factor, tiles, batch, shared, SPEC, PLAN, SHAPE)
        total += count
        n += 1
        count = next_tiles(shared, n, 4)


@gluon.jit
def take_segments(batch, shared, ending, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr):
    """The scheduler's role, by the fourth counter: as ``take_in_time`` of invariant_items.py. Next to prompts these are
    the segments of sequences of at most PLAN.decoder_rows rows, if the workspace holds all states; else all items."""
    DECODES: gl.constexpr = PLAN.decoder_rows > 0
    programs = gl.num_programs(0)
    fits, full, last, tiles = count_items(batch, DECODES, SPEC, PLAN, SHAPE)
    work = Items(fits, full + last + tiles, full, last, 0 * programs, programs, counters_of(batch.tensors))
    at = gl.program_id(0)
    n = 0
    while at < work.tiles * SPEC.K:
        item = item_of(at, work, batch, DECODES, SPEC, PLAN, SHAPE)
        write_item(shared, n, item, SHAPE.warps)
        prefetch_ids(batch, item, item.end_tile - item.tiles, SPEC, SHAPE)
        slot = ring.stage_of(shared.item_ring, n)
        begin_rows(batch.tensors.query, item, shared.q_groups, slot, SPEC, SHAPE, SHAPE.warps)
        await_rows()
        ring.fill(shared.item_ring, n)
        ring.wait_full(ending, n)
        at = programs + gl.atomic_add(work.counters + 3, 1)
        n += 1
    end_items(shared, n, SHAPE.warps)


@gluon.jit(do_not_specialize=Numbers._fields)
def invariant_decode_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc,  # of pairs of bytes; None without TMA
    SPEC: gl.constexpr, PAIRS: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr,
    LOADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``invariant_fp8_kernel`` of invariant_fp8.py."""
    D: gl.constexpr = SPEC.k_side.size
    Dv: gl.constexpr = SPEC.v_side.size
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    K_PARTS: gl.constexpr = SHAPE.k.parts
    K_BYTES: gl.constexpr = BYTES.k.parts
    V_BYTES: gl.constexpr = BYTES.v.parts
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    ROWS: gl.constexpr = max(M, rows_at_once(D))  # that are loaded
    item_ring = ring.ring_of(SHAPE.slots, 1, 2)
    items = places_of_items(SHAPE.slots)
    groups = query_places(dtype, SHAPE.slots * ROWS, K_PARTS)
    keys, values = bytes_of(K_BYTES, BYTES, 128), bytes_of(V_BYTES, BYTES, 128)
    shared = Shared(items, item_ring, groups, None, keys, values)
    tiles = Tiles(
        as_tiles(groups, dtype, SHAPE.slots, ROWS, K_PARTS)[0],
        reinterpret(keys.pages[0], gl.int16, [BYTES.stages, N, D // 2], tile_layout(N, D // 2)),
        reinterpret(values.pages[0], gl.int16, [BYTES.stages, N, Dv // 2], tile_layout(N, Dv // 2)),
        gl.allocate_shared_memory(gl.float32, [4, M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.float16, [N, M], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])),
    )
    ending = ring.signal_of(SHAPE.slots)
    ring.begin_kernel(PDL)
    if tensors.k_scale is not None:
        scale *= gl.load(tensors.k_scale)
    batch = Batch(tensors, Numbers(scale, soft_cap, window, chunk, table_stride, S, T), None)
    descs = (k_desc,), (v_desc,)
    gl.warp_specialize(
        [
            (decoder, (tiles, batch, shared, SPEC, PLAN, SHAPE)),
            (take_segments, (batch, shared, ending, SPEC, PLAN, SHAPE)),
            (load_tiles, (descs, batch, shared, ending, LOADS, SPEC, PLAN, BYTES, PAIRS)),
        ],
        [1, 1],
        SHAPE.registers,
    )
