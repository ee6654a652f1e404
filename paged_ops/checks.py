"""Checks: how an error reads, which values the host can check, and the debug switch for the rest."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

_debug = False


def set_debug_checks(enabled: bool) -> None:
    """Check block ids, slots, lengths and block mappings that live on a device too, at the cost of a sync per call.

    Off by default: such values are checked on the host, once per step, where the metadata is built. On the CPU, where
    reading a value costs no sync, they are always checked.
    """
    global _debug
    _debug = flag("enabled", enabled)


def debug_checks() -> bool:
    """Whether :func:`set_debug_checks` is on."""
    return _debug


class NotCopied:
    """The base of an object whose copy, or unpickled twin, would share buffers or requests with it."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name}: cannot be copied or pickled; make another one, in the process that uses it")


def expect(condition: Any, argument: str, expected: str, got: Any) -> None:
    """Raise a ValueError that says what ``argument`` should be and what came, unless ``condition`` holds.

    ``condition`` may be symbolic: then it becomes a guard or a runtime assertion, and specialises nothing.
    """
    if condition is True:
        return
    if condition is False:
        raise ValueError(_message(argument, expected, got))
    if type(condition).__module__ == "numpy":  # a comparison of numpy's numbers
        return expect(bool(condition), argument, expected, got)
    torch._check_value(condition, lambda: _message(argument, expected, got))


def _message(argument: str, expected: str, got: Any) -> str:
    return f"{argument}: expected {expected}, got {describe(got)}"


def describe(value: Any) -> str:
    """A tensor as its dtype, shape and device; anything else as it prints."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return f"{len(value)} tensors, the first {describe(value[0])}"
    return str(value)


def describe_setting(value: Any) -> str:
    """A value that a user set: a string in quotes, which "3" needs where 3 is expected."""
    return repr(value) if isinstance(value, str) else describe(value)


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
    """Check that integers, given by their names, are ``least`` or more."""
    for name, value in arguments.items():
        if type(value) is bool or not hasattr(type(value), "__index__"):
            expect(False, name, f"an integer of at least {least}", describe_setting(value))
        if value < least:
            expect(False, name, f"at least {least}", value)


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether a value is one integer, of Python, numpy or a tensor, and ``least`` or more; True and False are not."""
    if isinstance(value, bool):
        return False
    try:
        number = operator.index(value)
    except (TypeError, ValueError):  # a tensor of several elements raises ValueError
        return False
    return least is None or number >= least


def integers(least: int, **arguments: Any) -> list[int]:
    """The values as Python's integers, which must be ``least`` or more."""
    at_least(least, **arguments)
    return list(map(operator.index, arguments.values()))


def optional_function(argument: str, value: Any) -> None:
    """Check that a value is a function, or None."""
    expect(value is None or callable(value), argument, "a function, or None", describe_setting(value))


def flag(argument: str, value: bool) -> bool:
    """The value, which must be True or False."""
    expect(isinstance(value, bool), argument, "True or False", describe_setting(value))
    return value


def distinct_entries(selected_keys: Tensor) -> None:
    """Check that no row of ``selected_keys [T, G, k]`` has an entry twice; negative ones are padding."""
    entries = selected_keys.sort(-1).values
    twice = (entries[..., 1:] == entries[..., :-1]) & (entries[..., 1:] >= 0)
    if twice.any():
        t, g, n = twice.nonzero()[0].tolist()
        got = f"entry {int(entries[t, g, n])} twice in row {t}"
        expect(False, "selected_keys", "distinct entries, or negative ones, in each row", got)


def as_token_ids(given: Iterable[Any]) -> list[int]:
    """Token ids as Python's integers."""
    try:
        if isinstance(given, (bytes, set, frozenset)):  # not token ids, or in no order
            raise TypeError
        return list(map(operator.index, given))
    except TypeError:
        got = describe(given) if isinstance(given, Tensor) else repr(given)[:80]
        raise ValueError(f"token_ids: expected integers, a list or a tensor [n], got {got}") from None


