"""Paged attention on GPUs: two kernels over the same parts, and a merge. CUDA and ROCm run the same source.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D and Dv head sizes, N blocks, B tokens a
block, P programs. Inside kernels also M packed query rows (``q_len`` tokens by G heads, so that every key and value is
read once for all of them) and N keys of a tile.

* ``split_kernel`` serves every sequence whose rows fit one tile of M rows: decode and speculative widths. Its P
  programs take equal contiguous shares of the running total of key tiles over (sequence, key/value head), which each
  of them counts on the device: no host plan, and one captured graph is balanced for any lengths. A unit of work that
  lies in one share goes to the output, one that is cut leaves parts in a workspace.
* ``merge_kernel`` combines the parts of a cut unit in a fixed order.
* ``prefill_kernel`` serves the longer sequences by tiles of query rows, longest first.

Which kernel serves a sequence is decided by its length, on the device. Ideas: stream-K (Osama et al. 2023,
arXiv:2301.03598), FlashAttention-2 (arXiv:2307.08691), Flash-Decoding (Dao et al. 2023), the packing of grouped heads
from FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake, masks
from paged_ops.features import SCHEDULE_TILE as _SCHEDULE_TILE
from paged_ops.features import Features
from paged_ops.layouts import PagedKV, element_dtype, paged_kv
from paged_ops.lowerings.gpu import tiles
from paged_ops.lowerings.gpu.device import fp8_is_fnuz, has_fp8_cvt, has_hopper_gluon, has_pdl, on_device
from paged_ops.lowerings.gpu.features import (
    LN2,
    count_sink,
    dot_keys,
    finish,
    keep,
    keep_block_sparse,
    load_queries,
    load_tile,
    logits2,
    softmax_step,
    sparse_tile_is_seen,
)
from paged_ops.lowerings.gpu.fp8 import E4M3FN, FP8_FORMATS, encode_fp8

# The keyword arguments of attention that this lowering computes with or refuses by name (a test wants all of them).
KNOWS = frozenset(
    {
        "value_cache",
        "causal",
        "sliding_window",
        "attention_chunk",
        "soft_cap",
        "alibi_slopes",
        "sinks",
        "block_sparse",
        "k_scale",
        "v_scale",
        "output_scale",
        "kv_cache_dtype",
        "schedule",
    }
)

SCHEDULE_TILE = tl.constexpr(_SCHEDULE_TILE)


def paged_attention(query: Tensor, *args: Any, out: Tensor | None = None, **features: Any) -> Tensor:
    out = fake.paged_attention(query, *args, out=out, **features)
    _attend(Features(**features), out, None, query, *args)
    return out


def paged_attention_with_lse(
    query: Tensor, *args: Any, out: tuple[Tensor, Tensor] | None = None, **features: Any
) -> tuple[Tensor, Tensor]:
    out_, lse = fake.paged_attention_with_lse(query, *args, out=out, **features)
    _attend(Features(**features), out_, lse, query, *args)
    return out_, lse


def attention_schedule(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    schedule = fake.attention_schedule(
        seq_lens,
        query_start_loc,
        num_heads,
        num_kv_heads,
        head_size,
        causal=causal,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        out=out,
    )
    S = seq_lens.shape[0]
    with on_device(seq_lens):
        schedule_kernel[(1,)](
            schedule,
            seq_lens,
            query_start_loc,
            S,
            num_heads // num_kv_heads,
            sliding_window,
            attention_chunk,
            WINDOW=sliding_window > 0,
            CHUNK=attention_chunk > 0,
            BLOCK_S=tiles.sequences_at_once(S),
            num_warps=4,
        )
    return schedule


def unsupported(op: str, device: str, features: dict[str, Any]) -> list[str]:
    """Why an attention op would not run on ``device`` ("cuda" or "rocm") with these features and properties."""
    reasons = []
    cache_dtype = features.get("cache_dtype")
    if device == "cuda" and cache_dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        reasons.append(f"cache_dtype: {cache_dtype} is the fp8 of ROCm's gfx94x, on cuda float8_e4m3fn or float8_e5m2")
    D, Dv = features.get("head_size"), features.get("value_head_size")
    for name, size in (("head_size", D), ("value_head_size", Dv)):
        if size is not None and size > tiles.LARGEST_HEAD:
            reasons.append(f"{name}: at most {tiles.LARGEST_HEAD} on {device}, got {size}")
    return reasons


def _attend(
    f: Features,
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> None:
    paged = paged_kv(kv_cache, f.value_cache)
    N, B, K, D, Dv = *paged.key.shape[:3], paged.head_size, paged.value_head_size
    (T, H, _), S = query.shape, seq_lens.shape[0]
    if checks.debug_checks():
        checks.batch(block_tables, seq_lens, query_start_loc, T, N, B)
    if not (out.numel() and D and S and K):
        out.view(torch.uint8).zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    for reason in unsupported("paged_attention", "rocm" if torch.version.hip else "cuda", _properties(stored, D, Dv)):
        raise ValueError(reason)
    if not (N and B and block_tables.shape[1]):
        seq_lens, B = torch.zeros_like(seq_lens), max(B, 1)

    G = H // K
    key, value, cache_format = _readable(paged, stored)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    first_offset, offset_step, heads_an_offset = _sparse_offsets(sparse, H, K)
    plan = tiles.plan(query.dtype, key.dtype, T, S, G, D, Dv, query.device)

    tensors = (query, key, value, block_tables, seq_lens, query_start_loc, f.alibi_slopes, f.sinks)
    scales = (f.k_scale, f.v_scale, f.output_scale)
    numbers = (
        *query.stride(),
        *(key.stride(n) for n in (0, 1, 2, 3, 4)),
        *value.stride(),
        *block_tables.stride(),
        int(f.k_scale is not None and f.k_scale.shape[0] > 1),
        int(f.v_scale is not None and f.v_scale.shape[0] > 1),
        float(scale),
        float(f.soft_cap),
        f.sliding_window,
        f.attention_chunk,
        *((1, 0, 1) if sparse is None else sparse[:3]),
        first_offset,
        offset_step,
        S,
    )
    pdl = has_pdl()
    overlapped = {"launch_pdl": True} if pdl else {}
    fixed = {
        "CAUSAL": bool(f.causal),
        "WINDOW": f.sliding_window > 0,
        "CHUNK": f.attention_chunk > 0,
        "SOFT_CAP": f.soft_cap > 0,
        "SPARSE": sparse is not None,
        "HEADS_AN_OFFSET": heads_an_offset,
        "G": G,
        "B": B,
        "D": D,
        "Dv": Dv,
        "D_PAD": tiles.padded(D, stored.itemsize),
        "DV_PAD": tiles.padded(Dv, stored.itemsize),
        "X": key.shape[4],
        "FORMAT": cache_format,
        "RUN": _run(value, B),
        "BLOCK_S": tiles.sequences_at_once(S),
        "CHUNKS_OF_S": -(-S // tiles.sequences_at_once(S)),
        "PDL": pdl,
    }
    filled = out.view(torch.uint8) if f.output_scale is not None else out
    split, prefill = plan.split, plan.prefill
    P = plan.programs
    parts = query.new_empty((P, 2, split.block_m, Dv), dtype=torch.float32)
    part_lse = query.new_empty((P, 2, split.block_m), dtype=torch.float32)
    cuts = query.new_empty((P, 4), dtype=torch.int32)
    with on_device(query):
        split_kernel[(P,)](
            filled,
            lse,
            parts,
            part_lse,
            cuts,
            *tensors,
            *scales,
            *numbers,
            K,
            **fixed,
            BLOCK_M=split.block_m,
            BLOCK_N=split.block_n,
            **split.options(torch.version.hip is None),
        )
        if T * G <= split.block_m:
            pass  # no sequence can have more rows than that
        elif has_hopper_gluon() and block_tables.shape[1] and _hopper().serves(query, key, value, f, scale):
            # its producer reads the first entry of a table even for a sequence without keys
            _hopper().prefill(filled, lse, query, key, value, *tensors[3:6], f, scale, split.block_m)
        else:
            prefill_kernel[(K, T // (prefill.block_m // G) + S + 1)](
                filled,
                lse,
                *tensors,
                *scales,
                *numbers,
                **fixed,
                **overlapped,
                SPLIT_M=split.block_m,
                BLOCK_M=prefill.block_m,
                BLOCK_N=prefill.block_n,
                **prefill.options(torch.version.hip is None),
            )
        merge_kernel[(P, min(split.block_m, max(4, triton.next_power_of_2(G))))](
            filled,
            lse,
            parts,
            part_lse,
            cuts,
            query_start_loc,
            f.output_scale,
            H,
            S,
            T,
            **overlapped,
            G=G,
            Dv=Dv,
            DV_PAD=fixed["DV_PAD"],
            BLOCK_M=split.block_m,
            PARTS=min(64, triton.next_power_of_2(P)),
            PDL=pdl,
            num_warps=4,
        )


@functools.cache
def _hopper() -> ModuleType:
    """The Gluon kernels, imported where they can run."""
    from paged_ops.lowerings.gpu import hopper

    return hopper


def _readable(paged: PagedKV, stored: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Key and value views as a kernel reads them: fp8 in its own type where the target converts it, else its bits."""
    if stored not in FP8_FORMATS:
        return paged.key, paged.value, 0
    if has_fp8_cvt():
        return paged.key.view(stored), paged.value.view(stored), 0
    flavour = 2 if paged.key.dtype == torch.uint8 and fp8_is_fnuz() else 0
    return paged.key.view(torch.uint8), paged.value.view(torch.uint8), FP8_FORMATS[stored] + flavour


