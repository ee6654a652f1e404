"""Linear layers and norms on the CPU: torch's matmul, and sums of a fixed order.

torch's matmul chooses its kernel by the number of rows, and its vectorised sums by shapes. The invariant ones are one
C++ function, ``linear.cpp``, or without a compiler torch ops that IEEE 754 rounds in one way.

Letters: T rows, C input features, O output features.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_ops import cpp, fake
from paged_ops.fake.models import few_row_shape
from paged_ops.lowerings.cpu.fused import FLAGS, PLAIN
from paged_ops.lowerings.cpu.invariant import TILE_ELEMENTS, add_halves


class Linear(ctypes.Structure):
    """``Linear`` of ``linear.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("T", "O", "C", "cell", "threads")),
    )


LINEAR = cpp.Source(
    Path(__file__).with_suffix(".cpp"),
    "invariant_linear",
    Linear,
    None,
    "linear",
    "invariant_linear on the CPU",
    ("-fopenmp",),
)


def few_row_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    constant: bool = False,
) -> Tensor:
    """By torch's ops, also where a GPU has no kernel."""
    few_row_shape(x, weight, norm, residual, gated)
    out = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight)
    if gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = fake.invariant_linear(x, weight, bias)
    O, C = weight.shape
    rows, weight = x.reshape(-1, C).contiguous(), weight.contiguous()
    if not out.numel():
        return out
    function = compiled()
    if function is None:
        _by_elements(rows, weight, bias, out.view(-1, O))
        return out
    bias = None if bias is None else bias.contiguous()
    call = Linear(T=len(rows), O=O, C=C, cell=PLAIN.index(x.dtype), threads=torch.get_num_threads())
    call.x, call.weight, call.out = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    function(ctypes.byref(call))
    return out


def invariant_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    out = fake.invariant_expert_linear(x, weight, experts, bias)
    for expert in experts.unique().tolist():
        rows = (experts == expert).nonzero()[:, 0]
        out[rows] = invariant_linear(x[rows], weight[expert], None if bias is None else bias[expert])
    return out


def invariant_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounds_first: bool = False
) -> Tensor:
    wide = x.float()
    mean = add_halves(wide * wide, -1) / max(x.shape[-1], 1)
    # in float64, whose square roots round to float32 in one way
    quotient = wide * (1.0 / (mean + eps).double().sqrt().float())
    if rounds_first:
        quotient = quotient.to(x.dtype)
    return quotient.to(x.dtype) if weight is None else (quotient.float() * (weight_offset + weight.float())).to(x.dtype)


@functools.cache
def compiled() -> Callable[[Any], None] | None:
    """The C++ function, or None if no compiler can build it."""
    return cpp.built(LINEAR, FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))


def _by_elements(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``rows [T, C]`` by elementwise products and sums, a part of the outputs at a time."""
    O, C = weight.shape
    step = max(1, TILE_ELEMENTS // max(C, 1))
    for t, row in enumerate(rows.float()):
        for start in range(0, O, step):
            sums = add_halves(row * weight[start : start + step].float(), -1)[:, 0]
            if bias is not None:
                sums = sums + bias[start : start + step].float()
            out[t, start : start + step] = sums
