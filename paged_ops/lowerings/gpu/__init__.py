"""How every op runs on GPUs: Triton kernels, the same for CUDA and ROCm."""

from typing import Any

from paged_ops.lowerings.cascade import cascade_attention
from paged_ops.lowerings.collectives import merge_over_ranks
from paged_ops.lowerings.gpu import attention, indexer
from paged_ops.lowerings.gpu.attention import explain, paged_attention, paged_attention_with_lse
from paged_ops.lowerings.gpu.blocks import copy_blocks, swap_blocks
from paged_ops.lowerings.gpu.cache import latent_cache_write, reshape_and_cache
from paged_ops.lowerings.gpu.fused_allreduce import all_gather_columns, all_reduce, all_reduce_add_norm
from paged_ops.lowerings.gpu.gather import gather_kv
from paged_ops.lowerings.gpu.indexer import select_keys
from paged_ops.lowerings.gpu.invariant_layers import invariant_expert_linear, invariant_linear, invariant_rms_norm
from paged_ops.lowerings.gpu.linear import few_row_linear
from paged_ops.lowerings.gpu.merge import merge_attention_states

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

ATTENTION = ("paged_attention", "paged_attention_with_lse", "cascade_attention")


def unsupported(op: str, device: str, features: dict[str, Any]) -> list[str]:
    """Why an op would not run on ``device`` ("cuda" or "rocm") with these features. The cache ops take all of them,
    and every fp8 format: they convert by bits where an architecture has no instruction for it."""
    if op == "select_keys":
        return indexer.too_large(features.get("num_heads"), features.get("head_size"), features.get("block_size"))
    return attention.unsupported(op, device, features) if op in ATTENTION else []
