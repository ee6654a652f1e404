"""How the warps of Hopper kernels wait for each other, by their code on the CPU: of the one over fp8 caches, and of the
batch-invariant one.

Scheduler, producer, loader and converter run as threads, one at a time, in random turns that change at barriers; the
consumers, whose code is arithmetic, are stood in for. Whoever reads a place of shared memory finds there what is meant
for it, and all come to an end.
"""

import random
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import triton

from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention.hopper import fp8, invariant_items, loader, producer, ring, work
from paged_ops.lowerings.gpu.attention.hopper.dense import Shared
from paged_ops.lowerings.gpu.attention.hopper.producer import TileRing
from paged_ops.lowerings.gpu.attention.hopper.ring import Ring
from paged_ops.lowerings.gpu.attention.hopper.work import Item

E4M3 = torch.float8_e4m3fn
FIELDS, ROW_START, TILES = len(Item._fields), Item._fields.index("row_start"), Item._fields.index("tiles")
TORN = "half written"
STAGES = [0]  # of tiles, in the test that runs


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
        full=lambda *_: 0, arange=lambda *_: 0, minimum=min, maximum=max, sum=lambda given, _: Number(given),
        load=lambda *_: 0, where=lambda c, a, b: a if c else b,
        static_range=range, num_programs=lambda _: 1, program_id=lambda _: 0, join=lambda first, last: Joined(first),
        BlockedLayout=lambda *_: None, int32=None, int64=None, constexpr=object, tuple=tuple,
    )  # fmt: skip
    barrier = SimpleNamespace(
        wait=lambda each, parity: each.wait(parity), arrive=lambda each, count: each.arrive(), expect=lambda *_: None
    )
    tickets = iter(range(1, len(told) + 1))

    def take(*_):
        ticket = next(tickets)
        return ticket, ticket

    def begin_rows(query, item, groups, slot, *_):
        groups.index(slot).store((item.row_start, "given"))

    def load_tile(descs, rows, kh, to, n, *_):
        ring.wait_empty(to.ring, n)
        to.pages[0].index(ring.stage_of(to.ring, n)).store(loaded[id(to.pages)])
        loaded[id(to.pages)] += 1
        ring.full_of(to.ring, n).arrive()

    def load_any(tile, at, places, *_):
        for each in places:
            each.index(at % STAGES[0]).store(at)

    def halve_rows(n, shared, SHAPE, REORDERED):
        place = shared.q_groups.index(ring.stage_of(shared.item_ring, n))
        of, state = place.content
        assert state == "given"
        place.store((of, "halved"))
        ring.fill(shared.rows_full, n)

    stubs = {
        "gl": language, "mbarrier": barrier, "FIELDS": FIELDS, "COUNT": TILES, "take": take, "begin_rows": begin_rows,
        "await_rows": lambda: None, "load_tile": load_tile, "light_programs": lambda *_: 0,
        "first_item": lambda *_: (False, 0, 0), "rows_of": lambda *_: None, "work_item": lambda item, *_: told[item],
        "fence_async_shared": lambda: None, "halve_rows": halve_rows, "as_words": lambda given, *_: given,
        "widen_words": lambda words, _: (words, words), "item_of": lambda item, *_: told[item],
        "prefetch_ids": lambda *_: None, "not_kept": lambda address: address,
        "async_copy": SimpleNamespace(wait_group=lambda _: None, commit_group=lambda: None),
        "as_tiles": lambda pages, *_: pages, "rows_at_once": lambda _: 1, "load_any": load_any,
    }  # fmt: skip
    for module in (ring, work, producer, fp8, invariant_items, loader):
        for name, given in list(vars(module).items()):
            stub = stubs.get(name, getattr(given, "fn", given) if isinstance(given, triton.JITFunction) else given)
            monkeypatch.setattr(module, name, stub)
    return producer.scheduler, producer.producer, fp8.converter


class Joined:
    def __init__(self, content):
        self.content = content

    def reshape(self, shape):
        return self.content


