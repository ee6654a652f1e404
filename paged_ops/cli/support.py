"""``paged-ops support``: the devices of each op and feature; the page docs/support.md."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import paged_ops
from paged_ops import features
from paged_ops.checks import expect
from paged_ops.cli.table import table
from paged_ops.layouts import FP8_DS_MLA
from paged_ops.registry import DISPATCH_KEYS, OPS
from paged_ops.support import supports
from paged_ops.testing.cases import FEATURES

Rows = dict[str, dict[str, dict[str, Any]]]  # row -> device -> {"ok": bool, "reasons": [...]}

# The features of paged_attention in the table, one row each.
_FEATURES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    **{
        argument.replace("_", " ") + (" off" if value is False else ""): {argument: value}
        for argument, value in FEATURES.values()
    },
    "fp8 e4m3 cache with scales": {"cache_dtype": torch.float8_e4m3fn, "k_scale": True, "v_scale": True},
    "fp8 e5m2 cache with scales": {"cache_dtype": torch.float8_e5m2, "k_scale": True, "v_scale": True},
    "fp8 in uint8 storage": {"cache_dtype": torch.uint8, "kv_cache_dtype": "fp8"},
    "latent rows with their own scales (fp8_ds_mla)": {"cache_dtype": torch.uint8, "kv_cache_dtype": FP8_DS_MLA},
    "fp8 output": {"output_scale": True},
    "batch invariant": {"batch_invariant": True},
    **{f"cache layout {layout}": {"layout": layout} for layout in paged_ops.Layout},
    "separate key and value caches": {"value_cache": True},
    "values of another head size": {"value_cache": True, "head_size": 192, "value_head_size": 128},
    "head size 80": {"head_size": 80},
    "head size 256": {"head_size": 256},
    "head size 512": {"head_size": 512},
    "block size 1": {"block_size": 1},
    "block size 544": {"block_size": 544},
    "71 query heads, one key/value head": {"num_heads": 71, "num_kv_heads": 1},
}

# Number of kernel variants that tests/aot compiles per AMD architecture; the first list contains the others.
_COMPILED_FOR_AMD = {"gfx942": 51, "gfx90a": 20, "gfx950": 20, "gfx1100": 20}


def support(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/support.md.")] = False,
) -> None:
    """Print the devices of each op and feature, and the reasons why not."""
    expect(not (json and markdown), "--json", "it or --markdown", "both")
    if json:
        print(json_module.dumps(support_of_ops()))
    elif markdown:
        print(support_page(), end="")
    else:
        console = Console()
        for title, rows in (("op", support_of_ops()), ("feature of paged_attention", support_of_features())):
            console.print(_support_table(title, rows))
        for reason, number in _numbered(support_of_ops(), support_of_features()).items():
            console.print(f"{number} {escape(reason)}", highlight=False, soft_wrap=True)


def support_of_ops() -> Rows:
    """Each op on each device."""
    return {op: {device: _answer(op, device) for device in DISPATCH_KEYS} for op in sorted(OPS)}


def support_of_features() -> Rows:
    """Each feature of paged_attention on each device."""
    return {
        name: {device: _answer("paged_attention", device, **asked) for device in DISPATCH_KEYS}
        for name, asked in _FEATURES.items()
    }


def _answer(op: str, device: str, **asked: Any) -> dict[str, Any]:
    reasons = supports(op, device, **asked)
    return {"ok": not reasons, "reasons": reasons}


def support_page() -> str:
    """The page docs/support.md."""
    ops, attention = support_of_ops(), support_of_features()
    numbers = _numbered(ops, attention)

    def markdown(title: str, rows: Rows) -> list[str]:
        lines = [f"| {title} | {' | '.join(DISPATCH_KEYS)} |", "|---" * (1 + len(DISPATCH_KEYS)) + "|"]
        for name, answers in rows.items():
            cells = (_cell(answers[device], numbers, "yes") for device in DISPATCH_KEYS)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return lines

    pairs = [f"- `{a}` with `{b}`" for a, b in features.EXCLUSIVE]
    (most, variants), *others = _COMPILED_FOR_AMD.items()
    fewer = ", ".join(f"{number} for {arch}" for arch, number in others)
    lines = [
        "# What runs where",
        "",
        "ROCm runs the CUDA kernels; xla is a TPU. A number in a table refers to a reason at the end.",
        "`paged_ops.supports(op, device, **features)` answers for any call. `paged-ops support --markdown` writes this",
        "page.",
        "",
        "How far each device was tested:",
        "",
        "- cpu: by the whole suite, in CI.",
        "- cuda: by the whole suite on an H200, at the commit of `benchmarks/data/gpu_proof_nvidia_h200.json`; later",
        "  by the tests in `benchmarks/data/gpu_tests_nvidia_h200.json`. In CI all kernels are compiled for sm_80,",
        "  sm_90 and sm_100, and the Triton kernels run in its interpreter. The Hopper kernels are in Gluon, which",
        "  has none.",
        f"- rocm: never run. In CI {variants} variants of the kernels are compiled for {most}: all ops, in all dtypes;",
        f"  and fewer for other architectures ({fewer}): bfloat16,",
        "  fp8, head sizes 256 and 512, and latents. Some kernels for gfx1100 spill registers.",
        "- xla: by torch_xla on the CPU. The TPU kernels run in interpret mode and are compiled for v4 to v6e; they",
        "  never ran on a TPU.",
        "",
        "## Ops",
        "",
        *markdown("op", {f"`{name}`": answers for name, answers in ops.items()}),
        "",
        "## Features of paged_attention",
        "",
        "Each feature alone. All combinations work, except the pairs below.",
        "",
        *markdown("feature", attention),
        "",
        "## Pairs that no device takes",
        "",
        *pairs,
    ]
    if numbers:
        lines += ["", "## Reasons", "", *(f"{number}. {reason}" for reason, number in numbers.items())]
    return "\n".join(lines) + "\n"


def _numbered(*tables: Rows) -> dict[str, int]:
    """Every reason in the tables, with a number, in the order of appearance."""
    answers = (answer for rows in tables for by_device in rows.values() for answer in by_device.values())
    reasons = (_without_op(reason) for answer in answers for reason in answer["reasons"])
    return {reason: number for number, reason in enumerate(dict.fromkeys(reasons), 1)}


def _cell(answer: dict[str, Any], numbers: dict[str, int], yes: str) -> str:
    return yes if answer["ok"] else ", ".join(str(numbers[_without_op(reason)]) for reason in answer["reasons"])


def _without_op(reason: str) -> str:
    """A reason without the name of its op, so that one footnote serves all ops."""
    return reason.partition(": ")[2] if reason.startswith("paged_ops.") else reason


def _support_table(title: str, rows: Rows) -> Table:
    numbers = _numbered(support_of_ops(), support_of_features())
    made = table(title, *DISPATCH_KEYS)
    for name, answers in rows.items():
        made.add_row(name, *(_cell(answers[device], numbers, "[green]yes[/]") for device in DISPATCH_KEYS))
    return made
