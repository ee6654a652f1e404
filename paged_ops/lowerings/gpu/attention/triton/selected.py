"""Attention to selected keys: a program gathers keys of one token by the block table, so the time grows with their
number and not with the sequence.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`. A unit is a token and a key/value head, or a group of query
heads over latents; its M rows are query heads. The list of a unit is cut at fixed places into parts, one per program
along axis 1 of the grid, so that few units fill the GPU; :func:`merge_selected_kernel` merges the parts.

With ``batch_invariant``, a list has segments of ``SEGMENT`` keys, each computed from nothing. They merge from the first
to the last: in one program, or, if units are few, each has its program and :func:`fold_selected_kernel` merges them.

Source of the idea: the sparse attention of DeepSeek-V3.2 and its FlashMLA kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared import masks
from paged_ops.lowerings.gpu.attention.shared import tile as tiling
from paged_ops.lowerings.gpu.attention.shared.split_merge import Divided
from paged_ops.lowerings.gpu.attention.shared.tile import APPLIES, Keys, Rows
from paged_ops.lowerings.gpu.attention.triton import invariant, latent
from paged_ops.lowerings.gpu.attention.triton.invariant_merge import NOT_FUSED, finish, fold, not_of_merge
from paged_ops.lowerings.gpu.attention.triton.merge import merge_items, workspace
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Pointers, Shapes, Spec, not_applied
from paged_ops.lowerings.gpu.target import Target

OTHERS = {"groups", "latent", "row_scales", "selected", "selection", "batch_invariant"}

# The fields that merge_selected_kernel does not get.
NOT_OF_MERGE = tuple({*Pointers._fields, *Numbers._fields} - {"out", "lse", "parts", "part_lse", "output_scale"})


def serves(spec: Spec, target: Target) -> list[str]:
    if not spec.masks.selected:
        return ["selected_keys: not given"]
    if spec.rotated is None:
        sizes = tuning.too_large(spec.k_side.size, spec.v_side.size)
    else:
        sizes = latent.too_large(spec.v_side.size, spec.rotated.size)
    return not_applied(spec, APPLIES | OTHERS) + sizes


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice:
    """The choice for any batch."""
    if spec.rotated is None:
        sizes = spec.k_side.size, spec.v_side.size
        tiles = tuning.choose_tiles(spec.dtype, spec.storage.dtype, 1, 1, spec.G, *sizes, target)
        tile, programs, groups = tiles.split, tiles.programs, spec.K
    else:
        tile, programs = tuning.latent_tile(spec, target, 1, 1)
        if spec.batch_invariant:
            tile, _ = invariant.tiles_of(invariant.units_of(spec), target)
        groups = latent.in_groups(spec, tile.block_m).K
    units, selection = shapes.T * groups, spec.masks.selection
    keys = max(selection.entries * selection.block, 1)
    if spec.batch_invariant:
        parts = -(-keys // invariant.SEGMENT) if units < programs else 1
    else:
        parts = tuning.power_of_2(min(-(-programs // units), -(-keys // tile.block_n)))  # a tile each at most
    return tile, parts, units if parts > 1 else 0, tuning.division(tile.block_m, shapes.S)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    tile, parts, units, division = choice
    if spec.rotated is None:
        # Tokens of a list are not adjacent.
        spec, shape = spec._replace(v_side=spec.v_side._replace(run=1)), tuning.shape(tile, spec)
    else:
        spec, shape = latent.in_groups(spec, tile.block_m), latent.shape(tile, spec)
    K, overlap, options = spec.K, target.overlap(), tile.options(target.backend != "hip")

    def grid(numbers: Numbers) -> Grid:
        return numbers.T * K, parts, 1

    without = ("T", "taken", "arrived", *(("value_cache",) if spec.rotated else ()))
    constants = {"SPEC": spec, "DIVISION": division, "TILE": shape, "SEGMENT_TILES": 0, **overlap, **options}
    if spec.batch_invariant:
        constants |= {"SEGMENT_TILES": invariant.SEGMENT // shape.N, **NOT_FUSED}
    launch = Launch(launcher_of(selected_kernel, constants, target.device, without), grid, without)
    if parts == 1:
        return Launches((launch,), (0, 0, 0))
    constants = {"TILE": shape._replace(N=1, D=0), "PARTS": parts, **overlap, "num_warps": 4}
    if spec.batch_invariant:
        constants |= {"SPEC": spec, **NOT_FUSED}
        kernel, without = fold_selected_kernel, not_of_merge(spec)
    else:
        constants |= {"SPEC": spec.for_merge(), "HEADS": 1}
        kernel, without = merge_selected_kernel, NOT_OF_MERGE
    merge = Launch(
        launcher_of(kernel, constants, target.device, without), lambda numbers: (numbers.T * K, spec.G, 1), without
    )
    return Launches((launch, merge), workspace(units * parts, shape.M, spec.v_side.size))


@triton.jit(do_not_specialize=Numbers._fields)
def selected_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):  # fmt: skip
    """One part of the list of one unit. Rows of padding see no key. ``SEGMENT_TILES``: 0 if not ``batch_invariant``."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    SELECTION: tl.constexpr = MASKS.selection
    LATENT: tl.constexpr = SPEC.rotated is not None
    Dv: tl.constexpr = SPEC.v_side.size
    unit, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group = unit % K
    t = unit // K
    s = 0  # the sequences that end at or before token t
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s_ = n * DIVISION.at_once + tl.arange(0, DIVISION.at_once)
        end_ = tl.load(tensors.query_start_loc + s_ + 1, mask=s_ < numbers.S, other=0)
        s += tl.sum(((end_ <= t) & (s_ < numbers.S)).to(tl.int32))
    is_row = s < numbers.S
    seq_len = tl.load(tensors.seq_lens + s, mask=is_row, other=0)
    end = tl.load(tensors.query_start_loc + s + 1, mask=is_row, other=0)
    i = seq_len - end + t

    r = tl.arange(0, M)
    head = group * G + r
    row_live = r < G
    if SPEC.heads < K * G:
        row_live = row_live & (head < SPEC.heads)
    stored = tiling.stored_head(group, SPEC)
    factor = numbers.scale
    slopes = None
    if SPEC.logits.alibi:
        slopes = tl.load(tensors.alibi_slopes + head, mask=row_live, other=0.0)
    if LATENT:
        q = latent.load_latent_queries(tensors, t + r * 0, head, row_live, SPEC, TILE)
        keys, values = tensors.key_cache, latent.first_rotated(tensors.key_cache, SPEC)
        if tensors.k_scale is not None:
            factor = numbers.scale * tl.load(tensors.k_scale)
    else:
        q = tiling.load_queries(tensors.query, t + r * 0, head, row_live, SPEC, TILE.D)
        keys = tensors.key_cache + stored.to(tl.int64) * SPEC.k_side.k
        values = tensors.value_cache + stored.to(tl.int64) * SPEC.v_side.k
        if tensors.k_scale is not None:
            factor = numbers.scale * tl.load(tensors.k_scale + stored * SPEC.k_side.scale)
    block_table = tensors.block_tables + tl.where(is_row, s, 0).to(tl.int64) * numbers.table_stride
    rows = Rows(q, i + r * 0, None, slopes, factor, masks.stripe_offset(head, MASKS))
    cache = Keys(numbers, seq_len, None, block_table, keys, values)
    list_ = t.to(tl.int64) * SELECTION.heads
    if SELECTION.heads > 1:
        list_ += stored
    entries = tensors.selected_keys + list_ * SELECTION.entries

    KEYS: tl.constexpr = SELECTION.entries * SELECTION.block
    TILES: tl.constexpr = (KEYS + N - 1) // N
    each = tl.cdiv(TILES, parts)
    if SEGMENT_TILES == 0:
        acc, m, l = see_list(part * each, part * each + each, entries, i, rows, cache, SPEC, TILE)
    else:
        acc, m, l = tiling.nothing_seen(M, TILE.Dv, 0)
        if parts > 1:
            each = SEGMENT_TILES
        for first in range(part * each, tl.minimum(part * each + each, TILES), SEGMENT_TILES):
            own, m_own, l_own = see_list(first, first + SEGMENT_TILES, entries, i, rows, cache, SPEC, TILE)
            acc, m, l = fold(acc, m, l, own, m_own, l_own)
        if parts > 1:
            store_state(tensors, unit * parts + part, acc, m, l, row_live, SPEC, TILE)
            return
    if SPEC.logits.sinks:
        if is_row & (part == 0):
            acc, m, l = tiling.count_sink(acc, m, l, tl.load(tensors.sinks + head, mask=row_live, other=0.0))
    result, lse2 = tiling.normalise(acc, m, l)
    if LATENT:
        if tensors.k_scale is not None:
            result = result * tl.load(tensors.k_scale)
    elif tensors.v_scale is not None:
        result = result * tl.load(tensors.v_scale + stored * SPEC.v_side.scale)
    d = tl.arange(0, TILE.Dv)
    if parts == 1:
        tiling.store_rows(tensors, result, lse2, t + r * 0, head, row_live, d, SPEC.heads, Dv)
    else:
        part_row = ((unit * parts + part).to(tl.int64) * 2 + (part == 0).to(tl.int64)) * M + r
        mask = row_live[:, None] & (d < Dv)[None, :]
        tl.store(tensors.parts + part_row[:, None] * Dv + d[None, :], result, mask=mask)
        tl.store(tensors.part_lse + part_row, lse2, mask=row_live)


