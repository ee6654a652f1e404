"""Kernels compiled before their first launch, in parallel, by processes that fill Triton's cache on disk.

Triton compiles mostly in Python and under its lock: two threads compile five kernels in the time of one thread. So one
process is started that imports this package and never touches a GPU. It forks itself for each kernel, and the fork
compiles for the target of the job. The first launch then finds the kernel in Triton's cache; a launch that comes
while its kernel is being compiled waits for it, and one that comes before compiles by itself, as without this module.

A thread *notes* kernels by running calls in :func:`noting`: its launches then only record what they would
compile. CUDA only: elsewhere nothing is precompiled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler.compiler import make_backend

MOST_PROCESSES = 16
# A kernel that takes longer than this many seconds is compiled by the process that waits for it.
MOST_SECONDS = 120.0
HEADER = struct.Struct("!I")


class Place(NamedTuple):
    """Tensor properties that specialise a kernel."""

    dtype: torch.dtype
    aligned: bool  # to 16 bytes


class Job(NamedTuple):
    """A kernel to compile, and for what: all that distinguishes it from other kernels, as values that pickle."""

    module: str
    name: str
    target: tuple[str, Any, int]  # backend, architecture, threads of a warp
    compiler: str  # its version in Triton's keys, which a process computes once
    kind: type  # of the tuple of tensors
    places: tuple[Place | None, ...]
    numbers: tuple[tuple[type, bool], ...]  # whether an int needs 64 bits
    more: tuple[Any, ...]  # numbers and None, or what is compiled of a descriptor, as bytes
    constants: tuple[tuple[str, Any], ...]


def job_of(
    kernel: Any,
    tensors: Sequence[Tensor | None],
    addresses: Sequence[int],
    numbers: Sequence[Any],
    more: Sequence[Any],
    constants: dict[str, Any],
) -> Job:
    """The job of a launch on the current device."""
    target = triton.runtime.driver.active.get_current_target()
    places = zip(tensors, addresses, strict=False)
    return Job(
        kernel.fn.__module__,
        kernel.fn.__name__,
        (target.backend, target.arch, target.warp_size),
        make_backend(target).hash(),
        type(tensors),
        tuple(None if each is None else Place(each.dtype, address % 16 == 0) for each, address in places),
        tuple(map(_width, numbers)),
        tuple(_width(each) if each is None or isinstance(each, int) else _described(each) for each in more),
        tuple(constants.items()),
    )


def _width(number: Any) -> tuple[type, bool]:
    return type(number), isinstance(number, int) and abs(number) >= 1 << 31


def _described(descriptor: Any) -> bytes:
    """Of a tensor descriptor its type, dtype and fields, with the dimensions of its tensor as numbers that say nothing:
    kernels are compiled for its block alone."""
    fields = {**vars(descriptor)}
    rank = len(fields["block_shape"])
    fields |= {"shape": [64] * rank, "strides": [64] * (rank - 1) + [1], "block_shape": list(fields["block_shape"])}
    return pickle.dumps((type(descriptor), fields.pop("base").dtype, fields))


# Noting


Jobs = dict[Job, dict[torch.device, Callable[[], None]]]  # with functions that load the kernel, for each device


class _Notes(NamedTuple):
    jobs: Jobs
    sizes: tuple[tuple[int, int], ...]
    done: dict[int, Any]  # what has noted its sizes


_notes: dict[int, _Notes] = {}  # by thread


@contextlib.contextmanager
def noting(sizes: Sequence[tuple[int, int]] = ()) -> Iterator[Jobs]:
    """Inside it launches of this thread are noted, not made. ``sizes``: attention also notes the
    launches of calls with these numbers of tokens and sequences."""
    thread = threading.get_ident()
    noted = _notes[thread] = _Notes({}, tuple(sizes), {})
    try:
        yield noted.jobs
    finally:
        del _notes[thread]


def notes() -> Jobs | None:
    """What this thread has noted; None if it launches."""
    noted = _notes.get(threading.get_ident()) if _notes else None
    return None if noted is None else noted.jobs


def sizes_for(owner: object) -> tuple[tuple[int, int], ...]:
    """The sizes of :func:`noting`, once for each owner."""
    noted = _notes.get(threading.get_ident()) if _notes else None
    if noted is None or id(owner) in noted.done:
        return ()
    noted.done[id(owner)] = owner
    return noted.sizes


# Compiling


class _State:
    """Of a job: when it is done, why the kernel does not compile, and in which folder of Triton's cache it is. Done
    without either: it is left to this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment  # Triton's variables, for the process that compiles
        self.done = threading.Event()
        self.sent = False
        self.error: str | None = None
        self.folder: str | None = None


