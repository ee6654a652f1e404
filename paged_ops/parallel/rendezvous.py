"""The ranks of a group that generate together: they make the same calls, use rank 0's tokens, and fail together.

Each rank of a sharded model runs a ``GenerationLoop`` of its own. From the same requests all loops make the same
decisions. What may differ goes through rank 0: the others send it a message, and it answers all. A step has two such
meetings: one before it, about requests, and one after it, about tokens and errors. The first is left out where all
ranks said at the last step that they call nothing but the next.

The messages go by gloo, between the hosts' processors, whatever the model's collectives use, so that they arrive while
those are stuck. A rank that died closes its connections, which is seen at once. A late rank is named when the time
limit is over. The idea of a leader whose decisions are followed is that of every engine's driver and workers.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops.checks import expect
from paged_ops.parallel import symmetric

Result = TypeVar("Result")

_PART = 2048  # the first bytes of a message, sent with its length; most messages are not longer
_UNLIMITED = timedelta(days=365).total_seconds()
_GRACE = 1.0  # seconds to wait for another rank in any case


class RankError(RuntimeError):
    """A rank is gone or late, or made other calls; or it failed with an error that cannot be raised here."""


class ApartError(RankError):
    """The ranks did not do the same, and cannot go on."""


class Failure(NamedTuple):
    """What one rank raised."""

    rank: int
    when: float  # time.time()
    error: BaseException


class _Report(NamedTuple):
    """The result of a rank, or its error."""

    failure: Failure | None
    done: int | None  # the digest of the step, if the model has run it to its end
    result: Any
    is_quiet: bool  # see Ranks.is_quiet


class Ranks:
    """The ranks of one process group, as one of them sees them. Make it on all of them, at the same point.

    Args:
        group: the process group; each of its ranks runs the same loop.
        time_limit: seconds after which a missing rank is named, and collectives of the model are aborted.
        collectives: the groups of the model's collectives, if they are others.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        lost: why the ranks cannot go on, or None.
        is_quiet: whether all ranks said, with the result of the last step, that the next step is all that they call
            next: then they need not meet before it.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, time_limit: float, collectives: Iterable[dist.ProcessGroup] = ()
    ) -> None:
        expect(time_limit > 0, "rank_time_limit", "seconds, more than 0", time_limit)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        expect(self.rank >= 0, "group", "a process group with this process in it", "another")
        self.time_limit = time_limit
        self.lost: str | None = None
        self.is_quiet = False
        # One group per pair: if one rank is late, gloo closes all connections of its group.
        leader, *others = dist.get_process_group_ranks(group)
        is_part = 1 + len(others) < dist.get_world_size()  # only some ranks of the job make these groups
        self._pairs = {
            rank: dist.new_group(
                [leader, member],
                timeout=timedelta(seconds=_UNLIMITED),
                backend="gloo",
                use_local_synchronization=is_part,
            )
            for rank, member in enumerate(others, 1)
            if not is_part or self.rank in (0, rank)
        }
        self._unsent: list[tuple[Any, Tensor]] = []  # answers to missing ranks
        self._collectives = Collectives({id(each): each for each in (group, *collectives)}.values())
        self._done: int | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        self._collectives.close()

    def check(self) -> None:
        """Raises RankError if the ranks cannot go on."""
        if self.lost is not None:
            raise RankError(
                f"the ranks of this loop can go on no more ({self.lost}): make the groups and the loop anew"
            )

    def meet(
        self,
        message: Any,
        merge: Callable[[list[Any]], Result],
        *,
        limit: float | None = None,
        since: float | None = None,
    ) -> Result:
        """Sends a message to rank 0, and returns on all ranks what rank 0 makes of all messages, in the order of ranks.

        Args:
            message: is pickled, as is the result of ``merge``.
            merge: called on rank 0; its exceptions are raised on all ranks.
            limit: seconds to wait for the others; by default the time limit.
            since: when they began to run (``time.monotonic()``), by default now.

        Raises:
            RankError: a rank is gone or late.
        """
        self.check()
        limit = self.time_limit if limit is None else limit
        until = (time.monotonic() if since is None else since) + limit
        if self.leads:
            answer = self._answer(message, merge, max(until, time.monotonic() + _GRACE))
        else:
            # rank 0 may wait as long for another rank, and may have begun later
            answer = self._ask(message, until + 0.5 * limit + _GRACE)
        is_raised, given, lost = pickle.loads(answer)
        if lost is not None:
            self.lost = lost
            self._collectives.abort()
        if is_raised:
            raise given
        return given

    def agree(
        self, run: Callable[[], Result], *, limit: float | None = None, is_quiet: Callable[[], bool] = lambda: False
    ) -> Result:
        """Run a part of a step on all ranks; returns rank 0's result on all. The function may return None on others.
        ``is_quiet`` is asked afterwards whether this rank calls the next step next.

        Raises:
            Exception: the first in time that any of them raised, on all of them, with a note that names its rank. On
                that rank itself it is the original exception.
            RankError: a rank is gone or late.
        """
        self.check()
        limit = self.time_limit if limit is None else limit
        since, failure = time.monotonic(), None
        self._done, self.is_quiet = None, False
        result: Any = None
        try:
            with self._collectives.limited(limit):
                result = run()
        except BaseException as error:
            failure = Failure(self.rank, time.time(), error)
        done = None if self._collectives.given_up else self._done
        reported = None if failure is None else failure._replace(error=portable(failure.error))
        mine = result if self.leads and failure is None else None
        report = _Report(reported, done, mine, failure is None and is_quiet())
        try:
            # others may have waited in a collective for the whole limit
            result, self.is_quiet = self.meet(report, _merge, limit=1.25 * limit + _GRACE, since=since)
            return result
        except _FailedError as failed:
            first = failed.first
            if failure is not None and (first.rank == self.rank or _same(first.error, failure.error)):
                raise failure.error from None
            if hasattr(first.error, "add_note"):  # Python 3.11
                first.error.add_note(f"raised by rank {first.rank} of {self.size}")
            raise first.error from (None if failure is None else failure.error)
        except RankError as error:
            raise error from (None if failure is None else failure.error)

    def has_run(self, digest: int) -> None:
        """Call it inside of what :meth:`agree` runs, after the model's collectives, with a digest that is equal on all
        ranks if all is well."""
        self._done = digest

    # Messages

    def _answer(self, message: Any, merge: Callable[[list[Any]], Any], until: float) -> bytes:
        """Rank 0's part."""
        others = range(1, self.size)
        receiving = {rank: self._coming(rank) for rank in others}
        messages: list[Any] = [message]
        absent: dict[int, str] = {}
        for rank in others:
            came = receiving[rank](until)
            if isinstance(came, str):
                absent[rank] = came
            else:
                messages.append(pickle.loads(came))
        answer: tuple[bool, Any, str | None]  # (whether it is raised, the answer, why the ranks cannot go on)
        if absent:
            reason = "; ".join(f"rank {rank} of {self.size} is {why}" for rank, why in absent.items())
            answer = True, RankError(reason), reason
        else:
            try:
                self._expect_same_place(messages)
                answer = False, merge(messages), None
            except _FailedError as failed:
                answer = True, failed, failed.lost
            except ApartError as error:
                answer = True, error, str(error)
            except Exception as error:
                answer = True, error, None
        data = pickle.dumps(answer)
        for rank in others:
            with contextlib.suppress(RuntimeError):  # the rank is then missed at the next meeting
                sent = self._send(data, rank)
                if rank in absent:
                    self._unsent += sent
                    continue
                for work, _ in sent:
                    _wait(work, time.monotonic() + self.time_limit)
        return data

    def _expect_same_place(self, messages: list[Any]) -> None:
        for rank, other in enumerate(messages):
            if type(other) is not type(messages[0]):
                raise ApartError(f"rank {rank} of {self.size} left a step in which the others were, or began one alone")

    def _ask(self, message: Any, until: float) -> bytes:
        """The part of the other ranks."""
        try:
            receiving = self._receive(0)
            sent = self._send(pickle.dumps(message), 0)
            answer = self._received(0, *receiving, until)
            del sent  # kept until it was sent
            return answer
        except RuntimeError as error:
            reason = f"rank 0 of {self.size} is {self._why(error)}"
            return pickle.dumps((True, RankError(reason), reason))

    def _pair(self, rank: int) -> tuple[Any, int]:
        """The group with another rank, and that rank's number in it."""
        return (self._pairs[rank], 1) if self.leads else (self._pairs[self.rank], 0)

    def _coming(self, rank: int) -> Callable[[float], bytes | str]:
        """Begins to receive a rank's message. Returns a function that gives the message, or why there is none."""

        def came(until: float) -> bytes | str:
            try:
                if failed is not None:
                    raise failed
                return self._received(rank, *receiving, until)
            except RuntimeError as error:
                return self._why(error)

        failed = None
        try:
            receiving = self._receive(rank)
        except RuntimeError as error:
            failed = error
        return came

    def _receive(self, rank: int) -> tuple[Tensor, Any]:
        part = torch.empty(_PART, dtype=torch.uint8, device="cpu")
        group, other = self._pair(rank)
        return part, dist.irecv(part, group=group, group_src=other)

    def _received(self, rank: int, part: Tensor, work: Any, until: float) -> bytes:
        _wait(work, until)
        size = int.from_bytes(bytes(part[:8].tolist()), "little")
        data = bytes(part[8 : 8 + size].tolist())
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8, device="cpu")
            group, other = self._pair(rank)
            _wait(dist.irecv(rest, group=group, group_src=other), until)
            data += bytes(rest.tolist())
        return data

    def _send(self, data: bytes, rank: int) -> list[tuple[Any, Tensor]]:
        """The messages that are being sent, to be kept until they have arrived."""
        room = _PART - 8
        head = (len(data).to_bytes(8, "little") + data[:room]).ljust(_PART, b"\0")
        parts = [head, data[room:]] if len(data) > room else [head]
        group, other = self._pair(rank)
        sent = []
        for each in parts:
            part = torch.frombuffer(bytearray(each), dtype=torch.uint8)
            sent.append((dist.isend(part, group=group, group_dst=other), part))
        return sent

    def _why(self, error: RuntimeError) -> str:
        if "Timed out" in str(error):
            return f"late: nothing came of it within the limit of {self.time_limit:g} s"
        return "gone: its connection is closed"


