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

from paged_ops.features import Features
from paged_ops.lowerings.gpu import tiles
from paged_ops.lowerings.gpu.device import FUSED, target_of
from paged_ops.lowerings.gpu.gluon_names import load_box, load_rows, reinterpret

BLOCK_M = 128
BLOCK_N = {64: 128, 128: 128, 256: 64}
STAGES = {64: 4, 128: 2, 256: 2}  # of K and of V, what shared memory holds beside the query
SLOTS = {64: 2, 128: 2, 256: 1}  # tiles of query rows, fetched ahead
SHORT = 4096  # keys that one program reads in less than 50 µs
MANY_ROWS = 64  # packed query rows of a sequence: split_kernel would take twice the time
SHORT_OF_MANY_ROWS = 8192  # keys, where that is so


def serves(query: Tensor, key: Tensor, value: Tensor, f: Features, scale: float) -> bool:
    """Whether this kernel takes the prefill of a call: by features, dtype, shapes, strides, alignment and device.

    ``key [N, B, K, D/x, x]`` and ``value [N, B, K, Dv]`` are the cache as the kernels read it.
    """
    scales = (f.k_scale, f.v_scale, f.output_scale)
    return (
        f.alibi_slopes is None
        and f.block_sparse is None
        and all(each is None for each in scales)
        and scale > 0  # the maximum is taken before the scale
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.dtype == query.dtype
        and query.stride(2) == 1
        and query.shape[1] // key.shape[2] <= BLOCK_M
        and key.shape[3] == 1
        and key.shape[4] == value.shape[3]
        and value.shape[3] in STAGES
        and all(_rows(cache) is not None for cache in (key.squeeze(3), value))
        and key.stride()[:3] == value.stride()[:3]
    )


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


def prefill(
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    f: Features,
    scale: float,
    split_m: int,
    short: int,
) -> None:
    """Fill the rows of the sequences of more than ``split_m`` packed query rows, after :func:`serves`.

    Those of sequences of at most ``short`` keys too, whatever their rows.
    """
    (T, H, D), S = query.shape, seq_lens.shape[0]
    B, K = value.shape[1:3]
    num_tiles = T // (BLOCK_M // (H // K)) + S
    page = min(B & -B, BLOCK_N[D])
    rows = _rows(value)
    assert rows is not None, "serves() said so"
    if query.data_ptr() % 16 or query.stride(0) % 16 or query.stride(1) % 16:
        query = query.clone(memory_format=torch.contiguous_format)  # rows are copied 16 bytes at a time
    taken = query.new_zeros(3, dtype=torch.int32)
    prefill_kernel[(min(num_tiles * K, target_of(query.device).processors),)](
        out,
        lse,
        query,
        _descriptor(key.squeeze(3), page),
        _descriptor(value, page),
        block_tables,
        seq_lens,
        query_start_loc,
        f.sinks,
        taken,
        query.stride(0),
        query.stride(1),
        *rows[2:],
        *block_tables.stride(),
        scale,
        float(f.soft_cap),
        short,
        *tiles.spans(f.sliding_window, f.attention_chunk),
        f.bidirectional_ranges,
        S,
        K,
        num_tiles,
        CAUSAL=bool(f.causal),
        WINDOW=f.sliding_window > 0,
        CHUNK=f.attention_chunk > 0,
        RANGES=0 if f.bidirectional_ranges is None else f.bidirectional_ranges.shape[1],
        SOFT_CAP=f.soft_cap > 0,
        G=H // K,
        B=B,
        D=D,
        SPLIT_M=split_m,
        BLOCK_S=tiles.sequences_at_once(S),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N[D],
        PAGE=page,
        STAGES=STAGES[D],
        SLOTS=SLOTS[D],
        num_warps=4,
        **FUSED,
    )


def _rows(cache: Tensor) -> tuple[int, int, int, int, int] | None:
    """A cache ``[N, B, K, D]`` as a matrix whose rows are tokens of a block: its rows and columns, and the rows between
    blocks, the rows and the columns between heads; None if TMA cannot address it in groups of 8 rows by 64 columns."""
    N, B, K, D = cache.shape
    stride_n, stride_b, stride_k, stride_d = cache.stride()
    aligned = 16 // cache.element_size()
    if stride_d != 1 or B % 8 or stride_b % aligned or stride_n % (8 * stride_b) or cache.data_ptr() % 16:
        return None
    rows_n = stride_n // stride_b
    if K == 1 or (stride_k < stride_b and stride_k % 64 == 0):
        rows, columns, between = (N - 1) * rows_n + B, (K - 1) * stride_k + D, (rows_n, 0, stride_k)
    elif stride_k % (8 * stride_b) == 0:
        rows_k = stride_k // stride_b
        rows, columns, between = (N - 1) * rows_n + (K - 1) * rows_k + B, D, (rows_n, rows_k, 0)
    else:
        return None
    return (rows, columns, *between) if 0 < rows < 1 << 31 else None


