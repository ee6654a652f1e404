"""Gathering from the cache on GPUs: a streaming kernel with the addresses, tiles and letters of cache.py, and one for
latent rows with scales."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake
from paged_ops.features import CacheOptions, refuse_others
from paged_ops.layouts import element_dtype, has_row_scales, paged_kv
from paged_ops.lowerings.gpu.cache import (
    APPLIES,
    by_head,
    constants,
    dense_address,
    form_of,
    load_scales,
    paged_address,
    together,
)
from paged_ops.lowerings.gpu.fp8 import E4M3FN, decode_fp8, stored_format
from paged_ops.lowerings.gpu.scaled_rows import (
    GROUPS,
    LATENT,
    ROTATED,
    TOKENS,
    rotated_columns,
    scales_of,
    times_scales,
)
from paged_ops.lowerings.gpu.target import FUSED, Target, on_device, settled, target_of


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
    key, value = fake.gather_kv(
        kv_cache,
        block_tables,
        seq_lens,
        num_tokens,
        value_cache=value_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        out=out,
    )
    refuse_others(CacheOptions(value_cache, k_scale, v_scale, kv_cache_dtype), kv_cache, APPLIES, "a GPU")
    S = seq_lens.shape[0]
    if not (S and block_tables.shape[1] and kv_cache.numel()):
        return key.zero_(), value.zero_()
    target = target_of(kv_cache.device)
    paged = paged_kv(kv_cache, value_cache, None, kv_cache_dtype)
    FORMAT = stored_format(element_dtype(kv_cache, kv_cache_dtype), kv_cache.dtype, target)
    if checks.debug_checks():
        checks.needed_blocks(block_tables, seq_lens, paged.num_blocks, paged.block_size)
    if not num_tokens:
        return key, value
    if has_row_scales(kv_cache_dtype):
        _gather_rows(key, kv_cache, block_tables, seq_lens, num_tokens, target)
        return key, value
    with on_device(target.device):
        plan = constants(target, "gather_kv", "elements", *form_of(paged, kv_cache, value_cache, key, value))
        if FORMAT:
            kv_cache = kv_cache.view(torch.uint8)
            value_cache = value_cache if value_cache is None else value_cache.view(torch.uint8)
        settled(gather_kernel)
        gather_kernel[(triton.cdiv(num_tokens, plan["BLOCK_T"]),)](
            key,
            value,
            kv_cache,
            kv_cache if value_cache is None else value_cache,
            block_tables,
            block_tables.stride(0),
            block_tables.stride(1),
            seq_lens.cumsum(0, dtype=torch.int64),
            S,
            together(k_scale),
            together(v_scale),
            num_tokens,
            FORMAT=FORMAT,
            K_SCALES=0 if k_scale is None else k_scale.shape[0],
            V_SCALES=0 if v_scale is None else v_scale.shape[0],
            STEPS=_steps(S),
            **plan,
            **FUSED,
        )
    return key, value


def _steps(S: int) -> int:
    """Steps of a binary search among S sequences, rounded up, so that few kernels are compiled."""
    return -(-S.bit_length() // 8) * 8


def _gather_rows(
    key: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, num_tokens: int, target: Target
) -> None:
    """Fill ``key [num_tokens, 1, 576]`` from rows with scales."""
    S = seq_lens.shape[0]
    with on_device(target.device):
        settled(gather_rows_kernel)
        gather_rows_kernel[(triton.cdiv(num_tokens, TOKENS),)](
            key,
            kv_cache,
            block_tables,
            block_tables.stride(0),
            block_tables.stride(1),
            seq_lens.cumsum(0, dtype=torch.int64),
            S,
            num_tokens,
            B=kv_cache.shape[1],
            CACHE=kv_cache.stride()[:2],
            STEPS=_steps(S),
            BLOCK_T=TOKENS,
            num_warps=TOKENS,
            **target.overlap(),
            **FUSED,
        )


@triton.jit(do_not_specialize=["stride_s", "S", "num_tokens"], do_not_specialize_on_alignment=["block_tables"])
def gather_kernel(
    key,
    value,
    key_cache,
    value_cache,
    block_tables,
    stride_s,
    stride_m,
    ends,  # [S] running total of seq_lens
    S,
    k_scale,
    v_scale,
    num_tokens,
    B: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < num_tokens
    live, block, offset = place_of(t, inside, ends, S, block_tables, stride_s, stride_m, B, STEPS)
    for first in range(0, KEY.C if KEY.C > VALUE.C else VALUE.C, BLOCK_C):
        k_address, k_mask = dense_address(key, t, inside, first, KEY, BLOCK_C)
        v_address, v_mask = dense_address(value, t, inside, first, VALUE, BLOCK_C)
        k_stored = paged_address(key_cache, block, offset, first, KEY, BLOCK_C)
        v_stored = paged_address(value_cache, block, offset, first, VALUE, BLOCK_C)
        k = tl.load(k_stored, mask=k_mask & live[:, None], other=0)
        v = tl.load(v_stored, mask=v_mask & live[:, None], other=0)
        if FORMAT != 0:
            k = from_fp8(k, k_scale, first, KEY, K_SCALES, FORMAT)
            v = from_fp8(v, v_scale, first, VALUE, V_SCALES, FORMAT)
        tl.store(k_address, k.to(key.dtype.element_ty), mask=k_mask)
        tl.store(v_address, v.to(value.dtype.element_ty), mask=v_mask)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting


@triton.jit(do_not_specialize=["stride_s", "S", "num_tokens"], do_not_specialize_on_alignment=["block_tables"])
def gather_rows_kernel(
    key,  # [num_tokens, 1, 576]
    cache,
    block_tables,
    stride_s,
    stride_m,
    ends,  # [S] running total of seq_lens
    S,
    num_tokens,
    B: tl.constexpr,
    CACHE: tl.constexpr,  # strides n, b in bytes
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < num_tokens
    live, block, offset = place_of(t, inside, ends, S, block_tables, stride_s, stride_m, B, STEPS)
    row = cache + block * CACHE[0] + offset * CACHE[1]
    column, group, turned = tl.arange(0, LATENT), tl.arange(0, GROUPS), tl.arange(0, ROTATED)
    bits = tl.load(row[:, None] + column[None, :], mask=live[:, None], other=0)
    scales = tl.load(scales_of(row)[:, None] + group[None, :], mask=live[:, None], other=0.0)
    rotated = tl.load(rotated_columns(row)[:, None] + turned[None, :], mask=live[:, None], other=0.0)
    real = times_scales(decode_fp8(bits, E4M3FN).to(tl.float32), scales)
    to = (key + t * (LATENT + ROTATED))[:, None]
    tl.store(to + column[None, :], real.to(key.dtype.element_ty), mask=inside[:, None])
    tl.store(to + (turned + LATENT)[None, :], rotated.to(key.dtype.element_ty), mask=inside[:, None])
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting


@triton.jit
def place_of(t, inside, ends, S, block_tables, stride_s, stride_m, B: tl.constexpr, STEPS: tl.constexpr):
    """For gathered rows ``t``: whether they are tokens of a sequence, their blocks, and their offsets in the block."""
    # A row's sequence is the number of sequences that end at or before the row: a binary search.
    s = tl.zeros_like(t)
    for step in tl.static_range(STEPS):
        further = s + (1 << (STEPS - 1 - step))
        end = tl.load(ends + further - 1, mask=further <= S, other=0)
        s = tl.where((further <= S) & (end <= t), further, s)
    live = inside & (s < S)
    position = t - tl.load(ends + s - 1, mask=s > 0, other=0)
    block = tl.load(block_tables + s * stride_s + position // B * stride_m, mask=live, other=0).to(tl.int64)
    return live, block, position % B


@triton.jit
def from_fp8(bits, scale, first, SIDE: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr):
    real = decode_fp8(bits, FORMAT).to(tl.float32)
    if SCALES > 1:
        tile = by_head(real, SIDE)
        real = tl.reshape(tile * load_scales(scale, first, SIDE, SCALES, tile.shape[1]), real.shape)
    elif SCALES == 1:
        real = real * tl.load(scale)
    return real
