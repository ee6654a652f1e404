"""The device of ``--device``, and its requirements."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import torch.distributed
import typer

from paged_ops.device import with_index
from paged_ops.support import supports

Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda where the ops run on it, else cpu.")
]


def choose_device(name: str | None) -> torch.device:
    """The named device with its index; without a name, cuda if the ops run on it, else cpu.

    Raises:
        ValueError: the device does not exist here, or the ops do not run on it (with the reasons).
    """
    if name is None:
        usable = torch.cuda.is_available() and not _reasons_against("cuda")
        return with_index("cuda" if usable else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected cpu, cuda or cuda:<index>, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu, cuda or cuda:<index>, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        expected = f"one of the {count}" if count else "cpu, as PyTorch finds no"
        raise ValueError(f"--device: expected {expected} CUDA devices here, got {name!r}")
    reasons = _reasons_against(device.type)
    if reasons:
        raise ValueError(f"--device: {name} cannot run the ops: {'; '.join(reasons)}")
    return with_index(device)


def ranks_of_torchrun() -> tuple[int, int]:
    """Rank and world size under torchrun; (0, 1) without it."""
    if not torch.distributed.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def choose_device_of_rank(name: str | None) -> torch.device:
    """The device of this process of torchrun: its own GPU, or the CPU where there is none.

    Raises:
        ValueError: another device is named, the GPUs are too few, or the ops do not run on them.
    """
    there = torch.cuda.is_available()
    own = f"cuda:{os.environ['LOCAL_RANK']}" if there else "cpu"
    if name not in (None, "cuda" if there else "cpu"):
        raise ValueError(f"--device: expected none with torchrun, where each process has one of its own, got {name!r}")
    return choose_device(own)


def _reasons_against(kind: str) -> list[str]:
    kind = "rocm" if kind == "cuda" and torch.version.hip else kind
    needed = ("reshape_and_cache", "paged_attention", "copy_blocks", "swap_blocks")
    return [reason for op in needed for reason in supports(op, kind)]


def require_compiler(device: torch.device) -> None:
    """Raises an error of one line if there is no compiler; inductor's own has many lines."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError("no C++ compiler: install g++ or clang++, set CXX, or run with --eager") from None
