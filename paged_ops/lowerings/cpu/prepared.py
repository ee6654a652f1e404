"""Prepared attention calls: a call with the shapes, strides, dtypes and features of an earlier one needs one look-up
and one call of the C++ function, which checks the values of the batch. Where the C++ function does not serve them,
prompts of one length need one look-up and few torch ops.

The checks in Python take 0.1 ms, longer than the C++ function needs for a short sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paged_ops import masks
from paged_ops.features import SMALLEST, Features, in_use, with_value_scale
from paged_ops.layouts import PagedKV, element_dtype, paged_kv
from paged_ops.lowerings.cpu import fused, processor

# The arguments that PyTorch's flash kernel supports, or that are applied outside of it.
FLASH = (masks.NAMES - {"block_sparse"}) | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale", "kv_cache_dtype", "sinks"),
}
# If only the flash kernel uses the matrix unit (AMX) for bfloat16, it serves sequences of more than MATRIX_ROWS rows.
MATRIX_ROWS = 32
# Bytes of keys in float32, and of values, that prompts gather at once.
PROMPT_BYTES = 1 << 24
_prepared: dict[Any, Prepared | Prompts] = {}  # by signature
MOST_PREPARED = 1024
_ONE, _TWO = (None,), (None, None)  # results that are not given
# Features that are tensors of numbers, one per head, or of ranges.
VECTORS = ("k_scale", "v_scale", "alibi_slopes", "sinks", "bidirectional_ranges")


def signature(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that the static checks of a call depend on: shapes, strides, dtypes and numbers. All tensors are on
    the CPU: else the dispatcher would call another lowering. Written out, as a loop takes longer."""
    a, b, c, d, e, scale = args
    try:
        # fmt: off
        key = (
            a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), c.dtype, c.shape, c.stride(),
            d.dtype, d.shape, d.stride(), e.dtype, e.shape, e.stride(), scale,
        )
        # fmt: on
    except AttributeError:  # None in place of a tensor: the checks refuse it
        return ()
    return key + forms(keywords) if keywords else key


def forms(keywords: dict[str, Any]) -> tuple[Any, ...]:
    """What the static checks depend on, of arguments with names."""
    return *keywords, *map(_form, keywords.values())


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    return tuple(value) if isinstance(value, list) else value


def repeat(args: tuple[Any, ...], features: dict[str, Any], results: tuple[Tensor, ...]) -> Tensor | None:
    """The result of a call whose signature was prepared; None if it was not, if a value of the batch is invalid, or if
    the given result may share memory with another tensor. See :func:`paged_ops.registry._repeated`."""
    known = _prepared.get(signature(args, features))
    done = None if known is None else known.attend(args, features, results or _ONE)
    return None if done is None else done[0]


def repeat_with_lse(
    args: tuple[Any, ...], features: dict[str, Any], results: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    """:func:`repeat` with lse."""
    known = _prepared.get(signature(args, features))
    return None if known is None else known.attend(args, features, results or _TWO)


def first(
    query: Tensor, args: tuple[Any, ...], features: dict[str, Any], *results: Tensor
) -> tuple[Tensor, ...] | None:
    """Prepare and run a call that passed the static checks. None if neither class below serves the whole call, or if a
    value of the batch is invalid."""
    kv_cache, _, seq_lens, query_start_loc, _ = args
    f = with_value_scale(Features(**features), kv_cache)
    paged, stored = (
        paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype),
        element_dtype(kv_cache, f.kv_cache_dtype),
    )
    plain = query.stride(2) == 1 and seq_lens.is_contiguous() and query_start_loc.is_contiguous()
    if not (plain and f.output_scale is None and query.numel() and paged.key.numel()):
        return None
    flash = in_use(f) <= FLASH and paged.head_size == paged.value_head_size
    known: Prepared | Prompts
    if fused.serves(stored, f) and not (flash_serves_long(flash, query.dtype) and len(query) > MATRIX_ROWS):
        known = Prepared(query, paged, stored, args, f)
    elif Prompts.serves(query, paged, stored, args, f):
        known = Prompts(query, paged, len(seq_lens))
    else:
        return None
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[signature((query, *args), features)] = known
    if isinstance(known, Prepared):
        return known.attend((query, *args), features, results)
    made = known.attend((query, *args), features, (None,) * len(results))
    if made is None:
        return None
    for result, each in zip(results, made, strict=True):
        result.copy_(each)
    return results


def flash_serves_long(flash: bool, dtype: torch.dtype) -> bool:
    """Whether the flash kernel serves sequences of more than MATRIX_ROWS rows, because it uses the matrix unit and the
    C++ function does not. ``flash``: it supports the call."""
    return flash and dtype == torch.bfloat16 and not fused.has_matrix_unit() and processor.has_matrix_unit()


