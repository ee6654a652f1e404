"""Which tokens of a prompt see each other, read from the masks of a model of transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops.integrations.transformers.attention_function import PROBE
from paged_ops.integrations.transformers.probe import masks_by_type, ranges_of, reach_of
from paged_ops.integrations.transformers.recurrent import cache_argument


def ranges_of_prompt(model: Any, token_type_ids: Sequence[int] | Tensor) -> list[tuple[int, int]]:
    """See :meth:`paged_ops.integrations.transformers.PagedCausalLM.bidirectional_ranges`."""
    name = type(model).__name__
    if not masks_by_type(model):
        raise ValueError(f"model: expected one whose masks depend on token_type_ids, got {name}")
    types = torch.as_tensor(token_type_ids, dtype=torch.int64, device="cpu")
    if types.dim() != 1 or not len(types):
        raise ValueError(f"token_type_ids: expected one prompt's, [n], got shape {list(types.shape)}")
    config = copy.deepcopy(model.config)
    for each in (config, config.get_text_config(decoder=True)):
        each._attn_implementation_internal = PROBE
    n = len(types)
    prompt = {
        "inputs_embeds": torch.zeros(1, n, 1, dtype=torch.float32, device="cpu"),
        "attention_mask": torch.ones(1, n, dtype=torch.bool, device="cpu"),
        "position_ids": torch.arange(n, device="cpu")[None],
        cache_argument(model.create_masks_for_generate) or "past_key_values": None,
    }
    plain, typed = (
        model.create_masks_for_generate(config=config, token_type_ids=each, is_first_iteration=True, **prompt)
        for each in (None, types[None])
    )
    found: set[tuple[tuple[int, int], ...]] = set()
    # with types, Gemma-3 also makes masks for kinds of layers that it may not have
    for kind in filter(plain.__contains__, typed) if isinstance(plain, dict) else (None,):
        causal, overlaid = (each[kind] if isinstance(each, dict) else each for each in (plain, typed))
        reach = reach_of(causal.request.mask_function, n)
        ranges = None if reach is None else ranges_of(overlaid.request.mask_function, reach, n)
        if ranges is None:
            raise ValueError(
                "token_type_ids: expected masks that are causal, with or without a window or chunks, and open"
                f" within ranges of tokens, got another one from {name}" + (f" in its {kind}" if kind else "")
            )
        found.add(tuple(ranges))
    if len(found) != 1:
        raise ValueError(f"token_type_ids: expected the same ranges in all layers, got {sorted(found)} from {name}")
    return list(found.pop())
