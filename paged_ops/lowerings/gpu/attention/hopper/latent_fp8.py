"""Latent attention on Hopper (sm_90) in Gluon over fp8 latents: numbers are widened in registers, between shared memory
and the tensor cores.

A matmul takes its left operand from registers or shared memory, its right operand from shared memory alone. So the keys
of a tile, and then the value columns, are the rows of the matmuls (``S^T = K Q^T``, ``O^T = V^T P^T``), as in
latent_few.py, and shared memory holds nothing of the cache but its bytes. They are loaded as pairs of columns, 16 bits,
which the hardware can transpose; one instruction widens two numbers. e4m3 and e5m2 numbers are exact in float16.
Queries become float16, too, each row divided by a power of two that keeps it in float16's range. The scales of rows
with their own scales multiply the scores and the weights of their columns.

A producer warp loads tiles and query rows by TMA. One warpgroup multiplies the queries with the keys and computes the
softmax, two more multiply the weights with half of the value columns each, as in latent.py. Units, shares and merge are
as in that module.

Letters: as there; a group is 128 latent columns, a chunk is 64 columns. Bytes of a key: R + P, or 656 in rows with
scales (scaled_rows.py); FLOPs of a key and a query row: 2 (2 R + P). Measurements: benchmarks/notes/latent.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.layouts import ROW_BYTES
from paged_ops.lowerings.gpu.attention.hopper import latent, latent_few, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import LOG2E
from paged_ops.lowerings.gpu.attention.hopper.latent_roles import CHUNKS, LatentShape, Messages
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.masks import oldest_key
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.fp8 import widen_halves, widen_pairs
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec
from paged_ops.lowerings.gpu.target import Target

GROUPS = gl.constexpr(4)  # of 128 latent columns
KEYS = gl.constexpr(32)  # keys per matmul of values
STORED = torch.float8_e4m3fn, torch.float8_e5m2
# By the packed query rows of a unit: tiles in shared memory, units whose query rows are there, registers of the
# warpgroups after the first, and matmuls in flight.
SIZES = {16: (4, 2, (112, 112, 32), 4), 32: (4, 1, (136, 136, 24), 2)}
# What this kernel applies, by the names of spec.needs.
APPLIES = frozenset({"latent", "causal", "window", "chunk", "soft_cap", "sinks"})
APPLIES |= {"float8_e4m3fn", "float8_e5m2", "row_scales", "k_scale"}


def serves(spec: Spec, target: Target) -> list[str]:
    return latent.refusals(spec, APPLIES, STORED, "float8", 1)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel cannot serve it."""
    rows = 16 if latent_few.rows_of_unit(spec, shapes) <= 16 else 32
    return latent.plan_of(rows, spec, target, shapes)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    M, scaled, page = choice[1].rows, spec.storage.row_scales, latent.page_of(spec)
    stages, units, registers, outstanding = SIZES[M]
    stages -= scaled and M == 32  # four tiles of weights rather than one
    e4m3 = spec.storage.dtype == torch.float8_e4m3fn
    key_bytes = (ROW_BYTES if scaled else latent.LATENT + latent.ROTATED,)
    shape = LatentShape(M, latent.KEYS, page, stages, units, key_bytes, registers, e4m3, outstanding)
    rows = functools.partial(latent.describe_rows, M, 64)
    # Pairs of 128 latent columns, of the rotated columns, and of the scales; without scales the last is not used.
    widths = (64, 64, 8) if scaled else (64, 32, 32)
    pairs = [functools.partial(latent_few.describe_columns, spec, page, width) for width in widths]
    return latent.build_of(latent_fp8_kernel, shape, [rows], pairs, choice, spec, target, ("k_scale",))


class BytesMemory(NamedTuple):
    """The contents of shared memory."""

    queries: Any  # chunks of query rows as TMA writes them,
    rows: Any  # and as matmuls read them: in float16, in the order of the keys' columns
    q_ring: Any
    latent_pages: Any  # pairs of columns as TMA writes them,
    latents: Any  # and as matmuls read them
    rotated_pages: Any
    rotated: Any
    scale_pages: Any
    scales: Any
    ring: Any  # of tiles
    messages: Any


@gluon.jit
def load_page(descs, row, at, page: gl.constexpr, which: gl.constexpr, shared, SHAPE: gl.constexpr):
    """Begin to load a page of the at-th tile."""
    _, latent_desc, rotated_desc, scale_desc = descs
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    SCALED: gl.constexpr = shared.scale_pages is not None
    full, stage = ring.full_of(shared.ring, at), ring.stage_of(shared.ring, at)
    if SCALED:
        load_box(scale_desc, [row, 256], full, shared.scale_pages.index(stage * PAGES + page))
    rotated = shared.rotated_pages.index(stage * PAGES + page)
    load_box(rotated_desc, [row, 264 if SCALED else 256], full, rotated)
    for g in gl.static_range(GROUPS):
        place = shared.latent_pages.index((stage * GROUPS + g) * PAGES + page)
        load_box(latent_desc, [row, g * 64], full, place)


