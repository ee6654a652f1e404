"""What benchmarks/gpu_proof.py makes of a report of compute-sanitizer's race detector."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILE = Path(__file__).parents[1] / "benchmarks/gpu_proof.py"


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("gpu_proof", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def line_of(proof, start):
    lines = proof.HOPPER.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(start))


def report(read, *writes, file="hopper.py"):
    first = f"========= Error: Race reported between Read access at prefill_kernel+0x130 in {file}:{read}\n"
    return first + "".join(
        f"=========     and Write access at prefill_kernel+0x11920 in {file}:{write} [4 hazards]\n" for write in writes
    )


def test_ordered_races_are_known(proof):
    start, workers = line_of(proof, "def prefill_kernel("), line_of(proof, "gl.warp_specialize(")
    read, write = line_of(proof, "return gl.sum(items.index("), line_of(proof, "items.index(")
    assert proof.unexplained_races(report(start, start, workers) + report(read, write)) == []
    assert proof.unexplained_races("no hazards") == []


def test_others_are_named(proof):
    start, workers = line_of(proof, "def prefill_kernel("), line_of(proof, "gl.warp_specialize(")
    assert proof.unexplained_races(report(start, workers + 1)) == [
        f"Read hopper.py:{start} and Write hopper.py:{workers + 1}"
    ]
    assert len(proof.unexplained_races(report(workers, start))) == 1
    assert len(proof.unexplained_races(report(start, workers, file="decode.py"))) == 1
    assert len(proof.unexplained_races(report(10**6, workers))) == 1
    written = report(start, workers).replace("Read access", "Write access")
    assert len(proof.unexplained_races(written)) == 1
