"""The loop with transformers' own pieces: tokenizers, processors, criteria, limits; tokens against ``generate()``."""

import contextlib
import functools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.cli.demo import DEMO_MODEL  # noqa: E402
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402

PROMPTS: list[str] = json.loads((DEMO_MODEL / "prompts.json").read_text())[:3]
NEW = 20


@cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


def load() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@cache
def paged() -> PagedCausalLM:
    return PagedCausalLM(load())


def make_loop(**options: Any) -> GenerationLoop:
    return GenerationLoop(paged(), paged().allocate_kv_cache(64), **options)


def ids(text: str) -> list[int]:
    return list(tokenizer()(text).input_ids)


def by_transformers(prompt: str, **options: Any) -> list[int]:
    given = torch.tensor([ids(prompt)])
    with torch.no_grad():
        output = load().generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False, **options
        )
    return output[0, given.shape[1] :].tolist()


@cache
def expected() -> list[list[int]]:
    return [by_transformers(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_the_texts_in_them(side: str) -> None:
    encoding = tokenizer()(PROMPTS, padding=True, padding_side=side, return_tensors="pt")
    assert not encoding.attention_mask.all()
    params = SamplingParams(max_new_tokens=NEW)
    assert make_loop().generate(encoding, params) == expected()
    assert make_loop().generate(tokenizer()(PROMPTS), params) == expected()
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected token ids, got a string; give tokenizer"):
        make_loop().generate(PROMPTS, params)


def test_padding_without_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCausalLM, "pad_token_id", 1)
    encoding = tokenizer()(PROMPTS, padding=True, padding_side="left")
    pairs = [zip(*row, strict=True) for row in zip(encoding.input_ids, encoding.attention_mask, strict=True)]
    padded = [[token if kept else 1 for token, kept in row] for row in pairs]
    with pytest.raises(ValueError, match=r"padding .* on the left"):
        make_loop().generate(padded)


def test_limits_of_the_model() -> None:
    model = load()
    loop = make_loop()
    assert loop.vocab_size == model.get_input_embeddings().num_embeddings
    assert loop.stop_token_ids == paged().stop_token_ids == (0,)
    assert loop.max_model_len == min(64 * 16, model.config.max_position_embeddings)
    with pytest.raises(ValueError, match=r"prompt: expected token ids in 0\.\."):
        loop.submit([loop.vocab_size])
    with pytest.raises(ValueError, match="max_model_len: expected at most the model's"):
        make_loop(max_model_len=model.config.max_position_embeddings + 1)


def test_processors_of_transformers() -> None:
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.4),
            transformers.NoRepeatNGramLogitsProcessor(2),
        ]
    )
    params = SamplingParams(max_new_tokens=NEW, logits_processor=processors)
    wanted = [by_transformers(prompt, repetition_penalty=1.4, no_repeat_ngram_size=2) for prompt in PROMPTS]
    assert wanted != expected()
    outputs = make_loop().generate([ids(prompt) for prompt in PROMPTS], [params] * 3)
    assert outputs == wanted
    mixed = make_loop().generate(
        [ids(prompt) for prompt in PROMPTS], [SamplingParams(NEW), params, SamplingParams(NEW)]
    )
    assert mixed == [expected()[0], wanted[1], expected()[2]]


