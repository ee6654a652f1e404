"""Decode of one sequence on Hopper (sm_90) in Gluon: thread block clusters merge in each other's shared memory, so a
short sequence needs one launch, no workspace, and two waits for memory after its lengths.

A unit (a key/value head) has one cluster of C programs or several. Program g of a unit takes every C-th tile of keys
from tile g on, so its first block ids are loaded before the length is known. Each warp multiplies 16 keys by all query
rows, then its quarter of the value columns by all weights (``mma.sync``; keys, or columns of values, are the rows of
matmuls, and query rows the columns). A program sends each slice of its result to the program of the cluster that
merges this slice. If a unit has several clusters, a short sequence is served by the first; of a long one the last
cluster that is done merges the results of all.

Letters: as in dense.py; W warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import exchange
from paged_ops.lowerings.gpu.attention.hopper.consumer import LN2, LOG2E
from paged_ops.lowerings.gpu.attention.hopper.softmax import LEAST
from paged_ops.lowerings.gpu.attention.shared.masks import keep_seen, key_tiles, keys_of_rows
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.gluon_names import barrier, load_async
from paged_ops.lowerings.gpu.launch import Choice, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import OPTIONAL, SLICE, Numbers, Shapes, Spec, TileShape, can_slice, not_applied
from paged_ops.lowerings.gpu.target import Target

ROWS = gl.constexpr(8)  # packed query rows of a unit, at most: the columns of a matrix instruction
PIECE = gl.constexpr(SLICE)  # keys of a warp, which lie in one block
WARPS = 4
STAGES = 3  # tiles in shared memory, of a program that may have several
PROGRAMS = 128  # of all units
# Of a program, for the longest sequence that block tables have columns for: with more, split_kernel reads faster.
MOST_TILES = 4
LARGEST_CLUSTER = 16
MOST_HEADS = 32
ALONE = 2  # tiles of each program of the first cluster of a unit, before others help
SIZES = (128,)  # as all that follows: what was run on a GPU
APPLIES = frozenset({"causal", "bfloat16"})
UNUSED = ("taken", *OPTIONAL)


class Clusters(NamedTuple):
    """How programs divide a unit."""

    programs: int  # of a cluster
    number: int  # of clusters of a unit
    rows: int  # packed query rows, a power of two
    alone: int  # tiles of each program of the first cluster, before others help
    ahead: bool  # whether block tables have a column for the first tile of each program of a cluster


def serves(spec: Spec, target: Target) -> list[str]:
    key, value = spec.k_side, spec.v_side
    against = {
        f"head sizes: expected equal ones of {SIZES}, got {key.size}, {value.size}": key.size != value.size
        or key.size not in SIZES,
        f"num_kv_heads: expected a power of two up to {MOST_HEADS}, got {spec.K}": spec.K & (spec.K - 1) != 0
        or spec.K > MOST_HEADS,
        f"num_heads: expected at most {ROWS.value} per key/value head, got {spec.G}": spec.G > ROWS.value,
        "block_size: expected a multiple of 16": not can_slice(spec) or spec.storage.dtype != spec.dtype,
        "rows: expected contiguous, at multiples of 16 bytes": key.d != 1
        or value.d != 1
        or spec.query[2] != 1
        or any(n % 8 for side in (key, value) for n in (side.n, side.b, side.k)),
    }
    return not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    rows = tuning.power_of_2(shapes.T * spec.G)
    if not shapes.T == shapes.S == 1:
        return "several sequences, or several tokens"
    if target.processors < PROGRAMS:
        return f"fewer than {PROGRAMS} multiprocessors"
    if not shapes.aligned:
        return "kv_cache: expected keys and values at multiples of 16 bytes"
    programs = min(LARGEST_CLUSTER, 1 << (PROGRAMS // spec.K).bit_length() - 1)
    number = PROGRAMS // spec.K // programs
    tiles_of_cluster = -(-shapes.columns * spec.B // (WARPS * SLICE * programs))  # of each program, if it is alone
    if tiles_of_cluster > MOST_TILES * number:
        return f"block tables for more than {MOST_TILES} tiles of each program"
    ahead = shapes.columns * spec.B >= programs * WARPS * SLICE
    choice = decode.plan(spec, target, shapes)
    assert not isinstance(choice, str), "a tile holds so few rows"
    tiles, division, _ = choice
    return Clusters(programs, number, rows, ALONE, ahead), STAGES if tiles_of_cluster > 1 else 1, (tiles, division, 0)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    clusters, stages, divided = choice
    D = spec.k_side.size
    tile = TileShape(ROWS.value, WARPS * SLICE, D, D, WARPS, False)
    constants = {"SPEC": spec, "CLUSTERS": clusters, "TILE": tile, "STAGES": stages, **target.overlap()}
    grid = spec.K * clusters.number, 1, 1
    without = UNUSED if clusters.number > 1 else (*UNUSED, "parts", "part_lse", "arrived")
    launcher = launcher_of(
        one_sequence_kernel, {**constants, "num_warps": WARPS}, target.device, without, clusters.programs
    )
    launch = Launch(launcher, grid, without)
    if clusters.number == 1:
        return Launches((launch,), (0, 0, 0))
    without_counters = decode.build(divided, spec, target, shapes)
    places = spec.K * clusters.number * clusters.rows * D
    of_lse, of_taken, floats = without_counters.workspace
    to_lse = max(places, of_lse)
    to_taken = to_lse + max(places, of_taken - of_lse)
    workspace = to_lse, to_taken, to_taken + floats - of_taken
    return Launches((launch,), workspace, spec.K * clusters.programs, without_counters.launches)


@gluon.constexpr_function
def sums_layout(W):
    """Of scores ``[16 W, 8]`` and of sums of values ``[columns, 8]``."""
    return gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])


@gluon.constexpr_function
def peaks_layout(W):
    """Of the warps' maxima ``[W, 8]``: each thread has those of the columns that it has of scores."""
    bits = W.bit_length() - 1
    registers = [[0, 1]] + [[1 << n, 0] for n in range(bits)]
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], *[[0, 0]] * 3], [[0, 0]] * bits, [], [W, 8])


