"""How the next token of each request is chosen: all rows of a step at once.

Letters: S rows of logits, R rows to choose for, V vocabulary, n tokens of a sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import expect
from paged_ops.generation.distribution import draw, log_softmax, on_device, penalize
from paged_ops.generation.params import TokenLogprobs
from paged_ops.generation.request import Request
from paged_ops.generation.settings import Settings
from paged_ops.lowerings.warm_up import warm_up

_MOST_SCORES = 2**24  # that are drawn from at a time, which bounds the memory of their probabilities


class Choices(NamedTuple):
    """What was chosen for R requests, on the host."""

    tokens: list[int]  # -1 where the logits hold NaN, or no finite value
    stops: set[int]  # indices of the requests that a stopping criterion ends
    logprobs: dict[int, TokenLogprobs]  # by the index of the request, where asked for
    of_prompts: Sequence[TokenLogprobs] = ()  # of the tokens of prompts, where asked for


class Chosen:
    """The tokens of R requests, chosen on the device and on their way to the host.

    Attributes:
        tokens: int64 ``[R]`` on the device; any where there is none to choose.
        requests: that they belong to.
        event: after the copy to the host; None on the CPU.
    """

    def __init__(
        self, best: Tensor, tokens: Tensor, requests: Sequence[Request], in_use: Sequence[Tensor] = ()
    ) -> None:
        """``in_use``: tensors whose addresses kernels have; kept until the tokens are read, as a request can end before
        a step that was launched with it."""
        self.tokens, self.requests, self._in_use = tokens, requests, in_use
        self.event: torch.cuda.Event | None = None
        self._numbers = [best, tokens]
        if tokens.is_cuda:
            for i, numbers in enumerate((best, tokens)):
                self._numbers[i] = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
                self._numbers[i].copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> Choices:
        """Waits for the tokens. One is -1 where the best logit is not finite; in a row with NaN the best is NaN."""
        if self.event is not None:
            self.event.synchronize()
        self._in_use = ()
        best, tokens = self._numbers
        values, found = best.tolist(), tokens.tolist()
        if not math.isfinite(sum(values)):
            found = [token if math.isfinite(value) else -1 for value, token in zip(values, found, strict=True)]
        return Choices(found, set(), {})

    def keep_for_current_stream(self) -> None:
        """Keeps the memory of the tokens until the current stream, which may be another one now, has read them."""
        if self.tokens.is_cuda:
            self.tokens.record_stream(torch.cuda.current_stream(self.tokens.device))

    @functools.cached_property
    def index(self) -> dict[Request, int]:
        """Where the token of each request is."""
        return {request: i for i, request in enumerate(self.requests)}

    def newest(self, request: Request) -> Tensor | None:
        """The token of a request that has not read it yet, int64 ``[1]``."""
        at = self.index.get(request) if request.num_unread else None
        return None if at is None else self.tokens[at : at + 1]


class Awaited(Chosen):
    """The tokens of R requests that rank 0 chooses, on a device of another rank, before they arrive there.

    Attributes:
        event: after the step that this rank's device runs.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.tokens, self.requests = torch.zeros(len(requests), dtype=torch.int64, device=device), requests
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def read(self) -> Choices:
        """Waits for the step. The tokens come from rank 0's host."""
        if self.event is not None:
            self.event.synchronize()
        return Choices([], set(), {})


def choose(
    logits: Tensor, rows: Sequence[int], requests: Sequence[Request], before: Chosen | None = None
) -> Chosen | Choices:
    """The next token of each request, from its row of ``logits [S, V]``; a row may serve several requests.

    On the device, without waiting for it, unless a request is read at once.

    Args:
        before: what the step before has chosen, if the host does not know it yet.
    """
    device = logits.device
    if list(rows) != list(range(len(logits))):
        logits_of = logits[on_device(rows, torch.int64, device)]
    else:
        logits_of = logits
    special = [i for i, request in enumerate(requests) if request.is_special]
    changed = [i for i in special if _changes_scores(requests[i])]
    some, scores, in_use = [requests[i] for i in changed], logits_of, list[Tensor]()
    if changed:
        scores = _penalized(logits_of, changed, some, before, in_use)
    if some and len(some) == len(requests) and not any(map(_may_hide, some)):
        best, tokens = _choose_changed(scores, some)  # which shows every NaN
    else:
        best, tokens = _likeliest(logits_of)
        is_changed = set(changed)
        drawn = [i for i in special if requests[i].settings.temperature and i not in is_changed]
        if drawn:
            tokens = _with_draws(tokens, logits_of, best, drawn, requests)
        if changed:
            best, tokens = _with_changed(best, tokens, changed, some, *_choose_changed(scores, some))
    result = Chosen(best, tokens, requests, in_use)
    if not any(requests[i].is_read_at_once for i in special):
        return result
    found = result.read().tokens
    stops = {
        i
        for k, i in enumerate(changed)
        if requests[i].criteria and found[i] >= 0 and _stops(requests[i], found[i], scores[k : k + 1])
    }
    return Choices(found, stops, _logprobs(logits, rows, found, requests))


