"""Decode and speculative widths: key tiles of all sequences in one row, cut into equal shares, and the merge.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`. A *unit* is one key/value head of one sequence with one
tile of packed query rows; a *share* is a program's contiguous part of all key tiles of all units.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared import masks, split_merge, work_split
from paged_ops.lowerings.gpu.attention.shared import tile as tiling
from paged_ops.lowerings.gpu.attention.shared.split_merge import INTEGERS, Divided
from paged_ops.lowerings.gpu.attention.shared.tile import APPLIES, Batch, Keys, Rows
from paged_ops.lowerings.gpu.attention.triton import slices
from paged_ops.lowerings.gpu.attention.triton.merge import with_merge
from paged_ops.lowerings.gpu.launch import Choice, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Division, Numbers, Shapes, Spec, join_heads, not_applied
from paged_ops.lowerings.gpu.target import Target


def serves(spec: Spec, target: Target) -> list[str]:
    return not_applied(spec, APPLIES | {"groups"}) + tuning.too_large(spec.k_side.size, spec.v_side.size)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch whose sequences it should serve all, else the reason against it."""
    tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
    if not tiles.all_split:
        return f"sequences may have more than {tiles.split.block_m} packed query rows"
    K, programs = spec.K // tiles.heads, tiles.programs
    division = tuning.division(tiles.split.block_m, shapes.S, everyone=True)
    whole = tuning.whole_units(shapes.T, shapes.S, K, programs, target)
    fan = tuning.fan_of(tiles, spec, target, shapes.S)
    return tiles, tuning.by_warps(division)._replace(whole=whole), fan


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    tiles, division, fan = choice
    launches = build_around((), spec, target, tiles, division)
    if not fan:
        return launches
    launch = split_launch(tiles, join_heads(spec, tiles.heads), target, division, fan)
    return Launches((launch,), launches.workspace, tiles.programs * INTEGERS.value, launches.launches)


def build_around(
    between: tuple[Launch, ...],
    spec: Spec,
    target: Target,
    tiles: tuning.Tiles,
    division: Division,
    counted: bool = False,
) -> Launches:
    """Launches that serve split_kernel's sequences by ``division``, around the launch for the others. ``counted``: that
    one takes its work by counters."""
    spec = join_heads(spec, tiles.heads)
    launch = split_launch(tiles, spec, target, division, 0, counted)
    merged = tuning.shape(tiles.split, spec, has_values=False)
    return with_merge((launch, *between), tiles.programs, merged, spec, target, division)


def split_launch(
    tiles: tuning.Tiles, spec: Spec, target: Target, division: Division, fan: int, counted: bool = False
) -> Launch:
    """The launch of split_kernel. ``fan``: the number of parts that a program merges at a time; 0: none."""
    shape = tuning.shape(tiles.split, spec, slices=tiles.slices, paired=spec.storage.paired, heads=tiles.heads)
    constants = {
        "SPEC": spec,
        "DIVISION": division,
        "TILE": shape,
        "FAN": fan,
        **target.overlap(),
        **tiles.split.options(target.backend != "hip"),
    }
    without = (*(() if counted else ("taken",)), *(() if fan else ("T", "arrived")))
    launcher = launcher_of(split_kernel, constants, target.device, without)
    return Launch(launcher, (tiles.programs, 1, 1), without)


