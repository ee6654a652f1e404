"""Prefill and chunks: one program a tile of query rows, for the sequences that :mod:`decode` does not serve.

Letters as in :mod:`paged_ops.lowerings.gpu.attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.features import (
    VARYING,
    count_sink,
    finish,
    load_queries,
    next_seen_tile,
    oldest_key,
    queries_for_fp8,
    ranges_at,
    reach_of_rows,
    see_tile,
    store_rows,
)


@triton.jit(do_not_specialize=VARYING)
def prefill_kernel(
    out,
    lse,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    bidirectional_ranges,
    output_scale,
    scale,
    soft_cap,
    window,
    chunk,
    sparse_block,
    local_blocks,
    vert_stride,
    first_offset,
    offset_step,
    table_stride,
    S,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    RANGES: tl.constexpr,
    HEADS_AN_OFFSET: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    X: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    QUERY: tl.constexpr,  # strides t, h, d
    KEY: tl.constexpr,  # strides n, b, k, dx, d
    VALUE: tl.constexpr,  # strides n, b, k, d
    TABLE: tl.constexpr,  # stride m
    K_SCALE: tl.constexpr,  # strides of k
    V_SCALE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNKS_OF_S: tl.constexpr,
    PDL: tl.constexpr,
    SPLIT_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    TOKENS: tl.constexpr = BLOCK_M // G
    # In one dimension: of the others a grid has at most 65535.
    kh = tl.program_id(0) % K
    place = tl.program_id(0) // K
    tiles = tl.num_programs(0) // K
    H = tl.num_programs(0) // tiles * G  # K * G, but not a constant, with which triton 3.7.1 spills in float32
    # One tile more than any batch has: it makes this grid end after split_kernel, beside which it runs.
    if place == 0:
        if PDL:
            gdc_wait()
        return
    # Later tiles see more keys: they start first.
    query_tile = tiles - 1 - place
    # Sequence s starts at tile query_start_loc[s] // TOKENS + s, which leaves room for its last, partial tile.
    s = -1
    for n in tl.static_range(CHUNKS_OF_S):
        s_ = n * BLOCK_S + tl.arange(0, BLOCK_S)
        tile_ = tl.load(query_start_loc + s_, mask=s_ < S, other=0) // TOKENS + s_
        s += tl.sum(((tile_ <= query_tile) & (s_ < S)).to(tl.int32))
    row_start = tl.load(query_start_loc + s)
    q_len = tl.load(query_start_loc + s + 1) - row_start
    seq_len = tl.load(seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    if (first_token >= q_len) | (q_len * G <= SPLIT_M):
        return

    r = tl.arange(0, BLOCK_M)
    token = first_token + r // G
    row_live = (r < TOKENS * G) & (token < q_len)
    row_head = kh * G + r % G
    first_i = seq_len - q_len + first_token
    last_i = seq_len - q_len + tl.minimum(first_token + TOKENS, q_len) - 1
    i = seq_len - q_len + token
    q = load_queries(query, row_start + token, row_head, row_live, QUERY[0], QUERY[1], QUERY[2], D, D_PAD)
    factor = scale
    if k_scale is not None:
        factor = scale * tl.load(k_scale + kh * K_SCALE)
    if FORMAT == 0 and key_cache.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        q, row_factor = queries_for_fp8(q)
        factor *= row_factor
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + row_head)
    head_offset = (
        first_offset + ((kh * G + tl.arange(0, triton.next_power_of_2(G)) % G) // HEADS_AN_OFFSET) * offset_step
    )
    row_offset = first_offset + (row_head // HEADS_AN_OFFSET) * offset_step
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)

    # Key tiles: masked ones that begin before what every row sees, full ones, masked ones to the end.
    oldest = oldest_key(first_i, window, chunk, WINDOW, CHUNK)
    sees = None
    if RANGES:
        spans = (window, chunk, ranges_at(bidirectional_ranges, RANGES))
        low, high = reach_of_rows(spans, s, tl.minimum(i, last_i), WINDOW, CHUNK)
        sees = (low, high)
        oldest = tl.min(low, 0)
    first_tile = oldest // BLOCK_N
    newest = seq_len
    full_end = seq_len // BLOCK_N
    if RANGES:
        newest = tl.minimum(seq_len, tl.max(high, 0))
        full_end = tl.minimum(tl.maximum(tl.min(high, 0), 0) // BLOCK_N, full_end)
    elif CAUSAL:
        newest = tl.minimum(seq_len, last_i + 1)
        full_end = tl.maximum(first_i + 1, 0) // BLOCK_N
    end_tile = tl.maximum(tl.cdiv(newest, BLOCK_N), first_tile)
    if RANGES:
        full_first = tl.cdiv(tl.max(low, 0), BLOCK_N)
    else:
        full_first = tl.cdiv(oldest_key(last_i, window, chunk, WINDOW, CHUNK), BLOCK_N)
    full_first = tl.minimum(tl.maximum(full_first, first_tile), end_tile)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end_tile)

    block_table = block_tables + s.to(tl.int64) * table_stride
    keys = key_cache + kh.to(tl.int64) * KEY[2]
    values = value_cache + kh.to(tl.int64) * VALUE[2]
    sparse = (sparse_block, local_blocks, vert_stride, row_offset)
    if WINDOW or CHUNK:
        for tile in range(first_tile, full_first):
            acc, _, m, l = see_tile(
                acc, acc, m, l, q, i, sees, tile, True, slopes, factor, seq_len, oldest, block_table, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, False, KEY, VALUE, TABLE, BLOCK_N,
            )  # fmt: skip
    if not SPARSE:
        for tile in range(full_first, full_end):
            acc, _, m, l = see_tile(
                acc, acc, m, l, q, i, sees, tile, True, slopes, factor, seq_len, oldest, block_table, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, False,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, False, KEY, VALUE, TABLE, BLOCK_N,
            )  # fmt: skip
    if SPARSE:
        steps = 0  # counted first, so that the loop below is one whose loads are under way early
        tile = next_seen_tile(first_tile, first_i, head_offset, sparse_block, local_blocks, vert_stride, BLOCK_N)
        while tile < end_tile:
            steps += 1
            tile = next_seen_tile(tile + 1, first_i, head_offset, sparse_block, local_blocks, vert_stride, BLOCK_N)
        tile = first_tile - 1
        for _step in range(steps):
            tile = next_seen_tile(tile + 1, first_i, head_offset, sparse_block, local_blocks, vert_stride, BLOCK_N)
            acc, _, m, l = see_tile(
                acc, acc, m, l, q, i, sees, tile, True, slopes, factor, seq_len, oldest, block_table, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, False, KEY, VALUE, TABLE, BLOCK_N,
            )  # fmt: skip
    else:
        for tile in range(full_end, end_tile):
            acc, _, m, l = see_tile(
                acc, acc, m, l, q, i, sees, tile, True, slopes, factor, seq_len, oldest, block_table, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, False, KEY, VALUE, TABLE, BLOCK_N,
            )  # fmt: skip
    if sinks is not None:
        acc, m, l = count_sink(acc, m, l, tl.load(sinks + row_head))
    result, lse2 = finish(acc, m, l)
    if v_scale is not None:
        result = result * tl.load(v_scale + kh * V_SCALE)
    store_rows(out, lse, result, lse2, row_start + token, row_head, row_live, tl.arange(0, DV_PAD), output_scale, H, Dv)
