"""``batch_invariant=True``: tokens and log-probabilities of requests have the same bits under every load."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.integrations.transformers.projections import fuse_projections
from tests.integrations.transformers.tiny_models import MODELS, SHAPE, TYPES

SMALL = {**SHAPE, "num_hidden_layers": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gemma2": MODELS["gemma2"],  # also caps logits
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, sliding_window=12, layer_types=TYPES[:2], query_pre_attn_scalar=16
    ),
    "gpt_oss": MODELS["gpt_oss"],
    "gpt_oss_of_one_layer": lambda: transformers.GptOssConfig(
        **{**SHAPE, "num_hidden_layers": 1}, num_local_experts=4, num_experts_per_tok=2, layer_types=TYPES[:1]
    ),
}
# 28 blocks of 4, and 36 at the end
PROMPTS = [[(7 * i * i + 3 * i + s * 131) % 250 + 2 for i in range(n)] for s, n in enumerate((15, 45, 13, 30))]
SAMPLED = SamplingParams(max_new_tokens=8, temperature=0.8, seed=5, logprobs=2)


def tiny(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):
            parameter.data.normal_(0.0, 2.0)
    return model


def generate(paged, prompts, num_blocks=64, **options):
    """Tokens and log-probabilities of the requests, and the loop."""
    loop = GenerationLoop(paged, paged.allocate_kv_cache(num_blocks, 4), **options)
    return [(list(output), output.logprobs) for output in loop.generate(prompts, SAMPLED)], loop


def recomputed(paged, prompts, found):
    """How many of the log-probabilities have other bits in one forward pass over prompt and output."""
    count = 0
    for prompt, (tokens, logprobs) in zip(prompts, found, strict=True):
        again = paged.token_logprobs([*prompt, *tokens])[len(prompt) - 1 :]
        count += int((again != torch.tensor([each.logprob for each in logprobs])).sum())
    return count


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in list(CONFIGS)[:5]), ("qwen3", torch.bfloat16)]
)
def test_bits_of_requests_do_not_depend_on_the_load(name, dtype):
    paged = PagedCausalLM(tiny(name, dtype), batch_invariant=True)
    alone, _ = generate(paged, PROMPTS, max_num_seqs=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + threads % 2)
    try:
        together, loop = generate(paged, PROMPTS)
        cached = [(list(output), output.logprobs) for output in loop.generate(PROMPTS, SAMPLED)]
        assert loop.stats.cached_tokens > 0
    finally:
        torch.set_num_threads(threads)
    chunked, loop = generate(paged, PROMPTS, num_blocks=32, max_num_tokens=64)
    assert loop.stats.preemptions > 0
    assert together == alone
    assert cached == alone
    assert chunked == alone
    assert recomputed(paged, PROMPTS, alone) == 0


def test_a_layer_that_is_not_invariant_is_found():
    paged = PagedCausalLM(tiny("llama"), batch_invariant=True)
    layer = paged.model.model.layers[1].mlp.down_proj

    def planted(x):  # other numbers with more rows than one sequence has, which is padded to two
        return torch.nn.functional.linear(x * (1.0 + 2.0**-10 * (x.shape[1] > 2)), layer.weight)

    layer.forward = planted
    alone, _ = generate(paged, PROMPTS, max_num_seqs=1)
    together, _ = generate(paged, PROMPTS)
    assert together != alone
    assert recomputed(paged, PROMPTS, alone) > 0


@pytest.mark.slow
def test_compiled_layers_have_one_result_too():
    model = tiny("gpt_oss_of_one_layer")
    fuse_projections(model)
    paged = PagedCausalLM(model, batch_invariant=True).compile_layers()
    alone, _ = generate(paged, PROMPTS, num_blocks=32, max_num_seqs=1)
    chunked, loop = generate(paged, PROMPTS, num_blocks=32, max_num_tokens=64)
    assert loop.stats.preemptions > 0
    assert chunked == alone
    assert recomputed(paged, PROMPTS, alone) == 0


def test_fused_projections_and_unwrapping():
    model = tiny("llama")
    ids = torch.tensor([PROMPTS[1]])
    kinds, expected = [type(module) for module in model.modules()], model(input_ids=ids).logits
    paged = PagedCausalLM(model, batch_invariant=True)
    apart = paged.token_logprobs(PROMPTS[1])
    torch.testing.assert_close(
        apart, expected[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], atol=1e-4, rtol=0
    )
    paged.unwrap()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(input_ids=ids).logits, expected)
    fuse_projections(model)
    fused = PagedCausalLM(model, batch_invariant=True)
    assert torch.equal(fused.token_logprobs(PROMPTS[1]), apart)


@pytest.mark.parametrize("name", ["llama", "gpt_oss_of_one_layer"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda paged: pickle.loads(pickle.dumps(paged))])
def test_copies_have_the_same_bits(name, copied):
    model = tiny(name)
    fuse_projections(model)
    kinds = [type(module) for module in model.modules()]
    paged = PagedCausalLM(model, batch_invariant=True)
    other = copied(paged)
    expected = paged.token_logprobs(PROMPTS[1])
    paged.unwrap()
    assert torch.equal(other.token_logprobs(PROMPTS[1]), expected)
    assert [type(module) for module in other.unwrap().modules()] == kinds


def test_a_wrapped_model_is_saved_as_it_was(tmp_path):
    model = tiny("gemma2")
    PagedCausalLM(model, batch_invariant=True)
    with pytest.raises(ValueError, match=r"attention_metadata: expected one.*unwrap\(\)"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.final_logit_softcapping == 30.0 and saved.config.architectures == ["Gemma2ForCausalLM"]


REFUSED = {
    "MambaMixer": lambda: transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1),
    "Phi3Attention": lambda: transformers.Phi3Config(**{**SMALL, "head_dim": 16}),
    "ReLU": lambda: transformers.LlamaConfig(**SMALL, hidden_act="relu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_refused_by_name(name):
    model = AutoModelForCausalLM.from_config(REFUSED[name]()).eval()
    kinds, implementation = [type(module) for module in model.modules()], model.config._attn_implementation
    with pytest.raises(ValueError, match=rf"^batch_invariant: expected .* got {type(model).__name__} with .*{name}"):
        PagedCausalLM(model, batch_invariant=True)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == implementation
    assert not hasattr(model, "paged_wrapping")


def test_prompt_logprobs_are_refused_where_they_run_in_another_mode():
    paged = PagedCausalLM(tiny("llama"), batch_invariant=True)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(8), compile=True)
    with pytest.raises(ValueError, match=r"^prompt_logprobs: expected None"):
        loop.submit([1, 2], SamplingParams(prompt_logprobs=0))
    assert not loop.has_work
