"""Attention on the CPU against peers on a busy machine: one thread, the processor's time, all in turn.

    OMP_NUM_THREADS=1 python benchmarks/cpu_peers.py --out benchmarks/data/cpu_peers_amd_epyc.json [--rounds 9]

The providers of ``paged-ops bench`` that are installed, with its inputs; the floor is a read of keys and values. On a
quiet machine, ``paged-ops bench --device cpu`` measures by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from paged_ops.bench import cases, measure, run
from paged_ops.bench.cases import Case, decode
from paged_ops.bench.providers import PROVIDERS

CPU = torch.device("cpu")
SHAPES = {"1x128": decode(1, 128), "1x1024": decode(1, 1024), "1x4096": decode(1, 4096), "16x1024": decode(16, 1024)}
SHAPES |= {"1x256 prefill": ((256, 256),), "512 at 2048": ((512, 2048),)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, seqs in SHAPES.items():
            case = Case("cpu", name, seqs, dtype=dtype)
            sets = cases.make_inputs(case, CPU, 0, most=4)
            able = [each for each in PROVIDERS.values() if not each.reasons_against(case, CPU)]
            calls = {each.name: each.prepare(sets) for each in able}
            for each in calls.values():
                wanted = measure.reference(sets[0])
                error = measure.relative_error(each[0]().reshape(wanted.shape), wanted)
                assert error < (1e-4 if dtype == torch.float32 else 2e-2), error
            calls["read"] = [lambda each=each: each.kv_cache.view(torch.float32).sum() for each in sets]
            times: dict[str, list[float]] = {each: [] for each in calls}
            for _ in range(arguments.rounds):
                for n in range(len(sets)):
                    for each, made in calls.items():
                        start = time.thread_time()
                        made[n]()
                        times[each].append((time.thread_time() - start) * 1e6)
            median = {each: round(statistics.median(taken), 1) for each, taken in times.items()}
            rows.append(
                {
                    "case": name,
                    "dtype": str(dtype),
                    "median_us": median,
                    "best_us": {n: round(min(t), 1) for n, t in times.items()},
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    versions = {each.name: run.provider_version(each) for each in able}
    record = {**run.about(CPU), "clock": "time.thread_time", "versions": versions, "rows": rows}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
