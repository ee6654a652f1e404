"""The process that compiles kernels for :mod:`paged_ops.lowerings.gpu.precompile`. It has no GPU: it names the target.

It reads jobs, forks itself for each, and the fork compiles it and writes how that ended. It has one thread, so that
forking is safe.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.compiler.compiler import make_backend

from paged_ops.lowerings.gpu.precompile import HEADER, Job, Place
from paged_ops.lowerings.gpu.target import FUSED, TRITON, settled

IDLE_SECONDS = 600.0  # after which it ends
LONGEST_MESSAGE = 2000  # of a pipe that several processes write; 4096 bytes are written at once


class Driver(GPUDriver):
    """Says which GPU kernels are compiled for, and can do nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1 << 30})
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError


def serve() -> None:
    """Until stdin ends, or there has been nothing to do for a while."""
    jobs = os.fdopen(os.dup(0), "rb", buffering=0)
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # what compilers print does not mix with the answers
        os.dup2(nothing, standard)
    numbers: dict[int, int] = {}  # of jobs, by process

    def reap(*_: Any) -> None:
        """Answers for a process that could not."""
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if not process:
                    return
                number = numbers.pop(process, None)
                if status and number is not None:
                    answer(out, number, f"the compiler ended with status {status}")

    signal.signal(signal.SIGCHLD, reap)
    while select.select([jobs], [], [], IDLE_SECONDS)[0]:
        header = exactly(jobs, HEADER.size)
        if header is None:
            return
        message = exactly(jobs, HEADER.unpack(header)[0])
        if message is None:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        process = os.fork()
        if not process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            try:
                run(message, out)
            finally:
                os._exit(1)
        numbers[process] = pickle.loads(message)[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def exactly(file: Any, count: int) -> bytes | None:
    """So many bytes; None if it ends before."""
    read = b""
    while len(read) < count:
        part = file.read(count - len(read))
        if not part:
            return None
        read += part
    return read


def run(message: bytes, out: int) -> None:
    """Compile one job, answer, and end the process."""
    number, environment, job = pickle.loads(message)
    error = None
    try:
        os.environ.update(environment)
        compile_job(job)
    except BaseException as failure:
        error = f"{job.name}: {type(failure).__name__}: {failure}"
    answer(out, number, error)
    os._exit(0)


def answer(out: int, number: int, error: str | None) -> None:
    message = pickle.dumps((number, error and error[:LONGEST_MESSAGE]))
    os.write(out, HEADER.pack(len(message)) + message)


def compile_job(job: Job) -> Any:
    """Compile a kernel into Triton's cache, as its first launch would."""
    target = GPUTarget(*job.target)
    triton.runtime.driver.set_active(Driver(target))
    # The version of ptxas is part of the key. Inductor may change which ptxas is used, after the other process has read
    # the version of one and before it launches this kernel.
    backend: Any = type(make_backend(target))
    backend.hash = lambda self: job.compiler
    kernel = settled(getattr(importlib.import_module(job.module), job.name))
    memory = torch.empty(256, dtype=torch.uint8, device="cpu")
    memory = memory[-memory.data_ptr() % 16 :][:128]

    def tensor(place: Place | None) -> Any:
        if place is None:
            return None
        start = 0 if place.aligned else place.dtype.itemsize
        return memory[start : start + 8 * place.dtype.itemsize].view(place.dtype)

    def described(each: Any) -> Any:
        if not isinstance(each, bytes):
            return number(each)
        kind, dtype, fields = pickle.loads(each)
        descriptor = object.__new__(kind)
        descriptor.__dict__.update(fields, base=tensor(Place(dtype, True)))
        return descriptor

    def number(each: tuple[type, bool]) -> Any:
        kind, wide = each
        return None if kind is type(None) else kind((1 << 40) if wide else 3)

    tensors = [tensor(each) for each in job.places]
    pointers = job.kind(*tensors) if hasattr(job.kind, "_fields") else job.kind(tensors)
    arguments = (pointers, *map(number, job.numbers), *map(described, job.more))
    compiled = kernel.run(*arguments, grid=(1, 1, 1), warmup=True, **{**FUSED, **dict(job.constants)})
    if TRITON < (3, 7) and job.target[0] == "cuda":  # its launcher is compiled, too; later ones share one
        with contextlib.suppress(Exception):
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)
    return compiled


if __name__ == "__main__":
    sys.exit("started by paged_ops.lowerings.gpu.precompile")
