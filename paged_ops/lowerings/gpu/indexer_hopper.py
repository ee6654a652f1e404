"""Scores of the indexer on Hopper (sm_90) in Gluon, for sequences with one new token each.

As scores_kernel of indexer.py, whose results and letters it has. TMA loads tiles of 64 keys several tiles ahead. The
matmul of a tile runs while the scores of the tile before are multiplied by weights and summed. fp8 keys widen to
float16 in registers, from where the matmul takes them: of every four columns the first two, and the other two, are
multiplied apart, so the columns of the queries are in that order.
"""

from __future__ import annotations

import torch
import triton.language as tl
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

from paged_ops.features import IndexOptions, in_use
from paged_ops.lowerings.gpu.fp8 import widen_halves
from paged_ops.lowerings.gpu.gluon_names import load_box
from paged_ops.lowerings.gpu.indexer import Spec
from paged_ops.lowerings.gpu.selection import NEVER, NUMBERS

N = 64  # keys of a tile
CONSTANTS = {"STAGES": 4, "num_warps": 4}
# The options that the kernel applies; with others scores_kernel serves. The layout of keys says what their format is.
APPLIES = frozenset({"weights", "scale", "relu", "causal", "k_scale", "kv_cache_dtype"})
HEADS = 16, 32, 64, 128
KEY_DTYPES = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


def serves(o: IndexOptions, spec: Spec, keys: Tensor) -> bool:
    """Whether the kernel computes these scores, for tokens that share no keys."""
    n, b, d = keys.stride()
    query, stored = spec.dtypes[:2]
    return (
        in_use(o) <= APPLIES
        and spec.heads in HEADS
        and keys.shape[2] == 128
        and stored in KEY_DTYPES
        and (query == stored or (spec.paired and query != "float32"))
        and spec.B % N == 0
        # Rows of TMA: one stride takes from each key to the next, in whole pieces of 16 bytes.
        and d == 1
        and n % b == 0
        and not (b * keys.element_size() | keys.data_ptr()) & 15
    )


