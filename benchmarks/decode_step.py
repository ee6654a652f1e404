"""Times whole decode steps of a Llama-3-8B-shaped model with random bf16 weights, paged, compiled, captured.

    python benchmarks/decode_step.py --commit $(git rev-parse --short HEAD) --out decode_step.jsonl

Each line is one (batch × context) point of one variant: milliseconds a step (median of replays, argmax and the advance
to the next token included), milliseconds without those two, beside the roofline. Before a point is timed, its logits
are compared with a step that is neither compiled nor captured and attends by the float32 reference.

Variants: ``default`` compiles without autotuning; ``descent`` tunes generated kernels, and turns the products of one
row into them; ``autotune`` also times Triton's matrix products against cuBLAS's; ``static`` is the same model, compiled
and captured the same way, with an unpaged cache and SDPA as PyTorch chooses. In the points with a ``+`` all sequences
share the first so many tokens: ``cascade`` reads them once for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import compile_decode
from compile_decode import Config, Layer, Llama

from paged_ops import AttentionMetadata, Batch, KVCache, cascade_attention, reference, reshape_and_cache
from paged_ops.graphs import DecodeGraphs, GraphKey, InputBuffers

LLAMA_8B = Config(32, 4096, 32, 8, 128, 14336, 128256, max_positions=1 << 16)
POINTS = {"1x1024": (1, 1024), "1x32768": (1, 32768), "16x4096": (16, 4096), "64x1024": (64, 1024)}
POINTS |= {"64x4096": (64, 4096), "256x1024": (256, 1024)}
PREFIXES = {"64x8192+256": 8192, "64x2048+256": 2048}
SHARING = {"64x8192+256": (64, 8448), "64x2048+256": (64, 2304)}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "descent": {"coordinate_descent_tuning": True},
    "autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
    "static": {},
    "cascade": {"coordinate_descent_tuning": True},
}
BLOCK_SIZE, REPLAYS = 16, 40
BYTES_PER_SECOND, FLOPS = 4556e9, 700e12


def roofline_ms(c: Config, batch: int, context: int) -> float:
    """The time to read the weights once, or to do the arithmetic if that is longer, and to read the cache once."""
    per_layer = c.hidden * (2 * c.heads + 2 * c.kv_heads) * c.head_size + 3 * c.hidden * c.intermediate
    weights = c.layers * per_layer + c.hidden * c.vocabulary
    cache_bytes = batch * context * c.layers * 2 * c.kv_heads * c.head_size * 2
    flops = batch * (2 * weights + 4 * context * c.layers * c.heads * c.head_size)
    return 1e3 * (max(weights * 2 / BYTES_PER_SECOND, flops / FLOPS) + cache_bytes / BYTES_PER_SECOND)


def make_model(c: Config) -> Llama:
    with torch.device("cuda"):
        model = Llama(c)
    cos_sin = model.cos_sin
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    model.cos_sin = cos_sin
    return model


class StaticLayer(Layer):
    """Attends by SDPA over an unpaged cache ``[2, S, K, longest, D]``."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, m: AttentionMetadata) -> Tensor:
        rows = torch.arange(len(query), device=query.device)
        kv_cache[0, rows, :, m.positions] = key
        kv_cache[1, rows, :, m.positions] = value
        seen = torch.arange(kv_cache.shape[3], device=query.device) <= m.positions[:, None]
        mask = seen[:, None, None]
        out = F.scaled_dot_product_attention(query[:, :, None], *kv_cache, attn_mask=mask, enable_gqa=True)
        return out[:, :, 0]


