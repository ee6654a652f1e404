"""A process with another default device or dtype, for tests."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def defaults(device: str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set them, and afterwards no default device and the dtype as before."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
        # torch 2.9 keeps the None, and torch.get_default_device() then fails.
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
