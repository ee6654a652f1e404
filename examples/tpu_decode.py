"""The model of compile_decode.py on a TPU, or on XLA's CPU device: the same code, the same tokens as on the CPU.

    PJRT_DEVICE=CPU python examples/tpu_decode.py    # anywhere; on a TPU VM without the variable

prints, with random weights::

    device     XLA's CPU
    prompts    of 5, 23, 17, 1 tokens, together
    lazy       12 more tokens each, the same as on the CPU: True
    openxla    12 more tokens each, the same as on the CPU: True
    compiled   2 graphs, one for the prompts and one for all decode steps; caches written in place: 4 of 4

Import torch_xla before paged_ops, which then registers its mutating ops for XLA. Lengths are tensors of padded sizes,
so no step compiles again. Each layer's cache is one whole tensor, so XLA can write into its buffer.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from compile_decode import Config, Llama
from torch import Tensor

from paged_ops import AttentionMetadata, AttentionMetadataBuilder, Batch, KVCache
from paged_ops.layouts import min_tpu_block_size

PROMPT_TOKENS, SEQS, MAX_LEN = 64, 4, 128
# The TPU's kernel is compiled for heads of 128 only.
CONFIG = Config(layers=4, hidden=256, heads=8, kv_heads=2, head_size=128)


def on_device(metadata: AttentionMetadata, device: str) -> AttentionMetadata:
    """The tensors that a model reads, moved: the builder fills them on the host."""
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")
    return dataclasses.replace(metadata, **{name: getattr(metadata, name).to(device) for name in names})


@torch.inference_mode(False)  # torch_xla cannot make views of weights in inference mode
@torch.no_grad()
def generate(model: Callable[..., Tensor], prompts: list[list[int]], steps: int, device: str) -> list[list[int]]:
    """Greedy continuations of up to SEQS prompts: one step for all prompts, then one for each token."""
    block_size = max(16, min_tpu_block_size(MAX_LEN, SEQS))
    width = MAX_LEN // block_size
    kv_cache = KVCache(
        CONFIG.layers, SEQS * width, block_size, CONFIG.kv_heads, CONFIG.head_size, device=device, layout="INTERLEAVED"
    )
    if device != "cpu":
        torch_xla.sync()  # allocates the buffers: only these can be written in place
    builder = AttentionMetadataBuilder(block_size, SEQS, PROMPT_TOKENS, width, num_blocks=SEQS * width)
    tables = torch.arange(SEQS * width, dtype=torch.int32).view(SEQS, width).flip(0)[: len(prompts)]
    tokens, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for step in range(steps):
        new = [row[c:] for row, c in zip(tokens, cached, strict=True)]
        T = PROMPT_TOKENS if step == 0 else SEQS
        batch = Batch([len(row) for row in new], cached, tables)
        metadata = builder.build(0, batch, num_reqs=SEQS, num_tokens=T)
        ids = torch.zeros(T, dtype=torch.int64)
        ids[: metadata.num_actual_tokens] = torch.tensor([token for row in new for token in row])
        last_rows = (metadata.query_start_loc_cpu[1:] - 1).clamp(min=0).long()
        logits = model(ids.to(device), on_device(metadata, device), last_rows.to(device), kv_cache.layers)
        chosen = logits.argmax(-1)
        if device != "cpu":
            torch_xla.sync()  # lazy mode: this is where the step runs
        cached = [len(row) for row in tokens]
        for row, token in zip(tokens, chosen.tolist(), strict=False):
            row.append(token)
    return tokens


def main() -> None:
    torch.manual_seed(0)
    model = Llama(CONFIG).eval()
    prompts = [torch.randint(CONFIG.vocabulary, (n,)).tolist() for n in (5, 23, 17, 1)]
    expected = generate(model, prompts, 12, "cpu")
    print("device    ", "a TPU" if torch_xla.runtime.device_type() == "TPU" else "XLA's CPU")
    print("prompts   ", "of", ", ".join(str(len(prompt)) for prompt in prompts), "tokens, together")
    model = model.to("xla")
    torch_xla.sync()
    for name, step in (("lazy", model), ("openxla", torch.compile(model, backend="openxla", fullgraph=True))):
        metrics.clear_all()
        same = generate(step, prompts, 12, "xla") == expected
        print(f"{name:10} 12 more tokens each, the same as on the CPU: {same}")
    graphs = metrics.counter_value("DynamoExtractCompiledGraph")
    in_place = int(metrics.metric_data("InputOutputAliasCount")[2][-1][1])
    print(f"compiled   {graphs} graphs, one for the prompts and one for all decode steps;", end=" ")
    print(f"caches written in place: {in_place} of {CONFIG.layers}")


if __name__ == "__main__":
    main()