def _run(value: Tensor, B: int) -> int:
    """How many tokens of a block lie together in ``value [N, B, K, Dv]``, up to 16 bytes; else 1."""
    stride_n, stride_b, stride_k, stride_d = value.stride()
    if stride_b != 1 or stride_d == 1:
        return 1
    return math.gcd(
        16 // value.element_size(), B, stride_n, stride_k, stride_d, value.data_ptr() // value.element_size()
    )


def _properties(stored: torch.dtype, D: int, Dv: int) -> dict[str, Any]:
    return {"cache_dtype": stored, "head_size": D, "value_head_size": Dv}


def _sparse_offsets(sparse: masks.SparsePattern | None, H: int, K: int) -> tuple[int, int, int]:
    """The stripe's offset of query head h as ``first + (h // heads_an_offset) * step``."""
    if sparse is None or sparse.homo_head:
        return 1, 0, 1
    heads = K if sparse.homo_head_group else H
    step = max(1, int(sparse.vert_stride / (sparse.world_size * heads)))
    return sparse.rank * heads * step + 1, step, H // heads


@triton.jit
def see_tile(
    acc,
    m,
    l,
    q,
    i,  # [M] positions of the rows
    tile,
    seen,  # whether any row sees a key of the tile: if not, nothing is loaded
    slopes,  # [M]
    factor,
    seq_len,
    oldest,  # no row sees a key before it
    block_table,
    stride_m,
    keys,  # tuple: base of a head, strides n, b, dx, d
    values,  # tuple: base of a head, strides n, b, d
    soft_cap,
    window,
    chunk,
    sparse,  # tuple: block, local blocks, vertical stride, offset of each row [M]
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SPARSE: tl.constexpr,
    MASKED: tl.constexpr,  # off where every row sees every key of the tiles
    B: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    X: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Let the rows ``q [M, D]`` see one tile of keys."""
    EXACT: tl.constexpr = q.dtype == tl.float32
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else None
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = j < seq_len
    if WINDOW or CHUNK:
        live = live & (j >= oldest)
    if SPARSE:
        live = live & seen
    readable = live
    if RUN > 1:  # to the end of a run, which lies in one block
        readable = tl.max_constancy(j // RUN * RUN < seq_len, RUN)
    block = tl.load(block_table + (j // B) * stride_m, mask=readable, other=0)
    offset = j % B
    k = load_tile(
        keys[0], block, offset, live, live, keys[1], keys[2], keys[3], keys[4], D, D_PAD, X, FORMAT, q.dtype, 1
    )  # fmt: skip
    qk = dot_keys(q, k)
    logits = logits2(qk, factor, i, j, slopes, soft_cap, SOFT_CAP, ALIBI, EXACT)
    if MASKED:
        kept = keep(i, j, live, window, chunk, CAUSAL, WINDOW, CHUNK)
        if SPARSE:
            kept = kept & keep_block_sparse(i, j, sparse[3], sparse[0], sparse[1], sparse[2])
        logits = tl.where(kept, logits, float("-inf"))
    v = load_tile(
        values[0], block, offset, live, readable, values[1], values[2], 0, values[3], Dv, DV_PAD, Dv, FORMAT, q.dtype,
        RUN,
    )  # fmt: skip
    acc, m, l = softmax_step(logits, v, acc, m, l, PRECISION)
    return acc, m, l


@triton.jit
def store_rows(
    out, lse, result, lse2, row_token, row_head, row_live, output_scale, H, Dv: tl.constexpr, DV_PAD: tl.constexpr
):
    """Rows ``[M, Dv]`` to ``out [T, H, Dv]`` (contiguous), e4m3 with an output_scale, and their lse in natural log."""
    d = tl.arange(0, DV_PAD)
    row = row_token.to(tl.int64) * H + row_head
    mask = row_live[:, None] & (d < Dv)[None, :]
    if output_scale is not None:
        result = encode_fp8(result / tl.load(output_scale), E4M3FN, False)
    tl.store(out + row[:, None] * Dv + d[None, :], result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + row, lse2 * LN2, mask=row_live)


@triton.jit
def oldest_key(first_i, window, chunk, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that the query at ``first_i``, and so any later one, may see."""
    first_i = tl.maximum(first_i, 0)
    oldest = first_i * 0
    if WINDOW:
        oldest = tl.maximum(oldest, first_i - window + 1)
    if CHUNK:
        oldest = tl.maximum(oldest, first_i // chunk * chunk)
    return oldest


@triton.jit
def sequence(
    s, S, seq_lens, query_start_loc, window, chunk, K, WINDOW: tl.constexpr, CHUNK: tl.constexpr, G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of sequences s: first row, number of tokens and of keys, number of units, and the range of key tiles of each.

    A sequence that is not split_kernel's is one unit of one tile, without tokens and keys: passing over it is work too.
    """
    live = s < S
    start = tl.load(query_start_loc + s, mask=live, other=0)
    q_len = tl.load(query_start_loc + s + 1, mask=live, other=0) - start
    seq_len = tl.load(seq_lens + s, mask=live, other=0)
    mine = (q_len > 0) & (q_len * G <= BLOCK_M)
    q_len = tl.where(mine, q_len, 0)
    seq_len = tl.where(mine, seq_len, 0)
    first_tile = oldest_key(seq_len - q_len, window, chunk, WINDOW, CHUNK) // BLOCK_N
    end_tile = tl.maximum(tl.cdiv(seq_len, BLOCK_N), first_tile + 1)
    units = tl.where(mine, K, tl.where(live, 1, 0))
    return start, q_len, seq_len, units, first_tile, end_tile


@triton.jit
def split_kernel(
    out,
    lse,
    parts,  # [P, 2, M, Dv] float32: of a unit that began before the program's share (0), that goes on after it (1)
    part_lse,  # [P, 2, M] float32, to base 2
    cuts,  # [P, 4] int32: of the unit that goes on: first row, tokens, key/value head, last program (-1: there is none)
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    output_scale,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_n,
    k_stride_b,
    k_stride_k,
    k_stride_dx,
    k_stride_d,
    v_stride_n,
    v_stride_b,
    v_stride_k,
    v_stride_d,
    table_stride_s,
    table_stride_m,
    k_scale_stride,
    v_scale_stride,
    scale,
    soft_cap,
    window,
    chunk,
    sparse_block,
    local_blocks,
    vert_stride,
    first_offset,
    offset_step,
    S,
    K,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    HEADS_AN_OFFSET: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    X: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNKS_OF_S: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    p = tl.program_id(0)
    P = tl.num_programs(0)
    H = K * G
    r = tl.arange(0, BLOCK_M)
    group_head = tl.arange(0, triton.next_power_of_2(G)) % G

    # This program's share of the key tiles of all units, start : end, and the sequence s that it starts in. Both loops
    # are unrolled, so that what the first has loaded serves the second.
    total = 0
    for n in tl.static_range(CHUNKS_OF_S):
        s_ = n * BLOCK_S + tl.arange(0, BLOCK_S)
        _, _, _, units_, first_, end_ = sequence(
            s_, S, seq_lens, query_start_loc, window, chunk, K, WINDOW, CHUNK, G, BLOCK_M, BLOCK_N
        )
        total += tl.sum((end_ - first_) * units_)
    share = total // P
    longer = total - share * P  # so many programs take one tile more
    start = p * share + tl.minimum(p, longer)
    end = start + share + tl.where(p < longer, 1, 0)
    s = 0
    before = 0  # tiles of the sequences before s
    total = 0
    for n in tl.static_range(CHUNKS_OF_S):
        s_ = n * BLOCK_S + tl.arange(0, BLOCK_S)
        _, _, _, units_, first_, end_ = sequence(
            s_, S, seq_lens, query_start_loc, window, chunk, K, WINDOW, CHUNK, G, BLOCK_M, BLOCK_N
        )
        tiles_ = (end_ - first_) * units_
        passed = (total + tl.cumsum(tiles_, 0) <= start) & (s_ < S)
        s += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles_, 0))
        total += tl.sum(tiles_)

    # The unit (s, kh) and the tile in it where the share starts.
    row_start, q_len, seq_len, units, first_tile, end_tile = sequence(
        s, S, seq_lens, query_start_loc, window, chunk, K, WINDOW, CHUNK, G, BLOCK_M, BLOCK_N
    )
    kh = (start - before) // (end_tile - first_tile)
    part_tile = first_tile + (start - before) - kh * (end_tile - first_tile)  # where this program's part of it begins
    tile = part_tile - 1
    factor = scale
    if k_scale is not None:
        factor = scale * tl.load(k_scale + kh * k_scale_stride)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + kh * G + r % G)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # One loop over all tiles of the share: the loads of a unit are under way before the one before it is finished.
    for position in range(start, end):
        tile += 1
        if tile == end_tile:
            kh += 1
            if kh >= units:
                s += 1
                kh = 0
                row_start, q_len, seq_len, units, first_tile, end_tile = sequence(
                    s, S, seq_lens, query_start_loc, window, chunk, K, WINDOW, CHUNK, G, BLOCK_M, BLOCK_N
                )
            tile = first_tile
            part_tile = tile
            if k_scale is not None:
                factor = scale * tl.load(k_scale + kh * k_scale_stride)
            if alibi_slopes is not None:
                slopes = tl.load(alibi_slopes + kh * G + r % G)
        row_live = r < q_len * G
        row_token = row_start + r // G
        row_head = kh * G + r % G
        first_i = seq_len - q_len
        q = load_queries(query, row_token, row_head, row_live, q_stride_t, q_stride_h, q_stride_d, D, D_PAD)
        seen = True
        if SPARSE:
            group_offset = first_offset + ((kh * G + group_head) // HEADS_AN_OFFSET) * offset_step
            j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = sparse_tile_is_seen(first_i, j, j < seq_len, group_offset, sparse_block, local_blocks, vert_stride)
        acc, m, l = see_tile(
            acc, m, l, q, first_i + r // G, tile, seen, slopes, factor, seq_len,
            oldest_key(first_i, window, chunk, WINDOW, CHUNK),
            block_tables + s.to(tl.int64) * table_stride_s, table_stride_m,
            (key_cache + kh.to(tl.int64) * k_stride_k, k_stride_n, k_stride_b, k_stride_dx, k_stride_d),
            (value_cache + kh.to(tl.int64) * v_stride_k, v_stride_n, v_stride_b, v_stride_d),
            soft_cap, window, chunk,
            (sparse_block, local_blocks, vert_stride, first_offset + (row_head // HEADS_AN_OFFSET) * offset_step),
            CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
            B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, BLOCK_N,
        )  # fmt: skip
        if (tile + 1 == end_tile) | (position + 1 == end):
            from_start = part_tile == first_tile
            if sinks is not None:
                if from_start:  # the first part counts the sink
                    acc, m, l = count_sink(acc, m, l, tl.load(sinks + row_head))
            result, lse2 = finish(acc, m, l)
            if v_scale is not None:
                result = result * tl.load(v_scale + kh * v_scale_stride)
            if from_start & (tile + 1 == end_tile):
                store_rows(out, lse, result, lse2, row_token, row_head, row_live, output_scale, H, Dv, DV_PAD)
            else:
                part_row = (p * 2 + tl.where(from_start, 1, 0)).to(tl.int64) * BLOCK_M + r
                d = tl.arange(0, DV_PAD)
                tl.store(
                    parts + part_row[:, None] * Dv + d[None, :], result, mask=row_live[:, None] & (d < Dv)[None, :]
                )
                tl.store(part_lse + part_row, lse2, mask=row_live)
            acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)

    # A unit that this program was the first to see and did not finish: the program whose share holds its last tile.
    last = end - 1 + end_tile - 1 - tile
    of_longer = longer * (share + 1)
    last_program = tl.where(
        last < of_longer, last // (share + 1), longer + (last - of_longer) // tl.maximum(share, 1)
    )  # fmt: skip
    cut = (start < end) & (part_tile == first_tile) & (tile + 1 < end_tile)
    tl.store(cuts + p * 4, row_start)
    tl.store(cuts + p * 4 + 1, q_len)
    tl.store(cuts + p * 4 + 2, kh)
    tl.store(cuts + p * 4 + 3, tl.where(cut, last_program, -1))


@triton.jit
def merge_kernel(
    out,
    lse,
    parts,
    part_lse,
    cuts,
    query_start_loc,
    output_scale,
    H,
    S,
    T,
    G: tl.constexpr,
    Dv: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the unit that program p was the first to cut: their parts are p's second and later programs' first.

    And the rows of padding, which nobody else writes.
    """
    p = tl.program_id(0)
    own_row = tl.program_id(1)
    rows = tl.num_programs(1)
    d = tl.arange(0, DV_PAD)
    one = tl.arange(0, 1)
    for t in range(tl.load(query_start_loc + S) + p * rows + own_row, T, tl.num_programs(0) * rows):
        for h in range(0, H):
            nothing = tl.zeros([1, DV_PAD], tl.float32)
            unseen = tl.full([1], float("-inf"), tl.float32)
            store_rows(out, lse, nothing, unseen, t + one, h + one, one == 0, output_scale, H, Dv, DV_PAD)
    if PDL:
        gdc_wait()
    last = tl.load(cuts + p * 4 + 3)
    if last < 0:
        return
    row_start = tl.load(cuts + p * 4)
    tokens = tl.load(cuts + p * 4 + 1)
    kh = tl.load(cuts + p * 4 + 2)
    for r in range(own_row, tokens * G, rows):
        acc = tl.zeros([DV_PAD], tl.float32)
        m = float("-inf")
        l = 0.0
        for first in range(p, last + 1, PARTS):
            program = first + tl.arange(0, PARTS)
            live = program <= last
            row = (program * 2 + tl.where(program == p, 1, 0)).to(tl.int64) * BLOCK_M + r
            lse2 = tl.load(part_lse + row, mask=live, other=float("-inf"))  # [PARTS]
            part = tl.load(parts + row[:, None] * Dv + d[None, :], mask=live[:, None] & (d < Dv)[None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(lse2, 0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2(lse2 - shift)
            decay = tl.exp2(m - shift)
            acc = acc * decay + tl.sum(part * weight[:, None], 0)
            l = l * decay + tl.sum(weight, 0)
            m = m_new
        nothing_yet = tl.zeros([1], tl.float32)
        result, lse2_all = finish(acc[None, :], nothing_yet + m, nothing_yet + l)
        store_rows(
            out,
            lse,
            result,
            lse2_all,
            row_start + r // G + one,
            kh * G + r % G + one,
            one == 0,
            output_scale,
            H,
            Dv,
            DV_PAD,
        )


@triton.jit
def prefill_kernel(
    out,
    lse,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    output_scale,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_n,
    k_stride_b,
    k_stride_k,
    k_stride_dx,
    k_stride_d,
    v_stride_n,
    v_stride_b,
    v_stride_k,
    v_stride_d,
    table_stride_s,
    table_stride_m,
    k_scale_stride,
    v_scale_stride,
    scale,
    soft_cap,
    window,
    chunk,
    sparse_block,
    local_blocks,
    vert_stride,
    first_offset,
    offset_step,
    S,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    HEADS_AN_OFFSET: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    X: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNKS_OF_S: tl.constexpr,
    PDL: tl.constexpr,
    SPLIT_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    TOKENS: tl.constexpr = BLOCK_M // G
    kh = tl.program_id(0)
    H = tl.num_programs(0) * G
    # One tile more than any batch has: it makes this grid end after split_kernel, beside which it runs.
    if tl.program_id(1) == 0:
        if PDL:
            gdc_wait()
        return
    # Later tiles see more keys: they start first.
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence s starts at tile query_start_loc[s] // TOKENS + s, which leaves room for its last, partial tile.
    s = -1
    for n in tl.static_range(CHUNKS_OF_S):
        s_ = n * BLOCK_S + tl.arange(0, BLOCK_S)
        tile_ = tl.load(query_start_loc + s_, mask=s_ < S, other=0) // TOKENS + s_
        s += tl.sum(((tile_ <= query_tile) & (s_ < S)).to(tl.int32))
    row_start = tl.load(query_start_loc + s)
    q_len = tl.load(query_start_loc + s + 1) - row_start
    seq_len = tl.load(seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    if (first_token >= q_len) | (q_len * G <= SPLIT_M):
        return

    r = tl.arange(0, BLOCK_M)
    token = first_token + r // G
    row_live = (r < TOKENS * G) & (token < q_len)
    row_head = kh * G + r % G
    first_i = seq_len - q_len + first_token
    last_i = seq_len - q_len + tl.minimum(first_token + TOKENS, q_len) - 1
    i = seq_len - q_len + token
    q = load_queries(query, row_start + token, row_head, row_live, q_stride_t, q_stride_h, q_stride_d, D, D_PAD)
    factor = scale
    if k_scale is not None:
        factor = scale * tl.load(k_scale + kh * k_scale_stride)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + row_head)
    head_offset = (
        first_offset + ((kh * G + tl.arange(0, triton.next_power_of_2(G)) % G) // HEADS_AN_OFFSET) * offset_step
    )
    row_offset = first_offset + (row_head // HEADS_AN_OFFSET) * offset_step
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)

    # Key tiles: masked ones that begin before what every row sees, full ones, masked ones to the end.
    oldest = oldest_key(first_i, window, chunk, WINDOW, CHUNK)
    first_tile = oldest // BLOCK_N
    newest = seq_len
    full_end = seq_len // BLOCK_N
    if CAUSAL:
        newest = tl.minimum(seq_len, last_i + 1)
        full_end = tl.maximum(first_i + 1, 0) // BLOCK_N
    end_tile = tl.maximum(tl.cdiv(newest, BLOCK_N), first_tile)
    full_first = tl.cdiv(oldest_key(last_i, window, chunk, WINDOW, CHUNK), BLOCK_N)
    full_first = tl.minimum(tl.maximum(full_first, first_tile), end_tile)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end_tile)

    block_table = block_tables + s.to(tl.int64) * table_stride_s
    keys = (key_cache + kh.to(tl.int64) * k_stride_k, k_stride_n, k_stride_b, k_stride_dx, k_stride_d)
    values = (value_cache + kh.to(tl.int64) * v_stride_k, v_stride_n, v_stride_b, v_stride_d)
    sparse = (sparse_block, local_blocks, vert_stride, row_offset)
    if WINDOW or CHUNK:
        for tile in range(first_tile, full_first):
            acc, m, l = see_tile(
                acc, m, l, q, i, tile, True, slopes, factor, seq_len, oldest, block_table, table_stride_m, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, BLOCK_N,
            )  # fmt: skip
    if not SPARSE:
        for tile in range(full_first, full_end):
            acc, m, l = see_tile(
                acc, m, l, q, i, tile, True, slopes, factor, seq_len, oldest, block_table, table_stride_m, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, False,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, BLOCK_N,
            )  # fmt: skip
    if SPARSE:
        tile = first_tile
        while tile < end_tile:
            j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if sparse_tile_is_seen(first_i, j, j < newest, head_offset, sparse_block, local_blocks, vert_stride):
                acc, m, l = see_tile(
                    acc, m, l, q, i, tile, True, slopes, factor, seq_len, oldest, block_table, table_stride_m, keys,
                    values, soft_cap, window, chunk, sparse,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                    B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, BLOCK_N,
                )  # fmt: skip
            tile += 1
    else:
        for tile in range(full_end, end_tile):
            acc, m, l = see_tile(
                acc, m, l, q, i, tile, True, slopes, factor, seq_len, oldest, block_table, table_stride_m, keys, values,
                soft_cap, window, chunk, sparse,
                CAUSAL, WINDOW, CHUNK, SOFT_CAP, alibi_slopes is not None, SPARSE, True,
                B, D, Dv, D_PAD, DV_PAD, X, FORMAT, RUN, BLOCK_N,
            )  # fmt: skip
    if sinks is not None:
        acc, m, l = count_sink(acc, m, l, tl.load(sinks + row_head))
    result, lse2 = finish(acc, m, l)
    if v_scale is not None:
        result = result * tl.load(v_scale + kh * v_scale_stride)
    store_rows(out, lse, result, lse2, row_start + token, row_head, row_live, output_scale, H, Dv, DV_PAD)


@triton.jit
def schedule_kernel(
    schedule,
    seq_lens,
    query_start_loc,
    S,
    G,
    window,
    chunk,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    total = 0
    tl.store(schedule, total)
    for chunk_of_s in range(0, S, BLOCK_S):
        s = chunk_of_s + tl.arange(0, BLOCK_S)
        live = s < S
        q_len = tl.load(query_start_loc + s + 1, mask=live, other=0) - tl.load(query_start_loc + s, mask=live, other=0)
        seq_len = tl.load(seq_lens + s, mask=live, other=0)
        oldest = oldest_key(seq_len - q_len, window, chunk, WINDOW, CHUNK)
        tiles = tl.cdiv(q_len * G, SCHEDULE_TILE) * tl.cdiv(tl.maximum(seq_len - oldest, 0), SCHEDULE_TILE)
        tl.store(schedule + 1 + s, total + tl.cumsum(tiles, 0), mask=live)
        total += tl.sum(tiles)
