"""Latent attention on Hopper (sm_90) in Gluon: a tile of latents is loaded to shared memory once, and serves as keys
and as values.

One program per multiprocessor takes an equal contiguous share of the key tiles of all units, as split_kernel of
decode.py does: the device counts the tiles, so one captured graph is balanced for any lengths. merge_kernel merges the
parts of units that shares divide.

A producer warp loads query rows and latents by TMA. One warpgroup multiplies 64 query rows with the 64 keys of a tile
and computes the softmax. Two more warpgroups multiply its weights with one half of the value columns each, so that the
accumulators of 64 rows by 512 columns fit their registers. Meanwhile the first multiplies the next tile's keys. The two
halves of the latents and the rotated columns have separate rings. A unit's result, or a part of it, takes the place of
its last tile on its way to memory, in the output's dtype, so that a warp stores whole rows of a half.

If there are more heads than rows, the key tiles of one group of heads come first for all sequences (``heads_apart``):
neighbouring programs then take the same tiles for different groups, and all but one find them in the L2 cache. Units of
equal length are not divided, or into equal pieces, if that makes shares little longer (``aligned``).

Letters: R latent columns, which are keys and values, P rotated columns, which are keys only, G query heads per unit,
B tokens per block. A unit's 64 query rows are packed (row r is token ``r // G``, head ``r % G``).

Bytes of a key in bfloat16: 2 (R + P); FLOPs of a key and a query row: 2 (2 R + P). Ideas: multi-head latent attention
(DeepSeek-V2, arXiv:2405.04434), value columns shared by warpgroups (FlashMLA, deepseek-ai/FlashMLA), stream-K (Osama et
al. 2023, arXiv:2301.03598).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import apply_soft_cap, factor_of
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import tile_layout
from paged_ops.lowerings.gpu.attention.hopper.latent_roles import LatentShape, Messages
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, PARTS, Described, HopperLaunch
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing
from paged_ops.lowerings.gpu.attention.hopper.softmax import (
    LEAST,
    by_threads,
    rows_by_threads,
    rows_layout,
    scaled_if_raised,
    softmax_tile,
)
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import TRITON, Target

ROWS = 64  # packed query rows of a unit
KEYS = 64  # of a tile
START = 192  # the cost of beginning a unit, in keys
MOST_PIECES = 1 << 20  # of units of equal length: any number
LATENT, ROTATED = 512, 64  # columns
KEY_BYTES = gl.constexpr(2 * (LATENT + ROTATED))
HALF = gl.constexpr(LATENT // 2)
STAGES = 2  # tiles in shared memory: what fits next to the query rows
# Registers of the two warpgroups for values, and of the producer; the first warpgroup gets the rest. With fewer, ptxas
# serialises the matmuls (C7512): the kernel took up to 1.35 times as long with 168. Triton 3.9 needs more.
REGISTERS = (192, 192, 24) if TRITON >= (3, 9) else (176, 176, 24)

# What this kernel and latent_few.py apply, by the names of spec.needs.
APPLIES = frozenset({"latent", "causal", "window", "chunk", "soft_cap", "sinks", "float16", "bfloat16"})


def serves(spec: Spec, target: Target) -> list[str]:
    return refusals(spec, APPLIES, [spec.dtype], str(spec.dtype), 8)


def refusals(
    spec: Spec, applied: frozenset[str], stored: Sequence[torch.dtype], expected: str, group: int
) -> list[str]:
    """The reasons against a kernel for latents of these dtypes that loads ``group`` rows of the cache at once."""
    if spec.rotated is None:
        return ["kv_cache: not latent"]
    side, sizes, dtype = spec.v_side, (spec.v_side.size, spec.rotated.size), spec.storage.dtype
    against = {
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected {expected}, got {dtype}": dtype not in stored,
        f"head sizes: expected {LATENT} and {ROTATED}, got {sizes}": sizes != (LATENT, ROTATED),
        "kv_cache: expected rows that TMA can address": side.d != 1
        or bool(spec.B % 8 or side.b * dtype.itemsize % 16 or side.n % (group * side.b)),
    }
    return not_applied(spec, applied) + [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel cannot serve it."""
    return plan_of(ROWS, spec, target, shapes)


