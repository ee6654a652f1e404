"""The forms of a paged cache: their names, their shapes, and the strided views that all code reads them through.

Letters: N blocks, B tokens per block, K key/value heads, D head size, Dv value head size, x = 16 / itemsize; of a
latent cache R compressed and P rotated columns.

Five forms, distinguished by rank and by whether ``value_cache`` is given:

=============  ==========================================  ======================  ================================
form           kv_cache                                    value_cache             used by
=============  ==========================================  ======================  ================================
combined       [N, 2, B, K, D], any strides                -                       the default; HND is a view of it
interleaved    [N, B, 2K, D], key h at 2h, value at 2h+1   -                       TPU ragged paged attention
separate       [N, B, K, D], any strides                   [N, B, K, Dv]           engines with two tensors
x-packed       [N, K, D/x, B, x]                           [N, K, D, B]            the classic PagedAttention cache
latent         [N, B, R + P], any strides                  -                       latent attention (MLA)
               or uint8 [N, B, 656]
=============  ==========================================  ======================  ================================

A latent cache is keys and values at once, for one key/value head (K = 1): its rows are the keys, D = R + P, and their
first ``value_head_size`` = R columns the values. :func:`paged_ops.latent_cache_write` writes it; every op but
:func:`paged_ops.reshape_and_cache` takes it. With ``kv_cache_dtype="fp8_ds_mla"`` it is uint8 ``[N, B, 656]``, R is 512
and P 64: see :func:`row_parts`.

If Dv differs from D, a layer is still one allocation, a *joined* cache ``[N, B, K, D + Dv]``, which
:func:`split_joined_cache` splits into the separate form.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import at_least, describe_setting, expect, integers, present
from paged_ops.device import as_device


class Layout(str, enum.Enum):
    """How a cache of one layer lies in memory."""

    NHD = "NHD"  # [N, 2, B, K, D]
    HND = "HND"  # [N, 2, K, B, D]
    INTERLEAVED = "INTERLEAVED"  # [N, B, 2K, D]
    X_PACKED = "X_PACKED"  # flat [2, N, B*K*D], split into its pair by split_kv_cache
    LATENT = "LATENT"  # [N, B, R + P]

    __str__ = str.__str__


class PagedKV(NamedTuple):
    """A cache in any form as two views: ``key [N, B, K, D/x, x]`` (x = D if not packed) and ``value [N, B, K, Dv]``."""

    key: Tensor
    value: Tensor

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[2]

    @property
    def head_size(self) -> int:
        return self.key.shape[3] * self.key.shape[4]

    @property
    def value_head_size(self) -> int:
        return self.value.shape[3]


def is_latent(kv_cache: Tensor) -> bool:
    """Whether a cache has the latent form ``[N, B, R + P]``."""
    return kv_cache.dim() == 3


def paged_kv(
    kv_cache: Tensor,
    value_cache: Tensor | None = None,
    value_head_size: int | None = None,
    kv_cache_dtype: str = "auto",
) -> PagedKV:
    """Check ``kv_cache`` and ``value_cache``, and return them as views, whatever their form.

    ``value_head_size`` is R for a latent cache (without it, values have size 0); other forms have their own. For rows
    with scales the views are e4m3 with the right sizes and strides, but only the first R columns hold e4m3 numbers.
    """
    present("kv_cache", kv_cache)
    only = f"another format: latent_cache_write and select_keys alone take {FP8_DS_INDEX!r}"
    expect(not has_index_scales(kv_cache_dtype), "kv_cache_dtype", only, repr(kv_cache_dtype))
    if has_row_scales(kv_cache_dtype):
        expect(value_cache is None, "value_cache", f"None with a kv_cache [N, B, {ROW_BYTES}]", value_cache)
        return _scaled_rows_kv(kv_cache, value_head_size)
    rank = kv_cache.dim()
    expect(rank in (3, 4, 5), "kv_cache", "3, 4 or 5 dimensions (see paged_ops.layouts)", kv_cache)
    if is_latent(kv_cache):
        expect(value_cache is None, "value_cache", "None with a latent kv_cache [N, B, R + P]", value_cache)
        return _latent_kv(kv_cache, value_head_size)
    paged = _two_planes(kv_cache, value_cache)
    if value_head_size is not None:
        Dv = paged.value_head_size
        expect(value_head_size == Dv, "value_head_size", f"None, or the {Dv} of the cache", value_head_size)
    return paged


def _latent_kv(kv_cache: Tensor, value_head_size: int | None) -> PagedKV:
    R, columns = 0, kv_cache.shape[2]
    if value_head_size is not None:
        R, most = value_head_size, f"1 to {columns}, columns of the latent kv_cache [N, B, R + P]"
        expect(value_head_size >= 1, "value_head_size", most, value_head_size)
        expect(value_head_size <= columns, "value_head_size", most, value_head_size)
    return PagedKV(kv_cache[:, :, None, None, :], kv_cache[:, :, None, :R])


def _scaled_rows_kv(kv_cache: Tensor, value_head_size: int | None) -> PagedKV:
    name = f"uint8 [N, B, {ROW_BYTES}] (kv_cache_dtype={FP8_DS_MLA!r})"
    expect(kv_cache.dim() == 3, "kv_cache", name, kv_cache)
    expect(kv_cache.dtype == torch.uint8, "kv_cache", name, kv_cache)
    expect(kv_cache.shape[2] == ROW_BYTES, "kv_cache", name, kv_cache)
    places = (*kv_cache.stride()[:2], kv_cache.storage_offset())
    expect(kv_cache.stride(2) == 1, "kv_cache", "contiguous rows of bytes", f"strides {kv_cache.stride()}")
    for place in places:
        multiples = f"strides and an offset that are multiples of {ROW_ALIGNMENT} bytes"
        expect(place % ROW_ALIGNMENT == 0, "kv_cache", multiples, f"strides {kv_cache.stride()}, offset {places[2]}")
    R = 0 if value_head_size is None else ROW_LATENT
    if value_head_size is not None:
        expect(value_head_size == R, "value_head_size", f"{R} with kv_cache_dtype={FP8_DS_MLA!r}", value_head_size)
    rows = kv_cache.view(torch.float8_e4m3fn)
    return PagedKV(rows[:, :, None, None, : ROW_LATENT + ROW_ROTATED], rows[:, :, None, :R])


class RowParts(NamedTuple):
    """The parts of rows with scales: ``latent [..., 512]`` e4m3, ``scales [..., 4]`` float32, ``rotated [..., 64]``
    bfloat16."""

    latent: Tensor
    scales: Tensor
    rotated: Tensor


def row_parts(rows: Tensor) -> RowParts:
    """Views of rows with scales, uint8 ``[..., 656]``: a cache of ``kv_cache_dtype="fp8_ds_mla"``, or a part of it.

    A row is 512 numbers in e4m3, 4 scales in float32, each for 128 of them (``real = stored * scale``), and 64 rotated
    columns in bfloat16. Source: the format of FlashMLA (deepseek-ai/FlashMLA) and vLLM.
    """
    scales, rotated = ROW_LATENT, ROW_BYTES - 2 * ROW_ROTATED
    return RowParts(
        rows[..., :scales].view(torch.float8_e4m3fn),
        rows[..., scales:rotated].view(torch.float32),
        rows[..., rotated:].view(torch.bfloat16),
    )


class IndexParts(NamedTuple):
    """The parts of an index cache with scales: ``keys [N, B, 128]`` e4m3 and ``scales [N, B]`` float32."""

    keys: Tensor
    scales: Tensor


def index_parts(cache: Tensor, argument: str = "kv_cache") -> IndexParts:
    """Views of an index cache with ``kv_cache_dtype="fp8_ds_index"``, uint8 ``[N, B, 132]``.

    A block is 128 numbers in e4m3 per token, then one float32 scale per token (``real = stored * scale``). Its bytes
    are contiguous. Source: the index cache of DeepSeek-V3.2 in DeepGEMM and vLLM.
    """
    name = f"uint8 [N, B, {INDEX_BYTES}] (kv_cache_dtype={FP8_DS_INDEX!r})"
    expect(cache.dim() == 3, argument, name, cache)
    expect(cache.dtype == torch.uint8, argument, name, cache)
    expect(cache.shape[2] == INDEX_BYTES, argument, name, cache)
    strides, offset = cache.stride(), cache.storage_offset()
    inside = strides[2] == 1 and (cache.shape[1] == 1 or strides[1] == INDEX_BYTES)
    expect(inside, argument, "blocks of contiguous bytes", f"strides {strides}")
    aligned = strides[0] % 4 == 0 and offset % 4 == 0
    expect(aligned, argument, "blocks that begin at multiples of 4 bytes", f"strides {strides}, offset {offset}")
    B = cache.shape[1]
    blocks = cache.flatten(1)
    keys = blocks[:, : B * INDEX_COLUMNS].view(torch.float8_e4m3fn).unflatten(1, (B, INDEX_COLUMNS))
    return IndexParts(keys, blocks[:, B * INDEX_COLUMNS :].view(torch.float32))


def _two_planes(kv_cache: Tensor, value_cache: Tensor | None) -> PagedKV:
    rank = kv_cache.dim()
    if value_cache is None:
        if rank == 5:
            expect(
                kv_cache.shape[1] == 2,
                "kv_cache",
                "2 planes (keys, values) in dimension 1 of [N, 2, B, K, D]",
                kv_cache,
            )
            key, value = kv_cache.unbind(1)
        else:
            expect(kv_cache.shape[2] % 2 == 0, "kv_cache", "an even dimension 2 of [N, B, 2K, D]", kv_cache)
            key, value = kv_cache[:, :, 0::2], kv_cache[:, :, 1::2]
        return PagedKV(key.unsqueeze(3), value)
    expect(value_cache.dim() == 4, "value_cache", "4 dimensions [N, B, K, Dv] or [N, K, D, B]", value_cache)
    expect(value_cache.dtype == kv_cache.dtype, "value_cache", f"the dtype of kv_cache, {kv_cache.dtype}", value_cache)
    expect(value_cache.device == kv_cache.device, "value_cache", f"a tensor on {kv_cache.device}", value_cache)
    expect(
        value_cache.shape[0] == kv_cache.shape[0],
        "value_cache",
        f"the {kv_cache.shape[0]} blocks of kv_cache",
        value_cache,
    )
    if rank == 4:
        same = value_cache.shape[1:3] == kv_cache.shape[1:3]
        expect(same, "value_cache", f"the B, K of kv_cache, {list(kv_cache.shape[1:3])}, in [N, B, K, Dv]", value_cache)
        return PagedKV(kv_cache.unsqueeze(3), value_cache)
    _, K, packs, B, x = kv_cache.shape
    expect(x == 16 // kv_cache.element_size(), "kv_cache", "x = 16 / itemsize last in [N, K, D/x, B, x]", kv_cache)
    same = tuple(value_cache.shape[1:]) == (K, packs * x, B)
    expect(same, "value_cache", f"[N, K, D, B] = [N, {K}, {packs * x}, {B}] with an x-packed kv_cache", value_cache)
    return PagedKV(kv_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2))


def kv_cache_shape(
    layout: Layout | str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[int, ...]:
    """The shape to allocate for one layer; :func:`kv_cache_view` turns the tensor into what the ops take.

    If ``value_head_size`` Dv differs from D, the cache is joined: NHD ``[N, B, K, D + Dv]``, HND ``[N, K, B, D + Dv]``;
    INTERLEAVED and X_PACKED have no such form. LATENT is ``[N, B, D]`` with D = R + P, K = 1, and Dv = R if given; with
    ``kv_cache_dtype="fp8_ds_mla"``, which needs D = 576 and R = 512, it is ``[N, B, 656]`` bytes. If Dv is 0, the cache
    has keys alone, those of an indexer: ``[N, B, D]`` with K = 1, in all layouts but X_PACKED.
    """
    at_least(0, num_blocks=num_blocks)
    at_least(1, block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
    if value_head_size is not None:
        at_least(0, value_head_size=value_head_size)
    N, B, K, D = num_blocks, block_size, num_kv_heads, head_size
    if value_head_size == 0:
        expect(K == 1, "num_kv_heads", "1 where value_head_size is 0, as in the cache of an indexer", K)
        expect(_layout(layout) is not Layout.X_PACKED, "layout", "another where value_head_size is 0", _layout(layout))
        return N, B, D
    row_scales = has_row_scales(kv_cache_dtype)
    if row_scales:
        latent, whole = f"LATENT with kv_cache_dtype={FP8_DS_MLA!r}", ROW_LATENT + ROW_ROTATED
        expect(_layout(layout) is Layout.LATENT, "layout", latent, _layout(layout))
        expect(D == whole, "head_size", f"{whole} with kv_cache_dtype={FP8_DS_MLA!r}", D)
        fits = value_head_size in (None, ROW_LATENT)
        expect(fits, "value_head_size", f"{ROW_LATENT} with kv_cache_dtype={FP8_DS_MLA!r}", value_head_size)
    if _layout(layout) is Layout.LATENT:
        expect(K == 1, "num_kv_heads", "1 for the LATENT layout, whose rows serve all heads", K)
        within = value_head_size is None or value_head_size <= D
        expect(within, "value_head_size", f"at most head_size = R + P = {D} for the LATENT layout", value_head_size)
        return N, B, ROW_BYTES if row_scales else D
    if value_head_size not in (None, D):
        row = D + value_head_size
        joined = {Layout.NHD: (N, B, K, row), Layout.HND: (N, K, B, row)}
        has_form = f"NHD or HND where value_head_size {value_head_size} is not head_size {D}"
        expect(_layout(layout) in joined, "layout", has_form, _layout(layout))
        return joined[_layout(layout)]
    return {
        Layout.NHD: (N, 2, B, K, D),
        Layout.HND: (N, 2, K, B, D),
        Layout.INTERLEAVED: (N, B, 2 * K, D),
        Layout.X_PACKED: (2, N, B * K * D),
    }[_layout(layout)]


def kv_cache_view(layout: Layout | str, storage: Tensor) -> Tensor:
    """The allocated tensor in the form that the ops take: HND as a ``[N, 2, B, K, D]`` view, others as they are.

    An x-packed cache stays flat, and a joined one joined (HND as a ``[N, B, K, D + Dv]`` view): :func:`split_kv_cache`
    and :func:`split_joined_cache` split them inside the compiled function.
    """
    return storage.transpose(-3, -2) if _layout(layout) is Layout.HND else storage


def allocate_kv_cache(
    layout: Layout | str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
    *,
    value_head_size: int | None = None,
    kv_cache_dtype: str = "auto",
) -> Tensor:
    """A zeroed cache of one layer as the ops take it. Split x-packed and joined ones in the compiled function.

    ``kv_cache_dtype`` is what uint8 storage will hold; only ``"fp8_ds_mla"`` changes the shape. Keys alone, of an
    indexer next to such latents, are bfloat16.
    """
    sizes = (num_blocks, block_size, num_kv_heads, head_size)
    shape = kv_cache_shape(layout, *sizes, value_head_size=value_head_size, kv_cache_dtype=kv_cache_dtype)
    check_storage(dtype, kv_cache_dtype)
    if value_head_size == 0:
        layout, dtype = Layout.LATENT, index_dtype(dtype, kv_cache_dtype)
    with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
        return kv_cache_view(layout, torch.zeros(shape, dtype=dtype, device=as_device(device), pin_memory=pin_memory))


def index_dtype(dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    """The dtype of an indexer's keys next to a cache of ``dtype``."""
    return torch.bfloat16 if has_row_scales(kv_cache_dtype) else dtype


