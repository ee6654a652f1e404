"""The attention function for transformers: writes the new keys and values into a paged cache, and attends.

Importing this module registers it as the attention implementation ``"paged_ops"``.

Letters: T tokens of the batch, H query heads, K key/value heads, D head size, Dv value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from paged_ops.integrations.transformers import indexers, latent
from paged_ops.integrations.transformers.probe import Index, NoArgumentsError, Probe, request_mask
from paged_ops.integrations.transformers.wrapping import NAME, UNDO, LayerCaches
from paged_ops.layouts import split_joined_cache, split_kv_cache
from paged_ops.metadata import AttentionMetadata
from paged_ops.ops import paged_attention, reshape_and_cache
from paged_ops.parallel.context import attend, context_of

PROBE = "paged_ops_probe"  # the implementation during wrapping, when masks are examined


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_caches: Sequence[Tensor] | LayerCaches | Probe | None = None,
    attention_metadata: AttentionMetadata | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    position_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    indices: Index | Tensor | None = None,
    block_indices: Index | Tensor | None = None,
    given_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, as transformers calls it: write the new keys and values, then attend.

    Args:
        module: the layer; :class:`PagedCausalLM` stored its cache index and its window or chunk on it.
        query: ``[1, H, T, D]``.
        key: ``[1, K, T, D]``.
        value: ``[1, K, T, Dv]``.
        kv_caches: one tensor per layer, as in ``KVCache.layers``.
        attention_metadata: the metadata of the step.
        scaling: by default ``D ** -0.5``.
        sliding_window: ignored: the window comes from the model's mask, examined when the model was wrapped.
        softcap, s_aux: soft cap of the logits, sinks ``[H]``; None is off.
        indices, block_indices: of a layer with an indexer its result, of a layer that shares it the selected keys;
            None, or none per token, is all.
        given_mask: the mask that the layer got, if its code makes another one of it.

    Returns:
        ``[1, T, H, Dv]``, and no attention weights but the selected keys ``[T, G, k]``, if keys are selected.

    Raises:
        ValueError: a paged cache cannot serve the call: masks, dropout, attention weights, non-causal attention.
    """
    if kv_caches is None or attention_metadata is None:
        if _implementation(module) == PROBE:
            raise NoArgumentsError(module)
        raise ValueError(
            "attention_metadata: expected one, and kv_caches, as arguments of forward, got none; run the model through"
            f" PagedCausalLM, or {UNDO}"
        )
    if is_causal is None:  # PaliGemma's masks are right, its layers' attribute is not; wrapping checked them
        is_checked = not isinstance(kv_caches, Probe) or kv_caches.masks_by_type
        is_causal = is_checked or getattr(module, "is_causal", True)
    refused = {
        "attention_mask": not (attention_mask is None or _is_empty(attention_mask) or isinstance(kv_caches, Probe)),
        "dropout": bool(dropout),
        "output_attentions": bool(output_attentions),
        "position_bias": position_bias is not None,
        "is_causal=False": not is_causal,
    }
    for name, given in refused.items():
        if given:
            raise ValueError(f"{name}: expected none with paged attention, which is causal, and got it; leave it out")
    if query.shape[0] != 1:
        raise ValueError(f"query: expected the batch as one row [1, H, T, D], got {list(query.shape)}")
    selected = block_indices if indices is None else indices
    if isinstance(selected, Tensor) and not selected.shape[-1]:
        selected = None
    if isinstance(kv_caches, Probe):
        mask = attention_mask if given_mask is None else given_mask
        noted, kv_cache = kv_caches.attend(module, key, value, mask, selected)
    else:
        if not hasattr(module, "paged_attending"):
            raise ValueError(
                f"model: expected a layer that attended when the model was wrapped, got {type(module).__name__}; wrap"
                " the model by PagedCausalLM again"
            )
        noted = module.paged_attending
        kv_cache = kv_caches.caches[noted.place] if isinstance(kv_caches, LayerCaches) else kv_caches[noted.cache]
    pool = attention_metadata.pool(noted.pool if attention_metadata.other_pools else 0)
    if isinstance(selected, Index):
        assert noted.index_cache is not None, "the probe run allocated one"
        if isinstance(kv_caches, LayerCaches):
            index_cache = kv_caches.caches[noted.place + 1]
        else:
            index_cache = (kv_caches.caches if isinstance(kv_caches, Probe) else kv_caches)[noted.index_cache]
        selected = indexers.select(module, selected, index_cache, pool, attention_metadata)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    features: dict[str, Any] = {
        "sliding_window": noted.window,
        "attention_chunk": noted.chunk,
        "soft_cap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
        "bidirectional_ranges": attention_metadata.bidirectional_ranges,
    }
    if alibi_slopes is not None:
        features["alibi_slopes"] = alibi_slopes
    if noted.batch_invariant:
        features["batch_invariant"] = True
    if selected is not None:
        features.update(selected_keys=selected, selected_block_size=indexers.block_size_of(module))
    starts = attention_metadata.query_start_loc
    if noted.latent:
        step = pool, attention_metadata, scale
        return latent.attend(module, query, key, value, kv_cache, *step, writes=noted.writes, **features), selected
    rows_of_query, rows_of_key, rows_of_value = (states[0].transpose(0, 1) for states in (query, key, value))
    value_cache = None
    if key.shape[3] != value.shape[3]:
        kv_cache, value_cache = split_joined_cache(kv_cache, key.shape[3])
    elif kv_cache.dim() == 3:
        kv_cache, value_cache = split_kv_cache(kv_cache, key.shape[1], key.shape[3])
    if noted.writes:
        reshape_and_cache(rows_of_key, rows_of_value, kv_cache, pool.slot_mapping, value_cache=value_cache)
    features["value_cache"] = value_cache
    rows = _at_temperature(module, rows_of_query, attention_metadata)
    context = context_of(attention_metadata, noted.pool if attention_metadata.other_pools else 0)
    if context is None:
        batch: tuple[Any, ...] = pool.block_tables, attention_metadata.seq_lens, starts, scale
        return paged_attention(rows, kv_cache, *batch, **features)[None], selected
    batch = pool.block_tables, starts, scale, context, noted.context
    return attend(rows, rows_of_key, rows_of_value, kv_cache, *batch, **features)[None], None


def no_mask(*args: Any, allow_is_bidirectional_skip: bool = False, **kwargs: Any) -> Tensor | None:
    """The mask function for transformers. Returns no mask, because the op masks by positions; or an empty one, for
    models whose code slices it.

    Raises:
        ValueError: the model needs non-causal attention.
    """
    if allow_is_bidirectional_skip:
        raise ValueError(
            "attention_mask: expected causal, windowed or chunked attention, got a model that attends to later tokens,"
            " which paged attention does not do"
        )
    config = kwargs.get("config")
    of_indexers = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    if of_indexers or getattr(config, "model_type", None) == "mpt":
        return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=kwargs["device"])
    return None


def _is_empty(mask: Tensor) -> bool:
    return mask.shape[-1] == 0


def _implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _at_temperature(module: Any, query: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Queries ``[T, H, D]``, scaled by their positions if the model has scaled them by their rows (Llama-4)."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def scale(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    rows = torch.arange(query.shape[0], device=query.device)
    return (query * (scale(metadata.positions) / scale(rows))[:, None, None]).to(query.dtype)


for _name, _mask in ((NAME, no_mask), (PROBE, request_mask)):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, _mask)
