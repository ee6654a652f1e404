"""Attention on GPUs: one module per kernel, shared helpers (tile.py), and the choice of a kernel (plan.py)."""

from paged_ops.lowerings.gpu.attention.call import paged_attention, paged_attention_with_lse, unsupported

__all__ = ["paged_attention", "paged_attention_with_lse", "unsupported"]
