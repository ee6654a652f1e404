"""Prompts over latent caches, by keys and values of all heads.

A query and a key cost ``2 (2R + P)`` operations per head in the absorbed form of latent attention (docs/latent.md), and
``2 (Dn + P + Dv)`` with the head's own key and value: 2176 and 640 in DeepSeek-V3. Expanding a token's own key and
value costs ``2 R (Dn + Dv)`` operations once. So for sequences with many new tokens the cached latents, history
included, are expanded to keys and values of all heads; for long ones in windows of bounded size, merged by their lse.
The choice is made from lengths on the host, so nothing waits for the device.

Letters: T tokens of the batch, S sequences, H query heads, R latent size, P rotated size, Dn and Dv sizes of the heads'
own keys (without the rotated part) and values, D = Dn + P.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.ops import gather_kv, merge_attention_states, paged_attention, paged_attention_with_lse

FEWEST_TOKENS = 128  # fewest new tokens of a sequence that is expanded
OVERHEAD = 5e10  # the host time of the additional calls, in multiplications
WINDOW = 1 << 19  # heads times tokens expanded at a time
OWN_BLOCK = 16  # tokens per block of expanded keys and values


class Sizes(NamedTuple):
    """The sizes of a layer on this rank."""

    H: int
    R: int
    Dn: int
    Dv: int


def saved(new: int, tokens: int, sizes: Sizes) -> int:
    """The multiplications that expanding saves for a sequence with ``new`` new tokens of ``tokens`` in all:
    ``2R - Dn - Dv`` per head and pair of query and key, less ``R (Dn + Dv)`` per head and token."""
    H, R, Dn, Dv = sizes
    pairs = new * tokens - new * (new - 1) // 2
    return H * (pairs * (2 * R - Dn - Dv) - tokens * R * (Dn + Dv))


def expands(new: int, tokens: int, sizes: Sizes) -> bool:
    """Whether expanding pays for one sequence. In DeepSeek-V3 it pays from 1194 tokens on without history, and from 187
    after 32768 tokens."""
    return new >= FEWEST_TOKENS and saved(new, tokens, sizes) > OVERHEAD


def first_expanded(new: Sequence[int], tokens: Sequence[int], sizes: Sizes) -> int:
    """The sequence from which on all are expanded, where only the last ones of a step can be: the choice that saves
    most, or S if none pays. Every one of them has at least :data:`FEWEST_TOKENS` new tokens."""
    first, most, total = len(new), OVERHEAD, 0
    for s in reversed(range(len(new))):
        if new[s] < FEWEST_TOKENS:
            break
        total += saved(new[s], tokens[s], sizes)
        if total > most:
            first, most = s, total
    return first


class Run(NamedTuple):
    """Consecutive sequences that attend in the same way.

    ``windows``: the first token and the number of tokens that are expanded at a time, for one sequence or, from token 0
    on, for all of them. Empty: absorbed.
    """

    first: int
    end: int
    rows: tuple[int, int]  # of the queries, from : to
    windows: tuple[tuple[int, int], ...]


def runs_of(
    expanding: Sequence[int], starts: Sequence[int], lens: Sequence[int], num_heads: int, block_size: int
) -> list[Run]:
    """The runs of a step in which some sequences are expanded.

    Args:
        expanding: these, in order.
        starts: the first query row of each sequence, and the end: S + 1 numbers.
        lens: the length of each sequence, with its history.
        num_heads, block_size: of this rank, and of the cache.
    """
    S, end = len(lens), 0
    runs: list[Run] = []
    most = max(WINDOW // num_heads, 1)
    step = max(most // block_size, 1) * block_size
    for s in expanding:
        if end < s:
            runs.append(Run(end, s, (starts[end], starts[s]), ()))
        end, n = s + 1, lens[s]
        last = max(n - max(most, starts[end] - starts[s]), 0) // block_size * block_size
        windows = (*((begin, min(step, last - begin)) for begin in range(0, last, step)), (last, n - last))
        first, begun = s, starts[s]
        if runs and len(windows) == len(runs[-1].windows) == 1 and runs[-1].windows[0][1] + n <= most:
            before = runs.pop()
            first, begun, windows = before.first, before.rows[0], ((0, before.windows[0][1] + n),)
        runs.append(Run(first, end, (begun, starts[end]), windows))
    if end < S:
        runs.append(Run(end, S, (starts[end], starts[S]), ()))
    return runs


class Batch(NamedTuple):
    """The sequences of a run, as the ops take them."""

    block_tables: Tensor  # int32 [S', M]
    seq_lens: Tensor  # int32 [S']
    query_start_loc: Tensor  # int32 [S' + 1]


def batch_of(run: Run, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Batch:
    """The sequences of a run, from those of the step."""
    tables, lens = (each[run.first : run.end] for each in (block_tables, seq_lens))
    if run.first:  # kernels are compiled for vectors at multiples of 16 bytes
        tables, lens = tables.clone(), lens.clone()
    return Batch(tables, lens, query_start_loc[run.first : run.end + 1] - run.rows[0])


def attend(
    rows: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    windows: tuple[tuple[int, int], ...],
    scale: float,
    value_head_size: int,
    expand: Callable[[Tensor, Tensor, Tensor], None],
    storage: Mapping[str, Any],
    features: Mapping[str, Any],
) -> Tensor:
    """``[T, H, Dv]`` of query rows ``[T, H, D]``, window by window: gather, expand, attend, merge. The last window has
    the new tokens.

    Args:
        rows, kv_cache, batch, scale: of a run.
        windows: of the run.
        value_head_size: Dv.
        expand: called with latents ``[n, R + P]``, it fills keys ``[n, H, D]`` and values ``[n, H, Dv]``.
        storage: ``k_scale`` and ``kv_cache_dtype`` of the cache.
        features: other arguments of :func:`paged_ops.paged_attention`; none that depends on positions.
    """
    block_tables, seq_lens, query_start_loc = batch
    B = kv_cache.shape[1]
    block = OWN_BLOCK if B % OWN_BLOCK == 0 else B
    (H, D), Dv, S = rows.shape[1:], value_head_size, len(seq_lens)
    most = max(n for _, n in windows) // block + S  # each sequence ends inside a block
    eighth = max(WINDOW // H // 8 // block, 1)
    count = -(-most // eighth) * eighth  # few distinct sizes, because each is another kind of call
    key, value = rows.new_empty(count, block, H, D), rows.new_empty(count, block, H, Dv)
    totals: list[tuple[Tensor, Tensor]] = []
    for number, (begin, n) in enumerate(windows, 1):
        is_last = begin + n == sum(windows[-1])
        lens = seq_lens - begin if is_last else torch.full_like(seq_lens, n)
        blocks = (lens + (block - 1)) // block
        first = (blocks.cumsum(0) - blocks).int()
        held = (n // block + S) * block
        paged = kv_cache, block_tables[:, begin // B :], blocks * block, held
        latents = gather_kv(*paged, dtype=rows.dtype, **storage)[0][:, 0]
        expand(latents, key.flatten(0, 1)[:held], value.flatten(0, 1)[:held])
        columns = torch.arange(-(-n // block), dtype=torch.int32, device=rows.device)
        attended = first[:, None] + columns, lens, query_start_loc, scale
        options = features if is_last else {"soft_cap": features.get("soft_cap", 0.0), "causal": False}
        if len(windows) == 1:
            return paged_attention(rows, key, *attended, value_cache=value, **options)
        totals.append(paged_attention_with_lse(rows, key, *attended, value_cache=value, **options))
        # Merge results of equally many windows, as in a tournament. Each merge rounds: merging one window after the
        # other would round the first result once per window.
        while len(totals) > (1 if is_last else number.bit_count()):
            totals[-2:] = [merge_attention_states(*totals[-2], *totals[-1])]
    return totals[0][0]
