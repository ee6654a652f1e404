"""Batch-invariant attention on Hopper over fp8 caches: the items and consumers of invariant.py, and the warps of fp8.py
that convert tiles of bytes, loaded two by two, to float16. Where there are many sequences of few rows,
invariant_decode.py takes these, with the same bits.

Letters: as in dense.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_ops.lowerings.gpu.attention.hopper import fp8
from paged_ops.lowerings.gpu.attention.hopper.dense import HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.fp8 import bytes_of, converter
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP, as_tiles, rows_at_once
from paged_ops.lowerings.gpu.attention.hopper.invariant_items import scheduler
from paged_ops.lowerings.gpu.attention.hopper.invariant_roles import consumer
from paged_ops.lowerings.gpu.attention.hopper.loader import load_tiles
from paged_ops.lowerings.gpu.attention.hopper.ring import begin_kernel, signal_of
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.spec import Numbers, Spec

AT_ONCE = fp8.AT_ONCE
# Registers of a thread of the consumers, and of the scheduler and the producer; the converter has the rest.
REGISTERS, REGISTERS_OF_FEW = (208, 208, 48, 48), (240, 56, 56)


def pairs_of(spec: Spec) -> Spec:
    """The spec of an fp8 cache as one of 16-bit numbers, whose heads have half the columns."""
    pairs = fp8.in_pairs(spec)
    k_side, v_side = (side._replace(size=side.size // 2, x=side.x // 2) for side in (pairs.k_side, pairs.v_side))
    return pairs._replace(k_side=k_side, v_side=v_side)


def shapes_of(spec: Spec, M: int, shared_memory: int) -> tuple[HopperShape, HopperShape]:
    """The shape of the tiles that are multiplied, and of the tiles of bytes."""
    shape, of_bytes = fp8.shapes_of(fp8.in_pairs(spec), shared_memory)
    if M > WARPGROUP.value:
        shape = shape._replace(registers=REGISTERS)
    else:  # where one tile of many rows fits, two of few rows do
        shape = shape._replace(M=M, slots=2, row_slots=2, registers=REGISTERS_OF_FEW)
    return shape, of_bytes


@gluon.jit(do_not_specialize=Numbers._fields)
def invariant_fp8_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc,  # of pairs of bytes; None without TMA
    SPEC: gl.constexpr, PAIRS: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, BYTES: gl.constexpr,
    E4M3: gl.constexpr, LOADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``invariant_items_kernel`` of invariant.py. PAIRS: SPEC, with the sides as pairs of bytes."""
    K_PARTS: gl.constexpr = SHAPE.k.parts
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    half: gl.constexpr = gl.float16
    ROWS: gl.constexpr = rows_at_once(SHAPE.k.size)
    of_all = shared_memory(half, SPEC, SHAPE, 2)
    if dtype == gl.bfloat16:
        # what shared.q_tiles are made of
        groups = as_tiles(of_all[2], dtype, SHAPE.slots * (SHAPE.M // ROWS), ROWS, K_PARTS)
        factors = gl.allocate_shared_memory(gl.uint8, [SHAPE.slots, SHAPE.M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        rows = signal_of(SHAPE.slots)
        shared = Shared(*of_all[:2], groups, *of_all[3:], None, rows, factors)  # type: ignore[call-arg]
    else:
        shared = Shared(*of_all, rows_full=signal_of(SHAPE.slots))  # type: ignore[misc]
    K_BYTES: gl.constexpr = BYTES.k.parts
    V_BYTES: gl.constexpr = BYTES.v.parts
    keys, values = bytes_of(K_BYTES, BYTES), bytes_of(V_BYTES, BYTES)
    of_bytes = Shared(of_all[0], of_all[1], None, None, keys, values)
    ending = signal_of(SHAPE.slots)
    begin_kernel(PDL)
    if tensors.k_scale is not None:
        scale *= gl.load(tensors.k_scale)
    batch = Batch(tensors, Numbers(scale, soft_cap, window, chunk, table_stride, S, T), None)
    descs = (k_desc,), (v_desc,)
    if SHAPE.M == WARPGROUP:
        gl.warp_specialize(
            [
                (converter, (keys, values, shared, E4M3, SHAPE, True)),
                (consumer, (0, batch, shared, SPEC, PLAN, SHAPE)),
                (scheduler, (batch, shared, ending, SPEC, PLAN, SHAPE)),
                (load_tiles, (descs, batch, of_bytes, ending, LOADS, SPEC, PLAN, BYTES, PAIRS)),
            ],
            [4, 1, 1],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (converter, (keys, values, shared, E4M3, SHAPE, True)),
                (consumer, (0, batch, shared, SPEC, PLAN, SHAPE)),
                (consumer, (1, batch, shared, SPEC, PLAN, SHAPE)),
                (scheduler, (batch, shared, ending, SPEC, PLAN, SHAPE)),
                (load_tiles, (descs, batch, of_bytes, ending, LOADS, SPEC, PLAN, BYTES, PAIRS)),
            ],
            [4, 4, 1, 1],
            SHAPE.registers,
        )
