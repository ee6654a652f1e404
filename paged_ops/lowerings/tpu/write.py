"""Cache writes to an interleaved cache on a TPU: a kernel that copies runs of consecutive slots.

XLA's scatter writes rows one after the other. Tokens of a sequence fill a page in order, so most rows of a batch have
consecutive slots: a prompt has a few runs of whole pages, a decode step has runs of one row. The kernel finds the runs
in the slot mapping on the device, and copies each as a few slices whose lengths are powers of two, from vector memory
to the cache, many in flight at once. Any slot mapping works; runs only make it faster.

Source of the idea: the slice-wise cache update of vLLM's TPU backend. Slices of static sizes (the binary digits of a
run's length) let the same kernel run in Pallas' interpret mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Rows of a tile, and of the longest slice: with 16 combined heads of 128 in bfloat16, 512 KiB of vector memory.
TILE_ROWS = 128
# Memory is tiled: the last dimension in multiples of this.
LANES = 128
# Bounds slots and run lengths to half of the 1 MiB of scalar memory.
MAX_ROWS = 1 << 16


def can_write_runs(kv_cache: Tensor, T: int) -> bool:
    """Whether the kernel can write T rows to a cache: rows must be whole memory tiles, and slots must fit 32 bits."""
    N, B, K2, D = kv_cache.shape
    return D % LANES == 0 and heads_fill_tiles(K2, kv_cache.dtype) and N * B < 1 << 31 and T <= MAX_ROWS


def heads_fill_tiles(K2: int, dtype: torch.dtype) -> bool:
    """Whether 2K combined heads fill whole tiles of a TPU's memory, which packs elements of less than 32 bits."""
    packing = 4 // dtype.itemsize
    tiles = K2 // packing
    return K2 % packing == 0 and (tiles in (1, 2, 4, 8) or tiles % 8 == 0)


def write_runs(kv_cache: Tensor, rows: Tensor, slots: Tensor, interpret: bool = False) -> Tensor:
    """The interleaved cache ``[N, B, 2K, D]`` with ``rows [T, 2K, D]`` at ``slots [T]``; negative slots are skipped."""
    N, B, K2, D = kv_cache.shape
    write = _computation(rows.shape[0], N * B, K2, D, kv_cache.dtype, interpret)
    written = write([kv_cache.view(N * B, K2, D), rows, slots.to(torch.int32)])[0]
    return written.view(kv_cache.shape)


@functools.cache
def _computation(
    T: int, num_slots: int, K2: int, D: int, dtype: torch.dtype, interpret: bool
) -> Callable[[list[Tensor]], list[Tensor]]:
    """The update as an XLA computation, lowered for a TPU on any machine; in interpret mode for the CPU."""
    from torch_xla._internal.jax_workarounds import jax_import_guard
    from torch_xla.core import xla_builder

    jax_import_guard()  # torch_xla must claim the TPU before jax
    import jax
    from torch_xla.experimental.custom_kernel import convert_torch_dtype_to_jax

    element = convert_torch_dtype_to_jax(dtype)
    cache, rows = (jax.ShapeDtypeStruct((n, K2, D), element) for n in (num_slots, T))
    slots = jax.ShapeDtypeStruct((T,), "int32")
    traced = jax.jit(functools.partial(update, interpret=interpret), keep_unused=True).trace(cache, rows, slots)
    lowered = traced.lower(lowering_platforms=("cpu" if interpret else "tpu",))
    proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    computation = xla_builder.computation_from_module_proto("write_runs", proto)
    return xla_builder.xla_computation_as_func(computation, "write_runs")


def update(cache: Any, rows: Any, slots: Any, interpret: bool = False) -> Any:
    """The write in JAX: ``cache [N*B, 2K, D]``, ``rows [T, 2K, D]``, ``slots`` int32 ``[T]``."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    T, K2, D = rows.shape
    R = min(TILE_ROWS, 1 << (T - 1).bit_length())
    tiles = -(-T // R)
    slots = jnp.pad(slots, (0, tiles * R - T), constant_values=-1)
    row = jnp.arange(tiles * R, dtype=jnp.int32)
    # A run ends where slots are not consecutive, or with its tile.
    begins = (slots < 0) | (slots != jnp.roll(slots, 1) + 1) | (row % R == 0)
    ends = jax.lax.cummin(jnp.where(jnp.roll(begins, -1).at[-1].set(True), row + 1, tiles * R), reverse=True)
    lengths = jnp.where(begins & (slots >= 0), ends - row, 0)

    def kernel(slots_ref, lengths_ref, rows_ref, _, cache_ref, semaphore):
        first = pl.program_id(0) * R

        def each_slice(do: Callable[[Any], None]) -> None:
            def run(r, carry):
                slot, length = slots_ref[first + r], lengths_ref[first + r]
                size = R
                while size:
                    start = length // (2 * size) * (2 * size)  # rows copied by larger slices

                    @pl.when(length & size != 0)
                    def _(size=size, start=start):
                        source = rows_ref.at[pl.ds(r + start, size)]
                        do(pltpu.make_async_copy(source, cache_ref.at[pl.ds(slot + start, size)], semaphore))

                    size //= 2
                return carry

            jax.lax.fori_loop(0, R, run, 0)

        each_slice(lambda copy: copy.start())
        each_slice(lambda copy: copy.wait())

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((R, K2, D), lambda tile, *_: (tile, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={3: 0},  # counted with the two scalar arguments
        interpret=interpret,
        name="write_runs",
    )
    return call(slots, lengths, rows, cache)
