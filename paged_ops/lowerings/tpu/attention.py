"""How every op runs through XLA: a TPU, or XLA's own CPU device. Letters as in :mod:`paged_ops.ops`; also G = H/K, the
query heads that share a key/value head, n = M*B the keys that a row of block tables can name, R rows of a tile.

On a TPU attention is the ragged paged attention kernel that torch_xla brings, and a write to the cache moves runs of
neighbouring slots (:mod:`paged_ops.lowerings.tpu.write`). What that kernel lacks raises, with the reason. XLA's CPU
device has no such kernel: there plain torch serves every feature, with shapes that do not depend on values.

The functions here return values: :mod:`paged_ops.lowerings.tpu.functional` turns a write to an argument into its new
value. Only the block mapping of copies is read on the host, where it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import Features
from paged_ops.layouts import FP8_DTYPES, Layout, element_dtype, paged_kv
from paged_ops.lowerings.cascade import cascade_attention as _cascade
from paged_ops.lowerings.tpu import functional, write
from paged_ops.lowerings.tpu.functional import functionalized
from paged_ops.lowerings.tpu.write import write_runs

# Bytes of float32 keys and values that a tile of rows gathers on XLA's CPU device.
TILE_BYTES = 1 << 26
# XLA's names of the dtypes that uint8 storage may hold.
XLA_NAMES = {torch.uint8: "u8", torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2"}
# What the ragged kernel takes (torch_xla 2.9).
KERNEL_HEAD_SIZE = 128
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
# Bytes of a TPU's 1 MiB of scalar memory that the block tables may fill; the rest is lengths and the compiler's own.
BLOCK_TABLE_BYTES = 15 << 16
# Bytes that the kernel's two buffers of pages may take of the 16 MiB of vector memory of a TPU v4; others have 128.
V4_PAGES_BYTES = 4 << 20


def install() -> None:
    """Make the mutating ops known to torch_xla, for programs that import it after paged_ops.

    Programs that import torch_xla first need not call this. Without it XLA refuses the ops that write a cache.
    """
    from paged_ops import registry

    for name in registry.OPS:
        install_twins(registry.LIBRARY, name)


def install_twins(library: torch.library.Library, name: str) -> None:
    """The functional twins of one op, for torch_xla."""
    functional.install(library, name, lowering, "XLA")


def install_torch_tpu() -> None:
    """Experimental: the ops on the device ``tpu`` of TorchTPU (``torch_tpu``), the announced successor of torch_xla.

    Registers the functional twins and the formulation in plain torch, without the TPU's kernels, under the dispatch key
    of that device. Graphs that torch.compile traces for it have the right shapes and no mutation; none has been run.
    """
    from paged_ops import registry

    for name in registry.OPS:
        functional.install(registry.LIBRARY, name, lowering, "PrivateUse1")
        if not functional.mutates(name):
            registry.LIBRARY.impl(name, lowering(name), "PrivateUse1")


def lowering(name: str) -> Any:
    """The function of this module that runs an op: what functional twins call."""
    return globals()[name]


def on_tpu() -> bool:
    """Whether torch_xla's device is a TPU rather than XLA's CPU (``PJRT_DEVICE=CPU``)."""
    if "torch_xla" not in sys.modules:
        return False
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "TPU"


def tpu_version() -> int:
    """The generation of the TPU, as torch_xla's kernel asks for it."""
    from torch_xla._internal.jax_workarounds import jax_import_guard

    jax_import_guard()
    from torch_xla.experimental.pallas_kernels import ragged_paged_attention_v2

    return ragged_paged_attention_v2.get_tpu_version()


