"""Paged attention on GPUs: two kernels over the same parts, and a merge. CUDA and ROCm run the same source.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D and Dv head sizes, N blocks, B tokens a
block, P programs. Inside kernels also M packed query rows (``q_len`` tokens by G heads, so that every key and value is
read once for all of them) and N keys of a tile.

* ``split_kernel`` (decode.py) serves every sequence whose rows fit one tile of M rows: decode and speculative widths;
  and all sequences of a batch that has as many rows as if all were such. Its P programs take equal contiguous shares of
  the running total of key tiles over (sequence, key/value head), which each of them counts on the device: no host plan,
  and one captured graph is balanced for any lengths. A unit of work that lies in one share goes to the output, one that
  is cut leaves parts in a workspace.
* ``merge_kernel`` (decode.py) combines the parts of a cut unit in a fixed order.
* ``prefill_kernel`` (prefill.py; hopper.py where that serves) takes the longer sequences by tiles of query rows, those
  that see most keys first. hopper.py also has short sequences of fewer rows where that is faster, see its short_keys.

The host plans a *kind* of call once, by shapes, strides, dtypes and features; a known one goes straight to launches.
Which kernel serves a sequence is decided by its length, on the device. Ideas: stream-K (Osama et al. 2023,
arXiv:2301.03598), FlashAttention-2 (arXiv:2307.08691), Flash-Decoding (Dao et al. 2023), the packing of grouped heads
from FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import Features
from paged_ops.layouts import PagedKV, element_dtype, paged_kv
from paged_ops.lowerings.gpu import tiles
from paged_ops.lowerings.gpu.decode import merge_kernel, split_kernel
from paged_ops.lowerings.gpu.device import Target, on_device, target_of
from paged_ops.lowerings.gpu.fp8 import FP8_FORMATS
from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.prefill import prefill_kernel

# The keyword arguments of attention that this lowering computes with or refuses by name (a test wants all of them).
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

# Tensors among the keyword arguments that the kernels read, in the order that they take them.
POINTERS = ("alibi_slopes", "sinks", "k_scale", "v_scale", "bidirectional_ranges", "output_scale")
# The constants of the kernels that merge_kernel has too.
MERGING = ("WINDOW", "CHUNK", "RANGES", "K", "G", "Dv", "DV_PAD", "BLOCK_S", "CHUNKS_OF_S")
# So many kinds of calls are remembered; then all are planned anew.
MOST_KINDS = 4096


def paged_attention(query: Tensor, *args: Any, out: Tensor | None = None, **features: Any) -> Tensor:
    return _attend(False, (out, None), features, query, *args)[0]


def paged_attention_with_lse(
    query: Tensor, *args: Any, out: tuple[Tensor, Tensor] | None = None, **features: Any
) -> tuple[Tensor, Tensor]:
    out_, lse = _attend(True, out or (None, None), features, query, *args)
    assert lse is not None
    return out_, lse


def unsupported(op: str, device: str, features: dict[str, Any]) -> list[str]:
    """Why an attention op would not run on ``device`` ("cuda" or "rocm") with these features and properties."""
    reasons = []
    cache_dtype = features.get("cache_dtype")
    if device == "cuda" and cache_dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        reasons.append(f"cache_dtype: {cache_dtype} is the fp8 of ROCm's gfx94x, on cuda float8_e4m3fn or float8_e5m2")
    D, Dv = features.get("head_size"), features.get("value_head_size")
    for name, size in (("head_size", D), ("value_head_size", Dv)):
        if size is not None and size > tiles.LARGEST_HEAD:
            reasons.append(f"{name}: at most {tiles.LARGEST_HEAD} on {device}, got {size}")
    return reasons


class Call(NamedTuple):
    """What the calls of one kind share: see :func:`_plan`."""

    out: tuple[tuple[int, ...], torch.dtype]
    cache: tuple[int, int]  # blocks, tokens a block
    has_keys: bool  # whether any sequence can have keys
    offsets: tuple[int, int] = (0, 0)  # bytes to the first key in kv_cache and the first value in its tensor
    workspace: tuple[int, int] = (0, 0)  # float32s to the parts' lse, in all
    numbers: tuple[int | float, ...] = ()
    merge_numbers: tuple[int, ...] = ()
    split: Launcher | None = None  # None: there is nothing to compute
    split_grid: tuple[int, int, int] = (0, 1, 1)
    split_m: int = 0
    prefill: Launcher | None = None
    prefill_grid: tuple[int, int, int] = (0, 1, 1)
    hopper: bool = False  # whether hopper.py does what prefill_kernel would
    short: int = -1  # and all of sequences of at most so many keys
    merge: Launcher | None = None
    merge_grid: tuple[int, int, int] = (0, 1, 1)


_calls: dict[Any, Call] = {}
_launchers: dict[Any, Launcher] = {}


def _attend(
    with_lse: bool,
    results: tuple[Tensor | None, Tensor | None],
    features: dict[str, Any],
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Calls of one kind are checked, planned and compiled once. A kind is all that checks and kernels are made for."""
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    for name in POINTERS:
        vector = features.get(name)
        if vector is not None and not vector.is_contiguous():
            features = {**features, name: vector.contiguous()}
    value_cache = features.get("value_cache")
    kind = (
        with_lse,
        scale,
        kv_cache.data_ptr() & 15,
        0 if value_cache is None else value_cache.data_ptr() & 15,
        *map(_kind, (query, kv_cache, block_tables, seq_lens, query_start_loc, *results)),
        *((name, _kind(value)) for name, value in features.items()),
    )
    call = _calls.get(kind)
    if call is None:
        call = _plan(
            with_lse, results, Features(**features), query, kv_cache, block_tables, seq_lens, query_start_loc, scale
        )
        if len(_calls) >= MOST_KINDS:
            _calls.clear()
        _calls[kind] = call
    if checks.debug_checks():
        checks.batch(block_tables, seq_lens, query_start_loc, query.shape[0], *call.cache)
    out, lse = results
    if out is None:
        out = query.new_empty(call.out[0], dtype=call.out[1])
        lse = query.new_empty(call.out[0][:2], dtype=torch.float32) if with_lse else None
    if call.split is None or call.merge is None:
        out.view(torch.uint8).zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out, lse
    if not call.has_keys:
        seq_lens = torch.zeros_like(seq_lens)

    value_cache = kv_cache if value_cache is None else value_cache
    to_lse, floats = call.workspace
    workspace = query.new_empty(floats, dtype=torch.float32)
    parts = workspace.data_ptr()
    pointers = [features.get(name) for name in POINTERS]
    written = (out.data_ptr(), 0 if lse is None else lse.data_ptr())
    halfway = (parts, parts + 4 * to_lse)
    read = (
        query.data_ptr(),
        kv_cache.data_ptr() + call.offsets[0],
        value_cache.data_ptr() + call.offsets[1],
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in pointers),
    )

    def tensors() -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """The same as tensors: a kernel's first launch looks at them."""
        f = Features(**features)
        paged, stored = paged_kv(kv_cache, f.value_cache), element_dtype(kv_cache, f.kv_cache_dtype)
        key, value, _ = _readable(paged, stored, target_of(kv_cache.device))
        return (
            [out if f.output_scale is None else out.view(torch.uint8), lse],
            [workspace, workspace[to_lse:]],
            [query, key, value, block_tables, seq_lens, query_start_loc, *pointers],
        )

    if not call.split.at(call.split_grid, (*written, *halfway, *read), call.numbers):
        filled, half, viewed = tensors()
        call.split(call.split_grid, [*filled, *half, *viewed], call.numbers)
    if call.prefill is not None and not call.prefill.at(call.prefill_grid, (*written, *read), call.numbers):
        filled, _, viewed = tensors()
        call.prefill(call.prefill_grid, [*filled, *viewed], call.numbers)
    if call.hopper:
        filled, _, viewed = tensors()
        with on_device(query.device):
            _hopper().prefill(*filled, *viewed[:6], Features(**features), scale, call.split_m, call.short)
    if not call.merge.at(call.merge_grid, (*written, *halfway, *read[4:6], *read[-2:]), call.merge_numbers):
        filled, half, _ = tensors()
        merged = [*filled, *half, seq_lens, query_start_loc, *pointers[-2:]]
        call.merge(call.merge_grid, merged, call.merge_numbers)
    return out, lse


