"""The states of segments in batch-invariant attention, and the kernel that merges them if several programs share a
unit. It runs after the kernels of invariant.py.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention.shared.masks import ranges_at
from paged_ops.lowerings.gpu.attention.shared.tile import (
    Batch,
    count_sink,
    normalise,
    store_padding,
    store_rows,
    stored_head,
)
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, program_of, sequence, shares
from paged_ops.lowerings.gpu.spec import Numbers, Spec

NOT_FUSED = {"enable_fp_fusion": False}


class Cuts(NamedTuple):
    """Where invariant_decode_kernel's programs may begin, and what they store."""

    tiles: int  # of a segment
    slots: int  # segments of a unit that began before, whose states a program can store


def not_of_merge(spec: Spec) -> tuple[str, ...]:
    """The fields that invariant_merge_kernel does not get. The scale of latents is that of the output, too."""
    tensors = "taken", "arrived", "query", "key_cache", "value_cache", "block_tables", "alibi_slopes"
    numbers = "scale", "soft_cap", "table_stride"
    return *tensors, *(() if spec.rotated else ("k_scale",)), *numbers


@triton.jit
def fold(acc, m, l, part, m_part, l_part):
    """The state of all segments up to one, from the state before it and its own. A side that has seen no key changes
    no bit of the other."""
    m_new = tl.maximum(m, m_part)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - shift)
    weight = tl.exp2(m_part - shift)
    return acc * decay[:, None] + part * weight[:, None], m_new, l * decay + l_part * weight


@triton.jit
def finish(tensors, acc, m, l, row_token, row_head, kh, row_live, d, SPEC: tl.constexpr):
    """Store the results of rows that have seen all their keys."""
    if SPEC.logits.sinks:
        acc, m, l = count_sink(acc, m, l, tl.load(tensors.sinks + row_head, mask=row_live, other=0.0))
    result, lse2 = normalise(acc, m, l)
    if SPEC.rotated is not None:
        if tensors.k_scale is not None:
            result = result * tl.load(tensors.k_scale)
    elif tensors.v_scale is not None:
        result = result * tl.load(tensors.v_scale + stored_head(kh, SPEC) * SPEC.v_side.scale)
    store_rows(tensors, result, lse2, row_token, row_head, row_live, d, SPEC.heads, SPEC.v_side.size)


@triton.jit
def store_state(
    tensors, p, slot, acc, m, l, r, row_live, d, SPEC: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr
):
    Dv: tl.constexpr = SPEC.v_side.size
    place = (p * (CUTS.slots + 1) + slot).to(tl.int64) * UNIT.M + r
    tl.store(tensors.parts + place[:, None] * Dv + d[None, :], acc, mask=row_live[:, None] & (d < Dv)[None, :])
    tl.store(tensors.part_lse + place * 2, m, mask=row_live)
    tl.store(tensors.part_lse + place * 2 + 1, l, mask=row_live)


@triton.jit
def too_long(share, CUTS: tl.constexpr):
    """Whether a share may have more segments of one unit than a program can store. Then units stay whole."""
    return share // CUTS.tiles + 3 > CUTS.slots


@triton.jit
def tiles_to_cut(passed, first_tile, end_tile, whole, CUTS: tl.constexpr):
    """From the tile ``first_tile + passed`` of a unit to the next cut, or to the next unit if units stay whole."""
    tile = first_tile + passed
    left = end_tile - tile
    to_cut = tl.where(whole, left, tl.minimum((CUTS.tiles - tile % CUTS.tiles) % CUTS.tiles, left))
    return tl.where(passed == 0, 0, to_cut)


