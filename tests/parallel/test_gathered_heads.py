"""Ranks with query heads of their own, which gather them and attend to the tokens that each holds, as in vLLM: each has
what attention over the whole cache gives. Ranks are threads."""

import threading

import pytest
import torch

import paged_ops
from paged_ops.parallel.context import attend_with_gathered_heads
from paged_ops.parallel.exchange import Exchange

W, H, K, D, B = 3, 4, 1, 16, 4
SEQ_LENS = [17, 2, 5, 30, 0]


class Rank:
    """A rank among threads."""

    def __init__(self, rank, meeting):
        self.size, self.rank, self.meeting = W, rank, meeting

    def exchange(self, tensor):
        self.meeting.tensors[self.rank] = tensor
        self.meeting.barrier.wait()
        tensors = list(self.meeting.tensors)
        self.meeting.barrier.wait()
        return tensors

    def all_gather(self, mine):
        return torch.stack(self.exchange(mine))

    def all_to_all(self, mine):
        return torch.stack([each[self.rank] for each in self.exchange(mine)])


class Meeting:
    def __init__(self):
        self.tensors, self.barrier = [None] * W, threading.Barrier(W, timeout=60)


@pytest.mark.parametrize("features", [{}, {"soft_cap": 3.0}, {"sinks": True}, {"causal": False}], ids=str)
@pytest.mark.parametrize(
    "QUERY_LENS", [[1, 1, 5, 3, 0], [1, 1, 1, 1, 0], SEQ_LENS], ids=["mixed", "decode", "whole prompts"]
)
def test_each_rank_has_what_the_whole_cache_gives(features, QUERY_LENS):
    """In a decode the new tokens are in the cache, and nowhere else; whole prompts are not in the cache."""
    torch.manual_seed(0)
    is_decode, is_whole = max(QUERY_LENS) == 1, QUERY_LENS is SEQ_LENS
    T, S = sum(QUERY_LENS), len(SEQ_LENS)
    query = torch.randn(T + 2, W * H, D)  # two rows of padding
    keys, values = ([torch.randn(n, K, D) for n in SEQ_LENS] for _ in range(2))
    starts = torch.tensor([0, *QUERY_LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sinks = torch.randn(W * H) if features.get("sinks") else None
    options = {**features, "sinks": sinks}

    whole = paged_ops.allocate_kv_cache("NHD", 40, B, K, D, torch.float32)
    tables = torch.arange(S * 8, dtype=torch.int32).view(S, 8)
    for s, n in enumerate(SEQ_LENS):
        slots = torch.tensor([int(tables[s, j // B]) * B + j % B for j in range(n)], dtype=torch.int64)
        paged_ops.reshape_and_cache(keys[s], values[s], whole, slots)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)

    def expected(heads):
        given = {**options, "sinks": None if sinks is None else sinks[heads]}
        return paged_ops.paged_attention(query[:, heads], whole, tables, lens, starts, D**-0.5, **given)

    new = [torch.cat([x[n - q :] for x, q, n in zip(xs, QUERY_LENS, SEQ_LENS, strict=True)]) for xs in (keys, values)]
    new = [torch.cat([x, torch.full((2, K, D), torch.nan)]) for x in new]
    if is_decode:
        new = [torch.full_like(x, torch.nan) for x in new]
    results, outs, meeting = [None] * W, [None] * W, Meeting()

    def run(rank):
        """Token j of a sequence is at rank j % W."""
        caches = [torch.full((40, B, K, D), torch.nan) for _ in range(2)]
        held = []
        for s, (q, n) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
            mine = [j for j in range(n if is_decode else n - q) if j % W == rank]
            held.append(len(mine))
            for place, j in enumerate(mine):
                for cache, states in zip(caches, (keys, values), strict=True):
                    cache[int(tables[s, place // B]), place % B] = states[s][j]
        heads = slice(rank * H, (rank + 1) * H)
        outs[rank] = torch.full((T + 2, H, D), torch.nan) if rank else None
        results[rank] = attend_with_gathered_heads(
            query[:, heads],
            *new,
            caches[0],
            tables,
            None if is_whole else torch.tensor(held, dtype=torch.int32),
            starts,
            max(QUERY_LENS),
            D**-0.5,
            Exchange(Rank(rank, meeting)),
            value_cache=caches[1],
            out=outs[rank],
            **{**options, "sinks": None if sinks is None else sinks[heads]},
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(W)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, result in enumerate(results):
        assert outs[rank] is None or result is outs[rank]
        wanted = expected(slice(rank * H, (rank + 1) * H))
        torch.testing.assert_close(result[:T], wanted[:T], atol=1e-5, rtol=1e-5)
        assert not result[T:].isnan().any()


def test_results_with_gaps_are_refused():
    """The kernel over symmetric memory writes contiguous rows."""
    alone = Exchange(Rank(0, None))
    alone.group.size = 1
    part, lse, out = torch.zeros(3, H, D), torch.zeros(3, H), torch.ones(3, 2 * H, D)
    with pytest.raises(ValueError, match="out: expected a contiguous tensor"):
        alone.of_own_heads(part, lse, out[:, :H])
    assert (out == 1).all()
