"""scripts/test_vllm.py: the tracked result is written if it is asked for and all tests passed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "<testcase classname='t' name='a'/><testcase classname='t' name='b'><skipped/></testcase>"


@pytest.mark.parametrize(("status", "asked"), [(0, True), (0, False), (1, True)])
def test_a_result_is_recorded_when_all_passed_and_it_was_asked_for(status, asked, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("run_vllm", ROOT / "scripts/test_vllm.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "result.json"
    out.write_text("before")
    commands = []

    def run(command, **options):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, stdout="")
        commands.append(command)
        (report,) = (part.partition("=")[2] for part in command if part.startswith("--junitxml"))
        Path(report).write_text(f"<testsuite>{CASES}</testsuite>")
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "PACKAGES", ("torch",))
    assert script.main([*(["--out", str(out)] if asked else []), "-x"]) == status
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pytest", "-q"]
    assert command[-1] == "-x"
    assert all((ROOT / path).exists() for path in script.TESTS)
    if asked and status == 0:
        result = json.loads(out.read_text())
        assert (result["passed"], result["skipped"], result["not_passed"]) == (1, 1, [])
    else:
        assert out.read_text() == "before"
