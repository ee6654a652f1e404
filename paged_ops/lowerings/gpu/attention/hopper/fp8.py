"""Prefill on Hopper (sm_90) in Gluon over fp8 caches: the items and matmuls of dense.py, and a warpgroup that converts.

The tensor cores take keys and values from shared memory, in 16 bits. So a producer warp loads the bytes of a tile to
shared memory by TMA, and four warps convert them to float16, which is exact, into the tiles that the two consumer
warpgroups multiply. Queries in bfloat16 become float16, too, each row divided by a power of two that keeps it
in float16's range. A scheduler of one warp takes items and fetches their query rows ahead. The scale of keys multiplies
the scale of the scores, the scale of values the output; both are positive.

The converting warps have no loads of the cache under way themselves, neither to registers nor to shared memory: the
fence that makes what they store visible to the tensor cores (``fence.proxy.async``) waits for all of a thread's loads.

Letters: as in dense.py. A pair is two bytes, which TMA copies as one number of 16 bits. Serves what dense.py does, with
heads of 64, 128 and 256 and one scale for all heads; short sequences are left to decode.py. Measurements:
benchmarks/notes/gpu-kernels.md. Ideas: conversion by a separate warpgroup, FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608), whose producer transposes fp8 values.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, ring
from paged_ops.lowerings.gpu.attention.hopper.consumer import consumer
from paged_ops.lowerings.gpu.attention.hopper.dense import Columns, HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP, as_tiles, places, rows_at_once, tile_layout
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, Described
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, producer, scheduler
from paged_ops.lowerings.gpu.attention.hopper.work import next_tiles
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.fp8 import widen_words
from paged_ops.lowerings.gpu.gluon_names import reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, Storage, not_applied
from paged_ops.lowerings.gpu.target import TRITON, Target

STORED = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = 64, 128, 256  # head sizes
# The features that it applies, by the names of spec.needs.
APPLIES = frozenset({"causal", "window", "chunk", "ranges", "later", "soft_cap", "sinks", "k_scale", "v_scale"})
APPLIES |= {"float8_e4m3fn", "float8_e5m2"}
MOST_STAGES = 4  # tiles of bytes in shared memory
AT_ONCE = 128  # sequences that the scheduler's warp counts in one vector
# Registers of a thread of the consumers, and of the scheduler and the producer; the converter has the rest.
CONSUMERS = 208, 208
OTHERS = 48, 48
OTHERS_OF_MASKS = 56, 56
# All of them with heads of 256. Triton 3.9 needs more for the consumers: else ptxas serialises their matmuls (C7512).
OF_WIDE = (224, 224, 32, 32) if TRITON >= (3, 9) else (216, 216, 40, 40)

LEAST = gl.constexpr(27)  # biased exponent of the least factor


def serves(spec: Spec, target: Target) -> list[str]:
    key, value, stored = spec.k_side, spec.v_side, spec.storage.dtype
    against = {
        f"cache_dtype: expected float8, got {stored}": stored not in STORED,
        f"head_size: expected one of {SIZES}, got {key.size}": key.size not in SIZES,
        f"value_head_size: expected one of {SIZES}, got {value.size}": value.size not in SIZES,
        "value_head_size: expected heads of 256 for both keys and values": (key.size == 256) != (value.size == 256),
        "k_scale: expected one for all heads": bool(key.scale),
        "v_scale: expected one for all heads": bool(value.scale),
        "kv_cache: expected an even number of bytes between elements": not spec.storage.paired,
    }
    reasons = not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds]
    return reasons or dense.serves_sizes(in_pairs(spec), dense.served_sizes())


def in_pairs(spec: Spec) -> Spec:
    """The spec of a cache of 16-bit numbers, with strides in pairs."""
    k_side, v_side = (
        side._replace(n=side.n // 2, b=side.b // 2, k=side.k // 2, scale=None) for side in (spec.k_side, spec.v_side)
    )
    return spec._replace(storage=Storage(spec.dtype, 0, False), k_side=k_side, v_side=v_side)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel would take none of its sequences, or if the call forbids it."""
    tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
    if tiles.all_split:
        return dense.ALL_SPLIT
    if not dense.has_form(in_pairs(spec), shapes):
        return NOT_TMA
    return tiles, tuning.division(tiles.split.block_m, shapes.S)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    pairs, (tiles, division) = in_pairs(spec), choice
    shape, of_bytes = shapes_of(pairs, target.shared_memory)
    constants = {"SHAPE": shape, "BYTES": of_bytes, "E4M3": spec.storage.dtype == torch.float8_e4m3fn}
    takes, described = ("k_scale", "v_scale"), descriptors(pairs, shape.page)
    return dense.build_items(fp8_kernel, constants, takes, described, spec, target, tiles, division, at_once=AT_ONCE)


