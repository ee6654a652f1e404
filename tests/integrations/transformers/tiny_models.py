"""Small models of three kinds and ragged prompts, for generate_batch of transformers: its tests and its benchmark."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TYPES = ["sliding_attention", "full_attention"] * 2
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=12, attn_logit_softcapping=5.0, query_pre_attn_scalar=16, layer_types=TYPES
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=12, layer_types=TYPES
    ),
}
PROMPTS = [[(7 * i * i + 3 * i + s * 131) % 250 + 2 for i in range(n)] for s, n in enumerate((3, 40, 61, 17, 1))]
PAGE_SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # until 5.17


def tiny_model(name: str, device: str = "cpu") -> Any:
    """Random weights, the same on every device."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):
            parameter.data.normal_(0.0, 2.0)
    return model.to(device)
