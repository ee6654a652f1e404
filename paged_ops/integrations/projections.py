"""One matrix product where a model makes several of one input: queries, keys and values; gate and up.

A decode step is bound by reading weights, and one product over all of them reads faster than three. Works on any model
whose modules name their projections as Llama does, compiled or not; the idea is that of every serving engine's fused
``qkv_proj`` and ``gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(model: nn.Module) -> int:
    """Fuse the projections of a model, in place, and return how many products are saved in one pass.

    The results are the same: rows of the weights are laid one after the other and multiplied at once. Call it after
    weights are loaded, on the device where they stay (for a moment one layer's are there twice), and before compiling;
    the names of the parameters change. Projections that are not plain ``nn.Linear`` of one input size, dtype and
    device, all with a bias or all without, stay as they are.
    """
    saved = 0
    for module in list(model.modules()):
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            linears = [part for part in parts if type(part) is nn.Linear]
            if len(linears) == len(parts) and _alike(linears):
                fused = FusedLinear(linears)
                for name, part in zip(names, fused.parts(), strict=True):
                    setattr(module, name, part)
                saved += len(parts) - 1
    return saved


class FusedLinear(nn.Module):
    """Several linear layers of one input as one. From the first to the last part of a pass it holds their result."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        trains = linears[0].weight.requires_grad
        self.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), trains)
        self.bias: nn.Parameter | None = None
        if linears[0].bias is not None:
            self.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), trains)
        self.product: Callable[..., Tensor] = F.linear
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.left = 0

    def parts(self) -> list[FusedPart]:
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return [FusedPart(self, end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.output is None or self.input is not x:
            self.input, self.output, self.left = x, self.product(x, self.weight, self.bias), len(self.sizes)
        result = self.output[..., start:stop]
        self.left -= 1
        if self.left == 0:
            self.input = self.output = None
        return result


class FusedPart(nn.Module):
    """What a model calls: the rows ``start : stop`` of a :class:`FusedLinear`."""

    def __init__(self, fused: FusedLinear, start: int, stop: int) -> None:
        super().__init__()
        self.fused, self.start, self.stop = fused, start, stop
        self.in_features, self.out_features = fused.weight.shape[1], stop - start

    @property
    def weight(self) -> Tensor:
        return self.fused.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        return None if self.fused.bias is None else self.fused.bias[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.rows(x, self.start, self.stop)


def _alike(linears: list[nn.Linear]) -> bool:
    kinds = {
        (each.in_features, each.weight.dtype, each.weight.device, each.bias is None, each.weight.requires_grad)
        for each in linears
    }
    return len(kinds) == 1
