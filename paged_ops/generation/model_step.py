"""The step of a model that a generation loop runs, and its runner: compiled, captured, with unchanged weights.

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import expect, flag, integers
from paged_ops.generation.sampling import try_draws
from paged_ops.graphs import DecodeGraphs, GraphMode, capture_sizes
from paged_ops.graphs.runner import expect_step, mode_on
from paged_ops.metadata import AttentionMetadata, Batch
from paged_ops.registry import apart_from_caller


class WeightsVersion(NamedTuple):
    """The version of a model's weights.

    ``place`` changes if weights are replaced, or other adapters become active: captured graphs would read the old ones.
    ``writes`` changes if they are written in place.
    """

    place: Hashable
    writes: int


class ModelStep(Protocol):
    """One step of a model: writes keys and values of the new tokens into the caches and returns logits.

    A step may have these attributes, which a loop then uses: ``max_model_len``, ``vocab_size`` (ids from there on are
    refused), ``stop_token_ids`` (the tokens that end a sequence by default), ``pad_token_id`` (to refuse padded
    prompts), ``prompts_see_ahead`` (if true, the loop refuses the step: it computes prompts in parts),
    ``batch_invariant`` (whether the bits of logits do not depend on the batch), ``check_kv_cache`` (a method that
    raises ValueError for a cache that does not fit the model), ``generation_fields`` (a
    :class:`paged_ops.generation.settings.Library`: the model's generation config, and makers of its processors) and
    ``weights_version`` (a method called before each step: it returns a hashable value that changes with the weights,
    best a :class:`WeightsVersion`, and raises ValueError if the model cannot run).
    """

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]`` of the rows ``last_rows`` (int64 ``[S]``) of ``input_ids`` (int64 ``[T]``).

        Tensors have the padded sizes T and S. Steps of equal sizes get the same tensors, so that a step can be compiled
        or captured. It must read no value on the host.
        """


class ModelRunner:
    """A model as a loop runs it: compiled, captured in graphs, with the weights that its requests began with.

    Args:
        step, kv_cache, compile, graph_mode, max_num_seqs, max_num_tokens, max_model_len: of the loop.

    Attributes:
        graphs: runs the steps.
        refuses_prompt_logprobs: why requests may not ask for them; "" if they may.
        is_warm: whether there is nothing left for :meth:`warm_up`.
    """

    def __init__(
        self,
        step: ModelStep,
        kv_cache: KVCache | HybridCache,
        compile: bool,
        graph_mode: GraphMode | str,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
    ) -> None:
        mode_on(kv_cache.device, "graph_mode", graph_mode)
        self._eager_step, self._kv_cache, self._max_model_len = step, kv_cache, max_model_len
        self._max_num_seqs = max_num_seqs
        self._weights_version: Callable[[], Hashable] = getattr(step, "weights_version", lambda: None)
        self._version: Hashable = None  # of the weights that compute the unfinished requests
        self._captured_place: Hashable = None  # the place of the weights that the captured graphs read
        self.graphs = DecodeGraphs(
            compile_step(step, kv_cache.states is not None) if flag("compile", compile) else step,
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            mode=graph_mode,
            # a step of one sequence would be compiled a second time
            seq_sizes=[size for size in capture_sizes(max_num_seqs) if size > 1] or None,
        )
        # steps with them run eagerly, and round otherwise
        mixed = compile and getattr(step, "batch_invariant", False)
        why = "a batch-invariant step is compiled here; compile its layers instead" if mixed else ""
        self.refuses_prompt_logprobs = why
        self.is_warm = not compile and self.graphs.mode is GraphMode.NONE

    @apart_from_caller
    def warm_up(self, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Compiles the step and all kernels, loads them, and captures graphs. ``on_capture`` is called with (sizes
        captured, sizes in all)."""
        self.graphs.compile_ahead(wait=False)
        # Eagerly first, so that the model's errors are not wrapped in the compiler's. In the loop's sizes, as compiled
        # layers would be compiled again for another width of the block tables.
        first = DecodeGraphs(
            self._eager_step,
            self._kv_cache,
            max_num_seqs=1,
            max_model_len=self._max_model_len,
            mode=GraphMode.NONE,
        )
        logits = first.run_padding()
        # The step is compiled while other processes compile kernels: nothing waits for these before.
        draws = try_draws(logits, self._max_num_seqs)
        place = _place(self._weights_version())
        self.graphs.capture(None if on_capture is None else lambda done, total, _: on_capture(done, total))
        draws()
        self._captured_place = place

    def run(self, batch: Batch, input_ids: list[int] | Tensor, more_rows: Sequence[int]) -> Tensor:
        """Logits of the last row of each sequence, then of ``more_rows``. Steps with more rows run eagerly."""
        if more_rows:
            return self.graphs.run_with_rows(self._eager_step, batch, input_ids, more_rows)
        return self.graphs.replay(batch, input_ids)

    def note_weights(self, has_requests: bool) -> Hashable:
        """Notes the weights that will compute new requests, which must be the weights of the unfinished ones.

        Returns their version if the keys of cached prefixes need it: keys without a version are of the weights that
        first used the cache.
        """
        version = self._weights_version()
        if version != self._version:
            _expect_weights(not has_requests)
            self._version = version
        cache = self._kv_cache
        if cache.weights_version is None:
            cache.weights_version = version
        return None if version == cache.weights_version else version

    def check_weights(self) -> None:
        """Expects the weights that were noted, and captures graphs again that would read others."""
        version = self._weights_version()
        _expect_weights(self._version in (None, version))  # None: reset after they were noted
        self._version = version
        # Not whether there are graphs now: an interrupted capture leaves some, or none.
        if self.graphs.mode is not GraphMode.NONE and self._captured_place != _place(version):
            self.warm_up()

    def forget_weights(self) -> None:
        """Lets the next requests use any weights."""
        self._version = None


def check_sizes(
    step: Any, kv_cache: KVCache | HybridCache, max_num_seqs: int, max_num_tokens: int, max_model_len: int | None
) -> tuple[int, int, int]:
    """Refuses a step, cache or sizes that do not fit each other. Returns the sizes, with the longest sequence."""
    if hasattr(step, "prepare_inputs_for_generation"):
        raise ValueError(
            f"step: expected a model whose attention is paged, got {type(step).__name__}; wrap it:"
            " PagedCausalLM(model), of paged_ops.integrations.transformers"
        )
    expect_step(step, kv_cache)
    expect(kv_cache.num_blocks >= 1, "num_blocks", "at least 1 in the cache", kv_cache.num_blocks)
    ahead = getattr(step, "prompts_see_ahead", False)
    expect(not ahead, "step", "a model of causal prompts (docs/models.md has steps for others)", "prefixes")
    check_kv_cache = getattr(step, "check_kv_cache", None)
    if check_kv_cache is not None:
        check_kv_cache(kv_cache)
    limit: int | None = getattr(step, "max_model_len", None)
    if max_model_len is None:
        max_model_len = min(kv_cache.max_seq_len, limit or kv_cache.num_blocks * kv_cache.block_size)
    sizes = integers(1, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len)
    max_num_seqs, max_num_tokens, max_model_len = sizes
    expect(limit is None or max_model_len <= limit, "max_model_len", f"at most the model's {limit}", max_model_len)
    expect(max_num_tokens >= max_num_seqs, "max_num_tokens", f"at least max_num_seqs = {max_num_seqs}", max_num_tokens)
    return max_num_seqs, max_num_tokens, max_model_len


def compile_step(step: ModelStep, keeps_state: bool) -> ModelStep:
    """The step compiled, as a function with code of its own: torch limits recompiles per code object, and all models
    would share that limit. With states only decodes are compiled; other steps run eagerly."""

    def run(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]) -> Tensor:
        return step(input_ids, metadata, last_rows, kv_caches)

    run.__code__ = run.__code__.replace()
    compiled: ModelStep = torch.compile(run, fullgraph=True)
    if not keeps_state:
        return compiled

    def choose(
        input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        chosen = compiled if metadata.max_query_len <= 1 and not metadata.begins_any else step
        return chosen(input_ids, metadata, last_rows, kv_caches)

    return choose


def _expect_weights(same: bool) -> None:
    kept = "weights and active adapters that stay while requests are unfinished (finish or abort them first)"
    expect(same, "model", kept, "changed ones")


def _place(version: Hashable) -> Hashable:
    return version.place if isinstance(version, WeightsVersion) else version
