"""Nothing is compiled after the engine's start: kernels of any step are those that were asked for before requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
CASES = ("dense", "window", "one head", "latent")
INVARIANT = ("invariant", "invariant window", "invariant one head", "invariant latent")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, INVARIANT], ids=["default", "batch-invariant"])
def test_no_step_asks_for_a_kernel(cases: tuple[str, ...]) -> None:
    """On an imitated H200, with the engine's metadata: decodes, short prompts of one length, and mixtures."""
    fault = f"{cases[0]} without sizes"
    command = [sys.executable, "-m", "tests.integrations.vllm.warm_steps", "45", *cases, fault]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *every, faulty = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [found["case"] for found in every] == [*cases]
    for found in every:
        assert 5 <= len(found["warm"]) <= 50
        assert found["sizes"] >= 30
        names = sorted({name for name, _ in found["later"]})
        assert not names, f"{found['case']}: asked for in steps: {names}"
    assert faulty["later"], "the test can fail"