def split_kv_cache(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> tuple[Tensor, Tensor]:
    """The x-packed pair ``[N, K, D/x, B, x]``, ``[N, K, D, B]`` as views of a flat cache ``[2, N, B*K*D]``.

    Call it inside the compiled function: two slices of one storage that enter a graph as two inputs are copied.
    """
    x = 16 // kv_cache.element_size()
    expect(kv_cache.dim() == 3 and kv_cache.shape[0] == 2, "kv_cache", "the flat cache [2, N, B*K*D]", kv_cache)
    expect(head_size % x == 0, "head_size", f"a multiple of x = {x} for {kv_cache.dtype}", head_size)
    row = num_kv_heads * head_size
    expect(
        kv_cache.shape[2] % row == 0, "kv_cache", f"a multiple of K*D = {row} in dimension 2 of [2, N, B*K*D]", kv_cache
    )
    N, B = kv_cache.shape[1], kv_cache.shape[2] // row
    key_cache = kv_cache[0].view(N, num_kv_heads, head_size // x, B, x)
    return key_cache, kv_cache[1].view(N, num_kv_heads, head_size, B)


def split_joined_cache(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys ``[N, B, K, D]`` and values ``[N, B, K, Dv]`` as views of a joined cache ``[N, B, K, D + Dv]``, any strides.

    Call it inside the compiled function, as :func:`split_kv_cache`.
    """
    expect(kv_cache.dim() == 4, "kv_cache", "the joined cache [N, B, K, D + Dv]", kv_cache)
    within = 1 <= head_size < kv_cache.shape[3]
    expect(within, "head_size", f"1 to {kv_cache.shape[3] - 1}, a part of D + Dv = {kv_cache.shape[3]}", head_size)
    return kv_cache[..., :head_size], kv_cache[..., head_size:]


_DEFAULTS = {"cpu": Layout.NHD, "cuda": Layout.NHD, "xla": Layout.INTERLEAVED}
_chosen: dict[torch.device, Layout] = {}  # a device without an index: all of its type


def get_default_layout(device: torch.device | str) -> Layout:
    """The layout of new caches on a device: the one that :func:`set_default_layout` chose for the device or for its
    type, else the default of its type."""
    device = as_device(device)
    of_type = _chosen.get(torch.device(device.type), _DEFAULTS.get(device.type, Layout.NHD))
    return _chosen.get(device, of_type)


def set_default_layout(layout: Layout | str | None, device: torch.device | str | None = None) -> None:
    """Choose the layout of new caches in this process; the layout None undoes an earlier choice.

    Args:
        layout: the layout of new caches on ``device``.
        device: ``"cuda:1"`` is that GPU only, ``"cuda"`` is all GPUs, None is all devices. A choice for several devices
            replaces earlier choices for single ones.
    """
    chosen = None if layout is None else _layout(layout)
    devices = [torch.device(kind) for kind in _DEFAULTS] if device is None else [as_device(device)]
    for each in devices:
        for known in [known for known in _chosen if each in (known, torch.device(known.type))]:
            del _chosen[known]
        if chosen is not None:
            _chosen[each] = chosen


def preferred_tpu_block_size(max_model_len: int) -> int:
    """Tokens per block that suit a TPU: ``max_model_len`` rounded up to a power of two, over 16, within 16..256."""
    (max_model_len,) = integers(1, max_model_len=max_model_len)
    return min(max(_next_power_of_two(max_model_len) // 16, 16), 256)


def min_tpu_block_size(max_model_len: int, max_num_seqs: int) -> int:
    """The fewest tokens per block at which the int32 block tables fit half of a TPU's 1 MiB of scalar memory.

    The power of two at or above ``max_model_len / (1 MiB / 2 / max_num_seqs / 4)``.
    """
    max_model_len, max_num_seqs = integers(1, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    blocks_per_seq = max(1, (1 << 20) // 2 // max_num_seqs // 4)
    return _next_power_of_two(-(-max_model_len // blocks_per_seq))


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _layout(layout: Layout | str) -> Layout:
    try:
        return Layout(layout)
    except ValueError:
        raise ValueError(f"layout: expected one of {[str(each) for each in Layout]}, got {layout!r}") from None


# What the fp8 names of kv_cache_dtype mean: the dtype of uint8 storage, and the float8 dtypes that agree with them
# (fnuz is the flavour of ROCm's gfx94x).
_FP8 = {
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "fp8_e5m2": (torch.float8_e5m2, torch.float8_e5m2fnuz),
}
FP8_DTYPES = (*_FP8["fp8_e4m3"], *_FP8["fp8_e5m2"])
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# The kv_cache_dtype of a latent cache whose rows hold their scales, and the parts of a row: see row_parts.
FP8_DS_MLA = "fp8_ds_mla"
ROW_LATENT, ROW_GROUP, ROW_ROTATED = 512, 128, 64  # columns, columns of one scale, columns
ROW_BYTES = ROW_LATENT + 4 * (ROW_LATENT // ROW_GROUP) + 2 * ROW_ROTATED
ROW_ALIGNMENT = 16  # bytes


# The kv_cache_dtype of an index cache [N, B, 132] of bytes, whose blocks hold a scale per token: see index_parts.
FP8_DS_INDEX = "fp8_ds_index"
INDEX_COLUMNS, INDEX_BYTES = 128, 132


def has_index_scales(kv_cache_dtype: str) -> bool:
    """Whether the blocks of an index cache hold a scale per token."""
    return kv_cache_dtype == FP8_DS_INDEX


def has_row_scales(kv_cache_dtype: str) -> bool:
    """Whether the rows of a latent cache hold scales of their own."""
    return kv_cache_dtype == FP8_DS_MLA


def stored_as(kv_cache: Tensor) -> str:
    """The ``kv_cache_dtype`` of a model's latent cache: uint8 means rows with scales."""
    return FP8_DS_MLA if kv_cache.dtype == torch.uint8 else "auto"


def check_storage(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    """Check that storage of ``dtype`` can hold the format ``kv_cache_dtype``."""
    _known(kv_cache_dtype)
    stored = (*MODEL_DTYPES, *FP8_DTYPES, torch.uint8)
    expect(dtype in stored, "dtype", "float32, float16, bfloat16, a float8 or uint8", describe_setting(dtype))
    whole = f"another format: a cache of {FP8_DS_INDEX!r} is allocated as uint8 [N, B, {INDEX_BYTES}]"
    expect(not has_index_scales(kv_cache_dtype), "kv_cache_dtype", whole, repr(kv_cache_dtype))
    if has_row_scales(kv_cache_dtype):
        expect(dtype == torch.uint8, "dtype", f"torch.uint8 with kv_cache_dtype={FP8_DS_MLA!r}", dtype)
    elif kv_cache_dtype != "auto":
        agreeing = (torch.uint8, *_FP8[kv_cache_dtype])
        expect(dtype in agreeing, "dtype", f"torch.uint8 or {agreeing[1]} ({kv_cache_dtype=})", dtype)


def element_dtype(kv_cache: Tensor, kv_cache_dtype: str, argument: str = "kv_cache") -> torch.dtype:
    """The dtype of a cache's elements: its own, or for uint8 storage the one that ``kv_cache_dtype`` names. Errors call
    the cache by the name of its ``argument``."""
    return dtype_of_elements(kv_cache.dtype, kv_cache_dtype, argument, kv_cache)


def dtype_of_elements(dtype: torch.dtype, kv_cache_dtype: str, argument: str, got: Any) -> torch.dtype:
    """:func:`element_dtype` of a cache of ``dtype``; errors show what they ``got``."""
    _known(kv_cache_dtype)
    if has_row_scales(kv_cache_dtype) or has_index_scales(kv_cache_dtype):
        expect(dtype == torch.uint8, argument, f"uint8 ({kv_cache_dtype=})", got)
        return torch.float8_e4m3fn  # of the columns with scales
    if kv_cache_dtype == "auto":
        allowed = (*MODEL_DTYPES, *FP8_DTYPES)
        expect(
            dtype in allowed,
            argument,
            "float32, float16, bfloat16 or float8 (uint8 needs kv_cache_dtype='fp8_e4m3' or 'fp8_e5m2')",
            got,
        )
        return dtype
    agreeing = _FP8[kv_cache_dtype]
    expect(dtype in (torch.uint8, *agreeing), argument, f"uint8 or {agreeing[0]} ({kv_cache_dtype=})", got)
    return agreeing[0] if dtype == torch.uint8 else dtype


def _known(kv_cache_dtype: str) -> None:
    names = ("auto", *_FP8, FP8_DS_MLA, FP8_DS_INDEX)
    expect(kv_cache_dtype in names, "kv_cache_dtype", f"one of {names}", repr(kv_cache_dtype))
