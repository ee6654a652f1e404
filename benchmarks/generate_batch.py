"""transformers' ``generate_batch`` with this package's attention, on a GPU: does it give the tokens of ``generate()``,
and how fast is it next to transformers' own paged attention functions?

    python benchmarks/generate_batch.py --out generate_batch.json [--seconds 220] [--only tokens|speed] [--tiny]

Tokens: tiny random models in float32 with eager attention (Llama; Gemma-2 with windows and a soft cap; gpt-oss with
windows and sinks), with CUDA graphs off, on, and as transformers chooses, whole and chunked prompts. The script fails
if one differs; gpt-oss in graphs is noted as not served, where transformers' experts cannot be captured.

Speed: the shape of Llama-3-8B, random bfloat16 weights, greedy. Milliseconds per decode step are medians of the times
between tokens while every request decodes; seconds are the second run of the whole call, prompts included.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes_vllm import SHAPES
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import model_runner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paged_ops.integrations.transformers.continuous_batching import use_paged_attention
from tests.integrations.transformers.tiny_models import MODELS, PAGE_SIZE, PROMPTS, SHAPE, tiny_model

LLAMA_8B = {**SHAPES["llama-3-8b"], "eos_token_id": None, "pad_token_id": 0}
LOADS = {
    "1x1024": [1024],
    "32x1024": [1024] * 32,
    "32 ragged, 64 to 4096": [int(64 * 64 ** (i / 31)) for i in range(32)],
}
GRAPHS = {"chosen": None, "on": True, "off": False}
counts = {"captured": 0, "replayed": 0}


def log(text: str) -> None:
    """A line with the time, at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def count_graphs() -> None:
    """Count captures and replays of the continuous batching."""
    capture, replay = model_runner.ModelRunner._capture_graph, torch.cuda.CUDAGraph.replay

    def counted_capture(*args: Any, **kwargs: Any) -> Any:
        counts["captured"] += 1
        return capture(*args, **kwargs)

    def counted_replay(*args: Any, **kwargs: Any) -> Any:
        counts["replayed"] += 1
        return replay(*args, **kwargs)

    model_runner.ModelRunner._capture_graph = counted_capture
    torch.cuda.CUDAGraph.replay = counted_replay


def check_tokens(device: str) -> list[dict[str, Any]]:
    """Every model and use of graphs, in whole and in chunked prompts, compared with the tokens of ``generate()``."""
    greedy = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    results = []
    for name in MODELS:
        model = tiny_model(name, device)
        model.set_attn_implementation("eager")  # sdpa leaves out Gemma-2's soft cap in 5.17
        expected = [
            model.generate(torch.tensor([ids], device=device), generation_config=greedy)[0, len(ids) :].tolist()
            for ids in PROMPTS
        ]
        use_paged_attention(model)
        for graphs, value in GRAPHS.items():
            for tokens in (256, 32):
                counts.update(captured=0, replayed=0)
                config = ContinuousBatchingConfig(
                    num_blocks=64, max_batch_tokens=tokens, use_cuda_graph=value, **{PAGE_SIZE: 16}
                )
                outputs = model.generate_batch(
                    PROMPTS, generation_config=greedy, continuous_batching_config=config, progress_bar=False
                )
                got = [output.generated_tokens for output in outputs.values()]
                result = {"model": name, "graphs": graphs, "max_batch_tokens": tokens, "equal": got == expected}
                # transformers' experts copy from the host, which no graph captures: no request of gpt-oss is served.
                failed = [str(output.error) for output in outputs.values() if output.error]
                if failed and name == "gpt_oss" and graphs != "off":
                    result |= {"equal": None, "error": failed[0][:200]}
                results.append(result | counts)
                log(json.dumps(results[-1]))
    return results


