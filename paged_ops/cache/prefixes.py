"""The identities of prefixes: equal leading tokens of two sequences are one object.

Letters: B tokens per block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Prefix:
    """The identity of all tokens from a sequence's start to the end of a full block: equal prefixes are one object."""

    __slots__ = ("__weakref__",)


class PrefixIndex:
    """The prefixes of a cache: a chain of dictionary keys (prefix before the block, tokens of the block). Keys are
    compared for equality, so sequences whose hashes collide never share.

    A key holds the parent of its value, so an ancestor's identity survives the eviction of the ancestor's block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: weakref.WeakValueDictionary[tuple[Prefix | None, tuple[Hashable, ...]], Prefix]
        self._prefixes = weakref.WeakValueDictionary()

    def root(self, extra_key: Hashable) -> Prefix:
        """The prefix without tokens of all sequences with this key."""
        return self._prefixes.setdefault((None, (extra_key,)), Prefix())

    def find(self, parent: Prefix, tokens: list[int], index: int) -> Prefix | None:
        """The prefix of ``tokens`` to the end of block ``index``, if it is known."""
        return self._prefixes.get((parent, self._block(tokens, index)))

    def extend(self, prefixes: list[Prefix], tokens: list[int], num_blocks: int) -> None:
        """Appends to the root and the first prefixes of ``tokens`` the ones up to block ``num_blocks``."""
        for index in range(len(prefixes) - 1, num_blocks):
            prefixes.append(self._prefixes.setdefault((prefixes[-1], self._block(tokens, index)), Prefix()))

    def clear(self) -> None:
        """Forgets all prefixes: equal tokens get other identities from now on."""
        self._prefixes.clear()

    def __len__(self) -> int:
        return len(self._prefixes)

    def _block(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefixes": list(self._prefixes.items())}  # a weak dictionary cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prefixes = weakref.WeakValueDictionary(state["_prefixes"])


def servable_lengths(
    blocks: Sequence[int | None], block_size: int, num_first: int, num_freed: Callable[[int], int]
) -> list[int]:
    """The numbers of leading blocks after which a sequence could continue, as all blocks that it would see are cached.

    Args:
        blocks: the ids of the leading blocks; None is a block that is not in the cache.
        block_size: B.
        num_first: the number of blocks with first tokens, which every later token sees.
        num_freed: the number of blocks after them that tokens from a position on do not see.
    """
    lengths, start = [0], 0  # the start of the last run of blocks without a gap
    for index, block in enumerate(blocks):
        if block is None:
            if index < num_first:
                break
            start = index + 1
        elif start <= num_first + num_freed((index + 1) * block_size):
            lengths.append(index + 1)
    return lengths
