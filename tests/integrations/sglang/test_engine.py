"""SGLang's engine with this backend: the tokens of transformers' ``generate()``, in float32 on the CPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[3]
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, head_dim=16, initializer_range=0.2, max_position_embeddings=512)
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
WINDOWS = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"])
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**TINY, **IDS),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, **IDS),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY, **IDS, **WINDOWS, attn_logit_softcapping=5.0, query_pre_attn_scalar=16, hidden_act="gelu_pytorch_tanh"
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, **IDS, **WINDOWS, query_pre_attn_scalar=16),
}
NEW = 12
LENGTHS = (12, 100, 1, 37, 64, 5, 90, 16)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in LENGTHS]


def model_of(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def dense(model: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    return ids[0, len(prompt) :].tolist()


def serve(tmp_path: Path, loads: list[list[list[int]]], **engine: Any) -> list[list[dict[str, Any]]]:
    out = tmp_path / "answers.json"
    asked = {"engine": {"attention_backend": "paged_ops", **engine}, "loads": loads, "max_new_tokens": NEW}
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.sglang.serve"],
        input=json.dumps({**asked, "out": str(out)}),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("name", "page_size"), [("llama", 16), ("qwen3", 1), ("gemma2", 64), ("gemma3", 16)])
def test_tokens_of_generate(tmp_path: Path, name: str, page_size: int) -> None:
    """Prompts in chunks of 64 tokens, and decodes; then again, with their prefixes from the cache."""
    model, asked = model_of(name, tmp_path / "model"), prompts()
    wanted = [dense(model, prompt) for prompt in asked]
    model_path = str(tmp_path / "model")
    mixed = name == "llama"  # prompts and decodes in one step; otherwise they take turns
    options = {"page_size": page_size, "chunked_prefill_size": 64, "enable_mixed_chunk": mixed}
    first, again = serve(tmp_path, [asked, asked], model_path=model_path, **options)
    assert [each["tokens"] for each in first] == wanted
    assert [each["tokens"] for each in again] == wanted
    assert sum(each["cached"] for each in again) > 100


def test_the_server_as_the_page_types_it(tmp_path: Path) -> None:
    """The command of docs/vllm.md, with the options for a CPU, answers over HTTP."""
    (typed,) = re.findall(r"^sglang (serve .*)$", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)
    model, prompt = model_of("llama", tmp_path / "model"), prompts()[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_cpu = "--device cpu --dtype float32 --skip-tokenizer-init --grammar-backend none --disable-cuda-graph"
    command = typed.replace("MODEL", str(tmp_path / "model")).split()
    command += [*of_cpu.split(), "--max-total-tokens", "4096", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    params = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": params}).encode()
    with (tmp_path / "log").open("w") as log:
        program = str(Path(sys.executable).parent / "sglang")
        server = subprocess.Popen([program, *command], cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            answer = None
            end = time.monotonic() + 180
            while answer is None and server.poll() is None and time.monotonic() < end:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answer = json.load(response)
                except OSError:  # it is starting
                    time.sleep(1)
        finally:
            server.terminate()
            server.wait(60)
    assert answer is not None, (tmp_path / "log").read_text()[-3000:]
    assert answer["output_ids"] == dense(model, prompt)
