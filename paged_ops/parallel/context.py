"""Attention over a cache whose tokens are sharded over ranks: context parallelism.

Few key/value heads cannot be sharded any further for long contexts, so each rank holds some tokens of every sequence.
Block i of a sequence is on rank ``i % W`` (:mod:`paged_ops.cache.shard` has the rule). For all rows, a rank attends to
its own keys, and one exchange merges the partial attention (:mod:`paged_ops.parallel.exchange`). With K_r the keys on
rank r::

    out_r, lse_r = attention of the row over K_r        out = sum_r exp(lse_r - lse) * out_r

Each key is counted once, and a row sees no later key:

- A step of at most one token per sequence: the token is written to its rank first. Each rank then attends to all of
  its keys without a mask, because the row is the last.
- Any other step: each rank attends, without a mask, to its share of the *history*, the tokens before the step. All
  ranks have the step's own tokens; for each head one rank attends to them causally and merges the result into its
  part. Heads are divided evenly where K is a multiple or a divisor of W; otherwise rank 0 takes all.

The rank that attends to a head's own tokens applies its sink; in a step of single tokens rank 0 does. Layers with a
window or chunks are not sharded, because those mask most keys of a rank: each rank keeps all of their tokens. ALiBi,
block-sparse attention and bidirectional ranges need positions that a rank's share does not have, so they are refused.

Letters: T tokens of the step, S sequences, H query heads, K key/value heads, D head size, Dv value head size, W ranks.

Sources of the ideas: ring attention (Liu et al. 2023, arXiv:2310.01889) and tree attention (Shyam et al. 2024,
arXiv:2408.04093) merge partial attention of ranks; Helix (arXiv:2507.07120) and vLLM's decode context parallelism
shard a decode's cache by tokens.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops.cache.shard import TokenShard
from paged_ops.checks import expect
from paged_ops.fake.models import EXCHANGES
from paged_ops.fp8 import saturated
from paged_ops.layouts import Layout, kv_cache_shape
from paged_ops.metadata.step import AttentionMetadata, ContextMetadata
from paged_ops.parallel.exchange import Exchange, prepare

_FP8 = torch.float8_e4m3fn
REFUSED = ("alibi_slopes", "sliding_window", "attention_chunk", "block_sparse", "bidirectional_ranges")


class Handle(NamedTuple):
    """The part of a :class:`Context` that compiled graphs use."""

    name: str
    rank: int
    size: int


class Context:
    """A group of ranks that shard the tokens of every sequence. All of them make it together.

    Args:
        group: the process group, or a dimension of a device mesh: ``mesh.get_group("cp")``.
        device: device of the cache.
        head_size: the largest value head size of the layers.
        dtype: dtype of queries and outputs.
        rows: tokens times query heads of the largest step that uses symmetric memory, on GPUs. Larger ones use
            collectives.
        collectives: do not use symmetric memory.

    Attributes:
        group: as given.
        shard: this rank and the number of ranks, for ``KVCache(shard=...)``.
        exchange: merges parts; ``exchange.how`` says which way was chosen.
        handle: for :func:`attend`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str,
        *,
        head_size: int,
        dtype: torch.dtype,
        rows: int = 4096,
        collectives: bool = False,
    ) -> None:
        self.group = group
        options: dict[str, Any] = {"rows": rows, "head_size": head_size, "dtype": dtype, "collectives": collectives}
        self.exchange = prepare(group, torch.device(device), **options)
        self.shard = TokenShard(self.exchange.group.rank, self.exchange.group.size)
        self.handle = Handle(f"{group.group_name}/{next(_numbers)}", *self.shard)
        EXCHANGES[self.handle.name] = self.exchange


