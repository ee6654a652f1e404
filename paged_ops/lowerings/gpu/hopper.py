"""Prefill on Hopper (sm_90) in Gluon: what ``prefill_kernel`` of prefill.py does, where tensor cores set the pace; and
sequences of few tokens beside it, or of many heads a key/value head.

One program a multiprocessor takes items: a tile of query rows of one key/value head, longest first. A scheduler of four
warps takes them and fetches query rows ahead, a producer warp brings keys and values to shared memory by TMA, block of
the cache by block, and two consumer warpgroups of half the rows each multiply: while the tensor cores take the values
of one tile of keys, the softmax of the next runs beside them. docs/gpu-attention.md has the designs that were measured.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D head size, B tokens a block. A tile has
BLOCK_M packed query rows (row r is token ``r // G``, head ``r % G``) and BLOCK_N keys. Tiles are kept as groups of 8
rows by 64 columns, all columns of 8 rows together: PAGE keys of a block are contiguous, and one copy brings them whole.

Serves causal or not, sliding windows, attention chunks, bidirectional ranges, soft cap, sinks and lse, float16 and
bfloat16, D of 64, 128 or 256, caches with rows that TMA can address; all else takes the Triton kernel, which has the
same numbers. Ideas: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu import decode, tiles
from paged_ops.lowerings.gpu.device import Target
from paged_ops.lowerings.gpu.features import oldest_key
from paged_ops.lowerings.gpu.gluon_names import load_box, load_rows, reinterpret
from paged_ops.lowerings.gpu.launch import Launch, Launcher, Plan, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Pointers, Shapes, Side, Spec

BLOCK_M = 128
BLOCK_N = {64: 128, 128: 128, 256: 64}
STAGES = {64: 4, 128: 2, 256: 2}  # of K and of V, what shared memory holds beside the query
SLOTS = {64: 2, 128: 2, 256: 1}  # tiles of query rows, fetched ahead
SHORT = 4096  # keys that one program reads in less than 50 µs
MANY_ROWS = 64  # packed query rows of a sequence: split_kernel would take twice the time
SHORT_OF_MANY_ROWS = 8192  # keys, where that is so


def serves(spec: Spec, target: Target) -> list[str]:
    """Why not these calls; none: it does."""
    key, value = spec.k_side, spec.v_side
    against = {
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
    """What serves a batch if this kernel has some of its sequences; None if not, or if what is no constant forbids."""
    tile_plan = tiles.plan_of(spec, target, shapes.T, shapes.S)
    items = 0 if tile_plan.all_split else shapes.T * spec.G // BLOCK_M * spec.K
    short = short_keys(tile_plan.split.block_m, shapes.S * spec.K, items, target.processors)
    if tile_plan.all_split and short < 0:
        return None
    # The maximum is taken before the scale. The producer reads the first entry of a table even for no keys.
    if shapes.numbers.scale <= 0 or not shapes.columns or not shapes.aligned or not 0 < _rows(spec, shapes.N) < 1 << 31:
        return None
    D = spec.v_side.size
    page = min(spec.B & -spec.B, BLOCK_N[D])
    matrix = _matrix(spec.v_side, spec)
    assert matrix is not None, "serves() said so"
    copied = bool(spec.query[0] % 16 or spec.query[1] % 16)
    division = tiles.division(tile_plan.split.block_m, shapes.S, short)
    constants = {
        "SPEC": spec._replace(query=(spec.K * spec.G * D, D, 1)) if copied else spec,
        "DIVISION": division._replace(short=0, times=0),  # neither is a constant here
        "SHAPE": HopperShape(BLOCK_M, BLOCK_N[D], page, STAGES[D], SLOTS[D], *matrix),
        "num_warps": 4,
    }
    num_tiles = shapes.T // (BLOCK_M // spec.G) + shapes.S
    grid = (min(num_tiles * spec.K, target.processors), 1, 1)
    launch = HopperLaunch(launcher_of(prefill_kernel, constants, target.device), grid, short, copied, spec, page)
    return decode.plan_around((launch,), spec, target, shapes, division, counted=True)


def short_keys(rows: int, units: int, items: int, processors: int) -> int:
    """Sequences of at most so many keys are this kernel's even if their rows fit split_kernel's tiles; -1: none.

    Args:
        rows: packed query rows of split_kernel's tiles. Many (large groups, wide speculation) are bound by products.
        units: key/value heads of all sequences. Too few would not keep the programs busy.
        items: tiles of query rows of all sequences that split_kernel cannot take. If there is much to compute, some
            programs read the keys of short sequences meanwhile; with little these would only be late.
        processors: of the device, each with one program.
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
    """None if TMA cannot address it in groups of 8 rows by 64 columns."""
    aligned = 16 // spec.storage.dtype.itemsize
    if side.d != 1 or spec.B % 8 or side.b % aligned or side.n % (8 * side.b):
        return None
    if spec.K == 1 or (side.k < side.b and side.k % 64 == 0):
        return Matrix(side.n // side.b, 0, side.k)
    if side.k % (8 * side.b) == 0:
        return Matrix(side.n // side.b, side.k // side.b, 0)
    return None


def _rows(spec: Spec, N: int) -> int:
    """Of the matrix of a cache of N blocks."""
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
    """A base of a tensor descriptor that has nothing but a place."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


QUERY, KEYS, VALUES = map(Pointers._fields.index, ("query", "key_cache", "value_cache"))
# Pointers that the kernel is not given.
NOT_TAKEN = ("parts", "part_lse", "key_cache", "value_cache", "alibi_slopes", "k_scale", "v_scale", "output_scale")


class HopperLaunch(Launch):
    """With what :class:`Launch` has not: descriptors of the cache, ``short``, and query rows at multiples of 16 bytes,
    which is how they are copied."""

    __slots__ = ("_copied", "_described", "_page", "_short", "_spec")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int, int], short: int, copied: bool, spec: Spec, page: int
    ) -> None:
        super().__init__(launcher, grid, NOT_TAKEN)
        self._short, self._copied, self._spec, self._page = short, copied, spec, page
        self._described: tuple[dict[str, Any], ...] = ()  # keys and values, once they were seen

    def at(self, addresses: tuple[int, ...], numbers: Numbers) -> bool:
        if not self._described or self._copied or addresses[QUERY] & 15:
            return False
        key, value = self._described
        descriptors = _moved(key, addresses[KEYS]), _moved(value, addresses[VALUES])
        return self._launcher.at(self._grid, addresses, numbers, self._short, *descriptors)

    def __call__(self, tensors: Pointers, numbers: Numbers, addresses: tuple[int, ...]) -> None:
        query = tensors.query
        if self._copied:
            query = query.clone(memory_format=torch.contiguous_format)
        elif addresses[QUERY] & 15:
            query = query.new_empty_strided(query.shape, query.stride()).copy_(query)
        caches = tensors.key_cache.squeeze(3), tensors.value_cache
        descriptors = [describe(each, self._spec, self._page) for each in caches]
        self._described = tuple(vars(each) for each in descriptors)
        taken = self._taken(tensors._replace(query=query))
        addresses = (*addresses[:QUERY], query.data_ptr(), *addresses[QUERY + 1 :])
        self._launcher(self._grid, taken, numbers, self._short, *descriptors, addresses=addresses)


def describe(cache: Tensor, spec: Spec, page: int) -> TensorDescriptor:
    """``[N, B, K, D]`` in groups of 8 rows by 64 columns, of which one copy brings ``page`` tokens of one head."""
    side, (N, _, K, D), matrix = spec.v_side, cache.shape, _matrix(spec.v_side, spec)
    assert matrix is not None, "serves() said so"
    shape = _rows(spec, N) // 8, ((K - 1) * matrix.columns_head + D) // 64, 8, 64
    groups = cache.as_strided(shape, (8 * side.b, 64, side.b, 1))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(groups, list(shape), list(groups.stride()), [page // 8, D // 64, 8, 64], layout)


def _moved(described: dict[str, Any], address: int) -> TensorDescriptor:
    """The same of a cache that lies elsewhere; what Triton checks of a new descriptor holds of this one."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(described, base=Address(address))
    return descriptor


@gluon.constexpr_function
def tile_layout(rows, D):
    """Groups of 8 rows by 64 columns, swizzled; in a row of groups all columns, as copies bring them."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    bases += [[0, 64 << n] for n in range((D // 64).bit_length() - 1)]
    bases += [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, [], 1024)


LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# What the scheduler tells the others of an item, by its place.
KV_HEAD, SEQUENCE, ROW_START, Q_LEN, SEQ_LEN = (gl.constexpr(n) for n in range(5))
FIRST_TOKEN, COUNT, END_TILE, FULL_START, FULL_END = (gl.constexpr(n) for n in range(5, 10))
FIELDS = gl.constexpr(10)
# What a key of few rows counts against one of a whole tile when programs are divided: half of it, or half more, lost.
LIGHT = gl.constexpr(0.45)


class Shared(NamedTuple):
    """What lies in shared memory: the fields of items, tiles of query rows, keys and values, and for each the barriers
    that say that it is there and that its place is free."""

    items: Any
    item_full: Any
    item_empty: Any
    q_groups: Any  # the query rows as the scheduler fetches them
    q_tiles: Any  # and as they are multiplied
    k_pages: Any  # the keys as the producer brings them
    k_tiles: Any
    k_full: Any
    k_empty: Any
    v_pages: Any
    v_tiles: Any
    v_full: Any
    v_empty: Any
    v_clean: Any  # rows of values that no row may see are zeroed


@gluon.jit
def softmax_tile(
    qk, m, factor, cap, i, low, j, seq_len,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """p (unnormalised), m, each thread's sum of p and the decay of what came before; base 2, the scale folded into one
    multiply-add."""
    if SOFT_CAP:  # cap[0] * tanh(cap[1] * qk), in base 2
        qk = cap[0] - 2.0 * cap[0] / (gl.exp2(qk * cap[1]) + 1.0)
    if MASKED:
        kept = j[None, :] < seq_len
        if CAUSAL:
            kept = kept & (j[None, :] <= i[:, None])
        if BOUNDED:
            kept = kept & (j[None, :] >= low[:, None])
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * factor
    p = gl.exp2(qk * factor - shift[:, None])
    decay = gl.exp2(m * factor - shift)
    # of the columns that a thread has: the threads of a row add up at the end
    sums = gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return p, m_new, sums, decay


@gluon.jit
def reach_of_ranges(ranges, s, first_i, last_i, low, end, RANGES: gl.constexpr):
    """Widen the keys ``low : end`` of queries first_i to last_i of sequence s by the bidirectional ranges that hold one
    of them. All these hold the query's own key: what it sees stays one interval."""
    for n in range(RANGES):
        at = ranges + (s.to(gl.int64) * RANGES + n) * 2
        start = gl.load(at)
        stop = gl.load(at + 1)
        holds = (start >= 0) & (start < stop) & (start <= last_i) & (stop > first_i)
        low = gl.where(holds, gl.minimum(low, start), low)
        end = gl.where(holds, gl.maximum(end, stop), end)
    return low, end


@gluon.jit
def keys_of_rows(i, s, tensors, numbers, MASKS: gl.constexpr):
    """The first and, if causal, the last key that each row at positions i sees."""
    low = i
    if MASKS.window or MASKS.chunk:
        low = oldest_key(i, numbers, MASKS)
    if MASKS.ranges:
        low, end = reach_of_ranges(tensors.bidirectional_ranges, s, i, i, low, i + 1, MASKS.ranges)
        i = end - 1
    return low, i


@gluon.jit
def work_item(
    item, tiles, tensors, numbers, short, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Of the item-th tile of query rows: key/value head, sequence, its first row, rows and keys, the tile's first
    token, and its key tiles: their number (0 if this is no tile of a long sequence) and end, and the first and the end
    of those without mask."""
    MASKS: gl.constexpr = SPEC.masks
    G: gl.constexpr = SPEC.G
    N: gl.constexpr = SHAPE.N
    TOKENS: gl.constexpr = SHAPE.M // G
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kh = item % SPEC.K
    query_tile = tiles - 1 - item // SPEC.K  # later tiles see more keys: they start first
    s = -1
    for start in range(0, numbers.S, DIVISION.at_once):
        s_ = start + gl.arange(0, DIVISION.at_once, lanes)
        tile_ = gl.load(tensors.query_start_loc + s_, mask=s_ < numbers.S, other=0) // TOKENS + s_
        s += gl.sum(((tile_ <= query_tile) & (s_ < numbers.S)).to(gl.int32), 0)
    row_start = gl.load(tensors.query_start_loc + s)
    q_len = gl.load(tensors.query_start_loc + s + 1) - row_start
    seq_len = gl.load(tensors.seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    first_i = seq_len - q_len + first_token
    last_i = first_i + gl.minimum(TOKENS, q_len - first_token) - 1
    newest = seq_len
    full_end = seq_len // N
    if MASKS.causal:
        newest = gl.minimum(seq_len, last_i + 1)
        full_end = gl.minimum(gl.maximum(first_i + 1, 0) // N, full_end)
    opened = seq_len
    if MASKS.ranges:
        ranges = tensors.bidirectional_ranges
        opened, newest = reach_of_ranges(ranges, s, first_i, last_i, opened, newest, MASKS.ranges)
        newest = gl.minimum(newest, seq_len)
    end_tile = gl.maximum(gl.cdiv(newest, N), 1)  # one masked tile where nothing is seen
    count = end_tile
    full_start = 0
    if MASKS.window or MASKS.chunk:
        oldest = oldest_key(first_i, numbers, MASKS)
        if MASKS.ranges:
            oldest = gl.minimum(oldest, opened)
        count = gl.maximum(end_tile - oldest // N, 1)
        full_start = gl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    mine = (first_token < q_len) & ((q_len * G > DIVISION.rows) | (seq_len <= short))
    return kh, s, row_start, q_len, seq_len, first_token, gl.where(mine, count, 0), end_tile, full_start, full_end


@gluon.jit
def get(items, slot, field: gl.constexpr, WARPS: gl.constexpr):
    return gl.sum(items.index(slot * FIELDS + field).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def light_programs(
    tensors, S, short, programs, G: gl.constexpr, DIVISION: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr
):
    """How many programs take short sequences of few rows first, which wait for memory, while the others take those of
    many rows, which wait for tensor cores: by the work of both; negative if the short ones come first in the batch."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    few_work = 0.0
    many_work = 0.0
    few_at = 0.0
    many_at = 0.0
    for start in range(0, S, DIVISION.at_once):
        s = start + gl.arange(0, DIVISION.at_once, lanes)
        live = s < S
        first_row = gl.load(tensors.query_start_loc + s, mask=live, other=0)
        q_len = gl.load(tensors.query_start_loc + s + 1, mask=live, other=0) - first_row
        seq_len = gl.load(tensors.seq_lens + s, mask=live, other=0)
        many = q_len * G > DIVISION.rows
        few = (q_len > 0) & (seq_len <= short) & (q_len * G <= DIVISION.rows)
        few_cost = gl.where(few, seq_len.to(gl.float32), 0.0)
        many_cost = gl.where(many, (seq_len - q_len // 2).to(gl.float32) * (q_len * G).to(gl.float32) / M, 0.0)
        few_work += gl.sum(few_cost, 0)
        many_work += gl.sum(many_cost, 0)
        few_at += gl.sum(few_cost * s.to(gl.float32), 0)
        many_at += gl.sum(many_cost * s.to(gl.float32), 0)
    few_work = few_work * LIGHT
    few_at = few_at * LIGHT
    share = (programs * (few_work / gl.maximum(few_work + many_work, 1.0))).to(gl.int32)
    if few_at * many_work < many_at * few_work:
        share = -share
    return share


@gluon.jit
def take(taken, reverse, start, programs, last):
    """A ticket, and the item that it is for if it is one of the batch."""
    ticket = programs + gl.atomic_add(taken, 1)
    item = start
    if ticket <= last:
        item = start + gl.atomic_add(taken + 1 + reverse.to(gl.int32), 1)
    return ticket, item


@gluon.jit
def scheduler(
    tensors, numbers, short, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Takes items, longest first, and brings their query rows, packed (token, head of the group).

    ``taken`` counts items: all, from the front, from the back. Programs on short sequences start at the end of the
    batch where these are, the others at the other end, until they meet.
    """
    G: gl.constexpr = SPEC.G
    D: gl.constexpr = SPEC.v_side.size
    M: gl.constexpr = SHAPE.M
    SLOTS: gl.constexpr = SHAPE.slots
    TOKENS: gl.constexpr = M // G
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = 8
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    tiles = numbers.T // TOKENS + numbers.S
    last = tiles * SPEC.K - 1
    programs = gl.num_programs(0)
    few = light_programs(tensors, numbers.S, short, programs, G, DIVISION, M, 4)
    light_first = few < 0
    few = gl.maximum(few, -few)
    rank = gl.program_id(0) * few // programs
    light = (gl.program_id(0) + 1) * few // programs > rank
    reverse = (light == light_first) & (few > 0)  # from the batch's start
    start = gl.where(light, few, programs - few)
    item = gl.where(light, rank, gl.program_id(0) - rank)
    ticket = gl.program_id(0)
    n = 0
    while ticket <= last:
        item = gl.where(reverse, last - item, item)
        kh, s, row_start, q_len, seq_len, first_token, count, end_tile, full_start, full_end = work_item(
            item, tiles, tensors, numbers, short, SPEC, DIVISION, SHAPE, 4
        )
        # The last items are for whoever is free first: they are not taken ahead.
        ends = ticket + 2 * programs > last
        if not ends:
            ticket, item = take(tensors.taken, reverse, start, programs, last)
        if count > 0:
            slot = n % SLOTS
            mbarrier.wait(shared.item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
            fields = (kh, s, row_start, q_len, seq_len, first_token, count, end_tile, full_start, full_end)
            for field in gl.static_range(FIELDS):
                shared.items.index(slot * FIELDS + field).store(zero + fields[field])
            for part in range(M // ROWS):
                r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                d = gl.arange(0, D, gl.SliceLayout(0, layout))
                token = first_token + r // G
                live = (r < TOKENS * G) & (token < q_len)
                head = kh * G + r % G
                row = (row_start + token).to(gl.int64) * SPEC.query[0] + head.to(gl.int64) * SPEC.query[1]
                load_rows(
                    shared.q_groups.index(slot * (M // ROWS) + part),
                    tensors.query + row[:, None] + d[None, :],
                    mask=live[:, None],
                )
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(shared.item_full.index(slot), count=1)
            n += 1
        if ends:
            of_before = n + SLOTS - 1
            mbarrier.wait(shared.item_empty.index(of_before % SLOTS), ((of_before // SLOTS) & 1) ^ 1)
            ticket, item = take(tensors.taken, reverse, start, programs, last)
    slot = n % SLOTS
    mbarrier.wait(shared.item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    shared.items.index(slot * FIELDS + COUNT).store(zero)  # no more
    mbarrier.arrive(shared.item_full.index(slot), count=1)


@gluon.jit
def producer(k_desc, v_desc, block_tables, table_stride, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Brings the items' tiles of keys and values, the last of a sequence first."""
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    BYTES: gl.constexpr = N * SPEC.v_side.size * 2
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.wait(shared.item_full.index(0), 0)
    count = get(shared.items, 0, COUNT, 1)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(shared.items, slot, KV_HEAD, 1)
        block_table = block_tables + get(shared.items, slot, SEQUENCE, 1).to(gl.int64) * table_stride
        seq_len = get(shared.items, slot, SEQ_LEN, 1)
        end_tile = get(shared.items, slot, END_TILE, 1)
        mbarrier.arrive(shared.item_empty.index(slot), count=1)
        head_row = kh * SHAPE.rows_head
        column = kh * SHAPE.columns_head // 64
        j = (end_tile - 1) * N + lane % PAGES * PAGE
        ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
        for t in range(count):
            tile = end_tile - 1 - t
            stage = (total + t) % STAGES
            free = (((total + t) // STAGES) & 1) ^ 1
            rows = ()
            first = ids * SHAPE.rows_n + head_row + (tile * N + lane % PAGES * PAGE) % B
            for page in gl.static_range(PAGES):
                rows += (gl.sum(gl.where(lane == page, first, 0), 0) // 8,)  # type: ignore[assignment]
            # of the next tile, a tile ahead: their latency is hidden; keys past the end are masked
            j = gl.maximum(tile - 1, 0) * N + lane % PAGES * PAGE
            ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
            full = shared.k_full.index(stage)
            mbarrier.wait(shared.k_empty.index(stage), free)
            mbarrier.expect(full, BYTES)
            for page in gl.static_range(PAGES):
                load_box(k_desc, [rows[page], column, 0, 0], full, shared.k_pages.index(stage * PAGES + page))
            full = shared.v_full.index(stage)
            mbarrier.wait(shared.v_empty.index(stage), free)
            mbarrier.expect(full, BYTES)
            for page in gl.static_range(PAGES):
                load_box(v_desc, [rows[page], column, 0, 0], full, shared.v_pages.index(stage * PAGES + page))
        total += count
        n += 1
        mbarrier.wait(shared.item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(shared.items, n % SLOTS, COUNT, 1)


@gluon.jit
def weigh(p16, v_tile, acc0, acc1, D: gl.constexpr):
    """``acc + p16 @ v``, in two halves where one product would be wider than ptxas takes."""
    if D == 256:
        acc0 = warpgroup_mma(p16, v_tile.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(p16, v_tile.slice(128, 128, dim=1), acc1, is_async=True)
    else:
        acc0 = warpgroup_mma(p16, v_tile, acc0, is_async=True)
    return acc0, acc1


@gluon.jit
def forget_values(v_tile, first, oldest, BLOCK_N: gl.constexpr):
    """Zero the values of keys before ``oldest`` in the tile that begins at ``first``: no row sees them, their weights
    are 0, and 0 times what may be NaN would not be. 16 rows at a time, as registers are full of sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for part in gl.static_range(BLOCK_N // 16):
        if first + part * 16 < oldest:
            rows = first + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            values = v_tile.slice(part * 16, 16, dim=0)
            values.store(gl.where((rows >= oldest)[:, None], values.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def step(
    q_tile, at, tile, full_start, full_end, acc0, acc1, p16, m, l, factor, cap, i, low, j0, seq_len, zero, shared,
    SPEC: gl.constexpr, SHAPE: gl.constexpr, p_layout: gl.constexpr, o_rows: gl.constexpr,
):  # fmt: skip
    """Scores of the next key tile, while the weights of the one before it meet their values."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    D: gl.constexpr = SPEC.v_side.size
    STAGES: gl.constexpr = SHAPE.stages
    k_stage = at % STAGES
    v_stage = (at - 1) % STAGES
    mbarrier.wait(shared.k_full.index(k_stage), (at // STAGES) & 1)
    s = warpgroup_mma(q_tile, shared.k_tiles.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(v_stage), ((at - 1) // STAGES) & 1)
    acc0, acc1 = weigh(p16, shared.v_tiles.index(v_stage), acc0, acc1, D)
    s = warpgroup_mma_wait(1 if D < 256 else 2, deps=[s])
    mbarrier.arrive(shared.k_empty.index(k_stage), count=1)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and the values' product
    # would no longer run beside it.
    masked = tile >= full_end
    if BOUNDED:
        masked = masked | (tile < full_start)
    j = tile * SHAPE.N + j0
    if masked:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
    else:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, False, CAUSAL, BOUNDED, SOFT_CAP)
    if D == 256:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(shared.v_empty.index(v_stage), count=1)
    l_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    l = l * gl.convert_layout(decay, l_layout)[:, None] + sums
    shrink = gl.convert_layout(decay, o_rows)[:, None]
    acc0 = acc0 * shrink
    if D == 256:
        acc1 = acc1 * shrink
    p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
    return acc0, acc1, p16, m, l


@gluon.jit
def consumer(which: gl.constexpr, tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Half of the rows of each item: their products, softmax and output."""
    MASKS: gl.constexpr = SPEC.masks
    CAUSAL: gl.constexpr = MASKS.causal
    BOUNDED: gl.constexpr = MASKS.window or MASKS.chunk
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    G: gl.constexpr = SPEC.G
    D: gl.constexpr = SPEC.v_side.size
    N: gl.constexpr = SHAPE.N
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    M: gl.constexpr = SHAPE.M // 2
    TOKENS: gl.constexpr = SHAPE.M // G
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WIDTH: gl.constexpr = min(D, 128)
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    H = SPEC.K * G
    factor = numbers.scale * LOG2E
    cap = (0.0, 0.0)
    if SOFT_CAP:
        factor = 1.0
        cap = (numbers.soft_cap * LOG2E, 2.0 * LOG2E * numbers.scale / numbers.soft_cap)
    j0 = gl.arange(0, N, gl.SliceLayout(0, s_layout))
    zero = gl.full([M, N], 0.0, gl.float32, s_layout)
    mbarrier.wait(shared.item_full.index(0), 0)
    count = get(shared.items, 0, COUNT, 4)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(shared.items, slot, KV_HEAD, 4)
        row_start = get(shared.items, slot, ROW_START, 4)
        q_len = get(shared.items, slot, Q_LEN, 4)
        seq_len = get(shared.items, slot, SEQ_LEN, 4)
        first_token = get(shared.items, slot, FIRST_TOKEN, 4)
        end_tile = get(shared.items, slot, END_TILE, 4)
        full_start = get(shared.items, slot, FULL_START, 4)
        full_end = get(shared.items, slot, FULL_END, 4)
        if which * M >= gl.minimum(TOKENS, q_len - first_token) * G:  # no rows: it only lets tiles go
            for t in range(count):
                stage = (total + t) % STAGES
                mbarrier.wait(shared.k_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(shared.k_empty.index(stage), count=1)
                mbarrier.wait(shared.v_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(shared.v_empty.index(stage), count=1)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
        else:
            q_tile = shared.q_tiles.index(slot * 2 + which)
            i = seq_len - q_len + first_token + (which * M + gl.arange(0, M, s_rows)) // G
            s_of = 0
            if MASKS.ranges:
                s_of = get(shared.items, slot, SEQUENCE, 4)
            low, i = keys_of_rows(i, s_of, tensors, numbers, MASKS)
            m = gl.full([M], float("-inf"), gl.float32, s_rows)
            sink = m
            if SPEC.logits.sinks:
                sink = gl.load(tensors.sinks + kh * G + (which * M + gl.arange(0, M, s_rows)) % G) * LOG2E
                m = sink / factor
            acc0 = gl.full([M, WIDTH], 0.0, gl.float32, o_layout)
            acc1 = acc0

            # the last tile first: it needs the mask
            stage = total % STAGES
            mbarrier.wait(shared.k_full.index(stage), (total // STAGES) & 1)
            s = warpgroup_mma(q_tile, shared.k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(shared.k_empty.index(stage), count=1)
            j = (end_tile - 1) * N + j0
            p, m, l, _decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
            p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
            # rows of V past the sequence may be NaN: zeroed once, by the first warpgroup
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_full.index(stage), (total // STAGES) & 1)
                if which == 0:
                    rows = (end_tile - 1) * N + gl.arange(0, N, gl.SliceLayout(1, v_layout))
                    v = shared.v_tiles.index(stage).load(v_layout)
                    shared.v_tiles.index(stage).store(gl.where((rows < seq_len)[:, None], v, 0.0))
                    fence_async_shared()
            if which == 0:
                mbarrier.arrive(shared.v_clean.index(slot), count=1)
            if end_tile * N > seq_len:
                mbarrier.wait(shared.v_clean.index(slot), (n // SLOTS) & 1)
            for t in range(1, count):
                acc0, acc1, p16, m, l = step(
                    q_tile, total + t, end_tile - 1 - t, full_start, full_end, acc0, acc1, p16, m, l, factor, cap,
                    i, low, j0, seq_len, zero, shared, SPEC, SHAPE, p_layout, o_rows,
                )  # fmt: skip
            stage = (total + count - 1) % STAGES
            if BOUNDED:  # the oldest tile, which comes last, may begin before what the rows see
                first = (end_tile - count) * N
                first_i = seq_len - q_len + first_token
                oldest = oldest_key(first_i, numbers, MASKS)
                if MASKS.ranges:
                    last_i = first_i + gl.minimum(TOKENS, q_len - first_token) - 1
                    ranges = tensors.bidirectional_ranges
                    oldest, _end = reach_of_ranges(ranges, s_of, first_i, last_i, oldest, last_i, MASKS.ranges)
                if first < oldest:
                    mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
                    if which == 0:
                        forget_values(shared.v_tiles.index(stage), first, oldest, N)
                if which == 0:
                    mbarrier.arrive(shared.v_clean.index(SLOTS + slot), count=1)
                if first < oldest:
                    mbarrier.wait(shared.v_clean.index(SLOTS + slot), (n // SLOTS) & 1)
            mbarrier.arrive(shared.item_empty.index(slot), count=1)
            mbarrier.wait(shared.v_full.index(stage), ((total + count - 1) // STAGES) & 1)
            acc0, acc1 = weigh(p16, shared.v_tiles.index(stage), acc0, acc1, D)
            if D == 256:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(shared.v_empty.index(stage), count=1)

            l = gl.convert_layout(gl.sum(l, 1), s_rows)
            if SPEC.logits.sinks:
                l += gl.where(sink > float("-inf"), gl.exp2(sink - m * factor), 0.0)
            seen = l != 0.0
            share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, l, 1.0), 0.0), o_rows)[:, None]
            r = which * M + gl.arange(0, M, o_rows)
            token = first_token + r // G
            live = (r < TOKENS * G) & (token < q_len)
            row = (row_start + token).to(gl.int64) * H + kh * G + r % G
            d = gl.arange(0, WIDTH, gl.SliceLayout(0, o_layout))
            at = tensors.out + row[:, None] * D + d[None, :]
            gl.store(at, (acc0 * share).to(tensors.out.dtype.element_ty), mask=live[:, None])
            if D == 256:
                gl.store(at + WIDTH, (acc1 * share).to(tensors.out.dtype.element_ty), mask=live[:, None])
            if SPEC.lse:
                lse2 = gl.where(seen, m * factor + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
                r = which * M + gl.arange(0, M, s_rows)
                token = first_token + r // G
                live = (r < TOKENS * G) & (token < q_len)
                row = (row_start + token).to(gl.int64) * H + kh * G + r % G
                gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        total += count
        n += 1
        mbarrier.wait(shared.item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(shared.items, n % SLOTS, COUNT, 4)


@gluon.jit
def first_consumer(tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    consumer(0, tensors, numbers, shared, SPEC, SHAPE)


@gluon.jit
def second_consumer(tensors, numbers, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    consumer(1, tensors, numbers, shared, SPEC, SHAPE)


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """So many, each of which waits for ``arrivals``."""
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
    # One for each item's newest tile of values, and with a window or chunk one for its oldest.
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
