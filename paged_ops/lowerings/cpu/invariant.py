"""Batch-invariant attention on the CPU in torch ops: the bits of a row depend on that row and on what it sees.

Letters as in :mod:`paged_ops.ops`; also G = H/K, q rows of a tile.

Keys are cut into segments of ``SEGMENT`` at fixed positions. Each segment is computed from nothing, and the segments
of a row merge from the first to the last. Every step is a sum, product, quotient, maximum or selection of single
elements, which IEEE 754 rounds in one way: shapes, threads and the place of a row in a tile change no bit. Matmuls and
torch's exponentials do not have this property, because their last columns take another path. So sums over D and over
keys add halves, and exponentials are polynomials here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_ops.features import Features, kept_keys
from paged_ops.fp8 import dequantise_rows
from paged_ops.layouts import PagedKV
from paged_ops.lowerings.cpu.cache import real_of

SEGMENT = 64  # keys
# Products of one tile, in elements: 16 MiB of float32.
TILE_ELEMENTS = 1 << 22

Reader = Callable[[int], tuple[Tensor, Tensor]]
State = tuple[Tensor, Tensor, Tensor]  # maximum [q, K, G], total [q, K, G], values [q, K, G, Dv]


def attend(
    query: Tensor,
    paged: PagedKV,
    scaled_rows: Tensor | None,
    stored: torch.dtype,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    sequences: Sequence[int],
    scale: float,
    f: Features,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill the rows of ``sequences`` in out ``[T, H, Dv]`` and lse ``[T, H]``. Values of the batch must be valid.

    ``scaled_rows``: the cache, if its rows have their own scales.
    """
    K, D, Dv = paged.num_kv_heads, paged.head_size, paged.value_head_size
    step = max(1, TILE_ELEMENTS // (query.shape[1] * SEGMENT * max(D, Dv, 1)))
    for s in sequences:
        start, end, n = query_start_loc[s], query_start_loc[s + 1], seq_lens[s]
        read: Reader = functools.lru_cache(8)(
            functools.partial(_read, paged, scaled_rows, stored, block_tables[s], n, f)
        )
        for row in range(start, end, step):
            stop = min(row + step, end)
            i = torch.arange(row, stop, device="cpu") + (n - end)
            q = query[row:stop].float().view(stop - row, K, -1, D)
            state = _rows(q, i, s, n, read, scale, f, paged)
            values, total = normalised(state, f)
            out[row:stop] = values.flatten(1, 2)
            lse[row:stop] = total.flatten(1)


def _rows(q: Tensor, i: Tensor, s: int, n: int, read: Reader, scale: float, f: Features, paged: PagedKV) -> State:
    """The rows ``q [q, K, G, D]`` at positions i of sequence s, which has n tokens."""
    rows, K, G, _ = q.shape
    m, total, values = nothing_seen(q, paged.value_head_size)
    distances = None
    for first in range(0, n, SEGMENT):
        j = torch.arange(first, first + SEGMENT, device="cpu")
        kept = kept_keys(f, s, i, j, K * G, K, max(paged.block_size, 1)) & (j < n)  # [H or 1, q, SEGMENT]
        if not kept.any():
            continue
        kept = kept.transpose(0, 1).expand(rows, K * G, SEGMENT).view(rows, K, G, SEGMENT)
        if f.alibi_slopes is not None:
            distances = (j - i[:, None]).float()[:, None, None]
        part = segment(q, *read(first), kept, distances, scale, f)
        m, total, values = merged((m, total, values), part)
    return m, total, values


def _read(
    paged: PagedKV, scaled_rows: Tensor | None, stored: torch.dtype, table: Tensor, n: int, f: Features, first: int
) -> tuple[Tensor, Tensor]:
    """Keys ``[K, SEGMENT, D]`` and values ``[K, SEGMENT, Dv]`` of a segment, dequantised; zeros past n."""
    B, last = paged.block_size, min(first + SEGMENT, n)
    blocks, skip = table[first // B : -(-last // B)], first % B

    def real(plane: Tensor, scale: Tensor | None) -> Tensor:
        cells = plane.index_select(0, blocks)  # [blocks, B, K, D], or [blocks, B, K, D/x, x]
        tokens = real_of(cells, stored).flatten(0, 1).flatten(2)[skip : skip + last - first].float()
        tokens = tokens if scale is None else tokens * scale[:, None]
        padded = tokens.new_zeros(tokens.shape[1], SEGMENT, tokens.shape[2])
        padded[:, : last - first] = tokens.transpose(0, 1)
        return padded

    if scaled_rows is None:
        return real(paged.key, f.k_scale), real(paged.value, f.v_scale)
    tokens = dequantise_rows(scaled_rows.index_select(0, blocks).flatten(0, 1), torch.float32)
    key = tokens.new_zeros(1, SEGMENT, tokens.shape[1])
    key[0, : last - first] = tokens[skip : skip + last - first]
    return key, key[..., : paged.value_head_size]


def nothing_seen(q: Tensor, Dv: int) -> State:
    """The state of rows ``q [q, K, G, D]`` that have seen no key."""
    return q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3]), q.new_zeros(*q.shape[:3], Dv)


