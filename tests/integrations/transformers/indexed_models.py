"""What the tests of models with an indexer share: prompts many times longer than what is selected, and their tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch

from paged_ops.generation import SamplingParams
from tests.integrations.transformers.model_families import SIZES

GREEDY = SamplingParams(max_new_tokens=8, stop_token_ids=())


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)

    def random(length: int) -> list[int]:
        return torch.randint(5, SIZES["vocab_size"] - 4, (length,), generator=generator).tolist()

    shared = random(40)
    return [random(1), random(23), random(70), [*shared, *random(3)], [*shared, *random(12)]]


def generate_by_transformers(model: Any) -> list[list[int]]:
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    outputs = (model.generate(torch.tensor([p], device=model.device), **options)[0] for p in prompts())
    return [output[len(p) :].tolist() for output, p in zip(outputs, prompts(), strict=True)]
