"""The one-launch merge: programs of split_kernel merge the parts of the units that their shares split.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`. A program has at most two parts: one of the first
unit of its share, and one of the last. It stores both and increments the counter of each unit. The last program of a
unit merges. Parts are always merged in the order of the programs, so the result does not depend on the order in time.

Few parts are merged at once. Of many, FAN neighbours are merged first, by the last of these, and then the results, so
that no program reads more than FAN parts and one for each group. The counters are zero before and after each launch:
whoever merges sets them back. Ideas: the fix-up of stream-K (Osama et al. 2023, arXiv:2301.03598), and the counter of
blocks that are done in CUDA's threadFenceReduction sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.attention.shared.tile import normalise, store_rows

# Integers of a program: counters of the group that begins with its first part, of that with its second, and of the unit
# that begins in its share; then NOTES: what it reloads after its last tile, as its loop has no registers left.
INTEGERS = tl.constexpr(12)
UNIT = tl.constexpr(2)
NOTES = tl.constexpr(4)
# A vector that no two threads share an element of.
THREADS = tl.constexpr(256)
# Numbers that a program merges of one part at a time.
AT_A_TIME = tl.constexpr(1024)
UNROLLED = tl.constexpr(8)


class Divided(NamedTuple):
    """A unit: the programs first..last that have parts of it (equal if it is not divided), the first of its rows, its
    tokens, and its key/value head."""

    first: Any
    last: Any
    row_start: Any
    tokens: Any
    kh: Any


@triton.jit
def store_begun(tensors, p, begun, share, longer):
    """Keep for :func:`load_begun` what program p began with."""
    place = tensors.arrived + p * INTEGERS + NOTES
    notes = begun + (share, longer)  # noqa: RUF005 - Triton has no star in a tuple
    for n in tl.static_range(len(notes)):
        tl.store(place + n, notes[n])


@triton.jit
def load_begun(tensors, p):
    """What :func:`store_begun` stored: the unit that others began, and the share by :func:`shares`."""
    place = tensors.arrived + p * INTEGERS + NOTES
    tl.debug_barrier()  # one thread has stored them
    begun = Divided(tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3), tl.load(place + 4))
    return begun, tl.load(place + 5), tl.load(place + 6)


@triton.jit
def merge_if_last(tensors, p, begun, left, SPEC: tl.constexpr, TILE: tl.constexpr, FAN: tl.constexpr):
    """Program p has stored its parts: of the unit ``begun`` by others, and of the one ``left`` to others."""
    n = tl.arange(0, THREADS)
    first = tl.where(n == 0, begun.first, left.first)
    last = tl.where(n == 0, begun.last, left.last)
    # of many parts, the group of FAN that has this program's
    many = last - first >= FAN
    low = tl.where(many, first + (p - first) // FAN * FAN, first)
    high = tl.where(many, tl.minimum(low + FAN - 1, last), last)
    counter = tl.where(many, low * INTEGERS + (low == first).to(tl.int32), first * INTEGERS + UNIT)
    counted = (n < 2) & (first < last)
    tl.debug_barrier()  # all threads have stored
    before = tl.atomic_add(tensors.arrived + counter, 1, mask=counted, sem="acq_rel", scope="gpu")
    is_last = counted & (before == high - low)
    which_last = tl.sum(tl.where(is_last, n + 1, 0))  # 1: of the unit begun, 2: of the one left, 3: of both
    for which in range(0, 2):
        if (which_last >> which) & 1 == 1:
            fields: tl.tuple = ()
            for field in tl.static_range(len(begun)):
                fields += (tl.where(which == 0, begun[field], left[field]),)
            unit = Divided(*fields)
            merge_unit(tensors, p, unit, SPEC, TILE, FAN)


@triton.jit
def merge_unit(tensors, p, unit, SPEC: tl.constexpr, TILE: tl.constexpr, FAN: tl.constexpr):
    """All parts of a unit are there, or, if they are many, all of the group that has program p's."""
    grouped = unit.last - unit.first >= FAN
    low, high, step = unit.first, unit.last, 1
    counter = tensors.arrived + unit.first * INTEGERS + UNIT
    if grouped:
        low = unit.first + (p - unit.first) // FAN * FAN
        high = tl.minimum(low + FAN - 1, unit.last)
        counter = tensors.arrived + low * INTEGERS + (low == unit.first).to(tl.int32)
    more = True
    while more:
        merge_between(tensors, unit, low, high, step, grouped, SPEC, TILE)
        tl.store(counter, 0)
        more = False
        if grouped:
            grouped = False
            low, high, step = unit.first, unit.last, FAN
            counter = tensors.arrived + unit.first * INTEGERS + UNIT
            tl.debug_barrier()
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            more = before == (unit.last - unit.first) // FAN


@triton.jit
def merge_between(tensors, unit, low, high, step, grouped, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The parts of every ``step``-th program from ``low`` to ``high``, into the output; if ``grouped``, in the place of
    the first of them."""
    M: tl.constexpr = TILE.M
    G: tl.constexpr = SPEC.G
    Dv: tl.constexpr = SPEC.v_side.size
    DV_PAD: tl.constexpr = TILE.Dv
    FIT: tl.constexpr = AT_A_TIME // DV_PAD
    ROWS: tl.constexpr = M if M < FIT else FIT
    d = tl.arange(0, DV_PAD)
    rows = unit.tokens * G
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        row_live = row < rows
        acc = tl.zeros([ROWS, DV_PAD], tl.float32)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        for begin in range(low, high + 1, UNROLLED * step):
            for n in tl.static_range(UNROLLED):  # all loads are under way before the first is needed
                program = begin + n * step
                place = part_place(program, unit.first, M) + row
                live = row_live & (program <= high)
                mask = live[:, None] & (d < Dv)[None, :]
                lse2 = tl.load(tensors.part_lse + place, mask=live, other=float("-inf"))
                part = tl.load(tensors.parts + place[:, None] * Dv + d[None, :], mask=mask, other=0.0)
                m_new = tl.maximum(m, lse2)
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)
                weight = tl.exp2(lse2 - shift)
                decay = tl.exp2(m - shift)
                acc = acc * decay[:, None] + part * weight[:, None]
                l = l * decay + weight
                m = m_new
        result, lse2 = normalise(acc, m, l)
        if grouped:
            tl.debug_barrier()  # all threads have loaded what is overwritten
            place = part_place(low, unit.first, M) + row
            mask = row_live[:, None] & (d < Dv)[None, :]
            tl.store(tensors.parts + place[:, None] * Dv + d[None, :], result, mask=mask)
            tl.store(tensors.part_lse + place, lse2, mask=row_live)
        else:
            token, head = unit.row_start + row // G, unit.kh * G + row % G
            store_rows(tensors, result, lse2, token, head, row_live, d, SPEC.heads, Dv)


@triton.jit
def part_place(program, first, M: tl.constexpr):
    """The first row of a program's part of the unit that begins in the share of program ``first``."""
    return (program * 2 + (program == first).to(tl.int32)).to(tl.int64) * M
