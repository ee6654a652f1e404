"""Loads of many requests: ``GenerationLoop``, and vLLM's engine where it is installed, on the same requests.

    python benchmarks/loads.py --out loads.jsonl --commit $(git rev-parse --short HEAD) [--engines loop FLASH_ATTN]
    python benchmarks/loads.py --out loads.jsonl --tiny --engines loop      # a tiny model, to try the script

Engines: ``loop`` is this package's loop over transformers' model; ``PAGED_OPS`` and ``FLASH_ATTN`` are vLLM with this
package's attention and with its own. Each has a process of its own with empty caches of kernels, and the shape of
Llama-3-8B with random bfloat16 weights. ``start_seconds``: from the model's weights (``loop``), or from nothing
(vLLM), to the first request. All tokens are greedy, and none ends a request.

Ragged: 400 requests, prompts of 32 to 4096 tokens, outputs of 32 to 256, all waiting at once; it runs twice, with other
tokens. Shared: 200 requests at once whose prompts begin with the same 2048 tokens. Arrivals: 150 requests as of the
ragged load, 12 a second at random times: the time to the first token, and between tokens, of each request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from engine_vllm import SWITCHES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

VOCABULARY, LONGEST, MOST_SEQS, CHUNK = 128_256, 8192, 256, 8192
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT")


class Due(NamedTuple):
    """A request, and the seconds after which it comes."""

    at: float
    prompt: list[int]
    new_tokens: int


def ragged(requests: int, seed: int, rate: float = 0.0, scale: int = 1) -> list[Due]:
    """Prompts and outputs of log-uniform and uniform lengths; with a rate they come at random times."""
    draw, at, due = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate) if rate else 0.0
        length = int(32 * (4096 / 32) ** draw.random()) // scale
        prompt = draw.choices(range(10, VOCABULARY), k=max(1, length))
        due.append(Due(at, prompt, max(1, draw.randint(32, 256) // scale)))
    return due


def shared(requests: int, seed: int, scale: int = 1) -> list[Due]:
    draw = random.Random(seed)
    first = draw.choices(range(10, VOCABULARY), k=2048 // scale)
    own = [draw.choices(range(10, VOCABULARY), k=draw.randint(32, 256) // scale) for _ in range(requests)]
    return [Due(0.0, first + each, 64 // scale) for each in own]


class Loop:
    """This package's loop."""

    def __init__(self, tiny: bool) -> None:
        from paged_ops.generation import GenerationLoop

        started = time.perf_counter()
        if tiny:
            model = tiny_model()
            cache, options = model.allocate_kv_cache(600), {"max_num_seqs": 8, "max_num_tokens": 64}
        else:
            import loop as benchmark

            model = benchmark.make_model(32)
            cache = model.allocate_kv_cache(num_blocks=320_000 // 16)
            options = {"max_num_seqs": MOST_SEQS, "max_num_tokens": CHUNK, "graph_mode": "FULL_DECODE_ONLY"}
        self.model_seconds, started = time.perf_counter() - started, time.perf_counter()
        self.loop = GenerationLoop(model, cache, **options)
        self.loop.warm_up()
        self.start_seconds = time.perf_counter() - started

    def add(self, due: Due) -> int:
        from paged_ops.generation import SamplingParams

        return self.loop.submit(due.prompt, SamplingParams(due.new_tokens, temperature=0, stop_token_ids=()))

    def step(self) -> Iterable[tuple[int, int]]:
        return [(new.request_id, 1) for new in self.loop.step()]

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def about(self) -> dict[str, Any]:
        return {"cached_tokens": self.loop.stats.cached_tokens, "overlapped_steps": self.loop.stats.overlapped_steps}


class VLLM:
    """vLLM's engine with one backend, as ``engine_vllm.py`` makes it."""

    def __init__(self, tiny: bool, backend: str) -> None:
        import engine_vllm

        arguments = ["--out", "", "--chunk", str(CHUNK), "--sharing", "1"]
        name, options = backend, engine_vllm.make_parser().parse_args(arguments)
        started = time.perf_counter()
        if backend == "PAGED_OPS":
            from paged_ops.integrations.vllm import plugin

            plugin.register()
            name = plugin.name()
        engine = engine_vllm.Engine(name, "tiny" if tiny else "llama-3-8b", options)
        self.model_seconds, self.start_seconds = 0.0, time.perf_counter() - started
        self.engine, self.count = engine.engine, 0
        self.lengths: dict[int, int] = {}

    def add(self, due: Due) -> int:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=due.new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.count), {"prompt_token_ids": due.prompt}, params)
        self.count += 1
        return self.count - 1

    def step(self) -> Iterable[tuple[int, int]]:
        for output in self.engine.step():
            request, length = int(output.request_id.split("-")[0]), len(output.outputs[0].token_ids)
            new, self.lengths[request] = length - self.lengths.get(request, 0), length
            yield request, new

    @property
    def has_work(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def about(self) -> dict[str, Any]:
        return {}


def tiny_model() -> Any:
    import transformers

    from paged_ops.integrations.transformers import PagedCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(num_attention_heads=2, max_position_embeddings=4096, **sizes)
    return PagedCausalLM(transformers.AutoModelForCausalLM.from_config(config).eval())


def run(engine: Any, load: list[Due]) -> dict[str, float]:
    """Serves a load. Seconds of all, and of each request to its first token and between two tokens."""
    ids: dict[int, Due] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    counts: dict[int, int] = {}
    waiting, started, steps = list(reversed(load)), time.perf_counter(), 0
    while waiting or engine.has_work:
        now = time.perf_counter() - started
        while waiting and waiting[-1].at <= now:
            due = waiting.pop()
            ids[engine.add(due)] = due
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1].at - now))
            continue
        new_tokens = list(engine.step())
        now, steps = time.perf_counter() - started, steps + 1
        for request, new in new_tokens:
            if new:
                first.setdefault(request, now)
                last[request], counts[request] = now, counts.get(request, 0) + new
    wrong = [request for request, due in ids.items() if counts[request] != due.new_tokens]
    if wrong:
        raise RuntimeError(f"requests {wrong[:5]} did not get as many tokens as they asked for")
    to_first = [first[request] - due.at for request, due in ids.items()]
    between = [(last[i] - first[i]) / (n - 1) for i, n in counts.items() if n > 1]
    quantiles = statistics.quantiles(to_first, n=20)
    return {
        "seconds": max(last.values()),
        "tokens_per_second": sum(counts.values()) / max(last.values()),
        "first_token_median": statistics.median(to_first),
        "first_token_p95": quantiles[18],
        "between_tokens_median": statistics.median(between),
        "steps": steps,
    }


