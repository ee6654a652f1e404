"""Where arguments lie: results on top of arguments, tables past 2^31 tokens, views that are not yet computed."""

import pytest
import torch

import paged_ops
from paged_ops import testing

ATTENTION = torch.ops.paged_ops.paged_attention_with_lse
MERGE = torch.ops.paged_ops.merge_attention_states


def attention_in(buffer):
    """A decode case whose query is the beginning of a buffer, and its result."""
    inputs = testing.case_named("paged_attention_with_lse", "decode-fp32").inputs()
    query = buffer[: inputs.args[0].numel()].view(inputs.args[0].shape).copy_(inputs.args[0])
    return (query, *inputs.args[1:]), ATTENTION.default(*inputs.args)


@pytest.mark.parametrize("shift", [0, 1, 64, 4095])
def test_results_on_top_of_an_argument_are_refused(shift):
    buffer = torch.empty(9000)
    args, (out, lse) = attention_in(buffer)
    before = buffer.clone()
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that query shares"):
        ATTENTION.out(*args, out=buffer[shift:][: out.numel()].view(out.shape), lse=lse)
    with pytest.raises(ValueError, match="lse: expected memory of its own, got memory that kv_cache shares"):
        ATTENTION.out(*args, out=out, lse=args[1].view(-1)[shift:][: lse.numel()].view(lse.shape))
    with pytest.raises(ValueError, match="lse: expected memory of its own, got memory that out shares"):
        ATTENTION.out(*args, out=out, lse=out.view(-1)[shift // 2 :][: lse.numel()].view(lse.shape))
    testing.assert_same_bytes("query", buffer, before)


def test_results_beside_an_argument():
    buffer = torch.empty(9000)
    args, (want, lse) = attention_in(buffer)
    out = buffer[want.numel() :][: want.numel()].view(want.shape)
    ATTENTION.out(*args, out=out, lse=lse)
    testing.assert_same_bytes("out", out, want)


@pytest.mark.parametrize("side", [0, 2])
def test_states_merge_in_place(side):
    args = list(testing.case_named("merge_attention_states", "fp32-d80-h4").inputs().args)
    want = MERGE.default(*args)
    apart = args[side].flatten().clone()
    MERGE.out(*args, out=args[side], lse=args[side + 1])
    for got, expected in zip(args[side : side + 2], want, strict=True):
        testing.assert_same_bytes("a result", got, expected)
    shifted = torch.cat([apart, apart[:4]])
    args[side] = shifted[: apart.numel()].view(args[side].shape)
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got memory that out_[ab] shares"):
        MERGE.out(*args, out=shifted[4:].view(args[side].shape), lse=torch.empty_like(args[1]))


def test_lazily_negated_and_conjugated_views():
    key, value, cache, slots = testing.case_named("reshape_and_cache", "nhd-fp32").inputs().args
    cache.zero_()
    want = cache.clone()
    paged_ops.reshape_and_cache(key, value, want, slots)
    paged_ops.reshape_and_cache(torch._neg_view(key.neg()), value, cache, slots)
    assert torch.equal(cache, want)
    lazy = torch._neg_view(cache)
    for write in (
        lambda: paged_ops.reshape_and_cache(key, value, lazy, slots),
        lambda: paged_ops.copy_blocks([cache, lazy], torch.tensor([[0, 1]])),
        lambda: paged_ops.swap_blocks([cache], [lazy], torch.tensor([[0, 1]])),
    ):
        with pytest.raises(ValueError, match="expected a tensor that can be written, got a negated or conjugated view"):
            write()
    assert torch.equal(cache, want)
    with pytest.raises(ValueError, match="key: expected float32 or float16 or bfloat16, got a complex64 tensor"):
        paged_ops.reshape_and_cache(key.to(torch.complex64).conj(), value, cache, slots)
    inputs = testing.case_named("paged_attention_with_lse", "decode-fp32").inputs()
    query, cache, *rest = inputs.args
    for args in ((torch._neg_view(query.neg()), cache), (query, torch._neg_view(cache.neg()))):
        for got, expected in zip(ATTENTION.default(*args, *rest), ATTENTION.default(*inputs.args), strict=True):
            assert torch.equal(got, expected)


def test_keys_and_values_that_are_views_of_the_cache():
    """Tokens that move within a cache: all is read before anything is written."""
    cache = torch.randn(2, 2, 4, 1, 8)
    before = cache.clone()
    planes = cache[0].unbind(0)  # [4, 1, 8] each
    paged_ops.reshape_and_cache(planes[1], planes[0], cache, torch.tensor([0, 1, 2, 3]))
    assert torch.equal(cache[0], before[0].flip(0))


@pytest.mark.parametrize("M", [2**27 + 1, 2**31])
def test_tables_of_more_tokens_than_int32(M):
    """M * B is past 2^31; the lengths are not."""
    cache, query = torch.randn(3, 2, 16, 1, 16), torch.randn(1, 2, 16)
    near, starts = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    far, lens = near.expand(1, M), torch.tensor([16], dtype=torch.int32)
    want = paged_ops.paged_attention(query, cache, near, lens, starts, 1.0)
    assert torch.equal(paged_ops.paged_attention(query, cache, far, lens, starts, 1.0), want)
    for got, expected in zip(
        paged_ops.gather_kv(cache, far, lens, 16), paged_ops.gather_kv(cache, near, lens, 16), strict=True
    ):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=r"seq_lens: expected lengths .*, got -1 at \[0\]"):
        paged_ops.paged_attention(query, cache, far, lens - 17, starts, 1.0)
    with pytest.raises(ValueError, match=r"block_tables: expected ids of the 3 blocks of the cache .*, got 3"):
        paged_ops.paged_attention(query, cache, (near + 1).expand(1, M), lens, starts, 1.0)
