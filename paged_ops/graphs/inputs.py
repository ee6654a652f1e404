"""The arguments of a step: token ids, metadata and last rows, in the builder's buffers, which never move.

Letters: T tokens of a step (padded), S sequences (padded).
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.cache.states import PADDING_ROW
from paged_ops.checks import describe_setting, expect
from paged_ops.graphs.modes import GraphKey
from paged_ops.metadata import AttentionMetadata, AttentionMetadataBuilder, Batch, GraphSupport

# Dimensions of size 0 and 1 would be compiled separately.
LEAST = 2
# The sizes of the step whose sizes are symbolic, and the least sizes of the buffers that it views. All numbers differ:
# the compiler takes equal numbers for the same size.
OPEN_SEQS, OPEN_TOKENS = 3, 7
LEAST_SEQS, LEAST_TOKENS = 5, 11


class StepInputs(NamedTuple):
    """The arguments of a step, views of buffers that never move: equal sizes give the same tensors."""

    input_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata
    last_rows: Tensor  # int64 [S]: the last row of each sequence in input_ids


def step_builder(
    kv_cache: KVCache | HybridCache,
    max_num_seqs: int,
    max_num_tokens: int,
    max_model_len: int,
    graph_support: GraphSupport = GraphSupport.ALWAYS,
) -> AttentionMetadataBuilder:
    """The builder of the steps on a cache, for the given largest step."""
    return AttentionMetadataBuilder(
        kv_cache.block_size,
        max(max_num_seqs, LEAST_SEQS),
        max(max_num_tokens + 2, LEAST_TOKENS),  # see sizes_of and inputs_of_open_sizes
        -(-max_model_len // kv_cache.block_size),
        kv_cache.device,
        num_blocks=[pool.num_blocks for pool in kv_cache.pools],
        num_state_rows=0 if kv_cache.states is None else len(kv_cache.states.tensors[0]),
        graph_support=graph_support,
        with_inputs=True,
        shards=[pool.shard for pool in kv_cache.pools],
    )


def build_inputs(
    builder: AttentionMetadataBuilder,
    batch: Batch,
    input_ids: Sequence[int] | Tensor,
    S: int,
    T: int,
    common_prefix_len: int = 0,
    lookahead: int = 0,
) -> StepInputs:
    """A step padded to S sequences and T tokens. Padding ids are 0, or ids of an earlier step."""
    ids: Any = input_ids
    if isinstance(ids, Tensor):
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        expect(whole, "input_ids", "integers", ids)
    if isinstance(ids, Tensor) and ids.device == builder.device and ids.device.type != "cpu":
        t = batch.num_tokens
        expect(ids.shape == (t,), "input_ids", f"the {t} tokens of the batch", ids)
        metadata = builder.build(common_prefix_len, batch, num_reqs=S, num_tokens=T, lookahead=lookahead)
        inputs = inputs_of(builder, S, T, metadata)
        inputs.input_ids[:t].copy_(ids)
        return inputs
    try:
        if isinstance(ids, (list, tuple)) and ids:  # which torch reads slowly
            ids = torch.frombuffer(array.array("q", ids), dtype=torch.int64)
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()
    except (TypeError, OverflowError, RuntimeError):
        expect(False, "input_ids", "integers", describe_setting(input_ids))
    metadata = builder.build(common_prefix_len, batch, num_reqs=S, num_tokens=T, lookahead=lookahead, input_ids=ids)
    return inputs_of(builder, S, T, metadata)


def sizes_of(batch: Batch, query_len: int) -> tuple[int, int]:
    """S and T of a step without a graph.

    If S divides T, kernels are chosen for equal lengths. They are slow for other batches, and only those for
    ``query_len`` tokens per sequence are compiled ahead. So other batches get one token of padding.
    """
    S, T = max(batch.num_reqs, LEAST), max(batch.num_tokens, LEAST)
    return S, T + int(T > S and T % S == 0 and not batch.is_uniform(query_len))


def inputs_for_capture(builder: AttentionMetadataBuilder, key: GraphKey, query_len: int) -> StepInputs:
    """A step that is only padding, with ``query_len`` tokens per sequence, or, if that is 0, any mixture."""
    _clear(builder)
    if query_len:
        metadata = builder.build_for_capture(key.num_reqs, query_len, cascade=key.cascade)
    else:
        metadata = builder.build(0, _empty_batch(builder), num_reqs=key.num_reqs, num_tokens=key.num_tokens)
        metadata.context = builder.context_of(key.num_reqs, key.num_tokens, is_decode=False)
    return inputs_of(builder, key.num_reqs, key.num_tokens, metadata)


def inputs_of_open_sizes(
    builder: AttentionMetadataBuilder, is_decode: bool = True, S: int = OPEN_SEQS, T: int = OPEN_TOKENS
) -> StepInputs:
    """A step without sequences whose sizes are marked dynamic, so that one compilation serves all sizes. If the cache
    is sharded over ranks, decodes and other steps are compiled separately."""
    _clear(builder)
    metadata = builder.build(0, _empty_batch(builder), num_reqs=S, num_tokens=T)
    inputs = inputs_of(builder, S, T, metadata)
    metadata.context = builder.context_of(S, T, is_decode)
    tensors = [
        inputs.input_ids,
        inputs.last_rows,
        metadata.positions,
        metadata.slot_mapping,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.block_tables,
    ]
    for pool in metadata.other_pools or ():
        tensors += [pool.block_tables, pool.slot_mapping]
    if metadata.context is not None:
        of_context = metadata.context.lens, metadata.context.history_lens, metadata.context.own_tables
        tensors += [each for each in of_context if each is not None]
        if metadata.context.own_tables is not None:
            torch._dynamo.mark_dynamic(metadata.context.own_tables, 1)
    if metadata.state_slots is not None:
        tensors.append(metadata.state_slots)
        metadata.max_query_len = 1  # the only steps that are compiled with states
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return inputs


def open_sizes(max_num_seqs: int) -> list[tuple[int, int]]:
    """Sizes S and T at which a step is compiled. The first compilation serves all sizes, unless torch itself chooses by
    a size: its convolution on the CPU does, from 16 sequences on."""
    larger = {1 << k for k in range(4, max_num_seqs.bit_length())} | {max_num_seqs}
    return [(OPEN_SEQS, OPEN_TOKENS), *((S, S + 2) for S in sorted(larger) if S > OPEN_SEQS)]


def inputs_of_padding(builder: AttentionMetadataBuilder, S: int, T: int) -> StepInputs:
    """A step of these sizes without sequences."""
    _clear(builder)
    return inputs_of(builder, S, T, builder.build(0, _empty_batch(builder), num_reqs=S, num_tokens=T))


def inputs_of_prompt(builder: AttentionMetadataBuilder, T: int, computed: int) -> StepInputs:
    """A step with T tokens of one prompt after ``computed`` tokens, which writes no slot of the cache. It reads the
    first block and the states of padding. Positions are 0, as the last block may end behind the model's last one."""
    _clear(builder)
    blocks = [[0] * -(-(computed + T) // builder.block_size)]
    slots = [2] if builder.num_state_rows else None
    batch = Batch([T], [computed], blocks, other_block_ids=[blocks] * (len(builder.num_blocks) - 1), state_slots=slots)
    metadata = builder.build(0, batch, num_reqs=LEAST)
    metadata.positions.zero_()
    for pool in (metadata.pool(0), *(metadata.other_pools or ())):
        pool.slot_mapping.fill_(-1)
    if metadata.state_slots is not None:
        metadata.state_slots.fill_(PADDING_ROW)
    return inputs_of(builder, LEAST, T, metadata)


def inputs_of(builder: AttentionMetadataBuilder, S: int, T: int, metadata: AttentionMetadata) -> StepInputs:
    input_ids, last_rows = builder.inputs(S, T)
    return StepInputs(input_ids, metadata, last_rows)


def _empty_batch(builder: AttentionMetadataBuilder) -> Batch:
    nothing: list[list[int]] = []
    return Batch([], [], [], other_block_ids=[nothing] * (len(builder.num_blocks) - 1))


def _clear(builder: AttentionMetadataBuilder) -> None:
    for each in builder.inputs(builder.max_num_seqs, builder.max_num_tokens):
        each.zero_()
