"""``paged-ops explain``: which kernel serves a call that is described in words."""

from __future__ import annotations

import dataclasses
import inspect
import json as json_module
import re
from typing import Annotated, Any

import torch
import typer

from paged_ops import layouts
from paged_ops.checks import expect
from paged_ops.cli.device import choose_device
from paged_ops.registry import OPS

# GPUs that need not be present: compute capability, multiprocessors, KiB of shared memory per program.
GPUS = {
    "NVIDIA A100-SXM4-80GB": (80, 108, 163),
    "NVIDIA L4": (89, 58, 99),
    "NVIDIA H100 80GB HBM3": (90, 132, 227),
    "NVIDIA H200": (90, 132, 227),
    "NVIDIA B200": (100, 148, 227),
}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def explain(
    device: Annotated[
        str, typer.Option(help="cpu, xla, cuda, cuda:1, or part of the name of a GPU that need not be present: H200.")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the queries: bfloat16, float16 or float32.")] = "bfloat16",
    cache_dtype: Annotated[str, typer.Option(help="By default the queries' dtype; e4m3 and e5m2 are fp8.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads / key/value heads.")] = "32/8",
    head_size: Annotated[int, typer.Option(help="Of keys; in a LATENT cache latent and rotated columns.")] = 128,
    value_head_size: Annotated[
        int | None, typer.Option(help="By default the keys' size; 512 for most LATENT caches.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    layout: Annotated[str, typer.Option(help=f"Of the cache: {', '.join(layouts.Layout)}.")] = "NHD",
    query_lens: Annotated[str, typer.Option(help="Tokens per sequence: 63x1,512 is 63 decodes and a prompt.")] = "64x1",
    seq_len: Annotated[int, typer.Option(help="Keys of the longest sequence.")] = 4096,
    feature: Annotated[
        list[str] | None, typer.Option(help="An argument of the op: sliding_window=128, causal=false, sinks, k_scale.")
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Explain paged_attention_with_lse.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print which attention kernel serves a call, with which tiles, and why not the others. Nothing is computed."""
    op = "paged_attention_with_lse" if lse else "paged_attention"
    queries = _lengths(query_lens)
    H, K = _numbers("--heads", heads, "/")
    value_head_size = head_size if value_head_size is None else value_head_size
    for option, number in (
        ("--head-size", head_size),
        ("--value-head-size", value_head_size),
        ("--block-size", block_size),
    ):
        expect(number > 0, option, "a number above 0", number)
    expect(seq_len >= max(queries), "--seq-len", f"at least the {max(queries)} of --query-lens", seq_len)
    queried = _dtype("--dtype", dtype)
    stored = _dtype("--cache-dtype", cache_dtype) if cache_dtype else queried
    shape = {"T": sum(queries), "S": len(queries), "H": H, "K": K, "D": head_size, "Dv": value_head_size}
    features = _features(op, sum(queries), H, len(queries), feature or [])
    arguments = _call(shape, queried, stored, block_size, layout, seq_len, features)
    answer = _answer(device, op, arguments, features)
    print(json_module.dumps(dataclasses.asdict(answer)) if json else answer)


def _answer(device: str, op: str, arguments: tuple[Any, ...], features: dict[str, Any]) -> Any:
    """On the device if it is present, else for its description: no memory is allocated either way."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        from paged_ops.lowerings import cpu

        return cpu.explain(op, *arguments, **features)
    if kind == "xla":
        from paged_ops.lowerings import tpu

        return tpu.explain(op, *arguments, **features)
    from paged_ops.lowerings import gpu
    from paged_ops.lowerings.gpu.target import Target, target_of

    if kind == "cuda":
        named = f"the name of a GPU that need not be here ({', '.join(GPUS)}), as PyTorch finds none"
        expect(torch.cuda.device_count() > 0, "--device", named, device)
        return gpu.explain(op, *arguments, target=target_of(choose_device(device)), **features)
    name = next((each for each in GPUS if device.lower() in (each.lower(), *re.split("[ -]", each.lower()))), None)
    expect(name is not None, "--device", f"cpu, xla, cuda, cuda:<index> or a name among {', '.join(GPUS)}", device)
    arch, processors, space = GPUS[str(name)]
    described = Target(torch.device("cuda", 0), str(name), "cuda", arch, processors, space << 10)
    return gpu.explain(op, *arguments, target=described, **features)


def _call(
    shape: dict[str, int],
    dtype: torch.dtype,
    stored: torch.dtype,
    B: int,
    layout: str,
    seq_len: int,
    features: dict[str, Any],
) -> tuple[Any, ...]:
    """The positional arguments of a call: tensors without memory. ``features`` gets those that the shapes need."""
    T, S, H, K, D, Dv = shape.values()
    expect(layout in list(layouts.Layout), "--layout", f"one of {', '.join(layouts.Layout)}", layout)
    columns = -(-seq_len // B)
    if layout == layouts.Layout.LATENT:
        expect(K == 1, "--heads", "one key/value head in a LATENT cache, as in 128/1", f"{H}/{K}")
        form = dict(value_head_size=Dv, kv_cache_dtype=features.get("kv_cache_dtype", "auto"))
        kv_cache = _meta(*layouts.kv_cache_shape(layout, S * columns, B, K, D, **form), dtype=stored)
        features["value_head_size"] = Dv
    elif Dv != D:
        kv_cache, features["value_cache"] = (_meta(S * columns, B, K, each, dtype=stored) for each in (D, Dv))
    else:
        kv_cache = layouts.kv_cache_view(
            layout, _meta(*layouts.kv_cache_shape(layout, S * columns, B, K, D), dtype=stored)
        )
        if layout == layouts.Layout.X_PACKED:
            kv_cache, features["value_cache"] = layouts.split_kv_cache(kv_cache, K, D)
    batch = (_meta(*sizes, dtype=torch.int32) for sizes in ((S, columns), (S,), (S + 1,)))
    return _meta(T, H, D, dtype=dtype), kv_cache, *batch, D**-0.5


def _features(op: str, T: int, H: int, S: int, asked: list[str]) -> dict[str, Any]:
    """The arguments that ``--feature`` names."""
    tensors = {
        "alibi_slopes": _meta(H),
        "sinks": _meta(H),
        **{name: _meta(1) for name in ("k_scale", "v_scale", "output_scale")},
        "bidirectional_ranges": _meta(S, 1, 2, dtype=torch.int32),
        "selected_keys": _meta(T, 1, 2048, dtype=torch.int32),
    }
    described = ("value_cache", "value_head_size")  # by other options
    keywords = [each for each in inspect.signature(OPS[op]).parameters.values() if each.kind is each.KEYWORD_ONLY]
    known = {each.name: each.default for each in keywords if each.name not in described}
    features: dict[str, Any] = {}
    for each in asked:
        name, equals, value = each.partition("=")
        expect(name in known, "--feature", f"one of {', '.join(known)}", name)
        if name in tensors:
            expect(not equals, "--feature", f"{name} without a value, as it is a tensor", each)
            features[name] = tensors[name]
        elif isinstance(known[name], str):
            features[name] = value
        else:
            features[name] = _value(each, value if equals or known[name] is not False else "true", known[name])
    return features


def _value(feature: str, text: str, default: Any) -> Any:
    """The value of an option's text, of the type that the argument has."""
    kinds = {bool: "true or false", int: "an integer", float: "a number"}
    try:
        value = json_module.loads(text)
    except json_module.JSONDecodeError:
        value = None
    kind = type(default) if type(default) in kinds else list
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    expect(right, "--feature", f"{feature.partition('=')[0]}= and {kinds.get(kind, 'a list')}", feature)
    return value


def _meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _lengths(text: str) -> list[int]:
    """``63x1,512`` as 63 ones and 512."""
    lengths: list[int] = []
    for part in text.split(","):
        *count, length = _numbers("--query-lens", part, "x")
        lengths += [length] * (count[0] if count else 1)
    return lengths


def _numbers(option: str, text: str, separator: str) -> list[int]:
    numbers = [int(each) for each in text.split(separator) if each.isdecimal()]
    expected = "two numbers" if separator == "/" else "numbers"
    expect(len(numbers) == text.count(separator) + 1 and min(numbers) > 0, option, f"{expected} above 0", text)
    expect(separator != "/" or len(numbers) == 2, option, expected, text)
    return numbers


def _dtype(option: str, name: str) -> torch.dtype:
    dtype = FP8.get(name, getattr(torch, name, None))
    expect(isinstance(dtype, torch.dtype), option, "the name of a dtype", name)
    return dtype  # type: ignore[return-value]
