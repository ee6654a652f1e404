"""How every op runs on GPUs: Triton kernels, the same for CUDA and ROCm."""

from paged_ops.lowerings.cascade import cascade_attention
from paged_ops.lowerings.gpu.cache import gather_kv, reshape_and_cache

__all__ = ["cascade_attention", "gather_kv", "reshape_and_cache"]
