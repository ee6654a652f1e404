"""Batch-invariant attention: the bits of a row's results depend on that row and on what it sees, not on the batch.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`. Keys are cut into segments at fixed positions, multiples of
a length that follows from the row's own position: about ``SEGMENTS`` of at least ``SEGMENT`` keys. Each segment is
computed from nothing, and the segments of a row are folded from the first to the last, in registers or from the
workspace. One tile serves one row and many, so that each row takes the same instructions. A tile or a segment of which
a row sees no key changes none of its bits. Kernels are compiled without fusing multiplications and additions, which the
compiler would choose differently in each of them.

* ``decode_kernel`` serves sequences of few rows. Units and shares are those of shared/work_split.py; a segment belongs
  to the program in whose share it begins. A program folds the segments of a unit that begins in its share. Of a unit
  that began before, it stores the state of each segment.
* ``merge_kernel`` folds the states of such units.
* ``prefill_kernel`` serves the other sequences: a program folds all segments of a tile of rows.

There is one loop over tiles, which folds at cuts, so that loads stay in flight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared.masks import (
    hidden_keys,
    next_seen_tile,
    oldest_key,
    ranges_at,
    reach_of_rows,
    stripe_offset,
)
from paged_ops.lowerings.gpu.attention.shared.tile import (
    APPLIES,
    Batch,
    Keys,
    Rows,
    count_sink,
    load_queries,
    normalise,
    nothing_seen,
    queries_for_fp8,
    see_tile,
    store_padding,
    store_rows,
)
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, next_unit, program_of, sequence, shares
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, not_applied
from paged_ops.lowerings.gpu.target import Target

SEGMENT = 256  # keys, at least
SEGMENTS = 120  # of a row, about
# The workspace for states of segments, in float32s, and the bounds on the number of segments of one program.
WORKSPACE = 16 << 20
FEWEST_SLOTS, MOST_SLOTS = 16, SEGMENTS + 8
NOT_FUSED = {"enable_fp_fusion": False}
# Elements that a program of merge_kernel folds at once, and the segments whose loads are under way together.
MERGED, UNROLLED = tl.constexpr(1024), tl.constexpr(16)


class Cuts(NamedTuple):
    """Where segments begin, and what decode_kernel's programs store."""

    tiles: int  # of the shortest segments
    span: int  # positions of rows with segments of equal length
    slots: int  # segments of a unit that began before, whose states a program can store


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    if not spec.batch_invariant:
        return ["batch_invariant: not asked for"]
    applied = not_applied(spec, APPLIES | {"batch_invariant"})
    return applied + tuning.too_large(spec.k_side.size, spec.v_side.size)


