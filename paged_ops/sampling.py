"""From logits to tokens: how a sequence is continued, for all rows of a step at once.

Random numbers are a hash of (seed, sample, position, token): a draw does not depend on the rest of the batch,
has no state that a failed step would have to restore, and is the same on every device.

Sources of the ideas: nucleus sampling of Holtzman et al. (2019, arXiv:1904.09751); counter-based random numbers of
Salmon et al. (SC 2011), here with SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); logits processors and stopping
criteria are called as transformers calls its own.

Letters: S rows of logits, R rows to choose for, V vocabulary, n tokens of a sequence.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect

if TYPE_CHECKING:
    from paged_ops.request import Request

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [1, n], scores [1, V]) -> scores [1, V]
StoppingCriterion = Callable[[Tensor, Tensor], Any]  # (input_ids [1, n], scores [1, V]) -> bool, or a tensor of one


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    Args:
        max_new_tokens: the most tokens to generate.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it before the softmax.
        top_p: sample from the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
        seed: the seed of this request's random numbers, which do not depend on the rest of the batch. None takes a new
            one from the loop.
        stop_token_ids: tokens that end the sequence, and are then its last token. None means the model's own end of
            text, ``()`` means no token.
        n: the number of samples of the prompt, which is computed once.
        logprobs: with each token, give its log-probability and those of this many likeliest tokens, from the model's
            own logits: before processors, temperature and top_p. None gives none.
        logits_processor: ``(input_ids [1, n], scores [1, V]) -> scores``, or several, called before the choice: those
            of transformers (``LogitsProcessorList``), or any function. Scores are float32; ``input_ids`` are prompt and
            output.
        stopping_criteria: ``(input_ids [1, n], scores [1, V]) -> bool`` or a bool tensor of one, or several, called
            with each new token: those of transformers (``StoppingCriteriaList``), or any function.

    Raises:
        ValueError: a value is out of range, or of another type.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    n: int = 1
    logprobs: int | None = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None

    def __post_init__(self) -> None:
        expect(_is_int(self.max_new_tokens, 1), "max_new_tokens", "an integer of at least 1", self.max_new_tokens)
        is_finite = _is_real(self.temperature) and bool(0 <= self.temperature < math.inf)
        expect(is_finite, "temperature", "a finite number, 0 (greedy) or more", self.temperature)
        is_part = _is_real(self.top_p) and bool(0 < self.top_p <= 1)
        expect(is_part, "top_p", "a number in (0, 1]", self.top_p)
        expect(self.seed is None or _is_int(self.seed), "seed", "an integer or None", self.seed)
        listed = self.stop_token_ids is None or _are_ids(self.stop_token_ids)
        expect(listed, "stop_token_ids", "a sequence of token ids, or None for the model's", self.stop_token_ids)
        expect(_is_int(self.n, 1), "n", "an integer of at least 1", self.n)
        expect(self.logprobs is None or _is_int(self.logprobs, 0), "logprobs", "a count or None", self.logprobs)
        functions("logits_processor", self.logits_processor)
        functions("stopping_criteria", self.stopping_criteria)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position."""

    logprob: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the likeliest first


class Choices(NamedTuple):
    """What :func:`choose` found for R requests."""

    tokens: list[int]  # -1 where the logits hold NaN, or no finite value
    stops: set[int]  # indices of the requests that a stopping criterion ends
    logprobs: dict[int, TokenLogprobs]  # of those that asked for them


def functions(argument: str, given: Any) -> tuple[Callable[..., Any], ...]:
    """One callable, or several, or None, as a tuple of callables."""
    if given is None:
        return ()
    several = (given,) if callable(given) else tuple(given) if isinstance(given, Iterable) else (given,)
    for each in several:
        expect(callable(each), argument, "a callable (input_ids, scores), or several", each)
    return several


def choose(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> Choices:
    """The next token of each request, from its row of ``logits [S, V]``; a row may serve several requests.

    If all requests are greedy and ask for nothing more, one transfer brings all tokens to the host.
    """
    if not rows:
        return Choices([], set(), {})
    special = [i for i, request in enumerate(requests) if request.is_special]
    best, likeliest = logits.max(-1)
    if not special:
        of_row = _finite(best, likeliest)
        return Choices([of_row[row] for row in rows], set(), {})
    scores = logits[on_device([rows[i] for i in special], torch.int64, logits.device)].float()
    best_special, chosen = _choose_special(scores, [requests[i] for i in special])
    of_row = _finite(torch.cat((best, best_special)), torch.cat((likeliest, chosen)))
    tokens = [of_row[row] for row in rows]
    for k, i in enumerate(special):
        if tokens[i] >= 0:  # else the logits hold NaN, even if a processor has hidden it
            tokens[i] = of_row[len(logits) + k]
    stops = {
        i
        for k, i in enumerate(special)
        if requests[i].criteria and tokens[i] >= 0 and _stops(requests[i], tokens[i], scores[k : k + 1])
    }
    return Choices(tokens, stops, _logprobs(logits, rows, tokens, requests))


def draw(scores: Tensor, temperature: Tensor, top_p: Tensor | None, keys: Tensor) -> Tensor:
    """One token per row, int64 ``[R]``, from scores ``[R, V]`` by temperature and top-p.

    Args:
        scores: float32; -inf is never drawn.
        temperature: float32 ``[R]``, above 0.
        top_p: float32 ``[R]``; None is 1, all tokens, in all rows.
        keys: int64 ``[R]``: a row's random numbers are a function of its key only; see :func:`random_key`.
    """
    # The largest is 0 before the division, so even the smallest temperature gives 0 and -inf, not inf.
    scaled = (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=1e-30)[:, None]
    probabilities = torch.softmax(scaled, -1)
    if top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest token always stays
        ordered.masked_fill_((before >= top_p[:, None]) & (top_p < 1)[:, None], 0)
        probabilities.scatter_(-1, order, ordered)
    # Of V exponential clocks with these rates, each rings first with its token's probability.
    return (probabilities.double() / exponentials(keys, scores.shape[-1])).argmax(-1)


def random_key(seed: int, sample: int, position: int) -> int:
    """A key for :func:`draw`, as a signed 64-bit number: equal arguments, equal random numbers."""
    key = 0
    for number in (seed, sample, position):
        key = _mixed((key ^ number) + _STRIDE & _ALL)
    return key - (key >> 63 << 64)


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Exponential random numbers of rate 1, float64 ``[R, size]``: a function of the keys (int64 ``[R]``) only.

    Element i of a row is ``-log(u)``, where u in (0, 1) are the upper 53 bits of the i-th output of SplitMix64 that
    starts at the row's key.
    """
    counters = torch.arange(1, size + 1, dtype=torch.int64, device=keys.device)
    bits = keys[:, None] + counters * _signed(_STRIDE)
    for shift, factor in _ROUNDS:
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    bits ^= _shifted(bits, _LAST_SHIFT)
    return (_shifted(bits, 11).double().add_(0.5) * 2.0**-53).log_().neg_()


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on a device, without waiting for the device."""
    on_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_gpu).to(device, non_blocking=True)


