"""What the ranks of a group have prepared together, by the names that ops take: a schema has no process group."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from paged_ops.checks import expect

if TYPE_CHECKING:
    from paged_ops.parallel.all_reduce import AllReduce
    from paged_ops.parallel.exchange import Exchange

REDUCERS: dict[str, AllReduce] = {}
EXCHANGES: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()


class NormOptions(NamedTuple):
    """The last arguments of :func:`paged_ops.ops.all_reduce_add_norm`."""

    weight_offset: float = 0.0
    rounds_first: bool = False
    inner_weight: Tensor | None = None
    inner_eps: float = 0.0


def reducer_of(x: Tensor, name: str) -> AllReduce:
    """The reducer of this name, if it takes ``x``.

    Raises:
        ValueError: there is none, or x has another dtype or device.
    """
    found = REDUCERS.get(name)
    if found is None:
        raise ValueError(f"reducer: expected the name of an AllReduce that is not closed, got {name}")
    expect(x.dim() >= 1, "x", "rows [..., C]", x)
    expect(x.dtype == found.dtype, "x", f"a tensor of {found.dtype}, as its reducer", x)
    expect(x.device == found.device, "x", f"a tensor on {found.device}, as its reducer", x)
    return found
