"""Devices: a :class:`Target` per device index, the guard for launches, and the files of tuned numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

CONFIGS = Path(__file__).parent / "configs"
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# The Tritons (of torch 2.10 to 2.15) whose Gluon functions and launches of compiled kernels are known. Other versions
# use only Triton's stable language and launches.
OLDEST_GLUON, NEWEST_KNOWN = (3, 6), (3, 9)
# An option of each launch: fuse multiply and add (FMA). Not the default from Triton 3.10 on.
FUSED = {"enable_fp_fusion": True}
DEFAULT = "default"  # the name of the tables for devices without their own tables or a stand-in
# The device whose tables serve others of its backend and architecture: an H100, H20, GH200 or a part of one (MIG).
# sm_100 has none: some of these tiles spill there, and latent tiles with 128 heads need 344 KB of shared memory (Triton
# 3.7).
STAND_INS: dict[tuple[str, int | str], str] = {("cuda", 90): "NVIDIA H200"}
# Bytes of shared memory (local data share) per program, by ROCm architecture. torch reports them for NVIDIA GPUs only.
LOCAL_DATA_SHARE: dict[int | str, int] = {"gfx950": 160 << 10}
OTHER_LOCAL_DATA_SHARE = 64 << 10
# The environment variable with the folder of the user's tuned tables; see user_configs.
FOLDER_VARIABLE = "PAGED_OPS_CONFIGS"


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties of one device that plans and launches use; made by :func:`target_of`."""

    device: torch.device
    name: str
    backend: str  # "cuda", "hip" or "interpreter" (Triton's)
    arch: int | str  # CUDA: compute capability (90); ROCm: architecture ("gfx942"); else 0
    processors: int  # multiprocessors (compute units): the number of persistent programs
    shared_memory: int  # bytes available to one program

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
        """Whether it is an sm_90, and gluon_names.py supports this Triton."""
        return self.is_hopper and OLDEST_GLUON <= TRITON <= NEWEST_KNOWN

    @property
    def fp8_is_fnuz(self) -> bool:
        """Whether its fp8 formats are fnuz, without negative zero and infinities: gfx94x of ROCm."""
        return self.backend == "hip" and str(self.arch).startswith("gfx94")

    def overlap(self) -> dict[str, bool]:
        """The launch options of a kernel that may start before the previous one ends, and then waits for it (PDL)."""
        return {"PDL": True, "launch_pdl": True} if self.has_pdl else {"PDL": False}

    @property
    def stand_in(self) -> str:
        """The device whose tables it uses if it has no tables of its own."""
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
    """The target of a tensor's device, independent of the current device."""
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
    """The kernel, with a key in Triton's cache that is the same in each process. Must be called before the key is first
    computed.

    Triton (3.5 to 3.9) includes the global constants of a helper in its caller's key only if the helper's key has been
    computed. So this computes the keys of helpers first. Otherwise a process that calls kernels in another order would
    not find the compiled kernels of earlier processes.
    """
    if id(kernel) not in _settled:
        _settled.add(id(kernel))
        function: Any = getattr(kernel, "fn", None)
        if hasattr(type(kernel), "cache_key") and hasattr(
            function, "__code__"
        ):  # hasattr on the instance would compute it
            names, own = function.__code__.co_names, function.__globals__
            modules = (vars(own[name]) for name in names if isinstance(own.get(name), ModuleType))
            for names_of in (own, *modules):
                for helper in map(names_of.get, names):
                    if hasattr(type(helper), "cache_key"):
                        settled(helper)
            _ = kernel.cache_key
    return kernel


_NO_GUARD = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A guard that makes the device current: Triton launches on the current device."""
    return _NO_GUARD if _is_current(device) else torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    if device.type != "cuda":
        return False
    if _is_current(device):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch reports it for the current device only
        return torch.cuda.is_current_stream_capturing()


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


# Tuned numbers as data


def config_path(folder: Path, kind: str, name: str) -> Path:
    """The file for a device's name: ``attention_nvidia_h200.json``; ``kind`` is attention or cache."""
    return folder / f"{kind}_{name.lower().replace(' ', '_')}.json"


def user_configs() -> Path:
    """The folder of the user's tables, which ``paged-ops tune`` writes and which override the package's.

    ``PAGED_OPS_CONFIGS``, or else ``paged_ops`` in the user's configuration folder: ``$XDG_CONFIG_HOME`` or
    ``~/.config``; on Windows ``%LOCALAPPDATA%``.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification says
        base = os.path.expanduser("~/.config")
    return Path(base) / "paged_ops"


def packaged(kind: str, name: str, stand_in: str = DEFAULT) -> Path:
    """The package's file for a device, or else for its stand-in."""
    path = config_path(CONFIGS, kind, name)
    return path if path.exists() else config_path(CONFIGS, kind, stand_in)


def read_numbers(name: str, stand_in: str = DEFAULT) -> dict[str, Any]:
    """The numbers of the cache ops: ``cache_default.json``, overridden op by op by the file of the device or its
    stand-in, and then by the user's file.

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
    """The tiles of a device: the package's file of the device or its stand-in, overridden entry by entry by the user's.

    The tables, by kind of element and padded head size (``latent``: and rows of a tile):

    * ``split``: keys, warps, stages, programs per multiprocessor and, on CUDA, a bound on registers.
    * ``slices``: the same for sliced tiles; without an entry, tiles are not sliced.
    * ``two_heads``: the total number of key/value heads of all sequences from which on two adjacent heads share a tile,
      followed by the same numbers for such tiles; if nothing follows, heads never share a tile.
    * ``prefill``: rows, keys, warps, stages.
    * ``latent``: keys, warps, stages, programs per multiprocessor.
    * ``triton``: changes from a given Triton version on, where kernels would spill registers. Changes of earlier
      versions apply, too.

    Raises ValueError if the user's file has a table that the package's file does not have.
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
    """The changes for Tritons newer than the installed one."""
    return {name: change for name, change in numbers.get("triton", {}).items() if _version(name) > TRITON}


def _tiles_of(path: Path) -> dict[str, Any]:
    """The tiles in a file, with the changes for the installed Triton."""
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
        raise ValueError(f"{path}: expected JSON, got {error}; fix or delete it") from None
    if not isinstance(numbers, dict):
        raise ValueError(f"{path}: expected a JSON object, got {numbers}")
    return numbers


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))
