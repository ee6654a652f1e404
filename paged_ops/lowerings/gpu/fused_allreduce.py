"""All-reduce of rows on GPUs, fused with the residual add and the RMSNorm that follow it; and all-gather of columns.

Bytes per rank, for T rows of C elements of e bytes on W ranks: one shot sends and receives ``(W - 1)·T·C·e`` over the
links, two shots ``2·(W - 1)/W·T·C·e``. Both read x and the residual once from local memory and write two results,
``4·T·C·e``. The ``(W + 6)·T·C`` additions and multiplications do not matter.

*One shot*: a rank writes its rows to the memory of all others and sums the rows it receives. *Two shots*: only rank
``t % W`` sums row t, and writes the sum to the memory of the others. With two ranks both send the same number of bytes,
and one shot waits only once. All ranks sum in float32, in the order of the ranks, and round once, so they hold the same
bits.

The all-gather writes rows in the same way and concatenates them. There a row is one of N equal parts of a longer one:
``(W - 1)·T·C·e`` bytes over the links, and ``W·T·C·e`` written.

Letters: T rows, C columns, W ranks, R rows of capacity, N parts of a gathered row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_ops import fake
from paged_ops.fake.models import REDUCERS, NormOptions
from paged_ops.lowerings import collectives
from paged_ops.lowerings.gpu.launch import Launcher
from paged_ops.lowerings.gpu.mailboxes import put, take
from paged_ops.lowerings.gpu.target import Target, target_of

_BITS = {2: torch.int16, 4: torch.int32}
_PER_PROCESSOR = 2  # programs per multiprocessor


class Places(NamedTuple):
    """The memory through which ranks exchange rows: made once, the same for all calls.

    Attributes:
        by_rank: integers as wide as the dtype, ``[2, R, W, C]`` per rank: two turns, R rows, W senders.
        turns: int32 ``[R]``, the next half of each row; only this rank uses it.
        aborted: see :class:`paged_ops.parallel.symmetric.Workspace`.
        rank: this rank.
    """

    by_rank: tuple[Tensor, ...]
    turns: Tensor
    aborted: Tensor
    rank: int


def places(workspace: Any, rows: int, columns: int, dtype: torch.dtype) -> Places:
    """The places in a :class:`paged_ops.parallel.symmetric.Workspace`."""
    shape = 2, rows, workspace.size, columns
    turns = torch.zeros(rows, dtype=torch.int32, device=workspace.device)
    by_rank = workspace.views(_BITS[dtype.itemsize], *shape)
    return Places(by_rank, turns, workspace.aborted, workspace.rank)


def all_reduce(x: Tensor, reducer: str) -> Tensor:
    summed, known = fake.all_reduce(x, reducer), REDUCERS[reducer]
    rows = x.numel() // known.columns
    if known.places is None or rows > known.max_rows:
        return collectives.all_reduce(x, reducer)
    reduce_rows(x.contiguous(), None, None, summed, None, known.places, two_shot=known.is_two_shot(rows))
    return summed


def all_gather_columns(x: Tensor, reducer: str) -> Tensor:
    out, known = fake.all_gather_columns(x, reducer), REDUCERS[reducer]
    if known.places is None or x.numel() > known.max_rows * known.columns:
        return collectives.all_gather_columns(x, reducer)
    gather_columns(x.contiguous(), out, known.places)
    return out


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, reducer: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    options = NormOptions(*args, **kwargs)
    summed, normed = fake.all_reduce_add_norm(x, residual, weight, eps, reducer, *options)
    known = REDUCERS[reducer]
    rows, x, places = x.numel() // known.columns, x.contiguous(), known.places
    if places is None or rows > known.max_rows:
        x, places = collectives.all_reduce(x, reducer), None
    two_shot = places is not None and known.is_two_shot(rows)
    inner = None if options.inner_weight is None else options.inner_weight.contiguous()
    how = options._replace(inner_weight=inner)._asdict() | {"eps": eps, "two_shot": two_shot}
    reduce_rows(x, residual.contiguous(), weight.contiguous(), summed, normed, places, **how)
    return summed, normed


def reduce_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    summed: Tensor,
    normed: Tensor | None,
    places: Places | None,
    *,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    inner_weight: Tensor | None = None,
    inner_eps: float = 0.0,
    two_shot: bool = False,
) -> None:
    """Fill ``summed`` and, given a weight, ``normed``, as ``paged_ops.ops.all_reduce_add_norm``; all contiguous.

    Without places ``x`` is the sum already.
    """
    C = x.shape[-1]
    T = x.numel() // max(C, 1)
    if not T:
        return
    how = weight_offset, rounds_first, two_shot
    weights = None if weight is None else weight.dtype, None if inner_weight is None else inner_weight.dtype
    R, W, rank = (1, 1, 0) if places is None else (*places.by_rank[0].shape[1:3], places.rank)
    launcher, most = _launcher(C, R, W, rank, x.dtype, weights, residual is not None, how, x.device)
    shared = (None, None) if places is None else (places.turns, places.aborted, *places.by_rank)
    launcher((min(T, most), 1, 1), (x, residual, weight, inner_weight, summed, normed, *shared), (T, eps, inner_eps))


@functools.lru_cache(maxsize=1024)
def _launcher(
    C: int,
    R: int,
    W: int,
    rank: int,
    dtype: torch.dtype,
    weights: tuple[torch.dtype | None, torch.dtype | None],
    adds: bool,
    how: tuple[float, bool, bool],
    device: torch.device,
) -> tuple[Launcher, int]:
    """The kernel for this kind of call, and its largest number of programs."""
    target = target_of(device)
    weight_offset, rounds_first, two_shot = how
    BLOCK = triton.next_power_of_2(C)
    num_warps = _warps(BLOCK, dtype)
    constants = {
        "C": C,
        "BLOCK": BLOCK,
        "R": R,
        "W": W,
        "RANK": rank,
        "TWO_SHOT": two_shot,
        "WEIGHT_OFFSET": weight_offset,
        "ROUNDS_FIRST": rounds_first,
        "ADDS": adds,
        "NORMS": weights[0] is not None,
        "NORMS_SUM": weights[1] is not None,
        "num_warps": num_warps,
        **target.overlap(),
    }
    constants |= _residency(target, num_warps)
    return Launcher(reduce_kernel, constants, device), max(1, target.processors) * _PER_PROCESSOR


def gather_columns(x: Tensor, out: Tensor, places: Places) -> None:
    """Fill ``out [..., W·N·C]`` with the ranks' ``x [..., N·C]``, concatenated. Both are contiguous."""
    R, W, C = places.by_rank[0].shape[1:]
    T, N = x.numel() // C, x.shape[-1] // C
    if T:
        launcher, most = _gather_launcher(C, R, W, places.rank, N, x.dtype, x.device)
        launcher((min(T, most), 1, 1), (x, out, places.turns, places.aborted, *places.by_rank), (T,))


