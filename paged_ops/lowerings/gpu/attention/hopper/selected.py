"""Attention to selected latents on Hopper (sm_90) in Gluon.

A unit is a token and a group of query heads: its query rows are these heads, and its keys are those of the token's
list. A list is cut into equal parts, so that few units fill the GPU, and programs take parts in turn. TMA cannot
address rows that are not adjacent. So four warps find the rows of a tile by the list and the block table, and copy them
16 bytes at a time to where TMA would write them; a key that the token does not see is zeros there, and its scores are
replaced by -inf. Other warps compute. merge_selected_kernel merges the parts. The numbers of fp8_ds_mla rows go through
these warps' registers, which multiply them by their scales; the tile is the same.

For at most 16 heads the keys, and then the value columns, are rows of the matmuls, as in latent_few.py (S^T = K Q^T,
O^T = V^T P^T), and one warpgroup computes. Otherwise the 64 heads of a group are the rows (S = Q K^T, O = P V). Over
bfloat16 and float16 rows one warpgroup multiplies keys, and two more half of the value columns each, as in latent.py.
Over rows with scales the loading warps need too many registers for three; two take half of the keys and then half of
the value columns each.

Letters: as in latent.py. Bytes of a selected key: 2 (R + P) in bfloat16, 656 in fp8_ds_mla. Source of the idea: the
sparse attention of DeepSeek-V3.2 and its FlashMLA kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import latent, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.launch import PARTS, HopperLaunch
from paged_ops.lowerings.gpu.attention.hopper.selected_load import load_part
from paged_ops.lowerings.gpu.attention.hopper.softmax import (
    LEAST,
    SLACK,
    by_threads,
    rows_by_threads,
    rows_layout,
    scaled_if_raised,
    softmax_tile,
)
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, Part
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.attention.triton.selected import NOT_OF_MERGE, merge_selected_kernel
from paged_ops.lowerings.gpu.gluon_names import reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape
from paged_ops.lowerings.gpu.target import TRITON, Target

FEW = 16  # the most query rows that are columns of the matmuls
STAGES = 2  # tiles in shared memory
LOADERS, LOADERS_OF_FEW = 4, 8  # warps that copy keys, and for few query rows over rows with scales
# Of the warps after the first ones: those that copy keys are last. Rows with scales have the numbers of a tile in them.
REGISTERS, SCALED_REGISTERS = (80,), {4: (128,), 8: (112,)}
# Of the two warpgroups for values, and of the warps that copy keys: as in latent.py, Triton 3.9 needs more for values.
APART_REGISTERS = (192, 192, 48) if TRITON >= (3, 9) else (176, 176, 56)
LATENT = gl.constexpr(latent.LATENT)
# What a part, and a merge, cost besides the tiles, in tiles: see parts_of.
START, MERGE = 1, 2
MOST_ROWS = 1 << 16  # of the results of parts: 256 MiB
MERGED = 4  # heads that one program merges, of two parts of many query rows

APPLIES = frozenset({"latent", "selected", "selection", "causal", "window", "chunk", "float16", "bfloat16"})
OF_SCALED_ROWS = frozenset({"row_scales", "float8_e4m3fn"})


def serves(spec: Spec, target: Target) -> list[str]:
    if not spec.masks.selected:
        return ["selected_keys: not given"]
    spec = spec._replace(B=8)  # any rows of whole pieces of 16 bytes
    if not spec.storage.row_scales:
        return latent.refusals(spec, APPLIES, [spec.dtype], str(spec.dtype), 1)
    against = [] if spec.dtype == torch.bfloat16 else [f"dtype: expected that of the rotated columns, got {spec.dtype}"]
    return against + latent.refusals(spec, APPLIES | OF_SCALED_ROWS, [torch.float8_e4m3fn], "float8_e4m3fn", 1)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    if not (shapes.columns and shapes.aligned and spec.masks.selection.entries):
        return "selected_keys, block_tables or kv_cache: expected entries, block ids, and a multiple of 16 bytes"
    M = rows_of(spec)
    units = shapes.T * -(-spec.heads // M)
    return shapes.T, tuning.division(M, shapes.S), parts_of(units, tiles_of(spec), target.processors, MOST_ROWS // M)


def rows_of(spec: Spec) -> int:
    """The query rows of a unit, padded."""
    return max(8, tuning.power_of_2(spec.heads)) if spec.heads <= FEW else latent.ROWS


def tiles_of(spec: Spec) -> int:
    """The tiles of a list."""
    selection = spec.masks.selection
    return -(-selection.entries * selection.block // latent.KEYS)


def parts_of(units: int, tiles: int, programs: int, most: int) -> int:
    """The number of parts of a list with the shortest time, a power of two; no part is empty. At most ``most``
    parts in all, if lists are divided."""

    def cost(parts: int) -> int:
        rounds = -(-units * parts // programs)
        return rounds * (-(-tiles // parts) + START) + (MERGE if parts > 1 else 0)

    powers = [1 << n for n in range(tiles.bit_length()) if n == 0 or units << n <= most]
    return min((n for n in powers if (n - 1) * -(-tiles // n) < tiles), key=cost)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    T, division, parts = choice
    M = rows_of(spec)
    spec = latent.packed(spec, M)
    few, scaled = M <= FEW, spec.storage.row_scales
    apart = not few and not scaled
    loaders = LOADERS_OF_FEW if few and scaled else LOADERS
    registers = SCALED_REGISTERS[loaders] if scaled else APART_REGISTERS if apart else REGISTERS
    shape = SelectedShape(
        M, latent.KEYS, STAGES, 2 if few else 1, tiles_of(spec), parts, few, apart, loaders, registers
    )  # fmt: skip
    units = T * spec.K
    warps = 4 if few or apart else 8
    constants = {"SPEC": spec, "DIVISION": division, "SHAPE": shape, **target.overlap(), "num_warps": warps}
    takes = ("key_cache", "selected_keys", *(PARTS if parts > 1 else ()))
    rows = functools.partial(latent.describe_rows, M, 64)
    grid = min(units * parts, target.processors), 1, 1
    launcher = launcher_of(selected_hopper_kernel, constants, target.device)
    launch = HopperLaunch(launcher, grid, takes, [("query", rows)])
    if parts == 1:
        return Launches((launch,), (0, 0, 0))
    merged = {"SPEC": spec.for_merge(), "TILE": TileShape(M, 1, 0, spec.v_side.size, 0, False), "PARTS": parts}
    heads = MERGED if parts == 2 and not few else 1
    options = {"HEADS": heads, **target.overlap(), "num_warps": 4}
    launcher = launcher_of(merge_selected_kernel, merged | options, target.device, NOT_OF_MERGE)

    def merges(numbers: Numbers) -> Grid:
        return numbers.T * spec.K, -(-spec.G // heads), 1

    launches = launch, Launch(launcher, merges, NOT_OF_MERGE)
    return Launches(launches, merge.workspace(units * parts, M, spec.v_side.size))


class SelectedShape(NamedTuple):
    """The tile, and how lists are divided."""

    M: int
    N: int
    stages: int  # tiles in shared memory
    units: int  # units whose query rows are in shared memory
    tiles: int  # of a list
    parts: int  # of a list
    few: bool  # whether query rows are the columns of the matmuls
    apart: bool  # whether different warps multiply keys and values
    loaders: int  # warps that copy keys
    registers: tuple[int, ...]  # of the warps after the first ones


class SelectedMemory(NamedTuple):
    """The contents of shared memory. Columns of latents and rotated ones are apart."""

    q_chunks: Any  # the latents of query rows, 64 columns at a time, as copies write them,
    q_latents: Any  # and as they are multiplied
    q_rotated: Any
    q_ring: Any
    latents: Any
    rotated: Any
    ring: Any  # of tiles
    seen: Any  # for each key of a tile: 1, or 0 if the token does not see it
    weights: Any  # of a tile of keys
    messages: Any  # Messages, if apart


@gluon.jit
def each_part(role: gl.constexpr, args, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """Call ``role(part, counts, args, batch, shared, SPEC, DIVISION, SHAPE)``, which returns the new counts, for each
    part that the program takes. Returns the last counts."""
    counts = Counts(0, 0, 0)
    each: gl.constexpr = (SHAPE.tiles + SHAPE.parts - 1) // SHAPE.parts
    for n in range(gl.program_id(0), batch.numbers.T * SPEC.K * SHAPE.parts, gl.num_programs(0)):
        unit, tile = n // SHAPE.parts, n % SHAPE.parts * each
        count = gl.minimum(each, SHAPE.tiles - tile)
        t, kh = unit // SPEC.K, unit % SPEC.K
        part = Part(n, 0, kh, 0, tile, t, 1, 0, 0, SHAPE.tiles, count, count)
        counts = role(part, counts, args, batch, shared, SPEC, DIVISION, SHAPE)
    return counts


@gluon.jit
def multiply_keys(part, counts, t, zero, shared, SHAPE: gl.constexpr):
    """The scores of the keys of a part's t-th tile and its unit's query rows."""
    at = counts.tiles + t
    place, query = ring.stage_of(shared.ring, at), ring.stage_of(shared.q_ring, counts.units)
    ring.wait_full(shared.ring, at)
    fence_async_shared()  # the copies of keys are ordinary stores; one fence, by those who wait for them, is enough
    rotated, latents = shared.rotated.index(place), shared.latents.index(place)
    q_rotated, q_latents = shared.q_rotated.index(query), shared.q_latents.index(query)
    if SHAPE.few:
        qk = warpgroup_mma(rotated, q_rotated.permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = warpgroup_mma(latents, q_latents.permute((1, 0)), qk, is_async=True)
    else:
        qk = warpgroup_mma(q_rotated, rotated.permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = warpgroup_mma(q_latents, latents.permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    if t == part.count - 1:
        ring.release(shared.q_ring, counts.units)
    return qk


@gluon.jit
def multiply_values(acc, p, at, shared, SHAPE: gl.constexpr):
    """``acc`` with the values of the at-th tile, multiplied by the weights ``p``."""
    latents = shared.latents.index(ring.stage_of(shared.ring, at))
    if SHAPE.few:
        shared.weights.permute((1, 0)).store(p.to(shared.weights.dtype))
        fence_async_shared()
        acc = warpgroup_mma(latents.permute((1, 0)), shared.weights.permute((1, 0)), acc, is_async=True)
    else:
        shared.weights.store(p.to(shared.weights.dtype))
        fence_async_shared()
        acc = warpgroup_mma(shared.weights, latents, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    ring.release_each(shared.ring, at)
    return acc


@gluon.jit
def own_totals(p, SHAPE: gl.constexpr):
    """The sums of the weights that a thread has of a row, so that they take few registers."""
    if SHAPE.few:
        return p
    else:
        return gl.sum(p.reshape([SHAPE.M, 2, SHAPE.N // 16, 8]), 2)


@gluon.jit
def add_totals(l, decay, p, SHAPE: gl.constexpr):
    """``l * decay`` plus the totals of the weights p."""
    if SHAPE.few:
        return l * decay[None, :] + p
    else:
        layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, l.type.layout))
        return l * gl.convert_layout(decay, layout)[:, None][:, :, None] + own_totals(p, SHAPE)


@gluon.jit
def attend_part(
    part, counts, args, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """The result of a part and its lse: a tile of keys at a time."""
    factor = args
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    AXIS: gl.constexpr = 0 if SHAPE.few else 1  # of the keys, and of the value columns
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1 + AXIS], [16, M if SHAPE.few else N // 2, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1 + AXIS], [16, M if SHAPE.few else LATENT // 2, 16])
    row_layout: gl.constexpr = gl.SliceLayout(AXIS, layout)
    zero = gl.full([N, M] if SHAPE.few else [M, N], 0.0, gl.float32, layout)
    acc = gl.full([LATENT, M] if SHAPE.few else [M, LATENT], 0.0, gl.float32, sums)
    m = gl.full([M], float("-inf"), gl.float32, row_layout)
    l = own_totals(zero, SHAPE)
    ring.wait_full(shared.q_ring, counts.units)
    for t in range(part.count):
        at = counts.tiles + t
        qk = multiply_keys(part, counts, t, zero, shared, SHAPE)
        seen = shared.seen.index(ring.stage_of(shared.ring, at)).load(gl.SliceLayout(1 - AXIS, layout))
        scores = gl.where(gl.expand_dims(seen != 0, 1 - AXIS), qk * factor, float("-inf"))
        largest = gl.max(scores, AXIS)
        # As in softmax_tile: a maximum that grows little stays in use.
        m_new = gl.where(largest > m + SLACK, largest, m)
        shift = roles.finite(m_new)
        p = gl.exp2(scores - gl.expand_dims(shift, AXIS))
        decay = gl.exp2(m - shift)
        m = m_new
        l = add_totals(l, decay, p, SHAPE)
        if SHAPE.few:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(AXIS, sums))[None, :]
        else:
            acc = scaled_if_raised(acc, rows_by_threads(decay, rows_layout(by_threads(acc).type.layout)), 8)
        acc = multiply_values(acc, p, at, shared, SHAPE)
    if SHAPE.few:
        l_ = gl.sum(l, 0)
    else:
        l_ = gl.convert_layout(gl.sum(gl.sum(l, 2), 1), row_layout)
    to: gl.constexpr = gl.SliceLayout(AXIS, sums)
    scale = gl.convert_layout(roles.normalizer(l_, 1.0), to)
    lse2 = gl.convert_layout(roles.lse2_of(m, l_), to)
    store_part((acc,), scale, lse2, part, gl.arange(0, M, to), batch.tensors, 0, SPEC, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.count, counts.messages)


@gluon.jit
def score_part(
    part, counts, args, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Send the weights of all tiles of a part and the factors of the accumulators; store lse."""
    factor = args
    messages = shared.messages
    sent = counts.messages
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    words: gl.constexpr = gl.BlockedLayout([N // 4], [32], [4], [0])
    zero = gl.full([M, N], 0.0, gl.float32, layout)
    four: gl.constexpr = rows_layout(by_threads(zero).type.layout)
    m = gl.full([M, 4], LEAST, gl.float32, four)
    l = gl.full([M, 4], 0.0, gl.float32, four)
    ring.wait_full(shared.q_ring, counts.units)
    for t in range(part.count):
        at = counts.tiles + t
        qk = multiply_keys(part, counts, t, zero, shared, SHAPE)
        seen = shared.seen.index(ring.stage_of(shared.ring, at))
        fours = reinterpret(seen, gl.int32, [N // 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        if gl.min(fours.load(words), 0) != 0x01010101:
            qk = gl.where((seen.load(gl.SliceLayout(0, layout)) != 0)[None, :], qk, float("-inf"))
        ring.release_each(shared.ring, at)
        p, m, totals, decay = softmax_tile(qk, m, factor, False)
        ring.wait_empty(messages.ring, sent)
        messages.weights.store(p.to(messages.weights.dtype))
        messages.factors.store(decay)
        ring.fill(messages.ring, sent)
        l = l * decay + totals
        sent += 1
    l_ = gl.convert_layout(gl.sum(l, 1), row_layout)
    m_ = gl.convert_layout(gl.max(m, 1), row_layout)
    ring.wait_empty(messages.ring, sent)
    messages.factors.store(rows_by_threads(roles.normalizer(l_, 1.0), four))
    ring.fill(messages.ring, sent)
    lse2, r = roles.lse2_of(m_, l_), gl.arange(0, M, row_layout)
    store_part((), None, lse2, part, r, batch.tensors, 0, SPEC, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.count, sent + 1)


@gluon.jit
def sum_part(
    part, counts, args, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Half of the value columns of a part's result, from column ``args[0]`` on."""
    FIRST: gl.constexpr = args[0]
    messages, received = shared.messages, counts.messages
    M: gl.constexpr = SHAPE.M
    # As in latent.py: a matmul with twice the columns would need more registers than ptxas allows it.
    WIDTH: gl.constexpr = SPEC.v_side.size // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    acc0 = gl.full([M, WIDTH], 0.0, gl.float32, layout)
    acc1 = acc0
    four: gl.constexpr = rows_layout(by_threads(acc0).type.layout)
    for t in range(part.count):
        at = counts.tiles + t
        ring.wait_full(messages.ring, received)  # who sends a tile's weights has waited for the tile
        factors = messages.factors.load(four)
        p = messages.weights.load(gl.DotOperandLayout(0, layout, 2))
        ring.release(messages.ring, received)
        received += 1
        acc0, acc1 = scaled_if_raised(acc0, factors), scaled_if_raised(acc1, factors)
        tile = shared.latents.index(ring.stage_of(shared.ring, at))
        acc0 = warpgroup_mma(p, tile.slice(FIRST, WIDTH, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(p, tile.slice(FIRST + WIDTH, WIDTH, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        if (t < part.count - 1) | (SHAPE.parts > 1):
            ring.release_each(shared.ring, at)
    ring.wait_full(messages.ring, received)
    factor = gl.convert_layout(gl.max(messages.factors.load(four), 1), row_layout)
    ring.release(messages.ring, received)
    acc0, acc1 = acc0 * factor[:, None], acc1 * factor[:, None]
    if SHAPE.parts > 1:
        r = gl.arange(0, M, row_layout)
        store_part((acc0, acc1), None, None, part, r, batch.tensors, FIRST, SPEC, SHAPE)
    else:  # by way of the last tile's place
        last = counts.tiles + part.count - 1
        place = shared.latents.index(ring.stage_of(shared.ring, last)).slice(FIRST, 2 * WIDTH, dim=1)
        roles.store_by_rows((acc0, acc1), place, part, batch.tensors.out, FIRST, SPEC, SHAPE)
        ring.release_each(shared.ring, last)
    return Counts(counts.units, counts.tiles + part.count, received + 1)


@gluon.jit
def store_part(acc, scale, lse2, part, r, tensors, FIRST: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Store value columns from FIRST on of a part's result, and its lse unless it is None: of a whole list as the
    output, else for the merge."""
    head = part.kh * SPEC.G + r
    live = (r < SPEC.G) & (head < SPEC.heads)
    if SHAPE.parts == 1:
        row = part.row_start.to(gl.int64) * SPEC.heads + head
        if SPEC.lse and lse2 is not None:
            gl.store(tensors.lse + row, lse2 * LN2, mask=live)
        roles.store_columns(tensors.out, row, live, acc, scale, FIRST, 1, SPEC)
    else:
        row = (part.program * 2 + (part.tile == part.first_tile).to(gl.int32)).to(gl.int64) * SHAPE.M + r
        if lse2 is not None:
            gl.store(tensors.part_lse + row, lse2, mask=live)
        roles.store_columns(tensors.parts, row, live, acc, scale, FIRST, 1, SPEC)


@gluon.jit(do_not_specialize=Numbers._fields)
def selected_hopper_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    q_desc, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    R: gl.constexpr = LATENT
    P: gl.constexpr = SPEC.rotated.size
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_chunks = gl.allocate_shared_memory(dtype, [SHAPE.units * (R // 64), M, 64], layout)
    q_latents = reinterpret(q_chunks, dtype, [SHAPE.units, M, R], layout)
    q_rotated = gl.allocate_shared_memory(dtype, [SHAPE.units, M, P], layout)
    q_ring = ring.ring_of(SHAPE.units, 1, 1)
    latents = gl.allocate_shared_memory(dtype, [SHAPE.stages, N, R], layout)
    rotated = gl.allocate_shared_memory(dtype, [SHAPE.stages, N, P], layout)
    # A tile is full when the copies of each thread have arrived, and what is seen of it is known.
    tiles = ring.ring_of(SHAPE.stages, SHAPE.loaders * 32 + 1, 384 if SHAPE.apart else 128 if SHAPE.few else 256)
    seen = gl.allocate_shared_memory(gl.int8, [SHAPE.stages, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights = gl.allocate_shared_memory(dtype, [M, N], layout)
    messages = None
    if SHAPE.apart:
        factors = gl.allocate_shared_memory(gl.float32, [M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        messages = roles.Messages(weights, factors, None, ring.ring_of(1, 1, 2))
    shared = SelectedMemory(q_chunks, q_latents, q_rotated, q_ring, latents, rotated, tiles, seen, weights, messages)
    ring.begin_kernel(PDL)
    batch = Batch(tensors, numbers, None)
    factor = numbers.scale * LOG2E
    ATTEND: gl.constexpr = attend_part
    SCORE: gl.constexpr = score_part
    SUM: gl.constexpr = sum_part
    LOAD: gl.constexpr = load_part
    if SHAPE.apart:
        gl.warp_specialize(
            [
                (each_part, (SCORE, factor, batch, shared, SPEC, DIVISION, SHAPE)),
                (each_part, (SUM, (0,), batch, shared, SPEC, DIVISION, SHAPE)),
                (each_part, (SUM, (R // 2,), batch, shared, SPEC, DIVISION, SHAPE)),
                (each_part, (LOAD, q_desc, batch, shared, SPEC, DIVISION, SHAPE)),
            ],
            [4, 4, SHAPE.loaders],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (each_part, (ATTEND, factor, batch, shared, SPEC, DIVISION, SHAPE)),
                (each_part, (LOAD, q_desc, batch, shared, SPEC, DIVISION, SHAPE)),
            ],
            [SHAPE.loaders],
            SHAPE.registers,
        )
