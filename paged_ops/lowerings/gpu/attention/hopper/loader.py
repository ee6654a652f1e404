"""Loads of keys and values to shared memory without TMA, for caches of any layout: hopper/invariant.py.

Tiles lie as producer.py loads them, two bytes of fp8 as one number of 16 bits. With rows of whole pieces of 16 bytes, a
warp copies them asynchronously; else it loads elements, which takes longer. Letters: see dense.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from paged_ops.lowerings.gpu.attention.hopper.head_chunks import as_tiles, rows_at_once
from paged_ops.lowerings.gpu.attention.hopper.producer import producer
from paged_ops.lowerings.gpu.attention.hopper.ring import fill, release, wait_empty
from paged_ops.lowerings.gpu.attention.hopper.work import next_tiles, read_item
from paged_ops.lowerings.gpu.gluon_names import load_async


@gluon.constexpr_function
def chunk_rows(size, elements):
    """The rows that a warp loads at once, with so many numbers each; bytes that are not loaded in pairs take more
    registers."""
    return 8 if size < elements else rows_at_once(size)


@gluon.jit
def rows_at(cache, j, live, item, batch, SIDE: gl.constexpr, SPEC: gl.constexpr):
    """The addresses of keys ``j``, or of values, in any layout."""
    table = batch.tensors.block_tables + item.s.to(gl.int64) * batch.numbers.table_stride
    block = gl.load(table + j // SPEC.B * SPEC.table, mask=live, other=0)
    row = block.to(gl.int64) * SIDE.n + (j % SPEC.B).to(gl.int64) * SIDE.b
    return cache + item.kh.to(gl.int64) * SIDE.k + row


@gluon.jit
def columns_of(SIDE: gl.constexpr, layout: gl.constexpr, STEP: gl.constexpr = 1, FIRST: gl.constexpr = 0):
    """The columns of a head, or every STEP-th from FIRST on, in elements from its first."""
    d = FIRST + STEP * gl.arange(0, SIDE.size // STEP, gl.SliceLayout(0, layout))
    if SIDE.x == SIDE.size:
        column = d * SIDE.d
    else:
        column = (d // SIDE.x) * SIDE.dx + (d % SIDE.x) * SIDE.d
    return column


@gluon.jit
def load_chunk(rows, live, places, at, SIDE: gl.constexpr, ASYNC: gl.constexpr, layout: gl.constexpr):
    """Load some rows of keys, or of values; 0 past the sequence. ASYNC: begin to."""
    if ASYNC:
        load_async(places.index(at), rows[:, None] + columns_of(SIDE, layout)[None, :], mask=live[:, None])
    elif rows.dtype.element_ty.primitive_bitwidth == 8:
        first = gl.load(rows[:, None] + columns_of(SIDE, layout, 2, 0)[None, :], mask=live[:, None], other=0)
        second = gl.load(rows[:, None] + columns_of(SIDE, layout, 2, 1)[None, :], mask=live[:, None], other=0)
        pairs = first.to(gl.uint16) | (second.to(gl.uint16) << 8)
        places.index(at).store(pairs.to(places.dtype, bitcast=True))
    else:
        columns = columns_of(SIDE, layout)
        places.index(at).store(gl.load(rows[:, None] + columns[None, :], mask=live[:, None], other=0.0))


@gluon.jit
def load_any(tile, at, places, item, batch, SPEC: gl.constexpr, SHAPE: gl.constexpr, ASYNC: gl.constexpr):
    """Load the at-th tile of keys and of values from any layout, or begin to."""
    K_SIDE: gl.constexpr = SPEC.k_side
    V_SIDE: gl.constexpr = SPEC.v_side
    SIZE: gl.constexpr = SHAPE.k.size
    ROWS: gl.constexpr = chunk_rows(SIZE, K_SIDE.size)
    CHUNKS: gl.constexpr = SHAPE.N // ROWS
    AT_ONCE: gl.constexpr = 4 if ASYNC else 1  # chunks whose block ids are loaded before the first is needed
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [1, 1], [1, 0])
    keys, values = batch.tensors.key_cache, batch.tensors.value_cache
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        number: gl.constexpr = gl.float16 if ASYNC else gl.uint8
        keys, values = keys.to(gl.pointer_type(number)), values.to(gl.pointer_type(number))
    first = at % SHAPE.stages * CHUNKS
    for begin in range(0, CHUNKS, AT_ONCE):
        for n in gl.static_range(AT_ONCE):
            j = tile * SHAPE.N + (begin + n) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            live = j < item.seq_len
            k_rows = rows_at(keys, j, live, item, batch, K_SIDE, SPEC)
            v_rows = rows_at(values, j, live, item, batch, V_SIDE, SPEC)
            load_chunk(k_rows, live, places[0], first + begin + n, K_SIDE, ASYNC, layout)
            load_chunk(v_rows, live, places[1], first + begin + n, V_SIDE, ASYNC, layout)


@gluon.jit
def end_loads(shared, at):
    """Publish the at-th tiles, which have arrived."""
    fence_async_shared()
    fill(shared.k.ring, at)
    fill(shared.v.ring, at)


@gluon.jit
def loader(
    batch, shared, ending, LEAD: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr, ASYNC: gl.constexpr
):  # fmt: skip
    """Loads the items' tiles of keys and values, the last one first, without TMA: one tile ahead, if ASYNC, which wants
    rows of whole pieces of 16 bytes. Over an fp8 cache SHAPE, and if ASYNC the sides of SPEC, are in pairs of bytes.
    ``ending``, LEAD: as in ``producer`` of producer.py."""
    SIZE: gl.constexpr = SHAPE.k.size
    ROWS: gl.constexpr = chunk_rows(SIZE, SPEC.k_side.size)
    K_PARTS: gl.constexpr = SHAPE.k.parts
    V_PARTS: gl.constexpr = SHAPE.v.parts
    dtype: gl.constexpr = shared.k.pages[0].dtype
    TILES: gl.constexpr = SHAPE.stages * (SHAPE.N // ROWS)
    k_places = as_tiles(shared.k.pages, dtype, TILES, ROWS, K_PARTS)
    v_places = as_tiles(shared.v.pages, dtype, TILES, ROWS, V_PARTS)
    places = (k_places[0], v_places[0])
    tiles = next_tiles(shared, 0, 1)
    n = 0
    total = 0
    while tiles > 0:
        item = read_item(shared, n, tiles, 1)
        release(shared.item_ring, n)
        for t in range(tiles):
            at = total + t
            if t == gl.maximum(tiles - LEAD, 0):
                fill(ending, n)
            if ASYNC and SHAPE.stages < 3 and t > 0:  # consumers release values after the next keys
                async_copy.wait_group(0)
                end_loads(shared, at - 1)
            wait_empty(shared.k.ring, at)
            wait_empty(shared.v.ring, at)
            load_any(item.end_tile - 1 - t, at, places, item, batch, SPEC, SHAPE, ASYNC)
            if ASYNC:
                async_copy.commit_group()
                if SHAPE.stages >= 3 and t > 0:
                    async_copy.wait_group(1)
                    end_loads(shared, at - 1)
            else:
                end_loads(shared, at)
        total += tiles
        if ASYNC:
            async_copy.wait_group(0)
            end_loads(shared, total - 1)
        n += 1
        tiles = next_tiles(shared, n, 1)


@gluon.jit
def load_tiles(
    descs, batch, shared, ending, LOADS: gl.constexpr, SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The producer's role in the batch-invariant kernels. LOADS: see ``loads_of`` of invariant.py. PAIRS: SPEC, or over
    an fp8 cache the spec of its pairs of bytes."""
    if LOADS == 2:
        producer(descs, batch, shared, SPEC, SHAPE, 32 // (SHAPE.N // SHAPE.page), ending, PLAN.lead)
    elif LOADS == 1:
        loader(batch, shared, ending, PLAN.lead, PAIRS, SHAPE, True)
    else:
        loader(batch, shared, ending, PLAN.lead, SPEC, SHAPE, False)
