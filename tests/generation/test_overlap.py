"""Steps that are launched before the tokens of the step before are read: the same tokens, ends and blocks as in
turn."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, B, D, K, V, assert_empty, make_loop, toy_step

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 3},
    "cut": {"temperature": 1.4, "seed": 4, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "all": {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_new_tokens": 5},
}


def loop_of(overlap: bool, **sizes: Any) -> GenerationLoop:
    sizes = {"num_blocks": 128, "num_host_blocks": 0, **sizes}
    kv_cache = KVCache(1, sizes.pop("num_blocks"), B, K, D, num_host_blocks=sizes.pop("num_host_blocks"))
    return GenerationLoop(toy_step, kv_cache, overlap=overlap, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 4, "max_num_tokens": 14}, {"num_blocks": 18}])
def test_the_same_outputs_in_both_orders(kind: str, sizes: dict[str, int]) -> None:
    """Some requests end by a token, and others join meanwhile."""
    outputs = []
    for overlap in (False, True):
        loop = loop_of(overlap, **sizes)
        params = [
            SamplingParams(max_new_tokens=5 + i, stop_token_ids=(7, 11, 30) if i % 2 else (), **KINDS[kind])
            for i in range(10)
        ]
        outputs.append([(each, each.finish_reason) for each in loop.generate(PROMPTS, params)])
        assert (loop.stats.overlapped_steps > loop.stats.steps // 3) == overlap
        assert_empty(loop)
    assert outputs[0] == outputs[1]
    assert {reason for _, reason in outputs[0]} <= {"stop", "length"}


def test_the_likeliest_tokens_are_those_of_the_dense_model() -> None:
    loop = loop_of(True)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    assert loop.stats.overlapped_steps == loop.stats.steps - 1, "all but the first"


def test_no_step_is_launched_for_requests_that_end_by_their_length() -> None:
    calls: list[int] = []

    def step(*inputs: Any) -> torch.Tensor:
        calls.append(inputs[1].num_reqs)
        return toy_step(*inputs)

    loop = GenerationLoop(step, KVCache(1, 64, B, K, D), overlap=True)
    params = [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=5)]
    assert loop.generate(PROMPTS[:2], params) == [EXPECTED[0][:3], EXPECTED[1][:5]]
    assert calls == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("index", range(3, 9))
def test_the_step_after_a_stop_token_leaves_nothing_in_the_cache(index: int, beside: int) -> None:
    """Where it would fill a block, too, which no request may find. Alone the request's step is given up whole; beside
    a request that goes on, the step is kept for that one."""
    prompt, others = PROMPTS[index], PROMPTS[9:] * beside
    for overlap in (False, True):
        loop = loop_of(overlap)
        for count in range(1, 9):
            stop = EXPECTED[index][count - 1]
            params = [SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)), *[GREEDY] * beside]
            output, *rest = loop.generate([prompt, *others], params)
            assert output == EXPECTED[index][: EXPECTED[index].index(stop) + 1] and output.finish_reason == "stop"
            assert rest == EXPECTED[9:] * beside
            assert_empty(loop)
            cached = loop.kv_cache.cached_lengths([*prompt, *output, 0])[-1]
            assert cached == (len(prompt) + len(output) - 1) // B * B, "the last token's own step is not needed"
            loop.reset()


def test_abort_while_a_step_runs() -> None:
    loop = loop_of(True, max_num_seqs=4)
    first, second = (loop.submit(prompt, GREEDY) for prompt in PROMPTS[4:6])
    got = loop.step() + loop.step()
    assert loop._launched is not None, "the third one runs"
    used = loop.kv_cache.num_used_blocks
    assert loop.abort(first)
    assert loop.kv_cache.num_used_blocks < used
    third = loop.submit(PROMPTS[6], GREEDY)  # may get its blocks
    while loop.has_work:
        got += loop.step()
    tokens = {i: [new.token for new in got if new.request_id == i and new.token is not None] for i in range(3)}
    assert tokens == {first: EXPECTED[4][:2], second: EXPECTED[5], third: EXPECTED[6]}
    assert loop.output(first).finish_reason == "abort"
    assert_empty(loop)


def test_close_while_a_step_runs() -> None:
    loop = loop_of(True)
    ids = [loop.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    got = loop.step()
    loop.close()
    assert loop.kv_cache.num_used_blocks == 0
    while loop.has_work:
        got += loop.step()
    assert sorted(new.request_id for new in got if new.finish_reason == "abort") == ids
    assert len(got) == 6


@pytest.mark.parametrize("at", range(2, 9))
def test_an_error_of_the_next_step_takes_no_token_of_this_one(at: int) -> None:
    calls = [0]

    def step(*inputs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at:
            raise ZeroDivisionError
        return toy_step(*inputs)

    loop = GenerationLoop(step, KVCache(1, 64, B, K, D), overlap=True)
    ids = [loop.submit(prompt, GREEDY) for prompt in PROMPTS[4:7]]
    got: list[NewToken] = []
    raised = 0
    while loop.has_work:
        calls_before = calls[0]
        with contextlib.suppress(ZeroDivisionError):
            got += loop.step()
            continue
        raised += 1
        assert calls_before < at and [len(loop.output(i)) for i in ids] == [at - 1] * 3, (
            "the step that ran has happened"
        )
    assert raised == 1
    for i, request_id in enumerate(ids):
        assert [new.token for new in got if new.request_id == request_id] == EXPECTED[4 + i]
    assert_empty(loop)


def test_an_error_that_stays_delivers_what_was_computed() -> None:
    fails = [False]

    def step(*inputs: Any) -> torch.Tensor:
        if fails[0]:
            raise ZeroDivisionError
        return toy_step(*inputs)

    loop = GenerationLoop(step, KVCache(1, 64, B, K, D), overlap=True)
    request_id = loop.submit(PROMPTS[4], GREEDY)
    assert len(loop.step()) == 1
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        loop.step()
    assert [new.token for new in loop.step()] == EXPECTED[4][1:2], "of the step that ran"
    with pytest.raises(ZeroDivisionError):
        loop.step()
    assert loop.abort(request_id) and loop.output(request_id) == EXPECTED[4][:2]
    loop.step()
    assert_empty(loop)


@pytest.mark.parametrize(
    "params",
    [
        {"logits_processor": lambda ids, scores: scores},
        {"stopping_criteria": lambda ids, scores: False},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_is_needed_on_the_host_is_computed_in_turn(params: dict[str, Any]) -> None:
    """For all requests, as long as one needs it."""
    loop = loop_of(True)
    special = loop.submit(PROMPTS[3], SamplingParams(max_new_tokens=4, **params))
    other = loop.submit(PROMPTS[4], GREEDY)
    while loop.output(special).finish_reason is None:
        loop.step()
        assert loop.stats.overlapped_steps == 0
    loop.run()
    assert loop.stats.overlapped_steps > 5
    assert (loop.output(special), loop.output(other)) == (EXPECTED[3][:4], EXPECTED[4])


def test_waiting_requests_cost_a_step_nothing() -> None:
    """Those that need no turns are not looked at, and those that did are forgotten."""
    loop = loop_of(True, max_num_seqs=2)
    special = loop.submit(PROMPTS[1], SamplingParams(max_new_tokens=2, logprobs=0))
    for _ in range(100):
        loop.submit(PROMPTS[0], SamplingParams(max_new_tokens=4))
    loop.step()
    assert [request.request_id for request in loop._scheduler._in_turn] == [special]
    while loop.output(special).finish_reason is None:
        loop.step()
    assert len(loop._scheduler.unfinished) > 90 and not loop._scheduler._in_turn
    loop.close()


def test_samples_of_a_prompt_overlap_once_they_run() -> None:
    loop = loop_of(True)
    assert loop.generate([PROMPTS[5]], SamplingParams(max_new_tokens=12, n=3)) == [EXPECTED[5]] * 3
    assert 5 < loop.stats.overlapped_steps < loop.stats.steps - 1


def test_a_nan_ends_one_request_while_the_next_step_runs() -> None:
    bad = EXPECTED[4][1]

    def step(input_ids: torch.Tensor, metadata: Any, last_rows: torch.Tensor, kv_caches: Any) -> torch.Tensor:
        logits = toy_step(input_ids, metadata, last_rows, kv_caches)
        return logits.masked_fill((input_ids[last_rows] == bad)[:, None], torch.nan)

    loop = GenerationLoop(step, KVCache(1, 64, B, K, D), overlap=True)
    outputs = loop.generate(PROMPTS[4:6], GREEDY)
    assert outputs[0] == EXPECTED[4][:2] and outputs[0].finish_reason == "error"
    stop = EXPECTED[5].index(bad) + 1 if bad in EXPECTED[5] else 12
    assert outputs[1] == EXPECTED[5][:stop]
    assert_empty(loop)


def test_two_loops_on_one_cache() -> None:
    kv_cache = KVCache(1, 40, B, K, D)
    loops = [GenerationLoop(toy_step, kv_cache, overlap=True, max_num_seqs=3) for _ in range(2)]
    ids = [[loop.submit(prompt, GREEDY) for prompt in PROMPTS[2:7]] for loop in loops]
    while any(loop.has_work for loop in loops):
        for loop in loops:
            loop.step()
    for loop, each in zip(loops, ids, strict=True):
        assert [loop.output(i) for i in each] == EXPECTED[2:7]
        assert loop.stats.overlapped_steps
    assert kv_cache.num_used_blocks == 0


def test_loops_on_the_cpu_compute_in_turn_by_default() -> None:
    loop = make_loop()
    loop.generate(PROMPTS[:2], GREEDY)
    assert loop.stats.overlapped_steps == 0


@pytest.mark.parametrize("change", ["submit", "abort", "nothing"])
def test_calls_between_two_steps(change: str) -> None:
    """While a step runs, anything may be called; the tokens stay those of the dense model."""
    loop, calls = loop_of(True, max_num_seqs=5, max_num_tokens=20), 0
    act: dict[str, Callable[[], Any]] = {
        "submit": lambda: loop.submit(PROMPTS[calls % 8], GREEDY),
        "abort": lambda: loop.abort(max(0, calls - 3)),
        "nothing": lambda: loop.has_work,
    }
    for prompt in PROMPTS[:8]:
        loop.submit(prompt, GREEDY)
    while loop.has_work and calls < 300:
        loop.step()
        if calls < 8:
            act[change]()
        calls += 1
    for request_id in range(loop._inbox._maker.next_id):
        output = loop.output(request_id)
        expected = EXPECTED[request_id % 8] if change != "submit" or request_id < 8 else EXPECTED[(request_id - 8) % 8]
        assert output == expected[: len(output)]
        assert output.finish_reason == ("length" if len(output) == 12 else "abort")
    assert_empty(loop)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("between", ["allocations", "warm_up"])
def test_steps_on_two_streams_in_turn(between: str) -> None:
    """A step may run long after the next call begins on the other stream."""
    table = torch.rand(V, V, device="cuda")  # a token follows from the one before

    def step(input_ids: torch.Tensor, metadata: Any, last_rows: torch.Tensor, kv_caches: Any) -> torch.Tensor:
        return table[input_ids[last_rows]]

    outputs = []
    for overlap in (False, True):
        loop = GenerationLoop(step, KVCache(1, 64, B, K, D, device="cuda"), overlap=overlap, max_num_seqs=4)
        loop.warm_up()
        ids = [loop.submit(prompt, GREEDY) for prompt in PROMPTS[:4]]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        while loop.has_work:
            here, there = streams
            with torch.cuda.stream(here):
                torch.cuda._sleep(20_000_000)
                loop.step()
            with torch.cuda.stream(there):
                if between == "warm_up":
                    loop.warm_up()
                else:
                    kept = [torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(100)]  # noqa: F841
            streams.reverse()
        outputs.append([loop.output(i) for i in ids])
        assert bool(loop.stats.overlapped_steps) == overlap
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_penalties_by_kernels_give_the_tokens_of_the_cpu() -> None:
    """In turn and overlapped, next to requests without penalties, for longer than one program reads."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3))
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    each = [
        SamplingParams(max_new_tokens=60, **penalties),
        GREEDY,
        SamplingParams(max_new_tokens=60, min_new_tokens=60, stop_token_ids=(3, 5), repetition_penalty=0.8),
        SamplingParams(max_new_tokens=60, temperature=0.7, seed=2, frequency_penalty=0.5),
    ]
    prompts = [PROMPTS[7] * 50, PROMPTS[1], PROMPTS[2], PROMPTS[9] * 3]
    outputs = []
    for device, overlap in (("cpu", False), ("cuda", False), ("cuda", True)):
        logits = table.to(device)

        def step(
            input_ids: torch.Tensor, metadata: Any, last_rows: torch.Tensor, kv_caches: Any, logits: Any = logits
        ) -> torch.Tensor:
            return logits[input_ids[last_rows]]

        kv_cache = KVCache(1, 800, B, K, D, device=device)
        loop = GenerationLoop(step, kv_cache, overlap=overlap, max_num_seqs=4, max_model_len=2000)
        outputs.append(loop.generate(prompts, each))
        outputs.append(loop.generate(prompts[:1], each[:1]))
        assert bool(loop.stats.overlapped_steps) == overlap
    assert outputs[2:4] == outputs[:2]
    assert outputs[4:] == outputs[:2]
