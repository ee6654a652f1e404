"""A random walk of calls on a cache, whose bookkeeping and tensor contents are checked at every step."""

import copy
import functools
import random
import zlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_ops.cache import HybridCache, KVCache, StateCache
from paged_ops.cache.allocator import BlockAllocator, BlockPool, OutOfBlocks
from paged_ops.layouts import Layout, paged_kv, split_joined_cache, split_kv_cache


def state(cache: BlockAllocator | HybridCache | StateCache) -> object:
    """All bookkeeping, to compare before and after a refused call."""
    if isinstance(cache, StateCache):
        return copy.deepcopy(cache._slots)
    if isinstance(cache, HybridCache):
        return [state(part) for part in cache._parts]
    pools = [
        (pool.ref_counts, pool._free, list(pool._idle), pool._block_of, pool._prefix_of)
        for pool in (cache.pool, cache.host_pool)
    ]
    seqs = {
        key: (seq.tokens, seq.blocks, seq.num_computed, seq.num_reserved, seq.prefixes, seq.num_freed, seq.swapped)
        for key, seq in cache._sequences.items()
    }
    memo = {id(prefix): prefix for pool in pools for prefix in pool[4] if prefix is not None}
    memo |= {id(prefix): prefix for seq in cache._sequences.values() for prefix in seq.prefixes}
    return copy.deepcopy((pools, seqs, cache._copies, cache.stats()), memo)


@functools.cache
def _oldest_seen(num_computed: int, window: int, chunk: int) -> int:
    """The first key that a query at position num_computed or later sees, itself at the latest; by trying them."""
    for key in range(num_computed):
        for query in range(num_computed, key + (window or 10**9)):
            if not chunk or key // chunk == query // chunk:
                return key
            if query // chunk > key // chunk:
                break
    return num_computed


def oldest_seen(cache: BlockAllocator, num_computed: int) -> int:
    return _oldest_seen(num_computed, cache.sliding_window, cache.attention_chunk)


def check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    """No block is lost, none is in two places, and each has exactly as many references as owners."""
    assert [owners[block] for block in range(pool.num_blocks)] == pool.ref_counts
    places = [*pool._free, *pool._idle, *(block for block, count in enumerate(pool.ref_counts) if count)]
    assert sorted(places) == list(range(pool.num_blocks))
    assert pool.num_free == len(pool._free) + len(pool._idle)
    known = {prefix: block for block, prefix in enumerate(pool._prefix_of) if prefix is not None}
    assert known == pool._block_of
    assert all(pool._prefix_of[block] is not None for block in pool._idle)
    assert all(pool._prefix_of[block] is None for block in pool._free)


