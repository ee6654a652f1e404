"""Latent attention on Hopper (sm_90) in Gluon over fp8 latents: numbers are widened in registers, on their way from
shared memory to the tensor cores.

A product takes its left side from registers or shared memory, its right side from shared memory alone. So the keys of
a tile, and then the value columns, are the rows of the products (``S^T = K Q^T``, ``O^T = V^T P^T``), as in
latent_hopper_columns.py, and shared memory holds nothing of the cache but its bytes. They are loaded as pairs of
columns, 16 bits, which the hardware can transpose; one instruction widens two numbers. e4m3 and e5m2 numbers are exact
in float16. Queries become float16, too, each row divided by a power of two that keeps it in float16's range. The scales
of rows that hold theirs multiply the products and the weights of their columns.

A producer warp brings tiles and query rows by TMA. A first warpgroup multiplies the queries with the keys and computes
the weights, two more multiply the weights with half of the value columns each, as in latent.py. Units, shares
and merge are those of that module.

Letters: as there; a group is 128 latent columns, a chunk is 64 columns. Bytes of a key: R + P, or 656 in rows that hold
their scales (scaled_rows.py); FLOPs of a key and a query row: 2 (2 R + P). Measurements:
benchmarks/notes/latent.md.

Longer than 500 lines: what the warps do depends on one order of bytes and columns in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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

from paged_ops.layouts import ROW_BYTES
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import latent
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.latent import CACHE, KEYS, LATENT, QUERY, ROTATED, LatentLaunch
from paged_ops.lowerings.gpu.attention.hopper.latent_consumer import SLACK, bounds_of
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers
from paged_ops.lowerings.gpu.attention.hopper.work_shares import part_after, part_of, share_of
from paged_ops.lowerings.gpu.attention.shared.tile import Batch, oldest_key
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.fp8 import widen_halves, widen_pairs
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launcher, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

GROUPS = gl.constexpr(4)  # of 128 latent columns
CHUNKS = gl.constexpr(9)  # of 64 columns of query rows
FEW = 16  # packed query rows of a unit
MANY = 32
# By rows: tiles in shared memory, units whose query rows are there, registers of the warpgroups after the first.
SIZES = {16: (4, 2, (112, 112, 32)), 32: (4, 1, (136, 136, 24))}
OUTSTANDING = {16: 4, 32: 2}  # products that a warpgroup does not await
# What its roles apply, by the names of spec.needs.
APPLIES = frozenset(
    {
        *("latent", "causal", "window", "chunk", "soft_cap", "sinks"),
        *("float8_e4m3fn", "float8_e5m2", "row_scales", "k_scale"),
    }
)


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    if spec.rotated is None:
        return ["kv_cache: not latent"]
    side, sizes, stored = spec.v_side, (spec.v_side.size, spec.rotated.size), spec.storage.dtype
    against = {
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected float8, got {stored}": stored not in (torch.float8_e4m3fn, torch.float8_e5m2),
        f"head sizes: expected {LATENT} and {ROTATED}, got {sizes}": sizes != (LATENT, ROTATED),
        "kv_cache: expected rows that TMA can address": side.d != 1
        or bool(spec.B % 8 or side.b % 16 or side.n % side.b),
    }
    return not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel cannot serve it."""
    if not latent.has_form(spec, shapes):
        return NOT_TMA
    rows = tuning.power_of_2(-(-shapes.T // shapes.S)) * tuning.power_of_2(spec.heads)
    rows = min(max(rows, FEW), MANY)
    return shapes.T, rows, tuning.division(rows, shapes.S, everyone=True)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    _, rows, division = choice
    side, R = spec.v_side, spec.v_side.size
    spec = latent.packed(spec, rows)
    page, P = min(spec.B & -spec.B, KEYS), target.processors
    apart = spec.K > 1 and P % spec.K == 0
    division = division._replace(heads_apart=apart, aligned=True)
    stages, units, registers = SIZES[rows]
    if spec.storage.row_scales and rows > FEW:
        stages -= 1  # four tiles of weights rather than one
    is_e4m3 = spec.storage.dtype == torch.float8_e4m3fn
    constants = {
        "SPEC": spec,
        "DIVISION": division,
        "SHAPE": BytesShape(rows, KEYS, page, stages, units, side.n // side.b, registers, is_e4m3, OUTSTANDING[rows]),
        **target.overlap(),
        "num_warps": 4,
    }
    launcher = launcher_of(latent_fp8_kernel, constants, target.device)
    launch = BytesLaunch(launcher, (P, 1, 1), spec, shapes.N, page, rows)
    return decode.with_merge((launch,), P, TileShape(rows, KEYS, 0, R, 0, False), spec, target, division)


class BytesLaunch(LatentLaunch):
    """A launch whose copies bring 64 columns of query rows, and of a page 128 latent columns, the rotated columns, and
    the scales."""

    __slots__ = ()
    described = (QUERY, CACHE, CACHE, CACHE)

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int, int], spec: Spec, N: int, page: int, rows: int
    ) -> None:
        super().__init__(launcher, grid, spec, N, page, rows)
        self._without -= {"k_scale"}

    def _describe_rows(self, query: Tensor) -> Iterator[TensorDescriptor]:
        T, H, D = query.shape
        yield TensorDescriptor(query, [T * H, D], [D, 1], [self._rows, 64], gl.NVMMASharedLayout(128, 16, 2))

    def _describe(self, cache: Tensor) -> Iterator[TensorDescriptor]:
        side, scaled = self._spec.v_side, self._spec.storage.row_scales
        shape = [(self._N - 1) * (side.n // side.b) + self._spec.B, ROW_BYTES if scaled else LATENT + ROTATED]
        pairs = cache.as_strided(shape, (side.b, 1)).view(torch.float16)
        widths = (64, 64, 8) if scaled else (64, 32, 32)
        for width in widths:
            layout = gl.NVMMASharedLayout(2 * width if width > 8 else 0, 16, 2)
            yield TensorDescriptor(pairs, list(pairs.shape), [side.b // 2, 1], [self._page, width], layout)


class BytesShape(NamedTuple):
    """The tile, and how it is brought."""

    M: int
    N: int
    page: int  # keys that one copy brings
    stages: int  # tiles in shared memory
    units: int  # whose query rows are in shared memory
    rows_n: int  # rows of the cache between blocks
    registers: tuple[int, ...]  # of the warpgroups after the first, and of the producer
    e4m3: bool  # rather than e5m2
    outstanding: int  # products, whose left sides are in registers until they are done


class Shared(NamedTuple):
    """The contents of shared memory, and barriers that say that something has arrived, and that its place is free."""

    queries: Any  # chunks of query rows as the producer brings them,
    rows: Any  # and as they are multiplied: in float16, in the order of the keys' columns
    q_full: Any
    q_empty: Any
    latent_pages: Any  # pairs of columns as the producer brings them,
    latents: Any  # and as they are multiplied
    rotated_pages: Any
    rotated: Any
    scale_pages: Any
    scales: Any
    full: Any
    empty: Any
    weights: Any  # of two tiles of keys
    factors: Any  # of the sums so far
    changed: Any  # whether a factor is not 1
    weighed: Any  # barriers: weights, factors and flags are there; both warpgroups have taken them
    taken: Any


@gluon.jit
def bring_rows(q_desc, row, n, shared, SHAPE: gl.constexpr):
    """The query rows of the program's n-th unit."""
    place = n % SHAPE.units
    full = shared.q_full.index(place)
    mbarrier.wait(shared.q_empty.index(place), ((n // SHAPE.units) & 1) ^ 1)
    mbarrier.expect(full, SHAPE.M * CHUNKS * 128)
    for chunk in range(CHUNKS):
        load_box(q_desc, [row, chunk * 64], full, shared.queries.index(place * CHUNKS + chunk))


@gluon.jit
def producer(
    descriptors, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Brings the tiles of the share, and each unit's query rows."""
    q_desc, latent_desc, rotated_desc, scale_desc = descriptors
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    SCALED: gl.constexpr = SPEC.storage.row_scales
    BYTES: gl.constexpr = 656 if SCALED else 576
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    left, s, kh, first_token, tile = share
    n = 0
    at = 0  # tiles
    while left > 0:
        row_start, q_len, seq_len, _first_tile, _end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            q_row = (row_start + first_token) * SPEC.heads + kh * SPEC.G
            block_table = batch.tensors.block_tables + s.to(gl.int64) * batch.numbers.table_stride
            j = tile * N + lane % PAGES * PAGE
            ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
            bring_rows(q_desc, q_row, n, shared, SHAPE)
            for t in range(seen):
                begin = (tile + t) * N
                first = ids * SHAPE.rows_n + (begin + lane % PAGES * PAGE) % B
                j = begin + N + lane % PAGES * PAGE  # of the next tile, ahead of time
                ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
                place = at % SHAPE.stages
                full = shared.full.index(place)
                mbarrier.wait(shared.empty.index(place), ((at // SHAPE.stages) & 1) ^ 1)
                for page in gl.static_range(PAGES):
                    row = gl.sum(gl.where(lane == page, first, 0), 0)
                    if begin + page * PAGE < seq_len:
                        mbarrier.expect(full, PAGE * BYTES)
                        if SCALED:
                            load_box(scale_desc, [row, 256], full, shared.scale_pages.index(place * PAGES + page))
                            load_box(rotated_desc, [row, 264], full, shared.rotated_pages.index(place * PAGES + page))
                        else:
                            load_box(rotated_desc, [row, 256], full, shared.rotated_pages.index(place * PAGES + page))
                        for g in gl.static_range(GROUPS):
                            to = (place * GROUPS + g) * PAGES + page
                            load_box(latent_desc, [row, g * 64], full, shared.latent_pages.index(to))
                    else:
                        mbarrier.arrive(full, count=1)
                at += 1
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def prepare_rows(n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Query rows in float16, each divided by a power of two, in the order of the keys' columns: of every chunk the
    first two of every four columns, and the others. Those for rotated keys that are not fp8 keep their type and order.
    Returns the powers ``[M]``."""
    SCALED: gl.constexpr = SPEC.storage.row_scales
    M: gl.constexpr = SHAPE.M
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    begin = n % SHAPE.units * CHUNKS
    largest = gl.full([M, 64], 0.0, gl.float32, layout)
    for chunk in range(CHUNKS):
        largest = gl.maximum(largest, gl.abs(shared.queries.index(begin + chunk).load(layout).to(gl.float32)))
    bits = gl.max(largest, 1).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(bits >> 23, 15), 254)
    times = ((268 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]  # so that the largest is in 2^14 : 2^15
    if SCALED:
        rotated = shared.queries.index(begin + 8)
        rotated.store((rotated.load(layout).to(gl.float32) * times).to(rotated.dtype))
    for chunk in range(CHUNKS - 1 if SCALED else CHUNKS):
        row = (shared.queries.index(begin + chunk).load(layout).to(gl.float32) * times).to(gl.float16)
        first, second = row.reshape([M, 16, 2, 2]).permute((0, 1, 3, 2)).split()
        shared.rows.index((begin + chunk) * 2).store(first.reshape([M, 32]))
        shared.rows.index((begin + chunk) * 2 + 1).store(second.reshape([M, 32]))
    fence_async_shared()
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def multiply_chunk(qk, chunk: gl.constexpr, place, rows, begins: gl.constexpr, shared, SHAPE: gl.constexpr):
    """Add the products of one chunk of fp8 columns."""
    layout: gl.constexpr = gl.DotOperandLayout(0, qk.type.layout, 2)
    if chunk == CHUNKS - 1:
        pairs = shared.rotated.index(place).load(layout)
    else:
        pairs = shared.latents.index(place * GROUPS + chunk // 2).slice(chunk % 2 * 32, 32, dim=1).load(layout)
    first, second = widen_halves(pairs, SHAPE.e4m3)
    at = rows + 2 * chunk
    qk = warpgroup_mma(first, shared.rows.index(at).permute((1, 0)), qk, use_acc=not begins, is_async=True)
    return warpgroup_mma(second, shared.rows.index(at + 1).permute((1, 0)), qk, is_async=True)


@gluon.jit
def multiply_keys(place, n, zero, shared, SHAPE: gl.constexpr):
    """The products ``[N, M]`` of a tile's keys with the query rows of the program's n-th unit."""
    rows = n % SHAPE.units * (2 * CHUNKS)
    qk = zero
    for chunk in gl.static_range(CHUNKS):
        qk = multiply_chunk(qk, chunk, place, rows, chunk == 0, shared, SHAPE)
        qk = warpgroup_mma_wait(SHAPE.outstanding if chunk < CHUNKS - 1 else 0, deps=[qk])
    return qk


@gluon.jit
def multiply_group(g: gl.constexpr, place, rows, zero, shared, SHAPE: gl.constexpr):
    """The products of one group of columns, without its scales."""
    qk = multiply_chunk(zero, 2 * g, place, rows, True, shared, SHAPE)
    qk = warpgroup_mma_wait(SHAPE.outstanding, deps=[qk])
    qk = multiply_chunk(qk, 2 * g + 1, place, rows, False, shared, SHAPE)
    return warpgroup_mma_wait(SHAPE.outstanding, deps=[qk])


@gluon.jit
def multiply_scaled_keys(place, n, scales, zero, shared, SHAPE: gl.constexpr):
    """The same for rows that hold their scales, whose rotated columns are not fp8."""
    slot = n % SHAPE.units * CHUNKS
    q = shared.queries.index(slot + 8)
    if q.dtype == gl.bfloat16:
        rotated = warpgroup_mma(shared.rotated.index(place), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        keys = shared.rotated.index(place).load(gl.DotOperandLayout(0, zero.type.layout, 2)).to(q.dtype)
        rotated = warpgroup_mma(keys, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    qk0 = multiply_group(0, place, 2 * slot, zero, shared, SHAPE)
    qk1 = multiply_group(1, place, 2 * slot, zero, shared, SHAPE)
    qk2 = multiply_group(2, place, 2 * slot, zero, shared, SHAPE)
    qk3 = multiply_group(3, place, 2 * slot, zero, shared, SHAPE)
    rotated, qk0, qk1, qk2, qk3 = warpgroup_mma_wait(0, deps=[rotated, qk0, qk1, qk2, qk3])
    latents = qk0 * scales[0][:, None] + qk1 * scales[1][:, None]
    return rotated + latents + qk2 * scales[2][:, None] + qk3 * scales[3][:, None]


@gluon.jit
def load_scales(place, begin, low, end, shared, key_layout: gl.constexpr, N: gl.constexpr):
    """The four scales ``[N]`` of each key, 0 of those outside ``low : end``, and an exponent (to base 2, biased) whose
    power is larger than they are, if they are usual numbers."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [N, 4]
    )
    j = begin + gl.arange(0, N, gl.SliceLayout(1, layout))
    scales = gl.where(((j >= low) & (j < end))[:, None], shared.scales.index(place).load(layout), 0.0)
    exponent = gl.max(scales, 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.convert_layout(gl.minimum(gl.maximum(exponent, 27), 252), key_layout)
    even, odd = scales.reshape([N, 2, 2]).split()
    s0, s2 = even.split()
    s1, s3 = odd.split()
    s0 = gl.convert_layout(s0, key_layout)
    s1 = gl.convert_layout(s1, key_layout)
    s2 = gl.convert_layout(s2, key_layout)
    s3 = gl.convert_layout(s3, key_layout)
    return (s0, s1, s2, s3), exponent


@gluon.jit
def weights_of(
    qk, m, factor, cap, exponent, kept, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """As in latent_hopper_rows.py, of a tile ``[N, M]``, with a factor for each row; the sums are of the keys of a
    thread.

    With scales the weights are those of the values, which are divided by ``2^(exponent - 126)`` of their key: the
    logits grow by that power's logarithm, so that a maximum keeps the weights in float16's range.
    """
    if SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * factor[None, :] * cap[1]) + 1.0)
    elif SCALED:
        qk = qk * factor[None, :]
    if SCALED:
        qk += (exponent - 126).to(gl.float32)[:, None]
    if MASKED:
        qk = gl.where(kept, qk, float("-inf"))
    largest = gl.max(qk, 0)
    if not (SOFT_CAP or SCALED):
        largest *= factor
    m_new = gl.maximum(m, largest)
    m_new = gl.where(m_new > m + SLACK, m_new, m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    if SOFT_CAP or SCALED:
        p = gl.exp2(qk - shift[None, :])
    else:
        p = gl.exp2(qk * factor[None, :] - shift[None, :])
    weights = p
    if SCALED:
        weights = p * ((253 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    sums = gl.sum(weights.reshape([p.shape[0] // 16, 2, 8, p.shape[1]]), 1)
    return p, m_new, sums, gl.exp2(m - shift)


@gluon.jit
def tell_weights(p, scales, exponent, at, shared, SCALED: gl.constexpr):
    """Store the weights of a tile in float16; with scales those of each group, times its scales."""
    if SCALED:
        p = p * ((253 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
        for g in gl.static_range(GROUPS):
            shared.weights.index(at * GROUPS + g).store((p * scales[g][:, None]).to(gl.float16))
    else:
        shared.weights.index(at).store(p.to(gl.float16))


@gluon.jit
def scores(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The weights of all tiles, the factors of earlier sums, and lse."""
    tensors, numbers = batch.tensors, batch.numbers
    MASKS: gl.constexpr = SPEC.masks
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    SCALED: gl.constexpr = SPEC.storage.row_scales
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    p_id = share_index(SPEC, DIVISION)
    scale = numbers.scale
    if tensors.k_scale is not None:
        scale *= gl.load(tensors.k_scale)
    if not SOFT_CAP:
        scale *= LOG2E
    cap = (0.0, 0.0)
    if SOFT_CAP:
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E / numbers.soft_cap)
    value_scale = 1.0
    if tensors.k_scale is not None:
        value_scale = gl.load(tensors.k_scale)
    r = gl.arange(0, M, row_layout)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    left, s, kh, first_token, tile = share
    n = 0
    at = 0  # tiles
    told = 0  # messages to the other warpgroups
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            rows = bounds_of(seq_len, q_len, first_token, r, numbers, SPEC, SHAPE)
            m = gl.full([M], float("-inf"), gl.float32, row_layout)
            l = gl.sum(zero.reshape([N // 16, 2, 8, M]), 1)
            l_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l.type.layout))
            mbarrier.wait(shared.q_full.index(n % SHAPE.units), (n // SHAPE.units) & 1)
            factor = gl.convert_layout(prepare_rows(n, shared, SPEC, SHAPE), row_layout) * scale
            for t in range(seen):
                place = at % SHAPE.stages
                mbarrier.wait(shared.full.index(place), (at // SHAPE.stages) & 1)
                begin = (tile + t) * N
                scales, exponent = (), 0
                if SCALED:
                    scales, exponent = load_scales(
                        place, begin, rows.oldest, seq_len, shared, gl.SliceLayout(1, layout), N
                    )  # fmt: skip
                    qk = multiply_scaled_keys(place, n, scales, zero, shared, SHAPE)
                else:
                    qk = multiply_keys(place, n, zero, shared, SHAPE)
                mbarrier.arrive(shared.empty.index(place), count=1)
                if t == seen - 1:
                    mbarrier.arrive(shared.q_empty.index(n % SHAPE.units), count=1)
                masked = tile + t >= rows.full_end
                if BOUNDED:
                    masked = masked | (tile + t < rows.full_start)
                if masked:
                    j = begin + gl.arange(0, N, gl.SliceLayout(1, layout))
                    kept = j[:, None] < rows.seq_len
                    if MASKS.causal:
                        kept = kept & (j[:, None] <= rows.i[None, :])
                    if BOUNDED:
                        kept = kept & (j[:, None] >= rows.low[None, :])
                    p, m_new, sums, decay = weights_of(qk, m, factor, cap, exponent, kept, True, SOFT_CAP, SCALED)
                else:
                    p, m_new, sums, decay = weights_of(qk, m, factor, cap, exponent, True, False, SOFT_CAP, SCALED)
                mbarrier.wait(shared.taken.index(told % 2), ((told // 2) & 1) ^ 1)
                tell_weights(p, scales, exponent, told % 2, shared, SCALED)
                shared.factors.index(told % 2).store(decay)
                changed = (m_new != m).to(gl.int32)
                shared.changed.index(told % 2).store(gl.max(changed.reshape([4, M // 4]), 1))
                fence_async_shared()
                mbarrier.arrive(shared.weighed.index(told % 2), count=1)
                m = m_new
                l = l * gl.convert_layout(decay, l_layout)[None, :][None, :, :] + sums
                told += 1
                at += 1
            from_start = tile == first_tile
            head = kh * G + r % G
            l_ = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), row_layout)
            decay = gl.full([M], 1.0, gl.float32, row_layout)
            if SPEC.logits.sinks:
                if from_start:  # the first part includes the sink
                    sink = gl.load(tensors.sinks + head, mask=head < SPEC.heads, other=0.0) * LOG2E
                    m_new = gl.maximum(m, sink)
                    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
                    decay = gl.exp2(m - shift)
                    l_ = l_ * decay + gl.exp2(sink - shift)
                    m = m_new
            any_seen = l_ != 0.0
            mbarrier.wait(shared.taken.index(told % 2), ((told // 2) & 1) ^ 1)
            last = gl.where(any_seen, decay / gl.where(any_seen, l_, 1.0), 0.0) * value_scale
            shared.factors.index(told % 2).store(last)
            mbarrier.arrive(shared.weighed.index(told % 2), count=1)
            told += 1
            lse2 = gl.where(any_seen, m + gl.log2(gl.where(any_seen, l_, 1.0)), float("-inf"))
            token = first_token + r // G
            live = (r < TOKENS * G) & (token < q_len) & (head < SPEC.heads)
            if from_start & (tile + count == end_tile):
                if SPEC.lse:
                    row = (row_start + token).to(gl.int64) * SPEC.heads + head
                    gl.store(tensors.lse + row, lse2 * LN2, mask=live)
            else:
                part_row = (p_id * 2 + from_start.to(gl.int32)).to(gl.int64) * M + r
                gl.store(tensors.part_lse + part_row, lse2, mask=live)
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def load_values(
    g: gl.constexpr, piece: gl.constexpr, place, begin, low, end, shared, layout: gl.constexpr, PIECE: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """The even and the odd columns ``[64, PIECE]`` of a group of values, of some keys of a tile; 0 for keys outside
    ``low : end``, whose weights are 0, but 0 * NaN would be NaN."""
    pairs = shared.latents.index(place * GROUPS + g).slice(piece, PIECE, dim=0).permute((1, 0)).load(layout)
    if (begin + SHAPE.N > end) | (begin < low):
        j = begin + piece + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        pairs = gl.where(((j >= low) & (j < end))[None, :], pairs, 0)
    return widen_pairs(pairs, SHAPE.e4m3)


@gluon.jit
def weights_for(g: gl.constexpr, at, shared, SPEC: gl.constexpr):
    """The weights of a tile for a group of values."""
    if SPEC.storage.row_scales:
        return shared.weights.index(at * GROUPS + g)
    else:
        return shared.weights.index(at)


@gluon.jit
def multiply_values(even_sums, odd_sums, even, odd, piece: gl.constexpr, weights, PIECE: gl.constexpr):
    """The sums ``[64, M]`` of even and odd columns with the products of some keys' values and weights."""
    weights = weights.slice(piece, PIECE, dim=0)
    even_sums = warpgroup_mma(even, weights, even_sums, is_async=True)
    return even_sums, warpgroup_mma(odd, weights, odd_sums, is_async=True)


@gluon.jit
def store_columns(to, row, live, even, odd, first, factor, R: gl.constexpr):
    """Store the sums ``[64, M]`` of a group's even and odd columns to rows of R columns. A row without keys is 0; a NaN
    stays NaN."""
    d = first + 2 * gl.arange(0, 64, gl.SliceLayout(1, even.type.layout))
    at = to + row[None, :] * R + d[:, None]
    gl.store(at, (even * factor[None, :]).to(to.dtype.element_ty), mask=live[None, :])
    gl.store(at + 1, (odd * factor[None, :]).to(to.dtype.element_ty), mask=live[None, :])


@gluon.jit
def values(
    which: gl.constexpr, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """One half of the value columns of each unit: two groups."""
    tensors, numbers = batch.tensors, batch.numbers
    MASKS: gl.constexpr = SPEC.masks
    PIECE: gl.constexpr = 32  # keys
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    R: gl.constexpr = SPEC.v_side.size
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    flags: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    p_id = share_index(SPEC, DIVISION)
    r = gl.arange(0, M, row_layout)
    left, s, kh, first_token, tile = share
    at = 0  # tiles
    told = 0
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            oldest = 0
            if MASKS.window or MASKS.chunk:
                oldest = oldest_key(seq_len - q_len + first_token, numbers, MASKS)
            acc0 = gl.full([64, M], 0.0, gl.float32, layout)
            acc1, acc2, acc3 = acc0, acc0, acc0
            for t in range(seen):
                place = at % SHAPE.stages
                begin = (tile + t) * N
                mbarrier.wait(shared.full.index(place), (at // SHAPE.stages) & 1)
                even, odd = load_values(which * 2, 0, place, begin, oldest, seq_len, shared, v_layout, PIECE, SHAPE)
                mbarrier.wait(shared.weighed.index(told % 2), (told // 2) & 1)
                decay = shared.factors.index(told % 2).load(row_layout)
                changed = gl.max(shared.changed.index(told % 2).load(flags), 0)
                if changed != 0:
                    acc0 = acc0 * decay[None, :]
                    acc1 = acc1 * decay[None, :]
                    acc2 = acc2 * decay[None, :]
                    acc3 = acc3 * decay[None, :]
                weights = weights_for(which * 2, told % 2, shared, SPEC)
                acc0, acc1 = multiply_values(acc0, acc1, even, odd, 0, weights, PIECE)
                for piece in gl.static_range(PIECE, N, PIECE):
                    even, odd = load_values(
                        which * 2, piece, place, begin, oldest, seq_len, shared, v_layout, PIECE, SHAPE
                    )  # fmt: skip
                    acc0, acc1 = multiply_values(acc0, acc1, even, odd, piece, weights, PIECE)
                    acc0, acc1 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1])
                weights = weights_for(which * 2 + 1, told % 2, shared, SPEC)
                for piece in gl.static_range(0, N, PIECE):
                    even, odd = load_values(
                        which * 2 + 1, piece, place, begin, oldest, seq_len, shared, v_layout, PIECE, SHAPE
                    )  # fmt: skip
                    acc2, acc3 = multiply_values(acc2, acc3, even, odd, piece, weights, PIECE)
                    acc0, acc1, acc2, acc3 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1, acc2, acc3])
                acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
                mbarrier.arrive(shared.empty.index(place), count=1)
                mbarrier.arrive(shared.taken.index(told % 2), count=1)
                told += 1
                at += 1
            mbarrier.wait(shared.weighed.index(told % 2), (told // 2) & 1)
            factor = shared.factors.index(told % 2).load(row_layout)
            mbarrier.arrive(shared.taken.index(told % 2), count=1)
            told += 1
            token = first_token + r // G
            head = kh * G + r % G
            live = (r < TOKENS * G) & (token < q_len) & (head < SPEC.heads)
            from_start = tile == first_tile
            if from_start & (tile + count == end_tile):
                row = (row_start + token).to(gl.int64) * SPEC.heads + head
                store_columns(tensors.out, row, live, acc0, acc1, which * 256, factor, R)
                store_columns(tensors.out, row, live, acc2, acc3, which * 256 + 128, factor, R)
            else:
                part_row = (p_id * 2 + from_start.to(gl.int32)).to(gl.int64) * M + r
                store_columns(tensors.parts, part_row, live, acc0, acc1, which * 256, factor, R)
                store_columns(tensors.parts, part_row, live, acc2, acc3, which * 256 + 128, factor, R)
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def left_values(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    values(0, batch, share, shared, SPEC, DIVISION, SHAPE)


@gluon.jit
def right_values(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    values(1, batch, share, shared, SPEC, DIVISION, SHAPE)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_fp8_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    q_desc, latent_desc, rotated_desc, scale_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    STAGES: gl.constexpr = SHAPE.stages
    UNITS: gl.constexpr = SHAPE.units
    PAGES: gl.constexpr = N // PAGE
    SCALED: gl.constexpr = SPEC.storage.row_scales
    ROTATED_PAIRS: gl.constexpr = 64 if SCALED else 32
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rotated_layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROTATED_PAIRS, 16, 2)
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(dtype, [UNITS * CHUNKS, M, 64], layout)
    half_layout: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    rows = reinterpret(queries, gl.float16, [UNITS * CHUNKS * 2, M, 32], half_layout)
    latent_pages = gl.allocate_shared_memory(gl.float16, [STAGES * GROUPS * PAGES, PAGE, 64], layout)
    latents = reinterpret(latent_pages, gl.int16, [STAGES * GROUPS, N, 64], layout)
    rotated_pages = gl.allocate_shared_memory(gl.float16, [STAGES * PAGES, PAGE, ROTATED_PAIRS], rotated_layout)
    rotated_dtype: gl.constexpr = gl.bfloat16 if SCALED else gl.int16
    rotated = reinterpret(rotated_pages, rotated_dtype, [STAGES, N, ROTATED_PAIRS], rotated_layout)
    scale_pages = None
    scales = None
    if SCALED:
        scale_pages = gl.allocate_shared_memory(gl.float16, [STAGES * PAGES, PAGE, 8], scale_layout)
        scales = reinterpret(scale_pages, gl.float32, [STAGES, N, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(gl.float16, [2 * GROUPS if SCALED else 2, N, M], weight_layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, M], vector)
    changed = gl.allocate_shared_memory(gl.int32, [2, 4], vector)
    shared = Shared(
        queries, rows, barriers(UNITS, 1), barriers(UNITS, 1), latent_pages, latents, rotated_pages, rotated,
        scale_pages, scales, barriers(STAGES, PAGES), barriers(STAGES, 3), weights, factors, changed,
        barriers(2, 1), barriers(2, 2),
    )  # fmt: skip
    fence_async_shared()
    batch = Batch(tensors, numbers, None)
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    descriptors = (q_desc, latent_desc, rotated_desc, scale_desc)
    gl.warp_specialize(
        [
            (scores, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (left_values, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (right_values, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (producer, (descriptors, batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [4, 4, 1],
        SHAPE.registers,
    )
