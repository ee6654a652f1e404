"""Paged attention on GPUs: which kernels serve a call. CUDA and ROCm run the same Triton source; Hopper has kernels of
its own, in Gluon, for what they serve faster.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D and Dv head sizes, N blocks, B tokens per
block, P programs. Inside kernels also M packed query rows (``q_len`` tokens by G heads, so that every key and value is
read once for all of them) and N keys of a tile.

* ``split_kernel`` (decode.py) serves every sequence whose rows fit one tile of M rows (decode and speculation), and all
  sequences of a batch whose number of rows allows that all are such. Its P programs take equal contiguous shares of the
  key tiles of all units, a unit being a sequence and a key/value head. Each program counts the tiles on the device. So
  there is no plan on the host, and one captured graph is balanced for any lengths. A unit that lies in one share is
  written to the output; a unit that shares divide leaves parts in a workspace.
* ``merge_kernel`` (decode.py) combines the parts of a divided unit in a fixed order. Where that is faster, the last of
  a unit's programs of ``split_kernel`` does so (parts.py), and there is no second launch.
* ``prefill_kernel`` (prefill.py, or dense.py if that serves) takes the longer sequences by tiles of query rows, those
  that see most keys first. dense.py also takes short sequences of fewer rows if that is faster: see its short_keys.
* ``fp8_kernel`` (fp8.py) does the same over fp8 caches on Hopper, with heads of 64 and 128.
* ``mixed_kernel`` (mixed.py) replaces both on Hopper where prompts and decodes were measured side by side: it
  computes decodes by shares, and at the same time longer sequences by tiles of query rows.
* ``shares_kernel`` (shares.py) replaces ``split_kernel`` on Hopper where all sequences have 9 to 128 rows, and
  with 4 or more if there are many units.
* latent.py, and the latent_hopper modules on Hopper, serve caches of latents, whatever the batch is.

The host checks and describes a *form* of call once, by shapes, strides, dtypes and features, without the numbers of
tokens and sequences. It plans each pair of these numbers once, in a few microseconds, and launches known calls at once.
The length of a sequence decides on the device which kernel serves it. Ideas: stream-K (Osama et al. 2023,
arXiv:2301.03598), FlashAttention-2 (arXiv:2307.08691), Flash-Decoding (Dao et al. 2023), the packing of grouped heads
from FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import checks, fake, masks
from paged_ops.features import Features, refuse_others
from paged_ops.layouts import Layout, element_dtype, is_latent, paged_kv
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.attention import choose, tuning
from paged_ops.lowerings.gpu.attention.triton import latent
from paged_ops.lowerings.gpu.cache import FORMATS
from paged_ops.lowerings.gpu.counters import counters_of
from paged_ops.lowerings.gpu.launch import MOST_KINDS, Launches
from paged_ops.lowerings.gpu.spec import (
    MASK_ARGUMENTS,
    OPTIONAL,
    Numbers,
    Pointers,
    Shapes,
    numbers_of,
    readable,
    spec_of,
)
from paged_ops.lowerings.gpu.target import target_of

# What attention applies here: the arguments of the op by their names, and formats of the cache.
APPLIES = FORMATS | {
    *("value_cache", "value_head_size", "k_scale", "v_scale", "output_scale"),
    *MASK_ARGUMENTS,
    *("soft_cap", "alibi_slopes", "sinks"),
}
RANGES = "bidirectional_ranges"  # the one feature with a row for each sequence


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


class Call(NamedTuple):
    """What is passed and launched for T tokens in S sequences."""

    numbers: Numbers
    plan: Launches


@dataclasses.dataclass(slots=True)
class Form:
    """What calls share that differ in nothing but their numbers of tokens and sequences: see :func:`_describe`."""

    out: tuple[tuple[int, int], torch.dtype]  # H and Dv
    cache: tuple[int, int]  # blocks, tokens per block
    has_keys: bool  # whether any sequence can have keys
    offsets: tuple[int, int] = (0, 0)  # bytes to the first key in kv_cache and the first value in its tensor
    kernels: tuple[ModuleType, ...] = ()  # that serve it, in order of preference; none: there is nothing to compute
    spec: Any = None  # Spec
    target: Any = None  # Target
    shapes: Any = None  # Shapes, of the call that was described
    calls: dict[tuple[int, int], Call | None] = dataclasses.field(default_factory=dict)
    plans: dict[Any, Launches] = dataclasses.field(default_factory=dict)  # by kernel and choice

    def plan(self, T: int, S: int) -> Call | None:
        """The call for these numbers; None: there is nothing to compute."""
        call = None
        if self.kernels and T and S:
            spec, target, numbers = self.spec, self.target, self.shapes.numbers._replace(T=T, S=S)
            shapes = self.shapes._replace(T=T, S=S, numbers=numbers)
            kernel, choice = choose.choose(self.kernels, spec, target, shapes)
            plan = self.plans.get((kernel, choice))
            if plan is None:
                plan = self.plans[kernel, choice] = kernel.build(choice, spec, target, shapes)
            call = Call(numbers, plan)
        if len(self.calls) >= MOST_KINDS:
            self.calls.clear()
            self.plans.clear()
        self.calls[T, S] = call
        return call


_forms: dict[Any, Form] = {}


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
    """Calls of one form are checked and described once. A form is all that checks and kernels depend on: of sizes that
    are numbers of tokens or sequences only that they agree, and whether they are 0, 1 or more."""
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    for name in OPTIONAL:
        vector = features.get(name)
        if vector is not None and not vector.is_contiguous():
            features = {**features, name: vector.contiguous()}
    value_cache = features.get("value_cache")
    T, S = _length(query), _length(seq_lens)
    out, lse = results
    kind = (
        with_lse,
        scale,
        min(T, 2),
        min(S, 2),
        kv_cache.data_ptr() & 15,
        0 if value_cache is None else value_cache.data_ptr() & 15,
        _kind(kv_cache),
        *_kind_of(query, T),
        *_kind_of(block_tables, S),
        *_kind_of(seq_lens, S),
        *_kind_of(query_start_loc, S),
        *(() if out is None else _kind_of(out, T)),
        *(() if lse is None else _kind_of(lse, T)),
        *((name, _kind_of(each, S) if name == RANGES else _kind(each)) for name, each in features.items()),
    )
    form = _forms.get(kind)
    if form is None:
        form = _describe(
            with_lse, results, Features(**features), query, kv_cache, block_tables, seq_lens, query_start_loc, scale
        )
        if len(_forms) >= MOST_KINDS:
            _forms.clear()
        _forms[kind] = form
    call = form.calls[T, S] if (T, S) in form.calls else form.plan(T, S)
    if checks.debug_checks():
        checks.batch(block_tables, seq_lens, query_start_loc, T, *form.cache)
    if out is None:
        heads, dtype = form.out
        out = query.new_empty((T, *heads), dtype=dtype)
        lse = query.new_empty((T, heads[0]), dtype=torch.float32) if with_lse else None
    if call is None or precompile.notes() is not None:
        out.view(torch.uint8).zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    if call is None:
        return out, lse
    if not form.has_keys:
        seq_lens = torch.zeros_like(seq_lens)

    value_cache = kv_cache if value_cache is None else value_cache
    to_lse, to_taken, floats = call.plan.workspace
    workspace = query.new_empty(floats, dtype=torch.float32)
    parts = workspace.data_ptr()
    launches, arrived = call.plan.launches, None
    if call.plan.counters:
        arrived = counters_of(workspace, call.plan.counters)
        if arrived is None:
            launches = call.plan.without_counters
    optional = [features.get(name) for name in OPTIONAL]
    addresses = (
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        parts,
        parts + 4 * to_lse,
        parts + 4 * to_taken,
        0 if arrived is None else arrived.data_ptr(),
        query.data_ptr(),
        kv_cache.data_ptr() + form.offsets[0],
        value_cache.data_ptr() + form.offsets[1],
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in optional),
    )
    for n, launch in enumerate(launches):
        if launch.at(addresses, call.numbers):
            continue
        f = Features(**features)
        paged = paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype)
        stored = element_dtype(kv_cache, f.kv_cache_dtype)
        key, value, _ = readable(paged, stored, target_of(kv_cache.device))
        written = out if f.output_scale is None else out.view(torch.uint8)
        halfway = workspace, workspace[to_lse:], workspace[to_taken:].view(torch.int32), arrived
        batch = block_tables, seq_lens, query_start_loc
        tensors = Pointers(written, lse, *halfway, query, key, value, *batch, *optional)
        if precompile.is_running():  # it compiles the others meanwhile
            with precompile.noting() as jobs:
                for each in launches[n + 1 :]:
                    each(tensors, call.numbers, addresses)
            precompile.compiler().submit(jobs)
        launch(tensors, call.numbers, addresses)
        for sizes in precompile.sizes_for(form):
            other = form.plan(*sizes)
            if other is not None:
                counting = tensors._replace(arrived=workspace.view(torch.int32) if other.plan.counters else None)
                for each in other.plan.launches:
                    each(counting, other.numbers, addresses)
    return out, lse


def forget() -> None:
    """Plan known forms of calls again: for tests and tuning, which change what :func:`tuning.choose_tiles` returns."""
    _forms.clear()
    tuning.choose_tiles.cache_clear()


def _kind(value: Any) -> Any:
    """The part of an argument on which checks and kernels depend, as a key."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    return tuple(value) if isinstance(value, list) else value


