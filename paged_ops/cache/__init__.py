"""The paged cache: its memory, the blocks of each sequence, shared prefixes, and states of recurrent layers.

``kv_cache`` has the memory of one cache, ``allocator`` the blocks of each sequence over a ``block_pool``, ``hybrid``
several caches of layers with different windows, ``states`` the rows of recurrent layers, ``shard`` the share of a
sequence's tokens that a rank keeps.
"""

from paged_ops.cache.allocator import BlockAllocator
from paged_ops.cache.block_pool import OutOfBlocks
from paged_ops.cache.hybrid import HybridCache, blocks_within_reach
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.states import StateCache

__all__ = ["BlockAllocator", "HybridCache", "KVCache", "OutOfBlocks", "StateCache", "blocks_within_reach"]
