"""Every kernel and every lowering refuses a mask, a change of logits or a format that does not exist yet, until it
names it. The test finds the kernels in the kernels' list, and the ops and their lowerings in the registry."""

import importlib
import inspect
import pkgutil
import sys
from collections import namedtuple

import pytest
import torch

import paged_ops
from paged_ops import layouts, lowerings, masks, registry, testing
from paged_ops.features import Features, IndexOptions
from paged_ops.lowerings.cpu import attention as cpu
from paged_ops.lowerings.cpu import prepared

PLAIN = {name: inspect.signature(op).parameters for name, op in registry.OPS.items()}
LOWERED = [(name, key) for key in registry.LOWERINGS for name in PLAIN if hasattr(registry.module_of(key), name)]
CACHED = [(name, key) for name, key in LOWERED if "kv_cache_dtype" in PLAIN[name]]
INDEXER = [(name, key) for name, key in LOWERED if name == "select_keys"]
ATTENTION = [(name, key) for name, key in LOWERED if "query_start_loc" in PLAIN[name] and (name, key) not in INDEXER]


def with_field(cls, name, neutral):
    """A NamedTuple with one more field."""
    fields, defaults = [*cls._fields, name], [*cls._field_defaults.values(), neutral]
    return namedtuple(cls.__name__, fields, defaults=defaults)


def replace_everywhere(monkeypatch, old, new):
    """In every module of the package that holds it."""
    for key in registry.LOWERINGS:
        registry.module_of(key)
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "paged_ops"]:
        for name in [name for name, value in vars(module).items() if value is old]:
            monkeypatch.setattr(module, name, new)


def fp8_inputs(op):
    """A call over a cache whose dtype is float8_e4m3fn."""
    for case in testing.CASES[op]:
        inputs = case.inputs()
        (kv_cache,) = (inputs.args[n] for n, name in enumerate(PLAIN[op]) if name in ("kv_cache", "index_cache"))
        if kv_cache.dtype == torch.float8_e4m3fn:
            return inputs
    raise AssertionError(f"no case of {op} over float8_e4m3fn")


@pytest.mark.parametrize(("op", "key"), ATTENTION)
def test_lowerings_refuse_a_made_up_mask(op, key, monkeypatch):
    lowering, inputs = registry.lowering(op, key), testing.CASES[op][0].inputs()
    replace_everywhere(monkeypatch, Features, with_field(Features, "dilation", 1))
    with pytest.raises(ValueError, match=r"^dilation: not supported by"):
        lowering(*inputs.args, **inputs.kwargs, dilation=2)
    if key == "CPU":
        lowering(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("op", "key"), INDEXER)
def test_lowerings_refuse_a_made_up_option_of_the_indexer(op, key, monkeypatch):
    lowering, inputs = registry.lowering(op, key), testing.CASES[op][0].inputs()
    replace_everywhere(monkeypatch, IndexOptions, with_field(IndexOptions, "temperature", 1.0))
    with pytest.raises(ValueError, match=r"^temperature: not supported by"):
        lowering(*inputs.args, **inputs.kwargs, temperature=0.5)
    if key == "CPU":
        lowering(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("op", "key"), CACHED)
def test_lowerings_refuse_a_made_up_format(op, key, monkeypatch):
    lowering, inputs = registry.lowering(op, key), fp8_inputs(op)
    monkeypatch.setitem(layouts._FP8, "made_up", layouts._FP8["fp8_e4m3"])
    with pytest.raises(ValueError, match=r"^made_up: not supported by"):
        lowering(*inputs.args, **inputs.kwargs | {"kv_cache_dtype": "made_up"})
    if key == "CPU":
        lowering(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("op", "key"), CACHED)
def test_lowerings_refuse_a_made_up_dtype(op, key, monkeypatch):
    def in_int8(value):
        is_fp8 = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
        return value.view(torch.int8) if is_fp8 else value

    lowering, inputs = registry.lowering(op, key), fp8_inputs(op)
    replace_everywhere(monkeypatch, layouts.FP8_DTYPES, (*layouts.FP8_DTYPES, torch.int8))
    with pytest.raises(ValueError, match=r"^int8: not supported by"):
        lowering(*map(in_int8, inputs.args), **{name: in_int8(each) for name, each in inputs.kwargs.items()})


def all_serves():
    """Every function of this name under the lowerings, by its module."""
    found = {}
    for info in pkgutil.walk_packages(lowerings.__path__, lowerings.__name__ + "."):
        function = getattr(importlib.import_module(info.name), "serves", None)
        if function is not None:
            found[info.name] = function
    return found


