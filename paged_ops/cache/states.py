"""State of layers that keep a fixed amount per sequence instead of keys: linear attention, convolutions, Mamba.

``StateCache`` gives each sequence a slot, which the model reads and writes once per step::

    states.admit(seq_id)  # a slot of zeros
    ...                   # the model reads rows states.row(seq_id) and writes their partners, row ^ 1
    states.commit(seq_id)  # the step is issued: the rows that it wrote are now the state

A slot is two rows of every tensor. A step reads one and writes the other, and ``commit`` swaps the two. So a step that
fails after some layers have run, or whose result is not taken, has changed nothing, and can be run again.

Letters: R rows of a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from paged_ops.cache.block_pool import OutOfBlocks
from paged_ops.checks import at_least, expect
from paged_ops.device import with_index

PADDING_ROW = 0  # padding sequences read it, and write its partner, row 1


@dataclass(frozen=True)
class StateSpec:
    """One tensor of state, as one layer keeps it for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state; a slot takes twice this number."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(slots=True)
class _Slot:
    index: int  # a slot of the device, from 1; if swapped out, of the host, from 0
    row: int = PADDING_ROW  # the row of the device's tensors that has the state
    swapped: bool = False


class StateCache:
    """A slot per sequence, in tensors of ``2 * (num_slots + 1)`` rows; the first two rows belong to padding.

    Work is assumed to run in the order of its issue (one stream). Methods raise ``ValueError`` for a
    ``seq_id`` that is unknown, swapped out, or not new where a new one is needed, and ``OutOfBlocks`` when slots run
    out; either way nothing has changed.

    Args:
        specs: the tensors of all layers.
        num_slots: sequences on the device at once.
        device: where the tensors live; "cuda" means the GPU that is current at construction.
        num_host_slots: sequences in host memory (pinned for a CUDA or ROCm device), for ``swap_out``.

    Attributes:
        tensors: one ``[R, *shape]`` per spec, zeroed, R = 2 * (num_slots + 1).
        host_tensors: one ``[num_host_slots, *shape]`` per spec.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        num_host_slots: int = 0,
    ) -> None:
        given: Any = specs
        listed = isinstance(given, Sequence) and all(isinstance(each, StateSpec) for each in given)
        expect(listed, "specs", "a list of StateSpec", given)
        expect(len(specs) >= 1, "specs", "one or more", len(specs))
        at_least(0, num_slots=num_slots, num_host_slots=num_host_slots)
        self.specs = tuple(specs)
        self.num_slots, self.num_host_slots = num_slots, num_host_slots
        self.device = with_index(device)
        on_cuda = self.device.type == "cuda"
        rows = 2 * (num_slots + 1)
        pinned = on_cuda and num_host_slots > 0
        with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
            self.tensors = [torch.zeros(rows, *s.shape, dtype=s.dtype, device=self.device) for s in self.specs]
            self.host_tensors = [
                torch.zeros(num_host_slots, *s.shape, dtype=s.dtype, device="cpu", pin_memory=pinned)
                for s in self.specs
            ]
        for tensor in self.tensors:
            # The model's own sizes. Left open, one that equals the number of tokens of a step would be taken for it,
            # and the next step compiled again.
            torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
        # All that is known about slots. Each method changes one entry, as its last statement, so that after an
        # interrupt the call has either happened or not.
        self._slots: dict[Hashable, _Slot] = {}
        self._swapped_event = torch.cuda.Event() if on_cuda and num_host_slots else None
        if on_cuda:
            for tensor in self.tensors:  # a graph that torch.compile captures may write what never moves
                torch._dynamo.mark_static_address(tensor, guard=False)
        if self._swapped_event is not None:
            # The arguments keep the pinned memory alive until the last swap is done, also when the cache is dropped.
            weakref.finalize(self, _wait, self._swapped_event, self.host_tensors)

    @staticmethod
    def bytes_per_slot(specs: Sequence[StateSpec]) -> int:
        """Bytes that one sequence takes on the device: both rows of its slot, all layers."""
        return 2 * sum(spec.nbytes for spec in specs)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host's tensors."""
        return sum(tensor.nbytes for tensor in self.host_tensors)

    @property
    def num_free_slots(self) -> int:
        """Sequences that ``admit``, ``fork`` and ``swap_in`` can take now."""
        return self.num_slots - sum(not slot.swapped for slot in self._slots.values())

    @property
    def num_free_host_slots(self) -> int:
        """Sequences that ``swap_out`` can take now."""
        return self.num_host_slots - sum(slot.swapped for slot in self._slots.values())

    @property
    def seq_ids(self) -> list[Hashable]:
        """All sequences, in the order of their admission."""
        return list(self._slots)

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._slots

    def __copy__(self) -> NoReturn:
        raise TypeError("StateCache: a shallow copy would own the same slots a second time; use copy.deepcopy")

    def admit(self, seq_id: Hashable) -> None:
        """Adds a sequence with a state of zeros, as before the first token."""
        self._check_new(seq_id)
        index = self._spare_slot()
        for tensor in self.tensors:
            tensor[2 * index].zero_()
        self._slots[seq_id] = _Slot(index, 2 * index)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Adds a sequence with a copy of the parent's state."""
        self._check_new(child_id)
        parent = self._live(parent_id)
        index = self._spare_slot()
        for tensor in self.tensors:
            tensor[2 * index].copy_(tensor[parent.row])
        self._slots[child_id] = _Slot(index, 2 * index)

    def commit(self, seq_id: Hashable) -> None:
        """Records that a step was issued which writes the sequence's new state, after all the tokens that it was
        given."""
        slot = self._live(seq_id)
        slot.row ^= 1

    def free(self, seq_id: Hashable) -> None:
        """Removes a sequence, swapped out or not."""
        self._get(seq_id)
        del self._slots[seq_id]

    def reset(self) -> None:
        """Removes all sequences."""
        self._slots.clear()

    def row(self, seq_id: Hashable) -> int:
        """The row of every tensor where the sequence's state is; the next state goes to row ``row ^ 1``."""
        return self._live(seq_id).row

    def rows(self, seq_ids: Sequence[Hashable]) -> list[int]:
        """The ``row`` of each sequence, for a step's metadata."""
        return [self._live(seq_id).row for seq_id in seq_ids]

    def is_swapped_out(self, seq_id: Hashable) -> bool:
        """Whether the sequence's state is on the host."""
        return self._get(seq_id).swapped

    def swap_out(self, seq_id: Hashable) -> None:
        """Moves a sequence's state to the host, asynchronously on the current stream."""
        slot = self._live(seq_id)
        index = self._spare_host_slot()
        self._move(self.tensors, slot.row, self.host_tensors, index)
        self._slots[seq_id] = _Slot(index, swapped=True)

    def swap_in(self, seq_id: Hashable) -> None:
        """Moves a sequence's state back, asynchronously on the current stream."""
        slot = self._get(seq_id)
        if not slot.swapped:
            raise ValueError(f"seq_id: {seq_id!r} is not swapped out")
        index = self._spare_slot()
        self._move(self.host_tensors, slot.index, self.tensors, 2 * index)
        self._slots[seq_id] = _Slot(index, 2 * index)

    def synchronize(self) -> None:
        """Waits until all swaps are done. Only needed before reading ``host_tensors``: work on the device is in
        order."""
        if self._swapped_event is not None:
            self._swapped_event.synchronize()

    def _move(self, sources: list[Tensor], source: int, targets: list[Tensor], target: int) -> None:
        stream = None
        if self._swapped_event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._swapped_event)  # swaps stay in order when the stream changes
        for a, b in zip(sources, targets, strict=True):
            b[target].copy_(a[source], non_blocking=True)
        if stream is not None and self._swapped_event is not None:
            self._swapped_event.record(stream)

    def _get(self, seq_id: Hashable) -> _Slot:
        slot = self._slots.get(seq_id)
        if slot is None:
            raise ValueError(f"seq_id: {seq_id!r} is unknown: never admitted, or freed already")
        return slot

    def _live(self, seq_id: Hashable) -> _Slot:
        slot = self._get(seq_id)
        if slot.swapped:
            raise ValueError(f"seq_id: {seq_id!r} is swapped out; swap it in first")
        return slot

    def _check_new(self, seq_id: Hashable) -> None:
        if seq_id in self._slots:
            raise ValueError(f"seq_id: {seq_id!r} is in use; free it first or choose another")

    def _spare_slot(self) -> int:
        taken = {slot.index for slot in self._slots.values() if not slot.swapped}
        return _lowest("device", taken, range(1, self.num_slots + 1))  # slot 0 belongs to padding

    def _spare_host_slot(self) -> int:
        taken = {slot.index for slot in self._slots.values() if slot.swapped}
        return _lowest("host", taken, range(self.num_host_slots))


def _lowest(name: str, taken: set[int], slots: range) -> int:
    free = next((slot for slot in slots if slot not in taken), None)
    if free is None:
        raise OutOfBlocks(f"{name} states: expected a free slot of {len(slots)}, got none; free or swap out a sequence")
    return free


def _wait(event: torch.cuda.Event, pinned: list[Tensor]) -> None:
    event.synchronize()
