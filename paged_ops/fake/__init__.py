"""Fake kernels: the static checks of every op, and its result as an empty tensor.

They run at compile time on fake tensors, and at the start of every lowering on the real ones, so that errors, shapes,
dtypes and strides always agree. They read no values and specialise nothing.
"""

from paged_ops.fake.attention import (
    cascade_attention,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
)
from paged_ops.fake.cache import copy_blocks, gather_kv, latent_cache_write, reshape_and_cache, swap_blocks

__all__ = [
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "latent_cache_write",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
]
