"""Prefill on Hopper (sm_90) in Gluon: what ``prefill_kernel`` of prefill.py computes, at the speed of the tensor cores.
It also takes sequences of few tokens in the same batch, or with many query heads per key/value head.

One program per multiprocessor takes items, which are tiles of query rows of one key/value head, the longest first. A
scheduler takes items and prefetches their query rows. A producer warp loads keys and values to shared memory by TMA,
one block of the cache at a time. Two or three consumer warpgroups compute 64 of the rows each: the softmax of one tile
of keys runs during the matmul with the values of the previous tile. The designs that were measured:
benchmarks/notes/gpu-designs.md.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D head size, B tokens per block. A tile has
M packed query rows (row r is token ``r // G``, head ``r % G``) and N keys. Tiles are stored as groups of 8 rows by 64
columns, all columns of 8 rows together: PAGE keys of a block are contiguous, and one TMA copy loads them.

Serves causal or not, sliding windows with or without first tokens, attention chunks, bidirectional ranges, soft cap,
sinks and lse, float16 and bfloat16, heads of 512 or a multiple of 16 (see head_chunks.py), caches with rows that TMA
can address. The Triton kernel serves everything else, with the same results. Ideas: FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper.consumer import consumer
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import (
    WARPGROUP,
    as_tiles,
    box_layout,
    box_of,
    distance_of,
    parts_of,
    pieces_of,
    places,
    query_places,
    value_parts_of,
)
from paged_ops.lowerings.gpu.attention.hopper.launch import (
    NOT_TMA,
    Described,
    HopperLaunch,
    aligned_rows,
    contiguous_rows,
)
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, producer, scheduler
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers, ring_of, signal_of
from paged_ops.lowerings.gpu.attention.hopper.work import places_of_items
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Division, Numbers, Shapes, Side, Spec, not_applied
from paged_ops.lowerings.gpu.target import TRITON, Target

BLOCK_M = 128  # with two consumers
SIZES = range(64, 257, 16)  # head sizes
# Wider ones. Sums of all value columns would not fit the registers, so an item has PIECE of them, and scores are
# computed once for each piece.
WIDE, PIECE = (512,), 256
KEYS_OF_WIDE = 32  # of a tile
# Three consumers: the largest head size, the time of an item relative to two consumers, the smallest window or chunk,
# and the registers of a thread per role (all 65536 are used).
SIZE_OF_THREE, TIME_OF_THREE, SPAN_OF_THREE = 64, 1.35, 1024
REGISTERS_OF_THREE = 160, 160, 32, 32
MOST_STAGES = 4  # tiles of keys and of values in shared memory
MOST_SLOTS = 2  # tiles of query rows in shared memory
MOST_PARTS = 3  # of the columns of a head
HEADS = 32  # key/value heads in flight: several programs read the same keys, from the L2
OTHERS = 2 << 10  # bytes of shared memory for barriers and for Triton
SHORT = 4096  # keys that one program reads in less than 50 µs
MANY_ROWS = 64  # packed query rows with which split_kernel would take twice the time
SHORT_OF_MANY_ROWS = 8192  # as SHORT, from MANY_ROWS on


# What its roles apply, by the names of spec.needs.
APPLIES = frozenset(
    {"causal", "window", "first", "chunk", "ranges", "later", "soft_cap", "sinks", "float16", "bfloat16"}
)


def serves(spec: Spec, target: Target) -> list[str]:
    return serves_sizes(spec, (*served_sizes(), *WIDE))


def serves_sizes(spec: Spec, sizes: tuple[int, ...]) -> list[str]:
    """The reasons against a call, with these sizes of heads."""
    key, value = spec.k_side, spec.v_side
    against = {
        f"head_size: expected one of {sizes}, got {key.size}": key.size not in sizes,
        f"value_head_size: expected one of {sizes}, got {value.size}": value.size not in sizes,
        f"num_heads: expected at most {BLOCK_M} per key/value head, got {spec.G}": spec.G > BLOCK_M,
        "first tokens with a chunk: not applied by this kernel": bool(spec.masks.first) and spec.masks.chunk,
    }
    return not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds] + not_loaded(spec)


def not_loaded(spec: Spec) -> list[str]:
    """Why query rows, or tiles of keys and values, cannot be loaded as they are multiplied."""
    key, value = spec.k_side, spec.v_side
    against = {
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected {spec.dtype}, got {spec.storage.dtype}": spec.storage.dtype != spec.dtype,
        "query: expected contiguous elements of a head": spec.query[2] != 1,
        "kv_cache: expected keys that TMA can address": key.x != key.size or _matrix(key, spec) is None,
        "kv_cache: expected values that TMA can address": _matrix(value, spec) is None,
    }
    return [reason for reason, holds in against.items() if holds]


def served_sizes() -> tuple[int, ...]:
    """The head sizes that divide into at most MOST_PARTS parts."""
    return tuple(size for size in SIZES if len(pieces_of(size)) <= MOST_PARTS)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel would take none of its sequences, or if the call forbids it."""
    tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
    items = 0 if tiles.all_split else shapes.T * spec.G // BLOCK_M * spec.K
    short = short_keys(tiles.split.block_m, shapes.S * spec.K, items, target.processors)
    if tiles.all_split and short < 0:
        return ALL_SPLIT
    if not has_form(spec, shapes):
        return NOT_TMA
    consumers = 2 if has_short_spans(spec, shapes.numbers) else consumers_of(spec, target, shapes.T)
    return tiles, tuning.division(tiles.split.block_m, shapes.S, short), consumers


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    tiles, division, consumers = choice
    shape = shape_of(spec, target.shared_memory, consumers)
    described = descriptors(spec, shape.page)
    more = (division.short,)
    return build_items(dense_kernel, {"SHAPE": shape}, (), described, spec, target, tiles, division, more)


