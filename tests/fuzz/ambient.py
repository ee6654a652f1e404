"""Campaign: an op's result depends on its arguments alone, whatever the state of the process and the thread.

Each case runs one case of the registry (``paged_ops.testing.CASES``) without any ambient state, and then again under
each of ``STATES``. Results must have the same bits; where a state may change the order of sums or the precision of
products, they must be within the error budget of the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import paged_ops  # noqa: F401 - defines the ops
from paged_ops import registry, testing
from paged_ops.lowerings.cpu import fused

from .runner import Case

State = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _setting(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextlib.contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast for all devices, present or not."""
    with torch.autocast("cpu", dtype, cache_enabled=False), contextlib.ExitStack() as stack:
        for kind in ("cuda", "xla"):
            on, its_dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            stack.callback(torch.set_autocast_enabled, kind, on)
            stack.callback(torch.set_autocast_dtype, kind, its_dtype)
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _InHalf(TorchFunctionMode):
    """Matmuls in bfloat16: a user's mode may change torch's functions so, but not the ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.bmm, torch.matmul, torch.einsum):
            args = [each.bfloat16() if isinstance(each, torch.Tensor) else each for each in args]
        return func(*args, **(kwargs or {}))


def _precision(name: str) -> State:
    return lambda: _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, name)


def _threads(number: int) -> State:
    return lambda: _setting(torch.get_num_threads, torch.set_num_threads, number)


def _default_dtype(dtype: torch.dtype) -> State:
    return lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


STATES: dict[str, State] = {
    "autocast to bfloat16": lambda: _autocast(torch.bfloat16),
    "autocast to float16": lambda: _autocast(torch.float16),
    "default device meta": lambda: torch.device("meta"),
    "default dtype float64": _default_dtype(torch.float64),
    "default dtype bfloat16": _default_dtype(torch.bfloat16),
    "grad mode": torch.enable_grad,
    "no grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": _deterministic,
    "a function mode": _InHalf,
    "matmul precision highest": _precision("highest"),
    "matmul precision high": _precision("high"),
    "matmul precision medium": _precision("medium"),
    "one thread": _threads(1),
    "three threads": _threads(3),
}
# What may round otherwise: products in another precision, or sums in another order.
ROUNDED = {name for name in STATES if "precision" in name or "thread" in name}
PATHS = "fused", "torch"  # of the CPU


def run(case: Case) -> None:
    everything = [(op, each) for op, cases in testing.CASES.items() for each in cases]
    op, chosen = everything[case.number % len(everything)]
    path = PATHS[(case.number // len(everything) + case.random.randrange(2)) % 2]
    for finding in findings(op, chosen, case.device, path):
        case.report(finding)
    case.counts["calls"] += len(STATES) + 1


def findings(op: str, chosen: testing.Case, device: torch.device | str = "cpu", path: str = "fused") -> list[str]:
    """The errors of one case of an op under some state, one line each; ``path`` is the CPU's."""
    found = []
    before = chosen.inputs(device)
    slow = mock.patch.object(fused, "compiled", return_value=None) if path == "torch" else contextlib.nullcontext()
    with slow:
        plain = testing.clone_inputs(before)
        want = _tensors(op, plain, registry.OPS[op](*plain.args, **plain.kwargs))
        for name, state in STATES.items():
            call = testing.clone_inputs(before)
            try:
                with state():
                    results = registry.OPS[op](*call.args, **call.kwargs)
                got = _tensors(op, call, results)
                if name not in ROUNDED:
                    for n, (a, b) in enumerate(zip(got, want, strict=True)):
                        testing.assert_same_bytes(f"tensor {n}", a, b)
                elif not all(torch.equal(a, b) for a, b in zip(map(_bits, got), map(_bits, want), strict=True)):
                    testing.assert_result(op, call, before, results)
            except Exception as error:
                found.append(f"{op} {chosen.name} ({path}) under {name}: {type(error).__name__}: {error}")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _tensors(op: str, call: testing.Inputs, results: Any) -> list[torch.Tensor]:
    """What a call returned, or what it may have written."""
    if testing.mutated_arguments(op):
        results = [*call.args, *call.kwargs.values()]
    elif isinstance(results, torch.Tensor):
        results = [results]
    flat = [each for value in results for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, torch.Tensor)]
