"""Every declared op, on every case, against the reference: `pytest tests/test_ops.py --device cuda` on a GPU."""

import inspect
import textwrap
from collections import namedtuple

import pytest
import torch
from expecttest import assert_expected_inline

import paged_ops
from paged_ops import fake, reference, registry, testing
from paged_ops.features import Features
from paged_ops.layouts import FP8_DTYPES
from paged_ops.lowerings.tpu import ragged

ALL = [(name, case) for name, cases in testing.CASES.items() for case in cases]
COMPILED = [(name, testing.case_named(name, case)) for name, cases in testing.COMPILED.items() for case in cases]


def ids(pairs):
    return [f"{name}-{case.name}" for name, case in pairs]


@pytest.mark.parametrize(("name", "case"), ALL, ids=ids(ALL))
def test_matches_reference(name, case, device):
    testing.check(name, case, device)


FUNCTIONAL = [(name, case) for name, case in COMPILED if not testing.mutated_arguments(name)]
LISTED = [(name, case) for name, case in FUNCTIONAL if "list" in getattr(torch.ops.paged_ops, name).overloads()]


@pytest.mark.parametrize(("name", "case"), FUNCTIONAL, ids=ids(FUNCTIONAL))
def test_out_overload(name, case, device):
    testing.check_out(name, case, device)


@pytest.mark.parametrize(("name", "case"), LISTED, ids=ids(LISTED))
def test_list_overload(name, case, device):
    """It returns what the op returns, and a call that names no overload is a call of the op."""
    inputs, packet = case.inputs(device), getattr(torch.ops.paged_ops, name)
    want = packet.default(*inputs.args, **inputs.kwargs)
    (got,) = packet.list(*inputs.args, **inputs.kwargs)
    testing.assert_same_bytes(name, got, want)
    testing.assert_same_bytes(name, packet(*inputs.args, **inputs.kwargs), want)
    torch.library.opcheck(packet.list, inputs.args, inputs.kwargs, test_utils="test_faketensor")


@pytest.mark.parametrize(("name", "case"), COMPILED, ids=ids(COMPILED))
def test_opcheck(name, case, device):
    inputs = case.inputs(device)
    overload = getattr(torch.ops.paged_ops, name).default
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        torch.library.opcheck(overload, inputs.args, inputs.kwargs, test_utils=utils)
        # Schema checking multiplies its inputs, which torch cannot do in float8: there the same bytes go in as uint8.
        args, kwargs = float8_as_uint8(inputs)
        torch.library.opcheck(overload, args, kwargs, test_utils="test_schema")


def float8_as_uint8(inputs):
    def convert(value):
        if isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES:
            return value.view(torch.uint8)
        return [convert(each) for each in value] if isinstance(value, list) else value

    kinds = {value.dtype for value in inputs.args if isinstance(value, torch.Tensor)} & set(FP8_DTYPES)
    kwargs = {key: convert(value) for key, value in inputs.kwargs.items()}
    if kinds:
        kwargs["kv_cache_dtype"] = "fp8_e5m2" if kinds == {testing.F8_E5M2} else "fp8_e4m3"
    return tuple(convert(value) for value in inputs.args), kwargs


