"""Rendezvous of the ranks that generate together: they make the same calls, use rank 0's tokens, and fail together.

Each rank of a sharded model runs its own ``GenerationLoop``. Given the same requests, all loops make the same
decisions. Anything that may differ goes through rank 0: the others send it a message, and it answers all of them. A
step has two rendezvous: one before it, about requests, and one after it, about tokens and errors. The first is skipped
if all ranks announced at the last step that they only call the next step. A step that is launched before the tokens of
the one before are read has one about its errors and a later one about its tokens.

The messages use gloo on the CPU, whatever the model's collectives use, so they arrive while collectives are stuck. A
rank that dies closes its connections, which the others notice at once. A late rank is named when the time limit is
over. As in other engines, rank 0 is the driver and the others are workers.
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

_HEAD = 2048  # bytes of the first packet, with the message's length; most messages fit in it
_UNLIMITED = timedelta(days=365).total_seconds()
_GRACE = 1.0  # seconds to wait for another rank in any case


class RankError(RuntimeError):
    """A rank is gone or late, or made different calls; or its error cannot be raised here."""


class ApartError(RankError):
    """The ranks diverged, and cannot continue."""


class Failure(NamedTuple):
    """The error of one rank."""

    rank: int
    when: float  # time.time()
    error: BaseException


class _Report(NamedTuple):
    """The result of a rank, or its error."""

    failure: Failure | None
    done: int | None  # the digest of the step, if the model completed it
    result: Any
    is_quiet: bool  # see Ranks.is_quiet


class Ranks:
    """The ranks of one process group. Make it on all of them, at the same point.

    Args:
        group: the process group; each of its ranks runs the same loop.
        time_limit: seconds after which a missing rank is named, and collectives of the model are aborted.
        collectives: the groups of the model's collectives, if they differ from ``group``.

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks.
        lost: why the ranks cannot continue, or None.
        is_quiet: whether all ranks announced, with the result of the last step, that they only call the next step.
            Then no rendezvous is needed before it.
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
        is_subset = 1 + len(others) < dist.get_world_size()  # only some ranks of the job make these groups
        self._pairs = {
            rank: dist.new_group(
                [leader, member],
                timeout=timedelta(seconds=_UNLIMITED),
                backend="gloo",
                use_local_synchronization=is_subset,
            )
            for rank, member in enumerate(others, 1)
            if not is_subset or self.rank in (0, rank)
        }
        self._unsent: list[tuple[Any, Tensor]] = []  # answers to ranks that were missing
        self._collectives = Collectives({id(each): each for each in (group, *collectives)}.values())
        self._done: int | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        self._collectives.close()

    def check(self) -> None:
        """Raise RankError if the ranks cannot continue."""
        if self.lost is not None:
            raise RankError(
                f"the ranks of this loop cannot continue ({self.lost}): create the groups and the loop again"
            )

    def rendezvous(
        self,
        message: Any,
        merge: Callable[[list[Any]], Result],
        *,
        limit: float | None = None,
        since: float | None = None,
    ) -> Result:
        """Send a message to rank 0, merge all messages there in the order of ranks, and return the result on all ranks.

        Args:
            message: pickled, like the result of ``merge``.
            merge: called on rank 0; its exceptions are raised on all ranks.
            limit: seconds to wait for the others; by default the time limit.
            since: start of the wait (``time.monotonic()``), by default now.

        Raises:
            RankError: a rank is gone or late.
        """
        self.check()
        limit = self.time_limit if limit is None else limit
        until = (time.monotonic() if since is None else since) + limit
        if self.leads:
            answer = self._answer(message, merge, max(until, time.monotonic() + _GRACE))
        else:
            # rank 0 may wait equally long for another rank, and may have started later
            answer = self._ask(message, until + 0.5 * limit + _GRACE)
        is_raised, given, lost = pickle.loads(answer)
        if lost is not None:
            self.lost = lost
            self._collectives.abort()
        if is_raised:
            raise given
        return given

    def agree(
        self,
        run: Callable[[], Result],
        *,
        limit: float | None = None,
        is_quiet: Callable[[], bool] = lambda: False,
        has_collectives: bool = True,
    ) -> Result:
        """Run part of a step on all ranks and return rank 0's result on all; other ranks' functions may return None.

        Afterwards ``is_quiet()`` says whether this rank only calls the next step. If the function does not have
        collectives, the ranks can continue after its error.

        Raises:
            Exception: the earliest exception of any rank, on all ranks, with a note that names its rank. That rank
                raises the original exception.
            RankError: a rank is gone or late.
        """
        self.check()
        limit = self.time_limit if limit is None else limit
        since, failure = time.monotonic(), None
        self._done, self.is_quiet = None if has_collectives else 0, False
        result: Any = None
        try:
            with self._collectives.limited(limit):
                result = run()
        except BaseException as error:
            failure = Failure(self.rank, time.time(), error)
        if failure is None and self._collectives.aborted:  # what the device computed is worth nothing
            waited = RankError(f"rank {self.rank} of {self.size} waited {limit:g} s for its device")
            failure = Failure(self.rank, time.time(), waited)
        done = None if self._collectives.aborted else self._done
        reported = None if failure is None else failure._replace(error=portable(failure.error))
        mine = result if self.leads and failure is None else None
        report = _Report(reported, done, mine, failure is None and is_quiet())
        try:
            # others may have waited in a collective for the full limit
            result, self.is_quiet = self.rendezvous(report, _merge, limit=1.25 * limit + _GRACE, since=since)
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
        """Call it inside the function of :meth:`agree`, after the model's collectives. The digest of the step must be
        equal on all ranks."""
        self._done = digest

    # Messages

    def _answer(self, message: Any, merge: Callable[[list[Any]], Any], until: float) -> bytes:
        """Rank 0's side of a rendezvous."""
        others = range(1, self.size)
        receiving = {rank: self._receiver(rank) for rank in others}
        messages: list[Any] = [message]
        absent: dict[int, str] = {}
        for rank in others:
            received = receiving[rank](until)
            if isinstance(received, str):
                absent[rank] = received
            else:
                messages.append(pickle.loads(received))
        answer: tuple[bool, Any, str | None]  # (whether it is raised, the answer, why the ranks cannot continue)
        if absent:
            reason = "; ".join(f"rank {rank} of {self.size} is {why}" for rank, why in absent.items())
            answer = True, RankError(reason), reason
        else:
            try:
                self._expect_same_call(messages)
                answer = False, merge(messages), None
            except _FailedError as failed:
                answer = True, failed, failed.lost
            except ApartError as error:
                answer = True, error, str(error)
            except Exception as error:
                answer = True, error, None
        data = pickle.dumps(answer)
        for rank in others:
            with contextlib.suppress(RuntimeError):  # the next rendezvous then misses this rank
                sent = self._send(data, rank)
                if rank in absent:
                    self._unsent += sent
                    continue
                for work, _ in sent:
                    _wait(work, time.monotonic() + self.time_limit)
        return data

    def _expect_same_call(self, messages: list[Any]) -> None:
        for rank, other in enumerate(messages):
            if type(other) is not type(messages[0]):
                raise ApartError(f"rank {rank} of {self.size} left a step that the others are in, or started one alone")

    def _ask(self, message: Any, until: float) -> bytes:
        """The other ranks' side of a rendezvous."""
        try:
            receiving = self._receive(0)
            sent = self._send(pickle.dumps(message), 0)
            answer = self._received(0, *receiving, until)
            del sent  # kept alive until it was sent
            return answer
        except RuntimeError as error:
            reason = f"rank 0 of {self.size} is {self._why(error)}"
            return pickle.dumps((True, RankError(reason), reason))

    def _pair(self, rank: int) -> tuple[Any, int]:
        """The group with another rank, and that rank's number in it."""
        return (self._pairs[rank], 1) if self.leads else (self._pairs[self.rank], 0)

    def _receiver(self, rank: int) -> Callable[[float], bytes | str]:
        """Start to receive a rank's message. Returns a function that waits for it, or returns why there is none."""

        def wait(until: float) -> bytes | str:
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
        return wait

    def _receive(self, rank: int) -> tuple[Tensor, Any]:
        head = torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
        group, other = self._pair(rank)
        return head, dist.irecv(head, group=group, group_src=other)

    def _received(self, rank: int, head: Tensor, work: Any, until: float) -> bytes:
        _wait(work, until)
        size = int.from_bytes(bytes(head[:8].tolist()), "little")
        data = bytes(head[8 : 8 + size].tolist())
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8, device="cpu")
            group, other = self._pair(rank)
            _wait(dist.irecv(rest, group=group, group_src=other), until)
            data += bytes(rest.tolist())
        return data

    def _send(self, data: bytes, rank: int) -> list[tuple[Any, Tensor]]:
        """Start to send. Returns the work and its buffers, which must stay alive until the data was sent."""
        room = _HEAD - 8
        head = (len(data).to_bytes(8, "little") + data[:room]).ljust(_HEAD, b"\0")
        parts = [head, data[room:]] if len(data) > room else [head]
        group, other = self._pair(rank)
        sent = []
        for each in parts:
            part = torch.frombuffer(bytearray(each), dtype=torch.uint8)
            sent.append((dist.isend(part, group=group, group_dst=other), part))
        return sent

    def _why(self, error: RuntimeError) -> str:
        if "Timed out" in str(error):
            return f"late: no message within the limit of {self.time_limit:g} s"
        return "gone: its connection is closed"


