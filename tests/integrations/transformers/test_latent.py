"""Models of latent attention cache latents, and give the tokens of ``generate()``: eager, compiled, in chunks.

test_model_table.py has every family of the installed transformers; these are the shapes and options.
"""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.gpu import GPU

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.cache import KVCache  # noqa: E402
from paged_ops.fp8 import dequantise_rows, quantise_rows  # noqa: E402
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.inspection import CompileReport  # noqa: E402
from paged_ops.integrations import expanded as expanded_latents  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from paged_ops.integrations.transformers import latent as latent_attention  # noqa: E402
from paged_ops.integrations.transformers.projections import fuse_projections  # noqa: E402
from paged_ops.layouts import Layout  # noqa: E402
from paged_ops.metadata import AttentionMetadataBuilder, Batch  # noqa: E402
from tests.integrations.transformers.latent_configs import CONFIGS, H, P, R  # noqa: E402
from tests.integrations.transformers.tiny_configs import generate_by_transformers, prompts  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=12)


def make_model(name: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = CONFIGS[name]()
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    options: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


@functools.cache
def expected(name: str) -> list[list[int]]:
    return generate_by_transformers(make_model(name))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("latent", [True, False])
def test_tokens_equal_generate(name: str, latent: bool) -> None:
    paged = PagedCausalLM(make_model(name), latent=latent)
    sizes = (1, R + P, R) if latent else (H, 16 + P, 12)
    assert (paged.num_kv_heads, paged.head_size, paged.value_head_size) == sizes
    kv_cache = paged.allocate_kv_cache(64, 5, num_host_blocks=64)  # chunks of prompts, mixtures, prefixes, swaps
    assert (kv_cache.layout is Layout.LATENT) == (paged.layout is Layout.LATENT) == latent
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40)
    assert loop.generate(prompts(), GREEDY) == expected(name)
    assert loop.stats.cached_tokens > 0 and loop.stats.swapped_out > 0


@pytest.mark.parametrize(("name", "window"), [("v3", 1 << 19), ("minicpm3", 10 * H)])
def test_many_new_tokens_attend_by_keys_of_all_heads(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedCausalLM(make_model(name))
    chosen, windows = set(), [0]
    attend = latent_attention._expanded

    def expands(new: int, tokens: int, sizes: Any) -> bool:
        chosen.add(new > 3)
        return new > 3

    def counted(*arguments: Any) -> Any:
        windows.append(len(arguments[4]))
        return attend(*arguments)

    monkeypatch.setattr(latent_attention, "expands", expands)
    monkeypatch.setattr(latent_attention, "FEWEST_TOKENS", 2)
    monkeypatch.setattr(expanded_latents, "WINDOW", window)
    monkeypatch.setattr(latent_attention, "_expanded", counted)
    kv_cache = paged.allocate_kv_cache(64, 5, num_host_blocks=64)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40)
    assert loop.generate(prompts(), GREEDY) == expected(name)
    assert chosen == {True, False}
    assert (max(windows) > 2) == (window < 1 << 19)
    assert loop.stats.cached_tokens > 0 and loop.stats.swapped_out > 0


@pytest.mark.parametrize("name", ["v2_lite", "v3"])
def test_queries_and_latents_by_one_product(name: str) -> None:
    model = make_model(name)
    assert fuse_projections(model) == 3 + 3, "each attention, each mlp that is no list of experts"
    loop = GenerationLoop(paged := PagedCausalLM(model), paged.allocate_kv_cache(256, 16))
    assert loop.generate(prompts(), GREEDY) == expected(name)


