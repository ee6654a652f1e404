"""Processes for each number of ranks, kept from one test to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.processes import Processes


class Pool:
    """Runs a case on so many ranks, in new processes where the last case spoiled the old ones."""

    def __init__(self) -> None:
        self.running: dict[int, Processes] = {}

    def __call__(self, case: str, size: int, seconds: float, spoils: bool = False, **options: object) -> list:
        """``spoils``: the case leaves the process group broken."""
        for other, processes in list(self.running.items()):
            if other != size or not processes.is_whole:
                self.running.pop(other).kill()  # two cores: one set of processes at a time
        if size not in self.running:
            self.running[size] = Processes(size)
        try:
            return self.running[size].run(case, seconds, **options)
        finally:
            if spoils:
                self.running.pop(size).kill()


@pytest.fixture(scope="session")
def run_on() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    processes = [process for each in pool.running.values() for process in each.processes]
    for each in pool.running.values():
        each.kill()
    assert not any(process.is_alive() for process in processes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of two ranks, then all of four."""
    items.sort(key=lambda item: item.name.partition("[")[2].startswith("4"))
