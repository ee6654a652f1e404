"""Parts of benchmarks/parallel.py about whole steps of models of transformers, sharded over ranks.

``one``, ``two``, ``plain``: captured decode steps of the Llama-3-8B shape with random weights, as
benchmarks/decode_step.py times them, with the argmax: on one GPU (each rank for itself), sharded over all ranks, and
sharded with all-reduces by the backend of the process group. ``two`` first compares logits with one GPU's.
``tokens``: captured steps of random batches on all ranks give the tokens of one GPU, in float32 and bfloat16.
``meetings``: the cost of a rendezvous of the ranks per step of the generation loop; and that an all-reduce that a rank
never joins can be aborted.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel import Bench

sys.path.insert(0, str(Path(__file__).parent))

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.integrations.transformers.projections import fuse_projections
from paged_ops.parallel import symmetric
from paged_ops.parallel.all_reduce import prepare_all_reduce

POINTS = ("1x1024", "16x4096", "64x1024", "64x4096")
OPTIONS = {"triton.enable_pdl": True}


def shard(model: Any, bench: Bench) -> Any:
    """Spreads a model that lies whole on each rank, in place, by its own plan."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = dist.init_device_mesh(bench.device.type, (bench.size,), mesh_dim_names=("tp",))
    more = []
    if len(inspect.signature(apply_tensor_parallelism).parameters) > 2:  # from transformers 5.2x on
        more = [model._expand_parallel_plan(model.tp_plan)]
    return apply_tensor_parallelism(model, mesh, *more)


def overlapping(model: Any) -> int:
    from paged_ops.integrations.transformers.projections import use_overlapping_products

    return use_overlapping_products(model)


class _Given:
    """A model as decode_step.py asks for it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get(self, variant: str, options: dict[str, Any]) -> Any:
        torch._dynamo.reset()
        return self.model.compile_layers(dynamic=False, options=options)


def _measured(bench: Bench, variant: str, paged: PagedCausalLM) -> None:
    import decode_step

    points = bench.options.get("points", POINTS)
    wanted = (decode_step.POINTS[point] for point in points)
    tokens = max(S * (context + 2 * decode_step.REPLAYS + 32) for S, context in wanted)
    cache: Any = paged.allocate_kv_cache(tokens // decode_step.BLOCK_SIZE + 300, decode_step.BLOCK_SIZE)
    for layer in cache.layers:
        layer.normal_()
    decode_step.VARIANTS[variant] = {}
    for point in points:
        torch.manual_seed(1)
        checked = point in bench.options.get("check", ("1x1024", "16x4096"))
        record = decode_step.measure(_Given(paged), variant, point, cache, OPTIONS, checked)
        record.pop("options")
        for name in ("roofline_ms", "percent"):
            record.pop(name, None)
        record["ms"] = max(bench.every(record["ms"]))
        bench.add(**{name: round(value, 4) if isinstance(value, float) else value for name, value in record.items()})


def _whole() -> Any:
    import decode_step

    torch.manual_seed(0)
    return decode_step.transformers_model(decode_step.LLAMA_8B)


def one(bench: Bench) -> None:
    model = _whole()
    fuse_projections(model)
    overlapping(model)
    _measured(bench, "one GPU", PagedCausalLM(model))


def two(bench: Bench, variant: str = "sharded") -> None:
    began = time.monotonic()
    model = _whole()
    ids = torch.arange(100, 164, device=bench.device)[None]
    alone = model(input_ids=ids, use_cache=False).logits.float()
    model = shard(model, bench)
    sharded = model(input_ids=ids, use_cache=False).logits.float()
    paged = PagedCausalLM(model)
    fused = fuse_projections(model)
    products = overlapping(model)
    report = paged.sums
    assert report is not None
    errors = {"sharded": float((sharded - alone).norm() / alone.norm())}
    bench.add(
        variant=variant,
        sums=report.kind,
        reason=report.reason,
        fused_sums=len(report.fused),
        alone=len(report.alone),
        gathered=report.gathered,
        left=len(report.left),
        fused_products=fused,
        overlapping_products=products,
        logits_errors=errors,
        seconds=round(time.monotonic() - began, 1),
    )
    assert errors["sharded"] < 0.06, errors  # bfloat16 through 32 layers: about 0.02, by another order of additions
    _measured(bench, variant, paged)


def plain(bench: Bench) -> None:
    symmetric.allocate = lambda *arguments: "switched off, to compare"  # type: ignore[assignment]
    two(bench, "sharded, plain all-reduce")


def _small(bench: Bench, dtype: torch.dtype) -> Any:
    import transformers

    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, max_position_embeddings=512)
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():  # else it would repeat one token
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.reset_parameters()
    return model.eval().requires_grad_(False)


def _texts(bench: Bench, paged: PagedCausalLM, steps: int, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Outputs of random prompts until ``steps`` steps have run."""
    chosen = random.Random(5)
    cache = paged.allocate_kv_cache(1024, 16)
    mode = "FULL_DECODE_ONLY" if bench.device.type == "cuda" else "NONE"
    texts: list[list[int]] = []
    with GenerationLoop(paged, cache, max_num_seqs=16, max_num_tokens=256, graph_mode=mode, **options) as loop:
        loop.warm_up()
        began = time.monotonic()
        while loop.stats.steps < steps:
            prompts = [[chosen.randrange(512) for _ in range(chosen.randint(1, 60))] for _ in range(64)]
            params = [SamplingParams(max_new_tokens=chosen.randint(4, 120), stop_token_ids=()) for _ in prompts]
            texts += [list(each) for each in loop.generate(prompts, params)]
        seconds = time.monotonic() - began
        replayed = loop.graph_stats.replayed
        told = dict(steps=loop.stats.steps, replayed=replayed, ms_per_step=round(1e3 * seconds / loop.stats.steps, 3))
    return texts, told


