"""Loops are tested in both orders: step by step, and with the next step launched before the tokens are read."""

import pytest

from paged_ops.generation import GenerationLoop


@pytest.fixture(params=[False, True], ids=["in_turn", "overlapped"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether loops overlap their steps by default."""
    monkeypatch.setitem(GenerationLoop.__init__.__kwdefaults__, "overlap", request.param)
    return bool(request.param)
