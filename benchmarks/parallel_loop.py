"""Parts of benchmarks/parallel.py: the loop over a sharded model, transfers of blocks, and bits on one and two ranks.

``loop``: milliseconds per decode step of ``GenerationLoop`` over the Llama-3-8B shape on all GPUs, next to its captured
step with the choice of tokens: with and without overlap, inside ``generate`` and with a look at each token.
``transfer``: ``send_blocks`` and ``recv_blocks`` between two GPUs: the bytes that arrive, and their rate.
``bits``: whether sharded layers give the bits of one GPU, and what one GPU pays to compute in their order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel import Bench
from torch import Tensor

import paged_ops
from paged_ops import KVCache
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.integrations.transformers.projections import fuse_projections
from paged_ops.parallel.all_reduce import prepare_all_reduce
from paged_ops.parallel.transfer import recv_blocks, send_blocks

BF16 = torch.bfloat16


class Timed:
    """A loop over S prompts of 1000 tokens, which are computed once and then found in the cache."""

    def __init__(self, bench: Bench, paged: PagedCausalLM, S: int) -> None:
        self.bench = bench
        cache = paged.allocate_kv_cache(S * 84 + 64, 16)
        self.loop = GenerationLoop(
            paged, cache, max_num_seqs=max(S, 2), max_num_tokens=2048, graph_mode="FULL_DECODE_ONLY", overlap=True
        )
        self.prompts = [[(7 * i + 13 * j) % 100_000 for j in range(1000)] for i in range(S)]
        self.tokens: list[Any] = []  # the first ones of each run

    def seconds(self, count: int, on_token: Any) -> float:
        dist.barrier(group=self.bench.group)
        began = time.perf_counter()
        params = SamplingParams(max_new_tokens=count, temperature=0, stop_token_ids=())
        outputs = self.loop.generate(self.prompts, params, on_token)
        self.tokens.append([list(each)[:16] for each in outputs])
        return time.perf_counter() - began

    def ms_per_step(self, overlap: bool, on_token: Any) -> float:
        self.loop._steps._overlaps = overlap
        self.seconds(16, on_token)
        short, steps = self.seconds(20, on_token), self.loop.stats.steps
        taken = self.seconds(220, on_token) - short
        return 1e3 * taken / (self.loop.stats.steps - steps - 20)


def loop(bench: Bench) -> None:
    import loop as of_one_gpu
    from parallel_steps import OPTIONS, _whole, overlapping, shard

    model = shard(_whole(), bench)
    paged = PagedCausalLM(model, max_model_len=8192)
    fuse_projections(model)
    overlapping(model)
    paged.compile_layers(options=OPTIONS)
    for S in bench.options.get("sequences", (1, 64)):
        timed = Timed(bench, paged, S)
        began = time.monotonic()
        timed.loop.warm_up()
        warm_up, stats = time.monotonic() - began, timed.loop.stats
        times: dict[str, float] = {}
        for overlap in (True, False, True, False):
            for name, on_token in (("generate", None), ("on_token", lambda new: None)):
                name = f"{'overlapped' if overlap else 'in turn'}, {name}"
                ms = timed.ms_per_step(overlap, on_token)
                times[name] = round(min(times.get(name, ms), ms), 3)
        graph, with_choice = of_one_gpu.captured_ms(timed.loop, S)
        bench.add(
            sequences=S,
            context="1000 to 1220",
            captured_ms=round(max(bench.every(graph)), 3),
            captured_and_likeliest_ms=round(max(bench.every(with_choice)), 3),
            loop_ms=times,
            overlapped_steps=stats.overlapped_steps,
            steps=stats.steps,
            same_tokens=all(each == timed.tokens[1] for each in timed.tokens[1:]),  # the first computes its prompts
            warm_up_s=round(warm_up, 1),
            all_reduces=paged.sums.kind if paged.sums else None,
        )
        timed.loop.close()
        del timed


def transfer(bench: Bench) -> None:
    def cache() -> KVCache:
        return KVCache(32, 1024, 16, 8, 128, dtype=BF16, device=bench.device)

    kv_cache = cache()
    generator = torch.Generator(bench.device).manual_seed(3)
    ids = torch.randperm(1024, generator=torch.Generator().manual_seed(5)).tolist()
    for layer in kv_cache.layers:
        layer.normal_(generator=generator)  # the same numbers on both ranks
    want = [layer.clone() for layer in kv_cache.layers]
    if bench.rank == 1:
        for layer in kv_cache.layers:
            layer.fill_(torch.nan)
    for blocks in (1, 64, 1000):
        taken = []
        for _ in range(5):
            torch.cuda.synchronize(bench.device)
            dist.barrier(group=bench.group)
            began = time.perf_counter()
            if bench.rank == 0:
                send_blocks(kv_cache, ids[:blocks], 1)
            elif bench.rank == 1:
                recv_blocks(kv_cache, ids[:blocks], 0)
            torch.cuda.synchronize(bench.device)
            taken.append(time.perf_counter() - began)
        right = all(
            torch.equal(layer[ids[:blocks]], each[ids[:blocks]])
            for layer, each in zip(kv_cache.layers, want, strict=True)
        )
        untouched = bench.rank != 1 or all(layer[ids[blocks:]].isnan().all() for layer in kv_cache.layers)
        size = blocks * sum(layer[0].nbytes for layer in kv_cache.layers)
        seconds = max(bench.every(min(taken)))
        checks = bench.every((right, bool(untouched)))
        bench.add(
            blocks=blocks, bytes=size, ms=round(1e3 * seconds, 3), gb_s=round(size / seconds / 1e9, 1), right=checks
        )
        assert all(map(all, checks)), checks


# Bits


Linear = Callable[[Tensor, Tensor], Tensor]


def _last_given(linear: Linear, weight: Tensor, x: Tensor) -> Tensor:
    return linear(x, weight)


def in_parts(linear: Linear, weight: Tensor, ranks: int, x: Tensor) -> Tensor:
    """A row-parallel layer on one GPU in the order of ``ranks``: partial results are rounded to x's dtype, then added
    in float32."""
    parts = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)  # views, also of the weight
    total = None
    for columns, part in parts:
        result = linear(columns, part).float()
        total = result if total is None else total + result
    assert total is not None
    return total.to(x.dtype)


def bits(bench: Bench) -> None:
    """Of Llama-3-8B's layers: elements with other bits than on one GPU, and microseconds on one GPU."""
    device, rank, size = bench.device, bench.rank, bench.size
    invariant = torch.ops.paged_ops_models.invariant_linear.default
    kinds: dict[str, Linear] = {"cuBLAS": F.linear, "invariant": invariant}
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(BF16)

    def differing(a: Tensor, b: Tensor) -> int:
        return max(bench.every(int((a.view(torch.int16) != b.view(torch.int16)).sum())))

    sizes = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "lm_head": (128256, 4096)}
    for name, (outputs, inputs) in sizes.items():
        weight = randn(outputs, inputs) * inputs**-0.5
        own = weight.chunk(size)[rank].contiguous()
        for T in (1, 16, 64, 512):
            x = randn(T, inputs)
            for kind, linear in kinds.items():
                whole = linear(x, weight).chunk(size, -1)[rank].contiguous()
                found = differing(linear(x, own), whole)
                bench.add(layer=name, parallel="columns", rows=T, linear=kind, other_bits=found, of=whole.numel())
    for name, (outputs, inputs) in {"o_proj": (4096, 4096), "down_proj": (4096, 14336)}.items():
        weight = randn(outputs, inputs) * inputs**-0.5
        own = weight.chunk(size, -1)[rank].contiguous()
        reducer = prepare_all_reduce(bench.group, outputs, BF16, device)
        for kind, linear in kinds.items():
            alone = functools.partial(_last_given, linear, weight)
            plain = functools.partial(in_parts, linear, weight, size)
            torch._dynamo.reset()
            compiled = torch.compile(plain, dynamic=False)
            for T in (1, 16, 64, 512):
                x = randn(T, inputs)
                sharded = reducer.sum(linear(x.chunk(size, -1)[rank].contiguous(), own))
                us = {
                    each: round(bench.median_us(bench.capture(functools.partial(call, x))), 2)
                    for each, call in (("one matmul", alone), ("in parts", compiled))
                }
                bench.add(
                    layer=name,
                    parallel="rows",
                    rows=T,
                    linear=kind,
                    other_bits=differing(sharded, alone(x)),
                    other_bits_in_parts=differing(sharded, plain(x)),
                    other_bits_in_parts_compiled=differing(sharded, compiled(x)),
                    of=sharded.numel(),
                    us_on_one_gpu=us,
                )
    H, K, D = 32, 8, 128
    heads, kv_heads = slice(rank * H // size, (rank + 1) * H // size), slice(rank * K // size, (rank + 1) * K // size)
    for S, context, q_len in ((1, 1024, 1), (1, 32768, 1), (16, 4096, 1), (64, 1024, 1), (2, 2048, 512)):
        columns = context // 16
        kv_cache = randn(S * columns, 2, 16, K, D)
        tables = torch.arange(S * columns, dtype=torch.int32, device=device).view(S, columns)
        lens = torch.full((S,), context - 3, dtype=torch.int32, device=device)
        starts = torch.arange(S + 1, dtype=torch.int32, device=device) * q_len
        query = randn(S * q_len, H, D)
        batch = tables, lens, starts, D**-0.5
        whole = paged_ops.paged_attention(query, kv_cache, *batch)[:, heads].contiguous()
        own_cache = kv_cache[..., kv_heads, :].contiguous()
        found = differing(paged_ops.paged_attention(query[:, heads].contiguous(), own_cache, *batch), whole)
        bench.add(layer="attention", rows=f"{S} x {q_len} of {context}", other_bits=found, of=whole.numel())
