"""One step's batch: its metadata, the builder that fills it, and helpers that split, reorder and rewrite batches.

Letters: T tokens of the batch (padded), S sequences (padded), H query heads, K key/value heads, D head size, N blocks
in the cache, B tokens a block, M columns of a block table. Lengths and positions are counted in tokens.

All of this runs on the host, once a step, on whole tensors. Values that a kernel could only check by a sync with the
device (block ids, lengths, slots, capacities) are checked here instead.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paged_ops.bidirectional import Ranges, ranges_of_requests, ranges_of_step
from paged_ops.checks import as_current, expect, with_index
from paged_ops.layouts import paged_kv
from paged_ops.states import PADDING_ROW

Ints = Sequence[int] | Tensor  # numpy arrays too
_NO_ROWS = torch.zeros(0, dtype=torch.int32, device="cpu")
_NO_RANGES = torch.zeros(0, 1, 2, dtype=torch.int32, device="cpu")


@dataclass
class CascadeMetadata:
    """What :func:`paged_ops.cascade_attention` takes for a step whose sequences all begin with the same blocks.

    The tensors lie in persistent device buffers, so a captured graph may read them.
    """

    common_prefix_len: int  # tokens, a multiple of B
    prefix_block_table: Tensor  # int32 [1, M]: columns past the prefix may hold anything
    prefix_len: Tensor  # int32 [1]: common_prefix_len
    suffix_block_tables: Tensor  # int32 [S, M]: each sequence's blocks after the prefix
    suffix_lens: Tensor  # int32 [S]: seq_lens - common_prefix_len, 0 for padding


@dataclass
class PoolMetadata:
    """Where one pool of a :class:`paged_ops.HybridCache` holds the step's sequences."""

    block_tables: Tensor  # int32 [S, M]
    slot_mapping: Tensor  # int64 [T]


@dataclass(kw_only=True)
class AttentionMetadata:
    """One step's batch, as the ops and a model read it.

    A pytree whose every field is a leaf, integers too: it can be an argument of a compiled, exported or captured
    function. The integers are for the host and are not to be read inside a graph: there each value compiles again.
    ``torch.export`` pins even an integer that is not read, unless its entry of ``dynamic_shapes`` (a list over
    ``torch.utils._pytree.tree_leaves(metadata)``) is ``torch.export.Dim.DYNAMIC``.

    The tensors follow the padding contract: padding sequences come last, with length 0 and an empty query range, and so
    do padding tokens, with slot -1 and position 0. Block-table entries past a sequence's need may hold anything.

    Attributes:
        query_start_loc: int32 ``[S + 1]``: sequence s owns rows ``query_start_loc[s] : query_start_loc[s + 1]``.
        query_start_loc_cpu: the same numbers on the host.
        seq_lens: int32 ``[S]``: tokens in the cache, this step's among them.
        seq_lens_cpu: the same numbers on the host.
        num_reqs: sequences that are not padding.
        num_actual_tokens: tokens that are not padding.
        max_query_len: most tokens scheduled for one sequence.
        max_seq_len: largest of ``seq_lens``.
        block_tables: int32 ``[S, M]``.
        slot_mapping: int64 ``[T]``: ``block * B + offset`` of each token in the cache.
        num_computed_tokens_cpu: int32 ``[S]``, host: tokens that were in the cache before this step.
        positions: int64 ``[T]``: where each token stands in its sequence, as rotary embeddings need it.
        state_slots: int32 ``[S]`` or None: the row of :class:`paged_ops.states.StateCache` that holds each sequence's
            state; the step writes the next one to row ``state_slots ^ 1``. 0 for padding.
        bidirectional_ranges: int32 ``[S, R, 2]`` or None: as :func:`paged_attention` takes them.
        cascade: present when the step was built with a common prefix (and without ``fast_build``). It tells of the
            first pool alone.
        other_pools: of a cache with several pools, what ``block_tables`` and ``slot_mapping`` are in the second and
            further ones, else None; :meth:`pool` gives them by number.
    """

    # torch.export replaces the names of inputs in its guards as text, in this order: x_cpu has to come before x.
    query_start_loc_cpu: Tensor
    query_start_loc: Tensor
    seq_lens_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_tables: Tensor
    slot_mapping: Tensor
    num_computed_tokens_cpu: Tensor
    positions: Tensor
    state_slots: Tensor | None = None
    cascade: CascadeMetadata | None = None
    other_pools: tuple[PoolMetadata, ...] | None = None
    bidirectional_ranges: Tensor | None = None

    @property
    def begins_any(self) -> bool:
        """Whether some sequence's first token is in the step; read on the host."""
        query_lens = self.query_start_loc_cpu.diff()
        return bool(((self.seq_lens_cpu == query_lens) & (query_lens > 0)).any())

    def pool(self, index: int) -> PoolMetadata:
        """Block tables and slots for the layers of one pool; all else is the same for all layers."""
        if index == 0:
            return PoolMetadata(self.block_tables, self.slot_mapping)
        assert self.other_pools is not None, "the step was built for a cache of one pool"
        return self.other_pools[index - 1]


# Named and declared safe, so that an exported program that takes one can be saved and loaded.
pytree.register_dataclass(CascadeMetadata, serialized_type_name="paged_ops.CascadeMetadata")
pytree.register_dataclass(PoolMetadata, serialized_type_name="paged_ops.PoolMetadata")
pytree.register_dataclass(AttentionMetadata, serialized_type_name="paged_ops.AttentionMetadata")
torch.serialization.add_safe_globals([CascadeMetadata, PoolMetadata, AttentionMetadata])


class GraphSupport(enum.IntEnum):
    """Which batches a captured graph may serve. Ordered: a model's level is the ``min`` over its layers."""

    NEVER = 0  # none
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # one query token for each request
    UNIFORM_BATCH = 2  # the same number of query tokens for each request (speculative verification)
    ALWAYS = 3  # any, mixtures of prefill and decode included


