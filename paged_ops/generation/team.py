"""The loops of several ranks as one: the same calls, the same requests and aborts, rank 0's tokens.

Either all ranks call the same, with the same requests; or rank 0 alone gets requests, and the others call ``follow``.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paged_ops.generation.request import Request
from paged_ops.generation.settings import Settings
from paged_ops.metadata import Batch

if TYPE_CHECKING:
    from paged_ops.generation.loop import GenerationLoop
    from paged_ops.parallel.rendezvous import Ranks

Result = TypeVar("Result")

FOLLOW = "follow"  # whatever rank 0 calls
LEAVE_LIMIT = 5.0  # seconds for which a leaving rank waits for the others


class Submission(NamedTuple):
    """A prompt as ranks describe it to each other: what decides about blocks and ends, but not about tokens."""

    request_id: int  # of the first sample
    tokens: tuple[int, ...]
    settings: Settings
    extra_key: Hashable

    @classmethod
    def of(cls, request: Request) -> Submission:
        prompt = tuple(request.tokens[: request.num_prompt])
        return cls(request.request_id, prompt, request.settings.without_sampling(), request.extra_key)


class Call(NamedTuple):
    """What one rank calls, and its state."""

    name: str
    state: tuple[Any, ...]  # must be equal on all ranks
    submitted: tuple[Submission, ...] = ()  # since the last call
    aborted: tuple[int, ...] = ()
    error: BaseException | None = None  # with which the rank leaves a call that others may continue


class Team:
    """What one loop knows of the loops of the other ranks.

    Attributes:
        submitted: requests that the other ranks do not know yet.
        aborted: requests that end as soon as the other ranks know of it.
        only_steps: whether this rank now calls steps, one after the other, and nothing in between. If all do, they
            meet once per step, not twice.
    """

    def __init__(self, loop: GenerationLoop, ranks: Ranks) -> None:
        self._loop, self._ranks = loop, ranks
        self.submitted: list[Request] = []
        self.aborted: set[Request] = set()
        self.only_steps = False
        pools = tuple(
            (pool.num_blocks, pool.block_size, len(pool.layers), *([pool.shard.size] * (pool.shard.size > 1)))
            for pool in loop.kv_cache.pools
        )
        sizes = loop.max_num_seqs, loop.max_num_tokens, loop.max_model_len, str(loop.graph_mode), pools
        ranks.meet(Call("GenerationLoop", sizes), agree_on)

    @staticmethod
    def of(loop: GenerationLoop, step: Any, group: Any, time_limit: float) -> Team | None:
        """The team of a loop whose step runs on several ranks."""
        group = getattr(step, "process_group", None) if group is None else group
        if group is None or group.size() == 1:
            return None
        from paged_ops.parallel.rendezvous import Ranks

        own = getattr(step, "process_group", None)
        collectives = getattr(step, "collective_groups", () if own is None else (own,))
        return Team(loop, Ranks(group, time_limit=time_limit, collectives=collectives))

    @property
    def leads(self) -> bool:
        return self._ranks.leads

    @property
    def lost(self) -> bool:
        """Whether the ranks cannot go on."""
        return self._ranks.lost is not None

    def meet(self, name: str, error: BaseException | None = None, limit: float | None = None) -> str:
        """To be called before each call: all ranks then have the same requests and aborts. Returns the call of rank
        0."""
        if name == "step" and self._ranks.is_quiet:
            self._ranks.is_quiet = False
            return name
        loop = self._loop
        loop.take_in()
        state = loop.stats.steps, loop.kv_cache.num_used_blocks
        submitted, aborting = tuple(map(Submission.of, self.submitted)), self.aborted.copy()
        aborted = tuple(request.request_id for request in aborting)
        if name == FOLLOW:
            limit = float(2**24)  # seconds: rank 0 may have nothing to do
        agreed = self._ranks.meet(Call(name, state, submitted, aborted, error), agree_on, limit=limit)
        if agreed.submitted != submitted:
            loop.adopt(agreed.submitted)
        self.submitted.clear()
        self.aborted -= aborting  # others may have come meanwhile
        loop.abort_together(agreed.aborted)
        return agreed.name

    def agree(self, run: Callable[[], Result], limit: float | None = None) -> Result:
        """Runs a function on all ranks. On all, returns rank 0's result or raises the first error of any rank."""
        loop = self._loop

        def is_quiet() -> bool:
            return self.only_steps and not loop.has_arrivals and not self.submitted and not self.aborted

        return self._ranks.agree(run, limit=limit, is_quiet=is_quiet)

    @contextlib.contextmanager
    def calling_only_steps(self) -> Iterator[None]:
        """Inside it this rank does nothing between steps, and all ranks leave it after the same one."""
        self.only_steps = True
        try:
            yield
        finally:
            self.only_steps = self._ranks.is_quiet = False

    def has_run(self, batch: Batch, input_ids: Sequence[int]) -> None:
        """Inside of :meth:`agree`: records that the model has run this step."""
        numbers = zlib.crc32(array("q", input_ids))
        for tensor in (batch.query_lens, batch.num_computed_tokens):
            numbers = zlib.crc32(tensor.numpy().tobytes(), numbers)
        self._ranks.has_run(numbers)

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """An exception inside it is also raised by the others' next call."""
        try:
            yield
        except BaseException as error:
            from paged_ops.parallel.rendezvous import portable

            with contextlib.suppress(Exception):
                self.meet("on_token", portable(error), LEAVE_LIMIT)
            raise

    def leave(self) -> None:
        """Closes the loops of all ranks, without waiting for missing ones."""
        from paged_ops.parallel.rendezvous import RankError

        with contextlib.suppress(RankError):
            self.meet("close", limit=LEAVE_LIMIT)
        self._ranks.close()


def agree_on(calls: Sequence[Call]) -> Call:
    """The call that all ranks make: that of rank 0, with the aborts of all.

    Raises:
        ApartError: others make another call, have another state, or submitted requests that rank 0 did not.
        Exception: the error with which a rank has left.
    """
    from paged_ops.parallel.rendezvous import ApartError

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
