"""The Hopper kernel over fp8 caches (fp8.py): which calls it takes, where its copies read, how bytes lie in
shared memory; batches against float64, on a GPU."""

import dataclasses

import pytest
import torch

from tests.gpu.batches import batch, check_replays, compare, on_hopper
from tests.gpu.step import H200
from tests.helpers.gpu import GPU

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec, target
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import dense, fp8, head_chunks
from paged_ops.lowerings.gpu.attention.triton import decode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N = 5
MIXED = {"tokens": [300, 1, 129, 0, 70, 3, 260, 64], "lens": [1000, 900, 129, 5, 2000, 40, 261, 64]}
BATCHES = {
    "mixed": {"heads": (32, 8), **MIXED, "scales": (0.6, 1.7)},
    "mixed, e5m2": {"heads": (32, 8), **MIXED, "stored": E5M2, "padding": 3},
    "float16, scale of values": {"heads": (32, 8), **MIXED, "dtype": torch.half, "scales": (None, 0.3), "B": 64},
    "float16, e5m2, heads of 64": {
        "heads": (16, 8), **MIXED, "dtype": torch.half, "stored": E5M2, "D": 64, "B": 8, "layout": "HND",
    },
    "heads of 64, window, sinks": {
        "heads": (16, 2), **MIXED, "D": 64, "B": 48, "sliding_window": 100, "sinks": True, "scales": (0.6, 1.7),
    },
    "values of 64, not causal": {"heads": (12, 3), **MIXED, "Dv": 64, "causal": False},
    "chunk, cap": {"heads": (32, 8), **MIXED, "attention_chunk": 200, "soft_cap": 5.0, "scales": (0.6, None)},
    "71 heads": {"heads": (71, 1), "tokens": [200, 1, 5], "lens": [333, 9, 700], "B": 128},
    "many": {
        "heads": (8, 8), "tokens": [17, 40, 1] * 100, "lens": [40 + 37 * k % 300 for k in range(300)], "D": 64,
    },
    "heads of 256": {"heads": (16, 4), **MIXED, "D": 256, "scales": (0.6, 1.7)},
    "heads of 256, float16, e5m2, window, sinks": {
        "heads": (16, 2), **MIXED, "D": 256, "dtype": torch.half, "stored": E5M2, "B": 8, "layout": "HND",
        "sliding_window": 100, "sinks": True,
    },
    "heads of 256, e5m2, chunk, cap": {
        "heads": (8, 1), **MIXED, "D": 256, "stored": E5M2, "B": 48, "attention_chunk": 200, "soft_cap": 5.0,
        "scales": (0.6, 1.7),
    },
    "heads of 256, not causal": {"heads": (12, 4), **MIXED, "D": 256, "causal": False, "padding": 3, "B": 64},
    "heads of 256, chunks": {
        "heads": (32, 8), "tokens": [1024] * 4, "lens": [1024, 2048, 3000, 4096], "D": 256, "scales": (None, 0.3),
    },
    "heads of 256, many": {
        "heads": (8, 8), "tokens": [17, 40, 1] * 100, "lens": [40 + 37 * k % 300 for k in range(300)], "D": 256,
    },
}  # fmt: skip


