"""Loads of an item's query rows, keys and values to shared memory, for all Hopper kernels of dense caches.

The threads of the scheduler copy query rows, 16 bytes each, as they are packed from several places. A producer warp
loads tiles of keys and values by TMA. Letters: see dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from paged_ops.lowerings.gpu.attention.hopper import work as items
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import first_of, pieces_of, rows_at_once, sum_of
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, full_of, release, stage_of, wait_empty
from paged_ops.lowerings.gpu.attention.hopper.work import Work
from paged_ops.lowerings.gpu.attention.shared.masks import place_at
from paged_ops.lowerings.gpu.gluon_names import load_async, load_box


class TileRing(NamedTuple):
    """A ring of tiles of keys, or of values. Pages and tiles are the same memory, as tuples of the head's parts."""

    pages: Any  # as copies write them
    tiles: Any  # as they are multiplied
    ring: Any


@gluon.jit
def fetch_rows(
    query, item, groups, slot, PART: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr
):
    """Begin to copy the columns of one piece of an item's query rows."""
    G: gl.constexpr = SPEC.G
    PIECES: gl.constexpr = pieces_of(SPEC.k_side.size)
    SIZE: gl.constexpr = PIECES[PART]
    ROWS: gl.constexpr = rows_at_once(SIZE)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [max(256 // SIZE, 1), min(SIZE // 8, 32)], [WARPS, 1], [1, 0])
    d = first_of(PIECES, PART, SPEC.k_side.size) + gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    first_row = item.row_start.to(gl.int64) + item.first_token
    for part in range((SHAPE.M + ROWS - 1) // ROWS):
        r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        live = (r < SHAPE.M // G * G) & (r // G < item.q_len - item.first_token)
        head = items.head_of(item, SHAPE) * G + r % G
        row = (first_row + r // G) * SPEC.query[0] + head.to(gl.int64) * SPEC.query[1]
        place = groups.index(slot * ((SHAPE.M + ROWS - 1) // ROWS) + part)
        load_async(place, query + row[:, None] + d[None, :], mask=live[:, None])


@gluon.jit
def load_rows(item, batch, layout: gl.constexpr, SPEC: gl.constexpr, M: gl.constexpr):
    """An item's query rows ``[M, D]`` in registers; 0 where there is none."""
    G: gl.constexpr = SPEC.G
    r = gl.arange(0, M, gl.SliceLayout(1, layout))
    row = (item.row_start + item.first_token + r // G).to(gl.int64) * SPEC.query[0]
    row += (item.kh * G + r % G).to(gl.int64) * SPEC.query[1]
    d = gl.arange(0, SPEC.k_side.size, gl.SliceLayout(0, layout))
    live = (r < M // G * G) & (r // G < item.q_len - item.first_token)
    return gl.load(batch.tensors.query + row[:, None] + d[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def begin_rows(query, item, groups, slot, SPEC: gl.constexpr, SHAPE: gl.constexpr, WARPS: gl.constexpr = 4):
    """Begin to copy an item's query rows to a slot."""
    for part in gl.static_range(len(pieces_of(SPEC.k_side.size))):
        fetch_rows(query, item, groups[part], slot, part, SPEC, SHAPE, WARPS)
    async_copy.commit_group()


@gluon.jit
def await_rows():
    """Wait until matmuls can read the rows."""
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def scheduler(batch, short, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """Takes the items of all sequences that are not split_kernel's; ``short`` None: there are no short ones."""
    numbers, programs = batch.numbers, gl.num_programs(0)
    if short is None:
        few = 0 * programs
    else:
        few = items.light_programs(batch, short, programs, SPEC.G, DIVISION, DIVISION.rows, SHAPE.M, SHAPE.warps)
    work = Work(numbers.T // (SHAPE.M // SPEC.G) + numbers.S, few, programs, batch.tensors.taken, short)
    take_items(items.work_item, work, batch, shared, SPEC, DIVISION, SHAPE)


@gluon.jit
def take_items(
    item_of: gl.constexpr, work, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Takes items, longest first, and copies their query rows, packed (token, head of the group).

    Programs for short sequences start at that end of the batch where these are, the others at the other end, until they
    meet. With fewer places for rows than for items, keys can come before the query rows.
    """
    WARPS: gl.constexpr = SHAPE.warps
    ROWS_LATER: gl.constexpr = SHAPE.row_slots < SHAPE.slots
    programs = work.programs
    last = work.tiles * (SPEC.K * SHAPE.pieces) - 1
    reverse, start, at = items.first_item(work.few, programs)
    ticket = gl.program_id(0)
    n = 0
    while ticket <= last:
        at = gl.where(reverse, last - at, at)
        item = item_of(at, work, batch, SPEC, DIVISION, SHAPE)
        # The last items go to the programs that are free first, so they are not taken ahead.
        ends = ticket + 2 * programs > last
        if not ends:
            ticket, at = items.take(work.counters, reverse, start, programs, last)
        if item.tiles > 0:
            items.write_item(shared, n, item, WARPS)
            if ROWS_LATER:
                fill(shared.item_ring, n)
                wait_empty(shared.item_ring, n + SHAPE.slots - 1)  # the item before, by the consumers
                begin_rows(not_kept(batch.tensors.query), item, shared.q_groups, 0, SPEC, SHAPE, WARPS)
                await_rows()
                fill(shared.rows_full, n)
            else:
                slot = stage_of(shared.item_ring, n)
                begin_rows(batch.tensors.query, item, shared.q_groups, slot, SPEC, SHAPE, WARPS)
                await_rows()
                fill(shared.item_ring, n)
            n += 1
        if ends:
            wait_empty(shared.item_ring, n + SHAPE.slots - 1)
            ticket, at = items.take(work.counters, reverse, start, programs, last)
    items.end_items(shared, n, WARPS)


@gluon.jit
def prefetch_ids(batch, item, tile, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Prefetch the block ids of an item, whose first key tile is ``tile``, to the L2."""
    LINE: gl.constexpr = 32  # ids, of 128 bytes
    first = tile * SHAPE.N // SPEC.B
    end = gl.cdiv(gl.minimum((tile + item.tiles) * SHAPE.N, item.seq_len), SPEC.B)
    row = batch.tensors.block_tables + item.s.to(gl.int64) * batch.numbers.table_stride
    THREADS: gl.constexpr = 32 * SHAPE.warps
    thread = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [SHAPE.warps], [0]))
    for start in range(first, end, THREADS * LINE):
        at = row + gl.minimum(start + thread * LINE, end - 1) * SPEC.table
        asm: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(asm, "=r,l", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def not_kept(address):
    """The same address. Hides it from ptxas, which would spill the addresses of all lanes."""
    moved = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [address], address.dtype, is_pure=False, pack=1)
    return gl.multiple_of(moved, 16)


@gluon.jit
def rows_of(ids, kh, j, lane, PAGES: gl.constexpr, MATRIX: gl.constexpr, UNIT: gl.constexpr = 8):
    """The rows of the cache, in units of UNIT, at which the pages of a tile begin: lane n has the block id and the
    first token of page n."""
    first = ids * MATRIX.rows_n + kh * MATRIX.rows_head + j
    rows: gl.tuple = ()
    for page in gl.static_range(PAGES):
        rows += (gl.sum(gl.where(lane == page, first, 0), 0) // UNIT,)
    return rows


@gluon.jit
def load_tile(descs, rows, kh, to, n, COLUMNS: gl.constexpr, SHAPE: gl.constexpr, begin=0):
    """Begin to copy the n-th tile of keys, or of values, from column ``begin`` of the head, when its place is empty."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    wait_empty(to.ring, n)
    full = full_of(to.ring, n)
    column = kh * COLUMNS.matrix.columns_head + begin
    mbarrier.expect(full, SHAPE.N * sum_of(COLUMNS.parts) * 2)
    for part in gl.static_range(len(COLUMNS.parts)):
        first = column + first_of(COLUMNS.parts, part, COLUMNS.size)
        for page in gl.static_range(PAGES):
            place = to.pages[part].index(stage_of(to.ring, n) * PAGES + page)
            load_box(descs[part], [rows[page], 0, 0, first], full, place)


@gluon.jit
def load_both(descs, ids, first_lane, t, item, before, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load an item's t-th tile of keys and of values, after ``before`` tiles of other items. Lanes of ``ids``
    from ``first_lane`` on have its block ids."""
    K_SHAPE: gl.constexpr = SHAPE.k
    K_MATRIX: gl.constexpr = SHAPE.k.matrix
    V_SHAPE: gl.constexpr = SHAPE.v
    V_MATRIX: gl.constexpr = SHAPE.v.matrix
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    MASKS: gl.constexpr = SPEC.masks
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    j = (item.end_tile - 1 - t) * SHAPE.N + lane % PAGES * SHAPE.page
    j = place_at(j, SHAPE.N, item.oldest, MASKS, SHAPE.N) % SPEC.B
    kh = items.head_of(item, SHAPE)
    k_rows = rows_of(ids, kh, j, lane - first_lane, PAGES, K_MATRIX)
    v_rows = rows_of(ids, kh, j, lane - first_lane, PAGES, V_MATRIX)
    load_tile(descs[0], k_rows, kh, shared.k, before + t, K_SHAPE, SHAPE)
    load_tile(descs[1], v_rows, kh, shared.v, before + t, V_SHAPE, SHAPE, items.column_of(item, SHAPE))


@gluon.jit
def producer(
    descs, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr, GROUP: gl.constexpr = 1, ending=None,
    LEAD: gl.constexpr = 0,
):  # fmt: skip
    """Loads the items' tiles of keys and values, the last of a sequence first. Each lane loads one block id of a GROUP
    of tiles, while the tiles of the previous group are loaded; keys outside the sequence are masked later. With LEAD,
    and groups of several tiles, fills ``ending`` when an item has so many tiles left."""
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    MASKS: gl.constexpr = SPEC.masks
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    of_lane = lane % PAGES * PAGE - lane // PAGES % GROUP * N  # the first key of a lane's page, from the newest tile's
    tiles = items.next_tiles(shared, 0, 1)
    n = 0
    total = 0
    while tiles > 0:
        item = items.read_item(shared, n, tiles, 1)
        block_table = batch.tensors.block_tables + item.s.to(gl.int64) * batch.numbers.table_stride
        release(shared.item_ring, n)
        j = place_at((item.end_tile - 1) * N + of_lane, N, item.oldest, MASKS, N)
        next_ids = gl.load(block_table + gl.where((j >= 0) & (j < item.seq_len), j, 0) // B * SPEC.table)
        for begin in range(0, tiles, GROUP):
            ids = next_ids
            j = place_at((item.end_tile - 1 - begin - GROUP) * N + of_lane, N, item.oldest, MASKS, N)
            next_ids = gl.load(block_table + gl.where((j >= 0) & (j < item.seq_len), j, 0) // B * SPEC.table)
            if GROUP == 1:
                load_both(descs, ids, 0, begin, item, total, shared, SPEC, SHAPE)
            else:
                for t in range(begin, gl.minimum(begin + GROUP, tiles)):
                    if LEAD:
                        if t == gl.maximum(tiles - LEAD, 0):
                            fill(ending, n)
                    load_both(descs, ids, (t - begin) * PAGES, t, item, total, shared, SPEC, SHAPE)
        total += tiles
        n += 1
        tiles = items.next_tiles(shared, n, 1)
