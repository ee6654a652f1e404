"""Segments of keys of the batch-invariant Hopper kernels: where they begin, and how states are folded."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Cuts(NamedTuple):
    """Where segments begin, and the states of segments in the workspace."""

    tiles: int  # of the shortest segments
    span: int  # positions of rows with segments of equal length
    rows: int  # packed query rows of a state
    states: int  # that the workspace holds


@triton.jit
def segment_tiles(i, CUTS: tl.constexpr):
    """The tiles of a segment of rows at positions ``i``."""
    return (1 + tl.maximum(i, 0) // CUTS.span) * CUTS.tiles


@triton.jit
def common_segment(item, TOKENS: tl.constexpr, CUTS: tl.constexpr):
    """The tiles of a segment of all rows of an item; of the shortest segments if its rows have different ones."""
    first_i = item.seq_len - item.q_len + item.first_token
    last_i = first_i + tl.minimum(TOKENS, item.q_len - item.first_token) - 1
    segment = segment_tiles(first_i, CUTS)
    return tl.where(segment == segment_tiles(last_i, CUTS), segment, CUTS.tiles)


@triton.jit
def segments_of(
    q_len, seq_len, G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CUTS: tl.constexpr, N: tl.constexpr
):
    """For sequences: the tiles of a segment; the number of segments, if they are items, as the sequence has at most
    ROWS packed rows, with equal cuts; else 0; and the number of tiles of rows."""
    tiles = segment_tiles(seq_len - q_len, CUTS)
    few = (q_len > 0) & (q_len * G <= ROWS) & (tiles == segment_tiles(seq_len - 1, CUTS))
    segments = tl.maximum((seq_len + tiles * N - 1) // (tiles * N), 1)
    return tiles, tl.where(few, segments, 0), (q_len + TOKENS - 1) // TOKENS


@triton.jit
def fold_weights(m, m_part):
    """The maximum of two states, and the factors of their sums."""
    m_new = tl.maximum(m, m_part)
    return m_new, tl.exp2(m - m_new), tl.exp2(m_part - m_new)
