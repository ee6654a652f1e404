"""The read ceiling of a GPU: a kernel that only reads memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_ops.lowerings.gpu.target import on_device, target_of

PROGRAMS_A_PROCESSOR, TILE, WARPS = 4, 8192, 8


@triton.jit
def read_kernel(source, sink, num_tiles, TILE: tl.constexpr):
    """Adds float32 numbers, one tile per step; every program writes one number."""
    total = tl.zeros([TILE], tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        total += tl.load(source + tile * TILE + tl.arange(0, TILE))
    tl.store(sink + tl.program_id(0), tl.sum(total))


def read(source: Tensor, sink: Tensor) -> Tensor:
    """Reads whole tiles of ``source`` (float32) and writes the sum of each program to ``sink``."""
    programs = PROGRAMS_A_PROCESSOR * target_of(source.device).processors
    with on_device(source.device):
        read_kernel[(programs,)](source, sink, source.numel() // TILE, TILE=TILE, num_warps=WARPS, num_stages=4)
    return sink
