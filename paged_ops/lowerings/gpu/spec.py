"""The arguments and compile-time constants of attention kernels, grouped in tuples.

``Pointers`` and ``Numbers`` change from call to call. The others are constants. A :class:`Spec` describes the
computation and the memory layout, the same for all kernels of a call. A :class:`TileShape` is the tile of one kernel. A
:class:`Division` decides which kernel serves which sequences. All are NamedTuples, which Triton accepts from 3.5 on as
arguments and constants. They have no properties, because Triton 3.8 converts a constant to its own tuple type.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`.
"""

from __future__ import annotations

import ctypes
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
        "ranges_in_window",
        *("selected_keys", "selected_block_size"),
    }
)
# The maximum num_first_tokens, so that kernels can add a tile to it in int32.
MOST_FIRST_TOKENS = 2**30
# Keys of a slice: the rows of an MMA instruction.
SLICE = 16


class Pointers(NamedTuple):
    """The tensors of the kernels: tensors if Triton launches, otherwise addresses. None for a tensor that a kernel does
    not use."""

    out: Any  # [T, H, Dv]
    lse: Any  # [T, H] float32
    # [P, 2, M, Dv]: partial results of units that began before a share (0) or continue after it (1); numbers of the
    # output's dtype if TileShape.rounded, else float32. The tensor is float32.
    parts: Any
    part_lse: Any  # [P, 2, M] float32, lse of parts in base 2
    taken: Any  # [4] int32 work counters, zeroed by split_kernel
    arrived: Any  # [P, 12] int32 of split_merge.py: counters, zero before and after a call, and notes; None: not used
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
    selected_keys: Any  # [T, G, k]


# The tensors among the keyword arguments of attention.
OPTIONAL = Pointers._fields[Pointers._fields.index("alibi_slopes") :]


class Numbers(NamedTuple):
    """Arguments passed by value; kernels are not specialised on them."""

    scale: float
    soft_cap: float
    window: int
    chunk: int
    table_stride: int
    S: int
    T: int


class Pattern(NamedTuple):
    """A block-sparse pattern, see :class:`paged_ops.masks.SparsePattern`. Query head h has the offset
    ``first_offset + h // heads * offset_step``."""

    block: int = 1
    local_blocks: int = 0
    vert_stride: int = 1
    heads: int = 1
    first_offset: int = 1
    offset_step: int = 0


class Selection(NamedTuple):
    """The shape of ``selected_keys [T, heads, entries]``, and the keys of an entry."""

    heads: int = 1
    entries: int = 0
    block: int = 1


class Masks(NamedTuple):
    """The masks of a call. Defaults are neutral."""

    causal: bool = True
    window: bool = False
    chunk: bool = False
    ranges: int = 0  # R, the ranges per sequence; 0: none
    sparse: bool = False
    pattern: Pattern = Pattern()
    first: int = 0  # first tokens that stay visible with a window; 0: none, or no window
    selected: bool = False
    selection: Selection = Selection()
    later: bool = False  # ranges add only keys after the query


class Logits(NamedTuple):
    """Changes of the logits ``scale * q @ k``. Defaults are neutral."""

    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False


class Storage(NamedTuple):
    """The elements of a cache."""

    dtype: torch.dtype  # of the pointers: torch.uint8 if kernels convert fp8 bits themselves
    format: int  # the format of fp8 bits, see fp8.py; 0: given by dtype
    paired: bool  # whether two 8-bit elements can be loaded as 16 bits and converted to float16 by one instruction
    row_scales: bool = False  # whether rows have their own scales: see scaled_rows.py


class Side(NamedTuple):
    """The layout of keys, or values, in the cache ``[N, B, K, D/x, x]``; strides in elements."""

    size: int  # head size
    x: int  # contiguous elements of a head: all, if not packed
    run: int  # contiguous tokens; 1 if elements are contiguous
    n: int
    b: int
    k: int
    dx: int
    d: int
    scale: int | None  # stride from one head's scale to the next; 0: one scale for all; None: no scale


