"""select_keys in the campaign ``ops``: float32 holds all scores exactly, many of them are equal, and so every entry is
known from the specification alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import paged_ops

from .runner import INTERPRETER, Case

LONGEST = {INTERPRETER: 60, "cpu": 300, "cuda": 5000}


def check(case: Case) -> None:
    """One batch over a cache of its own, full of NaN where there is no token."""
    rng, device = case.random, case.device
    dice = np.random.default_rng(rng.getrandbits(62))
    few = case.options.device == INTERPRETER
    longest = LONGEST.get(case.options.device, LONGEST["cuda"])
    lens = [rng.choice((0, 1, rng.randint(1, longest))) for _ in range(rng.randint(1, 3 if few else 5))]
    rows = [rng.choice((0, 1, min(n + 2, rng.randint(1, 9)))) for n in lens]
    T, Hi, B = sum(rows) + rng.choice((0, 2)), rng.choice((1, 4, 5, 64)), rng.choice((1, 3, 16, 64))
    dtype = rng.choice((torch.float32, torch.float16, *([] if few else [torch.bfloat16])))
    stored, named = rng.choice(
        ((dtype, {}), (torch.float8_e4m3fn, {}), (torch.uint8, {"kv_cache_dtype": "fp8_ds_index"}))
    )
    Di = 128 if named else rng.choice((8, 13, 64, 128))
    options = _options(rng)
    k = rng.choice((1, 2, 7, 40, longest)) + options.get("local_blocks", 0)

    need = [-(-n // B) for n in lens]
    ids = dice.permutation(sum(need) + 2)
    tables = np.full((len(lens), max(need) + rng.choice((0, 1))), 2**30)
    for s, start in enumerate(np.cumsum(need) - need):
        tables[s, : need[s]] = ids[start : start + need[s]]
    keys = [dice.integers(-1, 2, (n, Di)) for n in lens]
    queries = dice.integers(-1, 2, (T, Hi, Di))
    weights = dice.integers(-2, 3, (T, Hi))

    def put(values: Any, kind: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(device=device, dtype=kind)

    shape = (len(ids), B, 132 if "kv_cache_dtype" in named else Di)
    cache = torch.full(shape, torch.nan, device=device).to(dtype)
    if stored != dtype:
        cache = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(stored)
    slots = [tables[s, j // B] * B + j % B for s, n in enumerate(lens) for j in range(n)]
    latent = put(np.concatenate([*keys, np.zeros((0, Di))]), dtype)
    paged_ops.latent_cache_write(latent, latent[:, :0], cache, put(slots, torch.int64), **named)
    if not options.get("per_head") and rng.random() < 0.7:
        named["weights"] = put(weights, rng.choice((torch.float32, dtype)))
    else:
        weights = np.ones_like(weights)
    starts = np.cumsum([0, *rows])
    batch = put(tables, torch.int32), put(lens, torch.int32), put(starts, torch.int32)
    got = paged_ops.select_keys(put(queries, dtype), cache, *batch, k, **named, **options).cpu().numpy()
    case.counts["calls"] += 2
    case.counts["calls of select_keys"] += 1

    want = np.full((T, Hi if options.get("per_head") else 1, k), -1)
    for s, n in enumerate(lens):
        for t in range(starts[s], starts[s + 1]):
            scores = queries[t] @ keys[s].T
            for g, entries in enumerate(_lists(scores, weights[t], n - starts[s + 1] + t, k, options)):
                want[t, g, : len(entries)] = entries
    if (got != want).any():
        t, g, _ = np.argwhere(got != want)[0]
        case.report(
            f"select_keys: {got[t, g]} instead of {want[t, g]} in row {t}, list {g}, of {lens} {rows} {options}"
        )


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"relu": rng.random() < 0.5, "scale": rng.choice((1.0, 0.25, -2.0))}
    options["per_head"] = rng.random() < 0.4
    pool = rng.choice(("none", "max", "mean"))
    if pool != "none":
        options |= {"pool": pool, "block_size": rng.choice((1, 3, 8, 128))}
    # A mean over the keys of a whole block orders blocks as their sums do; the row's own may have fewer.
    options["local_blocks"] = rng.choice((1, 2)) if pool == "mean" else rng.choice((0, 0, 1, 3))
    options["causal"] = pool == "mean" or rng.random() < 0.8
    return options


def _lists(scores: np.ndarray, weights: np.ndarray, i: int, k: int, options: dict[str, Any]) -> list[list[int]]:
    """The entries of a row at position i, one list for all heads or one per head, from the scores ``[Hi, n]``."""
    scores = scores * options["scale"]
    if options["relu"]:
        scores = np.maximum(scores, 0)
    if not options["per_head"]:
        scores = (weights @ scores)[None]
    if options["causal"]:
        scores = scores[:, : max(i + 1, 0)]
    size = options.get("block_size", 1)
    cuts = range(0, scores.shape[1], size)
    pool = np.mean if options.get("pool") == "mean" else np.max
    found = []
    for of_list in scores:
        pooled = [pool(of_list[cut : cut + size]) for cut in cuts]
        local = [i // size - options["local_blocks"] < e <= i // size for e in range(len(pooled))]
        order = sorted(range(len(pooled)), key=lambda e: (not local[e], -pooled[e], e))
        found.append(sorted(order[:k]))
    return found
