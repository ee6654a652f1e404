"""Hugging Face transformers on paged_ops: an attention function, and a causal language model as a step of generation.

::

    model = AutoModelForCausalLM.from_pretrained(...)
    paged = PagedCausalLM(model)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(num_blocks=1024), compile=True)
    outputs = loop.generate([tokenizer(prompt).input_ids for prompt in prompts])

Importing this module registers the attention implementation ``"paged_ops"``: a model that uses it takes the whole batch
as one row of T tokens, writes its keys and values into the caches, and attends to them by the block tables. Caches and
metadata come as keyword arguments of ``forward``, so that everything is an input of the compiled graph.

Letters: T tokens of the batch, S sequences, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from paged_ops.cache import KVCache
from paged_ops.layouts import Layout, split_kv_cache
from paged_ops.metadata import AttentionMetadata
from paged_ops.ops import paged_attention, reshape_and_cache

NAME = "paged_ops"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_caches: Sequence[Tensor] | Tensor | None = None,
    attention_metadata: AttentionMetadata | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it: write the new keys and values, then attend.

    Args:
        module: the layer: its ``layer_idx`` names the cache, ``layer_types`` of its config say window or chunk.
        query: ``[1, H, T, D]``.
        key, value: ``[1, K, T, D]``.
        kv_caches: one tensor a layer, as ``KVCache.layers``; or that of this layer.
        attention_metadata: the step.
        scaling: by default ``D ** -0.5``.
        sliding_window, softcap, s_aux: window, bound of the logits, sinks ``[H]``; None is off.

    Returns:
        ``[1, T, H, D]`` and no attention weights.

    Raises:
        ValueError: for what a paged cache cannot serve: masks, dropout, weights, attention to later tokens.
    """
    if kv_caches is None or attention_metadata is None:
        raise ValueError(
            "attention_metadata: expected one, and kv_caches, as arguments of forward, got none; run the model through"
            ' PagedCausalLM, or undo it by model.set_attn_implementation("sdpa")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = {
        "attention_mask": attention_mask is not None,
        "dropout": bool(dropout),
        "output_attentions": bool(output_attentions),
        "position_bias": position_bias is not None,
        "is_causal=False": not causal,
    }
    for name, given in refused.items():
        if given:
            raise ValueError(f"{name}: expected none with paged attention, which is causal, and got it; leave it out")
    if query.shape[0] != 1:
        raise ValueError(f"query: expected the batch as one row [1, H, T, D], got {list(query.shape)}")
    if value.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"value: expected head size {key.shape[-1]}, the keys', as one cache holds both, got {value.shape[-1]}"
        )
    rows_of_query, rows_of_key, rows_of_value = (states[0].transpose(0, 1) for states in (query, key, value))
    kv_cache = kv_caches if isinstance(kv_caches, Tensor) else kv_caches[_cache_index(module)]
    value_cache = None
    if kv_cache.dim() == 3:
        kv_cache, value_cache = split_kv_cache(kv_cache, key.shape[1], key.shape[3])
    if not getattr(module, "is_kv_shared_layer", False):
        reshape_and_cache(
            rows_of_key, rows_of_value, kv_cache, attention_metadata.slot_mapping, value_cache=value_cache
        )
    window, chunk = _reach(module, sliding_window)
    out = paged_attention(
        rows_of_query,
        kv_cache,
        attention_metadata.block_tables,
        attention_metadata.seq_lens,
        attention_metadata.query_start_loc,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        value_cache=value_cache,
        sliding_window=window,
        attention_chunk=chunk,
        soft_cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None], None


def no_mask(
    *args: Any,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> None:
    """What transformers asks for a mask: there is none, the op masks by positions.

    Raises:
        ValueError: the model wants more than causal, windowed or chunked attention.
    """
    if use_vmap or allow_is_bidirectional_skip:
        raise ValueError(
            "attention_mask: expected causal, windowed or chunked attention, got a model that attends to later tokens"
            " or overlays a mask of its own, which paged attention does not do"
        )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, no_mask)