class Compiler:
    """A process that compiles. One is enough; it ends with this one."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._owner = os.getpid()
        self.states: dict[Job, _State] = {}
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._next = 0
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # forks need no more
        path = os.pathsep.join(each for each in sys.path if each)
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.precompile_workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process
        )
        atexit.register(self.end)
        threading.Thread(target=self._listen, name="paged_ops compiler", daemon=True).start()

    @property
    def lives(self) -> bool:
        return self._owner == os.getpid() and self._server.poll() is None

    def end(self) -> None:
        if self._owner != os.getpid():  # a fork of the owner
            return
        with contextlib.suppress(OSError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def submit(self, jobs: Collection[Job]) -> list[_State]:
        """Compile what is not known yet, in this order, in the environment of now: torch.compile changes it."""
        environment = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
        environment["TRITON_CACHE_DIR"] = triton.knobs.cache.dir
        with self._lock:
            for job in jobs:
                if job not in self.states:
                    self.states[job] = _State(environment)
                    self._waiting.append(job)
            self._send()
            return [self.states[job] for job in jobs]

    def wait(self, job: Job) -> str | None:
        """Wait for a job that is being compiled. Returns the folder of Triton's cache where it is; None if it is
        nowhere."""
        with self._lock:
            state = self.states.get(job)
            if state is None:
                return None
            if not state.sent:  # this process compiles it
                self._waiting.remove(job)
                state.sent = True
                state.done.set()
                return None
        if not state.done.wait(MOST_SECONDS) or state.error:
            return None
        return state.folder

    def _send(self) -> None:
        """As many jobs as there may be processes."""
        while self._waiting and len(self._running) < self.processes:
            job = self._waiting.popleft()
            state = self.states[job]
            state.sent, state.folder = True, state.environment["TRITON_CACHE_DIR"]
            message = pickle.dumps((self._next, state.environment, job))
            self._running[self._next] = job
            self._next += 1
            try:
                self._server.stdin.write(HEADER.pack(len(message)) + message)  # type: ignore[union-attr]
                self._server.stdin.flush()  # type: ignore[union-attr]
            except OSError:
                return  # the thread that listens will notice

    def _listen(self) -> None:
        out: Any = self._server.stdout
        while True:
            header = out.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            number, error = pickle.loads(out.read(HEADER.unpack(header)[0]))
            with self._lock:
                state = self.states[self._running.pop(number)]
                state.error = error
                state.done.set()
                self._send()
        with self._lock:  # it has ended
            for job in (*self._running.values(), *self._waiting):
                state = self.states[job]
                state.sent, state.folder = True, None
                state.done.set()
            self._running.clear()
            self._waiting.clear()


_compiler: Compiler | None = None
_starting = threading.Lock()


def can_precompile() -> bool:
    """Whether kernels can be precompiled here: on CUDA, with a second processor."""
    on_cuda = torch.cuda.is_available() and torch.version.hip is None and not triton.knobs.runtime.interpret
    return on_cuda and len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False


def is_running() -> bool:
    """Whether there is a process that compiles, and this thread launches."""
    return _compiler is not None and _compiler.lives and notes() is None


def compiler() -> Compiler:
    """The process that compiles, started if there is none."""
    global _compiler
    with _starting:
        if _compiler is None or not _compiler.lives:
            of_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: each rank of this machine has one
            _compiler = Compiler(max(1, min((len(os.sched_getaffinity(0)) - 1) // of_ranks, MOST_PROCESSES)))
        return _compiler


@contextlib.contextmanager
def in_cache(job_arguments: tuple[Any, ...]) -> Iterator[None]:
    """Inside it a launch finds its kernel, if it was compiled ahead. Inductor changes the folder of Triton's cache when
    it first loads a kernel, so it may be in another one."""
    folder = _compiler.wait(job_of(*job_arguments)) if _compiler is not None and _compiler.states else None
    if folder is None or folder == triton.knobs.cache.dir:
        yield
        return
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def wait_for(states: Sequence[_State], limit: float) -> None:
    """Wait for jobs, at most ``limit`` seconds."""
    end = time.monotonic() + limit
    for state in states:
        state.done.wait(max(end - time.monotonic(), 0.0))
