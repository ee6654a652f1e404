"""What ``explain`` says of calls: the kernel that serves them, and the reasons against the others."""

import json

import pytest
import torch
from typer.testing import CliRunner

import paged_ops
from paged_ops.cli import app
from paged_ops.lowerings.cpu import fused, processor

NAMES = "query", "kv_cache", "block_tables", "seq_lens", "query_start_loc", "scale"
CACHE = torch.zeros(5, 2, 8, 2, 16)


def a_call(T=4, S=4, H=4, K=2, D=16, dtype=torch.float32):
    """The arguments of attention on the CPU, with values that must not be read."""
    tables, lens, starts = (torch.full(shape, -7, dtype=torch.int32) for shape in ((S, 3), (S,), (S + 1,)))
    kv_cache = torch.full((5, 2, 8, K, D), torch.nan, dtype=dtype)
    return torch.full((T, H, D), torch.nan, dtype=dtype), kv_cache, tables, lens, starts, 0.25


def reasons_of(answer):
    return {name: "; ".join(reasons) for name, reasons in answer.others}


def writes(slots=3, **changes):
    key = torch.zeros(3, 2, 16)
    given = {"key": key, "value": key, "kv_cache": CACHE, "slot_mapping": torch.arange(slots)}
    return given | changes


def attends(**changes):
    return dict(zip(NAMES, a_call(), strict=True)) | changes


@pytest.mark.parametrize("op", [paged_ops.paged_attention, "paged_attention_with_lse"])
def test_the_kernel_of_the_cpu(op, monkeypatch):
    monkeypatch.setattr(fused, "compiled", lambda: lambda _: 1)
    answer = paged_ops.explain(op, *a_call())
    assert answer.op == getattr(op, "__name__", op) and answer.device == "cpu"
    assert answer.kernel == "the C++ function" and len(answer.others) == 2
    assert str(answer).splitlines()[0] == f"{answer.op} on cpu: the C++ function"
    answer = paged_ops.explain(op, *a_call(), block_sparse=[8, 1, 2, 1, 0, 0, 1])
    assert answer.kernel.startswith("float32 matmuls")
    assert all("block_sparse" in reason for reason in reasons_of(answer).values())
    monkeypatch.setattr(fused, "compiled", lambda: None)
    answer = paged_ops.explain(op, *a_call())
    assert answer.kernel.startswith("PyTorch's flash kernel")
    assert "compiler" in reasons_of(answer)["the C++ function"]
    assert paged_ops.explain(op, *a_call(), soft_cap=3.0).kernel.startswith("float32 matmuls")


def test_the_cpu_names_both_kernels_where_rows_decide(monkeypatch):
    monkeypatch.setattr(fused, "compiled", lambda: lambda *_: 0)
    monkeypatch.setattr(processor, "has_matrix_unit", lambda: True)
    answer = paged_ops.explain("paged_attention", *a_call(dtype=torch.bfloat16))
    assert "more than 32 rows" in answer.kernel


def test_other_ops_have_one_implementation():
    key = torch.zeros(3, 2, 16)
    answer = paged_ops.explain("reshape_and_cache", key, key, torch.zeros(5, 2, 8, 2, 16), torch.arange(3))
    assert answer.kernel == "one implementation, which serves all calls" and not answer.others


def test_arguments_may_be_given_by_name():
    assert paged_ops.explain("paged_attention", **attends()) == paged_ops.explain("paged_attention", *a_call())
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        paged_ops.explain("paged_attention", *a_call(), window=3)


def test_what_explain_refuses():
    with pytest.raises(ValueError, match="op: expected one of"):
        paged_ops.explain("attention", *a_call())
    with pytest.raises(ValueError, match="got no tensor"):
        paged_ops.explain("paged_attention")
    query, *rest = a_call()
    with pytest.raises(ValueError, match="cache"):
        paged_ops.explain("paged_attention", query, rest[0][0, 0, 0], *rest[1:])
    with pytest.raises(ValueError, match="device"):
        paged_ops.explain("paged_attention", *(each.to("meta") for each in (query, *rest[:-1])), 0.25)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("paged_attention", attends(causal=None)),
        ("paged_attention_with_lse", attends(batch_invariant=None)),
        ("paged_attention", attends(causal="no")),
        ("paged_attention", attends(sliding_window=2.5)),
        ("paged_attention", attends(scale=None)),
        ("paged_attention", attends(query=torch.zeros(4, 4, 16, requires_grad=True))),
        ("reshape_and_cache", writes(slots=4)),
        ("reshape_and_cache", writes(slot_mapping=torch.zeros(3))),
        ("reshape_and_cache", writes(slot_mapping=[0, 1, 2])),
        ("reshape_and_cache", writes(value=CACHE[0, 0, :3])),
        ("copy_blocks", {"kv_caches": [CACHE], "block_mapping": torch.zeros(1, 2)}),
        ("select_keys", {"index_query": torch.zeros(4, 2, 16), "index_cache": torch.zeros(5, 8, 16), "k": 0}
         | {name: attends()[name] for name in NAMES[2:5]}),
    ],
)  # fmt: skip
def test_a_call_that_the_op_refuses_is_not_explained(op, arguments):
    with pytest.raises((ValueError, RuntimeError)) as refused:
        getattr(paged_ops, op)(**arguments)
    with pytest.raises(refused.type) as not_explained:
        paged_ops.explain(op, **arguments)
    assert str(not_explained.value) == str(refused.value)


def test_a_number_may_be_a_tensor():
    call = attends(scale=torch.tensor(0.25), causal=torch.tensor(True))
    assert paged_ops.explain("paged_attention", **call) == paged_ops.explain("paged_attention", **attends())


