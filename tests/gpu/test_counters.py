"""Counters that launches share: those that can run at the same time never have the same ones."""

import pytest
import torch

pytest.importorskip("triton")

from paged_ops.lowerings.gpu import counters


@pytest.fixture
def made(monkeypatch):
    """Counters as a GPU would have them, one set for each place."""
    monkeypatch.setattr(counters, "_known", {})
    sets = []

    def new(place):
        sets.append(torch.zeros(place[1], dtype=torch.int32))
        return counters._known.setdefault(place, sets[-1])

    monkeypatch.setattr(counters, "_new", new)
    return sets


@pytest.mark.parametrize("floats", [1, 127, 128, 1000, 4097])
def test_workspaces_side_by_side(floats, made):
    """They have different counters wherever the first one begins, and each always the same."""
    memory = torch.empty(8 * floats)
    for begin in range(0, 2 * floats, max(1, floats // 9)):
        made.clear()
        counters._known.clear()
        side_by_side = [memory[begin + n * floats :][:floats] for n in range(6)]
        got = [counters.counters_of(each, 12) for each in (*side_by_side, *side_by_side)]
        assert len(made) == 6
        assert [each.data_ptr() for each in got] == 2 * [each.data_ptr() for each in made]


def test_different_numbers(made):
    workspace = torch.empty(100)
    assert [counters.counters_of(workspace, number).shape for number in (12, 8, 12)] == [(12,), (8,), (12,)]
    assert len(made) == 2


def test_none_is_made_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(counters, "_unused", {})
    monkeypatch.setattr(counters, "_known", {})
    monkeypatch.setattr(counters, "capturing", lambda device: True)
    device = torch.device("cuda", 0)
    assert counters._new((device, 12, 10, 5)) is None
    # but those that were made before are given out
    left = [torch.zeros(12), torch.zeros(12)]
    counters._unused[device, 12] = [(each, None) for each in left]
    assert counters._new((device, 12, 10, 5)) is left[1]
    assert counters._new((device, 12, 10, 5)) is left[1]
    assert counters._new((device, 12, 10, 6)) is left[0]
    assert counters._new((device, 12, 10, 7)) is None
