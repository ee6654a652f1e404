"""The Hopper kernel for wide heads and few query rows (few.py): which calls it takes; batches against float64, on a
GPU."""

import pytest
import torch

from tests.helpers.gpu import GPU

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import dense, few
from paged_ops.lowerings.gpu.attention.triton import decode
from tests.gpu.batches import (
    SMALL,
    batch,
    check_parts,
    check_replays,
    check_twice,
    compare,
    on_hopper,
    parts_by_the_code,
    planned,
)
from tests.gpu.step import H200

LENS = [1, 16, 100, 0, 4096, 63, 64, 65, 777, 2048, 128, 129]
ONE = [1] * len(LENS)
BATCHES = {
    "ragged": {"heads": (32, 4), "tokens": ONE, "lens": LENS},
    "ragged, block 64, float16": {"heads": (32, 4), "tokens": ONE, "lens": LENS, "B": 64, "dtype": torch.float16},
    "16 rows, block 24": {"heads": (16, 1), "tokens": ONE, "lens": LENS, "B": 24},
    "one head, one long": {"heads": (8, 1), "tokens": [1], "lens": [40000]},
    "a few parts each": {"heads": (16, 2), "tokens": [1] * 9, "lens": [3000 + 7 * n for n in range(9)]},
    "long among short": {"heads": (8, 1), "tokens": [1] * 42, "lens": [300] * 20 + [9000] * 2 + [300] * 20},
    "many": {"heads": (8, 1), "tokens": [1] * 300, "lens": [37 * k % 900 + 1 for k in range(300)]},
    "equal": {"heads": (8, 2), "tokens": [1] * 128, "lens": [640] * 128},
    "padded": {"heads": (32, 4), "tokens": [1] * 9 + [0] * 3, "lens": LENS[:9] + [0] * 3, "padding": 3},
    "sinks": {"heads": (12, 2), "tokens": [1] * 3, "lens": [5000, 0, 70], "sinks": True},
    "window": {"heads": (16, 2), "tokens": ONE, "lens": LENS, "sliding_window": 100},
    "window, two tokens": {"heads": (8, 1), "tokens": [2] * 5, "lens": [5, 4096, 777, 2, 3000], "sliding_window": 1000},
    "chunk, cap": {"heads": (8, 1), "tokens": ONE, "lens": LENS, "attention_chunk": 700, "soft_cap": 5.0},
    "two tokens": {"heads": (32, 4), "tokens": [2] * 5, "lens": [5, 4096, 9000, 2, 777]},
    "16 tokens of one head": {"heads": (2, 2), "tokens": [16] * 4, "lens": [16, 1000, 4096, 17], "B": 8},
    "four tokens of 3 heads": {"heads": (6, 2), "tokens": [4] * 4, "lens": [4, 1000, 4096, 67], "causal": False},
    "some tokens of one": {"heads": (16, 2), "tokens": [1, 0, 0, 5, 0, 1, 0], "lens": [1000, 5, 0, 40, 4096, 129, 7]},
    "a prompt": {"heads": (8, 1), "tokens": [0, 66, *[0] * 68, 5], "lens": [300, 500, *[9] * 68, 100]},
    "head by head": {"heads": (32, 4), "tokens": ONE, "lens": LENS, "layout": "HND"},
}


@pytest.mark.parametrize(
    ("H", "K", "T", "S", "rows"),
    [
        (32, 4, 4, 4, 8), (16, 2, 1, 1, 8), (8, 1, 300, 300, 8), (8, 1, 3, 4, 8), (16, 1, 4, 4, 16), (12, 1, 4, 4, 16),
        (32, 4, 8, 4, 16), (8, 8, 64, 4, 16), (2, 2, 4, 4, 8), (5, 1, 12, 4, 16), (17, 1, 4, 4, None),
        (32, 4, 12, 4, None), (32, 4, 5, 4, None), (5, 1, 16, 4, None),
    ],
)  # fmt: skip
def test_batches_that_it_takes(H, K, T, S, rows):
    of_call, shapes = planned(H, K, T, S)
    plan = choose.launches_of(few, of_call, H200, shapes)
    assert isinstance(plan, str) == (rows is None)
    kernels = choose.kernels_of(H200)
    assert kernels.index(few) < kernels.index(decode)
    assert not few.serves(of_call, H200)
    if rows is not None:
        launch, merge = plan.launches
        assert launch._launcher._constants["SHAPE"].M == merge._launcher._constants["TILE"].M == rows
        assert launch._launcher._constants["SHAPE"].N == merge._launcher._constants["TILE"].N
        assert launch._launcher._constants["DIVISION"] == merge._launcher._constants["DIVISION"]
        programs = 128 if K == 8 else 132
        assert launch.grid(None) == (programs, 1, 1) and merge.grid(None)[0] == programs


