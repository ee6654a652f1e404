"""The error budget, and comparisons of an op with its reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paged_ops import reference
from paged_ops.registry import OPS
from paged_ops.testing.cases import Case
from paged_ops.testing.inputs import Inputs


def mutated_arguments(op: str) -> list[str]:
    """The names of the arguments that an op writes, from its schema."""
    schema = getattr(torch.ops.paged_ops, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def clone_inputs(inputs: Inputs, device: torch.device | str | None = None, wide: bool = False) -> Inputs:
    """The same call on clones that keep their strides; ``wide`` makes the query (or the partial outputs) float64."""

    def clone(value: Any) -> Any:
        if isinstance(value, Tensor):
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or value.device)
            return copy.copy_(value)
        return [clone(each) for each in value] if isinstance(value, list) else value

    args = [clone(value) for value in inputs.args]
    if wide:
        args = [
            value.double() if isinstance(value, Tensor) and n in (0, 2) and value.dim() == 3 else value
            for n, value in enumerate(args)
        ]
    return dataclasses.replace(
        inputs, args=tuple(args), kwargs={name: clone(value) for name, value in inputs.kwargs.items()}
    )


def ulp(dtype: torch.dtype, at: float) -> float:
    """The distance between adjacent numbers of ``dtype`` at magnitude ``at``."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(at, torch.finfo(dtype).tiny)))


# The error budget: twice the error of the reference in the same dtype, plus a floor.
#   out   one ulp of the output's dtype at the largest |v|: rounding of an average of values
#   lse   4 ulp of float32 at the largest |lse|: exponentials in base 2, one multiplication by ln 2, one logarithm
#   scores of select_keys   4 ulp of float32 at the largest score: another order of the sum over heads
LSE_ULPS = 4
SCORE_ULPS = 4


def assert_close(name: str, got: Tensor, plain: Tensor, truth: Tensor, largest: float) -> None:
    """Raise AssertionError unless ``got`` is within the error budget of ``truth``; infinities must agree exactly."""
    assert got.shape == truth.shape, f"{name}: expected shape {list(truth.shape)}, got {list(got.shape)}"
    where = got.device if got.is_cuda else torch.device("cpu")  # large tensors are compared on their device
    got_, plain_, truth_ = (each.detach().to(where).double() for each in (got, plain, truth))
    assert not got_.isnan().any(), f"{name}: NaN in {int(got_.isnan().sum())} of {got_.numel()} elements"
    infinite = truth_.isinf()
    assert torch.equal(got_[infinite], truth_[infinite]), f"{name}: finite where the truth is infinite"
    assert not got_[~infinite].isinf().any(), f"{name}: infinities where the truth is finite"
    if infinite.all():
        return
    got_, plain_, truth_ = got_[~infinite], plain_[~infinite], truth_[~infinite]
    floor = LSE_ULPS * ulp(torch.float32, float(truth_.abs().max())) if name == "lse" else ulp(got.dtype, largest)
    budget = 2 * float((plain_ - truth_).abs().max()) + floor
    error = float((got_ - truth_).abs().max())
    assert error <= budget, (
        f"{name}: error {error:.3g} over the budget {budget:.3g} ({got.dtype}, largest {largest:.3g})"
    )


def assert_result(op: str, inputs: Inputs, before: Inputs, results: Any) -> None:
    """Compare results and mutated arguments of a call with the reference on ``before``, its inputs before the call."""
    inputs.memory.check()
    plain_call, function = clone_inputs(before, "cpu"), getattr(reference, op)
    plain = function(*plain_call.args, **plain_call.kwargs)
    mutated = mutated_arguments(op)
    if mutated:
        for name in mutated:
            got, want = (_argument(op, call, name) for call in (inputs, plain_call))
            for a, b in zip(_tensors(got), _tensors(want), strict=True):
                assert_same_bytes(name, a, b)
        return
    outs = [r.name for r in getattr(torch.ops.paged_ops, op).out._schema.arguments if r.alias_info is not None]
    if op == "gather_kv":
        for name, got, want in zip(outs, _tensors(results), _tensors(plain), strict=True):
            assert_same_bytes(name, got, want)
        return
    wide = clone_inputs(before, "cpu", wide=True)
    if op == "select_keys":
        assert_selected(_tensors(results)[0], plain, before, wide)
        return
    truth = function(*wide.args, **wide.kwargs)
    for name, got, near, exact in zip(outs, _tensors(results), _tensors(plain), _tensors(truth), strict=True):
        assert_close(name, got, near, exact, inputs.largest)


