"""The indexer on GPUs: one kernel scores keys, a second one (selection.py) selects the best k of each list.

Letters as in :mod:`paged_ops.ops`; also in kernels: N keys of a tile, TOK tokens of a program, HP heads padded to a
power of two, M = TOK * HP columns of a tile, LISTS lists of a program, E entries of a tile.

**Scores.** A program has TOK adjacent tokens. It loads tiles of keys through the block table, once for all heads. Keys
are the rows of the matmul and heads its columns, so few heads are padded to 16 at most, and the sum over heads needs
two shuffles. The block of the next tile is loaded ahead, so that addresses of keys do not wait for it and Triton loads
tiles several stages ahead. fp8 keys are loaded in pairs and widen to float16 in registers, from where the matmul takes
them. relu and weights cost two instructions per score of a head; everything else comes after the sum. Axis 1 of the
grid divides the tiles of a sequence. The result is stored as int32 in the order of the scores, with the largest of each
CHUNK entries. Decode of 64 sequences of 131072 tokens with 64 heads of 128 in bfloat16 reads 2.1 GB of keys, does 137
GFLOP, and writes 36 MB.

**Workspace.** 8 bytes per entry and 8 per chunk for each list. Rows are processed in groups that need at most WORKSPACE
bytes: the number of launches depends on T, G and the columns of the block table, not on values.

On Hopper a kernel in Gluon scores decode: indexer_hopper.py.

Times: benchmarks/notes/gpu-designs.md.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake
from paged_ops.features import POOLS, IndexOptions, dtype_name, refuse_others
from paged_ops.layouts import element_dtype, has_index_scales, index_parts
from paged_ops.lowerings.gpu import precompile, selection_cluster
from paged_ops.lowerings.gpu.attention.shared import tile as tiling
from paged_ops.lowerings.gpu.cache import INDEX_FORMATS, is_head_major, together
from paged_ops.lowerings.gpu.fp8 import E4M3FN, stored_format
from paged_ops.lowerings.gpu.launch import NO_PROGRAMS, Launcher, launcher_of
from paged_ops.lowerings.gpu.selection import ALWAYS, NEVER, NUMBERS, Spec, sees, select_kernel, sequence_of
from paged_ops.lowerings.gpu.spec import Side
from paged_ops.lowerings.gpu.target import Target, target_of

APPLIES = INDEX_FORMATS | frozenset(IndexOptions._fields)
WORKSPACE = 224 << 20
# What one tile holds, at most.
MOST_HEADS, WIDEST, LARGEST_BLOCK = 128, 256, 256
CHUNK = 16
# Programs of the first kernel per multiprocessor: several waves, so that uneven sequences and the last leave few idle,
# as long as each has at least TILES tiles; and at least FEWEST.
PROGRAMS, FEWEST, TILES = 16, 2, 32
INTERPRETER_PROGRAMS = 5
# Numbers that the second kernel keeps in registers, and fewer in the interpreter, to have several tiles; what part of
# them it scans at once; its warps.
AT_ONCE, INTERPRETER_AT_ONCE = 8192, 256
SCANS, WARPS = 2, 16


class Pointers(NamedTuple):
    """The tensors of the kernels."""

    selected: Any  # [T, G, k]
    scores: Any  # [rows * G, width] int32
    listed: Any  # [rows * G, width] int32
    maxima: Any  # [rows * G, width / CHUNK] int32
    chosen: Any  # [rows * G, width / CHUNK] int32; this and the next are for select_in_cluster_kernel
    counts: Any  # [rows * G, programs of a list] int32
    query: Any  # [T, Hi, Di]
    cache: Any  # [N, B, Di]
    block_tables: Any  # [S, M]
    seq_lens: Any  # [S]
    query_start_loc: Any  # [S + 1]
    weights: Any  # [T, Hi], or None
    k_scale: Any  # [1], or None


class Tile(NamedTuple):
    """The sizes of a tile; one constant."""

    TOK: int
    HP: int
    D: int  # head size, padded to a power of two
    E: int
    BLOCK: int  # keys of an entry, padded to a power of two
    CHUNK: int
    S_AT_ONCE: int  # sequences that are loaded at once, to find that of a token


def select_keys(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    batch = block_tables, seq_lens, query_start_loc
    selected = fake.select_keys(index_query, index_cache, *batch, k, out=out, **options)
    o = IndexOptions(**options)
    refuse_others(o, index_cache, APPLIES, "the indexer on a GPU")
    for reason in too_large(index_query.shape[1], index_query.shape[2], o.block_size):
        raise ValueError(reason)
    if is_head_major(index_query):
        index_query = index_query.contiguous()
    (T, G, _), (S, M), (N, B, _) = selected.shape, block_tables.shape, index_cache.shape
    if not (T and S and M and index_cache.numel()):
        return selected.fill_(-1)
    if checks.debug_checks():
        checks.batch(*batch, T, N, B)
    target = target_of(index_query.device)
    spec = spec_of(index_query, index_cache, block_tables, o, target)
    tile = tile_of(spec, T, S, target)[0]
    width = -(-(M * B) // (o.block_size * tile.E)) * tile.E  # entries of a list in whole tiles
    per_row = G * width * (2 + 2 / tile.CHUNK)  # elements of the workspace
    most = int(WORKSPACE / 4 / G / (2 + 2 / tile.CHUNK)) // tile.E * tile.E * o.block_size
    fits = f"at most {most} tokens per sequence for G = {G} on a GPU"
    checks.expect(4 * per_row <= WORKSPACE, "block_tables", fits, f"{M} blocks of {B} tokens")
    rows = int(WORKSPACE / 4 / per_row)
    rows = min(T, rows // tile.TOK * tile.TOK or rows)
    bounded = width // tile.CHUNK > k
    _, score, select, programs = launchers_of(spec, T, S, bounded, target)
    # Whole 16 bytes, as kernels are compiled for the alignment of each tensor.
    entries, chunks = (-(-rows * G * width // per // 4) * 4 for per in (1, tile.CHUNK))
    elements = entries, entries, chunks, chunks, rows * G * programs
    scores, listed, maxima, chosen, counts = index_query.new_empty(sum(elements), dtype=torch.int32).split(elements)
    cache, lens, starts = _readable(index_cache, o, target), together(seq_lens), together(query_start_loc)
    tensors = Pointers(
        selected, scores, listed, maxima, chosen, counts, index_query, cache, block_tables, lens, starts, o.weights,
        o.k_scale,
    )  # fmt: skip
    hopper = hopper_of(spec, tile)
    described = hopper.describe(spec, cache) if hopper else ()
    tiles = width // tile.E
    most, fewest = (each * target.processors for each in (PROGRAMS, FEWEST))
    lone = target.backend == "interpreter"  # it has no clusters: their programs run one after the other
    if lone:
        most = fewest = INTERPRETER_PROGRAMS
    for first in range(0, T, rows):
        stop = min(first + rows, T)
        numbers = (float(o.scale), S, block_tables.stride(0), first, stop, width, k)
        groups = -(-(stop - first) // tile.TOK)
        parts = max(-(-fewest // groups), min(most // groups, tiles // TILES))
        grid = groups, min(parts, tiles, 65535), 1
        if hopper:
            grid = hopper.programs(tile.HP, groups * tiles, target.processors), 1, 1
        score(grid, tensors, numbers, *described)
        select(((stop - first) * G * (programs if lone else 1), 1, 1), tensors, numbers)
    for sizes in precompile.sizes_for(score):
        tile, score, select, _ = launchers_of(spec, *sizes, bounded, target)
        hopper = hopper_of(spec, tile)
        score(NO_PROGRAMS, tensors, numbers, *(hopper.describe(spec, cache) if hopper else ()))
        select(NO_PROGRAMS, tensors, numbers)
    return selected


def launchers_of(spec: Spec, T: int, S: int, bounded: bool, target: Target) -> tuple[Tile, Launcher, Launcher, int]:
    """The tile of a batch, both kernels for it, and the number of programs that select from a list. ``bounded``:
    whether a list may have more than k chunks."""
    tile, launch = tile_of(spec, T, S, target)
    interpreter = target.backend == "interpreter"
    at_once = INTERPRETER_AT_ONCE if interpreter else AT_ONCE
    shared = {"SPEC": spec, "TILE": tile, **target.overlap()}
    hopper = hopper_of(spec, tile)
    kernel = hopper.scores_hopper_kernel if hopper else scores_kernel
    score = launcher_of(kernel, {**shared, **(hopper.constants(spec, tile.HP) if hopper else launch)}, target.device)
    constants = {**shared, "AT_ONCE": at_once, "SCAN": at_once // SCANS, "num_warps": WARPS}
    programs = selection_cluster.programs(T * (spec.heads if spec.per_head else 1), tile.CHUNK, bounded, target)
    if programs == 1:
        return tile, score, launcher_of(select_kernel, constants, target.device), 1
    constants |= selection_cluster.constants(programs, at_once, interpreter)
    kernel, cluster = selection_cluster.select_in_cluster_kernel, 1 if interpreter else programs
    return tile, score, launcher_of(kernel, constants, target.device, cluster=cluster), programs


def hopper_of(spec: Spec, tile: Tile) -> ModuleType | None:
    """The module of the kernel in Gluon, if it scores a batch of this tile."""
    if not (spec.by_tma and tile.TOK == 1):
        return None
    from paged_ops.lowerings.gpu import indexer_hopper

    return indexer_hopper


def too_large(heads: int | None, Di: int | None, block_size: int | None) -> list[str]:
    """The reasons why no tile fits these sizes; None: not known."""
    sizes = (
        ("index_query", "heads", heads, MOST_HEADS),
        ("index_query", "columns", Di, WIDEST),
        ("block_size", "keys", block_size, LARGEST_BLOCK),
    )
    return [
        f"{name}: a GPU takes at most {most} {what}, got {size}"
        for name, what, size, most in sizes
        if size and size > most
    ]


def spec_of(index_query: Tensor, index_cache: Tensor, block_tables: Tensor, o: IndexOptions, target: Target) -> Spec:
    B = index_cache.shape[1]
    token_scales = has_index_scales(o.kv_cache_dtype)
    keys = index_parts(index_cache, "index_cache").keys if token_scales else index_cache
    n, b, d = keys.stride()
    cache = _readable(index_cache, o, target)
    dtypes = [each.dtype for each in (index_query, cache, o.weights) if each is not None]
    stored = stored_format(element_dtype(index_cache, o.kv_cache_dtype), index_cache.dtype, target)
    if token_scales:
        stored = E4M3FN.value  # on every device
    eight_bits = cache.dtype.itemsize == 1
    in_pairs = d == 1 and not (n | b | keys.shape[2] | keys.data_ptr()) & 1
    spec = Spec(
        heads=index_query.shape[1],
        per_head=o.per_head,
        key=Side(keys.shape[2], keys.shape[2], 1, n, b, 0, 0, d, None),
        B=B,
        query=index_query.stride(),
        weights=() if o.weights is None else o.weights.stride(),
        table=block_tables.stride(1),
        format=stored if cache.dtype == torch.uint8 else 0,
        relu=o.relu,
        pool=POOLS.index(o.pool),
        block=o.block_size,
        local_blocks=o.local_blocks,
        causal=o.causal,
        has_scale=o.k_scale is not None,
        token_scales=token_scales,
        eight_bits=eight_bits,
        paired=eight_bits and cache.dtype != torch.uint8 and dtypes[0].itemsize == 2 and in_pairs,
        e4m3=cache.dtype == torch.float8_e4m3fn,
        weighted=o.weights is not None or (eight_bits and dtypes[0] == torch.bfloat16),
        dtypes=tuple(map(dtype_name, dtypes)),
        by_tma=False,
    )
    if not target.has_hopper_gluon:
        return spec
    from paged_ops.lowerings.gpu import indexer_hopper

    return spec._replace(by_tma=indexer_hopper.applies_to(o, spec, keys))


def _readable(index_cache: Tensor, o: IndexOptions, target: Target) -> Tensor:
    """The cache for the kernel: fp8 as its dtype where the target converts it, else as bytes."""
    stored = element_dtype(index_cache, o.kv_cache_dtype)
    if not stored_format(stored, index_cache.dtype, target):
        return index_cache
    return index_cache.view(stored if target.has_fp8_cvt else torch.uint8)


def tile_of(spec: Spec, T: int, S: int, target: Target) -> tuple[Tile, dict[str, int]]:
    """The tile, and the options of its launch."""
    heads = triton.next_power_of_2(spec.heads)
    # Tokens share loaded keys if there are several per sequence; 16 is the narrowest matmul.
    tokens = max(64, 2 * heads) // heads if T > 4 * S else 1
    heads = max(heads, -(-16 // tokens))
    itemsize = 4 if spec.dtypes[0] == "float32" else 2
    D, block = max(16, triton.next_power_of_2(spec.key.size)), triton.next_power_of_2(spec.block)
    # With one token, a tile of 64 keys has too few bytes of 16-bit keys on their way; of fp8, four programs fit.
    keys = 128 if itemsize == 2 and tokens * heads <= 64 and D <= 128 and not spec.eight_bits else 64
    stages = 2 if target.backend != "cuda" else 4 if spec.paired and tokens == 1 else 3
    if target.backend == "interpreter":
        keys = 32
    keys = max(keys, block)
    columns = tokens * heads
    while stages > 1 and (columns + stages * keys) * D * itemsize > target.shared_memory:
        stages -= 1
    entries = keys // block
    tile = Tile(tokens, heads, D, entries, block, min(CHUNK, entries), min(triton.next_power_of_2(S), 256))
    launch = {"num_warps": 8 if keys > 64 or columns > 128 else 4, "num_stages": stages}
    if target.backend == "cuda" and spec.paired and columns * keys <= 64 * 64:
        launch["maxnreg"] = 128
    return tile, launch


@triton.jit(do_not_specialize=NUMBERS)
def scores_kernel(
    tensors,  # Pointers
    scale, S, table_stride, first, stop, width, k,  # NUMBERS
    SPEC: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of the tokens of one program from ``first`` on, over its share of the tiles of their sequences."""
    if PDL:
        gdc_wait()
    TOK: tl.constexpr = TILE.TOK
    HP: tl.constexpr = TILE.HP
    E: tl.constexpr = TILE.E
    BLOCK: tl.constexpr = TILE.BLOCK
    CHUNK: tl.constexpr = TILE.CHUNK
    N: tl.constexpr = E * BLOCK
    HEADS: tl.constexpr = SPEC.heads
    SIDE: tl.constexpr = SPEC.key
    block_size: tl.constexpr = SPEC.block
    HL: tl.constexpr = HP if SPEC.per_head else 1  # lists of a token, padded
    G: tl.constexpr = HEADS if SPEC.per_head else 1
    part, parts = tl.program_id(1), tl.num_programs(1)
    t0 = first + tl.program_id(0) * TOK
    m = tl.arange(0, TOK * HP)
    t, h = t0 + m // HP, m % HP
    live = (t < stop) & (h < HEADS)
    d = tl.arange(0, TILE.D)
    row = t.to(tl.int64) * SPEC.query[0] + h * SPEC.query[1]
    q = tl.load(
        tensors.query + row[:, None] + (d * SPEC.query[2])[None, :],
        mask=live[:, None] & (d < SIDE.size)[None, :],
        other=0.0,
    )  # [M, D]
    weight = tl.full((TOK * HP,), 1.0, tl.float32)
    if len(SPEC.weights) > 0:
        where = t.to(tl.int64) * SPEC.weights[0] + h * SPEC.weights[1]
        weight = tl.load(tensors.weights + where, mask=live, other=0.0).to(tl.float32)
    factor = scale
    if SPEC.has_scale:
        factor = scale * tl.load(tensors.k_scale)
    # The factor's sign is in the queries, so that relu comes before the rest of it, which the sum over heads shares.
    q = tl.where(factor < 0.0, -q, q)
    factor = tl.abs(factor)
    if SPEC.eight_bits and q.dtype == tl.bfloat16:
        q, power = tiling.queries_for_fp8(q)
        weight *= tl.reshape(power, (TOK * HP,))
    queries = (q, q)
    if SPEC.paired:
        queries = tl.split(tl.reshape(q, (TOK * HP, TILE.D // 2, 2)))  # even and odd columns
    x = tl.arange(0, TOK * HL)
    token, head = t0 + x // HL, x % HL  # of a list
    list_ = ((token - first) * G + head).to(tl.int64)

    last = tl.minimum(sequence_of(tl.minimum(t0 + TOK, stop) - 1, tensors.query_start_loc, S, TILE.S_AT_ONCE), S - 1)
    begin = sequence_of(t0, tensors.query_start_loc, S, TILE.S_AT_ONCE)
    for each in range(0, last + 1 - begin):  # from 0: else Triton 3.7 does not see that keys are contiguous
        s = begin + each
        i, seen = sees(token, s, tensors, SPEC.causal)  # [LISTS]
        seen = tl.where((token < stop) & (head < G), seen, 0)
        keys = tl.max(seen, 0)
        table = tensors.block_tables + tl.cast(s, tl.int64) * table_stride
        own = tl.where(i >= 0, i // block_size, -1)
        # The blocks and scales of the next tile are loaded ahead: then Triton can load keys several tiles ahead.
        block = block_of(table, part, keys, SPEC, TILE)
        if SPEC.token_scales:
            next_scales = token_scales(tensors.cache, block, part, keys, SPEC, TILE)
        for tile in range(part, tl.cdiv(keys, E * block_size), parts):
            j, exists = keys_of(tile, keys, SPEC, TILE)
            if SPEC.paired:
                even, odd = tiling.load_pairs(tensors.cache, block, j % SPEC.B, exists, SIDE, TILE.D)
                score = tl.dot(odd, tl.trans(queries[1]), tl.dot(even, tl.trans(queries[0])))
            else:
                place = j % SPEC.B
                key = tiling.load_tile(tensors.cache, block, place, exists, exists, SIDE, TILE.D, SPEC.format, q.dtype)
                score = tiling.dot_keys(key, queries[0])  # [N, M]
            block = block_of(table, tile + parts, keys, SPEC, TILE)
            if SPEC.relu:
                score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if SPEC.weighted:
                score *= weight[None, :]
            if not SPEC.per_head:
                if HEADS < HP:  # 0 times infinity is no score
                    score = tl.where(live[None, :], score, 0.0)
                score = tl.sum(tl.reshape(score, (N, TOK, HP)), 2)
            score *= factor
            if SPEC.token_scales:
                score *= next_scales[:, None]
                next_scales = token_scales(tensors.cache, block, tile + parts, keys, SPEC, TILE)
            score = tl.where(score == score, score, float("-inf"))  # [N, LISTS]
            visible = exists[:, None] & (j[:, None] < seen[None, :])
            e = tile * E + tl.arange(0, E)
            if SPEC.pool == 1:
                score = tl.max(tl.reshape(tl.where(visible, score, float("-inf")), (E, BLOCK, TOK * HL)), 1)
            elif SPEC.pool == 2:
                total = tl.sum(tl.reshape(tl.where(visible, score, 0.0), (E, BLOCK, TOK * HL)), 1)
                count = tl.minimum(tl.maximum(seen[None, :] - (e * block_size)[:, None], 1), block_size)
                score = total / count.to(tl.float32)
                score = tl.where(score == score, score, float("-inf"))
            order = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
            order = order ^ ((order >> 31) & 0x7FFFFFFF)
            if SPEC.local_blocks > 0:
                away = own[None, :] - e[:, None]
                order = tl.where((away >= 0) & (away < SPEC.local_blocks), ALWAYS, order)
            order = tl.where((e * block_size)[:, None] < seen[None, :], order, NEVER)  # [E, LISTS]
            mine = seen > 0
            tl.store(tensors.scores + list_[None, :] * width + e[:, None], order, mask=mine[None, :])
            largest = tl.max(tl.reshape(order, (E // CHUNK, CHUNK, TOK * HL)), 1)
            chunk = tile * (E // CHUNK) + tl.arange(0, E // CHUNK)
            tl.store(tensors.maxima + list_[None, :] * (width // CHUNK) + chunk[:, None], largest, mask=mine[None, :])
    if PDL:
        gdc_launch_dependents()  # last: the next kernel reads what was written here


@triton.jit
def keys_of(tile, keys, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The positions of the keys of a tile, and whether they exist. Entries are padded to powers of two."""
    y = tl.arange(0, TILE.E * TILE.BLOCK)
    inside = y % TILE.BLOCK
    j = (tile * TILE.E + y // TILE.BLOCK) * SPEC.block + inside
    return j, (inside < SPEC.block) & (j < keys)


@triton.jit
def block_of(table, tile, keys, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The block of a tile, if it lies in one; else of each of its keys."""
    N: tl.constexpr = TILE.E * TILE.BLOCK
    if SPEC.B % N == 0 and TILE.BLOCK == SPEC.block:
        return tl.load(table + (tile * N // SPEC.B) * SPEC.table, mask=tile * N < keys, other=0)
    else:
        j, exists = keys_of(tile, keys, SPEC, TILE)
        return tl.load(table + (j // SPEC.B) * SPEC.table, mask=exists, other=0)


@triton.jit
def token_scales(cache, block, tile, keys, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The scales of the keys of a tile."""
    j, exists = keys_of(tile, keys, SPEC, TILE)
    of_block = cache + (block.to(tl.int64) * SPEC.key.n + SPEC.B * SPEC.key.size)
    return tl.load(of_block.to(tl.pointer_type(tl.float32)) + j % SPEC.B, mask=exists, other=0.0)
