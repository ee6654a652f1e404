"""Cascade attention, composed of the other ops on every device. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake
from paged_ops.features import Features, refuse_others
from paged_ops.fp8 import saturated
from paged_ops.layouts import paged_kv

# The supported arguments and formats of the cache. Masks are not supported: a suffix counts positions from its own
# start, not from the start of the sequence.
APPLIES = frozenset(
    {
        *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale"),
        *("soft_cap", "sinks"),
        *("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
        *("float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)


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
    out: Tensor | None = None,
    **features: Any,
) -> Tensor:
    """All rows attend to the prefix as one sequence, each sequence attends to its suffix, and the two are merged by
    lse, without a sync.

    Sinks are counted once, with the suffix. ``output_scale`` is applied after the merge, which needs unscaled values.
    """
    arguments = (
        query,
        kv_cache,
        prefix_block_table,
        prefix_len,
        suffix_block_tables,
        suffix_lens,
        query_start_loc,
        scale,
    )
    out = fake.cascade_attention(*arguments, sinks=sinks, output_scale=output_scale, out=out, **features)
    f = Features(sinks=sinks, output_scale=output_scale, **features)
    refuse_others(f, kv_cache, APPLIES, "cascade_attention")
    attention = torch.ops.paged_ops.paged_attention_with_lse.default
    merge = torch.ops.paged_ops.merge_attention_states
    rows = query_start_loc[-1:]
    one_query = torch.cat([torch.zeros_like(rows), rows])
    suffixes = suffix_block_tables, suffix_lens, query_start_loc
    try:
        suffix = attention(query, kv_cache, *suffixes, scale, sinks=sinks, **features)
        prefix = attention(query, kv_cache, prefix_block_table, prefix_len, one_query, scale, causal=False, **features)
    except ValueError:
        paged = paged_kv(kv_cache, features.get("value_cache"), None, features.get("kv_cache_dtype", "auto"))
        N, B = paged.num_blocks, max(paged.block_size, 1)
        checks.batch(*suffixes, len(query), N, B, "suffix_block_tables", "suffix_lens")
        checks.lengths("prefix_len", prefix_len, prefix_block_table.shape[1], B)
        checks.needed_blocks(prefix_block_table, prefix_len, N, B, "prefix_block_table")
        raise
    if output_scale is None:
        merge.out(*prefix, *suffix, out=out, lse=torch.empty_like(prefix[1]))
        return out
    merged, _ = merge.default(*prefix, *suffix)
    return out.copy_(saturated(merged, output_scale, out.dtype))
