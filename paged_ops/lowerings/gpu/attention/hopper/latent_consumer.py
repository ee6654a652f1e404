"""The Hopper kernel of latent attention: the arithmetic of its warpgroups.

Letters, and the roles of warps, are explained in latent_hopper.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.work_shares import part_after, part_of
from paged_ops.lowerings.gpu.attention.shared.tile import oldest_key
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index

# A maximum in use is replaced by a larger one only if that is larger by so much, to base 2: see weights_of.
SLACK = gl.constexpr(8.0)


@gluon.jit
def zero_unseen(latents, begin, low, end, N: gl.constexpr):
    """Zero the values of keys outside ``low : end`` in the tile that begins at ``begin``: their weights are 0, but
    0 * NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for part in gl.static_range(N // 8):
        first = begin + part * 8
        if (first < low) | (first + 8 > end):
            j = first + gl.arange(0, 8, gl.SliceLayout(1, layout))
            rows = latents.slice(part * 8, 8, dim=0)
            rows.store(gl.where(((j >= low) & (j < end))[:, None], rows.load(layout), 0.0))


@gluon.jit
def weights_of(qk, m, factor, cap, kept, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr):
    """The weights of a tile ``[M, N]`` (unnormalised, to base 2), each row's maximum in use, each thread's sums of
    weights, and the decay of earlier sums.

    A maximum that grows by at most SLACK stays in use, so that the sums need not be scaled. Weights are then at most
    2^SLACK, and as exact (the idea is FlashAttention-4's).
    """
    if SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * cap[1]) + 1.0)
    if MASKED:
        qk = gl.where(kept, qk, float("-inf"))
    # over a thread's pairs of columns first: chains of maxima are half as long
    largest = gl.max(gl.max(qk.reshape([qk.shape[0], qk.shape[1] // 8, 4, 2]), 1), 2)
    m_new = gl.maximum(m, gl.convert_layout(gl.max(largest, 1), m.type.layout) * factor)
    m_new = gl.where(m_new > m + SLACK, m_new, m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(qk * factor - shift[:, None])
    decay = gl.exp2(m - shift)
    # over the columns of a thread; the threads of a row are summed at the end
    sums = gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return p, m_new, sums, decay


class Bounds(NamedTuple):
    """The keys that the query rows of a unit see."""

    seq_len: Any
    oldest: Any  # no row sees a key before it
    i: Any  # the last key that a row sees, if causal
    low: Any  # the first
    full_start: Any  # the first and the end of the tiles of keys that need no mask
    full_end: Any


@gluon.jit
def bounds_of(seq_len, q_len, first_token, r, numbers, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """:class:`Bounds` of the unit that begins at ``first_token``, whose packed rows are r."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    first_i = seq_len - q_len + first_token
    i = first_i + r // SPEC.G
    low = i
    full_start = 0
    oldest = 0
    full_end = seq_len // N
    if MASKS.causal:
        full_end = gl.minimum(gl.maximum(first_i + 1, 0) // N, full_end)
    if MASKS.window or MASKS.chunk:
        low = oldest_key(i, numbers, MASKS)
        oldest = oldest_key(first_i, numbers, MASKS)
        last_i = first_i + gl.minimum(SHAPE.M // SPEC.G, q_len - first_token) - 1
        full_start = gl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    return Bounds(seq_len, oldest, i, low, full_start, full_end)


@gluon.jit
def multiply(at, shared, zero, SHAPE: gl.constexpr):
    """The products of the query rows with the at-th tile that the program takes."""
    stage = at % SHAPE.stages
    phase = (at // SHAPE.stages) & 1
    mbarrier.wait(shared.rotated_full.index(stage), phase)
    rotated = shared.rotated_tiles.index(stage).permute((1, 0))
    qk = warpgroup_mma(shared.q_rotated, rotated, zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.left_full.index(stage), phase)
    qk = warpgroup_mma(shared.q_left, shared.left_tiles.index(stage).permute((1, 0)), qk, is_async=True)
    mbarrier.wait(shared.right_full.index(stage), phase)
    return warpgroup_mma(shared.q_right, shared.right_tiles.index(stage).permute((1, 0)), qk, is_async=True)


@gluon.jit
def weigh(
    qk, m, l, rows, tile, at, told, factor, cap, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr,
    l_layout: gl.constexpr,
):  # fmt: skip
    """Tell the other warpgroups the weights of a tile. Returns the maxima and the sums."""
    MASKS: gl.constexpr = SPEC.masks
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    N: gl.constexpr = SHAPE.N
    begin = tile * N
    masked = tile >= rows.full_end
    if BOUNDED:
        masked = masked | (tile < rows.full_start)
    if masked:
        j = begin + gl.arange(0, N, gl.SliceLayout(0, qk.type.layout))
        kept = j[None, :] < rows.seq_len
        if MASKS.causal:
            kept = kept & (j[None, :] <= rows.i[:, None])
        if BOUNDED:
            kept = kept & (j[None, :] >= rows.low[:, None])
        p, m_new, sums, decay = weights_of(qk, m, factor, cap, kept, True, SOFT_CAP)
        if (begin + N > rows.seq_len) | (begin < rows.oldest):
            stage = at % SHAPE.stages
            zero_unseen(shared.left_tiles.index(stage), begin, rows.oldest, rows.seq_len, N)
            zero_unseen(shared.right_tiles.index(stage), begin, rows.oldest, rows.seq_len, N)
            fence_async_shared()  # only here: it takes hundreds of clocks, and threads read the weights themselves
    else:
        p, m_new, sums, decay = weights_of(qk, m, factor, cap, True, False, SOFT_CAP)
    mbarrier.wait(shared.taken.index(0), ((told & 1) ^ 1))
    shared.weights.store(p.to(shared.weights.dtype))
    shared.factors.store(decay)
    changed = (m_new != m).to(gl.int32)
    shared.changed.store(gl.max(changed.reshape([4, changed.shape[0] // 4]), 1))
    mbarrier.arrive(shared.weighed.index(0), count=1)
    return m_new, l * gl.convert_layout(decay, l_layout)[:, None] + sums


@gluon.jit
def scores(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The weights of all tiles, the factors of earlier sums, and lse."""
    tensors, numbers = batch.tensors, batch.numbers
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    p_id = share_index(SPEC, DIVISION)
    factor = numbers.scale * LOG2E
    cap = (0.0, 0.0)
    if SOFT_CAP:
        factor = 1.0
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    r = gl.arange(0, M, row_layout)
    zero = gl.full([M, N], 0.0, gl.float32, layout)
    left, s, kh, first_token, tile = share
    n = 0
    total = 0  # tiles
    told = 0  # messages to the other warpgroups
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            rows = bounds_of(seq_len, q_len, first_token, r, numbers, SPEC, SHAPE)
            m = gl.full([M], float("-inf"), gl.float32, row_layout)
            l = gl.sum(gl.sum(zero.reshape([M, N // 8, 4, 2]), 3), 1)
            l_layout: gl.constexpr = gl.SliceLayout(1, l.type.layout)
            mbarrier.wait(shared.q_full.index(0), n & 1)
            for t in range(seen):
                qk = warpgroup_mma_wait(0, deps=[multiply(total + t, shared, zero, SHAPE)])
                mbarrier.arrive(shared.rotated_empty.index((total + t) % SHAPE.stages), count=1)
                if t == seen - 1:
                    mbarrier.arrive(shared.q_empty.index(0), count=1)
                m, l = weigh(qk, m, l, rows, tile + t, total + t, told, factor, cap, shared, SPEC, SHAPE, l_layout)
                told += 1
            from_start = tile == first_tile
            head = kh * G + r % G
            l_ = gl.convert_layout(gl.sum(l, 1), row_layout)
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
            mbarrier.wait(shared.taken.index(0), ((told & 1) ^ 1))
            shared.factors.store(gl.where(any_seen, decay / gl.where(any_seen, l_, 1.0), 0.0))
            mbarrier.arrive(shared.weighed.index(0), count=1)
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
            total += seen
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def values(
    which: gl.constexpr, tiles, full, empty, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One half of the value columns of each unit."""
    tensors = batch.tensors
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    R: gl.constexpr = SPEC.v_side.size
    WIDTH: gl.constexpr = R // 4  # a product with twice as many columns would need more registers than ptxas allows it
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    flags: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    p_id = share_index(SPEC, DIVISION)
    r = gl.arange(0, M, row_layout)
    d = which * 2 * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    left, s, kh, first_token, tile = share
    total = 0
    told = 0
    while left > 0:
        row_start, q_len, _seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            acc0 = gl.full([M, WIDTH], 0.0, gl.float32, layout)
            acc1 = acc0
            for t in range(seen):
                stage = (total + t) % SHAPE.stages
                mbarrier.wait(full.index(stage), ((total + t) // SHAPE.stages) & 1)
                mbarrier.wait(shared.weighed.index(0), told & 1)
                decay = shared.factors.load(row_layout)
                changed = gl.max(shared.changed.load(flags), 0)
                p = shared.weights.load(p_layout)
                mbarrier.arrive(shared.taken.index(0), count=1)
                told += 1
                if changed != 0:
                    acc0 = acc0 * decay[:, None]
                    acc1 = acc1 * decay[:, None]
                acc0 = warpgroup_mma(p, tiles.index(stage).slice(0, WIDTH, dim=1), acc0, is_async=True)
                acc1 = warpgroup_mma(p, tiles.index(stage).slice(WIDTH, WIDTH, dim=1), acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.wait(shared.weighed.index(0), told & 1)
            factor = shared.factors.load(row_layout)
            mbarrier.arrive(shared.taken.index(0), count=1)
            told += 1
            # A row without keys is 0; a NaN stays NaN.
            acc0 = acc0 * factor[:, None]
            acc1 = acc1 * factor[:, None]
            token = first_token + r // G
            head = kh * G + r % G
            live = (r < TOKENS * G) & (token < q_len) & (head < SPEC.heads)
            from_start = tile == first_tile
            if from_start & (tile + count == end_tile):
                row = (row_start + token).to(gl.int64) * SPEC.heads + head
                at = tensors.out + row[:, None] * R + d[None, :]
                gl.store(at, acc0.to(tensors.out.dtype.element_ty), mask=live[:, None])
                gl.store(at + WIDTH, acc1.to(tensors.out.dtype.element_ty), mask=live[:, None])
            else:
                part_row = (p_id * 2 + from_start.to(gl.int32)).to(gl.int64) * M + r
                part = tensors.parts + part_row[:, None] * R + d[None, :]
                gl.store(part, acc0, mask=live[:, None])
                gl.store(part + WIDTH, acc1, mask=live[:, None])
            total += seen
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)
