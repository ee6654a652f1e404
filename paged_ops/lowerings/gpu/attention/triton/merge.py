"""``merge_kernel``: a second launch that merges the partial results of the units that several shares split.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared.masks import ranges_at
from paged_ops.lowerings.gpu.attention.shared.split_merge import Divided
from paged_ops.lowerings.gpu.attention.shared.tile import Batch, normalise, store_padding, store_rows
from paged_ops.lowerings.gpu.attention.shared.work_split import fit_whole, locate, program_of, sequence, shares
from paged_ops.lowerings.gpu.launch import Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Division, Numbers, Pointers, Spec, TileShape
from paged_ops.lowerings.gpu.target import Target


def with_merge(
    launches: tuple[Launch, ...], P: int, tile: TileShape, spec: Spec, target: Target, division: Division
) -> Launches:
    """The launches, and the launch that merges. The first one has P programs; they leave parts of the units that their
    shares split, in tiles of this shape."""
    constants = {
        "SPEC": spec.for_merge(),
        "DIVISION": division,
        "TILE": tile._replace(D=0, W=0, paired=False, heads=1),
        **target.overlap(),
        **tuning.Tile(tile.M, tile.N, 4, 1).options(target.backend != "hip"),
    }
    wide = HELPERS_OF_WIDE if spec.G > FEW_HEADS else HELPERS_OF_FEW
    helpers = wide if tile.Dv > NARROW else HELPERS_OF_MANY if tile.M >= MANY_ROWS else 1
    merge = Launch(launcher_of(merge_kernel, constants, target.device), (P, helpers, 1), NOT_OF_MERGE)
    itemsize = spec.out.itemsize if tile.rounded else 4
    return Launches((*launches, merge), workspace(P, tile.M, spec.v_side.size, itemsize))


def workspace(P: int, M: int, Dv: int, itemsize: int = 4) -> tuple[int, int, int]:
    """The workspace in which each of P programs leaves up to two parts of M rows: see Launches. ``itemsize``: of the
    parts' numbers."""
    to_lse = P * 2 * M * Dv * itemsize // 4
    to_taken = to_lse + P * 2 * M
    return to_lse, to_taken, to_taken + 4


# The number of programs that merge the parts of one program, where values are wide (latents) or rows many: one
# program took too long. With more than FEW_HEADS heads their registers leave room for four on a multiprocessor.
NARROW, HELPERS_OF_WIDE = tl.constexpr(256), 4
FEW_HEADS, HELPERS_OF_FEW = tl.constexpr(16), 8
MANY_ROWS, HELPERS_OF_MANY = tl.constexpr(64), 4

# The fields that merge_kernel gets; and those that it does not.
OF_MERGE = {"out", "lse", "parts", "part_lse", "seq_lens", "query_start_loc", "bidirectional_ranges", "output_scale"}
OF_MERGE |= {"window", "chunk", "S", "T"}
NOT_OF_MERGE = tuple({*Pointers._fields, *Numbers._fields} - OF_MERGE)


