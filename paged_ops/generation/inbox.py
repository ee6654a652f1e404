"""Requests and aborts on their way from the callers of a loop to its scheduler."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from paged_ops.checks import expect, is_integer
from paged_ops.generation.params import SamplingParams
from paged_ops.generation.request import NewToken, Output, Request, RequestMaker
from paged_ops.generation.scheduler import Scheduler
from paged_ops.generation.settings import Settings

KEPT_OUTPUTS = 1024  # finished requests whose output can still be read


class Inbox:
    """Makes requests, keeps them by id, and notes new ones and aborts until the next step. Any thread, signal handler
    or finalizer may add to it; only the holder of the cache's lock takes from it.

    Args:
        maker: of the requests.
        scheduler: which gets them.
        version: notes the weights that will compute new requests; returns their version if the keys of cached prefixes
            need it.

    Attributes:
        events: the new tokens of submitted requests that are not yet delivered.
        arrivals: new requests that the scheduler does not know yet.
        aborting: requests that the next step ends.
        is_closed: whether the loop takes no more requests.
        is_shared: whether other ranks have loops with the same requests. Then these two are not empty:
        unsent: requests that the other ranks do not know yet.
        unsent_aborts: requests that end as soon as the other ranks know of it.
    """

    def __init__(self, maker: RequestMaker, scheduler: Scheduler, version: Callable[[bool], Hashable]) -> None:
        self.events: deque[NewToken] = deque()
        self.arrivals: deque[list[Request]] = deque()
        self.aborting: set[Request] = set()
        self.is_shared = self.is_closed = False
        self.unsent: list[Request] = []
        self.unsent_aborts: set[Request] = set()
        self._maker, self._scheduler, self._version = maker, scheduler, version
        self._requests: dict[int, Request] = {}  # the unfinished ones, and the last that finished
        self._finished: deque[int] = deque()

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._scheduler.unfinished or self.arrivals)

    @property
    def is_in_turn(self) -> bool:
        """Whether no step of the scheduler's requests can overlap with the one before."""
        return self._scheduler.is_in_turn

    def make(
        self,
        prompts: Sequence[tuple[str, object]],
        params: Sequence[SamplingParams | None],
        extra_key: Hashable,
        events: deque[NewToken],
    ) -> list[Request]:
        """Requests for named prompts, all of them checked; none is queued."""
        expect(not self.is_closed, "loop", "one that is open", "a closed one")
        return self._maker.make(prompts, params, extra_key, self._version(self.has_requests), events)

    def add(self, requests: list[Request]) -> None:
        """Queues all of the requests, or none, for the next step."""
        self.arrivals.append(requests)
        self._register(requests)

    def adopt(self, prompts: Iterable[tuple[int, Sequence[int], Settings, Hashable]]) -> None:
        """Queues what rank 0 submitted: the first id, tokens, settings and extra key of each prompt."""
        version = self._version(self.has_requests)
        for first_id, tokens, settings, extra_key in prompts:
            self.add([self._maker.add(first_id, list(tokens), settings, extra_key, version, self.events)])
        self.deliver()

    def deliver(self) -> None:
        """Moves the arrivals to the scheduler."""
        while self.arrivals:
            requests = self.arrivals[0]
            self._register(requests)  # unless an interrupt came between
            if self.is_shared:
                self.unsent += [each for each in requests if each not in self.unsent]
            self._scheduler.queue(requests)
            self.arrivals.popleft()

    def abort(self, requests: Iterable[Request]) -> None:
        """Notes the unfinished ones for the next step, or, if other ranks have them too, until all ranks know."""
        noted = self.unsent_aborts if self.is_shared else self.aborting
        noted.update(request for request in requests if request.finish_reason is None)

    def abort_ids(self, request_ids: Iterable[int]) -> None:
        """Notes the aborts that all ranks know of."""
        self.aborting.update(self._requests[each] for each in request_ids if each in self._requests)

    def abort_all(self) -> None:
        """Notes all unfinished requests."""
        every = *self._scheduler.unfinished, *self._requests.values()
        self.aborting.update(request for request in every if request.finish_reason is None)

    def find(self, request_id: int) -> Request | None:
        """The request with that id, or None if it is no longer kept."""
        count = self._maker.next_id
        expect(is_integer(request_id), "request_id", "an id that submit returned", request_id)
        request_id = operator.index(request_id)
        request = self._requests.get(request_id)
        known = request is not None or 0 <= request_id < count
        expect(known, "request_id", f"one of {count} that were given", request_id)
        return request

    def output(self, request_id: int) -> Output:
        """The output of the request with that id, which must still be kept."""
        request = self.find(request_id)
        if request is None:
            raise ValueError(f"request_id: expected one of the last {KEPT_OUTPUTS} that finished, got {request_id}")
        return request.output()

    def finish(self, request: Request) -> None:
        """Keeps a finished request until KEPT_OUTPUTS others have finished."""
        self._finished.append(request.request_id)
        if len(self._finished) > KEPT_OUTPUTS:
            self._requests.pop(self._finished.popleft(), None)

    def _register(self, requests: list[Request]) -> None:
        self._requests.update({each.request_id: each for first in requests for each in (first, *first.others)})
