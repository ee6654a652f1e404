"""The items of the Hopper kernels: what an item is, how the scheduler publishes items, and which program takes which.

Letters, and the roles of warps: see dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from paged_ops.lowerings.gpu.attention.hopper.ring import fill, stage_of, wait_empty, wait_full
from paged_ops.lowerings.gpu.attention.shared.masks import key_tiles


class Item(NamedTuple):
    """A tile of query rows of one key/value head, and the key tiles that it needs."""

    kh: Any  # the head; where the value columns are in several pieces, see head_of and column_of
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


class Work(NamedTuple):
    """The items of a batch, and how programs take them."""

    tiles: Any  # of query rows, per key/value head; some may be no items
    few: Any  # the number of programs that first take short sequences of few rows: see light_programs
    programs: Any
    counters: Any  # of taken items: all, from the front, and from the back
    short: Any  # see dense.short_keys; None: there are none


FIELDS, COUNT, OLDEST = map(gl.constexpr, (len(Item._fields), Item._fields.index("tiles"), len(Item._fields) - 1))
# The weight of a key with few rows, relative to a key with a whole tile of rows, when programs are divided between the
# two. Measured: half of this weight and one and a half times this weight are slower.
LIGHT = gl.constexpr(0.45)


@gluon.jit
def work_item(item, work, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The item-th tile of query rows as an :class:`Item`, without key tiles if this kernel does not serve it."""
    tensors, numbers, tiles = batch.tensors, batch.numbers, work.tiles
    G: gl.constexpr = SPEC.G
    TOKENS: gl.constexpr = SHAPE.M // G
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [SHAPE.warps], [0])
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
    mine = q_len * G > DIVISION.rows
    if work.short is not None:
        mine = mine | (seq_len <= work.short)
    return item_at(kh, s, row_start, q_len, seq_len, first_token, mine, batch, SPEC, SHAPE)


@gluon.jit
def item_at(
    kh, s, row_start, q_len, seq_len, first_token, mine, batch, SPEC: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """The item that begins at ``first_token``, without key tiles if it is past the sequence, or not ``mine``."""
    MASKS: gl.constexpr = SPEC.masks
    first_i = seq_len - q_len + first_token
    last_i = first_i + gl.minimum(SHAPE.M // SPEC.G, q_len - first_token) - 1
    ranges = batch.tensors.bidirectional_ranges
    tiles, end, full_start, full_end, oldest = key_tiles(
        s, first_i, last_i, seq_len, ranges, batch.numbers, MASKS, SHAPE.N
    )
    tiles = gl.where(mine & (first_token < q_len), tiles, 0)
    return Item(kh, s, row_start, q_len, seq_len, first_token, tiles, end, full_start, full_end, oldest)


@gluon.jit
def head_of(item, SHAPE: gl.constexpr):
    """The key/value head of an item."""
    kh = item.kh
    if SHAPE.pieces > 1:
        kh = kh // SHAPE.pieces
    return kh


@gluon.jit
def column_of(item, SHAPE: gl.constexpr):
    """The first of an item's value columns in its head."""
    column = 0
    if SHAPE.pieces > 1:
        column = item.kh % SHAPE.pieces * SHAPE.v.size
    return column


@gluon.jit
def places_of_items(SLOTS: gl.constexpr):
    """Shared memory for the fields of items, SLOTS at a time."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], mbarrier.MBarrierLayout())


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
    """Publish that there is no n-th item."""
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    wait_empty(shared.item_ring, n)
    shared.items.index(stage_of(shared.item_ring, n) * FIELDS + COUNT).store(zero)
    fill(shared.item_ring, n)


@gluon.jit
def light_programs(
    batch, short, programs, G: gl.constexpr, DIVISION: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr,
    WARPS: gl.constexpr, LEAST: gl.constexpr = 0,
):  # fmt: skip
    """The number of programs that first take short sequences of at most ROWS rows, which are memory-bound, while the
    others take sequences of more rows, which are compute-bound; in proportion to the work of both. Negative if the
    short ones come first in the batch. Sequences of up to LEAST tokens do not count."""
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
        many = q_len * G > ROWS
        few = (q_len > LEAST) & (seq_len <= short) & (q_len * G <= ROWS)
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
    """The first item of this program, if ``few`` programs first take short sequences of few rows: whether items are
    counted from the batch's start, the number of programs that begin at that end, and this program's rank in them."""
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
    """A ticket, and its item, if there is one."""
    ticket = programs + gl.atomic_add(taken, 1)
    item = start
    if ticket <= last:
        item = start + gl.atomic_add(taken + 1 + reverse.to(gl.int32), 1)
    return ticket, item
