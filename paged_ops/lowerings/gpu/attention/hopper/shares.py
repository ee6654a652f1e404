"""Attention on Hopper (sm_90) in Gluon for several query rows per key/value head: split-KV with the consumers of
dense.py.

With few query rows per sequence the kernel is memory-bound for any lengths, if all programs have equal shares. So one
program per multiprocessor takes an equal contiguous share of the key tiles of all units, as split_kernel of decode.py
does: the device counts the tiles, and one captured graph is balanced for any lengths. An item is the part of one unit
in a program's share. If that is the whole unit, the result goes to the output; other parts are merged by merge_kernel
of decode.py.

A tile has M packed query rows, 64 or 128, and one warpgroup per 64 rows. A scheduler walks over the share and
prefetches query rows one item ahead; a producer warp loads keys and values. As memory is saturated, a block id takes
longer to arrive than a tile to compute: block ids are loaded several tiles ahead. Neighbouring programs take the same
tiles of all key/value heads, so that the rows of a token, which are contiguous, are read at the same time.

Bytes of a key in bfloat16: 2 (D + Dv); FLOPs of a key: 2 M (D + Dv). At 4.45 TB/s, one multiprocessor of an H200 has
1.9 µs for a tile of 128 keys with heads of 128; both matmuls of 128 rows need 0.6 µs.

Letters: as in dense.py. Ideas: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), stream-K (Osama et al. 2023,
arXiv:2301.03598).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import dense
from paged_ops.lowerings.gpu.attention.hopper.consumer import consumer
from paged_ops.lowerings.gpu.attention.hopper.dense import BLOCK_M, HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP
from paged_ops.lowerings.gpu.attention.hopper.launch import NOT_TMA, PARTS, HopperLaunch
from paged_ops.lowerings.gpu.attention.hopper.producer import await_rows, begin_rows, prefetch_ids, producer
from paged_ops.lowerings.gpu.attention.hopper.ring import begin_kernel, fill, signal_of, stage_of
from paged_ops.lowerings.gpu.attention.hopper.work import Item, end_items, write_item
from paged_ops.lowerings.gpu.attention.hopper.work_shares import Counts, is_whole, share_of, walk
from paged_ops.lowerings.gpu.attention.shared.masks import full_tiles, oldest_key
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import share_index
from paged_ops.lowerings.gpu.attention.triton import merge
from paged_ops.lowerings.gpu.launch import Choice, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Numbers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

LEAST_ROWS = 9  # packed query rows; split_kernel has slices for fewer, which start and end faster
LEAST_OF_MANY_UNITS = 4  # with at least MANY_UNITS and heads of at least WIDE, which are purely memory-bound
MANY_UNITS, WIDE = 512, 128
LARGE_GROUP = 33  # rows, or query heads of a key/value head; split_kernel would load them again for each tile of keys
START = 128  # the cost of beginning a unit, in keys
FEW_STAGES = 3  # of 128 keys, at least: two are slower than four or five of 64
# Heads of keys and values that were run on a GPU; it compiles for all that dense.py serves.
SIZES = (64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)
# Names of spec.needs.
APPLIES = frozenset({"causal", "window", "first", "chunk", "soft_cap", "sinks", "float16", "bfloat16"})


def serves(spec: Spec, target: Target) -> list[str]:
    sizes = spec.k_side.size, spec.v_side.size
    against = [] if sizes in SIZES else [f"head sizes: expected one of {SIZES}, got {sizes}"]
    return not_applied(spec, APPLIES) + against + dense.serves_sizes(spec, dense.served_sizes())


def tile_rows(spec: Spec, T: int, S: int) -> int:
    """The rows of a tile that holds all packed query rows of a sequence, if all sequences have the same number of
    tokens; 0 if no tile does, or if the rows are too few. Sequences of other lengths are served as well."""
    tokens = max(T // S, 1) if T <= S or T % S == 0 else 0
    rows = tokens * spec.G
    # Only large groups: sequences that have many tokens may be one prompt and many decodes.
    most = BLOCK_M if spec.G >= LARGE_GROUP else WARPGROUP.value
    least = LEAST_ROWS
    if S * spec.K >= MANY_UNITS and spec.K > 1 and spec.k_side.size >= WIDE:
        least = LEAST_OF_MANY_UNITS
    if spec.masks.window or spec.masks.chunk:  # units are short, and tiles of split_kernel have fewer keys
        least = LARGE_GROUP
    return 0 if not least <= rows <= most else max(WARPGROUP.value, tuning.power_of_2(rows))


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    M = tile_rows(spec, shapes.T, shapes.S)
    if not M:
        return "too few packed query rows per sequence, too many, or of unequal numbers"
    if not dense.has_form(spec, shapes):
        return NOT_TMA
    division = tuning.by_warps(tuning.division(M, shapes.S, everyone=True))
    # Where programs may begin several units, shares count the cost.
    return M, division, 4 * shapes.S * spec.K >= target.processors


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    M, division, beginnings = choice
    shape = shape_of(spec, M, target.shared_memory)
    P = tuning.programs_apart(spec.K, target.processors)
    start = START // shape.N if beginnings else 0
    division = division._replace(aligned=1, heads_apart=P > 0, start=start)
    P = P or target.processors
    constants = {
        "SPEC": dense.read_spec(spec),
        "DIVISION": division,
        "SHAPE": shape,
        **target.overlap(),
        "num_warps": 4,
    }
    launcher, described = launcher_of(shares_kernel, constants, target.device), dense.descriptors(spec, shape.page)
    launch = HopperLaunch(launcher, (P, 1, 1), PARTS, described, dense.rows_of(spec))
    merged = TileShape(M, shape.N, 0, tuning.padded(spec.v_side.size, spec.storage.dtype.itemsize), 0, False)
    return merge.with_merge((launch,), P, merged, spec, target, division)


def shape_of(spec: Spec, M: int, shared_memory: int) -> HopperShape:
    """128 keys per tile for heads of up to 128 if FEW_STAGES fit, else 64; two tiles of query rows if two stages fit
    next to them; then as many stages as fit, so that many bytes are in flight."""
    whole = dense.shape_of(spec, shared_memory)
    D, width = spec.k_side.size, sum(whole.k.parts) + sum(whole.v.parts)
    space, rows = (shared_memory - dense.OTHERS) // spec.dtype.itemsize, M * D
    N = whole.N if width <= 256 and space - 2 * rows >= FEW_STAGES * whole.N * width else 64
    slots = 2 if space - 2 * rows >= 2 * N * width else 1
    stages = (space - slots * rows) // (N * width)
    consumer, producer = whole.registers[1:]  # with one consumer the producer gets the registers for its addresses
    registers = (consumer, consumer, producer) if M > WARPGROUP.value else (consumer, max(producer, 56))
    whole = whole._replace(stages=stages, slots=slots, row_slots=slots, registers=registers)
    return whole._replace(M=M, N=N, page=min(whole.page, N))


@gluon.jit
def publish_part(part, counts, args, batch, shared, SPEC: gl.constexpr, SHAPE: gl.constexpr):
    """Publish a part as an item, and begin to copy its query rows."""
    MASKS: gl.constexpr = SPEC.masks
    n = counts.units
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    first_i = part.seq_len - part.q_len + part.first_token
    last_i = first_i + gl.minimum(SHAPE.M // SPEC.G, part.q_len - part.first_token) - 1
    full_start, full_end, oldest = full_tiles(first_i, last_i, part.seq_len, batch.numbers, MASKS, SHAPE.N)
    if MASKS.first:  # the walk is that of all rows of the sequence
        oldest = oldest_key(part.seq_len - part.q_len, batch.numbers, MASKS)
    item = Item(
        part.kh, part.s, part.row_start, part.q_len, part.seq_len, part.first_token, part.seen, part.tile + part.seen,
        full_start, full_end, oldest,
    )  # fmt: skip
    prefetch_ids(batch, item, part.tile, SPEC, SHAPE)
    if n > 0:  # the rows of the previous item, after the loads of this one
        await_rows()
        fill(shared.rows_full, n - 1)
    write_item(shared, n, item, 4)
    slot = stage_of(shared.item_ring, n)
    place = part.program * 2 + (part.tile == part.first_tile).to(gl.int32)
    shared.places.index(slot).store(zero + gl.where(is_whole(part), -1, place))
    fill(shared.item_ring, n)  # keys can come before the query rows
    begin_rows(batch.tensors.query, item, shared.q_groups, slot, SPEC, SHAPE)
    return Counts(n + 1, counts.tiles, counts.messages)


@gluon.jit
def scheduler(share, batch, shared, SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr):
    """Publishes the items of the share, and copies their query rows."""
    n = walk(publish_part, None, batch, share, shared, SPEC, DIVISION, SHAPE).units
    if n > 0:
        await_rows()
        fill(shared.rows_full, n - 1)
    end_items(shared, n, 4)


@gluon.jit(do_not_specialize=Numbers._fields)
def shares_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc0, k_desc1, k_desc2, v_desc0, v_desc1, v_desc2,  # of the parts; None where there are fewer
    SPEC: gl.constexpr, DIVISION: gl.constexpr, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    places = gl.allocate_shared_memory(gl.int32, [SHAPE.slots, 1], mbarrier.MBarrierLayout())
    rows_full = signal_of(SHAPE.slots)
    of_all = shared_memory(tensors.query.dtype.element_ty, SPEC, SHAPE)
    shared = Shared(*of_all, places, rows_full)  # type: ignore[call-arg]
    descs = (k_desc0, k_desc1, k_desc2), (v_desc0, v_desc1, v_desc2)
    AHEAD: gl.constexpr = 32 // (SHAPE.N // SHAPE.page)  # tiles whose block ids a warp loads at once
    begin_kernel(PDL)
    share = share_of(share_index(SPEC, DIVISION), gl.num_programs(0), batch, SPEC, DIVISION, SHAPE)
    if SHAPE.M == WARPGROUP:
        gl.warp_specialize(
            [
                (scheduler, (share, batch, shared, SPEC, DIVISION, SHAPE)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (producer, (descs, batch, shared, SPEC, SHAPE, AHEAD)),
            ],
            [4, 1],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (scheduler, (share, batch, shared, SPEC, DIVISION, SHAPE)),
                (consumer, (0, batch, shared, SPEC, SHAPE)),
                (consumer, (1, batch, shared, SPEC, SHAPE)),
                (producer, (descs, batch, shared, SPEC, SHAPE, AHEAD)),
            ],
            [4, 4, 1],
            SHAPE.registers,
        )
