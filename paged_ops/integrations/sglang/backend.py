"""SGLang on paged_ops: an attention backend, loaded by SGLang as a plugin when both are installed.

::

    sglang serve --model-path MODEL --attention-backend paged_ops --page-size 16

A layer's cache is SGLang's: keys and values ``[slots, K, D]`` in two tensors, which the ops take as ``[N, B, K, D]``.
Block tables come from the first slot of each page in ``req_to_token``. Nothing waits for the device.

Letters: T tokens of the step, S requests, H query heads, K key/value heads, D head size, Dv value head size, N pages,
B tokens per page, M columns of the block tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from paged_ops.ops import paged_attention, reshape_and_cache
from paged_ops.support import supports

_PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)


class Places(NamedTuple):
    """Where one cache holds the tokens of a step."""

    block_tables: Tensor  # int32 [S, M], the pages of each request
    slots: Tensor  # int64 [T], of the step's own tokens


class Step(NamedTuple):
    """The tensors of one step that all layers read."""

    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S], with the tokens of the step
    places: tuple[Places, ...]  # in the cache, and in that of layers with a window if they have their own


class PagedOpsAttentionBackend(AttentionBackend):
    """Attention of decoders over SGLang's cache of keys and values, in prompts, decodes and CUDA graphs of decodes.

    Args:
        runner: the ``ModelRunner`` that creates it.

    Raises:
        ValueError: for what is not served: latent attention (MLA), encoders, speculative decoding, another kind of
            cache, a head size that the device does not have, deterministic inference where the device has no
            ``batch_invariant``.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        server = runner.server_args
        self._tokens, self._pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self._page_size, self._device = runner.page_size, self._tokens.req_to_token.device
        self._longest = runner.model_config.context_len
        self._attention_chunk = runner.attention_chunk_size or 0
        self.is_batch_invariant = bool(server.enable_deterministic_inference)
        if runner.use_mla_backend:
            _refuse("model", "attention with key/value heads", "latent attention (MLA)")
        if runner.model_config.is_encoder_decoder:
            _refuse("model", "a decoder", "an encoder and a decoder")
        if server.speculative_algorithm is not None:
            _refuse("--speculative-algorithm", "none", server.speculative_algorithm)
        pools = [self._pool]
        if type(self._pool) is SWAKVPool:
            pools = [self._pool.full_kv_pool, self._pool.swa_kv_pool]
        for pool in pools:
            layout = getattr(pool, "kv_cache_layout", None)
            if type(pool) is not MHATokenToKVPool or pool.is_quantized_kv_cache or layout not in (None, "nhd", "NHD"):
                _refuse("cache", "MHATokenToKVPool with tokens before heads", f"{type(pool).__name__}, layout {layout}")
        features: dict[str, Any] = {"batch_invariant": True} if self.is_batch_invariant else {}
        reasons = supports(
            "paged_attention", _device_name(self._device), head_size=runner.model_config.head_dim, **features
        )
        if reasons:
            _refuse("model", "what the ops serve", "; ".join(reasons))
        self._has_window_pool = len(pools) == 2
        self._step: Step | None = None
        self._captured: Step | None = None  # buffers of the largest batch, which graphs read
        self._served: set[int] = set()  # layers that passed _check_layer

    # A step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The tensors of a step that runs outside of CUDA graphs.

        Raises:
            ValueError: a kind of step that is not served, such as the verification of drafts.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        if mode.is_decode():
            starts = torch.arange(forward_batch.batch_size + 1, **ints)
        elif mode in _PROMPTS:
            starts = torch.zeros(forward_batch.batch_size + 1, **ints)
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
        else:
            _refuse("forward_mode", "EXTEND, MIXED or DECODE", mode.name)
        self._step = Step(starts, forward_batch.seq_lens.to(torch.int32), self._places(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what the graphs read, for up to ``max_bs`` requests."""
        M = -(-self._longest // self._page_size)
        ints = {"dtype": torch.int32, "device": self._device}
        places = tuple(
            Places(torch.zeros(max_bs, M, **ints), torch.zeros(max_num_tokens, dtype=torch.int64, device=self._device))
            for _ in range(1 + self._has_window_pool)
        )
        self._captured = Step(torch.arange(max_bs + 1, **ints), torch.zeros(max_bs, **ints), places)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers before a graph of decodes is captured or replayed.

        Raises:
            ValueError: a kind of step that is not served.
        """
        mode, buffers, S = forward_batch.forward_mode, self._captured, forward_batch.batch_size
        if not mode.is_decode_or_idle():
            _refuse("forward_mode", "DECODE in a CUDA graph", mode.name)
        assert buffers is not None, "init_cuda_graph_state"
        buffers.seq_lens[:S].copy_(forward_batch.seq_lens[:S])
        places = []
        for buffer, new in zip(buffers.places, self._places(forward_batch), strict=True):
            T, M = new.slots.shape[0], new.block_tables.shape[1]
            buffer.block_tables[:S, :M].copy_(new.block_tables)
            buffer.slots[:T].copy_(new.slots)
            places.append(Places(buffer.block_tables[:S], buffer.slots[:T]))
        self._step = Step(buffers.query_start_loc[: S + 1], buffers.seq_lens[:S], tuple(places))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a graph's batch."""
        return 1

    def _places(self, forward_batch: Any) -> tuple[Places, ...]:
        """Block tables and slots of the step, M from the longest length that the host knows."""
        lens, S = forward_batch.seq_lens_cpu, forward_batch.batch_size
        longest = self._longest if lens is None or not len(lens) else int(lens.max())
        firsts = self._tokens.req_to_token[:, :longest][:, :: self._page_size]
        # Past a request's pages, entries are of earlier requests: in the pool, and not read.
        firsts, slots = firsts[forward_batch.req_pool_indices[:S]], forward_batch.out_cache_loc
        places = [(firsts, slots)]
        if self._has_window_pool:
            # A token outside of all windows has no slot there any more. No row sees it, but its entry must be a page.
            to_window = self._pool.translate_loc_from_full_to_swa
            places.append((to_window(firsts).clamp_min(0), to_window(slots)))
        return tuple(Places((first // self._page_size).to(torch.int32), mine) for first, mine in places)

    # A layer

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """One token of each request: see :meth:`forward_extend`."""
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Store the step's keys and values, and attend.

        Args:
            q: ``[T, H·D]`` or ``[T, H, D]``.
            k, v: ``[T, K, D]``, ``[T, K, Dv]``; None if another layer stored them.
            layer: the ``RadixAttention``.
            forward_batch: the step, which :meth:`init_forward_metadata` has seen.
            save_kv_cache: whether to store k and v.
            sinks: ``[H]``, a logit per head that has no value.

        Returns:
            ``[T, H·Dv]``.

        Raises:
            ValueError: for a layer or an argument that is not served.
        """
        if layer.layer_id not in self._served:
            self._check_layer(layer)
        unknown = [name for name, value in kwargs.items() if value is not None and value is not False]
        if unknown:
            _refuse("attention", "q, k, v and sinks", ", ".join(unknown))
        step = self._step
        assert step is not None, "init_forward_metadata"
        in_window_pool = self._has_window_pool and self._pool.layers_mapping[layer.layer_id][1]
        block_tables, slots = step.places[int(in_window_pool)]
        key_cache, value_cache = (
            buffer.view(-1, self._page_size, *buffer.shape[1:]) for buffer in self._pool.get_kv_buffer(layer.layer_id)
        )
        k_scale, v_scale = (
            None if scale is None or key_cache.element_size() > 1 else scale.to(torch.float32).reshape(1)
            for scale in (layer.k_scale, layer.v_scale)
        )
        scales: dict[str, Any] = {"value_cache": value_cache, "k_scale": k_scale, "v_scale": v_scale}
        K, D, Dv = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        if save_kv_cache and k is not None and v is not None:
            # A padded prompt has fewer rows here than slots.
            reshape_and_cache(k.view(-1, K, D), v.view(-1, K, Dv), key_cache, slots[: k.shape[0]], **scales)
        out = paged_attention(
            q.reshape(-1, layer.tp_q_head_num, D),
            key_cache,
            block_tables,
            step.seq_lens,
            step.query_start_loc,
            float(layer.scaling),
            sliding_window=layer.sliding_window_size + 1,  # SGLang's number does not count the token itself
            attention_chunk=self._attention_chunk if layer.use_irope else 0,
            soft_cap=float(layer.logit_cap or 0.0),
            sinks=None if sinks is None else sinks.to(torch.float32),
            batch_invariant=self.is_batch_invariant,
            **scales,
        )
        return out.view(-1, layer.tp_q_head_num * Dv)

    def support_triton(self) -> bool:
        """Whether SGLang's own Triton kernels can be used next to it."""
        return self._device.type != "cpu"

    def _check_layer(self, layer: Any) -> None:
        """Refuse a layer that is not served, before anything is written."""
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            kind = "cross attention" if layer.is_cross_attention else layer.attn_type.value
            _refuse("attn_type", AttentionType.DECODER.value, kind)
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            _refuse("logit_capping_method", "tanh", layer.logit_capping_method)
        if layer.pos_encoding_mode != "NONE":
            _refuse("pos_encoding_mode", "NONE", layer.pos_encoding_mode)
        if layer.xai_temperature_len > 0:
            _refuse("xai_temperature_len", "none", layer.xai_temperature_len)
        self._served.add(layer.layer_id)


def _refuse(name: str, expected: Any, got: Any) -> NoReturn:
    raise ValueError(
        f"{name}: the attention backend paged_ops expected {expected}, got {got}; choose another --attention-backend"
    )


def _device_name(device: torch.device) -> str:
    """The name that :func:`paged_ops.supports` takes."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type
