"""Prompts of one length on the CPU where the C++ function does not serve them: few torch ops, and whatever these cannot
serve goes to the checks and the other torch ops."""

import pytest
import torch

import paged_ops
from paged_ops import reference, testing
from paged_ops.lowerings.cpu import fused, prepared

OPS = (paged_ops.paged_attention, paged_ops.paged_attention_with_lse)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Whether each call was served, in turn. There is no compiler."""
    served, attend = [], prepared.Prompts.attend

    def noted(*args):
        done = attend(*args)
        served.append(done is not None)
        return done

    monkeypatch.setattr(fused, "compiled", lambda: None)
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(prepared.Prompts, "attend", noted)
    return served


def prompts(S=1, n=37, dtype=torch.bfloat16, form="one tensor"):
    """A call with S prompts of n tokens: positional arguments, and arguments with names."""
    B, K, D = 8, 2, 32
    generator = torch.Generator().manual_seed(S * n)
    M = -(-n // B)
    cache = torch.randn(S * M + 3, 2, B, K, D, generator=generator).to(dtype)
    tables = torch.randperm(S * M + 3, generator=generator)[: S * M].view(S, M).int()
    lens, starts = torch.full((S,), n).int(), (torch.arange(S + 1) * n).int()
    query = torch.randn(S * n, 6, D, generator=generator).to(dtype)
    more = {}
    if form == "two tensors":
        cache, more["value_cache"] = cache.unbind(1)
    if form == "side by side":  # as vLLM's caches
        cache, more["value_cache"] = torch.cat(cache.transpose(2, 3).unbind(1), -1).transpose(1, 2).split(D, 3)
    if form == "window":
        more["sliding_window"] = n
    return (query, cache, tables, lens, starts, 0.2), more


@pytest.mark.parametrize("form", ["one tensor", "two tensors", "side by side", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("S", "n"), [(1, 1), (1, 37), (1, 64), (3, 37)])
def test_first_and_repeated_calls(served, S, n, dtype, form):
    args, more = prompts(S, n, dtype, form)
    want = reference.paged_attention_with_lse(args[0].double(), *args[1:], **more)
    for op in OPS:
        for turn in range(2):
            got = op(*args, **more)
            got = got if isinstance(got, tuple) else (got,)
            for result, wanted in zip(got, want, strict=False):
                assert result.is_contiguous()
                torch.testing.assert_close(
                    result.double(), wanted.double(), atol=2e-5 if dtype == torch.float32 else 0.02, rtol=0
                )
            assert served[-1], turn
    assert len(served) == 4


def test_the_cache_of_another_layer(served):
    args, _ = prompts()
    paged_ops.paged_attention(*args)
    other = args[0], args[1] * 2, *args[2:]
    want = reference.paged_attention(other[0].double(), *other[1:])
    torch.testing.assert_close(paged_ops.paged_attention(*other).double(), want, atol=0.03, rtol=0)
    assert served == [True, True]


@pytest.mark.parametrize(
    ("lens", "starts"), [([30, 44], [0, 30, 74]), ([37, 40], [0, 37, 74]), ([37, 37], [0, 37, 70])]
)
def test_other_lengths_of_the_same_shapes(served, lens, starts):
    args, _ = prompts(2)
    tables = torch.arange(12).view(2, 6).int()
    args = *args[:2], tables, *args[3:]
    paged_ops.paged_attention(*args)
    args = *args[:3], torch.tensor(lens).int(), torch.tensor(starts).int(), args[5]
    want = reference.paged_attention(args[0].double(), *args[1:])
    torch.testing.assert_close(paged_ops.paged_attention(*args).double(), want, atol=0.03, rtol=0)
    assert served[:2] == [True, False]


@pytest.mark.parametrize("block", [-1, 8, 1 << 30])
def test_blocks_outside_the_cache(served, block):
    args, _ = prompts()
    paged_ops.paged_attention(*args)
    args[2][0, 3] = block
    with pytest.raises(ValueError, match="block_tables"):
        paged_ops.paged_attention(*args)
    assert served[1] is False


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_hidden_numbers(served, plane, number):
    """Rows before a key do not see it, whatever it is."""
    args, _ = prompts()
    (_, cache, tables, *_), last = args, 36
    before = paged_ops.paged_attention(*args)
    cache[tables[0, last // 8], plane, last % 8, 0, 0] = number
    after = paged_ops.paged_attention(*args)
    torch.testing.assert_close(after[:last], before[:last], atol=0.02, rtol=0)
    assert torch.isfinite(after[:last]).all()


def test_results_that_are_given(served):
    args, _ = prompts()
    want = paged_ops.paged_attention_with_lse(*args)
    out, lse = (torch.full_like(each, torch.nan) for each in want)
    torch.ops.paged_ops.paged_attention_with_lse.out(*args, out=out, lse=lse)
    for name, got, wanted in zip(("out", "lse"), (out, lse), want, strict=True):
        testing.assert_same_bytes(name, got, wanted)
    with pytest.raises(ValueError, match="share"):
        torch.ops.paged_ops.paged_attention.out(*args, out=args[0])


def test_padding_of_the_batch(served):
    args, _ = prompts(1, 40)
    lens, starts = torch.tensor([37]).int(), torch.tensor([0, 37]).int()
    out = paged_ops.paged_attention(*args[:3], lens, starts, args[5])
    assert not out[37:].any()
    assert not any(served)


def test_no_sequences(served):
    args, _ = prompts()
    none = args[2][:0], args[3][:0], args[4][:1], args[5]
    assert not paged_ops.paged_attention(*args[:2], *none).any()
    assert not served


def test_a_compiler_that_comes_later(served, monkeypatch):
    args, _ = prompts()
    paged_ops.paged_attention(*args)
    monkeypatch.undo()
    assert fused.compiled() is not None, "no C++ compiler"
    paged_ops.paged_attention(*args)
    assert isinstance(prepared._prepared[prepared.signature(args, {})], prepared.Prepared)
