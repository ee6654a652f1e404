"""vLLM on paged_ops: an attention backend, loaded by vLLM as a plugin when both are installed.

::

    vllm serve MODEL --attention-backend PAGED_OPS      # vLLM 0.26 allows no new names: CUSTOM

The engine's metadata is used directly: block tables, lengths, query starts and slots are tensors on the device, and
nothing is planned on the host. The cache is the engine's: ``[N, K, B, D + Dv]`` with a head's key and value next to
each other, in any memory order; the ops take two views of it. Versions 0.26 to 0.33;
:mod:`paged_ops.integrations.vllm.plugin` has their differences.

Letters: T tokens of the step, S sequences, H query heads, K key/value heads, D head size, Dv value head size, N blocks,
B tokens per block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
)

from paged_ops.integrations.vllm import plugin as vllm_plugin
from paged_ops.integrations.vllm.metadata import PagedOpsMetadata, PagedOpsMetadataBuilder
from paged_ops.lowerings.warm_up import Ahead, prepare
from paged_ops.ops import reshape_and_cache
from paged_ops.parallel.context import attend_with_gathered_heads
from paged_ops.parallel.exchange import Exchange
from paged_ops.support import supports

MODEL_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_attend = torch.ops.paged_ops.paged_attention.out
_attend_by_cascade = torch.ops.paged_ops.cascade_attention.out


class PagedOpsBackend(AttentionBackend):
    """What the engine asks before it chooses a backend. What is not served is refused here, never in a step."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *MODEL_DTYPES, *_FP8]

    @staticmethod
    def get_name() -> str:
        """The member of ``AttentionBackendEnum`` that this backend is."""
        return vllm_plugin.name()

    @staticmethod
    def get_impl_cls() -> type[PagedOpsImpl]:
        """The attention of a layer."""
        return PagedOpsImpl

    @staticmethod
    def get_builder_cls() -> type[PagedOpsMetadataBuilder]:
        """The metadata of a step."""
        return PagedOpsMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """``[N, K, B, 2·D]``: a head's key, then its value. Asked for before 0.29; later versions allocate the same."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of these dimensions in memory, with the layers first if asked for. Before 0.29."""
        if vllm_plugin.heads_first():
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the ops serve it on this device."""
        return not supports("paged_attention", device(), head_size=head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks (gpt-oss): yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows: yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention to later tokens of the batch: yes, without a window."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Tokens of an image that see each other (Gemma-3, Gemma-4, PaliGemma): yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """``VLLM_BATCH_INVARIANT=1``: yes, where the op has it."""
        return not supports("paged_attention", device(), batch_invariant=True)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """An fp8 cache with a scale for each key/value head: yes."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only: encoders keep no paged cache."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """The reasons why this backend cannot serve a layer; empty if it can."""
        reasons = super().validate_configuration(**configuration)
        if configuration.get("use_non_causal") and configuration.get("has_sliding_window"):
            reasons.append("non-causal attention with a sliding window not supported")
        if configuration.get("use_dcp") and configuration.get("has_sliding_window"):
            reasons.append("DCP with a sliding window not supported")
        if configuration.get("use_dcp") and configuration.get("use_batch_invariant"):
            reasons.append("DCP with batch invariance not supported")
        dtype, kv_cache_dtype = configuration["dtype"], configuration.get("kv_cache_dtype")
        if kv_cache_dtype in MODEL_DTYPES and MODEL_DTYPES[kv_cache_dtype] != dtype:
            reasons.append(f"a {kv_cache_dtype} cache with a model in {dtype} not supported")
        capability = configuration.get("device_capability")
        is_fp8 = str(kv_cache_dtype).startswith("fp8")
        if is_fp8 and current_platform.is_cuda() and capability is not None and capability < (8, 9):
            reasons.append("an fp8 cache before compute capability 8.9 not supported")
        return reasons


