"""What an attention kernel is compiled for and called with, as values that kernels and helpers take as a whole.

``Pointers`` and ``Numbers`` change from call to call. The others are constants. A :class:`Spec` says what is computed
and how everything lies in memory, and is the same for all kernels of a call. Each kernel has a :class:`TileShape` of
its own. A :class:`Division` says which kernel serves which sequences. All are tuples with named fields, which every
Triton from 3.5 on takes as arguments and as constants. They have no properties, because Triton 3.8 converts a constant
to a tuple of its own.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import masks
from paged_ops.features import Features, dtype_name, in_use
from paged_ops.layouts import PagedKV, has_row_scales
from paged_ops.lowerings.gpu.fp8 import FP8_FORMATS, stored_format
from paged_ops.lowerings.gpu.target import Target

# Arguments of attention that become Masks.
MASK_ARGUMENTS = frozenset(
    {
        *("causal", "sliding_window", "attention_chunk", "block_sparse", "bidirectional_ranges", "num_first_tokens"),
    }
)
# Of a sequence, so that kernels can add a tile to it in int32.
MOST_FIRST_TOKENS = 2**30
# Keys of a slice: the rows of a matrix instruction.
SLICE = 16


class Pointers(NamedTuple):
    """What the kernels read and write: tensors if Triton launches, else their addresses. A kernel gets None for
    pointers that it does not use."""

    out: Any  # [T, H, Dv]
    lse: Any  # [T, H] float32
    parts: Any  # [P, 2, M, Dv] float32: of the units that began before a share (0), and that go on after it (1)
    part_lse: Any  # [P, 2, M] float32, to base 2
    taken: Any  # [4] int32 counters of hopper.py, which split_kernel zeroes
    arrived: Any  # [P, 12] int32 of parts.py: counters, zero before and after each call, and notes; None: not used
    query: Any  # [T, H, D]
    key_cache: Any  # [N, B, K, D/x, x]
    value_cache: Any  # [N, B, K, Dv]
    block_tables: Any  # [S, M]
    seq_lens: Any  # [S]
    query_start_loc: Any  # [S + 1]
    alibi_slopes: Any  # [H]
    sinks: Any  # [H]
    k_scale: Any  # [1] or [K]
    v_scale: Any  # [1] or [K]
    bidirectional_ranges: Any  # [S, R, 2]
    output_scale: Any  # [1]


# Tensors among the keyword arguments of attention, by their names.
OPTIONAL = Pointers._fields[Pointers._fields.index("alibi_slopes") :]


class Numbers(NamedTuple):
    """Arguments that are passed by value; kernels are not specialised on them."""

    scale: float
    soft_cap: float
    window: int
    chunk: int
    sparse_block: int
    local_blocks: int
    vert_stride: int
    first_offset: int  # of query head h: first_offset + h // heads_an_offset * offset_step
    offset_step: int
    table_stride: int
    S: int
    T: int


class Masks(NamedTuple):
    """Which keys a row sees. Defaults are neutral."""

    causal: bool = True
    window: bool = False
    chunk: bool = False
    ranges: int = 0  # R, the ranges per sequence; 0: none
    sparse: bool = False
    heads_an_offset: int = 1
    first: int = 0  # tokens of a sequence that a window does not hide; 0: none, or no window


class Logits(NamedTuple):
    """What changes the logits ``scale * q @ k``. Defaults are neutral."""

    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False


class Storage(NamedTuple):
    """The elements of a cache, without their strides and scales."""

    dtype: torch.dtype  # as kernels see it: torch.uint8 if they convert by bits
    format: int  # the format of fp8 bits, see fp8.py; 0: the dtype says it
    paired: bool  # whether two 8-bit elements can be read as one of 16 bits, and converted to float16 by instruction
    row_scales: bool = False  # whether rows hold scales and rotated columns of other types: see scaled_rows.py


class Side(NamedTuple):
    """How keys, or values, lie in the cache ``[N, B, K, D/x, x]``; strides in elements."""

    size: int  # of a head
    x: int  # elements of a head that are contiguous: all, if not packed
    run: int  # tokens that are contiguous; 1 if elements are
    n: int
    b: int
    k: int
    dx: int
    d: int
    scale: int | None  # stride from one head's scale to the next; 0: one scale for all; None: no scale


class Spec(NamedTuple):
    """What the attention kernels of a call compute, and in which memory."""

    masks: Masks
    logits: Logits
    storage: Storage
    dtype: torch.dtype  # of the queries
    out: torch.dtype  # fp8 is output / output_scale
    lse: bool  # whether it is returned
    K: int
    G: int
    B: int
    k_side: Side
    v_side: Side
    query: tuple[int, ...]  # strides t, h, d
    table: int  # stride m
    heads: int  # H; if heads are padded to groups, as in latent.py, less than K * G
    # Of a latent cache the columns of the keys that are no values; None: not latent. With row_scales: in bfloat16.
    rotated: Side | None

    def for_merge(self) -> Spec:
        """The part that merge_kernel needs, so that calls which differ in nothing else share a merge_kernel."""
        one = Side(self.v_side.size, 1, 1, 0, 0, 0, 0, 1, None)
        logits, storage = Logits(), Storage(torch.float32, 0, False)
        return self._replace(
            logits=logits,
            storage=storage,
            dtype=torch.float32,
            B=1,
            k_side=one,
            v_side=one,
            query=(),
            table=1,
            rotated=None,
        )


def needs(spec: Spec) -> frozenset[str]:
    """What a kernel must apply to compute a spec, by name: masks, changes of logits, the format of the cache, scales.
    That is every field that is not neutral, also one that is added later."""
    dtype, bits = spec.storage.dtype, spec.storage.format
    formats = {number: dtype_name(each) for each, number in FP8_FORMATS.items()}
    others = {
        "k_scale": spec.k_side.scale is not None,
        "v_scale": spec.v_side.scale is not None,
        "output_scale": spec.out != spec.dtype,
        "latent": spec.rotated is not None,
        dtype_name(dtype): not bits,
        f"bits of {formats.get(bits, bits)}": bits,
    }
    parts = spec, spec.masks, spec.logits, spec.storage, spec.k_side, spec.v_side
    return frozenset(name for name, needed in others.items() if needed).union(*map(in_use, parts))


def not_applied(spec: Spec, applied: frozenset[str]) -> list[str]:
    """The reasons against a kernel that applies no more than ``applied``."""
    return [f"{name}: not applied by this kernel" for name in sorted(needs(spec) - applied)]


class Shapes(NamedTuple):
    """What a launch depends on besides the spec: values that differ from step to step, or that a kernel cannot see."""

    T: int
    S: int
    N: int
    columns: int  # M of the block tables
    aligned: bool  # whether the first key and the first value lie at multiples of 16 bytes
    numbers: Numbers


class TileShape(NamedTuple):
    """The tile of a kernel: packed query rows, keys, padded head sizes, and slices (see see_slices; 0: not sliced)."""

    M: int
    N: int
    D: int
    Dv: int
    W: int
    paired: bool  # whether 8-bit keys and values are loaded in pairs
    heads: int = 1  # key/value heads of a unit, see join_heads


class Division(NamedTuple):
    """Which sequences split_kernel serves, and how their key tiles are split into shares.

    It serves sequences of at most ``rows`` packed query rows and more than ``short`` keys, or ``everyone``; those of
    more than ``long`` keys may have up to ``long_rows`` rows. A program counts ``at_once`` sequences in one vector,
    ``times`` times. Key tiles are numbered sequence by sequence; with ``heads_apart``, key/value head by head.
    ``whole``: the number of programs that take one unit each if units are about equally long; 0: never. ``aligned``:
    units that are all equally long stay whole if that makes shares at most 5% longer. ``start``: fixed cost per unit,
    modelled as empty tiles at its end.
    """

    rows: int
    everyone: bool
    short: int
    at_once: int
    times: int
    heads_apart: bool = False
    whole: int = 0
    aligned: bool = False
    start: int = 0
    long: int = 0
    long_rows: int = 0


def spec_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_format: int,
    block_tables: Tensor,
    sparse: masks.SparsePattern | None,
    f: Features,
    out: torch.dtype,
    lse: bool,
    latent: bool = False,
) -> Spec:
    """The spec of a call, with the caches as :func:`readable` returns them. ``latent``: values are parts of keys."""
    B, K = key.shape[1:3]
    H = query.shape[1]
    ranges = 0 if f.bidirectional_ranges is None else f.bidirectional_ranges.shape[1]
    key_scale, value_scale = (None if each is None else int(each.shape[0] > 1) for each in (f.k_scale, f.v_scale))
    D, Dv = key.shape[3] * key.shape[4], value.shape[3]
    key_n, key_b, key_k, key_dx, key_d = key.stride()
    n, b, k, d = value.stride()
    row_scales = has_row_scales(f.kv_cache_dtype)
    P, width = D - Dv, torch.bfloat16.itemsize if row_scales else 1  # elements of key in one of a rotated column
    return Spec(
        masks=Masks(
            bool(f.causal),
            f.sliding_window > 0,
            f.attention_chunk > 0,
            ranges,
            sparse is not None,
            H // K if sparse is not None and sparse.homo_head_group else 1,
            min(f.num_first_tokens, MOST_FIRST_TOKENS) if f.sliding_window > 0 else 0,
        ),
        logits=Logits(f.soft_cap > 0, f.alibi_slopes is not None, f.sinks is not None),
        storage=Storage(key.dtype, cache_format, _paired(query, key, value, cache_format), row_scales),
        dtype=query.dtype,
        out=out,
        lse=lse,
        K=K,
        G=H // K,
        B=max(B, 1),
        k_side=Side(D, key.shape[4], 1, key_n, key_b, key_k, key_dx, key_d, key_scale),
        v_side=Side(Dv, Dv, _run(value, max(B, 1)), n, b, k, 0, d, value_scale),
        query=query.stride(),
        table=block_tables.stride(1),
        heads=H,
        rotated=Side(P, P, 1, key_n // width, key_b // width, 0, 0, key_d, None) if latent else None,
    )


def numbers_of(
    f: Features, sparse: masks.SparsePattern | None, H: int, K: int, scale: float, table_stride: int, S: int, T: int
) -> Numbers:
    """Of a call."""
    first_offset, offset_step = 1, 0
    if sparse is not None and not sparse.homo_head:
        heads = K if sparse.homo_head_group else H
        offset_step = max(1, int(sparse.vert_stride / (sparse.world_size * heads)))
        first_offset = sparse.rank * heads * offset_step + 1
    window, chunk = spans(f.sliding_window, f.attention_chunk)
    block, local_blocks, vert_stride = (1, 0, 1) if sparse is None else sparse[:3]
    return Numbers(
        float(scale),
        float(f.soft_cap),
        window,
        chunk,
        block,
        local_blocks,
        vert_stride,
        first_offset,
        offset_step,
        table_stride,
        S,
        T,
    )


def spans(sliding_window: int, attention_chunk: int) -> tuple[int, int]:
    """A window and a chunk as kernels take them: clamped to int32, which positions are."""
    return min(sliding_window, 2**31 - 1), min(attention_chunk, 2**31 - 1)


def readable(paged: PagedKV, stored: torch.dtype, target: Target) -> tuple[Tensor, Tensor, int]:
    """Key and value views as a kernel reads them: fp8 in its own dtype if the target converts it, else as bits."""
    bits = stored_format(stored, paged.key.dtype, target)
    if not bits:
        return paged.key, paged.value, 0
    if target.has_fp8_cvt:
        return paged.key.view(stored), paged.value.view(stored), 0
    return paged.key.view(torch.uint8), paged.value.view(torch.uint8), bits


def can_slice(spec: Spec) -> bool:
    """Whether tiles can be divided into slices that lie in one block each, with elements as tensor cores take them."""
    return (
        torch.version.hip is None
        and spec.dtype.itemsize == 2
        and (spec.storage.paired or spec.storage.dtype == spec.dtype)
        and spec.B % SLICE == 0
        and spec.k_side.x == spec.k_side.size  # not packed
        and spec.v_side.run == 1
        and max(spec.k_side.b, spec.v_side.b) * SLICE < 2**31
    )


def has_adjacent_heads(spec: Spec) -> bool:
    """Whether the rows of two key/value heads are adjacent in each token, and have the same scales."""
    adjacent = (side.k == side.size and not side.scale for side in (spec.k_side, spec.v_side))
    return spec.K % 2 == 0 and all(adjacent)


def join_heads(spec: Spec, heads: int) -> Spec:
    """The spec of units of ``heads`` adjacent key/value heads, whose query heads form one group."""
    k_side, v_side = (side._replace(k=heads * side.k) for side in (spec.k_side, spec.v_side))
    return spec._replace(K=spec.K // heads, G=spec.G * heads, k_side=k_side, v_side=v_side)


def _run(value: Tensor, B: int) -> int:
    """How many tokens of a block are contiguous in ``value [N, B, K, Dv]``, up to 16 bytes; 1 if they are not."""
    stride_n, stride_b, stride_k, stride_d = value.stride()
    if stride_b != 1 or stride_d == 1:
        return 1
    return math.gcd(
        16 // value.element_size(), B, stride_n, stride_k, stride_d, value.data_ptr() // value.element_size()
    )


def _paired(query: Tensor, key: Tensor, value: Tensor, cache_format: int) -> bool:
    """See :class:`Storage`."""
    numbers = (key.shape[4], *key.stride()[:4], value.shape[3], *value.stride()[:3])
    return (
        key.element_size() == 1
        and cache_format == 0
        and query.element_size() == 2
        and key.shape[3] == key.stride(4) == value.stride(3) == 1
        and not any(number % 2 for number in (*numbers, key.data_ptr(), value.data_ptr()))
    )
