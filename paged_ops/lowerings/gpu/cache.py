"""Writing to the cache on GPUs by a streaming kernel with wide loads and stores, and helpers shared with gather.py.

Letters as in :mod:`paged_ops.ops`: T tokens, S sequences, K key/value heads, D and Dv head sizes, N blocks, B tokens
per block. Inside kernels also C columns of a token: its K*D elements. Shapes and strides are constants of the kernels,
so the compiler sees which columns are contiguous and loads 16 bytes at a time in every cache layout.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake
from paged_ops.features import CacheOptions, refuse_others
from paged_ops.layouts import (
    FP8_DS_INDEX,
    FP8_DS_MLA,
    PagedKV,
    element_dtype,
    has_index_scales,
    has_row_scales,
    paged_kv,
)
from paged_ops.lowerings.gpu import scaled_rows
from paged_ops.lowerings.gpu.fp8 import divide, encode_fp8, stored_format
from paged_ops.lowerings.gpu.launch import MOST_KINDS, Launcher
from paged_ops.lowerings.gpu.target import Target, target_of

# Cache formats that the ops here read and write: values of kv_cache_dtype, and dtypes of elements.
FORMATS = frozenset(
    {
        *("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
        *("float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
APPLIES = FORMATS | {"value_cache", "k_scale", "v_scale"}  # arguments and formats that cache ops apply
INDEX_FORMATS = (FORMATS - {FP8_DS_MLA}) | {FP8_DS_INDEX}  # of a cache of index keys


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
    """Calls of one kind are checked and planned once, as each decode step calls this once per layer. A kind is shapes,
    strides, dtypes and devices; the numbers of tokens must only agree."""
    key, value = (rows.contiguous() if is_head_major(rows) else rows for rows in (key, value))
    kind = (
        *_kind_of_rows(key, value, slot_mapping),
        *(kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.get_device()),
        kv_cache_dtype,
        value_cache if value_cache is None else _kind(value_cache),
        k_scale if k_scale is None else _kind(k_scale),
        v_scale if v_scale is None else _kind(v_scale),
    )
    write = _writes.get(kind)
    if write is None:
        write = _plan_write(key, value, kv_cache, slot_mapping, value_cache, k_scale, v_scale, kv_cache_dtype)
        _keep(kind, write)
    _run(write, key, value, kv_cache, kv_cache if value_cache is None else value_cache, slot_mapping, k_scale, v_scale)


def latent_cache_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """By the kernel of :func:`reshape_and_cache`: the compressed columns of a row are the key of one head, and the
    rotated columns its value."""
    kind = (
        *_kind_of_rows(latent, rotated, slot_mapping),
        *_kind(kv_cache),
        kv_cache.data_ptr() & 15,  # rows with scales are refused where they are not aligned
        kv_cache_dtype,
        k_scale if k_scale is None else _kind(k_scale),
    )
    write = _writes.get(kind)
    if write is None:
        write = _plan_latent_write(latent, rotated, kv_cache, slot_mapping, k_scale, kv_cache_dtype)
        _keep(kind, write)
    _run(write, latent, rotated, kv_cache, kv_cache, slot_mapping, k_scale, k_scale)


class Write(NamedTuple):
    """What the calls of one kind share."""

    launcher: Launcher | None  # None: nothing to write
    tokens: int  # per program
    as_bytes: bool  # the kernel takes the cache as uint8
    num_slots: int


_writes: dict[tuple[Any, ...], Write] = {}


def _keep(kind: tuple[Any, ...], write: Write) -> None:
    if len(_writes) == MOST_KINDS:
        _writes.clear()
    _writes[kind] = write


def _run(
    write: Write,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Launch; ``values`` is the tensor that holds the cache of values."""
    if write.launcher is None:
        return
    if checks.debug_checks():
        checks.slots(slot_mapping, write.num_slots)
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = together(k_scale), together(v_scale)
    addresses = (
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        values.data_ptr(),
        slot_mapping.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
    )
    T = slot_mapping.shape[0]
    grid, numbers = (-(-T // write.tokens), 1, 1), (T,)
    if not write.launcher.at(grid, addresses, numbers):
        if write.as_bytes:
            kv_cache, values = kv_cache.view(torch.uint8), values.view(torch.uint8)
        tensors = (key, value, kv_cache, values, slot_mapping, k_scale, v_scale)
        write.launcher(grid, tensors, numbers)


def forget() -> None:
    """Drop all plans, when tuning has changed the numbers that they depend on."""
    _writes.clear()


def is_head_major(rows: Tensor) -> bool:
    """Whether ``rows [T, heads, D]`` are stored head by head. Their stride then depends on T, so each number of tokens
    would be another kernel: such rows are copied first."""
    return rows.dim() == 3 and min(rows.shape[:2]) > 1 and rows.stride(1) > rows.stride(0) > 0


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _kind_of_rows(key: Tensor, value: Tensor, slot_mapping: Tensor) -> tuple[Any, ...]:
    """The kinds of tensors with one row per token. Instead of the number of tokens: whether the tensors agree on it,
    and whether it is 0, 1 or more."""
    rows, of_value, slots = key.shape, value.shape, slot_mapping.shape
    if not (rows and of_value and slots):
        return rows, of_value, slots  # the checks refuse these
    T = slots[0]
    return (
        *(min(T, 2), min(rows[0], 2), T <= rows[0], of_value[0] == rows[0], slots[1:]),
        *(rows[1:], key.stride(), key.dtype, key.get_device()),
        *(of_value[1:], value.stride(), value.dtype, value.get_device()),
        *(slot_mapping.stride(), slot_mapping.dtype, slot_mapping.get_device()),
    )


def _plan_write(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    value_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
) -> Write:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    fake.reshape_and_cache(
        key, value, kv_cache, slot_mapping, value_cache=value_cache, kv_cache_dtype=kv_cache_dtype, **scales
    )
    refuse_others(CacheOptions(value_cache, k_scale, v_scale, kv_cache_dtype), kv_cache, APPLIES, "a GPU")
    paged = paged_kv(kv_cache, value_cache)
    return _write_of(paged, key, value, kv_cache, slot_mapping, value_cache, k_scale, v_scale, kv_cache_dtype)


def _plan_latent_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    kv_cache_dtype: str,
) -> Write:
    fake.latent_cache_write(latent, rotated, kv_cache, slot_mapping, k_scale=k_scale, kv_cache_dtype=kv_cache_dtype)
    options = CacheOptions(k_scale=k_scale, kv_cache_dtype=kv_cache_dtype)
    refuse_others(options, kv_cache, APPLIES | INDEX_FORMATS, "a GPU")
    if has_index_scales(kv_cache_dtype):
        return _plan_index(latent, kv_cache, slot_mapping)
    if has_row_scales(kv_cache_dtype):
        return _plan_scaled_rows(latent, rotated, kv_cache, slot_mapping)
    R, rows = latent.shape[1], kv_cache[:, :, None]  # [N, B, 1, R + P]
    parts = PagedKV(rows[..., None, :R], rows[..., R:])
    key, value = latent[:, None], rotated[:, None]
    return _write_of(parts, key, value, kv_cache, slot_mapping, None, k_scale, k_scale, kv_cache_dtype)


def _plan_scaled_rows(latent: Tensor, rotated: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Write:
    T, (N, B, _) = slot_mapping.shape[0], kv_cache.shape
    if not (T and kv_cache.numel()):
        return Write(None, 1, False, N * B)
    strides = (kv_cache.stride()[:2], latent.stride(), rotated.stride(), slot_mapping.stride(0))
    launcher = scaled_rows.write_launcher(B, strides, (latent.dtype, slot_mapping.dtype), target_of(latent.device))
    return Write(launcher, scaled_rows.TOKENS, False, N * B)


def _plan_index(latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Write:
    T, (N, B, _) = slot_mapping.shape[0], kv_cache.shape
    if not (T and kv_cache.numel()):
        return Write(None, 1, False, N * B)
    strides = (kv_cache.stride(0), latent.stride(), slot_mapping.stride(0))
    launcher = scaled_rows.index_launcher(B, strides, (latent.dtype, slot_mapping.dtype), target_of(latent.device))
    return Write(launcher, scaled_rows.TOKENS, False, N * B)


def _write_of(
    paged: PagedKV,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    value_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
) -> Write:
    """Write keys ``[T', K, D]`` and values ``[T', K, Dv]`` into two planes of a cache."""
    T, num_slots = slot_mapping.shape[0], paged.num_blocks * paged.block_size
    if not (T and kv_cache.numel()):
        return Write(None, 1, False, num_slots)
    target = target_of(key.device)
    FORMAT = stored_format(element_dtype(kv_cache, kv_cache_dtype), kv_cache.dtype, target)
    launcher, tokens = _write_launcher(
        form_of(paged, kv_cache, value_cache, key, value),
        FORMAT,
        0 if k_scale is None else k_scale.shape[0],
        0 if v_scale is None else v_scale.shape[0],
        slot_mapping.stride(0),
        (key.dtype, kv_cache.dtype, slot_mapping.dtype),
        target,
    )
    return Write(launcher, tokens, FORMAT > 0, num_slots)


@functools.lru_cache(maxsize=1024)
def _write_launcher(
    form: tuple[Any, ...],
    FORMAT: int,
    k_scales: int,
    v_scales: int,
    slots: int,
    dtypes: tuple[torch.dtype, ...],
    target: Target,
) -> tuple[Launcher, int]:
    """The kernel of all calls that differ only in the number of tokens, and the tokens per program."""
    by_head = max(k_scales, v_scales) > 1  # each scale is loaded and inverted once per program
    plan = constants(target, "reshape_and_cache", "elements_by_head" if by_head else "elements", *form)
    fp8 = {"FORMAT": FORMAT, "NATIVE": FORMAT > 0 and target.has_fp8_cvt, "K_SCALES": k_scales, "V_SCALES": v_scales}
    return Launcher(write_kernel, {**plan, **fp8, "SLOTS": slots}, target.device, can_wait=True), plan["BLOCK_T"]


class Side(NamedTuple):
    """The layout of keys (or values) in the dense tensor ``[T, K, D]`` and in the cache ``[N, B, K, D/x, x]``; a
    constant of the kernel. Strides are in elements."""

    C: int  # columns: K * D
    D: int
    X: int
    V: int  # neighbouring columns that share a head
    dense_t: int
    dense_h: int
    dense_d: int
    start: int  # offset of the first block in the cache's tensor
    block: int
    token: int
    head: int
    pack: int
    element: int
    across: bool  # the tokens of a block are contiguous, not the elements of a head (x-packed values)
    wide: bool  # offsets inside a token need int64


def form_of(
    paged: PagedKV, kv_cache: Tensor, value_cache: Tensor | None, key: Tensor, value: Tensor
) -> tuple[Any, ...]:
    """Shapes and strides that specialise a kernel, in addition to dtypes. The number of tokens does not."""
    k, v = paged
    start = v.storage_offset() - kv_cache.storage_offset() if value_cache is None else 0
    return k.shape[1:], k.stride(), v.shape[1:], v.stride(), start, key.stride(), value.stride()


@functools.lru_cache(maxsize=1024)
def constants(
    target: Target,
    op: str,
    size: str,
    key_shape: tuple[int, ...],
    key_stride: tuple[int, ...],
    value_shape: tuple[int, ...],
    value_stride: tuple[int, ...],
    value_start: int,
    dense_key: tuple[int, ...],
    dense_value: tuple[int, ...],
) -> dict[str, Any]:
    """The constants of a launch; ``size`` names the tuned number of elements per program."""
    B, K, Dv = value_shape
    KEY = _side(key_shape, key_stride, 0, dense_key)
    VALUE = _side((B, K, 1, Dv), (*value_stride[:3], 0, value_stride[3]), value_start, dense_value)
    elements, num_warps = target.numbers[op][size], target.numbers[op]["num_warps"]
    tokens = 16 if KEY.across or VALUE.across else 1
    BLOCK_C = max(16, min(triton.next_power_of_2(max(KEY.C, VALUE.C)), elements // tokens))
    BLOCK_T = max(tokens, elements // BLOCK_C)
    tile = {"BLOCK_T": BLOCK_T, "BLOCK_C": BLOCK_C, "num_warps": num_warps}
    return {"B": B, "KEY": KEY, "VALUE": VALUE, **tile, **target.overlap()}


def _side(shape: tuple[int, ...], stride: tuple[int, ...], start: int, dense: tuple[int, ...]) -> Side:
    _, K, packs, X = shape
    block = stride[0]
    # The stride of a dimension of size 1 has no meaning.
    token, head, pack, element = (s if n > 1 else 0 for n, s in zip(shape, stride[1:], strict=True))
    dense_t, dense_h, dense_d = dense
    dense_h = dense_h if K > 1 else 0
    element = element if X > 1 else 1
    extent = max((K - 1) * head + (packs - 1) * pack + (X - 1) * element, (K - 1) * dense_h + (packs * X - 1) * dense_d)
    return Side(
        C=K * packs * X,
        D=max(packs * X, 1),  # the rotated part of a latent cache may have no columns
        X=max(X, 1),
        V=math.gcd(16, packs * X),
        dense_t=dense_t,
        dense_h=dense_h,
        dense_d=dense_d,
        start=start,
        block=block,
        token=token,
        head=head,
        pack=pack,
        element=element,
        across=element != 1 and token == 1,
        wide=extent >= 2**31,
    )


def together(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.is_contiguous() else scale.contiguous()


@triton.jit(do_not_specialize=["T"])
def write_kernel(
    tensors,  # key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
    T,
    B: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,  # stride of slot_mapping
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale = tensors
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + t * SLOTS, mask=t < T, other=-1).to(tl.int64)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    block, offset = slot // B, slot % B
    # Both are loaded before either is stored: a store might alias a later load.
    for first in range(0, KEY.C if KEY.C > VALUE.C else VALUE.C, BLOCK_C):
        # Loads do not wait for the slots either: skipped rows exist, too.
        k_dense, k_exists = dense_address(key, t, t < T, first, KEY, BLOCK_C)
        v_dense, v_exists = dense_address(value, t, t < T, first, VALUE, BLOCK_C)
        k, v = tl.load(k_dense, mask=k_exists), tl.load(v_dense, mask=v_exists)
        if FORMAT != 0:
            k = to_fp8(k, k_scale, first, KEY, K_SCALES, FORMAT, NATIVE)
            v = to_fp8(v, v_scale, first, VALUE, V_SCALES, FORMAT, NATIVE)
        k_address = paged_address(key_cache, block, offset, first, KEY, BLOCK_C)
        v_address = paged_address(value_cache, block, offset, first, VALUE, BLOCK_C)
        tl.store(k_address, k, mask=k_exists & live[:, None])
        tl.store(v_address, v, mask=v_exists & live[:, None])
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting


@triton.jit
def dense_address(dense, t, live, first, SIDE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Addresses ``[tokens, columns]`` in ``[T, K, D]`` from column ``first`` on, and which of them exist."""
    column = first + tl.arange(0, BLOCK_C)
    head, d = column // SIDE.D, column % SIDE.D
    exists = column < SIDE.C
    if SIDE.wide:
        head, d = head.to(tl.int64), d.to(tl.int64)
    address = (dense + t * SIDE.dense_t)[:, None] + (head * SIDE.dense_h + d * SIDE.dense_d)[None, :]
    return address, live[:, None] & exists[None, :]


@triton.jit
def paged_address(cache, block, offset, first, SIDE: tl.constexpr, BLOCK_C: tl.constexpr):
    """The addresses of the same tile in the cache ``[N, B, K, D/x, x]``."""
    column = first + tl.arange(0, BLOCK_C)
    head, d = column // SIDE.D, column % SIDE.D
    if SIDE.wide:
        head, d = head.to(tl.int64), d.to(tl.int64)
    row = cache + (block * SIDE.block + SIDE.start) + offset * SIDE.token
    if SIDE.X < SIDE.D:
        place = d // SIDE.X * SIDE.pack + d % SIDE.X * SIDE.element
    else:
        place = d * SIDE.element
    return row[:, None] + (head * SIDE.head + place)[None, :]


@triton.jit
def by_head(tile, SIDE: tl.constexpr):
    """``[tokens, columns]`` as ``[tokens, vectors, V]``: each vector has one scale."""
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // SIDE.V, SIDE.V])


@triton.jit
def load_scales(scale, first, SIDE: tl.constexpr, SCALES: tl.constexpr, VECTORS: tl.constexpr):
    """``[K]`` as ``[1, vectors, 1]`` from column ``first`` on."""
    head = (first + tl.arange(0, VECTORS) * SIDE.V) // SIDE.D
    return tl.load(scale + head, mask=head < SCALES, other=1.0)[None, :, None]


@triton.jit
def to_fp8(real, scale, first, SIDE: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    real = real.to(tl.float32)
    if SCALES > 1:
        tile = by_head(real, SIDE)
        factor = load_scales(scale, first, SIDE, SCALES, tile.shape[1])
        real = tl.reshape(divide(tile, factor, SCALES, NATIVE), real.shape)
    elif SCALES == 1:
        real = divide(real, tl.load(scale), SCALES, NATIVE)
    return encode_fp8(real, FORMAT, NATIVE)
