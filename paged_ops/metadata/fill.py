"""The usual step, checked and written by one C++ function (``fill.cpp``) in a few microseconds.

A step takes some thirty torch ops otherwise, of 2 to 10 µs of the host each. The function serves steps without states,
bidirectional ranges, a common prefix or shards. It is compiled at the first build, in a tenth of a second
(:mod:`paged_ops.cpp`). Without a compiler, and for steps that it refuses, the builder's torch ops serve, which also
raise the errors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops import cpp
from paged_ops.metadata.batch import Batch
from paged_ops.metadata.buffers import LEAST_SPREAD_BYTES, Buffers

WIDE = {torch.int64: 1, torch.int32: 0}


class Pool(ctypes.Structure):
    """Fields as in the source."""

    _fields_ = (
        ("block_ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "column", "W", "wide", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("slots", "table", "packed")),
    )


class Step(ctypes.Structure):
    """Fields as in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_lens", "computed")),
        *((name, ctypes.c_int64) for name in ("wide_lens", "wide_computed", "n", "S", "T")),
        *((name, ctypes.c_int64) for name in ("B", "M", "max_seqs", "max_tokens", "lookahead")),
        *((name, ctypes.c_int64) for name in ("compact_bytes", "num_pools")),
        ("pools", ctypes.POINTER(Pool)),
        *((name, ctypes.c_void_p) for name in ("starts", "lens", "positions", "ids")),
        ("num_ids", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("input_ids", "last_rows")),
        *((name, ctypes.c_void_p) for name in ("starts_host", "lens_host", "computed_host")),
        *((name, ctypes.c_int64) for name in ("tokens", "max_query_len", "max_seq_len", "width", "compact")),
    )


SOURCE = cpp.Source(
    Path(__file__).with_suffix(".cpp"), "fill_step", Step, ctypes.c_int64, "fill", "the step's metadata", (), True
)


@functools.cache
def compiled() -> Callable[[Any], int] | None:
    """The C++ function, or None if no compiler can make it."""
    return cpp.built(SOURCE)


class Filler:
    """The function with the addresses of one set of buffers."""

    def __init__(self, into: Buffers, function: Callable[[Any], int], B: int, num_blocks: Sequence[int]) -> None:
        self._into = into  # whose memory must live
        self._function = function
        self._pools = (Pool * len(num_blocks))()
        for pool, N, slots, table in zip(
            self._pools, num_blocks, into.slot_mappings, into.all_block_tables, strict=True
        ):
            pool.num_blocks, pool.slots, pool.table = N, slots.data_ptr(), table.data_ptr()
        for pool, packed in zip(self._pools, into.packed, strict=False):
            pool.packed = packed.data_ptr()
        self.step = Step(
            B=B,
            M=into.block_tables.shape[1],
            max_seqs=len(into.seq_lens),
            max_tokens=len(into.positions),
            compact_bytes=LEAST_SPREAD_BYTES if into.packed else 0,
            num_pools=len(num_blocks),
            pools=ctypes.cast(self._pools, ctypes.POINTER(Pool)),
            starts=into.query_start_loc.data_ptr(),
            lens=into.seq_lens.data_ptr(),
            positions=into.positions.data_ptr(),
        )
        if into.inputs is not None:
            self.step.input_ids, self.step.last_rows = map(Tensor.data_ptr, into.inputs)

    def fill(
        self, batch: Batch, ids: Tensor | None, num_reqs: int | None, num_tokens: int | None, lookahead: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Write the step, if it is right; ``step`` then has what was found. Returns host tensors: query_start_loc
        ``[S + 1]``, seq_lens and num_computed_tokens ``[S]``; None if nothing was written."""
        step, query_lens, computed = self.step, batch.query_lens, batch.num_computed_tokens
        if not (query_lens.is_contiguous() and computed.is_contiguous()):
            return None
        n = query_lens.shape[0]
        S = n if num_reqs is None else num_reqs
        if not n <= S <= step.max_seqs or (num_tokens is not None and num_tokens < 0):
            return None
        starts = torch.empty(S + 1, dtype=torch.int32, device="cpu")
        lens, computed_host = torch.empty((2, S), dtype=torch.int32, device="cpu").unbind()
        step.query_lens, step.wide_lens = query_lens.data_ptr(), WIDE[query_lens.dtype]
        step.computed, step.wide_computed = computed.data_ptr(), WIDE[computed.dtype]
        step.ids, step.num_ids = (None, -1) if ids is None else (ids.data_ptr(), ids.shape[0])
        step.n, step.S, step.T, step.lookahead = n, S, -1 if num_tokens is None else num_tokens, lookahead
        step.starts_host, step.lens_host = starts.data_ptr(), lens.data_ptr()
        step.computed_host = computed_host.data_ptr()
        for pool, block_ids in zip(self._pools, (batch.block_ids, *batch.other_block_ids), strict=True):
            pool.block_ids, pool.wide, pool.W = block_ids.data_ptr(), WIDE[block_ids.dtype], block_ids.shape[1]
            pool.row, pool.column = block_ids.stride()
        if not self._function(step):
            return None
        return starts, lens, computed_host
