"""What the choice of a step's tokens costs, next to greedy: microseconds of the GPU and of the host.

    python benchmarks/sampling.py --out sampling.json

Rows of 128256 bfloat16 logits with normal values of standard deviation 2, prompts of 900 tokens. The GPU's time is
taken while it is kept busy before, so it does not wait for the host; the host's is the time to issue the work.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paged_ops import KVCache
from paged_ops.generation import GenerationLoop, SamplingParams, sampling

V, PROMPT = 128_256, 900
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8, "top_k": 0},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "top_p 0.3": {"temperature": 0.8, "top_k": 0, "top_p": 0.3},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "top_k": 0, "min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def requests_of(R: int, kind: str) -> list[Any]:
    kv_cache = KVCache(1, 64, 16, 1, 16, device="cuda")
    step: Any = lambda *inputs: None  # noqa: E731
    loop = GenerationLoop(step, kv_cache, max_num_seqs=R, max_num_tokens=4096, max_model_len=1024)
    for i in range(R):
        prompt = [(7 * i + j) % V for j in range(PROMPT)]
        loop.submit(prompt, SamplingParams(max_new_tokens=4, seed=i, stop_token_ids=(), **KINDS[kind]))
    loop._inbox.deliver()
    return list(loop._scheduler.unfinished)


def microseconds(R: int, kind: str, repeats: int = 7) -> tuple[float, float]:
    """Of the GPU, and of the host."""
    logits = (torch.randn(R, V, device="cuda") * 2).bfloat16()
    call = functools.partial(sampling.choose, logits, list(range(R)), requests_of(R, kind))
    device, host = [], []
    for _ in range(3 + repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        start.record()
        began = time.perf_counter()
        call()
        host.append(1e6 * (time.perf_counter() - began))
        stop.record()
        torch.cuda.synchronize()
        device.append(1e3 * start.elapsed_time(stop))
    return statistics.median(device[3:]), statistics.median(host[3:])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 64, 256])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    rows = []
    for R in args.sizes:
        for kind in KINDS:
            device, host = microseconds(R, kind)
            rows.append({"rows": R, "kind": kind, "gpu_us": round(device), "host_us": round(host)})
            print(json.dumps(rows[-1]), flush=True)
    about = {"commit": args.commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
