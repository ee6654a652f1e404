"""Paged attention on GPUs: one call, from its arguments to its launches. CUDA and ROCm run the same Triton source;
Hopper also has kernels in Gluon, for the calls that they serve faster.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D and Dv head sizes, N blocks, B tokens per
block, P programs. Inside kernels also M packed query rows (``q_len`` tokens by G heads, so that each key and value is
loaded once for all of them) and N keys of a tile.

* ``split_kernel`` (triton/decode.py) is split-KV attention for sequences whose rows fit one tile: decode, and
  speculation. A work item (*unit*) is a sequence and a key/value head. The key tiles of all units are split into P
  equal contiguous shares, one per program. Programs compute their shares on the device, so the host plans nothing, and
  one captured graph is balanced for any lengths. A unit within one share is written to the output. A unit that several
  shares split leaves partial results in a workspace.
* ``merge_kernel`` (triton/merge.py) merges the partial results of a unit in a fixed order. Where that is faster, the
  last program of a unit does it, and there is no second launch (shared/split_merge.py).
* ``prefill_kernel`` (triton/prefill.py) serves longer sequences by tiles of query rows.
* The kernels for Hopper are in hopper/, those for latent caches in triton/latent.py and hopper/.

A call has a *signature*: all that its checks, its kernel and its tiles depend on, except T and S. Each signature is
checked and described once. Each pair (T, S) of a signature is prepared once, in microseconds: a :class:`Call`. Known
calls are found by one lookup. The lengths of sequences are read on the device only. Ideas: stream-K (Osama et al. 2023,
arXiv:2301.03598), FlashAttention-2 (arXiv:2307.08691), Flash-Decoding (Dao et al. 2023), the packing of grouped heads
from FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import Features, refuse_others
from paged_ops.layouts import Layout, element_dtype, is_latent, paged_kv
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.attention import choose, tuning
from paged_ops.lowerings.gpu.attention.triton import latent
from paged_ops.lowerings.gpu.cache import FORMATS, is_head_major
from paged_ops.lowerings.gpu.counters import counters_of
from paged_ops.lowerings.gpu.launch import MOST_KINDS, Choice, Grid, Launch, Launches, relaunch
from paged_ops.lowerings.gpu.spec import MASK_ARGUMENTS, OPTIONAL, Pointers, Shapes, numbers_of, readable, spec_of
from paged_ops.lowerings.gpu.target import Target, target_of
from paged_ops.support import Explanation

# The features that these kernels apply, by the names of the op's arguments, and the cache formats that they read.
APPLIES = FORMATS | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale"),
    *MASK_ARGUMENTS,
    *("soft_cap", "alibi_slopes", "sinks", "batch_invariant"),
}
RANGES = "bidirectional_ranges"  # the one feature with a row per sequence
SELECTED = "selected_keys"  # the one feature with a row per token
ABSENT = (0,) * len(OPTIONAL)  # addresses of optional tensors that are None

Results = tuple[Tensor | None, Tensor | None]


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
    if features.get("layout") == Layout.LATENT:
        return reasons + latent.too_large(Dv, None if D is None or Dv is None else D - Dv)
    return reasons + tuning.too_large(D, Dv)


def explain(
    op: str,
    *args: Any,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    target: Target | None = None,
    **features: Any,
) -> Explanation:
    """As :func:`paged_ops.explain`. With a ``target``, a GPU that need not be present, tensors may be on ``meta``."""
    results = out if isinstance(out, tuple) else (out, None)
    signature = describe(op == "paged_attention_with_lse", results, features, args, target)
    shapes = signature.shapes
    if not (signature.kernels and shapes.T and shapes.S):
        return Explanation(op, str(args[0].device), "none: the result is empty, or all rows see no keys")
    return choose.explain(op, signature.spec, signature.target, shapes)


@dataclasses.dataclass(slots=True)
class Signature:
    """The common description of calls that differ in T and S only."""

    with_lse: bool
    out: tuple[tuple[int, int], torch.dtype]  # (H, Dv) and the dtype of the output
    cache: tuple[int, int]  # blocks, tokens per block
    has_keys: bool  # whether any sequence can have keys
    strided: bool  # whether vectors that kernels read as contiguous are not
    offsets: tuple[int, int] = (0, 0)  # bytes to the first key in kv_cache and to the first value in its tensor
    kernels: tuple[ModuleType, ...] = ()  # that serve it, in order of preference; none: there is nothing to compute
    spec: Any = None  # Spec
    target: Any = None  # Target
    shapes: Any = None  # Shapes of the call that was described
    built: dict[tuple[ModuleType, Choice], Launches] = dataclasses.field(default_factory=dict)

    def shapes_of(self, T: int, S: int) -> Shapes:
        return self.shapes._replace(T=T, S=S, numbers=self.shapes.numbers._replace(T=T, S=S))

    def prepare(self, T: int, S: int) -> Call:
        """The call with T tokens and S sequences."""
        (H, Dv), dtype = self.out
        call = Call(self, (T, H, Dv), dtype)
        if self.kernels and T and S:
            shapes = self.shapes_of(T, S)
            kernel, choice = choose.choose(self.kernels, self.spec, self.target, shapes)
            launches = self.built.get((kernel, choice))
            if launches is None:
                launches = self.built[kernel, choice] = kernel.build(choice, self.spec, self.target, shapes)
            call.numbers, call.launches = shapes.numbers, launches
            call.steps, call.without_counters = (
                tuple((each, each.grid(shapes.numbers)) for each in either)
                for either in (launches.launches, launches.without_counters)
            )
        return call


@dataclasses.dataclass(slots=True)
class Call:
    """A signature with T and S: all that a launch needs besides addresses."""

    signature: Signature
    shape: tuple[int, int, int]  # of the output
    dtype: torch.dtype
    numbers: Any = None  # Numbers
    launches: Any = None  # Launches; None: there is nothing to compute
    steps: tuple[tuple[Launch, Grid], ...] = ()
    without_counters: tuple[tuple[Launch, Grid], ...] = ()

    def launch(
        self,
        results: Results,
        features: dict[str, Any],
        query: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the results on the current stream of their device."""
        signature, (out, lse) = self.signature, results
        if signature.strided:
            seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
            features = _contiguous(features)
        if checks.debug_checks():
            checks.batch(block_tables, seq_lens, query_start_loc, len(query), *signature.cache)
            if SELECTED in features:
                checks.distinct_entries(features[SELECTED][: int(query_start_loc[-1])])
        if out is None:
            out = query.new_empty(self.shape, dtype=self.dtype)
            lse = query.new_empty(self.shape[:2], dtype=torch.float32) if signature.with_lse else None
        if self.launches is None:
            return _fill(out, lse)
        if not signature.has_keys:
            seq_lens = torch.zeros_like(seq_lens)
        to_lse, to_taken, floats = self.launches.workspace
        workspace = query.new_empty(floats, dtype=torch.float32)
        steps, counters = self.steps, None
        if self.launches.counters:
            counters = counters_of(workspace, self.launches.counters)
            if counters is None:
                steps = self.without_counters
        parts, (to_key, to_value) = workspace.data_ptr(), signature.offsets
        value_cache = features.get("value_cache")
        addresses = (
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            parts,
            parts + 4 * to_lse,
            parts + 4 * to_taken,
            0 if counters is None else counters.data_ptr(),
            query.data_ptr(),
            kv_cache.data_ptr() + to_key,
            (kv_cache if value_cache is None else value_cache).data_ptr() + to_value,
            block_tables.data_ptr(),
            seq_lens.data_ptr(),
            query_start_loc.data_ptr(),
            *(ABSENT if not features else map(_address, map(features.get, OPTIONAL))),
        )
        done = relaunch(steps, addresses, self.numbers)
        if done < len(steps):
            if precompile.notes() is not None:
                _fill(out, lse)
            f = Features(**features)
            paged = paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype)
            key, value, _ = readable(paged, element_dtype(kv_cache, f.kv_cache_dtype), signature.target)
            written = out if f.output_scale is None else out.view(torch.uint8)
            scratch = workspace, workspace[to_lse:], workspace[to_taken:].view(torch.int32), counters
            batch = block_tables, seq_lens, query_start_loc
            tensors = Pointers(written, lse, *scratch, query, key, value, *batch, *map(features.get, OPTIONAL))
            self._launch_by_triton([launch for launch, _ in steps[done:]], tensors, addresses)
        return out, lse

    def _launch_by_triton(self, launches: list[Launch], tensors: Pointers, addresses: tuple[int, ...]) -> None:
        """First launches: Triton compiles them, or precompilation notes them."""
        if precompile.is_running():  # it compiles the others meanwhile
            with precompile.noting() as jobs:
                for launch in launches[1:]:
                    launch(tensors, self.numbers, addresses)
            precompile.compiler().submit(jobs)
        for launch in launches:
            launch(tensors, self.numbers, addresses)
        batches = precompile.sizes_for(self.signature)
        if self.signature.spec.batch_invariant:  # a few more kernels serve all batches of equal lengths
            lengths = tuning.equal_lengths(self.signature.spec)
            batches = tuple(dict.fromkeys((*batches, *((n * S, S) for _, S in batches for n in lengths))))
        for sizes in batches:
            other = self.signature.prepare(*sizes)
            if other.launches is not None:
                counters = tensors.part_lse.view(torch.int32) if other.launches.counters else None
                for launch in other.launches.launches:
                    launch(tensors._replace(arrived=counters), other.numbers, addresses)


