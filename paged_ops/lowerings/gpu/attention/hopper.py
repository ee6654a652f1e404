"""Prefill on Hopper (sm_90) in Gluon: what ``prefill_kernel`` of prefill.py computes, at the speed of the tensor cores.
It also takes sequences of few tokens in the same batch, or with many query heads per key/value head.

One program per multiprocessor takes items, which are tiles of query rows of one key/value head, the longest first. A
scheduler of four warps takes items and fetches their query rows ahead. A producer warp brings keys and values to shared
memory by TMA, one block of the cache at a time. Two consumer warpgroups multiply, with half of the rows each: while the
tensor cores multiply the values of one tile of keys, the softmax of the next tile runs. docs/gpu-attention.md has the
designs that were measured.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D head size, B tokens per block. A tile has
BLOCK_M packed query rows (row r is token ``r // G``, head ``r % G``) and BLOCK_N keys. Tiles are kept as groups of 8
rows by 64 columns, all columns of 8 rows together: PAGE keys of a block are contiguous, and one copy brings them whole.

Serves causal or not, sliding windows, attention chunks, bidirectional ranges, soft cap, sinks and lse, float16 and
bfloat16, D of 64, 128 or 256, caches with rows that TMA can address. The Triton kernel serves everything else, with the
same results. Ideas: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.attention import decode, tuning
from paged_ops.lowerings.gpu.attention.hopper_items import FIELDS, producer, scheduler
from paged_ops.lowerings.gpu.attention.hopper_rows import consumer
from paged_ops.lowerings.gpu.gluon_names import reinterpret
from paged_ops.lowerings.gpu.launch import Grid, Launch, Launcher, Plan, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Pointers, Shapes, Side, Spec
from paged_ops.lowerings.gpu.target import Target

BLOCK_M = 128
BLOCK_N = {64: 128, 128: 128, 256: 64}
STAGES = {64: 4, 128: 2, 256: 2}  # of K and of V: as many as shared memory holds beside the query
SLOTS = {64: 2, 128: 2, 256: 1}  # tiles of query rows, fetched ahead
SHORT = 4096  # keys that one program reads in less than 50 µs
MANY_ROWS = 64  # from so many packed query rows on, split_kernel would take twice the time
SHORT_OF_MANY_ROWS = 8192  # keys, with so many rows


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    key, value = spec.k_side, spec.v_side
    against = {
        "kv_cache: latent": spec.rotated is not None,
        "alibi_slopes": spec.logits.alibi,
        "block_sparse": spec.masks.sparse,
        "k_scale": key.scale is not None,
        "v_scale": value.scale is not None,
        "output_scale": spec.out != spec.dtype,
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected {spec.dtype}, got {spec.storage.dtype}": spec.storage.dtype != spec.dtype,
        f"head_size: expected one of {(*STAGES,)}, got {value.size}": value.size not in STAGES,
        "value_head_size: expected that of the keys": key.size != value.size,
        f"num_heads: expected at most {BLOCK_M} a key/value head, got {spec.G}": spec.G > BLOCK_M,
        "query: expected the elements of a head side by side": spec.query[2] != 1,
        "kv_cache: expected values that lie as the keys do": (key.n, key.b, key.k) != (value.n, value.b, value.k),
        "kv_cache: expected rows that TMA can address": key.x != key.size or _matrix(key, spec) is None,
    }
    return [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Plan | None:
    """Launches that serve a batch; None if this kernel would take none of its sequences, or if the call forbids it."""
    tile_plan = tuning.plan_of(spec, target, shapes.T, shapes.S)
    short = _short_of(tile_plan, spec, target, shapes.T, shapes.S)
    if tile_plan.all_split and short < 0:
        return None
    # The maximum is taken before scaling. The producer reads the first entry of a table even if there are no keys.
    if shapes.numbers.scale <= 0 or not shapes.columns or not shapes.aligned or not 0 < _rows(spec, shapes.N) < 1 << 31:
        return None
    D = spec.v_side.size
    page = min(spec.B & -spec.B, BLOCK_N[D])
    matrix = _matrix(spec.v_side, spec)
    assert matrix is not None, "serves() said so"
    copied = bool(spec.query[0] % 16 or spec.query[1] % 16)
    division = tuning.division(tile_plan.split.block_m, shapes.S, short)
    constants = {
        "SPEC": spec._replace(query=(spec.K * spec.G * D, D, 1)) if copied else spec,
        "DIVISION": division._replace(short=0, times=0),  # these two are not constants here
        "SHAPE": HopperShape(BLOCK_M, BLOCK_N[D], page, STAGES[D], SLOTS[D], *matrix),
        "num_warps": 4,
    }
    tokens, K, most = BLOCK_M // spec.G, spec.K, target.processors

    def grid(numbers: Numbers) -> Grid:
        return min((numbers.T // tokens + numbers.S) * K, most), 1, 1

    launch = HopperLaunch(
        launcher_of(prefill_kernel, constants, target.device), grid, short, copied, spec, shapes.N, page
    )
    return decode.plan_around((launch,), spec, target, shapes, division, counted=True)


def depends_on(tile_plan: tuning.Plan, spec: Spec, target: Target, T: int, S: int) -> Any:
    """As in decode.py."""
    return _short_of(tile_plan, spec, target, T, S)


def _short_of(tile_plan: tuning.Plan, spec: Spec, target: Target, T: int, S: int) -> int:
    items = 0 if tile_plan.all_split else T * spec.G // BLOCK_M * spec.K
    return short_keys(tile_plan.split.block_m, S * spec.K, items, target.processors)


def short_keys(rows: int, units: int, items: int, processors: int) -> int:
    """This kernel also takes sequences of at most so many keys whose rows fit split_kernel's tiles; -1: none.

    Args:
        rows: packed query rows of split_kernel's tiles. With many (large groups, wide speculation) products decide.
        units: key/value heads of all sequences. Too few would not keep the programs busy.
        items: tiles of query rows of all sequences that split_kernel cannot take. If there are many, some programs read
            the keys of short sequences meanwhile; if there are few, short sequences would only end late.
        processors: multiprocessors of the device, each with one program.
    """
    if rows >= MANY_ROWS and 3 * units >= processors:
        return SHORT_OF_MANY_ROWS
    return SHORT if items >= 3 * processors else -1


class Matrix(NamedTuple):
    """A side of the cache as a matrix whose rows are tokens of a block, as TMA addresses it."""

    rows_n: int  # between blocks
    rows_head: int  # between heads
    columns_head: int


def _matrix(side: Side, spec: Spec) -> Matrix | None:
    """The matrix of a side; None if TMA cannot address it in groups of 8 rows by 64 columns."""
    aligned = 16 // spec.storage.dtype.itemsize
    if side.d != 1 or spec.B % 8 or side.b % aligned or side.n % (8 * side.b):
        return None
    if spec.K == 1 or (side.k < side.b and side.k % 64 == 0):
        return Matrix(side.n // side.b, 0, side.k)
    if side.k % (8 * side.b) == 0:
        return Matrix(side.n // side.b, side.k // side.b, 0)
    return None


def _rows(spec: Spec, N: int) -> int:
    """The number of rows of the matrix of a cache of N blocks."""
    matrix = _matrix(spec.v_side, spec)
    assert matrix is not None, "serves() said so"
    return (N - 1) * matrix.rows_n + (spec.K - 1) * matrix.rows_head + spec.B


class HopperShape(NamedTuple):
    """The tile, how it is brought, and the cache's :class:`Matrix`."""

    M: int
    N: int
    page: int  # keys that one copy brings
    stages: int
    slots: int
    rows_n: int
    rows_head: int
    columns_head: int


