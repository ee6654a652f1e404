"""What benchmarks/gpu_proof.py makes of a report of compute-sanitizer's race detector."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILE = Path(__file__).parents[2] / "benchmarks/gpu_proof.py"


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("gpu_proof", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def line_of(proof, start):
    lines = [(path.name, each) for path in proof.HOPPER for each in enumerate(path.read_text().splitlines(), 1)]
    return next(f"{name}:{n}" for name, (n, line) in lines if line.strip().startswith(start))


def report(read, *writes):
    first = f"========= Error: Race reported between Read access at dense_kernel+0x130 in {read}\n"
    return first + "".join(
        f"=========     and Write access at dense_kernel+0x11920 in {write} [4 hazards]\n" for write in writes
    )


def test_ordered_races_are_known(proof):
    start, workers = line_of(proof, "def dense_kernel("), line_of(proof, "gl.warp_specialize(")
    read, write = line_of(proof, "return gl.sum(shared.items.index("), line_of(proof, "shared.items.index(")
    assert proof.unexplained_races(report(start, start, workers) + report(read, f"/somewhere/{write}")) == []
    assert proof.unexplained_races("no hazards") == []


def test_others_are_named(proof):
    start, workers = line_of(proof, "def dense_kernel("), line_of(proof, "gl.warp_specialize(")
    other = line_of(proof, "def serves(")
    assert proof.unexplained_races(report(start, other)) == [f"Read {start} and Write {other}"]
    assert len(proof.unexplained_races(report(workers, start))) == 1
    assert len(proof.unexplained_races(report(start, workers.replace("dense", "decode")))) == 1
    assert len(proof.unexplained_races(report("dense.py:1000000", workers))) == 1
    written = report(start, workers).replace("Read access", "Write access")
    assert len(proof.unexplained_races(written)) == 1
