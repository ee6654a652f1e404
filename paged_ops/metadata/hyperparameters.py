"""Hyperparameters of a model's attention layers: collected by layer, and the values that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from paged_ops.checks import expect


class LayerHyperparameters(NamedTuple):
    """The values of one attention layer; the layers of a model may differ."""

    sliding_window: int  # tokens, the query's own included; 0 is off
    soft_cap: float  # 0 is off
    scale: float  # of the logits


_ATTRIBUTES = {
    "sliding_window": ("sliding_window",),
    "soft_cap": ("soft_cap", "softcap", "attn_logit_softcapping"),
    "scale": ("scale", "scaling"),
}


def collect_layer_hyperparameters(layers: Mapping[str, Any] | nn.Module) -> dict[str, LayerHyperparameters]:
    """The window, soft cap and scale of each attention layer, by its name.

    Args:
        layers: the attention layers by name, each an object with attributes or a mapping with keys ``sliding_window``,
            ``soft_cap`` (also ``softcap``, ``attn_logit_softcapping``) and ``scale`` (also ``scaling``); a window or
            soft cap that is absent or None is off. Or a model: then its submodules that have a scale are the layers.

    Raises:
        ValueError: a layer has no scale, or a value is not a number.
    """
    if isinstance(layers, nn.Module):
        layers = {name: module for name, module in layers.named_modules() if _attribute(module, "scale") is not None}
    collected = {}
    for name, layer in layers.items():
        window, soft_cap, scale = (_attribute(layer, attribute) for attribute in LayerHyperparameters._fields)
        for attribute, value in (("sliding_window", window or 0), ("soft_cap", soft_cap or 0), ("scale", scale)):
            expect(isinstance(value, (int, float)), f"layers[{name!r}].{attribute}", "a number", value)
        collected[name] = LayerHyperparameters(int(window or 0), float(soft_cap or 0), float(scale))
    return collected


def common_layer_hyperparameters(per_layer: Mapping[str, LayerHyperparameters]) -> LayerHyperparameters:
    """The values that all layers share, for what is prepared once per step for all of them.

    Args:
        per_layer: what :func:`collect_layer_hyperparameters` gave.

    Raises:
        ValueError: there are no layers, or they differ; names the layers of each set of values.
    """
    expect(bool(per_layer), "per_layer", "one layer or more", "none")
    groups: dict[LayerHyperparameters, list[str]] = {}
    for name, values in per_layer.items():
        groups.setdefault(values, []).append(name)
    if len(groups) > 1:
        listed = "; ".join(f"{', '.join(names)}: {tuple(values)}" for values, names in groups.items())
        same = f"the same {LayerHyperparameters._fields} in all layers (prepare each group by itself)"
        expect(False, "per_layer", same, listed)
    return next(iter(groups))


def _attribute(layer: Any, attribute: str) -> Any:
    """The first of an attribute's names that a layer has, else None."""
    for name in _ATTRIBUTES[attribute]:
        value = layer.get(name) if isinstance(layer, Mapping) else getattr(layer, name, None)
        if value is not None:
            return value
    return None
