"""Cache writes on the CPU as one C++ function, ``write.cpp``, where the cache has the dtype of the rows.

Torch ops serve fp8 caches, and all caches if there is no compiler. A write with the signature of an earlier one needs
one look-up and one call: see :mod:`paged_ops.lowerings.cpu.prepared`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged_ops import cpp
from paged_ops.layouts import PagedKV
from paged_ops.lowerings.cpu.prepared import MOST_PREPARED, extent, forms


class Plane(ctypes.Structure):
    """``Plane`` of ``write.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row", "row_head", "cell_block", "cell_token", "cell_head", "cell_run")),
        *((name, ctypes.c_int64) for name in ("heads", "runs", "run")),
    )


class Write(ctypes.Structure):
    """The argument of the C++ function: ``Write`` of ``write.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("slot_bytes", "T", "N", "B")),
        ("planes", Plane * 2),
    )


TENSORS = struct.Struct("=14q")  # Tensors of write.cpp
# By op and signature: a write without its tensors, and the numbers at the end of Tensors.
_prepared: dict[Any, tuple[Write, tuple[int, ...]]] = {}


def repeat(op: str, args: tuple[Any, ...], options: dict[str, Any], _: tuple[Any, ...] = ()) -> bool | None:
    """Write by a prepared write. None, with nothing written, if none was prepared, if a slot is out of range, or if a
    cache may share memory with another tensor. See :func:`paged_ops.registry._repeated`."""
    known = _prepared.get(_signature(op, args, options))
    function = compiled()
    if known is None or function is None:
        return None
    first, second, kv_cache, slots = args
    value_cache = options.get("value_cache")
    tensors = TENSORS.pack(
        first.data_ptr(),
        second.data_ptr(),
        kv_cache.data_ptr(),
        (kv_cache if value_cache is None else value_cache).data_ptr(),
        slots.data_ptr(),
        torch.get_num_threads(),
        *known[1],
    )
    return None if function(known[0], tensors) else True


def _signature(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """As :func:`paged_ops.lowerings.cpu.prepared.signature`."""
    a, b, c, d = args
    try:
        # fmt: off
        key = (
            op, a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(),
            c.dtype, c.shape, c.stride(), d.dtype, d.shape, d.stride(),
        )
        # fmt: on
    except AttributeError:  # None in place of a tensor: the checks refuse it
        return ()
    return key + forms(options) if options else key


def first(op: str, args: tuple[Any, ...], options: dict[str, Any], cells: PagedKV) -> bool:
    """Prepare and run a write that passed the static checks, of rows ``[T, K, D]`` or ``[T, D]`` into ``cells``, views
    of the caches. False, with nothing written, if the C++ function does not serve it or a slot is out of range."""
    rows, kv_cache, slots = args[:2], args[2], args[3]
    values = kv_cache if options.get("value_cache") is None else options["value_cache"]
    same = all(part.dtype == plane.dtype and part.stride(-1) == 1 for part, plane in zip(rows, cells, strict=True))
    if not (same and slots.is_contiguous() and cells.key.numel() and compiled() is not None):
        return False
    size, (N, B) = cells.key.element_size(), cells.key.shape[:2]
    planes = []
    for part, plane in zip(rows, cells, strict=True):
        packed = plane if plane.dim() == 5 else plane[..., None] if plane.stride(-1) != 1 else plane[:, :, :, None]
        strides = (part.stride(0), part.stride(1) if part.dim() == 3 else 0, *packed.stride()[:4])
        heads, runs, run = packed.shape[2:]
        if run > 1 and packed.stride(4) != 1:
            return False
        planes.append(Plane(*(size * each for each in strides), heads, runs, size * run))
    write = Write(slots.element_size(), len(slots), N, B, (Plane * 2)(*planes))
    where = cells.key.data_ptr() - kv_cache.data_ptr(), cells.value.data_ptr() - values.data_ptr()
    constants = *map(extent, (*rows, kv_cache, values, slots)), *where, values.data_ptr() - kv_cache.data_ptr()
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[_signature(op, args, options)] = write, constants
    return repeat(op, args, options) is not None


@functools.cache
def compiled() -> Callable[..., int] | None:
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
    more=(ctypes.c_char_p,),
)
