"""Log-probabilities of given tokens, from one forward pass over a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops.checks import expect
from paged_ops.generation.distribution import log_softmax
from paged_ops.generation.request import read_prompt
from paged_ops.graphs import DecodeGraphs, GraphMode
from paged_ops.metadata import Batch
from paged_ops.registry import apart_from_caller


@apart_from_caller
def token_logprobs(paged: Any, token_ids: Sequence[int] | Tensor) -> Tensor:
    """``PagedCausalLM.token_logprobs``."""
    ids = read_prompt("token_ids", token_ids, paged.vocab_size)
    whole = paged.states is None and paged.context is None and not paged.prompts_see_ahead
    expect(whole, "model", "one without states, context or prompts that see ahead", type(paged.model).__name__)
    most, n = paged.max_model_len, len(ids)
    expect(most is None or n <= most, "token_ids", f"at most the model's {most}", n)
    kv_cache = paged.allocate_kv_cache(-(-n // 16), 16, keep_all=True)
    steps = DecodeGraphs(paged, kv_cache, max_num_seqs=1, max_num_tokens=n, max_model_len=n, mode=GraphMode.NONE)
    batch = Batch([n], [0], [list(range(kv_cache.num_blocks))])
    logits = steps.run_with_rows(paged, batch, ids, list(range(n - 1)))[1:]
    of_next = torch.tensor(ids[1:], dtype=torch.int64, device="cpu").to(logits.device)
    return log_softmax(logits.float()).gather(-1, of_next[:, None])[:, 0]
