"""Models of transformers whose tokens see later ones: the image tokens of Gemma-3, the prefix of PaliGemma.

Tiny random models. A prompt goes through the paged step as the model's processor would have it, images and all, beside
a prompt of text; then tokens are decoded. All as ``generate()`` gives them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.generation import GenerationLoop  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from paged_ops.metadata import AttentionMetadataBuilder, Batch  # noqa: E402

IMAGE, WINDOW, B, NEW_TOKENS = 120, 8, 4, 6
TEXT: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,  # four image tokens
    vision_use_head=False,
)
IMAGES = [IMAGE] * 4


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=dict(TEXT, sliding_window=WINDOW, layer_types=kinds),
        vision_config=dict(VISION, patch_size=4),  # sixteen patches, pooled to four tokens
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=121,
        eoi_token_index=122,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zeros, until it is trained
    return model


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config=dict(TEXT, model_type="gemma"),
        vision_config=dict(VISION, projection_dim=64),
        image_token_index=IMAGE,
        projection_dim=64,
        hidden_size=64,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


# Model, a prompt with images, its token types, its ranges, and how many images.
CASES = {
    "gemma3": (gemma3, [5, 6, 7, *IMAGES, 8, 9, 10, 11, 12, *IMAGES, 13], (3, 7), (12, 16), 2),
    "paligemma": (paligemma, [*IMAGES, 5, 6, 7, 8, 9], (0, 9), None, 1),
}


def made(name: str) -> tuple[Any, list[int], list[int], list[tuple[int, int]], torch.Tensor]:
    """A model, a prompt, its token types, its ranges, and its images."""
    make, prompt, first, second, images = CASES[name]
    torch.manual_seed(3)
    model = make().eval()
    ranges = [pair for pair in (first, second) if pair is not None]
    within = [any(start <= i < end for start, end in ranges) for i in range(len(prompt))]
    types = [int(each != (name == "paligemma")) for each in within]
    return model, prompt, types, ranges, torch.randn(images, 3, 16, 16)


def expected(
    model: Any, prompt: list[int], types: list[int] | None, images: torch.Tensor | None
) -> tuple[list[int], torch.Tensor]:
    """The greedy tokens of ``generate()``, attending eagerly, and the logits of the first."""
    model.set_attn_implementation("eager")
    given: dict[str, Any] = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    if types is not None:
        given |= {"token_type_ids": torch.tensor([types]), "pixel_values": images}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    result = model.generate(torch.tensor([prompt]), **options, **given)
    return result.sequences[0, len(prompt) :].tolist(), result.logits[0][0]


def generate(
    paged: PagedCausalLM, prompts: list[list[int]], ranges: Any, **inputs: Any
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of prompts that are one step together, then of decodes; and the logits of the first step."""
    cache = paged.allocate_kv_cache(64, B, keep_all=True)
    room = 0 if ranges == "no room" else 2
    ranges = ranges if room else None
    builder = AttentionMetadataBuilder(B, 4, 64, 16, num_blocks=64, max_bidirectional_ranges=room)
    blocks = [[16 * s + b for b in range(16)] for s in range(len(prompts))]
    computed, ids = [0] * len(prompts), [list(prompt) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    first = torch.empty(0)
    for step in range(NEW_TOKENS):
        metadata = builder.build(0, Batch([len(each) for each in ids], computed, blocks, bidirectional_ranges=ranges))
        tokens = torch.tensor([token for each in ids for token in each])
        last_rows = metadata.query_start_loc[1:].long() - 1
        with torch.no_grad():
            logits = paged(tokens, metadata, last_rows, cache.layers, **(inputs if step == 0 else {}))
        first = logits if step == 0 else first
        computed = [have + len(each) for have, each in zip(computed, ids, strict=True)]
        ids = [[token] for token in logits.argmax(-1).tolist()]
        for output, each in zip(outputs, ids, strict=True):
            output += each
    return outputs, first


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_generate(name: str) -> None:
    model, prompt, types, ranges, images = made(name)
    text = [17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27]
    (tokens, logits), (text_tokens, text_logits) = (
        expected(model, prompt, types, images),
        expected(model, text, None, None),
    )
    want, want_logits = [tokens, text_tokens], torch.stack([logits, text_logits])
    paged = PagedCausalLM(model)
    assert paged.bidirectional_ranges(types) == ranges
    got, got_logits = generate(paged, [prompt, text], [ranges, []], pixel_values=images)
    assert got == want
    torch.testing.assert_close(got_logits, want_logits, rtol=1e-4, atol=1e-4)
    _, causal = generate(paged, [prompt, text], None, pixel_values=images)
    torch.testing.assert_close(causal[1], want_logits[1], rtol=1e-4, atol=1e-4)
    assert float((causal[0] - want_logits[0]).abs().max()) > 0.02, "the ranges change nothing"
    if name == "gemma3":  # what compiling adds to ranges is the same in all models
        return
    paged.compile_layers()
    got, got_logits = generate(paged, [prompt, text], [ranges, []], pixel_values=images)
    assert got == want
    torch.testing.assert_close(got_logits, want_logits, rtol=1e-4, atol=1e-4)


def test_a_vision_tower_attends_as_before() -> None:
    model, *_ = made("gemma3")
    before = model.config.vision_config._attn_implementation
    paged = PagedCausalLM(model)
    assert model.config.vision_config._attn_implementation == before != "paged_ops"
    assert model.config.get_text_config()._attn_implementation == "paged_ops"
    assert paged.unwrap().config.get_text_config()._attn_implementation == before


def test_what_no_range_says_is_refused() -> None:
    paged = PagedCausalLM(made("gemma3")[0])
    with pytest.raises(
        ValueError, match=r"open within ranges .* Gemma3ForConditionalGeneration in its sliding_attention"
    ):
        paged.bidirectional_ranges([0] + [1] * (WINDOW + 1))  # Gemma-3 keeps its window within an image
    assert paged.bidirectional_ranges([0] + [1] * WINDOW) == [(1, WINDOW + 1)]
    assert paged.bidirectional_ranges([0, 0, 0]) == []
    with pytest.raises(ValueError, match=r"token_type_ids: expected one prompt's, \[n\], got shape \[1, 3\]"):
        paged.bidirectional_ranges(torch.ones(1, 3, dtype=torch.int64))
    paligemma_ = PagedCausalLM(made("paligemma")[0])
    with pytest.raises(ValueError, match="open within ranges of tokens, got another one from PaliGemma"):
        paligemma_.bidirectional_ranges([0, 0, 1, 0])  # a prefix in two parts
    llama = transformers.LlamaConfig(**{k: v for k, v in TEXT.items() if k != "head_dim"})
    with pytest.raises(ValueError, match="expected one whose masks depend on token_type_ids, got LlamaForCausalLM"):
        PagedCausalLM(transformers.LlamaForCausalLM(llama).eval()).bidirectional_ranges([0, 1])


def test_images_without_ranges_are_refused() -> None:
    model, prompt, _, _, images = made("gemma3")
    with pytest.raises(
        ValueError, match="metadata: expected bidirectional_ranges with pixel_values, because tokens of Gemma3"
    ):
        generate(PagedCausalLM(model), [prompt], "no room", pixel_values=images)


def test_prompts_that_are_prefixes_need_ranges() -> None:
    model, *_ = made("paligemma")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))  # not the embeddings
    text = [17, 18, 19, 20, 21, 22, 23]
    want = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        types = {"token_type_ids": torch.zeros(1, len(text), dtype=torch.long)} if name == "eager" else {}
        result = model.generate(torch.tensor([text]), max_new_tokens=NEW_TOKENS, do_sample=False, **types)
        want[name] = result[0, len(text) :].tolist()
    assert want["sdpa"] == want["eager"], "with its default attention, the prompt is a prefix without types, too"
    paged = PagedCausalLM(model)
    with pytest.raises(ValueError, match=r"step: expected a model of causal prompts .*, got prefixes"):
        GenerationLoop(paged, paged.allocate_kv_cache(64, B))
    with pytest.raises(
        ValueError, match="metadata: expected bidirectional_ranges with a prompt, because tokens of PaliG"
    ):
        generate(paged, [text], "no room")
    tokens, _ = generate(paged, [text], [paged.bidirectional_ranges([0] * len(text))])
    assert tokens == [want["sdpa"]]
    causal, _ = generate(paged, [text], [[]])
    assert causal != tokens
    assert not PagedCausalLM(made("gemma3")[0]).prompts_see_ahead


@pytest.mark.parametrize("name", ["token_type_ids", "attention_mask"])
def test_masks_come_from_the_metadata_alone(name: str) -> None:
    model, prompt, _, _, _ = made("gemma3")
    paged = PagedCausalLM(model)
    with pytest.raises(
        ValueError, match=f"{name}: expected none, because the metadata says which tokens see each other"
    ):
        generate(paged, [prompt], None, **{name: torch.ones(1, len(prompt), dtype=torch.long)})
