"""A GPU that is only imitated: ops on CPU tensors choose and specialise kernels as on an H200; nothing is compiled.

:func:`imitate` changes the process for good, so it is called in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.gpu.step import H200

ROOT = Path(__file__).parents[2]


class Kernels:
    """The kernels that Triton was asked to compile: each once, as by its own cache."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []  # name, and what it was specialised on

    def compile(self, kernel: Any, key: Any, signature: Any, device: Any, constants: Any, *args: Any) -> Any:
        """In place of ``JITFunction._do_compile``."""
        self.compiled.append((kernel.fn.__name__, str(key)))
        run = SimpleNamespace(global_scratch_size=1, profile_scratch_size=1)
        made = Compiled(run)
        kernel.device_caches[device][0][key] = made
        return made


class Metadata(NamedTuple):
    """What a launch by clusters changes of a kernel."""

    target: GPUTarget = GPUTarget("cuda", 90, 32)
    num_warps: int = 4
    num_ctas: int = 1
    shared: int = 0


class Compiled:
    """A compiled kernel whose launch does nothing."""

    function = packed_metadata = None
    metadata = Metadata()

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        def launch(*args: Any) -> None:
            assert all(n >= 0 for n in args[:3])

        launch.__dict__.update(vars(self._run))
        return launch

    def launch_metadata(self, *args: Any) -> None:
        return None


def imitate(target: Any = H200) -> Kernels:
    """From here on ops on CPU tensors run as on the target, and give arbitrary results."""
    from paged_ops import registry

    registry.LOWERINGS["CPU"] = "paged_ops.lowerings.gpu"
    from paged_ops.graphs import runner
    from paged_ops.lowerings import gpu, warm_up
    from paged_ops.lowerings.gpu import blocks, counters, precompile, precompile_workers

    assert gpu is not None
    triton.runtime.driver.set_active(precompile_workers.Driver(GPUTarget(target.backend, target.arch, 32)))
    kernels = Kernels()
    triton.JITFunction._do_compile = lambda self, *args: kernels.compile(self, *args)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("paged_ops.lowerings.gpu") and hasattr(module, "target_of"):
            module.target_of = lambda device: target
    table, host = blocks._table, torch.device("cpu")
    blocks._table = lambda sources, targets, device, *args: table(sources, targets, host, *args)
    blocks._upload = lambda mapping, *args: mapping
    counters._new = lambda place: torch.zeros(place[1], dtype=torch.int32)
    precompile.can_precompile = lambda: False
    warm_up.has_gpu = lambda: True
    runner.runs_kernels = lambda device: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.pin_memory = lambda tensor: tensor
    return kernels


def print_cases(cases: Iterable[str], found: Callable[[str, str], dict[str, Any]]) -> None:
    """Prints a line of JSON for each case, ``name`` or ``name without part``: what ``found(name, part)`` returns in a
    process of its own."""
    for case in cases:
        name, _, left_out = case.partition(" without ")
        process = os.fork()
        if not process:
            print(json.dumps({"case": case, **found(name, left_out)}), flush=True)
            os._exit(0)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"{case} failed")


def run_cases(module: str, num_steps: int, *cases: str) -> list[dict[str, Any]]:
    """What a program that ends with :func:`print_cases` found in each case."""
    command = [sys.executable, "-m", module, str(num_steps), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    every = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [found["case"] for found in every] == [*cases]
    return every


def expect_nothing_later(found: dict[str, Any]) -> None:
    """A case has kernels that were asked for ahead, and steps of many sizes that ask for no other."""
    assert 5 <= len(found["warm"]) <= 50
    assert found["sizes"] >= 30
    names = sorted({name for name, _ in found["later"]})
    assert not names, f"{found['case']}: {len(found['later'])} kernels asked for in steps: {names}"