_numbers = itertools.count()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    scale: float,
    step: ContextMetadata,
    context: Handle,
    *,
    value_cache: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    **cache: Any,
) -> Tensor:
    """Attention ``[T, H, Dv]`` over a cache sharded over ranks, the same on each of them.

    Args:
        query: ``[T, H, D]``, the same on all ranks.
        key, value: ``[T', K, D]`` and ``[T', K, Dv]`` with T' >= T: the step's own tokens, the same on all ranks,
            already written to the cache. For a latent cache: rows ``[T', R + P]``, and None.
        kv_cache, value_cache: this rank's cache, in any form.
        block_tables, query_start_loc: the step's, the same on all ranks.
        step: ``AttentionMetadata.context``.
        context: ``Context.handle``.
        soft_cap, sinks, output_scale: as in :func:`paged_ops.paged_attention`. Attention is causal.
        cache: the format of keys and values: ``k_scale``, ``v_scale``, ``kv_cache_dtype``, ``value_head_size``.

    Raises:
        ValueError: a feature that needs positions, or an argument that :func:`paged_ops.paged_attention` refuses.
    """
    refuse(cache)
    options: dict[str, Any] = {"value_cache": value_cache, "soft_cap": soft_cap, **cache}
    H, K = query.shape[1], 1 if value is None else key.shape[1]
    if step.history_lens is None:
        batch = block_tables, step.lens, query_start_loc
        counts = sinks if context.rank == 0 else None
        part, lse = _with_lse(query, kv_cache, *batch, scale, causal=False, sinks=counts, **options)
    else:
        batch = block_tables, step.history_lens, query_start_loc
        part, lse = _with_lse(query, kv_cache, *batch, scale, causal=False, **options)
        heads, of_keys = own_heads(H, K, context)
        mine = part[:, heads], lse[:, heads], query[:, heads]
        pages, stored = own_pages(key, value, of_keys, kv_cache.dtype, cache)
        stored |= {"soft_cap": soft_cap, "sinks": None if sinks is None else sinks[heads]}
        add_own_tokens(*mine, pages, step.own_tables, query_start_loc, scale, **stored)
    out, _ = torch.ops.paged_ops_parallel.merge_over_ranks(part, lse, context.name)
    return out if output_scale is None else saturated(out, output_scale, _FP8).to(_FP8)


def attend_with_gathered_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    lens: Tensor | None,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    exchange: Exchange,
    *,
    value_cache: Tensor | None = None,
    causal: bool = True,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **cache: Any,
) -> Tensor:
    """Attention ``[T, H, Dv]`` of this rank's query heads, where ranks of tensor parallelism shard one head's tokens.

    Queries are gathered, and each rank gets the merged result of its own heads. Arguments not listed here are as in
    :func:`attend`.

    Args:
        query: ``[T, H, D]``, this rank's heads.
        lens: int32 ``[S]``, the number of tokens that this rank holds, by any sharding rule: with the step's own, which
            are in the cache, if ``max_query_len`` is 1; else before the step. None if no sequence has tokens before the
            step: nothing is exchanged then.
        max_query_len: the most tokens of a sequence in this step.
        exchange: merges the ranks' parts.
        causal: whether the step's own tokens are masked causally.
        sinks: float32 ``[H]``, this rank's heads.
        out: contiguous; the result is written here.

    Raises:
        ValueError: more than one key/value head; engines shard heads before they shard tokens.
    """
    refuse(cache)
    expect(key.shape[1] == 1, "key", "one key/value head per rank, in [T, K, D]", key)
    H, group = query.shape[1], exchange.group
    options: dict[str, Any] = {"value_cache": value_cache, "soft_cap": soft_cap, **cache}
    if lens is not None:
        every = exchange.gather_heads(query)
        part, lse = _with_lse(every, kv_cache, block_tables, lens, query_start_loc, scale, causal=False, **options)
    if lens is None or max_query_len > 1:
        pages, stored = own_pages(key, value, slice(0, 1), kv_cache.dtype, cache)
        stored |= {"causal": causal, "soft_cap": soft_cap}
        tables = query_start_loc[:-1, None] + torch.arange(max_query_len, dtype=torch.int32, device=query.device)
        if lens is None:
            batch = tables, query_start_loc.diff(), query_start_loc
            own = torch.ops.paged_ops.paged_attention(query, pages, *batch, scale, sinks=sinks, **stored)
            return own if out is None else out.copy_(own)
        heads = slice(group.rank * H, (group.rank + 1) * H)
        mine = part[:, heads], lse[:, heads], query
        add_own_tokens(*mine, pages, tables, query_start_loc, scale, **stored)
    merged, total = exchange.of_own_heads(part, lse, out)
    # a sink is one more key, without a value: exp(lse) / (exp(lse) + exp(sink))
    return merged if sinks is None else merged.mul_(torch.sigmoid(total - sinks)[..., None])


def add_own_tokens(
    part: Tensor,
    lse: Tensor,
    query: Tensor,
    pages: Tensor,
    own_tables: Tensor | None,
    query_start_loc: Tensor,
    scale: float,
    **features: Any,
) -> None:
    """Merge attention to the step's own tokens into a part, in place; it may be a view of some heads, or of none.

    ``pages``: a cache of the step's tokens, one token per block. ``own_tables``: int32 ``[S, >= the most tokens of a
    sequence]``, the rows of each sequence.
    """
    if not part.shape[1]:
        return
    lens = query_start_loc.diff()
    batch = own_tables, lens, query_start_loc
    own = _with_lse(query, pages, *batch, scale, **features)
    both, total = torch.ops.paged_ops.merge_attention_states(part, lse, *own)
    part.copy_(both)
    lse.copy_(total)


