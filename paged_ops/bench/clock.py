"""The clock of a GPU's multiprocessors, by which the power limit explains times that differ between runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged_ops.lowerings.gpu.target import on_device

NANOSECONDS = tl.constexpr(60000)  # long enough for a timer that advances once in 1024 of them
ASM = tl.constexpr("""{
.reg .u64 start, begin, now;
.reg .pred p;
mov.u64 start, %clock64;
mov.u64 begin, %globaltimer;
WAIT:
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.lt.u64 p, now, $2;
@p bra WAIT;
mov.u64 $0, %clock64;
sub.u64 $0, $0, start;
mov.u64 $1, now;
}""")


@triton.jit
def clock_kernel(out):
    """Writes how many clocks and how many nanoseconds a program has waited."""
    asm: tl.constexpr = ASM
    wait = tl.full([], NANOSECONDS, tl.int64)
    clocks, passed = tl.inline_asm_elementwise(asm, "=&l,=&l,l", [wait], (tl.int64, tl.int64), is_pure=False, pack=1)
    tl.store(out, clocks)
    tl.store(out + 1, passed)


def clock_mhz(device: torch.device) -> float:
    """The clock after all kernels that were launched before, within 60 µs. NVIDIA only."""
    out = torch.empty(2, dtype=torch.int64, device=device)
    with on_device(device):
        clock_kernel[(1,)](out, num_warps=1)
    clocks, passed = out.tolist()
    return clocks / passed * 1e3
