"""Decoder layers whose norms, gates and residual adds are in their matmuls, in steps of few rows.

Four calls of :func:`paged_ops.ops.few_row_linear` replace eight kernels: a step of one row waits less for each to begin
and end. The layers are those of
:func:`paged_ops.integrations.transformers.projections.use_overlapping_products` with fused projections. A trial run
decides, as in ``all_reduce_fusion``: which tensors are normed and added, and that the projections get the normed rows.

Letters: T rows, C hidden size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from paged_ops.fake.models import MOST_ROWS
from paged_ops.integrations.transformers.all_reduce_fusion import Call, TrialLayer, bound, decoder_layers, norm_kind
from paged_ops.integrations.transformers.projections import FusedPart, OverlappingLinear, is_overlapping

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class FewRowLayer(NamedTuple):
    """The epsilons of a layer's two norms; arguments that its attention gets in addition to the layer's."""

    eps: float
    second_eps: float
    extras: dict[str, Any]


def run_few_row_layer(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """The forward of a decoder layer ``[1, T, C]``; its own if T may be larger."""
    few: FewRowLayer = layer.paged_few_rows
    if not statically_known_true(hidden_states.shape[0] * hidden_states.shape[1] <= MOST_ROWS):
        return type(layer).forward(layer, hidden_states, **kwargs)
    attention, mlp = layer.self_attn, layer.mlp
    matmul = functools.partial(torch.ops.paged_ops_models.few_row_linear.default, constant=True)
    # The attention calls its projections with the residual stream, in place of its normed rows.
    qkv = attention.q_proj.fused
    qkv.keep(hidden_states, matmul(hidden_states, qkv.weight, layer.input_layernorm.weight, None, few.eps))
    attention.o_proj.residual = hidden_states
    try:
        added = attention(hidden_states=hidden_states, **{**few.extras, **kwargs})
        assert qkv.output is None is attention.o_proj.residual, "called as in the trial"
    finally:
        attention.o_proj.residual = None  # also after an error or Ctrl-C, before a step of other rows
    if isinstance(added, tuple):
        added = added[0]
    second = layer.post_attention_layernorm.weight
    gated = matmul(added, mlp.gate_proj.fused.weight, second, None, few.second_eps, True)
    return matmul(gated, mlp.down_proj.weight, None, added)


class Watch:
    """Observes a model's trial run (``with``); then :meth:`fuse`."""

    def __init__(self, model: Any, batch_invariant: bool) -> None:
        self._model = model
        layers = decoder_layers(model) if not batch_invariant and serves(model.device) else []
        self._layers = {layer: TrialLayer(layer, _last_matmul) for layer in layers if _has_parts(layer)}
        self._calls: dict[nn.Module, Call] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls[module] = Call(args, kwargs, output)
            if module in self._layers:
                self._ended(module)

        watched = {each for layer in self._layers for each in (layer, *layer.children())}
        watched |= {each for layer in self._layers for part in (layer.self_attn, layer.mlp) for each in part.children()}
        self._hooks = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
        return self

    def _ended(self, layer: Any) -> None:
        trial = self._layers[layer]
        trial.ended(self._calls)
        normed = self._calls.get(layer.input_layernorm)
        for part in (getattr(layer.self_attn, name) for name in _QKV):
            call = self._calls.get(part)
            if normed is None or call is None or call.first is not normed.output:
                trial.refuse("layer", "its projections do not get its input's norm")

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def fuse(self, wrapping: Any) -> None:
        """Through a :class:`paged_ops.integrations.transformers.wrapping.Wrapping`, which can undo it. Layers in which
        anything differs stay."""
        dtype, device = self._model.dtype, self._model.device
        for layer, trial in self._layers.items():
            kinds = [norm_kind(norm, dtype, device) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
            known = [kind["eps"] for kind in kinds if kind is not None and not kind["weight_offset"]]
            if trial.ran and not trial.against and len(known) == 2 and _is_gated(layer.mlp, dtype, device):
                few = FewRowLayer(known[0], known[1], trial.extras)
                wrapping.set_attribute(layer, "paged_few_rows", few)
                wrapping.replace_forward(layer, bound(run_few_row_layer, layer))


def serves(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from paged_ops.lowerings.gpu.target import target_of

    return target_of(device).is_hopper


def _has_parts(layer: Any) -> bool:
    """Whether its projections are fused, run by few_row_linear, without a bias, and without hooks."""
    fused = _fused(layer.self_attn, _QKV), _fused(layer.mlp, _GATE_UP)
    last = [_last_matmul(layer, part) for part in ("self_attn", "mlp")]
    own = [module for part in (layer, layer.self_attn, layer.mlp) for module in (part, *part.children())]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in own)
    known = {name for name, _ in layer.mlp.named_children()} == {*_GATE_UP, "down_proj", "act_fn"}
    if None in (*fused, *last) or not known or hooked:
        return False
    from paged_ops.lowerings.gpu.one_row import tile_of

    return all(tile_of(1, *each.weight.shape) is not None for each in (*fused, *last))


def _fused(module: Any, names: tuple[str, ...]) -> Any:
    """The fused layer of these projections, in this order, and of no others."""
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(part, FusedPart) and part.fused is parts[0].fused for part in parts):
        return None
    fused, starts = parts[0].fused, [part.start for part in parts]
    return fused if is_overlapping(fused) and len(fused.sizes) == len(parts) and starts == sorted(starts) else None


def _last_matmul(layer: Any, part: str) -> Any:
    linear = getattr(getattr(layer, part), "o_proj" if part == "self_attn" else "down_proj", None)
    return linear if type(linear) is OverlappingLinear and "forward" not in vars(linear) else None


@torch.no_grad()
def _is_gated(mlp: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an mlp is ``down(silu(gate) * up)``, by a few rows."""
    weight = mlp.gate_proj.fused.weight
    x = torch.randn(8, weight.shape[1], generator=torch.Generator("cpu").manual_seed(0)).to(device, dtype)
    gate, up = F.linear(x, weight).chunk(2, -1)
    want = F.linear(F.silu(gate) * up, mlp.down_proj.weight).float()
    return bool((mlp(x[None])[0].float() - want).norm() <= 0.02 * want.norm())
