"""The order in which the batch-invariant Hopper kernels sum weights, for tiles of scores in both orientations.

In a tile of 128 keys the weights of keys at a distance of 64 are added first, then of 8, of 1, and of 16 and 32. Four
sums are left, one for each pair of neighbours among 8 keys. They are kept over the tiles of a segment, and added at its
end.

A consumer has query rows as rows, and each of a row's four threads has the 32 columns of one such sum. The decoder has
keys as rows: of each 64 a warp has 16. All sums are over axes of two, so no compiler can add them in another order.

Over fp8 caches (FEW) the distances in a tile are 8, 64 and 1. 16 sums are left, which are kept over the tiles of a
segment. At its end the distances are 16, 32, 2 and 4. A consumer's thread has four of the 16 sums; in
invariant_decode.py, where keys are rows, a thread has one, so that its warps need not exchange sums in every tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def thread_sums(p, FEW: gl.constexpr):
    """The sums of the weights ``[rows, 128]`` of a tile: ``[rows, 4]``; FEW: ``[rows, 4, 4]``."""
    M: gl.constexpr = p.shape[0]
    if FEW:
        sums = gl.sum(gl.sum(gl.sum(p.reshape([M, 2, 4, 2, 4, 2]), 3), 1), 3)
    else:
        sums = gl.sum(gl.sum(gl.sum(p.reshape([M, 2, 4, 2, 4, 2]), 1), 2), 3)
        sums = gl.sum(gl.sum(sums.reshape([M, 2, 2, 4]), 2), 1)
    return sums


@gluon.jit
def row_sums(l):
    """The sums of each row, from its four, or 16."""
    if len(l.shape) == 3:
        sums = gl.sum(gl.sum(l.reshape([l.shape[0], 2, 2, 2, 2]), 2), 1)
    else:
        sums = l.reshape([l.shape[0], 2, 2])
    return gl.sum(gl.sum(sums, 2), 1)


@gluon.jit
def as_sums(of_rows, l):
    """A number of each row, ``[rows, 4]`` and equal in the four, to be combined with its sums."""
    if len(l.shape) == 3:
        column = gl.convert_layout(of_rows, gl.SliceLayout(1, l.type.layout))[:, None, :]
    else:
        column = gl.convert_layout(of_rows, l.type.layout)
    return column


@gluon.constexpr_function
def each_thread(rows):
    """The layout in which each thread has all four warps' sums of some query rows."""
    registers = [[0, 0, 1], *([0, 0, 8 << n] for n in range(rows.bit_length() - 4)), [1, 0, 0], [2, 0, 0]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0], [0, 0, 0]], [], [4, 4, rows])


@gluon.jit
def tile_sums(p):
    """The sums of weights ``[64, rows]``, each of two keys that are 64 apart: ``[4, rows]``."""
    M: gl.constexpr = p.shape[1]
    sums = gl.sum(gl.sum(p.reshape([4, 2, 4, 2, M]), 1), 2)
    sums = gl.convert_layout(sums, each_thread(M)).reshape([2, 2, 4, M])
    return gl.sum(gl.sum(sums, 1), 0)


@gluon.jit
def column_sums(l):
    """The sums of each query row, from its four."""
    return gl.sum(gl.sum(l.reshape([2, 2, l.shape[1]]), 1), 0)
