"""Decode on the CPU against the floor: reading as many bytes as the keys and values have, in the same run.

    python benchmarks/cpu_decode.py [--repeat 31]

Batch 8, 32 query and 8 key/value heads, D 128, context 2048, block 16, shuffled block tables. Floor and op take turns
over four caches, several times any processor cache together, so that both read memory, under the same load. Prints a
line a dtype and appends it to benchmarks/data/cpu_decode.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import paged_ops
from paged_ops import reference

DATA = Path(__file__).parent / "data" / "cpu_decode.jsonl"
S, H, K, D, CONTEXT, B, CACHES = 8, 32, 8, 128, 2048, 16, 4


def milliseconds(calls: dict[str, Callable[[int], object]], repeat: int) -> dict[str, list[float]]:
    """Times of each call, in turn; the first three rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(repeat + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call(n)
            if n >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure(dtype: torch.dtype, repeat: int) -> dict[str, object]:
    """Times of the floor, of gathering, and of the op for one dtype; raises if the op is wrong."""
    torch.manual_seed(0)
    N = S * CONTEXT // B
    caches = [torch.randn(N, 2, B, K, D).to(dtype) for _ in range(CACHES)]
    tables = torch.randperm(N).view(S, -1).int()
    lens, starts = torch.full((S,), CONTEXT, dtype=torch.int32), torch.arange(S + 1, dtype=torch.int32)
    query = torch.randn(S, H, D).to(dtype)
    rest = (tables, lens, starts, D**-0.5)
    truth = reference.paged_attention(query.double(), caches[0], *rest)
    error = float((paged_ops.paged_attention(query, caches[0], *rest).double() - truth).abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 5e-3), f"wrong by {error}"
    calls = {
        "floor": lambda n: caches[n % CACHES].view(torch.float32).sum(),
        "gather": lambda n: paged_ops.gather_kv(caches[n % CACHES], tables, lens, S * CONTEXT),
        "op": lambda n: paged_ops.paged_attention(query, caches[n % CACHES], *rest),
    }
    times = milliseconds(calls, repeat)
    result = {f"{name}_ms": round(median(each), 3) for name, each in times.items()}
    result |= {f"{name}_best_ms": round(min(each), 3) for name, each in times.items()}
    ratio, best = result["op_ms"] / result["floor_ms"], result["op_best_ms"] / result["floor_best_ms"]
    return {"dtype": str(dtype), **result, "ratio": round(ratio, 2), "ratio_best": round(best, 2), "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=31)
    repeat = parser.parse_args().repeat
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    where = {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit,
    }
    DATA.parent.mkdir(exist_ok=True)
    for dtype in (torch.float32, torch.bfloat16):
        line = {**where, **measure(dtype, repeat)}
        print("  ".join(f"{name} {value}" for name, value in line.items()))
        with DATA.open("a") as data:
            data.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