class Batch:
    """A step as the host describes it: for each request what is scheduled, what is cached, and where.

    CPU tensors (and numpy arrays) are used as they are, not copied: :meth:`swap` moves rows of the caller's tensors.

    Args:
        query_lens: ``[num_reqs]`` tokens scheduled in this step; 0 is allowed.
        num_computed_tokens: ``[num_reqs]`` tokens that are in the cache already.
        block_ids: the blocks of each request in order: lists of ints, or an int32 or int64 tensor ``[num_reqs, W]``
            whose entries past a request's need may hold anything. The tensor is faster: keep one, append to its rows.
        other_block_ids: the same for each further pool of the cache.
        state_slots: ``[num_reqs]`` the row of each request's state, as ``StateCache.rows`` gives it; None without.
        bidirectional_ranges: for each request pairs (start, end) of positions, as many as it has: tokens of one range
            see each other (an image's, a prefix's). Lists, or an integer tensor ``[num_reqs, W, 2]``, in which pairs
            with ``start < 0`` or ``end <= start`` are padding; None without.

    Raises:
        ValueError: an argument is not on the CPU or not integer, or they disagree about the number of requests.
    """

    def __init__(
        self,
        query_lens: Ints,
        num_computed_tokens: Ints,
        block_ids: Sequence[Sequence[int]] | Tensor,
        *,
        other_block_ids: Sequence[Sequence[Sequence[int]] | Tensor] = (),
        state_slots: Ints | None = None,
        bidirectional_ranges: Ranges | None = None,
    ):
        self.query_lens = _integers("query_lens", query_lens, rank=1)
        self.num_computed_tokens = _integers("num_computed_tokens", num_computed_tokens, rank=1)
        self.block_ids = _block_ids(block_ids)
        self.other_block_ids = [_block_ids(each) for each in other_block_ids]
        self.state_slots = None if state_slots is None else _integers("state_slots", state_slots, rank=1)
        given = bidirectional_ranges
        self.bidirectional_ranges = None if given is None else ranges_of_requests(given)
        n = self.num_reqs
        for argument, rows in (
            ("num_computed_tokens", self.num_computed_tokens),
            ("block_ids", self.block_ids),
            *(("other_block_ids", each) for each in self.other_block_ids),
            ("state_slots", self.state_slots),
            ("bidirectional_ranges", self.bidirectional_ranges),
        ):
            if rows is not None:
                expect(len(rows) == n, argument, f"one for each of the {n} requests", len(rows))

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    def swap(self, i: int, j: int) -> None:
        """Exchange requests i and j."""
        for rows in (
            self.query_lens,
            self.num_computed_tokens,
            self.block_ids,
            *self.other_block_ids,
            *(each for each in (self.state_slots, self.bidirectional_ranges) if each is not None),
        ):
            rows[[i, j]] = rows[[j, i]]


