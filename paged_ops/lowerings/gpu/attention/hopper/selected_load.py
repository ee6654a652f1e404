"""The warps of selected.py that copy the keys of a list to shared memory.

Letters: as in that module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from paged_ops.lowerings.gpu.attention.hopper import latent, ring
from paged_ops.lowerings.gpu.attention.hopper import latent_roles as roles
from paged_ops.lowerings.gpu.attention.hopper.latent import KEY_BYTES
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts
from paged_ops.lowerings.gpu.attention.shared import masks
from paged_ops.lowerings.gpu.fp8 import widen_fp8
from paged_ops.lowerings.gpu.gluon_names import load_async, load_box
from paged_ops.lowerings.gpu.scaled_rows import GROUP, rotated_columns, scales_of

LATENT = gl.constexpr(latent.LATENT)


class Token(NamedTuple):
    """The sequence of a token, and the token's place in it."""

    block_table: Any
    seq_len: Any  # 0 if the row is padding
    i: Any  # its position


@gluon.jit
def token_at(t, batch, DIVISION: gl.constexpr, WARPS: gl.constexpr):
    """:class:`Token` of row t. All loads are under way at once."""
    tensors, S = batch.tensors, batch.numbers.S
    TIMES: gl.constexpr = DIVISION.times
    s, seq_len, end = t * 0, t * 0, t * 0
    for n in gl.static_range(TIMES):
        s_ = n * DIVISION.at_once + gl.arange(0, DIVISION.at_once, gl.BlockedLayout([1], [32], [WARPS], [0]))
        start_ = gl.load(tensors.query_start_loc + s_, mask=s_ < S, other=0)
        end_ = gl.load(tensors.query_start_loc + s_ + 1, mask=s_ < S, other=0)
        len_ = gl.load(tensors.seq_lens + s_, mask=s_ < S, other=0)
        own = (start_ <= t) & (t < end_)
        s += gl.sum(gl.where(own, s_, 0), 0)
        seq_len += gl.sum(gl.where(own, len_, 0), 0)
        end += gl.sum(gl.where(own, end_, 0), 0)
    block_table = tensors.block_tables + s.to(gl.int64) * batch.numbers.table_stride
    return Token(block_table, seq_len, seq_len - end + t)


