"""The examples print what their docstrings say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    done = subprocess.run([sys.executable, name], cwd=EXAMPLES, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile_decode.py", "export_aoti.py"])
def test_output_is_the_docstring_s(name):
    docstring = re.search(r'"""(.*?)"""', (EXAMPLES / name).read_text(), re.DOTALL)[1]
    lines = re.search(r"prints.*?::\n\n(.*?)\n(?:\n|$)", docstring, re.DOTALL)[1]
    assert run(name).split() == lines.split()


@pytest.mark.slow
def test_log_probabilities_are_exact():
    first, exact, _ = run("exact_logprobs.py").splitlines()
    preempted, cached = map(int, re.search(r"preempted (\d+) times, (\d+) cached", first).groups())
    assert preempted > 0
    assert cached > 0
    assert re.fullmatch(r"batch_invariant=True: (\d+) of \1 log-probabilities are equal, largest difference 0", exact)


@pytest.mark.slow
def test_captured_decode():
    assert "the same tokens as without graphs: True" in run("cuda_graphs.py")


@pytest.mark.parametrize("name", ["disaggregated.py", "tensor_parallel.py"])
def test_examples_of_several_processes_say_how_to_run_them(name):
    done = subprocess.run([sys.executable, name], cwd=EXAMPLES, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert re.fullmatch(rf"run it .*: torchrun --nproc-per-node 2 examples/{name}\n", done.stderr), done.stderr
