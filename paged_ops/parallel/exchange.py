"""Merging the ranks' partial attention over disjoint keys, in one exchange.

With parts ``out_r`` and ``lse_r`` of W ranks::

    lse = log(sum_r exp(lse_r))        out = sum_r exp(lse_r - lse) * out_r

in float32 and in the order of ranks, so all ranks hold the same bits. +inf is read as -inf. Where no rank saw a key,
out is 0 and lse -inf. One of two ways is chosen when the exchange is prepared:

- *symmetric memory* (GPUs of one host): one kernel writes the part to the memory of the other ranks and merges
  their parts (``paged_ops/lowerings/gpu/merge_ranks.py``). It is safe in captured graphs, and deterministic.
- *collectives* (NCCL, gloo): an all-gather of parts, or, for many rows on more than two ranks, an all-to-all by
  rows and an all-gather of merged rows. Calls too large for the symmetric memory use them too.

Letters: T tokens, H heads, Dv value head size, W ranks.

Sources of the ideas: the merge is from ring attention (Liu et al. 2023, arXiv:2310.01889) and flash decoding;
as a reduction over ranks it is tree attention (Shyam et al. 2024, arXiv:2408.04093) and Helix (arXiv:2507.07120).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paged_ops.checks import expect

# The name in torch 2.13, where the older one warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_MANY = 1 << 20  # bytes of a part: from here on, more than two ranks merge by rows


class Group(Protocol):
    """The collectives that an exchange needs."""

    rank: int
    size: int

    def all_gather(self, mine: Tensor) -> Tensor:
        """``[W, ...]``: the tensors of all ranks, contiguous and equal in shape."""

    def all_to_all(self, mine: Tensor) -> Tensor:
        """``[W, ...]``: row ``rank`` of each rank's tensor ``[W, ...]``."""


