"""The common prefix of the sequences of an engine's step, found on the device from their block tables.

Nothing is read on the host and no shape depends on the result, so a captured step can use
:func:`paged_ops.cascade_attention`. If nothing is shared, the prefix has no tokens.

Letters: S sequences, B tokens per block, M columns of the block tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect


class SharedPrefix(NamedTuple):
    """The tokens that all sequences of a step start with, and the rest of each sequence."""

    block_table: Tensor  # int32 [1, M]
    length: Tensor  # int32 [1], in whole blocks
    suffix_block_tables: Tensor  # int32 [S, M]
    suffix_lens: Tensor  # int32 [S]


class PrefixFinder:
    """Finds the shared prefix of each step. The results keep their addresses, because captured graphs read them.

    Args:
        block_size: B.
        most_sequences: the most sequences of a step.
        least_tokens, least_sequences: shorter prefixes, or prefixes of fewer sequences, count as none: a second call
            of attention would cost more.
    """

    def __init__(self, block_size: int, most_sequences: int, least_tokens: int = 256, least_sequences: int = 8) -> None:
        self._block_size, self._most_sequences = block_size, most_sequences
        self._least_tokens, self.least_sequences = least_tokens, least_sequences
        self._found: SharedPrefix | None = None

    def find(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> SharedPrefix:
        """The prefix of a step. Sequences of no tokens are padding, and are ignored.

        Only keys before the step's own tokens are shared, so that every row of the step sees all of them.

        Args:
            block_tables: int32 ``[S, M]``; M is the same in each step.
            seq_lens: int32 ``[S]``.
            query_start_loc: int32 ``[S + 1]``.

        Raises:
            ValueError: more sequences, other columns or another device than the tensors were made for.
        """
        (S, M), B = block_tables.shape, self._block_size
        if self._found is None:
            self._found = self._make(M, block_tables.device)
        found = self._found
        expect(S <= self._most_sequences, "block_tables", f"at most {self._most_sequences} rows", block_tables)
        expect(
            M == found.suffix_block_tables.shape[1],
            "block_tables",
            "the same number of columns as before",
            block_tables,
        )
        expect(block_tables.device == found.length.device, "block_tables", "the device as before", block_tables)
        is_live = seq_lens > 0
        history = torch.where(is_live, seq_lens - query_start_loc.diff(), torch.iinfo(torch.int32).max)
        is_common = ((block_tables == block_tables[:1]) | ~is_live[:, None]).all(0)
        blocks = torch.minimum(is_common.long().cumprod(0).sum(), history.amin() // B)
        is_worth_it = (is_live.sum() >= self.least_sequences) & (blocks * B >= self._least_tokens)
        blocks = blocks * is_worth_it
        found.length.copy_(blocks * B)
        suffix_block_tables, suffix_lens = found.suffix_block_tables[:S], found.suffix_lens[:S]
        columns = torch.arange(M, device=block_tables.device) + blocks
        torch.index_select(block_tables, 1, columns.clamp(max=M - 1), out=suffix_block_tables)
        self.renew(SharedPrefix(block_tables[:1], found.length, suffix_block_tables, suffix_lens), seq_lens)
        return SharedPrefix(block_tables[:1], found.length, suffix_block_tables, suffix_lens)

    @staticmethod
    def renew(prefix: SharedPrefix, seq_lens: Tensor) -> None:
        """The same prefix for a later step of the same sequences, with longer suffixes."""
        torch.sub(seq_lens, prefix.length, out=prefix.suffix_lens).clamp_(min=0)

    def _make(self, M: int, device: torch.device) -> SharedPrefix:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        S = self._most_sequences
        return SharedPrefix(zeros(1, M), zeros(1), zeros(S, M), zeros(S))
