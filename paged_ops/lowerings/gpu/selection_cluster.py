"""The second kernel of the indexer on Hopper, for few lists: a thread block cluster selects the best k of one list.

What selection.py says holds here too. All programs of a cluster find the same bound and the same chunks that reach it.
Each searches its share of these chunks, equal in number, for entries that reach the bound, and leaves their positions
in the workspace. The last program then finds the k-th largest of what all have left. With at most k chunks there is no
bound, and the last program searches all entries alone.

A search guesses where k numbers are above as if the logarithm of how many are above were linear, and else halves the
interval: so about 5 steps do where halving takes 13.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.selection import ALWAYS, NEVER, NUMBERS, running_sums, sees, sequence_of
from paged_ops.lowerings.gpu.target import Target

MOST_PROGRAMS, INTERPRETER_PROGRAMS = 8, 1  # of a list; 8 is the most that every GPU with clusters allows
REGISTERS = 128  # per thread
RUN = tl.constexpr(4)  # entries of a thread that are adjacent
GUESSES = tl.constexpr(9)  # steps of a search of which two of three guess; all others halve
ALL_HAVE_WRITTEN = tl.constexpr("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 $0, $1;")


def programs(lists: int, chunk: int, bounded: bool, target: Target) -> int:
    """How many programs select from a list: as many as have a multiprocessor each, or 1, where select_kernel serves.
    ``bounded``: whether a list may have more than k chunks."""
    if not bounded or chunk < RUN.value:
        return 1
    if target.backend == "interpreter":
        return INTERPRETER_PROGRAMS
    most = min(MOST_PROGRAMS, target.processors // lists) if target.has_hopper_gluon else 1
    return 1 << most.bit_length() - 1 if most else 1


def constants(programs: int, at_once: int, interpreter: bool) -> dict[str, Any]:
    """The constants of the kernel that select_kernel has not, and the options of its launch."""
    more = {} if interpreter else {"maxnreg": REGISTERS}
    return {"PROGRAMS": programs, "CLUSTER": not interpreter, "FOUND": at_once // 2, **more}


@triton.jit(do_not_specialize=NUMBERS)
def select_in_cluster_kernel(
    tensors,  # Pointers
    scale, S, table_stride, first, stop, width, k,  # NUMBERS
    SPEC: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, CLUSTER: tl.constexpr,
    AT_ONCE: tl.constexpr, FOUND: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One list per PROGRAMS programs. Without CLUSTER (in the interpreter) they run one after the other."""
    CHUNK: tl.constexpr = TILE.CHUNK
    G: tl.constexpr = SPEC.heads if SPEC.per_head else 1
    rank, list_ = tl.program_id(0) % PROGRAMS, (tl.program_id(0) // PROGRAMS).to(tl.int64)
    t = first + tl.program_id(0) // PROGRAMS // G
    s = sequence_of(t, tensors.query_start_loc, S, TILE.S_AT_ONCE)
    count = tl.full((), 0, tl.int32)
    if s < S:
        count = tl.cdiv(sees(t, s, tensors, SPEC.causal)[1], SPEC.block)
    if PDL:
        gdc_wait()
    tile = list_ * (width // TILE.E)  # its first; as factors the sizes of a tile tell what loads are aligned to
    scores, listed = tensors.scores + tile * TILE.E, tensors.listed + tile * TILE.E
    maxima, chosen = tensors.maxima + tile * (TILE.E // CHUNK), tensors.chosen + tile * (TILE.E // CHUNK)
    counts = tensors.counts + list_ * PROGRAMS
    out = tensors.selected + (first.to(tl.int64) * G + list_) * k
    at = (tl.arange(0, SCAN // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    is_last = rank == PROGRAMS - 1
    chunks = tl.cdiv(count, CHUNK)
    if count <= k:
        if is_last:
            for x in range(0, k, SCAN):
                tl.store(out + x + at, tl.where(x + at < count, x + at, -1), mask=x + at < k)
    elif chunks <= k:
        if is_last:
            numbers, e = numbers_at(0, count, scores, listed, counts, 0, AT_ONCE, CHUNK, 0)
            least, most = limits(numbers, count, scores, AT_ONCE, SCAN)
            select(numbers, e, count, scores, listed, counts, 0, out, k, least, most, AT_ONCE, SCAN, CHUNK, 0)
    else:
        largest, _ = numbers_at(0, chunks, maxima, listed, counts, 0, AT_ONCE, CHUNK, 0)
        least, most = limits(largest, chunks, maxima, AT_ONCE, SCAN)
        bound, kept, _ = search(
            largest, chunks, maxima, listed, counts, 0, k, k // 16, least, most, AT_ONCE, SCAN, CHUNK, 0
        )
        begin, stop_at = share(kept, rank, PROGRAMS), share(kept, rank + 1, PROGRAMS)
        list_chunks(largest, maxima, chosen, chunks, bound, begin, stop_at, AT_ONCE, SCAN)
        tl.debug_barrier()
        n = list_entries(scores, chosen, listed, count, bound, begin, stop_at, SCAN, CHUNK)
        tl.store(counts + rank, n)
        if CLUSTER:
            tl.inline_asm_elementwise(ALL_HAVE_WRITTEN, "=r,r", [rank], tl.int32, is_pure=False, pack=1)
        if is_last:
            n = tl.sum(tl.load(counts + tl.arange(0, PROGRAMS)), 0)
            found, of = numbers_at(0, n, scores, listed, counts, kept, FOUND, CHUNK, PROGRAMS)
            select(found, of, n, scores, listed, counts, kept, out, k, bound, most, FOUND, SCAN, CHUNK, PROGRAMS)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel overwrites the workspace


@triton.jit
def share(kept, rank, PROGRAMS: tl.constexpr):
    """The first of the kept chunks that a program searches."""
    return (kept.to(tl.int64) * rank // PROGRAMS).to(tl.int32)


@triton.jit
def numbers_at(x, n, values, listed, counts, kept, SIZE: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr):
    """SIZE of n values from the x-th on, ``[SIZE / RUN, RUN]``, and their positions. With PROGRAMS the values at the
    positions that these have left."""
    p = x + (tl.arange(0, SIZE // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    e = p
    if PROGRAMS > 0:
        place, from_ = p, tl.full((), 0, tl.int32)  # the first entry of a program
        for rank in tl.static_range(PROGRAMS):
            place = tl.where(p >= from_, p + (share(kept, rank, PROGRAMS) * CHUNK - from_), place)
            from_ += tl.load(counts + rank)
        e = tl.load(listed + place, mask=p < n, other=0)
    return tl.load(values + e, mask=p < n, other=NEVER), e


@triton.jit
def limits(numbers, n, values, AT_ONCE: tl.constexpr, SCAN: tl.constexpr):
    """The smallest and the largest of n values, of which ``numbers`` are the first."""
    at = (tl.arange(0, SCAN // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    p = (tl.arange(0, AT_ONCE // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    largest, smallest = tl.max(numbers, 1), tl.min(tl.where(p < n, numbers, ALWAYS), 1)
    largest, smallest = tl.max(largest, 0), tl.min(smallest, 0)
    if n > AT_ONCE:
        high, low = tl.full((SCAN // RUN,), NEVER, tl.int32), tl.full((SCAN // RUN,), ALWAYS, tl.int32)
        for x in range(AT_ONCE, n, SCAN):
            number = tl.load(values + x + at, mask=x + at < n, other=NEVER)
            high = tl.maximum(high, tl.max(number, 1))
            low = tl.minimum(low, tl.min(tl.where(x + at < n, number, ALWAYS), 1))
        largest, smallest = tl.maximum(largest, tl.max(high, 0)), tl.minimum(smallest, tl.min(low, 0))
    return smallest, largest


@triton.jit
def search(
    numbers, n, values, listed, counts, kept, k, slack, least, most,
    AT_ONCE: tl.constexpr, SCAN: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The k-th largest of n numbers from ``least`` to ``most``, or a smaller number that k to k + ``slack`` of them
    reach. Also, how many reach it, and a number that is at most how many are above it: the same, if more than k +
    ``slack`` reach it."""
    reached, above = n, tl.full((), 0, tl.int32)
    target = tl.log2(k.to(tl.float32) + tl.maximum(slack, 1).to(tl.float32) * 0.5)
    log_reached, log_above = tl.log2(n.to(tl.float32)), tl.full((), -1.0, tl.float32)
    guesses = tl.full((), GUESSES, tl.int32)
    while (least < most) & (reached > k + slack):
        inside = (most - least).to(tl.uint32, bitcast=True)
        ahead = (inside - 1) >> 1
        if (guesses > 0) & (guesses % 3 != 0):
            part = (log_reached - target) / (log_reached - log_above)
            ahead = tl.minimum((inside.to(tl.float32) * part).to(tl.uint32), inside - 1)
        middle = least + 1 + ahead.to(tl.int32, bitcast=True)
        reach = tl.sum(tl.sum((numbers >= middle).to(tl.int32), 1), 0)
        if n > AT_ONCE:
            more = tl.zeros((SCAN // RUN,), tl.int32)
            for x in range(AT_ONCE, n, SCAN):
                number, _ = numbers_at(x, n, values, listed, counts, kept, SCAN, CHUNK, PROGRAMS)
                more += tl.sum((number >= middle).to(tl.int32), 1)
            reach += tl.sum(more, 0)
        log_reach = tl.log2(tl.maximum(reach.to(tl.float32), 0.5))
        if reach < k:
            most, above, log_above = middle - 1, reach, log_reach
        else:
            least, reached, log_reached = middle, reach, log_reach
        guesses -= 1
    return least, reached, above


@triton.jit
def list_chunks(
    numbers, maxima, chosen, chunks, bound, begin, stop, AT_ONCE: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    """List those chunks that reach the bound, from the ``begin``-th to before the ``stop``-th."""
    at = (tl.arange(0, SCAN // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    p = (tl.arange(0, AT_ONCE // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    kept = list_some(numbers, p, p < chunks, chosen, bound, begin, stop, tl.full((), 0, tl.int32))
    for x in range(AT_ONCE, chunks, SCAN):
        number = tl.load(maxima + x + at, mask=x + at < chunks, other=NEVER)
        kept = list_some(number, x + at, x + at < chunks, chosen, bound, begin, stop, kept)


@triton.jit
def list_some(numbers, p, exists, chosen, bound, begin, stop, kept):
    keep = exists & (numbers >= bound)
    until, total = running_sums(keep.to(tl.int32))
    place = kept + until - 1
    tl.store(chosen + place, p, mask=keep & (place >= begin) & (place < stop))
    return kept + total


@triton.jit
def list_entries(
    scores, chosen, listed, count, bound, begin, stop, SCAN: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """List the entries of these chunks that reach the bound, from ``listed[begin * CHUNK]`` on. Returns how many. The
    entries of a scan are loaded one scan ahead, and their chunks two."""
    n = tl.full((), 0, tl.int32)
    first, end = begin * CHUNK, stop * CHUNK
    chunk = chunks_at(first, end, chosen, SCAN, CHUNK)
    order = entries_at(first, end, chunk, scores, count, SCAN, CHUNK)
    next_chunk = chunks_at(first + SCAN, end, chosen, SCAN, CHUNK)
    for x in range(first, end, SCAN):
        next_order = entries_at(x + SCAN, end, next_chunk, scores, count, SCAN, CHUNK)
        after = chunks_at(x + 2 * SCAN, end, chosen, SCAN, CHUNK)
        e = entries_of(x, chunk, SCAN, CHUNK)
        keep = (order >= bound) & (e < count) & (x + (tl.arange(0, SCAN // RUN) * RUN)[:, None] < end)
        until, total = running_sums(keep.to(tl.int32))
        tl.store(listed + first + n + until - 1, e, mask=keep)
        n += total
        chunk, order, next_chunk = next_chunk, next_order, after
    return n


@triton.jit
def chunks_at(x, end, chosen, SCAN: tl.constexpr, CHUNK: tl.constexpr):
    runs = x + tl.arange(0, SCAN // RUN) * RUN
    return tl.load(chosen + runs // CHUNK, mask=runs < end, other=0)


@triton.jit
def entries_of(x, chunk, SCAN: tl.constexpr, CHUNK: tl.constexpr):
    runs = x + tl.arange(0, SCAN // RUN) * RUN
    return (chunk * CHUNK + runs % CHUNK)[:, None] + tl.arange(0, RUN)[None, :]


@triton.jit
def entries_at(x, end, chunk, scores, count, SCAN: tl.constexpr, CHUNK: tl.constexpr):
    exists = (x + tl.arange(0, SCAN // RUN) * RUN < end)[:, None]
    e = entries_of(x, chunk, SCAN, CHUNK)
    return tl.load(scores + e, mask=exists & (e < count), other=NEVER)


@triton.jit
def select(
    numbers, e, n, scores, listed, counts, kept, out, k, least, most,
    AT_ONCE: tl.constexpr, SCAN: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the positions of the k largest of n numbers. Those above the k-th largest are taken, and of those equal to
    it the first."""
    kth, _, above = search(
        numbers, n, scores, listed, counts, kept, k, k * 0, least, most, AT_ONCE, SCAN, CHUNK, PROGRAMS
    )
    p = (tl.arange(0, AT_ONCE // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    written, equal = write(numbers, e, p < n, kth, k * 0, k - above, out)
    for x in range(AT_ONCE, n, SCAN):
        more, e_ = numbers_at(x, n, scores, listed, counts, kept, SCAN, CHUNK, PROGRAMS)
        at = x + (tl.arange(0, SCAN // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
        written, equal = write(more, e_, at < n, kth, written, equal, out)


@triton.jit
def write(numbers, e, exists, kth, written, equal, out):
    """Write the positions ``e`` of numbers that are taken, of those equal to ``kth`` at most ``equal``."""
    is_above, is_equal = exists & (numbers > kth), exists & (numbers == kth)
    until, total = running_sums(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16))  # two counts
    take = is_above | (is_equal & ((until >> 16) <= equal))
    place = written + (until & 0xFFFF) + tl.minimum(until >> 16, equal) - 1
    tl.store(out + place, e, mask=take)
    taken = tl.minimum(total >> 16, equal)
    return written + (total & 0xFFFF) + taken, equal - taken
