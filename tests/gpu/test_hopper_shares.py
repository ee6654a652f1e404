"""The Hopper kernel for several query rows per key/value head (shares.py): which calls it takes; batches against
float64, on a GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import triton

import paged_ops
from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import dense, shares, work, work_shares
from paged_ops.lowerings.gpu.attention.shared import work_split
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.target import Target
from tests.gpu.test_hopper import Pointer, as_torch

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
    "head size 64": {"heads": (128, 2), "tokens": ONE, "lens": LENS, "D": 64, "layout": "HND"},
    "head size 80": {"heads": (71, 1), "tokens": ONE, "lens": LENS, "D": 80},
    "head size 256": {"heads": (64, 1), "tokens": ONE, "lens": LENS, "D": 256},
    "head size 256, 71 heads": {"heads": (71, 1), "tokens": ONE, "lens": LENS, "D": 256},
    "head sizes 192 and 128": {"heads": (128, 1), "tokens": ONE, "lens": LENS, "D": 192, "Dv": 128},
}
H200 = Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 132, 227 << 10)


def planned(H, K, T, S, D=128, **features):
    """The specification and the shapes of a call."""
    kv_cache = layouts.kv_cache_view("NHD", torch.zeros(layouts.kv_cache_shape("NHD", 5, 16, K, D), dtype=torch.half))
    paged, f = layouts.paged_kv(kv_cache), Features(**features)
    query, tables = torch.zeros(T, H, D, dtype=torch.half), torch.zeros(S, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, True)
    return of_call, spec.Shapes(T, S, 5, 2, True, spec.numbers_of(f, None, H, K, 0.1, 2, S, T))


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
    masks = {each: given[each] for each in ("sliding_window", "attention_chunk") if each in given}
    of_call, _ = planned(*given["heads"], T, S, given.get("D", 128), **masks)
    assert shares.tile_rows(of_call, T, S)


def parts_by_the_code(plan, q_lens, lens, monkeypatch):
    """By the code of a kernel whose programs take shares: of each unit (sequence, key/value head, first token) the
    parts, each its first tile, its tiles, and its program; and the tiles of each sequence. What the merge takes for a
    divided unit are its parts."""
    as_torch(monkeypatch)
    work.gl.sum = lambda values, axis=0: values.sum().item()  # *= would change a tensor's other names, too
    for module in (work_split, work_shares):
        for name, given in list(vars(module).items()):
            if isinstance(given, triton.JITFunction):
                monkeypatch.setattr(module, name, given.fn)
        monkeypatch.setattr(module, "tl" if module is work_split else "gl", work.gl)
    first, merge = (launch._launcher._constants for launch in (plan.launches[0], plan.launches[-1]))
    SPEC, DIVISION, TILE, (P, _, _) = first["SPEC"], first["DIVISION"], merge["TILE"], plan.launches[0].grid(None)
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).int()
    tensors = SimpleNamespace(query_start_loc=Pointer(starts), seq_lens=Pointer(torch.tensor(lens, dtype=torch.int32)))
    S, TOKENS = len(lens), TILE.M // SPEC.G
    given = SimpleNamespace(tensors=tensors, numbers=SimpleNamespace(S=S, window=100, chunk=0))
    parts: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for p in range(P):
        left, s, kh, token, tile = work_shares.share_of(torch.tensor(p), P, given, SPEC, DIVISION, TILE)
        while left > 0:
            _, q_len, _, _, _, count, seen = work_shares.part_of(s, token, tile, left, given, SPEC, DIVISION, TILE)
            assert 1 <= seen <= count
            if q_len > 0:
                parts.setdefault((int(s), int(kh), int(token)), []).append((int(tile), int(count), p))
            left = left - count
            s, kh, token, tile = work_shares.part_after(s, kh, token, tile, q_len, left, given, SPEC, DIVISION, TILE)
    _, _, _, first_tiles, end_tiles = work_split.sequence(torch.arange(S), given, SPEC, DIVISION, TILE.N)
    merged: dict[tuple[int, int, int], list[int]] = {}
    for p in range(P):
        start, end, share, longer = work_split.shares(p, P, given, merge["SPEC"], merge["DIVISION"], TILE)
        s, unit, tile = work_split.locate(end - 1, given, merge["SPEC"], merge["DIVISION"], TILE)
        left = end_tiles[s] - first_tiles[s] - 1 - tile
        key = int(s), int(unit) % SPEC.K, int(unit) // SPEC.K * TOKENS
        if start < end and left > 0 and key in parts:
            merged.setdefault(key, []).append(p)
            of_unit = (
                work_split.program_of(end - 1 - tile, share, longer),
                work_split.program_of(end - 1 + left, share, longer),
            )
            assert [each[2] for each in parts[key]] == list(range(of_unit[0], of_unit[1] + 1))
    assert merged == {key: [each[2] for each in own[:-1]] for key, own in parts.items() if len(own) > 1}
    return parts, list(zip(first_tiles.tolist(), end_tiles.tolist(), strict=True))


def check_parts(parts, tiles, wanted):
    """The tiles of each unit follow each other, and there is no other unit."""
    assert parts.keys() == wanted
    for (s, _, _), own in parts.items():
        (first, end), begins = tiles[s], [tile for tile, _, _ in own]
        assert begins == [first, *(tile + count for tile, count, _ in own[:-1])]
        assert own[-1][0] + own[-1][1] == end


SMALL = Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 16, 227 << 10)


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
@pytest.mark.parametrize("masks", [{}, {"causal": False}, {"sliding_window": 100}], ids=str)
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
    assert shares.serves(of_call, H200) == ["ranges"]
    of_call, _ = planned(71, 1, 4, 4, alibi_slopes=torch.zeros(71))
    assert "alibi" in shares.serves(of_call, H200)
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
    ("D", "M", "shape"), [(128, 64, (128, 3, 2)), (128, 128, (64, 5, 2)), (64, 64, (128, 6, 2)), (80, 128, (128, 4, 2))]
)
def test_tiles(D, M, shape):
    """Keys of a tile, tiles of keys and values, tiles of query rows."""
    of_call, _ = planned(71, 1, 4, 4, D)
    chosen = shares.shape_of(of_call, M, 227 << 10)
    assert (chosen.N, chosen.stages, chosen.slots) == shape


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability(GPU) != (9, 0),
    reason="needs an sm_90",
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """All that must not be read is NaN; two calls give the same bits."""
    call, features, wanted = batch(**BATCHES[name])
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    again = paged_ops.paged_attention_with_lse(*call, **features)
    assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    compare(out, lse, *wanted)


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
    first = made[0][0]
    captured = [each.clone() if isinstance(each, torch.Tensor) else each for each in first]
    captured[3].fill_(tokens)
    graph = torch.cuda.CUDAGraph()
    paged_ops.paged_attention_with_lse(*captured)
    torch.cuda.synchronize(GPU)
    with captured_into(graph):
        out, lse = paged_ops.paged_attention_with_lse(*captured)
    for call, _, wanted in made:
        for place, given in zip(captured[:5], call[:5], strict=True):
            place.copy_(given)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(GPU)
        compare(out, lse, *wanted)


def batch(
    heads, tokens, lens, D=128, Dv=None, B=16, layout="NHD", dtype=torch.bfloat16, padding=0, sinks=False, columns=0,
    blocks=0, stored=None, scales=(None, None), **features,
):  # fmt: skip
    """The arguments of a call, and its result in float64: everything that must not be read is NaN. ``stored``: the type
    of an fp8 cache."""
    generator = torch.Generator(device=GPU).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=GPU, generator=generator)

    (H, K), S, T, scale = heads, len(lens), sum(tokens) + padding, D**-0.5
    needed = [-(-n // B) for n in lens]
    N = max(sum(needed) + 3, blocks)
    query = normal(T, H, D).to(dtype)
    kv_cache = layouts.kv_cache_view(layout, normal(*layouts.kv_cache_shape(layout, N, B, K, D)).to(dtype))
    paged = layouts.paged_kv(kv_cache)
    key, value = paged.key.flatten(3), paged.value
    if Dv is not None:
        kv_cache, value = key.contiguous(), value[..., :Dv].contiguous()
        key, features["value_cache"] = kv_cache, value
    ids = torch.randperm(N - 1)[: sum(needed)].split(needed)
    tables = torch.full((S, max(*needed, columns) + 1 if S > 1 else needed[0] + 1), N - 1, dtype=torch.int32)
    read = torch.zeros(N, B, dtype=torch.bool)
    window, chunk = features.get("sliding_window", 0), features.get("attention_chunk", 0)
    for s, own in enumerate(ids):
        tables[s, : needed[s]] = own
        first = lens[s] - tokens[s]
        oldest = max(0, first - window + 1) if window else first // chunk * chunk if chunk else 0
        j = torch.arange(needed[s] * B).view(-1, B)
        read[own] = (j >= oldest) & (j < lens[s])
    unread = ~read.to(GPU)
    key[unread] = torch.nan
    value[unread] = torch.nan
    if stored is not None:
        kv_cache, key, value = (each.to(stored) for each in (kv_cache, key, value))
        if Dv is not None:
            features["value_cache"] = value
        key, value = (each.double() * (factor or 1.0) for each, factor in zip((key, value), scales, strict=True))
        given = zip(("k_scale", "v_scale"), scales, strict=True)
        features |= {name: torch.tensor([factor], device=GPU) for name, factor in given if factor is not None}
    starts = torch.tensor([0, *tokens]).cumsum(0)
    if sinks:
        features["sinks"] = normal(H)
    vectors = (torch.tensor(lens, dtype=torch.int32, device=GPU), starts.to(GPU, torch.int32))
    call = (query, kv_cache, tables.to(GPU), *vectors, scale)
    out = torch.zeros(T, H, value.shape[3], dtype=torch.double, device=GPU)
    lse = torch.full((T, H), -math.inf, dtype=torch.double, device=GPU)
    for s, n in enumerate(lens):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        if tokens[s]:
            own = ids[s].to(GPU)
            keys, values = (each[own].flatten(0, 1)[:n].double().nan_to_num() for each in (key, value))
            out[rows], lse[rows] = in_float64(query[rows].double(), keys, values, scale, features)
    return call, features, (out, lse)


def in_float64(query, keys, values, scale, features):
    """Of ``[t, H, D]``, ``[n, K, D]`` and ``[n, K, Dv]``."""
    (t, H, D), (n, K, _) = query.shape, keys.shape
    logits = torch.einsum("tkgd,jkd->kgtj", query.view(t, K, H // K, D), keys) * scale
    cap, window, chunk = (features.get(name, 0) for name in ("soft_cap", "sliding_window", "attention_chunk"))
    if cap:
        logits = cap * torch.tanh(logits / cap)
    i, j = torch.arange(n - t, n, device=GPU)[:, None], torch.arange(n, device=GPU)
    kept = (j <= i) | (not features.get("causal", True))
    if window:
        kept &= i - j < window
    if chunk:
        kept &= i // chunk == j // chunk
    logits = logits.masked_fill(~kept, -math.inf)
    if "sinks" in features:
        sinks = features["sinks"].double().view(K, H // K, 1, 1).expand(K, H // K, t, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :n]
    out = torch.einsum("kgtj,jkd->tkgd", weights, values)
    return out.reshape(t, H, -1), logits.logsumexp(-1).permute(2, 0, 1).reshape(t, H)


def compare(out, lse, wanted, wanted_lse):
    assert len(out) == len(wanted)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=0)
    largest = wanted.abs().max().item()
    torch.testing.assert_close(out.double(), wanted, atol=0.012 * largest, rtol=0)
