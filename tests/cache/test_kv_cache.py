"""The cache: directed cases, errors, and long random walks whose tensor contents are checked at every step."""

import copy
import pickle
import unittest.mock

import pytest
import torch

import paged_ops.cache.kv_cache
from paged_ops import graphs
from paged_ops.cache import KVCache
from paged_ops.cache.allocator import BlockAllocator, BlockPool, OutOfBlocks
from paged_ops.cache.prefixes import servable_lengths
from paged_ops.layouts import Layout, min_tpu_block_size, preferred_tpu_block_size, split_joined_cache
from paged_ops.metadata import Batch
from tests.cache.walk import EVENTS, REFUSALS, Walk, admit_computed, check_invariants, state
from tests.helpers.defaults import defaults
from tests.helpers.gpu import GPU


@pytest.mark.slow
def test_random_walk() -> None:
    cache = KVCache(2, 40, 4, 1, 2, num_host_blocks=12)
    walk = Walk(cache, seed=1)
    walk.run(5_000)
    assert all(walk.events[name] > 30 for name in EVENTS + REFUSALS), walk.events
    stats = cache.stats()
    assert min(stats.copied_blocks, stats.swapped_out_blocks, stats.swapped_in_blocks) > 100, stats
    assert 0.1 < stats.hit_tokens / stats.admitted_tokens < 0.9, stats


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 544])
def test_random_walk_over_block_sizes(block_size: int) -> None:
    cache = KVCache(1, 30, block_size, 1, 1, num_host_blocks=10)
    walk = Walk(cache, seed=block_size)
    walk.run(600 if block_size < 100 else 300)
    assert all(walk.events[name] for name in EVENTS), walk.events
    assert (cache.stats().copied_blocks > 0) == (block_size > 1)
    assert cache.stats().hit_tokens > 0


def heads(layout: Layout) -> int:
    """Key/value heads of a layer: a latent cache has one."""
    return 1 if layout is Layout.LATENT else 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("layout", list(Layout))
def test_random_walk_over_layouts(layout: Layout, dtype: torch.dtype) -> None:
    cache = KVCache(2, 24, 4, heads(layout), 16, dtype=dtype, layout=layout, num_host_blocks=8)
    assert all(layer.dtype is dtype for layer in cache.layers + cache.host_layers)
    walk = Walk(cache, seed=5)
    walk.modulus = 255 if dtype is torch.bfloat16 else walk.modulus  # integers that the dtype can tell apart
    walk.run(250)
    assert min(cache.stats().copied_blocks, cache.stats().swapped_out_blocks, cache.stats().swapped_in_blocks) > 0


@pytest.mark.parametrize("layout", [Layout.NHD, Layout.HND])
def test_random_walk_over_layers_of_different_sizes(layout: Layout) -> None:
    sizes = {"num_kv_heads": [1, 4, 2], "head_size": [16, 8, 24], "value_head_size": [16, 24, 8]}
    cache = KVCache(3, 24, 4, **sizes, layout=layout, num_host_blocks=8)
    Walk(cache, seed=7).run(250)
    assert min(cache.stats().copied_blocks, cache.stats().swapped_out_blocks, cache.stats().swapped_in_blocks) > 0


@pytest.mark.parametrize("sliding_window", [0, 6])
def test_recovery_rebuilds_the_pools_from_the_sequences(sliding_window: int) -> None:
    cache = KVCache(1, 24, 4, 1, 2, num_host_blocks=8, sliding_window=sliding_window)
    walk = Walk(cache, seed=3)
    moves = [walk.admit, walk.append, walk.step, walk.fork, walk.free, walk.swap_out, walk.swap_in]
    for i in range(400):
        walk.random.choices(moves, weights=[4, 8, 6, 2, 3, 2, 3])[0]()
        before = state(cache)
        cache.recover()
        assert sorted(cache.pool._free) == sorted(before[0][0][1])  # type: ignore[index]
        cache.pool._free.sort(key=before[0][0][1].index)  # type: ignore[index]
        cache.host_pool._free.sort(key=before[0][1][1].index)  # type: ignore[index]
        assert state(cache) == before, "nothing was wrong, nothing changes"
        for pool in (cache.pool, cache.host_pool):  # as if calls had been cut off in the middle
            pool.ref_counts[i % 8] += 1
            lost = pool._free.pop() if pool._free else pool._idle.popitem()[0] if pool._idle else None
            if lost is not None and i % 2:
                pool.ref_counts[lost] = 1
        cache.recover()
        walk.check()
    assert cache.stats().swapped_out_blocks
    assert cache.stats().copied_blocks


