"""The Triton kernels' numbers without a GPU: the cases of the suite in Triton's interpreter, on CPU tensors.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_interpreter.py``. The variable must be set before triton is
imported, so this file runs in a process of its own. bfloat16 is left out: the interpreter's bfloat16 arithmetic is
wrong. Tiles are small and several programs share each sequence, so that splits, merges and masks all take part.
"""

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops import layouts, registry, testing
from paged_ops.features import Features, kept_keys
from paged_ops.lowerings import cpu, gpu
from paged_ops.lowerings.gpu import indexer, selection_cluster
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import tuning

pytestmark = pytest.mark.interpreter

# paged_attention differs from the form with lse in what it stores: a few cases tell. The others run in all their cases
# but for those that only repeat a kernel's path: the whole suite takes an interpreter too long.
FEW = {
    "paged_attention": "decode-fp16|mixed-fp32|sinks|fp8-output-fp32|padding_only-fp32",
    "select_keys": "(dsa|msa)-(query_past_keys|padding_only)-exact",  # others: test_index_tiles
}
LATENT = (
    r"query_past_keys-fp32|(b1|b544|h71|96-16)-decode-fp16|latent_padded-all-features|window|ranges|sparse|sinks|selected"
    r"|e4m3-fp16|uneven-fp32|rows-speculative-fp32|rows-window-fp16"
)
REPEATED = {
    "paged_attention_with_lse": (
        r"random-([4-9]|\d\d+)|(d8|d32|d40|d72|d112|d120|d128)(-fp16-decode)?|b(8|32|64|128)(-decode)?"
        r"|(hnd|plane_first|interleaved|separate)-(all-features|.*fp8.*|e4m3.*|e5m2.*)"
        r"|long-d128-b64-.*|(?!sinks-sparse|noncausal-cap)[a-z]+-[a-z]+-(long|prefill|query_past_keys)|(nhd|x_packed)-uint8-.*"
        r"|(chunk|alibi|noncausal|sinks|cap)-(long|holes)|noncausal-cap-long|h(4|6|16).*"
        r"|sparse-(rank|local_blocks|homo_head_group)-(long|decode)|sparse-homo_head-long|sinks-sparse-long"
        r"|long-d128-b16-nhd-(sinks|noncausal)-fp16|long-(d64-b128-separate|d128-b48-hnd|d64-b8-nhd)-noncausal-fp16"
        rf"|latent-(?!({LATENT})$).*"
        r"|window-first-(chunk|cap|alibi|sinks)-(long|prefill|query_past_keys)"
        r"|([a-z]+-)?selected|(window-first-)?selected-(long|decode|prefill|query_past_keys|holes)"
        r"|selected-(?!x_packed).*-all-features|selected16-.*"
        r"|scale1e-.*"  # which the interpreter takes as float64
    ),
}


def uses_bfloat16(case):
    inputs = case.inputs("cpu")
    values = [*inputs.args, *inputs.kwargs.values()]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return any(
        torch.bfloat16 is (each if isinstance(each, torch.dtype) else getattr(each, "dtype", None)) for each in flat
    )


def selected():
    for name in registry.OPS:
        for case in testing.CASES[name]:
            chosen = re.fullmatch(FEW.get(name, ".*"), case.name) and not re.fullmatch(
                REPEATED.get(name, ""), case.name
            )
            served = not getattr(case, "features", None) or "batch_invariant" not in dict(case.features)
            if chosen and served and not uses_bfloat16(case):
                yield name, case


CASES = list(selected())


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_matches_reference(name, case):
    testing.check(name, case, "cpu", getattr(gpu, name))


@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize(
    "case",
    [
        *("decode-fp16", "mixed-fp32", "window-alibi", "sparse-homo_head-decode", "latent-96-16-decode-fp16"),
        *("selected7-decode-fp16", "latent-selected"),
    ],
)
def test_any_number_of_programs(case, programs, monkeypatch):
    """Shares of no tile, of less than a unit, of several units: the same numbers within the error budget."""
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
    attention.forget()
    try:
        named = testing.case_named("paged_attention_with_lse", case)
        testing.check("paged_attention_with_lse", named, "cpu", gpu.paged_attention_with_lse)
    finally:
        attention.forget()


LATENT_24 = testing.CacheSpec("latent", 1, 24)
E4M3_24 = testing.CacheSpec("latent", 1, 24, dtype=torch.float16, cache_dtype=testing.F8_E4M3, scales="tensor")
INDEX_128 = testing.CacheSpec("latent_padded", 1, 128, 128, 16, torch.float16, torch.uint8, layouts.FP8_DS_INDEX)
INDEXED = {
    "dsa": (LATENT_24, 40, True, {"weights": torch.float32, "relu": True}),
    "msa": (LATENT_24, 7, True, {"per_head": True, "pool": "max", "block_size": 8, "local_blocks": 2}),
    "e4m3": (E4M3_24, 7, False, {"relu": True, "local_blocks": 1}),
    "token scales": (INDEX_128, 7, False, {"relu": True}),
    "mean": (LATENT_24, 7, False, {"pool": "mean", "block_size": 5, "causal": False}),
}


@pytest.mark.parametrize(("name", "programs"), [*((name, 1) for name in INDEXED), ("dsa", 4), ("msa", 2), ("mean", 8)])
def test_index_tiles(name, programs, monkeypatch):
    """Several groups of rows, programs per sequence, and tiles of maxima and of listed entries; many equal scores.
    With several programs per list also their shares of it."""
    monkeypatch.setattr(selection_cluster, "INTERPRETER_PROGRAMS", programs)
    monkeypatch.setattr(indexer, "WORKSPACE", 1 << 14)
    monkeypatch.setattr(indexer, "INTERPRETER_AT_ONCE", 64)
    cache, k, exact, options = INDEXED[name]
    case = testing.IndexCase(
        name, ((2, 400), (1, 130), (0, 9), (2, 1)), cache, 3, tuple(options.items()), k=k, exact=exact
    )
    testing.check("select_keys", case, "cpu", gpu.select_keys)


@pytest.mark.parametrize(("programs", "heads"), [(3, (71, 1)), (20, (8, 2)), (70, (6, 1))])
def test_one_sequence_in_many_parts(programs, heads, monkeypatch):
    """Few parts are merged by rows, many by columns."""
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
    H, K = heads
    tokens = 32 * programs + 7
    blocks = -(-tokens // 16)
    query, kv_cache = torch.randn(1, H, 40), torch.randn(blocks, 2, 16, K, 40)
    ints = (torch.randperm(blocks).view(1, -1), torch.tensor([tokens]), torch.tensor([0, 1]))
    call = (query, kv_cache, *(each.to(torch.int32) for each in ints), 0.2)
    attention.forget()
    try:
        got = gpu.paged_attention_with_lse(*call)
    finally:
        attention.forget()
    for mine, want in zip(got, cpu.paged_attention_with_lse(*call), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("columns", "kv_cache_dtype"), [(576, "fp8"), (656, "fp8_ds_mla")])
def test_latents_past_2_to_31(columns, kv_cache_dtype):
    """A latent cache whose last blocks start beyond 2^31 elements; only the pages that are touched exist."""
    N, B, R, P = 61_000, 64, 512, 64
    kv_cache = torch.empty(N, B, columns, dtype=torch.uint8)
    assert kv_cache[-2].storage_offset() > 2**31
    latent, rotated, slots = torch.randn(B + 3, R), torch.randn(B + 3, P), torch.arange(B + 3) + (N - 2) * B
    fp8 = {"k_scale": torch.tensor([0.02]) if kv_cache_dtype == "fp8" else None, "kv_cache_dtype": kv_cache_dtype}
    gpu.latent_cache_write(latent, rotated, kv_cache, slots, **fp8)
    small = torch.empty(2, B, columns, dtype=torch.uint8)
    cpu.latent_cache_write(latent, rotated, small, slots - (N - 2) * B, **fp8)
    query = torch.randn(1, 4, R + P).half()
    ints = [torch.tensor(each, dtype=torch.int32) for each in ([[N - 2, N - 1]], [B + 3], [0, 1])]
    got = gpu.paged_attention_with_lse(query, kv_cache, *ints, 0.05, value_head_size=R, **fp8)
    wanted = cpu.paged_attention_with_lse(query, small, ints[0] - (N - 2), *ints[1:], 0.05, value_head_size=R, **fp8)
    for mine, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, want, rtol=2e-3, atol=2e-3)
    key, _ = gpu.gather_kv(kv_cache, *ints[:2], B + 3, dtype=torch.float32, **fp8)
    assert torch.equal(key, cpu.gather_kv(small, ints[0] - (N - 2), ints[1], B + 3, dtype=torch.float32, **fp8)[0])


