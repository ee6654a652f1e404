"""Latent attention (MLA) of vLLM's models on paged_ops: DeepSeek-V2, V3 and R1, Kimi-K2 and their relatives.

vLLM's layer projects, absorbs and expands. It divides the rows of a step: the first ones attend in the absorbed form
(``forward_mqa``), the others by keys and values of all heads (``forward_mha``). Here ``forward_mqa`` serves any ragged
batch of decodes, drafts, prompts and chunks. ``forward_mha`` serves long prompts at the end of a step, where expanding
them saves time (:mod:`paged_ops.integrations.expanded`). Latents are cached as the engine stores them:
``[N, B, R + P]``, or ``[N, B, 656]`` as ``fp8_ds_mla``.

Letters: T tokens of the step, S sequences, H query heads, R latent size, P rotated size, Dn and Dv sizes of the heads'
own keys (without the rotated part) and values, N blocks, B tokens per block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MLAAttentionImpl

from paged_ops.integrations import expanded
from paged_ops.integrations.expanded import Batch, Run, Sizes
from paged_ops.integrations.vllm import plugin as vllm_plugin
from paged_ops.integrations.vllm.backend import MODEL_DTYPES, CompilesAhead, PagedOpsBackend, device
from paged_ops.integrations.vllm.metadata import PagedOpsMetadata, PagedOpsMetadataBuilder
from paged_ops.layouts import FP8_DS_MLA, ROW_BYTES, ROW_LATENT, ROW_ROTATED, Layout
from paged_ops.ops import latent_cache_write, paged_attention
from paged_ops.support import supports

_FP8 = ("fp8", "fp8_e4m3")


class PagedOpsMLABackend(PagedOpsBackend):
    """What the engine asks before it chooses a backend for layers with latents."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *MODEL_DTYPES, *_FP8, FP8_DS_MLA]

    @staticmethod
    def get_impl_cls() -> type[PagedOpsMLAImpl]:
        """The attention of a layer."""
        return PagedOpsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PagedOpsMLAMetadataBuilder]:
        """The metadata of a step."""
        return PagedOpsMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """``[N, B, R + P]``. Asked for before 0.29; later versions allocate the same."""
        return num_blocks, block_size, ROW_BYTES if cache_dtype_str == FP8_DS_MLA else head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of these dimensions in memory. Before 0.29."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def is_mla(cls) -> bool:
        """Layers with latents: these alone."""
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the ops serve R + P on this device."""
        return not supports("paged_attention", device(), layout=Layout.LATENT, head_size=head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks: no."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows: no."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Tokens of an image that see each other: no."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """``VLLM_BATCH_INVARIANT=1``: yes, where the op has it; all rows are absorbed then."""
        return not supports("paged_attention", device(), layout=Layout.LATENT, batch_invariant=True)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A latent belongs to no head."""
        return False

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """The reasons why this backend cannot serve a layer; empty if it can."""
        reasons = super().validate_configuration(**configuration)
        if configuration.get("use_dcp"):
            reasons.append("DCP with MLA not supported")
        if configuration.get("kv_cache_dtype") == FP8_DS_MLA:
            head_size = configuration["head_size"]
            if head_size != ROW_LATENT + ROW_ROTATED:
                reasons.append(f"an {FP8_DS_MLA} cache with head_size {head_size} not supported")
        return reasons


@dataclass
class PagedOpsMLAMetadata(PagedOpsMetadata):
    """The metadata of one step, divided as vLLM's layer wants it.

    Attributes:
        num_decodes, num_decode_tokens: the sequences and rows that are absorbed; padding included.
        num_prefills: the sequences after them, which are expanded.
        decode: the absorbed sequences.
        runs: the expanded sequences: their rows, counted from the first expanded one, their windows, and them.
        prefill: None; what vLLM's own prefill would read.
    """

    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    decode: Batch | None = None
    runs: tuple[tuple[Run, Batch], ...] = ()
    prefill: None = None


