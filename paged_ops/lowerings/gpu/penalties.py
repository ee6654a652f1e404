"""Penalties on GPUs: the rule of :func:`paged_ops.generation.distribution.penalize`, with work for the tokens of a
sequence instead of passes over the vocabulary, and no loop over rows on the host.

Tokens of a row are counted with atomic operations, one count per token of the vocabulary. Then each token takes its
count and leaves 0. So of several equal tokens one gets the count, and changes the score; which one does not show.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_ops.lowerings.gpu.launch import Launcher

_SCORES_AT_ONCE, _TOKENS_AT_ONCE = 4096, 1024
IN_PROMPT = tl.constexpr(1 << 30)  # a bit of a count; the others are how often the token is in the output
# Products are rounded before they are subtracted, as on the CPU.
_NOT_FUSED = {"enable_fp_fusion": False}


def penalized(
    logits: Tensor,
    rows: Sequence[tuple[int, int, int, int, int, int, int, int]],
    unread: Tensor | None,
) -> Tensor:
    """The scores of R rows of logits, float32 ``[R, V]``, lowered. Also writes the newest token of each row to its ids.

    Args:
        logits: ``[S, V]``; float32, bfloat16 or float16.
        rows: of each, on the host: the row of the logits; the address of the ids of its tokens, int64 on the device, of
            which the newest is not yet there; how many tokens there are, 0 for no penalty; how many of them are the
            prompt; the newest, or -1 - i for ``unread[i]``; the bits of float64 of the repetition, presence and
            frequency penalty.
        unread: tokens that the host does not know, int64 ``[n]`` on the device.
    """
    table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=logits.is_cuda)
    table = table.to(logits.device, non_blocking=True)
    return launch(logits.contiguous(), table, table if unread is None else unread, max(row[2] for row in rows))


def launch(logits: Tensor, table: Tensor, unread: Tensor, longest: int) -> Tensor:
    """The same, all contiguous and on the device. ``table``: int64 ``[R, 8]``."""
    (R, V), device = (len(table), logits.shape[1]), logits.device
    scores = logits.new_empty(R, V, dtype=torch.float32)
    tensors = logits, table, unread, scores, logits.new_empty(R, V, dtype=torch.int32)
    launch_scores, launch_counts, launch_changes = _launchers(V, logits.dtype, device)
    launch_scores((-(-V // _SCORES_AT_ONCE), R, 1), tensors)
    for launch_tokens in (launch_counts, launch_changes):
        launch_tokens((-(-max(longest, 1) // _TOKENS_AT_ONCE), R, 1), tensors)
    return scores


@functools.lru_cache(maxsize=64)
def _launchers(V: int, dtype: torch.dtype, device: torch.device) -> list[Launcher]:
    del dtype  # a launcher serves one
    sizes = (
        (scores_kernel, _SCORES_AT_ONCE, 8),
        (counts_kernel, _TOKENS_AT_ONCE, 4),
        (changes_kernel, _TOKENS_AT_ONCE, 4),
    )
    return [
        Launcher(kernel, {"V": V, "AT_ONCE": n, "num_warps": warps, **_NOT_FUSED}, device, can_wait=True)
        for kernel, n, warps in sizes
    ]


@triton.jit
def scores_kernel(tensors, V: tl.constexpr, AT_ONCE: tl.constexpr):
    """The logits as float32, and counts of 0."""
    logits, table, _, scores, counts = tensors
    r = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    x = tl.load(logits + tl.load(table + 8 * r) * V + ids, mask=ids < V)
    tl.store(scores + r * V + ids, x.to(tl.float32), mask=ids < V)
    tl.store(counts + r * V + ids, tl.zeros((AT_ONCE,), tl.int32), mask=ids < V)


@triton.jit
def counts_kernel(tensors, V: tl.constexpr, AT_ONCE: tl.constexpr):
    """Stores the newest token, and counts all."""
    _, table, unread, _, counts = tensors
    r = tl.program_id(1).to(tl.int64)
    row, n, at = tokens_of(table, r, AT_ONCE)
    num_prompt, newest = tl.load(table + 8 * r + 3), tl.load(table + 8 * r + 4)
    newest = tl.load(unread + (-1 - newest), mask=newest < 0, other=newest)
    ids = tl.where(at == n - 1, newest, tl.load(row + at, mask=at < n - 1, other=0))
    tl.store(row + at, ids, mask=at == n - 1)
    exists = (at < n) & (ids < V)  # a prompt may have tokens without logits
    counts += r * V
    tl.atomic_or(counts + ids, tl.full((AT_ONCE,), IN_PROMPT, tl.int32), mask=exists & (at < num_prompt), sem="relaxed")
    tl.atomic_add(counts + ids, tl.full((AT_ONCE,), 1, tl.int32), mask=exists & (at >= num_prompt), sem="relaxed")


@triton.jit
def changes_kernel(tensors, V: tl.constexpr, AT_ONCE: tl.constexpr):
    """Changes the score of each token once."""
    _, table, _, scores, counts = tensors
    r = tl.program_id(1).to(tl.int64)
    row, n, at = tokens_of(table, r, AT_ONCE)
    repetition, presence, frequency = penalty(table, r, 5), penalty(table, r, 6), penalty(table, r, 7)
    ids = tl.load(row + at, mask=at < n, other=V)
    exists = ids < V
    # And with 0, as Triton 3.7 has no exchange for AMD.
    found = tl.atomic_and(counts + r * V + ids, tl.zeros((AT_ONCE,), tl.int32), mask=exists, sem="relaxed")
    is_first = exists & (found != 0)
    scores += r * V
    x = tl.load(scores + ids, mask=is_first, other=0.0)
    x = tl.where(x < 0, x * repetition, tl.div_rn(x, tl.zeros_like(x) + repetition))
    times = found & (IN_PROMPT - 1)
    x = tl.where(times > 0, (x - presence) - frequency * times.to(tl.float32), x)
    tl.store(scores + ids, x, mask=is_first)


@triton.jit
def tokens_of(table, r, AT_ONCE: tl.constexpr):
    """The address of a row's tokens, how many there are, and the places that this program reads."""
    row = tl.load(table + 8 * r + 1).to(tl.pointer_type(tl.int64))
    at = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    return row, tl.load(table + 8 * r + 2), at


@triton.jit
def penalty(table, r, column: tl.constexpr):
    return tl.load(table + 8 * r + column).to(tl.float64, bitcast=True).to(tl.float32)
