"""Every op on XLA's CPU device against the reference: the cases that compiled runs take elsewhere, every feature and
form at least once. Each shape is one XLA compilation, hence not all cases."""

import contextlib
import functools
import re

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics

import paged_ops
from paged_ops import registry, testing
from tests.xla.cases import CASES, REFUSED

pytestmark = pytest.mark.xla


@pytest.mark.parametrize(("name", "case"), REFUSED, ids=[f"{name}-{case.name}" for name, case in REFUSED])
def test_what_no_xla_device_serves_is_refused(name, case):
    inputs = case.inputs("xla")
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype: 'fp8_ds_(mla|index)' is not served|(batch_invariant|selected_keys): .*XLA"
    ):
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


@contextlib.contextmanager
def other_defaults():
    torch.set_default_dtype(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


AMBIENT = {
    "inference-mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("xla", torch.bfloat16),
    "other-defaults": other_defaults,
}


@pytest.mark.parametrize("state", AMBIENT)
@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_ambient_state_changes_nothing(name, case, state):
    """The arguments are made outside of it."""

    def call(*args, **kwargs):
        with AMBIENT[state]():
            return registry.OPS[name](*args, **kwargs)

    testing.check(name, case, "xla", call)


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
    query = torch.ones(T, 4, 16, device="xla")
    with other_defaults():
        _, lse = paged_ops.paged_attention_with_lse(query, kv_cache, tables, lens, starts, 0.25)
    assert lse.dtype == torch.float32
    assert (lse.cpu() == -torch.inf).all()


FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_swap_with_the_host(inference, made_inside):
    """Blocks of every dtype go to a host cache and come back, exactly, for any number of pairs."""
    dtypes = torch.float32, torch.bfloat16, torch.uint8, *FLOAT8
    with torch.inference_mode(inference and made_inside):
        before = [torch.arange(48).view(6, 2, 4).to(dtype) for dtype in dtypes]
        device = [cache.to("xla") for cache in before]
        host = [torch.zeros_like(cache[:3]) for cache in before]
    with torch.inference_mode(inference):
        paged_ops.swap_blocks(device, host, torch.tensor([[5, 0], [1, 2], [3, 1]]))
        before = [cache.float() for cache in before]
        assert all(torch.equal(h.float(), b[[5, 3, 1]]) for h, b in zip(host, before, strict=True))
        paged_ops.swap_blocks(host, device, torch.tensor([[0, 4], [2, 0]]))
        paged_ops.copy_blocks(device, torch.tensor([[4, 1]]))
        for cache, b in zip(device, before, strict=True):
            b[[4, 0, 1]] = b[[5, 1, 5]]
            assert torch.equal(cache.cpu().float(), b)


BAD_MAPPINGS = {
    "source": ("[:, 0]: expected source blocks in [0, 6), got -1 at [1]", [[0, 1], [-1, 2]]),
    "destination": ("[:, 1]: expected destination blocks in [0, 6), got 6 at [0]", [[0, 6], [1, 2]]),
    "twice": (": expected each destination once, got [2] twice", [[0, 2], [1, 2]]),
    "chain": (": expected no block as both source and destination, got [1] in both roles", [[0, 1], [1, 2]]),
}


@pytest.mark.parametrize("kind", BAD_MAPPINGS)
def test_bad_mappings_are_refused_before_anything_is_written(kind):
    def caches(device):
        return [torch.arange(48).view(6, 2, 4).to(device, dtype) for dtype in (torch.float32, *FLOAT8)]

    message, pairs = BAD_MAPPINGS[kind]
    device, other, host, mapping = caches("xla"), caches("xla"), caches("cpu"), torch.tensor(pairs)
    copies = [
        functools.partial(paged_ops.copy_blocks, device),
        functools.partial(paged_ops.swap_blocks, device, device),
    ]
    if kind != "chain":
        swaps = (device, other), (device, host), (host, device)
        copies += [functools.partial(paged_ops.swap_blocks, *call) for call in swaps]
    for copy in copies:
        with pytest.raises(ValueError, match=re.escape("block_mapping" + message)):
            copy(mapping)
    for cache, before in zip(device + other + host, 3 * caches("cpu"), strict=True):
        assert torch.equal(cache.cpu().float(), before.float())


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "reshape_and_cache"])
def test_a_tensor_that_is_written_twice_is_refused(op):
    cache, mapping = torch.zeros(4, 16, 2, 32, device="xla"), torch.tensor([[0, 1]])
    key, slots = torch.ones(3, 2, 32, device="xla"), torch.arange(3, device="xla")
    call = {
        "copy_blocks": lambda: paged_ops.copy_blocks([cache, cache], mapping),
        "swap_blocks": lambda: paged_ops.swap_blocks([cache + 1, cache + 2], [cache, cache], mapping),
        "reshape_and_cache": lambda: paged_ops.reshape_and_cache(key, 2 * key, cache, slots, value_cache=cache),
    }[op]
    with pytest.raises(ValueError, match="expected a separate tensor for each argument, got one tensor twice"):
        call()
    assert not cache.cpu().any()


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
        with pytest.raises(ValueError, match="block_mapping: expected each destination once"):
            paged_ops.copy_blocks([kv_cache], torch.tensor([[0, 1], [2, 1]], device="xla"))
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