def split_cache(layout: str, B: int, K: int, D: int, stored: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """``key [N, B, K, 1, D]`` and ``value [N, B, K, D]`` of a cache of bytes."""
    shape = layouts.kv_cache_shape(layout, N, B, K, D)
    numbers = torch.arange(N * 2 * B * K * D).mul(40503).bitwise_right_shift(7).to(torch.uint8)
    paged = layouts.paged_kv(layouts.kv_cache_view(layout, numbers.view(shape).view(stored)))
    return paged.key, paged.value


def spec_of(key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype = torch.bfloat16, **features) -> spec.Spec:
    query, tables = torch.zeros(64, 8, key.shape[3] * key.shape[4], dtype=dtype), torch.zeros(4, 2, dtype=torch.int32)
    return spec.spec_of(query, key, value, 0, tables, None, Features(**features), dtype, True)


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("layout", "B", "K", "D"),
    [
        ("NHD", 16, 2, 128),
        ("NHD", 8, 1, 64),
        ("HND", 8, 4, 128),
        ("HND", 48, 1, 64),
        ("NHD", 256, 8, 64),
        ("NHD", 16, 2, 256),
        ("HND", 128, 1, 256),
    ],
)
def test_copies_read_the_bytes(layout, B, K, D, stored):
    key, value = split_cache(layout, B, K, D, stored)
    of_call = spec_of(key, value)
    assert not fp8.serves(of_call, H200) and dense.serves(of_call, H200)
    pairs = fp8.in_pairs(of_call)
    shape, of_bytes = fp8.shapes_of(pairs, 227 << 10)
    page, described = shape.page, fp8.descriptors(pairs, shape.page)
    assert [name for name, _ in described] == ["key_cache", "value_cache"]
    for cache, (_, describe), matrix, parts in (
        (key.squeeze(3), described[0], of_bytes.k.matrix, of_bytes.k.parts),
        (value, described[1], of_bytes.v.matrix, of_bytes.v.parts),
    ):
        descriptor = describe(cache)
        assert parts == (D // 2,)
        for block, j, kh in [(0, 0, 0), (N - 1, B - page, K - 1), (2, 0, K - 1)]:
            row, rest = divmod(block * matrix.rows_n + kh * matrix.rows_head + j, 8)
            column = kh * matrix.columns_head
            assert rest == 0 and row + page // 8 <= descriptor.shape[0] and column + D // 2 <= descriptor.shape[3]
            offset = cache.storage_offset() // 2 + row * descriptor.strides[0] + column
            copied = descriptor.base.as_strided(descriptor.block_shape, descriptor.strides, offset)
            copied = copied.permute(0, 2, 1, 3).reshape(page, D // 2).view(torch.uint8)
            assert torch.equal(copied, cache[block, j : j + page, kh].view(torch.uint8))


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_words_lie_as_their_halves(size):
    words = fp8.words_layout(64, size).offset_bases
    halves = head_chunks.tile_layout(64, size).offset_bases
    assert len(halves) == len(words) + 1 == (64 * size).bit_length() - 1 and halves[0] == [0, 1]
    assert [[row, 2 * column] for row, column in words] == halves[1:]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize(
    ("D", "Dv", "stages"), [(128, 128, (1, 2, 2)), (64, 64, (2, 4, 4)), (128, 64, (2, 2, 2)), (256, 256, (1, 2, 1))]
)
def test_tiles_fit_shared_memory(D, Dv, stages, dtype):
    """Tiles of query rows, tiles that are multiplied, and tiles of bytes."""
    key, value = torch.zeros(N, 16, 2, 1, D).to(E4M3), torch.zeros(N, 16, 2, Dv).to(E4M3)
    shape, of_bytes = fp8.shapes_of(fp8.in_pairs(spec_of(key, value, dtype)), 227 << 10)
    assert shape.N == (64 if D == 256 else 128) and (shape.slots, shape.stages, of_bytes.stages) == stages
    used = 2 * (shape.slots * shape.M * D + shape.stages * shape.N * (D + Dv)) + of_bytes.stages * shape.N * (D + Dv)
    assert used + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stored": torch.bfloat16}, "cache_dtype: expected float8"),
        ({"D": 96}, "head_size"),
        ({"B": 12}, "kv_cache: expected keys that TMA can address"),
        ({"k_scale": torch.ones(2)}, "k_scale: expected one"),
        ({"v_scale": torch.ones(2)}, "v_scale: expected one"),
        ({"alibi_slopes": torch.ones(8)}, "alibi"),
        ({"dtype": torch.float32}, "kv_cache: expected an even number"),
    ],
    ids=str,
)
def test_leaves_to_others(changes, reason):
    sizes = {"layout": "NHD", "B": 16, "K": 2, "D": 128, "stored": E4M3}
    features = {name: each for name, each in changes.items() if name not in sizes}
    cache = {name: changes.get(name, each) for name, each in sizes.items()}
    stored = cache.pop("stored")
    key, value = (each.to(stored) for each in split_cache(**cache))
    assert any(each.startswith(reason) for each in fp8.serves(spec_of(key, value, **features), H200))


@pytest.mark.parametrize(("D", "Dv"), [(256, 128), (64, 256)])
def test_leaves_heads_of_256_on_one_side_to_others(D, Dv):
    key, value = torch.zeros(N, 16, 2, 1, D).to(E4M3), torch.zeros(N, 16, 2, Dv).to(E4M3)
    assert fp8.serves(spec_of(key, value), H200) == ["value_head_size: expected heads of 256 for both keys and values"]


