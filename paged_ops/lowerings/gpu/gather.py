"""Gathering from the cache on GPUs: one streaming kernel, with the addresses and tiles of cache.py, and its letters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake
from paged_ops.layouts import element_dtype, paged_kv
from paged_ops.lowerings.gpu.cache import (
    by_head,
    constants,
    dense_address,
    form_of,
    load_scales,
    paged_address,
    together,
)
from paged_ops.lowerings.gpu.fp8 import decode_fp8, stored_format
from paged_ops.lowerings.gpu.target import FUSED, on_device, target_of


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
    S = seq_lens.shape[0]
    if not (S and block_tables.shape[1] and kv_cache.numel()):
        return key.zero_(), value.zero_()
    target = target_of(kv_cache.device)
    paged = paged_kv(kv_cache, value_cache)
    FORMAT = stored_format(element_dtype(kv_cache, kv_cache_dtype), kv_cache.dtype, target)
    if checks.debug_checks():
        checks.needed_blocks(block_tables, seq_lens, paged.num_blocks, paged.block_size)
    if not num_tokens:
        return key, value
    with on_device(target.device):
        plan = constants(target, "gather_kv", "elements", *form_of(paged, kv_cache, value_cache, key, value))
        if FORMAT:
            kv_cache = kv_cache.view(torch.uint8)
            value_cache = value_cache if value_cache is None else value_cache.view(torch.uint8)
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
            STEPS=S.bit_length(),
            **plan,
            **FUSED,
        )
    return key, value


@triton.jit(do_not_specialize=["S", "num_tokens"])
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
    # A row's sequence is the number of sequences that end at or before it, found bit by bit.
    s = tl.zeros([BLOCK_T], tl.int64)
    for step in tl.static_range(STEPS):
        further = s + (1 << (STEPS - 1 - step))
        end = tl.load(ends + further - 1, mask=further <= S, other=0)
        s = tl.where((further <= S) & (end <= t), further, s)
    live = inside & (s < S)
    position = t - tl.load(ends + s - 1, mask=s > 0, other=0)
    block = tl.load(block_tables + s * stride_s + position // B * stride_m, mask=live, other=0).to(tl.int64)
    offset = position % B
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
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read


@triton.jit
def from_fp8(bits, scale, first, SIDE: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr):
    real = decode_fp8(bits, FORMAT).to(tl.float32)
    if SCALES > 1:
        tile = by_head(real, SIDE)
        real = tl.reshape(tile * load_scales(scale, first, SIDE, SCALES, tile.shape[1]), real.shape)
    elif SCALES == 1:
        real = real * tl.load(scale)
    return real
