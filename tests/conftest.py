"""Markers are declared in pyproject.toml; here is what selects by them."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the device that the registry's tests run on: cpu, cuda or xla")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device named on the command line; tests over the registry run there."""
    return request.config.getoption("--device")
