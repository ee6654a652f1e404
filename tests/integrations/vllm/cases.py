"""Tiny random models, and what the engine is asked to do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
Prompts = list[list[int]]


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that repeat nowhere in a way that a model could follow."""
    return [(seed * 131 + 7 * i * i + 3 * i) % VOCABULARY for i in range(length)]


RAGGED = [prompt(length, i) for i, length in enumerate((3, 40, 90, 17, 1, 64, 130, 33))]
PREFIX = prompt(100, 99)
SHARING = [PREFIX + prompt(length, i) for i, length in enumerate((5, 20, 41))]
# Long enough to be read once for all: 320 tokens, ten requests.
LONG_PREFIX = prompt(320, 98)
SHARING_LONG = [LONG_PREFIX + prompt(4 + 5 * i, i) for i in range(10)]
LOOPS = [prompt(500, i)[:150] for i in range(3)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}

# vLLM's rotary op for CPUs gives other numbers than transformers for these models, with vLLM's own attention as well.
LATENT = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def greedy(count: int) -> list[dict[str, Any]]:
    """The most likely token."""
    return [{}] * count


def seeded(count: int) -> list[dict[str, Any]]:
    """Three samples a prompt, each request with a seed of its own."""
    return [{"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 17 + i, "n": 3} for i in range(count)]


@dataclass
class Case:
    """One engine: its model, its options beside the usual ones, the prompts of each call of ``generate``."""

    model: str = "llama"
    engine: dict[str, Any] = field(default_factory=dict)
    rounds: Sequence[Prompts] = (RAGGED,)
    new_tokens: int = 16
    sampling: Callable[[int], list[dict[str, Any]]] = greedy
    only_ours: bool = False
    keeps_theirs: bool = False  # its layers are not ours to serve


CASES = {
    "llama": Case(),
    "qwen3": Case("qwen3"),
    "mistral_window": Case("mistral"),
    "gemma2_soft_cap": Case("gemma2"),
    "gemma3": Case("gemma3"),
    "gpt_oss_sinks": Case("gpt_oss"),
    "bloom_alibi": Case("bloom"),
    "head_size_16": Case("llama_16", {"block_size": 16}, only_ours=True),
    "head_size_24": Case("llama_24", {"block_size": 16}, only_ours=True),
    "blocks_of_48": Case(engine={"block_size": 48}, only_ours=True),
    "prefix_caching": Case(engine={"enable_prefix_caching": True}, rounds=(SHARING[:1], SHARING, SHARING[::-1])),
    "shared_prefix": Case(
        engine={
            "enable_prefix_caching": True,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "additional_config": {"paged_ops_cascade": True},
        },
        rounds=(SHARING_LONG[:1], SHARING_LONG),
        only_ours=True,
    ),
    # Chunks are rows of their own: more than requests, and none has the prefix of the others.
    "llama4_chunks": Case(
        "llama4",
        {"enable_prefix_caching": True, "additional_config": {"paged_ops_cascade": True}},
        rounds=(RAGGED + RAGGED[::-1],),
    ),
    "bert_encoder": Case(
        "bert",
        {"runner": "pooling", "skip_tokenizer_init": False, "max_num_batched_tokens": 256},
        keeps_theirs=True,
    ),
    "deepseek_by_vllm": Case("deepseek", {"dtype": "bfloat16", "attention_backend": "CPU_MLA"}, keeps_theirs=True),
    # vLLM's own serves these blocks alone, without chunks and prefixes.
    "deepseek": Case("deepseek", {"block_size": 16, **LATENT}, only_ours=True),
    "deepseek_chunks_and_prefixes": Case(
        "deepseek_v2",
        {"block_size": 64, "enable_prefix_caching": True, "max_num_batched_tokens": 48, **LATENT},
        rounds=(SHARING[:1], SHARING, RAGGED),
        only_ours=True,
    ),
    "deepseek_preemption": Case(
        "deepseek_v2", {"num_gpu_blocks_override": 17, "block_size": 16, **LATENT}, new_tokens=40, only_ours=True
    ),
    "deepseek_compiled": Case("deepseek_v2", {"enforce_eager": False}, only_ours=True),
    "deepseek_tensor_parallel": Case(
        "deepseek_v2",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **LATENT},
        only_ours=True,
    ),
    # The last with latents: the rule that it sets stays.
    "deepseek_by_heads": Case(
        "deepseek_v2",
        {"block_size": 16, "max_num_batched_tokens": 48, "additional_config": {"expand_from": 9}, **LATENT},
        only_ours=True,
    ),
    "preemption": Case(engine={"num_gpu_blocks_override": 13}, new_tokens=48),
    # Prompts in one piece: the engine cannot take back a random number for a request with a seed on the CPU.
    "samples": Case(engine={"max_num_batched_tokens": 2048}, sampling=seeded),
    "fp8_cache": Case(engine={"kv_cache_dtype": "fp8"}, only_ours=True),
    "compiled": Case(engine={"enforce_eager": False}, only_ours=True),
    "tensor_parallel": Case(engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, only_ours=True),
    "context_parallel": Case(
        "llama_mqa",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "distributed_executor_backend": "mp"},
        only_ours=True,
    ),
    # Last: an engine cannot start after numba is loaded.
    "speculation": Case(engine={"speculative_config": NGRAM}, rounds=(LOOPS,), new_tokens=60),
}


def save_models(folder: Path) -> None:
    """Write each model of the cases, in float32, with weights large enough that attention decides the tokens."""
    import torch
    import transformers

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    types = ["sliding_attention", "full_attention"]
    configs = {
        "llama": transformers.LlamaConfig(**shape),
        "llama_16": transformers.LlamaConfig(**shape | {"head_dim": 16}),
        "llama_mqa": transformers.LlamaConfig(**shape | {"num_key_value_heads": 1}),
        "llama_24": transformers.LlamaConfig(**shape | {"head_dim": 24}),
        "qwen3": transformers.Qwen3Config(**shape),
        "mistral": transformers.MistralConfig(**shape, sliding_window=24),
        "gemma2": transformers.Gemma2Config(
            **shape, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=32, layer_types=types
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **shape, sliding_window=24, query_pre_attn_scalar=32, layer_types=types
        ),
        "gpt_oss": transformers.GptOssConfig(
            **shape | {"num_local_experts": 4, "num_experts_per_tok": 2}, sliding_window=24, layer_types=types
        ),
        "llama4": transformers.Llama4TextConfig(
            **shape,
            intermediate_size_mlp=256,
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=32,
            no_rope_layers=[1, 0],
        ),
        "bert": transformers.BertConfig(
            **{name: value for name, value in shape.items() if name != "num_key_value_heads" and name != "head_dim"}
        ),
        # The sizes that vLLM's latent attention on the CPU takes.
        "deepseek": transformers.DeepseekV3Config(
            **shape | {"num_key_value_heads": 4, "head_dim": 64},
            q_lora_rank=64,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            first_k_dense_replace=2,
        ),
        "deepseek_v2": transformers.DeepseekV2Config(
            **shape | {"num_key_value_heads": 4, "head_dim": 8},
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=24,
            v_head_dim=16,
            first_k_dense_replace=2,
        ),
        "bloom": transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if name == "bloom" and parameter.dim() == 2:
                    parameter.normal_(0.0, 0.2)
                if key.endswith("sinks"):
                    parameter.normal_(0.0, 2.0)
        model.eval().save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / "bert")


def tokenizer() -> Any:
    """A word for each id."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    of_words = tokenizers.Tokenizer(words)
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="w0", eos_token="w2")
