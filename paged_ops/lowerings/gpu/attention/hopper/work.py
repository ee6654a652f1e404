"""The items of the Hopper kernels: what an item is, how roles tell each other of items, and which program takes which.

Letters, and the roles of warps: see dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.hopper.ring import fill, stage_of, wait_empty, wait_full
from paged_ops.lowerings.gpu.attention.shared.tile import oldest_key


class Item(NamedTuple):
    """A tile of query rows of one key/value head, and the key tiles that it needs."""

    kh: Any
    s: Any
    row_start: Any  # of the sequence
    q_len: Any
    seq_len: Any
    first_token: Any  # of the tile
    tiles: Any  # the number of key tiles
    end_tile: Any
    full_start: Any  # the first and the end of the key tiles that need no mask
    full_end: Any
    oldest: Any  # the oldest key that a row sees


FIELDS, COUNT, OLDEST = map(gl.constexpr, (len(Item._fields), Item._fields.index("tiles"), len(Item._fields) - 1))
# The weight of a key with few rows, relative to a key with a whole tile of rows, when programs are divided between the
# two. Measured: half of this weight and one and a half times this weight are slower.
LIGHT = gl.constexpr(0.45)


@gluon.jit
def reach_of_ranges(ranges, s, first_i, last_i, low, end, RANGES: gl.constexpr):
    """Widen the keys ``low : end`` of queries first_i to last_i of sequence s by the bidirectional ranges that hold one
    of them. The ranges that hold a query also hold its own key, so all keys that it sees are one interval."""
    for n in range(RANGES):
        at = ranges + (s.to(gl.int64) * RANGES + n) * 2
        start = gl.load(at)
        stop = gl.load(at + 1)
        holds = (start >= 0) & (start < stop) & (start <= last_i) & (stop > first_i)
        low = gl.where(holds, gl.minimum(low, start), low)
        end = gl.where(holds, gl.maximum(end, stop), end)
    return low, end


@gluon.jit
def work_item(
    item, tiles, batch, short, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr
):
    """The item-th tile of query rows as an :class:`Item`, without key tiles if this kernel does not serve it."""
    tensors, numbers = batch.tensors, batch.numbers
    G: gl.constexpr = SPEC.G
    TOKENS: gl.constexpr = SHAPE.M // G
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    HEADS: gl.constexpr = SHAPE.heads
    first_head = item // (tiles * HEADS) * HEADS
    item -= first_head * tiles
    kh = first_head + item % HEADS
    query_tile = tiles - 1 - item // HEADS  # later tiles see more keys, so they start first
    s = -1
    for start in range(0, numbers.S, DIVISION.at_once):
        s_ = start + gl.arange(0, DIVISION.at_once, lanes)
        tile_ = gl.load(tensors.query_start_loc + s_, mask=s_ < numbers.S, other=0) // TOKENS + s_
        s += gl.sum(((tile_ <= query_tile) & (s_ < numbers.S)).to(gl.int32), 0)
    row_start = gl.load(tensors.query_start_loc + s)
    q_len = gl.load(tensors.query_start_loc + s + 1) - row_start
    seq_len = gl.load(tensors.seq_lens + s)
    first_token = (query_tile - row_start // TOKENS - s) * TOKENS
    count, end_tile, full_start, full_end, oldest = key_tiles(
        s, q_len, seq_len, first_token, tensors, numbers, SPEC, SHAPE
    )
    if short is None:
        mine = (first_token < q_len) & (q_len * G > DIVISION.rows)
    else:
        mine = (first_token < q_len) & ((q_len * G > DIVISION.rows) | (seq_len <= short))
    count = gl.where(mine, count, 0)
    return Item(kh, s, row_start, q_len, seq_len, first_token, count, end_tile, full_start, full_end, oldest)


@gluon.jit
def key_tiles(s, q_len, seq_len, first_token, tensors, numbers, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The key tiles of the rows from ``first_token`` on: their number, their end, and the first and the end of those
    that need no mask; and the oldest key that a row sees."""
    MASKS: gl.constexpr = SPEC.masks
    N: gl.constexpr = SHAPE.N
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
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
    end_tile = gl.maximum(gl.cdiv(newest, N), 1)  # one masked tile, if no key is seen
    count = end_tile
    full_start = 0
    oldest = 0
    if MASKS.window or MASKS.chunk:
        oldest = oldest_key(first_i, numbers, MASKS)
        if MASKS.ranges:
            oldest = gl.minimum(oldest, opened)
        count = gl.maximum(end_tile - oldest // N, 1)
        full_start = gl.cdiv(oldest_key(last_i, numbers, MASKS), N)
    return count, end_tile, full_start, full_end, oldest


@gluon.jit
def field_of(shared, n, field: gl.constexpr, WARPS: gl.constexpr):
    """A field of the n-th item."""
    place = stage_of(shared.item_ring, n) * FIELDS + field
    return gl.sum(shared.items.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_tiles(shared, n, WARPS: gl.constexpr):
    """Wait for the n-th item. Returns its number of key tiles; 0: there are no more items."""
    wait_full(shared.item_ring, n)
    return field_of(shared, n, COUNT, WARPS)


@gluon.jit
def read_item(shared, n, tiles, WARPS: gl.constexpr):
    """The n-th item, which has ``tiles``; fields that are not used are not read."""
    fields: gl.tuple = ()
    for field in gl.static_range(FIELDS):
        if field == COUNT:
            fields += (tiles,)
        else:
            fields += (field_of(shared, n, field, WARPS),)
    return Item(*fields)


@gluon.jit
def write_item(shared, n, item, WARPS: gl.constexpr):
    """Write the n-th item, when its slot is empty; the caller fills the slot."""
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    wait_empty(shared.item_ring, n)
    for field in gl.static_range(FIELDS):
        shared.items.index(stage_of(shared.item_ring, n) * FIELDS + field).store(zero + item[field])


@gluon.jit
def end_items(shared, n, WARPS: gl.constexpr):
    """Tell the other roles that there is no n-th item."""
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    wait_empty(shared.item_ring, n)
    shared.items.index(stage_of(shared.item_ring, n) * FIELDS + COUNT).store(zero)
    fill(shared.item_ring, n)


@gluon.jit
def light_programs(
    batch, short, programs, G: gl.constexpr, DIVISION: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    LEAST: gl.constexpr = 0,
):  # fmt: skip
    """The number of programs that first take short sequences of few rows, which wait for memory, while the others take
    those of many rows, which wait for tensor cores. It follows from the work of both. Negative if the short ones come
    first in the batch. Sequences of up to LEAST tokens are left out."""
    tensors, S = batch.tensors, batch.numbers.S
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
        few = (q_len > LEAST) & (seq_len <= short) & (q_len * G <= DIVISION.rows)
        few_cost = gl.where(few, seq_len.to(gl.float32), 0.0)
        keys = gl.maximum(seq_len - q_len // 2, 0)  # there may be fewer keys than rows
        many_cost = gl.where(many, keys.to(gl.float32) * (q_len * G).to(gl.float32) / M, 0.0)
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
def first_item(few, programs):
    """With which item this program begins, if so many programs first take short sequences of few rows: whether items
    are counted from the batch's start, how many programs begin at that end, and which of them this one is."""
    light_first = few < 0
    few = gl.maximum(few, -few)
    rank = gl.program_id(0) * few // programs
    light = (gl.program_id(0) + 1) * few // programs > rank
    reverse = (light == light_first) & (few > 0)
    start = gl.where(light, few, programs - few)
    item = gl.where(light, rank, gl.program_id(0) - rank)
    return reverse, start, item


@gluon.jit
def take(taken, reverse, start, programs, last):
    """A ticket, and the item that belongs to it, if there is one."""
    ticket = programs + gl.atomic_add(taken, 1)
    item = start
    if ticket <= last:
        item = start + gl.atomic_add(taken + 1 + reverse.to(gl.int32), 1)
    return ticket, item
