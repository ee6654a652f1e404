"""Batch-invariant attention on Hopper (sm_90) in Gluon, with the roles of dense.py: decodes and prompts in one kernel.

As in triton/invariant.py, keys are cut into segments at fixed positions, each is computed from nothing, and the
segments of a row are folded in one order: here from the last to the first, the order in which tiles are loaded.
Segments have 1024 or 4096 keys, and more in long sequences: see :func:`segment_of` and ``segment_tiles``.

An item is a tile of query rows of one key/value head. If a sequence has few rows, an item is one segment of it, so that
the segments of a long sequence go to all multiprocessors; the item's result is the state of its segment, and
``invariant_states_kernel`` folds the states. Otherwise the consumer folds the segments: sums of the segments so far are
in the workspace, in L2, as registers and shared memory are full. Whether segments are items may change with the batch;
it changes no bit, as the same operations follow each other for each row. Programs take items by a counter.
With prompts and many sequences, a decoder in each program computes the segments of decodes: invariant_mixed.py.
Decodes alone have a kernel that multiplies keys by query rows: invariant_few.py.

Each row takes the same instructions in tiles of 64 and of 128 rows: 64 rows of one warpgroup. Multiply-adds are written
as such, and kernels are compiled without fusing others.

Caches that TMA cannot address are loaded by the producer's threads, so that they get the same bits. That is slower.
fp8 caches have a kernel of their own, of the same roles and one more, which converts tiles: invariant_fp8.py.

Letters: as in dense.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.hopper import (
    dense,
    fp8,
    invariant_decode,
    invariant_fp8,
    invariant_mixed,
    mixed,
    shares,
)
from paged_ops.lowerings.gpu.attention.hopper import invariant_few as few_rows
from paged_ops.lowerings.gpu.attention.hopper.dense import HopperShape, Shared, shared_memory
from paged_ops.lowerings.gpu.attention.hopper.head_chunks import WARPGROUP
from paged_ops.lowerings.gpu.attention.hopper.invariant_items import scheduler
from paged_ops.lowerings.gpu.attention.hopper.invariant_roles import consumer
from paged_ops.lowerings.gpu.attention.hopper.launch import (
    PARTS,
    Described,
    HopperLaunch,
    aligned_rows,
    contiguous_rows,
)
from paged_ops.lowerings.gpu.attention.hopper.loader import load_tiles
from paged_ops.lowerings.gpu.attention.hopper.ring import begin_kernel, signal_of
from paged_ops.lowerings.gpu.attention.hopper.segments import Cuts, fold_weights, segments_of
from paged_ops.lowerings.gpu.attention.hopper.softmax import LEAST, normaliser
from paged_ops.lowerings.gpu.attention.shared.tile import LN2, Batch, store_padding
from paged_ops.lowerings.gpu.launch import Choice, Grid, Launch, Launches, launcher_of
from paged_ops.lowerings.gpu.spec import Division, Numbers, Pointers, Shapes, Spec, TileShape, not_applied
from paged_ops.lowerings.gpu.target import Target

SIZES = (64, 64), (128, 128)  # head sizes that were run on a GPU
SEGMENT, SHORTEST, FEW_HEADS = 4096, 1024, 4  # keys, keys, key/value heads: see segment_of
SEGMENTS, FEWEST_SEGMENTS = 128, 16  # of a long row, at most: in all key/value heads together, about, and in one
LEAD = 8  # Plan.lead
# Of invariant_decode_kernel and invariant_few_kernel: the most query rows; and, of the first, the programs per
# multiprocessor if sequences are many.
MOST_FEW, PROGRAMS = 16, 2
WORKSPACE = 16 << 20  # of states of segments, in float32s
COUNTERS = 4
NOTHING = tl.constexpr(0xFF800000)  # a pair of -inf and 0.0
# Of invariant_states_kernel, see fold_of.
FEW_UNITS, AT_ONCE, AT_ONCE_OF_FEW, UNTESTED = 32, 8, 32, 8
MERGING = 32  # programs per multiprocessor
# Names of spec.needs.
APPLIES = frozenset({"causal", "lse", "batch_invariant", "float16", "bfloat16"})
APPLIES |= {"k_scale", "v_scale", "float8_e4m3fn", "float8_e5m2"}


class Plan(NamedTuple):
    """How the sequences of a batch become items."""

    division: Division
    cuts: Cuts
    lead: int  # tiles that are still to be loaded when the next item is taken
    # The most packed query rows of the sequences that decoders compute (invariant_mixed.py), or that
    # invariant_decode_kernel serves.
    decoder_rows: int = 0
    everyone: bool = False  # whether invariant_decode_kernel serves all other sequences, too


class Fold(NamedTuple):
    """What a program of invariant_states_kernel folds at once."""

    elements: int  # of a state, row after row
    at_once: int  # states that are loaded before the first is needed
    untested: int  # the states among these that are folded without a test whether they exist


def serves(spec: Spec, target: Target) -> list[str]:
    """The reasons why it does not serve these calls; empty if it does. They are the same for all calls whose rows must
    have equal bits: none is about the layout of the cache or of the queries."""
    key, value = spec.k_side, spec.v_side
    sizes, kinds = (key.size, value.size), (spec.dtype, *fp8.STORED)
    against = {
        "batch_invariant: not asked for": not spec.batch_invariant,
        f"head sizes: expected one of {SIZES}, got {sizes}": sizes not in SIZES,
        f"dtype: expected float16 or bfloat16, got {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"cache_dtype: expected one of {kinds}, got {spec.storage.dtype}": spec.storage.dtype not in kinds,
        "k_scale: expected one for all heads": bool(key.scale),
        "v_scale: expected one for all heads": bool(value.scale),
        f"num_heads: expected at most {WARPGROUP.value} per key/value head, got {spec.G}": spec.G > WARPGROUP.value,
    }
    return not_applied(spec, APPLIES) + [reason for reason, holds in against.items() if holds]


def plan(spec: Spec, target: Target, shapes: Shapes) -> Choice | str:
    """The choice for a batch; the reason if another kernel should serve it."""
    if not shapes.numbers.scale > 0:
        return "scale: expected a positive number"
    rows, same = tuning.rows_of(shapes.T, shapes.S, spec.G)
    M = WARPGROUP.value if same or shapes.T <= shapes.S else 2 * WARPGROUP.value
    if same and shapes.T > shapes.S:  # few numbers of rows, so that few kernels serve all such batches
        rows = next((most for most in (8, MOST_FEW) if rows <= most and is_fp8(spec)), WARPGROUP.value)
    division = tuning.division(min(rows, WARPGROUP.value), shapes.S)
    loads = loads_of(spec, shapes)
    prompts = loads == 2 and M > WARPGROUP.value and not is_fp8(spec)
    decoders = prompts and invariant_mixed.takes(spec, target, shapes.T, shapes.S)
    return M, loads, division._replace(times=0), shapes.S, decoders


def loads_of(spec: Spec, shapes: Shapes) -> int:
    """How the cache can be loaded: 2 by TMA, 1 by asynchronous copies of 16 bytes, 0 by elements."""
    sides = spec.k_side, spec.v_side
    whole = all(side.x == side.size and side.d == 1 for side in sides)
    aligned = 16 // spec.storage.dtype.itemsize
    copied = whole and shapes.aligned and not any(n % aligned for side in sides for n in (side.n, side.b, side.k))
    if is_fp8(spec):
        if not copied:  # also rows of an odd number of bytes
            return 0
        spec = fp8.in_pairs(spec)
        sides = spec.k_side, spec.v_side
    if whole and all(dense._matrix(side, spec) for side in sides) and dense.has_form(spec, shapes):
        return 2
    return int(copied)


def decodes(spec: Spec, rows: int) -> bool:
    """Whether invariant_decode_kernel serves sequences of at most ``rows`` rows, if it serves the batch."""
    return is_fp8(spec) and rows <= MOST_FEW


def are_many(spec: Spec, S: int, target: Target) -> bool:
    """Whether sequences have an item for each multiprocessor."""
    return S * spec.K >= target.processors


def decode_launch(
    spec: Spec, read: Spec, plan: Plan, rows: int, loads: int, described: list[Described], programs: int,
    target: Target, counter: str,
) -> Launch:  # fmt: skip
    """The launch of invariant_decode_kernel, with ``programs`` programs per multiprocessor."""
    shaped = spec if loads == 2 else addressable(spec)
    shape, of_bytes = invariant_decode.shapes_of(shaped, max(rows, 8), programs, target.shared_memory)
    constants: dict[str, Any] = {"SPEC": read, "PAIRS": invariant_fp8.pairs_of(read), "PLAN": plan, "SHAPE": shape}
    constants |= {"BYTES": of_bytes, "LOADS": loads, "enable_fp_fusion": False, **target.overlap()}
    # For 8 warps, as the warps of a role are rounded up to four; the consumer gets the registers that the others leave.
    constants |= {"num_warps": 4, "maxnreg": min(256 // programs, 255)}
    launcher = launcher_of(invariant_decode.invariant_decode_kernel, constants, target.device, (counter,))
    takes = (*PARTS, "k_scale", "v_scale", "key_cache", "value_cache", counter)
    query = contiguous_rows if are_copied(spec) else aligned_rows
    return HopperLaunch(launcher, (programs * target.processors, 1, 1), takes, described, query)


def is_fp8(spec: Spec) -> bool:
    return spec.storage.dtype in fp8.STORED


def segment_of(spec: Spec) -> int:
    """The keys of the shortest segments. With few heads segments are shorter, so that more multiprocessors have one."""
    return SEGMENT if spec.K >= FEW_HEADS else SHORTEST


def shape_of(spec: Spec, M: int, tma: bool, shared_memory: int) -> HopperShape:
    """The tile: 128 keys, with any number of rows."""
    if M == WARPGROUP.value:
        return shares.shape_of(spec, M, shared_memory)._replace(registers=(240, 56))
    registers = (216, 216, 40) if tma else (208, 208, 56)
    return dense.shape_of(spec, shared_memory)._replace(registers=registers)


def addressable(spec: Spec) -> Spec:
    """The spec of a cache that TMA can address."""
    side = spec.k_side._replace(x=spec.k_side.size, run=1, n=128 * spec.k_side.size, b=spec.k_side.size, k=0, d=1)
    return spec._replace(B=128, K=1, k_side=side, v_side=side)


def fold_of(units: int) -> Fold:
    """How the states of ``units`` pairs of a sequence and a key/value head are folded. A fold takes as long as its
    loads, so few units are divided among many programs."""
    return Fold(32, AT_ONCE_OF_FEW, UNTESTED) if units <= FEW_UNITS else Fold(128, AT_ONCE, UNTESTED)


def build(choice: Choice, spec: Spec, target: Target, shapes: Shapes) -> Launches:
    """The launches of a choice."""
    M, loads, division, S, decoders = choice
    Dv, P = spec.v_side.size, target.processors
    if M == WARPGROUP.value:  # the rows of a token lie together: programs read them at about one time
        P = tuning.programs_apart(spec.K, P) or P
    tma = loads == 2
    shaped = spec if tma else addressable(spec)
    described: list[Described]
    if is_fp8(spec):
        shape, of_bytes = invariant_fp8.shapes_of(shaped, M, target.shared_memory)
        described = fp8.descriptors(fp8.in_pairs(spec), shape.page) if tma else [None, None]
        division = division._replace(at_once=min(division.at_once, invariant_fp8.AT_ONCE))
    else:
        shape = shape_of(shaped, M, tma, target.shared_memory)
        described = dense.descriptors(spec, shape.page) if tma else [None] * (2 * dense.MOST_PARTS)
    assert shape.N == 128
    segment = segment_of(spec)
    rows = tuning.power_of_2(division.rows)
    span = segment * max(SEGMENTS // spec.K, FEWEST_SEGMENTS)
    cuts = Cuts(segment // shape.N, span, rows, WORKSPACE // (rows * Dv))
    alone = M == WARPGROUP.value
    many = are_many(spec, S, target)
    few = decodes(spec, rows) and (alone or many)
    everyone = few and alone
    keys_first = alone and tma and not is_fp8(spec) and rows <= MOST_FEW
    if keys_first:
        shape = few_rows.shape_of(spec, rows, target.shared_memory)
        division = division._replace(at_once=min(division.at_once, few_rows.SEQUENCES))
    decoder_rows = invariant_mixed.ROWS if decoders else rows if few else 0
    plan = Plan(division, cuts, LEAD, decoder_rows, everyone)
    programs = PROGRAMS if many else 1
    of_decodes = plan._replace(decoder_rows=0) if everyone else plan
    kernel: Any = invariant_items_kernel
    more: dict[str, Any] = {"LOADS": loads}
    scales: tuple[str, ...] = ()
    if decoders:
        kernel, shape = invariant_mixed.invariant_mixed_kernel, invariant_mixed.shape_of(shape)
        halves = invariant_mixed.decode_shape(spec, shape, target.shared_memory)
        more = {"DECODES": halves}
        described = [*filter(None, described), *mixed.chunk_descriptors(spec, halves.page)]
    elif keys_first:
        kernel, described = few_rows.invariant_few_kernel, [*filter(None, described)]
        more = {}
    read = spec
    if are_copied(spec):
        D = spec.k_side.size
        read = spec._replace(query=(spec.K * spec.G * D, D, 1))
    constants = {
        "SPEC": read,
        "PLAN": plan,
        "SHAPE": shape,
        "enable_fp_fusion": False,
        **target.overlap(),
    }
    if is_fp8(spec):
        kernel, scales = invariant_fp8.invariant_fp8_kernel, ("k_scale", "v_scale")
        e4m3 = spec.storage.dtype == torch.float8_e4m3fn
        more |= {"PAIRS": invariant_fp8.pairs_of(read), "BYTES": of_bytes, "E4M3": e4m3}
    takes = (*PARTS, *scales, *(() if tma else ("key_cache", "value_cache")))
    floats = cuts.states * rows * Dv + P * M * Dv
    size = floats + 2 * cuts.states * rows
    fold = fold_of(S * spec.K)

    def grid(numbers: Numbers) -> Grid:
        units = max(numbers.S, 1) * spec.K
        return units * max(min(rows * Dv // fold.elements, MERGING * P // units), 1), 1, 1

    def launches(counted: bool) -> tuple[Launch, ...]:
        counter = "arrived" if counted else "taken"
        others = {"taken", "arrived"} - {counter}
        before: tuple[Launch, ...] = ()
        if few:
            before = (decode_launch(spec, read, of_decodes, rows, loads, described, programs, target, counter),)
        launcher = launcher_of(kernel, {**constants, **more, "num_warps": 4}, target.device, (counter,))
        query = contiguous_rows if are_copied(spec) else aligned_rows
        mains = () if everyone else (HopperLaunch(launcher, (P, 1, 1), (*takes, counter), described, query),)
        tile = TileShape(M, shape.N, 0, Dv, 0, False)
        folded = of_decodes
        merged: dict[str, Any] = {"SPEC": spec.for_merge(), "PLAN": folded, "TILE": tile, "FOLD": fold}
        merged |= {"num_warps": 1, "maxnreg": 255, "enable_fp_fusion": False, **target.overlap()}
        without = (*others, *NOT_OF_MERGE, *(("v_scale",) if spec.v_side.scale is None else ()))
        merge = Launch(launcher_of(invariant_states_kernel, merged, target.device, without), grid, without)
        if counted:
            return *before, *mains, merge
        without = tuple(name for name in Pointers._fields if name != "taken")
        zero = Launch(launcher_of(invariant_zero_kernel, {"num_warps": 1}, target.device, without), (1, 1, 1), without)
        return zero, *before, *mains, merge

    return Launches(launches(True), (floats, size, size + COUNTERS), COUNTERS, launches(False))


def are_copied(spec: Spec) -> bool:
    """Whether query rows are copied first, as they are not whole pieces of 16 bytes."""
    return dense.are_copied(spec) or spec.query[2] != 1


NOT_OF_MERGE = "query", "key_cache", "value_cache", "block_tables", "alibi_slopes", "k_scale"


@gluon.jit(do_not_specialize=Numbers._fields)
def invariant_items_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    k_desc0, k_desc1, k_desc2, v_desc0, v_desc1, v_desc2,  # of the parts; None where there are fewer, and without TMA
    SPEC: gl.constexpr, PLAN: gl.constexpr, SHAPE: gl.constexpr, LOADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Items of all sequences. ``arrived``, or ``taken``, are the counters, which are zero."""
    numbers = Numbers(scale, soft_cap, window, chunk, table_stride, S, T)
    batch = Batch(tensors, numbers, None)
    shared = Shared(*shared_memory(tensors.query.dtype.element_ty, SPEC, SHAPE))
    ending = signal_of(SHAPE.slots)
    begin_kernel(PDL)
    descs = (k_desc0, k_desc1, k_desc2), (v_desc0, v_desc1, v_desc2)
    if SHAPE.M == WARPGROUP:
        gl.warp_specialize(
            [
                (scheduler, (batch, shared, ending, SPEC, PLAN, SHAPE)),
                (consumer, (0, batch, shared, SPEC, PLAN, SHAPE)),
                (load_tiles, (descs, batch, shared, ending, LOADS, SPEC, PLAN, SHAPE, SPEC)),
            ],
            [4, 1],
            SHAPE.registers,
        )
    else:
        gl.warp_specialize(
            [
                (scheduler, (batch, shared, ending, SPEC, PLAN, SHAPE)),
                (consumer, (0, batch, shared, SPEC, PLAN, SHAPE)),
                (consumer, (1, batch, shared, SPEC, PLAN, SHAPE)),
                (load_tiles, (descs, batch, shared, ending, LOADS, SPEC, PLAN, SHAPE, SPEC)),
            ],
            [4, 4, 1],
            SHAPE.registers,
        )


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_zero_kernel(
    tensors, scale, soft_cap, window, chunk, table_stride, S, T,
):  # fmt: skip
    """Zeroes the counters."""
    tl.store(tensors.taken + tl.arange(0, 4), 0)