class PagedOpsMLAMetadataBuilder(PagedOpsMetadataBuilder):
    """Passes the engine's tensors on, and finds the prompts to expand, from lengths on the host."""

    # A captured step of prompts would keep the choice of the step that was captured.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._sizes = Sizes(layer.num_heads, layer.kv_lora_rank, layer.qk_nope_head_dim, layer.v_head_dim)
        self._expands = not vllm_plugin.is_batch_invariant()
        # The engine puts requests with more tokens last.
        self.reorder_batch_threshold = expanded.FEWEST_TOKENS - 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedOpsMLAMetadata:
        """The metadata of one step for the layers of one group.

        Raises:
            ValueError: causality differs between requests.
        """
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise ValueError("causal: expected True or False for all requests of a step, got one value per request")
        step = PagedOpsMLAMetadata(**vars(super().build(common_prefix_len, common, fast_build)))
        tensors = common.block_table_tensor, common.seq_lens, common.query_start_loc
        step.num_decodes, step.num_decode_tokens = len(common.seq_lens), common.num_actual_tokens
        if self._may_expand(common):
            assert common.seq_lens_cpu_upper_bound is not None  # exact for prompts
            starts, lens = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
            new = [end - start for start, end in itertools.pairwise(starts)]
            S = max(s + 1 for s, count in enumerate(new) if count)  # later ones are padding
            first = expanded.first_expanded(new[:S], lens, self._sizes)
            if first < S:
                of_step = range(first, S), starts, lens[:S], self._sizes.H, self.kv_cache_spec.block_size
                runs = [run for run in expanded.runs_of(*of_step) if run.windows]
                step.runs = tuple((run, expanded.batch_of(run, *tensors)) for run in runs)
                step.num_decodes, step.num_decode_tokens, step.num_prefills = first, starts[first], S - first
        first = step.num_decodes
        step.decode = Batch(tensors[0][:first], tensors[1][:first], tensors[2][: first + 1])
        return step

    def _may_expand(self, common: CommonAttentionMetadata) -> bool:
        """Whether any request has tokens enough, and lengths are known on the host."""
        is_long = common.max_query_len >= expanded.FEWEST_TOKENS and common.causal is True
        return self._expands and is_long and common.seq_lens_cpu_upper_bound is not None


