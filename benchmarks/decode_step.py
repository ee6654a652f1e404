"""Times whole decode steps of a Llama-3-8B-shaped model with random bf16 weights, paged, compiled, captured.

    python benchmarks/decode_step.py --commit $(git rev-parse --short HEAD) --out decode_step.jsonl

Each line is one (batch × context) point of one variant: milliseconds per step (median of replays, with argmax and the
advance to the next token), milliseconds without those two, the roofline, the model's matmuls alone, and the clock and
power of the GPU while it ran. Before a point is timed, its logits are compared with a step that is neither compiled nor
captured and attends by the float32 reference.

Variants of the plain model, ``examples/compile_decode.py``: ``default`` is not autotuned; ``overlapping`` has
this package's matmuls of few rows; ``fused`` has norms, gates and residual adds in them; ``no_attention`` writes the
cache and does not read it; ``static`` is the same model with an unpaged cache and SDPA as PyTorch chooses. In points
with a ``+`` all sequences share that number of first tokens: ``cascade`` reads them once for all, ``default`` does not.
``transformers`` is the model of that library with this package's attention, projections fused, layers compiled, and
matmuls of few rows; ``transformers_static`` the same model as that library runs it fastest by itself: a static cache,
``torch.compile(mode="reduce-overhead")``.
``--options`` are inductor's, such as ``{"max_autotune": true}``. ``host.py`` times the first step from empty caches.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import compile_decode
from compile_decode import Config, Layer, Llama, rotate

from paged_ops import AttentionMetadata, Batch, KVCache, cascade_attention, reference, reshape_and_cache
from paged_ops.bench.measure import host_us
from paged_ops.graphs import DecodeGraphs, GraphKey, build_inputs, step_builder
from paged_ops.integrations.transformers import attention_function, few_rows
from paged_ops.integrations.transformers import model as integration
from paged_ops.integrations.transformers.projections import fuse_projections, use_overlapping_products

few_row_linear: Any = functools.partial(torch.ops.paged_ops_models.few_row_linear.default, constant=True)
LLAMA_8B = Config(32, 4096, 32, 8, 128, 14336, 128256, max_positions=1 << 16)
POINTS = {f"{S}x1024": (S, 1024) for S in (1, 2, 4, 8, 64, 256)}
POINTS |= {"1x32768": (1, 32768), "16x4096": (16, 4096), "64x4096": (64, 4096)}
PREFIXES = {"64x8192+256": 8192, "64x2048+256": 2048}
SHARING = {"64x8192+256": (64, 8448), "64x2048+256": (64, 2304)}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "overlapping": {"triton.enable_pdl": True},
    "fused": {"triton.enable_pdl": True},
    "no_attention": {},
    "static": {},
    "cascade": {},
    "transformers": {"triton.enable_pdl": True},
    "transformers_static": {},
}
BLOCK_SIZE, REPLAYS, STEPS_PROFILED = 16, 40, 3
BYTES_PER_SECOND, FLOPS = 4556e9, 700e12
PARTS = {  # parts of a step, by the names of their kernels
    "attention": "split_kernel|merge_kernel|(prefill|dense|mixed|shares|decode)_kernel|paged_attention|attn|flash|fmha",
    "products": "nvjet|cublas|gemm|gemv|splitK|linear_kernel|_mm_|triton_tem",
    "cache write": "write_kernel|write_scaled_rows_kernel",
}


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


class NoAttentionLayer(Layer):
    """Everything but attention."""

    rows: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, m: AttentionMetadata) -> Tensor:
        reshape_and_cache(key, value, kv_cache, m.slot_mapping)
        return NoAttentionLayer.rows[: len(query)]


class FewRowLayer(Layer):
    """Norms, gates and residual adds are in the matmuls of few rows; in the check they are not."""

    fuses = True

    def forward(
        self, x: Tensor, delta: Tensor, angles: tuple[Tensor, Tensor], kv_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        if not FewRowLayer.fuses:
            return Layer.forward(self, x, delta, angles, kv_cache, metadata)
        qkv = few_row_linear(x, self.qkv.weight, self.norm1, None, 1e-5).unflatten(-1, (-1, self.head_size))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        qk = rotate(qk, *angles)
        rows = self.attend(qk[:, : self.heads], qk[:, self.heads :], value, kv_cache, metadata)
        x = few_row_linear(rows.flatten(1), self.out.weight, None, x)
        hidden = few_row_linear(x, self.gate_up.weight, self.norm2, None, 1e-5, True)
        return few_row_linear(hidden, self.down.weight, None, x), delta


def few_row_end(model: Llama, x: Tensor, delta: Tensor, last_rows: Tensor) -> Tensor:
    if not FewRowLayer.fuses:
        return model._end(x, delta, last_rows)
    return few_row_linear(x[last_rows], model.head.weight, model.norm, None, 1e-5)


LAYERS = {"fused": FewRowLayer, "static": StaticLayer, "cascade": CascadeLayer, "no_attention": NoAttentionLayer}


def transformers_model(c: Config) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_size,
        max_position_embeddings=c.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():  # distributed as in the plain model: errors grow through layers alike
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()
    return model.eval().requires_grad_(False)


class Models:
    """The models that variants share; at most one of each kind is alive."""

    def __init__(self) -> None:
        self._kind, self._model = "", None

    def get(self, variant: str, options: dict[str, Any]) -> Any:
        """The model of a variant as a step, freshly compiled."""
        torch._dynamo.reset()
        kind = variant if variant.startswith("transformers") or variant == "overlapping" else "plain"
        if kind != self._kind:
            self._model = None
            torch.cuda.empty_cache()
            is_plain = not kind.startswith("transformers")
            self._model = make_model(LLAMA_8B) if is_plain else transformers_model(LLAMA_8B)
            self._kind = kind
            if kind == "overlapping":
                use_overlapping_products(self._model)
            elif kind == "transformers":
                fuse_projections(self._model)
                use_overlapping_products(self._model)
                self._model = integration.PagedCausalLM(self._model)
        if kind == "transformers":
            self._model.compile_layers(dynamic=False, options=options)
        elif kind != "transformers_static":
            layer_type = LAYERS.get(variant, Layer)
            self._model.begin, self._model.run_layer = self._model._begin, layer_type.forward
            self._model.end = self._model._end
            if variant == "fused":
                self._model.end = functools.partial(few_row_end, self._model)
            for layer in self._model.layers:
                layer.__class__ = layer_type
            self._model.compile_parts(dynamic=False, **options)
        return self._model


@contextlib.contextmanager
def float32_reference() -> Iterator[None]:
    """Within it nothing is compiled, attention is the reference's, and norms are not in matmuls."""

    def attend(query: Tensor, kv_cache: Tensor, *batch: Any, **features: Any) -> Tensor:
        features.pop("value_cache", None)
        return reference.paged_attention(query.float(), kv_cache.float(), *batch, **features).to(query.dtype)

    modules = compile_decode, attention_function
    before, own, most = [module.paged_attention for module in modules], CascadeLayer.attend, few_rows.MOST_ROWS
    for module in modules:
        module.paged_attention = attend
    CascadeLayer.attend, FewRowLayer.fuses, few_rows.MOST_ROWS = Layer.attend, False, 0
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        CascadeLayer.attend, FewRowLayer.fuses, few_rows.MOST_ROWS = own, True, most
        for module, function in zip(modules, before, strict=True):
            module.paged_attention = function


