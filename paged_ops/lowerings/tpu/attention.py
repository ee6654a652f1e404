"""Attention through XLA: on a TPU, or on XLA's CPU device. Letters as in :mod:`paged_ops.ops`; also G = H/K, the query
heads of a key/value head, n = M*B, the keys that a row of block tables can address, and R rows of a tile.

On a TPU this is torch_xla's ragged paged attention kernel; an unsupported feature raises ValueError with the reason. On
XLA's CPU device, plain torch serves every feature, with shapes that do not depend on values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake
from paged_ops.features import Features, kept_keys, refuse_others, with_value_scale
from paged_ops.fp8 import dequantise, quantise
from paged_ops.layouts import element_dtype, paged_kv
from paged_ops.lowerings.cascade import cascade_attention as _cascade
from paged_ops.lowerings.tpu import ragged, runtime
from paged_ops.lowerings.tpu.cache import reinterpreted
from paged_ops.lowerings.tpu.functional import functionalized
from paged_ops.lowerings.tpu.ragged import FORMATS, refuse, refuse_row_scales, rows_of
from paged_ops.support import Explanation

# The supported arguments of attention, by name, and the supported formats of the cache.
APPLIES = FORMATS | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale"),
    *("causal", "sliding_window", "num_first_tokens", "attention_chunk", "block_sparse", "bidirectional_ranges"),
    "ranges_in_window",
    *("soft_cap", "alibi_slopes", "sinks"),
}
# Bytes of float32 keys and values that one tile of rows gathers on XLA's CPU device.
TILE_BYTES = 1 << 26


@functionalized
def paged_attention(query: Tensor, *args: Any, **features: Any) -> Tensor:
    f = Features(**features)
    refuse(f)
    out = fake.paged_attention(query, *args, **features)
    refuse_others(f, args[0], APPLIES, "attention through XLA")
    if runtime.on_tpu():
        return _as_output(ragged.attend(f, query, *args), out, f)
    real, _ = _attend(f, query, *args)
    return _as_output(real, out, f)


@functionalized
def paged_attention_with_lse(query: Tensor, *args: Any, **features: Any) -> tuple[Tensor, Tensor]:
    f = Features(**features)
    refuse(f)
    out, _ = fake.paged_attention_with_lse(query, *args, **features)
    refuse_others(f, args[0], APPLIES, "attention through XLA")
    if runtime.on_tpu():
        raise ValueError(f"paged_ops.paged_attention_with_lse on a TPU: {ragged.NO_LSE}")
    real, lse = _attend(f, query, *args)
    return _as_output(real, out, f), lse


def explain(op: str, query: Tensor, kv_cache: Tensor, *batch: Any, **features: Any) -> Explanation:
    """As :func:`paged_ops.explain`."""
    f = Features(**features)
    refuse(f)
    refuse_others(f, kv_cache, APPLIES, "attention through XLA")
    if not runtime.on_tpu():
        others = (("torch_xla's ragged kernel", ("the device is not a TPU",)),)
        return Explanation(op, "xla", "torch ops, compiled by XLA", (), others)
    reasons = (
        [ragged.NO_LSE] if op == "paged_attention_with_lse" else ragged.reasons_against(f, query, kv_cache, batch[0])
    )
    if reasons:
        raise ValueError(f"paged_ops.{op} on a TPU: {'; '.join(reasons)}")
    return Explanation(op, "xla", "torch_xla's ragged kernel", (), (("torch ops", ("the device is a TPU",)),))


@functionalized
def cascade_attention(*args: Any, **features: Any) -> Tensor:
    refuse_row_scales(features.get("kv_cache_dtype", "auto"))
    if runtime.on_tpu():
        raise ValueError(f"paged_ops.cascade_attention on a TPU: {ragged.NO_LSE}")
    return _cascade(*args, **features)


@functionalized
def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    fake.merge_attention_states(out_a, lse_a, out_b, lse_b)
    lse_a, lse_b = (torch.where(side == torch.inf, -torch.inf, side) for side in (lse_a, lse_b))
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    merged = torch.log(torch.exp(lse_a - largest) + torch.exp(lse_b - largest)) + largest

    def weighted(out: Tensor, lse: Tensor) -> Tensor:
        empty = (lse == -torch.inf)[:, :, None]
        return torch.where(empty, 0.0, torch.exp(lse - merged)[:, :, None] * out.float())

    return (weighted(out_a, lse_a) + weighted(out_b, lse_b)).to(out_a.dtype), merged


def _attend(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with all features and static shapes: out ``[T, H, Dv]`` and lse ``[T, H]``, both float32.

    Each row gathers the keys of its sequence. Tiles of rows bound the memory.
    """
    T, H, _ = query.shape
    paged = paged_kv(kv_cache, f.value_cache, f.value_head_size)
    out = query.new_zeros(T, H, paged.value_head_size, dtype=torch.float32)
    lse = query.new_full((T, H), -torch.inf, dtype=torch.float32)
    if not (query.numel() and kv_cache.numel() and paged.value.numel() and block_tables.numel()):
        if f.sinks is not None and T and H and len(seq_lens):
            live = torch.arange(T, device=query.device) < query_start_loc[-1]
            lse = torch.where(live[:, None], f.sinks, lse)
        return out, lse
    if checks.debug_checks():
        batch = (block_tables.cpu(), seq_lens.cpu(), query_start_loc.cpu())
        checks.batch(*batch, T, paged.num_blocks, paged.block_size)
    s, i, live = rows_of(T, seq_lens, query_start_loc)
    n = block_tables.shape[1] * paged.block_size
    token_bytes = 4 * paged.num_kv_heads * (paged.head_size + paged.value_head_size)
    step = max(1, TILE_BYTES // (n * token_bytes))
    tiles = [
        _attend_tile(f, query[r : r + step], kv_cache, block_tables, seq_lens, s[r : r + step], i[r : r + step], scale)
        for r in range(0, T, step)
    ]
    out, lse = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return torch.where(live[:, None, None], out, 0.0), torch.where(live[:, None], lse, -torch.inf)


def _attend_tile(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    s: Tensor,
    i: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Rows ``query [R, H, D]`` of sequences ``s [R]`` at positions ``i [R]``: out ``[R, H, Dv]``, lse ``[R, H]``."""
    (R, H, _), M = query.shape, block_tables.shape[1]
    lens = seq_lens[s]
    f = with_value_scale(f, kv_cache)
    whole = paged_kv(kv_cache, f.value_cache, f.value_head_size)
    N, B, K = whole.num_blocks, whole.block_size, whole.num_kv_heads
    j = torch.arange(M * B, device=query.device, dtype=torch.int32)
    needed = j[::B] < lens[:, None]  # [R, M]; other entries may have any value
    blocks = torch.where(needed, block_tables[s], 0).clamp(0, N - 1).flatten()
    value_cache = None if f.value_cache is None else f.value_cache.index_select(0, blocks)
    paged = paged_kv(kv_cache.index_select(0, blocks), value_cache, f.value_head_size)
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    key = dequantise(
        reinterpreted(paged.key.reshape(R, M * B, K, -1), stored), f.k_scale, torch.float32
    )  # [R, n, K, D]
    value = dequantise(
        reinterpreted(paged.value.reshape(R, M * B, K, -1), stored), f.v_scale, torch.float32
    )  # [R, n, K, Dv]
    owned = j < lens[:, None]  # [R, n]; slots past the end of a sequence may hold NaN
    value = torch.where(owned[:, :, None, None], value, 0.0)

    q = query.float().unflatten(1, (K, H // K))
    logits = (torch.einsum("rkgd,rnkd->rkgn", q, key) * scale).flatten(1, 2)  # [R, H, n]
    if f.soft_cap:
        logits = f.soft_cap * torch.tanh(logits / f.soft_cap)
    if f.alibi_slopes is not None:
        logits = logits + f.alibi_slopes[:, None] * (j - i[:, None])[:, None].float()
    kept = kept_keys(f, s, i, j, H, K, B).transpose(0, 1) & owned[:, None]  # [R, H or 1, n]
    logits = torch.where(kept, logits, -torch.inf)

    largest = logits.amax(2)  # [R, H]
    if f.sinks is not None:
        largest = largest.maximum(f.sinks)
    largest = torch.where(largest == -torch.inf, 0.0, largest)  # a row that sees nothing
    weights = torch.exp(logits - largest[:, :, None])
    total = weights.sum(2)
    if f.sinks is not None:
        total = total + torch.exp(f.sinks - largest)
    out = torch.einsum("rkgn,rnkd->rkgd", weights.unflatten(1, (K, H // K)), value).flatten(1, 2)
    out = out / torch.where(total == 0, 1.0, total)[:, :, None]
    return out, torch.log(total) + largest


def _as_output(real: Tensor, out: Tensor, f: Features) -> Tensor:
    return quantise(real, f.output_scale, out.dtype)
