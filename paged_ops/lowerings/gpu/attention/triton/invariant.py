"""Batch-invariant attention: the bits of a row's results depend on that row and on what it sees, not on the batch.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`. Keys are cut into segments of ``SEGMENT`` at fixed
positions. Each segment is computed from nothing, and the segments of a row merge from the first to the last, in
registers or from the workspace. One tile serves one row and many, so that each row takes the same instructions. A tile
or a segment changes no bit of a row that sees none of its keys. Kernels are compiled without fusing multiplications
and additions, which the compiler would choose differently in each of them.

* ``invariant_decode_kernel`` serves sequences of few rows, by the units and shares of shared/work_split.py. A segment
  belongs to the program in whose share it begins. A program folds the segments of a unit that begins in its share. Of a
  unit that began before, it stores the state of each segment.
* ``invariant_merge_kernel`` of invariant_merge.py folds the states of such units.
* ``invariant_prefill_kernel`` serves the other sequences: a program folds all segments of a tile of rows.

Over latents, groups of query heads replace key/value heads, as in latent.py.
"""

from __future__ import annotations

from typing import Any

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
    load_queries,
    nothing_seen,
    queries_for_fp8,
    see_tile,
    stored_head,
)
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, next_unit, sequence, shares
from paged_ops.lowerings.gpu.attention.triton import latent
from paged_ops.lowerings.gpu.attention.triton.invariant_merge import (
    NOT_FUSED,
    Cuts,
    finish,
    fold,
    invariant_merge_kernel,
    next_cut,
    not_of_merge,
    store_state,
    tiles_to_cut,
    too_long,
)
from paged_ops.lowerings.gpu.attention.triton.prefill import tile_of_rows
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, not_applied
from paged_ops.lowerings.gpu.target import Target

SEGMENT = 512  # keys
# The workspace for states of segments, in float32s, and the bounds on the number of segments of one program.
WORKSPACE = 16 << 20
FEWEST_SLOTS, MOST_SLOTS = 16, 64
# Bytes of shared memory per multiprocessor that hold two stages of 32 keys of wide heads.
LARGE_MEMORY = 160 << 10


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    if not spec.batch_invariant:
        return ["batch_invariant: not asked for"]
    if spec.rotated is None:
        sizes = tuning.too_large(spec.k_side.size, spec.v_side.size)
    else:
        sizes = latent.too_large(spec.v_side.size, spec.rotated.size)
    return not_applied(spec, APPLIES | {"batch_invariant", "groups", "latent", "row_scales"}) + sizes


def tiles_of(spec: Spec, target: Target) -> tuple[tuning.Tile, tuning.Tile]:
    """The tiles of invariant_decode_kernel and invariant_prefill_kernel: the same instructions for each row."""
    group = tuning.power_of_2(spec.G)
    size = spec.v_side.size if spec.rotated else max(spec.k_side.size, spec.v_side.size)
    width = tuning.padded(size, spec.storage.dtype.itemsize)
    if target.device.type == "cpu":
        tile = tuning.Tile(max(16 if spec.rotated else 64, group), 32, 4, 1)
    elif width > tuning.WIDEST:  # two accumulators of so many columns are in registers
        tile = tuning.Tile(max(16, group), 16, 4 if spec.dtype.itemsize == 4 else 8, 1)
        if target.shared_memory >= LARGE_MEMORY and spec.dtype.itemsize == 2:
            tile = tile._replace(block_n=32, num_stages=2)
    elif spec.dtype.itemsize == 4:
        tile = tuning.Tile(max(16, group), 32 if width <= 128 else 16, 4, 1)
    elif not target.is_hopper:
        tile = tuning.Tile(max(64, group), 32, 4 if group <= 64 else 8, 1 if target.backend == "hip" else 2)
    else:
        tile = tuning.Tile(max(64, group), 64 if width <= 128 else 32, 4 if group <= 64 else 8, 3)
        if group <= 64:  # one warpgroup multiplies 64 rows, two multiply 128
            return tile, tile._replace(block_m=128, num_warps=8)
    return tile, tile


