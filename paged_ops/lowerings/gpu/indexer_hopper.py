"""Scores of the indexer on Hopper (sm_90) in Gluon, for tokens that share no keys.

As scores_kernel of indexer.py, whose results and letters it has. One warp loads tiles of 64 keys, and their scales, by
TMA several tiles ahead. Four others multiply a tile by the queries while they sum the scores of the tile before over
its heads; a sixth stores the sums. fp8 keys widen to float16 in registers, from where the matmul takes them: of every
four columns the first two, and the other two, are multiplied apart, so the columns of the queries are in that order.

The tiles of all tokens, one token after the other, are divided among the programs in equal shares. A share may begin in
one token and end in a later one; the loads of the next token begin while the last tiles of this one are multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.features import IndexOptions, in_use
from paged_ops.lowerings.gpu.attention.hopper import ring
from paged_ops.lowerings.gpu.fp8 import widen_halves
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.selection import NEVER, NUMBERS, Spec

N = 64  # keys of a tile
# By heads: the programs that a multiprocessor has room for, and registers per thread. The loading warp, and three that
# are idle beside it, leave most of theirs to those that multiply.
ROOM, REGISTERS = {16: 3, 32: 3, 64: 3, 128: 2}, {16: 80, 32: 80, 64: 80, 128: 128}
FEWER, LEAST = 2, 32  # programs per multiprocessor if with all of them each had at most LEAST tiles
LANES = gl.constexpr(128)  # sequences that a program looks at together, to find its share
STAGES, STAGES_OF_FP8 = 3, 6  # tiles in shared memory
SUMS = gl.constexpr(4)  # tiles whose scores are on their way to the warp that stores them
# The options that the kernel applies; with others scores_kernel serves. The layout of keys says what their format is.
APPLIES = frozenset({"weights", "scale", "relu", "causal", "k_scale", "kv_cache_dtype"})
HEADS = 16, 32, 64, 128
KEY_DTYPES = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


def applies_to(o: IndexOptions, spec: Spec, keys: Tensor) -> bool:
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


def constants(spec: Spec, heads: int) -> dict[str, Any]:
    """The constants of a kind of call, and the options of its launch."""
    return {"STAGES": STAGES_OF_FP8 if spec.eight_bits else STAGES, "num_warps": 4, "maxnreg": REGISTERS[heads]}


def programs(heads: int, tiles: int, processors: int) -> int:
    """The number of programs for so many tiles, at most."""
    most = ROOM[heads] * processors
    return most if tiles > LEAST * most else min(FEWER * processors, tiles)


def describe(spec: Spec, cache: Tensor) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The rows of the cache, of fp8 as pairs: one copy loads 64 keys of a block, 128 bytes of each; and the scales of
    its blocks."""
    scales = None
    if spec.token_scales:
        words = cache.view(torch.uint8).view(torch.float32)
        stride = spec.key.n // 4
        words = words.as_strided((cache.shape[0], spec.B), (stride, 1), words.storage_offset() + spec.B * 32)
        scales = TensorDescriptor(words, [*words.shape], [stride, 1], [1, 64], gl.NVMMASharedLayout(0, 32, 2))
    if spec.eight_bits:
        cache = cache.view(torch.uint8).view(torch.float16)
    halves = 2 if spec.eight_bits else 1
    n, b, columns = spec.key.n // halves, spec.key.b // halves, 128 // halves
    rows = (cache.shape[0] - 1) * (n // b) + spec.B
    layout = gl.NVMMASharedLayout(128, 16, 2)
    keys = TensorDescriptor(cache.as_strided((rows, columns), (b, 1)), [rows, columns], [b, 1], [N, 64], layout)
    return keys, scales


class Share(NamedTuple):
    """The tiles of a program: from tile ``part`` of token t, of sequence s, on."""

    t: Any
    s: Any
    part: Any
    left: Any  # the number of tiles, of this token and the next ones


class Tiles(NamedTuple):
    """The tiles of a program of one token: ``many`` from tile ``part`` on."""

    table: Any  # block ids of the sequence
    last: Any  # the number of tiles of the token
    part: Any
    many: Any
    before: Any  # tiles of the program's tokens before


class Memory(NamedTuple):
    """The contents of shared memory."""

    queries: Any
    pages: Any  # of keys: 64 columns of 64 keys, of fp8 128
    scales: Any  # of the keys of a tile,
    scale_pages: Any  # and as TMA writes them
    powers: Any  # that queries are divided by
    ring: Any
    sums: Any  # the scores of tiles, on their way to the warp that stores them
    sums_ring: Any


@gluon.jit
def block_at(of, n, SPEC: gl.constexpr):
    """The block of the n-th tile; 0 past the last."""
    tile = of.part + n
    return gl.load(of.table + (tile * 64 // SPEC.B) * SPEC.table, mask=tile < of.last, other=0)


@gluon.jit
def load_tiles(desc, scale_desc, of, shared, SPEC: gl.constexpr):
    """Load the tiles of a program; block ids four tiles ahead."""
    KEY: gl.constexpr = SPEC.key
    CHUNKS: gl.constexpr = 1 if SPEC.eight_bits else 2
    BYTES: gl.constexpr = 64 * 128 * CHUNKS + (256 if SPEC.token_scales else 0)
    b0, b1, b2, b3 = block_at(of, 0, SPEC), block_at(of, 1, SPEC), block_at(of, 2, SPEC), block_at(of, 3, SPEC)
    for n in range(of.many):
        tile, filling = of.part + n, of.before + n
        row = b0 * (KEY.n // KEY.b) + tile * 64 % SPEC.B
        ring.wait_empty(shared.ring, filling)
        place, full = ring.stage_of(shared.ring, filling), ring.full_of(shared.ring, filling)
        ring.expect(shared.ring, filling, BYTES)
        for chunk in gl.static_range(CHUNKS):
            load_box(desc, [row, chunk * 64], full, shared.pages.index(place * CHUNKS + chunk))
        if SPEC.token_scales:
            load_box(scale_desc, [b0, tile * 64 % SPEC.B], full, shared.scale_pages.index(place))
        b0, b1, b2, b3 = b1, b2, b3, block_at(of, n + 4, SPEC)


@gluon.jit
def sum_heads(n, score, weight, scales, shared, SPEC: gl.constexpr):
    """Sum ``score [64, M]``, of the program's n-th tile, over the heads, for the warp that stores."""
    if SPEC.relu:
        score = gl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SPEC.weighted:
        score = score * weight[None, :]
    total = gl.sum(score, 1)
    if SPEC.token_scales:
        total = total * scales
    ring.wait_empty(shared.sums_ring, n)
    shared.sums.index(ring.stage_of(shared.sums_ring, n)).store(total)
    ring.fill(shared.sums_ring, n)


@gluon.jit
def store_tiles(out, of, factor, shared, TILE: gl.constexpr):
    """Store the scores of the tiles of a token, and the maxima of their chunks."""
    CHUNK: gl.constexpr = TILE.CHUNK
    keys, scores, maxima = out
    pairs: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    for n in range(of.many):
        tile = of.part + n
        filling = of.before + n
        ring.wait_full(shared.sums_ring, filling)
        total = shared.sums.index(ring.stage_of(shared.sums_ring, filling)).load(pairs) * factor
        ring.release(shared.sums_ring, filling)
        total = gl.where(total == total, total, float("-inf")) + 0.0  # -0 becomes 0
        j = tile * 64 + gl.arange(0, 64, pairs)
        order = total.to(gl.int32, bitcast=True)
        order = order ^ ((order >> 31) & 0x7FFFFFFF)
        order = gl.where(j < keys, order, NEVER)
        gl.store(scores + j, order)
        largest = gl.max(order.reshape([64 // CHUNK, CHUNK]), 1)
        gl.store(maxima + tile * (64 // CHUNK) + gl.arange(0, 64 // CHUNK, largest.type.layout), largest)


@gluon.jit
def multiply(n, shared, zero, SPEC: gl.constexpr):
    """Begin to multiply the keys of the n-th tile by the queries."""
    place = ring.stage_of(shared.ring, n)
    queries = shared.queries
    if SPEC.eight_bits:
        pairs = shared.pages.index(place).load(gl.DotOperandLayout(0, zero.type.layout, 2)).to(gl.int16, bitcast=True)
        first, second = widen_halves(pairs, SPEC.e4m3)
        acc = warpgroup_mma(first, queries.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(second, queries.index(1).permute((1, 0)), acc, is_async=True)
    else:
        first, second = shared.pages.index(place * 2), shared.pages.index(place * 2 + 1)
        acc = warpgroup_mma(first, queries.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(second, queries.index(1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def next_tile(acc, scales, n, weight, zero, shared, SPEC: gl.constexpr):
    """Multiply the n-th tile of a program, and sum the scores ``acc`` of the tile before over its heads."""
    ring.wait_full(shared.ring, n)
    new_scales = scales
    if SPEC.token_scales:
        new_scales = shared.scales.index(ring.stage_of(shared.ring, n)).load(scales.type.layout)
    new = multiply(n, shared, zero, SPEC)
    if SPEC.eight_bits:  # its keys are in registers
        ring.release(shared.ring, n)
    sum_heads(n - 1, acc, weight, scales, shared, SPEC)
    new = warpgroup_mma_wait(0, deps=[new])
    if not SPEC.eight_bits:
        ring.release(shared.ring, n)
    return new, new_scales


@gluon.jit
def load_queries(t, negative, tensors, shared, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Load the queries of a token to shared memory."""
    M: gl.constexpr = TILE.HP
    STORED: gl.constexpr = shared.queries.dtype
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h, d = gl.arange(0, M, gl.SliceLayout(1, rows)), gl.arange(0, 64, gl.SliceLayout(0, rows))
    at = t.to(gl.int64) * SPEC.query[0] + h * SPEC.query[1]
    d0, d1 = d, d + 64
    if SPEC.eight_bits:
        d0 = d // 2 * 4 + d % 2
        d1 = d0 + 2
    q0 = gl.load(tensors.query + at[:, None] + (d0 * SPEC.query[2])[None, :]).to(gl.float32)
    q1 = gl.load(tensors.query + at[:, None] + (d1 * SPEC.query[2])[None, :]).to(gl.float32)
    sign = gl.where(negative, -1.0, 1.0)
    q0, q1 = q0 * sign, q1 * sign
    if shared.powers is not None:  # as queries_for_fp8
        largest = gl.max(gl.maximum(gl.abs(q0), gl.abs(q1)), 1)
        power = gl.minimum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        inverse = ((254 << 23) - power).to(gl.float32, bitcast=True)[:, None]
        q0, q1 = q0 * inverse, q1 * inverse
        shared.powers.store(power.to(gl.float32, bitcast=True))
    shared.queries.index(0).store(q0.to(STORED))
    shared.queries.index(1).store(q1.to(STORED))
    fence_async_shared()


@gluon.jit
def score_tiles(of, tensors, t, factor, shared, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The scores of the tiles of a token."""
    M: gl.constexpr = TILE.HP
    # As in indexer.py: the factor's sign is in the queries.
    load_queries(t, factor < 0.0, tensors, shared, SPEC, TILE)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    head = gl.arange(0, M, columns)
    weight = gl.full([M], 1.0, gl.float32, columns)
    if len(SPEC.weights) > 0:
        of_token = tensors.weights + t.to(gl.int64) * SPEC.weights[0]
        weight = gl.load(of_token + head * SPEC.weights[1]).to(gl.float32)
    if shared.powers is not None:
        weight = weight * shared.powers.load(columns)
    zero = gl.full([64, M], 0.0, gl.float32, layout)
    scales = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, layout))
    before = of.before
    ring.wait_full(shared.ring, before)
    if SPEC.token_scales:
        scales = shared.scales.index(ring.stage_of(shared.ring, before)).load(scales.type.layout)
    acc = multiply(before, shared, zero, SPEC)
    acc = warpgroup_mma_wait(0, deps=[acc])
    ring.release(shared.ring, before)
    # Two tiles per step: then no scores move from register to register.
    for n in range(1, of.many - 1, 2):
        new, new_scales = next_tile(acc, scales, before + n, weight, zero, shared, SPEC)
        acc, scales = next_tile(new, new_scales, before + n + 1, weight, zero, shared, SPEC)
    if of.many % 2 == 0:
        acc, scales = next_tile(acc, scales, before + of.many - 1, weight, zero, shared, SPEC)
    sum_heads(before + of.many - 1, acc, weight, scales, shared, SPEC)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tiles_of(s_, tensors, S, first, stop):
    """The tiles of all tokens of sequences, of those from ``first`` to before ``stop``."""
    exists = s_ < S
    start = gl.load(tensors.query_start_loc + s_, mask=exists, other=0)
    end = gl.load(tensors.query_start_loc + 1 + s_, mask=exists, other=0)
    seq_len = gl.load(tensors.seq_lens + s_, mask=exists, other=0)
    tokens = gl.maximum(gl.minimum(end, stop) - gl.maximum(start, first), 0)
    return (seq_len + 63) // 64 * tokens


@gluon.jit
def share_of(tensors, S, first, stop):
    """The share of this program."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    s_ = gl.arange(0, LANES, lanes)
    tiles = tiles_of(s_, tensors, S, first, stop)  # of the first sequences
    ends = gl.associative_scan(tiles, 0, add)
    total = gl.sum(tiles, 0)
    for x in range(LANES, S, LANES):
        total += gl.sum(tiles_of(x + s_, tensors, S, first, stop), 0)
    p, P = gl.program_id(0), gl.num_programs(0)
    size = (total + P - 1) // P
    begin = gl.minimum(p * size, total)
    left = gl.minimum(size, total - begin)
    # The sequence of the first tile, and the tiles of those before.
    passed = (ends <= begin) & (s_ < S)
    s = gl.sum(passed.to(gl.int32), 0)
    before = gl.max(gl.where(passed, ends, 0), 0)
    if s == LANES:
        until = before
        for x in range(LANES, S, LANES):
            tiles = tiles_of(x + s_, tensors, S, first, stop)
            ends = until + gl.associative_scan(tiles, 0, add)
            passed = (ends <= begin) & (x + s_ < S)
            s += gl.sum(passed.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
            until += gl.sum(tiles, 0)
    t, part = first, begin - before
    if left > 0:
        of_token = (gl.load(tensors.seq_lens + s) + 63) // 64
        t = gl.maximum(gl.load(tensors.query_start_loc + s), first) + part // of_token
        part = part % of_token
    return Share(t, s, part, left)


@gluon.jit
def tiles_of_token(t, s, part, left, before, tensors, table_stride, SPEC: gl.constexpr):
    """The program's tiles of a token; its part of the share, which may have a tile that the token does not see; the
    number of keys of the token, and the end of its sequence."""
    seq_len, end = gl.load(tensors.seq_lens + s), gl.load(tensors.query_start_loc + s + 1)
    keys = seq_len
    if SPEC.causal:
        keys = gl.minimum(gl.maximum(seq_len - end + t + 1, 0), seq_len)
    last = (keys + 63) // 64
    taken = gl.minimum((seq_len + 63) // 64 - part, left)
    many = gl.maximum(gl.minimum(part + taken, last) - part, 0)
    table = tensors.block_tables + s.to(gl.int64) * table_stride
    return Tiles(table, last, part, many, before), taken, keys, end


@gluon.jit
def next_token(t, s, end, left, tensors):
    """The next token, if any of the share is left, and its sequence."""
    t += 1
    while (t >= end) & (left > 0):
        s += 1
        end = gl.load(tensors.query_start_loc + s + 1)
    return t, s


@gluon.jit
def score_tokens(share, tensors, table_stride, factor, shared, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The scores of the tiles of a program."""
    t, s, part, left = share
    before = 0
    while left > 0:
        of, taken, _, end = tiles_of_token(t, s, part, left, before, tensors, table_stride, SPEC)
        if of.many > 0:
            score_tiles(of, tensors, t, factor, shared, SPEC, TILE)
        before += of.many
        left -= taken
        part = 0
        t, s = next_token(t, s, end, left, tensors)


@gluon.jit
def load_tokens(share, tensors, table_stride, descs, shared, SPEC: gl.constexpr):
    """Load the tiles of a program."""
    t, s, part, left = share
    before = 0
    while left > 0:
        of, taken, _, end = tiles_of_token(t, s, part, left, before, tensors, table_stride, SPEC)
        load_tiles(descs[0], descs[1], of, shared, SPEC)
        before += of.many
        left -= taken
        part = 0
        t, s = next_token(t, s, end, left, tensors)


@gluon.jit
def store_tokens(share, tensors, numbers, factor, shared, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Store the scores of the tiles of a program."""
    t, s, part, left = share
    first, table_stride, width = numbers
    before = 0
    while left > 0:
        of, taken, keys, end = tiles_of_token(t, s, part, left, before, tensors, table_stride, SPEC)
        scores = tensors.scores + (t - first).to(gl.int64) * width
        maxima = tensors.maxima + (t - first).to(gl.int64) * (width // TILE.CHUNK)
        store_tiles((keys, scores, maxima), of, factor, shared, TILE)
        before += of.many
        left -= taken
        part = 0
        t, s = next_token(t, s, end, left, tensors)


@gluon.jit(do_not_specialize=NUMBERS)
def scores_hopper_kernel(
    tensors,  # Pointers
    scale, S, table_stride, first, stop, width, k,  # NUMBERS
    desc, scale_desc, SPEC: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    M: gl.constexpr = TILE.HP
    STORED: gl.constexpr = gl.float16 if SPEC.eight_bits else tensors.query.dtype.element_ty
    CHUNKS: gl.constexpr = 1 if SPEC.eight_bits else 2
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(STORED, [2, M, 64], tiled)
    pages = gl.allocate_shared_memory(STORED, [STAGES * CHUNKS, 64, 64], tiled)
    scale_pages, scales, powers = None, None, None
    if SPEC.token_scales:
        scale_pages = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], gl.NVMMASharedLayout(0, 32, 2))
        scales = reinterpret(scale_pages, gl.float32, [STAGES, 64], vector)
    if SPEC.eight_bits and tensors.query.dtype.element_ty == gl.bfloat16:
        powers = gl.allocate_shared_memory(gl.float32, [M], vector)
    sums = gl.allocate_shared_memory(gl.float32, [SUMS, 64], vector)
    tiles, sums_ring = ring.ring_of(STAGES, 1, 1), ring.ring_of(SUMS, 1, 1)
    shared = Memory(queries, pages, scales, scale_pages, powers, tiles, sums, sums_ring)
    fence_async_shared()

    factor = scale
    if SPEC.has_scale:
        factor = scale * gl.load(tensors.k_scale)
    share = share_of(tensors, S, first, stop)
    if share.left > 0:
        numbers = (first, table_stride, width)
        gl.warp_specialize(
            [
                (score_tokens, (share, tensors, table_stride, factor, shared, SPEC, TILE)),
                (load_tokens, (share, tensors, table_stride, (desc, scale_desc), shared, SPEC)),
                (store_tokens, (share, tensors, numbers, gl.abs(factor), shared, SPEC, TILE)),
            ],
            [1, 1],
            [24, 24],
        )
    if PDL:
        gdc_launch_dependents()  # last: the next kernel reads what was written here
