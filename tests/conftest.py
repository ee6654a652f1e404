"""Markers are declared in pyproject.toml; here is what selects by them, and where a run keeps what it compiles."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests.helpers import gpu

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "the device that the registry's tests run on: cpu, cuda, cuda:1 or xla; of cuda:1 tests of a GPU too"
    parser.addoption("--device", default="cpu", help=told)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--device")
    if name.startswith("cuda:"):
        gpu.GPU = torch.device(name)
    # Tables that were tuned on this machine are read only if the variable is set outside.
    os.environ.setdefault("PAGED_OPS_CONFIGS", str(Path(__file__).parent / "no_configs"))
    # Precompiled headers are half the time of a compilation: the processes of a run share them, and no two runs do.
    if COMPILED not in os.environ:
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="paged_ops_compiled_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device named on the command line; tests over the registry run there."""
    return request.config.getoption("--device")
