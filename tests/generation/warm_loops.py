"""Loops under random load on an imitated GPU: which kernels they compile before and after ``warm_up``.

A program of its own, as the imitation changes the process: ``python -m tests.generation.warm_loops 300 dense latent``.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.imitated import imitate, print_cases

V = 64
MOST_SEQS, MOST_TOKENS, LONGEST = 24, 256, 700
PHASE = 100  # steps


class RandomLogits:
    """A wrapped model whose logits are random, because nothing computes its attention."""

    def __init__(self, model: Any) -> None:
        self.model, self.generator = model, torch.Generator().manual_seed(1)
        self.sizes: set[tuple[int, int]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: Any, metadata: Any, last_rows: Any, kv_caches: Any) -> Any:
        self.model(input_ids, metadata, last_rows, kv_caches)
        self.sizes.add((len(input_ids), len(metadata.seq_lens)))
        return torch.rand(len(last_rows), V, generator=self.generator)


def llama(head_dim: int = 128) -> Any:
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V, head_dim=head_dim)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096)
    return transformers.LlamaConfig(**sizes, **heads)


def windowed() -> Any:
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V, head_dim=256)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, sliding_window=64)
    return transformers.Gemma2Config(**sizes, **heads)


def latent() -> Any:
    import transformers

    from paged_ops.integrations import expanded
    from paged_ops.integrations.transformers import latent as attention

    expanded.WINDOW = 16 * 64
    attention.expands = lambda new, tokens, sizes: new >= attention.FEWEST_TOKENS
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V)
    heads = dict(num_attention_heads=16, num_key_value_heads=16, q_lora_rank=64, kv_lora_rank=512)
    parts = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=4096)
    return transformers.DeepseekV3Config(**sizes, **heads, **parts, first_k_dense_replace=2)


def states() -> Any:
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V, head_dim=128)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, num_experts=0)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    kinds = ["linear_attention", "full_attention"]
    return transformers.Qwen3NextConfig(**sizes, **heads, **linear, layer_types=kinds, mlp_only_layers=[0, 1])


def indexed() -> Any:
    """An indexer that selects keys of latents."""
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V)
    heads = dict(num_attention_heads=16, num_key_value_heads=16, q_lora_rank=64, kv_lora_rank=512)
    parts = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=4096)
    index = dict(index_topk=64, index_n_heads=16, index_head_dim=128)
    return transformers.DeepseekV32Config(**sizes, **heads, **parts, **index, first_k_dense_replace=2)


def block_indexed() -> Any:
    """An indexer that selects blocks of keys in one of two layers."""
    import transformers

    sizes = dict(hidden_size=256, dense_intermediate_size=256, num_hidden_layers=2, vocab_size=V, head_dim=128)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096)
    index = dict(index_n_heads=2, index_head_dim=128, index_block_size=128, index_topk_blocks=2)
    kinds = dict(layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense", "dense"])
    return transformers.MiniMaxM3VLTextConfig(**sizes, **heads, **index, **kinds)


def gpt_oss() -> Any:
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=V, head_dim=64)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096)
    return transformers.GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2, sliding_window=128)


CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "min_new_tokens": 4},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    {"temperature": 1.0, "presence_penalty": 0.2, "logprobs": 2},
    {"temperature": 0.0, "logits_processor": lambda input_ids, scores: scores * 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]
IN_TURN = {"logprobs", "logits_processor", "prompt_logprobs"}  # while a request has one, no steps overlap
MODELS: dict[str, Callable[[], Any]] = {
    "dense": llama,
    "windowed": windowed,
    "latent": latent,
    "states": states,
    "invariant": gpt_oss,
    "invariant_dense": llama,
    "wide": functools.partial(llama, head_dim=512),
    "invariant_wide": functools.partial(llama, head_dim=512),
    "indexed": indexed,
    "block_indexed": block_indexed,
}


def choose_by_kernels() -> None:
    """The kernels that choose tokens are asked for on the imitated GPU, too, and torch's ops give the results."""
    from paged_ops.generation import sampling
    from paged_ops.lowerings.gpu import draw, penalties

    def in_place_of(module: Any, name: str, compute: Callable[..., Any]) -> None:
        kernel = getattr(module, name)

        def call(*args: Any) -> Any:
            kernel(*args)
            return compute(*args)

        setattr(module, name, call)

    sampling.by_kernels = lambda logits: True
    in_place_of(draw, "likeliest", lambda logits: logits.max(-1))
    in_place_of(draw, "launch", lambda logits, best, draws: torch.randint(V, (draws.shape[1],)))
    in_place_of(penalties, "launch", lambda logits, table, *more: logits[table[:, 0]].float())