class AttentionMetadataBuilder:
    """Turns a :class:`Batch` into :class:`AttentionMetadata` in device buffers that never move.

    The device tensors of all steps are views of one allocation, and equal padded sizes give the very same tensor
    objects, so captured graphs and ``torch._dynamo.mark_static_address`` stay valid. Each build overwrites the device
    tensors of the one before; host tensors and integers are new each time.

    On CUDA the numbers are written to pinned memory and sent on the current stream without waiting: one copy a step as
    a rule, more only where buffers are so large that a second copy is cheaper than sending what lies between. The host
    waits for nothing but the copy of ``num_staging_buffers`` steps before. On the CPU the buffers are written in place.

    Args:
        block_size: B.
        max_num_seqs: most sequences of a step, padding included.
        max_num_tokens: most tokens of a step, padding included.
        max_blocks_per_seq: M; the longest sequence has M * B tokens.
        device: ``"cpu"`` or a CUDA (ROCm) device; of ``"cuda"`` the GPU that is current at construction. Elsewhere
            build on the CPU and move the metadata with ``torch.utils._pytree.tree_map``.
        num_blocks: N; 0 before the cache exists (then only capture, and batches without tokens, can be built). A
            sequence of numbers for a cache of several pools; their batches have ``other_block_ids``.
        graph_support: what the layers that read the metadata allow.
        unused_block_id: what to write into block-table entries that no length needs: None (the fastest) leaves there
            what happens to be there; tests poison them.
        num_state_rows: R of the tensors of a ``StateCache``; 0 without one.
        max_bidirectional_ranges: most bidirectional ranges in which tokens of one step of a request lie; 0 is none.
            Unless it is 0 every step has so many, as a captured graph reads them; kernels are compiled for the number.
        num_staging_buffers: host copies of the buffers, taken in turn: by default none on the CPU and 2 elsewhere, so
            that the host fills one while the device still reads the other.

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
    ):
        self.device = with_index(device)
        on_gpu = self.device.type == "cuda"
        served = on_gpu or self.device.type == "cpu"
        expect(served, "device", "cpu or cuda (elsewhere build on the CPU and move)", self.device)
        expect(block_size >= 1, "block_size", "1 or more", block_size)
        expect(max_num_seqs >= 1, "max_num_seqs", "1 or more", max_num_seqs)
        expect(1 <= max_num_tokens < 2**31, "max_num_tokens", "1 or more, and less than 2**31", max_num_tokens)
        most_blocks = (2**31 - 1) // block_size
        fits = f"1 to {most_blocks} (lengths are int32, block_size is {block_size})"
        expect(1 <= max_blocks_per_seq <= most_blocks, "max_blocks_per_seq", fits, max_blocks_per_seq)
        of_pools = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
        expect(len(of_pools) >= 1, "num_blocks", "a number for each pool, one or more", of_pools)
        for number in of_pools:
            expect(0 <= number < 2**31, "num_blocks", "0 or more, and less than 2**31", number)
        expect(0 <= num_state_rows < 2**31, "num_state_rows", "0 or more, and less than 2**31", num_state_rows)
        expect(max_bidirectional_ranges >= 0, "max_bidirectional_ranges", "0 or more", max_bidirectional_ranges)
        if num_staging_buffers is None:
            num_staging_buffers = 2 if on_gpu else 0
        least = int(on_gpu)
        expect(num_staging_buffers >= least, "num_staging_buffers", f"{least} or more", num_staging_buffers)

        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_blocks_per_seq = max_blocks_per_seq
        self.num_blocks = of_pools
        self.graph_support = graph_support
        self.unused_block_id = unused_block_id
        self.num_state_rows = num_state_rows
        self.max_bidirectional_ranges = max_bidirectional_ranges

        def buffers(where: torch.device | str, pinned: bool = False) -> _Buffers:
            sizes = (max_num_seqs, max_num_tokens, max_blocks_per_seq, len(of_pools), num_state_rows > 0)
            return _Buffers.allocate(*sizes, max_bidirectional_ranges, where, pinned)

        self._buffers = buffers(self.device)
        self._staging = [_Staging(buffers("cpu", pinned=on_gpu)) for _ in range(num_staging_buffers)]
        self._turns = itertools.cycle(self._staging)
        self._views: dict[tuple[int, int], _Buffers] = {}
        self._cascade: tuple[Tensor, ...] | None = None

    def build(
        self,
        common_prefix_len: int,
        batch: Batch,
        fast_build: bool = False,
        *,
        num_reqs: int | None = None,
        num_tokens: int | None = None,
        lookahead: int = 0,
    ) -> AttentionMetadata:
        """Write one step into the buffers and return the metadata that views them.

        With q the batch's query_lens and c its num_computed_tokens, ``seq_lens = c + q``; query_start_loc is the
        running sum of q; the positions of sequence s are ``c[s] .. c[s] + q[s] - 1``; a token's slot is
        ``block_ids[s, position // B] * B + position % B``.

        Args:
            common_prefix_len: tokens that all sequences share, in the same blocks: a multiple of B, at most the least
                num_computed_tokens, so that every query token sees all of it. If positive it is carried, with the
                tensors that :func:`paged_ops.cascade_attention` takes, in ``cascade``; that the layers then use them is
                for :func:`use_cascade_attention` to decide. 0 is none.
            batch: the step.
            fast_build: favour the time of this call over that of the layers: leaves ``cascade`` out. For metadata that
                few layers read, such as a draft model's steps. Everything else, the checks too, is the same.
            num_reqs: S, the sequences to pad to (a capture size); by default those of the batch.
            num_tokens: T, the tokens to pad to; by default those of the batch.
            lookahead: tokens by which :func:`advance_decodes` may lengthen each request afterwards: the blocks for
                them are checked and sent too.

        Raises:
            ValueError: a capacity is exceeded, a length is negative, a request has too few blocks, a needed block id is
                outside [0, N), the common prefix is not common, or a bidirectional range goes on after the step.
                Nothing has been written then.
        """
        B, n = self.block_size, batch.num_reqs
        query_lens, computed = batch.query_lens, batch.num_computed_tokens
        expect(n <= self.max_num_seqs, "query_lens", f"at most max_num_seqs = {self.max_num_seqs} requests", n)
        _not_negative("query_lens", query_lens)
        _not_negative("num_computed_tokens", computed)
        t = batch.num_tokens
        expect(t <= self.max_num_tokens, "query_lens", f"at most max_num_tokens = {self.max_num_tokens} tokens", t)
        S = _padded("num_reqs", num_reqs, n, "max_num_seqs", self.max_num_seqs)
        T = _padded("num_tokens", num_tokens, t, "max_num_tokens", self.max_num_tokens)
        seq_lens = computed.to(torch.int64) + query_lens
        _not_negative("num_computed_tokens + query_lens", seq_lens)  # int64 may have wrapped
        max_seq_len = _max(seq_lens)
        expect(lookahead >= 0, "lookahead", "0 or more", lookahead)
        reach = seq_lens + lookahead
        longest = _max(reach)
        blocks = [self._needed_blocks("block_ids", batch.block_ids, self.num_blocks[0], reach, longest)]
        if batch.other_block_ids or len(self.num_blocks) > 1:
            given, others = len(batch.other_block_ids), len(self.num_blocks) - 1
            expect(given == others, "other_block_ids", f"block ids of {others} further pools", given)
            for block_ids, num_blocks in zip(batch.other_block_ids, self.num_blocks[1:], strict=True):
                blocks.append(self._needed_blocks("other_block_ids", block_ids, num_blocks, reach, longest))
        has_none = batch.state_slots is None and not self.num_state_rows
        state_slots = _NO_ROWS if has_none else self._state_slots(batch)
        ranges = self._bidirectional_ranges(batch, seq_lens)
        self._check_common_prefix(common_prefix_len, computed, blocks[0])

        # Pinned to the CPU by name, because the user may have set another default device.
        query_start_loc = torch.full((S + 1,), t, dtype=torch.int32, device="cpu")
        query_start_loc[0] = 0
        torch.cumsum(query_lens, 0, dtype=torch.int32, out=query_start_loc[1 : n + 1])
        padded_lens, padded_computed = torch.zeros((2, S), dtype=torch.int32, device="cpu")
        padded_lens[:n] = seq_lens
        padded_computed[:n] = computed

        max_query_len = _max(query_lens)
        if max_query_len == 1 and t == n:
            request, positions = torch.arange(n, device="cpu"), computed
        else:
            request = torch.repeat_interleave(query_lens, output_size=t)
            positions = (computed - query_start_loc[:n])[request] + torch.arange(t, device="cpu")
        columns = torch.div(positions, B, rounding_mode="trunc")
        offsets = positions - columns * B
        slots = [each[request, columns].to(torch.int64) * B + offsets for each in blocks]

        self._write(query_start_loc, padded_lens, slots, positions, T, blocks, reach, state_slots, ranges)
        metadata = self._metadata(query_start_loc, padded_lens, padded_computed, n, t, max_query_len, max_seq_len, T)
        if common_prefix_len and not fast_build:
            metadata.cascade = self._build_cascade(common_prefix_len, metadata)
        return metadata

    def build_for_capture(self, num_reqs: int, query_len: int = 1, *, cascade: bool = False) -> AttentionMetadata:
        """Metadata for warming up and capturing a graph of ``num_reqs`` sequences with ``query_len`` tokens each.

        Its device tensors are the ones that ``build`` fills later when it pads to the same sizes. The query ranges
        are uniform, but slots are -1 and seq_lens 0, so that the captured step neither writes nor reads the cache: a
        causal row before the first key gives 0. The integers are the largest that the graph will meet (``max_seq_len``
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
        self._write(query_start_loc, seq_lens, slots, nothing, t, blocks, nothing, nothing, _NO_RANGES)
        max_seq_len = self.max_blocks_per_seq * self.block_size
        metadata = self._metadata(query_start_loc, seq_lens, computed, num_reqs, t, query_len, max_seq_len, t)
        if cascade:
            metadata.cascade = self._build_cascade(0, metadata)
        return metadata

    def can_run_in_cuda_graph(self, batch: Batch) -> bool:
        """Whether the batch fits the capacities and is of a kind that ``graph_support`` lets a graph serve.

        A batch without requests is: to a graph it is all padding.
        """
        if batch.num_reqs > self.max_num_seqs or batch.num_tokens > self.max_num_tokens:
            return False
        if self.graph_support == GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return bool((batch.query_lens == 1).all())
        if self.graph_support == GraphSupport.UNIFORM_BATCH:
            return bool((batch.query_lens == batch.query_lens[:1]).all())
        return self.graph_support == GraphSupport.ALWAYS

    def _needed_blocks(
        self, name: str, block_ids: Tensor, num_blocks: int, seq_lens: Tensor, max_seq_len: int
    ) -> Tensor:
        """The columns of ``block_ids`` that some request needs, after checking every entry that is needed."""
        B, M = self.block_size, self.max_blocks_per_seq
        argument = "num_computed_tokens + query_lens"
        expect(max_seq_len <= M * B, argument, f"at most {M * B} tokens ({M} blocks of {B}) a request", max_seq_len)
        width = _blocks_for(max_seq_len, B)
        wide_enough = f"{width} blocks for the {max_seq_len} tokens of the longest request (block size {B})"
        expect(block_ids.shape[1] >= width, name, wide_enough, block_ids.shape[1])
        blocks = block_ids[:, :width]
        if blocks.numel():
            low, high = torch.aminmax(blocks)
            # Only then is it worth telling needed entries from the rest.
            if int(low) < 0 or int(high) >= num_blocks:
                wrong = ((blocks < 0) | (blocks >= num_blocks)) & self._is_needed(seq_lens, width)
                if bool(wrong.any()):
                    s, column = wrong.nonzero()[0].tolist()
                    need = _blocks_for(int(seq_lens[s]), B)
                    ids = f"ids in [0, {num_blocks}) for all {need} blocks that request {s} needs"
                    expect(False, name, ids, f"{int(blocks[s, column])} at [{s}, {column}]")
        return blocks

    def _state_slots(self, batch: Batch) -> Tensor:
        """The rows of the requests' states, checked; none without a ``StateCache``."""
        rows, R = batch.state_slots, self.num_state_rows
        if not R:
            expect(rows is None, "state_slots", "None, as the builder has no states (num_state_rows)", rows)
        elif rows is None:
            expect(not batch.num_reqs, "state_slots", "one for each request, as the builder has states", None)
        if rows is None:
            return _NO_ROWS
        valid = not len(rows) or (bool((rows >= 2).all()) and bool((rows < R).all()))
        expect(valid, "state_slots", f"rows in [2, {R}), those of StateCache.rows", rows.tolist())
        slots = rows // 2
        expect(len(slots.unique()) == len(slots), "state_slots", "a slot for each request alone", rows.tolist())
        return rows

    def _bidirectional_ranges(self, batch: Batch, seq_lens: Tensor) -> Tensor:
        """The ranges that the step needs, checked: ``[num_reqs, R, 2]``, or none at all."""
        given = batch.bidirectional_ranges
        if given is None:
            return _NO_RANGES
        return ranges_of_step(given, batch.num_computed_tokens, seq_lens, self.max_bidirectional_ranges)

    def _is_needed(self, seq_lens: Tensor, width: int) -> Tensor:
        """bool ``[len(seq_lens), width]``: whether an entry of a block table lies within its sequence."""
        return torch.arange(0, width * self.block_size, self.block_size, device="cpu") < seq_lens[:, None]

    def _check_common_prefix(self, common_prefix_len: int, computed: Tensor, blocks: Tensor) -> None:
        if common_prefix_len == 0:
            return
        most = int(computed.min()) if len(computed) else 0
        valid = 0 <= common_prefix_len <= most and common_prefix_len % self.block_size == 0
        multiple = f"a multiple of block_size = {self.block_size}, 0 to the least num_computed_tokens = {most}"
        expect(valid, "common_prefix_len", multiple, common_prefix_len)
        prefix = blocks[:, : common_prefix_len // self.block_size]
        differs = (prefix != prefix[:1]).any(1)
        if bool(differs.any()):
            same = f"a prefix of {prefix.shape[1]} blocks that all requests share"
            expect(False, "common_prefix_len", same, f"other blocks for request {int(differs.nonzero()[0])} than for 0")

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
    ) -> None:
        """Fill the buffers with values that have been checked, slots and blocks of each pool; ``reach`` are lengths
        that need their blocks."""
        staging = next(self._turns, None)
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
        if into.state_slots is not None:
            into.state_slots[: len(state_slots)] = state_slots
            into.state_slots[len(state_slots) : S] = PADDING_ROW
        if into.bidirectional_ranges is not None:
            into.bidirectional_ranges[: len(ranges)] = ranges
            into.bidirectional_ranges[len(ranges) : S] = 0
        rows, compact = n, False
        if self.unused_block_id is None:
            compact = staging is not None and _prefers_compact(n, width, self.max_blocks_per_seq)
        else:
            rows = S
            needed = self._is_needed(reach, width)
            blocks = [torch.where(needed, each, self.unused_block_id) for each in blocks]
            for table in into.all_block_tables:
                table[:S] = self.unused_block_id
        tables = [
            table.view(-1)[: n * width].view(n, width) if compact else table[:n, :width]
            for table in into.all_block_tables
        ]
        for table, each in zip(tables, blocks, strict=True):
            table.copy_(each)
        if staging is not None:
            staging.send(self._buffers, T, S, 0 if compact else rows)
            if compact:
                for table, target in zip(tables, self._buffers.all_block_tables, strict=True):
                    target[:n, :width].copy_(table.to(self.device, non_blocking=True))
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
        """Host tensors ``[S + 1]``, ``[S]``, ``[S]`` and integers, beside the views of the buffers that fit them."""
        sizes = len(seq_lens), T
        if sizes not in self._views:
            if len(self._views) >= 1024:
                self._views.clear()
            self._views[sizes] = self._buffers.views(*sizes)
        on_device = self._views[sizes]
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

    def _build_cascade(self, common_prefix_len: int, metadata: AttentionMetadata) -> CascadeMetadata:
        S, M = metadata.block_tables.shape
        if self._cascade is None:
            # Allocated at the first use and never again; an inference tensor could not be written outside that mode.
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


@dataclass
class _Buffers:
    """The tensors of a step in one allocation, so that one copy can carry them all."""

    storage: Tensor  # uint8
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    state_slots: Tensor | None
    bidirectional_ranges: Tensor | None
    slot_mappings: tuple[Tensor, ...]  # of each pool
    all_block_tables: tuple[Tensor, ...]  # of each pool

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        num_pools: int,
        with_states: bool,
        num_ranges: int,
        device: torch.device | str,
        pinned: bool,
    ) -> _Buffers:
        # The largest come last: of them only the rows in use are sent.
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            *[(torch.int64, (max_num_tokens,))] * num_pools,
            (torch.int64, (max_num_tokens,)),
            (torch.int32, (max_num_seqs + 1,)),
            (torch.int32, (max_num_seqs,)),
            *[(torch.int32, (max_num_seqs,))] * with_states,
            *[(torch.int32, (max_num_seqs, num_ranges, 2))] * (num_ranges > 0),
            *[(torch.int32, (max_num_seqs, max_blocks))] * num_pools,
        ]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
        # 256 bytes is more alignment than any vector load or tensor descriptor asks for.
        starts = [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]
        # An inference tensor could not be written outside that mode.
        with torch.inference_mode(False):
            storage = torch.zeros(starts[-1], dtype=torch.uint8, device=device, pin_memory=pinned)
            parts = [
                storage[start : start + size].view(dtype).view(shape)
                for start, size, (dtype, shape) in zip(starts, sizes, shapes, strict=False)
            ]
            # To saving, exporting and the compiler's alias analysis each part is a tensor of its own.
            own = parts
            if not pinned:
                with as_current(torch.device(device)):  # tensors are exported from no other
                    own = [torch.from_dlpack(part) for part in parts]
        slot_mappings, (positions, query_start_loc, seq_lens, *rest) = own[:num_pools], own[num_pools:]
        state_slots = rest.pop(0) if with_states else None
        ranges = rest.pop(0) if num_ranges else None
        of_seqs = query_start_loc, seq_lens, state_slots, ranges
        return cls(storage, positions, *of_seqs, tuple(slot_mappings), tuple(rest))

    @property
    def slot_mapping(self) -> Tensor:
        return self.slot_mappings[0]

    @property
    def block_tables(self) -> Tensor:
        return self.all_block_tables[0]

    @functools.cached_property
    def other_pools(self) -> tuple[PoolMetadata, ...]:
        return tuple(map(PoolMetadata, self.all_block_tables[1:], self.slot_mappings[1:]))

    def views(self, S: int, T: int) -> _Buffers:
        return _Buffers(
            self.storage,
            self.positions[:T],
            self.query_start_loc[: S + 1],
            self.seq_lens[:S],
            None if self.state_slots is None else self.state_slots[:S],
            None if self.bidirectional_ranges is None else self.bidirectional_ranges[:S],
            tuple(slot_mapping[:T] for slot_mapping in self.slot_mappings),
            tuple(block_tables[:S] for block_tables in self.all_block_tables),
        )

    def used(self, T: int, S: int, table_rows: int) -> list[tuple[int, int]]:
        """Byte ranges of ``storage`` that hold T tokens, S sequences and so many rows of the block tables; small gaps
        are closed."""
        counts = [(tensor, T) for tensor in (*self.slot_mappings, self.positions)]
        counts += [(self.query_start_loc, S + 1), (self.seq_lens, S)]
        counts += [(each, S) for each in (self.state_slots, self.bidirectional_ranges) if each is not None]
        counts += [(block_tables, table_rows) for block_tables in self.all_block_tables]
        ranges: list[tuple[int, int]] = []
        for tensor, count in counts:
            if count == 0:
                continue
            start = tensor.data_ptr() - self.storage.data_ptr()
            stop = start + count * tensor.stride(0) * tensor.itemsize
            # Sending 64 KiB of stale bytes takes 1-3 us, issuing another copy more.
            if ranges and start - ranges[-1][1] <= 64 << 10:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges


class _Staging:
    """A host copy of the buffers, and the event after which it may be written again."""

    def __init__(self, buffers: _Buffers):
        self.buffers = buffers
        self.event: torch.cuda.Event | None = None

    def wait(self) -> _Buffers:
        if self.event is not None:
            self.event.synchronize()
        return self.buffers

    def send(self, target: _Buffers, T: int, S: int, table_rows: int) -> None:
        for start, stop in self.buffers.used(T, S, table_rows):
            target.storage[start:stop].copy_(self.buffers.storage[start:stop], non_blocking=True)

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.event = self.event or torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))


def _prefers_compact(rows: int, width: int, M: int) -> bool:
    """Whether to send only the columns in use, packed, and spread them on the device: one more kernel, fewer bytes."""
    return 4 * rows * (M - width) > 256 << 10 and 2 * width <= M


def advance_decodes(metadata: AttentionMetadata, block_size: int) -> None:
    """Make of a decode step the next one, on the device: each live request has one token more.

    ``seq_lens`` and ``positions`` (and a cascade's ``suffix_lens``) grow by 1, ``slot_mapping`` names the next slot, in
    each pool, and ``state_slots`` the rows that this step wrote; padding stays padding. No copy, no sync: it can be
    captured, and a compiler fuses it into one kernel. Only device tensors change: the numbers on the host still tell of
    the step that was built.

    Args:
        metadata: a step of one token for each request, S = T, built with a ``lookahead`` that covers the tokens by
            which it is advanced.
        block_size: B.

    Raises:
        ValueError: the padded sizes are not those of a decode step.
    """
    S, T = len(metadata.seq_lens), len(metadata.slot_mapping)
    if S != T:  # in plain Python, as this is compiled with open sizes
        raise ValueError(f"metadata: expected one token for each request, padding included, got S = {S}, T = {T}")
    live = metadata.seq_lens > 0
    positions = metadata.positions + live
    last_column = metadata.block_tables.shape[1] - 1
    column = torch.div(positions, block_size, rounding_mode="trunc").clamp(max=last_column)  # past it nobody goes on
    for pool in (metadata.pool(0), *(metadata.other_pools or ())):
        block = pool.block_tables.gather(1, column[:, None])[:, 0].to(torch.int64)
        pool.slot_mapping.copy_(torch.where(live, block * block_size + positions % block_size, -1))
    if metadata.state_slots is not None:
        metadata.state_slots.bitwise_xor_(live)
    metadata.positions.copy_(positions)
    metadata.seq_lens.add_(live)
    if metadata.cascade is not None:
        metadata.cascade.suffix_lens.add_(live)


