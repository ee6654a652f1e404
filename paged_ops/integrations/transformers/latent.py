"""Latent attention (MLA) of transformers' models: latents are cached, not the keys and values of all heads.

These models compute a latent vector and a rotated key per token. Their method ``expand_kv`` turns both into keys and
values of all heads, with the weight of ``kv_b_proj``. While a model is wrapped, that method returns both unchanged, and
:func:`attend` uses the absorbed form (docs/latent.md). Everything else, such as the rotary embedding, scaling of the
queries, and gating of the output, remains the model's own code::

    q'[h]  = [q_nope[h] U_k[h], q_rot[h]]
    out[h] = (softmax of scale q'[h] . [c, r]) c        by paged_attention
    y[h]   = out[h] U_v[h]^T

``U_k [H, Dn, R]`` and ``U_v [H, Dv, R]`` are views of the weight of ``kv_b_proj``, not copies.

Sequences with many new tokens are expanded to keys and values of all heads (:mod:`paged_ops.integrations.expanded`).

Letters: T tokens of the batch, H query heads, R latent size, P rotated size, Dn and Dv sizes of the heads' own keys
(without the rotated part) and values. Source: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paged_ops.integrations import expanded
from paged_ops.integrations.expanded import FEWEST_TOKENS, Batch, Run, Sizes, expands
from paged_ops.layouts import stored_as
from paged_ops.metadata import AttentionMetadata, PoolMetadata
from paged_ops.ops import latent_cache_write, paged_attention
from paged_ops.parallel.tensor import is_sharded, local_of

_BY_POSITION = (
    "sliding_window",
    "attention_chunk",
    "bidirectional_ranges",
)  # these cannot be split into two attention calls


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with latent attention in the supported form."""
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)) and _is_served(module):
            yield module


def _is_served(module: Any) -> bool:
    """Whether the module's keys and values are one linear layer of the latent, plus its rotated key."""
    linear = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, name, 0) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")]
    if type(linear) is not nn.Linear or linear.bias is not None or not all(sizes):
        return False
    R, Dn, Dv = sizes
    rows, columns = local_of(linear.weight).shape
    whole = "forward" not in vars(linear) or is_sharded(linear)
    return whole and columns == R and rows % (Dn + Dv) == 0


