"""vLLM's real engine on the CPU: scheduler, chunked prefill, caches, sampling - with our attention, and with its own.

Two processes serve all cases, one a backend (:mod:`serve`). Tokens must be equal to those of vLLM's own CPU backend and
to those of transformers in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.integrations.vllm import cases

ROOT = Path(__file__).parents[3]
PLUGIN = "[vllm.general_plugins]\npaged_ops_on_cpu = tests.integrations.vllm.cpu_plugin:register\n"
# vLLM's own switches: the engine in this process, threads left to the system, no network, functions to workers.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Compiled engines are traced whole, but not lowered by inductor, which takes minutes; compiled code needs a cache.
    "VLLM_CPU_CI_ENV": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
COMPARED = [name for name, case in cases.CASES.items() if not case.only_ours]
OURS = [name for name, case in cases.CASES.items() if not case.keeps_theirs]
GREEDY = [name for name in OURS if cases.CASES[name].sampling is cases.greedy]
# A process that finishes no case for so long is stopped; a busy machine only takes longer.
STALLED = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models."""
    folder = tmp_path_factory.mktemp("models")
    cases.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, dict[str, Any]]:
    """What each backend generated for each case: minutes, once."""
    lists = {"ours": list(cases.CASES), "theirs": COMPARED}
    # A plugin of vLLM like any other: the engine's workers, processes of their own, load it too.
    installed = folder / "plugin" / "paged_ops_on_cpu-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: paged-ops-on-cpu\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(PLUGIN)
    processes = []
    for backend, names in lists.items():
        paths = [str(ROOT), *([str(installed.parent)] if backend == "ours" else [])]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor_{backend}")
        command = [sys.executable, "-m", "tests.integrations.vllm.serve", backend, str(folder), *names]
        processes.append(subprocess.Popen(command, env=environment))
    results = {backend: folder / f"{backend}.json" for backend in lists}
    try:
        for process, path in zip(processes, results.values(), strict=True):
            wait_while_it_progresses(process, path)
    finally:
        for process in processes:
            process.kill()
    return {backend: json.loads(path.read_text()) if path.exists() else {} for backend, path in results.items()}


def wait_while_it_progresses(process: subprocess.Popen[bytes], path: Path) -> None:
    """Until the process ends, or has not written to the file for :data:`STALLED` seconds."""
    start = time.time()
    while process.poll() is None and time.time() - max(start, path.stat().st_mtime if path.exists() else 0) < STALLED:
        time.sleep(0.2)


def test_a_busy_machine_has_time_and_an_engine_that_stalls_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "STALLED", 2.0)
    path = tmp_path / "cases.json"
    progress = "import sys, time\nfor _ in range(6): open(sys.argv[1], 'w').write('{}'); time.sleep(0.5)"
    for code, status in ((progress, 0), ("import time; time.sleep(60)", None)):
        with subprocess.Popen([sys.executable, "-c", code, str(path)]) as process:
            wait_while_it_progresses(process, path)
            assert process.poll() == status
            process.kill()


def result(served: dict[str, dict[str, Any]], backend: str, name: str) -> dict[str, Any]:
    """One case of one backend; its error, if it failed, is this test's."""
    found = served[backend].get(name, {"error": "the process ended before"})
    if "error" in found:
        pytest.fail(f"{backend}, {name}:\n{found['error']}")
    return found


@pytest.mark.parametrize("name", OURS)
def test_layers_attend_with_our_backend(name: str, served: dict[str, dict[str, Any]]) -> None:
    expected = "PagedOpsMLAImpl" if cases.CASES[name].model.startswith("deepseek") else "PagedOpsImpl"
    assert result(served, "ours", name)["backends"] == [expected]


@pytest.mark.parametrize("name", [name for name in cases.CASES if name not in OURS])
def test_other_layers_keep_vllms_own_backend(name: str, served: dict[str, dict[str, Any]]) -> None:
    assert result(served, "ours", name)["backends"] == result(served, "theirs", name)["backends"]


@pytest.mark.parametrize("name", COMPARED)
def test_tokens_are_those_of_vllms_own_backend(name: str, served: dict[str, dict[str, Any]]) -> None:
    theirs = result(served, "theirs", name)
    assert "PagedOpsImpl" not in theirs["backends"]
    assert result(served, "ours", name)["tokens"] == theirs["tokens"]


def attend_to_fp8(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention of transformers to keys and values as an fp8 cache without scales holds them."""
    key, value = (states.to(torch.float8_e4m3fn).to(states.dtype) for states in (key, value))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)


AttentionInterface.register("fp8_cache", attend_to_fp8)
AttentionMaskInterface.register("fp8_cache", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@pytest.mark.parametrize("name", GREEDY)
def test_tokens_are_those_of_transformers(name: str, folder: Path, served: dict[str, dict[str, Any]]) -> None:
    case = cases.CASES[name]
    model = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if name == "fp8_cache":
        model.set_attn_implementation("fp8_cache")
    prompts = [ids for prompts in case.rounds for ids in prompts]
    tokens = result(served, "ours", name)["tokens"]
    for ids, (sample,) in zip(prompts, tokens, strict=True):
        input_ids = torch.tensor([ids])
        expected = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=case.new_tokens,
            do_sample=False,
        )
        assert sample == expected[0, len(ids) :].tolist()


def test_cases_are_not_all_alike(served: dict[str, dict[str, Any]]) -> None:
    """A window, a cap, sinks that were ignored would show: the same weights without them give other tokens."""
    tokens = {name: result(served, "ours", name)["tokens"] for name in OURS}
    assert all(len({tuple(sample) for (sample,) in tokens[name]}) > 1 for name in GREEDY)
    assert all(len({tuple(sample) for sample in samples}) == 3 for samples in tokens["samples"])


def test_prefixes_are_found_in_the_cache(served: dict[str, dict[str, Any]]) -> None:
    assert sum(cached >= 96 for cached in result(served, "ours", "prefix_caching")["cached"]) >= 5
    assert sum(cached >= 64 for cached in result(served, "ours", "deepseek_chunks_and_prefixes")["cached"]) >= 3


def test_a_shared_prefix_is_read_once(served: dict[str, dict[str, Any]]) -> None:
    """All of ten requests find its 320 tokens in the cache, and decode together."""
    assert 320 in result(served, "ours", "shared_prefix")["prefixes"]


def test_long_prompts_attend_by_keys_of_all_heads(served: dict[str, dict[str, Any]]) -> None:
    """Next to decodes, too."""
    steps = result(served, "ours", "deepseek_by_heads")["expanded"]
    assert any(decodes for decodes, _ in steps) and any(prompts > 1 for _, prompts in steps)


def test_requests_are_preempted(served: dict[str, dict[str, Any]]) -> None:
    for name in ("preemption", "deepseek_preemption"):
        assert result(served, "ours", name)["preemptions"] > 0


def test_drafts_are_verified(served: dict[str, dict[str, Any]]) -> None:
    found = result(served, "ours", "speculation")
    assert found["drafted"] > 0