def build_items(
    kernel: Any, constants: dict[str, Any], takes: tuple[str, ...], described: list[Described], spec: Spec,
    target: Target, tiles: tuning.Tiles, division: Division, more: tuple[int, ...] = (), at_once: int = 1024,
) -> Launches:  # fmt: skip
    """Launches that together serve every sequence of a batch: of a kernel that takes items, and of split_kernel.

    Args:
        takes, described, more: as in :class:`HopperLaunch`.
        at_once: the most sequences that the kernel counts in one vector.
    """
    constants = {
        "SPEC": read_spec(spec),
        # Not constants in this kernel: short and times.
        "DIVISION": division._replace(short=0, times=0, at_once=min(division.at_once, at_once)),
        **constants,
        "num_warps": 4,
    }
    shape, most = constants["SHAPE"], target.processors
    tokens, heads = shape.M // spec.G, spec.K * shape.pieces

    def grid(numbers: Numbers) -> Grid:
        return min((numbers.T // tokens + numbers.S) * heads, most), 1, 1

    launcher = launcher_of(kernel, constants, target.device)
    launch = HopperLaunch(launcher, grid, ("taken", *takes), described, rows_of(spec), more)
    return decode.build_around((launch,), spec, target, tiles, division, counted=True)


ALL_SPLIT = "every sequence fits a tile of split_kernel, which is faster"  # why plan() refuses a batch


def has_form(spec: Spec, shapes: Shapes) -> bool:
    """Whether TMA can load the tiles of these shapes. Also, scale must be positive, as the maximum is taken before
    scaling, and a block table needs one column, as the producer reads the first entry even if there are no keys."""
    rows = [_rows(side, spec, shapes.N) for side in (spec.k_side, spec.v_side)]
    fits = 0 < min(rows) <= max(rows) < 1 << 31
    return bool(shapes.numbers.scale > 0 and shapes.columns and shapes.aligned and fits)


def are_copied(spec: Spec) -> bool:
    """Whether query rows are copied first, because they do not lie at multiples of 16 bytes."""
    return bool(spec.query[0] % 16 or spec.query[1] % 16)


def rows_of(spec: Spec) -> Callable[[Tensor], Tensor]:
    """How the kernel gets its query rows."""
    return contiguous_rows if are_copied(spec) else aligned_rows


def read_spec(spec: Spec) -> Spec:
    """The spec with the strides of the query rows that the kernel reads."""
    D = spec.k_side.size
    return spec._replace(query=(spec.K * spec.G * D, D, 1)) if are_copied(spec) else spec


def short_keys(rows: int, units: int, items: int, processors: int) -> int:
    """The most keys of a sequence that this kernel takes although its rows fit split_kernel's tiles; -1: it takes none.

    Args:
        rows: packed query rows of split_kernel's tiles. With many (large groups, wide speculation) matmuls are the
            bottleneck.
        units: sequences times key/value heads. Too few would not keep the programs busy.
        items: tiles of query rows that split_kernel cannot take. If there are many, some programs read the keys of
            short sequences meanwhile; if there are few, short sequences would only end late.
        processors: multiprocessors of the device, with one program each.
    """
    if rows >= MANY_ROWS and 3 * units >= processors:
        return SHORT_OF_MANY_ROWS
    return SHORT if items >= 3 * processors else -1


def consumers_of(spec: Spec, target: Target, T: int) -> int:
    """Three for narrow heads, which leave each consumer enough registers. Three hide each other's softmax, but items of
    192 rows are fewer and longer than items of 128: the last ones may leave more programs without work. So the number
    of items per program decides. Not with Triton 3.9, whose ptxas spills 248 bytes."""
    two, three = (-(-(T * spec.G // (n * WARPGROUP.value) * spec.K) // target.processors) for n in (2, 3))
    wide = max(spec.k_side.size, spec.v_side.size) > SIZE_OF_THREE
    return 2 if wide or TRITON >= (3, 9) or TIME_OF_THREE * three >= two else 3


def has_short_spans(spec: Spec, numbers: Numbers) -> bool:
    """Whether a window or chunk is so small that three consumers are slower than two. Nor first tokens with three:
    ptxas spills 128 bytes."""
    window, chunk = (spec.masks.window, numbers.window), (spec.masks.chunk, numbers.chunk)
    return spec.masks.first > 0 or any(given and span < SPAN_OF_THREE for given, span in (window, chunk))


class Matrix(NamedTuple):
    """Keys or values of the cache as a matrix for TMA; a token of a block is a row."""

    rows_n: int  # rows between blocks
    rows_head: int  # rows between heads
    columns_head: int  # columns between heads


def _matrix(side: Side, spec: Spec) -> Matrix | None:
    """The matrix of keys or values; None if TMA cannot address it in groups of 8 rows."""
    aligned = 16 // spec.storage.dtype.itemsize
    if side.d != 1 or spec.B % 8 or side.b % aligned or side.n % (8 * side.b):
        return None
    if spec.K == 1 or (side.k < side.b and side.k % aligned == 0):
        return Matrix(side.n // side.b, 0, side.k)
    if side.k % (8 * side.b) == 0:
        return Matrix(side.n // side.b, side.k // side.b, 0)
    return None


def matrix_of(side: Side, spec: Spec) -> Matrix:
    """The same if serves() found no reason against it."""
    matrix = _matrix(side, spec)
    assert matrix is not None, "serves() said so"
    return matrix


def _rows(side: Side, spec: Spec, N: int) -> int:
    """The rows of the matrix of a cache of N blocks."""
    matrix = matrix_of(side, spec)
    return (N - 1) * matrix.rows_n + (spec.K - 1) * matrix.rows_head + spec.B


class Columns(NamedTuple):
    """The columns of keys or values of a head, in parts (see head_chunks.py), and their place in the cache."""

    size: int
    parts: tuple[int, ...]
    matrix: Matrix


class HopperShape(NamedTuple):
    """The tile, and how it is loaded."""

    M: int
    N: int
    page: int  # keys per TMA copy
    stages: int
    slots: int  # items that are published ahead
    row_slots: int  # tiles of their query rows in shared memory
    heads: int  # key/value heads in flight, times pieces
    registers: tuple[int, ...]  # of a thread, per role; the first role has the rest
    k: Columns
    v: Columns
    warps: int  # of the scheduler
    pieces: int = 1  # of the value columns, which are items of their own


def shape_of(spec: Spec, shared_memory: int, consumers: int = 2) -> HopperShape:
    """128 keys per tile if two stages fit shared memory, and sums and scores the registers; else 64. Then two tiles of
    query rows if they fit, then more stages."""
    M = consumers * WARPGROUP.value
    D, itemsize = spec.k_side.size, spec.dtype.itemsize
    pieces = spec.v_side.size // PIECE if spec.v_side.size in WIDE else 1
    Dv = spec.v_side.size // pieces
    page = spec.B & -spec.B
    k_parts, v_parts = parts_of(D, page), value_parts_of(Dv, page)
    both = sum(k_parts) + sum(v_parts)
    space = (shared_memory - OTHERS) // itemsize - M * D
    # With Triton 3.9 matmuls in three parts would run one after another (C7512), with any number of registers.
    fits = len(pieces_of(Dv)) < 3 or TRITON < (3, 9)
    N = 128 if Dv <= 128 and 2 * 128 * both <= space and fits else KEYS_OF_WIDE if D in WIDE else 64
    stage = N * both
    slots = min(MOST_SLOTS, 1 + (space - 2 * stage) // (M * D))
    stages = min(MOST_STAGES, (space - (slots - 1) * M * D) // stage)
    heads = pieces * max(each for each in range(1, min(spec.K, HEADS) + 1) if spec.K % each == 0)
    page = min(page, N)
    k, v = Columns(D, k_parts, matrix_of(spec.k_side, spec)), Columns(Dv, v_parts, matrix_of(spec.v_side, spec))
    registers, warps = (_registers(spec), 4) if consumers == 2 else (REGISTERS_OF_THREE, 1)
    return HopperShape(M, N, page, stages, slots, slots, heads, registers, k, v, warps, pieces)


def _registers(spec: Spec) -> tuple[int, int, int]:
    """With fewer registers, sums and scores of the consumers spill, or addresses of many small copies."""
    pieces = len(pieces_of(spec.k_side.size))
    if spec.v_side.size > 192:
        return 224, 224, 24
    if pieces > 1 and spec.v_side.size < 128:
        return 200, 200, 56
    consumer = 216 if pieces == 1 and spec.logits.soft_cap else 208
    return consumer, consumer, 40


def descriptors(spec: Spec, page: int) -> list[Described]:
    """One per part of keys, then of values; None where there are fewer parts."""
    made: list[Described] = []
    for name, side, parts in (("key_cache", spec.k_side, parts_of), ("value_cache", spec.v_side, value_parts_of)):
        size = PIECE if side is spec.v_side and side.size in WIDE else side.size
        each = [(name, functools.partial(describe, side, spec, page, part)) for part in parts(size, page)]
        made += [*each, *[None] * (MOST_PARTS - len(each))]
    return made


def describe(side: Side, spec: Spec, page: int, part: int, cache: Tensor) -> TensorDescriptor:
    """``[N, B, K, D]`` in groups of 8 rows by up to 64 columns. One copy loads ``part`` columns of ``page`` tokens: the
    groups at [row / 8, 0, 0, column]. Groups overlap, as they begin at any column."""
    cache = pairs_of(cache)
    (N, _, K, D), matrix = cache.shape, matrix_of(side, spec)
    box, columns = box_of(page, part), (K - 1) * matrix.columns_head + D
    shape = _rows(side, spec, N) // 8, box[1], 8, columns
    groups = cache.as_strided((*shape[:3], box[3]), (8 * side.b, distance_of(part, side.size), side.b, 1))
    return TensorDescriptor(groups, list(shape), list(groups.stride()), box, box_layout(part))


def pairs_of(cache: Tensor) -> Tensor:
    """``[N, B, K, D]``; TMA loads two bytes of fp8 as one number of 16 bits."""
    cache = cache.flatten(3)
    return cache.view(torch.float16) if cache.itemsize == 1 else cache


@gluon.constexpr_function
def takes_turns(shape):
    """Whether two consumers take turns at the tensor cores: heads of 80 and 96 gain 4%; all others that were measured
    gain nothing."""
    return 64 < shape.k.size < 112


class Shared(NamedTuple):
    """The contents of shared memory."""

    items: Any  # their fields
    item_ring: Any
    q_groups: Any  # the query rows as the scheduler fetches them
    q_tiles: Any  # the same, as they are multiplied
    k: Any  # TileRing
    v: Any
    newest_clean: Any = None  # per item: the values of its newest tile that no row may see are zeroed
    oldest_clean: Any = None  # the same for its oldest tile
    places: Any = None  # of items that are parts of units, see shares.py
    rows_full: Any = None  # per item: its query rows have arrived, later than its fields
    row_factors: Any = None  # factors of the rows' scores, see fp8.py
    turns: Any = None  # barriers at which the two consumers take turns, see consumer.py


@gluon.jit
def shared_memory(dtype: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr, READERS: gl.constexpr = 1):
    """The fields of :class:`Shared` that every kernel has: a function cannot return None. READERS: roles other than
    consumers that read items."""
    M: gl.constexpr = SHAPE.M
    CONSUMERS: gl.constexpr = M // WARPGROUP
    SLOTS: gl.constexpr = SHAPE.slots
    ROW_SLOTS: gl.constexpr = SHAPE.row_slots
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    PIECES: gl.constexpr = pieces_of(SHAPE.k.size)
    RELEASES: gl.constexpr = 128 * CONSUMERS  # by release_each
    q_groups = query_places(dtype, ROW_SLOTS * M, PIECES)
    q_tiles = as_tiles(q_groups, dtype, ROW_SLOTS * CONSUMERS, WARPGROUP, PIECES)
    keys = tiles_of(dtype, K_PARTS, SHAPE, RELEASES)
    values = tiles_of(dtype, V_PARTS, SHAPE, RELEASES)
    items = places_of_items(SLOTS)
    item_ring = ring_of(SLOTS, 1, CONSUMERS + READERS)
    newest_clean = signal_of(SLOTS)
    oldest_clean = newest_clean
    if SPEC.masks.window or SPEC.masks.chunk:
        oldest_clean = signal_of(SLOTS)
    return items, item_ring, q_groups, q_tiles, keys, values, newest_clean, oldest_clean


@gluon.jit
def tiles_of(dtype: gl.constexpr, PARTS: gl.constexpr, SHAPE: gl.constexpr, RELEASES: gl.constexpr):
    """A ring of tiles of keys, or of values, which is empty after RELEASES arrivals."""
    STAGES: gl.constexpr = SHAPE.stages
    pages = places(dtype, STAGES * (SHAPE.N // SHAPE.page), SHAPE.page, PARTS)
    return TileRing(pages, as_tiles(pages, dtype, STAGES, SHAPE.N, PARTS), ring_of(STAGES, 1, RELEASES))


@gluon.jit(do_not_specialize=(*Numbers._fields, "short"))
def dense_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    short,
    k_desc0, k_desc1, k_desc2, v_desc0, v_desc1, v_desc2,  # of the parts; None where there are fewer
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    of_all = shared_memory(tensors.query.dtype.element_ty, SPEC, SHAPE)
    if takes_turns(SHAPE):
        shared = Shared(*of_all, turns=(barriers(1, 128), barriers(1, 128)))  # type: ignore[misc]
    else:
        shared = Shared(*of_all)
    descs = (k_desc0, k_desc1, k_desc2), (v_desc0, v_desc1, v_desc2)
    fence_async_shared()
    if SHAPE.M > 2 * WARPGROUP:
        gl.warp_specialize(
            [
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (consumer, (2, batch, shared, SPEC, SHAPE)),
                (scheduler, (batch, short, shared, SPEC, DIVISION, SHAPE)),
                (producer, (descs, batch, shared, SPEC, SHAPE)),
            ],
            [4, 4, 1, 1],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (scheduler, (batch, short, shared, SPEC, DIVISION, SHAPE)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (producer, (descs, batch, shared, SPEC, SHAPE)),
            ],
            [4, 4, 1],
            SHAPE.registers,
        )
