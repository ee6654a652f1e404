"""The Hopper kernel's arithmetic: what a warpgroup computes with its part of an item's query rows.

Letters, and the roles of warps, are explained in hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_ops.lowerings.gpu.attention.hopper.head_chunks import (
    WARPGROUP,
    first_in_part,
    first_of,
    number_of,
    part_of,
    products_of,
    size_of,
)
from paged_ops.lowerings.gpu.attention.hopper.work import (
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
from paged_ops.lowerings.gpu.attention.shared.tile import oldest_key

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def softmax_tile(
    qk, m, factor, cap, i, low, j, seq_len,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, SOFT_CAP: gl.constexpr,
    BY_ROWS: gl.constexpr = False,
):  # fmt: skip
    """p (unnormalised), m, each thread's sum of p, and the decay of earlier sums; to base 2, with the scale folded into
    one multiply-add. BY_ROWS: each row has a factor, or cap[1], of its own."""
    of_row = factor
    if SOFT_CAP and BY_ROWS:
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * cap[1][:, None]) + 1.0)
    elif SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
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
    if BY_ROWS and not SOFT_CAP:
        of_row = factor[:, None]
    p = gl.exp2(qk * of_row - shift[:, None])
    decay = gl.exp2(m * factor - shift)
    # over the columns of a thread; the threads of a row are summed at the end
    sums = gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return p, m_new, sums, decay


@gluon.jit
def positions(first_i, which: gl.constexpr, G: gl.constexpr, layout: gl.constexpr):
    """Of a consumer's rows, in an item whose first token is at first_i."""
    return first_i + (which * WARPGROUP + gl.arange(0, WARPGROUP, layout)) // G


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
def multiply(q_tiles, q_at, k_tiles, stage, zero, PARTS: gl.constexpr):
    """Begin the products of query rows with a tile of keys: the scores."""
    k_tile = k_tiles[0].index(stage).permute((1, 0))
    s = warpgroup_mma(q_tiles[0].index(q_at), k_tile, zero, use_acc=False, is_async=True)
    for n in gl.static_range(1, number_of(PARTS)):
        s = warpgroup_mma(q_tiles[n].index(q_at), k_tiles[n].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def weigh_columns(p16, v_tile, sums):
    """Begin to add the products of weights with some columns."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    weights = gl.convert_layout(p16, p_layout)  # stays where it is: sums of any width want the same registers
    return warpgroup_mma(weights, v_tile, sums, is_async=True)


@gluon.jit
def weigh(p16, v_tiles, stage, sums, PARTS: gl.constexpr):
    """Begin to add the products of weights with a tile of values to the sums, of which each has some columns."""
    WIDTHS: gl.constexpr = products_of(PARTS)
    made: gl.tuple = ()
    for n in gl.static_range(number_of(WIDTHS)):
        v_tile = v_tiles[part_of(PARTS, n)].index(stage).slice(first_in_part(PARTS, n), size_of(WIDTHS, n), dim=1)
        made += (weigh_columns(p16, v_tile, sums[n]),)
    return made


@gluon.jit
def finish(sums, PARTS: gl.constexpr):
    """Wait for all products."""
    if number_of(products_of(PARTS)) == 1:
        made = (warpgroup_mma_wait(0, deps=sums),)
    else:
        made = warpgroup_mma_wait(0, deps=sums)
    return made


@gluon.jit
def give_back(empty, SHAPE: gl.constexpr):
    """Say that a tile of keys or values is no longer read."""
    if SHAPE.M > 2 * WARPGROUP:
        async_copy.mbarrier_arrive(empty, increment_count=False)  # each thread for itself, so that none waits
    else:
        mbarrier.arrive(empty, count=1)


@gluon.jit
def zero_columns(values, j, low, end, rows: gl.constexpr, SIZE: gl.constexpr):
    GROUP: gl.constexpr = min(SIZE, 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GROUP, GROUP // 8], [4, 1], [1, 0])
    keys = j + gl.arange(0, rows, gl.SliceLayout(1, layout))
    values.store(gl.where(((keys >= low) & (keys < end))[:, None], values.load(layout), 0.0))


@gluon.jit
def zero_values(v_tiles, stage, row: gl.constexpr, rows: gl.constexpr, j, low, end, PARTS: gl.constexpr):
    """Zero the values of keys outside ``low : end`` in some rows of a tile, of which the first is key j. No row sees
    them and their weights are 0, but 0 * NaN would be NaN."""
    for n in gl.static_range(number_of(PARTS)):
        zero_columns(v_tiles[n].index(stage).slice(row, rows, dim=0), j, low, end, rows, size_of(PARTS, n))


@gluon.jit
def step(
    q_at, at, tile, full_start, full_end, sums, p16, m, l, factor, cap, first_i, i, low, j0, seq_len, zero, tensors,
    numbers, shared, which: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Computes the scores of the next key tile, while the previous tile's weights are multiplied with its values."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    STAGES: gl.constexpr = SHAPE.stages
    K_PARTS: gl.constexpr = SHAPE.k_parts
    V_PARTS: gl.constexpr = SHAPE.v_parts
    k_stage = at % STAGES
    v_stage = (at - 1) % STAGES
    mbarrier.wait(shared.k_full.index(k_stage), (at // STAGES) & 1)
    s = multiply(shared.q_tiles, q_at, shared.k_tiles, k_stage, zero, K_PARTS)
    mbarrier.wait(shared.v_full.index(v_stage), ((at - 1) // STAGES) & 1)
    sums = weigh(p16, shared.v_tiles, v_stage, sums, V_PARTS)
    s = warpgroup_mma_wait(number_of(products_of(V_PARTS)), deps=[s])
    give_back(shared.k_empty.index(k_stage), SHAPE)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and it would no longer run
    # during the product with the values.
    masked = tile >= full_end
    if BOUNDED:
        masked = masked | (tile < full_start)
    j = tile * SHAPE.N + j0
    BY_ROWS: gl.constexpr = shared.row_factors is not None
    if masked:
        if SHAPE.M > 2 * WARPGROUP and not MASKS.ranges:  # again for each such tile, as registers are few
            rows: gl.constexpr = m.type.layout
            low, i = keys_of_rows(positions(first_i, which, SPEC.G, rows), 0, tensors, numbers, MASKS)
        p, m, l_tile, decay = softmax_tile(
            s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP, BY_ROWS
        )
    else:
        p, m, l_tile, decay = softmax_tile(
            s, m, factor, cap, i, low, j, seq_len, False, CAUSAL, BOUNDED, SOFT_CAP, BY_ROWS
        )
    sums = finish(sums, V_PARTS)
    give_back(shared.v_empty.index(v_stage), SHAPE)
    l_layout: gl.constexpr = gl.SliceLayout(1, l_tile.type.layout)
    l = l * gl.convert_layout(decay, l_layout)[:, None] + l_tile
    p16 = gl.convert_layout(p.to(p16.dtype), p16.type.layout)
    return scaled(sums, decay, V_PARTS), p16, m, l


@gluon.jit
def scale(sums, factors):
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.convert_layout(factors, rows)[:, None]


@gluon.jit
def scaled(sums, factors, PARTS: gl.constexpr):
    """Sums times a factor per row."""
    made: gl.tuple = ()
    for n in gl.static_range(number_of(products_of(PARTS))):
        made += (scale(sums[n], factors),)
    return made


@gluon.jit
def zero_sums(M: gl.constexpr, WIDTHS: gl.constexpr):
    made: gl.tuple = ()
    for n in gl.static_range(number_of(WIDTHS)):
        made += (gl.full([M, size_of(WIDTHS, n)], 0.0, gl.float32, sums_layout(size_of(WIDTHS, n))),)
    return made


@gluon.jit
def store_columns(
    sums, tensors, first, tokens, kh, place, which: gl.constexpr, FIRST: gl.constexpr, PART: gl.constexpr,
    SPEC: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Write some columns of the rows, which belong to tokens from ``first`` on. PART: to a place among the parts."""
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = WARPGROUP
    layout: gl.constexpr = sums.type.layout
    r = which * M + gl.arange(0, M, gl.SliceLayout(1, layout))
    live = (r < SHAPE.M // G * G) & (r // G < tokens)
    if PART:
        to = tensors.parts
        row = place.to(gl.int64) * SHAPE.M + r
    else:
        to = tensors.out
        row = (first + r // G) * (SPEC.K * G) + kh * G + r % G
    d = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    at = to + row[:, None] * SPEC.v_side.size + d[None, :]
    gl.store(at, sums.to(to.dtype.element_ty), mask=live[:, None])


@gluon.jit
def store_item(
    sums, m, l, seen, factor, tensors, row_start, first_token, q_len, kh, place, which: gl.constexpr,
    PART: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Write the result and the lse of an item's rows. PART: to a place among the parts."""
    G: gl.constexpr = SPEC.G
    TOKENS: gl.constexpr = SHAPE.M // G
    WIDTHS: gl.constexpr = products_of(SHAPE.v_parts)
    first = row_start.to(gl.int64) + first_token
    for part in gl.static_range(number_of(WIDTHS)):
        store_columns(
            sums[part], tensors, first, q_len - first_token, kh, place, which,
            first_of(WIDTHS, part, SPEC.v_side.size), PART, SPEC, SHAPE,
        )  # fmt: skip
    if SPEC.lse or PART:
        lse2 = gl.where(seen, m * factor + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
        r = which * WARPGROUP + gl.arange(0, WARPGROUP, m.type.layout)
        token = first_token + r // G
        live = (r < TOKENS * G) & (token < q_len)
        if PART:
            gl.store(tensors.part_lse + place * SHAPE.M + r, lse2, mask=live)
        else:
            row = (row_start + token).to(gl.int64) * (SPEC.K * G) + kh * G + r % G
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)


@gluon.constexpr_function
def sums_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def consumer(which: gl.constexpr, tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """64 of the rows of each item: their products, softmax and output."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    G: gl.constexpr = SPEC.G
    N: gl.constexpr = SHAPE.N
    K_PARTS: gl.constexpr = SHAPE.k_parts
    V_PARTS: gl.constexpr = SHAPE.v_parts
    WIDTHS: gl.constexpr = products_of(V_PARTS)
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    ROW_SLOTS: gl.constexpr = SHAPE.row_slots
    M: gl.constexpr = WARPGROUP
    TOKENS: gl.constexpr = SHAPE.M // G
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(size_of(WIDTHS, 0)), 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    of_all = numbers.scale * LOG2E
    cap_of_all = (0.0, 0.0)
    if SOFT_CAP:
        of_all = 1.0
        cap_of_all = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    BY_ROWS: gl.constexpr = shared.row_factors is not None
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
                give_back(shared.k_empty.index(stage), SHAPE)
                mbarrier.wait(shared.v_full.index(stage), ((total + t) // STAGES) & 1)
                give_back(shared.v_empty.index(stage), SHAPE)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
        else:
            q_at = n % ROW_SLOTS * (SHAPE.M // WARPGROUP) + which
            first_i = seq_len - q_len + first_token
            if shared.places is not None:
                place = gl.sum(shared.places.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            i = positions(first_i, which, G, s_rows)
            s_of = 0
            if MASKS.ranges:
                s_of = get(shared.items, slot, SEQUENCE, 4)
            low, i = keys_of_rows(i, s_of, tensors, numbers, MASKS)
            factor = of_all
            cap = cap_of_all
            if BY_ROWS:
                mbarrier.wait(shared.rows_full.index(slot), (n // SLOTS) & 1)
                of_rows = shared.row_factors.index(slot).slice(which * M, M).load(s_rows)
                if SOFT_CAP:
                    cap = (cap_of_all[0], cap_of_all[1] * of_rows)
                else:
                    factor = of_all * of_rows
            m = gl.full([M], float("-inf"), gl.float32, s_rows)
            sink = m
            if SPEC.logits.sinks:
                sink = gl.load(tensors.sinks + kh * G + (which * M + gl.arange(0, M, s_rows)) % G) * LOG2E
                if shared.places is not None:  # the first part includes the sink
                    sink = gl.where((place < 0) | (place % 2 == 1), sink, float("-inf"))
                m = sink / factor
            sums = zero_sums(M, WIDTHS)

            # the last tile first: it needs the mask
            stage = total % STAGES
            if shared.rows_full is not None and not BY_ROWS:
                mbarrier.wait(shared.rows_full.index(n % ROW_SLOTS), (n // ROW_SLOTS) & 1)
            mbarrier.wait(shared.k_full.index(stage), (total // STAGES) & 1)
            s = multiply(shared.q_tiles, q_at, shared.k_tiles, stage, zero, K_PARTS)
            s = warpgroup_mma_wait(0, deps=[s])
            give_back(shared.k_empty.index(stage), SHAPE)
            j = (end_tile - 1) * N + j0
            p, m, l, _decay = softmax_tile(
                s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP, BY_ROWS
            )
            p16 = gl.convert_layout(p.to(shared.q_tiles[0].dtype), p_layout)
            # values past the sequence may be NaN: the first warpgroup zeroes them once
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_full.index(stage), (total // STAGES) & 1)
                if which == 0:
                    zero_values(shared.v_tiles, stage, 0, N, (end_tile - 1) * N, 0, seq_len, V_PARTS)
                    fence_async_shared()
            if which == 0:
                mbarrier.arrive(shared.v_clean.index(slot), count=1)
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_clean.index(slot), (n // SLOTS) & 1)
            for t in range(1, count):
                sums, p16, m, l = step(
                    q_at, total + t, end_tile - 1 - t, full_start, full_end, sums, p16, m, l, factor, cap, first_i, i,
                    low, j0, seq_len, zero, tensors, numbers, shared, which, SPEC, SHAPE,
                )  # fmt: skip
            stage = (total + count - 1) % STAGES
            if BOUNDED:  # the oldest tile, which comes last, may begin before the keys that the rows see
                first = (end_tile - count) * N
                oldest = get(shared.items, slot, OLDEST, 4)
                if first < oldest:
                    mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
                    if which == 0:
                        # 16 rows at a time, as the registers are full of sums
                        for part in gl.static_range(N // 16):
                            begin = first + part * 16
                            if begin < oldest:
                                zero_values(shared.v_tiles, stage, part * 16, 16, begin, oldest, seq_len, V_PARTS)
                        fence_async_shared()
                if which == 0:
                    mbarrier.arrive(shared.v_clean.index(SLOTS + slot), count=1)
                if first < oldest:
                    mbarrier.wait(shared.v_clean.index(SLOTS + slot), (n // SLOTS) & 1)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
            mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
            sums = finish(weigh(p16, shared.v_tiles, stage, sums, V_PARTS), V_PARTS)
            give_back(shared.v_empty.index(stage), SHAPE)

            l = gl.convert_layout(gl.sum(l, 1), s_rows)
            if SPEC.logits.sinks:
                l += gl.where(sink > float("-inf"), gl.exp2(sink - m * factor), 0.0)
            seen = l != 0.0
            share = gl.where(seen, 1.0 / gl.where(seen, l, 1.0), 0.0)
            if tensors.v_scale is not None:
                share *= gl.load(tensors.v_scale)
            sums = scaled(sums, share, V_PARTS)
            if shared.places is None:
                store_item(
                    sums, m, l, seen, factor, tensors, row_start, first_token, q_len, kh, 0, which, False, SPEC, SHAPE
                )
            elif place < 0:  # a whole unit
                store_item(
                    sums, m, l, seen, factor, tensors, row_start, first_token, q_len, kh, 0, which, False, SPEC, SHAPE
                )
            else:
                store_item(
                    sums, m, l, seen, factor, tensors, row_start, first_token, q_len, kh, place, which, True, SPEC,
                    SHAPE,
                )  # fmt: skip
        total += count
        n += 1
        mbarrier.wait(shared.item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(shared.items, n % SLOTS, COUNT, 4)
