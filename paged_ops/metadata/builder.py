"""The builder of a step's metadata: checks, positions and slots on the host, then one copy to the device.

Letters: T tokens of the batch (padded), S sequences (padded), H query heads, K key/value heads, D head size, N blocks
in the cache, B tokens per block, M columns of a block table. Lengths and positions are counted in tokens.

Values that a kernel could only check by a sync with the device (block ids, lengths, slots, capacities) are checked
here instead, on whole tensors, once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paged_ops.cache.shard import UNSHARDED, TokenShard, widest
from paged_ops.cache.states import PADDING_ROW
from paged_ops.checks import NotCopied, describe_setting, expect, flag, integers
from paged_ops.device import with_index
from paged_ops.metadata.batch import Batch, largest, not_negative
from paged_ops.metadata.bidirectional import ranges_of_step
from paged_ops.metadata.buffers import Buffers, Sizes, Staging, prefers_compact
from paged_ops.metadata.fill import Filler, compiled
from paged_ops.metadata.step import AttentionMetadata, CascadeMetadata, ContextMetadata, GraphSupport
from paged_ops.metadata.validation import (
    check_common_prefix,
    check_input_ids,
    check_numbers,
    check_state_slots,
    is_needed,
    needed_blocks,
    padded_size,
)

_NO_ROWS = torch.zeros(0, dtype=torch.int32, device="cpu")
_NO_RANGES = torch.zeros(0, 1, 2, dtype=torch.int32, device="cpu")


class AttentionMetadataBuilder(NotCopied):
    """Turns a :class:`Batch` into :class:`AttentionMetadata` in device buffers that never move.

    The device tensors of all steps are views of one allocation, and equal padded sizes give the very same tensor
    objects, so captured graphs and ``torch._dynamo.mark_static_address`` stay valid. Each build overwrites the device
    tensors of the one before; host tensors and integers are new each time.

    On CUDA the numbers are written to pinned memory and sent on the current stream without waiting. That is usually one
    copy per step, and more only if a second copy is cheaper than sending what lies between. The host only waits for the
    copy that was made ``num_staging_buffers`` steps before. On the CPU the buffers are written in place.

    Args:
        block_size: B.
        max_num_seqs: most sequences of a step, padding included.
        max_num_tokens: most tokens of a step, padding included.
        max_blocks_per_seq: M; the longest sequence has M * B tokens.
        device: ``"cpu"`` or a CUDA (ROCm) device; ``"cuda"`` means the GPU that is current at construction. For other
            devices build on the CPU, and move the metadata with ``torch.utils._pytree.tree_map``.
        num_blocks: N; 0 before the cache exists (then only capture, and batches without tokens, can be built). A
            sequence of numbers for a cache of several pools; their batches have ``other_block_ids``.
        graph_support: what the layers that read the metadata allow.
        unused_block_id: what to write into block-table entries that no length needs. None, the fastest, leaves them as
            they are; tests poison them.
        num_state_rows: R of the tensors of a ``StateCache``; 0 without one.
        max_bidirectional_ranges: the most bidirectional ranges that hold tokens of one request in one step; 0 is none.
            If it is not 0, every step has room for them, for captured graphs. Kernels are compiled for the number.
        num_staging_buffers: host copies of the buffers, taken in turn: by default none on the CPU and 2 elsewhere, so
            that the host fills one while the device still reads the other.
        with_inputs: whether the buffers also have the step's token ids and the last row of each sequence:
            :meth:`inputs`.
        shards: this rank's shard of each pool's tokens (``KVCache.shard``); by default all tokens. Steps of sharded
            pools have a ``context``.

    Raises:
        ValueError: a size is not positive, lengths would not fit int32, or the device is of another type.
    """

    def __init__(
        self,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        device: torch.device | str = "cpu",
        *,
        num_blocks: int | Sequence[int],
        graph_support: GraphSupport = GraphSupport.ALWAYS,
        unused_block_id: int | None = None,
        num_state_rows: int = 0,
        max_bidirectional_ranges: int = 0,
        num_staging_buffers: int | None = None,
        with_inputs: bool = False,
        shards: Sequence[TokenShard] | None = None,
    ):
        self.device = with_index(device)
        on_gpu = self.device.type == "cuda"
        served = on_gpu or self.device.type == "cpu"
        expect(served, "device", "cpu or cuda (elsewhere build on the CPU and move)", self.device)
        known = isinstance(graph_support, GraphSupport)
        expect(known, "graph_support", "a GraphSupport", describe_setting(graph_support))
        sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_num_tokens": max_num_tokens}
        block_size, max_num_seqs, max_num_tokens = integers(1, **sizes)
        (max_blocks_per_seq,) = integers(1, max_blocks_per_seq=max_blocks_per_seq)
        rooms = {"num_state_rows": num_state_rows, "max_bidirectional_ranges": max_bidirectional_ranges}
        num_state_rows, max_bidirectional_ranges = integers(0, **rooms)
        with_inputs = flag("with_inputs", with_inputs)
        expect(1 <= max_num_tokens < 2**31, "max_num_tokens", "1 or more, and less than 2**31", max_num_tokens)
        most_blocks = (2**31 - 1) // block_size
        fits = f"1 to {most_blocks} (lengths are int32, block_size is {block_size})"
        expect(1 <= max_blocks_per_seq <= most_blocks, "max_blocks_per_seq", fits, max_blocks_per_seq)
        of_pools = tuple(num_blocks) if isinstance(num_blocks, Iterable) else (num_blocks,)
        expect(len(of_pools) >= 1, "num_blocks", "a number for each pool, one or more", of_pools)
        of_pools = tuple(integers(0, num_blocks=number)[0] for number in of_pools)
        for number in of_pools:
            expect(number < 2**31, "num_blocks", "0 or more, and less than 2**31", number)
        expect(num_state_rows < 2**31, "num_state_rows", "0 or more, and less than 2**31", num_state_rows)
        if num_staging_buffers is None:
            num_staging_buffers = 2 if on_gpu else 0
        least = int(on_gpu)
        expect(num_staging_buffers >= least, "num_staging_buffers", f"{least} or more", num_staging_buffers)

        self.shards = (UNSHARDED,) * len(of_pools) if shards is None else tuple(shards)
        expect(len(self.shards) == len(of_pools), "shards", f"one for each of {len(of_pools)} pools", shards)
        for shard in self.shards:
            shard.check(block_size)
        self._shard = widest(self.shards)
        alike = all(shard in (UNSHARDED, self._shard) for shard in self.shards)
        expect(alike, "shards", "pools sharded over the same ranks, or not at all", shards)

        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_blocks_per_seq = max_blocks_per_seq
        self.num_blocks = of_pools
        self.graph_support = graph_support
        self.unused_block_id = unused_block_id
        self.num_state_rows = num_state_rows
        self.max_bidirectional_ranges = max_bidirectional_ranges

        def buffers(where: torch.device | str, pinned: bool = False) -> Buffers:
            sizes = max_num_seqs, max_num_tokens, max_blocks_per_seq, len(of_pools)
            parts = with_inputs, num_state_rows > 0, max_bidirectional_ranges, self._shard.size > 1
            return Buffers.allocate(*sizes, *parts, num_staging_buffers > 0, where, pinned)

        self._buffers = buffers(self.device)
        self._staging = [Staging(buffers("cpu", pinned=on_gpu)) for _ in range(num_staging_buffers)]
        self._next_staging = itertools.cycle(self._staging)
        self._views: dict[tuple[int, int], Buffers] = {}
        self._fills = not (num_state_rows or max_bidirectional_ranges or self._shard.size > 1)
        self._fills &= unused_block_id is None
        self._fillers: dict[int, Filler] = {}  # by the buffers that they fill
        self._cascade: tuple[Tensor, ...] | None = None
        self._own_tables: tuple[Tensor, Tensor] | None = None

    def build(
        self,
        common_prefix_len: int,
        batch: Batch,
        fast_build: bool = False,
        *,
        num_reqs: int | None = None,
        num_tokens: int | None = None,
        lookahead: int = 0,
        input_ids: Tensor | None = None,
    ) -> AttentionMetadata:
        """Write one step into the buffers and return the metadata that views them.

        With q the batch's query_lens and c its num_computed_tokens, ``seq_lens = c + q``; query_start_loc is the
        running sum of q; the positions of sequence s are ``c[s] .. c[s] + q[s] - 1``; a token's slot is
        ``block_ids[s, position // B] * B + position % B``.

        Args:
            common_prefix_len: tokens that all sequences share, in the same blocks: a multiple of B, at most the least
                num_computed_tokens, so that every query token sees all of it. If it is positive, the
                result's ``cascade`` has it, and the tensors that :func:`paged_ops.cascade_attention` takes; ask
                :func:`use_cascade_attention` whether the layers should use them. 0 is none.
            batch: the step.
            fast_build: make this call faster, at the cost of the layers: leaves ``cascade`` out. For metadata that few
                layers read, such as a draft model's steps. Everything else is the same, checks included.
            num_reqs: S, the padded number of sequences (a capture size); by default the batch's.
            num_tokens: T, the padded number of tokens; by default the batch's.
            lookahead: how often :func:`advance_decodes` may follow, by one token per request; the blocks for these
                tokens are checked and sent, too.
            input_ids: int64 ``[num_tokens of the batch]``, contiguous, host: the step's token ids, for a builder
                ``with_inputs``. The ids of padding become 0. None leaves the ids in :meth:`inputs` unchanged.

        Raises:
            ValueError: a capacity is exceeded, a length is negative, a request has too few blocks, a needed block id is
                outside [0, N), the common prefix is not common, or a bidirectional range goes on after the step.
                Nothing has been written then.
        """
        expect(isinstance(batch, Batch), "batch", "a Batch, after common_prefix_len", batch)
        check_numbers(num_reqs, num_tokens, lookahead)
        if input_ids is not None:
            check_input_ids(input_ids, self._buffers.inputs is not None)
        if common_prefix_len == 0:
            filled = self._build_at_once(batch, input_ids, num_reqs, num_tokens, lookahead)
            if filled is not None:
                return filled
        B, n = self.block_size, batch.num_reqs
        query_lens, computed = batch.query_lens, batch.num_computed_tokens
        expect(n <= self.max_num_seqs, "query_lens", f"at most max_num_seqs = {self.max_num_seqs} requests", n)
        not_negative("query_lens", query_lens)
        not_negative("num_computed_tokens", computed)
        t = batch.num_tokens
        expect(t <= self.max_num_tokens, "query_lens", f"at most max_num_tokens = {self.max_num_tokens} tokens", t)
        if input_ids is not None:
            expect(len(input_ids) == t, "input_ids", f"the {t} tokens of the batch", len(input_ids))
        S = padded_size("num_reqs", num_reqs, n, "max_num_seqs", self.max_num_seqs)
        T = padded_size("num_tokens", num_tokens, t, "max_num_tokens", self.max_num_tokens)
        seq_lens = computed.to(torch.int64) + query_lens
        not_negative("num_computed_tokens + query_lens", seq_lens)  # int64 may have wrapped
        max_seq_len = largest(seq_lens)
        expect(lookahead >= 0, "lookahead", "0 or more", lookahead)
        reach = seq_lens + lookahead
        longest = largest(reach)
        table = reach, longest, B, self.max_blocks_per_seq
        blocks = [needed_blocks("block_ids", batch.block_ids, self.num_blocks[0], *table)]
        if batch.other_block_ids or len(self.num_blocks) > 1:
            given, others = len(batch.other_block_ids), len(self.num_blocks) - 1
            expect(given == others, "other_block_ids", f"block ids of {others} further pools", given)
            for block_ids, num_blocks in zip(batch.other_block_ids, self.num_blocks[1:], strict=True):
                blocks.append(needed_blocks("other_block_ids", block_ids, num_blocks, *table))
        check_state_slots(batch.state_slots, n, self.num_state_rows)
        state_slots = _NO_ROWS if batch.state_slots is None else batch.state_slots
        ranges = _NO_RANGES
        if batch.bidirectional_ranges is not None:
            ranges = ranges_of_step(batch.bidirectional_ranges, computed, seq_lens, self.max_bidirectional_ranges)
        if common_prefix_len:
            check_common_prefix(common_prefix_len, computed, blocks[0], B)
            one_rank = self._shard.size == 1
            expect(one_rank, "common_prefix_len", "0 for a cache sharded over ranks", common_prefix_len)

        # The CPU is named because the user may have set another default device.
        query_start_loc = torch.full((S + 1,), t, dtype=torch.int32, device="cpu")
        query_start_loc[0] = 0
        torch.cumsum(query_lens, 0, dtype=torch.int32, out=query_start_loc[1 : n + 1])
        padded_lens, padded_computed = torch.zeros((2, S), dtype=torch.int32, device="cpu")
        padded_lens[:n] = seq_lens
        padded_computed[:n] = computed

        max_query_len = largest(query_lens)
        if max_query_len == 1 and t == n:
            request, positions = torch.arange(n, device="cpu"), computed
        else:
            request = torch.repeat_interleave(query_lens, output_size=t)
            positions = (computed - query_start_loc[:n])[request] + torch.arange(t, device="cpu")
        columns = torch.div(positions, B, rounding_mode="trunc")
        slots = [
            shard.slots(each[request, columns], positions, B) for each, shard in zip(blocks, self.shards, strict=True)
        ]

        self._write(query_start_loc, padded_lens, slots, positions, T, blocks, reach, state_slots, ranges, input_ids)
        metadata = self._metadata(query_start_loc, padded_lens, padded_computed, n, t, max_query_len, max_seq_len, T)
        if self._shard.size > 1:
            self._fill_own_tables(S, T)
            metadata.context = self.context_of(S, T, is_decode=max_query_len <= 1)
        if common_prefix_len and not fast_build:
            metadata.cascade = self._build_cascade(common_prefix_len, metadata)
        return metadata

    def _build_at_once(
        self, batch: Batch, input_ids: Tensor | None, num_reqs: int | None, num_tokens: int | None, lookahead: int
    ) -> AttentionMetadata | None:
        """The usual step, by fill.cpp; None if that does not serve it, or if something is wrong with it."""
        plain = batch.state_slots is None and batch.bidirectional_ranges is None
        if not (plain and self._fills) or len(batch.other_block_ids) + 1 != len(self.num_blocks):
            return None
        staging = next(self._next_staging, None)
        into = self._buffers if staging is None else staging.wait()
        filler = self._fillers.get(id(into))
        if filler is None:
            function = compiled()
            if function is None:
                self._fills = False
                return None
            filler = Filler(into, function, self.block_size, self.num_blocks)
            self._fillers[id(into)] = filler
        host = filler.fill(batch, input_ids, num_reqs, num_tokens, lookahead)
        if host is None:
            return None
        found = filler.step
        n, S, T = found.n, found.S, found.T
        if staging is not None:
            self._send(staging, Sizes(T, S, n, found.width if found.compact else None, input_ids is not None))
        query_start_loc, seq_lens, computed = host
        return self._metadata(
            query_start_loc, seq_lens, computed, n, found.tokens, found.max_query_len, found.max_seq_len, T
        )

    def build_for_capture(self, num_reqs: int, query_len: int = 1, *, cascade: bool = False) -> AttentionMetadata:
        """Metadata for warming up and capturing a graph of ``num_reqs`` sequences with ``query_len`` tokens each.

        Its device tensors are the ones that ``build`` fills later when it pads to the same sizes. The query ranges
        are uniform, but slots are -1 and seq_lens 0, so that the captured step neither writes nor reads the cache: a
        causal row before the first key gives 0. The integers are the largest of all its replays (``max_seq_len``
        is M * B), for host code that decides by them. With ``cascade`` it carries a common prefix of 0 tokens.

        Raises:
            ValueError: the sizes exceed a capacity, or graph_support does not allow such a graph.
        """
        t = num_reqs * query_len
        expect(1 <= num_reqs <= self.max_num_seqs, "num_reqs", f"1 to max_num_seqs = {self.max_num_seqs}", num_reqs)
        most = self.max_num_tokens // num_reqs
        of_all = f"1 to {most} (max_num_tokens = {self.max_num_tokens} over {num_reqs} requests)"
        expect(1 <= query_len <= most, "query_len", of_all, query_len)
        level = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else GraphSupport.UNIFORM_BATCH
        expect(self.graph_support >= level, "query_len", f"a graph that {self.graph_support!r} allows", query_len)

        query_start_loc = torch.arange(0, t + 1, query_len, dtype=torch.int32, device="cpu")
        seq_lens, computed = torch.zeros((2, num_reqs), dtype=torch.int32, device="cpu")
        nothing = computed[:0]
        slots, blocks = ([each] * len(self.num_blocks) for each in (nothing, nothing.view(0, 0)))
        self._write(query_start_loc, seq_lens, slots, nothing, t, blocks, nothing, nothing, _NO_RANGES, None)
        max_seq_len = self.max_blocks_per_seq * self.block_size
        metadata = self._metadata(query_start_loc, seq_lens, computed, num_reqs, t, query_len, max_seq_len, t)
        if self._shard.size > 1:
            expect(not cascade, "cascade", "none for a cache sharded over ranks", cascade)
            self._fill_own_tables(num_reqs, t)
            metadata.context = self.context_of(num_reqs, t, is_decode=query_len == 1)
        if cascade:
            metadata.cascade = self._build_cascade(0, metadata)
        return metadata

    def context_of(self, S: int, T: int, is_decode: bool) -> ContextMetadata | None:
        """The context of the step in the buffers, whose padded sizes are S and T; None if the cache is not sharded over
        ranks. With ``is_decode`` it serves steps of at most one token per sequence, else every step."""
        if self._shard.size == 1:
            return None
        lens, history_lens = self._views_of(S, T).context_lens
        if is_decode:
            return ContextMetadata(lens, None, None, self.shards)
        assert self._own_tables is not None
        return ContextMetadata(lens, history_lens, self._own_tables[0][:S, :T], self.shards)

    def inputs(self, S: int, T: int) -> tuple[Tensor, Tensor]:
        """Where the token ids ``[T]`` and the last row of each sequence ``[S]`` of a step of these padded sizes lie,
        int64 on the device, for a builder ``with_inputs``. A sequence without tokens has row 0 or that before it."""
        inputs = self._views_of(S, T).inputs
        assert inputs is not None, "the builder has no inputs"
        return inputs

    def can_run_in_cuda_graph(self, batch: Batch) -> bool:
        """Whether the batch fits the capacities and is of a kind that ``graph_support`` lets a graph serve.

        A batch without requests is: for a graph, all of it is padding.
        """
        if batch.num_reqs > self.max_num_seqs or batch.num_tokens > self.max_num_tokens:
            return False
        if self.graph_support == GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return bool((batch.query_lens == 1).all())
        if self.graph_support == GraphSupport.UNIFORM_BATCH:
            return bool((batch.query_lens == batch.query_lens[:1]).all())
        return self.graph_support == GraphSupport.ALWAYS

    def _write(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slots: Sequence[Tensor],
        positions: Tensor,
        T: int,
        blocks: Sequence[Tensor],
        reach: Tensor,
        state_slots: Tensor,
        ranges: Tensor,
        input_ids: Tensor | None,
    ) -> None:
        """Fill the buffers with checked values, and slots and blocks of each pool. ``reach``: the lengths that need
        blocks."""
        staging = next(self._next_staging, None)
        into = self._buffers if staging is None else staging.wait()
        S, t = len(seq_lens), len(positions)
        n, width = blocks[0].shape
        into.query_start_loc[: S + 1] = query_start_loc
        into.seq_lens[:S] = seq_lens
        for slot_mapping, each in zip(into.slot_mappings, slots, strict=True):
            slot_mapping[:t] = each
            slot_mapping[t:T] = -1
        into.positions[:t] = positions
        into.positions[t:T] = 0
        if into.inputs is not None:
            ids, last_rows = into.inputs
            torch.sub(query_start_loc[1:], 1, out=last_rows[:S]).clamp_(min=0)
            if input_ids is not None:
                ids[:t] = input_ids
                ids[t:T] = 0
        if into.state_slots is not None:
            into.state_slots[: len(state_slots)] = state_slots
            into.state_slots[len(state_slots) : S] = PADDING_ROW
        if into.context_lens:
            query_lens = query_start_loc.diff()
            for part, each in zip(into.context_lens, (seq_lens, seq_lens - query_lens), strict=True):
                part[:S] = self._shard.lens(each.clamp(min=0), self.block_size)
        if into.bidirectional_ranges is not None:
            into.bidirectional_ranges[: len(ranges)] = ranges
            into.bidirectional_ranges[len(ranges) : S] = 0
        rows, compact = n, False
        if self.unused_block_id is None:
            compact = bool(into.packed) and prefers_compact(n, width, self.max_blocks_per_seq)
        else:
            rows = S
            needed = is_needed(reach, width, self.block_size)
            blocks = [torch.where(needed, each, self.unused_block_id) for each in blocks]
            for table in into.all_block_tables:
                table[:S] = self.unused_block_id
        if compact:
            targets = [packed for _, packed in into.tables_in(n, width)]
        else:
            targets = [table[:n, :width] for table in into.all_block_tables]
        for target, each in zip(targets, blocks, strict=True):
            target.copy_(each)
        if staging is not None:
            self._send(staging, Sizes(T, S, rows, width if compact else None, input_ids is not None))

    def _send(self, staging: Staging, sizes: Sizes) -> None:
        staging.send(self._buffers, sizes)
        staging.sent(self.device)

    def _metadata(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        computed: Tensor,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        T: int,
    ) -> AttentionMetadata:
        """Metadata of host tensors ``[S + 1]``, ``[S]``, ``[S]``, integers, and the views of the buffers that fit."""
        on_device = self._views_of(seq_lens.shape[0], T)
        return AttentionMetadata(
            query_start_loc=on_device.query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=on_device.seq_lens,
            seq_lens_cpu=seq_lens,
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_tables=on_device.block_tables,
            slot_mapping=on_device.slot_mapping,
            num_computed_tokens_cpu=computed,
            positions=on_device.positions,
            other_pools=on_device.other_pools or None,
            state_slots=on_device.state_slots,
            bidirectional_ranges=on_device.bidirectional_ranges,
        )

    def _views_of(self, S: int, T: int) -> Buffers:
        """The device buffers of a step of these sizes: equal sizes give the same tensors."""
        if (S, T) not in self._views:
            if len(self._views) >= 1024:
                self._views.clear()
            self._views[S, T] = self._buffers.views(S, T)
        return self._views[S, T]

    def _fill_own_tables(self, S: int, T: int) -> None:
        """Fills each sequence's own table: its rows in the step, as blocks of one token."""
        if self._own_tables is None:
            most = self.max_num_tokens
            with torch.inference_mode(False):
                lens = self._buffers.seq_lens
                rows = torch.arange(most, dtype=lens.dtype, device=lens.device)
                self._own_tables = lens.new_zeros(self.max_num_seqs, most), rows
        tables, rows = self._own_tables
        starts = self._views_of(S, T).query_start_loc
        torch.add(starts[:-1, None], rows[:T], out=tables[:S, :T])

    def _build_cascade(self, common_prefix_len: int, metadata: AttentionMetadata) -> CascadeMetadata:
        S, M = metadata.block_tables.shape
        if self._cascade is None:
            # Allocated once, at the first use. An inference tensor cannot be written outside of inference mode.
            with torch.inference_mode(False):
                zeros = self._buffers.block_tables.new_zeros
                self._cascade = zeros(1, M), zeros(1), zeros(self.max_num_seqs, M), zeros(self.max_num_seqs)
        prefix_block_table, prefix_len, suffix_block_tables, suffix_lens = self._cascade
        suffix_block_tables, suffix_lens = suffix_block_tables[:S], suffix_lens[:S]
        width = common_prefix_len // self.block_size
        prefix_block_table[:, :width].copy_(metadata.block_tables[:1, :width])
        prefix_len.fill_(common_prefix_len)
        suffix_block_tables[:, : M - width].copy_(metadata.block_tables[:, width:])
        suffix_lens.copy_(metadata.seq_lens).sub_(common_prefix_len).clamp_(min=0)
        return CascadeMetadata(common_prefix_len, prefix_block_table, prefix_len, suffix_block_tables, suffix_lens)