def units_of(spec: Spec) -> Spec:
    """The spec with groups of query heads as key/value heads, if it is latent."""
    return latent.in_groups(spec, 16 if spec.dtype.itemsize == 4 else 32) if spec.rotated else spec


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice:
    """The choice for any batch."""
    spec = units_of(spec)
    few, many = tiles_of(spec, target)
    rows, same = tuning.rows_of(shapes.T, shapes.S, spec.G)
    rows = few.block_m if same and shapes.T > shapes.S else min(rows, few.block_m)
    programs = 2 * target.processors or tuning.INTERPRETER_PROGRAMS
    slots = WORKSPACE // (programs * rows * spec.v_side.size)
    cuts = Cuts(SEGMENT // few.block_n, min(max(slots, FEWEST_SLOTS), MOST_SLOTS))
    everyone = same or shapes.T * spec.G <= rows
    return few, many, rows, programs, cuts, tuning.division(rows, shapes.S, everyone=everyone)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    few, many, rows, programs, cuts, division = choice
    spec = units_of(spec)
    walk = spec
    if spec.masks.first:  # segments are counted from the first token on, seen or not
        walk = spec._replace(masks=spec.masks._replace(window=False, chunk=False, first=0))
    shape = latent.shape if spec.rotated else tuning.shape
    unit = shape(few, spec)._replace(M=rows)  # its rows, in a tile that may have more
    constants = {"SPEC": spec, "WALK": walk, "DIVISION": division, "CUTS": cuts, "UNIT": unit}
    is_cuda = target.backend != "hip"

    def launch(kernel: Any, tile: tuning.Tile, grid: Any, *without: str) -> Launch:
        if spec.rotated:
            without += ("value_cache",)
        own = {"TILE": shape(tile, spec), **tile.options(is_cuda), **target.overlap(), **NOT_FUSED}
        return Launch(launcher_of(kernel, {**constants, **own}, target.device, without), grid, without)

    K, tokens, Dv = spec.K, many.block_m // spec.G, spec.v_side.size

    def grid(numbers: Numbers) -> Grid:
        return K * (numbers.T // tokens + numbers.S + 1), 1, 1

    launches = [launch(invariant_decode_kernel, few, (programs, 1, 1), "taken", "arrived", "T")]
    if not division.everyone:
        launches.append(launch(invariant_prefill_kernel, many, grid, "parts", "part_lse", "taken", "arrived", "T"))
    launches.append(
        launch(invariant_merge_kernel, few._replace(num_warps=1, num_stages=1), (programs, 1, 1), *not_of_merge(spec))
    )
    states = programs * (cuts.slots + 1) * rows
    size = states * (Dv + 2)
    return Launches(tuple(launches), (states * Dv, size, size))


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_decode_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The segments that begin in a program's share. ``WALK``: the spec that shares count tiles by."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ranges = None
    if SPEC.masks.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, SPEC.masks.ranges)
    batch = Batch(tensors, numbers, ranges)
    K: tl.constexpr = SPEC.K
    N: tl.constexpr = TILE.N
    TOKENS: tl.constexpr = UNIT.M // SPEC.G
    p = tl.program_id(0)
    P = tl.num_programs(0)
    start, end, share, _ = shares(p, P, batch, WALK, DIVISION, UNIT)
    whole = too_long(share, CUTS)
    end = next_cut(end, whole, batch, WALK, DIVISION, CUTS, UNIT)
    s, unit, passed = locate(start, batch, WALK, DIVISION, UNIT)
    row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, N)
    to_cut = tiles_to_cut(passed, first_tile, end_tile, whole, CUTS)
    tile = first_tile + passed + to_cut
    position = start + to_cut
    kh = unit % K
    first_token = unit // K * TOKENS
    while position < end:
        if tile == end_tile:
            before = s
            s, kh, first_token = next_unit(s, kh, first_token, q_len, K, TOKENS)
            if s > before:
                row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, N)
            tile = first_tile
        stop = tl.minimum(end_tile, tile + end - position)
        if q_len > 0:
            see_part(
                batch, p, s, kh, row_start, q_len, seq_len, first_token, tile, stop, tile == first_tile,
                stop == end_tile, SPEC, CUTS, UNIT, TILE, TOKENS,
            )  # fmt: skip
        position += stop - tile
        tile = stop


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_prefill_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of a sequence that invariant_decode_kernel does not serve. The grid is that of prefill.py."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
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
    # One tile more than any batch has: this grid ends after invariant_decode_kernel, which runs at the same time.
    if place == 0:
        if PDL:
            gdc_wait()
        return
    query_tile = tiles - 1 - place  # later tiles see more keys, so they start first
    s, row_start, q_len, seq_len, first_token = tile_of_rows(query_tile, tensors, numbers.S, DIVISION, TOKENS)
    if (first_token >= q_len) | (q_len * SPEC.G <= DIVISION.rows):
        return
    end_tile = tl.maximum(tl.cdiv(seq_len, TILE.N), 1)
    see_part(
        batch, 0, s, kh, row_start, q_len, seq_len, first_token, 0, end_tile, True, True, SPEC, CUTS, UNIT, TILE, TOKENS
    )  # fmt: skip


