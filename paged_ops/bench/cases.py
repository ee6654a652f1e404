"""The measured cases: batches by shape, their bytes and operations, and their inputs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_ops.fp8 import dequantise_rows, quantise_rows
from paged_ops.layouts import FP8_DS_MLA, ROW_BYTES, ROW_LATENT, ROW_ROTATED, has_row_scales

Seqs = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention of a ragged batch over a paged cache; ``seqs`` are pairs (q_len, seq_len).

    The cache has the layout NHD. With a ``value_head_size`` it is LATENT if there is one key/value head, else keys and
    values are two caches.
    """

    group: str
    name: str
    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype
    captured_len: int | None = None  # all seq_lens at capture; replays have the true lengths
    value_head_size: int | None = None
    kv_cache_dtype: str = "auto"  # fp8_ds_mla: latent rows with their own scales, uint8 [N, B, 656]
    selected: int = 0  # keys that each row selects, at random; 0: it sees all

    @property
    def key(self) -> str:
        """A unique description, which ``--cases`` matches and records are found by."""
        return f"{self.group} {self.num_heads}/{self.num_kv_heads} {self.name}"

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def latent(self) -> bool:
        return self.value_head_size is not None and self.num_kv_heads == 1

    @property
    def separate(self) -> bool:
        """Whether keys and values are two caches, with different head sizes."""
        return self.value_head_size is not None and not self.latent

    @property
    def value_size(self) -> int:
        return self.head_size if self.value_head_size is None else self.value_head_size

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.seqs)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the sequences, or those that rows select, once."""
        tokens, sizes = sum(seq_len for _, seq_len in self.seqs), self.head_size if self.latent else self._both_sizes
        if self.selected:
            tokens = min(tokens, self._pairs)
        if has_row_scales(self.kv_cache_dtype):
            return tokens * ROW_BYTES
        return tokens * self.num_kv_heads * sizes * self.stored.itemsize

    @property
    def bytes(self) -> int:
        """The fewest bytes that a call moves: keys, values and queries read once, the result written once."""
        return self.kv_bytes + self.num_tokens * self.num_heads * self._both_sizes * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of both matmuls, over the pairs of query and key that causality and the selection allow."""
        return 2 * self.num_heads * self._both_sizes * self._pairs

    @property
    def _pairs(self) -> int:
        if self.selected:
            return sum(min(self.selected, i + 1) for q, n in self.seqs for i in range(n - q, n))
        return sum(q * (n - q) + q * (q + 1) // 2 for q, n in self.seqs)

    @property
    def _both_sizes(self) -> int:
        return self.head_size + self.value_size


@dataclasses.dataclass
class Inputs:
    """The arguments of one call of :func:`paged_ops.paged_attention`."""

    case: Case
    query: Tensor  # [T, H, D]
    kv_cache: Tensor  # [N, 2, B, K, D], separate [N, B, K, D], latent [N, B, D] or rows of bytes
    block_tables: Tensor  # int32 [S, M]
    seq_lens: Tensor  # int32 [S]
    query_start_loc: Tensor  # int32 [S + 1]
    value_cache: Tensor | None = None  # separate [N, B, K, Dv]
    selected_keys: Tensor | None = None  # int32 [T, 1, k]

    @property
    def scale(self) -> float:
        return self.case.head_size**-0.5

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.query, self.kv_cache, self.block_tables, self.seq_lens, self.query_start_loc, self.scale

    @property
    def kwargs(self) -> dict[str, Any]:
        name = self.case.kv_cache_dtype
        named: dict[str, Any] = {} if name == "auto" else {"kv_cache_dtype": name}
        if self.selected_keys is not None:
            named["selected_keys"] = self.selected_keys
        if self.case.separate:
            return {**named, "value_cache": self.value_cache}
        return {**named, "value_head_size": self.case.value_size} if self.case.latent else named

    def keys_and_values(self, s: int) -> tuple[Tensor, Tensor]:
        """Keys ``[n, K, D]`` and values ``[n, K, Dv]`` of a sequence, in the model's dtype."""
        if self.case.latent:
            rows = self._tokens(self.kv_cache, s)[:, None]
            scaled, dtype = has_row_scales(self.case.kv_cache_dtype), self.case.dtype
            key = dequantise_rows(rows, dtype) if scaled else rows.to(dtype)
            return key, key[..., : self.case.value_size]
        if self.value_cache is not None:
            key, value = (self._tokens(cache, s).to(self.case.dtype) for cache in (self.kv_cache, self.value_cache))
            return key, value
        key, value = self.sequence(s)
        return key, value

    def slots_of_selected(self) -> Tensor:
        """The slots of the selected keys in the cache, ``[T, 1, k]``; -1 for padding."""
        assert self.selected_keys is not None
        counts = torch.tensor([q_len for q_len, _ in self.case.seqs], device=self.query.device)
        tables = self.block_tables.repeat_interleave(counts, 0)
        keys, B = self.selected_keys[:, 0].long(), self.case.block_size
        slots = tables.gather(1, keys.clamp(min=0) // B) * B + keys % B
        return slots.where(keys >= 0, -1).int()[:, None]

    def sequence(self, s: int) -> Tensor:
        """Keys and values of a sequence in a combined cache, ``[2, n, K, D]`` in the model's dtype."""
        return self._tokens(self.kv_cache.transpose(1, 2), s).transpose(0, 1).to(self.case.dtype)

    def _tokens(self, cache: Tensor, s: int) -> Tensor:
        """The entries ``[n, ...]`` of a sequence in a cache ``[N, B, ...]``."""
        n = self.case.seqs[s][1]
        blocks = self.block_tables[s, : -(-n // self.case.block_size)].long()
        return cache[blocks].flatten(0, 1)[:n]


def make_inputs(case: Case, device: torch.device, cache_bytes: int, most: int = 256) -> list[Inputs]:
    """Calls over different blocks of one cache, in random order, with at least ``cache_bytes`` of keys and values.

    Args:
        case: the batch.
        device: the device of the tensors.
        cache_bytes: several times the device's last-level cache, so that no call finds its data there.
        most: calls at most (at least 2).
    """
    needed = [-(-seq_len // case.block_size) for _, seq_len in case.seqs]
    calls = min(max(2, math.ceil(cache_bytes / case.kv_bytes)), most)
    blocks, B = calls * sum(needed), case.block_size
    K, planes = case.num_kv_heads, () if case.separate or case.latent else (2,)
    heads = () if case.latent else (K,)
    kv_cache = _random_cache((blocks, *planes, B, *heads, case.head_size), case, device)
    value_cache = _random_cache((blocks, B, K, case.value_size), case, device) if case.separate else None
    ids = torch.randperm(blocks, dtype=torch.int32)
    starts = [0, *itertools.accumulate(q_len for q_len, _ in case.seqs)]
    made = []
    for of_call in ids.view(calls, -1):
        tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        for row, blocks in zip(tables, of_call.split(needed), strict=True):
            row[: len(blocks)] = blocks
        made.append(
            Inputs(
                case,
                torch.randn(case.num_tokens, case.num_heads, case.head_size, dtype=case.dtype, device=device),
                kv_cache,
                tables.to(device),
                torch.tensor([seq_len for _, seq_len in case.seqs], dtype=torch.int32, device=device),
                torch.tensor(starts, dtype=torch.int32, device=device),
                value_cache,
                _random_keys(case, device) if case.selected else None,
            )
        )
    return made


def _random_keys(case: Case, device: torch.device) -> Tensor:
    """Ascending positions of keys for each row, ``[T, 1, k]``; rows with fewer keys have all, and -1."""
    keys = torch.full((case.num_tokens, 1, case.selected), -1, dtype=torch.int32, device=device)
    positions = (i for q_len, seq_len in case.seqs for i in range(seq_len - q_len, seq_len))
    for row, i in zip(keys[:, 0], positions, strict=True):
        chosen = torch.randperm(i + 1, device=device)[: case.selected].sort().values
        row[: len(chosen)] = chosen
    return keys


def _random_cache(shape: tuple[int, ...], case: Case, device: torch.device) -> Tensor:
    scaled = has_row_scales(case.kv_cache_dtype)
    cache = torch.empty((*shape[:2], ROW_BYTES) if scaled else shape, dtype=case.stored, device=device)
    for part in cache.split(max(1, (1 << 28) // math.prod(shape[1:]))):
        real = torch.randn(len(part), *shape[1:], dtype=case.dtype, device=device)
        part.copy_(quantise_rows(*real.split([ROW_LATENT, ROW_ROTATED], -1)) if scaled else real)
    return cache


def decode(batch: int, context: int) -> tuple[tuple[int, int], ...]:
    return ((1, context),) * batch


def ragged(batch: int, shortest: int = 16, longest: int = 16384) -> tuple[tuple[int, int], ...]:
    """A decode batch with log-uniform lengths between two bounds; always the same lengths."""
    generator = random.Random(0)
    bounds = math.log(shortest), math.log(longest)
    return tuple((1, int(math.exp(generator.uniform(*bounds)))) for _ in range(batch))


DECODE = {
    "1x131072": decode(1, 131072),
    "8x8192": decode(8, 8192),
    "64x4096": decode(64, 4096),
    "256x1024": decode(256, 1024),
    "ragged128": ragged(128),
    "1x1024": decode(1, 1024),
}
PREFILL = {
    "1x8192": ((8192, 8192),),
    "8x1024@4096": ((1024, 4096),) * 8,
    "2048@8192+63x4096": ((2048, 8192), *decode(63, 4096)),
}
GROUPS = {  # decode with many query heads per key/value head
    "1x131072": DECODE["1x131072"],
    "50x6000": decode(50, 6000),
    "4x65536+124x512": (*decode(4, 65536), *decode(124, 512)),
    "ragged128": DECODE["ragged128"],
}
LATENT = {name: DECODE[name] for name in ("1x131072", "8x8192", "64x4096")}
LATENT |= {"128x4096": decode(128, 4096), "ragged128": DECODE["ragged128"]}
LATENT_SIZES: dict[str, Any] = {"head_size": 576, "value_head_size": 512}  # DeepSeek-V2 and V3, Kimi-K2
FP8 = torch.float8_e4m3fn


def gpu_cases() -> list[Case]:
    """The cases of docs/performance.md, one group per table; the kernels are not tuned for all of them."""
    cases = [
        Case("decode", name, seqs, H, K)
        for H, K in ((32, 8), (64, 8), (32, 32), (8, 1))
        for name, seqs in DECODE.items()
    ]
    cases += [
        Case("prefill", f"{name} block {B}", seqs, block_size=B)
        for B in (16, 64, 128)
        for name, seqs in PREFILL.items()
    ]
    cases += [Case("prefill", "512@32768 block 16", ((512, 32768),))]
    cases += [Case("fp8", name, DECODE[name], cache_dtype=FP8) for name in ("64x4096", "ragged128", "8x8192")]
    many = DECODE["64x4096"]
    cases += [Case("sizes", f"64x4096 D {D}", many, head_size=D) for D in (64, 96, 192, 256)]
    gemma4: dict[str, Any] = {"num_kv_heads": 4, "head_size": 512}  # the global layers of Gemma-4 31B
    wide = {name: DECODE[name] for name in ("8x8192", "64x4096", "ragged128")} | PREFILL
    cases += [Case("sizes", f"{name} D 512", seqs, **gemma4) for name, seqs in wide.items()]
    cases += [Case("sizes", f"64x4096 block {B}", many, block_size=B) for B in (32, 64, 128)]
    cases += [Case("sizes", "64x4096", many, H, K) for H, K in ((16, 8), (128, 8), (32, 2), (12, 4), (48, 1), (71, 1))]
    cases += [Case("sizes", f"64x4096 {n} tokens each", ((n, 4096),) * 64) for n in (4, 16)]
    cases += [Case("sizes", "64x4096 float16", many, dtype=torch.float16)]
    cases += [Case("sizes", f"1x8192 D {D}", PREFILL["1x8192"], head_size=D) for D in (64, 80, 96, 112, 192, 256)]
    separate: dict[str, Any] = {"head_size": 192, "value_head_size": 128}  # DeepSeek-V2 and V3, not absorbed
    cases += [Case("sizes", "1x8192 D 192 and 128", PREFILL["1x8192"], H, H, **separate) for H in (16, 128)]
    cases += [Case("groups", name, seqs, H, 1) for H in (48, 64, 71) for name, seqs in GROUPS.items()]
    cases += [Case("groups", "ragged128, 16 tokens each", tuple((16, n + 16) for _, n in DECODE["ragged128"]))]
    cases += [Case("fp8", f"64x4096 D {D}", many, head_size=D, cache_dtype=FP8) for D in (64, 256)]
    cases += [Case("fp8", "64x4096 e5m2", many, cache_dtype=torch.float8_e5m2)]
    cases += [Case("fp8", name, PREFILL[name], cache_dtype=FP8) for name in ("1x8192", "8x1024@4096")]
    cases += latent_cases()
    cases += selected_cases()
    cases += [Case("replay", f"{name} captured at 1", DECODE[name], captured_len=1) for name in DECODE]
    cases += [Case("context", f"8x{2**n}", decode(8, 2**n)) for n in range(8, 17)]
    cases += [Case("batch", f"{2**n}x4096", decode(2**n, 4096)) for n in range(9)]
    return cases


def latent_cases() -> list[Case]:
    """Latent attention in the absorbed form: decode, speculative widths, fp8."""

    def case(name: str, seqs: Seqs, H: int, B: int, **changes: Any) -> Case:
        return Case("latent", f"{name} block {B}", tuple(seqs), H, 1, block_size=B, **LATENT_SIZES, **changes)

    cases = [case(name, seqs, H, B) for B in (64, 16) for H in (16, 32, 64, 128) for name, seqs in LATENT.items()]
    many = LATENT["64x4096"]
    cases += [case(f"64x4096 {n} tokens each", ((n, 4096),) * 64, H, 64) for H in (16, 128) for n in (2, 4)]
    cases += [case("64x4096 fp8", many, H, 64, cache_dtype=FP8) for H in (16, 128)]
    rows: dict[str, Any] = {"cache_dtype": torch.uint8, "kv_cache_dtype": FP8_DS_MLA}
    cases += [case("64x4096 fp8_ds_mla", many, H, 64, **rows) for H in (16, 128)]
    return cases


def selected_cases() -> list[Case]:
    """Attention to 2048 selected latents per row, as in DeepSeek-V3.2."""

    def case(name: str, seqs: Seqs, H: int, **changes: Any) -> Case:
        return Case("selected", name, tuple(seqs), H, 1, block_size=64, selected=2048, **LATENT_SIZES, **changes)

    many, rows = decode(64, 131072), {"cache_dtype": torch.uint8, "kv_cache_dtype": FP8_DS_MLA}
    cases = [case("64x131072", many, H) for H in (8, 16, 64, 128)]
    cases += [case("64x131072 fp8_ds_mla", many, H, **rows) for H in (16, 64, 128)]
    cases += [case("4x131072", decode(4, 131072), H) for H in (16, 128)]
    cases += [case("2048@32768", ((2048, 32768),), H) for H in (16, 128)]
    return cases


def cpu_cases() -> list[Case]:
    """Small enough for any machine."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return [
        Case("cpu", f"{name} {word}", seqs, block_size=16, dtype=dtype)
        for word, dtype in dtypes.items()
        for name, seqs in (
            ("8x2048", decode(8, 2048)),
            ("ragged16", ragged(16, 16, 2048)),
            ("1x256 prefill", ((256, 256),)),
        )
    ]


def host_case() -> Case:
    """A decode batch so small that the device always waits for the host."""
    return Case("host", "paged_attention, 8x64", decode(8, 64))
