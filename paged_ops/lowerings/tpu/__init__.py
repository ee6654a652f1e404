"""How every op runs through XLA: on a TPU, or on XLA's own CPU device."""

from paged_ops.lowerings.tpu.attention import (
    KNOWS,
    cascade_attention,
    copy_blocks,
    gather_kv,
    install,
    install_torch_tpu,
    install_twins,
    lowering,
    merge_attention_states,
    pad_head_size,
    paged_attention,
    paged_attention_with_lse,
    reshape_and_cache,
    swap_blocks,
    unsupported,
)

__all__ = [
    "KNOWS",
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "install",
    "install_torch_tpu",
    "install_twins",
    "lowering",
    "merge_attention_states",
    "pad_head_size",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
    "unsupported",
]
