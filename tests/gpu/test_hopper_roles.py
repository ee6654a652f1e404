"""How the warps of the Hopper kernel over fp8 caches wait for each other, by their code on the CPU.

Scheduler, producer and converter run as threads, one at a time, in random turns that change at barriers; the consumers,
whose code is arithmetic, are stood in for. Whoever reads a place of shared memory finds there what is meant for it, and
all come to an end.
"""

import random
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention.hopper import fp8, work
from paged_ops.lowerings.gpu.attention.hopper.dense import Shared

E4M3 = torch.float8_e4m3fn
COUNT, ROW_START, FIELDS = (getattr(work, name).value for name in ("COUNT", "ROW_START", "FIELDS"))
TORN = "half written"


class Turns:
    """Threads of which one runs at a time; at each ``other()`` a random one goes on."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.runnable = []
        self.turn = threading.Condition()
        self.current = self.failure = None

    def run(self, *roles):
        threads = [threading.Thread(target=self._role, args=(n, role), daemon=True) for n, role in enumerate(roles)]
        self.runnable, self.weights = list(range(len(roles))), [self.random.choice([1, 1, 5, 30]) for _ in roles]
        self._choose()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _choose(self):
        if self.runnable:
            self.current = self.random.choices(self.runnable, [self.weights[n] for n in self.runnable])[0]

    def _role(self, n, role):
        with self.turn:
            try:
                self.turn.wait_for(lambda: self.current == n or self.failure)
                role()
            except BaseException as error:
                self.failure = self.failure or error
            self.runnable.remove(n)
            self._choose()
            self.turn.notify_all()

    def other(self):
        mine = self.current
        self._choose()
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.current == mine or self.failure)
        if self.failure:
            raise SystemExit

    def until(self, holds):
        for _ in range(20000):
            if holds():
                return
            self.other()
        raise AssertionError("a barrier is never passed")


class Barrier:
    """Of a phase that ends with so many arrivals."""

    def __init__(self, turns, arrivals):
        self.turns, self.arrivals, self.pending, self.phase = turns, arrivals, arrivals, 0

    def arrive(self):
        self.pending -= 1
        if not self.pending:
            self.pending, self.phase = self.arrivals, self.phase + 1
        self.turns.other()

    def wait(self, parity):
        self.turns.until(lambda: self.phase & 1 != parity)
        self.turns.other()


class Place:
    """Of shared memory, or a part of it. What is stored is there a turn later."""

    def __init__(self, turns):
        self.turns, self.content = turns, None

    def slice(self, *_, **__):
        return self

    def load(self, layout):
        return self.content

    def store(self, content):
        self.content = TORN
        self.turns.other()
        self.content = content


class Places(dict):
    def __init__(self, new, *shape):
        super().__init__()
        self.new, self.shape = new, shape

    def index(self, n):
        if n not in self:
            self[n] = self.new()
        return self[n]


class Number(int):
    def to(self, dtype):
        return self


def by_code(monkeypatch, told, loaded):
    """The roles' functions, with what they call replaced."""
    language = SimpleNamespace(
        full=lambda *_: 0, arange=lambda *_: 0, maximum=max, load=lambda *_: 0, where=lambda c, a, b: a if c else b,
        static_range=range, num_programs=lambda _: 1, program_id=lambda _: 0, join=lambda first, last: Joined(first),
        BlockedLayout=lambda *_: None, int32=None, int64=None,
    )  # fmt: skip
    barrier = SimpleNamespace(
        wait=lambda each, parity: each.wait(parity), arrive=lambda each, count: each.arrive(), expect=lambda *_: None
    )
    tickets = iter(range(1, len(told) + 1))

    def take(*_):
        ticket = next(tickets)
        return ticket, ticket

    def bring_rows(query, row_start, q_len, first_token, kh, groups, slot, *_):
        groups.index(slot).store((row_start, "given"))

    def bring(descs, rows, kh, full, pages, stage, *_):
        pages[0].index(stage).store(loaded[id(pages)])
        loaded[id(pages)] += 1
        full.arrive()

    def halve_rows(slot, shared, SHAPE):
        n, state = shared.q_groups.index(slot).content
        assert state == "given"
        shared.q_groups.index(slot).store((n, "halved"))
        shared.rows_full.index(slot).arrive()

    stubs = {
        "gl": language, "mbarrier": barrier, "FIELDS": FIELDS, "take": take, "bring_rows": bring_rows, "bring": bring,
        "work_item": lambda item, *_: told[item], "light_programs": lambda *_: 0,
        "first_item": lambda *_: (False, 0, 0), "rows_of": lambda *_: None,
        "get": lambda items, slot, field, _: Number(items.index(slot * FIELDS + field).content),
        "fence_async_shared": lambda: None, "halve_rows": halve_rows, "as_words": lambda given, *_: given,
        "widen_words": lambda words, _: (words, words), "convert": fp8.convert.fn,
    }  # fmt: skip
    names = "COUNT", "KV_HEAD", "SEQUENCE", "SEQ_LEN", "END_TILE", "ROW_START", "Q_LEN", "FIRST_TOKEN"
    stubs |= {name: getattr(work, name).value for name in names}
    for module in (work, fp8):
        for name, stub in stubs.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    return work.scheduler.fn, work.producer.fn, fp8.converter.fn