class Spec(NamedTuple):
    """The computation and memory layout of a call."""

    masks: Masks
    logits: Logits
    storage: Storage
    dtype: torch.dtype  # of the queries
    out: torch.dtype  # fp8 is output / output_scale
    lse: bool  # whether lse is returned
    K: int
    G: int
    B: int
    k_side: Side
    v_side: Side
    query: tuple[int, ...]  # strides t, h, d
    table: int  # stride m
    heads: int  # H; less than K * G if heads are padded to groups, as in latent.py
    # The rotated columns of a latent cache (in bfloat16 with row_scales); None: not latent.
    rotated: Side | None
    batch_invariant: bool = False
    groups: int = 1  # of query heads that share a key/value head; more than one: K counts groups, see divide_heads

    def for_merge(self) -> Spec:
        """The fields that merge_kernel uses; others are reset, so that calls share a merge_kernel."""
        one = Side(self.v_side.size, 1, 1, 0, 0, 0, 0, 1, None)
        logits, storage = Logits(), Storage(torch.float32, 0, False)
        return self._replace(
            masks=self.masks._replace(sparse=False, pattern=Pattern(), selected=False, selection=Selection()),
            logits=logits,
            storage=storage,
            dtype=torch.float32,
            B=1,
            k_side=one,
            v_side=one,
            query=(),
            table=1,
            rotated=None,
            groups=1,
        )


def needs(spec: Spec) -> frozenset[str]:
    """The names of everything that a kernel must support to serve a spec: masks, changes of logits, the cache format,
    scales. Every field that is not neutral counts, including future fields."""
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
    """The reasons against a kernel that supports only ``applied``."""
    return [f"{name}: not applied by this kernel" for name in sorted(needs(spec) - applied)]


class Shapes(NamedTuple):
    """Inputs of a launch besides the spec: values that change from step to step, or that kernels do not need."""

    T: int
    S: int
    N: int
    columns: int  # M of the block tables
    aligned: bool  # whether the first key and the first value are aligned to 16 bytes
    numbers: Numbers


class TileShape(NamedTuple):
    """The tile of a kernel: packed query rows, keys, padded head sizes, and slices (0: not sliced)."""

    M: int
    N: int
    D: int
    Dv: int
    W: int
    paired: bool  # whether 8-bit keys and values are loaded in pairs
    heads: int = 1  # key/value heads of a unit, see join_heads
    converts: bool = True  # whether bfloat16 queries over an fp8 cache become float16, else the cache bfloat16
    rounded: bool = False  # whether parts have the output's dtype, else float32


