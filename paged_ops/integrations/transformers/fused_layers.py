"""What the layers of a model that is spread over ranks run in place of their own forward: see ``sums.py``.

A layer hands on the pair of residual stream and normed rows instead of their sum.

Letters: T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops.parallel.tensor import local_of

_OPS = torch.ops.paged_ops_parallel  # of paged_ops.parallel.all_reduce


class RowParallel:
    """This rank's part of a row-parallel product. ``sums``: the name of the sums by which it is summed, if alone."""

    def __init__(self, linear: Any, reducer: str | None) -> None:
        self.weight, self.reducer = local_of(linear.weight), reducer
        self.bias = None if linear.bias is None else local_of(linear.bias)
        self.matmul: Callable[..., Tensor] = F.linear


class ShardedEmbedding:
    """This rank's part of an embedding's rows, which begin at ``start``."""

    def __init__(self, embedding: Any, rank: int, size: int, reducer: str) -> None:
        self.weight, self.reducer = local_of(embedding.weight), reducer
        self.start = rank * -(-embedding.weight.shape[0] // size)


class FusedAllReduceNorm:
    """A sum over ranks with the residual add and the norm behind it; ``inner`` is the norm before the add, if any."""

    def __init__(
        self, norm: nn.Module, kind: dict[str, Any], reducer: str, inner: nn.Module | None, inner_eps: float
    ) -> None:
        self.weight: Any = norm.weight
        self.inner_weight: Any = None if inner is None else inner.weight
        self.eps, self.inner_eps, self.reducer = kind["eps"], inner_eps, reducer
        self.weight_offset, self.rounds_first = kind["weight_offset"], kind["rounds_first"]

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        how = self.reducer, self.weight_offset, self.rounds_first, self.inner_weight, self.inner_eps
        summed, normed = _OPS.all_reduce_add_norm.default(x, residual, self.weight, self.eps, *how)
        return summed, normed


class FusedLayer(NamedTuple):
    """Of one layer: the sums behind its attention and its mlp that are fused, whether it norms what it adds (as
    Gemma-2 does), and arguments that its attention gets beside the layer's own."""

    attention: FusedAllReduceNorm | None
    mlp: FusedAllReduceNorm | None
    norms_first: bool
    extras: dict[str, Any]


def run_fused_layer(layer: Any, hidden_states: Any, **kwargs: Any) -> Any:
    """The forward of a decoder layer whose sums are fused: takes and gives ``[1, T, C]``, or the pair of residual
    stream and normed rows."""
    sums: FusedLayer = layer.paged_fusion
    if isinstance(hidden_states, tuple):
        residual, normed = hidden_states
    else:
        residual, normed = hidden_states, layer.input_layernorm(hidden_states)
    attended = layer.self_attn(hidden_states=normed, **{**sums.extras, **kwargs})
    if isinstance(attended, tuple):
        attended = attended[0]
    if sums.attention is not None:
        residual, normed = sums.attention(attended, residual)
    elif sums.norms_first:
        residual = residual + layer.post_attention_layernorm(attended)
        normed = layer.pre_feedforward_layernorm(residual)
    else:
        residual = residual + attended
        normed = layer.post_attention_layernorm(residual)
    out = layer.mlp(normed)
    if sums.mlp is not None:
        return sums.mlp(out, residual)
    return residual + (layer.post_feedforward_layernorm(out) if sums.norms_first else out)


def run_row_parallel(linear: Any, x: Tensor) -> Tensor:
    part: RowParallel = linear.paged_part
    out = part.matmul(x, part.weight)
    if part.reducer is None:
        return out
    out = _OPS.all_reduce.default(out, part.reducer)
    return out if part.bias is None else out + part.bias


def run_head(linear: Any, x: Tensor) -> Tensor:
    part: RowParallel = linear.paged_part
    out = part.matmul(x, part.weight)
    assert part.reducer is not None
    gathered: Tensor = _OPS.all_gather_columns.default(out if part.bias is None else out + part.bias, part.reducer)
    return gathered


def run_embedding(embedding: Any, ids: Tensor) -> Tensor:
    part: ShardedEmbedding = embedding.paged_part
    summed: Tensor = _OPS.all_reduce.default(rows_of(part, ids), part.reducer)
    return summed


def rows_of(part: ShardedEmbedding, ids: Tensor) -> Tensor:
    """The rows of ids that are here, zeros for the others."""
    own = ids - part.start
    here = (own >= 0) & (own < len(part.weight))
    return torch.where(here[..., None], F.embedding(torch.where(here, own, 0), part.weight), 0)


def run_last_norm(norm: Any, hidden_states: Any) -> Tensor:
    if isinstance(hidden_states, tuple):  # normed with the last layer's sum
        last: Tensor = hidden_states[1]
        return last
    out: Tensor = type(norm).forward(norm, hidden_states)
    return out
