"""Steps of a model captured in CUDA (HIP) graphs, and replayed for every batch that fits.

A captured step reads its batch from tensors that never move, so replaying it costs one launch. That needs no knowledge
of the model: :class:`DecodeGraphs` takes any callable step, eager or compiled, that reads no value on the host. The
attention ops balance their work on the device, so one graph is right and fast for all lengths.

::

    graphs = DecodeGraphs(step, kv_cache, max_num_seqs=64, sample=lambda logits: logits.argmax(-1))
    print(graphs.capture())
    logits = graphs.replay(batch, input_ids, lookahead=8)  # pads to the next captured size
    logits = graphs.replay_next()  # one more token for each sequence: nothing but a launch, up to 8 times

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary, B tokens a block.

Sources of the ideas: capture sizes, one memory pool for all of them and graphs of the pieces between attention are
vLLM's; graphs without a copy of their result come from inductor's CUDA graph trees.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import enum
import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.cache import KVCache
from paged_ops.checks import expect
from paged_ops.hybrid import HybridCache
from paged_ops.metadata import AttentionMetadata, AttentionMetadataBuilder, Batch, GraphSupport, advance_decodes

Step = Callable[[Tensor, AttentionMetadata, Tensor, Sequence[Tensor]], Tensor]


class GraphMode(str, enum.Enum):
    """What is captured. A *decode* batch has the same few tokens for each sequence, a *mixed* one anything."""

    NONE = "NONE"  # nothing
    PIECEWISE = "PIECEWISE"  # of any batch, the pieces between attention ops
    FULL = "FULL"  # any batch, whole
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"  # decode batches whole, mixed ones not at all
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"  # decode batches whole, mixed ones in pieces

    __str__ = str.__str__

    def needs(self, query_len: int = 1) -> GraphSupport:
        """The least support by the attention layers, for decode batches of ``query_len`` tokens a sequence."""
        if self is GraphMode.FULL:
            return GraphSupport.ALWAYS
        if self in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE):
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else GraphSupport.UNIFORM_BATCH
        return GraphSupport.NEVER

    @property
    def in_pieces(self) -> bool:
        return self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)


def choose_mode(support: GraphSupport, query_len: int = 1) -> GraphMode:
    """The mode that captures most of what the attention layers allow, of a step compiled in any way or not at all.

    ``FULL`` for ALWAYS, ``FULL_DECODE_ONLY`` for a level that allows decodes of ``query_len`` tokens, else ``NONE``.
    The piecewise modes ask for a step from :func:`compile_pieces`, so they are chosen by name.
    """
    for mode in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY):
        if support >= mode.needs(query_len):
            return mode
    return GraphMode.NONE


def capture_sizes(largest: int) -> list[int]:
    """The sizes to capture up to ``largest``: 1, 2, 4, then by 8 to 256, then by 16; ``largest`` itself always."""
    expect(largest >= 1, "largest", "1 or more", largest)
    sizes = itertools.chain((1, 2, 4), range(8, 257, 8), range(272, largest, 16))
    return [*(size for size in sizes if size < largest), largest]


class CaptureError(RuntimeError):
    """A step that a graph cannot hold: the cause says what it did."""


class GraphKey(NamedTuple):
    """What one captured step serves."""

    num_reqs: int  # S
    num_tokens: int  # T
    cascade: bool = False
    in_pieces: bool = False


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a step, views of buffers that never move: equal sizes give the same tensors."""

    input_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata
    last_rows: Tensor  # int64 [S]: the last row of each sequence in input_ids


@dataclass(frozen=True)
class CaptureReport:
    """What :meth:`DecodeGraphs.capture` did."""

    keys: tuple[GraphKey, ...]
    graphs: int  # more than keys in the piecewise modes
    seconds: float  # compilation included
    num_bytes: int  # of device memory, workspaces and code included; what other processes take or free meanwhile, too

    def __str__(self) -> str:
        sizes = ", ".join(str(key.num_tokens) for key in sorted(self.keys))
        return (
            f"{self.graphs} graphs for {len(self.keys)} sizes ({sizes}) in {self.seconds:.1f} s,"
            f" {self.num_bytes / 2**20:.0f} MiB"
        )


