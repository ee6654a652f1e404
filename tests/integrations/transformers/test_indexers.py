"""Models with an indexer attend to selected keys alone, and give the tokens of ``generate()``.

test_model_table.py has every family of the installed transformers; these are prompts many times longer than what is
selected, with shared prefixes, chunks and swaps.
"""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.gpu import GPU

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.inspection import CompileReport  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM, indexers  # noqa: E402
from paged_ops.integrations.transformers.continuous_batching import attention as attention_of_batches  # noqa: E402
from paged_ops.integrations.transformers.refusals import refuse_context  # noqa: E402
from paged_ops.integrations.transformers.wrapping import Wrapping  # noqa: E402
from tests.integrations.transformers.indexed_models import GREEDY, generate_by_transformers, prompts  # noqa: E402
from tests.integrations.transformers.model_families import OVERRIDES, make_model  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "minimax_m3_vl_text": dict(
        index_topk_blocks=3, index_block_size=2, layer_types=["full_attention", *["minimax_m3_sparse"] * 3]
    ),
    "axk2": {},
    "hy_v4": dict(indexer_types=["full", "full", "shared", "shared"]),
    "dots3_note_text": {},
    "qwen4_exp_text": dict(
        layer_types=["indexed_attention"] * 4, ple_layer_ids=None, indexer_budget=10, indexer_compress_ratio=5
    ),
}
INDEX_CACHES = {
    "deepseek_v32": 4,
    "glm_moe_dsa": 2,
    "minimax_m3_vl_text": 3,
    "axk2": 4,
    "hy_v4": 2,
    "dots3_note_text": 2,
    "qwen4_exp_text": 4,
}


def model_of(family: str, **changes: Any) -> Any:
    return make_model(family, **{**FAMILIES[family], **changes})


def two_layers_of(family: str, **others: Any) -> Any:
    """With an indexer and without: the first or the last layer."""
    changes = {
        name: value[:2] for name, value in {**OVERRIDES[family], **FAMILIES[family]}.items() if type(value) is list
    }
    return model_of(family, num_hidden_layers=2, **{**changes, **others})


def generate(paged: Any, kv_cache: Any = None) -> list[list[int]]:
    kv_cache = paged.allocate_kv_cache(64, 5) if kv_cache is None else kv_cache
    return GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24).generate(prompts(), GREEDY)


