"""Copying whole blocks on GPUs: inside caches, between caches, and between a device and the host.

A block of a cache consists of *runs*: ranges of bytes that are contiguous in the source and in the target. A dense
block is one run. A table on the device lists the runs of all caches, so one launch copies any number of layers of any
shapes, strides and dtypes. Letters: P pairs of blocks, R runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import checks, fake
from paged_ops.checks import expect
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.target import capturing, on_device, target_of


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.copy_blocks(kv_caches, block_mapping)
    caches = [cache for cache in kv_caches if cache.numel()]
    if not caches or not block_mapping.shape[0]:
        return
    target = target_of(caches[0].device)
    in_capture = capturing(target.device)
    if block_mapping.device.type == "cpu" or (checks.debug_checks() and not in_capture):
        for num_blocks in {len(cache) for cache in caches}:
            checks.block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)
    with on_device(target.device):
        table = _table(caches, caches, target.device, in_capture)
        mapping = _upload(block_mapping, target.device, in_capture)
        _launch(table, mapping, target.numbers["copy_blocks"])


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies to or from the host take one of three routes, depending on the number of contiguous bytes
    (``swap_blocks`` in configs):

    * direct: one memcpy per span of blocks that are adjacent in source and target, if these spans are long;
    * staged: a kernel gathers blocks into a buffer on the device, or scatters them from it, and one memcpy moves each
      span of adjacent host blocks, if these spans are long;
    * mapped: a kernel reads or writes pinned host memory itself.

    A host cache that is not pinned takes synchronous pageable copies. Between two GPUs, a kernel on the source writes
    to the target's memory, which torch must have allocated. If the source has no peer access, blocks are gathered,
    copied and scattered. The caller keeps a pinned cache alive until its swaps are done.
    """
    fake.swap_blocks(src_caches, dst_caches, block_mapping)
    pairs = [(src, dst) for src, dst in zip(src_caches, dst_caches, strict=True) if src.numel() and dst.numel()]
    if not pairs or not block_mapping.shape[0]:
        return
    for num_src, num_dst, same in {(len(src), len(dst), src.data_ptr() == dst.data_ptr()) for src, dst in pairs}:
        checks.block_mapping(block_mapping, num_src, num_dst, same_cache=same)
    sources, targets = [src for src, _ in pairs], [dst for _, dst in pairs]
    source, target = sources[0].device, targets[0].device
    device = source if source.type != "cpu" else target
    uncaptured = "a call outside of a CUDA graph, whose replay would not read it"
    expect(not (capturing(source) or capturing(target)), "block_mapping", uncaptured, block_mapping)
    with on_device(device):
        if precompile.notes() is not None:
            _note_launches(sources, targets, block_mapping, device)
        elif source == target:
            numbers = target_of(device).numbers["copy_blocks"]
            _launch(_table(sources, targets, device), _upload(block_mapping, device), numbers)
        elif source.type == target.type:
            (_swap_peers if _reaches(source, target) else _swap_devices)(sources, targets, block_mapping)
        elif not all(cache.is_pinned() for cache in (targets if target.type == "cpu" else sources)):
            _swap_pageable(sources, targets, block_mapping)
        else:
            _swap_pinned(sources, targets, block_mapping, device)


def _note_launches(sources: list[Tensor], targets: list[Tensor], mapping: Tensor, device: torch.device) -> None:
    """The kernels of every route, for :mod:`paged_ops.lowerings.gpu.precompile`; nothing is copied."""
    source, target = sources[0].device, targets[0].device
    to_host = target.type == "cpu"
    if source.type != target.type and not all(cache.is_pinned() for cache in (targets if to_host else sources)):
        return
    table, pairs = _table(sources, targets, device), _upload(mapping, device)
    copying, swapping = (target_of(device).numbers[op] for op in ("copy_blocks", "swap_blocks"))
    _launch(table, pairs, swapping if source.type != target.type else copying)
    if source.type != target.type:
        staging = torch.empty(16, dtype=torch.uint8, device=device)
        for first in range(min(len(table.rows), 2)):  # a row has 40 bytes: every second one is aligned
            part = table._replace(runs=table.runs[first : first + 1])
            _launch(part, pairs, copying, staging, gather=to_host, scatter=not to_host)


