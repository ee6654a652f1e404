"""Split-KV in the Hopper kernels: a program's share of all key tiles, and the walk over the parts of units in it.

Gluon's vectors need a layout, so :func:`share_of` is a second copy of ``shares`` and ``locate`` of work_split.py, which
divide a batch in the same way for the Triton kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.shared.work_split import (
    align,
    sequence,
    sequence_tiles,
    share_index,
    unit_after,
    unit_tiles,
)


class Share(NamedTuple):
    """Where a program begins, and how many tiles it has."""

    steps: Any
    s: Any
    kh: Any
    first_token: Any
    tile: Any


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def share_of(p, programs, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The p-th of equal shares of all key tiles of all units."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TIMES: gl.constexpr = DIVISION.times
    total = 0
    units = 0
    longest = 0
    for n in gl.static_range(TIMES):
        s_ = n * DIVISION.at_once + gl.arange(0, DIVISION.at_once, lanes)
        tiles = sequence_tiles(s_, batch, SPEC, DIVISION, SHAPE)
        total += gl.sum(tiles, 0)
        if DIVISION.aligned:
            of_unit = unit_tiles(s_, batch, SPEC, DIVISION, SHAPE)
            units += gl.sum(tiles // of_unit, 0)
            longest = gl.maximum(longest, gl.max(of_unit, 0))
    of_head = total
    if DIVISION.heads_apart:
        total *= SPEC.K
        units *= SPEC.K
    share = total // programs
    longer = total - share * programs
    if DIVISION.aligned:
        share, longer = align(share, longer, total, units, longest, programs)
    start = p * share + gl.minimum(p, longer)
    steps = share + (p < longer).to(gl.int32)
    if DIVISION.aligned:
        start = gl.minimum(start, total)
        steps = gl.minimum(steps, total - start)
    kh = 0
    if DIVISION.heads_apart:
        kh = start // of_head
        start -= kh * of_head
    s = 0
    before = 0
    passed_total = 0
    for n in gl.static_range(TIMES):
        s_ = n * DIVISION.at_once + gl.arange(0, DIVISION.at_once, lanes)
        tiles = sequence_tiles(s_, batch, SPEC, DIVISION, SHAPE)
        passed = (passed_total + gl.associative_scan(tiles, 0, add) <= start) & (s_ < batch.numbers.S)
        s += gl.sum(passed.to(gl.int32), 0)
        before += gl.sum(gl.where(passed, tiles, 0), 0)
        passed_total += gl.sum(tiles, 0)
    _row_start, _q_len, _seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, SHAPE.N)
    unit = (start - before) // (end_tile - first_tile)
    tile = first_tile + start - before - unit * (end_tile - first_tile)
    if not DIVISION.heads_apart:
        kh = unit % SPEC.K
        unit //= SPEC.K
    return Share(steps, s, kh, unit * (SHAPE.M // SPEC.G), tile)


@gluon.jit
def part_of(s, first_token, tile, left, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The part of a unit that begins at ``tile`` and that a share with ``left`` more tiles has: the sequence's first
    row, rows and keys, the unit's first tile and its end, the number of tiles of the part, and of those that a row may
    see, at least one."""
    N: gl.constexpr = SHAPE.N
    row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
    count = gl.minimum(end_tile - tile, left)
    seen = count
    if DIVISION.start:
        seen = gl.maximum(gl.minimum(count, gl.cdiv(seq_len, N) - tile), 1)
    if SPEC.masks.causal:
        newest = seq_len - q_len + gl.minimum(first_token + SHAPE.M // SPEC.G, q_len)
        seen = gl.maximum(gl.minimum(count, gl.cdiv(gl.maximum(newest, 0), N) - tile), 1)
    return row_start, q_len, seq_len, first_tile, end_tile, count, seen


@gluon.jit
def part_after(
    s, kh, first_token, tile, q_len, left, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """The unit after one whose tiles are taken, and its first tile if the share has any left."""
    s, kh, first_token = unit_after(s, kh, first_token, q_len, batch.numbers.S, SPEC, DIVISION, SHAPE.M // SPEC.G)
    if left > 0:
        _row_start, _q_len, _seq_len, tile, _end_tile = sequence(s, batch, SPEC, DIVISION, SHAPE.N)
    return s, kh, first_token, tile


class Part(NamedTuple):
    """The key tiles of one unit that are in a program's share."""

    program: Any  # the index of the share
    s: Any  # sequence
    kh: Any  # group of query heads
    first_token: Any
    tile: Any  # the first
    row_start: Any  # the sequence's first query row,
    q_len: Any  # its number of tokens
    seq_len: Any  # and of keys
    first_tile: Any  # of the unit
    end_tile: Any
    count: Any  # tiles of this part
    seen: Any  # tiles of this part that a row may see, at least 1


class Counts(NamedTuple):
    """What a role has processed so far."""

    units: Any
    tiles: Any
    messages: Any


@gluon.jit
def walk(
    role: gl.constexpr, args, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Call ``role(part, counts, args, batch, shared, SPEC, SHAPE)``, which returns the new counts, for each part in a
    share. Returns the last counts."""
    program = share_index(SPEC, DIVISION)
    left, s, kh, first_token, tile = share
    counts = Counts(0, 0, 0)
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            part = Part(
                program, s, kh, first_token, tile, row_start, q_len, seq_len, first_tile, end_tile, count, seen
            )  # fmt: skip
            counts = role(part, counts, args, batch, shared, SPEC, SHAPE)
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)
    return counts


@gluon.jit
def is_whole(part):
    """Whether a part is all of its unit; other parts are merged later."""
    return (part.tile == part.first_tile) & (part.tile + part.count == part.end_tile)
