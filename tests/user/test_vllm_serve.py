"""``vllm serve`` as docs/vllm.md types it, on the CPU: concurrent streams over HTTP, aborts, and ``LLM`` in Python.

The server spawns its engine, so the choice of backend crosses processes.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
TYPED = re.findall(r"^vllm (serve MODEL .*)$", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)
ENTRY_POINT = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE | re.DOTALL)[0]
WORDS = 512
NEW_TOKENS = 24
PROMPTS = [
    [(seed * 131 + 7 * i * i + 3 * i) % WORDS for i in range(n)] for seed, n in enumerate((3, 40, 90, 17, 64, 33))
]
SILENT = 600.0  # a server that has not started and says nothing for so long is given up
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def install(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """What pip leaves of a package that has no modules of its own."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with one word per token, and the plugin that gives vLLM's CPU platform this backend."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0")
    fast.save_pretrained(folder / "model")
    table = ENTRY_POINT.replace('[project.entry-points."vllm.general_plugins"]', "[vllm.general_plugins]")
    install(folder / "site", "paged-ops-on-cpu", "0", table.replace('"', ""))
    # The command asks for the version of `vllm`, which the build for CPUs, installed as `vllm-cpu`, does not answer.
    install(folder / "site", "vllm", importlib.metadata.version("vllm-cpu") + "+cpu")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The server's environment: the packages of this process and of the folder."""
    paths = [str(ROOT), str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    return os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module", params=TYPED)
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, Path]]:
    """The port and the log of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = shutil.which("vllm", path=str(Path(sys.executable).parent))
    assert command
    typed = shlex.split(request.param.replace("MODEL", "model").partition("  #")[0])
    small = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8 --max-num-batched-tokens 64"
    small += " --block-size 32 --kv-cache-memory-bytes 16M --host 127.0.0.1 --port"
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [command, *typed, *small.split(), str(port)],
            cwd=folder,
            env=environment(folder),
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_it_answers(process, port, log)
        yield port, log
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until the server is ready; its log is the error if it ends before."""
    while time.time() - log.stat().st_mtime < SILENT:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-6000:]}")


def stream(port: int, prompt: list[int], most_events: int | None = None, **options: Any) -> list[str]:
    """The words of a completion as they arrive; the client hangs up after ``most_events``."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, **options}), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    words: list[str] = []
    for count, line in enumerate(line for line in response if line.startswith(b"data: {")):
        words += json.loads(line[len(b"data: ") :])["choices"][0]["text"].split()
        if count + 1 == most_events:
            break
    connection.close()
    return words


def running(port: int) -> float:
    """The requests that the engine has, running or waiting."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)]
    assert len(found) == 2
    return sum(found)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[str]]:
    """What transformers generates."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        rows.append([f"w{i}" for i in output[0, len(prompt) :].tolist()])
    return rows


def test_streams_that_run_together_are_those_of_transformers(
    server: tuple[int, Path], expected: list[list[str]]
) -> None:
    port, _ = server
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(lambda prompt: stream(port, prompt), PROMPTS)) == expected


def test_streams_go_on_while_others_are_aborted(server: tuple[int, Path], expected: list[list[str]]) -> None:
    port, _ = server
    with ThreadPoolExecutor(16) as clients:
        hung_up = [clients.submit(stream, port, prompt, 2, max_tokens=150) for prompt in PROMPTS * 2]
        whole = [clients.submit(stream, port, prompt) for prompt in PROMPTS]
        assert [client.result() for client in whole] == expected
        assert all(0 < len(client.result()) < 150 for client in hung_up)
    for _ in range(600):
        if not running(port):
            break
        time.sleep(0.1)
    assert running(port) == 0
    assert stream(port, PROMPTS[1]) == expected[1]


def test_the_log_says_once_that_it_serves(server: tuple[int, Path]) -> None:
    _, log = server
    lines = [line for line in log.read_text().splitlines() if "attention backend of paged_ops" in line]
    assert len(lines) == 1
    assert "Using PAGED_OPS attention backend of paged_ops" in lines[0]
    assert "EngineCore" in lines[0] or "Worker" in lines[0]


def test_in_python(folder: Path, expected: list[list[str]]) -> None:
    """By its defaults, which spawn the engine."""
    (call,) = set(re.findall(r"`(LLM\(MODEL, .*?)\)`", (ROOT / "docs/vllm.md").read_text()))
    small = "dtype='float32', enforce_eager=True, max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20"
    program = f"""
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = {call.replace("MODEL", "'model'")}, {small})
    prompts = [{{"prompt_token_ids": ids}} for ids in {PROMPTS}]
    params = SamplingParams(max_tokens={NEW_TOKENS}, temperature=0, ignore_eos=True)
    print([output.outputs[0].text.split() for output in llm.generate(prompts, params, use_tqdm=False)])
"""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(expected) in done.stdout.splitlines()
    assert "Using PAGED_OPS attention backend of paged_ops" in done.stdout + done.stderr
