"""The likeliest tokens of rows of logits on GPUs, and draws from them: the rule of
:func:`paged_ops.generation.distribution.draw`, with few passes over the vocabulary and without waiting for the device.

One pass reads all logits and leaves the weight and the largest logit of each chunk of 256 tokens. Then one program per
row draws from these: it reads the chunk of its token. For top-k it reads the chunks whose largest logit is not below
the k-th largest of all chunks, as no other chunk has one of the k likeliest tokens. For top-p it reads the row once for
each token that it draws, 1 + ln(1 / top_p) on average.

Letters: S rows of logits, R rows to draw for, V vocabulary, C chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_ops.lowerings.gpu.launch import Launcher

CHUNK = tl.constexpr(256)
_CHUNKS_AT_ONCE = 32
_LOGITS_AT_ONCE = 16384


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of logits ``[R, V]``, in their dtype, and the first token that has it, int64 ``[R]``. NaN
    in a row with NaN. One program per row."""
    logits = logits.contiguous()
    R, V = logits.shape
    best, tokens = logits.new_empty(R), logits.new_empty(R, dtype=torch.int64)
    _likeliest(V, logits.dtype, logits.device)((R, 1, 1), (logits, best, tokens))
    return best, tokens


@functools.lru_cache(maxsize=64)
def _likeliest(V: int, dtype: torch.dtype, device: torch.device) -> Launcher:
    del dtype  # a launcher serves one
    at_once = min(_LOGITS_AT_ONCE, triton.next_power_of_2(V))
    return Launcher(likeliest_kernel, {"V": V, "AT_ONCE": at_once, "num_warps": 16}, device, can_wait=True)


def draw_rows(
    logits: Tensor,
    best: Tensor,
    draws: Sequence[tuple[int, int, int, int, int, int]],
) -> Tensor:
    """One token per draw, int64 ``[R]``.

    Args:
        logits: ``[S, V]``; float32, bfloat16 or float16.
        best: of each row of them, the largest, ``[S]``, in the same dtype.
        draws: of each, on the host: the row of the logits; key and top_k as of ``draw``, 0 is off; then the bits of
            float64 of the inverse temperature (``inverse_of``), top_p and min_p, of which 1 and 0 are off.
    """
    columns = list(zip(*draws, strict=True))
    table = torch.tensor(columns, dtype=torch.int64, device="cpu", pin_memory=logits.is_cuda)
    return launch(logits.contiguous(), best.contiguous(), table.to(logits.device, non_blocking=True))


