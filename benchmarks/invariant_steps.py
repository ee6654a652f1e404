"""Whole steps of a model with ``batch_invariant=True`` next to the same steps without, on a GPU.

    python benchmarks/invariant_steps.py --commit $(git rev-parse --short HEAD) --out DIR/invariant_steps.jsonl

Llama-3-8B's shape with random weights in bfloat16: decode steps captured in CUDA graphs, and the step of a prompt,
which is not captured. Decode steps are timed by turns, default first and last, and their medians are compared. A line
of JSON per point: milliseconds, and the time with the flag in times of the default's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from paged_ops.graphs import DecodeGraphs
from paged_ops.graphs.modes import GraphKey
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.metadata import AttentionMetadataBuilder, Batch

SHAPE: dict[str, Any] = dict(  # Llama-3-8B
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=16384,
)
TINY: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
POINTS = {"1x1024": (1, 1024), "64x1024": (64, 1024), "64x4096": (64, 4096)}
PROMPT, BLOCK, TURNS, RUNS = 8192, 16, 5, 6


def model_of(layers: int, device: torch.device) -> Any:
    """On the meta device first: all weights are drawn on the GPU."""
    config = transformers.LlamaConfig(
        **{**SHAPE, **(TINY if device.type == "cpu" else {})}, num_hidden_layers=layers, bos_token_id=None
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with device:
        rotary = type(model.model.rotary_emb)(config)
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary  # has no weights, and is not random
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def steps_of(
    paged: Any, vocabulary: int, cache: Any, points: dict[str, tuple[int, int]], prompt: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """A function for each point, which runs its step."""
    steps: dict[str, Callable[[], Any]] = {}
    sizes = sorted({S for S, _ in points.values()})
    width = max(n for _, n in points.values()) + BLOCK
    mode = "FULL_DECODE_ONLY" if device.type == "cuda" else "NONE"
    graphs = DecodeGraphs(paged, cache, max_num_seqs=max(sizes), max_model_len=width, seq_sizes=sizes, mode=mode)
    graphs.capture()
    for point, (S, n) in points.items():
        columns = -(-n // BLOCK)
        tables = torch.arange(S * columns).view(S, columns).tolist()
        batch = Batch([1] * S, [n - 1] * S, tables)
        ids = torch.randint(vocabulary, (S,))

        def replay(batch: Any = batch, ids: Any = ids, S: int = S) -> Any:
            """The batch, and the graph alone from then on."""
            return graphs.replay(batch, ids) if mode == "NONE" else graphs.captured[GraphKey(S, S)].replay()

        def begin(batch: Any = batch, ids: Any = ids) -> None:
            assert graphs.replay(batch, ids).isfinite().all()

        steps[point] = replay
        replay.begin = begin  # type: ignore[attr-defined]
    columns = -(-prompt // BLOCK)
    builder = AttentionMetadataBuilder(BLOCK, 1, prompt, columns, device, num_blocks=cache.num_blocks)
    metadata = builder.build(0, Batch([prompt], [0], [list(range(columns))]))
    ids, last = torch.randint(vocabulary, (prompt,), device=device), torch.tensor([prompt - 1], device=device)
    steps[f"prompt of {prompt}"] = functools.partial(paged, ids, metadata, last, cache.layers)
    return steps


def median_ms(step: Callable[[], Any], device: torch.device) -> float:
    getattr(step, "begin", step)()
    if device.type == "cpu":
        began = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - began)
    step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    points = POINTS if is_gpu else {"1x100": (1, 100), "3x50": (3, 50)}
    prompt = PROMPT if is_gpu else 70
    model = model_of(options.layers, device)
    blocks = max(-(-prompt // BLOCK), *(S * -(-n // BLOCK) for S, n in points.values()))
    about = {"device": torch.cuda.get_device_name() if is_gpu else "cpu", "torch": torch.__version__}
    about |= {"transformers": transformers.__version__, "commit": options.commit, "layers": options.layers}
    about |= {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    cache, ways, ms = None, {}, {}
    for batch_invariant in (False, True):
        paged = PagedCausalLM(model, batch_invariant=batch_invariant)
        if cache is None:
            cache = paged.allocate_kv_cache(blocks, BLOCK)
            for layer in cache.layers:
                layer.normal_()
        steps = ways[batch_invariant] = steps_of(paged, model.config.vocab_size, cache, points, prompt, device)
        # Without graphs a step needs its own wrapping of the model; captured ones are timed by turns below.
        for point in steps if not is_gpu else [f"prompt of {prompt}"]:
            ms[point, batch_invariant] = [median_ms(steps[point], device) for _ in range(3)]
        if not batch_invariant:
            paged.unwrap()
    for point, _, way in itertools.product(points if is_gpu else (), range(TURNS), (False, True, False)):
        ms.setdefault((point, way), []).append(median_ms(ways[way][point], device))
    for point in ways[True]:
        default, invariant = (statistics.median(ms[point, way]) for way in (False, True))
        record = {"point": point, "default_ms": round(default, 3), "invariant_ms": round(invariant, 3)}
        record |= {"ratio": round(invariant / default, 3), **about}
        print(json.dumps(record), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
