"""Batch-invariant decodes on Hopper over fp8 caches: what the consumers of invariant_fp8.py compute, by ``mma.sync`` or
``wgmma`` with few columns, from keys and values that are converted in registers.

The bits are those of 64 rows by ``wgmma``: on sm_90 a chain of matrix instructions gives the same float32s whatever the
instruction and the side of an operand (measured, see benchmarks/notes/gpu-designs.md), as long as each step of 16
numbers has the same numbers. So a tile has the same 128 keys here, columns of keys are in the same order (``apart`` of
fp8.py), and the softmax takes the same instructions; weights are added by keys in one order.

A tile takes a warp 600 instructions and six barriers, so several programs share a multiprocessor.

Letters: as in dense.py; here the rows of products are keys, and the columns query rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention.hopper import softmax
from paged_ops.lowerings.gpu.attention.hopper.segments import fold_weights, segment_tiles, segments_of
from paged_ops.lowerings.gpu.attention.shared.tile import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.triton.slices import load_slices
from paged_ops.lowerings.gpu.fp8 import widen_halves, widen_pairs
from paged_ops.lowerings.gpu.spec import SLICE, Numbers

PIECE = tl.constexpr(SLICE)  # keys that lie in one block
LEAST = tl.constexpr(27 << 23)  # as in ``halve_rows`` of fp8.py


@triton.jit
def items_from(start, segmented, tensors, S, SPEC: tl.constexpr, PLAN: tl.constexpr, TILE: tl.constexpr):
    """Sequences from ``start`` on, and their items: segments other than last ones of less than half the keys; these;
    and tokens of other sequences, if no other kernel serves them."""
    DIVISION: tl.constexpr = PLAN.division
    CUTS: tl.constexpr = PLAN.cuts
    s = start + tl.arange(0, DIVISION.at_once)
    live = s < S
    row_start = tl.load(tensors.query_start_loc + s, mask=live, other=0)
    q_len = tl.load(tensors.query_start_loc + s + 1, mask=live, other=0) - row_start
    seq_len = tl.load(tensors.seq_lens + s, mask=live, other=0)
    tiles, segments, _ = segments_of(q_len, seq_len, SPEC.G, 1, DIVISION.rows, CUTS, TILE.N)
    segments = tl.where(live & segmented, segments, 0)
    short = 2 * (seq_len - (segments - 1) * (tiles * TILE.N)) < tiles * TILE.N
    last = tl.where(short, tl.minimum(segments, 1), 0)
    tokens = 0 * q_len
    if PLAN.everyone:
        tokens = tl.where(segments > 0, 0, q_len)
    return s, segments - last, last, tokens


@triton.jit
def total_items(segmented, tensors, S, SPEC: tl.constexpr, PLAN: tl.constexpr, TILE: tl.constexpr):
    """The items of a key/value head of all sequences."""
    DIVISION: tl.constexpr = PLAN.division
    full = 0
    last = 0
    tokens = 0
    for start in range(0, S, DIVISION.at_once):
        _, full_, last_, tokens_ = items_from(start, segmented, tensors, S, SPEC, PLAN, TILE)
        full += tl.sum(full_)
        last += tl.sum(last_)
        tokens += tl.sum(tokens_)
    return full, last, tokens


@triton.jit
def halve(q):
    """bfloat16 rows as float16, and their factors, as ``halve_rows`` of fp8.py does."""
    row = q.to(tl.float32)
    power = tl.max(tl.abs(row), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, LEAST), 253 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return (row * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)


@triton.jit
def load_values(base, block, offset, live, SIDE: tl.constexpr, N: tl.constexpr):
    """Pairs of bytes of a tile of values ``[Dv / 2, N]``: as ``load_slices``, with all columns first."""
    base = base.to(tl.pointer_type(tl.int16))
    place = (block * (SIDE.n // 2) + offset * (SIDE.b // 2))[None, :, None]
    n = tl.arange(0, PIECE) * (SIDE.b // 2)
    d = tl.arange(0, SIDE.size // 2)
    at = place + (d[:, None, None] + n[None, None, :])
    return tl.reshape(tl.load(base + at, mask=live, other=0), (SIDE.size // 2, N))


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_decode_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, PLAN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Items: a segment of a sequence of few rows, whose state is stored if the sequence has several; or one token of
    another sequence, or of any if the workspace does not hold the states of the batch, with all its segments."""
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    D: tl.constexpr = SPEC.k_side.size
    Dv: tl.constexpr = SPEC.v_side.size
    K_SIDE: tl.constexpr = SPEC.k_side
    V_SIDE: tl.constexpr = SPEC.v_side
    CUTS: tl.constexpr = PLAN.cuts
    DIVISION: tl.constexpr = PLAN.division
    E4M3: tl.constexpr = tensors.key_cache.dtype.element_ty == tl.float8e4nv
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counter = tensors.taken
    if tensors.arrived is not None:
        counter = tensors.arrived
    if tensors.k_scale is not None:
        scale *= tl.load(tensors.k_scale)
    factor = scale * LOG2E
    full, last, tokens = total_items(S > 0, tensors, S, SPEC, PLAN, TILE)
    fits = (full + last) * K <= CUTS.states
    if not fits:
        full, last, tokens = total_items(fits, tensors, S, SPEC, PLAN, TILE)
    r = tl.arange(0, M)
    d = tl.arange(0, D)
    pair = tl.arange(0, Dv // 2)
    at = tl.program_id(0)
    end_item = (full + last + tokens) * K
    while at < end_item:
        kh = at % K
        unit = at // K
        is_full = unit < full
        is_token = unit >= full + last
        unit -= tl.where(is_full, 0, tl.where(is_token, full + last, full))
        s = 0
        before = 0  # items of the same kind of the sequences before s
        states = 0  # segments of these sequences
        passed_items = 0
        for start in range(0, S, DIVISION.at_once):
            s_, full_, last_, tokens_ = items_from(start, fits, tensors, S, SPEC, PLAN, TILE)
            units = tl.where(is_full, full_, tl.where(is_token, tokens_, last_))
            passed = (passed_items + tl.cumsum(units, 0) <= unit) & (s_ < S)
            s += tl.sum(passed.to(tl.int32))
            before += tl.sum(tl.where(passed, units, 0))
            states += tl.sum(tl.where(passed, full_ + last_, 0))
            passed_items += tl.sum(units)
        row_start = tl.load(tensors.query_start_loc + s)
        q_len = tl.load(tensors.query_start_loc + s + 1) - row_start
        seq_len = tl.load(tensors.seq_lens + s)
        tiles, segments, _ = segments_of(q_len, seq_len, G, 1, DIVISION.rows, CUTS, N)
        segment = tl.where(is_full, unit - before, segments - 1)
        place = ((states + segment) * K + kh).to(tl.int64) * CUTS.rows
        first_token = 0
        count = q_len
        if is_token:
            first_token = unit - before
            count = 1
            tiles = segment_tiles(seq_len - q_len + first_token, CUTS)
            segment = tl.maximum(tl.cdiv(seq_len, tiles * N), 1) - 1
        stored = (segments > 1) & (is_token == 0)
        first_segment = tl.where(stored, segment, 0)
        end_tile = tl.maximum(tl.cdiv(seq_len, N), 1)

        token = first_token + r // G
        live = r < count * G
        head = kh * G + r % G
        i = seq_len - q_len + token
        row = (row_start + token).to(tl.int64) * SPEC.query[0] + head.to(tl.int64) * SPEC.query[1]
        q = tl.load(tensors.query + row[:, None] + d[None, :] * SPEC.query[2], mask=live[:, None], other=0.0)
        row_factor = tl.full([M], 1.0, tl.float32)
        if q.dtype == tl.bfloat16:
            q, row_factor = halve(q)
        own_factor = factor * row_factor
        q0, q1 = tl.split(tl.permute(tl.reshape(q, (M, D // 4, 2, 2)), (0, 1, 3, 2)))
        q0 = tl.trans(tl.reshape(q0, (M, D // 2)))
        q1 = tl.trans(tl.reshape(q1, (M, D // 2)))
        block_table = tensors.block_tables + tl.cast(s, tl.int64) * table_stride
        keys = tensors.key_cache + kh.to(tl.int64) * K_SIDE.k
        values = tensors.value_cache + kh.to(tl.int64) * V_SIDE.k

        total_even = tl.zeros([Dv // 2, M], tl.float32)
        total_odd = total_even
        total_m = tl.full([M], softmax.LEAST, tl.float32)
        total_l = tl.zeros([M], tl.float32)
        while segment >= first_segment:
            begin = segment * tiles
            end = tl.maximum(tl.minimum(begin + tiles, end_tile), begin + 1)
            even = tl.zeros([Dv // 2, M], tl.float32)
            odd = even
            sums = tl.zeros([4, 4, M], tl.float32)
            m = tl.full([M], softmax.LEAST, tl.float32)
            for t in range(0, end - begin):
                tile = end - 1 - t
                first = tile * N + tl.arange(0, N // PIECE) * PIECE
                block = tl.load(block_table + (first // SPEC.B) * SPEC.table, mask=first < seq_len, other=0)
                block = block.to(tl.int64)
                offset = (first % SPEC.B).to(tl.int64)
                k = load_slices(keys, block, offset, seq_len > 0, K_SIDE, D, PIECE, True, False)
                k0, k1 = widen_halves(tl.reshape(k, (N, D // 2)), E4M3)
                scores = tl.dot(k1, q1, tl.dot(k0, q0))
                j = tile * N + tl.arange(0, N)
                kept = (j < seq_len)[:, None]
                if SPEC.masks.causal:
                    kept = kept & (j[:, None] <= i[None, :])
                scores = tl.where(kept, scores, float("-inf"))
                m, decay = softmax.raised(m, tl.max(scores, 0) * own_factor)
                p = tl.exp2(tl.fma(scores, tl.broadcast_to(own_factor[None, :], [N, M]), -m[None, :]))
                p16 = p.to(tl.float16)
                there = first[:, None] + tl.arange(0, PIECE)[None, :] < seq_len
                v = load_values(values, block, offset, there[None, :, :], V_SIDE, N)
                v_even, v_odd = widen_pairs(v, E4M3)
                even = tl.dot(v_even, p16, even * decay[None, :])
                odd = tl.dot(v_odd, p16, odd * decay[None, :])
                # as ``thread_sums`` of invariant_sums.py, by keys
                tile_sums = tl.sum(tl.reshape(p, (2, 4, 2, 4, 2, M)), 2)
                tile_sums = tl.sum(tl.sum(tile_sums, 0), 2)
                sums = tl.fma(sums, tl.broadcast_to(decay[None, None, :], [4, 4, M]), tile_sums)
            # as ``row_sums`` of invariant_sums.py
            l = tl.sum(tl.sum(tl.sum(tl.sum(tl.reshape(sums, (2, 2, 2, 2, M)), 1), 0), 1), 0)
            if stored:
                to = tensors.parts + (place + r)[None, :] * Dv + 2 * pair[:, None]
                tl.store(to, even, mask=live[None, :])
                tl.store(to + 1, odd, mask=live[None, :])
                tl.store(tensors.part_lse + (place + r) * 2, m, mask=live)
                tl.store(tensors.part_lse + (place + r) * 2 + 1, l, mask=live)
            else:
                m_new, decay, weight = fold_weights(total_m, m)
                takes = m > softmax.LEAST
                by_decay = tl.broadcast_to(decay[None, :], even.shape)
                total_even = tl.where(takes[None, :], tl.fma(total_even, by_decay, even * weight[None, :]), total_even)
                total_odd = tl.where(takes[None, :], tl.fma(total_odd, by_decay, odd * weight[None, :]), total_odd)
                total_l = tl.where(takes, tl.fma(total_l, decay, l * weight), total_l)
                total_m = tl.where(takes, m_new, total_m)
            segment -= 1
        if stored == 0:
            seen = total_l != 0.0
            share = tl.where(seen, 1.0 / tl.where(seen, total_l, 1.0), 0.0)
            if tensors.v_scale is not None:
                share *= tl.load(tensors.v_scale)
            lse2 = tl.where(seen, total_m + tl.log2(tl.where(seen, total_l, 1.0)), float("-inf"))
            out_row = (row_start + token).to(tl.int64) * SPEC.heads + head
            to = tensors.out + out_row[None, :] * Dv + 2 * pair[:, None]
            dtype: tl.constexpr = tensors.out.dtype.element_ty
            tl.store(to, (total_even * share[None, :]).to(dtype), mask=live[None, :])
            tl.store(to + 1, (total_odd * share[None, :]).to(dtype), mask=live[None, :])
            if tensors.lse is not None:
                tl.store(tensors.lse + out_row, lse2 * LN2, mask=live)
        at = tl.num_programs(0) + tl.atomic_add(counter + 3, 1)