def launch(logits: Tensor, best: Tensor, draws: Tensor) -> Tensor:
    """The same, all contiguous and on the device. ``draws``: int64 ``[6, R]``."""
    V, R = logits.shape[1], draws.shape[1]
    C = -(-V // CHUNK.value)
    tensors = (
        logits,
        best,
        draws,
        draws.new_empty(2, R, C),
        draws.new_empty(R, C, dtype=torch.float32),
        draws.new_empty(R, C, dtype=torch.int32),
        draws.new_empty(R),
    )
    launch_chunks, launch_draws = _launchers(V, logits.dtype, logits.device)
    launch_chunks((-(-C // _CHUNKS_AT_ONCE), R, 1), tensors, (R,))
    launch_draws((R, 1, 1), tensors, (R,))
    return tensors[-1]


@functools.lru_cache(maxsize=64)
def _launchers(V: int, dtype: torch.dtype, device: torch.device) -> tuple[Launcher, Launcher]:
    del dtype  # a launcher serves one
    constants = {"V": V, "C": -(-V // CHUNK.value), "SHIFT": 62 - (V - 1).bit_length()}
    chunks, draws = (
        Launcher(kernel, {**constants, "AT_ONCE": _CHUNKS_AT_ONCE, "num_warps": num_warps}, device, can_wait=True)
        for kernel, num_warps in ((chunks_kernel, 8), (draw_kernel, 16))
    )
    return chunks, draws


@triton.jit
def likeliest_kernel(tensors, V: tl.constexpr, AT_ONCE: tl.constexpr):
    """One row."""
    logits, best, tokens = tensors
    r = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, AT_ONCE)
    largest = tl.full((AT_ONCE,), float("-inf"), tl.float32)
    ids = tl.zeros((AT_ONCE,), tl.int32)
    for first in range(0, V, AT_ONCE):
        x = tl.load(logits + r * V + first + column, mask=first + column < V, other=float("-inf")).to(tl.float32)
        is_better = (x > largest) | (x != x)
        largest = tl.where(is_better, x, largest)
        ids = tl.where(is_better, first + column, ids)
    has_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    top = tl.max(tl.where(largest == largest, largest, float("-inf")), 0)
    tl.store(tokens + r, tl.min(tl.where(largest == top, ids, V - 1), 0).to(tl.int64))
    tl.store(best + r, tl.where(has_nan, float("nan"), top).to(best.dtype.element_ty))


@triton.jit(do_not_specialize=["R"])
def chunks_kernel(
    tensors,
    R,
    V: tl.constexpr,
    C: tl.constexpr,
    SHIFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """For each chunk: the sum of its weights, the same without the tokens that min-p hides, and the largest logit."""
    logits, best, draws, sums, largest, _, _ = tensors
    r = tl.program_id(1).to(tl.int64)
    logits, top, inverse, _, min_p = row_of(logits, best, draws, r, R, V)
    chunk = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    x = load_chunks(logits, chunk, chunk < C, V)
    likely = likelihood(x, top, inverse)
    weight = weight_of(likely, SHIFT)
    tl.store(sums + r * C + chunk, tl.sum(weight, 1), mask=chunk < C)
    tl.store(sums + (R + r) * C + chunk, tl.sum(tl.where(likely >= min_p, weight, 0), 1), mask=chunk < C)
    tl.store(largest + r * C + chunk, tl.max(x, 1), mask=chunk < C)


@triton.jit(do_not_specialize=["R"])
def draw_kernel(
    tensors,
    R,
    V: tl.constexpr,
    C: tl.constexpr,
    SHIFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row."""
    logits, best, draws, sums, largest, listed, tokens = tensors
    r = tl.program_id(0).to(tl.int64)
    logits, top, inverse, top_p, min_p = row_of(logits, best, draws, r, R, V)
    k = tl.load(draws + 2 * R + r)
    state = tl.load(draws + R + r).to(tl.uint64, bitcast=True)
    all_sums, left_sums = sums + r * C, sums + (R + r) * C
    listed += r * C
    at = tl.arange(0, triton.next_power_of_2(C))
    exists = at < C

    # The chunks that hold tokens that stay: their ids, and their number.
    n = tl.full((), C, tl.int32)
    least = tl.full((), -(2**31), tl.int64)  # tokens stay whose order is at least this
    tl.store(listed + at, at, mask=exists)
    if k > 0:
        ends = tl.full((), 2**31, tl.int64)
        order_of_chunk = order_of(tl.load(largest + r * C + at, mask=exists, other=float("-inf")))
        while ends - least > 1:
            middle = least + (ends - least) // 2
            if tl.sum(((order_of_chunk >= middle) & exists).to(tl.int32), 0) >= k:
                least = middle
            else:
                ends = middle
        has_any = (order_of_chunk >= least) & exists
        n = tl.sum(has_any.to(tl.int32), 0)
        tl.debug_barrier()
        tl.store(listed + tl.cumsum(has_any.to(tl.int32), 0) - 1, at, mask=has_any)
        tl.debug_barrier()
        # Between the bounds the k-th largest is found by halving, or as the next larger one, whichever is nearer.
        ends = order_of(top).to(tl.int64) + 1
        while ends - least > 1:
            middle = least + (ends - least) // 2
            num_larger = tl.zeros((AT_ONCE, CHUNK), tl.int32)
            num_upper = tl.zeros((AT_ONCE, CHUNK), tl.int32)
            following = tl.full((AT_ONCE, CHUNK), 2**31 - 1, tl.int32)
            for first in range(0, n, AT_ONCE):
                places = first + tl.arange(0, AT_ONCE)
                chunks = tl.load(listed + places, mask=places < n, other=0)
                orders = order_of(load_chunks(logits, chunks, places < n, V))
                num_larger += (orders > least).to(tl.int32)
                num_upper += (orders >= middle).to(tl.int32)
                following = tl.where(orders > least, tl.minimum(following, orders), following)
            if sum_of(num_larger) < k:
                ends = least + 1
            else:
                least = tl.min(tl.min(following, 1), 0).to(tl.int64)
                if sum_of(num_upper) >= k:
                    least = tl.maximum(least, middle)
                else:
                    ends = middle
        for first in range(0, n, AT_ONCE):
            places = first + tl.arange(0, AT_ONCE)
            chunks = tl.load(listed + places, mask=places < n, other=0)
            tile = load_chunks(logits, chunks, places < n, V)
            likelihoods = likelihood(tile, top, inverse)
            weights = tl.where(order_of(tile) >= least, weight_of(likelihoods, SHIFT), 0)
            tl.store(all_sums + places, tl.sum(weights, 1), mask=places < n)
            tl.store(left_sums + places, tl.sum(tl.where(likelihoods >= min_p, weights, 0), 1), mask=places < n)
    tl.debug_barrier()

    limit = top_p * tl.sum(tl.load(all_sums + at, mask=at < n, other=0), 0).to(tl.float64)
    sum_of_chunk = tl.load(left_sums + at, mask=at < n, other=0)
    end_order, end_id = tl.full((), -(2**31) - 1, tl.int64), tl.full((), 0, tl.int32)  # tokens before it are left
    token = tl.full((), 0, tl.int32)
    is_searching = tl.full((), 1, tl.int32)
    while is_searching > 0:
        total = tl.sum(sum_of_chunk, 0)
        target = tl.minimum((uniform(state) * total.to(tl.float64)).to(tl.int64), total - 1)
        state += 0x9E3779B97F4A7C15
        place = tl.sum((tl.cumsum(sum_of_chunk, 0) <= target).to(tl.int32), 0)
        place = tl.minimum(place, n - 1)
        target -= tl.sum(tl.where(at < place, sum_of_chunk, 0), 0)
        column = tl.arange(0, CHUNK)
        ids = tl.load(listed + place) * CHUNK + column
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        likely, order = likelihood(x, top, inverse), order_of(x)
        stays = (order >= least) & (likely >= min_p)
        weight = tl.where(stays & is_before(order, ids, end_order, end_id), weight_of(likely, SHIFT), 0)
        chosen = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, CHUNK - 1)
        token = tl.load(listed + place) * CHUNK + chosen
        if top_p >= 1:
            is_searching = tl.full((), 0, tl.int32)
        else:
            end_order = tl.sum(tl.where(column == chosen, order, 0), 0).to(tl.int64)
            end_id = token
            tl.debug_barrier()
            for first in range(0, n, AT_ONCE):
                places = first + tl.arange(0, AT_ONCE)
                chunks = tl.load(listed + places, mask=places < n, other=0)
                tile = load_chunks(logits, chunks, places < n, V)
                ids_of = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
                weights = weight_of(likelihood(tile, top, inverse), SHIFT)
                weights = tl.where(is_before(order_of(tile), ids_of, end_order, end_id), weights, 0)
                tl.store(left_sums + places, tl.sum(weights, 1), mask=places < n)
            tl.debug_barrier()
            sum_of_chunk = tl.load(left_sums + at, mask=at < n, other=0)
            before = tl.sum(sum_of_chunk, 0)
            if (before == 0) | (before.to(tl.float64) < limit) | (before >= total):
                is_searching = tl.full((), 0, tl.int32)
    tl.store(tokens + r, tl.minimum(token, V - 1))


@triton.jit
def row_of(logits, best, draws, r, R, V: tl.constexpr):
    """The address of the row, its largest logit, the inverse temperature, top_p and min_p."""
    row = tl.load(draws + r)
    top = tl.load(best + row).to(tl.float32)
    inverse = tl.load(draws + 3 * R + r).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(draws + 4 * R + r).to(tl.float64, bitcast=True)
    min_p = tl.load(draws + 5 * R + r).to(tl.float64, bitcast=True).to(tl.float32)
    return logits + row * V, top, inverse, top_p, min_p


@triton.jit
def load_chunks(row, chunk, exists, V: tl.constexpr):
    """Logits ``[chunks, 256]`` in float32; -inf where there are none."""
    ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(row + ids, mask=exists[:, None] & (ids < V), other=float("-inf")).to(tl.float32)


@triton.jit
def likelihood(x, top, inverse):
    """Relative to the likeliest token's; 0 for NaN."""
    likely = tl.exp((x - top) * inverse)
    return tl.where(likely == likely, likely, 0.0)


@triton.jit
def weight_of(likely, SHIFT: tl.constexpr):
    UNIT: tl.constexpr = 2.0**SHIFT
    return (likely * UNIT).to(tl.int64)


@triton.jit
def order_of(x):
    """Integers in the order of the numbers, int32; 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def is_before(order, ids, end_order, end_id):
    """Whether tokens are likelier than one, or as likely and have smaller ids."""
    return (order > end_order) | ((order == end_order) & (ids < end_id))


@triton.jit
def sum_of(tile):
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def uniform(state):
    """As ``uniforms`` of distribution.py."""
    bits = state + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.2204460492503131e-16
