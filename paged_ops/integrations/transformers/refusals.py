"""Errors for models and caches that cannot be served, each with the reason and the remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.shard import UNSHARDED
from paged_ops.checks import expect
from paged_ops.integrations.transformers.probe import Probe
from paged_ops.integrations.transformers.recurrent import StateLayers
from paged_ops.layouts import Layout, has_row_scales

_OF_INDEXERS = ("indexed_attention", "minimax_m3_sparse")
_OTHER_ATTENTION = (*_OF_INDEXERS, "compressed_attention", "heavily_compressed_attention")
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def refuse(model: Any, is_adapted: Callable[[Any], bool]) -> None:
    """The checks before the model runs. ``is_adapted``: whether a model's own attention is replaced."""
    name = type(model).__name__
    if hasattr(model, "get_base_model"):
        raise ValueError(
            f"model: expected a model of transformers, got {name} around one; pass its get_base_model(), which"
            " includes the adapters (but not learned prompts and prefixes, which cannot be served)"
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a model of transformers, uncompiled, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, got {name}, an encoder-decoder")
    if not is_adapted(model) and not model._can_set_attn_implementation():
        raise ValueError(f"model: expected one that calls AttentionInterface of transformers, got {name}")
    if not model.can_generate():
        raise ValueError(
            f"model: expected a causal language model, got {name}, which returns no token logits; load it by"
            " AutoModelForCausalLM"
        )
    refuse_training(model, any(module.training for module in trainable_parts(model)))
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"model: expected the weights on one device, got {name} on {', '.join(devices)}; load it onto"
            " one device, such as by device_map={'': 'cuda:0'}"
        )


def refuse_training(model: Any, is_training: bool) -> None:
    """Refuse a model with a part in training mode: dropout, or the jitter of a router, would run."""
    if is_training:
        raise ValueError(
            f"model: expected evaluation mode, got {type(model).__name__}, or a part of it, in training; call"
            " model.eval()"
        )


def trainable_parts(model: nn.Module) -> list[nn.Module]:
    """The model, and the parts whose code reads ``training``. (Other parts compute the same in both modes.)"""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in model.modules()]
    return [module for module, kind in kinds if module is model or _reads_mode(kind)]


@functools.cache
def _reads_mode(kind: type) -> bool:
    own = [value for each in kind.__mro__[: kind.__mro__.index(nn.Module)] for value in vars(each).values()]
    functions = [inspect.unwrap(value) for value in own if inspect.isfunction(value)]
    return any("training" in function.__code__.co_names for function in functions)


def refuse_layers(model: Any, states: StateLayers | None, has_indexers: bool) -> None:
    """Refuse layers that neither attend nor keep state in transformers' cache. ``has_indexers``: the model has
    indexers that are served."""
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    for layer_type in layer_types:
        if has_indexers and layer_type in _OF_INDEXERS:
            continue
        served = layer_type in _LAYER_TYPES or (states is not None and layer_type not in _OTHER_ATTENTION)
        if not served:
            raise ValueError(f"model: expected layers of {_LAYER_TYPES}, got {layer_type!r} in {type(model).__name__}")


def refuse_context(model: Any, states: StateLayers | None, probe: Probe) -> None:
    """Refuse context parallelism if no layer's tokens would be sharded, not all layers attend, or keys are selected."""
    name, reaches = type(model).__name__, probe.reaches()
    if any(call.selects for call in probe.calls.values()):
        raise ValueError(f"context: expected a model whose layers see all keys, got {name}, whose indexers select keys")
    if states is not None:
        raise ValueError(f"context: expected a model whose layers all attend, got {name}, whose layers keep state")
    if (0, 0) not in reaches:
        raise ValueError(
            f"context: expected a model with layers that see everything, got {name}, whose layers all have a window or"
            " chunk, so each rank would keep all tokens"
        )


def expect_arguments_of_attention(model: Any) -> None:
    name = type(model).__name__
    forward = inspect.signature(model.forward).parameters
    if "position_ids" not in forward:
        raise ValueError(f"model: expected one whose forward takes position_ids, got {name}")
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in forward.values()):
        raise ValueError(f"model: expected one that passes keyword arguments to its attention, got {name}")


def expect_windows_of_cache(model: Any, probe: Probe, length: int | None) -> None:
    """Refuse a model whose mask shows tokens that transformers' cache drops: its output depends on the chunks."""
    cached = DynamicCache(config=model.config).layers
    for module, call in probe.calls.items():
        index = getattr(module, "layer_idx", None)
        if index is None or index >= len(cached) or call.reach != (0, 0):
            continue
        window = getattr(cached[index], "sliding_window", None) if getattr(cached[index], "is_sliding", False) else None
        if window is not None and (length is None or window < length):
            raise ValueError(
                f"model: expected one window in masks and cache, got {type(model).__name__}, where the cache of"
                f" transformers keeps {window} tokens of {call.name}, and its mask shows all; set sliding_window of its"
                f" config to None, or max_model_len to at most {window}"
            )


def expect_cache_of_model(paged: Any, kv_cache: KVCache | HybridCache) -> None:
    """Refuse a cache that does not fit the layers of a ``PagedCausalLM``."""
    here, there = paged.model.device, kv_cache.layers[0].device
    if here != there:
        raise ValueError(f"kv_cache: expected one on {here}, like the model, got one on {there}")
    needed, kept = paged.states.specs if paged.states else None, kv_cache.states.specs if kv_cache.states else None
    if needed != kept:
        raise ValueError(f"kv_cache: expected states {needed} for the model's layers, got {kept}")
    given = kv_cache.pool_of_layer
    if len(given) != paged.num_layers:
        raise ValueError(f"kv_cache: expected one of {paged.num_layers} layers, like the model, got {len(given)}")
    if len(kv_cache.pools) > 1 and given != paged.pool_of_layer:
        raise ValueError(f"kv_cache: expected pools of layers {paged.pool_of_layer}, like the model, got {given}")
    places = [given[:layer].count(pool) for layer, pool in enumerate(given)]
    for layer, (pool_index, place, spec) in enumerate(zip(given, places, paged.layers, strict=True)):
        pool: Any = kv_cache.pools[pool_index]
        named = pool.dtype != torch.uint8 or has_row_scales(pool.kv_cache_dtype)
        expect(named, "kv_cache", "a float8 dtype, such as torch.float8_e4m3fn, for a cache in fp8", pool.dtype)
        sizes = pool.num_kv_heads[place], pool.head_size[place], pool.value_head_size[place]
        if sizes != spec[:3]:
            raise ValueError(
                f"kv_cache: expected heads, head size and value head size {tuple(spec[:3])} in layer {layer}, got"
                f" {sizes}"
            )
        latent = pool.layout is Layout.LATENT
        fits = latent == spec.latent or not spec.value_head_size  # index keys are alike in all layouts
        expect(fits, "kv_cache", f"latents: {spec.latent}, in layer {layer}", pool.layout)
        shard = UNSHARDED if paged.context is None or spec.window or spec.chunk else paged.context.shard
        expect(pool.shard == shard, "kv_cache", f"{shard} in layer {layer}, like the model", pool.shard)
        for name, has, needs in (
            ("sliding_window", pool.sliding_window, spec.window),
            ("attention_chunk", pool.attention_chunk, spec.chunk),
        ):
            if has and (not needs or has < needs or (name == "attention_chunk" and has % needs)):
                raise ValueError(
                    f"kv_cache: expected {name} {needs} (0 keeps all blocks), the reach of layer {layer}, got {has}"
                )
