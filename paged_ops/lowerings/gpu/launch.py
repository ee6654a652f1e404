"""Launching a kernel again without Triton's own look-up, which costs the host more than the launch itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from paged_ops.lowerings.gpu.device import FUSED, NEWEST_KNOWN, TRITON, on_device


class Launcher:
    """A kernel with its constants bound, for launches that differ in addresses, numbers and grid only.

    ::

        launcher = Launcher(kernel, {"BLOCK": 128, "num_warps": 4}, x.device)   # once for each kind of call
        launcher((grid, 1, 1), (x, None, out), (n, scale))                      # kernel[grid](x, None, out, n, scale)

    The kernel takes pointers first, then numbers, then constants. A launcher serves one *kind* of call, which its owner
    tells apart: one device, the dtypes of the tensors and which of them are None; integers that the kernel specialises
    on keep their value (those that vary are ``do_not_specialize``). What Triton specialises pointers on, whether they
    are multiples of 16 bytes, is seen to here: each combination gets a kernel of its own.

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
        self, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], numbers: Sequence[int | float] = ()
    ) -> None:
        """Launch on the current stream of the launcher's device."""
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        if self.at(grid, addresses, numbers):
            return
        with on_device(self._device):
            compiled = self._kernel[grid](*tensors, *numbers, **self._constants, **FUSED)
            if compiled is None or torch.version.hip is not None or TRITON > NEWEST_KNOWN:
                return
            parameters = self._kernel.arg_names[len(tensors) + len(numbers) :]
            self._values = tuple(self._constants[name] for name in parameters)
            self._stream = triton.runtime.driver.active.get_current_stream
            self._compiled[_alignment(addresses)] = _entry(compiled)

    def at(self, grid: tuple[int, int, int], addresses: Sequence[int], numbers: Sequence[int | float] = ()) -> bool:
        """Launch on what lies at these addresses (0 for None) and return True, if nothing is new about the call.

        After False call the launcher itself. For owners that would make views only to name an address and a dtype.
        """
        known = self._compiled.get(_alignment(addresses))
        hook = triton.knobs.runtime.launch_enter_hook
        if known is None or getattr(hook, "calls", hook):
            return False
        launch, kernel = known
        arguments = (*grid, self._stream(self._index), *kernel, *addresses, *numbers, *self._values)
        if torch.cuda.current_device() == self._index:
            launch(*arguments)
        else:
            with torch.cuda.device(self._index):
                launch(*arguments)
        return True


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
