"""The backend's classes with vLLM's own metadata and cache layouts, against dense attention in float64. No engine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import itertools
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor
from vllm.config import AttentionConfig, CUDAGraphMode
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from paged_ops.integrations.vllm import backend as vllm
from paged_ops.integrations.vllm import plugin as vllm_plugin
from paged_ops.integrations.vllm.backend import PagedOpsBackend, PagedOpsImpl, PagedOpsMetadataBuilder
from paged_ops.lowerings.warm_up import WarmUp
from paged_ops.parallel.exchange import Exchange

H, K, D, B, N = 4, 2, 16, 8, 64
QUERY_LENS, SEQ_LENS = [1, 5, 3, 12], [30, 5, 17, 41]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "soft_cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {
        "sliding_window": 9,
        "logits_soft_cap": 3.0,
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}
# Orders of [L, B, H, N, C] in memory: those of vLLM's KVCacheLayout, by its names.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


class Step:
    """A batch of four sequences with history, its metadata, and a cache in one of vLLM's layouts."""

    def __init__(self, layout: str = "LBHNC", value_size: int = D, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        S, T = len(SEQ_LENS), sum(QUERY_LENS)
        order = LAYOUTS[layout]
        shape = (2, N, K, B, D + value_size)
        storage = torch.full([shape[i] for i in order], float("nan")).to(dtype)
        self.kv_cache = storage.permute([order.index(i) for i in range(5)])[1]
        self.block_table = torch.randperm(N, generator=generator, dtype=torch.int32)[: S * 6].view(S, 6)
        self.keys = [torch.randn(n, K, D, generator=generator) for n in SEQ_LENS]
        self.values = [torch.randn(n, K, value_size, generator=generator) for n in SEQ_LENS]
        self.query = torch.randn(T + 3, H, D, generator=generator)
        self.slots = [
            torch.tensor([int(self.block_table[s, j // B]) * B + j % B for j in range(n)])
            for s, n in enumerate(SEQ_LENS)
        ]
        starts = torch.tensor([0, *QUERY_LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
            num_reqs=S,
            num_actual_tokens=T,
            max_query_len=max(QUERY_LENS),
            max_seq_len=max(SEQ_LENS),
            block_table_tensor=self.block_table,
            slot_mapping=torch.cat(
                [slots[n - q :] for slots, q, n in zip(self.slots, QUERY_LENS, SEQ_LENS, strict=True)]
            ),
        )

    def write(self, impl: PagedOpsImpl, layer: Any) -> None:
        """History first, then this step's tokens, with padding."""
        for start_of, end_of in ((lambda q, n: 0, lambda q, n: n - q), (lambda q, n: n - q, lambda q, n: n)):
            parts = [
                (
                    keys[start_of(q, n) : end_of(q, n)],
                    values[start_of(q, n) : end_of(q, n)],
                    slots[start_of(q, n) : end_of(q, n)],
                )
                for keys, values, slots, q, n in zip(
                    self.keys, self.values, self.slots, QUERY_LENS, SEQ_LENS, strict=True
                )
            ]
            keys, values, slots = (torch.cat(part) for part in zip(*parts, strict=True))
            padding = torch.full((2,), -1)
            pad = torch.full((2, K, 1), float("nan"))
            impl.do_kv_cache_update(
                layer,
                torch.cat([keys, pad.expand(-1, -1, D)]),
                torch.cat([values, pad.expand(-1, -1, values.shape[-1])]),
                self.kv_cache,
                torch.cat([slots, padding]),
            )

    def expected(
        self,
        causal: bool = True,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: list[float] | None = None,
        sinks: Tensor | None = None,
        ranges: dict[int, list[tuple[int, int]]] | None = None,
        chunk: int | None = None,
        clamp: bool = False,
    ) -> Tensor:
        """Dense attention in float64; ranges as vLLM gives them, first and last token; clamped: inside the window to
        both sides."""
        rows, start = [], 0
        for s, (keys, values, q, n) in enumerate(zip(self.keys, self.values, QUERY_LENS, SEQ_LENS, strict=True)):
            query = self.query[start : start + q].double()
            start += q
            k, v = (x.double().repeat_interleave(H // K, dim=1) for x in (keys, values))
            logits = torch.einsum("qhd,jhd->hqj", query, k) * D**-0.5
            if logits_soft_cap:
                logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
            i, j = torch.arange(n - q, n)[:, None], torch.arange(n)[None]
            if alibi_slopes is not None:
                logits = logits + torch.tensor(alibi_slopes).double()[:, None, None] * (j - i)
            seen = (j <= i) if causal else torch.ones(q, n, dtype=torch.bool)
            if sliding_window is not None:
                seen = seen & (i - j < sliding_window)
            if chunk is not None:
                seen = seen & (i // chunk == j // chunk)
            for first, last in (ranges or {}).get(s, ()):
                both = (first <= i) & (i <= last) & (first <= j) & (j <= last)
                seen = seen | (both & (i - j < (sliding_window or n)) if clamp else both)
            logits = logits.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, q, 1)], dim=-1)
            weights = torch.softmax(logits, dim=-1)[..., :n]
            rows.append(torch.einsum("hqj,jhd->qhd", weights, v))
        return torch.cat(rows)


def make(kv_cache_dtype: str = "auto", **features: Any) -> tuple[PagedOpsImpl, Any]:
    """An implementation after its weights are loaded, and its layer's scales."""
    positional = [features.pop(name, None) for name in ("alibi_slopes", "sliding_window")]
    impl = PagedOpsImpl(
        H, D, D**-0.5, K, *positional, kv_cache_dtype, features.pop("logits_soft_cap", None), **features
    )
    impl.process_weights_after_loading(torch.float32)
    return impl, SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))


def build(common: CommonAttentionMetadata) -> Any:
    """The metadata of a step, by a builder."""
    builder = PagedOpsMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    return builder.build(common_prefix_len=0, common_attn_metadata=common)


def attend(step: Step, impl: PagedOpsImpl, layer: Any, **options: Any) -> Tensor:
    """The rows of the step; rows past them must stay as they are."""
    output = torch.full((step.query.shape[0], H, step.values[0].shape[-1]), 7.0)
    nothing = torch.empty(0)
    returned = impl.forward(layer, step.query, nothing, nothing, step.kv_cache, build(step.common), output, **options)
    assert returned is output
    T = step.common.num_actual_tokens
    assert (output[T:] == 7.0).all()
    return output[:T]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("features", list(FEATURES))
def test_a_step_is_dense_attention(features: str, layout: str) -> None:
    step = Step(layout)
    impl, layer = make(**FEATURES[features])
    step.write(impl, layer)
    torch.testing.assert_close(
        attend(step, impl, layer).double(), step.expected(**FEATURES[features]), atol=1e-5, rtol=1e-5
    )


def test_values_of_another_size() -> None:
    step = Step("LBNHC", value_size=24)
    impl, layer = make()
    step.write(impl, layer)
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)


def test_later_tokens_are_seen_where_the_step_is_not_causal() -> None:
    step = Step()
    step.common.causal = False
    impl, layer = make()
    step.write(impl, layer)
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(causal=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("storage", ["uint8", "float8"])
def test_fp8_cache_with_scales(name: str, dtype: torch.dtype, storage: str) -> None:
    step = Step(dtype=dtype)
    if storage == "uint8":
        step.kv_cache = step.kv_cache.view(torch.uint8)
    impl, layer = make(name)
    step.write(impl, layer)
    step.keys = [(keys / 0.5).to(dtype).float() * 0.5 for keys in step.keys]
    step.values = [(values / 0.25).to(dtype).float() * 0.25 for values in step.values]
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)


def test_fp8_output() -> None:
    step = Step()
    impl, layer = make()
    step.write(impl, layer)
    output = torch.zeros(step.query.shape[0], H, D, dtype=torch.float8_e4m3fn)
    impl.forward(layer, step.query, None, None, step.kv_cache, build(step.common), output, torch.tensor(0.125))
    expected = (step.expected() / 0.125).clamp(-448, 448)
    torch.testing.assert_close(output[: len(expected)].double(), expected, atol=0.04, rtol=0.07)


def test_profiling_run_gives_zeros_and_touches_no_cache() -> None:
    impl, layer = make()
    output = torch.full((3, H, D), float("nan"))
    impl.forward(layer, torch.zeros(3, H, D), None, None, torch.tensor([]), None, output)
    assert (output == 0).all()


@pytest.mark.parametrize("padding", [16, 40, 1024])
def test_pages_with_padding(padding: int) -> None:
    """Layers of several kinds share pages of one size: a block of this one ends before its page does."""
    step, (impl, layer) = Step(), make()
    page = K * B * 2 * D + padding
    storage = torch.full((N * page,), float("nan"))
    step.kv_cache = storage.as_strided((N, K, B, 2 * D), (page, 2 * D, K * 2 * D, 1), storage_offset=0)
    step.write(impl, layer)
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert storage.view(N, page)[:, page - padding :].isnan().all()


def test_a_layer_reads_what_another_wrote() -> None:
    """The engine hands the first layer's cache to both, and writes once."""
    step, (writer, layer) = Step(), make()
    step.write(writer, layer)
    reader, _ = make(kv_sharing_target_layer_name="layers.0")
    before = step.kv_cache.clone()
    torch.testing.assert_close(attend(step, reader, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step.kv_cache, before, atol=0, rtol=0, equal_nan=True)


def test_another_cache_is_noticed() -> None:
    impl, layer = make()
    first, second = Step("LBHNC"), Step("BLNHC")
    for step in (first, second, first):
        step.write(impl, layer)
        torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)


def test_groups_with_other_blocks_share_a_step() -> None:
    step = Step()
    builder = PagedOpsMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    metadata = builder.build(0, step.common)
    other = builder.update_block_table(metadata, step.block_table + 1, step.common.slot_mapping + 1)
    assert (other.block_table == metadata.block_table + 1).all()
    assert (other.slot_mapping == metadata.slot_mapping + 1).all()
    assert other.seq_lens is metadata.seq_lens is step.common.seq_lens


SPEC: dict[str, Any] = {"block_size": B, "num_kv_heads": K, "head_size": D, "dtype": torch.float32}


def engine_with_cascade(switch: bool = True, most: int = 16) -> Any:
    """The configuration of an engine of which cascade attention is asked, or not."""
    return SimpleNamespace(
        additional_config={"paged_ops_cascade": switch},
        scheduler_config=SimpleNamespace(max_num_seqs=most),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: H, max_model_len=4096),
        parallel_config=None,
    )


def builder_with_cascade(switch: bool = True, spec: Any = None) -> PagedOpsMetadataBuilder:
    """A builder of such an engine; prefixes of 16 tokens are long enough."""
    config = engine_with_cascade(switch)
    builder = PagedOpsMetadataBuilder(spec or FullAttentionSpec(**SPEC), ["layer"], config, torch.device("cpu"))
    if builder._finder is not None:
        builder._finder._least_tokens = 16
    return builder


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Step:
    """Ten sequences of which all begin with the same 24 tokens, but for two of 24 that read no more than 16 of them."""
    query_lens, seq_lens = [1, 5, 3, 12, 1, 1, 8, 1, 1, 1], [30, 45, 27, 41, 33, 25, 24, 44, 39, 26]
    monkeypatch.setitem(globals(), "QUERY_LENS", query_lens)
    monkeypatch.setitem(globals(), "SEQ_LENS", seq_lens)
    step = Step()
    for s, n in enumerate(seq_lens):
        step.block_table[s, :3] = step.block_table[0, :3]
        step.keys[s][:24], step.values[s][:24] = step.keys[0][:24], step.values[0][:24]
        step.slots[s] = torch.tensor([int(step.block_table[s, j // B]) * B + j % B for j in range(n)])
    step.common.slot_mapping = torch.cat(
        [slots[n - q :] for slots, q, n in zip(step.slots, query_lens, seq_lens, strict=True)]
    )
    return step


@pytest.mark.parametrize("features", list(FEATURES))
def test_a_shared_prefix_is_attended_to_once(features: str, sharing: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window or ALiBi attend to all in one."""
    impl, layer = make(**FEATURES[features])
    sharing.write(impl, layer)
    metadata = builder_with_cascade().build(0, sharing.common)
    assert metadata.prefix.length.tolist() == [16]
    calls = []
    by_cascade = vllm._attend_by_cascade
    monkeypatch.setattr(vllm, "_attend_by_cascade", lambda *args, **kw: (calls.append(1), by_cascade(*args, **kw)))
    output = torch.zeros(sum(QUERY_LENS), H, D)
    impl.forward(layer, sharing.query[: len(output)], None, None, sharing.kv_cache, metadata, output)
    assert bool(calls) == (features not in ("window", "alibi", "all"))
    torch.testing.assert_close(output.double(), sharing.expected(**FEATURES[features]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("features", list(FEATURES))
def test_rows_of_a_batch_invariant_engine_have_the_bits_that_they_have_alone(
    features: str, sharing: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a prefix is shared, which is then not read at once."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    asked, attend_ = [], vllm._attend
    monkeypatch.setattr(vllm, "_attend", lambda *a, **kw: (asked.append(kw["batch_invariant"]), attend_(*a, **kw))[1])
    impl, layer = make(**FEATURES[features])
    sharing.write(impl, layer)
    common, starts = sharing.common, sharing.common.query_start_loc.tolist()
    together = torch.zeros(sum(QUERY_LENS), H, D)
    metadata = builder_with_cascade().build(0, common)
    assert metadata.prefix is not None
    impl.forward(layer, sharing.query[: len(together)], None, None, sharing.kv_cache, metadata, together)
    for s, (first, last) in enumerate(itertools.pairwise(starts)):
        own = torch.tensor([0, last - first], dtype=torch.int32)
        alone = dataclasses.replace(
            common,
            query_start_loc=own,
            query_start_loc_cpu=own,
            seq_lens=common.seq_lens[s : s + 1],
            num_reqs=1,
            num_actual_tokens=last - first,
            block_table_tensor=common.block_table_tensor[s : s + 1],
            slot_mapping=common.slot_mapping[first:last],
        )
        row = torch.zeros(last - first, H, D)
        impl.forward(layer, sharing.query[first:last], None, None, sharing.kv_cache, build(alone), row)
        assert torch.equal(row.view(torch.int32), together[first:last].view(torch.int32))
    assert asked == [True] * (1 + len(QUERY_LENS))
    torch.testing.assert_close(together.double(), sharing.expected(**FEATURES[features]), atol=1e-5, rtol=1e-5)


def test_a_graph_with_a_prefix_serves_steps_that_share_nothing(sharing: Step) -> None:
    """What it reads lies where it lay, and is made anew in each step, though no prefix would pay in that one."""
    impl, layer = make()
    sharing.write(impl, layer)
    builder = builder_with_cascade()
    captured = builder.build_for_cudagraph_capture(sharing.common)
    assert captured.prefix is not None
    block_table = sharing.block_table.clone()
    sharing.block_table[4, 0] = N  # no request begins so: nothing is shared any more
    fewer = sharing.common.query_start_loc_cpu.clone()
    fewer[5:] = fewer[5]
    later = builder.build(0, sharing.common.replace(query_start_loc_cpu=fewer))
    sharing.block_table.copy_(block_table)
    assert later.prefix is None  # five requests, and padding
    assert captured.prefix.length.tolist() == [0]
    output = torch.zeros(sum(QUERY_LENS), H, D)
    captured.prefix.suffix_block_tables.copy_(block_table)
    impl.forward(layer, sharing.query[: len(output)], None, None, sharing.kv_cache, captured, output)
    torch.testing.assert_close(output.double(), sharing.expected(), atol=1e-5, rtol=1e-5)


def test_prefixes_are_looked_for_only_where_asked(sharing: Step) -> None:
    assert builder_with_cascade(switch=False).build(0, sharing.common).prefix is None
    assert builder_with_cascade().build(0, Step().common.unpadded(4, 4)).prefix is None  # four requests
    sharing.common.causal = False
    assert builder_with_cascade().build(0, sharing.common).prefix is None
    assert not builder_with_cascade().use_cascade_attention(8192, [1] * 64)


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(**SPEC, sliding_window=8),
        FullAttentionSpec(**SPEC, sliding_window=8),
        ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=16),
        FullAttentionSpec(**SPEC, attention_chunk_size=16),
        SinkFullAttentionSpec(**SPEC, sink_len=8),
    ],
    ids=["window", "window as full", "chunks", "chunks as full", "static sinks"],
)
def test_prefixes_are_looked_for_only_in_full_attention(spec: Any, sharing: Step) -> None:
    assert builder_with_cascade(spec=spec).build(0, sharing.common).prefix is None


def test_chunks_have_more_rows_than_requests(sharing: Step) -> None:
    """vLLM makes a row of each chunk (Llama-4): ten requests are more rows here than a step may have requests."""
    chunk = 2 * B
    backend = create_chunked_local_attention_backend(PagedOpsBackend, chunk)
    spec, config = ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=chunk), engine_with_cascade(most=10)
    builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    impl, layer = make()
    sharing.write(impl, layer)
    metadata = builder.build(0, sharing.common)
    assert len(metadata.seq_lens) > 10
    output = torch.zeros(sum(QUERY_LENS), H, D)
    impl.forward(layer, sharing.query[: len(output)], None, None, sharing.kv_cache, metadata, output)
    torch.testing.assert_close(output.double(), sharing.expected(chunk=chunk), atol=1e-5, rtol=1e-5)


def test_drafted_steps_renew_what_is_behind_the_prefix(sharing: Step) -> None:
    builder = builder_with_cascade()
    metadata = builder.build(0, sharing.common)
    sharing.common.seq_lens.add_(1)
    builder.update_draft_decode_metadata(metadata)
    assert metadata.prefix.suffix_lens.tolist() == [n + 1 - 16 for n in SEQ_LENS]


def test_every_step_can_be_a_cuda_graph() -> None:
    assert PagedOpsMetadataBuilder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS
    step = Step()
    metadata = build(step.common)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert getattr(metadata, name).data_ptr() == getattr(step.common, name).data_ptr()
    assert metadata.block_table.data_ptr() == step.common.block_table_tensor.data_ptr()


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("window", [0, 12])
def test_causality_by_request(window: int, images: bool) -> None:
    """With a window, a request that is not causal sees as many tokens to both sides."""
    features = {"sliding_window": window} if window else {}
    step, (impl, layer) = Step(), make(**features)
    step.write(impl, layer)
    layer.mm_prefix_clamp_sliding_window = True
    builder = PagedOpsMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    if images:
        step.common.mm_req_doc_ranges = LONG_RANGES
    addresses = set()
    for causal in ([1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]):
        step.common.causal = torch.tensor(causal, dtype=torch.int32)
        metadata = builder.build(0, step.common)
        addresses.add(metadata.bidirectional_requests.data_ptr())
        output = torch.zeros(sum(QUERY_LENS), H, D)
        impl.forward(layer, step.query[: len(output)], None, None, step.kv_cache, metadata, output)
        whole = {s: [(0, n - 1)] for s, n in enumerate(SEQ_LENS) if not causal[s]}
        ranges = {s: [*whole.get(s, []), *(LONG_RANGES.get(s, []) if images else [])] for s in range(4)}
        expected = step.expected(**features, ranges=ranges, clamp=True)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert len(addresses) == 1, "captured graphs read it"


def test_causality_by_request_needs_a_window_as_long_as_the_step() -> None:
    step, (impl, layer) = Step(), make(sliding_window=11)
    step.common.causal = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"causal: expected at most 11 tokens per request, the window, .* got 12"):
        attend(step, impl, layer)
    step, (impl, layer) = Step(), make(sliding_window=12)
    step.common.causal, step.common.mm_req_doc_ranges = torch.ones(4, dtype=torch.int32), RANGES
    with pytest.raises(ValueError, match=r"causal: expected True or False .* with images"):
        attend(step, impl, layer)


def test_causality_by_request_is_refused_where_tokens_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "context_group", lambda: SimpleNamespace(world_size=2, rank_in_group=0))
    monkeypatch.setattr(vllm_plugin, "context_exchange", lambda *made_for: object())
    config = engine_with_cascade(False)
    config.parallel_config = SimpleNamespace(cp_kv_cache_interleave_size=1)
    config.compilation_config, config.num_speculative_tokens = SimpleNamespace(cudagraph_mode=None), 0
    builder, step = PagedOpsMetadataBuilder(FullAttentionSpec(**SPEC), ["layer"], config, torch.device("cpu")), Step()
    step.common.causal = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"causal: expected True or False .* with context parallelism"):
        builder.build(0, step.common)


def test_encoders_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="attn_type"):
        PagedOpsImpl(H, D, 1.0, K, attn_type="encoder_only")


def test_chunks_that_look_back_are_refused() -> None:
    """Rnj-1 passes the argument for each of its layers, -1 for those that have no chunks."""
    make(chunk_lookback=-1)
    with pytest.raises(NotImplementedError, match="chunk_lookback: expected -1, got 1: choose TRITON_ATTN"):
        make(chunk_lookback=1)


def test_the_log_says_once_which_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    engine_log = logging.getLogger("vllm")  # what vLLM shows
    before = engine_log.level
    engine_log.addHandler(handler)
    engine_log.setLevel(logging.INFO)
    try:
        monkeypatch.setattr(vllm_plugin, "name", lambda: "NAME")  # messages of other tests were shown once already
        for _ in range(2):
            make()
    finally:
        engine_log.removeHandler(handler)
        engine_log.setLevel(before)
    assert [record.getMessage() for record in records] == ["Using NAME attention backend of paged_ops."]
    assert records[0].levelno == logging.INFO


@pytest.mark.parametrize("size", [1, 4, 13, 20, 100, 256, 512])
def test_any_head_size_up_to_512(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "rocm", "cpu"):
        monkeypatch.setattr(vllm, "device", lambda device=device: device)
        assert PagedOpsBackend.supports_head_size(size)
        assert PagedOpsBackend.supports_head_size(513) == (device == "cpu")
    monkeypatch.setitem(globals(), "D", size)
    step, (impl, layer) = Step(value_size=size), make()
    step.write(impl, layer)
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)


def reasons(**changed: Any) -> list[str]:
    """What the backend answers when vLLM asks whether it serves a layer."""
    usual = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": (9, 0),
        "attn_type": "decoder",
    }
    return PagedOpsBackend.validate_configuration(**(usual | changed))


@pytest.mark.parametrize(
    "served",
    [
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "bfloat16"},
        {"head_size": 24},
        {"block_size": 544},
        {"dtype": torch.float32},
        {"use_kv_connector": True},
        {"use_per_head_quant_scales": True},
        {"use_dcp": True},
        {"use_batch_invariant": True},
        {"use_mm_prefix": True},
        {"use_mm_prefix": True, "has_sliding_window": True},
    ],
)
def test_what_is_served(served: dict[str, Any]) -> None:
    if not served.keys() <= inspect.signature(AttentionBackend.validate_configuration).parameters.keys():
        pytest.skip(f"this version of vLLM does not ask for {list(served)}")
    assert reasons(**served) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "float16 cache"),
        ({"use_non_causal": True, "has_sliding_window": True}, "window"),
        ({"use_batch_invariant": True, "use_dcp": True}, "DCP with batch invariance"),
        ({"use_dcp": True, "has_sliding_window": True}, "DCP"),
    ],
)
def test_what_is_refused_when_vllm_asks(refused: dict[str, Any], reason: str) -> None:
    if not refused.keys() <= inspect.signature(AttentionBackend.validate_configuration).parameters.keys():
        pytest.skip(f"this version of vLLM does not ask for {list(refused)}")
    assert any(reason in each for each in reasons(**refused))


def test_the_entry_point_registers_by_both_names_and_again_changes_nothing() -> None:
    (entry,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "paged_ops")
    assert entry.load() is vllm_plugin.register
    for _ in range(2):
        entry.load()()
        assert AttentionBackendEnum.CUSTOM.get_class() is PagedOpsBackend
        if hasattr(AttentionBackendEnum, "register"):  # 0.26 takes no new names
            assert AttentionBackendEnum["PAGED_OPS"].get_class() is PagedOpsBackend
    assert AttentionBackendEnum[PagedOpsBackend.get_name()].get_class() is PagedOpsBackend


@pytest.fixture
def custom_of_another() -> Iterator[None]:
    """Another package has taken ``CUSTOM``."""
    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    yield
    AttentionBackendEnum.CUSTOM.clear_override()
    vllm_plugin.register()


@pytest.mark.skipif(not hasattr(AttentionBackendEnum, "register"), reason="vLLM 0.26 takes no new names")
@pytest.mark.usefixtures("custom_of_another")
def test_custom_stays_with_the_package_that_has_it() -> None:
    vllm_plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    assert AttentionBackendEnum["PAGED_OPS"].get_class() is PagedOpsBackend


class Custom:
    """``CUSTOM`` of a version without new names."""

    name = "CUSTOM"

    def __init__(self, path: str | None) -> None:
        self.path = path

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str | None:
        return self.path


@pytest.mark.parametrize("another", [None, "another.Backend"])
def test_a_version_without_new_names_knows_it_as_custom(another: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    custom, said = Custom(another), []
    members = SimpleNamespace(CUSTOM=custom, __members__={"CUSTOM": custom})
    monkeypatch.setattr(vllm_plugin.registry, "AttentionBackendEnum", members)
    monkeypatch.setattr(vllm_plugin.registry, "register_backend", lambda member, path: setattr(member, "path", path))
    monkeypatch.setattr(vllm_plugin.logger, "warning", lambda message, *args: said.append(message % args))
    for _ in range(2):
        vllm_plugin.register()
    assert custom.path == (another or "paged_ops.integrations.vllm.Backend")
    assert PagedOpsBackend.get_name() == "CUSTOM"
    assert bool(said) == bool(another)
    assert all("CUSTOM is another.Backend" in message for message in said)


def test_the_configuration_reaches_an_engine_that_is_spawned() -> None:
    """It is unpickled there before plugins are loaded."""
    vllm_plugin.register()
    config = AttentionConfig(backend=AttentionBackendEnum[PagedOpsBackend.get_name()])
    code = """if True:
        import pickle, sys
        backends = [pickle.load(sys.stdin.buffer).backend for _ in range(2)]
        from paged_ops.integrations import vllm_plugin
        vllm_plugin.register()
        for backend in backends:
            assert pickle.loads(pickle.dumps(backend)) is backend
            print(backend.name, backend.get_path())
    """
    saved = b"".join(dumps(config) for dumps in (pickle.dumps, cloudpickle.dumps))
    done = subprocess.run([sys.executable, "-c", code], input=saved, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    expected = f"{PagedOpsBackend.get_name()} paged_ops.integrations.vllm.Backend"
    assert done.stdout.decode().splitlines()[-2:] == [expected] * 2


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This backend is the one of the CPU platform, until the test is over."""
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", CpuPlatform.__dict__["get_attn_backend_cls"])
    for _ in range(2):
        vllm_plugin.replace_cpu_backend()


def chosen(selected: str | None = None, **changed: Any) -> str:
    """The class that vLLM's CPU platform chooses for a layer."""
    usual = {"head_size": 32, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}
    member = None if selected is None else AttentionBackendEnum[selected]
    return CpuPlatform.get_attn_backend_cls(member, AttentionSelectorConfig(**(usual | changed))).rpartition(".")[2]


def vllm_has_mla_on_the_cpu() -> bool:
    """Not in 0.26."""
    return "CPU_MLA" in AttentionBackendEnum.__members__


@pytest.mark.usefixtures("replaced")
def test_on_the_cpu_it_serves_decoders() -> None:
    assert chosen() == "PagedOpsBackend"
    assert chosen("CUSTOM") == "PagedOpsBackend"
    assert chosen(PagedOpsBackend.get_name()) == "PagedOpsBackend"
    assert chosen(has_sink=True, has_sliding_window=True, kv_cache_dtype="fp8") == "PagedOpsBackend"
    assert chosen(use_mla=True, head_size=576) == chosen("CUSTOM", use_mla=True) == "PagedOpsMLABackend"
    assert chosen("CPU_ATTN") == "CPUAttentionBackend"


@pytest.mark.usefixtures("replaced")
@pytest.mark.skipif(not vllm_has_mla_on_the_cpu(), reason="vLLM 0.26 has no latent attention on the CPU")
def test_on_the_cpu_latents_keep_vllms_own_backend_if_asked_for() -> None:
    assert chosen("CPU_MLA", use_mla=True) == "CPUMLABackend"


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("selected", [None, "CUSTOM"])
def test_on_the_cpu_other_layers_keep_vllms_own_backends(selected: str | None) -> None:
    for attn_type in ("encoder", "encoder_only", "encoder_decoder"):
        assert chosen(selected, attn_type=attn_type) == "CPUAttentionBackend"
    with pytest.raises(NotImplementedError, match="Sparse"):
        chosen(selected, use_sparse=True)


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8_per_token_head", "nvfp4"])
def test_on_the_cpu_cache_types_are_refused_when_the_backend_is_chosen(kv_cache_dtype: str) -> None:
    with pytest.raises(ValueError, match=r"is not valid for this configuration.*cache"):
        chosen(kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_the_cache_of_versions_that_ask_for_its_shape(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "heads_first", lambda: order == "HND")
    shape = PagedOpsBackend.get_kv_cache_shape(N, B, K, D)
    strides = PagedOpsBackend.get_kv_cache_stride_order()
    layers_first = PagedOpsBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert sorted(strides) == [0, 1, 2, 3]
    assert sorted(layers_first) == [0, 1, 2, 3, 4]
    assert layers_first[0] == 1
    step = Step()
    storage = torch.full([shape[i] for i in strides], float("nan"))
    step.kv_cache = storage.permute([strides.index(i) for i in range(4)])
    assert step.kv_cache.shape == (N, K, B, 2 * D)
    impl, layer = make()
    step.write(impl, layer)
    torch.testing.assert_close(attend(step, impl, layer).double(), step.expected(), atol=1e-5, rtol=1e-5)


def test_the_package_imports_no_engine() -> None:
    code = "import sys, paged_ops, paged_ops.integrations; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kernels_of_all_steps_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches are those of covering_batches, which test_target.py shows to cover all; the cache stays."""
    monkeypatch.setattr(vllm_plugin, "largest_batch", lambda: (64, 8))
    step, (impl, layer) = Step(), make(sinks=FEATURES["sinks"]["sinks"])
    step.write(impl, layer)
    before = step.kv_cache.clone()
    fused = torch.randn(5, (H + 2 * K) * D)
    query = fused[:, : H * D].view(5, H, D)
    seen = []
    attend_to = vllm._attend

    def record(query: Tensor, cache: Tensor, tables: Tensor, lens: Tensor, *args: Any, **features: Any) -> Any:
        seen.append((query.shape[0], lens.shape[0]))
        assert query.stride() == (fused.shape[1], D, 1)
        assert features["sinks"] is not None
        return attend_to(query, cache, tables, lens, *args, **features)

    class Recorded:
        def __init__(self, calls: Any, **limits: int) -> None:
            assert limits == {"max_num_tokens": 64, "max_num_seqs": 8, "equal_lengths": True}
            for call in calls:
                call()

        def finish(self) -> WarmUp:
            seen.append("finished")
            return WarmUp(7, 5, 0.5, ())

    monkeypatch.setattr(vllm, "_attend", record)
    monkeypatch.setattr(vllm, "Ahead", Recorded)
    said: list[str] = []
    monkeypatch.setattr(vllm_plugin.logger, "info", lambda message, *args: said.append(message % args))
    impl.warm_up(layer, query, query, query, step.kv_cache, torch.empty(5, H, D))
    assert seen == [(7, 3), "finished"]
    assert said == ["Kernels of paged_ops for steps of requests: 7 kernels, 5 of them compiled, in 0.5 s."]

    seen.clear()
    gathered = vllm.attend_with_gathered_heads

    def record_gathered(*args: Any, **options: Any) -> Tensor:
        lens, longest = args[5], args[7]
        seen.append((longest, lens is not None))
        return gathered(*args, **options)

    monkeypatch.setattr(vllm, "attend_with_gathered_heads", record_gathered)
    exchange = Exchange(SimpleNamespace(size=1, rank=0, all_gather=lambda mine: mine[None]))
    new = fused[:, -D:].view(5, 1, D)
    impl.warm_up(layer, query, new, new, step.kv_cache, torch.empty(5, H, D), None, exchange)
    assert seen == [(1, True), (2, True), (2, False), "finished"]
    torch.testing.assert_close(step.kv_cache, before, atol=0, rtol=0, equal_nan=True)


def test_a_new_cache_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, (impl, layer) = Step(), make()
    calls = []
    monkeypatch.setattr(PagedOpsImpl, "can_warm_up", lambda self, query, kv_cache: bool(kv_cache.numel()))

    def warm_up(
        self: PagedOpsImpl, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, *args: Any
    ) -> None:
        calls.append(kv_cache)
        self._warm = kv_cache

    monkeypatch.setattr(PagedOpsImpl, "warm_up", warm_up)
    output = torch.zeros(5, H, D)
    impl.forward(layer, step.query[:5], None, None, torch.tensor([]), None, output)  # profiling: no cache yet
    assert not calls
    for cache in (step.kv_cache, step.kv_cache, Step("BLNHC").kv_cache):
        impl.forward(layer, step.query[:5], None, None, cache, None, output)
    assert len(calls) == 2


def test_the_engine_says_how_large_a_step_can_be() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    assert vllm_plugin.largest_batch() is None
    with set_current_vllm_config(VllmConfig()):
        config = VllmConfig().scheduler_config
        assert vllm_plugin.largest_batch() == (config.max_num_batched_tokens, config.max_num_seqs)
    with set_current_vllm_config(VllmConfig(additional_config={"paged_ops_warm_up": False})):
        assert vllm_plugin.largest_batch() is None


RANGES = {0: [(2, 9)], 1: [(1, 3)], 2: [], 3: [(3, 20), (30, 36), (38, 39)]}


@pytest.mark.parametrize("host_lens", [False, True], ids=["all", "of the step"])
@pytest.mark.parametrize("features", list(FEATURES))
def test_tokens_of_an_image_see_each_other(features: str, host_lens: bool) -> None:
    step, (impl, layer) = Step(), make(**FEATURES[features])
    step.write(impl, layer)
    step.common.mm_req_doc_ranges = RANGES
    if host_lens:
        step.common.seq_lens_cpu_upper_bound = torch.tensor(SEQ_LENS, dtype=torch.int32)
    metadata = build(step.common)
    assert metadata.mm_prefix_range_tensor.shape == (4, 4, 2)
    # Of sequence 3 the step has tokens 29 to 40; sequence 0's image is behind it.
    assert metadata.mm_prefix_range_tensor[0, 0].tolist() == ([0, 0] if host_lens else [2, 10])
    assert metadata.mm_prefix_range_tensor[3, 0].tolist() == ([30, 37] if host_lens else [3, 21])
    expected = step.expected(**FEATURES[features], ranges=RANGES)
    assert not torch.allclose(expected, step.expected(**FEATURES[features]), atol=1e-3)
    output = torch.zeros(sum(QUERY_LENS), H, D)
    impl.forward(layer, step.query[: len(output)], None, None, step.kv_cache, metadata, output)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_steps_without_images_have_no_ranges() -> None:
    step = Step()
    for ranges in (None, {}, {0: [], 1: []}):
        step.common.mm_req_doc_ranges = ranges
        assert build(step.common).mm_prefix_range_tensor is None
    step.common.mm_req_doc_ranges = {0: [(2, 9)]}
    step.common.seq_lens_cpu_upper_bound = torch.tensor(SEQ_LENS, dtype=torch.int32)
    assert build(step.common).mm_prefix_range_tensor is None  # a decode, long after the image
    step.common.mm_req_doc_ranges, step.common.causal = RANGES, False
    assert build(step.common).mm_prefix_range_tensor is None  # all see all


def test_models_with_images_have_whole_graphs_of_decodes_alone() -> None:
    for has_ranges, level in ((True, AttentionCGSupport.UNIFORM_BATCH), (False, AttentionCGSupport.ALWAYS)):
        config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=has_ranges))
        assert PagedOpsMetadataBuilder.get_cudagraph_support(config, None) == level


LONG_RANGES = {0: [(2, 9)], 3: [(3, 20), (20, 38)]}  # longer than the windows


@pytest.mark.parametrize("features", list(FEATURES))
def test_a_window_bounds_what_tokens_of_an_image_see(features: str) -> None:
    """Layers of Gemma-4 say so. Without a window nothing changes."""
    step, (impl, layer) = Step(), make(**FEATURES[features])
    step.write(impl, layer)
    step.common.mm_req_doc_ranges = LONG_RANGES
    layer.mm_prefix_clamp_sliding_window = True
    expected = step.expected(**FEATURES[features], ranges=LONG_RANGES, clamp=True)
    is_same = torch.allclose(expected, step.expected(**FEATURES[features], ranges=LONG_RANGES), atol=1e-3)
    assert is_same == ("sliding_window" not in FEATURES[features])
    torch.testing.assert_close(attend(step, impl, layer).double(), expected, atol=1e-5, rtol=1e-5)


def test_context_parallelism_is_for_layers_that_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PagedOpsImpl.can_return_lse_for_decode
    monkeypatch.setattr(PagedOpsImpl, "dcp_world_size", 2, raising=False)
    monkeypatch.setattr(PagedOpsImpl, "__new__", lambda cls, *args, **kwargs: object.__new__(cls))
    assert not PagedOpsImpl(H, D, 1.0, 1).fused_output_quant_supported(vllm.kFp8StaticTensorSym)
    for features in ({"sliding_window": 8}, {"alibi_slopes": [1.0] * H}):
        with pytest.raises(NotImplementedError, match="decode_context_parallel_size: expected 1"):
            PagedOpsImpl(H, D, 1.0, 1, **features)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize(("query_lens", "is_decode"), [([1, 1, 1, 1], True), ([1, 5, 3, 12], False)])
def test_ranks_of_context_parallelism_count_their_tokens(
    rank: int,
    interleave: int,
    mode: CUDAGraphMode,
    query_lens: list[int],
    is_decode: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the step, or, where no request has more than one new token, with those of the step. A graph of mixed
    steps that serves a decode reads those before the step."""
    group = SimpleNamespace(world_size=2, rank_in_group=rank)
    exchange = object()
    monkeypatch.setattr(vllm_plugin, "context_group", lambda: group)
    monkeypatch.setattr(vllm_plugin, "context_exchange", lambda *made_for: exchange)
    monkeypatch.setitem(globals(), "QUERY_LENS", query_lens)
    config = engine_with_cascade(False)
    config.parallel_config = SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    config.compilation_config, config.num_speculative_tokens = SimpleNamespace(cudagraph_mode=mode), 2
    builder = PagedOpsMetadataBuilder(FullAttentionSpec(**SPEC), ["layer"], config, torch.device("cpu"))
    metadata = builder.build(0, Step().common)
    held = [sum(j // interleave % 2 == rank for j in range(n)) for n in SEQ_LENS]
    lens = zip(SEQ_LENS, query_lens, strict=True)
    before = [sum(j // interleave % 2 == rank for j in range(n - q)) for n, q in lens]
    assert metadata.exchange is exchange and metadata.lens is not None
    assert metadata.lens.tolist() == (held if is_decode else before)
    if mode is CUDAGraphMode.FULL or not is_decode:
        assert builder._lens[0, : len(before)].tolist() == before

    common = Step().common
    common.seq_lens_cpu_upper_bound = torch.tensor(SEQ_LENS, dtype=torch.int32)
    assert builder.build(0, common).lens is not None  # some request has tokens before the step
    monkeypatch.setitem(globals(), "QUERY_LENS", SEQ_LENS)
    common = Step().common
    assert builder.build(0, common).lens is not None  # unknown
    common.seq_lens_cpu_upper_bound = torch.tensor(SEQ_LENS, dtype=torch.int32)
    assert (builder.build(0, common).lens is None) == (mode is not CUDAGraphMode.FULL)  # whole prompts alone
