"""One step's batch, as the ops and a model read it: tensors on the device, and numbers on the host.

Letters: T tokens of the batch (padded), S sequences (padded), B tokens per block, M columns of a block table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from paged_ops.cache.shard import UNSHARDED, TokenShard, widest
from paged_ops.checks import at_least, expect


@dataclass
class CascadeMetadata:
    """What :func:`paged_ops.cascade_attention` takes for a step whose sequences all begin with the same blocks.

    The tensors lie in persistent device buffers, so a captured graph may read them.
    """

    common_prefix_len: int  # tokens, a multiple of B
    prefix_block_table: Tensor  # int32 [1, M]: columns past the prefix may hold anything
    prefix_len: Tensor  # int32 [1]: common_prefix_len
    suffix_block_tables: Tensor  # int32 [S, M]: each sequence's blocks after the prefix
    suffix_lens: Tensor  # int32 [S]: seq_lens - common_prefix_len, 0 for padding


@dataclass
class PoolMetadata:
    """Where one pool of a :class:`paged_ops.HybridCache` holds the step's sequences."""

    block_tables: Tensor  # int32 [S, M]
    slot_mapping: Tensor  # int64 [T]


@dataclass
class ContextMetadata:
    """The keys that a rank attends to if the cache's tokens are sharded over ranks; see
    :mod:`paged_ops.parallel.context`.

    In a step of at most one token per sequence, each rank attends to all tokens that it holds, the step's included:
    ``history_lens`` and ``own_tables`` are None. In any other step, it attends to its tokens of the history, and
    separately to the step's tokens.
    """

    lens: Tensor  # int32 [S]: the tokens of each sequence, this step's among them, that this rank holds
    history_lens: Tensor | None  # int32 [S]: of these, the tokens that were in the cache before this step
    own_tables: Tensor | None  # int32 [S, T]: the step's tokens of each sequence, by their rows, as blocks of one token
    shards: tuple[TokenShard, ...]  # of each pool


@dataclass(kw_only=True)
class AttentionMetadata:
    """One step's batch, as the ops and a model read it.

    A pytree whose every field is a leaf, integers too: it can be an argument of a compiled, exported or captured
    function. The integers are for the host. Do not read them inside a graph, which would be compiled again for each
    value.
    ``torch.export`` pins even an integer that is not read, unless its entry of ``dynamic_shapes`` (a list over
    ``torch.utils._pytree.tree_leaves(metadata)``) is ``torch.export.Dim.DYNAMIC``.

    The tensors follow the rules of padding: padding sequences come last, with length 0 and an empty query range, and so
    do padding tokens, with slot -1 and position 0. Block-table entries past a sequence's need may hold anything.

    Attributes:
        query_start_loc: int32 ``[S + 1]``: sequence s owns rows ``query_start_loc[s] : query_start_loc[s + 1]``.
        query_start_loc_cpu: the same numbers on the host.
        seq_lens: int32 ``[S]``: tokens in the cache, this step's among them.
        seq_lens_cpu: the same numbers on the host.
        num_reqs: sequences that are not padding.
        num_actual_tokens: tokens that are not padding.
        max_query_len: most tokens scheduled for one sequence.
        max_seq_len: largest of ``seq_lens``.
        block_tables: int32 ``[S, M]``.
        slot_mapping: int64 ``[T]``: ``block * B + offset`` of each token in the cache.
        num_computed_tokens_cpu: int32 ``[S]``, host: tokens that were in the cache before this step.
        positions: int64 ``[T]``: the position of each token in its sequence, for rotary embeddings.
        state_slots: int32 ``[S]`` or None: the row of :class:`paged_ops.cache.StateCache` that holds each sequence's
            state; the step writes the next one to row ``state_slots ^ 1``. 0 for padding.
        bidirectional_ranges: int32 ``[S, R, 2]`` or None: as :func:`paged_attention` takes them.
        cascade: present when the step was built with a common prefix (and without ``fast_build``). It is about the
            first pool alone.
        other_pools: of a cache with several pools, what ``block_tables`` and ``slot_mapping`` are in the second and
            further ones, else None; :meth:`pool` gives them by number.
        context: present when the cache's tokens are sharded over ranks. ``slot_mapping`` then is -1 for tokens of other
            ranks, and all other tensors are the same on all ranks.
    """

    # torch.export replaces the names of inputs in its guards as strings, in this order: x_cpu must come before x.
    query_start_loc_cpu: Tensor
    query_start_loc: Tensor
    seq_lens_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_tables: Tensor
    slot_mapping: Tensor
    num_computed_tokens_cpu: Tensor
    positions: Tensor
    state_slots: Tensor | None = None
    cascade: CascadeMetadata | None = None
    other_pools: tuple[PoolMetadata, ...] | None = None
    bidirectional_ranges: Tensor | None = None
    context: ContextMetadata | None = None

    @property
    def begins_any(self) -> bool:
        """Whether some sequence's first token is in the step; read on the host."""
        query_lens = self.query_start_loc_cpu.diff()
        return bool(((self.seq_lens_cpu == query_lens) & (query_lens > 0)).any())

    def pool(self, index: int) -> PoolMetadata:
        """Block tables and slots for the layers of one pool; all else is the same for all layers."""
        if index == 0:
            return PoolMetadata(self.block_tables, self.slot_mapping)
        assert self.other_pools is not None, "the step was built for a cache of one pool"
        return self.other_pools[index - 1]


