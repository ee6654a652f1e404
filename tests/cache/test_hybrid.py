"""Several pools, and states, as one cache: walks whose contents are checked at every step, and directed cases."""

import contextlib
import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_ops
import paged_ops.cache.kv_cache
from paged_ops import KVCache, masks
from paged_ops.cache import BlockAllocator, HybridCache, OutOfBlocks, blocks_within_reach
from paged_ops.cache.states import StateCache, StateSpec
from paged_ops.lowerings.cpu import fused
from tests.cache.walk import EVENTS, Expected, Walk, admit_computed, check_invariants, state


def states(num_slots: int = 12, num_host_slots: int = 4) -> StateCache:
    return StateCache(
        [StateSpec((2,), torch.float32), StateSpec((), torch.int64)], num_slots, num_host_slots=num_host_slots
    )


def hybrid(**changes: Any) -> HybridCache:
    """Five layers: full, window 6, chunk 8, window 6, full."""
    options: dict[str, Any] = {
        "num_layers": 5,
        "num_blocks": 30,
        "block_size": 4,
        "num_kv_heads": 1,
        "head_size": [2, 4, 2, 4, 2],
        "sliding_window": [0, 6, 0, 6, 0],
        "attention_chunk": [0, 0, 8, 0, 0],
        "num_window_blocks": 20,
        "num_host_blocks": 10,
        **changes,
    }
    return HybridCache.for_layers(**options)


ALL_WINDOWED = {"sliding_window": [6, 9, 6, 9, 6], "attention_chunk": 0}
ONE_POOL = {"sliding_window": 0, "attention_chunk": 0}
CACHES: dict[str, Callable[[], HybridCache]] = {
    "three pools": hybrid,
    "no full pool": lambda: hybrid(**ALL_WINDOWED),
    "first tokens": lambda: hybrid(num_first_tokens=[9, 5, 9, 2, 9]),
    "small windows": lambda: hybrid(num_window_blocks=12),
    "three pools and states": lambda: hybrid(states=states()),
    "one pool and states": lambda: hybrid(**ONE_POOL, num_window_blocks=None, states=states(num_slots=5)),
    "states alone": lambda: HybridCache([], [], states()),
}


@pytest.mark.parametrize("name", CACHES)
def test_random_walk(name: str) -> None:
    cache = CACHES[name]()
    walk = Walk(cache, seed=4)
    walk.run(600)
    assert all(walk.events[event] > 4 for event in EVENTS), walk.events
    assert walk.events["admit refused"] + walk.events["append refused"] > 4, walk.events
    stats = cache.stats()
    assert (stats.hit_tokens > 0) == (cache.states is None)
    assert name == "states alone" or min(stats.copied_blocks, stats.swapped_out_blocks, stats.swapped_in_blocks) > 0


def test_layers_are_in_the_models_order() -> None:
    cache = hybrid(states=states())
    assert cache.pool_of_layer == (0, 1, 2, 1, 0)
    assert [pool.sliding_window for pool in cache.pools] == [0, 6, 0]
    assert [pool.attention_chunk for pool in cache.pools] == [0, 0, 8]
    assert [pool.num_blocks for pool in cache.pools] == [30, 20, 20]
    full, window, chunk = (pool.layers for pool in cache.pools)
    in_order = [full[0], window[0], chunk[0], window[1], full[1], *cache.states.tensors]
    assert all(a is b for a, b in zip(cache.layers, in_order, strict=True))
    assert cache.layers[1].shape[-1] == 4
    assert cache.nbytes == sum(pool.nbytes for pool in cache.pools) + cache.states.nbytes
    assert cache.num_blocks == 70
    single = KVCache(2, 4, 4, 1, 2)
    assert (single.pools, single.pool_of_layer, single.states) == ((single,), (0, 0), None)


def test_a_prefix_is_as_long_as_every_pool_has_it() -> None:
    cache = hybrid()
    prompt = list(range(40))
    admit_computed_in_all(cache, "a", prompt)
    assert cache.cached_lengths(prompt) == list(range(0, 40, 4))
    cache.free("a")
    window = cache.pools[1]
    window.admit("filler", [99] * 4 * 14)  # takes the start of the prompt from that pool
    window.free("filler")
    there = window.cached_lengths(prompt)
    assert there[1] > 4
    assert cache.cached_lengths(prompt) == there
    assert cache.admit("b", [*prompt[:30], 77]) == 28
    assert cache.admit("c", prompt[: there[1]]) == 0
    assert [pool.num_computed_tokens("b") for pool in cache.pools] == [28] * 3
    assert cache.admit("d", prompt, max_cached=35) == 32


