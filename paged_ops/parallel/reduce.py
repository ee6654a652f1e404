"""Sums of rows over ranks, with the residual add and the RMSNorm that follow them in a transformer; and gathers.

A row-parallel product leaves each rank a part p_r of every row. All ranks need the sum, and next to it the residual
stream and its norm::

    s = Σ_r p_r          summed in float32 in the order of the ranks, rounded to x's dtype
    summed = residual + s                                                    rounded to x's dtype
    normed = summed / sqrt(mean(summed²) + eps) * (weight_offset + weight)   in float32, rounded to x's dtype

With an ``inner_weight`` it is the norm of s, by that weight and ``inner_eps``, that is added, as in Gemma-2.
With ``rounds_first`` the quotient is rounded to x's dtype before it is multiplied, as Llama's norm does. So each number
is rounded where a model that does these steps one by one rounds it. On GPUs that address each other's memory one
kernel does all of it (``lowerings/gpu/fused_allreduce.py``); elsewhere the backend of the process group sums, in its
own order.

Gathers are for what is split by columns, such as logits: bit by bit what the ranks have, side by side.

The ops are no entries of the package's registry: they need other processes, so they have no reference on one device, no
cases that run alone, and no twin for XLA. They work eager, compiled and in captured graphs. All ranks call them in the
same order, on one stream or on streams that wait for each other.

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
from paged_ops.parallel import symmetric

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ROWS = 512  # of a workspace by default; measured up to there, where NCCL takes more than twice as long
# Two shots send less but wait twice: the bytes that a rank must save by them. Predicted for NVLink: 2 µs at 350 GB/s.
WORTH_A_WAIT = 700_000


class RowSums:
    """How the ranks of a group sum rows of so many columns. Make it on all ranks together, by :func:`row_sums`.

    Attributes:
        name: by which the ops know it.
        kind: "symmetric", by one kernel over memory that all ranks address; or "plain", by the group's backend.
        reason: why it is plain; else None.
        max_rows: of a symmetric sum; more are summed plainly.
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
        """Whether so many rows are summed in two shots, each by one rank: see the kernel."""
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
        *,
        weight_offset: float = 0.0,
        rounds_first: bool = False,
        inner_weight: Tensor | None = None,
        inner_eps: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with the sum over ranks of ``x [..., C]``, and its norm: see the module."""
        op, kind = torch.ops.paged_ops_parallel.all_reduce_add_norm.default, (weight_offset, rounds_first)
        summed, normed = op(x, residual, weight, eps, self.name, *kind, inner_weight, inner_eps)
        return summed, normed

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x [..., N·C]`` side by side, ``[..., W·N·C]``."""
        gathered: Tensor = torch.ops.paged_ops_parallel.all_gather_columns.default(x, self.name)
        return gathered

    def close(self) -> None:
        """Gives the memory back. Graphs that were captured with it must not run any more."""
        _known.pop(self.name, None)


_known: dict[str, RowSums] = {}


def row_sums(
    group: dist.ProcessGroup,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rows: int = MOST_ROWS,
) -> RowSums:
    """The sums of a group for rows of so many columns; made once and kept. All ranks call it together.

    Args:
        max_rows: that the symmetric memory has room for, ``2·max_rows·W·columns`` elements on each rank; 0 for none.

    Raises:
        ValueError: columns, dtype, or this process is not in the group.
    """
    checks.at_least(1, columns=columns)
    checks.at_least(0, max_rows=max_rows)
    expect(dtype in DTYPES, "dtype", " or ".join(map(str, DTYPES)), dtype)
    expect(device.index is not None or device.type == "cpu", "device", "a device with its index", device)
    name = f"{group.group_name} {columns} {dtype} {device} {max_rows}"
    found = _known.get(name)
    if found is None or found.group is not group:
        found = _known[name] = RowSums(name, group, columns, dtype, device, max_rows)
        if device.type == "cuda" and max_rows and found.reason is not None:
            warnings.warn(f"paged_ops: sums over ranks go through the backend: {found.reason}", stacklevel=2)
    return found


_LIBRARY = torch.library.Library("paged_ops_parallel", "DEF")
_LIBRARY.define("all_reduce(Tensor x, str sums) -> Tensor")
_LIBRARY.define("all_gather_columns(Tensor x, str sums) -> Tensor")
_LIBRARY.define(
    "all_reduce_add_norm(Tensor x, Tensor residual, Tensor weight, float eps, str sums, float weight_offset=0.,"
    " bool rounds_first=False, Tensor? inner_weight=None, float inner_eps=0.) -> (Tensor, Tensor)"
)


@torch.library.register_fake("paged_ops_parallel::all_reduce", lib=_LIBRARY)
def _fake_sum(x: Tensor, sums: str) -> Tensor:
    _checked(x, sums)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("paged_ops_parallel::all_gather_columns", lib=_LIBRARY)
def _fake_gather(x: Tensor, sums: str) -> Tensor:
    known = _known_as(x, sums)
    expect(x.shape[-1] % known.columns == 0, "x", f"a multiple of {known.columns} columns, as its sums", x)
    return x.new_empty(*x.shape[:-1], known.size * x.shape[-1])