class Joined:
    def __init__(self, content):
        self.content = content

    def reshape(self, shape):
        return self.content


def consumer(which, told, shared):
    """The order in which hopper_rows.py waits, reads and gives back. ``told``: of each item the tiles of keys, and
    whether the second consumer has rows."""
    counts = [fields[COUNT] for fields, _ in told]
    state = "given" if shared.row_factors is None else "halved"
    slots, places, stages = (shared.slots, shared.row_slots, shared.stages)

    def wait_for(full, tiles, at):
        full.index(at % stages).wait(at // stages & 1)
        assert tiles.index(at % stages).content == at

    def run():
        at = 0
        for n, count in enumerate(counts):
            shared.item_full.index(n % slots).wait(n // slots & 1)
            assert shared.items.index(n % slots * FIELDS + ROW_START).content == n
            if which and not told[n][1]:
                for t in range(at, at + count):
                    wait_for(shared.k_full, shared.k_tiles[0], t)
                    shared.k_empty.index(t % stages).arrive()
                    wait_for(shared.v_full, shared.v_tiles[0], t)
                    shared.v_empty.index(t % stages).arrive()
                shared.item_empty.index(n % slots).arrive()
            else:
                if shared.rows_full is not None:
                    shared.rows_full.index(n % places).wait(n // places & 1)
                for t in range(at, at + count):
                    wait_for(shared.k_full, shared.k_tiles[0], t)
                    assert shared.q_groups.index(n % places).content == (n, state)
                    if t > at:
                        wait_for(shared.v_full, shared.v_tiles[0], t - 1)
                    assert shared.q_groups.index(n % places).content == (n, state)
                    assert shared.k_tiles[0].index(t % stages).content == t
                    shared.k_empty.index(t % stages).arrive()
                    if t > at:
                        assert shared.v_tiles[0].index((t - 1) % stages).content == t - 1
                        shared.v_empty.index((t - 1) % stages).arrive()
                shared.item_empty.index(n % slots).arrive()
                wait_for(shared.v_full, shared.v_tiles[0], at + count - 1)
                shared.v_empty.index((at + count - 1) % stages).arrive()
            at += count
        n = len(counts)
        shared.item_full.index(n % slots).wait(n // slots & 1)
        assert shared.items.index(n % slots * FIELDS + COUNT).content == 0

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128])
def test_roles_wait_for_each_other(D, dtype, monkeypatch):
    query, tables = torch.zeros(64, 8, D, dtype=dtype), torch.zeros(4, 2, dtype=torch.int32)
    key, value = torch.zeros(5, 16, 1, 1, D).to(E4M3), torch.zeros(5, 16, 1, D).to(E4M3)
    pairs = fp8.in_pairs(spec.spec_of(query, key, value, 0, tables, None, Features(), dtype, True))
    shape, of_bytes = fp8.shapes_of(pairs, 227 << 10)
    for seed in range(40):
        with monkeypatch.context() as patched:
            run_once(patched, seed, pairs, shape, of_bytes, dtype == torch.bfloat16)


def run_once(monkeypatch, seed, pairs, shape, of_bytes, halved):
    turns, chance = Turns(seed), random.Random(seed)
    counts = [chance.choice([0, 1, 1, 2, 3, 5]) for _ in range(chance.randrange(1, 8))]
    told, items = [], []
    for count in counts:
        fields = [0] * FIELDS
        fields[COUNT], fields[ROW_START] = count, len(told)
        items.append(tuple(fields))
        if count:
            told.append((fields, chance.random() < 0.5))

    def places():
        return Places(lambda: Place(turns), 1, 1, 2)

    def barriers(arrivals=1):
        return Places(lambda: Barrier(turns, arrivals))

    ahead = shape.row_slots < shape.slots
    items_of = places(), barriers(), barriers(4)
    rows, arrived, ready = places(), barriers() if ahead else None, barriers() if halved else None
    tiles = [(places(),), (places(),)]
    shared = Shared(
        *items_of, rows, rows, None, tiles[0], barriers(), barriers(2), None, tiles[1], barriers(), barriers(2), None,
        None, ready if halved else arrived, rows if halved else None,
    )  # fmt: skip
    given = shared._replace(rows_full=arrived)
    pages = (places(),), (places(),)
    of_all_bytes = Shared(
        *items_of, None, None, pages[0], pages[0], barriers(), barriers(), pages[1], pages[1], barriers(), barriers(),
        None, None, arrived, None,
    )  # fmt: skip
    scheduler, producer, converter = by_code(monkeypatch, items, {id(each): 0 for each in pages})
    numbers = SimpleNamespace(T=0, S=len(items), table_stride=0)
    tensors = SimpleNamespace(query=None, taken=None)
    stand_in = SimpleNamespace(**shared._asdict(), slots=shape.slots, row_slots=shape.row_slots, stages=shape.stages)
    turns.run(
        lambda: scheduler(tensors, numbers, None, given, pairs, None, shape),
        lambda: producer((None, None), 0, 0, of_all_bytes, pairs, of_bytes),
        lambda: converter(of_all_bytes, shared, True, shape, of_bytes),
        consumer(0, told, stand_in),
        consumer(1, told, stand_in),
    )