# Runs and tables -----------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The runs of a list of pairs of caches."""

    runs: Tensor  # int64 [R, 5] on the device: addresses of block 0, bytes from block to block (source, target), bytes
    rows: list[tuple[int, ...]]  # the same on the host, for the pairs of caches in order
    owners: list[int]  # the pair of caches of each run
    length: int  # bytes of the longest run
    word: int  # a power of two up to 16 that divides all addresses, strides and lengths
    ready: torch.cuda.Event | None  # after it the table is on the device
    stream: int  # that made it


# The key determines the table, so a reused address cannot make it wrong. The latest tables are kept. Tables that a
# captured graph reads are kept for ever, as the life of the graph is not known.
_tables: dict[tuple[object, ...], Table] = {}
_captured: set[tuple[object, ...]] = set()  # their keys
MOST_TABLES = 1024


def _table(
    sources: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device, in_capture: bool = False
) -> Table:
    key = (device, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*sources, *targets)))
    table = _tables.get(key)
    if table is None:
        expect(not in_capture, "kv_caches", "a call before the capture of a CUDA graph", "caches that are new to it")
        if len(_tables) - len(_captured) >= MOST_TABLES:
            oldest = next(each for each in list(_tables) if each not in _captured)
            _tables.pop(oldest, None)
        table = _tables[key] = _new_table(sources, targets, device)
    elif in_capture:  # a graph begins after all earlier work, and cannot wait for an event outside of it
        _captured.add(key)
    elif table.ready is not None:
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream != table.stream:
            table.ready.wait(stream)
            table.runs.record_stream(stream)  # the stream may still read them when the table is dropped
    return table


def _new_table(sources: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device) -> Table:
    rows: list[tuple[int, ...]] = []
    owners = []
    for owner, (src, dst) in enumerate(zip(sources, targets, strict=True)):
        size = src.element_size()
        length, starts = block_runs(tuple(src.shape[1:]), src.stride()[1:], dst.stride()[1:])
        for src_start, dst_start in starts:
            addresses = src.data_ptr() + src_start * size, dst.data_ptr() + dst_start * size
            # The stride between blocks has no meaning in a cache of one block.
            distances = (src.stride(0) * size if len(src) > 1 else 0, dst.stride(0) * size if len(dst) > 1 else 0)
            rows.append((*addresses, *distances, length * size))
            owners.append(owner)
    runs = torch.tensor(rows, dtype=torch.int64, device="cpu")
    ready, handle = None, 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        runs = runs.pin_memory().to(device, non_blocking=True)
        ready, handle = torch.cuda.Event(), stream.cuda_stream
        ready.record(stream)
    word = math.gcd(16, *(number for row in rows for number in row))
    return Table(runs, rows, owners, max(row[4] for row in rows), word, ready, handle)


def block_runs(
    shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]]:
    """The runs of a block with this shape and these strides: their length, and their starts in the source and in the
    target, in elements."""
    dims = sorted((s, t, n) for s, t, n in zip(source, target, shape, strict=True) if n > 1)
    length = 1
    while dims and dims[0][:2] == (length, length):
        length *= dims.pop(0)[2]
    starts = [(0, 0)]
    for s, t, n in dims:
        starts = [(a + i * s, b + i * t) for i in range(n) for a, b in starts]
    return length, starts


def _upload(block_mapping: Tensor, device: torch.device, in_capture: bool = False) -> Tensor:
    """The mapping on the device, without a sync."""
    if block_mapping.device == device:
        return block_mapping.contiguous()
    expect(not in_capture, "block_mapping", f"a tensor on {device}, as a replayed graph reads no other", block_mapping)
    return block_mapping.contiguous().pin_memory().to(device, non_blocking=True)


# Routes between a device and another memory --------------------------------------------------------------------------


