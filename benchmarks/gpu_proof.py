"""Runs the tests that need a GPU, and records the results.

    python benchmarks/gpu_proof.py --commit $(git rev-parse HEAD) --out benchmarks/data/gpu_proof_nvidia_h200.json
    python benchmarks/gpu_proof.py --commit ... --out ... --parts demo,host     # some; the others of the file stay

Parts: the registry x cases suite on the device, the peers' matrices (attention, cache), what only a device can show,
the compiled graphs; the tools of compute-sanitizer over the smaller cases, with PyTorch's memory cache off so that an
overrun leaves its allocation; block-sparse times by density; the host's cost of a call; the demo against transformers.
Parts joined by ``+`` run at the same time; timings run alone. The file is written after each part, and goes on where it
was if it is of the same commit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton

from paged_ops import paged_attention
from paged_ops.bench import measure
from paged_ops.bench.cases import Case, host_case

DEVICE = torch.device("cuda")
HOPPER = sorted((Path(__file__).parents[1] / "paged_ops/lowerings/gpu/attention/hopper").glob("*.py"))
FILES = ("gpu/test_device", "gpu/test_hopper", "gpu/test_launch", "cache/test_kv_cache", "metadata/test_metadata")
ONLY_THERE = [f"tests/{name}.py" for name in FILES]
# What to run, and with how many workers: caches of the cache ops' matrices take tens of gigabytes.
PYTEST: dict[str, tuple[list[str], int]] = {
    "suite": (["tests/test_ops.py", "--device", "cuda"], 14),
    "peers_attention": (["tests/gpu/test_peers.py"], 10),
    "peers_cache": (["tests/gpu/test_peers_cache.py"], 4),
    "only_there": (["-m", "gpu", *ONLY_THERE], 2),
    # Without the tests of packages that are loaded elsewhere: they are of the CPU whatever the device.
    "compile": (["tests/test_compile.py", "--device", "cuda", "-k", "not elsewhere"], 12),
}
PLAN = (  # in this order
    "suite,peers_attention+peers_cache,only_there+compile,memcheck+racecheck+initcheck,density,host,demo"
)
SMALL = [
    "paged_attention_with_lse-(decode|mixed|speculative|holes|padding_only)-bf16",
    "paged_attention_with_lse-(nhd-all-features|x_packed-fp16|nhd-e4m3-auto-fp16|sparse-homo_head-decode)",
    "reshape_and_cache-(nhd-fp32|nhd-e4m3-auto-fp16|x_packed-fp16)",
    "(gather_kv|copy_blocks|swap_blocks|merge_attention_states|cascade_attention)-.*(fp16|bf16|device|host)",
]
TOOLS = ("memcheck", "racecheck", "initcheck")


def run_limited(command: list[str], seconds: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with the output, which ends the processes that the command started too when time is up.

    Raises subprocess.TimeoutExpired then, with the output so far.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise subprocess.TimeoutExpired(command, seconds, out, err) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def timed_out(error: subprocess.TimeoutExpired) -> dict[str, Any]:
    return {"timed_out": error.timeout, "output": (error.output + error.stderr)[-1500:]}


def run_pytest(arguments: list[str], workers: int, seconds: int) -> dict[str, Any]:
    """Counts, and the names of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), f"--junitxml={report}", *arguments]
        start = time.time()
        try:
            done = run_limited(command, seconds)
        except subprocess.TimeoutExpired as error:
            return timed_out(error)
        if not report.exists():
            return {"error": (done.stdout + done.stderr)[-1500:]}
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        failed = {
            case.get("name", ""): (problem.get("message") or "")[:300]
            for case in suite.iter("testcase")
            for problem in (*case.findall("failure"), *case.findall("error"))
        }
        noted = {each.get("name", ""): each.get("value") for each in suite.iter("property")}
        return {**counts, "failed": failed, "noted": noted, "seconds": round(time.time() - start)}


# Races that racecheck reports in the Hopper kernels although barriers order them, by the lines that read and write;
# benchmarks/notes/gpu-kernels.md names the barriers, and the evidence.
ORDERED = (
    ("def dense_kernel(", "def dense_kernel("),
    ("def dense_kernel(", "gl.warp_specialize("),
    ("return gl.sum(shared.items.index(", "shared.items.index("),
)


def unexplained_races(text: str) -> list[str]:
    """The races in a report of racecheck that are not ORDERED, each once."""
    code = {(path.name, n): line.strip() for path in HOPPER for n, line in enumerate(path.read_text().splitlines(), 1)}
    found = []
    for report in text.split("Race reported between")[1:]:
        accesses = re.findall(r"(Read|Write) access at \S+ in (\S+):(\d+)", report)
        for other in accesses[1:]:
            pair = sorted((accesses[0], other))  # Read before Write
            first, second = (code.get((Path(file).name, int(line)), "") for _, file, line in pair)
            known = any(first.startswith(read) and second.startswith(write) for read, write in ORDERED)
            if not known or [kind for kind, _, _ in pair] != ["Read", "Write"]:
                found.append(" and ".join(f"{kind} {file}:{line}" for kind, file, line in pair))
    return list(dict.fromkeys(found))