def as_they_are(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``: ``[1, 1, T, R]`` and ``[1, 1, T, P]``, not expanded."""
    return latent, rotated


def is_latent(module: nn.Module) -> bool:
    """Whether the module passes latents to attention."""
    return vars(module).get("expand_kv") is as_they_are


def sizes_of(module: Any) -> Sizes:
    Dn, Dv = module.qk_nope_head_dim, module.v_head_dim
    rows, R = local_of(module.kv_b_proj.weight).shape
    return Sizes(rows // (Dn + Dv), R, Dn, Dv)


def runs_of(metadata: AttentionMetadata, module: Any, block_size: int) -> list[Run]:
    """The runs of a step: which sequences are expanded, and in which windows."""
    T, S = len(metadata.slot_mapping), len(metadata.seq_lens)
    expanding = _expanding(metadata, module)
    if not expanding:
        return [Run(0, S, (0, T), ())]
    starts, lens = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu.tolist()
    return expanded.runs_of(expanding, starts, lens, sizes_of(module).H, block_size)


def _expanding(metadata: AttentionMetadata, module: Any) -> list[int]:
    """The sequences to expand. Compiled or captured code stays absorbed, because it must serve all lengths; layers that
    are compiled one by one run other steps eagerly."""
    if torch.compiler.is_compiling() or metadata.max_query_len < FEWEST_TOKENS or _is_captured(metadata.slot_mapping):
        return []
    sizes, starts = sizes_of(module), metadata.query_start_loc_cpu.tolist()
    lengths = enumerate(zip(starts[:-1], starts[1:], metadata.seq_lens_cpu.tolist(), strict=True))
    # Each layer asks: hundreds of decodes next to a prompt should not cost a function call each.
    return [s for s, (at, to, n) in lengths if to - at >= FEWEST_TOKENS and expands(to - at, n, sizes)]


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def expands_step(metadata: AttentionMetadata, module: Any) -> bool:
    """Whether any sequence of the step is expanded."""
    return bool(_expanding(metadata, module))


def attend(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    pool: PoolMetadata,
    metadata: AttentionMetadata,
    scale: float,
    *,
    writes: bool,
    **features: Any,
) -> Tensor:
    """Write the step's latents, and attend to the cache.

    Args:
        module: the layer.
        query: ``[1, H, T, Dn + P]``, the rotated part last.
        latent: ``[1, 1, T, R]``.
        rotated: ``[1, 1, T, P]``.
        kv_cache: ``[N, B, R + P]``, or uint8 ``[N, B, 656]`` of rows with scales.
        pool: the block tables and slots of the layer's cache.
        metadata: the metadata of the step.
        scale, features: as in :func:`paged_ops.paged_attention`.
        writes: whether this layer writes its own latents.

    Returns:
        ``[1, T, H, Dv]``.
    """
    if writes:
        stored = stored_as(kv_cache)
        latent_cache_write(latent[0, 0], rotated[0, 0], kv_cache, pool.slot_mapping, kv_cache_dtype=stored)
    rows = query[0].transpose(0, 1)
    batch = Batch(pool.block_tables, metadata.seq_lens, metadata.query_start_loc)
    by_position = any(features[name] for name in ("sliding_window", "attention_chunk"))
    if by_position or any(features.get(name) is not None for name in ("bidirectional_ranges", "selected_keys")):
        return _absorbed(module, rows, kv_cache, batch, scale, features)[None]
    runs = runs_of(metadata, module, kv_cache.shape[1])
    if len(runs) == 1 and not runs[0].windows:
        return _absorbed(module, rows, kv_cache, batch, scale, features)[None]
    outs = []
    for run in runs:
        of_run = rows[run.rows[0] : run.rows[1]], kv_cache, expanded.batch_of(run, *batch)
        if run.windows:
            outs.append(_expanded(module, *of_run, run.windows, scale, features))
        elif len(of_run[0]):
            outs.append(_absorbed(module, *of_run, scale, features))
    padding = len(rows) - runs[-1].rows[1]
    if padding:
        outs.append(rows.new_zeros(padding, *outs[0].shape[1:]))
    return torch.cat(outs)[None]


def _absorbed(
    module: Any, rows: Tensor, kv_cache: Tensor, batch: Batch, scale: float, features: dict[str, Any]
) -> Tensor:
    """``[T, H, Dv]`` of query rows ``[T, H, Dn + P]``, in the absorbed form."""
    Dn, of_keys, of_values = module.qk_nope_head_dim, *_matrices(module)
    absorbed = torch.cat(((rows[:, :, :Dn].transpose(0, 1) @ of_keys).transpose(0, 1), rows[:, :, Dn:]), -1)
    options = {**features, "value_head_size": module.kv_lora_rank, "kv_cache_dtype": stored_as(kv_cache)}
    out = paged_attention(absorbed, kv_cache, *batch, scale, **options)
    return (out.transpose(0, 1) @ of_values.transpose(1, 2)).transpose(0, 1)


def _expanded(
    module: Any,
    rows: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    windows: tuple[tuple[int, int], ...],
    scale: float,
    features: dict[str, Any],
) -> Tensor:
    """The same with keys and values of all heads."""
    expand, storage = functools.partial(_expand, module), {"kv_cache_dtype": stored_as(kv_cache)}
    features = {name: value for name, value in features.items() if name not in _BY_POSITION}
    of_run = rows, kv_cache, batch, windows, scale
    return expanded.attend(*of_run, module.v_head_dim, expand, storage, features)


def _expand(module: Any, latents: Tensor, key: Tensor, value: Tensor) -> None:
    """Keys ``[n, H, Dn + P]`` and values ``[n, H, Dv]`` of all heads from latents ``[n, R + P]``."""
    Dn, R, (of_keys, of_values) = module.qk_nope_head_dim, module.kv_lora_rank, _matrices(module)
    of_all = latents[:, :R].expand(key.shape[1], -1, -1)
    torch.bmm(of_all, of_keys.transpose(1, 2), out=key[:, :, :Dn].transpose(0, 1))
    torch.bmm(of_all, of_values.transpose(1, 2), out=value.transpose(0, 1))
    key[:, :, Dn:] = latents[:, None, R:]


def _matrices(module: Any) -> tuple[Tensor, Tensor]:
    """``U_k [H, Dn, R]`` and ``U_v [H, Dv, R]`` of this rank's heads."""
    Dn, Dv = module.qk_nope_head_dim, module.v_head_dim
    weight = local_of(module.kv_b_proj.weight).unflatten(0, (-1, Dn + Dv))
    return weight[:, :Dn], weight[:, Dn:]
