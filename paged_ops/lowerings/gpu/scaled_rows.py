"""Latent rows with scales (``kv_cache_dtype="fp8_ds_mla"``) on GPUs: the kernel that writes them, and helpers that read
them.

A row is 656 bytes: 512 numbers in e4m3, 4 scales in float32, one per 128 numbers, and 64 rotated columns in bfloat16.
Bytes per token: a write reads 576 numbers of the model and writes 656 bytes, a gather the reverse; FLOPs are
negligible. Rows begin at multiples of 16 bytes, so all loads and stores are 16 bytes wide. The numbers are e4m3fn on
every device. Letters as in :mod:`paged_ops.ops`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import layouts
from paged_ops.lowerings.gpu.fp8 import E4M3FN, divide, encode_fp8
from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.target import Target

LATENT = tl.constexpr(layouts.ROW_LATENT)
GROUP = tl.constexpr(layouts.ROW_GROUP)
GROUPS = tl.constexpr(layouts.ROW_LATENT // layouts.ROW_GROUP)
ROTATED = tl.constexpr(layouts.ROW_ROTATED)
FIRST_ROTATED = tl.constexpr(layouts.ROW_BYTES - 2 * layouts.ROW_ROTATED)  # byte
LARGEST, SMALLEST = tl.constexpr(3.4028234663852886e38), tl.constexpr(2.0**-126)  # normal float32
# Tokens per program: one per warp.
TOKENS = 4


@functools.lru_cache(maxsize=1024)
def write_launcher(B: int, strides: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], target: Target) -> Launcher:
    """The kernel of all calls that differ only in the number of tokens. ``strides``: of the cache (n, b), latent,
    rotated and slot_mapping."""
    named = dict(zip(("CACHE", "DENSE", "DENSE_ROTATED", "SLOTS"), strides, strict=True))
    tile = {"BLOCK_T": TOKENS, "NATIVE": target.has_fp8_cvt, "num_warps": TOKENS}
    return Launcher(
        write_scaled_rows_kernel, {"B": B, **named, **tile, **target.overlap()}, target.device, can_wait=True
    )


@triton.jit(do_not_specialize=["T"])
def write_scaled_rows_kernel(
    tensors,  # latent, rotated, the cache as uint8, again, slot_mapping, None, None
    T,
    B: tl.constexpr,
    CACHE: tl.constexpr,  # strides n, b in bytes
    DENSE: tl.constexpr,  # of latent: t, d
    DENSE_ROTATED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    latent, rotated, cache, _, slot_mapping, _, _ = tensors
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t < T)[:, None]
    slot = tl.load(slot_mapping + t * SLOTS, mask=t < T, other=-1).to(tl.int64)
    live = (slot >= 0)[:, None]
    slot = tl.where(slot >= 0, slot, 0)
    column, turned = tl.arange(0, LATENT).to(tl.int64), tl.arange(0, ROTATED).to(tl.int64)
    # Everything is loaded before anything is stored: a store might alias a later load.
    real = tl.load(latent + t[:, None] * DENSE[0] + column[None, :] * DENSE[1], mask=exists, other=1.0)
    place = t[:, None] * DENSE_ROTATED[0] + turned[None, :] * DENSE_ROTATED[1]
    rotated_real = tl.load(rotated + place, mask=exists, other=0.0)
    groups = tl.reshape(real.to(tl.float32), (BLOCK_T, GROUPS, GROUP))
    size = tl.abs(groups)
    size = tl.where(size == size, tl.minimum(size, LARGEST), 0.0)  # without NaN
    scale = tl.maximum(tl.div_rn(tl.max(size, 2), 448.0), SMALLEST)  # [tokens, groups]
    codes = encode_fp8(divide(groups, scale[:, :, None], 2, NATIVE), E4M3FN, NATIVE)
    row = cache + (slot // B) * CACHE[0] + (slot % B) * CACHE[1]
    tl.store(row[:, None] + column[None, :], tl.reshape(codes, (BLOCK_T, LATENT)), mask=live)
    group = tl.arange(0, GROUPS)
    tl.store(scales_of(row)[:, None] + group[None, :], scale, mask=live)
    tl.store(rotated_columns(row)[:, None] + turned[None, :], to_bfloat16(rotated_real), mask=live)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting


@functools.lru_cache(maxsize=1024)
def index_launcher(B: int, strides: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], target: Target) -> Launcher:
    """The kernel that writes index keys with scales. ``strides``: of the cache (n), latent and slot_mapping."""
    named = dict(zip(("BLOCK", "DENSE", "SLOTS"), strides, strict=True))
    tile = {"BLOCK_T": TOKENS, "NATIVE": target.has_fp8_cvt, "num_warps": TOKENS}
    constants = {"B": B, "C": layouts.INDEX_COLUMNS, **named, **tile, **target.overlap()}
    return Launcher(write_index_kernel, constants, target.device, can_wait=True)


@triton.jit(do_not_specialize=["T"])
def write_index_kernel(
    tensors,  # keys, None's stand-in, the cache as uint8, again, slot_mapping, None, None
    T,
    B: tl.constexpr,
    C: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # bytes from one block to the next
    DENSE: tl.constexpr,  # strides of the keys: t, d
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Index keys and their scales, as ``quantise_index`` of fp8.py: 128 bytes per token, then a scale per token."""
    keys, _, cache, _, slot_mapping, _, _ = tensors
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + t * SLOTS, mask=t < T, other=-1).to(tl.int64)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    column = tl.arange(0, C).to(tl.int64)
    real = tl.load(keys + t[:, None] * DENSE[0] + column[None, :] * DENSE[1], mask=(t < T)[:, None], other=1.0)
    real = real.to(tl.float32)
    size = tl.abs(real)
    size = tl.where(size == size, tl.minimum(size, LARGEST), 0.0)  # without NaN
    least = tl.div_rn(tl.maximum(tl.max(size, 1), 1e-4), 448.0)  # [tokens]
    scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    codes = encode_fp8(tl.div_rn(real, scale[:, None]), E4M3FN, NATIVE)
    block = cache + (slot // B) * BLOCK
    tl.store((block + slot % B * C)[:, None] + column[None, :], codes, mask=live[:, None])
    tl.store((block + B * C).to(tl.pointer_type(tl.float32)) + slot % B, scale, mask=live)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting


@triton.jit
def scales_of(row):
    """The address of the first scale of a row, from the address of its first byte."""
    return (row + LATENT).to(tl.pointer_type(tl.float32))


@triton.jit
def rotated_columns(row):
    """The address of the first rotated column of a row, from the address of its first byte."""
    return (row + FIRST_ROTATED).to(tl.pointer_type(tl.bfloat16))


@triton.jit
def to_bfloat16(real):
    """Round to nearest even in integer arithmetic: the same bits on every device and in Triton's interpreter."""
    if real.dtype == tl.bfloat16:
        return real
    else:
        bits = real.to(tl.float32).to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, upper)
        return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(
    base,  # the first byte of the cache
    block,  # [N] block ids, or one
    offset,  # [N] tokens inside the blocks
    live,  # [N] whether a token is seen
    SIDE: tl.constexpr,
):
    """``[N, 4]`` scales of a tile's tokens; 0 where a token is not live."""
    row = base + (block.to(tl.int64) * SIDE.n + offset.to(tl.int64) * SIDE.b)
    return tl.load(scales_of(row)[:, None] + tl.arange(0, GROUPS)[None, :], mask=live[:, None], other=0.0)


@triton.jit
def times_scales(stored, scales):
    """float32 numbers ``[N, 512]`` multiplied by the scales ``[N, 4]`` of their groups."""
    groups = tl.reshape(stored, (stored.shape[0], GROUPS, GROUP))
    return tl.reshape(groups * scales[:, :, None], stored.shape)
