"""Context parallelism, parts of benchmarks/parallel.py: is it right, and how long do attention and its exchange take?

- ``context``: the exchange by itself, eager and in captured graphs, of symmetric memory and of NCCL; then its times.
- ``context_attention``: decodes of long sequences, in one captured graph that is replayed with other lengths; then the
  times of one GPU with the whole cache, and of all GPUs with a shard each. Caches are larger than the L2.
- ``context_loop``: captured steps of a generation loop, with the tokens of one GPU.
- ``context_kinds``: every kind of batch against float64.
"""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import paged_ops
from paged_ops.cache.shard import TokenShard
from paged_ops.metadata import AttentionMetadataBuilder, Batch
from paged_ops.metadata.step import ContextMetadata
from paged_ops.parallel.context import Context, attend

H, K, D, B = 32, 8, 128, 16
BF16 = torch.bfloat16
CALLS, REPLAYS = 16, 10


class Run:
    """A part, and the contexts of its checks."""

    def __init__(self, bench: Any) -> None:
        self.bench, self.rank, self.size, self.device = bench, bench.rank, bench.size, bench.device
        self.wide = Context(dist.group.WORLD, self.device, head_size=D, dtype=torch.float32)
        self.context = Context(dist.group.WORLD, self.device, head_size=D, dtype=BF16)
        self.by_collectives = Context(dist.group.WORLD, self.device, head_size=D, dtype=BF16, collectives=True)

    def each(self, *functions: Callable[[Run], None]) -> None:
        """Runs them one by one; one that fails on every rank leaves the next."""
        failed = []
        for function in functions:
            try:
                function(self)
            except Exception:
                name = getattr(function, "__name__", "attention")
                print(f"rank {self.rank}, {name}: {traceback.format_exc()}", flush=True)
                failed.append(name)
            gc.collect()
            torch.cuda.empty_cache()
            dist.barrier()
        assert not failed, failed

    def note(self, what: str, value: dict[str, Any]) -> None:
        self.bench.add(what=what, **value)

    def all_agree(self, tensor: Tensor) -> bool:
        """Whether all ranks hold the same bits."""
        mine = tensor.contiguous().view(torch.uint8).flatten()
        every = torch.empty(self.size, len(mine), dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(every.view(-1), mine)
        return bool((every == every[0]).all())


def capture(call: Callable[[int], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    for n in range(min(calls, 2)):
        call(n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [call(n) for n in range(calls)]
    return graph, results


def timed(run: Run, graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds per call."""
    return round(run.bench.median_us(graph, calls, REPLAYS), 2)


def truth_of(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lses = lses.double()
    total = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - total))
    return (torch.where(weights[..., None] == 0, 0.0, parts.double()) * weights[..., None]).sum(0), total


def make_parts(size: int, T: int, heads: int, dtype: torch.dtype, seed: int, device: Any) -> tuple[Tensor, Tensor]:
    """Of all ranks, by the same seed: some without keys, with NaN as output."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = torch.randn(size, T, heads, D, generator=generator, device=device).to(dtype)
    lses = torch.randn(size, T, heads, generator=generator, device=device) * 3
    empty = torch.rand(size, T, heads, generator=generator, device=device) < 0.1
    lses[empty], parts[empty] = -torch.inf, torch.nan
    return parts, lses


def exchange_is_right(run: Run) -> None:
    worst, agree = 0.0, True
    wrong = count = 0
    for context, dtype in ((run.context, BF16), (run.wide, torch.float32), (run.by_collectives, BF16)):
        for T, heads in ((1, 32), (8, 32), (64, 32), (3, 5), (128, 32), (200, 32)):
            for seed in range(6):
                parts, lses = make_parts(run.size, T, heads, dtype, seed, run.device)
                out, lse = context.exchange.everywhere(parts[run.rank], lses[run.rank])
                want, total = truth_of(parts, lses)
                error = float((out.double() - want).abs().max()) / (4e-6 if dtype is torch.float32 else 0.032)
                worst = max(worst, error)
                wrong += not (error < 1.0 and torch.allclose(lse.double(), total, atol=1e-5))
                agree &= run.all_agree(out) and run.all_agree(lse)
                count += 1
            own = heads // run.size
            if heads % run.size == 0:
                parts, lses = make_parts(run.size, T, heads, dtype, 99, run.device)
                out, _ = context.exchange.of_own_heads(parts[run.rank], lses[run.rank])
                want = truth_of(parts, lses)[0][:, run.rank * own : (run.rank + 1) * own]
                wrong += not float((out.double() - want).abs().max()) < (4e-6 if dtype is torch.float32 else 0.032)
    wrong = sum(run.bench.every(wrong))  # a rank that raised before would leave the others waiting
    how = [each.exchange.how for each in (run.context, run.wide, run.by_collectives)]
    run.note(
        "exchange is right",
        {"how": how, "cases": count, "wrong": wrong, "part of the limit": round(worst, 3), "same_bits": agree},
    )
    assert agree
    assert not wrong


def captured_exchange(run: Run) -> None:
    """Graphs of an odd and an even number of exchanges of several sizes, replayed in turn with other data."""
    graphs = []
    for T, calls in ((1, 65), (8, 64), (64, 7)):
        part = torch.zeros(T, H, D, dtype=BF16, device=run.device)
        lse = torch.zeros(T, H, device=run.device)

        def call(n: int, part: Tensor = part, lse: Tensor = lse) -> Any:
            return run.context.exchange.everywhere(part * (1.0 + n), lse)

        graphs.append((T, part, lse, *capture(call, calls)))
    wrong = count = 0
    chooser = torch.Generator().manual_seed(5)  # the same on all ranks
    for n in range(600):
        T, part, lse, graph, results = graphs[int(torch.randint(3, (1,), generator=chooser))]
        parts, lses = make_parts(run.size, T, H, BF16, n, run.device)
        part.copy_(parts[run.rank])
        lse.copy_(lses[run.rank])
        if n % 7 == run.rank:
            time.sleep(0.002)  # one rank is late
        graph.replay()
        for at in (0, len(results) - 1):
            want = truth_of(parts * (1.0 + at), lses)[0]
            close = (results[at][0].double() - want).abs().max() <= torch.finfo(BF16).eps * 4 * (1.0 + at)
            wrong += int(not close)
            count += 1
    wrong = sum(run.bench.every(wrong))
    run.note("captured exchange", {"replays": 600, "checked": count, "wrong": wrong})
    assert not wrong


class Long:
    """A cache of S sequences of ``longest`` tokens, whole and this rank's part."""

    def __init__(self, run: Run, S: int, longest: int) -> None:
        device, W = run.device, run.size
        columns = longest // (B * W)
        generator = torch.Generator(device).manual_seed(S)
        self.whole = torch.empty(S * columns * W, 2, B, K, D, dtype=BF16, device=device)
        for each in self.whole.split(4096):
            each.normal_(generator=generator)
        self.tables = torch.randperm(len(self.whole), generator=generator, device=device).int().view(S, columns * W)
        self.own_tables = torch.randperm(S * columns, generator=generator, device=device).int().view(S, columns)
        self.mine = torch.empty(S * columns, 2, B, K, D, dtype=BF16, device=device)
        mine = self.tables.view(S, columns, W)[:, :, run.rank].flatten().long()
        for target, source in zip(self.own_tables.flatten().long().split(4096), mine.split(4096), strict=True):
            self.mine[target] = self.whole[source]
        self.query = torch.randn(CALLS, S, H, D, generator=generator, device=device).to(BF16)
        self.starts = torch.arange(S + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(S, dtype=torch.int32, device=device)
        self.own_lens = torch.zeros_like(self.lens)
        self.shard = TokenShard(run.rank, W)
        self.set([longest] * S)

    def set(self, lens: list[int]) -> None:
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        self.own_lens.copy_(self.shard.lens(self.lens, B * self.shard.size))

    def alone(self, n: int) -> Tensor:
        return paged_ops.paged_attention(self.query[n], self.whole, self.tables, self.lens, self.starts, D**-0.5)

    def together(self, n: int, context: Context) -> Tensor:
        step = ContextMetadata(self.own_lens, None, None, (self.shard,))
        own = self.query[n][:, :K]  # not read: the newest token is in the cache
        batch = self.own_tables, self.starts, D**-0.5, step, context.handle
        return attend(self.query[n], own, own, self.mine, *batch)

    def part(self, n: int) -> Any:
        batch = self.own_tables, self.own_lens, self.starts
        return paged_ops.paged_attention_with_lse(self.query[n], self.mine, *batch, D**-0.5, causal=False)

    def truth(self, n: int, s: int) -> Tensor:
        """In float64, of one sequence."""
        length = int(self.lens[s])
        if not length:
            return torch.zeros(H, D, dtype=torch.float64, device=self.lens.device)
        blocks = self.tables[s, : -(-length // B)].long()
        out = []
        for k in range(K):
            keys, values = (self.whole[blocks, plane, :, k].flatten(0, 1)[:length].double() for plane in (0, 1))
            heads = self.query[n][s, k * H // K : (k + 1) * H // K].double()
            out.append(torch.softmax(heads @ keys.T * D**-0.5, -1) @ values)
        return torch.cat(out)


def attention(run: Run, S: int, longest: int) -> None:
    """Times, and before them the check of the very graphs, replayed with changing lengths."""
    data = Long(run, S, longest)
    alone, of_one = capture(data.alone, CALLS)
    together, of_all = capture(lambda n: data.together(n, run.context), CALLS)
    chooser = torch.Generator().manual_seed(7)
    worst = worst_alone = difference = 0.0
    agree = True
    for n in range(10):
        lens = [int(longest ** float(torch.rand(1, generator=chooser))) - 1 for _ in range(S)]
        if n == 0:
            lens = [longest] * S
        if n == 1:
            lens = [n % 18 for n in range(S)]  # some ranks hold nothing
        data.set(lens)
        alone.replay()
        together.replay()
        at, s = n % CALLS, n % S
        want = data.truth(at, s)
        scale = max(float(want.abs().max()), 0.05)
        worst = max(worst, float((of_all[at][s].double() - want).abs().max()) / scale)
        worst_alone = max(worst_alone, float((of_one[at][s].double() - want).abs().max()) / scale)
        difference = max(difference, float((of_all[at].float() - of_one[at].float()).abs().max()) / scale)
        agree &= run.all_agree(of_all[at])
    told = run.bench.every((difference, worst, worst_alone, agree))
    assert all(a < 0.1 and b < max(2 * c, 0.01) and d for a, b, c, d in told), told
    data.set([longest] * S)
    us = {"one GPU": timed(run, alone, CALLS), "together, symmetric memory": timed(run, together, CALLS)}
    part, _ = capture(data.part, CALLS)
    us["part alone"] = timed(run, part, CALLS)
    plain, of_plain = capture(lambda n: data.together(n, run.by_collectives), CALLS)
    plain.replay()
    alone.replay()
    assert float((of_plain[0].float() - of_one[0].float()).abs().max()) < 0.03
    us["together, NCCL"] = timed(run, plain, CALLS)
    us["one GPU again"] = timed(run, alone, CALLS)
    us["together again"] = timed(run, together, CALLS)
    best, one = (min(us[name], us[f"{again} again"]) for name, again in (
        ("together, symmetric memory", "together"), ("one GPU", "one GPU")))  # fmt: skip
    run.note(
        f"attention {S}x{longest}",
        {
            "us": us,
            "speedup": round(one / best, 3),
            "error": round(worst, 5),
            "error_of_one_gpu": round(worst_alone, 5),
            "same_bits": agree,
        },
    )


def exchange_alone(run: Run) -> None:
    us: dict[str, dict[str, float]] = {}
    for T in (1, 8, 64, 128):
        part = torch.randn(T, H, D, device=run.device).to(BF16)
        lse = torch.randn(T, H, device=run.device)
        kinds: dict[str, Callable[[int], Any]] = {
            "symmetric memory": lambda n, part=part, lse=lse: run.context.exchange.everywhere(part, lse),
            "NCCL all-gather and merge": lambda n, part=part, lse=lse: run.by_collectives.exchange.everywhere(
                part, lse
            ),
        }
        us[str(T)] = {}
        for name, call in kinds.items():
            graph, _ = capture(call, 64)
            us[str(T)][name] = timed(run, graph, 64)
    run.note("exchange alone, 64 in a graph, 32 heads of 128", {"us": us})


def every_kind(run: Run) -> None:
    """Decode, speculative, chunked prefill, prefill, mixed: eager, against one GPU, and in float32 against float64."""
    from paged_ops import reference

    kinds = {
        "decode": ([1] * 6, [0, 1, 31, 32, 700, 4095]),
        "speculative": ([4, 8, 2, 16], [0, 5, 300, 2047]),
        "chunked prefill": ([200, 64, 512], [100, 3000, 1]),
        "prefill": ([1, 333, 800], [0, 0, 0]),
        "mixed": ([1, 1, 0, 4, 300, 77], [2000, 3, 6, 1500, 0, 1000]),
    }
    worst: dict[str, dict[str, float]] = {}
    block = B * run.size
    for name, (query_lens, computed) in kinds.items():
        lens = [a + b for a, b in zip(query_lens, computed, strict=True)]
        for dtype, context in ((BF16, run.context), (torch.float32, run.wide)):
            if dtype is torch.float32 and name not in ("decode", "mixed"):
                continue  # each dtype has kernels of its own to compile
            generator = torch.Generator(run.device).manual_seed(3)

            def randn(*shape: int, of: Any = generator, to: torch.dtype = dtype) -> Tensor:
                return torch.randn(*shape, generator=of, device=run.device).to(to)

            keys, values = randn(sum(lens), K, D), randn(sum(lens), K, D)
            query = randn(sum(query_lens) + 3, H, D)
            count = sum(-(-n // block) for n in lens)
            ids = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
            blocks = [[ids.pop() for _ in range(-(-n // block))] for n in lens]
            rows = [i for s, n in enumerate(lens) for i in range(sum(lens[:s]) + n - query_lens[s], sum(lens[: s + 1]))]
            out = []
            for shard in (TokenShard(), TokenShard(run.rank, run.size)):
                cache = torch.full((count, 2, block // shard.size, K, D), torch.nan, dtype=dtype, device=run.device)
                sizes = len(lens) + 1, max(sum(lens), len(query)), 5000 // block + 1, run.device
                builder = AttentionMetadataBuilder(block, *sizes, num_blocks=count, shards=[shard])
                slots = builder.build(0, Batch(lens, [0] * len(lens), blocks)).slot_mapping
                paged_ops.reshape_and_cache(keys, values, cache, slots)
                step = builder.build(
                    0, Batch(query_lens, computed, blocks), num_reqs=len(lens) + 1, num_tokens=len(query)
                )
                if shard.size == 1:
                    batch = step.block_tables, step.seq_lens, step.query_start_loc
                    out.append(paged_ops.paged_attention(query, cache, *batch, D**-0.5))
                    host = [each.cpu() for each in (query.double(), cache, *batch)]
                    truth = reference.paged_attention(*host, D**-0.5).to(run.device)
                else:
                    own = [torch.cat([each[rows], each.new_full((3, K, D), torch.nan)]) for each in (keys, values)]
                    batch = step.block_tables, step.query_start_loc, D**-0.5, step.context, context.handle
                    out.append(attend(query, *own, cache, *batch))
            one, sharded = (float((each.double() - truth).abs().max()) for each in out)
            largest = float(values.float().abs().max())
            agree = run.all_agree(out[1])
            within = sharded <= 2 * one + torch.finfo(dtype).eps * largest
            padded = not out[1][sum(query_lens) :].any()
            assert all(run.bench.every(within and padded and agree)), (name, dtype, sharded, one, padded, agree)
            worst.setdefault(name, {})[str(dtype)[6:]] = round(sharded, 8)
            worst[name][f"{str(dtype)[6:]}, one GPU"] = round(one, 8)
    run.note("every kind of batch: errors against float64", {"errors": worst})


class Toy:
    """Two layers of attention over embeddings of tokens and positions, the same on all ranks."""

    LAYERS, V = 3, 997

    def __init__(self, device: torch.device, context: Context | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed, self.position, self.out = (
            torch.randn(n, H * D, generator=generator).to(device) for n in (self.V, 4096, self.V)
        )
        self.project = torch.randn(self.LAYERS, 2, H * D, K * D, generator=generator).to(device) * 0.02
        self.context, self.process_group = context, None if context is None else dist.group.WORLD

    def __call__(self, input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Any) -> Tensor:
        hidden = self.embed[input_ids] + self.position[metadata.positions]
        for (to_key, to_value), cache in zip(self.project, kv_caches, strict=True):
            normed = torch.nn.functional.rms_norm(hidden, (H * D,))
            key, value = ((normed @ each).view(-1, K, D) for each in (to_key, to_value))
            query = normed.view(-1, H, D)
            paged_ops.reshape_and_cache(key, value, cache, metadata.slot_mapping)
            starts, tables = metadata.query_start_loc, metadata.block_tables
            if self.context is None:
                out = paged_ops.paged_attention(query, cache, tables, metadata.seq_lens, starts, D**-0.5)
            else:
                batch = tables, starts, D**-0.5, metadata.context, self.context.handle
                out = attend(query, key, value, cache, *batch)
            hidden = hidden + out.flatten(1)
        return hidden[last_rows] @ self.out.T


def loop(run: Run) -> None:
    """Captured steps of random batches give the tokens of one GPU."""
    from paged_ops.generation import GenerationLoop, SamplingParams

    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, 900, (40,), generator=generator).tolist()
    prompts = [torch.randint(Toy.V, (n,), generator=generator).tolist() for n in lengths]
    params = [SamplingParams(max_new_tokens=int(n)) for n in torch.randint(8, 200, (40,), generator=generator)]
    texts, steps = [], []
    for context in (None, run.wide):
        shard = TokenShard() if context is None else context.shard
        cache = paged_ops.KVCache(
            Toy.LAYERS, 300, B * run.size, K, D, dtype=torch.float32, device=run.device, shard=shard
        )
        sizes = dict(max_num_seqs=16, max_num_tokens=256, max_model_len=1200, graph_mode="FULL_DECODE_ONLY")
        with GenerationLoop(Toy(run.device, context), cache, **sizes) as made:
            texts.append([list(each) for each in made.generate(prompts, params)])
            steps.append((made.stats.steps, made.graph_stats.replayed))
    equal = sum(a == b for a, b in zip(*texts, strict=True))
    run.note("captured loop", {"texts": len(prompts), "equal": equal, "steps, replayed": steps})
    assert equal == len(prompts), equal


def context(bench: Any) -> None:
    Run(bench).each(exchange_is_right, captured_exchange, exchange_alone)


def context_attention(bench: Any) -> None:
    shapes = bench.options.get("shapes") or [[1, 131072], [8, 131072], [1, 32768], [64, 4096]]
    Run(bench).each(*(functools.partial(attention, S=S, longest=longest) for S, longest in shapes))


def context_kinds(bench: Any) -> None:
    Run(bench).each(every_kind)


def context_loop(bench: Any) -> None:
    Run(bench).each(loop)
