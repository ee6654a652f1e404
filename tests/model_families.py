"""Tiny random models of every causal decoder that the installed transformers knows: for the table of docs/models.md."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 8  # shorter than most prompts, as is the chunk
VOCABULARY = 128
LAYERS = 4

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Sizes by the names that configs have for them; a config takes those that it knows.
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    ffn_dim=96,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    n_inner=96,
    num_hidden_layers=LAYERS,
    num_layers=LAYERS,
    encoder_layers=2,
    decoder_layers=LAYERS,
    num_attention_heads=4,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    # experts
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    shared_intermediate_size=32,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    moe_num_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    # latent attention
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    # windows
    sliding_window=WINDOW,
    attention_chunk_size=WINDOW,
    attn_temperature_tuning=None,
    # layers with state
    mamba_d_state=8,
    mamba_n_heads=8,
    mamba_d_head=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    # what would end a text early
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    initializer_range=0.15,  # large, so that logits differ by much more than float32 rounds
)
del SIZES["attn_temperature_tuning"]

# Per family: what its config needs beyond the sizes above.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cpmant": dict(dim_ff=96),
    "cwm": dict(bos_token_id=0, eos_token_id=0),
    "dots1": dict(n_shared_experts=1),
    "dots3_note_text": dict(num_key_value_heads=4),
    "emu3": dict(pad_token_id=0),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "gemma3n_text": dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4_text": dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8),
    "modernbert-decoder": dict(pad_token_id=0),
    "zaya": dict(num_experts_per_tok=1),
    "xlnet": dict(d_head=16),
    "reformer": dict(is_decoder=True),
    "zamba2": dict(layer_types=None),
}


def text_family(family: str) -> str:
    """The family itself, or that of the text model within a composite one."""
    config_class = CONFIG_MAPPING[family]
    text_class = config_class.sub_configs.get("text_config")
    taken = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].config_class
    if text_class is None or taken is None:
        return family
    for name in FAMILIES:
        if CONFIG_MAPPING[name] is text_class and text_class is not config_class:
            return name
    return family


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model of a family: the defaults of its class with small sizes; of the text model alone."""
    family = text_family(family)
    config_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].config_class or CONFIG_MAPPING[family]
    text_class = config_class.sub_configs.get("text_config")
    if config_class is CONFIG_MAPPING[family] and text_class is not None and hasattr(text_class, "attribute_map"):
        return config_class(text_config=_small(text_class, OVERRIDES.get(family, {})).to_dict())
    return _small(config_class, {**OVERRIDES.get(family, {}), **changes})


def _small(config_class: Any, changes: dict[str, Any]) -> Any:
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return config_class(**{**sizes, **changes})


def model_class(family: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[text_family(family)]]


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights, float32 on the CPU, attending eagerly."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    return model_class(family)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
