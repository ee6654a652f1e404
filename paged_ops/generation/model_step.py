"""What a generation loop asks of a model, and how the model is compiled.

Letters: T tokens of a step (padded), S sequences (padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paged_ops.checks import expect
from paged_ops.metadata import AttentionMetadata


class WeightsVersion(NamedTuple):
    """The version of a model's weights.

    ``place`` changes if weights are replaced, or other adapters become active: captured graphs would read the old ones.
    ``writes`` changes if they are written where they are.
    """

    place: Hashable
    writes: int


class ModelStep(Protocol):
    """One step of a model: writes keys and values of the new tokens into the caches and returns logits.

    A step may have these attributes, which a loop then uses: ``max_model_len``, ``vocab_size`` (ids from there on are
    refused), ``stop_token_ids`` (the tokens that end a text by default), ``pad_token_id`` (to refuse padded prompts),
    ``prompts_see_ahead`` (if true, the loop refuses the step: it computes prompts in parts), ``check_kv_cache`` (a
    method that raises ValueError for a cache that does not fit the model), ``generation_fields`` (a
    :class:`paged_ops.generation.settings.Library`: the model's generation config, and what makes processors of it) and
    ``weights_version`` (a method called before each step: it returns what changes with the weights, hashable, best a
    :class:`WeightsVersion`, and raises ValueError if the model cannot run).
    """

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]`` of the rows ``last_rows`` (int64 ``[S]``) of ``input_ids`` (int64 ``[T]``).

        Tensors have the padded sizes T and S. Steps of equal sizes get the same tensors, so that a step can be compiled
        or captured. It must read no value on the host.
        """


def expect_step(step: Any) -> None:
    """Refuses what is no step, with a hint if it is a model of transformers that is not wrapped."""
    if hasattr(step, "prepare_inputs_for_generation"):
        raise ValueError(
            f"step: expected a model whose attention is paged, got {type(step).__name__}; wrap it:"
            " PagedCausalLM(model), of paged_ops.integrations.transformers"
        )
    expect(callable(step), "step", "a function (input_ids, metadata, last_rows, kv_caches) -> logits", step)


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
