"""The batch-invariant Hopper kernel (hopper/invariant.py): which calls it takes, and its items; on a GPU, batches
against float64, and the bits of the same rows in other batches and caches."""

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import triton

import paged_ops
from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import (
    dense,
    invariant,
    invariant_fp8,
    invariant_items,
    segments,
    work,
)
from paged_ops.lowerings.gpu.attention.triton import invariant as invariant_triton
from tests.gpu.batches import SMALL, batch, compare, on_hopper
from tests.gpu.pointers import Pointer, as_torch
from tests.gpu.step import H200

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def planned(H=32, K=8, T=4, S=4, D=128, B=16, layout="NHD", dtype=BF16, stored=None, offset=0, scale=0.1, **features):
    """The spec and the shapes of a call."""
    shape = layouts.kv_cache_shape(layout, 5, B, K, D)
    kv_cache = layouts.kv_cache_view(layout, torch.zeros(shape, dtype=stored or dtype))
    kv_cache, value = layouts.split_kv_cache(kv_cache, K, D) if layout == "X_PACKED" else (kv_cache, None)
    paged, f = layouts.paged_kv(kv_cache, value), Features(batch_invariant=True, **features)
    query, tables = torch.zeros(T, H, D, dtype=dtype), torch.zeros(S, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, True)
    return of_call, spec.Shapes(T, S, 5, 2, not offset, spec.numbers_of(f, scale, 2, S, T))


def chosen(*args, **features):
    of_call, shapes = planned(*args, **features)
    kernels = tuple(kernel for kernel in choose.kernels_of(H200) if not kernel.serves(of_call, H200))
    return choose.choose(kernels, of_call, H200, shapes)


@pytest.mark.parametrize("T", [4, 16, 77, 4096])
@pytest.mark.parametrize(
    ("D", "dtype", "stored"), [(64, FP16, None), (128, BF16, None), (64, BF16, E4M3), (128, FP16, E5M2)]
)
def test_the_layout_does_not_choose_the_kernel(T, D, dtype, stored):
    """All calls of a kind take one kernel with the same cuts, whatever TMA can address."""
    caches = (
        *({}, {"B": 1}, {"B": 12}, {"B": 1056}, {"layout": "HND"}, {"layout": "HND", "B": 1}),
        *({"offset": 1}, {"layout": "X_PACKED"}),
    )
    choices = [chosen(T=T, D=D, dtype=dtype, stored=stored, **cache) for cache in caches]
    assert {kernel for kernel, _ in choices} == {invariant}
    assert [choice[1] for _, choice in choices] == [2, 1, 1, 2, 2, 1, 0, 0]
    specs = [planned(T=T, D=D, dtype=dtype, stored=stored, **cache)[0] for cache in caches]
    assert len({invariant.segment_of(each) for each in specs}) == 1


@pytest.mark.parametrize(
    "other",
    [
        *({"D": 96}, {"D": 256}, {"dtype": torch.float32}, {"H": 130, "K": 2}),
        *({"dtype": torch.float32, "stored": E4M3}, {"stored": E4M3, "k_scale": torch.ones(8)}),
        *({"sliding_window": 100}, {"soft_cap": 3.0}, {"attention_chunk": 64}, {"scale": 0.0}),
    ],
    ids=str,
)
def test_leaves_to_triton(other):
    assert chosen(**other)[0] is invariant_triton


