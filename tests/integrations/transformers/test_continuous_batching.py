"""generate_batch of transformers on paged_ops: tokens of generate(), pages read in place, the decode path of GPUs."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402
from transformers.generation.continuous_batching import PagedAttentionCache, initialization  # noqa: E402

from paged_ops.integrations.transformers import continuous_batching  # noqa: E402
from paged_ops.integrations.transformers.continuous_batching import attention, use_paged_attention  # noqa: E402
from tests.integrations.transformers.tiny_models import MODELS, PAGE_SIZE, PROMPTS, tiny_model  # noqa: E402

GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


def batch(model, tokens=256):
    config = ContinuousBatchingConfig(num_blocks=48, max_batch_tokens=tokens, **{PAGE_SIZE: 16})
    outputs = model.generate_batch(
        PROMPTS, generation_config=GREEDY, continuous_batching_config=config, progress_bar=False
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("tokens", [256, 32], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_are_those_of_generate(name, tokens):
    model = tiny_model(name)
    model.set_attn_implementation("eager")  # sdpa leaves out Gemma-2's soft cap in 5.17
    expected = [
        model.generate(torch.tensor([ids]), generation_config=GREEDY)[0, len(ids) :].tolist() for ids in PROMPTS
    ]
    assert batch(use_paged_attention(model), tokens) == expected


def test_layers_of_full_attention_gather_nothing(monkeypatch):
    def gather(*args, **kwargs):
        raise AssertionError("keys and values were gathered")

    monkeypatch.setattr(torch, "index_select", gather)
    monkeypatch.setattr(PagedAttentionCache, "update", gather)
    assert all(len(tokens) == 8 for tokens in batch(use_paged_attention(tiny_model("llama")), 32))
    assert all(len(tokens) < 8 for tokens in batch(use_paged_attention(tiny_model("gemma2")), 32))  # its windows do


def pages(seed=0, N=12, B=4, K=2, D=8):
    torch.manual_seed(seed)
    return torch.randn(N, B, K, D), torch.randn(N, B, K, D)


@pytest.mark.parametrize(
    ("version", "one_tensor"), [("5.17", False), ("5.23", False), ("5.23", True), ("5.24", False), ("5.24", True)]
)
def test_decode_by_block_tables_writes_and_attends(version, one_tensor):
    """What a GPU's decode hands over: tables padded with -1, lengths with the new token, padding at the end."""
    K, D, H, B = 2, 8, 4, 4
    key_pages, value_pages = pages()
    if one_tensor:  # pages of keys and of values in turns: transformers counts them all
        arena = torch.stack([key_pages, value_pages], 1).flatten(0, 1)
        key_pages, value_pages = arena[0::2], arena[1::2]
    written = key_pages.clone(), value_pages.clone()
    if version == "5.17":
        cache = SimpleNamespace(
            layer_index_to_group_indices={0: (0, 0)},
            block_size=B,
            num_key_value_heads=K,
            head_dim=D,
            key_cache=[key_pages.view(-1, K, D)],
            value_cache=[value_pages.view(-1, K, D)],
            group_cache_managers=[SimpleNamespace()],
        )
    else:
        owner = SimpleNamespace(index=0, layer_indices=[0], layer_type="full_attention")
        views = (arena[:-1], arena[1:]) if one_tensor else (key_pages, value_pages)
        owner.get_cache_for_block_table = lambda layer: views
        cache = SimpleNamespace(layer_to_allocator={0: owner})
    tables = torch.tensor([[[3, 7, -1], [5, -1, -1], [-1, -1, -1]]], dtype=torch.int32)
    lens = [6, 4, 0]
    query, key, value = torch.randn(1, H, 3, D), torch.randn(1, K, 3, D), torch.randn(1, K, 3, D)
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    longest = {"max_length_k": {"full_attention": 1}} if version == "5.23" else {"max_seqlen_k": 1}
    key_starts = torch.tensor([0, 6, 10, 10], dtype=torch.int32)
    block_table = torch.where(tables < 0, tables, 2 * tables) if one_tensor else tables
    given = {"cache": cache, "block_table": block_table}
    if version == "5.24":
        given = {"k_cache": views[0], "v_cache": views[1], "block_table": block_table[0]}
    out, _ = attention(
        SimpleNamespace(layer_idx=0),
        query,
        key,
        value,
        None,
        scaling=0.3,
        cu_seq_lens_q=starts,
        cu_seq_lens_k={"full_attention": key_starts} if version == "5.23" else key_starts,
        read_index=[],
        write_index=[],
        **longest,
        **given,
    )
    for s, (page, offset) in enumerate([(7, 1), (5, 3)]):
        written[0][page, offset], written[1][page, offset] = key[0, :, s], value[0, :, s]
    torch.testing.assert_close((key_pages, value_pages), written, atol=0, rtol=0)
    for s in (0, 1):
        table = tables[0, s][: -(-lens[s] // B)].long()
        keys, values = (x[table].flatten(0, 1)[: lens[s]].repeat_interleave(H // K, dim=1) for x in written)
        weights = torch.softmax(torch.einsum("hd,jhd->hj", query[0, :, s], keys) * 0.3, dim=-1)
        torch.testing.assert_close(out[0, s], torch.einsum("hj,jhd->hd", weights, values), atol=1e-5, rtol=1e-5)
    assert (out[0, 2] == 0).all()


@pytest.mark.parametrize("window", [None, 3])
def test_keys_that_the_layer_gathered_are_attended_to(window):
    """From 5.24 on a layer updates the cache itself, and passes all keys of the sequences, one after another."""
    K, D, H, lens, new = 2, 8, 4, [6, 4], [2, 1]
    torch.manual_seed(0)
    query, key, value = torch.randn(1, H, 3, D), torch.randn(1, K, 10, D), torch.randn(1, K, 10, D)
    ends = {"cu_seq_lens_q": torch.tensor([0, 2, 3]), "cu_seq_lens_k": torch.tensor([0, 6, 10]), "max_length_k": 6}
    out, _ = attention(
        SimpleNamespace(), query, key, value, None, sliding_window=window, read_index=[], write_index=[], **ends
    )
    for s, (row, first) in enumerate([(0, 0), (2, 6)]):
        for i in range(new[s]):
            last = first + lens[s] - new[s] + i + 1
            seen = slice(first if window is None else max(first, last - window), last)
            keys, values = (x[0, :, seen].repeat_interleave(H // K, dim=0) for x in (key, value))
            weights = torch.softmax(torch.einsum("hd,hjd->hj", query[0, :, row + i], keys) * D**-0.5, dim=-1)
            expected = torch.einsum("hj,hjd->hd", weights, values)
            torch.testing.assert_close(out[0, row + i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_gpu_decodes_by_block_tables(name, monkeypatch):
    """transformers asks its flash-attention module whether it can: that must not look for a kernel on the hub."""
    model = use_paged_attention(tiny_model(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ContinuousBatchingConfig(max_blocks_per_request=8)
    initialization.ensure_decode_fast_path_is_available(model.config, config, True)
    assert config.max_blocks_per_request == (8 if name == "llama" else 0)  # not where a layer has a window


def test_other_calls_are_refused_clearly():
    model = use_paged_attention(tiny_model("llama"))
    with pytest.raises(ValueError, match="cache: expected the cache of generate_batch"):
        model.generate(torch.tensor([PROMPTS[0]]), generation_config=GREEDY)
    with pytest.raises(ValueError, match="attn_implementation: expected a flash-attention implementation"):
        continuous_batching._not_called()
    model.set_attn_implementation("sdpa")
    assert model.generate(torch.tensor([PROMPTS[0]]), generation_config=GREEDY).shape == (1, 11)


def test_masks_are_refused():
    states = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="attention_mask: expected none"):
        attention(SimpleNamespace(layer_idx=0), states, states, states, torch.zeros(1), cache=SimpleNamespace())


@pytest.mark.skipif(PAGE_SIZE == "block_size", reason="that version takes any name")
def test_an_unknown_version_is_refused(monkeypatch):
    monkeypatch.delattr(flash, "_loaded_implementation")
    with pytest.raises(ValueError, match=r"has no \['_loaded_implementation'\]"):
        use_paged_attention(tiny_model("llama"))


def test_another_flash_attention_does_not_stay(monkeypatch):
    """After another function was loaded, a second call makes this one the loaded one again."""
    model = use_paged_attention(tiny_model("llama"))
    before = batch(model)
    monkeypatch.setattr(flash, "_loaded_implementation", "flash_attention_2")
    assert batch(use_paged_attention(model)) == before
