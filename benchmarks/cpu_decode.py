"""Attention on the CPU: decode against the floor of reading the cache, prefill against a gather and dense attention.

    python benchmarks/cpu_decode.py [--repeat 31] [--case decode] [--dtype bfloat16] [--processor-time]

32 query and 8 key/value heads, D 128, block 16, shuffled block tables. Decode: batch 8, context 2048; the floor is a
read of the bytes of keys and values. Prefill: 64, 1024 and 2048 tokens, and a chunk of 512 at context 2048; the op is
compared with :func:`gather_kv` followed by dense SDPA, and with torch ops alone (as without a compiler). All take turns
over four caches, together several times as large as any processor cache, so all read memory under the same load. On a
shared machine the processor time of one thread says more than the clock. Prints a line per case and dtype, and appends
it to benchmarks/data/cpu_decode.jsonl.
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
from typing import Any

import torch
import torch.nn.functional as F

import paged_ops
from paged_ops import reference
from paged_ops.lowerings.cpu import fused, prepared

DATA = Path(__file__).parent / "data" / "cpu_decode.jsonl"
H, K, D, B, CACHES = 32, 8, 128, 16, 4
CASES = {  # sequences, rows, keys
    "decode": (8, 1, 2048),
    "prefill": (1, 1024, 1024),
    "chunked prefill": (1, 512, 2048),
    "short prefill": (1, 64, 64),
    "long prefill": (1, 2048, 2048),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Clock = Callable[[], float]


def milliseconds(calls: dict[str, Callable[[int], object]], repeat: int, clock: Clock) -> dict[str, list[float]]:
    """Times of each call, in turn; the first three rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(repeat + 3):
        for name, call in calls.items():
            start = clock()
            call(n)
            if n >= 3:
                times[name].append((clock() - start) * 1e3)
    return times


def measure(case: str, dtype: torch.dtype, repeat: int, clock: Clock = time.perf_counter) -> dict[str, object]:
    """Times of the op, of torch ops alone, and of the baseline; raises if the op is wrong."""
    torch.manual_seed(0)
    S, q, n = CASES[case]
    N = S * n // B
    caches = [torch.randn(N, 2, B, K, D).to(dtype) for _ in range(CACHES)]
    tables = torch.randperm(N).view(S, -1).int()
    lens, starts = torch.full((S,), n, dtype=torch.int32), torch.arange(S + 1, dtype=torch.int32) * q
    query = torch.randn(S * q, H, D).to(dtype)
    rest = (tables, lens, starts, D**-0.5)
    # dict[Any, Any]: calls that are prepared without a compiler.
    without_compiler: dict[Any, Any] = {}
    later = None if q == n else torch.ones(q, n, dtype=torch.bool).tril(n - q)

    def op(turn: int) -> torch.Tensor:
        return paged_ops.paged_attention(query, caches[turn % CACHES], *rest)

    def torch_ops(turn: int) -> torch.Tensor:  # unittest.mock would take a tenth of the time of a short prompt
        found, others = fused.compiled, prepared._prepared
        fused.compiled, prepared._prepared = (lambda: None), without_compiler
        try:
            return op(turn)
        finally:
            fused.compiled, prepared._prepared = found, others

    def floor(turn: int) -> torch.Tensor:
        return caches[turn % CACHES].view(torch.float32).sum()

    def dense(turn: int) -> torch.Tensor:
        gathered = paged_ops.gather_kv(caches[turn % CACHES], tables, lens, n)
        key, value = (each.transpose(0, 1)[None] for each in gathered)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, attn_mask=later, is_causal=later is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).contiguous()

    truth = reference.paged_attention(query.double(), caches[0], *rest)
    errors = {call.__name__: float((call(0).double() - truth).abs().max()) for call in (op, torch_ops)}
    budget = 1e-5 if dtype == torch.float32 else 0.02 if q > 1 else 5e-3  # few keys: large values
    assert max(errors.values()) < budget, f"wrong by {errors}"
    against = {"floor": floor} if case == "decode" else {"dense": dense}
    times = milliseconds({**against, "op": op, "torch_ops": torch_ops}, repeat, clock)
    result = {f"{name}_ms": round(median(each), 3) for name, each in times.items()}
    result |= {f"{name}_best_ms": round(min(each), 3) for name, each in times.items()}
    (other,) = against
    ratio, best = (result["op" + kind] / result[other + kind] for kind in ("_ms", "_best_ms"))
    return {
        "case": case,
        "dtype": str(dtype),
        **result,
        "ratio": round(ratio, 2),
        "ratio_best": round(best, 2),
        "error": errors["op"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.processor_time else time.perf_counter
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    where = {
        "device": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "compiled": fused.compiled() is not None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit,
        "clock": clock.__name__,
    }
    DATA.parent.mkdir(exist_ok=True)
    for case in arguments.case or CASES:
        for dtype in arguments.dtype or DTYPES:
            line = {**where, **measure(case, DTYPES[dtype], arguments.repeat, clock)}
            print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)
            with DATA.open("a") as data:
                data.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
