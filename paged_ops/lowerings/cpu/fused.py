"""Attention on the CPU as one C++ function, ``fused.cpp`` and its headers, for every feature but block-sparse.

Torch ops gather the keys of a sequence before the matmul: each byte is read, written and read again. In a decode, the
C++ reads each byte once. It is compiled at the first call that it can serve, in about three seconds
(:mod:`paged_ops.cpp`). Without a compiler, the torch ops of :mod:`paged_ops.lowerings.cpu` serve everything, more
slowly and within the same error budget.
"""

from __future__ import annotations

import array
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paged_ops import cpp
from paged_ops.cpp import own_folder as own_folder
from paged_ops.features import Features, in_use
from paged_ops.layouts import PagedKV

SOURCE = Path(__file__).with_suffix(".cpp")
CELLS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # FORMATS of the source
PLAIN = CELLS[:3]  # dtypes of query and out
TENSORS = struct.Struct("=17q")  # Tensors of work.h
# Supported arguments of attention. Other calls go to the torch ops.
APPLIES = frozenset(
    {
        *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale", "kv_cache_dtype"),
        *("causal", "sliding_window", "attention_chunk", "bidirectional_ranges", "num_first_tokens"),
        "ranges_in_window",
        *("soft_cap", "alibi_slopes", "sinks", "batch_invariant"),
    }
)
NAMES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")  # supported values of kv_cache_dtype
# Compiler flags by CPU capability: only instructions that torch itself uses, so that machines can share a folder.
FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}


class Call(ctypes.Structure):
    """The argument of the C++ function: ``Call`` of ``work.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "block_tables", "seq_lens", "query_start_loc")),
        *((name, ctypes.c_void_p) for name in ("sequences", "alibi_slopes", "sinks", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("ranges", "out", "lse")),
        ("query_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 5),
        ("value_strides", ctypes.c_int64 * 4),
        ("table_strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("num_sequences", "T", "N", "M", "H", "K", "D", "Dv", "B", "x")),
        *((name, ctypes.c_int64) for name in ("cell", "query_cell", "out_cell")),
        *((name, ctypes.c_int64) for name in ("causal", "window", "chunk", "first_tokens", "R", "threads")),
        *((name, ctypes.c_int64) for name in ("batch_invariant", "ranges_in_window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


def attend(
    query: Tensor,
    paged: PagedKV,
    stored: torch.dtype,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    sequences: Sequence[int],
    scale: float,
    f: Features,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill the rows of ``sequences`` in out ``[T, H, Dv]`` and lse float32 ``[T, H]``. Only for calls that
    :func:`serves`.

    Values are not checked: they must be valid, and no other thread may write block_tables meanwhile.
    """
    function = compiled()
    assert function is not None, "the C++ function was not compiled"
    call = described(query, paged, stored, block_tables, len(seq_lens), scale, f, out.dtype)
    assert lse.dtype == torch.float32, "lse must be float32"
    # Names keep them alive until the call returns.
    integers = [array.array("i", each) for each in (seq_lens, query_start_loc, sequences)]
    call.seq_lens, call.query_start_loc, call.sequences = (each.buffer_info()[0] for each in integers)
    call.num_sequences = len(sequences)
    call.block_tables = block_tables.data_ptr()
    call.query, call.key, call.value = (each.data_ptr() for each in (query, paged.key, paged.value))
    call.out, call.lse = out.data_ptr(), lse.data_ptr()
    vectors = vectors_of(f, paged.num_kv_heads)
    for name, vector in vectors.items():
        setattr(call, name, vector.data_ptr())
    function(ctypes.byref(call), None)


def described(
    query: Tensor,
    paged: PagedKV,
    stored: torch.dtype,
    block_tables: Tensor,
    S: int,
    scale: float,
    f: Features,
    out: torch.dtype,
) -> Call:
    """A call without its addresses."""
    assert {query.dtype, out} <= {*PLAIN}, "query and out must be float32, float16 or bfloat16"
    assert query.stride(2) == 1, "the last dimension of query must be contiguous"
    return Call(
        query_strides=query.stride()[:2],
        key_strides=paged.key.stride(),
        value_strides=paged.value.stride(),
        table_strides=block_tables.stride(),
        num_sequences=S,
        T=query.shape[0],
        N=paged.num_blocks,
        M=block_tables.shape[1],
        H=query.shape[1],
        K=paged.num_kv_heads,
        D=paged.head_size,
        Dv=paged.value_head_size,
        B=paged.block_size,
        x=paged.key.shape[4],
        cell=CELLS.index(stored),
        query_cell=CELLS.index(query.dtype),
        out_cell=CELLS.index(out),
        causal=f.causal,
        window=min(f.sliding_window, 2**31 - 1),  # as positions, so that differences do not overflow
        chunk=f.attention_chunk,
        first_tokens=f.num_first_tokens if f.sliding_window else 0,
        R=0 if f.bidirectional_ranges is None else f.bidirectional_ranges.shape[1],
        threads=torch.get_num_threads(),
        batch_invariant=f.batch_invariant,
        ranges_in_window=f.ranges_in_window,
        scale=scale,
        soft_cap=f.soft_cap,
    )


def vectors_of(f: Features, K: int) -> dict[str, Tensor]:
    """The tensors among the features by the field names of :class:`Call`: contiguous, one scale per head.

    Ranges are copied: another thread may write them while C++ divides the work by them.
    """
    ranges = None if f.bidirectional_ranges is None else f.bidirectional_ranges.clone()
    given = {"alibi_slopes": f.alibi_slopes, "sinks": f.sinks, "ranges": ranges}
    scales = {"k_scale": f.k_scale, "v_scale": f.v_scale}
    vectors = {name: each.contiguous() for name, each in given.items() if each is not None}
    return vectors | {name: each.expand(K).contiguous() for name, each in scales.items() if each is not None}


def serves(stored: torch.dtype, f: Features) -> bool:
    """Whether :func:`attend` can run with these features here."""
    return not reasons_against(stored, f)


def reasons_against(stored: torch.dtype, f: Features) -> list[str]:
    """Why :func:`attend` cannot run with these features here."""
    reasons = sorted(in_use(f) - APPLIES)
    if stored not in CELLS:
        reasons.append(f"kv_cache: expected one of {CELLS}, got {stored}")
    if f.kv_cache_dtype not in NAMES:
        reasons.append(f"kv_cache_dtype: expected one of {NAMES}, got {f.kv_cache_dtype!r}")
    if not reasons and compiled() is None:
        reasons.append("no C++ compiler could build it")
    return reasons


@functools.cache
def compiled() -> Callable[..., int] | None:
    """The C++ function, or None if no compiler can build it."""
    return cpp.built(ATTENTION, FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))


def load(compiler: Sequence[str], processor: Sequence[str], folder: Path) -> Callable[..., int]:
    """The function from a library in folder: see :func:`paged_ops.cpp.load`."""
    return cpp.load(ATTENTION, compiler, processor, folder)


def has_matrix_unit() -> bool:
    """Whether the C++ function uses the processor's matrix unit (AMX) for bfloat16."""
    function = compiled()
    return function is not None and bool(function(None, None))


ATTENTION = cpp.Source(
    SOURCE,
    "paged_attention",
    Call,
    ctypes.c_int64,
    "attention",
    "attention on the CPU",
    ("-fopenmp",),
    more=(ctypes.c_char_p,),
)
