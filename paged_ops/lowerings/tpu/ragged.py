"""torch_xla's ragged paged attention kernel for TPUs: its limits, and a call of it.

Letters as in :mod:`paged_ops.ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks
from paged_ops.features import Features
from paged_ops.layouts import (
    FP8_DS_INDEX,
    FP8_DS_MLA,
    FP8_DTYPES,
    Layout,
    has_index_scales,
    has_row_scales,
    is_latent,
)
from paged_ops.lowerings.tpu import runtime, write

# Formats of the cache that ops on XLA support: values of kv_cache_dtype, and dtypes of elements.
FORMATS = frozenset(
    {
        *("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        *("float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
# Limits of the ragged kernel (torch_xla 2.9).
KERNEL_HEAD_SIZE = 128
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
# Optional arguments that it supports, or that _kernel_reasons handles one by one.
KERNEL_ARGUMENTS = (
    "value_head_size",
    "value_cache",
    "causal",
    "sliding_window",
    "soft_cap",
    "k_scale",
    "v_scale",
    "output_scale",
    "kv_cache_dtype",
)
# Bytes of a TPU's 1 MiB of scalar memory for block tables; the rest is for lengths and the compiler.
BLOCK_TABLE_BYTES = 15 << 16
# Bytes of a TPU v4's 16 MiB of vector memory (other TPUs: 128 MiB) for the kernel's two buffers of pages.
V4_PAGES_BYTES = 4 << 20
NO_LATENT = "the ragged kernel has no latent attention: decompress keys and values, and cache those"
NO_INDEX_SCALES = f"kv_cache_dtype: {FP8_DS_INDEX!r} is not served through XLA, which has no indexer"
NO_ROW_SCALES = (
    f"kv_cache_dtype: {FP8_DS_MLA!r} is not served through XLA, as its rows hold numbers of three types in bytes: keep"
    " latents in bfloat16 or float8_e4m3fn"
)
NO_INVARIANCE = "batch_invariant: XLA orders the sums of each shape as it likes, so bits follow the shape of the batch"
NO_SELECTION = "selected_keys: not served through XLA, whose attention reads whole sequences"
NO_LSE = (
    "the ragged kernel returns no lse, which this op needs; attend to the whole sequence in one paged_attention instead"
)


def attend(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Attention of a batch by torch_xla's kernel: float32 ``[T, H, D]``, 0 for rows of padding.

    The kernel needs sequences with queries first, and at least one key per sequence. It leaves garbage in rows of
    padding and in rows at negative positions.
    """
    if not (query.numel() and kv_cache.numel() and block_tables.numel()):
        T, H, D = query.shape
        return query.new_zeros(T, H, f.value_head_size or D, dtype=torch.float32)
    reasons = reasons_against(f, query, kv_cache, block_tables)
    if reasons:
        raise ValueError("paged_ops.paged_attention on a TPU: " + "; ".join(reasons))
    T, H, _ = query.shape
    N, B, K2, _ = kv_cache.shape
    if checks.debug_checks():
        checks.batch(block_tables.cpu(), seq_lens.cpu(), query_start_loc.cpu(), T, N, B)
    q_lens = query_start_loc[1:] - query_start_loc[:-1]
    S, total = len(seq_lens), query_start_loc[-1:]
    s = torch.arange(S, device=query.device, dtype=torch.int32)
    active = q_lens > 0
    order = torch.where(active, s, s + S).sort().values % S
    num_seqs = active.sum(0, keepdim=True).clamp(min=1).to(torch.int32)
    starts = torch.cat([torch.where(active[order], query_start_loc[:-1][order], total), total])
    lens = seq_lens[order]
    needed = torch.arange(block_tables.shape[1], device=query.device) * B < lens[:, None]
    tables = torch.where(needed, block_tables[order], 0).clamp(0, N - 1)
    fp8 = kv_cache.dtype in FP8_DTYPES
    q = query
    if f.k_scale is not None:  # the kernel takes Python floats; scale * q . (k_scale * k) = scale * (k_scale * q) . k
        q = (q.float() * _per_query_head(f.k_scale, H, K2 // 2)).to(q.dtype)
    real = ragged_paged_attention(
        q,
        kv_cache,
        lens.clamp(min=1),
        tables,
        starts,
        num_seqs,
        sm_scale=scale,
        sliding_window=f.sliding_window or None,
        soft_cap=f.soft_cap or None,
        k_scale=1.0 if fp8 else None,
        v_scale=1.0 if fp8 else None,
        **_block_sizes(kv_cache, T, block_tables.shape[1]),
    ).float()
    if f.v_scale is not None:
        real = real * _per_query_head(f.v_scale, H, K2 // 2)
    _, i, live = rows_of(T, seq_lens, query_start_loc)
    return torch.where((live & (i >= 0))[:, None, None], real, 0.0)


def rows_of(T: int, seq_lens: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of query: its sequence, its position (int32 ``[T]``), and whether it is live (not padding)."""
    t = torch.arange(T, device=seq_lens.device, dtype=torch.int32)
    s = (t[:, None] >= query_start_loc[1:]).sum(1).clamp(max=len(seq_lens) - 1)
    i = seq_lens[s] - query_start_loc[1:][s] + t
    return s, i, t < query_start_loc[-1]


def _block_sizes(kv_cache: Tensor, T: int, M: int) -> dict[str, int]:
    """Pages and rows per block of the kernel. Empty: by its own tables, which ignore the page size on a v4."""
    if runtime.tpu_version() > 4:
        return {}
    pages = V4_PAGES_BYTES // (2 * kv_cache[0].numel() * kv_cache.element_size())
    return {"num_kv_pages_per_block": max(1, min(pages, 32, M)), "num_queries_per_block": min(T, 32)}


def ragged_paged_attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch_xla's kernel; importing its module registers the op."""
    import torch_xla.experimental.custom_kernel  # noqa: F401

    return torch.ops.xla.ragged_paged_attention(*args, **kwargs)


def _per_query_head(scale: Tensor, H: int, K: int) -> Tensor:
    """A scale ``[1]`` or ``[K]`` as ``[1 or H, 1]``."""
    if len(scale) == 1:
        return scale[:, None]
    return scale[:, None].expand(K, H // K).reshape(H, 1)


def refuse_row_scales(kv_cache_dtype: str = "auto") -> None:
    """Raise ValueError for a cache whose rows or blocks have their own scales."""
    if has_index_scales(kv_cache_dtype):
        raise ValueError(NO_INDEX_SCALES)
    if has_row_scales(kv_cache_dtype):
        raise ValueError(NO_ROW_SCALES)


def refuse(f: Features) -> None:
    """Raise ValueError for what no XLA device serves."""
    refuse_row_scales(f.kv_cache_dtype)
    if f.batch_invariant:
        raise ValueError(NO_INVARIANCE)
    if f.selected_keys is not None:
        raise ValueError(NO_SELECTION)


def unsupported(op: str, device: str, features: dict[str, Any]) -> list[str]:
    """Why an op would not run on ``device`` (``"xla"``): a TPU, unless torch_xla is loaded with another device."""
    if has_row_scales(features.get("kv_cache_dtype", "auto")):
        return [NO_ROW_SCALES]
    if op == "latent_cache_write" and has_index_scales(features.get("kv_cache_dtype", "auto")):
        return [NO_INDEX_SCALES]
    if features.get("batch_invariant"):
        return [NO_INVARIANCE]
    if features.get("selected_keys") is not None:
        return [NO_SELECTION]
    if "torch_xla" in sys.modules and not runtime.on_tpu():
        return []
    if op in ("paged_attention_with_lse", "cascade_attention"):
        return [NO_LSE]
    if op != "paged_attention":
        return []
    return _kernel_reasons(
        {**features, "tpu_version": runtime.tpu_version()} if "torch_xla" in sys.modules else features
    )


def reasons_against(f: Features, query: Tensor, kv_cache: Tensor, block_tables: Tensor) -> list[str]:
    """Why the ragged kernel does not support a call."""
    return _kernel_reasons(_shown(f, query, kv_cache, block_tables))


def _shown(f: Features, query: Tensor, kv_cache: Tensor, block_tables: Tensor) -> dict[str, Any]:
    """The features of a call in the form of :func:`unsupported`."""
    named: dict[str, Any] = {name: value for name, value in f._asdict().items() if value is not None}
    (_, H, D), (S, M) = query.shape, block_tables.shape
    named |= {"dtype": query.dtype, "cache_dtype": kv_cache.dtype, "num_heads": H, "head_size": D}
    named["tpu_version"] = runtime.tpu_version()
    if f.value_cache is not None:
        return named
    if is_latent(kv_cache):
        return named | {"layout": Layout.LATENT, "num_kv_heads": 1, "block_size": kv_cache.shape[1]}
    if kv_cache.dim() == 5:
        return named | {"layout": Layout.NHD, "num_kv_heads": kv_cache.shape[3], "block_size": kv_cache.shape[2]}
    _, B, K2, _ = kv_cache.shape
    named |= {"layout": Layout.INTERLEAVED, "num_kv_heads": K2 // 2, "block_size": B}
    return named | {"block_tables": (S, M)}


def _kernel_reasons(asked: dict[str, Any]) -> list[str]:
    """Why the ragged kernel does not support these features, each reason with a remedy if there is one."""
    reasons = []

    def refuse_if(condition: Any, reason: str) -> None:
        if condition:
            reasons.append(reason)

    def given(name: str) -> bool:
        value, neutral = asked.get(name), Features._field_defaults.get(name)
        return value is not None and (isinstance(value, (Tensor, Sequence)) or value not in (0, neutral))

    for name in Features._fields:
        refuse_if(given(name) and name not in KERNEL_ARGUMENTS, f"the ragged kernel has no {name}")
    refuse_if(asked.get("causal", True) is False, "the ragged kernel is always causal")
    layout = asked.get("layout", Layout.INTERLEAVED)
    if layout == Layout.LATENT:
        return [*reasons, NO_LATENT]
    refuse_if(
        layout != Layout.INTERLEAVED or given("value_cache"),
        "the ragged kernel reads the INTERLEAVED layout only: allocate the cache with layout='INTERLEAVED'",
    )
    dtype, cache_dtype = asked.get("dtype"), asked.get("cache_dtype")
    refuse_if(
        dtype is not None and dtype not in KERNEL_DTYPES,
        "the ragged kernel takes float32 and bfloat16 queries: run the model in bfloat16",
    )
    refuse_if(
        cache_dtype == torch.uint8 or (asked.get("kv_cache_dtype", "auto") != "auto" and cache_dtype is None),
        "the ragged kernel reads fp8 from a float8 cache, not from uint8: allocate it in float8_e4m3fn or float8_e5m2",
    )
    refuse_if(
        asked.get("tpu_version") == 4 and cache_dtype in FP8_DTYPES,
        "the ragged kernel reads no fp8 on a TPU v4: keep the cache in bfloat16",
    )
    D, Dv = asked.get("head_size"), asked.get("value_head_size")
    refuse_if(
        D is not None and D != KERNEL_HEAD_SIZE,
        f"the ragged kernel compiles for head size {KERNEL_HEAD_SIZE} only: pad query, key and value to it "
        "(paged_ops.lowerings.tpu.pad_head_size), keep the scale, and cut the output",
    )
    refuse_if(Dv is not None and Dv != D, "the ragged kernel has one head size for keys and values")
    K, element = asked.get("num_kv_heads"), cache_dtype or dtype or torch.bfloat16
    refuse_if(
        K is not None and not write.heads_fill_tiles(2 * K, element),
        f"the ragged kernel needs 2*num_kv_heads over {4 // element.itemsize}, the elements of a 32-bit word, to be "
        "1, 2, 4, 8 or a multiple of 8: repeat key/value heads to reach it",
    )
    tables = asked.get("block_tables")
    if isinstance(tables, (Tensor, tuple)):
        S, M = tables if isinstance(tables, tuple) else tables.shape
        nbytes = 4 * (-(-S // 8) * 8) * (-(-M // 128) * 128)
        refuse_if(
            nbytes > BLOCK_TABLE_BYTES,
            f"block tables [{S}, {M}] take {nbytes} bytes of scalar memory (columns in multiples of 128), "
            f"{BLOCK_TABLE_BYTES} are available: use larger blocks (layouts.min_tpu_block_size) or fewer sequences",
        )
    return reasons


def pad_head_size(tensor: Tensor) -> Tensor:
    """``[..., D]`` padded with zeros to the kernel's head size. Padded query, key and value give the padded output."""
    return torch.nn.functional.pad(tensor, (0, KERNEL_HEAD_SIZE - tensor.shape[-1]))