def test_rows_that_hold_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of float32 latents that are rounded as such rows before they are written."""
    model = make_model("v3", kv_lora_rank=512, qk_rope_head_dim=64, qk_head_dim=80, head_dim=64, num_hidden_layers=1)
    paged, texts = PagedCausalLM(model), []
    for name in ("fp8_ds_mla", "auto"):
        kv_cache = paged.allocate_kv_cache(64, 5, num_host_blocks=64, kv_cache_dtype=name)
        assert kv_cache.layers[0].shape == ((64, 5, 656) if name == "fp8_ds_mla" else (64, 5, 576))
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40)
        texts.append(loop.generate(prompts(), GREEDY))
        write = latent_attention.latent_cache_write

        def rounded(latent: Any, rotated: Any, *arguments: Any, write: Any = write, **options: Any) -> None:
            rows = dequantise_rows(quantise_rows(latent, rotated), torch.float32)
            write(rows[:, :512], rows[:, 512:], *arguments, **options)

        monkeypatch.setattr(latent_attention, "latent_cache_write", rounded)
    assert texts[0] == texts[1]
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"head_size: expected 576 with kv_cache_dtype='fp8_ds_mla', got 40"):
        PagedCausalLM(make_model("v3")).allocate_kv_cache(64, kv_cache_dtype="fp8_ds_mla")


def test_when_keys_of_all_heads_are_made() -> None:
    """From how many new tokens on, by history."""
    for heads, wanted in ((128, [1194, 297, 187]), (16, [3028, 1069, 296])):
        sizes = latent_attention.Sizes(heads, 512, 128, 128)
        for history, fewest in zip((0, 4096, 32768), wanted, strict=True):
            assert not latent_attention.expands(fewest - 1, fewest - 1 + history, sizes)
            assert latent_attention.expands(fewest, fewest + history, sizes)


def step_of(lens: list[int], new: list[int], padding: int = 0) -> Any:
    starts, lens_ = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens_,
        seq_lens=lens_,
        slot_mapping=torch.zeros(sum(new) + padding, dtype=torch.int64),
        max_query_len=max(new),
    )


def test_the_runs_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that attend in the same way do so together, if the keys of all heads are not too many."""
    monkeypatch.setattr(latent_attention, "expands", lambda new, tokens, sizes: new > 100)
    monkeypatch.setattr(expanded_latents, "WINDOW", 1000 * H)
    module = make_model("v3").model.layers[0].self_attn
    runs = functools.partial(latent_attention.runs_of, module=module, block_size=16)
    step = step_of([500, 700, 300, 400, 5000, 3000, 0], [1, 2, 200, 400, 1500, 1, 0], 7)
    assert runs(step) == [
        (0, 2, (0, 3), ()),
        (2, 4, (3, 603), ((0, 700),)),
        (4, 5, (603, 2103), ((0, 992), (992, 992), (1984, 992), (2976, 512), (3488, 1512))),
        (5, 7, (2103, 2104), ()),
    ]
    assert runs(step_of([500, 90], [1, 90], 50)) == [(0, 2, (0, 141), ())], "none: one run with the padding"
    monkeypatch.setattr(latent_attention, "expands", None)
    assert runs(step_of([500] * 200, [1] * 200, 0)) == [(0, 200, (0, 200), ())], "decodes: no sequence is looked at"


