"""Launching a kernel again without Triton's own look-up, which costs the host more than the launch itself."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler.compiler import make_backend

from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.gpu.target import FUSED, NEWEST_KNOWN, TRITON, on_device, settled

NO_PROGRAMS = 0, 1, 1  # the grid of a launch that only loads a kernel: Triton then launches nothing


class Launcher:
    """A kernel with its constants bound, for launches that differ in addresses, numbers and grid only.

    ::

        launcher = Launcher(kernel, {"BLOCK": 128, "num_warps": 4}, x.device)   # once for each kind of call
        launcher((grid, 1, 1), (x, None, out), (n, 0.5))                        # kernel[grid]((x, None, out), n, 0.5)

    The kernel takes a tuple of pointers, then numbers, other arguments, and constants. Each number is a parameter of
    its own, with ``do_not_specialize``, which Triton ignores for numbers in a tuple.

    A launcher serves one *kind* of call, which its owner must distinguish: one device, the dtypes of the tensors, and
    which of them are None. For tensors that the kernel does not take, :meth:`at` accepts any address. Triton
    specialises on whether pointers are multiples of 16 bytes: here, too, each combination gets a kernel of its own.

    Triton launches the first call of each combination. It launches every call in its interpreter, on ROCm (which also
    specialises on the sizes of storages), under a profiler's launch hooks, and if it is newer than the newest Triton
    known here. This class is the only place that knows how Triton (3.5 to 3.9) calls a compiled kernel.

    ``cluster``: how many successive programs are a thread block cluster (sm_90). Triton then only compiles: to it, the
    kernel has no clusters (see hopper/exchange.py), and the grid counts clusters.

    A launcher with ``can_wait`` does nothing where calls are only noted (:mod:`paged_ops.lowerings.gpu.precompile`).
    """

    __slots__ = (
        "_cluster",
        "_compiled",
        "_constants",
        "_device",
        "_index",
        "_kernel",
        "_stream",
        "_values",
        "can_wait",
    )

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        device: torch.device,
        *,
        can_wait: bool = False,
        cluster: int = 1,
    ) -> None:
        self.can_wait, self._cluster = can_wait, cluster
        self._kernel = settled(kernel)
        named = [each.name for each in getattr(kernel, "params", ()) if each.is_constexpr]
        missing = [name for name in named if name not in constants]
        if missing:  # a default would serve the first call, which Triton launches, and no later one
            raise TypeError(f"{kernel.__name__}: constants must name {', '.join(missing)}, got {', '.join(constants)}")
        self._constants = {name: _named(value) for name, value in constants.items()}
        self._values: tuple[Any, ...] = ()  # values of the constants that are parameters, in the kernel's order
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # by alignment
        self._device, self._index = device, device.index
        self._stream: Any = None

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float | None] = (),
        *more: Any,
        addresses: tuple[int, ...] | None = None,
    ) -> None:
        """Launch on the current stream of the launcher's device, by Triton if necessary."""
        if addresses is None:
            addresses = tuple(0 if each is None else each.data_ptr() for each in tensors)
        if self.at(grid, addresses, numbers, *more):
            return
        job = self._kernel, tensors, addresses, numbers, more, self._constants
        notes = precompile.notes() if self.can_wait else None
        if notes is not None:
            if _alignment(addresses) not in self._compiled:
                load = functools.partial(self, NO_PROGRAMS, tensors, numbers, *more, addresses=addresses)
                with on_device(self._device):
                    notes.setdefault(precompile.job_of(*job), {})[self._device] = load
            return
        with on_device(self._device), precompile.in_cache(job):
            if self._cluster > 1:
                compiled = self._kernel.warmup(tensors, *numbers, *more, grid=grid, **{**FUSED, **self._constants})
            else:
                compiled = self._kernel[grid](tensors, *numbers, *more, **{**FUSED, **self._constants})
            if compiled is None or torch.version.hip is not None or TRITON > NEWEST_KNOWN:
                return
            parameters = self._kernel.arg_names[1 + len(numbers) + len(more) :]
            self._values = tuple(self._constants[name] for name in parameters)
            self._stream = triton.runtime.driver.active.get_current_stream
            known = self._compiled[_alignment(addresses)] = _entry(compiled, self._cluster)
            if self._cluster > 1:
                self._launch(known, grid, addresses, numbers, *more)

    def at(
        self,
        grid: tuple[int, int, int],
        addresses: tuple[int, ...],
        numbers: Sequence[int | float | None] = (),
        *more: Any,
    ) -> bool:
        """Launch with these addresses (0 for None) and return True, if the combination is known; else return False.

        After False call the launcher itself. Owners thus need no views of tensors only to have their addresses.
        """
        known = self._compiled.get(_alignment(addresses))
        hook = triton.knobs.runtime.launch_enter_hook
        if known is None or getattr(hook, "calls", hook) or (self.can_wait and precompile.notes() is not None):
            return False
        if torch.cuda.current_device() == self._index:
            self._launch(known, grid, addresses, numbers, *more)
        else:
            with torch.cuda.device(self._index):
                self._launch(known, grid, addresses, numbers, *more)
        return True

    def _launch(
        self, known: Any, grid: tuple[int, int, int], addresses: tuple[int, ...], numbers: Sequence[Any], *more: Any
    ) -> None:
        launch, kernel = known
        launch(*grid, self._stream(self._index), *kernel, addresses, *numbers, *more, *self._values)


