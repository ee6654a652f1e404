"""The defaults of a request's parameters: from a generation config, else from transformers.

A generation config is read as plain data. Its fields are in one of four classes: served by this module for any model;
served by processors and criteria that the model's library makes; refused; and ignored, because they change no token
(speed, memory, the form of the result).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_ops.checks import describe_setting, expect, is_integer
from paged_ops.generation.distribution import bits_of, inverse_of, penalize
from paged_ops.generation.params import SamplingParams, check_field, functions, strings

NEW_TOKENS, TOP_K = 20, 50  # transformers' defaults, for all models whose config says nothing

# Fields and the values that turn them off. BEFORE: applied before a request's own processors. ALONGSIDE: applied with
# temperature, top-k, top-p and min-p. STOPPING: stopping criteria.
BEFORE: dict[str, Any] = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
ALONGSIDE: dict[str, Any] = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "watermarking_config": None,
    "renormalize_logits": False,
}
STOPPING: dict[str, Any] = {"stop_strings": None, "max_time": None}
REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "a loop has no beams"),
    "num_beam_groups": (1, "a loop has no beams"),
    "diversity_penalty": (0.0, "a loop has no beams"),
    "constraints": (None, "a loop has no beams"),
    "force_words_ids": (None, "a loop has no beams"),
    "guidance_scale": (1.0, "the model would have to run a second time"),
    "token_healing": (False, "it changes the prompt; change it before it is submitted"),
    "penalty_alpha": (0.0, "contrastive search runs the model for each candidate"),
    "dola_layers": (None, "it needs the logits of earlier layers"),
    "assistant_ensemble_weight": (None, "there are no draft models"),
}
SERVED = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "frequency_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "num_return_sequences",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)


class Library(Protocol):
    """Makes processors and criteria of a generation config's fields, for one model, by the model's library.

    Attributes:
        fields: the model's own generation config as plain data, without fields that are not set.
        names: all names that a config of this library has.
    """

    fields: Mapping[str, Any]
    names: frozenset[str]

    def processors(
        self, fields: Mapping[str, Any], settings: Settings, prompt: Sequence[int], own: Sequence[Callable[..., Any]]
    ) -> Sequence[Callable[..., Any]]:
        """Processors in the library's order, with the request's own among them."""

    def criteria(self, fields: Mapping[str, Any], tokenizer: Any) -> Sequence[Callable[..., Any]]: ...


@dataclass(frozen=True)
class Settings:
    """How one prompt is continued: :class:`SamplingParams` with all defaults filled in, without functions."""

    max_new_tokens: int = NEW_TOKENS
    n: int = 1
    stop: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    replaces_nan: bool = False

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def chooses(self) -> bool:
        """Whether the token may be another than the likeliest, or more is asked for."""
        return bool(self.temperature or self.has_penalties or self.min_new_tokens or self.logprobs is not None)

    @property
    def asks_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @functools.cached_property
    def limits(self) -> tuple[int, int, int]:
        """For the kernels that draw: the bits of the inverse temperature, top_p and min_p."""
        inverse = inverse_of(torch.tensor(self.temperature, dtype=torch.float64, device="cpu")).item()
        return bits_of(inverse), bits_of(self.top_p), bits_of(self.min_p)

    @functools.cached_property
    def penalties(self) -> tuple[int, int, int]:
        """For the kernels that lower scores: the bits of each penalty."""
        return bits_of(self.repetition_penalty), bits_of(self.presence_penalty), bits_of(self.frequency_penalty)

    def without_sampling(self) -> Settings:
        """What decides about blocks and ends, but not about tokens."""
        kept = ("max_new_tokens", "n", "stop", "logprobs", "prompt_logprobs")
        return Settings(**{name: getattr(self, name) for name in kept})


class Defaults:
    """The parameters that requests of a loop have where they give none.

    Args:
        library: of the model, or None: fields that need it are then refused.
        given: a generation config for the loop: a mapping, or an object with ``to_dict`` such as transformers'
            ``GenerationConfig``. Its fields override the model's; a None in a mapping sets a field to its default.
        stop_token_ids: of a model without a library.
        tokenizer: for ``stop_strings``.
        processors, criteria: for all requests, before their own.
        limit: most tokens of prompt and output.

    Raises:
        ValueError: a field cannot be served, is out of range, or does not exist.
    """

    def __init__(
        self,
        library: Library | None,
        given: Any,
        stop_token_ids: Sequence[int],
        tokenizer: Any,
        processors: tuple[Callable[..., Any], ...],
        criteria: tuple[Callable[..., Any], ...],
        limit: int,
    ) -> None:
        known = tokenizer is None or callable(getattr(tokenizer, "decode", None))
        expect(known, "tokenizer", "a tokenizer, as AutoTokenizer.from_pretrained returns", describe_setting(tokenizer))
        self.limit = limit
        self._library, self._tokenizer = library, tokenizer
        self._processors, self._criteria = processors, criteria
        fields = {} if library is None else dict(library.fields)
        if stop_token_ids:
            fields.setdefault("eos_token_id", tuple(stop_token_ids))
        self._fields = {**fields, **self._read(given)}
        self._check()
        self.stop_token_ids = self._end_of_text()

    def _read(self, given: Any) -> dict[str, Any]:
        """The fields that a loop's generation config sets."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            fits = callable(getattr(given, "to_dict", None))
            expect(fits, "generation_config", "a GenerationConfig, or a mapping of its fields", given)
            return fields_of(given)
        known = SERVED | BEFORE.keys() | ALONGSIDE.keys() | STOPPING.keys() | REFUSED.keys()
        if self._library is not None:
            known |= self._library.names
        unknown = sorted(map(str, given.keys() - known))
        expect(not unknown, "generation_config", "fields of a generation config", unknown)
        return dict(given)

    def _check(self) -> None:
        """Refuses what cannot be served."""
        fields = self._fields
        for name, (off, reason) in REFUSED.items():
            expect(not is_on(fields, name, off), f"generation_config.{name}", f"{off}, as {reason}", fields.get(name))
        for name, off in {**BEFORE, **ALONGSIDE, **STOPPING}.items():
            is_served = self._library is not None or not is_on(fields, name, off)
            reason = f"{off}, as this model is a plain step, and processors of transformers come with PagedCausalLM"
            expect(is_served, f"generation_config.{name}", reason, fields.get(name))
        for name, least in (("max_length", 1), ("min_length", 0)):
            value = fields.get(name)
            fits = value is None or is_integer(value, least)
            expect(fits, f"generation_config.{name}", f"an integer of at least {least}", describe_setting(value))
        value = fields.get("do_sample")
        expect(value in (None, True, False), "generation_config.do_sample", "True or False", describe_setting(value))
        value = fields.get("max_time")
        is_time = value is None or isinstance(value, Real)
        expect(is_time, "generation_config.max_time", "seconds", describe_setting(value))
        for name in SERVED & {each.name for each in dataclasses.fields(SamplingParams)}:
            if fields.get(name) is not None:
                check_field(name, fields[name], f"generation_config.{name}")
        if fields.get("num_return_sequences") is not None:
            check_field("n", fields["num_return_sequences"], "generation_config.num_return_sequences")
        self._end_of_text()
        self._make_criteria(fields)
        try:  # the library's own checks
            self._make_processors(self._settings(SamplingParams(), 1, 2), [0], ())
        except Exception as error:
            raise ValueError(
                f"generation_config: expected fields that make processors, got {fields}: {error}"
            ) from error

    def _end_of_text(self) -> tuple[int, ...]:
        ids = self._fields.get("eos_token_id")
        ids = () if ids is None else ids.tolist() if hasattr(ids, "tolist") else ids
        return tuple(each for each in _ids(ids) if each >= 0)  # some configs have -1 for none

    def settings(self, params: SamplingParams, name: str, prompt: Sequence[int]) -> Settings:
        """The request's parameters.

        Raises:
            ValueError: the prompt leaves no room for a token, or for the tokens that the request asks for.
        """
        n, limit, fields = len(prompt), self.limit, self._fields
        most = params.max_new_tokens
        if most is None:
            most, longest = fields.get("max_new_tokens"), fields.get("max_length")
            if most is None and longest is not None:
                expect(n < longest, name, f"fewer tokens than max_length = {longest}", n)
                most = longest - n
            most = min(most or NEW_TOKENS, max(limit - n, 1))
        room = f"at most {limit} tokens with max_new_tokens (max_model_len, the cache)"
        expect(n + most <= limit, name, room, n + most)
        return self._settings(params, n, operator.index(most))

    def _settings(self, params: SamplingParams, num_prompt: int, max_new_tokens: int) -> Settings:
        fields = self._fields

        def value(name: str, default: Any) -> Any:
            own = getattr(params, name)
            own = fields.get(name) if own is None else own
            return default if own is None else own

        temperature = params.temperature
        if temperature is None:
            temperature = value("temperature", 1.0) if fields.get("do_sample") else 0.0
        least = value("min_new_tokens", None)
        if least is None:
            least = max((fields.get("min_length") or 0) - num_prompt, 0)
        n = fields.get("num_return_sequences") if params.n is None else params.n
        return Settings(
            max_new_tokens=max_new_tokens,
            n=operator.index(n or 1),
            stop=frozenset(self._end_of_text() if params.stop_token_ids is None else params.stop_token_ids),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            temperature=float(temperature),
            top_k=operator.index(value("top_k", TOP_K)),
            top_p=float(value("top_p", 1.0)),
            min_p=float(value("min_p", 0.0)),
            repetition_penalty=float(value("repetition_penalty", 1.0)),
            presence_penalty=float(value("presence_penalty", 0.0)),
            frequency_penalty=float(value("frequency_penalty", 0.0)),
            min_new_tokens=operator.index(least),
            replaces_nan=fields.get("remove_invalid_values") is True,
        )

    def processors(
        self, params: SamplingParams, settings: Settings, prompt: Sequence[int]
    ) -> tuple[Settings, tuple[Callable[..., Any], ...]]:
        """The processors of one sample, and its settings without what these processors do."""
        made = None if params.logits_processor_factory is None else params.logits_processor_factory()
        own = (
            self._processors
            + functions("logits_processor", params.logits_processor)
            + functions("logits_processor_factory", made)
        )
        return self._make_processors(settings, prompt, own)

    def _make_processors(
        self, settings: Settings, prompt: Sequence[int], own: tuple[Callable[..., Any], ...]
    ) -> tuple[Settings, tuple[Callable[..., Any], ...]]:
        """The library makes all processors of a stage if one of them is its own: this keeps their order."""
        library = self._library
        if library is None:
            return settings, own
        before = any(is_on(self._fields, name, off) for name, off in BEFORE.items())
        # The library lets a request's processor replace one of the same type.
        before |= bool(own) and (settings.repetition_penalty != 1 or settings.min_new_tokens > 0)
        samples = settings.temperature > 0
        alongside = is_on(self._fields, "watermarking_config", None) or (
            samples and any(is_on(self._fields, name, off) for name, off in ALONGSIDE.items())
        )
        if not before and not alongside:
            return settings, own
        fields = {name: self._fields.get(name) for name in BEFORE}
        left = settings
        if before:
            fields |= {"repetition_penalty": settings.repetition_penalty, "min_new_tokens": settings.min_new_tokens}
            left = dataclasses.replace(left, repetition_penalty=1.0, min_new_tokens=0)
            if settings.presence_penalty or settings.frequency_penalty:  # they come after the repetition penalty
                own = (_penalties_of_output(settings, len(prompt)), *own)
                left = dataclasses.replace(left, presence_penalty=0.0, frequency_penalty=0.0)
        if alongside:
            fields |= {name: self._fields.get(name) for name in ALONGSIDE}
        if alongside and samples:
            fields |= {"do_sample": True, "min_p": settings.min_p or None}  # 0 would be a processor that does nothing
            fields |= {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
            left = dataclasses.replace(left, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        return left, tuple(library.processors(fields, settings, prompt, own))

    def criteria(self, params: SamplingParams) -> tuple[Callable[..., Any], ...]:
        """The stopping criteria of one request.

        Raises:
            ValueError: there are stop strings, and no tokenizer or no library.
        """
        fields = dict(self._fields)
        if params.stop_strings is not None:
            fields["stop_strings"] = params.stop_strings
        own = functions("stopping_criteria", params.stopping_criteria)
        return self._make_criteria(fields) + self._criteria + own

    def _make_criteria(self, fields: Mapping[str, Any]) -> tuple[Callable[..., Any], ...]:
        needed = {name: fields[name] for name, off in STOPPING.items() if is_on(fields, name, off)}
        if not needed:
            return ()
        if "stop_strings" in needed:
            needed["stop_strings"] = strings("stop_strings", needed["stop_strings"])
            remedy = "none, as this model is a plain step; give stopping_criteria"
            expect(self._library is not None, "stop_strings", remedy, needed["stop_strings"])
            has = self._tokenizer is not None
            expect(has, "stop_strings", "none, or GenerationLoop(tokenizer=...)", needed["stop_strings"])
        assert self._library is not None
        return tuple(self._library.criteria(needed, self._tokenizer))


def fields_of(config: Any) -> dict[str, Any]:
    """The fields that a config object sets, as plain data."""
    unset = type(config)().to_dict()  # older versions of transformers have their defaults there
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return {name: value for name, value in fields.items() if value is not None and value != unset.get(name)}


def is_on(fields: Mapping[str, Any], name: str, off: Any) -> bool:
    """Whether a field has another value than the one that is off."""
    value = fields.get(name)
    return value is not None and value is not False and value != off and value not in ((), [], {})


def _penalties_of_output(settings: Settings, num_prompt: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that applies the presence and frequency penalties."""
    presence, frequency = [settings.presence_penalty], [settings.frequency_penalty]

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        penalize(scores, [input_ids[0]], [num_prompt], [1.0], presence, frequency)
        return scores

    return processor


def _ids(given: Any) -> Sequence[int]:
    several = given if isinstance(given, (list, tuple)) else (given,)
    expect(all(map(is_integer, several)), "generation_config.eos_token_id", "a token id, or several", given)
    return list(map(operator.index, several))
