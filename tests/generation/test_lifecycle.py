"""Who may call a loop and when: threads, signal handlers, finalizers, calls that go on after an interrupt, two loops on
one cache."""

import contextlib
import copy
import gc
import itertools
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.cache.lock import CacheLock
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams, TokenStream
from tests.generation.alarm import FILES, Alarm, traced
from tests.generation.alarm import make_loop as make_strained_loop
from tests.generation.toy import (
    EXPECTED,
    GREEDY,
    PROMPTS,
    B,
    D,
    K,
    assert_empty,
    make_loop,
    prompts_of,
    step_on,
    tokens_by_request,
    toy_step,
)

pytestmark = pytest.mark.usefixtures("order")


class Bell:
    """Calls a function before the n-th bytecode that the code of the loop runs, as a signal handler or finalizer is."""

    def __init__(self, at: int = 0, call: Callable[[], object] = lambda: None) -> None:
        self.at, self.call, self.count, self.where = at, call, 0, ""

    def armed(self) -> contextlib.AbstractContextManager[None]:
        return traced(self._trace)

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self.call()
        return self._trace


def some(count: int, most: int) -> list[int]:
    return sorted(random.Random(count).sample(range(1, count + 1), min(count, most)))


def drain(loop: GenerationLoop) -> list[list[NewToken]]:
    steps = []
    while loop.has_work:
        steps.append(loop.step())
        assert len(steps) < 200, "it does not end"
    return steps


def check_ends(found: dict[int, list[NewToken]]) -> None:
    """Each request ends exactly once, and nothing comes after it."""
    for request_id, news in found.items():
        reasons = [new.finish_reason for new in news]
        assert reasons[-1] and reasons[:-1] == [None] * (len(news) - 1), (request_id, reasons)


# Handlers and finalizers


@pytest.mark.parametrize("during", ["abort", "step"])
@pytest.mark.parametrize("name", ["abort", "submit", "close"])
def test_a_handler_within_a_call(during: str, name: str) -> None:
    """A signal handler may abort, submit or close between any two bytecodes: each request ends once, all blocks are
    free, and the tokens of the others are what they would have been."""

    def act(loop: GenerationLoop) -> list[NewToken]:
        if during == "step":
            return loop.step() + loop.step()
        loop.abort(0)
        return []

    def prepare() -> GenerationLoop:
        loop = make_loop(num_blocks=18, max_num_seqs=4)
        for prompt in PROMPTS[3:7]:
            loop.submit(prompt, GREEDY)
        loop.step()
        return loop

    bell, loop = Bell(), prepare()
    with bell.armed():
        act(loop)
    for at in some(bell.count, 60):
        loop, new = prepare(), list[int]()
        calls: dict[str, Callable[[], object]] = {
            "abort": lambda loop=loop: loop.abort(1),
            "submit": lambda loop=loop, new=new: new.append(loop.submit(PROMPTS[2], GREEDY)),
            "close": lambda loop=loop: loop.close(),
        }
        bell = Bell(at, calls[name])
        with bell.armed():
            events = act(loop)
        found = tokens_by_request([events, *drain(loop)])
        assert bell.where and len(found) == 4 + len(new), bell.where
        check_ends(found)
        for request_id, news in found.items():
            output, expected = loop.output(request_id), EXPECTED[2 if request_id in new else request_id + 3]
            assert output == expected[: len(output)], bell.where
            got = [each.token for each in news if each.token is not None]
            assert got == output[len(output) - len(got) :], bell.where
            ends_early = (
                name == "close" or request_id == {"abort": 1}.get(name) or request_id == {"abort": 0}.get(during)
            )
            assert news[-1].finish_reason == ("abort" if ends_early else "length"), bell.where
        assert_empty(loop)


def test_a_step_within_a_step_is_refused() -> None:
    loop = make_loop()
    raised: list[str] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for call in (loop.step, loop.run, lambda: loop.generate([[1]]), loop.warm_up, loop.reset):
            with pytest.raises(RuntimeError, match="expected no step, warm_up or reset within another one") as caught:
                call()
            raised.append(str(caught.value))
        return scores

    params = SamplingParams(max_new_tokens=1, logits_processor=processor)
    assert loop.generate([PROMPTS[4]], params) == [EXPECTED[4][:1]]
    assert len(raised) == 5
    assert_empty(loop)


