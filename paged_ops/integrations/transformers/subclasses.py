"""Subclasses of a model's own classes, made when it is wrapped. Their modules can be copied and pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def with_forward(prefix: str, forward: Callable[..., Any], make: Callable[..., type], kind: Any, *args: Any) -> type:
    """The subclass of ``kind`` with another forward, for the cached function ``make(kind, *args)``, which returns it.

    Pickle finds a class by its name, and would not find this one; ``make`` is found.
    """

    def reduce(module: nn.Module) -> tuple[Any, ...]:
        return _uninitialised, (make, kind, *args), module.__getstate__()

    return type(f"{prefix}{kind.__name__}", (kind,), {"forward": forward, "__reduce__": reduce})


def _uninitialised(make: Callable[..., Any], *args: Any) -> nn.Module:
    kind = make(*args)
    module: nn.Module = kind.__new__(kind)
    return module