# Named and declared safe, so that an exported program that takes one can be saved and loaded.
pytree.register_dataclass(CascadeMetadata, serialized_type_name="paged_ops.CascadeMetadata")
pytree.register_dataclass(PoolMetadata, serialized_type_name="paged_ops.PoolMetadata")
pytree.register_dataclass(ContextMetadata, serialized_type_name="paged_ops.ContextMetadata")
pytree.register_dataclass(AttentionMetadata, serialized_type_name="paged_ops.AttentionMetadata")
torch.serialization.add_safe_globals([CascadeMetadata, PoolMetadata, ContextMetadata, TokenShard, AttentionMetadata])


class GraphSupport(enum.IntEnum):
    """Which batches a captured graph may serve. Ordered: a model's level is the ``min`` over its layers."""

    NEVER = 0  # none
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # one query token for each request
    UNIFORM_BATCH = 2  # the same number of query tokens for each request (speculative verification)
    ALWAYS = 3  # any, mixtures of prefill and decode included


def advance_decodes(metadata: AttentionMetadata, block_size: int) -> None:
    """Make of a decode step the next one, on the device: each live request has one token more.

    ``seq_lens`` and ``positions`` (and a cascade's ``suffix_lens``) grow by 1, ``slot_mapping`` names the next slot, in
    each pool, and ``state_slots`` the rows that this step wrote; padding stays padding. No copy, no sync: it can be
    captured, and a compiler fuses it into one kernel. Only device tensors change: the numbers on the host still
    describe the step that was built.

    Args:
        metadata: a step of one token for each request, S = T, built with a ``lookahead`` that covers the tokens by
            which it is advanced.
        block_size: B.

    Raises:
        ValueError: S and T differ, so it is no decode step.
    """
    S, T = len(metadata.seq_lens), len(metadata.slot_mapping)
    if S != T:  # in plain Python, as this is compiled with open sizes
        raise ValueError(f"metadata: expected one token for each request, padding included, got S = {S}, T = {T}")
    live = metadata.seq_lens > 0
    positions = metadata.positions + live
    last_column = metadata.block_tables.shape[1] - 1
    column = torch.div(positions, block_size, rounding_mode="trunc").clamp(max=last_column)  # no request goes past it
    context, pools = metadata.context, (metadata.pool(0), *(metadata.other_pools or ()))
    shards = (UNSHARDED,) * len(pools) if context is None else context.shards
    for pool, shard in zip(pools, shards, strict=True):
        block = pool.block_tables.gather(1, column[:, None])[:, 0]
        pool.slot_mapping.copy_(torch.where(live, shard.slots(block, positions, block_size), -1))
    if metadata.state_slots is not None:
        metadata.state_slots.bitwise_xor_(live)
    metadata.positions.copy_(positions)
    metadata.seq_lens.add_(live)
    if metadata.cascade is not None:
        metadata.cascade.suffix_lens.add_(live)
    if context is not None:
        context.lens.copy_(widest(context.shards).lens(metadata.seq_lens, block_size))


def split_decodes_and_prefills(metadata: AttentionMetadata, decode_threshold: int = 1) -> tuple[int, int, int, int]:
    """Count the two parts of a batch whose decodes come first.

    A request with at most ``decode_threshold`` query tokens is a decode, any other a prefill. Reads the host tensors of
    the first ``num_reqs`` requests.

    Args:
        metadata: the step.
        decode_threshold: most query tokens of a decode: 1, or 1 + the drafted tokens of speculation.

    Returns:
        ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)``, adding up to num_reqs and
        num_actual_tokens.

    Raises:
        ValueError: a decode comes after a prefill: reorder the batch before it is built.
    """
    starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1]
    at_least(0, decode_threshold=decode_threshold)
    is_decode = starts.diff() <= decode_threshold
    num_decodes = int(is_decode.sum())
    if not bool(is_decode[:num_decodes].all()):
        ordered = f"requests of at most decode_threshold = {decode_threshold} tokens first (reorder the batch)"
        expect(False, "metadata", ordered, f"query lengths {starts.diff().tolist()}")
    num_decode_tokens = int(starts[num_decodes])
    num_prefill_tokens = metadata.num_actual_tokens - num_decode_tokens
    return num_decodes, metadata.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens
