"""A model's generation config as plain data, and transformers' own processors and criteria for its fields."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from paged_ops.generation.settings import Settings, fields_of

_KEPT_CRITERIA = 64  # cached criteria for stop strings; making one is a pass over the vocabulary


class GenerationFields:
    """A :class:`paged_ops.generation.settings.Library` for one model of transformers. It makes processors with the code
    of ``generate()``, so their order and meaning are the same.

    The model's generation config is read when this object is made.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        config = model.generation_config
        self.fields: Mapping[str, Any] = {} if config is None else fields_of(config)
        self._blank = GenerationConfig()
        self.names = frozenset(self._blank.to_dict())
        self._stop_strings = functools.lru_cache(_KEPT_CRITERIA)(self._make_stop_strings)

    def processors(
        self, fields: Mapping[str, Any], settings: Settings, prompt: Sequence[int], own: Sequence[Callable[..., Any]]
    ) -> Sequence[Callable[..., Any]]:
        """The processors of ``generate()`` for these fields, with the request's own in the same position."""
        device = self._model.device
        config = self._config(fields)
        config.max_new_tokens, config.max_length = settings.max_new_tokens, len(prompt) + settings.max_new_tokens
        if settings.stop:
            config._eos_token_tensor = torch.tensor(sorted(settings.stop), dtype=torch.int64, device=device)
        return self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], dtype=torch.int64, device=device),
            logits_processor=LogitsProcessorList(own),
            device=device,
            model_kwargs={},
        )

    def criteria(self, fields: Mapping[str, Any], tokenizer: Any) -> Sequence[Callable[..., Any]]:
        """The criteria of ``generate()`` for stop strings and a time limit, which starts now."""
        made: list[Callable[..., Any]] = []
        if "max_time" in fields:
            made += self._criteria({"max_time": fields["max_time"]})
        if "stop_strings" in fields:
            made += self._stop_strings(fields["stop_strings"], tokenizer)
        return made

    def _make_stop_strings(self, stop_strings: tuple[str, ...], tokenizer: Any) -> Sequence[Callable[..., Any]]:
        return self._criteria({"stop_strings": list(stop_strings)}, tokenizer)

    def _criteria(self, fields: Mapping[str, Any], tokenizer: Any = None) -> Sequence[Callable[..., Any]]:
        return self._model._get_stopping_criteria(self._config(fields), StoppingCriteriaList(), tokenizer=tokenizer)

    def _config(self, fields: Mapping[str, Any]) -> GenerationConfig:
        config = copy.copy(self._blank)
        for name, value in fields.items():
            is_plain = name == "watermarking_config" and isinstance(value, dict)
            setattr(config, name, WatermarkingConfig.from_dict(value) if is_plain else value)
        config._eos_token_tensor = None
        return config