def _swap_pinned(sources: list[Tensor], targets: list[Tensor], mapping: Tensor, device: torch.device) -> None:
    table, numbers = _table(sources, targets, device), target_of(device).numbers["swap_blocks"]
    to_host = targets[0].device.type == "cpu"
    host = int(to_host)
    mapping = mapping.index_select(0, mapping[:, host].argsort())  # host blocks in order
    adjacent = mapping.diff(dim=0) == 1  # [P - 1, 2]
    dense = {_is_dense(row, (0, 1)) for row in table.rows}, {_is_dense(row, (host,)) for row in table.rows}
    payload = len(mapping) * table.length
    host_runs = len(mapping) - int(adjacent[:, host].sum()) if dense[1] == {True} else len(mapping)
    both_adjacent = adjacent.all(1)
    direct_runs = len(mapping) - int(both_adjacent.sum()) if dense[0] == {True} else len(mapping)
    if payload >= numbers["direct_bytes"] * direct_runs:
        _swap_direct(table, sources, targets, mapping, both_adjacent)
    elif payload >= numbers["staged_bytes"] * host_runs:
        _swap_staged(table, sources, targets, mapping, adjacent[:, host], to_host, device)
    else:
        _launch(table, _upload(mapping, device), numbers)


def _swap_direct(table: Table, sources: list[Tensor], targets: list[Tensor], mapping: Tensor, adjacent: Tensor) -> None:
    for row, owner in zip(table.rows, table.owners, strict=True):
        src, dst = _bytes(sources[owner]), _bytes(targets[owner])
        for first, count in _spans(adjacent, _is_dense(row, (0, 1))):
            src_block, dst_block = mapping[first].tolist()
            src_start = row[0] - sources[owner].data_ptr() + src_block * row[2]
            dst_start = row[1] - targets[owner].data_ptr() + dst_block * row[3]
            size = count * row[4]
            dst[dst_start : dst_start + size].copy_(src[src_start : src_start + size], non_blocking=True)


def _swap_staged(
    table: Table,
    sources: list[Tensor],
    targets: list[Tensor],
    mapping: Tensor,
    adjacent: Tensor,
    to_host: bool,
    device: torch.device,
) -> None:
    """Through two buffers on the device, one per lane. Each holds a part of the pairs and runs at a time: while one
    part crosses PCIe, the other is gathered or scattered."""
    swapping, copying = (target_of(device).numbers[op] for op in ("swap_blocks", "copy_blocks"))
    on_device_mapping = _upload(mapping, device)
    host, hosts = int(to_host), targets if to_host else sources
    host_blocks = mapping[:, host].tolist()
    payload = len(mapping) * len(table.rows) * table.length
    # Enough parts to keep both lanes busy, each long enough for fast copies.
    capacity = min(swapping["staging_bytes"] // 2, max(payload // 4, swapping["staged_bytes"]))
    parts = list(_parts(len(mapping), table, capacity))
    largest = max(count * num_runs for _, count, _, num_runs in parts) * table.length
    staging = torch.empty((2, largest), dtype=torch.uint8, device=device)
    with _lanes(device) as lanes:
        turns = itertools.cycle(zip(lanes, staging, strict=True))
        for first, count, first_run, num_runs in parts:
            part = table._replace(runs=table.runs[first_run : first_run + num_runs])
            pairs, (lane, buffer) = on_device_mapping[first : first + count], next(turns)
            with lane:
                if to_host:
                    _launch(part, pairs, copying, buffer, gather=True)
                for run in range(num_runs):
                    row, owner = table.rows[first_run + run], table.owners[first_run + run]
                    there = _bytes(hosts[owner])
                    start = row[host] - hosts[owner].data_ptr()
                    here = run * count * table.length
                    for pair, together in _spans(adjacent[first : first + count - 1], _is_dense(row, (host,))):
                        at, size = start + host_blocks[first + pair] * row[2 + host], together * row[4]
                        ends = there[at : at + size], buffer[here + pair * row[4] : here + pair * row[4] + size]
                        ends[1 - host].copy_(ends[host], non_blocking=True)
                if not to_host:
                    _launch(part, pairs, copying, buffer, scatter=True)


@contextlib.contextmanager
def _lanes(device: torch.device) -> Iterator[list[contextlib.AbstractContextManager[Any]]]:
    """Two streams that run after the earlier and before the later work of the current stream. Their memory is
    allocated and freed on the current stream."""
    if device.type != "cuda":
        yield [contextlib.nullcontext(), contextlib.nullcontext()]
        return
    current, streams = torch.cuda.current_stream(device), _streams(device)
    for stream in streams:
        stream.wait_stream(current)
    try:
        yield [torch.cuda.stream(stream) for stream in streams]
    finally:
        for stream in streams:
            current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(2)]