def present(argument: str, value: Any) -> None:
    """Check that a tensor was given: torch lets None pass where a schema has a tensor."""
    expect(isinstance(value, Tensor), argument, "a tensor", value)


def written(argument: str, value: Tensor) -> None:
    """Check that an op may write to a tensor: its elements do not overlap, and a compiler knows its storage offset.

    Inductor treats a storage offset that is computed from symbolic sizes as 0, so a write to ``arena[i]`` would go to
    the start of ``arena`` (pytorch#198068, torch 2.11 to 2.13 at least). The offset of a graph's input is a symbol of
    its own, and is treated correctly.
    """
    shape, strides = value.shape, value.stride()
    try:
        overlaps = _overlaps_itself(shape, strides)
    except TypeError:  # symbolic sizes, which have no hash
        known = [(n, s) for n, s in zip(shape, strides, strict=True) if type(s) is int]
        overlaps = any(s == 0 and not (type(n) is int and n <= 1) for n, s in known)
    if overlaps:
        got = f"strides {strides} of sizes {list(shape)}"
        expect(False, argument, "a tensor whose elements do not overlap (clone() it)", got)
    offset = value.storage_offset()
    if isinstance(offset, torch.SymInt):
        expression = offset.node.expr
        expect(
            bool(expression.is_number or expression.is_symbol),
            argument,
            "a whole tensor, or a view with a known storage offset: torch would write this slice to the start of its"
            " base; compile with fixed sizes (dynamic=False, mark_static), or pass one tensor per layer",
            f"a slice at element {expression}",
        )


def disjoint(
    arguments: Iterable[tuple[str, Any]], written: Collection[str], *, in_place: bool = False, traced: bool = False
) -> None:
    """Check that the tensors an op writes share no memory with each other or with the tensors it reads.

    Tensors of one storage may be interleaved if they share no byte, such as keys and values in the rows of one tensor.
    Storages are compared by their addresses. If they overlap, all elements are compared, and the answer is cached by
    addresses, sizes and strides.

    Args:
        arguments: names and values of a call's arguments: tensors, lists of tensors, and others, which are ignored.
        written: the names of the arguments that the op writes.
        in_place: an argument that is read may be the written tensor itself; in two lists, at the same index.
        traced: the tensors are fake and have no addresses. Tensors of one storage object are compared if their sizes
            are known.
    """
    spans: list[_Span] = []
    for name, value in arguments:
        if isinstance(value, Tensor):
            spans.append(_storage_span(value, name in written, name, None, traced))
        elif isinstance(value, (list, tuple)):
            tensors = ((n, each) for n, each in enumerate(value) if isinstance(each, Tensor))
            spans += [_storage_span(each, name in written, name, n, traced) for n, each in tensors]
    spans.sort(key=_start)
    end = end_written = 0
    for start, stop, writes, *_ in spans:
        if start < (end if writes else end_written):
            return _check_storages(spans, in_place, traced)
        end = max(end, stop)
        if writes:
            end_written = max(end_written, stop)


# The start and end address of a storage; of a tensor in it, whether the op writes it, its argument's name, its index in
# a list; the tensor.
_Span = tuple[int, int, bool, str, int | None, Tensor]
_start = operator.itemgetter(0)


def _storage_span(value: Tensor, writes: bool, name: str, index: int | None, traced: bool) -> _Span:
    storage = value.untyped_storage()
    if traced:  # the object is the memory
        return storage._cdata, storage._cdata + 1, writes, name, index, value
    start = storage.data_ptr()
    return start, start + storage.nbytes() if start else 0, writes, name, index, value


def _check_storages(spans: Sequence[_Span], in_place: bool, traced: bool) -> None:
    """:func:`disjoint` where some of the storages, sorted by their addresses, share memory."""
    groups: list[list[_Span]] = []
    end = 0
    for span in spans:
        if span[0] >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span[1])
    for group in groups:
        if len(group) > 1 and any(span[2] for span in group):
            _check_group(group, in_place, traced)


