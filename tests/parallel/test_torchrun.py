"""What torchrun starts: the command line over a model that is spread over two processes, and the example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def torchrun(*arguments, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_prints_once_what_one_process_generates(capsys):
    pytest.importorskip("accelerate", reason="transformers shards models with accelerate")
    from paged_ops.cli import demo

    options = ["--eager", "--dtype", "float32", "--max-new-tokens", "12", "--json", "--prompt", "She had never been"]
    lines = torchrun("-m", "paged_ops.cli", "generate", *options).splitlines()
    assert len(lines) == 1
    got = json.loads(lines[0])
    assert got["ranks"] == 2
    demo.generate(["She had never been"], max_new_tokens=12, dtype="float32", compile=False, json=True)
    assert got["texts"] == json.loads(capsys.readouterr().out)["texts"]


def test_the_example_prints_what_its_docstring_says():
    path = ROOT / "examples/tensor_parallel.py"
    lines = re.search(r"prints.*?::\n\n(.*?)\n\n", path.read_text(), re.DOTALL)[1]
    assert torchrun(str(path)).split() == lines.split()
