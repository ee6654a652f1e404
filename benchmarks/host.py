"""Host times on a GPU machine: replays, plans of new sizes, and the first captured step from empty caches.

    python benchmarks/host.py --out benchmarks/data/host.jsonl --commit $(git rev-parse --short HEAD)

``cold``: seconds from a model of the shape of Llama-3-8B in transformers (random weights) to its first captured step
of 16 sequences, with empty caches of Triton and inductor: of wrapping the model, and of the capture. Twice: with
kernels compiled ahead, in processes of their own, and without. Then the microseconds of the host for a replay of that
step, and for the launch of its graph alone, which no code of this package makes shorter. ``replay``: microseconds of
the host for ``DecodeGraphs.replay``, which builds its batch, of a step of one small layer; for ``replay_next``, for the
launch of the graph alone, and for the metadata alone, with the C++ function and with torch ops. ``plan``: microseconds
of the host for the first call of attention and of the cache write with numbers of tokens and sequences that were never
seen, and for a second one. Each part runs in a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
SIZES = 1, 16, 64
COLUMNS = 80  # blocks of each sequence


def emit(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def cold(is_ahead: bool) -> None:
    """The first captured step."""
    started = time.perf_counter()
    import decode_step as d
    import torch

    from paged_ops.lowerings.gpu import precompile

    torch.set_grad_enabled(False)
    if not is_ahead:
        precompile.can_precompile = lambda: False
    record: dict[str, Any] = {"part": "cold", "ahead": is_ahead, "import_s": time.perf_counter() - started}
    c = d.LLAMA_8B
    model = d.transformers_model(c)
    d.fuse_projections(model)
    torch.cuda.synchronize()
    began = time.perf_counter()
    model = d.integration.PagedCausalLM(model)
    torch.cuda.synchronize()
    record["wrap_s"] = time.perf_counter() - began
    model.compile_layers(dynamic=True)
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    kv_cache = d.KVCache(c.layers, max(SIZES) * COLUMNS, d.BLOCK_SIZE, c.kv_heads, c.head_size, **options)
    run = d.DecodeGraphs(model, kv_cache, max_num_seqs=16, seq_sizes=[16], mode="FULL_DECODE_ONLY")
    torch.cuda.synchronize()
    marks: list[tuple[str, float]] = []
    trial, step, began = run.compile_ahead, run.step, time.perf_counter()

    def compile_ahead(*args: Any, **kwargs: Any) -> Any:
        report = trial(*args, **kwargs)
        marks.append((f"noted {report.kernels}", time.perf_counter() - began))
        return report

    def marked(*args: Any) -> Any:
        logits = step(*args)
        marks.append(("step", time.perf_counter() - began))
        return logits

    run.compile_ahead, run.step = compile_ahead, marked  # type: ignore[method-assign]
    record["capture_s"] = run.capture().seconds
    states = precompile._compiler.states if precompile._compiler is not None else {}
    record["kernels"], record["errors"] = len(states), [each.error for each in states.values() if each.error][:5]
    batch = paged_batch(16, kv_cache.num_blocks)
    graph = run.captured[d.GraphKey(16, 16)]
    calls = {"host_us_graph": graph.replay, "host_us": lambda: run.replay(batch, [5] * 16)}
    emit(**record, **{name: round(host_us(call), 1) for name, call in calls.items()}, marks=marks)


def host_us(call: Callable[[], Any]) -> float:
    """Median microseconds of the host for one call, the device idle before each."""
    import torch

    from paged_ops.bench import measure

    return measure.host_us(call, torch.device("cuda"), calls=1, repeats=40)


def paged_batch(S: int, num_blocks: int) -> Any:
    """A decode batch of S sequences of 1024 tokens, in blocks of no order."""
    import torch

    from paged_ops import Batch

    tables = torch.randperm(num_blocks, dtype=torch.int32)[: S * COLUMNS].view(S, COLUMNS)
    return Batch(torch.ones(S, dtype=torch.int64), torch.full((S,), 1024), tables)


def replay() -> None:
    """Steps of one small layer, so that the graph is small, and what remains is the host's work on the batch."""
    import torch

    from paged_ops import KVCache, paged_attention, reshape_and_cache
    from paged_ops.graphs import DecodeGraphs, GraphKey, build_inputs

    torch.set_grad_enabled(False)
    most, H, K, D = max(SIZES), 32, 8, 128
    kv_cache = KVCache(1, most * COLUMNS, 16, K, D, dtype=torch.bfloat16, device="cuda")
    kv_cache.layers[0].normal_()
    table = torch.randn(1000, (H + 2 * K) * D, dtype=torch.bfloat16, device="cuda")

    def step(ids: Any, metadata: Any, last_rows: Any, caches: Any) -> Any:
        query, key, value = (each.unflatten(1, (-1, D)) for each in table[ids].split([H * D, K * D, K * D], 1))
        reshape_and_cache(key, value, caches[0], metadata.slot_mapping)
        batch = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, D**-0.5
        return paged_attention(query, caches[0], *batch)[last_rows].flatten(1)[:, :1000]

    run = DecodeGraphs(
        step, kv_cache, max_num_seqs=most, seq_sizes=SIZES, mode="FULL_DECODE_ONLY", sample=lambda x: x.argmax(-1)
    )
    emit(part="capture", sizes=SIZES, seconds=run.capture().seconds)
    for S in SIZES:
        batch = paged_batch(S, kv_cache.num_blocks)
        ids, listed = torch.randint(1000, (S,), device="cuda"), [5] * S
        graph = run.captured[GraphKey(S, S)]
        captured = run.replay(batch, ids).clone()
        inputs = build_inputs(run.builder, batch, ids, S, S)
        plain = step(*inputs, kv_cache.layers)[:S]
        assert torch.equal(captured, plain), "a replay differs from the step that it captured"
        run.replay(batch, ids, lookahead=100)
        calls = {
            "host_us_next": run.replay_next,
            "host_us_graph": graph.replay,
            "host_us": lambda batch=batch, ids=ids: run.replay(batch, ids),
            "host_us_of_lists": lambda batch=batch, listed=listed: run.replay(batch, listed),
            "host_us_build": lambda batch=batch, S=S: run.builder.build(0, batch, num_reqs=S, num_tokens=S),
        }
        torch_ops = [True, False] if hasattr(run.builder, "_fills") else [False]
        for fills in torch_ops:
            run.builder._fills = fills
            us = {name: round(host_us(call), 1) for name, call in calls.items()}
            if fills or len(torch_ops) == 1:
                run.replay(batch, ids, lookahead=100)
            emit(part="replay", sequences=S, at_once=fills, **us)
        run.builder._fills = True