def _swap_peers(sources: list[Tensor], targets: list[Tensor], mapping: Tensor) -> None:
    """Between two GPUs with peer access: a kernel on the source writes the blocks of all layers, ordered on both
    current streams."""
    source, target = sources[0].device, targets[0].device
    here, there = torch.cuda.current_stream(source), torch.cuda.current_stream(target)
    table, pairs = _table(sources, targets, source), _upload(mapping, source)
    here.wait_stream(there)
    _launch(table, pairs, target_of(source).numbers["copy_blocks"])
    there.wait_stream(here)


@functools.cache
def _reaches(source: torch.device, target: torch.device) -> bool:
    """Whether a kernel on the source can write the target's memory. torch maps that memory at the first copy."""
    if torch.version.hip is not None or not torch.cuda.can_device_access_peer(source, target):
        return False
    torch.empty(1, dtype=torch.uint8, device=source).to(target)
    return True


def _swap_devices(sources: list[Tensor], targets: list[Tensor], mapping: Tensor) -> None:
    """Between GPUs without peer access: gathered on the source, copied by torch (which orders the streams), scattered
    on the target."""
    source, target = sources[0].device, targets[0].device
    gathering, scattering = (target_of(each).numbers["copy_blocks"] for each in (source, target))
    most = target_of(source).numbers["swap_blocks"]["staging_bytes"]
    near, near_mapping = _table(sources, targets, source), _upload(mapping, source)
    with torch.cuda.device(target):
        far, far_mapping = _table(sources, targets, target), _upload(mapping, target)
    for first, count, first_run, num_runs in _parts(len(mapping), near, most):
        span = slice(first_run, first_run + num_runs)
        gathered = torch.empty((num_runs, count * near.length), dtype=torch.uint8, device=source)
        pairs = near_mapping[first : first + count]
        _launch(near._replace(runs=near.runs[span]), pairs, gathering, gathered, gather=True)
        with torch.cuda.device(target):
            arrived = gathered.to(target, non_blocking=True)
            pairs = far_mapping[first : first + count]
            _launch(far._replace(runs=far.runs[span]), pairs, scattering, arrived, scatter=True)


def _swap_pageable(sources: list[Tensor], targets: list[Tensor], mapping: Tensor) -> None:
    """Synchronously, by torch's indexing, a part of the pairs at a time."""
    device = sources[0].device if sources[0].device.type != "cpu" else targets[0].device
    most = target_of(device).numbers["swap_blocks"]["staging_bytes"]
    for src, dst in zip(sources, targets, strict=True):
        src, dst = _bits(src), _bits(dst)
        at_once = max(1, most // (src[0].numel() * src.element_size()))
        for part in mapping.split(at_once):
            from_blocks, to_blocks = part.to(src.device).unbind(1)[0], part.to(dst.device).unbind(1)[1]
            dst[to_blocks] = src[from_blocks].to(dst.device)


def _parts(num_pairs: int, table: Table, capacity: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of the work that fit ``capacity`` bytes: first pair, number of pairs, first run, number of runs."""
    pairs = max(1, min(num_pairs, capacity // table.length))
    runs = max(1, capacity // (pairs * table.length))
    for first in range(0, num_pairs, pairs):
        for first_run in range(0, len(table.rows), runs):
            yield first, min(pairs, num_pairs - first), first_run, min(runs, len(table.rows) - first_run)


def _spans(adjacent: Tensor, dense: bool) -> list[tuple[int, int]]:
    """The first pair and the length of each span of adjacent pairs; all lengths are 1 if blocks are not dense."""
    num_pairs = len(adjacent) + 1
    if not dense:
        return [(pair, 1) for pair in range(num_pairs)]
    starts = [0, *((~adjacent).nonzero().squeeze(1) + 1).tolist(), num_pairs]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


def _is_dense(row: tuple[int, ...], ends: tuple[int, ...]) -> bool:
    """Whether blocks follow one another without a gap, at these ends (0: source, 1: target)."""
    return all(row[2 + end] == row[4] for end in ends)


def _bytes(cache: Tensor) -> Tensor:
    """The memory from the cache's first element on, as uint8 ``[bytes]``."""
    storage = cache.untyped_storage()
    start = cache.storage_offset() * cache.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return flat.set_(storage, start, (storage.nbytes() - start,), (1,))


def _bits(cache: Tensor) -> Tensor:
    """The cache as integers: torch cannot index every float8 dtype."""
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])


