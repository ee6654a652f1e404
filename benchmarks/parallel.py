"""Several GPUs of one host: checks, then times, as records.

    python benchmarks/parallel.py correct reduce --ranks 2 --commit $(git rev-parse --short HEAD) --out parallel.jsonl

starts each named part by torchrun in its own processes, one per GPU, so a part that fails or hangs (its time limit then
ends it) does not affect the others. Each part is a function of :class:`Bench`; all ranks call it, and rank 0 writes its
records as lines of JSON. The parts and their documentation are in the files ``parallel_*.py`` next to this one.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

HERE = Path(__file__).parent
# part -> (module in this folder, time limit in seconds)
PARTS = {
    "correct": ("parallel_reduce", 100),
    "replays": ("parallel_reduce", 100),
    "reduce": ("parallel_reduce", 130),
    "gathers": ("parallel_reduce", 60),
    "one": ("parallel_steps", 150),
    "two": ("parallel_steps", 150),
    "plain": ("parallel_steps", 150),
    "tokens": ("parallel_steps", 150),
    "meetings": ("parallel_steps", 60),
    "loop": ("parallel_loop", 150),
    "transfer": ("parallel_loop", 60),
    "bits": ("parallel_loop", 100),
    "context": ("parallel_context", 60),
    "context_attention": ("parallel_context", 70),
    "context_loop": ("parallel_context", 170),
    "context_kinds": ("parallel_context", 70),
}


class Bench:
    """One rank of a part."""

    def __init__(self, part: str, out: Path, commit: str, options: dict[str, Any]) -> None:
        self.part, self.out, self.commit, self.options = part, out, commit, options
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)  # where NCCL communicates
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=90))
        self.group: Any = dist.group.WORLD

    def say(self, *words: Any) -> None:
        if self.rank == 0:
            print(f"[{self.part}]", *words, flush=True)

    def add(self, **record: Any) -> None:
        """A result; rank 0's is kept."""
        self.say(json.dumps(record))
        if self.rank == 0:
            about = dict(device=torch.cuda.get_device_name(self.device), ranks=self.size, torch=torch.__version__)
            about |= dict(triton=triton.__version__)
            about |= dict(commit=self.commit, date=time.strftime("%Y-%m-%d"))
            with self.out.open("a") as out:
                out.write(json.dumps({"part": self.part, **record, **about}) + "\n")

    def every(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def capture(self, call: Callable[[], Any], warm: int = 2) -> torch.cuda.CUDAGraph:
        """The call as a graph, after some calls that compile it; all ranks together."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(warm):
                call()
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)
        return graph

    def median_us(self, graph: torch.cuda.CUDAGraph, calls: int = 1, repeats: int = 30) -> float:
        """Microseconds of one of the calls of a graph: the median of replays, the lower of two runs, the slowest
        rank's."""
        medians = []
        for _ in range(2):
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize(self.device)
            dist.barrier(group=self.group)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize(self.device)
            times = [1e3 * a.elapsed_time(b) / calls for a, b in itertools.pairwise(events)]
            medians.append(statistics.median(times))
        return max(self.every(min(medians)))


def run_here(part: str, out: Path, commit: str, options: dict[str, Any]) -> int:
    """One rank of one part."""
    module, seconds = PARTS[part]
    faulthandler.dump_traceback_later(seconds - 5, exit=True)
    bench = Bench(part, out, commit, options)
    sys.path.insert(0, str(HERE))
    try:
        with torch.no_grad():
            getattr(importlib.import_module(module), part)(bench)
        torch.cuda.synchronize(bench.device)
        bench.say("done")
        status = 0
    except BaseException:
        print(f"[{part}] rank {bench.rank}", traceback.format_exc(), flush=True)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # without the collectives of a clean end, which a failed part would wait in


def start(part: str, ranks: int, arguments: list[str]) -> int:
    """All ranks of one part, by torchrun; ended after the part's time limit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__)), part, "--here", *arguments]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(PARTS[part][1])
    except subprocess.TimeoutExpired:
        print(f"[{part}] took more than {PARTS[part][1]} s", flush=True)
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("parallel.jsonl"), help="a file of JSON lines to append to")
    parser.add_argument("--options", type=json.loads, default={}, help="of the parts: JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        sys.exit(run_here(args.parts[0], args.out, args.commit, args.options))
    passed_on = ["--commit", args.commit, "--out", str(args.out), "--options", json.dumps(args.options)]
    failed = []
    for part in args.parts:
        began = time.monotonic()
        if start(part, args.ranks, passed_on):
            failed.append(part)
        print(f"== {part}: {'FAILED' if part in failed else 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
