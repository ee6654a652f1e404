"""The Hopper kernel's arithmetic: what a warpgroup computes with its half of an item's query rows.

Letters, and the roles of warps, are explained in hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_ops.lowerings.gpu.attention.hopper_items import (
    COUNT,
    END_TILE,
    FIRST_TOKEN,
    FULL_END,
    FULL_START,
    KV_HEAD,
    OLDEST,
    Q_LEN,
    ROW_START,
    SEQ_LEN,
    SEQUENCE,
    get,
    reach_of_ranges,
)
from paged_ops.lowerings.gpu.attention.tile import oldest_key

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def softmax_tile(
    qk, m, factor, cap, i, low, j, seq_len,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """p (unnormalised), m, each thread's sum of p, and the decay of earlier sums; to base 2, with the scale folded into
    one multiply-add."""
    if SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * cap[1]) + 1.0)
    if MASKED:
        kept = j[None, :] < seq_len
        if CAUSAL:
            kept = kept & (j[None, :] <= i[:, None])
        if BOUNDED:
            kept = kept & (j[None, :] >= low[:, None])
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * factor
    p = gl.exp2(qk * factor - shift[:, None])
    decay = gl.exp2(m * factor - shift)
    # over the columns of a thread; the threads of a row are summed at the end
    sums = gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return p, m_new, sums, decay


@gluon.jit
def keys_of_rows(i, s, tensors, numbers, MASKS: gl.constexpr):
    """The first and, if causal, the last key that each row at positions i sees."""
    low = i
    if MASKS.window or MASKS.chunk:
        low = oldest_key(i, numbers, MASKS)
    if MASKS.ranges:
        low, end = reach_of_ranges(tensors.bidirectional_ranges, s, i, i, low, i + 1, MASKS.ranges)
        i = end - 1
    return low, i


@gluon.jit
def weigh(p16, v_tile, acc0, acc1, D: gl.constexpr):
    """``acc + p16 @ v``, in two halves if one product would be wider than ptxas takes."""
    if D == 256:
        acc0 = warpgroup_mma(p16, v_tile.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(p16, v_tile.slice(128, 128, dim=1), acc1, is_async=True)
    else:
        acc0 = warpgroup_mma(p16, v_tile, acc0, is_async=True)
    return acc0, acc1


@gluon.jit
def forget_values(v_tile, first, oldest, BLOCK_N: gl.constexpr):
    """Zero the values of keys before ``oldest`` in the tile that begins at ``first``. No row sees them and their
    weights are 0, but 0 * NaN would be NaN. 16 rows at a time, as the registers are full of sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for part in gl.static_range(BLOCK_N // 16):
        if first + part * 16 < oldest:
            rows = first + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            values = v_tile.slice(part * 16, 16, dim=0)
            values.store(gl.where((rows >= oldest)[:, None], values.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def step(
    q_tile, at, tile, full_start, full_end, acc0, acc1, p16, m, l, factor, cap, i, low, j0, seq_len, zero, shared,
    SPEC: gl.constexpr, SHAPE: gl.constexpr, p_layout: gl.constexpr, o_rows: gl.constexpr,
):  # fmt: skip
    """Computes the scores of the next key tile, while the previous tile's weights are multiplied with its values."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    D: gl.constexpr = SPEC.v_side.size
    STAGES: gl.constexpr = SHAPE.stages
    k_stage = at % STAGES
    v_stage = (at - 1) % STAGES
    mbarrier.wait(shared.k_full.index(k_stage), (at // STAGES) & 1)
    s = warpgroup_mma(q_tile, shared.k_tiles.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(v_stage), ((at - 1) // STAGES) & 1)
    acc0, acc1 = weigh(p16, shared.v_tiles.index(v_stage), acc0, acc1, D)
    s = warpgroup_mma_wait(1 if D < 256 else 2, deps=[s])
    mbarrier.arrive(shared.k_empty.index(k_stage), count=1)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and it would no longer run
    # during the product with the values.
    masked = tile >= full_end
    if BOUNDED:
        masked = masked | (tile < full_start)
    j = tile * SHAPE.N + j0
    if masked:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
    else:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, False, CAUSAL, BOUNDED, SOFT_CAP)
    if D == 256:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(shared.v_empty.index(v_stage), count=1)
    l_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    l = l * gl.convert_layout(decay, l_layout)[:, None] + sums
    shrink = gl.convert_layout(decay, o_rows)[:, None]
    acc0 = acc0 * shrink
    if D == 256:
        acc1 = acc1 * shrink
    p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
    return acc0, acc1, p16, m, l


@gluon.jit
def consumer(which: gl.constexpr, tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Half of the rows of each item: their products, softmax and output."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    G: gl.constexpr = SPEC.G
    D: gl.constexpr = SPEC.v_side.size
    N: gl.constexpr = SHAPE.N
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    M: gl.constexpr = SHAPE.M // 2
    TOKENS: gl.constexpr = SHAPE.M // G
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WIDTH: gl.constexpr = min(D, 128)
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    H = SPEC.K * G
    factor = numbers.scale * LOG2E
    cap = (0.0, 0.0)
    if SOFT_CAP:
        factor = 1.0
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    j0 = gl.arange(0, N, gl.SliceLayout(0, s_layout))
    zero = gl.full([M, N], 0.0, gl.float32, s_layout)
    mbarrier.wait(shared.item_full.index(0), 0)
    count = get(shared.items, 0, COUNT, 4)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(shared.items, slot, KV_HEAD, 4)
        row_start = get(shared.items, slot, ROW_START, 4)
        q_len = get(shared.items, slot, Q_LEN, 4)
        seq_len = get(shared.items, slot, SEQ_LEN, 4)
        first_token = get(shared.items, slot, FIRST_TOKEN, 4)
        end_tile = get(shared.items, slot, END_TILE, 4)
        full_start = get(shared.items, slot, FULL_START, 4)
        full_end = get(shared.items, slot, FULL_END, 4)
        if which * M >= gl.minimum(TOKENS, q_len - first_token) * G:  # no rows: it only releases the tiles
            for t in range(count):
                stage = (total + t) % STAGES
                mbarrier.wait(shared.k_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(shared.k_empty.index(stage), count=1)
                mbarrier.wait(shared.v_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(shared.v_empty.index(stage), count=1)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
        else:
            q_tile = shared.q_tiles.index(slot * 2 + which)
            i = seq_len - q_len + first_token + (which * M + gl.arange(0, M, s_rows)) // G
            s_of = 0
            if MASKS.ranges:
                s_of = get(shared.items, slot, SEQUENCE, 4)
            low, i = keys_of_rows(i, s_of, tensors, numbers, MASKS)
            m = gl.full([M], float("-inf"), gl.float32, s_rows)
            sink = m
            if SPEC.logits.sinks:
                sink = gl.load(tensors.sinks + kh * G + (which * M + gl.arange(0, M, s_rows)) % G) * LOG2E
                m = sink / factor
            acc0 = gl.full([M, WIDTH], 0.0, gl.float32, o_layout)
            acc1 = acc0

            # the last tile first: it needs the mask
            stage = total % STAGES
            mbarrier.wait(shared.k_full.index(stage), (total // STAGES) & 1)
            s = warpgroup_mma(q_tile, shared.k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(shared.k_empty.index(stage), count=1)
            j = (end_tile - 1) * N + j0
            p, m, l, _decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
            p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
            # values past the sequence may be NaN: the first warpgroup zeroes them once
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_full.index(stage), (total // STAGES) & 1)
                if which == 0:
                    rows = (end_tile - 1) * N + gl.arange(0, N, gl.SliceLayout(1, v_layout))
                    v = shared.v_tiles.index(stage).load(v_layout)
                    shared.v_tiles.index(stage).store(gl.where((rows < seq_len)[:, None], v, 0.0))
                    fence_async_shared()
            if which == 0:
                mbarrier.arrive(shared.v_clean.index(slot), count=1)
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_clean.index(slot), (n // SLOTS) & 1)
            for t in range(1, count):
                acc0, acc1, p16, m, l = step(
                    q_tile, total + t, end_tile - 1 - t, full_start, full_end, acc0, acc1, p16, m, l, factor, cap,
                    i, low, j0, seq_len, zero, shared, SPEC, SHAPE, p_layout, o_rows,
                )  # fmt: skip
            stage = (total + count - 1) % STAGES
            if BOUNDED:  # the oldest tile, which comes last, may begin before the keys that the rows see
                first = (end_tile - count) * N
                oldest = get(shared.items, slot, OLDEST, 4)
                if first < oldest:
                    mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
                    if which == 0:
                        forget_values(shared.v_tiles.index(stage), first, oldest, N)
                if which == 0:
                    mbarrier.arrive(shared.v_clean.index(SLOTS + slot), count=1)
                if first < oldest:
                    mbarrier.wait(shared.v_clean.index(SLOTS + slot), (n // SLOTS) & 1)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
            mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
            acc0, acc1 = weigh(p16, shared.v_tiles.index(stage), acc0, acc1, D)
            if D == 256:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(shared.v_empty.index(stage), count=1)

            l = gl.convert_layout(gl.sum(l, 1), s_rows)
            if SPEC.logits.sinks:
                l += gl.where(sink > float("-inf"), gl.exp2(sink - m * factor), 0.0)
            seen = l != 0.0
            share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, l, 1.0), 0.0), o_rows)[:, None]
            r = which * M + gl.arange(0, M, o_rows)
            token = first_token + r // G
            live = (r < TOKENS * G) & (token < q_len)
            row = (row_start + token).to(gl.int64) * H + kh * G + r % G
            d = gl.arange(0, WIDTH, gl.SliceLayout(0, o_layout))
            at = tensors.out + row[:, None] * D + d[None, :]
            gl.store(at, (acc0 * share).to(tensors.out.dtype.element_ty), mask=live[:, None])
            if D == 256:
                gl.store(at + WIDTH, (acc1 * share).to(tensors.out.dtype.element_ty), mask=live[:, None])
            if SPEC.lse:
                lse2 = gl.where(seen, m * factor + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
                r = which * M + gl.arange(0, M, s_rows)
                token = first_token + r // G
                live = (r < TOKENS * G) & (token < q_len)
                row = (row_start + token).to(gl.int64) * H + kh * G + r % G
                gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        total += count
        n += 1
        mbarrier.wait(shared.item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(shared.items, n % SLOTS, COUNT, 4)