class PagedCausalLM:
    """A causal language model of transformers as a :class:`paged_ops.generation.ModelStep`.

    Sets the model's attention to ``"paged_ops"``, in place: ``model.generate`` fails clearly until
    ``model.set_attn_implementation("sdpa")``, or another, undoes it. Compiled experts wait for the device
    unless they are bfloat16, which no graph can hold; after ``model.set_experts_implementation("batched_mm")`` they do
    not.

    Args:
        model: in evaluation mode, on its device.

    Attributes:
        num_layers, num_kv_heads, head_size: of the cache that it needs.
        max_model_len: the positions that the model was made for, None if its config does not say.

    Raises:
        ValueError: the model's attention is not called through ``AttentionInterface``, or it has layers, position
            embeddings or attention that a paged batch cannot serve.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        name = type(model).__name__
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        for layer_type in layer_types:
            if layer_type not in _LAYER_TYPES:
                raise ValueError(f"model: expected layers of {_LAYER_TYPES}, got {layer_type!r} in {name}")
        if not getattr(model, "_supports_attention_backend", False) or not model._can_set_attn_implementation():
            raise ValueError(f"model: expected one that calls AttentionInterface of transformers, got {name}")
        if model.config.is_encoder_decoder:
            raise ValueError(f"model: expected a decoder, got {name}, an encoder-decoder")
        if model.training:
            raise ValueError(f"model: expected evaluation mode, got {name} in training; call model.eval()")
        for rope_type in _rope_types(config):
            if rope_type in ("dynamic", "longrope"):
                raise ValueError(
                    f"model: expected position embeddings that do not depend on the batch, got rope_type {rope_type!r}"
                    f" in {name}; load it with another rope_type in its config"
                )
        if getattr(config, "attn_temperature_tuning", False):
            raise ValueError(
                "model: expected attn_temperature_tuning off, as it scales queries by their row, which in a paged batch"
                f" is not their position, got it on in {name}; switch it off in the config for short contexts"
            )
        try:
            num_kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
            head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        except RuntimeError as error:  # how transformers answers when layers differ
            raise ValueError(
                f"model: expected one number and size of heads in all layers, got {name}: {error}"
            ) from None
        model.set_attn_implementation(NAME)
        self.model = model
        self.num_layers = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        limit = getattr(config, "max_position_embeddings", None)
        self.max_model_len = int(limit) if limit else None
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens of the model's generation config."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_host_blocks: int = 0,
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
    ) -> KVCache:
        """A cache for this model on its device, in its dtype by default (float8 dtypes work without scales)."""
        return KVCache(
            self.num_layers,
            num_blocks,
            block_size,
            self.num_kv_heads,
            self.head_size,
            dtype=self.model.dtype if dtype is None else dtype,
            device=self.model.device,
            layout=layout,
            num_host_blocks=num_host_blocks,
        )

    def compile_layers(self, *, dynamic: bool | None = True, **options: Any) -> PagedCausalLM:
        """Compile the decoder layers with one compilation for all layers of a kind, in place; returns itself.

        A step is then made of compiled parts: for a model of many layers that takes a fraction of the time that
        compiling it whole takes, and within a CUDA graph it runs as fast. The rotary embedding and the last norm are
        compiled by themselves. Call it after :func:`paged_ops.integrations.projections.fuse_projections`.

        Args:
            dynamic: sizes of a batch stay open, so that one graph serves them all; with False each has code of its own.
            options: more of ``torch.compile``; ``fullgraph`` is on.

        Raises:
            ValueError: the model has no list of decoder layers.
        """
        with_layers = (
            each for each in self.model.modules() if isinstance(getattr(each, "layers", None), nn.ModuleList)
        )
        decoder: Any = next(with_layers, None)
        if decoder is None:
            raise ValueError(f"model: expected a decoder with a list `layers`, got {type(self.model).__name__}")
        options = {"fullgraph": True, "dynamic": dynamic, **options}
        run_layer = torch.compile(_run_layer, **options)
        for layer in decoder.layers:
            (attends,) = (m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal"))
            attends.paged_layer_type = _layer_type(attends)
            setattr(layer, "forward", _CompiledLayer(run_layer, layer, _cache_index(attends)))  # noqa: B010
        for name in ("rotary_emb", "norm"):
            if hasattr(decoder, name):
                getattr(decoder, name).compile(**options)
        return self

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]``: see :class:`paged_ops.generation.ModelStep`."""
        logits = self.model(
            input_ids=input_ids[None],
            # Nobody reads it; without one, transformers looks for packed sequences, and waits for the device.
            attention_mask=torch.ones_like(input_ids[None], dtype=torch.bool),
            position_ids=metadata.positions[None],
            use_cache=False,
            kv_caches=kv_caches,
            attention_metadata=metadata,
            **({"logits_to_keep": last_rows} if self._takes_rows else {}),
        ).logits[0]
        return logits if self._takes_rows else logits[last_rows]


class _CompiledLayer:
    """The forward of one decoder layer by the code that all layers share."""

    def __init__(self, run_layer: Callable[..., Any], layer: nn.Module, cache_index: int) -> None:
        self.run_layer, self.layer, self.cache_index = run_layer, layer, cache_index

    def __call__(self, *args: Any, kv_caches: Sequence[Tensor], **kwargs: Any) -> Any:
        return self.run_layer(self.layer, kv_caches[self.cache_index], args, kwargs)


def _run_layer(layer: Any, kv_cache: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The number of the layer is not read, or each layer would be compiled by itself.
    return type(layer).forward(layer, *args, kv_caches=kv_cache, **kwargs)


def _layer_type(module: Any) -> str | None:
    """What ``layer_types`` of the config says of a layer."""
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    return layer_types[module.layer_idx] if layer_types else None


def _reach(module: Any, sliding_window: int | None) -> tuple[int, int]:
    """The window and the chunk of a layer, 0 where it has none."""
    config: Any = getattr(module, "config", None)
    layer_type = module.paged_layer_type if hasattr(module, "paged_layer_type") else _layer_type(module)
    if layer_type == "chunked_attention":
        return 0, int(config.attention_chunk_size)
    if layer_type == "sliding_attention" and sliding_window is None:
        sliding_window = config.sliding_window
    return int(sliding_window or 0), 0


def _cache_index(module: Any) -> int:
    """The cache of a layer: its own, or that of the layer whose keys and values it reuses (Gemma-3n)."""
    if not getattr(module, "is_kv_shared_layer", False):
        return int(module.layer_idx)
    config = module.config
    layers = zip(config.kv_sharing_modes, config.layer_types, strict=True)
    kept = [i for i, (mode, layer_type) in enumerate(layers) if mode == "store" and layer_type == module.layer_type]
    return kept[-1]


def _rope_types(config: Any) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    return [parameters.get("rope_type", "default") for parameters in each]
