"""The device of torch_xla."""

from __future__ import annotations

import sys


def on_tpu() -> bool:
    """Whether torch_xla's device is a TPU rather than XLA's CPU (``PJRT_DEVICE=CPU``)."""
    if "torch_xla" not in sys.modules:
        return False
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "TPU"


def tpu_version() -> int:
    """The generation of the TPU, as torch_xla's kernel determines it."""
    from torch_xla._internal.jax_workarounds import jax_import_guard

    jax_import_guard()
    from torch_xla.experimental.pallas_kernels import ragged_paged_attention_v2

    return ragged_paged_attention_v2.get_tpu_version()
