"""Cache writes on the CPU as one C++ function, ``write.cpp``, where the cache has the dtype of the rows.

Torch ops serve fp8 caches, and all caches if there is no compiler. A write with the signature of an earlier one needs
one look-up and one call: see :mod:`paged_ops.lowerings.cpu.prepared`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops import cpp
from paged_ops.layouts import PagedKV
from paged_ops.lowerings.cpu.prepared import MOST_PREPARED, signature


class Plane(ctypes.Structure):
    """``Plane`` of ``write.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "cells")),
        *((name, ctypes.c_int64) for name in ("row", "row_head", "cell_block", "cell_token", "cell_head", "cell_run")),
        *((name, ctypes.c_int64) for name in ("heads", "runs", "run")),
    )


class Write(ctypes.Structure):
    """The argument of the C++ function: ``Write`` of ``write.cpp``."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot_bytes", "T", "N", "B", "num_planes", "threads")),
        ("planes", Plane * 2),
    )


# By signature: a write without its addresses, and the byte offset of the first cell in each cache.
_prepared: dict[Any, tuple[Write, tuple[int, ...]]] = {}


def run(op: str, rows: Sequence[Tensor], caches: Sequence[Tensor], slots: Tensor, options: dict[str, Any]) -> bool:
    """Write by a prepared write. False, with nothing written, if none was prepared or a slot is out of range."""
    known = _prepared.get(signature((op, *rows, *caches, slots), options))
    function = compiled()
    if known is None or function is None:
        return False
    write, offsets = Write.from_buffer_copy(known[0]), known[1]
    for plane, part, cache, offset in zip(write.planes, rows, caches, offsets, strict=True):
        plane.rows, plane.cells = part.data_ptr(), cache.data_ptr() + offset
    write.slots, write.threads = slots.data_ptr(), torch.get_num_threads()
    return function(ctypes.byref(write)) == 0


def prepare(
    op: str,
    rows: Sequence[Tensor],
    caches: Sequence[Tensor],
    cells: PagedKV,
    slots: Tensor,
    options: dict[str, Any],
) -> bool:
    """Prepare writes of ``rows [T, K, D]`` or ``[T, D]`` into ``cells``, views of ``caches``. False if the C++ function
    does not serve them."""
    same = all(part.dtype == plane.dtype and part.stride(-1) == 1 for part, plane in zip(rows, cells, strict=True))
    if not (same and slots.is_contiguous() and cells.key.numel() and compiled() is not None):
        return False
    size, (N, B) = cells.key.element_size(), cells.key.shape[:2]
    planes, offsets = [], []
    for part, plane, cache in zip(rows, cells, caches, strict=True):
        packed = plane if plane.dim() == 5 else plane[..., None] if plane.stride(-1) != 1 else plane[:, :, :, None]
        strides = (part.stride(0), part.stride(1) if part.dim() == 3 else 0, *packed.stride()[:4])
        heads, runs, run = packed.shape[2:]
        if run > 1 and packed.stride(4) != 1:
            return False
        planes.append(Plane(None, None, *(size * each for each in strides), heads, runs, size * run))
        offsets.append(plane.data_ptr() - cache.data_ptr())
    write = Write(None, slots.element_size(), len(slots), N, B, len(planes), 1, (Plane * 2)(*planes))
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[signature((op, *rows, *caches, slots), options)] = write, tuple(offsets)
    return True


@functools.cache
def compiled() -> Callable[[Any], int] | None:
    """The C++ function, or None if no compiler can build it."""
    return cpp.built(WRITE)


WRITE = cpp.Source(
    Path(__file__).with_suffix(".cpp"),
    "write_rows",
    Write,
    ctypes.c_int64,
    "write",
    "the cache write on the CPU",
    ("-fopenmp",),
)
