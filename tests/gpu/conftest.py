"""Launches of the GPU's lowering, recorded on a machine without one, and the interpreter's speed."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from tests.helpers import interpreter

    interpreter.quicken()


@pytest.fixture
def launched(monkeypatch):
    """Calls on CPU tensors are planned as on an H200; what Triton would launch is noted."""
    import triton

    from paged_ops.lowerings.gpu import cache, launch
    from paged_ops.lowerings.gpu.attention import call as attention
    from tests.gpu.step import H200

    calls = []

    def run(kernel, *args, grid, warmup, **constants):
        tensors, *numbers = args
        calls.append(
            (
                kernel.fn.__name__,
                grid,
                len(tensors),
                [n for n in numbers if n is None or type(n) in (int, float)],
                constants,
            )
        )

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda index: 0))
    for module in (attention, cache):
        monkeypatch.setattr(module, "target_of", lambda device: H200)

    def clear():
        attention.forget()
        cache.forget()
        launch._launchers.clear()

    clear()
    yield calls
    clear()
