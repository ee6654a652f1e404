"""Fakes of the collectives, of linear layers and of norms. Letters: C columns, O output features."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import checks
from paged_ops.checks import expect
from paged_ops.layouts import MODEL_DTYPES

# Objects that the ranks of a group prepared together, by name: an op's schema cannot take a process group.
# Values: paged_ops.parallel.all_reduce.AllReduce and paged_ops.parallel.exchange.Exchange.
REDUCERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
EXCHANGES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# The most rows of few_row_linear whose norm, gate and residual add a kernel has.
MOST_ROWS = 2


class NormOptions(NamedTuple):
    """The last arguments of ``paged_ops.ops.all_reduce_add_norm``."""

    weight_offset: float = 0.0
    rounds_first: bool = False
    inner_weight: Tensor | None = None
    inner_eps: float = 0.0


def all_reduce(x: Tensor, reducer: str) -> Tensor:
    columns = _reducer(x, reducer).columns
    expect(x.shape[-1] == columns, "x", f"{columns} columns, as its reducer", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def all_gather_columns(x: Tensor, reducer: str) -> Tensor:
    known = _reducer(x, reducer)
    expect(x.shape[-1] % known.columns == 0, "x", f"a multiple of {known.columns} columns, as its reducer", x)
    return x.new_empty(*x.shape[:-1], known.size * x.shape[-1])


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, reducer: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    options = NormOptions(*args, **kwargs)
    summed = all_reduce(x, reducer)
    checks.tensor("residual", residual, x.shape, x.dtype, x.device, "[..., C]")
    dtypes = x.dtype if options.rounds_first else MODEL_DTYPES
    checks.tensor("weight", weight, x.shape[-1:], dtypes, x.device, "[C]")
    expect(eps >= 0, "eps", "0 or more", eps)
    if options.inner_weight is not None:
        dtypes = weight.dtype if options.rounds_first else MODEL_DTYPES
        checks.tensor("inner_weight", options.inner_weight, x.shape[-1:], dtypes, x.device, "[C]")
    expect(options.inner_eps >= 0, "inner_eps", "0 or more", options.inner_eps)
    return summed, torch.empty_like(summed)


def merge_over_ranks(part: Tensor, lse: Tensor, context: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(part), torch.empty_like(lse)


def few_row_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    constant: bool = False,
) -> Tensor:
    return x.new_empty(few_row_shape(x, weight, norm, residual, gated))


def few_row_shape(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, gated: bool
) -> tuple[int, ...]:
    """The shape of the result of few_row_linear, after all checks."""
    O, C = weight.shape
    expect(not gated or O % 2 == 0, "weight", "an even number of rows, as it is gated", weight)
    shape = *x.shape[:-1], O // 2 if gated else O
    if norm is not None:
        checks.tensor("norm", norm, (C,), x.dtype, x.device, "[C]")
    if residual is not None:
        checks.tensor("residual", residual, shape, x.dtype, x.device, "[..., O]")
    return shape


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    checks.tensor("weight", weight, (None, None), MODEL_DTYPES, x.device, "[O, C]")
    _expect_columns(x, weight.shape[1], weight.dtype)
    if bias is not None:
        checks.tensor("bias", bias, weight.shape[:1], weight.dtype, x.device, "[O]")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def invariant_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    checks.tensor("weight", weight, (None, None, None), MODEL_DTYPES, x.device, "[E, O, C]")
    expect(x.dim() == 2, "x", "rows [T, C]", x)
    _expect_columns(x, weight.shape[2], weight.dtype)
    checks.tensor("experts", experts, x.shape[:1], torch.int64, x.device, "[T]")
    if bias is not None:
        checks.tensor("bias", bias, weight.shape[:2], weight.dtype, x.device, "[E, O]")
    return x.new_empty(x.shape[0], weight.shape[1])


def invariant_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounds_first: bool = False
) -> Tensor:
    expect(x.dtype in MODEL_DTYPES and x.dim() >= 1, "x", f"rows [..., C] of {MODEL_DTYPES}", x)
    if weight is not None:
        checks.tensor("weight", weight, x.shape[-1:], MODEL_DTYPES, x.device, "[C]")
    expect(eps >= 0, "eps", "0 or more", eps)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _expect_columns(x: Tensor, columns: int, dtype: torch.dtype) -> None:
    expect(x.dim() >= 1 and x.shape[-1] == columns, "x", f"{columns} columns, as its weight", x)
    expect(x.dtype == dtype, "x", f"a tensor of {dtype}, as its weight", x)


def _reducer(x: Tensor, name: str) -> Any:
    found = REDUCERS.get(name)
    if found is None:
        raise ValueError(f"reducer: expected the name of an AllReduce that is not closed, got {name}")
    expect(x.dim() >= 1, "x", "rows [..., C]", x)
    expect(x.dtype == found.dtype, "x", f"a tensor of {found.dtype}, as its reducer", x)
    expect(x.device == found.device, "x", f"a tensor on {found.device}, as its reducer", x)
    return found