class Collectives:
    """The groups of a model's collectives, which are aborted after a time limit.

    Gloo has a time limit of its own. Other backends leave work on the device that waits for ever. A thread of this
    class aborts their groups, as the thread that runs the step may be waiting for the device.

    Attributes:
        given_up: whether they were aborted, so that they cannot be used any more.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        groups = list(groups)
        self.given_up = False
        self._gloo = [backend for group in groups for backend in _backends_of(group, "gloo")]
        self._others = [group for group in groups if _backends_of(group, "nccl")]
        self._until: float | None = None
        self._ended = threading.Event()
        if self._others:
            arguments = weakref.ref(self), self._ended
            threading.Thread(target=_watch, args=arguments, name="paged_ops.ranks", daemon=True).start()
            weakref.finalize(self, self._ended.set).atexit = False

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Inside it, collectives are aborted after so many seconds."""
        before = [backend.options._timeout for backend in self._gloo]
        self._until = time.monotonic() + seconds
        for backend in self._gloo:
            backend._set_default_timeout(timedelta(seconds=seconds))
        try:
            yield
        finally:
            self._until = None
            for backend, limit in zip(self._gloo, before, strict=True):
                backend._set_default_timeout(limit)

    def is_late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def abort(self) -> None:
        """Aborts the groups whose work waits on the device, and kernels that wait for other ranks' memory."""
        self.given_up = True
        groups, self._others = self._others, []
        for group in groups:
            symmetric.abort(group)
            group.abort()

    def close(self) -> None:
        self._ended.set()