def run_sanitizer(tool: str, seconds: int) -> dict[str, Any]:
    """The number of errors that a tool found over the small cases; for races also the unexplained ones."""
    limit = "1000" if tool == "racecheck" else "3"
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", limit, sys.executable, __file__, "--cases"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.time()
    try:
        done = run_limited(command, seconds, env=environment)
    except subprocess.TimeoutExpired as error:
        return timed_out(error)
    text = done.stdout + done.stderr
    errors = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    cases = re.findall(r"^case (\S+) (\S+)", text, re.M)
    wrong = [name for name, result in cases if result != "ok"]
    return {
        "errors": int(errors[-1]) if errors else None,
        **({"unexplained": unexplained_races(text)} if tool == "racecheck" else {}),
        "cases": len(cases),
        "wrong": wrong,
        "seconds": round(time.time() - start),
        **({} if errors and errors[-1] == "0" else {"output": text[:1500]}),
    }


def run_cases() -> None:
    """Each small case once, under whatever tool this process runs in."""
    from paged_ops import testing

    for op, cases in testing.CASES.items():
        for case in cases:
            if any(re.fullmatch(pattern, f"{op}-{case.name}") for pattern in SMALL):
                try:
                    testing.check(op, case, "cuda")
                    result = "ok"
                except Exception as error:
                    result = type(error).__name__
                print(f"case {op}-{case.name} {result}", flush=True)


def run_density() -> dict[str, Any]:
    """Microseconds of block-sparse attention by the share of key blocks that a query sees: 8192 tokens, 32/8 heads."""
    found: dict[str, Any] = {}
    for kind, seqs in {
        "decode": ((1, 8192),) * 32,
        "chunked": ((512, 8192),) * 4,
        "prefill": ((8192, 8192),),
    }.items():
        sets = measure.inputs_of(Case("density", kind, seqs), DEVICE)
        for local, stride in ((128, 1), (16, 2), (16, 8), (8, 32), (4, 64)):
            sparse = [64, local, stride, 1, 0, 0, 1]
            calls = [functools.partial(paged_attention, *each.args, block_sparse=sparse) for each in sets]
            us = measure.Replay(calls, DEVICE).median_us(10)
            found[f"{kind} local {local} stride {stride}"] = round(us, 1)
    return found


def run_host() -> dict[str, Any]:
    """Microseconds of CPU that one eager call of a decode batch takes to enqueue, the GPU far from full."""
    (inputs, *_) = measure.inputs_of(host_case(), DEVICE)
    out, one = torch.empty(1024, device=DEVICE), torch.ones(1024, device=DEVICE)
    calls = {
        "paged_attention": lambda: paged_attention(*inputs.args),
        "torch.add": lambda: torch.add(one, one, out=out),
    }
    return {name: round(measure.host_us(call, DEVICE), 1) for name, call in calls.items()}


def run_demo(seconds: int) -> dict[str, Any]:
    """What ``paged-ops demo --device cuda`` says: the tokens of a served batch against transformers' generate()."""
    main = "from paged_ops.cli import main; main()"
    command = [sys.executable, "-c", main, "demo", "--device", "cuda", "--json"]
    try:
        done = run_limited(command, seconds)
    except subprocess.TimeoutExpired as error:
        return timed_out(error)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-1500:]}


HERE = {"density": run_density, "host": run_host}


def run(part: str, seconds: int) -> dict[str, Any]:
    if part in HERE:
        return HERE[part]()
    if part == "demo":
        return run_demo(seconds)
    return run_sanitizer(part, seconds) if part in TOOLS else run_pytest(*PYTEST[part], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=PLAN, help=f"by default {PLAN}")
    parser.add_argument("--seconds", type=int, default=400, help="limit of each part")
    parser.add_argument("--cases", action="store_true", help="run the small cases in this process")
    options = parser.parse_args()
    if options.cases:
        run_cases()
        return
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        if all(before.get(name) == value for name, value in found.items()):
            found = before
    for group in options.parts.split(","):
        parts = group.split("+")
        with ThreadPoolExecutor(len(parts)) as pool:
            running = {pool.submit(run, part, options.seconds): part for part in parts}
            for done in as_completed(running):
                part = running[done]
                found[part] = done.result()
                print(part, json.dumps(found[part])[:3000], flush=True)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
