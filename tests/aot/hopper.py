"""The Gluon kernels of sm_90 for tests/aot: calls of attention that take them."""

import torch

from paged_ops import layouts
from paged_ops.lowerings import gpu as lowering
from tests.aot.compiler import Variant, both, gpu
from tests.aot.latent import indexing

EXPECT = {"cuda:90": (r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor\.4d", r"setmaxnreg\.inc")}
# Few query rows: they are the columns of products, and the first operand of some products is transposed.
COLUMNS = {"cuda:90": (r"wgmma\.mma_async\.sync\.aligned\.m64n16k16.* 1, 1, 1, 0;", r"setmaxnreg\.inc")}
# Both products take numbers that were fp8 from registers; their other operands are 64 query rows.
LATENT_FP8 = {"cuda:90": (r"\.entry latent_fp8_wide_kernel", r"wgmma\.mma_async\.sync\.aligned\.m64n64k16.*\}, \{")}
# Copies of rows of the cache, 16 bytes each, which arrive at a barrier.
SELECTED = {"cuda:90": (r"cp\.async\.cg\.shared\.global.* 0x10, ", r"cp\.async\.mbarrier\.arrive", r"setmaxnreg\.inc")}
# Copies of 16 bytes, matrix instructions of warps, and numbers in other programs' shared memory.
ONE = {
    "cuda:90": (
        r"cp\.async\.cg\.shared\.global.* 0x10, ",
        r"mma\.sync\.aligned\.m16n8k16",
        r"st\.shared::cluster\.f32",
    )
}
# Scores by TMA; fp8 keys are widened in registers.
INDEX = {
    "cuda:90": (
        r"\.entry scores_hopper_kernel",
        r"cp\.async\.bulk\.tensor\.2d",
        r"wgmma\.mma_async\.sync\.aligned\.m64n64k16.*\}, \{",
    )
}
SM_90 = ("cuda:90",)
# The warpgroup that computes scores keeps the addresses of query rows in registers, and spills some numbers.
LATENT_SPILLS = {(3, 6): 40, (3, 7): 48, (3, 8): 288, (3, 9): 200}
# As there; where the loading warps scale numbers, those of a tile are in their registers.
SELECTED_SPILLS = {(3, 6): 40, (3, 7): 40, (3, 8): 40, (3, 9): 184}
# With a soft cap consumers leave too few registers for the thread's number, which is stored once, at the start.
MIXED_SPILLS = {(3, 6): 8, (3, 7): 8, (3, 8): 16, (3, 9): 256}
# At D 256, with ranges, as without first tokens; 8 bytes at D 128 with a soft cap (triton 3.7).
FIRST_TOKENS_SPILLS = {(3, 6): 24, (3, 7): 40, (3, 8): 32, (3, 9): 184}
# 128 sums of a thread next to the scores; with first tokens and a cap (fp16) 200, without 8 to 32 (triton 3.6).
WIDE_SPILLS = {(3, 6): 200, (3, 7): 200, (3, 8): 464, (3, 9): 1024}
# While one segment is folded, registers hold its sums and those of the segments before. Bytes without TMA; with it 24
# and 40 (triton 3.6 and 3.7).
INVARIANT_SPILLS = {(3, 6): 96, (3, 7): 96, (3, 8): 464, (3, 9): 1024}
# The same with 208 registers.
INVARIANT_FP8_SPILLS = {(3, 6): 160, (3, 7): 176, (3, 8): 1024, (3, 9): 1024}
# The merge of many parts of heads of 512.
WIDE_MERGE_SPILLS = {(3, 7): 8}
# Most by split_kernel beside it; fp8_kernel spills 48 and 72 (triton 3.6 and 3.7), 8 without masks.
WIDE_FP8_SPILLS = {(3, 6): 152, (3, 7): 240, (3, 8): 1024, (3, 9): 1024}
N, B, T, S, M = 64, 16, 512, 4, 16


def prefill(
    layout, D, H, K, dtype=torch.bfloat16, sinks=False, ranges=0, T=T, S=S, stored=None, B=B, **features
):  # fmt: skip
    def call():
        kv_cache = gpu(*layouts.kv_cache_shape(layout, N, B, K, D), dtype=stored or dtype)
        kv_cache = layouts.kv_cache_view(layout, kv_cache)
        if layout == "X_PACKED":
            kv_cache, features["value_cache"] = layouts.split_kv_cache(kv_cache, K, D)
        tables, lens, starts = (gpu(*shape, dtype=torch.int32) for shape in ((S, M), (S,), (S + 1,)))
        given = {"sinks": gpu(H, dtype=torch.float32)} if sinks else {}
        if ranges:
            given["bidirectional_ranges"] = gpu(S, ranges, 2, dtype=torch.int32)
        query = gpu(T, H, D, dtype=dtype)
        lowering.paged_attention_with_lse(query, kv_cache, tables, lens, starts, D**-0.5, **given, **features)

    return call


def apart(D, Dv, H, K, B=16, dtype=torch.bfloat16, **features):
    def call():
        key, value = (gpu(N, B, K, size, dtype=dtype) for size in (D, Dv))
        tables, lens, starts = (gpu(*shape, dtype=torch.int32) for shape in ((S, M), (S,), (S + 1,)))
        query = gpu(T, H, D, dtype=dtype)
        lowering.paged_attention_with_lse(query, key, tables, lens, starts, D**-0.5, value_cache=value, **features)

    return call


def latent(H, dtype=torch.bfloat16, B=16, sinks=False, T=6, selected=0, stored=None, **features):
    def call():
        rows = layouts.has_row_scales(features.get("kv_cache_dtype", "auto"))
        kv_cache = gpu(N, B, layouts.ROW_BYTES, dtype=torch.uint8) if rows else gpu(N, B, 576, dtype=stored or dtype)
        tables, lens, starts = (gpu(*shape, dtype=torch.int32) for shape in ((S, M), (S,), (S + 1,)))
        given = {"sinks": gpu(H, dtype=torch.float32)} if sinks else {}
        if selected:
            given["selected_keys"] = gpu(T, 1, selected, dtype=torch.int32)
        query = gpu(T, H, 576, dtype=dtype)
        lowering.paged_attention_with_lse(
            query, kv_cache, tables, lens, starts, 0.1, value_head_size=512, **given, **features
        )

    return call


VARIANTS = [
    Variant("hopper-latent-h128", latent(128, B=64), EXPECT, spills=LATENT_SPILLS),
    Variant(
        "hopper-latent-fp8-h128-and-h80-fp16-masks",
        both(
            latent(128, B=64, stored=torch.float8_e4m3fn),
            latent(80, torch.float16, sinks=True, stored=torch.float8_e5m2, sliding_window=100, soft_cap=30.0),
        ),
        LATENT_FP8,
        spills={(3, 6): 16, (3, 7): 16, (3, 8): 32, (3, 9): 104},
    ),
    Variant(
        "hopper-latent-h20-fp16-window-cap",
        latent(20, torch.float16, sinks=True, sliding_window=100, soft_cap=30.0),
        EXPECT,
        spills=LATENT_SPILLS,
    ),
    Variant(
        "hopper-invariant-by-tma-by-copies-and-by-elements",
        both(
            prefill("NHD", 128, 32, 8, batch_invariant=True),
            prefill("NHD", 64, 32, 8, torch.float16, T=4, B=12, batch_invariant=True),
            prefill("X_PACKED", 128, 32, 8, batch_invariant=True),
            prefill("NHD", 128, 8, 1, T=8, S=8, batch_invariant=True),
            prefill("HND", 64, 64, 4, torch.float16, T=80, S=80, batch_invariant=True),
        ),
        {
            "cuda:90": (
                *EXPECT["cuda:90"],
                r"cp\.async\.cg\.shared\.global",
                r"wgmma\.mma_async.*m64n8k16",
                r"wgmma\.mma_async.*m64n16k16",
                r"\.entry invariant_items_kernel",
                # It asks for no registers while it runs: see invariant_few.py.
                r"(?s)\.entry invariant_few_kernel(?:(?!setmaxnreg).)*\.entry invariant_states_kernel",
                r"\.entry invariant_states_kernel",
            )
        },
        spills=INVARIANT_SPILLS,
    ),
    Variant(
        "hopper-invariant-decodes-beside-prompts",
        both(
            prefill("NHD", 128, 32, 8, T=2111, S=64, batch_invariant=True),
            prefill("HND", 64, 28, 4, torch.float16, T=2511, S=64, batch_invariant=True),
        ),
        {
            "cuda:90": (
                *EXPECT["cuda:90"],
                r"wgmma\.mma_async.*m64n8k16",
                r"cp\.async\.bulk\.tensor\.2d",
                r"\.entry invariant_mixed_kernel",
            )
        },
        spills=INVARIANT_SPILLS,
    ),
    Variant(
        "hopper-latent-h16-and-h8-fp16-two-tokens-window-cap",
        both(
            latent(16, B=64, T=4),
            latent(8, torch.float16, sinks=True, sliding_window=100, soft_cap=30.0),
        ),
        COLUMNS,
    ),
    Variant(
        "hopper-d512-and-fp16-first-tokens-cap",
        both(
            prefill("NHD", 512, 32, 4),
            prefill("HND", 512, 8, 1, torch.float16, True, sliding_window=100, num_first_tokens=4, soft_cap=30.0),
        ),
        {"cuda:90": (*EXPECT["cuda:90"], r"\.entry dense_kernel")},
        spills=WIDE_SPILLS,
    ),
    Variant(
        "hopper-one-sequence-and-few-d512-8-rows-and-16-fp16-window-cap-and-two-tokens-chunk",
        both(
            prefill("NHD", 128, 32, 8, T=1, S=1, B=128),
            prefill("NHD", 128, 8, 1, T=1, S=1),
            prefill("HND", 128, 32, 32, T=1, S=1),
            prefill("NHD", 512, 32, 4, T=4),
            prefill("NHD", 512, 16, 1, torch.float16, True, T=4, sliding_window=100, soft_cap=30.0),
            prefill("HND", 512, 16, 2, T=8, B=64, attention_chunk=300),
        ),
        {
            "cuda:90": (
                *ONE["cuda:90"],
                r"\.entry one_sequence_kernel",
                r"wgmma\.mma_async\.sync\.aligned\.m64n8k16.* 1, 1, 1, 0;",
                r"wgmma\.mma_async\.sync\.aligned\.m64n16k16.* 1, 1, 1, 0;",
                r"cp\.async\.bulk\.tensor\.4d",
                r"\.entry few_kernel",
            )
        },
        spills=WIDE_MERGE_SPILLS,
    ),
    Variant(
        "hopper-index-bf16-e4m3-e5m2-and-selected-h16-h128-h64",
        both(
            indexing(64, B=64),
            indexing(64, B=64, token_scales=True, columns=1024),
            indexing(16, B=128, causal=False),
            indexing(128, B=64, dtype=torch.float16, stored=torch.float8_e5m2, scale=-1.0),
            latent(16, B=64, T=64, selected=2048),
            latent(128, T=64, selected=2048),
            latent(64, T=300, selected=2048),
        ),
        {"cuda:90": (*INDEX["cuda:90"], *SELECTED["cuda:90"], r"barrier\.cluster\.arrive\.aligned")},
        spills=SELECTED_SPILLS,
    ),
    Variant(
        "hopper-selected-h16-h128-fp8-ds-mla-and-h8-h20-fp16-blocks-window",
        both(
            latent(16, T=64, selected=2048, kv_cache_dtype="fp8_ds_mla"),
            latent(128, T=64, selected=2048, kv_cache_dtype="fp8_ds_mla"),
            latent(8, torch.float16, T=300, selected=100, selected_block_size=8),
            latent(20, torch.float16, selected=2000, sliding_window=100),
        ),
        SELECTED,
        spills=SELECTED_SPILLS,
    ),
    Variant(
        "hopper-mixed-and-shares",
        both(
            prefill("NHD", 128, 32, 8, T=2111, S=64),
            prefill("HND", 64, 28, 4, torch.float16, True, T=2511, S=64, attention_chunk=300, soft_cap=30.0),
            prefill("NHD", 128, 64, 8, sinks=True, T=2111, S=64, sliding_window=100, soft_cap=30.0),
            prefill("NHD", 128, 16, 16, T=2111, S=64, causal=False),
            prefill("NHD", 128, 32, 8, T=16),  # shares
        ),
        {
            "cuda:90": (
                *EXPECT["cuda:90"],
                r"wgmma\.mma_async.*m64n8k16",
                r"cp\.async\.bulk\.tensor\.2d",
                r"\.entry mixed_kernel",
            )
        },
        spills=MIXED_SPILLS,
    ),
    Variant(
        "hopper-invariant-fp8",
        both(
            prefill("NHD", 128, 32, 8, stored=torch.float8_e4m3fn, batch_invariant=True),
            prefill("NHD", 64, 32, 8, torch.float16, T=80, S=80, stored=torch.float8_e5m2, batch_invariant=True),
            prefill("X_PACKED", 128, 32, 8, T=500, S=20, stored=torch.float8_e4m3fn, batch_invariant=True),
            prefill("NHD", 128, 32, 8, T=4, B=12, stored=torch.float8_e5m2, batch_invariant=True),
        ),
        {
            "cuda:90": (
                *EXPECT["cuda:90"],
                r"cp\.async\.cg\.shared\.global",
                r"\.entry invariant_fp8_kernel",
                r"\.entry invariant_decode_kernel",
                r"mma\.sync\.aligned\.m16n8k16",
            )
        },
        spills=INVARIANT_FP8_SPILLS,
    ),
    Variant(
        "hopper-prefill-hnd-d64-g8-sinks-fp16-and-over-fp8",
        both(
            prefill("HND", 64, 64, 8, torch.float16, True, causal=False),
            prefill("HND", 64, 64, 8, torch.float16, True, stored=torch.float8_e5m2, sliding_window=100),
            prefill("NHD", 96, 32, 8, stored=torch.float8_e4m3fn),  # the Triton kernel
        ),
        {"cuda:90": (*EXPECT["cuda:90"], r"\.entry fp8_kernel")},
        spills={(3, 8): 8, (3, 9): 72},  # split_kernel, over e5m2
    ),
    Variant("hopper-prefill-nhd-d256-g4", prefill("NHD", 256, 16, 4), EXPECT, spills={(3, 9): 152}),
    Variant(
        "hopper-prefill-nhd-d128-g8-window-cap",
        prefill("NHD", 128, 64, 8, sliding_window=128, soft_cap=30.0),
        EXPECT,
        spills={(3, 8): 8, (3, 9): 40},
    ),
    Variant(
        "hopper-prefill-nhd-d64-g4-three-consumers-endless-chunk",
        both(
            prefill("NHD", 64, 32, 8, attention_chunk=1 << 33, T=8192),
            prefill("NHD", 64, 64, 8, torch.float16, True, T=8192),
        ),
        EXPECT,
        may_spill=SM_90,
    ),
    Variant(
        "hopper-prefill-d256-g2-ranges-window-and-over-fp8-window-cap-and-fp16-sinks",
        both(
            prefill("NHD", 256, 8, 4, ranges=8, sliding_window=1024),
            prefill("NHD", 256, 16, 4, stored=torch.float8_e4m3fn, sliding_window=128, soft_cap=30.0),
            prefill("HND", 256, 16, 8, torch.float16, True, stored=torch.float8_e5m2, sliding_window=100),
        ),
        {"cuda:90": (*EXPECT["cuda:90"], r"\.entry dense_kernel", r"\.entry fp8_kernel")},
        spills=WIDE_FP8_SPILLS,
    ),
    Variant(
        "hopper-first-tokens-d128-g8-and-shares-and-d64-three-consumers-ranges",
        both(
            prefill("NHD", 128, 64, 8, sliding_window=1000, num_first_tokens=4, soft_cap=30.0),
            prefill("NHD", 128, 64, 1, T=4, sliding_window=1000, num_first_tokens=130),  # shares
            prefill("NHD", 64, 32, 8, T=8192, sliding_window=2000, num_first_tokens=4, sinks=True),
            prefill("NHD", 256, 8, 4, ranges=8, sliding_window=1024, num_first_tokens=64),
        ),
        {"cuda:90": (*EXPECT["cuda:90"], r"\.entry dense_kernel", r"\.entry shares_kernel")},
        spills=FIRST_TOKENS_SPILLS,
    ),
    Variant("hopper-prefill-k192-v128-g1", apart(192, 128, 16, 16), EXPECT, spills={(3, 9): 216}),
    Variant(
        "hopper-prefill-nhd-d112-g4-and-hnd-d80-window",
        both(prefill("NHD", 112, 16, 4), prefill("HND", 80, 16, 4, torch.float16, sliding_window=100)),
        EXPECT,
        spills={(3, 9): 264},
    ),
]
