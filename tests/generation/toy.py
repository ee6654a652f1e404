"""A toy model whose logits depend on every earlier token through the paged cache only, and loops over it."""

from typing import Any

import torch
from torch import Tensor

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams
from paged_ops.metadata import AttentionMetadata

V, H, K, D, B = 61, 4, 2, 8, 4
GENERATOR = torch.Generator().manual_seed(0)
EMBED = torch.randn(V, H * D, generator=GENERATOR)
POSITION = torch.randn(256, H * D, generator=GENERATOR) * 0.5
TO_KEY, TO_VALUE = torch.randn(2, H * D, K * D, generator=GENERATOR) * 0.3
TO_LOGITS = torch.randn(H * D, V, generator=GENERATOR)


def toy_step(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: list[Tensor]) -> Tensor:
    hidden = EMBED[input_ids] + POSITION[metadata.positions]
    key, value = (hidden @ TO_KEY).view(-1, K, D), (hidden @ TO_VALUE).view(-1, K, D)
    paged_ops.reshape_and_cache(key, value, kv_caches[0], metadata.slot_mapping)
    batch = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
    out = paged_ops.paged_attention(hidden.view(-1, H, D), kv_caches[0], *batch, D**-0.5)
    return out.reshape(-1, H * D)[last_rows] @ TO_LOGITS


def dense_greedy(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        hidden = EMBED[tokens] + POSITION[: len(tokens)]
        key, value = (each.view(-1, K, D).repeat_interleave(H // K, 1) for each in (hidden @ TO_KEY, hidden @ TO_VALUE))
        weights = torch.softmax(torch.einsum("hd,jhd->hj", hidden[-1].view(H, D), key) * D**-0.5, -1)
        tokens.append(int((torch.einsum("hj,jhd->hd", weights, value).reshape(-1) @ TO_LOGITS).argmax()))
    return tokens[len(prompt) :]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(1, 2, 4, 5, 9, 13, 17, 30, 33, 41)
EXPECTED = [dense_greedy(prompt, 12) for prompt in PROMPTS]
GREEDY = SamplingParams(max_new_tokens=12)


def make_loop(num_blocks: int = 128, num_host_blocks: int = 0, **sizes: int) -> GenerationLoop:
    return GenerationLoop(toy_step, KVCache(1, num_blocks, B, K, D, num_host_blocks=num_host_blocks), **sizes)


def assert_empty(loop: GenerationLoop) -> None:
    stats = loop.kv_cache.stats()
    assert (stats.used_blocks, stats.host_used_blocks) == (0, 0)
    assert not loop.has_work


def tokens_by_request(steps: list[list[NewToken]]) -> dict[int, list[NewToken]]:
    found: dict[int, list[NewToken]] = {}
    for new in [new for step in steps for new in step]:
        found.setdefault(new.request_id, []).append(new)
    return found


def step_on(kv_cache: Any, *windows: int) -> Any:
    """A model whose layers see so far (0: everything), for a cache with pools."""

    def step(input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, layers: list[Tensor]) -> Tensor:
        hidden = EMBED[input_ids] + POSITION[metadata.positions]
        for layer, pool, window in zip(layers, kv_cache.pool_of_layer, windows, strict=True):
            own = metadata.pool(pool)
            key, value = (hidden @ TO_KEY).view(-1, K, D), (hidden @ TO_VALUE).view(-1, K, D)
            paged_ops.reshape_and_cache(key, value, layer, own.slot_mapping)
            batch = (own.block_tables, metadata.seq_lens, metadata.query_start_loc)
            out = paged_ops.paged_attention(hidden.view(-1, H, D), layer, *batch, D**-0.5, sliding_window=window)
            hidden = hidden + out.reshape(-1, H * D)
        return hidden[last_rows] @ TO_LOGITS

    return step
