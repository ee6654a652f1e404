"""The changes of a step of a generation loop, all decided before the first is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.generation.request import NewToken, Request
from paged_ops.generation.sampling import Choices, TokenLogprobs
from paged_ops.generation.scheduler import Scheduled, Scheduler


@dataclass
class Outcome:
    """The changes of a step, or of an abort. Each can be made twice, so an interrupted one is made again."""

    commits: list[Scheduled] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    # with the position and the log-probabilities
    tokens: list[tuple[Request, int, int, TokenLogprobs | None]] = field(default_factory=list)
    # for a part of a prompt: its first position with a log-probability, and those
    prompts: list[tuple[Request, int, Sequence[TokenLogprobs]]] = field(default_factory=list)
    starts: list[tuple[Request, tuple[Request, ...]]] = field(default_factory=list)  # samples that wait from now on
    ends: list[tuple[Request, str, str | None]] = field(default_factory=list)  # finish_reason, and of an error why
    # Each is an iterator of one event, as extend() takes that from it and adds it in one go. So it is added once, also
    # where another thread has delivered it before an interrupted outcome is made again.
    events: list[tuple[deque[NewToken], Iterator[NewToken]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request without a token."""
        self.ends.append((request, reason, error))
        self.say(request, NewToken(request.request_id, None, reason, error))

    def abort(self, requests: Set[Request]) -> None:
        """Ends those of the requests that go on."""
        for request in sorted(requests, key=lambda request: request.request_id):
            if request.finish_reason is None:
                self.end(request, "abort")
                others = [other for other in request.others if other.finish_reason is None and other not in requests]
                if others:  # the first of them now computes the prompt
                    self.starts.append((others[0], tuple(others[1:])))

    def say(self, request: Request, new: NewToken) -> None:
        """Delivers an event."""
        self.events.append((request.events, iter((new,))))

    def add_samples(self, rows: list[int], requests: list[Request], num_free: int) -> None:
        """Further samples of prompts that are computed. As many as can run choose from the same rows; the others wait,
        and find the prompt in the cache."""
        for row, request in list(zip(rows, requests, strict=True)):
            others = [other for other in request.others if other.finish_reason is None]
            running, waiting = others[:num_free], others[num_free:]
            self.forks += [(request, other) for other in running]
            self.starts += [(other, ()) for other in waiting]
            rows += [row] * len(running)
            requests += running
            num_free -= len(running)

    def take(self, requests: Sequence[Request], choices: Choices) -> None:
        """The tokens that were chosen for ``requests``, and the requests that these end."""
        for i, (request, token) in enumerate(zip(requests, choices.tokens, strict=True)):
            if token < 0:
                self.end(request, "error", "the logits hold NaN or inf, or leave no token to choose")
                continue
            reason = request.finish_reason_with(token, i in choices.stops)
            logprobs = choices.logprobs.get(i)
            self.tokens.append((request, len(request.tokens), token, logprobs))
            self.say(request, NewToken(request.request_id, token, reason, None, logprobs))
            if reason is not None:
                self.ends.append((request, reason, None))
        at = 0
        for request, start, count in parts_of_prompts(self.commits):
            self.prompts.append((request, start + 1, choices.of_prompts[at : at + count]))
            at += count
        if self.forks:
            ended = {request for request, _, _ in self.ends}
            self.forks = [(parent, child) for parent, child in self.forks if child not in ended]


def apply(outcome: Outcome, cache: KVCache | HybridCache, scheduler: Scheduler, again: bool) -> None:
    """Makes the changes in requests and cache; ``again`` when any part of them may be made already."""
    if again:
        cache.recover()
    for request, start, num_tokens in outcome.commits:
        if not again:
            cache.commit(request, num_tokens)
        elif request in cache:
            cache.commit(request, start + num_tokens - cache.num_computed_tokens(request))
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(start, request.num_prompt)
    for parent, child in outcome.forks:
        scheduler.fork(parent, child)
    for request, position, found in outcome.prompts:
        assert request.prompt_logprobs is not None
        request.prompt_logprobs[position : position + len(found)] = found
    for request, position, token, logprobs in outcome.tokens:
        request.tokens[position:] = [token]
        if logprobs is not None:
            request.logprobs[position - request.num_prompt :] = [logprobs]
        request.others = ()
        if request.num_cached_tokens < 0:  # it begins where another sample has computed the prompt
            request.num_cached_tokens = request.num_prompt
    for request, others in [*outcome.starts, *((child, ()) for _, child in outcome.forks)]:
        request.others = others
        if again:
            scheduler.unfinished[request] = None
        else:
            scheduler.join(request)
    for request, reason, error in outcome.ends:
        request.end(reason, error)
        if request in cache:
            cache.free(request)
        scheduler.unfinished.pop(request, None)
        if not again:
            scheduler.leave(request)
    if again:
        scheduler.relist()
    for events, new in outcome.events:
        events.extend(new)


def rows_of(requests: Sequence[Scheduled]) -> tuple[list[int], list[Request]]:
    """The requests of a step for which a token is chosen, and their rows of the logits."""
    rows: list[int] = []
    through: list[Request] = []
    for row, (request, start, num_tokens) in enumerate(requests):
        if start + num_tokens == len(request.tokens):  # else a part of its prompt is not yet computed
            rows.append(row)
            through.append(request)
    return rows, through


def parts_of_prompts(requests: Sequence[Scheduled]) -> list[tuple[Request, int, int]]:
    """The parts of prompts in a step whose next tokens' log-probabilities are asked for: the request, the first
    position, and how many. The last token of a prompt has no next one in it."""
    parts = []
    for request, start, num_tokens in requests:
        stop = min(start + num_tokens, request.num_prompt - 1)
        if request.settings.prompt_logprobs is not None and start < stop:
            parts.append((request, start, stop - start))
    return parts


def prompt_rows(requests: Sequence[Scheduled]) -> tuple[list[int], list[int], list[int]]:
    """For each position of these parts: its row in the step's tokens, the next token, and the count of likeliest
    tokens."""
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    row_of = {}
    num_rows = 0
    for request, start, num_tokens in requests:
        row_of[request] = num_rows - start
        num_rows += num_tokens
    for request, start, count in parts_of_prompts(requests):
        rows += range(row_of[request] + start, row_of[request] + start + count)
        tokens += request.tokens[start + 1 : start + 1 + count]
        counts += [request.settings.prompt_logprobs or 0] * count
    return rows, tokens, counts
