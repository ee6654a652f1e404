"""Ctrl-C between any two bytecodes of a step: the next call gives exactly the tokens that would have come."""

import contextlib
import gc
import random
from types import CodeType
from typing import Any

import pytest
import torch

from paged_ops.cache import KVCache
from paged_ops.generation import (
    GenerationLoop,
    NewToken,
    SamplingParams,
)
from paged_ops.generation import loop as generation
from tests.fuzz.allocator import Contents
from tests.generation.alarm import Alarm, make_loop
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, B, D, K, V, assert_empty, tokens_by_request, toy_step

pytestmark = pytest.mark.usefixtures("order")


def drain(loop: GenerationLoop, alarm: Alarm) -> tuple[list[list[NewToken]], list[str]]:
    steps, interrupted = [], []
    with alarm.armed():
        while True:
            try:
                if not loop.has_work:
                    break
                steps.append(loop.step())
            except KeyboardInterrupt:
                interrupted.append(alarm.where)
            assert len(steps) < 200, "it does not end"
    return steps, interrupted


def check_interrupt(
    at: int, expected: dict[int, list[NewToken]], stats: dict[str, Any], *, whole_steps: int = 0
) -> None:
    """An interrupt before the bytecode ``at`` of those that come behind so many whole steps."""
    loop, alarm = make_loop(), Alarm(at)
    before = [loop.step() for _ in range(whole_steps)]
    steps, interrupted = drain(loop, alarm)
    assert interrupted, (whole_steps, at)
    assert torch.is_grad_enabled(), (whole_steps, at, alarm.where)
    assert tokens_by_request(before + steps) == expected, (whole_steps, at, alarm.where)
    for name, value in stats.items():
        assert vars(loop.stats)[name] == value, (whole_steps, at, alarm.where, name)
    assert_empty(loop)


def baseline() -> tuple[int, dict[int, list[NewToken]], dict[str, Any]]:
    loop, alarm = make_loop(), Alarm()
    steps, _ = drain(loop, alarm)
    stats = vars(loop.stats)
    assert stats["swapped_out"]
    assert stats["recomputed"]
    assert stats["cached_tokens"]
    assert loop.kv_cache.stats().copied_blocks
    # when the step that preempts is given up, the preemption stays, and what runs in which step may differ
    return alarm.count, tokens_by_request(steps), {"generated_tokens": stats["generated_tokens"]}


@pytest.mark.slow
def test_an_interrupt_anywhere_in_a_step() -> None:
    count, expected, stats = baseline()
    assert count > 10_000
    for at in random.Random(1).sample(range(1, count + 1), 80):
        check_interrupt(at, expected, stats)


def test_interrupts_everywhere_in_one_run() -> None:
    _, expected, _ = baseline()
    generator, interrupted = random.Random(2), 0
    for _ in range(6):
        loop, turns = make_loop(), 0
        steps: list[list[NewToken]] = []
        while loop.has_work:
            alarm = Alarm(generator.randint(1, 9000))  # two of three steps are interrupted
            try:
                with alarm.armed():
                    new = loop.step()
                steps.append(new)
            except KeyboardInterrupt:
                turns += 1
            assert len(steps) + turns < 1000, "it does not end"
        interrupted += turns
        assert tokens_by_request(steps) == expected
        assert_empty(loop)
    assert interrupted > 30


