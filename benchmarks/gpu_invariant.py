"""Batch-invariant attention on a GPU: the bits of rows in other calls, and its time next to the default op's.

    python benchmarks/gpu_invariant.py --commit $(git rev-parse HEAD) --out DIR/gpu_invariant.jsonl
    python benchmarks/gpu_invariant.py --parts fa3 --cases 1x131072        # next to FlashAttention-3 with one split
    python benchmarks/gpu_invariant.py --parts times --vary SEGMENT=2048 --vary "LEAD=4 SHORTEST=512"

``bits``: rows of one prompt alone, together, in chunks and next to prompts, over caches of several block sizes, layouts
and alignments; all must have the bits of one prefill. ``times``: each case by the default op, with
``batch_invariant``, and by the default op again, in one process. ``fa3``: also FlashAttention-3 with ``num_splits=1``,
which needs vLLM; engines use it for this purpose today. ``--vary``: ``batch_invariant`` also with other values of the
constants of hopper/invariant.py and hopper/invariant_few.py. A line of JSON per result, as it comes; compiling takes
most of the time: the same command with ``--compile PROCESSES`` first does only that. The exit code is 1 if a bit
differs or a result is wrong.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import paged_ops
from paged_ops.bench import cases, measure, providers, run

# Block size, whether heads come before tokens, and elements before the first: TMA can address the first three.
FORMS = ((16, False, 0), (16, True, 0), (48, False, 0), (1, False, 0), (12, True, 0), (16, False, 1))
Part = tuple[int, int]  # the rows first:end of the prompt, when it has ``end`` tokens


class Prompt:
    """One sequence, and the bits of its rows in one prefill."""

    def __init__(
        self, n: int, heads: tuple[int, int], D: int, dtype: torch.dtype, stored: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        H, K = heads
        self.n, self.rng, self.device, self.stored = n, random.Random(0), device, stored
        self.key, self.value = (torch.randn(n, K, D, device=device).to(stored) for _ in range(2))
        self.query = torch.randn(n, H, D, device=device).to(dtype)
        self.features: dict[str, Any] = {"batch_invariant": True}
        self.nothing: float = torch.nan
        if stored.itemsize == 1:  # bytes, which can be copied by index
            self.key, self.value, self.nothing = self.key.view(torch.uint8), self.value.view(torch.uint8), 0x7F
            self.features |= {name: torch.tensor([0.7], device=device) for name in ("k_scale", "v_scale")}
        self.bits = self.attend([(0, n)], FORMS[0])

    def attend(self, parts: Sequence[Part], form: tuple[int, bool, int]) -> list[tuple[Tensor, Tensor]]:
        """The bits of out and lse of each part, all computed in one call. Unused memory is NaN."""
        (B, head_major, offset), (_n, K, D) = form, self.key.shape
        of = [-(-end // B) for _, end in parts]
        N, M = sum(of) + 3, max(of) + 2
        size = N * 2 * B * K * D + offset
        memory = torch.full((size,), self.nothing, dtype=self.key.dtype, device=self.device)[offset:]
        kv_cache = memory.view(N, 2, K, B, D).transpose(2, 3) if head_major else memory.view(N, 2, B, K, D)
        ids = self.rng.sample(range(N), N)
        tables = torch.zeros(len(parts), M, dtype=torch.int32)
        for s, (_, end) in enumerate(parts):
            mine = torch.tensor([ids.pop() for _ in range(of[s])])
            tables[s, : of[s]] = mine
            block = mine.to(self.device).repeat_interleave(B)[:end]
            place = torch.arange(end, device=self.device) % B
            kv_cache[block, 0, place], kv_cache[block, 1, place] = self.key[:end], self.value[:end]
        starts = [0, *itertools.accumulate(end - first for first, end in parts)]
        lens = torch.tensor([end for _, end in parts], dtype=torch.int32, device=self.device)
        query = torch.cat([self.query[first:end] for first, end in parts])
        batch = tables.to(self.device), lens, torch.tensor(starts, dtype=torch.int32, device=self.device)
        kv_cache = kv_cache.view(self.stored)
        results = paged_ops.paged_attention_with_lse(query, kv_cache, *batch, D**-0.5, **self.features)
        views = [each.view({2: torch.int16, 4: torch.int32}[each.element_size()]) for each in results]
        return [(views[0][a:b], views[1][a:b]) for a, b in itertools.pairwise(starts)]

    def wrong(self, parts: Sequence[Part], form: tuple[int, bool, int]) -> int:
        """The number of rows that have other bits."""
        count = 0
        for (first, end), got in zip(parts, self.attend(parts, form), strict=True):
            differ = [(a != b[first:end]).flatten(1).any(1) for a, b in zip(got, self.bits[0], strict=True)]
            count += int((differ[0] | differ[1]).sum())
        return count

    def calls(self, rows: int) -> dict[str, list[list[Part]]]:
        """The calls that are compared, by name."""
        n, rng = self.n, self.rng
        picked = sorted({0, n - 2, n - 1, *rng.sample(range(n), rows)})
        cuts = [0, *sorted(rng.sample(range(1, n), 4)), n]
        single = [(row, row + 1) for row in picked]
        return {
            "alone": [[each] for each in single],
            "together": [single],
            "few rows each": [[(max(row - 3, 0), row + 1) for row in picked]],
            "chunks": [list(itertools.pairwise(cuts))],
            "next to a prompt": [[(n - n // 8, n), *single]],
        }


def bits(
    device: torch.device, n: int, rows: int, heads: tuple[int, int], D: int, dtype: torch.dtype, stored: torch.dtype,
    forms: Sequence[tuple[int, bool, int]] = FORMS,
) -> dict[str, Any]:  # fmt: skip
    prompt = Prompt(n, heads, D, dtype, stored, device)
    of, wrong = 0, {}
    for form in forms:
        for name, calls in prompt.calls(rows if form == FORMS[0] else max(rows // 6, 1)).items():
            count = sum(prompt.wrong(parts, form) for parts in calls)
            of += sum(end - first for parts in calls for first, end in parts)
            if count:
                wrong[f"{name}, block {form[0]}, head-major {form[1]}, offset {form[2]}"] = count
    kind = {"heads": heads, "D": D, "dtype": str(dtype), "cache_dtype": str(stored)}
    return {"part": "bits", "tokens": n, **kind, "rows": of, "wrong": wrong}


@contextlib.contextmanager
def constants(varied: str) -> Iterator[None]:
    """Inside it, constants of hopper/invariant.py or invariant_few.py have other values: "NAME=VALUE NAME=VALUE"."""
    if not varied:
        yield
        return
    from paged_ops.lowerings.gpu.attention import call
    from paged_ops.lowerings.gpu.attention.hopper import invariant, invariant_few

    with contextlib.ExitStack() as patched:
        patched.callback(call.forget)  # also after an error, so that the next case has the constants of the module
        for each in varied.split():
            name, _, value = each.partition("=")
            of = [module for module in (invariant, invariant_few) if hasattr(module, name)]
            if len(of) != 1:
                raise ValueError(f"--vary: no constant {name}, or not one, in hopper/invariant.py and invariant_few.py")
            patched.enter_context(mock.patch.object(of[0], name, ast.literal_eval(value)))
        call.forget()
        yield


def small(case: cases.Case) -> cases.Case:
    """A case with as many sequences, for which the same kernels are compiled."""
    return dataclasses.replace(case, seqs=tuple((min(q, 256), min(n, 256)) for q, n in case.seqs))


def compile_small(job: tuple[list[cases.Case], str, torch.device]) -> None:
    """Compile what some cases need, with varied constants."""
    given, varied, device = job
    with constants("" if varied == "default" else varied):
        for case in given:
            (inputs,) = cases.make_inputs(small(case), device, 1)[:1]
            paged_ops.paged_attention(*inputs.args, **inputs.kwargs, batch_invariant=varied != "default")
    torch.cuda.synchronize(device)


def times(case: cases.Case, device: torch.device, repeats: int, fa3: bool, vary: Sequence[str]) -> dict[str, Any]:
    sets = measure.inputs_of(case, device)
    default = providers.PagedOps().prepare(sets)
    invariant: list[Any] = [functools.partial(call, batch_invariant=True) for call in default]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "default": default,
        "invariant": invariant,
        "default again": default,
    }
    if fa3:
        calls["FA3, one split"] = [one_split(each) for each in sets]
    rest = measure.REST_SECONDS if case.flops > 100 * case.bytes else 0.0
    record: dict[str, Any] = {"part": "times", "case": case.key}
    for name, each in [*calls.items(), *((varied, invariant) for varied in vary)]:
        with constants(name if name in vary else ""):
            replay = measure.Replay(each, device)
        record[name] = {"error": measure.verify(replay, sets), "us": round(replay.median_us(repeats, rest), 2)}
        del replay
        torch.cuda.empty_cache()
    fastest = min(record["default"]["us"], record["default again"]["us"])
    return {**record, "ratio": round(record["invariant"]["us"] / fastest, 3)}


def one_split(inputs: cases.Inputs) -> Callable[[], Tensor]:
    """FlashAttention-3 with one split, without a schedule, which could choose another number."""
    call = providers.FlashAttention3()._prepare(inputs)
    assert isinstance(call, functools.partial)
    module = importlib.import_module(providers.FlashAttention3.MODULE)
    named = {**call.keywords, "scheduler_metadata": None, "num_splits": 1}
    return functools.partial(module.flash_attn_varlen_func, *call.args, **named)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="bits,times", help="of bits, times and fa3, with commas between")
    parser.add_argument("--groups", default="decode,prefill,fp8", help="of paged_ops.bench.cases, with commas between")
    parser.add_argument("--cases", default="^(?!.*block (64|128))", help="a regular expression: group heads name")
    parser.add_argument("--tokens", type=int, default=3001, help="of the prompt whose bits are compared")
    parser.add_argument("--rows", type=int, default=24, help="of it that are computed alone")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vary", action="append", default=[], help='"NAME=VALUE NAME=VALUE", any number of times')
    parser.add_argument("--compile", type=int, default=0, help="do nothing but compile, in that many processes")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="append one JSON line per result")
    args = parser.parse_args()
    device, parts = torch.device(args.device), args.parts.split(",")
    jobs: list[Callable[[], dict[str, Any]]] = []
    if "bits" in parts:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        both = (32, 8), (8, 1)  # with one key/value head, segments are shorter than the prompt
        kinds = itertools.product(both, dict.fromkeys((dtype, torch.float8_e4m3fn, torch.float8_e5m2)))
        jobs += [
            functools.partial(bits, device, args.tokens, args.rows, heads, 128, dtype, each) for heads, each in kinds
        ]
    if {"times", "fa3"} & {*parts}:
        chosen = [each for each in cases.gpu_cases() if each.group in args.groups.split(",")]
        chosen = [each for each in chosen if re.search(args.cases, each.key)]
        if args.compile:
            alike: dict[Any, list[cases.Case]] = {}
            for each in chosen:
                kind = each.group, each.num_heads, each.num_kv_heads, each.head_size, each.cache_dtype
                alike.setdefault((*kind, each.num_tokens == len(each.seqs)), []).append(each)
            work = [(each, varied, device) for varied in ("", "default", *args.vary) for each in alike.values()]
            with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
                pool.map(compile_small, work, chunksize=1)
            return 0
        jobs += [functools.partial(times, each, device, args.repeats, "fa3" in parts, args.vary) for each in chosen]
    bad = 0
    for job in jobs:
        try:
            record = job()
        except Exception as error:
            record = {"part": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        bad += record["part"] == "failed" or bool(record.get("wrong"))
        print(json.dumps(record), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**record, **run.about(device, args.commit)}) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
