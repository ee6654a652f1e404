"""Helpers for the roles of the latent Hopper kernels: page addresses, masks, softmax, messages between warpgroups, and
stores.

Letters, and the roles of warps: see latent.py. AXIS is the axis of the keys in a tile of scores: 1 of ``[M, N]``, 0 of
``[N, M]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.hopper import ring
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, is_whole
from paged_ops.lowerings.gpu.attention.shared.masks import full_tiles, keep_seen, keys_of_rows, needs_mask
from paged_ops.lowerings.gpu.gluon_names import load_box

# The maximum in use is replaced only by one that is larger by more than this, to base 2: see softmax_tile.
SLACK = gl.constexpr(8.0)
CHUNKS = gl.constexpr(9)  # of 64 columns: the latents, then the rotated ones


class LatentShape(NamedTuple):
    """The tile, and how it is loaded."""

    M: int
    N: int
    page: int  # keys per TMA load
    stages: int  # tiles in shared memory
    units: int  # units whose query rows are in shared memory
    key_bytes: int  # of a key
    registers: tuple[int, ...]  # of the warpgroups after the first, and of the producer
    e4m3: bool = False  # the fp8 format; else e5m2
    outstanding: int = 0  # matmuls in flight, whose left operands occupy registers


@gluon.jit
def load_ids(part, tile, batch, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Block ids of the pages of a tile: lane n has page n."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    block_table = batch.tensors.block_tables + part.s.to(gl.int64) * batch.numbers.table_stride
    j = tile * SHAPE.N + lane % (SHAPE.N // SHAPE.page) * SHAPE.page
    return gl.load(block_table + j // SPEC.B * SPEC.table, mask=j < part.seq_len, other=0)


@gluon.jit
def first_rows(ids, tile, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The first row of each page of a tile, in the cache: lane n has page n."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ROWS_N: gl.constexpr = SPEC.v_side.n // SPEC.v_side.b
    return ids * ROWS_N + (tile * SHAPE.N + lane % (SHAPE.N // SHAPE.page) * SHAPE.page) % SPEC.B


@gluon.jit
def of_lane(vector, n: gl.constexpr):
    """The value of lane n."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == n, vector, 0), 0)