@triton.jit
def see_list(first, end, entries, i, rows, cache, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The state of the rows of the token at position ``i`` after the tiles from ``first`` to ``end`` of its list."""
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    SELECTION: tl.constexpr = MASKS.selection
    KEYS: tl.constexpr = SELECTION.entries * SELECTION.block
    LARGEST: tl.constexpr = 2147483647 // SELECTION.block - 1  # a larger entry selects nothing, and must not overflow
    TILES: tl.constexpr = (KEYS + N - 1) // N
    acc, m, l = tiling.nothing_seen(TILE.M, TILE.Dv, 0)
    for tile in range(first, tl.minimum(end, TILES)):
        x = tile * N + tl.arange(0, N)
        entry = tl.load(entries + x // SELECTION.block, mask=x < KEYS, other=-1)
        j = tl.minimum(entry, LARGEST) * SELECTION.block + x % SELECTION.block
        live = masks.keep_in_order(i, j, (entry >= 0) & (j < cache.seq_len), cache.numbers, MASKS)
        if SPEC.rotated is not None:
            block = tl.load(cache.block_table + (j // SPEC.B) * SPEC.table, mask=live, other=0)
            acc, m, l = latent.see_latent_keys(acc, m, l, rows, cache, j, live, block, SPEC, TILE)
        else:
            accs, m, l = tiling.see_keys((acc,), m, l, rows, cache, j, live, live, SPEC, TILE, True)
            acc = accs[0]
    return acc, m, l


@triton.jit(do_not_specialize=Numbers._fields)
def merge_selected_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of HEADS heads of a unit."""
    if PDL:
        gdc_wait()
    unit = tl.program_id(0)
    K: tl.constexpr = SPEC.K
    cut = Divided(unit * PARTS, unit * PARTS + PARTS - 1, unit // K, 1, unit % K)
    AT_ONCE: tl.constexpr = PARTS if PARTS < 8 else 8
    merge_items(tensors, cut, tl.program_id(1), tl.num_programs(1), SPEC, TILE, HEADS, TILE.Dv, AT_ONCE, 1)
    if PDL:
        gdc_launch_dependents()  # last, as in merge_kernel


@triton.jit
def store_state(tensors, place, acc, m, l, row_live, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Store the state of a segment for :func:`fold_selected_kernel`."""
    Dv: tl.constexpr = SPEC.v_side.size
    d = tl.arange(0, TILE.Dv)
    row = place.to(tl.int64) * TILE.M + tl.arange(0, TILE.M)
    tl.store(tensors.parts + row[:, None] * Dv + d[None, :], acc, mask=row_live[:, None] & (d < Dv)[None, :])
    tl.store(tensors.part_lse + row * 2, m, mask=row_live)
    tl.store(tensors.part_lse + row * 2 + 1, l, mask=row_live)


@triton.jit(do_not_specialize=Numbers._fields)
def fold_selected_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The segments of one head of a unit, merged in order."""
    if PDL:
        gdc_wait()
    unit = tl.program_id(0)
    group, t = unit % SPEC.K, unit // SPEC.K
    one = tl.arange(0, 1)
    head = group * SPEC.G + tl.program_id(1) + one
    live = head < SPEC.heads
    d = tl.arange(0, TILE.Dv)
    Dv: tl.constexpr = SPEC.v_side.size
    mask = live[:, None] & (d < Dv)[None, :]
    acc, m, l = tiling.nothing_seen(1, TILE.Dv, 0)
    for part in range(PARTS):
        row = (unit * PARTS + part).to(tl.int64) * TILE.M + tl.program_id(1) + one
        own = tl.load(tensors.parts + row[:, None] * Dv + d[None, :], mask=mask, other=0.0)
        m_own = tl.load(tensors.part_lse + row * 2, mask=live, other=float("-inf"))
        l_own = tl.load(tensors.part_lse + row * 2 + 1, mask=live, other=0.0)
        acc, m, l = fold(acc, m, l, own, m_own, l_own)
    if t < tl.load(tensors.query_start_loc + S):
        finish(tensors, acc, m, l, t + one, head, group, live, d, SPEC)
    else:  # padding
        tiling.store_padding(tensors, t, t + 1, 1, one, d, SPEC.heads, Dv)
    if PDL:
        gdc_launch_dependents()  # last, as in merge_kernel
