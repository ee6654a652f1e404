"""Attention on GPUs: one call (call.py), the choice of its kernel (choose.py), and one module per kernel."""

from paged_ops.lowerings.gpu.attention.call import explain, paged_attention, paged_attention_with_lse, unsupported

__all__ = ["explain", "paged_attention", "paged_attention_with_lse", "unsupported"]
