"""Latent attention (MLA) on GPUs over rows that hold their scales: a cache uint8 ``[N, B, 656]``, see scaled_rows.py.

As latent.py, with its letters, units and tiles, but the 512 latent columns come as four groups g of 128. Their numbers
are ``c_g [N, 128]`` in e4m3, with one scale per token, ``s_g [N]``::

    logits = scale * (sum_g (q_g . c_g) * s_g + q_rotated . rotated)
    out_g  = sum_n (p * s_g) c_g

So the scales multiply sums and weights, ``[M, N]``, in float32, and the numbers of the cache go to the matrix
instructions as they are, exactly: logits and lse are not rounded to the query's dtype. Weights times scales are. In
float16, which has few exponents, they are divided by the tile's largest scale first, which multiplies the sums again.
No call takes this kernel until it has run on a GPU: latent.py reads these rows, too.

Bytes of a key: 656. FLOPs of a key and a query row: 2 (2 R + P). Source of the format: FlashMLA (deepseek-ai/FlashMLA).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import decode, tuning
from paged_ops.lowerings.gpu.attention.decode import locate, next_unit, sequence, shares
from paged_ops.lowerings.gpu.attention.latent import in_groups, load_columns, tile_shape
from paged_ops.lowerings.gpu.attention.tile import (
    Batch,
    Keys,
    Rows,
    count_sink,
    dot_keys,
    finish,
    next_seen_tile,
    nothing_seen,
    oldest_key,
    ranges_at,
    reach_of_rows,
    store_rows,
    stripe_offset,
    weigh,
)
from paged_ops.lowerings.gpu.fp8 import decode_fp8, widen_pairs
from paged_ops.lowerings.gpu.launch import Launch, Plan, launcher_of
from paged_ops.lowerings.gpu.scaled_rows import GROUP, LATENT, ROTATED, SMALLEST, rotated_columns, scales_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec
from paged_ops.lowerings.gpu.target import Target

TILES = "groups"  # the kind of its tiles


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does."""
    return [] if spec.storage.row_scales else ["kv_cache: expected rows that hold their scales"]


def depends_on(tile_plan: tuning.Plan, spec: Spec, target: Target, T: int, S: int) -> Any:
    """As in decode.py."""
    return tuning.latent_tile(spec, target, T, S, TILES)


def plan(spec: Spec, target: Target, shapes: Shapes) -> Plan:
    """Launches that serve any batch."""
    tile, programs = tuning.latent_tile(spec, target, shapes.T, shapes.S, TILES)
    grouped = in_groups(spec, tile.block_m)
    division = tuning.division(tile.block_m, shapes.S, everyone=True)
    shape = tile_shape(tile, spec)
    constants = {
        "SPEC": grouped,
        "DIVISION": division,
        "TILE": shape,
        **target.overlap(),
        **tile.options(target.backend != "hip"),
    }
    launch = Launch(
        launcher_of(latent_rows_kernel, constants, target.device),
        (programs, 1, 1),
        ("T", "taken", "value_cache", "k_scale", "v_scale"),
    )
    return decode.with_merge((launch,), programs, shape, grouped, target, division)


class Place(NamedTuple):
    """Where the sums of a tile of rows go."""

    row_token: Any  # [M]
    row_head: Any  # [M]
    row_live: Any  # [M]
    part_row: Any  # [M], of the workspace
    from_start: Any  # whether this part of the unit is its first
    whole: Any  # whether it is the whole unit


