"""Continuous batching over a toy model, whose logits depend on every earlier token through the paged cache only."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams, sample_token
from paged_ops.metadata import AttentionMetadata

V, H, K, D, B = 61, 4, 2, 8, 4
GENERATOR = torch.Generator().manual_seed(0)
EMBED = torch.randn(V, H * D, generator=GENERATOR)
POSITION = torch.randn(256, H * D, generator=GENERATOR) * 0.5
TO_KEY, TO_VALUE = torch.randn(2, H * D, K * D, generator=GENERATOR) * 0.3
TO_LOGITS = torch.randn(H * D, V, generator=GENERATOR)


def toy_step(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: list[Tensor]) -> Tensor:
    hidden = EMBED[input_ids] + POSITION[metadata.positions]
    key, value = (hidden @ TO_KEY).view(-1, K, D), (hidden @ TO_VALUE).view(-1, K, D)
    paged_ops.reshape_and_cache(key, value, kv_caches[0], metadata.slot_mapping)
    batch = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
    out = paged_ops.paged_attention(hidden.view(-1, H, D), kv_caches[0], *batch, D**-0.5)
    return out.reshape(-1, H * D)[last_rows] @ TO_LOGITS


def dense_greedy(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        hidden = EMBED[tokens] + POSITION[: len(tokens)]
        key, value = (each.view(-1, K, D).repeat_interleave(H // K, 1) for each in (hidden @ TO_KEY, hidden @ TO_VALUE))
        weights = torch.softmax(torch.einsum("hd,jhd->hj", hidden[-1].view(H, D), key) * D**-0.5, -1)
        tokens.append(int((torch.einsum("hj,jhd->hd", weights, value).reshape(-1) @ TO_LOGITS).argmax()))
    return tokens[len(prompt) :]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(1, 2, 4, 5, 9, 13, 17, 30, 33, 41)
EXPECTED = [dense_greedy(prompt, 12) for prompt in PROMPTS]
GREEDY = SamplingParams(max_new_tokens=12)


def make_loop(num_blocks: int = 128, num_host_blocks: int = 0, **sizes: int) -> GenerationLoop:
    return GenerationLoop(toy_step, KVCache(1, num_blocks, B, K, D, num_host_blocks=num_host_blocks), **sizes)


def assert_empty(loop: GenerationLoop) -> None:
    stats = loop.kv_cache.stats()
    assert (stats.used_blocks, stats.host_used_blocks) == (0, 0)
    assert not loop.has_work


@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), [(16, 256), (3, 64), (4, 4), (1, 1), (10, 17)])
def test_greedy_equals_dense_whatever_the_batches(max_num_seqs: int, max_num_tokens: int) -> None:
    assert len({token for tokens in EXPECTED for token in tokens}) > V // 2, "the toy model's text varies"
    loop = make_loop(max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    assert loop.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert loop.stats.generated_tokens == 12 * len(PROMPTS)
    assert loop.stats.preemptions == 0
    assert loop.stats.steps >= loop.stats.prompt_tokens // max_num_tokens
    assert_empty(loop)


@pytest.mark.parametrize(("num_host_blocks", "swapped_out", "recomputed"), [(128, 2, 0), (0, 0, 2), (6, 1, 1)])
def test_preemption_changes_no_token(num_host_blocks: int, swapped_out: int, recomputed: int) -> None:
    loop = make_loop(num_blocks=18, num_host_blocks=num_host_blocks, max_num_tokens=40)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    assert loop.stats.peak_used_blocks == 18
    assert (loop.stats.swapped_out, loop.stats.recomputed) == (swapped_out, recomputed)
    assert bool(loop.kv_cache.stats().swapped_in_blocks) == bool(swapped_out)
    assert_empty(loop)


def test_a_preempted_prompt_that_was_half_computed() -> None:
    old, young = prompts_of(7, 40)
    loop = make_loop(num_blocks=13, num_host_blocks=13, max_num_seqs=2, max_num_tokens=6)
    outputs = loop.generate([old, young], SamplingParams(max_new_tokens=11))
    assert outputs == [dense_greedy(old, 11), dense_greedy(young, 11)]
    assert loop.stats.swapped_out == 1
    assert loop.stats.prompt_tokens == 47, "nothing was computed twice"


def test_equal_prefixes_are_computed_once_and_shared() -> None:
    (prefix,) = prompts_of(22)
    prompts = [[*prefix, *tail] for tail in prompts_of(1, 3, 5, 7)] + [prefix, prefix[:9]]
    loop = make_loop()
    assert loop.generate(prompts, GREEDY) == [dense_greedy(prompt, 12) for prompt in prompts]
    assert loop.stats.cached_tokens == 20 * 4 + 8
    assert loop.stats.prompt_tokens == sum(map(len, prompts)) - loop.stats.cached_tokens
    assert loop.stats.peak_shared_blocks == 5
    assert_empty(loop)


def test_requests_join_while_others_run() -> None:
    loop = make_loop(max_num_seqs=3)
    outputs: dict[int, list[int]] = {}
    for prompt in PROMPTS:
        loop.submit(prompt, GREEDY)
        for new in loop.step() + loop.step():
            outputs.setdefault(new.request_id, []).append(new.token)
    for request_id, tokens in loop.run().items():
        outputs.setdefault(request_id, []).extend(tokens)
    assert [outputs[i] for i in range(len(PROMPTS))] == EXPECTED


def test_tokens_stream_and_say_why_they_end() -> None:
    seen: list[NewToken] = []
    stop = EXPECTED[5][4]
    params = [GREEDY, SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)), SamplingParams(max_new_tokens=1)]
    outputs = make_loop().generate([PROMPTS[3], PROMPTS[5], PROMPTS[8]], params, on_token=seen.append)
    assert outputs == [EXPECTED[3], EXPECTED[5][: EXPECTED[5].index(stop) + 1], EXPECTED[8][:1]]
    assert [[new.token for new in seen if new.request_id == i] for i in range(3)] == outputs
    ends = {new.request_id: new.finish_reason for new in seen if new.finish_reason}
    assert ends == {0: "length", 1: "stop", 2: "length"}
    assert Counter(new.request_id for new in seen if new.finish_reason) == {0: 1, 1: 1, 2: 1}


def test_samples_depend_on_the_seed_and_not_on_the_batch() -> None:
    params = [SamplingParams(max_new_tokens=12, temperature=2.0, seed=i) for i in range(len(PROMPTS))]
    together = make_loop().generate(PROMPTS, params)
    assert together == make_loop(num_blocks=18, max_num_tokens=40).generate(PROMPTS, params), "preempted in between"
    assert together[4] == make_loop().generate(PROMPTS[4:5], params[4])[0]
    assert together != EXPECTED
    other = [SamplingParams(max_new_tokens=12, temperature=2.0, seed=i + 100) for i in range(len(PROMPTS))]
    assert together != make_loop().generate(PROMPTS, other)
    mixed = make_loop().generate(PROMPTS[:2], [GREEDY, params[1]])
    assert mixed == [EXPECTED[0], together[1]]


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -40.0])
    draws = 4000

    def frequencies(**arguments: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        params = SamplingParams(**arguments)  # type: ignore[arg-type]
        tokens = torch.stack([sample_token(logits, params, generator) for _ in range(draws)])
        return tokens.bincount(minlength=5) / draws

    for temperature in (0.5, 1.0, 3.0):
        expected = torch.softmax(logits / temperature, -1)
        deviation = (expected * (1 - expected) / draws).sqrt()
        assert bool(((frequencies(temperature=temperature) - expected).abs() <= 4 * deviation + 1e-9).all())
    # probabilities 0.64, 0.24, 0.09, 0.03: the fewest that reach 0.8 are two
    nucleus = frequencies(temperature=1.0, top_p=0.8)
    assert nucleus[2:].sum() == 0
    assert abs(float(nucleus[0]) - 0.731) < 0.03
    assert frequencies(temperature=1.0, top_p=1e-6)[0] == 1


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_models_than_one_function_may_be_recompiled_for() -> None:
    torch._dynamo.reset()
    for depth in (1, 2):  # of another structure, so each is a graph of its own

        def step(*inputs: Any, layers: tuple[int, ...] = tuple(range(depth))) -> Tensor:
            logits = toy_step(*inputs)
            for layer in layers:
                logits = logits + layer
            return logits

        loop = GenerationLoop(step, KVCache(1, 128, B, K, D), compile=True)
        assert loop.generate(PROMPTS[:3], SamplingParams(max_new_tokens=3)) == [each[:3] for each in EXPECTED[:3]]
    torch._dynamo.reset()


def test_errors_name_the_argument() -> None:
    loop = make_loop(num_blocks=8, max_model_len=30)
    for prompt, message in (
        ([], "prompt: expected at least one token"),
        ([1] * 25, "prompt: expected at most 30 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.submit(prompt, GREEDY)
    with pytest.raises(ValueError, match="prompt: expected at most 16 tokens"):
        make_loop(num_blocks=4, max_model_len=1000).submit([1, 2, 3, 4, 5], GREEDY)
    with pytest.raises(ValueError, match="max_num_tokens: expected at least max_num_seqs = 8, got 7"):
        make_loop(max_num_seqs=8, max_num_tokens=7)
    with pytest.raises(ValueError, match="max_num_seqs: expected at least 1"):
        make_loop(max_num_seqs=0)
    with pytest.raises(ValueError, match="params: expected one for each of the 2 prompts, got 1"):
        loop.generate([[1], [2]], [GREEDY])
    for argument, value in (("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(ValueError, match=f"{argument}: expected"):
            SamplingParams(**{argument: value})  # type: ignore[arg-type]
    assert not loop.has_work
    assert loop.step() == []