def admit_computed_in_all(cache: HybridCache, seq_id: str, tokens: list[int]) -> None:
    cached = cache.admit(seq_id, tokens)
    cache.flush_copies()
    cache.commit(seq_id, len(tokens) - cached)


def test_windowed_pools_stay_small() -> None:
    cache = hybrid(num_blocks=64, num_window_blocks=blocks_within_reach(1, 8, 4, sliding_window=6), attention_chunk=0)
    prompt = list(range(200))
    assert cache.max_seq_len == 256
    cache.admit("a", prompt, first_chunk=8)
    while cache.num_computed_tokens("a") < 200:
        assert cache.num_reservable("a") >= 8
        cache.reserve("a", 8)
        cache.commit("a", 8)
    assert [pool.num_used_blocks for pool in cache.pools] == [50, 2]
    assert cache.num_used_blocks == cache.stats().used_blocks == 52
    assert len(cache.pools[1].block_ids("a")) == len(cache.block_ids("a")) == 50


@pytest.mark.parametrize("path", ["C++", "torch"])
def test_a_decode_with_first_tokens_reads_no_freed_block(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(fused, "compiled", lambda: None)
    reaches = [(0, 0), (6, 5), (6, 2), (9, 0), (1, 4)]  # window and first tokens of each layer
    windows, firsts = (list(each) for each in zip(*reaches, strict=True))
    cache = hybrid(
        head_size=8, sliding_window=windows, attention_chunk=0, num_first_tokens=[9, *firsts[1:]], num_blocks=64
    )
    assert [pool.num_first_tokens for pool in cache.pools] == [0, *firsts[1:]]
    generator = torch.Generator().manual_seed(0)
    keys: dict[str, list[list[Tensor]]] = {"a": [[] for _ in reaches]}  # of each token, a key and a value of each layer

    def step(seq_id: str, num_tokens: int) -> None:
        cache.flush_copies()
        seq_len = cache.num_computed_tokens(seq_id) + num_tokens
        for layer, (window, first) in enumerate(reaches):
            pool, known = cache.pools[cache.pool_of_layer[layer]], keys[seq_id][layer]
            new = torch.randn(num_tokens, 2, 1, 8, generator=generator)
            query = torch.randn(num_tokens, 2, 8, generator=generator)
            known += list(new)
            slots = torch.tensor(pool.slots(seq_id, stop=seq_len))
            paged_ops.reshape_and_cache(new[:, 0], new[:, 1], cache.layers[layer], slots)
            table = torch.tensor([pool.block_ids(seq_id)], dtype=torch.int32)
            lens, starts = (torch.tensor(each, dtype=torch.int32) for each in ([seq_len], [0, num_tokens]))
            out = paged_ops.paged_attention(
                query, cache.layers[layer], table, lens, starts, 0.5, sliding_window=window, num_first_tokens=first
            )
            i, j = torch.arange(seq_len - num_tokens, seq_len)[:, None], torch.arange(seq_len)
            seen = (j <= i) & ((i - j < (window or seq_len)) | (j < first))
            key, value = torch.stack(known).double()[:, :, 0].unbind(1)
            logits = (0.5 * query.double() @ key.T).masked_fill(~seen[:, None], -torch.inf)
            torch.testing.assert_close(out.double(), logits.softmax(-1) @ value, rtol=1e-5, atol=1e-5)
        cache.commit(seq_id, num_tokens)
        for pool in cache.pools:
            unowned = [block for block, count in enumerate(pool.pool.ref_counts) if not count]
            for tensor in pool.layers:
                tensor[unowned] = torch.nan

    cache.admit("a", range(23), first_chunk=7)
    for num_tokens in (7, 7, 9):
        cache.reserve("a", num_tokens)
        step("a", num_tokens)
    cache.fork("a", "b")
    keys["b"] = [list(known) for known in keys["a"]]
    for turn in range(30):
        for seq_id in "ab":
            cache.append(seq_id, [turn])
            step(seq_id, 1)
        if turn == 9:
            cache.flush_copies()
            cache.swap_out("a")
            cache.swap_in("a")
    full, *others = (len(set(pool.block_ids("a"))) for pool in cache.pools)
    assert full == 14
    assert others == [4, 3, 3, 2], "the first tokens' blocks and the window's"


def prepared() -> HybridCache:
    cache = hybrid(num_blocks=8, num_window_blocks=6, num_host_blocks=2, states=states(3, 1))
    admit_computed_in_all(cache, "a", [1, 2, 3, 4, 5])
    cache.admit("b", [7, 8, 9])
    return cache


BAD_CALLS = [
    ("admit", ("a", [1]), {}, ValueError, "seq_id: 'a' is in use"),
    ("admit", ("c", []), {}, ValueError, "token_ids: expected at least one"),
    ("admit", ("c", list(range(40))), {}, OutOfBlocks, "device cache: expected 10 free blocks, got 5 of 8"),
    ("admit", ("c", list(range(16))), {}, OutOfBlocks, "device cache: expected 4 free blocks, got 3 of 6"),
    ("admit", ("c", [1]), {"first_chunk": 0}, ValueError, "first_chunk: expected at least 1, got 0"),
    ("admit", ("c", [1]), {"max_cached": -1}, ValueError, "max_cached: expected at least 0, got -1"),
    ("can_admit", ([1],), {"max_cached": "1"}, ValueError, "max_cached: expected an integer of at least 0, got '1'"),
    ("append", ("a", list(range(16))), {}, OutOfBlocks, "device cache: expected 4 free blocks, got 3 of 6"),
    ("append", ("nobody", [1]), {}, ValueError, "seq_id: 'nobody' is unknown"),
    ("commit", ("b", 4), {}, ValueError, r"num_written: expected 0\.\.3"),
    ("commit", ("b", 1, [7, 8]), {}, ValueError, "token_ids: expected num_written = 1"),
    ("commit", ("b", 2, [7, 8.5]), {}, ValueError, r"token_ids: expected integers, a list .*, got \[7, 8.5\]"),
    ("reserve", ("b", 4), {}, ValueError, r"num_tokens: expected 0\.\.3"),
    ("reserve", ("b", "4"), {}, ValueError, r"num_tokens: expected 0\.\.3"),
    ("fork", ("b", "c"), {}, ValueError, "parent_id: 'b' has 3 reserved tokens"),
    ("fork", ("a", "b"), {}, ValueError, "seq_id: 'b' is in use"),
    ("free", ("nobody",), {}, ValueError, "seq_id: 'nobody' is unknown"),
    ("rollback", ("nobody",), {}, ValueError, "seq_id: 'nobody' is unknown"),
    ("swap_in", ("a",), {}, ValueError, "seq_id: 'a' is not swapped out"),
    ("reset", (), {}, ValueError, "free_sequences: expected no sequence in the cache, got 2"),
]


@pytest.mark.parametrize(("name", "args", "options", "error", "message"), BAD_CALLS)
def test_a_bad_call_changes_nothing_in_any_pool(
    name: str, args: tuple, options: dict, error: type, message: str
) -> None:
    cache = prepared()
    before = state(cache)
    with pytest.raises(error, match=message):
        getattr(cache, name)(*args, **options)
    assert state(cache) == before
    cache.recover()  # nothing of the call is left to be done
    assert state(cache) == before


def test_states_that_run_out_change_nothing() -> None:
    cache = prepared()
    cache.fork("a", "c")
    assert not cache.can_admit([1])
    before = state(cache)
    for call in (lambda: cache.admit("d", [1]), lambda: cache.fork("a", "d")):
        with pytest.raises(OutOfBlocks, match="device states: expected a free slot of 3"):
            call()
        assert state(cache) == before
    cache.swap_out("c")
    assert not cache.can_swap_out("a")
    with pytest.raises(ValueError, match="seq_id: 'nobody' is unknown"):
        cache.can_swap_out("nobody")
    before = state(cache)
    with pytest.raises(OutOfBlocks):
        cache.swap_out("a")
    assert state(cache) == before
    cache.reset(free_sequences=True)
    assert cache.num_used_blocks == 0
    assert cache.states.num_free_slots == 3


@pytest.mark.parametrize("name", ["swap_out", "swap_in"])
@pytest.mark.parametrize("failing", range(3))
def test_a_swap_that_fails_in_one_pool_is_undone_in_the_others(
    name: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hybrid(states=states())
    walk = Walk(cache, seed=1)
    admit_computed_in_all(cache, "a", list(range(11)))
    cache.states.commit("a")  # write_all fills the row to be committed
    walk.live = {}
    for pool, views in zip(walk.pools, walk.device_views, strict=True):
        expected = walk.live.setdefault("a", walk_expected(list(range(11))))
        first = pool.num_given_back("a") * 4
        walk.fill(pool, views, torch.tensor(pool.slots("a", first, 11)), expected.contents[first:])
    for channel, tensor in enumerate(cache.states.tensors):
        tensor[cache.states.row("a")] = int(walk.values(walk.live["a"].contents[-1:], channel))
    walk.check()
    if name == "swap_in":
        cache.swap_out("a")
        walk.live["a"].swapped = True
    real, calls = paged_ops.cache.kv_cache.swap_blocks, []

    def fails(*args: object) -> None:
        calls.append(args)
        if len(calls) == failing + 1:
            raise RuntimeError("no memory")
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(paged_ops.cache.kv_cache, "swap_blocks", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            getattr(cache, name)("a")
    walk.check()
    getattr(cache, name)("a")
    walk.live["a"].swapped = name == "swap_out"
    walk.check()


def walk_expected(tokens: list[int]) -> Any:
    expected = Expected(0)
    expected.extend(tokens)
    expected.num_computed = len(tokens)
    return expected


class Cut:
    """A part that raises at the nth call of one of its methods, before or after it."""

    def __init__(self, part: Any, countdown: list[int]) -> None:
        self.part, self.countdown = part, countdown

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.part, attribute)
        if attribute not in (*CALLS, "check_commit"):
            return value

        def call(*args: Any, **options: Any) -> Any:
            self.count()
            result = value(*args, **options)
            self.count()
            return result

        return call

    def count(self) -> None:
        self.countdown[0] -= 1
        if self.countdown[0] == 0:
            raise KeyboardInterrupt

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self.part


CALLS = {
    "admit": ("c", [1, 2, 3]),
    "append": ("a", [52, 53, 54]),
    "commit": ("a", 2),
    "rollback": ("a",),
    "free": ("a",),
    "swap_out": ("a",),
    "swap_in": ("b",),
}


def summary(cache: HybridCache) -> Any:
    ids = [seq_id for seq_id in "abc" if seq_id in cache]
    rows = {s: (cache.num_tokens(s), cache.num_computed_tokens(s), cache.is_swapped_out(s)) for s in ids}
    return rows, [] if cache.states is None else [(s, cache.states.is_swapped_out(s)) for s in cache.states.seq_ids]


def test_recovery_after_an_interrupt_between_two_pools() -> None:
    """Each method is cut off at each call that it makes of a part; the cache is then as before it, or after it."""
    chooser = random.Random(3)
    for trial in range(250):
        cache = hybrid(states=states() if trial % 2 else None)
        admit_computed_in_all(cache, "a", list(range(10)))
        admit_computed_in_all(cache, "b", [*range(6), 77, 78])
        cache.append("a", [50, 51])
        cache.swap_out("b")
        name = chooser.choice(list(CALLS))
        countdown = [chooser.randint(1, 8)]

        before, after = summary(cache), copy.deepcopy(cache)
        getattr(after, name)(*CALLS[name])
        pools, held = cache.pools, cache.states
        cache.pools, cache.states = (
            tuple(Cut(pool, countdown) for pool in pools),
            None if held is None else Cut(held, countdown),
        )
        with contextlib.suppress(KeyboardInterrupt):
            getattr(cache, name)(*CALLS[name])
        cache.pools, cache.states = pools, held
        cache.recover()
        rows = summary(cache)
        assert rows[0] in (before[0], summary(after)[0]), (name, trial)
        assert sorted(map(str, rows[1])) in [sorted(map(str, each[1])) for each in (before, summary(after))]
        for pool in cache.pools:
            check_invariants(pool)
            assert pool.seq_ids == cache.pools[0].seq_ids or set(pool.seq_ids) == set(cache.pools[0].seq_ids)
        if held is not None and name == "commit":  # the second one of this sequence
            committed = cache.num_computed_tokens("a") == 12
            assert (cache.states.row("a") % 2 == 0) == committed, "the state is that of the tokens that are committed"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_independent(how: Callable[[HybridCache], HybridCache]) -> None:
    cache = hybrid(states=states())
    walk = Walk(cache, seed=8)
    for turn in range(40):
        [walk.admit, walk.append, walk.step, walk.swap_out, walk.fork][turn % 5]()
    before = state(cache)
    other = how(cache)
    twin = Walk(other, seed=9)
    twin.live, twin.next_id = copy.deepcopy((walk.live, walk.next_id))
    twin.run(100)
    assert all(a is b for a, b in zip(other.pools[1].layers, [other.layers[1], other.layers[3]], strict=True))
    assert state(cache) == before
    walk.check()
    with pytest.raises(TypeError, match="shallow copy"):
        copy.copy(cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HybridCache([], []), "pools: expected one or more, or states, got none"),
        (lambda: HybridCache([KVCache(2, 4, 4, 1, 2)], [0]), "pool_of_layer: expected all layers of the pools, got 1"),
        (lambda: HybridCache([KVCache(1, 4, 4, 1, 2)], [0, 0]), "pool_of_layer: expected each of 1 pools once"),
        (lambda: HybridCache([KVCache(1, 4, 4, 1, 2)], [1]), "pool_of_layer: expected each of 1 pools once"),
        (
            lambda: HybridCache([KVCache(1, 4, 4, 1, 2), KVCache(1, 4, 8, 1, 2)], [0, 1]),
            "pools: expected blocks of 4 tokens, got 8",
        ),
        (lambda: hybrid(sliding_window=[1, 2]), "sliding_window: expected one for each of 5 layers, got 2"),
        (lambda: hybrid(attention_chunk=[1]), "attention_chunk: expected one for each of 5 layers, got 1"),
        (lambda: hybrid(num_first_tokens=[1]), "num_first_tokens: expected one for each of 5 layers, got 1"),
        (lambda: hybrid(num_first_tokens=-1), "num_first_tokens: expected at least 0, got -1"),
        (
            lambda: blocks_within_reach(1, 1, 16, sliding_window=1, num_first_tokens=-1),
            "num_first_tokens: expected at least 0, got -1",
        ),
        (lambda: blocks_within_reach(1, 1, 16), "sliding_window: expected one, or an attention_chunk"),
    ],
)
def test_pools_that_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17])
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk"])
def test_blocks_within_reach_are_no_more_than_positions_touch(name: str, size: int) -> None:
    window, chunk = (size, 0) if name == "sliding_window" else (0, size)
    touched = max(i // 4 - masks.oldest_key(i, window, chunk) // 4 + 1 for i in range(400))
    assert blocks_within_reach(5, 12, 4, **{name: size}) == 5 * (max(touched, 2) + 1) + 12 // 4
    with_first = blocks_within_reach(5, 12, 4, **{name: size}, num_first_tokens=5)
    assert with_first == 5 * (max(touched, 2) + 1 + (2 if window else 0)) + 12 // 4


@pytest.mark.parametrize(
    "reach",
    [
        *({"sliding_window": 6}, {"sliding_window": 1}, {"attention_chunk": 7}, {"attention_chunk": 8}),
        *({"sliding_window": 6, "num_first_tokens": 5}, {"sliding_window": 1, "num_first_tokens": 4}),
    ],
)
def test_blocks_within_reach_suffice(reach: dict[str, int]) -> None:
    chooser = random.Random(0)
    cache = BlockAllocator(blocks_within_reach(5, 12, 4, **reach), 4, **reach)
    for seq_id in range(5):
        cache.admit(seq_id, range(chooser.randint(1, 60)), first_chunk=1)
        cache.commit(seq_id, 1)
    for _ in range(300):
        budget = 12
        for seq_id in chooser.sample(range(5), 5):
            waiting = cache.num_tokens(seq_id) - cache.num_computed_tokens(seq_id)
            if not waiting:
                cache.append(seq_id, [0])
            num_tokens = min(waiting or 1, chooser.randint(1, 12), budget - 1)
            if num_tokens > 0:
                cache.reserve(seq_id, num_tokens)
                budget -= num_tokens
                cache.commit(seq_id, num_tokens)
    check_invariants(cache)


def test_one_sequence_in_one_windowed_pool_is_admitted_as_anywhere() -> None:
    cache = KVCache(1, 10, 4, 1, 2, sliding_window=6)
    assert admit_computed(cache, "a", list(range(10))) == 0
    assert cache.admit("b", list(range(10))) == 8
