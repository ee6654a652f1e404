"""Split-KV in the Hopper kernels: a program's share of all key tiles, and the walk over the parts of units in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, sequence, share_index, shares, unit_after


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def share_of(p, programs, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The p-th of equal shares of all key tiles of all units: the number of its tiles, and where it begins, which is a
    sequence, key/value head, token and tile."""
    lanes = gl.arange(0, DIVISION.at_once, gl.BlockedLayout([1], [32], [4], [0]))
    counted = Batch(batch.tensors, batch.numbers, None, lanes)
    start, end, _share, _longer = shares(p, programs, counted, SPEC, DIVISION, SHAPE)
    s, unit, tile = locate(start, counted, SPEC, DIVISION, SHAPE)
    _row_start, _q_len, _seq_len, first_tile, _end_tile = sequence(s, batch, SPEC, DIVISION, SHAPE.N)
    return end - start, s, unit % SPEC.K, unit // SPEC.K * (SHAPE.M // SPEC.G), first_tile + tile


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
    N: gl.constexpr = SHAPE.N
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    program = share_index(SPEC, DIVISION)
    left, s, kh, first_token, tile = share
    counts = Counts(0, 0, 0)
    while left > 0:
        row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
        count = gl.minimum(end_tile - tile, left)
        seen = count
        if DIVISION.start:
            seen = gl.maximum(gl.minimum(count, gl.cdiv(seq_len, N) - tile), 1)
        if SPEC.masks.causal:
            newest = seq_len - q_len + gl.minimum(first_token + TOKENS, q_len)
            seen = gl.maximum(gl.minimum(count, gl.cdiv(gl.maximum(newest, 0), N) - tile), 1)
        left -= count
        if q_len > 0:
            part = Part(
                program, s, kh, first_token, tile, row_start, q_len, seq_len, first_tile, end_tile, count, seen
            )  # fmt: skip
            counts = role(part, counts, args, batch, shared, SPEC, SHAPE)
        s, kh, first_token = unit_after(s, kh, first_token, q_len, batch.numbers.S, SPEC, DIVISION, TOKENS)
        if left > 0:
            _row_start, _q_len, _seq_len, tile, _end_tile = sequence(s, batch, SPEC, DIVISION, N)
    return counts


@gluon.jit
def is_whole(part):
    """Whether a part is all of its unit; other parts are merged later."""
    return (part.tile == part.first_tile) & (part.tile + part.count == part.end_tile)
