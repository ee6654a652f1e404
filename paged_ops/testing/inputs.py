"""Frozen descriptions of calls, whose ``inputs`` make the arguments of an op.

Everything that an op must not read is NaN, or an id out of range, and every buffer lies between guard regions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops import reference
from paged_ops.layouts import INDEX_BYTES, ROW_ALIGNMENT, ROW_BYTES, has_index_scales, has_row_scales

F8_E4M3, F8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GUARD_BYTE, GUARD_BYTES = 0xA5, 1024
NAN_BYTE = 0x7F  # NaN in both float8 formats
FORMS = ("nhd", "hnd", "plane_first", "interleaved", "separate", "x_packed")
LATENT_FORMS = ("latent", "latent_padded")  # one key/value head; padded: unused columns between rows


class Memory:
    """Allocates tensors between guard regions; :meth:`check` detects writes to a guard."""

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
            assert bool((before == GUARD_BYTE).all() & (after == GUARD_BYTE).all()), (
                "a guard region was overwritten: a write out of bounds"
            )


@dataclasses.dataclass
class Inputs:
    """One call: ``op(*args, **kwargs)``. ``largest`` bounds ``|v|``, which rounding errors are proportional to."""

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
    def latent(self) -> bool:
        return self.form in LATENT_FORMS

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def value_size(self) -> int:
        return self.head_size if self.value_head_size is None else self.value_head_size

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
        if has_index_scales(self.kv_cache_dtype):
            nbytes, gap = B * INDEX_BYTES, 12 if self.form == "latent_padded" else 0
            blocks = nan((N, nbytes + gap), self.stored).fill_(0xFF)  # NaN in both dtypes of a block
            return blocks[:, :nbytes].unflatten(1, (B, INDEX_BYTES)), None
        if has_row_scales(self.kv_cache_dtype):
            gap = ROW_ALIGNMENT if self.form == "latent_padded" else 0
            rows = nan((N, B, ROW_BYTES + gap), self.stored)
            return rows.fill_(0xFF)[..., :ROW_BYTES], None  # NaN in all three dtypes of a row
        if self.latent:
            assert K == 1, "latents serve one key/value head"
            return nan((N, B, D + (8 if self.form == "latent_padded" else 0)), self.stored)[..., :D], None
        assert self.form == "x_packed", self.form
        x = 16 // self.stored.itemsize
        return nan((N, K, D // x, B, x), self.stored), nan((N, K, D, B), self.stored)

    def scale_arguments(self, memory: Memory, generator: torch.Generator) -> dict[str, Any]:
        """k_scale, v_scale and kv_cache_dtype of a call."""
        named: dict[str, Any] = {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}
        if self.scales is not None:
            size = 1 if self.scales == "tensor" else self.num_kv_heads
            for name in ("k_scale",) if self.latent else ("k_scale", "v_scale"):
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
    strided_vectors: bool = False  # also the vectors per head or per sequence
    padding: tuple[int, int] = (2, 3)  # sequences, tokens
    seed: int = 0
    scale: float | None = None  # None: D ** -0.5

    def batch(self, memory: Memory, generator: torch.Generator) -> tuple[int, int, Tensor, Tensor, Tensor]:
        """T, N, block_tables, seq_lens, query_start_loc. Unused entries of the tables are out of range."""
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
        """A cache with random live tokens and NaN elsewhere, its value cache, its keyword arguments, max ``|v|``."""
        spec = self.cache
        kv_cache, value_cache = spec.allocate(memory, N)
        named = spec.scale_arguments(memory, generator)
        slots = _live_slots(tables.cpu(), lens.cpu(), spec.block_size)
        K = spec.num_kv_heads
        key = self._random(generator, len(slots), K, spec.head_size)
        value = torch.randn(len(slots), K, spec.value_size, generator=generator)
        on_host: dict[str, Any] = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in named.items()}
        host = kv_cache.cpu(), None if value_cache is None else value_cache.cpu()
        if spec.latent:
            value, rotated = key[:, 0].split([spec.value_size, spec.head_size - spec.value_size], 1)
            reference.latent_cache_write(value, rotated, host[0], slots, **on_host)
        else:
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
        if self.cache.latent:
            named["value_head_size"] = self.cache.value_size
        for name, value in self.features:
            if name == "sinks":
                value = memory.put(torch.randn(self.num_heads, generator=generator))
            elif name == "alibi_slopes":
                value = memory.put(2.0 ** -torch.arange(1.0, self.num_heads + 1).remainder(8))
            elif name == "bidirectional_ranges":
                value = self._ranges(memory, generator)
            elif name == "selected_keys":
                named["selected_block_size"] = value[0]
                value = self._selected(memory, generator, T, *value)
            named[name] = value
        if self.strided_vectors:
            lens, starts = (torch.stack([vector, vector + 1], 1)[:, 0] for vector in (lens, starts))
            for name in {"alibi_slopes", "sinks", "k_scale", "v_scale"} & named.keys():
                strided = memory.nan((2 * len(named[name]),), torch.float32)
                strided[::2] = named[name]
                named[name] = strided[::2]
        if self.fp8_output:
            named["output_scale"] = memory.put(torch.tensor([0.01]))
            largest = min(largest / 0.01, 448.0)
        scale = self.cache.head_size**-0.5 if self.scale is None else self.scale
        return Inputs((query, kv_cache, tables, lens, starts, scale), named, memory, largest)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Numbers of queries and keys."""
        return torch.randn(shape, generator=generator)

    def _ranges(self, memory: Memory, generator: torch.Generator) -> Tensor:
        """Two ranges per sequence; the first contains a row. They may overlap and end past the sequence. Also padding
        that would make more keys visible if it were read."""

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        ranges = torch.full((len(self.seqs) + self.padding[0], 5, 2), 2**31 - 1, dtype=torch.int32)
        ranges[:, :, 0] = 0  # for sequences without rows
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

    def _selected(self, memory: Memory, generator: torch.Generator, T: int, block_size: int, per_head: bool) -> Tensor:
        """For each row and head up to 12 blocks of keys, or all but one if they are fewer, in any order. Padding
        between them and an entry past the sequence select nothing; rows of padding select keys that do not exist."""
        G, k = self.cache.num_kv_heads if per_head else 1, 12
        entries = torch.full((T, G, k), 2**31 - 1, dtype=torch.int32)
        row = 0
        for q_len, n in self.seqs:
            blocks = -(-n // block_size)
            for t, g in itertools.product(range(row, row + q_len), range(G)):
                chosen = torch.randperm(blocks, generator=generator)[: max(1, min(k - 2, blocks - 1))]
                of_row = torch.cat([chosen, torch.tensor([blocks]), torch.full((k,), -7)])[:k]
                entries[t, g] = of_row[torch.randperm(k, generator=generator)]
            row += q_len
        return memory.put(entries)

    def _query(self, memory: Memory, generator: torch.Generator, T: int) -> Tensor:
        H, D = self.num_heads, self.cache.head_size
        values = self._random(generator, T, H, D).to(self.cache.dtype)
        if not self.strided_query:
            return memory.put(values)
        fused = memory.nan(
            (T, H + 2 * self.cache.num_kv_heads, D), self.cache.dtype
        )  # the output of a fused QKV projection
        fused[:, :H] = values
        return fused[:, :H]


@dataclasses.dataclass(frozen=True)
class GatherCase(AttentionCase):
    """gather_kv of a batch; ``capacity`` is num_tokens minus the tokens of the batch."""

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
    """cascade_attention: ``seqs`` are the suffixes after ``prefix`` shared tokens."""

    prefix: int = 64

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        # The prefix is made as one more sequence of the batch, and then split off.
        seqs = (*self.seqs, (0, self.prefix))
        whole = dataclasses.replace(self, seqs=seqs, padding=(0, self.padding[1]))
        made = AttentionCase.inputs(whole, device)
        query, kv_cache, tables, lens, starts, scale = made.args
        put = made.memory.put
        args = (query, kv_cache, put(tables[-1:]), put(lens[-1:]), put(tables[:-1]), put(lens[:-1]), put(starts[:-1]))
        return Inputs((*args, scale), made.kwargs, made.memory, made.largest)


@dataclasses.dataclass(frozen=True)
class IndexCase(AttentionCase):
    """select_keys with keyword arguments ``features``; the value of ``weights`` is its dtype.

    With ``exact`` numbers, all scores are small integers: float32 holds them exactly, and many are equal.
    """

    k: int = 12
    exact: bool = False

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        memory, generator = Memory(device), torch.Generator().manual_seed(self.seed)
        T, N, tables, lens, starts = self.batch(memory, generator)
        index_cache, _, named, _ = self.filled_cache(memory, generator, N, tables, lens)
        query = self._query(memory, generator, T)
        named |= {"scale": 1.0 if self.exact else self.cache.head_size**-0.5, **dict(self.features)}
        if named.get("weights"):
            named["weights"] = memory.put(self._random(generator, T, self.num_heads).to(named["weights"]))
        return Inputs((query, index_cache, tables, lens, starts, self.k), named, memory)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        if self.exact:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return AttentionCase._random(self, generator, *shape)


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
    special: bool = False  # some values are NaN, infinite or out of fp8's range
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
class LatentWriteCase(WriteCase):
    """latent_cache_write; with ``strided``, latents and rotated columns are slices of one projection's output."""

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        R, P = self.cache.value_size, self.cache.head_size - self.cache.value_size
        separate = dataclasses.replace(self.cache, form="separate", head_size=R, value_head_size=P)
        made = WriteCase.inputs(dataclasses.replace(self, cache=separate), device)
        latent, rotated, _, slots = made.args
        kv_cache, _ = self.cache.allocate(made.memory, self.num_blocks)
        named = {name: value for name, value in made.kwargs.items() if name in ("k_scale", "kv_cache_dtype")}
        return Inputs((latent[:, 0], rotated[:, 0], kv_cache, slots), named, made.memory)


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
