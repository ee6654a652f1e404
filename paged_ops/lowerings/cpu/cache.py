"""The cache ops on the CPU. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake
from paged_ops.features import CacheOptions, refuse_others
from paged_ops.fp8 import dequantise_rows, quantise, quantise_index, quantise_rows
from paged_ops.layouts import (
    FP8_DS_INDEX,
    FP8_DS_MLA,
    FP8_DTYPES,
    PagedKV,
    element_dtype,
    has_index_scales,
    has_row_scales,
    index_parts,
    paged_kv,
)
from paged_ops.lowerings.cpu import write

# Supported formats of the cache: values of kv_cache_dtype, and dtypes of elements.
FORMATS = frozenset(
    {
        *("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
        *("float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
APPLIES = FORMATS | {"value_cache", "k_scale", "v_scale"}  # the supported arguments of the cache ops, and formats
INDEX_FORMATS = (FORMATS - {FP8_DS_MLA}) | {FP8_DS_INDEX}  # of a cache of index keys
# The bytes of the buffer for copies between blocks.
COPY_BYTES = 1 << 24


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, **options: Any) -> None:
    fake.reshape_and_cache(key, value, kv_cache, slot_mapping, **options)
    given = CacheOptions(**options)
    refuse_others(given, kv_cache, APPLIES, "the CPU")
    stored = element_dtype(kv_cache, given.kv_cache_dtype)
    paged = bytes_of_fp8(paged_kv(kv_cache, given.value_cache))
    if kv_cache.numel():
        if write.first("reshape_and_cache", (key, value, kv_cache, slot_mapping), options, paged):
            return
        planes = ((paged.key, key, given.k_scale), (paged.value, value, given.v_scale))
        _write([(plane, _in_fp8(real, scale, stored)) for plane, real, scale in planes], slot_mapping)


def latent_cache_write(latent: Tensor, rotated: Tensor, kv_cache: Tensor, slot_mapping: Tensor, **options: Any) -> None:
    fake.latent_cache_write(latent, rotated, kv_cache, slot_mapping, **options)
    given = CacheOptions(**options)
    refuse_others(given, kv_cache, APPLIES | INDEX_FORMATS, "the CPU")
    stored = element_dtype(kv_cache, given.kv_cache_dtype)
    if not kv_cache.numel():
        return
    if has_index_scales(given.kv_cache_dtype):
        keys, scales = index_parts(kv_cache)
        keys_of = (storage(keys), lambda rows: quantise_index(latent[rows])[0])
        scales_of = (scales, lambda rows: quantise_index(latent[rows])[1])
        _write([keys_of, scales_of], slot_mapping)
        return
    if has_row_scales(given.kv_cache_dtype):
        _write([(kv_cache, lambda rows: quantise_rows(latent[rows], rotated[rows]))], slot_mapping)
        return
    cells, R = storage(kv_cache)[:, :, None], latent.shape[1]  # [N, B, 1, R + P]
    parts = ((cells[..., :R], latent), (cells[..., R:], rotated))
    views = PagedKV(*(each for each, _ in parts))
    if write.first("latent_cache_write", (latent, rotated, kv_cache, slot_mapping), options, views):
        return
    _write([(plane, _in_fp8(real[:, None], given.k_scale, stored)) for plane, real in parts], slot_mapping)


reshape_and_cache.repeat = functools.partial(write.repeat, "reshape_and_cache")  # type: ignore[attr-defined]
latent_cache_write.repeat = functools.partial(write.repeat, "latent_cache_write")  # type: ignore[attr-defined]


def _in_fp8(real: Tensor, scale: Tensor | None, stored: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function from row indices to those rows of ``real [T', K, D]``, as the cache stores them."""
    return lambda rows: quantise(real[rows], scale, stored)


