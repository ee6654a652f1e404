"""Latent attention on Hopper (sm_90) in Gluon over fp8 latents with one scale, for units of 64 query rows: more than 64
heads.

As in latent_fp8.py, numbers become float16 in registers, between shared memory and the tensor cores, so keys and value
columns are the rows of the matmuls (``S^T = K Q^T``, ``O^T = V^T P^T``). Here each byte is converted once for 64 query
rows rather than 32. In that layout the softmax of 64 rows would need 16 numbers in every thread for each number of a
row. So the scores are transposed through shared memory, and four threads have a query row, as in latent.py.

Letters and roles: as in latent_fp8.py. Measurements: benchmarks/notes/latent.md.
"""

from __future__ import annotations

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention.hopper import latent, latent_few, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_fp8 as narrow
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import apply_soft_cap
from paged_ops.lowerings.gpu.attention.hopper.latent_fp8 import GROUPS
from paged_ops.lowerings.gpu.attention.hopper.latent_roles import CHUNKS, LatentShape
from paged_ops.lowerings.gpu.attention.hopper.softmax import (
    LEAST,
    by_threads,
    rows_by_threads,
    rows_layout,
    softmax_tile,
)
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.fp8 import widen_pairs
from paged_ops.lowerings.gpu.launch import Choice, Launches
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec
from paged_ops.lowerings.gpu.target import Target

# Keys per matmul of values, and matmuls in flight: with more ptxas serialises the matmuls (C7512), or spills.
KEYS, OUTSTANDING = gl.constexpr(16), 2
STAGES = 3  # tiles in shared memory
REGISTERS = 176, 176, 24  # of the two warpgroups for values, and of the producer; the first warpgroup gets 136
APPLIES = narrow.APPLIES - {"row_scales"}


def serves(spec: Spec, target: Target) -> list[str]:
    few = [f"num_heads: expected more than {latent.ROWS}, got {spec.heads}"] if spec.heads <= latent.ROWS else []
    return latent.refusals(spec, APPLIES, narrow.STORED, "float8", 1) + few


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel cannot serve it."""
    return latent.plan_of(latent.ROWS, spec, target, shapes)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    M, page, e4m3 = latent.ROWS, latent.page_of(spec), spec.storage.dtype == narrow.STORED[0]
    key_bytes = (latent.LATENT + latent.ROTATED,)
    shape = LatentShape(M, latent.KEYS, page, STAGES, 1, key_bytes, REGISTERS, e4m3, OUTSTANDING)
    rows = functools.partial(latent.describe_rows, M, 64)
    # Pairs of 128 latent columns, and of the rotated columns.
    pairs = [functools.partial(latent_few.describe_columns, spec, page, width) for width in (64, 32)]
    return latent.build_of(latent_fp8_wide_kernel, shape, [rows], pairs, choice, spec, target, ("k_scale",))


@gluon.jit
def here(index):
    """The index as a number that the compiler does not know: it keeps addresses that it knows in registers during all
    of a loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [index], gl.int32, is_pure=False, pack=1)


