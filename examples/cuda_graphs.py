"""Decode from captured CUDA graphs: the model of ``compile_decode.py``, replayed with one launch per step.

    python examples/cuda_graphs.py

prints on a GPU (times vary)::

    captured    5 graphs for 4 sizes (1, 2, 4, 8) ...
    replayed    48 steps, 0 plain, 25 % padding
    the same tokens as without graphs: True

and the same without captures and replays on a CPU.
"""

import torch
from compile_decode import Config, Llama

from paged_ops import Batch, KVCache
from paged_ops.graphs import DecodeGraphs

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [4, 4, 4, 4, 4, 4, 4, 4, 9]]
STEPS = 48


def generate(run: DecodeGraphs, kv_cache: KVCache) -> list[list[int]]:
    """Greedy continuations: one step for the prompts, then only replays."""
    for seq, prompt in enumerate(PROMPTS):
        kv_cache.admit(seq, prompt)
        kv_cache.append(seq, [0] * STEPS)  # room for the new tokens
    blocks = [kv_cache.block_ids(seq) for seq in range(len(PROMPTS))]
    lengths = [len(prompt) for prompt in PROMPTS]
    run.replay(Batch(lengths, [0] * len(PROMPTS), blocks), [token for prompt in PROMPTS for token in prompt])
    newest = run.tokens[: len(PROMPTS)].clone()
    steps = [newest]
    run.replay(Batch([1] * len(PROMPTS), lengths, blocks), newest, lookahead=STEPS - 2)
    steps.append(run.tokens[: len(PROMPTS)].clone())
    for _ in range(STEPS - 2):
        run.replay_next()
        steps.append(run.tokens[: len(PROMPTS)].clone())
    for seq in range(len(PROMPTS)):
        kv_cache.free(seq)
    return torch.stack(steps, 1).tolist()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    c = Config()
    model = Llama(c).to(device).eval().requires_grad_(False)
    kv_cache = KVCache(c.layers, 64, 16, c.kv_heads, c.head_size, device=device)

    def runner(**options: object) -> DecodeGraphs:
        return DecodeGraphs(
            model, kv_cache, max_num_seqs=8, max_num_tokens=64, sample=lambda x: x.argmax(-1), **options
        )

    plain = generate(runner(mode="NONE"), kv_cache)
    model.compile_parts()
    graphs = runner(token_sizes=[16])
    print("captured   ", graphs.capture())
    tokens = generate(graphs, kv_cache)
    stats = graphs.stats
    print(f"replayed    {stats.replayed} steps, {stats.plain} plain, {stats.padding:.0%} padding")
    print("the same tokens as without graphs:", tokens == plain)


if __name__ == "__main__":
    main()
