"""Generation with continuous batching over a paged cache, for any model that can run one ragged step.

Sequences join and leave the batch at every step. A step has a budget of tokens: each decoding sequence takes one,
prompts take the rest in chunks. Full blocks of equal prefixes are shared; when blocks run out, the youngest sequence is
swapped to the host cache, or, without room there, freed and computed again.

A step happens whole or not at all. All that can fail comes first: slots are reserved, the model runs, tokens are
chosen. The changes that follow from it are recorded as one ``Outcome``, and then made. An exception before that gives
the reserved slots back. An exception after it, which can only be an interrupt, leaves the rest to the next call.

Cache and scheduler change only within a turn (``Turns``), so in one thread at a time. What other threads, signal
handlers and finalizers ask for meanwhile is noted in ``_arrivals`` and ``_aborting``.

Sources of the ideas: iteration-level scheduling of Orca (Yu et al., OSDI 2022), preemption of PagedAttention (Kwon et
al. 2023, arXiv:2309.06180), chunked prefill of Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310), the redo log of
ARIES (Mohan et al., TODS 1992).

Longer than 500 lines: one class, whose calls all leave one state whole.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import expect
from paged_ops.generation.commit import Outcome, apply, prompt_rows, rows_of
from paged_ops.generation.model_step import ModelStep, WeightsVersion, compile_step, expect_step
from paged_ops.generation.request import (
    GenerationStats,
    NewToken,
    Output,
    Request,
    RequestMaker,
    TokenStream,
    expect_params,
    read_prompts,
    refuse_padding,
)
from paged_ops.generation.sampling import (
    Choices,
    LogitsProcessor,
    SamplingParams,
    StoppingCriterion,
    choose,
    functions,
    logprobs_of,
)
from paged_ops.generation.scheduler import Plan, Scheduler, give_back
from paged_ops.generation.settings import Defaults
from paged_ops.generation.team import FOLLOW, Submission, Team
from paged_ops.graphs import DecodeGraphs, GraphMode, GraphStats, capture_sizes

KEPT_OUTPUTS = 1024  # finished requests whose output can still be asked for
WARM_UP_LIMIT = 1800.0  # seconds for which ranks wait for each other's compilation


class GenerationLoop:
    """Continuous batching: ``submit`` requests, then ``step`` (or ``run``) until none is left; or ``generate``.

    A step happens whole or not at all, whatever is raised in it, Ctrl-C included: the next step then gives the same
    tokens. Any thread may call any method. The steps of all loops on one cache run one after the other. The model, a
    processor or a signal handler may call ``submit``, ``abort``, ``output`` and ``close`` within a step. As a context
    manager the loop is closed at the end.

    Args:
        step: the model.
        kv_cache: the cache that the step writes. It may also hold sequences of others, who must not change it while a
            step runs. The loop's sequences are freed when they finish, when the loop is closed, and when it is garbage
            collected.
        max_num_seqs: most sequences of a step.
        max_num_tokens: the token budget of a step, at least max_num_seqs.
        max_model_len: longest sequence, prompt and output; by default the step's ``max_model_len``, at most what the
            cache can hold.
        compile: run the step through ``torch.compile(fullgraph=True)``. The sizes T and S are dynamic, so one graph
            serves every batch; it is compiled by :meth:`warm_up`, or else in the first step. If the cache has states,
            only decodes are compiled, and steps with parts of prompts run eagerly.
        graph_mode: which batches are captured in CUDA graphs, also by :meth:`warm_up`.
        logits_processor, stopping_criteria: as in :class:`SamplingParams`, for all requests, before their own.
        generation_config: what holds for requests that do not say otherwise, in place of the model's own generation
            config: a mapping of its fields, or transformers' ``GenerationConfig``. Fields that it leaves out are the
            model's. Both are read when the loop is made.
        tokenizer: the model's, for ``stop_strings``.
        seed: makes the seeds of requests that have none; with None these differ from loop to loop.
        group: the ``torch.distributed`` group of ranks that run the step together, each with a loop of its own; by
            default the step's ``process_group``. See :mod:`paged_ops.parallel` for what they must call.
        rank_time_limit: seconds after which a missing rank is named in an error on all others.

    Raises:
        ValueError: a size is not positive, the budget is smaller than max_num_seqs, max_model_len is larger than the
            step's, the model is not wrapped, or the generation config has a field that cannot be served.
        RankError: the loops of the ranks differ, or a rank is gone or late.
    """

    def __init__(
        self,
        step: ModelStep,
        kv_cache: KVCache | HybridCache,
        *,
        max_num_seqs: int = 32,
        max_num_tokens: int = 512,
        max_model_len: int | None = None,
        compile: bool = False,
        graph_mode: GraphMode | str = GraphMode.NONE,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        seed: int | None = None,
        group: Any = None,
        rank_time_limit: float = 60.0,
    ) -> None:
        expect_step(step)
        needed = "a KVCache or HybridCache, as PagedCausalLM.allocate_kv_cache makes"
        expect(hasattr(kv_cache, "layers"), "kv_cache", needed, kv_cache)
        expect(kv_cache.num_blocks >= 1, "num_blocks", "at least 1 in the cache", kv_cache.num_blocks)
        ahead = getattr(step, "prompts_see_ahead", False)
        expect(not ahead, "step", "a model of causal prompts (docs/models.md has steps for others)", "prefixes")
        check_kv_cache = getattr(step, "check_kv_cache", None)
        if check_kv_cache is not None:
            check_kv_cache(kv_cache)
        limit = getattr(step, "max_model_len", None)
        if max_model_len is None:
            max_model_len = min(kv_cache.max_seq_len, limit or kv_cache.num_blocks * kv_cache.block_size)
        expect(max_num_seqs >= 1, "max_num_seqs", "at least 1", max_num_seqs)
        expect(max_model_len >= 1, "max_model_len", "at least 1", max_model_len)
        expect(limit is None or max_model_len <= limit, "max_model_len", f"at most the model's {limit}", max_model_len)
        expect(
            max_num_tokens >= max_num_seqs, "max_num_tokens", f"at least max_num_seqs = {max_num_seqs}", max_num_tokens
        )
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.vocab_size: int | None = getattr(step, "vocab_size", None)
        self.stats = GenerationStats()
        self._pad_token_id: int | None = getattr(step, "pad_token_id", None)
        defaults = Defaults(
            getattr(step, "generation_fields", None),
            generation_config,
            tuple(getattr(step, "stop_token_ids", None) or ()),
            tokenizer,
            functions("logits_processor", logits_processor),
            functions("stopping_criteria", stopping_criteria),
            min(max_model_len, kv_cache.max_seq_len),
        )
        self.stop_token_ids: tuple[int, ...] = defaults.stop_token_ids
        self._maker = RequestMaker(defaults, self.vocab_size, seed)
        self._weights_version: Callable[[], Hashable] = getattr(step, "weights_version", lambda: None)
        self._version: Hashable = None  # of the weights that compute the unfinished requests
        self._captured_place: Hashable = None  # where the weights were that the captured graphs read
        self._eager_step = step
        self._runner = DecodeGraphs(
            compile_step(step, kv_cache.states is not None) if compile else step,
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            mode=graph_mode,
            # a step of one sequence would be compiled a second time
            seq_sizes=[size for size in capture_sizes(max_num_seqs) if size > 1] or None,
        )
        self._is_warm = not compile and self._runner.mode is GraphMode.NONE
        self._scheduler = Scheduler(kv_cache, max_num_seqs, max_num_tokens, max_model_len, self.stats)
        self._turns = kv_cache.turns
        self._events: deque[NewToken] = deque()  # events of submitted requests that are not yet delivered
        self._arrivals: deque[list[Request]] = deque()  # which the scheduler does not know yet
        self._requests: dict[int, Request] = {}  # the unfinished ones, and the last that finished
        self._finished: deque[int] = deque()
        self._closed = False
        self._aborting: set[Request] = set()
        self._is_open = False  # whether a step has begun whose changes are not decided
        self._outcome: Outcome | None = None  # the changes that are decided, and not yet all made
        self._team = Team.of(self, step, group, rank_time_limit)
        clean_up = functools.partial(give_back, kv_cache, self._scheduler.unfinished)
        weakref.finalize(self, kv_cache.turns.change, clean_up, waits=False).atexit = False

    # Requests

    def submit(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> int:
        """Queue a prompt; returns the request's id, counted from 0.

        Args:
            prompt: token ids: a list, a tensor ``[n]`` or ``[1, n]``, or what a tokenizer returns for one text.
            params: how to continue it; by default as ``model.generate(prompt)`` does. Samples of ``n`` above 1 have
                consecutive ids, of which the first is returned.
            extra_key: requests with different keys never share computed prefixes (an adapter's name, a digest of an
                image).

        Raises:
            ValueError: the prompt is text or empty, holds an id that is not in the vocabulary, or can exceed, with its
                output, max_model_len or the whole cache; weights or adapters have changed while requests are
                unfinished; or the loop is closed. Nothing is queued then.
        """
        requests = self._make([("prompt", prompt)], [params], extra_key, self._events)
        self._queue(requests)
        return requests[0].request_id

    def abort(self, request_id: int) -> bool:
        """End a request, waiting, running or swapped out, at any time; its blocks are free at once, or, within a step,
        after it, or, among several ranks, with the next step. Its last :class:`NewToken` says "abort". False if it had
        ended already.

        Waits for the step that another thread runs.

        Raises:
            ValueError: no request ever had this id.
        """
        request = self._request(request_id)
        goes_on = request is not None and request.finish_reason is None
        self._drop([request] if request is not None else [])
        return goes_on

    def output(self, request_id: int) -> Output:
        """The tokens of a request so far, with its finish_reason, error and logprobs. The outputs of the last 1024
        finished requests are kept.

        Raises:
            ValueError: no request ever had this id, or its output is no longer kept.
        """
        request = self._request(request_id)
        if request is None:
            raise ValueError(f"request_id: expected one of the last {KEPT_OUTPUTS} that finished, got {request_id}")
        return request.output()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has tokens that ``step`` has not yet returned."""
        return bool(self._scheduler.unfinished or self._arrivals or self._events)

    def step(self) -> list[NewToken]:
        """Schedules and runs one step. Returns the tokens that it produced: none for prompts that are not yet computed.

        Tokens that an earlier call left, and the ends of aborted requests, are returned first, without a step.

        Raises:
            OutOfBlocks: no request can run, because others hold the cache's blocks. Free some, or abort a request.
            Exception: whatever the model, a processor or a criterion raises. The step has not happened then.
        """
        events, new = self._events, list[NewToken]()

        def take() -> None:
            self._next(events)
            new.extend(events)
            events.clear()

        try:
            self._turns.run(take)
            return new
        except BaseException:  # an interrupt: the caller did not get them
            if new and not (events and events[0] is new[0]):
                events.extendleft(reversed(new))
            raise

    def run(self, on_token: Callable[[NewToken], None] | None = None) -> dict[int, Output]:
        """Runs steps until no request is left; returns the new tokens by request id. ``on_token`` is called with each
        token."""
        outputs: dict[int, Output] = {}
        while self.has_work:
            events = deque(self.step())
            try:
                while events:
                    new = events.popleft()
                    outputs.setdefault(new.request_id, Output()).take(new)
                    if on_token is not None:
                        with self._shared_errors():
                            on_token(new)
            finally:
                self._events.extendleft(reversed(events))  # those that on_token has not seen
        return outputs

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[NewToken], None] | None = None,
        *,
        extra_key: Hashable = None,
    ) -> list[Output]:
        """Generates the continuations of prompts, in the order of the prompts.

        All prompts are checked before any is queued. Whatever is raised, none of them stays queued. Requests that were
        submitted before run at the same time; their tokens are kept for :meth:`step` and :meth:`run`.

        Args:
            prompts: a list of what :meth:`submit` takes, a tensor ``[S, n]``, or what a tokenizer returns for several
                texts; if there is an ``attention_mask``, padding is removed.
            params: one for all prompts, or one for each.
            on_token: called with each new token, and with the ends of requests that have no token.
            extra_key: as in :meth:`submit`.

        Returns:
            An :class:`Output` for each sample: ``n`` of them in a row for each prompt. A request that fails, or that
            ``on_token`` aborts, has its tokens up to then; its ``finish_reason`` and ``error`` say so.
        """
        has_mask = isinstance(prompts, Mapping) and prompts.get("attention_mask") is not None
        prompts = read_prompts(prompts)
        if params is not None and not isinstance(params, Sequence):
            expect_params(params)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        expect(len(each) == len(prompts), "params", f"one for each of the {len(prompts)} prompts", len(each))
        events: deque[NewToken] = deque()
        named = [(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        requests = self._make(named, each, extra_key, events)
        if not has_mask:
            refuse_padding([request.tokens for request in requests], self._pad_token_id)
        every = [sample for request in requests for sample in (request, *request.others)]
        try:
            self._queue(requests)
            with contextlib.nullcontext() if on_token or not self._team else self._team.calling_only_steps():
                while self._fill(every, events):
                    while events:
                        new = events.popleft()
                        if on_token is not None:
                            with self._shared_errors():
                                on_token(new)
        finally:
            self._drop(every)
        return [request.output() for request in every]

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> TokenStream:
        """Queue a prompt and iterate over its tokens; see :class:`TokenStream` and :meth:`submit`."""
        events: deque[NewToken] = deque()
        requests = self._make([("prompt", prompt)], [params], extra_key, events)
        stream = TokenStream((requests[0], *requests[0].others), events, self._fill, self._drop)
        self._queue(requests)
        return stream

    def follow(self) -> None:
        """Takes part in all that rank 0 does with its loop, until that loop is closed. For the other ranks, if only
        rank 0 has the requests.

        Raises:
            ValueError: on rank 0, or without a group.
            RankError: the ranks cannot go on.
        """
        may = self._team is not None and not self._team.leads
        expect(may, "follow", "a rank other than 0 of a group", "rank 0, or no group")
        assert self._team is not None
        while not self._closed:
            try:
                self._turns.run(functools.partial(self._advance, FOLLOW))
            except Exception:  # rank 0 has it too, and decides what to do
                if self._team.lost:
                    raise
            self._events.clear()

    def close(self) -> None:
        """Aborts all requests and gives their blocks back; the loop then takes no more requests. Within a step, it does
        so after the step. If it is interrupted, call it again. Of several ranks, all close."""
        self._turns.change(self._leave)

    def _leave(self) -> None:
        if self._team is not None and not self._closed:
            self._team.leave()
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._settle()

    def __enter__(self) -> GenerationLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def reset(self) -> None:
        """Forgets all computed prefixes: call it when the model's weights have changed in a way that
        ``weights_version`` of the step does not show (writes through ``.data``).

        Raises:
            ValueError: requests are unfinished, or others have sequences in the cache. Finish or abort them first, as
                they would go on with keys and values of the old weights.
        """
        self._turns.run(functools.partial(self._all, "reset", self._reset))

    def _all(self, name: str, call: Callable[[], None]) -> None:
        """What all ranks call."""
        if self._team is not None:
            self._team.meet(name)
        call()

    def _reset(self) -> None:
        self._settle()
        left = len(self._scheduler.unfinished)
        expect(not left, "reset", "no unfinished request (finish or abort them first)", left)
        self.kv_cache.reset()
        self._version = None

    @property
    def graph_mode(self) -> GraphMode:
        return self._runner.mode

    @property
    def graph_stats(self) -> GraphStats:
        """Counts of the steps that were replayed from CUDA graphs, by size, and of their padding."""
        return self._runner.stats

    def warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Compiles the graph that all batches use, by a step that is only padding, and captures graphs if there is a
        mode.

        The cache is not touched. ``on_capture`` is called with (sizes captured, sizes in all).
        """
        self._turns.run(functools.partial(self._all, "warm_up", functools.partial(self._warm_up, on_capture)))

    def _warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        run = functools.partial(self._run_first, on_capture)
        if self._team is None:
            run()
        else:
            self._team.agree(run, WARM_UP_LIMIT)
        self._is_warm = True

    @torch.no_grad()
    def _run_first(self, on_capture: Callable[[int, int], None] | None) -> None:
        self._runner.compile_ahead(wait=False)
        # Eagerly first, so that the model's errors are not wrapped in the compiler's. In the loop's sizes, as compiled
        # layers would be compiled again for another width of the block tables.
        first = DecodeGraphs(
            self._eager_step,
            self.kv_cache,
            max_num_seqs=1,
            max_model_len=self.max_model_len,
            mode=GraphMode.NONE,
        )
        first.capture()
        place = _place(self._weights_version())
        self._runner.capture(None if on_capture is None else lambda done, total, _: on_capture(done, total))
        self._captured_place = place

    def _make(
        self,
        prompts: Sequence[tuple[str, Any]],
        params: Sequence[SamplingParams | None],
        extra_key: Hashable,
        events: deque[NewToken],
    ) -> list[Request]:
        expect(not self._closed, "loop", "one that is open", "a closed one")
        return self._maker.make(prompts, params, extra_key, self._note_weights(), events)

    def _queue(self, requests: list[Request]) -> None:
        """Queues all of them, or none, for the next step."""
        self._arrivals.append(requests)
        self._register(requests)

    def _register(self, requests: list[Request]) -> None:
        self._requests.update({each.request_id: each for first in requests for each in (first, *first.others)})

    def take_in(self) -> None:
        """Gives the requests that arrived to the scheduler, and to the team."""
        within, self._is_open = self._is_open, True
        while self._arrivals:
            requests = self._arrivals[0]
            self._register(requests)  # unless an interrupt came between
            if self._team is not None:
                self._team.submitted += [each for each in requests if each not in self._team.submitted]
            self._scheduler.queue(requests)
            self._arrivals.popleft()
        self._is_open = within

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def _note_weights(self) -> Hashable:
        """Notes the weights that will compute new requests: those of the unfinished ones, if there are any.

        Returns their version if it must be a part of the prefixes' keys: the cache's keys without one are of others.
        """
        version = self._weights_version()
        if version != self._version:
            self._expect_weights(not (self._scheduler.unfinished or self._arrivals))
            self._version = version
        cache = self.kv_cache
        if cache.weights_version is None:
            cache.weights_version = version
        return None if version == cache.weights_version else version

    def _check_weights(self) -> None:
        """Expects the weights that were noted, and lets captured graphs read them."""
        version = self._weights_version()
        self._expect_weights(self._version in (None, version))  # None: reset after they were noted
        self._version = version
        # Not whether there are graphs now: an interrupted capture leaves some, or none.
        if self._runner.mode is not GraphMode.NONE and self._captured_place != _place(version):
            self._run_first(None)

    @staticmethod
    def _expect_weights(same: bool) -> None:
        kept = "weights and active adapters that stay while requests are unfinished (finish or abort them first)"
        expect(same, "model", kept, "changed ones")

    def adopt(self, submissions: Sequence[Submission]) -> None:
        """Queues what rank 0 submitted."""
        version = self._note_weights()
        for each in submissions:
            sent = each.request_id, list(each.tokens), each.settings, each.extra_key
            self._queue([self._maker.add(*sent, version, self._events)])
        self.take_in()

    def abort_together(self, request_ids: Iterable[int]) -> None:
        """Aborts what any rank aborted, as all ranks know now."""
        self._aborting.update(self._requests[each] for each in request_ids if each in self._requests)

    def _request(self, request_id: int) -> Request | None:
        """The request with that id, or None if it is no longer kept."""
        request = self._requests.get(request_id)
        num_given = self._maker.next_id
        known = request is not None or 0 <= request_id < num_given
        expect(known, "request_id", f"one of {num_given} that were given", request_id)
        return request

    def _drop(self, requests: Iterable[Request], waits: bool = True) -> None:
        """Aborts the unfinished ones: now, after the step that is running, or when all ranks know."""
        where = self._aborting if self._team is None else self._team.aborted
        where.update(request for request in requests if request.finish_reason is None)
        if self._team is None:
            self._turns.change(self._settle, waits=waits)

    def _shared_errors(self) -> contextlib.AbstractContextManager[None]:
        """An exception inside it, between steps, is raised on all ranks."""
        return contextlib.nullcontext() if self._team is None else self._team.shared_errors()

    # A step

    def _fill(self, requests: Iterable[Request], events: deque[NewToken]) -> bool:
        """Runs a step if nothing is left to deliver and one of the requests goes on. False if all is delivered."""
        return bool(events) or self._turns.run(functools.partial(self._next, events, requests))

    def _next(self, events: deque[NewToken], requests: Iterable[Request] | None = None) -> bool:
        def go_on() -> bool:
            return requests is None or any(request.finish_reason is None for request in requests)

        if self._outcome is not None:  # of an interrupted call
            self._settle()
        if not events and go_on():
            self._advance()
        return bool(events) or go_on()

    def _advance(self, call: str = "step") -> None:
        """Runs one step, if there is work. Its tokens are added to the events of their requests."""
        if self._team is not None and (self._scheduler.unfinished or self._arrivals or call == FOLLOW):
            call = self._team.meet(call)
            if call != "step":
                {"warm_up": self._warm_up, "reset": self._reset, "close": self._close}[call]()
                return
        if not self._is_warm:
            self._warm_up()
        self._settle()
        if not self._scheduler.unfinished:
            return
        started, grad_mode = time.perf_counter(), torch.is_grad_enabled()
        try:
            with torch.no_grad():
                self._is_open = True
                plan, outcome = self._compute()
                self._outcome = outcome  # from here on the step has happened
                self._apply(outcome)
                if plan.has_admitted or outcome.forks:  # only then can there be more shared blocks than before
                    shared = self.kv_cache.stats().shared_blocks
                    self.stats.peak_shared_blocks = max(self.stats.peak_shared_blocks, shared)
        except BaseException:
            torch.set_grad_enabled(grad_mode)  # an interrupt may have skipped the end of the block above
            self._settle()
            raise
        if self._aborting:  # by a function that the step called
            self._settle()
        self.stats.seconds += time.perf_counter() - started

    def _compute(self) -> tuple[Plan, Outcome]:
        """Plans the step, runs the model, chooses tokens, and returns the changes to make. No request has changed
        by then."""
        plan, outcome, requests = Plan([], 0, 0, False), Outcome(), list[Request]()

        def run() -> Choices:
            nonlocal plan, outcome, requests
            self._check_weights()
            plan = self._scheduler.plan()
            if not plan.requests:
                return Choices([], set(), {})
            outcome = Outcome(commits=plan.requests)
            rows, requests = rows_of(plan.requests)
            if any(request.others for request in requests):
                outcome.add_samples(rows, requests, len(self._scheduler.free_rows))
            batch, input_ids = self._scheduler.batch(plan.requests)
            self.kv_cache.flush_copies()
            of_prompts, next_tokens, counts = prompt_rows(plan.requests)
            if of_prompts:
                logits = self._runner.run_with_rows(self._eager_step, batch, input_ids, of_prompts)
            else:
                logits = self._runner.replay(batch, input_ids)
            if self._team is not None:
                self._team.has_run(batch, input_ids)
                if not self._team.leads:
                    return Choices([], set(), {})
            choices = choose(logits[: batch.num_reqs], rows, requests)
            if of_prompts:
                choices = choices._replace(of_prompts=logprobs_of(logits[batch.num_reqs :], next_tokens, counts))
            return choices

        choices = run() if self._team is None else self._team.agree(run)
        if not plan.requests:
            return plan, outcome
        outcome.take(requests, choices)
        stats = self.stats
        outcome.stats = {
            "steps": stats.steps + 1,
            "prompt_tokens": stats.prompt_tokens + plan.prompt_tokens,
            "cached_tokens": stats.cached_tokens + plan.cached_tokens,
            "generated_tokens": stats.generated_tokens + len(outcome.tokens),
            "peak_used_blocks": max(stats.peak_used_blocks, self.kv_cache.num_used_blocks),
        }
        return plan, outcome

    def _apply(self, outcome: Outcome, again: bool = False) -> None:
        """Makes the changes; ``again`` after an interrupt, when a part of them may already be made."""
        apply(outcome, self.kv_cache, self._scheduler, again)
        for request, _, _ in outcome.ends:
            self._finished.append(request.request_id)
            if len(self._finished) > KEPT_OUTPUTS:
                self._requests.pop(self._finished.popleft(), None)
        vars(self.stats).update(outcome.stats)
        self._scheduler.settled()
        self._is_open = False
        self._outcome = None

    def _settle(self) -> None:
        """Finishes what an earlier call left: makes the changes that were decided, drops the others. Then aborts."""
        if self._outcome is not None:
            self._apply(self._outcome, again=True)
        elif self._is_open:
            self._scheduler.give_up()
            self._is_open = False
        if self._team is None or self._closed:
            self.take_in()
        if self._closed:
            every = *self._scheduler.unfinished, *self._requests.values()
            self._aborting.update(request for request in every if request.finish_reason is None)
        if not self._aborting:
            return
        aborting, outcome = self._aborting.copy(), Outcome()
        outcome.abort(aborting)
        self._outcome = outcome
        self._apply(outcome)
        self._aborting -= aborting


def _place(version: Hashable) -> Hashable:
    return version.place if isinstance(version, WeightsVersion) else version
