"""The fake of the indexer. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops import checks
from paged_ops.checks import expect
from paged_ops.fake.attention import check_batch
from paged_ops.fake.cache import result
from paged_ops.features import LARGEST, POOLS, IndexOptions
from paged_ops.layouts import (
    FP8_DS_INDEX,
    FP8_DS_MLA,
    FP8_DTYPES,
    INDEX_COLUMNS,
    MODEL_DTYPES,
    element_dtype,
    has_index_scales,
    has_row_scales,
    index_parts,
)


def select_keys(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    o = IndexOptions(**options)
    checks.tensor("index_query", index_query, (None, None, None), MODEL_DTYPES, names="[T, Hi, Di]")
    T, heads, _ = index_query.shape
    expect(heads >= 1, "index_query", "at least one head in [T, Hi, Di]", index_query)
    _check_cache(index_cache, index_query, o)
    check_batch(block_tables, seq_lens, query_start_loc, index_query.device)
    checks.at_least(1, k=k, block_size=o.block_size)
    checks.at_least(0, local_blocks=o.local_blocks)
    expect(o.local_blocks <= k, "local_blocks", f"at most k = {k}, as these blocks always win", o.local_blocks)
    expect(o.pool in POOLS, "pool", f"one of {POOLS}", repr(o.pool))
    if o.pool == "none":
        expect(o.block_size == 1, "block_size", "1 with pool='none'", o.block_size)
    if type(o.scale) is float:
        expect(-LARGEST <= o.scale <= LARGEST, "scale", "a finite float32", o.scale)
    if o.weights is not None:
        expect(not o.per_head, "weights", "None with per_head, which sums no heads", o.weights)
        dtypes = tuple({torch.float32: 0, index_query.dtype: 0})
        checks.tensor("weights", o.weights, (T, heads), dtypes, index_query.device, "[T, Hi]")
    return result("out", out, index_query, (T, heads if o.per_head else 1, k), torch.int32)


def _check_cache(index_cache: Tensor, index_query: Tensor, o: IndexOptions) -> None:
    Di, device = index_query.shape[2], index_query.device
    if has_index_scales(o.kv_cache_dtype):
        checks.tensor("index_cache", index_cache, (None, None, None), device=device, names="[N, B, 132]")
        index_parts(index_cache, "index_cache")
        expect(Di == INDEX_COLUMNS, "index_query", f"Di = {INDEX_COLUMNS} with kv_cache_dtype={FP8_DS_INDEX!r}", Di)
        expect(o.k_scale is None, "k_scale", f"None, as blocks of {FP8_DS_INDEX} hold their scales", o.k_scale)
        return
    checks.tensor("index_cache", index_cache, (None, None, Di), device=device, names="[N, B, Di]")
    other = f"another format than {FP8_DS_MLA!r}, whose rows are latents"
    expect(not has_row_scales(o.kv_cache_dtype), "kv_cache_dtype", other, repr(o.kv_cache_dtype))
    stored = element_dtype(index_cache, o.kv_cache_dtype, "index_cache")
    if stored not in FP8_DTYPES:
        own = f"the query's {index_query.dtype}, or fp8"
        expect(index_cache.dtype == index_query.dtype, "index_cache", own, index_cache)
        expect(o.k_scale is None, "k_scale", f"None, as a {index_cache.dtype} cache has no scales", o.k_scale)
    elif o.k_scale is not None:
        checks.tensor("k_scale", o.k_scale, (1,), torch.float32, device, "[1]")