def segment(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, distances: Tensor | None, scale: float, f: Features
) -> State:
    """The state of rows that have seen one segment; ``kept`` is ``[q, K, G, SEGMENT]``."""
    logits = add_halves(q[..., None, :] * k[:, None], 4)[..., 0].mul_(scale)
    if f.soft_cap:
        logits = tanh(logits.div_(f.soft_cap)).mul_(f.soft_cap)
    if distances is not None and f.alibi_slopes is not None:
        logits = logits + f.alibi_slopes.view(q.shape[1:3])[..., None] * distances
    logits = logits.masked_fill(~kept, -torch.inf)
    m = logits.amax(3)
    weights = exp(logits - _finite(m)[..., None])
    products = torch.where(kept[..., None], weights[..., None] * v[:, None], 0.0)  # hidden values may be NaN
    return m, add_halves(weights, 3)[..., 0], add_halves(products, 3)[..., 0, :]


def merged(before: State, after: State) -> State:
    """Two states of the same rows. A side that has seen no key changes no bit of the other."""
    m = torch.maximum(before[0], after[0])
    shares = [exp(side[0] - _finite(m)) for side in (before, after)]
    total = before[1] * shares[0] + after[1] * shares[1]
    values = before[2] * shares[0][..., None] + after[2] * shares[1][..., None]
    for side, other in ((before, after), (after, before)):
        empty = side[0] == -torch.inf
        total = torch.where(empty, other[1], total)
        values = torch.where(empty[..., None], other[2], values)
    return m, total, values


def normalised(state: State, f: Features) -> tuple[Tensor, Tensor]:
    """out and lse of rows, sinks included."""
    m, total, values = state
    if f.sinks is not None:
        sinks = f.sinks.view(m.shape[1:])
        before, m = m, torch.maximum(m, sinks)
        share = torch.where(before == -torch.inf, 0.0, exp(before - _finite(m)))
        total, values = total * share + exp(sinks - _finite(m)), values * share[..., None]
    empty = total == 0
    values = torch.where(empty[..., None], 0.0, values / torch.where(empty, 1.0, total)[..., None])
    return values, torch.where(empty, m, (m.double() + _log(total)).float())


def add_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, which becomes 1, by adding halves in place."""
    while x.shape[dim] > 1:
        rest = x.shape[dim] // 2
        kept = x.shape[dim] - rest
        x.narrow(dim, 0, rest).add_(x.narrow(dim, kept, rest))
        x = x.narrow(dim, 0, kept)
    return x


def _finite(m: Tensor) -> Tensor:
    return torch.where(m == -torch.inf, 0.0, m)


def expm1(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(power, rest)`` with ``exp(x) = power * (1 + rest)`` for ``|x| < 88``, power a power of two: the Taylor series
    of ``exp`` up to the seventh power, as in vectors.h."""
    magic = 12582912.0  # 1.5 * 2^23: adding it drops the fraction
    n = (x * 1.44269504 + magic) - magic
    fraction = (x - n * 0.693145752) - n * 1.42860677e-6
    series = fraction * (1.0 / 5040) + 1.0 / 720
    for coefficient in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5):
        series = series * fraction + coefficient
    power = ((n.nan_to_num(0.0).int() + 127) << 23).view(torch.float32)
    return power, series * fraction * fraction + fraction


def exp(x: Tensor) -> Tensor:
    """For x up to 0; NaN stays NaN."""
    power, rest = expm1(x.clamp(min=-87.5))
    return torch.where(x < -87.0, 0.0, power + power * rest)


def tanh(x: Tensor) -> Tensor:
    power, rest = expm1((2.0 * x).clamp(-30.0, 30.0))
    less = power * rest + (power - 1.0)
    return less / (less + 2.0)


def _log(x: Tensor) -> Tensor:
    """The natural logarithm in float64 of positive numbers, to float32's precision; NaN and infinity stay."""
    fraction, exponent = torch.frexp(x.double())
    low = fraction < 0.5**0.5
    fraction, exponent = torch.where(low, 2 * fraction, fraction), exponent.double() - low.double()
    s = (fraction - 1.0) / (fraction + 1.0)
    square, series = s * s, torch.zeros_like(s)
    for odd in range(15, 0, -2):
        series = series * square + 2.0 / odd
    return torch.where(x.isfinite(), exponent * 0.6931471805599453 + s * series, x.double())
