"""All-reduce of rows, fused with the residual add and the RMSNorm that follow it in a transformer; and all-gather.

``all_reduce_add_norm`` of ``paged_ops.ops`` has the formula. Each number is rounded where a model that does these steps
one by one rounds it. On GPUs that address each other's memory one kernel does all of it, and sums in float32 in the
order of the ranks (``lowerings/gpu/fused_allreduce.py``). Elsewhere the backend of the process group sums, in its own
order (``lowerings/collectives.py``). Gathers are for matmuls sharded by output columns, such as logits.

The ops work eager, compiled and in captured graphs. They are not in the registry's list, because they need other
processes. All ranks call them in the same order, on one stream or on streams that wait for each other.

Letters: T rows, C columns, W ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops import checks
from paged_ops.checks import expect
from paged_ops.fake.models import REDUCERS, NormOptions
from paged_ops.layouts import MODEL_DTYPES
from paged_ops.lowerings.collectives import rms_norm
from paged_ops.parallel import symmetric

__all__ = ["AllReduce", "prepare_all_reduce", "rms_norm"]

MOST_ROWS = 512  # rows of a workspace by default, as far as measured: NCCL takes more than twice as long there
# Two shots send fewer bytes but wait twice. They must save this many bytes per rank: 2 µs at 350 GB/s of NVLink.
WORTH_A_WAIT = 700_000


class AllReduce:
    """An all-reduce of rows with a given number of columns; :func:`prepare_all_reduce` makes it, on all ranks together.

    Attributes:
        name: what the ops take.
        kind: "symmetric": one kernel over memory that all ranks address; or "plain": the group's backend.
        reason: why it is plain; else None.
        max_rows: rows of the largest symmetric all-reduce; the backend reduces larger ones.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, columns: int, dtype: torch.dtype, device: torch.device, max_rows: int
    ) -> None:
        self.name, self.group, self.size = name, group, dist.get_world_size(group)
        self.columns, self.dtype, self.device, self.max_rows = columns, dtype, device, max_rows
        self.places: Any = None
        self.reason: str | None = "max_rows is 0"
        self._workspace: symmetric.Workspace | None = None
        if max_rows:
            num_bytes = 2 * max_rows * self.size * columns * dtype.itemsize
            made = symmetric.allocate(group, device, num_bytes)
            if isinstance(made, str):
                self.reason = made
            else:
                from paged_ops.lowerings.gpu import fused_allreduce as kernels

                self.reason, self._workspace = None, made
                self.places = kernels.places(made, max_rows, columns, dtype)

    @property
    def kind(self) -> str:
        return "plain" if self.places is None else "symmetric"

    def is_two_shot(self, rows: int) -> bool:
        """Whether this number of rows is reduced in two shots, each row by one rank: see the kernel."""
        saved = (self.size - 1) * (self.size - 2) * rows * self.columns * self.dtype.itemsize
        return saved > WORTH_A_WAIT * self.size

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of ``x [..., C]``."""
        summed: Tensor = torch.ops.paged_ops_parallel.all_reduce.default(x, self.name)
        return summed

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with the sum over ranks of ``x [..., C]`` added, and its norm. The options are the last
        arguments of ``paged_ops.ops.all_reduce_add_norm``."""
        op = torch.ops.paged_ops_parallel.all_reduce_add_norm.default
        summed, normed = op(x, residual, weight, eps, self.name, *NormOptions(**options))
        return summed, normed

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x [..., N·C]`` concatenated, ``[..., W·N·C]``."""
        gathered: Tensor = torch.ops.paged_ops_parallel.all_gather_columns.default(x, self.name)
        return gathered

    def close(self) -> None:
        """Free the memory. Graphs captured with it must not run any more."""
        for each in (_made, REDUCERS):
            each.pop(self.name, None)


_made: dict[str, AllReduce] = {}


def prepare_all_reduce(
    group: dist.ProcessGroup,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rows: int = MOST_ROWS,
) -> AllReduce:
    """The all-reduce of a group for rows of ``columns`` elements, made once and kept. All ranks call it together.

    Args:
        max_rows: capacity of the symmetric memory, ``2·max_rows·W·columns`` elements on each rank; 0 for none.

    Raises:
        ValueError: columns or dtype is wrong, or this process is not in the group.
    """
    checks.at_least(1, columns=columns)
    checks.at_least(0, max_rows=max_rows)
    expect(dtype in MODEL_DTYPES, "dtype", " or ".join(map(str, MODEL_DTYPES)), dtype)
    expect(device.index is not None or device.type == "cpu", "device", "a device with its index", device)
    # The number of ranks is in the name because compilers cache graphs by it, on disk too.
    name = f"{group.group_name} {group.size()} {columns} {dtype} {device} {max_rows}"
    found = _made.get(name)
    if found is None or found.group is not group:
        found = _made[name] = REDUCERS[name] = AllReduce(name, group, columns, dtype, device, max_rows)
        if device.type == "cuda" and max_rows and found.reason is not None:
            warnings.warn(f"paged_ops: all-reduces use the backend: {found.reason}", stacklevel=2)
    return found
