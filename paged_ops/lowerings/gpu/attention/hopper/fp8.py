"""Prefill on Hopper (sm_90) in Gluon over fp8 caches: the items and matmuls of dense.py, and a warpgroup that converts.

The tensor cores take keys and values from shared memory, in 16 bits. So a producer warp loads the bytes of a tile to
shared memory by TMA, and four warps convert them to float16, which is exact, into the tiles that the two consumer
warpgroups multiply. Queries in bfloat16 become float16, too, each row divided by a power of two that keeps it
in float16's range. A scheduler of one warp takes items and fetches their query rows ahead. The scale of keys multiplies
the scale of the scores, the scale of values the output; both are positive.

The converting warps have no loads of the cache under way themselves, neither to registers nor to shared memory: the
fence that makes what they store visible to the tensor cores (``fence.proxy.async``) waits for all of a thread's loads.

Letters: as in dense.py. A pair is two bytes, which TMA copies as one number of 16 bits. Serves what dense.py does, with
heads of 64 and 128 and one scale for all heads; short sequences are left to decode.py. Measurements:
benchmarks/notes/gpu-kernels.md. Ideas: conversion by a separate warpgroup, FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608), whose producer transposes fp8 values.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, ring
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers
from paged_ops.lowerings.gpu.attention.hopper.consumer import consumer
from paged_ops.lowerings.gpu.attention.hopper.dense import Columns, HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.halves import LEAST, apart, halve_rows  # noqa: F401
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import (
    WARPGROUP,
    as_tiles,
    box_layout,
    pages_of,
    places,
    rows_at_once,
    tile_layout,
)
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, Described
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, producer, scheduler
from paged_ops.lowerings.gpu.attention.hopper.work import next_tiles, read_item
from paged_ops.lowerings.gpu.attention.shared.masks import place_at
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.fp8 import widen_words
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, Storage, not_applied
from paged_ops.lowerings.gpu.target import Target

class Form(NamedTuple):
    """Of the experiment."""

    places: int = 0  # 0: two of tiles; 1: one of tiles; 2: pieces of 64 keys in turn
    halve: int = 0  # query rows become float16 by 0: the converter; 1: the consumers; 2: nobody (wrong)
    does: int = 0  # the converter 0: all; wrong: 1: nothing; 2: loads, converts; 3: stores
    piece: int = 64  # keys
    regs: tuple[int, ...] = ()
    fence: int = 0  # 0: after each piece; 1: after each tile; 2: no fence (wrong)
    most: int = 8
    short: int = 0
    d256: int = 1
    order: int = 0  # 1: consumers first
    warps: int = 1  # of the scheduler
    ahead: int = 0  # 1: the next query rows are fetched to the L2
    turns: int = 0
    two: int = 0  # 1: two converters
    cfence: int = 0  # 1: consumers fence


FORM = Form(**json.loads(os.environ.get("FP8_FORM", "{}")))
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

def serves(spec: Spec, target: Target) -> list[str]:
    key, value, stored = spec.k_side, spec.v_side, spec.storage.dtype
    against = {
        f"cache_dtype: expected float8, got {stored}": stored not in STORED,
        f"head_size: expected one of {SIZES}, got {key.size}": key.size not in SIZES,
        f"value_head_size: expected one of {SIZES}, got {value.size}": value.size not in SIZES,
        "k_scale: expected one for all heads": bool(key.scale),
        "v_scale: expected one for all heads": bool(value.scale),
        "kv_cache: expected an even number of bytes between elements": not spec.storage.paired,
    }
    if not FORM.d256 and key.size == 256:
        return ['no']
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
    short = -1
    if FORM.short:
        items = shapes.T * spec.G // dense.BLOCK_M * spec.K
        short = dense.short_keys(tiles.split.block_m, shapes.S * spec.K, items, target.processors)
    return tiles, tuning.division(tiles.split.block_m, shapes.S, short)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    pairs, (tiles, division) = in_pairs(spec), choice
    shape, of_bytes = shapes_of(pairs, target.shared_memory)
    if FORM.places == 2:
        shape, of_bytes = shapes_of_pieces(pairs, target.shared_memory)
    elif FORM.places == 1:
        shape, of_bytes = shapes_of(pairs, target.shared_memory, True)
    shape = shape._replace(warps=FORM.warps)
    if FORM.regs:
        shape = shape._replace(registers=FORM.regs)
    if FORM.order:
        shape = shape._replace(registers=(shape.registers[1], 48, *shape.registers[2:]))
    if FORM.two:
        shape = shape._replace(registers=(208, 208, 32, 32, 32))
    constants = {"SHAPE": shape, "BYTES": of_bytes, "FORM": FORM, "E4M3": spec.storage.dtype == torch.float8_e4m3fn}
    takes, described = ("k_scale", "v_scale"), descriptors(pairs, of_bytes.page)
    more = (division.short,)
    return dense.build_items(
        fp8_kernel, constants, takes, described, spec, target, tiles, division, more, at_once=AT_ONCE
    )


def descriptors(pairs: Spec, page: int) -> list[Described]:
    """As in dense.py, for pairs: half the head size."""
    k_side, v_side = (side._replace(size=side.size // 2) for side in (pairs.k_side, pairs.v_side))
    described = dense.descriptors(pairs._replace(k_side=k_side, v_side=v_side), page)
    return list(filter(None, described))


def shapes_of_pieces(pairs: Spec, shared_memory: int) -> tuple[HopperShape, HopperShape]:
    """The shape of the tiles that are multiplied, and of the pieces of bytes."""
    D, Dv, itemsize = pairs.k_side.size, pairs.v_side.size, pairs.dtype.itemsize
    rows = 32 if max(D, Dv) > 128 else FORM.piece
    piece = rows * max(D, Dv)
    shape = dense.shape_of(pairs, shared_memory - (32 << 10))
    masks = pairs.masks
    masked = masks.window or masks.chunk or masks.ranges or pairs.logits.soft_cap
    shape = shape._replace(registers=(*CONSUMERS, *(OTHERS_OF_MASKS if masked else OTHERS)), warps=1)
    taken = shape.slots * shape.M * D + shape.stages * shape.N * (D + Dv)
    if max(D, Dv) > 128:
        shape = shape._replace(registers=(216, 216, 40, 40))
    number = min((64 << 10) // piece, (shared_memory - dense.OTHERS - itemsize * taken) // piece)
    page = min(shape.page, rows)
    k, v = in_one_part(shape.k), in_one_part(shape.v)
    return shape, shape._replace(N=rows, page=page, stages=number, k=k, v=v)


def shapes_of(pairs: Spec, shared_memory: int, one: bool = False) -> tuple[HopperShape, HopperShape]:
    """The shape of the tiles that are multiplied, and of the tiles of bytes, which take the remaining space."""
    D, Dv, itemsize = pairs.k_side.size, pairs.v_side.size, pairs.dtype.itemsize
    stage = 128 * (D + Dv)
    shape = dense.shape_of(pairs, shared_memory - (1 if one else 2) * stage)
    masks = pairs.masks
    masked = masks.window or masks.chunk or masks.ranges or pairs.logits.soft_cap
    shape = shape._replace(registers=(*CONSUMERS, *(OTHERS_OF_MASKS if masked else OTHERS)), warps=1)
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
def widen_piece(from_, tile, FIRST: gl.constexpr, to, at, E4M3: gl.constexpr, APART: gl.constexpr, DOES: gl.constexpr):
    ROWS: gl.constexpr = from_.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [0, 1])
    WORDS: gl.constexpr = from_.shape[1]
    EACH: gl.constexpr = min(WORDS, 32)
    if DOES == 0 or DOES == 2:
        for part in gl.static_range(WORDS // EACH):
            if WORDS > EACH:
                words = from_.slice(part * EACH, EACH, dim=1).load(layout)
            else:
                words = from_.load(layout)
            if FIRST and part == 0:
                ring.wait_empty(to, at)
            first, last = widen_words(words, E4M3)
            pairs = gl.join(first, last)
            if APART:
                pairs = pairs.permute((0, 2, 1))
            if WORDS > EACH:
                tile.slice(part * EACH * 2, EACH * 2, dim=1).store(pairs.reshape([ROWS, EACH * 2]))
            else:
                tile.store(pairs.reshape([ROWS, WORDS * 2]))
    else:
        if FIRST:
            ring.wait_empty(to, at)
        if DOES == 3:
            words = gl.full([ROWS, from_.shape[1]], 0x3C003C00, gl.int32, layout)
            pairs = gl.join(words, words)
            tile.store(pairs.reshape([ROWS, tile.shape[1]]))


@gluon.jit
def convert_pieces(
    at, bytes, n, to, E4M3: gl.constexpr, ROWS: gl.constexpr, DOES: gl.constexpr, FENCE: gl.constexpr
):
    """The n-th tile of keys, or of values, from the at-th piece of bytes and the following ones."""
    N: gl.constexpr = to.tiles[0].shape[1]
    D: gl.constexpr = to.tiles[0].shape[2]
    PIECES: gl.constexpr = N // ROWS
    STAGES: gl.constexpr = bytes.ring.full.shape[0]
    FEWER: gl.constexpr = pieces_in_place(bytes.pages[0], ROWS, STAGES)
    given = as_words(bytes.pages[0], STAGES * FEWER, ROWS, D // 2)
    tile = as_words(to.tiles[0], to.ring.full.shape[0], N, D).index(ring.stage_of(to.ring, n))
    for piece in gl.static_range(PIECES):
        ring.wait_full(bytes.ring, at + piece)
        from_ = given.index(ring.stage_of(bytes.ring, at + piece) * FEWER)
        widen_piece(from_, tile.slice(piece * ROWS, ROWS, dim=0), piece == 0, to.ring, n, E4M3, False, DOES)
        if FENCE == 0:
            fence_async_shared()
            if piece == PIECES - 1:
                ring.fill(to.ring, n)
            ring.release(bytes.ring, at + piece)
    if FENCE != 0:
        if FENCE == 1:
            fence_async_shared()
        ring.fill(to.ring, n)
        for piece in gl.static_range(PIECES):
            ring.release(bytes.ring, at + piece)


@gluon.constexpr_function
def pieces_in_place(pages, rows, stages):
    """Pieces of a side's bytes that the place of a piece has room for."""
    return pages.shape[0] * pages.shape[1] * 8 // (rows * stages)