def tokens(bench: Bench) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype, part in ((torch.float32, 1.0), (torch.bfloat16, 0.05)):
        steps = int(bench.options.get("steps", 10_000) * part)
        model = _small(bench, dtype)
        fuse_projections(model)
        want, told = _texts(bench, PagedCausalLM(model), steps)
        bench.add(dtype=str(dtype), gpus=1, **told)
        paged = PagedCausalLM(shard(_small(bench, dtype), bench))
        fuse_projections(paged.model)
        got, told = _texts(bench, paged, steps)
        assert paged.sums is not None
        different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        same = sum(a == b for text, other in zip(got, want, strict=True) for a, b in zip(text, other, strict=False))
        all_tokens = sum(map(len, want))
        digests = bench.every(hash(tuple(map(tuple, got))))
        bench.add(
            dtype=str(dtype),
            gpus=bench.size,
            sums=paged.sums.kind,
            fused_sums=len(paged.sums.fused),
            texts=len(want),
            different_texts=len(different),
            tokens=all_tokens,
            same_tokens=same,
            same_on_ranks=len(set(digests)) == 1,
            **told,
        )
        assert len(set(digests)) == 1
        # In bfloat16 the order of additions shows: near ties are decided otherwise, and sequences diverge.
        assert dtype != torch.float32 or not different, different[:10]


def steps_of_loop(bench: Bench) -> None:
    """Milliseconds per decode step of the loop with the small model, whose graph takes only a part of them: on one GPU,
    on all with one rendezvous per step, and with two."""
    prompts = [[7 * i + j for j in range(8)] for i in range(8)]
    params = SamplingParams(max_new_tokens=400, stop_token_ids=())
    for gpus in (1, bench.size):
        model = _small(bench, torch.bfloat16)
        paged = PagedCausalLM(model if gpus == 1 else shard(model, bench))
        cache = paged.allocate_kv_cache(1024, 16)
        mode = "FULL_DECODE_ONLY" if bench.device.type == "cuda" else "NONE"
        with GenerationLoop(paged, cache, max_num_seqs=8, max_num_tokens=64, graph_mode=mode) as loop:
            loop.warm_up()
            for on_token in (None, lambda new: None):
                loop.generate(prompts, SamplingParams(max_new_tokens=20, stop_token_ids=()), on_token)
                dist.barrier(group=bench.group)
                began, before = time.monotonic(), loop.stats.steps
                loop.generate(prompts, params, on_token)
                taken = (time.monotonic() - began) / (loop.stats.steps - before)
                looks = on_token is not None
                bench.add(gpus=gpus, looks_at_each_token=looks, loop_ms_per_step=round(1e3 * taken, 3))


def meetings(bench: Bench) -> None:
    from paged_ops.parallel.rendezvous import Ranks

    ranks = Ranks(bench.group, time_limit=60)
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(1000):
            ranks.rendezvous(None, lambda messages: None)
        taken.append(time.perf_counter() - began)
    us = [round(1e6 * min(each) / 1000, 1) for each in zip(*bench.every(taken), strict=True)]
    bench.add(us_per_meeting=us)
    steps_of_loop(bench)
    sums = prepare_all_reduce(bench.group, 4096, torch.bfloat16, bench.device)
    x = torch.ones(600, 4096, dtype=torch.bfloat16, device=bench.device)[: sums.max_rows]
    assert sums.sum(x).eq(bench.size).all()
    dist.barrier(group=bench.group)
    if bench.rank == 0:
        sums.sum(x)
        event = torch.cuda.Event()
        event.record()
        time.sleep(0.5)
        waited = not event.query()
        began = time.monotonic()
        symmetric.abort(bench.group)
        torch.cuda.synchronize(bench.device)
        bench.add(waited=waited, ended_after_ms=round(1e3 * (time.monotonic() - began), 3))
    else:
        time.sleep(2)