class CompilesAhead:
    """For the attention of a layer: its kernels are compiled before the engine takes requests.

    The engine runs the model with its cache before that. The attention calls :meth:`compile_ahead` then, so no request
    waits for a compiler; Triton caches the kernels for later starts. All ranks do so in the same step.
    """

    _warm: Tensor | None = None  # the cache that kernels were compiled for

    def prepare(self) -> None:
        """Start what compiles, which takes seconds, while the model is loaded."""
        self._largest_batch = vllm_plugin.largest_batch()
        if self._largest_batch is not None and current_platform.is_cuda():
            prepare()

    def can_warm_up(self, query: Tensor, kv_cache: Tensor) -> bool:
        """Whether this is a GPU with a cache, outside of a capture, and the stride of rows is known."""
        if self._largest_batch is None or not query.is_cuda or not kv_cache.numel() or query.shape[0] == 1:
            return False
        from paged_ops.lowerings.gpu.target import capturing

        return not capturing(query.device)

    def compile_ahead(self, kv_cache: Tensor, *calls: Callable[[int, Tensor, Tensor, Tensor], Any]) -> None:
        """Compile and load the kernels of the engine's steps: see :func:`paged_ops.warm_up`.

        Args:
            kv_cache: the engine's.
            calls: each attends to it, given a number of rows, block tables, lengths and query starts.
        """
        assert self._largest_batch is not None
        most_tokens, most_sequences = self._largest_batch
        T, S = min(7, most_tokens), min(3, most_sequences)
        nothing = torch.zeros(S + 1, dtype=torch.int32, device=kv_cache.device)
        attends = [functools.partial(call, T, nothing[:S, None], nothing[:S], nothing) for call in calls]
        ahead = Ahead(attends, max_num_tokens=most_tokens, max_num_seqs=most_sequences, equal_lengths=True)
        report = ahead.finish()
        if report.compiled or report.errors:  # else another layer has asked for the same
            vllm_plugin.logger.info("Kernels of paged_ops for steps of requests: %s.", report)
        self._warm = kv_cache


