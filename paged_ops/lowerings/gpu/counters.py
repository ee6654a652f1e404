"""Counters that kernels reset to zero, so that no launch has to zero them first."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from paged_ops.lowerings.gpu.target import capturing

# SETS sets of counters are allocated at a time, when fewer than FEW are unused.
SETS, FEW = 256, 64

_known: dict[tuple[torch.device, int, int, int], Tensor] = {}
_unused: dict[tuple[torch.device, int], list[tuple[Tensor, torch.cuda.Event]]] = {}
_lock = threading.Lock()


def counters_of(workspace: Tensor, number: int) -> Tensor | None:
    """int32 ``[number]``, initially zero, for the launch that uses ``workspace``; None if there are none.

    The workspace's address selects the counters. Launches that may run at the same time, on any streams and in any
    CUDA graphs, have workspaces that do not overlap, and so different counters. Launches with overlapping workspaces
    are ordered, and each leaves zeros for the next. Counters are in memory that belongs to no graph and is used for
    nothing else.

    They cannot be allocated during capture: run one eager call first.
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
            if not is_captured:  # a capture begins after all earlier work
                torch.cuda.current_stream(device).wait_event(zeroed)
        return _known.get(place)
