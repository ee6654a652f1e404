"""Generation with continuous batching over a paged cache, for any model that can run one ragged step.

Sequences join and leave the batch at every step. A step has a budget of tokens: each decoding sequence takes one,
prompts take the rest in chunks. Full blocks of equal prefixes are shared; when blocks run out, the youngest sequence is
swapped to the host cache, or, without room there, freed and computed again.

Sources of the ideas: iteration-level scheduling of Orca (Yu et al., OSDI 2022), preemption of PagedAttention (Kwon et
al. 2023, arXiv:2309.06180), chunked prefill of Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310).

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary, M columns of a block table, B tokens a block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paged_ops.cache import KVCache, OutOfBlocks
from paged_ops.graphs import DecodeGraphs, GraphMode, GraphStats, capture_sizes
from paged_ops.metadata import AttentionMetadata, Batch


class ModelStep(Protocol):
    """One step of a model: writes keys and values of the new tokens into the caches and returns logits."""

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]`` of the rows ``last_rows`` (int64 ``[S]``) of ``input_ids`` (int64 ``[T]``).

        Tensors have the padded sizes T and S and stay where they are from one step to the next of equal sizes, so that
        a step may be compiled or captured. No value may be read on the host.
        """


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is continued.

    Args:
        max_new_tokens: at most so many tokens.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it before the softmax.
        top_p: sample from the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling, Holtzman et
            al. 2019, arXiv:1904.09751); 1 is off.
        seed: of this sequence's random numbers, which depend on nothing else in the batch.
        stop_token_ids: tokens that end the sequence; the one that did is its last.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _expect(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        _expect(self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature)
        _expect(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)


class NewToken(NamedTuple):
    """A token that a step produced. ``finish_reason`` is None, "stop" (a stop token) or "length"."""

    request_id: int
    token: int
    finish_reason: str | None


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


@dataclass(eq=False)
class _Request:
    request_id: int
    tokens: list[int]  # prompt and output
    num_prompt: int
    params: SamplingParams
    row: int = -1  # of the block table; -1 when not running
    num_blocks: int = 0  # written to that row
    generator: torch.Generator | None = None
    stop: frozenset[int] = field(default_factory=frozenset)


_Plan = list[tuple[_Request, int]]  # requests and how many of their tokens a step computes


class GenerationLoop:
    """Continuous batching: ``submit`` requests, then ``step`` (or ``run``) until none is left.

    Args:
        step: the model.
        kv_cache: the cache that the step writes; sequences are keyed by request id and freed when they finish.
        max_num_seqs: most sequences of a step.
        max_num_tokens: the token budget of a step, at least max_num_seqs.
        max_model_len: longest sequence, prompt and output; by default what the cache can hold.
        compile: run the step through ``torch.compile(fullgraph=True)``. The sizes T and S are dynamic, so one graph
            serves every batch; :meth:`warm_up` compiles it, at the latest in the first step.
        graph_mode: which batches are captured in CUDA graphs, by :meth:`warm_up` too.

    Raises:
        ValueError: a size is not positive or the budget is smaller than max_num_seqs.
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
    ) -> None:
        capacity = kv_cache.num_blocks * kv_cache.block_size
        max_model_len = capacity if max_model_len is None else max_model_len
        _expect(max_num_seqs >= 1, "max_num_seqs", "at least 1", max_num_seqs)
        _expect(max_model_len >= 1, "max_model_len", "at least 1", max_model_len)
        _expect(
            max_num_tokens >= max_num_seqs, "max_num_tokens", f"at least max_num_seqs = {max_num_seqs}", max_num_tokens
        )
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.stats = GenerationStats()
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
        self._tables = torch.zeros(max_num_seqs, -(-max_model_len // kv_cache.block_size), dtype=torch.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._next_id = 0
        self._waiting: deque[_Request] = deque()
        self._swapped: deque[_Request] = deque()
        self._running: list[_Request] = []  # oldest first

    def submit(self, prompt: Iterable[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt (token ids); returns the request's id, counted from 0.

        Raises:
            ValueError: the prompt is empty, or it and its output can exceed max_model_len or the whole cache.
        """
        params = params or SamplingParams()
        tokens = [int(token) for token in prompt]
        _expect(bool(tokens), "prompt", "at least one token", "none")
        longest = len(tokens) + params.max_new_tokens
        limit = min(self.max_model_len, self.kv_cache.num_blocks * self.kv_cache.block_size)
        _expect(
            longest <= limit,
            "prompt",
            f"at most {limit} tokens with max_new_tokens (max_model_len, the cache)",
            longest,
        )
        request = _Request(self._next_id, tokens, len(tokens), params, stop=frozenset(params.stop_token_ids))
        if params.temperature:
            request.generator = torch.Generator(self.kv_cache.device).manual_seed(params.seed)
        self._next_id += 1
        self._waiting.append(request)
        return request.request_id

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._swapped or self._running)

    def run(self, on_token: Callable[[NewToken], None] | None = None) -> dict[int, list[int]]:
        """Steps until no request is left; returns the new tokens by request id. ``on_token`` sees each as it comes."""
        outputs: dict[int, list[int]] = {}
        while self.has_work:
            for new in self.step():
                outputs.setdefault(new.request_id, []).append(new.token)
                if on_token is not None:
                    on_token(new)
        return outputs

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[NewToken], None] | None = None,
    ) -> list[list[int]]:
        """The continuations of prompts, in their order; ``params`` is one for all or one for each."""
        prompts = list(prompts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        _expect(len(each) == len(prompts), "params", f"one for each of the {len(prompts)} prompts", len(each))
        ids = [self.submit(prompt, param) for prompt, param in zip(prompts, each, strict=True)]
        outputs = self.run(on_token)
        return [outputs[request_id] for request_id in ids]

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

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Schedules and runs one step; the tokens that it produced (none for prompts that are not through yet)."""
        if not self._is_warm:
            self.warm_up()
        start = time.perf_counter()
        decodes, prefills = self._schedule()
        plan = decodes + prefills
        if not plan:
            return []
        batch, input_ids = self._batch(plan)
        self.kv_cache.flush_copies()
        logits = self._runner.replay(batch, input_ids)
        for request, num_tokens in plan:
            self.kv_cache.commit(request.request_id, num_tokens)
        # a sequence whose prompt is not through yet has no token to sample
        through = [s for s, (request, _) in enumerate(plan) if self._num_computed(request) == len(request.tokens)]
        tokens = _sample(logits, [plan[s][0] for s in through], through)
        produced = [self._take(plan[s][0], token) for s, token in zip(through, tokens, strict=True)]
        self.stats.steps += 1
        self.stats.prompt_tokens += sum(num_tokens for _, num_tokens in prefills)
        self.stats.generated_tokens += len(produced)
        self.stats.seconds += time.perf_counter() - start
        return produced

    # Scheduling

    def _schedule(self) -> tuple[_Plan, _Plan]:
        """The decodes and the prefills of one step; their slots are reserved."""
        decodes: _Plan = []
        prefilling = [request for request in self._running if not self._decodes(request)]
        preempted = False
        for request in [request for request in self._running if self._decodes(request)]:
            while request.row >= 0:  # until it has its slot, or was preempted itself
                try:
                    decodes.append(self._reserve_next(request))
                    break
                except OutOfBlocks:
                    self._preempt(self._running[-1])
                    preempted = True
        budget = self.max_num_tokens - len(decodes)
        prefills: _Plan = []
        for request in prefilling:
            if budget and request.row >= 0:
                budget -= self._prefill(request, budget, prefills)
        if not preempted:
            budget = self._resume(budget, decodes, prefills)
        if not preempted and not self._swapped:
            self._admit(budget, prefills)
        assert decodes or prefills or not self.has_work, "nothing was scheduled though requests are left"
        self.stats.peak_used_blocks = max(
            self.stats.peak_used_blocks, self.kv_cache.num_blocks - self.kv_cache.pool.num_free
        )
        return decodes, prefills

    def _resume(self, budget: int, decodes: _Plan, prefills: _Plan) -> int:
        """Swaps sequences in, oldest first, while that leaves a block for each that runs: else they were back soon."""
        while self._swapped and budget and self._free_rows:
            request = self._swapped[0]
            needed = -(-(self.kv_cache.num_tokens(request.request_id) + 1) // self.kv_cache.block_size)
            if self._running and self.kv_cache.pool.num_free - needed < len(self._running):
                break
            self._swapped.popleft()
            self.kv_cache.swap_in(request.request_id)
            self._start(request)
            if self._decodes(request):
                decodes.append(self._reserve_next(request))
                budget -= 1
            else:
                budget -= self._prefill(request, budget, prefills)
        return budget

    def _admit(self, budget: int, prefills: _Plan) -> None:
        """Admits waiting requests, oldest first, while that leaves a block for each that runs."""
        admitted = False
        for request in list(self._waiting):
            if not budget or not self._free_rows:
                break
            if any(self._shares_unfinished_prefix(request, other) for other, _ in prefills):
                continue  # one step later its prefix is in the cache
            headroom = [-1] * (len(self._running) * self.kv_cache.block_size)
            if not self.kv_cache.can_admit([*request.tokens, *headroom]):
                break
            self._waiting.remove(request)
            self.stats.cached_tokens += self.kv_cache.admit(request.request_id, request.tokens)
            self._start(request)
            budget -= self._prefill(request, budget, prefills)
            admitted = True
        if admitted:  # only then can more blocks be shared than before
            shared = self.kv_cache.stats().shared_blocks
            self.stats.peak_shared_blocks = max(self.stats.peak_shared_blocks, shared)

    def _shares_unfinished_prefix(self, request: _Request, other: _Request) -> bool:
        """Whether ``other`` computes blocks in this step, or later ones, that the request could share afterwards."""
        common = 0
        for a, b in zip(request.tokens[:-1], other.tokens, strict=False):
            if a != b:
                break
            common += 1
        return common // self.kv_cache.block_size * self.kv_cache.block_size > self._num_computed(other)

    def _prefill(self, request: _Request, budget: int, prefills: _Plan) -> int:
        chunk = min(budget, self.kv_cache.num_tokens(request.request_id) - self._num_computed(request))
        prefills.append((request, chunk))
        return chunk

    def _reserve_next(self, request: _Request) -> tuple[_Request, int]:
        self.kv_cache.append(request.request_id, request.tokens[-1:])
        return request, 1

    def _start(self, request: _Request) -> None:
        request.row, request.num_blocks = self._free_rows.pop(), 0
        self._running.append(request)
        self._running.sort(key=lambda each: each.request_id)

    def _stop(self, request: _Request) -> None:
        self._running.remove(request)
        self._free_rows.append(request.row)
        request.row = -1

    def _preempt(self, request: _Request) -> None:
        """Takes a running sequence's blocks away: by swapping, or, if the host has no room, to be computed again."""
        self._stop(request)
        if self.kv_cache.can_swap_out(request.request_id):
            self.kv_cache.swap_out(request.request_id)
            self._swapped.appendleft(request)
            self.stats.swapped_out += 1
        else:
            self.kv_cache.free(request.request_id)
            self._waiting.appendleft(request)
            self.stats.recomputed += 1

    def _decodes(self, request: _Request) -> bool:
        """Whether all tokens that the cache knows of are computed: the newest token is to be appended."""
        return self._num_computed(request) == self.kv_cache.num_tokens(request.request_id)

    def _num_computed(self, request: _Request) -> int:
        return self.kv_cache.num_computed_tokens(request.request_id)

    def _take(self, request: _Request, token: int) -> NewToken:
        request.tokens.append(token)
        reason = None
        if token in request.stop:
            reason = "stop"
        elif len(request.tokens) - request.num_prompt == request.params.max_new_tokens:
            reason = "length"
        if reason is not None:
            self._stop(request)
            self.kv_cache.free(request.request_id)
        return NewToken(request.request_id, token, reason)

    def _batch(self, plan: _Plan) -> tuple[Batch, list[int]]:
        """The step as the metadata's builder takes it, and its token ids."""
        input_ids: list[int] = []
        computed: list[int] = []
        for request, num_tokens in plan:
            num_blocks = -(-self.kv_cache.num_tokens(request.request_id) // self.kv_cache.block_size)
            if num_blocks != request.num_blocks:
                self._tables[request.row, :num_blocks] = torch.tensor(self.kv_cache.block_ids(request.request_id))
                request.num_blocks = num_blocks
            start = self._num_computed(request)
            input_ids += request.tokens[start : start + num_tokens]
            computed.append(start)
        query_lens = torch.tensor([num_tokens for _, num_tokens in plan])
        return Batch(query_lens, torch.tensor(computed), self._tables[[request.row for request, _ in plan]]), input_ids


def _compile(step: ModelStep) -> ModelStep:
    """The step compiled, as a function with code of its own: the limit of recompiles is one for each code object, and
    the steps of all models would share it."""

    def run(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]) -> Tensor:
        return step(input_ids, metadata, last_rows, kv_caches)

    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True)


def _sample(logits: Tensor, requests: list[_Request], rows: list[int]) -> list[int]:
    """The next token of each request, from its row of ``logits [S, V]``."""
    if not rows:
        return []
    likeliest = logits.argmax(-1).tolist()
    tokens = [likeliest[row] for row in rows]
    for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
        if request.generator is not None:
            tokens[i] = int(sample_token(logits[row], request.params, request.generator))
    return tokens


def sample_token(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """One token, a scalar tensor, from ``logits [V]`` by temperature and top-p; draws V numbers from the generator."""
    probabilities = torch.softmax(logits.float() / params.temperature, -1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest token always stays
        probabilities = probabilities.index_fill(-1, order[before >= params.top_p], 0)
    # The first of V exponential clocks of these rates to ring is distributed as the probabilities are.
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(-1)


def _expect(condition: bool, argument: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {got}")