def _named(value: Any) -> Any:
    """A constant with the names of torch's dtypes in their place. No kernel reads these fields, and Triton writes
    constants as JSON where a program has set a hook that runs after each compilation (vLLM does)."""
    if isinstance(value, torch.dtype):
        return str(value)
    if not isinstance(value, tuple):
        return value
    parts = map(_named, value)
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


Grid = tuple[int, int, int]


class Launch:
    """One kernel of a call that launches several. All get the call's pointers and numbers, tuples with named fields;
    each leaves out the fields ``without``. The grid may depend on the call's numbers."""

    __slots__ = ("_grid", "_launcher", "_without")

    def __init__(self, launcher: Launcher, grid: Grid | Callable[[Any], Grid], without: Iterable[str] = ()) -> None:
        self._launcher, self._grid, self._without = launcher, grid, frozenset(without)

    def grid(self, numbers: Any) -> Grid:
        grid = self._grid
        return grid if isinstance(grid, tuple) else grid(numbers)

    @property
    def kernel(self) -> tuple[str, dict[str, Any]]:
        """The name of the kernel, and its constants."""
        return self._launcher._kernel.fn.__name__, self._launcher._constants

    def more(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        """The kernel's arguments between the numbers and the constants; None if only a launch by Triton has them."""
        return ()

    def __call__(self, tensors: Any, numbers: Any, addresses: tuple[int, ...]) -> None:
        """As :meth:`Launcher.__call__`."""
        self._launcher(self.grid(numbers), self._taken(tensors), self._taken(numbers), addresses=addresses)

    def _taken(self, given: Any) -> Any:
        return given._replace(**dict.fromkeys(self._without.intersection(given._fields)))


def relaunch(steps: Sequence[tuple[Launch, Grid]], addresses: tuple[int, ...], numbers: Any) -> int:
    """Launch, in order, the kernels that Triton has launched before with this alignment of addresses. Returns their
    number: all, or up to the first that needs a launch by Triton. All are on one device."""
    hook = triton.knobs.runtime.launch_enter_hook
    if getattr(hook, "calls", hook) or precompile.notes() is not None:
        return 0
    alignment, stream = _alignment(addresses), None
    for n, (launch, grid) in enumerate(steps):
        launcher, more = launch._launcher, launch.more(addresses)
        if more is None or alignment not in launcher._compiled:
            return n
        if stream is None:
            if torch.cuda.current_device() != launcher._index:
                with torch.cuda.device(launcher._index):
                    return relaunch(steps, addresses, numbers)
            stream = launcher._stream(launcher._index)
        run, kernel = launcher._compiled[alignment]
        run(*grid, stream, *kernel, addresses, *numbers, *more, *launcher._values)
    return len(steps)


# What the ``plan`` of a kernel's module chose for a batch: a hashable value. Equal choices have equal launches.
Choice = tuple[Any, ...]


class Launches(NamedTuple):
    """What a call launches, in this order, and its workspace in float32s: the offset of the parts' lse, the offset of
    the counters of taken work, and the size. ``counters``: the number of counters that the launches need
    (counters.py); if there are none, ``without_counters`` compute the same."""

    launches: tuple[Launch, ...]
    workspace: tuple[int, int, int]
    counters: int = 0
    without_counters: tuple[Launch, ...] = ()


_launchers: dict[Any, Launcher] = {}
# The most kinds of calls that are kept; with more, all are planned again.
MOST_KINDS = 4096


def launcher_of(
    kernel: Any, constants: dict[str, Any], device: torch.device, without: tuple[str, ...] = (), cluster: int = 1
) -> Launcher:
    """The launcher of these constants. All are hashable. They distinguish kinds of calls, with ``without``: the
    tensors that the kernel does not get, where that does not follow from the constants. ``cluster`` follows from
    them."""
    key = (settled(kernel), device, without, *constants.items())  # its hash is its key in the cache
    if key not in _launchers:
        if len(_launchers) >= MOST_KINDS:
            _launchers.clear()
        _launchers[key] = Launcher(kernel, constants, device, can_wait=True, cluster=cluster)
    return _launchers[key]


def _entry(compiled: Any, cluster: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """The function that launches a compiled kernel, and its arguments between the stream and the kernel's own."""
    run, function, packed, no_hooks = compiled.run, compiled.function, compiled.packed_metadata, (None, None, None)
    if cluster > 1:
        metadata = compiled.metadata
        packed = make_backend(metadata.target).pack_metadata(metadata._replace(num_ctas=cluster))
    if TRITON < (3, 7) and run.global_scratch_size == run.profile_scratch_size == 0:
        # The function in C, not the method, which would allocate scratch memory.
        how = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (function, *how, packed, *no_hooks)
    return run, (function, packed, *no_hooks)


def _alignment(addresses: Sequence[int]) -> Any:
    """Which of the addresses are multiples of 16; 0 if all are."""
    return functools.reduce(operator.or_, addresses) & 15 and tuple(address & 15 == 0 for address in addresses)