@torch.library.register_fake("paged_ops_parallel::all_reduce_add_norm", lib=_LIBRARY)
def _fake_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sums: str,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    inner_weight: Tensor | None = None,
    inner_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _checked(x, sums)
    checks.tensor("residual", residual, x.shape, x.dtype, x.device, "[..., C]")
    checks.tensor("weight", weight, x.shape[-1:], x.dtype if rounds_first else DTYPES, x.device, "[C]")
    expect(eps >= 0, "eps", "0 or more", eps)
    if inner_weight is not None:
        kinds = weight.dtype if rounds_first else DTYPES
        checks.tensor("inner_weight", inner_weight, x.shape[-1:], kinds, x.device, "[C]")
    expect(inner_eps >= 0, "inner_eps", "0 or more", inner_eps)
    summed, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return summed, normed


def _checked(x: Tensor, sums: str) -> None:
    columns = _known_as(x, sums).columns
    expect(x.shape[-1] == columns, "x", f"{columns} columns, as its sums", x)


def _known_as(x: Tensor, sums: str) -> RowSums:
    known = _known.get(sums)
    if known is None:
        raise ValueError(f"sums: expected the name of sums that row_sums made and nobody closed, got {sums}")
    expect(x.dim() >= 1, "x", "rows [..., C]", x)
    expect(x.dtype == known.dtype, "x", f"a tensor of {known.dtype}, as its sums", x)
    expect(x.device == known.device, "x", f"a tensor on {known.device}, as its sums", x)
    return known


def _sum_by_backend(x: Tensor, sums: str) -> Tensor:
    summed = _fake_sum(x, sums).copy_(x)
    dist.all_reduce(summed, group=_known[sums].group)
    return summed


def _add_norm_on_cpu(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sums: str,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    inner_weight: Tensor | None = None,
    inner_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _fake_add_norm(x, residual, weight, eps, sums, weight_offset, rounds_first, inner_weight, inner_eps)
    part = _sum_by_backend(x, sums)
    if inner_weight is not None:
        part = rms_norm(part, inner_weight, inner_eps, weight_offset, rounds_first)
    summed = residual + part
    return summed, rms_norm(summed, weight, eps, weight_offset, rounds_first)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, rounds_first: bool = False) -> Tensor:
    """The norm alone, in plain torch: ``[..., C]`` in x's dtype, each number rounded as by the ops."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounds_first:
        wide = wide.to(x.dtype).float()
    scale = weight.float()
    return (wide * (scale if weight_offset == 0 else weight_offset + scale)).to(x.dtype)


def _gather_by_backend(x: Tensor, sums: str) -> Tensor:
    known, x = _known_as(x, sums), x.contiguous()
    every = [torch.empty_like(x) for _ in range(known.size)]
    dist.all_gather(every, x, group=known.group)
    return torch.cat(every, -1, out=_fake_gather(x, sums))


def _gather_on_cuda(x: Tensor, sums: str) -> Tensor:
    out, known = _fake_gather(x, sums), _known[sums]
    if known.places is None or x.numel() > known.max_rows * known.columns:
        return _gather_by_backend(x, sums)
    from paged_ops.lowerings.gpu import fused_allreduce as kernels

    kernels.gather_columns(x.contiguous(), out, known.places)
    return out


def _sum_on_cuda(x: Tensor, sums: str) -> Tensor:
    summed, known = _fake_sum(x, sums), _known[sums]
    rows = x.numel() // known.columns
    if known.places is None or rows > known.max_rows:
        return _sum_by_backend(x, sums)
    from paged_ops.lowerings.gpu import fused_allreduce as kernels

    two_shot = known.is_two_shot(rows)
    kernels.reduce_rows(x.contiguous(), None, None, summed, None, known.places, two_shot=two_shot)
    return summed


def _add_norm_on_cuda(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sums: str,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    inner_weight: Tensor | None = None,
    inner_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    from paged_ops.lowerings.gpu import fused_allreduce as kernels

    inner = inner_weight, inner_eps
    summed, normed = _fake_add_norm(x, residual, weight, eps, sums, weight_offset, rounds_first, *inner)
    known = _known[sums]
    rows, x, places = x.numel() // known.columns, x.contiguous(), known.places
    if places is None or rows > known.max_rows:
        x, places = _sum_by_backend(x, sums), None
    norm: dict[str, Any] = dict(eps=eps, weight_offset=weight_offset, rounds_first=rounds_first)
    if inner_weight is not None:
        norm |= dict(inner_weight=inner_weight.contiguous(), inner_eps=inner_eps)
    norm["two_shot"] = places is not None and known.is_two_shot(rows)
    kernels.reduce_rows(x, residual.contiguous(), weight.contiguous(), summed, normed, places, **norm)
    return summed, normed


for _name, _on_cpu, _on_cuda in (
    ("all_reduce", _sum_by_backend, _sum_on_cuda),
    ("all_gather_columns", _gather_by_backend, _gather_on_cuda),
    ("all_reduce_add_norm", _add_norm_on_cpu, _add_norm_on_cuda),
):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # as of the package's other ops
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
