"""The variants of linear layers of few rows, for tests/aot."""

import torch

from paged_ops.lowerings import gpu as lowering
from tests.aot.compiler import Variant, both, gpu

# Each kernel loads the weight before it waits for the previous kernel, in loads of 16 bytes.
EARLY = {
    "cuda:90": (
        r"ld\.global\S*\.v4\.b32",
        r"(?s)^(?!.*\.entry (?:(?!ld\.global\S*\.v4\.b32|\.entry).)*griddepcontrol\.wait)",
    )
}
LATE = {"cuda:90": (r"(?s)^(?!.*ld\.global.*griddepcontrol\.wait)",)}


def linear(T, C, norm=False, adds=False, gated=False, constant=True, dtype=torch.bfloat16):
    def call():
        x, weight = gpu(T, C, dtype=dtype), gpu(64, C, dtype=dtype)
        scale = gpu(C, dtype=dtype) if norm else None
        residual = gpu(T, 64, dtype=dtype) if adds else None
        lowering.few_row_linear(x, weight, scale, residual, 1e-5, gated, constant)

    return call


VARIANTS = [
    Variant(
        "few-rows-norm-gate-and-add",
        both(
            linear(1, 4096, norm=True),
            linear(1, 4096, norm=True, gated=True),
            linear(2, 4096, norm=True, gated=True, dtype=torch.float16),
            linear(2, 5120, adds=True),
            linear(1, 14336, adds=True),
            linear(2, 14336, adds=True),
        ),
        EARLY,
        targets=("cuda:90",),
    ),
    Variant("few-rows-weight-just-written", linear(1, 4096, constant=False), LATE, targets=("cuda:90",)),
]
