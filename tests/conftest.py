"""Options that select tests, their device, and the folder of what a run compiles. Marks are in pyproject.toml."""

import os
import shutil
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.helpers import gpu

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
MOST_WHOLE = 3  # cases of a test that --sample leaves whole


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "device of the tests over the registry: cpu, cuda, cuda:1 or xla; with cuda:1, of the tests of a GPU too"
    parser.addoption("--device", default="cpu", help=told)
    told = "of each test with more than three cases, run one in SAMPLE, at least one: always the same ones"
    parser.addoption("--sample", type=int, default=1, help=told)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--device")
    if name.startswith("cuda:"):
        gpu.GPU = torch.device(name)
    # Tables that were tuned on this machine are read only if the variable is already set.
    os.environ.setdefault("PAGED_OPS_CONFIGS", str(Path(__file__).parent / "no_configs"))
    # Precompiled headers are half the time of a compilation: the workers of a run share them; runs do not.
    if COMPILED not in os.environ:
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="paged_ops_compiled_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of cases that ``--sample`` asks for, by a hash of their ids: new cases leave the others chosen."""
    share = config.getoption("--sample")
    if share == 1:
        return
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for same in cases.values():
        same.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        kept.update(same if len(same) <= MOST_WHOLE else same[: -(-len(same) // share)])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device named on the command line; tests over the registry run there."""
    return request.config.getoption("--device")
