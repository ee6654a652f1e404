"""What only a GPU shows: caches past 2^31 elements, more than 65535 tiles of query rows, captured graphs for other
batches, equal bits run after run."""

import random

import pytest
import torch

import paged_ops
from paged_ops import reference, testing
from paged_ops.bench.clock import clock_mhz
from tests.helpers.gpu import GPU, captured_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
N, B, K, D = (1 << 16) + 64, 16, 8, 128  # [N, 2, B, K, D] is 2^31 elements and 64 blocks


@pytest.fixture(scope="module")
def large():
    """A cache whose last 64 blocks lie past element 2^31; the rest is never read."""
    cache = torch.empty(N, 2, B, K, D, dtype=torch.bfloat16, device=GPU)
    cache.view(torch.int16).fill_(-1)  # NaN
    cache[-64:] = torch.randn(64, 2, B, K, D, dtype=torch.bfloat16)
    assert cache.numel() > 1 << 31
    return cache


@pytest.mark.parametrize("q_len", [1, 5, 300])
def test_large_cache_attention(large, q_len):
    small, tables = large[-64:].clone(), torch.arange(64, dtype=torch.int32, device=GPU).view(2, 32)
    lens = torch.tensor([511, 303], dtype=torch.int32, device=GPU)
    starts = torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32, device=GPU)
    query = torch.randn(2 * q_len, 32, D, dtype=torch.bfloat16, device=GPU)
    want = paged_ops.paged_attention(query, small, tables, lens, starts, 0.1)
    got = paged_ops.paged_attention(query, large, tables + N - 64, lens, starts, 0.1)
    testing.assert_same_bytes("out", got, want)


@pytest.mark.parametrize("q_len", [1, 300])
def test_nan_reaches_the_rows_that_see_it(q_len):
    """Of a key and of a query row: what is NaN on a CPU, and nothing else."""
    cache = torch.randn(64, 2, B, K, D, dtype=torch.bfloat16)
    tables = torch.randperm(64).int().view(2, 32)
    cache[tables[1, 0], 0, 0, 0, 3] = torch.nan  # the first key of sequence 1
    query = torch.randn(2 * q_len, 32, D, dtype=torch.bfloat16)
    query[0, -1, 5] = torch.nan
    lens, starts = torch.tensor([511, 303], dtype=torch.int32), torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32)
    tensors = (query, cache, tables, lens, starts)
    wanted = paged_ops.paged_attention_with_lse(*tensors, 0.1)
    found = paged_ops.paged_attention_with_lse(*(each.to(GPU) for each in tensors), 0.1)
    for got, want in zip(found, wanted, strict=True):
        assert want.isnan().any()
        assert torch.equal(got.cpu().isnan(), want.isnan())


def test_more_tiles_than_65535():
    """Each sequence gets what it gets alone; with ALiBi the Triton kernel takes them, at most 2 tokens a tile."""
    S, q_len, H = 140, 1000, 64
    cache = torch.randn(63, 2, B, 1, 64, dtype=torch.bfloat16, device=GPU)
    query = torch.randn(S * q_len, H, 64, dtype=torch.bfloat16, device=GPU)
    tables = torch.stack([torch.randperm(63) for _ in range(S)]).int().to(GPU)
    lens = torch.full((S,), q_len, dtype=torch.int32, device=GPU)
    starts = torch.arange(S + 1, dtype=torch.int32, device=GPU) * q_len
    slopes = torch.rand(H, device=GPU)
    got = paged_ops.paged_attention(query, cache, tables, lens, starts, 0.1, alibi_slopes=slopes)
    for s in (0, 1, 68, 139):
        rows = slice(s * q_len, (s + 1) * q_len)
        one = (query[rows], cache, tables[s : s + 1], lens[:1], starts[:2], 0.1)
        want = paged_ops.paged_attention(*one, alibi_slopes=slopes)
        torch.testing.assert_close(got[rows], want)


