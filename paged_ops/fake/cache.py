"""Fakes of the cache ops, and the checks of a cache that all ops share. Letters as in :mod:`paged_ops.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_ops import checks
from paged_ops.checks import expect
from paged_ops.layouts import (
    FP8_DS_INDEX,
    FP8_DS_MLA,
    FP8_DTYPES,
    INDEX_COLUMNS,
    MODEL_DTYPES,
    ROW_LATENT,
    ROW_ROTATED,
    PagedKV,
    element_dtype,
    has_index_scales,
    has_row_scales,
    index_parts,
    is_latent,
    paged_kv,
)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    checks.tensor("key", key, (None, None, None), MODEL_DTYPES, names="[T', K, D]")
    checks.present("kv_cache", kv_cache)
    two_planes = "4 or 5 dimensions (a latent cache is written by latent_cache_write)"
    expect(not is_latent(kv_cache), "kv_cache", two_planes, kv_cache)
    paged = check_cache(kv_cache, value_cache, k_scale, v_scale, kv_cache_dtype, key.dtype)
    expect(kv_cache.device == key.device, "kv_cache", f"a tensor on {key.device}, the key's device", kv_cache)
    K, D, Dv = paged.num_kv_heads, paged.head_size, paged.value_head_size
    checks.tensor("key", key, (None, K, D), names="[T', K, D]")
    checks.tensor("value", value, (key.shape[0], K, Dv), key.dtype, key.device, "[T', K, Dv]")
    checks.tensor("slot_mapping", slot_mapping, (None,), (torch.int64, torch.int32), key.device, "[T]")
    for name, cache in (("kv_cache", kv_cache), ("value_cache", value_cache)):
        if cache is not None:
            checks.written(name, cache)
    rows = slot_mapping.shape[0] <= key.shape[0]
    expect(rows, "slot_mapping", f"at most the {key.shape[0]} rows of key", slot_mapping)


def latent_cache_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    checks.tensor("latent", latent, (None, None), MODEL_DTYPES, names="[T', R]")
    checks.tensor("rotated", rotated, (latent.shape[0], None), latent.dtype, latent.device, "[T', P]")
    checks.tensor("kv_cache", kv_cache, (None, None, None), names="[N, B, R + P]")
    index_scales = has_index_scales(kv_cache_dtype)
    if index_scales:
        index_parts(kv_cache)
        expect(k_scale is None, "k_scale", f"None, as blocks of {FP8_DS_INDEX} hold their scales", k_scale)
    else:
        check_cache(kv_cache, None, k_scale, None, kv_cache_dtype, latent.dtype)
    expect(kv_cache.device == latent.device, "kv_cache", f"a tensor on {latent.device}, the latent's device", kv_cache)
    R, P = latent.shape[1], rotated.shape[1]
    if has_row_scales(kv_cache_dtype) or index_scales:
        sizes = (INDEX_COLUMNS, 0) if index_scales else (ROW_LATENT, ROW_ROTATED)
        for name, part, size in zip(("latent", "rotated"), (latent, rotated), sizes, strict=True):
            expect(part.shape[1] == size, name, f"{size} columns with {kv_cache_dtype=}", part)
    else:
        expect(kv_cache.shape[2] == R + P, "kv_cache", f"R + P = {R} + {P} columns in [N, B, R + P]", kv_cache)
    checks.tensor("slot_mapping", slot_mapping, (None,), (torch.int64, torch.int32), latent.device, "[T]")
    checks.written("kv_cache", kv_cache)
    rows = slot_mapping.shape[0] <= latent.shape[0]
    expect(rows, "slot_mapping", f"at most the {latent.shape[0]} rows of latent", slot_mapping)


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    _check_caches("kv_caches", kv_caches, written=True)
    _check_mapping(block_mapping)
    if kv_caches:
        devices = (kv_caches[0].device, torch.device("cpu"))
        expect(block_mapping.device in devices, "block_mapping", f"a tensor on {devices[0]} or the CPU", block_mapping)


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    _check_caches("src_caches", src_caches)
    _check_caches("dst_caches", dst_caches, written=True)
    expect(
        len(dst_caches) == len(src_caches), "dst_caches", f"{len(src_caches)} caches, as src_caches", len(dst_caches)
    )
    for index, (src, dst) in enumerate(zip(src_caches, dst_caches, strict=True)):
        block = tuple(src.shape[1:])
        expect(
            tuple(dst.shape[1:]) == block, f"dst_caches[{index}]", f"blocks of shape {list(block)}, as the source", dst
        )
        expect(dst.dtype == src.dtype, f"dst_caches[{index}]", f"{src.dtype}, as the source", dst)
    _check_mapping(block_mapping)
    expect(block_mapping.device.type == "cpu", "block_mapping", "a tensor on the CPU", block_mapping)


def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    paged = check_cache(kv_cache, value_cache, k_scale, v_scale, kv_cache_dtype)
    checks.tensor("seq_lens", seq_lens, (None,), torch.int32, kv_cache.device, "[S]")
    checks.tensor("block_tables", block_tables, (seq_lens.shape[0], None), torch.int32, kv_cache.device, "[S, M]")
    expect(num_tokens >= 0, "num_tokens", "0 or more rows", num_tokens)
    stored = element_dtype(kv_cache, kv_cache_dtype)
    if dtype is None:
        expect(stored not in FP8_DTYPES, "dtype", "float32, float16 or bfloat16 (required for an fp8 cache)", dtype)
        dtype = stored
    expect(dtype in MODEL_DTYPES, "dtype", "float32, float16 or bfloat16", dtype)
    key, value = out or (None, None)
    K = paged.num_kv_heads
    return (
        result("key", key, kv_cache, (num_tokens, K, paged.head_size), dtype),
        result("value", value, kv_cache, (num_tokens, K, paged.value_head_size), dtype),
    )


def check_cache(
    kv_cache: Tensor,
    value_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    model_dtype: torch.dtype | None = None,
    value_head_size: int | None = None,
) -> PagedKV:
    """Check form, dtype and scales of a cache; ``model_dtype`` is the required dtype of a cache that is not fp8."""
    paged = paged_kv(kv_cache, value_cache, value_head_size, kv_cache_dtype)
    if has_row_scales(kv_cache_dtype):
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            expect(scale is None, name, f"None, as rows of {FP8_DS_MLA} hold their scales", scale)
    if is_latent(kv_cache):
        expect(v_scale is None, "v_scale", "None, as a latent cache has one scale, k_scale", v_scale)
    fp8 = element_dtype(kv_cache, kv_cache_dtype) in FP8_DTYPES
    if not fp8 and model_dtype is not None:
        expect(kv_cache.dtype == model_dtype, "kv_cache", f"the model's {model_dtype}, or fp8", kv_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            expect(fp8, name, f"None, as a {kv_cache.dtype} cache has no scales", scale)
            checks.tensor(name, scale, (None,), torch.float32, kv_cache.device, "[1] or [K]")
            sizes = (1, paged.num_kv_heads)
            expect(scale.shape[0] in sizes, name, f"shape [1] or [{paged.num_kv_heads}]", scale)
    return paged


def result(name: str, given: Tensor | None, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor to fill: the one passed to an .out overload, or else a new one on the device of ``like``."""
    if given is None:
        return like.new_empty(shape, dtype=dtype)
    checks.tensor(name, given, shape, dtype, like.device, str(list(shape)))
    expect(given.is_contiguous(), name, "a contiguous tensor", given)
    checks.written(name, given)
    return given


def _check_caches(argument: str, caches: Sequence[Tensor], written: bool = False) -> None:
    for index, cache in enumerate(caches):
        expect(cache.dim() >= 1, f"{argument}[{index}]", "blocks in dimension 0", cache)
        expect(cache.device == caches[0].device, f"{argument}[{index}]", f"a tensor on {caches[0].device}", cache)
        if written:
            checks.written(f"{argument}[{index}]", cache)


def _check_mapping(block_mapping: Tensor) -> None:
    checks.tensor("block_mapping", block_mapping, (None, 2), torch.int64, names="[P, 2]")
