"""select_keys next to a matmul and topk of PyTorch, and to the time to read the index keys.

    python benchmarks/indexer.py --out benchmarks/data/indexer.jsonl

The indexer of DeepSeek-V3.2: 64 heads of 128, k 2048, decode and a prompt. PyTorch gets the keys without paging, and
has no limit on its memory. On a GPU each provider is one captured graph, and the GPU's caches are flushed before each
replay. Selected entries are compared with PyTorch's first: their smallest score, and their number.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import paged_ops
from paged_ops.bench.measure import Replay, _reader
from paged_ops.bench.run import about

HEADS, SIZE, BLOCK = 64, 128, 64
FORMATS = {"bfloat16": None, "fp8_ds_index": "fp8_ds_index"}


def by_torch(query: Tensor, keys: Tensor, weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores ``[T, n]`` of ``keys [S, n, Di]`` for the last T/S tokens of each sequence, and the best k of each row."""
    S, n, _ = keys.shape
    rows = len(query) // S
    scores = (query.view(S, rows * HEADS, SIZE) @ keys.mT).float().relu().view(S, rows, HEADS, n)
    scores = (weights.view(S, rows, 1, HEADS) @ scores)[:, :, 0]
    hidden = torch.ones(rows, n, dtype=torch.bool, device=query.device).triu(n - rows + 1)
    scores = scores.masked_fill_(hidden, -torch.inf).flatten(0, 1)
    return scores, scores.topk(k, sorted=False).indices


def row(name: str, S: int, q_len: int, n: int, k: int, device: torch.device) -> dict[str, object]:
    query = torch.randn(S * q_len, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    weights = torch.rand(S * q_len, HEADS, device=device)
    keys = torch.randn(S, n, SIZE, device=device, dtype=torch.bfloat16)
    shape = (S * n // BLOCK, BLOCK, 132 if FORMATS[name] else SIZE)
    cache = torch.zeros(shape, device=device, dtype=torch.uint8 if FORMATS[name] else torch.bfloat16)
    options = {"kv_cache_dtype": FORMATS[name]} if FORMATS[name] else {}
    slots = torch.arange(S * n, device=device)
    paged_ops.latent_cache_write(keys.flatten(0, 1), query.new_empty(S * n, 0), cache, slots, **options)
    tables = torch.arange(S * n // BLOCK, device=device, dtype=torch.int32).view(S, -1)
    lens = torch.full((S,), n, device=device, dtype=torch.int32)
    batch = tables, lens, torch.arange(S + 1, device=device, dtype=torch.int32) * q_len

    def select() -> Tensor:
        return paged_ops.select_keys(query, cache, *batch, k, weights=weights, relu=True, **options)

    scores, best = by_torch(query, keys, weights, k)
    chosen = select()[:, 0].long()
    assert bool((chosen >= 0).all() & (chosen.diff(dim=1) > 0).all()), "entries are not ascending, or too few"
    worst = [scores.gather(1, each).amin(1) for each in (chosen, best)]
    scale = scores.where(scores.isfinite(), 0.0).abs().amax(1)
    error = float(((worst[1] - worst[0]) / scale).amax())
    assert error < (0.1 if FORMATS[name] else 0.01), f"an entry has a score {error:.3g} too low"
    del scores, best, worst
    read = _reader(device)
    words = cache.view(torch.uint8).flatten().view(torch.float32)
    calls = {
        "select_keys": select,
        "torch matmul, topk": lambda: by_torch(query, keys, weights, k)[1],
        "read the keys": lambda: read(words),
    }
    us = {provider: round(Replay([call], device).median_us(20), 1) for provider, call in calls.items()}
    percent = round(100 * us["read the keys"] / us["select_keys"], 1)
    batch_name = f"{S} x {q_len} of {n}"
    return {"batch": batch_name, "k": k, "format": name, "us": us, "percent_of_read": percent, "error": round(error, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--divide", type=int, default=1, help="Divide lengths and k, to try it on a CPU.")
    parser.add_argument("--commit", help="in the records; by default from git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, lines = torch.device(options.device), []
    for S, q_len, n in ((64, 1, 131072), (64, 1, 8192), (1, 1, 131072), (1, 512, 16384)):
        for name in FORMATS:
            sizes = (max(1, q_len // options.divide), n // options.divide, 2048 // options.divide)
            found = row(name, S, *sizes, device)
            lines.append(json.dumps({**about(device, options.commit), **found}))
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
