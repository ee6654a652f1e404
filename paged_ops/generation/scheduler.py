"""Which requests run, and which of their tokens a step computes.

The state is the unfinished requests and the cache, which knows whether a sequence is there, swapped out, or neither.
The lists of waiting, running and swapped-out requests follow from it, and are rebuilt after a step that failed.

Letters: M columns of a block table, B tokens per block.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from paged_ops.cache.block_pool import OutOfBlocks, most_blocks_kept
from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.generation.request import GenerationStats, Request
from paged_ops.metadata import Batch

UNREAD = [0]  # a token that the host does not know yet
Scheduled = tuple[Request, int, int]  # a request, the number of its computed tokens, and of those the step computes


class ScheduledStep(NamedTuple):
    """The requests of one step, whose slots are reserved."""

    requests: list[Scheduled]  # decodes, then chunks of prompts
    prompt_tokens: int  # that the step computes
    cached_tokens: int  # prompt tokens found in the cache, of the requests that the step admits
    has_admitted: bool


class Scheduler:
    """Admits, preempts and resumes requests, and reserves the slots of their next tokens.

    Of the cache it uses: ``admit``, ``can_admit``, ``append``, ``reserve``, ``num_reservable``, ``rollback``, ``fork``,
    ``free``, ``swap_out``, ``swap_in``, ``can_swap_out``, ``can_swap_in``, ``recover``, ``block_ids``, ``num_tokens``,
    ``num_computed_tokens``, ``num_given_back``, ``reserves_in_parts``, ``is_swapped_out``, ``in``, ``pools``,
    ``states``, and numbers of blocks. The requests themselves are the keys of its sequences, so the cache may also
    hold sequences of others.

    Args:
        kv_cache: the cache.
        max_num_seqs, max_num_tokens, max_model_len: the largest step, the longest sequence.
        stats: where preemptions are counted.

    Attributes:
        unfinished: all requests that have not ended.
        is_open: whether a change has begun that is neither finished nor cancelled.
    """

    def __init__(
        self,
        kv_cache: KVCache | HybridCache,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        stats: GenerationStats,
    ) -> None:
        self.unfinished: dict[Request, None] = {}
        self.is_open = False
        self.waiting: list[Request] = []  # the three lists are sorted by id
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._in_turn: dict[Request, None] = {}  # of the unfinished, those that needed it when they were added
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._stats = stats
        self._admitted: list[Request] = []  # by the scheduled step
        columns = -(-max_model_len // kv_cache.block_size)
        with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
            self._tables = [
                torch.zeros(max_num_seqs, columns, dtype=torch.int32, device="cpu") for _ in range(len(kv_cache.pools))
            ]
        self._rows: tuple[list[int], torch.Tensor] = ([], torch.zeros(0, dtype=torch.int64, device="cpu"))

    def queue(self, requests: list[Request]) -> None:
        """Adds new requests, without the ones that are known or have ended."""
        was_open, self.is_open = self.is_open, True
        new = [each for each in requests if each not in self.unfinished and each.finish_reason is None]
        for request in new:
            self.add(request)
        self.waiting += new
        self.waiting.sort(key=_id_of)  # several threads may have queued them in another order
        self.is_open = was_open

    def add(self, request: Request) -> None:
        """Adds a request to the unfinished ones only."""
        if request.is_read_at_once or request.others:
            self._in_turn[request] = None
        self.unfinished[request] = None

    def discard(self, request: Request) -> None:
        """Removes a request from the unfinished ones only."""
        self.unfinished.pop(request, None)
        self._in_turn.pop(request, None)

    @property
    def is_in_turn(self) -> bool:
        """Whether no step may be launched before the tokens of the one before are read: a request needs its token at
        once, or a sample waits for the prompt of the first one."""
        return any(request.is_read_at_once or request.others for request in self._in_turn)

    def join(self, request: Request) -> None:
        """Adds a further sample: it runs if it has blocks, else it waits."""
        self.add(request)
        if request in self._kv_cache:
            self._start(request)
        else:
            bisect.insort(self.waiting, request, key=_id_of)

    def fork(self, parent: Request, child: Request) -> None:
        """Forks a further sample from the one whose prompt is computed. Does nothing if there is no room for it."""
        if child not in self._kv_cache and parent in self._kv_cache:
            with contextlib.suppress(OutOfBlocks):  # a cache with states may have no slot
                self._kv_cache.fork(parent, child)
        parent.num_blocks = 0  # the first that appends gets a block of its own

    def leave(self, request: Request) -> None:
        """Removes the request from the list that it is on."""
        if request.row >= 0:
            self.running.remove(request)
            self.free_rows.append(request.row)
            request.row = -1
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.swapped:
            self.swapped.remove(request)

    def schedule(self, may_preempt: bool = True) -> ScheduledStep:
        """Reserves the slots of the next step; :meth:`finish` or :meth:`cancel` must follow. The step is empty if no
        request's tokens had room, but a request was preempted: the step after it then has room for others.

        Args:
            may_preempt: False while a step runs whose tokens are not known yet. Requests that end with these tokens are
                left out, and the step is empty if none is left.

        Raises:
            OutOfBlocks: no request can run, because other sequences hold the cache's blocks; or one would have to be
                preempted.
        """
        self.is_open, self._admitted = True, []
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        preempted = self._continue(decodes, prefills, may_preempt)
        budget = self._max_num_tokens - len(decodes) - sum(num_tokens for _, _, num_tokens in prefills)
        cached_tokens = 0
        if not preempted:
            if self.swapped:
                budget = self._resume(budget, decodes, prefills)
            if self.waiting and not self.swapped:
                cached_tokens = self._admit(budget, prefills)
            if may_preempt and not (decodes or prefills):
                raise self._out_of_blocks((self.swapped or self.waiting)[0])
        prompt_tokens = sum(num_tokens for _, _, num_tokens in prefills)
        return ScheduledStep(decodes + prefills, prompt_tokens, cached_tokens, bool(self._admitted))

    def batch(self, requests: list[Scheduled]) -> tuple[Batch, list[int]]:
        """A step as the metadata's builder takes it, and its token ids."""
        cache, size = self._kv_cache, self._kv_cache.block_size
        gives_back = cache.reserves_in_parts
        input_ids: list[int] = []
        rows, starts, counts = [], [], []
        longest = 0
        for request, start, num_tokens in requests:
            stop = start + num_tokens
            longest = max(longest, stop)
            input_ids += request.tokens[start:stop] or UNREAD
            if stop > request.num_blocks * size or (
                gives_back and cache.num_given_back(request) != request.num_given_back
            ):
                self._write_rows(request)
            rows.append(request.row)
            starts.append(start)
            counts.append(num_tokens)
        if rows != self._rows[0]:
            self._rows = rows, torch.tensor(rows, dtype=torch.int64, device="cpu")
        width = -(-longest // size)
        tables, *others = [table[:, :width].index_select(0, self._rows[1]) for table in self._tables]
        query_lens, computed = torch.tensor([counts, starts], dtype=torch.int64, device="cpu")
        state_slots = None
        if self._kv_cache.states is not None:
            of_states = self._kv_cache.states.rows([request for request, _, _ in requests])
            state_slots = torch.tensor(of_states, dtype=torch.int32, device="cpu")
        return Batch(query_lens, computed, tables, other_block_ids=others, state_slots=state_slots), input_ids

    def finish(self) -> None:
        """Records that the changes of the scheduled step are made: the requests that it admitted stay."""
        self._admitted = []
        cache = self._kv_cache
        if cache.reserves_in_parts:
            for request in self.running:
                if request.yielded_at == len(request.tokens):  # before others take the blocks that it has freed
                    cache.reserve(request, min(cache.block_size, cache.num_reservable(request)))
        self.is_open = False

    def cancel(self) -> None:
        """Frees the slots that the scheduled step has reserved; the requests that it admitted wait again."""
        cache = self._kv_cache
        cache.recover()
        for request in self._admitted:
            if request in cache:
                cache.free(request)
        for request in self.unfinished:
            if request in cache and not cache.is_swapped_out(request):
                reserved = cache.num_tokens(request) - cache.num_computed_tokens(request)
                if reserved == 1:  # a decode, or a prompt's last token; the slots of a longer rest of a prompt stay
                    cache.rollback(request)
        self.rebuild_lists()
        self.is_open, self._admitted = False, []

    def rebuild_lists(self) -> None:
        """Rebuilds the lists and rows from the requests and the cache."""
        running: list[Request] = []
        swapped: list[Request] = []
        waiting: list[Request] = []
        for request in sorted(self.unfinished, key=_id_of):
            is_swapped = request in self._kv_cache and self._kv_cache.is_swapped_out(request)
            where = swapped if is_swapped else running if request in self._kv_cache else waiting
            request.row, request.num_blocks = (len(running) if where is running else -1), 0
            where.append(request)
        self.running, self.swapped, self.waiting = running, swapped, waiting
        self.free_rows = list(range(self._max_num_seqs - 1, len(running) - 1, -1))

    def _write_rows(self, request: Request) -> None:
        """The request's row of each pool's block table."""
        counts = []
        for pool, table in zip(self._kv_cache.pools, self._tables, strict=True):
            blocks = pool.block_ids(request)
            table[request.row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device="cpu")
            counts.append(len(blocks))
        request.num_blocks, request.num_given_back = min(counts), self._kv_cache.num_given_back(request)

    def _continue(self, decodes: list[Scheduled], prefills: list[Scheduled], may_preempt: bool) -> bool:
        """Plans the next tokens of the running requests, decodes first. The youngest are preempted if blocks run out;
        returns whether any was."""
        cache = self._kv_cache
        prefilling: list[Scheduled] = []
        preempted = False
        for request in self.running.copy():
            if request.row < 0:
                continue  # preempted for an older one
            start, num_tokens = cache.num_computed_tokens(request), cache.num_tokens(request)
            if start < num_tokens:
                prefilling.append((request, start, num_tokens - start))
                continue
            if request.num_unread and request.has_all_tokens:
                continue
            while request.row >= 0:  # until it has its slot, or is preempted itself
                try:
                    cache.append(request, request.tokens[start : start + 1] or UNREAD)
                    decodes.append((request, start, 1))
                    break
                except OutOfBlocks:
                    if not may_preempt:
                        raise
                    self._preempt(self.running[-1])
                    preempted = True
        budget = self._max_num_tokens - len(decodes)
        for request, start, left in prefilling:
            while budget and request.row >= 0:
                num_tokens = min(budget, left, cache.num_reservable(request))
                if num_tokens:
                    cache.reserve(request, num_tokens)
                    prefills.append((request, start, num_tokens))
                    budget -= num_tokens
                    break
                if not may_preempt:
                    raise self._out_of_blocks(request)
                self._preempt(self.running[-1])
                preempted = True
        decodes[:] = [each for each in decodes if each[0].row >= 0]  # an older prompt may have preempted it
        return preempted

    def _resume(self, budget: int, decodes: list[Scheduled], prefills: list[Scheduled]) -> int:
        """Swaps sequences in, oldest first, while a block is left for each running one: else they would soon be swapped
        out."""
        cache = self._kv_cache
        while self.swapped and budget and self.free_rows:
            request = self.swapped[0]
            if not cache.can_swap_in(request, num_tokens=1, spare_blocks=len(self.running)):
                break
            cache.swap_in(request)
            del self.swapped[0]
            self._start(request)
            start, num_tokens = cache.num_computed_tokens(request), cache.num_tokens(request)
            if start == num_tokens:
                cache.append(request, request.tokens[start : start + 1])
                decodes.append((request, start, 1))
                budget -= 1
                continue
            chunk = min(budget, num_tokens - start, cache.num_reservable(request))
            cache.reserve(request, chunk)
            prefills.append((request, start, chunk))
            budget -= chunk
        return budget

    def _admit(self, budget: int, prefills: list[Scheduled]) -> int:
        """Admits waiting requests, oldest first, while a block is left for each running one. Returns how many of their
        tokens were in the cache."""
        cache = self._kv_cache
        num_cached = index = 0
        while budget and self.free_rows and index < len(self.waiting):
            request = self.waiting[index]
            if any(self._shares_unfinished_prefix(request, other, start) for other, start, _ in prefills):
                index += 1  # in the next step its prefix will be in the cache
                continue
            tokens, key = request.tokens, request.prefix_key
            least = self._least_slots(request)
            slots = budget if least == 1 else len(tokens)
            while not cache.can_admit(tokens, key, first_chunk=slots, spare_blocks=len(self.running)):
                if slots <= least or not cache.reserves_in_parts:
                    return num_cached
                slots = max(slots // 2, least)
            self._admitted.append(request)
            start = cache.admit(request, tokens, key, first_chunk=slots)
            del self.waiting[index]
            self._start(request)
            prefills.append((request, start, min(budget, slots, len(tokens) - start)))
            budget -= prefills[-1][2]
            num_cached += start
        return num_cached

    def _least_slots(self, request: Request) -> int:
        """The fewest slots for an admission: one. If the request yielded to other sequences in the cache, enough for
        its whole prompt whatever they do. As each chunk frees blocks, :meth:`finish` reserves others."""
        cache, size = self._kv_cache, self._kv_cache.block_size
        if request.yielded_at != len(request.tokens) or not cache.num_used_blocks:
            return 1
        enough = [
            min(
                most_blocks_kept(size, pool.sliding_window, pool.attention_chunk, pool.num_first_tokens) + 1,
                pool.num_blocks,
            )
            for pool in cache.pools
            if pool.reserves_in_parts
        ]
        return min(max(enough, default=1) * size, len(request.tokens))

    def _shares_unfinished_prefix(self, request: Request, other: Request, num_computed: int) -> bool:
        """Whether ``other`` computes blocks in this step, or later ones, that the request could share afterwards."""
        if request.prefix_key != other.prefix_key or self._kv_cache.states is not None:  # states are not shared
            return False
        common = 0
        for a, b in zip(request.tokens[:-1], other.tokens, strict=False):
            if a != b:
                break
            common += 1
        return common // self._kv_cache.block_size * self._kv_cache.block_size > num_computed

    def _start(self, request: Request) -> None:
        request.row, request.num_blocks = self.free_rows.pop(), 0
        bisect.insort(self.running, request, key=_id_of)

    def _preempt(self, request: Request) -> None:
        """Takes a running sequence's blocks: it is swapped out, or, if the host has no room, computed again later.

        Raises:
            OutOfBlocks: the loop runs nothing else, so the request yields to other sequences in the cache; and it has
                yielded before, without a token since. It has yielded when this is raised.
        """
        is_alone = self.running == [request]
        if self._kv_cache.can_swap_out(request):
            self._kv_cache.swap_out(request)
            self.leave(request)
            bisect.insort(self.swapped, request, key=_id_of)
            self._stats.swapped_out += 1
        else:
            self._kv_cache.free(request)
            self.leave(request)
            bisect.insort(self.waiting, request, key=_id_of)
            self._stats.recomputed += 1
            if is_alone:
                if request.yielded_at == len(request.tokens):
                    raise self._out_of_blocks(request)
                request.yielded_at = len(request.tokens)

    def _out_of_blocks(self, request: Request) -> OutOfBlocks:
        cache = self._kv_cache
        return OutOfBlocks(
            f"{request!r}: expected free blocks for its {len(request.tokens)} tokens, but {cache.num_used_blocks} of"
            f" {cache.num_blocks} are held by others than this loop; free some, or abort({request.request_id})"
        )


def free_all(kv_cache: KVCache | HybridCache, requests: Iterable[Request]) -> None:
    """Frees the sequences of a loop that no longer exists."""
    for request in requests:
        if request in kv_cache:
            kv_cache.free(request)


def _id_of(request: Request) -> int:
    return request.request_id