@gluon.constexpr_function
def copy_layout(W, D):
    """Of keys ``[16 W, D]`` as they are copied: each warp has the keys of its piece, a thread 16 bytes of a row."""
    bits = (D // 8).bit_length() - 1  # of the lanes of a row
    lane = [[0, 8 << n] for n in range(bits)] + [[1 << n, 0] for n in range(5 - bits)]
    register = [[0, 1], [0, 2], [0, 4]] + [[1 << n, 0] for n in range(5 - bits, 4)]
    return gl.DistributedLinearLayout(
        register, lane, [[16 << n, 0] for n in range(W.bit_length() - 1)], [], [16 * W, D]
    )


@gluon.constexpr_function
def pieces_layout(W, D):
    """Of the rows of :func:`copy_layout` as ``[W, 16]``."""
    bits = (D // 8).bit_length() - 1
    lane = [[0, 0]] * bits + [[0, 1 << n] for n in range(5 - bits)]
    register = [[0, 1 << n] for n in range(5 - bits, 4)]
    return gl.DistributedLinearLayout(register, lane, [[1 << n, 0] for n in range(W.bit_length() - 1)], [], [W, 16])


class Memory(NamedTuple):
    """The contents of shared memory."""

    q: Any
    k: Any  # STAGES tiles
    v: Any
    p: Any  # weights of a tile
    m: Any  # each warp's maxima of a tile
    l: Any  # and its totals


class Sums(NamedTuple):
    """The results of the key tiles so far."""

    acc: Any  # [columns, 8]
    m: Any  # [8] maxima, to base 2
    l: Any  # [8]


@gluon.jit
def ids_of(table, first, end, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The block ids ``[W]`` of the tile that begins with key ``first``; 0 from key ``end`` on."""
    w = first + gl.arange(0, TILE.W, gl.SliceLayout(1, pieces_layout(TILE.W, TILE.D))) * PIECE
    return gl.load(table + w // SPEC.B * SPEC.table, mask=w < end, other=0)


@gluon.jit
def load_rows(base, ids, first, end, to, SIDE: gl.constexpr, B: gl.constexpr, TILE: gl.constexpr):
    """Begin to copy the keys, or values, of blocks ``ids [W]`` from key ``first`` on; 0 from key ``end`` on."""
    W: gl.constexpr = TILE.W
    layout: gl.constexpr = copy_layout(W, TILE.D)
    pieces: gl.constexpr = pieces_layout(W, TILE.D)
    w = first + gl.arange(0, W, gl.SliceLayout(1, pieces)) * PIECE
    row = ids.to(gl.int64) * SIDE.n + (w % B).to(gl.int64) * SIDE.b
    row = row[:, None] + (gl.arange(0, PIECE, gl.SliceLayout(0, pieces)) * SIDE.b)[None, :]
    row = gl.convert_layout(row.reshape([W * PIECE]), gl.SliceLayout(1, layout))
    j = first + gl.arange(0, W * PIECE, gl.SliceLayout(1, layout))
    d = gl.arange(0, TILE.D, gl.SliceLayout(0, layout))
    live = (j < end)[:, None] & (d >= 0)[None, :]
    load_async(to, base + gl.multiple_of(row, 8)[:, None] + d[None, :], mask=live)


@gluon.jit
def load_both(ids, first, stage, end, kh, tensors, memory, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Begin to copy a tile of keys, then one of values."""
    K_SIDE: gl.constexpr = SPEC.k_side
    V_SIDE: gl.constexpr = SPEC.v_side
    B: gl.constexpr = SPEC.B
    keys, values = tensors.key_cache + kh.to(gl.int64) * K_SIDE.k, tensors.value_cache + kh.to(gl.int64) * V_SIDE.k
    load_rows(keys, ids, first, end, memory.k.index(stage), K_SIDE, B, TILE)
    async_copy.commit_group()
    load_rows(values, ids, first, end, memory.v.index(stage), V_SIDE, B, TILE)
    async_copy.commit_group()


@gluon.jit
def load_query(kh, tensors, T, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The query rows ``[8, D]``, which may lie anywhere."""
    D: gl.constexpr = TILE.D
    G: gl.constexpr = SPEC.G
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [TILE.W, 1], [1, 0])
    r = gl.arange(0, TILE.M, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    row = r // G * SPEC.query[0] + (kh * G + r % G) * SPEC.query[1]
    return gl.load(tensors.query + row[:, None] + d[None, :], mask=(r // G < T)[:, None] & (d >= 0)[None, :], other=0.0)


@gluon.jit
def step(
    sums, first, stage, low, i, seq_len, factor, memory, PENDING: gl.constexpr, SPEC: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys, which begins with key ``first``, to the sums. Rows see the keys ``low : i + 1``. PENDING:
    groups of copies that began after those of its values."""
    W: gl.constexpr = TILE.W
    M: gl.constexpr = TILE.M
    mma: gl.constexpr = sums_layout(W)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    peaks: gl.constexpr = peaks_layout(W)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    async_copy.wait_group(PENDING + 1)
    q = memory.q.permute((1, 0)).load(right)
    s = mma_v2(memory.k.index(stage).load(left), q, gl.full([W * PIECE, M], 0.0, gl.float32, mma))
    s = s * factor
    j = first + gl.arange(0, W * PIECE, gl.SliceLayout(1, mma))
    MASKS: gl.constexpr = SPEC.masks
    s = gl.where(keep_seen(j[:, None], low[None, :], i[None, :], seq_len, MASKS), s, float("-inf"))
    s = s.reshape([W, PIECE, M])
    m_w = gl.maximum(gl.max(s, 1), LEAST)
    p = gl.exp2(s - gl.expand_dims(m_w, 1))
    memory.p.store(p.to(memory.p.dtype).reshape([W * PIECE, M]))
    memory.m.store(m_w)
    memory.l.store(gl.sum(p, 1))
    async_copy.wait_group(PENDING)
    m_w = memory.m.load(peaks)
    m = gl.maximum(gl.convert_layout(gl.max(m_w, 0), columns), sums.m)
    factors = gl.exp2(m_w - gl.convert_layout(m, gl.SliceLayout(0, peaks))[None, :])
    decay = gl.exp2(sums.m - m)
    l = sums.l * decay + gl.convert_layout(gl.sum(factors * memory.l.load(peaks), 0), columns)
    acc = sums.acc * decay[None, :]
    warp = gl.arange(0, W, gl.SliceLayout(1, peaks))
    for w in gl.static_range(W):
        of_warp = gl.convert_layout(gl.sum(gl.where((warp == w)[:, None], factors, 0.0), 0), columns)
        v = memory.v.index(stage).slice(w * PIECE, PIECE, dim=0).permute((1, 0)).load(left)
        p_w = memory.p.slice(w * PIECE, PIECE, dim=0).load(right)
        acc += mma_v2(v, p_w, gl.full([TILE.Dv, M], 0.0, gl.float32, mma)) * of_warp[None, :]
    return Sums(acc, m, l)


@gluon.jit
def merge_in_cluster(sums, rank, C: gl.constexpr, SLICE_OF: gl.constexpr, RESULTS: gl.constexpr, TILE: gl.constexpr):
    """Sends the result of this program in slices of SLICE_OF numbers to the programs of its cluster, and merges the
    slices that it gets: sums ``[SLICE_OF]``, their maxima and totals. RESULTS: the bytes of all slices, after which the
    maxima and totals lie."""
    W: gl.constexpr = TILE.W
    M: gl.constexpr = TILE.M
    mma: gl.constexpr = sums_layout(W)
    r = gl.arange(0, M, gl.SliceLayout(0, mma))
    d = gl.arange(0, TILE.Dv, gl.SliceLayout(1, mma))
    to = gl.arange(0, C, gl.SliceLayout(1, mma))
    e = r[None, :] * TILE.Dv + d[:, None]
    exchange.wait()
    exchange.push(sums.acc, gl.where(e // SLICE_OF < C, (rank * SLICE_OF + e % SLICE_OF) * 4, -1), e // SLICE_OF)
    nothing = gl.full([C, M], 0.0, gl.float32, mma)
    place = RESULTS + (rank * M + r)[None, :] * 4 + to[:, None] * 0
    exchange.push(sums.m[None, :] + nothing, place, to[:, None] + r[None, :] * 0)
    exchange.push(sums.l[None, :] + nothing, place + C * M * 4, to[:, None] + r[None, :] * 0)
    exchange.turn()
    e = gl.arange(0, SLICE_OF, gl.BlockedLayout([1], [32], [W], [0]))
    row = (rank * SLICE_OF + e) // TILE.Dv
    m = gl.full([SLICE_OF], LEAST, gl.float32, e.type.layout)
    ms: gl.tuple = ()
    for n in gl.static_range(C):
        ms += (exchange.pull(RESULTS + (n * M + row) * 4),)
        m = gl.maximum(m, ms[n])
    acc = gl.full([SLICE_OF], 0.0, gl.float32, e.type.layout)
    l = acc
    for n in gl.static_range(C):
        weight = gl.exp2(ms[n] - m)
        acc += weight * exchange.pull((n * SLICE_OF + e) * 4)
        l += weight * exchange.pull(RESULTS + ((C + n) * M + row) * 4)
    return acc, m, l


@gluon.jit
def store_slice(acc, m, l, e, kh, q_len, tensors, T, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Write elements ``e`` of the unit's rows; padding is 0."""
    G: gl.constexpr = SPEC.G
    row, column = e // TILE.Dv, e % TILE.Dv
    seen = (l != 0.0) & (row // G < q_len)  # NaN stays
    out = gl.where(seen, acc / gl.where(seen, l, 1.0), 0.0)
    at = (row // G).to(gl.int64) * (SPEC.K * G) + kh * G + row % G
    live = row // G < T
    gl.store(tensors.out + at * TILE.Dv + column, out.to(tensors.out.dtype.element_ty), mask=live)
    if tensors.lse is not None:
        lse = gl.where(seen, m + gl.log2(gl.where(seen, l, 1.0)), float("-inf"))
        gl.store(tensors.lse + at, lse * LN2, mask=live & (column == 0))


@gluon.jit
def store_merged(acc, m, l, place, tensors):
    """Leave what a cluster has merged among the parts."""
    at = place + gl.arange(0, acc.shape[0], acc.type.layout)
    some = l != 0.0
    gl.store(tensors.parts + at, acc / gl.where(some, l, 1.0))
    gl.store(tensors.part_lse + at, gl.where(some, m + gl.log2(gl.where(some, l, 1.0)), LEAST))


@gluon.jit
def merge_clusters(like, used, place, STRIDE: gl.constexpr, tensors, NUMBER: gl.constexpr):
    """The merged slices of the ``used`` clusters of a unit: sums, maxima and totals in the layout of ``like``."""
    layout: gl.constexpr = like.type.layout
    UP: gl.constexpr = 1 << (NUMBER - 1).bit_length()
    across: gl.constexpr = gl.BlockedLayout([UP, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    n = gl.arange(0, UP, gl.SliceLayout(1, across))[:, None]
    at = n * STRIDE + place + gl.arange(0, like.shape[0], gl.SliceLayout(0, across))[None, :]
    lse2 = gl.load(tensors.part_lse + at, mask=n < used, other=LEAST)
    acc = gl.load(tensors.parts + at, mask=n < used, other=0.0)
    m = gl.max(lse2, 0)
    weight = gl.where(lse2 == LEAST, 0.0, gl.exp2(lse2 - m[None, :]))
    acc, l = gl.sum(acc * weight, 0), gl.sum(weight, 0)
    return gl.convert_layout(acc, layout), gl.convert_layout(m, layout), gl.convert_layout(l, layout)


@gluon.jit(do_not_specialize=Numbers._fields)
def one_sequence_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: gl.constexpr, CLUSTERS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    C: gl.constexpr = CLUSTERS.programs
    NUMBER: gl.constexpr = CLUSTERS.number
    W: gl.constexpr = TILE.W
    N: gl.constexpr = TILE.N
    D: gl.constexpr = TILE.D
    M: gl.constexpr = TILE.M
    MASKS: gl.constexpr = SPEC.masks
    SLICE_OF: gl.constexpr = CLUSTERS.rows * D // C
    RESULTS: gl.constexpr = CLUSTERS.rows * D * 4
    dtype: gl.constexpr = tensors.query.dtype.element_ty
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    mma: gl.constexpr = sums_layout(W)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    p = gl.program_id(0)
    kh = p // (C * NUMBER)
    rank = p % C
    cluster = p // C % NUMBER
    exchange.declare(RESULTS + 2 * C * M * 4)
    exchange.arrive()
    memory = Memory(
        gl.allocate_shared_memory(dtype, [M, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, N, D], rows),
        gl.allocate_shared_memory(dtype, [STAGES, N, D], rows),
        gl.allocate_shared_memory(dtype, [N, M], plain),
        gl.allocate_shared_memory(gl.float32, [W, M], plain),
        gl.allocate_shared_memory(gl.float32, [W, M], plain),
    )
    if PDL:
        gdc_wait()
    table = tensors.block_tables
    if CLUSTERS.ahead:  # before the length is known
        ids = ids_of(table, rank * N, C * N, SPEC, TILE)
    row_start = gl.load(tensors.query_start_loc)
    q_len = gl.load(tensors.query_start_loc + 1) - row_start
    seq_len = gl.load(tensors.seq_lens)
    q = load_query(kh, tensors, T, SPEC, TILE)
    slice_e = rank * SLICE_OF + gl.arange(0, SLICE_OF, gl.BlockedLayout([1], [32], [W], [0]))
    seq_len = gl.where(q_len > 0, seq_len, 0)
    first_i = seq_len - q_len
    tiles, end_tile, _, _, _ = key_tiles(0, first_i, seq_len - 1, seq_len, None, numbers, MASKS, N)
    used = 1
    if NUMBER > 1:
        used = gl.minimum((tiles + C * CLUSTERS.alone - 1) // (C * CLUSTERS.alone), NUMBER)
    every = used * C
    g = end_tile - tiles + cluster * C + rank  # the first tile of this program
    mine = gl.where(cluster < used, gl.maximum((end_tile - g + every - 1) // every, 0), 0)
    if CLUSTERS.ahead:
        w = rank * N + gl.arange(0, W, ids.type.layout) * PIECE
        ids = gl.where(w < seq_len, ids, 0)
        if NUMBER > 1:
            if cluster > 0:
                ids = ids_of(table, g * N, seq_len, SPEC, TILE)
    else:
        ids = ids_of(table, g * N, seq_len, SPEC, TILE)
    for stage in gl.static_range(STAGES):
        if stage > 0:
            ids = ids_of(table, (g + stage * every) * N, seq_len, SPEC, TILE)
        if stage < mine:
            load_both(ids, (g + stage * every) * N, stage, seq_len, kh, tensors, memory, SPEC, TILE)
        else:
            async_copy.commit_group()
            async_copy.commit_group()
    memory.q.store(q)
    ids = ids_of(table, (g + STAGES * every) * N, seq_len, SPEC, TILE)
    factor = scale * LOG2E
    low, i = keys_of_rows(first_i + gl.arange(0, M, columns) // SPEC.G, 0, None, numbers, MASKS)
    nothing = gl.full([M], 0.0, gl.float32, columns)
    sums = Sums(gl.full([D, M], 0.0, gl.float32, mma), nothing + LEAST, nothing)
    for t in range(0, mine):
        first = (g + t * every) * N
        PENDING: gl.constexpr = 2 * (STAGES - 1)
        sums = step(sums, first, t % STAGES, low, i, seq_len, factor, memory, PENDING, SPEC, TILE)
        if t + STAGES < mine:
            first += STAGES * every * N
            load_both(ids, first, t % STAGES, seq_len, kh, tensors, memory, SPEC, TILE)
            ids = ids_of(table, first + every * N, seq_len, SPEC, TILE)
        else:
            async_copy.commit_group()
            async_copy.commit_group()
    async_copy.wait_group(0)
    acc, m, l = merge_in_cluster(sums, rank, C, SLICE_OF, RESULTS, TILE)
    if NUMBER == 1:
        store_slice(acc, m, l, slice_e, kh, q_len, tensors, T, SPEC, TILE)
    elif used == 1:
        if cluster == 0:
            store_slice(acc, m, l, slice_e, kh, q_len, tensors, T, SPEC, TILE)
    elif cluster < used:
        counter = tensors.arrived + kh * C + rank
        place = (kh * C + rank) * SLICE_OF
        OF_ALL: gl.constexpr = SPEC.K * C * SLICE_OF  # numbers of one cluster of each unit
        store_merged(acc, m, l, cluster * OF_ALL + place, tensors)
        barrier()  # all threads have stored
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
            acc, m, l = merge_clusters(acc, used, place, OF_ALL, tensors, NUMBER)
            store_slice(acc, m, l, slice_e, kh, q_len, tensors, T, SPEC, TILE)
            gl.store(counter, 0)
    if PDL:
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read
