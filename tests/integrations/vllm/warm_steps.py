"""Steps of an engine on an imitated GPU: which kernels vLLM's backend asks for before requests, and in their steps.

A program of its own, as the imitation changes the process: ``python -m tests.integrations.vllm.warm_steps 60 dense``.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.imitated import imitate, print_cases

MOST_TOKENS, MOST_SEQS, LONGEST, B, N = 2048, 64, 4096, 16, 32
CAPTURED = (64, 32, 16, 8, 4, 2, 1)  # decodes of so many requests, the largest first
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"sliding_window": 512},
    "one head": {"heads": (8, 1)},
    "latent": {"heads": (16, 1)},
    "invariant": {},
    "invariant window": {"sliding_window": 512},
    "invariant one head": {"heads": (8, 1)},
    "invariant latent": {"heads": (16, 1)},
}


class Layer:
    """The attention of one layer, as the engine calls it: on rows of one projection and slots of the step."""

    def __init__(self, heads: tuple[int, int] = (32, 8), sliding_window: int | None = None) -> None:
        from paged_ops.integrations.vllm.backend import PagedOpsImpl, PagedOpsMetadataBuilder

        D = 128
        self.heads, self.D = heads, D
        self.impl = PagedOpsImpl(heads[0], D, D**-0.5, heads[1], None, sliding_window)
        self.builder = PagedOpsMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
        storage = torch.empty(N, B, heads[1], 2 * D, dtype=torch.bfloat16)
        self.kv_cache, self.rows = (
            storage.transpose(1, 2),
            storage.new_empty(MOST_TOKENS, (heads[0] + 2 * heads[1]) * D),
        )

    def step(self, common: Any) -> None:
        """Write, and attend."""
        (H, K), D = self.heads, self.D
        parts = self.rows[: common.num_actual_tokens].split([H * D, K * D, K * D], dim=1)
        query, key, value = (each.unflatten(1, (-1, D)) for each in parts)
        self.impl.do_kv_cache_update(None, key, value, self.kv_cache, common.slot_mapping)
        metadata = self.builder.build(0, common)
        self.impl.forward(None, query, key, value, self.kv_cache, metadata, torch.empty_like(query))


class LatentLayer:
    """The same with latents."""

    def __init__(self, heads: tuple[int, int]) -> None:
        from paged_ops.integrations.vllm.latent import PagedOpsMLAImpl, PagedOpsMLAMetadataBuilder

        self.H, self.sizes = heads[0], dict(num_heads=heads[0], kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)
        layers = {"layer": SimpleNamespace(**self.sizes)}
        config = SimpleNamespace(
            additional_config={}, compilation_config=SimpleNamespace(static_forward_context=layers)
        )
        project = torch.nn.Linear(512, heads[0] * 256, dtype=torch.bfloat16)
        own = dict(num_kv_heads=1, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None)
        more = dict(attn_type="decoder", kv_sharing_target_layer_name=None, q_lora_rank=None, qk_head_dim=192)
        self.impl = PagedOpsMLAImpl(
            head_size=576, scale=0.1, qk_rope_head_dim=64, kv_b_proj=lambda x: (project(x), None),
            **self.sizes, **own, **more,
        )  # fmt: skip
        spec = SimpleNamespace(block_size=B)
        self.builder = PagedOpsMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
        self.kv_cache = torch.empty(N, B, 576, dtype=torch.bfloat16)
        self.layer = SimpleNamespace(_k_scale=torch.ones(()))

    def step(self, common: Any) -> None:
        """Write, and attend in both forms."""
        T = common.num_actual_tokens
        latents = torch.empty(T, 576, dtype=torch.bfloat16)
        new, rotated = latents[:, :512], latents[:, None, 512:]
        self.impl.do_kv_cache_update(new, rotated, self.kv_cache, common.slot_mapping, "auto", self.layer._k_scale)
        metadata = self.builder.build(0, common)
        absorbed = metadata.num_decode_tokens
        if absorbed:
            parts = (latents.new_empty(absorbed, self.H, n) for n in (512, 64))
            self.impl.forward_mqa(tuple(parts), self.kv_cache, metadata, self.layer)
        if absorbed < T:
            query, out = latents.new_empty(T - absorbed, self.H, 192), latents.new_empty(T - absorbed, self.H * 128)
            rest = new[absorbed:], rotated[absorbed:], self.kv_cache
            self.impl.forward_mha(query, *rest, metadata, self.layer._k_scale, out)


def metadata_of(new: list[int], lens: list[int]) -> Any:
    """The engine's metadata of a step of requests with so many new tokens."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sizes = torch.tensor(lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=sizes,
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(MOST_SEQS, LONGEST // B, dtype=torch.int32)[: len(new)],
        slot_mapping=torch.zeros(MOST_TOKENS, dtype=torch.int64)[: sum(new)],
        seq_lens_cpu_upper_bound=sizes,
    )


def requests(rng: random.Random) -> tuple[list[int], list[int]]:
    """A step: decodes alone, prompts of one length, or any mixture; the longest prompts are last, as in the engine."""
    S = rng.choice([1, 2, 3, 4, 5, 17, 40, MOST_SEQS])
    kind = rng.choice(["decode", "equal", "mixed", "mixed"])
    if kind == "decode":
        new = [1] * S
    elif kind == "equal":
        new = [rng.choice([2, 3, 5, 16, 17, 64, 200])] * S
    else:
        new = sorted(int(1200 ** rng.random()) for _ in range(S))
    while sum(new) > MOST_TOKENS:
        new.pop()
    return new, [n + rng.choice([0, 0, 1, 700, 2000]) for n in new]


def asked_for(name: str, num_steps: int, left_out: str = "") -> dict[str, Any]:
    """The kernels that a case asks for before requests, and by steps of requests. ``left_out``: "sizes", none of which
    are asked for before."""
    from paged_ops.integrations.vllm import plugin as vllm_plugin
    from paged_ops.integrations.vllm.backend import CompilesAhead

    vllm_plugin.largest_batch = lambda: (MOST_TOKENS, MOST_SEQS)
    vllm_plugin.is_batch_invariant = lambda: name.startswith("invariant")
    CompilesAhead.can_warm_up = lambda self, query, kv_cache: query.shape[0] > 1
    if left_out:
        tuning.covering_batches = lambda *most, **options: []
    served = (LatentLayer if "latent" in name else Layer)(**CASES[name])
    KERNELS.compiled.clear()
    for S in CAPTURED:  # the engine captures its graphs
        served.step(metadata_of([1] * S, [1] * S))
    warm, rng = list(KERNELS.compiled), random.Random(0)
    sizes = set()
    for _ in range(num_steps):
        new, lens = requests(rng)
        sizes.add((sum(new), len(new)))
        served.step(metadata_of(new, lens))
    return {"warm": warm, "later": KERNELS.compiled[len(warm) :], "sizes": len(sizes)}


if __name__ == "__main__":
    KERNELS = imitate()
    import vllm  # noqa: F401

    from paged_ops.lowerings.gpu.attention import tuning

    print_cases(sys.argv[2:], lambda name, left_out: asked_for(name, int(sys.argv[1]), left_out))