def make_loop(name: str, device: str = "cpu", **options: Any) -> Any:
    """A loop over a tiny model; on the CPU over an imitated GPU, which gives random logits."""
    import transformers

    from paged_ops.generation import GenerationLoop
    from paged_ops.integrations.transformers import PagedCausalLM, probe
    from paged_ops.integrations.transformers.projections import fuse_projections, use_overlapping_products

    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16).to(device).eval()
    if device == "cpu":
        probe.expect_alike = lambda *args: None  # nothing computes the trial's logits
    is_invariant = name.startswith("invariant")
    step: Any = PagedCausalLM(model, batch_invariant=is_invariant)
    if device == "cpu":
        step = RandomLogits(step)
    if not is_invariant:
        fuse_projections(model)
        use_overlapping_products(model)
    cache = step.allocate_kv_cache(90, num_host_blocks=60, num_state_slots=2 * MOST_SEQS)
    sizes = dict(max_num_seqs=MOST_SEQS, max_num_tokens=MOST_TOKENS, max_model_len=LONGEST)
    return GenerationLoop(step, cache, **sizes, **options), step


def load(loop: Any, num_steps: int, seed: int) -> None:
    """Random requests: prompts of all lengths, several samples, aborts, prompts whose prefix is cached. For PHASE
    steps they are of all kinds, for as many of those whose steps overlap."""
    from paged_ops.generation import SamplingParams

    rng, shared = random.Random(seed), list(range(50))
    running: list[int] = []
    served = [how for how in CHOICES if not (loop._model.refuses_prompt_logprobs and "prompt_logprobs" in how)]
    overlapping = [how for how in served if not IN_TURN & how.keys()]
    for i in range(num_steps):
        choices = overlapping if i // PHASE % 2 else served
        if i % PHASE == 0:
            for request in running:
                loop.abort(request)
        while rng.random() < 0.4 or not loop.has_work:
            n = rng.choice([1, 2, 15, 16, 17, 100, 300, 600, 600])
            prompt = (shared if rng.random() < 0.3 else []) + [rng.randrange(V) for _ in range(rng.randint(1, n))]
            n, most, how = (
                rng.choice([1, 1, 1, 3]) if choices is served else 1,
                rng.choice([1, 10, 40, 80]),
                rng.choice(choices),
            )
            params = SamplingParams(max_new_tokens=most, stop_token_ids=(), n=n, **how)
            running.append(loop.submit(prompt[: loop.max_model_len - 80], params))
            if len(running) > 60:
                break
        if running and rng.random() < 0.05:
            loop.abort(running.pop(rng.randrange(len(running))))
        loop.step()
        running = running[-200:]


def compiled_by(name: str, num_steps: int, seed: int, left_out: str = "") -> dict[str, Any]:
    """What the loop of one model compiles, in warm_up and later. ``left_out``: a kind of batch that is not warmed up:
    "prompts", or "sizes" above a few tokens."""
    from paged_ops.graphs import DecodeGraphs
    from paged_ops.lowerings.gpu.attention import tuning

    trials, covering = DecodeGraphs._trials, tuning.covering_batches
    if left_out == "prompts":
        DecodeGraphs._trials = lambda graphs: [each for each in trials(graphs) if "prompt" not in str(each)]
    if left_out == "sizes":
        tuning.covering_batches = lambda T, S, **options: [each for each in covering(T, S, **options) if each[0] < 4]
    choose_by_kernels()
    loop, step = make_loop(name, overlap=True)
    KERNELS.compiled.clear()
    loop.warm_up()
    warm = list(KERNELS.compiled)
    step.sizes.clear()
    load(loop, num_steps, seed)
    stats = {each: value for each, value in vars(loop.stats).items() if isinstance(value, int)}
    return {"warm": warm, "later": KERNELS.compiled[len(warm) :], "sizes": len(step.sizes), "stats": stats}


if __name__ == "__main__":
    KERNELS = imitate()
    import transformers  # noqa: F401

    print_cases(sys.argv[2:], lambda name, left_out: compiled_by(name, int(sys.argv[1]), 0, left_out))