@triton.jit(do_not_specialize=Numbers._fields)
def merge_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the units that were divided. A unit's parts are the second part of its first program and the first parts
    of later ones.

    All programs of a unit except the last help, and of equal pieces the last, too. If they are few, a unit is merged
    token by token, else by slices of rows. Also writes the rows of padding, which no other kernel writes. What needs no
    waiting is done before split_kernel ends; programs that merge nothing end then, except for one, which waits so that
    this kernel does not end before split_kernel.
    """
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    Dv: tl.constexpr = SPEC.v_side.size
    DV_PAD: tl.constexpr = TILE.Dv
    TOKENS: tl.constexpr = TILE.M // G
    H: tl.constexpr = SPEC.heads
    ranges = None
    if SPEC.masks.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, SPEC.masks.ranges)
    batch = Batch(tensors, numbers, ranges)
    p = tl.program_id(0)
    program, programs = p, tl.num_programs(0)
    WIDE: tl.constexpr = DV_PAD > NARROW
    MANY: tl.constexpr = TILE.M >= MANY_ROWS
    if WIDE or MANY:  # programs along axis 1 share what one program of the first launch leaves
        program, programs = p * tl.num_programs(1) + tl.program_id(1), programs * tl.num_programs(1)
    one = tl.arange(0, 1)
    d = tl.arange(0, DV_PAD)
    first_free = tl.load(tensors.query_start_loc + numbers.S)
    store_padding(tensors, first_free + program, numbers.T, programs, one, d, H, Dv)
    # The unit in which this share ends, if the unit goes on: the programs of its first and its last tile.
    start, end, share, longer = shares(p, tl.num_programs(0), batch, SPEC, DIVISION, TILE)
    if DIVISION.whole:
        if fit_whole(share, longer, tl.num_programs(0), batch, SPEC, DIVISION, TILE):
            end = start
    s, unit, tile = locate(end - 1, batch, SPEC, DIVISION, TILE)
    row_start, q_len, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
    left = end_tile - first_tile - 1 - tile
    first = program_of(end - 1 - tile, share, longer)
    last = program_of(end - 1 + left, share, longer)
    if DIVISION.aligned:
        pieces = tl.maximum(-longer, 1)
        first = tl.where(longer < 0, p // pieces * pieces, first)
        last = tl.where(longer < 0, first + pieces - 1, last)
        left = tl.where(longer < 0, 1, left)
    kh = unit % K
    first_token = unit // K * TOKENS
    row_start += first_token
    tokens = tl.minimum(q_len - first_token, TOKENS)
    helper, helpers = p - first, last - first
    if DIVISION.aligned:
        helpers += tl.where(longer < 0, 1, 0)
    if WIDE or MANY:
        helper, helpers = helper * tl.num_programs(1) + tl.program_id(1), helpers * tl.num_programs(1)
    cut = Divided(first, last, row_start, tokens, kh)
    nothing = (start == end) | (left == 0)
    if nothing & (program > 0):
        return
    if PDL:
        gdc_wait()
    if nothing:
        return
    # Few parts are merged by whole rows, many by columns, so that every helper takes a share of the loads.
    MOST: tl.constexpr = 2048 // DV_PAD
    GROUP: tl.constexpr = triton.next_power_of_2(G)
    ROWS: tl.constexpr = GROUP if GROUP < MOST else MOST  # in triton 3.5 (torch 2.9) min() would give a tensor
    WIDTH: tl.constexpr = DV_PAD if DV_PAD < 32 else 32
    if WIDE:
        if GROUP > FEW_HEADS:  # of few parts several heads at once
            if last - first < 2:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 4, DV_PAD, 2, 1)
            elif last - first < 4:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 2, DV_PAD, 4, 1)
            elif last - first < 8:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, DV_PAD, 8, 1)
            elif last - first < 16:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, DV_PAD, 16, 1)
            elif last - first < 32:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 256, 32, 1)
            elif last - first < 64:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 128, 64, 1)
            elif last - first < 128:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 64, 128, 1)
            else:
                merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 32, 256, 1)
        elif last - first < 8:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, DV_PAD, 8, 1)
        elif last - first < 16:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 128, 16, 1)
        # few rows: no more items than programs, and as wide as that allows
        elif last - first < 32:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 64, 32, 1)
        elif last - first < 128:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 32, 64, 2)
        else:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 8, 256, 1)
    elif MANY:
        if last - first < 8:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, ROWS, DV_PAD, 1, 4)
        elif last - first < 64:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 4, WIDTH, 32, 1)
        else:
            merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, WIDTH, 32, 5)
    elif helpers < 8:
        merge_items(tensors, cut, helper, helpers, SPEC, TILE, ROWS, DV_PAD, 1, 4)
    elif helpers < 64:
        merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, WIDTH, 64, 1)
    else:
        merge_items(tensors, cut, helper, helpers, SPEC, TILE, 1, 8, 512, 1)
    if PDL:
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read


@triton.jit
def merge_items(
    tensors, cut, helper, helpers, SPEC: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The items of a unit that one of its helpers merges: an item is ROWS heads of a token by WIDTH columns."""
    G: tl.constexpr = SPEC.G
    HEADS: tl.constexpr = (G + ROWS - 1) // ROWS
    COLUMNS: tl.constexpr = TILE.Dv // WIDTH
    Dv: tl.constexpr = SPEC.v_side.size
    for item in range(helper, cut.tokens * (HEADS * COLUMNS), helpers):
        token = item // (HEADS * COLUMNS)
        g = item // COLUMNS % HEADS * ROWS + tl.arange(0, ROWS)
        d = item % COLUMNS * WIDTH + tl.arange(0, WIDTH)
        live = g < G
        if SPEC.heads < SPEC.K * G:
            live = live & (cut.kh * G + g < SPEC.heads)
        result, lse2 = merge_rows(tensors, cut, token * G + g, live, d, TILE, Dv, AT_ONCE, UNROLLED)
        store_rows(tensors, result, lse2, cut.row_start + token + g * 0, cut.kh * G + g, live, d, SPEC.heads, Dv)


@triton.jit
def merge_rows(
    tensors, cut, row, row_live, d, TILE: tl.constexpr, Dv: tl.constexpr, AT_ONCE: tl.constexpr, UNROLLED: tl.constexpr
):
    """Columns d of packed rows ``row [M]`` of a unit, and their lse to base 2."""
    M: tl.constexpr = TILE.M
    parts = tensors.parts
    if TILE.rounded:
        parts = parts.to(tl.pointer_type(tensors.out.dtype.element_ty))
    acc = tl.zeros([row.shape[0], d.shape[0]], tl.float32)
    m = tl.full([row.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([row.shape[0]], tl.float32)
    for begin in range(cut.first, cut.last + 1, AT_ONCE * UNROLLED):
        for n in tl.static_range(UNROLLED):
            program = begin + n * AT_ONCE + tl.arange(0, AT_ONCE)
            place = (program * 2 + tl.where(program == cut.first, 1, 0)).to(tl.int64)[:, None] * M + row[None, :]
            live = (program <= cut.last)[:, None] & row_live[None, :]
            mask = live[:, :, None] & (d < Dv)[None, None, :]
            lse2 = tl.load(tensors.part_lse + place, mask=live, other=float("-inf"))  # [AT_ONCE, M]
            at = place[:, :, None] * Dv + d[None, None, :]
            if TILE.rounded:
                at = tl.max_contiguous(at, [1, 1, 4])  # all warps load one row, as of float32: no sum crosses them
            part = tl.load(parts + at, mask=mask, other=0.0)
            m_new = tl.maximum(m, tl.max(lse2, 0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2(lse2 - shift[None, :])
            decay = tl.exp2(m - shift)
            acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
            l = l * decay + tl.sum(weight, 0)
            m = m_new
    return normalise(acc, m, l)
