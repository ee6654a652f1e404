"""Generation with continuous batching over a paged cache, for any model that can run one ragged step.

Sequences join and leave the batch at every step. A step has a budget of tokens: each decoding sequence takes one,
prompts take the rest in chunks. Full blocks of equal prefixes are shared. When blocks run out, the youngest sequence is
swapped to the host cache, or, without room there, freed and computed again.

A step happens whole or not at all. All that can fail comes first: slots are reserved, the model runs, tokens are
chosen. The resulting changes are recorded (``StepChanges``), then made. An exception before that frees the reserved
slots. An exception after it, which can only be an interrupt, leaves the rest of the changes to the next call.

On a GPU steps overlap: the next step is launched before the tokens of the present one are read. From then on the
present one has happened, as its slots are committed and its tokens will come. The next one is committed with the tokens
that it was launched without.

Cache and scheduler change only under the cache's lock. Requests and aborts of other threads, signal handlers and
finalizers wait in the ``Inbox``.

Sources of the ideas: iteration-level scheduling of Orca (Yu et al., OSDI 2022), preemption of PagedAttention (Kwon et
al. 2023, arXiv:2309.06180), chunked prefill of Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310), the redo log of
ARIES (Mohan et al., TODS 1992).
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import NotCopied, expect, flag, optional_function
from paged_ops.generation.changes import Launched, StepChanges, apply_changes
from paged_ops.generation.inbox import Inbox
from paged_ops.generation.model_step import ModelRunner, ModelStep, check_sizes
from paged_ops.generation.params import LogitsProcessor, SamplingParams, StoppingCriterion, functions
from paged_ops.generation.ranks import FOLLOW, join_ranks
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
from paged_ops.generation.scheduler import Scheduler, free_all
from paged_ops.generation.settings import Defaults
from paged_ops.generation.steps import Steps
from paged_ops.graphs import GraphMode, GraphStats
from paged_ops.registry import apart_from_caller

WARM_UP_LIMIT = 1800.0  # seconds that ranks wait for each other's compilation


class GenerationLoop(NotCopied):
    """Continuous batching: ``submit`` requests, then ``step`` (or ``run``) until none is left; or ``generate``.

    A step happens whole or not at all, whatever is raised in it, Ctrl-C included: the next step then gives the same
    tokens. Any thread may call any method. The steps of all loops on one cache run one after the other. The model, a
    processor or a signal handler may call ``submit``, ``abort``, ``output`` and ``close`` within a step. As a context
    manager the loop is closed at the end.

    Args:
        step: the model.
        kv_cache: the cache that the step writes. Other code may keep sequences in it, but must not change it while a
            step runs. The loop's sequences are freed when they finish, when the loop is closed, and when it is garbage
            collected.
        max_num_seqs: most sequences of a step.
        max_num_tokens: the token budget of a step, at least max_num_seqs.
        max_model_len: longest sequence, prompt and output; by default the step's ``max_model_len``, at most what the
            cache can hold.
        compile: run the step through ``torch.compile(fullgraph=True)``. The sizes T and S are dynamic, so one graph
            serves every batch; it is compiled by :meth:`warm_up`, or else in the first step. If the cache has states,
            only decodes are compiled, and steps with chunks of prompts run eagerly.
        graph_mode: which batches are captured in CUDA graphs, also by :meth:`warm_up`.
        logits_processor, stopping_criteria: as in :class:`SamplingParams`, for all requests; each request's own follow.
        generation_config: the defaults of requests: a mapping of fields, or transformers' ``GenerationConfig``. Fields
            that it leaves out come from the model's own config. Both are read when the loop is made.
        tokenizer: the model's, for ``stop_strings``.
        seed: of the seeds of requests that have none; with None they differ from loop to loop.
        group: the ``torch.distributed`` group of ranks that run the step together, each with a loop of its own; by
            default the step's ``process_group``. docs/parallel.md has the rules for their calls.
        rank_time_limit: seconds after which a missing rank is named in an error on all others.
        overlap: launch the next step before the tokens of the present one are read, where docs/generation.md says; by
            default on GPUs; among ranks, if the group carries tensors of the device.

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
        overlap: bool | None = None,
    ) -> None:
        sizes = check_sizes(step, kv_cache, max_num_seqs, max_num_tokens, max_model_len)
        self.kv_cache = kv_cache
        self.max_num_seqs, self.max_num_tokens, self.max_model_len = sizes
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
            min(self.max_model_len, kv_cache.max_seq_len),
        )
        self.stop_token_ids: tuple[int, ...] = defaults.stop_token_ids
        self._model = ModelRunner(step, kv_cache, compile, graph_mode, *sizes)
        self._scheduler = Scheduler(kv_cache, *sizes, self.stats)
        maker = RequestMaker(defaults, self.vocab_size, seed, self._model.refuses_prompt_logprobs)
        self._inbox = Inbox(maker, self._scheduler, self._model.note_weights)
        self._lock = kv_cache.lock
        self._changes: StepChanges | None = None  # that are decided, and not yet all made
        self._launched: Launched | None = None  # the step that the device runs, whose slots are committed
        overlap = flag("overlap", kv_cache.device.type == "cuda" if overlap is None else overlap)
        agreed = *sizes, str(self.graph_mode), overlap
        self._ranks = ranks = join_ranks(step, group, rank_time_limit, self._inbox, kv_cache, self.stats, agreed)
        self._steps = Steps(self._model, self._scheduler, kv_cache, ranks, self.stats, ranks.shares_tokens and overlap)
        clean_up = functools.partial(free_all, kv_cache, self._scheduler.unfinished)
        weakref.finalize(self, kv_cache.lock.run_or_defer, clean_up, waits=False).atexit = False

    # Requests

    def submit(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> int:
        """Queue a prompt; returns the request's id, counted from 0.

        Args:
            prompt: token ids: a list, a tensor ``[n]`` or ``[1, n]``, or a tokenizer's result for one prompt.
            params: how to continue it; by default as ``model.generate(prompt)`` does. Samples of ``n`` above 1 have
                consecutive ids; the first is returned.
            extra_key: requests with different keys never share computed prefixes (an adapter's name, a digest of an
                image).

        Raises:
            ValueError: the prompt is a string or empty, holds an id that is not in the vocabulary, or can exceed, with
                its output, max_model_len or the whole cache; weights or adapters have changed while requests are
                unfinished; or the loop is closed. Nothing is queued then.
        """
        requests = self._inbox.make([("prompt", prompt)], [params], extra_key, self._inbox.events)
        self._inbox.add(requests)
        return requests[0].request_id

    def abort(self, request_id: int) -> bool:
        """End a request at any time: waiting, running or swapped out. Its blocks are free at once; if a step is
        running, after it; among several ranks, with the next step. Its last :class:`NewToken` has finish_reason
        "abort". False if it had ended already.

        Waits for the step that another thread runs.

        Raises:
            ValueError: no request ever had this id.
        """
        request = self._inbox.find(request_id)
        goes_on = request is not None and request.finish_reason is None
        self._drop([request] if request is not None else [])
        return goes_on

    def output(self, request_id: int) -> Output:
        """The tokens of a request so far, with its finish_reason, error and logprobs. The outputs of the last 1024
        finished requests are kept.

        Raises:
            ValueError: no request ever had this id, or its output is no longer kept.
        """
        return self._inbox.output(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has tokens that ``step`` has not yet returned."""
        return self._inbox.has_requests or bool(self._inbox.events)

    def step(self) -> list[NewToken]:
        """Schedules and runs one step. Returns the tokens that it produced: none for prompts that are not yet computed.

        Tokens that an earlier call left, and the ends of aborted requests, are returned first, without a step. If steps
        overlap, the next one runs when this returns.

        Raises:
            OutOfBlocks: no request can run, because other sequences hold the cache's blocks. Free some, or abort a
                request.
            Exception: whatever the model, a processor or a criterion raises. The step has not happened then. If steps
                overlap, this is the next step, and the tokens of the present one come with the next call.
        """
        new: list[NewToken] = []
        try:
            self._lock.run(functools.partial(self._next, self._inbox.events, None, new))
            return new
        except BaseException:  # an interrupt: the caller did not get them
            self._put_back(new)
            raise

    def run(self, on_token: Callable[[NewToken], None] | None = None) -> dict[int, Output]:
        """Runs steps until no request is unfinished; returns the new tokens by request id. ``on_token`` is called with
        each token."""
        optional_function("on_token", on_token)
        outputs: dict[int, Output] = {}
        while self.has_work:
            events = deque(self.step())
            try:
                while events:
                    new = events.popleft()
                    outputs.setdefault(new.request_id, Output()).add(new)
                    if on_token is not None:
                        with self._ranks.sharing_errors():
                            on_token(new)
            finally:
                self._put_back(events)  # without the ones that on_token has seen
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
            prompts: a list of prompts as :meth:`submit` takes, a tensor ``[S, n]``, or a tokenizer's result for several
                prompts; if there is an ``attention_mask``, padding is removed.
            params: one for all prompts, or one for each.
            on_token: called with each new token, and with the ends of requests that have no token.
            extra_key: as in :meth:`submit`.

        Returns:
            An :class:`Output` for each sample: ``n`` of them in a row for each prompt. A request that fails, or that
            ``on_token`` aborts, has its tokens up to then; its ``finish_reason`` and ``error`` say so.
        """
        optional_function("on_token", on_token)
        has_mask = isinstance(prompts, Mapping) and prompts.get("attention_mask") is not None
        prompts = read_prompts(prompts)
        if params is not None and not isinstance(params, Sequence):
            expect_params(params)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        expect(len(each) == len(prompts), "params", f"one for each of the {len(prompts)} prompts", len(each))
        events: deque[NewToken] = deque()
        named = [(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        requests = self._inbox.make(named, each, extra_key, events)
        if not has_mask:
            refuse_padding([request.tokens for request in requests], self._pad_token_id)
        every = [sample for request in requests for sample in (request, *request.others)]
        try:
            self._inbox.add(requests)
            with self._ranks.calling_only_steps(on_token is None):
                while self._fill(every, events):
                    while events:
                        new = events.popleft()
                        if on_token is not None:
                            with self._ranks.sharing_errors():
                                on_token(new)
        finally:
            self._drop(every)
        return [request.output() for request in every]

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, extra_key: Hashable = None) -> TokenStream:
        """Queue a prompt and iterate over its tokens; see :class:`TokenStream` and :meth:`submit`."""
        events: deque[NewToken] = deque()
        requests = self._inbox.make([("prompt", prompt)], [params], extra_key, events)
        stream = TokenStream((requests[0], *requests[0].others), events, self._fill, self._drop)
        self._inbox.add(requests)
        return stream

    def follow(self) -> None:
        """Runs every call that rank 0 makes of its loop, until that loop is closed. For the other ranks, if only rank 0
        has the requests.

        Raises:
            ValueError: on rank 0, or without a group.
            RankError: the ranks cannot go on.
        """
        expect(not self._ranks.leads, "follow", "a rank other than 0 of a group", "rank 0, or no group")
        while not self._inbox.is_closed:
            try:
                self._lock.run(functools.partial(self._advance, FOLLOW))
            except Exception:  # rank 0 has it too, and decides what to do
                if self._ranks.is_lost:
                    raise
            self._inbox.events.clear()

    def close(self) -> None:
        """Aborts all requests and frees their blocks; the loop then takes no more requests. Within a step, this happens
        after the step. If it is interrupted, call it again. Among several ranks, all loops close."""
        self._lock.run_or_defer(self._leave)

    def _leave(self) -> None:
        if not self._inbox.is_closed:
            self._ranks.leave()
        self._close()

    def _close(self) -> None:
        self._inbox.is_closed = True
        self._settle()

    def __enter__(self) -> GenerationLoop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset(self) -> None:
        """Forgets all computed prefixes. Call it if the model's weights have changed, and ``weights_version`` of the
        step does not show it (writes through ``.data``).

        Raises:
            ValueError: requests are unfinished, or other code has sequences in the cache. Finish or abort them first:
                they would continue with keys and values of the old weights.
        """
        self._lock.run(functools.partial(self._on_all_ranks, "reset", self._reset))

    def _on_all_ranks(self, name: str, call: Callable[[], None]) -> None:
        self._ranks.next_call(name)
        call()

    def _reset(self) -> None:
        self._settle()
        left = len(self._scheduler.unfinished)
        expect(not left, "reset", "no unfinished request (finish or abort them first)", left)
        self.kv_cache.reset()
        self._model.forget_weights()

    @property
    def graph_mode(self) -> GraphMode:
        return self._model.graphs.mode

    @property
    def graph_stats(self) -> GraphStats:
        """Counts of the steps that were replayed from CUDA graphs, by size, and of their padding."""
        return self._model.graphs.stats

    def warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Compiles and loads all that a later step can need, and captures graphs as ``graph_mode`` asks.

        The step runs on padding and on a made-up prompt; the cache is not written. ``on_capture`` is called with (sizes
        captured, sizes in all).
        """
        optional_function("on_capture", on_capture)
        warm_up = functools.partial(self._warm_up, on_capture)
        self._lock.run(functools.partial(self._on_all_ranks, "warm_up", warm_up))

    def _warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        self._lock.wait_for_issued(self.kv_cache.device)  # the step that runs reads buffers that padding overwrites
        self._ranks.run(functools.partial(self._model.warm_up, on_capture), WARM_UP_LIMIT)
        self._model.is_warm = True

    def _drop(self, requests: Iterable[Request], waits: bool = True) -> None:
        """Aborts the unfinished ones: now, after the step that is running, or when all ranks know."""
        self._inbox.abort(requests)
        if not self._inbox.is_shared:
            self._lock.run_or_defer(self._settle, waits=waits)

    def _put_back(self, new: Sequence[NewToken]) -> None:
        """Makes tokens the next ones that :meth:`step` returns."""
        events = self._inbox.events

        def put_back() -> None:
            if not (events and events[0] is new[0]):  # else they are still there
                events.extendleft(reversed(new))

        if new:
            self._lock.run_or_defer(put_back)

    # A step

    def _fill(self, requests: Iterable[Request], events: deque[NewToken]) -> bool:
        """Runs a step if ``events`` is empty and one of the requests is unfinished. False if both have ended."""
        return bool(events) or self._lock.run(functools.partial(self._next, events, requests))

    def _next(
        self, events: deque[NewToken], requests: Iterable[Request] | None, into: list[NewToken] | None = None
    ) -> bool:
        """Runs a step if ``events`` is empty, and moves the events to ``into``."""
        if self._changes is not None:  # of an interrupted call
            self._settle()
        if not events and _any_unfinished(requests):
            self._advance()
        if into is None:
            return bool(events) or _any_unfinished(requests)
        into.extend(events)
        events.clear()
        return True

    def _advance(self, call: str = "step") -> None:
        """Runs one step, if there is work. Its tokens are added to the events of their requests."""
        if self._inbox.has_requests or call == FOLLOW:
            call = self._ranks.next_call(call)
            if call != "step":
                {"warm_up": self._warm_up, "reset": self._reset, "close": self._close}[call]()
                return
        if not self._model.is_warm:
            self._warm_up()
        self._settle()
        if not self._scheduler.unfinished:
            return
        started, grad_mode = time.perf_counter(), torch.is_grad_enabled()
        try:
            self._step()
        except BaseException:
            torch.set_grad_enabled(grad_mode)  # an interrupt may have skipped the end of its block
            self._settle()
            raise
        if self._inbox.aborting:  # by a function that the step called
            self._settle()
        self.stats.seconds += time.perf_counter() - started

    @apart_from_caller
    def _step(self) -> None:
        """Finishes the step that runs, or else a new one; before that, launches the one after it if it can."""
        launched, following, error = self._launched, None, None
        if launched is None or not launched.is_live:
            launched, self._launched = self._steps.launch(), None
            if self._steps.can_overlap(launched):
                self._make(StepChanges(launched=launched))
        elif not self._inbox.is_shared:  # ranks check them together, in the step that follows
            self._model.check_weights()
        if launched is self._launched:
            try:
                following = self._steps.launch_after(launched)
            except Exception as raised:  # that step has not happened, but this one has
                if self._ranks.is_lost:
                    raise
                error = raised
                self._scheduler.cancel()
        changes = self._steps.finish(launched, following, is_committed=launched is self._launched)
        self._make(changes)
        if launched.step.has_admitted or changes.forks:  # only then can there be more shared blocks than before
            shared = self.kv_cache.stats().shared_blocks
            self.stats.peak_shared_blocks = max(self.stats.peak_shared_blocks, shared)
        if error is not None:
            raise error

    def _make(self, changes: StepChanges) -> None:
        self._changes = changes  # from here on it has happened
        self._apply(changes)

    def _apply(self, changes: StepChanges, again: bool = False) -> None:
        """Makes the changes; ``again`` after an interrupt, when a part of them may already be made."""
        apply_changes(changes, self.kv_cache, self._scheduler, again)
        for request, _, _ in changes.ends:
            self._inbox.finish(request)
        vars(self.stats).update(changes.stats)
        self._scheduler.finish()
        if changes.finished is not None or changes.launched is not None:
            self._launched = changes.launched
        self._changes = None

    def _settle(self) -> None:
        """Finishes what an earlier call left: makes the changes that were decided, cancels a step that was not. Then
        aborts."""
        inbox = self._inbox
        if self._changes is not None:
            self._apply(self._changes, again=True)
        elif self._scheduler.is_open:
            self._scheduler.cancel()
        if not inbox.is_shared or self._inbox.is_closed:
            inbox.deliver()
        if self._inbox.is_closed:
            inbox.abort_all()
        if not inbox.aborting:
            return
        aborting, changes = inbox.aborting.copy(), StepChanges()
        changes.abort(aborting)
        self._make(changes)
        inbox.aborting -= aborting


def _any_unfinished(requests: Iterable[Request] | None) -> bool:
    """Whether one of the requests is unfinished; True for None."""
    return requests is None or any(request.finish_reason is None for request in requests)