class CascadeLayer(Layer):
    """Reads the prefix that all sequences share once."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, m: AttentionMetadata) -> Tensor:
        if m.cascade is None:
            return super().attend(query, key, value, kv_cache, m)
        reshape_and_cache(key, value, kv_cache, m.slot_mapping)
        c = m.cascade
        prefix, suffix = (c.prefix_block_table, c.prefix_len), (c.suffix_block_tables, c.suffix_lens)
        return cascade_attention(query, kv_cache, *prefix, *suffix, m.query_start_loc, self.head_size**-0.5)


LAYERS = {"static": StaticLayer, "cascade": CascadeLayer}


def reference_attend(
    layer: Layer, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, m: AttentionMetadata
) -> Tensor:
    reshape_and_cache(key, value, kv_cache, m.slot_mapping)
    batch = m.block_tables, m.seq_lens, m.query_start_loc
    return reference.paged_attention(query.float(), kv_cache.float(), *batch, layer.head_size**-0.5).to(query.dtype)


def check(model: Llama, run: DecodeGraphs, batch: Batch, ids: Tensor, prefix: int, kv_cache: KVCache) -> float:
    """The relative error of a replay's logits against plain steps with the float32 reference."""
    got = run.replay(batch, ids, common_prefix_len=prefix).float()
    needed = batch.block_ids.flatten().to("cuda")
    small = [layer[needed].contiguous() for layer in kv_cache.layers]  # else the reference would widen all of it
    renumbered = Batch(
        batch.query_lens, batch.num_computed_tokens, torch.arange(len(needed)).view(batch.block_ids.shape)
    )
    attend, compile_decode.Layer.attend = compile_decode.Layer.attend, reference_attend
    parts = model.begin, model.run_layer, model.end
    model.begin, model.run_layer, model.end = model._begin, Layer.forward, model._end
    try:
        cache = KVCache(1, len(needed), BLOCK_SIZE, 1, 1)  # only for its sizes
        buffers = InputBuffers(cache, batch.num_reqs, batch.num_reqs, len(needed) * BLOCK_SIZE)
        inputs = buffers.fill(renumbered, ids.cpu(), batch.num_reqs, batch.num_reqs)
        on_gpu = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.cuda(), inputs.metadata)
        want = model(inputs.input_ids.cuda(), on_gpu, inputs.last_rows.cuda(), small).float()
    finally:
        compile_decode.Layer.attend = attend
        model.begin, model.run_layer, model.end = parts
    return float((got - want).norm() / want.norm())


