"""A tiny transformer, once over the paged cache and once dense in float64, from the same weights.

Letters as in ``truth.py``, and V vocabulary, T tokens of a step, S sequences of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import paged_ops

from . import truth

POSITIONS = 512


class Toy:
    """Logits that depend on every earlier token through the cache alone.

    ``features`` are those of attention, of all layers or, in ``by_layer``, of each; ``pool_of_layer`` says in which
    pool of a cache of several each layer is.
    """

    def __init__(
        self,
        seed: int,
        *,
        layers: int = 2,
        V: int = 64,
        H: int = 4,
        K: int = 2,
        D: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        by_layer: Sequence[dict[str, Any]] | None = None,
        **features: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

        width = H * D
        self.exact = {
            "embed": weight(V, width, scale=1.0),
            "position": weight(POSITIONS, width, scale=0.5),
            "head": weight(width, V, scale=2.0 * width**-0.5),
        }
        for layer in range(layers):
            self.exact[f"qkv{layer}"] = weight(width, (H + 2 * K) * D, scale=1.5 * width**-0.5)
            self.exact[f"out{layer}"] = weight(width, width, scale=1.0 * width**-0.5)
        self.weights = {name: each.to(dtype=dtype, device=device) for name, each in self.exact.items()}
        self.layers, self.V, self.H, self.K, self.D, self.features = layers, V, H, K, D, features
        self.by_layer = [features] * layers if by_layer is None else list(by_layer)
        self.pool_of_layer: Sequence[int] | None = None
        self.dtype = dtype

    def in_float32(self) -> Toy:
        """The same weights, rounded as they are, and sums in float32."""
        copy = Toy.__new__(Toy)
        copy.__dict__.update(self.__dict__, dtype=torch.float32)
        copy.weights = {name: weight.float() for name, weight in self.weights.items()}
        return copy

    def __call__(self, input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Sequence[Tensor]) -> Tensor:
        """One ragged step: a ``ModelStep``."""
        w, (H, K, D) = self.weights, (self.H, self.K, self.D)
        hidden = w["embed"][input_ids] + w["position"][metadata.positions % POSITIONS]
        for layer, kv_cache in enumerate(kv_caches):
            fused = (hidden @ w[f"qkv{layer}"]).view(-1, H + 2 * K, D)
            query, key, value = fused.split([H, K, K], dim=1)
            own = metadata.pool(0 if self.pool_of_layer is None else self.pool_of_layer[layer])
            paged_ops.reshape_and_cache(key, value, kv_cache, own.slot_mapping)
            out = self._attend(query, kv_cache, metadata, own.block_tables, self.by_layer[layer])
            hidden = hidden + out.reshape(-1, H * D) @ w[f"out{layer}"]
        return hidden[last_rows] @ w["head"]

    def _attend(
        self, query: Tensor, kv_cache: Tensor, metadata: Any, tables: Tensor, features: dict[str, Any]
    ) -> Tensor:
        starts, scale, c = metadata.query_start_loc, self.D**-0.5, metadata.cascade
        if c is not None:
            prefix = (c.prefix_block_table, c.prefix_len)
            return paged_ops.cascade_attention(
                query, kv_cache, *prefix, c.suffix_block_tables, c.suffix_lens, starts, scale
            )
        return paged_ops.paged_attention(query, kv_cache, tables, metadata.seq_lens, starts, scale, **features)

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[n, V]`` of every position of one sequence, float64."""
        n, w, (H, K, D) = len(tokens), self.exact, (self.H, self.K, self.D)
        names = {"sliding_window": "window", "attention_chunk": "chunk", "soft_cap": "cap"}
        i = torch.arange(n)
        hidden = w["embed"][torch.tensor(list(tokens), dtype=torch.int64)] + w["position"][i % POSITIONS]
        lens = torch.full((1, n), n)
        for layer, features in enumerate(self.by_layer):
            f = truth.Features(D**-0.5, **{names[name]: value for name, value in features.items()})
            query, key, value = (hidden @ w[f"qkv{layer}"]).view(1, n, H + 2 * K, D).split([H, K, K], dim=2)
            out, _, _ = truth.attend(f, query, key, value, i[None], lens, torch.float64)
            hidden = hidden + out.reshape(n, H * D) @ w[f"out{layer}"]
        return hidden @ w["head"]
