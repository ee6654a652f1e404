"""The backend's class over SGLang's own pools, against attention in float64: also what no engine on the CPU reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from paged_ops.integrations.sglang.backend import PagedOpsAttentionBackend

H, K, D, PAGE, CONTEXT = 4, 2, 16, 8, 64
LENS = (13, 40, 1)  # tokens of each request before the step


def layer_of(layer_id: int = 0, **changed: Any) -> SimpleNamespace:
    fields: dict[str, Any] = dict(
        layer_id=layer_id, tp_q_head_num=H, tp_k_head_num=K, tp_v_head_num=K, qk_head_dim=D, head_dim=D, v_head_dim=D,
        scaling=D**-0.5, logit_cap=0.0, logit_capping_method="tanh", sliding_window_size=-1, is_cross_attention=False,
        attn_type=AttentionType.DECODER, pos_encoding_mode="NONE", use_irope=False, xai_temperature_len=-1,
        k_scale=None, v_scale=None,
    )  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def pool_of(dtype: torch.dtype = torch.float32, windows: bool = False, Dv: int = D) -> Any:
    own: dict[str, Any] = dict(head_num=K, head_dim=D, device="cpu", enable_memory_saver=False)
    if windows:
        own |= dict(swa_attention_layer_ids=[1], full_attention_layer_ids=[0], page_size=PAGE)
        pool = SWAKVPool(size=256, size_swa=256, dtype=dtype, **own)
        slots = torch.arange(256 + PAGE)
        pool.register_mapping((256 // PAGE - slots // PAGE) * PAGE + slots % PAGE)  # pages in reverse order
        return pool
    return MHATokenToKVPool(size=256, page_size=PAGE, dtype=dtype, layer_num=2, v_head_dim=Dv, **own)


def runner_of(pool: Any = None, **changed: Any) -> SimpleNamespace:
    fields: dict[str, Any] = dict(
        req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False),
        token_to_kv_pool=pool_of() if pool is None else pool,
        page_size=PAGE,
        device="cpu",
        use_mla_backend=False,
        attention_chunk_size=None,
        model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False, head_dim=D),
        server_args=SimpleNamespace(enable_deterministic_inference=False, speculative_algorithm=None),
    )
    return SimpleNamespace(**{**fields, **changed})


class Requests:
    """Requests of a backend: their keys and values, and steps that store and attend."""

    def __init__(self, runner: Any, Dv: int = D, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.backend, self.runner, self.Dv, self.dtype = PagedOpsAttentionBackend(runner), runner, Dv, dtype
        pages = torch.randperm(24)[: len(LENS) * 6].view(len(LENS), 6) + 1
        for s in range(len(LENS)):
            slots = (pages[s, :, None] * PAGE + torch.arange(PAGE)).flatten()
            runner.req_to_token_pool.req_to_token[s + 1, : len(slots)] = slots.to(torch.int32)
        self.keys = [torch.empty(0, K, D) for _ in LENS]
        self.values = [torch.empty(0, K, Dv) for _ in LENS]
        self.lens = [0] * len(LENS)

    def batch(self, news: tuple[int, ...], mode: ForwardMode) -> SimpleNamespace:
        places = self.runner.req_to_token_pool.req_to_token
        slots = [places[s + 1, n : n + new] for s, (n, new) in enumerate(zip(self.lens, news, strict=True))]
        lens = torch.tensor([n + new for n, new in zip(self.lens, news, strict=True)])
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(news),
            req_pool_indices=torch.arange(1, len(news) + 1),
            seq_lens=lens,
            seq_lens_cpu=lens,
            extend_seq_lens=torch.tensor(news),
            out_cache_loc=torch.cat(slots).long(),
        )

    def step(self, news: tuple[int, ...], layer: Any, captured: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        """One step: what the backend returns, and float64 attention over what it should see."""
        mode = ForwardMode.DECODE if set(news) == {1} else ForwardMode.EXTEND
        batch, T = self.batch(news, mode), sum(news)
        q, k, v = torch.randn(T, H * D), torch.randn(T, K, D), torch.randn(T, K, self.Dv)
        if captured:
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        got = forward(q, k, v, layer, batch, **kwargs)
        row, wanted = 0, []
        for s, new in enumerate(news):
            self.keys[s] = torch.cat([self.keys[s], k[row : row + new]])
            self.values[s] = torch.cat([self.values[s], v[row : row + new]])
            self.lens[s] += new
            wanted.append(dense(q[row : row + new].view(new, H, D), self.keys[s], self.values[s], layer, **kwargs))
            row += new
        return got, torch.cat(wanted).flatten(1)


def dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any, sinks: torch.Tensor | None = None,
    chunk: int = 16,
) -> torch.Tensor:  # fmt: skip
    q, keys, values = q.double(), keys.double(), values.double()
    logits = torch.einsum("tkgd,jkd->tkgj", q.view(len(q), K, H // K, D), keys).flatten(1, 2) * layer.scaling
    if layer.logit_cap:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    i, j = torch.arange(len(keys) - len(q), len(keys))[:, None], torch.arange(len(keys))
    sees = j <= i
    if layer.sliding_window_size >= 0:
        sees &= j >= i - layer.sliding_window_size
    if layer.use_irope:
        sees &= i // chunk == j // chunk
    logits = logits.masked_fill(~sees[:, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().expand(len(q), H)[..., None]], -1)
    weights = logits.softmax(-1)[..., : len(keys)]
    return torch.einsum("thj,jhd->thd", weights, values.repeat_interleave(H // K, 1))


@pytest.mark.parametrize(
    ("changed", "kwargs"),
    [
        ({}, {}),
        ({"sliding_window_size": 5, "logit_cap": 3.0}, {}),
        ({"use_irope": True}, {}),
        ({}, {"sinks": torch.linspace(-2, 2, H)}),
    ],
    ids=["plain", "window and soft cap", "chunks", "sinks"],
)
@pytest.mark.parametrize("captured", [False, True])
def test_prompts_then_decodes(captured: bool, changed: dict[str, Any], kwargs: dict[str, Any]) -> None:
    requests = Requests(runner_of(attention_chunk_size=16))
    requests.backend.init_cuda_graph_state(8, 8)
    layer = layer_of(**changed)
    got, wanted = requests.step(LENS, layer, **kwargs)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    got, wanted = requests.step((3, 1, 4), layer, **kwargs)  # a chunk after history, next to a decode
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    for _ in range(2):
        got, wanted = requests.step((1, 1, 1), layer, captured, **kwargs)
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_graphs_read_the_same_addresses() -> None:
    requests = Requests(runner_of())
    requests.backend.init_cuda_graph_state(8, 8)
    requests.step(LENS, layer_of())
    addresses = []
    for _ in range(2):
        requests.step((1, 1, 1), layer_of(), captured=True)
        step = requests.backend._step
        assert step is not None
        used = (step.query_start_loc, step.seq_lens, *step.places[0])
        addresses.append([each.data_ptr() for each in used])
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("captured", [False, True])
def test_a_cache_for_windows(captured: bool) -> None:
    pool = pool_of(windows=True)
    requests = Requests(runner_of(pool))
    requests.backend.init_cuda_graph_state(8, 8)
    layer = layer_of(1, sliding_window_size=9)
    whole = pool.get_key_buffer(0).clone()
    for news in (LENS, (1, 1, 1), (1, 1, 1)):
        got, wanted = requests.step(news, layer, captured and max(news) == 1)
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(pool.get_key_buffer(0), whole)


def test_narrow_values() -> None:
    requests = Requests(runner_of(pool_of(Dv=8)), Dv=8)
    got, wanted = requests.step(LENS, layer_of(v_head_dim=8))
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_an_fp8_cache_with_scales() -> None:
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor(0.015)}
    requests = Requests(runner_of(pool_of(torch.float8_e4m3fn)))
    got, wanted = requests.step(LENS, layer_of(**scales))
    assert (got.double() - wanted).abs().max() < 0.15
    without = Requests(runner_of(pool_of(torch.float8_e4m3fn))).step(LENS, layer_of())[0]
    assert not torch.equal(got, without)


def test_the_same_bits_alone() -> None:
    """Deterministic inference: a request's decode has the bits that it has alone."""
    server = SimpleNamespace(enable_deterministic_inference=True, speculative_algorithm=None)
    requests = Requests(runner_of(server_args=server))
    assert requests.backend.is_batch_invariant
    requests.step(LENS, layer_of())
    batch, q = requests.batch((1, 1, 1), ForwardMode.DECODE), torch.randn(3, H * D)
    k = v = torch.randn(3, K, D)
    requests.backend.init_forward_metadata(batch)
    together = requests.backend.forward_decode(q, k, v, layer_of(), batch)
    for s in range(3):
        alone = SimpleNamespace(**vars(batch))
        alone.batch_size, alone.req_pool_indices = 1, batch.req_pool_indices[s : s + 1]
        alone.seq_lens = alone.seq_lens_cpu = batch.seq_lens[s : s + 1]
        alone.out_cache_loc = batch.out_cache_loc[s : s + 1]
        requests.backend.init_forward_metadata(alone)
        got = requests.backend.forward_decode(q[s : s + 1], k[s : s + 1], v[s : s + 1], layer_of(), alone)
        assert torch.equal(got[0], together[s])


