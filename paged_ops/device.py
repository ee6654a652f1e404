"""Devices by their index, and the one that is current."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from paged_ops.checks import describe_setting


def as_device(device: torch.device | str) -> torch.device:
    """The device of a name; ValueError for what torch does not take as one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        got = describe_setting(device)
    raise ValueError(f"device: expected a device of torch, such as cpu, cuda:0, or xla for a TPU, got {got}")


def with_index(device: torch.device | str) -> torch.device:
    """A device with its index, for objects that outlive the call: "cuda" becomes the GPU that is current now."""
    device = as_device(device)
    if device.type == "xla" and "torch_xla" not in sys.modules:
        raise ValueError(f"device: expected torch_xla to be imported, before paged_ops, for {device}; it is not")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, for code that relies on that: exports by DLPack, launches of other packages."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
