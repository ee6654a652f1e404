"""Prepared attention calls on the CPU: one call of the C++ function, whatever the strides of the query."""

import pytest
import torch

import paged_ops
from paged_ops import testing
from paged_ops.lowerings.cpu import fused, prepared


@pytest.fixture(autouse=True)
def compiler():
    assert fused.compiled() is not None, "no C++ compiler"


@pytest.fixture
def served(monkeypatch):
    """The queries' strides of the calls that were prepared."""
    strides, attend = [], prepared.Prepared.attend
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(
        prepared.Prepared, "attend", lambda *args: (strides.append(args[1][0].stride()), attend(*args))[1]
    )
    return strides


def inputs(dtype=torch.float32, size=40, seqs=((1, 70), (5, 33), (40, 40), (0, 9))):
    spec = testing.CacheSpec(dtype=dtype, head_size=size)
    return testing.AttentionCase("slices", seqs, spec).inputs()


def rows_of_a_projection(query):
    T, H, D = query.shape
    fused_rows = query.new_full((T, (H + 3) * D + 1), torch.nan)
    view = fused_rows[:, D : D + H * D].unflatten(1, (H, D))
    return view.copy_(query)


def heads_first(query):
    return query.transpose(0, 1).contiguous().transpose(0, 1)


def padded_heads(query):
    wide = query.new_full((*query.shape[:2], query.shape[2] + 3), torch.nan)
    return wide[..., : query.shape[2]].copy_(query)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("view", [rows_of_a_projection, heads_first, padded_heads])
def test_a_query_with_strides_is_not_copied_and_gives_the_same_bits(served, view, dtype, batch_invariant):
    given = inputs(dtype)
    query, *rest = given.args
    expected = paged_ops.paged_attention_with_lse(*given.args, **given.kwargs, batch_invariant=batch_invariant)
    slices = view(query)
    assert not slices.is_contiguous()
    got = paged_ops.paged_attention_with_lse(slices, *rest, **given.kwargs, batch_invariant=batch_invariant)
    assert served == [query.stride(), slices.stride()]
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        testing.assert_same_bytes(name, a, b)


@pytest.mark.parametrize("view", [rows_of_a_projection, heads_first, padded_heads])
def test_also_when_some_sequences_are_left_to_torch(monkeypatch, served, view):
    """The C++ function then gets a list of sequences."""
    monkeypatch.setattr(prepared.processor, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(fused, "has_matrix_unit", lambda: False)
    given = inputs(torch.bfloat16)
    query, *rest = given.args
    expected = paged_ops.paged_attention(*given.args, **given.kwargs)
    got = paged_ops.paged_attention(view(query), *rest, **given.kwargs)
    assert served == []
    testing.assert_same_bytes("out", got, expected)


def test_columns_with_a_stride(served):
    given = inputs()
    query, *rest = given.args
    spread = torch.stack((query, torch.full_like(query, torch.nan)), -1)[..., 0]
    got = paged_ops.paged_attention(spread, *rest, **given.kwargs)
    assert served == []
    torch.testing.assert_close(got, paged_ops.paged_attention(*given.args, **given.kwargs))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_without_lse_the_output_has_the_same_bits(served, batch_invariant):
    given = inputs()
    padded = torch.cat((given.args[0], torch.full_like(given.args[0][:2], torch.nan)))
    args = padded, *given.args[1:]
    out, lse = paged_ops.paged_attention_with_lse(*args, **given.kwargs, batch_invariant=batch_invariant)
    alone = paged_ops.paged_attention(*args, **given.kwargs, batch_invariant=batch_invariant)
    assert len(served) == 2
    testing.assert_same_bytes("out", alone, out)
    assert not out[-2:].any()
    assert (lse[-2:] == -torch.inf).all()