class PagedOpsMLAImpl(MLAAttentionImpl[PagedOpsMLAMetadata], CompilesAhead):
    """The attention of one layer. Arguments as vLLM's ``MLAAttention`` gives them.

    Args:
        num_heads, head_size, scale: H on this rank, R + P, the factor of the logits.
        num_kv_heads: 1.
        alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name, indexer: none of these.
        kv_cache_dtype: ``"auto"``, the model's dtype, ``"fp8"`` (e4m3, one scale), or ``"fp8_ds_mla"``.
        attn_type: ``"decoder"``.
        q_lora_rank, qk_head_dim: not used.
        kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim: R, P, Dn, Dv.
        kv_b_proj: the linear layer that expands latents to ``[n, H (Dn + Dv)]``.

    Raises:
        NotImplementedError: for another kind of attention.
    """

    supports_dcp: bool = False
    supports_pcp: bool = False
    supports_quant_query_input: bool = False  # queries stay in the model's dtype

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        refused = {
            "attn_type": (attn_type != AttentionType.DECODER, attn_type),
            "alibi_slopes": (alibi_slopes is not None, alibi_slopes),
            "sliding_window": (bool(sliding_window), sliding_window),
            "logits_soft_cap": (bool(logits_soft_cap), logits_soft_cap),
            "kv_sharing_target_layer_name": (kv_sharing_target_layer_name is not None, kv_sharing_target_layer_name),
            "indexer": (indexer is not None, type(indexer).__name__),
            "decode_context_parallel_size": (self.dcp_world_size > 1, self.dcp_world_size),
        }
        for name, (is_refused, got) in refused.items():
            if is_refused:
                raise NotImplementedError(f"{name}: not supported with latent attention (MLA), got {got!r}")
        if kv_cache_dtype == FP8_DS_MLA and (kv_lora_rank, qk_rope_head_dim) != (ROW_LATENT, ROW_ROTATED):
            raise NotImplementedError(
                f"kv_cache_dtype: {FP8_DS_MLA} needs a latent of {ROW_LATENT} and {ROW_ROTATED} rotated columns, got"
                f" {kv_lora_rank} and {qk_rope_head_dim}"
            )
        vllm_plugin.logger.info_once("Using %s attention backend of paged_ops for MLA.", vllm_plugin.name())
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), 1
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self.kv_b_proj, self.kv_cache_dtype = kv_b_proj, kv_cache_dtype
        self._stored_as = kv_cache_dtype if kv_cache_dtype in (*_FP8, FP8_DS_MLA) else "auto"
        self._batch_invariant = vllm_plugin.is_batch_invariant()
        self.prepare()

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write ``kv_c_normed [T', R]`` and ``k_pe [T', 1, P]`` to the slots ``[T]``; negative ones are padding."""
        if kv_cache.numel() == 0 or slot_mapping is None:  # the profiling run
            return
        storage = self._storage(k_scale)
        latent_cache_write(kv_c_normed, k_pe.flatten(1), kv_cache, slot_mapping.flatten(), **storage)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in the absorbed form: ``q [T', H, R + P]``, or its two parts, gives ``[T', H, R]`` and no lse."""
        kv_cache, query = kv_c_and_k_pe_cache, torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if kv_cache is not self._warm and self.can_warm_up(query, kv_cache):
            self.warm_up(query, kv_cache, layer._k_scale)
        return self._absorbed(query, kv_cache, attn_metadata.decode, layer._k_scale, attn_metadata.causal), None

    def _absorbed(self, query: Tensor, kv_cache: Tensor, batch: Batch, k_scale: Tensor, causal: bool) -> Tensor:
        return paged_attention(
            query,
            kv_cache,
            *batch,
            self.scale,
            causal=causal,
            value_head_size=self.kv_lora_rank,
            batch_invariant=self._batch_invariant,
            **self._storage(k_scale),
        )

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend by keys and values of all heads: ``q [T', H, Dn + P]`` into ``output [T', H Dv]``.

        All latents are read from the cache, those of the step (``kv_c_normed``, ``k_pe``) included.
        """
        assert output_scale is None, "asked for only with vLLM's own prefill metadata"
        out, end = output.view(-1, self.num_heads, self.v_head_dim), 0
        for run, batch in attn_metadata.runs:
            start, end = (row - attn_metadata.num_decode_tokens for row in run.rows)
            out[start:end] = self._by_heads(q[start:end], kv_c_and_k_pe_cache, batch, run.windows, k_scale)
        out[end:] = 0  # padding

    def _by_heads(
        self, rows: Tensor, kv_cache: Tensor, batch: Batch, windows: tuple[tuple[int, int], ...], k_scale: Tensor
    ) -> Tensor:
        of_run = rows, kv_cache, batch, windows, self.scale, self.v_head_dim
        return expanded.attend(*of_run, self._expand, self._storage(k_scale), {})

    def _expand(self, latents: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys ``[n, H, Dn + P]`` and values ``[n, H, Dv]`` of all heads from latents ``[n, R + P]``, by the model's
        own layer, whatever its weights are stored as."""
        R, Dn = self.kv_lora_rank, self.qk_nope_head_dim
        both = self.kv_b_proj(latents[:, :R])[0].unflatten(-1, (self.num_heads, Dn + self.v_head_dim))
        key[:, :, :Dn], key[:, :, Dn:], value[:] = both[:, :, :Dn], latents[:, None, R:], both[:, :, Dn:]

    def _storage(self, k_scale: Tensor) -> dict[str, Any]:
        """How the cache stores numbers, as the ops take it."""
        scale = k_scale.reshape(1) if self._stored_as in _FP8 else None
        return {"k_scale": scale, "kv_cache_dtype": self._stored_as}

    def warm_up(self, query: Tensor, kv_cache: Tensor, k_scale: Tensor) -> None:
        """Compile the kernels of the engine's steps, absorbed and expanded: see :class:`CompilesAhead`."""

        def absorb(T: int, *batch: Tensor) -> None:
            self._absorbed(query.new_empty(T, *query.shape[1:]), kv_cache, Batch(*batch), k_scale, True)

        def expand(T: int, *batch: Tensor) -> None:
            rows = query.new_empty(T, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
            self._by_heads(rows, kv_cache, Batch(*batch), ((0, T),), k_scale)

        self.compile_ahead(kv_cache, absorb, *(() if self._batch_invariant else (expand,)))
