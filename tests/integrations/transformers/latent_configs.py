"""Tiny models of latent attention."""

from typing import Any

import transformers

R, P, H = 32, 8, 4
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=H,
    num_key_value_heads=H,
    kv_lora_rank=R,
    qk_nope_head_dim=16,
    qk_rope_head_dim=P,
    v_head_dim=12,
    max_position_embeddings=512,
    initializer_range=0.15,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
CONFIGS: dict[str, Any] = {
    # V2-Lite projects queries at once, and scales its logits by yarn; V3 has a second latent, of queries
    "v2_lite": lambda: transformers.DeepseekV2Config(**COMMON, **EXPERTS, q_lora_rank=None, rope_parameters=YARN),
    "v3": lambda: transformers.DeepseekV3Config(**COMMON, **EXPERTS, q_lora_rank=24, rope_parameters=YARN),
    "v3_halves": lambda: transformers.DeepseekV3Config(**COMMON, **EXPERTS, q_lora_rank=24, rope_interleave=False),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **COMMON, q_lora_rank=24, attention_bias=True, scale_emb=1.0, dim_model_base=64
    ),
}
