"""Generation with continuous batching over a paged cache, for any model that can run one ragged step.

Sequences join and leave the batch at every step. A step has a budget of tokens: each decoding sequence takes one,
prompts take the rest in chunks. Full blocks of equal prefixes are shared; when blocks run out, the youngest sequence is
swapped to the host cache, or, without room there, freed and computed again.

A step happens whole or not at all. All that can fail comes first: slots are reserved, the model runs, tokens are
chosen. What is to change by that is written down as one ``_Outcome``, and done. An exception before that, wherever it
comes from, gives the reserved slots back; one after it, which can only be an interrupt, leaves the rest to the next
call.

Sources of the ideas: iteration-level scheduling of Orca (Yu et al., OSDI 2022), preemption of PagedAttention (Kwon et
al. 2023, arXiv:2309.06180), chunked prefill of Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310), the redo log of
ARIES (Mohan et al., TODS 1992).

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary, M columns of a block table, B tokens a block.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_ops.cache import KVCache, OutOfBlocks
from paged_ops.checks import expect
from paged_ops.graphs import DecodeGraphs, GraphMode, GraphStats, capture_sizes
from paged_ops.metadata import AttentionMetadata, Batch
from paged_ops.request import NewToken, Output, Request, read_prompt, read_prompts, refuse_padding
from paged_ops.sampling import (
    LogitsProcessor,
    SamplingParams,
    StoppingCriterion,
    TokenLogprobs,
    choose,
    functions,
)

__all__ = [
    "GenerationLoop",
    "GenerationStats",
    "ModelStep",
    "NewToken",
    "Output",
    "SamplingParams",
    "TokenLogprobs",
    "TokenStream",
]

KEPT_OUTPUTS = 1024  # finished requests whose output can still be asked for


class ModelStep(Protocol):
    """One step of a model: writes keys and values of the new tokens into the caches and returns logits.

    A loop takes more from a step that has these attributes: ``max_model_len``, ``vocab_size`` (ids from there on are
    refused), ``stop_token_ids`` (what ends a text by default) and ``pad_token_id`` (to refuse padded prompts).
    """

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]`` of the rows ``last_rows`` (int64 ``[S]``) of ``input_ids`` (int64 ``[T]``).

        Tensors have the padded sizes T and S and stay where they are from one step to the next of equal sizes, so that
        a step may be compiled or captured. No value may be read on the host.
        """