def test_a_finalizer_within_a_step_of_another_loop() -> None:
    """The blocks of a loop that is collected come back at the end of the step that runs on the same cache."""
    kv_cache = KVCache(1, 40, B, K, D)
    loops = [GenerationLoop(toy_step, kv_cache) for _ in range(2)]
    loops[1].submit(PROMPTS[7], GREEDY)
    loops[1].step()
    held, during = kv_cache.num_used_blocks, list[int]()

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del loops[1:]
        gc.collect()
        during.append(kv_cache.num_used_blocks)
        return scores

    params = SamplingParams(max_new_tokens=3, logits_processor=processor)
    loops[0].submit(PROMPTS[0], params)
    loops[0].step()
    assert during[0] == held + 1, "not in the middle of the step"
    assert kv_cache.num_used_blocks == 1
    assert loops[0].run()[0] == EXPECTED[0][1:3]
    assert_empty(loops[0])


# Calls after an interrupt


@pytest.mark.parametrize("again", ["close", "abort", "with", "step"])
@pytest.mark.parametrize("first", ["close", "abort"])
def test_one_more_call_finishes_an_interrupted_clean_up(first: str, again: str) -> None:
    def begin() -> GenerationLoop:
        loop = make_strained_loop()
        for _ in range(4):
            loop.step()
        return loop

    def act(loop: GenerationLoop, name: str) -> list[NewToken]:
        if name == "close":
            loop.close()
        elif name == "abort":
            for request_id in range(4):
                loop.abort(request_id)
        elif name == "step":
            return loop.step()
        else:
            with loop:
                pass
        return []

    alarm, loop = Alarm(), begin()
    with alarm.armed():
        act(loop, first)
    for at in some(alarm.count, 40):
        loop, alarm = begin(), Alarm(at)
        with pytest.raises(KeyboardInterrupt), alarm.armed():
            act(loop, first)
        events = act(loop, again)
        if again != "step":
            stats = loop.kv_cache.stats()
            assert (stats.used_blocks, stats.host_used_blocks) == (0, 0), alarm.where
        check_ends(tokens_by_request([events, *drain(loop)]))
        assert_empty(loop)


def test_one_more_call_after_an_interrupt_of_what_an_interrupt_had_left() -> None:
    """Ctrl-C twice: in the model, and while the step is given up."""
    fails = [False]

    def step(*inputs: Any) -> torch.Tensor:
        if fails[0]:
            raise KeyboardInterrupt
        return toy_step(*inputs)

    def begin() -> GenerationLoop:
        loop = GenerationLoop(step, KVCache(1, 18, B, K, D, num_host_blocks=6), max_num_seqs=4, max_num_tokens=12)
        fails[0] = False
        for prompt in PROMPTS[3:8]:
            loop.submit(prompt, GREEDY)
        loop.step()
        fails[0] = True
        return loop

    alarm, loop = Alarm(), begin()
    with pytest.raises(KeyboardInterrupt), alarm.armed():
        loop.step()
    calls: tuple[Callable[[GenerationLoop], object], ...] = (
        lambda loop: loop.close(),
        lambda loop: loop.__exit__(None, None, None),
        lambda loop: [loop.abort(request_id) for request_id in range(5)],
    )
    for number, at in enumerate(some(alarm.count, 60)):
        loop, alarm = begin(), Alarm(at)
        with pytest.raises(KeyboardInterrupt), alarm.armed():
            loop.step()
        calls[number % 3](loop)
        stats = loop.kv_cache.stats()
        assert (stats.used_blocks, stats.host_used_blocks) == (0, 0), alarm.where


