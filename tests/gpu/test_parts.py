"""Decode in one launch on a GPU: the counters of a call are its own, whatever runs at the same time."""

import threading

import pytest
import torch

from tests.helpers.gpu import GPU

pytest.importorskip("triton")

import paged_ops
from paged_ops.lowerings.gpu import counters
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared.split_merge import INTEGERS, UNIT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA device"),
]

LENS = 6  # sets of lengths


class Layers:
    """Calls one after the other, as a captured step has them, with lengths that change."""

    def __init__(self, seed, shapes):
        torch.manual_seed(seed)
        self.calls, self.lens = [], []
        for H, K, S, longest in shapes:
            N = 256
            tables = torch.randint(N, (S, longest // 16), dtype=torch.int32)
            query, kv_cache = torch.randn(S, H, 128), torch.randn(N, 2, 16, K, 128)
            ints = tables, torch.ones(S, dtype=torch.int32), torch.arange(S + 1, dtype=torch.int32)
            floats = (each.to(GPU, torch.bfloat16) for each in (query, kv_cache))
            self.calls.append((*floats, *(each.to(GPU) for each in ints), 128**-0.5))
            lens = (longest ** torch.rand(LENS, S)).int()
            lens[0], lens[1, 0] = longest, 0
            self.lens.append(lens.to(GPU))

    def choose(self, n):
        for call, lens in zip(self.calls, self.lens, strict=True):
            call[3].copy_(lens[n])

    def run(self):
        return [paged_ops.paged_attention(*call) for call in self.calls]

    def captured(self, stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(GPU), torch.cuda.graph(graph, stream=stream):
            out = self.run()
        return graph, out


@pytest.fixture
def one_launch(monkeypatch):
    monkeypatch.setattr(tuning, "fan_of", lambda *args: tuning.FAN)
    attention.forget()
    yield
    attention.forget()


def test_graphs_and_eager_calls_at_the_same_time(one_launch, monkeypatch):
    shapes = [(32, 8, 1, 4096), (32, 8, 16, 1024), (8, 1, 1, 16384)], [(8, 1, 1, 16384), (16, 4, 24, 512)]
    layers = [Layers(seed, each) for seed, each in enumerate((*shapes, *shapes))]
    wanted = []
    for each in layers:
        wanted.append([])
        for n in range(LENS):
            each.choose(n)
            wanted[-1].append(each.run())
            assert all(map(torch.equal, each.run(), wanted[-1][-1]))
    with monkeypatch.context() as patch:  # the same as with two launches
        patch.setattr(tuning, "fan_of", lambda *args: 0)
        attention.forget()
        for each, results in zip(layers, wanted, strict=True):
            for n in range(LENS):
                each.choose(n)
                for got, want in zip(each.run(), results[n], strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    attention.forget()
    streams = [torch.cuda.Stream(GPU) for _ in layers]
    graphs = [each.captured(streams[0]) for each in layers[:2]]
    wrong = [torch.zeros((), dtype=torch.int64, device=GPU) for _ in layers]
    torch.cuda.synchronize(GPU)

    def work(k):
        with torch.cuda.stream(streams[k]):
            for turn in range(300):
                n = (turn + k) % LENS
                layers[k].choose(n)
                if k < 2:
                    graph, out = graphs[k]
                    for each in out:
                        each.fill_(torch.nan)
                    graph.replay()
                else:
                    out = layers[k].run()
                for got, want in zip(out, wanted[k][n], strict=True):
                    wrong[k] += (got != want).any()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    torch.cuda.synchronize(GPU)
    assert [int(each) for each in wrong] == [0, 0, 0, 0]
    # Those of split_kernel, next to its notes; other kernels have no notes.
    known = [(number, each) for (device, number, *_), each in counters._known.items() if device == GPU]
    of_split = [each for number, each in known if number % INTEGERS.value == 0]
    assert of_split
    for each in of_split:
        assert not each.view(-1, INTEGERS.value)[:, : UNIT.value + 1].any()
    assert not any(each.any() for number, each in known if number % INTEGERS.value)


def test_a_capture_before_any_call(one_launch, monkeypatch):
    """No counters can be made then, and a second kernel merges."""
    layers = Layers(9, [(32, 8, 4, 2048)])
    layers.choose(0)
    want = layers.run()
    monkeypatch.setattr(attention, "counters_of", lambda workspace, number: None)
    for got in (layers.run(), layers.run()):  # compiled
        torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-3)
    graph, out = layers.captured(torch.cuda.Stream(GPU))
    for n in range(LENS):
        layers.choose(n)
        want = layers.run()
        graph.replay()
        torch.cuda.synchronize(GPU)
        assert torch.equal(out[0], want[0])