def own_pages(
    key: Tensor, value: Tensor | None, heads: slice, dtype: torch.dtype, cache: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Some heads of the step's tokens as a cache with one token per block, quantised like the real cache if that is
    fp8; and the arguments for reading it."""
    slots = torch.arange(len(key), device=key.device)
    if value is None:
        R = cache["value_head_size"]
        if key.dtype == dtype:
            return key[:, None], {"value_head_size": R}
        stored = {name: each for name, each in cache.items() if name in ("k_scale", "kv_cache_dtype")}
        name = stored.get("kv_cache_dtype", "auto")
        shape = kv_cache_shape(Layout.LATENT, len(key), 1, 1, key.shape[1], value_head_size=R, kv_cache_dtype=name)
        pages = torch.empty(shape, dtype=dtype, device=key.device)
        torch.ops.paged_ops.latent_cache_write(key[:, :R], key[:, R:], pages, slots, **stored)
        return pages, {**stored, "value_head_size": R}
    key, value = key[:, heads], value[:, heads]
    if key.dtype == dtype or not key.shape[1]:
        return key[:, None], {"value_cache": value[:, None]}
    stored = dict(cache)
    for name in ("k_scale", "v_scale"):
        if stored.get(name) is not None and stored[name].numel() > 1:
            stored[name] = stored[name][heads]
    pages, values = (torch.empty((len(e), 1, *e.shape[1:]), dtype=dtype, device=e.device) for e in (key, value))
    torch.ops.paged_ops.reshape_and_cache(key, value, pages, slots, value_cache=values, **stored)
    return pages, {**stored, "value_cache": values}


def own_heads(H: int, K: int, context: Handle) -> tuple[slice, slice]:
    """The query heads and key/value heads whose attention to a step's own tokens this rank computes."""
    rank, W = context.rank, context.size
    if K % W == 0:
        heads, of_keys = H // W, K // W
        return slice(rank * heads, (rank + 1) * heads), slice(rank * of_keys, (rank + 1) * of_keys)
    if W % K == 0 and H % W == 0:
        heads, head = H // W, rank * K // W
        return slice(rank * heads, (rank + 1) * heads), slice(head, head + 1)
    return (slice(0, H), slice(0, K)) if rank == 0 else (slice(0, 0), slice(0, 0))


def refuse(features: dict[str, Any]) -> None:
    """Raise ValueError for features of attention that need positions."""
    for name in REFUSED:
        value = features.pop(name, None)
        absent = value is None or (not isinstance(value, Tensor) and not value)
        expect(absent, name, "none with context parallelism, because a rank does not hold all positions", value)


def groups_of_context(
    context: Any, sharded: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks that shard tokens, and all ranks that run a step together.

    Args:
        context: a process group, a mesh with a dimension "cp", or a :class:`Context`; None without context parallelism.
        sharded: the ranks over which the model is sharded.

    Raises:
        ValueError: the mesh has no such dimension, the model is sharded over the same ranks, or a group is given where
            a mesh is needed.
    """
    if context is None:
        return None, None
    if isinstance(context, Context):
        context = context.group
    if isinstance(context, dist.ProcessGroup):
        expect(
            sharded is None, "context", 'a device mesh with a dimension "cp", because the model is sharded', "a group"
        )
        return context, context
    names = getattr(context, "mesh_dim_names", None) or ()
    expect("cp" in names, "context", 'a process group, or a device mesh with a dimension "cp"', context)
    if sharded is not None:
        both = {*dist.get_process_group_ranks(context.get_group("cp"))} & {*dist.get_process_group_ranks(sharded)}
        is_disjoint = both == {dist.get_rank()} and context.ndim > 1
        others = "ranks that do not shard the model, in a mesh that also has the ranks that do"
        expect(is_disjoint, "context", others, f"{context}, where ranks {sorted(both)} shard one model")
    if context.ndim == 1:
        every = context.get_group()
    elif context.size() == dist.get_world_size():
        every = dist.group.WORLD
    else:
        every = context._flatten().get_group()
    return context.get_group("cp"), every


def context_of(metadata: AttentionMetadata, pool: int) -> ContextMetadata | None:
    """The context of a step for the layers of one pool; None if the pool is not sharded."""
    context = metadata.context
    return None if context is None or context.shards[pool].size == 1 else context


def _with_lse(query: Tensor, kv_cache: Tensor, *batch: Any, **features: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.paged_ops.paged_attention_with_lse(query, kv_cache, *batch, **features)
    return result
