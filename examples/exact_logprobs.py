"""Log-probabilities of a rollout, and the same ones recomputed by a trainer: no difference, bit for bit.

Run as ``python examples/exact_logprobs.py`` (``--model`` takes a folder or an id of Llama, Mistral, Qwen, Gemma or
gpt-oss; ``--device cuda``). The loop serves prompts of mixed lengths in a cache that is too small, so requests are
preempted and computed again, prompts are computed in chunks, and common prefixes are found in the cache. Then each
whole sequence is one forward pass without gradients. It prints::

    requests 16, preempted P times, C cached tokens
    batch_invariant=True: N of N log-probabilities are equal, largest difference 0
    batch_invariant=False: E of N log-probabilities are equal, largest difference D
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from paged_ops import demo_model
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=str(demo_model.path()))
parser.add_argument("--device", default="cpu")
parser.add_argument("--dtype", default="float32")
arguments = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
model = model.to(arguments.device).eval()
generator = torch.Generator().manual_seed(0)
common, *own = (torch.randint(2, 100, (n,), generator=generator).tolist() for n in (20, 3, 70, 18, 41, 9, 55, 33, 26))
prompts = [*own, *(common + ids for ids in own)]
params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=1, stop_token_ids=(), logprobs=0)

for batch_invariant in (True, False):
    paged = PagedCausalLM(model, batch_invariant=batch_invariant)
    kv_cache = paged.allocate_kv_cache(num_blocks=128, block_size=4)
    with GenerationLoop(paged, kv_cache, max_num_seqs=12, max_num_tokens=48) as loop:
        loop.warm_up()  # compiles the kernels of a GPU in parallel, before the first request
        rollout = list(zip(prompts, loop.generate(prompts, params), strict=True))
        stats = loop.stats
    if batch_invariant:
        print(f"requests {len(rollout)}, preempted {stats.preemptions} times, {stats.cached_tokens} cached tokens")
    sampled = torch.tensor([each.logprob for _, output in rollout for each in output.logprobs])
    trained = [paged.token_logprobs([*prompt, *output])[len(prompt) - 1 :] for prompt, output in rollout]
    difference = (torch.cat(trained).cpu() - sampled).abs()
    equal, largest = int((difference == 0).sum()), difference.max().item()
    print(
        f"batch_invariant={batch_invariant}: {equal} of {len(difference)} log-probabilities are equal,"
        f" largest difference {largest:g}"
    )
    paged.unwrap()