@triton.jit
def see_part(
    batch, p, s, kh, row_start, q_len, seq_len, first_token,
    first, end,  # tiles of the part; it begins at a cut, or with the unit
    from_start, to_end,  # whether the unit begins and ends with it
    SPEC: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A part of a unit: its results, or the state of all its segments if it does not end, or of each if the unit began
    before."""
    tensors, numbers = batch.tensors, batch.numbers
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    DV_PAD: tl.constexpr = TILE.Dv
    SEGMENT_TILES: tl.constexpr = CUTS.tiles
    MASKS: tl.constexpr = SPEC.masks
    r = tl.arange(0, M)
    d = tl.arange(0, DV_PAD)
    token = first_token + r // G
    row_live = (r < TOKENS * G) & (token < q_len)
    row_head = kh * G + r % G
    if SPEC.heads < SPEC.K * G:
        row_live = row_live & (row_head < SPEC.heads)
    stored = stored_head(kh, SPEC)
    first_i = seq_len - q_len + first_token
    last_i = seq_len - q_len + tl.minimum(first_token + TOKENS, q_len) - 1
    i = seq_len - q_len + token
    if SPEC.rotated is not None:
        q = latent.load_latent_queries(tensors, row_start + token, row_head, row_live, SPEC, TILE)
    else:
        q = load_queries(tensors.query, row_start + token, row_head, row_live, SPEC, TILE.D)
    factor = numbers.scale
    if tensors.k_scale is not None:
        factor = numbers.scale * tl.load(tensors.k_scale + stored * SPEC.k_side.scale)
    if SPEC.rotated is None:
        FP8: tl.constexpr = SPEC.storage.format == 0 and tensors.key_cache.dtype.element_ty.primitive_bitwidth == 8
        if FP8 and q.dtype == tl.bfloat16:
            q, row_factor = queries_for_fp8(q)
            factor *= row_factor
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(tensors.alibi_slopes + row_head, mask=row_live, other=0.0)
    head_offset = stripe_offset(kh * G + tl.arange(0, triton.next_power_of_2(G)) % G, MASKS)
    oldest = oldest_key(first_i, numbers, MASKS)
    newest = seq_len
    full_end = seq_len // N
    full_first = tl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    sees = None
    if MASKS.ranges:
        low, high = reach_of_rows(batch, s, tl.minimum(i, last_i), MASKS)
        sees = (low, high)
        oldest = tl.min(low, 0)
        newest = tl.minimum(seq_len, tl.max(high, 0))
        full_end = tl.minimum(tl.maximum(tl.min(high, 0), 0) // N, full_end)
        full_first = tl.cdiv(tl.max(low, 0), N)
    elif MASKS.causal:
        newest = tl.minimum(seq_len, last_i + 1)
        full_end = tl.minimum(tl.maximum(first_i + 1, 0) // N, full_end)
    hidden = hidden_keys(oldest, first_i, 0, first_i, numbers, MASKS)
    end_seen = tl.minimum(tl.cdiv(newest, N), end)
    block_table = tensors.block_tables + tl.cast(s, tl.int64) * numbers.table_stride
    if SPEC.rotated is not None:
        keys, values = tensors.key_cache, latent.first_rotated(tensors.key_cache, SPEC)
    else:
        keys = tensors.key_cache + stored.to(tl.int64) * SPEC.k_side.k
        values = tensors.value_cache + stored.to(tl.int64) * SPEC.v_side.k
    offset = stripe_offset(row_head, MASKS)
    rows = Rows(q, i, sees, slopes, factor, offset)
    cache = Keys(numbers, seq_len, hidden, block_table, keys, values)

    acc, m, l = nothing_seen(M, DV_PAD, 0)
    first_segment = first // SEGMENT_TILES
    if MASKS.first == 0:  # segments before are not seen
        seen_first = tl.maximum(first_segment, hidden.oldest // N // SEGMENT_TILES)
        first_segment = tl.where(from_start, seen_first, first_segment)
    for segment in range(first_segment, tl.cdiv(end, SEGMENT_TILES)):
        tile = segment * SEGMENT_TILES
        stop = tl.minimum(tile + SEGMENT_TILES, end_seen)
        part, m_part, l_part = nothing_seen(M, DV_PAD, 0)
        parts = (part,)
        if MASKS.sparse:
            steps = 0  # counted first, so that there is one loop below, whose loads start early
            seen = next_seen_tile(tl.maximum(tile, hidden.oldest // N), first_i, head_offset, MASKS, N)
            while seen < stop:
                steps += 1
                seen = next_seen_tile(seen + 1, first_i, head_offset, MASKS, N)
            tile = tl.maximum(tile, hidden.oldest // N) - 1
            for _step in range(steps):
                tile = next_seen_tile(tile + 1, first_i, head_offset, MASKS, N)
                parts, m_part, l_part = see(parts, m_part, l_part, rows, cache, tile, SPEC, TILE, True)
        else:
            if MASKS.first:
                for tile_ in range(tile, tl.minimum(stop, tl.minimum(tl.cdiv(hidden.start, N), hidden.oldest // N))):
                    parts, m_part, l_part = see(parts, m_part, l_part, rows, cache, tile_, SPEC, TILE, True)
            if MASKS.window or MASKS.chunk:
                tile = tl.maximum(tile, hidden.oldest // N)
                for tile_ in range(tile, tl.minimum(stop, full_first)):
                    parts, m_part, l_part = see(parts, m_part, l_part, rows, cache, tile_, SPEC, TILE, True)
                tile = tl.maximum(tile, full_first)
            for tile_ in range(tile, tl.minimum(stop, full_end)):
                parts, m_part, l_part = see(parts, m_part, l_part, rows, cache, tile_, SPEC, TILE, False)
            for tile_ in range(tl.maximum(tile, full_end), stop):
                parts, m_part, l_part = see(parts, m_part, l_part, rows, cache, tile_, SPEC, TILE, True)
        part = parts[0]
        if not from_start:
            store_state(tensors, p, 1 + segment % CUTS.slots, part, m_part, l_part, r, row_live, d, SPEC, CUTS, UNIT)
        acc, m, l = fold(acc, m, l, part, m_part, l_part)
    if from_start:
        if to_end:
            finish(tensors, acc, m, l, row_start + token, row_head, kh, row_live, d, SPEC)
        else:
            store_state(tensors, p, 0, acc, m, l, r, row_live, d, SPEC, CUTS, UNIT)


@triton.jit
def see(accs, m, l, rows, keys, tile, SPEC: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys, or of latents, to the rows."""
    if SPEC.rotated is not None:
        acc, m, l = latent.see_latents(accs[0], m, l, rows, keys, tile, True, SPEC, TILE)
        accs = (acc,)
    else:
        accs, m, l = see_tile(accs, m, l, rows, keys, tile, True, SPEC, TILE, MASKED)
    return accs, m, l
