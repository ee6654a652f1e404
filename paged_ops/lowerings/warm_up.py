"""Compiling kernels before they are needed: several at once, by processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paged_ops.checks import expect


@dataclass(frozen=True)
class WarmUp:
    """What :func:`warm_up` did."""

    kernels: int  # that the calls need, each of them once
    compiled: int  # of them, those that no earlier call has asked for
    seconds: float
    errors: tuple[str, ...]  # of kernels that did not compile; their first launch says more

    def __str__(self) -> str:
        failed = f", {len(self.errors)} of them failed" if self.errors else ""
        return f"{self.kernels} kernels, {self.compiled} of them compiled, in {self.seconds:.1f} s{failed}"


@torch.no_grad()
def warm_up(
    calls: Iterable[Callable[[], Any]],
    *,
    sizes: Iterable[tuple[int, int]] = (),
    max_num_tokens: int | None = None,
    max_num_seqs: int | None = None,
    wait: bool = True,
) -> WarmUp:
    """Compile the kernels of attention and cache writes that some calls would launch, at the same time.

    A kernel takes seconds to compile, in Python's lock. The first call of a model would compile them one after the
    other, each new kind of batch more of them. This function starts one process, which forks itself for each kernel,
    never touches a GPU, and fills Triton's cache on disk. The first launch then only loads a kernel. It may come before
    its kernel is ready: then it waits, or compiles by itself if that has not begun.

    ::

        query, key, value = (torch.empty(4, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
        write = functools.partial(paged_ops.reshape_and_cache, key, value, kv_cache, slot_mapping)
        attend = functools.partial(paged_ops.paged_attention, query, kv_cache, tables, lens, starts, 128**-0.5)
        print(paged_ops.warm_up([write, attend], max_num_tokens=8192, max_num_seqs=256))

    :meth:`paged_ops.graphs.DecodeGraphs.capture` and :meth:`paged_ops.generation.GenerationLoop.warm_up` do this by
    themselves.

    Args:
        calls: functions that call ops of this package on tensors of a GPU: ``functools.partial`` of an op, or a step of
            a model. Each is run once, eagerly, even if it is compiled. In it attention and cache writes check their
            arguments, but launch nothing: results are 0, and caches stay as they are. Other ops run as always. Shapes,
            strides, dtypes and alignment of the tensors must be those of later calls, but for the numbers of tokens
            and sequences.
        sizes: pairs (tokens, sequences): also compile what attention launches for these.
        max_num_tokens, max_num_seqs: also compile what it launches for any batch of at most so many. Both, or none.
        wait: return when all is compiled. Else compiling goes on while the caller does something else.

    Returns:
        The numbers of kernels. Without a GPU, on ROCm, and where there is one processor only, nothing is run or
        compiled, and they are 0.

    Raises:
        ValueError: a number is not positive, or an op refuses its arguments.
    """
    expect((max_num_tokens is None) == (max_num_seqs is None), "max_num_seqs", "both numbers, or none", max_num_seqs)
    wanted = [(int(T), int(S)) for T, S in sizes]
    most = [] if max_num_tokens is None or max_num_seqs is None else [(max_num_tokens, max_num_seqs)]
    for T, S in (*wanted, *most):
        expect(T >= 1 and S >= 1, "sizes", "positive numbers of tokens and sequences", (T, S))
    if not prepare():
        return WarmUp(0, 0, 0.0, ())
    from paged_ops.lowerings.gpu import precompile
    from paged_ops.lowerings.gpu.attention.tuning import covering_batches

    started = time.perf_counter()
    compiler = precompile.compiler()
    for largest in most:
        batches = covering_batches(*largest, equal_lengths=False)
        wanted += [(T, S) for T, S in batches if T >= S]
    found: dict[precompile.Job, None] = {}
    before = len(compiler.states)
    for call in calls:
        with precompile.noting(wanted) as notes, torch.compiler.set_stance("force_eager"):
            call()
        found.update(dict.fromkeys(notes))
        compiler.submit(list(found))
    states = compiler.submit(list(found))
    errors = precompile.wait_for(states, precompile.MOST_SECONDS) if wait else []
    return WarmUp(len(found), len(compiler.states) - before, time.perf_counter() - started, tuple(errors))


def prepare() -> bool:
    """Start the process that compiles, which takes it a few seconds; returns whether kernels can be compiled ahead."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    from paged_ops.lowerings.gpu import precompile

    if precompile.can_precompile():
        precompile.compiler()
        return True
    return False


def without_kernels() -> contextlib.AbstractContextManager[object]:
    """Inside it attention and cache writes of this thread launch nothing, where kernels can be compiled ahead."""
    if not prepare():
        return contextlib.nullcontext()
    from paged_ops.lowerings.gpu import precompile

    return precompile.noting()
