"""Sends blocks of a cache to another process, for example from prefill to decode workers (disaggregated prefill).

    send_blocks(kv_cache, block_ids, dst)  # on rank src
    recv_blocks(kv_cache, block_ids, src)  # on rank dst: into blocks of its own, in the same order

Both ranks first exchange the format of their blocks. If the formats differ, or an argument is wrong on one rank, both
raise and nothing is written. Then ``torch.distributed`` sends the bytes: from device to device with NCCL, through host
memory with gloo. The idea of separate prefill and decode processes is from DistServe (Zhong et al. 2024,
arXiv:2401.09670) and Splitwise (Patel et al. 2023, arXiv:2311.18677).

``memory_regions`` gives the addresses of the blocks, for an engine that moves memory between hosts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import get_backend_config

from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import expect

STAGING = 64 << 20  # most bytes in flight on a rank, unless one block of all layers is larger


class MemoryRegion(NamedTuple):
    """The memory of the blocks of one tensor: block ``i`` is ``nbytes`` bytes at ``address + i * stride``.

    A layer has one region, or two where keys and values are allocated separately (X_PACKED: keys first). Within
    a block the cache's layout decides the order, so both ends need the same layout, block size and heads.
    """

    layer: int
    address: int
    num_blocks: int
    stride: int  # bytes
    nbytes: int
    bytes_of_blocks: Tensor  # uint8 [num_blocks, nbytes]: a view of this memory; keep it while the address is in use


def memory_regions(kv_cache: KVCache) -> list[MemoryRegion]:
    """The memory of a cache for transfer engines: base addresses, strides and tensors of each layer.

    The memory does not move or change size while the cache lives. Work that writes it is queued on the current stream
    of its device: synchronise before another engine reads.

    Args:
        kv_cache: a cache, or a pool of a :class:`paged_ops.HybridCache`.

    Raises:
        ValueError: it is neither.
    """
    expect(isinstance(kv_cache, KVCache), "kv_cache", "a KVCache (of a HybridCache: one of its pools)", kv_cache)
    return [
        region
        for index, layer in enumerate(kv_cache.layers)
        for region in (_region(index, part) for part in kv_cache.by_block([layer]))
    ]


def send_blocks(
    kv_cache: KVCache, block_ids: Sequence[int], dst: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Send blocks, in all layers, to a rank that calls :func:`recv_blocks` for the same number of blocks.

    Returns when the blocks may be changed again. With NCCL this holds for later work on the current stream of the
    cache's device, which waits for the messages.

    Args:
        kv_cache: the cache; its queued copies are done first.
        block_ids: the blocks, from :meth:`paged_ops.KVCache.block_ids`. A block may be named twice.
        dst: the other rank, its global rank.
        group: a process group with both ranks; the default group when None.

    Raises:
        ValueError: on both ranks if ``kv_cache`` or ``block_ids`` is wrong on one of them, or the caches differ in
            layers, layout, block size, heads or dtype. On this rank, before anything is sent, if ``dst`` or ``group``
            is wrong.
    """
    regions, peer = _agree("send", kv_cache, block_ids, dst, group)
    kv_cache.flush_copies()
    ids = torch.tensor(list(block_ids), dtype=torch.int64, device=kv_cache.device)
    sent: list[Any] = [None, None]
    messages = [_Messages(regions, kv_cache.device, peer.device) for _ in sent]
    for turn, part in zip(itertools.cycle((0, 1)), _parts(ids, regions), strict=False):
        if sent[turn] is not None:
            sent[turn].wait()
        sent[turn] = dist.isend(messages[turn].packed(part), dst, group)
    for work in sent:
        if work is not None:
            work.wait()


