"""The tokens of a sequence on each rank, when a cache is sharded over ranks (context parallelism).

A block of a block table is ``block_size`` tokens over all W ranks, and b = block_size / W tokens in a row on each: the
first b on rank 0, the next b on rank 1. So token j is on rank ``j // b % W``: block i of b tokens on rank ``i % W``. In
the words of engines: b is the interleave, and the block size of each rank's memory. All ranks have the same block ids,
block tables and decisions; only the slots of a step, and how many tokens of a sequence a rank holds, differ.

Letters: T tokens of a step, S sequences, W ranks, b tokens in a row on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect


class TokenShard(NamedTuple):
    """This rank's shard of every sequence's tokens: shard ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def check(self, block_size: int) -> int:
        """b, the number of a block's tokens on each rank.

        Raises:
            ValueError: the ranks do not divide a block, or there is no such rank.
        """
        expect(self.size >= 1, "shard", "one rank or more", self.size)
        expect(0 <= self.rank < self.size, "shard", f"a rank from 0 to {self.size - 1}", self.rank)
        whole = block_size % self.size == 0
        expect(whole, "block_size", f"a multiple of the {self.size} ranks that share a block", block_size)
        return block_size // self.size

    def lens(self, lens: Tensor, block_size: int) -> Tensor:
        """How many of the first ``lens`` tokens this rank holds; integers of any shape, on any device.

        With b tokens of each block: ``lens // block_size * b + clamp(lens % block_size - rank * b, 0, b)``.
        """
        b = block_size // self.size
        blocks = torch.div(lens, block_size, rounding_mode="trunc")
        return blocks * b + (lens - blocks * block_size - self.rank * b).clamp(0, b)

    def slots(self, blocks: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """Where this rank writes the tokens at ``positions``, whose blocks are ``blocks``: int64, -1 for tokens of
        other ranks."""
        b = block_size // self.size
        offsets = positions % block_size - self.rank * b
        slots = blocks.to(torch.int64) * b + offsets
        return slots if self.size == 1 else torch.where((offsets >= 0) & (offsets < b), slots, -1)


UNSHARDED = TokenShard()  # every rank holds all tokens


def widest(shards: Sequence[TokenShard]) -> TokenShard:
    """The shard of the pools that are sharded, all in the same way; the other pools are whole on each rank."""
    return max(shards, key=lambda shard: shard.size)
