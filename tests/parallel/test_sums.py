"""Sums over ranks with the residual add and the norm behind them: the ops, and where models take them; gloo."""

import re

import pytest
import torch

from paged_ops.fake.models import EXCHANGES, REDUCERS
from paged_ops.parallel import symmetric

pytest.importorskip("accelerate", reason="transformers shards models with accelerate")


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (4, torch.float32)])
def test_ops_round_where_the_steps_one_by_one_do(run_on, size, dtype):
    for kind, reason, errors, same in run_on("sums_cases.ops", size, 100, dtype=dtype):
        assert kind == ("symmetric" if torch.cuda.device_count() >= size else "plain")
        assert (reason is None) == (kind == "symmetric")
        assert errors[0] <= (1.5 if dtype == torch.bfloat16 else 3)
        assert errors[1] <= (6 if dtype == torch.bfloat16 else 12)
        assert same


def test_bad_calls_are_told(run_on):
    wanted = [
        "columns: expected at least 1, got 0",
        "dtype: expected torch.float32 or torch.float16 or torch.bfloat16, got torch.int32",
        "x: expected a tensor of torch.float32, as its reducer, got a float16 tensor",
        "x: expected 8 columns, as its reducer, got",
        r"residual: expected 2 in dimension 0 of \[..., C\]",
        r"weight: expected 8 in dimension 0 of \[C\]",
        "weight: expected float32, got a float16 tensor",
        "eps: expected 0 or more, got -1.0",
        "x: expected a multiple of 8 columns, as its reducer, got",
        r"inner_weight: expected 8 in dimension 0 of \[C\]",
        "reducer: expected the name of an AllReduce that is not closed",
    ]
    for results in run_on("sums_cases.refusals", 2, 60):
        for got, want in zip(results, wanted, strict=True):
            assert re.search(want, got)


def test_contexts_are_not_reducers_and_reducers_not_contexts(monkeypatch):
    monkeypatch.setitem(EXCHANGES, "context", workspace := symmetric.Workspace(0, (torch.zeros(8, dtype=torch.uint8),)))
    monkeypatch.setitem(REDUCERS, "reducer", workspace)
    x = torch.zeros(2, 8)
    for op in (torch.ops.paged_ops_parallel.all_reduce, torch.ops.paged_ops_parallel.all_gather_columns):
        with pytest.raises(ValueError, match="reducer: expected the name of an AllReduce that is not closed"):
            op(x, "context")
    with pytest.raises(ValueError, match="context: expected the name of a Context that is alive"):
        torch.ops.paged_ops_parallel.merge_over_ranks(x[None], x, "reducer")


def test_ranks_agree_on_whether_their_memory_can_be_shared(run_on):
    cannot = "rank 1 of 2: its GPU cannot address another rank's"
    assert run_on("sums_cases.agrees", 2, 60) == [[None, cannot, "the ranks are on different hosts"]] * 2


def test_an_aborted_workspace_says_so():
    parts = tuple(torch.full((64,), 255, dtype=torch.uint8) for _ in range(2))
    workspace = symmetric.Workspace(1, parts)
    assert [each.shape for each in workspace.views(torch.int32, 2, 3, offset=16)] == [(2, 3)] * 2
    assert (workspace.views(torch.int16, 32)[0] == -1).all()
    with pytest.raises(ValueError, match="at most the workspace's 64 bytes, got 68 bytes"):
        workspace.views(torch.int32, 17)
    assert not workspace.aborted
    workspace.abort()
    assert workspace.aborted


def test_parts_of_rows_that_are_gathered():
    from paged_ops.integrations.transformers.all_reduce_fusion import columns_of_parts

    assert columns_of_parts(64128) == 8016
    assert columns_of_parts(75968) == 4748  # of 64·1187 no multiple of 8 fits
    assert columns_of_parts(128) == 128
    assert columns_of_parts(2 * 8209) is None  # a prime


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


PRODUCTS = {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")}


@pytest.mark.parametrize(
    ("name", "fused", "alone", "changes"),
    [
        ("llama", True, False, {}),
        ("qwen3", True, False, {}),
        ("gemma2", True, False, {}),  # what it adds is normed
        ("gpt_oss", False, False, {}),  # transformers shards its vocabulary alone
        ("llama", False, True, {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_sums_of_models(run_on, folder, name, fused, alone, changes):
    for (kind, _, *told), same in run_on("sums_cases.of_model", 2, 60, name=name, folder=folder, **changes):
        assert same
        assert set(told[0]) == (PRODUCTS if fused else set())
        assert set(told[1]) - {"model.embed_tokens"} == (PRODUCTS if alone else set())
        # some versions of transformers spread the vocabulary: known is torch's own embedding, not one with a scale
        assert set(told[3]) <= ({"model.embed_tokens"} if name == "gemma2" else set())
        assert told[2] == ("lm_head",)
        assert kind == ("symmetric" if torch.cuda.device_count() >= 2 else "plain")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replays_with_new_inputs(run_on):
    assert run_on("sums_cases.replays", 2, 100, count=10_000) == [("symmetric", [0, 0])] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_sum_that_waits_for_ever_can_be_ended(run_on):
    (waited, seconds), _ = run_on("sums_cases.ends", 2, 60, spoils=True)
    assert waited
    assert seconds < 1
