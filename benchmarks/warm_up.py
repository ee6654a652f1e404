"""What ``GenerationLoop.warm_up`` takes with empty caches, and what is compiled after it: nothing.

    python benchmarks/warm_up.py --out DIR [--modes eager captured] [--layers 4] [--steps 300]
    python benchmarks/warm_up.py --out DIR --modes --models dense windowed latent states indexed --steps 10000

Each mode is a process of its own with empty caches: the layers of Llama-3-8B's shape (a few of them, random weights),
eager, or compiled whole with captured decodes. It prints the seconds of ``warm_up`` by phase, then runs random requests
twice, the second time with the same seed. Compilations are counted by Triton's listener (a kernel that is found on disk
counts as loaded) and by dynamo's counters. ``--models`` runs random requests over tiny models of each kind of cache:
the loops and loads of ``tests/generation/warm_loops.py``, there on an imitated GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "captured": {"compile": True, "graph_mode": "FULL_DECODE_ONLY"},
}


class Compilations:
    """Kernels of Triton that this process compiled, those that it only loaded, and graphs of dynamo."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded: list[str] = []
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (self.loaded if cache_hit else self.compiled).append(str(metadata.get("name")))

    def counts(self) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        graphs = counters["stats"]["unique_graphs"]
        return {"compiled": list(self.compiled), "loaded": list(self.loaded), "graphs": graphs}


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two counts."""
    names = {name: after[name][len(before[name]) :] for name in ("compiled", "loaded")}
    return {**names, "graphs": after["graphs"] - before["graphs"]}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def requests(loop: Any, num_steps: int, seed: int) -> list[float]:
    """Random requests for so many steps; the seconds of each step."""
    from paged_ops.generation import SamplingParams

    rng, seconds, submitted = random.Random(seed), [], []
    for _ in range(num_steps):
        while rng.random() < 0.35 or not loop.has_work:
            length = rng.randint(1, rng.choice([1, 2, 16, 60, 300, 1000, 3000]))
            prompt = [rng.randrange(1000) for _ in range(length)]
            how = rng.choice([{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}, {"n": 2}])
            params = SamplingParams(max_new_tokens=rng.randint(1, 200), stop_token_ids=(), **how)
            submitted.append(loop.submit(prompt, params))
        started = time.perf_counter()
        loop.step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    for request_id in submitted[-1000:]:
        loop.abort(request_id)
    while loop.has_work:
        loop.step()
    return seconds


@contextlib.contextmanager
def timed(phases: dict[str, float], owner: Any, name: str) -> Iterator[None]:
    """Adds the seconds of a method's calls to ``phases``."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - started

    setattr(owner, name, call)
    yield
    setattr(owner, name, real)


def measure(mode: str, layers: int, num_steps: int) -> dict[str, Any]:
    """One mode, in this process."""
    from compile_decode import Config, Llama

    from paged_ops import KVCache
    from paged_ops.generation import GenerationLoop
    from paged_ops.graphs import DecodeGraphs
    from paged_ops.lowerings.warm_up import Ahead

    started, counted = time.perf_counter(), Compilations()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"  # a tiny model, to try the script
    sizes = (4096, 32, 8, 128, 14336, 32768) if on_gpu else (64, 4, 2, 32, 64, 1000)
    config = Config(layers, *sizes, max_positions=1 << 14)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(config).eval()
    torch.set_default_dtype(torch.float32)
    heads = config.kv_heads, config.head_size
    cache = KVCache(layers, 3000, 16, *heads, dtype=torch.bfloat16, device=device, num_host_blocks=500)
    loop = GenerationLoop(model, cache, max_num_seqs=64, max_num_tokens=2048, max_model_len=4096, **MODES[mode])
    phases: dict[str, float] = {"model": time.perf_counter() - started}
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        methods = (DecodeGraphs, "compile_ahead"), (DecodeGraphs, "run_padding"), (DecodeGraphs, "_capture_one")
        for owner, name in (*methods, (Ahead, "finish")):
            stack.enter_context(timed(phases, owner, name))
        loop.warm_up()
        synchronize()
    phases["warm_up"] = time.perf_counter() - started
    warm = counted.counts()
    first = requests(loop, num_steps, 1)
    after = counted.counts()
    second = requests(loop, num_steps, 1)
    stats = {name: value for name, value in vars(loop.stats).items() if isinstance(value, int)}
    return {
        "mode": mode,
        "layers": layers,
        "phases": {name: round(value, 2) for name, value in phases.items()},
        "warm_up": {**warm, "loaded": len(warm["loaded"])},
        "first": {"seconds": sum(first), "slowest": sorted(first)[-5:], **since(warm, after)},
        "second": {"seconds": sum(second), "slowest": sorted(second)[-5:], **since(after, counted.counts())},
        "stats": stats,
        "device": torch.cuda.get_device_name() if on_gpu else device,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }


def count(name: str, num_steps: int) -> dict[str, Any]:
    """What the loop over a tiny model compiles, in this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.generation import warm_loops

    counted = Compilations()
    loop, _ = warm_loops.make_loop(name, "cuda")
    loop.warm_up()
    synchronize()
    warm, started = counted.counts(), time.perf_counter()
    warm_loops.load(loop, num_steps, 1)
    synchronize()
    stats = {name: value for name, value in vars(loop.stats).items() if isinstance(value, int)}
    return {
        "model": name,
        "warm_up": {**warm, "loaded": len(warm["loaded"])},
        "later": {"seconds": time.perf_counter() - started, **since(warm, counted.counts())},
        "stats": stats,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--models", nargs="*", default=[], help="of warm_loops.MODELS")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--here", action="store_true", help="in this process, with its caches")
    options = parser.parse_args()
    if options.here:
        name, *_ = *options.modes, *options.models
        found = measure(name, options.layers, options.steps) if options.modes else count(name, options.steps)
        (options.out / f"warm_up_{name}.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for what in [["--modes", each] for each in options.modes] + [
        ["--modes", "--models", each] for each in options.models
    ]:
        with tempfile.TemporaryDirectory() as folder:
            names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
            caches = {name: str(Path(folder, name)) for name in names}
            command = [sys.executable, __file__, "--here", "--out", str(options.out), *what]
            sizes = ["--layers", str(options.layers), "--steps", str(options.steps)]
            subprocess.run([*command, *sizes], env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
