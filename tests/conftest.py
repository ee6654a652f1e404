"""Markers are declared in pyproject.toml; here is what selects by them."""

import gpu_under_test
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "the device that the registry's tests run on: cpu, cuda, cuda:1 or xla; of cuda:1 tests of a GPU too"
    parser.addoption("--device", default="cpu", help=told)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--device")
    if name.startswith("cuda:"):
        gpu_under_test.GPU = torch.device(name)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device named on the command line; tests over the registry run there."""
    return request.config.getoption("--device")
