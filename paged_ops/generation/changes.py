"""The changes of a step of a generation loop. All are decided before the first is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.generation.params import TokenLogprobs
from paged_ops.generation.request import NewToken, Request
from paged_ops.generation.sampling import Choices, Chosen
from paged_ops.generation.scheduler import Scheduled, ScheduledStep, Scheduler

NO_STEP = ScheduledStep([], 0, 0, False)
NO_CHOICES = Choices([], set(), {})


@dataclass(eq=False)
class Launched:
    """A step whose work was issued to the device."""

    step: ScheduledStep = NO_STEP
    sampled: list[Request] = field(default_factory=list)  # a token is chosen for each
    choices: Chosen | Choices = NO_CHOICES
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    starts: list[tuple[Request, tuple[Request, ...]]] = field(default_factory=list)  # samples that wait from then on
    num_used_blocks: int = 0
    is_overlapped: bool = False

    @property
    def unread(self) -> Chosen | None:
        """Its tokens, if the host may not know them yet."""
        return self.choices if isinstance(self.choices, Chosen) else None

    @property
    def is_live(self) -> bool:
        """Whether a request of the step goes on."""
        return any(request.finish_reason is None for request, _, _ in self.step.requests)

    def add_samples(self, rows: list[int], num_free: int) -> None:
        """Adds the further samples of prompts that are computed. The first ``num_free`` choose from the same rows; the
        others wait, and find the prompt in the cache."""
        for row, request in list(zip(rows, self.sampled, strict=True)):
            others = [other for other in request.others if other.finish_reason is None]
            running, waiting = others[:num_free], others[num_free:]
            self.forks += [(request, other) for other in running]
            self.starts += [(other, ()) for other in waiting]
            rows += [row] * len(running)
            self.sampled += running
            num_free -= len(running)


@dataclass
class StepChanges:
    """The changes of a step, or of aborts. Each can be made twice, so interrupted changes are made again."""

    finished: Launched | None = None  # the step whose tokens these are
    launched: Launched | None = None  # the step that runs from now on
    commits: list[Scheduled] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    # with the position and the log-probabilities
    tokens: list[tuple[Request, int, int, TokenLogprobs | None]] = field(default_factory=list)
    # for a chunk of a prompt: its first position with a log-probability, and the log-probabilities
    prompt_logprobs: list[tuple[Request, int, Sequence[TokenLogprobs]]] = field(default_factory=list)
    starts: list[tuple[Request, tuple[Request, ...]]] = field(default_factory=list)  # samples that wait from now on
    ends: list[tuple[Request, str, str | None]] = field(default_factory=list)  # finish_reason, and the error's text
    # Each is an iterator over one event. extend() takes the event from it and adds it in one go, so it is added once,
    # even if another thread has delivered it before interrupted changes are made again.
    events: list[tuple[deque[NewToken], Iterator[NewToken]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request without a token."""
        self.ends.append((request, reason, error))
        self.emit(request, NewToken(request.request_id, None, reason, error))

    def abort(self, requests: Set[Request]) -> None:
        """Ends the requests that have not ended."""
        for request in sorted(requests, key=lambda request: request.request_id):
            if request.finish_reason is None:
                self.end(request, "abort")
                others = [other for other in request.others if other.finish_reason is None and other not in requests]
                if others:  # the first of them now computes the prompt
                    self.starts.append((others[0], tuple(others[1:])))

    def emit(self, request: Request, new: NewToken) -> None:
        """Adds an event."""
        self.events.append((request.events, iter((new,))))

    def add_choices(self, step: Launched, choices: Choices) -> None:
        """Adds the chosen tokens, and the ends of requests that follow from them."""
        for i, (request, token) in enumerate(zip(step.sampled, choices.tokens, strict=True)):
            if request.finish_reason is not None:  # since the step was launched
                continue
            if token < 0:
                self.end(request, "error", "the logits hold NaN or inf, or leave no token to choose")
                continue
            reason = request.finish_reason_with(token, i in choices.stops)
            logprobs = choices.logprobs.get(i)
            self.tokens.append((request, len(request.tokens), token, logprobs))
            self.emit(request, NewToken(request.request_id, token, reason, None, logprobs))
            if reason is not None:
                self.ends.append((request, reason, None))
        at = 0
        for request, start, count in chunks_with_logprobs(step.step.requests):
            self.prompt_logprobs.append((request, start + 1, choices.of_prompts[at : at + count]))
            at += count
        self.starts += step.starts
        if step.forks:
            ended = self.ended
            self.forks = [(parent, child) for parent, child in step.forks if child not in ended]

    @property
    def ended(self) -> set[Request]:
        return {request for request, _, _ in self.ends}

    def follow(self, launched: Launched | None) -> None:
        """Adds the step that was launched meanwhile. For requests that end here it has run in vain."""
        if launched is not None and not self.ended.issuperset(request for request, _, _ in launched.step.requests):
            self.launched = launched


