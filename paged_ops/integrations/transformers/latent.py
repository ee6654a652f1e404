"""Latent attention (MLA) of transformers' models: latents are cached, not the keys and values of all heads.

These models compute a latent vector and a rotated key per token. Their method ``expand_kv`` turns both into keys and
values of all heads, with the weight of ``kv_b_proj``. While a model is wrapped, that method returns both unchanged, and
:func:`attend` uses the absorbed form (docs/latent.md). Everything else, such as the rotary embedding, scaling of the
queries, and gating of the output, remains the model's own code::

    q'[h]  = [q_nope[h] U_k[h], q_rot[h]]
    out[h] = (softmax of scale q'[h] . [c, r]) c        by paged_attention
    y[h]   = out[h] U_v[h]^T

``U_k [H, Dn, R]`` and ``U_v [H, Dv, R]`` are views of the weight of ``kv_b_proj``, not copies.

A query and a key cost ``2 (2R + P)`` operations per head in this form, and ``2 (Dn + P + Dv)`` with the head's own key
and value: 2176 and 640 in DeepSeek-V3. Expanding a token's own key and value costs ``2 R (Dn + Dv)`` operations once.
So for sequences with many new tokens the cached latents, history included, are expanded to keys and values of all
heads; for long ones in windows of bounded size, merged by their lse. :func:`expands` decides from lengths on the host,
so nothing waits for the device.

Letters: T tokens of the batch, H query heads, R latent size, P rotated size, Dn and Dv sizes of the heads' own keys
(without the rotated part) and values. Source: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_ops.layouts import stored_as
from paged_ops.metadata import AttentionMetadata, PoolMetadata
from paged_ops.ops import (
    gather_kv,
    latent_cache_write,
    merge_attention_states,
    paged_attention,
    paged_attention_with_lse,
)
from paged_ops.parallel.tensor import is_sharded, local_of

FEWEST_TOKENS = 128  # fewest new tokens of a sequence that is expanded
OVERHEAD = 5e10  # the host time of the additional calls, in multiplications
WINDOW = 1 << 19  # heads times tokens expanded at a time
OWN_BLOCK = 16  # tokens per block of expanded keys and values
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


class Sizes(NamedTuple):
    """The sizes of a layer on this rank."""

    H: int
    R: int
    Dn: int
    Dv: int


def sizes_of(module: Any) -> Sizes:
    Dn, Dv = module.qk_nope_head_dim, module.v_head_dim
    rows, R = local_of(module.kv_b_proj.weight).shape
    return Sizes(rows // (Dn + Dv), R, Dn, Dv)


def expands(new: int, tokens: int, sizes: Sizes) -> bool:
    """Whether expanding keys and values to all heads pays for a sequence with ``new`` new tokens of ``tokens`` in all.

    It saves ``2R - Dn - Dv`` multiplications per pair of query and key, and costs ``R (Dn + Dv)`` per token plus
    :data:`OVERHEAD`. In DeepSeek-V3 it pays from 1194 tokens on without history, and from 187 after 32768 tokens.
    """
    H, R, Dn, Dv = sizes
    pairs = new * tokens - new * (new - 1) // 2
    saved = pairs * (2 * R - Dn - Dv) - tokens * R * (Dn + Dv)
    return new >= FEWEST_TOKENS and H * saved > OVERHEAD


class Run(NamedTuple):
    """Consecutive sequences that attend in the same way.

    ``windows``: the first token and the number of tokens that are expanded at a time, for one sequence or, from token 0
    on, for all of them. Empty: absorbed.
    """

    first: int
    end: int
    rows: tuple[int, int]  # of the queries, from : to
    windows: tuple[tuple[int, int], ...]


def runs_of(metadata: AttentionMetadata, module: Any, block_size: int) -> list[Run]:
    """The runs of a step: which sequences are expanded, and in which windows."""
    T, S = len(metadata.slot_mapping), len(metadata.seq_lens)
    expanding = _expanding(metadata, module)
    if not expanding:
        return [Run(0, S, (0, T), ())]
    starts, lens = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu.tolist()
    runs: list[Run] = []
    most, end = max(WINDOW // sizes_of(module).H, 1), 0
    step = max(most // block_size, 1) * block_size
    for s in expanding:
        if end < s:
            runs.append(Run(end, s, (starts[end], starts[s]), ()))
        end, n = s + 1, lens[s]
        last = max(n - max(most, starts[end] - starts[s]), 0) // block_size * block_size
        windows = (*((begin, min(step, last - begin)) for begin in range(0, last, step)), (last, n - last))
        first, begun = s, starts[s]
        if runs and len(windows) == len(runs[-1].windows) == 1 and runs[-1].windows[0][1] + n <= most:
            before = runs.pop()
            first, begun, windows = before.first, before.rows[0], ((0, before.windows[0][1] + n),)
        runs.append(Run(first, end, (begun, starts[end]), windows))
    if end < S:
        runs.append(Run(end, S, (starts[end], starts[S]), ()))
    return runs


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
    batch = pool.block_tables, metadata.seq_lens, metadata.query_start_loc
    by_position = any(features[name] for name in ("sliding_window", "attention_chunk"))
    if by_position or any(features.get(name) is not None for name in ("bidirectional_ranges", "selected_keys")):
        return _absorbed(module, rows, kv_cache, *batch, scale, features)[None]
    runs = runs_of(metadata, module, kv_cache.shape[1])
    if len(runs) == 1 and not runs[0].windows:
        return _absorbed(module, rows, kv_cache, *batch, scale, features)[None]
    outs = []
    for run in runs:
        tables, lens = (each[run.first : run.end] for each in batch[:2])
        if run.first:  # kernels are compiled for vectors at multiples of 16 bytes
            tables, lens = tables.clone(), lens.clone()
        starts = batch[2][run.first : run.end + 1] - run.rows[0]
        of_run = rows[run.rows[0] : run.rows[1]], kv_cache, tables, lens, starts
        if run.windows:
            outs.append(_expanded(module, *of_run, run.windows, scale, features))
        elif len(of_run[0]):
            outs.append(_absorbed(module, *of_run, scale, features))
    padding = len(rows) - runs[-1].rows[1]
    if padding:
        outs.append(rows.new_zeros(padding, *outs[0].shape[1:]))
    return torch.cat(outs)[None]


def _absorbed(
    module: Any,
    rows: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    features: dict[str, Any],
) -> Tensor:
    """``[T, H, Dv]`` of query rows ``[T, H, Dn + P]``, in the absorbed form."""
    Dn, of_keys, of_values = module.qk_nope_head_dim, *_matrices(module)
    absorbed = torch.cat(((rows[:, :, :Dn].transpose(0, 1) @ of_keys).transpose(0, 1), rows[:, :, Dn:]), -1)
    options = {**features, "value_head_size": module.kv_lora_rank, "kv_cache_dtype": stored_as(kv_cache)}
    out = paged_attention(absorbed, kv_cache, block_tables, seq_lens, query_start_loc, scale, **options)
    return (out.transpose(0, 1) @ of_values.transpose(1, 2)).transpose(0, 1)


def _expanded(
    module: Any,
    rows: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    windows: tuple[tuple[int, int], ...],
    scale: float,
    features: dict[str, Any],
) -> Tensor:
    """The same with keys and values of all heads, window by window: gather, expand, attend, merge. The last window has
    the new tokens."""
    features = {name: value for name, value in features.items() if name not in _BY_POSITION}
    B = kv_cache.shape[1]
    block = OWN_BLOCK if B % OWN_BLOCK == 0 else B
    (H, D), Dv, S = rows.shape[1:], module.v_head_dim, len(seq_lens)
    most = max(n for _, n in windows) // block + S  # each sequence ends inside a block
    eighth = max(WINDOW // H // 8 // block, 1)
    count = -(-most // eighth) * eighth  # few distinct sizes, because each is another kind of call
    key, value = rows.new_empty(count, block, H, D), rows.new_empty(count, block, H, Dv)
    totals: list[tuple[Tensor, Tensor]] = []
    for number, (begin, n) in enumerate(windows, 1):
        is_last = begin + n == sum(windows[-1])
        lens = seq_lens - begin if is_last else torch.full_like(seq_lens, n)
        blocks = (lens + (block - 1)) // block
        first = (blocks.cumsum(0) - blocks).int()
        held = (n // block + S) * block
        paged = kv_cache, block_tables[:, begin // B :], blocks * block, held
        latents = gather_kv(*paged, kv_cache_dtype=stored_as(kv_cache), dtype=rows.dtype)[0][:, 0]
        _expand(module, latents, key.flatten(0, 1)[:held], value.flatten(0, 1)[:held])
        columns = torch.arange(-(-n // block), dtype=torch.int32, device=rows.device)
        batch = first[:, None] + columns, lens, query_start_loc, scale
        options = features if is_last else {"soft_cap": features["soft_cap"], "causal": False}
        if len(windows) == 1:
            return paged_attention(rows, key, *batch, value_cache=value, **options)
        totals.append(paged_attention_with_lse(rows, key, *batch, value_cache=value, **options))
        # Merge results of equally many windows, as in a tournament. Each merge rounds: merging one window after the
        # other would round the first result once per window.
        while len(totals) > (1 if is_last else number.bit_count()):
            totals[-2:] = [merge_attention_states(*totals[-2], *totals[-1])]
    return totals[0][0]


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
