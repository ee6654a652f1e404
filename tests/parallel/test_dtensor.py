"""The ops on DTensors: the cases of every op with their heads spread over two ranks, and what is refused."""

import pytest

from paged_ops import registry


@pytest.mark.parametrize("op", sorted(registry.OPS))
def test_cases_with_heads_spread(run_on, op):
    """A fourth of the cases, where there are hundreds."""
    for calls, spread in run_on("dtensor_cases.every_case", 2, 120, op=op):
        if op == "latent_cache_write":
            assert spread == 0, "all ranks have the latents, which are of all heads"
        else:
            assert spread >= 0.4 * calls, "two ranks divide the heads of many"


def test_compiled(run_on):
    assert run_on("dtensor_cases.compiled", 2, 120) == [True, True]


def test_refused(run_on):
    for told in run_on("dtensor_cases.refused", 2, 60):
        assert told == [
            "query: expected Shard(1), by heads, or Replicate(), got Shard(dim=0)",
            "query: expected Shard(1), by heads, or Replicate(), got Partial(sum)",
            "kv_cache: expected a DTensor sharded by heads, Shard(3), as query is, got a plain tensor",
            "kv_cache: expected a DTensor sharded by heads, Shard(3), as query is, got Replicate()",
            "kv_cache: expected Shard(3), by heads, or Replicate(), got Shard(dim=0)",
            "block_tables: expected Replicate(), because every rank has the whole batch, got Shard(dim=0)",
            "query: expected a number of heads divisible by 2 ranks, got 3",
            "kv_caches[0]: expected all blocks on every rank, Replicate() or Shard() by heads, got Shard(dim=0)",
            "kv_caches[1]: expected Shard(dim=3), like the other caches, got Replicate()",
        ]
