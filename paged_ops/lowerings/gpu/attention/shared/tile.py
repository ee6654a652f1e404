"""What all attention kernels share: loads from the paged cache, logits and softmax.

Letters inside kernels: M packed query rows of a tile (row r is token ``r // G`` and head ``r % G`` of the G = H/K query
heads of a key/value head), N keys of a tile, or of each of its W slices, D and Dv head sizes padded to powers of two.
Exponentials are to base 2: :func:`logits2` returns logits multiplied by log2(e). A feature that is off compiles away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.attention.shared.masks import MASKS_APPLIED, keep, only_seen, place_of
from paged_ops.lowerings.gpu.fp8 import E4M3FN, decode_fp8, encode_fp8, widen_fp8, widen_pairs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# What the helpers here apply, by the names of spec.needs.
APPLIES = frozenset(
    {
        *MASKS_APPLIED,
        *("soft_cap", "alibi", "sinks"),
        *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("bits of float8_e4m3fn", "bits of float8_e5m2", "bits of float8_e4m3fnuz", "bits of float8_e5m2fnuz"),
        *("k_scale", "v_scale", "output_scale"),
    }
)


class Batch(NamedTuple):
    """What a kernel is called with."""

    tensors: Any  # Pointers
    numbers: Any  # Numbers
    ranges: Any  # addresses of the first sequence's ranges [R], padded to a power of two; None: no ranges
    lanes: Any = None  # of Gluon kernels that divide work: the first sequences [DIVISION.at_once]


class Rows(NamedTuple):
    """A tile of packed query rows of one key/value head."""

    q: Any  # [M, D]
    i: Any  # [M] their positions
    sees: Any  # None, or for each row the first key that it sees [M] and the end [M]: see reach_of_ranges
    slopes: Any  # [M], or None
    factor: Any  # of q @ k: one number, or one per row that broadcasts to them
    offset: Any  # [M] offsets of the block-sparse stripes


class Keys(NamedTuple):
    """The keys and values that a tile of query rows may see."""

    numbers: Any  # of the call
    seq_len: Any
    hidden: Any  # Hidden
    block_table: Any  # of the sequence
    k: Any  # of the head
    v: Any


@triton.jit
def stored_head(kh, SPEC: tl.constexpr):
    """The key/value head in the cache of a unit's head."""
    GROUPS: tl.constexpr = SPEC.groups
    if GROUPS > 1:
        kh = kh // GROUPS
    return kh


