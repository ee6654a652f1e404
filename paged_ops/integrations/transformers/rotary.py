"""Position embeddings whose frequencies depend on the sequence length, fixed to one length."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paged_ops.integrations.transformers.wrapping import NAME, UNDO

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class FrozenRotary(nn.Module):
    """A rotary embedding whose frequencies depend on the sequence length, fixed to one length.

    Raises when called by a model that does not attend through paged_ops: its sequences need their own frequencies.
    """

    def __init__(self, rotary: nn.Module, config: Any, length: int | None) -> None:
        super().__init__()
        frozen: Any = copy.copy(rotary)
        frozen._buffers = dict(rotary._buffers)
        rope_types = frozen.rope_type
        each = rope_types if isinstance(rope_types, dict) else {None: rope_types}
        for kind, rope_type in each.items():
            if rope_type not in _LENGTH_DEPENDENT:
                continue
            prefix = "" if kind is None else f"{kind}_"
            options = {} if kind is None else {"layer_type": kind}
            device = frozen._buffers[f"{prefix}inv_freq"].device
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](frozen.config, device, seq_len=length, **options)
            frozen._buffers[f"{prefix}inv_freq"] = inv_freq
            setattr(frozen, f"{prefix}attention_scaling", scaling)
        if "long_mscale" in (parameters := getattr(frozen.config, "rope_parameters", None) or {}):
            # PhiMoE scales all sequences of a batch by the longest one
            original = parameters["original_max_position_embeddings"]
            mscale = parameters["long_mscale" if length is not None and length > original else "short_mscale"]
            frozen.config = copy.copy(frozen.config)
            frozen.config.rope_parameters = {**parameters, "long_mscale": mscale, "short_mscale": mscale}
        # with another name here, forward does not compute them again
        frozen.rope_type = dict.fromkeys(each, "frozen") if isinstance(rope_types, dict) else "frozen"
        self.rotary, self.config, self.armed = frozen, config, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.armed and self.config._attn_implementation != NAME:
            raise ValueError(f"model: its position embeddings are fixed to one length; {UNDO}")
        return self.rotary(*args, **kwargs)


def length_dependent(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The rotary embeddings whose frequencies depend on the sequence length: parent, name, module."""
    for parent in model.modules():
        for name, module in parent.named_children():
            rope_type = getattr(module, "rope_type", None)
            each = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
            if any(kind in _LENGTH_DEPENDENT for kind in each):
                yield parent, name, module


def stretch(rotary: Any) -> float:
    """How many times longer than the model's positions sequences may be."""
    parameters = rotary.config.rope_parameters
    each = parameters.values() if isinstance(rotary.rope_type, dict) else (parameters,)
    return max(one.get("factor", 1.0) if one.get("rope_type") == "dynamic" else 1.0 for one in each)
