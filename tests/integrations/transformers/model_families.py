"""Tiny random models of every causal decoder that the installed transformers knows: for the table of docs/models.md."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
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
    use_sliding_window=True,
    max_window_layers=2,
    attention_chunk_size=WINDOW,
    floor_scale=4,
    is_decoder=True,
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

# Per family: what its config needs beyond the sizes above.
_LATENT = dict(num_key_value_heads=4)
# Of the keys of most prompts some are selected. With fewer heads, relu makes many scores 0: among equal scores
# transformers takes any keys, the op the first ones.
_INDEXED = dict(_LATENT, index_topk=8, index_n_heads=16, index_head_dim=16)
_ROBERTA = dict(pad_token_id=1)
_KINDS = ["sliding_attention", "full_attention"] * 2
_BYTES = dict(
    vocab_size=VOCABULARY,
    hidden_size_global=128,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    cross_attn_k=2,
)
_EXPERTS = ["dense", "sparse"] * 2
_HYBRID = ["hybrid_sliding", "hybrid"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_ASSISTED = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
    num_kv_shared_layers=2,
    layer_types=_KINDS,
)
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "bailing_hybrid": dict(_LATENT, layer_types=_LINEAR),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "blt": dict(
        encoder_hash_byte_group_vocab=64,
        encoder_config=dict(_BYTES, hidden_size=64),
        decoder_config=dict(_BYTES, hidden_size=64),
        global_config=dict(_BYTES, hidden_size=128),
    ),
    "camembert": _ROBERTA,
    "cohere2_moe": dict(mlp_layer_types=_EXPERTS),
    "cohere_compass_text": dict(
        layer_types=_KINDS,
        rope_parameters={kind: dict(rope_type="default", rope_theta=10000.0) for kind in _KINDS},
    ),
    "dbrx": dict(
        d_model=64,
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
    ),
    "cpmant": dict(dim_ff=96),
    "cwm": dict(bos_token_id=0, eos_token_id=0),
    "data2vec-text": _ROBERTA,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "dots1": dict(n_shared_experts=1),
    "dots3_note_text": dict(
        _INDEXED,
        shared_experts_intermediate_size=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=24,
        swa_kv_lora_rank=16,
        swa_head_dim=24,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=16,
    ),
    "emu3": dict(pad_token_id=0, bos_token_id=0, eos_token_id=0),
    "falcon_h1": dict(mamba_d_ssm=128),
    "gemma3_text": dict(layer_types=_KINDS),
    "gemma3n_text": dict(
        num_kv_shared_layers=2,
        layer_types=_KINDS,
        intermediate_size=[96] * LAYERS,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * LAYERS,
    ),
    "gemma4_text": dict(
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        global_head_dim=32,
        num_kv_shared_layers=2,
        layer_types=_KINDS,
    ),
    "gemma4_unified_text": dict(global_head_dim=32),
    "gemma4_unified_assistant": dict(text_config=dict(_ASSISTED, model_type="gemma4_unified_text")),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": dict(_INDEXED, indexer_types=["full", "shared"] * 2),
    "hy_v4": dict(_INDEXED, indexer_types=["full", "shared"] * 2),
    "granitemoehybrid": dict(layer_types=_LINEAR),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_dt_rank=4),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "inkling_text": dict(
        layer_types=_HYBRID,
        mlp_layer_types=_EXPERTS,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
    ),
    "inkling2_text": dict(layer_types=_HYBRID, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16),
    "kimi_linear": dict(_LATENT, layer_types=_LINEAR, linear_head_dim=16, linear_num_heads=4),
    "kolibri1": dict(layer_types=_KINDS),
    "laguna": dict(layer_types=_KINDS),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "lfm3": dict(layer_types=["conv", "full_attention", "conv", "sliding_attention"]),
    "longcat_flash": dict(
        num_key_value_heads=4,
        head_dim=8,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
    ),
    "mamba2": dict(num_heads=8, state_size=16, n_groups=2, chunk_size=8),
    "mellum": dict(layer_types=_KINDS, mlp_layer_types=_EXPERTS),
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        mlp_layer_types=_EXPERTS,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=2,
    ),
    "ministral": dict(layer_types=_KINDS),
    "mllama": dict(bos_token_id=0, eos_token_id=0, pad_token_id=0),
    "modernbert-decoder": dict(
        local_attention=2 * WINDOW, pad_token_id=0, bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0
    ),
    "reformer": dict(axial_pos_shape=[16, 16], axial_pos_embds_dim=[32, 32]),
    "qwen4_exp_text": dict(
        ngram_vocab_size_base=64,
        ple_embed_dim=32,
        ple_layer_ids=[1, 3],
        eos_token_id=125,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"]),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"]),
    "moshi": dict(audio_encoder_config=None, depth_decoder_config=None, audio_vocab_size=64),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "roc_bert": dict(shape_vocab_size=10, pronunciation_vocab_size=10, shape_embed_dim=8, pronunciation_embed_dim=8),
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "xlnet": dict(d_head=16),
    "xmod": dict(default_language="en_XX", pad_token_id=1),
    "youtu": _LATENT,
    "zaya": dict(num_experts_per_tok=1, layer_types=_HYBRID),
}


# Of which no random model can be made, and why.
UNBUILT = {"gemma4_assistant": "drafts for a Gemma 4 and attends to that model's keys: it has no text of its own"}


# Layer types that the config of a family names and its tiny model does not have, and why.
LEFT_OUT = {
    "dots3_note_text": "all of its full layers have indexers, or none has one",
    "qwen4_exp_text": "its config takes full_attention for indexed_attention",
    "deepseek_v4": "refused for its other attention",
}


@functools.cache
def text_family(family: str) -> str:
    """The family itself, or that of the text model within a composite one."""
    if MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].config_class is not CONFIG_MAPPING[family]:
        return _family_of(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].config_class) or family
    if "text_config" not in CONFIG_MAPPING[family].sub_configs or family in OVERRIDES or family in UNBUILT:
        return family
    return _family_of(type(CONFIG_MAPPING[family]().get_text_config(decoder=True))) or family


def _family_of(config_class: Any) -> str | None:
    return next((name for name in FAMILIES if CONFIG_MAPPING[name] is config_class), None)


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model of a family: the defaults of its class with small sizes; of the text model alone."""
    family = text_family(family)
    config_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].config_class or CONFIG_MAPPING[family]
    return _small(config_class, {**OVERRIDES.get(family, {}), **changes})


