"""Context parallelism: tokens of every sequence spread over ranks give what one process gives; gloo, the CPU."""

import pytest
import torch

from paged_ops.cache import KVCache
from paged_ops.cache.shard import TokenShard
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, make_loop
from tests.parallel.context_cases import BATCHES, FORMS


@pytest.mark.parametrize(("size", "block_size"), [(1, 4), (2, 4), (2, 2), (3, 12), (4, 8)])
def test_each_token_is_on_one_rank(size, block_size):
    positions = torch.arange(50)
    blocks = positions // block_size + 7
    b = block_size // size
    owners = torch.full((50,), -1)
    for rank in range(size):
        shard = TokenShard(rank, size)
        assert shard.check(block_size) == b
        slots = shard.slots(blocks, positions, block_size)
        held = slots >= 0
        assert (owners[held] == -1).all()
        owners[held] = rank
        assert torch.equal(slots[held], blocks[held] * b + positions[held] % b)
        for n in range(51):
            assert int(shard.lens(torch.tensor(n), block_size)) == int(held[:n].sum())
    assert torch.equal(owners, positions // b % size)


def test_slots_of_a_cache():
    caches = [KVCache(1, 8, 6, 1, 4, shard=TokenShard(rank, 3)) for rank in range(3)]
    for cache in caches:
        cache.admit("s", range(14))
        assert cache.block_ids("s") == [0, 1, 2]
    assert [cache.slots("s") for cache in caches] == [
        [0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1, -1, 4, 5],
        [-1, -1, 0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1, -1],
        [-1, -1, -1, -1, 0, 1, -1, -1, -1, -1, 2, 3, -1, -1],
    ]
    assert caches[1].slots("s", 8, 10) == [2, 3]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_is_that_over_the_whole_cache(run_on, size, batch):
    for form in FORMS:
        if size == 2 or form in ("plain", "sinks", "one head"):
            assert run_on("context_cases.attends", size, 30, batch=batch, form=form) == [True] * size, form


@pytest.mark.parametrize("size", [2, 4])
def test_merges_by_rows_and_of_own_heads(run_on, size):
    assert all(run_on("context_cases.many_rows", size, 30))


def test_steps_that_follow_without_the_host(run_on):
    assert run_on("context_cases.advances", 2, 30) == ["collectives (no symmetric memory on cpu)"] * 2


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 18, "num_host_blocks": 128, "max_num_tokens": 40}, {"num_blocks": 18, "max_num_tokens": 40}],
    ids=["plain", "swaps", "computes again"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_greedy_tokens_and_decisions_equal_one_process(run_on, size, options):
    loop = make_loop(**options)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    stats = {name: value for name, value in vars(loop.stats).items() if name != "seconds"}
    for outputs, others in run_on("context_cases.generates", size, 60, **options):
        assert outputs == EXPECTED
        assert others == stats


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


def check(results, shard, heads):
    expected = results[0][0]
    assert len({token for tokens in expected for token in tokens}) > 10, "its text varies"
    for _, texts, shards, num_kv_heads in results:
        assert texts == expected
        assert (shards, num_kv_heads) == (shard, heads)


@pytest.mark.parametrize(
    ("size", "name", "shard"),
    [
        (2, "llama", [2]),
        (2, "qwen3", [2]),
        (2, "gemma2", [2, 1]),  # of its layers with a window each rank keeps all tokens
        (2, "gpt_oss", [2, 1]),
        (4, "llama", [4]),
        (4, "qwen3", [4]),
    ],
)
def test_tokens_of_models_equal_those_of_one_process(run_on, folder, size, name, shard):
    check(run_on("context_cases.serves", size, 60, name=name, folder=folder), shard, 2)


def test_compiled_tokens_equal_those_of_one_process(run_on, folder):
    """Without inductor, for which the exchange is one opaque op."""
    check(run_on("context_cases.serves", 2, 60, name="llama", folder=folder, how="layers fused"), [2], 2)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beside_tensor_parallelism(run_on, folder, name):
    check(run_on("context_cases.serves", 4, 60, name=name, folder=folder, tensor_parallel=2), [2], 1)


def test_decodes_of_ranks_with_query_heads_of_their_own(run_on):
    assert run_on("context_cases.decodes_with_gathered_heads", 2, 60, device_type="cpu") == [0, 0]


@pytest.mark.gpu
def test_captured_on_gpus(run_on, folder):
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    assert run_on("context_cases.replays", 2, 90) == [0, 0]
    assert run_on("context_cases.decodes_with_gathered_heads", 2, 90, device_type="cuda") == [0, 0]
    check(run_on("context_cases.serves", 2, 90, name="llama", folder=folder, how="captured"), [2], 2)


def test_a_model_that_is_sharded_over_the_same_ranks_is_refused(run_on, folder):
    pytest.importorskip("accelerate", reason="transformers shards models with accelerate")
    for rank, message in enumerate(run_on("context_cases.sharded_over_all", 4, 60, folder=folder)):
        first = rank // 2 * 2
        assert message.startswith("context: expected ranks that do not shard the model"), message
        assert message.endswith(f"where ranks [{first}, {first + 1}] shard one model")


def test_what_is_not_served_is_refused_by_name(run_on, folder):
    told = [
        "alibi_slopes: expected none with context parallelism",
        "sliding_window: expected none with context parallelism",
        "attention_chunk: expected none with context parallelism",
        "block_sparse: expected none with context parallelism",
        "bidirectional_ranges: expected none with context parallelism",
        "common_prefix_len: expected 0 for a cache sharded over ranks, got 8",
        "block_size: expected a multiple of the 2 ranks that share a block, got 9",
        "shard: expected one rank for layers with a window or chunk",
        "context: expected a model with layers that see everything, got MistralForCausalLM",
        "kv_cache: expected TokenShard(rank=0, size=2) in layer 0",
        'context: expected a process group, or a device mesh with a dimension "cp", got cp',
    ]
    for rank, messages in enumerate(run_on("context_cases.refused", 2, 60, folder=folder)):
        for message, start in zip(messages, told, strict=True):
            assert message.startswith(start.replace("rank=0", f"rank={rank}")), message
