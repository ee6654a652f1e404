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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper import ring
from paged_ops.lowerings.gpu.attention.hopper.consumer import zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import matrix_of
from paged_ops.lowerings.gpu.attention.hopper.latent_few import Steps, attend
from paged_ops.lowerings.gpu.attention.hopper.launch import Described
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, rows_of
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts
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
    chunks: Any  # TileRing: of keys and values
    weights: Any  # of a tile of keys


@gluon.jit
def decode_memory(dtype: gl.constexpr, SHAPE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACES: gl.constexpr = SHAPE.stages
    queries = gl.allocate_shared_memory(dtype, [SHAPE.k.size // WIDTH, SHAPE.M, WIDTH], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (SHAPE.N // SHAPE.page), SHAPE.page, WIDTH], layout)
    tiles = reinterpret(pages, dtype, [PLACES, SHAPE.N, WIDTH], layout)
    weights = gl.allocate_shared_memory(dtype, [SHAPE.M, SHAPE.N], layout)
    return DecodeMemory(queries, TileRing(pages, tiles, ring.ring_of(PLACES, 1, 1)), weights)


@gluon.jit
def load_chunks(desc, ids, part, tile, at, chunks, COLUMNS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to copy a tile of keys, or of values: chunks ``at`` and following."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    MATRIX: gl.constexpr = COLUMNS.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    j = (tile * SHAPE.N + lane % PAGES * SHAPE.page) % SPEC.B
    rows = rows_of(ids, part.kh, j, lane, PAGES, MATRIX, 1)
    for chunk in gl.static_range(COLUMNS.size // WIDTH):
        ring.wait_empty(chunks.ring, at + chunk)
        full = ring.full_of(chunks.ring, at + chunk)
        ring.expect(chunks.ring, at + chunk, SHAPE.N * WIDTH * 2)
        for page in gl.static_range(PAGES):
            to = chunks.pages.index(ring.stage_of(chunks.ring, at + chunk) * PAGES + page)
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
def take_queries(part, counts, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
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
def multiply_keys(part, counts, t, zero, memory, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of the keys of a part's t-th tile and its unit's query rows."""
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    at, chunks, qk = (counts.tiles + t) * (CHUNKS + SHAPE.v.size // WIDTH), memory.chunks, zero
    for chunk in gl.static_range(CHUNKS):
        ring.wait_full(chunks.ring, at + chunk)
        rows = memory.queries.index(chunk).permute((1, 0))
        keys = chunks.tiles.index(ring.stage_of(chunks.ring, at + chunk))
        qk = warpgroup_mma(keys, rows, qk, use_acc=chunk > 0, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    for chunk in gl.static_range(CHUNKS):
        ring.release(chunks.ring, at + chunk)
    return qk


@gluon.jit
def multiply_values(acc, decay, tile, memory, SHAPE: gl.constexpr):
    """``acc``, a tuple of ``[64, M]``, with the values of a tile multiplied by the weights."""
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    at, chunks = first_values(tile, SHAPE), memory.chunks
    made: gl.tuple = ()
    for chunk in gl.static_range(CHUNKS):
        ring.wait_full(chunks.ring, at + chunk)
        columns = chunks.tiles.index(ring.stage_of(chunks.ring, at + chunk)).permute((1, 0))
        sums = acc[chunk] * decay[None, :]
        made += (warpgroup_mma(columns, memory.weights.permute((1, 0)), sums, is_async=True),)
    if CHUNKS == 1:
        done = (warpgroup_mma_wait(0, deps=made),)
    else:
        done = warpgroup_mma_wait(0, deps=made)
    for chunk in gl.static_range(CHUNKS):
        ring.release(chunks.ring, at + chunk)
    return done


@gluon.jit
def first_values(tile, SHAPE: gl.constexpr):
    """The first chunk of values of a tile."""
    return tile * ((SHAPE.k.size + SHAPE.v.size) // WIDTH) + SHAPE.k.size // WIDTH


@gluon.jit
def zero_unseen(tile, begin, rows, memory, SHAPE: gl.constexpr):
    """Zero the values of the keys of a tile that no row sees; the first is key ``begin``."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    at, chunks = first_values(tile, SHAPE), memory.chunks
    for chunk in range(SHAPE.v.size // WIDTH):
        ring.wait_full(chunks.ring, at + chunk)
        for page in range(PAGES):
            first = begin + page * SHAPE.page
            if (first < rows.oldest) | (first + SHAPE.page > rows.seq_len):
                values = chunks.pages.index(ring.stage_of(chunks.ring, at + chunk) * PAGES + page)
                zero_rows(values, first, rows.oldest, rows.seq_len)


@gluon.jit
def attend_part(part, counts, args, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    STEPS: gl.constexpr = Steps(take_queries, multiply_keys, zero_unseen, multiply_values)
    return attend(part, counts, args, batch, memory, STEPS, SHAPE.v.size // WIDTH, SPEC, SHAPE)
