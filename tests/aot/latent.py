"""The variants of the latent kernels that ship, for tests/aot: see attention.py."""

from __future__ import annotations

from typing import Any

import torch

from paged_ops.layouts import FP8_DS_INDEX, FP8_DS_MLA, INDEX_BYTES, ROW_BYTES
from paged_ops.lowerings import gpu as lowering
from paged_ops.lowerings.gpu.target import NEWEST_KNOWN, OLDEST_GLUON, TRITON
from tests.aot.attention import BF16, E4M3, FP16, FP32, MASKS, RDNA, SPLIT
from tests.aot.compiler import TARGETS, Variant, both, gpu

PATTERNS = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16.*\}, \{", r"ldmatrix.*x4\.trans", "setmaxnreg"
FROM_REGISTERS = {"cuda:90": PATTERNS} if OLDEST_GLUON <= TRITON <= NEWEST_KNOWN else {}
NOT_HOPPER = tuple(target for target in TARGETS if target != "cuda:90")


def attend(
    H: int,
    T: int = 4,
    dtype: torch.dtype = BF16,
    stored: torch.dtype | None = None,
    B: int = 64,
    R: int = 512,
    per_head: tuple[str, ...] = (),
    scaled_rows: bool = False,
    **features: Any,
) -> Any:
    def run() -> None:
        P, S = 64, 4
        kv_cache = gpu(8, B, R + P, dtype=stored or dtype)
        if scaled_rows:
            kv_cache, features["kv_cache_dtype"] = gpu(8, B, ROW_BYTES, dtype=torch.uint8), FP8_DS_MLA
        tables, lens, starts = (gpu(*shape, dtype=torch.int32) for shape in ((S, 64), (S,), (S + 1,)))
        named = {name: gpu(H, dtype=FP32) for name in per_head}
        if stored is not None:
            named["k_scale"] = gpu(1, dtype=FP32)
        query = gpu(T, H, R + P, dtype=dtype)
        lowering.paged_attention_with_lse(
            query, kv_cache, tables, lens, starts, 0.1, value_head_size=R, **named, **features
        )

    return run


def selecting(H: int, **options: Any) -> Any:
    """A call in which each of four tokens names 2048 keys."""

    def run() -> None:
        attend(H, **options, selected_keys=gpu(4, 1, 2048, dtype=torch.int32))()

    return run


def indexing(
    heads: int, T: int = 4, token_scales: bool = False, B: int = 16, dtype: torch.dtype = BF16,
    stored: torch.dtype | None = None, columns: int = 64, **options: Any,
) -> Any:  # fmt: skip
    """The indexer with heads of 128: of 2048 keys, or of 16 blocks. ``token_scales``: also the write to its cache.
    ``columns``: of the block table."""

    def run() -> None:
        k, S = 16 if options.get("per_head") else 2048, 4
        batch = tuple(gpu(*shape, dtype=torch.int32) for shape in ((S, columns), (S,), (S + 1,)))
        named = {} if options.get("per_head") else {"weights": gpu(T, heads, dtype=FP32), "relu": True}
        cache = gpu(8, B, 128, dtype=stored or dtype)
        if token_scales:
            cache, named["kv_cache_dtype"] = gpu(8, B, INDEX_BYTES, dtype=torch.uint8), FP8_DS_INDEX
            slots = gpu(T, dtype=torch.int64)
            lowering.latent_cache_write(gpu(T, 128), gpu(T, 0), cache, slots, kv_cache_dtype=FP8_DS_INDEX)
        if stored is not None:
            named["k_scale"] = gpu(1, dtype=FP32)
        lowering.select_keys(gpu(T, heads, 128, dtype=dtype), cache, *batch, k, **named, **options)

    return run


VARIANTS = [
    # The variants of the Gluon kernels for sm_90 are in hopper.py.
    Variant("latent-bf16-h128", attend(128), may_spill=RDNA, targets=NOT_HOPPER),
    Variant("latent-bf16-h40-r256", attend(40, R=256), {"cuda:90": (r"wgmma\.mma_async",)}, targets=("cuda:90",)),
    # On sm_90 these two go to the kernel in Gluon, if there is Gluon: left operands of matmuls come from registers.
    Variant("latent-e4m3-h32", attend(32, stored=E4M3), FROM_REGISTERS, may_spill=RDNA, spills={(3, 9): 24}),
    # sm_80 converts fp8 by bits; with 16 heads that spills 8 bytes.
    Variant("latent-rows-h16", attend(16, scaled_rows=True), FROM_REGISTERS, may_spill=(*RDNA, "cuda:80")),
    Variant(
        "latent-selected-rows-h16",
        selecting(16, scaled_rows=True),
        {"cuda": SPLIT["cuda"][:1]},
        may_spill=RDNA,
        targets=NOT_HOPPER,
    ),
    Variant("latent-invariant-h128", attend(128, batch_invariant=True), may_spill=("cuda",), targets=("cuda:90",)),
    Variant(
        "latent-selected-invariant-h16",
        selecting(16, batch_invariant=True),
        may_spill=RDNA,
        spills={(3, 8): 16},
        targets=("cuda:90",),
    ),
    Variant("latent-h16-b16", attend(16, dtype=FP16, B=16), SPLIT, targets=("cuda:80", "hip:gfx942")),
    Variant(
        "latent-fp32-h16", attend(16, dtype=FP32), spills={(3, 6): 8, (3, 9): 16}, targets=("cuda:90", "hip:gfx942")
    ),
    Variant(
        "latent-h71-masks",
        attend(71, 9, soft_cap=50.0, per_head=("alibi_slopes", "sinks"), **MASKS),
        spills={(3, 5): 256, (3, 6): 24, (3, 7): 48, (3, 8): 448, (3, 9): 928},
        targets=("cuda:90",),
    ),
    # The indexers of DeepSeek-V3.2 (decode and prompts) and of MiniMax-M3; see also hopper.py.
    Variant(
        "latent-index-bf16-h64",
        both(indexing(64), indexing(64, T=64)),
        {"cuda:90": (r"wgmma\.mma_async", r"cp\.async")},
        spills={(3, 7): 32},
        targets=("cuda:90", "hip:gfx942"),
    ),
    # Four programs per multiprocessor with few spills are faster than three with none. Blocks of 64 are in hopper.py.
    Variant(
        "latent-index-e4m3-h64",
        indexing(64, token_scales=True),
        {"cuda:90": (r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16.*\}, \{", r"cp\.async")},
        spills={(3, 5): 16, (3, 6): 32, (3, 7): 32},
        targets=("cuda:90", "cuda:80"),
    ),
    Variant(
        "latent-index-blocks",
        indexing(4, T=64, per_head=True, pool="max", block_size=128, local_blocks=1),
        spills={(3, 8): 8},
        targets=("cuda:90",),
    ),
]
