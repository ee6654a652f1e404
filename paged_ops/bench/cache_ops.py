"""Measures the cache ops on the current GPU. A row has the op, the case, time, bytes, and whether the result was right.

Device ops: CUDA-graph replays over buffers several times the L2, median of 30, outputs filled with NaN first and
compared afterwards. Swaps cannot be captured: events around calls on a busy GPU give the time that they add to a
stream, and ``call_us`` is a call on an idle GPU, with the host's share.

Letters as in :mod:`paged_ops.ops`.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import paged_ops
from paged_ops import layouts, reference
from paged_ops.registry import lowering

DEVICE = "cuda"
L2_SEVERAL = 5 * 64 << 20
K, D, B = 8, 128, 16
Row = dict[str, Any]


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 30) -> float:
    """Microseconds per call, replayed one after the other from one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def call_us(call: Callable[[], Any], busy_cycles: int = 0, repeats: int = 12) -> float:
    """Microseconds of one eager call until its end on the device: from its start on the host, or, if the GPU is first
    kept busy for ``busy_cycles`` (longer than the host takes), from its start on the stream."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def write_row(
    case: str,
    T: int,
    layout: str = "NHD",
    stored: torch.dtype = torch.bfloat16,
    scales: int = 0,
    fused: bool = False,
    target: float | None = None,
) -> Row:
    nbytes = 2 * T * K * D * (2 + stored.itemsize)
    sets = max(2, math.ceil(L2_SEVERAL / nbytes))
    N = sets * max(T // B, 16)
    storage = torch.empty(paged_ops.kv_cache_shape(layout, N, B, K, D), dtype=stored, device=DEVICE)
    kv_cache, value_cache = paged_ops.kv_cache_view(layout, storage), None
    if layout == "X_PACKED":
        kv_cache, value_cache = paged_ops.layouts.split_kv_cache(kv_cache, K, D)
    named: dict[str, Any] = {"value_cache": value_cache}
    if scales:
        named["k_scale"], named["v_scale"] = (torch.rand(scales, device=DEVICE) * 0.02 + 0.01 for _ in range(2))
    if T % B == 0 and T >= 1024:  # whole blocks of a prefill, in any order
        slots = (torch.randperm(N, device=DEVICE)[:, None] * B + torch.arange(B, device=DEVICE)).view(-1)[: sets * T]
    else:
        slots = torch.randperm(N * B, device=DEVICE)[: sets * T]
    batches = []
    for n in range(sets):
        qkv = torch.randn(T, 6 * K if fused else 2 * K, D, dtype=torch.bfloat16, device=DEVICE)
        batches.append((qkv[:, -2 * K : -K], qkv[:, -K:], slots[n * T : (n + 1) * T].clone()))
    if not fused:
        batches = [(key.contiguous(), value.contiguous(), slot) for key, value, slot in batches]
    storage.view(torch.uint8).fill_(0x7F)
    write = lowering("reshape_and_cache", "CUDA")
    calls = [functools.partial(write, key, value, kv_cache, slot, **named) for key, value, slot in batches]
    us = graph_us(calls)
    paged = layouts.paged_kv(kv_cache, value_cache)
    right = True
    for key, value, slot in (batches[0], batches[-1]):
        block, offset = slot // B, slot % B
        want_key = reference.quantise(key, named.get("k_scale"), stored)
        want_value = reference.quantise(value, named.get("v_scale"), stored)
        bits = torch.uint8 if stored.itemsize == 1 else torch.int16
        got_key = paged.key.view(bits)[block, offset].flatten(2)
        got_value = paged.value.view(bits)[block, offset]
        right &= same(got_key, want_key.view(bits)) and same(got_value, want_value.view(bits))
    return {"op": "reshape_and_cache", "case": case, "us": us, "bytes": nbytes, "target_us": target, "right": right}


def latent_write_row(case: str, T: int, stored: torch.dtype = torch.bfloat16, kv_cache_dtype: str = "auto") -> Row:
    R, P, block_size = 512, 64, 64
    scaled = layouts.has_row_scales(kv_cache_dtype)
    columns = layouts.ROW_BYTES if scaled else R + P
    nbytes = T * ((R + P) * 2 + columns * stored.itemsize)
    sets = max(2, math.ceil(L2_SEVERAL / nbytes))
    N = sets * max(T // block_size, 16)
    kv_cache = torch.empty(N, block_size, columns, dtype=stored, device=DEVICE)
    kv_cache.view(torch.uint8).fill_(0x7F)
    named: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    if stored.itemsize == 1 and not scaled:
        named["k_scale"] = torch.full((1,), 0.02, device=DEVICE)
    slots = torch.randperm(N * block_size, device=DEVICE)[: sets * T].view(sets, T)
    rows = torch.randn(sets, T, R + P, dtype=torch.bfloat16, device=DEVICE)  # both parts by one projection
    write = lowering("latent_cache_write", "CUDA")
    calls = [
        functools.partial(write, row[:, :R], row[:, R:], kv_cache, slot, **named)
        for row, slot in zip(rows, slots, strict=True)
    ]
    us = graph_us(calls)
    bits = torch.uint8 if stored.itemsize == 1 else torch.int16
    got = kv_cache.view(bits).flatten(0, 1)

    def held(row: Tensor) -> Tensor:
        if scaled:
            return reference.quantise_rows(row[:, :R], row[:, R:])
        return reference.quantise(row[:, None], named.get("k_scale"), stored)[:, 0].view(bits)

    wanted = map(held, rows)
    right = all(same(got[slot], want) for slot, want in zip(slots, wanted, strict=True))
    return {"op": "latent_cache_write", "case": case, "us": us, "bytes": nbytes, "right": right}


def writes() -> Iterator[Row]:
    yield write_row("8192 tokens, bf16", 8192, target=18.5)
    yield write_row("8192 tokens, bf16, HND", 8192, "HND")
    yield write_row("8192 tokens, bf16, fused qkv", 8192, fused=True)
    yield write_row("8192 tokens, bf16, x-packed", 8192, "X_PACKED")
    yield write_row("256 tokens, bf16", 256, target=2.3)
    yield write_row("8192 tokens, bf16 to e4m3, scale [1]", 8192, stored=torch.float8_e4m3fn, scales=1, target=16.0)
    yield write_row("8192 tokens, bf16 to e4m3, scale [K]", 8192, stored=torch.float8_e4m3fn, scales=K, target=16.0)
    yield write_row("8192 tokens, bf16 to e4m3, no scale", 8192, stored=torch.float8_e4m3fn, target=16.0)
    yield latent_write_row("8192 tokens, bf16", 8192)
    yield latent_write_row("64 tokens, bf16", 64)
    yield latent_write_row("8192 tokens, bf16 to e4m3", 8192, torch.float8_e4m3fn)
    for tokens in (8192, 64):
        yield latent_write_row(f"{tokens} tokens, bf16 to fp8_ds_mla", tokens, torch.uint8, layouts.FP8_DS_MLA)


def copy_row(case: str, layers: int, pairs: int, block_bytes: int, target: float | None = None) -> Row:
    moved = 2 * layers * pairs * block_bytes
    sets = max(1, math.ceil(L2_SEVERAL / moved))
    N = 2 * sets * pairs
    caches = [torch.randint(0, 255, (N, block_bytes), dtype=torch.uint8, device=DEVICE) for _ in range(layers)]
    before = [each.clone() for each in caches] if N * block_bytes * layers < 1 << 30 else None
    mappings = list(torch.randperm(N, device=DEVICE).view(sets, pairs, 2).unbind(0))
    us = graph_us([functools.partial(paged_ops.copy_blocks, caches, mapping) for mapping in mappings])
    right = True
    for n, each in enumerate(caches):
        for mapping in (mappings[0], mappings[-1]):
            right &= torch.equal(each[mapping[:, 1]], each[mapping[:, 0]])
            right &= before is None or torch.equal(each[mapping[:, 0]], before[n][mapping[:, 0]])
    return {"op": "copy_blocks", "case": case, "us": us, "bytes": moved, "target_us": target, "right": right}


def copies() -> Iterator[Row]:
    yield copy_row("1024 blocks of 32 KiB", 1, 1024, 32 << 10, 18.5)
    yield copy_row("32 layers, 32 blocks of 64 KiB", 32, 32, 64 << 10)
    yield copy_row("1024 blocks of 1 MiB", 1, 1024, 1 << 20, 540.0)


def swap_rows(block_bytes: int, layers: int, dense_target: float, scattered_target: float) -> Iterator[Row]:
    P, hosted = 1024, 2048  # pairs, and blocks of the host
    device_caches = [torch.empty(P, block_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(layers)]
    host_caches = [torch.empty(hosted, block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(layers)]
    for host_is_dense, to_host in itertools.product((True, False), (True, False)):
        on_device, on_host = torch.randperm(P), torch.arange(P) if host_is_dense else torch.randperm(hosted)[:P]
        mapping = torch.stack((on_device, on_host) if to_host else (on_host, on_device), 1)
        sources, targets = (device_caches, host_caches) if to_host else (host_caches, device_caches)
        for each in sources:
            words = each.view(torch.int32)
            words.copy_(torch.arange(words.numel(), dtype=torch.int32, device=each.device).view_as(words))
        for each in targets:
            each.fill_(0x7F)

        def swap(sources: Any = sources, targets: Any = targets, mapping: Any = mapping) -> None:
            paged_ops.swap_blocks(sources, targets, mapping)

        us, idle_us = call_us(swap, busy_cycles=30_000_000), call_us(swap)
        right = all(
            torch.equal(source[mapping[:64, 0]].cpu(), target[mapping[:64, 1]].cpu())
            for source, target in zip(sources, targets, strict=True)
        )
        size, way = f"{layers} x 1024 blocks of {block_bytes >> 10} KiB", "to" if to_host else "from"
        yield {
            "op": "swap_blocks",
            "case": f"{size} {way} the host, {'dense' if host_is_dense else 'scattered'} there",
            "us": us,
            "call_us": idle_us,
            "bytes": layers * P * block_bytes,
            "target_gbps": dense_target if host_is_dense else scattered_target,
            "right": right,
        }


def swaps() -> Iterator[Row]:
    yield from swap_rows(32 << 10, 1, 51.5, 49.0)
    yield from swap_rows(1 << 20, 1, 53.5, 52.0)


def merge_row(T: int, H: int, Dv: int, target: float | None = None) -> Row:
    nbytes = 3 * T * H * (Dv * 2 + 4)
    sets = max(2, math.ceil(L2_SEVERAL / nbytes))
    sides = []
    for _ in range(sets):
        side = []
        for _ in range(2):
            lse = torch.randn(T, H, device=DEVICE)
            lse[torch.rand(T, H, device=DEVICE) < 0.1] = -torch.inf
            side += [torch.randn(T, H, Dv, dtype=torch.bfloat16, device=DEVICE), lse]
        outs = torch.empty(T, H, Dv, dtype=torch.bfloat16, device=DEVICE), torch.empty(T, H, device=DEVICE)
        sides.append((side, tuple(out.fill_(torch.nan) for out in outs)))
    merge = lowering("merge_attention_states", "CUDA")
    calls = [functools.partial(merge, *side, out=out) for side, out in sides]
    us = graph_us(calls)
    (a, lse_a, b, lse_b), (out, lse) = sides[-1]
    want, want_lse = reference.merge_attention_states(a.double(), lse_a, b.double(), lse_b)
    finite = want_lse > -torch.inf
    right = torch.equal(finite, lse > -torch.inf) and bool((lse - want_lse)[finite].abs().max() < 1e-5)
    right &= bool((out.double() - want).abs().max() < 2 * 2**-8 * float(want.abs().max()))
    return {"op": "merge_attention_states", "case": f"{T} x {H} x {Dv}", "us": us, "bytes": nbytes, "target_us": target,
            "right": right}  # fmt: skip


def merges() -> Iterator[Row]:
    yield merge_row(4096, 32, 128, 25.0)


def gathers() -> Iterator[Row]:
    S, length, M = 8, 1024, 64
    N = 4 * S * M
    kv_cache = torch.randn(N, 2, B, K, D, dtype=torch.bfloat16, device=DEVICE)
    tables = torch.randperm(N, device=DEVICE, dtype=torch.int32).view(4, S, M)
    lens = torch.full((S,), length, dtype=torch.int32, device=DEVICE)
    outs = [tuple(torch.full((S * length, K, D), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            for _ in range(4)]  # fmt: skip
    gather = lowering("gather_kv", "CUDA")
    calls = [functools.partial(gather, kv_cache, tables[n], lens, S * length, out=outs[n]) for n in range(4)]
    us = graph_us(calls)
    blocks = tables[-1].view(-1).long()
    right = all(same(outs[-1][side], kv_cache[blocks, side].view(S * length, K, D)) for side in range(2))
    yield {"op": "gather_kv", "case": "8 x 1024 tokens", "us": us, "bytes": 4 * S * length * K * D * 2, "right": right}
    latents = torch.randn(N, B, 576, dtype=torch.bfloat16, device=DEVICE)
    pairs = [tuple(torch.full((S * length, 1, D_), torch.nan, dtype=torch.bfloat16, device=DEVICE) for D_ in (576, 0))
             for _ in range(4)]  # fmt: skip
    us = graph_us([functools.partial(gather, latents, tables[n], lens, S * length, out=pairs[n]) for n in range(4)])
    right = same(pairs[-1][0], latents[blocks].view(S * length, 1, 576))
    nbytes = 2 * S * length * 576 * 2
    yield {"op": "gather_kv", "case": "8 x 1024 latents of 576", "us": us, "bytes": nbytes, "right": right}
    rows = reference.quantise_rows(latents[..., :512], latents[..., 512:])
    named = {"kv_cache_dtype": layouts.FP8_DS_MLA, "dtype": torch.bfloat16}
    us = graph_us(
        [functools.partial(gather, rows, tables[n], lens, S * length, out=pairs[n], **named) for n in range(4)]
    )
    right = same(pairs[-1][0], reference.dequantise_rows(rows[blocks].view(S * length, 1, -1), torch.bfloat16))
    nbytes = S * length * (576 * 2 + layouts.ROW_BYTES)
    yield {"op": "gather_kv", "case": "8 x 1024 latents of fp8_ds_mla", "us": us, "bytes": nbytes, "right": right}


PARTS = {
    "write": writes,
    "copy": copies,
    "merge": merges,
    "gather": gathers,
    "swap": swaps,
}
