"""Attention of torch itself as providers: FlexAttention, varlen_attn, and SDPA over dense keys and values."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_ops.bench.cases import Case, Inputs


class Flex:
    """FlexAttention, compiled, with torch's PagedAttention over pages of its own size."""

    name = "FlexAttention"
    distribution = "torch"
    PAGE = 128

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append("compared on cuda")
        if len({q_len for q_len, _ in case.seqs}) > 1:
            reasons.append("queries of one length")
        if case.stored.itemsize == 1:
            reasons.append("no fp8 cache")
        if case.captured_len is not None:
            reasons.append("a mask is made for fixed lengths")
        if case.value_head_size is not None or case.head_size & (case.head_size - 1):
            reasons.append("head size: a power of two")
        if (case.num_heads // case.num_kv_heads) & (case.num_heads // case.num_kv_heads - 1):
            reasons.append("group: a power of two")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return [self._prepare(each, compiled) for each in sets]

    def _prepare(self, inputs: Inputs, compiled: Callable[..., Any]) -> Callable[[], Tensor]:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask

        case, device = inputs.case, inputs.query.device
        S, q_len = len(case.seqs), case.seqs[0][0]
        longest = max(seq_len for _, seq_len in case.seqs)
        pages = sum(-(-seq_len // self.PAGE) for _, seq_len in case.seqs)
        paged = PagedAttention(pages, self.PAGE, S, device=str(device))
        paged.empty_pages = torch.randperm(pages).tolist()
        shape = (1, case.num_kv_heads, pages * self.PAGE, case.head_size)
        key, value = (torch.zeros(shape, dtype=case.dtype, device=device) for _ in range(2))
        for s, (_, seq_len) in enumerate(case.seqs):
            row = torch.tensor([s], device=device)
            paged.reserve(torch.tensor(s, device=device), torch.tensor(seq_len, device=device))
            k, v = inputs.sequence(s).transpose(1, 2)[:, None]  # [1, K, n, D] each
            paged.assign(row, torch.arange(seq_len, device=device)[None], k, v, key, value)
        first = inputs.seq_lens - q_len  # the position of a sequence's first query

        def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv <= first[b] + q

        mask = create_block_mask(causal, S, None, q_len, longest, device=str(device), BLOCK_SIZE=self.PAGE)
        mask = paged.convert_logical_block_mask(mask, kv_len=inputs.seq_lens)
        query = inputs.query.view(S, q_len, case.num_heads, case.head_size).transpose(1, 2)

        def call() -> Tensor:
            out = compiled(query, key, value, block_mask=mask, scale=inputs.scale, enable_gqa=True)
            return out.transpose(1, 2)

        return call


class VarlenAttn:
    """``torch.nn.attention.varlen.varlen_attn`` over the same cache."""

    name = "varlen_attn"
    distribution = "torch"
    FIRST = (2, 15)  # of torch: on Hopper it has pages of a power of two tokens, by cuDNN 9.24, for heads of up to 128
    LARGEST_HEAD = 128

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
            reasons.append("runs on Hopper")
        if tuple(map(int, torch.__version__.split(".")[:2])) < self.FIRST:
            reasons.append("torch 2.15 or newer")
        if case.dtype == torch.float32 or case.stored != case.dtype:
            reasons.append("float16 or bfloat16, also in the cache")
        if case.value_head_size is not None or case.head_size > self.LARGEST_HEAD:
            reasons.append(f"head size: up to {self.LARGEST_HEAD}")
        if case.block_size & (case.block_size - 1):
            reasons.append("block size: a power of two")
        if case.captured_len is not None:
            reasons.append("takes the longest length from the host")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        return [self._prepare(each) for each in sets]

    def _prepare(self, inputs: Inputs) -> Callable[[], Tensor]:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")  # torch 2.10
        longest = [max(lengths) for lengths in zip(*inputs.case.seqs, strict=True)]  # of the queries, and of the keys
        return functools.partial(
            varlen.varlen_attn,
            inputs.query,
            inputs.kv_cache[:, 0],
            inputs.kv_cache[:, 1],
            inputs.query_start_loc,
            None,
            *longest,
            scale=inputs.scale,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_tables,
        )


class DenseSDPA:
    """``scaled_dot_product_attention`` over dense keys and values: paging should not be slower."""

    name = "SDPA dense"
    distribution = "torch"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        reasons = []
        if len(set(case.seqs)) > 1:
            reasons.append("sequences of one shape")
        if case.seqs[0][0] not in (1, case.seqs[0][1]):
            reasons.append("one query per sequence, or equally many queries and keys")
        if case.stored.itemsize == 1:
            reasons.append("no fp8")
        if case.value_head_size is not None:
            reasons.append("keys and values of one size, not shared")
        if case.captured_len is not None:
            reasons.append("lengths are shapes")
        return reasons

    def prepare(self, sets: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default; importing vLLM switches it off
        return [self._prepare(each) for each in sets]

    def _prepare(self, inputs: Inputs) -> Callable[[], Tensor]:
        case = inputs.case
        S, q_len = len(case.seqs), case.seqs[0][0]
        kv = torch.stack([inputs.sequence(s) for s in range(S)]).permute(1, 0, 3, 2, 4).contiguous()  # [2, S, K, n, D]
        query = inputs.query.view(S, q_len, case.num_heads, case.head_size).transpose(1, 2)

        def call() -> Tensor:
            out = F.scaled_dot_product_attention(
                query, kv[0], kv[1], is_causal=q_len > 1, scale=inputs.scale, enable_gqa=True
            )
            return out.transpose(1, 2)

        return call