@gluon.jit
def prepare_rows(n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Convert query rows to float16, each divided by a power of two, in the order of the keys' columns: per chunk, the
    first two of every four columns, then the other two. Columns for rotated keys that are not fp8 keep their type and
    order. Returns the powers ``[M]``."""
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
    """Add the scores of one chunk of fp8 columns."""
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
    """The scores ``[N, M]`` of a tile's keys and the query rows of the program's n-th unit."""
    rows = n % SHAPE.units * (2 * CHUNKS)
    qk = zero
    for chunk in gl.static_range(CHUNKS):
        qk = multiply_chunk(qk, chunk, place, rows, chunk == 0, shared, SHAPE)
        qk = warpgroup_mma_wait(SHAPE.outstanding if chunk < CHUNKS - 1 else 0, deps=[qk])
    return qk


@gluon.jit
def multiply_scaled_keys(place, n, scales, zero, shared, SHAPE: gl.constexpr):
    """The same for rows with scales, whose rotated columns are not fp8."""
    slot = n % SHAPE.units * CHUNKS
    q = shared.queries.index(slot + 8)
    if q.dtype == gl.bfloat16:
        rotated = warpgroup_mma(shared.rotated.index(place), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        keys = shared.rotated.index(place).load(gl.DotOperandLayout(0, zero.type.layout, 2)).to(q.dtype)
        rotated = warpgroup_mma(keys, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    made: gl.tuple = (rotated,)
    for g in gl.static_range(GROUPS):
        qk = multiply_chunk(zero, 2 * g, place, 2 * slot, True, shared, SHAPE)
        qk = warpgroup_mma_wait(SHAPE.outstanding, deps=[qk])
        qk = multiply_chunk(qk, 2 * g + 1, place, 2 * slot, False, shared, SHAPE)
        made += (warpgroup_mma_wait(SHAPE.outstanding, deps=[qk]),)
    made = warpgroup_mma_wait(0, deps=made)
    latents = made[1] * scales[0][:, None] + made[2] * scales[1][:, None]
    return made[0] + latents + made[3] * scales[2][:, None] + made[4] * scales[3][:, None]


@gluon.jit
def load_scales(place, begin, rows, shared, key_layout: gl.constexpr, N: gl.constexpr):
    """The four scales ``[N]`` of each key, 0 for keys that no row sees, and a biased exponent: its power of two is
    larger than normal scales."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [N, 4]
    )
    j = begin + gl.arange(0, N, gl.SliceLayout(1, layout))
    scales = gl.where(((j >= rows.oldest) & (j < rows.seq_len))[:, None], shared.scales.index(place).load(layout), 0.0)
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
def store_weights(p, scales, exponent, place, weights, SCALED: gl.constexpr):
    """Store the weights of a tile in float16; with scales once per group, multiplied by its scales."""
    if SCALED:
        p = p * ((253 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
        for g in gl.static_range(GROUPS):
            weights.index(place * GROUPS + g).store((p * scales[g][:, None]).to(gl.float16))
    else:
        weights.index(place).store(p.to(gl.float16))


@gluon.jit
def score_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Send the weights of all tiles of a part and the factors of the accumulators; store lse."""
    n, at, sent = counts
    scale, cap, k_scale = args
    messages = shared.messages
    SCALED: gl.constexpr = SPEC.storage.row_scales
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    r = gl.arange(0, M, row_layout)
    zero = gl.full([N, M], 0.0, gl.float32, layout)
    m = gl.full([M], float("-inf"), gl.float32, row_layout)
    l = gl.sum(zero.reshape([N // 16, 2, 8, M]), 1)
    ring.wait_full(shared.q_ring, n)
    factor = gl.convert_layout(prepare_rows(n, shared, SPEC, SHAPE), row_layout) * scale
    rows = roles.rows_of(part, r, factor, cap, batch.numbers, SPEC, SHAPE)
    for t in range(part.seen):
        tile = part.tile + t
        place = ring.stage_of(shared.ring, at)
        ring.wait_full(shared.ring, at)
        scales, exponent = (), 0
        if SCALED:
            scales, exponent = load_scales(place, tile * N, rows, shared, gl.SliceLayout(1, layout), N)
            qk = multiply_scaled_keys(place, n, scales, zero, shared, SHAPE)
        else:
            qk = multiply_keys(place, n, zero, shared, SHAPE)
        ring.release(shared.ring, at)
        if t == part.seen - 1:
            ring.release(shared.q_ring, n)
        if roles.is_masked(rows, tile, SPEC):
            p, m_new, totals, decay = roles.softmax_tile(qk, m, rows, tile * N, exponent, True, True, True, SPEC)
        else:
            p, m_new, totals, decay = roles.softmax_tile(qk, m, rows, tile * N, exponent, False, True, True, SPEC)
        ring.wait_empty(messages.ring, sent)
        store_weights(p, scales, exponent, ring.stage_of(messages.ring, sent), messages.weights, SCALED)
        roles.send_factors(messages, sent, decay, m_new, m)
        fence_async_shared()
        ring.fill(messages.ring, sent)
        m = m_new
        l_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l.type.layout))
        l = l * gl.convert_layout(decay, l_layout)[None, :][None, :, :] + totals
        sent += 1
        at += 1
    l_ = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), row_layout)
    m, l_, decay = roles.add_sink(m, l_, part, r, batch.tensors, SPEC)
    roles.send_last(messages, sent, roles.normalizer(l_, decay) * k_scale)
    roles.store_part((), None, roles.lse2_of(m, l_), part, r, batch.tensors, 0, 1, SPEC, SHAPE)
    return Counts(n + 1, at, sent + 1)


@gluon.jit
def factors_of(batch, SPEC: gl.constexpr):
    """The factor of scores, the soft cap, and the scale of the latents."""
    k_scale = 1.0
    if batch.tensors.k_scale is not None:
        k_scale = gl.load(batch.tensors.k_scale)
    scale = batch.numbers.scale * k_scale
    cap = (0.0, 0.0)
    if SPEC.logits.soft_cap:
        cap = (batch.numbers.soft_cap * LOG2E, 2.0 * LOG2E / batch.numbers.soft_cap)
    else:
        scale *= LOG2E
    return scale, cap, k_scale


@gluon.jit
def load_values(
    at, key: gl.constexpr, g: gl.constexpr, tile, oldest, end, shared, SHAPE: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The even and the odd columns ``[64, KEYS]`` of a group of values, of some keys of a tile; 0 for keys outside
    ``oldest : end``, whose weights are 0, but 0 * NaN would be NaN."""
    latents = shared.latents.index(ring.stage_of(shared.ring, at) * GROUPS + g)
    pairs = latents.slice(key, KEYS, dim=0).permute((1, 0)).load(layout)
    begin = tile * SHAPE.N
    if (begin + SHAPE.N > end) | (begin < oldest):
        j = begin + key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        pairs = gl.where(((j >= oldest) & (j < end))[None, :], pairs, 0)
    return widen_pairs(pairs, SHAPE.e4m3)


@gluon.jit
def multiply_values(even_acc, odd_acc, even, odd, weights, key: gl.constexpr):
    """Add the values of some keys, multiplied by their weights, to the accumulators of even and odd columns."""
    weights = weights.slice(key, KEYS, dim=0)
    even_acc = warpgroup_mma(even, weights, even_acc, is_async=True)
    return even_acc, warpgroup_mma(odd, weights, odd_acc, is_async=True)


@gluon.jit
def sum_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Two groups of the value columns of a part's result, from group ``args[0]`` on."""
    G0: gl.constexpr = args[0]
    messages = shared.messages
    MASKS: gl.constexpr = SPEC.masks
    SCALED: gl.constexpr = SPEC.storage.row_scales
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    at, received = counts.tiles, counts.messages
    end, oldest = part.seq_len, 0
    if MASKS.window or MASKS.chunk:
        oldest = oldest_key(part.seq_len - part.q_len + part.first_token, batch.numbers, MASKS)
    acc0 = gl.full([64, M], 0.0, gl.float32, layout)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for t in range(part.seen):
        tile = part.tile + t
        ring.wait_full(shared.ring, at)
        even, odd = load_values(at, 0, G0, tile, oldest, end, shared, SHAPE, v_layout)
        ring.wait_full(messages.ring, received)
        place = ring.stage_of(messages.ring, received)
        decay, changed = roles.load_factors(messages, received, row_layout)
        if changed != 0:
            acc0 = acc0 * decay[None, :]
            acc1 = acc1 * decay[None, :]
            acc2 = acc2 * decay[None, :]
            acc3 = acc3 * decay[None, :]
        weights = messages.weights.index(place * GROUPS + G0 if SCALED else place)
        acc0, acc1 = multiply_values(acc0, acc1, even, odd, weights, 0)
        for key in gl.static_range(KEYS, N, KEYS):
            even, odd = load_values(at, key, G0, tile, oldest, end, shared, SHAPE, v_layout)
            acc0, acc1 = multiply_values(acc0, acc1, even, odd, weights, key)
            acc0, acc1 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1])
        weights = messages.weights.index(place * GROUPS + G0 + 1 if SCALED else place)
        for key in gl.static_range(0, N, KEYS):
            even, odd = load_values(at, key, G0 + 1, tile, oldest, end, shared, SHAPE, v_layout)
            acc2, acc3 = multiply_values(acc2, acc3, even, odd, weights, key)
            acc0, acc1, acc2, acc3 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1, acc2, acc3])
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
        ring.release(shared.ring, at)
        ring.release(messages.ring, received)
        received += 1
        at += 1
    factor = roles.receive_last(messages, received, row_layout)
    r = gl.arange(0, M, row_layout)
    acc = (acc0, acc1, acc2, acc3)
    roles.store_part(acc, factor, None, part, r, batch.tensors, 128 * G0, 2, SPEC, SHAPE)
    return Counts(counts.units, at, received + 1)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_fp8_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    q_desc, latent_desc, rotated_desc, scale_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    WEIGHTS: gl.constexpr = [2 * GROUPS if SPEC.storage.row_scales else 2, SHAPE.N, SHAPE.M]
    SCORE: gl.constexpr = score_part
    SUM: gl.constexpr = sum_part
    descs = (q_desc, latent_desc, rotated_desc, scale_desc)
    run_roles(SCORE, SUM, descs, Batch(tensors, numbers, None), WEIGHTS, SPEC, DIVISION, SHAPE, PDL)


