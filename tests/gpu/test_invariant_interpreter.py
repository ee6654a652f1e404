"""Batch-invariant attention of the Triton kernels in Triton's interpreter: numbers, and bits.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_invariant_interpreter.py``, in a process of its own. Segments
are short here, so that short sequences have several.
"""

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops import testing
from paged_ops.features import Features
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import call, tuning
from paged_ops.lowerings.gpu.attention.hopper import invariant as hopper
from paged_ops.lowerings.gpu.attention.hopper.segments import Cuts
from paged_ops.lowerings.gpu.attention.hopper.softmax import LEAST
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


@pytest.mark.parametrize("sharing", [1, 3, 8])
@pytest.mark.parametrize("fold", [hopper.Fold(32, 4, 2), hopper.Fold(128, 2, 2)], ids=str)
def test_states_of_segments_are_folded_from_the_last_to_the_first(fold, sharing):
    """The same bits by any number of programs, with states of nothing seen among them; rows of padding."""
    torch.manual_seed(0)
    K, G, D, T = 2, 3, 64, 6
    query_lens, lens = (1, 2, 1, 0), (70, 1100, 640, 300)
    cuts, division = Cuts(1, 1 << 20, 8, 60), tuning.division(8, len(lens))
    counts = [-(-n // 128) if q else 0 for q, n in zip(query_lens, lens, strict=True)]
    places = sum(counts) * K
    assert places <= cuts.states
    parts = torch.randn(cuts.states, cuts.rows, D)
    pairs = torch.stack((torch.randn(cuts.states, cuts.rows), torch.rand(cuts.states, cuts.rows) + 1), 2)
    least = float(torch.tensor(LEAST.value))  # as float32
    pairs[torch.rand(pairs.shape[:2]) < 0.2] = torch.tensor([least, 0.0])
    parts[pairs[..., 0] == least] = 0.0
    out, lse = torch.full((T, K * G, D), torch.nan), torch.full((T, K * G), torch.nan)
    side = spec.Side(D, 1, 1, 0, 0, 0, 0, 1, None)
    of_call = spec.spec_of(
        torch.zeros(T, K * G, D), *[torch.zeros(4, 16, K, 1, D), torch.zeros(4, 16, K, D)], 0, torch.zeros(4, 2).int(),
        None, Features(batch_invariant=True), torch.float32, True,
    ).for_merge()._replace(v_side=side)  # fmt: skip
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    given = dict.fromkeys(spec.Pointers._fields)
    given |= {"out": out, "lse": lse, "parts": parts, "part_lse": pairs, "seq_lens": torch.tensor(lens).int()}
    tensors = spec.Pointers(**{**given, "query_start_loc": starts})
    constants = {
        "SPEC": of_call, "PLAN": hopper.Plan(division, cuts, 8), "FOLD": fold, "PDL": False,
        "TILE": spec.TileShape(64, 128, 0, D, 0, False),
    }  # fmt: skip
    hopper.invariant_states_kernel[(len(lens) * K * sharing,)](tensors, 0.3, 0.0, 0, 0, 2, len(lens), T, **constants)
    first = 0
    for s, count in enumerate(counts):
        for kh in range(K if count > 1 else 0):
            for r in range(query_lens[s] * G):
                acc, m, l = torch.zeros(D), torch.tensor(least), torch.tensor(0.0)
                for segment in reversed(range(count)):
                    place = (first + segment) * K + kh
                    m_part, l_part = pairs[place, r]
                    if m_part == least:
                        continue
                    m_new = torch.maximum(m, m_part)
                    decay, weight = (torch.exp2(each - m_new) for each in (m, m_part))
                    acc, l, m = acc * decay + parts[place, r] * weight, l * decay + l_part * weight, m_new
                row, head = int(starts[s]) + r // G, kh * G + r % G
                torch.testing.assert_close(out[row, head], acc / l)
                torch.testing.assert_close(lse[row, head], m * math.log(2) + l.log())
        if count == 1:  # the other kernel's
            assert out[starts[s] : starts[s + 1]].isnan().all()
        first += count
    assert not out[starts[-1] :].any() and (lse[starts[-1] :] == -torch.inf).all()
    if sharing > 1:
        again = [torch.full_like(each, torch.nan) for each in (out, lse)]
        tensors = tensors._replace(out=again[0], lse=again[1])
        hopper.invariant_states_kernel[(len(lens) * K,)](tensors, 0.3, 0.0, 0, 0, 2, len(lens), T, **constants)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip((out, lse), again, strict=True))