_ALL = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def _mixed(bits: int) -> int:
    for shift, factor in _ROUNDS:
        bits = (bits ^ bits >> shift) * factor & _ALL
    return bits ^ bits >> _LAST_SHIFT


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros; int64's own fills with the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)


def _finite(best: Tensor, tokens: Tensor) -> list[int]:
    """Tokens ``[R]`` on the host; -1 where the best logit is not finite. In a row with NaN the best is NaN."""
    if tokens.device.type == "cpu":
        values, found = best.tolist(), tokens.tolist()
    else:
        values, found = _by_one_transfer(best, tokens)
    if not math.isfinite(sum(values)):
        return [token if math.isfinite(value) else -1 for value, token in zip(values, found, strict=True)]
    return found


def _by_one_transfer(best: Tensor, tokens: Tensor) -> tuple[list[float], list[int]]:
    numbers = torch.cat((best.double(), tokens)).tolist()
    return numbers[: len(tokens)], list(map(int, numbers[len(tokens) :]))


def _choose_special(scores: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """The largest score and the token of each row of scores ``[R, V]``, after its request's processors, which write
    their result into it."""
    for k, request in enumerate(requests):
        for processor in request.processors:
            row = scores[k : k + 1]
            processed = _of_request(request, "logits_processor", processor, request.input_ids(scores.device), row)
            fits = isinstance(processed, Tensor) and processed.shape == row.shape
            expect(fits, "logits_processor", f"scores {list(row.shape)} from {processor!r}", processed)
            row.copy_(processed)
    best, tokens = scores.max(-1)
    draws = [k for k, request in enumerate(requests) if request.params.temperature]
    most = max(1, 2**24 // scores.shape[-1])  # bounds the memory of the random numbers
    for start in range(0, len(draws), most):
        part = draws[start : start + most]
        params = [requests[k].params for k in part]
        index = on_device(part, torch.int64, scores.device)
        temperature = on_device([each.temperature for each in params], torch.float32, scores.device)
        top_p = None
        if any(each.top_p < 1 for each in params):
            top_p = on_device([each.top_p for each in params], torch.float32, scores.device)
        keys = on_device([requests[k].random_key() for k in part], torch.int64, scores.device)
        tokens[index] = draw(scores[index], temperature, top_p, keys)
    return best, tokens


def _stops(request: Request, token: int, scores: Tensor) -> bool:
    input_ids = request.input_ids(scores.device, token)
    return any(
        bool(_of_request(request, "stopping_criteria", criterion, input_ids, scores)) for criterion in request.criteria
    )


def _of_request(request: Request, argument: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Calls a function of the user; a note in its errors names the request."""
    try:
        return function(*inputs)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"raised by the {argument} of request {request.request_id}; the step was given up, and"
                f" abort({request.request_id}) goes on without it"
            )
        raise


def _logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprobs]:
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None and tokens[i] >= 0]
    if not asked:
        return {}
    logprobs = torch.log_softmax(logits[on_device([rows[i] for i in asked], torch.int64, logits.device)].float(), -1)
    chosen = on_device([tokens[i] for i in asked], torch.int64, logits.device)
    most = min(max(requests[i].params.logprobs or 0 for i in asked), logits.shape[-1])
    values, ids = logprobs.topk(most, -1)
    of_chosen = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    result = {}
    for i, logprob, likely, likely_ids in zip(asked, of_chosen, values.tolist(), ids.tolist(), strict=True):
        count = requests[i].params.logprobs
        result[i] = TokenLogprobs(logprob, tuple(zip(likely_ids[:count], likely[:count], strict=True)))
    return result


def _is_int(value: Any, least: int | None = None) -> bool:
    try:
        number = operator.index(value)
    except TypeError:
        return False
    return least is None or number >= least


def _are_ids(values: Any) -> bool:
    return isinstance(values, Iterable) and all(_is_int(value, 0) for value in values)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real)
