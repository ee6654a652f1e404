"""The metadata of a step for :mod:`paged_ops.integrations.vllm`: vLLM's own tensors, and a few derived ones.

Nothing waits for the device, and tensors that captured graphs read keep their addresses. Letters: T tokens of the step,
S sequences, M columns of the block tables, R ranges.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from paged_ops.cache.shard import TokenShard
from paged_ops.integrations.vllm import plugin as vllm_plugin
from paged_ops.integrations.vllm.shared_prefix import PrefixFinder, SharedPrefix
from paged_ops.metadata import use_cascade_attention
from paged_ops.parallel.exchange import Exchange


@dataclass
class PagedOpsMetadata(AttentionMetadata):
    """The metadata of one step for the ops. All tensors are the engine's own.

    Attributes:
        num_actual_tokens: T; later rows are padding, which is not read.
        query_start_loc: int32 ``[S + 1]``.
        seq_lens: int32 ``[S]``.
        block_table: int32 ``[S, M]``.
        slot_mapping: ``[T]``.
        causal: False if tokens of a step see later ones.
        bidirectional_requests: int32 ``[S, 1, 2]``, where causality differs between requests: the range of all tokens
            of each request whose tokens see later ones, and padding for the others.
        prefix: the prefix that the requests share, if the engine searches for it.
        mm_prefix_range_tensor: int32 ``[S, R, 2]``, the half-open ranges whose tokens see each other; None without any.
            Gemma-4 sets it to None for layers that have none, by this name.
        exchange: with context parallelism, what merges the ranks' partial attention; else None.
        lens: int32 ``[S]``, with context parallelism: the number of tokens that this rank holds: with those of the step
            if no request has more than one, else before the step. None if no request has tokens before the step.
        max_query_len: the most tokens of a request.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    prefix: SharedPrefix | None = None
    mm_prefix_range_tensor: Tensor | None = None
    exchange: Exchange | None = None
    lens: Tensor | None = None
    max_query_len: int = 1
    bidirectional_requests: Tensor | None = None


