"""The Hopper kernels of attention to selected latents: which calls take them, and how lists are cut; on a GPU, batches
against float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops.features import Features
from paged_ops.fp8 import dequantise_rows, quantise_rows
from paged_ops.layouts import paged_kv
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention.hopper import selected

R, D = 512, 576
TARGET = SimpleNamespace(processors=132, device=torch.device("cpu"), backend="cuda", overlap=lambda: {"PDL": True})
LENS = [1, 16, 100, 0, 4096, 63, 64, 65, 777, 2500]
BATCHES = {
    "8 heads": {"H": 8, "tokens": [1] * 10, "lens": LENS},
    "12 heads, block 16, padded": {"H": 12, "B": 16, "tokens": [1] * 10, "lens": LENS, "padding": 3},
    "16 heads, block 128, float16": {"H": 16, "B": 128, "tokens": [1] * 10, "lens": LENS, "dtype": torch.float16},
    "one head, block 20": {"H": 1, "B": 20, "tokens": [1] * 10, "lens": LENS, "k": 100},
    "32 heads": {"H": 32, "tokens": [1] * 10, "lens": LENS},
    "64 heads": {"H": 64, "tokens": [1] * 10, "lens": LENS},
    "96 heads": {"H": 96, "tokens": [1] * 10, "lens": LENS, "k": 513},
    "128 heads": {"H": 128, "tokens": [1] * 10, "lens": LENS},
    "one row": {"H": 16, "tokens": [1], "lens": [50000]},
    "one row, 128 heads": {"H": 128, "tokens": [1], "lens": [50000]},
    "short lists": {"H": 16, "tokens": [1] * 10, "lens": LENS, "k": 70},
    "lists of one": {"H": 8, "tokens": [1] * 10, "lens": LENS, "k": 1},
    "some tokens of one": {"H": 16, "B": 16, "tokens": [1, 0, 0, 5, 0, 1, 0], "lens": [1000, 5, 0, 40, 4096, 129, 7]},
    "blocks of 8": {"H": 16, "tokens": [2, 1, 3], "lens": [1000, 400, 4000], "k": 30, "selected_block_size": 8},
    "blocks of 128": {"H": 64, "tokens": [2, 1, 3], "lens": [1000, 400, 9000], "k": 16, "selected_block_size": 128},
    "window": {"H": 16, "tokens": [1, 2], "lens": [1000, 4000], "sliding_window": 900},
    "64 rows": {"H": 16, "tokens": [1] * 64, "lens": [977 * n % 9000 + 1 for n in range(64)]},
    "prompt": {"H": 16, "B": 16, "tokens": [300, 1, 299], "lens": [300, 5000, 3000], "k": 512},
    "prompt, 128 heads": {"H": 128, "tokens": [150, 1, 49], "lens": [300, 5000, 3000], "k": 512},
    "fp8_ds_mla, 16 heads": {"H": 16, "tokens": [1] * 10, "lens": LENS, "rows": True},
    "fp8_ds_mla, 128 heads": {"H": 128, "tokens": [1] * 10, "lens": LENS, "rows": True},
    "fp8_ds_mla, 64 rows": {"H": 64, "tokens": [1] * 64, "lens": [977 * n % 9000 + 1 for n in range(64)], "rows": True},
    "fp8_ds_mla, prompt": {"H": 8, "B": 20, "tokens": [300, 1, 9], "lens": [300, 5000, 3000], "k": 512, "rows": True},
    "600 rows": {"H": 8, "tokens": [1] * 600, "lens": [37 * n % 900 + 1 for n in range(600)], "k": 256},
}


def planned(H: int, T: int, k: int = 2048, block: int = 1, B: int = 64) -> tuple[spec.Spec, spec.Shapes]:
    paged = paged_kv(torch.zeros(5, B, D, dtype=torch.float16), None, R, "auto")
    chosen = torch.zeros(T, 1, k, dtype=torch.int32)
    features = Features(value_head_size=R, selected_keys=chosen, selected_block_size=block)
    query, tables = torch.zeros(T, H, D, dtype=torch.float16), torch.zeros(T, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, features, query.dtype, True, True)
    return of_call, spec.Shapes(T, T, 5, 2, True, spec.numbers_of(features, 0.1, 2, T, T))


@pytest.mark.parametrize(("T", "parts"), [(1, 32), (4, 32), (64, 2), (132, 1), (2048, 1)])
def test_parts_fill_the_processors(T, parts):
    of_call, shapes = planned(16, T)
    assert not selected.serves(of_call, TARGET)
    choice = selected.plan(of_call, TARGET, shapes)
    assert choice[-1] == parts


@pytest.mark.parametrize("tiles", range(1, 70))
def test_no_part_is_empty(tiles):
    for units in (1, 3, 20, 64, 200):
        parts = selected.parts_of(units, tiles, 132, 1024)
        each = -(-tiles // parts)
        assert (parts - 1) * each < tiles <= parts * each


@pytest.mark.parametrize("H", [16, 128])
def test_prompts_need_little_memory_for_parts(H):
    """Two parts of each list of 891 rows with 128 heads would take 934 MB."""
    for T in (1, 133, 891, 4950):
        of_call, shapes = planned(H, T, k=8192)
        floats = selected.build(selected.plan(of_call, TARGET, shapes), of_call, TARGET, shapes).workspace[2]
        assert 4 * floats <= 257 << 20, T


def test_refusals():
    of_call, shapes = planned(16, 4)
    assert selected.serves(of_call._replace(masks=spec.Masks()), TARGET) == ["selected_keys: not given"]
    sinks = of_call._replace(logits=spec.Logits(sinks=True))
    assert selected.serves(sinks, TARGET) == ["sinks: not applied by this kernel"]
    assert any("TMA" in each for each in selected.serves(with_stride(of_call, 580), TARGET))
    assert isinstance(selected.plan(of_call, TARGET, shapes._replace(aligned=False)), str)


def with_stride(of_call, stride):
    return of_call._replace(v_side=of_call.v_side._replace(b=stride, n=64 * stride))


def lists_of(tokens, lens, k, block, generator):
    """A list per row: distinct entries in any order, some of them later than the row, some padding between them; some
    lists have nothing but padding."""
    lists = torch.full((sum(tokens), 1, k), -1, dtype=torch.int32)
    t = 0
    for number, n in zip(tokens, lens, strict=True):
        for _ in range(number):
            drawn = torch.randperm(max(-(-n // block), 1), generator=generator)[:k]
            places = torch.randperm(k, generator=generator)[: len(drawn)]
            lists[t, 0, places] = drawn.int()
            lists[t, 0, torch.rand(k, generator=generator) < 0.1] = -7
            if t % 5 == 4:
                lists[t] = -1
            t += 1
    return lists


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """Everything that must not be read is NaN; two calls give the same bits."""
    check(**BATCHES[name])


def check(
    H, tokens, lens, B=64, k=2048, dtype=torch.bfloat16, padding=0, selected_block_size=1, rows=False, **features
):
    """``rows``: the cache has rows with scales."""
    generator = torch.Generator(device=GPU).manual_seed(0)
    on_host = torch.Generator().manual_seed(1)
    S, T, scale, block = len(lens), sum(tokens) + padding, D**-0.5, selected_block_size
    window = features.get("sliding_window")
    needed = [-(-n // B) for n in lens]
    N = sum(needed) + 3
    ids = torch.randperm(N - 1, generator=on_host).split([*needed, 2])
    tables = torch.full((S, max(needed) + 1), N - 1, dtype=torch.int32)
    for s in range(S):
        tables[s, : needed[s]] = ids[s]
    lists = lists_of(tokens, lens, k, block, on_host)
    starts = torch.tensor([0, *tokens]).cumsum(0)
    slots, seen = [], torch.zeros(N * B, dtype=torch.bool)  # of the keys that each row sees
    for s in range(S):
        for t in range(int(starts[s]), int(starts[s + 1])):
            i = lens[s] - int(starts[s + 1]) + t
            entries = lists[t, 0][lists[t, 0] >= 0].long()
            j = (entries[:, None] * block + torch.arange(block)).flatten()
            j = j[j <= i]
            if window is not None:
                j = j[i - j < window]
            slots.append(ids[s][j // B] * B + j % B)
            seen[slots[-1]] = True
    cache = torch.randn(N * B, D, device=GPU, generator=generator).to(dtype)
    stored = cache = cache.masked_fill_(~seen.to(GPU)[:, None], torch.nan)
    if rows:  # each byte 255 is a part of a NaN
        stored = quantise_rows(
            *(cache * torch.exp2(torch.arange(N * B, device=GPU) % 3 - 1.0)[:, None]).split([R, D - R], -1)
        )
        stored[~seen.to(GPU)] = 255
        cache = dequantise_rows(stored, dtype)
        features["kv_cache_dtype"] = "fp8_ds_mla"
    query = torch.randn(T, H, D, device=GPU, generator=generator).to(dtype)
    given = torch.cat([lists, torch.full((padding, 1, k), 3, dtype=torch.int32)])
    vectors = (torch.tensor(lens, dtype=torch.int32, device=GPU), starts.to(GPU, torch.int32))
    arguments = (query, stored.view(N, B, -1), tables.to(GPU), *vectors, scale)
    features |= {"selected_keys": given.to(GPU), "selected_block_size": block, "value_head_size": R}
    out, lse = paged_ops.paged_attention_with_lse(*arguments, **features)
    again = paged_ops.paged_attention_with_lse(*arguments, **features)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert torch.equal(out, paged_ops.paged_attention(*arguments, **features))
    assert not out[starts[-1] :].any() and (lse[starts[-1] :] == -math.inf).all()
    wanted, wanted_lse = torch.zeros(len(slots), H, R).to(GPU).double(), torch.empty(len(slots), H).to(GPU).double()
    for t, own in enumerate(slots):
        keys = cache[own.to(GPU)].double()
        logits = query[t].double() @ keys.T * scale
        wanted_lse[t] = logits.logsumexp(-1)
        wanted[t] = logits.softmax(-1) @ keys[:, :R]
    torch.testing.assert_close(lse[: len(slots)].double(), wanted_lse, atol=1e-4, rtol=0)
    torch.testing.assert_close(out[: len(slots)].double(), wanted, atol=0.012 * wanted.abs().max().item(), rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("H", [8, 16, 64, 128])
def test_captured_calls_take_other_lists_and_lengths(H):
    T, B, k, N = 6, 64, 700, 200
    generator = torch.Generator(device=GPU).manual_seed(0)
    cache = torch.randn(N, B, D, device=GPU, generator=generator).bfloat16()
    query = torch.randn(T, H, D, device=GPU, generator=generator).bfloat16()
    tables = torch.randperm(N, device=GPU)[: T * 30].view(T, 30).int()
    lens = torch.full((T,), 5, dtype=torch.int32, device=GPU)
    starts = torch.arange(T + 1, dtype=torch.int32, device=GPU)
    lists = torch.full((T, 1, k), -1, dtype=torch.int32, device=GPU)

    def call():
        given = {"selected_keys": lists, "value_head_size": R}
        return paged_ops.paged_attention_with_lse(query, cache, tables, lens, starts, 0.05, **given)

    call()
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        captured = call()
    for lengths in ([1, 30, 64, 65, 1000, 1920], [1920] * 6, [700, 0, 3, 900, 1, 128]):
        lens.copy_(torch.tensor(lengths))
        drawn = [torch.randperm(1920)[:k] for _ in range(T)]
        lists.copy_(torch.stack(drawn).view(T, 1, k))
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        for one, other in zip(captured, call(), strict=True):
            assert torch.equal(one, other) and not one.isnan().any()