@pytest.mark.parametrize(
    ("T", "S", "taken"), [(8192, 1, True), (1001, 8, True), (16, 8, False), (8, 8, False), (2, 8, False)]
)
def test_batches_that_it_takes(T, S, taken):
    """Decode and speculation of equal lengths are decode.py's."""
    of_call = spec_of(*split_cache("NHD", 16, 2, 128), k_scale=torch.ones(1), v_scale=torch.ones(1))
    numbers = spec.numbers_of(Features(), 0.1, 2, S, T)
    plan = fp8.plan(of_call, H200, spec.Shapes(T, S, N, 2, True, numbers))
    assert isinstance(plan, str) != taken
    kernels = choose.kernels_of(H200)
    assert kernels.index(fp8) < kernels.index(decode)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [64, 128, 256])
def test_long_prompts(D):
    """Many calls have the same bits, and are as exact as float16 weights; also after the Triton kernel's calls."""
    call, _, wanted = batch((16, 4), [2048], [8192], D, stored=E4M3)
    shifted = *call[:5], -call[5]  # a negative scale: prefill.py
    paged_ops.paged_attention_with_lse(*shifted)
    out, lse = paged_ops.paged_attention_with_lse(*call)
    for _ in range(20):
        again = paged_ops.paged_attention_with_lse(*call)
        assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    assert (out.double() - wanted[0]).norm() <= 3e-3 * wanted[0].norm()
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-4, rtol=0)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name, monkeypatch):
    """All that must not be read is NaN; two calls give the same bits."""
    plans = noted_plans(monkeypatch)
    call, features, wanted = batch(**{"stored": E4M3, **BATCHES[name]})
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    again = paged_ops.paged_attention_with_lse(*call, **features)
    assert len(plans) == 1 and not isinstance(plans[0], str)
    assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    compare(out, lse, *wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("D", [128, 256])
def test_every_number(D, stored, dtype, monkeypatch):
    """Each query sees one key, whose value has each byte once; NaN stays NaN, and so do infinities beside others."""
    plans = noted_plans(monkeypatch)
    every = torch.arange(256, device=GPU).to(torch.uint8).repeat(D // 128)
    value = every.view(1, 1, 2, D).expand(20, 16, 2, D).contiguous().view(stored)
    key = torch.zeros_like(value.view(torch.uint8)).view(stored)
    query = torch.zeros(320, 8, D, dtype=dtype, device=GPU)
    tables = torch.arange(20, dtype=torch.int32, device=GPU)[None]
    lens, starts = (torch.tensor(each, dtype=torch.int32, device=GPU) for each in ([320], [0, 320]))
    out = paged_ops.paged_attention(query, key, tables, lens, starts, 1.0, value_cache=value, sliding_window=1)
    wanted = every.view(stored).to(dtype)
    wanted[wanted.isinf()] = torch.nan
    wanted = wanted.view(2, 1, D).expand(320, 2, 4, D).reshape(320, 8, D)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    assert len(plans) == 1 and not isinstance(plans[0], str)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [128, 256])
def test_ranges(D, monkeypatch):
    """As the Triton kernel."""
    ranges = torch.tensor([[(500, 900), (0, 0)], [(-1, 90), (5, 700)], [(10, 50), (30, 10)]], dtype=torch.int32)
    call, features, _ = batch((16, 4), [900, 700, 33], [1200, 700, 50], D, stored=E4M3, scales=(0.6, 1.7))
    features["bidirectional_ranges"] = ranges.to(GPU)
    plans = noted_plans(monkeypatch)
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    assert len(plans) == 1 and not isinstance(plans[0], str)
    other = dataclasses.replace(target.target_of(GPU), arch=89)  # which has no such kernel
    monkeypatch.setattr(attention, "target_of", lambda _: other)
    attention.forget()
    wanted, wanted_lse = paged_ops.paged_attention_with_lse(*call, **features)
    attention.forget()
    assert (out.double() - wanted.double()).norm() <= 5e-3 * wanted.double().norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_hopper
def test_a_graph_serves_other_lengths():
    """Captured with all lengths 300; the batch's tokens are the same."""
    tokens = [300, 1, 129, 0]
    made = [
        batch((32, 8), tokens, lens, columns=200, blocks=300, stored=E4M3)
        for lens in ([300, 900, 129, 7], [2000, 1, 130, 0], [301, 3000, 1000, 5])
    ]
    check_replays(made, 300)


def noted_plans(monkeypatch):
    """The plans that the kernel makes from now on."""
    plans, plan = [], fp8.plan

    def noted(*given):
        plans.append(plan(*given))
        return plans[-1]

    monkeypatch.setattr(fp8, "plan", noted)
    attention.forget()
    return plans
