"""The command line: what it prints for people and for programs, and how it fails."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import paged_ops.__main__
from paged_ops import cli
from paged_ops.cli import demo
from paged_ops.registry import DISPATCH_KEYS, OPS

pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

PROMPTS: list[str] = json.loads((demo.DEMO_MODEL / "prompts.json").read_text())
DEMO = ["--device", "cpu", "--max-new-tokens", "6"]


def invoke(*arguments: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == exit_code, result.output + repr(result.exception)
    return result


def fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code and the error of a command; nothing may be on stdout, nor a traceback anywhere."""
    monkeypatch.setattr(sys, "argv", ["paged-ops", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return exit.value.code, err


@pytest.mark.slow
def test_demo_compiled_from_a_shell() -> None:
    command = [sys.executable, "-m", "paged_ops", "demo", *DEMO, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    numbers = json.loads(done.stdout)
    assert numbers["tokens_match_reference"] is True
    assert numbers["tokens_checked"] == 6 * len(PROMPTS)
    for count, value in {"graphs": 1, "graph_breaks": 0, "recompiles": 0, "cache_copies": 0}.items():
        assert type(numbers[count]) is int
        assert numbers[count] == value
    assert numbers["tokens_per_second"] > 0
    assert numbers["device"] == "cpu"
    assert numbers["blocks_shared"] == 6, "the prompts' common beginning"
    assert "cache copies" in done.stderr
    assert "Warning" not in done.stderr


def test_demo_in_eager_with_few_blocks_swaps_and_still_matches() -> None:
    result = invoke("demo", "--device", "cpu", "--max-new-tokens", "20", "--num-blocks", "20", "--eager", "--json")
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert numbers["tokens_match_reference"] is True
    assert numbers["graphs"] == 0
    assert numbers["swapped_out"] > 0
    assert numbers["blocks_used"] == 20


def test_demo_prints_texts_and_a_table() -> None:
    output = invoke("demo", *DEMO, "--eager").stdout
    assert "96 tokens equal, float32, TF32 off" in output
    assert "She had never been" in output
    for row in ("tokens/s", "blocks used", "blocks shared", "preemptions"):
        assert row in output
    assert not output.rstrip().endswith("}")


def test_demo_fails_when_a_token_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo.reference

    def wrong_once(model: Any, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        tokens = honest(model, prompt_ids, max_new_tokens)
        return tokens if prompt_ids != wrong_prompt else [*tokens[:-1], tokens[-1] + 1]

    _, tokenizer = demo.load(str(demo.DEMO_MODEL), torch.device("cpu"), torch.float32)
    wrong_prompt = tokenizer(PROMPTS[7]).input_ids
    monkeypatch.setattr(demo, "reference", wrong_once)
    result = invoke("demo", *DEMO, "--eager", "--json", exit_code=1)
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert numbers["tokens_match_reference"] is False
    assert numbers["sequences_that_match"] == len(PROMPTS) - 1


def test_generate_continues_each_prompt() -> None:
    options = ["generate", "--model", str(demo.DEMO_MODEL), "--max-new-tokens", "8", "--device", "cpu", "--eager"]
    prompts = ["--prompt", PROMPTS[7], "--prompt", PROMPTS[15]]
    greedy = json.loads(invoke(*options, *prompts, "--dtype", "float32", "--json").stdout.splitlines()[-1])
    model, tokenizer = demo.load(str(demo.DEMO_MODEL), torch.device("cpu"), torch.float32)
    expected = [demo.reference(model, tokenizer(prompt).input_ids, 8) for prompt in (PROMPTS[7], PROMPTS[15])]
    assert greedy["texts"] == [tokenizer.decode(tokens) for tokens in expected]
    assert greedy["dtype"] == "float32"
    sampling = [*options, *prompts, "--temperature", "1.5", "--json"]
    first, again, other = (
        json.loads(invoke(*sampling, "--seed", seed).stdout.splitlines()[-1])["texts"] for seed in ("1", "1", "2")
    )
    assert first == again
    assert first not in (other, greedy["texts"])
    people = invoke(*options, *prompts, "--dtype", "float32")
    for text in greedy["texts"]:
        assert text.splitlines()[0] in people.stdout
    assert "bfloat16" in invoke(*options, *prompts).stderr, "the dtype of the weights"


def test_generate_follows_the_config_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo.DEMO_MODEL, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    changed = {**config, "num_return_sequences": 2, "stop_strings": ["e"], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(changed))
    options = [
        "generate",
        "--model",
        str(folder),
        "--prompt",
        "She had never been",
        "--device",
        "cpu",
        "--eager",
        "--json",
    ]
    (text,) = json.loads(invoke(*options, "--seed", "1").stdout.splitlines()[-1])["texts"]
    assert text.count("e") >= 1 and "e" not in text[:-3]


@pytest.mark.parametrize("command", [["support"], ["demo", *DEMO, "--eager"]])
def test_tables_lose_nothing_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = invoke(*command).stdout
    table = narrow[narrow.rindex("paged-ops demo") :] if command[0] == "demo" else narrow.partition("\n1 ")[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 40


def test_support_as_json_is_what_supports_says() -> None:
    table = json.loads(invoke("support", "--json").stdout)
    assert set(table) == set(OPS)
    for op, devices in table.items():
        assert set(devices) == set(DISPATCH_KEYS)
        for device, answer in devices.items():
            reasons = paged_ops.supports(op, device)
            assert answer == {"ok": not reasons, "reasons": reasons}
    assert all(table[op]["cpu"]["ok"] for op in OPS)


def test_support_for_people_and_as_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(op: str, device: str, **asked: Any) -> list[str]:
        if device == "xla":
            return [f"paged_ops.{op}: no lowering for XLA yet: absent"]
        return ["soft_cap is a thing of the past"] if "soft_cap" in asked and device == "rocm" else []

    monkeypatch.setattr(cli.support, "supports", supports)
    for output in (invoke("support").stdout, invoke("support", "--markdown").stdout):
        assert output.count("no lowering for XLA yet: absent") == 1, "one reason for all ops"
        assert output.count("soft_cap is a thing of the past") == 1
    page = invoke("support", "--markdown").stdout
    assert "| `copy_blocks` | yes | yes | yes | 1 |" in page
    assert "| soft cap | yes | yes | 2 | 1 |" in page
    assert "- `block_sparse` with `soft_cap`" in page
    assert page.endswith("\n1. no lowering for XLA yet: absent\n2. soft_cap is a thing of the past\n")


def test_every_feature_of_the_page_is_one_that_supports_knows() -> None:
    rows = cli.support.support_of_features()
    assert len(rows) > 20
    assert all(answer["cpu"] == {"ok": True, "reasons": []} for answer in rows.values())


def test_a_machine_without_gpus_says_what_can_be_asked_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, err = fail(monkeypatch, capsys, "explain", "--device", "cuda")
    assert "--device: expected the name of a GPU that need not be here (NVIDIA A100" in err
    _, err = fail(monkeypatch, capsys, "demo", "--device", "cuda")
    assert "--device: expected cpu, as PyTorch finds no CUDA devices here, got 'cuda'" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--device", "abacus"], 1, "--device: expected cpu, cuda or cuda:<index>, got 'abacus'"),
        (["demo", *DEMO, "--graphs"], 1, "--graphs: expected --device cuda, as cpu has no CUDA graphs, got cpu"),
        (["generate", "--prompt", "x", *DEMO, "--graphs"], 1, "--graphs: expected --device cuda, as cpu has no"),
        (["demo", "--device", "meta"], 1, "--device: expected cpu, cuda or cuda:<index>, got 'meta'"),
        (["demo", "--device", "cuda:99"], 1, " CUDA devices here, got 'cuda:99'"),
        (
            ["demo", "--device", "cpu", "--eager", "--max-new-tokens", "0"],
            1,
            "max_new_tokens: expected an integer of at least 1, got 0",
        ),
        (["demo", *DEMO, "--eager", "--num-blocks", "3"], 1, "prompts[0]: expected at most 48 tokens"),
        (["generate", "--model", "./no/such", "--prompt", "x"], 1, "--model: expected a folder or the id"),
        (["generate", "--model", str(Path(__file__).parent), "--prompt", "x"], 1, "--model: cannot load"),
        (["generate", "--model", "x", "--prompt", "x", "--dtype", "int4"], 1, "--dtype: expected one of float32"),
        (["generate", "--model", "x"], 2, "Missing option '--prompt'"),
        (
            ["generate", "--model", str(demo.DEMO_MODEL), "--prompt", "x", "--prompt", ""],
            1,
            "--prompt: expected at least one token, got '' as prompt 2 of 2",
        ),
        (
            ["bench", "--device", "cpu", "--cases", "nonsense"],
            1,
            "matches some of cpu 32/8 8x2048 float32; cpu 32/8 ragged16",
        ),
        (["bench", "--device", "cpu", "--list", "--cases", "nonsense"], 1, "ragged16 bfloat16; cpu 32/8 1x256 prefill"),
        (["bench", "--device", "cpu", "--cases", "("], 1, "--cases: expected a regular expression, got (: missing )"),
        (["bench", "--device", "cpu", "--groups", "gpu"], 1, "--groups: expected some of cpu, got gpu"),
        (["bench", "--device", "cpu", "--providers", "me"], 1, "--providers: expected some of paged_ops, "),
        (["bench", "--device", "cpu", "--repeats", "0"], 1, "--repeats: expected at least 1, got 0"),
        (["bench", "--report", "--data", "no/such"], 1, "--data: expected a folder with bench_*.jsonl"),
        (["bench", "--report", "--list"], 1, "--report: expected it or --list, got both"),
        (["bench", "--report", "--groups", "cpu"], 1, "--groups: expected it without --report, which does not use it"),
        (["bench", "--list", "--json"], 1, "--json: expected it without --list, which does not use it, got True"),
        (["bench", "--once", "--data", "x"], 1, "--data: expected it without --once, which does not use it, got x"),
        (["bench", "--docs", "x"], 1, "--docs: expected it with --report, which writes there, got x"),
        (["explain", "--layout", "LATENT"], 1, "--heads: expected one key/value head in a LATENT cache, as in 128/1"),
        (["tune", "--device", "cpu"], 1, "--device: expected a GPU"),
        (["explain", "--feature", "sinsk"], 1, "--feature: expected one of causal, sliding_window, "),
        (["support", "--json", "--markdown"], 1, "--json: expected it or --markdown, got both"),
        (["support", "--device", "cpu"], 2, "No such option: --device"),
        (["demo", "--nonsense"], 2, "No such option: --nonsense"),
        (["dance"], 2, "No such command 'dance'"),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    got, err = fail(monkeypatch, capsys, *arguments)
    assert got == code
    assert message in " ".join(err.split())
    if code == 1:
        assert err.startswith("paged-ops: ")
        assert err.count("\n") == 1


def _with_config(**changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> object:
        config = json.loads((folder / "config.json").read_text())
        return (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def _cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights without an end": (_cut("model.safetensors", -3000), "incomplete metadata, file not fully covered"),
    "weights without a header": (_cut("model.safetensors", 2000), "invalid header length"),
    "no weights in the file": (_cut("model.safetensors", 0), "header too small"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
    "half a config": (_cut("config.json", 20), "config.json' is not a valid JSON file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "Should have a `model_type` key"),
    "a config of wrong types": (_with_config(hidden_size="many"), "Field 'hidden_size' expected int, got str"),
    "fewer layers than the config": (_with_config(num_hidden_layers=9), "its weights miss 27 tensors that its config"),
    "other sizes than the config": (_with_config(intermediate_size=48), "its weights have other sizes of 18 tensors"),
    "half a tokenizer": (_cut("tokenizer.json", 500), "Expecting value: line 1 column 500"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "Couldn't instantiate the backend tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    damage, message = DAMAGED[name]
    folder = tmp_path / "model"
    shutil.copytree(demo.DEMO_MODEL, folder)
    damage(folder)
    code, err = fail(
        monkeypatch, capsys, "generate", "--model", str(folder), "--prompt", "x", "--device", "cpu", "--eager"
    )
    assert code == 1
    assert err.startswith(f"paged-ops: --model: cannot load {folder}: ")
    assert message in err
    assert err.count("\n") == 1


def test_without_transformers_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, err = fail(monkeypatch, capsys, "demo", "--device", "cpu")
    assert code == 1
    assert "pip install '.[hf]'" in err


def test_without_typer_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [each for each in sys.modules if each.startswith("paged_ops.cli")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match=r"^paged-ops: typer is not installed.* pip install '.\[cli\]' in a checkout$"):
        paged_ops.__main__.main()


def test_without_a_compiler_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
    code, err = fail(monkeypatch, capsys, "demo", *DEMO)
    assert code == 1
    assert "no C++ compiler" in err
    assert "--eager" in err


def test_the_demo_model_is_part_of_the_package() -> None:
    assert demo.DEMO_MODEL == Path(paged_ops.__file__).parent / "demo_model"
    assert (demo.DEMO_MODEL / "model.safetensors").exists()