class PagedOpsImpl(AttentionImpl[PagedOpsMetadata], CompilesAhead):
    """The attention of one layer. Arguments as vLLM's ``Attention`` gives them.

    Args:
        num_heads, head_size, scale, num_kv_heads: H, D, the factor of the logits, K, on this rank.
        alibi_slopes: H numbers.
        sliding_window: tokens that a token sees, including itself.
        kv_cache_dtype: ``"auto"``, the model's dtype, or an fp8 dtype.
        logits_soft_cap: soft cap of the logits.
        attn_type: ``"decoder"``.
        kv_sharing_target_layer_name: the layer whose cache is read; the engine then writes no cache for this layer.
        sinks: ``[H]``, a parameter of the model.
        chunk_lookback: -1. Layers that see the chunk before their own (Rnj-1) need ``TRITON_ATTN``.

    Raises:
        NotImplementedError: for another kind of attention.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        chunk_lookback: int = -1,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: expected {AttentionType.DECODER.value!r}, got {attn_type!r}")
        if chunk_lookback != -1:
            raise NotImplementedError(
                f"chunk_lookback: expected -1, got {chunk_lookback}: choose TRITON_ATTN for these layers, by"
                " backend_per_kind={'sliding_window': 'TRITON_ATTN'} of the attention config"
            )
        if self.dcp_world_size > 1 and (sliding_window or alibi_slopes is not None):
            raise NotImplementedError(
                "decode_context_parallel_size: expected 1 for layers with a window or ALiBi, which need positions in"
                f" the whole context, got {self.dcp_world_size}"
            )
        vllm_plugin.logger.info_once("Using %s attention backend of paged_ops.", vllm_plugin.name())
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window or 0
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._batch_invariant = vllm_plugin.is_batch_invariant()
        self._stored_as = kv_cache_dtype if kv_cache_dtype in _FP8 else "auto"
        self._cache: Tensor | None = None
        self.prepare()
        self._sinks: Tensor | None = None
        self._slopes: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Converts sinks to float32, which the op takes, once instead of in each step."""
        self._sinks = None if self.sinks is None else self.sinks.detach().to(torch.float32)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Output in float8_e4m3fn by one scale can be fused, but not if ranks still merge their results."""
        return self.dcp_world_size == 1 and quant_key == kFp8StaticTensorSym

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedOpsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend: ``query [T', H, D]`` over the cache, into ``output [T', H, Dv]``; T' is T or more.

        ``attn_metadata`` is None in the profiling run, before there is a cache. ``key`` and ``value`` are already in
        the cache.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: expected none, because output has one scale, got a tensor")
        exchange = None if attn_metadata is None else attn_metadata.exchange
        is_known = self.dcp_world_size == 1 or exchange is not None
        if kv_cache is not self._warm and is_known and self.can_warm_up(query, kv_cache):
            self.warm_up(layer, query, key, value, kv_cache, output, output_scale, exchange)
        if attn_metadata is None:
            return output.fill_(0)
        self._attend(layer, query, key, value, kv_cache, attn_metadata, output, output_scale)
        return output

    def _attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedOpsMetadata,
        output: Tensor,
        output_scale: Tensor | None,
    ) -> None:
        T = attn_metadata.num_actual_tokens
        rows, out = (query, output) if query.shape[0] == T else (query[:T], output[:T])
        key_cache, value_cache = self._views(kv_cache)
        k_scale, v_scale = self._scales(layer)
        scale_of_output = None if output_scale is None else output_scale.reshape(1)
        if attn_metadata.exchange is not None:
            attend_with_gathered_heads(
                rows,
                key[:T],
                value[:T],
                key_cache,
                attn_metadata.block_table,
                attn_metadata.lens,
                attn_metadata.query_start_loc,
                attn_metadata.max_query_len,
                self.scale,
                attn_metadata.exchange,
                value_cache=value_cache,
                causal=attn_metadata.causal,
                sinks=self._sinks,
                soft_cap=self.logits_soft_cap,
                k_scale=k_scale,
                v_scale=v_scale,
                kv_cache_dtype=self._stored_as,
                out=out,
            )
            return
        # A group may have layers with and without a window; all have full block tables.
        ranges = attn_metadata.mm_prefix_range_tensor
        in_window = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        if attn_metadata.bidirectional_requests is not None:
            ranges = self._with_requests(ranges, in_window, attn_metadata)
            in_window = True
        plain = not self.sliding_window and self._slopes is None and ranges is None and not self._batch_invariant
        if attn_metadata.prefix is not None and plain:
            _attend_by_cascade(
                rows,
                key_cache,
                *attn_metadata.prefix,
                attn_metadata.query_start_loc,
                self.scale,
                value_cache=value_cache,
                soft_cap=self.logits_soft_cap,
                sinks=self._sinks,
                k_scale=k_scale,
                v_scale=v_scale,
                output_scale=scale_of_output,
                kv_cache_dtype=self._stored_as,
                out=out,
            )
            return
        _attend(
            rows,
            key_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            self.scale,
            value_cache=value_cache,
            causal=attn_metadata.causal,
            sliding_window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            alibi_slopes=self._slopes,
            sinks=self._sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            output_scale=scale_of_output,
            kv_cache_dtype=self._stored_as,
            bidirectional_ranges=ranges,
            ranges_in_window=ranges is not None and in_window,
            batch_invariant=self._batch_invariant,
            out=out,
        )

    def _with_requests(self, ranges: Tensor | None, in_window: bool, attn_metadata: PagedOpsMetadata) -> Tensor:
        """The ranges of images, and a range over each request whose tokens see later ones. Within a window, that is the
        same as a window to both sides, if it is not shorter than the request's rows."""
        requests, window = attn_metadata.bidirectional_requests, self.sliding_window
        assert requests is not None
        if 0 < window < attn_metadata.max_query_len:
            raise ValueError(
                f"causal: expected at most {window} tokens per request, the window, where causality differs between"
                f" requests, got {attn_metadata.max_query_len}"
            )
        if ranges is None:
            return requests
        if window and not in_window:
            raise ValueError(
                "causal: expected True or False for all requests of a step with images whose tokens see each other"
                " beyond a window, got one value per request"
            )
        return torch.cat([ranges, requests], dim=1)

    def warm_up(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Compile the kernels of the engine's steps: see :class:`CompilesAhead`. With an ``exchange``, decodes, whole
        prompts and other steps have kernels of their own."""

        def attend(
            T: int, tables: Tensor, lens: Tensor, starts: Tensor, most: int = 1, has_history: bool = True
        ) -> None:
            used = (query, output) if exchange is None else (query, output, key, value)
            rows, out, *own = (each.new_empty_strided((T, *each.shape[1:]), each.stride()) for each in used)
            keys, values = own or (rows[:0], rows[:0])
            no_slots = torch.empty(0, dtype=torch.int64, device=query.device)
            step = PagedOpsMetadata(T, starts, lens, tables, no_slots, exchange=exchange, max_query_len=most)
            step.lens = lens if exchange is not None and has_history else None
            self._attend(layer, rows, keys, values, kv_cache, step, out, output_scale)

        of_ranks = functools.partial(attend, most=2), functools.partial(attend, most=2, has_history=False)
        self.compile_ahead(kv_cache, attend, *(() if exchange is None else of_ranks))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write ``key [T', K, D]`` and ``value [T', K, Dv]`` to the slots ``[T]``; negative ones are padding."""
        key_cache, value_cache = self._views(kv_cache)
        k_scale, v_scale = self._scales(layer)
        reshape_and_cache(
            key,
            value,
            key_cache,
            slot_mapping,
            value_cache=value_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=self._stored_as,
        )

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The keys ``[N, B, K, D]`` and the values ``[N, B, K, Dv]`` of the engine's ``[N, K, B, D + Dv]``."""
        if kv_cache is not self._cache:
            keys_and_values = kv_cache.transpose(1, 2)
            D = self.head_size
            self._key_cache, self._value_cache = keys_and_values[..., :D], keys_and_values[..., D:]
            self._cache = kv_cache
            if self.alibi_slopes is not None:
                self._slopes = torch.as_tensor(self.alibi_slopes, dtype=torch.float32, device=kv_cache.device)
        return self._key_cache, self._value_cache

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        if self._stored_as == "auto":
            return None, None
        return layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)


def device() -> str:
    """The engine's device, as a name for :func:`paged_ops.supports`."""
    return "rocm" if current_platform.is_rocm() else current_platform.device_type