@triton.jit(do_not_specialize=Numbers._fields)
def latent_rows_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step, table_stride,
    S, T,  # Numbers
    SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    numbers = Numbers(
        scale, soft_cap, window, chunk, sparse_block, local_blocks, vert_stride, first_offset, offset_step,
        table_stride, S, T,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0)
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    MASKS: tl.constexpr = SPEC.masks
    TOKENS: tl.constexpr = M // G
    r = tl.arange(0, M)
    ranges = None
    if MASKS.ranges:
        ranges = ranges_at(tensors.bidirectional_ranges, MASKS.ranges)
    batch = Batch(tensors, numbers, ranges)

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
        q_row = row_start + token
        q_0 = load_columns(tensors.query, q_row, head, row_live, 0, GROUP, SPEC, GROUP)
        q_1 = load_columns(tensors.query, q_row, head, row_live, GROUP, GROUP, SPEC, GROUP)
        q_2 = load_columns(tensors.query, q_row, head, row_live, 2 * GROUP, GROUP, SPEC, GROUP)
        q_3 = load_columns(tensors.query, q_row, head, row_live, 3 * GROUP, GROUP, SPEC, GROUP)
        q_rotated = load_columns(tensors.query, q_row, head, row_live, LATENT, ROTATED, SPEC, ROTATED)
        slopes = None
        if SPEC.logits.alibi:
            slopes = tl.load(tensors.alibi_slopes + head, mask=row_live, other=0.0)
        first_i = seq_len - q_len + first_token
        i = seq_len - q_len + token
        sees = None
        oldest = oldest_key(first_i, numbers, MASKS)
        if MASKS.ranges:
            last_i = seq_len - 1
            sees = reach_of_rows(batch, s, tl.minimum(i, last_i), MASKS)
            oldest = tl.min(sees[0], 0)
        block_table = tensors.block_tables + tl.cast(s, tl.int64) * numbers.table_stride
        offset = stripe_offset(head, numbers, MASKS)
        rows = Rows((q_0, q_1, q_2, q_3), i, sees, slopes, numbers.scale, offset)
        keys = Keys(seq_len, oldest, block_table, tensors.key_cache, rotated_columns(tensors.key_cache))
        acc_0, m, l = nothing_seen(M, GROUP, 0)
        acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
        seen_end = stop
        if MASKS.causal and MASKS.ranges == 0:  # its last row sees no later key
            last_token = tl.minimum(first_token + TOKENS, q_len)
            seen_end = tl.minimum(stop, tl.cdiv(tl.maximum(seq_len - q_len + last_token, 0), N))
        for each in range(tile, seen_end):
            seen = True
            if MASKS.sparse:
                seen = seen & (next_seen_tile(each, first_i, offset, numbers, N) == each)
            acc_0, acc_1, acc_2, acc_3, m, l = see_rows(
                acc_0, acc_1, acc_2, acc_3, m, l, rows, q_rotated, keys, each, seen, numbers, SPEC, TILE
            )
        from_start = tile == first_tile
        whole = from_start & (stop == end_tile)
        part_row = (p * 2 + tl.where(from_start, 1, 0)).to(tl.int64) * M + r
        place = Place(q_row, head, row_live, part_row, from_start, whole)
        keep_group(tensors, acc_0, m, l, place, 0, SPEC)
        keep_group(tensors, acc_1, m, l, place, 1, SPEC)
        keep_group(tensors, acc_2, m, l, place, 2, SPEC)
        keep_group(tensors, acc_3, m, l, place, 3, SPEC)
        position += stop - tile
        s, group, first_token = next_unit(s, group, first_token, q_len, K, TOKENS)
        row_start, q_len, seq_len, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, N)
        tile = first_tile


@triton.jit
def keep_group(tensors, acc, m, l, place, g: tl.constexpr, SPEC: tl.constexpr):
    """Store the sums ``[M, 128]`` of one group: to the output if the unit is whole, else as a part."""
    if SPEC.logits.sinks:
        if place.from_start:  # the first part includes the sink
            sink = tl.load(tensors.sinks + place.row_head, mask=place.row_live, other=0.0)
            acc, m, l = count_sink(acc, m, l, sink)
    result, lse2 = finish(acc, m, l)
    d = tl.arange(0, GROUP) + g * GROUP
    if place.whole:
        store_rows(tensors, result, lse2, place.row_token, place.row_head, place.row_live, d, SPEC.heads, LATENT)
    else:
        at = tensors.parts + place.part_row[:, None] * LATENT + d[None, :]
        tl.store(at, result, mask=place.row_live[:, None])
        tl.store(tensors.part_lse + place.part_row, lse2, mask=place.row_live)


