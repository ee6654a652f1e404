"""The kernel for one sequence on Hopper (one_sequence.py): which calls it takes, that each key tile has one program;
batches against float64, on a GPU."""

import dataclasses

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import one_sequence
from tests.gpu.batches import batch, compare, on_hopper, planned
from tests.gpu.step import H200

BATCHES = {
    "one cluster per unit": {"heads": (32, 8)},
    "many clusters": {"heads": (8, 1)},
    "small clusters": {"heads": (32, 32)},
    "three heads of a group": {"heads": (12, 4)},
    "five heads of a group, block 64": {"heads": (40, 8), "B": 64},
    "eight heads of a group": {"heads": (64, 8)},
    "head by head": {"heads": (32, 8), "layout": "HND"},
}
LENGTHS = 1, 63, 64, 1000, 1024, 2047, 4000, 9000


@pytest.mark.parametrize(
    ("H", "K", "T", "keys", "clusters"),
    [
        (32, 8, 1, 1024, (16, 1, 4, 2, True)), (32, 8, 1, 1008, (16, 1, 4, 2, False)),
        (32, 8, 1, 4096, (16, 1, 4, 2, True)), (32, 8, 2, 1024, None),
        (32, 8, 1, 4112, None), (8, 1, 1, 32768, (16, 8, 8, 2, True)), (32, 32, 1, 1024, (4, 1, 1, 2, True)),
        (12, 4, 1, 1024, (16, 2, 4, 2, True)), (16, 1, 1, 1024, None), (40, 10, 1, 64, None),
        (64, 64, 1, 64, None),
    ],
)  # fmt: skip
def test_calls_that_it_takes(H, K, T, keys, clusters):
    """``keys``: for which the block table has columns; the first block ids are loaded early only if it has them."""
    of_call, shapes = planned(H, K, T, 1, 128, torch.bfloat16, columns=keys // 16)
    kernels = [each for each in choose.kernels_of(H200) if not each.serves(of_call, H200)]
    kernel, choice = choose.choose(kernels, of_call, H200, shapes)
    assert (kernel is one_sequence) == (clusters is not None)
    if clusters is not None:
        assert choice[0] == clusters
        assert choice[1] == (1 if keys <= 64 * clusters[0] else 3)
        launches = one_sequence.build(choice, of_call, H200, shapes)
        assert launches.launches[0].grid(None) == (K * clusters[1], 1, 1)
        assert launches.counters == (K * clusters[0] if clusters[1] > 1 else 0)
        assert (launches.workspace == (0, 0, 0)) == (clusters[1] == 1)


def test_leaves_to_others():
    of_call, shapes = planned(32, 8, 2, 2, 128, torch.bfloat16)
    assert "several sequences" in one_sequence.plan(of_call, H200, shapes)
    few = dataclasses.replace(H200, processors=114)
    of_call, shapes = planned(32, 8, 1, 1, 128, torch.bfloat16)
    assert "multiprocessors" in one_sequence.plan(of_call, few, shapes)
    for changes, reason in (
        ({"D": 64}, "head sizes"),
        ({"dtype": torch.half}, "float16"),
        ({"sliding_window": 100}, "window"),
        ({"sinks": torch.zeros(32)}, "sinks"),
        ({"dtype": torch.float32}, "float32"),
        ({"alibi_slopes": torch.zeros(32)}, "alibi"),
        ({"batch_invariant": True}, "batch_invariant"),
    ):
        of_call, _ = planned(32, 8, 1, 1, **{"D": 128, "dtype": torch.bfloat16} | changes)
        assert reason in [each.split(":")[0] for each in one_sequence.serves(of_call, H200)], changes


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name, length):
    """All that must not be read is NaN; two calls give the same bits."""
    call, features, wanted = batch(**{"D": 128, "tokens": [1]} | BATCHES[name], lens=[length])
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    again = paged_ops.paged_attention_with_lse(*call, **features)
    assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    compare(out, lse, *wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("heads", "longest"), [((32, 8), 4080), ((8, 1), 20000)], ids=str)
def test_a_graph_serves_other_lengths(heads, longest):
    """Captured with length 1; then one cluster serves a unit, or several do, and there may be no keys or no rows."""
    made = [
        batch(
            heads=heads, tokens=[tokens], padding=1 - tokens, lens=[length], D=128, columns=longest // 16, blocks=1500
        )
        for tokens, length in ((1, longest), (1, 900), (1, 0), (0, 64), (1, 3000))
    ]
    captured = [each.clone() if isinstance(each, torch.Tensor) else each for each in made[0][0]]
    captured[3].fill_(1)
    graph = torch.cuda.CUDAGraph()
    paged_ops.paged_attention_with_lse(*captured)
    torch.cuda.synchronize(GPU)
    with captured_into(graph):
        out, lse = paged_ops.paged_attention_with_lse(*captured)
    for call, _, wanted in made:
        for place, given in zip(captured[:5], call[:5], strict=True):
            (place if place.shape == given.shape else place[:, : given.shape[1]]).copy_(given)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(GPU)
        compare(out, lse, *wanted)
