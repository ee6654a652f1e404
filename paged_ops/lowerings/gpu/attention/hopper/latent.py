"""Latent attention on Hopper (sm_90) in Gluon: a tile of latents is brought to shared memory once, and serves as keys
and as values.

One program per multiprocessor takes an equal contiguous share of the key tiles of all units, as split_kernel of
decode.py does: the device counts the tiles, so one captured graph is balanced for any lengths. Parts of units that
shares divide are merged by merge_kernel of decode.py.

A producer warp brings query rows and latents to shared memory by TMA. A first warpgroup multiplies 64 query rows with
the 64 keys of a tile and computes their weights. Two more warpgroups multiply the weights with one half of the value
columns each, so that the sums of 64 rows by 512 columns fit their registers. While they do, the first multiplies the
next tile's keys. Parts of a tile have places of their own, each of which is filled again as soon as it is free.

If there are more heads than rows, the tiles of a group of heads of all sequences stand together (``heads_apart``), and
programs side by side take the same tiles of different groups, so that all but one find them in the L2 cache. Units that
are all equally long stay whole if that makes shares little longer (``aligned``).

Letters: R latent columns, which are keys and values, P rotated columns, which are keys only, G query heads per unit,
B tokens per block. A unit's 64 query rows are packed (row r is token ``r // G``, head ``r % G``).

Bytes of a key in bfloat16: 2 (R + P); FLOPs of a key and a query row: 2 (2 R + P). Ideas: multi-head latent attention
(DeepSeek-V2, arXiv:2405.04434), value columns shared by warpgroups (FlashMLA, deepseek-ai/FlashMLA), stream-K (Osama et
al. 2023, arXiv:2301.03598).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import tile_layout
from paged_ops.lowerings.gpu.attention.hopper.latent_consumer import scores, values
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, moved
from paged_ops.lowerings.gpu.attention.hopper.ring import barriers
from paged_ops.lowerings.gpu.attention.hopper.work_shares import part_after, part_of, share_of
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launch, Launcher, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Pointers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import TRITON, Target

ROWS = 64  # packed query rows of a unit
KEYS = 64  # of a tile
LATENT, ROTATED = 512, 64  # columns
STAGES = 2  # tiles: as many as shared memory holds beside the query rows
# Registers of the warpgroups for values, and of the producer; the scores get the rest. With less, ptxas runs one matrix
# instruction after another (C7512): the whole kernel took up to 1.35 times as long with 168. Triton 3.9's wants more.
REGISTERS = (192, 192, 24) if TRITON >= (3, 9) else (176, 176, 24)

# What its roles, and those of latent_hopper_columns.py, apply, by the names of spec.needs.
APPLIES = frozenset({"latent", "causal", "window", "chunk", "soft_cap", "sinks", "float16", "bfloat16"})


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    if spec.rotated is None:
        return ["kv_cache: not latent"]
    side, sizes = spec.v_side, (spec.v_side.size, spec.rotated.size)
    against = {
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected {spec.dtype}, got {spec.storage.dtype}": spec.storage.dtype != spec.dtype,
        f"head sizes: expected {LATENT} and {ROTATED}, got {sizes}": sizes != (LATENT, ROTATED),
        "kv_cache: expected rows that TMA can address": side.d != 1
        or bool(spec.B % 8 or side.b % 8 or side.n % (8 * side.b)),
    }
    return not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if this kernel cannot serve it. A launch describes the rows of its queries, so
    each number of tokens has its own."""
    if not has_form(spec, shapes):
        return NOT_TMA
    return shapes.T, tuning.division(ROWS, shapes.S, everyone=True)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    _, division = choice
    side, R = spec.v_side, spec.v_side.size
    spec = packed(spec, ROWS)
    page, P = min(spec.B & -spec.B, KEYS), target.processors
    apart = spec.K > 1 and P % spec.K == 0
    division = division._replace(heads_apart=apart, aligned=True)
    constants = {
        "SPEC": spec,
        "DIVISION": division,
        "SHAPE": LatentShape(ROWS, KEYS, page, STAGES, side.n // side.b, REGISTERS),
        **target.overlap(),
        "num_warps": 4,
    }
    launcher = launcher_of(latent_hopper_kernel, constants, target.device)
    launch = LatentLaunch(launcher, (P, 1, 1), spec, shapes.N, page, ROWS)
    return decode.with_merge((launch,), P, TileShape(ROWS, KEYS, 0, R, 0, False), spec, target, division)


def has_form(spec: Spec, shapes: Shapes) -> bool:
    """Whether TMA can bring the tiles of these shapes, and the maximum can be taken before scaling."""
    side = spec.v_side
    rows = (shapes.N - 1) * (side.n // side.b) + spec.B
    return bool(shapes.numbers.scale > 0 and shapes.columns and shapes.aligned and 0 < rows < 1 << 31)


def packed(spec: Spec, rows: int) -> Spec:
    """The spec with groups of query heads, of at most ``rows`` each, as key/value heads; query rows side by side."""
    H, D = spec.heads, LATENT + ROTATED
    G = min(H, rows)
    return spec._replace(K=-(-H // G), G=G, query=(H * D, D, 1))


QUERY, CACHE = map(Pointers._fields.index, ("query", "key_cache"))
# The pointers that the kernel does not get.
NOT_TAKEN = ("taken", "arrived", "key_cache", "value_cache", "alibi_slopes", "k_scale", "v_scale", "output_scale")


class LatentLaunch(Launch):
    """Adds to :class:`Launch` the descriptors of the query rows and of the cache. Query rows are copied if they do not
    lie side by side, at multiples of 16 bytes."""

    __slots__ = ("_N", "_described", "_page", "_rows", "_spec")
    described: tuple[int, ...] = (QUERY, QUERY, CACHE, CACHE)  # what the descriptors describe

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int, int], spec: Spec, N: int, page: int, rows: int
    ) -> None:
        super().__init__(launcher, grid, NOT_TAKEN)
        self._spec, self._N, self._page, self._rows = spec, N, page, rows
        self._described: tuple[dict[str, Any], ...] = ()  # descriptors, after the first call

    def more(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        if not self._described or addresses[QUERY] & 15:
            return None
        return tuple(map(moved, self._described, (addresses[each] for each in self.described)))

    def __call__(self, tensors: Pointers, numbers: Numbers, addresses: tuple[int, ...]) -> None:
        query = tensors.query
        whole = query.is_contiguous()
        if not whole or addresses[QUERY] & 15:
            query = query.clone(memory_format=torch.contiguous_format)
        descriptors = (*self._describe_rows(query), *self._describe(tensors.key_cache))
        if whole:  # a base would keep the tensor alive
            self._described = tuple({**vars(each), "base": None} for each in descriptors)
        taken = self._taken(tensors._replace(query=query))
        addresses = (*addresses[:QUERY], query.data_ptr(), *addresses[QUERY + 1 :])
        self._launcher(self.grid(numbers), taken, numbers, *descriptors, addresses=addresses)

    def _describe_rows(self, query: Tensor) -> Iterator[TensorDescriptor]:
        """Halves of the latent columns, and the rotated columns, of a contiguous ``[T, H, R + P]``. One copy brings a
        unit's rows."""
        T, H, D = query.shape
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        for width in (LATENT // 2, ROTATED):
            yield TensorDescriptor(query, [T * H, D], [D, 1], [self._rows, width], layout)

    def _describe(self, cache: Tensor) -> Iterator[TensorDescriptor]:
        """Halves of the latents, and the rotated columns, of ``[N, B, ...]`` in groups of 8 rows by 64 columns. One
        copy brings a page."""
        side, B = self._spec.v_side, self._spec.B
        shape = [((self._N - 1) * (side.n // side.b) + B) // 8, (LATENT + ROTATED) // 64, 8, 64]
        groups = cache.as_strided(shape, (8 * side.b, 64, side.b, 1))
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        for width in (LATENT // 2, ROTATED):
            box = [self._page // 8, width // 64, 8, 64]
            yield TensorDescriptor(groups, shape, list(groups.stride()), box, layout)


class LatentShape(NamedTuple):
    """The tile, and how it is brought."""

    M: int
    N: int
    page: int  # keys that one copy brings
    stages: int
    rows_n: int  # rows of the cache between blocks
    registers: tuple[int, ...]  # of the warpgroups after the first, and of the producer


class Shared(NamedTuple):
    """The contents of shared memory, and barriers that say that something has arrived, and that its place is free."""

    q_left: Any  # query rows: the columns for the first half of the latents,
    q_right: Any  # for the second half,
    q_rotated: Any  # and the rotated ones
    q_full: Any
    q_empty: Any
    left_pages: Any  # the first half of the latents, as the producer brings them
    left_tiles: Any  # the same, as they are multiplied
    right_pages: Any
    right_tiles: Any
    rotated_pages: Any
    rotated_tiles: Any
    left_full: Any
    right_full: Any
    rotated_full: Any
    left_empty: Any
    right_empty: Any
    rotated_empty: Any
    weights: Any  # of a tile of keys
    factors: Any  # of the sums so far
    changed: Any  # for each warp, whether a factor of its rows is not 1
    weighed: Any  # barriers: weights, factors and flags are there; both warpgroups have taken them
    taken: Any


@gluon.jit
def bring(
    desc, column: gl.constexpr, pages, full, empty, at, first, begin, seq_len, WIDTH: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Columns of the at-th tile that the program takes; lane n of ``first`` has the first row of its n-th page."""
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = SHAPE.N // PAGE
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    stage = at % SHAPE.stages
    mbarrier.wait(empty.index(stage), ((at // SHAPE.stages) & 1) ^ 1)
    for page in gl.static_range(PAGES):
        row = gl.sum(gl.where(lane == page, first, 0), 0) // 8
        if begin + page * PAGE < seq_len:
            mbarrier.expect(full.index(stage), PAGE * WIDTH * 2)
            load_box(desc, [row, column // 64, 0, 0], full.index(stage), pages.index(stage * PAGES + page))
        else:
            mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def producer(
    descriptors, batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Brings the tiles of the share, and each unit's query rows."""
    q_latent_desc, q_rotated_desc, latent_desc, rotated_desc = descriptors
    B: gl.constexpr = SPEC.B
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    PAGES: gl.constexpr = N // PAGE
    R: gl.constexpr = SPEC.v_side.size
    P: gl.constexpr = SPEC.rotated.size
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    left, s, kh, first_token, tile = share
    n = 0
    total = 0
    while left > 0:
        row_start, q_len, seq_len, _first_tile, _end_tile, count, seen = part_of(
            s, first_token, tile, left, batch, SPEC, DIVISION, SHAPE
        )
        left -= count
        if q_len > 0:
            block_table = batch.tensors.block_tables + s.to(gl.int64) * batch.numbers.table_stride
            j = tile * N + lane % PAGES * PAGE
            ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
            for t in range(seen):
                at = total + t
                begin = (tile + t) * N
                first = ids * SHAPE.rows_n + (begin + lane % PAGES * PAGE) % B
                j = begin + N + lane % PAGES * PAGE  # of the next tile, ahead of time
                ids = gl.load(block_table + j // B * SPEC.table, mask=j < seq_len, other=0)
                bring(
                    rotated_desc, R, shared.rotated_pages, shared.rotated_full, shared.rotated_empty, at, first, begin,
                    seq_len, P, SHAPE,
                )  # fmt: skip
                bring(
                    latent_desc, 0, shared.left_pages, shared.left_full, shared.left_empty, at, first, begin, seq_len,
                    R // 2, SHAPE,
                )  # fmt: skip
                bring(
                    latent_desc, R // 2, shared.right_pages, shared.right_full, shared.right_empty, at, first, begin,
                    seq_len, R // 2, SHAPE,
                )  # fmt: skip
                if t == 0:
                    mbarrier.wait(shared.q_empty.index(0), (n & 1) ^ 1)
                    mbarrier.expect(shared.q_full.index(0), SHAPE.M * (R + P) * 2)
                    row = (row_start + first_token) * SPEC.heads + kh * SPEC.G
                    load_box(q_latent_desc, [row, 0], shared.q_full.index(0), shared.q_left)
                    load_box(q_latent_desc, [row, R // 2], shared.q_full.index(0), shared.q_right)
                    load_box(q_rotated_desc, [row, R], shared.q_full.index(0), shared.q_rotated)
            total += seen
            n += 1
        s, kh, first_token, tile = part_after(s, kh, first_token, tile, q_len, left, batch, SPEC, DIVISION, SHAPE)


@gluon.jit
def left_values(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    values(0, shared.left_tiles, shared.left_full, shared.left_empty, batch, share, shared, SPEC, DIVISION, SHAPE)


@gluon.jit
def right_values(batch, share, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    values(1, shared.right_tiles, shared.right_full, shared.right_empty, batch, share, shared, SPEC, DIVISION, SHAPE)


@gluon.jit(do_not_specialize=Numbers._fields)
def latent_hopper_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    q_latent_desc, q_rotated_desc, latent_desc, rotated_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    M: gl.constexpr = SHAPE.M
    N: gl.constexpr = SHAPE.N
    PAGE: gl.constexpr = SHAPE.page
    STAGES: gl.constexpr = SHAPE.stages
    HALF: gl.constexpr = SPEC.v_side.size // 2
    P: gl.constexpr = SPEC.rotated.size
    PAGES: gl.constexpr = N // PAGE
    row_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    page_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [M, HALF], row_layout)
    q_right = gl.allocate_shared_memory(dtype, [M, HALF], row_layout)
    q_rotated = gl.allocate_shared_memory(dtype, [M, P], row_layout)
    left_pages = gl.allocate_shared_memory(dtype, [STAGES * PAGES, PAGE // 8, HALF // 64, 8, 64], page_layout)
    right_pages = gl.allocate_shared_memory(dtype, [STAGES * PAGES, PAGE // 8, HALF // 64, 8, 64], page_layout)
    rotated_pages = gl.allocate_shared_memory(dtype, [STAGES * PAGES, PAGE // 8, 1, 8, 64], page_layout)
    left_tiles = reinterpret(left_pages, dtype, [STAGES, N, HALF], tile_layout(N, HALF))
    right_tiles = reinterpret(right_pages, dtype, [STAGES, N, HALF], tile_layout(N, HALF))
    rotated_tiles = reinterpret(rotated_pages, dtype, [STAGES, N, P], tile_layout(N, P))
    weights = gl.allocate_shared_memory(dtype, [M, N], row_layout)
    factors = gl.allocate_shared_memory(gl.float32, [M], vector)
    changed = gl.allocate_shared_memory(gl.int32, [4], vector)
    shared = Shared(
        q_left, q_right, q_rotated, barriers(1, 1), barriers(1, 1), left_pages, left_tiles, right_pages, right_tiles,
        rotated_pages, rotated_tiles, barriers(STAGES, PAGES), barriers(STAGES, PAGES), barriers(STAGES, PAGES),
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1),
        weights, factors, changed, barriers(1, 1), barriers(1, 2),
    )  # fmt: skip
    fence_async_shared()
    batch = Batch(tensors, numbers, None)
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    descriptors = (q_latent_desc, q_rotated_desc, latent_desc, rotated_desc)
    gl.warp_specialize(
        [
            (scores, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (left_values, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (right_values, (batch, share, shared, SPEC, DIVISION, SHAPE)),
            (producer, (descriptors, batch, share, shared, SPEC, DIVISION, SHAPE)),
        ],
        [4, 4, 1],
        SHAPE.registers,
    )
