"""transformers' own continuous batching (``generate_batch``, ``transformers serve``) on paged_ops.

::

    use_paged_attention(model)
    outputs = model.generate_batch(prompts, generation_config)

transformers keeps its scheduler, cache and blocks. Layers of full attention write to the pages and attend to them
directly, in decode and in (chunked) prefill; transformers' own functions first gather all keys and values. A layer with
a window keeps its last tokens in a ring buffer without positions. So its tokens are gathered, as in transformers, and
then attended to. From 5.24 on the layers gather before they call attention, except in decode by block tables.

Versions of transformers: before 5.18 any registered function can be used, as ``"paged|NAME"``. Later versions only
allow known names. So this module marks a function as already loaded in transformers' flash-attention module. It does so
only if that module has the attributes of 5.19 to 5.24, and raises an error otherwise.

Letters: T tokens of the step, S sequences, H query heads, K key/value heads, D head size, B tokens per page, M pages of
the longest sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.masking_utils import AttentionMaskInterface

from paged_ops.integrations.transformers.attention_function import no_mask
from paged_ops.ops import paged_attention, reshape_and_cache

# transformers uses block tables and CUDA graphs only for names that hold "flash" and a 2 or 3.
NAME = "paged_ops_flash_3"
_PAGED_NAME = f"paged|{NAME}"
# The step of each group of layers, made by the first layer of the group.
_STEP = "_paged_ops_step"
_LOADED = {
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_process_flash_kwargs_fn",
}


class _Step(NamedTuple):
    """The arguments of the ops for one batch, shared by all layers of one group."""

    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, M]
    slot_mapping: Tensor  # int64 [T]


def use_paged_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let ``model.generate_batch`` use paged_ops for attention. Changes the model in place, and returns it.

    ``model.set_attn_implementation("sdpa")``, or any other, undoes it; until then ``model.generate`` raises an error.
    Call it again if another model of the process has used flash attention since.

    Raises:
        ValueError: this version of transformers does not allow other attention functions.
    """
    until_5_17 = hasattr(modeling_flash_attention_utils, "lazy_import_paged_flash_attention")
    missing = [name for name in sorted(_LOADED) if not hasattr(modeling_flash_attention_utils, name)]
    if missing:
        raise ValueError(
            "transformers: expected a version whose continuous batching takes other attention functions (5.17, or 5.19"
            f" to 5.24), got one whose modeling_flash_attention_utils has no {missing}; use PagedCausalLM instead"
        )
    name = _PAGED_NAME if until_5_17 else NAME
    loaded: Any = modeling_flash_attention_utils
    loaded._flash_fn = loaded._flash_varlen_fn = loaded._flash_with_kvcache_fn = _not_called
    if until_5_17 and _has_windows(model.config.get_text_config()):
        loaded._flash_with_kvcache_fn = None  # that version fails: layers with a window have no block tables
    loaded._process_flash_kwargs_fn = loaded._process_with_kvcache_kwargs_fn = dict
    loaded._pad_fn = loaded._unpad_fn = _not_called
    loaded._loaded_implementation = name
    for part in model.modules():
        # gpt-oss lists the functions that take sinks.
        listed = getattr(part, "_compatible_flash_implementations", None)
        if listed and NAME not in listed:
            part._compatible_flash_implementations = [*listed, NAME]
    model.set_attn_implementation(name)
    return model


