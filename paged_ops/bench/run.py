"""Runs cases × providers, the host costs and the cache ops, and yields records."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.metadata
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import paged_ops
from paged_ops.bench import cache_ops, cases, measure
from paged_ops.bench.cases import Case
from paged_ops.bench.measure import Ceilings
from paged_ops.bench.providers import FlashInfer, Provider

Record = dict[str, Any]


def about(device: torch.device, commit: str | None = None) -> Record:
    """Device, versions, commit and date, for every record."""
    return {
        "device": measure.device_name(device),
        **({"threads": torch.get_num_threads()} if device.type == "cpu" else {}),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return paged_ops.__version__ if distribution == "paged-ops" else None


def provider_version(provider: Provider) -> str | None:
    number = version(provider.distribution)
    return f"in vllm {number}" if provider.distribution == "vllm" else number


def git_commit() -> str | None:
    """The commit of this package's checkout, with a + if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def ceiling_records(ceilings: Ceilings) -> list[Record]:
    return [
        {"group": "ceiling", "case": "read", "gbps": round(ceilings.read / 1e9, 1)},
        {"group": "ceiling", "case": "copy", "gbps": round(ceilings.copy / 1e9, 1)},
        {"group": "ceiling", "case": "matmul", "tflops": round(ceilings.matmul / 1e12, 2)},
    ]


def describe(case: Case) -> Record:
    return {
        "group": case.group,
        "heads": f"{case.num_heads}/{case.num_kv_heads}",
        "case": case.name,
        "head_size": case.head_size,
        "block_size": case.block_size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "cache": str(case.stored).removeprefix("torch."),
        "batch": len(case.seqs),
        "tokens": case.num_tokens,
        "context": max(seq_len for _, seq_len in case.seqs),
        "bytes": case.bytes,
        "flops": case.flops,
    }


def attention_records(
    case: Case, providers: Iterable[Provider], device: torch.device, ceilings: Ceilings, repeats: int
) -> Iterator[Record]:
    """One record per provider that serves the case. The record of a failure has the reason instead of a speed."""
    able = [provider for provider in providers if not provider.reasons_against(case, device)]
    if not able:
        return
    sets = measure.inputs_of(case, device)
    reference_of = functools.cache(lambda n: measure.reference(sets[n]))
    for provider in able:
        record = {**describe(case), "provider": provider.name, "provider_version": provider_version(provider)}
        try:
            yield {**record, **measure.measure(provider.prepare(sets), sets, ceilings, repeats, reference_of)}
        except Exception as error:
            yield {**record, "failed": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_once(case: Case, provider: Provider, device: torch.device) -> None:
    """Two calls to warm up and one in an NVTX range named ``profile``, for a profiler."""
    (call, *_) = provider.prepare(cases.make_inputs(case, device, 0, most=2))
    for _ in range(2):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.nvtx.range("profile"):
            call()
        torch.cuda.synchronize(device)


def host_records(providers: Iterable[Provider], device: torch.device) -> Iterator[Record]:
    """The host's cost of eager calls; ``torch.add(out=)`` shows how fast the machine is."""
    a = torch.randn(256, device=device)
    us = measure.host_us(lambda: torch.add(a, a, out=a), device)
    yield {"group": "host", "case": "torch.add(out=)", "provider": "torch", "us": round(us, 1)}
    case = cases.host_case()
    sets = cases.make_inputs(case, device, 0, most=2)
    for provider in providers:
        if provider.reasons_against(case, device):
            continue
        calls: dict[str, Callable[[], object]] = {case.name: provider.prepare(sets)[0]}
        if isinstance(provider, FlashInfer):
            calls["plan, once a step"] = provider.plan(sets[0])
        for name, call in calls.items():
            us = measure.host_us(call, device)
            yield {"group": "host", "case": name, "provider": provider.name, "us": round(us, 1)}
    yield from _host_write_records(device)


def _host_write_records(device: torch.device) -> Iterator[Record]:
    key = torch.randn(64, 8, 128, dtype=torch.bfloat16, device=device)
    kv_cache = torch.zeros(64, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    slots = torch.arange(64, device=device)
    us = measure.host_us(lambda: paged_ops.reshape_and_cache(key, key, kv_cache, slots), device)
    yield {"group": "host", "case": "reshape_and_cache, 64 tokens", "provider": "paged_ops", "us": round(us, 1)}


def cache_records(ceilings: Ceilings) -> Iterator[Record]:
    """The cache ops on the current GPU; swaps have no floor."""
    for part, rows in cache_ops.PARTS.items():
        for row in rows():
            record: Record = {"group": "cache", "case": f"{row['op']}, {row['case']}", "provider": "paged_ops"}
            if not row["right"]:
                yield {**record, "failed": "WrongResultError: the result differs from the reference"}
                continue
            gbps = row["bytes"] / row["us"] / 1e3
            record |= {"us": round(row["us"], 2), "gbps": round(gbps, 1), "bytes": row["bytes"]}
            if part != "swap":
                floor = row["bytes"] / ceilings.copy * 1e6
                record |= {"floor_us": round(floor, 2), "percent": round(100 * floor / row["us"], 1)}
            yield record
            torch.cuda.empty_cache()
