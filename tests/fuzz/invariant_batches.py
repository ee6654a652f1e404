"""Campaign: many batches over few kernels; with ``batch_invariant`` each row has the bits that it has alone.

``invariant.py`` draws a new kind of kernel, cache and sequence for each few calls. A case here draws one kind, fills
two caches of different forms with the same sequences, each at two places, computes the last rows of every sequence
alone, and then makes hundreds of random batches of them: decodes, prompts in chunks of any length, single rows, a few
rows each, in any order and company, padded, into given outputs, with other numbers of threads, and captured and
replayed. Bits are compared on the device, and read once a case. Each dtype, cache, head size, mask and pair of head
counts comes in turn, so that few cases have them all. A third of the sequences cross at least four cuts. One case of
eight begins with a moved cut, and must find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import paged_ops
from paged_ops.lowerings.cpu import fused

from .caches import BITS, FORMS, Form, Store
from .invariant import E4M3, E5M2, FEATURES, Setting, moved_cut
from .runner import Case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(dtype, kind) for dtype in (BF16, FP16, FP32) for kind in (dtype, E4M3, E5M2)]
SIZES = ((128, 128), (64, 64), (256, 256), (80, 80), (192, 128), (13, 13), (32, 32), (96, 96), (16, 16), (40, 40))
HEADS = ((2, 4), (1, 7), (4, 1), (1, 16), (2, 3), (1, 33), (8, 1), (1, 64))  # K, G
MASKS = tuple(
    dict(items) for items in dict.fromkeys(tuple(each.items()) for each in FEATURES if "block_sparse" not in each)
)
MASKS = (*MASKS, {"block_sparse": [64, 2, 3, 0, 0, 0, 1]})
BATCHES = 400  # of a case
PLANTED = 8
MOST_ROWS = 16384  # of all heads of a batch, about
AT_ONCE = 50  # batches whose integers are copied together
KINDS = ("decode", "decode", "mixed", "mixed", "chunks", "few", "single")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a batch: of each sequence its number, the copy of its blocks, its tokens and its new tokens."""

    kind: str
    rows: list[tuple[int, int, int, int]]
    T: int
    S: int
    form: int

    @property
    def live(self) -> int:
        return sum(q for *_, q in self.rows)


def dealt(values: Listed[Any], name: str, number: int) -> Any:
    """The values in a random order, then all of them again in another order, and so on."""
    n = len(values)
    return random.Random(f"{name}/{number // n}").sample(range(n), n)[number % n]