class PagedOpsMetadataBuilder(AttentionMetadataBuilder[PagedOpsMetadata]):
    """Passes the engine's tensors on. Nothing depends on their values, so every step can be a CUDA graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A rank may hold all tokens of a draft model's layers.
        is_sharded = getattr(kv_cache_spec, "dcp_sharded", True)
        self._group = vllm_plugin.context_group() if is_sharded else None
        if self._group is not None:
            self.supports_draft_decode_metadata_update = False  # this rank's share of the history is derived
            self._exchange = vllm_plugin.context_exchange(self._group, vllm_config, kv_cache_spec.head_size, device)
            self._shard = TokenShard(self._group.rank_in_group, self._group.world_size)
            self._block = self._group.world_size * vllm_config.parallel_config.cp_kv_cache_interleave_size
            mode = vllm_config.compilation_config.cudagraph_mode
            self._has_mixed_graphs = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
            self._longest_decode = 1 + vllm_config.num_speculative_tokens
            most = vllm_config.scheduler_config.max_num_seqs
            # captured graphs read these: tokens before the step, and with those of the step
            self._lens = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._requests: Tensor | None = None
        self._finder: PrefixFinder | None = None
        looks = vllm_config is not None and self._group is None and vllm_plugin.wants_cascade(vllm_config)
        if looks and _is_full_attention(kv_cache_spec):
            self._finder = PrefixFinder(kv_cache_spec.block_size, vllm_config.scheduler_config.max_num_seqs)
            self._heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
            self._longest = vllm_config.model_config.max_model_len
            is_gpu = device.type == "cuda"
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedOpsMetadata:
        """The metadata of one step for the layers of one group.

        ``common_prefix_len`` is 0: see :meth:`use_cascade_attention`.

        Raises:
            ValueError: causality differs between requests, and the cache's tokens are sharded over ranks.
        """
        common = common_attn_metadata
        per_request = isinstance(common.causal, Tensor)
        causal = True if isinstance(common.causal, Tensor) else common.causal  # ranges open the other requests
        if per_request and self._group is not None:
            raise ValueError(
                "causal: expected True or False for all requests of a step with context parallelism, got one value per"
                " request"
            )
        return PagedOpsMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
            prefix=None if per_request else self._shared(common),
            mm_prefix_range_tensor=_ranges(common) if common.mm_req_doc_ranges and causal else None,
            exchange=None if self._group is None else self._exchange,
            lens=None if self._group is None else self._own_lens(common),
            max_query_len=common.max_query_len,
            bidirectional_requests=self._bidirectional(common) if per_request else None,
        )

    def _bidirectional(self, common: CommonAttentionMetadata) -> Tensor:
        """The range of each request whose tokens see later ones, ``[S, 1, 2]``. Captured graphs read it."""
        S = common.seq_lens.shape[0]
        if self._requests is None or len(self._requests) < S:
            most = S if self.vllm_config is None else max(S, self.vllm_config.scheduler_config.max_num_seqs)
            self._requests = torch.zeros(most, 1, 2, dtype=torch.int32, device=common.seq_lens.device)
        requests = self._requests[:S]
        torch.mul(common.seq_lens, common.causal[:S] == 0, out=requests[:, 0, 1])
        return requests

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Every step can be captured; for models with ranges only decodes, because prompts differ in their number of
        ranges."""
        if vllm_config is not None and vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_BATCH
        return cls._cudagraph_support

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the engine should search for a shared prefix (0.26 asks): no, it would not replay full graphs
        then."""
        return False

    def _own_lens(self, common: CommonAttentionMetadata) -> Tensor | None:
        """``PagedOpsMetadata.lens``. A graph of mixed steps also serves a step of one token per request: it then reads
        the lengths before the step."""
        is_decode, upper_bound = common.max_query_len == 1, common.seq_lens_cpu_upper_bound
        # no captured graph serves other steps than decodes, with drafts or without
        is_eager = not self._has_mixed_graphs and common.max_query_len > self._longest_decode
        if is_eager and upper_bound is not None and int(upper_bound.sum()) == common.num_actual_tokens:
            return None
        for with_step in {is_decode, is_decode and not self._has_mixed_graphs}:
            held = common.seq_lens if with_step else common.seq_lens - common.query_start_loc.diff()
            self._lens[int(with_step), : len(held)] = self._shard.lens(held, self._block)
        return self._lens[int(is_decode), : len(common.seq_lens)]

    def _shared(self, common: CommonAttentionMetadata) -> SharedPrefix | None:
        """The prefix that the requests of a step share; None if cascade attention would not pay for any prefix.

        The search always runs: a graph captured with a prefix also serves steps of fewer requests.
        """
        S = common.seq_lens.shape[0]
        if self._finder is None or not common.causal or S < self._finder.least_sequences:
            return None
        prefix = self._finder.find(common.block_table_tensor, common.seq_lens, common.query_start_loc)
        query_lens, K = common.query_start_loc_cpu[: S + 1].diff(), self.kv_cache_spec.num_kv_heads
        is_worth_it = use_cascade_attention(self._longest, query_lens, self._heads, K, False, False, self._processors)
        return prefix if is_worth_it else None

    def update_block_table(
        self, metadata: PagedOpsMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedOpsMetadata:
        """The metadata of the same step for a group of layers with other blocks."""
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping, updated.prefix = blk_table, slot_mapping, None
        return updated

    def update_draft_decode_metadata(self, metadata: PagedOpsMetadata) -> None:
        """Update the lengths after a shared prefix."""
        assert self._group is None, "supports_draft_decode_metadata_update"
        if metadata.prefix is not None:
            PrefixFinder.renew(metadata.prefix, metadata.seq_lens)


def _is_full_attention(kv_cache_spec: Any) -> bool:
    """Whether every row of a request sees the whole context.

    For chunks vLLM splits a request into several rows, and for static sinks it puts blocks before the request's own.
    """
    windows = (getattr(kv_cache_spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return type(kv_cache_spec) is FullAttentionSpec and all(window is None for window in windows)


def _ranges(common: CommonAttentionMetadata) -> Tensor | None:
    """The ranges that hold tokens of the step, ``[S, R, 2]`` padded with 0. vLLM gives the first and last token of
    each.

    R is a power of two and at least 4, because kernels are compiled for it. If a range continues after the step, the
    existing keys are visible, as in vLLM's own backends.
    """
    num_rows = common.seq_lens.shape[0]
    rows = [[(first, last + 1) for first, last in common.mm_req_doc_ranges.get(s, ())] for s in range(num_rows)]
    if common.seq_lens_cpu_upper_bound is not None:
        # Exact for prompts; no range lies after them.
        ends = common.seq_lens_cpu_upper_bound.tolist()
        lens = common.query_start_loc_cpu.diff().tolist()
        rows = [
            [pair for pair in pairs if pair[0] < end and end - length < pair[1]]
            for pairs, end, length in zip(rows, ends, lens, strict=True)
        ]
    most = max(map(len, rows), default=0)
    if not most:
        return None
    R = max(4, 1 << (most - 1).bit_length())
    device = common.seq_lens.device
    padded = [pairs + [(0, 0)] * (R - len(pairs)) for pairs in rows]
    table = torch.tensor(padded, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
