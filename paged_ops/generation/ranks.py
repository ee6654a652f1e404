"""The loops of several ranks run as one: the same calls, the same requests and aborts, rank 0's tokens.

Either all ranks call the same, with the same requests; or rank 0 alone gets requests, and the others call ``follow``.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.checks import describe_setting, expect
from paged_ops.generation.inbox import Inbox
from paged_ops.generation.request import GenerationStats, Request
from paged_ops.generation.settings import Settings
from paged_ops.metadata import Batch
from paged_ops.parallel.rendezvous import ApartError, RankError, Ranks, carries, portable

Result = TypeVar("Result")

FOLLOW = "follow"  # the same call as rank 0
LEAVE_LIMIT = 5.0  # seconds that a leaving rank waits for the others
UNLIMITED = float(2**24)  # seconds


class OneRank:
    """The coordination of a loop with the loops of other ranks, if there are none."""

    leads = True
    is_lost = False  # whether the ranks cannot go on
    shares_tokens = True  # whether tokens go from rank 0 to the others' devices without their hosts
    in_turn: bool | None = None  # what rank 0 said last of its scheduler's ``is_in_turn``; None: ask this rank's own

    def next_call(self, name: str) -> str:
        """Agrees on the next call before it is made: all ranks then have the same requests and aborts. Returns the call
        of rank 0."""
        return name

    def run(self, call: Callable[[], Result], limit: float | None = None, has_collectives: bool = True) -> Result:
        """Runs a function on all ranks. On all, returns rank 0's result or raises the first error of any rank."""
        return call()

    def share(self, tokens: Tensor) -> None:
        """Copies tokens on rank 0's device to those of the other ranks, in the order of the current streams."""

    def has_run(self, batch: Batch, input_ids: Sequence[int]) -> None:
        """Within :meth:`run`: records that the model has run this step."""

    def calling_only_steps(self, only_steps: bool) -> AbstractContextManager[None]:
        """Inside it this rank does nothing between steps if ``only_steps``. All ranks leave it after the same step."""
        return contextlib.nullcontext()

    def sharing_errors(self) -> AbstractContextManager[None]:
        """An exception inside it, between steps, is also raised by the others' next call."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """Closes the loops of all ranks, without waiting for missing ones."""


class Submission(NamedTuple):
    """A prompt as ranks send it to each other: what decides about blocks and ends, but not about tokens."""

    request_id: int  # of the first sample
    tokens: tuple[int, ...]
    settings: Settings
    extra_key: Hashable

    @classmethod
    def of(cls, request: Request) -> Submission:
        prompt = tuple(request.tokens[: request.num_prompt])
        return cls(request.request_id, prompt, request.settings.without_sampling(), request.extra_key)


class Call(NamedTuple):
    """The next call of one rank, and its state."""

    name: str
    state: tuple[Any, ...]  # must be equal on all ranks
    submitted: tuple[Submission, ...] = ()  # since the last call
    aborted: tuple[int, ...] = ()
    in_turn: bool = False  # whether its steps cannot overlap now
    error: BaseException | None = None  # ended this rank's part of a call that others may continue


class ManyRanks(OneRank):
    """The coordination of a loop with the loops of other ranks.

    Two rendezvous per step: one before it, about calls, requests and aborts, and one after it, about tokens and errors.
    The first is left out while all ranks only call steps. If steps overlap, there is one more, because a step is
    launched before the tokens of the present one are read; all of them then take place while the device computes.

    Args:
        ranks: of the group.
        group: carries tokens from device to device.
        inbox: of the loop.
        kv_cache, stats: of the loop. Steps and used blocks must be equal on all ranks before each call.
        sizes: of the loop, equal on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: Any,
        inbox: Inbox,
        kv_cache: KVCache | HybridCache,
        stats: GenerationStats,
        sizes: tuple[Any, ...],
    ) -> None:
        self._group, self.in_turn = group, False
        self.shares_tokens = carries(group, kv_cache.device)
        self._ranks, self._inbox, self._kv_cache, self._stats = ranks, inbox, kv_cache, stats
        self._only_steps = False  # whether this rank calls steps, and nothing in between
        inbox.is_shared = True
        ranks.rendezvous(Call("GenerationLoop", sizes), agree_on)

    @property
    def leads(self) -> bool:  # type: ignore[override]
        return self._ranks.leads

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        return self._ranks.lost is not None

    def next_call(self, name: str) -> str:
        if name == "step" and self._ranks.is_quiet:
            self._ranks.is_quiet = False
            return name
        return self._agree(name, limit=UNLIMITED if name == FOLLOW else None)

    def _agree(self, name: str, error: BaseException | None = None, limit: float | None = None) -> str:
        inbox = self._inbox
        inbox.deliver()
        submitted, aborting = tuple(map(Submission.of, inbox.unsent)), inbox.unsent_aborts.copy()
        state = self._stats.steps, self._kv_cache.num_used_blocks
        aborted = tuple(request.request_id for request in aborting)
        call = Call(name, state, submitted, aborted, inbox.is_in_turn, error)
        agreed = self._ranks.rendezvous(call, agree_on, limit=limit)
        self.in_turn = agreed.in_turn
        if agreed.submitted != submitted:
            inbox.adopt(agreed.submitted)
        inbox.unsent.clear()
        inbox.unsent_aborts -= aborting  # without the ones that were added meanwhile
        inbox.abort_ids(agreed.aborted)
        return agreed.name

    def run(self, call: Callable[[], Result], limit: float | None = None, has_collectives: bool = True) -> Result:
        inbox = self._inbox

        def is_quiet() -> bool:
            return self._only_steps and not (inbox.arrivals or inbox.unsent or inbox.unsent_aborts)

        return self._ranks.agree(call, limit=limit, is_quiet=is_quiet, has_collectives=has_collectives)

    def share(self, tokens: Tensor) -> None:
        dist.broadcast(tokens, group=self._group, group_src=0)

    def has_run(self, batch: Batch, input_ids: Sequence[int]) -> None:
        numbers = zlib.crc32(array("q", input_ids))
        for tensor in (batch.query_lens, batch.num_computed_tokens):
            numbers = zlib.crc32(tensor.numpy().tobytes(), numbers)
        self._ranks.has_run(numbers)

    @contextlib.contextmanager
    def calling_only_steps(self, only_steps: bool) -> Iterator[None]:
        self._only_steps = only_steps
        try:
            yield
        finally:
            self._only_steps = self._ranks.is_quiet = False

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._agree("on_token", portable(error), LEAVE_LIMIT)
            raise

    def leave(self) -> None:
        with contextlib.suppress(RankError):
            self._agree("close", limit=LEAVE_LIMIT)
        self._ranks.close()


