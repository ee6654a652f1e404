"""Fakes of the attention ops. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops import checks
from paged_ops.checks import expect
from paged_ops.fake.cache import check_cache, result
from paged_ops.features import Features, check_features
from paged_ops.layouts import MODEL_DTYPES, PagedKV, is_latent

OUTPUT_FP8 = torch.float8_e4m3fn


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    **features: Any,
) -> Tensor:
    f = Features(**features)
    paged = _check_query_and_cache(query, kv_cache, f)
    check_batch(block_tables, seq_lens, query_start_loc, query.device)
    check_features(f, query, seq_lens.shape[0], paged.num_kv_heads, paged.block_size, scale)
    return result("out", out, query, _output_shape(query, paged), _output_dtype(query, f))


def paged_attention_with_lse(
    query: Tensor, *args: Any, out: tuple[Tensor, Tensor] | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    given_out, given_lse = out or (None, None)
    output = paged_attention(query, *args, out=given_out, **kwargs)
    return output, result("lse", given_lse, query, query.shape[:2], torch.float32)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    checks.tensor("out_a", out_a, (None, None, None), MODEL_DTYPES, names="[T, H, Dv]")
    T, H, Dv = out_a.shape
    checks.tensor("lse_a", lse_a, (T, H), torch.float32, out_a.device, "[T, H]")
    checks.tensor("out_b", out_b, (T, H, Dv), out_a.dtype, out_a.device, "[T, H, Dv]")
    checks.tensor("lse_b", lse_b, (T, H), torch.float32, out_a.device, "[T, H]")
    given_out, given_lse = out or (None, None)
    merged = result("out", given_out, out_a, (T, H, Dv), out_a.dtype)
    return merged, result("lse", given_lse, lse_a, (T, H), torch.float32)


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
    out: Tensor | None = None,
    **features: Any,
) -> Tensor:
    f = Features(**features)
    paged = _check_query_and_cache(query, kv_cache, f)
    checks.tensor("prefix_block_table", prefix_block_table, (1, None), torch.int32, query.device, "[1, Mp]")
    checks.tensor("prefix_len", prefix_len, (1,), torch.int32, query.device, "[1]")
    check_batch(suffix_block_tables, suffix_lens, query_start_loc, query.device, "suffix_block_tables", "suffix_lens")
    check_features(f, query, suffix_lens.shape[0], paged.num_kv_heads, paged.block_size, scale)
    return result("out", out, query, _output_shape(query, paged), _output_dtype(query, f))


def _check_query_and_cache(query: Tensor, kv_cache: Tensor, f: Features) -> PagedKV:
    checks.tensor("query", query, (None, None, None), MODEL_DTYPES, names="[T, H, D]")
    scales = f.k_scale, f.v_scale
    paged = check_cache(kv_cache, f.value_cache, *scales, f.kv_cache_dtype, query.dtype, f.value_head_size)
    if is_latent(kv_cache):
        latent = "the R of the latent kv_cache [N, B, R + P]"
        expect(f.value_head_size is not None, "value_head_size", latent, f.value_head_size)
    expect(kv_cache.device == query.device, "kv_cache", f"a tensor on {query.device}, the query's device", kv_cache)
    _, H, D = query.shape
    K = paged.num_kv_heads
    expect(D == paged.head_size, "query", f"head size {paged.head_size}, the cache's, in [T, H, D]", query)
    if K > 0:
        expect(H % K == 0, "query", f"a multiple of the cache's {K} key/value heads as H in [T, H, D]", query)
    return paged


def check_batch(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    device: torch.device,
    tables: str = "block_tables",
    lens: str = "seq_lens",
) -> None:
    checks.tensor(lens, seq_lens, (None,), torch.int32, device, "[S]")
    S = seq_lens.shape[0]
    checks.tensor(tables, block_tables, (S, None), torch.int32, device, "[S, M]")
    checks.tensor("query_start_loc", query_start_loc, (S + 1,), torch.int32, device, "[S + 1]")


def _output_shape(query: Tensor, paged: PagedKV) -> tuple[int, int, int]:
    return query.shape[0], query.shape[1], paged.value_head_size


def _output_dtype(query: Tensor, f: Features) -> torch.dtype:
    return query.dtype if f.output_scale is None else OUTPUT_FP8
