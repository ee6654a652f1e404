"""Bidirectional ranges in a step's metadata: what a batch says of them, what the builder keeps and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import paged_ops
from paged_ops.metadata import AttentionMetadataBuilder, Batch, advance_decodes, split_decodes_and_prefills

Pairs = list[list[tuple[int, int]]]


def metadata_builder(**changes: Any) -> AttentionMetadataBuilder:
    sizes = {"num_blocks": 64, "max_bidirectional_ranges": 2, **changes}
    return AttentionMetadataBuilder(4, 6, 40, 8, **sizes)


def batch_with(ranges: Pairs | torch.Tensor | None, lens: tuple[tuple[int, int], ...]) -> Batch:
    """Requests of (query, computed) tokens."""
    queries, computed = ([each[place] for each in lens] for place in (0, 1))
    return Batch(
        queries, computed, [[8 * s + b for b in range(8)] for s in range(len(lens))], bidirectional_ranges=ranges
    )


@pytest.mark.parametrize("num_staging_buffers", [None, 1])
def test_a_step_has_the_ranges_that_hold_its_tokens(num_staging_buffers: int | None) -> None:
    builder = metadata_builder(num_staging_buffers=num_staging_buffers)
    address = builder.build_for_capture(6).bidirectional_ranges.data_ptr()
    # Of the first request tokens 4 to 9: its ranges before and after them change nothing, nor does padding.
    given = [[(0, 4), (3, 5), (7, 7), (-1, 9), (6, 10), (10, 12)], []]
    for ranges, lens, S, want in (
        (given, ((6, 4), (1, 5)), 3, [[[3, 5], [6, 10]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]),
        ([[(0, 3)]], ((3, 0),), 2, [[[0, 3], [0, 0]], [[0, 0], [0, 0]]]),
        (torch.tensor([[[2, 9]], [[1, 2]]]), ((1, 8), (2, 0)), 2, [[[2, 9], [0, 0]], [[1, 2], [0, 0]]]),
        (None, ((1, 8),), 2, [[[0, 0], [0, 0]]] * 2),
    ):
        metadata = builder.build(0, batch_with(ranges, lens), num_reqs=S)
        assert metadata.bidirectional_ranges.tolist() == want
        assert (metadata.bidirectional_ranges.dtype, metadata.bidirectional_ranges.data_ptr()) == (torch.int32, address)
    assert builder.build_for_capture(3).bidirectional_ranges.tolist() == [[[0, 0], [0, 0]]] * 3
    assert (
        metadata_builder(max_bidirectional_ranges=0).build(0, batch_with(None, ((1, 0),))).bidirectional_ranges is None
    )


def test_ranges_move_with_their_requests_and_stay_in_decodes() -> None:
    batch = batch_with([[(0, 5)], [(1, 2), (2, 4)]], ((5, 0), (4, 0)))
    batch.swap(0, 1)
    assert batch.bidirectional_ranges.tolist() == [[[1, 2], [2, 4]], [[0, 5], [0, 0]]]
    metadata = metadata_builder().build(0, batch_with([[(0, 5)], []], ((1, 4), (1, 4))), lookahead=1)
    advance_decodes(metadata, 4)
    assert metadata.bidirectional_ranges[0].tolist() == [[0, 5], [0, 0]]
    assert split_decodes_and_prefills(metadata) == (2, 0, 2, 0)
    leaves = pytree.tree_leaves(metadata)
    assert any(leaf is metadata.bidirectional_ranges for leaf in leaves)


@pytest.mark.parametrize(
    ("changes", "ranges", "message"),
    [
        ({}, [[(2, 7)], []], r"ranges that end with the step at the latest, at token 6 of request 0 .* got \(2, 7\)"),
        ({}, [[], [(0, 1), (1, 2), (2, 3)]], "at most max_bidirectional_ranges = 2 that hold .* got 3 for request 1"),
        ({"max_bidirectional_ranges": 0}, [[(0, 3)], []], "at most max_bidirectional_ranges = 0 that .* got 1 for"),
        ({}, [[]], "bidirectional_ranges: expected one for each of the 2 requests, got 1"),
        ({}, [[(0, 1, 2)], []], r"bidirectional_ranges: expected pairs \(start, end\), got \(0, 1, 2\)"),
        ({}, torch.zeros(2, 2), "bidirectional_ranges: expected int32 or int64, got a float32"),
        ({}, torch.zeros(2, 2, dtype=torch.int32), r"expected \[num_reqs, W, 2\], got .*\[2, 2\]"),
        ({}, torch.zeros(2, 1, 2, dtype=torch.int32, device="meta"), "expected a tensor on the CPU, got"),
        ({"max_bidirectional_ranges": -1}, None, "max_bidirectional_ranges: expected at least 0, got -1"),
    ],
)  # fmt: skip
def test_wrong_ranges(changes: dict[str, Any], ranges: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metadata_builder(**changes).build(0, batch_with(ranges, ((6, 0), (3, 0))))


def test_steps_with_ranges_give_what_one_step_gives() -> None:
    """A prompt in two steps, cut outside of its images, and each step by the op: as the whole prompt at once."""
    torch.manual_seed(0)
    n, cut, ranges = 24, 11, [[(2, 9), (12, 20)]]
    query, cache = torch.randn(n, 4, 16), torch.randn(64, 2, 4, 2, 16)

    def rows(first: int, last: int) -> torch.Tensor:
        metadata = metadata_builder().build(0, batch_with(ranges, ((last - first, first),)))
        batch = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc
        given = {"sliding_window": 4, "bidirectional_ranges": metadata.bidirectional_ranges}
        return paged_ops.paged_attention(query[first:last], cache, *batch, 0.25, **given)

    whole = rows(0, n)
    torch.testing.assert_close(torch.cat([rows(0, cut), rows(cut, n)]), whole, rtol=1e-5, atol=1e-5)
    batch = torch.arange(8, dtype=torch.int32)[None], torch.tensor([n]).int(), torch.tensor([0, n]).int()
    causal = paged_ops.paged_attention(query, cache, *batch, 0.25, sliding_window=4)
    assert not torch.allclose(causal, whole)
