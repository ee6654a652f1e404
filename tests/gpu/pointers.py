"""Kernel arguments as a launch sees them, turned back into tensors."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
import triton

from paged_ops.lowerings.gpu.attention.hopper import consumer, work
from paged_ops.lowerings.gpu.attention.shared import masks


class Pointer:
    """An address into a tensor."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor.flatten(), at

    def __add__(self, distance):
        return Pointer(self.tensor, self.at + distance)


def as_torch(monkeypatch):
    """The kernel's own code for positions, on tensors: Gluon has no interpreter."""

    def tensors(function):
        return lambda *each: function(*(torch.as_tensor(one) for one in each))

    def load(pointer, mask=True, other=0):
        at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
        return torch.where(mask, pointer.tensor[torch.where(mask, at, 0).long()], other).int()

    language = SimpleNamespace(
        load=load,
        arange=lambda first, end, layout=None: torch.arange(first, end, dtype=torch.int32),
        where=tensors(torch.where),
        minimum=tensors(torch.minimum),
        maximum=tensors(torch.maximum),
        max=lambda values, axis=0: values.amax(axis),
        sum=lambda values, axis=0: values.sum(axis),
        cumsum=lambda values, axis: values.cumsum(axis),
        associative_scan=lambda values, axis, add: values.cumsum(axis),
        static_range=range,
        exp2=torch.exp2,
        cdiv=lambda a, b: -(-a // b),
        BlockedLayout=lambda *sizes: None,
        constexpr=object,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
    )
    monkeypatch.setattr(masks, "tl", language)
    monkeypatch.setattr(work, "LIGHT", work.LIGHT.value)
    for module in (work, consumer, masks):
        if module is not masks:
            monkeypatch.setattr(module, "gl", language)
        for name, given in list(vars(module).items()):
            if isinstance(given, triton.JITFunction):
                monkeypatch.setattr(module, name, given.fn)