@pytest.mark.parametrize("M", [64, 128])
@pytest.mark.parametrize("D", [64, 128])
def test_tiles_of_bytes_fit_shared_memory(D, M):
    """Query rows, tiles that are multiplied, and tiles of bytes, of which two are loaded while others are converted."""
    of_call, _ = planned(D=D, stored=E4M3)
    shape, of_bytes = invariant_fp8.shapes_of(of_call, M, 227 << 10)
    assert shape.N == of_bytes.N == 128 and shape.M == M and shape.slots == shape.row_slots
    assert min(shape.stages, of_bytes.stages) >= 2
    used = 2 * (shape.slots * M * D + shape.stages * shape.N * 2 * D) + of_bytes.stages * shape.N * 2 * D
    assert used + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, ["decode", "states"]),
        ({"T": 20}, ["decode", "states"]),
        ({"T": 201}, ["decode", "fp8", "states"]),
        ({"S": 1, "T": 1}, ["decode", "states"]),
        ({"S": 10, "T": 20}, ["decode", "states"]),
        ({"S": 1, "T": 5}, ["fp8", "states"]),  # of 32 rows
        ({"S": 10, "T": 100}, ["fp8", "states"]),  # a few decodes next to prompts
        ({"T": 160}, ["fp8", "states"]),  # of 32 rows
        ({"B": 12}, ["decode", "states"]),
        ({"layout": "X_PACKED"}, ["decode", "states"]),
        ({"stored": None}, ["items", "states"]),
        ({"stored": None, "T": 20}, ["few", "states"]),
        ({"stored": None, "T": 1, "S": 1, "H": 64, "K": 4, "dtype": FP16}, ["few", "states"]),
        ({"stored": None, "T": 20, "H": 34, "K": 2}, ["items", "states"]),  # of 17 rows
        ({"stored": None, "T": 20, "B": 12}, ["items", "states"]),  # no TMA
        ({"stored": None, "T": 201}, ["items", "states"]),  # next to prompts
    ],
    ids=str,
)
def test_kernels_of_decodes(changes, kernels):
    of_call, shapes = planned(**{"T": 40, "S": 20, "stored": E4M3, **changes})
    launches = choose.launches_of(invariant, of_call, H200, shapes).launches
    assert [launch.kernel[0] for launch in launches] == [f"invariant_{name}_kernel" for name in kernels]


def items_by_the_code(heads, tokens, lens, monkeypatch, D=128, most=None, light=0, decodes=False):
    """Of each item its key/value head, sequence, first token, tiles of keys and place; and the launch's constants.
    ``light``: programs that first take short sequences. ``decodes``: the decoders' items."""
    of_call, shapes = planned(*heads, sum(tokens), len(lens), D)
    plan = choose.launches_of(invariant, of_call, SMALL, shapes)
    constants = plan.launches[0]._launcher._constants
    SPEC, SHAPE, PLAN = constants["SPEC"], constants["SHAPE"], constants["PLAN"]
    assert plan.launches[1]._launcher._constants["PLAN"] == constants["PLAN"]
    if most is not None:
        PLAN = PLAN._replace(cuts=PLAN.cuts._replace(states=most))
    as_torch(monkeypatch)
    monkeypatch.setattr(segments, "tl", work.gl)
    for module in (segments, invariant_items):
        for name, given in list(vars(module).items()):
            if isinstance(given, triton.JITFunction):
                monkeypatch.setattr(module, name, given.fn)
    for name in ("item_at", "segments_of"):
        monkeypatch.setattr(invariant_items, name, {**vars(work), **vars(segments)}[name])
    monkeypatch.setattr(invariant_items, "gl", work.gl)
    starts = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0).int()
    tensors = SimpleNamespace(
        query_start_loc=Pointer(starts),
        seq_lens=Pointer(torch.tensor(lens, dtype=torch.int32)),
        bidirectional_ranges=None,
        taken=None,
        arrived=None,
    )
    given = SimpleNamespace(tensors=tensors, numbers=SimpleNamespace(S=len(lens), window=0, chunk=0))
    if decodes:
        full, last, _, states = invariant_items.total_items(True, given, True, SPEC, PLAN, SHAPE)
        fits = states * SPEC.K <= PLAN.cuts.states
        work_ = invariant_items.Items(fits, full + last, full, last, 0, SMALL.processors, None)
        units = range(int((full + last) * SPEC.K * fits))
        items = [invariant_items.item_of(torch.tensor(at), work_, given, True, SPEC, PLAN, SHAPE) for at in units]
        return items, SPEC, SHAPE, PLAN.cuts
    taken: list[Any] = []
    monkeypatch.setattr(invariant_items, "take_in_time", lambda work, *_: taken.append(work))
    monkeypatch.setattr(invariant_items.gl, "num_programs", lambda axis: SMALL.processors, raising=False)
    monkeypatch.setattr(invariant_items, "ANY_LENGTH", invariant_items.ANY_LENGTH.value)
    monkeypatch.setattr(invariant_items, "light_programs", lambda *_: torch.tensor(light))
    invariant_items.scheduler(given, None, None, SPEC, PLAN, SHAPE)
    (of_items,) = taken
    items = [
        invariant_items.item_of(torch.tensor(at), of_items, given, False, SPEC, PLAN, SHAPE)
        for at in range(int(of_items.tiles) * SPEC.K)
    ]
    return items, SPEC, SHAPE, PLAN.cuts


