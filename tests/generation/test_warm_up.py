"""After ``warm_up`` no step of a loop compiles anything."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

ROOT = Path(__file__).parents[2]
MODELS = ("dense", "windowed", "latent", "states", "invariant", "invariant wide", "indexed", "block_indexed")


def run(module: str, *arguments: str, **env: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def expect_nothing_later(found: dict[str, Any]) -> None:
    names = sorted({name for name, _ in found["later"]})
    assert not names, f"{found['case']}: {len(found['later'])} kernels compiled after warm_up: {names}"


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [250])
def test_gpu_kernels_are_those_of_warm_up(num_steps: int) -> None:
    """On an imitated H200: Triton is asked for no kernel in random steps."""
    faults = ("latent without prompts", "dense without sizes")
    every = run("tests.generation.warm_loops", str(num_steps), *MODELS, *faults)
    assert [found["case"] for found in every] == [*MODELS, *faults]
    for found in every[: len(MODELS)]:
        assert 5 <= len(found["warm"]) <= 50
        assert found["sizes"] >= 30
        assert found["stats"]["swapped_out"] and found["stats"]["overlapped_steps"]
        assert bool(found["stats"]["cached_tokens"]) == (found["case"] != "states")
        expect_nothing_later(found)
    for found in every[len(MODELS) :]:  # the test can fail
        assert found["later"], found["case"]


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_with_states_is_traced_in_warm_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one thread torch's convolution is another one from 16 sequences on, so there are two graphs."""
    import transformers

    from paged_ops.generation import GenerationLoop, SamplingParams
    from paged_ops.integrations.transformers import PagedCausalLM

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    config = transformers.Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"], eos_token_id=None)
    paged = PagedCausalLM(transformers.AutoModelForCausalLM.from_config(config).eval())
    kv_cache = paged.allocate_kv_cache(40, num_state_slots=20)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=18, max_num_tokens=32, compile=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop.warm_up()
        counters = torch._dynamo.utils.counters["stats"]
        assert counters["unique_graphs"] == 2
        prompts = [[1 + i] * (1 + i % 5) for i in range(24)]
        each = [SamplingParams(max_new_tokens=1 + i % 7) for i in range(24)]
        loop.generate(prompts, each)
        loop.generate(prompts[:3], SamplingParams(max_new_tokens=3))
        assert counters["unique_graphs"] == 2
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
