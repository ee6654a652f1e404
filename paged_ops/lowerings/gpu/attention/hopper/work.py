"""The Hopper kernel's work: the items, which program takes them, and how their queries, keys and values are brought.

Letters, and the roles of warps, are explained in hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from paged_ops.lowerings.gpu.attention.hopper.head_chunks import first_of, number_of, rows_at_once, size_of, sum_of
from paged_ops.lowerings.gpu.attention.shared.tile import oldest_key
from paged_ops.lowerings.gpu.gluon_names import load_box, load_rows

# The fields of an item, by which the scheduler tells the others about it.
KV_HEAD, SEQUENCE, ROW_START, Q_LEN, SEQ_LEN = (gl.constexpr(n) for n in range(5))
FIRST_TOKEN, COUNT, END_TILE, FULL_START, FULL_END, OLDEST = (gl.constexpr(n) for n in range(5, 11))
FIELDS = gl.constexpr(11)
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
    item, tiles, tensors, numbers, short, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The item-th tile of query rows: its key/value head, its sequence, the sequence's first row, rows and keys, the
    tile's first token; its key tiles: their number (0 if it is no tile of a long sequence), their end, and the first
    and the end of those that need no mask; and the oldest key that a row sees."""
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
    return kh, s, row_start, q_len, seq_len, first_token, count, end_tile, full_start, full_end, oldest


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
def get(items, slot, field: gl.constexpr, WARPS: gl.constexpr):
    return gl.sum(items.index(slot * FIELDS + field).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def light_programs(
    tensors, S, short, programs, G: gl.constexpr, DIVISION: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    LEAST: gl.constexpr = 0,
):  # fmt: skip
    """The number of programs that first take short sequences of few rows, which wait for memory, while the others take
    those of many rows, which wait for tensor cores. It follows from the work of both. Negative if the short ones come
    first in the batch. Sequences of up to LEAST tokens are left out."""
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


@gluon.jit
def fetch_rows(
    query, first_row, tokens, kh, groups, slot, FIRST: gl.constexpr, SIZE: gl.constexpr, SPEC: gl.constexpr,
    SHAPE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy SIZE columns of an item's query rows, by so many warps."""
    G: gl.constexpr = SPEC.G
    TOKENS: gl.constexpr = SHAPE.M // G
    ROWS: gl.constexpr = rows_at_once(SIZE)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [WARPS, 1], [1, 0])
    d = FIRST + gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    for part in range(SHAPE.M // ROWS):
        r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        live = (r < TOKENS * G) & (r // G < tokens)
        head = kh * G + r % G
        row = (first_row + r // G) * SPEC.query[0] + head.to(gl.int64) * SPEC.query[1]
        place = groups.index(slot * (SHAPE.M // ROWS) + part)
        load_rows(place, query + row[:, None] + d[None, :], mask=live[:, None])


@gluon.jit
def begin_rows(
    query, row_start, q_len, first_token, kh, q_groups, slot, SPEC: gl.constexpr, SHAPE: gl.constexpr,
    WARPS: gl.constexpr = 4,
):  # fmt: skip
    """Begin to copy an item's query rows to a slot, by so many warps."""
    PARTS: gl.constexpr = SHAPE.k_parts
    row = row_start.to(gl.int64) + first_token
    for part in gl.static_range(number_of(PARTS)):
        fetch_rows(
            query, row, q_len - first_token, kh, q_groups[part], slot,
            first_of(PARTS, part, SPEC.k_side.size), size_of(PARTS, part), SPEC, SHAPE, WARPS,
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def await_rows():
    """Wait until they are where products can read them."""
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def bring_rows(
    query, row_start, q_len, first_token, kh, q_groups, slot, SPEC: gl.constexpr, SHAPE: gl.constexpr,
    WARPS: gl.constexpr = 4,
):  # fmt: skip
    """Copy an item's query rows to a slot, where products can read them, by so many warps."""
    begin_rows(query, row_start, q_len, first_token, kh, q_groups, slot, SPEC, SHAPE, WARPS)
    await_rows()


@gluon.jit
def scheduler(
    tensors, numbers, short, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Takes items, longest first, and brings their query rows, packed (token, head of the group).

    ``taken`` counts items: all, from the front, and from the back. Programs for short sequences start at that end of
    the batch where these are, the others at the other end, until they meet. ``short`` None: there are none.
    """
    G: gl.constexpr = SPEC.G
    M: gl.constexpr = SHAPE.M
    SLOTS: gl.constexpr = SHAPE.slots
    TOKENS: gl.constexpr = M // G
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [SHAPE.warps], [0]))
    tiles = numbers.T // TOKENS + numbers.S
    last = tiles * SPEC.K - 1
    programs = gl.num_programs(0)
    if short is None:
        few = 0 * programs
    else:
        few = light_programs(tensors, numbers.S, short, programs, G, DIVISION, M, SHAPE.warps)
    reverse, start, item = first_item(few, programs)
    ticket = gl.program_id(0)
    n = 0
    while ticket <= last:
        item = gl.where(reverse, last - item, item)
        fields = work_item(item, tiles, tensors, numbers, short, SPEC, DIVISION, SHAPE, SHAPE.warps)
        kh, row_start, q_len = fields[KV_HEAD], fields[ROW_START], fields[Q_LEN]
        first_token, count = fields[FIRST_TOKEN], fields[COUNT]
        # The last items go to the programs that are free first, so they are not taken ahead.
        ends = ticket + 2 * programs > last
        if not ends:
            ticket, item = take(tensors.taken, reverse, start, programs, last)
        if count > 0:
            slot = n % SLOTS
            mbarrier.wait(shared.item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
            for field in gl.static_range(FIELDS):
                shared.items.index(slot * FIELDS + field).store(zero + fields[field])
            bring_rows(
                tensors.query, row_start, q_len, first_token, kh, shared.q_groups, slot, SPEC, SHAPE, SHAPE.warps
            )  # fmt: skip
            mbarrier.arrive(shared.item_full.index(slot), count=1)
            n += 1
        if ends:
            of_before = n + SLOTS - 1
            mbarrier.wait(shared.item_empty.index(of_before % SLOTS), ((of_before // SLOTS) & 1) ^ 1)
            ticket, item = take(tensors.taken, reverse, start, programs, last)
    slot = n % SLOTS
    mbarrier.wait(shared.item_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    shared.items.index(slot * FIELDS + COUNT).store(zero)  # no more items
    mbarrier.arrive(shared.item_full.index(slot), count=1)


@gluon.jit
def rows_of(ids, kh, j, lane, PAGES: gl.constexpr, MATRIX: gl.constexpr):
    """The groups of 8 rows at which the pages of a tile begin."""
    first = ids * MATRIX.rows_n + kh * MATRIX.rows_head + j
    rows: gl.tuple = ()
    for page in gl.static_range(PAGES):
        rows += (gl.sum(gl.where(lane == page, first, 0), 0) // 8,)
    return rows


@gluon.jit
def bring(
    descs, rows, kh, full, pages, stage, PARTS: gl.constexpr, MATRIX: gl.constexpr, SIDE: gl.constexpr,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile of keys, or of values."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    column = kh * MATRIX.columns_head
    mbarrier.expect(full, SHAPE.N * sum_of(PARTS) * 2)
    for n in gl.static_range(number_of(PARTS)):
        for page in gl.static_range(PAGES):
            place = pages[n].index(stage * PAGES + page)
            load_box(descs[n], [rows[page], 0, 0, column + first_of(PARTS, n, SIDE.size)], full, place)


@gluon.jit
def producer(descs, block_tables, table_stride, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Brings the items' tiles of keys and values, the last of a sequence first."""
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    STAGES: gl.constexpr = SHAPE.stages
    SLOTS: gl.constexpr = SHAPE.slots
    K_PARTS: gl.constexpr = SHAPE.k_parts
    V_PARTS: gl.constexpr = SHAPE.v_parts
    K_MATRIX: gl.constexpr = SHAPE.k_matrix
    V_MATRIX: gl.constexpr = SHAPE.v_matrix
    K_SIDE: gl.constexpr = SPEC.k_side
    V_SIDE: gl.constexpr = SPEC.v_side
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.wait(shared.item_full.index(0), 0)
    count = get(shared.items, 0, COUNT, 1)
    n = 0
    total = 0
    while count > 0:
        slot = n % SLOTS
        kh = get(shared.items, slot, KV_HEAD, 1)
        block_table = block_tables + get(shared.items, slot, SEQUENCE, 1).to(gl.int64) * table_stride
        seq_len = get(shared.items, slot, SEQ_LEN, 1)
        end_tile = get(shared.items, slot, END_TILE, 1)
        mbarrier.arrive(shared.item_empty.index(slot), count=1)
        j = (end_tile - 1) * N + lane % PAGES * PAGE
        ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
        for t in range(count):
            tile = end_tile - 1 - t
            stage = (total + t) % STAGES
            free = (((total + t) // STAGES) & 1) ^ 1
            j = (tile * N + lane % PAGES * PAGE) % B
            k_rows = rows_of(ids, kh, j, lane, PAGES, K_MATRIX)
            v_rows = rows_of(ids, kh, j, lane, PAGES, V_MATRIX)
            # block ids of the next tile, one tile ahead, to hide their latency; keys past the end are masked
            j = gl.maximum(tile - 1, 0) * N + lane % PAGES * PAGE
            ids = gl.load(block_table + gl.where(j < seq_len, j, 0) // B * SPEC.table)
            mbarrier.wait(shared.k_empty.index(stage), free)
            bring(
                descs[0], k_rows, kh, shared.k_full.index(stage), shared.k_pages, stage, K_PARTS, K_MATRIX, K_SIDE,
                SHAPE,
            )  # fmt: skip
            mbarrier.wait(shared.v_empty.index(stage), free)
            bring(
                descs[1], v_rows, kh, shared.v_full.index(stage), shared.v_pages, stage, V_PARTS, V_MATRIX, V_SIDE,
                SHAPE,
            )  # fmt: skip
        total += count
        n += 1
        mbarrier.wait(shared.item_full.index(n % SLOTS), (n // SLOTS) & 1)
        count = get(shared.items, n % SLOTS, COUNT, 1)
