"""Tiny models of the dense families with sharp logits, their prompts, and the tokens of ``generate()``."""

import functools
from typing import Any

import torch
import transformers

NEW_TOKENS = 12
WINDOW = 8  # shorter than most prompts
B = 4
# A ragged batch of 16; the last four begin with the same 12 tokens.
LENGTHS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 21, 24, 33)
SHARED, TAILS = 12, (1, 2, 6, 19)
COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.15,  # large, so that logits differ by much more than float32 rounds
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, **ALTERNATING, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, tie_word_embeddings=False
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON,
        **ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
# Eager only: what else the attention function has a rule for.
MORE_CONFIGS: dict[str, Any] = {
    "llama4_chunks": lambda: transformers.Llama4TextConfig(
        **COMMON,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        num_local_experts=2,
        attn_temperature_tuning=False,
        intermediate_size_mlp=128,
    ),
    "gemma3n_shared_kv": lambda: transformers.Gemma3nTextConfig(
        **{**COMMON, "num_hidden_layers": 4, "intermediate_size": [128] * 4},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
}
# Seeds at which the likeliest token leads the second by at least 5e-4 of the largest logit, all along.
SEEDS = {
    "llama": 6,
    "qwen3": 11,
    "mistral": 5,
    "gemma2": 3,
    "gpt_oss": 3,
    "llama4_chunks": 2,
    "gemma3n_shared_kv": 6,
}


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)

    def random(length: int) -> list[int]:
        return torch.randint(256, (length,), generator=generator).tolist()

    shared = random(SHARED)
    return [random(length) for length in LENGTHS] + [[*shared, *random(length)] for length in TAILS]


def make_model(name: str, **changes: Any) -> Any:
    config = {**CONFIGS, **MORE_CONFIGS}[name]()
    sinks = changes.pop("sinks", 2.0)
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    torch.manual_seed(SEEDS[name])
    # In some releases the default leaves Gemma-2's soft cap out.
    options: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.constant_(parameter, sinks)
    return model


def generate_by_transformers(model: Any) -> list[list[int]]:
    """One prompt at a time, so that nothing is padded."""
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    outputs = (model.generate(torch.tensor([p], device=model.device), **options)[0] for p in prompts())
    return [output[len(p) :].tolist() for output, p in zip(outputs, prompts(), strict=True)]


@functools.cache
def expected(name: str) -> list[list[int]]:
    return generate_by_transformers(make_model(name))