class Collectives:
    """The groups of a model's collectives, aborted after a time limit.

    Gloo has its own time limit. Work of other backends waits on the device for ever, so a thread of this class aborts
    their groups; the thread that runs the step may be waiting for the device.

    Attributes:
        aborted: whether the groups were aborted and cannot be used any more.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        groups = list(groups)
        self.aborted = False
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
        """Abort collectives that take longer than this inside the ``with`` block."""
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
        """Abort the groups whose work waits on the device, and kernels that wait for data from other ranks."""
        self.aborted = True
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


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group moves tensors of this device in the order of its stream, without waiting on the host for a
    GPU."""
    return bool(_backends_of(group, "gloo" if device.type == "cpu" else "nccl"))


def _backends_of(group: dist.ProcessGroup, name: str) -> list[Any]:
    """A group's backends with this name; a group may have one backend per type of device."""
    found: dict[str, Any] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == name:
            found[str(device)] = backend
    return list(found.values())


class _FailedError(Exception):
    """The merged result of reports with failures."""

    def __init__(self, first: Failure, lost: str | None) -> None:
        super().__init__(first, lost)
        self.first, self.lost = first, lost


def _merge(reports: list[_Report]) -> tuple[Any, bool]:
    """Rank 0's result and whether all ranks are quiet, if no rank failed and all ran the same step."""
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
    # Otherwise a rank may have left others waiting in a collective, and its group is unusable.
    is_whole = None not in done or (
        len(failures) == len(reports) and all(_same(first.error, each.error) for each in failures)
    )
    lost = f"rank {first.rank} of {len(reports)} failed during a step: {type(first.error).__name__}: {first.error}"
    raise _FailedError(first, None if is_whole else lost)


def _same(error: BaseException, other: BaseException) -> bool:
    return type(error) is type(other) and str(error) == str(other)


def portable(error: BaseException) -> BaseException:
    """The exception in a picklable form that other ranks can raise."""
    plain = RankError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):  # Ctrl-C is for one rank only
        return plain
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        return plain
    return copied if _same(copied, error) else plain


def _wait(work: Any, until: float) -> None:
    work.wait(timedelta(seconds=max(until - time.monotonic(), 0.01)))