class Reorderable(Protocol):
    """What :func:`reorder_batch_to_split_decodes_and_prefills` asks of a batch; :class:`Batch` is one."""

    @property
    def query_lens(self) -> Ints:
        """``[num_reqs]`` tokens scheduled for each request, on the host."""

    def swap(self, i: int, j: int) -> None:
        """Exchange requests i and j."""


def split_decodes_and_prefills(metadata: AttentionMetadata, decode_threshold: int = 1) -> tuple[int, int, int, int]:
    """Count the two parts of a batch whose decodes come first.

    A request with at most ``decode_threshold`` query tokens is a decode, any other a prefill. Reads the host tensors of
    the first ``num_reqs`` requests.

    Args:
        metadata: the step.
        decode_threshold: most query tokens of a decode: 1, or 1 + the drafted tokens of speculation.

    Returns:
        ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)``, adding up to num_reqs and
        num_actual_tokens.

    Raises:
        ValueError: a decode comes after a prefill: reorder the batch before it is built.
    """
    starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1]
    is_decode = starts.diff() <= decode_threshold
    num_decodes = int(is_decode.sum())
    if not bool(is_decode[:num_decodes].all()):
        ordered = f"requests of at most decode_threshold = {decode_threshold} tokens first (reorder the batch)"
        expect(False, "metadata", ordered, f"query lengths {starts.diff().tolist()}")
    num_decode_tokens = int(starts[num_decodes])
    num_prefill_tokens = metadata.num_actual_tokens - num_decode_tokens
    return num_decodes, metadata.num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens


def swaps_to_split_decodes_and_prefills(query_lens: Ints, decode_threshold: int = 1) -> list[tuple[int, int]]:
    """The fewest swaps ``(i, j)``, ``i < j``, that bring requests of at most ``decode_threshold`` tokens to the front.

    With d decodes, the prefills among the first d places must leave, and as many decodes behind them come in. A swap
    can do no more than one of each, so pairing them is minimal. No request is in two swaps: any order will do.

    Args:
        query_lens: ``[num_reqs]`` tokens scheduled for each request, on the host.
        decode_threshold: most query tokens of a decode.
    """
    is_decode = _integers("query_lens", query_lens, rank=1) <= decode_threshold
    num_decodes = int(is_decode.sum())
    leaving = (~is_decode[:num_decodes]).nonzero().flatten()
    coming = is_decode[num_decodes:].nonzero().flatten() + num_decodes
    return list(zip(leaving.tolist(), coming.tolist(), strict=True))


def reorder_batch_to_split_decodes_and_prefills(batch: Reorderable, decode_threshold: int = 1) -> bool:
    """Bring a batch's decodes to the front, in place, by the fewest swaps.

    Takes a :class:`Batch`, or any object with ``query_lens`` and ``swap(i, j)``, so that an engine's own state of its
    requests can move along. For the bare list of swaps see :func:`swaps_to_split_decodes_and_prefills`.

    Args:
        batch: what to reorder.
        decode_threshold: most query tokens of a decode.

    Returns:
        Whether anything moved.
    """
    swaps = swaps_to_split_decodes_and_prefills(batch.query_lens, decode_threshold)
    for i, j in swaps:
        batch.swap(i, j)
    return bool(swaps)


class VirtualBatches(NamedTuple):
    """A batch of V sequences that stands for another one."""

    query_lens: Tensor  # int32 [V], host
    seq_lens: Tensor  # int32 [V], host
    block_tables: Tensor  # [V, chunk / B], dtype and device of the block tables that it was cut from


