"""Fake kernels: the static checks of every op, and its results as empty tensors.

They run at compile time on fake tensors, and at the start of every lowering on real tensors, so errors, shapes, dtypes
and strides always agree. They read no values and add no guards on sizes.
"""

from paged_ops.fake.attention import (
    cascade_attention,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
)
from paged_ops.fake.cache import copy_blocks, gather_kv, latent_cache_write, reshape_and_cache, swap_blocks
from paged_ops.fake.indexer import select_keys
from paged_ops.fake.models import (
    all_gather_columns,
    all_reduce,
    all_reduce_add_norm,
    few_row_linear,
    invariant_expert_linear,
    invariant_linear,
    invariant_rms_norm,
    merge_over_ranks,
)

__all__ = [
    "all_gather_columns",
    "all_reduce",
    "all_reduce_add_norm",
    "cascade_attention",
    "copy_blocks",
    "few_row_linear",
    "gather_kv",
    "invariant_expert_linear",
    "invariant_linear",
    "invariant_rms_norm",
    "latent_cache_write",
    "merge_attention_states",
    "merge_over_ranks",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "select_keys",
    "swap_blocks",
]
