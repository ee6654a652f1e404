"""The trial run when a model is wrapped: its sequences, the model's own logits, and the comparison.

Differences are measured relative to each vocabulary entry's variation: how much its logit varies between tokens. So
logits that a model masks (-inf, the smallest number, -1e4) or scales up do not hide errors, and constant logits do not
count.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

# Two sequences, each in two chunks
LENGTHS = (7, 5)
CHUNKS = ((4, 3), (3, 2))
# The largest allowed difference of paged and eager attention, in the units above. Errors are much larger.
TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
TOLERANCE_OF_HALF = 0.25
# Or this multiple of the change of the model's own logits when its embeddings are rounded differently (int8
# activations, for example, are rounded again in each layer), but in full precision never more than MOST.
TIMES_NOISE = 4.0
MOST = 0.5
_ULPS = {torch.float32: 100.0, torch.float64: 100.0}  # of a logit: smaller variation is rounding
_ULPS_OF_HALF = 4.0
_LEAST_ROUNDING = 2.0**-12  # large enough to change values that layers round to int8


class DifferentLogitsError(ValueError):
    """The logits of a paged step differ from the model's own."""


class DenseRun(NamedTuple):
    """The model's own logits ``[T, V]`` of each trial sequence, and their change if its embeddings are rounded
    differently."""

    logits: list[Tensor]
    noise: float

    @classmethod
    def of(cls, model: Any, logits: list[Tensor]) -> DenseRun:
        expected = torch.cat(logits)
        _expect_numbers(expected, f"{type(model).__name__} by itself")
        precision = max(_eps(model.dtype), _LEAST_ROUNDING)
        # x + |x| changes the direction; norms would undo a scaling
        hook = model.get_input_embeddings().register_forward_hook(lambda _, __, x: x + precision * x.abs())
        try:
            again = torch.cat(run_dense(model))
        finally:
            hook.remove()
        return cls(logits, largest_difference(again, expected, expected, model.dtype))


def trial_tokens(model: Any) -> list[Tensor]:
    config = model.config.get_text_config(decoder=True).to_dict()
    special = pytree.tree_leaves([each for name, each in config.items() if name.endswith(("token_id", "token_index"))])
    ids = [i for i in range(min(config["vocab_size"], 1000)) if i not in special]
    chosen = [ids[(37 * i + 11) % len(ids)] for i in range(sum(LENGTHS))]
    return list(torch.tensor(chosen, device=model.device).split(LENGTHS))


@torch.no_grad()
def run_dense(model: Any) -> list[Tensor]:
    """The model's own logits of each trial sequence, with its current attention."""
    try:
        return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in trial_tokens(model)]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"model: {type(model).__name__} fails on a few tokens by itself: {error}") from error


def expect_alike(model: Any, paged: Tensor, dense: Tensor, run: DenseRun) -> None:
    """Raise unless the logits ``paged [T, V]`` agree with ``dense``, which are rows of ``run``."""
    name = type(model).__name__
    if paged.shape != dense.shape:
        raise ValueError(f"model: expected logits {list(dense.shape)}, got {list(paged.shape)} from {name}")
    _expect_numbers(paged, f"{name} on a paged cache")
    difference = largest_difference(paged, dense, torch.cat(run.logits), model.dtype)
    most = MOST if model.dtype in TOLERANCE else float("inf")
    allowed = max(TOLERANCE.get(model.dtype, TOLERANCE_OF_HALF), min(most, TIMES_NOISE * run.noise))
    if not difference <= allowed:
        raise DifferentLogitsError(
            f"model: expected a step on a paged cache to give the logits of eager attention, got {name}, where they"
            f" differ by {difference:.0%}"
        )


def largest_difference(a: Tensor, b: Tensor, logits: Tensor, dtype: torch.dtype) -> float:
    """The largest difference of a row of ``a [T, V]`` from ``b``: a root mean square over the vocabulary, in units of
    the median absolute deviation of each entry in the rows ``logits``. NaN if no entry varies."""
    a, b, logits = a.double(), b.double(), logits.double().nan_to_num(0.0, 0.0, 0.0)
    rounding = _eps(dtype) * _ULPS.get(dtype, _ULPS_OF_HALF)
    middle = logits.median(0).values
    deviation = (logits - middle).abs().median(0).values
    varies = deviation > rounding * middle.abs()
    units = (a - b).abs() / (deviation + rounding * b.abs())
    units = torch.where(a == b, 0.0, units).nan_to_num(float("inf"), float("inf"))
    counted = varies | (units > 1)
    return float((units.square() * counted).sum(1).div(counted.sum(1)).sqrt().max())


def why_different(model: Any) -> str:
    """Why a paged step of this unwrapped model differs, judged by its response to positions."""
    ids = trial_tokens(model)[0]
    count = torch.arange(len(ids), device=ids.device)

    def run(**arguments: Any) -> Tensor:
        # without a mask, transformers takes positions that do not increase by one for packed sequences
        mask = torch.ones_like(ids)[None]
        logits: Tensor = model(input_ids=ids[None], attention_mask=mask, use_cache=False, **arguments).logits
        return logits

    takes = "position_ids" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        own, counted, stretched = run(), run(position_ids=count[None]), run(position_ids=2 * count[None])
    if takes and not torch.allclose(own, counted, rtol=1e-3, atol=1e-3):
        return "the position of its first token is not 0"
    if not takes or torch.allclose(counted, stretched, rtol=1e-3, atol=1e-3):
        return "it ignores position_ids, so tokens of a batch have wrong positions"
    return "it mixes tokens outside of attention"


def _expect_numbers(logits: Tensor, what: str) -> None:
    wrong = logits.isnan().any(1)
    if bool(wrong.any()):
        rows = wrong.nonzero().flatten().tolist()
        raise ValueError(f"model: expected logits without NaN, got NaN for tokens {rows} of a trial run from {what}")


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)