@pytest.mark.slow
def test_a_stream_loses_no_token_to_an_interrupt() -> None:
    def begin() -> tuple[GenerationLoop, TokenStream]:
        loop = make_loop()
        stream = loop.stream(PROMPTS[4], SamplingParams(max_new_tokens=4, n=2))
        loop.submit(PROMPTS[5], SamplingParams(max_new_tokens=6))
        return loop, stream

    def read(stream: TokenStream) -> list[NewToken]:
        got: list[NewToken] = []
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                got.extend(stream)
                return got

    alarm, (_, stream) = Alarm(), begin()
    with alarm.armed():
        expected = read(stream)
    assert len(expected) == 8
    near = [at for at, (code, _) in enumerate(alarm.lines, 1) if code.co_name == "__next__"]
    for at in [*near[-80:], *some(alarm.count, 30)]:  # every bytecode about the last tokens
        alarm, (loop, stream) = Alarm(at), begin()
        with alarm.armed():
            got = read(stream)
        assert alarm.where and got == expected, alarm.where
        assert loop.run()[2] == EXPECTED[5][:6]
        assert_empty(loop)


def test_a_stream_loses_no_token_to_a_signal() -> None:
    """As before, with signals of a timer instead of a tracer, which come where CPython looks for them."""
    interrupts = [0]

    def handler(number: int, frame: Any) -> None:
        interrupts[0] += 1
        raise KeyboardInterrupt

    generator, loop = random.Random(0), make_loop()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        while interrupts[0] < 30:
            stream, got, done = loop.stream(PROMPTS[4], SamplingParams(max_new_tokens=150)), list[int | None](), False
            loop.run()  # so that signals come while tokens are delivered
            while not done:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(5e-6, 1e-4))
                    for new in stream:
                        got.append(new.token)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    done = True
            assert got == stream.outputs[0], interrupts
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_empty(loop)


# Threads


def test_threads_share_a_loop() -> None:
    """Threads that generate, stream, submit and step, and abort: each gets its own tokens, all of them, once."""
    loop = make_loop(num_blocks=40, num_host_blocks=6, max_num_seqs=5, max_num_tokens=24)
    wrong: list[Any] = []
    stepped: list[NewToken] = []
    submitted: dict[int, int] = {}

    def generate(rng: random.Random) -> None:
        chosen = [rng.randrange(8) for _ in range(3)]
        seen: list[NewToken] = []
        outputs = loop.generate([PROMPTS[i] for i in chosen], GREEDY, seen.append if rng.random() < 0.5 else None)
        assert outputs == [EXPECTED[i] for i in chosen]
        assert not seen or sorted(new.token or 0 for new in seen) == sorted(itertools.chain(*outputs))

    def stream(rng: random.Random) -> None:
        index = rng.randrange(8)
        with loop.stream(PROMPTS[index], GREEDY) as tokens:
            got = [new.token for new, _ in zip(tokens, range(rng.choice((3, 99))), strict=False)]
        assert got == EXPECTED[index][: len(got)] and len(got) in (3, 12)

    def submit(rng: random.Random) -> None:
        index = rng.randrange(8)
        request_id = loop.submit(PROMPTS[index], GREEDY)
        submitted[request_id] = index
        if rng.random() < 0.3:
            loop.abort(request_id)
            assert loop.output(request_id).finish_reason
        stepped.extend(loop.step())

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(6):
                rng.choice((generate, stream, submit))(rng)
        except BaseException as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not wrong and not any(thread.is_alive() for thread in threads), wrong
    found = tokens_by_request([stepped, *drain(loop)])
    assert set(found) == set(submitted)
    check_ends(found)
    for request_id, news in found.items():
        got = [new.token for new in news if new.token is not None]
        assert got == EXPECTED[submitted[request_id]][: len(got)]
    assert_empty(loop)


def test_a_stream_beside_a_thread_that_never_pauses() -> None:
    loop, stop = make_loop(), threading.Event()

    def endless() -> None:
        while not stop.is_set():
            loop.generate([PROMPTS[8]], SamplingParams(max_new_tokens=90))

    thread = threading.Thread(target=endless)
    thread.start()
    try:
        for _ in range(3):
            assert [new.token for new in loop.stream(PROMPTS[4], GREEDY)] == EXPECTED[4]
    finally:
        stop.set()
        thread.join()
    assert_empty(loop)