class Address:
    """A base for a tensor descriptor that only has an address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


QUERY, KEYS, VALUES = map(Pointers._fields.index, ("query", "key_cache", "value_cache"))
# The pointers that the kernel does not get.
NOT_TAKEN = (
    "parts",
    "part_lse",
    "arrived",
    "key_cache",
    "value_cache",
    "alibi_slopes",
    "k_scale",
    "v_scale",
    "output_scale",
)


class HopperLaunch(Launch):
    """Adds to :class:`Launch` the descriptors of the cache, ``short``, and the requirement that query rows lie at
    multiples of 16 bytes, as they are copied by 16 bytes."""

    __slots__ = ("_N", "_copied", "_page", "_short", "_spec")

    def __init__(self, launcher: Launcher, grid: Any, short: int, copied: bool, spec: Spec, N: int, page: int) -> None:
        super().__init__(launcher, grid, NOT_TAKEN)
        self._short, self._copied, self._spec, self._N, self._page = short, copied, spec, N, page

    def at(self, addresses: tuple[int, ...], numbers: Numbers) -> bool:
        described = self._launcher.kept.get(self._N)  # of a cache of so many blocks, after the first call
        if described is None or self._copied or addresses[QUERY] & 15:
            return False
        key, value = described
        descriptors = moved(key, addresses[KEYS]), moved(value, addresses[VALUES])
        return self._launcher.at(self.grid(numbers), addresses, numbers, self._short, *descriptors)

    def __call__(self, tensors: Pointers, numbers: Numbers, addresses: tuple[int, ...]) -> None:
        query = tensors.query
        if self._copied:
            query = query.clone(memory_format=torch.contiguous_format)
        elif addresses[QUERY] & 15:
            query = query.new_empty_strided(query.shape, query.stride()).copy_(query)
        caches = tensors.key_cache.squeeze(3), tensors.value_cache
        descriptors = [describe(each, self._spec, self._page) for each in caches]
        # A base would keep the cache alive.
        self._launcher.kept[self._N] = tuple({**vars(each), "base": None} for each in descriptors)
        taken = self._taken(tensors._replace(query=query))
        addresses = (*addresses[:QUERY], query.data_ptr(), *addresses[QUERY + 1 :])
        self._launcher(self.grid(numbers), taken, numbers, self._short, *descriptors, addresses=addresses)


def describe(cache: Tensor, spec: Spec, page: int) -> TensorDescriptor:
    """``[N, B, K, D]`` in groups of 8 rows by 64 columns, of which one copy brings ``page`` tokens of one head."""
    side, (N, _, K, D), matrix = spec.v_side, cache.shape, _matrix(spec.v_side, spec)
    assert matrix is not None, "serves() said so"
    shape = _rows(spec, N) // 8, ((K - 1) * matrix.columns_head + D) // 64, 8, 64
    groups = cache.as_strided(shape, (8 * side.b, 64, side.b, 1))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(groups, list(shape), list(groups.stride()), [page // 8, D // 64, 8, 64], layout)


def moved(described: dict[str, Any], address: int) -> TensorDescriptor:
    """The same descriptor for a cache at another address; Triton's checks of new descriptors need not be repeated."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(described, base=Address(address))
    return descriptor


