"""Launches of the Hopper kernels: tensor descriptors for TMA next to pointers and numbers, and aligned query rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_ops.lowerings.gpu.launch import Grid, Launch, Launcher
from paged_ops.lowerings.gpu.spec import Numbers, Pointers

# A pointer, by its name, and the function that describes its tensor; None for a parameter that stays None.
Described = tuple[str, Callable[[Tensor], TensorDescriptor]] | None

PLACES = {name: n for n, name in enumerate(Pointers._fields)}
QUERY = PLACES["query"]
# The pointers that every kernel gets. TMA reads keys and values, by their descriptors.
TAKEN = {"out", "lse", "query", "block_tables", "seq_lens", "query_start_loc", "sinks", "bidirectional_ranges"}

PARTS = "parts", "part_lse"  # also those whose programs leave parts of units

# The reason of plan() where has_form() says no.
NOT_TMA = "scale, block_tables or kv_cache: expected a positive scale, block ids, and caches that TMA can address"


def aligned_rows(query: Tensor) -> Tensor:
    """The query at a multiple of 16 bytes, with the same strides; a copy if necessary."""
    if query.data_ptr() % 16 == 0:
        return query
    return query.new_empty_strided(query.shape, query.stride()).copy_(query)


def contiguous_rows(query: Tensor) -> Tensor:
    """The query at a multiple of 16 bytes, contiguous; a copy if necessary."""
    if query.is_contiguous() and query.data_ptr() % 16 == 0:
        return query
    return query.clone(memory_format=torch.contiguous_format)


class HopperLaunch(Launch):
    """Adds tensor descriptors to :class:`Launch`, and loads of query rows by 16 bytes. The first call creates the
    descriptors; later ones only replace their addresses.

    Args:
        launcher, grid: as in :class:`Launch`.
        takes: the pointers that the kernel gets in addition to ``TAKEN``.
        described: the descriptors in the order of the kernel's parameters, which follow the numbers and ``more``.
        rows: the query as the kernel reads it: :func:`aligned_rows` or :func:`contiguous_rows`.
        more: further numbers.
    """

    __slots__ = ("_described", "_known", "_more", "_rows")

    def __init__(
        self,
        launcher: Launcher,
        grid: Grid | Callable[[Any], Grid],
        takes: Sequence[str],
        described: Sequence[Described],
        rows: Callable[[Tensor], Tensor] = contiguous_rows,
        more: tuple[int, ...] = (),
    ) -> None:
        super().__init__(launcher, grid, PLACES.keys() - TAKEN - {*takes})
        self._described, self._rows, self._more = described, rows, more
        self._known: list[tuple[int, dict[str, Any]] | None] = []  # place of the address, and the rest

    def more(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        if not self._known or addresses[QUERY] & 15:
            return None
        return *self._more, *[each and moved(each[1], addresses[each[0]]) for each in self._known]

    def __call__(self, tensors: Pointers, numbers: Numbers, addresses: tuple[int, ...]) -> None:
        query = self._rows(tensors.query)
        given = tensors._replace(query=query)
        descriptors = [each and each[1](getattr(given, each[0])) for each in self._described]
        if query is tensors.query:  # a base would keep the cache alive
            self._known = [
                each and made and (PLACES[each[0]], {**vars(made), "base": None})
                for each, made in zip(self._described, descriptors, strict=True)
            ]
        addresses = (*addresses[:QUERY], query.data_ptr(), *addresses[QUERY + 1 :])
        taken = self._taken(given)
        self._launcher(self.grid(numbers), taken, numbers, *self._more, *descriptors, addresses=addresses)


class _Address:
    """A base of a tensor descriptor that only has an address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def moved(described: dict[str, Any], address: int) -> TensorDescriptor:
    """The same descriptor at another address, without Triton's checks of new descriptors."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(described, base=_Address(address))
    return descriptor
