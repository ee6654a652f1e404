"""The cache ops through XLA. Letters as in :mod:`paged_ops.ops`.

On a TPU a write copies runs of consecutive slots (:mod:`paged_ops.lowerings.tpu.write`). Writes to arguments become new
values (:mod:`paged_ops.lowerings.tpu.functional`). Only a block mapping that is on the host is read there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake
from paged_ops.features import CacheOptions, refuse_others
from paged_ops.fp8 import dequantise, quantise
from paged_ops.layouts import element_dtype, paged_kv
from paged_ops.lowerings.tpu import functional, runtime, write
from paged_ops.lowerings.tpu.functional import functionalized
from paged_ops.lowerings.tpu.ragged import FORMATS, refuse_row_scales

APPLIES = FORMATS | {"value_cache", "k_scale", "v_scale"}  # the supported arguments of the cache ops, and formats
# XLA's names of the dtypes that uint8 storage may hold.
XLA_NAMES = {torch.uint8: "u8", torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2"}


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, **options: Any) -> None:
    fake.reshape_and_cache(key, value, kv_cache, slot_mapping, **options)
    given = CacheOptions(**options)
    refuse_others(given, kv_cache, APPLIES, "XLA")
    T, stored = slot_mapping.shape[0], element_dtype(kv_cache, given.kv_cache_dtype)
    if not kv_cache.numel() or not T:
        return
    paged = paged_kv(kv_cache, given.value_cache)
    num_slots = paged.num_blocks * paged.block_size
    slots = _slots_of(slot_mapping, num_slots)
    key, value = (quantise(real[:T], scale, stored) for real, scale in ((key, given.k_scale), (value, given.v_scale)))
    key, value = reinterpreted(key, kv_cache.dtype), reinterpreted(value, kv_cache.dtype)
    if given.value_cache is None and kv_cache.dim() == 4:  # interleaved: a token is one row
        rows = torch.stack([key, value], 2).flatten(1, 2)  # [T, 2K, D]
        if runtime.on_tpu() and write.can_write_runs(kv_cache, T):
            kv_cache.copy_(write.write_runs(kv_cache, rows, torch.where(slots < num_slots, slots, -1)))
            return
        kv_cache.copy_(_with_rows(kv_cache.view(num_slots, *rows.shape[1:]), slots, rows).view(kv_cache.shape))
        return
    for cache, rows in ((paged.key, key), (paged.value, value)):
        flat, rows = cache.reshape(num_slots, *cache.shape[2:]), rows.reshape(T, *cache.shape[2:])
        cache.copy_(_with_rows(flat, slots, rows).view(cache.shape))


def latent_cache_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    refuse_row_scales(kv_cache_dtype)
    options: dict[str, Any] = {"k_scale": k_scale, "kv_cache_dtype": kv_cache_dtype}
    fake.latent_cache_write(latent, rotated, kv_cache, slot_mapping, **options)
    refuse_others(CacheOptions(**options), kv_cache, APPLIES, "XLA")
    T, stored = slot_mapping.shape[0], element_dtype(kv_cache, kv_cache_dtype)
    if not kv_cache.numel() or not T:
        return
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    rows = quantise(torch.cat([latent[:T], rotated[:T]], 1), k_scale, stored)
    flat = kv_cache.reshape(num_slots, -1)
    written = _with_rows(flat, _slots_of(slot_mapping, num_slots), reinterpreted(rows, kv_cache.dtype))
    kv_cache.copy_(written.view(kv_cache.shape))


def _slots_of(slot_mapping: Tensor, num_slots: int) -> Tensor:
    """int64 slots; a slot of padding becomes one past the end, where rows are dropped."""
    if checks.debug_checks():
        checks.slots(slot_mapping.cpu(), num_slots)
    slots = slot_mapping.long()
    return torch.where((slots < 0) | (slots > num_slots), num_slots, slots)


def _with_rows(flat: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """``flat`` with ``rows`` at ``slots``. Rows at a slot one past the end are dropped: by XLA, elsewhere by a spare
    row."""
    if flat.device.type == "xla":
        return flat.index_copy(0, slots, rows)
    spare = _indexable(torch.cat([flat, flat[:1]]))
    return spare.index_copy(0, slots, _indexable(rows))[:-1].view(flat.dtype)


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.copy_blocks(kv_caches, block_mapping)
    caches = [cache for cache in kv_caches if cache.numel()]
    if not caches or not len(block_mapping):
        return
    if block_mapping.device.type == "cpu" or checks.debug_checks():
        for cache in caches:
            checks.block_mapping(block_mapping.cpu(), len(cache), len(cache), same_cache=True)
    source, destination = _pairs(block_mapping, caches[0].device)
    for cache in caches:
        cache.index_copy_(0, destination, cache.index_select(0, source))


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.swap_blocks(src_caches, dst_caches, block_mapping)
    pairs = [(src, dst) for src, dst in zip(src_caches, dst_caches, strict=True) if src.numel() and dst.numel()]
    if not pairs or not len(block_mapping):
        return
    for src, dst in pairs:
        checks.block_mapping(block_mapping, len(src), len(dst), same_cache=src is dst)
    for src, dst in pairs:
        source, _ = _pairs(block_mapping, src.device)
        _, destination = _pairs(block_mapping, dst.device)
        blocks = reinterpreted(_indexable(src).index_select(0, source), src.dtype).to(dst.device)
        functional.donate(dst)
        _indexable(dst).index_copy_(0, destination, _indexable(blocks))


@functionalized
def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    given = CacheOptions(**options)
    refuse_row_scales(given.kv_cache_dtype)
    key, value = fake.gather_kv(kv_cache, block_tables, seq_lens, num_tokens, dtype=dtype, **options)
    refuse_others(given, kv_cache, APPLIES, "XLA")
    if not (kv_cache.numel() and num_tokens and block_tables.numel()):
        return torch.zeros_like(key), torch.zeros_like(value)
    paged, stored = paged_kv(kv_cache, given.value_cache), element_dtype(kv_cache, given.kv_cache_dtype)
    N, B, M = paged.num_blocks, paged.block_size, block_tables.shape[1]
    if checks.debug_checks():
        checks.needed_blocks(block_tables.cpu(), seq_lens.cpu(), N, B)
    ends = seq_lens.cumsum(0)  # [S]
    row = torch.arange(num_tokens, device=kv_cache.device)
    s = (row[:, None] >= ends).sum(1)  # the sequence of each row; S past the last
    live = row < ends[-1]
    s = s.clamp(max=len(seq_lens) - 1)
    j = (row - (ends - seq_lens)[s]).clamp(0, M * B - 1)
    slot = block_tables[s, j // B].long().clamp(0, N - 1) * B + j % B

    def rows(cache: Tensor, scale: Tensor | None, like: Tensor) -> Tensor:
        cells = cache.reshape(N * B, *cache.shape[2:]).index_select(0, slot).reshape(like.shape)
        real = dequantise(reinterpreted(cells, stored), scale, torch.float32).to(like.dtype)
        return torch.where(live[:, None, None], real, 0).to(like.dtype)

    return rows(paged.key, given.k_scale, key), rows(paged.value, given.v_scale, value)


def _pairs(block_mapping: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources and destinations on ``device``. A host mapping is padded to a power of two by repeating its last pair,
    which changes no result, so that few lengths are compiled."""
    if block_mapping.device.type == "cpu":
        P = len(block_mapping)
        repeats = (1 << (P - 1).bit_length()) - P
        block_mapping = torch.cat([block_mapping, block_mapping[-1:].expand(repeats, 2)])
    source, destination = block_mapping.to(device).unbind(1)
    return source, destination


def _indexable(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that can be indexed: XLA indexes all; elsewhere fp8 becomes bytes."""
    return tensor.view(torch.uint8) if tensor.device.type != "xla" and tensor.element_size() == 1 else tensor


def reinterpreted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as uint8 or float8. torch_xla would run ``Tensor.view(dtype)`` on the host."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.device.type != "xla":
        return tensor.view(dtype)
    return _bitcast(tuple(tensor.shape), XLA_NAMES[tensor.dtype], XLA_NAMES[dtype])([tensor])[0]


@functools.cache
def _bitcast(shape: tuple[int, ...], source: str, target: str) -> Callable[[list[Tensor]], list[Tensor]]:
    from torch_xla.core import xla_builder

    parameter = xla_builder.mkshape(source, shape)
    computation = xla_builder.create_computation("bitcast", lambda x: x.bitcast(target), [parameter])
    return xla_builder.xla_computation_as_func(computation, "bitcast")
