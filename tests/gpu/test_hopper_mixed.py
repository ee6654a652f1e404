"""Prompts and decodes at the same time on Hopper (mixed.py): which batches it takes; batches against float64, on a
GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import choose, tuning
from paged_ops.lowerings.gpu.attention.hopper import dense, mixed, shares, work
from tests.gpu.batches import SMALL, batch, check_parts, check_replays, compare, on_hopper, parts_by_the_code
from tests.gpu.pointers import Pointer, as_torch
from tests.gpu.step import H200

RAGGED = [1, 2, 16, 17, 63, 64, 65, 128, 129, 777, 4096, 40000, 5000, 3, 300, 2047, 2048, 2049, 9999, 31]
BATCHES = {
    "a prompt first": {"tokens": [700] + [1] * 20, "lens": [3000, *RAGGED]},
    "a prompt last": {"tokens": [1] * 20 + [700], "lens": [*RAGGED, 700]},
    "prompts among decodes": {
        "tokens": [1] * 7 + [300, 33, 1] + [1] * 9 + [129, 250],
        "lens": [*RAGGED[:7], 1300, 33, 900, *RAGGED[9:18], 4096, 251],
    },
    "decodes of two tokens, and of more": {
        "tokens": [2] * 10 + [800] + [3, 1, 2, 4, 2, 7, 1, 2, 2],
        "lens": [2, 3, 64, 65, 66, 5000, 129, 128, 30000, 17, 2000, 3, 1, 1000, 4, 2, 7000, 10, 64, 63],
    },
    "sequences without tokens or keys": {
        "tokens": [0, 1, 0, 600, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 100, 0],
        "lens": [9, 0, 0, 600, 0, 1, 500, 40, 3000, 16, 0, 0, 77, 128, 0, 100, 3],
    },
    "padding": {
        "tokens": [1] * 9 + [500] + [2] * 9, "lens": [100 * n + 1 for n in range(9)] + [501] + [99] * 9, "padding": 77,
    },
    "decodes alone": {"tokens": [1] * 20, "lens": RAGGED, "padding": 700},
    "prompts alone": {"tokens": [90] * 16, "lens": [90 + 37 * n for n in range(16)]},
    "one long decode": {"tokens": [1] * 15 + [600], "lens": [40] * 14 + [40000, 600]},
    "equal decodes": {"tokens": [1] * 63 + [600], "lens": [1024] * 63 + [1624]},
    "fewer tiles than programs": {"tokens": [600] + [1] * 15, "lens": [600] + [1] * 15},
    "many sequences": {
        "tokens": [1, 2] * 60 + [1500] + [1] * 79,
        "lens": [37 * n % 900 + 2 for n in range(120)] + [1600] + [53 * n % 3000 + 1 for n in range(79)],
    },
    "heads before tokens": {"tokens": [700] + [1] * 20, "lens": [700, *RAGGED], "layout": "HND"},
    "a hundred sequences": {"tokens": [1] * 50 + [1000] + [1] * 49, "lens": [700] * 50 + [1500] + [3000] * 49},
    "few tokens last": {
        "tokens": [900] + [4] * 20 + [1] * 9, "lens": [2000] + [4000 - 90 * n for n in range(20)] + [99] * 9,
    },
    "few tokens first": {
        "tokens": [8] * 20 + [1] * 9 + [900], "lens": [8 + 190 * n for n in range(20)] + [5000] * 9 + [900],
    },
    "few tokens, long": {
        "tokens": [4, 3, 4, 1] * 5 + [700], "lens": [4097, 9000, 4096, 5000] * 4 + [4098, 40000, 5, 1, 900],
    },
    "few tokens alone": {"tokens": [3, 16, 17, 50] * 12, "lens": [3000, 16, 5000, 70] * 12},
    "64 heads": {
        "heads": (64, 8), "tokens": [1] * 9 + [500] + [2, 1] * 5 + [90], "lens": [*RAGGED[:9], 1300, *RAGGED[9:19], 90],
    },
    "float16": {
        "dtype": torch.float16, "tokens": [1] * 10 + [800] + [2] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]],
    },
    "blocks of 64": {"B": 64, "tokens": [1] * 10 + [800] + [2] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]]},
    "blocks of 128": {"B": 128, "tokens": [1] * 10 + [800] + [2] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]]},
    "window, soft cap and sinks": {
        "tokens": [1] * 10 + [800] + [2] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]],
        "sliding_window": 100, "soft_cap": 30.0, "sinks": True,
    },
    "chunks, heads of 64, eight heads of four, heads before tokens": {
        "heads": (32, 4), "D": 64, "layout": "HND", "attention_chunk": 300,
        "tokens": [2] * 10 + [800] + [1] * 9, "lens": [max(n, 2) for n in (*RAGGED[:10], 2000, *RAGGED[11:])],
    },
    "seven heads of four, heads of 64, blocks of 48, float16, soft cap": {
        "heads": (28, 4), "D": 64, "B": 48, "dtype": torch.float16, "soft_cap": 20.0,
        "tokens": [1] * 10 + [900] + [1] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]],
    },
    "five heads of two": {
        "heads": (10, 2), "tokens": [1700] + [1] * 20 + [1750], "lens": [3000, *RAGGED, 1750], "sinks": True,
    },
    "three heads of six, two rows unused": {
        "heads": (18, 6), "tokens": [3] * 9 + [1100] + [2, 1] * 5,
        "lens": [70 * n + 3 for n in range(9)] + [1100] + [999] * 10,
    },
    "no groups, not causal": {
        "heads": (16, 16), "causal": False, "tokens": [1] * 10 + [1200] + [4] * 9,
        "lens": [*RAGGED[:10], 2000, *[n + 4 for n in RAGGED[11:]]],
    },
    "values of 64, blocks of 8": {
        "Dv": 64, "B": 8, "tokens": [1] * 10 + [800] + [2] * 9, "lens": [*RAGGED[:10], 2000, *RAGGED[11:]],
    },
}  # fmt: skip


def planned(T, S, H=32, K=8, D=128, B=16, dtype=torch.bfloat16, layout="NHD", **features):
    """The specification and the shapes of a call."""
    kv_cache = layouts.kv_cache_view(layout, torch.zeros(layouts.kv_cache_shape(layout, 5, B, K, D), dtype=dtype))
    paged, f = layouts.paged_kv(kv_cache), Features(**features)
    query, tables = torch.zeros(T, H, D, dtype=dtype), torch.zeros(S, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, True)
    return of_call, spec.Shapes(T, S, 5, 2, True, spec.numbers_of(f, 0.1, 2, S, T))


@pytest.mark.parametrize(
    ("T", "S", "takes"),
    [
        (2111, 64, True), (575, 64, True), (544, 16, True), (1100, 256, True), (2048, 16, True),
        (2063, 15, False), (2400, 257, False), (543, 16, False), (191, 64, False), (1024, 256, False),
        (64, 64, False), (2048, 128, False), (1, 1, False),
    ],
)  # fmt: skip
def test_batches_that_it_takes(T, S, takes):
    """With many items for few sequences; not if all may have 16 tokens, which others serve."""
    of_call, shapes = planned(T, S)
    kernels = list(choose.kernels_of(H200))
    assert kernels.index(shares) < kernels.index(mixed) < kernels.index(dense)
    assert not mixed.serves(of_call, H200)
    plan = choose.launches_of(mixed, of_call, H200, shapes)
    assert isinstance(plan, str) != takes
    if takes:
        launch, merge = plan.launches
        ours, its = launch._launcher._constants, merge._launcher._constants
        assert ours["DECODES"][:2] == its["TILE"][:2] and ours["DIVISION"] == its["DIVISION"]
        assert launch.grid(None) == merge.grid(None) == (ours["PROGRAMS"], 1, 1) == (132, 1, 1)
        others = choose.launches_of(dense, of_call, H200, shapes)
        assert [each._launcher for each in plan.without_counters] == [each._launcher for each in others.launches]
        assert all(own >= other for own, other in zip(plan.workspace, others.workspace, strict=True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"H": 128}, "num_heads"), ({"D": 96}, "head sizes"), ({"D": 256}, "head sizes"), ({"B": 12}, "kv_cache"),
        ({"alibi_slopes": torch.zeros(32)}, "alibi"),
        ({"bidirectional_ranges": torch.zeros(64, 1, 2, dtype=torch.int32)}, "ranges"),
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_leaves_to_others(given, reason):
    of_call, _ = planned(2111, 64, **given)
    assert any(each.startswith(reason) for each in mixed.serves(of_call, H200))


@pytest.mark.parametrize(
    "given",
    [
        {"K": 4}, {"K": 32}, {"H": 10, "K": 2}, {"D": 64}, {"B": 48}, {"layout": "HND"}, {"dtype": torch.float16},
        {"causal": False}, {"sliding_window": 9}, {"attention_chunk": 9}, {"soft_cap": 2.0}, {"sinks": torch.zeros(32)},
    ],
    ids=lambda given: "-".join(given),
)  # fmt: skip
def test_serves_a_class(given):
    of_call, shapes = planned(4000, 64, **given)
    assert not mixed.serves(of_call, H200)
    assert not isinstance(mixed.plan(of_call, H200, shapes), str)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("D", "places"), [(128, 7), (64, 16)])
def test_shared_memory_has_the_space(D, places, dtype):
    of_call, _ = planned(2111, 64, D=D, dtype=dtype)
    shape = mixed.shape_of(of_call, 227 << 10)
    assert (shape.M, shape.N, shape.stages, shape.slots, shape.row_slots) == (128, 128, 2, 2, 1)
    decodes = mixed.decode_shape(of_call, shape, 227 << 10)
    assert decodes.stages == places >= 2 * D // mixed.WIDTH.value
    tiles = shape.row_slots * shape.M * D + shape.stages * shape.N * 2 * D
    ring = places * mixed.KEYS * mixed.WIDTH.value
    others = mixed.ROWS * (D + mixed.KEYS)
    assert 2 * (tiles + ring + others) + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize("times", [1, 2])
def test_prompts_have_tiles_of_their_own(times, monkeypatch):
    """By the code of the kernel: which sequence has a tile of query rows. Decodes have none, nor do four tokens with
    many keys."""
    as_torch(monkeypatch)
    monkeypatch.setattr(mixed, "gl", work.gl)
    monkeypatch.setattr(mixed, "tiles_of_prompts", mixed.tiles_of_prompts.fn)
    tokens = [1, 2, 4, 32, 3, 33, 0, 64, 65, 1, 1]
    starts = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0)
    lens = torch.tensor([5000, 5000, 5000, 5000, 9, 33, 0, 64, 65, 1, 1], dtype=torch.int32)
    tensors = SimpleNamespace(query_start_loc=Pointer(starts.int()), seq_lens=Pointer(lens))
    given = SimpleNamespace(tensors=tensors, numbers=SimpleNamespace(S=len(tokens)))
    division = tuning.division(mixed.ROWS, 64)._replace(at_once=16 // times, times=times)
    division = division._replace(long=4096, long_rows=16)
    wanted = [(s, tile) for s in (3, 4, 5, 7, 8) for tile in range(-(-tokens[s] // 32))]
    found = []
    for query_tile in range(len(wanted)):
        s, before = mixed.sequence_of.fn(query_tile, given, SimpleNamespace(G=4), division, 32)
        found.append((int(s), query_tile - int(before)))
    assert found == wanted
    tiles = mixed.tiles_of_prompts(torch.arange(16), given, SimpleNamespace(G=4), division, 32)
    assert tiles.sum() == len(wanted)


@pytest.mark.parametrize("name", BATCHES)
def test_each_tile_of_a_decode_has_one_program(name, monkeypatch):
    """Sequences of up to 8 rows, and of up to 16 with many keys, in units of 8."""
    given = BATCHES[name]
    H, K = given.get("heads", (32, 8))
    tokens, lens, G = given["tokens"], given["lens"], H // K
    window = {name: given[name] for name in ("sliding_window",) if name in given}
    of_call, shapes = planned(sum(tokens) + given.get("padding", 0), len(lens), H, K, **window)
    plan = choose.launches_of(mixed, of_call, SMALL, shapes)
    short = [n * G <= (16 if keys > 4096 else 8) for n, keys in zip(tokens, lens, strict=True)]
    wanted = {
        (s, kh, token) for s in range(len(lens)) if short[s] for kh in range(K) for token in range(0, tokens[s], 8 // G)
    }
    check_parts(*parts_by_the_code(plan, tokens, lens, monkeypatch), wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_copy_brings_columns_of_a_block(layout):
    N, B, K, D = 5, 16, 8, 128
    cache = torch.randn(layouts.kv_cache_shape(layout, N, B, K, D)).to(torch.bfloat16)
    paged = layouts.paged_kv(layouts.kv_cache_view(layout, cache))
    of_call, _ = planned(1, 1, layout=layout)
    for cached, side in ((paged.key.squeeze(3), of_call.k_side), (paged.value, of_call.v_side)):
        rows_n, rows_head, columns_head = dense.matrix_of(side, of_call)
        descriptor = mixed.describe_chunks(side, of_call, B, cached)
        assert descriptor.block_shape == [B, 64]
        for block, kh, chunk in [(0, 0, 0), (N - 1, K - 1, 1), (2, 3, 1)]:
            row, column = block * rows_n + kh * rows_head, kh * columns_head + chunk * 64
            assert row + B <= descriptor.shape[0] and column + 64 <= descriptor.shape[1]
            offset = cached.storage_offset() + row * descriptor.strides[0] + column
            brought = descriptor.base.as_strided((B, 64), descriptor.strides, offset)
            assert torch.equal(brought, cached[block, :, kh, chunk * 64 : chunk * 64 + 64])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """All that must not be read is NaN; two calls give the same bits, and so does one without lse."""
    given = {"heads": (32, 8), **BATCHES[name]}
    call, features, wanted = batch(**given)
    shown = {name: given[name] for name in ("D", "B", "dtype", "layout") if name in given}
    assert took(len(call[0]), len(call[3]), *given["heads"], **shown)
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    again = paged_ops.paged_attention_with_lse(*call, **features)
    alone = paged_ops.paged_attention(*call, **features)
    assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    assert torch.equal(out.view(torch.int16), alone.view(torch.int16))
    compare(out, lse, *wanted)


@pytest.mark.gpu
@on_hopper
def test_a_graph_serves_other_lengths():
    """Captured with short lengths; then prompts and decodes change their places, numbers and lengths."""
    batches = [
        {"tokens": [1] * 31 + [700], "lens": [1000 + n for n in range(31)] + [900]},
        {"tokens": [350] + [1] * 30 + [351], "lens": [2000] + [30000] + [5] * 29 + [351]},
        {"tokens": [1, 2] * 15 + [0, 686], "lens": [16 * n + 2 for n in range(30)] + [0, 3000]},
        {"tokens": [0] * 16 + [1] * 16, "lens": [0] * 16 + [40000] + [1] * 15, "padding": 715},
        {"tokens": [22] * 20 + [24] * 11 + [27], "lens": [300] * 32},
    ]
    made = [batch(heads=(32, 8), columns=2600, blocks=6000, **each) for each in batches]
    assert all(took(len(call[0]), len(call[3])) for call, _, _ in made)
    check_replays(made, 1)


def took(T, S, *heads, **given):
    """Whether this kernel serves T tokens in S sequences."""
    of_call, shapes = planned(T, S, *heads, **given)
    return not mixed.serves(of_call, H200) and not isinstance(mixed.plan(of_call, H200, shapes), str)