def scores_of(call: Inputs) -> Iterator[tuple[int, int, Tensor]]:
    """The scores of a call of select_keys by the reference."""
    others = {name: value for name, value in call.kwargs.items() if name != "local_blocks"}
    return reference.index_scores(*call.args[:5], **others)


def assert_selected(got: Tensor, plain: Tensor, inputs: Inputs, wide: Inputs) -> None:
    """Raise AssertionError unless the entries ``got [T, G, k]`` are a correct selection for ``inputs`` (``wide``: with
    a float64 query): distinct, ascending, as many as there are, and no omitted entry has a larger score than a chosen
    one, but for rounding. If float32 holds all scores exactly, they must be ``plain``, the reference's entries.
    """
    k, local_blocks = inputs.args[5], inputs.kwargs.get("local_blocks", 0)
    near, exact = ({row[0]: row[1:] for row in scores_of(call)} for call in (clone_inputs(inputs, "cpu"), wide))
    errors = [(near[t][1].double() - exact[t][1]).abs().flatten() for t in exact]
    error = float(torch.cat([torch.zeros(1, dtype=torch.float64), *errors]).nan_to_num(0.0).max())
    if error == 0:
        assert_same_bytes("entries of exact scores", got, plain)
    largest = max((float(scores.abs().max()) for _, scores in exact.values() if scores.numel()), default=0.0)
    # Each score of the op may be off by twice the reference's error and a rounding, and a comparison has two scores.
    slack = 0.0 if error == 0 else 2 * (2 * error + SCORE_ULPS * ulp(torch.float32, largest))
    assert (got.shape, got.dtype) == (plain.shape, torch.int32), f"{got.dtype} {list(got.shape)}"
    for t, of_token in enumerate(got.tolist()):
        own, scores = exact.get(t, (0, torch.empty(got.shape[1], 0)))
        count = min(k, scores.shape[1])
        local = {e for e in range(scores.shape[1]) if own - local_blocks < e <= own}
        for g, entries in enumerate(of_token):
            chosen, rest = entries[:count], entries[count:]
            where = f"row {t}, list {g}: {entries}"
            assert chosen == sorted(set(chosen)), f"expected ascending and distinct entries in {where}"
            assert set(rest) <= {-1}, f"expected -1 after {count} entries in {where}"
            assert set(chosen) <= set(range(scores.shape[1])), f"expected {scores.shape[1]} entries at most in {where}"
            assert local <= set(chosen), f"expected the blocks {sorted(local)} in {where}"
            ranked = scores[g].tolist()
            least = min((ranked[e] for e in chosen if e not in local), default=torch.inf)
            omitted = [(ranked[e], e) for e in range(len(ranked)) if e not in chosen]
            best, e = max(omitted, default=(-torch.inf, -1))
            assert best <= least + slack, f"entry {e} has score {best}, more than {least} + {slack}, in {where}"


def assert_same_bytes(name: str, got: Tensor, want: Tensor) -> None:
    """Raise AssertionError unless two tensors have the same dtype, shape and bits."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: {got.dtype} {list(got.shape)}"
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (got, want))
    assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} bytes differ"


def check(op: str, case: Case, device: torch.device | str = "cpu", function: Callable[..., Any] | None = None) -> None:
    """Run an op (or ``function``) on a case, twice: results must match the reference, repeat, and respect guards."""
    call = function or OPS[op]
    inputs = case.inputs(device)
    before = clone_inputs(inputs)
    results = call(*inputs.args, **inputs.kwargs)
    assert_result(op, inputs, before, results)
    if not mutated_arguments(op):
        for first, second in zip(_tensors(results), _tensors(call(*inputs.args, **inputs.kwargs)), strict=True):
            assert_same_bytes("the second run", second, first)


def check_out(op: str, case: Case, device: torch.device | str = "cpu") -> None:
    """Run an op's .out overload on tensors full of NaN, and compare."""
    inputs = case.inputs(device)
    before = clone_inputs(inputs)
    results = OPS[op](*inputs.args, **inputs.kwargs)
    packet = getattr(torch.ops.paged_ops, op)
    names = [a.name for a in packet.out._schema.arguments if a.alias_info is not None]
    outs = [inputs.memory.nan(result.shape, result.dtype) for result in _tensors(results)]
    packet.out(*inputs.args, **inputs.kwargs, **dict(zip(names, outs, strict=True)))
    assert_result(op, inputs, before, outs)


def _argument(op: str, call: Inputs, name: str) -> Any:
    names = [a.name for a in getattr(torch.ops.paged_ops, op).default._schema.arguments]
    return dict(zip(names, call.args, strict=False)).get(name, call.kwargs.get(name))


def _tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)