def _has_windows(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return "sliding_attention" in layer_types
    return getattr(config, "sliding_window", None) is not None


# The cache is one byte tensor under overlapping views; a compiler would copy it for each layer.
@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer in ``generate_batch``, as transformers calls it.

    Args:
        module: the layer; its ``layer_idx`` names its pages.
        query: ``[1, H, T, D]``.
        key, value: ``[1, K, T, D]``, of the step's tokens.
        attention_mask: None.
        cache: transformers' ``PagedAttentionCache``; None from 5.24 on, where ``key`` and ``value`` are gathered, or
            kwargs hold the layer's pages.
        scaling: by default ``D ** -0.5``.
        sliding_window, softcap, s_aux: window, soft cap of the logits, sinks ``[H]``; None is off.
        kwargs: the step: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``max_length_k``, and ``block_table`` in decode on a
            GPU, otherwise ``read_index`` and ``write_index``.

    Returns:
        ``[1, T, H, D]`` and no attention weights.

    Raises:
        ValueError: the call is not from ``generate_batch``, or has a mask.
    """
    if cache is None and kwargs.get("read_index") is None and kwargs.get("block_table") is None:
        raise ValueError(
            "cache: expected the cache of generate_batch, got none; for other calls set another implementation by"
            ' model.set_attn_implementation("sdpa")'
        )
    if attention_mask is not None:
        raise ValueError("attention_mask: expected none with paged attention, which is causal, and got it")
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected none in generate_batch, which keeps no index keys; use PagedCausalLM")
    if value.shape[-1] != key.shape[-1]:
        raise ValueError(f"value: expected head size {key.shape[-1]}, the keys', got {value.shape[-1]}")
    rows_of_query, rows_of_key, rows_of_value = (states[0].transpose(0, 1) for states in (query, key, value))
    features: dict[str, Any] = {
        "soft_cap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cache is None:
        window = sliding_window or getattr(module, "sliding_window", 0) or 0
        return _attend_updated(rows_of_query, key, value, scale, window, kwargs, features)[None], None
    group = _group(cache, module, sliding_window)
    if group.window:
        out = _attend_gathered(group, cache, rows_of_query, key, value, scale, kwargs, features)
        return out[None], None
    assert group.pages is not None
    step = _step(group, kwargs, rows_of_query.shape[0])
    reshape_and_cache(rows_of_key, rows_of_value, group.pages, step.slot_mapping, value_cache=group.values)
    out = paged_attention(
        rows_of_query,
        group.pages,
        step.block_tables,
        step.seq_lens,
        step.query_start_loc,
        scale,
        value_cache=group.values,
        **features,
    )
    return out[None], None


class _Group(NamedTuple):
    """A layer's pages, and the group of layers that share its block table."""

    owner: Any  # the object that stores the group's step
    place: int  # the group's index in read_index, write_index and block_table
    layer: int
    first: bool  # whether it is the first layer of the group, which makes the step
    layer_type: str
    window: int
    pages: Tensor | None  # [N, 2, B, K, D], or only keys [N, B, K, D]
    values: Tensor | None


def _group(cache: Any, module: Any, sliding_window: int | None) -> _Group:
    layer = int(module.layer_idx)
    if hasattr(cache, "layer_to_allocator"):  # from 5.19
        owner = cache.layer_to_allocator[layer]
        window = int(getattr(owner, "sliding_window", 0) or 0)
        pages = (None, None) if window else _without_overlap(*owner.get_cache_for_block_table(layer))
        first = layer == owner.layer_indices[0]
        return _Group(owner, owner.index, layer, first, owner.layer_type, window, *pages)
    place, of_group = cache.layer_index_to_group_indices[layer]
    window = int(sliding_window or getattr(module, "sliding_window", 0) or 0)
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pages = (cache.key_cache[of_group].view(shape), cache.value_cache[of_group].view(shape))
    layer_type = "sliding_attention" if window else "full_attention"
    return _Group(cache.group_cache_managers[place], place, layer, of_group == 0, layer_type, window, *pages)


def _without_overlap(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Pages of keys and of values ``[n, B, K, D]`` as the ops take them.

    In one tensor of transformers they overlap: page i + 1 of the keys is page i of the values, and only even pages are
    valid in each. Such a pair becomes ``[N, 2, B, K, D]`` and None.
    """
    page = keys.stride(0)
    if values.data_ptr() - keys.data_ptr() != page * keys.element_size():
        return keys, values
    shape, strides = (-(-len(keys) // 2), 2, *keys.shape[1:]), (2 * page, page, *keys.stride()[1:])
    return keys.as_strided(shape, strides), None


def _step(group: _Group, kwargs: dict[str, Any], num_tokens: int) -> _Step:
    """The batch for a group of layers of full attention: made by the first of them, without waiting for the device."""
    if not group.first:
        return getattr(group.owner, _STEP)
    assert group.pages is not None
    B = group.pages.shape[-3]
    per_block = 2 if group.values is None else 1  # pages, the unit of transformers' indices
    starts = kwargs["cu_seq_lens_q"].to(torch.int32)  # [S + 1]
    key_starts, longest = _of_type(kwargs["cu_seq_lens_k"], group), _of_type(_longest(kwargs), group)
    seq_lens = key_starts.diff().to(torch.int32)  # [S], new tokens included
    if kwargs.get("block_table") is not None:
        step = _decode(starts, seq_lens, kwargs["block_table"][group.place] // per_block, B, num_tokens)
    else:
        # Cache rows, one per token. A step without history reads none: its own tokens are the whole sequences.
        rows, begins = kwargs["read_index"][group.place], key_starts
        slots = kwargs["write_index"][group.place]
        if rows.numel() == 0:
            rows, begins = slots, starts
        if per_block > 1:  # no row is in the second page, which has the values
            rows, slots = (each // (per_block * B) * B + each % (per_block * B) for each in (rows, slots))
        firsts = begins[:-1, None] + torch.arange(0, max(int(longest), 1), B, device=rows.device)
        block_tables = (rows[firsts.clamp(max=rows.shape[0] - 1).long()] // B).to(torch.int32)
        step = _Step(starts, seq_lens, block_tables, slots[:num_tokens])
    setattr(group.owner, _STEP, step)
    return step


def _decode(starts: Tensor, seq_lens: Tensor, block_tables: Tensor, B: int, num_tokens: int) -> _Step:
    """Row s belongs to sequence s. ``block_tables`` is -1 past its end."""
    last = (seq_lens - 1).clamp(min=0).long()
    page = block_tables.gather(1, (last // B)[:, None])[:, 0].long()
    slots = torch.where(seq_lens > 0, page * B + last % B, -1)
    return _Step(starts, seq_lens, block_tables, slots[:num_tokens])


def _attend_updated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    kwargs: dict[str, Any],
    features: dict[str, Any],
) -> Tensor:
    """From 5.24 on: kwargs hold the layer's part of the step, and the cache has the new tokens but for block tables."""
    starts, key_starts = (kwargs[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    rows_of_key, rows_of_value = (states[0].transpose(0, 1) for states in (key, value))
    if kwargs.get("block_table") is None:
        rows = rows_of_key, rows_of_value, key_starts, int(_longest(kwargs)), starts
        return _attend_rows(query, *rows, scale, sliding_window=window, **features)
    pages, values = _without_overlap(kwargs["k_cache"], kwargs["v_cache"])
    block_tables = kwargs["block_table"] // (2 if values is None else 1)
    step = _decode(starts, key_starts.diff(), block_tables, pages.shape[-3], query.shape[0])
    reshape_and_cache(rows_of_key, rows_of_value, pages, step.slot_mapping, value_cache=values)
    batch = step.block_tables, step.seq_lens, step.query_start_loc
    return paged_attention(query, pages, *batch, scale, value_cache=values, sliding_window=window, **features)


def _attend_gathered(
    group: _Group,
    cache: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    kwargs: dict[str, Any],
    features: dict[str, Any],
) -> Tensor:
    """A layer with a window: attention to the gathered ring buffer and the new tokens, as pages of one token."""
    key_starts = _of_type(kwargs["cu_seq_lens_k"], group).to(torch.int32)
    longest = int(_of_type(_longest(kwargs), group))
    read_index, write_index = kwargs["read_index"], kwargs["write_index"]
    if hasattr(cache, "layer_to_allocator"):
        states = (states[0].transpose(0, 1) for states in (key, value))
        indices = (read_index[group.place], write_index[group.place])
        keys, values = group.owner.update(*states, group.layer, *indices)  # [rows, K, D]
    else:
        keys, values = cache.update(key, value, group.layer, read_index, write_index)
    starts = kwargs["cu_seq_lens_q"].to(torch.int32)
    return _attend_rows(
        query, keys, values, key_starts, longest, starts, scale, sliding_window=group.window, **features
    )


def _attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_starts: Tensor,
    longest: int,
    starts: Tensor,
    scale: float,
    **features: Any,
) -> Tensor:
    """Attention to the sequences' ``keys`` and ``values`` ``[rows, K, D]`` in a row, as pages of one token."""
    rows = torch.arange(max(longest, 1), dtype=torch.int32, device=query.device)
    block_tables, seq_lens = key_starts[:-1, None] + rows, key_starts.diff()
    return paged_attention(
        query, keys[:, None], block_tables, seq_lens, starts, scale, value_cache=values[:, None], **features
    )


def _of_type(by_type: Any, group: _Group) -> Any:
    return by_type[group.layer_type] if isinstance(by_type, dict) else by_type


def _longest(kwargs: dict[str, Any]) -> Any:
    # Another name before 5.19.
    return kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]


def _not_called(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"attn_implementation: expected a flash-attention implementation, got {NAME!r}, which is for generate_batch"
    )


for _name in (NAME, _PAGED_NAME):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, no_mask)
