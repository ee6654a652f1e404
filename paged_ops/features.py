"""The optional arguments of attention and of the cache ops as NamedTuples, and the pairs that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import checks, masks
from paged_ops.checks import expect
from paged_ops.layouts import (
    FP8_DS_MLA,
    FP8_DTYPES,
    MODEL_DTYPES,
    ROW_LATENT,
    ROW_ROTATED,
    Layout,
    element_dtype,
    has_row_scales,
    is_latent,
)


class Features(NamedTuple):
    """The keyword arguments of :func:`paged_ops.paged_attention`, for fakes and lowerings: ``Features(**kwargs)``."""

    value_cache: Tensor | None = None
    causal: bool = True
    sliding_window: int = 0
    attention_chunk: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    block_sparse: Sequence[int] | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    output_scale: Tensor | None = None
    kv_cache_dtype: str = "auto"
    bidirectional_ranges: Tensor | None = None
    value_head_size: int | None = None
    num_first_tokens: int = 0
    batch_invariant: bool = False
    selected_keys: Tensor | None = None
    selected_block_size: int = 1
    ranges_in_window: bool = False


SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_features(f: Features, query: Tensor, S: int, K: int, block_size: int, scale: float) -> None:
    """Static checks of the features of a call with queries ``[T, H, D]`` of S sequences. Raises ValueError."""
    T, H, _ = query.shape
    if type(scale) is float:
        expect(-LARGEST <= scale <= LARGEST, "scale", "a finite float32", scale)
    for name in masks.NUMBERS:
        expect(getattr(f, name) >= 0, name, "0 (off) or a number of tokens", getattr(f, name))
    check_soft_cap(f.soft_cap)
    for name, per_head in (("alibi_slopes", f.alibi_slopes), ("sinks", f.sinks)):
        if per_head is not None:
            checks.tensor(name, per_head, (H,), torch.float32, query.device, "[H]")
    if f.output_scale is not None:
        checks.tensor("output_scale", f.output_scale, (1,), torch.float32, query.device, "[1]")
    if f.block_sparse is not None:
        masks.check_block_sparse(f.block_sparse, block_size)
    for reason in conflicts(f._asdict()):
        raise ValueError(reason)
    if f.bidirectional_ranges is not None:
        ranges, device = f.bidirectional_ranges, query.device
        checks.tensor("bidirectional_ranges", ranges, (S, None, 2), torch.int32, device, "[S, R, 2]")
    expect(f.selected_block_size >= 1, "selected_block_size", "a number of keys, at least 1", f.selected_block_size)
    if f.selected_keys is not None:
        checks.tensor("selected_keys", f.selected_keys, (T, None, None), torch.int32, query.device, "[T, G, k]")
        G = f.selected_keys.shape[1]
        expect(G == 1 or G == K, "selected_keys", f"1 or the cache's {K} key/value heads as G in [T, G, k]", G)


def check_soft_cap(soft_cap: float) -> None:
    expect(soft_cap >= 0, "soft_cap", "0 (off) or a positive bound", soft_cap)
    if type(soft_cap) is float and soft_cap != 0:  # kernels hold it as float32
        expect(SMALLEST <= soft_cap <= LARGEST, "soft_cap", "0 (off) or a bound in the range of float32", soft_cap)


def with_value_scale(f: Features, kv_cache: Tensor) -> Features:
    """The features with v_scale set for a latent cache, whose values have the scale of the keys."""
    return f._replace(v_scale=f.k_scale) if is_latent(kv_cache) else f


class CacheOptions(NamedTuple):
    """The keyword arguments that the cache ops share, for their lowerings: ``CacheOptions(**kwargs)``."""

    value_cache: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    kv_cache_dtype: str = "auto"


class IndexOptions(NamedTuple):
    """The keyword arguments of :func:`paged_ops.select_keys`, for fakes and lowerings: ``IndexOptions(**kwargs)``."""

    weights: Tensor | None = None
    scale: float = 1.0
    relu: bool = False
    per_head: bool = False
    pool: str = "none"
    block_size: int = 1
    local_blocks: int = 0
    causal: bool = True
    k_scale: Tensor | None = None
    kv_cache_dtype: str = "auto"


POOLS = ("none", "max", "mean")


# Arguments of attention that do not change which keys are visible. All others, including future ones, count as masks.
NO_MASKS = frozenset(
    {
        "value_cache",
        "soft_cap",
        "alibi_slopes",
        "sinks",
        "k_scale",
        "v_scale",
        "output_scale",
        "kv_cache_dtype",
        "value_head_size",
        "batch_invariant",
    }
)


def in_use(options: Any) -> frozenset[str]:
    """Names of the fields of a NamedTuple that differ from their neutral defaults. Fields without one come first."""
    neutrals = options._field_defaults
    fields = zip(neutrals.items(), options[len(options) - len(neutrals) :], strict=True)
    # A list, and identity first: calls on the CPU ask this several times.
    return frozenset(
        [name for (name, neutral), value in fields if value is not neutral and (neutral is None or value != neutral)]
    )


def masks_in_use(f: Features) -> frozenset[str]:
    """The arguments of a call that change which keys are visible."""
    return in_use(f) - NO_MASKS


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_others(
    options: Features | CacheOptions | IndexOptions, kv_cache: Tensor, applied: frozenset[str], where: str
) -> None:
    """Raise ValueError if a call uses an argument or cache format that a lowering does not support.

    Args:
        options: the call's keyword arguments.
        applied: the supported arguments, and formats of the cache: values of ``kv_cache_dtype``, and dtypes of
            elements.
        where: the lowering, for the message.
    """
    stored = options.kv_cache_dtype, dtype_name(element_dtype(kv_cache, options.kv_cache_dtype))
    others = sorted({*in_use(options), *stored} - {"kv_cache_dtype"} - applied)
    if others:
        raise ValueError(f"{', '.join(others)}: not supported by {where}, which supports {sorted(applied)}")


# Pairs without a meaning: block-sparse kernels skip keys by the pattern alone; window, chunk and first tokens are
# defined for causal attention; without causality a range changes nothing; and a range or a pattern, like selected keys,
# says by itself which keys are read.
EXCLUSIVE = (
    ("block_sparse", "alibi_slopes"),
    ("block_sparse", "sliding_window"),
    ("block_sparse", "attention_chunk"),
    ("block_sparse", "soft_cap"),
    ("block_sparse", "causal=False"),
    ("causal=False", "sliding_window"),
    ("causal=False", "attention_chunk"),
    ("bidirectional_ranges", "block_sparse"),
    ("bidirectional_ranges", "causal=False"),
    ("num_first_tokens", "block_sparse"),
    ("num_first_tokens", "causal=False"),
    ("selected_keys", "block_sparse"),
    ("selected_keys", "bidirectional_ranges"),
    ("selected_keys", "causal=False"),
)


def conflicts(features: Mapping[str, Any]) -> list[str]:
    """Why these arguments and properties cannot be combined on any device, one sentence per reason."""
    reasons = [f"{a} cannot be combined with {b}" for a, b in EXCLUSIVE if _on(features, a) and _on(features, b)]
    if not _on(features, "selected_keys") and features.get("selected_block_size", 1) > 1:
        reasons.append(f"selected_block_size: expected 1 without selected_keys, got {features['selected_block_size']}")
    dtype, cache_dtype = features.get("dtype"), features.get("cache_dtype")
    if dtype is not None and dtype not in MODEL_DTYPES:
        reasons.append(f"dtype: expected float32, float16 or bfloat16, got {checks.describe_setting(dtype)}")
    if cache_dtype in MODEL_DTYPES and dtype is not None and cache_dtype != dtype:
        reasons.append(f"cache_dtype: expected the model's {dtype} or fp8, got {cache_dtype}")
    fp8 = cache_dtype in FP8_DTYPES or features.get("kv_cache_dtype", "auto") != "auto"
    if not fp8 and (cache_dtype is not None or dtype is not None):
        reasons += [f"{name} needs an fp8 cache" for name in ("k_scale", "v_scale") if _on(features, name)]
    H, K = features.get("num_heads"), features.get("num_kv_heads")
    if H and K and H % K:
        reasons.append(f"num_heads: expected a multiple of num_kv_heads {K}, got {H}")
    D, Dv = features.get("head_size"), features.get("value_head_size")
    layout = features.get("layout")
    if has_row_scales(features.get("kv_cache_dtype", "auto")):
        needs = {
            "layout": (layout, (None, Layout.LATENT)),
            "cache_dtype": (cache_dtype, (None, torch.uint8)),
            "head_size": (D, (None, ROW_LATENT + ROW_ROTATED)),
            "value_head_size": (Dv, (None, ROW_LATENT)),
        }
        for name, (got, allowed) in needs.items():
            if got not in allowed:
                reasons.append(f"{name}: expected {allowed[1]} with kv_cache_dtype={FP8_DS_MLA!r}, got {got}")
        if _on(features, "k_scale"):
            reasons.append(f"k_scale: expected None, as rows of {FP8_DS_MLA} hold their scales")
    if layout == Layout.LATENT:
        if D and Dv and Dv > D:
            reasons.append(f"value_head_size: expected at most head_size = R + P = {D} in the LATENT layout, got {Dv}")
        if (K or 1) != 1:
            reasons.append(f"num_kv_heads: expected 1 in the LATENT layout, got {K}")
        for name, why in (("value_cache", "has no other"), ("v_scale", "has one scale, k_scale")):
            if _on(features, name):
                reasons.append(f"{name}: expected None, as the cache of the LATENT layout {why}")
    elif D and Dv and D != Dv and layout is not None:
        reasons.append(
            "value_head_size: other than head_size only in the separate form (key and value cache, no layout) and in"
            " the LATENT layout"
        )
    return reasons


def _on(features: Mapping[str, Any], feature: str) -> bool:
    if feature == "causal=False":
        return not features.get("causal", True)
    value = features.get(feature)
    return value is not None and (hasattr(value, "__len__") or value != 0)


def kept_keys(
    f: Features, s: int | Tensor, i: Tensor, j: Tensor, num_heads: int, num_kv_heads: int, block_size: int
) -> Tensor:
    """:func:`paged_ops.masks.keep` with all masks of a call: bool ``[H or 1, q, k]``.

    Args:
        f: the call's keyword arguments.
        s: the sequence of the queries, or the sequence of each query ``[q]``.
        i, j: positions ``[q]`` of queries and ``[k]`` of keys.
        num_heads, num_kv_heads, block_size: H, K and the block size of the cache.

    ``f.selected_keys``, if given, has the rows of these queries: ``[q, G, k]``.
    """
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, block_size)
    ranges: Sequence[Sequence[Any]] = ()
    if f.bidirectional_ranges is not None:
        of_rows = f.bidirectional_ranges[s]  # [R, 2], or [q, R, 2]
        ranges = [pair[:, None].unbind(2) for pair in of_rows.unbind(1)] if of_rows.dim() == 3 else of_rows.tolist()
    kept = masks.keep(
        i,
        j,
        num_heads,
        num_kv_heads,
        is_causal=f.causal,
        sparse=sparse,
        ranges=ranges,
        later_only=f.ranges_in_window,
        **{name: getattr(f, name) for name in masks.NUMBERS},
    )
    if f.selected_keys is None:
        return kept
    chosen = masks.selected(j, f.selected_keys, f.selected_block_size)  # [G, q, k]
    return kept & chosen.repeat_interleave(num_heads // chosen.shape[0], 0)


def key_parts(f: Features, n: int) -> list[tuple[int, int, Features]]:
    """The n keys of a sequence in parts ``(start, end, features)``. With these features, each row sees one interval of
    the part's keys."""
    others = f._replace(num_first_tokens=0)
    first = min(f.num_first_tokens, n) if f.sliding_window else 0
    if not first:
        return [(0, n, others)]
    return [(0, first, others._replace(sliding_window=0)), (first, n, others)]
