"""Collectives by the backend of the process group: on the CPU, and on GPUs without symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops import fake
from paged_ops.checks import expect
from paged_ops.fake.models import EXCHANGES, REDUCERS, NormOptions


def all_reduce(x: Tensor, reducer: str) -> Tensor:
    summed = fake.all_reduce(x, reducer).copy_(x)
    dist.all_reduce(summed, group=REDUCERS[reducer].group)
    return summed


def all_gather_columns(x: Tensor, reducer: str) -> Tensor:
    out, known, x = fake.all_gather_columns(x, reducer), REDUCERS[reducer], x.contiguous()
    every = [torch.empty_like(x) for _ in range(known.size)]
    dist.all_gather(every, x, group=known.group)
    return torch.cat(every, -1, out=out)


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, reducer: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    options = NormOptions(*args, **kwargs)
    fake.all_reduce_add_norm(x, residual, weight, eps, reducer, *options)
    added, how = all_reduce(x, reducer), (options.weight_offset, options.rounds_first)
    if options.inner_weight is not None:
        added = rms_norm(added, options.inner_weight, options.inner_eps, *how)
    summed = residual + added
    return summed, rms_norm(summed, weight, eps, *how)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, rounds_first: bool = False) -> Tensor:
    """The norm of ``paged_ops.ops.all_reduce_add_norm`` alone: ``[..., C]`` in x's dtype, rounded as there."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounds_first:
        wide = wide.to(x.dtype).float()
    scale = weight.float()
    return (wide * (scale if weight_offset == 0 else weight_offset + scale)).to(x.dtype)


def merge_over_ranks(part: Tensor, lse: Tensor, context: str) -> tuple[Tensor, Tensor]:
    exchange = EXCHANGES.get(context)
    expect(exchange is not None, "context", "the name of a Context that is alive on this rank", context)
    assert exchange is not None
    return exchange.everywhere(part, lse)
