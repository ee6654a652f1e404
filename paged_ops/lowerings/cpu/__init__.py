"""The lowerings of all ops for the CPU: C++ functions where they serve a call, else torch ops."""

from paged_ops.lowerings.cascade import cascade_attention
from paged_ops.lowerings.collectives import all_gather_columns, all_reduce, all_reduce_add_norm, merge_over_ranks
from paged_ops.lowerings.cpu.attention import merge_attention_states, paged_attention, paged_attention_with_lse
from paged_ops.lowerings.cpu.cache import copy_blocks, gather_kv, latent_cache_write, reshape_and_cache, swap_blocks
from paged_ops.lowerings.cpu.explain import explain
from paged_ops.lowerings.cpu.indexer import select_keys
from paged_ops.lowerings.cpu.linear import (
    few_row_linear,
    invariant_expert_linear,
    invariant_linear,
    invariant_rms_norm,
)

__all__ = [
    "all_gather_columns",
    "all_reduce",
    "all_reduce_add_norm",
    "cascade_attention",
    "copy_blocks",
    "explain",
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
