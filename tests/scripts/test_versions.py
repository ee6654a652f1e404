"""scripts/test_versions.py: what it makes of reports, and that its page says what is recorded."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def versions():
    spec = importlib.util.spec_from_file_location("run_versions", ROOT / "scripts/test_versions.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_page_says_what_is_recorded(versions):
    assert versions.recorded()
    assert versions.PAGE.read_text() == versions.markdown()


def test_every_supported_torch_is_listed(versions):
    required = re.search(r'"torch>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert next(iter(versions.VERSIONS)) == ".".join(required.groups())
    for version, (torch, *_) in versions.VERSIONS.items():
        assert torch.startswith(f"{version}.")


def test_reports_are_read(versions, tmp_path):
    report = tmp_path / "report.xml"
    cases = [
        ("tests.test_ops", "a", ""),
        ("tests.test_ops", "b", "<failure/>"),
        ("tests.cache.test_kv_cache", "c", "<skipped/>"),
    ]
    cases += [
        ("tests.cache.test_kv_cache", "d", ""),
        ("tests.test_ops", "e", "<error/>"),
        ("", "tests.test_compile", "<error/>"),
    ]
    lines = [f"<testcase classname='{file}' name='{name}'>{result}</testcase>" for file, name, result in cases]
    report.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    assert versions.read(report, ["ops", "compile", "cache", "graphs"]) == {
        "ops": {"passed": 1, "skipped": 0, "failed": ["b", "e"]},
        "compile": {"passed": 0, "skipped": 0, "failed": ["tests.test_compile"]},
        "cache": {"passed": 1, "skipped": 1, "failed": []},
        "graphs": {"passed": 0, "skipped": 0, "failed": ["no test ran"]},
    }
    # A run that ended before its report has not passed.
    assert versions.read(tmp_path / "none.xml", ["aot"])["aot"]["failed"] == ["no test ran"]


def test_page_names_failures_and_what_was_not_run(versions, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "DATA", tmp_path / "versions.jsonl")
    row = {
        "version": "2.9",
        "torch": "2.9.1+x",
        "triton": "3.5.1",
        "numpy": "2.3",
        "python": "3.11",
        "date": "2026-11-22",
    }
    parts = {"ops": {"passed": 7, "skipped": 0, "failed": ["test_x"]}}
    versions.record({**row, "commit": "abc", "parts": {"ops": {"passed": 9, "skipped": 0, "failed": []}}})
    versions.record({**row, "commit": "def", "parts": parts})
    (kept,) = versions.recorded()
    assert kept["commit"] == "def"
    page = versions.markdown()
    assert "| 2.9.1+x | 3.5.1 | 2.3 | 3.11 | 7, **1 failed** | not run |" in page
    assert "* torch 2.9.1+x, ops: `test_x`" in page
    assert re.search(r"^\| 2\.15 \| 3\.9\.0 \|.*not run", page, re.MULTILINE)