@pytest.mark.parametrize("name", sorted(registry.OPS))
def test_declared_once_found_everywhere(name):
    declared = inspect.signature(registry.OPS[name])
    assert name in paged_ops.__all__
    assert testing.CASES[name], "an op without cases is an op without tests"
    assert inspect.getdoc(registry.OPS[name])
    assert callable(getattr(fake, name))
    assert callable(registry.lowering(name, "CPU"))
    explicit = inspect.signature(getattr(reference, name)).parameters
    named = [p.name for p in explicit.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [n for n in declared.parameters if n in named] == named


def test_features_are_the_keyword_arguments_of_attention():
    for name in ("paged_attention", "paged_attention_with_lse"):
        keyword_only = [
            p for p in inspect.signature(registry.OPS[name]).parameters.values() if p.kind == p.KEYWORD_ONLY
        ]
        assert {p.name: p.default for p in keyword_only} == Features()._asdict()


@pytest.mark.parametrize("key", sorted(registry.LOWERINGS))
def test_results_have_one_home(key):
    """An op that finds no lowering says so, names both, and never falls back."""
    with pytest.raises(NotImplementedError, match=rf"paged_ops\.teleport_blocks: no lowering for {key} yet"):
        registry.lowering("teleport_blocks", key)


def test_each_argument_of_attention_has_a_case():
    """A lowering that has not heard of an argument ignores it: no other test would see that."""
    cases = [testing.case_named("paged_attention", name) for name in testing.COMPILED["paged_attention"]]
    assert {name for case in cases for name in case.inputs().kwargs} == set(Features._fields)


def test_the_ragged_kernel_refuses_what_it_has_not_heard_of(monkeypatch):
    future = namedtuple("Features", [*Features._fields, "tree_mask"])
    monkeypatch.setattr(ragged, "Features", future)
    assert ragged._kernel_reasons({"tree_mask": True}) == ["the ragged kernel has no tree_mask"]
    assert ragged._kernel_reasons(dict.fromkeys(ragged.KERNEL_ARGUMENTS[2:], 1) | {"kv_cache_dtype": "auto"}) == []


def test_requires_grad_is_refused(device):
    inputs = testing.case_named("paged_attention", "decode-fp32").inputs(device)
    query = inputs.args[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"no backward, but query of shape \[8, 8, 64\] requires grad"):
        paged_ops.paged_attention(query, *inputs.args[1:], **inputs.kwargs)
    with torch.no_grad():
        paged_ops.paged_attention(query, *inputs.args[1:], **inputs.kwargs)


def test_cache_written_in_grad_mode_stays_writable(device):
    inputs = testing.case_named("reshape_and_cache", "nhd-fp32").inputs(device)
    for _ in range(2):
        paged_ops.reshape_and_cache(*inputs.args, **inputs.kwargs)
    inputs.args[2].zero_()
    assert not inputs.args[2].requires_grad


def test_schemas():
    """The schemas are public: a change here breaks exported programs."""
    packets = [getattr(torch.ops.paged_ops, name) for name in sorted(registry.OPS)]
    schemas = [str(getattr(packet, overload)._schema) for packet in packets for overload in packet.overloads()]
    assert_expected_inline(
        "\n\n".join(textwrap.fill(schema, 110) for schema in schemas),
        """\
paged_ops::cascade_attention(Tensor query, Tensor kv_cache, Tensor prefix_block_table, Tensor prefix_len,
Tensor suffix_block_tables, Tensor suffix_lens, Tensor query_start_loc, float scale, *, Tensor?
value_cache=None, float soft_cap=0., Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor?
output_scale=None, str kv_cache_dtype="auto", SymInt? value_head_size=None) -> Tensor

paged_ops::cascade_attention.out(Tensor query, Tensor kv_cache, Tensor prefix_block_table, Tensor prefix_len,
Tensor suffix_block_tables, Tensor suffix_lens, Tensor query_start_loc, float scale, *, Tensor?
value_cache=None, float soft_cap=0., Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor?
output_scale=None, str kv_cache_dtype="auto", SymInt? value_head_size=None, Tensor(out0!) out) -> ()

paged_ops::cascade_attention.list(Tensor query, Tensor kv_cache, Tensor prefix_block_table, Tensor prefix_len,
Tensor suffix_block_tables, Tensor suffix_lens, Tensor query_start_loc, float scale, *, Tensor?
value_cache=None, float soft_cap=0., Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor?
output_scale=None, str kv_cache_dtype="auto", SymInt? value_head_size=None) -> Tensor[]

paged_ops::copy_blocks(Tensor(a0!)[] kv_caches, Tensor block_mapping) -> ()

paged_ops::gather_kv(Tensor kv_cache, Tensor block_tables, Tensor seq_lens, SymInt num_tokens, *, Tensor?
value_cache=None, Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype="auto", ScalarType?
dtype=None) -> (Tensor, Tensor)

paged_ops::gather_kv.out(Tensor kv_cache, Tensor block_tables, Tensor seq_lens, SymInt num_tokens, *, Tensor?
value_cache=None, Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype="auto", ScalarType?
dtype=None, Tensor(out0!) key, Tensor(out1!) value) -> ()

paged_ops::latent_cache_write(Tensor latent, Tensor rotated, Tensor(a2!) kv_cache, Tensor slot_mapping, *,
Tensor? k_scale=None, str kv_cache_dtype="auto") -> ()

paged_ops::merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)

paged_ops::merge_attention_states.out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor(out0!)
out, Tensor(out1!) lse) -> ()

paged_ops::paged_attention(Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor
query_start_loc, float scale, *, Tensor? value_cache=None, bool causal=True, SymInt sliding_window=0, SymInt
attention_chunk=0, float soft_cap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt[]?
block_sparse=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? output_scale=None, str
kv_cache_dtype="auto", Tensor? bidirectional_ranges=None, SymInt? value_head_size=None, SymInt
num_first_tokens=0, bool batch_invariant=False, Tensor? selected_keys=None, SymInt selected_block_size=1, bool
ranges_in_window=False) -> Tensor

paged_ops::paged_attention.out(Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor
query_start_loc, float scale, *, Tensor? value_cache=None, bool causal=True, SymInt sliding_window=0, SymInt
attention_chunk=0, float soft_cap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt[]?
block_sparse=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? output_scale=None, str
kv_cache_dtype="auto", Tensor? bidirectional_ranges=None, SymInt? value_head_size=None, SymInt
num_first_tokens=0, bool batch_invariant=False, Tensor? selected_keys=None, SymInt selected_block_size=1, bool
ranges_in_window=False, Tensor(out0!) out) -> ()

paged_ops::paged_attention.list(Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor
query_start_loc, float scale, *, Tensor? value_cache=None, bool causal=True, SymInt sliding_window=0, SymInt
attention_chunk=0, float soft_cap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt[]?
block_sparse=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? output_scale=None, str
kv_cache_dtype="auto", Tensor? bidirectional_ranges=None, SymInt? value_head_size=None, SymInt
num_first_tokens=0, bool batch_invariant=False, Tensor? selected_keys=None, SymInt selected_block_size=1, bool
ranges_in_window=False) -> Tensor[]

paged_ops::paged_attention_with_lse(Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens,
Tensor query_start_loc, float scale, *, Tensor? value_cache=None, bool causal=True, SymInt sliding_window=0,
SymInt attention_chunk=0, float soft_cap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt[]?
block_sparse=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? output_scale=None, str
kv_cache_dtype="auto", Tensor? bidirectional_ranges=None, SymInt? value_head_size=None, SymInt
num_first_tokens=0, bool batch_invariant=False, Tensor? selected_keys=None, SymInt selected_block_size=1, bool
ranges_in_window=False) -> (Tensor, Tensor)

paged_ops::paged_attention_with_lse.out(Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens,
Tensor query_start_loc, float scale, *, Tensor? value_cache=None, bool causal=True, SymInt sliding_window=0,
SymInt attention_chunk=0, float soft_cap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt[]?
block_sparse=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? output_scale=None, str
kv_cache_dtype="auto", Tensor? bidirectional_ranges=None, SymInt? value_head_size=None, SymInt
num_first_tokens=0, bool batch_invariant=False, Tensor? selected_keys=None, SymInt selected_block_size=1, bool
ranges_in_window=False, Tensor(out0!) out, Tensor(out1!) lse) -> ()

paged_ops::reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) kv_cache, Tensor slot_mapping, *,
Tensor(a4!)? value_cache=None, Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype="auto") -> ()

paged_ops::select_keys(Tensor index_query, Tensor index_cache, Tensor block_tables, Tensor seq_lens, Tensor
query_start_loc, SymInt k, *, Tensor? weights=None, float scale=1., bool relu=False, bool per_head=False, str
pool="none", SymInt block_size=1, SymInt local_blocks=0, bool causal=True, Tensor? k_scale=None, str
kv_cache_dtype="auto") -> Tensor

paged_ops::select_keys.out(Tensor index_query, Tensor index_cache, Tensor block_tables, Tensor seq_lens,
Tensor query_start_loc, SymInt k, *, Tensor? weights=None, float scale=1., bool relu=False, bool
per_head=False, str pool="none", SymInt block_size=1, SymInt local_blocks=0, bool causal=True, Tensor?
k_scale=None, str kv_cache_dtype="auto", Tensor(out0!) out) -> ()

paged_ops::select_keys.list(Tensor index_query, Tensor index_cache, Tensor block_tables, Tensor seq_lens,
Tensor query_start_loc, SymInt k, *, Tensor? weights=None, float scale=1., bool relu=False, bool
per_head=False, str pool="none", SymInt block_size=1, SymInt local_blocks=0, bool causal=True, Tensor?
k_scale=None, str kv_cache_dtype="auto") -> Tensor[]

paged_ops::swap_blocks(Tensor[] src_caches, Tensor(a1!)[] dst_caches, Tensor block_mapping) -> ()""",
    )
