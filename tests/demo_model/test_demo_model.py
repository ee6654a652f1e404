"""The embedded demo model: that it loads, is as small as it says, and writes English."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "paged_ops" / "demo_model"
PROMPTS: list[str] = json.loads((FOLDER / "prompts.json").read_text())
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")

sys.path.insert(0, str(ROOT / "scripts"))
import train_demo_model  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def continue_greedily(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int
) -> list[int]:
    ids: Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def share_of_known_words(text: str) -> float:
    """The share of words that are among the 4000 commonest of the training text."""
    known = set((Path(__file__).parent / "words.txt").read_text().split())
    words = [word.lower() for word in WORD.findall(text)]
    return sum(word in known for word in words) / max(1, len(words))


def share_of_new_runs(ids: list[int]) -> float:
    """The share of runs of four tokens that are different from each other: low in a loop."""
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(runs)) / len(runs)


def test_the_checkpoint_is_small_and_says_what_it_is() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert (FOLDER / "tokenizer.json").stat().st_size <= 200_000
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = list(file.keys())
        tensors = [file.get_tensor(name) for name in names]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert "lm_head.weight" not in names  # tied
    record = json.loads((FOLDER / "training.json").read_text())
    assert sum(tensor.numel() for tensor in tensors) == record["parameters"]
    card = (FOLDER / "README.md").read_text()
    assert train_demo_model.PACKAGE_SHA256 in card
    assert f"{record['parameters']:,} parameters" in card
    assert f"held-out loss {record['held_out_loss_of_saved_weights']:.2f}" in card.lower()


def test_the_scripts_defaults_are_the_models_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_demo_model.py", "text.deb"])
    defaults = vars(train_demo_model.parse_args())
    arguments = json.loads((FOLDER / "training.json").read_text())["arguments"]
    assert {k: defaults[k] for k in arguments if k != "device"} == {k: v for k, v in arguments.items() if k != "device"}


def test_the_model_has_the_shape_that_every_lowering_takes(model: LlamaForCausalLM) -> None:
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 32)
    assert config.max_position_embeddings == 2048
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_tokenizer_keeps_every_text(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ["It is a truth.", ' "Oh!" said she;--\n', "naïve façade, 日本語, \t\x00 end", " ", "a  b"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0


def test_the_prompts_are_ragged_and_share_a_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert len(ids) == len(set(PROMPTS)) == 16
    assert len({len(i) for i in ids}) >= 10
    assert len({tuple(i[:64]) for i in ids[:6]}) == 1
    assert len({tuple(i) for i in ids[:6]}) == 6
    assert not any(prompt != prompt.rstrip() for prompt in PROMPTS)  # a last blank would be a token of its own


def test_greedy_text_is_english_and_does_not_loop(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in (PROMPTS[3], PROMPTS[10], PROMPTS[12]):
        ids = continue_greedily(model, tokenizer, prompt, 80)
        text = tokenizer.decode(ids)
        assert share_of_known_words(text) >= 0.95, text
        assert len(WORD.findall(text)) >= 50, text
        assert share_of_new_runs(ids) >= 0.9, text
        assert continue_greedily(model, tokenizer, prompt, 80) == ids


def test_what_is_no_english_fails_that_measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    random_ids = torch.randint(1, 4096, (80,)).tolist()
    assert share_of_known_words(tokenizer.decode(random_ids)) < 0.8
    untrained = LlamaForCausalLM(model.config).eval()  # with tied embeddings it says one word over and over
    assert share_of_new_runs(continue_greedily(untrained, tokenizer, PROMPTS[10], 80)) < 0.5


def test_the_script_reads_the_text_out_of_the_package() -> None:
    lines = [
        "A TITLE",
        "",
        "CHAPTER I",
        "",
        "One _two_",
        "three.",
        "",
        "* * *",
        "",
        "Chapter 2",
        "Four.",
        "",
        "FINIS",
        "x",
    ]
    # R's XDR serialisation, version 3, of a character vector: 16 is STRSXP, 9 CHARSXP.
    r = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
    r += struct.pack(">ii", 16, len(lines))
    r += b"".join(struct.pack(">ii", 9, len(line)) + line.encode() for line in lines)
    record = struct.pack(">I", len(r)) + zlib.compress(r)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        info = tarfile.TarInfo(train_demo_model.RDB_PATH)
        info.size = 2 * len(record)
        archive.addfile(info, io.BytesIO(2 * record))
    deb = b"!<arch>\n"
    for name, content in [("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())]:
        deb += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        deb += b"\n" * (len(content) % 2)

    novels = train_demo_model.read_novels(deb)
    assert novels == [lines, lines]
    assert train_demo_model.chapters_of(lines) == ["One two three.\n", "Four.\n"]
    with pytest.raises(ValueError, match=r"text: expected a Debian package"):
        train_demo_model.read_novels(b"no package")


def test_repetition_loss_counts_words_that_repeat_a_run(model: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    looping = LlamaForCausalLM(model.config)  # untrained, with tied embeddings: it says one word over and over
    every_token = torch.ones(model.config.vocab_size, dtype=torch.bool)
    prompts = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18]])
    looping.eval()
    sequence = train_demo_model.greedy(looping, prompts, 12)[0].tolist()
    runs = [tuple(sequence[i : i + 4]) for i in range(len(sequence) - 3)]
    expected = [runs[i] in runs[:i] for i in range(len(runs))][-12:]
    assert 0 < sum(expected) < 12
    loss, share = train_demo_model.repetition_loss(looping, prompts, 12, every_token)
    assert share.item() == pytest.approx(sum(expected) / 12)
    assert loss.item() > 0
    loss, share = train_demo_model.repetition_loss(looping, prompts, 12, ~every_token)
    assert loss.item() == share.item() == 0
