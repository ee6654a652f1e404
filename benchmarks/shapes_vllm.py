"""Shapes of models for :mod:`engine_vllm`: fields of their configurations."""

from __future__ import annotations

from typing import Any

# dict[str, Any]: the type of JSON.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    },
    "one-kv-head": {  # vLLM shards tokens only where a head of the cache would lie on several ranks
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    },
    "deepseek-v2-lite": {  # its attention; all layers have one MLP, so that attention is not a small part of a step
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
    },
    "four-layers": {  # for one core of a CPU: attention is a large part of a step
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    },
}
