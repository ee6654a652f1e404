"""Paged attention and paged-cache ops as first-class PyTorch operators."""

from paged_ops import moved
from paged_ops.cache.allocator import BlockAllocator, OutOfBlocks
from paged_ops.cache.hybrid import HybridCache, blocks_within_reach
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.states import StateCache
from paged_ops.checks import set_debug_checks
from paged_ops.layouts import (
    Layout,
    allocate_kv_cache,
    get_default_layout,
    kv_cache_shape,
    kv_cache_view,
    set_default_layout,
)
from paged_ops.lowerings.warm_up import WarmUp, warm_up
from paged_ops.masks import BlockSparse
from paged_ops.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    Batch,
    GraphSupport,
    split_decodes_and_prefills,
    use_cascade_attention,
)
from paged_ops.ops import (
    cascade_attention,
    copy_blocks,
    gather_kv,
    latent_cache_write,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
    reshape_and_cache,
    select_keys,
    swap_blocks,
)
from paged_ops.support import Explanation, explain, supports

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - by topic, as in docs/api
    # Attention
    "paged_attention",
    "paged_attention_with_lse",
    "cascade_attention",
    "merge_attention_states",
    "select_keys",
    "BlockSparse",
    # Cache ops
    "reshape_and_cache",
    "latent_cache_write",
    "gather_kv",
    "copy_blocks",
    "swap_blocks",
    # Which kernel runs, and compilation before the first call
    "supports",
    "explain",
    "Explanation",
    "set_debug_checks",
    "warm_up",
    "WarmUp",
    # Cache layouts
    "Layout",
    "allocate_kv_cache",
    "kv_cache_shape",
    "kv_cache_view",
    "get_default_layout",
    "set_default_layout",
    # Blocks and their owners
    "KVCache",
    "BlockAllocator",
    "HybridCache",
    "StateCache",
    "blocks_within_reach",
    "OutOfBlocks",
    # Metadata of a step
    "Batch",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "GraphSupport",
    "split_decodes_and_prefills",
    "use_cascade_attention",
]

moved.install()
__getattr__ = moved.public_name
