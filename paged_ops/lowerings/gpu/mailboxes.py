"""How kernels of several ranks exchange data through symmetric memory: jit helpers.

A rank *puts* values into another rank's memory, and that rank *takes* them from its own by polling. No flag is needed:
memory without data holds the sentinel, all bits one, which is a NaN in every format. A NaN with these bits is sent as
another NaN, and all other values unchanged. ``take`` restores the sentinel. Each element is polled, so stores may be
split or reordered. The idea is Lamport's, known from TensorRT-LLM's all-reduce (with negative zero as the sentinel).

**Why a buffer can be reused.** It has two halves, used in turn. The turn counter is in the receiver's memory, so it
advances in replays of captured graphs too. A rank's calls run one after the other, and each sends to and receives from
every other rank, at least through a third one. A rank in its call n + 2 has finished its call n + 1. So it has received
everything that the others sent in their call n + 1, which they began after call n. By then they had taken the data of
call n and restored the sentinel.

Polling loads are volatile: of system scope, past the L1.
"""

import triton
import triton.language as tl


@triton.jit
def put(at, values, mask):
    """Store values at another rank's addresses, pointers to integers of the values' size. Returns the stored bits."""
    bits = values.to(at.dtype.element_ty, bitcast=True)
    # the sentinel without its sign bit: another NaN
    bits = tl.where(bits == -1, (1 << (bits.dtype.primitive_bitwidth - 1)) - 1, bits)
    tl.store(at, bits, mask=mask)
    return bits


@triton.jit
def take(at, mask, aborted, dtype: tl.constexpr, MOST_POLLS: tl.constexpr = 0):
    """Wait for the values at these addresses, pointers to integers in this rank's memory; returns them as ``dtype``.

    Afterwards the addresses hold the sentinel again. No two warps may poll one address, as happens if a tile has fewer
    elements than its layout has threads. Masked elements are 0. Returns with any values once ``aborted``, a pointer to
    int32, is not 0. After ``MOST_POLLS``, unless that is 0, it traps (CUDA only): the host's next GPU call fails.
    """
    bits = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.max((bits == -1).to(tl.int32))
    polls = 0
    while missing != 0:
        bits = tl.load(at, mask=mask, other=0, volatile=True)
        missing = tl.max((bits == -1).to(tl.int32))
        polls += 1
        if tl.load(aborted, mask=polls % 64 == 0, other=0, volatile=True) != 0:
            missing = 0
        if MOST_POLLS != 0:
            if polls == MOST_POLLS:
                tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [polls], tl.int32, is_pure=False, pack=1)
    tl.store(at, tl.full(bits.shape, -1, bits.dtype), mask=mask)
    return bits.to(dtype, bitcast=True)
