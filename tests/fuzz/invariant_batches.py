"""Campaign: many batches over few kernels; with ``batch_invariant`` each row has the bits that it has alone.

``invariant.py`` draws a new kind of kernel, cache and sequence for each few calls. A case here draws one kind and has
several rounds on a GPU, one on a CPU. A round fills two caches of different forms with the same new sequences, each at
two places, computes the last rows of every sequence alone, and then makes hundreds of random batches of them: decodes,
prompts in chunks of any length, single rows, a few rows each, in any order and company, padded, into given outputs,
with other numbers of threads, and captured and replayed. Each dtype, cache, head size, mask and pair of head counts
comes in turn, so that few cases have them all. A third of the sequences cross at least four cuts. One case of eight
begins with a moved cut, and must find it.

A case is drawn before it runs, so that its kernels are compiled while the case before it runs. Bits are compared on the
device, those of several batches together, and read once a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import paged_ops
from paged_ops.lowerings.cpu import fused
from paged_ops.lowerings.warm_up import Ahead

from .caches import BITS, FORMS, LATENT_FORMS, ROW_FORM, Form, Store
from .invariant import E4M3, E5M2, FEATURES, Setting, moved_cut
from .runner import Case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(dtype, kind) for dtype in (BF16, FP16, FP32) for kind in (dtype, E4M3, E5M2)]
SIZES = (  # D, Dv, and the kind of latents
    *((size, size, "") for size in (128, 64, 256, 80, 13, 32, 96, 16, 40, 512)),
    *((192, 128, ""), (576, 512, "plain"), (72, 64, "plain"), (576, 512, "rows")),
)
HEADS = ((2, 4), (1, 7), (4, 1), (1, 16), (2, 3), (1, 33), (8, 1), (1, 64))  # K, G
MASKS = tuple(
    dict(items) for items in dict.fromkeys(tuple(each.items()) for each in FEATURES if "block_sparse" not in each)
)
MASKS = (*MASKS, {"block_sparse": [64, 2, 3, 0, 0, 0, 1]}, {"selected_keys": True})
BATCHES = 400  # of a round
ROUNDS = 4  # of a case, on a GPU
ENTRIES, ENTRIES_OF_CPU = 2100, 300  # of a list of selected keys, so that it crosses four cuts
PLANTED = 8
MOST_ROWS = 16384  # of all heads of a batch, about
MOST_BYTES = (1 << 25, 1 << 25, 1 << 25, 1 << 28)  # of keys and values that a batch reads, about
TILE = 64  # query rows for which keys are read once
AT_ONCE = 25  # batches whose integers are copied, and whose bits are compared, together
KINDS = ("decode", "decode", "mixed", "mixed", "chunks", "few", "single")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a batch: of each sequence its number, the copy of its blocks, its tokens and its new tokens."""

    kind: str
    rows: list[tuple[int, int, int, int]]
    T: int
    S: int
    form: int

    @functools.cached_property
    def live(self) -> int:
        return sum(q for *_, q in self.rows)


@dataclasses.dataclass(frozen=True)
class Round:
    """Sequences, and the batches of them. Of each sequence: its length, how many of its last rows are computed, and how
    many rows are before them."""

    lens: list[int]
    counts: list[int]
    starts: list[int]
    alone: list[Batch]
    batches: list[Batch]


def dealt(values: Listed[Any], name: str, number: int) -> Any:
    """The values in a random order, then all of them again in another order, and so on."""
    n = len(values)
    return random.Random(f"{name}/{number // n}").sample(range(n), n)[number % n]