def plan() -> None:
    """Eager calls of random sizes."""
    import torch

    import paged_ops
    from paged_ops import checks
    from paged_ops.lowerings.gpu.attention import call as attention

    H, K, D, B, M = 32, 8, 128, 16, 64
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    kv_cache = torch.zeros(256, 2, B, K, D, **options)
    qkv = torch.zeros(8192, (H + 2 * K) * D, **options)
    tables, lens, starts = (torch.zeros(*s, dtype=torch.int32, device="cuda") for s in ((65, M), (65,), (66,)))
    slots = torch.full((8192,), -1, device="cuda")
    write, attend = paged_ops.reshape_and_cache, paged_ops.paged_attention

    def calls(T: int, S: int) -> tuple[Any, Any]:
        query, key, value = (each.unflatten(1, (-1, D)) for each in qkv[:T].split([H * D, K * D, K * D], 1))
        first = functools.partial(write, key, value, kv_cache, slots[:T])
        batch = tables[:S], lens[:S], starts[: S + 1], D**-0.5
        return first, functools.partial(attend, query, kv_cache, *batch)

    report = paged_ops.warm_up(calls(7, 3), max_num_tokens=4096, max_num_seqs=64)
    emit(part="warm_up", kernels=report.kernels, seconds=report.seconds, errors=report.errors)
    rng = random.Random(0)
    sizes = sorted({(S + rng.randrange(2000), S) for S in (rng.randrange(2, 64) for _ in range(400))})
    rng.shuffle(sizes)
    us: dict[str, list[float]] = {}
    with torch.no_grad():
        for call in (each for size in sizes[:60] for each in calls(*size)):  # all kernels are loaded
            call()
        for turn in ("new", "known"):
            for size in sizes[60:]:
                torch.cuda.synchronize()
                for op, call in zip(("write", "attention"), calls(*size), strict=True):
                    began = time.perf_counter()
                    call()
                    us.setdefault(f"{op}_{turn}_us", []).append(1e6 * (time.perf_counter() - began))
    signatures = len(attention._signatures)
    medians = {name: round(statistics.median(each), 1) for name, each in us.items()}
    assert not checks.debug_checks()
    emit(part="plan", sizes=len(sizes) - 60, signatures=signatures, **medians)


def run_part(part: str, limit: float) -> list[dict[str, Any]]:
    """A part with empty caches, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--part", part]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=limit, check=False
            )
            said, failed = done.stdout, done.stderr[-3000:] if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            raw = late.stdout or b""
            said, failed = raw if isinstance(raw, str) else raw.decode(), f"more than {limit:.0f} s"
        print(f"{part}: {time.perf_counter() - began:.0f} s {failed}", flush=True)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--together", action="store_true", help="all parts at the same time")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=75, help="seconds of a part")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a file of JSON lines to append to")
    args = parser.parse_args()
    if args.part:
        PARTS[args.part]()
        return
    with concurrent.futures.ThreadPoolExecutor(len(args.parts) if args.together else 1) as pool:
        found = list(pool.map(lambda part: run_part(part, args.limit), args.parts))
    load = os.getloadavg()[0]
    for record in itertools.chain.from_iterable(found):
        print(json.dumps(record), flush=True)
    import torch  # last, as it takes seconds
    import triton

    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "cpus": len(os.sched_getaffinity(0)),
        "load": load,
    }
    with args.out.open("a") as out:
        for record in itertools.chain.from_iterable(found):
            out.write(json.dumps(record | about) + "\n")


PARTS: dict[str, Callable[[], None]] = {
    "cold": functools.partial(cold, True),
    "cold_without": functools.partial(cold, False),
    "replay": replay,
    "plan": plan,
}

if __name__ == "__main__":
    main()
