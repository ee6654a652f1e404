"""The parameters of a request, :class:`SamplingParams`, with their checks, and the log-probabilities of a token.

Sources of the ideas: logits processors and stopping criteria are called as transformers calls its own; presence and
frequency penalties are defined as in OpenAI's completions.

Letters: V vocabulary, n tokens of a sequence.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from paged_ops.checks import describe_setting, expect, is_integer, optional_function

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [1, n], scores [1, V]) -> scores [1, V]
StoppingCriterion = Callable[[Tensor, Tensor], Any]  # (input_ids [1, n], scores [1, V]) -> bool, or a tensor of one

MOST_ID = 2**63  # token ids lie below it, as in int64


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    A field that is None takes its value from ``GenerationLoop(generation_config=...)``, else from the model's
    generation config, else from transformers' defaults: greedy, 20 new tokens, and ``top_k`` 50 when sampling. So a
    request without parameters is continued as ``model.generate(prompt)`` continues it.

    Args:
        max_new_tokens: the most tokens to generate.
        temperature: 0 takes the likeliest token; above 0, logits are divided by it, and tokens are drawn. None follows
            ``do_sample`` of the generation config.
        top_p: sample from the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
        seed: of this request's random numbers, which do not depend on the rest of the batch: at least -2^63 and below
            2^64. None takes a new one from the loop.
        stop_token_ids: tokens that end the sequence, and are then its last token; ``()`` means no token. None means the
            end-of-sequence tokens of the generation config.
        n: the number of samples of the prompt, which is computed once. None follows ``num_return_sequences``.
        logprobs: with each token, give its log-probability, and the ones of this number of likeliest tokens, from the
            model's own logits: before penalties, processors and temperature. Of equal ones the lower id comes first.
            None gives none.
        logits_processor: ``(input_ids [1, n], scores [1, V]) -> scores``, or several, called after the penalties and
            before the temperature: transformers' (``LogitsProcessorList``), or any function. Scores are
            float32; ``input_ids`` are prompt and output.
        stopping_criteria: ``(input_ids [1, n], scores [1, V]) -> bool`` or a bool tensor of one, or several, called
            with each new token: transformers' (``StoppingCriteriaList``), or any function.
        top_k: sample from this number of likeliest tokens; 0 is off.
        min_p: sample from tokens whose probability is at least this part of the likeliest one's; 0 is off.
        repetition_penalty: positive logits of tokens of the prompt and the output are divided by it, others are
            multiplied by it; 1 is off.
        presence_penalty: is subtracted from the logits of tokens of the output; 0 is off.
        frequency_penalty: is subtracted once for each time that the token is in the output; 0 is off.
        min_new_tokens: the number of tokens before a token that ends the sequence can be chosen.
        stop_strings: a string that ends the sequence, or several; ``()`` means none. Its tokens stay in the output. The
            loop needs the model's tokenizer: ``GenerationLoop(tokenizer=...)``.
        logits_processor_factory: a function without arguments that makes a ``logits_processor`` for each of the ``n``
            samples. For processors that keep state of their own, such as grammars.
        prompt_logprobs: give the log-probability of each token of the prompt but the first, and the ones of this
            number of likeliest tokens: ``Output.prompt_logprobs``. Such a prompt is computed whole, without cached
            prefixes.

    Raises:
        ValueError: a value is out of range, or of another type.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: Iterable[int] | None = None
    n: int | None = None
    logprobs: int | None = None
    logits_processor: LogitsProcessor | Iterable[LogitsProcessor] | None = None
    stopping_criteria: StoppingCriterion | Iterable[StoppingCriterion] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_new_tokens: int | None = None
    stop_strings: str | Iterable[str] | None = None
    logits_processor_factory: Callable[[], Any] | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _FIELDS.items():
            value = getattr(self, name)
            expect(value is None or is_valid(value), name, expected, describe_setting(value))
            if is_integer(value):  # of numpy or a tensor
                object.__setattr__(self, name, operator.index(value))
        expect(self.top_p != 0, "top_p", "a number in (0, 1]", self.top_p)
        # Iterators are read once, so the fields are tuples from here on.
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.stop_strings is not None:
            object.__setattr__(self, "stop_strings", strings("stop_strings", self.stop_strings))
        for name in ("logits_processor", "stopping_criteria"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, functions(name, getattr(self, name)))
        optional_function("logits_processor_factory", self.logits_processor_factory)


def check_field(name: str, value: Any, argument: str) -> None:
    """Refuses a value of a field of :class:`SamplingParams` that is out of range; a config's ``top_p`` may be 0."""
    is_valid, expected = _FIELDS[name]
    expect(is_valid(value), argument, expected, describe_setting(value))


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position."""

    logprob: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the likeliest first


def functions(argument: str, given: Any) -> tuple[Callable[..., Any], ...]:
    """One callable, or several, or None, as a tuple of callables."""
    if given is None:
        return ()
    is_one = callable(given) and not isinstance(given, (list, tuple))  # transformers' lists can be called
    several = (given,) if is_one or not isinstance(given, Iterable) else tuple(given)
    for each in several:
        expect(callable(each), argument, "a callable (input_ids, scores), or several", each)
    return several


def token_ids(argument: str, given: Any) -> tuple[int, ...]:
    """Several token ids as a tuple of Python's integers."""
    several = tuple(given) if isinstance(given, Iterable) else (None,)
    are_ids = all(is_integer(each, 0) and operator.index(each) < MOST_ID for each in several)
    expect(are_ids, argument, "token ids, from 0 to below 2^63", given if several == (None,) else several)
    return tuple(map(operator.index, several))


def strings(argument: str, given: Any) -> tuple[str, ...]:
    """One string, or several, as a tuple."""
    several = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    are_texts = all(isinstance(each, str) and each for each in several)
    expect(are_texts, argument, "a string that is not empty, or several", several)
    return several


def _is_number(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    def is_valid(value: Any) -> bool:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        return math.isfinite(number) and least <= number <= most

    return is_valid


def _is_seed(value: Any) -> bool:
    return is_integer(value, -(2**63)) and operator.index(value) < 2**64


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: is_integer(value, 1), "an integer of at least 1"),
    "temperature": (_is_number(0), "a finite number, 0 (greedy) or more"),
    "top_p": (_is_number(0, 1), "a number in (0, 1]"),
    "top_k": (lambda value: is_integer(value, 0), "an integer, 0 (off) or more"),
    "min_p": (_is_number(0, 1), "a number in [0, 1]"),
    "repetition_penalty": (_is_number(1e-30, 1e30), "a number above 0"),
    "presence_penalty": (_is_number(-1e30, 1e30), "a finite number"),
    "frequency_penalty": (_is_number(-1e30, 1e30), "a finite number"),
    "min_new_tokens": (lambda value: is_integer(value, 0), "an integer of at least 0"),
    "seed": (_is_seed, "an integer from -2^63 to below 2^64"),
    "n": (lambda value: is_integer(value, 1), "an integer of at least 1"),
    "logprobs": (lambda value: is_integer(value, 0), "a count"),
    "prompt_logprobs": (lambda value: is_integer(value, 0), "a count"),
}