def join_ranks(
    step: Any,
    group: Any,
    time_limit: float,
    inbox: Inbox,
    kv_cache: KVCache | HybridCache,
    stats: GenerationStats,
    sizes: tuple[Any, ...],
) -> OneRank:
    """The coordination of a loop with the loops of the other ranks of its group, by default the step's
    ``process_group``."""
    own = getattr(step, "process_group", None)
    group = own if group is None else group
    expect(group is None or hasattr(group, "size"), "group", "a process group of torch.distributed", group)
    is_time = isinstance(time_limit, Real) and time_limit > 0
    expect(is_time, "rank_time_limit", "seconds, more than 0", describe_setting(time_limit))
    if group is None or group.size() == 1:
        return OneRank()
    collectives = getattr(step, "collective_groups", () if own is None else (own,))
    pools = tuple(
        (pool.num_blocks, pool.block_size, len(pool.layers), *([pool.shard.size] * (pool.shard.size > 1)))
        for pool in kv_cache.pools
    )
    ranks = Ranks(group, time_limit=time_limit, collectives=collectives)
    return ManyRanks(ranks, group, inbox, kv_cache, stats, (*sizes, pools))


def agree_on(calls: Sequence[Call]) -> Call:
    """The call that all ranks make: rank 0's, with the aborts of all.

    Raises:
        ApartError: others make another call, have another state, or submitted requests that rank 0 did not.
        Exception: the error of a rank that has left.
    """
    first = calls[0]
    for rank, call in enumerate(calls):
        if call.error is not None:
            if hasattr(call.error, "add_note"):  # Python 3.11
                call.error.add_note(f"raised by rank {rank} of {len(calls)}")
            raise call.error
    for rank, call in enumerate(calls):
        if call.name not in (first.name, FOLLOW):
            raise ApartError(
                f"rank {rank} called {call.name} where rank 0 called {first.name}: expected the same calls on all ranks"
                " of a loop, or follow() on all others than rank 0"
            )
        if call.state != first.state:
            raise ApartError(
                f"rank {rank} is at {call.state} where rank 0 is at {first.state} (sizes of the loop; or its steps, and"
                " used blocks of the cache): expected the same model, cache and calls on all ranks"
            )
        if call.submitted not in ((), first.submitted):
            raise ApartError(
                f"rank {rank} submitted requests of {[len(each.tokens) for each in call.submitted]} tokens where rank 0"
                f" submitted {[len(each.tokens) for each in first.submitted]}: expected the same requests on all ranks,"
                " or those of rank 0 alone"
            )
    return first._replace(aborted=tuple(sorted({each for call in calls for each in call.aborted})))
