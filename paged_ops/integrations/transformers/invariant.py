"""Layers whose results do not depend on the rest of the batch, in place of a model's own (``batch_invariant=True``).

Libraries choose the kernel of a matmul, and the order of a sum, by the number of rows. On the CPU, torch computes the
last elements of a tensor by another exponential than the rest. So linear layers, experts and norms call the ops of
``paged_ops_models`` with a fixed order, and on the CPU activations and rotary embeddings are made of operations that
IEEE 754 rounds in one way. Everything else in the models of :data:`FAMILIES` is such an operation already, copies, or
is computed row by row. Other modules are refused.

Letters: T tokens of the batch, k experts of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.modeling_outputs import CausalLMOutputWithPast

from paged_ops.checks import expect
from paged_ops.integrations.transformers.projections import FusedLinear, FusedPart, OverlappingLinear
from paged_ops.integrations.transformers.subclasses import with_forward
from paged_ops.integrations.transformers.wrapping import Wrapping
from paged_ops.layouts import MODEL_DTYPES
from paged_ops.lowerings.cpu.invariant import exp, tanh
from paged_ops.ops import invariant_expert_linear, invariant_linear, invariant_rms_norm

# By the folder in transformers.models: the first part of the names of its classes.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gpt_oss": "GptOss",
}
_SOFT_CAP = "final_logit_softcapping"
# Classes of a family that only call others, add and multiply elements, or copy. The router and the experts of gpt-oss
# are called by nothing but its MLP, which is replaced.
_KEPT = ("ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "TextScaledWordEmbedding")
_KEPT_OF_EXPERTS = ("TopKRouter", "Experts")
_KEPT_OF_TORCH = (nn.ModuleList, nn.Embedding, FusedPart)


def expect_known(model: nn.Module) -> None:
    """Refuse a model with a module that is neither replaced nor known to be invariant, before anything is changed."""
    unknown = sorted({_name(module) for module in model.modules() if not _is_known(module)})
    if unknown:
        raise ValueError(
            f"batch_invariant: expected a model of {', '.join(FAMILIES.values())} with its own layers, got"
            f" {type(model).__name__} with {', '.join(unknown)}, whose results may depend on the batch"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    fits = len(dtypes) == 1 and dtypes <= {*MODEL_DTYPES}
    expect(fits, "batch_invariant", f"a model with weights of one dtype of {MODEL_DTYPES}", dtypes)


def replace_layers(wrapping: Wrapping, model: Any) -> None:
    """Let the layers of a known model compute invariantly, and the soft cap of its logits."""
    for module in model.modules():
        if isinstance(module, FusedLinear):
            wrapping.set_attribute(module, "matmul", invariant_linear)
        elif (forward := _forward_of(type(module))) is not None:
            kind: Any = type(module)
            wrapping.retype(module, _invariant(kind, forward))
    if getattr(model.config, _SOFT_CAP, None):
        of_model: Any = type(model)
        wrapping.retype(model, _capped(of_model))


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, FusedLinear):
        return True
    kind = type(module)
    kept = kind in _KEPT_OF_TORCH or _part(kind) in (*_KEPT, *_KEPT_OF_EXPERTS)
    # The experts of other libraries and a sharded layer have a forward of their own.
    return (kept or _forward_of(kind) is not None) and "forward" not in vars(module)


def _name(module: nn.Module) -> str:
    return type(module).__name__ + (" with a forward of its own" if "forward" in vars(module) else "")


def _part(kind: type) -> str:
    """The part that a class has in one of the families; "" for other classes."""
    package, _, family = kind.__module__.rpartition(".modeling_")
    prefix = FAMILIES.get(family, "")
    own = package == f"transformers.models.{family}" and prefix and kind.__name__.startswith(prefix)
    return kind.__name__.removeprefix(prefix) if own else ""


def _forward_of(kind: type) -> Callable[..., Any] | None:
    if kind in (nn.Linear, OverlappingLinear):
        return _linear
    if kind in (nn.SiLU, activations.SiLUActivation):
        return _silu
    if kind is activations.GELUTanh:
        return _gelu
    part, name = _part(kind), kind.__name__
    if part == "RMSNorm":
        return _gemma_norm if name.startswith("Gemma") else _gpt_oss_norm if name.startswith("GptOss") else _norm
    if part == "RotaryEmbedding":
        return _half_rotary if name.startswith("GptOss") else _rotary
    return _experts if name == "GptOssMLP" and part else None


@functools.cache
def _invariant(kind: Any, forward: Callable[..., Any]) -> type:
    return with_forward("Invariant", forward, _invariant, kind, forward)


@functools.cache
def _capped(kind: Any) -> type:
    return with_forward("", _capped_logits, _capped, kind)  # its name is saved with the model


# Forwards


def _capped_logits(
    module: Any, input_ids: Tensor, *, position_ids: Any = None, logits_to_keep: Any = slice(None), **inputs: Any
) -> CausalLMOutputWithPast:
    hidden = module.model(input_ids, position_ids=position_ids, **inputs).last_hidden_state
    logits = module.lm_head(hidden[:, logits_to_keep])
    soft_cap = getattr(module.config, _SOFT_CAP)
    scaled = logits / soft_cap
    on_cpu = scaled.device.type == "cpu"
    bounded = tanh(scaled.float()).to(scaled.dtype) if on_cpu else torch.tanh(scaled)
    return CausalLMOutputWithPast(logits=bounded * soft_cap)


def _linear(module: Any, x: Tensor) -> Tensor:
    return invariant_linear(x, module.weight, module.bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    return invariant_rms_norm(x, module.weight, module.variance_epsilon, rounds_first=True)


def _gemma_norm(module: Any, x: Tensor) -> Tensor:
    return invariant_rms_norm(x, module.weight, module.eps, weight_offset=1.0)


def _gpt_oss_norm(module: Any, x: Tensor) -> Tensor:
    return invariant_rms_norm(x, module.weight, module.variance_epsilon)


def _silu(module: Any, x: Tensor) -> Tensor:
    return (x.float() * _sigmoid(x.float())).to(x.dtype) if x.device.type == "cpu" else nn.functional.silu(x)


def _gelu(module: Any, x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return nn.functional.gelu(x, approximate="tanh")
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1.0 + tanh(inner))).to(x.dtype)


def _rotary(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    cos, sin = _half_rotary(module, x, position_ids, layer_type)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _half_rotary(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    prefix = "" if layer_type is None else f"{layer_type}_"
    scaling = getattr(module, f"{prefix}attention_scaling")
    angles = position_ids[..., None].float() * getattr(module, f"{prefix}inv_freq").to(x.device, torch.float32)
    cos, sin = _cos_sin(angles) if x.device.type == "cpu" else (angles.cos(), angles.sin())
    return (cos * scaling).to(x.dtype), (sin * scaling).to(x.dtype)


def _experts(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The MLP of gpt-oss. The results of a token's experts are added from the likeliest to the last."""
    router, experts = module.router, module.experts
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    likeliest, indices = invariant_linear(rows, router.weight, router.bias).topk(router.top_k, -1)
    shares = _softmax(likeliest.float())
    T, k = indices.shape
    chosen = indices.reshape(-1)
    of_pairs = rows[:, None].expand(T, k, -1).reshape(T * k, -1)
    gate_up = invariant_expert_linear(of_pairs, experts.gate_up_proj.transpose(1, 2), chosen, experts.gate_up_proj_bias)
    gate, up = gate_up[:, ::2].clamp(max=experts.limit), gate_up[:, 1::2].clamp(-experts.limit, experts.limit)
    gated = (up + 1) * (gate * _sigmoid((gate * experts.alpha).float()).to(gate.dtype))
    out = invariant_expert_linear(gated, experts.down_proj.transpose(1, 2), chosen, experts.down_proj_bias)
    out = out.view(T, k, -1).float() * shares[..., None]
    total = functools.reduce(torch.add, out.unbind(1))
    return total.to(hidden_states.dtype).view(hidden_states.shape), shares.to(hidden_states.dtype)