# Ops of the cache ----------------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    fake.reshape_and_cache(
        key,
        value,
        kv_cache,
        slot_mapping,
        value_cache=value_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
    )
    T, stored = slot_mapping.shape[0], element_dtype(kv_cache, kv_cache_dtype)
    if not kv_cache.numel() or not T:
        return
    paged = paged_kv(kv_cache, value_cache)
    num_slots = paged.num_blocks * paged.block_size
    if checks.debug_checks():
        checks.slots(slot_mapping.cpu(), num_slots)
    slots = slot_mapping.long()
    slots = torch.where((slots < 0) | (slots > num_slots), num_slots, slots)  # one past the end, where rows are dropped
    key, value = (_quantise(real[:T], scale, stored) for real, scale in ((key, k_scale), (value, v_scale)))
    key, value = _reinterpret(key, kv_cache.dtype), _reinterpret(value, kv_cache.dtype)
    if value_cache is None and kv_cache.dim() == 4:  # interleaved: a token is one row
        rows = torch.stack([key, value], 2).flatten(1, 2)  # [T, 2K, D]
        if on_tpu() and write.can_write_runs(kv_cache, T):
            kv_cache.copy_(write_runs(kv_cache, rows, torch.where(slots < num_slots, slots, -1)))
            return
        kv_cache.copy_(_with_rows(kv_cache.view(num_slots, *rows.shape[1:]), slots, rows).view(kv_cache.shape))
        return
    for cache, rows in ((paged.key, key), (paged.value, value)):
        flat, rows = cache.reshape(num_slots, *cache.shape[2:]), rows.reshape(T, *cache.shape[2:])
        cache.copy_(_with_rows(flat, slots, rows).view(cache.shape))


