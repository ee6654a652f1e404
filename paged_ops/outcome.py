"""What a step of a generation loop is to change, decided before anything is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_ops.cache import KVCache
from paged_ops.hybrid import HybridCache
from paged_ops.request import NewToken, Request
from paged_ops.sampling import Choices, TokenLogprobs
from paged_ops.scheduling import Scheduled, Scheduler


@dataclass
class Outcome:
    """What a step changes, or an abort. Each change can be made twice, so that an interrupted one is made again."""

    commits: list[Scheduled] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    # with the position and the log-probabilities
    tokens: list[tuple[Request, int, int, TokenLogprobs | None]] = field(default_factory=list)
    starts: list[tuple[Request, tuple[Request, ...]]] = field(default_factory=list)  # that wait from now on
    ends: list[tuple[Request, str, str | None]] = field(default_factory=list)  # with the reason, and that of an error
    events: list[tuple[deque[NewToken], NewToken]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request without a token."""
        self.ends.append((request, reason, error))
        self.events.append((request.events, NewToken(request.request_id, None, reason, error)))

    def add_samples(self, rows: list[int], requests: list[Request], num_free: int) -> None:
        """Further samples of prompts that are through: they choose from the same rows, as many as can run; the others
        wait, and find the prompt in the cache."""
        for row, request in list(zip(rows, requests, strict=True)):
            others = [other for other in request.others if other.finish_reason is None]
            running, waiting = others[:num_free], others[num_free:]
            self.forks += [(request, other) for other in running]
            self.starts += [(other, ()) for other in waiting]
            rows += [row] * len(running)
            requests += running
            num_free -= len(running)

    def take(self, requests: Sequence[Request], choices: Choices) -> None:
        """The tokens that were chosen for ``requests``, and the ends that they bring."""
        for i, (request, token) in enumerate(zip(requests, choices.tokens, strict=True)):
            if token < 0:
                self.end(request, "error", "the logits hold NaN or inf, or leave no token to choose")
                continue
            reason = request.finish_reason_with(token, i in choices.stops)
            logprobs = choices.logprobs.get(i)
            self.tokens.append((request, len(request.tokens), token, logprobs))
            self.events.append((request.events, NewToken(request.request_id, token, reason, None, logprobs)))
            if reason is not None:
                self.ends.append((request, reason, None))
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
    for parent, child in outcome.forks:
        scheduler.fork(parent, child)
    for request, position, token, logprobs in outcome.tokens:
        if again:
            del request.tokens[position:], request.logprobs[position - request.num_prompt :]
        request.tokens.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        request.others = ()
    for request, others in [*outcome.starts, *((child, ()) for _, child in outcome.forks)]:
        request.others = others
        if again:
            scheduler.unfinished[request] = None
        else:
            scheduler.join(request)
    for request, reason, error in outcome.ends:
        request.finish_reason, request.error = reason, error
        if request in cache:
            cache.free(request)
        scheduler.unfinished.pop(request, None)
        if not again:
            scheduler.leave(request)
    if again:
        scheduler.relist()
    for events, new in outcome.events:
        if not (again and any(each is new for each in events)):
            events.append(new)


def rows_of(requests: Sequence[Scheduled]) -> tuple[list[int], list[Request]]:
    """For which requests of a step a token is chosen, and from which rows of its logits."""
    rows: list[int] = []
    through: list[Request] = []
    for row, (request, start, num_tokens) in enumerate(requests):
        if start + num_tokens == len(request.tokens):  # else its prompt is not through: there is no token to choose
            rows.append(row)
            through.append(request)
    return rows, through
