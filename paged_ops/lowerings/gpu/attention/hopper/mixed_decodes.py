"""Decodes on Hopper (sm_90) by one warpgroup next to those of prompts: see mixed.py.

The decoder multiplies keys as rows: ``S^T = K Q^T`` and ``O^T = V^T P^T`` with M packed query rows as columns, a tile
of N keys at a time, one matmul after the other. With 8 rows the sums of 64 columns take 4 registers of a thread. Keys
and values pass through a ring of chunks of 64 keys by 64 columns, which a single warp fills.

Letters: see dense.py. SHAPE is the one of decode_shape(): its stages are chunks.
"""

from __future__ import annotations

import functools
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

from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, factor_of, zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import matrix_of
from paged_ops.lowerings.gpu.attention.hopper.latent_few import softmax_tile, store_columns
from paged_ops.lowerings.gpu.attention.hopper.launch import Described
from paged_ops.lowerings.gpu.attention.hopper.producer import Tiles, rows_of
from paged_ops.lowerings.gpu.attention.hopper.ring import full_of, release, ring_of, stage_of, wait_empty, wait_full
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, is_whole, walk
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.spec import Side, Spec

ROWS = 8  # packed query rows of a unit
KEYS = 64  # of a tile
WIDTH = gl.constexpr(64)  # columns of a chunk


def chunk_descriptors(spec: Spec, page: int) -> list[Described]:
    """One for keys, and one for values."""
    sides = ("key_cache", spec.k_side), ("value_cache", spec.v_side)
    return [(name, functools.partial(describe, side, spec, page)) for name, side in sides]


def describe(side: Side, spec: Spec, page: int, cache: Tensor) -> TensorDescriptor:
    """``[N, B, K, D]`` as rows: see dense.Matrix. One copy loads 64 columns of ``page`` tokens."""
    cache = cache.flatten(3)
    (N, _, K, D), matrix = cache.shape, matrix_of(side, spec)
    shape = [(N - 1) * matrix.rows_n + (K - 1) * matrix.rows_head + spec.B, (K - 1) * matrix.columns_head + D]
    rows = cache.as_strided(shape, (side.b, 1))
    return TensorDescriptor(rows, shape, [side.b, 1], [page, WIDTH.value], gl.NVMMASharedLayout(128, 16, 2))


class DecodeMemory(NamedTuple):
    """The decoder's shared memory."""

    queries: Any  # chunks of a unit's query rows
    chunks: Any  # Tiles: of keys and values
    weights: Any  # of a tile of keys


