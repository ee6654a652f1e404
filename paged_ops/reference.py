"""The reference of every op in plain torch, one sequence and one token at a time: written to be read, not to be fast.

Same names, arguments and letters as :mod:`paged_ops.ops`. The reference computes in the dtype of its query (or of
``out_a``). It also accepts float64, which lowerings are compared with; then lse is float64, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paged_ops.fake.models import EXCHANGES, REDUCERS, NormOptions
from paged_ops.features import Features, kept_keys, with_value_scale
from paged_ops.fp8 import dequantise, dequantise_rows, quantise, quantise_index, quantise_rows
from paged_ops.layouts import (
    FP8_DTYPES,
    PagedKV,
    element_dtype,
    has_index_scales,
    has_row_scales,
    index_parts,
    paged_kv,
)
from paged_ops.registry import without_autocast


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    stored = element_dtype(kv_cache, kv_cache_dtype)
    paged = _typed(paged_kv(kv_cache, value_cache), stored)
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, paged.block_size)
            cell = paged.key[block, offset]  # [K, D/x, x]
            cell.copy_(quantise(key[t], k_scale, stored).view(cell.shape))
            paged.value[block, offset] = quantise(value[t], v_scale, stored)


def latent_cache_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    if has_index_scales(kv_cache_dtype):
        parts = index_parts(kv_cache)
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                place = divmod(slot, kv_cache.shape[1])
                key, parts.scales[place] = quantise_index(latent[t])
                parts.keys[place].copy_(key)
        return
    stored = element_dtype(kv_cache, kv_cache_dtype)
    row_scales = has_row_scales(kv_cache_dtype)
    rows = kv_cache if row_scales else _typed(paged_kv(kv_cache), stored).key[:, :, 0, 0]  # [N, B, R + P]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            row = torch.cat([latent[t], rotated[t]])[None]
            cells = quantise_rows(latent[t], rotated[t])[None] if row_scales else quantise(row, k_scale, stored)
            rows[divmod(slot, rows.shape[1])] = cells[0]


def paged_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return paged_attention_with_lse(query, *args, **kwargs)[0]


@without_autocast
def paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    f = with_value_scale(Features(**features), kv_cache)
    dtype, (T, H, _) = query.dtype, query.shape
    paged = _numbers(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype, dtype)
    K, B = paged.num_kv_heads, paged.block_size
    out = query.new_zeros(T, H, paged.value_head_size)
    lse = torch.full((T, H), -torch.inf, dtype=torch.promote_types(dtype, torch.float32), device=query.device)
    starts = query_start_loc.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        if start == end:
            continue
        q_len = end - start
        k, v = _read_sequence(paged, block_tables[s], seq_len, f.k_scale, f.v_scale, dtype)  # [n, K, D], [n, K, Dv]
        k, v = k.repeat_interleave(H // max(K, 1), 1), v.repeat_interleave(H // max(K, 1), 1)  # [n, H, D], [n, H, Dv]
        i = torch.arange(q_len, device=query.device) + (seq_len - q_len)  # positions of the queries
        j = torch.arange(len(k), device=query.device)  # and of the keys

        logits = torch.einsum("qhd,khd->hqk", query[start:end], k) * scale
        if f.soft_cap:
            logits = f.soft_cap * torch.tanh(logits / f.soft_cap)
        if f.alibi_slopes is not None:
            logits = logits + f.alibi_slopes[:, None, None].to(dtype) * (j[None, :] - i[:, None]).to(dtype)
        own = f if f.selected_keys is None else f._replace(selected_keys=f.selected_keys[start:end])
        kept = kept_keys(own, s, i, j, H, K, B)
        logits = logits.masked_fill(~kept, -torch.inf)
        summands = logits
        if f.sinks is not None:  # one more logit per head, without a value
            summands = torch.cat([logits, f.sinks.to(dtype)[:, None, None].expand(H, q_len, 1)], 2)

        total = torch.logsumexp(summands, 2)  # [H, q]; -inf for a row that sees nothing
        weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0.0)[:, :, None])
        out[start:end] = _weighted_sum(weights, v, kept)
        lse[start:end] = total.T
    if f.output_scale is not None:
        out = quantise(out, f.output_scale, torch.float8_e4m3fn)
    return out, lse


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    empty = -torch.inf
    lse_a = lse_a.masked_fill(lse_a == torch.inf, empty).to(torch.promote_types(out_a.dtype, torch.float32))
    lse_b = lse_b.masked_fill(lse_b == torch.inf, empty).to(lse_a.dtype)
    lse = torch.logaddexp(lse_a, lse_b)  # [T, H]
    out = torch.zeros_like(out_a)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(side_lse - lse)[:, :, None].to(side.dtype)
        out += torch.where(side_lse[:, :, None] == empty, 0.0, weight * side)
    return out, lse


def cascade_attention(
    query: Tensor,
    kv_cache: Tensor,
    prefix_block_table: Tensor,
    prefix_len: Tensor,
    suffix_block_tables: Tensor,
    suffix_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    **features: Any,
) -> Tensor:
    rows = query_start_loc[-1:]  # the batch as one query with all rows
    one_query = torch.cat([torch.zeros_like(rows), rows])
    prefix = paged_attention_with_lse(
        query, kv_cache, prefix_block_table, prefix_len, one_query, scale, causal=False, **features
    )
    suffix = paged_attention_with_lse(
        query, kv_cache, suffix_block_tables, suffix_lens, query_start_loc, scale, sinks=sinks, **features
    )
    out, _ = merge_attention_states(*prefix, *suffix)
    return out if output_scale is None else quantise(out, output_scale, torch.float8_e4m3fn)


@without_autocast
def select_keys(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k: int,
    *,
    per_head: bool = False,
    local_blocks: int = 0,
    **options: Any,
) -> Tensor:
    T, heads, _ = index_query.shape
    out = index_query.new_full((T, heads if per_head else 1, k), -1, dtype=torch.int32)
    batch = block_tables, seq_lens, query_start_loc
    for t, own, scores in index_scores(index_query, index_cache, *batch, per_head=per_head, **options):
        for g, of_list in enumerate(scores.tolist()):
            # Local blocks first, then the largest scores, of equal ones the lower position
            order = sorted(range(len(of_list)), key=lambda e: (not own - local_blocks < e <= own, -of_list[e], e))
            chosen = sorted(order[:k])
            out[t, g, : len(chosen)] = out.new_tensor(chosen)
    return out


def index_scores(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    weights: Tensor | None = None,
    scale: float = 1.0,
    relu: bool = False,
    per_head: bool = False,
    pool: str = "none",
    block_size: int = 1,
    causal: bool = True,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> Iterator[tuple[int, int, Tensor]]:
    """For each row of a sequence: its index, the block that it is in, and the scores ``[G, entries]`` of the entries
    that it sees, in float32 or, for a float64 query, in float64. NaN is -inf."""
    wide = torch.promote_types(index_query.dtype, torch.float32)
    if has_index_scales(kv_cache_dtype):
        parts = index_parts(index_cache)
        paged = paged_kv(parts.keys.to(wide) * parts.scales.to(wide)[..., None])
    else:
        paged = _numbers(index_cache, None, None, kv_cache_dtype, wide)
    starts = query_start_loc.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        keys = _read_sequence(paged, block_tables[s], seq_len, k_scale, None, wide)[0][:, 0]  # [n, Di]
        for t in range(starts[s], starts[s + 1]):
            i = seq_len - starts[s + 1] + t
            seen = keys[: max(i + 1, 0)] if causal else keys
            scores = index_query[t].to(wide) @ seen.T * scale  # [Hi, n]
            if relu:
                scores = scores.relu()
            if not per_head:
                of_row = scores.new_ones(len(scores)) if weights is None else weights[t].to(wide)
                scores = (of_row @ scores)[None]  # [G, n]
            scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
            if pool != "none":
                blocks = scores.split(block_size, 1) if len(seen) else ()
                pooled = [each.amax(1) if pool == "max" else each.mean(1) for each in blocks]
                scores = torch.stack(pooled, 1) if pooled else scores
            yield t, i // block_size, scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    for cache in kv_caches:
        for src, dst in block_mapping.tolist():
            cache[dst] = cache[src]


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    for src_cache, dst_cache in zip(src_caches, dst_caches, strict=True):
        for src, dst in block_mapping.tolist():
            dst_cache[dst] = src_cache[src]


def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = element_dtype(kv_cache, kv_cache_dtype) if dtype is None else dtype
    paged = _numbers(kv_cache, value_cache, None, kv_cache_dtype, dtype)
    key = kv_cache.new_zeros((num_tokens, paged.num_kv_heads, paged.head_size), dtype=dtype)
    value = kv_cache.new_zeros((num_tokens, paged.num_kv_heads, paged.value_head_size), dtype=dtype)
    row = 0
    for s, seq_len in enumerate(seq_lens.tolist()):
        k, v = _read_sequence(paged, block_tables[s], seq_len, k_scale, v_scale, dtype)
        fits = max(0, min(len(k), num_tokens - row))
        key[row : row + fits], value[row : row + fits] = k[:fits], v[:fits]
        row += len(k)
    return key, value


def all_reduce(x: Tensor, reducer: str) -> Tensor:
    return torch.stack(_of_all_ranks(x, REDUCERS[reducer].group)).float().sum(0).to(x.dtype)


def all_gather_columns(x: Tensor, reducer: str) -> Tensor:
    return torch.cat(_of_all_ranks(x, REDUCERS[reducer].group), -1)


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, reducer: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    options = NormOptions(*args, **kwargs)

    def norm(y: Tensor, w: Tensor, e: float) -> Tensor:
        quotient = y.float() / (y.float().square().mean(-1, keepdim=True) + e).sqrt()
        if options.rounds_first:
            quotient = quotient.to(x.dtype)
        return (quotient.float() * (options.weight_offset + w.float())).to(x.dtype)

    added = all_reduce(x, reducer)
    if options.inner_weight is not None:
        added = norm(added, options.inner_weight, options.inner_eps)
    summed = residual + added
    return summed, norm(summed, weight, eps)


def merge_over_ranks(part: Tensor, lse: Tensor, context: str) -> tuple[Tensor, Tensor]:
    group = EXCHANGES[context].group
    outs, lses = group.all_gather(part.contiguous()), group.all_gather(lse.contiguous())  # [W, T, H, Dv], [W, T, H]
    lses = lses.where(lses != torch.inf, -torch.inf)
    total = lses.logsumexp(0)
    weights = (lses - total).exp().where(lses != -torch.inf, 0.0)[..., None]
    return (weights * outs.float().where(weights != 0, 0.0)).sum(0).to(part.dtype), total


def few_row_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    constant: bool = False,
) -> Tensor:
    rows = x.double()
    if norm is not None:
        rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    out = rows @ weight.double().T
    if gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return (out if residual is None else out + residual.double()).to(x.dtype)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def invariant_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.einsum("tc,toc->to", x.double(), weight[experts].double())
    return (out if bias is None else out + bias[experts].double()).to(x.dtype)


def invariant_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounds_first: bool = False
) -> Tensor:
    quotient = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    if rounds_first:
        quotient = quotient.to(x.dtype)
    return (
        quotient.to(x.dtype) if weight is None else (quotient.double() * (weight_offset + weight.double())).to(x.dtype)
    )


def _of_all_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(every, x.contiguous(), group=group)
    return every


def _read_sequence(
    paged: PagedKV,
    block_table: Tensor,
    seq_len: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys ``[n, K, D]`` and values ``[n, K, Dv]`` of one sequence, n = seq_len (0 from a cache without blocks)."""
    B = paged.block_size
    if paged.num_blocks == 0:
        seq_len = 0
    j = torch.arange(seq_len, device=block_table.device)
    block, offset = block_table[j // max(B, 1)].long(), j % max(B, 1)
    key, value = _at(paged.key, block, offset), _at(paged.value, block, offset)  # [n, K, D/x, x], [n, K, Dv]
    return dequantise(key.flatten(2), k_scale, dtype), dequantise(value, v_scale, dtype)


def _weighted_sum(weights: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """``[q, H, Dv]`` of weights ``[H, q, n]`` and values ``[n, H, Dv]``. As 0 * NaN is NaN, values that are not finite
    are added key by key, only to rows that see them."""
    finite = v.isfinite()
    total = torch.einsum("hqk,khd->qhd", weights, v.where(finite, 0.0))
    for j in (~finite).flatten(1).any(1).nonzero().flatten().tolist():
        share = weights[:, :, j].T[:, :, None] * v[j].where(~finite[j], 0.0)
        total += share.where(kept[:, :, j].T[:, :, None], 0.0)
    return total


def _at(cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    if cache.dtype in FP8_DTYPES:  # torch 2.9 does not index float8 on the CPU
        return cache.view(torch.uint8)[block, offset].view(cache.dtype)
    return cache[block, offset]


def _numbers(
    kv_cache: Tensor, value_cache: Tensor | None, value_head_size: int | None, kv_cache_dtype: str, dtype: torch.dtype
) -> PagedKV:
    """Keys and values before k_scale and v_scale; rows with their own scales are dequantised."""
    if has_row_scales(kv_cache_dtype):
        return paged_kv(dequantise_rows(kv_cache, dtype), value_cache, value_head_size)
    return _typed(paged_kv(kv_cache, value_cache, value_head_size), element_dtype(kv_cache, kv_cache_dtype))


def _typed(paged: PagedKV, stored: torch.dtype) -> PagedKV:
    """The views with uint8 storage viewed as its fp8 dtype."""
    return paged if paged.key.dtype == stored else PagedKV(paged.key.view(stored), paged.value.view(stored))
