"""vLLM with its own attention backends and with ours: milliseconds per decode step, and a mixed load, in the real
engine.

One process per backend with one engine, of the shape of Llama-3-8B with dummy weights (made larger, so that attention
and the choice of tokens depend on them). No tokenizer, no network. All backends get the same requests; their greedy
tokens are compared. Results are written after each measurement, so that a time limit keeps the finished ones.

    python benchmarks/engine_vllm.py --out DIR [--backends PAGED_OPS FLASH_ATTN TRITON_ATTN] [--seconds 540]
    python benchmarks/engine_vllm.py --out DIR --tiny            # a tiny model, to try the script, also on the CPU
    python benchmarks/engine_vllm.py --out DIR --batch-invariant # vLLM's mode; bits of requests alone and in a batch
    python benchmarks/engine_vllm.py --out DIR --backends        # only compare the results in DIR
    python benchmarks/engine_vllm.py --out DIR --tensor-parallel 2                        # on two GPUs
    python benchmarks/engine_vllm.py --out DIR --tensor-parallel 2 --context-parallel 2 --shape one-kv-head
    python benchmarks/engine_vllm.py --out DIR --shape deepseek-v2-lite --backends PAGED_OPS FLASHMLA TRITON_MLA

The workers of several GPUs find this package by its plugin, so it must be installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shapes_vllm import SHAPES

# Environment variables of vLLM, unless they are set: the engine in this process, no network, its own sampler.
SWITCHES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
# Name, lengths of the prompts. Decode steps are timed while all of them decode.
DECODE = {
    "1x1024": [1024],
    "64x1024": [1024] * 64,
    "256x1024": [1024] * 256,
    "1x8192": [8192],
    "64 ragged, 128 to 8192": [int(128 * 64 ** (i / 63)) for i in range(64)],
    "8 long (8192) among 120 short (256)": ([8192] + [256] * 15) * 8,
}
LONG = {"1x65536": [65536], "1x131072": [131072], "4x65536": [65536] * 4}  # with --longest


def log(text: str) -> None:
    """A line with the time, at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Engine:
    """One vLLM engine in this process, advanced step by step."""

    def __init__(self, backend: str, shape: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.tiny = shape == "tiny"
        # dict[str, Any]: the type of JSON.
        config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
        config |= SHAPES[shape] | {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
        self.vocabulary = config["vocab_size"]
        if args.longest:
            config["max_position_embeddings"] = args.longest
        config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
        written = json.dumps(config)
        # the same folder for the same shape: vLLM's cache of compiled graphs knows models by their path
        folder = Path(tempfile.gettempdir(), f"engine_vllm_{hashlib.sha256(written.encode()).hexdigest()[:16]}")
        folder.mkdir(exist_ok=True)
        own = folder / f"config.{os.getpid()}"
        own.write_text(written)
        own.replace(folder / "config.json")  # whole at any time: engines that start side by side read it
        sizes = [1, 2, 4, 8] if self.tiny else [1, 2, 4, 8, 16, 32, 64, 128, 256]
        on_cpu = args.cpu
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype or ("float32" if on_cpu else "bfloat16"),
            seed=0,
            max_model_len=args.longest or (512 if self.tiny else 16384),
            tensor_parallel_size=args.tensor_parallel,
            decode_context_parallel_size=args.context_parallel,
            **({"distributed_executor_backend": "mp"} if args.tensor_parallel > 1 else {}),
            max_num_seqs=8 if self.tiny else 256,
            max_num_batched_tokens=args.chunk,
            enable_prefix_caching=bool(args.sharing),
            kv_cache_dtype=args.kv_cache_dtype,
            gpu_memory_utilization=args.memory,
            **({"kv_cache_memory_bytes": args.cache << 30} if args.cache else {}),
            disable_log_stats=True,
            # Of other kernels than attention, and not without packages that FlashInfer's attention does not need.
            enable_flashinfer_autotune=False,
            additional_config={"paged_ops_cascade": args.cascade, "paged_ops_symmetric_memory": not args.collectives},
            **({} if args.block_size is None else {"block_size": args.block_size}),
            **(
                {"kv_cache_memory_bytes": 128 << 20, "enforce_eager": True}
                if on_cpu
                else {
                    "attention_backend": backend,
                    "compilation_config": {"cudagraph_mode": args.graphs, "cudagraph_capture_sizes": sizes},
                }
            ),
        )
        self.llm.apply_model(spread_weights)
        self.engine = self.llm.llm_engine
        self.next_id = 0
        self.shared = random.Random(0).choices(range(10, self.vocabulary), k=args.sharing)
        # of this process: workers of several GPUs count for themselves
        self.compiled = [] if on_cpu or args.tensor_parallel > 1 else count_compilations()

    def add(self, length: int, new_tokens: int, seed: int) -> str:
        """Queue a request with random token ids after the shared ones; greedy, no stop token."""
        from vllm import SamplingParams

        shared = self.shared if length > len(self.shared) else []
        ids = shared + random.Random(seed).choices(range(10, self.vocabulary), k=length - len(shared))
        name = str(self.next_id)
        self.next_id += 1
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def run(self, names: Sequence[str]) -> tuple[dict[str, list[int]], list[tuple[float, int, int]]]:
        """Step until all is done: tokens of each request, and of each step its end, requests and tokens delivered."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        steps = []
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            end = time.perf_counter()
            new = 0
            for output in outputs:
                ids = list(output.outputs[0].token_ids)
                new += len(ids) - len(tokens[output.request_id.split("-")[0]])
                tokens[output.request_id.split("-")[0]] = ids
            steps.append((end, len(outputs), new))
        return tokens, steps

    def decode(self, lengths: Sequence[int], new_tokens: int, seed: int) -> dict[str, Any]:
        """Milliseconds a step while every request decodes."""
        names = [self.add(length, new_tokens, seed * 10007 + i) for i, length in enumerate(lengths)]
        tokens, steps = self.run(names)
        # Every request got a token in this step and in the one before: pure decode.
        times = [
            (end - before) * 1e3
            for (before, had, _), (end, has, new) in itertools.pairwise(steps)
            if had == has == new == len(names)
        ][2:-2]
        if not times:
            raise RuntimeError(f"no step decodes all {len(names)} requests: they do not fit the cache")
        return {
            "ms_per_step": statistics.fmean(times),
            "median_ms": statistics.median(times),
            "p10_ms": sorted(times)[int(0.1 * len(times))],
            "p90_ms": sorted(times)[int(0.9 * len(times))],
            "steps": len(times),
            "tokens": [tokens[name] for name in names],
        }

    def mixed(self, requests: int, longest: int, most_new: int, seed: int) -> dict[str, Any]:
        """A load of ragged prompts and outputs, all waiting at once: seconds and output tokens a second."""
        draw = random.Random(seed)
        start = time.perf_counter()
        names = []
        prompt_tokens = new_tokens = 0
        for i in range(requests):
            length, new = int(32 * (longest / 32) ** draw.random()), draw.randint(most_new // 8, most_new)
            prompt_tokens, new_tokens = prompt_tokens + length, new_tokens + new
            names.append(self.add(length, new, seed * 10007 + i))
        tokens, steps = self.run(names)
        seconds = steps[-1][0] - start
        return {
            "seconds": seconds,
            "output_tokens_per_second": new_tokens / seconds,
            "total_tokens_per_second": (prompt_tokens + new_tokens) / seconds,
            "ms_per_step": seconds * 1e3 / len(steps),
            "steps": len(steps),
            "requests": requests,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "tokens": [tokens[name] for name in names],
        }

    def differing(self, lengths: Sequence[int], new_tokens: int) -> dict[str, int]:
        """How many tokens and log-probabilities of requests alone have other bits than in one batch."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1)
        ids = [random.Random(i).choices(range(10, self.vocabulary), k=n) for i, n in enumerate(lengths)]
        prompts: list[Any] = [{"prompt_token_ids": each} for each in ids]
        together = self.llm.generate(prompts, params, use_tqdm=False)
        alone = [self.llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
        pairs = [
            ((x, a[x].logprob), (y, b[y].logprob))
            for one, other in zip(alone, together, strict=True)
            for x, a, y, b in zip(
                one.outputs[0].token_ids,
                one.outputs[0].logprobs,
                other.outputs[0].token_ids,
                other.outputs[0].logprobs,
                strict=True,
            )
        ]
        return {"logprobs": len(pairs), "differ": sum(a != b for a, b in pairs)}

    def kernels(self, lengths: Sequence[int], steps: int = 8) -> list[dict[str, Any]]:
        """What runs on the device in a decode step, in milliseconds a step, the longest first."""
        import torch

        for i, length in enumerate(lengths):
            self.add(length, 64, i)
        fresh = self.engine.step()
        while len(fresh) < len(lengths):
            fresh = self.engine.step()
        for _ in range(4):
            self.engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.engine.step()
            torch.cuda.synchronize()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        rows = [(event.key, event.self_device_time_total / 1e3 / steps) for event in profile.key_averages()]
        rows.sort(key=lambda row: -row[1])
        return [{"kernel": key[:120], "ms_per_step": ms} for key, ms in rows[:16] if ms > 0]


class Gate:
    """A file where engines that start side by side wait for each other. Then one measures at a time."""

    def __init__(self, path: str, engines: int) -> None:
        self._file, self._engines, self._is_there = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), engines, False

    def arrive(self) -> None:
        """Once for each engine, also one that fails: the size of the file is their number."""
        if not self._is_there:
            os.write(self._file, b"x")
            self._is_there = True

    def pass_through(self, latest: float) -> None:
        """Until all have arrived, or this time; then until this engine's turn, which ends with its process."""
        self.arrive()
        while os.fstat(self._file).st_size < self._engines and time.monotonic() < latest:
            time.sleep(0.2)
        fcntl.flock(self._file, fcntl.LOCK_EX)


def count_compilations() -> list[str]:
    """The names of Triton's kernels that are compiled from now on, or fetched from its cache on disk, as they come."""
    from triton import knobs

    names: list[str] = []
    earlier = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        names.append(getattr(kwargs.get("fn"), "name", str(kwargs.get("repr")))[:80])
        return earlier(*args, **kwargs) if earlier else None

    knobs.runtime.jit_post_compile_hook = hook
    return names


def spread_weights(model: Any) -> None:
    """Norms of one and matrices of the size that training starts from, instead of vLLM's ±0.001."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.nbytes < parameter.untyped_storage().nbytes():
                continue  # a part of another one, as layers with latents have
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.mul_(30.0)


def measure(backend: str, args: argparse.Namespace) -> None:
    """In a process of its own: all measurements of one backend, written as they come."""
    deadline = time.monotonic() + args.seconds
    path = Path(args.out) / f"engine_vllm_{backend}.json"
    # dict[str, Any]: the type of JSON.
    record: dict[str, Any] = {"backend": backend, "argv": sys.argv[1:], "decode": {}, "mixed": {}}

    def save() -> None:
        path.write_text(json.dumps(record))

    save()
    started = time.monotonic()
    gate = Gate(args.gate, args.engines) if args.gate else None
    try:
        import torch
        import vllm

        record["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
        if torch.cuda.is_available():
            record["device"] = torch.cuda.get_device_name()
        if backend == "PAGED_OPS":
            sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
            from paged_ops.integrations.vllm import plugin as vllm_plugin

            (vllm_plugin.replace_cpu_backend if args.cpu else vllm_plugin.register)()
            name = vllm_plugin.name()
        else:
            name = backend
        engine = Engine(name, "tiny" if args.tiny else args.shape, args)
        record["start_seconds"] = time.monotonic() - started
        if gate is not None:
            gate.pass_through(started + 0.6 * args.seconds)
        config = engine.engine.vllm_config
        record["block_size"] = config.cache_config.block_size
        record["dtype"] = str(config.model_config.dtype)
        record["graphs"] = str(config.compilation_config.cudagraph_mode)
        log(f"{backend}: engine started in {record['start_seconds']:.0f} s, blocks of {record['block_size']}")
        cases = (
            {"4 ragged": [3, 40, 90, 17], "2x64": [64, 64]} if args.tiny else DECODE | (LONG if args.longest else {})
        )
        if args.sharing:
            requests, own, other = (8, 16, 32) if args.tiny else (64, 256, 1024)
            lengths = [args.sharing + own + i for i in range(requests)]
            cases = {f"{requests} sharing {args.sharing}": lengths, f"{requests}x{other}": [other] * requests}
            args.cases = list(cases)
            engine.decode(lengths[:1], 16, 1)  # the prefix is in the cache from now on
        engine.decode([16] * 4, 16, 0)
        if args.bits:
            lengths = [3, 40, 90, 17, 64, 200] if args.tiny else [3, 40, 900, 17, 64, 2000, 5000, 1, 128, 300] * 3
            record["alone"] = engine.differing(lengths, 16 if args.tiny else 64)
            log(f"{backend}: alone and in a batch: {record['alone']}")
            save()

        def note_compiled(result: dict[str, Any]) -> None:
            result["kernels_compiled"] = list(engine.compiled)
            engine.compiled.clear()

        record["compiled_at_first_request"] = list(engine.compiled)
        engine.compiled.clear()
        for repeat in range(args.repeats):
            for case, lengths in cases.items():
                if args.cases and case not in args.cases:
                    continue
                if time.monotonic() > deadline:
                    log(f"{backend}: out of time before {case}, repeat {repeat}")
                    break
                result = engine.decode(lengths, 16 if args.tiny else 68, 1)
                note_compiled(result)
                record["decode"].setdefault(case, []).append(result)
                log(f"{backend}: {case}: {result['median_ms']:.3f} ms a step")
                save()
            if time.monotonic() > deadline or args.cases:
                continue
            result = engine.mixed(12, 200, 24, 7) if args.tiny else engine.mixed(192, 8192, 256, 7)
            note_compiled(result)
            record["mixed"].setdefault("ragged", []).append(result)
            log(
                f"{backend}: mixed: {result['seconds']:.2f} s, {result['output_tokens_per_second']:.0f} tokens/s, "
                f"{len(result['kernels_compiled'])} kernels compiled"
            )
            save()
        if args.profile and not args.cpu:
            record["kernels"] = {}
            for case in args.cases or ("64x1024", "64 ragged, 128 to 8192"):
                record["kernels"][case] = engine.kernels(cases[case])
                save()
        log(f"{backend}: done after {time.monotonic() - started:.0f} s")
    except BaseException as error:
        if gate is not None:
            gate.arrive()
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
        save()
        raise


def agreement(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far two lists of token lists agree from their beginnings."""
    pairs = list(zip(tokens, others, strict=True))
    same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
    return {
        "first_token_equal": sum(n > 0 for n in same) / len(same),
        "mean_equal_prefix": statistics.fmean(same),
        "all_equal": sum(n == len(a) for n, (a, _) in zip(same, pairs, strict=True)) / len(same),
        "tokens_a_request": statistics.fmean(len(a) for a in tokens),
    }


def summarise(out: Path) -> dict[str, Any]:
    """The records of all backends in a folder as one, with tokens compared and left out."""
    paths = sorted(out.glob("engine_vllm_*.json"))
    records = {record["backend"]: record for record in (json.loads(path.read_text()) for path in paths)}
    compared: dict[str, dict[str, Any]] = {}
    names = list(records)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for kind in ("decode", "mixed"):
                for case in records[a][kind].keys() & records[b][kind].keys():
                    pair = (records[a][kind][case][0]["tokens"], records[b][kind][case][0]["tokens"])
                    compared.setdefault(f"{a} and {b}", {})[case] = agreement(*pair)
    for record in records.values():
        for kind in ("decode", "mixed"):
            for repeats in record[kind].values():
                first = repeats[0]["tokens"]
                for repeat in repeats:
                    repeat["same_as_first_repeat"] = repeat["tokens"] == first
                for repeat in repeats:
                    del repeat["tokens"]
    return {"backends": records, "tokens": compared}


def make_parser() -> argparse.ArgumentParser:
    """The options of this script; :class:`Engine` takes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backends", nargs="*", default=["PAGED_OPS", "FLASH_ATTN", "TRITON_ATTN"])
    parser.add_argument("--seconds", type=float, default=540.0, help="limit for all backends together")
    parser.add_argument("--each", type=float, default=None, help="limit for one backend, its start included")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=None, help="only these decode cases, and no mixed load")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--block-size", type=int, default=None, help="tokens a block; vLLM's default without it")
    parser.add_argument("--dtype", default=None, help="of weights and cache: bfloat16, or float32 on the CPU")
    parser.add_argument("--kv-cache-dtype", default="auto", help="vLLM's name")
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--cache", type=int, default=None, help="GiB of the cache on each GPU, instead of a share")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step of these cases")
    parser.add_argument("--sharing", type=int, default=0, help="only cases whose requests share this number of tokens")
    parser.add_argument("--cascade", action="store_true", help="our backend looks for what requests share")
    parser.add_argument("--shape", default="llama-3-8b", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--context-parallel", type=int, default=1, help="vLLM's decode_context_parallel_size")
    parser.add_argument("--collectives", action="store_true", help="our backend uses no symmetric memory there")
    parser.add_argument(
        "--longest", type=int, default=None, help="max_model_len; adds cases of 65536 and 131072 tokens"
    )
    parser.add_argument("--layers", type=int, default=None, help="the number of layers, instead of the shape's")
    parser.add_argument("--gate", default=None, help="a new file: engines of several processes start side by side")
    parser.add_argument("--engines", type=int, default=1, help="the number of engines at the gate")
    parser.add_argument("--bits", action="store_true", help="also compare requests alone with those in a batch")
    parser.add_argument("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1; implies --bits")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU platform, where CPU_ATTN is its own backend")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure every backend in a process of its own, then summarise."""
    args = make_parser().parse_args()
    if args.tiny:
        args.chunk = 64
    if args.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"], args.bits = "1", True
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.one:
        measure(args.one, args)
        return
    deadline = time.monotonic() + args.seconds
    for i, backend in enumerate(args.backends):
        left = deadline - time.monotonic()
        share = args.each or left / (len(args.backends) - i)
        if left < 30:
            log(f"{backend}: left out, {left:.0f} s are left")
            continue
        log(f"{backend}: {share:.0f} s")
        arguments = [*sys.argv[1:], "--one", backend, "--seconds", str(share * 0.8)]
        environment = SWITCHES | os.environ
        limit = min(share * 1.1, left)
        try:
            done = subprocess.run([sys.executable, __file__, *arguments], timeout=limit, env=environment)
            log(f"{backend}: exit {done.returncode}")
        except subprocess.TimeoutExpired:
            log(f"{backend}: stopped after {limit:.0f} s")
        (out / "engine_vllm.json").write_text(json.dumps(summarise(out), indent=1))
    summary = summarise(out)
    (out / "engine_vllm.json").write_text(json.dumps(summary, indent=1))
    for backend, record in summary["backends"].items():
        for case, repeats in record["decode"].items():
            log(f"{backend:12} {case:36} {min(r['median_ms'] for r in repeats):8.3f} ms a step")
        for case, repeats in record["mixed"].items():
            log(f"{backend:12} {case:36} {min(r['seconds'] for r in repeats):8.3f} s")
        if "error" in record:
            log(f"{backend:12} {record['error'][:300]}")
    log(json.dumps(summary["tokens"]))


if __name__ == "__main__":
    main()
