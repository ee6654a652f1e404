"""A loop with default arguments does what ``generate()`` does, with each field of a generation config."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

import paged_ops  # noqa: E402
from paged_ops.cache import KVCache  # noqa: E402
from paged_ops.cli.demo import DEMO_MODEL  # noqa: E402
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402

V = 64
PROMPTS = [[5, 6, 7, 8, 5, 6], [9], [11, 12, 13, 11, 12]]
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@cache
def dense() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).eval()


@cache
def paged() -> PagedCausalLM:
    return PagedCausalLM(copy.deepcopy(dense()))


@cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


def make_loop(fields: dict[str, Any] | None = None, **options: Any) -> GenerationLoop:
    """A loop over the model with these fields in its generation config."""
    paged().model.generation_config = transformers.GenerationConfig(**fields or {})
    return GenerationLoop(paged(), paged().allocate_kv_cache(64), **options)


@torch.no_grad()
def by_generate(prompt: list[int], fields: dict[str, Any], **options: Any) -> Any:
    given = torch.tensor([prompt])
    dense().generation_config = transformers.GenerationConfig(**fields)
    return dense().generate(given, attention_mask=torch.ones_like(given), **options)


def continued(fields: dict[str, Any], **options: Any) -> list[list[int]]:
    return [by_generate(prompt, fields, **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


@cache
def plain() -> list[list[int]]:
    return continued({})


def test_without_parameters() -> None:
    assert [len(tokens) for tokens in plain()] == [20, 20, 20]
    loop = make_loop()
    assert loop.generate(PROMPTS) == plain()
    ids = [loop.submit(prompt) for prompt in PROMPTS]
    assert loop.run() == dict(zip(ids, plain(), strict=True))
    with loop.stream(PROMPTS[0]) as stream:
        assert [new.token for new in stream] == plain()[0]


SOME = list(range(0, V, 3))
FIELDS: list[dict[str, Any]] = [
    {"max_new_tokens": 7},
    {"max_length": 11},
    {"eos_token_id": SOME},
    {"eos_token_id": SOME, "min_new_tokens": 9},
    {"eos_token_id": SOME, "min_length": 12},
    {"eos_token_id": SOME, "exponential_decay_length_penalty": (3, 1.5)},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1},
    {"suppress_tokens": SOME},
    {"begin_suppress_tokens": list(range(0, V, 2))},
    {"bad_words_ids": [[token] for token in SOME] + [[1, 2]]},
    {"sequence_bias": [[[token], 4.0] for token in SOME]},
    {"forced_eos_token_id": 9},
    {"forced_bos_token_id": 9},
    {"eos_token_id": SOME, "min_new_tokens": 4, "repetition_penalty": 1.3, "suppress_tokens": [4, 9], "max_length": 19},
    {"watermarking_config": {"bias": 8.0, "seeding_scheme": "lefthash"}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_greedy(fields: dict[str, Any]) -> None:
    wanted = continued(fields)
    assert wanted != plain(), "the field changes nothing"
    assert make_loop(fields).generate(PROMPTS) == wanted
    by_loop = make_loop(None, generation_config=fields)
    assert by_loop.generate(PROMPTS) == wanted
    by_object = make_loop(None, generation_config=transformers.GenerationConfig(**fields))
    assert by_object.generate(PROMPTS) == wanted


def test_fields_that_change_no_token() -> None:
    fields = {
        **{"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "typical_p": 0.5, "epsilon_cutoff": 0.1},
        **{"renormalize_logits": True, "remove_invalid_values": True, "use_cache": False, "num_beams": 1},
        **{"output_scores": True, "length_penalty": 2.0, "guidance_scale": 1.0, "num_return_sequences": 1},
    }
    assert make_loop(fields).generate(PROMPTS) == continued(fields | {"output_scores": None}) == plain()


def test_stop_strings_and_time() -> None:
    text = tokenizer().decode(plain()[0])
    fields = {"stop_strings": [text[3:5], "no such text"]}
    wanted = continued(fields, tokenizer=tokenizer())
    assert len(wanted[0]) < 20
    outputs = make_loop(fields, tokenizer=tokenizer()).generate(PROMPTS)
    assert outputs == wanted
    assert outputs[0].finish_reason == "stop"
    loop = make_loop(None, tokenizer=tokenizer())
    assert loop.generate(PROMPTS, SamplingParams(stop_strings=iter(fields["stop_strings"]))) == wanted
    assert loop.generate(PROMPTS, SamplingParams(stop_strings=text[3:5])) == wanted
    with pytest.raises(ValueError, match=r"stop_strings: expected none, or GenerationLoop\(tokenizer=...\), got"):
        make_loop(fields)
    with pytest.raises(ValueError, match="stop_strings: expected none, or GenerationLoop"):
        make_loop().submit(PROMPTS[0], SamplingParams(stop_strings="a"))
    assert make_loop(fields, generation_config={"stop_strings": None}).generate(PROMPTS) == plain()
    assert make_loop({"max_time": 0.0}).generate(PROMPTS) == continued({"max_time": 0.0})


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5, "top_k": 0},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.8, "top_k": 7, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.1, "top_p": 0.9, "top_k": 20},
    {"repetition_penalty": 2.5, "top_k": 0},
    {"typical_p": 0.4},
    {"top_h": 0.4},
    {"epsilon_cutoff": 0.03},
    {"eta_cutoff": 0.05},
    {"suppress_tokens": SOME, "top_p": 0.7, "renormalize_logits": True},
]
DRAWS = 4000


@pytest.mark.parametrize("fields", SAMPLED, ids=lambda fields: "-".join(fields) or "do_sample")
def test_sampling(fields: dict[str, Any]) -> None:
    """The tokens of many samples have the distribution that ``generate()`` draws from."""
    fields = {**fields, "do_sample": True, "max_new_tokens": 1}
    options = {"output_scores": True, "return_dict_in_generate": True}
    p = by_generate(PROMPTS[0], fields, **options).scores[0][0].double().softmax(-1)
    loop = make_loop({**fields, "num_return_sequences": DRAWS}, max_num_seqs=DRAWS, max_num_tokens=DRAWS, seed=3)
    outputs = loop.generate(PROMPTS[:1])
    counts = torch.tensor([output[0] for output in outputs]).bincount(minlength=V)
    assert not counts[p == 0].any()
    deviation = (p * (1 - p) / DRAWS).sqrt()
    assert bool(((counts / DRAWS - p).abs() <= 4.5 * deviation + 1 / DRAWS).all())


def test_a_field_of_the_request_comes_first_then_the_loop_then_the_model() -> None:
    fields = {"max_new_tokens": 3, "repetition_penalty": 1.7, "do_sample": True, "temperature": 5.0}
    loop = make_loop(fields, generation_config={"max_new_tokens": 5, "do_sample": False}, seed=1)
    penalised = continued({"repetition_penalty": 1.7})
    assert loop.generate(PROMPTS) == [tokens[:5] for tokens in penalised]
    assert loop.generate(PROMPTS, SamplingParams(max_new_tokens=8)) == [tokens[:8] for tokens in penalised]
    assert loop.generate(PROMPTS, SamplingParams(repetition_penalty=1.0)) == [tokens[:5] for tokens in plain()]
    assert loop.generate(PROMPTS, SamplingParams(temperature=3.0, n=1)) != [tokens[:5] for tokens in penalised]
    samples = make_loop(fields, seed=1)
    assert samples.generate(PROMPTS) != [tokens[:3] for tokens in penalised], "do_sample of the model"
    assert samples.generate(PROMPTS, SamplingParams(temperature=0)) == [tokens[:3] for tokens in penalised]
    assert samples.generate(PROMPTS, SamplingParams(top_k=1)) == [tokens[:3] for tokens in penalised]
    none = make_loop(fields, generation_config={"max_new_tokens": None, "repetition_penalty": None, "do_sample": None})
    assert none.generate(PROMPTS) == plain()
    later = {"max_new_tokens": 2}
    paged().model.generation_config = transformers.GenerationConfig(**later)
    assert none.generate(PROMPTS) == plain(), "the config is read when the loop is made"


def test_the_length_that_a_config_gives_is_cut_to_the_loop_s() -> None:
    loop = make_loop({"max_new_tokens": 1000}, max_model_len=16)
    outputs = loop.generate(PROMPTS)
    assert outputs == [tokens[: 16 - len(prompt)] for tokens, prompt in zip(plain(), PROMPTS, strict=True)]
    assert {output.finish_reason for output in outputs} == {"length"}
    with pytest.raises(ValueError, match="prompt: expected at most 16 tokens with max_new_tokens"):
        loop.submit(PROMPTS[0], SamplingParams(max_new_tokens=11))
    with pytest.raises(ValueError, match="prompt: expected fewer tokens than max_length = 5, got 6"):
        make_loop({"max_length": 5}).submit(PROMPTS[0])


REFUSED = [("num_beams", 4), ("guidance_scale", 2.0), ("token_healing", True), ("penalty_alpha", 0.5)]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_fields_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.{name}: expected .*, got {value}"):
        make_loop({name: value})
    assert make_loop({name: value}, generation_config={name: None}).generate(PROMPTS) == plain()


def test_configs_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"generation_config: expected fields of a generation config, got \['topk'\]"):
        make_loop(generation_config={"topk": 3})
    with pytest.raises(ValueError, match="generation_config: expected a GenerationConfig, or a mapping"):
        make_loop(generation_config=3)
    with pytest.raises(ValueError, match=r"generation_config.temperature: expected a finite number"):
        make_loop({"temperature": 10**400})
    with pytest.raises(
        ValueError, match=r"generation_config: expected fields that make processors, got .*bad_words_ids"
    ):
        make_loop({"bad_words_ids": [[-1]]})
    loop = make_loop()
    for given in (transformers.GenerationConfig(), [transformers.GenerationConfig()] * 3):
        with pytest.raises(ValueError, match=r"params: expected SamplingParams, got GenerationConfig; give it to the"):
            loop.generate(PROMPTS, given)
    with pytest.raises(ValueError, match=r"params: expected SamplingParams, got GenerationConfig; give it to the"):
        loop.submit(PROMPTS[0], transformers.GenerationConfig())
    with pytest.raises(ValueError, match=r"step: expected .* got LlamaForCausalLM; wrap it: PagedCausalLM"):
        GenerationLoop(dense(), paged().allocate_kv_cache(4))
    with pytest.raises(ValueError, match=r"kv_cache: expected a KVCache or HybridCache, .* got None"):
        GenerationLoop(paged(), None)
    with pytest.raises(ValueError, match="num_blocks: expected at least 1 in the cache, got 0"):
        GenerationLoop(paged(), paged().allocate_kv_cache(0))


def test_a_plain_step_serves_what_needs_no_library() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 3

    def step(input_ids: Any, metadata: Any, last_rows: Any, kv_caches: Any) -> torch.Tensor:
        shape = 1, len(input_ids), 1, 8
        key = torch.zeros(shape[1:], dtype=torch.float32)
        paged_ops.reshape_and_cache(key, key, kv_caches[0], metadata.slot_mapping)
        return logits.expand(len(last_rows), V).clone()

    def loop(**options: Any) -> GenerationLoop:
        return GenerationLoop(step, KVCache(1, 64, 4, 1, 8), **options)

    (best, second, third) = logits.topk(3).indices.tolist()
    assert loop().generate([[1]]) == [[best] * 20]
    config = {"repetition_penalty": 1e9, "eos_token_id": third, "min_new_tokens": 3, "max_length": 12}
    tokens = loop(generation_config=config).generate([[1]])[0]
    assert tokens[:2] == [best, second] and tokens[2] not in (best, second, third) and tokens[3] == third
    sampled = loop(generation_config={"do_sample": True, "top_k": 2, "temperature": 9.0}, seed=1).generate([[1]])[0]
    assert set(sampled) == {best, second} and len(sampled) == 20
    for name, value in (("suppress_tokens", [best]), ("typical_p", 0.5), ("stop_strings", ["a"])):
        with pytest.raises(ValueError, match=rf"generation_config\.{name}: expected .* a plain step"):
            loop(generation_config={name: value})
    with pytest.raises(ValueError, match="stop_strings: expected none, as this model is a plain step"):
        loop(tokenizer=tokenizer()).submit([1], SamplingParams(stop_strings="a"))
    assert loop(generation_config=transformers.GenerationConfig(max_new_tokens=2)).generate([[1]]) == [[best] * 2]
