"""Parts of benchmarks/parallel.py about all-reduces of rows of 4096 elements.

``correct``: the ops against float64, for rows, dtypes, norms and kinds; all ranks must hold the same bits.
``replays``: 10^4 replays of captured calls with new inputs each time, on two streams in turn, one rank late now and
then, compared bit by bit with the same steps one by one.
``gathers``: the logits of a vocabulary of 128256, sharded over the ranks: checked in replays, and timed next to NCCL.
``reduce``: microseconds per call, 64 in one captured graph, of several designs, of NCCL and of PyTorch's ops.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from parallel import Bench
from torch import Tensor

from paged_ops.integrations.transformers.all_reduce_fusion import columns_of_parts
from paged_ops.lowerings.collectives import rms_norm
from paged_ops.lowerings.gpu import fused_allreduce as kernels
from paged_ops.parallel.all_reduce import prepare_all_reduce

C, CALLS = 4096, 64
NORMS: dict[str, dict[str, Any]] = {
    "llama": dict(eps=1e-5, rounds_first=True),
    "gemma": dict(eps=1e-6, weight_offset=1.0),
    "torch": dict(eps=1e-5),
}


def inputs(bench: Bench, seed: int, rows: int, dtype: torch.dtype, columns: int = C) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of all ranks, the residual and the weight: the same on all ranks."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    made = torch.randn(bench.size + 1, rows, columns, generator=generator, device=bench.device, dtype=torch.float32)
    weight = torch.randn(columns, generator=generator, device=bench.device, dtype=torch.float32)
    parts, residual = made.to(dtype).split([bench.size, 1])
    return parts, residual[0], weight.to(dtype)


def one_by_one(parts: Tensor, residual: Tensor, weight: Tensor, norm: dict[str, Any]) -> tuple[Tensor, Tensor]:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    summed = residual + total.to(residual.dtype)
    return summed, rms_norm(summed, weight, **norm)


def correct(bench: Bench) -> None:
    inner_norms(bench)
    for dtype, columns in ((torch.bfloat16, C), (torch.float32, C), (torch.float16, 2880), (torch.bfloat16, 8192)):
        sums = prepare_all_reduce(bench.group, columns, dtype, bench.device)
        bench.say(dtype, columns, sums.kind, sums.reason)
        assert sums.kind == "symmetric" or bench.options.get("plain"), sums.reason
        worst: dict[str, float] = {}
        seed = 0
        for rows, (name, norm), two_shot in itertools.product((1, 2, 16, 64, 256, 512, 600), NORMS.items(), (0, 1)):
            if two_shot and (rows > sums.max_rows or sums.places is None):
                continue
            seed += 1
            parts, residual, weight = inputs(bench, seed, rows, dtype, columns)
            if two_shot:
                summed, normed = torch.empty_like(residual), torch.empty_like(residual)
                own = parts[bench.rank].contiguous()
                kernels.reduce_rows(own, residual, weight, summed, normed, sums.places, two_shot=True, **norm)
            else:
                summed, normed = sums.add_norm(parts[bench.rank], residual, weight, **norm)
            want, want_normed = one_by_one(parts, residual, weight, norm)
            true = residual.double() + parts.double().sum(0)
            scale = norm.get("weight_offset", 0.0) + weight.double()
            true_normed = true / (true.square().mean(-1, keepdim=True) + norm["eps"]).sqrt() * scale
            ulp = torch.finfo(dtype).eps
            for key, got, exact, plain in (
                ("summed", summed, true, want),
                ("normed", normed, true_normed, want_normed),
            ):
                error = ((got.double() - exact).abs() / (exact.abs() + 1)).max().item() / ulp
                allowed = ((plain.double() - exact).abs() / (exact.abs() + 1)).max().item() / ulp
                worst[f"{key} ulp"] = max(worst.get(f"{key} ulp", 0), error)
                assert error <= 1.5 * allowed + 0.5, (dtype, rows, name, two_shot, key, error, allowed)
            if rows <= sums.max_rows:
                assert torch.equal(summed, want), (dtype, rows, name, two_shot)
            differ = (normed != want_normed).float().mean().item()
            worst["normed, of other bits than one by one"] = max(
                differ, worst.get("normed, of other bits than one by one", 0)
            )
            mine = torch.cat([summed, normed]).view(torch.uint8).long()
            digest = (mine * torch.arange(1, mine.shape[1] + 1, device=bench.device)).sum().item()
            assert len(set(bench.every(digest))) == 1, "the ranks hold other bits"
        compiled = torch.compile(functools.partial(sums.add_norm, **norm), fullgraph=True)
        for got, want in zip(compiled(parts[bench.rank], residual, weight), (summed, normed), strict=True):
            assert torch.equal(got, want), "compiled, it gives other bits"
        alone = sums.sum(parts[bench.rank][:64])
        total, _ = one_by_one(parts[:, :64], torch.zeros_like(residual[:64]), weight, norm)
        assert torch.equal(alone, total)
        bench.add(dtype=str(dtype), columns=columns, kind=sums.kind, **worst)


def replays(bench: Bench) -> None:
    """Each replay has four calls of different rows; the last one depends on the third."""
    count = int(bench.options.get("replays", 10_000))
    dtype, norm = torch.bfloat16, NORMS["llama"]
    sums = prepare_all_reduce(bench.group, C, dtype, bench.device)
    generator = torch.Generator(bench.device).manual_seed(1)
    weight = inputs(bench, 0, 1, dtype)[2]
    for shapes, kind in (((1, 16, 5, 5), "one shot"), ((64, 3, 256, 256), "one shot"), ((2, 33, 64, 64), "two shots")):
        parts = [torch.zeros(bench.size, rows, C, dtype=dtype, device=bench.device) for rows in shapes]
        residual = [torch.zeros(rows, C, dtype=dtype, device=bench.device) for rows in shapes]
        got: list[tuple[Tensor, Tensor]] = []

        def step(own: Tensor, left: Tensor, kind: str = kind) -> tuple[Tensor, Tensor]:
            summed, normed = torch.empty_like(own), torch.empty_like(own)
            two_shot = kind == "two shots"
            kernels.reduce_rows(own, left, weight, summed, normed, sums.places, two_shot=two_shot, **norm)
            return summed, normed

        def call(parts: Any = parts, residual: Any = residual, got: Any = got, step: Any = step) -> None:
            got[:] = [step(part[bench.rank], left) for part, left in zip(parts[:3], residual, strict=False)]
            got.append(step(parts[3][bench.rank], got[2][0]))

        graph = bench.capture(call)
        bad = torch.zeros(2, dtype=torch.int64, device=bench.device)
        streams = [torch.cuda.Stream(bench.device) for _ in range(2)]
        began = time.monotonic()
        here = torch.cuda.current_stream(bench.device)
        n = count if kind == "one shot" and shapes[0] == 1 else count // 5
        for i in range(n):
            with torch.cuda.stream(streams[i % 2]):
                streams[i % 2].wait_stream(streams[1 - i % 2])
                if i == 0:
                    streams[0].wait_stream(here)
                for part, left in zip(parts, residual, strict=True):
                    part.normal_(generator=generator)
                    left.normal_(generator=generator)
                if i % 16 == bench.rank:
                    torch.cuda._sleep(20_000 * (1 + i % 7))
                graph.replay()
                left = [*residual[:3], got[2][0]]
                for part, before, (summed, normed) in zip(parts, left, got, strict=True):
                    total = part[0].float()
                    for other in part[1:]:
                        total += other.float()
                    want = before + total.to(dtype)
                    bad[0] += (want != summed).sum()
                    bad[1] += (rms_norm(want, weight, **norm).float() - normed.float()).abs().gt(0.1).sum()
            if i % 1000 == 999:
                torch.cuda.synchronize(bench.device)
                bench.say(f"{i + 1} replays, {time.monotonic() - began:.1f} s, wrong {bad.tolist()}")
        torch.cuda.synchronize(bench.device)
        wrong = bench.every(bad.tolist())
        bench.add(replays=n, rows=shapes, kind=kind, wrong=wrong, seconds=round(time.monotonic() - began, 1))
        assert not any(map(any, wrong)), wrong


def reduce(bench: Bench) -> None:
    sums = prepare_all_reduce(bench.group, C, torch.bfloat16, bench.device, max_rows=2048)
    shared = symm_mem.empty(256 * C, dtype=torch.bfloat16, device=bench.device)
    symm_mem.rendezvous(shared, bench.group.group_name)
    shared.zero_()
    for rows in bench.options.get("rows", (1, 16, 64, 256, 512, 1024, 2048)):
        reduce_rows(bench, rows, sums.places, shared)


def reduce_rows(bench: Bench, rows: int, places: kernels.Places, shared: Tensor) -> None:
    norm, group = NORMS["llama"], bench.group.group_name
    parts, residual, weight = inputs(bench, rows, rows, torch.bfloat16)
    x = parts[bench.rank].contiguous()
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    compiled = torch.compile(lambda x, left, weight: (left + x, rms_norm(left + x, weight, **norm)), dynamic=False)

    def timed(name: str, call: Callable[[], Any]) -> None:
        try:
            us = bench.median_us(bench.capture(lambda: [call() for _ in range(CALLS)]), CALLS)
            bench.add(rows=rows, design=name, us=round(us, 2))
        except RuntimeError as error:
            bench.say(rows, name, "failed:", str(error)[:300])

    def ours(places: kernels.Places | None, two_shot: bool = False) -> None:
        kernels.reduce_rows(x, residual, weight, summed, normed, places, **norm, two_shot=two_shot)

    timed("one shot, add and norm", lambda: ours(places))
    timed("two shots, add and norm", lambda: ours(places, two_shot=True))
    timed("one shot, sum alone", lambda: kernels.reduce_rows(x, None, None, summed, None, places))
    timed("add and norm alone, ours", lambda: ours(None))
    timed("add and norm alone, compiled", lambda: compiled(x, residual, weight))
    timed("NCCL", lambda: dist.all_reduce(x, group=bench.group))
    if rows * C <= len(shared):
        flat = shared[: rows * C]
        timed("torch one_shot_all_reduce", lambda: torch.ops.symm_mem.one_shot_all_reduce(flat, "sum", group))
        timed("torch two_shot_all_reduce_", lambda: torch.ops.symm_mem.two_shot_all_reduce_(flat, "sum", group))


def inner_norms(bench: Bench) -> None:
    """What is added to the residual stream is normed, as in Gemma-2."""
    sums, norm = prepare_all_reduce(bench.group, C, torch.bfloat16, bench.device), NORMS["gemma"]
    for rows in (1, 33, 300):
        parts, residual, weight = inputs(bench, rows, rows, torch.bfloat16)
        inner = weight.flip(0).contiguous()
        got = sums.add_norm(parts[bench.rank], residual, weight, **norm, inner_weight=inner, inner_eps=1e-5)
        total, _ = one_by_one(parts, torch.zeros_like(residual), weight, norm)
        summed = residual + rms_norm(total, inner, **norm | {"eps": 1e-5})
        wrong = [
            float((summed != got[0]).float().mean()),
            float((rms_norm(got[0], weight, **norm) != got[1]).float().mean()),
        ]
        bench.add(rows=rows, inner_norm=True, other_bits=wrong)
        assert max(wrong) < 1e-3, wrong


def gathers(bench: Bench) -> None:
    inner_norms(bench)
    rows_here, dtype = 128256 // bench.size, torch.bfloat16
    columns = columns_of_parts(rows_here)
    assert columns is not None
    parts_of_row = rows_here // columns
    sums = prepare_all_reduce(bench.group, columns, dtype, bench.device, max_rows=64 * parts_of_row)
    generator = torch.Generator(bench.device).manual_seed(4)  # the same on all ranks
    for rows in (1, 16, 64):
        parts = torch.zeros(bench.size, rows, rows_here, dtype=dtype, device=bench.device)
        got: list[Tensor] = []

        def call(parts: Tensor = parts, got: list[Tensor] = got) -> None:
            got[:] = [sums.gather(parts[bench.rank])]

        graph, wrong = bench.capture(call), torch.zeros((), dtype=torch.int64, device=bench.device)
        for i in range(300):
            parts.normal_(generator=generator)
            if i % 16 == bench.rank:
                torch.cuda._sleep(20_000)
            graph.replay()
            wrong += (got[0] != torch.cat(list(parts), -1)).sum()
        every = bench.every(int(wrong))
        ours = bench.median_us(bench.capture(lambda: [call() for _ in range(16)]), 16)
        own, out = parts[bench.rank].contiguous(), torch.empty_like(parts)

        def backend(own: Tensor = own, out: Tensor = out) -> None:
            for _ in range(16):
                dist.all_gather_into_tensor(out.view(-1, own.shape[-1]), own, group=bench.group)
                out.transpose(0, 1).flatten(1)

        nccl = bench.median_us(bench.capture(backend), 16)
        bench.add(rows=rows, columns=128256, kind=sums.kind, wrong=every, us=round(ours, 2), nccl_us=round(nccl, 2))
        assert not any(every), every
