"""How the next token of each request is chosen: all rows of a step at once.

Letters: S rows of logits, R rows to choose for, V vocabulary, n tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect
from paged_ops.generation.distribution import draw, on_device, penalize
from paged_ops.generation.params import TokenLogprobs
from paged_ops.generation.request import Request


class Choices(NamedTuple):
    """What :func:`choose` found for R requests."""

    tokens: list[int]  # -1 where the logits hold NaN, or no finite value
    stops: set[int]  # indices of the requests that a stopping criterion ends
    logprobs: dict[int, TokenLogprobs]  # by the index of the request, where asked for
    of_prompts: Sequence[TokenLogprobs] = ()  # of the tokens of prompts, where asked for


def choose(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> Choices:
    """The next token of each request, from its row of ``logits [S, V]``; a row may serve several requests.

    If all requests are greedy and ask for nothing more, one copy transfers all tokens to the host.
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
        # a row with NaN has no token, even if a processor has hidden the NaN, unless that is what was asked for
        if tokens[i] >= 0 or requests[i].settings.replaces_nan:
            tokens[i] = of_row[len(logits) + k]
    stops = {
        i
        for k, i in enumerate(special)
        if requests[i].criteria and tokens[i] >= 0 and _stops(requests[i], tokens[i], scores[k : k + 1])
    }
    return Choices(tokens, stops, _logprobs(logits, rows, tokens, requests))


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
    """The largest score and the token of each row of scores ``[R, V]``, after its request's penalties and processors,
    which write their result into it."""
    _penalize(scores, requests)
    for k, request in enumerate(requests):
        for processor in request.processors:
            row = scores[k : k + 1]
            processed = _of_request(request, "logits_processor", processor, request.input_ids(scores.device), row)
            fits = isinstance(processed, Tensor) and processed.shape == row.shape
            expect(fits, "logits_processor", f"scores {list(row.shape)} from {processor!r}", processed)
            row.copy_(processed)
    best, tokens = scores.max(-1)
    draws = [k for k, request in enumerate(requests) if request.settings.temperature]
    most = max(1, 2**24 // scores.shape[-1])  # bounds the memory of the probabilities
    for start in range(0, len(draws), most):
        part = draws[start : start + most]
        index = on_device(part, torch.int64, scores.device)
        tokens[index] = _draw(scores[index], [requests[k] for k in part])
    return best, tokens


def _penalize(scores: Tensor, requests: Sequence[Request]) -> None:
    """Applies the penalties, then hides the ends of sequences that are too short, in place."""
    lowered = [k for k, request in enumerate(requests) if request.settings.has_penalties]
    if lowered:
        index = on_device(lowered, torch.int64, scores.device)
        some, part = [requests[k] for k in lowered], scores[index]
        penalize(
            part,
            [request.input_ids(scores.device)[0] for request in some],
            [request.num_prompt for request in some],
            [request.settings.repetition_penalty for request in some],
            [request.settings.presence_penalty for request in some],
            [request.settings.frequency_penalty for request in some],
        )
        scores[index] = part
    vocabulary = scores.shape[-1]
    hidden = [
        k * vocabulary + token
        for k, request in enumerate(requests)
        if len(request.tokens) - request.num_prompt < request.settings.min_new_tokens
        for token in request.settings.stop
        if token < vocabulary
    ]
    if hidden:
        scores.view(-1).index_fill_(0, on_device(hidden, torch.int64, scores.device), -torch.inf)


def _draw(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    device, all_settings = scores.device, [request.settings for request in requests]
    temperature = on_device([each.temperature for each in all_settings], torch.float32, device)
    keys = on_device([request.random_key() for request in requests], torch.int64, device)
    top_k = top_p = min_p = None
    largest = max(min(each.top_k, scores.shape[-1]) for each in all_settings)
    if largest:
        top_k = on_device([min(each.top_k, scores.shape[-1]) for each in all_settings], torch.int64, device)
    if any(each.top_p < 1 for each in all_settings):
        top_p = on_device([each.top_p for each in all_settings], torch.float64, device)
    if any(each.min_p for each in all_settings):
        min_p = on_device([each.min_p for each in all_settings], torch.float32, device)
    return draw(scores, temperature, keys, top_k, top_p, min_p, largest)


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
    asked = {
        i: request.settings.logprobs
        for i, request in enumerate(requests)
        if request.settings.logprobs is not None and tokens[i] >= 0
    }
    if not asked:
        return {}
    of_rows = logits[on_device([rows[i] for i in asked], torch.int64, logits.device)]
    found = logprobs_of(of_rows, [tokens[i] for i in asked], list(asked.values()))
    return dict(zip(asked, found, strict=True))


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of one token in each row of logits ``[R, V]``, and of ``counts`` likeliest tokens.

    A token of a prompt may have no logit, as the vocabulary of a model's input can be the larger one: it is -inf.
    """
    V = logits.shape[-1]
    result: list[TokenLogprobs] = []
    most = max(1, 2**24 // V)  # bounds the memory of the log-probabilities
    for start in range(0, len(tokens), most):
        part = slice(start, start + most)
        logprobs = torch.log_softmax(logits[part].float(), -1)
        chosen = on_device(tokens[part], torch.int64, logits.device)
        values, ids = logprobs.topk(min(max(counts[part]), V), -1)
        found_of = logprobs.gather(-1, chosen.clamp(max=V - 1)[:, None])[:, 0]
        of_chosen = found_of.masked_fill_(chosen >= V, -torch.inf).tolist()
        for count, *found in zip(counts[part], of_chosen, values.tolist(), ids.tolist(), strict=True):
            logprob, likely, likely_ids = found
            result.append(TokenLogprobs(logprob, tuple(zip(likely_ids[:count], likely[:count], strict=True))))
    return result
