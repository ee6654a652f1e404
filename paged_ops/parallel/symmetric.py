"""Memory that all ranks of a group address: PyTorch's symmetric memory, or the reason why there is none.

Each rank allocates the same number of bytes on its GPU and maps the memory of the others. Kernels then write to another
rank's memory and poll their own (``paged_ops/lowerings/gpu/mailboxes.py``). NVLink multicast is not used.
"""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops.checks import expect

_MOST_RANKS = 8
_REASONS = (
    "",
    "its device is not an NVIDIA GPU",
    "its GPU cannot address another rank's",
    "PyTorch could not map the memory of the other ranks",
)


class Workspace:
    """Bytes on this rank's GPU that the other ranks of a group write, and the other ranks' bytes.

    All bytes are 0xff at first, which the kernels read as "no data has arrived".
    Kernels that use one workspace run one after the other: on one stream, or on streams that wait for each other.

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks.
        device: device of this rank's bytes.
        by_rank: the bytes of each rank, uint8 ``[num_bytes]``, addressed from here.
        aborted: int32 ``[1]`` on the device; not 0 after :meth:`abort`, when kernels no longer wait for other ranks.
    """

    def __init__(self, rank: int, by_rank: tuple[Tensor, ...]) -> None:
        self.rank, self.size, self.by_rank = rank, len(by_rank), by_rank
        self.device = by_rank[rank].device
        self.aborted = torch.zeros(1, dtype=torch.int32, device=self.device)
        # made now: the device may be stuck when abort needs them
        self._one = torch.ones(1, dtype=torch.int32, device="cpu")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is not None:
            self._one = self._one.pin_memory()

    @property
    def own(self) -> Tensor:
        return self.by_rank[self.rank]

    def views(self, dtype: torch.dtype, *shape: int, offset: int = 0) -> tuple[Tensor, ...]:
        """The same range of each rank's bytes, from byte ``offset`` on, as one tensor per rank."""
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        expect(end <= len(self.own), "shape", f"at most the workspace's {len(self.own)} bytes", f"{end} bytes")
        return tuple(each[offset:end].view(dtype).view(shape) for each in self.by_rank)

    def abort(self) -> None:
        """End kernels that wait for other ranks, from any thread.

        Their results are garbage, and the workspace cannot be used any more.
        """
        if self._stream is None:
            self.aborted.copy_(self._one)
            return
        # A copy needs no multiprocessor: waiting kernels may occupy all of them.
        with torch.cuda.stream(self._stream):
            self.aborted.copy_(self._one, non_blocking=True)


def abort(group: dist.ProcessGroup) -> None:
    """Aborts all workspaces of a group, from any thread: see :meth:`Workspace.abort`."""
    for workspace in list(_workspaces.get(group.group_name, ())):
        workspace.abort()


_workspaces: dict[str, weakref.WeakSet[Workspace]] = {}


def allocate(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Workspace | str:
    """A workspace; or, the same on all ranks, the reason why some rank cannot have one.

    All ranks call it together, with the same number of bytes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    expect(rank >= 0, "group", "a process group with this process in it", "another")
    expect(num_bytes > 0, "num_bytes", "more than 0", num_bytes)
    if size > _MOST_RANKS:
        return f"the group has {size} ranks, more than {_MOST_RANKS}"
    if device.type != "cuda":
        return "the device is not an NVIDIA GPU"
    from torch.distributed import _symmetric_memory as symmetric_memory

    indices = [index for _, _, index in _all_gather(group, device, 0)]
    if (reason := _agreed_reason(group, device, _obstacle(device, indices))) is not None:
        return reason
    by_rank: tuple[Tensor, ...] = ()
    code = 0
    try:
        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        own.fill_(0xFF)
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(own, group.group_name)
        by_rank = tuple(
            own if other == rank else handle.get_buffer(other, (num_bytes,), torch.uint8) for other in range(size)
        )
    except RuntimeError:
        code = _REASONS.index("PyTorch could not map the memory of the other ranks")
    if (reason := _agreed_reason(group, device, code)) is not None:
        return reason
    workspace = Workspace(rank, by_rank)
    _workspaces.setdefault(group.group_name, weakref.WeakSet()).add(workspace)
    return workspace


def _obstacle(device: torch.device, indices: list[int]) -> int:
    """The index of this rank's reason not to map the memory of these devices."""
    if torch.version.hip is not None:
        return 1
    count = torch.cuda.device_count()
    others = [index for index in indices if index != device.index]
    # A process that sees its own GPU alone calls it 0, as the others do theirs.
    seen = len(set(indices)) == len(indices) and max(indices) < count
    if seen and not all(torch.cuda.can_device_access_peer(device, index) for index in others):
        return 2
    return 0


def _agreed_reason(group: dist.ProcessGroup, device: torch.device, code: int) -> str | None:
    """The reason of the first rank that has one, or that ranks are on different hosts; the same on all ranks."""
    answers = _all_gather(group, device, code)
    if len({host for host, _, _ in answers}) > 1:
        return "the ranks are on different hosts"
    for rank, (_, reason, _) in enumerate(answers):
        if reason:
            return f"rank {rank} of {len(answers)}: {_REASONS[reason]}"
    return None


def _all_gather(group: dist.ProcessGroup, device: torch.device, code: int) -> list[tuple[int, int, int]]:
    """Per rank: its host, the index of its reason, the index of its device. Also a barrier."""
    own = torch.tensor([_host(), code, device.index or 0], dtype=torch.int64, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return [(host, reason, index) for host, reason, index in (each.tolist() for each in every)]


def _host() -> int:
    """A number for this host, from its boot id, because hosts may share names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_bytes() if boot.exists() else b""
    return int.from_bytes(hashlib.sha256(name).digest()[:7], "little")
