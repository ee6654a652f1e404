"""Every op on XLA's CPU device against the reference: the cases that compiled runs take elsewhere, every feature and
form at least once. Each shape is one XLA compilation, hence not all cases."""

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics

import paged_ops
from paged_ops import registry, testing

pytestmark = pytest.mark.xla

COMPILED = [(name, testing.case_named(name, case)) for name, cases in testing.COMPILED.items() for case in cases]
REFUSED = [(name, case) for name, case in COMPILED if "rows" in case.name and not name.endswith("blocks")]
CASES = [each for each in COMPILED if each not in REFUSED]


@pytest.mark.parametrize(("name", "case"), REFUSED, ids=[f"{name}-{case.name}" for name, case in REFUSED])
def test_rows_that_hold_their_scales_are_refused(name, case):
    inputs = case.inputs("xla")
    with pytest.raises(ValueError, match="kv_cache_dtype: 'fp8_ds_mla' is not served through XLA"):
        registry.OPS[name](*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_matches_reference(name, case):
    testing.check(name, case, "xla")


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_nothing_runs_on_the_host(name, case):
    """No operator without an XLA lowering, which torch_xla would silently run on the CPU."""
    inputs = testing.clone_inputs(case.inputs("xla"))  # off the guarded memory, whose views do fall back
    torch_xla.sync()
    metrics.clear_all()
    registry.OPS[name](*inputs.args, **inputs.kwargs)
    assert metrics.executed_fallback_ops() == []


OUT = [("paged_attention", "decode-fp32"), ("paged_attention_with_lse", "sinks"), ("gather_kv", "nhd-fp32")]


@pytest.mark.parametrize(("name", "case"), OUT, ids=[name for name, _ in OUT])
def test_out_overload(name, case):
    testing.check_out(name, testing.case_named(name, case), "xla")


@pytest.mark.parametrize("case", [0, 1, 2, 3])
def test_no_elements(case):
    """A cache of no blocks, no tokens, no sequences, no columns: writes do nothing, attention gives zeros."""
    N, T, S, M = ((0, 2, 1, 1), (2, 0, 1, 1), (2, 2, 0, 1), (2, 2, 1, 0))[case]
    kv_cache = paged_ops.allocate_kv_cache("INTERLEAVED", N, 8, 2, 16, torch.float32, "xla")
    key = torch.ones(T, 2, 16, device="xla")
    paged_ops.reshape_and_cache(key, key, kv_cache, torch.full((T,), -1, device="xla"))
    tables, lens, starts = (torch.zeros(shape, dtype=torch.int32, device="xla") for shape in ((S, M), (S,), (S + 1,)))
    out = paged_ops.paged_attention(torch.ones(T, 4, 16, device="xla"), kv_cache, tables, lens, starts, 0.25)
    assert out.shape == (T, 4, 16)
    assert not out.cpu().any()
    assert not kv_cache.cpu().any()


def test_swap_with_the_host():
    """Blocks go to a host cache and come back, exactly, for any number of pairs."""
    device = [torch.randn(6, 2, 4, device="xla") for _ in range(2)]
    host = [torch.zeros(3, 2, 4) for _ in range(2)]
    paged_ops.swap_blocks(device, host, torch.tensor([[5, 0], [1, 2], [3, 1]]))
    before = [cache.cpu() for cache in device]
    assert all(torch.equal(h, b[[5, 3, 1]]) for h, b in zip(host, before, strict=True))
    paged_ops.swap_blocks(host, device, torch.tensor([[0, 4], [2, 0]]))
    for cache, b in zip(device, before, strict=True):
        b[[4, 0]] = b[[5, 1]]
        assert torch.equal(cache.cpu(), b)


def test_debug_checks_read_values():
    inputs = testing.case_named("paged_attention", "decode-fp32").inputs("xla")
    query, kv_cache, tables, *rest = inputs.args
    paged_ops.set_debug_checks(True)
    try:
        with pytest.raises(ValueError, match="block_tables: expected ids of the"):
            paged_ops.paged_attention(query, kv_cache, torch.full_like(tables, 10**6), *rest)
        slots = torch.tensor([0, 10**6], device="xla")
        key = torch.zeros(2, 2, 64, device="xla")
        with pytest.raises(ValueError, match="slot_mapping: expected slots"):
            paged_ops.reshape_and_cache(key, key, kv_cache, slots)
    finally:
        paged_ops.set_debug_checks(False)


def test_wrong_arguments_raise_as_elsewhere():
    inputs = testing.case_named("paged_attention", "decode-fp32").inputs("xla")
    query, kv_cache, tables, lens, starts, scale = inputs.args
    with pytest.raises(ValueError, match=r"seq_lens: expected int32, got a int64 tensor .* on xla:0"):
        paged_ops.paged_attention(query, kv_cache, tables, lens.long(), starts, scale)
    with pytest.raises(ValueError, match="kv_cache: expected a tensor on xla:0"):
        paged_ops.reshape_and_cache(query[:, :2], query[:, :2], kv_cache.cpu(), lens)


def test_supports_answers_for_the_device_that_runs():
    assert paged_ops.supports("paged_attention_with_lse", "xla", sinks=True, layout="NHD", head_size=80) == []
