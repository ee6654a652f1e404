"""Ahead-of-time compilation of kernels, several at once in separate processes, and their loading into this one."""

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
    """The result of :func:`warm_up`."""

    kernels: int  # distinct kernels that the calls need
    compiled: int  # of these, kernels that no earlier call had requested
    seconds: float
    errors: tuple[str, ...]  # one per kernel that did not compile; its first launch raises the full error

    def __str__(self) -> str:
        failed = f", {len(self.errors)} of them failed" if self.errors else ""
        return f"{self.kernels} kernels, {self.compiled} of them compiled, in {self.seconds:.1f} s{failed}"


def warm_up(
    calls: Iterable[Callable[[], Any]],
    *,
    sizes: Iterable[tuple[int, int]] = (),
    max_num_tokens: int | None = None,
    max_num_seqs: int | None = None,
    wait: bool = True,
) -> WarmUp:
    """Compile and load the kernels of this package that some calls would launch.

    A kernel takes seconds to compile, under the GIL. Without warm-up, the first call of a model compiles its kernels
    one after the other, and each new kind of batch compiles more. This function starts one process that forks for each
    kernel, never touches a GPU, and fills Triton's cache on disk; then it loads the kernels into this process. Later
    calls of these sizes compile and load nothing. Where kernels cannot be compiled ahead (ROCm, a single CPU core),
    this process compiles them.

    ::

        query, key, value = (torch.empty(4, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
        write = functools.partial(paged_ops.reshape_and_cache, key, value, kv_cache, slot_mapping)
        attend = functools.partial(paged_ops.paged_attention, query, kv_cache, tables, lens, starts, 128**-0.5)
        print(paged_ops.warm_up([write, attend], max_num_tokens=8192, max_num_seqs=256))

    :meth:`paged_ops.graphs.DecodeGraphs.capture` and :meth:`paged_ops.generation.GenerationLoop.warm_up` call this.

    Args:
        calls: functions that call ops of this package on GPU tensors: ``functools.partial`` of an op, or a step of a
            model. Each runs once, eagerly, even if it is compiled. Meanwhile attention, merges, cache writes, copies
            and swaps check their arguments but launch nothing: results are 0, and caches do not change. Other ops run
            as usual. Tensors must have the shapes, strides, dtypes and alignment of later calls, except for the numbers
            of tokens and sequences.
        sizes: pairs (tokens, sequences): also compile the attention kernels for batches of these sizes.
        max_num_tokens, max_num_seqs: also compile the attention kernels for all batches up to these sizes, except those
            whose sequences all have the same few tokens, above one, as in speculation: name these in ``sizes``. Set
            both or neither.
        wait: return when all kernels are compiled and loaded. Otherwise compilation continues in the background, and
            first launches load their kernels.

    Returns:
        The numbers of kernels. Without a GPU nothing is run or compiled, and they are 0.

    Raises:
        ValueError: a number is not positive, or an op refuses its arguments.
    """
    ahead = Ahead(map(_eagerly, calls), sizes=sizes, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)
    return ahead.finish() if wait else ahead.report()


def _eagerly(call: Callable[[], Any]) -> Callable[[], Any]:
    return torch.compiler.set_stance("force_eager")(call)


class Ahead:
    """Kernels that are being compiled; :meth:`finish` waits and loads them. Arguments as of :func:`warm_up`, but calls
    run as they are, also inside of compiled code.

    ``equal_lengths``: with ``max_num_tokens``, also for batches whose sequences have the same number of tokens, above
    one.
    """

    @torch.no_grad()
    def __init__(
        self,
        calls: Iterable[Callable[[], Any]],
        *,
        sizes: Iterable[tuple[int, int]] = (),
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        equal_lengths: bool = False,
    ) -> None:
        expect(
            (max_num_tokens is None) == (max_num_seqs is None),
            "max_num_seqs",
            "max_num_tokens and max_num_seqs together",
            max_num_seqs,
        )
        wanted = [(int(T), int(S)) for T, S in sizes]
        most = [] if max_num_tokens is None or max_num_seqs is None else [(max_num_tokens, max_num_seqs)]
        for T, S in (*wanted, *most):
            expect(T >= 1 and S >= 1, "sizes", "positive numbers of tokens and sequences", (T, S))
        self._loads: dict[Any, dict[torch.device, Callable[[], None]]] = {}  # by job of precompile.py
        self._states: list[Any] = []
        self._compiled = 0
        self._started = time.perf_counter()
        if not has_gpu():
            return
        from paged_ops.lowerings.gpu import precompile
        from paged_ops.lowerings.gpu.attention.tuning import covering_batches

        compiler = precompile.compiler() if precompile.can_precompile() else None
        before = 0 if compiler is None else len(compiler.states)
        for largest in most:
            batches = covering_batches(*largest, equal_lengths=equal_lengths)
            wanted += [(T, S) for T, S in batches if T >= S]
        for call in calls:
            with precompile.noting(wanted) as notes:
                call()
            for job, loads in notes.items():
                self._loads.setdefault(job, {}).update(loads)
            if compiler is not None:
                self._states = compiler.submit(self._loads)
                self._compiled = len(compiler.states) - before

    def finish(self) -> WarmUp:
        """Wait until the kernels are compiled, and load them."""
        errors = {}
        if self._states:
            from paged_ops.lowerings.gpu import precompile

            precompile.wait_for(self._states, precompile.MOST_SECONDS)
            errors = {job: state.error for job, state in zip(self._loads, self._states, strict=True) if state.error}
        else:
            self._compiled = len(self._loads)
        for job, loads in self._loads.items():
            if job not in errors:
                try:
                    for load in loads.values():
                        load()
                except Exception as error:
                    errors[job] = f"{job.name}: {type(error).__name__}: {error}"
        return self.report(errors.values())

    def report(self, errors: Iterable[str] = ()) -> WarmUp:
        seconds = time.perf_counter() - self._started
        return WarmUp(len(self._loads), self._compiled, seconds, tuple(errors))


def has_gpu() -> bool:
    """Whether there is a GPU whose kernels Triton compiles."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


def runs_kernels(device: torch.device) -> bool:
    """Whether ops on this device launch kernels that :func:`warm_up` compiles."""
    return device.type == "cuda" and has_gpu()


def prepare() -> bool:
    """Start the compiler process, which takes a few seconds. Returns whether kernels can be compiled ahead of time."""
    if not has_gpu():
        return False
    from paged_ops.lowerings.gpu import precompile

    if precompile.can_precompile():
        precompile.compiler()
        return True
    return False


def without_kernels() -> contextlib.AbstractContextManager[object]:
    """A context in which attention and cache writes of this thread launch nothing, if :func:`prepare` can compile."""
    if not prepare():
        return contextlib.nullcontext()
    from paged_ops.lowerings.gpu import precompile

    return precompile.noting()