class Division(NamedTuple):
    """The sequences that split_kernel serves, and the split of their key tiles into shares.

    It serves sequences with at most ``rows`` packed query rows and more than ``short`` keys, or ``everyone``; sequences
    with more than ``long`` keys may have up to ``long_rows`` rows. A program counts ``at_once`` sequences in one
    vector, ``times`` times. Key tiles are numbered sequence by sequence; with ``heads_apart``, key/value head by head.
    ``whole``: the number of programs that take one unit each if units have about equal lengths; 0: never. ``aligned``:
    units of equal length stay whole, or are cut into at most so many equal pieces, if that makes shares at most 5%
    longer. ``start``: fixed cost per unit, modelled as empty tiles at its end.
    """

    rows: int
    everyone: bool
    short: int
    at_once: int
    times: int
    heads_apart: bool = False
    whole: int = 0
    aligned: int = 0
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
    """The spec of a call, with caches from :func:`readable`. ``latent``: values are columns of keys."""
    B, K = key.shape[1:3]
    H = query.shape[1]
    ranges = 0 if f.bidirectional_ranges is None else f.bidirectional_ranges.shape[1]
    key_scale, value_scale = (None if each is None else int(each.shape[0] > 1) for each in (f.k_scale, f.v_scale))
    D, Dv = key.shape[3] * key.shape[4], value.shape[3]
    key_n, key_b, key_k, key_dx, key_d = key.stride()
    n, b, k, d = value.stride()
    selection = Selection()
    if f.selected_keys is not None:
        _, heads, entries = f.selected_keys.shape
        selection = Selection(heads, entries, f.selected_block_size)
    row_scales = has_row_scales(f.kv_cache_dtype)
    P, width = D - Dv, torch.bfloat16.itemsize if row_scales else 1  # elements of key per rotated element
    return Spec(
        masks=Masks(
            bool(f.causal),
            f.sliding_window > 0,
            f.attention_chunk > 0,
            ranges,
            sparse is not None,
            Pattern() if sparse is None else pattern_of(sparse, H, K),
            min(f.num_first_tokens, MOST_FIRST_TOKENS) if f.sliding_window > 0 else 0,
            f.selected_keys is not None,
            selection,
            f.ranges_in_window and ranges > 0,
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
        batch_invariant=f.batch_invariant,
    )


def pattern_of(sparse: masks.SparsePattern, H: int, K: int) -> Pattern:
    """The pattern of a call with H query heads and K key/value heads."""
    first_offset, offset_step = 1, 0
    if not sparse.homo_head:
        heads = K if sparse.homo_head_group else H
        offset_step = max(1, int(sparse.vert_stride / (sparse.world_size * heads)))
        first_offset = sparse.rank * heads * offset_step + 1
    return Pattern(*sparse[:3], H // K if sparse.homo_head_group else 1, first_offset, offset_step)


def numbers_of(f: Features, scale: float, table_stride: int, S: int, T: int) -> Numbers:
    """The numbers of a call. ``scale`` is the float32 that kernels get: where it rounds to 0, it is not positive."""
    spans_ = spans(f.sliding_window, f.attention_chunk)
    return Numbers(ctypes.c_float(scale).value, float(f.soft_cap), *spans_, table_stride, S, T)


def spans(sliding_window: int, attention_chunk: int) -> tuple[int, int]:
    """A window and a chunk clamped to int32, the type of positions in kernels."""
    return min(sliding_window, 2**31 - 1), min(attention_chunk, 2**31 - 1)


def readable(paged: PagedKV, stored: torch.dtype, target: Target) -> tuple[Tensor, Tensor, int]:
    """Key and value views for a kernel, and their fp8 format: 0, with fp8 dtypes, if the target converts fp8."""
    bits = stored_format(stored, paged.key.dtype, target)
    if not bits:
        return paged.key, paged.value, 0
    if target.has_fp8_cvt:
        return paged.key.view(stored), paged.value.view(stored), 0
    return paged.key.view(torch.uint8), paged.value.view(torch.uint8), bits


def can_slice(spec: Spec) -> bool:
    """Whether tiles can be divided into slices within one block each, with elements that tensor cores accept."""
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
    """Whether two key/value heads are adjacent in each token and have the same scales."""
    adjacent = (side.k == side.size and not side.scale for side in (spec.k_side, spec.v_side))
    return spec.K % 2 == 0 and spec.groups == 1 and all(adjacent)


def join_heads(spec: Spec, heads: int) -> Spec:
    """The spec with groups of ``heads`` adjacent key/value heads treated as one head."""
    k_side, v_side = (side._replace(k=heads * side.k) for side in (spec.k_side, spec.v_side))
    return spec._replace(K=spec.K // heads, G=spec.G * heads, k_side=k_side, v_side=v_side)


def divide_heads(spec: Spec, most: int) -> Spec:
    """The spec with the query heads of a key/value head in groups of at most ``most``, which are served like heads."""
    groups = next(n for n in range(1, spec.G + 1) if spec.G % n == 0 and spec.G // n <= most)
    return spec._replace(K=spec.K * groups, G=spec.G // groups, groups=groups)


def _run(value: Tensor, B: int) -> int:
    """The number of contiguous tokens in a block of ``value [N, B, K, Dv]``, up to 16 bytes; 1 if not contiguous."""
    stride_n, stride_b, stride_k, stride_d = value.stride()
    if stride_b != 1 or stride_d == 1:
        return 1
    return math.gcd(
        16 // value.element_size(), B, stride_n, stride_k, stride_d, value.data_ptr() // value.element_size()
    )


def _paired(query: Tensor, key: Tensor, value: Tensor, cache_format: int) -> bool:
    """``Storage.paired``."""
    numbers = (key.shape[4], *key.stride()[:4], value.shape[3], *value.stride()[:3])
    return (
        key.element_size() == 1
        and cache_format == 0
        and query.element_size() == 2
        and key.shape[3] == key.stride(4) == value.stride(3) == 1
        and not any(number % 2 for number in (*numbers, key.data_ptr(), value.data_ptr()))
    )