def test_many_windows_round_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, 64 windows are less than twice as far off as one."""
    torch.manual_seed(3)
    new, n, size = 8, 1024, 16
    weight = torch.randn(H * 2 * size, R).bfloat16()
    cache = torch.randn(n // 16, 16, R + P).bfloat16()
    shapes = (1, H, new, size + P), (1, 1, new, R), (1, 1, new, P)
    query, latent, rotated = (torch.randn(shape).bfloat16() for shape in shapes)
    builder = AttentionMetadataBuilder(16, 1, new, n // 16, num_blocks=n // 16)
    metadata = builder.build(0, Batch([new], [n - new], torch.arange(n // 16)[None]))
    features: dict[str, Any] = dict(sliding_window=0, attention_chunk=0, soft_cap=0.0, sinks=None)
    monkeypatch.setattr(latent_attention, "FEWEST_TOKENS", new)
    monkeypatch.setattr(latent_attention, "expands", lambda *_: True)

    def attended(window: int, dtype: torch.dtype) -> torch.Tensor:
        linear = torch.nn.Linear(R, H * 2 * size, bias=False, dtype=dtype)
        linear.weight.data.copy_(weight)
        module = SimpleNamespace(kv_lora_rank=R, qk_nope_head_dim=size, v_head_dim=size, kv_b_proj=linear)
        monkeypatch.setattr(expanded_latents, "WINDOW", window * H)
        states = (each.to(dtype) for each in (query, latent, rotated, cache))
        step = metadata.pool(0), metadata, 0.02
        with torch.no_grad():
            return latent_attention.attend(module, *states, *step, writes=True, bidirectional_ranges=None, **features)

    right = attended(n, torch.float32)
    one, many = (float((attended(window, torch.bfloat16) - right).norm()) for window in (n, 16))
    assert 0 < many < 2 * one


def test_the_texts_are_no_repetitions() -> None:
    for name in CONFIGS:
        assert len({token for text in expected(name) for token in text}) > 50, name


@pytest.mark.slow
def test_tokens_equal_generate_compiled() -> None:
    model = make_model("minicpm3", num_hidden_layers=1)
    want = generate_by_transformers(model)
    paged = PagedCausalLM(model)
    kv_cache = paged.allocate_kv_cache(56, 5, num_host_blocks=56)
    with CompileReport(kv_cache.layers) as report:
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=16, max_num_tokens=40, compile=True)
        loop.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert loop.generate(prompts(), GREEDY) == want
    assert (report.graphs, report.graph_breaks, report.recompiles) == (1, 0, 0), report.recompile_reasons
    assert report.cache_copies == 0, report.copies
    assert report.code[0].count("paged_ops.latent_cache_write.default(") == 1


@pytest.mark.slow
def test_tokens_equal_generate_with_compiled_layers() -> None:
    torch._dynamo.utils.counters.clear()
    paged = PagedCausalLM(make_model("v3")).compile_layers(backend="aot_eager")
    loop = GenerationLoop(paged, paged.allocate_kv_cache(96, 4), max_num_seqs=16, max_num_tokens=40)
    loop.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert loop.generate(prompts(), GREEDY) == expected("v3")
    # a layer without experts, one for all with experts, the rotary embedding and the last norm
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_compiled_layers_leave_steps_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedCausalLM(make_model("minicpm3", num_hidden_layers=2)).compile_layers(backend="eager")
    many, texts, expanded, attend = [[(7 * i) % 251 for i in range(480)]], [], [0], latent_attention._expanded

    def counted(*arguments: Any) -> Any:
        expanded[-1] += 1
        return attend(*arguments)

    monkeypatch.setattr(latent_attention, "expands", lambda new, tokens, sizes: new >= 300)
    monkeypatch.setattr(latent_attention, "_expanded", counted)
    for size in (320, 290):  # steps of 320 and 160 tokens, and of 290 and 190
        loop = GenerationLoop(paged, paged.allocate_kv_cache(130, 4), max_num_tokens=size)
        texts.append(loop.generate(many, GREEDY))
        expanded.append(0)
    assert texts[0] == texts[1] and expanded == [2, 0, 0], "each layer, once"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["whole", "layers"])
def test_tokens_equal_generate_in_cuda_graphs(name: str, how: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = make_model(name).to(GPU)
    want = generate_by_transformers(model)
    if name != "minicpm3":
        model.set_experts_implementation("batched_mm")
    paged = PagedCausalLM(model)
    if how == "layers":
        paged.compile_layers()
    kv_cache = paged.allocate_kv_cache(64, 5, num_host_blocks=64)
    loop = GenerationLoop(
        paged,
        kv_cache,
        max_num_seqs=16,
        max_num_tokens=40,
        compile=how == "whole",
        graph_mode="FULL_DECODE_ONLY",
    )
    assert loop.generate(prompts(), GREEDY) == want
    assert loop.graph_stats.replayed > 0


def test_a_token_takes_one_row_of_each_layer() -> None:
    paged = PagedCausalLM(make_model("v3"))
    kv_cache = paged.allocate_kv_cache(7, 5)
    assert [tuple(layer.shape) for layer in kv_cache.layers] == [(7, 5, R + P)] * 3
    heads = PagedCausalLM(paged.model, latent=False).allocate_kv_cache(7, 5)
    assert heads.nbytes == kv_cache.nbytes * H * (16 + P + 12) // (R + P)


def test_bfloat16_and_fp8_latents() -> None:
    paged = PagedCausalLM(make_model("v3").to(torch.bfloat16))
    for dtype in (None, torch.float8_e4m3fn):
        kv_cache = paged.allocate_kv_cache(256, 16, dtype=dtype)
        assert kv_cache.dtype == (dtype or torch.bfloat16) and kv_cache.layout is Layout.LATENT
        outputs = GenerationLoop(paged, kv_cache).generate(prompts(), GREEDY)
        same = sum(a[0] == b[0] for a, b in zip(outputs, expected("v3"), strict=True))
        assert same >= 9, "most first tokens survive the rounding"


def test_weights_may_change() -> None:
    paged, other = PagedCausalLM(make_model("v3")), make_model("v3")
    for module in other.modules():
        if hasattr(module, "kv_b_proj"):
            torch.nn.init.normal_(module.kv_b_proj.weight, std=0.2)
    paged.model.load_state_dict(other.state_dict())
    texts = GenerationLoop(paged, paged.allocate_kv_cache(256, 16)).generate(prompts(), GREEDY)
    assert texts == generate_by_transformers(other) != expected("v3")


def test_unwrap_gives_the_model_back() -> None:
    paged = PagedCausalLM(make_model("v2_lite"))
    attention = paged.model.model.layers[0].self_attn
    assert "expand_kv" in vars(attention)
    with pytest.raises(ValueError, match="attention_metadata: expected one, and kv_caches"):
        paged.model.generate(torch.tensor([prompts()[3]]), max_new_tokens=2)
    model = paged.unwrap()
    assert "expand_kv" not in vars(attention)
    assert generate_by_transformers(model) == expected("v2_lite")
    copy.deepcopy(model)


def test_a_projection_of_another_kind_keeps_whole_keys() -> None:
    class Noted(torch.nn.Linear):  # stands for a quantised layer, whose weight is no matrix
        pass

    model = make_model("v3")
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            weight = module.kv_b_proj.weight
            module.kv_b_proj = Noted(R, len(weight), bias=False)
            module.kv_b_proj.weight = weight
    paged = PagedCausalLM(model)
    assert paged.num_kv_heads == H and not paged.layers[0].latent
    texts = GenerationLoop(paged, paged.allocate_kv_cache(256, 16)).generate(prompts(), GREEDY)
    assert texts == expected("v3")


def test_other_caches_are_refused() -> None:
    paged = PagedCausalLM(make_model("v3"))
    with pytest.raises(ValueError, match=r"layout: expected LATENT, or PagedCausalLM\(model, latent=False\), got"):
        paged.allocate_kv_cache(8, layout="HND")
    paged.check_kv_cache(paged.allocate_kv_cache(8, layout="LATENT"))
    with pytest.raises(ValueError, match=r"kv_cache: expected latents: True, in layer 0, got"):
        paged.check_kv_cache(KVCache(3, 8, 16, 1, R + P, value_head_size=R))
    with pytest.raises(ValueError, match=r"kv_cache: expected heads, head size and value head size \(1, 40, 32\)"):
        paged.check_kv_cache(KVCache(3, 8, 16, H, 24, value_head_size=12))
    whole = PagedCausalLM(paged.model, latent=False)
    with pytest.raises(ValueError, match=r"kv_cache: expected heads, head size and value head size"):
        whole.check_kv_cache(paged.allocate_kv_cache(8))
