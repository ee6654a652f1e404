"""Prompts and decodes of one batch at the same time, on Hopper (sm_90) in Gluon.

Prompts wait for tensor cores, and decodes for memory. So each program, one per multiprocessor, computes both at a time:
two warpgroups multiply the prompts' items as in dense.py, and a third, the decoder, takes an equal contiguous
share of the key tiles of all decodes, whatever their lengths are, as split_kernel of decode.py does. Units
that shares divide leave parts, which merge_kernel of decode.py merges.

The decoder multiplies keys as rows, as latent_few.py does, one matmul after the other. With 8 query rows the sums of 64
columns take 4 registers of a thread. Keys and values pass through a ring of chunks of 64 keys by 64 columns. So it
needs few registers and little shared memory, and the consumers keep theirs. Three single warps load everything: the
scheduler takes items and copies their query rows, and one producer loads each kind of tiles.

Who fills a ring, and who releases its places: items, the scheduler, and both consumers and the items' producer; query
rows, the scheduler; tiles, the producer's copies, and both consumers; clean values, the first consumer; chunks, their
producer's copies, and the decoder.

Serves what dense.py does without ranges, with heads of 64 and 128, at most 8 query heads per key/value head.

Letters: as in dense.py. Bytes of a decode's key: 2 (D + Dv). FLOPs: 2 M (D + Dv) of a decode's key, 2 G (D + Dv) of
each pair of a prompt's token and key. Ideas: POD-Attention (Kamath et al. 2024, arXiv:2410.18038), FlashAttention-3
(Shah et al. 2024, arXiv:2407.08608), stream-K (Osama et al. 2023, arXiv:2301.03598).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.consumer import consumer, factor_of, zero_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import BLOCK_M, HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP
from paged_ops.lowerings.gpu.attention.hopper.latent_few import Steps, attend
from paged_ops.lowerings.gpu.attention.hopper.launch import PARTS, Described, HopperLaunch
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing, producer, rows_of, take_items
from paged_ops.lowerings.gpu.attention.hopper.work import Work, item_at, light_programs
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, add, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.gluon_names import load_box, reinterpret
from paged_ops.lowerings.gpu.launch import Choice, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Side, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

ROWS = 8  # packed query rows of a decode's unit
KEYS = 64  # of its tile
WIDTH = gl.constexpr(64)  # columns of a chunk
SLOTS = 2  # items that are published ahead
# Of a thread of the consumers and of the three single warps; the decoder has the rest, 64.
REGISTERS = (208, 208, 32, 32, 32)
COUNTERS = gl.constexpr(4)  # three of taken items (see Work), and one of programs that have finished
# Sequences. With fewer, decodes are too short; with more than 512, ptxas (of triton 3.6) overwrites the register that
# addresses global memory.
FEWEST, MOST = 16, 256
AT_ONCE = 64  # sequences that the scheduler's registers hold
MOST_ROWS = 16  # per sequence on average, for a batch that may be speculation only
SIZES = {64, 128}  # of heads: with wider ones registers spill, or shared memory holds no tile of decodes
MOST_PLACES = 16  # of chunks
# What its roles apply, by the names of spec.needs.
APPLIES = frozenset({"causal", "window", "chunk", "soft_cap", "sinks", "float16", "bfloat16"})


def serves(spec: Spec, target: Target) -> list[str]:
    sizes = spec.k_side.size, spec.v_side.size
    against = {
        f"num_heads: expected at most {ROWS} per key/value head, got {spec.G}": spec.G > ROWS,
        f"head sizes: expected {SIZES}, got {sizes}": not SIZES.issuperset(sizes),
    }
    return (
        not_applied(spec, APPLIES)
        + [reason for reason, holds in against.items() if holds]
        + dense.serves_sizes(spec, dense.served_sizes())
    )


def takes(tiles: tuning.Tiles, spec: Spec, target: Target, T: int, S: int) -> bool:
    """Whether a batch may have prompts with an item for each program, and decodes."""
    rows = T * spec.G
    enough = rows // BLOCK_M * spec.K >= target.processors and rows > MOST_ROWS * S
    return FEWEST <= S <= MOST and enough and not tiles.all_split


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
    if not takes(tiles, spec, target, shapes.T, shapes.S):
        return "too few tiles of prompts, or too few or too many sequences, to compute both at the same time"
    others = dense.plan(spec, target, shapes)
    if isinstance(others, str):
        return others
    division = tuning.by_warps(tuning.division(ROWS, shapes.S))._replace(long=dense.SHORT, long_rows=2 * ROWS)
    at_once = min(division.at_once, AT_ONCE)
    return division._replace(at_once=at_once, times=division.at_once * division.times // at_once), others


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    division, others = choice
    others = dense.build(others, spec, target, shapes)
    shape, P = shape_of(spec, target.shared_memory), target.processors
    decodes = decode_shape(spec, shape, target.shared_memory)
    constants = {
        "SPEC": dense.read_spec(spec),
        "DIVISION": division,
        "SHAPE": shape,
        "DECODES": decodes,
        "PROGRAMS": P,
        **target.overlap(),
        "num_warps": 4,
    }
    launcher = launcher_of(mixed_kernel, constants, target.device)
    described = [*filter(None, dense.descriptors(spec, shape.page)), *chunk_descriptors(spec, decodes.page)]
    launch = HopperLaunch(launcher, (P, 1, 1), (*PARTS, "arrived"), described, dense.rows_of(spec))
    tile = TileShape(ROWS, KEYS, 0, spec.v_side.size, 0, False)
    own = merge.with_merge((launch,), P, tile, spec, target, division)
    workspace = tuple(map(max, own.workspace, others.workspace))
    return Launches(own.launches, workspace, COUNTERS.value, others.launches)  # type: ignore[arg-type]


def shape_of(spec: Spec, shared_memory: int) -> HopperShape:
    """One tile of query rows and two of keys and values, which leave the space of the decoder's ring."""
    whole = dense.shape_of(spec, shared_memory)
    return whole._replace(stages=2, slots=SLOTS, row_slots=1, registers=REGISTERS, warps=1)