def test_kernels_refuse_what_they_do_not_know():
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from paged_ops.lowerings.gpu.attention import choose
    from tests.gpu.step import H200

    kernels = choose.kernels_of(H200)
    of_calls = [*specs()]
    for kernel in kernels:
        served = [each for each in of_calls if not kernel.serves(each, H200)]
        assert served, f"{kernel.__name__} serves no call of this test"
        for each in served:
            for changed in changes(each):
                assert kernel.serves(changed, H200), f"{kernel.__name__} serves {changed}"
    serving = all_serves()
    assert {kernel.__name__ for kernel in kernels} <= set(serving)
    others = [serving[name] for name in serving if name not in {kernel.__name__ for kernel in kernels}]
    made_up = with_field(Features, "dilation", 1)
    assert others
    for serves in others:
        assert serves(torch.float32, Features()) and serves(torch.float32, made_up())
        assert not serves(torch.float32, made_up(dilation=2))
        assert not serves(torch.float32, Features(kv_cache_dtype="made_up"))
        assert not serves(torch.int8, Features())


def specs():
    """Of calls of which each kernel serves one: heads of 128 and 512, few and many heads over latents, rows with
    scales; 16 bits and fp8; with and without selected keys."""
    from paged_ops.lowerings.gpu import spec

    N, B, K, T, S = 4, 16, 8, 64, 4
    tables = torch.zeros(S, 2, dtype=torch.int32)
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        paged = layouts.paged_kv(torch.zeros(N, 2, B, K, 128).to(stored))
        query = torch.zeros(T, 32, 128, dtype=torch.bfloat16)
        selected = Features(selected_keys=torch.zeros(T, K, 16, dtype=torch.int32))
        for f in (Features(), Features(batch_invariant=True), selected):
            yield spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, False)
    query, paged = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((T, 32, 512), (N, 2, B, 4, 512)))
    paged = layouts.paged_kv(paged)
    yield spec.spec_of(query, paged.key, paged.value, 0, tables, None, Features(), query.dtype, False)
    for heads, columns, stored, name in (
        (16, 576, torch.bfloat16, "auto"),
        (16, 576, torch.float8_e4m3fn, "auto"),
        (128, 576, torch.float8_e4m3fn, "auto"),
        (16, layouts.ROW_BYTES, torch.uint8, layouts.FP8_DS_MLA),
    ):
        query = torch.zeros(T, heads, 576, dtype=torch.bfloat16)
        selected = torch.zeros(T, 1, 16, dtype=torch.int32)
        for f in (Features(value_head_size=512), Features(value_head_size=512, selected_keys=selected)):
            f = f._replace(kv_cache_dtype=name)
            key, value = layouts.paged_kv(torch.zeros(N, B, columns).to(stored), None, 512, name)
            yield spec.spec_of(query, key, value, 0, tables, None, f, query.dtype, False, True)


def changes(of_call):
    """The spec with each thing that does not exist yet."""
    for part in ("masks", "logits", "storage", "k_side", "v_side"):
        value = getattr(of_call, part)
        defaults = type(value)._field_defaults
        fields = [*type(value)._fields, "made_up"]
        grown = namedtuple(part, fields, defaults=[*defaults.values(), False])
        yield of_call._replace(**{part: grown(*value, True)})
    for changed in ({"dtype": torch.int8}, {"format": 9}):
        yield of_call._replace(storage=of_call.storage._replace(**changed))


@pytest.mark.parametrize("features", [{}, {"soft_cap": 4.0}], ids=["flash", "plain products"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_shortcuts_of_the_cpu_know_their_masks(q_len, features, monkeypatch):
    """A mask that is added to the lowering but not to what says that a tile is wholly seen, or plainly causal."""
    wide = with_field(Features, "dilation", 1)
    replace_everywhere(monkeypatch, Features, wide)
    for module, name in ((cpu, "APPLIES"), (prepared, "FLASH")):
        monkeypatch.setattr(module, name, getattr(module, name) | {"dilation"})
    kept = cpu._kept

    def every_second(rows, n, i, j, f):
        apart = torch.arange(i, i + rows)[:, None] - torch.arange(j, j + n)
        return kept(rows, n, i, j, f) & (apart % f.dilation == 0)

    monkeypatch.setattr(cpu, "_kept", every_second)
    n, (H, K, D), B = 40, (4, 2, 16), 16
    generator = torch.Generator().manual_seed(0)
    cache, query = (torch.randn(*shape, generator=generator) for shape in ((3, 2, B, K, D), (q_len, H, D)))
    tables, lens = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    starts = torch.tensor([0, q_len], dtype=torch.int32)
    lowering = registry.lowering("paged_attention", "CPU")
    got = lowering(query, cache, tables, lens, starts, 0.25, **features, dilation=2)
    key, value = (cache[tables[0].long(), plane].flatten(0, 1)[:n].repeat_interleave(2, 1) for plane in (0, 1))
    logits = torch.einsum("qhd,nhd->hqn", query.double(), key.double()) * 0.25
    if features:
        logits = 4.0 * torch.tanh(logits / 4.0)
    i, j = torch.arange(n - q_len, n)[:, None], torch.arange(n)
    logits = logits.masked_fill(~(masks.causal(i, j) & ((i - j) % 2 == 0)), -torch.inf)
    wanted = torch.einsum("hqn,nhd->qhd", logits.softmax(-1), value.double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    plain = paged_ops.paged_attention(query, cache, tables, lens, starts, 0.25, **features)
    assert (plain.double() - wanted).norm() > 0.1 * wanted.norm()