def described(*options):
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("options", "kernel", "launches", "against"),
    [
        ([], "hopper.shares", ["shares_kernel", "merge_kernel"], {"hopper.dense": "fits a tile of split_kernel"}),
        (["--query-lens", "2x1"], "triton.decode", ["split_kernel", "merge_kernel"],
         {"hopper.shares": "packed query rows"}),
        (["--query-lens", "8x1", "--heads", "32/4", "--head-size", "512"], "hopper.few", ["few_kernel", "merge_kernel"],
         {"hopper.shares": "head sizes: expected"}),
        (["--query-lens", "63x1,2048"], "hopper.mixed", ["mixed_kernel", "merge_kernel"], {}),
        (["--query-lens", "2000", "--feature", "sliding_window=64"], "hopper.dense",
         ["split_kernel", "dense_kernel", "merge_kernel"], {"hopper.fp8": "expected float8"}),
        (["--query-lens", "2000", "--feature", "sliding_window=64", "--feature", "num_first_tokens=4"], "hopper.dense",
         ["split_kernel", "dense_kernel", "merge_kernel"], {"hopper.mixed": "first: not applied"}),
        (["--query-lens", "2000", "--feature", "alibi_slopes"], "triton.prefill",
         ["split_kernel", "prefill_kernel", "merge_kernel"], {"hopper.dense": "alibi: not applied"}),
        (["--device", "A100", "--cache-dtype", "e4m3", "--feature", "k_scale"], "triton.decode",
         ["split_kernel", "merge_kernel"], {"triton.prefill": "triton.decode comes first"}),
        (["--feature", "selected_keys"], "triton.selected", ["selected_kernel"],
         {"triton.decode": "selected: not applied"}),
        (["--layout", "LATENT", "--heads", "128/1", "--head-size", "576", "--value-head-size", "512"], "hopper.latent",
         ["latent_hopper_kernel", "merge_kernel"], {"triton.decode": "head_size: at most 512"}),
    ],
)  # fmt: skip
def test_described_calls_on_gpus_that_are_not_present(options, kernel, launches, against):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from paged_ops.lowerings.gpu.attention import call, choose
    from paged_ops.lowerings.gpu.target import NEWEST_KNOWN, OLDEST_GLUON, TRITON

    if not OLDEST_GLUON <= TRITON <= NEWEST_KNOWN:
        pytest.skip("Gluon kernels are used with known Tritons alone")
    given = options if "--device" in options else ["--device", "H200", *options]
    answer = json.loads(described(*given, "--json"))
    assert answer["kernel"] == kernel
    assert [each.partition(":")[0] for each in answer["launches"]] == launches
    assert all("grid" in each and "query rows" in each for each in answer["launches"])
    others = {name: "; ".join(reasons) for name, reasons in answer["others"]}
    assert all(text in others[name] for name, text in against.items()), others
    assert not (call._calls or call._signatures), "explain keeps nothing"
    names = [each.__name__.partition("attention.")[2] for each in choose.hopper_kernels()]
    if "A100" not in given:
        assert {kernel, *others} >= {*names}


@pytest.mark.parametrize(("T", "S"), [(0, 2), (2, 0), (0, 0)])
def test_a_batch_without_rows_or_sequences_launches_nothing(T, S):
    pytest.importorskip("triton")
    from paged_ops.lowerings.gpu.attention import call
    from tests.gpu.step import H200

    *tensors, scale = a_call(T, S, dtype=torch.float16)
    answer = call.explain("paged_attention", *(each.to("meta") for each in tensors), scale, target=H200)
    assert answer.kernel.startswith("none") and not answer.launches


def test_a_described_call_on_the_cpu():
    assert described("--dtype", "float32").startswith("paged_attention on cpu: ")


def test_values_of_features():
    latent = "--layout LATENT --heads 16/1 --head-size 576 --value-head-size 512 --cache-dtype uint8 --device H200"
    assert "latent" in described(*latent.split(), "--feature", "kv_cache_dtype=fp8_ds_mla").partition("\n")[0]
    assert "not the C++ function: block_sparse" in described("--feature", "block_sparse=[16,1,1,0,0,0,1]")
    assert "flash kernel, per sequence: soft_cap" in described("--feature", "causal=false", "--feature", "soft_cap=30")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "H20"], "--device: expected cpu, xla, cuda"),
        (["--heads", "32"], "--heads: expected two numbers"),
        (["--query-lens", "3x"], "--query-lens: expected numbers"),
        (["--dtype", "real"], "--dtype: expected the name of a dtype"),
        (["--layout", "nhd"], "--layout: expected one of"),
        (["--layout", "LATENT"], "--heads: expected one key/value head in a LATENT cache"),
        (["--device", "cuda:99"], "--device: expected "),
        (["--head-size", "0"], "--head-size: expected a number above 0, got 0"),
        (["--query-lens", "9", "--seq-len", "8"], "--seq-len: expected at least the 9 of --query-lens, got 8"),
        (["--feature", "sinsk"], "--feature: expected one of causal, sliding_window, "),
        (["--feature", "causal=no"], "--feature: expected causal= and true or false, got causal=no"),
        (["--feature", "sliding_window"], "--feature: expected sliding_window= and an integer, got sliding_window"),
        (["--feature", "sinks=3"], "--feature: expected sinks without a value, as it is a tensor, got sinks=3"),
        (["--feature", "block_sparse"], "--feature: expected block_sparse= and a list, got block_sparse"),
    ],
)
def test_wrong_descriptions(options, message):
    result = CliRunner().invoke(app, ["explain", *options])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)
