"""The Hopper kernel for several query rows per key/value head (shares.py): which calls it takes; batches against
float64, on a GPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")


from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import dense, shares
from paged_ops.lowerings.gpu.attention.triton import decode
from tests.gpu.batches import SMALL, batch, check_parts, check_replays, check_twice, on_hopper, parts_by_the_code
from tests.gpu.step import H200

LENS = [1, 16, 100, 0, 4096, 63, 64, 65, 777, 2048, 128, 129]
ONE = [1] * len(LENS)
BATCHES = {
    "71 heads": {"heads": (71, 1), "tokens": ONE, "lens": LENS},
    "71 heads, one long": {"heads": (71, 1), "tokens": [1], "lens": [100000]},
    "71 heads, a few parts each": {"heads": (71, 1), "tokens": [1] * 50, "lens": [6000 + 7 * n for n in range(50)]},
    "71 heads, twenty parts each": {"heads": (71, 1), "tokens": [1] * 6, "lens": [9000] * 6, "B": 64},
    "71 heads, long among short": {"heads": (71, 1), "tokens": [1] * 42, "lens": [300] * 20 + [30000] * 2 + [300] * 20},
    "71 heads, many": {"heads": (71, 1), "tokens": [1] * 300, "lens": [37 * k % 900 + 1 for k in range(300)]},
    "71 heads, sinks": {"heads": (71, 1), "tokens": [1] * 3, "lens": [9000, 0, 70], "sinks": True},
    "71 heads, window": {"heads": (71, 1), "tokens": ONE, "lens": LENS, "sliding_window": 1000},
    "71 heads, window, 4 first tokens": {
        "heads": (71, 1),
        "tokens": ONE,
        "lens": LENS,
        "sliding_window": 1000,
        "num_first_tokens": 4,
    },
    "64 heads, window, 150 first tokens": {
        "heads": (64, 1),
        "tokens": [1] * 9,
        "lens": [20000, 90, 300, 7001, 0, 150, 6400, 250, 401],
        "sliding_window": 100,
        "num_first_tokens": 150,
    },
    "64 heads, padded": {"heads": (64, 1), "tokens": [1] * 9 + [0] * 3, "lens": LENS[:9] + [0] * 3, "padding": 3},
    "64 heads, equal": {"heads": (64, 1), "tokens": [1] * 128, "lens": [1000] * 128},
    "64 heads, a prompt": {
        "heads": (64, 1),
        "tokens": [1] * 50 + [100] + [1] * 50 + [0] * 99,
        "lens": [1000] * 50 + [3000] + [50] * 50 + [9] * 99,
    },
    "48 heads, block 24, float16": {"heads": (48, 1), "tokens": ONE, "lens": LENS, "B": 24, "dtype": torch.float16},
    "48 heads, chunk, cap": {"heads": (48, 1), "tokens": ONE, "lens": LENS, "attention_chunk": 700, "soft_cap": 5.0},
    "48 heads, two tokens": {"heads": (48, 1), "tokens": [2] * 5, "lens": [5, 4096, 10000, 2, 777]},
    "32 heads, one token": {"heads": (32, 2), "tokens": ONE, "lens": LENS},
    "4 tokens": {"heads": (32, 8), "tokens": [4] * 12, "lens": [4, 16, 100, 5, 4096, 63, 64, 65, 777, 2048, 128, 129]},
    "16 heads, many short": {"heads": (16, 1), "tokens": [1] * 300, "lens": [37 * k % 900 + 1 for k in range(300)]},
    "128 heads, equal": {"heads": (128, 8), "tokens": [1] * 64, "lens": [1000] * 64},
    "12 heads, block 8": {"heads": (12, 1), "tokens": [1] * 3, "lens": [140000, 70000, 1], "B": 8},
    "4 rows, many units": {"heads": (32, 8), "tokens": [1] * 64, "lens": [83 * k % 2000 for k in range(64)]},
    "8 rows, head size 192": {"heads": (64, 8), "tokens": [1] * 64, "lens": [900] * 63 + [9000], "D": 192},
    "16 tokens": {"heads": (32, 8), "tokens": [16] * 6, "lens": [16, 4096, 10000, 17, 500, 77]},
    "some tokens": {"heads": (32, 8), "tokens": [40, 1, 7, 16, 16, 16], "lens": [4096, 16, 10000, 8192, 500, 77]},
    "16 tokens, not causal": {"heads": (16, 4), "tokens": [16] * 3, "lens": [16, 4096, 700], "causal": False},
    "16 tokens, window": {"heads": (16, 4), "tokens": [16] * 3, "lens": [16, 4096, 700], "sliding_window": 100},
    "40 tokens, window, first tokens": {
        "heads": (8, 8),
        "tokens": [30, 50, 20, 60],
        "lens": [30, 9000, 700, 3000],
        "sliding_window": 300,
        "num_first_tokens": 20,
        "B": 8,
    },
    "head size 256, window, first tokens": {
        "heads": (64, 1),
        "tokens": ONE,
        "lens": LENS,
        "D": 256,
        "sliding_window": 70,
        "num_first_tokens": 64,
    },
    "head size 64": {"heads": (128, 2), "tokens": ONE, "lens": LENS, "D": 64, "layout": "HND"},
    "head size 80": {"heads": (71, 1), "tokens": ONE, "lens": LENS, "D": 80},
    "head size 256": {"heads": (64, 1), "tokens": ONE, "lens": LENS, "D": 256},
    "head size 256, 71 heads": {"heads": (71, 1), "tokens": ONE, "lens": LENS, "D": 256},
    "head sizes 192 and 128": {"heads": (128, 1), "tokens": ONE, "lens": LENS, "D": 192, "Dv": 128},
}


def planned(H, K, T, S, D=128, **features):
    """The specification and the shapes of a call."""
    kv_cache = layouts.kv_cache_view("NHD", torch.zeros(layouts.kv_cache_shape("NHD", 5, 16, K, D), dtype=torch.half))
    paged, f = layouts.paged_kv(kv_cache), Features(**features)
    query, tables = torch.zeros(T, H, D, dtype=torch.half), torch.zeros(S, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, True)
    return of_call, spec.Shapes(T, S, 5, 2, True, spec.numbers_of(f, 0.1, 2, S, T))


@pytest.mark.parametrize(
    ("H", "K", "T", "S", "rows"),
    [
        (71, 1, 4, 4, 128), (128, 1, 300, 300, 128), (64, 1, 1, 1, 64), (48, 1, 3, 4, 64), (32, 8, 64, 4, 64),
        (33, 1, 4, 4, 64), (40, 1, 12, 4, 128), (64, 1, 8, 4, 128), (12, 4, 44, 4, 64), (32, 1, 4, 4, 64),
        (32, 8, 16, 4, 64), (128, 8, 4, 4, 64), (64, 8, 4, 4, None), (32, 8, 8, 4, None), (32, 8, 128, 4, None),
        (71, 1, 6, 4, None), (71, 1, 8, 4, None), (32, 8, 64, 64, 64), (64, 8, 256, 256, 64), (32, 8, 63, 63, None),
        (24, 8, 64, 64, None), (8, 1, 512, 512, None),
    ],
)  # fmt: skip
def test_batches_that_it_takes(H, K, T, S, rows):
    of_call, shapes = planned(H, K, T, S)
    plan = choose.launches_of(shares, of_call, H200, shapes)
    assert isinstance(plan, str) == (rows is None)
    kernels = choose.kernels_of(H200)
    assert kernels.index(shares) < kernels.index(dense) < kernels.index(decode)
    assert not shares.serves(of_call, H200)
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
    masks = {each: given[each] for each in ("sliding_window", "attention_chunk", "num_first_tokens") if each in given}
    of_call, _ = planned(*given["heads"], T, S, given.get("D", 128), **masks)
    assert shares.tile_rows(of_call, T, S)


@pytest.mark.parametrize(
    ("heads", "tokens", "lens"),
    [
        ((71, 1), ONE, LENS),
        ((71, 1), [1], [100000]),
        ((48, 1), [1, 0, 1, 1] * 16, [0, 9, 5000, 64] * 16),
        ((64, 1), [1] * 32, [1000] * 32),
        ((64, 1), [1] * 3, [1000] * 3),
        ((32, 8), [16, 40, 0, 8], [16, 4000, 0, 777]),
        ((128, 8), [0, 3, 1, 0, 1, 1], [300, 9, 0, 0, 1, 640]),
        ((40, 5), [2] * 70, [37 * k % 900 + 2 for k in range(70)]),
    ],
)
@pytest.mark.parametrize(
    "masks",
    [{}, {"causal": False}, {"sliding_window": 100}, {"sliding_window": 100, "num_first_tokens": 150}],
    ids=str,
)
def test_each_tile_has_one_program(heads, tokens, lens, masks, monkeypatch):
    (H, K), T, S = heads, sum(tokens), len(lens)
    of_call, shapes = planned(H, K, T, S, **masks)
    plan = choose.launches_of(shares, of_call, SMALL, shapes)
    if isinstance(plan, str):
        assert masks.get("sliding_window") and H // K < shares.LARGE_GROUP
        return
    TOKENS = plan.launches[-1]._launcher._constants["TILE"].M // (H // K)
    wanted = {(s, kh, token) for s in range(S) for kh in range(K) for token in range(0, tokens[s], TOKENS)}
    check_parts(*parts_by_the_code(plan, tokens, lens, monkeypatch), wanted)


def test_leaves_to_others():
    of_call, _ = planned(71, 1, 4, 4, bidirectional_ranges=torch.zeros(4, 1, 2, dtype=torch.int32))
    assert [reason.split(":")[0] for reason in shares.serves(of_call, H200)] == ["ranges"]
    of_call, _ = planned(71, 1, 4, 4, alibi_slopes=torch.zeros(71))
    assert "alibi" in [reason.split(":")[0] for reason in shares.serves(of_call, H200)]
    of_call, _ = planned(32, 8, 64, 64, sliding_window=100)
    assert not shares.tile_rows(of_call, 64, 64)
    of_call, _ = planned(71, 1, 4, 4, D=96)
    assert [reason[:10] for reason in shares.serves(of_call, H200)] == ["head sizes"]


@pytest.mark.parametrize("M", [64, 128])
@pytest.mark.parametrize("D", dense.served_sizes())
def test_tiles_fit_shared_memory(D, M):
    of_call, _ = planned(71, 1, 4, 4, D)
    shape = shares.shape_of(of_call, M, 227 << 10)
    used = shape.slots * M * D + shape.stages * shape.N * (sum(shape.k.parts) + sum(shape.v.parts))
    assert shape.M == M and shape.stages >= 2 and 2 * used + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize(
    ("D", "M", "shape"), [(128, 64, (128, 3, 2)), (128, 128, (64, 5, 2)), (64, 64, (128, 6, 2)), (80, 128, (64, 5, 2))]
)
def test_tiles(D, M, shape):
    """Keys of a tile, tiles of keys and values, tiles of query rows."""
    of_call, _ = planned(71, 1, 4, 4, D)
    chosen = shares.shape_of(of_call, M, 227 << 10)
    assert (chosen.N, chosen.stages, chosen.slots) == shape


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """All that must not be read is NaN; two calls give the same bits."""
    call, features, wanted = batch(**BATCHES[name])
    check_twice(call, features, wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [(71, 1), (48, 1), (32, 8)], ids=str)
def test_a_graph_serves_other_lengths(heads):
    """Captured with all lengths 1; then units are whole, or divided among few or among all programs."""
    tokens = 64 // heads[0] * 8 if heads[1] > 1 else 1
    batches = [
        {"lens": [50000, 16, 16, 16], "heads": heads},
        {"lens": [900, 0, 30000, 1234], "heads": heads},
        {"lens": [129, 128, 64, 17], "heads": heads},
    ]
    made = [batch(tokens=[tokens] * 4, columns=3200, blocks=4000, **each) for each in batches]
    check_replays(made, tokens)