@pytest.mark.parametrize("most", [None, 0], ids=["segments", "no segments"])
@pytest.mark.parametrize(
    ("heads", "tokens", "lens"),
    [
        ((32, 8), [1] * 5, [9000, 1, 4096, 4097, 0]),
        ((8, 1), [1, 0, 1], [70_000, 9, 300]),
        ((16, 16), [4, 4], [2050, 5000]),
        ((32, 8), [1, 300, 1, 17], [5000, 4000, 70, 3000]),
        ((64, 1), [1, 2, 1], [3000, 200_000, 5]),
        ((8, 1), [3], [131_074]),  # segments of its rows have two lengths
    ],
)
def test_each_tile_of_each_row_is_in_one_item(heads, tokens, lens, most, monkeypatch):
    """A whole tile of rows, or one segment; with a place of its own in the workspace."""
    items, SPEC, SHAPE, CUTS = items_by_the_code(heads, tokens, lens, monkeypatch, most=most)
    G, N, places = SPEC.G, SHAPE.N, []
    covered = {}
    for item in items:
        kh, s, first_token, count, end, place = (
            int(each) for each in (item.kh, item.s, item.first_token, item.tiles, item.end_tile, item.oldest)
        )
        assert 0 < count <= end
        covered.setdefault((kh, s, first_token, place >= 0), []).extend(range(end - count, end))
        if place >= 0:
            assert most is None and tokens[s] * G <= CUTS.rows
            places.append(place)
            tile = int(segments.segment_tiles(torch.tensor(lens[s] - 1), CUTS))
            assert (end - count) % tile == 0 and (end % tile == 0 or end == -(-lens[s] // N))
    assert sorted(places) == sorted({*places}) and all(place < CUTS.states for place in places)
    wanted = {
        (kh, s, first) for kh in range(SPEC.K) for s, n in enumerate(tokens) for first in range(0, n, SHAPE.M // G)
    }
    assert {key[:3] for key in covered} == wanted and len(covered) == len(wanted)
    for (_, s, first, _), tiles in covered.items():
        last = lens[s] - tokens[s] + min(first + SHAPE.M // G, tokens[s]) - 1
        assert sorted(tiles) == list(range(max(last // N + 1, 1)))
    assert bool(places) == (most is None and tokens != [3])


@pytest.mark.parametrize("most", [None, 0], ids=["segments", "no segments"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 16)])
def test_decoders_have_the_segments_of_sequences_with_few_rows(heads, most, monkeypatch):
    """With their places among all states; consumers have the others, and all if the workspace holds no states."""
    G, dice = heads[0] // heads[1], random.Random(0)
    tokens = [*([1] * 20), 2, 8 // G, 8 // G + 1, 16, 9000, 1]
    dice.shuffle(tokens)
    lens = [dice.randint(q, 20_000) for q in tokens]
    lens[tokens.index(1)] = 0
    with monkeypatch.context() as patched:
        items, SPEC, SHAPE, CUTS = items_by_the_code(heads, tokens, lens, patched, most=most, decodes=True)
    with monkeypatch.context() as patched:
        others, *_ = items_by_the_code(heads, tokens, lens, patched, most=most)
    few = {s for s, q in enumerate(tokens) if q * G <= 8}
    assert {int(each.s) for each in others} == {*range(len(tokens))} - (few if most is None else set())
    assert {int(each.s) for each in items} == (few if most is None else set())
    places = [int(each.oldest) for each in (*items, *others) if each.oldest >= 0]
    assert len(places) == len({*places}) and all(place < CUTS.states for place in places)
    counts = [
        -(-n // (CUTS.tiles * SHAPE.N)) or 1 if q * G <= CUTS.rows else 0 for q, n in zip(tokens, lens, strict=True)
    ]
    for each in items:
        s, segment = int(each.s), int(each.end_tile - each.tiles) // CUTS.tiles
        assert int(each.oldest) == (sum(counts[:s]) + segment) * SPEC.K + int(each.kh)
        assert int(each.end_tile) == min((segment + 1) * CUTS.tiles, max(-(-lens[s] // SHAPE.N), 1))
    if most is None:
        found = sorted((int(each.s), int(each.kh), int(each.end_tile)) for each in items)
        assert len({*found}) == len(found) == sum(counts[s] for s in few) * SPEC.K


def test_batches_of_prompts_and_decodes_have_decoders():
    """If TMA can address the cache, and few query heads share keys."""
    for heads, T, S, cache, has in (
        *[((32, 8), T, 64, {}, T > 400) for T in (64, 400, 2111)],
        *[((32, 8), 2111, S, {}, 16 <= S <= 256) for S in (1, 15, 16, 256, 300)],
        ((32, 8), 2111, 64, {"B": 12}, False),
        ((32, 2), 9000, 64, {}, False),
        ((8, 1), 9000, 64, {}, True),
    ):
        kernel, choice = chosen(*heads, T, S, **cache)
        assert kernel is invariant and choice[-1] == has, (heads, T, S, cache)


@pytest.mark.parametrize("light", [3, -3])
@pytest.mark.parametrize("prompt_first", [True, False])
def test_short_sequences_are_at_the_front_of_the_items_and_prompts_at_the_back(light, prompt_first, monkeypatch):
    """Both from the longest on, wherever they are in the batch."""
    tokens, lens = ([300, 1, 1, 1], [5000, 100, 9000, 7000])
    if not prompt_first:
        tokens, lens = tokens[::-1], lens[::-1]
    items, SPEC, SHAPE, CUTS = items_by_the_code((32, 8), tokens, lens, monkeypatch, light=light)
    first = items[:: SPEC.K]  # of one head
    segments = [int(each.tiles) for each in first if int(each.q_len) == 1]
    last = -(-(7000 - CUTS.tiles * SHAPE.N) // SHAPE.N)  # more than half a segment
    assert len(segments) == 1 + 3 + 2 and sorted(segments[:4]) == [last, *[CUTS.tiles] * 3]
    assert max(segments[4:]) < CUTS.tiles // 2 < last
    assert all(int(each.q_len) == 1 for each in first[: len(segments)])
    of_prompt = [int(each.first_token) for each in first[len(segments) :]]
    assert of_prompt == list(range(0, 300, SHAPE.M // SPEC.G))


@pytest.mark.parametrize("tokens", [[3000], [1, 3000]])
def test_prompts_come_first_if_no_program_is_for_short_sequences(tokens, monkeypatch):
    items, *_ = items_by_the_code((32, 8), tokens, [3000] * len(tokens), monkeypatch)
    tiles = [int(each.tiles) for each in items if int(each.q_len) > 1]
    assert tiles == sorted(tiles, reverse=True) and int(items[0].q_len) == 3000


BATCHES = {
    "decodes": {"heads": (32, 8), "tokens": [1] * 6, "lens": [9000, 1, 0, 128, 4097, 700]},
    "many of no, one or three tokens": {"heads": (32, 8), "tokens": [1, 3, 0, 0] * 5, "lens": [5000, 4100, 7, 9] * 5},
    "no or one token": {"heads": (8, 1), "tokens": [1, 0, 1, 0], "lens": [5000, 4100, 7, 0], "padding": 2},
    "three tokens whose segments have two lengths": {"heads": (8, 1), "tokens": [3, 0, 0], "lens": [131_074, 5, 9]},
    "16 query heads, head size 64, float16, not causal": {
        "heads": (16, 1),
        "tokens": [1, 1, 0, 2],
        "lens": [3000, 1, 70, 2050],
        "D": 64,
        "dtype": FP16,
        "causal": False,
    },
    "14 query heads": {"heads": (28, 2), "tokens": [1] * 3, "lens": [2047, 129, 1100], "layout": "HND", "B": 8},
    "one head, long": {"heads": (8, 1), "tokens": [1, 1], "lens": [140_000, 3], "B": 64},
    "chunks": {"heads": (32, 8), "tokens": [1, 300, 130, 17], "lens": [5000, 4000, 130, 3000], "padding": 5},
    "16 tokens": {"heads": (32, 8), "tokens": [16] * 3, "lens": [4100, 16, 9000]},
    "more rows than keys": {"heads": (8, 2), "tokens": [40, 7], "lens": [9, 7]},
    "not causal": {"heads": (16, 4), "tokens": [16, 70], "lens": [5000, 700], "causal": False},
    "head size 64, float16": {"heads": (32, 4), "tokens": [1, 200], "lens": [4500, 3000], "D": 64, "dtype": FP16},
    "block 1": {"heads": (32, 8), "tokens": [1, 200], "lens": [5000, 2500], "B": 1},
    "block 12, head-major": {"heads": (32, 8), "tokens": [1, 200], "lens": [5000, 2500], "B": 12, "layout": "HND"},
    "packed": {
        "heads": (16, 2),
        "tokens": [1, 200],
        "lens": [5000, 2500],
        "D": 64,
        "dtype": FP16,
        "layout": "X_PACKED",
    },
    "e4m3, decodes": {
        "heads": (32, 8),
        "tokens": [1] * 6,
        "lens": [9000, 1, 0, 128, 4097, 700],
        "stored": E4M3,
        "scales": (0.6, 1.7),
    },
    "e4m3, many decodes": {
        "heads": (32, 8),
        "tokens": [1] * 20,
        "lens": [9000, 1, 0, 128, 4097, 700, 5000, 4096, 127, 2] * 2,
        "stored": E4M3,
        "scales": (0.6, 1.7),
    },
    "e5m2, float16, head size 64, many of no, one or three tokens": {
        "heads": (32, 8),
        "tokens": [1, 3, 0, 0] * 5,
        "lens": [5000, 4100, 7, 9, 30] * 4,
        "D": 64,
        "dtype": FP16,
        "stored": E5M2,
        "causal": False,
    },
    "e4m3, many of two tokens and a prompt": {
        "heads": (16, 8),
        "tokens": [2] * 20 + [300],
        "lens": [5000, 4100, 2, 9, 30] * 4 + [900],
        "stored": E4M3,
        "padding": 3,
    },
    "e5m2, chunks": {
        "heads": (32, 8),
        "tokens": [1, 300, 130, 17],
        "lens": [5000, 4000, 130, 3000],
        "stored": E5M2,
        "padding": 5,
    },
    "e4m3, float16, head size 64, not causal": {
        "heads": (32, 4),
        "tokens": [1, 200],
        "lens": [4500, 3000],
        "D": 64,
        "dtype": FP16,
        "stored": E4M3,
        "causal": False,
        "scales": (None, 0.3),
    },
    "e4m3, one head, long": {"heads": (8, 1), "tokens": [1, 1], "lens": [140_000, 3], "B": 64, "stored": E4M3},
    "e5m2, one decode": {
        "heads": (16, 1),
        "tokens": [1],
        "lens": [5001],
        "B": 12,
        "stored": E5M2,
        "scales": (0.6, 1.7),
    },
    "e4m3, packed, decodes": {
        "heads": (16, 2),
        "tokens": [1] * 3,
        "lens": [5000, 2500, 3],
        "layout": "X_PACKED",
        "stored": E4M3,
    },
    "e4m3, block 1": {"heads": (32, 8), "tokens": [1, 200], "lens": [5000, 2500], "B": 1, "stored": E4M3},
    "e5m2, packed": {
        "heads": (16, 2),
        "tokens": [1, 200],
        "lens": [5000, 2500],
        "D": 64,
        "layout": "X_PACKED",
        "stored": E5M2,
        "scales": (0.6, None),
    },
}


DECODES = {"tokens": [*([1] * 16), 2, 3, 700], "lens": [0, 1, 127, 128, 129, *range(700, 9500, 800), 4097, 70, 3000]}
BATCHES |= {
    "decodes beside a prompt": {"heads": (32, 8), **DECODES, "padding": 5},
    "two tokens beside a prompt, not causal": {
        "heads": (16, 4), "tokens": [2] * 16 + [1500], "lens": [900] * 16 + [2000], "causal": False,
    },
    "decodes beside a prompt, head size 64, float16, head-major": {
        "heads": (28, 4), "tokens": [*DECODES["tokens"][:-1], 1500], "lens": DECODES["lens"], "D": 64, "dtype": FP16,
        "layout": "HND", "B": 64,
    },
}  # fmt: skip


GROWING = {"heads": (32, 8), **DECODES, "slope": 0.06}
BATCHES |= {
    "scores that grow by more than maxima in use may": GROWING,
    "the same, float16, faster": {**GROWING, "dtype": FP16, "slope": 0.13},
    "the same, float16, e5m2": {**GROWING, "dtype": FP16, "stored": E5M2, "slope": 0.01},
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    given = dict(BATCHES[name])
    layout = given.get("layout")
    if layout == "X_PACKED":
        given["layout"] = "NHD"
    call, features, wanted = batch(**given)
    if layout == "X_PACKED":
        paged = layouts.paged_kv(call[1])
        key, value = packed(paged.key.flatten(3), paged.value)
        call, features = (call[0], key, *call[2:]), {**features, "value_cache": value}
    out, lse = paged_ops.paged_attention_with_lse(*call, **features, batch_invariant=True)
    compare(out, lse, *wanted)
    same = paged_ops.paged_attention(*call, **features, batch_invariant=True)  # compiled without lse
    assert torch.equal(bits(out), bits(same))


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def packed(key, value):
    """``[N, B, K, D]`` as keys ``[N, K, D/x, B, x]`` in pieces of 16 bytes, and values ``[N, K, D, B]``."""
    x = 16 // key.element_size()
    return key.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(), value.permute(0, 2, 3, 1).contiguous()


# Block size, elements before the first, heads first.
CACHES = [(16, 0, False), (64, 0, True), (1, 0, False), (12, 0, True), (16, 1, False)]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize(
    ("heads", "D", "dtype", "stored"),
    [
        ((32, 8), 128, BF16, None),
        ((8, 1), 128, FP16, None),
        ((16, 16), 64, BF16, None),
        ((32, 8), 128, BF16, E4M3),
        ((8, 1), 128, FP16, E4M3),
        ((16, 2), 64, BF16, E5M2),
    ],
    ids=str,
)
def test_rows_have_the_same_bits_in_any_batch_and_cache(heads, D, dtype, stored, cache):
    """Also captured, with other lengths when it is replayed."""
    (H, K), n, dice = heads, 9000, random.Random(0)
    torch.manual_seed(0)
    key, value = torch.randn(n, K, D, device=GPU), torch.randn(n, K, D, device=GPU).to(stored or dtype)
    # Large queries, and keys that grow towards the first: maxima in use change in other tiles for each row of a warp.
    query = (torch.randn(n, H, D, device=GPU) * torch.exp2(torch.randint(-3, 5, (n, H, 1), device=GPU))).to(dtype)
    key[:, :, 0] += torch.linspace(40, 0, n, device=GPU)[:, None]
    key = key.to(stored or dtype)
    features: dict[str, Any] = {"batch_invariant": True}
    if stored:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
        features |= {name: torch.tensor([0.6], device=GPU) for name in ("k_scale", "v_scale")}

    def attend(parts, cache, capture=False):
        B, offset, heads_first = cache
        of = [-(-end // B) for _, end in parts]
        N = sum(of) + 2
        nothing = 0x7F if stored else torch.nan
        memory = torch.full((N * 2 * B * K * D + offset,), nothing, dtype=key.dtype, device=GPU)[offset:]
        shape = (N, 2, K, B, D) if heads_first else (N, 2, B, K, D)
        kv_cache = memory.view(shape).transpose(2, 3) if heads_first else memory.view(shape)
        ids, tables = dice.sample(range(N), N), torch.zeros(len(parts), max(of), dtype=torch.int32)
        for s, (_, end) in enumerate(parts):
            own = torch.tensor([ids.pop() for _ in range(of[s])])
            tables[s, : of[s]] = own
            at = own.to(GPU).repeat_interleave(B)[:end], torch.arange(end, device=GPU) % B
            kv_cache[at[0], 0, at[1]], kv_cache[at[0], 1, at[1]] = key[:end], value[:end]
        starts = torch.tensor([0, *(end - first for first, end in parts)]).cumsum(0)
        lens = torch.tensor([end for _, end in parts], dtype=torch.int32, device=GPU)
        rows = torch.cat([query[first:end] for first, end in parts])
        kv_cache = kv_cache.view(stored or dtype)
        call = rows, kv_cache, tables.to(GPU), lens, starts.to(GPU, torch.int32), D**-0.5
        results = paged_ops.paged_attention_with_lse(*call, **features)
        if capture:
            graph, given = torch.cuda.CUDAGraph(), lens.clone()
            lens.fill_(1)
            torch.cuda.synchronize(GPU)
            with captured_into(graph):
                results = paged_ops.paged_attention_with_lse(*call, **features)
            lens.copy_(given)
            for each in results:
                each.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize(GPU)
        return [[bits(each[a:b]) for each in results] for a, b in itertools.pairwise(starts)]

    ((out, lse),) = attend([(0, n)], CACHES[0])
    rows = sorted({0, 1023, 4095, 4096, n - 1, *dice.sample(range(n), 8)})
    cuts = sorted({0, n, *dice.sample(range(n), 4)})
    chunks = list(itertools.pairwise(cuts))
    many = [(i, i + 1) for i in rows] * (H200.processors // (K * len(rows)) + 1)  # so that items fill all processors
    of_few = many, [(i, i + 1) for i in rows], [(max(i - 3, 0), i + 1) for i in rows], [(n - 1, n)]
    more = dice.sample(range(n), 20)  # decoders compute their segments beside the prompt
    beside = [*((i, i + 1) for i in more), *((max(i - 1, 0), i + 1) for i in rows), (n // 2, n), (70, 73), (0, 1)]
    for parts in (*of_few, chunks, beside):
        alone = cache != CACHES[0] or parts is chunks or parts is beside
        together = parts if alone else [*parts, *chunks[:1]]
        for which in {tuple(parts), tuple(together)}:
            found = attend(list(which), cache, capture=len(which) in (len(rows), len(beside)))
            for (first, end), (out_, lse_) in zip(which, found, strict=True):
                assert torch.equal(out_, out[first:end]) and torch.equal(lse_, lse[first:end]), (first, end)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("stored", [None, E4M3])
def test_a_workspace_without_place_for_states_changes_no_bit(stored, monkeypatch):
    """Then no segment is an item."""
    for tokens in ([1] * 20, [1] * 20 + [70], [1, 3, 0, 0] * 5):
        lens = [5000, 4100, 3, 9000] * 5 + [4200] * (len(tokens) - 20)
        call, features, _ = batch((32, 8), tokens, lens, stored=stored)
        with monkeypatch.context() as patched:
            attention.forget()
            usual = paged_ops.paged_attention_with_lse(*call, **features, batch_invariant=True)
            patched.setattr(invariant, "WORKSPACE", 1 << 13)
            attention.forget()
            found = paged_ops.paged_attention_with_lse(*call, **features, batch_invariant=True)
        attention.forget()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(usual, found, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [[1, 1], [1, 300]], ids=str)
def test_calls_with_and_without_scales_after_each_other(tokens):
    for scales in ((0.6, 1.7), (None, None), (None, 0.3), (0.6, None), (0.6, 1.7)):
        call, features, wanted = batch((32, 8), tokens, [9000, 5000], stored=E4M3, scales=scales)
        compare(*paged_ops.paged_attention_with_lse(*call, **features, batch_invariant=True), *wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [(8, 1), (32, 8)])
def test_calls_without_a_pause_end_and_have_the_bits_of_one_alone(heads):
    """Programs of the next kernel start while those of the one before run: none may wait for ever."""
    call, features, _ = batch(heads, [1] * 8, [8192, 5000, 1, 4097, 700, 8192, 3000, 0])
    ends = torch.cuda.Event()
    for op in (paged_ops.paged_attention, paged_ops.paged_attention_with_lse):
        alone = op(*call, **features, batch_invariant=True)
        torch.cuda.synchronize(GPU)
        found = [op(*call, **features, batch_invariant=True) for _ in range(300)]
        ends.record()
        deadline = time.monotonic() + 20
        while not ends.query():
            assert time.monotonic() < deadline, "the calls do not end"
        for each in found:
            pairs = zip(each, alone, strict=True) if isinstance(each, tuple) else [(each, alone)]
            assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)