def descriptors(pairs: Spec, page: int) -> list[Described]:
    """As in dense.py, for pairs: half the head size."""
    k_side, v_side = (side._replace(size=side.size // 2) for side in (pairs.k_side, pairs.v_side))
    described = dense.descriptors(pairs._replace(k_side=k_side, v_side=v_side), page)
    return list(filter(None, described))


def shapes_of(pairs: Spec, shared_memory: int) -> tuple[HopperShape, HopperShape]:
    """The shape of the tiles that are multiplied, and of the tiles of bytes, which take the remaining space."""
    D, Dv, itemsize = pairs.k_side.size, pairs.v_side.size, pairs.dtype.itemsize
    wide = D > 128  # tiles of 64 keys; one of bytes fits
    stage = (64 if wide else 128) * (D + Dv)
    shape = dense.shape_of(pairs, shared_memory - (1 if wide else 2) * stage)
    masks = pairs.masks
    masked = masks.window or masks.chunk or masks.ranges or pairs.logits.soft_cap
    registers = OF_WIDE if wide else (*CONSUMERS, *(OTHERS_OF_MASKS if masked else OTHERS))
    shape = shape._replace(registers=registers, warps=1)
    taken = shape.slots * shape.M * D + shape.stages * shape.N * (D + Dv)
    stages = min(MOST_STAGES, (shared_memory - dense.OTHERS - itemsize * taken) // stage)
    return shape, shape._replace(stages=stages, k=in_one_part(shape.k), v=in_one_part(shape.v))


def in_one_part(columns: Columns) -> Columns:
    """The columns of a head as pairs."""
    return columns._replace(size=columns.size // 2, parts=(columns.size // 2,))


@gluon.constexpr_function
def words_layout(rows, size):
    """``tile_layout(rows, size)`` of 16-bit numbers as a layout of 32-bit words ``[rows, size / 2]``."""
    bases = tile_layout(rows, size).offset_bases
    return gl.SharedLinearLayout([[row, column // 2] for row, column in bases[1:]], [], 1024)


@gluon.jit
def as_words(given, number: gl.constexpr, N: gl.constexpr, SIZE: gl.constexpr):
    """``number`` tiles ``[N, SIZE]`` of 16-bit numbers as tiles of 32-bit words."""
    return reinterpret(given, gl.int32, [number, N, SIZE // 2], words_layout(N, SIZE))


@gluon.jit
def convert(at, bytes, to, E4M3: gl.constexpr, REORDERED: gl.constexpr = False):
    """The at-th tile of keys, or of values, when its bytes have arrived and its place is empty. REORDERED: see
    :func:`reordered`."""
    # Eight neighbouring rows per warp: no bank conflicts.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [0, 1])
    N: gl.constexpr = to.tiles[0].shape[1]
    D: gl.constexpr = to.tiles[0].shape[2]
    ROWS: gl.constexpr = 64 if D <= 128 else 32  # at once: a thread has few registers
    ring.wait_full(bytes.ring, at)
    from_ = as_words(bytes.pages[0], bytes.ring.full.shape[0], N, D // 2).index(ring.stage_of(bytes.ring, at))
    tile = as_words(to.tiles[0], to.ring.full.shape[0], N, D).index(ring.stage_of(to.ring, at))
    for piece in gl.static_range(N // ROWS):
        words = from_.slice(piece * ROWS, ROWS, dim=0).load(layout)
        if piece == 0:
            ring.wait_empty(to.ring, at)
        first, last = widen_words(words, E4M3)
        pairs = gl.join(first, last)
        if REORDERED:
            pairs = pairs.permute((0, 2, 1))
        tile.slice(piece * ROWS, ROWS, dim=0).store(pairs.reshape([ROWS, D // 2]))
    fence_async_shared()
    ring.fill(to.ring, at)
    ring.release(bytes.ring, at)  # only now: a load may still be under way when a barrier is passed


@gluon.jit
def reordered(rows):
    """Rows whose columns are in another order: the first two of each four, then the last two of each four. In this
    order ``widen_halves`` leaves keys that it converts in registers."""
    ROWS: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    return rows.reshape([ROWS, D // 4, 2, 2]).permute((0, 2, 1, 3)).reshape([ROWS, D])


@gluon.jit
def order_rows(n, shared, SHAPE: gl.constexpr):
    """float16 query rows of the n-th item with their columns :func:`reordered`, in place."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILES: gl.constexpr = SHAPE.M // WARPGROUP
    ROWS: gl.constexpr = 16  # at once
    EACH: gl.constexpr = WARPGROUP // ROWS
    slot = ring.stage_of(shared.item_ring, n)
    for piece in gl.static_range(SHAPE.M // ROWS):
        rows = shared.q_tiles[0].index(slot * TILES + piece // EACH).slice(piece % EACH * ROWS, ROWS, dim=0)
        rows.store(reordered(rows.load(layout)))
    fence_async_shared()
    ring.fill(shared.rows_full, n)


@gluon.jit
def halve_rows(n, shared, SHAPE: gl.constexpr, REORDERED: gl.constexpr = False):
    """bfloat16 query rows of the n-th item as float16, in place. Each row is divided by its factor, a power of two, so
    that its largest element is less than 2. REORDERED: see :func:`reordered`."""
    ROWS: gl.constexpr = 16 if SHAPE.k.size <= 128 else 8  # at once
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [ROWS // 4, 128 // ROWS], [4, 1], [1, 0])
    dtype: gl.constexpr = gl.bfloat16
    TILES: gl.constexpr = SHAPE.M // WARPGROUP
    K_PARTS: gl.constexpr = SHAPE.k.parts
    EACH: gl.constexpr = WARPGROUP // ROWS
    slot = ring.stage_of(shared.item_ring, n)
    rows = as_tiles(shared.q_groups, dtype, SHAPE.slots * TILES, WARPGROUP, K_PARTS)[0]
    for piece in gl.static_range(SHAPE.M // ROWS):
        tile = slot * TILES + piece // EACH
        row = rows.index(tile).slice(piece % EACH * ROWS, ROWS, dim=0).load(layout).to(gl.float32)
        power = gl.max(gl.abs(row), 1).to(gl.int32, bitcast=True) & 0x7F800000
        power = gl.minimum(gl.maximum(power, LEAST << 23), 253 << 23)
        half = (row * ((254 << 23) - power).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        if REORDERED:
            half = reordered(half)
        shared.q_tiles[0].index(tile).slice(piece % EACH * ROWS, ROWS, dim=0).store(half)
        factors = shared.row_factors.index(slot).slice(piece * ROWS, ROWS)
        if factors.dtype == gl.uint8:
            factors.store((power >> 23).to(gl.uint8))
        else:
            factors.store(power.to(gl.float32, bitcast=True))
    fence_async_shared()
    ring.fill(shared.rows_full, n)


@gluon.jit
def converter(keys, values, shared, E4M3: gl.constexpr, SHAPE: gl.constexpr, REORDERED: gl.constexpr = False):
    """Converts the items' tiles from the bytes of keys and values, in the order in which the consumers take them: keys
    a tile ahead of values. REORDERED: keys and query rows have their columns :func:`reordered`."""
    count = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    while count > 0:
        if shared.row_factors is not None:
            halve_rows(n, shared, SHAPE, REORDERED)
        elif REORDERED:
            order_rows(n, shared, SHAPE)
        ring.release(shared.item_ring, n)
        for t in range(count + 1):
            if t < count:
                convert(total + t, keys, shared.k, E4M3, REORDERED)
            if t > 0:
                convert(total + t - 1, values, shared.v, E4M3)
        total += count
        n += 1
        count = next_tiles(shared, n, 4)


@gluon.jit
def bytes_of(PARTS: gl.constexpr, BYTES: gl.constexpr, RELEASES: gl.constexpr = 1):
    """A ring of tiles of bytes, as pairs; the converter takes its pages."""
    half: gl.constexpr = gl.float16
    pages = places(half, BYTES.stages * (BYTES.N // BYTES.page), BYTES.page, PARTS)
    return TileRing(pages, pages, ring.ring_of(BYTES.stages, 1, RELEASES))


@gluon.jit(do_not_specialize=Numbers._fields)
def fp8_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc,  # of pairs
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    K_PARTS: gl.constexpr = SHAPE.k.parts
    if tensors.k_scale is not None:
        scale *= gl.load(tensors.k_scale)
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    half: gl.constexpr = gl.float16
    ROWS: gl.constexpr = rows_at_once(SHAPE.k.size)
    of_all = shared_memory(half, SPEC, SHAPE, 2)
    if dtype == gl.bfloat16:
        # what shared.q_tiles are made of
        groups = as_tiles(of_all[2], dtype, SHAPE.slots * (SHAPE.M // ROWS), ROWS, K_PARTS)
        factors = gl.allocate_shared_memory(gl.float32, [SHAPE.slots, SHAPE.M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        rows = ring.signal_of(SHAPE.slots)
        shared = Shared(*of_all[:2], groups, *of_all[3:], None, rows, factors)  # type: ignore[call-arg]
    else:
        shared = Shared(*of_all)
    K_BYTES: gl.constexpr = BYTES.k.parts
    V_BYTES: gl.constexpr = BYTES.v.parts
    keys, values = bytes_of(K_BYTES, BYTES), bytes_of(V_BYTES, BYTES)
    tiles_of_bytes = Shared(of_all[0], of_all[1], None, None, keys, values)
    fence_async_shared()
    gl.warp_specialize(
        [
            (converter, (keys, values, shared, E4M3, SHAPE)),
            (consumer, (0, batch, shared, SPEC, SHAPE)),
            (consumer, (1, batch, shared, SPEC, SHAPE)),
            (scheduler, (batch, None, shared, SPEC, DIVISION, SHAPE)),
            (producer, (((k_desc,), (v_desc,)), batch, tiles_of_bytes, SPEC, BYTES)),
        ],
        [4, 4, 1, 1],
        SHAPE.registers,
    )