def setting_of(number: int, seed: int, device: str) -> Setting:
    rng = random.Random(f"invariant_batches/{seed}/{number}")
    dtype, kind = DTYPES[dealt(DTYPES, f"dtypes/{seed}", number)]
    D, Dv, latent = SIZES[dealt(SIZES, f"sizes/{seed}", number)]
    K, G = HEADS[dealt(HEADS, f"heads/{seed}", number)]
    if number % PLANTED == 0:
        dtype = kind = FP32  # which shows the last bits
    features = {} if number % PLANTED == 0 else MASKS[dealt(MASKS, f"masks/{seed}", number)]
    if latent:
        K, G = 1, K * G
        kind = E4M3 if latent == "rows" else kind
    if D * K * G > 4096:
        K = 1
    if device == "cpu":
        G = max(1, min(G, 1024 // D))
    names = {"": FORMS, "plain": LATENT_FORMS, "rows": (ROW_FORM,)}[latent]
    names = [each for each in names if latent or Dv == D or each.startswith("separate")]
    blocks = (1, 8, 16, 32, 64) if "block_sparse" in features else (1, 8, 12, 16, 32, 64)
    forms: list[Form] = []
    while len(forms) < 2:
        name = rng.choice(names)
        if name != "x_packed" or D % (16 // kind.itemsize) == 0:
            forms.append(Form.draw(rng, name, rng.choice(blocks), K, D, Dv, kind))
    if number % 2:
        forms[1] = forms[0]  # compiled once
    on_torch = latent == "rows" or not features.keys().isdisjoint(("block_sparse", "selected_keys"))
    path = "torch" if device == "cpu" and (on_torch or rng.random() < 0.15) else "fused"
    return Setting(dtype, kind, latent, K, G, D, Dv, features, path, rng.random() < 0.5, tuple(forms))


def run(case: Case) -> None:
    prepare(case).run()


def prepare(case: Case) -> Pool:
    return Pool(case, setting_of)


class Pool:
    """Two caches of one kind; in each round other sequences in them, and the bits that their last rows have alone."""

    @torch.no_grad()
    def __init__(self, case: Case, setting: Callable[[int, int, str], Setting]) -> None:
        options = case.options
        number = case.number % options.variants if options.variants else case.number
        self.few = number % 3 == 0  # whether some batches have kernels for a few rows each
        self.case, self.rng, self.device = case, case.random, case.device
        self.planted = number % PLANTED == 0
        case.counts["kinds"] += number == case.number
        self.s = s = setting(number, options.seed, options.device)
        self.H, self.cut = s.K * s.G, s.cut(options.device)
        self.on_gpu = options.device != "cpu"
        self.dice, self.order = case.generator(self.device), case.generator()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.entries = ENTRIES if self.on_gpu else ENTRIES_OF_CPU
        self.whole = s.features.get("causal") is False or "bidirectional_ranges" in s.features
        self.op = torch.ops.paged_ops.paged_attention_with_lse.default
        self.op_out = torch.ops.paged_ops.paged_attention_with_lse.out
        self.features = dict(s.features, batch_invariant=True)
        for name in {"alibi_slopes", "sinks"} & {*s.features}:
            self.features[name] = self._randn(self.H) * 0.2
        scales = self._randn(s.K if s.scaled and not s.latent else 1).abs() * 0.02 + 0.01
        self.scales: dict[str, Tensor] = {}
        if s.kind.itemsize == 1 and s.latent != "rows":
            self.scales = {"k_scale": scales} if s.latent else {"k_scale": scales, "v_scale": scales.flip(0)}
        if s.latent:
            self.features["value_head_size"] = s.Dv
        # The longest that sequences of this kind may be: caches of its cases are equal, and so are their kernels.
        self.most = [6 * self.cut if n % 3 == 0 else max(70, 2 * self.cut) for n in range(15 if self.on_gpu else 6)]
        if self.on_gpu and s.K * s.D <= 256:
            self.most[0] = 36_000
        self.columns = [padded_to(4, -(-max(self.most) // each.B) + self.rng.choice((0, 1, 5))) for each in s.forms]
        self.rounds = [self._round() for _ in range(ROUNDS if self.on_gpu else 1)]
        self.ahead: list[Ahead] = []
        if self.on_gpu and number == case.number:  # the first of its kind
            self.allocate()
            self.compile()
            del self.stores, self.caches  # several cases are prepared at a time

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice, device=self.device)

    def allocate(self) -> None:
        """The caches, in new memory."""
        blocks = [2 * sum(-(-n // form.B) for n in self.most) + 3 for form in self.s.forms]
        self.stores = [Store(*each, self.device, self.rng) for each in zip(self.s.forms, blocks, strict=True)]
        for store in self.stores:
            del store.expected  # which nobody asks for
        self.caches = [self._cache(store) for store in self.stores]

    def _cache(self, store: Store) -> dict[str, Any]:
        form = store.form
        name = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}[form.kind] if form.as_bytes else "auto"
        name = "fp8_ds_mla" if form.rows else name
        return {"kv_cache": store.kv_cache, **store.planes(), **self.scales, "kv_cache_dtype": name}

    def write(self, key: Tensor, value: Tensor, slots: Tensor, cache: dict[str, Any]) -> None:
        if self.s.latent:
            rows = key[:, 0].split([self.s.Dv, self.s.D - self.s.Dv], 1)
            paged_ops.latent_cache_write(*rows, slot_mapping=slots, **cache)
        else:
            paged_ops.reshape_and_cache(key, value, slot_mapping=slots, **cache)

    def _round(self) -> Round:
        """A third of the sequences cross at least four cuts."""
        rng, cut = self.rng, self.cut
        lens = [
            rng.randint(4 * cut + 1, 6 * cut)
            if n % 3 == 0
            else rng.choice((rng.randint(1, 70), rng.randint(1, 2 * cut)))
            for n in range(len(self.most))
        ]
        if self.most[0] > 6 * cut:
            lens[0] = rng.randint(33_000, self.most[0])
        self.case.counts["sequences"] += len(lens)
        self.case.counts["long sequences"] += sum(n > 4 * cut for n in lens)
        counts = [min(n, rng.choice((3, 40, 90, 300) if self.on_gpu else (1, 3, 8, 20))) for n in lens]
        starts = [0, *itertools.accumulate(counts)]
        alone = [self.padded("mixed", [(n, 0, lens[n], counts[n])], 1, 0) for n in range(len(lens))]
        number = BATCHES if self.on_gpu else BATCHES // (4 if self.s.path == "fused" else 40)
        return Round(lens, counts, starts, alone, [self.batch(lens, counts) for _ in range(number)])

    def batch(self, lens: list[int], counts: list[int]) -> Batch:
        rng, rows, live = self.rng, [], 0
        kind = rng.choice(KINDS)
        S = 1 if kind == "single" else rng.choice((1, 2, 3, 5, 9, 17, 30, 60) if self.on_gpu else (1, 2, 3, 5))
        left, of_key = rng.choice(MOST_BYTES), self.s.K * (self.s.D + self.s.Dv) * self.s.kind.itemsize
        for _ in range(S):
            n = rng.randrange(len(lens))
            back = 0 if self.whole else rng.randrange(counts[n])
            most = counts[n] - back
            if kind in ("decode", "single"):
                q = 1
            elif kind == "few":
                q = rng.randint(1, min(4, most))
            else:
                q = rng.choice((1, most)) if kind == "mixed" else rng.randint(1, most)
            rows.append((n, rng.randrange(2), lens[n] - back, q))
            live += q
            left -= -(-q * self.s.G // TILE) * lens[n] * of_key
            if left < 0 or (live * self.H > MOST_ROWS and kind in ("mixed", "chunks")):
                break
        return self.padded(kind, rows, len(rows) + rng.choice((0, 0, 1, 3)), rng.randrange(2))

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

    def compile(self) -> None:
        """Begin to compile the kernels of all batches, in other processes."""
        s = self.s
        sizes = {(each.form, each.T, each.S) for drawn in self.rounds for each in drawn.alone + drawn.batches}
        T, S = max(T for _, T, _ in sizes), max(S for *_, S in sizes)
        key, value = (torch.zeros(16, s.K, size, dtype=s.dtype, device=self.device) for size in (s.D, s.Dv))
        slots = torch.zeros(16, dtype=torch.int64, device=self.device)
        query = torch.zeros(T, self.H, s.D, dtype=s.dtype, device=self.device)
        table = torch.zeros(S, max(self.columns), dtype=torch.int32, device=self.device)
        integers = torch.zeros(S + 1, dtype=torch.int32, device=self.device)

        lists = torch.zeros(T, 1, self.entries, dtype=torch.int32, device=self.device)

        def attend(form: int, T: int, S: int) -> None:
            given = {"bidirectional_ranges": table[:S, :4].reshape(S, 2, 2), "selected_keys": lists[:T]}
            table_ = table.view(-1)[: S * self.columns[form]].view(S, -1)
            self.attend(form, query[:T], table_, integers[:S], integers[: S + 1], given)

        def calls() -> None:
            for cache in self.caches:
                self.write(key, value, slots, cache)
            for each in sorted(sizes):
                attend(*each)

        self.ahead.append(Ahead([calls]))
        if self.planted:
            with moved_cut(self.case.options.device, s.path):
                self.ahead.append(Ahead([lambda: attend(0, len(self.most), len(self.most))]))

    def ready(self) -> bool:
        return all(state.done.is_set() for ahead in self.ahead for state in ahead._states)

    def fill(self, drawn: Round) -> None:
        """Random keys, values and queries; the caches hold each sequence twice."""
        s, rng, device, lens = self.s, self.rng, self.device, torch.tensor(drawn.lens)
        total = sum(drawn.lens)
        key, value = (self._randn(total, s.K, size).to(s.dtype) for size in (s.D, s.Dv))
        self.query = self._randn(drawn.starts[-1], self.H, s.D).to(s.dtype)
        sequence = torch.arange(len(lens)).repeat_interleave(lens)
        position = torch.arange(total) - (lens.cumsum(0) - lens)[sequence]
        self.tables = []
        for store, cache, columns in zip(self.stores, self.caches, self.columns, strict=True):
            B, N = store.form.B, store.N
            store.poison(rng)
            of = [-(-n // B) for n in drawn.lens for _ in "ab"]
            ids = torch.randperm(N, generator=self.order, dtype=torch.int32).split([*of, N - sum(of)])
            # The last row is of no sequence.
            table = torch.full((len(of) + 1, columns), 0 if self.on_gpu else N - 1, dtype=torch.int32)
            for row, blocks in zip(table, ids[:-1], strict=False):
                row[: len(blocks)] = blocks
            for copy in range(2):
                slots = table[2 * sequence + copy, position // B].long() * B + position % B
                self.write(key, value, slots.to(device), cache)
            table[-1] = 0
            self.tables.append(table.to(device))
        ranges = [[sorted((rng.randint(0, n), rng.randint(0, n))) for _ in "ab"] for n in drawn.lens]
        both = [each for each in ranges for _ in "ab"]
        self.ranges = torch.tensor([*both, [[-1, -1]] * 2], dtype=torch.int32, device=device)
        if "selected_keys" in self.features:
            self.selected = torch.cat([*map(self._lists, drawn.lens, drawn.counts)])

    def _lists(self, length: int, rows: int) -> Tensor:
        """Some of the keys that each of the last rows of a sequence may see, in any order."""
        visible = torch.arange(length - rows, length, device=self.device)[:, None]
        order = torch.rand(rows, length, generator=self.dice, device=self.device)
        order = order.masked_fill(torch.arange(length, device=self.device) > visible, -1.0)
        chosen = order.topk(min(length, self.rng.choice((self.entries, self.entries, self.entries // 3, 90))))
        lists = torch.full((rows, 1, self.entries), -1, dtype=torch.int32, device=self.device)
        lists[:, 0, : chosen.indices.shape[1]] = chosen.indices.where(chosen.values >= 0, -1)
        return lists

    @torch.no_grad()
    def run(self) -> None:
        path: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.s.path == "torch":
            path = mock.patch.object(fused, "compiled", return_value=None)
        self.allocate()
        with path:
            for n, drawn in enumerate(self.rounds):
                self.drawn = drawn
                self.fill(drawn)
                alone = self.called(drawn.alone)[0]
                self.bits = [torch.cat(each) for each in zip(*alone, strict=True)]
                if self.planted and not n:
                    self.find_moved_cut()
                for batch, outs, lses in self.wrong(drawn.batches):
                    self.case.report(f"{outs} rows differ in out, {lses} in lse: {self.s} {batch}")
                self.count(drawn.batches)
        if self.on_gpu:  # several processes share its memory, and graphs leave theirs in pools of their own
            torch.cuda.empty_cache()

    def count(self, batches: list[Batch]) -> None:
        s, counts = self.s, self.case.counts
        counts.update(each.kind for each in batches)
        size = f"{s.latent} latents of {s.D}".lstrip() if s.latent else f"head size {s.D}"
        path = () if self.on_gpu else (f"the {'C++ function' if s.path == 'fused' else 'torch path'}",)
        for name in (f"{s.dtype}, cache {s.kind}", size, f"masks {[*s.features]}", *path):
            counts[f"batches of {name.replace('torch.', '')}"] += len(batches)
        counts.update({"batches": len(batches), "rows": sum(each.live for each in batches)})

    def find_moved_cut(self) -> None:
        lens = self.drawn.lens
        rows = [(n, 0, length, 1) for n, length in enumerate(lens)]
        with moved_cut(self.case.options.device, self.s.path):
            found = self.wrong([Batch("decode", rows, len(rows), len(rows), 0)])
        self.case.counts["planted"] += 1
        if not found:
            self.case.report(f"a cut was moved and no bit changed: {self.s}")

    def wrong(self, batches: list[Batch]) -> list[tuple[Batch, int, int]]:
        """The batches with rows whose out or lse has other bits than alone, and the numbers of these rows."""
        differ = []
        for first in range(0, len(batches), AT_ONCE):
            results, rows = self.called(batches[first : first + AT_ONCE])
            pairs = zip(map(torch.cat, zip(*results, strict=True)), self.bits, strict=True)
            differ.append(torch.stack([(got != bits.index_select(0, rows)).flatten(1).any(1) for got, bits in pairs]))
        together = torch.cat(differ, 1).cpu()
        self.graphs.clear()
        if not together.any():
            return []
        counts = [part.sum(1).tolist() for part in together.split([each.live for each in batches], 1)]
        return [(batch, *found) for batch, found in zip(batches, counts, strict=True) if any(found)]

    def called(self, batches: list[Batch]) -> tuple[list[list[Tensor]], Tensor]:
        """The bits of out and lse of each batch, without padding, and which rows of the queries these are."""
        drawn, threads = self.drawn, torch.get_num_threads()
        rows: list[int] = []  # of all batches; those of each begin at a multiple of 16 bytes
        live: list[int] = []
        integers: list[int] = []
        for batch in batches:
            lens, starts, places = [0] * batch.S, [0] * (batch.S + 1), [2 * len(drawn.lens)] * batch.S
            begin = len(live)
            for i, (n, copy, end, q) in enumerate(batch.rows):
                last = drawn.starts[n + 1] - (drawn.lens[n] - end)
                live += range(last - q, last)
                lens[i], places[i], starts[i + 1] = end, 2 * n + copy, starts[i] + q
            starts[len(batch.rows) + 1 :] = [starts[len(batch.rows)]] * (batch.S - len(batch.rows))
            rows += live[begin:] + [0] * (padded_to(8, batch.T) - batch.live)
            for each in (places, lens, starts):
                integers += each + [0] * (padded_to(4, len(each)) - len(each))
        together = torch.tensor(integers + rows + live, dtype=torch.int32).to(self.device)
        integers_, rows_, live_ = together.split([len(integers), len(rows), len(live)])
        query, results, row, at = self.query.index_select(0, rows_), [], 0, 0
        selected = "selected_keys" in self.features
        for batch in batches:
            pieces = []
            for size in (batch.S, batch.S, batch.S + 1):
                pieces.append(integers_[at : at + size])
                at += padded_to(4, size)
            given = {}
            if selected:
                given["selected_keys"] = self.selected.index_select(0, rows_[row : row + batch.T])
            called = self.call(batch, query[row : row + batch.T], *pieces, given)
            results.append([each[: batch.live] for each in called])
            row += padded_to(8, batch.T)
        torch.set_num_threads(threads)
        return results, live_

    def call(
        self, batch: Batch, query: Tensor, places: Tensor, lens: Tensor, starts: Tensor, given: dict[str, Tensor]
    ) -> list[Tensor]:
        """The bits of out and lse."""
        table, out = self.tables[batch.form].index_select(0, places), None
        if "bidirectional_ranges" in self.features:
            given["bidirectional_ranges"] = self.ranges.index_select(0, places)
        if not self.on_gpu:
            torch.set_num_threads(self.rng.choice((1, 1, 2, 3)))
        if self.rng.random() < 0.2:
            shape = batch.T, self.H, self.s.Dv
            out = torch.full(shape, torch.nan, dtype=self.s.dtype, device=self.device)
            out = out, torch.full(shape[:2], torch.nan, device=self.device)
        results = self.attend(batch.form, query, table, lens, starts, given, out)
        self.case.counts["calls"] += 1
        if self.on_gpu and self.rng.random() < 0.02:
            results = self.replayed(lambda: self.attend(batch.form, query, table, lens, starts, given))
        return [each.view(BITS[each.element_size()]) for each in results]

    def attend(
        self,
        form: int,
        query: Tensor,
        table: Tensor,
        lens: Tensor,
        starts: Tensor,
        given: dict[str, Tensor],
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``given``: features that each batch has its own of."""
        features = {**self.features, **self.caches[form]}
        features |= {name: value for name, value in given.items() if name in features}
        arguments = query, features.pop("kv_cache"), table, lens, starts, self.s.D**-0.5
        if out is None:
            results: tuple[Tensor, Tensor] = self.op(*arguments, **features)
            return results
        self.op_out(*arguments, **features, out=out[0], lse=out[1])
        return out

    def replayed(self, call: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Captured, after it has run, and replayed. ``torch.cuda.graph`` would first wait and free cached memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = call()
            finally:
                graph.capture_end()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        self.graphs.append(graph)  # until it has run
        self.case.counts["replays"] += 1
        return results


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded_to(multiple: int, n: int) -> int:
    return -(-n // multiple) * multiple
