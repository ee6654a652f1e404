"""The softmax of a tile of scores in registers, and its maxima.

A maximum that grows by at most SLACK, to base 2, stays in use: weights are then at most 2^SLACK, and as exact, and sums
need no factor (the idea is FlashAttention-4's). So one vote of a warp says whether a maximum of its rows has to change;
what follows from that is rare, and behind a branch of this warp. Gluon only has branches that all warps take, so both
are written in PTX. The vote changes no bit: a row's own scores decide whether its maximum changes, as in
:func:`raised`, and the sums of other rows are multiplied by 1.

Four threads have the columns of a row. Vectors of rows are ``[M, 4]``: maxima and factors are equal in all four, and
totals are each thread's own.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)  # how much larger a score may be than the maximum in use
SLACK_PTX = gl.constexpr("0f" + struct.pack(">f", SLACK.value).hex())
LEAST = gl.constexpr(-1.7e38)  # the maximum of a row that has seen no key: finite, as it is subtracted


@triton.jit
def raised(m, largest):
    """The maxima in use from now on, and the factors of earlier sums, from those in use and the largest scores."""
    m_new = tl.where(largest > m + SLACK, largest, m)
    return m_new, tl.exp2(m - m_new)


@triton.jit
def normaliser(m, l):
    """The factors of the sums of rows with maxima ``m`` and sums of weights ``l``, and their lse to base 2; 0 and -inf
    of rows that have seen no key."""
    seen = l != 0.0
    some = tl.where(seen, l, 1.0)
    return tl.where(seen, 1.0 / some, 0.0), tl.where(seen, m + tl.log2(some), float("-inf"))


@gluon.constexpr_function
def raise_asm():
    """:func:`raised` of two rows: $0, $1 the maxima in use from now on, $2, $3 the factors of earlier sums; $4, $5 the
    largest scores of this thread, $6, $7 the maxima in use. 0f3F800000 is 1."""
    lines = [
        "{",
        ".reg .pred p, q;",
        ".reg .f32 t, u;",
        f"add.f32 t, $6, {SLACK_PTX.value};",
        f"add.f32 u, $7, {SLACK_PTX.value};",
        "setp.gt.f32 p, $4, t;",
        "setp.gt.f32 q, $5, u;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "mov.f32 $0, $6;",
        "mov.f32 $1, $7;",
        "mov.f32 $2, 0f3F800000;",
        "mov.f32 $3, 0f3F800000;",
        "@!p bra DONE;",
    ]
    for n in range(2):
        lines += [f"mov.f32 t, ${4 + n};"]
        for distance in (1, 2):
            lines += [f"shfl.sync.bfly.b32 u, t, {distance}, 0x1f, 0xffffffff;", "max.f32 t, t, u;"]
        lines += [f"add.f32 u, ${6 + n}, {SLACK_PTX.value};", "setp.gt.f32 p, t, u;", f"selp.f32 ${n}, t, ${6 + n}, p;"]
        lines += [f"sub.f32 u, ${6 + n}, ${n};", f"ex2.approx.ftz.f32 ${2 + n}, u;"]
    return "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def scale_asm(count):
    """Multiplies a thread's ``count`` sums of two rows by their factors, unless those of the warp are 1. The first and
    the last sum are of different rows."""
    lines = [
        "{",
        ".reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * count}, 0f3F800000;",
        f"setp.neu.f32 q, ${3 * count - 1}, 0f3F800000;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
    ]
    lines += [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    return "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def scale_constraints(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count)


@gluon.constexpr_function
def rows_layout(layout):
    """Of a vector of rows, from the layout of :func:`by_threads`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


@gluon.jit
def by_threads(x):
    """``[M, N]`` as ``[M, N / 8, 4, 2]``: the columns of each of four threads."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def rows_by_threads(vector, layout: gl.constexpr):
    """A vector ``[M]`` as ``[M, 4]``."""
    column = gl.convert_layout(vector, gl.SliceLayout(1, layout))[:, None]
    return column + gl.full([vector.shape[0], 4], 0.0, gl.float32, layout)


@gluon.jit
def weights_of(scores, m, factor, BY_ROWS: gl.constexpr):
    """p (unnormalised), the maxima in use, and the factors of earlier sums; to base 2, with ``factor`` folded into one
    multiply-add. BY_ROWS: each row has its own."""
    scores = by_threads(scores)
    largest = gl.max(gl.max(scores, 3), 1) * factor
    if BY_ROWS:
        factor = factor[:, None, :, None]
    m, decay = gl.inline_asm_elementwise(
        raise_asm(), "=&f,=&f,=&f,=&f,f,f,f,f", [largest, m], (gl.float32, gl.float32), is_pure=True, pack=2
    )
    p = gl.exp2(gl.fma(scores, factor, m[:, None, :, None] * -1.0))  # costs nothing; -m would be 0 - m
    return p.reshape([scores.shape[0], scores.shape[1] * 8]), m, decay


@gluon.jit
def softmax_tile(scores, m, factor, BY_ROWS: gl.constexpr):
    """As :func:`weights_of`, with each thread's sum of p before the factors of earlier sums."""
    p, m, decay = weights_of(scores, m, factor, BY_ROWS)
    return p, m, gl.sum(gl.sum(by_threads(p), 3), 1), decay


@gluon.jit
def scaled_if_raised(acc, factors, WARPS: gl.constexpr = 4):
    """Sums ``[M, columns]`` times the factors of their rows, most of which are 1. Four of the warps have all rows."""
    x = by_threads(acc)
    factors = gl.convert_layout(factors, rows_layout(x.type.layout))[:, None, :, None]
    COUNT: gl.constexpr = acc.shape[1] * 2 // WARPS  # of a thread
    x = gl.inline_asm_elementwise(
        scale_asm(COUNT), scale_constraints(COUNT), [x, factors], gl.float32, is_pure=True, pack=COUNT
    )
    return gl.convert_layout(x.reshape(acc.shape), acc.type.layout)
