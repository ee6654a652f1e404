"""Split-KV: the units of a batch, and the equal shares of their key tiles, one per program.

A unit is a work item: a sequence, a key/value head, and one tile of packed query rows. Gluon kernels call the same
functions: ``batch.lanes``, a vector of sequences, has the layout that Gluon needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.attention.shared.masks import first_key_tile, oldest_key, reach_of_ranges

# Key tiles of a unit. With 16 (1024 keys) whole units gain 0.9 µs of 43, with 128 they lose 16 of 248.
LONGEST_WHOLE = tl.constexpr(16)


@triton.jit
def share_index(SPEC: tl.constexpr, DIVISION: tl.constexpr):
    """The share of this program. With heads_apart, K adjacent programs take the same tiles of all heads; K must
    divide their number."""
    p = tl.program_id(0)
    if DIVISION.heads_apart:
        p = p % SPEC.K * (tl.num_programs(0) // SPEC.K) + p // SPEC.K
    return p


@triton.jit
def sequences_of(n, batch, DIVISION: tl.constexpr):
    """The n-th vector of sequences."""
    if batch.lanes is None:
        lanes = tl.arange(0, DIVISION.at_once)
    else:
        lanes = batch.lanes
    return n * DIVISION.at_once + lanes


@triton.jit
def shares(p, P, batch, SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr):
    """Program p's share of all key tiles, start : end; the tiles of a share; the number of shares with one more, or
    minus the number of pieces that :func:`align` cuts units into."""
    total = 0
    units = 0
    longest = 0
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s = sequences_of(n, batch, DIVISION)
        tiles = sequence_tiles(s, batch, SPEC, DIVISION, TILE)
        total += tl.sum(tiles)
        if DIVISION.aligned:
            _, _, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
            of_unit = tl.where(s < batch.numbers.S, end_tile - first_tile, 1)
            units += tl.sum(tiles // of_unit)
            longest = tl.maximum(longest, tl.max(of_unit))
    if DIVISION.heads_apart:
        total *= SPEC.K
        units *= SPEC.K
    share = total // P
    longer = total - share * P
    if DIVISION.aligned:
        share, longer = align(share, longer, total, units, longest, P, DIVISION)
    start = p * share + tl.minimum(p, longer)
    end = start + share + tl.where(p < longer, 1, 0)
    if DIVISION.aligned:
        pieces = tl.maximum(-longer, 1)
        unit = p // pieces * longest
        own = unit + p % pieces * share
        own_end = tl.where(p % pieces == pieces - 1, unit + longest, own + share)
        start = tl.minimum(tl.where(longer < 0, own, start), total)
        end = tl.minimum(tl.where(longer < 0, own_end, end), total)
    return start, end, share, longer


@triton.jit
def align(share, longer, total, units, longest, P, DIVISION: tl.constexpr):
    """If all units are equally long, and that takes little longer: shares of whole units, or of equal pieces of one."""
    tiles = tl.maximum(longest - DIVISION.start, 1)
    piece = (tiles - 1) // tl.maximum(P // tl.maximum(units, 1), 1) + 1
    pieces = (tiles - 1) // piece + 1
    aligned = tl.where(pieces > 1, piece, (units + P - 1) // P * longest)
    fits = (units * longest == total) & (aligned * P <= total + total // 20) & (pieces <= DIVISION.aligned)
    return tl.where(fits, aligned, share), tl.where(fits, tl.where(pieces > 1, -pieces, 0), longer)


@triton.jit
def locate(position, batch, SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr):
    """The sequence, the unit and the tile of the unit at a position among all tiles. The compiler need not repeat the
    loads of :func:`shares`, as both loops are unrolled."""
    kh = 0
    if DIVISION.heads_apart:
        _, of_head, _, _ = shares(0, SPEC.K, batch, SPEC, DIVISION, TILE)
        kh = position // of_head
        position = position - kh * of_head
    s = 0
    before = 0  # tiles of the sequences before s
    total = 0
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s_ = sequences_of(n, batch, DIVISION)
        tiles = sequence_tiles(s_, batch, SPEC, DIVISION, TILE)
        passed = (total + tl.cumsum(tiles, 0) <= position) & (s_ < batch.numbers.S)
        s += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles, 0))
        total += tl.sum(tiles)
    _, _, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
    unit = (position - before) // (end_tile - first_tile)
    tile = position - before - unit * (end_tile - first_tile)
    if DIVISION.heads_apart:
        unit = unit * SPEC.K + kh
    return s, unit, tile


@triton.jit
def fit_whole(share, longer, P, batch, SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr):
    """Whether no unit has more key tiles than equal shares of DIVISION.whole programs would have, and a twentieth. Then
    program p takes unit ``p % K`` of sequence ``p // K``, and nothing is divided. Not for long units: fewer programs
    read more slowly."""
    longest = 0
    TIMES: tl.constexpr = DIVISION.times  # static_range takes no other number
    for n in tl.static_range(TIMES):
        s = sequences_of(n, batch, DIVISION)
        _, q_len, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
        one_unit = q_len <= TILE.M // SPEC.G
        longest = tl.maximum(longest, tl.max(tl.where(one_unit, end_tile - first_tile, 1 << 30)))
    total = share * P + longer
    return (longest <= LONGEST_WHOLE) & (longest * (1.0 * DIVISION.whole) <= total * 1.05)


@triton.jit
def program_of(position, share, longer):
    """The program whose share has a key tile; the first ``longer`` programs have one tile more than ``share``."""
    of_longer = longer * (share + 1)
    return tl.where(
        position < of_longer, position // (share + 1), longer + (position - of_longer) // tl.maximum(share, 1)
    )


@triton.jit
def sequence(s, batch, SPEC: tl.constexpr, DIVISION: tl.constexpr, N: tl.constexpr):
    """For sequences s: first row, numbers of tokens and of keys, and the range of a unit's key tiles (of N keys).

    A sequence that split_kernel does not serve counts as empty. If it has more rows than a tile, it has more units.
    """
    MASKS: tl.constexpr = SPEC.masks
    live = s < batch.numbers.S
    start = tl.load(batch.tensors.query_start_loc + s, mask=live, other=0)
    q_len = tl.load(batch.tensors.query_start_loc + s + 1, mask=live, other=0) - start
    seq_len = tl.load(batch.tensors.seq_lens + s, mask=live, other=0)
    mine = q_len > 0
    if not DIVISION.everyone:
        few = q_len * SPEC.G <= DIVISION.rows
        if DIVISION.long_rows:
            few = few | ((q_len * SPEC.G <= DIVISION.long_rows) & (seq_len > DIVISION.long))
        mine = mine & few & (seq_len > DIVISION.short)
    q_len = tl.where(mine, q_len, 0)
    seq_len = tl.where(mine, seq_len, 0)
    oldest = oldest_key(seq_len - q_len, batch.numbers, MASKS)
    if SPEC.masks.window or SPEC.masks.chunk:
        if SPEC.masks.ranges:
            s_ = tl.where(live, s, 0)
            oldest, _ = reach_of_ranges(batch.ranges, s_, seq_len - q_len, seq_len, oldest, seq_len, MASKS)
    first_tile = first_key_tile(oldest, seq_len - q_len, batch.numbers, MASKS, N)
    end_tile = tl.maximum(tl.cdiv(seq_len, N), first_tile + 1)
    if DIVISION.start:
        end_tile += DIVISION.start
    return start, q_len, seq_len, first_tile, end_tile


@triton.jit
def sequence_tiles(s, batch, SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr):
    """The number of key tiles of the units of sequences s, of one head with heads_apart. A sequence without rows
    counts as one tile, to be passed over."""
    _, q_len, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
    HEADS: tl.constexpr = 1 if DIVISION.heads_apart else SPEC.K
    units = tl.where(q_len > 0, HEADS * tl.cdiv(q_len, TILE.M // SPEC.G), 1)
    return tl.where(s < batch.numbers.S, (end_tile - first_tile) * units, 0)


@triton.jit
def next_unit(s, kh, first_token, q_len, K, TOKENS: tl.constexpr):
    """The next unit: key/value heads first, then tiles of rows, then sequences. A sequence without rows has one
    unit."""
    kh += 1
    if (kh == K) | (q_len == 0):
        kh = 0
        first_token += TOKENS
        if first_token >= q_len:
            first_token = 0
            s += 1
    return s, kh, first_token


@triton.jit
def unit_after(s, kh, first_token, q_len, S, SPEC: tl.constexpr, DIVISION: tl.constexpr, TOKENS: tl.constexpr):
    """The next unit of a division: with ``heads_apart``, tiles of rows first, then sequences, then heads."""
    if DIVISION.heads_apart:
        first_token += TOKENS
        if first_token >= q_len:
            first_token = 0
            s += 1
            if s == S:
                s = 0
                kh += 1
    else:
        s, kh, first_token = next_unit(s, kh, first_token, q_len, SPEC.K, TOKENS)
    return s, kh, first_token