def _write(planes: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], slot_mapping: Tensor) -> None:
    """Write rows into planes ``[N, B, ...]`` of a cache; each plane comes with a function from row indices to cells."""
    N, B = planes[0][0].shape[:2]
    slot_mapping = slot_mapping.clone()  # so that another thread cannot change it between check and use
    checks.slots(slot_mapping, N * B)
    # If rows share a slot, only the last one is written: parallel writes would mix them.
    row_of = {slot: row for row, slot in enumerate(slot_mapping.tolist()) if slot >= 0}
    rows, slots = (torch.tensor([*each], dtype=torch.int64, device="cpu") for each in (row_of.values(), row_of))
    block, offset = slots // B, slots % B
    for plane, made in planes:
        plane[block, offset] = made(rows).contiguous().view(plane.dtype).view(len(rows), *plane.shape[2:])


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.copy_blocks(kv_caches, block_mapping)
    caches, block_mapping = [cache for cache in kv_caches if cache.numel()], block_mapping.clone()
    for cache in caches:
        checks.block_mapping(block_mapping, len(cache), len(cache), same_cache=True)
    for cache in caches:
        _copy_blocks(cache, cache, block_mapping)


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.swap_blocks(src_caches, dst_caches, block_mapping)
    pairs = [(src, dst) for src, dst in zip(src_caches, dst_caches, strict=True) if src.numel() and dst.numel()]
    block_mapping = block_mapping.clone()
    for src, dst in pairs:
        same = src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr() and src.data_ptr() == dst.data_ptr()
        checks.block_mapping(block_mapping, len(src), len(dst), same_cache=same)
    for src, dst in pairs:
        _copy_blocks(src, dst, block_mapping)


def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    key, value = fake.gather_kv(kv_cache, block_tables, seq_lens, num_tokens, dtype=dtype, out=out, **options)
    given = CacheOptions(**options)
    refuse_others(given, kv_cache, APPLIES, "the CPU")
    stored = element_dtype(kv_cache, given.kv_cache_dtype)
    row_scales = has_row_scales(given.kv_cache_dtype)
    paged = bytes_of_fp8(paged_kv(kv_cache, given.value_cache, None, given.kv_cache_dtype))
    B, row = paged.block_size, 0
    if kv_cache.numel():
        seq_lens = seq_lens.clone()  # so that another thread cannot change it between check and use
        checks.lengths("seq_lens", seq_lens, block_tables.shape[1], B)
        ns = seq_lens.tolist()
        block_tables = block_tables.narrow(1, 0, -(-max(ns, default=0) // B)).clone()
        checks.needed_blocks(block_tables, seq_lens, paged.num_blocks, B)
        for s, n in enumerate(ns):
            n = min(n, num_tokens - row)
            blocks = block_tables[s, : -(-n // B)]
            if row_scales:
                key[row : row + n, 0] = dequantise_rows(kv_cache.index_select(0, blocks).flatten(0, 1)[:n], key.dtype)
                row += n
                continue
            for result, plane, scale in ((key, paged.key, given.k_scale), (value, paged.value, given.v_scale)):
                tokens = real_of(plane.index_select(0, blocks), stored).flatten(0, 1).flatten(2)[:n]
                result[row : row + n] = tokens if scale is None else tokens * scale[:, None]
            row += n
    key[row:], value[row:] = 0, 0
    return key, value


def _copy_blocks(src: Tensor, dst: Tensor, mapping: Tensor) -> None:
    src, dst = storage(src), storage(dst)
    block_bytes = src[0].numel() * src.element_size()
    for pairs in mapping.split(max(1, COPY_BYTES // block_bytes)):
        dst.index_copy_(0, pairs[:, 1], src.index_select(0, pairs[:, 0]))


def real_of(cells: Tensor, stored: torch.dtype) -> Tensor:
    """The values of cells before scaling; fp8 bytes are converted to float32."""
    if stored not in FP8_DTYPES:
        return cells
    # A lookup table: PyTorch converts float8_e4m3fn one element at a time.
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(stored).float()
    return table.index_select(0, cells.flatten().int()).view(cells.shape)


def storage(cache: Tensor) -> Tensor:
    """An fp8 cache as bytes: torch indexes few float8 dtypes."""
    return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache


def bytes_of_fp8(paged: PagedKV) -> PagedKV:
    return PagedKV(storage(paged.key), storage(paged.value))


def take(cache: Tensor, blocks: Tensor, out: Tensor) -> Tensor:
    """``cache[blocks]`` into out; of a cache that packs 16 bytes of a key, 16 bytes at a time if addresses allow it."""
    wide_cache, wide_out, itemsize = cache, out, cache.element_size()
    if cache.shape[-1] * itemsize == 16 and cache.stride(-1) == out.stride(-1) == 1:
        steps = ((each.storage_offset(), *each.stride()[:-1]) for each in (cache, out))
        if math.gcd(*itertools.chain(*steps)) * itemsize % 16 == 0:
            wide_cache, wide_out = cache.view(torch.complex128), out.view(torch.complex128)
    torch.index_select(wide_cache, 0, blocks, out=wide_out)
    return out
