"""Models that transformers spread over ranks give, on paged caches, the tokens of one process; gloo, float32."""

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers shards models with accelerate")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


def check(results, heads, fused=None, head_size=16):
    expected = results[0][0]
    assert len({token for tokens in expected for token in tokens}) > 10, "its text varies"
    for _, by_way, *sizes in results:
        assert sizes == [heads, head_size]
        for way, (tokens, saved) in by_way.items():
            assert tokens == expected, way
            assert saved == (fused if "fused" in way else 0)


@pytest.mark.parametrize(
    ("size", "name", "heads", "fused"),
    [
        (2, "llama", 1, 6),
        (2, "qwen3", 1, 6),
        (2, "gemma2", 1, 6),
        (2, "gpt_oss", 2, 4),  # only its vocabulary is sharded by transformers
        (4, "llama", 1, 6),
        (4, "qwen3", 1, 6),
        (4, "gemma2", 1, 6),
        (4, "gpt_oss", 2, 4),
    ],
)
def test_tokens_equal_those_of_one_process(run_on, folder, size, name, heads, fused):
    """Two key/value heads: with four ranks each is at two of them."""
    check(run_on("model_cases.serves", size, 60, name=name, folder=folder, how=("eager", "fused")), heads, fused)


def test_latents_are_whole_on_each_rank(run_on, folder):
    """Heads are spread; a token's latent serves all of them."""
    how = ("eager", "fused")
    check(run_on("model_cases.serves", 2, 60, name="minicpm3", folder=folder, how=how), 1, 3, head_size=40)


@pytest.mark.parametrize(
    ("name", "heads", "head_size"),
    [
        ("deepseek_v32", 1, (24, 16) * 4),
        # transformers shards its experts only
        pytest.param("minimax_m3_vl_text", (2, 2, 1, 2, 2, 1), 16, marks=pytest.mark.slow),
    ],
)
def test_index_keys_are_whole_on_each_rank(run_on, folder, name, heads, head_size):
    """So all ranks select the same keys."""
    check(run_on("model_cases.serves", 2, 60, name=name, folder=folder), heads, head_size=head_size)


@pytest.mark.parametrize("how", ["layers fused", "whole"])
def test_compiled_tokens_equal_those_of_one_process(run_on, folder, how):
    check(run_on("model_cases.serves", 2, 150, name="llama", folder=folder, how=(how,)), 1, 6)


def test_a_rank_that_fails_while_the_model_is_wrapped_is_told_by_all(run_on, folder):
    for told in run_on("model_cases.fails_while_wrapped", 2, 60, spoils=True, folder=folder):
        text = "model: LlamaForCausalLM fails on a few tokens by itself: no room"
        assert told == ("ValueError", text, "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["captured", "captured layers fused"])
def test_captured_tokens_equal_those_of_one_process(run_on, folder, how):
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    check(run_on("model_cases.serves", 2, 150, name="llama", folder=folder, how=(how,)), 1, 6)


@pytest.mark.gpu
def test_a_rank_that_is_killed_while_steps_overlap_is_named(run_on, folder):
    """The survivor's device waits for it in a kernel, its host in a rendezvous."""
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    result, died = run_on("model_cases.killed", 2, 90, folder=folder, limit=5.0, after=1.0)
    assert died.code == -9
    told, seconds, again, steps = result
    print(f"after {steps} steps, {seconds:.2f} s after the kill: {told}; then: {again}")
    assert "RankError: rank 1 of 2 is" in told
    assert "cannot continue" in again
    assert steps > 3
    assert seconds < 15


def test_heads_that_cannot_be_spread_are_refused(run_on, folder):
    for told in run_on("model_cases.refuses", 2, 60, folder=folder):
        assert "query heads in a multiple of the 2 ranks, and key/value heads" in told
        assert "got 6 and 3 heads in model.layers.0.self_attn" in told
