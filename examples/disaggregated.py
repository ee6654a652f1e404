"""One process computes prompts, another decodes: the cache blocks are sent from the first to the second.

    torchrun --nproc-per-node 2 examples/disaggregated.py

prints::

    blocks received: 11, prompt tokens computed again: 4 of 72
    the same tokens as in one process: True

With two GPUs each process has one, and NCCL sends the blocks; otherwise both run on the CPU, with gloo. An engine would
send a request along with its blocks; here both processes know the prompts.

The model's weights are bfloat16, but it runs in float32. A prompt computed at once and one computed partly from cached
blocks differ by rounding, and in bfloat16 two tokens often have the same logit: then rounding chooses.
"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_ops import KVCache, demo_model
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.parallel.transfer import recv_blocks, send_blocks

MODEL = demo_model.path()
BEGINNING = "Once upon a time there was a little girl named Lily who lived in a small house near the forest. "
PROMPTS = [BEGINNING + "One day she", BEGINNING + "Her dog", "The old man opened the door of the barn, looked at the"]
PREFILL, DECODE = 0, 1


def make_loop(model: PagedCausalLM) -> GenerationLoop:
    return GenerationLoop(model, model.allocate_kv_cache(num_blocks=64, block_size=4))


def send_prompt(kv_cache: KVCache, prompt: list[int]) -> None:
    """Sends the full blocks of a computed prompt that the other process does not have yet."""
    num_tokens = kv_cache.admit("sent", prompt)
    had = torch.empty(1, dtype=torch.int64, device=kv_cache.device)
    dist.recv(had, DECODE)
    full_blocks = kv_cache.block_ids("sent")[: num_tokens // kv_cache.block_size]
    send_blocks(kv_cache, full_blocks[int(had) :], DECODE)
    kv_cache.free("sent")


def receive_prompt(kv_cache: KVCache, prompt: list[int]) -> int:
    """Receives these blocks into the prefix cache, where the request will find them."""
    block_size = kv_cache.block_size
    num_tokens = (len(prompt) - 1) // block_size * block_size  # at least one token is left to compute
    cached = kv_cache.admit("received", prompt[: num_tokens + 1])  # all but the last token may be cached already
    dist.send(torch.tensor([cached // block_size], dtype=torch.int64, device=kv_cache.device), PREFILL)
    blocks = kv_cache.block_ids("received")[cached // block_size : num_tokens // block_size]
    recv_blocks(kv_cache, blocks, PREFILL)
    kv_cache.commit("received", num_tokens - cached)
    kv_cache.free("received")
    return len(blocks)


def run(rank: int, device: torch.device) -> bool | None:
    model = PagedCausalLM(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).eval())
    prompts = AutoTokenizer.from_pretrained(MODEL)(PROMPTS)["input_ids"]
    loop = make_loop(model)
    if rank == PREFILL:
        loop.generate(prompts, SamplingParams(max_new_tokens=1))
        for prompt in prompts:
            send_prompt(loop.kv_cache, prompt)
        return None
    received = sum(receive_prompt(loop.kv_cache, prompt) for prompt in prompts)
    outputs = loop.generate(prompts, SamplingParams(max_new_tokens=24))
    total = sum(map(len, prompts))
    print(f"blocks received: {received}, prompt tokens computed again: {total - loop.stats.cached_tokens} of {total}")
    equal = outputs == make_loop(model).generate(prompts, SamplingParams(max_new_tokens=24))
    print("the same tokens as in one process:", equal)
    return equal


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "2":
        raise SystemExit("run it as two processes: torchrun --nproc-per-node 2 examples/disaggregated.py")
    rank = int(os.environ["RANK"])
    on_gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    run(rank, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