def _small(config_class: Any, changes: dict[str, Any]) -> Any:
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    for name, part in config_class.sub_configs.items():
        if hasattr(part, "attribute_map") and name not in changes:
            sizes[name] = _small(part, {}).to_dict()
    return config_class(**{**sizes, **changes})


def model_class(family: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[text_family(family)]]


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights, float32 on the CPU, attending eagerly."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    return model_class(family)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def released_config(family: str) -> Any:
    """The config that transformers has for the family by default: that of its first released model."""
    return (model_class(family).config_class or CONFIG_MAPPING[text_family(family)])()


def layer_types(config: Any) -> set[str]:
    """The kinds of layers of a config, by the names of transformers."""
    text = config.get_text_config(decoder=True)
    named = [getattr(text, name, None) or () for name in ("layer_types", "layers_block_type", "mlp_layer_types")]
    return {kind for kinds in named for kind in kinds if kind in ALLOWED_LAYER_TYPES}


def layer_types_of_family(family: str) -> set[str]:
    """The kinds of layers that released models of a family have: of its default config, and all that the source of the
    config names, as it may choose them by other numbers."""
    config = tiny_config(family).get_text_config(decoder=True)
    source = Path(inspect.getsourcefile(type(config)) or "").read_text()
    named = set(re.findall(r'"(\w+)"', source)) & set(ALLOWED_LAYER_TYPES)
    has_list = layer_types(config) != set()
    return (named if has_list else set()) | layer_types(released_config(family))


def head_sizes(module: Any) -> tuple[int, int, bool]:
    """Of a module that attends: head size and value head size in the cache, and whether they are latents."""
    if hasattr(module, "kv_lora_rank"):
        return module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank, True
    names = ("head_dim", "head_size", "attention_head_size")
    size = next(getattr(module, name) for name in names if hasattr(module, name))
    return size, getattr(module, "v_head_dim", size), False


def released_heads(family: str, classes: Iterable[type]) -> list[tuple[int, int, bool]] | None:
    """The head sizes of the modules of these classes in a model of the released config, which has no weights. None if
    transformers' default config makes no model."""
    try:
        with torch.device("meta"):
            model = model_class(family)._from_config(released_config(family))
    except Exception:  # as many kinds as there are incomplete configs
        return None
    kinds = set(classes)
    return sorted({head_sizes(module) for module in model.modules() if type(module) in kinds})
