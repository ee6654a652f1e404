"""A plain Llama-shaped model, sharded over ranks by torch.distributed.tensor.parallel, served by one loop on each rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

prints, with random weights::

    heads   4 of 8 query heads and 2 of 4 key/value heads on each of 2 ranks
    tokens  the same as on one rank: True

The model has no code for ranks: its projections return a rank's own heads, the cache is allocated for them, and the
last projection of each half of a layer ends with an all-reduce. One process per GPU, or on the CPU without GPUs.
"""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paged_ops import AttentionMetadata, KVCache, paged_attention, reshape_and_cache
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.parallel.tensor import local_of, process_group_of

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY, POSITIONS = 4, 256, 8, 4, 32, 512, 1000, 512
PLAN = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor, m: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, HEAD_SIZE))  # [T, this rank's heads, D]
            for part in (self.query, self.key, self.value)
        )
        reshape_and_cache(key, value, kv_cache, m.slot_mapping)
        rows = paged_attention(query, kv_cache, m.block_tables, m.seq_lens, m.query_start_loc, scale=HEAD_SIZE**-0.5)
        x = x + self.out(rows.flatten(1))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.logits = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        x = self.embedding(input_ids) + self.positions(metadata.positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, metadata, kv_cache)
        return self.logits(x[last_rows])


def generate(model: Model, device: torch.device) -> list[list[int]]:
    num_kv_heads = len(local_of(model.layers[0].key.weight)) // HEAD_SIZE
    kv_cache = KVCache(LAYERS, 64, 16, num_kv_heads, HEAD_SIZE, dtype=torch.float32, device=device)
    prompts = [[1, 2, 3], list(range(40)), [7] * 20]
    with GenerationLoop(model, kv_cache, max_model_len=POSITIONS, group=process_group_of(model)) as loop:
        return loop.generate(prompts, SamplingParams(max_new_tokens=24))


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("run it by torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # where NCCL communicates
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)
    model = Model().to(device).eval()
    expected = generate(model, device)  # on each rank alone
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
    tokens = generate(model, device)
    if dist.get_rank() == 0:
        heads, kv_heads = (
            len(local_of(each.weight)) // HEAD_SIZE for each in (model.layers[0].query, model.layers[0].key)
        )
        of_all = f"{heads} of {HEADS} query heads and {kv_heads} of {KV_HEADS} key/value heads"
        print(f"heads   {of_all} on each of {mesh.size()} ranks")
        print(f"tokens  the same as on one rank: {tokens == expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
