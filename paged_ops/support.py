"""Queries about support: does an op run on a device with some features, if not why, and which kernel runs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from paged_ops import masks
from paged_ops.checks import at_least, describe_setting, expect
from paged_ops.features import POOLS, check_soft_cap, conflicts
from paged_ops.layouts import FP8_DS_INDEX, Layout, dtype_of_elements, has_index_scales, has_row_scales
from paged_ops.registry import DISPATCH_KEYS, OPS, lowering, module_of

# Properties of tensors: features of supports() in addition to the op's arguments.
PROPERTIES = (
    "dtype",
    "cache_dtype",
    "head_size",
    "value_head_size",
    "block_size",
    "num_heads",
    "num_kv_heads",
    "layout",
)


_SIZES = "head_size", "block_size", "num_heads", "num_kv_heads", "selected_block_size", "k"


def supports(op: str, device: str, **features: Any) -> list[str]:
    """Why ``op`` would not run on ``device`` with ``features``: an empty list is yes.

    ``device`` is ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"xla"``. ``features`` are arguments of the op by their names
    with the values that the call would have, where True means a tensor (``sinks=True``, ``sliding_window=128``,
    ``causal=False``), and the properties of its tensors: ``dtype`` (of the model), ``cache_dtype``, ``head_size``,
    ``value_head_size``, ``block_size``, ``num_heads``, ``num_kv_heads``, ``layout``.

    Raises ValueError for an op, a device or a feature that does not exist.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {sorted(OPS)}, got {op!r}")
    if device not in DISPATCH_KEYS:
        raise ValueError(f"device: expected one of {sorted(DISPATCH_KEYS)}, got {device!r}")
    _check_names(op, features)
    for least, names in ((1, _SIZES), (0, ("value_head_size", "local_blocks", *masks.NUMBERS))):
        at_least(least, **{name: features[name] for name in names if features.get(name) is not None})
    layout = features.get("layout")
    if layout is not None and layout not in list(Layout):
        raise ValueError(f"layout: expected one of {', '.join(Layout)}, got {layout!r}")
    if has_row_scales(features.get("kv_cache_dtype", "auto")):
        features.setdefault("layout", Layout.LATENT)
    key = DISPATCH_KEYS[device]
    try:
        lowering(op, key)
    except NotImplementedError as error:
        return [str(error)]
    reasons = conflicts(features) + _refusals(op, features)
    if has_index_scales(features.get("kv_cache_dtype", "auto")) and op not in ("latent_cache_write", "select_keys"):
        reasons.append(f"kv_cache_dtype: latent_cache_write and select_keys alone take {FP8_DS_INDEX!r}")
    latent = features.get("layout") == Layout.LATENT
    if latent and op == "reshape_and_cache":
        reasons.append("layout: a cache of the LATENT layout is written by latent_cache_write")
    if op == "latent_cache_write" and not latent and features.get("layout") is not None:
        reasons.append(
            "layout: latent_cache_write writes the LATENT layout, the others are written by reshape_and_cache"
        )
    unsupported = getattr(module_of(key), "unsupported", None)
    if unsupported is not None:
        reasons += unsupported(op, device, features)
    return reasons


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; ``str`` formats it over several lines.

    Attributes:
        op, device: of the call.
        kernel: the kernel that serves the call.
        launches: its kernel launches in order, each with its grid and tile; none outside of GPUs.
        others: the other kernels in order of preference, each with the reasons why it does not serve the call.
    """

    op: str
    device: str
    kernel: str
    launches: tuple[str, ...] = ()
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        launches = [f"  {launch}" for launch in self.launches]
        others = [f"not {kernel}: {'; '.join(reasons)}" for kernel, reasons in self.others]
        return "\n".join([f"{self.op} on {self.device}: {self.kernel}", *launches, *others])


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel serves a call of ``op``, with which tiles, and why not the others.

    ::

        batch = block_tables, seq_lens, query_start_loc
        print(paged_ops.explain(paged_ops.paged_attention, query, kv_cache, *batch, scale))

    ``op`` is an op or its name, the other arguments are the call's. Nothing is computed or launched. No values
    of tensors are read, only dtypes, shapes, strides and devices. On the CPU the C++ function is compiled, as at the
    first call.

    Raises as the call would, except for values of tensors; ValueError for an op that does not exist;
    NotImplementedError if the op has no lowering for the device.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS:
        raise ValueError(f"op: expected one of {sorted(OPS)}, got {name!r}")
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if not tensors:
        raise ValueError(f"args: expected the arguments of a call of {name}, got no tensor")
    device = tensors[0].device
    if device.type not in DISPATCH_KEYS:
        raise ValueError(f"device: expected one of {sorted(DISPATCH_KEYS)}, got {device.type!r}")
    key = DISPATCH_KEYS[device.type]
    lowering(name, key)
    call = inspect.signature(OPS[name]).bind(*args, **kwargs)
    # The checks of a call, except those of values. Torch takes a tensor without dimensions for a number.
    given = pytree.tree_map_only(Tensor, lambda each: each if each.dim() else each.item(), (args, kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True):
        OPS[name](*given[0], **given[1])
    choice = getattr(module_of(key), "explain", None)
    if choice is not None and name in ("paged_attention", "paged_attention_with_lse"):
        return choice(name, *call.args, **call.kwargs)
    return Explanation(name, str(device), "one implementation, which serves all calls")


def _check_names(op: str, features: Mapping[str, Any]) -> None:
    """Raise ValueError for a feature that is neither an argument of the op nor a property of its tensors."""
    known = {*inspect.signature(OPS[op]).parameters, *PROPERTIES}
    for name in features:
        if name not in known:
            raise ValueError(f"features: expected arguments of {op} or {PROPERTIES}, got {name!r}")


def _refusals(op: str, features: Mapping[str, Any]) -> list[str]:
    """What a call would say about single values, one reason per value."""
    reasons = []

    def check(function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except ValueError as error:
            reasons.append(str(error))

    for name, argument in inspect.signature(OPS[op]).parameters.items():
        if name in features and argument.annotation is bool:
            check(expect, features[name] in (True, False), name, "True or False", describe_setting(features[name]))
    named, stored = features.get("kv_cache_dtype", "auto"), features.get("cache_dtype")
    if not has_row_scales(named) and (stored is not None or named != "auto"):  # of rows with scales conflicts() says it
        check(dtype_of_elements, stored or torch.uint8, named, "cache_dtype", describe_setting(stored))
    soft_cap = features.get("soft_cap", 0.0)
    if isinstance(soft_cap, Real):
        check(check_soft_cap, float(soft_cap))
    else:
        check(expect, False, "soft_cap", "a number", repr(soft_cap))
    if hasattr(pattern := features.get("block_sparse"), "__len__"):
        check(masks.check_block_sparse, pattern, features.get("block_size", 1))
    pool = features.get("pool", "none")
    check(expect, pool in POOLS, "pool", f"one of {POOLS}", repr(pool))
    return reasons