def by_kernels(logits: Tensor) -> bool:
    """Whether kernels of this package choose from these logits, and not torch's ops."""
    return logits.is_cuda


def try_draws(logits: Tensor, num_rows: int) -> Callable[[], None]:
    """Begins to compile the kernels that draw from rows like ``logits [S, V]`` on a GPU. The function that it returns
    chooses tokens in every way, which loads these kernels and those of torch; some depend on the number of rows."""
    if not by_kernels(logits):
        return lambda: None
    from paged_ops.lowerings.gpu.draw import draw_rows
    from paged_ops.lowerings.gpu.penalties import penalized

    V, device = logits.shape[-1], logits.device
    ids = on_device([0], torch.int64, device)

    def try_draw(rows: Tensor) -> None:
        each, limits, penalties = range(len(rows)), Settings(temperature=1.0).limits, Settings().penalties
        draw_rows(rows, _likeliest(rows)[0], [(r, 0, 1, *limits) for r in each])
        penalized(rows, [(r, ids.data_ptr(), 1, 0, 0, *penalties) for r in each], None)

    def finish() -> None:
        for R in {1, max(1, min(num_rows, _MOST_SCORES // V))}:
            rows = logits.new_zeros(R, V)
            try_draw(rows)
            try_draw(rows.float())
            logprobs_of(rows, [0] * R, [1] * R)
            Chosen(*_likeliest(rows), []).read()

    warm_up([functools.partial(try_draw, each) for each in (logits[:1], logits[:1].float())], wait=False)
    return finish


def _changes_scores(request: Request) -> bool:
    """Whether something else than the logits decides about its next token, or is asked what follows from it."""
    return bool(_may_hide(request) or request.settings.has_penalties or request.criteria)


def _may_hide(request: Request) -> bool:
    """Whether a NaN among its logits may be missing in its scores."""
    return bool(request.processors or request.length - request.num_prompt < request.settings.min_new_tokens)


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of scores ``[R, V]``, and its token; NaN in a row with NaN."""
    if not by_kernels(scores):
        return scores.max(-1)
    from paged_ops.lowerings.gpu.draw import likeliest

    return likeliest(scores)


def _choose_changed(scores: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """The largest score and the token of each row of scores ``[R, V]``, after its request's processors, which write
    their result into it."""
    for k, request in enumerate(requests):
        for processor in request.processors:
            row = scores[k : k + 1]
            processed = _of_request(request, "logits_processor", processor, request.input_ids(scores.device), row)
            fits = isinstance(processed, Tensor) and processed.shape == row.shape
            expect(fits, "logits_processor", f"scores {list(row.shape)} from {processor!r}", processed)
            row.copy_(processed)
    best, tokens = _likeliest(scores)
    drawn = [k for k, request in enumerate(requests) if request.settings.temperature]
    return best, _with_draws(tokens, scores, best, drawn, requests) if drawn else tokens


def _with_draws(
    tokens: Tensor, scores: Tensor, best: Tensor, drawn: Sequence[int], requests: Sequence[Request]
) -> Tensor:
    """The tokens ``[R]``, those of the rows ``drawn`` replaced by draws from their scores ``[R, V]``."""
    draws = _draw(scores, best, drawn, requests)
    if len(drawn) == len(requests):
        return draws
    tokens[on_device(drawn, torch.int64, tokens.device)] = draws
    return tokens


def _with_changed(
    best: Tensor,
    tokens: Tensor,
    changed: Sequence[int],
    requests: Sequence[Request],
    best_changed: Tensor,
    chosen: Tensor,
) -> tuple[Tensor, Tensor]:
    """The best logits and the tokens ``[R]`` of a step, with the tokens of the rows ``changed``. A row with NaN has no
    token, even if a processor has hidden the NaN, unless that is what was asked for: the best is finite where both
    are."""
    at, best = on_device(changed, torch.int64, tokens.device), best.float()
    replaced = [i for i, request in zip(changed, requests, strict=True) if request.settings.replaces_nan]
    if replaced:
        best[on_device(replaced, torch.int64, best.device)] = 0
    best.index_add_(0, at, best_changed, alpha=0)
    tokens[at] = chosen
    return best, tokens


def _penalized(
    logits: Tensor, rows: Sequence[int], requests: Sequence[Request], before: Chosen | None, in_use: list[Tensor]
) -> Tensor:
    """The scores of these rows of logits ``[R, V]``, float32, after the penalties of their requests. The ends of
    sequences that are too short are hidden. Adds tensors to ``in_use`` whose addresses kernels have."""
    lowered = [k for k, request in enumerate(requests) if request.settings.has_penalties]
    if lowered and by_kernels(logits):
        scores = _penalized_by_kernels(logits, rows, requests, before, in_use)
    elif len(rows) == len(logits):
        scores = logits.to(torch.float32, copy=True)
    else:
        scores = logits[on_device(rows, torch.int64, logits.device)].float()
    if lowered and not by_kernels(logits):
        index = on_device(lowered, torch.int64, scores.device)
        some, part = [requests[k] for k in lowered], scores[index]
        penalize(
            part,
            [
                request.input_ids(scores.device, None if before is None else before.newest(request))[0]
                for request in some
            ],
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
        if request.length - request.num_prompt < request.settings.min_new_tokens
        for token in request.settings.stop
        if token < vocabulary
    ]
    if hidden:
        scores.view(-1).index_fill_(0, on_device(hidden, torch.int64, scores.device), -torch.inf)
    return scores


def _penalized_by_kernels(
    logits: Tensor, rows: Sequence[int], requests: Sequence[Request], before: Chosen | None, in_use: list[Tensor]
) -> Tensor:
    from paged_ops.lowerings.gpu.penalties import penalized

    numbers, lowered = [], []
    for row, request in zip(rows, requests, strict=True):
        settings, address, n, newest = request.settings, 0, 0, 0
        if settings.has_penalties:
            ids, n = request.ids_but_newest(logits.device), request.length
            in_use.append(ids)
            address = ids.data_ptr()
            is_unread = before is not None and request.num_unread
            newest = -1 - before.index[request] if before is not None and is_unread else request.tokens[-1]
            lowered.append(request)
        numbers.append((row, address, n, request.num_prompt, newest, *settings.penalties))
    scores = penalized(logits, numbers, None if before is None else before.tokens)
    for request in lowered:
        request.note_newest()
    return scores


def _draw(logits: Tensor, best: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> Tensor:
    """A token for each of these rows of logits ``[R, V]``, drawn as its request asks. ``best [R]``: their largest."""
    V, keys = logits.shape[-1], [requests[row].random_key() for row in rows]
    some = [requests[row].settings for row in rows]
    top_k = [min(each.top_k, V) for each in some]
    if by_kernels(logits):
        from paged_ops.lowerings.gpu.draw import draw_rows

        columns = zip(rows, keys, top_k, some, strict=True)
        return draw_rows(logits, best, [(row, key, k, *each.limits) for row, key, k, each in columns])
    temperature, top_p, min_p = torch.tensor(
        [[each.temperature for each in some], [each.top_p for each in some], [each.min_p for each in some]],
        dtype=torch.float64,
        device="cpu",
    )
    tokens, most = [], max(1, _MOST_SCORES // V)
    for start in range(0, len(rows), most):
        part = slice(start, start + most)
        scores = logits[on_device(rows[part], torch.int64, logits.device)].float()
        largest_k = max(top_k[part])
        tokens.append(
            draw(
                scores,
                temperature[part].to(logits.device),
                on_device(keys[part], torch.int64, logits.device),
                on_device(top_k[part], torch.int64, logits.device) if largest_k else None,
                top_p[part].to(logits.device) if bool((top_p[part] < 1).any()) else None,
                min_p[part].to(logits.device) if bool(min_p[part].any()) else None,
                largest_k,
            )
        )
    return torch.cat(tokens)


def _stops(request: Request, token: int, scores: Tensor) -> bool:
    input_ids = request.input_ids(scores.device, token)
    for criterion in request.criteria:
        stops = _of_request(request, "stopping_criteria", criterion, input_ids, scores)
        is_one = stops.numel() == 1 if isinstance(stops, Tensor) else stops is not None
        expect(is_one, "stopping_criteria", f"a bool, or a tensor of one, from {criterion!r}", stops)
        if stops:
            return True
    return False


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
    most = max(1, _MOST_SCORES // V)
    for start in range(0, len(tokens), most):
        part = slice(start, start + most)
        logprobs = log_softmax(logits[part].float())
        chosen = on_device(tokens[part], torch.int64, logits.device)
        values, ids = _largest(logprobs, min(max(counts[part]), V))
        found_of = logprobs.gather(-1, chosen.clamp(max=V - 1)[:, None])[:, 0]
        of_chosen = found_of.masked_fill_(chosen >= V, -torch.inf).tolist()
        for count, *found in zip(counts[part], of_chosen, values.tolist(), ids.tolist(), strict=True):
            logprob, likely, likely_ids = found
            result.append(TokenLogprobs(logprob, tuple(zip(likely_ids[:count], likely[:count], strict=True))))
    return result


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row ``[R, V]``, and their ids, both ``[R, k]``. Of equal scores the lower id comes
    first: which of them topk takes depends on k and on the other rows."""
    values = scores.topk(k, -1).values
    if not k:
        return values, values.long()
    rows, ids = (~(scores < values[:, -1:])).nonzero(as_tuple=True)  # NaN counts as the largest, as in topk
    order = scores[rows, ids].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    each = torch.arange(len(scores), device=scores.device)[:, None]
    return values, ids[order][torch.searchsorted(rows, each) + torch.arange(k, device=scores.device)]
