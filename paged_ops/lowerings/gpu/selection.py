"""The second kernel of the indexer: the best k entries of each list of scores. Letters as in indexer.py.

One program per list. A number that about k maxima of chunks reach is a bound: at least k entries reach it. The program
lists the chunks that do, and their entries that do (about 2400 of 131072 independent scores, for k =
2048 and chunks of 16), and finds the k-th largest of them. Both searches halve an interval of integers until k numbers
are above; the first AT_ONCE numbers stay in registers. What is listed is in the order of positions, and its scores
replace those that were read: entries above the k-th largest are taken, and of those equal to it the first. With at most
k chunks there is no bound, and all entries are searched, as in the worst case, where the bound excludes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.spec import Side

NUMBERS = ("scale", "S", "table_stride", "first", "stop", "width", "k")

NEVER = tl.constexpr(-(2**31))  # the order of an entry that a row does not see: below that of -inf
ALWAYS = tl.constexpr(2**31 - 1)  # of an entry that always wins


class Spec(NamedTuple):
    """What the kernels of the indexer are compiled for; one constant."""

    heads: int
    per_head: bool
    key: Side  # the index cache [N, B, Di]
    B: int
    query: tuple[int, ...]  # strides
    weights: tuple[int, ...]  # strides; (): no weights
    table: int  # stride from one block of a sequence to the next
    format: int  # of fp8 bits, see fp8.py
    relu: bool
    pool: int  # index in POOLS
    block: int  # keys of an entry
    local_blocks: int
    causal: bool
    has_scale: bool
    token_scales: bool  # whether blocks hold a scale per token
    eight_bits: bool
    paired: bool  # whether two 8-bit elements are loaded as 16 bits
    e4m3: bool  # their format, then
    weighted: bool  # whether the columns of a tile have factors
    dtypes: tuple[str, ...]  # of query, cache and weights
    by_tma: bool  # whether indexer_hopper.py serves tokens without neighbours


@triton.jit(do_not_specialize=NUMBERS)
def select_kernel(
    tensors,  # Pointers
    scale, S, table_stride, first, stop, width, k,  # NUMBERS
    SPEC: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One list."""
    if PDL:
        gdc_wait()
    CHUNK: tl.constexpr = TILE.CHUNK
    RUN: tl.constexpr = 2 if CHUNK == 2 else 4  # entries of a thread that are adjacent
    G: tl.constexpr = SPEC.heads if SPEC.per_head else 1
    list_ = tl.program_id(0).to(tl.int64)
    t = first + tl.program_id(0) // G
    s = sequence_of(t, tensors.query_start_loc, S, TILE.S_AT_ONCE)
    count = tl.full((), 0, tl.int32)
    if s < S:
        count = tl.cdiv(sees(t, s, tensors, SPEC.causal)[1], SPEC.block)
    tile = list_ * (width // TILE.E)  # its first; as factors the sizes of a tile tell what loads are aligned to
    scores, listed = tensors.scores + tile * TILE.E, tensors.listed + tile * TILE.E
    maxima = tensors.maxima + tile * (TILE.E // CHUNK)
    out = tensors.selected + (first.to(tl.int64) * G + list_) * k
    runs = tl.arange(0, SCAN // RUN) * RUN
    at = runs[:, None] + tl.arange(0, RUN)[None, :]
    if count > k:
        n = count
        chunks = tl.cdiv(count, CHUNK)
        bounded = (CHUNK > 1) & (chunks > k)
        if bounded:
            bound = kth_largest(maxima, chunks, k, k // 16, AT_ONCE, SCAN)[0]
            # What is kept replaces what was read: it is never ahead of it, and a scan waits for all threads' loads.
            kept = tl.full((), 0, tl.int32)
            for x in range(0, chunks, SCAN):
                keep = tl.load(maxima + x + at, mask=x + at < chunks, other=NEVER) >= bound
                until, total = running_sums(keep.to(tl.int32))
                tl.store(maxima + kept + until - 1, x + at, mask=keep)
                kept += total
            tl.debug_barrier()
            n = tl.full((), 0, tl.int32)
            for x in range(0, kept * CHUNK, SCAN):
                exists = x + runs < kept * CHUNK
                chunk = tl.load(maxima + (x + runs) // CHUNK, mask=exists, other=0)
                e = (chunk * CHUNK + runs % CHUNK)[:, None] + tl.arange(0, RUN)[None, :]
                order = tl.load(scores + e, mask=exists[:, None] & (e < count), other=NEVER)
                keep = order >= bound
                until, total = running_sums(keep.to(tl.int32))
                tl.store(scores + n + until - 1, order, mask=keep)
                tl.store(listed + n + until - 1, e, mask=keep)
                n += total
            tl.debug_barrier()
        kth, above = kth_largest(scores, n, k, 0, AT_ONCE, SCAN)
        equal = k - above  # of the entries that are equal to the k-th largest, those that are taken
        written = tl.full((), 0, tl.int32)
        for x in range(0, n, SCAN):
            exists = x + at < n
            order = tl.load(scores + x + at, mask=exists, other=NEVER)
            e = tl.load(listed + x + at, mask=exists & bounded, other=0)
            e = tl.where(bounded, e, x + at)
            is_above, is_equal = order > kth, exists & (order == kth)
            until, total = running_sums(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16))  # two counts
            take = is_above | (is_equal & ((until >> 16) <= equal))
            place = written + (until & 0xFFFF) + tl.minimum(until >> 16, equal) - 1
            tl.store(out + place, e, mask=take)
            taken = tl.minimum(total >> 16, equal)
            written += (total & 0xFFFF) + taken
            equal -= taken
    else:
        for x in range(0, k, SCAN):
            tl.store(out + x + at, tl.where(x + at < count, x + at, -1), mask=x + at < k)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel overwrites the workspace


@triton.jit
def running_sums(numbers):
    """The sum of the numbers ``[R, C]``, in the order of memory, up to each of them; and of all."""
    of_rows = tl.sum(numbers, 1)
    until = tl.cumsum(of_rows, 0)
    return tl.cumsum(numbers, 1) + (until - of_rows)[:, None], tl.sum(of_rows, 0)


@triton.jit
def kth_largest(values, n, k, slack, AT_ONCE: tl.constexpr, SCAN: tl.constexpr):
    """The k-th largest of n >= k int32 numbers, or a smaller number that k to k + ``slack`` of them reach. Also, how
    many are certainly above: if only k reach it, 0, as all of those count as equal."""
    at, more = tl.arange(0, AT_ONCE), AT_ONCE + tl.arange(0, SCAN)
    numbers = tl.load(values + at, mask=at < n, other=NEVER)  # the first stay in registers
    smallest, largest = tl.min(tl.where(at < n, numbers, ALWAYS), 0), tl.max(numbers, 0)
    for x in range(0, n - AT_ONCE, SCAN):
        number = tl.load(values + x + more, mask=x + more < n, other=NEVER)
        smallest = tl.minimum(smallest, tl.min(tl.where(x + more < n, number, ALWAYS), 0))
        largest = tl.maximum(largest, tl.max(number, 0))
    least, end = smallest.to(tl.int64), largest.to(tl.int64) + 1
    above = tl.full((), 0, tl.int32)  # numbers that reach the end of the interval
    while end - least > 1:
        middle = (least + (end - least) // 2).to(tl.int32)
        reached = tl.sum((numbers >= middle).to(tl.int32), 0)
        if n > AT_ONCE:
            reach = tl.zeros((SCAN,), tl.int32)
            for x in range(0, n - AT_ONCE, SCAN):
                reach += (tl.load(values + x + more, mask=x + more < n, other=NEVER) >= middle).to(tl.int32)
            reached += tl.sum(reach, 0)
        if reached < k:
            end = middle.to(tl.int64)
            above = reached
        else:
            least = middle.to(tl.int64)
            if reached <= k + slack:
                end = least + 1
                above *= 0
    return least.to(tl.int32), above


@triton.jit
def sequence_of(t, starts, S, AT_ONCE: tl.constexpr):
    """The sequence of token t: the number of sequences that end at or before it. S for padding."""
    ends = tl.zeros((AT_ONCE,), tl.int32)
    for x in range(0, S, AT_ONCE):
        s = x + tl.arange(0, AT_ONCE)
        end = tl.load(starts + 1 + s, mask=s < S, other=2**31 - 1)
        ends += (end <= t).to(tl.int32)
    return tl.sum(ends, 0)


@triton.jit
def sees(t, s, tensors, CAUSAL: tl.constexpr):
    """The positions of tokens t in sequence s, and the number of keys that they see: 0 for tokens of others."""
    start, end = tl.load(tensors.query_start_loc + s), tl.load(tensors.query_start_loc + s + 1)
    seq_len = tl.load(tensors.seq_lens + s)
    i = seq_len - end + t
    seen = tl.minimum(tl.maximum(i + 1, 0), seq_len) if CAUSAL else i * 0 + seq_len
    return i, tl.where((t >= start) & (t < end), seen, 0)