def test_close_in_a_thread_ends_what_others_wait_for() -> None:
    loop, outputs = make_loop(), list[Any]()
    begun, closed = threading.Event(), threading.Event()

    def on_token(new: NewToken) -> None:
        begun.set()
        assert closed.wait(30)

    def work() -> None:
        outputs.extend(loop.generate([PROMPTS[8]], SamplingParams(max_new_tokens=90), on_token))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    loop.close()
    assert loop.kv_cache.num_used_blocks == 0, "when close returns"
    closed.set()
    thread.join(30)
    assert not thread.is_alive() and outputs[0].finish_reason == "abort"
    assert_empty(loop)


def test_a_thread_that_waits_has_the_next_turn() -> None:
    lock, order, left = CacheLock(), list[str](), {"a": 20, "b": 20}

    def call(name: str, other: str) -> None:
        order.append(name)
        left[name] -= 1
        while left[other] and lock._first_waiting.acquire(blocking=False):  # until the other one waits
            lock._first_waiting.release()
            time.sleep(1e-4)

    def work(name: str, other: str) -> None:
        while left[name]:
            lock.run(lambda: call(name, other))

    threads = [threading.Thread(target=work, args=names) for names in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "".join(order) in ("ab" * 20, "ba" * 20)


def test_a_change_within_a_turn_waits_for_its_end() -> None:
    lock, order = CacheLock(), list[str]()

    def call() -> str:
        lock.run_or_defer(lambda: order.append("change"))
        order.append("call")
        return "result"

    assert lock.run(call) == "result"
    assert order == ["call", "change"]
    with pytest.raises(ZeroDivisionError):
        lock.run(lambda: (lock.run_or_defer(lambda: order.append("after an error")), 1 / 0))
    assert order[2:] == ["after an error"]
    for copied in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert copied.run(lambda copied=copied: lock.run(lambda: copied.is_held and lock.is_held))
    assert not lock.is_held


def test_tokens_are_put_back_only_under_the_lock() -> None:
    """on_token fails at the first of several tokens, while another thread's step may be taking events."""
    loop = make_loop()
    ids = [loop.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    seen: list[NewToken] = []
    while_held: list[int] = []
    threads: list[threading.Thread] = []

    def hold(held: threading.Event) -> None:
        held.set()
        time.sleep(0.2)
        while_held.append(len(loop._inbox.events))

    def on_token(new: NewToken) -> None:
        seen.append(new)
        if not threads:
            held = threading.Event()
            threads.append(threading.Thread(target=lambda: loop._lock.run(lambda: hold(held))))
            threads[0].start()
            assert held.wait(30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.run(on_token)
    threads[0].join(30)
    assert while_held == [0]
    loop.run(on_token)
    for i, prompt in zip(ids, range(3), strict=True):
        assert [new.token for new in seen if new.request_id == i] == EXPECTED[prompt]


# Two loops on one cache


@pytest.mark.parametrize("num_loops", [2, 3])
def test_loops_on_one_cache_end_or_say_that_blocks_are_out(num_loops: int) -> None:
    """Prompts that are computed in parts take each other's blocks: each loop gives way, and each comes to its end."""
    windows, prompts = (0, 9), prompts_of(23, 21, 19)[:num_loops]
    plain: Any = paged_ops.HybridCache.for_layers(2, 64, 1, K, D, sliding_window=list(windows))
    params = SamplingParams(max_new_tokens=4)
    expected = GenerationLoop(step_on(plain, *windows), plain).generate(prompts, params)
    kv_cache: Any = paged_ops.HybridCache.for_layers(2, 90, 1, K, D, sliding_window=list(windows), num_window_blocks=13)
    loops = [GenerationLoop(step_on(kv_cache, *windows), kv_cache, max_num_tokens=32) for _ in prompts]
    for loop, prompt in zip(loops, prompts, strict=True):
        loop.submit(prompt, params)
    found: list[list[int]] = [[] for _ in loops]
    for _ in range(200):
        for loop, tokens in zip(loops, found, strict=True):
            with contextlib.suppress(paged_ops.OutOfBlocks):
                tokens += [new.token or 0 for new in loop.step()]
    assert found == expected
    assert kv_cache.num_used_blocks == 0
