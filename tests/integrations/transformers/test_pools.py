"""Models whose layers see differently far, on a pool of blocks for each distance: the tokens of ``generate()``, and
blocks that come back."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.cache import (  # noqa: E402
    HybridCache,
    KVCache,
    blocks_within_reach,
)
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.inspection import CompileReport  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from tests.integrations.transformers.model_families import make_model as make_family  # noqa: E402
from tests.integrations.transformers.model_table import NEW_TOKENS, by_transformers  # noqa: E402
from tests.integrations.transformers.model_table import prompts as table_prompts  # noqa: E402
from tests.integrations.transformers.tiny_configs import CONFIGS, MORE_CONFIGS, WINDOW, B, expected, make_model, prompts  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=12)
HYBRIDS = ("gemma2", "gpt_oss", "gemma3", "llama4_chunks", "gemma3n_shared_kv")
GEMMA3: dict[str, Any] = dict(
    num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
)


@pytest.fixture(autouse=True, scope="module")
def _gemma3() -> Any:
    base = CONFIGS["gemma2"]().to_dict()
    shared = {name: base[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    shared |= {name: base[name] for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")}
    ids = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    MORE_CONFIGS["gemma3"] = lambda: transformers.Gemma3TextConfig(
        **shared, **ids, **GEMMA3, sliding_window=WINDOW, initializer_range=0.15
    )
    from tests.integrations.transformers.tiny_configs import SEEDS

    SEEDS["gemma3"] = 3
    yield
    del MORE_CONFIGS["gemma3"], SEEDS["gemma3"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_pools_that_are_just_large_enough(name: str) -> None:
    """Prompts longer than their windowed pool, chunked prefill, shared prefixes."""
    paged = PagedCausalLM(make_model(name))
    reach = {"attention_chunk": WINDOW} if name == "llama4_chunks" else {"sliding_window": WINDOW}
    window_blocks = blocks_within_reach(3, 8, B, **reach)
    cache = paged.allocate_kv_cache(128, B, num_window_blocks=window_blocks)
    assert isinstance(cache, HybridCache)
    assert [pool.num_blocks for pool in cache.pools] == [128, window_blocks]
    assert max(map(len, prompts())) > 2 * WINDOW
    most = [0, 0]

    def observe(_: object) -> None:
        for i, pool in enumerate(cache.pools):
            most[i] = max(most[i], pool.num_used_blocks)

    loop = GenerationLoop(paged, cache, max_num_seqs=3, max_num_tokens=8)
    assert loop.generate(prompts(), GREEDY, on_token=observe) == expected(name)
    assert loop.stats.preemptions == 0, "a windowed pool of that size is never the reason"
    assert cache.num_used_blocks == 0
    assert most[1] <= window_blocks < most[0], "windowed layers gave their blocks back"
    again = loop.generate(prompts()[-4:], GREEDY)
    assert again == expected(name)[-4:]


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("name", ["gemma3", "llama4_chunks"])
def test_preemption_and_shared_prefixes_in_all_pools(name: str, num_host_blocks: int) -> None:
    paged = PagedCausalLM(make_model(name))
    cache = paged.allocate_kv_cache(40, B, num_window_blocks=24, num_host_blocks=num_host_blocks)
    loop = GenerationLoop(paged, cache, max_num_seqs=16, max_num_tokens=40)
    assert loop.generate(prompts(), GREEDY) == expected(name)
    assert loop.stats.preemptions > 0
    assert (loop.stats.swapped_out > 0) == (num_host_blocks > 0)
    assert loop.stats.cached_tokens > 0
    assert cache.num_used_blocks == 0


def test_a_model_of_one_window_keeps_two_or_three_blocks() -> None:
    paged = PagedCausalLM(make_model("mistral"))
    cache = paged.allocate_kv_cache(5, B)
    assert isinstance(cache, KVCache)
    assert cache.sliding_window == WINDOW
    most = 0

    def observe(_: object) -> None:
        nonlocal most
        most = max(most, cache.num_used_blocks)

    loop = GenerationLoop(paged, cache, max_num_seqs=1, max_num_tokens=8)
    assert loop.generate(prompts(), GREEDY, on_token=observe) == expected("mistral")
    assert most <= 3
    longest = len(prompts()[11]) + 12
    assert longest > 5 * B
    keeps = GenerationLoop(paged, paged.allocate_kv_cache(64, B, keep_all=True), max_num_seqs=4)
    assert keeps.kv_cache.sliding_window == 0
    assert keeps.generate(prompts(), GREEDY) == expected("mistral")
    assert keeps.stats.peak_used_blocks > 12


@pytest.mark.slow  # 15 s each
@pytest.mark.parametrize(("name", "by_layer"), [("gemma3", True), ("llama4_chunks", False)])
def test_compiled_steps_serve_all_pools(name: str, by_layer: bool) -> None:
    """The whole step of a model with windows is compiled in test_transformers.py."""
    paged = PagedCausalLM(make_model(name))
    if by_layer:
        paged.compile_layers()
    cache = paged.allocate_kv_cache(56, B, num_window_blocks=40, num_host_blocks=56)
    with CompileReport(cache.layers) as report:
        loop = GenerationLoop(paged, cache, max_num_seqs=16, max_num_tokens=40, compile=not by_layer)
        loop.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert loop.generate(prompts(), GREEDY) == expected(name)
    assert report.cache_copies == 0, report.copies
    assert report.graph_breaks == 0
    assert by_layer or (report.graphs, report.recompiles) == (1, 0), report.recompile_reasons
    assert loop.stats.preemptions > 0


def test_a_cache_that_does_not_fit_the_model_is_refused() -> None:
    paged = PagedCausalLM(make_model("gemma2"))
    sizes = (paged.num_layers, 32, B, paged.num_kv_heads, paged.head_size)
    fits = paged.allocate_kv_cache(32, B)
    for cache, message in (
        (KVCache(1, 32, B, 2, 16), "kv_cache: expected one of 2 layers, like the model, got 1"),
        (KVCache(2, 32, B, 2, 8), "kv_cache: expected heads, head size and value head size"),
        (
            KVCache(*sizes, sliding_window=WINDOW),
            r"kv_cache: expected sliding_window 0 \(0 keeps all blocks\), .* layer 1",
        ),
        (KVCache(*sizes, attention_chunk=WINDOW), "kv_cache: expected attention_chunk 0"),
        (
            HybridCache.for_layers(*sizes, sliding_window=[0, WINDOW]),
            r"kv_cache: expected pools of layers \(1, 0\), like the model, got \(0, 1\)",
        ),
        (
            HybridCache.for_layers(*sizes, sliding_window=[WINDOW - 1, 0]),
            "kv_cache: expected sliding_window 8 .* layer 0, got 7",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            GenerationLoop(paged, cache)
    paged.check_kv_cache(fits)
    paged.check_kv_cache(KVCache(*sizes))
    paged.check_kv_cache(HybridCache.for_layers(*sizes, sliding_window=[4 * WINDOW, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "qwen3_moe", "deepseek_v3", "minicpm3"])
def test_cuda_graphs_over_every_kind_of_cache(family: str) -> None:
    """Pools, heads that differ by layer, values of another size: prompts and decodes are replayed."""
    torch.set_float32_matmul_precision("highest")
    model = make_family(family)
    want = by_transformers(model)
    model.to("cuda")
    if "moe" in family or "deepseek" in family:
        model.set_experts_implementation("batched_mm")  # others wait for the device
    paged = PagedCausalLM(model)
    cache = paged.allocate_kv_cache(128, B)
    loop = GenerationLoop(paged, cache, max_num_seqs=8, max_num_tokens=24, max_model_len=64, graph_mode="FULL")
    tokens = loop.generate(table_prompts(), SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    assert [list(each) for each in tokens] == want
    assert loop.graph_stats.replayed > 0


# The heads of Gemma-4's released models: 256 in layers with a window, 512 in the others.
GEMMA4: dict[str, Any] = dict(head_dim=256, global_head_dim=512, num_attention_heads=8, num_key_value_heads=2)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_released_head_sizes_of_gemma4(how: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = make_family("gemma4_text", **GEMMA4)
    want = by_transformers(model)
    paged = PagedCausalLM(model.to("cuda"))
    assert {spec.head_size for spec in paged.layers} == {256, 512}
    cache = paged.allocate_kv_cache(128, B)
    options: dict[str, Any] = dict(max_num_seqs=8, max_num_tokens=24, max_model_len=64, compile=how == "compiled")
    loop = GenerationLoop(paged, cache, graph_mode="FULL" if how == "captured" else "NONE", **options)
    tokens = loop.generate(table_prompts(), SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    assert [list(each) for each in tokens] == want
    assert (loop.graph_stats.replayed > 0) == (how == "captured")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "phimoe", "deepseek_v3", "granitemoe"])
def test_experts_in_half_precision_are_wrapped(family: str, dtype: torch.dtype) -> None:
    """Rounding may send a token to another expert; the trial run that wraps a model is not to call that an error."""
    for seed in range(3):
        PagedCausalLM(make_family(family, seed).to("cuda", dtype))