def describe(spec: Spec, cache: Tensor) -> TensorDescriptor:
    """The rows of the cache, of fp8 as pairs: one copy loads 64 keys of a block, 128 bytes of each."""
    if spec.eight_bits:
        cache = cache.view(torch.uint8).view(torch.float16)
    halves = 2 if spec.eight_bits else 1
    n, b, columns = spec.key.n // halves, spec.key.b // halves, 128 // halves
    rows = (cache.shape[0] - 1) * (n // b) + spec.B
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(cache.as_strided((rows, columns), (b, 1)), [rows, columns], [b, 1], [N, 64], layout)


@gluon.jit
def block_at(table, tile, tiles, SPEC: gl.constexpr):
    """The block of a tile; 0 past the last."""
    return gl.load(table + (tile * 64 // SPEC.B) * SPEC.table, mask=tile < tiles, other=0)


@gluon.jit
def begin_load(desc, block, tile, at, pages, full, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Begin to load a tile into the at-th place."""
    KEY: gl.constexpr = SPEC.key
    CHUNKS: gl.constexpr = 1 if SPEC.eight_bits else 2
    row = block * (KEY.n // KEY.b) + tile * 64 % SPEC.B
    place = at % STAGES
    mbarrier.expect(full.index(place), 64 * 128 * CHUNKS)
    for chunk in gl.static_range(CHUNKS):
        load_box(desc, [row, chunk * 64], full.index(place), pages.index(place * CHUNKS + chunk))


@gluon.jit
def scales_at(cache, block, j, keys, SPEC: gl.constexpr):
    """The scales of keys at positions j, of one block."""
    KEY: gl.constexpr = SPEC.key
    of_block = cache + (block.to(gl.int64) * KEY.n + SPEC.B * KEY.size)
    return gl.load(of_block.to(gl.pointer_type(gl.float32)) + j % SPEC.B, mask=j < keys, other=0.0)


@gluon.jit
def store_scores(score, scales, tile, out, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The scores of a tile from those of its heads ``[64, M]``."""
    weight, factor, keys, scores, maxima = out
    CHUNK: gl.constexpr = TILE.CHUNK
    if SPEC.relu:
        score = gl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SPEC.weighted:
        score = score * weight[None, :]
    total = gl.sum(score, 1) * factor
    if SPEC.token_scales:
        total = total * scales
    total = gl.where(total == total, total, float("-inf")) + 0.0  # -0 becomes 0
    j = tile * 64 + gl.arange(0, 64, total.type.layout)
    order = total.to(gl.int32, bitcast=True)
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    order = gl.where(j < keys, order, NEVER)
    gl.store(scores + j, order)
    largest = gl.max(order.reshape([64 // CHUNK, CHUNK]), 1)
    gl.store(maxima + tile * (64 // CHUNK) + gl.arange(0, 64 // CHUNK, largest.type.layout), largest)


@gluon.jit
def multiply(at, pages, queries, zero, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Begin to multiply the keys of the at-th place by the queries."""
    place = at % STAGES
    if SPEC.eight_bits:
        pairs = pages.index(place).load(gl.DotOperandLayout(0, zero.type.layout, 2)).to(gl.int16, bitcast=True)
        first, second = widen_halves(pairs, SPEC.e4m3)
        acc = warpgroup_mma(first, queries.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(second, queries.index(1).permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(
            pages.index(place * 2), queries.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        return warpgroup_mma(pages.index(place * 2 + 1), queries.index(1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def next_tile(
    acc, scales, n, ahead, load, out, y, zero, queries, cache,
    SPEC: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply the n-th tile of a program, and store the scores ``acc`` of the tile before."""
    desc, table, tiles, part, parts, many, pages, full = load
    block, next_block = ahead
    tile = part + n * parts
    if n + STAGES - 2 < many:  # into the place of the tile before, which all warps have read
        begin_load(desc, block, tile + (STAGES - 2) * parts, n + STAGES - 2, pages, full, SPEC, STAGES)
    block = block_at(table, tile + (STAGES - 1) * parts, tiles, SPEC)
    new_scales = scales
    if SPEC.token_scales:
        new_scales = scales_at(cache, next_block, tile * 64 + y, out[2], SPEC)
        next_block = block_at(table, tile + parts, tiles, SPEC)
    mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
    new = multiply(n, pages, queries, zero, SPEC, STAGES)
    store_scores(acc, scales, tile - parts, out, SPEC, TILE)
    return warpgroup_mma_wait(0, deps=[new]), (block, next_block), new_scales


@gluon.jit(do_not_specialize=NUMBERS)
def scores_hopper_kernel(
    tensors,  # Pointers
    scale, S, table_stride, first, stop, width, k,  # NUMBERS
    desc, SPEC: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    M: gl.constexpr = TILE.HP
    STORED: gl.constexpr = gl.float16 if SPEC.eight_bits else tensors.query.dtype.element_ty
    CHUNKS: gl.constexpr = 1 if SPEC.eight_bits else 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(STORED, [2, M, 64], tiled)
    pages = gl.allocate_shared_memory(STORED, [STAGES * CHUNKS, 64, 64], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()

    t = first + gl.program_id(0)
    part, parts = gl.program_id(1), gl.num_programs(1)
    # The sequence of the token.
    at_once: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ends = gl.zeros([128], gl.int32, at_once)
    for x in range(0, S, 128):
        s_ = x + gl.arange(0, 128, at_once)
        end_ = gl.load(tensors.query_start_loc + 1 + s_, mask=s_ < S, other=2**31 - 1)
        ends += (end_ <= t).to(gl.int32)
    s = gl.sum(ends, 0)
    keys = s * 0
    if s < S:
        seq_len = gl.load(tensors.seq_lens + s)
        keys = seq_len
        if SPEC.causal:
            keys = gl.minimum(gl.maximum(seq_len - gl.load(tensors.query_start_loc + s + 1) + t + 1, 0), seq_len)
    tiles = (keys + 63) // 64
    many = gl.maximum(tiles - part + parts - 1, 0) // parts
    if many > 0:
        table = tensors.block_tables + s.to(gl.int64) * table_stride
        scores = tensors.scores + (t - first).to(gl.int64) * width
        maxima = tensors.maxima + (t - first).to(gl.int64) * (width // TILE.CHUNK)
        for n in gl.static_range(STAGES - 1):
            tile = part + n * parts
            if n < many:
                begin_load(desc, block_at(table, tile, tiles, SPEC), tile, n, pages, full, SPEC, STAGES)
        block = block_at(table, part + (STAGES - 1) * parts, tiles, SPEC)

        factor = scale
        if SPEC.has_scale:
            factor = scale * gl.load(tensors.k_scale)
        h, d = gl.arange(0, M, gl.SliceLayout(1, rows)), gl.arange(0, 64, gl.SliceLayout(0, rows))
        at = t.to(gl.int64) * SPEC.query[0] + h * SPEC.query[1]
        d0, d1 = d, d + 64
        if SPEC.eight_bits:
            d0 = d // 2 * 4 + d % 2
            d1 = d0 + 2
        q0 = gl.load(tensors.query + at[:, None] + (d0 * SPEC.query[2])[None, :]).to(gl.float32)
        q1 = gl.load(tensors.query + at[:, None] + (d1 * SPEC.query[2])[None, :]).to(gl.float32)
        # As in indexer.py: the factor's sign is in the queries.
        sign = gl.where(factor < 0.0, -1.0, 1.0)
        factor = gl.abs(factor)
        q0, q1 = q0 * sign, q1 * sign
        columns: gl.constexpr = gl.SliceLayout(0, layout)
        head = gl.arange(0, M, columns)
        weight = gl.full([M], 1.0, gl.float32, columns)
        if len(SPEC.weights) > 0:
            of_token = tensors.weights + t.to(gl.int64) * SPEC.weights[0]
            weight = gl.load(of_token + head * SPEC.weights[1]).to(gl.float32)
        if SPEC.eight_bits and tensors.query.dtype.element_ty == gl.bfloat16:  # as queries_for_fp8
            largest = gl.max(gl.maximum(gl.abs(q0), gl.abs(q1)), 1)
            power = gl.minimum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 253 << 23)
            inverse = ((254 << 23) - power).to(gl.float32, bitcast=True)[:, None]
            q0, q1 = q0 * inverse, q1 * inverse
            weight = weight * gl.convert_layout(power.to(gl.float32, bitcast=True), columns)
        queries.index(0).store(q0.to(STORED))
        queries.index(1).store(q1.to(STORED))
        fence_async_shared()

        zero = gl.full([64, M], 0.0, gl.float32, layout)
        y = gl.arange(0, 64, gl.SliceLayout(1, layout))
        scales = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, layout))
        next_block = block
        if SPEC.token_scales:
            scales = scales_at(tensors.cache, block_at(table, part, tiles, SPEC), part * 64 + y, keys, SPEC)
            next_block = block_at(table, part + parts, tiles, SPEC)
        mbarrier.wait(full.index(0), 0)
        acc = multiply(0, pages, queries, zero, SPEC, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        out = (weight, factor, keys, scores, maxima)
        load = (desc, table, tiles, part, parts, many, pages, full)
        ahead = (block, next_block)
        # Two tiles per step: then no scores move from register to register.
        for n in range(1, many - 1, 2):
            new, ahead, new_scales = next_tile(
                acc, scales, n, ahead, load, out, y, zero, queries, tensors.cache, SPEC, TILE, STAGES
            )
            acc, ahead, scales = next_tile(
                new, new_scales, n + 1, ahead, load, out, y, zero, queries, tensors.cache, SPEC, TILE, STAGES
            )
        if many % 2 == 0:
            acc, ahead, scales = next_tile(
                acc, scales, many - 1, ahead, load, out, y, zero, queries, tensors.cache, SPEC, TILE, STAGES
            )
        store_scores(acc, scales, part + (many - 1) * parts, out, SPEC, TILE)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel reads what was written here