@triton.jit
def load_tile(
    base, block, offset, live, readable, SIDE: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """``[N, PADDED]`` keys or values of one head, at ``base``: tokens ``offset [N]`` of blocks ``block [N]``, 0 past
    the head size and for tokens that are not ``live``. ``readable``: those that may be read, equal for a run."""
    d = tl.arange(0, PADDED)
    if SIDE.x == SIDE.size:
        column = d * SIDE.d
    else:
        column = (d // SIDE.x) * SIDE.dx + (d % SIDE.x) * SIDE.d
    row = block.to(tl.int64) * SIDE.n + offset.to(tl.int64) * SIDE.b
    mask = readable[:, None]
    if SIDE.size < PADDED:
        mask = mask & (d < SIDE.size)[None, :]
    place = row[:, None] + column[None, :]
    RUN: tl.constexpr = SIDE.run
    if RUN > 1:
        place = tl.max_contiguous(tl.multiple_of(place, (RUN, 1)), (RUN, 1))
    tile = tl.load(base + place, mask=mask, other=0.0)
    if RUN > 1:
        tile = tl.where(live[:, None], tile, 0.0).to(tile.dtype)
    if tile.dtype.primitive_bitwidth == 8 and FORMAT == 0:
        return widen_fp8(tile).to(DTYPE)
    if FORMAT != 0:
        tile = decode_fp8(tile, FORMAT)
    return tile.to(DTYPE)


@triton.jit
def load_pairs(base, block, offset, live, SIDE: tl.constexpr, PADDED: tl.constexpr):
    """As :func:`load_tile`, of an fp8 cache as float16: the even elements and the odd ones, ``[N, PADDED/2]`` each.

    Two 8-bit numbers are loaded as one of 16 bits, which goes from shared memory straight into tensor cores' operands.
    """
    d = tl.arange(0, PADDED // 2)
    row = block.to(tl.int64) * (SIDE.n // 2) + offset.to(tl.int64) * (SIDE.b // 2)
    mask = live[:, None]
    if SIDE.size < PADDED:
        mask = mask & (d < SIDE.size // 2)[None, :]
    pairs = tl.load(base.to(tl.pointer_type(tl.int16)) + row[:, None] + d[None, :], mask=mask, other=0)
    return widen_pairs(pairs, base.dtype.element_ty == tl.float8e4nv)


@triton.jit
def load_queries(
    query, row_token, row_head, row_live, SPEC: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr = 0,
    SIZE: tl.constexpr = None,
):  # fmt: skip
    """``[M, PADDED]`` packed query rows, or SIZE of their columns, from column FIRST on."""
    COLUMNS: tl.constexpr = SPEC.k_side.size if SIZE is None else SIZE
    d = tl.arange(0, PADDED)
    row = row_token.to(tl.int64) * SPEC.query[0] + row_head.to(tl.int64) * SPEC.query[1]
    mask = row_live[:, None] & (d < COLUMNS)[None, :]
    return tl.load(query + row[:, None] + (d + FIRST)[None, :] * SPEC.query[2], mask=mask, other=0.0)


@triton.jit
def queries_for_fp8(q):
    """bfloat16 rows ``q [M, D]`` as float16, and their factors ``[M, 1]``. Each row is divided by its factor, a power
    of two, so that its largest element is less than 2. float16, as one instruction converts two fp8 numbers to it."""
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    power = tl.minimum(largest.to(tl.uint32, bitcast=True) & 0x7F800000, 253 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def dot_keys(q, k):
    """``q [M, D]`` times ``k [N, D]``. float32 adds 64 terms at a time: one chain of 256 would cost a decimal
    digit."""
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
    """tanh by base-2 exponentials. EXACT keeps float32's relative accuracy near 0, where 1 - 2 / (e^2x + 1) cancels."""
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
def logits2(qk, rows, j, soft_cap, SOFT_CAP: tl.constexpr, EXACT: tl.constexpr):
    """log2(e) * (cap(factor * qk) + slope * (j - i)); all broadcast to the shape of ``qk``."""
    if SOFT_CAP:
        logits = soft_cap * tanh(qk * rows.factor / soft_cap, EXACT) * LOG2E
    else:
        logits = qk * (rows.factor * LOG2E)
    if rows.slopes is not None:
        logits += rows.slopes * LOG2E * (j - rows.i).to(tl.float32)
    return logits


@triton.jit
def softmax_steps(logits, m, l):
    """Add tiles of logits of one shape, with keys along axis 1, to the running maxima and totals. Returns a tuple of
    their weights, and the decay of the accumulators.

    Source: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) as in FlashAttention-2.
    """
    highest = logits[0]
    for n in tl.static_range(1, len(logits)):
        highest = tl.maximum(highest, logits[n])
    m_new = tl.maximum(m, tl.max(highest, 1))
    # A row that has seen no key keeps the maximum -inf, and 0 is subtracted, as exp2(-inf - 0) is 0.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights: tl.tuple = ()
    for n in tl.static_range(len(logits)):
        weights += (tl.exp2(logits[n] - tl.expand_dims(shift, 1)),)
    total = weights[0]
    for n in tl.static_range(1, len(logits)):
        total += weights[n]
    decay = tl.exp2(m - shift)
    return weights, tl.expand_dims(decay, 1), m_new, l * decay + tl.sum(total, 1)


@triton.jit
def masked_logits(
    qk, rows, j, live, numbers, SPEC: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    SLICED: tl.constexpr = False,
):  # fmt: skip
    """:func:`logits2` of ``qk = q @ k``, and -inf where a row does not see a key. Rows are the first axis of ``qk``, or
    the last of three if SLICED; j and live broadcast to it."""
    MASKS: tl.constexpr = SPEC.masks  # triton 3.6: a field of a constant is a constant only under a name of its own
    AXES: tl.constexpr = (0, 1) if SLICED else (1,)
    slopes, sees = rows.slopes, rows.sees
    if slopes is not None:
        slopes = tl.expand_dims(slopes, AXES)
    if sees is not None:
        sees = (tl.expand_dims(sees[0], AXES), tl.expand_dims(sees[1], AXES))
    i, offset = tl.expand_dims(rows.i, AXES), tl.expand_dims(rows.offset, AXES)
    across = Rows(None, i, sees, slopes, rows.factor, offset)
    logits = logits2(qk, across, j, numbers.soft_cap, SPEC.logits.soft_cap, EXACT)
    if MASKED:
        kept = keep(across, j, live, numbers, MASKS)
        logits = tl.where(kept, logits, float("-inf"))
    return logits


@triton.jit
def count_sink(acc, m, l, sink):
    """One more logit per row, without a value."""
    m_new = tl.maximum(m, sink * LOG2E)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - shift)
    return acc * decay[:, None], m_new, l * decay + tl.exp2(sink * LOG2E - shift)


@triton.jit
def normalise(acc, m, l):
    """The normalised output and the base-2 lse of each row; 0 and -inf if it has seen no key. NaN stays NaN."""
    seen = l != 0.0
    out = tl.where(seen[:, None], acc / tl.where(seen, l, 1.0)[:, None], 0.0)
    lse2 = tl.where(seen, m + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    return out, lse2


@triton.jit
def see_tile(accs, m, l, rows, keys, tile, seen, SPEC: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys to the rows, as :func:`see_keys`. ``seen``: whether any row sees a key of the tile; if not,
    nothing is loaded."""
    V_SIDE: tl.constexpr = SPEC.v_side
    RUN: tl.constexpr = V_SIDE.run
    MASKS: tl.constexpr = SPEC.masks
    j = place_of(tile, keys.hidden, MASKS, TILE.N) * TILE.N + tl.arange(0, TILE.N)
    live = only_seen(j < keys.seq_len, j, 1, keys.hidden, MASKS)
    if SPEC.masks.sparse:
        live = live & seen
    readable = live
    if RUN > 1:  # up to the end of a run, which lies in one block
        begin = j // RUN * RUN
        readable = tl.max_constancy(only_seen(begin < keys.seq_len, begin, RUN, keys.hidden, MASKS), RUN)
    return see_keys(accs, m, l, rows, keys, j, live, readable, SPEC, TILE, MASKED)


@triton.jit
def see_keys(
    accs, m, l, rows, keys, j, live, readable, SPEC: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add the keys at positions ``j [N]`` to the rows: to ``accs``, which is ``[M, Dv]`` or, if TILE.paired, their even
    and their odd columns, to their maxima ``m`` and to their totals ``l``. ``live``: the keys that a row may see;
    ``readable``: those that may be read, equal for a run. MASKED: False if every row sees all of them."""
    q = rows.q
    EXACT: tl.constexpr = q.dtype == tl.float32
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else None
    FORMAT: tl.constexpr = SPEC.storage.format
    K_SIDE: tl.constexpr = SPEC.k_side
    V_SIDE: tl.constexpr = SPEC.v_side
    block = tl.load(keys.block_table + (j // SPEC.B) * SPEC.table, mask=readable, other=0)
    offset = j % SPEC.B
    if TILE.paired:
        q_even, q_odd = tl.split(tl.reshape(q, (q.shape[0], TILE.D // 2, 2)))
        k_even, k_odd = load_pairs(keys.k, block, offset, live, K_SIDE, TILE.D)
        qk = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))
    else:
        k = load_tile(keys.k, block, offset, live, live, K_SIDE, TILE.D, FORMAT, q.dtype)
        qk = dot_keys(q, k)
    logits = masked_logits(qk, rows, j[None, :], live[None, :], keys.numbers, SPEC, MASKED, EXACT)
    weights, decay, m, l = softmax_steps((logits,), m, l)
    p = weights[0]
    if TILE.paired:
        v_even, v_odd = load_pairs(keys.v, block, offset, live, V_SIDE, TILE.Dv)
        p16 = p.to(tl.float16)
        accs = (tl.dot(p16, v_even, accs[0] * decay), tl.dot(p16, v_odd, accs[1] * decay))
    else:
        v = load_tile(keys.v, block, offset, live, readable, V_SIDE, TILE.Dv, FORMAT, q.dtype)
        accs = (tl.dot(p.to(v.dtype), v, accs[0] * decay, input_precision=PRECISION),)
    return accs, m, l


@triton.jit
def nothing_seen(M: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr):
    """The state from which :func:`see_tile` starts, or see_slices of slices.py, with SLICES."""
    if SLICES == 0:
        acc = tl.zeros([M, COLUMNS], tl.float32)
        m = tl.full([M], float("-inf"), tl.float32)
    else:
        acc = tl.zeros([SLICES, COLUMNS, M], tl.float32)
        m = tl.full([SLICES, M], float("-inf"), tl.float32)
    return acc, m, tl.zeros_like(m)


@triton.jit
def store_rows(tensors, result, lse2, row_token, row_head, row_live, d, H, Dv: tl.constexpr):
    """Store columns d of rows of ``out [T, H, Dv]`` (contiguous; e4m3 with an output_scale), and their natural lse."""
    row = row_token.to(tl.int64) * H + row_head
    mask = row_live[:, None] & (d < Dv)[None, :]
    if tensors.output_scale is not None:
        result = encode_fp8(result / tl.load(tensors.output_scale), E4M3FN, False)
    tl.store(tensors.out + row[:, None] * Dv + d[None, :], result.to(tensors.out.dtype.element_ty), mask=mask)
    if tensors.lse is not None:
        tl.store(tensors.lse + row, lse2 * LN2, mask=row_live)


@triton.jit
def store_padding(tensors, first, T, step, one, d, H, Dv: tl.constexpr):
    """Rows of padding, from ``first`` to T by ``step``: zero, and nothing seen."""
    for t in range(first, T, step):
        for h in range(0, H):
            nothing = tl.zeros([1, d.shape[0]], tl.float32)
            unseen = tl.full([1], float("-inf"), tl.float32)
            store_rows(tensors, nothing, unseen, t + one, h + one, one == 0, d, H, Dv)
