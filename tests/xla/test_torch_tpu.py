"""TorchTPU, the experimental second target of the XLA lowering: what can be shown of it without a TPU.

Its registration is tested in a process of its own, because functional twins serve every device of a process; what it
registers is plain torch, so its numbers are tested on the CPU. That nothing has run on the device docs/tpu.md says.
"""

import subprocess
import sys

import pytest
import torch

from paged_ops import registry, testing
from paged_ops.lowerings import tpu
from paged_ops.lowerings.tpu import functional
from tests.xla.cases import CASES, REFUSED

FUNCTIONAL = [
    (name, case) for name, case in CASES if not testing.mutated_arguments(name) and name != "cascade_attention"
]
MUTATING = [(name, case) for name, case in CASES if testing.mutated_arguments(name)]


def ids(cases):
    return [f"{name}-{case.name}" for name, case in cases]


@pytest.mark.parametrize(("name", "case"), REFUSED, ids=ids(REFUSED))
def test_refused_calls(name, case):
    """Rows that hold their own scales, batch invariance, and selected keys."""
    inputs = case.inputs()
    with pytest.raises(
        ValueError,
        match=r"kv_cache_dtype: 'fp8_ds_(mla|index)' is not served through XLA|(batch_invariant|selected_keys): .*XLA",
    ):
        getattr(tpu, name)(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("name", "case"), FUNCTIONAL, ids=ids(FUNCTIONAL))
def test_formulation(name, case):
    testing.check(name, case, "cpu", getattr(tpu, name))


@pytest.mark.parametrize(("name", "case"), MUTATING, ids=ids(MUTATING))
def test_twin(name, case):
    """A twin returns the new values of what the op writes, and writes nothing."""
    overload = getattr(torch.ops.paged_ops, name).default
    twin = functional._twin(overload, tpu.lowering)
    inputs = case.inputs()
    before = testing.clone_inputs(inputs)
    news = twin(*inputs.args, **inputs.kwargs)
    untouched = functional._tensors(overload, functional._by_name(overload, inputs.args, inputs.kwargs))
    expected = testing.clone_inputs(before)
    registry.OPS[name](*expected.args, **expected.kwargs)
    wanted = functional._tensors(overload, functional._by_name(overload, expected.args, expected.kwargs))
    olds = functional._tensors(overload, functional._by_name(overload, before.args, before.kwargs))
    for new, want, untouched_, old in zip(news, wanted, untouched, olds, strict=True):
        testing.assert_same_bytes("twin", new, want)
        testing.assert_same_bytes("argument", untouched_, old)


REGISTRATION = """
import torch
from torch._dynamo.backends.common import aot_autograd
import paged_ops
from paged_ops import registry, testing
from paged_ops.lowerings import tpu

torch.set_grad_enabled(False)
tpu.install_torch_tpu()
for name in [each for each in registry.OPS if hasattr(tpu, each)]:  # PyTorch refuses the others
    packet = getattr(torch.ops.paged_ops, name)
    overload = "functional" if packet.default._schema.is_mutable else "default"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(getattr(packet, overload).name(), "PrivateUse1"), name

def step(key, kv_cache, slots, tables, lens, starts):
    paged_ops.reshape_and_cache(key, key, kv_cache, slots)
    return paged_ops.paged_attention(key, kv_cache, tables, lens, starts, 0.25)

graphs = []
def keep(graph, inputs):
    graphs.append(graph)
    return graph

key = torch.randn(2, 2, 16)
tables, lens, starts = (torch.tensor(v, dtype=torch.int32) for v in ([[3], [1]], [1, 1], [0, 1, 2]))
slots = torch.tensor([24, 8])
eager, compiled = torch.zeros(2, 4, 8, 4, 16)
want = step(key, eager, slots, tables, lens, starts)
got = torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(
    key, compiled, slots, tables, lens, starts
)
assert torch.equal(got, want) and torch.equal(compiled, eager)
(graph,) = graphs
called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
assert called[0] == "paged_ops.reshape_and_cache.functional", called
assert "paged_ops.paged_attention.list" in called, called
schemas = [getattr(node.target, "_schema", None) for node in graph.graph.nodes]
assert not any(schema is not None and schema.is_mutable for schema in schemas), called
assert not any("auto_functionalized" in name for name in called), called

for case in ("decode-prefix64", "hnd-bf16", "fp8"):  # composed of the other ops, and of their twins
    testing.check("cascade_attention", testing.case_named("cascade_attention", case), "cpu", tpu.cascade_attention)
"""


@pytest.mark.slow
def test_registration():
    subprocess.run([sys.executable, "-c", REGISTRATION], check=True)