def serve(model: Any, prompts: list[list[int]], new_tokens: int, graphs: bool | None) -> dict[str, Any]:
    """The second of two equal calls: its seconds, decode steps and tokens."""
    greedy = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    config = ContinuousBatchingConfig(
        num_blocks=1024 if model.device.type == "cuda" else 64,
        max_batch_tokens=4096,
        use_cuda_graph=graphs,
        allow_block_sharing=False,
        **{PAGE_SIZE: 256},
    )
    counts.update(captured=0, replayed=0)
    for _ in range(2):
        start = time.perf_counter()
        outputs = model.generate_batch(
            prompts,
            generation_config=greedy,
            continuous_batching_config=config,
            progress_bar=False,
            record_timestamps=True,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
    model.destroy_cached_continuous_batching_manager()
    if len(outputs) != len(prompts) or any(output.error for output in outputs.values()):
        raise RuntimeError(f"requests failed: {[output.error for output in outputs.values() if output.error][:1]}")
    stamps = [output.timestamps for output in outputs.values()]
    begin, end = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    inside = [t for t in stamps[0] if begin < t <= end]
    steps = [(b - a) * 1e3 for a, b in itertools.pairwise(inside)][2:-2]
    return {
        "seconds": seconds,
        "ms_per_decode_step": statistics.median(steps) if steps else None,
        "steps": len(steps),
        "output_tokens_per_second": new_tokens * len(prompts) / seconds,
        "tokens": [output.generated_tokens for output in outputs.values()],
        **counts,
    }


def speed(device: str, tiny: bool, deadline: float, save: Any) -> list[dict[str, Any]]:
    """Every load with every attention function that is there, ours first."""
    config = transformers.LlamaConfig(**(SHAPE | {"max_position_embeddings": 8192} if tiny else LLAMA_8B))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    log(f"model on {device}")
    functions: list[tuple[str, bool | None]] = [("paged_ops", None), ("paged_ops", False), ("sdpa", None)]
    if transformers.utils.is_flash_attn_3_available():
        functions.insert(2, ("flash_attention_3", None))
    elif transformers.utils.is_flash_attn_2_available():
        functions.insert(2, ("flash_attention_2", None))
    results: list[dict[str, Any]] = []
    for function, graphs in functions:
        if function == "paged_ops":
            use_paged_attention(model)
        else:
            model.set_attn_implementation(f"paged|{function}" if PAGE_SIZE == "block_size" else function)
        for load, lengths in LOADS.items():
            if time.monotonic() > deadline:
                log(f"out of time before {function}, {load}")
                continue
            lengths = [max(length // 16, 1) for length in lengths] if tiny else lengths
            draw = random.Random(1)
            prompts = [draw.choices(range(10, config.vocab_size), k=length) for length in lengths]
            result = {"function": function, "graphs": graphs is not False, "load": load}
            try:
                result |= serve(model, prompts, 8 if tiny else 64, graphs)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"[:500]
            results.append(result)
            shown = {key: value for key, value in result.items() if key != "tokens"}
            log(json.dumps(shown))
            save(results)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def agreement(results: list[dict[str, Any]]) -> None:
    """Replace tokens by the number per request that equals this package's attention without graphs."""
    reference = {r["load"]: r["tokens"] for r in results if r["function"] == "paged_ops" and "tokens" in r}
    for result in results:
        tokens = result.pop("tokens", None)
        if tokens is None:
            continue
        pairs = list(zip(tokens, reference[result["load"]], strict=True))
        same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
        result["mean_equal_prefix"] = statistics.fmean(same)


def main() -> int:
    """Check, then time; 1 where tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--only", choices=["tokens", "speed"], default=None)
    parser.add_argument("--tiny", action="store_true", help="a tiny model for the speed, to try the script")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count_graphs()
    # dict[str, Any]: the type of JSON.
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }

    def save(speeds: list[dict[str, Any]] | None = None) -> None:
        if speeds is not None:
            record["speed"] = [{k: v for k, v in result.items() if k != "tokens"} for result in speeds]
        Path(args.out).write_text(json.dumps(record, indent=1))

    if args.only != "speed":
        record["tokens"] = check_tokens(device)
        save()
    if args.only != "tokens":
        results = speed(device, args.tiny, deadline, save)
        agreement(results)
        save(results)
    different = [result for result in record.get("tokens", []) if result["equal"] is False]
    log(f"{len(different)} of {len(record.get('tokens', []))} with other tokens than generate()")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
