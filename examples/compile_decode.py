"""A Llama-shaped model in plain PyTorch over a paged cache, compiled layer by layer.

    python examples/compile_decode.py

prints, with random weights::

    prompt  [1, 2, 3, 4, 5, 6, 7]
    paged   9 more tokens, the same as without a cache: True
    graphs  6 compiled, 3 recompiled, for 4 layers and 9 steps

Three parts are compiled, whatever the number of layers, each of them twice: a step of one token has its own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops import AttentionMetadata, AttentionMetadataBuilder, Batch, KVCache, paged_attention, reshape_and_cache
from paged_ops.inspection import CompileReport


@dataclass(frozen=True)
class Config:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    intermediate: int = 512
    vocabulary: int = 1000
    max_positions: int = 4096
    rope_theta: float = 500000.0


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x [T, heads, D]`` by ``cos`` and ``sin [T, D]``; the first half of ``sin`` is negated."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = c.heads, c.kv_heads, c.head_size
        self.norm1, self.norm2 = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_size, bias=False)
        self.out = nn.Linear(c.heads * c.head_size, c.hidden, bias=False)
        self.gate_up = nn.Linear(c.hidden, 2 * c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(
        self, x: Tensor, delta: Tensor, angles: tuple[Tensor, Tensor], kv_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """``x + delta`` is the residual stream: the addition is fused with the norm that follows."""
        x = x + delta
        qkv = self.qkv(rms_norm(x, self.norm1)).unflatten(-1, (-1, self.head_size))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        qk = rotate(qk, *angles)
        rows = self.attend(qk[:, : self.heads], qk[:, self.heads :], value, kv_cache, metadata)
        # In float32: inductor would otherwise fuse the addition into the matmul (addmm), which copies x.
        x = (x.float() + self.out(rows.flatten(1)).float()).to(x.dtype)
        gate, up = self.gate_up(rms_norm(x, self.norm2)).chunk(2, -1)
        return x, self.down(F.silu(gate) * up)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, m: AttentionMetadata) -> Tensor:
        reshape_and_cache(key, value, kv_cache, m.slot_mapping)
        batch = m.block_tables, m.seq_lens, m.query_start_loc
        return paged_attention(query, kv_cache, *batch, scale=self.head_size**-0.5)


class Llama(nn.Module):
    layer_type = Layer
    cos_sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.hidden)
        self.layers = nn.ModuleList(self.layer_type(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))
        self.head = nn.Linear(c.hidden, c.vocabulary, bias=False)
        frequencies = c.rope_theta ** -(torch.arange(0, c.head_size, 2) / c.head_size)
        angles = torch.arange(c.max_positions)[:, None] * frequencies
        cos_sin = torch.stack([torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)])
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.begin, self.run_layer, self.end = self._begin, self.layer_type.forward, self._end

    def compile_parts(self, dynamic: bool | None = None, **options: object) -> "Llama":
        """Compile three parts: before the layers, one layer for all of them, after the layers."""
        # Rotated queries and keys become one tensor, made by one kernel.
        options = {"realize_reads_threshold": 3, **options}
        for name in ("begin", "run_layer", "end"):
            compiled = torch.compile(getattr(self, name), fullgraph=True, dynamic=dynamic, options=options)
            setattr(self, name, compiled)
        return self

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, last_rows: Tensor, kv_caches: Sequence[Tensor]
    ) -> Tensor:
        """Logits ``[S, V]`` of the rows ``last_rows`` of ``input_ids [T]``."""
        x, delta, angles = self.begin(input_ids, metadata.positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, delta = self.run_layer(layer, x, delta, angles, kv_cache, metadata)
        return self.end(x, delta, last_rows)

    def _begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        x = self.embed(input_ids)
        cos, sin = self.cos_sin[:, positions].unbind(0)
        return x, torch.zeros_like(x), (cos, sin)

    def _end(self, x: Tensor, delta: Tensor, last_rows: Tensor) -> Tensor:
        return self.head(rms_norm(x[last_rows] + delta[last_rows], self.norm))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    c = Config()
    model = Llama(c).eval()
    kv_cache = KVCache(c.layers, 64, 16, c.kv_heads, c.head_size)
    builder = AttentionMetadataBuilder(16, 8, 64, 16, num_blocks=64)

    def step(tokens: list[int], cached: int) -> int:
        new = torch.tensor(tokens[cached:])
        metadata = builder.build(0, Batch([len(new)], [cached], [[5, 9, 2]]))
        return int(model(new, metadata, torch.tensor([len(new) - 1]), kv_cache.layers).argmax())

    prompt = list(range(1, 8))
    expected = list(prompt)
    for _ in range(9):  # every step computes all tokens again
        expected.append(step(expected, 0))
    model.compile_parts(dynamic=True)
    tokens = list(prompt)
    with CompileReport(kv_cache.layers) as report:
        for _ in range(9):
            tokens.append(step(tokens, 0 if tokens == prompt else len(tokens) - 1))
    print("prompt ", prompt)
    print("paged   9 more tokens, the same as without a cache:", tokens == expected)
    print(f"graphs  {report.graphs} compiled, {report.recompiles} recompiled, for {c.layers} layers and 9 steps")


if __name__ == "__main__":
    main()
