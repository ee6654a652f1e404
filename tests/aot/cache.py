"""The kernel variants of the cache ops that ship, for tests/aot: calls on tensors that claim to be on a GPU."""

import torch

from paged_ops import layouts
from paged_ops.lowerings import gpu as lowering
from paged_ops.lowerings.gpu import blocks, penalties
from paged_ops.lowerings.gpu import draw as draws
from paged_ops.lowerings.gpu.target import target_of
from tests.aot.compiler import Variant, both, gpu

LOAD, STORE = (rf"(global|buffer)_{op}_(dwordx4|b128)" for op in ("load", "store"))
WIDE = {"cuda": (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"), "hip": (LOAD, STORE)}
# fp8 of what 16 bytes of a 16-bit dtype hold is 8 bytes.
HALF = {
    "cuda": (WIDE["cuda"][0], r"st\.global\S*\.v[24]\.b32"),
    "hip": (LOAD, STORE.replace("(dwordx4|b128)", "(dwordx[24]|b64|b128)")),
}
FP8 = {"cuda:90": (r"cvt\.rn\.satfinite\.e4m3x2\.f32",), "cuda:100": (r"cvt\.rn\.satfinite\.e4m3x2\.f32",)}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N, B, K, D, T, S, M = 64, 16, 8, 128, 2048, 8, 16


def cache(layout, stored, head_size=D):
    storage = gpu(*layouts.kv_cache_shape(layout, N, B, K, head_size), dtype=stored)
    view = layouts.kv_cache_view(layout, storage)
    return layouts.split_kv_cache(view, K, head_size) if layout == "X_PACKED" else (view, None)


def write(layout="NHD", dtype=torch.bfloat16, stored=None, tokens=T, scales=0, head_size=D):
    def call():
        kv_cache, value_cache = cache(layout, stored or dtype, head_size)
        qkv = gpu(tokens, 6 * K, head_size, dtype=dtype)
        scale = gpu(scales, dtype=torch.float32) if scales else None
        slots = gpu(tokens, dtype=torch.int64)
        key, value = qkv[:, 4 * K : 5 * K], qkv[:, 5 * K :]
        lowering.reshape_and_cache(key, value, kv_cache, slots, value_cache=value_cache, k_scale=scale, v_scale=scale)

    return call


def gather(layout="NHD", dtype=torch.bfloat16, stored=None, scales=0):
    def call():
        kv_cache, value_cache = cache(layout, stored or dtype)
        scale = gpu(scales, dtype=torch.float32) if scales else None
        tables, lens = gpu(S, M, dtype=torch.int32), gpu(S, dtype=torch.int32)
        lowering.gather_kv(
            kv_cache, tables, lens, T, value_cache=value_cache, k_scale=scale, v_scale=scale, dtype=dtype
        )

    return call


def latent_rows():
    """A write and a gather of latent rows that hold their scales."""

    def call():
        kv_cache, name = gpu(N, B, layouts.ROW_BYTES, dtype=torch.uint8), layouts.FP8_DS_MLA
        both, slots = gpu(T, 576, dtype=torch.bfloat16), gpu(T, dtype=torch.int64)
        lowering.latent_cache_write(both[:, :512], both[:, 512:], kv_cache, slots, kv_cache_dtype=name)
        tables, lens = gpu(S, M, dtype=torch.int32), gpu(S, dtype=torch.int32)
        lowering.gather_kv(kv_cache, tables, lens, T, kv_cache_dtype=name, dtype=torch.bfloat16)

    return call


def copy(layout="NHD", dtype=torch.bfloat16, block=()):
    def call():
        caches = [gpu(N, *block, dtype=dtype)] if block else [cache(layout, dtype)[0] for _ in range(2)]
        lowering.copy_blocks(caches, gpu(3, 2, dtype=torch.int64))

    return call


def staged(to_host):
    def call():
        table = blocks._table([cache("NHD", torch.bfloat16)[0]], [cache("NHD", torch.bfloat16)[0]], gpu(1).device)
        staging, mapping = gpu(1, 3 * table.length, dtype=torch.uint8), gpu(3, 2, dtype=torch.int64)
        numbers = target_of(table.runs.device).numbers["swap_blocks"]
        blocks._launch(table, mapping, numbers, staging, gather=to_host, scatter=not to_host)

    return call


def merge(dtype=torch.bfloat16, head_size=D):
    def call():
        out, lse = gpu(T, 4 * K, head_size, dtype=dtype), gpu(T, 4 * K, dtype=torch.float32)
        lowering.merge_attention_states(out, lse, out, lse)

    return call


def draw(dtype=torch.bfloat16):
    def call():
        logits = gpu(S, 128256, dtype=dtype)
        draws.launch(logits, draws.likeliest(logits)[0], gpu(6, S, dtype=torch.int64))
        penalties.launch(logits, gpu(S, 8, dtype=torch.int64), gpu(S, dtype=torch.int64), T)

    return call


VARIANTS = [
    Variant("write and gather latent rows bf16", latent_rows(), {**WIDE, **FP8}),
    Variant("write NHD bf16", write(), WIDE),
    Variant("write NHD fp16, few tokens", write(dtype=torch.float16, tokens=64), WIDE),
    Variant("write HND bf16, D 120", write("HND", head_size=120), WIDE),
    Variant("write x-packed fp16", write("X_PACKED", dtype=torch.float16), WIDE),
    Variant("write NHD bf16 to e4m3, scale [1]", write(stored=E4M3, scales=1), {**HALF, **FP8}),
    Variant("write INTERLEAVED fp32 to e5m2, scale [K]", write("INTERLEAVED", torch.float32, E5M2, scales=K), HALF),
    Variant("write NHD bf16 to e4m3fnuz", write(stored=torch.float8_e4m3fnuz), HALF),
    Variant("gather NHD bf16", gather(), WIDE),
    Variant("gather x-packed e4m3 to bf16", gather("X_PACKED", stored=E4M3, scales=K)),
    Variant("copy NHD bf16, all layers", copy(), WIDE),
    Variant("copy blocks of 26 bytes", copy(dtype=torch.uint8, block=(26,))),
    Variant("swap, gather to staging", staged(True), WIDE),
    Variant("swap, scatter from staging", staged(False), WIDE),
    Variant("choose tokens from bf16 and fp32", both(draw(), draw(torch.float32))),
    Variant("merge bf16", merge(), WIDE),
    Variant("merge fp32, D 80", merge(torch.float32, 80), WIDE),
]  # fmt: skip
