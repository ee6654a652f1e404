"""Decode with wide heads on Hopper (sm_90) in Gluon, for at most 16 query rows per key/value head: the keys are rows of
the matmuls.

As in latent_few.py, the 64 keys of a tile and then the value columns are the rows of a warpgroup's matmuls
(``S^T = K Q^T``, ``O^T = V^T P^T``), and the packed query rows are its 8 or 16 columns: sums of 512 columns take 32 or
64 registers of a thread. One program per multiprocessor takes an equal contiguous share of the key tiles of all units,
as in shares.py. A producer warp loads tiles of keys and of values by TMA, in turn, into one ring of places of 64 rows;
one warpgroup loads a unit's query rows and computes.

Letters: as in dense.py. Bytes of a key in bfloat16: 4 D; FLOPs of a key and a query row: 4 D. With heads of 512 one
multiprocessor of an H200 reads a tile in 3.8 µs. The designs that were measured: benchmarks/notes/gpu-designs.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import factor_of, zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import Columns
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import places, tile_layout
from paged_ops.lowerings.gpu.attention.hopper.latent_few import Steps, attend
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, PARTS, Described, HopperLaunch
from paged_ops.lowerings.gpu.attention.hopper.producer import load_rows, rows_of
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

KEYS = 64  # of a tile
PLACES = 2  # in shared memory, of a tile of keys or of values; three, which fit, are no faster
MOST_ROWS = 16  # packed query rows of a unit
REGISTERS = (56,)  # of the producer
# Heads of keys and values. With 128 split_kernel is faster, with 256 this one by less than 3%.
SIZES = ((512, 512),)
# What its roles apply, by the names of spec.needs.
APPLIES = frozenset({"causal", "window", "chunk", "soft_cap", "sinks", "float16", "bfloat16"})


def serves(spec: Spec, target: Target) -> list[str]:
    sizes = spec.k_side.size, spec.v_side.size
    against = [] if sizes in SIZES else [f"head sizes: expected one of {SIZES}, got {sizes}"]
    return not_applied(spec, APPLIES) + against + dense.not_loaded(spec)


def rows_of_unit(spec: Spec, T: int, S: int) -> int:
    """The packed query rows of a unit, 8 or 16, if all sequences may have the same number of tokens; 0 if they are too
    many, or if the numbers differ. Sequences of other lengths are served as well."""
    tokens = max(T // S, 1) if T <= S or T % S == 0 else MOST_ROWS + 1
    rows = tuning.power_of_2(tokens * spec.G)
    return max(rows, 8) if rows <= MOST_ROWS else 0


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    M = rows_of_unit(spec, shapes.T, shapes.S)
    if not M:
        return f"more than {MOST_ROWS} packed query rows per sequence, or unequal numbers"
    if not dense.has_form(spec, shapes):
        return NOT_TMA
    return M, tuning.by_warps(tuning.division(M, shapes.S, everyone=True))


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    M, division = choice
    P = tuning.programs_apart(spec.K, target.processors)
    division = division._replace(heads_apart=P > 0)
    P, D, shape = P or target.processors, spec.v_side.size, shape_of(spec, M)
    constants = {"SPEC": spec, "DIVISION": division, "SHAPE": shape, **target.overlap(), "num_warps": 4}
    sides = ("key_cache", spec.k_side), ("value_cache", spec.v_side)
    described: list[Described] = [
        (name, functools.partial(dense.describe, side, spec, shape.page, D)) for name, side in sides
    ]
    launch = HopperLaunch(launcher_of(few_kernel, constants, target.device), (P, 1, 1), PARTS, described, as_it_is)
    merged = TileShape(M, KEYS, 0, D, 0, False)
    return merge.with_merge((launch,), P, merged, spec, target, division)


def as_it_is(query: Any) -> Any:
    """Query rows, which threads load wherever they lie."""
    return query


class FewShape(NamedTuple):
    """The tile, and how it is loaded."""

    M: int
    N: int
    D: int
    page: int  # keys per TMA copy
    places: int
    k: Columns
    v: Columns
    registers: tuple[int, ...]


def shape_of(spec: Spec, M: int) -> FewShape:
    D, page = spec.v_side.size, min(spec.B & -spec.B, KEYS)
    k, v = (Columns(D, (D,), dense.matrix_of(side, spec)) for side in (spec.k_side, spec.v_side))
    return FewShape(M, KEYS, D, page, PLACES, k, v, REGISTERS)


class FewMemory(NamedTuple):
    """The contents of shared memory."""

    queries: Any  # of a unit
    ring: Any  # of tiles: keys and values in turn
    pages: Any  # as copies write them,
    tiles: Any  # as they are multiplied,
    eights: Any  # and in groups of eight rows
    weights: Any  # of a tile of keys


@gluon.jit
def load_tile(desc, rows, column, at, shared, SHAPE: gl.constexpr):
    """Begin to copy keys, or values, to the at-th place."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    ring.wait_empty(shared.ring, at)
    ring.expect(shared.ring, at, SHAPE.N * SHAPE.D * 2)
    for page in gl.static_range(PAGES):
        place = shared.pages.index(ring.stage_of(shared.ring, at) * PAGES + page)
        load_box(desc, [rows[page], 0, 0, column], ring.full_of(shared.ring, at), place)


