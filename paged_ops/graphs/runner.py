"""The runner of a model's steps: captures a graph of each size, replays the smallest one that a batch fits.

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import (
    NotCopied,
    describe_setting,
    expect,
    flag,
    integers,
    is_integer,
    optional_function,
)
from paged_ops.graphs.capture import CaptureError, CaptureReport, CaptureSession, Graph
from paged_ops.graphs.inputs import (
    LEAST,
    OPEN_SEQS,
    OPEN_TOKENS,
    StepInputs,
    build_inputs,
    inputs_for_capture,
    inputs_of_open_sizes,
    inputs_of_padding,
    inputs_of_prompt,
    open_sizes,
    sizes_of,
    step_builder,
)
from paged_ops.graphs.modes import GraphKey, GraphMode, capture_sizes, choose_mode
from paged_ops.graphs.pieces import Pieces, check_pieces_exist
from paged_ops.lowerings.warm_up import Ahead, WarmUp, prepare, runs_kernels, without_kernels
from paged_ops.metadata import AttentionMetadata, Batch, GraphSupport, advance_decodes

Step = Callable[[Tensor, AttentionMetadata, Tensor, Sequence[Tensor]], Tensor]


@dataclass
class GraphStats:
    """Steps since the runner was made."""

    replays: Counter[GraphKey] = field(default_factory=Counter)
    plain: int = 0  # steps that fitted no graph
    tokens: int = 0  # of the replayed steps
    padded_tokens: int = 0  # replayed in addition to them

    @property
    def replayed(self) -> int:
        return sum(self.replays.values())

    @property
    def padding(self) -> float:
        """The share of the replayed tokens that was padding."""
        return self.padded_tokens / max(self.tokens + self.padded_tokens, 1)


def mode_on(device: torch.device, argument: str, mode: GraphMode | str) -> GraphMode:
    """The mode that an argument names, if the device can capture it."""
    known = mode in list(GraphMode)
    expect(known, argument, f"one of {', '.join(GraphMode)}", describe_setting(mode))
    runs = mode == GraphMode.NONE or Graph.runs_on(device)
    expect(runs, argument, f"NONE, as {device} has no graphs", str(mode))
    return GraphMode(mode)


def expect_step(step: Any, kv_cache: Any) -> None:
    """Refuses what is no step of a model, or no cache."""
    expect(callable(step), "step", "a function (input_ids, metadata, last_rows, kv_caches) -> logits", step)
    needed = "a KVCache or HybridCache, as PagedCausalLM.allocate_kv_cache makes"
    expect(hasattr(kv_cache, "layers"), "kv_cache", needed, kv_cache)


class DecodeGraphs(NotCopied):
    """Runs steps of a model, from captured graphs where a batch fits one.

    Args:
        step: ``step(input_ids [T], metadata, last_rows [S], kv_caches) -> logits [S, V]``
            (:class:`paged_ops.generation.ModelStep`), eager or compiled. It must read no value on the host. A
            decision that depends on integers of the metadata is made at capture.
        kv_cache: whose ``layers`` the step writes.
        max_num_seqs: most sequences of a step.
        max_num_tokens: most tokens of a step, by default max_num_seqs * query_len.
        max_model_len: longest sequence; by default what the cache can hold.
        mode: by default :func:`choose_mode`, and NONE where there are no graphs.
        graph_support: what the model's attention layers allow (this package's ops: ALWAYS). If the cache has
            states, only batches of one token per sequence are captured, and no sequence's first token.
        query_len: tokens per sequence of a decode batch, more than 1 for speculative verification.
        seq_sizes: sequences of the decode batches to capture; by default :func:`capture_sizes` up to max_num_seqs.
        token_sizes: tokens of the mixed batches to capture; by default to max_num_tokens, at most 512.
        cascade: capture each decode size a second time, for steps with a common prefix.
        sample: the next tokens ``[S]`` from the logits, on the device (``lambda logits: logits.argmax(-1)``). A
            step then ends with these in ``tokens``, and with its inputs advanced to the next step, so that
            :meth:`replay_next` is only a launch.

    Attributes:
        builder: the builder of the metadata.
        tokens: int64 ``[max_num_seqs]`` on the device: the newest tokens, with ``sample``.
        captured: the graphs, by the sizes that they serve.
        stats: what was replayed.

    Raises:
        ValueError: a size is not positive, or the mode needs more than graph_support or the device allow.
    """

    def __init__(
        self,
        step: Step,
        kv_cache: KVCache | HybridCache,
        *,
        max_num_seqs: int,
        max_num_tokens: int | None = None,
        max_model_len: int | None = None,
        mode: GraphMode | str | None = None,
        graph_support: GraphSupport = GraphSupport.ALWAYS,
        query_len: int = 1,
        seq_sizes: Iterable[int] | None = None,
        token_sizes: Iterable[int] | None = None,
        cascade: bool = False,
        sample: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        expect_step(step, kv_cache)
        optional_function("sample", sample)
        cascade = flag("cascade", cascade)
        max_num_seqs, query_len = integers(1, max_num_seqs=max_num_seqs, query_len=query_len)
        most = max_num_seqs * query_len
        if max_num_tokens is not None:
            (most,) = integers(1, max_num_tokens=max_num_tokens)
        expect(most >= max_num_seqs * query_len, "max_num_tokens", "at least max_num_seqs * query_len", most)
        expect(sample is None or query_len == 1, "sample", "none for a query_len above 1", sample)
        self._keeps_state = kv_cache.states is not None
        self._is_sharded = any(pool.shard.size > 1 for pool in kv_cache.pools)
        expect(not (self._is_sharded and cascade), "cascade", "none for a cache sharded over ranks", cascade)
        if self._keeps_state:  # only one token continues a state in a graph; chunks are the host's work
            graph_support = min(graph_support, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        if mode is None:
            mode = choose_mode(graph_support, query_len) if Graph.runs_on(kv_cache.device) else GraphMode.NONE
        self.mode = mode_on(kv_cache.device, "mode", mode)
        allowed = graph_support >= self.mode.needs(query_len)
        expect(allowed, "mode", f"one that graph_support = {graph_support!r} allows", self.mode)
        whole = not (self._keeps_state and self.mode.in_pieces)
        expect(whole, "mode", "NONE or FULL_DECODE_ONLY for a cache with states", self.mode)
        if self.mode.in_pieces:
            check_pieces_exist()
        if self.mode is not GraphMode.NONE:
            prepare()
        self.step = step
        self.kv_cache = kv_cache
        self.query_len = query_len
        self.cascade = cascade
        self.stats = GraphStats()
        capacity = min(kv_cache.max_seq_len, kv_cache.num_blocks * kv_cache.block_size)
        longest = capacity if max_model_len is None else integers(1, max_model_len=max_model_len)[0]
        self.builder = step_builder(kv_cache, max_num_seqs, most, longest, graph_support)
        with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
            self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=kv_cache.device)
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, most
        self._sample = sample
        self._advance = advance_decodes
        if sample is not None and kv_cache.device.type == "cuda":
            self._advance = torch.compile(advance_decodes, fullgraph=True, dynamic=True)
        wants_decodes = self.mode not in (GraphMode.NONE, GraphMode.PIECEWISE)
        wants_mixed = self.mode not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY)
        of_decodes = _sizes("seq_sizes", seq_sizes, max_num_seqs, max_num_seqs)
        of_mixed = _sizes("token_sizes", token_sizes, most, min(most, 512))
        self._seq_sizes = of_decodes if wants_decodes else []
        self._token_sizes = of_mixed if wants_mixed else []
        self.captured: dict[GraphKey, Graph | Pieces] = {}
        self._addresses = self._cache_addresses()
        self._last: tuple[GraphKey | None, StepInputs, int] | None = None
        self._ahead: Ahead | None = None  # what is being compiled for the next capture
        self._left = 0  # by how many steps the last batch may still be advanced

    def plan(self) -> list[GraphKey]:
        """The keys that :meth:`capture` captures, largest first."""
        keys = {GraphKey(S, S * self.query_len) for S in self._seq_sizes}
        if self.cascade:
            keys |= {key._replace(cascade=True) for key in keys}
        keys |= {self._mixed_key(T) for T in self._token_sizes}
        return sorted(keys, key=lambda key: (key.num_tokens, key), reverse=True)

    @torch.no_grad()
    def capture(
        self, on_progress: Callable[[int, int, GraphKey | None], None] | None = None, *, dynamic: bool = True
    ) -> CaptureReport:
        """Capture a graph of each size, the largest first, so that the smaller ones fit into its memory.

        The cache is not written: batches are padding, and a made-up prompt without slots. Call it again if the cache or
        the weights have moved.

        Args:
            on_progress: called with (sizes done, sizes in all, the size that comes next or None).
            dynamic: first run a step whose sizes are marked dynamic, so that one compilation serves all sizes. With
                False each size is compiled by itself: better code, more time.

        Raises:
            CaptureError: the step syncs with the host, or does work that a graph cannot hold.
            ValueError: the mode needs pieces, and the step has none.
        """
        started = time.perf_counter()
        keys = self.plan()
        self.captured.clear()
        self._last = None
        self._addresses = self._cache_addresses()
        ahead, self._ahead = self._ahead or self._compile_ahead(), None
        if dynamic:
            for S, T in open_sizes(self._max_num_seqs):
                self.run_padding(S, T)
        ahead.finish()
        if not keys:
            return CaptureReport((), 0, time.perf_counter() - started, 0)
        with CaptureSession(self.kv_cache.device) as session:
            for done, key in enumerate(keys):
                if on_progress is not None:
                    on_progress(done, len(keys), key)
                self.captured[key] = self._capture_one(key, session)
            if on_progress is not None:
                on_progress(len(keys), len(keys), None)
        graphs = sum(len(each) if isinstance(each, Pieces) else 1 for each in self.captured.values())
        return CaptureReport(tuple(keys), graphs, time.perf_counter() - started, session.num_bytes)

    def run_padding(self, S: int = OPEN_SEQS, T: int = OPEN_TOKENS) -> Tensor:
        """Run the step on padding, without attention and cache writes: only the step is compiled, for open sizes.
        Returns logits ``[S, V]``."""
        with without_kernels():
            if self._is_sharded:
                self._run_step(inputs_of_open_sizes(self.builder, False, S, T))
            return self._run_step(inputs_of_open_sizes(self.builder, True, S, T))

    def compile_ahead(self, wait: bool = True) -> WarmUp:
        """Compile the kernels of this package that steps need, of the sizes that :meth:`capture` captures and of all
        others that this runner takes: see :func:`paged_ops.warm_up`. The step is run on each kind of batch, eagerly.
        With ``wait`` False the next :meth:`capture` waits for the kernels."""
        ahead = self._compile_ahead()
        if wait:
            return ahead.finish()
        self._ahead = ahead
        return ahead.report()

    def _compile_ahead(self) -> Ahead:
        captured = [(key.num_tokens, key.num_reqs) for key in self.plan()]
        trials = self._trials() if runs_kernels(self.kv_cache.device) else []
        most = self._max_num_tokens + 1
        return Ahead(trials, sizes=captured, max_num_tokens=most, max_num_seqs=self._max_num_seqs)

    def _trials(self) -> Sequence[Callable[[], None]]:
        """Runs of the step that together call each op as later steps do: decodes, few and many rows, the first and the
        last chunk of a prompt."""
        copies = [pool.try_copies for pool in self.kv_cache.pools]
        if self._is_sharded:
            steps = [functools.partial(self._try, inputs_of_open_sizes, is_decode) for is_decode in (True, False)]
            return [*copies, *steps]
        most, longest = self._max_num_tokens, self.builder.max_blocks_per_seq * self.builder.block_size
        chunk = min(most, longest)
        kinds: list[tuple[Any, ...]] = [(inputs_of_open_sizes,)]
        kinds += [(inputs_of_padding, LEAST, T) for T in sorted({min(64, most), most})]
        kinds += [(inputs_of_prompt, chunk, computed) for computed in sorted({0, longest - chunk})]
        return [*(functools.partial(self._try, *kind) for kind in kinds), *copies]

    def _try(self, make: Callable[..., StepInputs], *sizes: Any) -> None:
        """A step whose result is dropped. Its errors are ignored, as the next step raises them again; not among ranks,
        where the others would wait for this one."""
        among_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        with (
            contextlib.nullcontext() if among_ranks else contextlib.suppress(Exception),
            torch.compiler.set_stance("force_eager"),
        ):
            self.step(*make(self.builder, *sizes), self.kv_cache.layers)

    @torch.no_grad()
    def replay(
        self, batch: Batch, input_ids: Sequence[int] | Tensor, *, common_prefix_len: int = 0, lookahead: int = 0
    ) -> Tensor:
        """Run a step: replay the smallest graph that it fits, padded; if there is none, run it without a graph.

        Args:
            batch: the step, as :meth:`AttentionMetadataBuilder.build` takes it.
            input_ids: its tokens, on the host or on the cache's device.
            common_prefix_len: tokens that all sequences share; they are read once if ``cascade`` was asked for.
            lookahead: how often :meth:`replay_next` may follow; the batch must have the blocks for these tokens.

        Returns:
            Logits ``[num_reqs, V]``. The logits of a replayed step lie in its graph's memory, and are valid until the
            next call.

        Raises:
            ValueError: the batch is wrong, or the cache has moved since capture.
        """
        expect(isinstance(batch, Batch), "batch", "a Batch", batch)
        expect(is_integer(lookahead), "lookahead", "an integer", describe_setting(lookahead))
        n, t = batch.num_reqs, batch.num_tokens
        common_prefix_len *= self.cascade
        is_advanced = lookahead > 0 and self._sample is not None and batch.is_uniform(1)
        key = self.find(batch, cascade=common_prefix_len > 0, is_advanced=is_advanced)
        S, T = sizes_of(batch, self.query_len) if key is None else key[:2]
        inputs = build_inputs(self.builder, batch, input_ids, S, T, common_prefix_len, lookahead)
        self._left = lookahead if is_advanced else 0
        self._last = key, inputs, n
        return self._run(key, inputs, n, t)

    @torch.no_grad()
    def run_with_rows(self, step: Step, batch: Batch, input_ids: Sequence[int] | Tensor, rows: Sequence[int]) -> Tensor:
        """Run ``step`` without a graph, for the logits of more rows than the last of each sequence.

        Args:
            batch, input_ids: as in :meth:`replay`.
            rows: of ``input_ids``.

        Returns:
            Logits ``[num_reqs + len(rows), V]``: the last rows' first.
        """
        n = batch.num_reqs
        inputs = build_inputs(self.builder, batch, input_ids, *sizes_of(batch, self.query_len))
        self._last, self._left = None, 0
        self.stats.plain += 1
        more = torch.tensor(rows, dtype=torch.int64, device="cpu").to(inputs.last_rows.device)
        last_rows = torch.cat((inputs.last_rows[:n], more))
        return step(inputs.input_ids, inputs.metadata, last_rows, self.kv_cache.layers)

    @torch.no_grad()
    def replay_next(self) -> Tensor:
        """Run the next step, with the tokens that the last one sampled: one launch, and no other work on the host.

        Raises:
            ValueError: no decode step was run before, the runner has no ``sample``, or the lookahead is used up.
        """
        enough = "a replay of a decode batch with a lookahead that is not used up, and a sample function"
        expect(self._last is not None and self._left > 0, "lookahead", enough, self._left)
        assert self._last is not None
        self._left -= 1
        key, inputs, n = self._last
        return self._run(key, inputs, n, n)

    def find(self, batch: Batch, cascade: bool = False, is_advanced: bool = False) -> GraphKey | None:
        """The smallest captured graph that the batch fits, or None.

        ``is_advanced``: :meth:`replay_next` will follow. A graph can be advanced if it has one token per sequence.
        """
        n, t = batch.num_reqs, batch.num_tokens
        is_decode = batch.is_uniform(self.query_len)
        if self._keeps_state and not bool((batch.num_computed_tokens > 0).all()):
            is_decode = False  # a graph continues the states of all sequences
        if is_decode:
            at = bisect.bisect_left(self._seq_sizes, n)
            if at < len(self._seq_sizes):
                S = self._seq_sizes[at]
                return self._if_captured(GraphKey(S, S * self.query_len, cascade))
        at = bisect.bisect_left(self._token_sizes, max(n, t))
        if cascade or at == len(self._token_sizes):
            return None
        key = self._mixed_key(self._token_sizes[at])
        if key.num_reqs < n or (is_advanced and key.num_reqs != key.num_tokens):
            return None
        return self._if_captured(key)

    def _if_captured(self, key: GraphKey) -> GraphKey | None:
        return key if key in self.captured else None

    def _mixed_key(self, T: int) -> GraphKey:
        return GraphKey(min(T, self._max_num_seqs), T, in_pieces=self.mode.in_pieces)

    def _run(self, key: GraphKey | None, inputs: StepInputs, n: int, t: int) -> Tensor:
        if key is None:
            self.stats.plain += 1
            return self._run_step(inputs)[:n]
        addresses = self._cache_addresses()
        if addresses != self._addresses:
            moved = [i for i, (old, new) in enumerate(zip(self._addresses, addresses, strict=False)) if old != new]
            expect(False, "kv_cache", "the layers that were captured", f"others at {moved}: capture again")
        self.stats.replays[key] += 1
        self.stats.tokens += t
        self.stats.padded_tokens += key.num_tokens - t
        captured = self.captured[key]
        if isinstance(captured, Pieces):
            with captured.replaying():
                return self._run_step(inputs)[:n]
        logits = captured.replay()
        return logits if n == key.num_reqs else logits[:n]

    def _run_step(self, inputs: StepInputs) -> Tensor:
        logits = self.step(*inputs, self.kv_cache.layers)
        if self._sample is not None:
            S, T = len(inputs.last_rows), len(inputs.input_ids)
            newest = self._sample(logits)
            self.tokens[:S].copy_(newest[: len(self.tokens)])
            if S == T:
                inputs.input_ids.copy_(newest)
                self._advance(inputs.metadata, self.kv_cache.block_size)
        return logits

    def _capture_one(self, key: GraphKey, session: CaptureSession) -> Graph | Pieces:
        uniform = key.num_tokens == key.num_reqs * self.query_len and not key.in_pieces
        inputs = inputs_for_capture(self.builder, key, self.query_len if uniform else 0)
        run = functools.partial(self._run_step, inputs)
        run()  # compiles, and allocates what is kept
        try:
            with session.sync_is_error():
                run()
            if not key.in_pieces:
                graph = Graph(session)
                graph.capture(run)
                return graph
            pieces = Pieces(session)
            with pieces.observing():
                run()
            with pieces.capturing():
                run()
        except RuntimeError as error:
            raise CaptureError(
                f"step: expected only work that a graph can hold (no host sync, no unpinned copy), but at"
                f" {key.num_reqs} sequences and {key.num_tokens} tokens it fails: {error}"
            ) from error
        expect(len(pieces) > 0, "step", "one from compile_pieces in the piecewise modes", "one without pieces")
        return pieces

    def _cache_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.kv_cache.layers))


def _sizes(argument: str, given: Any, limit: int, largest: int) -> list[int]:
    if given is None:
        return capture_sizes(largest)
    sizes = list(given) if isinstance(given, Iterable) else [given]
    fit = isinstance(given, Iterable) and all(is_integer(size, 1) and size <= limit for size in sizes)
    expect(fit, argument, f"sizes in 1..{limit}", sizes)
    return sorted(set(map(int, sizes)))
