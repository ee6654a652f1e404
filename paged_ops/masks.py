"""Masks: one predicate on positions per feature.

``i`` is the position of a query, ``j`` of a key, both counted from the start of their sequence; they are integer
tensors that broadcast, and a predicate returns a bool tensor. A tile of keys is skipped when no pair in it is kept.
A mask of numbers is a predicate in :data:`NUMBERED`; its other parameters have the names of arguments of attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect


def causal(i: Tensor, j: Tensor) -> Tensor:
    """A query sees its own position and all earlier ones."""
    return j <= i


def window(i: Tensor, j: Tensor, sliding_window: int, num_first_tokens: int) -> Tensor:
    """A query sees the last positions, including its own, and the first tokens of its sequence."""
    return (i - j < sliding_window) | (j < num_first_tokens)


def chunk(i: Tensor, j: Tensor, attention_chunk: int) -> Tensor:
    """A query sees the keys of its own chunk (chunked-local attention, Llama-4)."""
    return i.div(attention_chunk, rounding_mode="floor") == j.div(attention_chunk, rounding_mode="floor")


# The masks of numbers, which hide keys; each is off if its first number is 0.
NUMBERED = (window, chunk)
# The arguments of each, and of all.
ARGUMENTS = {mask: tuple(inspect.signature(mask).parameters)[2:] for mask in NUMBERED}
NUMBERS = tuple(name for names in ARGUMENTS.values() for name in names)
# All arguments of attention that :func:`keep` applies.
NAMES = frozenset({"causal", *NUMBERS, "block_sparse", "bidirectional_ranges", "ranges_in_window"})


def oldest_key(i: int, window: int, chunk: int) -> int:
    """The first visible key of a causal query at position ``i`` with a window and a chunk (0: off), not counting the
    first tokens of ``num_first_tokens``."""
    of_window = i - window + 1 if window else 0
    of_chunk = i // chunk * chunk if chunk else 0
    return max(of_window, of_chunk, 0)


def bidirectional(i: Tensor, j: Tensor, start: Tensor | int, end: Tensor | int, later_only: bool) -> Tensor:
    """Two positions in one range ``start <= position < end`` see each other, whatever their order and the other masks
    (the image tokens of Gemma-3 and PaliGemma, the prefix of a prefix-LM). A range with a negative start is padding.
    With ``later_only`` the other masks hold for earlier keys (the image tokens of Gemma-4)."""
    both = (i >= start) & (i < end) & (j >= start) & (j < end)
    if later_only:
        both = both & (j > i)
    return both & (start >= 0)


def selected(j: Tensor, entries: Tensor, block_size: int) -> Tensor:
    """Whether the blocks of keys at positions ``j [n]`` are among the ``entries [q, G, k]`` of a row: bool
    ``[G, q, n]``."""
    return (entries.transpose(0, 1)[..., None] == j.div(block_size, rounding_mode="floor")).any(2)


class SparsePattern(NamedTuple):
    """Local blocks plus a vertical stride (Phi-3-small).

    With ``qb = i // block_size`` and ``kb = j // block_size`` a causal pair is kept when ``qb - kb < local_blocks`` or
    ``(kb + offset) % vert_stride == 0``. The offset is 1 with ``homo_head``; else it slides over the query heads, or
    over the key/value heads with ``homo_head_group`` (:func:`block_sparse_offsets`). ``rank`` and ``world_size`` belong
    to tensor parallelism. Source: the block-sparse attention of the Phi-3 technical report (arXiv:2404.14219).
    """

    block_size: int
    local_blocks: int
    vert_stride: int
    homo_head: int = 0
    homo_head_group: int = 0
    rank: int = 0
    world_size: int = 1


def BlockSparse(  # noqa: N802 - reads as a type, but the dispatcher and dynamo want a plain list of integers
    block_size: int,
    local_blocks: int,
    vert_stride: int,
    homo_head: bool = False,
    homo_head_group: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> list[int]:
    """The argument ``block_sparse`` of the attention ops, from the fields of :class:`SparsePattern`."""
    return [block_size, local_blocks, vert_stride, int(homo_head), int(homo_head_group), rank, world_size]


def check_block_sparse(params: Sequence[int], cache_block_size: int) -> SparsePattern:
    """The seven numbers as a :class:`SparsePattern`; a ValueError names the one that is wrong."""
    expect(len(params) == 7, "block_sparse", "7 numbers (see paged_ops.BlockSparse)", f"{len(params)}")
    fields: Any = params
    sparse = SparsePattern(*fields)
    expect(
        sparse.block_size > 0 and sparse.block_size % cache_block_size == 0,
        "block_sparse.block_size",
        f"a positive multiple of the cache's block size {cache_block_size}",
        sparse.block_size,
    )
    expect(sparse.local_blocks >= 0, "block_sparse.local_blocks", "0 or more", sparse.local_blocks)
    expect(sparse.vert_stride >= 1, "block_sparse.vert_stride", "1 or more", sparse.vert_stride)
    expect(
        not (sparse.homo_head and sparse.homo_head_group), "block_sparse", "one of homo_head, homo_head_group", "both"
    )
    ranks = f"0 <= rank < world_size = {sparse.world_size}"
    expect(0 <= sparse.rank < sparse.world_size, "block_sparse.rank", ranks, sparse.rank)
    return sparse


def block_sparse_offsets(sparse: SparsePattern, H: int, K: int) -> list[int]:
    """The offset of the vertical stride for each of this rank's H query heads (K key/value heads)."""
    if sparse.homo_head:
        return [1] * H
    heads = K if sparse.homo_head_group else H
    step = max(1, int(sparse.vert_stride / (sparse.world_size * heads)))
    per_head = [(sparse.rank * heads + head) * step + 1 for head in range(heads)]
    return [per_head[h * heads // H] for h in range(H)]


def block_sparse(i: Tensor, j: Tensor, offset: Tensor | int, sparse: SparsePattern) -> Tensor:
    """Local blocks or a vertical stripe; causality is not included."""
    qb = i.div(sparse.block_size, rounding_mode="floor")
    kb = j.div(sparse.block_size, rounding_mode="floor")
    return (qb - kb < sparse.local_blocks) | ((kb + offset) % sparse.vert_stride == 0)


def in_order(i: Tensor, j: Tensor, is_causal: bool, **numbers: int) -> Tensor:
    """Causality and the masks of numbers for positions that broadcast; ``numbers`` of :data:`NUMBERS`, 0 if not
    given."""
    kept = causal(i, j) if is_causal else torch.ones_like(i - j, dtype=torch.bool)
    for mask, names in ARGUMENTS.items():
        first, *others = (numbers.get(name, 0) for name in names)
        if first:
            kept = kept & mask(i, j, first, *others)
    return kept


def keep(
    i: Tensor,
    j: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    is_causal: bool,
    sparse: SparsePattern | None = None,
    ranges: Sequence[Sequence[Any]] = (),
    later_only: bool = False,
    **numbers: int,
) -> Tensor:
    """The mask of a call for positions ``i [q]`` and ``j [k]``: bool ``[H or 1, q, k]``.

    ``ranges``: pairs (start, end) of integers, or of tensors ``[q, 1]`` if each row has its own;
    ``later_only`` as in :func:`bidirectional`. ``numbers``: of :data:`NUMBERS`; 0 if not given.
    """
    i, j = i[None, :, None], j[None, None, :]
    kept = in_order(i, j, is_causal, **numbers)
    if sparse is not None:
        offset = torch.tensor(block_sparse_offsets(sparse, num_heads, num_kv_heads), device=i.device)[:, None, None]
        kept = kept & block_sparse(i, j, offset, sparse)
    for start, end in ranges:
        kept = kept | bidirectional(i, j, start, end, later_only)
    return kept