@functools.lru_cache(maxsize=256)
def _gather_launcher(
    C: int, R: int, W: int, rank: int, N: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launcher, int]:
    target, BLOCK = target_of(device), triton.next_power_of_2(C)
    num_warps = _warps(BLOCK, dtype)
    constants = {"C": C, "BLOCK": BLOCK, "R": R, "W": W, "RANK": rank, "N": N}
    constants |= {"num_warps": num_warps, **target.overlap(), **_residency(target, num_warps)}
    return Launcher(all_gather_kernel, constants, device), max(1, target.processors) * _PER_PROCESSOR


def _warps(BLOCK: int, dtype: torch.dtype) -> int:
    """At least 16 bytes of a row per thread, so that no two warps poll the same element: one could restore the sentinel
    before the other has read the data. More than 8 warps were never faster."""
    return max(1, min(8, BLOCK * dtype.itemsize // (32 * 16)))


def _residency(target: Target, num_warps: int) -> dict[str, int]:
    """A limit on registers, so that all programs run concurrently: they wait for programs of other ranks."""
    return {"maxnreg": min(255, 65536 // (32 * num_warps * _PER_PROCESSOR))} if target.backend == "cuda" else {}


@triton.jit
def _norm(
    wide, scale, eps, C: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr
):
    """The RMSNorm of one row in float32, in ``dtype``."""
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / C + eps)
    if ROUNDS_FIRST:
        wide = wide.to(dtype).to(tl.float32)
    if WEIGHT_OFFSET != 0.0:
        wide = wide * (WEIGHT_OFFSET + scale.to(tl.float32))
    else:
        wide = wide * scale.to(tl.float32)
    return wide.to(dtype)


@triton.jit(do_not_specialize=["T", "eps", "inner_eps"])
def reduce_kernel(
    # x, residual [T, C], weight, inner weight [C], summed, normed [T, C], turns [R], aborted [1], then the places
    # [2, R, W, C] by rank
    tensors,
    T,
    eps,
    inner_eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RANK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    NORMS_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: rows p, p + P, ... of P programs."""
    x, residual, weight, inner_weight = tensors[0], tensors[1], tensors[2], tensors[3]
    summed, normed, turns, aborted = tensors[4], tensors[5], tensors[6], tensors[7]
    PLACES: tl.constexpr = 8  # from this index on
    dtype: tl.constexpr = x.dtype.element_ty
    c = tl.arange(0, BLOCK)
    live = c < C
    zero = tl.full([], 0, tl.int64)  # for addresses
    if NORMS:  # a weight: no kernel before this one writes it
        scale = tl.load(weight + c, mask=live, other=0.0)
    if NORMS_SUM:
        inner_scale = tl.load(inner_weight + c, mask=live, other=0.0)
    if PDL:
        gdc_wait()

    # All rows are sent before the first wait.
    if W > 1:
        for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
            own = tl.load(x + (zero + t) * C + c, mask=live, other=0.0)
            place = ((zero + tl.load(turns + t) * R + t) * W + RANK) * C + c
            for i in tl.static_range(1, W):
                wanted = live
                if TWO_SHOT:
                    wanted = live & (t % W == (RANK + i) % W)
                put(tensors[PLACES + (RANK + i) % W] + place, own, wanted)

    for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        row = (zero + t) * C + c
        if ADDS:
            left = tl.load(residual + row, mask=live, other=0.0).to(tl.float32)
        own = tl.load(x + row, mask=live, other=0.0).to(tl.float32)
        if W > 1:
            turn = tl.load(turns + t)
            from_all = tensors[PLACES + RANK] + (zero + turn * R + t) * W * C + c
            wanted = live
            if TWO_SHOT:
                wanted = live & (t % W == RANK)
            total = tl.zeros([BLOCK], tl.float32)
            for r in tl.static_range(W):
                if r == RANK:
                    total += own
                else:
                    total += take(from_all + r * C, wanted, aborted, dtype).to(tl.float32)
            if TWO_SHOT:  # send the rows summed here to all others, and receive their sums
                place = ((zero + turn * R + t) * W + RANK) * C + c
                for i in tl.static_range(1, W):
                    put(tensors[PLACES + (RANK + i) % W] + place, total.to(dtype), wanted)
                for r in tl.static_range(W):
                    if r != RANK:
                        received = take(from_all + r * C, live & (t % W == r), aborted, dtype)
                        total = tl.where(t % W == r, received.to(tl.float32), total)
            tl.store(turns + t, 1 - turn)
        else:
            total = own
        result = total.to(dtype)
        if NORMS_SUM:
            result = _norm(result.to(tl.float32), inner_scale, inner_eps, C, WEIGHT_OFFSET, ROUNDS_FIRST, dtype)
        if ADDS:
            result = (left + result.to(tl.float32)).to(dtype)
        tl.store(summed + row, result, mask=live)
        if NORMS:
            rows = _norm(result.to(tl.float32), scale, eps, C, WEIGHT_OFFSET, ROUNDS_FIRST, dtype)
            tl.store(normed + row, rows, mask=live)
    if PDL:
        gdc_launch_dependents()  # last, as in all kernels: the next kernel may overwrite this one's inputs


@triton.jit(do_not_specialize=["T"])
def all_gather_kernel(
    tensors,  # x [T/N, N, C], out [T/N, W, N, C], turns [R], aborted [1], places [2, R, W, C] by rank
    T,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: rows p, p + P, ... of P programs."""
    x, out, turns, aborted = tensors[0], tensors[1], tensors[2], tensors[3]
    PLACES: tl.constexpr = 4  # from this index on
    dtype: tl.constexpr = x.dtype.element_ty
    c = tl.arange(0, BLOCK)
    live = c < C
    zero = tl.full([], 0, tl.int64)  # for addresses
    if PDL:
        gdc_wait()
    for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        own = tl.load(x + (zero + t) * C + c, mask=live, other=0.0)
        place = ((zero + tl.load(turns + t) * R + t) * W + RANK) * C + c
        for i in tl.static_range(1, W):
            put(tensors[PLACES + (RANK + i) % W] + place, own, live)
        tl.store(out + ((zero + t // N) * W * N + RANK * N + t % N) * C + c, own, mask=live)
    for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        turn = tl.load(turns + t)
        for r in tl.static_range(W):
            if r != RANK:
                place = ((zero + turn * R + t) * W + r) * C + c
                received = take(tensors[PLACES + RANK] + place, live, aborted, dtype)
                tl.store(out + ((zero + t // N) * W * N + r * N + t % N) * C + c, received, mask=live)
        tl.store(turns + t, 1 - turn)
    if PDL:
        gdc_launch_dependents()  # last, as in all kernels: the next kernel may overwrite this one's inputs