def recv_blocks(
    kv_cache: KVCache, block_ids: Sequence[int], src: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Receive blocks, in all layers, that a rank sends with :func:`send_blocks`.

    They are written for later work on the current stream of the cache's device. To keep them, commit the sequence that
    reserved them::

        kv_cache.admit(seq_id, tokens)                        # 0 cached: all blocks are new
        recv_blocks(kv_cache, kv_cache.block_ids(seq_id), src)
        kv_cache.commit(seq_id, len(tokens))                  # from now on others share them

    Args:
        kv_cache: the cache; its queued copies are done first.
        block_ids: the blocks, each named once, in the order of the other rank's ids.
        src: the other rank, its global rank.
        group: a process group with both ranks; the default group when None.

    Raises:
        ValueError: as in :func:`send_blocks`.
    """
    regions, peer = _agree("recv", kv_cache, block_ids, src, group)
    kv_cache.flush_copies()
    ids = torch.tensor(list(block_ids), dtype=torch.int64, device=kv_cache.device)
    messages = [_Messages(regions, kv_cache.device, peer.device) for _ in range(2)]
    expected: tuple[Any, Tensor, _Messages] | None = None
    for turn, part in zip(itertools.cycle((0, 1)), _parts(ids, regions), strict=False):
        work = dist.irecv(messages[turn].buffer(len(part)), src, group)
        if expected is not None:  # while the next message is in flight
            expected[0].wait()
            expected[2].unpack(expected[1])
        expected = work, part, messages[turn]
    if expected is not None:
        expected[0].wait()
        expected[2].unpack(expected[1])


def _region(layer: int, tensor: Tensor) -> MemoryRegion:
    size, stride = tensor.element_size(), tensor.stride(0) * tensor.element_size()
    nbytes = tensor.shape[1:].numel() * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    assert (last + 1) * size == nbytes, "a block is contiguous, in some order of its dimensions"
    blocks = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.shape[0], nbytes), (stride, 1)
    )
    return MemoryRegion(layer, tensor.data_ptr(), tensor.shape[0], stride, nbytes, blocks)


def _parts(ids: Tensor, regions: Sequence[MemoryRegion]) -> Iterator[Tensor]:
    """The blocks of each message."""
    at_once = max(1, STAGING // 2 // max(1, sum(region.nbytes for region in regions)))
    return iter(ids.split(at_once)) if len(ids) else iter(())


class _Messages:
    """A buffer for messages of several blocks: region by region, each with all blocks of the message."""

    def __init__(self, regions: Sequence[MemoryRegion], device: torch.device, between: torch.device) -> None:
        self._regions = regions
        self._device, self._between = device, between  # of the cache, and of the messages
        self._room = torch.empty(0, dtype=torch.uint8, device=between)

    def buffer(self, blocks: int) -> Tensor:
        """The buffer for this number of blocks."""
        nbytes = blocks * sum(region.nbytes for region in self._regions)
        if len(self._room) < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self._between)
        return self._room[:nbytes]

    def packed(self, ids: Tensor) -> Tensor:
        """The bytes of these blocks."""
        buffer = self.buffer(len(ids))
        for place, region in self._places(buffer, len(ids)):
            if self._between == self._device:
                torch.index_select(region.bytes_of_blocks, 0, ids, out=place)
            else:
                place.copy_(region.bytes_of_blocks.index_select(0, ids))
        return buffer

    def unpack(self, ids: Tensor) -> None:
        """Write the received bytes to these blocks."""
        for place, region in self._places(self.buffer(len(ids)), len(ids)):
            region.bytes_of_blocks.index_copy_(0, ids, place.to(self._device))

    def _places(self, buffer: Tensor, blocks: int) -> Iterator[tuple[Tensor, MemoryRegion]]:
        sizes = [blocks * region.nbytes for region in self._regions]
        for part, region in zip(buffer.split(sizes), self._regions, strict=True):
            yield part.view(blocks, region.nbytes), region


class _Peer(NamedTuple):
    """The other rank, and the device of messages to it."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    def exchange(self, mine: bytes) -> bytes:
        """Send bytes to the other rank and return its bytes."""
        length = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        expected = int(self._swapped(length, torch.empty_like(length)))
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        theirs = self._swapped(data, torch.empty(expected, dtype=torch.uint8, device=self.device))
        return bytes(theirs.tolist())

    def _swapped(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """The lower rank sends first, so that there is no deadlock."""
        if dist.get_rank() < self.rank:
            dist.send(mine, self.rank, self.group)
            dist.recv(theirs, self.rank, self.group)
        else:
            dist.recv(theirs, self.rank, self.group)
            dist.send(mine, self.rank, self.group)
        return theirs


def _agree(
    does: str, kv_cache: KVCache, block_ids: Sequence[int], rank: int, group: dist.ProcessGroup | None
) -> tuple[list[MemoryRegion], _Peer]:
    """Check the call on both ranks, in one exchange that both make even if they find an error."""
    name = {"send": "dst", "recv": "src"}[does]
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    others = f"another rank of the group {ranks} than {dist.get_rank()}, this one"
    expect(rank in ranks and rank != dist.get_rank(), name, others, rank)
    # Through the host if possible, because a rank called without a cache has no device.
    device = torch.device("cpu") if "cpu" in _backends(group) else getattr(kv_cache, "device", torch.device("cuda"))
    peer = _Peer(rank, device, group)
    try:
        regions, mine = memory_regions(kv_cache), _form(kv_cache)
        between = _between(kv_cache.device, group)
        _check_ids(kv_cache, block_ids, once=does == "recv")
    except Exception as error:
        peer.exchange(json.dumps({"error": str(error)}).encode())  # the other rank waits for it
        raise
    form = {"does": does, "block_ids": len(block_ids), **mine}
    theirs = json.loads(peer.exchange(json.dumps(form).encode()))
    if "error" in theirs:
        raise ValueError(f"on rank {rank}: {theirs['error']}")
    other = {"send": "receives", "recv": "sends"}[does]
    expect(theirs["does"] != does, name, f"a rank that {other} blocks", f"{rank}, which called {does}_blocks too")
    same = theirs["block_ids"] == len(block_ids)
    expect(same, "block_ids", f"{theirs['block_ids']} blocks as on rank {rank}", len(block_ids))
    for what, value in mine.items():
        expect(theirs[what] == value, f"kv_cache.{what}", f"{theirs[what]} as on rank {rank}", value)
    return regions, peer._replace(device=between)


def _check_ids(kv_cache: KVCache, block_ids: Sequence[int], once: bool) -> None:
    """Raise ValueError unless the ids name blocks that a call can use."""
    N = kv_cache.num_blocks
    expect(
        isinstance(block_ids, Sequence), "block_ids", "an ordered sequence of blocks, such as a list", repr(block_ids)
    )
    for block in block_ids:
        expect(type(block) is int and 0 <= block < N, "block_ids", f"blocks from 0 to {N - 1}", repr(block))
    if once and len(set(block_ids)) < len(block_ids):
        twice = next(block for block in block_ids if list(block_ids).count(block) > 1)
        expect(False, "block_ids", "each block to receive once", f"{twice} twice")


def _form(kv_cache: KVCache) -> dict[str, Any]:
    """The properties that must agree between two caches, as JSON returns them."""
    return {
        "layers": len(kv_cache.layers),
        "layout": kv_cache.layout.value,
        "block_size": kv_cache.block_size,
        "shard": list(kv_cache.shard),
        "dtype": str(kv_cache.dtype),
        "kv_cache_dtype": kv_cache.kv_cache_dtype,
        "num_kv_heads": list(kv_cache.num_kv_heads),
        "head_size": list(kv_cache.head_size),
        "value_head_size": list(kv_cache.value_head_size),
    }


def _backends(group: dist.ProcessGroup | None) -> dict[str, dist.Backend]:
    """The group's backend for each type of device."""
    return dist.BackendConfig(dist.Backend(get_backend_config(group))).get_device_backend_map()


def _between(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """The device of messages: the cache's, or the host if gloo is the group's only backend for it."""
    backends = _backends(group)
    backend = backends.get(device.type)
    if backend is None and "cpu" not in backends:
        raise ValueError(f"group: expected one with a backend for {device.type} or cpu, got {backends}")
    return device if backend not in (None, dist.Backend.GLOO) else torch.device("cpu")