def _kind_of(value: Any, count: int) -> Any:
    """The same for a tensor whose length is a number of tokens or sequences, or one more."""
    if value is None:
        return (None,)
    shape = value.shape
    return value.dtype, shape[0] - count if shape else None, shape[1:], value.stride(), value.device


def _length(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _describe(
    with_lse: bool,
    results: tuple[Tensor | None, Tensor | None],
    f: Features,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Form:
    """Check a call, and describe its form."""
    arguments = (query, kv_cache, block_tables, seq_lens, query_start_loc, scale)
    out, lse = results
    if with_lse:
        given = None if out is None or lse is None else (out, lse)
        out, _ = fake.paged_attention_with_lse(*arguments, out=given, **f._asdict())
    else:
        out = fake.paged_attention(*arguments, out=out, **f._asdict())
    refuse_others(f, kv_cache, APPLIES, "attention on a GPU")
    paged = paged_kv(kv_cache, f.value_cache, f.value_head_size, f.kv_cache_dtype)
    N, B, K, D, Dv = *paged.key.shape[:3], paged.head_size, paged.value_head_size
    (T, H, _), S, device = query.shape, seq_lens.shape[0], query.device
    form = Form(((H, Dv), out.dtype), (N, B), bool(N and B and block_tables.shape[1]))
    if not (H and Dv and D and K):
        return form
    stored = element_dtype(kv_cache, f.kv_cache_dtype)
    layout = Layout.LATENT if is_latent(kv_cache) else None
    properties = {"cache_dtype": stored, "head_size": D, "value_head_size": Dv, "layout": layout}
    for reason in unsupported("paged_attention", "rocm" if torch.version.hip else "cuda", properties):
        raise ValueError(reason)

    target = target_of(device)
    key, value, cache_format = readable(paged, stored, target)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, B)
    of_latents = is_latent(kv_cache)
    spec = spec_of(query, key, value, cache_format, block_tables, sparse, f, out.dtype, with_lse, of_latents)
    numbers = numbers_of(f, sparse, H, K, scale, block_tables.stride(0), S, T)
    aligned = not (key.data_ptr() | value.data_ptr()) & 15
    shapes = Shapes(T, S, N, block_tables.shape[1], aligned, numbers)
    offsets = (
        key.data_ptr() - kv_cache.data_ptr(),
        value.data_ptr() - (kv_cache if f.value_cache is None else f.value_cache).data_ptr(),
    )
    kernels = tuple(kernel for kernel in choose.kernels_of(target) if not kernel.serves(spec, target))
    return dataclasses.replace(form, offsets=offsets, kernels=kernels, spec=spec, target=target, shapes=shapes)
