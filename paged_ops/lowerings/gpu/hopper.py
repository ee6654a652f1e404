"""Prefill on Hopper (sm_90) in Gluon: what ``prefill_kernel`` of attention.py does, where tensor cores set the pace.

A producer warp brings keys and values to shared memory by TMA, block of the cache by block, and two consumer warpgroups
of half the rows each multiply: while the tensor cores take the values of one tile of keys, the softmax of the next runs
beside them. One program takes one tile of query rows, longest first. docs/gpu-attention.md has the designs that were
measured.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D head size, B tokens a block. A tile has
BLOCK_M packed query rows (row r is token ``r // G``, head ``r % G``) and BLOCK_N keys. Tiles of keys and values are
kept as groups of 8 rows by 64 columns, all columns of 8 rows together: so PAGE keys of a block are contiguous in it,
and one copy brings them whole.

Serves causal or not, sinks and lse, float16 and bfloat16, D of 64 or 128, caches with rows that TMA can address; all
else takes the Triton kernel, which has the same numbers. Ideas: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.features import Features
from paged_ops.lowerings.gpu import tiles

BLOCK_M, BLOCK_N = 128, 128
STAGES = {64: 3, 128: 2}  # of K and of V, what shared memory holds beside the query


def serves(query: Tensor, key: Tensor, value: Tensor, f: Features, scale: float) -> bool:
    """Whether this kernel takes the prefill of a call: by features, dtype, shapes, strides, alignment and device.

    ``key [N, B, K, D/x, x]`` and ``value [N, B, K, Dv]`` are the cache as the kernels read it.
    """
    masks_and_biases = f.sliding_window or f.attention_chunk or f.soft_cap or f.alibi_slopes is not None
    scales = (f.k_scale, f.v_scale, f.output_scale)
    return (
        not masks_and_biases
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
) -> None:
    """Fill the rows of the sequences of more than ``split_m`` packed query rows, after :func:`serves`."""
    (T, H, D), S = query.shape, seq_lens.shape[0]
    B, K = value.shape[1:3]
    num_tiles = T // (BLOCK_M // (H // K)) + S
    page = min(B & -B, BLOCK_N)
    rows = _rows(value)
    assert rows is not None, "serves() said so"
    prefill_kernel[(num_tiles * K,)](
        out,
        lse,
        query,
        _descriptor(key.squeeze(3), page),
        _descriptor(value, page),
        block_tables,
        seq_lens,
        query_start_loc,
        f.sinks,
        query.stride(0),
        query.stride(1),
        *rows[2:],
        *block_tables.stride(),
        scale,
        S,
        K,
        num_tiles,
        CAUSAL=bool(f.causal),
        G=H // K,
        B=B,
        D=D,
        SPLIT_M=split_m,
        BLOCK_S=tiles.sequences_at_once(S),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        PAGE=page,
        STAGES=STAGES[D],
        num_warps=4,
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


@gluon.jit
def softmax_tile(qk, m, l, factor, i, j, seq_len, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """p (unnormalised), m, l and the decay of what came before; base 2, the scale folded into one multiply-add."""
    if MASKED:
        kept = j[None, :] < seq_len
        if CAUSAL:
            kept = kept & (j[None, :] <= i[:, None])
        qk = gl.where(kept, qk, float("-inf"))
    m_new = gl.maximum(m, gl.max(qk, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * factor
    p = gl.exp2(qk * factor - shift[:, None])
    decay = gl.exp2(m * factor - shift)
    l = l * decay + gl.sum(p, 1)
    return p, m_new, l, decay


@gluon.jit
def work_item(
    item, tiles, K, seq_lens, query_start_loc, S,
    CAUSAL: gl.constexpr, G: gl.constexpr, SPLIT_M: gl.constexpr, BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of the item-th tile of query rows: key/value head, sequence, its first row, rows and keys, the tile's first
    token, and its key tiles: their end (0 if this is no tile of a long sequence) and the end of those without mask."""
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
    newest = seq_len
    full_end = seq_len // BLOCK_N
    if CAUSAL:
        first_i = seq_len - q_len + first_token
        newest = gl.minimum(seq_len, first_i + gl.minimum(TOKENS, q_len - first_token))
        full_end = gl.minimum(gl.maximum(first_i + 1, 0) // BLOCK_N, full_end)
    end_tile = gl.maximum(gl.cdiv(newest, BLOCK_N), 1)  # one masked tile where nothing is seen
    mine = (first_token < q_len) & (q_len * G > SPLIT_M)
    return kh, s, row_start, q_len, seq_len, first_token, gl.where(mine, end_tile, 0), full_end


@gluon.jit
def scores(q_tile, k_tile, zero):
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(
    which: gl.constexpr, t, tile, full_end, acc, p16, m, l, factor, i, j0, seq_len, zero,
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, p_layout: gl.constexpr, o_rows: gl.constexpr,
):  # fmt: skip
    """Scores of the next key tile, while the weights of the one before it meet their values."""
    k_stage = t % STAGES
    v_stage = (t - 1) % STAGES
    mbarrier.wait(k_full.index(k_stage), (t // STAGES) & 1)
    s = scores(q_tiles.index(which), k_tiles.index(k_stage), zero)
    mbarrier.wait(v_full.index(v_stage), ((t - 1) // STAGES) & 1)
    acc = warpgroup_mma(p16, v_tiles.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    # A branch, not two loops: ptxas would move the softmax of one block past the wait below, and the values' product
    # would no longer run beside it.
    if tile >= full_end:
        p, m, l, decay = softmax_tile(s, m, l, factor, i, tile * BLOCK_N + j0, seq_len, True, CAUSAL)
    else:
        p, m, l, decay = softmax_tile(s, m, l, factor, i, tile * BLOCK_N + j0, seq_len, False, CAUSAL)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * gl.convert_layout(decay, o_rows)[:, None]
    p16 = gl.convert_layout(p.to(q_tiles.dtype), p_layout)
    return acc, p16, m, l


@gluon.jit
def consumer(
    which: gl.constexpr,
    out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
    kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    TOKENS: gl.constexpr = BLOCK_M // G
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    H = K * G
    factor = scale * LOG2E
    j0 = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    zero = gl.full([M, BLOCK_N], 0.0, gl.float32, s_layout)
    # this warpgroup's rows of the query, packed (token, head of the group)
    r = which * M + gl.arange(0, M, gl.SliceLayout(1, q_layout))
    d = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    token = first_token + r // G
    live = (r < TOKENS * G) & (token < q_len)
    at = (row_start + token).to(gl.int64) * q_stride_t + (kh * G + r % G).to(gl.int64) * q_stride_h
    q_tiles.index(which).store(gl.load(query + at[:, None] + d[None, :], mask=live[:, None], other=0.0))
    fence_async_shared()
    i = seq_len - q_len + first_token + (which * M + gl.arange(0, M, s_rows)) // G
    m = gl.full([M], float("-inf"), gl.float32, s_rows)
    l = gl.full([M], 0.0, gl.float32, s_rows)
    if sinks is not None:
        sink = gl.load(sinks + kh * G + (which * M + gl.arange(0, M, s_rows)) % G)
        m = sink / scale
        l = gl.where(m > float("-inf"), 1.0, 0.0)
    acc = gl.full([M, D], 0.0, gl.float32, o_layout)

    # the last tile first: it needs the mask
    mbarrier.wait(k_full.index(0), 0)
    s = scores(q_tiles.index(which), k_tiles.index(0), zero)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, l, _decay = softmax_tile(s, m, l, factor, i, (end_tile - 1) * BLOCK_N + j0, seq_len, True, CAUSAL)
    p16 = gl.convert_layout(p.to(q_tiles.dtype), p_layout)
    # rows of V past the sequence may be NaN: zeroed once, by the first warpgroup
    if end_tile * BLOCK_N > seq_len:
        mbarrier.wait(v_full.index(0), 0)
        if which == 0:
            n = (end_tile - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, q_layout))
            v = v_tiles.index(0).load(q_layout)
            v_tiles.index(0).store(gl.where((n < seq_len)[:, None], v, 0.0))
            fence_async_shared()
            mbarrier.arrive(v_clean, count=1)
        mbarrier.wait(v_clean, 0)
    for t in range(1, end_tile):
        acc, p16, m, l = step(
            which, t, end_tile - 1 - t, full_end, acc, p16, m, l, factor, i, j0, seq_len, zero,
            q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, CAUSAL, BLOCK_N, STAGES, p_layout, o_rows,
        )  # fmt: skip
    stage = (end_tile - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((end_tile - 1) // STAGES) & 1)
    acc = warpgroup_mma(p16, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    seen = l > 0.0
    share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, l, 1.0), 0.0), o_rows)[:, None]
    r = which * M + gl.arange(0, M, o_rows)
    token = first_token + r // G
    live = (r < TOKENS * G) & (token < q_len)
    row = (row_start + token).to(gl.int64) * H + kh * G + r % G
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    gl.store(out + row[:, None] * D + d[None, :], (acc * share).to(out.dtype.element_ty), mask=live[:, None])
    if lse is not None:
        lse2 = gl.where(seen, m * factor + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
        r = which * M + gl.arange(0, M, s_rows)
        token = first_token + r // G
        live = (r < TOKENS * G) & (token < q_len)
        row = (row_start + token).to(gl.int64) * H + kh * G + r % G
        gl.store(lse + row, lse2 * LN2, mask=live)


@gluon.jit
def first_consumer(
    out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
    kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    consumer(
        0, out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
        kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
        q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
        CAUSAL, G, D, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip


@gluon.jit
def second_consumer(
    out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
    kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
    CAUSAL: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    consumer(
        1, out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
        kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
        q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
        CAUSAL, G, D, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip


@gluon.jit
def producer(
    k_desc, v_desc, block_table, stride_m, rows_n, head_row, head_column, seq_len, end_tile,
    k_pages, v_pages, k_full, k_empty, v_full, v_empty,
    B: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = BLOCK_N // PAGE
    for t in range(end_tile):
        tile = end_tile - 1 - t
        stage = t % STAGES
        free = ((t // STAGES) & 1) ^ 1
        rows = ()
        for page in gl.static_range(PAGES):  # before the wait, which hides their latency; keys past the end are masked
            j = tile * BLOCK_N + page * PAGE
            block = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * stride_m)
            rows += ((block * rows_n + head_row + j % B) // 8,)  # type: ignore[assignment]
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
        for page in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                k_desc, [rows[page], head_column, 0, 0], k_full.index(stage), k_pages.index(stage * PAGES + page)
            )
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
        for page in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                v_desc, [rows[page], head_column, 0, 0], v_full.index(stage), v_pages.index(stage * PAGES + page)
            )


@gluon.jit
def idle():
    """The partition that every kernel has: in it ptxas would keep the pipeline's stage in ordinary registers, so that
    every product waits for its address; and its four warps would issue each copy of a producer together."""


@gluon.jit
def prefill_kernel(
    out, lse, query, k_desc, v_desc, block_tables, seq_lens, query_start_loc, sinks,
    q_stride_t, q_stride_h, rows_n, rows_head, columns_head, table_stride_s, table_stride_m, scale, S, K, tiles,
    CAUSAL: gl.constexpr, G: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SPLIT_M: gl.constexpr,
    BLOCK_S: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    kh, s, row_start, q_len, seq_len, first_token, end_tile, full_end = work_item(
        gl.program_id(0), tiles, K, seq_lens, query_start_loc, S, CAUSAL, G, SPLIT_M, BLOCK_S, BLOCK_M, BLOCK_N, 4
    )
    if end_tile > 0:
        copy_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
        q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        kv_layout: gl.constexpr = tile_layout(BLOCK_N, D)
        pages: gl.constexpr = STAGES * (BLOCK_N // PAGE)
        q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, D], q_layout)
        k_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
        v_pages = gl.allocate_shared_memory(dtype, [pages, PAGE // 8, D // 64, 8, 64], copy_layout)
        k_tiles = k_pages._reinterpret(dtype, [STAGES, BLOCK_N, D], kv_layout)
        v_tiles = v_pages._reinterpret(dtype, [STAGES, BLOCK_N, D], kv_layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_full.index(stage), count=1)
            mbarrier.init(v_full.index(stage), count=1)
            mbarrier.init(k_empty.index(stage), count=2)
            mbarrier.init(v_empty.index(stage), count=2)
        mbarrier.init(v_clean, count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (idle, ()),
                (first_consumer, (
                    out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
                    kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
                    CAUSAL, G, D, BLOCK_M, BLOCK_N, STAGES,
                )),
                (second_consumer, (
                    out, lse, query, sinks, K, q_stride_t, q_stride_h, scale,
                    kh, row_start, q_len, seq_len, first_token, end_tile, full_end,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean,
                    CAUSAL, G, D, BLOCK_M, BLOCK_N, STAGES,
                )),
                (producer, (
                    k_desc, v_desc, block_tables + s.to(gl.int64) * table_stride_s, table_stride_m, rows_n,
                    kh * rows_head, kh * columns_head // 64, seq_len, end_tile,
                    k_pages, v_pages, k_full, k_empty, v_full, v_empty, B, D, BLOCK_N, PAGE, STAGES,
                )),
            ],
            [4, 4, 1],
            [232, 232, 24],
        )  # fmt: skip