def tiles_of(spec: Spec, target: Target) -> tuple[tuning.Tile, tuning.Tile]:
    """The tiles of decode_kernel and prefill_kernel: the same instructions for each row."""
    group = tuning.power_of_2(spec.G)
    width = tuning.padded(max(spec.k_side.size, spec.v_side.size), spec.storage.dtype.itemsize)
    if target.device.type == "cpu":
        tile = tuning.Tile(max(64, group), 32, 4, 1)
    elif spec.dtype.itemsize == 4:
        tile = tuning.Tile(max(16, group), 32 if width <= 128 else 16, 4, 1)
    elif not target.is_hopper:
        tile = tuning.Tile(max(64, group), 32, 4 if group <= 64 else 8, 1 if target.backend == "hip" else 2)
    else:
        tile = tuning.Tile(max(64, group), 64 if width <= 128 else 32, 4 if group <= 64 else 8, 3)
        if group <= 64:  # one warpgroup multiplies 64 rows, two multiply 128
            return tile, tile._replace(block_m=128, num_warps=8)
    return tile, tile


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice:
    """The choice for any batch."""
    few, many = tiles_of(spec, target)
    rows, same = tuning.rows_of(shapes.T, shapes.S, spec.G)
    rows = min(rows, few.block_m)
    programs = 2 * target.processors or tuning.INTERPRETER_PROGRAMS
    slots = WORKSPACE // (programs * rows * spec.v_side.size)
    cuts = Cuts(SEGMENT // few.block_n, SEGMENT * SEGMENTS, min(max(slots, FEWEST_SLOTS), MOST_SLOTS))
    everyone = same or shapes.T * spec.G <= rows
    return few, many, rows, programs, cuts, tuning.division(rows, shapes.S, everyone=everyone)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    few, many, rows, programs, cuts, division = choice
    walk = spec
    if spec.masks.first:  # segments are counted from the first token on, seen or not
        walk = spec._replace(masks=spec.masks._replace(window=False, chunk=False, first=0))
    unit = tuning.shape(few, spec)._replace(M=rows)  # its rows, in a tile that may have more
    constants = {"SPEC": spec, "WALK": walk, "DIVISION": division, "CUTS": cuts, "UNIT": unit}
    is_cuda = target.backend != "hip"

    def launch(kernel: Any, tile: tuning.Tile, grid: Any, *without: str) -> Launch:
        own = {"TILE": tuning.shape(tile, spec), **tile.options(is_cuda), **target.overlap(), **NOT_FUSED}
        return Launch(launcher_of(kernel, {**constants, **own}, target.device, without), grid, without)

    K, tokens, Dv = spec.K, many.block_m // spec.G, spec.v_side.size

    def grid(numbers: Numbers) -> Grid:
        return K * (numbers.T // tokens + numbers.S + 1), 1, 1

    launches = [launch(decode_kernel, few, (programs, 1, 1), "taken", "arrived", "T")]
    if not division.everyone:
        launches.append(launch(prefill_kernel, many, grid, "parts", "part_lse", "taken", "arrived", "T"))
    launches.append(launch(merge_kernel, few._replace(num_warps=4, num_stages=1), (programs, 1, 1), *NOT_OF_MERGE))
    states = programs * (cuts.slots + 1) * rows
    size = states * (Dv + 2)
    return Launches(tuple(launches), (states * Dv, size, size))


# The fields that merge_kernel does not get.
NOT_OF_MERGE = (
    *("taken", "arrived", "query", "key_cache", "value_cache", "block_tables", "alibi_slopes", "k_scale"),
    *("scale", "soft_cap", "sparse_block", "local_blocks", "vert_stride", "first_offset", "offset_step"),
    "table_stride",
)


@triton.jit(do_not_specialize=Numbers._fields)
def decode_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The segments that begin in a program's share. ``WALK``: the spec by which shares count tiles."""
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    MASKS: tl.constexpr = SPEC.masks
    ranges = None
    if MASKS.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, MASKS.ranges)
    batch = Batch(tensors, numbers, ranges)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    N: tl.constexpr = TILE.N
    TOKENS: tl.constexpr = UNIT.M // G
    p = tl.program_id(0)
    P = tl.num_programs(0)
    r = tl.arange(0, TILE.M)
    d = tl.arange(0, TILE.Dv)
    start, end, share, longer = shares(p, P, batch, WALK, DIVISION, UNIT)
    end = next_cut(end, share, batch, WALK, DIVISION, CUTS, UNIT)
    s, unit, passed = locate(start, batch, WALK, DIVISION, UNIT)
    row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, N)
    kh = unit % K
    first_token = unit // K * TOKENS
    segment, whole = cuts_of(first_token, q_len, seq_len, share, CUTS, TOKENS)
    to_cut = tiles_to_cut(passed, first_tile, end_tile, segment, whole)
    begin = first_tile + passed + to_cut
    position = start + to_cut
    from_start = begin == first_tile  # whether the unit began in this share
    base = position - begin
    first = program_of(base + first_tile, share, longer)
    stored = first * CUTS.slots - first_stored(first, base, first_tile, segment, share, longer)
    q, factor = queries_of(batch, kh, row_start, q_len, first_token, SPEC, TILE, TOKENS)
    # Registers hold the queries if they are converted; otherwise they are loaded for each tile, as keys are.
    CONVERTED: tl.constexpr = tensors.key_cache.dtype.element_ty.primitive_bitwidth == 8
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(tensors.alibi_slopes + kh * G + r % G)
    sees = None
    if MASKS.ranges:
        M: tl.constexpr = TILE.M
        sees = (tl.zeros([M], tl.int32), tl.zeros([M], tl.int32))
    total, m_total, l_total = nothing_seen(TILE.M, TILE.Dv, 0)
    part, m, l = nothing_seen(TILE.M, TILE.Dv, 0)
    tile = begin - 1
    steps = tl.maximum(end - position, 0)
    skipped = 0
    if MASKS.sparse:
        steps = visited_tiles(
            position, end, s, kh, first_token, q_len, seq_len, begin, end_tile, segment, share, batch, SPEC, WALK,
            DIVISION, CUTS, UNIT, TILE,
        )  # fmt: skip
    for step in range(steps):
        tile += 1
        if tile == end_tile:
            before = s
            s, kh, first_token = next_unit(s, kh, first_token, q_len, K, TOKENS)
            if s > before:
                row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, N)
            tile = first_tile
            from_start = position == position
            segment, _ = cuts_of(first_token, q_len, seq_len, share, CUTS, TOKENS)
            if CONVERTED:
                q, factor = queries_of(batch, kh, row_start, q_len, first_token, SPEC, TILE, TOKENS)
        if not CONVERTED:
            q, factor = queries_of(batch, kh, row_start, q_len, first_token, SPEC, TILE, TOKENS)
        token = first_token + r // G
        row_head = kh * G + r % G
        i = seq_len - q_len + token
        if MASKS.ranges:
            if (step == 0) | (tile == first_tile):
                sees = sees_of(batch, s, i, first_token, q_len, seq_len, SPEC, TOKENS)
        if SPEC.logits.alibi:
            slopes = tl.load(tensors.alibi_slopes + row_head)
        rows = Rows(q, i, sees, slopes, factor, stripe_offset(row_head, numbers, MASKS))
        left = end - (position + step + skipped)  # tiles of the share
        first_i = seq_len - q_len + first_token
        seen = True
        if MASKS.sparse:
            last = last_to_skip_to(tile, end_tile, segment, left)
            offsets = stripe_offset(kh * G + tl.arange(0, triton.next_power_of_2(G)) % G, numbers, MASKS)
            seen_tile = next_seen_tile(tile, first_i, offsets, numbers, N)
            skipped += tl.minimum(seen_tile, last) - tile
            left -= tl.minimum(seen_tile, last) - tile
            tile = tl.minimum(seen_tile, last)
            seen = seen & (seen_tile == tile)
        cache = keys_of(batch, s, kh, seq_len, first_i, sees, SPEC)
        part, _, m, l = see_tile(part, part, m, l, rows, cache, tile, seen, numbers, SPEC, TILE, True)
        at_end = tile + 1 == end_tile
        if at_end | (left == 1) | ((tile + 1) % segment == 0):
            row_live = (r < TOKENS * G) & (token < q_len)
            if from_start:
                folds = at_end | ((tile + 1) % segment_tiles(i, CUTS) == 0)
                total, m_total, l_total = fold(total, m_total, l_total, part, m, l, folds)
                if at_end:
                    finish(tensors, total, m_total, l_total, row_start + token, row_head, kh, row_live, d, SPEC)
                    total, m_total, l_total = nothing_seen(TILE.M, TILE.Dv, 0)
                elif left == 1:
                    store_state(tensors, P * CUTS.slots + p, total, m_total, l_total, r, row_live, d, SPEC, UNIT)
                part, m, l = start_again(part, m, l, folds)
            else:
                store_state(tensors, stored + tile // segment, part, m, l, r, row_live, d, SPEC, UNIT)
                part, m, l = nothing_seen(TILE.M, TILE.Dv, 0)


@triton.jit
def last_to_skip_to(tile, end_tile, segment, left):
    """The last tile of a segment, of a unit and of a share is always visited, as states are folded and stored there."""
    return tl.minimum(tl.minimum(end_tile, tile + left), (tile // segment + 1) * segment) - 1


@triton.jit
def visited_tiles(
    position, end, s, kh, first_token, q_len, seq_len, tile, end_tile, segment, share, batch, SPEC: tl.constexpr,
    WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The number of tiles that a walk with a block-sparse mask visits."""
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    TOKENS: tl.constexpr = UNIT.M // G
    steps = 0
    while position < end:
        if tile == end_tile:
            s, kh, first_token = next_unit(s, kh, first_token, q_len, K, TOKENS)
            _, q_len, seq_len, tile, end_tile = sequence(s, batch, WALK, DIVISION, N)
            segment, _ = cuts_of(first_token, q_len, seq_len, share, CUTS, TOKENS)
        offsets = stripe_offset(kh * G + tl.arange(0, triton.next_power_of_2(G)) % G, batch.numbers, MASKS)
        seen_tile = next_seen_tile(tile, seq_len - q_len + first_token, offsets, batch.numbers, N)
        visited = tl.minimum(seen_tile, last_to_skip_to(tile, end_tile, segment, end - position))
        position += visited + 1 - tile
        tile = visited + 1
        steps += 1
    return steps


@triton.jit
def queries_of(
    batch, kh, row_start, q_len, first_token, SPEC: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The query rows ``[M, D]`` of a unit, or of a tile of rows, and the factor of their products with keys."""
    tensors = batch.tensors
    G: tl.constexpr = SPEC.G
    r = tl.arange(0, TILE.M)
    token = first_token + r // G
    live = (r < TOKENS * G) & (token < q_len)
    q = load_queries(tensors.query, row_start + token, kh * G + r % G, live, SPEC, TILE.D)
    factor = batch.numbers.scale
    if tensors.k_scale is not None:
        factor = batch.numbers.scale * tl.load(tensors.k_scale + kh * SPEC.k_side.scale)
    converted: tl.constexpr = SPEC.storage.format == 0 and tensors.key_cache.dtype.element_ty.primitive_bitwidth == 8
    if converted and q.dtype == tl.bfloat16:
        q, row_factor = queries_for_fp8(q)
        factor *= row_factor
    return q, factor


@triton.jit
def sees_of(batch, s, i, first_token, q_len, seq_len, SPEC: tl.constexpr, TOKENS: tl.constexpr):
    """:func:`reach_of_rows` of rows at positions ``i``; those past the sequence see what its last one sees."""
    MASKS: tl.constexpr = SPEC.masks
    last_i = seq_len - q_len + last_token(first_token, q_len, TOKENS)
    return reach_of_rows(batch, s, tl.minimum(i, last_i), MASKS)


@triton.jit
def last_token(first_token, q_len, TOKENS: tl.constexpr):
    return tl.minimum(first_token + TOKENS, q_len) - 1


@triton.jit
def keys_of(batch, s, kh, seq_len, first_i, sees, SPEC: tl.constexpr):
    """:class:`Keys` of a unit whose rows begin at position ``first_i``."""
    tensors, numbers = batch.tensors, batch.numbers
    MASKS: tl.constexpr = SPEC.masks
    oldest = oldest_key(first_i, numbers, MASKS)
    if MASKS.ranges:
        oldest = tl.min(sees[0], 0)
    hidden = hidden_keys(oldest, first_i, 0, first_i, numbers, MASKS)
    block_table = tensors.block_tables + tl.cast(s, tl.int64) * numbers.table_stride
    keys = tensors.key_cache + kh.to(tl.int64) * SPEC.k_side.k
    values = tensors.value_cache + kh.to(tl.int64) * SPEC.v_side.k
    return Keys(seq_len, hidden, block_table, keys, values)


@triton.jit(do_not_specialize=Numbers._fields)
def prefill_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of a sequence that decode_kernel does not serve. The grid is that of prefill.py."""
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    K: tl.constexpr = SPEC.K
    TOKENS: tl.constexpr = TILE.M // SPEC.G
    ranges = None
    if SPEC.masks.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, SPEC.masks.ranges)
    batch = Batch(tensors, numbers, ranges)
    kh = tl.program_id(0) % K
    place = tl.program_id(0) // K
    tiles = tl.num_programs(0) // K
    # One tile more than any batch has, so that this grid ends after decode_kernel, which runs at the same time.
    if place == 0:
        if PDL:
            gdc_wait()
        return
    query_tile = tiles - 1 - place  # later tiles see more keys, so they start first
    s = -1
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s_ = n * DIVISION.at_once + tl.arange(0, DIVISION.at_once)
        tile_ = tl.load(tensors.query_start_loc + s_, mask=s_ < numbers.S, other=0) // TOKENS + s_
        s += tl.sum(((tile_ <= query_tile) & (s_ < numbers.S)).to(tl.int32))
    row_start = tl.load(tensors.query_start_loc + s)
    q_len = tl.load(tensors.query_start_loc + s + 1) - row_start
    seq_len = tl.load(tensors.seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    if (first_token >= q_len) | (q_len * SPEC.G <= DIVISION.rows):
        return
    see_all(batch, s, kh, row_start, q_len, seq_len, first_token, SPEC, CUTS, TILE, TOKENS)


@triton.jit
def see_all(
    batch, s, kh, row_start, q_len, seq_len, first_token, SPEC: tl.constexpr, CUTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """All that a tile of rows sees."""
    numbers = batch.numbers
    G: tl.constexpr = SPEC.G
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    r = tl.arange(0, TILE.M)
    token = first_token + r // G
    first_i = seq_len - q_len + first_token
    last_i = seq_len - q_len + last_token(first_token, q_len, TOKENS)
    q, factor = queries_of(batch, kh, row_start, q_len, first_token, SPEC, TILE, TOKENS)
    row_head = kh * G + r % G
    i = seq_len - q_len + token
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(batch.tensors.alibi_slopes + row_head)
    sees = None
    if MASKS.ranges:
        sees = sees_of(batch, s, i, first_token, q_len, seq_len, SPEC, TOKENS)
    rows = Rows(q, i, sees, slopes, factor, stripe_offset(row_head, numbers, MASKS))
    cache = keys_of(batch, s, kh, seq_len, first_i, sees, SPEC)
    hidden = cache.hidden
    newest = seq_len
    full_end = seq_len // N
    full_first = tl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    if MASKS.ranges:
        low, high = sees
        newest = tl.minimum(seq_len, tl.max(high, 0))
        full_end = tl.minimum(tl.maximum(tl.min(high, 0), 0) // N, full_end)
        full_first = tl.cdiv(tl.max(low, 0), N)
    elif MASKS.causal:
        newest = tl.minimum(seq_len, last_i + 1)
        full_end = tl.minimum(tl.maximum(first_i + 1, 0) // N, full_end)
    end = tl.cdiv(newest, N)
    segment, _ = cuts_of(first_token, q_len, seq_len, 0, CUTS, TOKENS)
    total, m_total, l_total = nothing_seen(TILE.M, TILE.Dv, 0)
    part, m, l = nothing_seen(TILE.M, TILE.Dv, 0)
    sums = total, m_total, l_total, part, m, l
    tile = hidden.oldest // N
    if MASKS.sparse:
        head_offset = stripe_offset(kh * G + tl.arange(0, triton.next_power_of_2(G)) % G, numbers, MASKS)
        steps = 0  # counted first, so that there is one loop below, whose loads start early
        seen = next_seen_tile(tile, first_i, head_offset, numbers, N)
        while seen < end:
            steps += 1
            seen = next_seen_tile(seen + 1, first_i, head_offset, numbers, N)
        before = tile - 1
        for _step in range(steps):
            tile = next_seen_tile(before + 1, first_i, head_offset, numbers, N)
            sums = see_and_fold(sums, rows, cache, tile, before, segment, numbers, SPEC, CUTS, TILE, True)
            before = tile
    else:
        if MASKS.first:
            for tile_ in range(0, tl.minimum(end, tl.minimum(tl.cdiv(hidden.start, N), tile))):
                sums = see_and_fold(sums, rows, cache, tile_, tile_ - 1, segment, numbers, SPEC, CUTS, TILE, True)
            sums = fold_between(sums, i, tl.minimum(tl.cdiv(hidden.start, N), tile) - 1, tile - 1, 1, CUTS)
        if MASKS.window or MASKS.chunk:
            for tile_ in range(tile, tl.minimum(end, full_first)):
                sums = see_and_fold(sums, rows, cache, tile_, tile_ - 1, segment, numbers, SPEC, CUTS, TILE, True)
            tile = tl.maximum(tile, full_first)
        for tile_ in range(tile, tl.minimum(end, full_end)):
            sums = see_and_fold(sums, rows, cache, tile_, tile_ - 1, segment, numbers, SPEC, CUTS, TILE, False)
        for tile_ in range(tl.maximum(tile, full_end), end):
            sums = see_and_fold(sums, rows, cache, tile_, tile_ - 1, segment, numbers, SPEC, CUTS, TILE, True)
    total, m_total, l_total, part, m, l = sums
    total, m_total, l_total = fold(total, m_total, l_total, part, m, l, r >= 0)
    row_live = (r < TOKENS * G) & (token < q_len)
    d = tl.arange(0, TILE.Dv)
    finish(batch.tensors, total, m_total, l_total, row_start + token, row_head, kh, row_live, d, SPEC)


@triton.jit
def segment_tiles(i, CUTS: tl.constexpr):
    """The tiles of a segment of rows at positions ``i``."""
    return (1 + tl.maximum(i, 0) // CUTS.span) * CUTS.tiles


@triton.jit
def cuts_of(first_token, q_len, seq_len, share, CUTS: tl.constexpr, TOKENS: tl.constexpr):
    """The tiles between two cuts of a unit's rows, and whether the unit stays whole in shares: because its rows have
    different cuts, or because a program may have more of its segments than it can store."""
    first_i = seq_len - q_len + first_token
    tiles = segment_tiles(first_i, CUTS)
    same = tiles == segment_tiles(seq_len - q_len + last_token(first_token, q_len, TOKENS), CUTS)
    return tl.where(same, tiles, CUTS.tiles), (not same) | (share // tiles + 3 > CUTS.slots)


@triton.jit
def see_and_fold(
    sums, rows, cache, tile, before, segment, numbers, SPEC: tl.constexpr, CUTS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile, after a fold if a segment has ended since the tile ``before``."""
    sums = fold_between(sums, rows.i, before, tile, segment, CUTS)
    total, m_total, l_total, part, m, l = sums
    part, _, m, l = see_tile(part, part, m, l, rows, cache, tile, True, numbers, SPEC, TILE, MASKED)
    return total, m_total, l_total, part, m, l


@triton.jit
def fold_between(sums, i, before, tile, segment, CUTS: tl.constexpr):
    """Fold the segments of rows at positions ``i`` that end between two tiles. ``segment``: divides all of theirs."""
    total, m_total, l_total, part, m, l = sums
    if tile // segment != before // segment:
        of_row = segment_tiles(i, CUTS)
        folds = tile // of_row != before // of_row
        total, m_total, l_total = fold(total, m_total, l_total, part, m, l, folds)
        part, m, l = start_again(part, m, l, folds)
    return total, m_total, l_total, part, m, l


@triton.jit
def fold(acc, m, l, part, m_part, l_part, folds):
    """The state of all segments up to one, from the state before it and its own, for rows that ``folds``. A segment
    without keys changes no bit."""
    m_new = tl.maximum(m, m_part)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - shift)
    weight = tl.exp2(m_part - shift)
    takes = folds & (m_part != float("-inf"))
    acc = tl.where(takes[:, None], acc * decay[:, None] + part * weight[:, None], acc)
    return acc, tl.where(takes, m_new, m), tl.where(takes, l * decay + l_part * weight, l)


@triton.jit
def start_again(part, m, l, folds):
    """The state of a segment, for rows that ``folds`` the one that begins."""
    return tl.where(folds[:, None], 0.0, part), tl.where(folds, float("-inf"), m), tl.where(folds, 0.0, l)


@triton.jit
def finish(tensors, acc, m, l, row_token, row_head, kh, row_live, d, SPEC: tl.constexpr):
    """Store the results of rows that have seen all their keys."""
    if SPEC.logits.sinks:
        acc, m, l = count_sink(acc, m, l, tl.load(tensors.sinks + row_head))
    result, lse2 = normalise(acc, m, l)
    if tensors.v_scale is not None:
        result = result * tl.load(tensors.v_scale + kh * SPEC.v_side.scale)
    store_rows(tensors, result, lse2, row_token, row_head, row_live, d, SPEC.heads, SPEC.v_side.size)


@triton.jit
def store_state(tensors, state, acc, m, l, r, row_live, d, SPEC: tl.constexpr, UNIT: tl.constexpr):
    Dv: tl.constexpr = SPEC.v_side.size
    place = tl.cast(state, tl.int64) * UNIT.M + r
    tl.store(tensors.parts + place[:, None] * Dv + d[None, :], acc, mask=row_live[:, None] & (d < Dv)[None, :])
    tl.store(tensors.part_lse + place * 2, m, mask=row_live)
    tl.store(tensors.part_lse + place * 2 + 1, l, mask=row_live)


@triton.jit
def tiles_to_cut(passed, first_tile, end_tile, segment, whole):
    """From the tile ``first_tile + passed`` of a unit to the next cut, or to the next unit if the unit stays whole."""
    tile = first_tile + passed
    left = end_tile - tile
    to_cut = tl.where(whole, left, tl.minimum((segment - tile % segment) % segment, left))
    return tl.where(passed == 0, 0, to_cut)


@triton.jit
def next_cut(
    position, share, batch, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr
):
    """The first cut from a position among all tiles on."""
    TOKENS: tl.constexpr = UNIT.M // WALK.G
    s, unit, passed = locate(position, batch, WALK, DIVISION, UNIT)
    _, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, UNIT.N)
    segment, whole = cuts_of(unit // WALK.K * TOKENS, q_len, seq_len, share, CUTS, TOKENS)
    return position + tiles_to_cut(passed, first_tile, end_tile, segment, whole)


@triton.jit
def first_stored(first, base, first_tile, segment, share, longer):
    """The first segment of a unit that begins after the share of the program ``first``, where the unit begins. A tile
    of the unit is at the position ``base + tile``."""
    after = (first + 1) * share + tl.minimum(first + 1, longer) - base
    return tl.maximum(tl.cdiv(after, segment), first_tile // segment + 1)


@triton.jit(do_not_specialize=Numbers._fields)
def merge_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Folds the states of the units that several programs share: all of them except the last help. Also writes the rows
    of padding."""
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    ranges = None
    if SPEC.masks.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, SPEC.masks.ranges)
    batch = Batch(tensors, numbers, ranges)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    DV_PAD: tl.constexpr = TILE.Dv
    TOKENS: tl.constexpr = UNIT.M // G
    p = tl.program_id(0)
    P = tl.num_programs(0)
    first_free = tl.load(tensors.query_start_loc + numbers.S)
    one = tl.arange(0, 1)
    store_padding(tensors, first_free + p, numbers.T, P, one, tl.arange(0, DV_PAD), SPEC.heads, SPEC.v_side.size)
    start, end, share, longer = shares(p, P, batch, WALK, DIVISION, UNIT)
    s, unit, passed = locate(end - 1, batch, WALK, DIVISION, UNIT)
    row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, TILE.N)
    kh = unit % K
    first_token = unit // K * TOKENS
    segment, whole = cuts_of(first_token, q_len, seq_len, share, CUTS, TOKENS)
    base = end - 1 - passed - first_tile
    last_segment = (end_tile - 1) // segment
    last = program_of(base + tl.maximum(last_segment * segment, first_tile), share, longer)
    first = program_of(base + first_tile, share, longer)
    second = first_stored(first, base, first_tile, segment, share, longer)
    if PDL:
        gdc_wait()
    if (start == end) | (p >= last) | whole:
        return
    Dv: tl.constexpr = SPEC.v_side.size
    ROWS: tl.constexpr = min(UNIT.M, max(MERGED // DV_PAD, 1))
    d = tl.arange(0, DV_PAD)
    rows = tl.minimum(q_len - first_token, TOKENS) * G
    for item in range(p - first, tl.cdiv(rows, ROWS), last - first):
        row = item * ROWS + tl.arange(0, ROWS)
        live = row < rows
        column_live = live[:, None] & (d < Dv)[None, :]
        place = (P * CUTS.slots + first).to(tl.int64) * UNIT.M + row
        m = tl.load(tensors.part_lse + place * 2, mask=live, other=0.0)
        l = tl.load(tensors.part_lse + place * 2 + 1, mask=live, other=0.0)
        acc = tl.load(tensors.parts + place[:, None] * Dv + d[None, :], mask=column_live, other=0.0)
        for begin in range(second, last_segment + 1, UNROLLED):
            for n in tl.static_range(UNROLLED):  # all loads are under way before the first is needed
                segment = begin + n
                there = segment <= last_segment
                place = (first * CUTS.slots + segment - second).to(tl.int64) * UNIT.M + row
                m_part = tl.load(tensors.part_lse + place * 2, mask=live & there, other=float("-inf"))
                l_part = tl.load(tensors.part_lse + place * 2 + 1, mask=live & there, other=0.0)
                part = tl.load(tensors.parts + place[:, None] * Dv + d[None, :], mask=column_live & there, other=0.0)
                acc, m, l = fold(acc, m, l, part, m_part, l_part, live)
        finish(
            tensors, acc, m, l, row_start + first_token + row // G, kh * G + row % G, kh, live, d, SPEC
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read