def consumer(which, told, shared, row_slots=2):
    """The order in which consumer.py waits, reads and releases. ``told``: of each item the tiles of keys, and whether
    the second consumer has rows. ``row_slots``: places of query rows, if there are fewer than of items."""
    state = "given" if shared.row_factors is None else "halved"
    items, k, v = shared.item_ring, shared.k, shared.v

    def check(tiles, at):
        assert tiles.tiles[0].index(ring.stage_of(tiles.ring, at)).content == at

    def wait_for(tiles, at):
        ring.wait_full(tiles.ring, at)
        check(tiles, at)

    def run():
        at = 0
        for n, (item, has_rows) in enumerate(told):
            ring.wait_full(items, n)
            assert shared.items.index(ring.stage_of(items, n) * FIELDS + ROW_START).content == n
            end = at + item.tiles
            if which and not has_rows:
                for t in range(at, end):
                    for tiles in (k, v):
                        wait_for(tiles, t)
                        ring.release(tiles.ring, t)
                ring.release(items, n)
            else:
                if shared.rows_full is not None:
                    ring.wait_full(shared.rows_full, n)
                rows = shared.q_groups.index(ring.stage_of(items, n) % row_slots)
                for t in range(at, end):
                    wait_for(k, t)
                    assert rows.content == (n, state)
                    if t > at:
                        wait_for(v, t - 1)
                    assert rows.content == (n, state)
                    check(k, t)
                    ring.release(k.ring, t)
                    if t > at:
                        check(v, t - 1)
                        ring.release(v.ring, t - 1)
                ring.release(items, n)
                wait_for(v, end - 1)
                ring.release(v.ring, end - 1)
            at = end
        n = len(told)
        ring.wait_full(items, n)
        assert shared.items.index(ring.stage_of(items, n) * FIELDS + TILES).content == 0

    return run


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128, 256])
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
        items.append(Item(*[0] * FIELDS)._replace(tiles=count, row_start=len(told)))
        if count:
            told.append((items[-1], chance.random() < 0.5))

    def places():
        return Places(lambda: Place(turns), 1, 128, 2)

    def barriers(stages, arrivals):
        return Places(lambda: Barrier(turns, arrivals), stages)

    def ring_of(stages, releases):
        return Ring(barriers(stages, 1), barriers(stages, releases))

    def tiles_of(stages, releases):
        pages = (places(),)
        return TileRing(pages, pages, ring_of(stages, releases))

    item_ring, rows = ring_of(shape.slots, 4), places()
    keys, values = tiles_of(of_bytes.stages, 1), tiles_of(of_bytes.stages, 1)
    ready = (ring_of(shape.slots, 1), rows) if halved else (None, None)
    shared = Shared(
        places(), item_ring, rows, rows, tiles_of(shape.stages, 2), tiles_of(shape.stages, 2), None, None, None, *ready
    )
    scheduler, produce, converter = by_code(monkeypatch, items, {id(each.pages): 0 for each in (keys, values)})
    numbers, tensors = (
        SimpleNamespace(T=0, S=len(items), table_stride=0),
        SimpleNamespace(query=None, taken=None, block_tables=0),
    )
    batch = SimpleNamespace(tensors=tensors, numbers=numbers)
    turns.run(
        lambda: scheduler(batch, None, shared, pairs, None, shape),
        lambda: produce((None, None), batch, shared._replace(k=keys, v=values), pairs, of_bytes),
        lambda: converter(keys, values, shared, True, shape),
        consumer(0, told, shared),
        consumer(1, told, shared),
    )


@pytest.mark.slow
@pytest.mark.parametrize("lead", [1, 4, 8])
@pytest.mark.parametrize("load", ["tma", "copies", "elements"])
@pytest.mark.parametrize(("stages", "slots", "row_slots"), [(2, 2, 2), (3, 2, 2), (2, 1, 1), (2, 2, 1)])
def test_items_are_taken_in_time(stages, slots, row_slots, load, lead, monkeypatch):
    """By take_in_time of invariant_items.py, with its three ways of loading tiles."""
    for seed in range(10):
        with monkeypatch.context() as patched:
            take_and_attend(patched, seed, stages, slots, row_slots, load, lead)


def take_and_attend(monkeypatch, seed, stages, slots, row_slots, load, lead):
    turns, chance = Turns(seed), random.Random(seed)
    counts = [chance.choice([1, 1, 2, 3, 5, 9]) for _ in range(chance.randrange(1, 8))]
    items = [Item(*[0] * FIELDS)._replace(tiles=count, row_start=n) for n, count in enumerate(counts)]
    told = [(item, chance.random() < 0.5) for item in items]

    def places():
        return Places(lambda: Place(turns), 1, 128, 2)

    def barriers(stages, arrivals):
        return Places(lambda: Barrier(turns, arrivals), stages)

    def ring_of(stages, releases):
        return Ring(barriers(stages, 1), barriers(stages, releases))

    def tiles_of():
        pages = (places(),)
        pages[0].dtype = None
        return TileRing(pages, pages, ring_of(stages, 2))

    STAGES[0] = stages
    rows = (places(),)
    rows[0].dtype = None
    keys, values, ending = tiles_of(), tiles_of(), ring_of(slots, 1)
    later = ring_of(1, 1) if row_slots < slots else None
    shared = Shared(places(), ring_of(slots, 3), rows[0], rows, keys, values, None, None, None, later, None)
    by_code(monkeypatch, items, {id(each.pages): 0 for each in (keys, values)})
    columns, masks = SimpleNamespace(parts=(128,), matrix=None, size=128), SimpleNamespace(first=0)
    shape = SimpleNamespace(
        warps=4, stages=stages, slots=slots, row_slots=row_slots, N=128, page=16, k=columns, v=columns, pieces=1
    )
    side = SimpleNamespace(size=128)
    SPEC = SimpleNamespace(K=1, B=16, table=1, masks=masks, k_side=side, v_side=side)
    plan = SimpleNamespace(lead=lead, decoder_rows=0)
    numbers = SimpleNamespace(T=0, S=len(items), table_stride=0)
    batch = SimpleNamespace(tensors=SimpleNamespace(query=None, block_tables=0), numbers=numbers)
    work_ = SimpleNamespace(tiles=len(items), few=0, programs=1, counters=None)
    loads = {
        "tma": lambda: producer.producer((None, None), batch, shared, SPEC, shape, 4, ending, lead),
        "copies": lambda: loader.loader(batch, shared, ending, lead, SPEC, shape, True),
        "elements": lambda: loader.loader(batch, shared, ending, lead, SPEC, shape, False),
    }
    turns.run(
        lambda: invariant_items.take_in_time(work_, batch, shared, ending, SPEC, plan, shape),
        loads[load],
        consumer(0, told, shared, row_slots),
        consumer(1, told, shared, row_slots),
    )
