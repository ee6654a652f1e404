"""The variants of linear layers of few rows, for tests/aot."""

import torch

from paged_ops.lowerings import gpu as lowering
from tests.aot.compiler import Variant, gpu

# The weight is loaded before the wait for the previous kernel, in loads of 16 bytes.
EARLY = {"cuda:90": (r"(?s)ld\.global\S*\.v4\.b32.*griddepcontrol\.wait.*ld\.global\S*\.v4\.b32",)}
LATE = {"cuda:90": (r"(?s)^(?!.*ld\.global.*griddepcontrol\.wait)",)}


def linear(T, C, norm=False, adds=False, gated=False, constant=True, dtype=torch.bfloat16):
    def call():
        x, weight = gpu(T, C, dtype=dtype), gpu(64, C, dtype=dtype)
        scale = gpu(C, dtype=dtype) if norm else None
        residual = gpu(T, 64, dtype=dtype) if adds else None
        lowering.few_row_linear(x, weight, scale, residual, 1e-5, gated, constant)

    return call


VARIANTS = [
    Variant(f"few-rows-{name}", call, expect, targets=("cuda:90",))
    for name, call, expect in (
        ("norm", linear(1, 4096, norm=True), EARLY),
        ("norm-gated", linear(1, 4096, norm=True, gated=True), EARLY),
        ("norm-gated-f16", linear(2, 4096, norm=True, gated=True, dtype=torch.float16), EARLY),
        ("add", linear(2, 5120, adds=True), EARLY),
        ("deep-add", linear(1, 14336, adds=True), EARLY),
        ("deep-two", linear(2, 14336, adds=True), EARLY),
        ("weight-just-written", linear(1, 4096, constant=False), LATE),
    )
]