LATENT = dict(size=64, page_size=PAGE, dtype=torch.float32, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_mla_backend": True}, "latent attention"),
        (
            {"server_args": SimpleNamespace(enable_deterministic_inference=False, speculative_algorithm="EAGLE")},
            "EAGLE",
        ),
        (
            {"model_config": SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=True, head_dim=D)},
            "an encoder and a decoder",
        ),
        (
            {"token_to_kv_pool": MLATokenToKVPool(device="cpu", enable_memory_saver=False, **LATENT)},
            "MLATokenToKVPool",
        ),
    ],
    ids=["latents", "drafts", "encoders", "another cache"],
)
def test_refused_when_the_engine_starts(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*choose another --attention-backend"):
        PagedOpsAttentionBackend(runner_of(**changed))


@pytest.mark.parametrize(
    ("changed", "kwargs", "message"),
    [
        ({"is_cross_attention": True}, {}, "attn_type"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "encoder_only"),
        ({"logit_cap": 2.0, "logit_capping_method": "sigmoid"}, {}, "logit_capping_method"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "ALIBI"),
        ({"xai_temperature_len": 4}, {}, "xai_temperature_len"),
        ({}, {"q_rope": torch.ones(1)}, "q_rope"),
    ],
)
def test_layers_refused_before_anything_is_written(
    changed: dict[str, Any], kwargs: dict[str, Any], message: str
) -> None:
    requests = Requests(runner_of())
    before = requests.runner.token_to_kv_pool.get_key_buffer(0).clone()
    with pytest.raises(ValueError, match=message):
        requests.step(LENS, layer_of(**changed), **kwargs)
    assert torch.equal(requests.runner.token_to_kv_pool.get_key_buffer(0), before)


def test_steps_refused() -> None:
    requests = Requests(runner_of())
    requests.backend.init_cuda_graph_state(8, 8)
    with pytest.raises(ValueError, match=r"forward_mode.*TARGET_VERIFY"):
        requests.backend.init_forward_metadata(requests.batch((2, 2, 2), ForwardMode.TARGET_VERIFY))
    with pytest.raises(ValueError, match="DECODE in a CUDA graph"):
        requests.backend.init_forward_metadata_out_graph(requests.batch((2, 2, 2), ForwardMode.EXTEND))
