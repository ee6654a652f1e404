"""Devices by their index, and the one that is current."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def with_index(device: torch.device | str) -> torch.device:
    """A device with its index, for objects that outlive the call: "cuda" becomes the GPU that is current now."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, for code that relies on that: exports by DLPack, launches of other packages."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
