"""Bidirectional ranges on the host: the ranges of a request, and the ranges that a step needs.

A range is half-open, (start, end), in positions of its sequence. Tokens of one range see each other: see
:func:`paged_ops.paged_attention`. Letters: R, the most ranges per sequence in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_ops.checks import expect, is_integer

Ranges = Sequence[Sequence[Sequence[int]]] | Tensor


def ranges_of_requests(ranges: Ranges) -> Tensor:
    """The ranges of each request (lists of pairs, or a CPU tensor) as a tensor ``[num_reqs, W, 2]``, padded with 0."""
    name, shape = "bidirectional_ranges", "[num_reqs, W, 2]"
    if isinstance(ranges, Tensor):
        expect(ranges.device.type == "cpu", name, "a tensor on the CPU", ranges)
        expect(ranges.dtype in (torch.int32, torch.int64), name, "int32 or int64", ranges)
        expect(ranges.dim() == 3 and ranges.shape[2] == 2, name, shape, ranges)
        return ranges
    table = torch.zeros(len(ranges), max(map(len, ranges), default=0), 2, dtype=torch.int64, device="cpu")
    for row, pairs in zip(table, ranges, strict=True):
        for place, pair in zip(row, pairs, strict=False):
            expect(len(pair) == 2, name, "pairs (start, end)", pair)
            expect(all(map(is_integer, pair)), name, "pairs (start, end) of integers", pair)
            place.copy_(torch.tensor(pair, dtype=torch.int64, device="cpu"))
    return table


def ranges_of_step(ranges: Tensor, computed: Tensor, seq_lens: Tensor, R: int) -> Tensor:
    """The ranges, of ``[num_reqs, W, 2]``, that hold tokens ``computed : seq_lens`` of their request: ``[num_reqs, R,
    2]``, padded with 0. Other ranges do not change what the step computes.

    Raises:
        ValueError: a request has more than R of them, or a range goes on after the step: its tokens of this step would
            need keys that are not there yet.
    """
    start, end = ranges[:, :, 0], ranges[:, :, 1]
    computed, seq_lens = computed[:, None], seq_lens[:, None]
    holds = (start >= 0) & (start < end) & (end > computed) & (start < seq_lens) & (computed < seq_lens)
    cut = holds & (end > seq_lens)
    if bool(cut.any()):
        s, n = cut.nonzero()[0].tolist()
        whole = f"ranges that end with the step at the latest, at token {int(seq_lens[s])} of request {s}"
        expect(False, "bidirectional_ranges", f"{whole} (schedule its tokens at once)", tuple(ranges[s, n].tolist()))
    counts = holds.sum(1)
    if counts.numel() and int(counts.max()) > R:
        s = int(counts.argmax())
        most = f"at most max_bidirectional_ranges = {R} that hold tokens of a step"
        expect(False, "bidirectional_ranges", most, f"{int(counts[s])} for request {s}")
    order = torch.argsort(holds.logical_not().to(torch.uint8), dim=1, stable=True)[:, :R, None].expand(-1, -1, 2)
    chosen = torch.where(holds[:, :, None], ranges, 0).gather(1, order)
    return torch.nn.functional.pad(chosen, (0, 0, 0, R - chosen.shape[1]))
