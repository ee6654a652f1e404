"""What is done for which Triton: Gluon between the versions that are known, Triton's own launches beyond them."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

import paged_ops
from paged_ops.bench import tune
from paged_ops.lowerings.gpu import launch, target


@pytest.fixture
def on_hopper(monkeypatch):
    """A process that believes to have an sm_90."""
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return target.Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 132, 227 << 10)


@pytest.mark.parametrize(
    ("version", "known"),
    [((3, 5), False), ((3, 6), True), ((3, 9), True), ((3, 10), False), ((4, 0), False)],
    ids=str,
)
def test_gluon_between_the_versions_that_are_known(version, known, on_hopper, monkeypatch):
    monkeypatch.setattr(target, "TRITON", version)
    assert on_hopper.has_hopper_gluon is known


@pytest.mark.skipif(target.TRITON < target.OLDEST_GLUON, reason="a Gluon older than any that is used")
def test_gluon_has_the_functions():
    from paged_ops.lowerings.gpu import gluon_names

    for name in ("load_async", "load_box", "reinterpret"):
        assert triton.language.core.is_builtin(getattr(gluon_names, name))


@pytest.mark.parametrize(("version", "by_triton"), [((3, 7), 1), ((3, 9), 1), ((3, 10), 3)], ids=str)
def test_a_newer_triton_launches_by_itself(version, by_triton, on_hopper, monkeypatch):
    """How a compiled kernel is called may change: nothing is launched past Triton there."""
    launched = []

    class Kernel:
        arg_names = ("x", "n", "SIZE")

        def __getitem__(self, grid):
            return lambda x, n, **constants: launched.append("triton") or compiled

    compiled = SimpleNamespace(run=lambda *args: launched.append("past it"), function=1, packed_metadata=())
    monkeypatch.setattr(launch, "TRITON", version)
    tensor = SimpleNamespace(data_ptr=lambda: 64, is_cuda=True, get_device=lambda: 0)
    launcher = launch.Launcher(Kernel(), {"SIZE": 8}, torch.device("cuda", 0))
    for n in range(3):
        launcher((1, 1, 1), (tensor,), (n,))
    assert launched == ["triton"] * by_triton + ["past it"] * (3 - by_triton)


def test_every_launch_asks_for_fused_products_and_sums():
    """Triton 3.10 fuses none unless an option says so. The constants of a kernel may say otherwise."""
    root = Path(paged_ops.__file__).parent
    launches = [
        (path.name, call.lineno, [ast.unparse(each.value) for each in call.keywords if each.arg is None])
        for path in root.glob("lowerings/gpu/**/*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.value).endswith("kernel")
    ]
    assert {name for name, *_ in launches} >= {"launch.py", "linear.py", "gather.py"}
    assert [launch for launch in launches if not {"FUSED", "{**FUSED, **self._constants}"} & {*launch[2]}] == []


def test_tables_are_by_triton(monkeypatch, tmp_path):
    written = {
        "split": {"16bit": {"64": [1], "128": [2]}, "fp8": {"64": [3]}},
        "triton": {"3.10": {"split": {"fp8": {"64": [9]}}}, "3.8": {"split": {"16bit": {"128": [7]}}}},
    }
    (tmp_path / "attention_default.json").write_text(json.dumps(written))
    monkeypatch.setattr(target, "CONFIGS", tmp_path)
    split = {version: table_under(version, monkeypatch)["split"] for version in [(3, 7), (3, 9), (3, 10)]}
    assert split[3, 7] == written["split"]
    assert split[3, 9] == {"16bit": {"64": [1], "128": [7]}, "fp8": {"64": [3]}}
    assert split[3, 10] == {"16bit": {"64": [1], "128": [7]}, "fp8": {"64": [9]}}


def test_tuned_numbers_replace_those_of_this_triton(monkeypatch, tmp_path):
    monkeypatch.setattr(target, "TRITON", (3, 9))
    monkeypatch.setattr(target, "CONFIGS", tmp_path)
    changes = {"3.8": {"split": {"16bit": {"64": [2]}}}, "3.10": {"split": {"16bit": {"64": [3]}}}}
    before = {"split": {"16bit": {"64": [1]}}, "triton": changes}
    (tmp_path / "attention_default.json").write_text(json.dumps(before))
    default = target.Target(torch.device("cpu"), target.DEFAULT, "cuda", 80, 1, 0)
    tune.write(tmp_path, "attention", default, {"split": {"16bit": {"64": [4]}}})
    assert table_under((3, 9), monkeypatch)["split"] == {"16bit": {"64": [4]}}
    assert table_under((3, 10), monkeypatch)["split"] == {"16bit": {"64": [3]}}


def table_under(version, monkeypatch):
    monkeypatch.setattr(target, "TRITON", version)
    return target.read_tiles(target.DEFAULT)


@pytest.mark.parametrize("path", sorted(target.CONFIGS.glob("attention_*.json")), ids=lambda path: path.stem)
def test_what_differs_by_triton_is_there_without(path):
    """Another Triton changes numbers; it adds no kind of call."""
    numbers = json.loads(path.read_text())
    for kernels in numbers.pop("triton", {}).values():
        for kernel, kinds in kernels.items():
            for kind, widths in kinds.items():
                assert widths.keys() <= numbers[kernel][kind].keys()
                more = kernel == "two_heads"  # the least number of heads; nothing after it: no heads share a tile
                assert {len(tile) - more for tile in widths.values()} <= ({0, 4, 5} if more else {4, 5})
