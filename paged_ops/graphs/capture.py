"""Capturing a function in a CUDA (HIP) graph: what the graphs of one capture share, and a graph itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_ops.graphs.modes import GraphKey


class CaptureError(RuntimeError):
    """The step cannot be captured in a graph; the cause says why."""


@dataclass(frozen=True)
class CaptureReport:
    """What :meth:`DecodeGraphs.capture` did."""

    keys: tuple[GraphKey, ...]
    graphs: int  # more than keys in the piecewise modes
    seconds: float  # compilation included
    num_bytes: int  # of device memory, workspaces and code included; also what other processes take or free meanwhile

    def __str__(self) -> str:
        sizes = ", ".join(str(key.num_tokens) for key in sorted(self.keys))
        return (
            f"{self.graphs} graphs for {len(self.keys)} sizes ({sizes}) in {self.seconds:.1f} s,"
            f" {self.num_bytes / 2**20:.0f} MiB"
        )


class CaptureSession:
    """What the graphs of one capture share: a memory pool and a stream. Measures the memory they take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def __enter__(self) -> CaptureSession:
        torch.cuda.synchronize(self.device)
        self._stack = contextlib.ExitStack()
        # Freeing a tensor that a cycle kept alive would break a capture: collect now, and not in between.
        gc.collect()
        if gc.isenabled():
            gc.disable()
            self._stack.callback(gc.enable)
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info(self.device)[0]
        self._reserved = torch.cuda.memory_reserved(self.device)
        self._stack.enter_context(torch.cuda.device(self.device))
        self._stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device) - self._reserved
        # The allocator does not count code. The device's number shrinks if another process frees memory meanwhile.
        self.num_bytes = max(self._free - torch.cuda.mem_get_info(self.device)[0], reserved, 0)

    @contextlib.contextmanager
    def sync_is_error(self) -> Iterator[None]:
        """Inside it a sync of the host raises, with a clearer message and less harm than during capture."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Graph:
    """A captured function and where its result lies."""

    def __init__(self, session: CaptureSession) -> None:
        self._pool = session.pool
        self._graph = torch.cuda.CUDAGraph()
        self._result: Any = None

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return device.type == "cuda"

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record what the function launches, and return its result, whose memory belongs to this graph from now on."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture has failed, and the error above says why
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        # Only an alias is kept: the next graph of the pool may use this memory, as only one step is replayed at a time.
        self._result = torch.utils._pytree.tree_map_only(Tensor, _alias, result)
        return result

    def replay(self) -> Any:
        """Launch the graph. The next replay of any graph of the pool overwrites the result."""
        self._graph.replay()
        return self._result


class _Memory:
    """A tensor's memory, without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """A tensor with the same memory that does not own it."""
    if not (on_gpu(tensor) and tensor.numel()):
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


def on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda
