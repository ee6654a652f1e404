"""Tiny Hugging Face models on a paged cache give the tokens that ``model.generate()`` gives, in eager and compiled."""

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.helpers.gpu import GPU

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.cache import KVCache  # noqa: E402
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.inspection import CompileReport  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM, attention  # noqa: E402
from paged_ops.integrations.transformers.probe import reach_of  # noqa: E402
from paged_ops.integrations.transformers.projections import fuse_projections  # noqa: E402
from paged_ops.layouts import Layout  # noqa: E402
from tests.integrations.transformers.model_families import make_model as make_family  # noqa: E402
from tests.integrations.transformers.tiny_configs import (  # noqa: E402
    COMMON,
    CONFIGS,
    MORE_CONFIGS,
    NEW_TOKENS,
    WINDOW,
    B,
    expected,
    generate_by_transformers,
    make_model,
    prompts,
)

GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)

# A change to one feature of each model after which its text differs: else equality would not test that feature.
FEATURES = {
    "mistral": {"sliding_window": 4 * WINDOW},
    "gemma2": {"sliding_window": 4 * WINDOW},
    "gemma2 ": {"attn_logit_softcapping": 200.0},
    "gpt_oss": {"sliding_window": 4 * WINDOW},
    "gpt_oss ": {"sinks": -100.0},
    "llama4_chunks": {"attention_chunk_size": 4 * WINDOW},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [*CONFIGS, *MORE_CONFIGS])
def test_greedy_tokens_equal_generate_in_eager(name: str) -> None:
    paged = PagedCausalLM(make_model(name))
    loop = GenerationLoop(paged, paged.allocate_kv_cache(256, B), max_num_seqs=16)
    assert loop.generate(prompts(), GREEDY) == expected(name)
    assert loop.stats.preemptions == 0


# Gemma-2 has all that Llama has, and windows, as Mistral. What is new in the others (a norm of queries and keys, sinks,
# experts) is compiled layer by layer below.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2"])
def test_greedy_tokens_equal_generate_compiled(name: str) -> None:
    paged = PagedCausalLM(make_model(name))
    # few blocks and a small budget: chunks of prompts, mixtures, swaps and shared prefixes in one graph
    kv_cache = paged.allocate_kv_cache(56, B, num_host_blocks=56)
    with CompileReport(kv_cache.layers) as report:
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40, compile=True)
        loop.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert loop.generate(prompts(), GREEDY) == expected(name)
            for first, last in ((0, 1), (3, 5), (5, 12)):
                assert loop.generate(prompts()[first:last], GREEDY) == expected(name)[first:last]
    assert (report.graphs, report.graph_breaks, report.recompiles) == (1, 0, 0), report.recompile_reasons
    assert report.cache_copies == 0, report.copies
    assert report.code[0].count("paged_ops.reshape_and_cache.default(") == 2
    assert report.code[0].count("paged_ops.paged_attention.list(") == 2
    assert loop.stats.swapped_out > 0
    assert loop.stats.cached_tokens > 0
    paged.model.set_attn_implementation("eager")
    with pytest.raises(Exception, match=r'attends through "paged_ops"'):
        loop.generate(prompts(), GREEDY)


# Kinds of layers, and the parts around them: the rotary embedding, of some once for each kind, and the last norm.
COMPILATIONS = {"qwen3": 1 + 2, "gpt_oss": 2 + 2}
# More layers of one kind.
LAYERS: dict[str, dict[str, Any]] = {"qwen3": dict(num_hidden_layers=5, layer_types=["full_attention"] * 5)}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILATIONS)
def test_one_compilation_for_all_layers_of_a_kind(name: str) -> None:
    model = make_model(name, **LAYERS.get(name, {}))
    want = generate_by_transformers(model)
    fuse_projections(model)
    paged = PagedCausalLM(model).compile_layers()
    kv_cache = paged.allocate_kv_cache(56, B, num_host_blocks=56)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40)
    with CompileReport(kv_cache.layers) as report:
        loop.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert loop.generate(prompts(), GREEDY) == want
    assert (report.graphs, report.graph_breaks) == (COMPILATIONS[name], 0), report.recompile_reasons
    assert report.cache_copies == 0, report.copies


def test_layers_that_are_none() -> None:
    paged = PagedCausalLM(make_model("llama"))
    paged.model.model.layers = torch.nn.Sequential(*paged.model.model.layers)
    with pytest.raises(ValueError, match=r"in a list of layers, got model.layers.0.self_attn in LlamaForCausalLM"):
        paged.compile_layers()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_generate_in_cuda_graphs(name: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = make_model(name).to(GPU)
    on_gpu = generate_by_transformers(model)
    paged = PagedCausalLM(model)
    if name == "gpt_oss":  # its experts wait for the device by default, in float32
        model.set_experts_implementation("batched_mm")
    num_blocks = 16 if name == "mistral" else 56  # where every layer has a window, blocks come back before they run out
    kv_cache = paged.allocate_kv_cache(num_blocks, B, num_host_blocks=56)
    with CompileReport(kv_cache.layers) as report:
        loop = GenerationLoop(
            paged, kv_cache, max_num_seqs=16, max_num_tokens=40, compile=True, graph_mode="FULL_DECODE_ONLY"
        )
        assert loop.generate(prompts(), GREEDY) == on_gpu
    assert (report.graph_breaks, report.recompiles, report.cache_copies) == (0, 0, 0), report.copies
    assert loop.graph_stats.replayed > 0
    assert loop.stats.swapped_out > 0


def with_rope(**rope_parameters: Any) -> Any:
    config = transformers.LlamaConfig(
        **{**COMMON, "max_position_embeddings": 64}, rope_parameters={"rope_theta": 1e4, **rope_parameters}
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def with_longrope(short: float, long: float) -> Any:
    return with_rope(
        rope_type="longrope",
        short_factor=[short] * 8,
        long_factor=[long] * 8,
        factor=2.0,
        original_max_position_embeddings=48,
    )


def test_frequencies_are_those_of_the_longest_text() -> None:
    model = with_longrope(1.0, 3.0)
    short = generate_by_transformers(with_longrope(1.0, 1.0))
    long = generate_by_transformers(with_longrope(3.0, 3.0))
    assert generate_by_transformers(model) == short != long, "no text is longer than 48"
    for max_model_len, want in ((None, long), (64, long), (48, short)):
        paged = PagedCausalLM(model, max_model_len=max_model_len)
        assert paged.max_model_len == (max_model_len or 64)
        assert run_step(paged) == want
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r"position embeddings are fixed to one length; .*unwrap\(\)"):
            model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
        assert generate_by_transformers(paged.unwrap()) == short
    for max_model_len in (0, 65, "64", 64.0):
        with pytest.raises(
            ValueError, match=f"max_model_len: expected 1 to 64, the model's positions, got {max_model_len}"
        ):
            PagedCausalLM(model, max_model_len=max_model_len)


def test_a_model_that_is_wrapped_again_has_the_frequencies_of_the_longest_text() -> None:
    model = with_longrope(1.0, 3.0)
    first = run_step(PagedCausalLM(model))
    assert run_step(PagedCausalLM(model)) == first
    dynamic = with_rope(rope_type="dynamic", factor=4.0)
    PagedCausalLM(dynamic)
    assert PagedCausalLM(dynamic, max_model_len=128).max_model_len == 128


def test_the_scale_of_phimoe_is_that_of_the_longest_text_whatever_the_batch() -> None:
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=8.0)
    rope |= dict(original_max_position_embeddings=32, short_mscale=1.0, long_mscale=1.3)
    model = make_family("phimoe", rope_parameters=rope, max_position_embeddings=256, sliding_window=None)
    paged = PagedCausalLM(model)
    rotary, states = model.model.rotary_emb, torch.zeros(1, 3, 64)
    alone = rotary(states, torch.tensor([[0, 1, 2]]))
    beside = rotary(states, torch.tensor([[0, 1, 60]]))
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a[:, :2], b[:, :2])
    assert paged.unwrap() is model


def test_frequencies_of_a_stretched_text() -> None:
    dynamic = dict(rope_type="dynamic", factor=4.0)
    stretched = 1e4 * ((4.0 * 256 / 64) - 3.0) ** (16 / 14)
    want = generate_by_transformers(with_rope(rope_type="default"))
    longer = generate_by_transformers(with_rope(rope_type="default", rope_theta=stretched))
    assert run_step(PagedCausalLM(with_rope(**dynamic))) == want != longer
    assert run_step(PagedCausalLM(with_rope(**dynamic), max_model_len=256)) == longer
    with pytest.raises(ValueError, match="max_model_len: expected 1 to 256"):
        PagedCausalLM(with_rope(**dynamic), max_model_len=257)
    with pytest.raises(ValueError, match="max_model_len: expected 1 to 256, the model's positions, got 0"):
        PagedCausalLM(with_rope(**dynamic), max_model_len=0)


def test_masks_of_later_tokens_are_refused() -> None:
    from transformers import masking_utils

    config = transformers.LlamaConfig(**COMMON, attn_implementation="paged_ops")
    rows = dict(config=config, inputs_embeds=torch.zeros(1, 5, 64), attention_mask=None)
    assert masking_utils.create_causal_mask(**rows, past_key_values=None) is None
    with pytest.raises(ValueError, match=r"attention_mask: expected causal, .* attends to later tokens"):
        masking_utils.create_bidirectional_mask(**rows)


def test_queries_are_scaled_by_their_positions() -> None:
    changes = dict(attn_temperature_tuning=True, floor_scale=4, attn_scale=1.0)
    want = generate_by_transformers(make_model("llama4_chunks", **changes))
    assert run_step(PagedCausalLM(make_model("llama4_chunks", **changes))) == want != expected("llama4_chunks")


@pytest.mark.parametrize("name", [*CONFIGS, *MORE_CONFIGS])
@torch.no_grad()
def test_the_tokens_mean_something(name: str) -> None:
    model = make_model(name)
    tokens = [token for output in expected(name) for token in output]
    assert len(set(tokens)) > 50
    gaps = []
    for prompt, output in zip(prompts(), expected(name), strict=True):
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        top = logits.topk(2).values
        gaps.append(float((top[:, 0] - top[:, 1]).min() / logits.abs().max()))
    assert min(gaps) > 5e-4, "some token is a matter of rounding: choose another seed"


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_changes_the_tokens(name: str) -> None:
    assert generate_by_transformers(make_model(name.strip(), **FEATURES[name])) != expected(name.strip())


@pytest.mark.parametrize("layout", [Layout.HND, Layout.INTERLEAVED, Layout.X_PACKED])
def test_layouts_of_the_cache(layout: Layout) -> None:
    paged = PagedCausalLM(make_model("llama"))
    loop = GenerationLoop(paged, paged.allocate_kv_cache(56, B, num_host_blocks=56, layout=layout), max_num_tokens=40)
    assert loop.generate(prompts(), GREEDY) == expected("llama")
    assert loop.stats.swapped_out > 0


def test_bfloat16_and_fp8_caches_run() -> None:
    paged = PagedCausalLM(make_model("qwen3").to(torch.bfloat16))
    for dtype in (None, torch.float8_e4m3fn):
        kv_cache = paged.allocate_kv_cache(256, 16, dtype=dtype)
        assert kv_cache.dtype == (dtype or torch.bfloat16)
        outputs = GenerationLoop(paged, kv_cache).generate(prompts(), GREEDY)
        same = sum(a[0] == b[0] for a, b in zip(outputs, expected("qwen3"), strict=True))
        assert same >= 10, "most first tokens survive the rounding"


def test_stop_tokens_are_the_models() -> None:
    model = make_model("llama")
    assert PagedCausalLM(model).stop_token_ids == ()
    for ids, expected_ids in ((5, (5,)), ([5, 7], (5, 7))):
        model.generation_config.eos_token_id = ids
        assert PagedCausalLM(model).stop_token_ids == expected_ids


def refused(name: str, **changes: Any) -> Any:
    config = getattr(transformers, name)(**{**COMMON, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def hrm() -> Any:
    kind = getattr(transformers, "HrmTextConfig", None)
    return refused("HrmTextConfig") if kind else pytest.skip("this release has no HRM")


def looks_ahead() -> Any:
    config = CONFIGS["gemma2"]()
    config.use_bidirectional_attention = True
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: transformers.GPTJForCausalLM(
                transformers.GPTJConfig(vocab_size=64, n_embd=32, n_head=4, n_layer=1, rotary_dim=4)
            ),
            "model: expected one that calls AttentionInterface of transformers, got GPTJForCausalLM",
        ),
        (lambda: make_model("llama").train(), "model: expected evaluation mode"),
        (
            lambda: SimpleNamespace(get_base_model=lambda: None, config=SimpleNamespace()),
            r"model: expected a model of transformers, got SimpleNamespace around one; pass its get_base_model\(\)",
        ),
        (
            lambda: on_two_devices(),
            "model: expected the weights on one device, got LlamaForCausalLM on cpu, meta; load it",
        ),
        (
            lambda: refused("RecurrentGemmaConfig", num_hidden_layers=3, lru_width=64),
            "model: expected layers of .* got 'linear_attention' in RecurrentGemmaForCausalLM",
        ),
        (
            lambda: refused("MiniMaxConfig", num_local_experts=2),
            "MiniMaxForCausalLM fails on a few tokens with a cache: MiniMax uses cache of its own",
        ),
        (
            lambda: transformers.LlamaForSequenceClassification(CONFIGS["llama"]()).eval(),
            "expected a causal language model, got LlamaForSequenceClassification.*AutoModelForCausalLM",
        ),
        (
            lambda: transformers.LlamaForTokenClassification(CONFIGS["llama"]()).eval(),
            "expected a causal language model, got LlamaForTokenClassification",
        ),
        (
            lambda: transformers.LlamaModel(CONFIGS["llama"]()).eval(),
            "expected a causal language model, got LlamaModel",
        ),
        (lambda: refused("DiffLlamaConfig"), "model.layers.0.self_attn attends twice in one step"),
        (lambda: hrm(), "layers.0.self_attn attends twice in one step"),
        (lambda: looks_ahead(), "is_causal=False|asks for another mask"),
    ],
    ids=[
        "attention of its own",
        "training",
        "adapters",
        "device_map",
        "linear",
        "linear of its own",
        "sequence_classifier",
        "token_classifier",
        "decoder",
        "twice",
        "reused",
        "ahead",
    ],
)
def test_models_that_cannot_be_served(make: Any, message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        PagedCausalLM(model)
    assert getattr(model.config, "_attn_implementation", "eager") in ("eager", "sdpa"), "as it was"


def on_two_devices() -> Any:
    """A model as a device_map leaves it, with a layer elsewhere."""
    model = make_model("llama")
    model.model.layers[1].to("meta")
    return model


def test_a_cache_is_on_the_device_of_the_model() -> None:
    paged = PagedCausalLM(make_model("llama"))
    sizes = paged.num_layers, 4, 16, paged.num_kv_heads, paged.head_size
    with pytest.raises(ValueError, match="kv_cache: expected one on cpu, like the model, got one on meta"):
        paged.check_kv_cache(KVCache(*sizes, device="meta"))


def test_a_cache_in_fp8_has_a_dtype_of_fp8() -> None:
    paged = PagedCausalLM(make_model("llama"))
    kv_cache = paged.allocate_kv_cache(8, dtype=torch.uint8, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"kv_cache: expected a float8 dtype, .* in fp8, got torch.uint8"):
        GenerationLoop(paged, kv_cache)


def masked(make_mask: Any) -> Any:
    """A Llama that asks for the mask that ``make_mask(**arguments)`` gives."""
    from transformers.models.llama import modeling_llama

    model = make_model("llama")
    original = modeling_llama.create_causal_mask

    def forward(*args: Any, **kwargs: Any) -> Any:
        modeling_llama.create_causal_mask = make_mask
        try:
            return type(model.model).forward(model.model, *args, **kwargs)
        finally:
            modeling_llama.create_causal_mask = original

    model.model.forward = forward
    return model


def test_what_a_mask_asks_for_is_what_attention_applies() -> None:
    from transformers import masking_utils

    def windows(**arguments: Any) -> Any:
        config = copy.copy(arguments.pop("config"))
        config.sliding_window = WINDOW
        return masking_utils.create_sliding_window_causal_mask(config=config, **arguments)

    def overlaid(**arguments: Any) -> Any:
        return masking_utils.create_causal_mask(**arguments, or_mask_function=lambda b, h, q, k: k == q + 1)

    def of_the_tokens(**arguments: Any) -> Any:
        seen = torch.zeros(1, 64, dtype=torch.long)
        return masking_utils.create_causal_mask(**arguments, block_sequence_ids=seen)

    def ahead(**arguments: Any) -> Any:
        arguments.pop("position_ids", None)
        arguments.pop("past_key_values", None)
        return masking_utils.create_bidirectional_mask(**arguments)

    def changed(**arguments: Any) -> Any:
        return masking_utils.create_causal_mask(**arguments) + 0.5

    def none(**arguments: Any) -> Any:
        return None

    paged = PagedCausalLM(masked(windows))
    assert {layer.window for layer in paged.layers} == {WINDOW}
    loop = GenerationLoop(paged, paged.allocate_kv_cache(256, B), max_num_seqs=16)
    tokens = loop.generate(prompts(), GREEDY)
    assert tokens == generate_by_transformers(paged.unwrap()) != expected("llama")
    for make_mask, message in (
        (overlaid, "asks for another mask"),
        (of_the_tokens, "asks for another mask"),
        (ahead, "asks for another mask"),
        (changed, "makes its own mask or bias"),
        (none, "attends without a mask"),
    ):
        with pytest.raises(ValueError, match=f"model: LlamaForCausalLM cannot be served: .*layers.0.* {message}"):
            PagedCausalLM(masked(make_mask))


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 4096])
def test_reach_of_masks(size: int) -> None:
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_causal_mask_function(size)
    chunk = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    for length in (5000, 2**20):
        assert reach_of(causal, length) == (0, 0)
        assert reach_of(window, length) == (size, 0)
        assert reach_of(chunk, length) == ((1, 0) if size == 1 else (0, size))
        assert reach_of(masking_utils.bidirectional_mask_function, length) is None
        if not 7 <= size < length // 2:
            continue
        for other in (
            lambda b, h, q, k: (q - k).abs() < size,
            masking_utils.and_masks(window, lambda b, h, q, k: k != 3),
            masking_utils.and_masks(causal, lambda b, h, q, k: q - k < size - q % 2),
            masking_utils.and_masks(causal, lambda b, h, q, k: (q + 3) // size == (k + 3) // size),
            masking_utils.or_masks(window, lambda b, h, q, k: (k < 2) & (k <= q)),
        ):
            assert reach_of(other, length) is None
    assert reach_of(window, size) == (0, 0), "no text is as long"


def test_state_across_tokens_is_refused() -> None:
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x + x.roll(1, dims=1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, where they differ by .*: it mixes tokens outside"):
        PagedCausalLM(model)
    assert model.config._attn_implementation == "eager" and not hasattr(model, "paged_wrapping")


def test_a_cache_that_forgets_what_the_mask_shows_is_refused() -> None:
    config = transformers.MoshiConfig(**COMMON, sliding_window=WINDOW)
    model = transformers.MoshiForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"keeps 8 tokens of model.layers.0.self_attn, and its mask shows all"):
        PagedCausalLM(model)
    PagedCausalLM(model, max_model_len=WINDOW)


def test_whatever_fails_at_wrapping_is_a_reason() -> None:
    model = make_model("llama")
    norm = model.model.norm

    def fails_in_a_batch(x: torch.Tensor) -> torch.Tensor:
        if "paged" in model.config._attn_implementation:
            raise KeyError("of a batch")
        return type(norm).forward(norm, x)

    norm.forward = fails_in_a_batch
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be served: KeyError: 'of a batch'"):
        PagedCausalLM(model)
    norm.forward = lambda x: x.missing
    with pytest.raises(ValueError, match=r"LlamaForCausalLM fails on a few tokens by itself: .*missing"):
        PagedCausalLM(model)
    assert model.config._attn_implementation == "eager" and not hasattr(model, "paged_wrapping")


def run_step(paged: Any) -> Any:
    return GenerationLoop(paged, paged.allocate_kv_cache(256, B), max_num_seqs=16).generate(prompts(), GREEDY)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unwrap_gives_the_model_back(compiled: bool) -> None:
    model = make_model("llama")
    fuse_projections(model)
    paged = PagedCausalLM(model)
    if compiled:
        paged.compile_layers()
    assert run_step(paged) == expected("llama")
    with pytest.raises(ValueError, match=r"(kv_caches|layers are compiled).*unwrap\(\)"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    assert paged.unwrap() is model
    assert model.config._attn_implementation == "eager"
    assert not any(hasattr(module, "paged_attending") or "forward" in vars(module) for module in model.modules())
    assert not any(module._compiled_call_impl for module in model.modules())
    assert generate_by_transformers(model) == expected("llama")
    with pytest.raises(ValueError, match=r"after unwrap\(\), .*wrap it again"):
        run_step(paged)
    assert run_step(PagedCausalLM(model)) == expected("llama")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda paged: pickle.loads(pickle.dumps(paged))])
def test_a_copy_is_compiled_too(copied: Any) -> None:
    paged = PagedCausalLM(make_model("llama")).compile_layers(backend="eager")
    names = [name for name, module in paged.model.named_modules() if module._compiled_call_impl]
    other = copied(paged)
    paged.unwrap()
    assert names == [name for name, module in other.model.named_modules() if module._compiled_call_impl] != []
    before = counters["stats"]["unique_graphs"]
    assert run_step(other) == expected("llama")
    assert counters["stats"]["unique_graphs"] - before == 3, "the layers, the rotary embedding, the last norm"
    assert generate_by_transformers(other.unwrap()) == expected("llama")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_whose_attention_was_changed_is_an_error(compiled: bool) -> None:
    paged = PagedCausalLM(make_model("llama"))
    if compiled:
        paged.compile_layers()
    paged.model.set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match=r'attends through "paged_ops", as when it was wrapped, got "sdpa"; .*unwrap\(\)'
    ):
        run_step(paged)
    if compiled:
        with pytest.raises(ValueError, match=r"its layers are compiled for paged attention; .*unwrap\(\)"):
            paged.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    paged.model.set_attn_implementation("paged_ops")
    if not compiled:
        assert run_step(paged) == expected("llama")
    paged.model.set_attn_implementation("sdpa")
    assert generate_by_transformers(paged.unwrap()) == expected("llama")


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_pass_no_arguments(compiled: bool) -> None:
    config = transformers.NemotronConfig(**COMMON)
    torch.manual_seed(0)
    model = transformers.NemotronForCausalLM._from_config(config, attn_implementation="eager").eval()
    want = generate_by_transformers(model)
    paged = PagedCausalLM(model)
    if compiled:
        paged.compile_layers(backend="eager")
    assert run_step(paged) == want
    assert generate_by_transformers(paged.unwrap()) == want
    assert not any("forward" in vars(module) or type(module).__name__.startswith("Paged") for module in model.modules())


def test_arguments_that_are_lost_are_a_reason() -> None:
    model = make_model("llama")
    for layer in model.model.layers:
        attention_ = layer.self_attn

        def forward(*args: Any, _inner: Any = attention_.forward, **kwargs: Any) -> Any:
            return _inner(*args, **{name: each for name, each in kwargs.items() if name != "kv_caches"})

        attention_.forward = forward
    with pytest.raises(ValueError, match="model: expected one that passes keyword arguments to attention"):
        PagedCausalLM(model)
    assert model.config._attn_implementation == "eager" and not hasattr(model, "paged_wrapping")


def test_layers_reused_and_layers_unknown_are_errors() -> None:
    paged = PagedCausalLM(make_model("llama"))
    paged.model.model.layers.append(copy.deepcopy(paged.model.model.layers[0]))
    del paged.model.model.layers[2].self_attn.paged_attending
    paged.model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="model: expected a layer that attended when the model was wrapped"):
        run_step(paged)


def test_wrapping_twice_starts_anew() -> None:
    model = make_model("llama")
    first = PagedCausalLM(model).compile_layers()
    second = PagedCausalLM(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert run_step(second) == expected("llama")
    with pytest.raises(ValueError, match="wrap it again"):
        run_step(first)
    assert generate_by_transformers(second.unwrap()) == expected("llama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask: expected none"),
        ({"dropout": 0.1}, "dropout: expected none"),
        ({"output_attentions": True}, "output_attentions: expected none"),
        ({"is_causal": False}, "is_causal=False: expected none"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias: expected none"),
        (
            {"query": torch.zeros(2, 4, 3, 16)},
            r"query: expected the batch as one row \[1, H, T, D\], got \[2, 4, 3, 16\]",
        ),
        ({}, "model: expected a layer that attended when the model was wrapped, got Module"),
    ],
)
def test_arguments_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    kv_cache = KVCache(1, 4, B, 2, 16)
    module = torch.nn.Module()
    arguments: dict[str, Any] = dict(
        query=torch.zeros(1, 4, 3, 16),
        key=torch.zeros(1, 2, 3, 16),
        value=torch.zeros(1, 2, 3, 16),
        attention_mask=None,
        kv_caches=kv_cache.layers,
        attention_metadata=object(),  # never read
    )
    with pytest.raises(ValueError, match=message):
        attention(module, **{**arguments, **changes})
    assert not kv_cache.layers[0].any()
