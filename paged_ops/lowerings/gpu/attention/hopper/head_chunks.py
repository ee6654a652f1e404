"""The Hopper kernel's columns: heads of any multiple of 16, in parts whose sizes are powers of two.

In Gluon the sizes of tensors, copies and matmuls are powers of two. So the columns of a head are divided (192 is
128 + 64, 176 is 128 + 32 + 16), and each part has its own places in shared memory, copies and matmuls: keys add to the
same scores, values to separate sums. Nothing is padded, but a part of values may overlap the previous one. Constants
are tuples of the parts' sizes, the largest first.

With small blocks heads of 80, 96 and 112 are one part, a PAIR of groups: the first 64 columns of the head and the last
64, which overlap. One copy loads both. Matmuls multiply pieces of it (96 is 64 + 32), so that no column counts twice in
a score.

A part lies in groups of 8 rows by up to 64 columns, swizzled, with all columns of 8 rows together: so a block of the
cache is one copy, and tiles of any number of rows are made of blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.gluon_names import reinterpret

WARPGROUP = gl.constexpr(64)  # rows of a tile that one warpgroup multiplies
WIDEST = 128  # columns of a matmul with values: ptxas allows no more next to the scores
PAIR, GROUP = 128, 64
LARGEST_OF_PAIRS = 16  # tokens of a block: larger blocks need fewer copies


@gluon.constexpr_function
def pieces_of(size):
    """The columns of each matmul of scores, powers of two. In the second group of a pair each begins at a multiple of
    its size."""
    powers = tuple(1 << n for n in reversed(range(size.bit_length())) if size >> n & 1)
    return (powers[0], *reversed(powers[1:])) if GROUP < size < PAIR else powers


def parts_of(size: int, page: int) -> tuple[int, ...]:
    """The parts of keys of a head: as they are multiplied, or a pair. ``page``: keys per copy."""
    return (PAIR,) if GROUP < size < PAIR and page <= LARGEST_OF_PAIRS else pieces_of(size)


def value_parts_of(size: int, page: int) -> tuple[int, ...]:
    """The same for values, with 64 in place of 32 + 16, which takes about as long. The last part then overlaps the
    previous one."""
    parts = parts_of(size, page)
    return (*parts[:-2], 64) if sum(parts[-2:]) == 48 and size > 64 else parts


@gluon.constexpr_function
def value_pieces_of(parts, size):
    """The columns of each matmul with values; all of a pair at once rather than three."""
    return pieces_of(size) if parts[0] > size and len(pieces_of(size)) == 2 else parts


@gluon.constexpr_function
def column_in_pair(pieces, n):
    """The column of a pair at which a piece begins."""
    return PAIR - sum(pieces[n:]) if n else 0


def distance_of(part: int, size: int) -> int:
    """Columns from one group of a part to the next."""
    return size - GROUP if part > size else GROUP


@gluon.constexpr_function
def sum_of(parts):
    return sum(parts)


@gluon.constexpr_function
def first_of(parts, n, size):
    """The column of a head of this size at which a part begins."""
    return max(min(sum(parts[:n]), size - parts[n]), 0)


@gluon.constexpr_function
def widths_of(parts):
    """The columns of each matmul with values: a part or, if it is too wide, a piece of it."""
    return tuple(min(size, WIDEST) for size in parts for _ in range(0, size, WIDEST))


@gluon.constexpr_function
def part_with(parts, n):
    """The part with the columns of the n-th matmul."""
    return [part for part, size in enumerate(parts) for _ in range(0, size, WIDEST)][n]


@gluon.constexpr_function
def first_in_part(parts, n):
    """The first column of the n-th matmul in that part."""
    return [at for size in parts for at in range(0, size, WIDEST)][n]


@gluon.constexpr_function
def rows_at_once(size):
    """The query rows of a part that four warps load at once, with 16 bytes per thread."""
    return max(8, 1024 // size)


@gluon.constexpr_function
def tile_layout(rows, size):
    """Groups of 8 rows by up to 64 columns, swizzled. A row of groups has all columns, as copies write them."""
    group = min(size, 64)
    bases = [[0, 1 << n] for n in range(group.bit_length() - 1)]
    # The hardware's swizzle: pieces of 8 columns are exchanged by the number of their line of 128 bytes.
    bases += [[1 << n, (group << n) // 64 * 8] for n in range(3)]
    bases += [[0, 64 << n] for n in range((size // 64).bit_length() - 1)]
    bases += [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def box_layout(size):
    """The same for a copy of ``[rows / 8, columns / 64, 8, 64]``."""
    return gl.NVMMASharedLayout(2 * min(size, 64), 16, 4)


@gluon.constexpr_function
def box_of(rows, size):
    return [rows // 8, max(size // 64, 1), 8, min(size, 64)]


@gluon.constexpr_function
def pages_of(pages, rows, parts, n):
    return [pages, *box_of(rows, parts[n])]


@gluon.constexpr_function
def query_shape(rows, parts, n):
    return [rows // rows_at_once(parts[n]), rows_at_once(parts[n]), parts[n]]


@gluon.constexpr_function
def query_layout(size):
    return tile_layout(rows_at_once(size), size)


@gluon.jit
def places(dtype: gl.constexpr, pages: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr):
    """Shared memory for ``pages`` pages of PAGE keys or values, a place for each part, as copies write them."""
    made: gl.tuple = ()
    for n in gl.static_range(len(PARTS)):
        made += (gl.allocate_shared_memory(dtype, pages_of(pages, PAGE, PARTS, n), box_layout(PARTS[n])),)
    return made


@gluon.jit
def query_places(dtype: gl.constexpr, rows: gl.constexpr, PARTS: gl.constexpr):
    """Shared memory for ``rows`` query rows, as they are loaded."""
    made: gl.tuple = ()
    for n in gl.static_range(len(PARTS)):
        made += (gl.allocate_shared_memory(dtype, query_shape(rows, PARTS, n), query_layout(PARTS[n])),)
    return made


@gluon.jit
def as_tiles(given, dtype: gl.constexpr, tiles: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """The same memory as tiles of ROWS rows, as they are multiplied."""
    made: gl.tuple = ()
    for n in gl.static_range(len(PARTS)):
        made += (reinterpret(given[n], dtype, [tiles, ROWS, PARTS[n]], tile_layout(ROWS, PARTS[n])),)
    return made