def _check_group(group: Sequence[_Span], in_place: bool, traced: bool) -> None:
    """:func:`disjoint` for tensors whose storages share memory."""
    places: list[tuple[Any, ...]] = []
    for n, (_, _, writes, _, index, each) in enumerate(group):
        size = each.element_size()
        address = each.storage_offset() * size if traced else each.data_ptr()
        places.append((address, each.shape, each.stride(), size, writes, index if in_place else n))
    try:
        found = _overlapping(tuple(places))
    except TypeError:  # symbolic sizes, which have no hash: still, a tensor that is passed twice shares its memory
        twice = [(i, j) for i, j in itertools.combinations(range(len(group)), 2) if group[i][5] is group[j][5]]
        found = next((pair for pair in twice if _clash(*(_Place(*places[n]) for n in pair))), None)
    if found is not None:
        one, other = sorted((group[n] for n in found), key=lambda span: span[2], reverse=True)
        if one[2] and other[2]:
            one, other = other, one
        names = [name if index is None else f"{name}[{index}]" for _, _, _, name, index, _ in (one, other)]
        expect(False, names[0], "memory of its own", f"memory that {names[1]} shares")


class _Place(NamedTuple):
    """The memory of a tensor's elements, and whether the op writes them. Of tensors with the same ``number``, one may
    be written over the other."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    writes: bool
    number: int | None


def _clash(a: _Place, b: _Place) -> bool:
    """Whether shared memory of two tensors is an error: one is written, and not element by element over the other."""
    in_place = a.number == b.number and a.writes != b.writes and a[:4] == b[:4]
    return (a.writes or b.writes) and not in_place


@functools.lru_cache(maxsize=1024)
def _overlapping(places: tuple[tuple[Any, ...], ...]) -> tuple[int, int] | None:
    """The indices of two places that share a byte and must not."""
    for (i, a), (j, b) in itertools.combinations(enumerate(itertools.starmap(_Place, places)), 2):
        if _clash(a, b) and _share(a, b):
            return i, j
    return None


def _share(a: _Place, b: _Place) -> bool:
    """Whether an element of one has a byte of an element of the other."""
    if 0 in a.shape or 0 in b.shape:
        return False
    reach = {1: [1 - b.itemsize, a.itemsize - 1]}  # per stride: the least and largest index in a minus index in b
    for place, end in ((a, 1), (b, 0)):
        for size, stride in zip(place.shape, place.strides, strict=True):
            bounds = reach.setdefault(stride * place.itemsize, [0, 0])
            bounds[end] += (size - 1) if end else (1 - size)
    terms = [(stride, low, high) for stride, (low, high) in sorted(reach.items(), reverse=True) if stride]
    return _is_sum(b.address - a.address, terms)


@functools.lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor have the same address."""
    dims = sorted(((stride, size - 1) for size, stride in zip(shape, strides, strict=True) if size > 1), reverse=True)
    if 0 in shape or not dims:
        return False
    if len({stride for stride, _ in dims}) < len(dims) or dims[-1][0] == 0:
        return True
    terms = [(stride, -most, most) for stride, most in dims]
    # Two different elements: `n` is the first dimension where their indices differ, without loss of generality upwards.
    return any(_is_sum(0, [(stride, 1, most), *terms[n + 1 :]]) for n, (stride, most) in enumerate(dims))


def _is_sum(total: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    """Whether ``total`` is a sum of multiples of strides; terms are (stride, least multiple, largest), strides fall."""
    if not terms:
        return total == 0
    (stride, low, high), *rest = terms
    least, most = (sum(each[0] * each[n] for each in rest) for n in (1, 2))
    first, last = max(low, -((most - total) // stride)), min(high, (total - least) // stride)
    return any(_is_sum(total - n * stride, rest) for n in range(first, last + 1))


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
        "non-decreasing offsets",
        query_start_loc.tolist(),
    )
    expect(int(query_start_loc[0]) == 0, "query_start_loc", "the first entry to be 0", int(query_start_loc[0]))


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