_calls: dict[Any, Call] = {}
_signatures: dict[Any, Signature] = {}


def _attend(
    with_lse: bool,
    results: Results,
    features: dict[str, Any],
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    if is_head_major(query):
        query = query.contiguous()
    key = (
        with_lse,
        scale,
        kv_cache.data_ptr() & 15,
        *(query.dtype, query.shape, query.stride(), query.device),
        *(kv_cache.dtype, kv_cache.shape, kv_cache.stride(), kv_cache.device),
        *(block_tables.dtype, block_tables.shape, block_tables.stride(), block_tables.device),
        *(seq_lens.dtype, seq_lens.shape, seq_lens.stride(), seq_lens.device),
        *(query_start_loc.dtype, query_start_loc.shape, query_start_loc.stride(), query_start_loc.device),
        *(() if results[0] is None else map(_kind, results)),
        *(_kinds(features) if features else ()),
    )
    call = _calls.get(key)
    if call is None:
        arguments = query, kv_cache, block_tables, seq_lens, query_start_loc, scale
        call = _prepare(with_lse, results, features, arguments)
        if len(_calls) >= MOST_KINDS:
            forget()
        _calls[key] = call
    return call.launch(results, features, query, kv_cache, block_tables, seq_lens, query_start_loc)


def forget() -> None:
    """Describe and prepare all calls again: for tests and tuning, which change :func:`tuning.choose_tiles`' results."""
    _calls.clear()
    _signatures.clear()
    tuning.choose_tiles.cache_clear()


def _prepare(with_lse: bool, results: Results, features: dict[str, Any], arguments: tuple[Any, ...]) -> Call:
    """The call with these arguments. Its signature has, of sizes that follow from T or S, only that they agree, and
    whether they are 0, 1 or more."""
    query, kv_cache, block_tables, seq_lens, query_start_loc, scale = arguments
    T, S = (each.shape[0] if each.dim() else 0 for each in (query, seq_lens))
    key = (
        *(with_lse, scale, min(T, 2), min(S, 2)),
        *(_kind(kv_cache), kv_cache.data_ptr() & 15),
        *(_kind(each, T) for each in (query, *results, features.get(SELECTED))),
        *(_kind(each, S) for each in (block_tables, seq_lens, query_start_loc, features.get(RANGES))),
        *_kinds({name: each for name, each in features.items() if name not in (RANGES, SELECTED)}),
    )
    signature = _signatures.get(key)
    if signature is None:
        signature = _signatures[key] = describe(with_lse, results, features, arguments)
    return signature.prepare(T, S)


def describe(
    with_lse: bool,
    results: Results,
    features: dict[str, Any],
    arguments: tuple[Any, ...],
    target: Target | None = None,
) -> Signature:
    """Check a call, and describe its signature. ``target``: by default the query's device."""
    query, kv_cache, block_tables, seq_lens, query_start_loc, scale = arguments
    vectors = seq_lens, query_start_loc, *map(features.get, OPTIONAL)
    strided = not all(each is None or each.is_contiguous() for each in vectors)
    arguments = query, kv_cache, block_tables, seq_lens.contiguous(), query_start_loc.contiguous(), scale
    f = Features(**_contiguous(features))
    out, lse = results
    if with_lse:
        given = None if out is None or lse is None else (out, lse)
        out, _ = fake.paged_attention_with_lse(*arguments, out=given, **f._asdict())
    else:
        out = fake.paged_attention(*arguments, out=out, **f._asdict())
    refuse_others(f, kv_cache, APPLIES, "attention on a GPU")
    paged = paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype)
    N, B, K, D, Dv = *paged.key.shape[:3], paged.head_size, paged.value_head_size
    (T, H, _), S = query.shape, seq_lens.shape[0]
    signature = Signature(with_lse, ((H, Dv), out.dtype), (N, B), bool(N and B and block_tables.shape[1]), strided)
    if not (H and Dv and D and K):
        return signature
    stored, of_latents = element_dtype(kv_cache, f.kv_cache_dtype), is_latent(kv_cache)
    layout = Layout.LATENT if of_latents else None
    properties = {"cache_dtype": stored, "head_size": D, "value_head_size": Dv, "layout": layout}
    target = target or target_of(query.device)
    for reason in unsupported("paged_attention", "rocm" if torch.version.hip else "cuda", properties):
        raise ValueError(reason)

    key, value, cache_format = readable(paged, stored, target)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    spec = spec_of(query, key, value, cache_format, block_tables, sparse, f, out.dtype, with_lse, of_latents)
    spec = tuning.fit_heads(spec)
    numbers = numbers_of(f, scale, block_tables.stride(0), S, T)
    aligned = not (key.data_ptr() | value.data_ptr()) & 15
    value_cache = kv_cache if f.value_cache is None else f.value_cache
    signature.offsets = key.data_ptr() - kv_cache.data_ptr(), value.data_ptr() - value_cache.data_ptr()
    signature.kernels = tuple(kernel for kernel in choose.kernels_of(target) if not kernel.serves(spec, target))
    signature.spec, signature.target = spec, target
    signature.shapes = Shapes(T, S, N, block_tables.shape[1], aligned, numbers)
    return signature


def _kind(value: Any, count: int | None = None) -> Any:
    """What checks and kernels depend on of an argument, as a key. Of a tensor with one row per token or sequence, or
    one more, the rows beyond that ``count``."""
    if isinstance(value, Tensor):
        shape = value.shape
        if count is None or not shape:
            return value.dtype, shape, value.stride(), value.device
        return value.dtype, shape[0] - count, shape[1:], value.stride(), value.device
    return tuple(value) if isinstance(value, list) else value


def _kinds(features: dict[str, Any]) -> list[Any]:
    value_cache = features.get("value_cache")
    aligned = None if value_cache is None else value_cache.data_ptr() & 15
    return [aligned, *((name, _kind(each)) for name, each in features.items())]


def _contiguous(features: dict[str, Any]) -> dict[str, Any]:
    """The features with contiguous vectors."""
    vectors = {name: each.contiguous() for name in OPTIONAL if (each := features.get(name)) is not None}
    return {**features, **vectors}


def _fill(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Results of rows that see no key."""
    out.view(torch.uint8).zero_()
    return out, None if lse is None else lse.fill_(-torch.inf)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
