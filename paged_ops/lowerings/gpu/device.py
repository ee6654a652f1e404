"""What the cache ops must know of the device: the guard to launch under, and the numbers that were tuned for it."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

CONFIGS = Path(__file__).parent / "configs"
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# The Tritons between which Gluon's functions and how compiled kernels are launched are known: those of torch 2.10 and
# torch 2.15. Beyond them Triton's own language and launches serve, which it keeps stable.
OLDEST_GLUON, NEWEST_KNOWN = (3, 6), (3, 9)
# Launch with it: a product and a sum are one instruction. Triton did so by default; from 3.10 on it will not.
FUSED = {"enable_fp_fusion": True}


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A guard under which kernels launch on the tensor's device: Triton launches on the current one."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def capturing(tensor: Tensor) -> bool:
    """Whether the current stream of the tensor's device captures a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_fp8_cvt() -> bool:
    """Whether one instruction rounds and saturates float32 to e4m3fn or e5m2: PTX ``cvt.rn.satfinite`` from sm_89."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 89


@functools.cache
def has_pdl() -> bool:
    """Whether a kernel may start while the one before it ends: programmatic dependent launch, from sm_90."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def overlap() -> dict[str, bool]:
    """The constants of a kernel that may start while the one before it ends, and then waits for it (PDL)."""
    return {"PDL": True, "launch_pdl": True} if has_pdl() else {"PDL": False}


@functools.cache
def has_hopper_gluon() -> bool:
    """Whether the device is an sm_90 and Triton's Gluon one that gluon_names.py knows."""
    if triton.knobs.runtime.interpret or not OLDEST_GLUON <= TRITON <= NEWEST_KNOWN:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch == 90


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device: programs that persist are so many."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 << 10)


@functools.cache
def fp8_is_fnuz() -> bool:
    """Whether the device's fp8 is the flavour without negative zero and infinities: gfx94x of ROCm."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "hip" and target.arch.startswith("gfx94")


@functools.cache
def tuned(op: str) -> dict[str, Any]:
    """The numbers tuned for an op: ``configs/cache_default.json``, overridden by ``configs/cache_<device name>.json``.

    Raises ValueError for a file that sets what the default does not know.
    """
    numbers = json.loads((CONFIGS / "cache_default.json").read_text())[op]
    if torch.cuda.is_available():
        path = CONFIGS / f"cache_{torch.cuda.get_device_name().lower().replace(' ', '_')}.json"
        own = json.loads(path.read_text()).get(op, {}) if path.exists() else {}
        unknown = sorted(set(own) - set(numbers))
        if unknown:
            raise ValueError(f"{path.name}: expected {sorted(numbers)} for {op}, got {unknown}")
        numbers = {**numbers, **own}
    return numbers
