"""Campaign: ``GenerationLoop`` under everything that may happen to it, tokens against a dense model in float64.

One case is one loop over a small cache: requests of many kinds come and go, some are aborted, the model raises, Ctrl-C
strikes between any two lines, once or again while the first is handled, or a signal handler submits, aborts and closes
there. Sequences are preempted, prefixes shared. Every token must be what the dense model gives for all tokens before
it, each must be delivered once, and at the end every block must be free.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import paged_ops
from paged_ops.cache import HybridCache, KVCache, OutOfBlocks
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams, distribution
from paged_ops.generation import loop as generation

from .runner import Case
from .toy import Toy

ACTIONS = 250
FOLDER = os.path.dirname(paged_ops.__file__)
CLOSE = 2e-3  # of logits of about 5, of float32 against float64
FEATURES: tuple[dict[str, Any], ...] = ({}, {}, {}, {"sliding_window": 9}, {"attention_chunk": 8}, {"soft_cap": 5.0})


class ModelError(Exception):
    """What the model raises, when it does."""


class Step:
    """The toy model as the loop sees it: it fails now and then, and its logits are NaN behind one token."""

    def __init__(self, toy: Toy, case: Case, bad_token: int | None) -> None:
        self.toy, self.rng, self.bad_token = toy, case.random, bad_token
        self.vocab_size = toy.V
        self.fails = 0.0

    def __call__(self, input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Any) -> Tensor:
        if self.rng.random() < self.fails:
            raise ModelError("before")
        logits = self.toy(input_ids, metadata, last_rows, kv_caches)
        if self.rng.random() < self.fails:
            raise ModelError("after")
        if self.bad_token is not None:
            logits = logits.masked_fill((input_ids[last_rows] == self.bad_token)[:, None], torch.nan)
        return logits


@dataclasses.dataclass
class Sent:
    """A request, and what was delivered of it."""

    prompt: list[int]
    params: SamplingParams
    extra_key: Any
    sample: int
    got: list[int] = dataclasses.field(default_factory=list)
    ended: str | None = None
    aborted: bool = False


def run(case: Case) -> None:
    """One loop and its requests."""
    Session(case).run()


class Session:
    """A loop and its requests; it shares the cache of ``beside``."""

    def __init__(self, case: Case, beside: Session | None = None) -> None:
        self.case, self.rng = case, case.random
        if beside is None:
            self.make_cache()
        else:
            names = ("V", "toy", "step_", "B", "cache", "what")
            self.__dict__.update({name: getattr(beside, name) for name in names})
        self.make_loop()

    def make_cache(self) -> None:
        case, rng = self.case, self.rng
        features = rng.choice(FEATURES)
        self.V = rng.choice((7, 30, 64))
        sizes: dict[str, Any] = {"layers": rng.choice((1, 2)), "V": self.V, "H": 4, "K": 2, "D": 16}
        if rng.random() < 0.3:  # layers that see differently far, in pools of their own
            reaches = rng.choice(({"sliding_window": 9}, {"attention_chunk": 8}))
            by_layer = rng.choice(
                ([{}, reaches], [reaches, {}, reaches], [{"sliding_window": 5}, {"sliding_window": 12}])
            )
            features, sizes["layers"], sizes["by_layer"] = {}, len(by_layer), by_layer
        self.toy = Toy(rng.randrange(50), device=case.device, **sizes, **features)
        self.step_ = Step(self.toy, case, rng.randrange(self.V) if rng.random() < 0.3 else None)
        self.B, N = rng.choice((1, 2, 4, 4, 8, 16)), rng.choice((6, 12, 20, 40))
        N = max(N, 24 // self.B + 1) * (4 if self.B == 1 else 1)
        kinds: dict[str, Any] = {"device": case.device, "num_host_blocks": rng.choice((0, 0, 4, 30))}
        shape = self.toy.layers, N, self.B, self.toy.K, self.toy.D
        self.cache: Any
        if "by_layer" in sizes:
            for name in ("sliding_window", "attention_chunk"):
                kinds[name] = [each.get(name, 0) for each in sizes["by_layer"]]
            kinds["num_window_blocks"] = rng.choice((None, max(N // 2, 40 // self.B + 2)))
            if not any(map(any, (kinds["sliding_window"], kinds["attention_chunk"]))):
                kinds["num_window_blocks"] = None
            self.cache = HybridCache.for_layers(*shape, **kinds)
            self.toy.pool_of_layer = self.cache.pool_of_layer
        else:
            if rng.random() < 0.7:
                kinds |= {name: value for name, value in features.items() if name != "soft_cap"}
            self.cache = KVCache(*shape, **kinds)
        for layer in self.cache.layers:
            layer.fill_(torch.nan)
        self.what = f"{sizes} {features} B={self.B} N={N} {kinds}"

    def make_loop(self) -> None:
        case, rng = self.case, self.rng
        seqs = rng.choice((1, 2, 4, 8, 12))
        limits: dict[str, Any] = {"max_num_seqs": seqs, "max_num_tokens": seqs + rng.choice((0, 3, 20, 100))}
        limits["overlap"] = rng.random() < 0.7
        if rng.random() < 0.3:
            limits["max_model_len"] = min(self.cache.pools[0].num_blocks * self.B, rng.randint(10, 100))
        if case.device.type == "cuda" and rng.random() < 0.5:
            limits["graph_mode"] = "FULL_DECODE_ONLY"
        self.loop = GenerationLoop(self.step_, self.cache, seed=rng.getrandbits(30), **limits)
        if "graph_mode" in limits:
            self.loop.warm_up()
        self.longest = min(self.loop.max_model_len, self.cache.max_seq_len, 100)
        self.what += f" {limits}"
        self.sent: dict[int, Sent] = {}
        self.roots = [[rng.randrange(self.V) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        self.fails = rng.choice((0.0, 0.0, 0.03, 0.2))
        self.interrupts = rng.choice((0.0, 0.0, 0.05, 0.2))
        self.handlers = rng.choice((0.0, 0.0, 0.05, 0.2))
        self.in_turn = rng.choice((0.0, 0.1, 1.0))  # how often requests have what steps cannot overlap with
        self.streams: list[Any] = []

    def run(self) -> None:
        try:
            for _ in range(ACTIONS):
                self.act()
            self.finish()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.what}") from error
        self.count()

    def count(self) -> None:
        stats = self.loop.stats
        for name in ("steps", "overlapped_steps", "cached_tokens", "swapped_out", "recomputed"):
            self.case.counts[name] += getattr(stats, name)

    # What happens ----------------------------------------------------------------------------------------------------

    def act(self) -> None:
        rng, unfinished = self.rng, [i for i, sent in self.sent.items() if sent.ended is None]
        kind = rng.random()
        if kind < 0.18 or not unfinished:
            if len(unfinished) < 40:
                self.submit()
        elif kind < 0.21:
            self.abort(rng.choice(unfinished))
        elif kind < 0.23:
            self.refused()
        elif kind < 0.25:
            self.generate()
        elif kind < 0.29:
            self.stream()
        else:
            self.step()

    def prompt(self) -> list[int]:
        rng = self.rng
        prompt = list(rng.choice(self.roots)) if rng.random() < 0.6 else []
        prompt = prompt[: rng.randint(0, len(prompt))]
        prompt += [rng.randrange(self.V) for _ in range(rng.randint(0 if prompt else 1, 12))]
        return prompt[: self.longest - 1]

    def params(self, prompt: list[int]) -> SamplingParams:
        rng, named = self.rng, {}
        most = self.longest - len(prompt)
        named["max_new_tokens"] = rng.randint(1, min(most, rng.choice((1, 8, 40, 100))))
        if rng.random() < 0.35:
            named |= {"temperature": rng.choice((0.3, 1.0, 3.0)), "seed": rng.randrange(1000)}
            named["top_p"] = rng.choice((1.0, 1.0, 0.9, 0.5))
            named["top_k"] = rng.choice((0, 0, 5))
        if rng.random() < 0.3:
            named["stop_token_ids"] = tuple(rng.randrange(self.V) for _ in range(rng.randint(0, 3)))
        if rng.random() < 0.2 * self.in_turn:
            named["n"] = rng.randint(2, 4)
        if rng.random() < 0.15 * self.in_turn:
            named["logprobs"] = rng.randint(0, 3)
        return SamplingParams(**named)

    def note(self, first: int, prompt: list[int], params: SamplingParams, extra_key: Any) -> None:
        for sample in range(params.n or 1):
            assert first + sample not in self.sent, f"request id {first + sample} given twice"
            self.sent[first + sample] = Sent(prompt, params, extra_key, sample)

    def submit(self) -> None:
        prompt = self.prompt()
        params, key = self.params(prompt), self.rng.choice((None, None, None, "a", 7))
        given: Any = self.rng.choice((prompt, torch.tensor(prompt), tuple(prompt)))
        submit = functools.partial(self.loop.submit, given, params, extra_key=key)
        self.note(self.interruptible(submit, interrupts=0.0), prompt, params, key)
        self.case.counts["requests"] += params.n or 1

    def abort(self, request_id: int) -> None:
        sent = self.sent[request_id]
        request, sent.aborted = self.loop._inbox._requests.get(request_id), True
        try:
            ended = self.interruptible(lambda: self.loop.abort(request_id))
        except KeyboardInterrupt:
            ended = None
            self.loop.abort(request_id)
            self.case.counts["interrupted aborts"] += 1
        if not self.loop._lock.is_held:
            assert ended is not False or self.loop.output(request_id).finish_reason, "abort of a request that goes on"
            assert request not in self.cache, "an aborted request holds blocks"
        self.case.counts["aborts"] += 1

    def call_back(self) -> None:
        """What a signal handler does."""
        unfinished = [i for i, sent in self.sent.items() if sent.ended is None]
        if self.rng.random() < 0.4 or not unfinished:
            self.submit()
        else:
            self.abort(self.rng.choice(unfinished))
        self.case.counts["calls of handlers"] += 1

    def refused(self) -> None:
        """Requests without meaning queue nothing."""
        prompt = [0]
        calls: list[Callable[[], Any]] = [
            lambda: self.loop.submit([]),
            lambda: self.loop.submit([self.V]),
            lambda: self.loop.submit([-1]),
            lambda: self.loop.submit("text"),
            lambda: self.loop.submit([0] * self.longest * 100),
            lambda: self.loop.generate([prompt, [self.V + 3]], SamplingParams(max_new_tokens=1)),
            lambda: self.loop.abort(10**9),
            lambda: SamplingParams(max_new_tokens=0),
            lambda: SamplingParams(temperature=math.nan),
        ]
        try:
            self.rng.choice(calls)()
        except ValueError:
            return  # one that stays queued would give tokens that nobody sent for
        raise AssertionError("a request without meaning was not refused")

    def interruptible(
        self, function: Callable[[], Any], interrupts: float | None = None, handler: Callable[[], Any] | None = None
    ) -> Any:
        if self.loop._lock.is_held:  # a handler's
            return function()
        rng, self.step_.fails = self.rng, self.fails
        try:
            most = rng.choice((20, 200, 1500))
            if rng.random() < (self.interrupts if interrupts is None else interrupts):
                return struck(function, most, rng, interrupt, times=rng.choice((1, 1, 2, 3)))
            if handler or rng.random() < self.handlers:
                return struck(function, most, rng, handler or self.call_back)
            return function()
        finally:
            self.step_.fails = 0.0

    def step(self) -> None:
        try:
            new = self.interruptible(self.loop.step)
        except ModelError:
            self.case.counts["failed steps"] += 1
        except OutOfBlocks:
            self.case.counts["steps out of blocks"] += 1
        except KeyboardInterrupt:
            self.case.counts["interrupted steps"] += 1
        else:
            for each in new:
                self.deliver(each)

    def generate(self) -> None:
        """Additional prompts; an exception removes them again."""
        prompts = [self.prompt() for _ in range(self.rng.randint(1, 3))]
        params = [
            dataclasses.replace(self.params(prompt), max_new_tokens=1 + i % 3) for i, prompt in enumerate(prompts)
        ]
        params = [p for p, prompt in zip(params, prompts, strict=True) if len(prompt) + 3 <= self.longest]
        prompts = [prompt for prompt in prompts if len(prompt) + 3 <= self.longest]
        try:
            outputs = self.interruptible(lambda: self.loop.generate(prompts, params))
        except (ModelError, OutOfBlocks, KeyboardInterrupt):
            self.case.counts["failed generate()"] += 1
            return
        number = 0
        for prompt, each in zip(prompts, params, strict=True):
            for sample in range(each.n or 1):
                sent = Sent(prompt, each, None, sample, list(outputs[number]), outputs[number].finish_reason)
                self.check(-1 - number, sent, outputs[number])
                number += 1
        assert number == len(outputs)

    def stream(self) -> None:
        """Begins one, takes from one, or closes one."""
        rng = self.rng
        if len(self.streams) < 3 and rng.random() < 0.5:
            prompt = self.prompt()
            params = self.params(prompt)
            stream = self.loop.stream(prompt, params)
            self.note(stream.request_ids[0], prompt, params, None)
            self.streams.append(stream)
            self.case.counts["streams"] += 1
        elif self.streams:
            stream = rng.choice(self.streams)
            if rng.random() < 0.1:
                stream.close()
                self.streams.remove(stream)
                for request_id in stream.request_ids:
                    sent = self.sent[request_id]
                    if sent.ended is None:  # what was not read is lost by intention
                        sent.aborted, sent.ended = True, "closed"
                return
            try:
                new = self.interruptible(lambda: next(stream))
            except StopIteration:
                self.streams.remove(stream)
                for request_id in stream.request_ids:
                    assert self.sent[request_id].ended, f"the stream of {request_id} ended without it"
            except (ModelError, OutOfBlocks, KeyboardInterrupt):
                self.case.counts["failed next()"] += 1
            else:
                self.deliver(new)

    # What must hold --------------------------------------------------------------------------------------------------

    def deliver(self, new: NewToken) -> None:
        assert new.request_id in self.sent, f"a token of request {new.request_id}, which nobody sent"
        sent = self.sent[new.request_id]
        assert sent.ended is None, f"request {new.request_id} goes on after {sent.ended}"
        if new.token is not None:
            sent.got.append(new.token)
        if new.finish_reason is not None:
            sent.ended = new.finish_reason
            self.check(new.request_id, sent, self.loop.output(new.request_id))

    def check(self, request_id: int, sent: Sent, output: generation.Output) -> None:
        """A finished request: the right tokens, each of them once, and the right end."""
        params, got, prompt = sent.params, sent.got, sent.prompt
        name = f"request {request_id} ({len(prompt)} tokens, {params})"
        assert list(output) == got, f"{name}: delivered {got}, kept {list(output)}"
        assert output.finish_reason == sent.ended, f"{name}: {output.finish_reason}, delivered {sent.ended}"
        self.case.counts["tokens"] += len(got)
        self.case.counts[f"ended by {sent.ended}"] += 1
        stops = set(params.stop_token_ids or ())
        assert not stops & set(got[:-1]), f"{name}: goes on after a stop token: {got}"
        assert len(got) <= params.max_new_tokens, name
        last = (got or prompt)[-1]
        if sent.ended == "stop":
            assert got and got[-1] in stops, f"{name}: stopped by {last}"
        elif sent.ended == "length":
            assert len(got) == params.max_new_tokens and got[-1] not in stops, f"{name}: {got}"
        elif sent.ended == "error":
            assert last == self.step_.bad_token and output.error, f"{name}: error {output.error} behind {last}"
        else:
            assert sent.ended == "abort" and sent.aborted, f"{name}: ended by {sent.ended}"
        if self.step_.bad_token is not None:
            assert self.step_.bad_token not in (prompt[-1:] + got)[: len(got)], f"{name}: goes on behind NaN"
        if got:
            self.check_tokens(name, sent, output)

    def check_tokens(self, name: str, sent: Sent, output: generation.Output) -> None:
        params, got, prompt = sent.params, sent.got, sent.prompt
        logits = self.toy.dense(prompt + got[:-1])[len(prompt) - 1 :]
        chosen = torch.tensor(got)
        scores = logits
        if params.temperature:
            scores = self.draws(logits, params, sent.sample, len(prompt))
        best = scores.amax(-1)
        gap = best - scores.gather(1, chosen[:, None])[:, 0]
        wrong = (gap > (CLOSE if not params.temperature else CLOSE * 2)).nonzero().flatten().tolist()
        kind = "sampled" if params.temperature else "greedy"
        self.case.counts[f"{kind} tokens"] += len(got)
        self.case.worst[kind] = max(self.case.worst.get(kind, 0.0), float(gap.clamp(max=1e9).amax()) / CLOSE)
        if wrong:
            at = wrong[0]
            raise AssertionError(
                f"{name}: token {at} of {got} is {got[at]}, not {int(scores[at].argmax())}: {float(gap[at]):.3g} worse"
            )
        if params.logprobs is not None and output.logprobs is not None:
            want = torch.log_softmax(logits, -1)
            assert len(output.logprobs) == len(got), f"{name}: {len(output.logprobs)} log-probabilities"
            for at, each in enumerate(output.logprobs):
                off = abs(each.logprob - float(want[at, got[at]]))
                assert off < CLOSE, f"{name}: the log-probability of token {at} is off by {off}"
                assert len(each.top) == min(params.logprobs, self.V)
                for token, logprob in each.top:
                    assert abs(logprob - float(want[at, token])) < CLOSE, f"{name}: a log-probability of {at}"

    def draws(self, logits: Tensor, params: SamplingParams, sample: int, first: int) -> Tensor:
        """How far from being drawn each token is, by the rule of the documentation, from exact logits. Rows in which a
        token may be at the edge of top-k or top-p are not judged."""
        assert params.seed is not None and params.temperature
        key = distribution.key_of(params.seed, sample)
        keys = [distribution.random_key(key, first + at) for at in range(len(logits))]
        p = torch.softmax(logits / params.temperature, -1)
        top_p = 1.0 if params.top_p is None else params.top_p
        unclear = torch.zeros(len(p), 1, dtype=torch.bool)
        if params.top_k and params.top_k < self.V:
            ordered = logits.sort(dim=-1, descending=True).values[:, params.top_k - 1 : params.top_k + 1]
            unclear = ordered[:, :1] - ordered[:, 1:] < CLOSE
            p = torch.softmax((logits / params.temperature).masked_fill(logits < ordered[:, :1], -torch.inf), -1)
        limit, stride = top_p * p.sum(-1, keepdim=True), 0x9E3779B97F4A7C15 - 2**64
        off, left, edge = torch.zeros_like(p), p, 0.02  # near the edge the rounding of float32 decides
        keys_of = torch.tensor(keys, dtype=torch.int64)
        searching = ~unclear
        while bool(searching.any()):
            target = distribution.uniforms(keys_of)[:, None]
            upper = left.cumsum(-1) / left.sum(-1, keepdim=True)
            lower = upper - left / left.sum(-1, keepdim=True)
            distance = torch.maximum(lower - target, target - upper).clamp(min=0)
            off = torch.where(searching, distance, off)
            if top_p >= 1:
                break
            drawn, ids = distance.argmin(-1, keepdim=True), torch.arange(self.V)
            score = logits.gather(1, drawn)
            near = (distance < CLOSE * 2) | ((logits - score).abs() < CLOSE)
            left = left.masked_fill((logits < score) | ((logits == score) & (ids >= drawn)), 0)
            before = left.sum(-1, keepdim=True)
            at_edge = ((before - limit).abs() < edge) & (before > 0)
            unclear = unclear | (searching & (at_edge | (near.sum(-1, keepdim=True) > 1)))
            searching = searching & ~unclear & (before > 0) & (before >= limit)
            keys_of = keys_of + stride
        return -torch.where(unclear, 0.0, off)

    def finish(self) -> None:
        """To the end, or closed before it; then nothing is left."""
        if self.rng.random() < 0.25:
            self.finish_closed()
        else:
            left = 20_000
            while self.loop.has_work:
                self.step()
                left -= 1
                assert left, f"no end: {[i for i, sent in self.sent.items() if sent.ended is None]}"
            self.read_streams()
        self.assert_empty()

    def finish_closed(self) -> None:
        loop, self.handlers = self.loop, 0.0
        requests = [request for request in loop._inbox._requests.values() if request.finish_reason is None]
        for stream in self.streams:
            stream.close()
        for sent in self.sent.values():
            sent.aborted = True
        try:
            if self.rng.random() < 0.5:
                self.interruptible(self.step, handler=loop.close)
            self.interruptible(loop.close)
        except KeyboardInterrupt:
            self.case.counts["interrupted close()"] += 1
            loop.close()
        assert not any(request in self.cache for request in requests), "a closed loop holds blocks"
        while loop.has_work:
            for new in loop.step():
                if self.sent[new.request_id].ended is None:
                    self.deliver(new)
        try:
            loop.submit([0], SamplingParams(max_new_tokens=1))
        except ValueError:
            pass
        else:
            raise AssertionError("a closed loop takes a request")

    def read_streams(self) -> None:
        """When no request is left."""
        for stream in self.streams:
            for new in stream:
                self.deliver(new)
        for request_id, sent in self.sent.items():
            assert sent.ended is not None, f"request {request_id} never ended"

    def assert_empty(self) -> None:
        assert self.cache.num_used_blocks == 0, f"{self.cache.num_used_blocks} blocks are not given back"
        assert self.cache.stats().host_used_blocks == 0, "host blocks are not given back"


def interrupt() -> None:
    raise KeyboardInterrupt


def struck(function: Callable[[], Any], most: int, rng: Any, strike: Callable[[], Any], times: int = 1) -> Any:
    """Run the call, with ``strike`` after a number of lines of the package, repeated soon after a number of times.

    Functions that deliver tokens undo the delivery when interrupted, so they are interrupted once."""
    left, most_times = rng.randint(1, most), times

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left, times
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line" and left > 0:
            left -= 1
            if left == 0:
                struck_before, times = times < most_times, times - 1
                if times:
                    left = rng.randint(1, 60)
                elif strike is not interrupt:
                    sys.settrace(None)
                    frame.f_trace = None
                if not (struck_before and frame.f_code.co_name in ("step", "__next__")):
                    strike()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)
