"""Paged attention and paged-cache ops as first-class PyTorch operators."""

from paged_ops.checks import set_debug_checks
from paged_ops.layouts import (
    Layout,
    allocate_kv_cache,
    get_default_layout,
    kv_cache_shape,
    kv_cache_view,
    set_default_layout,
    split_kv_cache,
)
from paged_ops.masks import BlockSparse
from paged_ops.op import supports
from paged_ops.ops import (
    attention_schedule,
    cascade_attention,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
    reshape_and_cache,
    swap_blocks,
)

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "Layout",
    "allocate_kv_cache",
    "attention_schedule",
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "get_default_layout",
    "kv_cache_shape",
    "kv_cache_view",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "set_debug_checks",
    "set_default_layout",
    "split_kv_cache",
    "supports",
    "swap_blocks",
]