# The kernel ----------------------------------------------------------------------------------------------------------


def _launch(
    table: Table,
    mapping: Tensor,
    numbers: dict[str, int],
    staging: Tensor | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> None:
    """Copy the runs of all pairs. ``staging`` is a buffer of R * P * longest run bytes, to copy into (gather) or from
    (scatter)."""
    chunk_bytes = min(numbers["chunk_bytes"], triton.next_power_of_2(max(table.length, 16)))
    chunks = -(-table.length // chunk_bytes)
    shape = gather, scatter, table.word, chunk_bytes // table.word
    launcher = _launcher(*shape, numbers["num_warps"], mapping.device)
    grid = len(table.runs) * len(mapping) * chunks, 1, 1
    launcher(grid, (table.runs, mapping, staging), (len(mapping), chunks, table.length))


@functools.cache
def _launcher(gather: bool, scatter: bool, word: int, chunk: int, num_warps: int, device: torch.device) -> Launcher:
    constants = {"GATHER": gather, "SCATTER": scatter, "WORD": word, "CHUNK": chunk, "num_warps": num_warps}
    return Launcher(copy_kernel, {**constants, **target_of(device).overlap()}, device, can_wait=True)


@triton.jit(do_not_specialize=["P", "chunks", "length"])
def copy_kernel(
    tensors,  # runs [R, 5], mapping [P, 2], staging
    P,
    chunks,  # of a run
    length,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    WORD: tl.constexpr,  # bytes per load
    CHUNK: tl.constexpr,  # words per program
    PDL: tl.constexpr,
):
    runs, mapping, staging = tensors
    if PDL:
        gdc_wait()
    # Neighbouring programs copy neighbouring chunks of a block, so that memory accesses are sequential.
    program = tl.program_id(0)
    chunk = program % chunks
    pair = program // chunks % P
    index = program // chunks // P
    run = runs + index * 5
    size = tl.load(run + 4)
    staged = (index * P.to(tl.int64)) * length + pair * size
    if SCATTER:
        source = staging.to(tl.int64) + staged
    else:
        source = tl.load(run) + tl.load(mapping + pair * 2) * tl.load(run + 2)
    if GATHER:
        target = staging.to(tl.int64) + staged
    else:
        target = tl.load(run + 1) + tl.load(mapping + pair * 2 + 1) * tl.load(run + 3)
    # Words of 16 and 8 bytes are vectors of 4 and 2 elements.
    UNIT: tl.constexpr = tl.int32 if WORD >= 4 else tl.int16 if WORD == 2 else tl.int8
    U: tl.constexpr = WORD // 4 if WORD > 4 else 1
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    offset = word[:, None] * U + tl.arange(0, U)[None, :]
    mask = (word < size // WORD)[:, None]
    source = tl.multiple_of(source.to(tl.pointer_type(UNIT)), WORD)
    target = tl.multiple_of(target.to(tl.pointer_type(UNIT)), WORD)
    tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)
    if PDL:
        gdc_launch_dependents()  # last: the next kernel may overwrite what was read here, without waiting