@pytest.mark.parametrize("case", ["decode-fp16", "mixed-fp32"])
def test_nan_reaches_the_rows_that_see_it(case):
    """A key of a sequence, whoever else has part of its work, and a query row: as on a CPU."""
    inputs = testing.case_named("paged_attention_with_lse", case).inputs("cpu")
    query, cache, tables, _, starts, *_ = inputs.args
    cache[tables[1, 0], 0, 0, 0, 3] = torch.nan  # its first key, of head 0
    query[int(starts[2]), -1, 5] = torch.nan
    for got, want in zip(
        gpu.paged_attention_with_lse(*inputs.args, **inputs.kwargs),
        cpu.paged_attention_with_lse(*inputs.args, **inputs.kwargs),
        strict=True,
    ):
        assert want.isnan().any()
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize(
    ("sliced", "changes"),
    [
        (True, {}),
        (True, {"layout": "HND", "B": 48, "heads": (8, 1)}),
        (False, {"B": 8}),  # a slice would lie in two blocks
        (False, {"layout": "X_PACKED"}),
        (False, {"dtype": torch.float32}),
        (False, {"stored": torch.float8_e4m3fn}),  # the interpreter has no instruction that converts pairs
        (False, {"heads": (16, 1)}),  # 16 packed rows
        (False, {"tokens": 3}),  # of 4 heads each: 16 packed rows
    ],
)
def test_key_tiles_are_sliced_where_they_can_be(sliced, changes, monkeypatch):
    """What chooses between the two ways to see a tile of keys; test_matches_reference runs both."""
    plans = []
    plan = tuning.choose_tiles

    def noted(*arguments):
        plans.append(plan(*arguments))
        return plans[-1]

    monkeypatch.setattr(tuning, "choose_tiles", noted)
    settings = {
        "layout": "NHD",
        "B": 16,
        "heads": (8, 2),
        "dtype": torch.float16,
        "stored": None,
        "tokens": 1,
        **changes,
    }
    (H, K), B, D, S, dtype = settings["heads"], settings["B"], 32, 2, settings["dtype"]
    storage = torch.zeros(layouts.kv_cache_shape(settings["layout"], 4, B, K, D), dtype=settings["stored"] or dtype)
    kv_cache, features = layouts.kv_cache_view(settings["layout"], storage), {}
    if settings["layout"] == "X_PACKED":
        kv_cache, features["value_cache"] = layouts.split_kv_cache(kv_cache, K, D)
    starts = torch.arange(S + 1, dtype=torch.int32) * settings["tokens"]
    query = torch.zeros(S * settings["tokens"], H, D, dtype=dtype)
    tables, lens = torch.zeros(S, 2, dtype=torch.int32), torch.full((S,), 5, dtype=torch.int32)
    attention._calls.clear(), attention._signatures.clear()
    gpu.paged_attention(query, kv_cache, tables, lens, starts, D**-0.5, **features)
    assert {bool(each.slices) for each in plans} == {sliced}


