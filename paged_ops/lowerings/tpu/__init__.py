"""The lowerings of all ops for XLA: a TPU, or XLA's CPU device."""

from typing import Any

import torch

from paged_ops import registry
from paged_ops.lowerings.tpu import functional
from paged_ops.lowerings.tpu.attention import (
    cascade_attention,
    explain,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
)
from paged_ops.lowerings.tpu.cache import copy_blocks, gather_kv, latent_cache_write, reshape_and_cache, swap_blocks
from paged_ops.lowerings.tpu.ragged import pad_head_size, unsupported

__all__ = [
    "cascade_attention",
    "copy_blocks",
    "explain",
    "gather_kv",
    "install",
    "install_torch_tpu",
    "install_twins",
    "latent_cache_write",
    "lowering",
    "merge_attention_states",
    "pad_head_size",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
    "unsupported",
]


def install() -> None:
    """Register the mutating ops with torch_xla.

    Only needed by programs that import torch_xla after paged_ops: without it XLA refuses the ops that write a cache.
    """
    for name in registry.OPS:
        install_twins(registry.LIBRARY, name)


def install_twins(library: torch.library.Library, name: str) -> None:
    """The functional twins of one op, for torch_xla."""
    functional.install(library, name, lowering, "XLA")


def install_torch_tpu() -> None:
    """Experimental: the ops on the device ``tpu`` of TorchTPU (``torch_tpu``), the announced successor of torch_xla.

    Registers the functional twins and the plain torch code, without the TPU's kernels, under the device's dispatch key.
    torch.compile traces graphs with correct shapes and no mutation; none has been run.
    """
    for name in registry.OPS:
        functional.install(registry.LIBRARY, name, lowering, "PrivateUse1")
        if not functional.mutates(name) and name in globals():  # PyTorch refuses the others by name
            registry.LIBRARY.impl(name, lowering(name), "PrivateUse1")


def lowering(name: str) -> Any:
    """The function of this module that implements an op; functional twins call it."""
    return globals()[name]