def check(model: Any, run: DecodeGraphs, batch: Batch, ids: Tensor, prefix: int, kv_cache: KVCache) -> float:
    """The relative error of a replay's logits against plain steps with the float32 reference."""
    got = run.replay(batch, ids, common_prefix_len=prefix).float()
    needed, places = batch.block_ids.unique(return_inverse=True)
    small = [layer[needed.cuda()] for layer in kv_cache.layers]  # else the reference would widen all of it
    renumbered = Batch(batch.query_lens, batch.num_computed_tokens, places.view(batch.block_ids.shape).int())
    cache = KVCache(1, len(needed), BLOCK_SIZE, 1, 1)  # only for its sizes
    builder = step_builder(cache, batch.num_reqs, batch.num_reqs, batch.block_ids.shape[1] * BLOCK_SIZE)
    inputs = build_inputs(builder, renumbered, ids.cpu(), batch.num_reqs, batch.num_reqs)
    on_gpu = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.cuda(), inputs.metadata)
    with float32_reference():
        want = model(inputs.input_ids.cuda(), on_gpu, inputs.last_rows.cuda(), small).float()
    return float((got - want).norm() / want.norm())


def likeliest(logits: Tensor) -> Tensor:
    """``argmax(-1)`` in two steps, so that all of the GPU takes part."""
    chunks = logits.unflatten(-1, (-1, 768))
    top, at = chunks.max(-1)
    best = top.argmax(-1, keepdim=True)
    return (at.gather(-1, best) + 768 * best).squeeze(-1)


