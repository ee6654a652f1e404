"""Batch-invariant attention of the Triton kernels in Triton's interpreter: numbers, and bits.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_invariant_interpreter.py``, in a process of its own. Segments
are short here, so that short sequences have several.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops import testing
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu.attention import call, tuning
from paged_ops.lowerings.gpu.attention.triton import invariant
from tests.fuzz import invariant as campaign
from tests.fuzz import runner

pytestmark = pytest.mark.interpreter

CASES = (
    *(
        "decode-fp32",
        "long-fp16",
        "holes-fp32",
        "query_past_keys-fp16",
        "padding_only",
        "noncausal-fp16",
        "window-fp16",
    ),
    *("chunk", "cap-fp16", "alibi", "sinks-fp16", "sparse", "ranges-fp16", "first-fp16", "first", "hnd-all-features"),
    *("x_packed-e5m2-fp16", "interleaved-e5m2-fp16", "nhd-e4m3-fp16", "h71-k1-d64", "h5-k1-d13", "d192-dv128-fp16"),
    *("fp8-output-fp16", "selected-fp16", "latent-fp32", "latent-window-sinks-fp16", "latent-e4m3-fp16"),
    *("latent-rows-fp16", "latent-selected", "latent-h40-d576-fp16", "h80-k2-d264-fp16"),
)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(invariant, "SEGMENT", 64)
    call.forget()
    yield
    call.forget()


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name):
    case = testing.case_named("paged_attention_with_lse", f"invariant-{name}")
    testing.check("paged_attention_with_lse", case, "cpu", gpu.paged_attention_with_lse)


@pytest.mark.parametrize("number", [0, 1])
def test_campaign(number):
    """In any company, order, block size and layout, padded, in chunks, token by token."""
    results = runner.run_cases("invariant", campaign.run, [number], runner.Options(seed=1, device=runner.INTERPRETER))
    assert not results.findings, results.findings[0]["what"]
    assert results.counts["rows"]


@pytest.fixture
def one_sequence():
    torch.manual_seed(0)
    n, (H, K), D, B = 420, (6, 2), 16, 16
    blocks = -(-n // B)
    query, kv_cache = torch.randn(n, H, D), torch.randn(blocks, 2, B, K, D)
    table = torch.randperm(blocks).int()[None]

    def attend(first, end, **features):
        """Rows ``first:end`` of the sequence when it has ``end`` tokens."""
        ints = torch.tensor([end]).int(), torch.tensor([0, end - first]).int()
        call.forget()
        return gpu.paged_attention_with_lse(
            query[first:end], kv_cache, table, *ints, 0.25, batch_invariant=True, **features
        )

    with campaign.ordered_matmuls():
        yield attend, n


@pytest.mark.parametrize(
    ("features", "slots"),
    [({}, 1), ({}, 4), ({}, 64), ({"sliding_window": 150, "num_first_tokens": 20}, 64), ({"sliding_window": 200}, 64)],
)
def test_any_number_of_programs(one_sequence, slots, features, monkeypatch):
    """Units in one part, in several, and whole because a program could not store their segments: the same bits."""
    attend, n = one_sequence
    wanted = attend(n - 40, n, **features)  # invariant_prefill_kernel
    monkeypatch.setattr(invariant, "FEWEST_SLOTS", slots)
    monkeypatch.setattr(invariant, "MOST_SLOTS", slots)
    for programs, rows in ((1, 1), (3, 3), (20, 1)):
        monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
        got = attend(n - rows, n, **features)
        assert all(torch.equal(a, b[-rows:]) for a, b in zip(got, wanted, strict=True)), programs


@pytest.mark.parametrize(
    ("H", "K", "D", "features"),
    [(6, 2, 16, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])}), (17, 1, 24, {"value_head_size": 16})],
)
def test_selected_keys_in_any_number_of_programs(H, K, D, features, monkeypatch):
    """Segments of a list in one program, and in one program each; rows alone, and together, with padding."""
    torch.manual_seed(0)
    n, rows, k, B = 200, 3, 150, 16
    blocks = -(-n // B)
    latent = "value_head_size" in features
    query, kv_cache = torch.randn(rows, H, D), torch.randn(blocks, *((B, D) if latent else (2, B, K, D)))
    table = torch.randperm(blocks).int()[None]
    lists = torch.stack([torch.randperm(n - rows)[:k] for _ in range(rows * K)]).view(rows, K, k).int()
    lists[2, :, 50:130] = -1

    def attend(first, end, padding, programs):
        monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
        call.forget()
        ints = torch.tensor([n - rows + end]).int(), torch.tensor([0, end - first]).int()
        padded = [torch.nn.functional.pad(each[first:end], (0, 0, 0, 0, 0, padding)) for each in (query, lists)]
        given = {"batch_invariant": True, "selected_keys": padded[1], **features}
        out, lse = gpu.paged_attention_with_lse(padded[0], kv_cache, table, *ints, 0.25, **given)
        assert not out[end - first :].any() and (lse[end - first :] == -torch.inf).all()
        return out[: end - first], lse[: end - first]

    with campaign.ordered_matmuls():
        together = attend(0, rows, 1, 1)
        for first, programs in ((0, 1000), (1, 1), (2, 1000)):
            alone = attend(first, first + 1, 1, programs)
            assert all(torch.equal(a, b[first : first + 1]) for a, b in zip(alone, together, strict=True))
        monkeypatch.setattr(invariant, "SEGMENT", 32)
        assert not all(map(torch.equal, attend(2, rows, 0, 1), [each[2:] for each in together]))


def test_other_cuts_give_other_bits(one_sequence, monkeypatch):
    attend, n = one_sequence
    wanted = attend(n - 1, n)
    monkeypatch.setattr(invariant, "SEGMENT", 32)
    assert not all(map(torch.equal, attend(n - 1, n), wanted))