@pytest.mark.parametrize(
    ("heads", "slices", "together", "features"),
    [
        ((8, 2), 1, 1, {}),  # a slice of two blocks
        ((8, 2), 1, 2, {}),
        ((12, 4), 2, 2, {"sliding_window": 40, "soft_cap": 5.0, "alibi_slopes": torch.linspace(0.01, 1, 12)}),
    ],
)
def test_slices_of_several_blocks_and_units_of_two_heads(heads, slices, together, features, monkeypatch):
    """As on GPUs whose tables say so. What is NaN in one head of a unit does not reach the rows of the other."""
    plans = []
    plan = tuning.choose_tiles

    def changed(*arguments):
        plans.append(plan(*arguments)._replace(slices=slices, heads=together))
        return plans[-1]

    monkeypatch.setattr(tuning, "choose_tiles", changed)
    (H, K), B, D, lens = heads, 16, 32, [70, 0, 33, 5]
    torch.manual_seed(0)
    tables = torch.randperm(20, dtype=torch.int32).view(4, 5)
    query, cache = torch.randn(4, H, D, dtype=torch.float16), torch.randn(20, 2, B, K, D, dtype=torch.float16)
    cache[tables[0, 1], 0, 3, 0, 5] = cache[tables[2, 0], 1, 3, 1, 5] = torch.nan  # of a key, and of a value
    ints = tables, torch.tensor(lens, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    attention._calls.clear(), attention._signatures.clear()
    got = gpu.paged_attention_with_lse(query, cache, *ints, D**-0.5, **features)
    attention._calls.clear(), attention._signatures.clear()
    want = cpu.paged_attention_with_lse(query, cache, *ints, D**-0.5, **features)
    assert plans
    assert got[0].isnan().any()
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize(
    "others", [{}, {"attention_chunk": 200}, {"bidirectional_ranges": [(150, 170), (330, 341)]}], ids=list
)
@pytest.mark.parametrize("first", [20, 10**9])
@pytest.mark.parametrize("form", ["decode", "prefill", "latent", "x_packed"])
def test_blocks_between_first_tokens_and_window_are_not_read(form, first, others, monkeypatch):
    """Their entries in the block table are no blocks: a read would fail. Shares end on both sides of the gap."""
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", 7)
    B, window = 16, 30
    seqs = [(1, 300), (2, 350), (1, 40)] if form != "prefill" else [(40, 350), (33, 33), (70, 301)]
    spec = {
        "decode": testing.CacheSpec("nhd", 2, 32, block_size=B, dtype=torch.float16),
        "prefill": testing.CacheSpec("nhd", 2, 32, block_size=B, dtype=torch.float16),
        "latent": testing.CacheSpec("latent", 1, 40, 32, block_size=B, dtype=torch.float16),
        "x_packed": testing.CacheSpec("x_packed", 2, 32, block_size=B, dtype=torch.float16),
    }[form]
    case = testing.AttentionCase("gap", tuple(seqs), spec, padding=(0, 0))
    inputs = case.inputs()
    query, cache, tables, lens, *rest = inputs.args
    features = {**inputs.kwargs, **others, "sliding_window": window, "num_first_tokens": first}
    if "bidirectional_ranges" in others:
        features["bidirectional_ranges"] = torch.tensor([others["bidirectional_ranges"]] * 3, dtype=torch.int32)
    want = cpu.paged_attention_with_lse(query, cache, tables, lens, *rest, **features)
    holes = tables.clone()
    for s, (q_len, n) in enumerate(seqs):
        i, j = torch.arange(n - q_len, n), torch.arange(tables.shape[1] * B)
        f = Features(**{name: each for name, each in features.items() if name in Features._fields})
        seen = kept_keys(f, s, i, j, 8, spec.num_kv_heads, B).any(1)[0].view(-1, B).any(1)
        holes[s, ~seen] = 2**31 - 1
    if first < 100:
        assert (holes[0, : lens[0] // B] == 2**31 - 1).any()
    attention.forget()
    try:
        got = gpu.paged_attention_with_lse(query, cache, holes, lens, *rest, **features)
    finally:
        attention.forget()
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=4e-3, atol=4e-3)
