"""Few query rows: a tile of keys in slices, one per warp, each with its own softmax and accumulators.

Letters as in shared/tile.py, W slices of a tile. A slice has one or more pieces of 16 keys; a piece lies in one block.
A unit may have two adjacent key/value heads: then a tile has the rows of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.attention.shared.masks import only_seen, place_of
from paged_ops.lowerings.gpu.attention.shared.tile import masked_logits, nothing_seen, softmax_steps
from paged_ops.lowerings.gpu.fp8 import widen_pairs
from paged_ops.lowerings.gpu.spec import SLICE

PIECE_KEYS = tl.constexpr(SLICE)  # of a slice that lie in one block


@triton.jit
def nothing_summed(TILE: tl.constexpr):
    """The state from which :func:`see_slices` starts: the accumulators of each head of a unit, and, if TILE.paired,
    one for even and one for odd columns."""
    HALVES: tl.constexpr = 2 if TILE.paired else 1
    COUNT: tl.constexpr = HALVES * TILE.heads
    acc, m, l = nothing_seen(TILE.M, TILE.Dv // HALVES, TILE.W)
    accs: tl.tuple = ()
    for _ in tl.static_range(COUNT):
        accs += (acc,)
    return accs, m, l


@triton.jit
def see_slices(accs, m, l, rows, keys, tile, seen, SPEC: tl.constexpr, TILE: tl.constexpr):
    """As see_tile of tile.py, for few rows: maxima and totals are ``[W, M]``, of one slice of keys per warp. ``accs``:
    ``[W, Dv, M]`` for each head of the unit, or if TILE.paired its even columns and its odd ones. The factor of rows is
    one number, or ``[1, 1, M]``.

    Each of the W slices has a softmax of its own until :func:`join_slices`, so warps wait only for each other's loads.
    Its keys are pieces that lie in one block each. The matmul is keys by queries, so that 8 rows fill a
    matrix instruction. With several key/value heads, each row takes the result of its own head.
    """
    q = rows.q
    K_SIDE: tl.constexpr = SPEC.k_side
    V_SIDE: tl.constexpr = SPEC.v_side
    N: tl.constexpr = TILE.N // TILE.W
    PIECE: tl.constexpr = PIECE_KEYS
    PIECES: tl.constexpr = N // PIECE
    HEADS: tl.constexpr = TILE.heads
    M: tl.constexpr = q.shape[0]
    MASKS: tl.constexpr = SPEC.masks
    place = place_of(tile, keys.hidden, MASKS, TILE.N)
    if TILE.paired:
        q_even, q_odd = tl.split(tl.reshape(q, (M, TILE.D // 2, 2)))
    logits: tl.tuple = ()
    places: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        first = place * TILE.N + tl.arange(0, TILE.W) * N + piece * PIECE
        j = first[:, None] + tl.arange(0, PIECE)[None, :]
        live = only_seen(j < keys.seq_len, j, 1, keys.hidden, MASKS)
        entered = only_seen(first < keys.seq_len, first, PIECE, keys.hidden, MASKS)
        if SPEC.masks.sparse:
            live = live & seen
            entered = entered & seen
        block = tl.load(keys.block_table + (first // SPEC.B) * SPEC.table, mask=entered, other=0).to(tl.int64)
        offset = (first % SPEC.B).to(tl.int64)
        # Keys that no row sees are masked as logits. They are read all the same, from a block that exists.
        for head in tl.static_range(HEADS):
            base = keys.k + head * (K_SIDE.k // HEADS)
            k = load_slices(base, block, offset, keys.seq_len > 0, K_SIDE, TILE.D, PIECE, TILE.paired, False)
            if TILE.paired:
                # One matmul for all slices: then the queries stay in registers from tile to tile.
                k = tl.reshape(k, (k.shape[0] * PIECE, k.shape[2]))
                k_even, k_odd = widen_pairs(k, keys.k.dtype.element_ty == tl.float8e4nv)
                qk_ = tl.dot(k_odd, tl.trans(q_odd), tl.dot(k_even, tl.trans(q_even)))
                qk_ = tl.reshape(qk_, (qk_.shape[0] // PIECE, PIECE, M))
            else:
                qk_ = tl.dot(k, per_slice(q, TILE.W))
            if head == 0:
                qk = qk_
            else:
                qk = tl.where(is_of_head(head, M, SPEC, TILE), qk_, qk)
        logits += (masked_logits(qk, rows, j[:, :, None], live[:, :, None], keys.numbers, SPEC, True, False, True),)
        places += ((block, offset, live),)
    weights, decay, m, l = softmax_steps(logits, m, l)
    for piece in tl.static_range(PIECES):
        block, offset, live = places[piece]
        p = weights[piece]
        added: tl.tuple = ()
        for head in tl.static_range(HEADS):
            base = keys.v + head * (V_SIDE.k // HEADS)
            v = load_slices(base, block, offset, live[:, None, :], V_SIDE, TILE.Dv, PIECE, TILE.paired, True)
            if TILE.paired:
                v_even, v_odd = widen_pairs(v, keys.v.dtype.element_ty == tl.float8e4nv)
                even, odd = accs[2 * head], accs[2 * head + 1]
                added += (tl.dot(v_even, p.to(tl.float16), even * decay if piece == 0 else even),)
                added += (tl.dot(v_odd, p.to(tl.float16), odd * decay if piece == 0 else odd),)
            else:
                added += (tl.dot(v, p.to(v.dtype), accs[head] * decay if piece == 0 else accs[head]),)
        accs = added
    return accs, m, l


@triton.jit
def is_of_head(head, M: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr):
    """``[1, 1, M]``: whether packed query rows are of a unit's key/value head, of the TILE.heads that it has."""
    r = tl.arange(0, M)
    return (r % SPEC.G // (SPEC.G // TILE.heads) == head)[None, None, :]


@triton.jit
def load_slices(
    base, block, offset, live, SIDE: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, PAIRED: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
):  # fmt: skip
    """N keys or values of one head from each place (``block [W]``, ``offset [W]``): ``[W, N, PADDED]``, or ``[W,
    PADDED, N]`` if COLUMNS_FIRST. Pairs of 8-bit numbers are int16, with half as many columns."""
    PAIR: tl.constexpr = 2 if PAIRED else 1
    if PAIRED:
        base = base.to(tl.pointer_type(tl.int16))
    place = (block * (SIDE.n // PAIR) + offset * (SIDE.b // PAIR))[:, None, None]
    n = tl.arange(0, N) * (SIDE.b // PAIR)
    d = tl.arange(0, PADDED // PAIR)
    column = d if PAIRED else d * SIDE.d
    if COLUMNS_FIRST:
        place = place + (column[None, :, None] + n[None, None, :])
        mask = live & (d < SIDE.size // PAIR)[None, :, None]
    else:
        place = place + (n[None, :, None] + column[None, None, :])
        mask = live & (d < SIDE.size // PAIR)[None, None, :]
    return tl.load(base + place, mask=mask, other=0)


@triton.jit
def per_slice(q, SLICES: tl.constexpr):
    """The rows ``q [M, D]`` as each slice takes them: ``[W, D, M]``."""
    return tl.broadcast_to(tl.trans(q)[None, :, :], (SLICES, q.shape[1], q.shape[0]))


@triton.jit
def of_own_head(accs, half: tl.constexpr, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The accumulators ``[W, Dv, M]`` of each row's own key/value head; half 1 has the odd columns."""
    HALVES: tl.constexpr = 2 if TILE.paired else 1
    HEADS: tl.constexpr = TILE.heads  # static_range takes no other number
    acc = accs[half]
    for head in tl.static_range(1, HEADS):
        acc = tl.where(is_of_head(head, acc.shape[2], SPEC, TILE), accs[head * HALVES + half], acc)
    return acc


@triton.jit
def join_slices(acc, m, l):
    """The sum ``[M, Dv]``, maxima and totals ``[M]`` of all slices together."""
    most = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(most == float("-inf"), 0.0, most)[None, :])
    accs = tl.permute(acc * weight[:, None, :], (2, 1, 0))
    # By halves: tl.sum would send each number through shared memory several times.
    for _ in tl.static_range(3):
        if accs.shape[2] > 1:
            low, high = tl.split(tl.reshape(accs, (accs.shape[0], accs.shape[1], accs.shape[2] // 2, 2)))
            accs = low + high
    return tl.reshape(accs, (accs.shape[0], accs.shape[1])), most, tl.sum(l * weight, 0)