def time_ms(function: Callable[[], Any], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def time_replays(graph: Any) -> tuple[float, dict[str, float]]:
    """Median milliseconds, the lower of two runs after a warm one; and the GPU's state while it runs."""
    time_ms(graph.replay, 5)
    ms = min(statistics.median(time_ms(graph.replay, REPLAYS)) for _ in range(2))
    for _ in range(REPLAYS):
        graph.replay()
    state = {
        "mhz": torch.cuda.clock_rate(),
        "watts": torch.cuda.power_draw() / 1e3,
        "celsius": torch.cuda.temperature(),
    }
    torch.cuda.synchronize()
    return ms, state


def time_products(c: Config, rows: int) -> float:
    """Milliseconds of the matmuls of a step alone, captured."""
    inputs = {size: torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (c.hidden, c.intermediate)}
    sizes = (c.heads + 2 * c.kv_heads) * c.head_size, c.hidden, 2 * c.intermediate, c.hidden
    depths = c.hidden, c.heads * c.head_size, c.hidden, c.intermediate
    inputs[c.heads * c.head_size] = torch.randn(rows, c.heads * c.head_size, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, **options) for _ in range(c.layers) for n, k in zip(sizes, depths, strict=True)]
    weights.append(torch.randn(c.vocabulary, c.hidden, **options))

    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_replays(graph)[0]


