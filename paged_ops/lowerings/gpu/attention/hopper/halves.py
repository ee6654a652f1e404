"""bfloat16 query rows as float16, in place: fp8 keys and values become float16, see fp8.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.hopper import ring
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP, as_tiles

LEAST = gl.constexpr(27)  # biased exponent of the least factor


@gluon.jit
def apart(rows):
    """Rows whose columns are in another order: the first two of each four, then the last two of each four. In this
    order ``widen_halves`` leaves keys that it converts in registers."""
    ROWS: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    return rows.reshape([ROWS, D // 4, 2, 2]).permute((0, 2, 1, 3)).reshape([ROWS, D])


@gluon.jit
def halve_rows(n, shared, SHAPE: gl.constexpr, APART: gl.constexpr = False, FIRST: gl.constexpr = 0, COUNT: gl.constexpr = 0, ROWS: gl.constexpr = 16):
    """bfloat16 query rows of the n-th item as float16, in place: COUNT of them from FIRST on, or all. Each row is
    divided by its factor, a power of two, so that its largest element is less than 2. APART: see :func:`apart`. ROWS:
    at once. A fence and a barrier have to follow."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = gl.bfloat16
    TILES: gl.constexpr = SHAPE.M // WARPGROUP
    K_PARTS: gl.constexpr = SHAPE.k.parts
    EACH: gl.constexpr = WARPGROUP // ROWS
    END: gl.constexpr = FIRST + COUNT if COUNT else SHAPE.M
    slot = ring.stage_of(shared.item_ring, n)
    rows = as_tiles(shared.q_groups, dtype, SHAPE.slots * TILES, WARPGROUP, K_PARTS)[0]
    for piece in gl.static_range(FIRST // ROWS, END // ROWS):
        tile = slot * TILES + piece // EACH
        row = rows.index(tile).slice(piece % EACH * ROWS, ROWS, dim=0).load(layout).to(gl.float32)
        power = gl.max(gl.abs(row), 1).to(gl.int32, bitcast=True) & 0x7F800000
        power = gl.minimum(gl.maximum(power, LEAST << 23), 253 << 23)
        half = (row * ((254 << 23) - power).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        if APART:
            half = apart(half)
        shared.q_tiles[0].index(tile).slice(piece % EACH * ROWS, ROWS, dim=0).store(half)
        factors = shared.row_factors.index(slot).slice(piece * ROWS, ROWS)
        if factors.dtype == gl.uint8:
            factors.store((power >> 23).to(gl.uint8))
        else:
            factors.store(power.to(gl.float32, bitcast=True))
