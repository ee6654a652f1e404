"""Counters that kernels leave at zero, so that nothing has to zero them before the next launch."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from paged_ops.lowerings.gpu.target import capturing

# Sets of counters are made so many at a time, before the last few are gone.
SETS, FEW = 256, 64

_known: dict[tuple[torch.device, int, int, int], Tensor] = {}
_unused: dict[tuple[torch.device, int], list[tuple[Tensor, torch.cuda.Event]]] = {}
_lock = threading.Lock()


def counters_of(workspace: Tensor, number: int) -> Tensor | None:
    """int32 ``[number]``, zero at first, for the launch that uses ``workspace``; None if there are none.

    The workspace's address selects the counters. Launches that may run at the same time, on any streams and in any CUDA
    graphs, have workspaces that do not overlap, so their counters differ. Launches with overlapping workspaces are
    ordered; each leaves zeros for the next. Counters are in memory that belongs to no graph.

    Counters cannot be allocated during the capture of a graph. Run one eager call before capture.
    """
    device, size = workspace.device, workspace.nbytes.bit_length() - 1
    # Workspaces that begin less than 2^size bytes apart overlap.
    place = device, number, size, workspace.data_ptr() >> size
    known = _known.get(place)
    return _new(place) if known is None else known


def _new(place: tuple[torch.device, int, int, int]) -> Tensor | None:
    device, number, _, _ = place
    if device.type == "cpu":  # Triton's interpreter
        return torch.zeros(number, dtype=torch.int32, device=device)
    with _lock:
        unused = _unused.setdefault((device, number), [])
        is_captured = capturing(device)
        if len(unused) < FEW and not is_captured:
            sets = torch.zeros(SETS, number, dtype=torch.int32, device=device)
            zeroed = torch.cuda.current_stream(device).record_event()
            unused.extend((each, zeroed) for each in sets.unbind())
        if place not in _known and unused:
            _known[place], zeroed = unused.pop()
            if not is_captured:  # else they were zeroed before the capture began, which waits for the device
                torch.cuda.current_stream(device).wait_event(zeroed)
        return _known.get(place)
