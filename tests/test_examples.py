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


def test_examples_use_no_file_next_to_them():
    """They run from any folder, with the installed package."""
    assert [path.name for path in EXAMPLES.glob("*.py") if "__file__" in path.read_text()] == []


@pytest.mark.slow
def test_rollout_of_grpo():
    """With stand-ins for TRL and datasets, a rollout leaves the model as accelerate prepared it."""
    done = subprocess.run([sys.executable, "-c", ROLLOUT], cwd=EXAMPLES, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"rollout 1: 4 completions, (\d+) of \1 log-probabilities are equal in one forward pass\n", done.stdout
    )


ROLLOUT = """
import sys
from types import ModuleType, SimpleNamespace

import accelerate


class Trainer:
    def __init__(self, model, reward, *, args, train_dataset, processing_class, rollout_func):
        self.accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        self.model, self.processing_class = self.accelerator.prepare(model), processing_class
        self.prompts, self.rollout = train_dataset["prompt"], rollout_func

    def train(self):
        self.model.train()
        forward = vars(self.model)["forward"]
        found = self.rollout(self.prompts, self)
        assert {*found} == {"prompt_ids", "completion_ids", "logprobs"}
        assert [*map(len, found["logprobs"])] == [*map(len, found["completion_ids"])]
        assert vars(self.model)["forward"] is forward
        assert self.model.training
        assert type(self.model).__name__ == "LlamaForCausalLM"


trl, datasets = ModuleType("trl"), ModuleType("datasets")
trl.GRPOConfig, trl.GRPOTrainer = SimpleNamespace, Trainer
datasets.Dataset = SimpleNamespace(from_dict=dict)
sys.modules |= {"trl": trl, "datasets": datasets}
import grpo
"""
