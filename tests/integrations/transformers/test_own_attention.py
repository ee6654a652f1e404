"""Families whose attention is code of their own."""

import pickle

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from transformers.models.falcon import modeling_falcon

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from tests.integrations.transformers.model_families import make_model
from tests.integrations.transformers.model_table import by_transformers, prompts

VARIANTS = {
    "bloom, heads that are no power of two": ("bloom", dict(n_head=6, hidden_size=96)),
    "bloom, residual after the norm": ("bloom", dict(apply_residual_connection_post_layernorm=True)),
    "falcon, ALiBi and one key/value head": ("falcon", dict(alibi=True)),
    "falcon, ALiBi and all heads": ("falcon", dict(alibi=True, multi_query=False)),
    "falcon, rotary and all heads": ("falcon", dict(multi_query=False)),
    "falcon, rotary and groups": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon, ALiBi and groups": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2, alibi=True)),
    "mpt, clipped": ("mpt", dict(attn_config=dict(clip_qkv=0.5, softmax_scale=0.3))),
}


def tokens_of(paged):
    loop = GenerationLoop(paged, paged.allocate_kv_cache(128, 4), max_num_seqs=8, max_num_tokens=24, max_model_len=64)
    return loop.generate(prompts(), SamplingParams(max_new_tokens=8, stop_token_ids=()))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_the_tokens_of_generate(name):
    family, changes = VARIANTS[name]
    model = make_model(family, **changes)
    model.config._attn_implementation = "sdpa" if family == "falcon" else "eager"  # eager adds Falcon's ALiBi twice
    paged = PagedCausalLM(model)
    tokens = tokens_of(paged)
    assert tokens == by_transformers(paged.unwrap())


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_a_wrapped_model_is_run_by_steps_alone_and_unwrapped_is_as_before(family):
    model = make_model(family)
    kinds = [type(module) for module in model.modules()]
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    paged = PagedCausalLM(model)
    with pytest.raises(ValueError, match=r"expected a step of PagedCausalLM.*PagedCausalLM.unwrap\(\)"):
        model(ids)
    paged.unwrap()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(ids).logits, before)
    assert not any("paged_slopes" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["bloom", "nemotron"])
def test_a_copy_that_was_pickled(family):
    paged = PagedCausalLM(make_model(family))
    copied = pickle.loads(pickle.dumps(paged))
    tokens = tokens_of(paged)
    with torch.no_grad():
        for parameter in paged.model.parameters():
            parameter.zero_()
    assert tokens_of(copied) == tokens
    assert by_transformers(copied.unwrap()) == tokens


def test_the_length_of_mpt():
    assert PagedCausalLM(make_model("mpt", max_seq_len=48)).max_model_len == 48


def test_alibi_of_falcon_is_exact(monkeypatch):
    """transformers rounds it to bfloat16: with 32 heads and positions above 256, to other tokens."""
    model = make_model(
        "falcon",
        alibi=True,
        num_attention_heads=32,
        hidden_size=512,
        initializer_range=0.05,
        max_position_embeddings=512,
    )
    model.config._attn_implementation = "sdpa"
    rounded = modeling_falcon.build_alibi_tensor

    def exact(mask, num_heads, dtype):
        slopes = rounded(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, :, 1]
        return (slopes[:, :, None] * torch.arange(mask.shape[1])).to(dtype)

    (prompt,) = torch.randint(5, 120, (1, 300), generator=torch.Generator().manual_seed(0)).tolist()
    paged = PagedCausalLM(model)
    (tokens,) = GenerationLoop(paged, paged.allocate_kv_cache(64)).generate([prompt], SamplingParams(max_new_tokens=8))
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)
    whole = paged.unwrap().generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert whole[0, len(prompt) :].tolist() == tokens
