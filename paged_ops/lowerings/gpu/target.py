"""What the lowerings know of a device: its :class:`Target`, made once per index, and the guard to launch under."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton

CONFIGS = Path(__file__).parent / "configs"
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# From the oldest to the newest Triton (those of torch 2.10 and 2.15) Gluon's functions, and the way to launch a
# compiled kernel, are known. With others only Triton's own language and launches are used, which Triton keeps stable.
OLDEST_GLUON, NEWEST_KNOWN = (3, 6), (3, 9)
# An option of each launch: multiply and add are fused (FMA). From Triton 3.10 on this will not be the default.
FUSED = {"enable_fp_fusion": True}
DEFAULT = "default"  # the device name whose tables serve devices without tables of their own, of any architecture
# The device whose tables serve others of its backend and architecture: an H100, H20, GH200 or a part of one (MIG). Not
# sm_100, where some of these tiles spill, and those of latents with 128 heads need 344 KB of shared memory (Triton
# 3.7).
STAND_INS: dict[tuple[str, int | str], str] = {("cuda", 90): "NVIDIA H200"}
# Bytes of shared memory (local data share) per program, by ROCm's architecture. torch reports them of NVIDIA's GPUs
# only.
LOCAL_DATA_SHARE: dict[int | str, int] = {"gfx950": 160 << 10}
OTHER_LOCAL_DATA_SHARE = 64 << 10
# The variable that names another folder for what ``paged-ops tune`` writes; see user_configs.
FOLDER_VARIABLE = "PAGED_OPS_CONFIGS"


@dataclasses.dataclass(frozen=True)
class Target:
    """One device with its index: all that plans and launches need to know of it. :func:`target_of` makes it."""

    device: torch.device
    name: str
    backend: str  # "cuda", "hip" or "interpreter": Triton's, which has no instructions of its own
    arch: int | str  # of CUDA the compute capability (90), of ROCm the architecture ("gfx942"), else 0
    processors: int  # multiprocessors (compute units): the number of persistent programs
    shared_memory: int  # bytes that one program may have

    @property
    def has_fp8_cvt(self) -> bool:
        """Whether one instruction rounds and saturates float32 to e4m3fn or e5m2: PTX ``cvt.rn.satfinite``, sm_89."""
        return self._is_cuda_from(89)

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may start while the previous one ends: programmatic dependent launch, from sm_90."""
        return self._is_cuda_from(90)

    @property
    def is_hopper(self) -> bool:
        """Whether it is an sm_90."""
        return self.backend == "cuda" and self.arch == 90

    @property
    def has_hopper_gluon(self) -> bool:
        """Whether it is an sm_90, and gluon_names.py knows the Gluon of this Triton."""
        return self.is_hopper and OLDEST_GLUON <= TRITON <= NEWEST_KNOWN

    @property
    def fp8_is_fnuz(self) -> bool:
        """Whether its fp8 formats are those without negative zero and infinities: gfx94x of ROCm."""
        return self.backend == "hip" and str(self.arch).startswith("gfx94")

    def overlap(self) -> dict[str, bool]:
        """The launch options of a kernel that may start while the previous one ends, and then waits for it (PDL)."""
        return {"PDL": True, "launch_pdl": True} if self.has_pdl else {"PDL": False}

    @property
    def stand_in(self) -> str:
        """The name of the device whose tables it has, unless there are tables of its own."""
        return STAND_INS.get((self.backend, self.arch), DEFAULT)

    @functools.cached_property
    def tiles(self) -> dict[str, Any]:
        """The tiles of the attention kernels: see :func:`read_tiles`. Tuning changes them in place."""
        return read_tiles(self.name, self.stand_in)

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The numbers tuned for the cache ops, by op: see :func:`read_numbers`. Tuning changes them in place."""
        return read_numbers(self.name, self.stand_in)

    def _is_cuda_from(self, capability: int) -> bool:
        return self.backend == "cuda" and int(self.arch) >= capability


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target of a tensor's device, by its index, whatever the current device is."""
    if device.type == "cpu":
        return Target(device, DEFAULT, "interpreter", 0, 0, 0)
    assert device.index is not None, "a tensor's device has an index"
    properties: Any = torch.cuda.get_device_properties(device.index)
    backend: str = "cuda"
    arch: int | str = properties.major * 10 + properties.minor
    if triton.knobs.runtime.interpret:
        backend, arch = "interpreter", 0
    elif torch.version.hip is not None:
        backend, arch = "hip", properties.gcnArchName.partition(":")[0]
    if torch.version.hip is None:
        shared_memory = properties.shared_memory_per_block_optin
    else:
        shared_memory = LOCAL_DATA_SHARE.get(arch, OTHER_LOCAL_DATA_SHARE)
    return Target(device, properties.name, backend, arch, properties.multi_processor_count, shared_memory)


_settled: set[int] = set()  # ids of functions that live as long as their modules


