"""One process of vLLM's engine on the CPU: serves every case with one attention backend, and writes what it generated.

    python serve.py ours|theirs FOLDER CASE...

Run by test_engine.py, one process a backend: which one it is, plugins on the path decide.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.integrations.vllm import cases


def generate(folder: Path, case: cases.Case) -> dict[str, Any]:
    """Tokens of each prompt and of each of its samples, or its embedding, and what the engine tells of the run."""
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    options: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "block_size": 32,
        "seed": 0,
        **case.engine,
    }
    llm = LLM(model=str(folder / case.model), **options)
    additional = case.engine.get("additional_config", {})
    prefixes = llm.collective_rpc(note_prefixes)[0] if "paged_ops_cascade" in additional else []
    expanded = (
        llm.collective_rpc(expand_from, args=(additional["expand_from"],))[0] if "expand_from" in additional else []
    )
    started = time.monotonic()
    tokens, cached = [], []
    for round_of_prompts in case.rounds:
        prompts = [{"prompt_token_ids": ids} for ids in round_of_prompts]
        if options.get("runner") == "pooling":
            tokens += [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
            continue
        params = [
            SamplingParams(**{"max_tokens": case.new_tokens, "temperature": 0.0} | sampling, ignore_eos=True)
            for sampling in case.sampling(len(prompts))
        ]
        for each in params:
            each.detokenize = False
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
        cached += [output.num_cached_tokens for output in outputs]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    result = {
        "tokens": tokens,
        "cached": cached,
        "preemptions": counters.get("vllm:num_preemptions", 0),
        "prefixes": sorted({int(length) for length in prefixes}),
        "expanded": expanded,
        "drafted": counters.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        "backends": sorted({name for names in llm.collective_rpc(implementations) for name in names}),
        "seconds": [round(started - start, 1), round(time.monotonic() - started, 1)],
    }
    del llm
    gc.collect()
    with contextlib.suppress(ImportError):
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    return result


def note_prefixes(worker: Any) -> list[int]:
    """The tokens of each shared prefix that a layer of this process attends to from now on, as they come."""
    from paged_ops.integrations.vllm import backend as vllm

    lengths: list[int] = []
    by_cascade = vllm._attend_by_cascade

    def attend(query: Any, cache: Any, table: Any, length: Any, *args: Any, **features: Any) -> Any:
        lengths.append(int(length))
        return by_cascade(query, cache, table, length, *args, **features)

    vllm._attend_by_cascade = attend
    return lengths


def expand_from(worker: Any, fewest: int) -> list[list[int]]:
    """From now on expand prompts of so many tokens; the decodes and the prompts of each step that has some, as they
    come."""
    from paged_ops.integrations import expanded
    from paged_ops.integrations.vllm import latent

    steps: list[list[int]] = []
    build = latent.PagedOpsMLAMetadataBuilder.build

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        if metadata.num_prefills:
            steps.append([metadata.num_decodes, metadata.num_prefills])
        return metadata

    expanded.FEWEST_TOKENS, expanded.OVERHEAD, expanded.WINDOW = fewest, 0, 64 * 4
    expanded.saved = lambda new, tokens, sizes: 1
    latent.PagedOpsMLAMetadataBuilder.build = noting
    return steps


def implementations(worker: Any) -> list[str]:
    """The classes that attend in a worker."""
    modules = worker.model_runner.get_model().modules()
    return [type(module.impl).__name__ for module in modules if hasattr(module, "impl")]


def main() -> None:
    """Every case in turn; one that fails leaves its error, and the others go on."""
    backend, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    results = {}
    for name in names:
        try:
            results[name] = generate(folder, cases.CASES[name])
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (folder / f"{backend}.json").write_text(json.dumps(results))
        print(backend, name, results[name].get("seconds", "failed"), flush=True)


if __name__ == "__main__":
    main()