@dataclass
class GraphStats:
    """Steps since the runner was made."""

    replays: Counter[GraphKey] = field(default_factory=Counter)
    plain: int = 0  # steps that fitted no graph
    tokens: int = 0  # of the replayed steps
    padded_tokens: int = 0  # replayed on top of them

    @property
    def replayed(self) -> int:
        return sum(self.replays.values())

    @property
    def padding(self) -> float:
        """The part of the replayed tokens that was padding."""
        return self.padded_tokens / max(self.tokens + self.padded_tokens, 1)


class DecodeGraphs:
    """Runs steps of a model, from captured graphs where a batch fits one.

    Args:
        step: ``step(input_ids [T], metadata, last_rows [S], kv_caches) -> logits [S, V]``
            (:class:`paged_ops.generation.ModelStep`), eager or compiled. It may read no value on the host, and what it
            decides by Python numbers of the metadata is decided at capture.
        kv_cache: whose ``layers`` the step writes.
        max_num_seqs: most sequences of a step.
        max_num_tokens: most tokens of a step, by default max_num_seqs * query_len.
        max_model_len: longest sequence; by default what the cache can hold.
        mode: by default :func:`choose_mode`, and NONE where there are no graphs.
        graph_support: what the model's attention layers allow (this package's ops: ALWAYS). With states in the cache,
            batches of one token for each sequence alone are captured, none of them its first.
        query_len: tokens a sequence of a decode batch, more than 1 for speculative verification.
        seq_sizes: sequences of the decode batches to capture; by default :func:`capture_sizes` up to max_num_seqs.
        token_sizes: tokens of the mixed batches to capture; by default to max_num_tokens, at most 512.
        cascade: capture each decode size a second time, for steps with a common prefix.
        sample: the next tokens ``[S]`` from the logits, on the device (``lambda logits: logits.argmax(-1)``). Then a
            step ends with them in ``tokens`` and with its inputs made those of the next step, so that
            :meth:`replay_next` is only a launch.

    Attributes:
        builder: of the metadata.
        tokens: int64 ``[max_num_seqs]`` on the device: the newest tokens, with ``sample``.
        captured: the graphs by what they serve.
        stats: what was replayed.

    Raises:
        ValueError: a size is not positive, the mode asks for more than graph_support or the device allow.
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
        expect(max_num_seqs >= 1, "max_num_seqs", "1 or more", max_num_seqs)
        expect(query_len >= 1, "query_len", "1 or more", query_len)
        most = max_num_seqs * query_len if max_num_tokens is None else max_num_tokens
        expect(most >= max_num_seqs * query_len, "max_num_tokens", "at least max_num_seqs * query_len", most)
        expect(sample is None or query_len == 1, "sample", "none for a query_len above 1", sample)
        self._keeps_state = kv_cache.states is not None
        if self._keeps_state:  # a state is taken up by one token, or by a chunk that the host knows
            graph_support = min(graph_support, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        if mode is None:
            mode = choose_mode(graph_support, query_len) if Graph.runs_on(kv_cache.device) else GraphMode.NONE
        self.mode = GraphMode(mode)
        runs = self.mode is GraphMode.NONE or Graph.runs_on(kv_cache.device)
        expect(runs, "mode", f"NONE, as {kv_cache.device} has no graphs", self.mode)
        allowed = graph_support >= self.mode.needs(query_len)
        expect(allowed, "mode", f"one that graph_support = {graph_support!r} allows", self.mode)
        whole = not (self._keeps_state and self.mode.in_pieces)
        expect(whole, "mode", "NONE or FULL_DECODE_ONLY for a cache with states", self.mode)
        if self.mode.in_pieces:
            check_pieces_exist()
        self.step = step
        self.kv_cache = kv_cache
        self.query_len = query_len
        self.cascade = cascade
        self.stats = GraphStats()
        capacity = min(kv_cache.max_seq_len, kv_cache.num_blocks * kv_cache.block_size)
        self._inputs = InputBuffers(kv_cache, max_num_seqs, most, max_model_len or capacity, graph_support)
        self.builder = self._inputs.builder
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=kv_cache.device)
        self._max_num_seqs = max_num_seqs
        self._sample = sample
        self._advance = advance_decodes
        if sample is not None and kv_cache.device.type == "cuda":
            self._advance = torch.compile(advance_decodes, fullgraph=True, dynamic=True)
        wants_decodes = self.mode not in (GraphMode.NONE, GraphMode.PIECEWISE)
        wants_mixed = self.mode not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY)
        self._seq_sizes = _sizes("seq_sizes", seq_sizes, max_num_seqs, max_num_seqs) if wants_decodes else []
        self._token_sizes = _sizes("token_sizes", token_sizes, most, min(most, 512)) if wants_mixed else []
        self.captured: dict[GraphKey, Graph | Pieces] = {}
        self._addresses = self._cache_addresses()
        self._last: tuple[GraphKey | None, StepInputs, int] | None = None
        self._left = 0  # steps by which the last batch may still be advanced

    def plan(self) -> list[GraphKey]:
        """What :meth:`capture` captures, largest first."""
        keys = {GraphKey(S, S * self.query_len) for S in self._seq_sizes}
        if self.cascade:
            keys |= {key._replace(cascade=True) for key in keys}
        keys |= {self._mixed_key(T) for T in self._token_sizes}
        return sorted(keys, key=lambda key: (key.num_tokens, key), reverse=True)

    @torch.no_grad()
    def capture(
        self, on_progress: Callable[[int, int, GraphKey | None], None] | None = None, *, dynamic: bool = True
    ) -> CaptureReport:
        """Capture a graph of each size, the largest first, so that the smaller ones find room in its memory.

        The cache is neither read nor written: the batches are all padding. Call it again after the cache or weights
        moved.

        Args:
            on_progress: called with (sizes done, sizes in all, the size that comes next or None).
            dynamic: first run a step whose sizes a compiler is told to leave open, so that one compilation serves all.
                False lets each size be compiled by itself: better code, more time.

        Raises:
            CaptureError: the step syncs with the host, or does what a graph cannot hold.
            ValueError: the mode wants pieces, and the step has none.
        """
        started = time.perf_counter()
        keys = self.plan()
        self.captured.clear()
        self._last = None
        self._addresses = self._cache_addresses()
        if dynamic:
            self._run_step(self._inputs.of_open_sizes())
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

    @torch.no_grad()
    def replay(
        self, batch: Batch, input_ids: Sequence[int] | Tensor, *, common_prefix_len: int = 0, lookahead: int = 0
    ) -> Tensor:
        """Run a step: replay the smallest graph that it fits, padded, or else run it as it is.

        Args:
            batch: the step, as :meth:`AttentionMetadataBuilder.build` takes it.
            input_ids: its tokens, on the host or on the cache's device.
            common_prefix_len: tokens that all sequences share; read once where ``cascade`` was asked for.
            lookahead: how often :meth:`replay_next` may follow; the blocks for so many tokens must be in the batch.

        Returns:
            Logits ``[num_reqs, V]``. Those of a replayed step lie in its graph's memory: they are valid until the next
            call.

        Raises:
            ValueError: the batch is wrong, or the cache has moved since capture.
        """
        n, t = batch.num_reqs, batch.num_tokens
        common_prefix_len *= self.cascade
        is_advanced = lookahead > 0 and self._sample is not None and bool((batch.query_lens == 1).all())
        key = self.find(batch, cascade=common_prefix_len > 0, is_advanced=is_advanced)
        S, T = (max(n, self._inputs.LEAST), max(t, self._inputs.LEAST)) if key is None else key[:2]
        inputs = self._inputs.fill(batch, input_ids, S, T, common_prefix_len, lookahead)
        self._left = lookahead if is_advanced else 0
        self._last = key, inputs, n
        return self._run(key, inputs, n, t)

    @torch.no_grad()
    def replay_next(self) -> Tensor:
        """Run the step after the last one, with the tokens that it sampled: one launch, no other work on the host.

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

        ``is_advanced``: decodes that :meth:`replay_next` follows. A graph advances them if it has a token for each of
        its sequences.
        """
        n, t = batch.num_reqs, batch.num_tokens
        is_decode = bool((batch.query_lens == self.query_len).all())
        if self._keeps_state and not bool((batch.num_computed_tokens > 0).all()):
            is_decode = False  # a graph takes up the states of all
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
        return captured.replay()[:n]

    def _run_step(self, inputs: StepInputs) -> Tensor:
        logits = self.step(inputs.input_ids, inputs.metadata, inputs.last_rows, self.kv_cache.layers)
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
        inputs = self._inputs.for_capture(key, self.query_len if uniform else 0)
        run = functools.partial(self._run_step, inputs)
        run()  # compiles, and allocates what stays
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
        return [layer.data_ptr() for layer in self.kv_cache.layers]


class InputBuffers:
    """Where the inputs of all steps lie: the metadata's builder, and one allocation of token ids and last rows.

    Args:
        kv_cache: for its device and sizes.
        max_num_seqs, max_num_tokens, max_model_len: the largest step.
        graph_support: of the metadata's builder.
    """

    # Dimensions of size 0 and 1 would compile graphs of their own.
    LEAST = 2
    # Sizes of the step that leaves them open, and the least of the buffers that they are views of: numbers that are
    # nobody else's, or a compiler would take them for the same.
    OPEN_SEQS, OPEN_TOKENS = 3, 7
    LEAST_SEQS, LEAST_TOKENS = 5, 11

    def __init__(
        self,
        kv_cache: KVCache | HybridCache,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        graph_support: GraphSupport = GraphSupport.ALWAYS,
    ) -> None:
        seqs, tokens = max(max_num_seqs, self.LEAST_SEQS), max(max_num_tokens, self.LEAST_TOKENS)
        self.builder = AttentionMetadataBuilder(
            kv_cache.block_size,
            seqs,
            tokens,
            -(-max_model_len // kv_cache.block_size),
            kv_cache.device,
            num_blocks=[pool.num_blocks for pool in kv_cache.pools],
            num_state_rows=0 if kv_cache.states is None else len(kv_cache.states.tensors[0]),
            graph_support=graph_support,
        )
        self._seqs = seqs
        # last rows, then ids: what a step uses of both is sent in one copy
        self._device = torch.zeros(seqs + tokens, dtype=torch.int64, device=kv_cache.device)
        on_gpu = kv_cache.device.type == "cuda"
        self._hosts = itertools.cycle([_Host(self._device, on_gpu) for _ in range(2 if on_gpu else 1)])
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fill(
        self,
        batch: Batch,
        input_ids: Sequence[int] | Tensor,
        S: int,
        T: int,
        common_prefix_len: int = 0,
        lookahead: int = 0,
    ) -> StepInputs:
        """A step padded to S sequences and T tokens. Padding ids are 0, or those of an earlier step."""
        t = batch.num_tokens
        expect(len(input_ids) == t, "input_ids", f"the {t} tokens of the batch", len(input_ids))
        metadata = self.builder.build(common_prefix_len, batch, num_reqs=S, num_tokens=T, lookahead=lookahead)
        host = next(self._hosts)
        numbers = host.wait()
        torch.sub(metadata.query_start_loc_cpu[1:], 1, out=numbers[:S]).clamp_(min=0)
        start = self._seqs
        if isinstance(input_ids, Tensor) and input_ids.device == self._device.device:
            self._device[start : start + t].copy_(input_ids)
            host.send(S)
        else:
            numbers[start : start + t] = torch.as_tensor(input_ids, device="cpu")
            numbers[start + t : start + T] = 0
            host.send(start + T)
        return self._step(S, T, metadata)

    def for_capture(self, key: GraphKey, query_len: int) -> StepInputs:
        """A step of padding alone: of ``query_len`` tokens a sequence, or, if that is 0, of any mixture."""
        self._device.zero_()
        if query_len:
            metadata = self.builder.build_for_capture(key.num_reqs, query_len, cascade=key.cascade)
        else:
            metadata = self.builder.build(0, self._nothing(), num_reqs=key.num_reqs, num_tokens=key.num_tokens)
        return self._step(key.num_reqs, key.num_tokens, metadata)

    def of_open_sizes(self) -> StepInputs:
        """A step without sequences whose sizes a compiler is told to leave open: one compilation then serves all."""
        self._device.zero_()
        S, T = self.OPEN_SEQS, self.OPEN_TOKENS
        inputs = self._step(S, T, self.builder.build(0, self._nothing(), num_reqs=S, num_tokens=T))
        metadata = inputs.metadata
        tensors = [
            inputs.input_ids,
            inputs.last_rows,
            metadata.positions,
            metadata.slot_mapping,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.block_tables,
        ]
        for pool in metadata.other_pools or ():
            tensors += [pool.block_tables, pool.slot_mapping]
        if metadata.state_slots is not None:
            tensors.append(metadata.state_slots)
            metadata.max_query_len = 1  # the only steps that are compiled with states
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        return inputs

    def _nothing(self) -> Batch:
        """A step of no sequences."""
        nothing: list[list[int]] = []
        return Batch([], [], [], other_block_ids=[nothing] * (len(self.builder.num_blocks) - 1))

    def _step(self, S: int, T: int, metadata: AttentionMetadata) -> StepInputs:
        if (S, T) not in self._views:
            if len(self._views) >= 1024:
                self._views.clear()
            self._views[S, T] = self._device[self._seqs : self._seqs + T], self._device[:S]
        input_ids, last_rows = self._views[S, T]
        return StepInputs(input_ids, metadata, last_rows)


class _Host:
    """A pinned copy of numbers on their way to the device, and the event after which it may be written again."""

    def __init__(self, device: Tensor, on_gpu: bool) -> None:
        self._target = device
        self._numbers = device
        if on_gpu:
            self._numbers = torch.zeros(device.shape, dtype=device.dtype, device="cpu", pin_memory=True)
        self._event = torch.cuda.Event() if on_gpu else None

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers

    def send(self, count: int) -> None:
        if self._event is not None:
            self._target[:count].copy_(self._numbers[:count], non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._target.device))


class CaptureSession:
    """What the graphs of one capture share: a memory pool and a stream. Measures the memory they take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def __enter__(self) -> CaptureSession:
        torch.cuda.synchronize(self.device)
        self._stack = contextlib.ExitStack()
        # Freeing a tensor that a cycle kept alive would break a capture: once now, and not in between.
        gc.collect()
        if gc.isenabled():
            gc.disable()
            self._stack.callback(gc.enable)
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info(self.device)[0]
        self._reserved = torch.cuda.memory_reserved(self.device)
        self._stack.enter_context(torch.cuda.device(self.device))
        self._stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device) - self._reserved
        # The allocator does not know of code; the device's number shrinks where another process frees memory meanwhile.
        self.num_bytes = max(self._free - torch.cuda.mem_get_info(self.device)[0], reserved, 0)

    @contextlib.contextmanager
    def sync_is_error(self) -> Iterator[None]:
        """A sync of the host raises: with a clearer message and less harm than during capture."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Graph:
    """A captured function and where its result lies."""

    def __init__(self, session: CaptureSession) -> None:
        self._pool = session.pool
        self._graph = torch.cuda.CUDAGraph()
        self._result: Any = None

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return device.type == "cuda"

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record what the function launches and return its result, whose memory is this graph's from now on."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is lost, and the error above says why
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        # Only an alias stays: the next graph of the pool may use this memory, as one step is replayed at a time.
        self._result = torch.utils._pytree.tree_map_only(Tensor, _alias, result)
        return result

    def replay(self) -> Any:
        """Launch it; the result is overwritten by the next replay of any graph of the pool."""
        self._graph.replay()
        return self._result


class Pieces:
    """The graphs of one step of one size, in the order in which the step calls its pieces.

    The same compiled code may be called many times (once a layer): each call has a graph of its own. An input of a
    piece either lives longer than the step (weights, caches, inputs of the step), or comes from an earlier piece, and
    then lies at the same address at every replay; or it was made by an op between the pieces (attention), and is copied
    to where it lay at capture.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._graphs: list[tuple[Graph, list[tuple[int, Tensor]]]] = []
        self._inputs: list[list[Any]] = []  # weak references to the storages, by call
        self._results: set[int] = set()  # addresses of storages that pieces returned
        self._room: dict[Any, Tensor] = {}
        self._call: Callable[[Callable[[list[Any]], Any], list[Any]], Any] = self._observe
        self._turn = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Within it the step runs as it is, and what its pieces are given is noted."""
        return self._as(self._observe)

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Within it each piece is captured, and replayed at once, so that the ops between them see its results."""
        return self._as(self._capture)

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        return self._as(self._replay)

    def __call__(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        result = self._call(function, args)
        self._turn += 1
        return result

    @contextlib.contextmanager
    def _as(self, call: Callable[[Callable[[list[Any]], Any], list[Any]], Any]) -> Iterator[None]:
        self._call, self._turn = call, 0
        token = _pieces.set(self)
        try:
            yield
        finally:
            _pieces.reset(token)

    def _observe(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._inputs.append([StorageWeakRef(arg.untyped_storage()) if _on_gpu(arg) else None for arg in args])
        return function(args)

    def _capture(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        copies: list[tuple[int, Tensor]] = []
        for i, (arg, storage) in enumerate(zip(args, self._inputs[self._turn], strict=True)):
            moves = storage is not None and storage.expired()
            if moves and arg.untyped_storage().data_ptr() not in self._results:
                alike = sum(room.shape == arg.shape for _, room in copies)
                kind = arg.shape, arg.stride(), arg.dtype, arg.device, alike
                if kind not in self._room:
                    self._room[kind] = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
                copies.append((i, self._room[kind]))
                args[i] = self._room[kind].copy_(arg)
        graph = Graph(self._session)
        result = graph.capture(lambda: function(list(args)))  # the function empties its list
        graph.replay()
        leaves = torch.utils._pytree.tree_leaves(result)
        self._results |= {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
        self._graphs.append((graph, copies))
        return result

    def _replay(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        graph, copies = self._graphs[self._turn]
        for i, room in copies:
            room.copy_(args[i])
        args.clear()
        return graph.replay()


_pieces: contextvars.ContextVar[Pieces | None] = contextvars.ContextVar("paged_ops.graphs.pieces", default=None)

# What stays outside the pieces.
ATTENTION_OPS = ["paged_ops::paged_attention", "paged_ops::paged_attention_with_lse", "paged_ops::cascade_attention"]


def check_pieces_exist() -> None:
    """Raises NotImplementedError where inductor cannot partition a graph at custom ops."""
    from torch._inductor import config, utils

    if not (hasattr(config, "custom_should_partition_ops") and hasattr(utils, "set_customized_partition_wrappers")):
        raise NotImplementedError(
            f"mode: expected torch 2.10 or newer for the piecewise modes, got {torch.__version__}"
        )


def compile_pieces(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """``torch.compile(fullgraph=True)`` by inductor, in pieces between the attention ops that can be captured.

    Outside a runner in a piecewise mode it runs as any compiled function. A model may be compiled as a whole or layer
    by layer.

    Raises:
        NotImplementedError: before torch 2.10.
    """
    check_pieces_exist()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=_inductor_in_pieces)


def _inductor_in_pieces(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor import utils
    from torch._inductor.compile_fx import compile_fx

    before = utils._unstable_customized_partition_wrapper.wrapper
    utils.set_customized_partition_wrappers(_wrap_piece)
    try:
        patches = {"graph_partition": True, "custom_should_partition_ops": ATTENTION_OPS}
        return compile_fx(module, inputs, config_patches=patches)
    finally:
        utils._unstable_customized_partition_wrapper.wrapper = before


def _wrap_piece(function: Callable[[list[Any]], Any], metadata: object) -> Callable[[list[Any]], Any]:
    def piece(args: list[Any]) -> Any:
        pieces = _pieces.get()
        return function(args) if pieces is None else pieces(function, args)

    return piece


class _Memory:
    """A tensor's memory, without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that does not own it."""
    if not (_on_gpu(tensor) and tensor.numel()):
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


def _on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _sizes(argument: str, given: Iterable[int] | None, limit: int, largest: int) -> list[int]:
    sizes = capture_sizes(largest) if given is None else sorted(set(given))
    expect(all(1 <= size <= limit for size in sizes), argument, f"sizes in 1..{limit}", sizes)
    return sizes
