"""Attention on GPUs: a module for each kernel, helpers that all share (tile.py), and who serves a call (plan.py)."""

from paged_ops.lowerings.gpu.attention.plan import paged_attention, paged_attention_with_lse, unsupported

__all__ = ["paged_attention", "paged_attention_with_lse", "unsupported"]
