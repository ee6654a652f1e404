"""Launching a kernel again without Triton's own look-up, which costs the host more than the launch itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from paged_ops.lowerings.gpu.target import FUSED, NEWEST_KNOWN, TRITON, on_device


class Launcher:
    """A kernel with its constants bound, for launches that differ in addresses, numbers and grid only.

    ::

        launcher = Launcher(kernel, {"BLOCK": 128, "num_warps": 4}, x.device)   # once for each kind of call
        launcher((grid, 1, 1), (x, None, out), (n, 0.5))                        # kernel[grid]((x, None, out), n, 0.5)

    The kernel takes a tuple of pointers, then numbers, what else it wants, and constants. Numbers are each a parameter,
    ``do_not_specialize``, which Triton would not heed of numbers in a tuple.
    A launcher serves one *kind* of call, which its owner tells apart: one device, the dtypes of the tensors and which
    of them are None. Where that is so for some only because the kernel does not take them, :meth:`at` may be given any
    address for them. What Triton specialises pointers on, whether they are multiples of 16 bytes, is seen to here: each
    combination gets a kernel of its own.

    Triton launches the first call of each combination, and every call in its interpreter, on ROCm (which specialises on
    the sizes of storages too), under a profiler's launch hooks, and if it is newer than the newest known here. It is
    the only place that knows how Triton (3.5 to 3.9) calls a compiled kernel.
    """

    __slots__ = ("_compiled", "_constants", "_device", "_index", "_kernel", "_stream", "_values")

    def __init__(self, kernel: Any, constants: dict[str, Any], device: torch.device) -> None:
        self._kernel = kernel
        self._constants = constants
        self._values: tuple[Any, ...] = ()  # of the constants that are parameters, in the kernel's order
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
        """Launch on the current stream of the launcher's device; ``addresses`` as :meth:`at` was given them."""
        if addresses is None:
            addresses = tuple(0 if each is None else each.data_ptr() for each in tensors)
        if self.at(grid, addresses, numbers, *more):
            return
        with on_device(self._device):
            compiled = self._kernel[grid](tensors, *numbers, *more, **self._constants, **FUSED)
            if compiled is None or torch.version.hip is not None or TRITON > NEWEST_KNOWN:
                return
            parameters = self._kernel.arg_names[1 + len(numbers) + len(more) :]
            self._values = tuple(self._constants[name] for name in parameters)
            self._stream = triton.runtime.driver.active.get_current_stream
            self._compiled[_alignment(addresses)] = _entry(compiled)

    def at(
        self,
        grid: tuple[int, int, int],
        addresses: tuple[int, ...],
        numbers: Sequence[int | float | None] = (),
        *more: Any,
    ) -> bool:
        """Launch on what lies at these addresses (0 for None) and return True, if nothing is new about the call.

        After False call the launcher itself. For owners that would make views only to name an address and a dtype.
        """
        known = self._compiled.get(_alignment(addresses))
        hook = triton.knobs.runtime.launch_enter_hook
        if known is None or getattr(hook, "calls", hook):
            return False
        launch, kernel = known
        arguments = (*grid, self._stream(self._index), *kernel, addresses, *numbers, *more, *self._values)
        if torch.cuda.current_device() == self._index:
            launch(*arguments)
        else:
            with torch.cuda.device(self._index):
                launch(*arguments)
        return True


class Launch:
    """One kernel of a call that launches several: all are given the call's pointers and numbers, tuples with named
    fields, and each leaves out what it is ``without``."""

    __slots__ = ("_grid", "_launcher", "_without")

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], without: Iterable[str] = ()) -> None:
        self._launcher, self._grid, self._without = launcher, grid, frozenset(without)

    def at(self, addresses: tuple[int, ...], numbers: Any) -> bool:
        """As :meth:`Launcher.at`."""
        return self._launcher.at(self._grid, addresses, numbers)

    def __call__(self, tensors: Any, numbers: Any, addresses: tuple[int, ...]) -> None:
        """As :meth:`Launcher.__call__`."""
        self._launcher(self._grid, self._taken(tensors), self._taken(numbers), addresses=addresses)

    def _taken(self, given: Any) -> Any:
        return given._replace(**dict.fromkeys(self._without.intersection(given._fields)))


class Plan(NamedTuple):
    """What a call launches, in this order, and the float32s of its workspace: to the parts' lse, to the counters of
    work that was taken, and in all."""

    launches: tuple[Launch, ...]
    workspace: tuple[int, int, int]


_launchers: dict[Any, Launcher] = {}
# So many kinds of calls are remembered; then all are planned anew.
MOST_KINDS = 4096


def launcher_of(kernel: Any, constants: dict[str, Any], device: torch.device) -> Launcher:
    """The launcher of these constants, all of which are hashable: they tell the kind of call apart."""
    key = (kernel, device, *constants.items())
    if key not in _launchers:
        if len(_launchers) >= MOST_KINDS:
            _launchers.clear()
        _launchers[key] = Launcher(kernel, constants, device)
    return _launchers[key]


def _entry(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and what it wants to know of it between the stream and the arguments."""
    run, function, packed, no_hooks = compiled.run, compiled.function, compiled.packed_metadata, (None, None, None)
    if TRITON < (3, 7) and run.global_scratch_size == run.profile_scratch_size == 0:
        # The function in C, past the method that would allocate scratch memory for it.
        how = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (function, *how, packed, *no_hooks)
    return run, (function, packed, *no_hooks)


def _alignment(addresses: Sequence[int]) -> Any:
    """Which of the addresses are multiples of 16: 0 for all of them."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits & 15 and tuple(address & 15 == 0 for address in addresses)
