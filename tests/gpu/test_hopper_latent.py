"""The Hopper kernels of latent attention: which calls take the kernel for few query rows, and the addresses that TMA
loads; on a GPU, batches of all kernels against float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops.features import Features
from paged_ops.layouts import FP8_DS_MLA, ROW_BYTES, paged_kv, row_parts
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import choose
from paged_ops.lowerings.gpu.attention.hopper import latent as latent_hopper
from paged_ops.lowerings.gpu.attention.hopper import latent_few, latent_fp8, latent_fp8_wide

R, D = 512, 576
TARGET = SimpleNamespace(processors=132, device=torch.device("cpu"), backend="cuda", overlap=lambda: {"PDL": True})
LENS = [1, 16, 100, 0, 4096, 63, 64, 65, 777, 2048]
BATCHES = {
    "block 64": {"H": 16, "B": 64, "tokens": [1] * 10, "lens": LENS},
    "block 16, padded": {"H": 16, "B": 16, "tokens": [1] * 10, "lens": LENS, "padding": 3},
    "block 24, float16": {"H": 16, "B": 24, "tokens": [1] * 10, "lens": LENS, "dtype": torch.float16},
    "12 heads, sinks": {"H": 12, "B": 32, "tokens": [1] * 10, "lens": LENS, "sinks": True},
    "two tokens of 8 heads": {"H": 8, "B": 64, "tokens": [2, 2, 1, 2], "lens": [5000, 400, 4, 64]},
    "some tokens of one": {"H": 16, "B": 16, "tokens": [1, 0, 0, 5, 0, 1, 0], "lens": [1000, 5, 0, 40, 4096, 129, 7]},
    "window": {"H": 16, "B": 16, "tokens": [1] * 4, "lens": [5000, 400, 2000, 3000], "sliding_window": 100},
    "not causal, cap": {"H": 8, "B": 16, "tokens": [2, 2, 1], "lens": [5000, 400, 1], "causal": False, "soft_cap": 5.0},
    "one long": {"H": 16, "B": 64, "tokens": [1], "lens": [50000]},
    "twenty parts each": {"H": 16, "B": 64, "tokens": [1] * 6, "lens": [9000] * 6},
    "many": {"H": 16, "B": 16, "tokens": [1] * 300, "lens": [37 * k % 900 + 1 for k in range(300)]},
    "32 heads": {"H": 32, "B": 64, "tokens": [1] * 10, "lens": LENS},
    "two tokens": {"H": 16, "B": 64, "tokens": [2] * 6, "lens": [3, 100, 640, 5000, 64, 2048]},
    "128 heads, block 16": {"H": 128, "B": 16, "tokens": [1] * 10, "lens": LENS},
    "128 heads, many": {"H": 128, "B": 64, "tokens": [1] * 60, "lens": [37 * k % 900 + 1 for k in range(60)]},
    "128 heads, sinks, cap": {"H": 128, "B": 64, "tokens": [3] * 4, "lens": LENS[4:8], "sinks": True, "soft_cap": 9.0},
    "64 heads, growing": {"H": 64, "B": 64, "tokens": [1] * 4, "lens": [3000, 64, 700, 2000], "slope": 0.06},
    "128 heads, growing": {"H": 128, "B": 16, "tokens": [4, 1], "lens": [3000, 900], "slope": 0.2},
    # Units with fewer than 64 rows: heads that are no multiple of 64, and last tokens.
    "20 heads, seven tokens": {"H": 20, "B": 16, "tokens": [7, 3, 1, 4], "lens": [2000, 300, 64, 900]},
    "32 heads, three tokens": {"H": 32, "B": 64, "tokens": [3] * 8, "lens": LENS[4:] + LENS[4:6], "padding": 2},
    "32 heads, equal": {"H": 32, "B": 64, "tokens": [1] * 8, "lens": [8192] * 8},
    "40 heads, float16": {"H": 40, "B": 24, "tokens": [3, 1, 2], "lens": [5000, 77, 640], "dtype": torch.float16},
    "64 heads, two tokens": {"H": 64, "B": 64, "tokens": [2] * 5, "lens": [2, 64, 65, 5000, 640]},
    "80 heads, 66 sequences": {"H": 80, "B": 64, "tokens": [1] * 66, "lens": [53 * k % 1300 for k in range(66)]},
    "80 heads, 66 equal": {"H": 80, "B": 64, "tokens": [1] * 66, "lens": [512] * 66},
    "80 heads, sinks": {"H": 80, "B": 16, "tokens": [2] * 3, "lens": [9000, 70, 2], "sinks": True, "padding": 1},
}
OF_FP8 = {
    "16 heads": {"H": 16, "B": 64, "tokens": [1] * 10, "lens": LENS},
    "block 24, float16": {"H": 16, "B": 24, "tokens": [1] * 10, "lens": LENS, "dtype": torch.float16},
    "12 heads, sinks, padded": {"H": 12, "B": 32, "tokens": [1] * 10, "lens": LENS, "sinks": True, "padding": 3},
    "some tokens of one": {"H": 16, "B": 16, "tokens": [1, 0, 0, 5, 0, 1, 0], "lens": [1000, 5, 0, 40, 4096, 129, 7]},
    "window": {"H": 40, "B": 16, "tokens": [2] * 4, "lens": [5000, 400, 2000, 3000], "sliding_window": 100},
    "not causal, cap": {"H": 8, "B": 16, "tokens": [2, 2, 1], "lens": [5000, 400, 1], "causal": False, "soft_cap": 5.0},
    "one long": {"H": 16, "B": 64, "tokens": [1], "lens": [50000]},
    "many": {"H": 32, "B": 16, "tokens": [1] * 300, "lens": [37 * k % 900 + 1 for k in range(300)]},
    "128 heads, block 16": {"H": 128, "B": 16, "tokens": [1] * 10, "lens": LENS},
    "128 heads, prompts": {"H": 128, "B": 64, "tokens": [70, 5], "lens": [300, 200], "soft_cap": 20.0},
    "128 heads, ragged": {"H": 128, "B": 64, "tokens": [1] * 10, "lens": LENS},
    "128 heads, most programs idle": {"H": 128, "B": 64, "tokens": [1] * 5, "lens": [1, 63, 700, 2049, 129]},
    "128 heads, one tile": {"H": 128, "B": 64, "tokens": [1], "lens": [40]},
    "128 heads, one long": {"H": 128, "B": 64, "tokens": [1], "lens": [50000]},
    "128 heads, equal": {"H": 128, "B": 64, "tokens": [1] * 64, "lens": [512] * 64},
    "128 heads, 128 sequences": {"H": 128, "B": 64, "tokens": [1] * 128, "lens": [97 * k % 1500 for k in range(128)]},
    "128 heads, growing": {"H": 128, "B": 64, "tokens": [2, 1], "lens": [700, 64], "slope": 0.03},
    "80 heads, window, sinks": {
        "H": 80,
        "B": 24,
        "tokens": [2] * 3,
        "lens": [900, 70, 2],
        "sliding_window": 90,
        "sinks": True,
    },
    "96 heads, float16, padded": {
        "H": 96,
        "B": 64,
        "tokens": [1] * 40,
        "lens": [60] * 40,
        "dtype": torch.float16,
        "padding": 3,
    },
}


def cache_of(N: int, B: int) -> torch.Tensor:
    """A cache ``[N, B, D]`` with other numbers between its blocks."""
    return torch.arange(N * (B + 8) * D).to(torch.int16).view(torch.float16).view(N, B + 8, D)[:, :B]


def fp8_cache_of(N: int, B: int, columns: int) -> torch.Tensor:
    """The same with bytes."""
    return torch.arange(N * (B + 8) * columns).to(torch.uint8).view(N, B + 8, columns)[:, :B]


def planned(
    H: int, T: int, S: int, B: int = 16, cache: torch.Tensor | None = None, kv_cache_dtype: str = "auto"
) -> tuple[torch.Tensor, spec.Spec, spec.Shapes]:
    paged = paged_kv(cache_of(5, B) if cache is None else cache, None, R, kv_cache_dtype)
    features = Features(value_head_size=R, kv_cache_dtype=kv_cache_dtype)
    query, tables = torch.zeros(T, H, D, dtype=torch.float16), torch.zeros(S, 2, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, features, query.dtype, True, True)
    numbers = spec.numbers_of(features, 0.1, 2, S, T)
    return paged.key, of_call, spec.Shapes(T, S, 5, 2, True, numbers)


@pytest.mark.parametrize(
    ("H", "T", "S", "few"),
    [(16, 4, 4, True), (16, 3, 4, True), (8, 8, 4, True), (12, 4, 4, True), (16, 5, 4, False), (20, 4, 4, False)],
)
def test_few_rows_have_a_kernel_of_their_own(H, T, S, few):
    _, of_call, shapes = planned(H, T, S)
    assert not latent_few.serves(of_call, TARGET)
    assert isinstance(latent_few.plan(of_call, TARGET, shapes), str) != few
    assert not isinstance(latent_hopper.plan(of_call, TARGET, shapes), str)


@pytest.mark.parametrize(("B", "page"), [(64, 64), (16, 16), (24, 8), (128, 64)])
def test_copies_read_the_blocks(B, page):
    key, of_call, _ = planned(16, 4, 4, B)
    assert latent_hopper.page_of(of_call) == page
    descriptor = latent_few.describe_columns(of_call, page, 64, key)
    assert descriptor.block_shape == [page, 64]
    rows_n = of_call.v_side.n // of_call.v_side.b
    for block, j, column in [(0, 0, 0), (4, B - page, 512), (2, 0, 192)]:
        row = block * rows_n + j
        assert row + page <= descriptor.shape[0] and column + 64 <= descriptor.shape[1]
        offset = row * descriptor.strides[0] + column
        copied = descriptor.base.as_strided((page, 64), descriptor.strides, key.storage_offset() + offset)
        wanted = key.view(5, B, D)[block, j : j + page, column : column + 64]
        assert torch.equal(copied.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("B", [64, 16, 24])
@pytest.mark.parametrize("name", ["fp8_e4m3", FP8_DS_MLA])
def test_copies_read_the_bytes(name, B):
    columns, page = ROW_BYTES if name == FP8_DS_MLA else D, B & -B
    cache = fp8_cache_of(5, B, columns)
    stored = cache if name == FP8_DS_MLA else cache.view(torch.float8_e4m3fn)
    key, of_call, shapes = planned(16, 4, 4, B, stored, name if name == FP8_DS_MLA else "auto")
    assert not latent_fp8.serves(of_call, TARGET) and latent_hopper.serves(of_call, TARGET)
    assert not isinstance(latent_fp8.plan(of_call, TARGET, shapes), str)
    widths = (64, 64, 8) if name == FP8_DS_MLA else (64, 32, 32)
    latents, rotated, scales = (latent_few.describe_columns(of_call, page, width, key) for width in widths)
    rows_n = of_call.v_side.n // of_call.v_side.b
    # The first pair of columns of each copy, as in the producer.
    places = [(latents, 64), (rotated, 264 if name == FP8_DS_MLA else 256)]
    for descriptor, pair in [*places, *([(scales, 256)] if name == FP8_DS_MLA else [])]:
        width = descriptor.block_shape[1]
        row = 3 * rows_n + B - page
        assert row + page <= descriptor.shape[0] and pair + width <= descriptor.shape[1] == columns // 2
        offset = cache.storage_offset() // 2 + row * descriptor.strides[0] + pair
        copied = descriptor.base.as_strided((page, width), descriptor.strides, offset).contiguous()
        wanted = cache[3, B - page :, 2 * pair : 2 * (pair + width)]
        assert torch.equal(copied.view(torch.uint8), wanted)
    assert columns == 2 * (4 * latents.block_shape[1] + rotated.block_shape[1]) + 16 * (name == FP8_DS_MLA)


def test_refusals_of_the_fp8_kernel():
    _, of_call, _ = planned(16, 4, 4)
    assert any("cache_dtype: expected float8" in reason for reason in latent_fp8.serves(of_call, TARGET))
    _, of_call, _ = planned(16, 4, 4, 12, fp8_cache_of(5, 12, D).view(torch.float8_e5m2))
    assert latent_fp8.serves(of_call, TARGET) == ["kv_cache: expected rows that TMA can address"]


@pytest.mark.parametrize(
    ("H", "stored", "kernel"),
    [
        (128, torch.float8_e4m3fn, latent_fp8_wide),
        (65, torch.float8_e5m2, latent_fp8_wide),
        (64, torch.float8_e4m3fn, latent_fp8),
        (128, torch.uint8, latent_fp8),
    ],
)
def test_more_than_64_heads_over_fp8_have_a_kernel_of_their_own(H, stored, kernel):
    scaled = stored == torch.uint8
    cache = fp8_cache_of(5, 64, ROW_BYTES if scaled else D).view(stored)
    _, of_call, shapes = planned(H, 4, 4, 64, cache, FP8_DS_MLA if scaled else "auto")
    kernels = tuple(each for each in choose.hopper_kernels() if not each.serves(of_call, TARGET))
    assert choose.choose(kernels, of_call, TARGET, shapes)[0] is kernel


def test_rounded_parts_have_a_merge_of_their_own():
    """Parts of 16-bit latents have the output's dtype, those of fp8 latents are float32."""
    cache = fp8_cache_of(5, 64, D).view(torch.float8_e4m3fn)
    merges, sizes = [], []
    for kernel, given in [(latent_hopper, None), (latent_fp8_wide, cache)]:
        _, of_call, shapes = planned(128, 4, 4, 64, given)
        built = kernel.build(kernel.plan(of_call, TARGET, shapes), of_call, TARGET, shapes)
        merges.append(built.launches[-1]._launcher)
        sizes.append(built.workspace[0])
    assert merges[0] is not merges[1] and 2 * sizes[0] == sizes[1] == TARGET.processors * 2 * 64 * R


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_float64(name):
    """Everything that must not be read is NaN; calls give the same bits, and only the rows of their results change."""
    check(**BATCHES[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("name", OF_FP8)
def test_fp8_against_float64(name, stored):
    check(**OF_FP8[name], stored=stored)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("H", "tokens", "stored"),
    [
        (128, 1, torch.float8_e4m3fn),
        (128, 1, torch.float8_e5m2),
        (32, 1, torch.bfloat16),
        (32, 3, torch.bfloat16),
        (64, 1, torch.bfloat16),
        (80, 1, torch.bfloat16),
        (128, 1, torch.bfloat16),
    ],
    ids=str,
)
def test_a_captured_call_serves_every_batch(H, tokens, stored):
    """Idle programs, empty sequences, and units that are divided or not; each batch 50 times, with equal bits."""
    S, M = 66, 40
    generator = torch.Generator(device=GPU).manual_seed(0)
    cache = torch.randn(S * M, 64, D, device=GPU, generator=generator).to(stored)
    query = torch.randn(S * tokens, H, D, device=GPU, generator=generator).bfloat16()
    tables = torch.randperm(S * M, device=GPU, generator=generator).int().view(S, M)
    lens = torch.full((S,), 500, dtype=torch.int32, device=GPU)
    starts = torch.arange(S + 1, dtype=torch.int32, device=GPU) * tokens
    k_scale = None if stored == torch.bfloat16 else torch.tensor([0.6], device=GPU)

    def call():
        return paged_ops.paged_attention_with_lse(
            query, cache, tables, lens, starts, D**-0.5, value_head_size=R, k_scale=k_scale
        )

    call()
    torch.cuda.synchronize(GPU)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        results = call()
    one, long = [40] + [0] * (S - 1), [64 * M] + [1] * (S - 1)
    for batch in ([64 * M] * S, one, [0] * S, long, [61 * n % 2500 for n in range(S)]):
        lens.copy_(torch.tensor(batch, dtype=torch.int32).clamp(min=tokens if tokens > 1 else 0))
        wanted = call()
        for _ in range(50):
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            for got, want in zip(results, wanted, strict=True):
                assert torch.equal(got, want)


def stored_rows(cache, stored, features):
    """A cache of about these numbers ``[N, B, D]``, and its exact numbers in float64."""
    if stored is None:
        return cache, cache.double()
    if stored != torch.uint8:
        features["k_scale"] = torch.tensor([0.6], device=GPU)
        return cache.to(stored), cache.to(stored).double() * features["k_scale"].double()
    rows = torch.empty(*cache.shape[:2], ROW_BYTES, dtype=stored, device=GPU)
    features["kv_cache_dtype"] = FP8_DS_MLA
    parts = row_parts(rows)
    exponents = torch.rand(parts.scales.shape, device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    parts.latent.copy_(cache[..., :R])
    parts.rotated.copy_(cache[..., R:])
    parts.scales.copy_(torch.exp2(exponents * 6 - 5))
    parts.scales[cache[..., :1].isnan().expand(parts.scales.shape)] = torch.nan
    latent = parts.latent.double().unflatten(-1, (4, -1)) * parts.scales.double()[..., None]
    return rows, torch.cat([latent.flatten(-2), parts.rotated.double()], -1)


def check(H, B, tokens, lens, dtype=torch.bfloat16, padding=0, sinks=False, stored=None, slope=0.0, **features):
    generator = torch.Generator(device=GPU).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=GPU, generator=generator)

    window, cap, causal = features.get("sliding_window"), features.get("soft_cap"), features.get("causal", True)
    S, T, scale = len(lens), sum(tokens) + padding, D**-0.5
    needed = [-(-n // B) for n in lens]
    N = sum(needed) + 3
    cache, query = normal(N, B, D).to(dtype), normal(T, H, D).to(dtype)
    ids = torch.randperm(N - 1).split([*needed, 2])
    tables = torch.full((S, max(needed) + 1), N - 1, dtype=torch.int32)
    read = torch.zeros(N, B, dtype=torch.bool)
    for s, own in enumerate(ids[:S]):
        tables[s, : needed[s]] = own
        first = 0 if window is None else max(0, lens[s] - tokens[s] - window + 1)
        j = torch.arange(needed[s] * B).view(-1, B)
        read[own] = (j >= first) & (j < lens[s])
        cache[own, :, R] += (slope / scale / math.log2(math.e) * (lens[s] - j)).to(cache)
    cache[~read.to(GPU)] = torch.nan
    cache, numbers = stored_rows(cache, stored, features)
    starts = torch.tensor([0, *tokens]).cumsum(0)
    if sinks:
        features["sinks"] = normal(H)
    vectors = (torch.tensor(lens, dtype=torch.int32, device=GPU), starts.to(GPU, torch.int32))
    arguments = (query, cache, tables.to(GPU), *vectors, scale)
    out, lse = paged_ops.paged_attention_with_lse(*arguments, value_head_size=R, **features)
    again = paged_ops.paged_attention_with_lse(*arguments, value_head_size=R, **features)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    around = torch.full((T + 128, H, R), torch.nan, dtype=dtype, device=GPU)
    into = around[64:-64]
    torch.ops.paged_ops.paged_attention_with_lse.out(*arguments, value_head_size=R, **features, out=into, lse=again[1])
    assert torch.equal(out, into) and torch.equal(lse, again[1])
    assert around[:64].isnan().all() and around[-64:].isnan().all()
    assert not out[starts[-1] :].any()
    for s, n in enumerate(lens):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        keys = numbers[ids[s].to(GPU)].reshape(-1, D)[:n].nan_to_num()
        logits = torch.einsum("thd,jd->thj", query[rows].double(), keys) * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        i, j = torch.arange(n - tokens[s], n, device=GPU)[:, None], torch.arange(n, device=GPU)
        kept = (j <= i) | (not causal)
        if window is not None:
            kept &= i - j < window
        logits = logits.masked_fill(~kept[:, None], -math.inf)
        if sinks:
            logits = torch.cat([logits, features["sinks"].double()[None, :, None].expand(tokens[s], H, 1)], -1)
        wanted_lse = logits.logsumexp(-1)
        wanted = logits.softmax(-1).nan_to_num(0.0)[..., :n] @ keys[:, :R]
        # rtol: scores of hundreds are sums of float32s, which tensor cores truncate
        torch.testing.assert_close(lse[rows].double(), wanted_lse, atol=1e-4, rtol=4e-6)
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        torch.testing.assert_close(out[rows].double(), wanted, atol=0.012 * largest, rtol=0)
