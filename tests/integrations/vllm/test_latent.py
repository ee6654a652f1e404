"""Layers with latents: vLLM's own ``MLAAttention`` with our backend and vLLM's metadata, against dense attention in
float64. No engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from paged_ops.fp8 import dequantise_rows, quantise_rows
from paged_ops.integrations import expanded
from paged_ops.integrations.vllm import backend as dense
from paged_ops.integrations.vllm import plugin as vllm_plugin
from paged_ops.integrations.vllm.latent import PagedOpsMLABackend, PagedOpsMLAImpl, PagedOpsMLAMetadataBuilder
from paged_ops.lowerings.warm_up import WarmUp

H, Dn, Dv, N = 4, 24, 16, 48
SMALL, DEEPSEEK = (32, 8), (512, 64)  # R, P
QUERY_LENS, SEQ_LENS = [1, 3, 6, 40, 33], [30, 25, 6, 70, 33]
# The first sequence that is expanded, by the fewest tokens that are: none, the last two, those and a prompt of 6.
FEWEST = {"absorbed": (41, 5), "mixed": (33, 3), "also short": (6, 2)}
SCALE = (Dn + 8) ** -0.5


class Linear(nn.Module):
    """``kv_b_proj`` as vLLM's layers see it."""

    quant_method = None

    def __init__(self, R: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(H * (Dn + Dv), R, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
        self.weight = nn.Parameter((weight * R**-0.5).to(dtype), requires_grad=False)

    def forward(self, latents: Tensor) -> tuple[Tensor, None]:
        return latents @ self.weight.T, None


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine's configuration. vLLM's own attention of prompts, which every such layer makes, is never called."""
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: lambda **sizes: None)
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def make_layer(config: Any, sizes: tuple[int, int], dtype: torch.dtype, stored_as: str = "auto") -> Any:
    """vLLM's layer with our backend, after its weights are loaded."""
    R, P = sizes
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    config.compilation_config.static_forward_context.clear()
    cache_config = SimpleNamespace(
        cache_dtype=stored_as, calculate_kv_scales=False, kv_cache_dtype_skip_layers=[], enable_prefix_caching=True
    )
    try:
        layer = mla_attention.MLAAttention(
            H, SCALE, Dn, P, Dv, None, R, Linear(R, dtype), cache_config=cache_config, prefix="layers.0.attn",
            attn_backend=PagedOpsMLABackend,
        )  # fmt: skip
        layer.process_weights_after_loading(dtype)
    finally:
        torch.set_default_dtype(before)
    assert type(layer.impl) is PagedOpsMLAImpl
    layer._k_scale.fill_(0.5 if stored_as == "fp8" else 1.0)
    return layer


class Step:
    """A batch of five sequences with history, its metadata, and a cache of NaN."""

    def __init__(
        self, layer: Any, B: int = 16, dtype: torch.dtype = torch.float32, layers_inside: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        R, P, S, T = layer.kv_lora_rank, layer.qk_rope_head_dim, len(SEQ_LENS), sum(QUERY_LENS)
        self.layer, self.lens = layer, SEQ_LENS
        stored = dtype if layer.kv_cache_dtype == "auto" else torch.uint8
        shape = PagedOpsMLABackend.get_kv_cache_shape(N, B, 1, R + P, layer.kv_cache_dtype)
        storage = torch.full((N, 2, *shape[1:]) if layers_inside else shape, 255).to(stored)
        storage = storage.fill_(float("nan")) if stored == dtype else storage  # 255 is NaN in e4m3 and in bfloat16
        self.kv_cache = layer.kv_cache = storage[:, 1] if layers_inside else storage
        M = -(-max(SEQ_LENS) // B)
        self.block_table = torch.randperm(N, generator=generator, dtype=torch.int32)[: S * M].view(S, M)
        self.rows = [torch.randn(n, R + P, generator=generator).to(dtype) for n in SEQ_LENS]
        self.query = torch.randn(T + 3, H, Dn + P, generator=generator).to(dtype)
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
            slot_mapping=self.parts(self.slots, True),
            seq_lens_cpu_upper_bound=torch.tensor(SEQ_LENS, dtype=torch.int32),
        )
        self.write(self.parts(self.rows, False), self.parts(self.slots, False))

    @staticmethod
    def parts(of_sequences: list[Tensor], is_new: bool) -> Tensor:
        """The step's own tokens, or those before."""
        lens = zip(of_sequences, QUERY_LENS, strict=True)
        return torch.cat([each[len(each) - q :] if is_new else each[: len(each) - q] for each, q in lens])

    def write(self, rows: Tensor, slots: Tensor) -> None:
        """As the layer does, with padding."""
        R, layer = self.layer.kv_lora_rank, self.layer
        rows = torch.cat([rows, rows.new_full((2, rows.shape[1]), float("nan"))])
        slots = torch.cat([slots, torch.full((2,), -1)])
        states = rows[:, :R], rows[:, None, R:]
        layer.impl.do_kv_cache_update(*states, self.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    def attend(self, config: Any, padding: int = 3) -> tuple[Tensor, Any]:
        """The rows of the step by the whole layer, and its metadata."""
        R, T = self.layer.kv_lora_rank, self.common.num_actual_tokens
        new = self.parts(self.rows, True)
        self.write(new, self.common.slot_mapping)
        spec = MLAAttentionSpec(
            block_size=self.kv_cache.shape[1], num_kv_heads=1, head_size=self.rows[0].shape[1], dtype=self.query.dtype
        )
        metadata = PagedOpsMLAMetadataBuilder(spec, ["layers.0.attn"], config, torch.device("cpu")).build(
            common_prefix_len=0, common_attn_metadata=self.common
        )
        output = torch.full((T + padding, H * Dv), 7.0, dtype=self.query.dtype)
        new = torch.cat([new, new.new_full((padding, new.shape[1]), float("nan"))])
        states = self.query[: T + padding], new[:, :R], new[:, None, R:]
        returned = self.layer.forward_impl(*states, self.kv_cache, metadata, output=output)
        assert returned.data_ptr() == output.data_ptr()
        assert (output[T:] == 7.0).all()
        return output[: sum(QUERY_LENS)].view(-1, H, Dv), metadata

    def expected(self, stored: Callable[[Tensor], Tensor] = lambda rows: rows, causal: bool = True) -> Tensor:
        """Keys and values of all heads of rows as the cache holds them, in float64."""
        R = self.layer.kv_lora_rank
        weight = self.layer.kv_b_proj.weight.double().view(H, Dn + Dv, R)
        outs, start = [], 0
        for rows, q in zip(self.rows, QUERY_LENS, strict=True):
            held, n = stored(rows).double(), len(rows)
            both = torch.einsum("jr,hdr->jhd", held[:, :R], weight)
            keys = torch.cat([both[..., :Dn], held[:, None, R:].expand(-1, H, -1)], -1)
            logits = torch.einsum("qhd,jhd->hqj", self.query[start : start + q].double(), keys) * SCALE
            start += q
            if causal:
                i, j = torch.arange(n - q, n)[:, None], torch.arange(n)[None]
                logits = logits.masked_fill(j > i, -torch.inf)
            outs.append(torch.einsum("hqj,jhd->qhd", torch.softmax(logits, -1), both[..., Dn:]))
        return torch.cat(outs)


@pytest.fixture(params=list(FEWEST))
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The first sequence that is expanded; it always pays."""
    fewest, first = FEWEST[request.param]
    monkeypatch.setattr(expanded, "FEWEST_TOKENS", fewest)
    pays(monkeypatch)
    return first


def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanding pays for each sequence with tokens enough."""
    monkeypatch.setattr(expanded, "saved", lambda new, tokens, sizes: 1)
    monkeypatch.setattr(expanded, "OVERHEAD", 0)


@pytest.mark.parametrize("B", [16, 64])
@pytest.mark.parametrize("layers_inside", [False, True])
def test_a_step_is_dense_attention(config: Any, first: int, B: int, layers_inside: bool) -> None:
    step = Step(make_layer(config, SMALL, torch.float32), B, layers_inside=layers_inside)
    out, metadata = step.attend(config)
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert (metadata.num_decodes, metadata.num_prefills) == (first, 5 - first)
    assert metadata.num_decode_tokens == sum(QUERY_LENS[:first])


def test_a_long_history_is_expanded_in_windows(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "FEWEST_TOKENS", 6)
    pays(monkeypatch)
    monkeypatch.setattr(expanded, "WINDOW", 40 * H)
    step = Step(make_layer(config, SMALL, torch.float32))
    out, metadata = step.attend(config)
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert [run.windows for run, _ in metadata.runs] == [((0, 6),), ((0, 16), (16, 54)), ((0, 33),)]


def as_fp8(rows: Tensor) -> Tensor:
    return (rows.float() / 0.5).to(torch.float8_e4m3fn).float() * 0.5


def as_rows_with_scales(rows: Tensor) -> Tensor:
    R = DEEPSEEK[0]
    return dequantise_rows(quantise_rows(rows[:, :R], rows[:, R:]), rows.dtype)


@pytest.mark.parametrize("stored_as", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("B", [16, 64])
def test_caches_of_deepseeks_sizes(config: Any, first: int, stored_as: str, B: int) -> None:
    layer = make_layer(config, DEEPSEEK, torch.bfloat16, stored_as)
    step = Step(layer, B, torch.bfloat16)
    out, _ = step.attend(config)
    stored = {"auto": lambda rows: rows, "fp8": as_fp8, "fp8_ds_mla": as_rows_with_scales}[stored_as]
    expected = step.expected(stored)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    if stored_as != "auto":
        assert (expected - step.expected()).abs().max() > 0.03, "what the cache loses would show"


def test_later_tokens_are_seen_where_the_step_is_not_causal(config: Any, first: int) -> None:
    step = Step(make_layer(config, SMALL, torch.float32))
    step.common.causal = False
    out, metadata = step.attend(config)
    torch.testing.assert_close(out.double(), step.expected(causal=False), atol=1e-5, rtol=1e-5)
    assert metadata.num_prefills == 0


def test_batch_invariance_leaves_all_rows_absorbed(config: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "is_batch_invariant", lambda: True)
    step = Step(make_layer(config, SMALL, torch.float32))
    out, metadata = step.attend(config)
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert step.layer.impl._batch_invariant
    assert metadata.num_prefills == 0


def test_padding_is_no_prompt(config: Any, first: int) -> None:
    """Padded rows count as tokens, padded requests have none."""
    step = Step(make_layer(config, SMALL, torch.float32))
    common = step.common
    for name in ("query_start_loc", "query_start_loc_cpu"):
        setattr(common, name, torch.cat([getattr(common, name), getattr(common, name)[-1:]]))
    common.seq_lens = torch.cat([common.seq_lens, common.seq_lens.new_zeros(1)])
    common.seq_lens_cpu_upper_bound = common.seq_lens
    common.block_table_tensor = torch.cat([common.block_table_tensor, torch.zeros_like(step.block_table[:1])])
    common.num_reqs, common.num_actual_tokens = 6, common.num_actual_tokens + 3
    out, metadata = step.attend(config, padding=0)
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert metadata.num_decodes == (6 if first == 5 else first)


def test_lengths_that_the_host_does_not_know_leave_all_rows_absorbed(config: Any, first: int) -> None:
    step = Step(make_layer(config, SMALL, torch.float32))
    step.common.seq_lens_cpu_upper_bound = None
    out, metadata = step.attend(config)
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert metadata.num_prefills == 0


def test_the_profiling_run_gives_zeros(config: Any) -> None:
    layer = make_layer(config, SMALL, torch.float32)
    layer._chunked_prefill_workspace_size = 1
    output, states = torch.full((3, H * Dv), float("nan")), (torch.zeros(3, 32), torch.zeros(3, 1, 8))
    layer.impl.do_kv_cache_update(*states, torch.tensor([]), None, "auto", layer._k_scale)
    layer.forward_impl(torch.zeros(3, H, Dn + 8), *states, torch.tensor([]), None, output=output)
    assert (output == 0).all()


def test_kernels_of_all_steps_are_compiled_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "largest_batch", lambda: (64, 8))
    monkeypatch.setattr(dense.CompilesAhead, "can_warm_up", lambda self, query, kv_cache: bool(kv_cache.numel()))
    step, seen = Step(make_layer(config, SMALL, torch.float32)), []

    class Recorded:
        def __init__(self, calls: Any, **limits: int) -> None:
            assert limits == {"max_num_tokens": 64, "max_num_seqs": 8, "equal_lengths": True}
            for call in calls:
                call()
            seen.append(len(calls))

        def finish(self) -> WarmUp:
            seen.append("finished")
            return WarmUp(7, 5, 0.5, ())

    monkeypatch.setattr(dense, "Ahead", Recorded)
    for _ in range(2):
        out, _ = step.attend(config)
        torch.testing.assert_close(out.double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert seen == [2, "finished"]


def test_only_decodes_are_captured_whole() -> None:
    assert PagedOpsMLAMetadataBuilder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH


def test_which_requests_the_engine_puts_last(config: Any) -> None:
    make_layer(config, SMALL, torch.float32)
    builder = PagedOpsMLAMetadataBuilder(None, ["layers.0.attn"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 127
    assert not builder.supports_update_block_table


def test_causality_by_request_is_refused(config: Any) -> None:
    step = Step(make_layer(config, SMALL, torch.float32))
    step.common.causal = torch.ones(5, dtype=torch.int32)
    with pytest.raises(ValueError, match="causal: expected True or False"):
        step.attend(config)


@pytest.mark.parametrize("use_mla", [True, False])
def test_one_name_serves_both_kinds_of_models(use_mla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for the class while it creates the layers of a model."""
    from vllm.config import vllm as of_config

    vllm_plugin.register()
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    monkeypatch.setattr(of_config, "get_current_vllm_config_or_none", lambda: config)
    chosen = AttentionBackendEnum[PagedOpsMLABackend.get_name()].get_class()
    assert chosen.__name__ == ("PagedOpsMLABackend" if use_mla else "PagedOpsBackend")
    assert chosen.is_mla() == use_mla


def reasons(**changed: Any) -> list[str]:
    """What vLLM is told about a layer."""
    usual = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True}
    layer = AttentionSelectorConfig(**(usual | changed))
    return PagedOpsMLABackend.validate_configuration(device_capability=None, **layer._asdict())


@pytest.mark.parametrize("served", [
    {}, {"block_size": 16}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "bfloat16"},
    {"head_size": 320}, {"head_size": 288}, {"dtype": torch.float32}, {"use_batch_invariant": True},
])  # fmt: skip
def test_what_is_served_when_vllm_asks(served: dict[str, Any]) -> None:
    assert reasons(**served) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"use_mla": False}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"has_sink": True}, "sink"),
        ({"has_sliding_window": True}, "window"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "float16 cache"),
        ({"kv_cache_dtype": "fp8_ds_mla", "head_size": 320}, "fp8_ds_mla"),
        ({"use_dcp": True}, "DCP"),
    ],
)
def test_what_is_refused_when_vllm_asks(refused: dict[str, Any], reason: str) -> None:
    if not refused.keys() <= set(AttentionSelectorConfig._fields):
        pytest.skip(f"this version of vLLM does not ask for {list(refused)}")
    assert any(reason in each for each in reasons(**refused)), reasons(**refused)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"logits_soft_cap": 2.0}, "logits_soft_cap"),
        ({"attn_type": "encoder"}, "attn_type"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "kv_sharing_target_layer_name"),
        ({"indexer": object()}, "indexer"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype: fp8_ds_mla needs a latent of 512"),
    ],
)
def test_layers_of_another_kind_are_refused(changed: dict[str, Any], message: str) -> None:
    usual = dict(
        num_heads=H, head_size=40, scale=1.0, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=Dn, qk_rope_head_dim=8, qk_head_dim=Dn + 8, v_head_dim=Dv,
        kv_b_proj=None,
    )  # fmt: skip
    assert set(usual) <= set(inspect.signature(PagedOpsMLAImpl.__init__).parameters)
    with pytest.raises(NotImplementedError, match=message):
        PagedOpsMLAImpl(**(usual | changed))