def _watch(collectives: weakref.ref[Collectives], ended: threading.Event) -> None:
    while not ended.wait(0.25):
        watched = collectives()
        if watched is None:
            return
        if watched.is_late():
            watched.abort()
            return
        del watched


def _backends_of(group: dist.ProcessGroup, name: str) -> list[Any]:
    """A group's backends of that name; a group may have one backend for each kind of device."""
    found: dict[str, Any] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == name:
            found[str(device)] = backend
    return list(found.values())


class _FailedError(Exception):
    """Carries the answer to reports with failures."""

    def __init__(self, first: Failure, lost: str | None) -> None:
        super().__init__(first, lost)
        self.first, self.lost = first, lost


def _merge(reports: list[_Report]) -> tuple[Any, bool]:
    """The result of rank 0, if no rank failed, and all ran the same; and whether all are quiet."""
    failures = [report.failure for report in reports if report.failure is not None]
    done = {report.done for report in reports}
    if not failures:
        for rank, report in enumerate(reports):
            if report.done != reports[0].done:
                raise ApartError(
                    f"rank {rank} ran another step than rank 0: expected the same model, cache and calls on all ranks"
                )
        return reports[0].result, all(report.is_quiet for report in reports)
    first = min(failures, key=lambda failure: failure.when)
    # Else some ranks may have left others in a collective, after which its group is unusable.
    is_whole = None not in done or (
        len(failures) == len(reports) and all(_same(first.error, each.error) for each in failures)
    )
    lost = f"rank {first.rank} of {len(reports)} failed within a step: {type(first.error).__name__}: {first.error}"
    raise _FailedError(first, None if is_whole else lost)


def _same(error: BaseException, other: BaseException) -> bool:
    return type(error) is type(other) and str(error) == str(other)


def portable(error: BaseException) -> BaseException:
    """The exception in a form that other ranks can raise."""
    plain = RankError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):  # Ctrl-C concerns one rank only
        return plain
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        return plain
    return copied if _same(copied, error) else plain


def _wait(work: Any, until: float) -> None:
    work.wait(timedelta(seconds=max(until - time.monotonic(), 0.01)))
