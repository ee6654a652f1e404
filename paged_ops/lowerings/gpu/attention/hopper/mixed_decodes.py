"""Decodes on Hopper (sm_90) by one warpgroup beside others: see hopper_beside.py.

The decoder multiplies keys as rows: ``S^T = K Q^T`` and ``O^T = V^T P^T`` with M packed query rows as columns, a tile
of N keys at a time, one product after the other. With 8 rows the sums take 8 registers of a thread. Keys and values
pass through a ring of chunks of 64 keys by 64 columns, which a single warp fills.

Letters: as in hopper.py.
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

from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.dense import matrix_of
from paged_ops.lowerings.gpu.attention.hopper.latent_few import softmax_tile, store_columns
from paged_ops.lowerings.gpu.attention.hopper.launch import Described
from paged_ops.lowerings.gpu.attention.hopper.producer import rows_of
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers
from paged_ops.lowerings.gpu.attention.hopper.work_shares import part_after
from paged_ops.lowerings.gpu.attention.shared.work_split import sequence
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.spec import Side, Spec

ROWS = 8  # packed query rows of a unit
KEYS = 64  # of a tile
WIDTH = gl.constexpr(64)  # columns of a chunk
SIDES = gl.constexpr(2)  # chunks of a tile of keys, and of one of values
PLACES = gl.constexpr(7)  # of chunks: so many fit


def chunk_descriptors(spec: Spec, page: int) -> list[Described]:
    """Of keys and of values."""
    sides = ("key_cache", spec.k_side), ("value_cache", spec.v_side)
    return [(name, functools.partial(describe, side, spec, page)) for name, side in sides]


def describe(side: Side, spec: Spec, page: int, cache: Tensor) -> TensorDescriptor:
    """``[N, B, K, D]`` as rows: see dense.Matrix. One copy brings 64 columns of ``page`` tokens."""
    cache = cache.flatten(3)
    (N, _, K, D), matrix = cache.shape, matrix_of(side, spec)
    shape = [(N - 1) * matrix.rows_n + (K - 1) * matrix.rows_head + spec.B, (K - 1) * matrix.columns_head + D]
    rows = cache.as_strided(shape, (side.b, 1))
    return TensorDescriptor(rows, shape, [side.b, 1], [page, WIDTH.value], gl.NVMMASharedLayout(128, 16, 2))


class Ring(NamedTuple):
    """What the decoder has in shared memory, and barriers that say that a chunk has arrived, or that its place is
    free."""

    queries: Any  # chunks of a unit's query rows
    pages: Any  # of chunks of keys and values, as the producer brings them
    chunks: Any  # as they are multiplied
    full: Any
    empty: Any
    weights: Any  # of a tile of keys


@gluon.constexpr_function
def page_of(shape):
    """Keys of a decode that one copy brings."""
    return min(shape.page, KEYS)


@gluon.jit
def ring_of(dtype: gl.constexpr, M: gl.constexpr, N: gl.constexpr, PAGE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [SIDES, M, WIDTH], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (N // PAGE), PAGE, WIDTH], layout)
    chunks = reinterpret(pages, dtype, [PLACES, N, WIDTH], layout)
    weights = gl.allocate_shared_memory(dtype, [M, N], layout)
    return Ring(queries, pages, chunks, barriers(PLACES, 1), barriers(PLACES, 1), weights)


@gluon.jit
def bring_chunks(
    desc, rows, column, at, ring, SIZE: gl.constexpr, PAGE: gl.constexpr, PAGES: gl.constexpr
):  # fmt: skip
    """Begin to copy a tile of keys, or of values: chunks ``at`` and following."""
    for chunk in gl.static_range(SIZE // WIDTH):
        place = (at + chunk) % PLACES
        full = ring.full.index(place)
        mbarrier.wait(ring.empty.index(place), (((at + chunk) // PLACES) & 1) ^ 1)
        mbarrier.expect(full, PAGES * PAGE * WIDTH * 2)
        for page in gl.static_range(PAGES):
            load_box(desc, [rows[page], column + chunk * WIDTH], full, ring.pages.index(place * PAGES + page))


@gluon.jit
def producer_of_decodes(
    descs, batch, share, ring, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr
):
    """Brings the key tiles of the share, in order."""
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = TILE.N
    PAGE: gl.constexpr = page_of(SHAPE)
    PAGES: gl.constexpr = N // PAGE
    K_MATRIX: gl.constexpr = SHAPE.k.matrix
    V_MATRIX: gl.constexpr = SHAPE.v.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    left, s, kh, first_token, tile = share
    at = 0
    while left > 0:
        _row_start, q_len, seq_len, _first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
        count = gl.minimum(end_tile - tile, left)
        left -= count
        if q_len > 0:
            block_table = batch.tensors.block_tables + s.to(gl.int64) * batch.numbers.table_stride
            j = tile * N + lane % PAGES * PAGE
            ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
            for _t in range(count):
                k_rows = rows_of(ids, kh, j % B, lane, PAGES, K_MATRIX, 1)
                v_rows = rows_of(ids, kh, j % B, lane, PAGES, V_MATRIX, 1)
                # block ids of the next tile, ahead of time; keys past the end are masked
                j += N
                ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
                bring_chunks(descs[0], k_rows, kh * K_MATRIX.columns_head, at, ring, SPEC.k_side.size, PAGE, PAGES)
                at += SIDES
                bring_chunks(descs[1], v_rows, kh * V_MATRIX.columns_head, at, ring, SPEC.v_side.size, PAGE, PAGES)
                at += SIDES
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, TILE)


@gluon.jit
def load_rows_of(row_start, tokens, kh, tensors, ring, SPEC: gl.constexpr, M: gl.constexpr):
    """A unit's query rows, from row_start on, as products take them."""
    G: gl.constexpr = SPEC.G
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, M, gl.SliceLayout(1, layout))
    row = (row_start + r // G).to(gl.int64) * SPEC.query[0] + (kh * G + r % G) * SPEC.query[1]
    at = tensors.query + row[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    live = (r // G < tokens)[:, None]
    left = gl.load(at, mask=live, other=0.0)
    right = gl.load(at + WIDTH, mask=live, other=0.0)
    ring.queries.index(0).store(left)
    ring.queries.index(1).store(right)
    fence_async_shared()


@gluon.jit
def multiply_keys(at, zero, ring):
    """The products ``[N, M]`` of a tile's keys, chunks ``at`` and ``at + 1``, with the unit's query rows."""
    qk = zero
    for chunk in gl.static_range(SIDES):
        place = (at + chunk) % PLACES
        mbarrier.wait(ring.full.index(place), ((at + chunk) // PLACES) & 1)
        rows = ring.queries.index(chunk).permute((1, 0))
        qk = warpgroup_mma(ring.chunks.index(place), rows, qk, use_acc=chunk > 0, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(ring.empty.index(at % PLACES), count=1)
    mbarrier.arrive(ring.empty.index((at + 1) % PLACES), count=1)
    return qk


@gluon.jit
def multiply_values(at, acc, ring):
    """Begin to add the product of a chunk's columns and the weights to ``acc [64, M]``."""
    mbarrier.wait(ring.full.index(at % PLACES), (at // PLACES) & 1)
    columns = ring.chunks.index(at % PLACES).permute((1, 0))
    return warpgroup_mma(columns, ring.weights.permute((1, 0)), acc, is_async=True)


@gluon.jit
def zero_unseen(at, begin, end, ring, PAGE: gl.constexpr, PAGES: gl.constexpr):
    """Zero the values from key ``end`` on in a tile, of which ``begin`` is the first key: their weights are 0, but
    0 * NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for chunk in range(SIDES):
        place = (at + chunk) % PLACES
        mbarrier.wait(ring.full.index(place), ((at + chunk) // PLACES) & 1)
        for page in range(PAGES):
            first = begin + page * PAGE
            if first + PAGE > end:
                j = first + gl.arange(0, PAGE, gl.SliceLayout(1, layout))
                values = ring.pages.index(place * PAGES + page)
                values.store(gl.where((j < end)[:, None], values.load(layout), 0.0))


@gluon.jit
def decoder(
    batch, share, ring, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """The results, or parts, of the share's units, a tile of keys at a time: one product after the other."""
    tensors, numbers = batch.tensors, batch.numbers
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = TILE.M
    N: gl.constexpr = TILE.N
    Dv: gl.constexpr = SPEC.v_side.size
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    factor = numbers.scale * LOG2E
    r = gl.arange(0, M, row_layout)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    left, s, kh, first_token, tile = share
    at = 0  # chunks
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
        count = gl.minimum(end_tile - tile, left)
        left -= count
        if q_len > 0:
            row_start += first_token
            tokens = q_len - first_token
            load_rows_of(row_start, tokens, kh, tensors, ring, SPEC, M)
            i = seq_len - tokens + r // G
            full_end = gl.maximum(seq_len - tokens + 1, 0) // N
            m = gl.full([M], float("-inf"), gl.float32, row_layout)
            l = zero  # each thread's sums of weights
            acc0, acc1 = zero, zero
            for t in range(count):
                qk = multiply_keys(at, zero, ring)
                if tile + t >= full_end:
                    begin = (tile + t) * N
                    j = begin + gl.arange(0, N, gl.SliceLayout(1, layout))
                    kept = (j[:, None] < seq_len) & (j[:, None] <= i[None, :])
                    p, m, decay = softmax_tile(qk, m, factor, (0.0, 0.0), kept, True, False)
                    if begin + N > seq_len:
                        zero_unseen(at + SIDES, begin, seq_len, ring, page_of(SHAPE), N // page_of(SHAPE))
                else:
                    p, m, decay = softmax_tile(qk, m, factor, (0.0, 0.0), True, False, False)
                l = l * decay[None, :] + p
                ring.weights.permute((1, 0)).store(p.to(ring.weights.dtype))
                fence_async_shared()
                acc0 = multiply_values(at + SIDES, acc0 * decay[None, :], ring)
                acc1 = multiply_values(at + SIDES + 1, acc1 * decay[None, :], ring)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                mbarrier.arrive(ring.empty.index((at + SIDES) % PLACES), count=1)
                mbarrier.arrive(ring.empty.index((at + SIDES + 1) % PLACES), count=1)
                at += 2 * SIDES
            l_ = gl.sum(l, 0)
            any_seen = l_ != 0.0
            scale = gl.where(any_seen, 1.0 / gl.where(any_seen, l_, 1.0), 0.0)
            lse2 = gl.where(any_seen, m + gl.log2(gl.where(any_seen, l_, 1.0)), float("-inf"))
            live = r // G < tokens
            from_start = tile == first_tile
            if from_start & (tile + count == end_tile):
                row = (row_start + r // G).to(gl.int64) * (SPEC.K * G) + kh * G + r % G
                if SPEC.lse:
                    gl.store(tensors.lse + row, lse2 * LN2, mask=live)
                store_columns(tensors.out, row, live, acc0, 0, scale, Dv)
                store_columns(tensors.out, row, live, acc1, 1, scale, Dv)
            else:
                part_row = (gl.program_id(0) * 2 + from_start.to(gl.int32)).to(gl.int64) * M + r
                gl.store(tensors.part_lse + part_row, lse2, mask=live)
                store_columns(tensors.parts, part_row, live, acc0, 0, scale, Dv)
                store_columns(tensors.parts, part_row, live, acc1, 1, scale, Dv)
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, TILE)
