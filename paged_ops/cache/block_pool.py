"""The blocks of one memory: which are free, which are shared, and what idle ones still hold.

Letters: N blocks, B tokens per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paged_ops.cache.prefixes import Prefix


class OutOfBlocks(RuntimeError):  # noqa: N818 - a state to react to, like StopIteration, more than a mistake
    """Too few free blocks. Raised before anything is changed: free or swap out a sequence, then call again."""


class BlockPool:
    """``num_blocks`` blocks of one memory, with a reference count each; every operation on a block is O(1).

    A block is owned (count > 0), free, or *idle*. An idle block is free too, but its content is known, and ``find``
    returns it until the block is taken for something else. Idle blocks are taken only when no other block is free, the
    least recently released one first. ``name`` says in errors which memory this is.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self.ref_counts = [0] * num_blocks
        self.forget()

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can give: free and idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks whose content is still known."""
        return len(self._idle)

    def find(self, prefix: Prefix) -> int | None:
        """The block, owned or idle, that holds the last B tokens of ``prefix``."""
        return self._block_of.get(prefix)

    def fits(self, plan: Sequence[int | None]) -> bool:
        """Whether ``take(plan)`` would succeed."""
        return plan.count(None) <= self._num_spare(plan)

    def take(self, plan: Sequence[int | None]) -> list[int]:
        """Takes one reference to each block that ``plan`` names, and a fresh block for each None. If there are too few,
        it takes none and raises ``OutOfBlocks``."""
        if not self.fits(plan):
            raise OutOfBlocks(
                f"{self.name} cache: expected {plan.count(None)} free blocks, got {self._num_spare(plan)} of"
                f" {self.num_blocks}; free or swap out a sequence first"
            )
        for block in plan:  # first, because taking fresh blocks could evict them
            if block is not None:
                self.share(block)
        return [self._fresh() if block is None else block for block in plan]

    def share(self, block: int) -> None:
        """Takes one more reference to an owned or idle block."""
        self._check(block)
        if not self.ref_counts[block] and block not in self._idle:
            raise ValueError(f"block: {block} of the {self.name} cache is free and cannot be shared; take it first")
        self._idle.pop(block, None)
        self.ref_counts[block] += 1

    def release(self, block: int) -> bool:
        """Gives one reference back. True if it was the last one, so that the block is free (or idle) now."""
        self._check(block)
        if not self.ref_counts[block]:
            raise ValueError(f"block: double free of block {block} of the {self.name} cache; nobody owns it")
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return False
        if self._prefix_of[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None
        return True

    def remember(self, block: int, prefix: Prefix) -> None:
        """Makes ``find(prefix)`` return ``block``, unless another block holds the same content already."""
        if self._block_of.setdefault(prefix, block) == block:
            self._prefix_of[block] = prefix

    def forget(self) -> None:
        """Forgets what all blocks hold. No block may be owned."""
        assert not any(self.ref_counts), "blocks are forgotten while owned"
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: low ids first, so that runs are adjacent
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is the least recently released
        self._block_of: dict[Prefix, int] = {}
        self._prefix_of: list[Prefix | None] = [None] * self.num_blocks

    def recover(self, owners: Mapping[int, int]) -> None:
        """Sets all counts to the given numbers of owners, after an exception between two statements. A block that is
        neither owned nor idle becomes free, and its content is forgotten."""
        self.ref_counts = [owners.get(block, 0) for block in range(self.num_blocks)]
        known = {
            block: prefix
            for block, prefix in enumerate(self._prefix_of)
            if prefix is not None and self._block_of.get(prefix) == block
        }
        idle = [block for block in self._idle if block in known and not self.ref_counts[block]]
        kept = {block: prefix for block, prefix in known.items() if self.ref_counts[block] or block in self._idle}
        self._prefix_of = [kept.get(block) for block in range(self.num_blocks)]
        self._block_of = {prefix: block for block, prefix in kept.items()}
        self._idle = OrderedDict.fromkeys(idle)
        self._free = [
            block for block in reversed(range(self.num_blocks)) if not self.ref_counts[block] and block not in kept
        ]

    def _num_spare(self, plan: Sequence[int | None]) -> int:
        return self.num_free - sum(block in self._idle for block in plan if block is not None)

    def _fresh(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            prefix = self._prefix_of[block]
            assert prefix is not None
            del self._block_of[prefix]
            self._prefix_of[block] = None
        self.ref_counts[block] = 1
        return block

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(
                f"block: expected an id in 0..{self.num_blocks - 1} of the {self.name} cache, got {block}: not its own"
            )


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks at this moment, and of what happened since the start."""

    num_blocks: int
    used_blocks: int
    free_blocks: int  # idle ones included
    idle_blocks: int  # free, content still known
    shared_blocks: int  # more than one reference
    host_used_blocks: int
    host_free_blocks: int
    admitted_tokens: int  # prompt tokens of all admissions
    hit_tokens: int  # of these, found in the cache
    copied_blocks: int  # copy-on-write
    swapped_out_blocks: int  # moved to the host; blocks whose content was there already are not counted
    swapped_in_blocks: int

    @classmethod
    def of(cls, pool: BlockPool, host: BlockPool, **counts: int) -> CacheStats:
        """The counts of both pools at this moment, next to ``counts`` of what happened."""
        return cls(
            num_blocks=pool.num_blocks,
            used_blocks=pool.num_blocks - pool.num_free,
            free_blocks=pool.num_free,
            idle_blocks=pool.num_idle,
            shared_blocks=sum(count > 1 for count in pool.ref_counts),
            host_used_blocks=host.num_blocks - host.num_free,
            host_free_blocks=host.num_free,
            **counts,
        )


def num_first_blocks(block_size: int, sliding_window: int, num_first_tokens: int) -> int:
    """The number of blocks that hold the first tokens; 0 without a window, where these change nothing."""
    return -(-num_first_tokens // block_size) if sliding_window else 0


def most_blocks_kept(block_size: int, sliding_window: int, attention_chunk: int, num_first_tokens: int = 0) -> int:
    """The most blocks that a decoding sequence owns, at the worst position of its window or chunk; not both are 0."""
    of_window = -(-(sliding_window - 1) // block_size) + 1
    of_chunk = (
        attention_chunk // block_size
        if attention_chunk % block_size == 0
        else -(-(attention_chunk - 1) // block_size) + 1
    )
    kept = min(blocks for blocks, reach in ((of_window, sliding_window), (of_chunk, attention_chunk)) if reach)
    kept = max(kept, 2)  # the newest block stays while the next one begins
    return kept + num_first_blocks(block_size, sliding_window, num_first_tokens)