class Prepared:
    """A checked call without its addresses and values. The C++ function checks the values of each batch."""

    __slots__ = ("_K", "_alike", "_call", "_constants", "_vectors", "out_shape")

    def __init__(self, query: Tensor, paged: PagedKV, stored: torch.dtype, args: tuple[Any, ...], f: Features) -> None:
        kv_cache, block_tables, seq_lens, query_start_loc, scale = args
        values = kv_cache if f.value_cache is None else f.value_cache
        self._call = fused.described(query, paged, stored, block_tables, len(seq_lens), scale, f, query.dtype)
        self._K, self.out_shape = paged.num_kv_heads, (*query.shape[:2], paged.value_head_size)
        self._alike = query.shape == self.out_shape and query.is_contiguous()
        self._vectors = [name for name in VECTORS if getattr(f, name) is not None]
        inputs = query, kv_cache, values, block_tables, seq_lens, query_start_loc
        where = paged.key.data_ptr() - kv_cache.data_ptr(), paged.value.data_ptr() - values.data_ptr()
        self._constants = *map(extent, inputs), *where

    def attend(
        self, args: tuple[Any, ...], features: dict[str, Any], results: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """Fill the results. None if a value of the batch is invalid, or if a given result may share memory with another
        tensor; then nothing was written."""
        query, kv_cache, block_tables, seq_lens, query_start_loc, _ = args
        value_cache = features.get("value_cache")
        out, lse = results if len(results) == 2 else (results[0], None)
        if out is None:  # empty_like is faster
            out = torch.empty_like(query) if self._alike else query.new_empty(self.out_shape)
        elif not (out.shape == self.out_shape and out.dtype == query.dtype and out.is_contiguous()):
            return None
        if len(results) == 2:
            shape = self.out_shape[:2]
            if lse is None:
                lse = query.new_empty(shape, dtype=torch.float32)
            elif not (lse.shape == shape and lse.dtype == torch.float32 and lse.is_contiguous()):
                return None
        call = self._call
        if self._vectors:
            if any(each is not None and self._overlap(each, features) for each in results):
                return None
            call = fused.Call.from_buffer_copy(call)
            vectors = fused.vectors_of(with_value_scale(Features(**features), kv_cache), self._K)
            for name, vector in vectors.items():  # kept alive until the call returns
                setattr(call, name, vector.data_ptr())
        tensors = fused.TENSORS.pack(
            query.data_ptr(),
            kv_cache.data_ptr(),
            (kv_cache if value_cache is None else value_cache).data_ptr(),
            block_tables.data_ptr(),
            seq_lens.data_ptr(),
            query_start_loc.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            torch.get_num_threads(),
            *self._constants,
        )
        function = fused.compiled()
        if function is None or function(call, tensors):
            return None
        return (out,) if lse is None else (out, lse)

    def _overlap(self, result: Tensor, features: dict[str, Any]) -> bool:
        """Whether the elements of a result may share memory with a vector."""
        start = result.data_ptr()
        end = start + extent(result)
        vectors = [features[name] for name in self._vectors if features.get(name) is not None]
        return any(start < each.data_ptr() + extent(each) and each.data_ptr() < end for each in vectors)


class Prompts:
    """A checked call whose sequences are prompts of one length without earlier keys: PyTorch's flash kernel attends to
    all of them at once. For calls that the C++ function does not serve."""

    __slots__ = ("_blocks", "_compiled", "_lens", "_rows", "_starts")

    @staticmethod
    def serves(query: Tensor, paged: PagedKV, stored: torch.dtype, args: tuple[Any, ...], f: Features) -> bool:
        """Whether a batch of these shapes may be such prompts, and neither formats nor features need other ops."""
        _, block_tables, seq_lens, _, scale = args
        (T, _, D), S, (_, B, K, _, x) = query.shape, len(seq_lens), paged.key.shape
        n = T // max(S, 1)
        fits = 0 < n * S == T and n <= block_tables.shape[1] * B and T * K * D * 4 <= PROMPT_BYTES
        whole = x == D == paged.value_head_size and paged.key.stride(4) == paged.value.stride(3) == 1
        alike = query.dtype == stored and stored in (torch.bfloat16, torch.float32)
        plain = in_use(f) <= {"value_cache", "sliding_window", "attention_chunk"} and scale >= SMALLEST
        return fits and whole and alike and plain and not masks.oldest_key(n - 1, f.sliding_window, f.attention_chunk)

    def __init__(self, query: Tensor, paged: PagedKV, S: int) -> None:
        n, B, width = len(query) // S, paged.block_size, math.prod(paged.key.shape[2:])
        self._lens, self._starts, self._blocks = [n] * S, [*range(0, n * S + 1, n)], -(-n // B)
        self._rows = 2, S * self._blocks, B, width + 64 // query.element_size()  # as in attention._Plane
        self._compiled = fused.compiled()

    def attend(
        self, args: tuple[Any, ...], features: dict[str, Any], results: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """New results. None if these are other sequences, a value of the batch is invalid, or results are given:
        whether they share memory with another tensor must be checked."""
        query, kv_cache, block_tables, seq_lens, query_start_loc, scale = args
        if results[0] is not None or fused.compiled() is not self._compiled:
            return None
        if seq_lens.tolist() != self._lens or query_start_loc.tolist() != self._starts:
            return None
        if query.dtype == torch.float32 != processor.matmul_dtype():
            return None
        paged, S, n = paged_kv(kv_cache, features.get("value_cache")), len(self._lens), self._lens[0]
        (_, H, D), K, blocks = query.shape, paged.num_kv_heads, block_tables[:, : self._blocks].flatten()
        rows = query.new_empty(self._rows)[..., : K * D].unflatten(3, (K, D))
        try:
            for plane, to in zip((paged.key.squeeze(3), paged.value), rows, strict=True):
                torch.index_select(plane, 0, blocks, out=to)
        except IndexError:
            return None
        k, v = rows.view(2, S, -1, K, D)[:, :, :n].transpose(2, 3)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query.view(S, n, H, D).transpose(1, 2), k, v, is_causal=True, scale=scale)
        if not math.isfinite(out[:, :, -1].sum()):  # perhaps from keys or values that a row does not see
            return None
        out = out.transpose(1, 2).reshape(query.shape)
        return (out,) if len(results) == 1 else (out, lse.transpose(1, 2).flatten(0, 1).float().contiguous())


def extent(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
