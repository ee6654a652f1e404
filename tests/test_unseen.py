"""What a row does not see does not reach it, whatever it holds: NaN and infinities among the keys and values of tokens
that are in the cache, but hidden from some rows by a mask. And who sees them does not get a number that looks right."""

import pytest
import torch

import paged_ops
from paged_ops import BlockSparse, reference
from paged_ops.features import Features, kept_keys
from paged_ops.lowerings.cpu import attention as cpu
from paged_ops.lowerings.cpu import fused, prepared

SEQS = ((1, 40), (5, 60), (40, 40), (33, 96), (3, 2))
RANGES = torch.tensor(
    [[(0, 30), (35, 60)], [(20, 57), (58, 99)], [(4, 9), (7, 33)], [(60, 80), (81, 81)], [(0, 2)] * 2]
)
RANGES = RANGES.to(torch.int32)
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 13},
    "chunk": {"attention_chunk": 24},
    "window-chunk": {"sliding_window": 9, "attention_chunk": 24},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "cap-window": {"soft_cap": 2.0, "sliding_window": 13},
    "noncausal": {"causal": False},
    "sparse": {"block_sparse": BlockSparse(16, 1, 3)},
    "window-first": {"sliding_window": 9, "num_first_tokens": 5},
    "ranges": {"bidirectional_ranges": RANGES},
    "ranges-window": {"bidirectional_ranges": RANGES, "sliding_window": 9},
}
OPS = {"op": paged_ops.paged_attention_with_lse, "reference": reference.paged_attention_with_lse}


@pytest.fixture(params=["fused", "torch", "matrix", "reference"])
def attention(request, monkeypatch):
    """Attention through C++, through torch ops, through PyTorch's bfloat16 kernel, and the reference."""
    if request.param == "torch":
        monkeypatch.setattr(fused, "compiled", lambda: None)
    if request.param == "matrix":
        monkeypatch.setattr(cpu.processor, "has_matrix_unit", lambda: True)
        monkeypatch.setattr(fused, "has_matrix_unit", lambda: False)
        monkeypatch.setattr(prepared, "MATRIX_ROWS", 1)
    return OPS.get(request.param, OPS["op"])


