"""Caches of every form in guarded memory: where each element lies is computed here, from the forms' definitions.

Letters as in ``truth.py``, and N blocks, B tokens a block.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import torch
from torch import Tensor

FORMS = ("nhd", "hnd", "plane_first", "strided", "interleaved", "separate", "separate_strided", "x_packed")
LATENT_FORMS = ("latent", "latent_strided")  # one key/value head, whose values are the first Dv elements of its keys
# As latent, D = 576 and Dv = 512, in bytes: 512 e4m3 numbers, 4 float32 scales, 64 bfloat16 columns.
ROW_FORM, ROW_BYTES = "latent_rows", 656
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
POISON = {  # NaN, infinity and a finite number that would show, as bits
    torch.float32: (0x7FC00000, 0x7F800000, 0x7F000000),
    torch.float16: (0x7E00, 0x7C00, 0x7BFF),
    torch.bfloat16: (0x7FC0, 0x7F80, 0x7F00),
    torch.float8_e4m3fn: (0x7F, 0x7F, 0x7E),
    torch.float8_e5m2: (0x7F, 0x7C, 0x7B),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a cache lies in memory: everything but the number of its blocks."""

    name: str
    B: int
    K: int
    D: int
    Dv: int
    kind: torch.dtype  # what its elements are
    as_bytes: bool  # an fp8 cache that is given as uint8
    orders: tuple[tuple[int, ...], ...]  # of each tensor's dimensions, outermost first
    gaps: tuple[tuple[int, ...], ...]  # elements between the parts of each
    offset: int  # elements before the first

    @staticmethod
    def draw(rng: random.Random, name: str, B: int, K: int, D: int, Dv: int, kind: torch.dtype) -> Form:
        orders: list[list[int]]
        orders = {
            "nhd": [[0, 1, 2, 3, 4]],
            "hnd": [[0, 1, 3, 2, 4]],
            "plane_first": [[1, 0, 2, 3, 4]],
            "strided": [rng.sample(range(5), 5)],
            "interleaved": [[0, 1, 2, 3]],
            "separate": [[0, 1, 2, 3], [0, 1, 2, 3]],
            "separate_strided": [rng.sample(range(4), 4), rng.sample(range(4), 4)],
            "x_packed": [[0, 1, 2, 3, 4], [0, 1, 2, 3]],
            "latent": [[0, 1, 2]],
            "latent_strided": [rng.sample(range(3), 3)],
            ROW_FORM: [[0, 1, 2]],
        }[name]
        strided = name.endswith("strided")
        gaps = [[rng.choice((0, 0, 1, 3, 8)) if strided else 0 for _ in order] for order in orders]
        if name in ("nhd", "hnd", "interleaved", "separate", "latent") and rng.random() < 0.2:
            for gap in gaps:
                gap[0] = rng.choice((1, 16, 64))  # a slice of something larger
        offset = rng.choice((0, 0, 0, 1, 8, 64))
        as_bytes = kind.itemsize == 1 and rng.random() < 0.4
        if name == ROW_FORM:  # rows begin at multiples of 16 bytes
            gaps, offset, as_bytes = [[rng.choice((0, 16, 80)), rng.choice((0, 0, 16, 48)), 0]], offset // 8 * 16, True
        as_tuples = tuple(map(tuple, orders)), tuple(map(tuple, gaps))
        return Form(name, B, K, D, Dv, kind, as_bytes, *as_tuples, offset)

    @property
    def latent(self) -> bool:
        return self.name in LATENT_FORMS or self.rows

    @property
    def rows(self) -> bool:
        return self.name == ROW_FORM

    @property
    def stored(self) -> torch.dtype:
        return torch.uint8 if self.as_bytes else self.kind

    def shapes(self, N: int) -> list[tuple[int, ...]]:
        B, K, D, Dv = self.B, self.K, self.D, self.Dv
        if self.name == "interleaved":
            return [(N, B, 2 * K, D)]
        if self.name.startswith("separate"):
            return [(N, B, K, D), (N, B, K, Dv)]
        if self.name == "x_packed":
            x = 16 // self.kind.itemsize
            return [(N, K, D // x, B, x), (N, K, D, B)]
        if self.latent:
            return [(N, B, ROW_BYTES if self.rows else D)]
        return [(N, 2, B, K, D)]


class Store:
    """The memory of one cache, its bits as a flat tensor, its expected content, and the views that ops take."""

    GUARD = 256

    def __init__(self, form: Form, N: int, device: torch.device, rng: random.Random) -> None:
        self.form, self.N = form, N
        tensors, size = [], self.GUARD + form.offset
        for shape, order, gaps in zip(form.shapes(N), form.orders, form.gaps, strict=True):
            strides, extent = [0] * len(shape), 1
            for dim, gap in zip(reversed(order), reversed(gaps), strict=True):
                strides[dim] = extent + gap
                extent = strides[dim] * max(shape[dim], 1)
            tensors.append((shape, tuple(strides), size))
            size += -(-extent // 64) * 64 + self.GUARD
        self.bits = torch.empty(size, dtype=BITS[form.kind.itemsize], device=device)
        self.poison(rng)
        typed = self.bits.view(form.stored)
        views = [typed.as_strided(shape, strides, start) for shape, strides, start in tensors]
        self.kv_cache: Tensor = views[0]
        self.value_cache: Tensor | None = views[1] if len(views) > 1 else None
        self.expected = self.bits.clone()
        self._lies = tensors, device

    def poison(self, rng: random.Random) -> None:
        nan, inf, huge = POISON[self.form.kind]
        self.bits.fill_(rng.choice((nan, nan, nan, inf, huge)))

    @functools.cached_property
    def _at(self) -> tuple[Tensor, Tensor]:
        return self._addresses(*self._lies)

    @property
    def key_at(self) -> Tensor:
        return self._at[0]

    @property
    def value_at(self) -> Tensor:
        return self._at[1]

    def _addresses(self, tensors: list[Any], device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each element of a key ``[N, B, K, D]`` (of rows each byte) and of a value ``[N, B, K, Dv]`` lies in
        ``bits``."""
        form = self.form

        def at(start: int, *terms: tuple[Tensor, int, int]) -> Tensor:
            """start + the sum of index * stride, each index along its dimension of [N, B, K, D]."""
            total = torch.full((1, 1, 1, 1), start, dtype=torch.int64, device=device)
            for index, dim, stride in terms:
                total = total + (index * stride).view([-1 if d == dim else 1 for d in range(4)])
            return total

        n, b, k = (torch.arange(size, device=device) for size in (self.N, form.B, form.K))
        d, dv = torch.arange(form.D, device=device), torch.arange(form.Dv, device=device)
        (_, s, start), (_, sv, value_start) = tensors[0], tensors[-1]
        if form.name == "interleaved":
            both = [(n, 0, s[0]), (b, 1, s[1]), (d, 3, s[3])]
            return at(start, *both, (2 * k, 2, s[2])), at(start, *both, (2 * k + 1, 2, s[2]))
        if form.name.startswith("separate"):
            key = at(start, (n, 0, s[0]), (b, 1, s[1]), (k, 2, s[2]), (d, 3, s[3]))
            return key, at(value_start, (n, 0, sv[0]), (b, 1, sv[1]), (k, 2, sv[2]), (dv, 3, sv[3]))
        if form.name == "x_packed":
            x = 16 // form.kind.itemsize
            key = at(start, (n, 0, s[0]), (k, 2, s[1]), (d // x, 3, s[2]), (b, 1, s[3]), (d % x, 3, s[4]))
            return key, at(value_start, (n, 0, sv[0]), (k, 2, sv[1]), (dv, 3, sv[2]), (b, 1, sv[3]))
        if form.latent:
            d = torch.arange(ROW_BYTES, device=device) if form.rows else d
            key = at(start, (n, 0, s[0]), (b, 1, s[1]), (d, 3, s[2]))
            return key, key[..., : form.Dv]
        both = [(n, 0, s[0]), (b, 1, s[2]), (k, 2, s[3]), (d, 3, s[4])]
        return at(start, *both), at(start + s[1], *both)

    def expect(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """From now on slots ``[T]`` hold these bits ``[T, K, D]``, ``[T, K, Dv]``."""
        for where, what in ((self.key_at, key), (self.value_at, value)):
            self.expected[where.flatten(0, 1)[slots]] = what

    def expect_copies(self, source: Store, pairs: Tensor) -> None:
        """From now on blocks ``pairs[:, 1]`` hold what the source's blocks ``pairs[:, 0]`` should hold now."""
        held = [source.expected[where[pairs[:, 0]]] for where in (source.key_at, source.value_at)]
        for where, what in zip((self.key_at, self.value_at), held, strict=True):
            self.expected[where[pairs[:, 1]]] = what

    def wrong(self, any_nan: bool = False) -> Tensor:
        """The number of wrong elements in the memory, guards included, as a tensor on the device."""
        got, want = self.bits, self.expected
        if any_nan and self.form.kind.itemsize == 1:  # all codes of NaN are one
            got, want = (bits.where(~self._is_nan(bits), 0x7F) for bits in (got, want))
        return (got != want).sum()

    def _is_nan(self, bits: Tensor) -> Tensor:
        return (bits & 0x7F) >= (0x7F if self.form.kind == torch.float8_e4m3fn else 0x7D)

    def tensors(self) -> list[Tensor]:
        return [self.kv_cache] if self.value_cache is None else [self.kv_cache, self.value_cache]

    def planes(self) -> dict[str, Any]:
        return {} if self.value_cache is None else {"value_cache": self.value_cache}