def measure(name: str, args: argparse.Namespace) -> None:
    """One engine, in this process."""
    import torch

    until, scale = time.monotonic() + args.seconds, 16 if args.tiny else 1
    cuda = torch.cuda.is_available()
    about = {
        "engine": name,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "commit": args.commit,
    }

    def add(**record: Any) -> None:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
        print(json.dumps({"engine": name, **rounded}), flush=True)
        with args.out.open("a") as out:
            out.write(json.dumps({**rounded, **about}) + "\n")

    engine: Any = Loop(args.tiny) if name == "loop" else VLLM(args.tiny, name)
    if name != "loop":
        import vllm

        about["vllm"] = vllm.__version__
    add(load="start", start_seconds=engine.start_seconds, model_seconds=engine.model_seconds)
    n = 400 if not args.tiny else 12
    loads = {
        "ragged, first": lambda: ragged(n, 7, scale=scale),
        "ragged, second": lambda: ragged(n, 8, scale=scale),
        "shared": lambda: shared(n // 2, 9, scale),
        "arrivals": lambda: ragged(3 * n // 8, 10, 12.0, scale),
    }
    for load, make in loads.items():
        if time.monotonic() < until:
            add(load=load, **run(engine, make()), **engine.about())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", default=["loop"], choices=["loop", "PAGED_OPS", "FLASH_ATTN"])
    parser.add_argument("--seconds", type=float, default=150.0, help="of each engine; no load is begun after them")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.engines[0], args)
        return
    for name in args.engines:
        with tempfile.TemporaryDirectory() as folder:
            caches = {each: str(Path(folder, each)) for each in CACHES}
            command = [sys.executable, __file__, *sys.argv[1:], "--here", "--engines", name]
            subprocess.run(command, env={**os.environ, **SWITCHES, **caches}, check=False, timeout=args.seconds + 120)


if __name__ == "__main__":
    main()