@pytest.mark.parametrize("name", BATCHES)
def test_batches_below_are_taken(name):
    given = BATCHES[name]
    T, S = sum(given["tokens"]) + given.get("padding", 0), len(given["lens"])
    of_call, _ = planned(*given["heads"], T, S)
    assert few.rows_of_unit(of_call, T, S)


def test_leaves_to_others():
    of_call, _ = planned(8, 1, 4, 4, bidirectional_ranges=torch.zeros(4, 1, 2, dtype=torch.int32))
    assert [reason.split(":")[0] for reason in few.serves(of_call, H200)] == ["ranges"]
    of_call, _ = planned(8, 1, 4, 4, alibi_slopes=torch.zeros(8))
    assert "alibi" in [reason.split(":")[0] for reason in few.serves(of_call, H200)]
    of_call, _ = planned(8, 1, 4, 4, sliding_window=100, num_first_tokens=4)
    assert "first" in [reason.split(":")[0] for reason in few.serves(of_call, H200)]
    of_call, _ = planned(8, 1, 4, 4, D=256)
    assert [reason[:10] for reason in few.serves(of_call, H200)] == ["head sizes"]
    of_call, _ = planned(8, 1, 4, 4, dtype=torch.float32)
    assert "float32" in [reason.split(":")[0] for reason in few.serves(of_call, H200)]


@pytest.mark.parametrize("M", [8, 16])
@pytest.mark.parametrize(("D", "_"), few.SIZES)
def test_tiles_fit_shared_memory(D, _, M):
    of_call, _ = planned(8, 1, 4, 4, D)
    shape = few.shape_of(of_call, M)
    used = M * D + shape.places * shape.N * D + M * shape.N
    assert shape.M == M and 2 * used + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize(
    ("heads", "tokens", "lens"),
    [
        ((32, 4), ONE, LENS),
        ((8, 1), [1], [100000]),
        ((32, 4), [1, 0, 1, 1] * 16, [0, 9, 5000, 64] * 16),
        ((8, 1), [1] * 32, [1000] * 32),
        ((16, 2), [1, 5, 0, 2], [16, 4000, 0, 777]),
        ((6, 2), [4] * 70, [37 * k % 900 + 4 for k in range(70)]),
    ],
)
@pytest.mark.parametrize("masks", [{}, {"causal": False}, {"sliding_window": 100}], ids=str)
def test_each_tile_has_one_program(heads, tokens, lens, masks, monkeypatch):
    (H, K), T, S = heads, sum(tokens), len(lens)
    of_call, shapes = planned(H, K, T, S, **masks)
    plan = choose.launches_of(few, of_call, SMALL, shapes)
    assert not isinstance(plan, str), plan
    TOKENS = plan.launches[-1]._launcher._constants["TILE"].M // (H // K)
    wanted = {(s, kh, token) for s in range(S) for kh in range(K) for token in range(0, tokens[s], TOKENS)}
    check_parts(*parts_by_the_code(plan, tokens, lens, monkeypatch), wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """All that must not be read is NaN; two calls give the same bits."""
    call, features, wanted = batch(**{"D": 512} | BATCHES[name])
    check_twice(call, features, wanted)


@pytest.mark.gpu
@on_hopper
def test_query_rows_lie_anywhere():
    """Slices of larger tensors, at odd addresses, are read where they lie."""
    call, _, wanted = batch((32, 4), [1] * 5, [5000, 70, 0, 1, 640], D=512)
    rows = torch.full((5, 40 * 512 + 1), torch.nan, dtype=torch.bfloat16, device=GPU)
    query = rows[:, 1025 : 1025 + 32 * 512].unflatten(1, (32, 512))
    query.copy_(call[0])
    compare(*paged_ops.paged_attention_with_lse(query, *call[1:]), *wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [(32, 4), (8, 1)], ids=str)
def test_a_graph_serves_other_lengths(heads):
    """Captured with all lengths 1; then units are whole, or divided among few or among all programs."""
    batches = [
        {"lens": [20000, 16, 16, 16], "heads": heads},
        {"lens": [900, 0, 10000, 1234], "heads": heads},
        {"lens": [129, 128, 64, 17], "heads": heads},
    ]
    made = [batch(tokens=[1] * 4, D=512, columns=1300, blocks=1500, **each) for each in batches]
    check_replays(made, 1)
