"""Latent attention on Hopper (sm_90) in Gluon, for units of at most 16 query rows: the keys are rows of the products.

A product of a warpgroup has at least 64 rows, and from 8 columns on. So with few query rows the keys of a tile, and
then the value columns, are its rows (``S^T = K Q^T``, ``O^T = V^T P^T``), and the query rows are its columns. The sums
of 16 rows by 512 columns fit one warpgroup, and the rows of two units take little shared memory beside two tiles.

One program per multiprocessor takes an equal contiguous share of the key tiles of all units, as in latent.py. A
tile is chunks of 64 keys by 64 columns: the rotated columns first, then the latents. A producer warp brings them by
TMA, and the query rows of the next unit ahead of time. One warpgroup multiplies.

Letters: as in latent.py. Bytes of a key in bfloat16: 2 (R + P); FLOPs of a key and a query row: 2 (2 R + P).
benchmarks/notes/latent.md has the designs that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import latent
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.latent import CACHE, KEYS, QUERY, STAGES, LatentLaunch, LatentShape
from paged_ops.lowerings.gpu.attention.hopper.latent_consumer import bounds_of
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers
from paged_ops.lowerings.gpu.attention.hopper.work_shares import part_after, part_of, share_of
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape
from paged_ops.lowerings.gpu.target import Target

ROWS = 16  # packed query rows of a unit
WIDTH = 64  # columns of a chunk
UNITS = gl.constexpr(2)  # whose query rows are in shared memory
REGISTERS = (40,)  # of the producer


serves = latent.serves


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    rows = tuning.power_of_2(-(-shapes.T // shapes.S)) * tuning.power_of_2(spec.heads)
    if rows > ROWS:
        return f"query: expected at most {ROWS} packed query rows per sequence, got {rows}"
    if not latent.has_form(spec, shapes):
        return NOT_TMA
    return shapes.T, tuning.division(ROWS, shapes.S, everyone=True)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    _, division = choice
    side, R = spec.v_side, spec.v_side.size
    spec = latent.packed(spec, ROWS)
    page, P = min(spec.B & -spec.B, KEYS), target.processors
    constants = {
        "SPEC": spec,
        "DIVISION": division,
        "SHAPE": LatentShape(ROWS, KEYS, page, STAGES, side.n // side.b, REGISTERS),
        **target.overlap(),
        "num_warps": 4,
    }
    launcher = launcher_of(latent_columns_kernel, constants, target.device)
    launch = ColumnsLaunch(launcher, (P, 1, 1), spec, shapes.N, page, ROWS)
    return decode.with_merge((launch,), P, TileShape(ROWS, KEYS, 0, R, 0, False), spec, target, division)


class ColumnsLaunch(LatentLaunch):
    """A launch whose copies bring 64 columns of query rows, and of a page."""

    __slots__ = ()
    described = (QUERY, CACHE)

    def _describe_rows(self, query: Tensor) -> Iterator[TensorDescriptor]:
        T, H, D = query.shape
        yield TensorDescriptor(query, [T * H, D], [D, 1], [self._rows, WIDTH], gl.NVMMASharedLayout(128, 16, 2))

    def _describe(self, cache: Tensor) -> Iterator[TensorDescriptor]:
        side, B = self._spec.v_side, self._spec.B
        shape = [(self._N - 1) * (side.n // side.b) + B, latent.LATENT + latent.ROTATED]
        rows = cache.as_strided(shape, (side.b, 1))
        yield TensorDescriptor(rows, shape, [side.b, 1], [self._page, WIDTH], gl.NVMMASharedLayout(128, 16, 2))


class Shared(NamedTuple):
    """The contents of shared memory, and barriers that say that something has arrived, and that its place is free."""

    queries: Any  # chunks of query rows, of two units
    q_full: Any
    q_empty: Any
    pages: Any  # chunks as the producer brings them,
    chunks: Any  # as they are multiplied,
    eights: Any  # and by eight keys
    full: Any
    empty: Any
    weights: Any  # of a tile of keys


@gluon.jit
def bring_rows(q_desc, row, n, shared, CHUNKS: gl.constexpr, SHAPE: gl.constexpr):
    """The query rows of the program's n-th unit."""
    place = n % UNITS
    full = shared.q_full.index(place)
    mbarrier.wait(shared.q_empty.index(place), ((n // UNITS) & 1) ^ 1)
    mbarrier.expect(full, SHAPE.M * CHUNKS * 128)
    for chunk in gl.static_range(CHUNKS):
        load_box(q_desc, [row, chunk * 64], full, shared.queries.index(place * CHUNKS + chunk))


@gluon.jit
def producer(
    descriptors, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Brings the tiles of the share, and each unit's query rows."""
    q_desc, cache_desc = descriptors
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    CHUNKS: gl.constexpr = (SPEC.v_side.size + SPEC.rotated.size) // 64
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    left, s, kh, first_token, tile = share
    n = 0
    at = 0  # tiles
    while left > 0:
        row_start, q_len, seq_len, _first_tile, _end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            q_row = (row_start + first_token) * SPEC.heads + kh * SPEC.G
            block_table = batch.tensors.block_tables + s.to(gl.int64) * batch.numbers.table_stride
            j = tile * N + lane % PAGES * PAGE
            ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
            bring_rows(q_desc, q_row, n, shared, CHUNKS, SHAPE)
            for t in range(seen):
                begin = (tile + t) * N
                first = ids * SHAPE.rows_n + (begin + lane % PAGES * PAGE) % B
                j = begin + N + lane % PAGES * PAGE  # of the next tile, ahead of time
                ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
                place = at % SHAPE.stages
                full = shared.full.index(place)
                mbarrier.wait(shared.empty.index(place), ((at // SHAPE.stages) & 1) ^ 1)
                for page in gl.static_range(PAGES):
                    row = gl.sum(gl.where(lane == page, first, 0), 0)
                    if begin + page * PAGE < seq_len:
                        mbarrier.expect(full, PAGE * CHUNKS * 128)
                        for chunk in gl.static_range(CHUNKS):
                            column = (chunk + CHUNKS - 1) % CHUNKS * 64
                            to = (place * CHUNKS + chunk) * PAGES + page
                            load_box(cache_desc, [row, column], full, shared.pages.index(to))
                    else:
                        mbarrier.arrive(full, count=1)
                at += 1
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def zero_unseen(place, begin, low, end, shared, CHUNKS: gl.constexpr, SHAPE: gl.constexpr):
    """As in latent_hopper_rows.py, for the chunks of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    for chunk in range(1, CHUNKS):
        for part in range(SHAPE.N // 8):
            first = begin + part * 8
            if (first < low) | (first + 8 > end):
                j = first + gl.arange(0, 8, gl.SliceLayout(1, layout))
                rows = shared.eights.index((place * CHUNKS + chunk) * (SHAPE.N // 8) + part)
                rows.store(gl.where(((j >= low) & (j < end))[:, None], rows.load(layout), 0.0))


@gluon.jit
def multiply_keys(place, n, zero, shared, CHUNKS: gl.constexpr):
    """The products ``[N, M]`` of a tile's keys with the query rows of the program's n-th unit."""
    query = n % UNITS * CHUNKS
    qk = zero
    for chunk in gl.static_range(CHUNKS):
        keys = shared.chunks.index(place * CHUNKS + chunk)
        rows = shared.queries.index(query + (chunk + CHUNKS - 1) % CHUNKS).permute((1, 0))
        qk = warpgroup_mma(keys, rows, qk, use_acc=chunk > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[qk])


@gluon.jit
def multiply_values(chunk: gl.constexpr, acc, decay, place, shared, CHUNKS: gl.constexpr):
    """``acc [64, M]`` with the product of a chunk's columns and the weights."""
    columns = shared.chunks.index(place * CHUNKS + chunk).permute((1, 0))
    return warpgroup_mma(columns, shared.weights.permute((1, 0)), acc * decay[None, :], is_async=True)


@gluon.jit
def weights_of(qk, m, factor, cap, kept, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr):
    """The weights of a tile ``[N, M]`` (unnormalised, to base 2), each row's maximum, and the decay of earlier sums."""
    if SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * cap[1]) + 1.0)
    if MASKED:
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 0) * factor)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(qk * factor - shift[None, :]), m_new, gl.exp2(m - shift)


@gluon.jit
def weigh(qk, m, rows, tile, place, factor, cap, shared, CHUNKS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """:func:`weights_of` with the masks, which no value of a key that no row sees passes."""
    MASKS: gl.constexpr = SPEC.masks
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    N: gl.constexpr = SHAPE.N
    begin = tile * N
    masked = tile >= rows.full_end
    if BOUNDED:
        masked = masked | (tile < rows.full_start)
    if masked:
        j = begin + gl.arange(0, N, gl.SliceLayout(1, qk.type.layout))
        kept = j[:, None] < rows.seq_len
        if MASKS.causal:
            kept = kept & (j[:, None] <= rows.i[None, :])
        if BOUNDED:
            kept = kept & (j[:, None] >= rows.low[None, :])
        p, m_new, decay = weights_of(qk, m, factor, cap, kept, True, SPEC.logits.soft_cap)
        if (begin + N > rows.seq_len) | (begin < rows.oldest):
            zero_unseen(place, begin, rows.oldest, rows.seq_len, shared, CHUNKS, SHAPE)
    else:
        p, m_new, decay = weights_of(qk, m, factor, cap, True, False, SPEC.logits.soft_cap)
    return p, m_new, decay


@gluon.jit
def store_columns(to, row, live, acc, chunk: gl.constexpr, factor, R: gl.constexpr):
    """Store ``acc [64, M]``, the chunk's value columns, to rows of R columns. A row without keys is 0; a NaN stays
    NaN."""
    d = chunk * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    value = (acc * factor[None, :]).to(to.dtype.element_ty)
    gl.store(to + row[None, :] * R + d[:, None], value, mask=live[None, :])


@gluon.jit
def store_all(to, row, live, sums, factor, R: gl.constexpr):
    for chunk in gl.static_range(8):
        store_columns(to, row, live, sums[chunk], chunk, factor, R)


@gluon.jit
def consumer(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The weights of all tiles, the sums of values, and lse."""
    tensors, numbers = batch.tensors, batch.numbers
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    R: gl.constexpr = SPEC.v_side.size
    CHUNKS: gl.constexpr = (R + SPEC.rotated.size) // 64
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    p_id = gl.program_id(0)
    factor = numbers.scale * LOG2E
    cap = (0.0, 0.0)
    if SPEC.logits.soft_cap:
        factor = 1.0
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    r = gl.arange(0, M, row_layout)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    left, s, kh, first_token, tile = share
    n = 0
    at = 0  # tiles
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            rows = bounds_of(seq_len, q_len, first_token, r, numbers, SPEC, SHAPE)
            m = gl.full([M], float("-inf"), gl.float32, row_layout)
            l = zero  # each thread's sums of weights
            acc0, acc1, acc2, acc3, acc4, acc5, acc6, acc7 = zero, zero, zero, zero, zero, zero, zero, zero
            mbarrier.wait(shared.q_full.index(n % UNITS), (n // UNITS) & 1)
            for t in range(seen):
                place = at % SHAPE.stages
                mbarrier.wait(shared.full.index(place), (at // SHAPE.stages) & 1)
                qk = multiply_keys(place, n, zero, shared, CHUNKS)
                if t == seen - 1:
                    mbarrier.arrive(shared.q_empty.index(n % UNITS), count=1)
                p, m, decay = weigh(qk, m, rows, tile + t, place, factor, cap, shared, CHUNKS, SPEC, SHAPE)
                l = l * decay[None, :] + p
                shared.weights.permute((1, 0)).store(p.to(shared.weights.dtype))
                fence_async_shared()
                acc0 = multiply_values(1, acc0, decay, place, shared, CHUNKS)
                acc1 = multiply_values(2, acc1, decay, place, shared, CHUNKS)
                acc2 = multiply_values(3, acc2, decay, place, shared, CHUNKS)
                acc3 = multiply_values(4, acc3, decay, place, shared, CHUNKS)
                acc4 = multiply_values(5, acc4, decay, place, shared, CHUNKS)
                acc5 = multiply_values(6, acc5, decay, place, shared, CHUNKS)
                acc6 = multiply_values(7, acc6, decay, place, shared, CHUNKS)
                acc7 = multiply_values(8, acc7, decay, place, shared, CHUNKS)
                acc0, acc1, acc2, acc3, acc4, acc5, acc6, acc7 = warpgroup_mma_wait(
                    0, deps=[acc0, acc1, acc2, acc3, acc4, acc5, acc6, acc7]
                )
                mbarrier.arrive(shared.empty.index(place), count=1)
                at += 1
            from_start = tile == first_tile
            head = kh * G + r % G
            l_ = gl.sum(l, 0)
            decay = gl.full([M], 1.0, gl.float32, row_layout)
            if SPEC.logits.sinks:
                if from_start:  # the first part includes the sink
                    sink = gl.load(tensors.sinks + head, mask=head < SPEC.heads, other=0.0) * LOG2E
                    m_new = gl.maximum(m, sink)
                    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
                    decay = gl.exp2(m - shift)
                    l_ = l_ * decay + gl.exp2(sink - shift)
                    m = m_new
            any_seen = l_ != 0.0
            scale = gl.where(any_seen, decay / gl.where(any_seen, l_, 1.0), 0.0)
            lse2 = gl.where(any_seen, m + gl.log2(gl.where(any_seen, l_, 1.0)), float("-inf"))
            token = first_token + r // G
            live = (r < TOKENS * G) & (token < q_len) & (head < SPEC.heads)
            sums = (acc0, acc1, acc2, acc3, acc4, acc5, acc6, acc7)
            if from_start & (tile + count == end_tile):
                row = (row_start + token).to(gl.int64) * SPEC.heads + head
                if SPEC.lse:
                    gl.store(tensors.lse + row, lse2 * LN2, mask=live)
                store_all(tensors.out, row, live, sums, scale, R)
            else:
                part_row = (p_id * 2 + from_start.to(gl.int32)).to(gl.int64) * M + r
                gl.store(tensors.part_lse + part_row, lse2, mask=live)
                store_all(tensors.parts, part_row, live, sums, scale, R)
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_columns_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    q_desc, cache_desc, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    CHUNKS: gl.constexpr = (SPEC.v_side.size + SPEC.rotated.size) // 64
    PLACES: gl.constexpr = SHAPE.stages * CHUNKS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [UNITS * CHUNKS, M, 64], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (N // PAGE), PAGE, 64], layout)
    chunks = reinterpret(pages, dtype, [PLACES, N, 64], layout)
    eights = reinterpret(pages, dtype, [PLACES * (N // 8), 8, 64], layout)
    weights = gl.allocate_shared_memory(dtype, [M, N], layout)
    shared = Shared(
        queries, barriers(UNITS, 1), barriers(UNITS, 1), pages, chunks, eights,
        barriers(SHAPE.stages, N // PAGE), barriers(SHAPE.stages, 1), weights,
    )  # fmt: skip
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    batch = Batch(tensors, numbers, None)
    share = share_of(gl.program_id(0), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    gl.warp_specialize(
        [
            (consumer, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (producer, ((q_desc, cache_desc), batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [1],
        SHAPE.registers,
    )