@triton.jit(do_not_specialize=Numbers._fields)
def split_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, FAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All key tiles of a share. Divided units leave parts: with FAN, whoever is last merges them (parts.py), and no
    other kernel follows; without, merge_kernel does."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    if PDL:
        gdc_wait()
        if not FAN:
            gdc_launch_dependents()
    p = tl.program_id(0)
    P = tl.num_programs(0)
    if tensors.taken is not None:
        if p == 0:
            tl.store(tensors.taken + tl.arange(0, 4), 0)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    H = K * G
    TOKENS: tl.constexpr = M // G
    r = tl.arange(0, M)
    group_head = tl.arange(0, triton.next_power_of_2(G)) % G
    ranges = None
    if MASKS.ranges:
        ranges = masks.ranges_at(tensors.bidirectional_ranges, MASKS.ranges)
    batch = Batch(tensors, numbers, ranges)

    start, end, share, longer = work_split.shares(p, P, batch, SPEC, DIVISION, TILE)
    s, unit, part_tile = work_split.locate(start, batch, SPEC, DIVISION, TILE)
    if DIVISION.whole:
        whole = work_split.fit_whole(share, longer, P, batch, SPEC, DIVISION, TILE)
        s = tl.where(whole, p // K, s)
        unit = tl.where(whole, p % K, unit)
        part_tile = tl.where(whole, 0, part_tile)
    row_start, q_len, seq_len, first_tile, end_tile = work_split.sequence(s, batch, SPEC, DIVISION, N)
    if DIVISION.whole:
        start = tl.where(whole, 0, start)
        end = tl.where(whole, tl.where(s < numbers.S, end_tile - first_tile, 0), end)
    part_tile += first_tile  # the first tile of this program's part of the unit
    tile = part_tile - 1
    kh = unit % K
    first_token = unit // K * TOKENS
    if FAN:
        first = p
        last = p
        if (part_tile > first_tile) & (start < end):
            first = work_split.program_of(start + first_tile - part_tile, share, longer)
            last = work_split.program_of(start + end_tile - part_tile - 1, share, longer)
        begun = Divided(first, last, row_start + first_token, tl.minimum(q_len - first_token, TOKENS), kh)
        split_merge.store_begun(tensors, p, begun, share, longer)
    steps = end - start
    skipped = 0
    if MASKS.sparse:
        steps = 0
        position, walk_s, walk_kh, walk_token, walk_tile, walk_end = start, s, kh, first_token, part_tile, end_tile
        walk_tokens, walk_first = q_len, seq_len - q_len
        while position < end:
            if walk_tile == walk_end:
                walk_s, walk_kh, walk_token = work_split.next_unit(walk_s, walk_kh, walk_token, walk_tokens, K, TOKENS)
                _, walk_tokens, walk_keys, walk_tile, walk_end = work_split.sequence(walk_s, batch, SPEC, DIVISION, N)
                walk_first = walk_keys - walk_tokens
            offsets = masks.stripe_offset(walk_kh * G + group_head, MASKS)
            seen_tile = masks.next_seen_tile(walk_tile, walk_first + walk_token, offsets, MASKS, N)
            passed_tiles = tl.minimum(tl.minimum(seen_tile + 1, walk_end) - walk_tile, end - position)
            position += passed_tiles
            walk_tile += passed_tiles
            steps += 1
    factor = numbers.scale
    if tensors.k_scale is not None:
        factor = numbers.scale * tl.load(tensors.k_scale + tiling.stored_head(kh, SPEC) * SPEC.k_side.scale)
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(tensors.alibi_slopes + kh * G + r % G)
    HALVES: tl.constexpr = 2 if TILE.paired else 1
    accs, m, l = slices.nothing_summed(TILE)
    CONVERTED: tl.constexpr = (
        TILE.converts
        and SPEC.storage.format == 0
        and tensors.key_cache.dtype.element_ty.primitive_bitwidth == 8
        and tensors.query.dtype.element_ty == tl.bfloat16
    )
    if CONVERTED:
        D: tl.constexpr = TILE.D
        q = tl.zeros([M, D], tl.float16)
        row_factor = tl.zeros([M, 1], tl.float32)
    sees = None
    if MASKS.ranges:
        oldest = 0
        sees = (tl.zeros([M], tl.int32), tl.zeros([M], tl.int32))
    # One loop over all tiles of the share, so that loads of a unit start before the previous unit is finished.
    for step in range(steps):
        tile += 1
        first_step = step == 0  # of a unit
        if tile == end_tile:
            first_step = True
            before = s
            s, kh, first_token = work_split.next_unit(s, kh, first_token, q_len, K, TOKENS)
            if s > before:
                row_start, q_len, seq_len, first_tile, end_tile = work_split.sequence(s, batch, SPEC, DIVISION, N)
            tile = first_tile
            part_tile = tile
            if tensors.k_scale is not None:
                factor = numbers.scale * tl.load(tensors.k_scale + tiling.stored_head(kh, SPEC) * SPEC.k_side.scale)
            if SPEC.logits.alibi:
                slopes = tl.load(tensors.alibi_slopes + kh * G + r % G)
        token = first_token + r // G
        row_live = (r < TOKENS * G) & (token < q_len)
        row_head = kh * G + r % G
        first_i = seq_len - q_len + first_token
        seen = True
        if MASKS.sparse:
            # The last tile of a unit, or of a share, is always visited: results are stored there.
            offsets = masks.stripe_offset(kh * G + group_head, MASKS)
            seen_tile = masks.next_seen_tile(tile, first_i, offsets, MASKS, N)
            last = tl.minimum(end_tile - 1, tile + end - 1 - (start + step + skipped))
            skipped += tl.minimum(seen_tile, last) - tile
            tile = tl.minimum(seen_tile, last)
            seen = seen & (seen_tile == tile)  # a mask: the interpreter of triton 3.9 takes `seen` alone for an int32
        loaded = tiling.load_queries(tensors.query, row_start + token, row_head, row_live, SPEC, TILE.D)
        if CONVERTED:
            if first_step:
                q, row_factor = tiling.queries_for_fp8(loaded)
        else:
            q = loaded
        i = seq_len - q_len + token
        if MASKS.ranges == 0:
            oldest = masks.oldest_key(first_i, numbers, MASKS)
        elif first_step:
            last_i = seq_len - 1
            sees = masks.reach_of_rows(batch, s, tl.minimum(i, last_i), MASKS)
            oldest = tl.min(sees[0], 0)
        block_table = tensors.block_tables + s.to(tl.int64) * numbers.table_stride
        kv_head = tiling.stored_head(kh, SPEC).to(tl.int64)
        keys = tensors.key_cache + kv_head * SPEC.k_side.k
        values = tensors.value_cache + kv_head * SPEC.v_side.k
        offset = masks.stripe_offset(row_head, MASKS)
        rows_factor = factor
        if CONVERTED:
            rows_factor = factor * row_factor if TILE.W == 0 else factor * tl.reshape(row_factor, (1, 1, M))
        rows = Rows(q, i, sees, slopes, rows_factor, offset)
        hidden = masks.hidden_keys(oldest, first_i, first_tile, seq_len - q_len, numbers, MASKS)
        cache = Keys(numbers, seq_len, hidden, block_table, keys, values)
        if TILE.W == 0:
            accs, m, l = tiling.see_tile(accs, m, l, rows, cache, tile, seen, SPEC, TILE, True)
        else:
            accs, m, l = slices.see_slices(accs, m, l, rows, cache, tile, seen, SPEC, TILE)
        if (tile + 1 == end_tile) | (start + step + skipped + 1 == end):
            from_start = part_tile == first_tile
            for half in tl.static_range(HALVES):
                result, m_, l_ = accs[half], m, l
                if TILE.W > 0:
                    result, m_, l_ = slices.join_slices(slices.of_own_head(accs, half, SPEC, TILE), m, l)
                if SPEC.logits.sinks:
                    if from_start:  # the first part includes the sink
                        result, m_, l_ = tiling.count_sink(result, m_, l_, tl.load(tensors.sinks + row_head))
                result, lse2 = tiling.normalise(result, m_, l_)
                if tensors.v_scale is not None:
                    result = result * tl.load(tensors.v_scale + tiling.stored_head(kh, SPEC) * SPEC.v_side.scale)
                d = tl.arange(0, TILE.Dv // HALVES) * HALVES + half
                if from_start & (tile + 1 == end_tile):
                    tiling.store_rows(
                        tensors, result, lse2, row_start + token, row_head, row_live, d, H, SPEC.v_side.size
                    )
                else:
                    part_row = (p * 2 + tl.where(from_start, 1, 0)).to(tl.int64) * M + r
                    place = part_row[:, None] * SPEC.v_side.size + d[None, :]
                    mask = row_live[:, None] & (d < SPEC.v_side.size)[None, :]
                    tl.store(tensors.parts + place, result, mask=mask)
                    tl.store(tensors.part_lse + part_row, lse2, mask=row_live)
            accs, m, l = slices.nothing_summed(TILE)
    if FAN:
        first_free = tl.load(tensors.query_start_loc + numbers.S)
        begun, share, longer = split_merge.load_begun(tensors, p)
        last = p
        if (start < end) & (tile + 1 < end_tile) & (tile - first_tile < end - start):
            last = work_split.program_of(end + end_tile - tile - 2, share, longer)
        left = Divided(p, last, row_start + first_token, tl.minimum(q_len - first_token, TOKENS), kh)
        if (begun.first < begun.last) | (p < last):
            split_merge.merge_if_last(tensors, p, begun, left, SPEC, TILE, FAN)
        one = tl.arange(0, 1)
        tiling.store_padding(tensors, first_free + p, numbers.T, P, one, tl.arange(0, TILE.Dv), H, SPEC.v_side.size)
        if PDL:
            gdc_launch_dependents()  # last, as in merge_kernel