def apply_changes(changes: StepChanges, cache: KVCache | HybridCache, scheduler: Scheduler, again: bool) -> None:
    """Makes the changes in requests and cache; ``again`` when any part of them may be made already."""
    if again:
        cache.recover()
    for scheduled in changes.commits:
        _commit(scheduled, cache, again)
    for parent, child in changes.forks:
        scheduler.fork(parent, child)
    for request, position, found in changes.prompt_logprobs:
        assert request.prompt_logprobs is not None
        request.prompt_logprobs[position : position + len(found)] = found
    for request, position, token, logprobs in changes.tokens:
        request.tokens[position:] = [token]
        request.num_unread = 0
        if logprobs is not None:
            request.logprobs[position - request.num_prompt :] = [logprobs]
        request.others = ()
        if request.num_cached_tokens < 0:  # it begins where another sample has computed the prompt
            request.num_cached_tokens = request.num_prompt
    for request, others in [*changes.starts, *((child, ()) for _, child in changes.forks)]:
        request.others = others
        if again:
            scheduler.add(request)
        else:
            scheduler.join(request)
    if changes.launched is not None:
        ended = changes.ended
        for scheduled in changes.launched.step.requests:
            if scheduled[0] not in ended:
                _commit(scheduled, cache, again, has_new_tokens=True)
        for request in changes.launched.sampled:
            request.num_unread = 1
    for request, reason, error in changes.ends:
        request.end(reason, error)
        if request in cache:
            cache.free(request)
        scheduler.discard(request)
        if not again:
            scheduler.leave(request)
    if again:
        scheduler.rebuild_lists()
    for events, new in changes.events:
        events.extend(new)


def _commit(scheduled: Scheduled, cache: KVCache | HybridCache, again: bool, has_new_tokens: bool = False) -> None:
    """Commits what a step computes of a request; ``has_new_tokens`` if the host has learned its tokens since."""
    request, start, num_tokens = scheduled
    if again and request not in cache:
        return
    end = start + num_tokens
    left = end - cache.num_computed_tokens(request) if again else num_tokens
    cache.commit(request, left, request.tokens[end - left : end] if has_new_tokens else None)
    if request.num_cached_tokens < 0:
        request.num_cached_tokens = min(start, request.num_prompt)


def rows_of(requests: Sequence[Scheduled]) -> tuple[list[int], list[Request]]:
    """The rows of the logits from which a token is chosen, and the requests that they belong to."""
    rows: list[int] = []
    sampled: list[Request] = []
    for row, (request, start, num_tokens) in enumerate(requests):
        if start + num_tokens == request.length:  # else the step computes a chunk of its prompt
            rows.append(row)
            sampled.append(request)
    return rows, sampled


def chunks_with_logprobs(requests: Sequence[Scheduled]) -> list[tuple[Request, int, int]]:
    """The chunks of prompts in a step whose next tokens' log-probabilities are asked for: the request, the first
    position, and the number of positions. The last token of a prompt has no next one."""
    chunks = []
    for request, start, num_tokens in requests:
        if request.settings.prompt_logprobs is None:
            continue
        stop = min(start + num_tokens, request.num_prompt - 1)
        if start < stop:
            chunks.append((request, start, stop - start))
    return chunks


def prompt_rows(requests: Sequence[Scheduled]) -> tuple[list[int], list[int], list[int]]:
    """For each position of these chunks: its row in the step's tokens, the next token, and the number of likeliest
    tokens that are asked for."""
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    row_of = {}
    num_rows = 0
    for request, start, num_tokens in requests:
        row_of[request] = num_rows - start
        num_rows += num_tokens
    for request, start, count in chunks_with_logprobs(requests):
        rows += range(row_of[request] + start, row_of[request] + start + count)
        tokens += request.tokens[start + 1 : start + 1 + count]
        counts += [request.settings.prompt_logprobs or 0] * count
    return rows, tokens, counts
