"""The variants of the attention kernels that ship, for tests/aot: calls on tensors that claim to be on a GPU.

A call with few rows compiles the split and merge kernels, one with many the prefill kernel too.
"""

from __future__ import annotations

from typing import Any

import torch

from paged_ops import layouts
from paged_ops.lowerings import gpu as lowering
from tests.aot.compiler import Variant, gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What each kernel's dot products become, and keys and values in 16 bytes at once: asynchronously on CUDA.
SPLIT = {
    "cuda": (r"mma\.sync", r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10,"),
    "hip:gfx9": (r"v_mfma",),
    "hip:gfx11": (r"v_wmma",),
}
PREFILL = {**SPLIT, "cuda:90": (r"wgmma\.mma_async",), "cuda:100": (r"tcgen05\.mma",)}
WGMMA = {"cuda:90": (r"wgmma\.mma_async",), "hip:gfx9": (r"v_mfma",)}
MASKS = {"sliding_window": 128, "attention_chunk": 512}
# The RDNA architectures have no tiles of their own yet: 256 registers per lane are too few for the others' tiles.
RDNA = ("hip:gfx11",)
H200 = (*RDNA, "cuda:90")  # the Hopper kernel spills 32 to 48 bytes of a soft cap at D 256
ROWS = {"decode": 4, "speculative": 64, "prefill": 2048}


def call(
    batch: str,
    dtype: torch.dtype = BF16,
    stored: torch.dtype | None = None,
    *,
    D: int = 128,
    Dv: int | None = None,
    heads: tuple[int, int] = (32, 8),
    B: int = 16,
    layout: str = "NHD",
    lse: bool = False,
    per_head: tuple[str, ...] = (),
    per_tensor: tuple[str, ...] = (),
    ranges: int = 0,
    offset: int = 0,
    **features: Any,
) -> Any:
    def run() -> None:
        (H, K), T, N, S, M = heads, ROWS[batch], 4, 4, 256
        if Dv is not None:
            kv_cache, features["value_cache"] = (
                gpu(N * B * K * size + offset, dtype=stored or dtype)[offset:].view(N, B, K, size) for size in (D, Dv)
            )
        else:
            storage = gpu(*layouts.kv_cache_shape(layout, N, B, K, D), dtype=stored or dtype)
            kv_cache = layouts.kv_cache_view(layout, storage)
            if layout == "X_PACKED":
                kv_cache, features["value_cache"] = layouts.split_kv_cache(kv_cache, K, D)
        named = {name: gpu(H, dtype=FP32) for name in per_head} | {name: gpu(1, dtype=FP32) for name in per_tensor}
        tables, lens, starts = (gpu(*shape, dtype=torch.int32) for shape in ((S, M), (S,), (S + 1,)))
        if ranges:
            named["bidirectional_ranges"] = gpu(S, ranges, 2, dtype=torch.int32)
        op = lowering.paged_attention_with_lse if lse else lowering.paged_attention
        op(gpu(T, H, D, dtype=dtype), kv_cache, tables, lens, starts, D**-0.5, **features, **named)

    return run


VARIANTS = [
    # No tile of these kernels was tuned: some spill what a row sees. Without a cap sm_90 has another kernel.
    Variant(
        "attention-invariant-bf16-cap",
        call("prefill", soft_cap=30.0, batch_invariant=True),
        WGMMA,
        may_spill=("cuda", "hip"),
    ),
    Variant("attention-bf16", call("prefill"), PREFILL, may_spill=RDNA, spills={(3, 9): 40}),
    Variant(
        "attention-fp16-d64-sinks-window",
        call("prefill", FP16, D=64, per_head=("sinks",), **MASKS),
        PREFILL,
        may_spill=RDNA,
        spills={(3, 9): 48},
    ),
    Variant("attention-fp32", call("prefill", FP32, D=64), may_spill=RDNA),
    Variant(
        "attention-d256-cap", call("prefill", D=256, heads=(8, 4), soft_cap=50.0, lse=True), PREFILL, may_spill=H200
    ),
    # Accumulators of 64 rows take half of the registers, so some of the addresses are spilled; fp8 is converted there.
    Variant(
        "attention-d512-cap",
        call("prefill", D=512, heads=(32, 4), soft_cap=50.0, sliding_window=1024, lse=True),
        PREFILL,
        may_spill=H200,
    ),
    Variant(
        "attention-d512-e4m3-g40",
        call("prefill", stored=E4M3, D=512, heads=(80, 2), per_tensor=("k_scale", "v_scale")),
        PREFILL,
        may_spill=(*RDNA, "cuda"),
    ),
    Variant(
        "attention-d192-dv128", call("decode", D=192, Dv=128, heads=(32, 4)), SPLIT, may_spill=RDNA, spills={(3, 9): 8}
    ),
    # Elements before the first: caches that no vector load can read.
    Variant(
        "attention-narrow-values-offset",
        call("prefill", FP16, D=64, Dv=32, offset=1),
        may_spill=RDNA,
        spills={(3, 6): 56},
    ),
    # On sm_90 this is fp8_kernel of hopper_fp8.py.
    Variant(
        "attention-e4m3",
        call("prefill", stored=E4M3, per_tensor=("k_scale", "v_scale")),
        PREFILL,
        may_spill=RDNA,
        spills={(3, 9): 168},
    ),
    Variant("attention-e5m2-decode-two-heads", call("decode", FP16, E5M2, heads=(256, 64)), SPLIT, may_spill=RDNA),
    # Values that lie token by token take more addresses than CUDA's registers hold; the layout is ROCm's.
    Variant("attention-x-packed-decode", call("decode", FP16, layout="X_PACKED"), SPLIT, may_spill=(*RDNA, "cuda")),
    Variant(
        "attention-b1056-g71-alibi",
        call("decode", B=1056, heads=(71, 1), D=64, per_head=("alibi_slopes",)),
        WGMMA,
        may_spill=RDNA,
    ),
    Variant("attention-g71", call("decode", heads=(71, 1)), may_spill=RDNA),
    # On sm_90 this is shares_kernel, which was run and timed like this; ptxas of Triton 3.9 needs more registers.
    Variant(
        "attention-speculative-d256",
        call("speculative", D=256),
        may_spill=RDNA,
        spills={(3, 6): 8, (3, 7): 8, (3, 8): 8, (3, 9): 136},
    ),
    Variant(
        "attention-decode-masks",
        call("decode", soft_cap=50.0, per_head=("alibi_slopes", "sinks"), **MASKS),
        {**SPLIT, "cuda:90": (*SPLIT["cuda"], r"ldmatrix\.sync[^;]*\.trans")},
        may_spill=RDNA,
    ),
    # The two ends of what each row sees stay in registers: 16 to 24 bytes too many where no tile was measured.
    Variant(
        "attention-ranges",
        call("prefill", ranges=8),
        PREFILL,
        may_spill=(*RDNA, "cuda:80", "cuda:100"),
        spills={(3, 9): 32},
    ),
    # The whole tiles of split_kernel, next to prefill, spill 8 to 40 bytes at D 256.
    Variant(
        "attention-ranges-d256-window",
        call("prefill", D=256, heads=(8, 4), ranges=3, **MASKS),
        PREFILL,
        may_spill=H200,
        targets=("cuda:90",),
    ),
    Variant(
        "attention-ranges-decode-window",
        call("decode", D=256, heads=(8, 4), ranges=8, **MASKS),
        spills={(3, 8): 8, (3, 9): 64},
        targets=("cuda:90",),
    ),
    Variant(
        "attention-ranges-in-window",
        call("prefill", D=64, ranges=4, ranges_in_window=True, **MASKS),
        PREFILL,
        spills={(3, 9): 48},
        targets=("cuda:90", "hip:gfx942"),
    ),
    Variant(
        "attention-ranges-speculative-fp8",
        call("speculative", stored=E4M3, ranges=1, sliding_window=512),
        spills={(3, 9): 56},
        targets=("cuda:90",),
    ),
    Variant("attention-sparse", call("prefill", D=96, block_sparse=[64, 16, 8, 0, 0, 0, 1]), PREFILL, may_spill=RDNA),
    Variant(
        "attention-noncausal-e4m3-out",
        call("decode", causal=False, heads=(64, 16), per_tensor=("output_scale",), lse=True),
        SPLIT,
        may_spill=RDNA,
        spills={(3, 7): 64, (3, 9): 40},  # in the merge, after the loop; with two heads also at the end of a unit
    ),
]
