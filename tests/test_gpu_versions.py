"""What is done for which Triton: Gluon between the versions that are known, Triton's own launches beyond them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from paged_ops.lowerings.gpu import device, launch


@pytest.fixture
def on_hopper(monkeypatch):
    """A process that believes to have an sm_90."""
    active = SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=90),
        get_current_stream=lambda index: 0,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device.has_hopper_gluon.cache_clear()
    yield
    device.has_hopper_gluon.cache_clear()


@pytest.mark.parametrize(
    ("version", "known"),
    [((3, 5), False), ((3, 6), True), ((3, 9), True), ((3, 10), False), ((4, 0), False)],
    ids=str,
)
def test_gluon_between_the_versions_that_are_known(version, known, on_hopper, monkeypatch):
    monkeypatch.setattr(device, "TRITON", version)
    assert device.has_hopper_gluon() is known


@pytest.mark.skipif(device.TRITON < device.OLDEST_GLUON, reason="a Gluon older than any that is used")
def test_gluon_has_the_functions():
    from paged_ops.lowerings.gpu import gluon_names

    for name in ("load_rows", "load_box", "reinterpret"):
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
