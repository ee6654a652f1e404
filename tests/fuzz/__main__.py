"""The command line of the harness: ``python -m tests.fuzz --help``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

CAMPAIGNS = {
    "ops": "every op against float64",
    "allocator": "BlockAllocator against a slow model of contents",
    "metadata": "the builder and the batch helpers against plain Python",
    "loop": "GenerationLoop under aborts, exceptions and preemption against a dense model",
    "lifecycle": "loops that share a cache, and threads that share a loop",
    "programs": "random programs of ops, compiled against eager",
    "threads": "ops from several threads, and on random streams, against the same ops alone",
    "ambient": "every case of the registry under autocast, default devices and other states, against the same without",
    "invariant": "rows with batch_invariant in any batch, order, chunk and cache, bit by bit",
    "invariant_batches": "the same over hundreds of batches of a kind of kernel",
    "invariant_hopper": "the same over the kinds that the batch-invariant Hopper kernel serves",
    "graphs": "captured steps against plain ones (imitated graphs on the CPU)",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("campaign", choices=CAMPAIGNS, help="; ".join(f"{k}: {v}" for k, v in CAMPAIGNS.items()))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or interpreter: the GPU's kernels without one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", type=int, help="kinds of kernels to draw from; by default 160 on GPUs, else any")
    parser.add_argument("--case", type=int, help="run this one case again")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="a case that takes longer is stuck")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument("--out", type=Path, help="results as JSON, written every few seconds")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    # Before torch starts its threads: processes share the cores by themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.helpers import interpreter

        interpreter.quicken()
    import torch

    from . import runner

    torch.set_num_threads(1)
    variants = arguments.variants
    if variants is None:
        variants = 160 if arguments.device.startswith("cuda") else 0
    # A multiple of the processes: then each variant is compiled by one of them.
    variants = -(-variants // arguments.processes) * arguments.processes
    options = runner.Options(arguments.seed, arguments.device, variants)
    module = importlib.import_module(f".{arguments.campaign}", __package__)
    function = module.run
    if arguments.work:
        first, stride, until, state = arguments.work
        numbers = int(first), int(stride), float(until)
        prepare = getattr(module, "prepare", None)
        return runner.work(arguments.campaign, function, options, *numbers, Path(state), prepare)
    if arguments.case is not None:
        results = runner.Results()
        runner.run_case(arguments.campaign, function, arguments.case, options, results)
        found = results.as_json()
    else:
        found = runner.run_long(
            arguments.campaign,
            options,
            seconds=arguments.seconds,
            processes=arguments.processes,
            case_seconds=arguments.case_seconds,
            out=arguments.out,
            extra={"commit": arguments.commit} if arguments.commit else None,
        )
    for finding in found["findings"][:20]:
        replay = f"python -m tests.fuzz {arguments.campaign} --device {options.device} --seed {options.seed}"
        print(f"--- {replay} --variants {variants} --case {finding['case']}\n{finding['what']}\n")
    print(json.dumps({name: value for name, value in found.items() if name != "findings"}))
    return 1 if found["counts"].get("findings") else 0


if __name__ == "__main__":
    sys.exit(main())