@triton.jit
def load_state(pairs, parts, there):
    """Begin to load elements of a state: the maximum and the sum of weights of their rows, and the sums of values."""
    pair = tl.load(pairs, mask=there, other=NOTHING)
    part = tl.load(parts, mask=there, other=0.0)
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), part


@triton.jit(do_not_specialize=Numbers._fields)
def invariant_states_kernel(
    tensors,  # Pointers
    scale, soft_cap, window, chunk, table_stride, S, T,  # Numbers
    SPEC: tl.constexpr, PLAN: tl.constexpr, TILE: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Folds some elements of the states of one sequence and key/value head, if its segments were items. Also writes the
    rows of padding, and zeroes the counters."""
    K: tl.constexpr = SPEC.K
    G: tl.constexpr = SPEC.G
    Dv: tl.constexpr = SPEC.v_side.size
    TOKENS: tl.constexpr = TILE.M // G
    DIVISION: tl.constexpr = PLAN.division
    CUTS: tl.constexpr = PLAN.cuts
    ELEMENTS: tl.constexpr = FOLD.elements
    AT_ONCE: tl.constexpr = FOLD.at_once
    UNTESTED: tl.constexpr = FOLD.untested
    p = tl.program_id(0)
    sharing = tl.num_programs(0) // (S * K)  # programs that share a state
    unit = p // sharing
    s = unit // K
    kh = unit % K
    # All loads before any of them is needed.
    first_free = tl.load(tensors.query_start_loc + S)
    row_start = tl.load(tensors.query_start_loc + s)
    row_end = tl.load(tensors.query_start_loc + s + 1)
    seq_len = tl.load(tensors.seq_lens + s)
    q_len = row_end - row_start
    _segment, units, _whole = segments_of(q_len, seq_len, G, TOKENS, DIVISION.rows, CUTS, TILE.N)
    store_padding(tensors, first_free + p, T, tl.num_programs(0), tl.arange(0, 1), tl.arange(0, Dv), SPEC.heads, Dv)
    # Decoders store the states of sequences with one segment, too.
    folds = (units > 0) & ((units > 1) | (q_len * G <= PLAN.decoder_rows))
    before = 0  # segments of the sequences before s
    total = 0
    if folds:
        for start in range(0, S, DIVISION.at_once):
            s_ = start + tl.arange(0, DIVISION.at_once)
            live = s_ < S
            row_ = tl.load(tensors.query_start_loc + s_, mask=live, other=0)
            q_ = tl.load(tensors.query_start_loc + s_ + 1, mask=live, other=0) - row_
            _, units_, _ = segments_of(
                q_, tl.load(tensors.seq_lens + s_, mask=live, other=0), G, TOKENS, DIVISION.rows, CUTS, TILE.N
            )  # fmt: skip
            units_ = tl.where(live, units_, 0)
            total += tl.sum(units_)
            before += tl.sum(tl.where(s_ < s, units_, 0))
    of_values = 1.0
    if tensors.v_scale is not None:
        of_values = tl.load(tensors.v_scale)
    if PDL:
        # Programs that fold nothing end while the items are computed, and leave their place to others. The next kernel
        # waits for all of these programs, so it is enough that the first one waits.
        if folds | (p == 0):
            gdc_wait()
    if p == 0:
        if tensors.arrived is not None:
            tl.store(tensors.arrived + tl.arange(0, 4), 0)
    if folds & (total * K <= CUTS.states):
        for begin in range(p % sharing * ELEMENTS, q_len * (G * Dv), sharing * ELEMENTS):
            e = begin + tl.arange(0, ELEMENTS)
            row = e // Dv
            live = row < q_len * G
            acc = tl.zeros([ELEMENTS], tl.float32)
            m = acc + LEAST
            l = acc
            for newest in range(units - 1, -1, -AT_ONCE):
                place = ((before + newest) * K + kh).to(tl.int64) * CUTS.rows
                pairs = tensors.part_lse.to(tl.pointer_type(tl.int64)) + place + row
                parts = tensors.parts + place * Dv + e
                states: tl.tuple = ()
                for n in tl.static_range(AT_ONCE):  # all loads are under way before the first is needed
                    # Offsets from one place are constants, which cost no instruction.
                    to = n * (K * CUTS.rows)
                    states += (load_state(pairs - to, parts - to * Dv, live & (newest >= n)),)
                tl.debug_barrier()  # else ptxas would move the loads to their uses, one after the other
                for first in tl.static_range(0, AT_ONCE, UNTESTED):
                    if newest >= first:
                        for n in tl.static_range(first, first + UNTESTED):
                            m_part, l_part, part = states[n]
                            m_new, decay, weight = fold_weights(m, m_part)
                            takes = m_part > LEAST
                            acc = tl.where(takes, tl.fma(acc, decay, part * weight), acc)
                            l = tl.where(takes, tl.fma(l, decay, l_part * weight), l)
                            m = m_new
            share, lse2 = normaliser(m, l)
            if tensors.v_scale is not None:
                share *= of_values
            head = (row_start + row // G).to(tl.int64) * SPEC.heads + kh * G + row % G
            tl.store(tensors.out + head * Dv + e % Dv, (acc * share).to(tensors.out.dtype.element_ty), mask=live)
            if tensors.lse is not None:
                tl.store(tensors.lse + head, lse2 * LN2, mask=live & (e % Dv == 0))
    if PDL:
        gdc_launch_dependents()  # last: kernels that start now may overwrite, without waiting, all that was read
