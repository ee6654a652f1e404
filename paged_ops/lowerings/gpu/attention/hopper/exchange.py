"""What the programs of a thread block cluster exchange: float32s in each other's shared memory (sm_90), by PTX, as
Gluon has no words for it.

A kernel that calls these functions has no clusters in its own terms (``num_ctas`` 1): the launch forms them, see
``cluster`` of launch.py. Its program ids are those of all programs, and C successive ones are a cluster. The order of
calls: :func:`declare`, :func:`arrive`, :func:`wait`, :func:`push`, :func:`turn`, :func:`pull`, once each of the first
three and of :func:`turn`, by all programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def declaration(size):
    return f".shared .align 16 .b8 exchange[{size}]; mov.u32 $0, $1;"


@gluon.constexpr_function
def barrier(steps):
    return " ".join(f"barrier.cluster.{step}.aligned;" for step in steps) + " mov.u32 $0, $1;"


ARRIVE, WAIT = gl.constexpr(barrier(["arrive.relaxed"])), gl.constexpr(barrier(["wait.acquire"]))
TURN = gl.constexpr(barrier(["arrive.release", "wait.acquire"]))
PUSH = gl.constexpr(
    "{ .reg .u32 a; .reg .pred p; setp.ge.s32 p, $2, 0; mov.u32 a, exchange; add.u32 a, a, $2; "
    "mapa.shared::cluster.u32 a, a, $3; @p st.shared::cluster.f32 [a], $1; mov.u32 $0, $2; }"
)
PULL = gl.constexpr("{ .reg .u32 a; mov.u32 a, exchange; add.u32 a, a, $1; ld.shared.f32 $0, [a]; }")


@gluon.jit
def _act(asm: gl.constexpr):
    gl.inline_asm_elementwise(asm, "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def declare(BYTES: gl.constexpr):
    """The program's memory that others write."""
    _act(declaration(BYTES))


@gluon.jit
def arrive():
    """This program has started."""
    _act(ARRIVE)


@gluon.jit
def wait():
    """All programs of the cluster have started, so that their memory may be written."""
    _act(WAIT)


@gluon.jit
def turn():
    """All programs have written: from here on each reads what it has got. Nobody's memory is written after this."""
    _act(TURN)


@gluon.jit
def push(numbers, place, rank):
    """Store float32s at bytes ``place`` of the memory of the program ``rank`` of this cluster; negative: do not."""
    gl.inline_asm_elementwise(PUSH, "=r,f,r,r", [numbers, place, rank], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pull(place):
    """The float32s at bytes ``place`` of this program's memory."""
    return gl.inline_asm_elementwise(PULL, "=f,r", [place], gl.float32, is_pure=False, pack=1)
