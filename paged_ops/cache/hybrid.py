"""A cache of several pools: layers with different windows have blocks of their own, and layers with state have slots.

Layers with a sliding window or chunk free blocks that layers which see everything must keep. So each window or chunk
has a ``KVCache`` of its own, a *pool*, with its own block ids. A sequence is in all pools, and in the state slots
of layers that keep state instead of keys. ``HybridCache`` has the methods of ``KVCache``; each changes all pools or
none. The idea of pools by reach comes from vLLM's hybrid KV cache manager and from Jenga (Zhang et al. 2025,
arXiv:2503.18292).

Letters: N blocks, B tokens per block, L layers with attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from paged_ops.cache.allocator import BlockAllocator
from paged_ops.cache.block_pool import CacheStats, most_blocks_kept
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.lock import CacheLock
from paged_ops.cache.shard import UNSHARDED, TokenShard
from paged_ops.cache.states import StateCache
from paged_ops.checks import as_token_ids, at_least, expect, integers, is_integer
from paged_ops.layouts import Layout

_LONGEST = 2**24  # tokens of a sequence whose layers all keep state: it is one block of that size


class HybridCache:
    """``KVCache`` over several pools, and over a ``StateCache``: every method changes all of them or none.

    A prompt's prefix is taken from the cache as far as every pool has it. With states nothing is shared, as only the
    state after the last token is kept.

    Args:
        pools: caches of one device, dtype and block size, with different ids of blocks.
        pool_of_layer: for each layer with attention, in the model's order, the index of its pool; a pool's own layers
            are in the same order.
        states: slots of the layers that keep state.

    Attributes:
        layers: the tensors of the L layers in the model's order, then the tensors of ``states``: the caches of a step.
        block_size, device: of all pools.
        lock: held by calls of generation loops that change the cache.

    Raises:
        ValueError: the pools do not fit each other, or ``pool_of_layer``.
    """

    def __init__(
        self, pools: Sequence[KVCache], pool_of_layer: Sequence[int], states: StateCache | None = None
    ) -> None:
        expect(bool(pools) or states is not None, "pools", "one or more, or states", "none")
        self.pool_of_layer = tuple(pool_of_layer)
        self.states = states
        self.weights_version: Hashable = None  # as of a KVCache
        self.pools: tuple[KVCache | _NoKeys, ...] = tuple(pools)
        if states is not None and not pools:
            self.pools = (_NoKeys(states),)
        self.block_size = self.pools[0].block_size
        self.device = self.pools[0].device
        self.lock = CacheLock()
        # a commit in progress, for recover
        self._committing: tuple[Hashable, int, int | None, Sequence[int] | None] | None = None
        self.layers: list[Tensor] = []
        remaining = [list(pool.layers) for pool in self.pools]
        for index in self.pool_of_layer:
            known = 0 <= index < len(pools) and bool(remaining[index])
            expect(known, "pool_of_layer", f"each of {len(pools)} pools once for each of its layers", pool_of_layer)
            self.layers.append(remaining[index].pop(0))
        expect(not any(remaining), "pool_of_layer", "all layers of the pools", f"{len(self.layers)} of them")
        for pool in self.pools[1:]:
            expect(pool.block_size == self.block_size, "pools", f"blocks of {self.block_size} tokens", pool.block_size)
            expect(pool.device == self.device, "pools", f"pools on {self.device}, as the first", pool.device)
        if states is not None:
            expect(states.device == self.device, "states", f"states on {self.device}, as the pools", states.device)
            self.layers += states.tensors

    @classmethod
    def for_layers(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        *,
        value_head_size: int | Sequence[int] | None = None,
        sliding_window: int | Sequence[int] = 0,
        attention_chunk: int | Sequence[int] = 0,
        num_first_tokens: int | Sequence[int] = 0,
        num_window_blocks: int | None = None,
        num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        device: torch.device | str = "cpu",
        layout: Layout | str | None = None,
        states: StateCache | None = None,
        shard: TokenShard = UNSHARDED,
    ) -> HybridCache:
        """A cache for a model's L layers, with one pool per window (and its first tokens) or chunk; layers that see
        everything have the first.

        Args:
            num_layers, num_kv_heads, head_size, value_head_size, dtype, kv_cache_dtype, device, layout: as of
                ``KVCache``.
            sliding_window, attention_chunk: one number or one for each layer; 0 is everything.
            num_first_tokens: one number or one for each layer: layers with a window keep the blocks of this many first
                tokens. Without a window it changes nothing.
            num_blocks: N of the pool whose layers see everything, and of all pools if ``num_window_blocks`` is None.
            num_window_blocks: N of each pool with a window or chunk. :func:`blocks_within_reach` gives a number
                that always suffices.
            num_host_blocks: of each pool.
            states: slots of further layers.
            shard: as of ``KVCache``, for the layers that see everything; the others keep all their tokens.
        """
        given = {"num_kv_heads": num_kv_heads, "head_size": head_size, "value_head_size": value_head_size}
        sizes = {name: _of_layers(num_layers, value) for name, value in given.items() if value is not None}
        reach = {
            "sliding_window": _of_layers(num_layers, sliding_window),
            "attention_chunk": _of_layers(num_layers, attention_chunk),
            "num_first_tokens": _of_layers(num_layers, num_first_tokens),
        }
        for name, values in {**sizes, **reach}.items():
            expect(len(values) == num_layers, name, f"one for each of {num_layers} layers", len(values))
            for value in values:
                at_least(0, **{name: value})
        of_layers = [
            (window, chunk, first if window else 0) for window, chunk, first in zip(*reach.values(), strict=True)
        ]
        kinds, pool_of_layer = pools_by_reach(of_layers)
        used = num_window_blocks is None or any(map(any, kinds))
        expect(used, "num_window_blocks", "None, as no layer has a window or chunk", num_window_blocks)
        pools = []
        for index, kind in enumerate(kinds):
            members = [i for i, pool in enumerate(pool_of_layer) if pool == index]
            own = {name: [values[i] for i in members] for name, values in sizes.items()}
            of_kind = num_blocks if not any(kind) or num_window_blocks is None else num_window_blocks
            options: dict[str, Any] = {**own, "dtype": dtype, "device": device, "layout": layout}
            options["kv_cache_dtype"] = kv_cache_dtype
            options |= {**dict(zip(reach, kind, strict=True)), "num_host_blocks": num_host_blocks}
            options["shard"] = UNSHARDED if any(kind) else shard
            pools.append(KVCache(len(members), of_kind, block_size, **options))
        return cls(pools, pool_of_layer, states)

    # Questions

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences own, in all pools."""
        return sum(pool.num_used_blocks for pool in self.pools)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the cache can hold if there is no other."""
        return min(pool.max_seq_len for pool in self.pools)

    @property
    def reserves_in_parts(self) -> bool:
        """Whether some pool reserves a prompt's slots in chunks, and frees blocks."""
        return any(pool.reserves_in_parts for pool in self.pools)

    def num_given_back(self, seq_id: Hashable) -> int:
        """How many blocks the sequence has freed, in all pools."""
        return sum(pool.num_given_back(seq_id) for pool in self.pools)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self._parts)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host cache."""
        return sum(part.host_nbytes for part in self._parts)

    def stats(self) -> CacheStats:
        """The blocks of all pools together, and the tokens, which are the same in each. For one pool:
        ``pools[i].stats()``."""
        each = [pool.stats() for pool in self.pools]
        sums = {field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(CacheStats)}
        return CacheStats(**{**sums, "admitted_tokens": each[0].admitted_tokens, "hit_tokens": each[0].hit_tokens})

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self.pools[0]

    def num_tokens(self, seq_id: Hashable) -> int:
        """Tokens of the sequence: computed and waiting."""
        return self.pools[0].num_tokens(seq_id)

    def num_computed_tokens(self, seq_id: Hashable) -> int:
        """Tokens that are in the cache: shared at admission or committed."""
        return self.pools[0].num_computed_tokens(seq_id)

    def is_swapped_out(self, seq_id: Hashable) -> bool:
        """Whether the sequence is on the host."""
        return self.pools[0].is_swapped_out(seq_id)

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """The sequence's row of the first pool's block table; for another pool ``pools[i].block_ids``."""
        return self.pools[0].block_ids(seq_id)

    # Every part is asked first, then changed

    def admit(
        self,
        seq_id: Hashable,
        token_ids: Iterable[int],
        extra_key: Hashable = None,
        *,
        first_chunk: int | None = None,
        max_cached: int | None = None,
    ) -> int:
        """As ``KVCache.admit``: returns how many leading tokens every pool has in the cache already."""
        tokens = as_token_ids(token_ids)
        cached = self._common_length(tokens, extra_key, max_cached)
        options: dict[str, Any] = {"first_chunk": first_chunk, "max_cached": cached}
        for pool in self.pools:
            if seq_id in pool or not pool.can_admit(tokens, extra_key, **options):
                pool.admit(seq_id, tokens, extra_key, **options)  # says why not
        with _undone_by(lambda part: part.free(seq_id)) as done:
            if self.states is not None:
                self.states.admit(seq_id)
                done.append(self.states)
            for pool in self.pools:
                found = pool.admit(seq_id, tokens, extra_key, **options)
                done.append(pool)
                assert found == cached, "a pool has less of a prefix than it said"
        return cached

    def can_admit(
        self,
        token_ids: Iterable[int],
        extra_key: Hashable = None,
        *,
        first_chunk: int | None = None,
        max_cached: int | None = None,
        spare_blocks: int = 0,
    ) -> bool:
        """Whether ``admit`` would find its blocks and slot now, and leave ``spare_blocks`` free in each pool."""
        tokens = as_token_ids(token_ids)
        cached = self._common_length(tokens, extra_key, max_cached)
        options: dict[str, Any] = {"first_chunk": first_chunk, "max_cached": cached, "spare_blocks": spare_blocks}
        has_slot = self.states is None or self.states.num_free_slots > 0
        return has_slot and all(pool.can_admit(tokens, extra_key, **options) for pool in self.pools)

    def cached_lengths(self, token_ids: Iterable[int], extra_key: Hashable = None) -> list[int]:
        """The numbers of leading tokens that ``admit`` could find in every pool now, from 0 up."""
        tokens = as_token_ids(token_ids)
        if self.states is not None:
            return [0]
        lengths = [pool.cached_lengths(tokens, extra_key) for pool in self.pools]
        return sorted(set(lengths[0]).intersection(*lengths[1:]))

    def reserve(self, seq_id: Hashable, num_tokens: int) -> None:
        """As ``KVCache.reserve``."""
        for pool in self.pools:
            if not is_integer(num_tokens) or num_tokens > pool.num_reservable(seq_id):
                pool.reserve(seq_id, num_tokens)  # says why not
        for pool in self.pools:
            pool.reserve(seq_id, num_tokens)

    def num_reservable(self, seq_id: Hashable) -> int:
        """How many of the tokens that are not computed have slots, or would find the blocks for them now."""
        return min(pool.num_reservable(seq_id) for pool in self.pools)

    def append(self, seq_id: Hashable, token_ids: Iterable[int]) -> None:
        """As ``KVCache.append``."""
        tokens = as_token_ids(token_ids)
        for pool in self.pools:
            if not pool.can_append(seq_id, len(tokens)):
                pool.append(seq_id, tokens)  # says why not
        for pool in self.pools:
            pool.append(seq_id, tokens)

    def can_append(self, seq_id: Hashable, num_tokens: int = 1) -> bool:
        """Whether ``append`` of that many tokens would find the blocks it needs now."""
        return all(pool.can_append(seq_id, num_tokens) for pool in self.pools)

    def commit(self, seq_id: Hashable, num_written: int, token_ids: Sequence[int] | None = None) -> None:
        """As ``KVCache.commit``; the state that the step wrote is the sequence's from now on."""
        for pool in self.pools:
            pool.check_commit(seq_id, num_written, token_ids)
        row = None
        if self.states is not None and num_written:
            row = self.states.row(seq_id) ^ 1
        self._committing = seq_id, self.num_computed_tokens(seq_id) + num_written, row, token_ids
        self._finish_commit()

    def rollback(self, seq_id: Hashable) -> None:
        """Drops the tokens that were not committed; the state is always the last commit's."""
        for pool in self.pools:
            pool.rollback(seq_id)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """As ``KVCache.fork``; the child gets a copy of the parent's state."""
        with _undone_by(lambda part: part.free(child_id)) as done:
            for part in self._parts:
                part.fork(parent_id, child_id)
                done.append(part)

    def free(self, seq_id: Hashable) -> None:
        """Removes a sequence, swapped out or not."""
        for part in self._parts:
            part.free(seq_id)

    def reset(self, free_sequences: bool = False) -> None:
        """As ``KVCache.reset``."""
        for pool in self.pools:
            pool.reset(free_sequences)
        if self.states is not None:
            self.states.reset()
        self.weights_version = None

    def flush_copies(self) -> None:
        """Does the queued copy-on-write copies of all pools: call it before each step that writes."""
        for pool in self.pools:
            pool.flush_copies()

    def swap_out(self, seq_id: Hashable) -> None:
        """As ``KVCache.swap_out``."""
        for pool in self.pools:
            if not pool.can_swap_out(seq_id):
                pool.swap_out(seq_id)  # says why not
        with _undone_by(lambda part: part.swap_in(seq_id)) as done:
            for part in reversed(self._parts):  # the states first: they were not asked
                part.swap_out(seq_id)
                done.append(part)

    def swap_in(self, seq_id: Hashable) -> None:
        """As ``KVCache.swap_in``."""
        for pool in self.pools:
            if not pool.can_swap_in(seq_id):
                pool.swap_in(seq_id)  # says why not
        with _undone_by(lambda part: part.swap_out(seq_id)) as done:
            for part in reversed(self._parts):
                part.swap_in(seq_id)
                done.append(part)

    def can_swap_out(self, seq_id: Hashable) -> bool:
        """Whether ``swap_out`` would find the room it needs now."""
        has_slot = self.states is None or self.states.num_free_host_slots > 0
        return all(pool.can_swap_out(seq_id) for pool in self.pools) and has_slot  # a pool knows the seq_id

    def can_swap_in(self, seq_id: Hashable, *, num_tokens: int = 0, spare_blocks: int = 0) -> bool:
        """As ``KVCache.can_swap_in``, in each pool."""
        has_slot = self.states is None or self.states.num_free_slots > 0
        options = {"num_tokens": num_tokens, "spare_blocks": spare_blocks}
        return all(pool.can_swap_in(seq_id, **options) for pool in self.pools) and has_slot

    def synchronize(self) -> None:
        """Waits until all swaps are done; see ``KVCache.synchronize``."""
        for part in self._parts:
            part.synchronize()

    def recover(self) -> None:
        """Repairs the bookkeeping after an exception in the middle of a call, as ``KVCache.recover``: an interrupted
        call then has happened in all pools, or in none."""
        for pool in self.pools:
            pool.recover()
        self._finish_commit()
        every = {seq_id for pool in self.pools for seq_id in pool.seq_ids}
        if self.states is not None:
            every |= set(self.states.seq_ids)
        for seq_id in every:
            holders = [part for part in self._parts if seq_id in part]
            if len(holders) < len(self._parts):  # it was being added or removed
                for part in holders:
                    part.free(seq_id)
                continue
            swapped = [part.is_swapped_out(seq_id) for part in self._parts]
            if any(swapped) and not all(swapped):  # nothing else has run, so its blocks are still free
                for part, is_out in zip(self._parts, swapped, strict=True):
                    if is_out:
                        part.swap_in(seq_id)
            if not all(swapped):
                length = min(pool.num_tokens(seq_id) for pool in self.pools)
                for pool in self.pools:
                    pool.truncate(seq_id, length)

    def __copy__(self) -> NoReturn:
        raise TypeError("HybridCache: a shallow copy would own the same blocks a second time; use copy.deepcopy")

    @property
    def _parts(self) -> list[Any]:
        return [*self.pools] if self.states is None else [*self.pools, self.states]

    def _common_length(self, tokens: list[int], extra_key: Hashable, max_cached: int | None) -> int:
        lengths = self.cached_lengths(tokens, extra_key)
        most = lengths[-1] if max_cached is None else integers(0, max_cached=max_cached)[0]
        return max(length for length in lengths if length <= most)

    def _finish_commit(self) -> None:
        if self._committing is None:
            return
        seq_id, num_computed, row, token_ids = self._committing
        for pool in self.pools:
            left = num_computed - pool.num_computed_tokens(seq_id)
            pool.commit(seq_id, left, token_ids if left else None)
        if self.states is not None and row is not None and self.states.row(seq_id) != row:
            self.states.commit(seq_id)
        self._committing = None


