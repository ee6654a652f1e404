"""Exchange and merge of the ranks' partial attention on GPUs, in one kernel.

Bytes per rank, for R rows (tokens times heads) of Dv elements of e bytes on W ranks: the part is read from local
memory, sent to and received from each other rank, ``(W - 1)·R·(Dv·e + 4)`` over the links, and the result is written.
The ``3·W·R·Dv`` additions and multiplications do not matter: a token of 32 heads of 128 in bfloat16 is 8 KiB.

A rank writes its part (output and lse) to the memory of all others, reads theirs from its own memory, and merges them
in float32 in the order of ranks, so all ranks hold the same bits. mailboxes.py describes the memory; here each row has
a turn counter, and each call sends to and receives from every rank, as required there.

A program is one warp, and its lanes poll disjoint elements. If two warps polled copies of one element, such as a tile's
lse, the faster one would restore the sentinel before the slower one has read the data.

Letters: T tokens, H heads of the result, Dv value head size, W ranks, R rows of capacity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.mailboxes import put, take
from paged_ops.lowerings.gpu.target import target_of

_BITS = {2: torch.int16, 4: torch.int32}
# More polls are an error. At over half a microsecond each this is minutes, because other ranks may be compiling.
MOST_POLLS = 1 << 29


class Places(NamedTuple):
    """The memory through which ranks exchange parts: made once, the same for all calls.

    Attributes:
        outs: integers as wide as the dtype, ``[2, R, W, width]`` per rank: two turns, R rows, W senders.
        lses: int32 ``[2, R, W]`` per rank: bits of float32.
        turns: int32 ``[R]``, the next half of each row; only this rank uses it.
        aborted: see :class:`paged_ops.parallel.symmetric.Workspace`.
    """

    outs: tuple[Tensor, ...]
    lses: tuple[Tensor, ...]
    turns: Tensor
    aborted: Tensor
    rank: int

    def serve(self, rows: int, head_size: int, dtype: torch.dtype) -> bool:
        """Whether this number of rows of this size fits."""
        _, most, _, width = self.outs[0].shape
        return rows <= most and head_size <= width and dtype.itemsize == self.outs[0].itemsize


def num_bytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
    """The size of a workspace for this number of rows."""
    return 2 * rows * ranks * (width * dtype.itemsize + 4)


def places(workspace: Any, rows: int, width: int, dtype: torch.dtype) -> Places:
    """The places in a :class:`paged_ops.parallel.symmetric.Workspace`. ``rows * width`` is even."""
    W = workspace.size
    outs = workspace.views(_BITS[dtype.itemsize], 2, rows, W, width)
    lses = workspace.views(torch.int32, 2, rows, W, offset=outs[0].nbytes)
    turns = torch.zeros(rows, dtype=torch.int32, device=workspace.device)
    return Places(outs, lses, turns, workspace.aborted, workspace.rank)


def exchange(part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, to: Places, *, rows: int | None = None) -> None:
    """Fill ``out [T, H, Dv]`` and ``lse [T, H]`` by merging all ranks' parts. All tensors are contiguous.

    ``part`` has H heads, and each rank gets all of them; or W·H heads, and rank r gets H heads from ``r * H`` on.
    ``rows``: rows of a tile, a power of two up to 32.
    """
    T, H, Dv = out.shape
    if not T * H:
        return
    if rows is None:  # at least 16 bytes per lane, so that lanes poll disjoint elements
        rows = max(1, min(32, 512 // (triton.next_power_of_2(Dv) * out.itemsize)))
    launcher, most = _launcher(H, Dv, part.shape[1] != H, to.outs[0].shape, to.rank, part.device, rows)
    tensors = (part, part_lse, out, lse, to.turns, to.aborted, *to.outs, *to.lses)
    launcher((min(-(-T * H // rows), most), 1, 1), tensors, (T * H,))


def merge_gathered(gathered: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fill ``out [T, H, Dv]`` and ``lse [T, H]`` from gathered parts: contiguous bytes ``[W, T, H, Dv·e + 4]``, each an
    output and its lse."""
    T, H, Dv = out.shape
    if T * H:
        launcher, tile = _merger(gathered.shape[0], Dv, out.dtype, out.device)
        rows = T * H
        launcher((-(-rows // tile), 1, 1), (gathered.view(out.dtype), gathered.view(torch.float32), out, lse), (rows,))


@functools.lru_cache(maxsize=1024)
def _launcher(
    H: int, Dv: int, is_scattered: bool, shape: tuple[int, ...], rank: int, device: torch.device, rows: int
) -> tuple[Launcher, int]:
    """The kernel for this kind of call, and the largest number of programs that run concurrently."""
    target = target_of(device)
    BLOCK_D = triton.next_power_of_2(max(Dv, 1))
    constants = {
        "H": H,
        "Dv": Dv,
        "BLOCK_D": BLOCK_D,
        "ROWS": rows,
        "R": shape[1],
        "W": shape[2],
        "WIDTH": shape[3],
        "RANK": rank,
        "SCATTERED": is_scattered,
        "MOST_POLLS": MOST_POLLS if target.backend == "cuda" else 0,
        "num_warps": 1,
        **target.overlap(),
    }
    return Launcher(exchange_kernel, constants, device), max(1, target.processors) * 16


@functools.lru_cache(maxsize=1024)
def _merger(W: int, Dv: int, dtype: torch.dtype, device: torch.device) -> tuple[Launcher, int]:
    BLOCK_D = triton.next_power_of_2(max(Dv, 1))
    ROWS = max(1, 1024 // BLOCK_D)
    constants = {"Dv": Dv, "BLOCK_D": BLOCK_D, "ROWS": ROWS, "W": W, "num_warps": 4}
    return Launcher(gathered_kernel, constants, device), ROWS


@triton.jit(do_not_specialize=["num_rows"])
def exchange_kernel(
    tensors,  # part, its lse, out, lse, turns [R], aborted [1], places of outputs by rank, places of lse by rank
    num_rows,  # T * H
    H: tl.constexpr,
    Dv: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SCATTERED: tl.constexpr,
    MOST_POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: tiles p, p + P, ... of P programs."""
    part, part_lse, out, lse = tensors[0], tensors[1], tensors[2], tensors[3]
    turns, aborted = tensors[4], tensors[5]
    OUTS: tl.constexpr = 6
    LSES: tl.constexpr = 6 + W
    LANES: tl.constexpr = 32 // ROWS
    d = tl.arange(0, BLOCK_D)[None, :]
    tiles = tl.cdiv(num_rows, ROWS)
    if PDL:
        gdc_wait()

    # All rows are sent before the first wait.
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = row < num_rows
        mask = live[:, None] & (d < Dv)
        place = (tl.load(turns + row, mask=live, other=0) * R + row) * W + RANK
        for i in tl.static_range(1, W):
            source = row
            if SCATTERED:
                source = (row // H * W + (RANK + i) % W) * H + row % H
            own = tl.load(part + source[:, None] * Dv + d, mask=mask, other=0.0)
            own_lse = tl.load(part_lse + source, mask=live, other=0.0)
            put(tensors[OUTS + (RANK + i) % W] + place[:, None] * WIDTH + d, own, mask)
            put(tensors[LSES + (RANK + i) % W] + place, own_lse, live)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = row < num_rows
        mask = live[:, None] & (d < Dv)
        turn = tl.load(turns + row, mask=live, other=0)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        for r in tl.static_range(W):
            if r == RANK:
                source = row
                if SCATTERED:
                    source = (row // H * W + RANK) * H + row % H
                that = tl.load(part + source[:, None] * Dv + d, mask=mask, other=0.0)
                that_lse = tl.load(part_lse + source, mask=live, other=0.0)
            else:
                place = (turn * R + row) * W + r
                # Each lane polls an lse, so all lanes leave the loop together.
                lse_at = (tensors[LSES + RANK] + place)[:, None] + tl.zeros([ROWS, LANES], tl.int32)
                wanted = live[:, None] & (tl.zeros([ROWS, LANES], tl.int32) == 0)
                lse_bits = take(lse_at, wanted, aborted, tl.int32, MOST_POLLS)
                that_lse = tl.max(lse_bits, 1).to(tl.float32, bitcast=True)
                at = tensors[OUTS + RANK] + place[:, None] * WIDTH + d
                that = take(at, mask, aborted, part.dtype.element_ty, MOST_POLLS)
            acc, m, l = with_part(acc, m, l, that, that_lse)
        tl.store(turns + row, 1 - turn, mask=live)
        store_merged(out, lse, acc, m, l, row, live, d, Dv)
    if PDL:
        gdc_launch_dependents()  # last, as in all kernels: the next kernel may overwrite this one's inputs


@triton.jit(do_not_specialize=["num_rows"])
def gathered_kernel(
    tensors,  # the gathered parts, as elements and as float32; out [T, H, Dv] and lse [T, H]
    num_rows,  # T * H
    Dv: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    elements, floats, out, lse = tensors
    NUM_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    STRIDE: tl.constexpr = Dv + 4 // NUM_BYTES  # of a row, in elements
    FLOATS: tl.constexpr = STRIDE * NUM_BYTES // 4
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    d = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for r in tl.static_range(W):
        at = row + r * num_rows.to(tl.int64)
        that = tl.load(elements + at[:, None] * STRIDE + d, mask=live[:, None] & (d < Dv), other=0.0)
        that_lse = tl.load(floats + at * FLOATS + FLOATS - 1, mask=live, other=0.0)
        acc, m, l = with_part(acc, m, l, that, that_lse)
    store_merged(out, lse, acc, m, l, row, live, d, Dv)


@triton.jit
def with_part(acc, m, l, part, lse):
    """Add one part to the weighted sum of parts, the largest lse and the sum of weights. A part without keys, whose lse
    is not finite, is dropped, whatever its output."""
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    largest = tl.maximum(m, lse, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    decay, weight = tl.exp(m - shift), tl.exp(lse - shift)
    weighted = tl.where((lse == float("-inf"))[:, None], 0.0, part.to(tl.float32) * weight[:, None])
    return acc * decay[:, None] + weighted, largest, l * decay + weight


@triton.jit
def store_merged(out, lse, acc, m, l, row, live, d, Dv: tl.constexpr):
    some = l != 0.0
    merged = acc / tl.where(some, l, 1.0)[:, None]
    tl.store(out + row[:, None] * Dv + d, merged.to(out.dtype.element_ty), mask=live[:, None] & (d < Dv))
    tl.store(lse + row, tl.where(some, m + tl.log(tl.where(some, l, 1.0)), float("-inf")), mask=live)
    return l