@triton.jit
def next_cut(
    position, whole, batch, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr
):
    """The first cut from a position among all tiles on."""
    s, _, passed = locate(position, batch, WALK, DIVISION, UNIT)
    _, _, _, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, UNIT.N)
    return position + tiles_to_cut(passed, first_tile, end_tile, whole, CUTS)


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_merge_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, WALK: tl.constexpr, DIVISION: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Folds the states of the units that several programs share: all of them except the last help. Also writes the rows
    of padding."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
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
    row_start, q_len, _, first_tile, end_tile = sequence(s, batch, WALK, DIVISION, TILE.N)
    base = end - 1 - passed - first_tile  # a tile's position is base + tile
    last_segment = (end_tile - 1) // CUTS.tiles
    last = program_of(base + tl.maximum(last_segment * CUTS.tiles, first_tile), share, longer)
    first = program_of(base + first_tile, share, longer)
    first_token = unit // K * TOKENS
    tokens = tl.minimum(q_len - first_token, TOKENS)
    if PDL:
        gdc_wait()
    if (start == end) | (p >= last) | too_long(share, CUTS):
        return
    part = base, first, last, first_tile, last_segment, share, longer
    kh = unit % K
    if last - first < 8:
        MOST: tl.constexpr = 1024 // DV_PAD
        ROWS: tl.constexpr = UNIT.M if UNIT.M < MOST else MOST
        fold_rows(tensors, p, part, row_start + first_token, tokens, kh, SPEC, CUTS, UNIT, ROWS, DV_PAD, 8)
    else:
        WIDTH: tl.constexpr = 32 if DV_PAD > 32 else DV_PAD
        fold_rows(tensors, p, part, row_start + first_token, tokens, kh, SPEC, CUTS, UNIT, 1, WIDTH, 16)
    if PDL:
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read


@triton.jit
def fold_rows(
    tensors, p, part, row_start, tokens, kh, SPEC: tl.constexpr, CUTS: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Program p's items of a unit: ROWS packed rows by WIDTH columns each."""
    base, first, last, first_tile, last_segment, share, longer = part
    G: tl.constexpr = SPEC.G
    Dv: tl.constexpr = SPEC.v_side.size
    COLUMNS: tl.constexpr = (Dv + WIDTH - 1) // WIDTH
    # The first segment that another program stored.
    second = (first + 1) * share + tl.minimum(first + 1, longer) - base
    second = tl.maximum(tl.cdiv(second, CUTS.tiles), first_tile // CUTS.tiles + 1)
    for item in range(p - first, tl.cdiv(tokens * G, ROWS) * COLUMNS, last - first):
        row = item // COLUMNS * ROWS + tl.arange(0, ROWS)
        d = item % COLUMNS * WIDTH + tl.arange(0, WIDTH)
        live = row < tokens * G
        if SPEC.heads < SPEC.K * G:
            live = live & (kh * G + row % G < SPEC.heads)
        column_live = live[:, None] & (d < Dv)[None, :]
        place = (first * (CUTS.slots + 1)).to(tl.int64) * UNIT.M + row
        m = tl.load(tensors.part_lse + place * 2, mask=live, other=0.0)
        l = tl.load(tensors.part_lse + place * 2 + 1, mask=live, other=0.0)
        acc = tl.load(tensors.parts + place[:, None] * Dv + d[None, :], mask=column_live, other=0.0)
        for begin in range(second, last_segment + 1, UNROLLED):
            states: tl.tuple = ()
            for n in tl.static_range(UNROLLED):
                segment = begin + n
                there = segment <= last_segment
                owner = program_of(base + tl.minimum(segment, last_segment) * CUTS.tiles, share, longer)
                place = (owner * (CUTS.slots + 1) + 1 + segment % CUTS.slots).to(tl.int64) * UNIT.M + row
                m_part = tl.load(tensors.part_lse + place * 2, mask=live & there, other=float("-inf"))
                l_part = tl.load(tensors.part_lse + place * 2 + 1, mask=live & there, other=0.0)
                added = tl.load(tensors.parts + place[:, None] * Dv + d[None, :], mask=column_live & there, other=0.0)
                states += ((added, m_part, l_part),)
            tl.debug_barrier()  # all loads are under way before the first is used; ptxas would move them
            for n in tl.static_range(UNROLLED):
                added, m_part, l_part = states[n]
                acc, m, l = fold(acc, m, l, added, m_part, l_part)
        finish(tensors, acc, m, l, row_start + row // G, kh * G + row % G, kh, live, d, SPEC)
