"""Latent attention on Hopper (sm_90) in Gluon, for units of at most 16 query rows: the keys are rows of the matmuls.

A warpgroup's matmul has at least 64 rows, but may have as few as 8 columns. So with few query rows the keys of a tile,
and then the value columns, are its rows (``S^T = K Q^T``, ``O^T = V^T P^T``), and the query rows are its columns. The
accumulators of 16 rows by 512 columns fit one warpgroup, and the rows of two units take little shared memory.

One program per multiprocessor takes an equal contiguous share of the key tiles of all units, as in latent.py. A tile is
chunks of 64 keys by 64 columns: the rotated columns first, then the latents. A producer warp loads them by TMA, and
prefetches the query rows of the next unit. One warpgroup computes.

Letters: as in latent.py. Bytes of a key in bfloat16: 2 (R + P); FLOPs of a key and a query row: 2 (2 R + P).
benchmarks/notes/latent.md has the designs that were measured.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.layouts import ROW_BYTES
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import latent, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import factor_of
from paged_ops.lowerings.gpu.attention.hopper.latent_roles import CHUNKS, LatentShape
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec
from paged_ops.lowerings.gpu.target import Target

ROWS = 16  # packed query rows of a unit
UNITS = 2  # units whose query rows are in shared memory
REGISTERS = (40,)  # of the producer
MOST_PIECES = 4  # of units of equal length; more begin as many units as shares of all processors do

serves = latent.serves


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    rows = rows_of_unit(spec, shapes)
    if rows > ROWS:
        return f"{rows} packed query rows per sequence: more than {ROWS}"
    choice = latent.plan_of(ROWS, spec, target, shapes)
    return choice if isinstance(choice, str) else (choice[0], choice[1]._replace(aligned=MOST_PIECES))


def rows_of_unit(spec: Spec, shapes: Shapes) -> int:
    """Packed query rows per sequence, padded to powers of two."""
    return tuning.power_of_2(-(-shapes.T // shapes.S)) * tuning.power_of_2(spec.heads)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    page, key_bytes = latent.page_of(spec), (latent.KEY_BYTES.value,)
    shape = LatentShape(ROWS, latent.KEYS, page, latent.STAGES, UNITS, key_bytes, REGISTERS)
    rows = functools.partial(latent.describe_rows, ROWS, 64)
    columns = functools.partial(describe_columns, spec, shape.page, 64)
    return latent.build_of(latent_columns_kernel, shape, [rows], [columns], choice, spec, target)


def describe_columns(spec: Spec, page: int, width: int, cache: Tensor) -> TensorDescriptor:
    """``[N, B, ...]`` as rows, of fp8 as pairs of columns: one copy loads some columns of a page."""
    side, columns = spec.v_side, ROW_BYTES if spec.storage.row_scales else latent.LATENT + latent.ROTATED
    shape = [(cache.shape[0] - 1) * (side.n // side.b) + spec.B, columns]
    rows = cache.as_strided(shape, (side.b, 1))
    if rows.itemsize == 1:
        rows = rows.view(torch.float16)
    layout = gl.NVMMASharedLayout(2 * width if width > 8 else 0, 16, 2)
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [page, width], layout)


class ColumnsMemory(NamedTuple):
    """The contents of shared memory, in chunks of 64 columns."""

    queries: Any  # of two units
    q_ring: Any
    ring: Any  # of tiles
    pages: Any  # as copies write them,
    tiles: Any  # as they are multiplied,
    eights: Any  # and in groups of eight keys
    weights: Any  # of a tile of keys


@gluon.jit
def load_page(descs, row, at, page: gl.constexpr, which: gl.constexpr, shared, SHAPE: gl.constexpr):
    """Begin to load a page of the at-th tile."""
    for chunk in gl.static_range(CHUNKS):
        place = (ring.stage_of(shared.ring, at) * CHUNKS + chunk) * (SHAPE.N // SHAPE.page) + page
        column = (chunk + CHUNKS - 1) % CHUNKS * 64
        load_box(descs[1], [row, column], ring.full_of(shared.ring, at), shared.pages.index(place))


@gluon.jit
def take_queries(part, counts, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Wait for the query rows of a part's unit."""
    ring.wait_full(shared.q_ring, counts.units)


@gluon.jit
def zero_unseen(at, begin, rows, shared, SHAPE: gl.constexpr):
    """Zero the values of the keys of the at-th tile that no row sees."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    place = ring.stage_of(shared.ring, at)
    for chunk in range(1, CHUNKS):
        for part in range(SHAPE.N // 8):
            values = shared.eights.index((place * CHUNKS + chunk) * (SHAPE.N // 8) + part)
            roles.zero_unseen(values, begin + part * 8, rows, layout)


@gluon.jit
def multiply_keys(part, counts, t, zero, shared, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of the keys of a part's t-th tile and its unit's query rows."""
    at, query = counts.tiles + t, ring.stage_of(shared.q_ring, counts.units) * CHUNKS
    place = ring.stage_of(shared.ring, at)
    ring.wait_full(shared.ring, at)
    qk = zero
    for chunk in gl.static_range(CHUNKS):
        keys = shared.tiles.index(place * CHUNKS + chunk)
        rows = shared.queries.index(query + (chunk + CHUNKS - 1) % CHUNKS).permute((1, 0))
        qk = warpgroup_mma(keys, rows, qk, use_acc=chunk > 0, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    if t == part.seen - 1:
        ring.release(shared.q_ring, counts.units)
    return qk


@gluon.jit
def multiply_values(acc, decay, at, shared, SHAPE: gl.constexpr):
    """``acc``, a tuple of ``[64, M]``, with the values of the at-th tile multiplied by the weights."""
    place = ring.stage_of(shared.ring, at)
    made: gl.tuple = ()
    for chunk in gl.static_range(1, CHUNKS):
        columns = shared.tiles.index(place * CHUNKS + chunk).permute((1, 0))
        sums = acc[chunk - 1] * decay[None, :]
        made += (warpgroup_mma(columns, shared.weights.permute((1, 0)), sums, is_async=True),)
    made = warpgroup_mma_wait(0, deps=made)
    ring.release(shared.ring, at)
    return made


class Steps(NamedTuple):
    """The functions in which the kernels for few query rows differ."""

    take_queries: Any
    multiply_keys: Any
    zero_unseen: Any
    multiply_values: Any


@gluon.jit
def attend(
    part, counts, args, batch, shared, STEPS: gl.constexpr, SUMS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr,
    WIDTH: gl.constexpr = 64,
):  # fmt: skip
    """The result of a part, of SUMS times WIDTH value columns, and its lse: a tile of keys at a time, one matmul after
    the other."""
    factor, cap = args
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    r = gl.arange(0, M, row_layout)
    rows = roles.rows_of(part, r, factor, cap, batch.numbers, SPEC, SHAPE)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    m = gl.full([M], float("-inf"), gl.float32, row_layout)
    l = zero  # each thread's totals of weights
    acc: gl.tuple = ()
    for _chunk in gl.static_range(SUMS):
        acc += (gl.full([WIDTH, M], 0.0, gl.float32, layout),)
    STEPS.take_queries(part, counts, batch, shared, SPEC, SHAPE)
    for t in range(part.seen):
        at, begin = counts.tiles + t, (part.tile + t) * N
        qk = STEPS.multiply_keys(part, counts, t, zero, shared, SHAPE)
        if roles.is_masked(rows, part.tile + t, SPEC):
            p, m, _, decay = roles.softmax_tile(qk, m, rows, begin, 0, True, False, False, SPEC)
            if roles.has_unseen(rows, begin, N):
                STEPS.zero_unseen(at, begin, rows, shared, SHAPE)
        else:
            p, m, _, decay = roles.softmax_tile(qk, m, rows, begin, 0, False, False, False, SPEC)
        l = l * decay[None, :] + p
        shared.weights.permute((1, 0)).store(p.to(shared.weights.dtype))
        fence_async_shared()
        acc = STEPS.multiply_values(acc, decay, at, shared, SHAPE)
    m, l_, decay = roles.add_sink(m, gl.sum(l, 0), part, r, batch.tensors, SPEC)
    scale = roles.normalizer(l_, decay)
    roles.store_part(acc, scale, roles.lse2_of(m, l_), part, r, batch.tensors, 0, 1, SPEC, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.seen, counts.messages)


@gluon.jit
def attend_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    STEPS: gl.constexpr = Steps(take_queries, multiply_keys, zero_unseen, multiply_values)
    return attend(part, counts, args, batch, shared, STEPS, CHUNKS - 1, SPEC, SHAPE)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_columns_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    q_desc, cache_desc, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    PAGES: gl.constexpr = N // SHAPE.page
    PLACES: gl.constexpr = SHAPE.stages * CHUNKS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [SHAPE.units * CHUNKS, M, 64], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * PAGES, SHAPE.page, 64], layout)
    chunks = reinterpret(pages, dtype, [PLACES, N, 64], layout)
    eights = reinterpret(pages, dtype, [PLACES * (N // 8), 8, 64], layout)
    weights = gl.allocate_shared_memory(dtype, [M, N], layout)
    q_ring, tile_ring = ring.ring_of(SHAPE.units, 1, 1), ring.ring_of(SHAPE.stages, PAGES, 1)
    shared = ColumnsMemory(queries, q_ring, tile_ring, pages, chunks, eights, weights)
    ring.begin_kernel(PDL)
    batch = Batch(tensors, numbers, None)
    share = share_of(gl.program_id(0), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    ATTEND: gl.constexpr = attend_part
    LOAD: gl.constexpr = roles.load_part
    ROWS_OF_UNIT: gl.constexpr = roles.load_rows
    PAGE: gl.constexpr = load_page
    rings, descs = (tile_ring,), (q_desc, cache_desc)
    gl.warp_specialize(
        [
            (walk, (ATTEND, factor_of(numbers, SPEC), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (LOAD, (ROWS_OF_UNIT, PAGE, rings, descs), batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [1],
        SHAPE.registers,
    )