class ProcessGroup:
    """A group of ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        expect(self.rank >= 0, "group", "a process group with this process in it", "another")

    def all_gather(self, mine: Tensor) -> Tensor:
        every = mine.new_empty(self.size, *mine.shape)
        _all_gather(every.view(-1), mine.view(-1), group=self.group)
        return every

    def all_to_all(self, mine: Tensor) -> Tensor:
        every = torch.empty_like(mine)
        dist.all_to_all_single(every, mine, group=self.group)
        return every


class Exchange:
    """Merges the parts of a group's ranks; :func:`prepare` makes it. All ranks make the same calls, with equal shapes
    and dtypes, on one stream or on streams that wait for each other.

    Attributes:
        how: "symmetric memory", or "collectives" and why.
    """

    def __init__(
        self, group: Group, places: Any = None, why: str = "", workspace: Any = None, reducer: Any = None
    ) -> None:
        self.group, self._places, self._reducer = group, places, reducer
        self._workspace = workspace  # alive as long as this object, so that it is aborted with its group
        self.how = "symmetric memory" if places is not None else f"collectives ({why})" if why else "collectives"

    def everywhere(self, part: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merged ``[T, H, Dv]`` and ``[T, H]`` on every rank, from parts of the same shapes."""
        W = self.group.size
        if W == 1:
            return part.clone(), lse.clone()
        if self._serves(part, *part.shape[:2]):
            return self._by_memory(part, lse, part.shape[1])
        packed = _packed(part, lse)
        if W == 2 or packed.nbytes < _MANY:
            return merged(self.group.all_gather(packed), part.dtype)
        T, H, n = packed.shape
        rows = -(-T // W)
        padded = packed.new_zeros(W, rows, H, n)
        padded.view(W * rows, H, n)[:T] = packed
        mine = _packed(*merged(self.group.all_to_all(padded), part.dtype))
        every = self.group.all_gather(mine).view(W * rows, H, n)[:T].contiguous()
        return _unpacked(every, part.dtype)

    def gather_heads(self, mine: Tensor) -> Tensor:
        """The ranks' ``[T, H, D]`` as ``[T, W·H, D]``, in the order of ranks."""
        (T, H, D), known = mine.shape, self._reducer
        if known is not None and T <= known.max_rows and H * D == known.columns and mine.dtype == known.dtype:
            every: Tensor = known.gather(mine.flatten(1)).view(T, -1, D)
            return every
        return self.group.all_gather(mine.contiguous()).transpose(0, 1).flatten(1, 2)

    def of_own_heads(self, part: Tensor, lse: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Merged ``[T, H, Dv]`` and ``[T, H]`` from parts ``[T, W·H, Dv]`` and ``[T, W·H]``.

        Rank r gets heads ``r * H`` to ``(r + 1) * H``. Given ``out``, contiguous, the first result is written there.
        """
        W = self.group.size
        expect(part.shape[1] % W == 0, "part", f"a multiple of {W} ranks as the number of heads in [T, W·H, Dv]", part)
        expect(out is None or out.is_contiguous(), "out", "a contiguous tensor", out)
        T, H = part.shape[0], part.shape[1] // W
        if W > 1 and self._serves(part, T, H):
            return self._by_memory(part, lse, H, out)
        if W == 1:
            mine, total = part.clone(), lse.clone()
        else:
            by_rank = _packed(part, lse).view(T, W, H, -1).transpose(0, 1).contiguous()
            mine, total = merged(self.group.all_to_all(by_rank), part.dtype)
        return (mine if out is None else out.copy_(mine)), total

    def _serves(self, part: Tensor, T: int, H: int) -> bool:
        return self._places is not None and self._places.serve(T * H, part.shape[2], part.dtype)

    def _by_memory(self, part: Tensor, lse: Tensor, H: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        from paged_ops.lowerings.gpu.merge_ranks import exchange

        total = lse.new_empty(part.shape[0], H)
        if out is None:
            out = part.new_empty(part.shape[0], H, part.shape[2])
        exchange(part.contiguous(), lse.contiguous(), out, total, self._places)
        return out, total


def prepare(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    rows: int,
    head_size: int,
    dtype: torch.dtype,
    collectives: bool = False,
    gathered_heads: int = 0,
) -> Exchange:
    """An exchange for parts on this device; all ranks of the group prepare it together.

    Args:
        group: the ranks.
        device: device of the parts.
        rows: tokens times heads of the largest result that uses symmetric memory.
        head_size: the largest value head size.
        dtype: dtype of the parts.
        collectives: do not use symmetric memory.
        gathered_heads: the number of each rank's query heads, for :meth:`Exchange.gather_heads`.
    """
    ranks = ProcessGroup(group)
    if ranks.size == 1 or collectives:
        return Exchange(ranks)
    if device.type != "cuda":
        return Exchange(ranks, why=f"no symmetric memory on {device}")
    from paged_ops.lowerings.gpu import merge_ranks
    from paged_ops.parallel import symmetric
    from paged_ops.parallel.all_reduce import prepare_all_reduce

    width = head_size + head_size % 2
    found = symmetric.allocate(group, device, merge_ranks.num_bytes(ranks.size, rows, width, dtype))
    if isinstance(found, str):
        return Exchange(ranks, why=found)
    reducer = None
    if gathered_heads:
        columns = gathered_heads * head_size
        reducer = prepare_all_reduce(group, columns, dtype, device, max_rows=rows // gathered_heads)
    return Exchange(ranks, merge_ranks.places(found, rows, width, dtype), workspace=found, reducer=reducer)


def merged(gathered: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The merge of gathered parts ``[W, T, H, n]``: bytes of an output in ``dtype``, then of its lse."""
    if gathered.is_cuda:
        from paged_ops.lowerings.gpu.merge_ranks import merge_gathered

        _, T, H, n = gathered.shape
        out = torch.empty(T, H, (n - 4) // dtype.itemsize, dtype=dtype, device=gathered.device)
        lse = torch.empty(T, H, dtype=torch.float32, device=gathered.device)
        merge_gathered(gathered, out, lse)
        return out, lse
    parts, lses = _unpacked(gathered, dtype)
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    total = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - total))
    weighted = torch.where((lses == -torch.inf)[..., None], 0.0, parts.float() * weights[..., None])
    return weighted.sum(0).to(dtype), total


def _packed(part: Tensor, lse: Tensor) -> Tensor:
    """Bytes ``[..., Dv·e + 4]``: an output, then its lse."""
    return torch.cat([part.contiguous().view(torch.uint8), lse.contiguous()[..., None].view(torch.uint8)], -1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    outs, lses = packed[..., :-4].contiguous(), packed[..., -4:].contiguous()
    return outs.view(dtype), lses.view(torch.float32).squeeze(-1)
