"""The inputs of all steps, in buffers that never move.

Letters: T tokens of a step (padded), S sequences (padded).
"""

from __future__ import annotations

import array
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import expect
from paged_ops.graphs.modes import GraphKey
from paged_ops.metadata import AttentionMetadata, AttentionMetadataBuilder, Batch, GraphSupport


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a step, views of buffers that never move: equal sizes give the same tensors."""

    input_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata
    last_rows: Tensor  # int64 [S]: the last row of each sequence in input_ids


class InputBuffers:
    """Where the inputs of all steps lie: the buffers of a metadata's builder, with token ids and last rows.

    Args:
        kv_cache: for its device and sizes.
        max_num_seqs, max_num_tokens, max_model_len: the largest step.
        graph_support: of the metadata's builder.
    """

    # Dimensions of size 0 and 1 would be compiled separately.
    LEAST = 2
    # Sizes of the step whose sizes are symbolic, and the least sizes of the buffers that it views. They equal no other
    # number, or the compiler would take the two for the same.
    OPEN_SEQS, OPEN_TOKENS = 3, 7
    LEAST_SEQS, LEAST_TOKENS = 5, 11

    def __init__(
        self,
        kv_cache: KVCache | HybridCache,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        graph_support: GraphSupport = GraphSupport.ALWAYS,
    ) -> None:
        seqs, tokens = max(max_num_seqs, self.LEAST_SEQS), max(max_num_tokens, self.LEAST_TOKENS)
        self.builder = AttentionMetadataBuilder(
            kv_cache.block_size,
            seqs,
            tokens,
            -(-max_model_len // kv_cache.block_size),
            kv_cache.device,
            num_blocks=[pool.num_blocks for pool in kv_cache.pools],
            num_state_rows=0 if kv_cache.states is None else len(kv_cache.states.tensors[0]),
            graph_support=graph_support,
            with_inputs=True,
            shards=[pool.shard for pool in kv_cache.pools],
        )
        self.max_num_tokens = max_num_tokens

    def fill(
        self,
        batch: Batch,
        input_ids: Sequence[int] | Tensor,
        S: int,
        T: int,
        common_prefix_len: int = 0,
        lookahead: int = 0,
    ) -> StepInputs:
        """A step padded to S sequences and T tokens. Padding ids are 0, or those of an earlier step."""
        build = functools.partial(
            self.builder.build, common_prefix_len, batch, num_reqs=S, num_tokens=T, lookahead=lookahead
        )
        device = self.builder.device
        if isinstance(input_ids, Tensor) and input_ids.device == device and device.type != "cpu":
            t = batch.num_tokens
            expect(input_ids.shape == (t,), "input_ids", f"the {t} tokens of the batch", input_ids)
            inputs = self._step(S, T, build())
            inputs.input_ids[:t].copy_(input_ids)
            return inputs
        ids: Any = input_ids
        if isinstance(ids, list) and ids:  # which torch reads slowly
            ids = torch.frombuffer(array.array("q", ids), dtype=torch.int64)
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()
        return self._step(S, T, build(input_ids=ids))

    def for_capture(self, key: GraphKey, query_len: int) -> StepInputs:
        """A step that is only padding, with ``query_len`` tokens per sequence, or, if that is 0, any mixture."""
        self._clear()
        if query_len:
            metadata = self.builder.build_for_capture(key.num_reqs, query_len, cascade=key.cascade)
        else:
            metadata = self.builder.build(0, self._nothing(), num_reqs=key.num_reqs, num_tokens=key.num_tokens)
            metadata.context = self.builder.context_of(key.num_reqs, key.num_tokens, is_decode=False)
        return self._step(key.num_reqs, key.num_tokens, metadata)

    def of_open_sizes(self, is_decode: bool = True) -> StepInputs:
        """A step without sequences whose sizes are marked dynamic, so that one compilation serves all sizes. If the
        cache is sharded over ranks, decodes and other steps are compiled apart."""
        self._clear()
        S, T = self.OPEN_SEQS, self.OPEN_TOKENS
        inputs = self._step(S, T, self.builder.build(0, self._nothing(), num_reqs=S, num_tokens=T))
        metadata = inputs.metadata
        metadata.context = self.builder.context_of(S, T, is_decode)
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

    def _nothing(self) -> Batch:
        """A step of no sequences."""
        nothing: list[list[int]] = []
        return Batch([], [], [], other_block_ids=[nothing] * (len(self.builder.num_blocks) - 1))

    def _clear(self) -> None:
        for each in self.builder.inputs(self.builder.max_num_seqs, self.builder.max_num_tokens):
            each.zero_()

    def _step(self, S: int, T: int, metadata: AttentionMetadata) -> StepInputs:
        input_ids, last_rows = self.builder.inputs(S, T)
        return StepInputs(input_ids, metadata, last_rows)
