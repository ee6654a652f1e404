"""Latent attention (MLA) of transformers' models: latents are cached, not the keys and values of all heads.

These models make of a token a latent vector and a rotated key, and have a method ``expand_kv`` that turns them into
keys and values of all heads, by the matrix of ``kv_b_proj``. While a model is wrapped, that method hands both on as
they are, and :func:`attend` takes the absorbed form (docs/latent.md). Everything else, such as the rotary embedding,
factors of the queries, and gates of the output, remains the model's own code::

    q'[h]  = [q_nope[h] U_k[h], q_rot[h]]
    out[h] = (softmax of scale q'[h] . [c, r]) c        by paged_attention
    y[h]   = out[h] U_v[h]^T

``U_k [H, Dn, R]`` and ``U_v [H, Dv, R]`` are views of the weight of ``kv_b_proj``, not copies.

A query and a key cost ``2 (2R + P)`` operations per head in this form, and ``2 (Dn + P + Dv)`` with the head's own key
and value: 2176 against 640 in DeepSeek-V3. The latter must be made once per token, by ``2 R (Dn + Dv)`` operations. So
in a step of many tokens these attend to each other by keys and values of all heads, and to the history absorbed;
both merge. :func:`expands` is the rule, which sees sizes alone, as nothing may wait for the device.

Letters: T tokens of the batch, H query heads, R latent size, P rotated size, Dn and Dv sizes of the heads' own keys
(without the rotated part) and values. Source: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged_ops.layouts import stored_as
from paged_ops.metadata import AttentionMetadata
from paged_ops.ops import latent_cache_write, merge_attention_states, paged_attention, paged_attention_with_lse
from paged_ops.parallel.tensor import is_sharded, local_of

MANY_TOKENS = 512  # of a step
OWN_BLOCK = 16  # tokens of a block of keys and values of all heads
_BY_POSITION = ("sliding_window", "attention_chunk", "bidirectional_ranges")  # not to be split into two attentions


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that attend by latents, in the form that is served."""
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)) and _is_served(module):
            yield module


def _is_served(module: Any) -> bool:
    """Whether the module's keys and values are the products of one matrix with the latent, and its rotated key."""
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
    """Whether the module hands on latents."""
    return vars(module).get("expand_kv") is as_they_are


@contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Keys and values of all heads for a while, as without wrapping."""
    modules = [module for module in model.modules() if is_latent(module)]
    for module in modules:
        del module.expand_kv
    try:
        yield
    finally:
        for module in modules:
            vars(module)["expand_kv"] = as_they_are


def expands(T: int, S: int) -> bool:
    """Whether a step of T tokens of S sequences makes keys and values of all heads for its own tokens.

    With n tokens of a sequence it saves ``n (2R - Dn - Dv)`` operations per token and head, and costs
    ``2 R (Dn + Dv)``, so it is worth it from n = 341 on in DeepSeek-V3. Which sequence has them is not known here; if
    none has, that costs as much as without latents. Compiled code stays absorbed, as both would have to be compiled:
    layers that are compiled one by one run such steps eagerly, a step that is compiled whole remains absorbed.
    """
    return not torch.compiler.is_compiling() and T >= max(MANY_TOKENS, 8 * S)


def expands_step(metadata: AttentionMetadata) -> bool:
    """As :func:`expands`."""
    return expands(len(metadata.slot_mapping), len(metadata.seq_lens))


def attend(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
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
        block_tables, seq_lens, query_start_loc, scale, features: of :func:`paged_ops.paged_attention`.
        writes: whether this layer's latents are its own.

    Returns:
        ``[1, T, H, Dv]``.
    """
    Dn, R = module.qk_nope_head_dim, latent.shape[-1]
    of_keys, of_values = _matrices(module)
    stored = stored_as(kv_cache)
    if writes:
        latent_cache_write(latent[0, 0], rotated[0, 0], kv_cache, slot_mapping, kv_cache_dtype=stored)
    heads = query[0].transpose(0, 1)
    absorbed = torch.cat(((query[0, :, :, :Dn] @ of_keys).transpose(0, 1), heads[:, :, Dn:]), -1)
    options: dict[str, Any] = {"value_head_size": R, "kv_cache_dtype": stored}

    def expand(out: Tensor) -> Tensor:
        return (out.transpose(0, 1) @ of_values.transpose(1, 2)).transpose(0, 1)

    splits = writes and not (features["sliding_window"] or features["attention_chunk"])
    splits = splits and features["bidirectional_ranges"] is None
    if not (splits and expands(len(heads), len(seq_lens))):
        options |= features
        out = paged_attention(absorbed, kv_cache, block_tables, seq_lens, query_start_loc, scale, **options)
        return expand(out)[None]
    features = {name: value for name, value in features.items() if name not in _BY_POSITION}
    own = _own_tokens(module, latent, rotated, heads, query_start_loc, scale, features)
    lens = seq_lens - query_start_loc.diff()
    options |= {"causal": False, "soft_cap": features["soft_cap"]}
    out, lse = paged_attention_with_lse(absorbed, kv_cache, block_tables, lens, query_start_loc, scale, **options)
    return merge_attention_states(*own, expand(out), lse)[0][None]


def _own_tokens(
    module: Any,
    latent: Tensor,
    rotated: Tensor,
    query: Tensor,
    query_start_loc: Tensor,
    scale: float,
    features: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention of the step's tokens to each other by keys and values of all heads, and its lse.

    The latents are laid in blocks first, each sequence from the beginning of a block on, so that the keys and values
    that are made of them are a paged cache.
    """
    S, T = len(query_start_loc) - 1, len(query)
    starts, lens = query_start_loc[:-1], query_start_loc.diff()
    blocks = (lens + (OWN_BLOCK - 1)) // OWN_BLOCK
    first = (blocks.cumsum(0) - blocks).int()
    count = (T + (OWN_BLOCK - 1) * S) // OWN_BLOCK  # at least as many as all sequences can need
    row = torch.arange(T, dtype=torch.int32, device=query.device)
    s = torch.searchsorted(query_start_loc[1:], row, right=True).clamp_(max=S - 1)
    # Tokens of no sequence, at the end of a padded batch, go to a block of their own.
    to = torch.where(row < query_start_loc[-1], (first * OWN_BLOCK - starts)[s] + row, count * OWN_BLOCK).long()
    rows = (count + 1) * OWN_BLOCK
    laid = [each.new_zeros(1, 1, rows, each.shape[-1]).index_copy_(2, to, each) for each in (latent, rotated)]
    states = type(module).expand_kv(module, *laid)
    key, value = (each[0].transpose(0, 1).unflatten(0, (-1, OWN_BLOCK)) for each in states)
    key = key.contiguous()  # heads that lie apart by the number of tokens would mean other kernels for each number
    columns = torch.arange(-(-T // OWN_BLOCK), dtype=torch.int32, device=query.device)
    tables = first[:, None] + columns
    return paged_attention_with_lse(query, key, tables, lens, query_start_loc, scale, value_cache=value, **features)


def _matrices(module: Any) -> tuple[Tensor, Tensor]:
    """``U_k [H, Dn, R]`` and ``U_v [H, Dv, R]`` of this rank's heads."""
    Dn, Dv = module.qk_nope_head_dim, module.v_head_dim
    weight = local_of(module.kv_b_proj.weight).unflatten(0, (-1, Dn + Dv))
    return weight[:, :Dn], weight[:, Dn:]
