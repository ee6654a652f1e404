"""The variants of kernels that exchange data with other ranks, for tests/aot.py."""

import itertools

import torch
from aot import Variant, gpu

from paged_ops.lowerings.gpu import reduce

C, R = 4096, 256
BF16, F32 = torch.bfloat16, torch.float32


def places(ranks, rank, dtype, columns):
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    by_rank = tuple(gpu(2, R, ranks, columns, dtype=integers) for _ in range(ranks))
    return reduce.Places(by_rank, gpu(R, dtype=torch.int32), gpu(1, dtype=torch.int32), rank)


def sum_rows(ranks=2, rank=1, dtype=BF16, columns=C, norm=True, weight=None, **options):
    def call():
        x, residual, summed, normed = (gpu(64, columns, dtype=dtype) for _ in range(4))
        to = places(ranks, rank, dtype, columns) if ranks > 1 else None
        if norm:
            scale = gpu(columns, dtype=weight or dtype)
            reduce.reduce_rows(x, residual, scale, summed, normed, to, eps=1e-5, **options)
        else:
            reduce.reduce_rows(x, None, None, summed, None, to, **options)

    return call


# It polls past the L1, 16 bytes for each thread.
POLLS = {"cuda": (r"ld\.volatile\.global\S*\.v[24]\.b(32|64)",)}
VARIANTS = [
    Variant("all-reduce 2 ranks, norm", sum_rows(rounds_first=True), POLLS),
    Variant("all-reduce 2 ranks, two shots", sum_rows(two_shot=True), POLLS),
    Variant("all-reduce 8 ranks, float32 weight", sum_rows(8, 3, weight=F32, weight_offset=1.0), POLLS),
    Variant("all-reduce 4 ranks, two shots, float32", sum_rows(4, 0, F32, two_shot=True, columns=2880)),
    Variant("all-reduce 1 rank, norm alone", sum_rows(1, rounds_first=True)),
    Variant("all-reduce 2 ranks, sum alone", sum_rows(norm=False, columns=8192), POLLS),
]
assert len({name for name, _ in itertools.groupby(VARIANTS, lambda each: each.name)}) == len(VARIANTS)