def decode_shape(spec: Spec, shape: HopperShape, shared_memory: int, weights: int = KEYS) -> HopperShape:
    """The tiles of decodes. A stage is a chunk: as many as shared memory holds next to prompts, a unit's query
    rows, and its weights of so many keys."""
    prompts = shape.M * shape.k.size + shape.stages * shape.N * (sum(shape.k.parts) + sum(shape.v.parts))
    space = (shared_memory - dense.OTHERS) // spec.dtype.itemsize - prompts - ROWS * (shape.k.size + weights)
    stages = min(space // (KEYS * WIDTH.value), MOST_PLACES)
    return shape._replace(M=ROWS, N=KEYS, page=min(shape.page, KEYS), stages=stages)


def chunk_descriptors(spec: Spec, page: int) -> list[Described]:
    """Of keys, and of values."""
    sides = ("key_cache", spec.k_side), ("value_cache", spec.v_side)
    return [(name, functools.partial(describe_chunks, side, spec, page)) for name, side in sides]


def describe_chunks(side: Side, spec: Spec, page: int, cache: Tensor) -> TensorDescriptor:
    """``[N, B, K, D]`` as rows: see dense.Matrix. One copy loads 64 columns of ``page`` tokens."""
    cache = cache.flatten(3)
    (N, _, K, D), matrix = cache.shape, dense.matrix_of(side, spec)
    shape = [(N - 1) * matrix.rows_n + (K - 1) * matrix.rows_head + spec.B, (K - 1) * matrix.columns_head + D]
    rows = cache.as_strided(shape, (side.b, 1))
    return TensorDescriptor(rows, shape, [side.b, 1], [page, WIDTH.value], gl.NVMMASharedLayout(128, 16, 2))


class DecodeMemory(NamedTuple):
    """The decoder's shared memory."""

    queries: Any  # chunks of a unit's query rows
    chunks: Any  # TileRing: of keys and values
    weights: Any  # of a tile of keys


@gluon.jit
def decode_memory(dtype: gl.constexpr, SHAPE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACES: gl.constexpr = SHAPE.stages
    queries = gl.allocate_shared_memory(dtype, [SHAPE.k.size // WIDTH, SHAPE.M, WIDTH], layout)
    pages = gl.allocate_shared_memory(dtype, [PLACES * (SHAPE.N // SHAPE.page), SHAPE.page, WIDTH], layout)
    tiles = reinterpret(pages, dtype, [PLACES, SHAPE.N, WIDTH], layout)
    weights = gl.allocate_shared_memory(dtype, [SHAPE.M, SHAPE.N], layout)
    return DecodeMemory(queries, TileRing(pages, tiles, ring.ring_of(PLACES, 1, 1)), weights)


@gluon.jit
def load_chunks(desc, ids, part, tile, at, chunks, COLUMNS: gl.constexpr, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to copy a tile of keys, or of values: chunks ``at`` and following."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    MATRIX: gl.constexpr = COLUMNS.matrix
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    j = (tile * SHAPE.N + lane % PAGES * SHAPE.page) % SPEC.B
    rows = rows_of(ids, part.kh, j, lane, PAGES, MATRIX, 1)
    for chunk in gl.static_range(COLUMNS.size // WIDTH):
        ring.wait_empty(chunks.ring, at + chunk)
        full = ring.full_of(chunks.ring, at + chunk)
        ring.expect(chunks.ring, at + chunk, SHAPE.N * WIDTH * 2)
        for page in gl.static_range(PAGES):
            to = chunks.pages.index(ring.stage_of(chunks.ring, at + chunk) * PAGES + page)
            load_box(desc, [rows[page], part.kh * MATRIX.columns_head + chunk * WIDTH], full, to)


@gluon.jit
def load_part(part, counts, descs, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tiles of a part, in order."""
    K_SHAPE: gl.constexpr = SHAPE.k
    V_SHAPE: gl.constexpr = SHAPE.v
    K_CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    CHUNKS: gl.constexpr = K_CHUNKS + SHAPE.v.size // WIDTH
    next_ids = roles.load_ids(part, part.tile, batch, SPEC, SHAPE)
    for t in range(part.seen):
        ids, tile, at = next_ids, part.tile + t, (counts.tiles + t) * CHUNKS
        next_ids = roles.load_ids(part, tile + 1, batch, SPEC, SHAPE)  # one tile ahead, to hide their latency
        load_chunks(descs[0], ids, part, tile, at, memory.chunks, K_SHAPE, SPEC, SHAPE)
        load_chunks(descs[1], ids, part, tile, at + K_CHUNKS, memory.chunks, V_SHAPE, SPEC, SHAPE)
    return Counts(counts.units + 1, counts.tiles + part.seen, counts.messages)


@gluon.jit
def take_queries(part, counts, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Copy a unit's query rows to where matmuls read them."""
    G: gl.constexpr = SPEC.G
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, SHAPE.M, gl.SliceLayout(1, layout))
    token = part.row_start + part.first_token + r // G
    row = token.to(gl.int64) * SPEC.query[0] + (part.kh * G + r % G) * SPEC.query[1]
    at = batch.tensors.query + row[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    live = (r // G < part.q_len - part.first_token)[:, None]
    for chunk in gl.static_range(CHUNKS):
        memory.queries.index(chunk).store(gl.load(at + chunk * WIDTH, mask=live, other=0.0))
    fence_async_shared()


@gluon.jit
def multiply_keys(part, counts, t, zero, memory, SHAPE: gl.constexpr):
    """The scores ``[N, M]`` of the keys of a part's t-th tile and its unit's query rows."""
    CHUNKS: gl.constexpr = SHAPE.k.size // WIDTH
    at, chunks, qk = (counts.tiles + t) * (CHUNKS + SHAPE.v.size // WIDTH), memory.chunks, zero
    for chunk in gl.static_range(CHUNKS):
        ring.wait_full(chunks.ring, at + chunk)
        rows = memory.queries.index(chunk).permute((1, 0))
        keys = chunks.tiles.index(ring.stage_of(chunks.ring, at + chunk))
        qk = warpgroup_mma(keys, rows, qk, use_acc=chunk > 0, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    for chunk in gl.static_range(CHUNKS):
        ring.release(chunks.ring, at + chunk)
    return qk


@gluon.jit
def multiply_values(acc, decay, tile, memory, SHAPE: gl.constexpr):
    """``acc``, a tuple of ``[64, M]``, with the values of a tile multiplied by the weights."""
    CHUNKS: gl.constexpr = SHAPE.v.size // WIDTH
    at, chunks = first_values(tile, SHAPE), memory.chunks
    made: gl.tuple = ()
    for chunk in gl.static_range(CHUNKS):
        ring.wait_full(chunks.ring, at + chunk)
        columns = chunks.tiles.index(ring.stage_of(chunks.ring, at + chunk)).permute((1, 0))
        sums = acc[chunk] * decay[None, :]
        made += (warpgroup_mma(columns, memory.weights.permute((1, 0)), sums, is_async=True),)
    if CHUNKS == 1:
        done = (warpgroup_mma_wait(0, deps=made),)
    else:
        done = warpgroup_mma_wait(0, deps=made)
    for chunk in gl.static_range(CHUNKS):
        ring.release(chunks.ring, at + chunk)
    return done


@gluon.jit
def first_values(tile, SHAPE: gl.constexpr):
    """The first chunk of values of a tile."""
    return tile * ((SHAPE.k.size + SHAPE.v.size) // WIDTH) + SHAPE.k.size // WIDTH


@gluon.jit
def zero_unseen(tile, begin, rows, memory, SHAPE: gl.constexpr):
    """Zero the values of the keys of a tile that no row sees; the first is key ``begin``."""
    PAGES: gl.constexpr = SHAPE.N // SHAPE.page
    at, chunks = first_values(tile, SHAPE), memory.chunks
    for chunk in range(SHAPE.v.size // WIDTH):
        ring.wait_full(chunks.ring, at + chunk)
        for page in range(PAGES):
            first = begin + page * SHAPE.page
            if (first < rows.oldest) | (first + SHAPE.page > rows.seq_len):
                values = chunks.pages.index(ring.stage_of(chunks.ring, at + chunk) * PAGES + page)
                zero_rows(values, first, rows.oldest, rows.seq_len)


@gluon.jit
def attend_part(part, counts, args, batch, memory, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    STEPS: gl.constexpr = Steps(take_queries, multiply_keys, zero_unseen, multiply_values)
    return attend(part, counts, args, batch, memory, STEPS, SHAPE.v.size // WIDTH, SPEC, SHAPE)


@gluon.jit
def tiles_of_prompts(s, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, TOKENS: gl.constexpr):
    """The number of tiles of query rows of sequences s, per head; 0 for the decoder's sequences."""
    live = s < batch.numbers.S
    starts = batch.tensors.query_start_loc + s
    q_len = gl.load(starts + 1, mask=live, other=0) - gl.load(starts, mask=live, other=0)
    seq_len = gl.load(batch.tensors.seq_lens + s, mask=live, other=0)
    many = q_len * SPEC.G > gl.where(seq_len > DIVISION.long, DIVISION.long_rows, DIVISION.rows)
    return gl.where(many, gl.cdiv(q_len, TOKENS), 0)


@gluon.jit
def sequence_of(query_tile, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, TOKENS: gl.constexpr):
    """The sequence of a tile of query rows, and the number of tiles before the sequence."""
    lanes: gl.constexpr = gl.BlockedLayout([DIVISION.at_once // 32], [32], [1], [0])
    s = 0
    before = 0
    total = 0
    TIMES: gl.constexpr = DIVISION.times
    for n in gl.static_range(TIMES):
        s_ = n * DIVISION.at_once + gl.arange(0, DIVISION.at_once, lanes)
        ends = total + gl.associative_scan(tiles_of_prompts(s_, batch, SPEC, DIVISION, TOKENS), 0, add)
        passed = (ends <= query_tile) & (s_ < batch.numbers.S)
        s += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        total = gl.max(ends, 0)
    return s, before


@gluon.jit
def prompt_item(at, work, batch, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """The at-th item of prompts; each has key tiles."""
    tensors = batch.tensors
    TOKENS: gl.constexpr = SHAPE.M // SPEC.G
    query_tile = work.tiles - 1 - at // SPEC.K  # later tiles see more keys, so they start first
    s, before = sequence_of(query_tile, batch, SPEC, DIVISION, TOKENS)
    first_token = (query_tile - before) * TOKENS
    row_start = gl.load(tensors.query_start_loc + s)
    q_len = gl.load(tensors.query_start_loc + s + 1) - row_start
    seq_len = gl.load(tensors.seq_lens + s)
    return item_at(at % SPEC.K, s, row_start, q_len, seq_len, first_token, True, batch, SPEC, SHAPE)


@gluon.jit
def scheduler(
    tiles, few, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    """Takes the prompts' items, ``tiles`` per head, and leaves the counters at zero."""
    counters = batch.tensors.arrived
    take_items(prompt_item, Work(tiles, few, PROGRAMS, counters, None), batch, shared, SPEC, DIVISION, SHAPE)
    if gl.atomic_add(counters + 3, 1) == PROGRAMS - 1:  # no program takes any more
        for counter in gl.static_range(COUNTERS):
            gl.store(counters + counter, 0)


@gluon.jit(do_not_specialize=Numbers._fields)
def mixed_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc, v_desc, k_chunk_desc, v_chunk_desc,
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, DECODES: gl.constexpr, PROGRAMS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    TIMES: gl.constexpr = DIVISION.times
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = Shared(*shared_memory(dtype, SPEC, SHAPE), None, ring.signal_of(1))  # type: ignore[call-arg]
    memory = decode_memory(dtype, DECODES)
    ring.begin_kernel(PDL)
    share = share_of(gl.program_id(0), PROGRAMS, batch, SPEC, DIVISION, DECODES)
    tiles = 0
    for n in gl.static_range(TIMES):
        s = n * DIVISION.at_once + gl.arange(0, DIVISION.at_once, lanes)
        tiles += gl.sum(tiles_of_prompts(s, batch, SPEC, DIVISION, SHAPE.M // SPEC.G), 0)
    # Sequences of a few more rows than a decode are memory-bound as well, if they fit one warpgroup.
    least: gl.constexpr = DECODES.M // SPEC.G
    few = light_programs(batch, DIVISION.long, PROGRAMS, SPEC.G, DIVISION, WARPGROUP, SHAPE.M, 4, least)
    ATTEND: gl.constexpr = attend_part
    LOAD: gl.constexpr = load_part
    gl.warp_specialize(
        [
            (walk, (ATTEND, factor_of(numbers, SPEC), batch, share, memory, SPEC, DIVISION, DECODES)),
            (consumer, (0, batch, shared, SPEC, SHAPE)),
            (consumer, (1, batch, shared, SPEC, SHAPE)),
            (scheduler, (tiles, few, batch, shared, SPEC, DIVISION, SHAPE, PROGRAMS)),
            (producer, (((k_desc,), (v_desc,)), batch, shared, SPEC, SHAPE)),
            (walk, (LOAD, (k_chunk_desc, v_chunk_desc), batch, share, memory, SPEC, DIVISION, DECODES)),
        ],
        [4, 4, 1, 1, 1],
        SHAPE.registers,
    )
