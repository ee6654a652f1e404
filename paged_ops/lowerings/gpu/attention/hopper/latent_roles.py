"""Helpers for the roles of the latent Hopper kernels: page addresses, masks, softmax, messages between warpgroups, and
stores.

Letters, and the roles of warps: see latent.py. AXIS is the axis of the keys in a tile of scores: 1 of ``[M, N]``, 0 of
``[N, M]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from paged_ops.lowerings.gpu.attention.hopper import ring
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E, apply_soft_cap
from paged_ops.lowerings.gpu.attention.hopper.softmax import SLACK
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, is_whole
from paged_ops.lowerings.gpu.attention.shared.masks import full_tiles, keep_seen, keys_of_rows, needs_mask
from paged_ops.lowerings.gpu.gluon_names import barrier, load_box

CHUNKS = gl.constexpr(9)  # of 64 columns: the latents, then the rotated ones


class LatentShape(NamedTuple):
    """The tile, and how it is loaded."""

    M: int
    N: int
    page: int  # keys per TMA load
    stages: int  # tiles in shared memory
    units: int  # units whose query rows are in shared memory
    key_bytes: tuple[int, ...]  # of a key in each ring
    registers: tuple[int, ...]  # of the warpgroups after the first, and of the producer
    e4m3: bool = False  # the fp8 format; else e5m2
    outstanding: int = 0  # matmuls in flight, whose left operands occupy registers
    group: int = 1  # keys of a row of the descriptors
    rows_last: bool = False  # whether query rows are loaded after the first tile


@gluon.jit
def load_ids(part, tile, batch, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Block ids of the pages of a tile: lane n has page n."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    block_table = batch.tensors.block_tables + part.s.to(gl.int64) * batch.numbers.table_stride
    j = tile * SHAPE.N + lane % (SHAPE.N // SHAPE.page) * SHAPE.page
    return gl.load(block_table + j // SPEC.B * SPEC.table, mask=j < part.seq_len, other=0)


@gluon.jit
def of_lane(vector, n: gl.constexpr):
    """The value of lane n."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == n, vector, 0), 0)


