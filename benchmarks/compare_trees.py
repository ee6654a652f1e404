"""Two checkouts of this package on one GPU: the bits of their attention, and its time, case by case in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_trees.py /tmp/before --groups decode,prefill --out compare.jsonl

Each checkout has a process of its own. Both get the inputs of ``paged-ops bench`` from the same seed, and are timed in
turns: before, after, before, after, ... A record has the times of all turns, the ratio of their medians, and whether
the first and the last result have equal bits. The exit code is 1 if a result was wrong or a case was slower than
``--limit`` and than the spread of the turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Tree:
    """The process of one checkout."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(root)]
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
        )

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline() or '{"failed": "the process has ended"}')


def compile_all(roots: Sequence[Path], requests: Sequence[Any], workers: int) -> None:
    """Compile the kernels of all cases, by several processes of each checkout."""
    running = []
    for root in roots:
        for n in range(workers):
            tree = Tree(root)
            assert tree._process.stdin is not None
            for request in requests[n::workers]:
                tree._process.stdin.write(json.dumps([*request, "once"]) + "\n")
            tree._process.stdin.close()
            running.append(tree._process)
    for process in running:
        assert process.stdout is not None
        process.stdout.read()
        process.wait()


def serve(root: str) -> None:
    """Answer requests: ``[group, name, heads]`` prepares a case and describes its result, ``[repeats]`` times it, and
    ``[group, name, heads, "once"]`` calls it once."""
    import torch

    import paged_ops
    from paged_ops.bench import cases, measure
    from paged_ops.bench.providers import PagedOps

    assert Path(paged_ops.__file__).is_relative_to(root), f"expected the package of {root}, got {paged_ops.__file__}"
    out, sys.stdout = sys.stdout, sys.stderr
    device = torch.device("cuda", torch.cuda.current_device())
    known = {(case.group, case.name, case.num_heads, case.num_kv_heads): case for case in cases.gpu_cases()}
    replay, rest = None, 0.0
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = {}
        try:
            if len(request) == 1:
                answer = replay.median_us(request[0], rest)
            elif request[-1] == "once":
                sets = cases.make_inputs(known[tuple(request[:-1])], device, 0, most=2)
                PagedOps().prepare(sets)[0]()
                torch.cuda.synchronize()
            else:
                replay = None
                torch.cuda.empty_cache()
                case = known[tuple(request)]
                sets = measure.inputs_of(case, device)
                replay = measure.Replay(PagedOps().prepare(sets), device)
                error = measure.verify(replay, sets)
                results = replay.results[0], replay.results[-1]
                digest = hashlib.sha256(b"".join(each.cpu().view(torch.uint8).numpy().tobytes() for each in results))
                rest = measure.REST_SECONDS if case.flops > 100 * case.bytes else 0.0
                answer = {"error": error, "bits": digest.hexdigest()[:16]}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=out, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--after", type=Path, default=ROOT, help="by default the checkout of this file")
    parser.add_argument("--groups", default="decode,prefill,fp8,sizes,latent", help="with commas between")
    parser.add_argument("--cases", default="", help="a regular expression that finds cases by heads and name")
    parser.add_argument("--turns", type=int, default=3, help="of each checkout")
    parser.add_argument("--repeats", type=int, default=15, help="replays of a turn, whose median is taken")
    parser.add_argument("--workers", type=int, default=4, help="processes of each checkout that compile kernels first")
    parser.add_argument("--limit", type=float, default=1.01, help="the largest ratio of times that counts as equal")
    parser.add_argument("--out", type=Path, help="append one JSON line per case")
    args = parser.parse_args()

    import torch

    from paged_ops.bench import cases

    groups = args.groups.split(",")
    chosen = [case for case in cases.gpu_cases() if case.group in groups]
    chosen = [each for each in chosen if re.search(args.cases, f"{each.num_heads}/{each.num_kv_heads} {each.name}")]
    requests = [(case.group, case.name, case.num_heads, case.num_kv_heads) for case in chosen]
    compile_all((args.before.resolve(), args.after.resolve()), requests, args.workers)
    trees = {"before": Tree(args.before.resolve()), "after": Tree(args.after.resolve())}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    bad = 0
    for request in requests:
        record: dict[str, Any] = {"group": request[0], "case": request[1], "heads": f"{request[2]}/{request[3]}"}
        prepared = {name: tree.ask(*request) for name, tree in trees.items()}
        failed = {name: each["failed"] for name, each in prepared.items() if "failed" in each}
        if failed:
            record["failed"] = failed
            bad += "after" in failed
        else:
            times: dict[str, list[float]] = {name: [] for name in trees}
            for _ in range(args.turns):
                for name, tree in trees.items():
                    times[name].append(round(tree.ask(args.repeats), 3))
            before, after = (statistics.median(each) for each in times.values())
            spread = max(max(each) / min(each) for each in times.values())
            same = prepared["before"]["bits"] == prepared["after"]["bits"]
            record |= {"us": times, "ratio": round(after / before, 4), "spread": round(spread, 4), "equal_bits": same}
            record["error"] = prepared["after"]["error"]
            bad += after / before > max(args.limit, spread)
        print(json.dumps(record), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**record, **about}) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