@gluon.jit
def multiply_keys(place, zero, shared, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of a tile's keys and the query rows."""
    qk = zero
    rows = here(0)
    for chunk in gl.static_range(CHUNKS):
        qk = narrow.multiply_chunk(qk, chunk, place, rows, chunk == 0, shared, SHAPE)
        qk = warpgroup_mma_wait(SHAPE.outstanding if chunk < CHUNKS - 1 else 0, deps=[qk])
    return qk


@gluon.jit
def zero_unseen(place, begin, rows, shared, SHAPE: gl.constexpr):
    """Zero the values of the keys of a tile that no row sees: their weights are 0, but 0 * NaN would be NaN."""
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for g in range(GROUPS):
        latents = shared.latents.index(place * GROUPS + g)
        for key in gl.static_range(0, N, 16):
            j = begin + key + gl.arange(0, 16, gl.SliceLayout(1, layout))
            some = latents.slice(key, 16, dim=0)
            some.store(gl.where(((j >= rows.oldest) & (j < rows.seq_len))[:, None], some.load(layout), 0))


@gluon.jit
def store_weights(p, place, weights):
    """Store weights ``[M, N]``, KEYS keys per place."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    if N == KEYS:
        weights.index(place).store(p)
    else:
        first, last = p.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
        store_weights(first, place, weights)
        store_weights(last, place + N // 2 // KEYS, weights)


@gluon.jit
def score_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Send the weights of all tiles of a part and the factors of the accumulators; store lse."""
    n, at, sent = counts
    scale, cap, k_scale = args
    messages = shared.messages
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    by_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, M, row_layout)
    zero = gl.full([N, M], 0.0, gl.float32, by_keys)
    four: gl.constexpr = rows_layout(by_threads(gl.full([M, N], 0.0, gl.float32, layout)).type.layout)
    m = gl.full([M, 4], LEAST, gl.float32, four)
    l = gl.full([M, 4], 0.0, gl.float32, four)
    ring.wait_full(shared.q_ring, n)
    factor = rows_by_threads(narrow.prepare_rows(n, shared, SPEC, SHAPE) * scale, four)
    rows = roles.rows_of(part, r, factor, cap, batch.numbers, SPEC, SHAPE)
    for t in range(part.seen):
        tile = part.tile + t
        place = ring.stage_of(shared.ring, at)
        ring.wait_full(shared.ring, at)
        qk = multiply_keys(place, zero, shared, SHAPE)
        if t == part.seen - 1:
            ring.release(shared.q_ring, n)
        qk = gl.convert_layout(qk.permute((1, 0)), layout)
        if SOFT_CAP:
            scores = by_threads(qk)
            factors = gl.convert_layout(factor, rows_layout(scores.type.layout))[:, None, :, None]
            qk = apply_soft_cap(gl.convert_layout((scores * factors).reshape([M, N]), layout), rows.cap)
        if roles.is_masked(rows, tile, SPEC):
            qk = gl.where(roles.keep(qk, rows, tile * N, 1, SPEC), qk, float("-inf"))
            if roles.has_unseen(rows, tile * N, N):
                zero_unseen(place, tile * N, rows, shared, SHAPE)
        if SOFT_CAP:
            p, m, totals, decay = softmax_tile(qk, m, 1.0, False)
        else:
            p, m, totals, decay = softmax_tile(qk, m, factor, True)
        l = l * decay + totals
        ring.wait_empty(messages.ring, sent)
        to = ring.stage_of(messages.ring, sent)
        store_weights(p.to(gl.float16), to * (N // KEYS), messages.weights)
        messages.factors.index(to).store(gl.max(decay, 1))
        changed = (decay != 1.0).to(gl.int32).reshape([4, M // 4, 4])
        messages.changed.index(to).store(gl.max(gl.max(changed, 2), 1))
        fence_async_shared()
        ring.fill(messages.ring, sent)
        ring.release(shared.ring, at)
        sent += 1
        at += 1
    l_ = gl.convert_layout(gl.sum(l, 1), row_layout)
    m_ = gl.convert_layout(gl.max(m, 1), row_layout)
    m_, l_, decay = roles.add_sink(m_, l_, part, r, batch.tensors, SPEC)
    roles.send_last(messages, sent, roles.normalizer(l_, decay) * k_scale)
    roles.store_part((), None, roles.lse2_of(m_, l_), part, r, batch.tensors, 0, 1, SPEC, SHAPE)
    return Counts(n + 1, at, sent + 1)


@gluon.jit
def load_values(place, key: gl.constexpr, g: gl.constexpr, shared, SHAPE: gl.constexpr, layout: gl.constexpr):
    """The even and the odd columns ``[64, KEYS]`` of a group of values, of some keys of a tile."""
    pairs = shared.latents.index(place * GROUPS + g).slice(key, KEYS, dim=0).permute((1, 0)).load(layout)
    return widen_pairs(pairs, SHAPE.e4m3)


@gluon.jit
def sum_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Two groups of the value columns of a part's result, from group ``args[0]`` on."""
    G0: gl.constexpr = args[0]
    messages = shared.messages
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    at, received = counts.tiles, counts.messages
    acc0 = gl.full([64, M], 0.0, gl.float32, layout)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for _t in range(part.seen):
        place = ring.stage_of(shared.ring, at)
        ring.wait_full(shared.ring, at)
        ring.wait_full(messages.ring, received)
        message = ring.stage_of(messages.ring, received)
        changed = gl.max(messages.changed.index(message).load(gl.BlockedLayout([4], [32], [4], [0])), 0)
        if changed != 0:
            decay = messages.factors.index(message).load(row_layout)
            acc0 = acc0 * decay[None, :]
            acc1 = acc1 * decay[None, :]
            acc2 = acc2 * decay[None, :]
            acc3 = acc3 * decay[None, :]
        for key in gl.static_range(0, N, KEYS):
            weights = messages.weights.index(message * (N // KEYS) + key // KEYS).permute((1, 0))
            even, odd = load_values(place, key, G0, shared, SHAPE, v_layout)
            acc0 = warpgroup_mma(even, weights, acc0, is_async=True)
            acc1 = warpgroup_mma(odd, weights, acc1, is_async=True)
            acc0, acc1, acc2, acc3 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1, acc2, acc3])
            even, odd = load_values(place, key, G0 + 1, shared, SHAPE, v_layout)
            acc2 = warpgroup_mma(even, weights, acc2, is_async=True)
            acc3 = warpgroup_mma(odd, weights, acc3, is_async=True)
            acc0, acc1, acc2, acc3 = warpgroup_mma_wait(SHAPE.outstanding, deps=[acc0, acc1, acc2, acc3])
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
        ring.release(shared.ring, at)
        ring.release(messages.ring, received)
        received += 1
        at += 1
    factor = roles.receive_last(messages, received, row_layout)
    r = gl.arange(0, M, row_layout)
    roles.store_part((acc0, acc1, acc2, acc3), factor, None, part, r, batch.tensors, 128 * G0, 2, SPEC, SHAPE)
    return Counts(counts.units, at, received + 1)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_fp8_wide_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    q_desc, latent_desc, rotated_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    WEIGHTS: gl.constexpr = [2 * (SHAPE.N // KEYS), SHAPE.M, KEYS]
    SCORE: gl.constexpr = score_part
    SUM: gl.constexpr = sum_part
    descs = (q_desc, latent_desc, rotated_desc, None)
    narrow.run_roles(SCORE, SUM, descs, Batch(tensors, numbers, None), WEIGHTS, SPEC, DIVISION, SHAPE, PDL)
