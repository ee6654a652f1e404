"""An op's result depends on its arguments alone: every ambient state, over every 16th case of the registry.

``make fuzz CAMPAIGNS=ambient`` runs all cases.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import paged_ops
from paged_ops import layouts, metadata, reference, registry, testing
from paged_ops.cache import states
from paged_ops.integrations.transformers import all_reduce_fusion, projections
from tests.fuzz import ambient, runner

CASES = [(op, case) for op, cases in testing.CASES.items() for case in cases][::16]
OF_PATHS = [(op, path) for op in sorted(testing.CASES) for path in ambient.PATHS[: 1 + ("attention" in op)]]


@pytest.mark.parametrize(("op", "path"), OF_PATHS)
def test_no_state_changes_a_result(op, path, device):
    cases = [case for name, case in CASES if name == op]
    assert cases
    found = [line for case in cases for line in ambient.findings(op, case, device, path)]
    assert not found, "\n".join(found)


class _Matmuls(TorchDispatchMode):
    """Notes the matmuls of float32 operands."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.endswith("mm") and any(each.dtype == torch.float32 for each in args if isinstance(each, torch.Tensor)):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["paged_attention_with_lse", "select_keys"])
def test_float32_is_rounded_on_no_processor(op, monkeypatch):
    """Only some processors round the operands of float32 matmuls if they may, but all run the same ops then."""
    monkeypatch.setattr(ambient.fused, "compiled", lambda: None)
    lowering = registry.lowering(op, "CPU")
    seen = {}
    for precision in "highest", "medium":
        with ambient.STATES[f"matmul precision {precision}"](), _Matmuls() as matmuls:
            for case in [case for name, case in CASES if name == op][::2]:
                inputs = case.inputs()
                lowering(*inputs.args, **inputs.kwargs)
        seen[precision] = matmuls.seen
    assert seen["highest"]
    assert not seen["medium"]


def in_torch(out):
    """A product of matrices as a lowering in plain torch might have it."""
    return torch.mm(out.flatten(1), torch.eye(out[0].numel(), dtype=out.dtype, device="cpu")).view_as(out)


def of_defaults(out):
    return out * torch.tensor([1 / 3])


def asks(state):
    return lambda out: out + float(state())


PLANTED = {
    "autocast to bfloat16": in_torch,
    "autocast to float16": in_torch,
    "default device meta": of_defaults,
    "default dtype float64": of_defaults,
    "default dtype bfloat16": of_defaults,
    "no grad mode": asks(torch.is_grad_enabled),
    "inference mode": asks(torch.is_inference_mode_enabled),
    "deterministic algorithms": asks(torch.are_deterministic_algorithms_enabled),
    "matmul precision medium": asks(lambda: torch.get_float32_matmul_precision() == "medium"),
    "three threads": asks(lambda: torch.get_num_threads() == 3),
}


@pytest.mark.parametrize("state", PLANTED)
def test_a_result_that_depends_on_a_state_is_found(state, monkeypatch):
    op, case = "paged_attention", testing.case_named("paged_attention", "decode-fp32")
    right = registry.OPS[op]
    monkeypatch.setitem(registry.OPS, op, lambda *args, **kwargs: PLANTED[state](right(*args, **kwargs)))
    found = ambient.findings(op, case)
    assert any(f"under {state}: " in line for line in found), found


def test_the_guard_is_what_keeps_autocast_out(monkeypatch):
    monkeypatch.setattr(torch._C, "_DisableAutocast", contextlib.nullcontext)
    case = testing.case_named("paged_attention_with_lse", "sparse")
    found = ambient.findings("paged_attention_with_lse", case)
    assert [line.split(": ")[0].split(" under ")[1] for line in found] == [
        "autocast to bfloat16",
        "autocast to float16",
    ]


def test_the_campaign_runs_all_cases():
    everything = sum(map(len, testing.CASES.values()))
    ran = SimpleNamespace(names=set())

    def noted(op, case, device, path):
        ran.names.add((op, case.name))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ambient, "findings", noted)
        runner.run_cases("ambient", ambient.run, range(everything), runner.Options())
    assert len(ran.names) == everything


COMPOSED = [
    ("cascade_attention", "mixed-prefix75"),
    ("paged_attention_with_lse", "sparse"),
    ("paged_attention", "latent-rows-decode-bf16"),
    ("merge_attention_states", "fp32-d32-h1"),
]


@pytest.mark.parametrize(("op", "name"), COMPOSED)
def test_autocast_of_fakes_references_and_graphs(op, name, monkeypatch):
    monkeypatch.setattr(ambient.fused, "compiled", lambda: None)
    inputs = testing.case_named(op, name).inputs()
    plain = ambient._tensors(op, inputs, registry.OPS[op](*inputs.args, **inputs.kwargs))
    meant = ambient._tensors(op, inputs, getattr(reference, op)(*inputs.args, **inputs.kwargs))

    def call(*args):
        return registry.OPS[op](*args, **inputs.kwargs)

    class Calls(torch.nn.Module):
        def forward(self, *args):
            return call(*args)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in inputs.args]
    with torch.autocast("cpu", torch.bfloat16):
        with mode:
            fakes = ambient._tensors(op, inputs, call(*faked))
        referred = getattr(reference, op)(*inputs.args, **inputs.kwargs)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs.args)
        exported = torch.export.export(Calls(), inputs.args).module()(*inputs.args)
    assert [each.dtype for each in fakes] == [each.dtype for each in plain]
    for results, want in ((compiled, plain), (exported, plain), (referred, meant)):
        for a, b in zip(ambient._tensors(op, inputs, results), want, strict=True):
            testing.assert_same_bytes(op, a, b)


class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(columns)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


STATES = "default device meta", "default dtype bfloat16", "deterministic algorithms", "inference mode"


@pytest.mark.parametrize("state", STATES)
def test_caches_and_batches_are_made_alike(state):
    norm = LlamaRMSNorm(8)
    fused = projections.FusedLinear([torch.nn.Linear(4, 4), torch.nn.Linear(4, 6)])

    def made():
        caches = [
            layouts.allocate_kv_cache(layout, 8, 4, 1 if layout == "LATENT" else 2, 8, torch.float32)
            for layout in layouts.Layout
        ]
        caches += paged_ops.KVCache(1, 8, 4, 2, 8, dtype=torch.float32, num_host_blocks=2).layers
        caches += states.StateCache([states.StateSpec((3, 4), torch.float32)], 2).tensors
        builder = metadata.AttentionMetadataBuilder(
            block_size=4, max_num_seqs=4, max_num_tokens=16, max_blocks_per_seq=3, num_blocks=8
        )
        built = builder.build(0, metadata.Batch([1, 2], [3, 4], [[0], [1, 2]]))
        builder._fill_own_tables(2, 3)
        batch = [each for each in vars(built).values() if isinstance(each, torch.Tensor)]
        parts = [(part.start, part.stop) for part in fused.parts()]
        return (
            caches,
            [*batch, *builder._own_tables],
            parts,
            all_reduce_fusion.norm_kind(norm, torch.float32, torch.device("cpu")),
        )

    wanted = made()
    assert wanted[3]
    with ambient.STATES[state]():
        made_there = made()
    assert made_there[2:] == wanted[2:]
    assert len(made_there[0]) > 5
    assert len(made_there[1]) > 5
    for got, want in zip([*made_there[0], *made_there[1]], [*wanted[0], *wanted[1]], strict=True):
        testing.assert_same_bytes("a tensor", got, want)
    for cache in made_there[0]:
        cache.zero_()  # outside of the state, and in grad mode
