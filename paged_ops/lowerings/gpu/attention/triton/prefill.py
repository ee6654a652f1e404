"""Prefill and chunks: one program per tile of query rows, for the sequences that decode.py does not serve.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared import masks
from paged_ops.lowerings.gpu.attention.shared import tile as tiling
from paged_ops.lowerings.gpu.attention.shared.tile import Batch, Keys, Rows
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec
from paged_ops.lowerings.gpu.target import Target


def serves(spec: Spec, target: Target) -> list[str]:
    return decode.serves(spec, target)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice:
    """The choice for any batch: this kernel takes the longer sequences, decode.py the others."""
    tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
    return tiles, tuning.division(tiles.split.block_m, shapes.S)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    tiles, division = choice
    tile = tiles.prefill
    constants = {
        "SPEC": spec,
        "DIVISION": division,
        "TILE": tuning.shape(tile, spec),
        **target.overlap(),
        **tile.options(target.backend != "hip"),
    }
    K, tokens = spec.K, tile.block_m // spec.G

    def grid(numbers: Numbers) -> Grid:
        return K * (numbers.T // tokens + numbers.S + 1), 1, 1

    launcher = launcher_of(prefill_kernel, constants, target.device)
    launch = Launch(launcher, grid, ("parts", "part_lse", "taken", "arrived", "T"))
    return decode.build_around((launch,), spec, target, tiles, division)


@triton.jit
def tile_of_rows(query_tile, tensors, S, DIVISION: tl.constexpr, TOKENS: tl.constexpr):
    """The sequence of a tile of query rows, its first row and its lengths, and the first token of the tile. Sequence s
    starts at tile ``query_start_loc[s] // TOKENS + s``, which leaves room for its last, partial tile."""
    s = -1
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s_ = n * DIVISION.at_once + tl.arange(0, DIVISION.at_once)
        tile_ = tl.load(tensors.query_start_loc + s_, mask=s_ < S, other=0) // TOKENS + s_
        s += tl.sum(((tile_ <= query_tile) & (s_ < S)).to(tl.int32))
    row_start = tl.load(tensors.query_start_loc + s)
    q_len = tl.load(tensors.query_start_loc + s + 1) - row_start
    return s, row_start, q_len, tl.load(tensors.seq_lens + s), (query_tile - row_start // TOKENS - s) * TOKENS


@triton.jit(do_not_specialize=Numbers._fields)
def prefill_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    if PDL:
        gdc_launch_dependents()
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    TOKENS: tl.constexpr = M // G
    # In one dimension: the others are at most 65535.
    kh = tl.program_id(0) % K
    place = tl.program_id(0) // K
    tiles = tl.num_programs(0) // K
    H = tl.num_programs(0) // tiles * G  # K * G, but not as a constant, with which triton 3.7.1 spills in float32
    # One tile more than any batch has, so that this grid ends after split_kernel, which runs at the same time.
    if place == 0:
        if PDL:
            gdc_wait()
        return
    # Later tiles see more keys, so they start first.
    query_tile = tiles - 1 - place
    s, row_start, q_len, seq_len, first_token = tile_of_rows(query_tile, tensors, numbers.S, DIVISION, TOKENS)
    if (first_token >= q_len) | (q_len * G <= DIVISION.rows):
        return

    r = tl.arange(0, M)
    token = first_token + r // G
    row_live = (r < TOKENS * G) & (token < q_len)
    row_head = kh * G + r % G
    first_i = seq_len - q_len + first_token
    last_i = seq_len - q_len + tl.minimum(first_token + TOKENS, q_len) - 1
    i = seq_len - q_len + token
    q = tiling.load_queries(tensors.query, row_start + token, row_head, row_live, SPEC, TILE.D)
    factor = numbers.scale
    if tensors.k_scale is not None:
        factor = numbers.scale * tl.load(tensors.k_scale + tiling.stored_head(kh, SPEC) * SPEC.k_side.scale)
    is_fp8: tl.constexpr = SPEC.storage.format == 0 and tensors.key_cache.dtype.element_ty.primitive_bitwidth == 8
    if TILE.converts and is_fp8 and q.dtype == tl.bfloat16:
        q, row_factor = tiling.queries_for_fp8(q)
        factor *= row_factor
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(tensors.alibi_slopes + row_head)
    head_offset = masks.stripe_offset(kh * G + tl.arange(0, triton.next_power_of_2(G)) % G, MASKS)
    offset = masks.stripe_offset(row_head, MASKS)
    DV_PAD: tl.constexpr = TILE.Dv
    accs = (tl.zeros([M, DV_PAD], tl.float32),)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)

    # Key tiles: masked ones, until every row sees all of a tile; full ones; and masked ones to the end.
    oldest = masks.oldest_key(first_i, numbers, MASKS)
    sees = None
    if MASKS.ranges:
        batch = Batch(tensors, numbers, masks.ranges_at(tensors.bidirectional_ranges, MASKS.ranges))
        sees = masks.reach_of_rows(batch, s, tl.minimum(i, last_i), MASKS)
        oldest = tl.min(sees[0], 0)
    first_tile = masks.first_key_tile(oldest, first_i, numbers, MASKS, N)
    full_first, full_end, end_tile = masks.seen_whole(sees, first_i, last_i, seq_len, first_tile, numbers, MASKS, N)

    block_table = tensors.block_tables + tl.cast(s, tl.int64) * numbers.table_stride
    kv_head = tiling.stored_head(kh, SPEC).to(tl.int64)
    keys = tensors.key_cache + kv_head * SPEC.k_side.k
    values = tensors.value_cache + kv_head * SPEC.v_side.k
    rows = Rows(q, i, sees, slopes, factor, offset)
    hidden = masks.hidden_keys(oldest, first_i, first_tile, first_i, numbers, MASKS)
    cache = Keys(numbers, seq_len, hidden, block_table, keys, values)
    if MASKS.window or MASKS.chunk:
        for tile in range(first_tile, full_first):
            accs, m, l = tiling.see_tile(accs, m, l, rows, cache, tile, True, SPEC, TILE, True)
    if not MASKS.sparse:
        for tile in range(full_first, full_end):
            accs, m, l = tiling.see_tile(accs, m, l, rows, cache, tile, True, SPEC, TILE, False)
    if MASKS.sparse:
        steps = 0  # counted first, so that there is one loop below, whose loads start early
        tile = masks.next_seen_tile(first_tile, first_i, head_offset, MASKS, N)
        while tile < end_tile:
            steps += 1
            tile = masks.next_seen_tile(tile + 1, first_i, head_offset, MASKS, N)
        tile = first_tile - 1
        for _step in range(steps):
            tile = masks.next_seen_tile(tile + 1, first_i, head_offset, MASKS, N)
            accs, m, l = tiling.see_tile(accs, m, l, rows, cache, tile, True, SPEC, TILE, True)
    else:
        for tile in range(full_end, end_tile):
            accs, m, l = tiling.see_tile(accs, m, l, rows, cache, tile, True, SPEC, TILE, True)
    acc = accs[0]
    if SPEC.logits.sinks:
        acc, m, l = tiling.count_sink(acc, m, l, tl.load(tensors.sinks + row_head))
    result, lse2 = tiling.normalise(acc, m, l)
    if tensors.v_scale is not None:
        result = result * tl.load(tensors.v_scale + tiling.stored_head(kh, SPEC) * SPEC.v_side.scale)
    columns = tl.arange(0, DV_PAD)
    tiling.store_rows(tensors, result, lse2, row_start + token, row_head, row_live, columns, H, SPEC.v_side.size)
