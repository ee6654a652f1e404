"""Campaign: the metadata builder and the helpers of batches against plain Python, one token at a time.

One case is one builder and a row of batches through it: right, wrong (which must change nothing), for capture, and
advanced on the device. On a GPU the same checks read the device once a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_ops import metadata
from paged_ops.metadata import AttentionMetadata, AttentionMetadataBuilder, Batch, GraphSupport

from .runner import Case

BATCHES = 60
POISON = -(10**6)


def run(case: Case) -> None:
    """One builder and its batches."""
    Builds(case).run()


class Builds:
    def __init__(self, case: Case) -> None:
        rng: random.Random = case.random
        self.case, self.rng = case, rng
        self.B = rng.choice((1, 2, 3, 4, 16, 17, 128))
        self.S, self.T = rng.randint(1, 12), rng.randint(1, 60)
        self.M = rng.randint(1, max(2, 200 // self.B))
        self.N = rng.choice((1, 5, 300, 2**31 - 1))
        self.R = rng.choice((0, 0, 1, 2, 4))  # bidirectional ranges of a request in a step
        self.builder = AttentionMetadataBuilder(
            self.B,
            self.S,
            self.T,
            self.M,
            case.device,
            num_blocks=self.N,
            graph_support=rng.choice(list(GraphSupport)),
            unused_block_id=rng.choice((None, None, POISON)),
            max_bidirectional_ranges=self.R,
            num_staging_buffers=rng.choice((None, 1, 3)),
        )

    def run(self) -> None:
        for _ in range(BATCHES):
            self.build()
            self.helpers()
            self.case.counts["builds"] += 1
        self.for_capture()

    def draw(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Query lengths, computed tokens and blocks of a batch that fits."""
        rng, q, c, blocks = self.rng, [], [], []
        left = self.T
        for _ in range(rng.randint(0, self.S)):
            length = rng.randint(0, self.M * self.B)
            rows = min(length, left, rng.choice((0, 1, 1, 1, 2, 7, 999)))
            left -= rows
            q.append(rows)
            c.append(length - rows)
            blocks.append([rng.randrange(self.N) for _ in range(-(-length // self.B))])
        return q, c, blocks

    def draw_ranges(self, q: list[int], c: list[int]) -> list[list[tuple[int, int]]] | None:
        """Ranges of each request: before the step, in it and after it, and padding; none is cut by its end."""
        rng = self.rng
        if rng.random() < 0.3:
            return None
        result = []
        for rows, first in zip(q, c, strict=True):
            last = first + rows
            pairs = [(rng.randint(-3, last), rng.choice((rng.randint(-3, last), last))) for _ in range(self.R)]
            pairs += [(last, last + rng.randint(0, 9)), (-1, last), (last, first), (rng.randint(0, first), first)]
            result.append(rng.sample(pairs, len(pairs)))
        return result

    def batch(
        self, q: list[int], c: list[int], blocks: list[list[int]], ranges: list[list[tuple[int, int]]] | None = None
    ) -> Batch:
        """Lists, or tensors whose unneeded entries are hostile."""
        if self.rng.random() < 0.5:
            return Batch(q, c, blocks, bidirectional_ranges=ranges)
        width = max(map(len, blocks), default=0) + self.rng.randint(0, 3)
        hostile = (-1, 2**31 - 1, -(2**31), self.N if self.N < 2**31 else 0)
        table = [[*row, *(self.rng.choice(hostile) for _ in range(width - len(row)))] for row in blocks]
        dtype = self.rng.choice((torch.int32, torch.int64))
        given = None if ranges is None else torch.tensor(ranges, dtype=dtype).view(len(ranges), -1 if ranges else 0, 2)
        arguments = torch.tensor(q, dtype=dtype), torch.tensor(c, dtype=dtype), _table(table, width, dtype)
        return Batch(*arguments, bidirectional_ranges=given)

    def build(self) -> None:
        rng, B = self.rng, self.B
        q, c, blocks = self.draw()
        n, t = len(q), sum(q)
        S = rng.choice((None, rng.randint(n, self.S)))
        T = rng.choice((None, rng.randint(t, self.T)))
        longest = max((a + b for a, b in zip(q, c, strict=True)), default=0)
        ahead = rng.choice((0, 0, rng.randint(0, self.M * B - longest)))
        reach = [-(-(a + b + ahead) // B) for a, b in zip(q, c, strict=True)]
        blocks = [
            [*row, *(rng.randrange(self.N) for _ in range(need - len(row)))]
            for row, need in zip(blocks, reach, strict=True)
        ]
        prefix = 0
        if n and rng.random() < 0.3:
            prefix = min(c) // B * B
            blocks = [[*blocks[0][: prefix // B], *row[prefix // B :]] for row in blocks]
        if rng.random() < 0.2:
            self.refused(q, c, blocks)
        if self.rng.random() < 0.3:
            self.builder._buffers.block_tables.fill_(POISON)
        fast = rng.random() < 0.3
        ranges = self.draw_ranges(q, c)
        batch = self.batch(q, c, blocks, ranges)
        got = self.builder.build(prefix, batch, fast, num_reqs=S, num_tokens=T, lookahead=ahead)
        self.compare(got, q, c, blocks, n if S is None else S, t if T is None else T)
        self.compare_ranges(got, q, c, ranges or [[]] * n)
        self.compare_cascade(got, 0 if fast else prefix, q, c, blocks)
        if n and set(q) == {1} and ahead and got.seq_lens.shape[0] == got.slot_mapping.shape[0]:
            for step in range(1, min(ahead, 5) + 1):
                metadata.advance_decodes(got, B)
                later = [each + step for each in c]
                self.compare_device(got, q, later, blocks, len(got.seq_lens), len(got.slot_mapping))
                self.case.counts["advanced"] += 1

    def compare(
        self, got: AttentionMetadata, q: list[int], c: list[int], blocks: list[list[int]], S: int, T: int
    ) -> None:
        starts, lens = self.compare_device(got, q, c, blocks, S, T)
        n, t = len(q), sum(q)
        padding = [0] * (S - n)
        _equal("query_start_loc_cpu", got.query_start_loc_cpu, starts, torch.int32)
        _equal("seq_lens_cpu", got.seq_lens_cpu, lens, torch.int32)
        _equal("num_computed_tokens_cpu", got.num_computed_tokens_cpu, [*c, *padding], torch.int32)
        numbers = (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len)
        assert numbers == (n, t, max(q, default=0), max(lens, default=0)), numbers
        assert all(type(number) is int for number in numbers)

    def compare_device(
        self, got: AttentionMetadata, q: list[int], c: list[int], blocks: list[list[int]], S: int, T: int
    ) -> tuple[list[int], list[int]]:
        n, t, B = len(q), sum(q), self.B
        starts = [0]
        for rows in [*q, *([0] * (S - n))]:
            starts.append(starts[-1] + rows)
        lens = [a + b for a, b in zip(q, c, strict=True)] + [0] * (S - n)
        positions = [p for rows, first in zip(q, c, strict=True) for p in range(first, first + rows)]
        owners = [s for s, rows in enumerate(q) for _ in range(rows)]
        slots = [blocks[s][p // B] * B + p % B for s, p in zip(owners, positions, strict=True)]
        _equal("query_start_loc", got.query_start_loc, starts, torch.int32)
        _equal("seq_lens", got.seq_lens, lens, torch.int32)
        _equal("positions", got.positions, positions + [0] * (T - t), torch.int64)
        _equal("slot_mapping", got.slot_mapping, slots + [-1] * (T - t), torch.int64)
        assert got.block_tables.shape == (S, self.M) and got.block_tables.dtype == torch.int32
        rows_ = got.block_tables.tolist()
        for s in range(n):
            need = -(-lens[s] // B)
            assert rows_[s][:need] == blocks[s][:need], (
                f"block_tables of {s}: {rows_[s][:need]}, not {blocks[s][:need]}"
            )
        return starts, lens

    def compare_ranges(
        self, got: AttentionMetadata, q: list[int], c: list[int], ranges: list[list[tuple[int, int]]]
    ) -> None:
        if not self.R:
            assert got.bidirectional_ranges is None
            return
        assert got.bidirectional_ranges is not None
        want = []
        for rows, first, pairs in zip(q, c, ranges, strict=True):
            tokens = range(first, first + rows)
            held = [[a, b] for a, b in pairs if a >= 0 and any(a <= token < b for token in tokens)]
            want.append(held + [[0, 0]] * (self.R - len(held)))
        want += [[[0, 0]] * self.R] * (len(got.seq_lens) - len(q))
        assert got.bidirectional_ranges.dtype == torch.int32
        assert got.bidirectional_ranges.tolist() == want, f"{got.bidirectional_ranges.tolist()}, not {want}"

    def compare_cascade(
        self, got: AttentionMetadata, prefix: int, q: list[int], c: list[int], blocks: list[list[int]]
    ) -> None:
        if not prefix:
            assert got.cascade is None
            return
        cascade, width = got.cascade, prefix // self.B
        assert cascade is not None and cascade.common_prefix_len == prefix
        _equal("prefix_len", cascade.prefix_len, [prefix], torch.int32)
        _equal("prefix_block_table", cascade.prefix_block_table[0, :width], blocks[0][:width], torch.int32)
        lens = [a + b - prefix for a, b in zip(q, c, strict=True)]
        _equal("suffix_lens", cascade.suffix_lens, lens + [0] * (len(got.seq_lens) - len(q)), torch.int32)
        for s, length in enumerate(lens):
            need = -(-length // self.B)
            row = cascade.suffix_block_tables[s, :need]
            _equal(f"suffix_block_tables[{s}]", row, blocks[s][width : width + need], torch.int32)

    def refused(self, q: list[int], c: list[int], blocks: list[list[int]]) -> None:
        """One number that is wrong: ValueError, and the buffers are as they were."""
        q, c, blocks = list(q), list(c), [list(row) for row in blocks]
        n, rng, options = len(q), self.rng, {}
        ranges: list[list[tuple[int, int]]] = [[] for _ in q]
        wrong: list[Callable[[], Any]] = [
            lambda: options.update(num_reqs=self.S + 1),
            lambda: options.update(num_tokens=self.T + 1),
            lambda: options.update(lookahead=-1),
            lambda: (q.extend([1] * (self.S + 1)), c.extend([0] * (self.S + 1)), blocks.extend([[0]] * (self.S + 1))),
        ]
        if n:
            s = rng.randrange(n)
            wrong += [lambda: q.__setitem__(s, -1), lambda: c.__setitem__(s, -1), lambda: q.__setitem__(s, self.T + 1)]
            wrong += [lambda: c.__setitem__(s, self.M * self.B + 1)]
            if sum(q):
                wrong.append(lambda: options.update(num_tokens=sum(q) - 1))
            if q[s]:
                first, last = c[s], c[s] + q[s]
                wrong.append(lambda: ranges[s].append((rng.randint(0, last - 1), last + 1)))
                wrong.append(lambda: ranges[s].extend([(rng.randint(0, first), last)] * (self.R + 1)))
            if blocks[s] and q[s] + c[s]:
                at, bad = rng.randrange(-(-(q[s] + c[s]) // self.B)), rng.choice((-1, -(2**31), self.N))
                wrong.append(lambda: blocks[s].__setitem__(at, bad))
        rng.choice(wrong)()
        storage = self.builder._buffers.storage
        before = storage.clone()
        try:
            given = ranges if any(ranges) else None
            self.builder.build(0, Batch(q, c, blocks, bidirectional_ranges=given), **options)
        except ValueError:
            assert torch.equal(storage, before), "a refused batch was written"
            self.case.counts["refused"] += 1
        else:
            raise AssertionError(f"not refused: {q} {c} {blocks} {options} S={self.S} T={self.T} M={self.M} N={self.N}")

    def for_capture(self) -> None:
        rng = self.rng
        n, q = rng.randint(1, self.S), rng.randint(1, 4)
        level = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if q == 1 else GraphSupport.UNIFORM_BATCH
        cascade = rng.random() < 0.5
        if n * q > self.T or self.builder.graph_support < level:
            try:
                self.builder.build_for_capture(n, q)
            except ValueError:
                return
            raise AssertionError(f"captures {n} x {q} of {self.T} tokens with {self.builder.graph_support}")
        got = self.builder.build_for_capture(n, q, cascade=cascade)
        _equal("query_start_loc", got.query_start_loc, list(range(0, n * q + 1, q)), torch.int32)
        _equal("seq_lens", got.seq_lens, [0] * n, torch.int32)
        _equal("slot_mapping", got.slot_mapping, [-1] * (n * q), torch.int64)
        assert (got.max_seq_len, got.max_query_len) == (self.M * self.B, q)
        again = self.builder.build(0, Batch([q] * n, [0] * n, [[0] * self.M] * n)) if q <= self.M * self.B else got
        assert again.slot_mapping.data_ptr() == got.slot_mapping.data_ptr(), "another tensor than was captured"
        assert (got.cascade is not None) == cascade

    # Helpers ---------------------------------------------------------------------------------------------------------

    def helpers(self) -> None:
        q, c, blocks = self.draw()
        self.reorder(q, c, blocks)
        self.virtual(q, c, blocks)
        self.addresses(q, c, blocks)
        self.graphs(q, c, blocks)

    def reorder(self, q: list[int], c: list[int], blocks: list[list[int]]) -> None:
        """As few swaps as prefills among the first places; every request keeps its own."""
        threshold = self.rng.choice((1, 1, 2, 5))
        width = max(map(len, blocks), default=0)
        table = _table([[*row, *([0] * (width - len(row)))] for row in blocks], width, torch.int32)
        batch = Batch(torch.tensor(q, dtype=torch.int64), torch.tensor(c, dtype=torch.int64), table)
        swaps = metadata.swaps_to_split_decodes_and_prefills(q, threshold)
        num_decodes = sum(each <= threshold for each in q)
        assert len(swaps) == sum(each > threshold for each in q[:num_decodes]), swaps
        whole = sorted(zip(q, c, table.tolist(), strict=True))
        moved = metadata.reorder_batch_to_split_decodes_and_prefills(batch, threshold)
        after = batch.query_lens.tolist(), batch.num_computed_tokens.tolist(), batch.block_ids.tolist()
        assert moved == bool(swaps) and sorted(zip(*after, strict=True)) == whole
        assert all(each <= threshold for each in after[0][:num_decodes])
        own = after[0], after[1], [row[: -(-(a + b) // self.B)] for a, b, row in zip(*after, strict=True)]
        got = metadata.split_decodes_and_prefills(self.builder.build(0, Batch(*own)), threshold)
        tokens = sum(after[0][:num_decodes])
        assert got == (num_decodes, len(q) - num_decodes, tokens, sum(q) - tokens), got
        if moved:
            rows = [row[: -(-(a + b) // self.B)] for a, b, row in zip(q, c, blocks, strict=True)]
            try:
                metadata.split_decodes_and_prefills(self.builder.build(0, Batch(q, c, rows)), threshold)
            except ValueError:
                pass
            else:
                raise AssertionError(f"split {q} without an order at {threshold}")

    def virtual(self, q: list[int], c: list[int], blocks: list[list[int]]) -> None:
        """Every token sees, in its virtual sequence, the slots that it sees in its chunk of the real one."""
        B = self.B
        chunk = B * self.rng.randint(1, 6)
        lens = [a + b for a, b in zip(q, c, strict=True)]
        width = max(map(len, blocks), default=0)
        table = _table([[*row, *([-1] * (width - len(row)))] for row in blocks], width, torch.int32)
        got = metadata.make_local_attention_virtual_batches(chunk, q, lens, table, B)
        virtual = [each.tolist() for each in got]
        want: list[list[int]] = []
        for s, rows in enumerate(q):
            for i in range(lens[s] - rows, lens[s]):
                seen = range(i // chunk * chunk, i + 1)
                want += [[blocks[s][j // B] * B + j % B for j in seen]]
        found: list[list[int]] = []
        for rows, length, row in zip(*virtual, strict=True):
            assert 0 < rows <= length <= chunk and len(row) == chunk // B
            for i in range(length - rows, length):
                found += [[row[j // B] * B + j % B for j in range(i + 1)]]
        assert found == want, f"chunk {chunk} of {q}, {lens}"

    def addresses(self, q: list[int], c: list[int], blocks: list[list[int]]) -> None:
        lens = [a + b for a, b in zip(q, c, strict=True)]
        N = min(self.N, 40)
        cache = torch.empty(N + 1, 2, self.B, 1, 8)[1:] if self.rng.random() < 0.5 else torch.empty(N, 2, self.B, 1, 8)
        stride, width = 2 * self.B * 8 * 4, max(map(len, blocks), default=0) + 1
        ids = [[block % N for block in row] for row in blocks]
        at = [[cache.data_ptr() + block * stride for block in row] + [7] * (width - len(row)) for row in ids]
        table = _table(at, width, torch.int64)
        got = metadata.block_ids_from_addresses(table, lens, cache).tolist()
        for row, want, length in zip(got, ids, lens, strict=True):
            need = -(-length // self.B)
            assert row[:need] == want[:need], (row, want)

    def graphs(self, q: list[int], c: list[int], blocks: list[list[int]]) -> None:
        support = self.builder.graph_support
        want = {
            GraphSupport.NEVER: False,
            GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: all(each == 1 for each in q),
            GraphSupport.UNIFORM_BATCH: len(set(q)) <= 1,
            GraphSupport.ALWAYS: True,
        }[support]
        assert self.builder.can_run_in_cuda_graph(self.batch(q, c, blocks)) == want, (support, q)


def _table(rows: list[list[int]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype).view(len(rows), width)


def _equal(name: str, got: Tensor, want: list[int], dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.tolist() == want, f"{name}: {got.dtype} {got.tolist()}, not {want}"
