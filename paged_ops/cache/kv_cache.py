"""The cache's memory: ``KVCache``, a ``BlockAllocator`` whose blocks are real.

One step of an engine, here for a new sequence (a chunked prefill writes and commits a part of the tokens at a time):

    num_cached = cache.admit(seq_id, prompt)        # later steps: cache.append(seq_id, [token])
    cache.flush_copies()                            # copy-on-write of this step, all layers in one launch
    ...                                             # the model writes cache.slots(seq_id) and attends
    cache.commit(seq_id, len(prompt) - num_cached)  # the step is issued: its full blocks may now be shared

Letters: N blocks, B tokens per block, K key/value heads, D head size, Dv value head size, L layers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paged_ops.cache.allocator import BlockAllocator
from paged_ops.cache.block_pool import OutOfBlocks
from paged_ops.cache.shard import UNSHARDED, TokenShard
from paged_ops.checks import at_least, describe_setting, expect
from paged_ops.device import with_index
from paged_ops.layouts import (
    Layout,
    allocate_kv_cache,
    check_storage,
    get_default_layout,
    index_dtype,
    kv_cache_shape,
    split_kv_cache,
)
from paged_ops.ops import copy_blocks, swap_blocks

if TYPE_CHECKING:
    from paged_ops.cache.states import StateCache

__all__ = ["KVCache", "OutOfBlocks"]


class KVCache(BlockAllocator):
    """A ``BlockAllocator`` whose blocks are real: one tensor per layer, and a host cache for preemption.

    A block's id means the same block in all layers; how large it is may differ from layer to layer. ``copy.deepcopy``
    and pickle give an independent cache with equal content.

    Args:
        num_layers: L.
        num_blocks: N. ``num_blocks_for`` gives what fits into a number of bytes.
        block_size: B tokens per block, any number from 1.
        num_kv_heads: K, one number or one for each layer.
        head_size: D, one number or one for each layer.
        value_head_size: Dv, one number or one for each layer; D when None. With LATENT, whose D is R + P, it is R. 0 is
            a layer of keys alone ``[N, B, D]``, those of an indexer.
        dtype: float32, float16, bfloat16, a float8, or uint8 (fp8 bits; ops then need a ``kv_cache_dtype``).
        kv_cache_dtype: what uint8 storage will hold, for the ops' argument of this name. ``"fp8_ds_mla"`` makes latent
            rows that hold their scales, ``[N, B, 656]``: with LATENT, D 576 and Dv 512.
        device: where the layers live; "cuda" means the GPU that is current at construction.
        layout: the default layout of the device when None.
        num_host_blocks: blocks in host memory (pinned for a CUDA or ROCm device) that ``swap_out`` moves sequences to.
        sliding_window, attention_chunk: how far all layers see; blocks out of reach are freed. 0: everything.
            All layers share the blocks, so use :class:`paged_ops.HybridCache` for layers with different windows.
        num_first_tokens: with a window, the blocks of this many first tokens are kept, for the ops' argument of this
            name.
        shard: this rank's shard of each sequence's tokens (context parallelism): B / W tokens of each block. All ranks
            have the same N, B and calls, and so the same block ids.

    Attributes:
        layers: L tensors, zeroed, in the form that the ops take (HND is a view of its allocation). Two forms must be
            split where they are used, inside the compiled function: X_PACKED, the flat ``[2, N, B·K·D]``, by
            ``split_kv_cache``; and layers with Dv other than D, ``[N, B, K, D + Dv]``, by ``split_joined_cache``.
        host_layers: L tensors in the same form, with ``num_host_blocks`` blocks.
        num_kv_heads, head_size, value_head_size: of each layer.
        kv_cache_dtype: as given.
        pools, pool_of_layer, states: as of a :class:`paged_ops.HybridCache` that has this pool alone.
        lock: held by calls of generation loops that change the cache.

    Raises:
        ValueError: a size is not positive, there is not one for each layer, or the layout does not serve them.
    """

    states: StateCache | None = None

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        *,
        value_head_size: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        device: torch.device | str = "cpu",
        layout: Layout | str | None = None,
        num_host_blocks: int = 0,
        sliding_window: int = 0,
        attention_chunk: int = 0,
        num_first_tokens: int = 0,
        shard: TokenShard = UNSHARDED,
    ) -> None:
        reach = {"sliding_window": sliding_window, "attention_chunk": attention_chunk}
        super().__init__(num_blocks, block_size, num_host_blocks, **reach, num_first_tokens=num_first_tokens)
        sizes = _layer_sizes(num_layers, num_kv_heads, head_size, value_head_size)
        self.num_kv_heads, self.head_size, self.value_head_size = sizes
        self.shard, in_memory = shard, shard.check(block_size)
        if shard.size > 1 and (sliding_window or attention_chunk):
            raise ValueError("shard: expected one rank for layers with a window or chunk, which each rank keeps whole")
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype
        self.device = with_index(device)
        named: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
        chosen = get_default_layout(self.device) if layout is None else layout

        def allocate(blocks: int, where: torch.device, pin_memory: bool) -> list[Tensor]:
            return [
                allocate_kv_cache(
                    chosen, blocks, in_memory, K, D, dtype, where, pin_memory, value_head_size=Dv, **named
                )
                for K, D, Dv in zip(*sizes, strict=True)
            ]

        self.layers = allocate(num_blocks, self.device, False)
        on_cuda = self.device.type == "cuda"
        self.host_layers = allocate(num_host_blocks, torch.device("cpu"), on_cuda) if num_host_blocks else []
        self.layout = Layout(chosen)
        if self.layout is Layout.X_PACKED:
            for layer, K, D in zip(self.layers, *sizes[:2], strict=True):
                split_kv_cache(layer, K, D)  # raises if the head size cannot be packed
        self._prepare_device()

    def _prepare_device(self) -> None:
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            for layer in self.layers:  # a graph that torch.compile captures may write what never moves
                torch._dynamo.mark_static_address(layer, guard=False)
        self._swapped_event = torch.cuda.Event() if on_cuda and self.host_layers else None
        if self._swapped_event is not None:
            # The arguments keep the pinned memory alive until the last swap is done, also when the cache is dropped.
            weakref.finalize(self, _wait, self._swapped_event, self.host_layers)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return {name: value for name, value in self.__dict__.items() if name != "_swapped_event"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.device.type == "cuda":
            self.host_layers = [layer.pin_memory() for layer in self.host_layers]
        self._prepare_device()

    @staticmethod
    def num_blocks_for(
        num_bytes: float,
        num_layers: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        dtype: torch.dtype,
        *,
        value_head_size: int | Sequence[int] | None = None,
        layout: Layout | str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> int:
        """How many blocks, keys and values of all layers, fit into ``num_bytes`` (also ``0.9 * free``); of LATENT keys
        that are values. Of a cache sharded over ranks, ``block_size`` is what one rank holds of a block."""
        at_least(1, block_size=block_size)
        is_size = isinstance(num_bytes, Real) and 0 <= num_bytes < math.inf
        expect(is_size, "num_bytes", "a number, 0 or more", describe_setting(num_bytes))
        sizes = zip(*_layer_sizes(num_layers, num_kv_heads, head_size, value_head_size), strict=True)
        check_storage(dtype, kv_cache_dtype)
        chosen = Layout.NHD if layout is None else layout

        def of_token(K: int, D: int, Dv: int) -> int:
            shape = kv_cache_shape(chosen, 1, 1, K, D, value_head_size=Dv, kv_cache_dtype=kv_cache_dtype)
            return math.prod(shape) * (dtype if Dv else index_dtype(dtype, kv_cache_dtype)).itemsize

        return int(num_bytes // (block_size * sum(of_token(*each) for each in sizes)))

    @property
    def pools(self) -> tuple[KVCache, ...]:
        return (self,)

    @property
    def pool_of_layer(self) -> tuple[int, ...]:
        return (0,) * len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the layers on the device."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host cache."""
        return sum(layer.nbytes for layer in self.host_layers)

    def slots(self, seq_id: Hashable, start: int | None = None, stop: int | None = None) -> list[int]:
        """As of ``BlockAllocator``; of a cache sharded over ranks, -1 for tokens of other ranks."""
        slots = super().slots(seq_id, start, stop)
        if self.shard.size == 1:
            return slots
        all_slots = torch.tensor(slots, dtype=torch.int64, device="cpu")
        mine: list[int] = self.shard.slots(all_slots // self.block_size, all_slots, self.block_size).tolist()
        return mine

    def flush_copies(self) -> None:
        """Does the queued copy-on-write copies, all layers in one launch: call it before each step that writes."""
        pairs = self.pending_copies()
        if pairs:
            mapping = torch.tensor(pairs, dtype=torch.int64, device="cpu")
            copy_blocks(self.by_block(self.layers), mapping)
            self.take_copies()

    def swap_out(self, seq_id: Hashable) -> list[tuple[int, int]]:
        """Moves a sequence to the host cache, asynchronously on the current stream. Later work on that stream may use
        its device blocks at once. ``swap_in`` is asynchronous, too. Returns the (device block, host block) pairs that
        were moved."""
        self._live(seq_id)
        self.flush_copies()
        return super().swap_out(seq_id)

    def try_copies(self) -> None:
        """Calls the ops that copy and swap blocks, as :func:`paged_ops.warm_up` does, which then launches nothing."""
        layers, host_layers = self.by_block(self.layers), self.by_block(self.host_layers)
        if self.num_blocks > 1:
            copy_blocks(layers, torch.tensor([[0, 1]], dtype=torch.int64, device="cpu"))
        if self.num_blocks and host_layers:
            block = torch.tensor([[0, 0]], dtype=torch.int64, device="cpu")
            swap_blocks(layers, host_layers, block)
            swap_blocks(host_layers, layers, block)

    def synchronize(self) -> None:
        """Waits until all swaps are done. Only needed before reading ``host_layers``: work on the device is in
        order."""
        if self._swapped_event is not None:
            self._swapped_event.synchronize()

    def _copy_between(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        if not pairs:
            return
        caches = self.by_block(self.layers), self.by_block(self.host_layers)
        source, target = caches if to_host else reversed(caches)
        mapping = torch.tensor(pairs, dtype=torch.int64, device="cpu")
        if self._swapped_event is None:
            swap_blocks(source, target, mapping)
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._swapped_event)  # swaps stay in order when the stream changes; one event covers all
        swap_blocks(source, target, mapping)
        self._swapped_event.record(stream)

    def by_block(self, layers: list[Tensor]) -> list[Tensor]:
        """The layers as tensors whose first dimension is the block: the two planes of the flat x-packed allocation."""
        if self.layout is not Layout.X_PACKED:
            return layers
        return [plane for layer in layers for plane in layer.unbind(0)]


def _layer_sizes(
    num_layers: int,
    num_kv_heads: int | Sequence[int],
    head_size: int | Sequence[int],
    value_head_size: int | Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """K, D and Dv of each layer."""
    at_least(1, num_layers=num_layers)

    def of_layers(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
        values = tuple(given) if isinstance(given, Iterable) else (given,) * num_layers
        if len(values) != num_layers:
            raise ValueError(f"{name}: expected a number, or one for each of {num_layers} layers, got {len(values)}")
        for value in values:
            at_least(0 if name == "value_head_size" else 1, **{name: value})
        return values

    head_sizes = of_layers("head_size", head_size)
    value_head_sizes = head_sizes if value_head_size is None else of_layers("value_head_size", value_head_size)
    return of_layers("num_kv_heads", num_kv_heads), head_sizes, value_head_sizes


def _wait(event: torch.cuda.Event, pinned: list[Tensor]) -> None:
    event.synchronize()
