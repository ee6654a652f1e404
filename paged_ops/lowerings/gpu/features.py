"""What all attention kernels share: loads from the paged cache, the logits, the masks, the softmax.

Letters inside kernels: M packed query rows of a tile (row r is token ``r // G`` and head ``r % G`` of the G = H/K query
heads of a key/value head), N keys of a tile, D and Dv head sizes padded to powers of two. Exponentials are to base 2:
logits leave :func:`logits2` multiplied by log2(e). A feature that is off compiles away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.fp8 import decode_fp8

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    base,  # of one key/value head
    block,  # [N] block ids
    offset,  # [N] tokens inside the blocks
    live,  # [N] whether a token is seen
    readable,  # [N] whether a token may be read: the same for the RUN tokens of a run
    stride_n,
    stride_b,
    stride_dx,
    stride_d,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    X: tl.constexpr,  # elements of a head that lie together: SIZE where not packed
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    RUN: tl.constexpr,  # so many tokens lie together; 1 where elements do
):
    """``[N, PADDED]`` keys or values of one head; 0 past the head size and where not live, whatever is there."""
    d = tl.arange(0, PADDED)
    if X == SIZE:
        column = d * stride_d
    else:
        column = (d // X) * stride_dx + (d % X) * stride_d
    row = block.to(tl.int64) * stride_n + offset.to(tl.int64) * stride_b
    mask = readable[:, None]
    if SIZE < PADDED:
        mask = mask & (d < SIZE)[None, :]
    place = row[:, None] + column[None, :]
    if RUN > 1:
        place = tl.max_contiguous(tl.multiple_of(place, (RUN, 1)), (RUN, 1))
    tile = tl.load(base + place, mask=mask, other=0.0)
    if RUN > 1:
        tile = tl.where(live[:, None], tile, 0.0).to(tile.dtype)
    if FORMAT == 1:
        return decode_e4m3(tile).to(DTYPE)
    if FORMAT != 0:
        tile = decode_fp8(tile, FORMAT)
    return tile.to(DTYPE)


@triton.jit
def decode_e4m3(bits):
    """The float16 numbers that e4m3fn ``bits`` hold, in few instructions: tiles of keys are decoded all the time.

    e4m3's fields, moved to float16's places, are a float16 whose exponent's bias is 8 more: 2**-8 of the number.
    """
    wide = bits.to(tl.uint16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    real = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), real).to(tl.float16)


@triton.jit
def load_queries(
    query, row_token, row_head, row_live, stride_t, stride_h, stride_d, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """``[M, PADDED]`` packed query rows."""
    d = tl.arange(0, PADDED)
    row = row_token.to(tl.int64) * stride_t + row_head.to(tl.int64) * stride_h
    mask = row_live[:, None] & (d < SIZE)[None, :]
    return tl.load(query + row[:, None] + d[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def dot_keys(q, k):
    """``q [M, D]`` times ``k [N, D]``. float32 adds up 64 products at a time: in one row, 256 would cost a decimal."""
    if q.dtype != tl.float32:
        return tl.dot(q, tl.trans(k))
    elif q.shape[1] <= 64:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        sums: tl.constexpr = q.shape[1] // 64
        q_ = tl.permute(tl.reshape(q, (q.shape[0], sums, 64)), (1, 0, 2))
        k_ = tl.permute(tl.reshape(k, (k.shape[0], sums, 64)), (1, 2, 0))
        return tl.sum(tl.dot(q_, k_, input_precision="ieee"), 0)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """By base-2 exponentials; EXACT keeps float32's relative accuracy near 0, where 1 - 2 / (e^2x + 1) cancels."""
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if not EXACT:
        return far
    y = x * x
    series = -1382.0 / 155925.0 + y * (21844.0 / 6081075.0)
    series = 62.0 / 2835.0 + y * series
    series = -17.0 / 315.0 + y * series
    near = x + x * y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * series))
    return tl.where(y < 0.125, near, far)


@triton.jit
def apply_soft_cap(logits, soft_cap, EXACT: tl.constexpr):
    """``soft_cap * tanh(logits / soft_cap)``."""
    return soft_cap * tanh(logits / soft_cap, EXACT)


@triton.jit
def logits2(qk, factor, i, j, slopes, soft_cap, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr):
    """log2(e) * (cap(factor * qk) + slope * (j - i)), ``[M, N]``."""
    if SOFT_CAP:
        logits = apply_soft_cap(qk * factor, soft_cap, EXACT) * LOG2E
    else:
        logits = qk * (factor * LOG2E)
    if ALIBI:
        logits += (slopes * LOG2E)[:, None] * (j[None, :] - i[:, None]).to(tl.float32)
    return logits


@triton.jit
def keep(
    i,
    j,
    live,
    window,
    chunk,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Whether the queries at positions ``i [M]`` see the keys at ``j [N]``, of which ``live`` exist."""
    kept = live[None, :]
    if CAUSAL:
        kept = kept & (j[None, :] <= i[:, None])
    if WINDOW:
        kept = kept & (i[:, None] - j[None, :] < window)
    if CHUNK:
        kept = kept & (i[:, None] // chunk == j[None, :] // chunk)
    return kept


@triton.jit
def keep_block_sparse(i, j, offset, sparse_block, local_blocks, vert_stride):
    """Local blocks or a vertical stripe that slides over heads by ``offset [M]``; causality is not included."""
    qb = i[:, None] // sparse_block
    kb = j[None, :] // sparse_block
    return (qb - kb < local_blocks) | ((kb + offset[:, None]) % vert_stride == 0)


@triton.jit
def sparse_tile_is_seen(first_i, j, live, offset, sparse_block, local_blocks, vert_stride):
    """Whether any row sees any key of a tile: its first row stands at ``first_i``, its heads have ``offset``.

    The row that sees the most of a block locally is the first at or after it.
    """
    kb = j // sparse_block
    near = tl.maximum(first_i // sparse_block, kb) - kb < local_blocks
    stripe = tl.max(((kb[None, :] + offset[:, None]) % vert_stride == 0).to(tl.int32), 0)
    return tl.max((live & (near | (stripe > 0))).to(tl.int32), 0) > 0


@triton.jit
def softmax_step(logits, value, acc, m, l, PRECISION: tl.constexpr):
    """Take a tile of logits ``[M, N]`` and values ``[N, Dv]`` into the running sum ``acc [M, Dv]``, maximum and total.

    Source: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) as in FlashAttention-2.
    """
    m_new = tl.maximum(m, tl.max(logits, 1))
    # A row that has seen no key yet keeps the maximum -inf: exp2(-inf - 0) is the 0 that it needs.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - shift[:, None])
    decay = tl.exp2(m - shift)
    l = l * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
    return acc, m_new, l


@triton.jit
def count_sink(acc, m, l, sink):
    """One more logit a row that has no value."""
    m_new = tl.maximum(m, sink * LOG2E)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - shift)
    return acc * decay[:, None], m_new, l * decay + tl.exp2(sink * LOG2E - shift)


@triton.jit
def finish(acc, m, l):
    """The normalised output and the base-2 lse of what a row has seen; 0 and -inf if that is nothing."""
    seen = l > 0.0
    out = tl.where(seen[:, None], acc / tl.where(seen, l, 1.0)[:, None], 0.0)
    lse2 = tl.where(seen, m + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    return out, lse2
