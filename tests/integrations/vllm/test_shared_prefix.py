"""The prefix that sequences share, found from their block tables: against plain Python, and without a sync."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paged_ops.integrations.vllm.shared_prefix import PrefixFinder


def in_python(tables, lens, queries, B, least_tokens, least_sequences):
    live = [s for s, n in enumerate(lens) if n > 0]
    if len(live) < least_sequences:
        return 0
    blocks = 0
    while all((blocks + 1) * B <= lens[s] - queries[s] for s in live) and len({tables[s][blocks] for s in live}) == 1:
        blocks += 1
    return blocks * B if blocks * B >= least_tokens else 0


def test_equal_to_plain_python():
    draw = random.Random(0)
    found = set()
    for _ in range(300):
        B, M, S = draw.choice((1, 4, 16)), draw.randint(1, 12), draw.randint(1, 9)
        least = draw.choice((1, 2 * B)), draw.randint(2, 4)
        shared = draw.randint(0, M)
        tables = [[m if m < shared else draw.randint(0, 30) for m in range(M)] for _ in range(S)]
        lens = [draw.randint(1, M * B) for _ in range(S)]
        queries = [draw.randint(1, n) if draw.random() < 0.3 else 1 for n in lens]
        padding = draw.randint(0, 3)
        for _ in range(padding):
            tables.append([draw.randint(-5, 99) for _ in range(M)])
            lens.append(0)
            queries.append(0)
        expected = in_python(tables, lens, queries, B, *least)
        found.add(expected > 0)
        block_tables, seq_lens = (torch.tensor(each, dtype=torch.int32) for each in (tables, lens))
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        prefix = PrefixFinder(B, S + padding, *least).find(block_tables, seq_lens, starts)
        assert prefix.length.tolist() == [expected]
        assert prefix.suffix_lens.tolist() == [max(n - expected, 0) for n in lens]
        first = expected // B
        assert prefix.block_table[0, :first].tolist() == tables[0][:first]
        for row, table in zip(prefix.suffix_block_tables.tolist(), tables, strict=True):
            assert row[: M - first] == table[first:]
    assert found == {True, False}


def test_nothing_is_read_on_the_host_and_nothing_moves():
    """As on a GPU: fake tensors raise where a value would be needed."""
    with FakeTensorMode():
        tables = torch.zeros(12, 20, dtype=torch.int32)
        lens, starts = (torch.zeros(n, dtype=torch.int32) for n in (12, 13))
        finder = PrefixFinder(16, 12)
        prefix = finder.find(tables, lens, starts)
        assert prefix.suffix_block_tables.shape == (12, 20)
    finder = PrefixFinder(4, 8, 4, 2)
    tables, lens = torch.arange(10, dtype=torch.int32).expand(8, 10).contiguous(), torch.full((8,), 30).int()
    starts = torch.arange(9, dtype=torch.int32)
    first = finder.find(tables, lens, starts)
    addresses = [each.data_ptr() for each in first]
    assert first.length.tolist() == [28]
    tables[3, 2] = 77
    second = finder.find(tables, lens, starts)
    assert [each.data_ptr() for each in second] == addresses
    assert first.length.tolist() == [8]
    fewer = finder.find(tables[:5], lens[:5], starts[:6])
    assert fewer.suffix_block_tables.data_ptr() == addresses[2]


def test_other_shapes_are_refused():
    finder = PrefixFinder(4, 2, 4, 2)
    lens, starts = torch.full((2,), 8).int(), torch.arange(3).int()
    finder.find(torch.zeros(2, 5).int(), lens, starts)
    with pytest.raises(ValueError, match="block_tables: expected at most 2 rows"):
        finder.find(torch.zeros(3, 5).int(), torch.full((3,), 8).int(), torch.arange(4).int())
    with pytest.raises(ValueError, match="block_tables: expected the same number of columns as before"):
        finder.find(torch.zeros(2, 6).int(), lens, starts)
