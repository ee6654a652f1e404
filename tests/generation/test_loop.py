"""Continuous batching over a toy model, whose logits depend on every earlier token through the paged cache only."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams
from paged_ops.generation.distribution import draw, key_of, random_key, uniforms
from paged_ops.metadata import AttentionMetadata
from tests.generation.toy import (
    EXPECTED,
    GREEDY,
    PROMPTS,
    B,
    D,
    K,
    V,
    assert_empty,
    dense_greedy,
    make_loop,
    prompts_of,
    step_on,
    tokens_by_request,
    toy_step,
)
from tests.helpers.gpu import GPU

pytestmark = pytest.mark.usefixtures("order")


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

    def frequencies(temperature: float, top_p: float = 1.0) -> Tensor:
        keys = torch.tensor([random_key(key_of(3, 0), position) for position in range(draws)])
        limits = None if top_p == 1 else torch.full((draws,), top_p, dtype=torch.float64)
        tokens = draw(logits.expand(draws, 5), torch.full((draws,), temperature), keys, top_p=limits)
        if limits is None:
            off = {"top_p": torch.ones(draws).double(), "top_k": torch.zeros(draws).long(), "min_p": torch.zeros(draws)}
            same = draw(logits.expand(draws, 5), torch.full((draws,), temperature), keys, **off, largest_k=3)
            assert torch.equal(tokens, same)
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
@pytest.mark.slow
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


# A step happens whole or not at all


class Interrupt(BaseException):
    """What no code of ours may catch for good, as KeyboardInterrupt."""


PARAMS = [
    GREEDY,
    SamplingParams(max_new_tokens=12, temperature=1.5, seed=4),
    SamplingParams(max_new_tokens=9, temperature=0.9, top_p=0.9, seed=5, n=3, logprobs=2),
    GREEDY,
    SamplingParams(max_new_tokens=5, logits_processor=lambda input_ids, scores: scores.roll(len(input_ids[0]), -1)),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=6, stop_token_ids=tuple(range(0, V, 7))),
]
STRAINED = dict(num_blocks=18, num_host_blocks=9, max_num_seqs=5, max_num_tokens=24)


def strained_loop() -> GenerationLoop:
    """Chunked prompts, shared prefixes, preemption of both kinds, samples by forks and by waiting."""
    loop = make_loop(**STRAINED)
    for i, params in enumerate(PARAMS):
        loop.submit([*PROMPTS[7][:9], *PROMPTS[i + 2]][-20:], params)
    return loop


def drain(loop: GenerationLoop, most: int = 500) -> list[list[NewToken]]:
    steps = []
    while loop.has_work:
        steps.append(loop.step())
        assert len(steps) < most, "it does not end"
    return steps


HOOKS = (
    ["cache." + name for name in ("admit", "append", "commit", "free", "fork", "swap_out", "swap_in", "flush_copies")]
    + ["cache." + name for name in ("can_admit", "can_swap_in", "can_swap_out", "block_ids", "num_tokens", "stats")]
    + ["runner.replay", "runner.step", "choose", "draw"]
)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_step_that_raises_has_not_happened(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drain(strained_loop())
    assert expected, "a baseline"
    of_request = tokens_by_request(expected)
    name = hook.rpartition(".")[2]
    calls = raised = 0

    def hooked(function: Any, at: int, after: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, raised
            calls += 1
            if calls != at:
                return function(*args, **kwargs)
            if after:
                function(*args, **kwargs)
            raised += 1
            raise Interrupt

        return call

    for at in (1, 3, 8, 21, 55):
        for after in (False, True):
            loop, calls = strained_loop(), 0
            where = {"cache": loop.kv_cache, "runner": loop._model.graphs}.get(hook.partition(".")[0])
            where = where or (paged_ops.generation.steps if name == "choose" else paged_ops.generation.sampling)
            with monkeypatch.context() as patch:
                patch.setattr(where, name, hooked(getattr(where, name), at, after))
                steps: list[list[NewToken]] = []
                while loop.has_work:
                    before = vars(loop.stats).copy()
                    try:
                        steps.append(loop.step())
                    except Interrupt:
                        counts = {key: value for key, value in before.items() if key.endswith("tokens")}
                        if loop._changes is None and not loop._inbox.events:
                            assert {key: getattr(loop.stats, key) for key in counts} == counts
                    assert len(steps) < 500
            assert tokens_by_request(steps) == of_request, (hook, at, after)
            assert_empty(loop)
    assert raised >= 2, "the hook was reached"


def test_no_request_is_lost_when_admission_fails() -> None:
    loop = make_loop()
    first, second = loop.submit(PROMPTS[4], GREEDY), loop.submit(PROMPTS[5], GREEDY)
    with pytest.MonkeyPatch.context() as patch:
        admit = loop.kv_cache.admit

        def fails_for_the_second(request: Any, *args: Any, **options: Any) -> int:
            if request.request_id == second:
                raise RuntimeError("refused")
            return admit(request, *args, **options)

        patch.setattr(loop.kv_cache, "admit", fails_for_the_second)
        with pytest.raises(RuntimeError, match="refused"):
            loop.step()
    assert loop.kv_cache.num_used_blocks == 0, "what the step admitted before is given back"
    assert loop.run() == {first: EXPECTED[4], second: EXPECTED[5]}


# Ending early


def test_abort_at_any_time() -> None:
    loop = make_loop(num_blocks=18, num_host_blocks=18, max_num_seqs=4, max_num_tokens=40)
    ids = [loop.submit(prompt, GREEDY) for prompt in PROMPTS]
    seen: dict[int, list[int]] = {i: [] for i in ids}
    ends: dict[int, str] = {}
    states = set()
    for turn in range(200):
        if not loop.has_work:
            break
        for name, requests in (
            ("waiting", loop._scheduler.waiting),
            ("running", loop._scheduler.running),
            ("swapped", loop._scheduler.swapped),
        ):
            if requests and name not in states and turn > 2:
                states.add(name)
                used, victim = loop.kv_cache.num_used_blocks, requests[-1].request_id
                assert loop.abort(victim)
                assert not loop.abort(victim), "it has ended"
                assert loop.output(victim).finish_reason == "abort"
                if name == "running":
                    assert loop.kv_cache.num_used_blocks < used, "its blocks are free at once"
        for new in loop.step():
            assert new.request_id not in ends, "nothing comes after the end"
            if new.token is None:
                assert new.finish_reason == "abort"
            else:
                seen[new.request_id].append(new.token)
            if new.finish_reason:
                ends[new.request_id] = new.finish_reason
    assert states == {"waiting", "running", "swapped"}
    assert sorted(ends) == ids
    assert sorted(ends.values()) == ["abort"] * 3 + ["length"] * 7
    for i in ids:
        assert seen[i] == EXPECTED[i][: len(seen[i])] == loop.output(i)
        assert (len(seen[i]) == 12) == (ends[i] == "length")
    assert_empty(loop)
    with pytest.raises(ValueError, match="request_id: expected one of 10 that were given, got 10"):
        loop.abort(10)


def test_abort_within_callbacks_processors_and_criteria() -> None:
    loop = make_loop()

    def on_token(new: NewToken) -> None:
        if len(loop.output(new.request_id)) == 3 and new.request_id % 2:
            loop.abort(new.request_id)

    outputs = loop.generate(PROMPTS[:4], GREEDY, on_token)
    assert outputs == [EXPECTED[0], EXPECTED[1][:3], EXPECTED[2], EXPECTED[3][:3]]
    assert [output.finish_reason for output in outputs] == ["length", "abort", "length", "abort"]

    def aborts_the_other(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == len(PROMPTS[5]) + 2:
            loop.abort(victim)
        return scores

    victim = loop.submit(PROMPTS[4], GREEDY)
    other = loop.submit(PROMPTS[5], SamplingParams(max_new_tokens=12, logits_processor=aborts_the_other))
    outputs_by_id = loop.run()
    assert outputs_by_id == {victim: EXPECTED[4][:3], other: EXPECTED[5]}
    assert outputs_by_id[victim].finish_reason == "abort"
    assert_empty(loop)


def test_close_and_garbage_give_all_blocks_back() -> None:
    kv_cache = KVCache(1, 18, B, K, D, num_host_blocks=18)
    with GenerationLoop(toy_step, kv_cache, max_num_tokens=40) as loop:
        for prompt in PROMPTS:
            loop.submit(prompt, GREEDY)
        while not loop._scheduler.swapped:
            loop.step()
        assert kv_cache.stats().host_used_blocks
    assert (kv_cache.num_used_blocks, kv_cache.stats().host_used_blocks) == (0, 0)
    with pytest.raises(ValueError, match="loop: expected one that is open"):
        loop.submit(PROMPTS[0])
    loop = GenerationLoop(toy_step, kv_cache, max_num_tokens=40)
    loop.submit(PROMPTS[3], GREEDY)
    loop.step()
    assert kv_cache.num_used_blocks
    del loop
    assert kv_cache.num_used_blocks == 0


def test_generate_queues_all_or_none_and_sees_only_its_own() -> None:
    loop = make_loop(max_model_len=60)
    before = loop.submit(PROMPTS[6], GREEDY)
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token, got none"):
        loop.generate([PROMPTS[0], []], GREEDY)
    with pytest.raises(ValueError, match=r"prompts\[2\]: expected at most 60 tokens"):
        loop.generate([PROMPTS[0], PROMPTS[1], [1] * 60], GREEDY)
    seen: list[NewToken] = []
    assert loop.generate(PROMPTS[2:4], GREEDY, seen.append) == EXPECTED[2:4]
    assert before not in {new.request_id for new in seen}

    def interrupted(new: NewToken) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        loop.generate(PROMPTS[2:4], GREEDY, interrupted)
    assert len(loop._scheduler.unfinished) <= 1, "nothing of the call stays queued"
    assert loop.run() == {before: EXPECTED[6]}
    assert_empty(loop)


def test_other_sequences_may_live_in_the_cache() -> None:
    kv_cache = KVCache(1, 12, B, K, D)
    kv_cache.admit(0, [1] * 40)  # ten blocks of somebody else, under a name that looks like a request's
    loop = GenerationLoop(toy_step, kv_cache)
    request_id = loop.submit(PROMPTS[5], GREEDY)
    for _ in range(2):
        with pytest.raises(
            paged_ops.OutOfBlocks, match=r"request 0: expected free blocks for its 13 tokens, but 10 of 12"
        ):
            loop.step()
    small = GenerationLoop(toy_step, kv_cache)
    assert small.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6)) == [EXPECTED[0][:6]]
    kv_cache.rollback(0)
    kv_cache.free(0)
    assert loop.run() == {request_id: EXPECTED[5]}
    kv_cache.admit("mine", [1] * 28)
    with pytest.raises(paged_ops.OutOfBlocks, match="request 1"):  # it runs for a while, then is preempted
        loop.generate([PROMPTS[5]], SamplingParams(max_new_tokens=12))
    assert kv_cache.num_used_blocks == 7, "what generate() queued is gone"


# What goes in


class Step:
    """The toy model with what a model knows of itself."""

    max_model_len = 40
    vocab_size = V
    stop_token_ids = (EXPECTED[5][4],)
    pad_token_id = 7

    def __call__(self, *inputs: Any) -> Tensor:
        return toy_step(*inputs)


def test_limits_and_ends_of_text_come_from_the_model() -> None:
    kv_cache = KVCache(1, 64, B, K, D)
    loop = GenerationLoop(Step(), kv_cache)
    assert loop.max_model_len == 40
    assert GenerationLoop(toy_step, kv_cache).max_model_len == 64 * B
    assert GenerationLoop(Step(), KVCache(1, 5, B, K, D)).max_model_len == 5 * B
    with pytest.raises(ValueError, match="max_model_len: expected at most the model's 40, got 41"):
        GenerationLoop(Step(), kv_cache, max_model_len=41)
    with pytest.raises(ValueError, match="prompt: expected at most 40 tokens"):
        loop.submit(PROMPTS[7], GREEDY)
    end = EXPECTED[5].index(EXPECTED[5][4]) + 1
    outputs = loop.generate([PROMPTS[5]] * 2, [GREEDY, SamplingParams(max_new_tokens=12, stop_token_ids=())])
    assert outputs == [EXPECTED[5][:end], EXPECTED[5]]
    assert [output.finish_reason for output in outputs] == ["stop", "length"]


def test_tokens_outside_the_vocabulary_are_refused_before_anything_runs() -> None:
    loop = GenerationLoop(Step(), KVCache(1, 64, B, K, D))
    with pytest.raises(ValueError, match=rf"prompts\[1\]: expected token ids in 0..60, the vocabulary, got {V} at 2"):
        loop.generate([PROMPTS[2], [1, 2, V]], GREEDY)
    with pytest.raises(ValueError, match=r"prompt: expected token ids in 0..60, the vocabulary, got -1 at 0"):
        loop.submit([-1])
    with pytest.raises(ValueError, match=r"prompt: expected token ids 0 or more, got -5 at 1"):
        make_loop().submit([3, -5])
    assert not loop.has_work


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a text", "prompt: expected token ids, got a string; give tokenizer"),
        ([1, 2.0], "prompt: expected token ids, integers, got 2.0 at 1"),
        ([1, "a"], "prompt: expected token ids, integers, got a at 1"),
        ([True], "prompt: expected token ids, integers, got True at 0"),
        ([[1, 2]], r"prompt: expected token ids, integers, got \[1, 2\] at 0"),
        (torch.tensor([1.0]), "prompt: expected token ids, integers"),
        (torch.tensor([[1], [2]]), r"prompt: expected a tensor \[n\] or \[1, n\]"),
        ({"input_ids": [[1], [2]]}, "prompt: expected one prompt, got 2"),
        ({"ids": [1]}, "prompts: expected a mapping with input_ids"),
        (5, "prompt: expected token ids, in order, got 5"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loop().submit(prompt)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a text", "prompts: expected token ids, got a string"),
        (["a", "b"], r"prompts\[0\]: expected token ids, got a string"),
        ([1, 2, 3], "prompts: expected a list of prompts, got token ids; put the one prompt into a list"),
        (torch.tensor([1, 2]), r"prompts: expected a list of prompts, or a tensor \[S, n\]"),
        (torch.tensor([[7, 7, 3], [1, 2, 3]]), r"prompts: .* padding \(7\) on the left; give the tokenizer's whole"),
        ([[1, 2, 7], [1, 2, 3]], r"prompts: .* padding \(7\) on the right"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask: expected the shape of input_ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, r"prompts\[0\]: expected at least one token"),
    ],
)
def test_batches_that_are_refused(prompts: Any, message: str) -> None:
    loop = GenerationLoop(Step(), KVCache(1, 64, B, K, D))
    with pytest.raises(ValueError, match=message):
        loop.generate(prompts, GREEDY)
    assert not loop.has_work


def test_padding_is_not_seen_where_there_is_none() -> None:
    loop = GenerationLoop(Step(), KVCache(1, 64, B, K, D))
    masked = {"input_ids": [[7, 7, 3], [1, 2, 3]], "attention_mask": [[1, 1, 1], [1, 1, 1]]}
    for prompts in (masked, [[7], [3]], [[7, 1], [7, 2]], [[7, 1], [3, 4, 5]]):
        assert len(loop.generate(prompts, SamplingParams(max_new_tokens=1))) == 2


def test_prompts_in_all_their_forms() -> None:
    loop, params = make_loop(), SamplingParams(max_new_tokens=3)
    a, b = PROMPTS[3], PROMPTS[4]
    for prompt in (a, tuple(a), torch.tensor(a), torch.tensor([a]), torch.tensor(a).numpy(), list(torch.tensor(a))):
        assert loop.run() == {} and loop.run() == {}
        request_id = loop.submit(prompt, params)
        assert loop.run() == {request_id: EXPECTED[3][:3]}
    left = [[0] * (len(b) - len(a)) + a, b]
    mask = [[0] * (len(b) - len(a)) + [1] * len(a), [1] * len(b)]
    right = [a + [0] * (len(b) - len(a)), b]
    for encoding in (
        {"input_ids": left, "attention_mask": mask},
        {"input_ids": torch.tensor(left), "attention_mask": torch.tensor(mask)},
        {"input_ids": right, "attention_mask": [mask[0][::-1], mask[1]]},
        {"input_ids": [a, b]},
    ):
        assert loop.generate(encoding, params) == [EXPECTED[3][:3], EXPECTED[4][:3]]
    assert loop.generate(torch.tensor([a, a]), params) == [EXPECTED[3][:3]] * 2
    assert loop.generate([], params) == []
    single = loop.submit({"input_ids": a, "attention_mask": [1] * len(a)}, params)
    assert loop.run() == {single: EXPECTED[3][:3]}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("temperature", value) for value in (-1.0, float("inf"), float("nan"), "1")),
        *(("top_p", value) for value in (0.0, 1.5, float("nan"))),
        *(("max_new_tokens", value) for value in (0, 2.5, 8.0)),
        *(("stop_token_ids", value) for value in ((1.5,), (-1,), 3)),
        *(("n", value) for value in (0, 1.5)),
        ("logprobs", -1),
        ("seed", 1.5),
        ("logits_processor", 3),
        ("stopping_criteria", [3]),
    ],
)
def test_sampling_params_that_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        SamplingParams(**{argument: value})


# What comes out


def test_default_seeds_differ_and_given_ones_repeat() -> None:
    hot = SamplingParams(max_new_tokens=12, temperature=2.0)
    outputs = make_loop().generate([PROMPTS[5]] * 4, hot)
    assert len(set(map(tuple, outputs))) == 4, "four samples of one prompt differ"

    def seeded(seed: int) -> list[list[int]]:
        return [*GenerationLoop(toy_step, KVCache(1, 128, B, K, D), seed=seed).generate([PROMPTS[5]] * 2, hot)]

    assert seeded(1) == seeded(1) != seeded(2)
    ends = [SamplingParams(max_new_tokens=12, temperature=2.0, seed=seed) for seed in (-(2**63), 2**63, 2**64 - 1, 0)]
    outputs = make_loop().generate([PROMPTS[5]] * 4, ends)
    assert outputs == make_loop().generate([PROMPTS[5]] * 4, ends)
    assert len(set(map(tuple, outputs))) == 3, "-2^63 and 2^63 are the same 64 bits"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
def test_samples_of_one_prompt_share_its_computation(max_num_seqs: int) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=2.0, seed=3, n=5)
    loop = make_loop(max_num_seqs=max_num_seqs, max_num_tokens=16)
    outputs = loop.generate([PROMPTS[7], PROMPTS[8]], params)
    assert len(outputs) == 10
    assert len(set(map(tuple, outputs))) == 10
    assert outputs == make_loop(num_blocks=24, num_host_blocks=9).generate([PROMPTS[7], PROMPTS[8]], params)
    # sample 0 is that of n = 1
    assert (
        outputs[5] == make_loop().generate([PROMPTS[8]], SamplingParams(max_new_tokens=8, temperature=2.0, seed=3))[0]
    )
    if max_num_seqs == 16:
        assert loop.stats.prompt_tokens == len(PROMPTS[7]) + len(PROMPTS[8]), "each prompt is computed once"
        assert loop.kv_cache.stats().copied_blocks == 8
    assert make_loop().generate([PROMPTS[8]], SamplingParams(max_new_tokens=12, n=3)) == [EXPECTED[8]] * 3
    assert_empty(loop)


def test_samples_end_one_by_one() -> None:
    loop = make_loop(max_num_tokens=8, max_num_seqs=4)
    first = loop.submit(PROMPTS[8], SamplingParams(max_new_tokens=12, n=3))
    loop.step()
    assert loop.abort(first), "it computes the prompt, which the next sample then has to"
    assert loop.abort(first + 2), "it has not started"
    outputs = loop.run()
    assert outputs == {first: [], first + 1: EXPECTED[8], first + 2: []}
    assert [outputs[first + i].finish_reason for i in range(3)] == ["abort", "length", "abort"]
    assert_empty(loop)


def test_the_next_sample_computes_the_prompt_if_the_first_is_aborted() -> None:
    loop = make_loop(max_num_tokens=8, max_num_seqs=8)
    first = loop.submit(PROMPTS[8], SamplingParams(max_new_tokens=12, n=4))
    loop.step()
    assert loop.abort(first), "it has computed a part of the prompt"
    outputs = loop.run()
    assert outputs == {first: [], **{first + i: EXPECTED[8] for i in (1, 2, 3)}}
    assert loop.stats.prompt_tokens == len(PROMPTS[8]), "what was computed is found"
    assert_empty(loop)


def test_none_is_admitted_while_one_is_swapped_out() -> None:
    loop = make_loop(num_blocks=10, num_host_blocks=10, max_num_seqs=4)
    old, young = (loop.submit(prompt, SamplingParams(max_new_tokens=12)) for prompt in (PROMPTS[5], PROMPTS[6]))
    while not loop.stats.swapped_out:
        loop.step()
    small = loop.submit(PROMPTS[1], SamplingParams(max_new_tokens=1))
    began = []
    while loop.has_work:
        began += [new.request_id for new in loop.step()]
    assert began.index(small) > began.index(young), "it was first, and needs all blocks that become free"
    assert [loop.output(each) for each in (old, young, small)] == [EXPECTED[5], EXPECTED[6], EXPECTED[1][:1]]


def test_logprobs_are_those_of_the_model() -> None:
    seen: list[Tensor] = []

    def keeps(*inputs: Any) -> Tensor:
        seen.append(toy_step(*inputs))
        return seen[-1]

    loop = GenerationLoop(keeps, KVCache(1, 128, B, K, D))
    params = SamplingParams(max_new_tokens=5, temperature=3.0, seed=1, logprobs=4)
    news: list[NewToken] = []
    outputs = loop.generate([PROMPTS[5], PROMPTS[6]], [params, GREEDY], news.append)
    assert outputs[1].logprobs is None
    logprobs = outputs[0].logprobs
    assert logprobs is not None
    assert [new.logprobs for new in news if new.request_id == 0] == logprobs
    for token, found, logits in zip(outputs[0], logprobs, seen, strict=False):
        expected = torch.log_softmax(logits[0].double(), -1)
        assert abs(found.logprob - float(expected[token])) < 1e-5
        values, ids = expected.topk(4)
        assert [token for token, _ in found.top] == ids.tolist()
        assert torch.allclose(torch.tensor([value for _, value in found.top]).double(), values, atol=1e-5)
    only_chosen = make_loop().generate([PROMPTS[5]], SamplingParams(max_new_tokens=2, logprobs=0))[0]
    assert only_chosen.logprobs is not None
    assert [each.top for each in only_chosen.logprobs] == [(), ()]


def test_processors_and_criteria_see_the_sequence_and_decide() -> None:
    prompt = PROMPTS[5]
    lengths: list[int] = []

    def forbids(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids[0, : len(prompt)].tolist() == prompt
        assert scores.dtype is torch.float32
        lengths.append(input_ids.shape[1])
        return scores.index_fill(-1, torch.tensor([EXPECTED[5][0]]), -torch.inf)

    def ends(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.tensor([input_ids.shape[1] == len(prompt) + 6])

    params = SamplingParams(max_new_tokens=12, logits_processor=forbids, stopping_criteria=[ends])
    outputs = make_loop().generate([prompt, PROMPTS[6]], [params, GREEDY])
    assert lengths == [len(prompt) + i for i in range(6)]
    assert len(outputs[0]) == 6
    assert outputs[0].finish_reason == "stop"
    assert EXPECTED[5][0] not in outputs[0]
    assert outputs[1] == EXPECTED[6], "other requests are not touched"
    loop = GenerationLoop(
        toy_step, KVCache(1, 128, B, K, D), logits_processor=lambda ids, scores: -scores, stopping_criteria=[ends]
    )
    of_loop = loop.generate([prompt], SamplingParams(max_new_tokens=12, logits_processor=lambda ids, scores: -scores))
    assert of_loop[0] == EXPECTED[5][:6], "the loop's own comes first, then the request's"
    with pytest.raises(ValueError, match=r"logits_processor: expected scores \[1, 61\]"):
        make_loop().generate([prompt], SamplingParams(logits_processor=lambda ids, scores: scores[0]))


def test_an_error_in_a_processor_says_whose_it_is_and_the_others_go_on() -> None:
    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    loop = make_loop()
    good = loop.submit(PROMPTS[4], GREEDY)
    bad = loop.submit(PROMPTS[5], SamplingParams(max_new_tokens=12, logits_processor=fails))
    for _ in range(3):
        with pytest.raises(KeyError, match="mine") as error:
            loop.step()
        notes = getattr(error.value, "__notes__", [f"abort({bad})"])
        assert any(f"abort({bad})" in note for note in notes)
    loop.abort(bad)
    assert loop.run() == {good: EXPECTED[4], bad: []}
    assert_empty(loop)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_with_nan_logits_fails_alone(value: float, temperature: float) -> None:
    victim = len(PROMPTS[5]) + 2

    def breaks(input_ids: Tensor, metadata: AttentionMetadata, *rest: Any) -> Tensor:
        logits = toy_step(input_ids, metadata, *rest)
        logits[metadata.seq_lens == victim, slice(None) if value < 0 else 3] = value
        return logits

    loop = GenerationLoop(breaks, KVCache(1, 128, B, K, D))
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=1)
    outputs = loop.generate([PROMPTS[5], PROMPTS[7]], [params, GREEDY])
    assert (len(outputs[0]), outputs[0].finish_reason) == (2, "error")
    assert outputs[0].error is not None
    assert "NaN" in outputs[0].error
    assert outputs[1] == EXPECTED[7]
    assert_empty(loop)


def test_extreme_temperatures() -> None:
    coldest = SamplingParams(max_new_tokens=12, temperature=1e-40, seed=1)
    hottest = SamplingParams(max_new_tokens=12, temperature=1e30, seed=1)
    outputs = make_loop().generate([PROMPTS[5], PROMPTS[6]], [coldest, hottest])
    assert outputs[0] == EXPECTED[5]
    assert outputs[1] != EXPECTED[6]
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_random_numbers_are_uniform_and_independent() -> None:
    keys = torch.tensor(
        [random_key(key_of(seed, sample), at) for seed in range(20) for sample in range(10) for at in range(9)]
    )
    assert len(keys.unique()) == 1800
    numbers = uniforms(keys)
    assert bool(((numbers > 0) & (numbers < 1)).all())
    for power in (1, 2, 3):  # moments of the uniform distribution
        assert abs(float((numbers**power).mean()) - 1 / (power + 1)) < 0.02
    centred = numbers.view(20, 10, 9) - 0.5
    for dim in range(3):
        neighbours = centred * centred.roll(1, dim)
        assert float(neighbours.mean().abs()) < 0.01
    ends = torch.tensor([-1, 0, 1, 2**63 - 1, -(2**63)])
    assert bool(((uniforms(ends) > 0) & (uniforms(ends) < 1)).all())


def test_streams_run_beside_others_and_abort_when_left() -> None:
    loop = make_loop()
    before = loop.submit(PROMPTS[6], GREEDY)
    with loop.stream(PROMPTS[5], GREEDY) as stream, loop.stream(PROMPTS[4], GREEDY) as other:
        taken = [next(stream).token for _ in range(4)]
        assert taken == EXPECTED[5][:4]
        assert [next(other).token for _ in range(3)] == EXPECTED[4][:3]
        assert stream.outputs[0][:4] == taken
    assert loop.output(stream.request_ids[0]).finish_reason == "abort"
    assert next(stream, None) is None
    assert [new.token for new in loop.stream(PROMPTS[4], GREEDY)] == EXPECTED[4]
    left = loop.stream(PROMPTS[3], GREEDY)
    next(left)
    (request_id,) = left.request_ids
    del left
    assert loop.output(request_id).finish_reason == "abort"
    assert loop.run() == {before: EXPECTED[6]}, "only what was submitted"
    with pytest.raises(ValueError, match="prompt: expected"):
        loop.stream([])
    assert_empty(loop)


def test_prefixes_are_not_shared_across_keys_and_resets() -> None:
    loop = make_loop()
    prompts = [[*PROMPTS[7], 1], [*PROMPTS[7], 2]]
    loop.generate(prompts[:1], GREEDY, extra_key="a")
    assert loop.stats.cached_tokens == 0
    loop.generate(prompts[1:], GREEDY, extra_key="b")
    assert loop.stats.cached_tokens == 0, "another adapter's"
    loop.generate(prompts[1:], GREEDY, extra_key="a")
    assert loop.stats.cached_tokens == 28
    first = loop.submit(prompts[0], GREEDY, extra_key="c")
    second = loop.submit(prompts[1], GREEDY, extra_key="d")
    assert [new.request_id for new in loop.step()] == [first, second], "neither waits for the other's prefix"
    with pytest.raises(ValueError, match=r"reset: expected no unfinished request .* got 2"):
        loop.reset()
    loop.run()
    loop.reset()
    loop.generate(prompts, GREEDY, extra_key="a")
    assert loop.stats.cached_tokens == 28 + 28, "of each other alone"
    with pytest.raises(ValueError, match="extra_key: expected something hashable"):
        loop.submit(prompts[0], extra_key=[])


def test_other_default_device_and_dtype() -> None:
    def texts() -> list[list[int]]:
        loop = make_loop(num_blocks=18, num_host_blocks=9, max_num_tokens=40)
        params = [SamplingParams(max_new_tokens=12, temperature=1.5, seed=i, logprobs=2) for i in range(4)]
        criteria = SamplingParams(max_new_tokens=12, stopping_criteria=lambda ids, scores: ids.shape[1] > 20)
        outputs = loop.generate(PROMPTS, [*params, *[criteria] * 6])
        assert loop.stats.swapped_out
        return [*outputs]

    expected = texts()
    assert expected[5] == EXPECTED[5][:8]
    with torch.device("meta"):
        assert texts() == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert texts() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_tokens_on_their_way_to_the_host() -> None:
    from paged_ops.generation.sampling import Chosen

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        best, tokens = torch.tensor([1.5, torch.nan, -torch.inf], dtype=dtype), torch.tensor([2**24 + 1, 3, 0])
        device = GPU if torch.cuda.is_available() else "cpu"
        assert Chosen(best.to(device), tokens.to(device), []).read().tokens == [2**24 + 1, -1, -1]


def test_outputs_of_finished_requests_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_ops.generation.inbox, "KEPT_OUTPUTS", 3)
    loop = make_loop()
    outputs = loop.generate(PROMPTS[:6], SamplingParams(max_new_tokens=2))
    assert outputs == [tokens[:2] for tokens in EXPECTED[:6]]
    assert len(loop._inbox._requests) == 3
    assert loop.output(5) == EXPECTED[5][:2]
    with pytest.raises(ValueError, match="request_id: expected one of the last 3"):
        loop.output(0)
    assert not loop.abort(0)


def test_the_loop_asks_of_the_cache_only_what_a_cache_of_several_pools_has() -> None:
    used: set[str] = set()

    class Recorder:
        def __init__(self, kv_cache: KVCache) -> None:
            object.__setattr__(self, "_kv_cache", kv_cache)

        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return getattr(self._kv_cache, name)

        def __contains__(self, seq_id: Any) -> bool:
            return seq_id in self._kv_cache

    kv_cache: Any = Recorder(KVCache(1, 18, B, K, D, num_host_blocks=6))
    loop = GenerationLoop(toy_step, kv_cache, max_num_tokens=40)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    loop.reset()
    allowed = {
        *("admit", "can_admit", "append", "reserve", "num_reservable", "commit", "rollback", "fork", "free", "reset"),
        *("swap_out", "swap_in", "can_swap_out", "can_swap_in", "flush_copies", "recover", "stats", "states"),
        *("block_ids", "num_tokens", "num_computed_tokens", "is_swapped_out", "num_used_blocks", "max_seq_len"),
        *("layers", "num_blocks", "block_size", "device", "pools", "num_given_back", "reserves_in_parts"),
        *("lock", "weights_version"),
    }
    assert used <= allowed, used - allowed


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_a_cache_of_several_pools(num_host_blocks: int) -> None:
    window = 6
    plain = KVCache(2, 128, B, K, D)
    expected = GenerationLoop(step_on(plain, 0, window), plain).generate(PROMPTS, GREEDY)
    assert expected != EXPECTED
    sizes = {"sliding_window": [0, window], "num_window_blocks": 12, "num_host_blocks": num_host_blocks}
    kv_cache: Any = paged_ops.HybridCache.for_layers(2, 18, B, K, D, **sizes)
    loop = GenerationLoop(step_on(kv_cache, 0, window), kv_cache, max_num_seqs=6, max_num_tokens=24)
    assert loop.generate(PROMPTS, GREEDY) == expected
    assert loop.stats.preemptions
    samples = SamplingParams(max_new_tokens=12, n=3)
    assert loop.generate([PROMPTS[6]], samples) == [expected[6]] * 3
    small: Any = paged_ops.HybridCache.for_layers(2, 40, B, K, D, sliding_window=[0, window], num_window_blocks=6)
    loop = GenerationLoop(step_on(small, 0, window), small, max_num_seqs=2, max_num_tokens=16)
    assert loop.generate(PROMPTS[-2:], GREEDY) == expected[-2:], "prompts longer than the window's pool"
    assert (kv_cache.num_used_blocks, small.num_used_blocks) == (0, 0)


def test_a_prompt_longer_than_its_pool_comes_back_after_a_preemption() -> None:
    """Its tokens get their slots in parts, and so a few blocks are enough to go on with it."""
    window, prompts = 12, prompts_of(1, 29)
    plain: Any = paged_ops.HybridCache.for_layers(1, 128, B, K, D, sliding_window=window)
    expected = GenerationLoop(step_on(plain, window), plain).generate(prompts, SamplingParams(max_new_tokens=4))
    tight: Any = paged_ops.HybridCache.for_layers(1, 4, B, K, D, sliding_window=window, num_host_blocks=20)
    loop = GenerationLoop(step_on(tight, window), tight, max_num_tokens=32, max_model_len=40)
    assert loop.generate(prompts, SamplingParams(max_new_tokens=4)) == expected
    assert loop.stats.swapped_out
    assert_empty(loop)


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_a_prompt_preempts_a_younger_request_that_decodes(num_host_blocks: int, order: bool) -> None:
    """The second prompt waits a step for the prefix of the first, so the third decodes already when it begins; then it
    needs the blocks for its next part, and takes those of a request whose next token had its slot."""
    window, (prompt,), (young,) = 12, prompts_of(13), prompts_of(9)
    prompts, params = [prompt[:5], prompt, young[::-1]], [SamplingParams(max_new_tokens=n) for n in (1, 1, 3)]
    plain: Any = paged_ops.HybridCache.for_layers(1, 128, B, K, D, sliding_window=window)
    expected = GenerationLoop(step_on(plain, window), plain).generate(prompts, params)
    sizes = {"sliding_window": window, "num_host_blocks": num_host_blocks}
    tight: Any = paged_ops.HybridCache.for_layers(1, 6, B, K, D, **sizes)
    loop = GenerationLoop(step_on(tight, window), tight, max_num_seqs=3, max_num_tokens=13)
    assert loop.generate(prompts, params) == expected
    if not order:  # else the younger one has ended by then
        assert (loop.stats.swapped_out, loop.stats.recomputed) == ((1, 0) if num_host_blocks else (0, 1))
    assert_empty(loop)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_sampling_on_a_gpu() -> None:
    scores = torch.randn(16, 3000, generator=torch.Generator().manual_seed(2))
    keys = torch.tensor([random_key(key_of(seed, 0), 3) for seed in range(16)])
    temperature, top_p = torch.full((16,), 1.3), torch.full((16,), 0.9, dtype=torch.float64)
    assert torch.equal(uniforms(keys.to(GPU)).cpu(), uniforms(keys))
    given = scores, temperature, keys, torch.full((16,), 2000), top_p, torch.full((16,), 1e-4)
    assert torch.equal(draw(*(each.to(GPU) for each in given), largest_k=2000).cpu(), draw(*given, largest_k=2000))

    logits = scores.to(GPU)

    def step(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: list[Tensor]) -> Tensor:
        return logits[: len(last_rows)]

    hot: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 1}
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "min_new_tokens": 6}
    every = {**hot, **penalties, "min_p": 0.01, "stop_token_ids": (1, 2)}
    for params in (GREEDY, SamplingParams(**hot), SamplingParams(**every)):
        loop = GenerationLoop(step, KVCache(1, 64, B, K, D, device=GPU))
        for prompt in PROMPTS[:4]:
            loop.submit(prompt, params)
        loop.step()
        torch.cuda.set_sync_debug_mode("error")  # the host waits for an event only
        try:
            for _ in range(3):
                assert len(loop.step()) == 4
        finally:
            torch.cuda.set_sync_debug_mode("default")