def test_large_cache_writes_and_copies(large):
    small = large[-64:].clone()
    key, value = torch.randn(2, 100, K, D, dtype=torch.bfloat16, device=GPU)
    slots = torch.randperm(64 * B, device=GPU)[:100]
    pairs = torch.tensor([(1, 40), (1, 41), (2, 63)])
    elsewhere = torch.zeros(8, 2, B, K, D, dtype=torch.bfloat16).pin_memory()
    out = torch.tensor([(60, 0), (61, 7)])
    for cache, first in ((large, N - 64), (small, 0)):
        paged_ops.reshape_and_cache(key, value, cache, slots + first * B)
        paged_ops.copy_blocks([cache], pairs + first)
        paged_ops.swap_blocks([cache], [elsewhere], out + torch.tensor([first, 0]))
        paged_ops.swap_blocks([elsewhere], [cache], torch.tensor([(7, 5 + first)]))
        torch.cuda.synchronize(GPU)
    testing.assert_same_bytes("kv_cache", large[-64:], small)
    tables = torch.arange(64, dtype=torch.int32, device=GPU).view(2, 32)
    lens = torch.tensor([500, 12], dtype=torch.int32, device=GPU)
    gathered = [paged_ops.gather_kv(cache, tables + first, lens, 600) for cache, first in ((large, N - 64), (small, 0))]
    for got, want in zip(*gathered, strict=True):
        testing.assert_same_bytes("gather_kv", got, want)


@pytest.mark.parametrize("name", ["decode-bf16", "mixed-bf16", "long-bf16", "nhd-all-features"])
def test_twenty_runs_have_the_same_bits(name):
    inputs = testing.case_named("paged_attention_with_lse", name).inputs(GPU)
    first = paged_ops.paged_attention_with_lse(*inputs.args, **inputs.kwargs)
    for _ in range(20):
        again = paged_ops.paged_attention_with_lse(*inputs.args, **inputs.kwargs)
        for got, want in zip(again, first, strict=True):
            testing.assert_same_bytes("a later run", got, want)


@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize(("D", "Dv"), [(64, 32), (64, 16), (32, 16), (128, 32), (16, 32), (24, 7)])
def test_narrow_values_of_any_alignment(D, Dv, offset):
    """Values narrower than keys in caches that no vector load can read: ptxas once got their addresses wrong."""
    S, T, K, H, B, N = 3, 64, 2, 32, 17, 12
    generator = torch.Generator(GPU).manual_seed(0)
    dtype = {"dtype": torch.float16, "device": GPU}
    key, value = (
        torch.randn(N * B * K * size + offset, generator=generator, **dtype)[offset:].view(N, B, K, size)
        for size in (D, Dv)
    )
    query = torch.randn(T, H, D, generator=generator, **dtype)
    tables = torch.arange(N, dtype=torch.int32, device=GPU).view(S, N // S)
    lens, starts = (torch.tensor(each, dtype=torch.int32, device=GPU) for each in ([40, 33, 60], [0, 30, 31, 64]))
    got = paged_ops.paged_attention(query, key, tables, lens, starts, D**-0.5, value_cache=value)
    exact = query.float(), key.float(), tables, lens, starts, D**-0.5
    want = reference.paged_attention(*exact, value_cache=value.float())
    torch.testing.assert_close(got.float(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("H", [8, 32])
def test_one_captured_graph_serves_every_batch(H):
    """Captured with one composition, replayed with decodes, prefills, mixtures and padding only."""
    rng, S, T, M = random.Random(0), 6, 160, 40
    cache = torch.randn(S * M, 2, 16, 8, 64, dtype=torch.bfloat16, device=GPU)
    query = torch.randn(T, H, 64, dtype=torch.bfloat16, device=GPU)
    tables = torch.randperm(S * M, device=GPU).int().view(S, M)
    lens, starts = (
        torch.zeros(S, dtype=torch.int32, device=GPU),
        torch.zeros(S + 1, dtype=torch.int32, device=GPU),
    )

    def call():
        return paged_ops.paged_attention_with_lse(query, cache, tables, lens, starts, 0.125)

    call()
    torch.cuda.synchronize(GPU)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        results = call()
    for q_lens in ([1] * 6, [0] * 6, [160, 0, 0, 0, 0, 0], [1, 1, 60, 3, 0, 90], [5] * 6, [0, 0, 0, 0, 0, 33]):
        lens.copy_(torch.tensor([rng.randint(q, 640) if q else 0 for q in q_lens], dtype=torch.int32))
        starts[1:] = torch.tensor(q_lens, dtype=torch.int32).cumsum(0)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for got, want in zip(results, call(), strict=True):
            testing.assert_same_bytes(str(q_lens), got, want)


@pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA only")
def test_the_clock_is_that_of_a_gpu():
    assert 200 < clock_mhz(GPU) < 4000
