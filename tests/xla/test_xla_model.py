"""A Llama on XLA's CPU device, lazy and compiled: the tokens of the CPU, caches donated, one execution a step, one
compilation a bucket."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics

import paged_ops
from tests.helpers import cache_forms as forms

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import compile_decode  # noqa: E402
import tpu_decode  # noqa: E402

pytestmark = pytest.mark.xla

MODES = ["lazy", "openxla"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(function, mode):
    return torch.compile(function, backend="openxla", fullgraph=True) if mode == "openxla" else function


def counted(name):
    data = metrics.metric_data(name)
    return data[0] if data else 0


CONFIG = compile_decode.Config(layers=3, hidden=64, heads=4, kv_heads=2, head_size=16, vocabulary=97)
S, B, WIDTH = 4, 16, 8


def run(model, device, steps, after_step=lambda n: None):
    """Decode steps of up to S sequences that come (with a token each) and go; the tokens of every sequence."""
    kv_cache = paged_ops.KVCache(CONFIG.layers, S * WIDTH, B, CONFIG.kv_heads, CONFIG.head_size, device=device)
    builder = paged_ops.AttentionMetadataBuilder(B, S, S, WIDTH, num_blocks=S * WIDTH)
    rows, done = [[1]], []
    for n in range(steps):
        if n % 7 == 3 and len(rows) < S:
            rows.append([n % 97])
        if n % 11 == 10:
            done.append(rows.pop(0))
            rows.append([n])
        cached = [len(row) - 1 for row in rows]
        first = n // 11  # who has left gives its blocks to the next
        tables = torch.arange(S * WIDTH, dtype=torch.int32).view(S, WIDTH).roll(-first, 0)[: len(rows)]
        # A sequence keeps its blocks while it moves up in the batch.
        metadata = builder.build(0, paged_ops.Batch([1] * len(rows), cached, tables), num_reqs=S, num_tokens=S)
        ids = torch.zeros(S, dtype=torch.int64)
        ids[: len(rows)] = torch.tensor([row[-1] for row in rows])
        inputs = [ids, torch.arange(S)]
        chosen = model(
            inputs[0].to(device), tpu_decode.on_device(metadata, device), inputs[1].to(device), kv_cache.layers
        )
        if device == "xla":
            torch_xla.sync()
            xm.wait_device_ops()
            after_step(n)
        for row, token in zip(rows, chosen.tolist(), strict=False):
            row.append(token)
    return done + rows


@pytest.mark.parametrize("mode", MODES)
def test_fifty_steps(mode):
    torch.manual_seed(0)
    model = compile_decode.Llama(CONFIG).eval()

    def step(*args):
        return model(*args).argmax(-1)

    expected = run(step, "cpu", 50)
    model.to("xla")
    torch_xla.sync()
    metrics.clear_all()
    seen = []

    def after_step(n):
        seen.append((counted("ExecuteTime"), counted("CompileTime"), tuple(metrics.executed_fallback_ops())))

    tokens = run(compiled(step, mode), "xla", 50, after_step)
    assert tokens == expected
    executions, compilations, fallbacks = zip(*seen, strict=True)
    assert set(fallbacks) == {()}
    # The caches' zeros run once, before the first step or with it.
    per_step = [b - a for a, b in itertools.pairwise(executions)]
    assert set(per_step[2:]) == {1}, per_step
    assert len(set(compilations[3:])) == 1, compilations
    aliases = [value for _, value in metrics.metric_data("InputOutputAliasCount")[2]]
    assert aliases[-1] == CONFIG.layers
    if mode == "openxla":
        assert metrics.counter_value("DynamoExtractCompiledGraph") == 1


def test_example_and_its_aliases(tmp_path):
    """The example's tokens are the CPU's, and its optimized HLO aliases every cache from input to output."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    example = subprocess.run(
        [sys.executable, ROOT / "examples/tpu_decode.py"], env=environment, capture_output=True, text=True, check=True
    )
    assert example.stdout.count("the same as on the CPU: True") == 2
    assert "compiled   2 graphs" in example.stdout
    assert "written in place: 4 of 4" in example.stdout
    cache = r"f32\[32,16,4,128\]"  # interleaved: blocks, tokens, keys and values of 2 heads, head size
    aliased = {}
    for path in tmp_path.glob("*after_optimizations.txt"):
        text = path.read_text()
        head = text.partition("\n")[0]
        if not re.search(cache, head):
            continue
        pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", head)
        layout = head.partition("entry_computation_layout={(")[2]
        parameters = re.findall(r"\w+\[[\d,]*\]", layout.partition(")->")[0])
        aliased[path.name] = [parameters[int(parameter)] for _, parameter in pairs]
    steps = [found for found in aliased.values() if found]
    assert len(steps) == 4, aliased  # prompts and tokens, lazy and compiled
    assert all(len(found) == 4 and all(re.fullmatch(cache, shape) for shape in found) for found in steps)


