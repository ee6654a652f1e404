"""Checks: how an error reads, which values the host can check, and the debug switch for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_debug = False


def set_debug_checks(enabled: bool) -> None:
    """Check block ids, slots, lengths and block mappings that live on a device too, at the cost of a sync per call.

    Off by default: such values are checked on the host, once per step, where the metadata is built. On the CPU, where
    reading a value costs no sync, they are always checked.
    """
    global _debug
    _debug = bool(enabled)


def debug_checks() -> bool:
    """Whether :func:`set_debug_checks` is on."""
    return _debug


def expect(condition: Any, argument: str, expected: str, got: Any) -> None:
    """Raise a ValueError that says what ``argument`` should be and what came, unless ``condition`` holds.

    ``condition`` may be symbolic: then it becomes a guard or a runtime assertion, and specialises nothing.
    """
    if condition is True:
        return
    if condition is False:
        raise ValueError(_message(argument, expected, got))
    torch._check_value(condition, lambda: _message(argument, expected, got))


def _message(argument: str, expected: str, got: Any) -> str:
    return f"{argument}: expected {expected}, got {describe(got)}"


def describe(value: Any) -> str:
    """A tensor as its dtype, shape and device; anything else as it prints."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    return str(value)


def tensor(
    argument: str,
    value: Tensor,
    shape: Sequence[Any],
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    names: str = "",
) -> None:
    """Check rank, sizes (None: any), dtype and device of one tensor; ``names`` is its shape in letters."""
    # A message is only made for an error: these checks run at each call of an op.
    present(argument, value)
    if value.dim() != len(shape):
        expect(False, argument, f"{len(shape)} dimensions {names}".rstrip(), value)
    for dim, size in enumerate(shape):
        if size is not None and (same := value.shape[dim] == size) is not True:
            expect(same, argument, f"{size} in dimension {dim} of {names}", value)
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if allowed is not None and value.dtype not in allowed:
        expect(False, argument, " or ".join(str(d).removeprefix("torch.") for d in allowed), value)
    if device is not None and value.device != device:
        expect(False, argument, f"a tensor on {device}", value)


def at_least(least: int, **arguments: int) -> None:
    """Check that numbers, given by their names, are ``least`` or more."""
    for name, value in arguments.items():
        if value < least:
            expect(False, name, f"at least {least}", value)


def present(argument: str, value: Any) -> None:
    """Check that a tensor was given: torch lets None pass where a schema has a tensor."""
    expect(isinstance(value, Tensor), argument, "a tensor", value)


def written(argument: str, value: Tensor) -> None:
    """Check that an op may write to a tensor: its elements lie apart, and a compiler knows where it begins.

    Inductor treats a storage offset that is computed from symbolic sizes as 0, so a write to ``arena[i]`` would go to
    the start of ``arena`` (pytorch#198068, torch 2.11 to 2.13 at least). The offset of a graph's input is a symbol of
    its own, and is treated correctly.
    """
    for size, stride in zip(value.shape, value.stride(), strict=True):
        expanded = type(stride) is int and stride == 0 and not (type(size) is int and size <= 1)
        expect(not expanded, argument, "a tensor whose elements lie apart (clone() it)", f"strides {value.stride()}")
    offset = value.storage_offset()
    if isinstance(offset, torch.SymInt):
        expression = offset.node.expr
        expect(
            bool(expression.is_number or expression.is_symbol),
            argument,
            "a tensor of its own, or a view at a known place of one: torch would write this slice to the start of what"
            " it is cut from; compile with its sizes fixed (dynamic=False, mark_static), or give a tensor per layer",
            f"a slice at element {expression}",
        )


def in_range(argument: str, values: Tensor, low: int, high: int, unit: str) -> None:
    """Check that every value lies in ``[low, high)``. Reads values: for the host or the debug switch."""
    if not values.numel():
        return
    smallest, largest = (int(each) for each in values.aminmax())  # as Python's int: a bound may be too large for int32
    if smallest < low or largest >= high:
        wide = values.long()
        where = ((wide < low) | (wide >= high)).nonzero()[0].tolist()
        raise ValueError(f"{argument}: expected {unit} in [{low}, {high}), got {int(values[tuple(where)])} at {where}")


def slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check ``slot_mapping`` against the cache's size; negative slots are padding. Reads values."""
    in_range("slot_mapping", slot_mapping.clamp(min=-1), -1, num_slots, "slots (negative ones are skipped)")


def batch(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    T: int,
    N: int,
    B: int,
    tables: str = "block_tables",
    lens: str = "seq_lens",
) -> None:
    """Check the values of a batch: lengths, query ranges and the block ids that the lengths need. Reads values."""
    lengths(lens, seq_lens, block_tables.shape[1], B)
    query_ranges(query_start_loc, T)
    needed_blocks(block_tables, seq_lens, N, B, tables)


def lengths(argument: str, seq_lens: Tensor, M: int, B: int) -> None:
    """Check that M blocks can hold each sequence. Reads values."""
    in_range(argument, seq_lens, 0, M * B + 1, f"lengths that {M} blocks of {B} tokens can hold,")


def query_ranges(query_start_loc: Tensor, T: int) -> None:
    """Check that the query ranges divide the rows of query in order. Reads values."""
    in_range("query_start_loc", query_start_loc, 0, T + 1, "rows of query")
    expect(
        bool((query_start_loc.diff() >= 0).all()),
        "query_start_loc",
        "values that do not fall",
        query_start_loc.tolist(),
    )
    expect(int(query_start_loc[0]) == 0, "query_start_loc", "0 first", int(query_start_loc[0]))


def needed_blocks(block_tables: Tensor, seq_lens: Tensor, N: int, B: int, argument: str = "block_tables") -> None:
    """Check the block ids that the lengths need; other entries may hold anything. Reads values."""
    need = torch.arange(block_tables.shape[1], device=block_tables.device) * B < seq_lens[:, None]
    in_range(argument, block_tables.where(need, 0), 0, max(N, 1), f"ids of the {N} blocks of the cache")


def block_mapping(mapping: Tensor, num_src: int, num_dst: int, *, same_cache: bool) -> None:
    """Check pairs (source, destination): ids in range, no destination twice, and within one cache no block in both
    roles, so that the order of the copies cannot matter. Reads values."""
    src, dst = mapping.unbind(1)
    in_range("block_mapping[:, 0]", src, 0, num_src, "source blocks")
    in_range("block_mapping[:, 1]", dst, 0, num_dst, "destination blocks")
    written = dst.new_zeros(num_dst, dtype=torch.bool).index_fill_(0, dst, True)
    if int(written.sum()) != dst.numel():
        ids, counts = dst.unique(return_counts=True)
        expect(False, "block_mapping", "each destination once", f"{ids[counts > 1][:4].tolist()} twice")
    if same_cache and bool(written[src].any()):
        both = src[written[src]].unique()
        roles = f"{both[:4].tolist()} in both roles"
        expect(False, "block_mapping", "no block as both source and destination", roles)