@triton.jit
def see_rows(
    acc_0, acc_1, acc_2, acc_3,  # [M, 128] each
    m,
    l,
    rows,  # q has the four groups of the queries' columns
    q_rotated,  # [M, P]
    keys,  # k is the first byte, v the first rotated column
    tile,
    seen,  # whether any row sees a key of the tile
    numbers,
    SPEC: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows of the cache, as :func:`~paged_ops.lowerings.gpu.attention.latent.see_latents`."""
    DTYPE: tl.constexpr = q_rotated.dtype
    EXACT: tl.constexpr = q_rotated.dtype == tl.float32
    N: tl.constexpr = TILE.N
    FORMAT: tl.constexpr = SPEC.storage.format
    j = tile * N + tl.arange(0, N)
    live = j < keys.seq_len
    if SPEC.masks.window or SPEC.masks.chunk:
        live = live & (j >= keys.oldest)
    if SPEC.masks.sparse:
        live = live & seen
    if SPEC.B % N == 0:  # a tile lies in one block
        exists = tile * N < keys.seq_len
        block = tl.load(keys.block_table + (tile * N // SPEC.B) * SPEC.table, mask=exists, other=0)
    else:
        block = tl.load(keys.block_table + (j // SPEC.B) * SPEC.table, mask=live, other=0)
    offset = j % SPEC.B
    place = block.to(tl.int64) * SPEC.v_side.n + offset.to(tl.int64) * SPEC.v_side.b
    row = keys.k + place
    c_0 = load_group(row, live, 0, FORMAT, DTYPE)
    c_1 = load_group(row, live, 1, FORMAT, DTYPE)
    c_2 = load_group(row, live, 2, FORMAT, DTYPE)
    c_3 = load_group(row, live, 3, FORMAT, DTYPE)
    scale = scales_of(row)
    s_0 = tl.load(scale, mask=live, other=0.0)[None, :]
    s_1 = tl.load(scale + 1, mask=live, other=0.0)[None, :]
    s_2 = tl.load(scale + 2, mask=live, other=0.0)[None, :]
    s_3 = tl.load(scale + 3, mask=live, other=0.0)[None, :]
    at = keys.v + place[:, None] // 2 + tl.arange(0, ROTATED)[None, :]
    rotated = tl.load(at, mask=live[:, None], other=0.0).to(DTYPE)
    qk = dot_keys(rows.q[0], c_0) * s_0
    qk += dot_keys(rows.q[1], c_1) * s_1
    qk += dot_keys(rows.q[2], c_2) * s_2
    qk += dot_keys(rows.q[3], c_3) * s_3
    qk += dot_keys(q_rotated, rotated)
    slopes, sees = rows.slopes, rows.sees
    offset_of_row = None
    if slopes is not None:
        slopes = slopes[:, None]
    if SPEC.masks.sparse:
        offset_of_row = rows.offset[:, None]
    if sees is not None:
        sees = (sees[0][:, None], sees[1][:, None])
    across = Rows(None, rows.i[:, None], sees, slopes, rows.factor, offset_of_row)
    p, decay, m, l = weigh(qk, m, l, across, j[None, :], live[None, :], numbers, SPEC, True, EXACT)
    acc_0 = add_group(acc_0, decay, p, s_0, c_0)
    acc_1 = add_group(acc_1, decay, p, s_1, c_1)
    acc_2 = add_group(acc_2, decay, p, s_2, c_2)
    acc_3 = add_group(acc_3, decay, p, s_3, c_3)
    return acc_0, acc_1, acc_2, acc_3, m, l


@triton.jit
def load_group(row, live, g: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """``[N, 128]`` numbers of a group, exactly, without their scales; 0 where a token is not live."""
    if FORMAT == 0:
        HALF: tl.constexpr = GROUP // 2
        at = row.to(tl.pointer_type(tl.int16))[:, None] + (tl.arange(0, HALF) + g * HALF)[None, :]
        even, odd = widen_pairs(tl.load(at, mask=live[:, None], other=0), True)
        return tl.reshape(tl.join(even.to(DTYPE), odd.to(DTYPE)), (row.shape[0], GROUP))
    else:
        at = row[:, None] + (tl.arange(0, GROUP) + g * GROUP)[None, :]
        stored = tl.load(at, mask=live[:, None], other=0)
        return decode_fp8(stored, FORMAT).to(DTYPE)


@triton.jit
def add_group(acc, decay, p, scale, c):
    """``acc * decay + (p * scale) c`` of weights ``[M, N]``, scales ``[1, N]`` and numbers ``[N, 128]``."""
    if c.dtype == tl.float16:
        largest = tl.maximum(tl.max(scale, 1), SMALLEST)[:, None]
        return acc * decay + tl.dot((p * (scale / largest)).to(tl.float16), c) * largest
    elif c.dtype == tl.float32:
        return tl.dot(p * scale, c, acc * decay, input_precision="ieee")
    else:
        return tl.dot((p * scale).to(c.dtype), c, acc * decay)