@pytest.mark.parametrize("call", ["submit", "abort", "generate", "close"])
@pytest.mark.slow
def test_an_interrupt_of_other_calls(call: str) -> None:
    def prepare() -> GenerationLoop:
        loop = make_loop()
        for _ in range(4):
            loop.step()
        return loop

    def act(loop: GenerationLoop) -> Any:
        if call == "submit":
            return loop.submit(PROMPTS[3], GREEDY)
        if call == "abort":
            return [loop.abort(request_id) for request_id in (0, 1, 2)]
        if call == "close":
            return loop.close()
        return loop.generate([PROMPTS[3], PROMPTS[2]], SamplingParams(max_new_tokens=2))

    alarm, loop = Alarm(), prepare()
    with alarm.armed():
        act(loop)
    step = max(1, alarm.count // 25)
    for at in range(1, alarm.count + 1, step):
        loop, alarm = prepare(), Alarm(at)
        known = set(loop._inbox._requests)
        with pytest.raises(KeyboardInterrupt), alarm.armed():
            act(loop)
        steps, _ = drain(loop, Alarm())
        found = tokens_by_request(steps)
        if call == "close":
            loop.close()
        if call == "submit" and set(found) - known:
            (new,) = set(found) - known
            assert loop.output(new).finish_reason == "length", alarm.where
        if call == "generate":
            assert set(found) <= known, f"nothing of the call is left: {alarm.where}"
        assert_empty(loop)
        for events in found.values():
            assert [new.finish_reason for new in events if new.finish_reason] == [events[-1].finish_reason]


@pytest.mark.parametrize("seed", range(4))
def test_anything_at_any_time(seed: int) -> None:
    """Requests come, fork, are aborted and streamed while models fail and interrupts strike; tokens against the dense
    model, each delivered once."""
    rng = random.Random(seed)
    fails = [False]

    def step(*inputs: Any) -> torch.Tensor:
        if fails[0] and rng.random() < 0.1:
            raise RuntimeError("the model failed")
        logits = toy_step(*inputs)
        if fails[0] and rng.random() < 0.1:
            raise RuntimeError("the model failed late")
        return logits

    kv_cache = KVCache(1, rng.choice([12, 20]), B, K, D, num_host_blocks=rng.choice([0, 6]))
    loop = GenerationLoop(step, kv_cache, max_num_seqs=rng.choice([2, 5]), max_num_tokens=rng.choice([6, 24]))
    wanted: dict[int, list[int]] = {}
    aborted: set[int] = set()
    got: dict[int, list[NewToken]] = {}
    for turn in range(120):
        fails[0] = turn < 100
        if turn < 80 and rng.random() < 0.3:
            index, n = rng.randrange(7), rng.choice([1, 1, 2])
            first = loop.submit(PROMPTS[index], SamplingParams(max_new_tokens=rng.randint(1, 12), n=n))
            wanted |= dict.fromkeys(range(first, first + n), EXPECTED[index])
        if wanted and rng.random() < 0.05:
            aborted.add(victim := rng.choice(list(wanted)))
            loop.abort(victim)
        alarm = Alarm(rng.randint(1, 9000) if fails[0] and rng.random() < 0.4 else 0)
        try:
            if not alarm.at:
                new = loop.step()
            else:
                with alarm.armed():
                    new = loop.step()
        except (KeyboardInterrupt, RuntimeError):
            continue
        for each in new:
            got.setdefault(each.request_id, []).append(each)
    for new in drain(loop, Alarm())[0]:
        for each in new:
            got.setdefault(each.request_id, []).append(each)
    assert set(got) == set(wanted)
    for request_id, news in got.items():
        tokens = [new.token for new in news if new.token is not None]
        assert tokens == wanted[request_id][: len(tokens)] == loop.output(request_id)
        assert [new.finish_reason for new in news[:-1]] == [None] * (len(news) - 1)
        assert news[-1].finish_reason in (("abort", "length") if request_id in aborted else ("length",))
    assert_empty(loop)


@pytest.mark.slow
def test_an_interrupt_at_every_line(order: bool) -> None:
    """8 s: every line that runs, before a bytecode drawn from all times that it does; in turn, one line in four."""
    _, expected, stats = baseline()
    times: dict[tuple[CodeType, int], list[tuple[int, int]]] = {}
    loop, whole_steps = make_loop(), 0
    while loop.has_work:
        alarm = Alarm()
        with alarm.armed():
            if loop.has_work:
                loop.step()
        for at, line in enumerate(alarm.lines, 1):
            times.setdefault(line, []).append((whole_steps, at))
        whole_steps += 1
    assert len(times) > 500
    generator = random.Random(3)
    for each in list(times.values())[:: 1 if order else 4]:
        whole_steps, at = generator.choice(each)
        check_interrupt(at, expected, stats, whole_steps=whole_steps)


def test_garbage_after_an_interrupt_gives_its_blocks_back() -> None:
    loop = make_loop()
    drain(loop, Alarm(5000))
    kv_cache = loop.kv_cache
    loop.submit(PROMPTS[1], GREEDY)
    drain_one = loop.step()
    assert drain_one[0].token in range(V)
    del loop
    gc.collect()
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("call", ["swap_out", "swap_in", "commit"])
def test_an_interrupted_call_of_the_cache_keeps_what_a_sequence_holds(call: str) -> None:
    """Which blocks a sequence has, where they are and where they begin changes as one."""

    def prepare() -> Contents:
        kv_cache = Contents(6, B, 4, sliding_window=6 if call == "commit" else 0)
        kv_cache.admit("other", [0] * B)  # so that blocks of host and device have different numbers
        kv_cache.admit("a", range(13))
        for token, slot in enumerate(kv_cache.slots("a")):
            kv_cache.device[slot // B][slot % B] = token
        kv_cache.commit("a", 0 if call == "commit" else 13)
        if call == "swap_in":
            kv_cache.swap_out("a")
        return kv_cache

    def act(kv_cache: Contents) -> None:
        if call == "commit":
            kv_cache.commit("a", 13)
        else:
            getattr(kv_cache, call)("a")

    alarm, kv_cache = Alarm(), prepare()
    with alarm.armed():
        act(kv_cache)
    for at in range(1, alarm.count + 1):
        kv_cache, alarm = prepare(), Alarm(at)
        with pytest.raises(KeyboardInterrupt), alarm.armed():
            act(kv_cache)
        kv_cache.recover()
        if kv_cache.is_swapped_out("a"):
            kv_cache.swap_in("a")
        start = kv_cache.num_given_back("a") * B
        held = [kv_cache.device[slot // B][slot % B] for slot in kv_cache.slots("a", start, 13)]
        assert held == list(range(start, 13)), alarm.where
        kv_cache.free("a")
        assert kv_cache.stats().used_blocks == 1, alarm.where


def test_changes_that_are_made_a_second_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> GenerationLoop:
        loop = make_loop()
        loop.submit(PROMPTS[6], SamplingParams(max_new_tokens=3, logprobs=2, prompt_logprobs=1, n=2))
        return loop

    whole = made()
    outputs = whole.run()

    def apply_and_stop(*arguments: Any) -> None:
        apply(*arguments)
        if not arguments[-1]:
            raise KeyboardInterrupt  # so the next call makes them again

    apply = generation.apply_changes
    monkeypatch.setattr(generation, "apply_changes", apply_and_stop)
    loop, turns = made(), 0
    while loop.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            loop.step()
        turns += 1
    assert turns >= whole.stats.steps
    for each, tokens in outputs.items():
        expected, output = whole.output(each), loop.output(each)
        assert output == expected == tokens
        assert vars(output) == vars(expected)
        assert output.logprobs is None or len(output.logprobs) == len(tokens)