@dataclass
class GenerationStats:
    """Counts since the loop was made."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, those computed again after a preemption included
    cached_tokens: int = 0  # of prompts, found in the cache
    generated_tokens: int = 0
    seconds: float = 0.0  # within steps
    peak_used_blocks: int = 0
    peak_shared_blocks: int = 0  # owned by more than one sequence at once
    swapped_out: int = 0  # preemptions by swapping
    recomputed: int = 0  # preemptions by freeing

    @property
    def preemptions(self) -> int:
        return self.swapped_out + self.recomputed

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of all steps, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


_Scheduled = tuple[Request, int, int]  # a request, how many of its tokens are computed, how many a step computes


@dataclass
class _Outcome:
    """What a step changes, or an abort. Each change can be made twice, so that an interrupted one is made again."""

    commits: list[_Scheduled] = field(default_factory=list)
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


class GenerationLoop:
    """Continuous batching: ``submit`` requests, then ``step`` (or ``run``) until none is left; or ``generate``.

    A step happens whole or not at all, whatever is raised in it, Ctrl-C included: the next one gives the tokens that
    would have come. Calls must come from one thread at a time. Used as a context manager it is closed at the end.

    Args:
        step: the model.
        kv_cache: the cache that the step writes. Sequences of others may live in it; the loop's are freed when they
            finish, when the loop is closed, and when it is garbage.
        max_num_seqs: most sequences of a step.
        max_num_tokens: the token budget of a step, at least max_num_seqs.
        max_model_len: longest sequence, prompt and output; by default the step's ``max_model_len``, at most what the
            cache can hold.
        compile: run the step through ``torch.compile(fullgraph=True)``. The sizes T and S are dynamic, so one graph
            serves every batch; :meth:`warm_up` compiles it, at the latest in the first step.
        graph_mode: which batches are captured in CUDA graphs, by :meth:`warm_up` too.
        logits_processor, stopping_criteria: as in :class:`SamplingParams`, for all requests, before their own.
        seed: of the seeds of requests that have none; None differs from loop to loop.

    Raises:
        ValueError: a size is not positive, the budget is smaller than max_num_seqs, max_model_len is larger than the
            step's.
    """

    def __init__(
        self,
        step: ModelStep,
        kv_cache: KVCache,
        *,
        max_num_seqs: int = 32,
        max_num_tokens: int = 512,
        max_model_len: int | None = None,
        compile: bool = False,
        graph_mode: GraphMode | str = GraphMode.NONE,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None,
        seed: int | None = None,
    ) -> None:
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
        self.stop_token_ids: tuple[int, ...] = tuple(getattr(step, "stop_token_ids", None) or ())
        self.stats = GenerationStats()
        self._pad_token_id: int | None = getattr(step, "pad_token_id", None)
        self._processors = functions("logits_processor", logits_processor)
        self._criteria = functions("stopping_criteria", stopping_criteria)
        self._seeds = random.Random(seed)
        self._eager_step = step
        self._runner = DecodeGraphs(
            _compile(step) if compile else step,
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            mode=graph_mode,
            # a step of one sequence would be compiled a second time
            seq_sizes=[size for size in capture_sizes(max_num_seqs) if size > 1] or None,
        )
        self._is_warm = not compile and self._runner.mode is GraphMode.NONE
        columns = -(-max_model_len // kv_cache.block_size)
        self._tables = torch.zeros(max_num_seqs, columns, dtype=torch.int32, device="cpu")
        self._rows: tuple[list[int], Tensor] = ([], torch.zeros(0, dtype=torch.int64, device="cpu"))
        self._next_id = 0
        self._events: deque[NewToken] = deque()  # of submitted requests, not delivered yet
        self._requests: dict[int, Request] = {}  # unfinished ones and the last that finished
        self._finished: deque[int] = deque()
        self._closed = False
        # What counts are these requests and the cache; the lists below follow from them, each sorted by id.
        self._unfinished: dict[Request, None] = {}
        self._waiting: list[Request] = []
        self._swapped: list[Request] = []
        self._running: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._aborting: set[Request] = set()
        self._is_open = False  # whether changes are being made
        self._outcome: _Outcome | None = None  # changes that are decided
        self._admitted: list[Request] = []  # in the step that is open
        self._num_begun = 0
        weakref.finalize(self, _give_back, kv_cache, self._unfinished).atexit = False

    # Requests

    def submit(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> int:
        """Queue a prompt; returns the request's id, counted from 0.

        Args:
            prompt: token ids: a list, a tensor ``[n]`` or ``[1, n]``, or what a tokenizer returns for one text.
            params: how to continue it; greedy by default. Samples of ``n`` above 1 have consecutive ids, of which the
                first is returned.
            extra_key: requests with different keys never share computed prefixes (an adapter's name, a digest of an
                image).

        Raises:
            ValueError: the prompt is text or empty, holds an id that is not in the vocabulary, or can exceed, with its
                output, max_model_len or the whole cache; or the loop is closed. Nothing is queued then.
        """
        requests = self._make([("prompt", prompt)], [params], extra_key, self._events)
        self._queue(requests)
        return requests[0].request_id

    def abort(self, request_id: int) -> bool:
        """End a request, waiting, running or swapped out, at any time; its blocks are free at once, or after the step
        that is running. Its last :class:`NewToken` says "abort". False if it had ended already.

        Raises:
            ValueError: no request ever had this id.
        """
        request = self._request(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._drop([request])
        return True

    def output(self, request_id: int) -> Output:
        """The tokens of a request so far, with its finish_reason, error and logprobs. Of those that finished, the last
        1024 are kept.

        Raises:
            ValueError: no request ever had this id, or it is not kept any more.
        """
        request = self._request(request_id)
        if request is None:
            raise ValueError(f"request_id: expected one of the last {KEPT_OUTPUTS} that finished, got {request_id}")
        return request.output()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has tokens that ``step`` has not given yet."""
        return bool(self._unfinished or self._events)

    def step(self) -> list[NewToken]:
        """Schedules and runs one step; the tokens that it produced (none for prompts that are not through yet).

        Tokens that an earlier call left, and the ends of aborted requests, come first, without a step.

        Raises:
            OutOfBlocks: nothing can run, as others hold the cache's blocks. Free some, or abort a request.
            Exception: whatever the model, a processor or a criterion raises. The step has not happened then.
        """
        if not self._events:
            self._advance()
        events = self._events
        new = list(events)
        try:
            events.clear()
            return new
        except BaseException:  # an interrupt: the caller has not got them
            events.clear()
            events.extend(new)
            raise

    def run(self, on_token: Callable[[NewToken], None] | None = None) -> dict[int, Output]:
        """Steps until no request is left; returns the new tokens by request id. ``on_token`` sees each as it comes."""
        outputs: dict[int, Output] = {}
        while self.has_work:
            if not self._events:
                self._advance()
            while self._events:
                new = self._events.popleft()
                _collect(outputs.setdefault(new.request_id, Output()), new)
                if on_token is not None:
                    on_token(new)
        return outputs

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[NewToken], None] | None = None,
        *,
        extra_key: Hashable = None,
    ) -> list[Output]:
        """The continuations of prompts, in their order.

        All prompts are checked before any is queued. Whatever is raised, none of them stays queued. Requests that were
        submitted before run along; their tokens are kept for :meth:`step` and :meth:`run`.

        Args:
            prompts: a list of what :meth:`submit` takes, a tensor ``[S, n]``, or what a tokenizer returns for several
                texts; where it has an ``attention_mask``, padding is taken off.
            params: one for all, or one for each.
            on_token: called with each token as it comes, and with the ends of requests that bring none.
            extra_key: as in :meth:`submit`.

        Returns:
            The tokens of each as an :class:`Output`, ``n`` of them in a row for each prompt. A request that fails, or
            that ``on_token`` aborts, has those that it got; its ``finish_reason`` and ``error`` say so.
        """
        prompts = read_prompts(prompts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        expect(len(each) == len(prompts), "params", f"one for each of the {len(prompts)} prompts", len(each))
        events: deque[NewToken] = deque()
        named = [(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        requests = self._make(named, each, extra_key, events)
        refuse_padding([request.tokens for request in requests], self._pad_token_id)
        every = [sample for request in requests for sample in (request, *request.others)]
        try:
            self._queue(requests)
            while events or any(request.finish_reason is None for request in every):
                if not events:
                    self._advance()
                while events:
                    new = events.popleft()
                    if on_token is not None:
                        on_token(new)
        finally:
            self._drop(every)
        return [request.output() for request in every]

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> TokenStream:
        """Queue a prompt and iterate over its tokens; see :class:`TokenStream` and :meth:`submit`."""
        events: deque[NewToken] = deque()
        requests = self._make([("prompt", prompt)], [params], extra_key, events)
        stream = TokenStream(self, (requests[0], *requests[0].others), events)
        self._queue(requests)
        return stream

    def close(self) -> None:
        """Aborts all requests and gives their blocks back; the loop takes no more."""
        self._closed = True
        self._drop([*self._unfinished, *self._requests.values()])

    def __enter__(self) -> GenerationLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def reset(self) -> None:
        """Forgets all computed prefixes: call it when the model's weights have changed.

        Raises:
            ValueError: requests are unfinished, or others have sequences in the cache; finish or abort them first, as
                they would go on with keys and values of the old weights.
        """
        self._settle()
        if self._unfinished:
            raise ValueError(
                f"reset: expected no unfinished request, got {len(self._unfinished)}; finish or abort them first"
            )
        self.kv_cache.reset()

    @property
    def graph_stats(self) -> GraphStats:
        """How many steps were replayed from CUDA graphs, of which sizes, with how much padding."""
        return self._runner.stats

    @torch.no_grad()
    def warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Runs a step of padding only, and so compiles the graph that all batches use; captures, if a mode says so.

        The cache is not touched. ``on_capture`` is called with (sizes captured, sizes in all).
        """
        # eager first: the model's own errors, not wrapped by the compiler's
        DecodeGraphs(self._eager_step, self.kv_cache, max_num_seqs=1, mode=GraphMode.NONE).capture()
        self._runner.capture(None if on_capture is None else lambda done, total, _: on_capture(done, total))
        self._is_warm = True

    def _make(
        self,
        prompts: Sequence[tuple[str, Any]],
        params: Sequence[SamplingParams | None],
        extra_key: Hashable,
        events: deque[NewToken],
    ) -> list[Request]:
        """Requests for named prompts, all of them checked, none queued; of several samples the first has the others."""
        expect(not self._closed, "loop", "one that is open", "a closed one")
        try:
            hash(extra_key)
        except TypeError:
            raise ValueError(f"extra_key: expected something hashable, got {extra_key!r}") from None
        limit = min(self.max_model_len, self.kv_cache.max_seq_len)
        checked = []
        for (name, prompt), given in zip(prompts, params, strict=True):
            param = SamplingParams() if given is None else given
            expect(isinstance(param, SamplingParams), "params", "SamplingParams", param)
            tokens = read_prompt(name, prompt, self.vocab_size)
            longest = len(tokens) + param.max_new_tokens
            most = f"at most {limit} tokens with max_new_tokens (max_model_len, the cache)"
            expect(longest <= limit, name, most, longest)
            checked.append((tokens, param))
        requests = []
        for tokens, param in checked:
            seed = self._seeds.getrandbits(64) if param.seed is None else operator.index(param.seed)
            stop = self.stop_token_ids if param.stop_token_ids is None else param.stop_token_ids
            samples = [
                Request(
                    request_id=self._next_id + sample,
                    sample=sample,
                    tokens=tokens.copy(),
                    num_prompt=len(tokens),
                    params=param,
                    extra_key=extra_key,
                    seed=seed,
                    stop=frozenset(map(operator.index, stop)),
                    processors=self._processors + functions("logits_processor", param.logits_processor),
                    criteria=self._criteria + functions("stopping_criteria", param.stopping_criteria),
                    events=events,
                )
                for sample in range(param.n)
            ]
            self._next_id += param.n
            samples[0].others = tuple(samples[1:])
            requests.append(samples[0])
        return requests

    def _queue(self, requests: list[Request]) -> None:
        """All of them, or none."""
        within, self._is_open = self._is_open, True
        try:
            self._unfinished.update(dict.fromkeys(requests))
            self._requests.update(_by_id(requests))
            self._waiting += requests
            self._is_open = within
        except BaseException:
            for request in requests:
                self._unfinished.pop(request, None)
            if not within:
                self._settle()
            raise

    def _request(self, request_id: int) -> Request | None:
        """The request of that id, None if it is long gone."""
        request = self._requests.get(request_id)
        expect(0 <= request_id < self._next_id, "request_id", f"one of {self._next_id} that were given", request_id)
        return request

    def _drop(self, requests: Iterable[Request]) -> None:
        """Aborts those that are unfinished: now, or when the step that is running is over."""
        self._aborting.update(request for request in requests if request.finish_reason is None)
        if not self._is_open:
            self._settle()

    # A step

    def _advance(self) -> None:
        """Runs one step, if there is work; its tokens go to the events of their requests."""
        if not self._is_warm:
            self.warm_up()
        self._settle()
        if not self._unfinished:
            return
        started = time.perf_counter()
        self._num_begun += 1
        number = self._num_begun
        try:
            with torch.no_grad():
                self._is_open = True
                plan, stats = self._schedule()
                outcome = self._compute(plan, stats) if plan else _Outcome()
                if self._num_begun != number:
                    raise RuntimeError("step: another step was run within this one, which was given up")
                self._outcome = outcome  # from here on the step has happened
                self._apply(outcome)
        except BaseException:
            self._settle()
            raise
        if self._aborting:  # by whom the step called
            self._settle()
        self.stats.seconds += time.perf_counter() - started

    def _compute(self, plan: list[_Scheduled], stats: dict[str, Any]) -> _Outcome:
        """Runs the model, chooses tokens, and says what is to change. Nothing that counts has changed then."""
        batch, input_ids = self._batch(plan)
        self.kv_cache.flush_copies()
        logits = self._runner.replay(batch, input_ids)
        # a sequence whose prompt is not through yet has no token to choose
        through = [
            (row, request)
            for row, (request, start, num_tokens) in enumerate(plan)
            if start + num_tokens == len(request.tokens)
        ]
        outcome = _Outcome(commits=plan, stats=stats)
        rows, requests = [row for row, _ in through], [request for _, request in through]
        num_free = len(self._free_rows)
        for row, request in through:
            others = [other for other in request.others if other.finish_reason is None]
            outcome.forks += [(request, other) for other in others[:num_free]]
            outcome.starts += [(other, ()) for other in others[num_free:]]  # its prompt is in the cache then
            rows += [row] * len(others[:num_free])
            requests += others[:num_free]
            num_free -= len(others[:num_free])
        tokens, stops, all_logprobs = choose(logits, rows, requests)
        for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token < 0:
                outcome.end(request, "error", "the logits hold NaN or inf, or leave no token to choose")
                continue
            reason = request.finish_reason_with(token, i in stops)
            logprobs = all_logprobs.get(i)
            outcome.tokens.append((request, len(request.tokens), token, logprobs))
            outcome.events.append((request.events, NewToken(request.request_id, token, reason, None, logprobs)))
            if reason is not None:
                outcome.ends.append((request, reason, None))
        ended = {request for request, _, _ in outcome.ends}
        outcome.forks = [(parent, child) for parent, child in outcome.forks if child not in ended]
        stats["steps"] = self.stats.steps + 1
        stats["generated_tokens"] = self.stats.generated_tokens + len(outcome.tokens)
        return outcome

    def _apply(self, outcome: _Outcome, again: bool = False) -> None:
        """Makes the changes; ``again`` after an interrupt, when any part of them may be made already."""
        cache = self.kv_cache
        if again:
            cache.recover()
        for request, start, num_tokens in outcome.commits:
            if not again:
                cache.commit(request, num_tokens)
            elif request in cache:
                cache.commit(request, start + num_tokens - cache.num_computed_tokens(request))
        for parent, child in outcome.forks:
            if child not in cache and parent in cache:
                with contextlib.suppress(OutOfBlocks):  # of a cache that keeps more than blocks; the child waits then
                    cache.fork(parent, child)
            parent.num_blocks = 0  # who appends first gets a block of its own
            self._join(child, again)
        for request, position, token, logprobs in outcome.tokens:
            if again:
                del request.tokens[position:], request.logprobs[position - request.num_prompt :]
            request.tokens.append(token)
            if logprobs is not None:
                request.logprobs.append(logprobs)
            request.others = ()
        for request, others in outcome.starts:
            request.others = others
            self._join(request, again)
        for request, reason, error in outcome.ends:
            request.finish_reason, request.error = reason, error
            if request in cache:
                cache.free(request)
            self._unfinished.pop(request, None)
            if not again:
                self._leave(request)
            self._finished.append(request.request_id)
            if len(self._finished) > KEPT_OUTPUTS:
                self._requests.pop(self._finished.popleft(), None)
        if again:
            self._relist()
        for events, new in outcome.events:
            if not (again and any(each is new for each in events)):
                events.append(new)
        vars(self.stats).update(outcome.stats)
        self._admitted = []
        self._outcome = None
        self._is_open = False

    def _settle(self) -> None:
        """Ends what an earlier call left: changes that were decided are made, others given up. Then aborts."""
        if self._outcome is not None:
            self._apply(self._outcome, again=True)
        elif self._is_open:
            self._give_up()
        if not self._aborting:
            return
        aborting, outcome = self._aborting.copy(), _Outcome()
        for request in sorted(aborting, key=_id_of):
            if request.finish_reason is None:
                outcome.end(request, "abort")
                others = [other for other in request.others if other.finish_reason is None and other not in aborting]
                if others:  # the first of them computes the prompt now
                    outcome.starts.append((others[0], tuple(others[1:])))
        self._is_open, self._outcome = True, outcome
        self._apply(outcome)
        self._aborting -= aborting

    def _give_up(self) -> None:
        """Gives back what the step that is open has reserved; what it admitted waits again."""
        self.kv_cache.recover()
        for request in self._admitted:
            if request in self.kv_cache:
                self.kv_cache.free(request)
        for request in self._unfinished:
            if request in self.kv_cache and not self.kv_cache.is_swapped_out(request):
                reserved = self.kv_cache.num_tokens(request) - self.kv_cache.num_computed_tokens(request)
                if (
                    reserved == 1
                ):  # a decode; the rest of a prompt stays reserved, but for a last token, which is as one
                    self.kv_cache.rollback(request)
        self._relist()
        self._admitted = []
        self._is_open = False

    def _relist(self) -> None:
        """The lists and rows anew, from the requests and the cache."""
        running: list[Request] = []
        swapped: list[Request] = []
        waiting: list[Request] = []
        for request in sorted(self._unfinished, key=_id_of):
            is_swapped = request in self.kv_cache and self.kv_cache.is_swapped_out(request)
            where = swapped if is_swapped else running if request in self.kv_cache else waiting
            request.row, request.num_blocks = (len(running) if where is running else -1), 0
            where.append(request)
        self._running, self._swapped, self._waiting = running, swapped, waiting
        self._free_rows = list(range(self.max_num_seqs - 1, len(running) - 1, -1))
        self._requests.update(_by_id(self._unfinished))

    # Scheduling

    def _schedule(self) -> tuple[list[_Scheduled], dict[str, Any]]:
        """The decodes and then the prefills of one step, whose slots are reserved, and the stats that change by it."""
        cache = self.kv_cache
        decodes: list[_Scheduled] = []
        prefills: list[_Scheduled] = []
        unfinished: list[_Scheduled] = []
        preempted = False
        for request in self._running.copy():
            if request.row < 0:
                continue  # preempted for an older one
            start, num_tokens = cache.num_computed_tokens(request), cache.num_tokens(request)
            if start < num_tokens:
                unfinished.append((request, start, num_tokens - start))
                continue
            while request.row >= 0:  # until it has its slot, or was preempted itself
                try:
                    cache.append(request, request.tokens[start : start + 1])
                    decodes.append((request, start, 1))
                    break
                except OutOfBlocks:
                    self._preempt(self._running[-1])
                    preempted = True
        budget = self.max_num_tokens - len(decodes)
        for request, start, num_tokens in unfinished:
            if budget and request.row >= 0:
                budget -= _prefill(request, start, num_tokens, budget, prefills)
        num_cached = 0
        if not preempted:
            budget = self._resume(budget, decodes, prefills)
        if not preempted and not self._swapped:
            num_cached = self._admit(budget, prefills)
        if not (decodes or prefills or preempted):
            first = (self._swapped or self._waiting)[0]
            raise OutOfBlocks(
                f"{first!r}: expected free blocks for its {len(first.tokens)} tokens, but {cache.num_used_blocks} of"
                f" {cache.num_blocks} are held by others than this loop; free some, or abort({first.request_id})"
            )
        stats = {
            "prompt_tokens": self.stats.prompt_tokens + sum(num_tokens for _, _, num_tokens in prefills),
            "peak_used_blocks": max(self.stats.peak_used_blocks, cache.num_used_blocks),
        }
        if self._admitted:  # only then can more blocks be shared than before
            stats["cached_tokens"] = self.stats.cached_tokens + num_cached
            stats["peak_shared_blocks"] = max(self.stats.peak_shared_blocks, cache.stats().shared_blocks)
        return decodes + prefills, stats

    def _resume(self, budget: int, decodes: list[_Scheduled], prefills: list[_Scheduled]) -> int:
        """Swaps sequences in, oldest first, while that leaves a block for each that runs: else they were back soon."""
        cache = self.kv_cache
        while self._swapped and budget and self._free_rows:
            request = self._swapped[0]
            if not cache.can_swap_in(request, num_tokens=1, spare_blocks=len(self._running)):
                break
            cache.swap_in(request)
            del self._swapped[0]
            self._start(request)
            start, num_tokens = cache.num_computed_tokens(request), cache.num_tokens(request)
            if start == num_tokens:
                cache.append(request, request.tokens[start : start + 1])
                decodes.append((request, start, 1))
                budget -= 1
            else:
                budget -= _prefill(request, start, num_tokens - start, budget, prefills)
        return budget

    def _admit(self, budget: int, prefills: list[_Scheduled]) -> int:
        """Admits waiting requests, oldest first, while that leaves a block for each that runs; how many of their
        tokens were in the cache."""
        cache = self.kv_cache
        num_cached = index = 0
        while budget and self._free_rows and index < len(self._waiting):
            request = self._waiting[index]
            if any(self._shares_unfinished_prefix(request, other, start) for other, start, _ in prefills):
                index += 1  # one step later its prefix is in the cache
                continue
            if not cache.can_admit(request.tokens, request.extra_key, spare_blocks=len(self._running)):
                break
            self._admitted.append(request)
            start = cache.admit(request, request.tokens, request.extra_key)
            del self._waiting[index]
            self._start(request)
            budget -= _prefill(request, start, len(request.tokens) - start, budget, prefills)
            num_cached += start
        return num_cached

    def _shares_unfinished_prefix(self, request: Request, other: Request, num_computed: int) -> bool:
        """Whether ``other`` computes blocks in this step, or later ones, that the request could share afterwards."""
        if request.extra_key != other.extra_key:
            return False
        common = 0
        for a, b in zip(request.tokens[:-1], other.tokens, strict=False):
            if a != b:
                break
            common += 1
        return common // self.kv_cache.block_size * self.kv_cache.block_size > num_computed

    def _start(self, request: Request) -> None:
        request.row, request.num_blocks = self._free_rows.pop(), 0
        bisect.insort(self._running, request, key=_id_of)

    def _leave(self, request: Request) -> None:
        """Off the list that the request is on."""
        if request.row >= 0:
            self._running.remove(request)
            self._free_rows.append(request.row)
            request.row = -1
        elif request in self._waiting:
            self._waiting.remove(request)
        elif request in self._swapped:
            self._swapped.remove(request)

    def _preempt(self, request: Request) -> None:
        """Takes a running sequence's blocks away: by swapping, or, if the host has no room, to be computed again."""
        if self.kv_cache.can_swap_out(request):
            self.kv_cache.swap_out(request)
            self._leave(request)
            bisect.insort(self._swapped, request, key=_id_of)
            self.stats.swapped_out += 1
        else:
            self.kv_cache.free(request)
            self._leave(request)
            bisect.insort(self._waiting, request, key=_id_of)
            self.stats.recomputed += 1

    def _join(self, request: Request, again: bool) -> None:
        """A further sample takes part: it runs if it has blocks, else it waits."""
        self._unfinished[request] = None
        if again:
            return  # the lists are made anew
        if request in self.kv_cache:
            self._start(request)
        else:
            bisect.insort(self._waiting, request, key=_id_of)

    def _batch(self, plan: list[_Scheduled]) -> tuple[Batch, list[int]]:
        """The step as the metadata's builder takes it, and its token ids."""
        size = self.kv_cache.block_size
        input_ids: list[int] = []
        longest = 0
        for request, start, num_tokens in plan:
            stop = start + num_tokens
            longest = max(longest, stop)
            input_ids += request.tokens[start:stop]
            if stop > request.num_blocks * size:
                blocks = self.kv_cache.block_ids(request)
                self._tables[request.row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device="cpu")
                request.num_blocks = len(blocks)
        rows = [request.row for request, _, _ in plan]
        if rows != self._rows[0]:
            self._rows = rows, torch.tensor(rows, dtype=torch.int64, device="cpu")
        tables = self._tables[:, : -(-longest // size)].index_select(0, self._rows[1])
        computed, query_lens = torch.tensor(
            [[start for _, start, _ in plan], [num_tokens for _, _, num_tokens in plan]],
            dtype=torch.int64,
            device="cpu",
        )
        return Batch(query_lens, computed, tables), input_ids


class TokenStream(Iterator[NewToken]):
    """The tokens of one prompt as they come; made by :meth:`GenerationLoop.stream`.

    The next token runs steps, in which all other requests take part. ``close``, leaving its ``with`` block, or
    dropping the stream aborts what is unfinished.

    Attributes:
        request_ids: of the prompt's samples.
    """

    def __init__(self, loop: GenerationLoop, requests: tuple[Request, ...], events: deque[NewToken]) -> None:
        self.request_ids = tuple(request.request_id for request in requests)
        self._loop = loop
        self._requests = requests
        self._events = events

    def __next__(self) -> NewToken:
        while not self._events:
            if all(request.finish_reason is not None for request in self._requests):
                raise StopIteration
            self._loop._advance()
        return self._events.popleft()

    @property
    def outputs(self) -> list[Output]:
        """What each sample has so far."""
        return [request.output() for request in self._requests]

    def close(self) -> None:
        """Aborts what is unfinished; no token comes any more."""
        self._loop._drop(self._requests)
        self._events.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _compile(step: ModelStep) -> ModelStep:
    """The step compiled, as a function with code of its own: the limit of recompiles is one for each code object, and
    the steps of all models would share it."""

    def run(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]) -> Tensor:
        return step(input_ids, metadata, last_rows, kv_caches)

    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True)


def _prefill(request: Request, start: int, left: int, budget: int, prefills: list[_Scheduled]) -> int:
    """Schedules what the budget allows of a prompt's tokens that are left; how many."""
    prefills.append((request, start, min(budget, left)))
    return prefills[-1][2]


def _give_back(kv_cache: KVCache, requests: Iterable[Request]) -> None:
    """Frees the sequences of a loop that nobody holds any more."""
    for request in requests:
        if request in kv_cache:
            kv_cache.free(request)


def _collect(output: Output, new: NewToken) -> None:
    if new.token is not None:
        output.append(new.token)
    if new.logprobs is not None:
        output.logprobs = [*(output.logprobs or ()), new.logprobs]
    output.finish_reason, output.error = new.finish_reason, new.error


def _by_id(requests: Iterable[Request]) -> dict[int, Request]:
    return {each.request_id: each for request in requests for each in (request, *request.others)}


def _id_of(request: Request) -> int:
    return request.request_id
