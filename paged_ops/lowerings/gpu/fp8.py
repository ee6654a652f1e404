"""float8 in integer arithmetic, with the same bits on every target. Many GPUs have no conversion that rounds and
saturates, Triton refuses e4m3fn on some, and its interpreter neither saturates nor rounds correctly.

An fp8 tensor is passed to a kernel as uint8, and its format as one of the constants below.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from paged_ops.lowerings.gpu.target import Target

E4M3FN = tl.constexpr(1)  # bias 7, largest 448, no infinities, NaN 0x7f
E5M2 = tl.constexpr(2)  # bias 15, largest 57344, the upper byte of a float16
E4M3FNUZ = tl.constexpr(3)  # bias 8, largest 240, no infinities, no -0, NaN 0x80
E5M2FNUZ = tl.constexpr(4)  # bias 16, largest 57344, no infinities, no -0, NaN 0x80

FP8_FORMATS = {
    torch.float8_e4m3fn: E4M3FN.value,
    torch.float8_e5m2: E5M2.value,
    torch.float8_e4m3fnuz: E4M3FNUZ.value,
    torch.float8_e5m2fnuz: E5M2FNUZ.value,
}


def of_both(asm: str) -> Any:
    """PTX for e4m3 and for e5m2, from PTX with TYPE in place of the format."""
    return [tl.constexpr(asm.replace("TYPE", each)) for each in ("e4m3", "e5m2")]


# PTX of sm_89, for the functions below.
ROUND_E4M3, ROUND_E5M2 = of_both(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.TYPEx2.f32 lo, $2, $1; cvt.rn.satfinite.TYPEx2.f32 hi, $4, $3;"
    " mov.b32 $0, {lo, hi}; }"
)
WIDEN_E4M3, WIDEN_E5M2 = of_both(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.TYPEx2 $0, lo; cvt.rn.f16x2.TYPEx2 $1, hi; }"
)
HALVES_E4M3, HALVES_E5M2 = of_both(
    "{ .reg .b16 first, second; mov.b32 {first, second}, $2;"
    " cvt.rn.f16x2.TYPEx2 $0, first; cvt.rn.f16x2.TYPEx2 $1, second; }"
)
PAIRS_E4M3 = tl.constexpr(
    "{ .reg .b32 apart; .reg .b16 lower, upper; prmt.b32 apart, $2, 0, 0x3120; mov.b32 {lower, upper}, apart;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
# A number in e5m2 is the upper byte of a float16.
PAIRS_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
WORDS_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")


def stored_format(stored: torch.dtype, dtype: torch.dtype, target: Target) -> int:
    """The format of a cache whose elements are ``stored`` in ``dtype``; uint8 has the target's own format. 0: not
    fp8."""
    bits = FP8_FORMATS.get(stored, 0)
    return bits + 2 if bits and dtype == torch.uint8 and target.fp8_is_fnuz else bits


@triton.jit
def encode_fp8(real, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """float32 to the bits of an fp8 format: to nearest even, saturated, NaN kept. NATIVE: by a PTX instruction (from
    sm_89 on)."""
    if NATIVE and FORMAT <= 2:
        asm: tl.constexpr = ROUND_E4M3 if FORMAT == 1 else ROUND_E5M2
        return tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [real], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return _round_bits(real, FORMAT)


@triton.jit
def divide(real, scale, SCALES: tl.constexpr, QUICK: tl.constexpr):
    """``real / scale`` to nearest even, as precisely as fp8 needs, by one division per scale and five operations per
    number.

    Two corrections by the remainder round ``real * (1 / scale)`` correctly (Markstein 1990, Computation of elementary
    functions on the IBM RISC System/6000). Quotients that saturate or vanish in fp8 need no correction, which would
    turn infinities into NaN.
    """
    if not QUICK:
        return tl.div_rn(real, scale)
    usual = (scale > 2.0**-60) & (scale < 2.0**60)  # else an intermediate result may over- or underflow
    if SCALES > 1:
        usual = tl.min(usual.to(tl.int32)) > 0
    if usual:
        inverse = tl.div_rn(1.0, scale)
        rough = real * inverse
        quotient = tl.fma(tl.fma(-rough, scale, real), inverse, rough)
        quotient = tl.fma(tl.fma(-quotient, scale, real), inverse, quotient)
        size = tl.abs(rough)
        quotient = tl.where((size > 2.0**-40) & (size < 2.0**20), quotient, rough)
    else:
        quotient = tl.div_rn(real, scale)
    return quotient


@triton.jit
def decode_fp8(bits, FORMAT: tl.constexpr):
    """The bits of an fp8 format as float16, exactly: float16 has all exponents of fp8."""
    wide = bits.to(tl.uint16)
    if FORMAT == 2:
        real = (wide << 8).to(tl.float16, bitcast=True)
    elif FORMAT == 4:
        # The largest exponent would be infinity in float16, so convert through float32; subnormals are special.
        magnitude = (wide & 0x7F).to(tl.uint32)
        normal = ((magnitude << 21) + ((127 - 16) << 23)).to(tl.float32, bitcast=True)
        size = tl.where(magnitude < 4, magnitude.to(tl.float32) * 2.0**-17, normal)
        real = tl.where(wide == 0x80, float("nan"), tl.where(wide < 0x80, size, -size)).to(tl.float16)
    else:
        # Exponent and mantissa, shifted to float16's bits, are too small by the difference of the biases.
        shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        FACTOR: tl.constexpr = 256.0 if FORMAT == 1 else 128.0
        real = shifted.to(tl.float16, bitcast=True) * FACTOR
        is_nan = (wide & 0x7F) == 0x7F if FORMAT == 1 else wide == 0x80
        real = tl.where(is_nan, float("nan"), real).to(tl.float16)
    return real


@triton.jit
def widen_fp8(tile):
    """A tile of a target's own fp8 type as float16, exactly, two numbers per instruction (PTX ``cvt`` from sm_89)."""
    asm: tl.constexpr = WIDEN_E4M3 if tile.dtype == tl.float8e4nv else WIDEN_E5M2
    bits = tile.to(tl.uint8, bitcast=True)
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [bits], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def widen_pairs(pairs, E4M3: tl.constexpr):
    """int16s of two fp8 numbers each, as float16 by a PTX instruction: the lower numbers, and the upper numbers."""
    asm: tl.constexpr = PAIRS_E4M3 if E4M3 else PAIRS_E5M2
    registers: tl.constexpr = "=r,=r,r" if E4M3 else "=&r,=r,r"
    return tl.inline_asm_elementwise(asm, registers, [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def widen_halves(pairs, E4M3: tl.constexpr):
    """int16s of two fp8 numbers each, as float16 by a PTX instruction. For every two adjacent int16s in a thread's
    registers: the two numbers of the first, and the two numbers of the second."""
    asm: tl.constexpr = HALVES_E4M3 if E4M3 else HALVES_E5M2
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def widen_words(words, E4M3: tl.constexpr):
    """int32s of four fp8 numbers each, as int32s of two float16 numbers each, by a PTX instruction: the first two
    numbers, and the last two."""
    asm: tl.constexpr = HALVES_E4M3 if E4M3 else WORDS_E5M2
    registers: tl.constexpr = "=r,=r,r" if E4M3 else "=&r,=r,r"
    return tl.inline_asm_elementwise(asm, registers, [words], (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def _round_bits(real, FORMAT: tl.constexpr):
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 or FORMAT == 3 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15 if FORMAT == 2 else 8 if FORMAT == 3 else 16
    LARGEST: tl.constexpr = 0x43E00000 if FORMAT == 1 else 0x43700000 if FORMAT == 3 else 0x47600000  # as float32
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = real.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST)
    # Adding half a unit in the last place, minus one if that bit is even, makes truncation round to nearest even.
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Adding a power of two whose last bit is the smallest subnormal rounds to a multiple of that subnormal.
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    MAGIC_BITS: tl.constexpr = (127 + 1 - BIAS - MANTISSA + 23) << 23
    subnormal = (magnitude.to(tl.float32, bitcast=True) + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < ((127 + 1 - BIAS) << 23), subnormal, normal)
    sign = (bits >> 24) & 0x80
    if FORMAT == 1 or FORMAT == 2:
        code = tl.where(is_nan, 0x7F, code) | sign
    else:
        code = tl.where(is_nan, 0x80, tl.where(code == 0, 0, code | sign))
    return code.to(tl.uint8)
