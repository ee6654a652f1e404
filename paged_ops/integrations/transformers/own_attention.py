"""Attention modules that need another ``forward`` on a paged cache.

- Bloom, Falcon and MPT compute attention, with ALiBi or rotary positions, in their own code instead of transformers'
  AttentionInterface.
- Layers of StableLM and Nemotron pass only transformers' cache to attention.

The step is then passed in place of transformers' cache (:class:`StepCache`). While a model is wrapped, its attention
modules have a subclass with another ``forward``; they keep their projections.

ALiBi: transformers adds ``slope[h] * j`` to the logits, the op ``slope[h] * (j - i)``, which has the same softmax. The
op adds it in float32. transformers rounds it to the dtype of the model (Falcon: to bfloat16), and adds it twice in
Falcon's eager attention (5.23), so Falcon is compared with its "sdpa".

Letters: T tokens of the batch, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from paged_ops.integrations.transformers.attention_function import attention
from paged_ops.integrations.transformers.probe import NoArgumentsError, Probe, request_mask
from paged_ops.integrations.transformers.recurrent import cache_argument
from paged_ops.integrations.transformers.subclasses import with_forward
from paged_ops.integrations.transformers.wrapping import UNDO, StepCache, Wrapping


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, step: Any, scale: float, slopes: Tensor | None
) -> Tensor:
    """``[1, T, H * D]`` of ``query [1, H, T, D]``, ``key`` and ``value [1, K, T, D]``."""
    if not isinstance(step, StepCache):
        raise ValueError(f"model: expected a step of PagedCausalLM, got a call of the wrapped model itself; {UNDO}")
    mask = None
    if isinstance(step.kv_caches, Probe):  # the probe examines the mask
        T = query.shape[2]
        mask = request_mask(q_length=T, kv_length=T, mask_function=causal_mask_function, device=query.device)
    batch: dict[str, Any] = {"kv_caches": step.kv_caches, "attention_metadata": step.metadata}
    options: dict[str, Any] = {"scaling": scale, "alibi_slopes": slopes, "is_causal": True}
    return attention(module, query, key, value, mask, **batch, **options)[0].flatten(2)


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *, layer_past: Any = None, **_: Any) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    out = _attend(module, query, key, value, layer_past, module.inv_norm_factor, module.paged_slopes)
    return residual + module.dense(out), None


def _mpt(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = fused.unflatten(2, (3, module.n_heads, module.head_dim))
    query, key, value = (each.transpose(1, 2) for each in heads.unbind(2))
    step = kwargs.get("cache", kwargs.get("past_key_values"))
    out = _attend(module, query, key, value, step, module.softmax_scale, module.paged_slopes)
    return module.out_proj(out), None


def _falcon(
    module: Any, hidden_states: Tensor, *, layer_past: Any = None, position_embeddings: Any = None, **_: Any
) -> Any:
    fused, D = module.query_key_value(hidden_states), module.head_dim
    if module.new_decoder_architecture:  # groups of query heads, each followed by its key and its value
        groups = fused.unflatten(2, (module.num_kv_heads, -1, D))
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if module.paged_slopes is None:
        family: Any = sys.modules[type(module).__mro__[1].__module__]
        query, key = family.apply_rotary_pos_emb(query, key, *position_embeddings)
    out = _attend(module, query, key, value, layer_past, module.inv_norm_factor, module.paged_slopes)
    return module.dense(out), None


# By the name of the attention module: its forward, and the name of its number of heads.
_FAMILIES: dict[str, tuple[Callable[..., Any], str]] = {
    "BloomAttention": (_bloom, "num_heads"),
    "MptAttention": (_mpt, "n_heads"),
    "FalconAttention": (_falcon, "num_heads"),
}


def _family(module: nn.Module) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _FAMILIES), None)


def has_own_attention(model: nn.Module) -> bool:
    """Whether the model is of a family with its own attention code."""
    return any(_family(module) for module in model.modules())


def dense_implementation(model: Any) -> str:
    """The attention implementation of transformers that is correct for this model."""
    is_doubled = has_own_attention(model) and getattr(model.config, "model_type", "") == "falcon"
    return "sdpa" if is_doubled else "eager"


def replace_attention(wrapping: Wrapping, model: Any) -> None:
    """Let such attention modules call :func:`attention`."""
    for module in model.modules():
        if name := _family(module):
            kind: Any = type(module)
            wrapping.set_attribute(module, "paged_slopes", _slopes(model, module, name))
            wrapping.retype(module, _paged(kind, name))


@functools.cache
def _paged(kind: Any, name: str) -> type:
    return with_forward("Paged", _FAMILIES[name][0], _paged, kind, name)


def _slopes(model: Any, module: Any, name: str) -> Tensor | None:
    """The ALiBi slope of each head, float32 ``[H]``: the model's bias for the second of two keys."""
    heads: int = getattr(module, _FAMILIES[name][1])
    family: Any = sys.modules[type(module).__module__]
    device = next(module.parameters()).device
    if name == "MptAttention":
        bias = family.build_mpt_alibi_tensor(heads, 2, device=device)
    elif name == "FalconAttention" and not model.config.alibi:
        return None
    else:
        bias = family.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64, device=device), heads, torch.float32)
    slopes = (bias[:, 0, 1] - bias[:, 0, 0]).float()
    return slopes * module.inv_norm_factor if name == "FalconAttention" else slopes


def carry_step(wrapping: Wrapping, model: nn.Module, error: NoArgumentsError) -> None:
    """Let all attention modules of the class that got no arguments read them from the step.

    Raises:
        NoArgumentsError: they take no transformers cache either, or have a ``forward`` on the instance.
    """
    attention = error.module
    kind: Any = type(attention)
    argument = cache_argument(kind.forward)
    if argument is None or "forward" in vars(attention):
        raise error
    carrying = _carrying(kind, argument)
    for module in [each for each in model.modules() if type(each) is type(attention)]:
        wrapping.retype(module, carrying)


@functools.cache
def _carrying(kind: Any, argument: str) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get(argument)
        if isinstance(step, StepCache):
            kwargs.update({argument: None, "kv_caches": step.kv_caches, "attention_metadata": step.metadata})
        return kind.forward(self, *args, **kwargs)

    return with_forward("Paged", forward, _carrying, kind, argument)