FORMS = [
    (forms.one_argument, 1),
    (forms.list_of_caches, 3),
    (forms.separate_storages, 2),
    (forms.out_overload, 1),
    (forms.sliced_inside, 0),
    (forms.unbound_inside, 0),
    (forms.split_inside, 0),
    (forms.arena_inside, 0),
]


def attend_three_times(make, mode, guard=torch.no_grad):
    """Compare three steps with those of the CPU."""
    function, caches = make("cpu")
    on_xla, moved = make("xla")
    pairs = list(zip(flat(moved), flat(caches), strict=True))
    for target, source in pairs:
        target.copy_(source)
    torch_xla.sync()
    metrics.clear_all()
    step = compiled(on_xla, mode)
    for length in (18, 19, 20):
        batch = forms.decode_batch(length=length)
        expected = function(*caches, *batch)
        with guard():
            got = step(*moved, *(t.to("xla") for t in batch))
            torch_xla.sync()
        torch.testing.assert_close(got.cpu(), expected)
    for target, source in pairs[: len(pairs) - (make is forms.out_overload)]:
        assert torch.equal(target.cpu(), source)
    assert metrics.executed_fallback_ops() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "donated"), FORMS, ids=[make.__name__ for make, _ in FORMS])
def test_forms_of_a_cache(make, donated, mode):
    """Whole tensors are donated; of views the base is copied once a step: right, and slower."""
    attend_three_times(make, mode)
    assert [value for _, value in metrics.metric_data("InputOutputAliasCount")[2]] == [donated]


GUARDS = {"inference_mode": torch.inference_mode, "autocast": lambda: torch.autocast("xla", torch.bfloat16)}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "donated"), FORMS[:2], ids=[make.__name__ for make, _ in FORMS[:2]])
def test_ambient_state_changes_nothing(make, donated, mode, guard):
    """A cache that was made outside of it is donated, too."""
    attend_three_times(make, mode, GUARDS[guard])
    compiled_now = metrics.metric_data("InputOutputAliasCount")  # None if it is a graph of another test
    assert compiled_now is None or [value for _, value in compiled_now[2]] == [donated]


@pytest.mark.parametrize("mode", MODES)
def test_example_in_inference_mode(mode):
    """With weights that were made outside of it."""
    torch.manual_seed(0)
    model = compile_decode.Llama(tpu_decode.CONFIG).eval()
    prompts = [[1, 2, 3], [4]]
    expected = tpu_decode.generate(model, prompts, 4, "cpu")
    model.to("xla")
    with torch.inference_mode():
        assert tpu_decode.generate(compiled(model, mode), prompts, 4, "xla") == expected


def flat(caches):
    return [t for cache in caches for t in (cache if isinstance(cache, list) else [cache])]


@pytest.mark.parametrize("make", [forms.one_argument, forms.sliced_inside, forms.list_of_caches])
def test_other_devices_still_compile_rightly(make):
    """The twins serve every device of the process, and no donor op may reach one that is not XLA's."""
    batch = forms.decode_batch()
    function, caches = make("cpu")
    copies = [[t.clone() for t in c] if isinstance(c, list) else c.clone() for c in caches]
    expected = function(*caches, *batch)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(*copies, *batch), expected)
    assert all(torch.equal(a, b) for a, b in zip(flat(copies), flat(caches), strict=True))


LATE = """
import torch, paged_ops, torch_xla
kv_cache = torch.zeros(2, 8, 4, 16, device="xla")
key = torch.ones(1, 2, 16, device="xla")
call = lambda: paged_ops.reshape_and_cache(key, key, kv_cache, torch.tensor([3], device="xla"))
try:
    call()
    raise SystemExit("expected an error")
except RuntimeError as error:
    print("before:", error)
import paged_ops.lowerings.tpu
paged_ops.lowerings.tpu.install()
paged_ops.lowerings.tpu.install()
call()
print("after:", kv_cache.sum().item())
"""


def test_torch_xla_after_paged_ops():
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert "before: Found a custom (non-ATen) operator" in ran.stdout
    assert "after: 64.0" in ran.stdout