class _NoKeys(BlockAllocator):
    """The pool of a model whose layers all keep state. It only counts tokens: a sequence is one block, without
    memory."""

    states = None
    shard = UNSHARDED
    nbytes = host_nbytes = 0

    def __init__(self, states: StateCache) -> None:
        super().__init__(states.num_slots, _LONGEST, states.num_host_slots)
        self.device = states.device
        self.layers: list[Tensor] = []
        self.host_layers: list[Tensor] = []

    @property
    def max_seq_len(self) -> int:
        return _LONGEST

    def can_admit(self, *args: Any, spare_blocks: int = 0, **kwargs: Any) -> bool:
        return super().can_admit(*args, **kwargs)  # no sequence ever needs a second block

    def can_swap_in(self, seq_id: Hashable, *, num_tokens: int = 0, spare_blocks: int = 0) -> bool:
        return super().can_swap_in(seq_id)

    def flush_copies(self) -> None:
        self.take_copies()

    def swap_out(self, seq_id: Hashable) -> list[tuple[int, int]]:
        self.flush_copies()
        return super().swap_out(seq_id)

    def try_copies(self) -> None:
        """There are no blocks to copy."""

    def synchronize(self) -> None:
        """There are no swaps to wait for."""


@contextmanager
def _undone_by(undo: Callable[[Any], object]) -> Iterator[list[Any]]:
    """If an exception leaves the block, what is in the list is undone, last first."""
    done: list[Any] = []
    try:
        yield done
    except BaseException:
        for part in reversed(done):
            undo(part)
        raise