def forget() -> None:
    """Plan known kinds of calls anew: for tests and tuning, which change what :func:`tiles.plan` says."""
    _calls.clear()
    tiles.plan.cache_clear()


def _kind(value: Any) -> Any:
    """What of an argument checks and kernels depend on, as a key."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    return tuple(value) if isinstance(value, list) else value


def _plan(
    with_lse: bool,
    results: tuple[Tensor | None, Tensor | None],
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Call:
    """Check a call; then what it launches."""
    arguments = (query, kv_cache, block_tables, seq_lens, query_start_loc, scale)
    out, lse = results
    if with_lse:
        given = None if out is None or lse is None else (out, lse)
        out, _ = fake.paged_attention_with_lse(*arguments, out=given, **f._asdict())
    else:
        out = fake.paged_attention(*arguments, out=out, **f._asdict())
    paged = paged_kv(kv_cache, f.value_cache)
    N, B, K, D, Dv = *paged.key.shape[:3], paged.head_size, paged.value_head_size
    (T, H, _), S, device = query.shape, seq_lens.shape[0], query.device
    call = Call((tuple(out.shape), out.dtype), (N, B), bool(N and B and block_tables.shape[1]))
    if not (out.numel() and D and S and K):
        return call
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    for reason in unsupported("paged_attention", "rocm" if torch.version.hip else "cuda", _properties(stored, D, Dv)):
        raise ValueError(reason)

    G = H // K
    target = target_of(device)
    key, value, cache_format = _readable(paged, stored, target)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    first_offset, offset_step, heads_an_offset = _sparse_offsets(sparse, H, K)
    run, paired = _run(value, max(B, 1)), _paired(query, key, value, cache_format)
    plan = tiles.plan(
        query.dtype, key.dtype, T, S, G, D, Dv, target, sparse is not None, _sliceable(query, key, value, run, paired)
    )
    split, prefill, P = plan.split, plan.prefill, plan.programs
    constants = {
        "CAUSAL": bool(f.causal),
        "WINDOW": f.sliding_window > 0,
        "CHUNK": f.attention_chunk > 0,
        "SOFT_CAP": f.soft_cap > 0,
        "SPARSE": sparse is not None,
        "RANGES": 0 if f.bidirectional_ranges is None else f.bidirectional_ranges.shape[1],
        "HEADS_AN_OFFSET": heads_an_offset,
        "K": K,
        "G": G,
        "B": max(B, 1),
        "D": D,
        "Dv": Dv,
        "D_PAD": tiles.padded(D, stored.itemsize),
        "DV_PAD": tiles.padded(Dv, stored.itemsize),
        "X": key.shape[4],
        "FORMAT": cache_format,
        "RUN": run,
        "QUERY": query.stride(),
        "KEY": key.stride(),
        "VALUE": value.stride(),
        "TABLE": block_tables.stride(1),
        "K_SCALE": int(f.k_scale is not None and f.k_scale.shape[0] > 1),
        "V_SCALE": int(f.v_scale is not None and f.v_scale.shape[0] > 1),
        "BLOCK_S": tiles.sequences_at_once(S),
        "CHUNKS_OF_S": -(-S // tiles.sequences_at_once(S)),
        **target.overlap(),
    }
    pointers = [_dtype(getattr(f, name)) for name in POINTERS]
    dtypes = (out.dtype, with_lse, query.dtype, key.dtype, *pointers)

    def launcher(kernel: Any, constants: dict[str, Any], tile: tiles.Tile | None = None) -> Launcher:
        if tile is not None:
            options = tile.options(torch.version.hip is None)
            constants = {**constants, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, **options}
            if kernel is not merge_kernel and tile.block_m >= tiles.WARPGROUP_ROWS:
                constants["DV_PAD"] = tiles.padded_values(D, Dv, stored.itemsize)
        key = (kernel, device, dtypes, *constants.items())
        if key not in _launchers:
            if len(_launchers) >= MOST_KINDS:
                _launchers.clear()
            _launchers[key] = Launcher(kernel, constants, device)
        return _launchers[key]

    # The Hopper kernel's producer reads the first entry of a table even for a sequence without keys.
    hopper = target.has_hopper_gluon and bool(block_tables.shape[1]) and _hopper().serves(query, key, value, f, scale)
    short = -1
    if hopper:
        items = 0 if plan.all_split else T * G // _hopper().BLOCK_M * K
        short = _hopper().short_keys(split.block_m, S * K, items, target.processors)
    all_split = plan.all_split and short < 0
    hopper = hopper and not all_split
    split_from = None if all_split else short
    to_lse = P * 2 * split.block_m * Dv
    spans = tiles.spans(f.sliding_window, f.attention_chunk)
    merging = {name: constants[name] for name in MERGING} | target.overlap() | {"SHORT": split_from}
    splitting = constants | {"SHORT": split_from, "PAIRED": paired, "SLICES": plan.slices}
    return call._replace(
        offsets=(
            key.data_ptr() - kv_cache.data_ptr(),
            value.data_ptr() - (kv_cache if f.value_cache is None else f.value_cache).data_ptr(),
        ),
        workspace=(to_lse, to_lse + P * 2 * split.block_m),
        numbers=(
            float(scale),
            float(f.soft_cap),
            *spans,
            *((1, 0, 1) if sparse is None else sparse[:3]),
            first_offset,
            offset_step,
            block_tables.stride(0),
            S,
        ),
        merge_numbers=(*spans, S, T),
        split=launcher(split_kernel, splitting, split),
        split_grid=(P, 1, 1),
        split_m=split.block_m,
        prefill=None
        if hopper or all_split
        else launcher(prefill_kernel, {**constants, "SPLIT_M": split.block_m}, prefill),
        prefill_grid=(K * (T // (prefill.block_m // G) + S + 1), 1, 1),
        hopper=hopper,
        short=short,
        merge=launcher(merge_kernel, merging, split._replace(num_warps=4, num_stages=1, max_registers=0)),
        merge_grid=(P, 1, 1),
    )


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@functools.cache
def _hopper() -> ModuleType:
    """The Gluon kernels, imported where they can run."""
    from paged_ops.lowerings.gpu import hopper

    return hopper


def _readable(paged: PagedKV, stored: torch.dtype, target: Target) -> tuple[Tensor, Tensor, int]:
    """Key and value views as a kernel reads them: fp8 in its own type where the target converts it, else its bits."""
    if stored not in FP8_FORMATS:
        return paged.key, paged.value, 0
    if target.has_fp8_cvt:
        return paged.key.view(stored), paged.value.view(stored), 0
    flavour = 2 if paged.key.dtype == torch.uint8 and target.fp8_is_fnuz else 0
    return paged.key.view(torch.uint8), paged.value.view(torch.uint8), FP8_FORMATS[stored] + flavour


def _run(value: Tensor, B: int) -> int:
    """How many tokens of a block lie together in ``value [N, B, K, Dv]``, up to 16 bytes; else 1."""
    stride_n, stride_b, stride_k, stride_d = value.stride()
    if stride_b != 1 or stride_d == 1:
        return 1
    return math.gcd(
        16 // value.element_size(), B, stride_n, stride_k, stride_d, value.data_ptr() // value.element_size()
    )


def _paired(query: Tensor, key: Tensor, value: Tensor, cache_format: int) -> bool:
    """Whether two 8-bit elements of a head can be read as one of 16 bits, to be converted to float16 by instruction."""
    numbers = (key.shape[4], *key.stride()[:4], value.shape[3], *value.stride()[:3])
    return (
        key.element_size() == 1
        and cache_format == 0
        and query.element_size() == 2
        and key.shape[3] == key.stride(4) == value.stride(3) == 1
        and not any(number % 2 for number in (*numbers, key.data_ptr(), value.data_ptr()))
    )


def _sliceable(query: Tensor, key: Tensor, value: Tensor, run: int, paired: bool) -> bool:
    """Whether tiles can be taken in slices that lie in one block each, of elements as tensor cores take them."""
    return (
        torch.version.hip is None
        and query.element_size() == 2
        and (paired or key.dtype == query.dtype)
        and key.shape[1] % tiles.SLICE == 0
        and key.shape[3] == 1  # not packed
        and run == 1
        and max(key.stride(1), value.stride(1)) * tiles.SLICE < 2**31
    )


def _properties(stored: torch.dtype, D: int, Dv: int) -> dict[str, Any]:
    return {"cache_dtype": stored, "head_size": D, "value_head_size": Dv}


def _sparse_offsets(sparse: masks.SparsePattern | None, H: int, K: int) -> tuple[int, int, int]:
    """The stripe's offset of query head h as ``first + (h // heads_an_offset) * step``."""
    if sparse is None or sparse.homo_head:
        return 1, 0, 1
    heads = K if sparse.homo_head_group else H
    step = max(1, int(sparse.vert_stride / (sparse.world_size * heads)))
    return sparse.rank * heads * step + 1, step, H // heads