@functools.cache
def expected(family: str) -> list[list[int]]:
    return generate_by_transformers(model_of(family))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate(family: str) -> None:
    paged = PagedCausalLM(model_of(family))
    kv_cache = paged.allocate_kv_cache(22, 5, num_host_blocks=64)  # few, so that a sequence is swapped out
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24)
    assert loop.generate(prompts(), GREEDY) == expected(family)
    assert loop.stats.cached_tokens > 0 and loop.stats.swapped_out > 0
    index_caches = [
        layer for layer, spec in zip(kv_cache.layers, paged.layers, strict=True) if not spec.value_head_size
    ]
    assert {tuple(layer.shape[1:]) for layer in index_caches} == {(5, 16)}
    assert len(index_caches) == INDEX_CACHES.get(family, len(index_caches))


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_tokens_differ_when_the_selection_is_ignored(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    select = indexers.select

    def everything(module: Any, index: Any, *arguments: Any) -> Any:
        listed = select(module, index, *arguments)
        return torch.arange(80, dtype=torch.int32).expand(*listed.shape[:2], 80).contiguous()

    paged = PagedCausalLM(model_of(family))
    monkeypatch.setattr(indexers, "select", everything)
    texts = generate(paged)
    assert texts[0][:5] == expected(family)[0][:5], "so few tokens are all selected"
    assert sum(a != b for a, b in zip(texts[2:], expected(family)[2:], strict=True)) >= 2


def test_of_equal_scores_the_first_keys_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few heads, relu makes many scores 0. transformers then takes any keys; here it takes the first ones."""
    model, ties, topk = model_of("deepseek_v32", index_n_heads=4), [], torch.Tensor.topk

    def stable(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if k != 8:  # of experts, or all keys
            return topk(scores, k, dim, **options)
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        ties.append(scores.shape[-1] > k and bool((values[..., k - 1] == values[..., k]).any()))
        return SimpleNamespace(indices=indices[..., :k])

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", stable)
        want = generate_by_transformers(model)
    assert any(ties) and generate(PagedCausalLM(model)) == want


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_tokens_differ_when_index_keys_do_not_move_with_their_blocks(family: str) -> None:
    paged = PagedCausalLM(model_of(family))
    kept = [layer for layer, spec in enumerate(paged.layers) if spec.value_head_size]
    texts = []
    for moved in (range(len(paged.layers)), kept):
        kv_cache = paged.allocate_kv_cache(22, 5, num_host_blocks=64)
        kv_cache.by_block = lambda layers, moved=moved: [layers[layer] for layer in moved]
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24)
        texts.append(loop.generate(prompts(), SamplingParams(max_new_tokens=20, stop_token_ids=())))
        assert loop.stats.swapped_out > 0
    assert texts[0] != texts[1] and [text[:8] for text in texts[0]] == expected(family)


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("minimax_m3_vl_text", "qwen4_exp_text")]


@pytest.mark.parametrize("family", ["glm_moe_dsa", *SLOW])
def test_compiled_layers(family: str) -> None:
    paged = PagedCausalLM(model := two_layers_of(family)).compile_layers(backend="eager")
    loop = GenerationLoop(paged, paged.allocate_kv_cache(64, 5), max_num_seqs=8, max_num_tokens=24)
    loop.warm_up()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    texts = loop.generate(prompts(), GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "no recompiles after the warm-up"
    paged.unwrap()
    assert texts == generate_by_transformers(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_compiled_whole_without_copies(family: str) -> None:
    dense = {"mlp_layer_types": ["dense"] * 2} if family == "deepseek_v32" else {}  # experts compile for long
    paged = PagedCausalLM(two_layers_of(family, **dense))
    want = generate(paged)
    kv_cache = paged.allocate_kv_cache(64, 5)
    with CompileReport(kv_cache.layers) as report:
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24, compile=True)
        assert loop.generate(prompts(), GREEDY) == want
    assert report.cache_copies == 0, report.copies


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["whole", "layers"])
def test_tokens_equal_generate_in_cuda_graphs(family: str, how: str) -> None:
    """Tokens of the CPU: of equal scores, which relu makes frequent here, ``torch.topk`` takes any on a GPU."""
    torch.set_float32_matmul_precision("highest")
    model = model_of(family).to(GPU)
    model.set_experts_implementation("batched_mm")
    paged = PagedCausalLM(model)
    if how == "layers":
        paged.compile_layers()
    options: dict[str, Any] = dict(compile=how == "whole", graph_mode="FULL_DECODE_ONLY")
    kv_cache = paged.allocate_kv_cache(22, 5, num_host_blocks=64)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24, **options)
    assert loop.generate(prompts(), GREEDY) == expected(family)
    assert loop.graph_stats.replayed > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_index_keys_where_all_keys_are_selected(family: str) -> None:
    changes = {
        "minimax_m3_vl_text": dict(index_topk_blocks=4),
        "qwen4_exp_text": dict(indexer_budget=6, indexer_compress_ratio=3),
    }
    model = model_of(family, **changes.get(family, {}))
    paged = PagedCausalLM(model, max_model_len=8)
    assert all(spec.value_head_size for spec in paged.layers)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(64, 4))
    (tokens,) = loop.generate([[7, 9]], SamplingParams(max_new_tokens=6, stop_token_ids=()))
    model = paged.unwrap()
    whole = model.generate(torch.tensor([[7, 9]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert whole[0, 2:].tolist() == tokens
    assert not all(spec.value_head_size for spec in PagedCausalLM(model, max_model_len=9).layers)


def test_keys_and_values_of_all_heads_with_selected_keys() -> None:
    paged = PagedCausalLM(model_of("deepseek_v32"), latent=False)
    assert paged.num_kv_heads == (4, 1) * 4
    assert generate(paged) == expected("deepseek_v32")


def test_index_keys_in_other_formats() -> None:
    """Next to fp8 latents they are fp8; next to rows with scales bfloat16. Most first tokens survive the rounding."""
    changes = dict(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, num_hidden_layers=2)
    model = model_of("deepseek_v32", **changes)
    paged, texts = PagedCausalLM(model), []
    for dtype, name in ((None, "auto"), (torch.float8_e4m3fn, "auto"), (None, "fp8_ds_mla")):
        kv_cache = paged.allocate_kv_cache(64, 5, num_host_blocks=8, dtype=dtype, kv_cache_dtype=name)
        paged.check_kv_cache(kv_cache)
        index_cache = kv_cache.layers[1]
        assert index_cache.shape == (64, 5, 128)
        assert index_cache.dtype == (torch.bfloat16 if name == "fp8_ds_mla" else dtype or torch.float32)
        texts.append(generate(paged, kv_cache))
    for text in texts[1:]:
        assert sum(a[0] == b[0] for a, b in zip(text, texts[0], strict=True)) >= 3


def test_a_wrapped_model_keeps_its_weights_and_is_as_before_afterwards() -> None:
    model = model_of("glm_moe_dsa")
    names, kinds = set(model.state_dict()), [type(module) for module in model.modules()]
    PagedCausalLM(model)
    assert set(model.state_dict()) == names
    model = PagedCausalLM(model).unwrap()
    assert [type(module) for module in model.modules()] == kinds
    assert not any("paged_form" in vars(module) for module in model.modules())
    assert generate_by_transformers(model) == expected("glm_moe_dsa")


def test_how_an_indexer_rotates_is_found_by_its_choice() -> None:
    def form(family: str) -> Any:
        PagedCausalLM(model := model_of(family))
        found = {module.indexer.paged_form for module in model.modules() if indexers.has_indexer(module)}
        (one,) = found
        return one[0].__name__, one[1]

    assert form("deepseek_v32") == ("apply_rotary_pos_emb", False)
    assert form("glm_moe_dsa") == ("apply_rotary_pos_emb_interleave", False)
    assert form("hy_v4") == ("apply_rotary_pos_emb", True)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_an_indexer_that_selects_other_keys_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    kind = next(type(module.indexer) for module in model.modules() if indexers.has_indexer(module))
    forward = kind.forward

    def scaled(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, hidden_states.flip(-1), *args, **kwargs)

    monkeypatch.setattr(kind, "forward", scaled)
    with pytest.raises(ValueError, match=rf"model: expected indexers as .*, got {kind.__name__}.*other keys"):
        PagedCausalLM(model)
    assert not any("paged_form" in vars(module) for module in model.modules())


def test_other_indexers_are_refused_by_name() -> None:
    model = make_model("deepseek_v4")
    with pytest.raises(ValueError, match=r"model: expected indexers as those .*: it keeps one"):
        PagedCausalLM(model)


class OfOneIndexer(torch.nn.Module):
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, indexer: torch.nn.Module) -> None:
        super().__init__()
        self.indexer = indexer


@pytest.mark.parametrize(
    ("family", "prefix", "rotated", "reason"),
    [
        ("mistral_large4", "MistralLarge4Text", 8, "its queries depend on positions"),
        ("glm5_next", "Glm5NextText", 0, "it keeps one key per several tokens"),
    ],
)
def test_indexers_of_models_with_images_are_refused(family: str, prefix: str, rotated: int, reason: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes: dict[str, Any] = dict(hidden_size=32, index_n_heads=2, index_head_dim=16, qk_rope_head_dim=rotated)
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    model: Any = OfOneIndexer(getattr(modeling, f"{prefix}Indexer")(config, 0))
    with pytest.raises(ValueError, match=rf"got {prefix}Indexer in OfOneIndexer: {reason}"):
        indexers.install(Wrapping(model), model, 4096)


def test_a_context_is_refused() -> None:
    probe: Any = SimpleNamespace(calls={0: SimpleNamespace(selects=True)}, reaches=lambda: [(0, 0)])
    with pytest.raises(ValueError, match="context: expected a model whose layers see all keys"):
        refuse_context(object(), None, probe)


def test_batch_invariance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_invariant: expected a model of .*DeepseekV32Indexer"):
        PagedCausalLM(model_of("deepseek_v32"), batch_invariant=True)


def test_generate_batch_refuses_selected_keys() -> None:
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="indices: expected none in generate_batch"):
        attention_of_batches(None, query, query, query, None, cache=object(), indices=torch.zeros(1, 3, 2))