@gluon.jit
def run_roles(
    SCORE: gl.constexpr, SUM: gl.constexpr, descs, batch, WEIGHTS: gl.constexpr, SPEC: gl.constexpr,
    DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run a kernel's roles: SCORE in the first warpgroup, SUM in the other two, and the producer. WEIGHTS: the shape of
    the weights in shared memory, for two tiles."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = batch.tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    STAGES: gl.constexpr = SHAPE.stages
    PAGES: gl.constexpr = N // SHAPE.page
    SCALED: gl.constexpr = SPEC.storage.row_scales
    ROTATED: gl.constexpr = 64 if SCALED else 32  # pairs
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    half_layout: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    rotated_layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROTATED, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(dtype, [SHAPE.units * CHUNKS, M, 64], layout)
    rows = reinterpret(queries, gl.float16, [SHAPE.units * CHUNKS * 2, M, 32], half_layout)
    latent_pages = gl.allocate_shared_memory(gl.float16, [STAGES * GROUPS * PAGES, SHAPE.page, 64], layout)
    latents = reinterpret(latent_pages, gl.int16, [STAGES * GROUPS, N, 64], layout)
    rotated_pages = gl.allocate_shared_memory(gl.float16, [STAGES * PAGES, SHAPE.page, ROTATED], rotated_layout)
    rotated_dtype: gl.constexpr = gl.bfloat16 if SCALED else gl.int16
    rotated = reinterpret(rotated_pages, rotated_dtype, [STAGES, N, ROTATED], rotated_layout)
    scale_pages = None
    scales = None
    if SCALED:
        scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
        scale_pages = gl.allocate_shared_memory(gl.float16, [STAGES * PAGES, SHAPE.page, 8], scale_layout)
        scales = reinterpret(scale_pages, gl.float32, [STAGES, N, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(gl.float16, WEIGHTS, gl.NVMMASharedLayout(2 * WEIGHTS[2], 16, 2))
    factors = gl.allocate_shared_memory(gl.float32, [2, M], vector)
    changed = gl.allocate_shared_memory(gl.int32, [2, 4], vector)
    shared = BytesMemory(
        queries, rows, ring.ring_of(SHAPE.units, 1, 1), latent_pages, latents, rotated_pages, rotated, scale_pages,
        scales, ring.ring_of(STAGES, PAGES, 3), Messages(weights, factors, changed, ring.ring_of(2, 1, 2)),
    )  # fmt: skip
    fence_async_shared()
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    LOAD: gl.constexpr = roles.load_part
    ROWS_OF_UNIT: gl.constexpr = roles.load_rows
    PAGE: gl.constexpr = load_page
    gl.warp_specialize(
        [
            (walk, (SCORE, factors_of(batch, SPEC), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (SUM, (0,), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (SUM, (2,), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (LOAD, (ROWS_OF_UNIT, PAGE, (shared.ring,), descs), batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [4, 4, 1],
        SHAPE.registers,
    )