def _of_layers(num_layers: int, given: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, Iterable) else (given,) * num_layers


def pools_by_reach(reaches: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The distinct reaches (window, chunk, ...) of the layers, and for each layer the index of its reach. All zeros,
    which sees everything, is first; the others are in the order of their first layers."""
    kinds = sorted(dict.fromkeys(reaches), key=any)
    return kinds, [kinds.index(reach) for reach in reaches]


def blocks_within_reach(
    max_num_seqs: int,
    max_num_tokens: int,
    block_size: int,
    *,
    sliding_window: int = 0,
    attention_chunk: int = 0,
    num_first_tokens: int = 0,
) -> int:
    """The number of blocks that always suffices for a pool of this window or chunk.

    Each of ``max_num_seqs`` sequences keeps the blocks that its window (chunk) touches, and with a window the blocks of
    its ``num_first_tokens``. A step of ``max_num_tokens`` tokens adds new blocks before it frees old ones. More blocks
    keep more prefixes.
    """
    at_least(0, sliding_window=sliding_window, attention_chunk=attention_chunk, num_first_tokens=num_first_tokens)
    expect(sliding_window > 0 or attention_chunk > 0, "sliding_window", "one, or an attention_chunk", sliding_window)
    at_least(1, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, block_size=block_size)
    kept = most_blocks_kept(block_size, sliding_window, attention_chunk, num_first_tokens)
    return max_num_seqs * (kept + 1) + max_num_tokens // block_size