@gluon.jit
def load_part(part, counts, descs, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tiles of a part, in order."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    K_MATRIX: gl.constexpr = SHAPE.k.matrix
    V_MATRIX: gl.constexpr = SHAPE.v.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    next_ids = roles.load_ids(part, part.tile, batch, SPEC, SHAPE)
    for t in range(part.seen):
        ids, tile, at = next_ids, part.tile + t, (counts.tiles + t) * 2
        next_ids = roles.load_ids(part, tile + 1, batch, SPEC, SHAPE)  # one tile ahead, to hide their latency
        j = (tile * SHAPE.N + lane % PAGES * SHAPE.page) % SPEC.B
        k_rows = rows_of(ids, part.kh, j, lane, PAGES, K_MATRIX)
        load_tile(descs[0], k_rows, part.kh * K_MATRIX.columns_head, at, shared, SHAPE)
        v_rows = rows_of(ids, part.kh, j, lane, PAGES, V_MATRIX)
        load_tile(descs[1], v_rows, part.kh * V_MATRIX.columns_head, at + 1, shared, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.seen, counts.messages)


@gluon.jit
def take_queries(part, counts, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Copy a unit's query rows to where matmuls read them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    shared.queries.store(load_rows(part, batch, layout, SPEC, SHAPE.M))
    fence_async_shared()


@gluon.jit
def multiply_keys(part, counts, t, zero, shared, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of the keys of a part's t-th tile and its unit's query rows."""
    at = (counts.tiles + t) * 2
    ring.wait_full(shared.ring, at)
    keys = shared.tiles.index(ring.stage_of(shared.ring, at))
    qk = warpgroup_mma(keys, shared.queries.permute((1, 0)), zero, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    ring.release(shared.ring, at)
    return qk


@gluon.jit
def zero_unseen(tile, begin, rows, shared, SHAPE: gl.constexpr):
    """Zero the values of the keys of a tile that no row sees; the first is key ``begin``."""
    at = tile * 2 + 1
    ring.wait_full(shared.ring, at)
    for eight in range(SHAPE.N // 8):
        first = begin + eight * 8
        if (first < rows.oldest) | (first + 8 > rows.seq_len):
            values = shared.eights.index(ring.stage_of(shared.ring, at) * (SHAPE.N // 8) + eight)
            zero_rows(values, first, rows.oldest, rows.seq_len)


@gluon.jit
def multiply_values(acc, decay, tile, shared, SHAPE: gl.constexpr):
    """``acc``, a tuple of one ``[D, M]``, with the values of a tile multiplied by the weights."""
    at = tile * 2 + 1
    ring.wait_full(shared.ring, at)
    columns = shared.tiles.index(ring.stage_of(shared.ring, at)).permute((1, 0))
    sums = acc[0] * decay[None, :]
    sums = warpgroup_mma(columns, shared.weights.permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    ring.release(shared.ring, at)
    return (sums,)


@gluon.jit
def attend_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    STEPS: gl.constexpr = Steps(take_queries, multiply_keys, zero_unseen, multiply_values)
    return attend(part, counts, args, batch, shared, STEPS, 1, SPEC, SHAPE, SHAPE.D)


@gluon.jit(do_not_specialize=Numbers._fields)
def few_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    D: gl.constexpr = SHAPE.D
    N: gl.constexpr = SHAPE.N
    PAGES: gl.constexpr = SHAPE.places * (N // SHAPE.page)
    PARTS: gl.constexpr = SHAPE.k.parts
    queries = gl.allocate_shared_memory(dtype, [SHAPE.M, D], tile_layout(SHAPE.M, D))
    pages = places(dtype, PAGES, SHAPE.page, PARTS)[0]
    tiles = reinterpret(pages, dtype, [SHAPE.places, N, D], tile_layout(N, D))
    eights = reinterpret(pages, dtype, [SHAPE.places * (N // 8), 8, D], tile_layout(8, D))
    weights = gl.allocate_shared_memory(dtype, [SHAPE.M, N], gl.NVMMASharedLayout(128, 16, 2))
    shared = FewMemory(queries, ring.ring_of(SHAPE.places, 1, 1), pages, tiles, eights, weights)
    ring.begin_kernel(PDL)
    batch = Batch(tensors, numbers, None)
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    ATTEND: gl.constexpr = attend_part
    LOAD: gl.constexpr = load_part
    gl.warp_specialize(
        [
            (walk, (ATTEND, factor_of(numbers, SPEC), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (LOAD, (k_desc, v_desc), batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [1],
        SHAPE.registers,
    )
