"""Attention over a cache whose tokens are spread over ranks (context parallelism), for engines.

Each rank has some tokens of every sequence, and some query heads. Each rank attends with all heads of the group to the
history that it holds. The results are weighted by their share of the softmax and summed, each head at its own rank.
Every rank has the step's own tokens; they are attended to once, causally, and merged. No length is read on the host.

Letters: T tokens of the step, S sequences, H query heads of a rank, W ranks, K key/value heads, D head size, Dv value
head size, N blocks, B tokens per block. Ideas: Helix (arXiv:2507.07120), ring attention's merge (arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paged_ops.checks import expect


class Group(Protocol):
    """The methods that a group of ranks must have."""

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, one after the other in ``dim``."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    history_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    group: Group,
    out: Tensor,
    *,
    causal: bool = True,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    **cache: Any,
) -> Tensor:
    """Fill ``out [T, H, Dv]`` with attention over the whole cache.

    Args:
        query: ``[T, H, D]``, of this rank's heads.
        key, value: ``[T, K, D]`` and ``[T, K, Dv]``, the step's own tokens; the same on all ranks.
        key_cache, value_cache: ``[N, B, K, D]`` and ``[N, B, K, Dv]``, of this rank's tokens.
        block_tables: int32 ``[S, M]``.
        history_lens: int32 ``[S]``, the tokens before the step's that this rank holds.
        query_start_loc: int32 ``[S + 1]``.
        max_query_len: the most tokens of a sequence in this step.
        group: the ranks. Queries and lse are gathered, weighed outputs summed: three collectives.
        causal, sinks, soft_cap: of this rank's heads, as in :func:`paged_ops.paged_attention`.
        cache: how keys and values are stored (``k_scale``, ``v_scale``, ``kv_cache_dtype``).

    Raises:
        ValueError: more than one key/value head; engines spread heads over ranks before they spread tokens.
    """
    expect(key.shape[1] == 1, "key", "one key/value head at each rank, in [T, K, D]", key)
    with_lse = torch.ops.paged_ops.paged_attention_with_lse.default
    H, mine = query.shape[1], group.rank_in_group
    heads = group.all_gather(query.contiguous(), dim=1)  # [T, W·H, D]
    part, lse = with_lse(
        heads,
        key_cache,
        block_tables,
        history_lens,
        query_start_loc,
        scale,
        value_cache=value_cache,
        causal=False,
        soft_cap=soft_cap,
        **cache,
    )
    lses = group.all_gather(lse[None], dim=0)  # [W, T, W·H]
    total = torch.logsumexp(lses, 0)
    # Where no rank has a key, both are -inf.
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    weighed = group.all_reduce(part.float() * share[:, :, None])
    history = weighed[:, mine * H : (mine + 1) * H].to(query.dtype).contiguous()
    # The step's own tokens, as pages of one token.
    places = torch.arange(max_query_len, dtype=torch.int32, device=query.device)
    own, own_lse = with_lse(
        query,
        key[:, None],
        query_start_loc[:-1, None] + places,
        query_start_loc.diff(),
        query_start_loc,
        scale,
        value_cache=value[:, None],
        causal=causal,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    history_lse = total[:, mine * H : (mine + 1) * H].contiguous()
    torch.ops.paged_ops.merge_attention_states.out(
        history, history_lse, own, own_lse, out=out, lse=torch.empty_like(own_lse)
    )
    return out