def check_invariants(cache: BlockAllocator) -> None:
    device: Counter[int] = Counter(cache._copies.values())
    host: Counter[int] = Counter()
    for seq in cache._sequences.values():
        (host if seq.swapped else device).update(seq.blocks)
        num_tokens = seq.num_computed if seq.swapped else seq.num_reserved
        assert seq.num_computed <= seq.num_reserved <= len(seq.tokens)
        if seq.num_freed:
            gap_end = (cache._num_first + seq.num_freed) * cache.block_size
            assert gap_end <= oldest_seen(cache, seq.num_computed)
        assert seq.num_freed + len(seq.blocks) == -(-num_tokens // cache.block_size)
        assert len(set(seq.blocks)) == len(seq.blocks)
        assert len(seq.prefixes) - 1 == seq.num_computed // cache.block_size
    check_pool(cache.pool, device)
    check_pool(cache.host_pool, host)
    assert not set(cache._copies) & set(cache._copies.values())
    for seq in cache._sequences.values():
        if not seq.swapped and seq.num_computed < len(seq.tokens):  # nobody else owns a block that it is going to write
            for block in seq.blocks[seq.num_computed // cache.block_size - seq.num_freed :]:
                assert device[block] - list(cache._copies.values()).count(block) == 1
    stats = cache.stats()
    assert stats.used_blocks == sum(count > 0 for count in device.values())
    assert stats.used_blocks + stats.free_blocks == stats.num_blocks == cache.num_blocks
    assert stats.shared_blocks == sum(count > 1 for count in device.values())
    assert stats.host_used_blocks == sum(count > 0 for count in host.values())


@dataclass
class Expected:
    """What the model of the walk knows of one sequence; `contents[p]` stands for the keys and values of token p."""

    extra_key: int
    tokens: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    num_computed: int = 0
    swapped: bool = False

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:  # a token's keys and values depend on everything before it
            before = self.contents[-1] if self.contents else self.extra_key
            self.contents.append(zlib.crc32(f"{token}".encode(), before))
            self.tokens.append(token)

    def truncate(self) -> None:
        del self.tokens[self.num_computed :], self.contents[self.num_computed :]


class Walk:
    """Random calls on a cache, a model of what it should hold, and a comparison after every call."""

    def __init__(self, cache: KVCache | HybridCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.live: dict[int, Expected] = {}
        self.history: list[Expected] = []
        self.next_id = 0
        self.events: Counter[str] = Counter()
        self.pools: Any = cache.pools
        self.modulus = 1 << 20
        if any(layer.dtype.itemsize == 1 for layer in cache.layers):
            self.modulus = 255
        self.device_views = [self.views(pool, pool.layers) for pool in self.pools]
        self.host_views = [self.views(pool, pool.host_layers) for pool in self.pools]

    def views(self, pool: KVCache, layers: list[Tensor]) -> list[Tensor]:
        """Keys and values of each layer with dimensions [N, B, ...], fp8 as its bits."""
        if not layers:
            return []
        if pool.dtype.itemsize == 1:
            layers = [layer.view(torch.uint8) for layer in layers]
        pairs = []
        sizes = zip(pool.num_kv_heads, pool.head_size, pool.value_head_size, strict=True)
        for layer, (K, D, Dv) in zip(layers, sizes, strict=True):
            if pool.layout is Layout.LATENT:
                pairs.append(paged_kv(layer, None, Dv)._replace(value=paged_kv(layer).value))
                continue
            if D != Dv:
                pairs.append(paged_kv(*split_joined_cache(layer, D)))
            elif pool.layout is Layout.X_PACKED:
                pairs.append(paged_kv(*split_kv_cache(layer, K, D)))
            else:
                pairs.append(paged_kv(layer))
            assert (pairs[-1].num_kv_heads, pairs[-1].head_size, pairs[-1].value_head_size) == (K, D, Dv)
        return [view for pair in pairs for view in pair]

    def values(self, contents: list[int], channel: int) -> Tensor:
        """Differs between layers and between keys and values; never 0, which is memory that nobody wrote."""
        return torch.tensor([(content + 7919 * channel) % self.modulus + 1 for content in contents])

    def write(self, seq_id: int, stop: int) -> None:
        """What the model's step does: writes the reserved tokens up to `stop` where the cache says."""
        expected = self.live[seq_id]
        for pool, views in zip(self.pools, self.device_views, strict=True):
            slots = torch.tensor(pool.slots(seq_id, stop=stop), device=self.cache.device)
            self.fill(pool, views, slots, expected.contents[expected.num_computed : stop])
        if self.cache.states is not None:
            for channel, tensor in enumerate(self.cache.states.tensors):
                row = self.cache.states.row(seq_id) ^ 1
                tensor[row] = int(self.values(expected.contents[stop - 1 : stop], channel))

    def write_all(self, seq_id: Hashable, tokens: list[int]) -> None:
        """For a sequence that a test made itself: what its blocks hold."""
        expected = self.live[seq_id] = Expected(0)
        expected.extend(tokens)
        for pool, views in zip(self.pools, self.device_views, strict=True):
            self.fill(pool, views, torch.tensor(pool.slots(seq_id, 0, len(tokens))), expected.contents)
        expected.num_computed = len(tokens)

    def fill(self, pool: KVCache, views: list[Tensor], slots: Tensor, contents: list[int]) -> None:
        size = pool.block_size
        for channel, view in enumerate(views):
            values = self.values(contents, channel).to(view.device, view.dtype)
            view[slots // size, slots % size] = values.view(-1, *[1] * (view.dim() - 2)).expand(-1, *view.shape[2:])

    def check_contents(self, pool: KVCache, device_views: list[Tensor], host_views: list[Tensor]) -> None:
        size = pool.block_size
        for views, swapped in ((device_views, False), (host_views, True)):
            pending = {} if swapped else pool._copies
            slots: list[int] = []
            contents: list[int] = []
            for seq_id, expected in self.live.items():
                if expected.swapped == swapped:
                    # What a block waits for is still, unharmed, in the source of its copy.
                    seq = pool._sequences[seq_id]
                    blocks = [pending.get(block, block) for block in seq.blocks]
                    oldest = oldest_seen(pool, expected.num_computed)
                    first = min(pool.num_first_tokens if pool.sliding_window else 0, oldest)
                    gone = seq.num_freed
                    for p in [*range(first), *range(oldest, expected.num_computed)]:
                        in_window = p >= (pool._num_first + gone) * size
                        slots.append(blocks[p // size - gone * in_window] * size + p % size)
                        contents.append(expected.contents[p])
            for channel, view in enumerate(views):
                where = torch.tensor(slots, dtype=torch.int64, device=view.device)
                found = view[where // size, where % size].flatten(1).long().cpu()
                assert (found == self.values(contents, channel)[:, None]).all(), f"wrong content in {channel=}"

    def check_states(self, states: StateCache) -> None:
        """A state is what the last token that was committed left, or zeros."""
        slots = [slot.index for slot in states._slots.values() if not slot.swapped]
        assert len({*slots}) == len(slots) == states.num_slots - states.num_free_slots
        assert all(1 <= slot <= states.num_slots for slot in slots)
        slots = [slot.index for slot in states._slots.values() if slot.swapped]
        assert len({*slots}) == len(slots) == states.num_host_slots - states.num_free_host_slots
        assert all(0 <= slot < states.num_host_slots for slot in slots)
        for seq_id, expected in self.live.items():
            assert states.is_swapped_out(seq_id) == expected.swapped
            tensors = states.host_tensors if expected.swapped else states.tensors
            row = states._slots[seq_id].index if expected.swapped else states.row(seq_id)
            last = expected.contents[max(expected.num_computed - 1, 0) : expected.num_computed]
            for channel, tensor in enumerate(tensors):
                assert (tensor[row] == (self.values(last, channel) if last else 0)).all(), "wrong state"

    def check(self) -> None:
        for pool, views, host_views in zip(self.pools, self.device_views, self.host_views, strict=True):
            check_invariants(pool)
            assert pool._sequences.keys() == self.live.keys()
            for seq_id, expected in self.live.items():
                assert pool.num_tokens(seq_id) == len(expected.tokens)
                assert pool.num_computed_tokens(seq_id) == expected.num_computed
                assert pool.is_swapped_out(seq_id) == expected.swapped
                assert pool._sequences[seq_id].tokens == expected.tokens
            self.check_contents(pool, views, host_views)
        if self.cache.states is not None:
            self.check_states(self.cache.states)

    def attempt(self, name: str, possible: bool, *args: object, **options: object) -> bool:
        """Calls a method whose predicate said whether blocks suffice; a refusal must change nothing."""
        if possible:
            self.result = getattr(self.cache, name)(*args, **options)
            self.events[name] += 1
            return True
        before = state(self.cache)
        with pytest.raises(OutOfBlocks, match=r"expected (.* free blocks, got|a free slot)"):
            getattr(self.cache, name)(*args, **options)
        after = state(self.cache)
        assert before == after
        self.events[f"{name} refused"] += 1
        return False

    def pick(self, swapped: bool = False) -> int | None:
        ids = [seq_id for seq_id, expected in self.live.items() if expected.swapped == swapped]
        return self.random.choice(ids) if ids else None

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, most))]

    def admit(self) -> None:
        size = min(self.cache.block_size, 600)
        extra_key, prompt = self.random.choice([0, 0, 0, 1]), []
        if self.history and self.random.random() < 0.8:
            known = self.random.choice(self.history)
            extra_key, prompt = known.extra_key, known.tokens[: self.random.randint(0, len(known.tokens))]
        prompt = (prompt + self.tokens(2 * size))[: 6 * size]
        expected, seq_id, options = Expected(extra_key), self.next_id, {}
        if any(pool._forgets for pool in self.pools):
            options["first_chunk"] = self.random.choice([None, 1, self.random.randint(1, 2 * size)])
            if self.random.random() < 0.3:
                options["max_cached"] = self.random.randint(0, len(prompt))
        lengths = self.cache.cached_lengths(prompt, extra_key)
        possible = self.cache.can_admit(prompt, extra_key, **options)
        if self.attempt("admit", possible, seq_id, prompt, extra_key, **options):
            expected.extend(prompt)
            assert self.result == max(n for n in lengths if n <= options.get("max_cached", len(prompt)))
            expected.num_computed = self.result
            assert self.result % size == 0
            assert self.result < len(prompt)
            self.live[seq_id] = expected
            self.history = [*self.history[-20:], expected]
            self.next_id += 1

    def append(self) -> None:
        if (seq_id := self.pick()) is not None:
            tokens = self.tokens(3 if self.random.random() < 0.7 else min(self.cache.block_size, 600) + 1)
            if self.attempt("append", self.cache.can_append(seq_id, len(tokens)), seq_id, tokens):
                self.live[seq_id].extend(tokens)

    def step(self) -> None:
        """One step of an engine: the copies, then for some sequences a part of their reserved tokens."""
        self.cache.flush_copies()
        for seq_id, expected in self.live.items():
            if expected.swapped:
                continue
            possible = self.cache.num_reservable(seq_id)
            if possible and self.random.random() < 0.6:
                num_tokens = self.random.choice([possible, self.random.randint(1, possible)])
                self.cache.reserve(seq_id, num_tokens)
                stop = expected.num_computed + num_tokens
                self.write(seq_id, stop)
                self.cache.commit(seq_id, stop - expected.num_computed)
                expected.num_computed = stop
                self.events["commit"] += 1

    def rollback(self) -> None:
        if (seq_id := self.pick()) is not None and self.live[seq_id].num_computed:
            self.cache.rollback(seq_id)
            self.live[seq_id].truncate()
            self.events["rollback"] += 1

    def fork(self) -> None:
        if (parent := self.pick()) is None:
            return
        expected = self.live[parent]
        if expected.num_computed < len(expected.tokens):
            with pytest.raises(ValueError, match="not committed"):
                self.cache.fork(parent, self.next_id)
            return
        possible = self.cache.states is None or self.cache.states.num_free_slots > 0
        if self.attempt("fork", possible, parent, self.next_id):
            self.live[self.next_id] = copy.deepcopy(expected)
            self.next_id += 1

    def free(self) -> None:
        if (seq_id := self.pick(swapped=self.random.random() < 0.2)) is not None:
            self.cache.free(seq_id)
            self.events["free swapped" if self.live.pop(seq_id).swapped else "free"] += 1

    def swap_out(self) -> None:
        if (seq_id := self.pick()) is not None:
            self.cache.flush_copies()
            if self.attempt("swap_out", self.cache.can_swap_out(seq_id), seq_id):
                self.live[seq_id].swapped = True
                self.cache.synchronize()

    def swap_in(self) -> None:
        seq_id = self.pick(swapped=True)
        if seq_id is not None and self.attempt("swap_in", self.cache.can_swap_in(seq_id), seq_id):
            self.live[seq_id].swapped = False

    def run(self, steps: int) -> None:
        moves = [self.admit, self.append, self.step, self.rollback, self.fork, self.free, self.swap_out, self.swap_in]
        for _ in range(steps):
            refusals = self.events["append refused"] + self.events["admit refused"]
            self.random.choices(moves, weights=[4, 8, 6, 0.5, 2, 2, 1.5, 3])[0]()
            if self.events["append refused"] + self.events["admit refused"] > refusals:
                self.random.choice([self.free, self.free, self.swap_out])()  # what an engine does about it
            self.check()
        for seq_id in list(self.live):
            self.cache.free(seq_id)
            del self.live[seq_id]
        self.cache.flush_copies()
        self.check()
        for pool in self.pools:
            assert pool.pool.num_free == pool.num_blocks
            assert pool.host_pool.num_free == pool.host_pool.num_blocks


EVENTS = ("admit", "append", "commit", "rollback", "fork", "free", "free swapped", "swap_out", "swap_in")
REFUSALS = ("admit refused", "append refused", "swap_out refused", "swap_in refused")


def admit_computed(cache: BlockAllocator, seq_id: Hashable, tokens: list[int], extra_key: Hashable = None) -> int:
    cached = cache.admit(seq_id, tokens, extra_key)
    cache.take_copies()
    cache.commit(seq_id, len(tokens) - cached)
    return cached