def make_local_attention_virtual_batches(
    chunk: int, query_lens: Ints, seq_lens: Ints, block_tables: Tensor, block_size: int
) -> VirtualBatches:
    """Rewrite a batch for chunked-local attention as more, shorter sequences.

    With ``attention_chunk = chunk`` a token at position i sees the keys ``j <= i`` with ``i // chunk == j // chunk``.
    So each chunk of a sequence in which query tokens stand becomes a sequence of its own: its keys from the start of
    the chunk to the last query token in it. Plain causal attention over these gives the same numbers, and the query
    rows keep their order. The blocks of a chunk are ``chunk / B`` adjacent columns of the sequence's block table.

    Example: chunk 4, query_lens [4, 10, 5], seq_lens [6, 17, 9] and block_size 2 give query_lens
    [2, 2, 1, 4, 4, 1, 4, 1] and seq_lens [4, 2, 4, 4, 4, 1, 4, 1]: sequence 0 from keys 0 and 4, sequence 1 from keys
    4, 8, 12 and 16, sequence 2 from keys 4 and 8.

    Args:
        chunk: tokens of a chunk, a multiple of block_size.
        query_lens: ``[num_reqs]``, host; a request without query tokens vanishes.
        seq_lens: ``[>= num_reqs]``, host; rows past num_reqs are padding.
        block_tables: ``[>= num_reqs, M]``, any device; on another than the CPU the indices are copied to it.
        block_size: B.

    Raises:
        ValueError: chunk is not a multiple of block_size; a sequence is shorter than its query or longer than its row.

    Source: the local attention of Llama-4, served by virtual batches in vLLM.
    """
    expect(block_size >= 1, "block_size", "1 or more", block_size)
    expect(chunk >= 1 and chunk % block_size == 0, "chunk", f"a positive multiple of block_size = {block_size}", chunk)
    q = _integers("query_lens", query_lens, rank=1).to(torch.int64)
    n = len(q)
    kv = _integers("seq_lens", seq_lens, rank=1)[:n].to(torch.int64)
    expect(len(kv) == n, "seq_lens", f"one for each of the {n} requests of query_lens", len(kv))
    _not_negative("query_lens", q)
    too_short = (kv < q).nonzero()
    if len(too_short):
        s = int(too_short[0])
        expect(False, "seq_lens", f"at least the {int(q[s])} query tokens of request {s}", int(kv[s]))
    expect(block_tables.dim() == 2 and len(block_tables) >= n, "block_tables", f"[S >= {n}, M]", block_tables)
    width, columns = _blocks_for(_max(kv), block_size), block_tables.shape[1]
    expect(columns >= width, "block_tables", f"{width} columns for sequences of up to {_max(kv)} tokens", columns)

    first_query = kv - q
    first_chunk = first_query // chunk
    num_chunks = torch.where(q > 0, (kv - 1) // chunk - first_chunk + 1, 0)
    request = torch.repeat_interleave(num_chunks)
    ordinal = torch.arange(len(request), device="cpu") - (num_chunks.cumsum(0) - num_chunks)[request]
    start = (first_chunk[request] + ordinal) * chunk
    stop = torch.minimum(start + chunk, kv[request])
    # The last chunk may reach past the table, where nothing is needed: any column will do.
    column = start[:, None] // block_size + torch.arange(chunk // block_size, device="cpu")
    column = column.clamp(max=max(columns - 1, 0))
    device = block_tables.device
    return VirtualBatches(
        query_lens=(stop - torch.maximum(start, first_query[request])).to(torch.int32),
        seq_lens=(stop - start).to(torch.int32),
        block_tables=block_tables[request[:, None].to(device), column.to(device)],
    )


def block_ids_from_addresses(
    block_tables: Tensor, seq_lens: Ints, kv_cache: Tensor, *, value_cache: Tensor | None = None
) -> Tensor:
    """The block ids of block tables that hold the physical addresses of blocks.

    ``id = (address - kv_cache.data_ptr()) / (kv_cache.stride(0) * itemsize)``. Of each row only the
    ``ceil(seq_len / B)`` entries that the sequence needs are looked at.

    Args:
        block_tables: int64 ``[S, M]``, host: addresses in bytes.
        seq_lens: ``[num_reqs]``, host, ``num_reqs <= S``: further rows are padding.
        kv_cache: the cache whose blocks these are, on any device; its content is not touched.
        value_cache: as the ops take it: tells the separate and x-packed forms from the others. Not looked into.

    Returns:
        int32 ``[S, M]``, host; 0 where no block is needed.

    Raises:
        ValueError: a needed entry is not where a block of this cache starts.
    """
    addresses = _integers("block_tables", block_tables, rank=2).to(torch.int64)
    lens = _integers("seq_lens", seq_lens, rank=1).to(torch.int64)
    _not_negative("seq_lens", lens)
    expect(len(lens) <= len(addresses), "seq_lens", f"at most one for each of the {len(addresses)} rows", len(lens))
    cache = paged_kv(kv_cache, value_cache)
    N, B, base = cache.num_blocks, cache.block_size, kv_cache.data_ptr()
    width, M = _blocks_for(_max(lens), B), addresses.shape[1]
    expect(width <= M, "block_tables", f"{width} columns for sequences of up to {_max(lens)} tokens", M)
    stride = kv_cache.stride(0) * kv_cache.element_size()

    needed = torch.zeros(addresses.shape, dtype=torch.bool, device="cpu")
    needed[: len(lens)] = torch.arange(0, M * B, max(B, 1), device="cpu") < lens[:, None]
    offsets = torch.where(needed, addresses - base, 0)
    ids = offsets // max(stride, 1)
    wrong = needed & ((ids * stride != offsets) | (ids < 0) | (ids >= N))
    if bool(wrong.any()):
        s, column = wrong.nonzero()[0].tolist()
        starts = f"the start of one of the cache's {N} blocks ({stride} bytes apart from {base:#x} on)"
        expect(False, "block_tables", starts, f"{int(addresses[s, column]):#x} at [{s}, {column}]")
    return ids.to(torch.int32)


class LayerHyperparameters(NamedTuple):
    """What a model fixes for each of its attention layers, maybe differently."""

    sliding_window: int  # tokens, the query's own included; 0 is off
    soft_cap: float  # 0 is off
    scale: float  # of the logits


_ATTRIBUTES = {
    "sliding_window": ("sliding_window",),
    "soft_cap": ("soft_cap", "softcap", "attn_logit_softcapping"),
    "scale": ("scale", "scaling"),
}


def collect_layer_hyperparameters(layers: Mapping[str, Any] | nn.Module) -> dict[str, LayerHyperparameters]:
    """The window, soft cap and scale of each attention layer, by its name.

    Args:
        layers: the attention layers by name, each an object with attributes or a mapping with keys ``sliding_window``,
            ``soft_cap`` (also ``softcap``, ``attn_logit_softcapping``) and ``scale`` (also ``scaling``); a window or
            soft cap that is absent or None is off. Or a model: then its submodules that have a scale are the layers.

    Raises:
        ValueError: a layer has no scale, or a value is not a number.
    """
    if isinstance(layers, nn.Module):
        layers = {name: module for name, module in layers.named_modules() if _attribute(module, "scale") is not None}
    collected = {}
    for name, layer in layers.items():
        window, soft_cap, scale = (_attribute(layer, attribute) for attribute in LayerHyperparameters._fields)
        for attribute, value in (("sliding_window", window or 0), ("soft_cap", soft_cap or 0), ("scale", scale)):
            expect(isinstance(value, (int, float)), f"layers[{name!r}].{attribute}", "a number", value)
        collected[name] = LayerHyperparameters(int(window or 0), float(soft_cap or 0), float(scale))
    return collected


def common_layer_hyperparameters(per_layer: Mapping[str, LayerHyperparameters]) -> LayerHyperparameters:
    """The values that all layers share, for what is prepared once a step for all of them.

    Args:
        per_layer: what :func:`collect_layer_hyperparameters` gave.

    Raises:
        ValueError: there are no layers, or they differ; names the layers of each set of values.
    """
    expect(bool(per_layer), "per_layer", "one layer or more", "none")
    groups: dict[LayerHyperparameters, list[str]] = {}
    for name, values in per_layer.items():
        groups.setdefault(values, []).append(name)
    if len(groups) > 1:
        listed = "; ".join(f"{', '.join(names)}: {tuple(values)}" for values, names in groups.items())
        same = f"the same {LayerHyperparameters._fields} in all layers (prepare each group by itself)"
        expect(False, "per_layer", same, listed)
    return next(iter(groups))


def use_cascade_attention(
    common_prefix_len: int, query_lens: Ints, H: int, K: int, uses_alibi: bool, uses_window: bool, num_sms: int
) -> bool:
    """Whether reading a shared prefix once for the whole batch should beat reading it for each sequence.

    The unit of time is what one SM needs for one key and value of one head: 512 bytes in bf16 with D 128, some 14 ns of
    an H200's bandwidth, and about as long in matrix instructions when a full tile of R = 128 rows meets them. Rows of a
    tile are query tokens times the G = H / K heads that share a key. With P = common_prefix_len, q the query_lens and T
    their sum::

        plain   = K * sum_s ceil(q[s] * G / R) * P / num_sms     each sequence reads the prefix, spread over all SMs
        cascade = ceil(K * ceil(T * G / R) / num_sms) * P        waves of tiles, each tile walks the prefix once
                  + 1.5 * T * H / num_sms                        the merge: two outputs read, one written
                  + 700                                          two more launches, some 10 us

    True if ``cascade < plain``; suffixes cost the same either way. Prefixes under 256 tokens and fewer than 8 sequences
    are refused outright: there the result would hang on the model's constants.

    Args:
        common_prefix_len: tokens that all sequences share.
        query_lens: ``[num_reqs]``, host.
        H, K: query heads, key/value heads.
        uses_alibi: ALiBi depends on distances across the seam, which cascade_attention does not know: False.
        uses_window: so do a sliding window and attention chunks: False.
        num_sms: multiprocessors of the device.

    Raises:
        ValueError: H is not a multiple of K, or a number is negative.

    Source of the idea: Hydragen (arXiv:2402.05099) and the cascade inference of FlashInfer; the cost model is our own.
    """
    q = _integers("query_lens", query_lens, rank=1).to(torch.int64)
    _not_negative("query_lens", q)
    expect(common_prefix_len >= 0, "common_prefix_len", "0 or more", common_prefix_len)
    expect(K >= 1 and H >= K and H % K == 0, "H", f"a positive multiple of K = {K}", H)
    expect(num_sms >= 1, "num_sms", "1 or more", num_sms)
    if uses_alibi or uses_window or common_prefix_len < 256 or int((q > 0).sum()) < 8:
        return False
    T, G, R = int(q.sum()), H // K, 128
    plain = K * int(((q * G + R - 1) // R).sum()) * common_prefix_len / num_sms
    waves = _blocks_for(K * _blocks_for(T * G, R), num_sms)
    return waves * common_prefix_len + 1.5 * T * H / num_sms + 700 < plain


def _attribute(layer: Any, attribute: str) -> Any:
    """The first of an attribute's names that a layer has, else None."""
    for name in _ATTRIBUTES[attribute]:
        value = layer.get(name) if isinstance(layer, Mapping) else getattr(layer, name, None)
        if value is not None:
            return value
    return None


def _integers(argument: str, values: Ints, rank: int) -> Tensor:
    """Numbers of the host as an int32 or int64 CPU tensor, not copied if they are one."""
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    if tensor.numel() == 0 and not isinstance(values, Tensor):
        tensor = tensor.to(torch.int64)
    expect(tensor.device.type == "cpu", argument, "a tensor on the CPU", tensor)
    expect(tensor.dtype in (torch.int32, torch.int64), argument, "int32 or int64", tensor)
    expect(tensor.dim() == rank, argument, f"{rank} dimension{'s' * (rank > 1)}", tensor)
    return tensor


def _block_ids(rows: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Lists of blocks as a tensor ``[num_reqs, W]``, filled up with -1, which is no block."""
    if not isinstance(rows, (list, tuple)):
        return _integers("block_ids", cast(Tensor, rows), rank=2)
    flat = _integers("block_ids", list(itertools.chain.from_iterable(rows)), rank=1)
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
    table = torch.full((len(rows), _max(lens)), -1, dtype=flat.dtype, device="cpu")
    table[torch.arange(table.shape[1], device="cpu") < lens[:, None]] = flat
    return table


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // max(block_size, 1))


def _max(values: Tensor) -> int:
    return int(values.max()) if len(values) else 0


def _not_negative(argument: str, values: Tensor) -> None:
    if len(values) and int(values.min()) < 0:
        expect(False, argument, "0 or more for each request", f"{int(values.min())} for request {int(values.argmin())}")


def _padded(argument: str, asked: int | None, actual: int, limit_name: str, limit: int) -> int:
    size = actual if asked is None else asked
    expect(actual <= size <= limit, argument, f"{actual} (of the batch) to {limit_name} = {limit}", size)
    return size
