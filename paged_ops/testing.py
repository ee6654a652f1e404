"""Named cases, input makers and tolerances: what tests, benchmarks and lowerings from elsewhere share.

``CASES[op]`` lists the cases of an op; ``case.inputs(device)`` makes its arguments; :func:`check` runs the op on them
and compares it with the reference. Everything that an op must not read is NaN (or an id out of range), every buffer
lies between guard regions, and preallocated outputs are filled with NaN first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import layouts, masks, reference
from paged_ops.features import EXCLUSIVE
from paged_ops.registry import OPS

F8_E4M3, F8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GUARD_BYTE, GUARD_BYTES = 0xA5, 1024
NAN_BYTE = 0x7F  # NaN in both float8 formats
FORMS = ("nhd", "hnd", "plane_first", "interleaved", "separate", "x_packed")


# Inputs --------------------------------------------------------------------------------------------------------------


class Memory:
    """Allocates tensors between guard regions, and tells whether a guard was overwritten."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = torch.full((nbytes + 2 * GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=self.device)
        self._buffers.append((buffer, nbytes))
        return buffer[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).view(tuple(shape))

    def nan(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self.empty(shape, dtype)
        if dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(NAN_BYTE)
        elif dtype.is_floating_point:
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(torch.iinfo(dtype).min)
        return tensor

    def put(self, values: Tensor) -> Tensor:
        tensor = self.empty(values.shape, values.dtype)
        return tensor.copy_(values)

    def check(self) -> None:
        """Raise AssertionError if anything was written outside of a tensor."""
        for buffer, nbytes in self._buffers:
            before, after = buffer[:GUARD_BYTES], buffer[GUARD_BYTES + nbytes :]
            assert bool((before == GUARD_BYTE).all() & (after == GUARD_BYTE).all()), "written outside of a tensor"


@dataclasses.dataclass
class Inputs:
    """One call: ``op(*args, **kwargs)``; ``largest`` bounds ``|v|``, by which rounding errors scale."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memory: Memory
    largest: float = 1.0


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A cache: its form, sizes and dtypes."""

    form: str = "nhd"
    num_kv_heads: int = 2
    head_size: int = 64
    value_head_size: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: dtype; torch.uint8: named by kv_cache_dtype
    kv_cache_dtype: str = "auto"
    scales: str | None = None  # None, "tensor" or "head"

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def value_size(self) -> int:
        return self.value_head_size or self.head_size

    def allocate(self, memory: Memory, num_blocks: int) -> tuple[Tensor, Tensor | None]:
        """kv_cache and value_cache full of NaN."""
        N, B, K, D = num_blocks, self.block_size, self.num_kv_heads, self.head_size
        nan = memory.nan
        if self.form == "nhd":
            return nan((N, 2, B, K, D), self.stored), None
        if self.form == "hnd":
            return nan((N, 2, K, B, D), self.stored).transpose(2, 3), None
        if self.form == "plane_first":
            return nan((2, N, B, K, D), self.stored).transpose(0, 1), None
        if self.form == "interleaved":
            return nan((N, B, 2 * K, D), self.stored), None
        if self.form == "separate":
            return nan((N, B, K, D), self.stored), nan((N, B, K, self.value_size), self.stored)
        assert self.form == "x_packed", self.form
        x = 16 // self.stored.itemsize
        return nan((N, K, D // x, B, x), self.stored), nan((N, K, D, B), self.stored)

    def scale_arguments(self, memory: Memory, generator: torch.Generator) -> dict[str, Any]:
        """k_scale, v_scale and kv_cache_dtype as a call would have them."""
        named: dict[str, Any] = {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}
        if self.scales is not None:
            size = 1 if self.scales == "tensor" else self.num_kv_heads
            for name in ("k_scale", "v_scale"):
                named[name] = memory.put(torch.rand(size, generator=generator) * 0.02 + 0.005)
        return named


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A ragged batch over a cache: ``seqs`` are pairs (q_len, seq_len)."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    cache: CacheSpec = CacheSpec()
    num_heads: int = 8
    features: tuple[tuple[str, Any], ...] = ()
    fp8_output: bool = False
    strided_query: bool = False
    strided_vectors: bool = False  # those of a number a head or a sequence
    padding: tuple[int, int] = (2, 3)  # sequences, tokens
    seed: int = 0

    def batch(self, memory: Memory, generator: torch.Generator) -> tuple[int, int, Tensor, Tensor, Tensor]:
        """T, N, block_tables, seq_lens, query_start_loc; unneeded entries of the tables are out of range."""
        B = self.cache.block_size
        q_lens = [q for q, _ in self.seqs] + [0] * self.padding[0]
        lens = [n for _, n in self.seqs] + [0] * self.padding[0]
        needed = [-(-n // B) for n in lens]
        N, M = sum(needed) + 3, max([*needed, 1]) + 1
        ids = torch.randperm(N, generator=generator, dtype=torch.int32)
        tables = torch.full((len(lens), M), 2**30, dtype=torch.int32)
        start = 0
        for s, blocks in enumerate(needed):
            tables[s, :blocks] = ids[start : start + blocks]
            start += blocks
        starts = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        lens_ = torch.tensor(lens, dtype=torch.int32)
        return sum(q_lens) + self.padding[1], N, memory.put(tables), memory.put(lens_), memory.put(starts)

    def filled_cache(
        self, memory: Memory, generator: torch.Generator, N: int, tables: Tensor, lens: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, Any], float]:
        """A cache whose live tokens are random and whose every other cell is NaN, its arguments, and max ``|v|``."""
        spec = self.cache
        kv_cache, value_cache = spec.allocate(memory, N)
        named = spec.scale_arguments(memory, generator)
        slots = _live_slots(tables.cpu(), lens.cpu(), spec.block_size)
        K = spec.num_kv_heads
        key = torch.randn(len(slots), K, spec.head_size, generator=generator)
        value = torch.randn(len(slots), K, spec.value_size, generator=generator)
        on_host: dict[str, Any] = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in named.items()}
        host = kv_cache.cpu(), None if value_cache is None else value_cache.cpu()
        reference.reshape_and_cache(key, value, host[0], slots, value_cache=host[1], **on_host)
        kv_cache.copy_(host[0])
        if value_cache is not None and host[1] is not None:
            value_cache.copy_(host[1])
            named["value_cache"] = value_cache
        largest = float(value.abs().max()) if value.numel() else 1.0
        return kv_cache, value_cache, named, largest

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """The arguments of paged_attention and paged_attention_with_lse."""
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        T, N, tables, lens, starts = self.batch(memory, generator)
        kv_cache, _, named, largest = self.filled_cache(memory, generator, N, tables, lens)
        query = self._query(memory, generator, T)
        for name, value in self.features:
            if name == "sinks":
                value = memory.put(torch.randn(self.num_heads, generator=generator))
            elif name == "alibi_slopes":
                value = memory.put(2.0 ** -torch.arange(1.0, self.num_heads + 1).remainder(8))
            elif name == "bidirectional_ranges":
                value = self._ranges(memory, generator)
            named[name] = value
        if self.strided_vectors:
            lens, starts = (torch.stack([vector, vector + 1], 1)[:, 0] for vector in (lens, starts))
            for name in {"alibi_slopes", "sinks", "k_scale", "v_scale"} & named.keys():
                spread = memory.nan((2 * len(named[name]),), torch.float32)
                spread[::2] = named[name]
                named[name] = spread[::2]
        if self.fp8_output:
            named["output_scale"] = memory.put(torch.tensor([0.01]))
            largest = min(largest / 0.01, 448.0)
        scale = self.cache.head_size**-0.5
        return Inputs((query, kv_cache, tables, lens, starts, scale), named, memory, largest)

    def _ranges(self, memory: Memory, generator: torch.Generator) -> Tensor:
        """Two ranges per sequence, the first of which holds a row; they may overlap and end past it. And padding that
        would show more."""

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        ranges = torch.full((len(self.seqs) + self.padding[0], 5, 2), 2**31 - 1, dtype=torch.int32)
        ranges[:, :, 0] = 0  # of sequences without rows
        for s, (q_len, n) in enumerate(self.seqs):
            low = max(0, n - 2 * q_len - 60)
            start = number(low, max(n, 1))
            pairs = [
                (start, number(max(start, n - q_len) + 1, n + 4)),
                sorted((number(low, n + 3), number(low, n + 3))),
            ]
            order = torch.randperm(5, generator=generator)
            ranges[s] = torch.tensor([*pairs, (-1, n), (n, 0), (5, 5)])[order]
        return memory.put(ranges)

    def _query(self, memory: Memory, generator: torch.Generator, T: int) -> Tensor:
        H, D = self.num_heads, self.cache.head_size
        values = torch.randn(T, H, D, generator=generator).to(self.cache.dtype)
        if not self.strided_query:
            return memory.put(values)
        fused = memory.nan((T, H + 2 * self.cache.num_kv_heads, D), self.cache.dtype)  # a fused qkv
        fused[:, :H] = values
        return fused[:, :H]


@dataclasses.dataclass(frozen=True)
class GatherCase(AttentionCase):
    """gather_kv of a batch; ``capacity`` is num_tokens over the batch's tokens."""

    capacity: int = 5
    out_dtype: torch.dtype | None = None

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        _, N, tables, lens, _ = self.batch(memory, generator)
        kv_cache, _, named, _ = self.filled_cache(memory, generator, N, tables, lens)
        if self.out_dtype is not None:
            named["dtype"] = self.out_dtype
        num_tokens = max(0, sum(n for _, n in self.seqs) + self.capacity)
        return Inputs((kv_cache, tables, lens, num_tokens), named, memory)


@dataclasses.dataclass(frozen=True)
class CascadeCase(AttentionCase):
    """cascade_attention: ``seqs`` are the suffixes, behind ``prefix`` shared tokens."""

    prefix: int = 64

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        # The prefix is one more sequence of the batch, split off again.
        seqs = (*self.seqs, (0, self.prefix))
        whole = dataclasses.replace(self, seqs=seqs, padding=(0, self.padding[1]))
        made = AttentionCase.inputs(whole, device)
        query, kv_cache, tables, lens, starts, scale = made.args
        put = made.memory.put
        args = (query, kv_cache, put(tables[-1:]), put(lens[-1:]), put(tables[:-1]), put(lens[:-1]), put(starts[:-1]))
        return Inputs((*args, scale), made.kwargs, made.memory, made.largest)


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """reshape_and_cache of ``tokens`` rows, every ``skip``-th of them padding, ``extra`` rows past slot_mapping."""

    name: str
    cache: CacheSpec = CacheSpec()
    tokens: int = 21
    skip: int = 5
    extra: int = 3
    num_blocks: int = 4
    strided: bool = False
    slots: torch.dtype = torch.int64
    special: bool = False  # among the values: NaN, infinities, and what saturates
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        spec, rows = self.cache, self.tokens + self.extra
        K, D, Dv = spec.num_kv_heads, spec.head_size, spec.value_size
        fused = memory.put(torch.randn(rows, K, 2 * D + Dv, generator=generator).to(spec.dtype))
        if self.special and fused.numel():
            flat = fused.view(-1)
            for n, number in enumerate((torch.nan, torch.inf, -torch.inf, 1e4, -1e4, 1e-6, 0.0, -0.0)):
                flat[n * 7 : n * 7 + 1] = number
        key, value = fused[..., D : 2 * D], fused[..., 2 * D :]
        if not self.strided:
            key, value = memory.put(key.contiguous()), memory.put(value.contiguous())
        available = self.num_blocks * spec.block_size
        slots = torch.randperm(available, generator=generator)[: self.tokens].to(self.slots)
        assert len(slots) == self.tokens, "more tokens than slots"
        if self.skip:
            slots[:: self.skip] = -1
            slots[self.skip - 1 :: 2 * self.skip] = -17
        kv_cache, value_cache = spec.allocate(memory, self.num_blocks)
        named = spec.scale_arguments(memory, generator)
        if value_cache is not None:
            named["value_cache"] = value_cache
        return Inputs((key, value, kv_cache, memory.put(slots)), named, memory)


@dataclasses.dataclass(frozen=True)
class BlocksCase:
    """copy_blocks within, or swap_blocks between, ``layers`` caches."""

    name: str
    swap: bool
    cache: CacheSpec = CacheSpec()
    layers: int = 3
    num_blocks: int = 9
    pairs: tuple[tuple[int, int], ...] = ((0, 5), (0, 6), (3, 1), (7, 8))
    mapping_on_host: bool = True
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        mapping = torch.tensor(self.pairs, dtype=torch.int64).view(-1, 2)
        if not self.mapping_on_host:
            mapping = memory.put(mapping)
        source = self._caches(memory, generator)
        if not self.swap:
            return Inputs((source, mapping), {}, memory)
        return Inputs((source, self._caches(memory, generator), mapping), {}, memory)

    def _caches(self, memory: Memory, generator: torch.Generator) -> list[Tensor]:
        caches = []
        for _ in range(self.layers):
            for cache in self.cache.allocate(memory, self.num_blocks):
                if cache is not None:
                    words = torch.randint(0, 100, cache.shape, generator=generator, dtype=torch.uint8)
                    cache.copy_(words.to(cache.dtype))
                    caches.append(cache)
        return caches


@dataclasses.dataclass(frozen=True)
class MergeCase:
    """merge_attention_states; a tenth of either side is empty, as -inf and +inf, with NaN outputs."""

    name: str
    tokens: int = 13
    num_heads: int = 4
    head_size: int = 64
    dtype: torch.dtype = torch.float32
    empty: float = 0.1
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        args: list[Tensor] = []
        shape, largest = (self.tokens, self.num_heads), 1.0
        for infinity in (-torch.inf, torch.inf):
            out = torch.randn(*shape, self.head_size, generator=generator).to(self.dtype)
            largest = max([largest, *out.abs().flatten().tolist()])
            lse = torch.randn(shape, generator=generator) * 3
            gone = torch.rand(shape, generator=generator) < self.empty
            if self.tokens:
                gone[0] = self.empty > 0  # both sides empty
            out[gone], lse[gone] = torch.nan, infinity
            args += [memory.put(out), memory.put(lse)]
        return Inputs(tuple(args), {}, memory, largest)


def _live_slots(tables: Tensor, lens: Tensor, B: int) -> Tensor:
    slots = [torch.empty(0, dtype=torch.int64)]
    for s, seq_len in enumerate(lens.tolist()):
        j = torch.arange(seq_len)
        slots.append(tables[s, j // B].long() * B + j % B)
    return torch.cat(slots)


# Cases ---------------------------------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 1), (1, 17), (1, 64), (1, 130), (1, 33)),
    "speculative": ((2, 2), (5, 40), (16, 16), (3, 129), (1, 7)),
    "chunked_prefill": ((17, 50), (32, 96), (5, 5)),
    "prefill": ((33, 33), (64, 64), (7, 7)),
    "mixed": ((1, 40), (3, 19), (20, 61), (33, 33), (1, 128)),
    "holes": ((0, 12), (1, 30), (0, 0), (7, 7), (0, 5)),
    "query_past_keys": ((9, 4), (2, 1), (1, 3)),
    "long": ((1, 700), (130, 390), (1, 257)),
    "padding_only": (),
    # As many rows as eight sequences of seven tokens have: what decides by shapes must not take it for those.
    "uneven": ((0, 3), (40, 90), (0, 0), (8, 30), (2, 2), (0, 7), (1, 200), (5, 5)),
}
SPARSE = masks.SparsePattern(block_size=16, local_blocks=2, vert_stride=3)
FEATURES: dict[str, tuple[str, Any]] = {
    "noncausal": ("causal", False),
    "window": ("sliding_window", 13),
    "chunk": ("attention_chunk", 24),
    "cap": ("soft_cap", 2.0),
    "alibi": ("alibi_slopes", True),
    "sinks": ("sinks", True),
    "sparse": ("block_sparse", [*SPARSE]),
    "ranges": ("bidirectional_ranges", True),
}


def _allowed(*names: str) -> bool:
    arguments = {"causal=False" if name == "noncausal" else FEATURES[name][0] for name in names}
    return not any(arguments >= set(pair) for pair in EXCLUSIVE)


def _attention_cases() -> Iterator[AttentionCase]:
    def case(name: str, batch: str = "mixed", **changes: Any) -> AttentionCase:
        spec = {key: changes.pop(key) for key in list(changes) if key in CacheSpec.__dataclass_fields__}
        return AttentionCase(name, BATCHES[batch], CacheSpec(**spec), **changes)

    for batch, dtype in itertools.product(BATCHES, layouts.MODEL_DTYPES):
        yield case(f"{batch}-{_short(dtype)}", batch, dtype=dtype)
    for size in (0, 1, 2):
        for names in itertools.combinations(FEATURES, size):
            if size and _allowed(*names):
                chosen = tuple(FEATURES[name] for name in names)
                yield case("-".join(names), features=chosen)
                yield case("-".join(names) + "-bf16-decode", "decode", features=chosen, dtype=torch.bfloat16)
    every = tuple(FEATURES[name] for name in ("window", "chunk", "cap", "alibi", "sinks"))
    for form in FORMS:
        yield case(f"{form}-fp16", form=form, dtype=torch.float16)
        yield case(f"{form}-all-features", form=form, features=every, strided_query=True)
        yield case(f"{form}-b48-decode-bf16", "decode", form=form, block_size=48, dtype=torch.bfloat16)
        for stored, name in ((F8_E4M3, "auto"), (F8_E5M2, "auto"), (torch.uint8, "fp8"), (torch.uint8, "fp8_e5m2")):
            scales = {"auto": "head", "fp8": "tensor"}.get(name)
            fp8: dict[str, Any] = {"cache_dtype": stored, "kv_cache_dtype": name, "scales": scales, "form": form}
            yield case(f"{form}-{_short(stored)}-{name}-fp16", dtype=torch.float16, **fp8)
    for D in (8, 13, 24, 32, 40, 72, 80, 96, 112, 120, 128, 192, 256):
        yield case(f"d{D}", head_size=D)
        yield case(f"d{D}-fp16-decode", "decode", head_size=D, dtype=torch.float16)
    for D, Dv in ((192, 128), (64, 80), (13, 24), (128, 64)):
        yield case(f"d{D}-dv{Dv}", form="separate", head_size=D, value_head_size=Dv)
    for B in (1, 8, 16, 32, 64, 128, 544, 1056):
        yield case(f"b{B}", block_size=B, form="hnd")
        yield case(f"b{B}-decode", "decode", block_size=B)
    for H, K in ((1, 1), (4, 4), (6, 2), (5, 1), (16, 1), (40, 8), (71, 1)):
        yield case(f"h{H}-k{K}", num_heads=H, num_kv_heads=K)
        yield case(f"h{H}-k{K}-decode-bf16", "decode", num_heads=H, num_kv_heads=K, dtype=torch.bfloat16)
    for kind in ({"homo_head": True}, {"homo_head_group": True}, {"rank": 1, "world_size": 2}, {"local_blocks": 0}):
        sparse = SPARSE._replace(vert_stride=8)._replace(**kind)
        for batch in ("long", "mixed", "decode"):
            name = f"sparse-{next(iter(kind))}-{batch}"
            yield case(name, batch, features=(("block_sparse", [*sparse]), FEATURES["sinks"]))
    # Masks go wrong at their seams: long histories, whole prompts, rows before position 0, empty queries.
    for size in (1, 2):
        for names in itertools.combinations(FEATURES, size):
            if _allowed(*names):
                chosen = tuple(FEATURES[name] for name in names)
                for batch in ("long", "prefill", "query_past_keys") + (("holes",) if size == 1 else ()):
                    yield case(f"{'-'.join(names)}-{batch}", batch, features=chosen)
    tiles = ((128, 16, "nhd", 8, 2), (128, 48, "hnd", 12, 2), (64, 8, "nhd", 8, 1), (128, 64, "plane_first", 8, 8))
    for D, B, form, H, K in (*tiles, (64, 128, "separate", 6, 1)):  # prefill as tensor cores like it
        shape = {"head_size": D, "block_size": B, "form": form, "num_heads": H, "num_kv_heads": K}
        yield case(f"long-d{D}-b{B}-{form}-bf16", "long", dtype=torch.bfloat16, strided_query=True, **shape)
        for name in ("noncausal", "sinks"):
            features = (FEATURES[name],)
            yield case(f"long-d{D}-b{B}-{form}-{name}-fp16", "long", dtype=torch.float16, features=features, **shape)
    for dtype in layouts.MODEL_DTYPES:
        yield case(f"fp8-output-{_short(dtype)}", dtype=dtype, fp8_output=True)
    yield case("fp8-output-fp8-cache", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", fp8_output=True)
    vectors: dict[str, Any] = {"strided_vectors": True, "features": (FEATURES["alibi"], FEATURES["sinks"])}
    yield case("strided-vectors-fp16", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", **vectors)
    yield case("strided-vectors-decode-bf16", "decode", dtype=torch.bfloat16, **vectors)
    yield case("no-padding", "decode", padding=(0, 0))
    for name, feature in FEATURES.items():
        yield case(f"uneven-{name}", "uneven", padding=(0, 0), features=(feature,))
    yield case("uneven-sparse-bf16", "uneven", padding=(0, 0), features=(FEATURES["sparse"],), dtype=torch.bfloat16)
    yield AttentionCase("one-token", ((1, 1),), padding=(0, 0))
    yield from _random_cases(100)


def _random_cases(count: int) -> Iterator[AttentionCase]:
    """Seeded mixtures of everything, for what no list of pairs thinks of."""
    for n in range(count):
        rng = random.Random(n)
        form = rng.choice(FORMS)
        dtype = rng.choice(layouts.MODEL_DTYPES)
        stored = rng.choice((None, None, F8_E4M3, F8_E5M2))
        K, G = rng.choice(((1, 1), (1, 7), (2, 4), (3, 5), (4, 2), (2, 16)))
        D = rng.choice((16, 32, 64, 80, 128, 192) if form == "x_packed" else (13, 24, 40, 64, 72, 96, 128, 256))
        Dv = rng.choice((None, 32, 56)) if form == "separate" else None
        scales = rng.choice((None, "tensor", "head")) if stored else None
        spec = CacheSpec(form, K, D, Dv, rng.choice((1, 8, 16, 48, 64)), dtype, stored, "auto", scales)
        names = [name for name in FEATURES if random.Random(f"{name}-{n}").random() < 0.4]  # a new one moves no other
        while not _allowed(*names):
            names.remove(rng.choice(names))
        if "sparse" in names and 16 % spec.block_size:
            spec = dataclasses.replace(spec, block_size=16)
        batch = [(rng.choice((1, 1, 2, 5, 33)), rng.choice((3, 40, 300))) for _ in range(6)]
        batch = [(q, rng.randint(1, longest)) for q, longest in batch]  # some have more rows than keys
        yield AttentionCase(
            f"random-{n}",
            tuple(batch),
            spec,
            num_heads=K * G,
            features=tuple(FEATURES[name] for name in names),
            fp8_output=rng.random() < 0.1,
            strided_query=rng.random() < 0.3,
            padding=(rng.randint(0, 3), rng.randint(0, 5)),
            seed=n,
        )


def _cache_specs() -> Iterator[tuple[str, CacheSpec]]:
    for form, dtype in itertools.product(FORMS, layouts.MODEL_DTYPES):
        yield f"{form}-{_short(dtype)}", CacheSpec(form, dtype=dtype, head_size=32)
    for form, (stored, name) in itertools.product(FORMS, ((F8_E4M3, "auto"), (F8_E5M2, "fp8_e5m2"))):
        for scales, dtype in ((None, torch.float32), ("tensor", torch.float16), ("head", torch.bfloat16)):
            spec = CacheSpec(form, 3, 32, None, 8, dtype, stored, name, scales)
            yield f"{form}-{_short(stored)}-{scales}-{_short(dtype)}", spec
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        yield f"uint8-{name}", CacheSpec(cache_dtype=torch.uint8, kv_cache_dtype=name, scales="head")
    for D, B in ((13, 1), (24, 544), (80, 16), (256, 48), (120, 1056)):
        yield f"d{D}-b{B}", CacheSpec("hnd", 2, D, None, B)
    yield "dv", CacheSpec("separate", head_size=48, value_head_size=32, dtype=torch.bfloat16)


def _write_cases() -> Iterator[WriteCase]:
    for name, spec in _cache_specs():
        blocks = max(4, -(-32 // spec.block_size))
        yield WriteCase(name, spec, num_blocks=blocks)
        yield WriteCase(f"{name}-strided", spec, num_blocks=blocks, strided=True, slots=torch.int32, special=True)
    yield WriteCase("nothing", tokens=0, extra=0, skip=0)
    yield WriteCase("only-padding", skip=1)
    yield WriteCase("no-rows-but-extra", tokens=0, extra=4, skip=0)


def _short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", F8_E4M3: "e4m3", F8_E5M2: "e5m2"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _gather_cases() -> Iterator[GatherCase]:
    for name, spec in _cache_specs():
        fp8 = spec.stored.itemsize == 1
        yield GatherCase(name, BATCHES["holes"], spec, out_dtype=spec.dtype if fp8 else None)
    for capacity in (0, -1, -20, -1000):
        yield GatherCase(f"capacity{capacity}", BATCHES["holes"], capacity=capacity)
    yield GatherCase("to-fp32", BATCHES["mixed"], CacheSpec(dtype=torch.bfloat16), out_dtype=torch.float32)
    yield GatherCase("to-bf16", BATCHES["mixed"], CacheSpec(), out_dtype=torch.bfloat16)
    yield GatherCase("padding-only", ())


def _blocks_cases(swap: bool) -> Iterator[BlocksCase]:
    for form, dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16, F8_E4M3, torch.uint8)):
        yield BlocksCase(f"{form}-{_short(dtype)}", swap, CacheSpec(form, head_size=32, cache_dtype=dtype))
    yield BlocksCase("no-pairs", swap, pairs=())
    yield BlocksCase("no-caches", swap, layers=0)
    yield BlocksCase("odd-block", swap, CacheSpec(num_kv_heads=3, head_size=13, block_size=1, cache_dtype=torch.uint8))
    yield BlocksCase("runs", swap, pairs=((0, 4), (1, 5), (2, 6), (3, 8)))
    if swap:
        yield BlocksCase("both-roles", swap, pairs=((0, 1), (1, 0), (1, 2)))
    else:
        yield BlocksCase("device-mapping", swap, mapping_on_host=False)


def _merge_cases() -> Iterator[MergeCase]:
    for dtype, D, H in itertools.product(layouts.MODEL_DTYPES, (32, 80, 128, 256), (1, 4)):
        yield MergeCase(f"{_short(dtype)}-d{D}-h{H}", head_size=D, num_heads=H, dtype=dtype)
    yield MergeCase("all-empty", empty=2.0)
    yield MergeCase("none-empty", empty=0.0)
    yield MergeCase("no-tokens", tokens=0)
    yield MergeCase("odd-d13", head_size=13)


def _cascade_cases() -> Iterator[CascadeCase]:
    suffixes = {"decode": ((1, 1), (1, 17), (1, 40)), "mixed": ((1, 9), (5, 5), (20, 33)), "padding": ()}
    for (name, seqs), prefix in itertools.product(suffixes.items(), (0, 16, 64, 75)):
        yield CascadeCase(f"{name}-prefix{prefix}", seqs, prefix=prefix)
    for form in FORMS:
        spec = CacheSpec(form, dtype=torch.bfloat16)
        yield CascadeCase(f"{form}-bf16", suffixes["mixed"], spec, features=(FEATURES["sinks"], FEATURES["cap"]))
    fp8 = CacheSpec(dtype=torch.float16, cache_dtype=F8_E4M3, scales="head")
    yield CascadeCase("fp8", suffixes["mixed"], fp8, fp8_output=True)


Case = AttentionCase | WriteCase | BlocksCase | MergeCase

CASES: dict[str, list[Case]] = {
    "reshape_and_cache": list(_write_cases()),
    "paged_attention": list(_attention_cases()),
    "paged_attention_with_lse": list(_attention_cases()),
    "merge_attention_states": list(_merge_cases()),
    "cascade_attention": list(_cascade_cases()),
    "copy_blocks": list(_blocks_cases(swap=False)),
    "swap_blocks": list(_blocks_cases(swap=True)),
    "gather_kv": list(_gather_cases()),
}


def case_named(op: str, name: str) -> Case:
    """One case of an op by its name."""
    found = [case for case in CASES[op] if case.name == name]
    assert len(found) == 1, f"{len(found)} cases of {op} are called {name}"
    return found[0]


# What compiled runs take from the full list: at most 60, every feature and form at least once.
COMPILED: dict[str, tuple[str, ...]] = {
    "reshape_and_cache": ("nhd-fp32", "hnd-bf16", "plane_first-fp16", "interleaved-fp32", "separate-e4m3-head-bf16",
                          "x_packed-fp16", "x_packed-e4m3-tensor-fp16-strided", "uint8-fp8_e5m2", "only-padding"),
    "paged_attention": ("decode-fp32", "mixed-bf16", "prefill-fp16", "holes-fp32", "padding_only-fp32", "window-cap",
                        "noncausal-sinks", "chunk-alibi", "window-sinks-bf16-decode", "sinks-sparse",
                        "hnd-all-features", "interleaved-fp16", "x_packed-fp16", "separate-e4m3-auto-fp16",
                        "plane_first-uint8-fp8-fp16", "nhd-e5m2-auto-fp16", "fp8-output-bf16", "window-ranges",
                        "d192-dv128", "d13"),
    "paged_attention_with_lse": ("mixed-fp32", "speculative-fp16", "sinks", "cap-alibi", "query_past_keys-fp32",
                                 "x_packed-all-features", "h71-k1", "b544-decode"),
    "merge_attention_states": ("fp32-d32-h1", "bf16-d128-h4", "all-empty"),
    "cascade_attention": ("decode-prefix64", "mixed-prefix75", "hnd-bf16", "fp8"),
    "copy_blocks": ("nhd-fp32", "x_packed-bf16", "device-mapping", "no-caches"),
    "swap_blocks": ("nhd-fp32", "hnd-bf16", "both-roles"),
    "gather_kv": ("nhd-fp32", "x_packed-e4m3-tensor-fp16", "uint8-fp8_e5m2", "capacity-20"),
}  # fmt: skip


# Comparison ----------------------------------------------------------------------------------------------------------


def mutated_arguments(op: str) -> list[str]:
    """The names of the arguments that an op writes, from its schema."""
    schema = getattr(torch.ops.paged_ops, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def clone_inputs(inputs: Inputs, device: torch.device | str | None = None, wide: bool = False) -> Inputs:
    """The same call on clones that keep their strides; ``wide`` makes the query (or the partial outputs) float64."""

    def clone(value: Any) -> Any:
        if isinstance(value, Tensor):
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or value.device)
            return copy.copy_(value)
        return [clone(each) for each in value] if isinstance(value, list) else value

    args = [clone(value) for value in inputs.args]
    if wide:
        args = [
            value.double() if isinstance(value, Tensor) and n in (0, 2) and value.dim() == 3 else value
            for n, value in enumerate(args)
        ]
    return dataclasses.replace(
        inputs, args=tuple(args), kwargs={name: clone(value) for name, value in inputs.kwargs.items()}
    )


def ulp(dtype: torch.dtype, at: float) -> float:
    """The distance of neighbouring numbers of ``dtype`` at magnitude ``at``."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(at, torch.finfo(dtype).tiny)))


# The error budget: twice the error of the plain computation in the same dtype (the reference run in it), plus a floor.
#   out   one ulp of the output's dtype at the largest |v|: an average of values rounds there
#   lse   4 ulp of float32 at the largest |lse|: base-2 inside, one multiplication by ln 2 and one logarithm outside
LSE_ULPS = 4


def assert_close(name: str, got: Tensor, plain: Tensor, truth: Tensor, largest: float) -> None:
    """Raise AssertionError unless ``got`` is within the error budget of ``truth``; infinities must agree exactly."""
    assert got.shape == truth.shape, f"{name}: shape {list(got.shape)} instead of {list(truth.shape)}"
    where = got.device if got.is_cuda else torch.device("cpu")  # large ones are compared where they are
    got_, plain_, truth_ = (each.detach().to(where).double() for each in (got, plain, truth))
    assert not got_.isnan().any(), f"{name}: NaN in {int(got_.isnan().sum())} of {got_.numel()} elements"
    infinite = truth_.isinf()
    assert torch.equal(got_[infinite], truth_[infinite]), f"{name}: infinities are missing"
    assert not got_[~infinite].isinf().any(), f"{name}: infinities where the truth is finite"
    if infinite.all():
        return
    got_, plain_, truth_ = got_[~infinite], plain_[~infinite], truth_[~infinite]
    floor = LSE_ULPS * ulp(torch.float32, float(truth_.abs().max())) if name == "lse" else ulp(got.dtype, largest)
    budget = 2 * float((plain_ - truth_).abs().max()) + floor
    error = float((got_ - truth_).abs().max())
    assert error <= budget, (
        f"{name}: error {error:.3g} over the budget {budget:.3g} ({got.dtype}, largest {largest:.3g})"
    )


def assert_result(op: str, inputs: Inputs, before: Inputs, results: Any) -> None:
    """Compare what a call returned and wrote with the reference run on ``before``, its inputs before the call."""
    inputs.memory.check()
    plain_call, function = clone_inputs(before, "cpu"), getattr(reference, op)
    plain = function(*plain_call.args, **plain_call.kwargs)
    mutated = mutated_arguments(op)
    if mutated:
        for name in mutated:
            got, want = (_argument(op, call, name) for call in (inputs, plain_call))
            for a, b in zip(_tensors(got), _tensors(want), strict=True):
                assert_same_bytes(name, a, b)
        return
    outs = [r.name for r in getattr(torch.ops.paged_ops, op).out._schema.arguments if r.alias_info is not None]
    if op == "gather_kv":
        for name, got, want in zip(outs, _tensors(results), _tensors(plain), strict=True):
            assert_same_bytes(name, got, want)
        return
    wide = clone_inputs(before, "cpu", wide=True)
    truth = function(*wide.args, **wide.kwargs)
    for name, got, near, exact in zip(outs, _tensors(results), _tensors(plain), _tensors(truth), strict=True):
        assert_close(name, got, near, exact, inputs.largest)


def assert_same_bytes(name: str, got: Tensor, want: Tensor) -> None:
    """Raise AssertionError unless two tensors have the same dtype, shape and bits."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: {got.dtype} {list(got.shape)}"
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (got, want))
    assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} bytes differ"


def check(op: str, case: Case, device: torch.device | str = "cpu", function: Callable[..., Any] | None = None) -> None:
    """Run an op (or ``function`` for it) on a case, twice, and compare: right, deterministic, within its memory."""
    call = function or OPS[op]
    inputs = case.inputs(device)
    before = clone_inputs(inputs)
    results = call(*inputs.args, **inputs.kwargs)
    assert_result(op, inputs, before, results)
    if not mutated_arguments(op):
        for first, second in zip(_tensors(results), _tensors(call(*inputs.args, **inputs.kwargs)), strict=True):
            assert_same_bytes("the second run", second, first)


def check_out(op: str, case: Case, device: torch.device | str = "cpu") -> None:
    """Run an op's .out overload into tensors full of NaN, and compare."""
    inputs = case.inputs(device)
    before = clone_inputs(inputs)
    results = OPS[op](*inputs.args, **inputs.kwargs)
    packet = getattr(torch.ops.paged_ops, op)
    names = [a.name for a in packet.out._schema.arguments if a.alias_info is not None]
    outs = [inputs.memory.nan(result.shape, result.dtype) for result in _tensors(results)]
    packet.out(*inputs.args, **inputs.kwargs, **dict(zip(names, outs, strict=True)))
    assert_result(op, inputs, before, outs)


def _argument(op: str, call: Inputs, name: str) -> Any:
    names = [a.name for a in getattr(torch.ops.paged_ops, op).default._schema.arguments]
    return dict(zip(names, call.args, strict=False)).get(name, call.kwargs.get(name))


def _tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)