def kernels(run: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """(name, launches a step, µs a step) of each kernel, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS_PROFILED):
            run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events():
        total[event.name][0] += 1
        total[event.name][1] += event.device_time_total / STEPS_PROFILED
    return sorted(
        ((name[:90], round(n / STEPS_PROFILED, 1), round(us, 1)) for name, (n, us) in total.items()),
        key=lambda row: -row[2],
    )


def parts_of(rows: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds a step by part; kernels that overlap count twice."""
    ms: dict[str, float] = defaultdict(float)
    for name, _, us in rows:
        part = next((part for part, names in PARTS.items() if re.search(names, name)), "rest")
        ms[part] += us / 1e3
    return {part: round(value, 3) for part, value in ms.items()}


def measure(
    models: Models,
    variant: str,
    point: str,
    kv_cache: KVCache,
    options: dict[str, Any],
    checked: bool = False,
    profiled: bool = False,
) -> dict[str, Any]:
    S, context = (POINTS | SHARING)[point]
    prefix = PREFIXES.get(point, 0)
    model = models.get(variant, VARIANTS[variant] | options)
    lookahead = 2 * REPLAYS + 8
    start = context - lookahead // 2 - 1  # the contexts of the replays are centred on the point's
    longest = context + lookahead
    columns = -(-longest // BLOCK_SIZE)
    shared = prefix // BLOCK_SIZE
    blocks = torch.randperm(kv_cache.num_blocks, dtype=torch.int32)
    own = blocks[shared:][: S * (columns - shared)].view(S, columns - shared)
    tables = torch.cat([blocks[:shared].expand(S, shared), own], 1)
    batch = Batch(torch.ones(S, dtype=torch.int64), torch.full((S,), start), tables)
    c = LLAMA_8B
    ids = torch.randint(c.vocabulary, (S,), device="cuda")
    layers = kv_cache.layers
    if variant == "static":
        shape = 2, S, c.kv_heads, longest, c.head_size
        kv_cache.layers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in layers]
    NoAttentionLayer.rows = torch.randn(S, c.heads, c.head_size, dtype=torch.bfloat16, device="cuda")
    record: dict[str, Any] = {"point": point, "variant": variant}
    if options:
        record["options"] = options
    try:
        sizes: dict[str, Any] = dict(
            max_num_seqs=S, max_model_len=columns * BLOCK_SIZE, mode="FULL_DECODE_ONLY", seq_sizes=[S]
        )
        sizes["cascade"] = variant == "cascade"
        key = GraphKey(S, S, cascade=sizes["cascade"])
        run = DecodeGraphs(model, kv_cache, sample=torch.compile(likeliest), **sizes)
        record["capture_s"] = round(run.capture(dynamic=False).seconds, 2)
        if checked and variant not in ("static", "no_attention"):
            record["error"] = check(model, run, batch, ids, prefix, kv_cache)
            assert record["error"] < 0.03, record
        logits = run.replay(batch, ids, common_prefix_len=prefix, lookahead=lookahead)
        assert logits.isfinite().all()
        assert torch.equal(logits.gather(1, run.tokens[:S, None])[:, 0], logits.max(-1).values)
        record["ms"], state = time_replays(run.captured[key])
        record |= state
        run.replay(batch, ids, common_prefix_len=prefix, lookahead=lookahead)
        record["host_us_next"] = host_us(run.replay_next, kv_cache.device, calls=1)
        record["host_us"] = host_us(lambda: run.replay(batch, ids, common_prefix_len=prefix), kv_cache.device, calls=1)
        without = DecodeGraphs(model, kv_cache, **sizes)
        without.capture(dynamic=False)
        without.replay(batch, ids, common_prefix_len=prefix)
        record["ms_without_sampling"], _ = time_replays(without.captured[key])
        if profiled:
            record["kernels"] = kernels(run.captured[key].replay)
            record["parts"] = parts_of(record["kernels"])
    finally:
        kv_cache.layers = layers
    if not prefix and variant != "no_attention":
        record["roofline_ms"] = roofline_ms(c, S, context)
        record["percent"] = 100 * record["roofline_ms"] / record["ms"]
    return record


def measure_transformers_static(models: Models, point: str) -> dict[str, Any]:
    """The model as its library runs it fastest: a static cache and a step that inductor captures by itself."""
    import transformers

    S, context = POINTS[point]
    c, model = LLAMA_8B, models.get("transformers_static", {})
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + REPLAYS)
    cache.early_initialization(S, c.kv_heads, c.head_size, torch.bfloat16, torch.device("cuda"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context - 2 * REPLAYS)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(ids: Tensor) -> Tensor:
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    ids = torch.randint(c.vocabulary, (S, 1), device="cuda")

    def run() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        ids.copy_(step(ids))

    began = time.perf_counter()
    time_ms(run, 4)
    record: dict[str, Any] = {"point": point, "variant": "transformers_static"}
    record["capture_s"] = round(time.perf_counter() - began, 2)
    record["ms"] = min(statistics.median(time_ms(run, REPLAYS)) for _ in range(2))
    record["roofline_ms"] = roofline_ms(c, S, context)
    return record


def print_table(records: list[dict[str, Any]]) -> None:
    points = [point for point in POINTS | SHARING if any(r.get("point") == point for r in records)]
    print(f"{'ms a step':22}" + "".join(f"{point:>14}" for point in points))
    for variant in VARIANTS:
        ms = {r["point"]: r["ms"] for r in records if r.get("variant") == variant and "ms" in r}
        if ms:
            print(f"{variant:22}" + "".join(f"{ms.get(point, float('nan')):14.2f}" for point in points))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=list(POINTS | SHARING))
    parser.add_argument("--variants", nargs="*", default=["default"], help="names, or name:point,point,...")
    parser.add_argument("--check", nargs="*", default=["1x1024", "16x4096"], help="points whose logits are compared")
    parser.add_argument("--profile", nargs="*", default=[], help="points with a table per kernel")
    parser.add_argument("--options", type=json.loads, default={}, help="of inductor, on top of each variant's: JSON")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a file of JSON lines to append to")
    args = parser.parse_args()
    torch.manual_seed(0)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    records: list[dict[str, Any]] = []

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        with args.out.open("a") as out:
            out.write(json.dumps(record | about) + "\n")
        numbers = {key: f"{value:.4g}" for key, value in record.items() if isinstance(value, (float, int))}
        print(record["point"], record["variant"], numbers, flush=True)
        for name, launches, us in record.get("kernels", [])[:25]:
            print(f"  {us:8.1f} µs {launches:6.1f}x  {name}", flush=True)

    chosen = [each.partition(":") for each in args.variants]
    plan = [(name, point, False) for name, _, at in chosen for point in (at.split(",") if at else args.points)]
    rows = sorted({(POINTS | SHARING)[point][0] for _, point, _ in plan})
    products = {S: time_products(LLAMA_8B, S) for S in rows}
    torch.cuda.empty_cache()
    models = Models()
    tokens = max(S * (context + 2 * REPLAYS + 2 * BLOCK_SIZE) for S, context in POINTS.values())
    c = LLAMA_8B
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    kv_cache = KVCache(c.layers, tokens // BLOCK_SIZE + 300, BLOCK_SIZE, c.kv_heads, c.head_size, **options)
    for layer in kv_cache.layers:
        layer.normal_()
    # Once the profiler has run, launches cost the host more until the process ends: it comes last.
    plan += [(name, point, True) for name, point, _ in plan if point in args.profile]
    for variant, point, profiled in plan:
        if variant == "transformers_static":
            record = {} if profiled else measure_transformers_static(models, point)
        else:
            is_checked = not profiled and point in args.check
            record = measure(models, variant, point, kv_cache, args.options, is_checked, profiled)
        if profiled:
            record = {key: record[key] for key in ("point", "variant", "kernels", "parts") if key in record}
        elif record:
            record["products_ms"] = products[(POINTS | SHARING)[point][0]]
        if record:
            add(record)
    print_table(records)


if __name__ == "__main__":
    main()