def test_top_k_and_min_p_of_transformers() -> None:
    """What they leave is all that is drawn."""
    seen: list[set[int]] = []

    def notes(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(set(scores[0].isfinite().nonzero().flatten().tolist()))
        return scores

    for warper in (transformers.TopKLogitsWarper(3), transformers.MinPLogitsWarper(0.3)):
        seen.clear()
        params = SamplingParams(max_new_tokens=NEW, temperature=3.0, seed=1, logits_processor=[warper, notes])
        (output,) = make_loop().generate([ids(PROMPTS[0])], params)
        assert all(token in left for token, left in zip(output, seen, strict=True))
        assert max(map(len, seen)) <= 3 or isinstance(warper, transformers.MinPLogitsWarper)
        assert output != expected()[0]


def test_stop_strings_of_transformers() -> None:
    text = tokenizer().decode(expected()[0])
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    criteria = transformers.StoppingCriteriaList([transformers.StopStringCriteria(tokenizer(), [stop])])
    params = SamplingParams(max_new_tokens=NEW, stopping_criteria=criteria)
    outputs = make_loop().generate(
        [ids(prompt) for prompt in PROMPTS], [params, SamplingParams(NEW), SamplingParams(NEW)]
    )
    assert outputs[0] == by_transformers(PROMPTS[0], stop_strings=[stop], tokenizer=tokenizer())
    assert len(outputs[0]) < NEW
    assert outputs[0].finish_reason == "stop"
    assert outputs[1:] == expected()[1:]


def test_tokens_do_not_depend_on_the_modes_of_the_calling_thread() -> None:
    """A model is wrapped, a loop is made, and each step runs under other modes: of autocast and of inference."""
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0)
    looks = SamplingParams(max_new_tokens=NEW, temperature=0.0, logits_processor=lambda ids, scores: scores)
    bfloat16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    logprobs = paged().token_logprobs(ids(PROMPTS[0]))
    for outer, inner in (
        (bfloat16, torch.inference_mode),
        (torch.inference_mode, bfloat16),
        (torch.inference_mode, torch.enable_grad),
    ):
        with outer():
            own = PagedCausalLM(load())
            loop = GenerationLoop(own, own.allocate_kv_cache(64))
            assert torch.equal(own.token_logprobs(ids(PROMPTS[0])), logprobs)
        requests = [loop.submit(ids(prompt), each) for prompt in PROMPTS for each in (params, looks)]
        while loop.has_work:
            for mode in (inner, contextlib.nullcontext, outer):
                with mode():
                    loop.step()
        assert [[*loop.output(each)] for each in requests] == [each for each in expected() for _ in range(2)]


def test_a_compiled_step_is_not_compiled_again_in_other_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    loop, params = make_loop(compile=True), SamplingParams(max_new_tokens=NEW, temperature=0.0)
    loop.warm_up()
    graphs = counters["unique_graphs"]
    for mode in (torch.inference_mode, functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)):
        with mode():
            assert loop.generate([ids(prompt) for prompt in PROMPTS], params) == expected()
    assert counters["unique_graphs"] == graphs
    torch._dynamo.reset()


def test_a_model_that_was_wrapped_again_has_one_loop() -> None:
    model = load()
    loops = []
    for _ in range(2):
        own = PagedCausalLM(model)
        loops.append(GenerationLoop(own, own.allocate_kv_cache(64)))
    with pytest.raises(ValueError, match=r"model: expected one that is wrapped, got .* wrapped again by another"):
        loops[0].submit(ids(PROMPTS[0]))
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0)
    assert loops[1].generate([ids(PROMPTS[0])], params) == expected()[:1]


def test_new_weights_after_a_reset() -> None:
    model = load()
    step = PagedCausalLM(model)
    loop = GenerationLoop(step, step.allocate_kv_cache(64))
    params = SamplingParams(max_new_tokens=NEW)
    prompts = [ids(prompt) for prompt in PROMPTS]
    assert loop.generate(prompts, params) == expected()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.roll(1, 0))
    loop.reset()
    hits = loop.stats.cached_tokens
    changed = loop.generate(prompts, params)
    fresh = GenerationLoop(step, step.allocate_kv_cache(64)).generate(prompts, params)
    assert changed == fresh != expected()
    assert loop.stats.cached_tokens == hits or any(a[:16] == b[:16] for a in prompts for b in prompts if a is not b)


@pytest.mark.slow
def test_the_page_of_the_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/generation.md").read_text()
    names = {"model": load(), "tokenizer": tokenizer()}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(example, "docs/generation.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert "length abort" in lines
    assert names["loop"].kv_cache.num_used_blocks == 0
