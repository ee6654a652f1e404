"""The device buffers of a step, which never move, and pinned host copies that fill them without waiting.

Letters: T tokens of the batch (padded), S sequences (padded), M columns of a block table.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_ops.device import as_current
from paged_ops.metadata.step import PoolMetadata


@dataclass
class Buffers:
    """The tensors of a step in one allocation, so that one copy can carry them all."""

    storage: Tensor  # uint8
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    state_slots: Tensor | None
    bidirectional_ranges: Tensor | None
    context_lens: tuple[Tensor, ...]  # if tokens are spread over ranks: this rank's of each sequence, and its history
    slot_mappings: tuple[Tensor, ...]  # of each pool
    all_block_tables: tuple[Tensor, ...]  # of each pool

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        num_pools: int,
        with_states: bool,
        num_ranges: int,
        is_spread: bool,
        device: torch.device | str,
        pinned: bool,
    ) -> Buffers:
        # The largest come last: only their rows in use are sent.
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            *[(torch.int64, (max_num_tokens,))] * num_pools,
            (torch.int64, (max_num_tokens,)),
            (torch.int32, (max_num_seqs + 1,)),
            (torch.int32, (max_num_seqs,)),
            *[(torch.int32, (max_num_seqs,))] * with_states,
            *[(torch.int32, (max_num_seqs, num_ranges, 2))] * (num_ranges > 0),
            *[(torch.int32, (max_num_seqs,))] * (2 * is_spread),
            *[(torch.int32, (max_num_seqs, max_blocks))] * num_pools,
        ]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
        # No vector load or tensor descriptor needs more alignment than 256 bytes.
        starts = [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]
        # An inference tensor cannot be written outside of inference mode.
        with torch.inference_mode(False):
            storage = torch.zeros(starts[-1], dtype=torch.uint8, device=device, pin_memory=pinned)
            parts = [
                storage[start : start + size].view(dtype).view(shape)
                for start, size, (dtype, shape) in zip(starts, sizes, shapes, strict=False)
            ]
            # For saving, exporting and the compiler's alias analysis each part must be a tensor of its own.
            own = parts
            if not pinned:
                with as_current(torch.device(device)):  # tensors can only be exported from the current GPU
                    own = [torch.from_dlpack(part) for part in parts]
        slot_mappings, (positions, query_start_loc, seq_lens, *rest) = own[:num_pools], own[num_pools:]
        state_slots = rest.pop(0) if with_states else None
        ranges = rest.pop(0) if num_ranges else None
        context_lens, rest = tuple(rest[: 2 * is_spread]), rest[2 * is_spread :]
        of_seqs = query_start_loc, seq_lens, state_slots, ranges, context_lens
        return cls(storage, positions, *of_seqs, tuple(slot_mappings), tuple(rest))

    @property
    def slot_mapping(self) -> Tensor:
        return self.slot_mappings[0]

    @property
    def block_tables(self) -> Tensor:
        return self.all_block_tables[0]

    @functools.cached_property
    def other_pools(self) -> tuple[PoolMetadata, ...]:
        return tuple(map(PoolMetadata, self.all_block_tables[1:], self.slot_mappings[1:]))

    def views(self, S: int, T: int) -> Buffers:
        return Buffers(
            self.storage,
            self.positions[:T],
            self.query_start_loc[: S + 1],
            self.seq_lens[:S],
            None if self.state_slots is None else self.state_slots[:S],
            None if self.bidirectional_ranges is None else self.bidirectional_ranges[:S],
            tuple(lens[:S] for lens in self.context_lens),
            tuple(slot_mapping[:T] for slot_mapping in self.slot_mappings),
            tuple(block_tables[:S] for block_tables in self.all_block_tables),
        )

    def used(self, T: int, S: int, table_rows: int) -> list[tuple[int, int]]:
        """Byte ranges of ``storage`` that hold T tokens, S sequences and so many rows of the block tables; small gaps
        are closed."""
        counts = [(tensor, T) for tensor in (*self.slot_mappings, self.positions)]
        counts += [(self.query_start_loc, S + 1), (self.seq_lens, S)]
        of_seqs = self.state_slots, self.bidirectional_ranges, *self.context_lens
        counts += [(each, S) for each in of_seqs if each is not None]
        counts += [(block_tables, table_rows) for block_tables in self.all_block_tables]
        ranges: list[tuple[int, int]] = []
        for tensor, count in counts:
            if count == 0:
                continue
            start = tensor.data_ptr() - self.storage.data_ptr()
            stop = start + count * tensor.stride(0) * tensor.itemsize
            # Sending 64 KiB of stale bytes takes 1-3 us, issuing another copy more.
            if ranges and start - ranges[-1][1] <= 64 << 10:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges


class Staging:
    """A host copy of the buffers, and the event after which it can be written again."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.event: torch.cuda.Event | None = None
        self._parts: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}  # what is sent, by sizes

    def wait(self) -> Buffers:
        if self.event is not None:
            self.event.synchronize()
        return self.buffers

    def send(self, target: Buffers, T: int, S: int, table_rows: int) -> None:
        sizes = T, S, table_rows
        parts = self._parts.get(sizes)
        if parts is None:
            ranges = self.buffers.used(*sizes)
            parts = [(target.storage[start:stop], self.buffers.storage[start:stop]) for start, stop in ranges]
            if len(self._parts) >= 1024:
                self._parts.clear()
            self._parts[sizes] = parts
        for there, here in parts:
            there.copy_(here, non_blocking=True)

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.event = self.event or torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))


# Below so many bytes of columns past the longest sequence they are sent, too.
LEAST_SPREAD_BYTES = 256 << 10


def prefers_compact(rows: int, width: int, M: int) -> bool:
    """Whether to send only the columns in use and to spread them on the device: one more kernel, but fewer bytes."""
    return 4 * rows * (M - width) > LEAST_SPREAD_BYTES and 2 * width <= M
