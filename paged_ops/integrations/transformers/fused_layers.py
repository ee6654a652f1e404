"""Forwards of layers with fused all-reduces in a sharded model; ``all_reduce_fusion`` installs them.

A layer returns the pair of residual stream and normed rows instead of the residual stream alone.

Letters: T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops.parallel.tensor import local_of

_OPS = torch.ops.paged_ops_parallel


class RowParallel:
    """This rank's shard of a row-parallel linear layer. ``reducer``: of its separate all-reduce, if not fused."""

    def __init__(self, linear: Any, reducer: str | None) -> None:
        self.weight, self.reducer = local_of(linear.weight), reducer
        self.bias = None if linear.bias is None else local_of(linear.bias)
        self.matmul: Callable[..., Tensor] = F.linear


class ShardedEmbedding:
    """This rank's rows of an embedding, from ``start`` on."""

    def __init__(self, embedding: Any, rank: int, size: int, reducer: str) -> None:
        self.weight, self.reducer = local_of(embedding.weight), reducer
        self.start = rank * -(-embedding.weight.shape[0] // size)


class FusedAllReduceNorm:
    """An all-reduce fused with the residual add and the norm after it; ``inner`` is the norm before the add, if any."""

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
    """The fused all-reduces of one layer, after its attention and its mlp; whether it norms before adding (Gemma-2);
    and arguments that its attention gets in addition to the layer's."""

    attention: FusedAllReduceNorm | None
    mlp: FusedAllReduceNorm | None
    norms_first: bool
    extras: dict[str, Any]


def run_fused_layer(layer: Any, hidden_states: Any, **kwargs: Any) -> Any:
    """The forward of a decoder layer with fused all-reduces: takes and returns ``[1, T, C]``, or the pair of residual
    stream and normed rows."""
    fused: FusedLayer = layer.paged_fusion
    if isinstance(hidden_states, tuple):
        residual, normed = hidden_states
    else:
        residual, normed = hidden_states, layer.input_layernorm(hidden_states)
    attended = layer.self_attn(hidden_states=normed, **{**fused.extras, **kwargs})
    if isinstance(attended, tuple):
        attended = attended[0]
    if fused.attention is not None:
        residual, normed = fused.attention(attended, residual)
    elif fused.norms_first:
        residual = residual + layer.post_attention_layernorm(attended)
        normed = layer.pre_feedforward_layernorm(residual)
    else:
        residual = residual + attended
        normed = layer.post_attention_layernorm(residual)
    out = layer.mlp(normed)
    if fused.mlp is not None:
        return fused.mlp(out, residual)
    return residual + (layer.post_feedforward_layernorm(out) if fused.norms_first else out)


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
    """The rows of the ids on this rank, zeros for the others."""
    own = ids - part.start
    here = (own >= 0) & (own < len(part.weight))
    return torch.where(here[..., None], F.embedding(torch.where(here, own, 0), part.weight), 0)


def run_last_norm(norm: Any, hidden_states: Any) -> Tensor:
    if isinstance(hidden_states, tuple):  # normed by the last layer's all-reduce
        last: Tensor = hidden_states[1]
        return last
    out: Tensor = type(norm).forward(norm, hidden_states)
    return out
