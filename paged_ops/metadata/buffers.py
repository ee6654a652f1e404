"""The device buffers of a step, which never move, and pinned host copies that fill them without waiting.

Letters: T tokens of the batch (padded), S sequences (padded), M columns of a block table.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.device import as_current
from paged_ops.metadata.step import PoolMetadata


@dataclass
class Buffers:
    """The tensors of a step in one allocation, so that one copy can carry them all."""

    storage: Tensor  # uint8
    inputs: tuple[Tensor, Tensor] | None  # token ids, and the last row of each sequence
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    state_slots: Tensor | None
    bidirectional_ranges: Tensor | None
    context_lens: tuple[Tensor, ...]  # if tokens are sharded over ranks: this rank's of each sequence, and its history
    slot_mappings: tuple[Tensor, ...]  # of each pool
    packed: tuple[Tensor, ...]  # of each pool: the columns in use of its block tables, on their way
    all_block_tables: tuple[Tensor, ...]  # of each pool

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        num_pools: int,
        with_inputs: bool,
        with_states: bool,
        num_ranges: int,
        is_sharded: bool,
        is_sent: bool,
        device: torch.device | str,
        pinned: bool,
    ) -> Buffers:
        # The largest come last, as only their rows in use are sent, and token ids first, as some are on the device.
        packed = num_pools * (is_sent and prefers_compact(max_num_seqs, 0, max_blocks))
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            *[(torch.int64, (max_num_tokens,))] * with_inputs,
            *[(torch.int64, (max_num_tokens,))] * num_pools,
            (torch.int64, (max_num_tokens,)),
            (torch.int32, (max_num_seqs + 1,)),
            (torch.int32, (max_num_seqs,)),
            *[(torch.int32, (max_num_seqs,))] * with_states,
            *[(torch.int32, (max_num_seqs, num_ranges, 2))] * (num_ranges > 0),
            *[(torch.int32, (max_num_seqs,))] * (2 * is_sharded),
            *[(torch.int64, (max_num_seqs,))] * with_inputs,
            *[(torch.int32, (max_num_seqs * (max_blocks // 2),))] * packed,
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

        def take(count: int) -> tuple[Tensor, ...]:
            taken = tuple(own[:count])
            del own[:count]
            return taken

        input_ids, slot_mappings = take(with_inputs), take(num_pools)
        positions, query_start_loc, seq_lens = take(3)
        state_slots, ranges, context_lens = take(with_states), take(num_ranges > 0), take(2 * is_sharded)
        last_rows, packs, tables = take(with_inputs), take(packed), take(num_pools)
        inputs = (input_ids[0], last_rows[0]) if with_inputs else None
        states = state_slots[0] if with_states else None
        of_seqs = query_start_loc, seq_lens, states, ranges[0] if num_ranges else None, context_lens
        return cls(storage, inputs, positions, *of_seqs, slot_mappings, packs, tables)

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
            None if self.inputs is None else (self.inputs[0][:T], self.inputs[1][:S]),
            self.positions[:T],
            self.query_start_loc[: S + 1],
            self.seq_lens[:S],
            None if self.state_slots is None else self.state_slots[:S],
            None if self.bidirectional_ranges is None else self.bidirectional_ranges[:S],
            tuple(lens[:S] for lens in self.context_lens),
            tuple(slot_mapping[:T] for slot_mapping in self.slot_mappings),
            self.packed,
            tuple(block_tables[:S] for block_tables in self.all_block_tables),
        )

    def used(self, sizes: Sizes) -> list[tuple[int, int]]:
        """Byte ranges of ``storage`` that hold a step of these sizes; small gaps are closed."""
        T, S, rows, width, with_ids = sizes
        input_ids, last_rows = self.inputs or (None, None)
        of_seqs = self.state_slots, self.bidirectional_ranges, *self.context_lens, last_rows
        counts = [
            (input_ids, T * with_ids),
            *((each, T) for each in (*self.slot_mappings, self.positions)),
            (self.query_start_loc, S + 1),
            *((each, S) for each in (self.seq_lens, *of_seqs)),
        ]
        if width is None:
            counts += [(block_tables, rows) for block_tables in self.all_block_tables]
        else:
            counts += [(packed, rows * width) for packed in self.packed]
        ranges: list[tuple[int, int]] = []
        for tensor, count in counts:
            if tensor is None or count == 0:
                continue
            start = tensor.data_ptr() - self.storage.data_ptr()
            # Not by the stride: a tensor of one row may have stride 1 (torch.from_dlpack of torch 2.9).
            stop = start + count * math.prod(tensor.shape[1:]) * tensor.itemsize
            # Sending 64 KiB of stale bytes takes 1-3 us, issuing another copy more.
            if ranges and start - ranges[-1][1] <= 64 << 10:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges

    def tables_in(self, rows: int, width: int) -> list[tuple[Tensor, Tensor]]:
        """Of each pool the first rows and columns of the block tables, and the same as they are packed."""
        packs = zip(self.all_block_tables, self.packed, strict=True)
        return [(table[:rows, :width], packed[: rows * width].view(rows, width)) for table, packed in packs]


class Sizes(NamedTuple):
    """What is sent of a step."""

    T: int
    S: int
    rows: int  # of the block tables
    width: int | None  # of packed block tables; None: they are sent as they are
    with_ids: bool


class Staging:
    """A host copy of the buffers, and the event after which it can be written again."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.event: torch.cuda.Event | None = None
        self._parts: dict[Sizes, list[tuple[Tensor, Tensor]]] = {}  # what is copied to what

    def wait(self) -> Buffers:
        if self.event is not None:
            self.event.synchronize()
        return self.buffers

    def send(self, target: Buffers, sizes: Sizes) -> None:
        parts = self._parts.get(sizes)
        if parts is None:
            ranges = self.buffers.used(sizes)
            parts = [(target.storage[start:stop], self.buffers.storage[start:stop]) for start, stop in ranges]
            if sizes.width is not None:
                parts += target.tables_in(sizes.rows, sizes.width)
            if len(self._parts) >= 1024:
                self._parts.clear()
            self._parts[sizes] = parts
        for there, here in parts:
            there.copy_(here, non_blocking=True)

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.event = self.event or torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))


# Up to this number of bytes, the columns past the longest sequence are sent, too.
LEAST_SPREAD_BYTES = 256 << 10


def prefers_compact(rows: int, width: int, M: int) -> bool:
    """Whether to send only the columns in use and scatter them on the device: one more kernel, but fewer bytes."""
    return 4 * rows * (M - width) > LEAST_SPREAD_BYTES and 2 * width <= M
