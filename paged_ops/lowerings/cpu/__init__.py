"""How every op runs on the CPU: one C++ function, and torch ops."""

from paged_ops.lowerings.cascade import cascade_attention
from paged_ops.lowerings.cpu.attention import merge_attention_states, paged_attention, paged_attention_with_lse
from paged_ops.lowerings.cpu.cache import copy_blocks, gather_kv, latent_cache_write, reshape_and_cache, swap_blocks
from paged_ops.lowerings.cpu.explain import explain

__all__ = [
    "cascade_attention",
    "copy_blocks",
    "explain",
    "gather_kv",
    "latent_cache_write",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
]