@gluon.jit
def decode_memory(dtype: gl.constexpr, SHAPE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACES: gl.constexpr = SHAPE.stages
    queries = gl.allocate_shared_memory(dtype, [SHAPE.k.size // WIDTH, SHAPE.M, WIDTH], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (SHAPE.N // SHAPE.page), SHAPE.page, WIDTH], layout)
    tiles = reinterpret(pages, dtype, [PLACES, SHAPE.N, WIDTH], layout)
    weights = gl.allocate_shared_memory(dtype, [SHAPE.M, SHAPE.N], layout)
    return DecodeMemory(queries, Tiles(pages, tiles, ring_of(PLACES, 1, 1)), weights)


@gluon.jit
def load_chunks(desc, ids, part, tile, at, chunks, COLUMNS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to copy a tile of keys, or of values: chunks ``at`` and following."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    MATRIX: gl.constexpr = COLUMNS.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    j = (tile * SHAPE.N + lane % PAGES * SHAPE.page) % SPEC.B
    rows = rows_of(ids, part.kh, j, lane, PAGES, MATRIX, 1)
    for chunk in gl.static_range(COLUMNS.size // WIDTH):
        wait_empty(chunks.ring, at + chunk)
        full = full_of(chunks.ring, at + chunk)
        mbarrier.expect(full, SHAPE.N * WIDTH * 2)
        for page in gl.static_range(PAGES):
            to = chunks.pages.index(stage_of(chunks.ring, at + chunk) * PAGES + page)
            load_box(desc, [rows[page], part.kh * MATRIX.columns_head + chunk * WIDTH], full, to)


@gluon.jit
def load_part(part, counts, descs, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tiles of a part, in order."""
    K_SHAPE: gl.constexpr = SHAPE.k
    V_SHAPE: gl.constexpr = SHAPE.v
    K_CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    CHUNKS: gl.constexpr = K_CHUNKS + SHAPE.v.size // WIDTH
    next_ids = roles.load_ids(part, part.tile, batch, SPEC, SHAPE)
    for t in range(part.seen):
        ids, tile, at = next_ids, part.tile + t, (counts.tiles + t) * CHUNKS
        next_ids = roles.load_ids(part, tile + 1, batch, SPEC, SHAPE)  # one tile ahead, to hide their latency
        load_chunks(descs[0], ids, part, tile, at, memory.chunks, K_SHAPE, SPEC, SHAPE)
        load_chunks(descs[1], ids, part, tile, at + K_CHUNKS, memory.chunks, V_SHAPE, SPEC, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.seen, counts.messages)


@gluon.jit
def load_queries(part, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Copy a unit's query rows to where matmuls read them."""
    G: gl.constexpr = SPEC.G
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, SHAPE.M, gl.SliceLayout(1, layout))
    token = part.row_start + part.first_token + r // G
    row = token.to(gl.int64) * SPEC.query[0] + (part.kh * G + r % G) * SPEC.query[1]
    at = batch.tensors.query + row[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    live = (r // G < part.q_len - part.first_token)[:, None]
    for chunk in gl.static_range(CHUNKS):
        memory.queries.index(chunk).store(gl.load(at + chunk * WIDTH, mask=live, other=0.0))
    fence_async_shared()


@gluon.jit
def multiply_keys(at, zero, memory, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of a tile's keys, chunks ``at`` and following, and the unit's query rows."""
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    chunks, qk = memory.chunks, zero
    for chunk in gl.static_range(CHUNKS):
        wait_full(chunks.ring, at + chunk)
        rows = memory.queries.index(chunk).permute((1, 0))
        keys = chunks.tiles.index(stage_of(chunks.ring, at + chunk))
        qk = warpgroup_mma(keys, rows, qk, use_acc=chunk > 0, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    for chunk in gl.static_range(CHUNKS):
        release(chunks.ring, at + chunk)
    return qk


@gluon.jit
def multiply_values(acc, decay, at, memory, SHAPE: gl.constexpr):
    """``acc``, a tuple of ``[64, M]``, with the values of a tile, chunks ``at`` and following, multiplied by the
    weights."""
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    chunks = memory.chunks
    made: gl.tuple = ()
    for chunk in gl.static_range(CHUNKS):
        wait_full(chunks.ring, at + chunk)
        columns = chunks.tiles.index(stage_of(chunks.ring, at + chunk)).permute((1, 0))
        sums = acc[chunk] * decay[None, :]
        made += (warpgroup_mma(columns, memory.weights.permute((1, 0)), sums, is_async=True),)
    if CHUNKS == 1:
        done = (warpgroup_mma_wait(0, deps=made),)
    else:
        done = warpgroup_mma_wait(0, deps=made)
    for chunk in gl.static_range(CHUNKS):
        release(chunks.ring, at + chunk)
    return done


@gluon.jit
def zero_unseen(at, begin, rows, chunks, SHAPE: gl.constexpr):
    """Zero the values of the keys of a tile that no row sees; the first is key ``begin``."""
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    for chunk in range(CHUNKS):
        wait_full(chunks.ring, at + chunk)
        for page in range(PAGES):
            first = begin + page * SHAPE.page
            if (first < rows.oldest) | (first + SHAPE.page > rows.seq_len):
                values = chunks.pages.index(stage_of(chunks.ring, at + chunk) * PAGES + page)
                zero_rows(values, first, rows.oldest, rows.seq_len)


@gluon.jit
def attend_part(part, counts, args, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The result of a part, and its lse: a tile of keys at a time, one matmul after the other."""
    factor, cap = args
    tensors = batch.tensors
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    Dv: gl.constexpr = SHAPE.v.size
    K_CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    V_CHUNKS: gl.constexpr = Dv // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    r = gl.arange(0, M, row_layout)
    load_queries(part, batch, memory, SPEC, SHAPE)
    rows = roles.rows_of(part, r, factor, cap, batch.numbers, SPEC, SHAPE)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    m = gl.full([M], float("-inf"), gl.float32, row_layout)
    l = zero  # each thread's sums of weights
    acc: gl.tuple = ()
    for _chunk in gl.static_range(V_CHUNKS):
        acc += (zero,)
    for t in range(part.seen):
        at, begin = (counts.tiles + t) * (K_CHUNKS + V_CHUNKS), (part.tile + t) * N
        qk = multiply_keys(at, zero, memory, SHAPE)
        if roles.is_masked(rows, part.tile + t, SPEC):
            kept = roles.keep(qk, rows, begin, 0, SPEC)
            p, m, decay = softmax_tile(qk, m, rows.factor, rows.cap, kept, True, SOFT_CAP)
            if roles.has_unseen(rows, begin, N):
                zero_unseen(at + K_CHUNKS, begin, rows, memory.chunks, SHAPE)
        else:
            p, m, decay = softmax_tile(qk, m, rows.factor, rows.cap, True, False, SOFT_CAP)
        l = l * decay[None, :] + p
        memory.weights.permute((1, 0)).store(p.to(memory.weights.dtype))
        fence_async_shared()
        acc = multiply_values(acc, decay, at + K_CHUNKS, memory, SHAPE)
    head = part.kh * SPEC.G + r % SPEC.G
    m, l_, decay = roles.add_sink(m, gl.sum(l, 0), head, part, tensors, SPEC)
    scale = roles.normalizer(l_, decay)
    lse2 = roles.lse2_of(m, l_)
    live = roles.live_rows(part, r, SPEC, SHAPE)
    if is_whole(part):
        row = roles.output_row(part, r, SPEC)
        if SPEC.lse:
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        for chunk in gl.static_range(V_CHUNKS):
            store_columns(tensors.out, row, live, acc[chunk], chunk, scale, Dv)
    else:
        row = roles.part_row(part, r, SHAPE)
        gl.store(tensors.part_lse + row, lse2, mask=live)
        for chunk in gl.static_range(V_CHUNKS):
            store_columns(tensors.parts, row, live, acc[chunk], chunk, scale, Dv)
    return Counts(counts.units + 1, counts.tiles + part.seen, counts.messages)


@gluon.jit
def decoder(batch, share, memory, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    walk(attend_part, factor_of(batch.numbers, SPEC), batch, share, memory, SPEC, DIVISION, SHAPE)


@gluon.jit
def producer_of_decodes(descs, batch, share, memory, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    walk(load_part, descs, batch, share, memory, SPEC, DIVISION, SHAPE)
