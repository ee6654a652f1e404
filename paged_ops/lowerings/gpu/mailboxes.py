"""How kernels of several ranks exchange data through memory that they share: jit helpers.

A rank *puts* values into another rank's memory; that rank *takes* them from its own, polling. No flag is needed: memory
where nothing has come yet holds the sentinel, all bits one, which is a NaN in every format. A NaN of these bits is sent
as another NaN, all else as it is. Whoever takes values leaves the sentinel in their place. This holds however stores
are split or ordered, as each element is polled. The idea is Lamport's, known from TensorRT-LLM's all-reduce (with
negative zero as the sentinel).

**Why a place can be used again.** Each place has two halves, used in turn; the turn is a counter in the taker's own
memory, so it goes on through replays of captured graphs. Calls of a rank run one after the other, and each both sends
to and hears from every other rank, at least through a third. A rank that is in its call n + 2 has ended its call n + 1,
so it has heard what all others sent in theirs, which they did after they had ended call n: they have taken what came in
call n and put the sentinel back.

Loads that poll are volatile: of system scope, past the L1.
"""

import triton
import triton.language as tl


@triton.jit
def put(at, values, mask):
    """Store values at another rank's addresses, pointers to integers of the values' size. Returns the stored bits."""
    bits = values.to(at.dtype.element_ty, bitcast=True)
    # of the sentinel all bits but the sign: another NaN
    bits = tl.where(bits == -1, (1 << (bits.dtype.primitive_bitwidth - 1)) - 1, bits)
    tl.store(at, bits, mask=mask)
    return bits


@triton.jit
def take(at, mask, aborted, dtype: tl.constexpr, MOST_POLLS: tl.constexpr = 0):
    """The values that come to these addresses, pointers to integers of this rank, as ``dtype``.

    The addresses are the same, and in the same order, for all who wait, and hold the sentinel again afterwards. No two
    warps may wait for one address, as they would if the tile has fewer elements than its layout has places. Where the
    mask is off it gives 0. Ends with any values once ``aborted``, a pointer to int32, is not 0. After ``MOST_POLLS``,
    unless that is 0, it traps (CUDA alone): what the host next asks of the GPU is an error.
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
