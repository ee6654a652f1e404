"""Latent attention (MLA) on GPUs: decode, speculative widths and prefill over a cache ``[N, B, R + P]``.

Letters as in :mod:`paged_ops.lowerings.gpu.attention.call`; also R compressed and P rotated columns. Keys are whole
rows of the cache and values their first R columns, for all H query heads: a tile of latents is loaded once, and serves
as keys and as values.

Groups of query heads replace key/value heads: a tile has M packed rows, of one group and as many tokens as fit. The
last group may have fewer heads. Units, shares and parts are the same as in decode.py, whose merge_kernel merges the
parts. All groups of a sequence read the same latents, all but the first from the L2 cache. Long queries take this
kernel, too: with M = 64 rows they use the tensor cores.

A row takes ``2 * (2R + P)`` FLOPs per key of ``(R + P) * itemsize`` bytes. Idea: the absorbed form of DeepSeek-V2
(arXiv:2405.04434), where the latents are keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared import masks
from paged_ops.lowerings.gpu.attention.shared import tile as tiling
from paged_ops.lowerings.gpu.attention.shared.tile import APPLIES, Batch, Keys, Rows
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, next_unit, sequence, shares
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.launch import Choice, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.scaled_rows import load_scales, rotated_columns, times_scales
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

LARGEST_LATENT, LARGEST_ROTATED = 512, 128


def too_large(R: int | None, P: int | None) -> list[str]:
    """The reasons why no tile fits latents of these sizes; None: size not known."""
    sizes = (("value_head_size", R, LARGEST_LATENT), ("head_size - value_head_size", P, LARGEST_ROTATED))
    return [f"{name}: at most {most} of a latent cache, got {size}" for name, size, most in sizes if (size or 0) > most]


def serves(spec: Spec, target: Target) -> list[str]:
    if spec.rotated is None:
        return ["kv_cache: not latent"]
    return not_applied(spec, APPLIES | {"latent", "row_scales"}) + too_large(spec.v_side.size, spec.rotated.size)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice:
    """The choice for any batch."""
    tile, programs = tuning.latent_tile(spec, target, shapes.T, shapes.S)
    return tile, programs, tuning.division(tile.block_m, shapes.S, everyone=True)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    tile, programs, division = choice
    grouped, own = in_groups(spec, tile.block_m), shape(tile, spec)
    constants = {"SPEC": grouped, "DIVISION": division, "TILE": own, **target.overlap()}
    launcher = launcher_of(latent_kernel, constants | tile.options(target.backend != "hip"), target.device)
    launch = Launch(launcher, (programs, 1, 1), ("T", "taken", "arrived", "value_cache"))
    return merge.with_merge((launch,), programs, own, grouped, target, division)


def shape(tile: tuning.Tile, spec: Spec) -> TileShape:
    """The shape of a tile over latents: D is that of the rotated columns."""
    assert spec.rotated is not None, "a latent cache"
    P, R = (tuning.padded(size, spec.storage.dtype.itemsize) for size in (spec.rotated.size, spec.v_side.size))
    return TileShape(tile.block_m, tile.block_n, P, R, 0, False)


def in_groups(spec: Spec, rows: int) -> Spec:
    """The spec with groups of query heads, of at most ``rows`` each, as key/value heads."""
    G = min(tuning.power_of_2(spec.heads), rows)
    return spec._replace(K=-(-spec.heads // G), G=G, v_side=spec.v_side._replace(run=1))


@triton.jit(do_not_specialize=Numbers._fields)
def latent_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    R: tl.constexpr = SPEC.v_side.size
    R_PAD: tl.constexpr = TILE.Dv
    MASKS: tl.constexpr = SPEC.masks
    TOKENS: tl.constexpr = M // G
    r = tl.arange(0, M)
    d = tl.arange(0, R_PAD)
    ranges = None
    if MASKS.ranges:
        ranges = masks.ranges_at(tensors.bidirectional_ranges, MASKS.ranges)
    batch = Batch(tensors, numbers, ranges)
    factor = numbers.scale
    if tensors.k_scale is not None:
        factor = numbers.scale * tl.load(tensors.k_scale)

    position, end, _, _ = shares(p, tl.num_programs(0), batch, SPEC, DIVISION, TILE)
    s, unit, tile = locate(position, batch, SPEC, DIVISION, TILE)
    row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
    tile += first_tile
    group = unit % K
    first_token = unit // K * TOKENS
    while position < end:
        stop = tl.minimum(end_tile, tile + end - position)
        token = first_token + r // G
        head = group * G + r % G
        row_live = token < q_len
        if SPEC.heads < K * G:
            row_live = row_live & (head < SPEC.heads)
        q = load_latent_queries(tensors, row_start + token, head, row_live, SPEC, TILE)
        slopes = None
        if SPEC.logits.alibi:
            slopes = tl.load(tensors.alibi_slopes + head, mask=row_live, other=0.0)
        first_i = seq_len - q_len + first_token
        i = seq_len - q_len + token
        sees = None
        oldest = masks.oldest_key(first_i, numbers, MASKS)
        if MASKS.ranges:
            sees = masks.reach_of_rows(batch, s, tl.minimum(i, seq_len - 1), MASKS)
            oldest = tl.min(sees[0], 0)
        block_table = tensors.block_tables + tl.cast(s, tl.int64) * numbers.table_stride
        offset = masks.stripe_offset(head, MASKS)
        rows = Rows(q, i, sees, slopes, factor, offset)
        hidden = masks.hidden_keys(oldest, first_i, first_tile, seq_len - q_len, numbers, MASKS)
        keys = Keys(numbers, seq_len, hidden, block_table, tensors.key_cache, first_rotated(tensors.key_cache, SPEC))
        acc, m, l = tiling.nothing_seen(M, R_PAD, 0)
        seen_end = stop
        if MASKS.causal and MASKS.ranges == 0:  # the last row sees no later key
            last_token = tl.minimum(first_token + TOKENS, q_len)
            seen_end = tl.minimum(stop, tl.cdiv(tl.maximum(seq_len - q_len + last_token, 0), N))
        for each in range(tile, seen_end):
            seen = True
            if MASKS.sparse:
                seen = seen & (masks.next_seen_tile(each, first_i, offset, MASKS, N) == each)
            acc, m, l = see_latents(acc, m, l, rows, keys, each, seen, SPEC, TILE)
        from_start = tile == first_tile
        if SPEC.logits.sinks:
            if from_start:  # the first part includes the sink
                acc, m, l = tiling.count_sink(acc, m, l, tl.load(tensors.sinks + head, mask=row_live, other=0.0))
        result, lse2 = tiling.normalise(acc, m, l)
        if tensors.k_scale is not None:
            result = result * tl.load(tensors.k_scale)
        if from_start & (stop == end_tile):
            tiling.store_rows(tensors, result, lse2, row_start + token, head, row_live, d, SPEC.heads, R)
        else:
            part_row = (p * 2 + tl.where(from_start, 1, 0)).to(tl.int64) * M + r
            mask = row_live[:, None] & (d < R)[None, :]
            tl.store(tensors.parts + part_row[:, None] * R + d[None, :], result, mask=mask)
            tl.store(tensors.part_lse + part_row, lse2, mask=row_live)
        position += stop - tile
        s, group, first_token = next_unit(s, group, first_token, q_len, K, TOKENS)
        row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
        tile = first_tile


@triton.jit
def load_latent_queries(tensors, row_token, row_head, row_live, SPEC: tl.constexpr, TILE: tl.constexpr):
    """The latent columns ``[M, R]`` of packed query rows, and their rotated ones ``[M, P]``."""
    R: tl.constexpr = SPEC.v_side.size
    latents = tiling.load_queries(tensors.query, row_token, row_head, row_live, SPEC, TILE.Dv, 0, R)
    rotated = tiling.load_queries(tensors.query, row_token, row_head, row_live, SPEC, TILE.D, R, SPEC.rotated.size)
    return latents, rotated


@triton.jit
def first_rotated(key_cache, SPEC: tl.constexpr):
    """The address of the first rotated column of the cache."""
    if SPEC.storage.row_scales:
        first = rotated_columns(key_cache)
    else:
        first = key_cache + SPEC.v_side.size * SPEC.rotated.d
    return first


@triton.jit
def see_latents(acc, m, l, rows, keys, tile, seen, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Add one tile of latents to the rows, as ``see_tile`` of tile.py adds keys."""
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    tile = masks.place_of(tile, keys.hidden, MASKS, N)
    j = tile * N + tl.arange(0, N)
    live = masks.only_seen(j < keys.seq_len, j, 1, keys.hidden, MASKS)
    if SPEC.masks.sparse:
        live = live & seen
    if SPEC.B % N == 0:  # a tile lies in one block
        exists = tile * N < keys.seq_len
        block = tl.load(keys.block_table + (tile * N // SPEC.B) * SPEC.table, mask=exists, other=0)
    else:
        block = tl.load(keys.block_table + (j // SPEC.B) * SPEC.table, mask=live, other=0)
    return see_latent_keys(acc, m, l, rows, keys, j, live, block, SPEC, TILE)


@triton.jit
def see_latent_keys(acc, m, l, rows, keys, j, live, block, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Add the latents at positions ``j [N]``, in ``block``, to the rows. The rows have a q ``[M, R]`` and one
    ``[M, P]``; k of the keys is their first latent column, v the first rotated one."""
    q, q_rotated = rows.q
    EXACT: tl.constexpr = q.dtype == tl.float32
    PRECISION: tl.constexpr = "ieee" if q.dtype == tl.float32 else None
    LATENT: tl.constexpr = SPEC.v_side
    ROTATED: tl.constexpr = SPEC.rotated
    FORMAT: tl.constexpr = SPEC.storage.format
    ROTATED_FORMAT: tl.constexpr = 0 if SPEC.storage.row_scales else SPEC.storage.format
    offset = j % SPEC.B
    if SPEC.storage.row_scales:
        stored = tiling.load_tile(keys.k, block, offset, live, live, LATENT, TILE.Dv, FORMAT, tl.float32)
        latents = times_scales(stored, load_scales(keys.k, block, offset, live, LATENT)).to(q.dtype)
    else:
        latents = tiling.load_tile(keys.k, block, offset, live, live, LATENT, TILE.Dv, FORMAT, q.dtype)
    qk = tiling.dot_keys(q, latents)
    if ROTATED.size > 0:
        rotated = tiling.load_tile(keys.v, block, offset, live, live, ROTATED, TILE.D, ROTATED_FORMAT, q.dtype)
        qk += tiling.dot_keys(q_rotated, rotated)
    logits = tiling.masked_logits(qk, rows, j[None, :], live[None, :], keys.numbers, SPEC, True, EXACT)
    weights, decay, m, l = tiling.softmax_steps((logits,), m, l)
    p = weights[0]
    acc = tl.dot(p.to(latents.dtype), latents, acc * decay, input_precision=PRECISION)
    return acc, m, l
