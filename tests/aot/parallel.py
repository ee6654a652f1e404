"""The variants of kernels that exchange data with other ranks, for tests/aot."""

import itertools

import torch

from paged_ops.lowerings.gpu import fused_allreduce, merge_ranks
from tests.aot.compiler import Variant, both, gpu

C, R = 4096, 256
BF16, F32 = torch.bfloat16, torch.float32


def places(ranks, rank, dtype, columns):
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    by_rank = tuple(gpu(2, R, ranks, columns, dtype=integers) for _ in range(ranks))
    return fused_allreduce.Places(by_rank, gpu(R, dtype=torch.int32), gpu(1, dtype=torch.int32), rank)


def sum_rows(ranks=2, rank=1, dtype=BF16, columns=C, weight=None, inner_eps=0.0, **options):
    def call():
        x, residual, summed, normed = (gpu(64, columns, dtype=dtype) for _ in range(4))
        scale = gpu(columns, dtype=weight or dtype)
        inner = gpu(columns, dtype=weight or dtype) if inner_eps else None
        how = dict(eps=1e-5, inner_weight=inner, inner_eps=inner_eps, **options)
        fused_allreduce.reduce_rows(x, residual, scale, summed, normed, places(ranks, rank, dtype, columns), **how)

    return call


def merge_parts(ranks=2, rank=1, dtype=BF16, heads=32, width=128, is_scattered=False, tokens=8):
    def call():
        out, lse = gpu(tokens, heads, width, dtype=dtype), gpu(tokens, heads, dtype=F32)
        of_part = heads * ranks if is_scattered else heads
        part, part_lse = gpu(tokens, of_part, width, dtype=dtype), gpu(tokens, of_part, dtype=F32)
        integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        outs = tuple(gpu(2, 4096, ranks, width, dtype=integers) for _ in range(ranks))
        lses = tuple(gpu(2, 4096, ranks, dtype=torch.int32) for _ in range(ranks))
        to = merge_ranks.Places(outs, lses, gpu(4096, dtype=torch.int32), gpu(1, dtype=torch.int32), rank)
        merge_ranks.exchange(part, part_lse, out, lse, to)

    return call


def merge_gathered_parts():
    out, lse = gpu(8, 32, 128), gpu(8, 32, dtype=F32)
    merge_ranks.merge_gathered(gpu(2, 8, 32, 260, dtype=torch.uint8), out, lse)


def gather(ranks, rank, columns, parts):
    def call():
        x, out = gpu(8, parts * columns), gpu(8, ranks * parts * columns)
        fused_allreduce.gather_columns(x, out, places(ranks, rank, BF16, columns))

    return call


# It polls past the L1, 16 bytes for each thread.
POLLS = {"cuda": (r"ld\.volatile\.global\S*\.v[24]\.b(32|64)",)}
VARIANTS = [
    Variant("all-reduce 2 ranks, norm", sum_rows(rounds_first=True), POLLS),
    Variant(
        "all-reduce 8 ranks, float32 weights, inner norm",
        sum_rows(8, 3, weight=F32, weight_offset=1.0, inner_eps=1e-6),
        POLLS,
    ),
    Variant("all-reduce 4 ranks, two shots, float32", sum_rows(4, 0, F32, two_shot=True, columns=2880)),
    Variant("all-gather 2 ranks, 8 parts", gather(2, 0, 8016, 8), POLLS),
    Variant("merge of 2 ranks' parts, one token", merge_parts(tokens=1), POLLS),
    Variant("merge of 2 ranks' parts", merge_parts(), {"cuda": (*POLLS["cuda"], r"\btrap;")}),
    Variant(
        "merge of 4 ranks' parts, own heads, of 8 in float32, and of gathered parts",
        both(
            merge_parts(4, 3, is_scattered=True, width=80, tokens=64),
            merge_parts(8, 0, F32, heads=8),
            merge_gathered_parts,
        ),
    ),
]
assert len({name for name, _ in itertools.groupby(VARIANTS, lambda each: each.name)}) == len(VARIANTS)
