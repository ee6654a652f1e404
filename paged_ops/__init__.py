"""Paged attention and paged-cache ops as first-class PyTorch operators."""

from paged_ops.cache.allocator import BlockAllocator, OutOfBlocks
from paged_ops.cache.hybrid import HybridCache, blocks_within_reach
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import set_debug_checks
from paged_ops.layouts import (
    Layout,
    allocate_kv_cache,
    get_default_layout,
    kv_cache_shape,
    kv_cache_view,
    min_tpu_block_size,
    preferred_tpu_block_size,
    set_default_layout,
    split_joined_cache,
    split_kv_cache,
)
from paged_ops.lowerings.warm_up import WarmUp, warm_up
from paged_ops.masks import BlockSparse
from paged_ops.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    Batch,
    GraphSupport,
    block_ids_from_addresses,
    collect_layer_hyperparameters,
    common_layer_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
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
    swap_blocks,
)
from paged_ops.support import Explanation, explain, supports

__version__ = "0.1.0"

__all__ = [
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "Batch",
    "BlockAllocator",
    "BlockSparse",
    "Explanation",
    "GraphSupport",
    "HybridCache",
    "KVCache",
    "Layout",
    "OutOfBlocks",
    "WarmUp",
    "allocate_kv_cache",
    "block_ids_from_addresses",
    "blocks_within_reach",
    "cascade_attention",
    "collect_layer_hyperparameters",
    "common_layer_hyperparameters",
    "copy_blocks",
    "explain",
    "gather_kv",
    "get_default_layout",
    "kv_cache_shape",
    "kv_cache_view",
    "latent_cache_write",
    "make_local_attention_virtual_batches",
    "merge_attention_states",
    "min_tpu_block_size",
    "paged_attention",
    "paged_attention_with_lse",
    "preferred_tpu_block_size",
    "reorder_batch_to_split_decodes_and_prefills",
    "reshape_and_cache",
    "set_debug_checks",
    "set_default_layout",
    "split_decodes_and_prefills",
    "split_joined_cache",
    "split_kv_cache",
    "supports",
    "swap_blocks",
    "use_cascade_attention",
    "warm_up",
]