@gluon.jit
def convert(at, bytes, to, E4M3: gl.constexpr, APART: gl.constexpr = False, DOES: gl.constexpr = 0, FENCE: gl.constexpr = 0):
    """The at-th tile of keys, or of values, when its bytes have arrived and its place is empty. APART: see
    :func:`apart`."""
    # Eight neighbouring rows per warp: no bank conflicts.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [0, 1])
    ROWS: gl.constexpr = 64  # at once
    N: gl.constexpr = to.tiles[0].shape[1]
    D: gl.constexpr = to.tiles[0].shape[2]
    ring.wait_full(bytes.ring, at)
    from_ = as_words(bytes.pages[0], bytes.ring.full.shape[0], N, D // 2).index(ring.stage_of(bytes.ring, at))
    tile = as_words(to.tiles[0], to.ring.full.shape[0], N, D).index(ring.stage_of(to.ring, at))
    for piece in gl.static_range(N // ROWS):
        widen_piece(from_.slice(piece * ROWS, ROWS, dim=0), tile.slice(piece * ROWS, ROWS, dim=0), piece == 0, to.ring,
                    at, E4M3, APART, DOES)
    if FENCE == 0:
        fence_async_shared()
    ring.fill(to.ring, at)
    ring.release(bytes.ring, at)  # only now: a load may still be under way when a barrier is passed


@gluon.jit
def order_rows(n, shared, SHAPE: gl.constexpr):
    """float16 query rows of the n-th item with their columns :func:`apart`, in place."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILES: gl.constexpr = SHAPE.M // WARPGROUP
    ROWS: gl.constexpr = 16  # at once
    EACH: gl.constexpr = WARPGROUP // ROWS
    slot = ring.stage_of(shared.item_ring, n)
    for piece in gl.static_range(SHAPE.M // ROWS):
        rows = shared.q_tiles[0].index(slot * TILES + piece // EACH).slice(piece % EACH * ROWS, ROWS, dim=0)
        rows.store(apart(rows.load(layout)))
    fence_async_shared()
    ring.fill(shared.rows_full, n)


@gluon.jit
def converter(keys, values, shared, E4M3: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr, APART: gl.constexpr = False, FORM: gl.constexpr = Form()):
    """Converts the items' tiles from the bytes of keys and values, in the order in which the consumers take them: keys
    a tile ahead of values. APART: keys and query rows have their columns :func:`apart`."""
    DOES: gl.constexpr = FORM.does
    FENCE: gl.constexpr = FORM.fence
    PIECE: gl.constexpr = BYTES.N
    STEP: gl.constexpr = SHAPE.N // PIECE
    count = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    at = 0
    while count > 0:
        if shared.row_factors is not None:
            if FORM.halve == 0:
                halve_rows(n, shared, SHAPE, APART)
                fence_async_shared()
                ring.fill(shared.rows_full, n)
            elif FORM.halve == 2:
                ring.fill(shared.rows_full, n)
        elif APART:
            order_rows(n, shared, SHAPE)
        ring.release(shared.item_ring, n)
        for t in range(count + 1):
            if FORM.places == 2:
                if t < count:
                    convert_pieces(at, keys, total + t, shared.k, E4M3, PIECE, DOES, FENCE)
                    at += STEP
                if t > 0:
                    convert_pieces(at, values, total + t - 1, shared.v, E4M3, PIECE, DOES, FENCE)
                    at += STEP
            else:
                if t < count:
                    convert(total + t, keys, shared.k, E4M3, APART, DOES, FENCE)
                if t > 0:
                    convert(total + t - 1, values, shared.v, E4M3, False, DOES, FENCE)
        total += count
        n += 1
        count = next_tiles(shared, n, 4)


@gluon.jit
def one_converter(bytes, to, shared, E4M3: gl.constexpr, FORM: gl.constexpr):
    FENCE: gl.constexpr = FORM.fence
    count = next_tiles(shared, 0, 4)
    n = 0
    total = 0
    while count > 0:
        ring.release(shared.item_ring, n)
        for t in range(count):
            convert(total + t, bytes, to, E4M3, False, 0, FENCE)
        total += count
        n += 1
        count = next_tiles(shared, n, 4)


@gluon.jit
def pieces_of_both(BYTES: gl.constexpr):
    """One ring of pieces of bytes, as pieces of keys and as pieces of values."""
    half: gl.constexpr = gl.float16
    K_SIZE: gl.constexpr = BYTES.k.size
    V_SIZE: gl.constexpr = BYTES.v.size
    WIDER: gl.constexpr = max(K_SIZE, V_SIZE)
    NUMBER: gl.constexpr = BYTES.stages * (BYTES.N // BYTES.page)
    given = places(half, NUMBER, BYTES.page, (WIDER,))
    of_both = ring.ring_of(BYTES.stages, 1, 1)
    K_NUMBER: gl.constexpr = NUMBER * WIDER // K_SIZE
    V_NUMBER: gl.constexpr = NUMBER * WIDER // V_SIZE
    keys = reinterpret(given[0], half, pages_of(K_NUMBER, BYTES.page, (K_SIZE,), 0), box_layout(K_SIZE))
    values = reinterpret(given[0], half, pages_of(V_NUMBER, BYTES.page, (V_SIZE,), 0), box_layout(V_SIZE))
    return TileRing((keys,), (keys,), of_both), TileRing((values,), (values,), of_both)


@gluon.jit
def load_pieces(desc, first, kh, at, to, COLUMNS: gl.constexpr, N: gl.constexpr, BYTES: gl.constexpr):
    """Begin to load a tile of keys, or of values, as the at-th piece and the following ones: lane n has the row of the
    cache at which page n begins."""
    ROWS: gl.constexpr = BYTES.N
    PAGES: gl.constexpr = BYTES.N // BYTES.page
    FEWER: gl.constexpr = pieces_in_place(to.pages[0], ROWS, BYTES.stages)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    column = kh * COLUMNS.matrix.columns_head
    for piece in gl.static_range(N // ROWS):
        ring.wait_empty(to.ring, at + piece)
        full = ring.full_of(to.ring, at + piece)
        mbarrier.expect(full, ROWS * COLUMNS.size * 2)
        for page in gl.static_range(PAGES):
            row = gl.sum(gl.where(lane == piece * PAGES + page, first, 0), 0) // 8
            place = to.pages[0].index(ring.stage_of(to.ring, at + piece) * (FEWER * PAGES) + page)
            load_box(desc, [row, 0, 0, column], full, place)


@gluon.jit
def piece_producer(
    k_desc, v_desc, keys, values, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr
):  # fmt: skip
    """Loads the items' bytes in the order in which the converter takes them."""
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = BYTES.page
    PAGES: gl.constexpr = N // PAGE
    STEP: gl.constexpr = N // BYTES.N
    MASKS: gl.constexpr = SPEC.masks
    K_SHAPE: gl.constexpr = BYTES.k
    V_SHAPE: gl.constexpr = BYTES.v
    K_MATRIX: gl.constexpr = BYTES.k.matrix
    V_MATRIX: gl.constexpr = BYTES.v.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    of_lane = lane % PAGES * PAGE
    tiles = next_tiles(shared, 0, 1)
    n = 0
    at = 0
    while tiles > 0:
        item = read_item(shared, n, tiles, 1)
        block_table = batch.tensors.block_tables + item.s.to(gl.int64) * batch.numbers.table_stride
        ring.release(shared.item_ring, n)
        j = place_at((item.end_tile - 1) * N + of_lane, N, item.oldest, MASKS, N)
        next_ids = gl.load(block_table + gl.where((j >= 0) & (j < item.seq_len), j, 0) // B * SPEC.table)
        v_first = next_ids
        for t in range(tiles + 1):
            before = v_first
            if t < tiles:
                ids = next_ids
                j = place_at((item.end_tile - 1 - t) * N + of_lane, N, item.oldest, MASKS, N) % B
                v_first = ids * V_MATRIX.rows_n + item.kh * V_MATRIX.rows_head + j
                k_first = ids * K_MATRIX.rows_n + item.kh * K_MATRIX.rows_head + j
                j = place_at((item.end_tile - 2 - t) * N + of_lane, N, item.oldest, MASKS, N)
                next_ids = gl.load(block_table + gl.where((j >= 0) & (j < item.seq_len), j, 0) // B * SPEC.table)
                load_pieces(k_desc, k_first, item.kh, at, keys, K_SHAPE, N, BYTES)
                at += STEP
            if t > 0:
                load_pieces(v_desc, before, item.kh, at, values, V_SHAPE, N, BYTES)
                at += STEP
        n += 1
        tiles = next_tiles(shared, n, 1)


@gluon.jit
def bytes_of(PARTS: gl.constexpr, BYTES: gl.constexpr, RELEASES: gl.constexpr = 1):
    """A ring of tiles of bytes, as pairs; the converter takes its pages."""
    half: gl.constexpr = gl.float16
    pages = places(half, BYTES.stages * (BYTES.N // BYTES.page), BYTES.page, PARTS)
    return TileRing(pages, pages, ring.ring_of(BYTES.stages, 1, RELEASES))


@gluon.jit
def scheduler_of(batch, short, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, FORM: gl.constexpr):
    if FORM.short:
        scheduler(batch, short, shared, SPEC, DIVISION, SHAPE)
    else:
        scheduler(batch, None, shared, SPEC, DIVISION, SHAPE, FORM.ahead)


@gluon.jit(do_not_specialize=(*Numbers._fields, "short"))
def fp8_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    short,
    k_desc, v_desc,  # of pairs
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr, E4M3: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    K_PARTS: gl.constexpr = SHAPE.k.parts
    if tensors.k_scale is not None:
        scale *= gl.load(tensors.k_scale)
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    half: gl.constexpr = gl.float16
    ROWS: gl.constexpr = rows_at_once(SHAPE.k.size)
    READERS: gl.constexpr = 3 if FORM.two else 2
    of_all = shared_memory(half, SPEC, SHAPE, READERS)
    if dtype == gl.bfloat16:
        # what shared.q_tiles are made of
        groups = as_tiles(of_all[2], dtype, SHAPE.slots * (SHAPE.M // ROWS), ROWS, K_PARTS)
        factors = gl.allocate_shared_memory(gl.float32, [SHAPE.slots, SHAPE.M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        rows = ring.signal_of(SHAPE.slots)
        if FORM.halve == 1:
            halved = ring.signal_of(SHAPE.slots), ring.signal_of(SHAPE.slots)
            if FORM.turns:
                takes = barriers(1, 128), barriers(1, 128)
                shared = Shared(*of_all[:2], groups, *of_all[3:], None, rows, factors, takes, halved)  # type: ignore[call-arg]
            else:
                shared = Shared(*of_all[:2], groups, *of_all[3:], None, rows, factors, None, halved)  # type: ignore[call-arg]
        else:
            shared = Shared(*of_all[:2], groups, *of_all[3:], None, rows, factors)  # type: ignore[call-arg]
    else:
        shared = Shared(*of_all, None, None, None)  # type: ignore[call-arg]
    K_BYTES: gl.constexpr = BYTES.k.parts
    V_BYTES: gl.constexpr = BYTES.v.parts
    if FORM.places == 2:
        keys, values = pieces_of_both(BYTES)
    else:
        keys, values = bytes_of(K_BYTES, BYTES), bytes_of(V_BYTES, BYTES)
    told = Shared(*of_all[:2], None, None, keys, values, None, None, None, None, None)  # type: ignore[call-arg]
    fence_async_shared()
    if FORM.places == 2:
        gl.warp_specialize(
            [
                (converter, (keys, values, shared, E4M3, SHAPE, BYTES, False, FORM)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (scheduler_of, (batch, short, shared, SPEC, DIVISION, SHAPE, FORM)),
                (piece_producer, (k_desc, v_desc, keys, values, batch, told, SPEC, SHAPE, BYTES)),
            ],
            [4, 4, 1, 1],
            SHAPE.registers,
        )
    elif FORM.two:
        gl.warp_specialize(
            [
                (one_converter, (keys, shared.k, shared, E4M3, FORM)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (one_converter, (values, shared.v, shared, E4M3, FORM)),
                (scheduler_of, (batch, short, shared, SPEC, DIVISION, SHAPE, FORM)),
                (producer, (((k_desc,), (v_desc,)), batch, told, SPEC, BYTES)),
            ],
            [4, 4, 4, 1, 1],
            SHAPE.registers,
        )
    elif FORM.order:
        WARPS: gl.constexpr = FORM.warps
        FENCED: gl.constexpr = FORM.cfence
        gl.warp_specialize(
            [
                (consumer, (0, batch, shared, SPEC, SHAPE, FENCED)),
                (consumer, (1, batch, shared, SPEC, SHAPE, FENCED)),
                (converter, (keys, values, shared, E4M3, SHAPE, BYTES, False, FORM)),
                (scheduler_of, (batch, short, shared, SPEC, DIVISION, SHAPE, FORM)),
                (producer, (((k_desc,), (v_desc,)), batch, told, SPEC, BYTES)),
            ],
            [4, 4, WARPS, 1],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (converter, (keys, values, shared, E4M3, SHAPE, BYTES, False, FORM)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (scheduler_of, (batch, short, shared, SPEC, DIVISION, SHAPE, FORM)),
                (producer, (((k_desc,), (v_desc,)), batch, told, SPEC, BYTES)),
            ],
            [4, 4, 1, 1],
            SHAPE.registers,
        )
