"""One call at a time changes a cache, whichever thread, signal handler or finalizer makes it."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """The turns of the calls that change one cache. A thread waits for its turn, at most one turn of each other thread.

    Python runs signal handlers and finalizers between any two bytecodes of a turn, in the thread that has it. A lock
    does not keep them out. So a change that is asked for within a turn is made at its end.

    Whether a call is within a turn is read from the stack. An interrupt cannot leave that wrong, as it could a flag. A
    lock that an interrupted call did not release is released by the next call of its thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._line = threading.RLock()  # the thread whose turn is next holds it, so that no other is faster
        self._later: deque[Callable[[], object]] = deque()  # changes that wait for the end of a turn

    @property
    def is_within(self) -> bool:
        """Whether this thread has a turn, or waits for one."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _TURN and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def run(self, call: Callable[[], Result]) -> Result:
        """Makes a call in a turn of its own, and returns its result.

        Raises:
            RuntimeError: this is called within a turn.
        """
        if self.is_within:
            raise RuntimeError(
                "expected no step, warm_up or reset within another one of a loop on the same cache; there a model, a"
                " processor or a signal handler can submit, abort and close"
            )
        results: list[Result] = []
        try:
            self._turn(lambda: results.append(call()), waits=True)
        finally:
            self._catch_up()
        return results[0]

    def change(self, call: Callable[[], object], *, waits: bool = True) -> None:
        """Makes a call that may be made twice: in a turn of its own, or at the end of the turn that it comes from.
        Without ``waits``, also at the end of another thread's turn."""
        self._later.append(call)
        if waits and not self.is_within:
            self._turn(None, waits=True)
        self._catch_up()

    def _turn(self, call: Callable[[], object] | None, waits: bool) -> bool:
        """Whether there was a turn. Without ``waits``, there is one only if no other thread has it."""
        try:
            self._release()
            if waits:
                with self._line:
                    self._lock.acquire()
            elif not self._lock.acquire(blocking=False):
                return False
            try:
                self._make_changes()
                if call is not None:
                    call()
            finally:
                self._make_changes()
            return True
        finally:
            self._release()

    def _make_changes(self) -> None:
        while self._later:
            self._later[0]()
            self._later.popleft()  # an interrupt before it makes the change twice

    def _catch_up(self) -> None:
        """Makes the changes that came between the end of a turn and the release of its lock."""
        while self._later and not self.is_within and self._turn(None, waits=False):
            pass

    def _release(self) -> None:
        try:
            while True:
                self._lock.release()
        except RuntimeError:  # it is not this thread's
            pass

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()  # a copy of the cache has turns of its own


_TURN = Turns._turn.__code__
