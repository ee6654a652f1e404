"""Speed of the cache ops on one GPU, against the ceilings of the same run.

    python benchmarks/gpu_cache.py --out benchmarks/data/gpu_cache.jsonl        # everything, under a minute
    python benchmarks/gpu_cache.py --only write --only merge                    # some
    python benchmarks/gpu_cache.py --sweep                                      # the tunables of configs/cache_*.json

What is measured, and how, is in :mod:`paged_ops.bench.cache_ops`. A row is printed and appended to ``--out`` only if
its results were right.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton

from paged_ops.bench.cache_ops import DEVICE, PARTS, Row, copy_row, gathers, merge_row, write_row
from paged_ops.lowerings.gpu import cache, merge
from paged_ops.lowerings.gpu.target import target_of


def sweep() -> Iterator[Row]:
    """Each tunable over its range, the rest as configured."""
    tile = {"elements": [512, 1024, 2048], "num_warps": [1, 2, 4, 8]}
    chunk = {"chunk_bytes": [4096, 8192, 16384], "num_warps": [1, 2, 4]}
    space: list[tuple[str, dict[str, list[int]], Callable[[], Row]]] = [
        ("reshape_and_cache", tile, lambda: write_row("8192 tokens, bf16", 8192)),
        ("reshape_and_cache", tile,
         lambda: write_row("8192 tokens, bf16 to e4m3, scale [1]", 8192, stored=torch.float8_e4m3fn, scales=1)),
        ("reshape_and_cache", tile, lambda: write_row("256 tokens, bf16", 256)),
        ("merge_attention_states", tile, lambda: merge_row(4096, 32, 128)),
        ("gather_kv", tile, lambda: next(gathers())),
        ("copy_blocks", chunk, lambda: copy_row("1024 blocks of 32 KiB", 1, 1024, 32 << 10)),
        ("copy_blocks", chunk, lambda: copy_row("1024 blocks of 1 MiB", 1, 1024, 1 << 20)),
    ]  # fmt: skip
    for op, ranges, measure in space:
        numbers = target_of(torch.device(DEVICE, torch.cuda.current_device())).numbers[op]
        usual = dict(numbers)
        for values in itertools.product(*ranges.values()):
            setting = dict(zip(ranges, values, strict=True))
            numbers.update(setting)
            cache._writes.clear()
            cache.constants.cache_clear()
            cache._write_launcher.cache_clear()
            merge._launcher.cache_clear()
            row = measure()
            yield {**row, "case": f"{row['case']} {setting}"}
        numbers.update(usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the rows to this file, one JSON object a line")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part; may be given several times")
    parser.add_argument("--sweep", action="store_true", help="try the tunables instead")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    torch.manual_seed(0)
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}\n{'us':>9} {'GB/s':>7}  target")
    wrong, parts = [], [sweep] if options.sweep else [PARTS[name] for name in options.only or PARTS]
    for row in itertools.chain.from_iterable(part() for part in parts):
        if not row.pop("right"):
            wrong.append(f"{row['op']}, {row['case']}")
            continue
        rate = f"{row['bytes'] / row['us'] / 1e3:.1f}" if "bytes" in row else ""
        goal = row.get("target_us") or row.get("target_gbps") or ""
        print(f"{row['us']:9.2f} {rate:>7}  {goal:>6}  {row['op']}: {row['case']}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps({**row, **about}) + "\n")
        torch.cuda.empty_cache()
    if wrong:
        raise SystemExit("wrong results: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