def time_ms(function: Callable[[], Any], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def host_us(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median microseconds of the host for one call, the device idle before each."""
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken)


def time_replays(graph: Any) -> float:
    """Median milliseconds, the lower of two runs after a warm one."""
    time_ms(graph.replay, 5)
    return min(statistics.median(time_ms(graph.replay, REPLAYS)) for _ in range(2))


def kernels(run: Callable[[], Any], steps: int = 3) -> list[tuple[str, float, float]]:
    """(name, launches a step, µs a step) of each kernel, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events():
        total[event.name][0] += 1
        total[event.name][1] += event.device_time_total / steps
    return sorted(
        ((name[:90], round(n / steps, 1), round(us, 1)) for name, (n, us) in total.items()), key=lambda row: -row[2]
    )


def measure(
    model: Llama, variant: str, point: str, kv_cache: KVCache, checked: bool = False, profiled: bool = False
) -> dict[str, Any]:
    S, context = (POINTS | SHARING)[point]
    prefix = PREFIXES.get(point, 0)
    torch._dynamo.reset()
    layer_type = LAYERS.get(variant, Layer)
    model.begin, model.run_layer, model.end = model._begin, layer_type.forward, model._end
    for layer in model.layers:
        layer.__class__ = layer_type
    model.compile_parts(dynamic=False, **VARIANTS[variant])
    lookahead = 2 * REPLAYS + 8
    start = context - lookahead // 2 - 1  # the contexts of the replays are centred on the point's
    longest = context + lookahead
    columns = -(-longest // BLOCK_SIZE)
    shared = prefix // BLOCK_SIZE
    blocks = torch.randperm(kv_cache.num_blocks, dtype=torch.int32)
    own = blocks[shared:][: S * (columns - shared)].view(S, columns - shared)
    tables = torch.cat([blocks[:shared].expand(S, shared), own], 1)
    batch = Batch(torch.ones(S, dtype=torch.int64), torch.full((S,), start), tables)
    ids = torch.randint(LLAMA_8B.vocabulary, (S,), device="cuda")
    layers = kv_cache.layers
    if variant == "static":
        c = LLAMA_8B
        shape = 2, S, c.kv_heads, longest, c.head_size
        kv_cache.layers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in layers]
    record: dict[str, Any] = {"point": point, "variant": variant}
    try:
        options: dict[str, Any] = dict(
            max_num_seqs=S, max_model_len=columns * BLOCK_SIZE, mode="FULL_DECODE_ONLY", seq_sizes=[S]
        )
        options["cascade"] = variant == "cascade"
        key = GraphKey(S, S, cascade=options["cascade"])
        run = DecodeGraphs(model, kv_cache, sample=lambda logits: logits.argmax(-1), **options)
        record["capture_s"] = round(run.capture(dynamic=False).seconds, 2)
        if checked and variant != "static":
            record["error"] = check(model, run, batch, ids, prefix, kv_cache)
            assert record["error"] < 0.03, record
        logits = run.replay(batch, ids, common_prefix_len=prefix, lookahead=lookahead)
        assert logits.isfinite().all()
        record["ms"] = time_replays(run.captured[key])
        run.replay(batch, ids, common_prefix_len=prefix, lookahead=lookahead)
        record["host_us_next"] = host_us(run.replay_next)
        record["host_us"] = host_us(lambda: run.replay(batch, ids, common_prefix_len=prefix))
        without = DecodeGraphs(model, kv_cache, **options)
        without.capture(dynamic=False)
        without.replay(batch, ids, common_prefix_len=prefix)
        record["ms_without_sampling"] = time_replays(without.captured[key])
        if profiled:
            record["kernels"] = kernels(without.captured[key].replay)
    finally:
        kv_cache.layers = layers
    if not prefix:
        record["roofline_ms"] = roofline_ms(LLAMA_8B, S, context)
        record["percent"] = 100 * record["roofline_ms"] / record["ms"]
    return record


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=list(POINTS | SHARING))
    parser.add_argument("--variants", nargs="+", default=["default"], choices=list(VARIANTS))
    parser.add_argument("--check", nargs="*", default=["1x1024", "16x4096"], help="points whose logits are compared")
    parser.add_argument("--profile", nargs="*", default=[], help="points with a table per kernel")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines to append to")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(LLAMA_8B)
    tokens = max(S * (context + 2 * REPLAYS + 2 * BLOCK_SIZE) for S, context in POINTS.values())
    c = LLAMA_8B
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    kv_cache = KVCache(c.layers, tokens // BLOCK_SIZE + 300, BLOCK_SIZE, c.kv_heads, c.head_size, **options)
    for layer in kv_cache.layers:
        layer.normal_()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    # Once the profiler has run, launches cost the host more until the process ends: it comes last.
    plan = [(variant, point, False) for variant in args.variants for point in args.points]
    plan += [(variant, point, True) for variant in args.variants for point in args.profile]
    for variant, point, profiled in plan:
        record = measure(model, variant, point, kv_cache, not profiled and point in args.check, profiled)
        if profiled:
            record = {key: record[key] for key in ("point", "variant", "kernels")}
        with args.out.open("a") as out:
            out.write(json.dumps(record | about) + "\n")
        numbers = {key: f"{value:.3g}" for key, value in record.items() if isinstance(value, float)}
        print(point, variant, numbers, flush=True)
        for name, launches, us in record.get("kernels", [])[:25]:
            print(f"  {us:8.1f} µs {launches:6.1f}x  {name}", flush=True)


if __name__ == "__main__":
    main()