def plan_of(rows: int, spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice of a kernel whose units have ``rows`` packed query rows. A launch describes the rows of its queries,
    so each number of tokens has its own."""
    side, K = spec.v_side, packed(spec, rows).K
    cache_rows = (shapes.N - 1) * (side.n // side.b) + spec.B
    # The softmax takes the maximum before scaling.
    if not (shapes.numbers.scale > 0 and shapes.columns and shapes.aligned and 0 < cache_rows < 1 << 31):
        return NOT_TMA
    apart = K > 1 and target.processors % K == 0
    # Where programs may begin several units, shares count the cost.
    start = START // KEYS if 4 * shapes.S * K >= target.processors else 0
    division = tuning.division(rows, shapes.S, everyone=True)
    return shapes.T, division._replace(heads_apart=apart, aligned=MOST_PIECES, start=start)


def packed(spec: Spec, rows: int) -> Spec:
    """The spec with groups of at most ``rows`` query heads as key/value heads; query rows are contiguous."""
    H, D = spec.heads, LATENT + ROTATED
    G = min(H, rows)
    return spec._replace(K=-(-H // G), G=G, query=(H * D, D, 1))


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    widths = ROTATED, LATENT // 2
    rows = [functools.partial(describe_rows, ROWS, width) for width in widths]
    bytes_of_key = 2 * ROTATED, LATENT, LATENT
    shape = LatentShape(ROWS, KEYS, page_of(spec), STAGES, 1, bytes_of_key, REGISTERS, group=8, rows_last=True)
    groups = [functools.partial(dense.describe, spec.v_side, spec, shape.page, width) for width in widths]
    return build_of(latent_hopper_kernel, shape, rows, groups, choice, spec, target, rounded=True)


def build_of(
    kernel: Any, shape: LatentShape, rows: list[Any], cache: list[Any], choice: Choice, spec: Spec, target: Target,
    takes: tuple[str, ...] = (), rounded: bool = False,
) -> Launches:  # fmt: skip
    """The launches of a kernel with these descriptors of query rows and of the cache. ``rounded``: of parts, as in
    TileShape."""
    _, division = choice
    spec, P = packed(spec, shape.M), target.processors
    constants = {"SPEC": spec, "DIVISION": division, "SHAPE": shape, **target.overlap(), "num_warps": 4}
    described: list[Described] = [*(("query", each) for each in rows), *(("key_cache", each) for each in cache)]
    launcher = launcher_of(kernel, constants, target.device)
    launch = HopperLaunch(launcher, (P, 1, 1), (*PARTS, *takes), described)
    merged = TileShape(shape.M, KEYS, 0, spec.v_side.size, 0, False, rounded=rounded)
    return merge.with_merge((launch,), P, merged, spec, target, division)


def page_of(spec: Spec) -> int:
    """Keys per TMA load."""
    return min(spec.B & -spec.B, KEYS)


def describe_rows(rows: int, width: int, query: Tensor) -> TensorDescriptor:
    """``[T, H, R + P]``, contiguous: one copy loads some columns of a unit's rows."""
    T, H, D = query.shape
    return TensorDescriptor(query, [T * H, D], [D, 1], [rows, width], gl.NVMMASharedLayout(128, 16, 2))


class LatentMemory(NamedTuple):
    """The contents of shared memory. Tuples are of the rotated columns, and of the two halves of the latents."""

    queries: Any
    q_ring: Any
    tiles: Any  # TileRing
    messages: Any


@gluon.jit
def load_rows(descs, part, n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the query rows of the program's n-th unit."""
    ring.wait_empty(shared.q_ring, n)
    ring.expect(shared.q_ring, n, SHAPE.M * KEY_BYTES)
    for c in gl.static_range(3):
        place = [roles.query_row(part, SPEC), (c + 2) % 3 * HALF]
        load_box(descs[(c + 1) // 2], place, ring.full_of(shared.q_ring, n), shared.queries[c])


@gluon.jit
def load_page(descs, row, at, page: gl.constexpr, c: gl.constexpr, shared, SHAPE: gl.constexpr):
    """Begin to load some columns of a page of the at-th tile."""
    to = shared.tiles[c]
    place = to.pages.index(ring.stage_of(to.ring, at) * (SHAPE.N // SHAPE.page) + page)
    load_box(descs[2 + (c + 1) // 2], [row, 0, 0, (c + 2) % 3 * HALF], ring.full_of(to.ring, at), place)


@gluon.jit
def multiply_keys(at, shared, zero):
    """The scores of the at-th tile."""
    qk = zero
    for c in gl.static_range(3):
        tiles = shared.tiles[c]
        ring.wait_full(tiles.ring, at)
        keys = tiles.tiles.index(ring.stage_of(tiles.ring, at)).permute((1, 0))
        qk = warpgroup_mma(shared.queries[c], keys, qk, use_acc=c > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[qk])


@gluon.jit
def send_weights(qk, m, l, rows, tile, at, sent, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Send the weights of a tile. Returns the maxima and the totals."""
    N: gl.constexpr = SHAPE.N
    begin = tile * N
    if SPEC.logits.soft_cap:
        qk = apply_soft_cap(qk, rows.cap)
    if roles.is_masked(rows, tile, SPEC):
        qk = gl.where(roles.keep(qk, rows, begin, 1, SPEC), qk, float("-inf"))
        if roles.has_unseen(rows, begin, N):
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
            for half in gl.static_range(1, 3):
                latents = shared.tiles[half].tiles.index(ring.stage_of(shared.tiles[half].ring, at))
                for key in gl.static_range(0, N, 8):
                    roles.zero_unseen(latents.slice(key, 8, dim=0), begin + key, rows, layout)
            fence_async_shared()  # only here: it takes hundreds of clocks, and threads read the weights themselves
    p, m, totals, decay = softmax_tile(qk, m, rows.factor, False)
    ring.wait_empty(shared.messages.ring, sent)
    shared.messages.weights.store(p.to(shared.messages.weights.dtype))
    shared.messages.factors.store(decay)
    ring.fill(shared.messages.ring, sent)
    return m, l * decay + totals


@gluon.jit
def score_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Send the weights of all tiles of a part and the factors of the accumulators; store lse."""
    n, total, sent = counts
    factor, cap = args
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, M, row_layout)
    rows = roles.rows_of(part, r, factor, cap, batch.numbers, SPEC, SHAPE)
    zero = gl.full([M, N], 0.0, gl.float32, layout)
    four: gl.constexpr = rows_layout(by_threads(zero).type.layout)
    m = gl.full([M, 4], LEAST, gl.float32, four)
    l = gl.full([M, 4], 0.0, gl.float32, four)
    ring.wait_full(shared.q_ring, n)
    for t in range(part.seen):
        qk = multiply_keys(total + t, shared, zero)
        ring.release_each(shared.tiles[0].ring, total + t)
        if t == part.seen - 1:
            ring.release(shared.q_ring, n)
        m, l = send_weights(qk, m, l, rows, part.tile + t, total + t, sent, shared, SPEC, SHAPE)
        sent += 1
    l_ = gl.convert_layout(gl.sum(l, 1), row_layout)
    m_ = gl.convert_layout(gl.max(m, 1), row_layout)
    m_, l_, decay = roles.add_sink(m_, l_, part, r, batch.tensors, SPEC)
    ring.wait_empty(shared.messages.ring, sent)
    shared.messages.factors.store(rows_by_threads(roles.normalizer(l_, decay), four))
    ring.fill(shared.messages.ring, sent)
    roles.store_part((), None, roles.lse2_of(m_, l_), part, r, batch.tensors, 0, 1, SPEC, SHAPE)
    return Counts(n + 1, total + part.seen, sent + 1)


@gluon.jit
def sum_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Half of the value columns of a part's result, ``args``: which half, and its tiles."""
    total, received = counts.tiles, counts.messages
    FIRST: gl.constexpr = args[0]
    latents = args[1]
    messages = shared.messages
    M: gl.constexpr = SHAPE.M
    # A matmul with twice the columns would need more registers than ptxas allows it.
    WIDTH: gl.constexpr = SPEC.v_side.size // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    acc0 = gl.full([M, WIDTH], 0.0, gl.float32, layout)
    acc1 = acc0
    four: gl.constexpr = rows_layout(by_threads(acc0).type.layout)
    for t in range(part.seen):
        ring.wait_full(latents.ring, total + t)
        ring.wait_full(messages.ring, received)
        factors = messages.factors.load(four)
        p = messages.weights.load(gl.DotOperandLayout(0, layout, 2))
        ring.release(messages.ring, received)
        received += 1
        acc0, acc1 = scaled_if_raised(acc0, factors), scaled_if_raised(acc1, factors)
        tile = latents.tiles.index(ring.stage_of(latents.ring, total + t))
        acc0 = warpgroup_mma(p, tile.slice(0, WIDTH, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(p, tile.slice(WIDTH, WIDTH, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        if t < part.seen - 1:
            ring.release_each(latents.ring, total + t)
    ring.wait_full(messages.ring, received)
    factor = gl.convert_layout(gl.max(messages.factors.load(four), 1), row_layout)
    ring.release(messages.ring, received)
    last = total + part.seen - 1
    place = latents.tiles.index(ring.stage_of(latents.ring, last))
    values = roles.by_rows((acc0 * factor[:, None], acc1 * factor[:, None]), place)
    ring.release_each(latents.ring, last)
    roles.store_rows(values, part, batch.tensors, FIRST, SPEC, SHAPE)
    return Counts(counts.units, total + part.seen, received + 1)


@gluon.jit
def tiles_of(dtype: gl.constexpr, WIDTH: gl.constexpr, SHAPE: gl.constexpr):
    """A ring of some columns of tiles, in groups of 8 rows by 64 columns."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    shape: gl.constexpr = [SHAPE.stages * PAGES, SHAPE.page // 8, WIDTH // 64, 8, 64]
    pages = gl.allocate_shared_memory(dtype, shape, gl.NVMMASharedLayout(128, 16, 4))
    tiles = reinterpret(pages, dtype, [SHAPE.stages, SHAPE.N, WIDTH], tile_layout(SHAPE.N, WIDTH))
    return TileRing(pages, tiles, ring.ring_of(SHAPE.stages, PAGES, 128))


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_hopper_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    q_rotated_desc, q_latent_desc, rotated_desc, latent_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    row_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(dtype, [M, HALF], row_layout)
    q_right = gl.allocate_shared_memory(dtype, [M, HALF], row_layout)
    q_rotated = gl.allocate_shared_memory(dtype, [M, SPEC.rotated.size], row_layout)
    weights = gl.allocate_shared_memory(dtype, [M, SHAPE.N], row_layout)
    factors = gl.allocate_shared_memory(gl.float32, [M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    left, right = tiles_of(dtype, HALF, SHAPE), tiles_of(dtype, HALF, SHAPE)
    tiles = tiles_of(dtype, SPEC.rotated.size, SHAPE), left, right
    messages = Messages(weights, factors, None, ring.ring_of(1, 1, 2))
    shared = LatentMemory((q_rotated, q_left, q_right), ring.ring_of(1, 1, 1), tiles, messages)
    ring.begin_kernel(PDL)
    batch = Batch(tensors, numbers, None)
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    descs = (q_rotated_desc, q_latent_desc, rotated_desc, latent_desc)
    rings = (tiles[0].ring, left.ring, right.ring)
    SCORE: gl.constexpr = score_part
    SUM: gl.constexpr = sum_part
    LOAD: gl.constexpr = roles.load_part
    ROWS_OF_UNIT: gl.constexpr = load_rows
    PAGE: gl.constexpr = load_page
    gl.warp_specialize(
        [
            (walk, (SCORE, factor_of(numbers, SPEC), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (SUM, (0, left), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (SUM, (HALF, right), batch, share, shared, SPEC, DIVISION, SHAPE)),
            (walk, (LOAD, (ROWS_OF_UNIT, PAGE, rings, descs), batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [4, 4, 1],
        SHAPE.registers,
    )