@gluon.jit
def load_rows(descs, part, n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the query rows of the program's n-th unit, in chunks of 64 columns."""
    ring.wait_empty(shared.q_ring, n)
    ring.expect(shared.q_ring, n, SHAPE.M * CHUNKS * 128)
    for chunk in gl.static_range(CHUNKS):
        place = shared.queries.index(ring.stage_of(shared.q_ring, n) * CHUNKS + chunk)
        load_box(descs[0], [query_row(part, SPEC), chunk * 64], ring.full_of(shared.q_ring, n), place)


@gluon.jit
def load_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tiles of a part, and its unit's query rows. ``args``: the functions that load query rows, and a page of
    a ring; the rings of a tile; the descriptors."""
    begin_rows: gl.constexpr = args[0]
    begin_page: gl.constexpr = args[1]
    rings, descs = args[2], args[3]
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    ROWS_N: gl.constexpr = SPEC.v_side.n // SPEC.v_side.b
    n, at, _ = counts
    key = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) % PAGES * SHAPE.page  # of a tile: a page per lane
    ids = load_ids(part, part.tile, batch, SPEC, SHAPE)
    if not SHAPE.rows_last:
        begin_rows(descs, part, n, shared, SPEC, SHAPE)
    for t in range(part.seen):
        tile = part.tile + t
        first = ids * ROWS_N + (tile * SHAPE.N + key) % SPEC.B  # the first row of each page in the cache
        ids = load_ids(part, tile + 1, batch, SPEC, SHAPE)  # ahead of time
        for which in gl.static_range(len(rings)):
            ring.wait_empty(rings[which], at)
            for page in gl.static_range(PAGES):
                row = of_lane(first, page) // SHAPE.group
                if tile * SHAPE.N + page * SHAPE.page < part.seq_len:
                    ring.expect(rings[which], at, SHAPE.page * SHAPE.key_bytes[which])
                    begin_page(descs, row, at, page, which, shared, SHAPE)
                else:
                    ring.fill(rings[which], at)
        if SHAPE.rows_last:
            if t == 0:  # the last unit's query rows may still be read
                begin_rows(descs, part, n, shared, SPEC, SHAPE)
        at += 1
    return Counts(n + 1, at, counts.messages)


@gluon.jit
def query_row(part, SPEC: gl.constexpr):
    """The first of a unit's rows in the packed queries ``[T * H, R + P]``."""
    return (part.row_start + part.first_token) * SPEC.heads + part.kh * SPEC.G


class UnitRows(NamedTuple):
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
    """:class:`UnitRows` of a unit whose packed rows are r."""
    MASKS: gl.constexpr = SPEC.masks
    first_i = part.seq_len - part.q_len + part.first_token
    last_i = first_i + gl.minimum(SHAPE.M // SPEC.G, part.q_len - part.first_token) - 1
    full_start, full_end, oldest = full_tiles(first_i, last_i, part.seq_len, numbers, MASKS, SHAPE.N)
    low, i = keys_of_rows(first_i + r // SPEC.G, part.s, None, numbers, MASKS)
    return UnitRows(factor, cap, part.seq_len, oldest, i, low, full_start, full_end)


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
def softmax_tile(
    qk, m, rows, begin, exponent, MASKED: gl.constexpr, LAZY: gl.constexpr, BY_ROWS: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """The weights of a tile of scores (unnormalised, to base 2), each row's maximum in use, each thread's totals of
    weights, and the factor of the accumulators. BY_ROWS: each row has its own factor of scores.

    If LAZY, a maximum that grows by at most SLACK stays in use, so that the accumulators need no scaling. Weights are
    then at most 2^SLACK, and as exact (the idea is FlashAttention-4's). With scales each key's weight is multiplied by
    ``2^(exponent - 126)``, and its values are divided by it: the logits grow by the power's logarithm, so that the
    maximum keeps the weights in float16's range.
    """
    SOFT_CAP: gl.constexpr = SPEC.logits.soft_cap
    SCALED: gl.constexpr = SPEC.storage.row_scales
    APPLIED: gl.constexpr = BY_ROWS and (SOFT_CAP or SCALED)  # the factor, before the maximum
    factor = rows.factor
    if BY_ROWS:
        factor = factor[None, :]
    if MASKED:
        kept = keep(qk, rows, begin, 0, SPEC)
    if APPLIED:
        qk = qk * factor
    if SOFT_CAP:
        qk = apply_soft_cap(qk, rows.cap)
    if SCALED:
        qk += (exponent - 126).to(gl.float32)[:, None]
    if MASKED:
        qk = gl.where(kept, qk, float("-inf"))
    largest = gl.max(qk, 0)
    if not APPLIED:
        largest = largest * rows.factor
        qk = qk * factor
    m_new = gl.maximum(m, largest)
    if LAZY:
        m_new = gl.where(m_new > m + SLACK, m_new, m)
    shift = finite(m_new)
    p = gl.exp2(qk - shift[None, :])
    # Over the keys of a thread; the threads of a row are added at the end.
    weights = p
    if SCALED:
        weights = p * ((253 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    totals = gl.sum(weights.reshape([p.shape[0] // 16, 2, 8, p.shape[1]]), 1)
    return p, m_new, totals, gl.exp2(m - shift)


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
def store_part(
    acc, factor, lse2, part, r, tensors, FIRST: gl.constexpr, STEP: gl.constexpr, SPEC: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Store value columns of a part's rows by :func:`store_columns`, and their lse to base 2 unless it is None."""
    token, head, live = of_rows(part, r, SPEC, SHAPE)
    if is_whole(part):
        row = (part.row_start + token).to(gl.int64) * SPEC.heads + head
        if SPEC.lse and lse2 is not None:
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        store_columns(tensors.out, row, live, acc, factor, FIRST, STEP, SPEC)
    else:
        row = part_row(part, SHAPE) + r
        if lse2 is not None:
            gl.store(tensors.part_lse + row, lse2, mask=live)
        store_columns(tensors.parts, row, live, acc, factor, FIRST, STEP, SPEC)


@gluon.jit
def of_rows(part, r, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The tokens and heads of packed rows r of a part's unit, and which rows have any."""
    token, head = part.first_token + r // SPEC.G, part.kh * SPEC.G + r % SPEC.G
    return token, head, (r < SHAPE.M // SPEC.G * SPEC.G) & (token < part.q_len) & (head < SPEC.heads)


@gluon.jit
def store_by_rows(acc, place, part, out, FIRST: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Store a unit's result from column FIRST on: a tuple of accumulators, by way of a place of a tile that has as many
    rows and columns. So a warp stores 512 bytes of a row at once; its accumulators have 16 bytes of each of eight."""
    WIDTH: gl.constexpr = acc[0].shape[1]
    for n in gl.static_range(len(acc)):
        place.slice(n * WIDTH, WIDTH, dim=1).store(acc[n].to(place.dtype))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    token, head, live = of_rows(part, gl.arange(0, SHAPE.M, gl.SliceLayout(1, layout)), SPEC, SHAPE)
    row = (part.row_start + token).to(gl.int64) * SPEC.heads + head
    column = FIRST + gl.arange(0, place.shape[1], gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * SPEC.v_side.size + column[None, :], place.load(layout), mask=live[:, None])
    fence_async_shared()  # whatever fills the place next, TMA too


@gluon.jit
def by_rows(acc, place):
    """A tuple of accumulators in the dtype of a place of a tile, by way of this place, which has as many rows and
    columns: a tuple of 8 rows each, of which a warp has two, 512 bytes each. Then the place may be filled again."""
    WIDTH: gl.constexpr = acc[0].shape[1]
    barrier()  # the matmuls of all warps have read the place
    for n in gl.static_range(len(acc)):
        place.slice(n * WIDTH, WIDTH, dim=1).store(acc[n].to(place.dtype))
    values: gl.tuple = ()
    ROWS: gl.constexpr = place.shape[0]
    for row in gl.static_range(0, ROWS, 8):
        values += (place.slice(row, 8, dim=0).load(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])),)
    fence_async_shared()  # TMA fills the place next
    return values


@gluon.jit
def store_rows(values, part, tensors, FIRST: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Store the value columns from FIRST on of a part's rows in the output's dtype: as the output if the part is all of
    its unit, else for the merge. The rows of a unit are contiguous in both; those without a head or token are not
    stored."""
    tokens = gl.minimum(SHAPE.M // SPEC.G, part.q_len - part.first_token)
    live = gl.minimum(tokens * SPEC.G, SPEC.heads * tokens - part.kh * SPEC.G)
    to, row = tensors.out, query_row(part, SPEC).to(gl.int64)
    if not is_whole(part):
        to, row = tensors.parts.to(gl.pointer_type(to.dtype.element_ty)), part_row(part, SHAPE)
    layout: gl.constexpr = values[0].type.layout
    r = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, values[0].shape[1], gl.SliceLayout(0, layout)), 0)
    to += row * SPEC.v_side.size + FIRST
    for n in gl.static_range(len(values)):
        gl.store(to + 8 * n * SPEC.v_side.size + (r * SPEC.v_side.size + column), values[n], mask=r < live - 8 * n)


@gluon.jit
def part_row(part, SHAPE: gl.constexpr):
    """The first of a part's rows in the workspace ``[P * 2 * M]``."""
    return (part.program * 2 + (part.tile == part.first_tile).to(gl.int32)).to(gl.int64) * SHAPE.M


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
    changed: Any  # per warp: whether a factor of its rows is not 1; None where the receiver votes, as in latent.py
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
