"""Campaign: ``BlockAllocator`` against a slow model that knows what lies in every slot of both memories.

The content of a token represents its keys and values: a number that depends on all tokens before it and on the extra
key. A step writes contents into the slots that the allocator names; copies and swaps move them; and whatever a coming
token of a sequence sees must lie where the allocator says. Calls are refused, run out of blocks, or are interrupted
between two of their lines, as Ctrl-C does: then they have happened or not, and nothing is lost.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paged_ops.cache import BlockAllocator, OutOfBlocks, allocator, block_pool, prefixes

from .runner import Case

OPERATIONS = 400
Memory = list[list[int | None]]  # [N][B]


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


class Contents(BlockAllocator):
    """The allocator, and what its memories hold: moved where KVCache moves tensors."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, **options: int) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks, **options)
        self.device: Memory = [[None] * block_size for _ in range(num_blocks)]
        self.host: Memory = [[None] * block_size for _ in range(num_host_blocks)]

    def flush_copies(self) -> None:
        pairs = self.pending_copies()
        assert len({target for _, target in pairs}) == len(pairs), pairs
        assert not {source for source, _ in pairs} & {target for _, target in pairs}, pairs
        for source, target in pairs:
            self.device[target] = list(self.device[source])
        self.take_copies()

    def swap_out(self, seq_id: Any) -> list[tuple[int, int]]:
        self.flush_copies()
        return super().swap_out(seq_id)

    def _copy_between(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        source, target = (self.device, self.host) if to_host else (self.host, self.device)
        for old, new in pairs:
            target[new] = list(source[old])


@dataclass
class Known:
    """What the model knows of a sequence."""

    extra_key: int
    tokens: list[int]
    computed: int = 0
    swapped: bool = False

    def contents(self) -> list[int]:
        chain, before = [], self.extra_key
        for token in self.tokens:
            before = zlib.crc32(f"{token}".encode(), before)
            chain.append(before)
        return chain


def run(case: Case) -> None:
    """Random calls on one allocator, each checked."""
    Model(case).run()


class Model:
    def __init__(self, case: Case) -> None:
        rng = case.random
        self.case, self.rng = case, rng
        self.B = rng.choice((1, 2, 3, 4, 4, 8))
        window, chunk = rng.choice(((0, 0), (0, 0), (0, 0), (rng.randint(1, 20), 0), (0, rng.randint(1, 20)), (9, 12)))
        self.window, self.chunk = window, chunk
        masks = {name: value for name, value in (("sliding_window", window), ("attention_chunk", chunk)) if value}
        self.num_first = rng.choice((0, 1, rng.randint(1, 12))) if window else 0
        if self.num_first:
            masks["num_first_tokens"] = self.num_first
        self.cache = Contents(rng.randint(3, 30), self.B, rng.choice((0, 0, 5, 20)), **masks)
        self.seqs: dict[int, Known] = {}
        self.next_id = 0
        self.since_reset = True
        self.vocabulary = rng.choice((1, 2, 2, 50))
        self.interrupts = rng.random() < 0.5
        self.what = ""
        self.there = self.found = 0  # tokens that admissions could share at least, and did

    def run(self) -> None:
        names = ["admit"] * 4 + ["append"] * 4 + ["step"] * 6 + ["fork", "free", "rollback", "swap_out", "swap_in"]
        names += ["refused", "reset"] if self.rng.random() < 0.5 else ["refused"]
        for _ in range(OPERATIONS):
            name = self.rng.choice(names)
            self.what = name
            try:
                getattr(self, name)()
                self.check()
            except AssertionError as error:
                sizes = f"N={self.cache.num_blocks} B={self.B} host={len(self.cache.host)}"
                raise AssertionError(
                    f"{self.what}: {error}\n{sizes} window={self.window} chunk={self.chunk} first={self.num_first}"
                ) from error
            self.case.counts["operations"] += 1
            self.case.counts[f"operations: {name}"] += 1

        assert self.found >= 0.8 * self.there - 20, f"found {self.found} tokens in the cache, where {self.there} are"

    # Calls -----------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], Any]) -> Any:
        """A call that may run out of blocks (then None) or be interrupted: see :class:`Interrupted`."""
        before = self.snapshot()
        try:
            if self.interrupts and self.rng.random() < 0.15:
                return interrupted(function, self.rng.randint(1, 60))
            return function()
        except OutOfBlocks:
            self.case.counts["out of blocks"] += 1
            assert self.snapshot() == before, "running out of blocks changed something"
            return None
        except Interrupted:
            self.case.counts["interrupted"] += 1
            self.cache.recover()
            self.what += ", interrupted"
            raise

    def snapshot(self) -> Any:
        ids = [(s, self.cache.num_tokens(s), self.cache.num_computed_tokens(s)) for s in self.seqs]
        rows = [None if known.swapped else self.cache.block_ids(s) for s, known in self.seqs.items()]
        return ids, rows, self.cache.stats(), self.cache.pending_copies()

    def live(self) -> list[int]:
        return [s for s, known in self.seqs.items() if not known.swapped]

    def admit(self) -> None:
        rng, cache = self.rng, self.cache
        tokens = [rng.randrange(self.vocabulary) for _ in range(rng.randint(1, 4 * self.B))]
        if self.seqs and rng.random() < 0.6:  # begins as another one does
            other = rng.choice(list(self.seqs.values())).tokens
            tokens = other[: rng.randint(0, len(other))] + tokens[: rng.randint(1, len(tokens))]
        known = Known(rng.choice((0, 0, 0, 1)), tokens)
        options: dict[str, int] = {}
        if rng.random() < 0.3:
            options["max_cached"] = rng.randint(0, len(tokens))
        if rng.random() < 0.3:
            options["first_chunk"] = rng.randint(1, len(tokens))
        could = cache.can_admit(tokens, known.extra_key, **options)
        free, s = cache.stats().free_blocks, self.next_id
        self.next_id += 1
        least = 0 if options or self.window or self.chunk else self.least_cached(known)
        try:
            cached = self.call(lambda: cache.admit(s, tokens, known.extra_key, **options))
        except Interrupted:
            if s in cache:
                self.seqs[s] = known
                known.computed = cache.num_computed_tokens(s)
            return
        assert (cached is not None) == could, f"can_admit said {could}"
        if cached is None:
            if not options:
                assert -(-len(tokens) // self.B) > free, f"out of blocks with {free} free for {len(tokens)} tokens"
            return
        assert 0 <= cached < len(tokens) and cached % self.B == 0, cached
        # Of two blocks with one content the index knows one; when that is evicted, the other is not found.
        self.there += least
        self.found += min(cached, least)
        assert cached <= options.get("max_cached", cached), cached
        known.computed = cached
        self.seqs[s] = known

    def least_cached(self, known: Known) -> int:
        """What sequences that are alive have computed of it."""
        most = 0
        for other in self.seqs.values():
            if other.swapped or other.extra_key != known.extra_key:
                continue
            common = 0
            for a, b in zip(known.tokens[:-1], other.tokens[: other.computed], strict=False):
                if a != b:
                    break
                common += 1
            most = max(most, common)
        return most // self.B * self.B if self.since_reset else 0

    def append(self) -> None:
        done = [s for s in self.live() if self.reserved_all(s)]
        if not done:
            return
        s = self.rng.choice(done)
        tokens = [self.rng.randrange(self.vocabulary) for _ in range(self.rng.choice((1, 1, 1, 2, 5, 0)))]
        could = self.cache.can_append(s, len(tokens))
        before = len(self.seqs[s].tokens)
        try:
            self.call(lambda: self.cache.append(s, tokens))
        except Interrupted:
            pass
        else:
            assert (self.cache.num_tokens(s) == before + len(tokens)) == (could or not tokens), f"can_append: {could}"
        if self.cache.num_tokens(s) != before:
            self.seqs[s].tokens += tokens

    def reserved_all(self, s: int) -> bool:
        """Whether every token has a slot: a prompt that is reserved in parts cannot be appended to before."""
        try:
            return len(self.cache.slots(s)) == len(self.seqs[s].tokens) - self.seqs[s].computed
        except ValueError:
            return False

    def step(self) -> None:
        """Some sequences compute some of their tokens: written, then committed."""
        rng, cache = self.rng, self.cache
        try:
            self.call(cache.flush_copies)
        except Interrupted:
            self.call_quietly(cache.flush_copies)
        for s in rng.sample(self.live(), rng.randint(0, len(self.live()))):
            known = self.seqs[s]
            waiting = len(known.tokens) - known.computed
            count = rng.choice((waiting, rng.randint(0, waiting)))
            if self.window or self.chunk:
                count = min(count, cache.num_reservable(s))
                try:
                    self.call(lambda s=s, count=count: cache.reserve(s, count))
                except Interrupted:
                    self.call_quietly(lambda s=s, count=count: cache.reserve(s, count))
            slots = cache.slots(s, known.computed, known.computed + count)
            self.check_seen(s)
            contents = known.contents()
            for position, slot in zip(range(known.computed, known.computed + count), slots, strict=True):
                cache.device[slot // self.B][slot % self.B] = contents[position]
            # While the step runs, each of its tokens sees what the first one sees, and what the step wrote.
            try:
                self.call(lambda s=s, count=count: cache.commit(s, count))
            except Interrupted:
                assert cache.num_computed_tokens(s) in (known.computed, known.computed + count)
            known.computed = cache.num_computed_tokens(s)

    def call_quietly(self, function: Callable[[], Any]) -> None:
        """Once more after an interrupt, now to its end."""
        interrupts, self.interrupts = self.interrupts, False
        self.call(function)
        self.interrupts = interrupts

    def fork(self) -> None:
        done = [s for s in self.live() if self.seqs[s].computed == len(self.seqs[s].tokens)]
        if done:
            parent, s = self.rng.choice(done), self.next_id
            self.next_id += 1
            try:
                self.call(lambda: self.cache.fork(parent, s))
            except Interrupted:
                if s not in self.cache:
                    return
            known = self.seqs[parent]
            self.seqs[s] = Known(known.extra_key, list(known.tokens), known.computed)

    def free(self) -> None:
        if self.seqs:
            s = self.rng.choice(list(self.seqs))
            try:
                self.call(lambda: self.cache.free(s))
            except Interrupted:
                if s in self.cache:
                    return
            del self.seqs[s]

    def rollback(self) -> None:
        if self.live():
            s = self.rng.choice(self.live())
            known = self.seqs[s]
            if not known.computed:
                return  # a sequence without tokens is one that was never admitted
            try:
                self.call(lambda: self.cache.rollback(s))
            except Interrupted:
                assert self.cache.num_tokens(s) in (known.computed, len(known.tokens))
            del known.tokens[self.cache.num_tokens(s) :]
            assert self.what.endswith("interrupted") or len(known.tokens) == known.computed

    def swap_out(self) -> None:
        self.swap(self.live(), self.cache.can_swap_out, self.cache.swap_out, True)

    def swap_in(self) -> None:
        gone = [s for s, known in self.seqs.items() if known.swapped]
        self.swap(gone, self.cache.can_swap_in, self.cache.swap_in, False)

    def swap(self, of: list[int], can: Callable[[int], bool], do: Callable[[int], Any], swapped: bool) -> None:
        if not of:
            return
        s = self.rng.choice(of)
        self.call_quietly(self.cache.flush_copies)
        could = can(s)
        try:
            pairs = self.call(lambda: do(s))
        except Interrupted:
            self.seqs[s].swapped = self.cache.is_swapped_out(s)
            return
        assert (pairs is not None) == could, f"could: {could}"
        if pairs is not None:
            self.seqs[s].swapped = swapped

    def reset(self) -> None:
        if self.rng.random() < 0.1:
            try:
                self.call(lambda: self.cache.reset(free_sequences=True))
            except Interrupted:
                self.seqs = {s: known for s, known in self.seqs.items() if s in self.cache}
                self.check()
                self.call_quietly(lambda: self.cache.reset(free_sequences=True))
            self.seqs.clear()
            assert self.cache.stats().free_blocks == self.cache.num_blocks
            for memory in (self.cache.device, self.cache.host):  # what is found from now on would be seen to be wrong
                for block in memory:
                    block[:] = [None] * self.B

    def refused(self) -> None:
        """Calls that have no meaning change nothing."""
        cache, rng, nobody = self.cache, self.rng, self.next_id + 10
        calls: list[Callable[[], Any]] = [
            lambda: cache.append(nobody, [1]),
            lambda: cache.free(nobody),
            lambda: cache.admit(nobody, []),
            lambda: cache.commit(nobody, 0),
            lambda: cache.fork(nobody, nobody + 1),
            lambda: cache.swap_in(nobody),
        ]
        if self.seqs:
            s = rng.choice(list(self.seqs))
            known = self.seqs[s]
            calls += [lambda: cache.admit(s, [1, 2]), lambda: cache.commit(s, len(known.tokens) - known.computed + 1)]
            calls += [lambda: cache.commit(s, -1), lambda: cache.slots(s, 0, len(known.tokens) + 1)]
            if known.swapped:
                calls += [lambda: cache.append(s, [1]), lambda: cache.block_ids(s), lambda: cache.swap_out(s)]
            else:
                calls += [lambda: cache.swap_in(s)]
                if known.computed < len(known.tokens):
                    calls += [lambda: cache.fork(s, nobody)]
            if self.seqs:
                calls += [lambda: cache.reset()]
        self.call_quietly(cache.flush_copies)
        before = self.snapshot()
        try:
            rng.choice(calls)()
        except ValueError:
            assert self.snapshot() == before, "a refused call changed something"
        else:
            raise AssertionError("a call without meaning was not refused")

    # What must hold --------------------------------------------------------------------------------------------------

    def seen(self, known: Known) -> list[int]:
        """The computed positions that a token from ``computed`` on sees, and the first tokens."""
        start = 0
        if self.window:
            start = max(start, known.computed - self.window + 1)
        if self.chunk:
            start = max(start, known.computed // self.chunk * self.chunk)
        return [*range(min(self.num_first, start)), *range(start, known.computed)]

    def check_seen(self, s: int) -> None:
        """What the next token of a sequence sees lies where the allocator says."""
        known = self.seqs[s]
        copied = {target: source for source, target in self.cache.pending_copies()}
        row, contents = self.cache.block_ids(s), known.contents()
        assert all(0 <= block < self.cache.num_blocks for block in row), row
        for position in self.seen(known):
            block = row[position // self.B]
            block = copied.get(block, block)
            held = self.cache.device[block][position % self.B]
            assert held == contents[position], f"sequence {s}: position {position} of {known.computed} is not there"

    def check(self) -> None:
        cache, used = self.cache, set()
        for s, known in self.seqs.items():
            assert cache.num_tokens(s) == len(known.tokens), f"sequence {s}: tokens"
            assert cache.num_computed_tokens(s) == known.computed, f"sequence {s}: computed"
            assert cache.is_swapped_out(s) == known.swapped, f"sequence {s}: swapped"
            if not known.swapped:
                self.check_seen(s)
                used |= set(cache.block_ids(s))
        copies = cache.pending_copies()
        used |= {source for source, _ in copies}
        stats = cache.stats()
        assert stats.used_blocks == len(used), f"{stats.used_blocks} blocks in use, of sequences {len(used)}"
        assert stats.used_blocks + stats.free_blocks == cache.num_blocks
        if not self.seqs:
            assert stats.host_used_blocks == 0, "host blocks without a sequence"
        # Slots that a sequence will write are nobody else's.
        writers: dict[int, int] = {}
        for s in self.live():
            try:
                slots = cache.slots(s)
            except ValueError:
                continue
            for slot in slots:
                assert writers.setdefault(slot, s) == s, f"slot {slot} will be written by {writers[slot]} and by {s}"
        for s in self.live():
            row, known = cache.block_ids(s), self.seqs[s]
            for position in self.seen(known):
                slot = row[position // self.B] * self.B + position % self.B
                assert writers.get(slot, s) == s, f"slot {slot} of {s} will be written by {writers[slot]}"


def interrupted(function: Callable[[], Any], lines: int) -> Any:
    """Run the call, interrupted after a number of lines of the allocator."""
    left = lines

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (allocator.__file__, block_pool.__file__, prefixes.__file__):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)
