"""Prepared attention calls: a call with the shapes, strides, dtypes and features of an earlier one needs one look-up
and one call of the C++ function, which checks the values of the batch.

The checks in Python take 0.1 ms, longer than the C++ function needs for a short sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paged_ops import masks
from paged_ops.features import Features, in_use, with_value_scale
from paged_ops.layouts import PagedKV, element_dtype, paged_kv
from paged_ops.lowerings.cpu import fused, processor

# The arguments that PyTorch's flash kernel supports, or that are applied outside of it.
FLASH = (masks.NAMES - {"block_sparse"}) | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale", "kv_cache_dtype", "sinks"),
}
# If only the flash kernel uses the matrix unit (AMX) for bfloat16, it serves sequences of more than MATRIX_ROWS rows.
MATRIX_ROWS = 32
_prepared: dict[Any, Prepared] = {}  # by signature
MOST_PREPARED = 1024


def signature(args: Iterable[Any], keywords: dict[str, Any]) -> Any:
    """Everything that the static checks of a call depend on: shapes, strides, dtypes, devices and numbers."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape, value.stride(), value.device
        return tuple(value) if isinstance(value, list) else value

    return *map(of, args), *((name, of(value)) for name, value in keywords.items())


def run(
    query: Tensor, args: tuple[Any, ...], features: dict[str, Any], out: Tensor | None, *lse: Tensor | None
) -> tuple[Tensor, ...] | None:
    """The results of a call whose signature was prepared; None if it was not, or if a value of the batch is invalid.

    ``out``, and ``lse`` if it is wanted: the given tensor, or None for a new one."""
    known = _prepared.get(signature((query, *args), features))
    if known is None:
        return None
    results: list[Tensor] = []
    kinds = ((known.out_shape, query.dtype), (known.out_shape[:2], torch.float32))
    for given, (shape, dtype) in zip((out, *lse), kinds, strict=False):
        if given is None:
            given = query.new_empty(shape, dtype=dtype)
        elif not (given.shape == shape and given.dtype == dtype and given.is_contiguous()):
            return None
        results.append(given)
    kv_cache, *batch, _scale = args
    caches = kv_cache, kv_cache if features.get("value_cache") is None else features["value_cache"]
    return tuple(results) if known.attend(query, caches, tuple(batch), features, *results) else None


def first(
    query: Tensor, args: tuple[Any, ...], features: dict[str, Any], out: Tensor | None, *lse: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Prepare and run a call that passed the static checks. None if the C++ function does not serve the whole call, or
    if a value of the batch is invalid."""
    kv_cache, block_tables, seq_lens, query_start_loc, scale = args
    f = with_value_scale(Features(**features), kv_cache)
    paged, stored = (
        paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype),
        element_dtype(kv_cache, f.kv_cache_dtype),
    )
    plain = query.stride(2) == 1 and seq_lens.is_contiguous() and query_start_loc.is_contiguous()
    if not (plain and f.output_scale is None and query.numel() and paged.key.numel() and fused.serves(stored, f)):
        return None
    flash = in_use(f) <= FLASH and paged.head_size == paged.value_head_size
    if flash_serves_long(flash, query.dtype) and len(query) > MATRIX_ROWS:
        return None
    values = kv_cache if f.value_cache is None else f.value_cache
    where = paged.key.data_ptr() - kv_cache.data_ptr(), paged.value.data_ptr() - values.data_ptr()
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    call = Prepared(query, paged, stored, block_tables, len(seq_lens), scale, f, where)
    _prepared[signature((query, *args), features)] = call
    return run(query, args, features, out, *lse)


def flash_serves_long(flash: bool, dtype: torch.dtype) -> bool:
    """Whether the flash kernel serves sequences of more than MATRIX_ROWS rows, because it uses the matrix unit and the
    C++ function does not. ``flash``: it supports the call."""
    return flash and dtype == torch.bfloat16 and not fused.has_matrix_unit() and processor.has_matrix_unit()


class Prepared:
    """A checked call without its addresses and values. The C++ function checks the values of each batch.

    ``where``: the bytes from the start of the key tensor to the first key, and of the value tensor to the first value.
    """

    __slots__ = ("_K", "_call", "_has_vectors", "_where", "out_shape")

    def __init__(
        self,
        query: Tensor,
        paged: PagedKV,
        stored: torch.dtype,
        block_tables: Tensor,
        S: int,
        scale: float,
        f: Features,
        where: tuple[int, int],
    ) -> None:
        self._call = fused.described(query, paged, stored, block_tables, S, scale, f, query.dtype)
        self._K, self._where = paged.num_kv_heads, where
        self._has_vectors = bool(fused.vectors_of(f, self._K))
        self.out_shape = (*query.shape[:2], paged.value_head_size)

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: tuple[Tensor, Tensor, Tensor],
        features: dict[str, Any],
        out: Tensor,
        lse: Tensor | None = None,
    ) -> bool:
        """Fill out, and lse if it is given. False if a value of the batch is invalid; then nothing was written."""
        call = fused.Call.from_buffer_copy(self._call)
        call.query, call.out, call.lse = query.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
        key, value = caches
        call.key, call.value = key.data_ptr() + self._where[0], value.data_ptr() + self._where[1]
        call.block_tables, call.seq_lens, call.query_start_loc = (each.data_ptr() for each in batch)
        call.threads = torch.get_num_threads()
        if self._has_vectors:
            f = with_value_scale(Features(**features), key)
            vectors = fused.vectors_of(f, self._K)  # kept alive until the call returns
            for name, vector in vectors.items():
                setattr(call, name, vector.data_ptr())
        function = fused.compiled()
        return function is not None and function(ctypes.byref(call)) == 0
