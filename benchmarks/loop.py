"""``GenerationLoop`` on a GPU: a decode step of the loop next to the captured step alone. Whole loads: ``loads.py``.

    python benchmarks/loop.py --commit $(git rev-parse --short HEAD) --out loop.jsonl [--seconds 110]

The model has the shape of Llama-3-8B and random bfloat16 weights, as in ``decode_step.py``: transformers' model with
this package's attention, layers compiled, decodes captured.

Decode, for each number of sequences of 1024 tokens: milliseconds of the captured step alone, and with the choice of the
likeliest tokens. Then, with and without overlap, for each kind of sampling: milliseconds of ``step()``, and of these
the ones in which the host does not wait for tokens. Prompts are not computed; their keys and values are random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_step as d

from paged_ops import AttentionMetadata, KVCache
from paged_ops.generation import GenerationLoop, SamplingParams, model_step, sampling
from paged_ops.graphs import GraphKey

CONTEXT, STEPS, WARM = 1024, 60, 12
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8, "top_k": 0},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "top_k": 0, "min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "callable": {"temperature": 0, "logits_processor": lambda ids, scores: scores},
}


class WithoutPrompts:
    """A step whose prompts are not computed."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.max_model_len, self.weights_version = step.max_model_len, step.weights_version

    def __call__(self, ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Any) -> Tensor:
        if metadata.max_query_len > 1:
            return torch.zeros(len(last_rows), d.LLAMA_8B.vocabulary, dtype=torch.bfloat16, device=ids.device)
        logits: Tensor = self.step(ids, metadata, last_rows, kv_caches)
        return logits


class Waits:
    """Adds up the time in which the host waits for tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._read = sampling.Chosen.read

    def __enter__(self) -> Waits:
        def read(chosen: Any) -> Any:
            started = time.perf_counter()
            if chosen.event is not None:
                chosen.event.synchronize()
            self.seconds += time.perf_counter() - started
            return self._read(chosen)

        sampling.Chosen.read = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        sampling.Chosen.read = self._read  # type: ignore[method-assign]


def make_model(layers: int) -> Any:
    config = d.Config(**{**vars(d.LLAMA_8B), "layers": layers})
    model = d.transformers_model(config)
    d.fuse_projections(model)
    d.use_overlapping_products(model)
    return d.integration.PagedCausalLM(model, max_model_len=8192).compile_layers(options={"triton.enable_pdl": True})


def make_cache(model: Any, tokens: int) -> Any:
    kv_cache: KVCache = model.allocate_kv_cache(num_blocks=tokens // 16)
    for layer in kv_cache.layers:
        layer.normal_()
    return kv_cache


def captured_ms(loop: GenerationLoop, S: int) -> tuple[float, float]:
    """Milliseconds of the loop's graph alone, and with the likeliest tokens."""
    graph: Any = loop._model.graphs.captured[GraphKey(max(S, 2), max(S, 2))]

    def median(call: Callable[[], Any]) -> float:
        d.time_ms(call, 5)
        return min(statistics.median(d.time_ms(call, 30)) for _ in range(2))

    return median(graph.replay), median(lambda: graph.replay().max(-1))


def decode(loop: GenerationLoop, S: int, kind: str) -> dict[str, float]:
    draw = random.Random(S)
    params = SamplingParams(max_new_tokens=STEPS + 2 * WARM + 48, stop_token_ids=(), seed=1, **KINDS[kind])
    for _ in range(S):
        loop.submit(draw.choices(range(d.LLAMA_8B.vocabulary), k=CONTEXT - STEPS // 2 - WARM), params)
    while len(loop.step()) < S:
        pass
    for _ in range(WARM):
        loop.step()
    before = loop.stats.overlapped_steps
    with Waits() as waits:
        started = time.perf_counter()
        for _ in range(STEPS):
            loop.step()
        seconds = time.perf_counter() - started
    share = (loop.stats.overlapped_steps - before) / STEPS
    record = {}
    if kind == "greedy":
        record = dict(zip(("graph_ms", "graph_and_likeliest_ms"), captured_ms(loop, S), strict=True))
    for request in list(loop._scheduler.unfinished):
        loop.abort(request.request_id)
    loop.step()
    ms = {"loop_ms": 1e3 * seconds / STEPS, "host_ms": 1e3 * (seconds - waits.seconds) / STEPS}
    return {**record, **ms, "overlapped": share}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 64, 256])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--ways", nargs="*", default=["turn", "overlap"], choices=["turn", "overlap"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after them")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    until, ways = time.monotonic() + args.seconds, [way == "overlap" for way in args.ways]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit}
    torch.manual_seed(0)

    def add(**record: Any) -> None:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
        print(json.dumps(rounded), flush=True)
        with args.out.open("a") as out:
            out.write(json.dumps({**rounded, "layers": args.layers, **about}) + "\n")

    model = make_model(args.layers)
    most = max([*args.sizes, 1])
    kv_cache = make_cache(model, most * (CONTEXT + 128))
    model_step.capture_sizes = lambda _: sorted({max(size, 2) for size in args.sizes})
    options: dict[str, Any] = {"max_num_seqs": most, "max_num_tokens": 16384, "graph_mode": "FULL_DECODE_ONLY"}
    options["max_model_len"] = 2048
    loops = {way: GenerationLoop(WithoutPrompts(model), kv_cache, overlap=way, **options) for way in ways}
    for loop in loops.values():
        began = time.perf_counter()
        loop.warm_up()
        add(part="warm_up", seconds=time.perf_counter() - began)
    for kind in args.kinds:
        for S in args.sizes:
            for way, loop in loops.items():
                if time.monotonic() < until:
                    kv_cache.reset()
                    add(part="decode", sequences=S, kind=kind, overlap=way, **decode(loop, S, kind))


if __name__ == "__main__":
    main()