def batch(H, K, dtype, features, D=32, B=16):
    """A call, and where token j of sequence s lies: its block and offset."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.tensor([n for _, n in SEQS], dtype=torch.int32)
    starts = torch.tensor([0, *(q for q, _ in SEQS)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    needed = [-(-n // B) for _, n in SEQS]
    tables = torch.zeros(len(SEQS), max(needed), dtype=torch.int32)
    for row, ids in zip(tables, torch.randperm(sum(needed), generator=generator).split(needed), strict=True):
        row[: len(ids)] = ids
    cache = torch.randn(sum(needed), 2, B, K, D, generator=generator).to(dtype)
    query = torch.randn(int(starts[-1]), H, D, generator=generator).to(dtype)
    features = dict(features)
    for name in {"alibi_slopes", "sinks"} & features.keys():
        features[name] = torch.rand(H, generator=generator)
    return (query, cache, tables, lens, starts, D**-0.5), features


def who_sees(H, K, features, s, j):
    """Of all rows ``[T, H]``: which see token j of sequence s."""
    sees = torch.zeros(sum(q for q, _ in SEQS), H, dtype=torch.bool)
    start, (q, n) = sum(q for q, _ in SEQS[:s]), SEQS[s]
    kept = kept_keys(Features(**features), s, torch.arange(n - q, n), torch.tensor([j]), H, K, 16)
    sees[start : start + q] = kept[:, :, 0].expand(H, q).T
    return sees


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_hidden_values_stay_hidden(attention, name, dtype, heads):
    H, K = heads
    args, features = batch(H, K, dtype, FEATURES[name])
    cache, tables = args[1], args[2]
    before, lse_before = attention(*args, **features)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.05}
    for plane, number in ((1, torch.nan), (1, torch.inf), (0, torch.nan), (0, -torch.inf)):
        for s, j in ((0, 3), (1, 57), (2, 20), (3, 90)):
            poisoned = cache.clone()
            poisoned[tables[s, j // 16], plane, j % 16, :, 5] = number
            out, lse = attention(args[0], poisoned, *args[2:], **features)
            sees = who_sees(H, K, features, s, j)
            torch.testing.assert_close(out[~sees], before[~sees], **tolerance)
            torch.testing.assert_close(lse[~sees], lse_before[~sees], **tolerance)
            if plane == 1:
                assert not out[sees][:, 5].isfinite().any()
                others = torch.arange(32) != 5
                torch.testing.assert_close(out[sees][:, others], before[sees][:, others], **tolerance)
            elif torch.isnan(torch.tensor(number)):
                assert out[sees].isnan().all()
                assert lse[sees].isnan().all()


@pytest.mark.parametrize("name", ["plain", "window", "sparse"])
def test_all_that_is_hidden_at_once(attention, name):
    """A block that a window has left behind may belong to another sequence by now: nothing of it is finite."""
    args, features = batch(8, 2, torch.float32, FEATURES[name])
    query, cache, tables, lens, starts, scale = args
    before, _ = attention(*args, **features)
    for s, (_, n) in enumerate(SEQS):
        for j in range(n):
            if not who_sees(8, 2, features, s, j).any():
                cache[tables[s, j // 16], :, j % 16] = torch.tensor([torch.nan, torch.inf])[j % 2]
    out, _ = attention(query, cache, tables, lens, starts, scale, **features)
    torch.testing.assert_close(out, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(64, 48), (13, 24)], ids=str)
def test_values_of_another_size(attention, sizes):
    D, Dv = sizes
    key, value = torch.randn(3, 16, 2, D), torch.randn(3, 16, 2, Dv)
    query, tables = torch.randn(40, 4, D), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    batch = tables, torch.tensor([40], dtype=torch.int32), torch.tensor([0, 40], dtype=torch.int32), D**-0.5
    before, _ = attention(query, key, *batch, value_cache=value)
    value[0, 4] = torch.nan  # token 20
    out, _ = attention(query, key, *batch, value_cache=value)
    torch.testing.assert_close(out[:20], before[:20])
    assert out[20:].isnan().all()


@pytest.mark.parametrize("ops", [paged_ops, reference], ids=["op", "reference"])
def test_cascade(ops):
    query, cache = torch.randn(5, 4, 32), torch.randn(4, 2, 16, 2, 32)
    arguments = (torch.tensor([[0]]), torch.tensor([16]), torch.tensor([[1], [2]]), torch.tensor([7, 4]))
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    call = (*(each.int() for each in arguments), starts, 0.2)
    before = ops.cascade_attention(query, cache, *call)
    poisoned = cache.clone()
    poisoned[1, :, 5] = torch.nan  # of sequence 0: its rows 0 and 1 stand before
    out = ops.cascade_attention(query, poisoned, *call)
    torch.testing.assert_close(out[[0, 1, 4]], before[[0, 1, 4]])
    assert out[2:4].isnan().all()
    cache[0, 0, 3] = torch.nan  # of the prefix, which all see
    assert ops.cascade_attention(query, cache, *call).isnan().all()


@pytest.mark.parametrize("ops", [paged_ops, reference], ids=["op", "reference"])
def test_merge_keeps_what_a_side_is_not_sure_of(ops):
    """A side without keys is not read; NaN in a lse is of a side that has seen it."""
    out, lse = torch.full((1, 1, 4), 2.0), torch.zeros(1, 1)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for args in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, total = ops.merge_attention_states(*args)
        assert torch.equal(merged, out)
        assert torch.equal(total, lse)
    unsure = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    for args in ((out, lse, *unsure), (*unsure, out, lse), (*unsure, *nothing), (*nothing, *unsure)):
        merged, total = ops.merge_attention_states(*args)
        assert merged.isnan().all()
        assert total.isnan().all()
