"""The arguments of the two ops in one decode step."""

import torch

from paged_ops.lowerings.gpu.target import Target

H200 = Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 132, 227 << 10)
H, K, D, B, M = 32, 8, 128, 16, 64


def step(T, S):
    """Arguments of the two ops in a step, whose rows are slices of larger tensors."""
    qkv = torch.empty(T, (H + 2 * K) * D, dtype=torch.bfloat16)
    query, key, value = (each.unflatten(1, (-1, D)) for each in qkv.split([H * D, K * D, K * D], 1))
    kv_cache = torch.empty(M, 2, B, K, D, dtype=torch.bfloat16)
    tables, lens, starts = (torch.zeros(257, *more, dtype=torch.int32) for more in ((M,), (), ()))
    slots = torch.zeros(4096, dtype=torch.int64)
    return (key, value, kv_cache, slots[:T]), (query, kv_cache, tables[:S], lens[:S], starts[: S + 1], D**-0.5)