def setting_of(number: int, seed: int, device: str) -> Setting:
    rng = random.Random(f"invariant_batches/{seed}/{number}")
    dtype, kind = DTYPES[dealt(DTYPES, f"dtypes/{seed}", number)]
    D, Dv = SIZES[dealt(SIZES, f"sizes/{seed}", number)]
    K, G = HEADS[dealt(HEADS, f"heads/{seed}", number)]
    if number % PLANTED == 0:
        dtype = kind = FP32  # which shows the last bits
    features = {} if number % PLANTED == 0 else MASKS[dealt(MASKS, f"masks/{seed}", number)]
    if D * K * G > 4096:
        K = 1
    if device == "cpu":
        G = max(1, min(G, 1024 // D))
    forms: list[Form] = []
    while len(forms) < 2:
        name = rng.choice([each for each in FORMS if Dv == D or each.startswith("separate")])
        if name != "x_packed" or D % (16 // kind.itemsize) == 0:
            forms.append(Form.draw(rng, name, rng.choice((1, 8, 12, 16, 32, 64)), K, D, Dv, kind))
    if number % 2:
        forms[1] = forms[0]  # compiled once
    path = "fused" if device != "cpu" or rng.random() < 0.85 else "torch"
    return Setting(dtype, kind, "", K, G, D, Dv, features, path, rng.random() < 0.5, tuple(forms))


def run(case: Case) -> None:
    with torch.no_grad():
        Pool(case).run()


class Pool:
    """Sequences of one kind in two caches, and the bits that their last rows have alone."""

    def __init__(self, case: Case, setting: Callable[[int, int, str], Setting] = setting_of) -> None:
        options = case.options
        number = case.number % options.variants if options.variants else case.number
        self.few = number % 3 == 0  # whether some batches have kernels for a few rows each
        self.case, self.rng, self.device = case, case.random, case.device
        self.planted = number % PLANTED == 0
        self.s = s = setting(number, options.seed, options.device)
        self.H, self.cut = s.K * s.G, s.cut(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.dice = case.generator(self.device)
        self.whole = s.features.get("causal") is False or "bidirectional_ranges" in s.features
        self.op = torch.ops.paged_ops.paged_attention_with_lse.default
        self.lens = self._lengths()
        most = (3, 40, 90, 300) if self.on_gpu else (1, 3, 8, 20)
        self.counts = [min(n, self.rng.choice(most)) for n in self.lens]
        self.starts = [sum(self.counts[:n]) for n in range(len(self.counts))]
        self.query = self._randn(sum(self.counts), self.H, s.D).to(s.dtype)
        self.features = dict(s.features, batch_invariant=True)
        for name in {"alibi_slopes", "sinks"} & {*s.features}:
            self.features[name] = self._randn(self.H) * 0.2
        scales = self._randn(s.K if s.scaled else 1).abs() * 0.02 + 0.01
        self.scales = {"k_scale": scales, "v_scale": scales.flip(0)} if s.kind.itemsize == 1 else {}
        self.ranges = [[sorted((self.rng.randint(0, n), self.rng.randint(0, n))) for _ in "ab"] for n in self.lens]
        self.caches, self.tables = self._fill()
        self.bits: list[Tensor] = []

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice, device=self.device)

    def _lengths(self) -> list[int]:
        """Of the sequences; a third of them cross at least four cuts."""
        rng, cut, lens = self.rng, self.cut, []
        for n in range(15 if self.on_gpu else 6):
            if n % 3 == 0:
                lens.append(rng.randint(4 * cut + 1, 6 * cut))
            else:
                lens.append(rng.choice((rng.randint(1, 70), rng.randint(1, 2 * cut))))
        if self.on_gpu and self.s.K * self.s.D <= 256:
            lens[0] = rng.randint(33_000, 36_000)
        self.case.counts["sequences"] += len(lens)
        self.case.counts["long sequences"] += sum(n > 4 * cut for n in lens)
        return lens

    def _fill(self) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """The arguments of both caches, and their block tables ``[2 * sequences, M]``, on the CPU."""
        s, rng, caches, tables = self.s, self.rng, [], []
        contents = [(self._randn(n, s.K, s.D).to(s.dtype), self._randn(n, s.K, s.Dv).to(s.dtype)) for n in self.lens]
        for form in s.forms:
            B = form.B
            of = [-(-n // B) for n in self.lens for _ in range(2)]
            N, M = sum(of) + rng.choice((1, 2, 7)), -(-(max(of) + rng.choice((0, 1, 5))) // 4) * 4
            store, ids = Store(form, N, self.device, rng), rng.sample(range(N), N)
            named = {"kv_cache_dtype": "auto" if not form.as_bytes else {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}[form.kind]}
            table = torch.full((len(of), M), 0 if self.on_gpu else N - 1, dtype=torch.int32)
            for n, blocks in enumerate(of):
                table[n, :blocks] = torch.tensor([ids.pop() for _ in range(blocks)])
                j = torch.arange(self.lens[n // 2])
                slots = (table[n, j // B].long() * B + j % B).to(self.device)
                features: dict[str, Any] = {**store.planes(), **self.scales, **named}
                paged_ops.reshape_and_cache(*contents[n // 2], store.kv_cache, slots, **features)
            caches.append({"kv_cache": store.kv_cache, **store.planes(), **named})
            tables.append(table)
        return caches, tables

    def run(self) -> None:
        path: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.s.path == "torch":
            path = mock.patch.object(fused, "compiled", return_value=None)
        with path:
            alone = [self.padded("mixed", [(n, 0, self.lens[n], self.counts[n])], 1, 0) for n in range(len(self.lens))]
            results = [
                [bits[: batch.live].clone() for bits in self.call(batch, integers)]
                for batch, integers in self.staged(alone)
            ]
            self.bits = [torch.cat(each) for each in zip(*results, strict=True)]
            if self.planted:
                self.find_moved_cut()
            number = BATCHES if self.on_gpu else BATCHES // (4 if self.s.path == "fused" else 40)
            batches = [self.batch() for _ in range(number)]
            wrong = torch.zeros(number, 2, dtype=torch.int64, device=self.device)
            self.compare(batches, wrong)
        for each in (f"{self.s.dtype}, cache {self.s.kind}", f"head size {self.s.D}", f"masks {[*self.s.features]}"):
            self.case.counts[f"batches of {each.replace('torch.', '')}"] += number
        for n, (outs, lses) in enumerate(wrong.tolist()):
            if outs or lses:
                self.case.report(f"{outs} rows differ in out, {lses} in lse: {self.s} {batches[n]}")

    def find_moved_cut(self) -> None:
        rows = [(n, 0, self.lens[n], 1) for n in range(len(self.lens))]
        wrong = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        with moved_cut(self.case.options.device, self.s.path):
            self.compare([Batch("decode", rows, len(rows), len(rows), 0)], wrong, count=False)
        self.case.counts["planted"] += 1
        if not int(wrong.sum()):
            self.case.report(f"a cut was moved and no bit changed: {self.s}")

    def batch(self) -> Batch:
        rng, rows = self.rng, []
        kind = rng.choice(KINDS)
        S = 1 if kind == "single" else rng.choice((1, 2, 3, 5, 9, 17, 30, 60) if self.on_gpu else (1, 2, 3, 5))
        for _ in range(S):
            n = rng.randrange(len(self.lens))
            most = self.counts[n]
            end = self.lens[n] - (0 if self.whole else rng.randrange(most))
            most -= self.lens[n] - end
            if kind in ("decode", "single"):
                q = 1
            elif kind == "few":
                q = rng.randint(1, min(4, most))
            else:
                q = rng.choice((1, most)) if kind == "mixed" else rng.randint(1, most)
            rows.append((n, rng.randrange(2), end, q))
            if sum(q for *_, q in rows) * self.H > MOST_ROWS and kind in ("mixed", "chunks"):
                S = len(rows)
                break
        return self.padded(kind, rows, S + rng.choice((0, 0, 1, 3)), rng.randrange(2))

    def padded(self, kind: str, rows: list[tuple[int, int, int, int]], S: int, form: int) -> Batch:
        """With numbers of tokens and sequences of few kinds of kernels."""
        T = sum(q for *_, q in rows)
        if kind in ("decode", "single"):
            T = S
        elif kind == "few" and self.few and 4 * power_of_2(self.s.G) <= 64:
            T = 4 * S
        else:
            T = max(T + self.rng.choice((0, 1, 20)), 65, S + 1)
            while S > 1 and T % S == 0:
                T += 1
        return Batch(kind, rows, T, S, form)

    def integers(self, batch: Batch) -> list[Tensor]:
        """Rows of the query, block tables, lengths and starts, on the CPU."""
        rows: list[int] = []
        lens, starts = [0] * batch.S, [0]
        table = torch.zeros(batch.S, self.tables[batch.form].shape[1], dtype=torch.int32)
        for i, (n, copy, end, q) in enumerate(batch.rows):
            last = self.starts[n] + self.counts[n] - (self.lens[n] - end)
            rows += range(last - q, last)
            lens[i], table[i] = end, self.tables[batch.form][2 * n + copy]
            starts.append(starts[-1] + q)
        rows += [0] * (batch.T - len(rows))
        starts += [starts[-1]] * (batch.S + 1 - len(starts))
        return [table, *(torch.tensor(each, dtype=torch.int32) for each in (rows, lens, starts))]

    def staged(self, batches: list[Batch]) -> Iterator[tuple[Batch, list[Tensor]]]:
        """The batches with their integers on the device, copied together; each begins at a multiple of 16 bytes."""
        parts = [self.integers(batch) for batch in batches]
        flat = [each.flatten() for part in parts for each in part]
        together = torch.cat([torch.nn.functional.pad(each, (0, -len(each) % 4)) for each in flat]).to(self.device)
        pieces = iter(together.split([-(-len(each) // 4) * 4 for each in flat]))
        for batch, part in zip(batches, parts, strict=True):
            yield batch, [next(pieces)[: each.numel()].view(each.shape) for each in part]

    def call(self, batch: Batch, integers: list[Tensor]) -> list[Tensor]:
        """The bits of out and lse."""
        table, rows, lens, starts = integers
        features = {**self.features, **self.scales, **self.caches[batch.form]}
        kv_cache = features.pop("kv_cache")
        if "bidirectional_ranges" in features:
            ranges = [self.ranges[n] for n, *_ in batch.rows] + [[[-1, -1]] * 2] * (batch.S - len(batch.rows))
            features["bidirectional_ranges"] = torch.tensor(ranges, dtype=torch.int32).to(self.device)
        arguments = self.query.index_select(0, rows), kv_cache, table, lens, starts, self.s.D**-0.5
        if not self.on_gpu:
            torch.set_num_threads(self.rng.choice((1, 1, 2, 3)))
        if self.rng.random() < 0.2:
            shape = batch.T, self.H, self.s.Dv
            out = torch.full(shape, torch.nan, dtype=self.s.dtype, device=self.device)
            lse = torch.full(shape[:2], torch.nan, device=self.device)
            torch.ops.paged_ops.paged_attention_with_lse.out(*arguments, **features, out=out, lse=lse)
            results = out, lse
        else:
            results = self.op(*arguments, **features)
        if self.on_gpu and self.rng.random() < 0.02:
            results = self.replayed(arguments, features)
        return [each.view(BITS[each.element_size()]) for each in results]

    def replayed(self, arguments: tuple[Any, ...], features: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.op(*arguments, **features)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results: tuple[Tensor, Tensor] = self.op(*arguments, **features)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(self.device)
        self.case.counts["replays"] += 1
        return results

    def compare(self, batches: list[Batch], wrong: Tensor, count: bool = True) -> None:
        """Count the rows whose out or lse has other bits than alone."""
        threads = torch.get_num_threads()
        for first in range(0, len(batches), AT_ONCE):
            for n, (batch, integers) in enumerate(self.staged(batches[first : first + AT_ONCE]), first):
                rows = integers[1][: batch.live]
                for which, got in enumerate(self.call(batch, integers)):
                    expected = self.bits[which].index_select(0, rows)
                    wrong[n, which] = (got[: batch.live] != expected).flatten(1).any(1).sum()
                if count:
                    self.case.counts.update({"batches": 1, "rows": batch.live, batch.kind: 1})
        torch.set_num_threads(threads)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
