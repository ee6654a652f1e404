"""Nothing depends on the default device or the default dtype of a process."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paged_ops
from paged_ops import checks, fake, layouts, masks, reference, testing
from paged_ops.lowerings.cpu import fused
from paged_ops.registry import OPS
from tests.helpers.defaults import defaults

CASES = [(op, testing.case_named(op, name)) for op, names in testing.COMPILED.items() for name in names]
WAYS = [(*pair, "fused") for pair in CASES] + [(*pair, "torch") for pair in CASES if "attention" in pair[0]]


DEFAULTS = {
    "on_meta": {"device": "meta"},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(params=DEFAULTS)
def default(request):
    return lambda: defaults(**DEFAULTS[request.param])


def flat(value):
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


def run(function, inputs):
    """What a call returns, and all the tensors that it was given."""
    result = function(*inputs.args, **inputs.kwargs)
    given = [*inputs.args, *inputs.kwargs.values()]
    return flat(result) + [t for each in given for t in (flat(each) if isinstance(each, (torch.Tensor, list)) else [])]


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor):
            testing.assert_same_bytes("a tensor", a, b)


@pytest.mark.parametrize(("op", "case", "way"), WAYS, ids=[f"{op}-{case.name}-{way}" for op, case, way in WAYS])
def test_an_op(monkeypatch, default, op, case, way):
    if way == "torch":
        monkeypatch.setattr(fused, "compiled", lambda: None)
    inputs = case.inputs()
    again = testing.clone_inputs(inputs)
    want = run(OPS[op], inputs)
    with default():
        got = run(OPS[op], again)
    same(got, want)


@pytest.mark.parametrize(("op", "case"), CASES[::3], ids=[f"{op}-{case.name}" for op, case in CASES[::3]])
def test_its_fake_and_its_reference(default, op, case):
    inputs = case.inputs()
    again = testing.clone_inputs(inputs)
    want = run(getattr(reference, op), inputs)
    mode = FakeTensorMode()

    def faked(value):
        if isinstance(value, list):
            return [faked(each) for each in value]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    call = replace(again, args=tuple(map(faked, again.args)), kwargs={n: faked(v) for n, v in again.kwargs.items()})
    plain = flat(getattr(fake, op)(*inputs.args, **inputs.kwargs))
    with default():
        same(run(getattr(reference, op), again), want)
        with mode:
            shapes = flat(OPS[op](*call.args, **call.kwargs))
    described = [(each.shape, each.dtype, each.device, each.stride()) for each in shapes]
    assert described == [(each.shape, each.dtype, each.device, each.stride()) for each in plain]


def test_compiled_first_under_another_default(default):
    """What is made once and kept is not made of a default."""
    fused.compiled.cache_clear()
    inputs = testing.case_named("paged_attention", "decode-fp32").inputs()
    with default():
        got = paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
    same([got], [paged_ops.paged_attention(*inputs.args, **inputs.kwargs)])


def test_layouts_and_checks(default):
    with default():
        for layout in layouts.Layout:
            heads = 1 if layout is layouts.Layout.LATENT else 2
            cache = layouts.allocate_kv_cache(layout, 4, 16, heads, 32, torch.float32)
            assert (cache.device.type, cache.dtype) == ("cpu", torch.float32)
        pair = layouts.split_kv_cache(layouts.allocate_kv_cache("X_PACKED", 4, 16, 2, 32, torch.float32), 2, 32)
        for form in ((pair[0], pair[1]), (layouts.allocate_kv_cache("HND", 4, 16, 2, 32, torch.float16),)):
            assert layouts.paged_kv(*form).num_blocks == 4
        i = torch.arange(8, device="cpu")
        sparse = masks.check_block_sparse(paged_ops.BlockSparse(16, 1, 2), 16)
        numbers = {"sliding_window": 2, "attention_chunk": 4}
        assert masks.keep(i, i, 4, 2, is_causal=True, sparse=sparse, **numbers).device.type == "cpu"
        tables = torch.tensor([[5]], dtype=torch.int32, device="cpu")
        lens, starts = (torch.tensor(each, dtype=torch.int32, device="cpu") for each in ([3], [0, 1]))
        with pytest.raises(ValueError, match="block_tables: expected ids of the 4 blocks of the cache"):
            checks.batch(tables, lens, starts, 1, 4, 16)
        with pytest.raises(ValueError, match=r"block_mapping: expected each destination once, got \[2\] twice"):
            checks.block_mapping(torch.tensor([[0, 2], [1, 2]], device="cpu"), 4, 4, same_cache=True)


@pytest.mark.parametrize(("op", "name", "argument", "value"), [
    ("reshape_and_cache", "nhd-fp32", 3, 10**6),
    ("copy_blocks", "nhd-fp32", 1, 10**6),
    ("swap_blocks", "nhd-fp32", 2, -1),
])  # fmt: skip
def test_a_refused_call_changes_nothing(default, op, name, argument, value):
    inputs = testing.case_named(op, name).inputs()
    inputs.args[argument].view(-1)[-1] = value
    before = [each.clone() for each in run(lambda *args, **kwargs: None, inputs)]
    with default(), pytest.raises(ValueError, match=r"expected .*, got"):
        OPS[op](*inputs.args, **inputs.kwargs)
    same(run(lambda *args, **kwargs: None, inputs), before)
