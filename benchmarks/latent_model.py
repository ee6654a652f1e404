"""A model of DeepSeek-V2-Lite's shape with random weights on a GPU: its tokens, and its steps with and without latents.

    python benchmarks/latent_model.py --out benchmarks/data/latent_model.jsonl --commit $(git rev-parse --short HEAD)

``tokens``: a few layers in float32 give the tokens of ``generate()``: eager, captured, and with keys of all heads in
prefills; ``more``: without latents, and captured with compiled layers. ``steps``: milliseconds of a captured decode
step in bfloat16, with latents in the cache and with the keys and values of all heads. ``prefill``: milliseconds of a
step of many tokens, by the absorbed form, by keys and values of all heads, and without latents. ``compiled``: decode
steps with compiled layers. ``attend``: one layer's attention of steps of many tokens in both forms, the basis of the
rule that chooses between them (``expands``). Each part runs even if another failed, and none begins after
``--seconds``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import statistics
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.graphs import DecodeGraphs
from paged_ops.graphs.modes import GraphKey
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.integrations.transformers import latent as latent_attention
from paged_ops.metadata import AttentionMetadataBuilder, Batch

BLOCK_SIZE, NEW_TOKENS, REPLAYS = 64, 16, 20
SHAPE: dict[str, Any] = dict(  # DeepSeek-V2-Lite
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=163840,
    bos_token_id=None,
    eos_token_id=None,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
)
SMALL: dict[str, Any] = dict(  # batched_mm copies the weights of each token's experts
    vocab_size=4096,
    intermediate_size=2048,
    moe_intermediate_size=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=3,
)
WAYS = ("eager", "captured", "keys of all heads"), ("without latents", "compiled")
POINTS = {"1x1024": (1, 1024), "16x4096": (16, 4096)}
PREFILLS = ((2048, 0), (8192, 0), (2048, 16384))  # new tokens and history of one sequence


class Bench:
    """The output of records, and the time limits of parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.out, self.commit, self.layers = options.out, options.commit, options.layers
        self.is_gpu = self.device.type == "cuda"
        self.until = time.monotonic() + options.seconds
        name = torch.cuda.get_device_name(self.device) if self.is_gpu else "cpu"
        self.about = dict(device=name, torch=torch.__version__, transformers=transformers.__version__)

    def add(self, **record: Any) -> None:
        record = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
        print(json.dumps(record), flush=True)
        about = dict(self.about, commit=self.commit, date=time.strftime("%Y-%m-%d"))
        if self.out is not None:
            with self.out.open("a") as out:
                out.write(json.dumps({**record, **about}) + "\n")

    def model(self, dtype: torch.dtype, added: float = 1.0, **changes: Any) -> Any:
        """With random weights; ``added`` times as much as usual is added to the residual stream."""
        config = transformers.DeepseekV2Config(**{**SHAPE, **changes})
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        with self.device:
            rotary = type(model.model.rotary_emb)(config)
        model = model.to_empty(device=self.device)
        model.model.rotary_emb = rotary  # has no weights, and is not random
        generator = torch.Generator(self.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.ones_(parameter)
            else:
                deviation = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                factor = added if "o_proj" in name or "down_proj" in name else 1.0
                parameter.data.normal_(0.0, factor * deviation, generator=generator)
        return model.eval().requires_grad_(False)

    def time_ms(self, run: Callable[[], Any], repeats: int = REPLAYS) -> float:
        """The median of several runs."""
        if not self.is_gpu:
            return min(timeit.repeat(run, number=1, repeat=2)) * 1e3
        for _ in range(3):
            run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(4096, (130,), generator=generator).tolist()
    own = [torch.randint(4096, (n,), generator=generator).tolist() for n in (1, 17, 64, 200, 700, 5, 40)]
    return own[:5] + [shared + each for each in own[5:]]


def tokens(bench: Bench, ways: Sequence[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = bench.model(torch.float32, **SMALL)
    if bench.is_gpu:
        model.set_experts_implementation("batched_mm")  # the others wait for the device in float32
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    want = []
    for prompt in _prompts():
        ids = torch.tensor([prompt], device=bench.device)
        want.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    bench.add(part="tokens", how="generate", distinct=len({token for text in want for token in text}))
    rule, fewest = latent_attention.expands, latent_attention.FEWEST_TOKENS
    captured = "FULL_DECODE_ONLY" if bench.is_gpu else "NONE"
    for how in ways:
        paged = PagedCausalLM(model, latent=how != "without latents")
        if how == "compiled":
            paged.compile_layers()
        if how == "keys of all heads":
            latent_attention.expands, latent_attention.FEWEST_TOKENS = (lambda *_: True), 2
        try:
            mode = "NONE" if how == "eager" else captured
            cache = paged.allocate_kv_cache(128, 16)
            loop = GenerationLoop(paged, cache, max_num_seqs=8, max_num_tokens=256, graph_mode=mode)
            loop.warm_up()
            got = loop.generate(_prompts(), SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()))
            different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if list(a) != b]
            replayed = loop.graph_stats.replayed
            bench.add(part="tokens", how=how, equal=not different, different=different, replayed=replayed)
        except Exception:
            bench.add(part="tokens", how=how, error=traceback.format_exc()[-1500:])
        finally:
            latent_attention.expands, latent_attention.FEWEST_TOKENS = rule, fewest
            paged.unwrap()
        if time.monotonic() > bench.until:
            return


def _blocks(S: int, length: int) -> tuple[int, list[list[int]]]:
    columns = -(-length // BLOCK_SIZE)
    return S * columns, torch.randperm(S * columns).view(S, columns).tolist()


def _decode(bench: Bench, model: Any, part: str, is_compiled: bool) -> None:
    for latent in (True, False):
        if time.monotonic() > bench.until:
            return
        try:
            began = time.monotonic()
            paged = PagedCausalLM(model, latent=latent)
            step: Any = paged.compile_layers() if is_compiled else paged
            S, length = max(POINTS.values(), key=lambda point: point[0] * point[1])
            needed, _ = _blocks(S, length + 1)
            cache = paged.allocate_kv_cache(needed, BLOCK_SIZE)
            for layer in cache.layers:
                layer.normal_()
            sizes = sorted({S for S, _ in POINTS.values()})
            width = max(length for _, length in POINTS.values()) + BLOCK_SIZE
            mode = "FULL_DECODE_ONLY" if bench.is_gpu else "NONE"
            run = DecodeGraphs(step, cache, max_num_seqs=max(sizes), max_model_len=width, seq_sizes=sizes, mode=mode)
            run.capture(dynamic=is_compiled)
            seconds = time.monotonic() - began
            for point, (S, length) in POINTS.items():
                _, tables = _blocks(S, length)
                batch = Batch([1] * S, [length - 1] * S, tables)
                replay = functools.partial(run.replay, batch, torch.randint(SHAPE["vocab_size"], (S,)))
                assert replay().isfinite().all()
                ms = bench.time_ms(run.captured[GraphKey(S, S)].replay if bench.is_gpu else replay)
                in_cache = cache.nbytes // (cache.num_blocks * BLOCK_SIZE * len(cache.layers))
                told = dict(layers=bench.layers, bytes_per_token_and_layer=in_cache, seconds_to_capture=seconds)
                bench.add(part=part, point=point, latent=latent, ms=ms, **told)
        except Exception:
            bench.add(part=part, latent=latent, error=traceback.format_exc()[-1500:])
        finally:
            model.paged_wrapping.undo() if hasattr(model, "paged_wrapping") else None
            cache = run = paged = step = replay = None
            _free()


def prefill(bench: Bench, model: Any) -> None:
    """Whole layers, with attention; the head of one row."""
    rule = latent_attention.expands
    for how in ("absorbed", "keys of all heads", "without latents"):
        if time.monotonic() > bench.until:
            return
        try:
            paged = PagedCausalLM(model, latent=how != "without latents")
            latent_attention.expands = lambda *_, choice=how == "keys of all heads": choice
            longest = max(map(sum, PREFILLS))
            needed, tables = _blocks(1, longest)
            cache = paged.allocate_kv_cache(needed, BLOCK_SIZE)
            for layer in cache.layers:
                layer.normal_()
            most = max(T for T, _ in PREFILLS)
            builder = AttentionMetadataBuilder(BLOCK_SIZE, 1, most, needed, bench.device, num_blocks=needed)
            for T, history in PREFILLS:
                metadata = builder.build(0, Batch([T], [history], tables))
                ids = torch.randint(SHAPE["vocab_size"], (T,), device=bench.device)
                last = torch.tensor([T - 1], device=bench.device)
                step = functools.partial(paged, ids, metadata, last, cache.layers)
                assert step().isfinite().all()
                ms = bench.time_ms(step, 4)
                bench.add(part="prefill", how=how, tokens=T, history=history, layers=bench.layers, ms=ms)
        except Exception:
            bench.add(part="prefill", how=how, error=traceback.format_exc()[-1500:])
        finally:
            latent_attention.expands = rule
            model.paged_wrapping.undo() if hasattr(model, "paged_wrapping") else None
            cache = builder = metadata = paged = step = None
            _free()


ATTENDS = (  # sequences, new tokens of each, history of each
    *((1, T, history) for T in (2048, 512, 1024, 256, 8192) for history in (0, 4096, 32768)),
    *((16, 512, 0), (16, 512, 4096), (64, 128, 0), (64, 128, 4096)),
)


def attend(bench: Bench) -> None:
    """Attention of one layer alone: microseconds by the absorbed form and by keys of all heads, captured for lengths
    that are known, and by the latter as it runs. Results are compared. What the rule of ``latent.expands`` rests on."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

    rule, is_captured = latent_attention.expands, latent_attention._is_captured
    features = dict.fromkeys(("sliding_window", "attention_chunk"), 0)
    for (S, T, history), H in itertools.product(ATTENDS, (128, 16)):
        if time.monotonic() > bench.until:
            break
        sizes = dict(num_attention_heads=H, num_key_value_heads=H)
        config = transformers.DeepseekV2Config(**{**SHAPE, **sizes}, attn_implementation="eager")
        with bench.device:
            module = DeepseekV2Attention(config, 0).to(torch.bfloat16).requires_grad_(False)
        needed, tables = _blocks(S, T + history)
        new = functools.partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
        cache, query = new(needed, BLOCK_SIZE, 576), new(1, H, S * T, 192)
        builder = AttentionMetadataBuilder(BLOCK_SIZE, S, S * T, T + history, bench.device, num_blocks=needed)
        batch = builder.build(0, Batch([T] * S, [history] * S, tables))
        call = functools.partial(
            latent_attention.attend, module, query, new(1, 1, S * T, 512), new(1, 1, S * T, 64), cache, batch.pool(0),
            batch, 192**-0.5, writes=True, soft_cap=0.0, bidirectional_ranges=None, **features,
        )  # fmt: skip
        us, outs = {}, []
        try:
            for way, choice in (("absorbed", False), ("keys of all heads", True)):
                latent_attention.expands = lambda *_, choice=choice: choice
                outs.append(call())
                run: Callable[[], Any] = call
                if bench.is_gpu:
                    if choice:
                        us["keys of all heads, not captured"] = round(1e3 * bench.time_ms(run, 5), 1)
                    latent_attention._is_captured = lambda _: False
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        call()
                    run = graph.replay
                us[way] = round(1e3 * bench.time_ms(run, 9), 1)
            apart = float((outs[0] - outs[1]).norm() / outs[0].norm())
            bench.add(part="attend", heads=H, sequences=S, tokens=T, history=history, us=us, apart=apart)
            assert apart < 0.02, apart
        except Exception:
            error = traceback.format_exc()[-1500:]
            bench.add(part="attend", heads=H, sequences=S, tokens=T, history=history, error=error)
        finally:
            latent_attention.expands, latent_attention._is_captured = rule, is_captured
            outs, run, call, cache, query = [], None, None, None, None
            _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["tokens", "steps", "prefill", "attend", "more", "compiled"])
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--seconds", type=float, default=50.0, help="after which no part is begun")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    bench = Bench(options)
    model: Any = None
    for part in options.parts:
        began = time.monotonic()
        if began > bench.until:
            break
        try:
            if part in ("tokens", "more"):
                tokens(bench, WAYS[part == "more"])
                continue
            if part == "attend":
                attend(bench)
                continue
            if model is None:
                # random experts are chosen by near ties, which rounding decides: they should not change all logits
                model = bench.model(torch.bfloat16, added=0.2, num_hidden_layers=bench.layers)
            if part == "prefill":
                prefill(bench, model)
            else:
                _decode(bench, model, part, part == "compiled")
        except Exception:
            traceback.print_exc()
        finally:
            _free()
            print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