# Elementary functions of float32, the same for every element of a tensor


def _sigmoid(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    small = exp(-x.abs())
    return torch.where(x < 0, small, 1.0) / (1.0 + small)


def _softmax(x: Tensor) -> Tensor:
    """Over the few elements of the last dimension; the first is the largest."""
    less = x - x[:, :1]
    weights = exp(less) if x.device.type == "cpu" else less.exp()
    return weights / functools.reduce(torch.add, weights.split(1, -1))


# pi/2 in three parts; a product of the first with an integer below 2^20 is exact
_PARTS = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21


def _cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, by Taylor series around the nearest multiple of pi/2."""
    wide = x.double()
    quarters = torch.round(wide * (2.0 / math.pi))
    for part in _PARTS:
        wide = wide - quarters * part
    square = wide * wide
    cos, sin = torch.ones_like(square), torch.ones_like(square)
    for n in range(16, 0, -2):
        cos = 1.0 - cos * square / (n * (n - 1))
        sin = 1.0 - sin * square / (n * (n + 1))
    sin = sin * wide
    quadrant = quarters.long() & 3
    odd, negative_sin, negative_cos = quadrant & 1 == 1, quadrant >= 2, (quadrant == 1) | (quadrant == 2)
    of_cos, of_sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    of_cos, of_sin = torch.where(negative_cos, -of_cos, of_cos), torch.where(negative_sin, -of_sin, of_sin)
    return of_cos.float(), of_sin.float()
