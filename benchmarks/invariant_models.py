"""Models with ``batch_invariant=True``: how many tokens and log-probabilities have other bits under load.

    python benchmarks/invariant_models.py --device cuda --commit $(git rev-parse HEAD) --out DIR/invariant_models.jsonl

Each model has random weights. Its requests run alone, together, together again with cached prompts, and in a cache that
is too small, with prompts in chunks, so that requests are preempted: eager, captured in CUDA graphs, and with compiled
layers. Tokens and log-probabilities are compared with those alone, and with one forward pass over each whole sequence.
The same is counted without the flag, where a GPU gives other bits. A line of JSON per model and mode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM

TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, head_dim=16, initializer_range=0.2, max_position_embeddings=4096)
LARGE = dict(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16)
LARGE |= dict(num_key_value_heads=8, head_dim=128, initializer_range=0.05, max_position_embeddings=4096)
IDS = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
WINDOWS = dict(sliding_window=96, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=8, num_experts_per_tok=2)

MODELS: dict[str, Callable[[], Any]] = {
    "llama-large": lambda: transformers.LlamaConfig(**LARGE, **IDS),
    "gpt_oss-large": lambda: transformers.GptOssConfig(
        **{**LARGE, "head_dim": 64, "intermediate_size": 1024, "num_hidden_layers": 2}, **IDS, **WINDOWS, **EXPERTS
    ),
    "qwen3-large": lambda: transformers.Qwen3Config(**LARGE, **IDS),
    "gemma3-large": lambda: transformers.Gemma3TextConfig(
        **{**LARGE, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2},
        **IDS,
        **WINDOWS,
    ),
    "llama": lambda: transformers.LlamaConfig(**TINY, **IDS),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, **IDS),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, **IDS, **WINDOWS, attn_logit_softcapping=5.0),
    "gpt_oss": lambda: transformers.GptOssConfig(**TINY, **IDS, **WINDOWS, **EXPERTS),
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "captured": {"graph_mode": "FULL"},
    "compiled layers": {},
    "compiled layers, captured": {"graph_mode": "FULL_DECODE_ONLY"},
}
LENGTHS = (15, 45, 13, 300, 7, 90, 1200, 64, 33, 130, 5, 21)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=5, stop_token_ids=(), logprobs=2)
BLOCK = 4


def requests(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*ids, *(ids[3][:100] + each[:40] for each in ids[:4])]  # some begin alike


def generated(paged: Any, prompts: list[list[int]], loads: int = 1, blocks: int = 1600, **options: Any) -> Any:
    """Tokens and log-probabilities of the requests, of the last of several runs, and the loop's counters."""
    options = {"max_num_seqs": len(prompts), "max_num_tokens": 2048, **options}
    with GenerationLoop(paged, paged.allocate_kv_cache(blocks, BLOCK), max_model_len=1600, **options) as loop:
        loop.warm_up()  # compiles all kernels in parallel processes; a step would compile one after the other
        for _ in range(loads):
            outputs = list(loop.generate(prompts, SAMPLED))
        return [(list(output), output.logprobs) for output in outputs], loop.stats


def differing(got: Any, wanted: Any) -> int:
    """Tokens and log-probabilities with other bits."""
    count = 0
    for (tokens, logprobs), (others, more) in zip(got, wanted, strict=True):
        count += sum(a != b for a, b in zip(tokens, others, strict=True))
        count += sum(a != b for a, b in zip(logprobs, more, strict=True))
    return count


def measure(name: str, mode: str, device: str, batch_invariant: bool) -> dict[str, Any]:
    began = time.monotonic()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "large" in name else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype).eval().to(device)
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):
            parameter.data.normal_(0.0, 2.0)
    prompts, options = requests(model.config.vocab_size), MODES[mode]
    paged = PagedCausalLM(model, batch_invariant=batch_invariant)
    if "compiled" in mode:
        paged.compile_layers()
    together, _ = generated(paged, prompts, **options)
    first = time.monotonic() - began
    alone, _ = generated(paged, prompts, max_num_seqs=1, **options)
    cached, with_cache = generated(paged, prompts, loads=2, **options)
    few = -(-(max(LENGTHS) + 24) // BLOCK) + 24
    chunked, small = generated(paged, prompts, blocks=few, max_num_tokens=96, **options)
    again = recomputed = 0
    for prompt, (tokens, logprobs) in zip(prompts, alone, strict=True):
        found = paged.token_logprobs([*prompt, *tokens])[len(prompt) - 1 :].cpu()
        recomputed += int((found != torch.tensor([each.logprob for each in logprobs])).sum())
        again += len(found)
    return {
        "model": name,
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "batch_invariant": batch_invariant,
        "requests": len(prompts),
        "logprobs": again,
        "differ": {
            "together": differing(together, alone),
            "cached": differing(cached, alone),
            "preempted and chunked": differing(chunked, alone),
            "one forward": recomputed,
        },
        "cached_tokens": with_cache.cached_tokens,
        "preemptions": small.preemptions,
        "seconds": round(time.monotonic() - began, 1),
        "of the first load": round(first, 1),  # most of it compiles
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    about = {"device": torch.cuda.get_device_name() if is_gpu else "cpu", "torch": torch.__version__}
    about |= {"transformers": transformers.__version__, "commit": options.commit}
    about |= {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    wrong = 0
    for name in options.models:
        for mode, batch_invariant in [*((mode, True) for mode in options.modes), ("eager", False)]:
            row = {**about, **measure(name, mode, options.device, batch_invariant)}
            wrong += sum(row["differ"].values()) if batch_invariant else 0
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