@gluon.jit
def positions(entries, tile, x, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """The positions of the keys ``x [N]`` of a tile of a list; negative for padding."""
    BLOCK: gl.constexpr = SPEC.masks.selection.block
    KEYS: gl.constexpr = SPEC.masks.selection.entries * BLOCK
    LARGEST: gl.constexpr = 2147483647 // BLOCK - 1  # a larger entry selects nothing, and must not overflow
    x += tile * SHAPE.N
    entry = gl.load(entries + x // BLOCK, mask=x < KEYS, other=-1)
    return gl.maximum(gl.minimum(entry, LARGEST), -1) * BLOCK + x % BLOCK


@gluon.jit
def blocks_of(j, token, batch, SPEC: gl.constexpr):
    """Which of the keys ``j [N]`` a token sees, and their block ids."""
    MASKS: gl.constexpr = SPEC.masks
    live = masks.keep_in_order(token.i, j, (j >= 0) & (j < token.seq_len), batch.numbers, MASKS)
    return live, gl.load(token.block_table + j // SPEC.B * SPEC.table, mask=live, other=0)


@gluon.jit
def load_part(
    part, counts, args, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Load the tiles of a part, and the query rows of its unit. Lists are read two tiles ahead, block ids one."""
    n, at, _ = counts
    N: gl.constexpr = SHAPE.N
    SIDE: gl.constexpr = SPEC.v_side
    SCALED: gl.constexpr = SPEC.storage.row_scales
    WIDTH: gl.constexpr = 1 if SCALED else 2  # bytes of a number of the cache
    WARPS: gl.constexpr = SHAPE.loaders
    # Four threads for a row store 32 bytes each without bank conflicts, and have fewer scales; with few query rows,
    # whose rows are spread over more warps, eight are faster.
    ROWS: gl.constexpr = 8 if SCALED and not SHAPE.few else 4
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // WIDTH], [ROWS, 32 // ROWS], [WARPS, 1], [1, 0])
    x = gl.arange(0, N, gl.SliceLayout(1, layout))
    entries = batch.tensors.selected_keys + part.row_start.to(gl.int64) * SPEC.masks.selection.entries
    j = positions(entries, part.tile, x, SPEC, SHAPE)
    next_j = positions(entries, part.tile + 1, x, SPEC, SHAPE)
    token = token_at(part.row_start, batch, DIVISION, WARPS)
    live, block = blocks_of(j, token, batch, SPEC)
    for t in range(part.count):
        rows = batch.tensors.key_cache + block.to(gl.int64) * SIDE.n + (j % SPEC.B).to(gl.int64) * SIDE.b
        now = live
        loaded = ()
        if SCALED:
            loaded = load_numbers(rows, now)
        j = next_j
        next_j = positions(entries, part.tile + t + 2, x, SPEC, SHAPE)
        live, block = blocks_of(j, token, batch, SPEC)
        ring.wait_empty(shared.ring, at)
        place = ring.stage_of(shared.ring, at)
        if SCALED:
            copy_columns(rotated_columns(rows), now, shared.rotated.index(place))
        else:
            copy_columns(rows + LATENT, now, shared.rotated.index(place))
            copy_columns(rows, now, shared.latents.index(place))
        async_copy.mbarrier_arrive(ring.full_of(shared.ring, at), increment_count=False)
        if SCALED:
            store_numbers(loaded, shared.latents.index(place))
        shared.seen.index(place).store(now.to(gl.int8))
        ring.fill(shared.ring, at)
        if t == 0:  # the last unit's query rows may still be read
            load_rows(args, part, n, shared, SPEC, SHAPE)
        at += 1
    return Counts(n + 1, at, counts.messages)


@gluon.jit
def copy_columns(rows, live, to):
    """Begin to copy columns of keys ``[N]`` to shared memory, from these addresses on; zeros if not live."""
    of: gl.constexpr = rows.type.layout.parent
    layout: gl.constexpr = gl.BlockedLayout([1, 8], of.threads_per_warp, of.warps_per_cta, [1, 0])
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    live = gl.convert_layout(live, gl.SliceLayout(1, layout))
    columns = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    load_async(to, rows[:, None] + columns[None, :], mask=live[:, None])


@gluon.jit
def load_numbers(rows, live):
    """Begin to load the numbers of rows with scales to registers. Returns them and the scales, by groups of columns."""
    columns = gl.arange(0, GROUP, gl.SliceLayout(0, rows.type.layout.parent))
    made: gl.tuple = ()
    for g in gl.static_range(LATENT // GROUP):
        numbers = gl.load(rows[:, None] + (g * GROUP + columns)[None, :], mask=live[:, None], other=0.0)
        made += (numbers, gl.load(scales_of(rows) + g, mask=live, other=0.0))
    return made


@gluon.jit
def store_numbers(loaded, to):
    """Store what :func:`load_numbers` loaded, times the scales."""
    for g in gl.static_range(LATENT // GROUP):
        numbers = widen_fp8(loaded[2 * g]).to(gl.float32) * loaded[2 * g + 1][:, None]
        to.slice(g * GROUP, GROUP, dim=1).store(numbers.to(to.dtype))


@gluon.jit
def load_rows(desc, part, n, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Begin to load the query rows of the program's n-th unit."""
    CHUNKS: gl.constexpr = LATENT // 64
    ring.wait_empty(shared.q_ring, n)
    ring.expect(shared.q_ring, n, SHAPE.M * KEY_BYTES)
    full, place, row = ring.full_of(shared.q_ring, n), ring.stage_of(shared.q_ring, n), roles.query_row(part, SPEC)
    load_box(desc, [row, LATENT], full, shared.q_rotated.index(place))
    for chunk in gl.static_range(CHUNKS):
        load_box(desc, [row, chunk * 64], full, shared.q_chunks.index(place * CHUNKS + chunk))