def _with_rows(flat: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """``flat`` with ``rows`` at ``slots``. A slot one past the end is dropped: XLA does so, and elsewhere a spare row
    takes it."""
    if flat.device.type == "xla":
        return flat.index_copy(0, slots, rows)
    bits = torch.uint8 if flat.element_size() == 1 else flat.dtype
    spare = torch.cat([flat, flat[:1]]).view(bits)
    return spare.index_copy(0, slots, rows.view(bits))[:-1].view(flat.dtype)


def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.copy_blocks(kv_caches, block_mapping)
    caches = [cache for cache in kv_caches if cache.numel()]
    if not caches or not len(block_mapping):
        return
    if block_mapping.device.type == "cpu" or checks.debug_checks():
        for cache in caches:
            checks.block_mapping(block_mapping.cpu(), len(cache), len(cache), same_cache=True)
    source, destination = _pairs(block_mapping, caches[0].device)
    for cache in caches:
        cache.index_copy_(0, destination, cache.index_select(0, source))


def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    fake.swap_blocks(src_caches, dst_caches, block_mapping)
    pairs = [(src, dst) for src, dst in zip(src_caches, dst_caches, strict=True) if src.numel() and dst.numel()]
    if not pairs or not len(block_mapping):
        return
    for src, dst in pairs:
        checks.block_mapping(block_mapping, len(src), len(dst), same_cache=src is dst)
    for src, dst in pairs:
        source, _ = _pairs(block_mapping, src.device)
        _, destination = _pairs(block_mapping, dst.device)
        blocks = src.index_select(0, source)
        if dst.device.type == "cpu":
            dst.index_copy_(0, destination, blocks.cpu())
        else:
            functional.donate(dst)
            dst.index_copy_(0, destination, blocks.to(dst.device))


@functionalized
def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    key, value = fake.gather_kv(
        kv_cache,
        block_tables,
        seq_lens,
        num_tokens,
        value_cache=value_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
    )
    if not (kv_cache.numel() and num_tokens and block_tables.numel()):
        return torch.zeros_like(key), torch.zeros_like(value)
    paged, stored = paged_kv(kv_cache, value_cache), element_dtype(kv_cache, kv_cache_dtype)
    N, B, M = paged.num_blocks, paged.block_size, block_tables.shape[1]
    if checks.debug_checks():
        checks.needed_blocks(block_tables.cpu(), seq_lens.cpu(), N, B)
    ends = seq_lens.cumsum(0)  # [S]
    row = torch.arange(num_tokens, device=kv_cache.device)
    s = (row[:, None] >= ends).sum(1)  # the sequence of each row; S past the last
    live = row < ends[-1]
    s = s.clamp(max=len(seq_lens) - 1)
    j = (row - (ends - seq_lens)[s]).clamp(0, M * B - 1)
    slot = block_tables[s, j // B].long().clamp(0, N - 1) * B + j % B

    def rows(cache: Tensor, scale: Tensor | None, like: Tensor) -> Tensor:
        cells = cache.reshape(N * B, *cache.shape[2:]).index_select(0, slot).reshape(like.shape)
        real = _dequantise(cells, scale, stored).to(like.dtype)
        return torch.where(live[:, None, None], real, 0).to(like.dtype)

    return rows(paged.key, k_scale, key), rows(paged.value, v_scale, value)


# Attention -----------------------------------------------------------------------------------------------------------


@functionalized
def paged_attention(query: Tensor, *args: Any, **features: Any) -> Tensor:
    out = fake.paged_attention(query, *args, **features)
    f = Features(**features)
    if on_tpu():
        return _as_output(_ragged_kernel(f, query, *args), out, f)
    real, _ = _attend(f, query, *args)
    return _as_output(real, out, f)


@functionalized
def paged_attention_with_lse(query: Tensor, *args: Any, **features: Any) -> tuple[Tensor, Tensor]:
    out, _ = fake.paged_attention_with_lse(query, *args, **features)
    f = Features(**features)
    if on_tpu():
        raise ValueError(f"paged_ops.paged_attention_with_lse on a TPU: {NO_LSE}")
    real, lse = _attend(f, query, *args)
    return _as_output(real, out, f), lse


@functionalized
def cascade_attention(*args: Any, **features: Any) -> Tensor:
    if on_tpu():
        raise ValueError(f"paged_ops.cascade_attention on a TPU: {NO_LSE}")
    return _cascade(*args, **features)


@functionalized
def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    fake.merge_attention_states(out_a, lse_a, out_b, lse_b)
    lse_a, lse_b = (torch.where(side == torch.inf, -torch.inf, side) for side in (lse_a, lse_b))
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    merged = torch.log(torch.exp(lse_a - largest) + torch.exp(lse_b - largest)) + largest

    def weighted(out: Tensor, lse: Tensor) -> Tensor:
        empty = (lse == -torch.inf)[:, :, None]
        return torch.where(empty, 0.0, torch.exp(lse - merged)[:, :, None] * out.float())

    return (weighted(out_a, lse_a) + weighted(out_b, lse_b)).to(out_a.dtype), merged


def _attend(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Every feature with static shapes: out ``[T, H, Dv]`` and lse ``[T, H]``, both float32.

    Each row gathers the keys of its own sequence, in tiles of rows so that memory stays bounded.
    """
    T, H, _ = query.shape
    paged = paged_kv(kv_cache, f.value_cache)
    out = query.new_zeros(T, H, paged.value_head_size, dtype=torch.float32)
    lse = torch.full((T, H), -torch.inf, device=query.device)
    if not (query.numel() and kv_cache.numel() and paged.value.numel() and block_tables.numel()):
        if f.sinks is not None and T and H and len(seq_lens):
            live = torch.arange(T, device=query.device) < query_start_loc[-1]
            lse = torch.where(live[:, None], f.sinks, lse)
        return out, lse
    if checks.debug_checks():
        batch = (block_tables.cpu(), seq_lens.cpu(), query_start_loc.cpu())
        checks.batch(*batch, T, paged.num_blocks, paged.block_size)
    s, i, live = _rows(T, seq_lens, query_start_loc)
    n = block_tables.shape[1] * paged.block_size
    token_bytes = 4 * paged.num_kv_heads * (paged.head_size + paged.value_head_size)
    step = max(1, TILE_BYTES // (n * token_bytes))
    tiles = [
        _attend_tile(f, query[r : r + step], kv_cache, block_tables, seq_lens, s[r : r + step], i[r : r + step], scale)
        for r in range(0, T, step)
    ]
    out, lse = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return torch.where(live[:, None, None], out, 0.0), torch.where(live[:, None], lse, -torch.inf)


def _attend_tile(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    s: Tensor,
    i: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Rows ``query [R, H, D]`` of sequences ``s [R]`` at positions ``i [R]``: out ``[R, H, Dv]``, lse ``[R, H]``."""
    (R, H, _), M = query.shape, block_tables.shape[1]
    lens = seq_lens[s]
    whole = paged_kv(kv_cache, f.value_cache)
    N, B, K = whole.num_blocks, whole.block_size, whole.num_kv_heads
    j = torch.arange(M * B, device=query.device, dtype=torch.int32)
    needed = j[::B] < lens[:, None]  # [R, M]; other entries may hold anything
    blocks = torch.where(needed, block_tables[s], 0).clamp(0, N - 1).flatten()
    value_cache = None if f.value_cache is None else f.value_cache.index_select(0, blocks)
    paged = paged_kv(kv_cache.index_select(0, blocks), value_cache)
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    key = _dequantise(paged.key.reshape(R, M * B, K, -1), f.k_scale, stored)  # [R, n, K, D]
    value = _dequantise(paged.value.reshape(R, M * B, K, -1), f.v_scale, stored)  # [R, n, K, Dv]
    owned = j < lens[:, None]  # [R, n]; what lies past a sequence may be NaN
    value = torch.where(owned[:, :, None, None], value, 0.0)

    q = query.float().unflatten(1, (K, H // K))
    logits = (torch.einsum("rkgd,rnkd->rkgn", q, key) * scale).flatten(1, 2)  # [R, H, n]
    if f.soft_cap:
        logits = f.soft_cap * torch.tanh(logits / f.soft_cap)
    if f.alibi_slopes is not None:
        logits = logits + f.alibi_slopes[:, None] * (j - i[:, None])[:, None].float()
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    window, chunk = f.sliding_window, f.attention_chunk
    of_rows = () if f.bidirectional_ranges is None else f.bidirectional_ranges[s].unbind(1)
    ranges = [pair[:, None].unbind(2) for pair in of_rows]
    kept = masks.keep(i, j, H, K, is_causal=f.causal, window=window, chunk=chunk, sparse=sparse, ranges=ranges)
    kept = kept.transpose(0, 1) & owned[:, None]  # [R, H or 1, n]
    logits = torch.where(kept, logits, -torch.inf)

    largest = logits.amax(2)  # [R, H]
    if f.sinks is not None:
        largest = largest.maximum(f.sinks)
    largest = torch.where(largest == -torch.inf, 0.0, largest)  # a row that sees nothing
    weights = torch.exp(logits - largest[:, :, None])
    total = weights.sum(2)
    if f.sinks is not None:
        total = total + torch.exp(f.sinks - largest)
    out = torch.einsum("rkgn,rnkd->rkgd", weights.unflatten(1, (K, H // K)), value).flatten(1, 2)
    out = out / torch.where(total == 0, 1.0, total)[:, :, None]
    return out, torch.log(total) + largest


def _rows(T: int, seq_lens: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of query: its sequence, its position in it (int32 ``[T]``), and whether it is no padding."""
    t = torch.arange(T, device=seq_lens.device, dtype=torch.int32)
    s = (t[:, None] >= query_start_loc[1:]).sum(1).clamp(max=len(seq_lens) - 1)
    i = seq_lens[s] - query_start_loc[1:][s] + t
    return s, i, t < query_start_loc[-1]


def _as_output(real: Tensor, out: Tensor, f: Features) -> Tensor:
    return _quantise(real, f.output_scale, out.dtype)


# The ragged kernel of TPUs -------------------------------------------------------------------------------------------

NO_LSE = (
    "the ragged kernel returns no lse, which this op needs; attend to the whole sequence in one paged_attention instead"
)


def _ragged_kernel(
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Attention of a batch by torch_xla's kernel, with the rules of padding added: float32 ``[T, H, D]``.

    The kernel needs the sequences with queries first, each with at least one key. It leaves garbage in rows of padding,
    and in rows before the start of their sequence.
    """
    if not (query.numel() and kv_cache.numel() and block_tables.numel()):
        return torch.zeros_like(query, dtype=torch.float32)
    reasons = _kernel_reasons(_shown(f, query, kv_cache, block_tables))
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
    _, i, live = _rows(T, seq_lens, query_start_loc)
    return torch.where((live & (i >= 0))[:, None, None], real, 0.0)


def _block_sizes(kv_cache: Tensor, T: int, M: int) -> dict[str, int]:
    """How many pages and rows the kernel takes at once: by its own tables, which for a v4 ignore the size of pages."""
    if tpu_version() > 4:
        return {}
    pages = V4_PAGES_BYTES // (2 * kv_cache[0].numel() * kv_cache.element_size())
    return {"num_kv_pages_per_block": max(1, min(pages, 32, M)), "num_queries_per_block": min(T, 32)}


def ragged_paged_attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch_xla's kernel, which is there once its module has been imported."""
    import torch_xla.experimental.custom_kernel  # noqa: F401

    return torch.ops.xla.ragged_paged_attention(*args, **kwargs)


def _per_query_head(scale: Tensor, H: int, K: int) -> Tensor:
    """A scale ``[1]`` or ``[K]`` as ``[1 or H, 1]``."""
    if len(scale) == 1:
        return scale[:, None]
    return scale[:, None].expand(K, H // K).reshape(H, 1)


# The keyword arguments of attention that this lowering uses or refuses by name (a test compares them with all).
KNOWS = frozenset(
    {
        "value_cache",
        "causal",
        "sliding_window",
        "attention_chunk",
        "soft_cap",
        "alibi_slopes",
        "sinks",
        "block_sparse",
        "k_scale",
        "v_scale",
        "output_scale",
        "kv_cache_dtype",
        "bidirectional_ranges",
    }
)


def unsupported(op: str, device: str, features: dict[str, Any]) -> list[str]:
    """Why an op would not run on ``device`` (``"xla"``): a TPU, unless torch_xla is loaded with another device."""
    if "torch_xla" in sys.modules and not on_tpu():
        return []
    if op in ("paged_attention_with_lse", "cascade_attention"):
        return [NO_LSE]
    if op != "paged_attention":
        return []
    return _kernel_reasons({**features, "tpu_version": tpu_version()} if "torch_xla" in sys.modules else features)


def _shown(f: Features, query: Tensor, kv_cache: Tensor, block_tables: Tensor) -> dict[str, Any]:
    """A call's features, as :func:`unsupported` takes them."""
    named: dict[str, Any] = {name: value for name, value in f._asdict().items() if value is not None}
    (_, H, D), (S, M) = query.shape, block_tables.shape
    named |= {"dtype": query.dtype, "cache_dtype": kv_cache.dtype, "num_heads": H, "head_size": D}
    named["tpu_version"] = tpu_version()
    if f.value_cache is not None:
        return named
    if kv_cache.dim() == 5:
        return named | {"layout": Layout.NHD, "num_kv_heads": kv_cache.shape[3], "block_size": kv_cache.shape[2]}
    _, B, K2, _ = kv_cache.shape
    named |= {"layout": Layout.INTERLEAVED, "num_kv_heads": K2 // 2, "block_size": B}
    return named | {"block_tables": (S, M)}


def _kernel_reasons(asked: dict[str, Any]) -> list[str]:
    """What of a call the ragged kernel lacks, each with a remedy where there is one."""
    reasons = []

    def lacks(condition: Any, reason: str) -> None:
        if condition:
            reasons.append(reason)

    def given(name: str) -> bool:
        value = asked.get(name)
        return value is not None and (isinstance(value, (Tensor, Sequence)) or value != 0)

    for name in ("alibi_slopes", "sinks", "block_sparse", "attention_chunk", "bidirectional_ranges"):
        lacks(given(name), f"the ragged kernel has no {name}")
    lacks(asked.get("causal", True) is False, "the ragged kernel is always causal")
    layout = asked.get("layout", Layout.INTERLEAVED)
    lacks(
        layout != Layout.INTERLEAVED or given("value_cache"),
        "the ragged kernel reads the INTERLEAVED layout only: allocate the cache with layout='INTERLEAVED'",
    )
    dtype, cache_dtype = asked.get("dtype"), asked.get("cache_dtype")
    lacks(
        dtype is not None and dtype not in KERNEL_DTYPES,
        "the ragged kernel takes float32 and bfloat16 queries: run the model in bfloat16",
    )
    lacks(
        cache_dtype == torch.uint8 or (asked.get("kv_cache_dtype", "auto") != "auto" and cache_dtype is None),
        "the ragged kernel reads fp8 from a float8 cache, not from uint8: allocate it in float8_e4m3fn or float8_e5m2",
    )
    lacks(
        asked.get("tpu_version") == 4 and cache_dtype in FP8_DTYPES,
        "the ragged kernel reads no fp8 on a TPU v4: keep the cache in bfloat16",
    )
    D, Dv = asked.get("head_size"), asked.get("value_head_size")
    lacks(
        D is not None and D != KERNEL_HEAD_SIZE,
        f"the ragged kernel compiles for head size {KERNEL_HEAD_SIZE} only: pad query, key and value to it "
        "(paged_ops.lowerings.tpu.pad_head_size), keep the scale, and cut the output",
    )
    lacks(Dv is not None and Dv != D, "the ragged kernel has one head size for keys and values")
    K, element = asked.get("num_kv_heads"), cache_dtype or dtype or torch.bfloat16
    lacks(
        K is not None and not write.heads_fill_tiles(2 * K, element),
        f"the ragged kernel needs 2*num_kv_heads over {4 // element.itemsize}, the elements of a 32-bit word, to be "
        "1, 2, 4, 8 or a multiple of 8: repeat key/value heads to reach it",
    )
    tables = asked.get("block_tables")
    if isinstance(tables, (Tensor, tuple)):
        S, M = tables if isinstance(tables, tuple) else tables.shape
        nbytes = 4 * (-(-S // 8) * 8) * (-(-M // 128) * 128)
        lacks(
            nbytes > BLOCK_TABLE_BYTES,
            f"block tables [{S}, {M}] take {nbytes} bytes of scalar memory (columns in multiples of 128), "
            f"{BLOCK_TABLE_BYTES} are there: use larger blocks (paged_ops.min_tpu_block_size) or fewer sequences",
        )
    return reasons


def pad_head_size(tensor: Tensor, head_size: int = KERNEL_HEAD_SIZE) -> Tensor:
    """``[..., D]`` with zeros up to ``head_size``: attention over padded query, key and value is the same, padded."""
    return torch.nn.functional.pad(tensor, (0, head_size - tensor.shape[-1]))


# Elements ------------------------------------------------------------------------------------------------------------


def _quantise(real: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``real / scale`` as ``dtype``. For fp8: in float32, nearest even, saturated, NaN kept; scale [1] or [K]."""
    if dtype not in FP8_DTYPES:
        return real.to(dtype)
    real = real.float()
    if scale is not None:
        real = real / scale[:, None]
    largest = torch.finfo(dtype).max
    return real.clamp(-largest, largest).to(dtype)


def _dequantise(cells: Tensor, scale: Tensor | None, stored: torch.dtype) -> Tensor:
    """Cells ``[..., K, D]`` as float32, times their scale [1] or [K]."""
    real = _reinterpret(cells, stored).float()
    return real if scale is None else real * scale[:, None]


def _reinterpret(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as uint8 or float8. torch_xla would run ``Tensor.view(dtype)`` on the host."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.device.type != "xla":
        return tensor.view(dtype)
    return _bitcast(tuple(tensor.shape), XLA_NAMES[tensor.dtype], XLA_NAMES[dtype])([tensor])[0]


@functools.cache
def _bitcast(shape: tuple[int, ...], source: str, target: str) -> Callable[[list[Tensor]], list[Tensor]]:
    from torch_xla.core import xla_builder

    parameter = xla_builder.mkshape(source, shape)
    computation = xla_builder.create_computation("bitcast", lambda x: x.bitcast(target), [parameter])
    return xla_builder.xla_computation_as_func(computation, "bitcast")


def _pairs(block_mapping: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources and destinations on ``device``. A mapping from the host grows to a power of two by repeating its last
    pair, which changes nothing, so that few lengths are compiled."""
    if block_mapping.device.type == "cpu":
        P = len(block_mapping)
        repeats = (1 << (P - 1).bit_length()) - P
        block_mapping = torch.cat([block_mapping, block_mapping[-1:].expand(repeats, 2)])
    source, destination = block_mapping.to(device).unbind(1)
    return source, destination
