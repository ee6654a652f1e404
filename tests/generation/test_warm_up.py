"""After ``warm_up`` no step of a loop compiles anything."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from tests.gpu.imitated import expect_nothing_later, run_cases

PAIRS = [("dense", "windowed"), ("latent", "states"), ("invariant", "block_indexed")]
NUM_STEPS = 250


@pytest.mark.slow
@pytest.mark.parametrize("models", PAIRS, ids=" ".join)
def test_gpu_kernels_are_those_of_warm_up(models: tuple[str, ...]) -> None:
    """On an imitated H200: Triton is asked for no kernel in random steps."""
    for found in run_cases("tests.generation.warm_loops", NUM_STEPS, *models):
        expect_nothing_later(found)
        assert found["stats"]["swapped_out"] and found["stats"]["overlapped_steps"]
        assert bool(found["stats"]["cached_tokens"]) == (found["case"] != "states")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["latent without prompts", "dense without sizes"])
def test_kernels_that_warm_up_leaves_out_are_found(fault: str) -> None:
    (found,) = run_cases("tests.generation.warm_loops", NUM_STEPS // 5, fault)
    assert found["later"]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("family", "num_graphs"), [("lfm2", 2), ("deepseek_v32", 1)])
def test_a_compiled_loop_is_traced_in_warm_up_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, num_graphs: int
) -> None:
    """On one thread torch's convolution is another one from 16 sequences on, so models with states have two graphs."""
    from paged_ops import cpp
    from paged_ops.generation import GenerationLoop
    from paged_ops.integrations.transformers import PagedCausalLM
    from tests.generation import warm_loops
    from tests.integrations.transformers.model_families import make_model

    changes: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    paged = PagedCausalLM(make_model(family, num_hidden_layers=2, **changes))
    kv_cache = paged.allocate_kv_cache(40, num_host_blocks=20, num_state_slots=40)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=18, max_num_tokens=32, max_model_len=120, compile=True)
    built, build = [], cpp.built
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop.warm_up()
        monkeypatch.setattr(cpp, "built", lambda source, *more: built.append(source) or build(source, *more))
        counters = torch._dynamo.utils.counters["stats"]
        assert counters["unique_graphs"] == num_graphs
        warm_loops.load(loop, 90, 0)
        assert counters["unique_graphs"] == num_graphs
        assert not built
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
