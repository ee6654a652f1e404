"""Decode and speculative widths: key tiles of all sequences in one row, cut into equal shares, and the merge.

Letters as in :mod:`paged_ops.lowerings.gpu.attention`. A *unit* is one key/value head of one sequence with one tile of
packed query rows; a *share* is a program's contiguous part of all key tiles of all units.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.features import (
    VARYING,
    count_sink,
    finish,
    join_slices,
    load_queries,
    next_seen_tile,
    nothing_seen,
    oldest_key,
    queries_for_fp8,
    ranges_at,
    reach_of_ranges,
    reach_of_rows,
    see_slices,
    see_tile,
    store_rows,
)


@triton.jit(do_not_specialize=VARYING)
def split_kernel(
    out,
    lse,
    parts,  # [P, 2, M, Dv] float32: of a unit that began before the program's share (0), that goes on after it (1)
    part_lse,  # [P, 2, M] float32, to base 2
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
    PAIRED: tl.constexpr,  # see see_tile
    SHORT: tl.constexpr,  # see sequence()
    SLICES: tl.constexpr,  # of a key tile, see see_slices; 0: see see_tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0)
    P = tl.num_programs(0)
    H = K * G
    TOKENS: tl.constexpr = BLOCK_M // G
    r = tl.arange(0, BLOCK_M)
    group_head = tl.arange(0, triton.next_power_of_2(G)) % G
    spans = (window, chunk, None)
    if RANGES:
        spans = (window, chunk, ranges_at(bidirectional_ranges, RANGES))

    start, end, _, _ = shares(
        p, P, S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G, BLOCK_S, CHUNKS_OF_S, SHORT, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    s, unit, part_tile = locate(
        start, S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G, BLOCK_S, CHUNKS_OF_S, SHORT, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    row_start, q_len, seq_len, first_tile, end_tile = sequence(
        s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
    )
    part_tile += first_tile  # where this program's part of the unit begins
    tile = part_tile - 1
    kh = unit % K
    first_token = unit // K * TOKENS
    steps = end - start
    skipped = 0
    if SPARSE:
        steps = 0
        position, walk_s, walk_kh, walk_token, walk_tile, walk_end = start, s, kh, first_token, part_tile, end_tile
        walk_tokens, walk_first = q_len, seq_len - q_len
        while position < end:
            if walk_tile == walk_end:
                walk_s, walk_kh, walk_token = next_unit(walk_s, walk_kh, walk_token, walk_tokens, K, TOKENS)
                _, walk_tokens, walk_keys, walk_tile, walk_end = sequence(
                    walk_s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
                )
                walk_first = walk_keys - walk_tokens
            offsets = first_offset + ((walk_kh * G + group_head) // HEADS_AN_OFFSET) * offset_step
            seen_tile = next_seen_tile(
                walk_tile, walk_first + walk_token, offsets, sparse_block, local_blocks, vert_stride, BLOCK_N
            )
            passed_tiles = tl.minimum(tl.minimum(seen_tile + 1, walk_end) - walk_tile, end - position)
            position += passed_tiles
            walk_tile += passed_tiles
            steps += 1
    factor = scale
    if k_scale is not None:
        factor = scale * tl.load(k_scale + kh * K_SCALE)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + kh * G + r % G)
    HALVES: tl.constexpr = 2 if PAIRED else 1
    acc, m, l = nothing_seen(BLOCK_M, DV_PAD // HALVES, SLICES)
    acc_odd = acc
    CONVERTED: tl.constexpr = (
        FORMAT == 0 and key_cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16
    )
    if CONVERTED:
        q = tl.zeros([BLOCK_M, D_PAD], tl.float16)
        row_factor = tl.zeros([BLOCK_M, 1], tl.float32)
    sees = None
    if RANGES:
        oldest = 0
        sees = (tl.zeros([BLOCK_M], tl.int32), tl.zeros([BLOCK_M], tl.int32))
    # One loop over all tiles of the share: the loads of a unit are under way before the one before it is finished.
    for step in range(steps):
        tile += 1
        first_step = step == 0  # of a unit
        if tile == end_tile:
            first_step = True
            before = s
            s, kh, first_token = next_unit(s, kh, first_token, q_len, K, TOKENS)
            if s > before:
                row_start, q_len, seq_len, first_tile, end_tile = sequence(
                    s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
                )
            tile = first_tile
            part_tile = tile
            if k_scale is not None:
                factor = scale * tl.load(k_scale + kh * K_SCALE)
            if alibi_slopes is not None:
                slopes = tl.load(alibi_slopes + kh * G + r % G)
        token = first_token + r // G
        row_live = (r < TOKENS * G) & (token < q_len)
        row_head = kh * G + r % G
        first_i = seq_len - q_len + first_token
        seen = True
        if SPARSE:
            # The last tile of a unit and of a share is stepped to in any case: results are stored there.
            offsets = first_offset + ((kh * G + group_head) // HEADS_AN_OFFSET) * offset_step
            seen_tile = next_seen_tile(tile, first_i, offsets, sparse_block, local_blocks, vert_stride, BLOCK_N)
            last = tl.minimum(end_tile - 1, tile + end - 1 - (start + step + skipped))
            skipped += tl.minimum(seen_tile, last) - tile
            tile = tl.minimum(seen_tile, last)
            seen = seen & (seen_tile == tile)  # as a mask: alone, the interpreter of triton 3.9 takes it for an int32
        loaded = load_queries(query, row_start + token, row_head, row_live, QUERY[0], QUERY[1], QUERY[2], D, D_PAD)
        if CONVERTED:
            if first_step:
                q, row_factor = queries_for_fp8(loaded)
        else:
            q = loaded
        i = seq_len - q_len + token
        if RANGES == 0:
            oldest = oldest_key(first_i, window, chunk, WINDOW, CHUNK)
        elif first_step:
            last_i = seq_len - 1
            sees = reach_of_rows(spans, s, tl.minimum(i, last_i), WINDOW, CHUNK)
            oldest = tl.min(sees[0], 0)
        block_table = block_tables + s.to(tl.int64) * table_stride
        keys = key_cache + kh.to(tl.int64) * KEY[2]
        values = value_cache + kh.to(tl.int64) * VALUE[2]
        row_offset = first_offset + (row_head // HEADS_AN_OFFSET) * offset_step
        sparse = (sparse_block, local_blocks, vert_stride, row_offset)
        rows_factor = factor
        if CONVERTED:
            rows_factor = factor * row_factor if SLICES == 0 else factor * tl.reshape(row_factor, (1, 1, BLOCK_M))
        if SLICES == 0:
            acc, acc_odd, m, l = see_tile(
                acc, acc_odd, m, l, q, i, sees, tile, seen, slopes, rows_factor, seq_len, oldest, block_table, keys,
                values, soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, PAIRED, KEY, VALUE, TABLE, BLOCK_N,
            )  # fmt: skip
        else:
            acc, acc_odd, m, l = see_slices(
                acc, acc_odd, m, l, q, i, sees, tile, seen, slopes, rows_factor, seq_len, oldest, block_table, keys,
                values, soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE,
                B, D, Dv, D_PAD, DV_PAD, PAIRED, KEY, VALUE, TABLE, BLOCK_N, SLICES,
            )  # fmt: skip
        if (tile + 1 == end_tile) | (start + step + skipped + 1 == end):
            from_start = part_tile == first_tile
            for half in tl.static_range(HALVES):
                result, m_, l_ = acc, m, l
                if half == 1:
                    result = acc_odd
                if SLICES > 0:
                    result, m_, l_ = join_slices(result, m, l)
                if sinks is not None:
                    if from_start:  # the first part counts the sink
                        result, m_, l_ = count_sink(result, m_, l_, tl.load(sinks + row_head))
                result, lse2 = finish(result, m_, l_)
                if v_scale is not None:
                    result = result * tl.load(v_scale + kh * V_SCALE)
                d = tl.arange(0, DV_PAD // HALVES) * HALVES + half
                if from_start & (tile + 1 == end_tile):
                    store_rows(out, lse, result, lse2, row_start + token, row_head, row_live, d, output_scale, H, Dv)
                else:
                    part_row = (p * 2 + tl.where(from_start, 1, 0)).to(tl.int64) * BLOCK_M + r
                    place = part_row[:, None] * Dv + d[None, :]
                    tl.store(parts + place, result, mask=row_live[:, None] & (d < Dv)[None, :])
                    tl.store(part_lse + part_row, lse2, mask=row_live)
            acc, m, l = nothing_seen(BLOCK_M, DV_PAD // HALVES, SLICES)
            acc_odd = acc


@triton.jit
def shares(
    p, P, S, seq_lens, query_start_loc, spans, K, WINDOW: tl.constexpr, CHUNK: tl.constexpr, G: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNKS_OF_S: tl.constexpr, SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program p's share of the key tiles of all units, start : end; how many tiles a share has; how many one more."""
    total = 0
    for n in tl.static_range(CHUNKS_OF_S):
        tiles = sequence_tiles(
            n * BLOCK_S + tl.arange(0, BLOCK_S), S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G,
            SHORT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        total += tl.sum(tiles)
    share = total // P
    longer = total - share * P
    start = p * share + tl.minimum(p, longer)
    return start, start + share + tl.where(p < longer, 1, 0), share, longer


@triton.jit
def locate(
    position, S, seq_lens, query_start_loc, spans, K, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    G: tl.constexpr, BLOCK_S: tl.constexpr, CHUNKS_OF_S: tl.constexpr, SHORT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where a tile of all is: the sequence, the unit of it and the tile of that. Its loads are those of :func:`shares`,
    which the compiler need not repeat: both loops are unrolled."""
    s = 0
    before = 0  # tiles of the sequences before s
    total = 0
    for n in tl.static_range(CHUNKS_OF_S):
        s_ = n * BLOCK_S + tl.arange(0, BLOCK_S)
        tiles = sequence_tiles(s_, S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N)
        passed = (total + tl.cumsum(tiles, 0) <= position) & (s_ < S)
        s += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles, 0))
        total += tl.sum(tiles)
    _, _, _, first_tile, end_tile = sequence(
        s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
    )
    unit = (position - before) // (end_tile - first_tile)
    return s, unit, position - before - unit * (end_tile - first_tile)


@triton.jit
def program_of(position, share, longer):
    """Whose share a key tile is in, where the first ``longer`` programs have one tile more than ``share``."""
    of_longer = longer * (share + 1)
    return tl.where(
        position < of_longer, position // (share + 1), longer + (position - of_longer) // tl.maximum(share, 1)
    )


@triton.jit
def sequence(
    s, S, seq_lens, query_start_loc, spans, WINDOW: tl.constexpr, CHUNK: tl.constexpr, G: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of sequences s: first row, number of tokens and of keys, and the range of the key tiles of a unit.

    A sequence that is not split_kernel's has no tokens and keys. It has those of more than SHORT keys whose rows fit a
    tile; if SHORT is None every one, longer ones in tiles of rows.
    """
    live = s < S
    start = tl.load(query_start_loc + s, mask=live, other=0)
    q_len = tl.load(query_start_loc + s + 1, mask=live, other=0) - start
    seq_len = tl.load(seq_lens + s, mask=live, other=0)
    mine = q_len > 0
    if SHORT is not None:
        mine = mine & (q_len * G <= BLOCK_M) & (seq_len > SHORT)
    q_len = tl.where(mine, q_len, 0)
    seq_len = tl.where(mine, seq_len, 0)
    oldest = oldest_key(seq_len - q_len, spans[0], spans[1], WINDOW, CHUNK)
    if WINDOW or CHUNK:
        if spans[2] is not None:
            oldest, _ = reach_of_ranges(spans[2], tl.where(live, s, 0), seq_len - q_len, seq_len, oldest, seq_len)
    first_tile = oldest // BLOCK_N
    end_tile = tl.maximum(tl.cdiv(seq_len, BLOCK_N), first_tile + 1)
    return start, q_len, seq_len, first_tile, end_tile


@triton.jit
def sequence_tiles(
    s, S, seq_lens, query_start_loc, spans, K, WINDOW: tl.constexpr, CHUNK: tl.constexpr, G: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How many key tiles the units of sequences s have. Passing over one without rows is work too: that of one tile."""
    _, q_len, _, first_tile, end_tile = sequence(
        s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
    )
    units = tl.where(q_len > 0, K * tl.cdiv(q_len, BLOCK_M // G), 1)
    return tl.where(s < S, (end_tile - first_tile) * units, 0)


@triton.jit
def next_unit(s, kh, first_token, q_len, K, TOKENS: tl.constexpr):
    """The unit after one: key/value heads first, then tiles of rows, then sequences; one without rows has one unit."""
    kh += 1
    if (kh == K) | (q_len == 0):
        kh = 0
        first_token += TOKENS
        if first_token >= q_len:
            first_token = 0
            s += 1
    return s, kh, first_token


@triton.jit(do_not_specialize=["window", "chunk", "S", "T"])
def merge_kernel(
    out,
    lse,
    parts,
    part_lse,
    seq_lens,
    query_start_loc,
    bidirectional_ranges,
    output_scale,
    window,
    chunk,
    S,
    T,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RANGES: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    Dv: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNKS_OF_S: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """The units that were cut: the parts of one are the second of its first program and the first of later ones.

    All its programs but the last help: one that few share is merged a token at a time, else by slices of rows. And the
    rows of padding, which nobody else writes. What it need not wait for, it has done when split_kernel ends.
    """
    TOKENS: tl.constexpr = BLOCK_M // G
    H: tl.constexpr = K * G
    spans = (window, chunk, None)
    if RANGES:
        spans = (window, chunk, ranges_at(bidirectional_ranges, RANGES))
    p = tl.program_id(0)
    one = tl.arange(0, 1)
    d = tl.arange(0, DV_PAD)
    for t in range(tl.load(query_start_loc + S) + p, T, tl.num_programs(0)):
        for h in range(0, H):
            nothing = tl.zeros([1, DV_PAD], tl.float32)
            unseen = tl.full([1], float("-inf"), tl.float32)
            store_rows(out, lse, nothing, unseen, t + one, h + one, one == 0, d, output_scale, H, Dv)
    # The unit that this share ends in, if it goes on: the programs whose shares hold its first and its last tile.
    start, end, share, longer = shares(
        p, tl.num_programs(0), S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G, BLOCK_S, CHUNKS_OF_S,
        SHORT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    s, unit, tile = locate(
        end - 1, S, seq_lens, query_start_loc, spans, K, WINDOW, CHUNK, G, BLOCK_S, CHUNKS_OF_S, SHORT, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    row_start, q_len, _, first_tile, end_tile = sequence(
        s, S, seq_lens, query_start_loc, spans, WINDOW, CHUNK, G, SHORT, BLOCK_M, BLOCK_N
    )
    left = end_tile - first_tile - 1 - tile
    first = program_of(end - 1 - tile, share, longer)
    last = program_of(end - 1 + left, share, longer)
    kh = unit % K
    first_token = unit // K * TOKENS
    row_start += first_token
    tokens = tl.minimum(q_len - first_token, TOKENS)
    helper = p - first
    helpers = last - first
    if PDL:
        gdc_wait()
    if (start == end) | (left == 0):
        return
    # Few parts are merged by whole rows, many by columns, so that every program that helps has a share of the loads.
    MOST: tl.constexpr = 2048 // DV_PAD
    GROUP: tl.constexpr = triton.next_power_of_2(G)
    ROWS: tl.constexpr = GROUP if GROUP < MOST else MOST  # triton 3.5 (torch 2.9): min() would be a tensor
    WIDTH: tl.constexpr = DV_PAD if DV_PAD < 32 else 32
    args = (out, lse, parts, part_lse, output_scale, first, last, helper, helpers, row_start, tokens, kh)
    if helpers < 8:
        merge_items(args, G, H, Dv, DV_PAD, BLOCK_M, ROWS, DV_PAD, 1, 4)
    elif helpers < 64:
        merge_items(args, G, H, Dv, DV_PAD, BLOCK_M, 1, WIDTH, 64, 1)
    else:
        merge_items(args, G, H, Dv, DV_PAD, BLOCK_M, 1, 8, 512, 1)
    if PDL:
        gdc_launch_dependents()  # last: what starts from here on may overwrite, without waiting, all that was read


@triton.jit
def merge_items(
    args, G: tl.constexpr, H: tl.constexpr, Dv: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """What a helper merges of a unit: an item is ROWS heads of a token by WIDTH columns."""
    out, lse, parts, part_lse, output_scale, first, last, helper, helpers, row_start, tokens, kh = args
    HEADS: tl.constexpr = (G + ROWS - 1) // ROWS
    COLUMNS: tl.constexpr = DV_PAD // WIDTH
    for item in range(helper, tokens * (HEADS * COLUMNS), helpers):
        token = item // (HEADS * COLUMNS)
        g = item // COLUMNS % HEADS * ROWS + tl.arange(0, ROWS)
        d = item % COLUMNS * WIDTH + tl.arange(0, WIDTH)
        result, lse2 = merged(parts, part_lse, first, last, token * G + g, g < G, d, BLOCK_M, Dv, AT_ONCE, UNROLLED)
        store_rows(out, lse, result, lse2, row_start + token + g * 0, kh * G + g, g < G, d, output_scale, H, Dv)


@triton.jit
def merged(
    parts, part_lse, first, last, row, row_live, d, BLOCK_M: tl.constexpr, Dv: tl.constexpr, AT_ONCE: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Columns d of packed rows ``row [M]`` of the unit of programs first..last, and their lse to base 2."""
    acc = tl.zeros([row.shape[0], d.shape[0]], tl.float32)
    m = tl.full([row.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([row.shape[0]], tl.float32)
    for begin in range(first, last + 1, AT_ONCE * UNROLLED):
        for n in tl.static_range(UNROLLED):
            program = begin + n * AT_ONCE + tl.arange(0, AT_ONCE)
            place = (program * 2 + tl.where(program == first, 1, 0)).to(tl.int64)[:, None] * BLOCK_M + row[None, :]
            live = (program <= last)[:, None] & row_live[None, :]
            mask = live[:, :, None] & (d < Dv)[None, None, :]
            lse2 = tl.load(part_lse + place, mask=live, other=float("-inf"))  # [AT_ONCE, M]
            part = tl.load(parts + place[:, :, None] * Dv + d[None, None, :], mask=mask, other=0.0)
            m_new = tl.maximum(m, tl.max(lse2, 0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2(lse2 - shift[None, :])
            decay = tl.exp2(m - shift)
            acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
            l = l * decay + tl.sum(weight, 0)
            m = m_new
    return finish(acc, m, l)