@pytest.mark.parametrize(
    ("block_size", "sliding_window", "attention_chunk", "num_first_tokens"),
    [
        *((4, 1, 0, 0), (4, 5, 0, 0), (4, 8, 0, 0), (4, 0, 4, 0), (4, 0, 6, 0), (4, 7, 12, 0), (1, 3, 0, 0)),
        *((3, 7, 0, 0), (16, 4, 0, 0), (8, 0, 3, 0), (4, 3, 0, 4), (4, 2, 0, 5), (4, 7, 12, 3), (1, 3, 0, 2)),
        *((3, 4, 0, 1), (4, 0, 6, 5)),
    ],
)
def test_random_walk_within_reach(
    block_size: int, sliding_window: int, attention_chunk: int, num_first_tokens: int
) -> None:
    reach = {"sliding_window": sliding_window, "attention_chunk": attention_chunk, "num_first_tokens": num_first_tokens}
    cache = KVCache(1, 24, block_size, 1, 1, num_host_blocks=8, **reach)
    walk = Walk(cache, seed=13)
    walk.run(500)
    assert all(walk.events[name] > 0 for name in (*EVENTS, "admit refused", "append refused")), walk.events
    stats = cache.stats()
    assert (stats.copied_blocks > 0) == (block_size > 1)
    assert 0.03 < stats.hit_tokens / stats.admitted_tokens < 0.9, stats


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize(
    ("reach", "most"),
    [
        ({"sliding_window": 16}, 2),
        ({"sliding_window": 17}, 2),
        ({"sliding_window": 18}, 3),
        ({"attention_chunk": 32}, 2),
        ({"sliding_window": 17, "num_first_tokens": 16}, 3),
        ({"sliding_window": 18, "num_first_tokens": 17}, 5),
    ],
)
def test_blocks_out_of_reach_come_back(reach: dict, most: int, chunk: int) -> None:
    cache = BlockAllocator(63 if chunk == 1 else most + -(-chunk // 16), 16, **reach)
    everything = BlockAllocator(63, 16)
    prompt = list(range(1000))
    for each in (cache, everything):
        each.admit("a", prompt, first_chunk=chunk)
        while each.num_computed_tokens("a") < 1000:
            num_tokens = min(chunk, 1000 - each.num_computed_tokens("a"))
            each.reserve("a", num_tokens)
            assert each.num_reservable("a") >= num_tokens
            row = each.block_ids("a")
            assert len(row) == -(-(each.num_computed_tokens("a") + num_tokens) // 16) or each is everything
            each.commit("a", num_tokens)
            check_invariants(each)
            assert each is everything or len(set(each.block_ids("a"))) <= most
            assert each.stats().used_blocks == len(set(each.block_ids("a"))), "a row names blocks of its own alone"
    assert everything.stats().used_blocks == 63
    assert len(cache.block_ids("a")) == 63
    with pytest.raises(
        ValueError, match=r"start, stop: expected a range within (0\.\.(16|32) or )?(976|960|992)\.\.1000"
    ):
        cache.slots("a", 0, 1000)
    cache.free("a")
    assert cache.stats().used_blocks == 0


def test_a_prefix_needs_only_what_its_end_sees() -> None:
    cache = BlockAllocator(16, 2, sliding_window=4)
    prompt = list(range(12))
    admit_computed(cache, "a", prompt)
    cache.free("a")
    assert cache.cached_lengths(prompt) == [0, 2, 4, 6, 8, 10]
    cache.admit("filler", [99] * 20)  # ten free blocks, then the idle ones that went first: the start of the prompt
    cache.append("filler", [99] * 6)
    cache.free("filler")
    lengths = cache.cached_lengths(prompt)
    assert 2 not in lengths
    assert 10 in lengths
    assert cache.admit("b", prompt, max_cached=7) == max(n for n in lengths if n <= 7)
    assert cache.admit("c", prompt) == 10
    assert len(cache.block_ids("c")) == 6
    assert len(set(cache.block_ids("c"))) == 3, "the key at 7 is in the fourth block, and a new block is for two more"
    assert cache.admit("d", [*prompt[:10], 77, 78, 79], "other") == 0
    everything = BlockAllocator(16, 2)
    admit_computed(everything, "a", prompt)
    assert everything.cached_lengths(prompt) == [0, 2, 4, 6, 8, 10]
    assert everything.admit("b", prompt, max_cached=5) == 4
    assert everything.can_admit(prompt, spare_blocks=5)
    assert not everything.can_admit(prompt, spare_blocks=6)


def test_a_prefix_needs_its_first_tokens_and_what_its_end_sees() -> None:
    cache = BlockAllocator(16, 2, sliding_window=4, num_first_tokens=3)
    prompt = list(range(12))
    admit_computed(cache, "a", prompt)
    row = cache.block_ids("a")
    assert row[2] == row[3] == row[4], "the third and the fourth block are freed"
    assert len(set(row)) == 4
    assert cache.slots("a", 0, 4) == [row[p // 2] * 2 + p % 2 for p in range(4)]
    assert cache.slots("a", 8) == [row[p // 2] * 2 + p % 2 for p in range(8, 12)]
    for start, stop in ((3, 5), (4, 6), (6, 9), (0, 12), (8, 13), (-1, 2)):
        with pytest.raises(ValueError, match=r"expected a range within 0\.\.4 or 8\.\.12 "):
            cache.slots("a", start, stop)
    cache.free("a")
    assert cache.cached_lengths(prompt) == [0, 2, 4, 6, 8, 10]
    for num_blocks, lengths in ((11, [0, 2, 4, 10]), (13, [0, 2, 4]), (15, [0, 2]), (16, [0])):
        cache.admit("filler", [99] * 2 * num_blocks, first_chunk=2 * num_blocks)  # takes idle blocks: the third first
        cache.free("filler")
        assert cache.cached_lengths(prompt) == lengths
    assert servable_lengths([0, None, 2, 3, 4], 2, 2, cache._num_freed) == [0, 1]
    assert servable_lengths([0, 1, None, 3, 4], 2, 2, cache._num_freed) == [0, 1, 2, 5]


def test_a_prefix_is_reused_with_its_first_blocks() -> None:
    cache = BlockAllocator(16, 2, num_host_blocks=8, sliding_window=4, num_first_tokens=3)
    prompt = list(range(12))
    admit_computed(cache, "a", prompt)
    first, last = cache.block_ids("a")[:2], cache.block_ids("a")[4]
    assert cache.admit("b", prompt) == 10
    assert cache.block_ids("b")[:2] == first
    assert cache.block_ids("b")[4] == last
    assert cache.num_given_back("b") == 1
    cache.fork("a", "c")
    assert cache.block_ids("c") == cache.block_ids("a")
    assert len(cache.swap_out("a")) == 4
    cache.swap_in("a")
    assert cache.block_ids("a") == cache.block_ids("c"), "their contents are still there"
    check_invariants(cache)


def test_a_prompt_longer_than_its_pool() -> None:
    cache = BlockAllocator(4, 4, sliding_window=6)
    assert cache.max_seq_len == 2**31 - 1
    assert BlockAllocator(4, 4).max_seq_len == 16
    assert BlockAllocator(2, 4, sliding_window=6).max_seq_len == 8
    assert BlockAllocator(4, 4, sliding_window=6, num_first_tokens=5).max_seq_len == 16
    assert BlockAllocator(5, 4, sliding_window=6, num_first_tokens=5).max_seq_len == 2**31 - 1
    with pytest.raises(ValueError, match="num_first_tokens: expected at least 0, got -1"):
        BlockAllocator(4, 4, sliding_window=6, num_first_tokens=-1)
    prompt = list(range(100))
    assert not cache.can_admit(prompt)
    with pytest.raises(OutOfBlocks, match="expected 25 free blocks, got 4 of 4"):
        cache.admit("a", prompt)
    assert cache.can_admit(prompt, first_chunk=16)
    assert not cache.can_admit(prompt, first_chunk=16, spare_blocks=1)
    cache.admit("a", prompt, first_chunk=16)
    before = state(cache)
    with pytest.raises(OutOfBlocks, match="expected 1 free blocks, got 0 of 4"):
        cache.reserve("a", 17)
    with pytest.raises(ValueError, match=r"num_tokens: expected 0\.\.100 .*, got 101"):
        cache.reserve("a", 101)
    with pytest.raises(ValueError, match=r"num_written: expected 0\.\.16"):
        cache.commit("a", 17)
    with pytest.raises(ValueError, match="first_chunk: expected at least 1, got 0"):
        cache.admit("b", prompt, first_chunk=0)
    assert state(cache) == before
    assert cache.num_reservable("a") == 16
    while waiting := cache.num_tokens("a") - cache.num_computed_tokens("a"):
        num_tokens = min(waiting, cache.num_reservable("a"))
        cache.reserve("a", num_tokens)
        cache.commit("a", num_tokens)
    for token in range(50):
        cache.append("a", [token])
        cache.commit("a", 1)
    check_invariants(cache)


def test_a_prompt_longer_than_its_pool_comes_back_half_computed() -> None:
    cache = BlockAllocator(4, 4, num_host_blocks=4, sliding_window=6)
    cache.admit("a", list(range(100)), first_chunk=8)
    cache.commit("a", 8)
    cache.swap_out("a")
    assert cache.can_swap_in("a", num_tokens=4, spare_blocks=1), "its two blocks and a new one"
    assert not cache.can_swap_in("a", num_tokens=4, spare_blocks=2)
    assert not cache.can_swap_in("a", num_tokens=9)
    cache.swap_in("a")
    assert cache.num_reservable("a") == 8
    full = BlockAllocator(2, 4, num_host_blocks=2)
    full.admit("a", list(range(8)))
    full.commit("a", 7)
    full.swap_out("a")
    assert full.can_swap_in("a", num_tokens=1), "it has the slot"
    assert not full.can_swap_in("a", num_tokens=2), "it would append"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("layout", list(Layout))
def test_random_walk_on_gpu(layout: Layout) -> None:
    cache = KVCache(2, 40, 4, heads(layout), 16, device=GPU, dtype=torch.float32, layout=layout, num_host_blocks=12)
    assert all(layer.is_pinned() for layer in cache.host_layers)
    Walk(cache, seed=3).run(500)
    assert min(cache.stats().copied_blocks, cache.stats().swapped_out_blocks, cache.stats().swapped_in_blocks) > 0


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "least", "preferred"),
    [
        (1, 1, 1, 16),
        (256, 128, 1, 16),
        (257, 128, 1, 32),
        (1024, 128, 1, 64),
        (1025, 128, 2, 128),
        (3000, 128, 4, 256),
        (131072, 64, 64, 256),
        (131073, 64, 128, 256),  # 65 tokens are the least, of which 128 is the power of two
        (2048, 1 << 17, 2048, 128),  # one block for each sequence
        (100, 1 << 20, 128, 16),
    ],
)
def test_block_sizes_of_tpus(max_model_len: int, max_num_seqs: int, least: int, preferred: int) -> None:
    assert min_tpu_block_size(max_model_len, max_num_seqs) == least
    assert preferred_tpu_block_size(max_model_len) == preferred
    assert least >= 128 or max_num_seqs * -(-max_model_len // least) * 4 <= 1 << 19  # of scalar memory


def test_full_prefix_blocks_are_shared_once_committed() -> None:
    cache = BlockAllocator(16, 4)
    prompt = list(range(10))
    assert cache.admit("a", prompt) == 0
    assert cache.admit("same step", prompt) == 0
    cache.commit("a", 5)  # a chunk: one full block
    assert cache.admit("b", prompt) == 4
    assert cache.block_ids("b")[0] == cache.block_ids("a")[0]
    assert cache.block_ids("b")[1] != cache.block_ids("a")[1]
    cache.commit("a", 5)
    assert cache.admit("c", prompt) == 8
    assert cache.block_ids("c")[:2] == cache.block_ids("a")[:2]
    assert cache.admit("d", [*prompt[:4], 99, *prompt[5:]]) == 4
    assert cache.stats().shared_blocks == 2
    assert (cache.stats().admitted_tokens, cache.stats().hit_tokens) == (50, 16)


def test_generated_tokens_are_shared_too() -> None:
    cache = BlockAllocator(8, 2)
    admit_computed(cache, "a", [1])
    cache.append("a", [2])
    assert cache.admit("early", [1, 2, 3]) == 0
    cache.commit("a", 1)
    assert cache.admit("late", [1, 2, 3]) == 2


@pytest.mark.parametrize("block_size", [1, 4])
def test_at_least_one_token_is_computed(block_size: int) -> None:
    cache = BlockAllocator(16, block_size)
    prompt = list(range(8))
    admit_computed(cache, "a", prompt)
    assert cache.admit("b", prompt) == 8 - block_size
    assert cache.slots("b") == cache.slots("b", 8 - block_size, 8)
    assert not set(cache.slots("b")) & set(cache.slots("a", 0, 8))


def test_equal_hashes_are_not_equal_tokens() -> None:
    assert hash((-1, -1)) == hash((-2, -2))
    cache = BlockAllocator(16, 2)
    admit_computed(cache, "a", [-1, -1, 5, 6, 0])
    assert cache.admit("b", [-2, -2, 5, 6, 0]) == 0
    assert cache.admit("c", [-1, -1, 5, 6, 0]) == 4


def test_same_block_after_another_prefix_is_not_shared() -> None:
    cache = BlockAllocator(16, 2)
    admit_computed(cache, "a", [1, 2, 3, 4, 0])
    assert cache.admit("b", [9, 9, 3, 4, 0]) == 0


def test_extra_key_separates() -> None:
    cache = BlockAllocator(16, 2)
    admit_computed(cache, "a", [1, 2, 3], "adapter 1")
    assert cache.admit("b", [1, 2, 3], "adapter 2") == 0
    assert cache.admit("c", [1, 2, 3]) == 0
    assert cache.admit("d", [1, 2, 3], "adapter 1") == 2


@pytest.mark.parametrize("make", [tuple, iter, torch.tensor, lambda ids: torch.tensor(ids).numpy()])
def test_token_ids_of_any_kind_are_the_same_tokens(make) -> None:
    cache = BlockAllocator(16, 2)
    admit_computed(cache, "a", [1, 2, 3])
    assert cache.can_admit(make([1, 2, 3]))
    assert cache.admit("b", make([1, 2, 3])) == 2


def test_idle_blocks_come_back_until_evicted_least_recent_first() -> None:
    cache = BlockAllocator(6, 2)
    for seq_id, tokens in (("a", [1, 1, 0]), ("b", [2, 2, 0]), ("c", [3, 3, 0])):
        admit_computed(cache, seq_id, tokens)
    for seq_id in "abc":
        cache.free(seq_id)
    assert (cache.stats().used_blocks, cache.stats().idle_blocks, cache.stats().free_blocks) == (0, 3, 6)
    assert admit_computed(cache, "a", [1, 1, 0]) == 2  # used again: now the most recent
    cache.free("a")
    cache.admit("large", list(range(10, 18)))  # three free blocks and the least recent idle one
    assert cache.stats().idle_blocks == 2
    cache.free("large")
    assert cache.admit("b", [2, 2, 0]) == 0
    assert cache.admit("c", [3, 3, 0]) == 2
    assert cache.admit("a", [1, 1, 0]) == 2


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache = BlockAllocator(4, 2)
    admit_computed(cache, "a", list(range(8)))
    cache.free("a")
    cache.admit("b", [90, 91, 92])
    cache.free("b")
    assert cache.admit("a", list(range(8))) == 4


def test_a_prefix_is_found_again_after_its_start_was_evicted_and_recomputed() -> None:
    cache = BlockAllocator(8, 2)
    cache.admit("a", [1, 2, 3])
    cache.admit("b", [1, 2, 5, 6, 7])
    cache.commit("a", 3)
    cache.commit("b", 5)  # its own copy of [1, 2] stays unknown, its [5, 6] follows the known prefix
    cache.free("a")
    cache.admit("filler", list(range(10, 20)))
    assert cache.stats().idle_blocks == 0
    cache.free("filler")
    assert cache.admit("c", [1, 2, 5, 6, 7]) == 0
    cache.commit("c", 2)
    assert cache.admit("d", [1, 2, 5, 6, 7]) == 4
    assert cache.block_ids("d")[1] == cache.block_ids("b")[1]


def test_admission_counts_the_idle_blocks_that_it_shares() -> None:
    cache = BlockAllocator(3, 2)
    admit_computed(cache, "a", [1, 2, 3, 4])
    cache.free("a")
    assert cache.admit("a", [1, 2, 3, 4, 5, 6]) == 4
    cache.free("a")
    assert not cache.can_admit([1, 2, 3, 4, 5, 6, 7])


def test_a_long_prefix_needs_no_recursion() -> None:
    cache = BlockAllocator(50_001, 1)
    admit_computed(cache, "a", list(range(50_000)))
    assert cache.admit("b", [*range(40_000), -1]) == 40_000
    cache.free("a")
    cache.free("b")
    cache.admit("c", [0] * 50_001)
    del cache


def test_copy_on_write() -> None:
    cache = BlockAllocator(16, 4)
    admit_computed(cache, "a", [1, 2, 3, 4, 5])
    cache.fork("a", "b")
    cache.fork("a", "c")
    shared = cache.block_ids("a")
    assert cache.block_ids("b") == cache.block_ids("c") == shared
    cache.append("b", [6])
    cache.append("c", [7])
    cache.append("a", [8])  # the last owner writes in place
    assert cache.block_ids("a") == shared
    b, c = cache.block_ids("b"), cache.block_ids("c")
    assert b[0] == c[0] == shared[0]
    assert len({b[1], c[1], shared[1]}) == 3
    assert sorted(cache.take_copies()) == sorted([(shared[1], b[1]), (shared[1], c[1])])
    assert cache.take_copies() == []
    for seq_id in "abc":
        cache.commit(seq_id, 1)
        assert cache.slots(seq_id, 5, 6) == [cache.block_ids(seq_id)[1] * 4 + 1]
    check_invariants(cache)


def test_no_copy_where_a_new_block_starts() -> None:
    cache = BlockAllocator(16, 4)
    admit_computed(cache, "a", [1, 2, 3, 4])
    cache.fork("a", "b")
    cache.append("a", [5])
    cache.append("b", [5])
    assert cache.take_copies() == []
    assert cache.block_ids("a")[0] == cache.block_ids("b")[0]


def test_a_pending_copy_holds_its_source_and_ends_with_its_destination() -> None:
    cache = BlockAllocator(3, 4)
    admit_computed(cache, "a", [1, 2])
    cache.fork("a", "b")
    (source,) = cache.block_ids("a")
    cache.append("b", [3])
    cache.free("a")
    assert cache.stats().free_blocks == 1  # not the source, although no sequence has it
    cache.admit("c", [7])
    assert cache.block_ids("c") != [source]
    cache.free("c")
    cache.free("b")
    assert cache.take_copies() == []
    assert cache.stats().free_blocks == 3


def test_copies_of_copies_take_the_first_source() -> None:
    cache = BlockAllocator(8, 4)
    admit_computed(cache, "a", [1, 2])
    cache.fork("a", "b")
    (source,) = cache.block_ids("a")
    cache.append("b", [3])
    cache.rollback("b")
    cache.fork("b", "c")
    cache.append("c", [4])
    assert sorted(cache._copies.values()) == [source, source]
    check_invariants(cache)
    cache.free("b")
    assert cache.take_copies() == [(source, cache.block_ids("c")[0])]


def test_rollback_drops_what_was_not_committed() -> None:
    cache = BlockAllocator(8, 2)
    admit_computed(cache, "a", [1, 2, 3])
    cache.append("a", [4, 5, 6])
    cache.commit("a", 1)
    cache.rollback("a")
    assert (cache.num_tokens("a"), len(cache.block_ids("a")), cache.stats().free_blocks) == (4, 2, 6)
    assert cache.admit("b", [1, 2, 3, 4, 5]) == 4


def test_swap_keeps_what_is_shared_where_it_is() -> None:
    cache = BlockAllocator(8, 2, num_host_blocks=8)
    admit_computed(cache, "a", [1, 2, 3, 4, 5])
    cache.fork("a", "b")
    device = cache.block_ids("a")
    assert [source for source, _ in cache.swap_out("a")] == device
    assert [source for source, _ in cache.swap_out("b")] == device[2:]  # its full blocks are on the host already
    assert cache.stats().host_used_blocks == 4
    assert len(cache.swap_in("b")) == 1  # its full blocks are still idle on the device
    assert cache.block_ids("b")[:2] == device[:2]
    cache.append("b", [6])  # alone on its last block: no copy on write
    assert cache.take_copies() == []
    cache.commit("b", 1)
    check_invariants(cache)


def test_swapped_content_is_shared_again() -> None:
    cache = BlockAllocator(4, 2, num_host_blocks=4)
    admit_computed(cache, "a", [1, 2, 3])
    cache.swap_out("a")
    cache.admit("filler", list(range(10, 18)))
    cache.free("filler")
    assert cache.stats().idle_blocks == 0
    assert len(cache.swap_in("a")) == 2
    assert cache.admit("b", [1, 2, 3]) == 2


def test_reserved_tokens_need_no_host_block_and_survive_a_swap() -> None:
    cache = BlockAllocator(8, 2, num_host_blocks=2)
    admit_computed(cache, "a", [1, 2, 3])
    cache.append("a", [4, 5, 6])
    assert len(cache.swap_out("a")) == 2
    assert len(cache.swap_in("a")) == 1
    assert (cache.num_tokens("a"), cache.num_computed_tokens("a"), len(cache.block_ids("a"))) == (6, 3, 3)
    cache.commit("a", 3)


def test_a_swapped_sequence_can_be_freed() -> None:
    cache = BlockAllocator(4, 2, num_host_blocks=4)
    admit_computed(cache, "a", [1, 2, 3])
    cache.swap_out("a")
    cache.free("a")
    assert cache.stats().host_free_blocks == 4
    check_invariants(cache)


def test_slots() -> None:
    cache = BlockAllocator(8, 3)
    cache.admit("a", list(range(5)))
    first, second = cache.block_ids("a")
    assert cache.slots("a") == [first * 3, first * 3 + 1, first * 3 + 2, second * 3, second * 3 + 1]
    cache.commit("a", 2)
    assert cache.slots("a", stop=4) == [first * 3 + 2, second * 3]


def prepared(num_host_blocks: int = 1) -> KVCache:
    """Six blocks of two: "full" has 2 of 3 tokens computed, "out" is swapped out, "wait" waits for a copy of "fork"."""
    cache = KVCache(1, 6, 2, 1, 2, num_host_blocks=num_host_blocks)
    admit_computed(cache, "out", [9])
    cache.swap_out("out")
    cache.admit("full", [1, 2, 3])
    cache.commit("full", 2)
    admit_computed(cache, "fork", [5])
    cache.fork("fork", "wait")
    cache.append("wait", [6])
    return cache


BAD_CALLS = [
    ("admit", ("full", [1]), ValueError, "seq_id: 'full' is in use"),
    ("admit", ("out", [1]), ValueError, "seq_id: 'out' is in use"),
    ("admit", ("new", []), ValueError, "token_ids: expected at least one token, got none"),
    ("can_admit", ([],), ValueError, "token_ids: expected at least one token, got none"),
    ("admit", ("new", list(range(20))), OutOfBlocks, "device cache: expected 10 free blocks, got 2 of 6"),
    ("append", ("nobody", [1]), ValueError, "seq_id: 'nobody' is unknown"),
    ("append", ("out", [1]), ValueError, "seq_id: 'out' is swapped out"),
    ("append", ("full", list(range(9))), OutOfBlocks, "device cache: expected 4 free blocks, got 2 of 6"),
    ("can_append", ("full", -1), ValueError, "num_tokens: expected at least 0, got -1"),
    ("can_append", ("full", 1.5), ValueError, "num_tokens: expected an integer of at least 0, got 1.5"),
    ("commit", ("full", 2), ValueError, r"num_written: expected 0\.\.1 .*, got 2"),
    ("commit", ("full", -1), ValueError, r"num_written: expected 0\.\.1 .*, got -1"),
    ("commit", ("full", torch.tensor([1, 1])), ValueError, r"num_written: expected 0\.\.1 .*, got tensor"),
    ("commit", ("full", 1, [3.5]), ValueError, r"token_ids: expected integers, a list .*, got \[3.5\]"),
    ("commit", ("nobody", 1), ValueError, "seq_id: 'nobody' is unknown"),
    ("commit", ("out", 0), ValueError, "seq_id: 'out' is swapped out"),
    ("commit", ("wait", 1), ValueError, "seq_id: the last block of 'wait' waits for a copy"),
    ("truncate", ("full", 2.5), ValueError, r"num_tokens: expected 2\.\.3 .*, got 2.5"),
    ("reserve", ("full", None), ValueError, r"num_tokens: expected 0\.\.1 .*, got None"),
    ("rollback", ("out",), ValueError, "seq_id: 'out' is swapped out"),
    ("fork", ("full", "new"), ValueError, "parent_id: 'full' has 1 reserved tokens that are not committed"),
    ("fork", ("fork", "full"), ValueError, "seq_id: 'full' is in use"),
    ("fork", ("nobody", "new"), ValueError, "seq_id: 'nobody' is unknown"),
    ("fork", ("out", "new"), ValueError, "seq_id: 'out' is swapped out"),
    ("free", ("nobody",), ValueError, "seq_id: 'nobody' is unknown: never admitted, or freed already"),
    ("reset", ("full",), ValueError, "free_sequences: expected True or False, got 'full'"),
    ("swap_out", ("out",), ValueError, "seq_id: 'out' is swapped out"),
    ("swap_out", ("nobody",), ValueError, "seq_id: 'nobody' is unknown"),
    ("swap_in", ("full",), ValueError, "seq_id: 'full' is not swapped out"),
    ("swap_in", ("nobody",), ValueError, "seq_id: 'nobody' is unknown"),
    ("can_swap_in", ("full",), ValueError, "seq_id: 'full' is not swapped out"),
    ("can_swap_out", ("out",), ValueError, "seq_id: 'out' is swapped out"),
    ("block_ids", ("out",), ValueError, "seq_id: 'out' is swapped out"),
    ("block_ids", ("nobody",), ValueError, "seq_id: 'nobody' is unknown"),
    ("num_tokens", ("nobody",), ValueError, "seq_id: 'nobody' is unknown"),
    ("slots", ("full", 2, 4), ValueError, r"start, stop: expected a range within 0\.\.3 .*, got 2\.\.4"),
    ("slots", ("full", -1, 2), ValueError, r"start, stop: expected a range within 0\.\.3 .*, got -1\.\.2"),
]


@pytest.mark.parametrize(("name", "args", "error", "message"), BAD_CALLS)
def test_a_bad_call_says_why_and_changes_nothing(name: str, args: tuple, error: type[Exception], message: str) -> None:
    cache = prepared()
    before, bytes_before = state(cache), cache.layers[0].clone()
    with pytest.raises(error, match=message):
        getattr(cache, name)(*args)
    assert state(cache) == before
    assert torch.equal(cache.layers[0], bytes_before)


@pytest.mark.parametrize("number", [-1, 1.5, "1"])
@pytest.mark.parametrize("name", ["num_tokens", "spare_blocks"])
def test_can_swap_in_takes_no_such_number(name: str, number: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected "):
        prepared().can_swap_in("out", **{name: number})


def test_swaps_that_do_not_fit_change_nothing() -> None:
    cache = prepared()
    cache.flush_copies()
    before = state(cache)
    with pytest.raises(OutOfBlocks, match="host cache: expected 1 free blocks, got 0 of 1"):
        cache.swap_out("fork")
    assert state(cache) == before
    cache.append("full", [4, 5, 6])
    cache.admit("last", [8, 8])
    before = state(cache)
    assert not cache.can_swap_in("out")
    with pytest.raises(OutOfBlocks, match="device cache: expected 1 free blocks, got 0 of 6"):
        cache.swap_in("out")
    assert state(cache) == before


def test_double_free() -> None:
    cache = BlockAllocator(4, 2, num_host_blocks=2)
    admit_computed(cache, "a", [1, 2, 3])
    cache.free("a")
    with pytest.raises(ValueError, match="freed already"):
        cache.free("a")
    pool = BlockPool(4, "device")
    (block,) = pool.take([None])
    pool.release(block)
    with pytest.raises(ValueError, match="double free of block 0 of the device cache"):
        pool.release(block)
    with pytest.raises(ValueError, match="block: 0 of the device cache is free"):
        pool.share(block)


@pytest.mark.parametrize("block", [-1, 4])
def test_foreign_blocks(block: int) -> None:
    pool = BlockPool(4, "host")
    for call in (pool.share, pool.release):
        with pytest.raises(ValueError, match=rf"block: expected an id in 0\.\.3 of the host cache, got {block}"):
            call(block)


def test_copies_must_be_taken_before_a_swap() -> None:
    cache = BlockAllocator(8, 4, num_host_blocks=8)
    admit_computed(cache, "a", [1, 2])
    cache.fork("a", "b")
    cache.append("b", [3])
    before = state(cache)
    with pytest.raises(ValueError, match="copies are pending"):
        cache.swap_out("b")
    assert state(cache) == before


def test_the_cache_does_pending_copies_before_a_swap() -> None:
    cache = KVCache(1, 8, 4, 1, 1, num_host_blocks=8)
    admit_computed(cache, "a", [1, 2])
    (source,) = cache.block_ids("a")
    cache.layers[0][source] = 7
    cache.fork("a", "b")
    cache.append("b", [3])
    ((_, host),) = cache.swap_out("b")
    cache.synchronize()
    assert (cache.host_layers[0][host] == 7).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks", -1), ("block_size", 0), ("num_host_blocks", -1), ("num_layers", 0), ("head_size", 0)],
)
def test_bad_sizes(name: str, value: int) -> None:
    sizes = {"num_layers": 1, "num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_size": 1} | {name: value}
    with pytest.raises(ValueError, match=f"{name}: expected at least {value + 1}, got {value}"):
        KVCache(**sizes)


def test_bad_layouts() -> None:
    with pytest.raises(ValueError, match=r"layout: expected one of .*'X_PACKED'.*, got 'NHDX'"):
        KVCache(1, 1, 1, 1, 1, layout="NHDX")
    with pytest.raises(ValueError, match="head_size: expected a multiple of x = 8"):
        KVCache(1, 1, 1, 1, 12, layout=Layout.X_PACKED, dtype=torch.float16)


def test_bad_dtype() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected .*, got torch.int8"):
        KVCache(1, 1, 1, 1, 1, dtype=torch.int8)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout.NHD, (5, 2, 3, 2, 8)),
        (Layout.HND, (5, 2, 3, 2, 8)),
        (Layout.INTERLEAVED, (5, 3, 4, 8)),
        (Layout.X_PACKED, (2, 5, 48)),
        ("HND", (5, 2, 3, 2, 8)),
    ],
)
def test_layers_and_bytes(layout: Layout | str, shape: tuple[int, ...]) -> None:
    sizes = {"num_layers": 4, "block_size": 3, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
    cache = KVCache(num_blocks=5, layout=layout, num_host_blocks=2, **sizes)
    assert [tuple(layer.shape) for layer in cache.layers] == [shape] * 4
    assert len({layer.untyped_storage().data_ptr() for layer in cache.layers}) == 4
    assert cache.nbytes == 4 * 5 * 2 * 3 * 2 * 8 * 2
    assert cache.host_nbytes == 4 * 2 * 2 * 3 * 2 * 8 * 2
    assert KVCache.num_blocks_for(cache.nbytes, **sizes) == 5
    assert KVCache.num_blocks_for(cache.nbytes - 1, **sizes) == 4
    if layout == Layout.HND:
        assert cache.layers[0].transpose(2, 3).is_contiguous()


def test_latent_layers() -> None:
    sizes = {"num_layers": 2, "block_size": 3, "num_kv_heads": 1, "head_size": [576, 40], "value_head_size": [512, 32]}
    options = {"layout": "LATENT", "dtype": torch.bfloat16}
    cache = KVCache(num_blocks=5, num_host_blocks=2, **sizes, **options)
    assert [tuple(layer.shape) for layer in cache.layers] == [(5, 3, 576), (5, 3, 40)]
    assert cache.value_head_size == (512, 32)
    assert cache.nbytes == 5 * 3 * (576 + 40) * 2
    assert KVCache.num_blocks_for(cache.nbytes, **sizes, **options) == 5
    assert KVCache.num_blocks_for(cache.nbytes - 1, **sizes, **options) == 4
    rows = KVCache(
        2, 5, 3, 1, 576, value_head_size=512, layout="LATENT", dtype=torch.uint8, kv_cache_dtype="fp8_ds_mla"
    )
    assert [tuple(layer.shape) for layer in rows.layers] == [(5, 3, 656)] * 2 and rows.head_size == (576, 576)
    of_rows = {"value_head_size": 512, "layout": "LATENT", "kv_cache_dtype": "fp8_ds_mla"}
    assert KVCache.num_blocks_for(rows.nbytes, 2, 3, 1, 576, torch.uint8, **of_rows) == 5
    assert KVCache.num_blocks_for(rows.nbytes - 1, 2, 3, 1, 576, torch.uint8, **of_rows) == 4
    assert KVCache(1, 2, 3, 1, 8, dtype=torch.uint8, kv_cache_dtype="fp8").layers[0].shape == (2, 2, 3, 1, 8)
    with pytest.raises(
        ValueError, match=r"dtype: expected torch.uint8 with kv_cache_dtype='fp8_ds_mla', got torch.float32"
    ):
        KVCache(1, 5, 3, 1, 576, **of_rows)
    with pytest.raises(ValueError, match=r"head_size: expected 576 with kv_cache_dtype='fp8_ds_mla', got 40"):
        KVCache(1, 5, 3, 1, 40, dtype=torch.uint8, layout="LATENT", kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(ValueError, match=r"layout: expected LATENT with kv_cache_dtype='fp8_ds_mla', got NHD"):
        KVCache(1, 5, 3, 1, 576, dtype=torch.uint8, layout="NHD", kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected one of .*, got 'fp4'"):
        KVCache(1, 5, 3, 1, 576, dtype=torch.uint8, kv_cache_dtype="fp4")
    with pytest.raises(ValueError, match=r"num_kv_heads: expected 1 for the LATENT layout, .*, got 2"):
        KVCache(1, 5, 3, 2, 40, layout="LATENT")
    with pytest.raises(ValueError, match=r"value_head_size: expected at most head_size = R . P = 40 .*, got 41"):
        KVCache(1, 5, 3, 1, 40, value_head_size=41, layout="LATENT")


@pytest.mark.parametrize("layout", ["NHD", "HND", "INTERLEAVED", "LATENT"])
def test_layers_of_keys_alone(layout: str) -> None:
    """The keys of an indexer, next to the cache of its layer: they are moved with it."""
    K = 1 if layout == "LATENT" else 2
    sizes = {"num_kv_heads": [K, 1], "head_size": [16, 8], "value_head_size": [16, 0], "layout": layout}
    cache = KVCache(2, 5, 3, num_host_blocks=2, **sizes)
    assert cache.layers[1].shape == (5, 3, 8) and cache.host_layers[1].shape == (2, 3, 8)
    assert cache.nbytes == sum(layer.nbytes for layer in cache.layers)
    arguments = {"num_layers": 2, "block_size": 3, "dtype": torch.float32, **sizes}
    assert KVCache.num_blocks_for(cache.nbytes, **arguments) == 5
    assert KVCache.num_blocks_for(cache.nbytes - 1, **arguments) == 4
    cache.admit("a", [1, 2])  # a full block would stay on the device
    cache.commit("a", 2)
    written = [layer.normal_().clone() for layer in cache.layers]
    blocks = cache.block_ids("a")
    cache.swap_out("a")
    for layer in cache.layers:
        layer.zero_()
    cache.swap_in("a")
    for layer, before in zip(cache.layers, written, strict=True):
        assert torch.equal(layer[cache.block_ids("a")], before[blocks])


def test_keys_alone_next_to_rows_with_scales() -> None:
    sizes = {"num_kv_heads": 1, "head_size": [576, 128], "value_head_size": [512, 0]}
    options = {"layout": "LATENT", "kv_cache_dtype": "fp8_ds_mla"}
    cache = KVCache(2, 5, 64, **sizes, **options, dtype=torch.uint8)
    assert [(layer.shape[2], layer.dtype) for layer in cache.layers] == [(656, torch.uint8), (128, torch.bfloat16)]
    assert KVCache.num_blocks_for(cache.nbytes, 2, 64, dtype=torch.uint8, **sizes, **options) == 5
    assert KVCache.num_blocks_for(cache.nbytes - 1, 2, 64, dtype=torch.uint8, **sizes, **options) == 4


def test_sizes_by_layer() -> None:
    sizes = {"num_kv_heads": [2, 1, 4], "head_size": [8, 16, 4], "value_head_size": [8, 8, 12]}
    cache = KVCache(3, 5, 3, **sizes, dtype=torch.float16, num_host_blocks=2)
    assert [tuple(layer.shape) for layer in cache.layers] == [(5, 2, 3, 2, 8), (5, 3, 1, 24), (5, 3, 4, 16)]
    assert [tuple(layer.shape) for layer in cache.host_layers] == [(2, 2, 3, 2, 8), (2, 3, 1, 24), (2, 3, 4, 16)]
    per_block = 3 * 2 * (2 * 16 + 24 + 4 * 16)
    assert (cache.nbytes, cache.host_nbytes) == (5 * per_block, 2 * per_block)
    arguments = {"num_layers": 3, "block_size": 3, "dtype": torch.float16, **sizes}
    assert KVCache.num_blocks_for(5 * per_block, **arguments) == 5
    assert KVCache.num_blocks_for(5 * per_block - 1, **arguments) == 4
    key, value = split_joined_cache(cache.layers[1], 16)
    assert (key.shape, value.shape) == ((5, 3, 1, 16), (5, 3, 1, 8))
    assert value.data_ptr() == key.data_ptr() + 16 * 2
    hnd = KVCache(1, 5, 3, 2, 16, value_head_size=8, layout="HND")
    assert hnd.layers[0].shape == (5, 3, 2, 24)
    assert hnd.layers[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_size": [8]}, "head_size: expected a number, or one for each of 2 layers, got 1"),
        ({"num_kv_heads": [1, 2, 3]}, "num_kv_heads: expected a number, or one for each of 2 layers, got 3"),
        ({"value_head_size": [8, -1]}, "value_head_size: expected at least 0, got -1"),
        ({"value_head_size": [8, 0], "num_kv_heads": 2}, "num_kv_heads: expected 1 where value_head_size is 0"),
        ({"value_head_size": [8, 0], "layout": "X_PACKED"}, "layout: expected another where value_head_size is 0"),
        ({"value_head_size": 16, "layout": "X_PACKED"}, "layout: expected NHD or HND where value_head_size 16 is not"),
        ({"value_head_size": 16, "layout": "INTERLEAVED"}, "layout: expected NHD or HND .* got INTERLEAVED"),
    ],
)
def test_bad_sizes_by_layer(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(2, 4, 2, **({"num_kv_heads": 1, "head_size": 8} | sizes))


def test_reset_forgets_all_prefixes() -> None:
    cache = KVCache(1, 8, 2, 1, 2, num_host_blocks=4)
    prompt = [1, 2, 3, 4, 5]
    admit_computed(cache, "a", prompt)
    admit_computed(cache, "b", [7, 8, 9])
    cache.swap_out("b")
    cache.fork("a", "c")
    cache.append("c", [6])  # waits for a copy
    before = state(cache)
    with pytest.raises(ValueError, match="free_sequences: expected no sequence in the cache, got 3"):
        cache.reset()
    assert state(cache) == before
    cache.reset(free_sequences=True)
    check_invariants(cache)
    assert (cache.pool.num_free, cache.pool.num_idle, cache.host_pool.num_free) == (8, 0, 4)
    assert not cache.pending_copies()
    assert not cache._prefixes
    assert cache.admit("a", prompt) == 0
    assert cache.admit("b", [7, 8, 9]) == 0
    cache.free("a")
    cache.free("b")
    cache.reset()
    Walk(KVCache(1, 20, 2, 1, 1, num_host_blocks=5), seed=0).run(50)


class Interrupted(BaseException):
    """As KeyboardInterrupt is: no Exception."""


@pytest.mark.parametrize("raised", [RuntimeError, Interrupted])
@pytest.mark.parametrize("method", ["flush_copies", "swap_out", "swap_in"])
def test_what_an_op_raises_loses_nothing(
    method: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(2, 6, 2, 1, 2, num_host_blocks=2)
    walk = Walk(cache, seed=0)
    admit_computed(cache, "a", [1, 2, 3])
    walk.write_all("a", [1, 2, 3])
    cache.fork("a", "b")
    walk.live["b"] = copy.deepcopy(walk.live["a"])
    if method == "flush_copies":
        cache.append("b", [4])
        walk.live["b"].extend([4])
    if method == "swap_in":
        cache.swap_out("b")
        walk.live["b"].swapped = True

    def fails(*args: object) -> None:
        raise raised("no memory")

    before, stats = state(cache), cache.stats()
    arguments = () if method == "flush_copies" else ("b",)
    with monkeypatch.context() as patched:
        patched.setattr(paged_ops.cache.kv_cache, "copy_blocks" if method == "flush_copies" else "swap_blocks", fails)
        with pytest.raises(raised, match="no memory"):
            getattr(cache, method)(*arguments)
    assert state(cache) == before
    assert cache.stats() == stats
    walk.check()
    getattr(cache, method)(*arguments)
    if method != "flush_copies":
        walk.live["b"].swapped = method == "swap_out"
    walk.check()
    assert cache.stats() != stats


def test_a_swap_that_fails_forgets_what_its_target_held(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 4, 2, 1, 2, num_host_blocks=2)
    admit_computed(cache, "a", [1, 2, 3])
    cache.swap_out("a")
    cache.swap_in("a")
    assert cache.host_pool.num_idle == 1
    admit_computed(cache, "b", [4, 5, 6])
    fails = unittest.mock.Mock(side_effect=RuntimeError("after a part of the blocks was written"))
    with monkeypatch.context() as patched:
        patched.setattr(paged_ops.cache.kv_cache, "swap_blocks", fails)
        with pytest.raises(RuntimeError, match="a part"):
            cache.swap_out("b")
    check_invariants(cache)
    assert cache.host_pool.num_idle == 0, "the block may be half overwritten"
    assert not cache.is_swapped_out("b")
    assert len(cache.swap_out("a")) == 2


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_under_another_default_device_and_dtype(device: str, dtype: torch.dtype) -> None:
    with defaults(device, dtype):
        cache = KVCache(2, 24, 4, 1, 2, num_host_blocks=8)
        graphs.build_inputs(
            graphs.step_builder(cache, 4, 16, 64), Batch([3, 1], [0, 4], [[0], [1, 2]]), [1, 2, 3, 4], 4, 8
        )
    walk = Walk(cache, seed=2)

    def elsewhere(name: str) -> None:
        method = getattr(cache, name)

        def call(*args: object) -> object:
            with defaults(device, dtype):
                return method(*args)

        setattr(cache, name, call)

    for name in ("flush_copies", "swap_out", "swap_in", "admit", "append", "commit", "free", "rollback"):
        elsewhere(name)
    walk.run(150)
    assert min(cache.stats().copied_blocks, cache.stats().swapped_out_blocks, cache.stats().swapped_in_blocks) > 0


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_copy_is_an_independent_cache_with_equal_content(how: str, layout: Layout) -> None:
    cache = KVCache(2, 24, 4, heads(layout), 16, layout=layout, num_host_blocks=8)
    walk = Walk(cache, seed=11)
    moves = [walk.admit, walk.append, walk.step, walk.fork, walk.swap_out, walk.step]
    for turn in range(60):
        moves[turn % len(moves)]()
    walk.free()
    admit_computed(cache, "parent", [5])
    walk.write_all("parent", [5])
    cache.fork("parent", "child")
    walk.live["child"] = copy.deepcopy(walk.live["parent"])
    cache.append("child", [6])
    walk.live["child"].extend([6])
    assert cache.pending_copies()
    assert any(cache.is_swapped_out(seq_id) for seq_id in walk.live)
    before, content = state(cache), [layer.clone() for layer in cache.layers + cache.host_layers]
    other = COPIES[how](cache)
    twin = Walk(other, seed=11)
    twin.live, twin.history, twin.next_id = copy.deepcopy((walk.live, walk.history, walk.next_id))
    twin.events = walk.events.copy()
    twin.random.setstate(walk.random.getstate())
    twin.check()
    assert other.stats() == cache.stats()
    assert all(a.stride() == b.stride() for a, b in zip(other.layers, cache.layers, strict=True))
    twin.run(150)
    assert state(cache) == before
    assert all(torch.equal(a, b) for a, b in zip(cache.layers + cache.host_layers, content, strict=True))
    walk.check()
    walk.run(150)  # the same calls: shared prefixes are found in the copy as in the original
    assert twin.events == walk.events
    assert other.stats() == cache.stats()


def test_copies_of_a_bookkeeper_and_no_shallow_ones() -> None:
    cache = BlockAllocator(8, 2)
    admit_computed(cache, "a", [1, 2, 3])
    other = copy.deepcopy(cache)
    cache.reset(free_sequences=True)
    assert other.admit("b", [1, 2, 3]) == 2
    other.free("a")
    other.free("b")
    admit_computed(other, "filler", list(range(16)))
    other.free("filler")
    assert len(other._prefixes) == 1 + 8, "prefixes that nobody names any more are gone in the copy as well"
    with pytest.raises(TypeError, match=r"BlockAllocator: a shallow copy .* copy.deepcopy"):
        copy.copy(other)


def test_a_cache_of_no_blocks() -> None:
    cache = KVCache(1, 0, 16, 1, 4)
    assert cache.nbytes == 0
    assert not cache.can_admit([1])
    with pytest.raises(OutOfBlocks):
        cache.admit("a", [1])
    cache.flush_copies()
    cache.synchronize()


@pytest.mark.parametrize("layout", list(Layout))
def test_all_layers_move_in_one_call(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, list[list[int]]]] = []

    def spy(name: str) -> None:
        real = getattr(paged_ops.cache.kv_cache, name)

        def call(*args) -> None:
            calls.append((name, len(args[0]), args[-1].tolist()))
            real(*args)

        monkeypatch.setattr(paged_ops.cache.kv_cache, name, call)

    spy("copy_blocks")
    spy("swap_blocks")
    cache = KVCache(3, 8, 2, 1, 4, layout=layout, num_host_blocks=4)
    tensors = 6 if layout is Layout.X_PACKED else 3
    admit_computed(cache, "a", [1])
    cache.fork("a", "b")
    cache.fork("a", "c")
    cache.append("b", [2])
    cache.append("c", [3])
    a, b, c = (cache.block_ids(seq_id)[0] for seq_id in "abc")
    cache.flush_copies()
    cache.flush_copies()
    assert calls == [("copy_blocks", tensors, [[a, b], [a, c]])]
    (pair,) = cache.swap_out("a")
    (back,) = cache.swap_in("a")
    assert calls[1:] == [("swap_blocks", tensors, [list(pair)]), ("swap_blocks", tensors, [list(back)])]