@gluon.jit
def load_rows(desc, part, n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the query rows of the program's n-th unit, in chunks of 64 columns."""
    ring.wait_empty(shared.q_ring, n)
    full = ring.full_of(shared.q_ring, n)
    ring.expect(shared.q_ring, n, SHAPE.M * CHUNKS * 128)
    for chunk in gl.static_range(CHUNKS):
        place = shared.queries.index(ring.stage_of(shared.q_ring, n) * CHUNKS + chunk)
        load_box(desc, [query_row(part, SPEC), chunk * 64], full, place)


@gluon.jit
def load_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tiles of a part, and its unit's query rows. ``args``: the function that loads a page, and the
    descriptors."""
    load_page: gl.constexpr = args[0]
    descs = args[1]
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    n, at, _ = counts
    ids = load_ids(part, part.tile, batch, SPEC, SHAPE)
    load_rows(descs[0], part, n, shared, SPEC, SHAPE)
    for t in range(part.seen):
        tile = part.tile + t
        first = first_rows(ids, tile, SPEC, SHAPE)
        ids = load_ids(part, tile + 1, batch, SPEC, SHAPE)  # ahead of time
        ring.wait_empty(shared.ring, at)
        for page in gl.static_range(PAGES):
            row = of_lane(first, page)
            if tile * SHAPE.N + page * SHAPE.page < part.seq_len:
                ring.expect(shared.ring, at, SHAPE.page * SHAPE.key_bytes)
                load_page(descs, row, at, page, shared, SHAPE)
            else:
                ring.fill(shared.ring, at)
        at += 1
    return Counts(n + 1, at, counts.messages)


@gluon.jit
def query_row(part, SPEC: gl.constexpr):
    """The first of a unit's rows in the packed queries ``[T * H, R + P]``."""
    return (part.row_start + part.first_token) * SPEC.heads + part.kh * SPEC.G


class Rows(NamedTuple):
    """The packed query rows of a unit: how their scores are scaled, and the keys that they see."""

    factor: Any  # of scores, to base 2: one number, or one per row
    cap: Any  # soft cap: cap[0] * tanh(cap[1] * score)
    seq_len: Any
    oldest: Any  # no row sees a key before it
    i: Any  # the last key that each row sees, if causal
    low: Any  # the first
    full_start: Any  # the range of tiles that need no mask
    full_end: Any


@gluon.jit
def rows_of(part, r, factor, cap, numbers, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """:class:`Rows` of a unit whose packed rows are r."""
    MASKS: gl.constexpr = SPEC.masks
    first_i = part.seq_len - part.q_len + part.first_token
    last_i = first_i + gl.minimum(SHAPE.M // SPEC.G, part.q_len - part.first_token) - 1
    full_start, full_end, oldest = full_tiles(first_i, last_i, part.seq_len, numbers, MASKS, SHAPE.N)
    low, i = keys_of_rows(first_i + r // SPEC.G, part.s, None, numbers, MASKS)
    return Rows(factor, cap, part.seq_len, oldest, i, low, full_start, full_end)


@gluon.jit
def is_masked(rows, tile, SPEC: gl.constexpr):
    """Whether some row does not see some key of a tile."""
    MASKS: gl.constexpr = SPEC.masks
    return needs_mask(tile, rows.full_start, rows.full_end, MASKS)


@gluon.jit
def keep(qk, rows, begin, AXIS: gl.constexpr, SPEC: gl.constexpr):
    """Whether each row sees each key of the tile of scores that begins at key ``begin``."""
    MASKS: gl.constexpr = SPEC.masks
    keys: gl.constexpr = gl.SliceLayout(1 - AXIS, qk.type.layout)
    j = gl.expand_dims(begin + gl.arange(0, qk.shape[AXIS], keys), 1 - AXIS)
    return keep_seen(j, gl.expand_dims(rows.low, AXIS), gl.expand_dims(rows.i, AXIS), rows.seq_len, MASKS)


@gluon.jit
def has_unseen(rows, begin, N: gl.constexpr):
    """Whether no row sees some key of a tile: its values may be NaN."""
    return (begin + N > rows.seq_len) | (begin < rows.oldest)


@gluon.jit
def zero_unseen(values, begin, rows, layout: gl.constexpr):
    """Zero the values ``[8, columns]`` of the keys from ``begin`` on that no row sees: their weights are 0, but
    0 * NaN would be NaN."""
    if (begin < rows.oldest) | (begin + 8 > rows.seq_len):
        j = begin + gl.arange(0, 8, gl.SliceLayout(1, layout))
        values.store(gl.where(((j >= rows.oldest) & (j < rows.seq_len))[:, None], values.load(layout), 0.0))


@gluon.jit
def finite(m):
    """The maximum that is subtracted: 0 for a row that has seen no key, as exp2(-inf - 0) is 0."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def add_sink(m, l, part, r, tensors, SPEC: gl.constexpr):
    """Maxima and totals with the sinks of the heads, which the first part of a unit includes, and the decay."""
    decay = gl.full([m.shape[0]], 1.0, gl.float32, m.type.layout)
    if SPEC.logits.sinks:
        if part.tile == part.first_tile:
            head = part.kh * SPEC.G + r % SPEC.G
            sink = gl.load(tensors.sinks + head, mask=head < SPEC.heads, other=0.0) * LOG2E
            m_new = gl.maximum(m, sink)
            shift = finite(m_new)
            decay = gl.exp2(m - shift)
            l = l * decay + gl.exp2(sink - shift)
            m = m_new
    return m, l, decay


@gluon.jit
def normalizer(l, decay):
    """The factor of a unit's accumulators: 0 for a row that has seen no key. NaN stays NaN."""
    return gl.where(l != 0.0, decay / gl.where(l != 0.0, l, 1.0), 0.0)


@gluon.jit
def lse2_of(m, l):
    """lse to base 2: -inf for a row that has seen no key."""
    return gl.where(l != 0.0, m + gl.log2(gl.where(l != 0.0, l, 1.0)), float("-inf"))


@gluon.jit
def live_rows(part, r, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Which of the packed rows r belong to a token and a head."""
    in_tile = r < SHAPE.M // SPEC.G * SPEC.G
    return in_tile & (part.first_token + r // SPEC.G < part.q_len) & (part.kh * SPEC.G + r % SPEC.G < SPEC.heads)


@gluon.jit
def output_row(part, r, SPEC: gl.constexpr):
    """The rows of packed rows r in ``out [T * H, R]``."""
    return (part.row_start + (part.first_token + r // SPEC.G)).to(gl.int64) * SPEC.heads + (
        part.kh * SPEC.G + r % SPEC.G
    )


@gluon.jit
def part_row(part, r, SHAPE: gl.constexpr):
    """The rows of packed rows r in ``parts [P * 2 * M, R]``."""
    return (part.program * 2 + (part.tile == part.first_tile).to(gl.int32)).to(gl.int64) * SHAPE.M + r


@gluon.jit
def store_part(
    acc, factor, lse2, part, r, tensors, FIRST: gl.constexpr, STEP: gl.constexpr, SPEC: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Store value columns of a part's rows by :func:`store_columns`, and their lse to base 2 unless it is None."""
    live = live_rows(part, r, SPEC, SHAPE)
    if is_whole(part):
        row = output_row(part, r, SPEC)
        if SPEC.lse and lse2 is not None:
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        store_columns(tensors.out, row, live, acc, factor, FIRST, STEP, SPEC)
    else:
        row = part_row(part, r, SHAPE)
        if lse2 is not None:
            gl.store(tensors.part_lse + row, lse2, mask=live)
        store_columns(tensors.parts, row, live, acc, factor, FIRST, STEP, SPEC)


@gluon.jit
def store_columns(to, row, live, acc, factor, FIRST: gl.constexpr, STEP: gl.constexpr, SPEC: gl.constexpr):
    """Store a tuple of accumulators, multiplied by a factor unless it is None. STEP of them have every STEP-th column
    of a range of columns, whose first is FIRST."""
    AXIS: gl.constexpr = live.type.layout.dim  # of the columns
    for n in gl.static_range(len(acc)):
        d = gl.arange(0, acc[0].shape[AXIS], gl.SliceLayout(1 - AXIS, acc[0].type.layout))
        value = acc[n]
        if factor is not None:
            value *= gl.expand_dims(factor, AXIS)
        column = gl.expand_dims(FIRST + n // STEP * STEP * acc[0].shape[AXIS] + n % STEP + STEP * d, 1 - AXIS)
        at = to + gl.expand_dims(row, AXIS) * SPEC.v_side.size + column
        gl.store(at, value.to(to.dtype.element_ty), mask=gl.expand_dims(live, AXIS))


class Messages(NamedTuple):
    """Messages from the warpgroup of the scores to the two warpgroups of the values: one per tile, and one at the end
    of a part, with the factors of its result."""

    weights: Any  # of the keys of a tile
    factors: Any  # of the accumulators
    changed: Any  # per warp: whether a factor of its rows is not 1
    ring: Any


@gluon.jit
def send_factors(messages, n, factors, m_new, m):
    """Store the factors of the accumulators in the n-th message."""
    place = ring.stage_of(messages.ring, n)
    messages.factors.index(place).store(factors)
    changed = (m_new != m).to(gl.int32)
    messages.changed.index(place).store(gl.max(changed.reshape([4, changed.shape[0] // 4]), 1))


@gluon.jit
def send_last(messages, n, factors):
    """Send the factors of a part's result as the n-th message."""
    ring.wait_empty(messages.ring, n)
    messages.factors.index(ring.stage_of(messages.ring, n)).store(factors)
    ring.fill(messages.ring, n)


@gluon.jit
def receive_last(messages, n, layout: gl.constexpr):
    """The factors of a part's result."""
    ring.wait_full(messages.ring, n)
    factors = messages.factors.index(ring.stage_of(messages.ring, n)).load(layout)
    ring.release(messages.ring, n)
    return factors


@gluon.jit
def load_factors(messages, n, layout: gl.constexpr):
    """The factors of the accumulators, and whether one of them is not 1."""
    place = ring.stage_of(messages.ring, n)
    factors = messages.factors.index(place).load(layout)
    return factors, gl.max(messages.changed.index(place).load(gl.BlockedLayout([4], [32], [4], [0])), 0)
