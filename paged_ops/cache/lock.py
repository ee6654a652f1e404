"""The lock of a cache: one call at a time changes it, whichever thread, signal handler or finalizer makes the call."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class CacheLock:
    """A fair lock with deferred calls, for the calls that change one cache. A waiting thread waits for at most one call
    of each other thread.

    Python runs signal handlers and finalizers between any two bytecodes of a call, in the thread that holds the lock.
    A lock cannot exclude them. So a change that is requested while the lock is held runs just before its release.

    Whether this thread holds the lock is read from the stack: an interrupt cannot corrupt the stack, as it could a
    flag. A lock that an interrupted call did not release is released by the next call of its thread.

    Attributes:
        issued: an event after the device's work of the last step of any loop, which may still run. Only
            :meth:`wait_for_issued` orders later work after it, as that may be on another stream.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._first_waiting = threading.RLock()  # held by the thread that gets the lock next, which makes it fair
        self._deferred: deque[Callable[[], object]] = deque()
        self.issued: torch.cuda.Event | None = None

    def wait_for_issued(self, device: torch.device) -> None:
        """The current stream of the device waits for the work of the last step."""
        if self.issued is not None:
            torch.cuda.current_stream(device).wait_event(self.issued)

    @property
    def is_held(self) -> bool:
        """Whether this thread holds the lock, or waits for it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _LOCKED and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def run(self, call: Callable[[], Result]) -> Result:
        """Makes a call with the lock held, and returns its result.

        Raises:
            RuntimeError: this thread holds the lock already.
        """
        if self.is_held:
            raise RuntimeError(
                "expected no step, warm_up or reset within another one of a loop on the same cache; there a model, a"
                " processor or a signal handler can submit, abort and close"
            )
        try:
            result: Result = self._locked(call)
            return result
        finally:
            self._run_late()

    def run_or_defer(self, call: Callable[[], object], *, waits: bool = True) -> None:
        """Makes a call with the lock held: now, or before the release if this thread holds the lock already. Without
        ``waits``, also before another thread's release. An interrupt may cause the call to be made twice."""
        self._deferred.append(call)
        if waits and not self.is_held:
            self._locked(_nothing)
        self._run_late()

    def _locked(self, call: Callable[[], Any], waits: bool = True) -> Any:
        """Runs the deferred calls, and ``call``, with the lock held. None if another thread holds it and ``waits`` is
        false."""
        try:
            self._release()
            if waits:
                with self._first_waiting:
                    self._lock.acquire()
            elif not self._lock.acquire(blocking=False):
                return None
            try:
                self._run_deferred()
                return call()
            finally:
                self._run_deferred()
        finally:
            self._release()

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred[0]()
            self._deferred.popleft()  # an interrupt before this line makes the call twice

    def _run_late(self) -> None:
        """Runs the calls that were deferred between the last check and the release."""
        while self._deferred and not self.is_held and self._locked(_nothing, waits=False):
            pass

    def _release(self) -> None:
        try:
            while True:
                self._lock.release()
        except RuntimeError:  # this thread does not own it
            pass

    def __reduce__(self) -> tuple[type[CacheLock], tuple[()]]:
        return CacheLock, ()  # a copy of the cache has a lock of its own


def _nothing() -> bool:
    return True


_LOCKED = CacheLock._locked.__code__