def settled(kernel: Any) -> Any:
    """A kernel whose key in Triton's cache is the same in each process: call it before anything else asks for the key.

    Triton (3.5 to 3.9) takes the global constants of a helper into the key of its caller only if the helper's own key
    is known by then. So the keys of helpers are made first. Without that a process whose kernels are called in another
    order would not find what an earlier one compiled.
    """
    if id(kernel) not in _settled:
        _settled.add(id(kernel))
        function: Any = getattr(kernel, "fn", None)
        if hasattr(type(kernel), "cache_key") and hasattr(function, "__code__"):  # asking itself would make it
            for name in function.__code__.co_names:
                helper = function.__globals__.get(name)
                if hasattr(type(helper), "cache_key"):
                    settled(helper)
            _ = kernel.cache_key
    return kernel


_NO_GUARD = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A guard that makes the device the current one, on which Triton launches."""
    return _NO_GUARD if _is_current(device) else torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream captures a CUDA graph."""
    if device.type != "cuda":
        return False
    if _is_current(device):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch only answers for the current device
        return torch.cuda.is_current_stream_capturing()


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


# Tuned numbers as data


def config_path(folder: Path, kind: str, name: str) -> Path:
    """The file for a device's name: ``attention_nvidia_h200.json``; ``kind`` is attention or cache."""
    return folder / f"{kind}_{name.lower().replace(' ', '_')}.json"


def user_configs() -> Path:
    """The user's own tables, which ``paged-ops tune`` writes, and which are read before the package's.

    The folder that ``PAGED_OPS_CONFIGS`` names, else ``paged_ops`` in the user's folder of configurations:
    ``$XDG_CONFIG_HOME``, ``~/.config``; on Windows ``%LOCALAPPDATA%``.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification says
        base = os.path.expanduser("~/.config")
    return Path(base) / "paged_ops"


def packaged(kind: str, name: str, stand_in: str = DEFAULT) -> Path:
    """The package's file of a device: its own, or its stand-in's."""
    path = config_path(CONFIGS, kind, name)
    return path if path.exists() else config_path(CONFIGS, kind, stand_in)


def read_numbers(name: str, stand_in: str = DEFAULT) -> dict[str, Any]:
    """The numbers of the cache ops: ``cache_default.json``, overridden op by op by the device's file (its own, or that
    of the device that stands in for it), and that by the user's.

    Raises ValueError if a file sets a number that the default does not have.
    """
    numbers: dict[str, Any] = _read(config_path(CONFIGS, "cache", DEFAULT))
    for path in (packaged("cache", name, stand_in), config_path(user_configs(), "cache", name)):
        own = _read(path) if path.exists() else {}
        for op, changes in own.items():
            known = numbers.get(op, {})
            unknown = sorted(set(changes) - set(known))
            if unknown or op not in numbers:
                raise ValueError(f"{path.name}: expected {sorted(known)} for {op}, got {unknown} in {path.parent}")
            numbers[op] = {**known, **changes}
    return numbers


def read_tiles(name: str, stand_in: str = DEFAULT) -> dict[str, Any]:
    """The tiles of a device: from the package its own file, or that of the device that stands in for it; over these,
    entry by entry, the user's file.

    By kind of element and padded head size. ``split``: keys, warps, stages, programs per multiprocessor and, on CUDA, a
    bound on registers. ``slices``: the same for sliced tiles; without an entry tiles are not sliced. ``two_heads``: the
    number of key/value heads, of all sequences together, from which on two adjacent heads share a tile, and then the
    same for such tiles; if nothing follows the number, no heads do. ``prefill``: rows, keys, warps, stages. ``latent``:
    by kind of element and the rows of a tile keys, warps, stages, programs per multiprocessor. ``triton``: what differs
    from a given Triton on, because kernels would spill registers with it; entries for earlier Tritons hold too.

    Raises ValueError if the user's file has a table that the package's has not.
    """
    numbers = _tiles_of(packaged("attention", name, stand_in))
    path = config_path(user_configs(), "attention", name)
    own = _tiles_of(path) if path.exists() else {}
    unknown = sorted(own.keys() - numbers.keys())
    if unknown:
        raise ValueError(f"{path.name}: expected some of {sorted(numbers)}, got {unknown} in {path.parent}")
    for kernel, kinds in own.items():
        for kind, widths in kinds.items():
            numbers[kernel].setdefault(kind, {}).update(widths)
    return numbers


def later(numbers: dict[str, Any]) -> dict[str, Any]:
    """The entries of a table for Tritons that are newer than this one."""
    return {name: change for name, change in numbers.get("triton", {}).items() if _version(name) > TRITON}


def _tiles_of(path: Path) -> dict[str, Any]:
    """The tiles in a file, as they are for this Triton."""
    numbers = _read(path)
    newer = later(numbers)
    changes = numbers.pop("triton", {})
    for version in sorted(changes.keys() - newer.keys(), key=_version):
        for kernel, kinds in changes[version].items():
            for kind, widths in kinds.items():
                numbers[kernel][kind].update(widths)
    return numbers


def _read(path: Path) -> dict[str, Any]:
    try:
        numbers = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}; mend it, or delete it") from None
    if not isinstance(numbers, dict):
        raise ValueError(f"{path}: expected a JSON object, got {numbers}")
    return numbers


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))