def _descriptor(cache: Tensor, page: int) -> TensorDescriptor:
    """The cache in groups of 8 rows by 64 columns, of which one copy brings a block of one head."""
    shape = _rows(cache)
    assert shape is not None, "serves() said so"
    D, stride_b = cache.shape[3], cache.stride(1)
    groups = cache.as_strided((shape[0] // 8, shape[1] // 64, 8, 64), (8 * stride_b, 64, stride_b, 1))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(groups, list(groups.shape), list(groups.stride()), [page // 8, D // 64, 8, 64], layout)


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
def lowest_key(i, window, chunk, WINDOW: gl.constexpr, CHUNK: gl.constexpr):
    """The first key that a query at position i may see."""
    low = gl.maximum(i, 0) * 0
    if WINDOW:
        low = gl.maximum(low, i - window + 1)
    if CHUNK:
        low = gl.maximum(low, i // chunk * chunk)
    return low


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
def keys_of_rows(i, s, window, chunk, ranges, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr):
    """The first and, if causal, the last key that each row at positions i sees."""
    low = i
    if WINDOW or CHUNK:
        low = lowest_key(gl.maximum(i, 0), window, chunk, WINDOW, CHUNK)
    if RANGES:
        low, end = reach_of_ranges(ranges, s, i, i, low, i + 1, RANGES)
        i = end - 1
    return low, i


@gluon.jit
def work_item(
    item, tiles, K, seq_lens, query_start_loc, S, short, window, chunk, ranges,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, G: gl.constexpr,
    SPLIT_M: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of the item-th tile of query rows: key/value head, sequence, its first row, rows and keys, the tile's first
    token, and its key tiles: their number (0 if this is no tile of a long sequence) and end, and the first and the end
    of those without mask."""
    TOKENS: gl.constexpr = BLOCK_M // G
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kh = item % K
    query_tile = tiles - 1 - item // K  # later tiles see more keys: they start first
    s = -1
    for start in range(0, S, BLOCK_S):
        s_ = start + gl.arange(0, BLOCK_S, lanes)
        tile_ = gl.load(query_start_loc + s_, mask=s_ < S, other=0) // TOKENS + s_
        s += gl.sum(((tile_ <= query_tile) & (s_ < S)).to(gl.int32), 0)
    row_start = gl.load(query_start_loc + s)
    q_len = gl.load(query_start_loc + s + 1) - row_start
    seq_len = gl.load(seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    first_i = seq_len - q_len + first_token
    last_i = first_i + gl.minimum(TOKENS, q_len - first_token) - 1
    newest = seq_len
    full_end = seq_len // BLOCK_N
    if CAUSAL:
        newest = gl.minimum(seq_len, last_i + 1)
        full_end = gl.minimum(gl.maximum(first_i + 1, 0) // BLOCK_N, full_end)
    opened = seq_len
    if RANGES:
        opened, newest = reach_of_ranges(ranges, s, first_i, last_i, opened, newest, RANGES)
        newest = gl.minimum(newest, seq_len)
    end_tile = gl.maximum(gl.cdiv(newest, BLOCK_N), 1)  # one masked tile where nothing is seen
    count = end_tile
    full_start = 0
    if WINDOW or CHUNK:
        oldest = lowest_key(gl.maximum(first_i, 0), window, chunk, WINDOW, CHUNK)
        if RANGES:
            oldest = gl.minimum(oldest, opened)
        count = gl.maximum(end_tile - oldest // BLOCK_N, 1)
        full_start = gl.cdiv(lowest_key(gl.maximum(last_i, 0), window, chunk, WINDOW, CHUNK), BLOCK_N)
    mine = (first_token < q_len) & ((q_len * G > SPLIT_M) | (seq_len <= short))
    return kh, s, row_start, q_len, seq_len, first_token, gl.where(mine, count, 0), end_tile, full_start, full_end


@gluon.jit
def get(items, slot, field: gl.constexpr, WARPS: gl.constexpr):
    return gl.sum(items.index(slot * FIELDS + field).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def light_programs(
    seq_lens, query_start_loc, S, short, programs, G: gl.constexpr, SPLIT_M: gl.constexpr, BLOCK_S: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """How many programs take short sequences of few rows first, which wait for memory, while the others take those of
    many rows, which wait for tensor cores: by the work of both; negative if the short ones come first in the batch."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    few_work = 0.0
    many_work = 0.0
    few_at = 0.0
    many_at = 0.0
    for start in range(0, S, BLOCK_S):
        s = start + gl.arange(0, BLOCK_S, lanes)
        live = s < S
        q_len = gl.load(query_start_loc + s + 1, mask=live, other=0) - gl.load(query_start_loc + s, mask=live, other=0)
        seq_len = gl.load(seq_lens + s, mask=live, other=0)
        many = q_len * G > SPLIT_M
        few = (q_len > 0) & (seq_len <= short) & (q_len * G <= SPLIT_M)
        few_cost = gl.where(few, seq_len.to(gl.float32), 0.0)
        many_cost = gl.where(many, (seq_len - q_len // 2).to(gl.float32) * (q_len * G).to(gl.float32) / BLOCK_M, 0.0)
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
    query, seq_lens, query_start_loc, taken, q_stride_t, q_stride_h, short, window, chunk, ranges, S, K, tiles,
    items, q_groups, item_full, item_empty,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, SPLIT_M: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Takes items, longest first, and brings their query rows, packed (token, head of the group).

    ``taken`` counts items: all, from the front, from the back. Programs on short sequences start at the end of the
    batch where these are, the others at the other end, until they meet.
    """
    TOKENS: gl.constexpr = BLOCK_M // G
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = 8
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    last = tiles * K - 1
    programs = gl.num_programs(0)
    few = light_programs(seq_lens, query_start_loc, S, short, programs, G, SPLIT_M, BLOCK_S, BLOCK_M, BLOCK_N, 4)
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
            item, tiles, K, seq_lens, query_start_loc, S, short, window, chunk, ranges,
            CAUSAL, WINDOW, CHUNK, RANGES, G, SPLIT_M, BLOCK_S, BLOCK_M, BLOCK_N, 4,
        )  # fmt: skip
        # The last items are for whoever is free first: they are not taken ahead.
        ends = ticket + 2 * programs > last
        if not ends:
            ticket, item = take(taken, reverse, start, programs, last)
        if count > 0:
            slot = n % SLOTS
            mbarrier.wait(item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
            fields = (kh, s, row_start, q_len, seq_len, first_token, count, end_tile, full_start, full_end)
            for field in gl.static_range(FIELDS):
                items.index(slot * FIELDS + field).store(zero + fields[field])
            for part in range(BLOCK_M // ROWS):
                r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                d = gl.arange(0, D, gl.SliceLayout(0, layout))
                token = first_token + r // G
                live = (r < TOKENS * G) & (token < q_len)
                row = (row_start + token).to(gl.int64) * q_stride_t + (kh * G + r % G).to(gl.int64) * q_stride_h
                load_rows(
                    q_groups.index(slot * (BLOCK_M // ROWS) + part),
                    query + row[:, None] + d[None, :],
                    mask=live[:, None],
                )
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(item_full.index(slot), count=1)
            n += 1
        if ends:
            of_before = n + SLOTS - 1
            mbarrier.wait(item_empty.index(of_before % SLOTS), ((of_before // SLOTS) & 1) ^ 1)
            ticket, item = take(taken, reverse, start, programs, last)
    slot = n % SLOTS
    mbarrier.wait(item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    items.index(slot * FIELDS + COUNT).store(zero)  # no more
    mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def producer(
    k_desc, v_desc, block_tables, table_stride_s, table_stride_m, rows_n, rows_head, columns_head,
    items, item_full, item_empty, k_pages, v_pages, k_full, k_empty, v_full, v_empty,
    B: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Brings the items' tiles of keys and values, the last of a sequence first."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.wait(item_full.index(0), 0)
    count = get(items, 0, COUNT, 1)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(items, slot, KV_HEAD, 1)
        block_table = block_tables + get(items, slot, SEQUENCE, 1).to(gl.int64) * table_stride_s
        seq_len = get(items, slot, SEQ_LEN, 1)
        end_tile = get(items, slot, END_TILE, 1)
        mbarrier.arrive(item_empty.index(slot), count=1)
        head_row = kh * rows_head
        head_column = kh * columns_head // 64
        j = (end_tile - 1) * BLOCK_N + lane % PAGES * PAGE
        ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * table_stride_m)
        for t in range(count):
            tile = end_tile - 1 - t
            stage = (total + t) % STAGES
            free = (((total + t) // STAGES) & 1) ^ 1
            rows = ()
            first = ids * rows_n + head_row + (tile * BLOCK_N + lane % PAGES * PAGE) % B
            for page in gl.static_range(PAGES):
                rows += (gl.sum(gl.where(lane == page, first, 0), 0) // 8,)  # type: ignore[assignment]
            # of the next tile, a tile ahead: their latency is hidden; keys past the end are masked
            j = gl.maximum(tile - 1, 0) * BLOCK_N + lane % PAGES * PAGE
            ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * table_stride_m)
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
            for page in gl.static_range(PAGES):
                load_box(
                    k_desc, [rows[page], head_column, 0, 0], k_full.index(stage), k_pages.index(stage * PAGES + page)
                )
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
            for page in gl.static_range(PAGES):
                load_box(
                    v_desc, [rows[page], head_column, 0, 0], v_full.index(stage), v_pages.index(stage * PAGES + page)
                )
        total += count
        n += 1
        mbarrier.wait(item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(items, n % SLOTS, COUNT, 1)


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
    q_tile, at, tile, full_start, full_end, acc0, acc1, p16, m, l, factor, cap, i, low, j0, seq_len, zero,
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, SOFT_CAP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, p_layout: gl.constexpr, o_rows: gl.constexpr,
):  # fmt: skip
    """Scores of the next key tile, while the weights of the one before it meet their values."""
    k_stage = at % STAGES
    v_stage = (at - 1) % STAGES
    mbarrier.wait(k_full.index(k_stage), (at // STAGES) & 1)
    s = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), ((at - 1) // STAGES) & 1)
    acc0, acc1 = weigh(p16, v_tiles.index(v_stage), acc0, acc1, D)
    s = warpgroup_mma_wait(1 if D < 256 else 2, deps=[s])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and the values' product
    # would no longer run beside it.
    masked = tile >= full_end
    if BOUNDED:
        masked = masked | (tile < full_start)
    j = tile * BLOCK_N + j0
    if masked:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
    else:
        p, m, sums, decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, False, CAUSAL, BOUNDED, SOFT_CAP)
    if D == 256:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    l_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    l = l * gl.convert_layout(decay, l_layout)[:, None] + sums
    shrink = gl.convert_layout(decay, o_rows)[:, None]
    acc0 = acc0 * shrink
    if D == 256:
        acc1 = acc1 * shrink
    p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
    return acc0, acc1, p16, m, l


@gluon.jit
def consumer(
    which: gl.constexpr,
    out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
    items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, SOFT_CAP: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    TOKENS: gl.constexpr = BLOCK_M // G
    BOUNDED: gl.constexpr = WINDOW or CHUNK
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    WIDTH: gl.constexpr = min(D, 128)
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    H = K * G
    factor = scale * LOG2E
    cap = (0.0, 0.0)
    if SOFT_CAP:
        factor = 1.0
        cap = (soft_cap * LOG2E, 2.0 * LOG2E * scale / soft_cap)
    j0 = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    zero = gl.full([M, BLOCK_N], 0.0, gl.float32, s_layout)
    mbarrier.wait(item_full.index(0), 0)
    count = get(items, 0, COUNT, 4)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(items, slot, KV_HEAD, 4)
        row_start = get(items, slot, ROW_START, 4)
        q_len = get(items, slot, Q_LEN, 4)
        seq_len = get(items, slot, SEQ_LEN, 4)
        first_token = get(items, slot, FIRST_TOKEN, 4)
        end_tile = get(items, slot, END_TILE, 4)
        full_start = get(items, slot, FULL_START, 4)
        full_end = get(items, slot, FULL_END, 4)
        if which * M >= gl.minimum(TOKENS, q_len - first_token) * G:  # no rows: it only lets tiles go
            for t in range(count):
                stage = (total + t) % STAGES
                mbarrier.wait(k_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), ((total + t) // STAGES) & 1)
                mbarrier.arrive(v_empty.index(stage), count=1)
            mbarrier.arrive(item_empty.index(slot), count=1)
        else:
            q_tile = q_tiles.index(slot * 2 + which)
            i = seq_len - q_len + first_token + (which * M + gl.arange(0, M, s_rows)) // G
            s_of = 0
            if RANGES:
                s_of = get(items, slot, SEQUENCE, 4)
            low, i = keys_of_rows(i, s_of, window, chunk, ranges, WINDOW, CHUNK, RANGES)
            m = gl.full([M], float("-inf"), gl.float32, s_rows)
            sink = m
            if sinks is not None:
                sink = gl.load(sinks + kh * G + (which * M + gl.arange(0, M, s_rows)) % G) * LOG2E
                m = sink / factor
            acc0 = gl.full([M, WIDTH], 0.0, gl.float32, o_layout)
            acc1 = acc0

            # the last tile first: it needs the mask
            stage = total % STAGES
            mbarrier.wait(k_full.index(stage), (total // STAGES) & 1)
            s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            j = (end_tile - 1) * BLOCK_N + j0
            p, m, l, _decay = softmax_tile(s, m, factor, cap, i, low, j, seq_len, True, CAUSAL, BOUNDED, SOFT_CAP)
            p16 = gl.convert_layout(p.to(q_tile.dtype), p_layout)
            # rows of V past the sequence may be NaN: zeroed once, by the first warpgroup
            if end_tile * BLOCK_N > seq_len:
                mbarrier.wait(v_full.index(stage), (total // STAGES) & 1)
                if which == 0:
                    rows = (end_tile - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_layout))
                    v = v_tiles.index(stage).load(v_layout)
                    v_tiles.index(stage).store(gl.where((rows < seq_len)[:, None], v, 0.0))
                    fence_async_shared()
            if which == 0:
                mbarrier.arrive(v_clean.index(slot), count=1)
            if end_tile * BLOCK_N > seq_len:
                mbarrier.wait(v_clean.index(slot), (n // SLOTS) & 1)
            for t in range(1, count):
                acc0, acc1, p16, m, l = step(
                    q_tile, total + t, end_tile - 1 - t, full_start, full_end, acc0, acc1, p16, m, l, factor, cap,
                    i, low, j0, seq_len, zero, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    CAUSAL, BOUNDED, SOFT_CAP, D, BLOCK_N, STAGES, p_layout, o_rows,
                )  # fmt: skip
            stage = (total + count - 1) % STAGES
            if BOUNDED:  # the oldest tile, which comes last, may begin before what the rows see
                first = (end_tile - count) * BLOCK_N
                first_i = seq_len - q_len + first_token
                oldest = lowest_key(gl.maximum(first_i, 0), window, chunk, WINDOW, CHUNK)
                if RANGES:
                    last_i = first_i + gl.minimum(TOKENS, q_len - first_token) - 1
                    oldest, _end = reach_of_ranges(ranges, s_of, first_i, last_i, oldest, last_i, RANGES)
                if first < oldest:
                    mbarrier.wait(v_full.index(stage), ((total + count - 1) // STAGES) & 1)
                    if which == 0:
                        forget_values(v_tiles.index(stage), first, oldest, BLOCK_N)
                if which == 0:
                    mbarrier.arrive(v_clean.index(SLOTS + slot), count=1)
                if first < oldest:
                    mbarrier.wait(v_clean.index(SLOTS + slot), (n // SLOTS) & 1)
            mbarrier.arrive(item_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(stage), ((total + count - 1) // STAGES) & 1)
            acc0, acc1 = weigh(p16, v_tiles.index(stage), acc0, acc1, D)
            if D == 256:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(v_empty.index(stage), count=1)

            l = gl.convert_layout(gl.sum(l, 1), s_rows)
            if sinks is not None:
                l += gl.where(sink > float("-inf"), gl.exp2(sink - m * factor), 0.0)
            seen = l != 0.0
            share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, l, 1.0), 0.0), o_rows)[:, None]
            r = which * M + gl.arange(0, M, o_rows)
            token = first_token + r // G
            live = (r < TOKENS * G) & (token < q_len)
            row = (row_start + token).to(gl.int64) * H + kh * G + r % G
            d = gl.arange(0, WIDTH, gl.SliceLayout(0, o_layout))
            at = out + row[:, None] * D + d[None, :]
            gl.store(at, (acc0 * share).to(out.dtype.element_ty), mask=live[:, None])
            if D == 256:
                gl.store(at + WIDTH, (acc1 * share).to(out.dtype.element_ty), mask=live[:, None])
            if lse is not None:
                lse2 = gl.where(seen, m * factor + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
                r = which * M + gl.arange(0, M, s_rows)
                token = first_token + r // G
                live = (r < TOKENS * G) & (token < q_len)
                row = (row_start + token).to(gl.int64) * H + kh * G + r % G
                gl.store(lse + row, lse2 * LN2, mask=live)
        total += count
        n += 1
        mbarrier.wait(item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(items, n % SLOTS, COUNT, 4)


@gluon.jit
def first_consumer(
    out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
    items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, SOFT_CAP: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    consumer(
        0, out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
        items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
        CAUSAL, WINDOW, CHUNK, RANGES, SOFT_CAP, G, D, BLOCK_M, BLOCK_N, STAGES, SLOTS,
    )  # fmt: skip


@gluon.jit
def second_consumer(
    out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
    items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, SOFT_CAP: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    consumer(
        1, out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
        items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
        CAUSAL, WINDOW, CHUNK, RANGES, SOFT_CAP, G, D, BLOCK_M, BLOCK_N, STAGES, SLOTS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride_s", "short", "S", "tiles"])  # they vary from step to step
def prefill_kernel(
    out, lse, query, k_desc, v_desc, block_tables, seq_lens, query_start_loc, sinks, taken,
    q_stride_t, q_stride_h, rows_n, rows_head, columns_head, table_stride_s, table_stride_m, scale, soft_cap,
    short, window, chunk, ranges, S, K, tiles,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, SOFT_CAP: gl.constexpr,
    G: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SPLIT_M: gl.constexpr, BLOCK_S: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    CONSUMER: gl.constexpr = 216 if SOFT_CAP else 208
    REGISTERS: gl.constexpr = (224, 224, 24) if D == 256 else (CONSUMER, CONSUMER, 40)
    copy_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    group_layout: gl.constexpr = tile_layout(8, D)
    q_layout: gl.constexpr = tile_layout(BLOCK_M // 2, D)
    kv_layout: gl.constexpr = tile_layout(BLOCK_N, D)
    pages: gl.constexpr = STAGES * (BLOCK_N // PAGE)
    q_groups = gl.allocate_shared_memory(dtype, [SLOTS * (BLOCK_M // 8), 8, D], group_layout)
    k_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
    v_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
    q_tiles = reinterpret(q_groups, dtype, [SLOTS * 2, BLOCK_M // 2, D], q_layout)
    k_tiles = reinterpret(k_pages, dtype, [STAGES, BLOCK_N, D], kv_layout)
    v_tiles = reinterpret(v_pages, dtype, [STAGES, BLOCK_N, D], kv_layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # One for each item's newest tile of values, and with a window or chunk one for its oldest.
    CLEAN: gl.constexpr = SLOTS * (2 if WINDOW or CHUNK else 1)
    v_clean = gl.allocate_shared_memory(gl.int64, [CLEAN, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(item_full.index(slot), count=1)
        mbarrier.init(item_empty.index(slot), count=3)
    for part in gl.static_range(CLEAN):
        mbarrier.init(v_clean.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scheduler, (
                query, seq_lens, query_start_loc, taken, q_stride_t, q_stride_h, short, window, chunk, ranges, S, K,
                tiles, items, q_groups, item_full, item_empty,
                CAUSAL, WINDOW, CHUNK, RANGES, G, D, SPLIT_M, BLOCK_S, BLOCK_M, BLOCK_N, SLOTS,
            )),
            (first_consumer, (
                out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
                items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
                CAUSAL, WINDOW, CHUNK, RANGES, SOFT_CAP, G, D, BLOCK_M, BLOCK_N, STAGES, SLOTS,
            )),
            (second_consumer, (
                out, lse, sinks, K, scale, soft_cap, window, chunk, ranges,
                items, item_full, item_empty, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
                CAUSAL, WINDOW, CHUNK, RANGES, SOFT_CAP, G, D, BLOCK_M, BLOCK_N, STAGES, SLOTS,
            )),
            (producer, (
                k_desc, v_desc, block_tables, table_stride_s, table_stride_m, rows_n, rows_head, columns_head,
                items, item_full, item_empty, k_pages, v_pages, k_full, k_empty, v_full, v_empty,
                B, D, BLOCK_N, PAGE, STAGES, SLOTS,
            )),
        ],
        [4, 4, 1],
        REGISTERS,
    )  # fmt: skip