@gluon.constexpr_function
def tile_layout(rows, D):
    """Groups of 8 rows by 64 columns, swizzled. A row of groups has all columns, as copies bring them."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    bases += [[0, 64 << n] for n in range((D // 64).bit_length() - 1)]
    bases += [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, [], 1024)


class Shared(NamedTuple):
    """The contents of shared memory: the fields of items, tiles of query rows, keys and values; and for each, barriers
    that say that it has arrived, and that its place is free."""

    items: Any
    item_full: Any
    item_empty: Any
    q_groups: Any  # the query rows as the scheduler fetches them
    q_tiles: Any  # the same, as they are multiplied
    k_pages: Any  # the keys as the producer brings them
    k_tiles: Any
    k_full: Any
    k_empty: Any
    v_pages: Any
    v_tiles: Any
    v_full: Any
    v_empty: Any
    v_clean: Any  # barriers: values that no row may see are zeroed


@gluon.jit
def first_consumer(tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    consumer(0, tensors, numbers, shared, SPEC, SHAPE)


@gluon.jit
def second_consumer(tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    consumer(1, tensors, numbers, shared, SPEC, SHAPE)


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """``number`` barriers, each of which waits for ``arrivals``."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(number):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit(do_not_specialize=(*Numbers._fields, "short"))
def prefill_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    short, k_desc, v_desc, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    D: gl.constexpr = SPEC.v_side.size
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    CONSUMER: gl.constexpr = 216 if SPEC.logits.soft_cap else 208
    REGISTERS: gl.constexpr = (224, 224, 24) if D == 256 else (CONSUMER, CONSUMER, 40)
    copy_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    group_layout: gl.constexpr = tile_layout(8, D)
    q_layout: gl.constexpr = tile_layout(M // 2, D)
    kv_layout: gl.constexpr = tile_layout(N, D)
    pages: gl.constexpr = STAGES * (N // PAGE)
    q_groups = gl.allocate_shared_memory(dtype, [SLOTS * (M // 8), 8, D], group_layout)
    k_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
    v_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
    q_tiles = reinterpret(q_groups, dtype, [SLOTS * 2, M // 2, D], q_layout)
    k_tiles = reinterpret(k_pages, dtype, [STAGES, N, D], kv_layout)
    v_tiles = reinterpret(v_pages, dtype, [STAGES, N, D], kv_layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], mbarrier.MBarrierLayout())
    # One for each item's newest tile of values, and, with a window or chunk, one for its oldest.
    CLEAN: gl.constexpr = SLOTS * (2 if SPEC.masks.window or SPEC.masks.chunk else 1)
    shared = Shared(
        items, barriers(SLOTS, 1), barriers(SLOTS, 3), q_groups, q_tiles, k_pages, k_tiles, barriers(STAGES, 1),
        barriers(STAGES, 2), v_pages, v_tiles, barriers(STAGES, 1), barriers(STAGES, 2), barriers(CLEAN, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (scheduler, (tensors, numbers, short, shared, SPEC, DIVISION, SHAPE)),
            (first_consumer, (tensors, numbers, shared, SPEC, SHAPE)),
            (second_consumer, (tensors, numbers, shared, SPEC, SHAPE)),
            (producer, (k_desc, v_desc, tensors.block_tables, numbers.table_stride, shared, SPEC, SHAPE)),
        ],
        [4, 4, 1],
        REGISTERS,
    )
