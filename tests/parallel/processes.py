"""Processes that run cases together: started once for each number of ranks, given one case after the other.

A case is a function ``(rank, size, **options)`` of a module beside this one, called on every rank at once. It has a
time limit; when that is over, or when a rank does not survive it, all processes are killed, and the next case gets new
ones. They are forked from one process that has imported all, which takes milliseconds where a start takes seconds. With
GPUs each is started anew, as CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Raised(NamedTuple):
    """What a rank raised."""

    kind: str
    text: str
    trace: str


class Died(NamedTuple):
    """A rank that ended."""

    code: int | None


class Processes:
    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="paged_ops_ranks_")
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.device_count() >= size else "forkserver")
        context.set_forkserver_preload(["tests.parallel.loop_cases", "tests.parallel.model_cases"])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where the server finds them
        self._pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)
        self.is_whole = True

    def run(self, case: str, seconds: float, without: int | None = None, **options: Any) -> list[Any]:
        """What ``module.function`` gives on each rank; a :class:`Raised` or :class:`Died` where it gives nothing.

        One rank, ``without``, is not waited for, and gives None.
        """
        for pipe in self._pipes:
            pipe.send((case, options))
        until, results = time.monotonic() + seconds, {} if without is None else {without: None}
        while len(results) < self.size and time.monotonic() < until:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            for pipe in multiprocessing.connection.wait(open_pipes, timeout=max(0.0, until - time.monotonic())):
                rank = self._pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    results[rank] = Died(self.processes[rank].exitcode)
                if isinstance(results[rank], Raised):  # the others may wait for it in vain
                    until = min(until, time.monotonic() + 15)
        late = [rank for rank in range(self.size) if rank not in results]
        if late or any(isinstance(each, (Raised, Died)) for each in results.values()):
            self.kill()
        assert not late, f"{case}: ranks {late} took more than {seconds} s; the others gave {results}"
        return [results[rank] for rank in range(self.size)]

    def kill(self) -> None:
        self.is_whole = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # as torchrun does
    store = dist.FileStore(os.path.join(folder, "store"), size)
    backend = "gloo"
    if torch.cuda.device_count() >= size:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would give each rank a GPU
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    while True:
        try:
            case, options = pipe.recv()
        except EOFError:
            os._exit(0)
        module, function = case.rsplit(".", 1)
        try:
            result = getattr(importlib.import_module(f"tests.parallel.{module}"), function)(rank, size, **options)
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            result = Raised(type(error).__name__, "\n".join([str(error), *notes]), traceback.format_exc())
        pipe.send(result)
