"""What is captured: the modes, the sizes, and the key of a captured step."""

from __future__ import annotations

import enum
import itertools
from typing import NamedTuple

from paged_ops.checks import expect
from paged_ops.metadata import GraphSupport


class GraphMode(str, enum.Enum):
    """What is captured. A *decode* batch has the same few tokens for each sequence; a *mixed* batch is any other."""

    NONE = "NONE"  # nothing
    PIECEWISE = "PIECEWISE"  # of any batch, the pieces between attention ops
    FULL = "FULL"  # any batch, whole
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"  # decode batches whole, mixed ones not at all
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"  # decode batches whole, mixed ones in pieces

    __str__ = str.__str__

    def needs(self, query_len: int = 1) -> GraphSupport:
        """The least level of the attention layers that it needs, for decode batches of ``query_len`` tokens per
        sequence."""
        if self is GraphMode.FULL:
            return GraphSupport.ALWAYS
        if self in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE):
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else GraphSupport.UNIFORM_BATCH
        return GraphSupport.NEVER

    @property
    def in_pieces(self) -> bool:
        return self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)


def choose_mode(support: GraphSupport, query_len: int = 1) -> GraphMode:
    """The mode that captures as much as the attention layers allow, for a step that is compiled in any way or not.

    ``FULL`` for ALWAYS, ``FULL_DECODE_ONLY`` for a level that allows decodes of ``query_len`` tokens, else ``NONE``.
    The piecewise modes need a step from :func:`compile_pieces`, so they must be asked for by name.
    """
    for mode in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY):
        if support >= mode.needs(query_len):
            return mode
    return GraphMode.NONE


def capture_sizes(largest: int) -> list[int]:
    """The sizes to capture up to ``largest``: 1, 2, 4, then multiples of 8 up to 256, then of 16; and ``largest``."""
    expect(largest >= 1, "largest", "1 or more", largest)
    sizes = itertools.chain((1, 2, 4), range(8, 257, 8), range(272, largest, 16))
    return [*(size for size in sizes if size < largest), largest]


class GraphKey(NamedTuple):
    """What one captured step serves."""

    num_reqs: int  # S
    num_tokens: int  # T
    cascade: bool = False
    in_pieces: bool = False
