"""Models of images or sound with a language model inside: prompts of text give the tokens of ``generate()``.

The classes are those that docs/models.md lists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from tests.integrations.transformers import model_table  # noqa: E402

V = model_table.VOCABULARY
TEXT: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.15,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
    depth=1,
    num_heads=2,
    embed_dim=32,
    out_hidden_size=64,
)
SOUND = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_mel_bins=8)
M_ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
SECTIONS = dict(rope_parameters=M_ROPE)
TOKENS = dict(image_token_index=V - 1, image_token_id=V - 1)


def text(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **changes}


def vision(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**VISION, "model_type": model_type, **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    "Llava": dict(text_config=text("llama"), vision_config=vision("clip_vision_model"), **TOKENS),
    "LlavaNext": dict(text_config=text("mistral"), vision_config=vision("clip_vision_model"), **TOKENS),
    "LlavaOnevision": dict(text_config=text("qwen2"), vision_config=vision("siglip_vision_model"), **TOKENS),
    "Qwen2VL": dict(text_config=text("qwen2_vl_text", **SECTIONS), vision_config=VISION),
    "Qwen2_5_VL": dict(text_config=text("qwen2_5_vl_text", **SECTIONS), vision_config=VISION),
    "Qwen3VL": dict(text_config=text("qwen3_vl_text", **SECTIONS), vision_config=VISION),
    "Mistral3": dict(text_config=text("mistral"), vision_config=vision("pixtral"), **TOKENS),
    "InternVL": dict(text_config=text("qwen2"), vision_config=vision("internvl_vision"), **TOKENS),
    "Voxtral": dict(text_config=text("llama"), audio_config=dict(SOUND, model_type="voxtral_encoder")),
    "Gemma3": dict(text_config=text("gemma3_text", sliding_window=8), vision_config=vision("siglip_vision_model")),
    "AyaVision": dict(text_config=text("cohere2", sliding_window=8), vision_config=vision("siglip_vision_model")),
}


def tiny(name: str) -> Any:
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class(**CONFIGS[name])
    assert sum(each.numel() for each in kind(config).parameters()) < 1e6
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    # tokens that differ from the one before
    model.set_output_embeddings(torch.nn.Linear(64, V, bias=False))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_served(name: str) -> None:
    paged = PagedCausalLM(tiny(name))
    loop = GenerationLoop(paged, paged.allocate_kv_cache(128, 4), max_num_seqs=8, max_num_tokens=24, max_model_len=64)
    tokens = loop.generate(model_table.prompts(), SamplingParams(max_new_tokens=8, stop_token_ids=()))
    assert loop.stats.cached_tokens > 0
    assert len({token for output in tokens for token in output}) > 10
    assert tokens == model_table.by_transformers(paged.unwrap())


def test_the_page_lists_these_classes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert set(re.findall(r"`(\w+)ForConditionalGeneration`", page)) == {*CONFIGS, "PaliGemma"}
