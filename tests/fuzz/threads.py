"""Campaign: ops from several threads at once, and on random streams of a GPU, against the same ops one after the other.

Threads read one cache while others write and copy blocks of it that the readers do not touch; each has a cache of its
own too. An op is deterministic, so every result must have the bits that it has alone. One thread changes block tables
under a reader's feet: its results may be of either table, but nothing may crash. On a GPU each thread has a stream, and
chains of ops run on random streams that wait for each other by events.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import paged_ops

from .caches import BITS, Form, Store
from .runner import Case

ROUNDS = 25
E4M3 = torch.float8_e4m3fn
# Few, as each compiles kernels of its own on a GPU.
KINDS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32, "H": 4, "K": 2, "D": 32, "B": 4},
    {"dtype": torch.bfloat16, "H": 8, "K": 2, "D": 64, "B": 16},
    {"dtype": torch.float16, "H": 4, "K": 4, "D": 64, "B": 16, "sliding_window": 9},
    {"dtype": torch.float32, "H": 6, "K": 2, "D": 24, "B": 5, "soft_cap": 4.0},
    {"dtype": torch.float16, "H": 4, "K": 1, "D": 64, "B": 8, "kind": E4M3},
)


def run(case: Case) -> None:
    """One shared cache and its threads; on a GPU a chain of ops on streams too."""
    with torch.no_grad():
        Shared(case).run()


class Shared:
    def __init__(self, case: Case) -> None:
        rng = case.random
        self.case, self.rng, self.device = case, rng, case.device
        named = dict(rng.choice(KINDS))
        self.dtype, self.H, K, D, B = (named.pop(name) for name in ("dtype", "H", "K", "D", "B"))
        self.kind = named.pop("kind", self.dtype)
        self.features = named
        layout = rng.choice(("nhd", "hnd", "plane_first", "interleaved", "separate"))
        self.form = Form.draw(random.Random(1), layout, B, K, D, D, self.kind)
        self.dice = case.generator(self.device)
        self.S, self.M = 4, -(-40 // B)
        self.writers = rng.randint(1, 3)
        # Blocks of the sequences that are read, then some for each writer.
        self.N = self.S * self.M + 4 * self.writers
        self.store = Store(self.form, self.N, self.device, rng)
        self.lens = [rng.randint(1, 40) for _ in range(self.S)]
        ids = rng.sample(range(self.N), self.N)
        self.tables = [ids[s * self.M : (s + 1) * self.M] for s in range(self.S)]
        self.own = [ids[self.S * self.M + 4 * w :][:4] for w in range(self.writers)]
        for table, n in zip(self.tables, self.lens, strict=True):
            slots = self.put([table[p // B] * B + p % B for p in range(n)], torch.int64)
            self.write(self.store, slots, self.numbers(n, K, D), self.numbers(n, K, D))
        self.wrong: list[str] = []
        self.what = f"{self.form.name} {self.dtype} {self.kind} {self.features}"

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice, device=self.device).to(self.dtype)

    def put(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def of(self, store: Store) -> dict[str, Any]:
        names = {"kv_cache_dtype": "fp8"} if self.form.as_bytes else {}
        return {**store.planes(), **names}

    def write(self, store: Store, slots: Tensor, key: Tensor, value: Tensor) -> None:
        paged_ops.reshape_and_cache(key, value, store.kv_cache, slots, **self.of(store))
        self.case.counts["calls"] += 1

    # Jobs: functions whose results have the same bits whenever they are called --------------------------------------

    def reads(self, rng: random.Random) -> Callable[[], Any]:
        """Attention, or a gather, of a random batch of the shared sequences."""
        q, lens, tables = [], [], []
        for _ in range(rng.randint(1, self.S)):
            s = rng.randrange(self.S)
            lens.append(rng.randint(1, self.lens[s]))
            q.append(rng.choice((1, 1, min(lens[-1], 7), lens[-1])))
            tables.append(self.tables[s])
        starts = [sum(q[:s]) for s in range(len(q) + 1)]
        query = self.numbers(starts[-1] + rng.randint(0, 3), self.H, self.form.D)
        tables_, lens_, starts_ = self.put(tables), self.put(lens), self.put(starts)
        scale, store = self.form.D**-0.5, self.store
        if rng.random() < 0.25:
            of_cache = {**self.of(store), "dtype": self.dtype}
            return lambda: paged_ops.gather_kv(store.kv_cache, tables_, lens_, sum(lens) + 2, **of_cache)
        named = {**self.of(store), **self.features}
        arguments = (query, store.kv_cache, tables_, lens_, starts_, scale)
        if rng.random() < 0.5:
            return lambda: paged_ops.paged_attention_with_lse(*arguments, **named)
        return lambda: paged_ops.paged_attention(*arguments, **named)

    def writes(self, rng: random.Random, w: int) -> Callable[[], Any]:
        """Fills a block of a writer's own, copies it, and reads both back."""
        B, (first, second, third, fourth) = self.form.B, self.own[w]
        slots = self.put([first * B + offset for offset in rng.sample(range(B), B)], torch.int64)
        key, value = self.numbers(B, self.form.K, self.form.D), self.numbers(B, self.form.K, self.form.D)
        pairs = torch.tensor([[first, second], [first, third]])
        swap = torch.tensor([[second, fourth]])
        tables, lens = self.put([[first, second, third, fourth]]), self.put([4 * B])
        of_cache = {**self.of(self.store), "dtype": self.dtype}
        tensors = self.store.tensors()

        def job() -> Any:
            self.write(self.store, slots, key, value)
            paged_ops.copy_blocks(tensors, pairs)
            paged_ops.swap_blocks(tensors, tensors, swap)
            self.case.counts["calls"] += 2
            return paged_ops.gather_kv(self.store.kv_cache, tables, lens, 4 * B, **of_cache)

        return job

    def alone(self, rng: random.Random) -> Callable[[], Any]:
        """A cache of its own: written, attended to, written again."""
        B, K, D = self.form.B, self.form.K, self.form.D
        store = Store(self.form, 6, self.device, rng)
        n = rng.randint(1, 6 * B)
        slots, tables = self.put(list(range(n)), torch.int64), self.put([list(range(6))])
        keys = [self.numbers(n, K, D) for _ in range(4)]
        query, lens, starts = self.numbers(n, self.H, D), self.put([n]), self.put([0, n])
        named = {**self.of(store), **self.features}

        def job() -> Any:
            outs = []
            for key, value in (keys[:2], keys[2:]):
                self.write(store, slots, key, value)
                outs.append(paged_ops.paged_attention(query, store.kv_cache, tables, lens, starts, D**-0.5, **named))
            return outs

        return job

    def unsettled(self, rng: random.Random) -> Callable[[], Any]:
        """A reader whose block table and lengths another thread changes: anything but a crash."""
        query = self.numbers(self.S, self.H, self.form.D)
        tables, lens = self.put(self.tables), self.put(self.lens)
        starts = self.put(list(range(self.S + 1)))
        if self.device.type == "cpu":
            self.moving += [
                (tables, [tables.clone(), tables.flip(0), torch.full_like(tables, 2**30)]),
                (lens, [lens.clone(), lens * 0, lens + 10**6]),
            ]
        named = {**self.of(self.store), **self.features}

        def job() -> Any:
            with contextlib.suppress(ValueError):
                paged_ops.paged_attention(query, self.store.kv_cache, tables, lens, starts, 0.2, **named)
            return ()

        return job

    # How they run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        rng, count = self.rng, 0
        self.moving: list[tuple[Tensor, list[Tensor]]] = []
        jobs: list[list[Callable[[], Any]]] = [[self.writes(rng, w) for _ in range(3)] for w in range(self.writers)]
        jobs += [[self.reads(rng) for _ in range(5)] for _ in range(rng.randint(1, 3))]
        jobs += [[self.alone(rng) for _ in range(2)] for _ in range(rng.randint(0, 2))]
        if rng.random() < 0.5:
            jobs.append([self.unsettled(rng)])
        # Alone, one after the other.
        expected = [[_bits(job()) for job in each] for each in jobs]
        self.synchronize()
        orders = [[rng.randrange(len(each)) for _ in range(ROUNDS)] for each in jobs]
        barrier, done = threading.Barrier(len(jobs) + 1), threading.Event()

        def work(number: int) -> None:
            try:
                with self.stream(), torch.no_grad():
                    barrier.wait()
                    for index in orders[number]:
                        got = _bits(jobs[number][index]())
                        self.synchronize_stream()
                        for a, b in zip(got, expected[number][index], strict=True):
                            if not torch.equal(a, b):
                                self.wrong.append(
                                    f"thread {number}, job {index}: {int((a != b).sum())} elements differ"
                                )
            except BaseException as error:
                self.wrong.append(f"thread {number}: {type(error).__name__}: {error}")

        def move() -> None:
            turn = random.Random(self.case.number)
            barrier.wait()
            while not done.is_set():
                for tensor, values in self.moving:
                    tensor.copy_(turn.choice(values))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
        mover = threading.Thread(target=move)
        before = sys.getswitchinterval()
        sys.setswitchinterval(2e-5)
        try:
            for thread in (*threads, mover):
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            done.set()
            mover.join()
            sys.setswitchinterval(before)
        count = sum(map(len, orders))
        self.case.counts["jobs in threads"] += count
        self.case.counts["calls"] += count
        if self.device.type == "cuda":
            self.chains()
        if self.wrong:
            lines = "\n".join(self.wrong[:6])
            self.case.report(f"{len(self.wrong)} of {count} jobs: {lines}\n{self.what}")

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def synchronize_stream(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def chains(self) -> None:
        """Ops on random streams, ordered by events; the host waits only at the end."""
        rng = self.rng
        streams = [torch.cuda.Stream(self.device) for _ in range(4)]
        jobs = [("write", w, self.writes(rng, w)) for w in range(self.writers) for _ in range(6)]
        jobs += [("read", -1, self.reads(rng)) for _ in range(12)]
        rng.shuffle(jobs)
        expected = [_bits(job()) for _, _, job in jobs]
        self.synchronize()
        last: dict[int, torch.cuda.Event] = {}
        results = []
        for _, w, job in jobs:
            stream = rng.choice(streams)
            with torch.cuda.stream(stream):
                if w in last:
                    stream.wait_event(last[w])
                results.append(_bits(job()))
                if w >= 0:
                    last[w] = torch.cuda.Event()
                    last[w].record(stream)
        self.synchronize()
        for (kind, _, _), got, want in zip(jobs, results, expected, strict=True):
            for a, b in zip(got, want, strict=True):
                if not torch.equal(a, b):
                    self.wrong.append(f"on streams, a {kind}: {int((a != b).sum())} elements differ")
        self.case.counts["jobs on streams"] += len(jobs)


def _bits(result: Any) -> list[Tensor]:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return [each.contiguous().view(BITS[each.element_size()]) for each in tensors]
