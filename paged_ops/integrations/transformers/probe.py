"""The probe run: which caches and masks a model needs, observed on a few tokens instead of read from its config.

A model of transformers describes each layer's mask as a function of positions, and passes queries, keys and values to
an attention function. :class:`Probe` provides the caches of such a run. For each module that attends it allocates one
with the sizes of its keys and values, and derives window and chunk from its mask function. A model that a paged cache
cannot serve is refused here, before anything is generated.

Letters: K key/value heads, D head size, Dv value head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paged_ops import masks
from paged_ops.cache.states import StateCache
from paged_ops.integrations.transformers.latent import is_latent
from paged_ops.integrations.transformers.recurrent import StateLayers
from paged_ops.integrations.transformers.trial import CHUNKS, LENGTHS, DenseRun, expect_alike, trial_tokens
from paged_ops.layouts import Layout, allocate_kv_cache, get_default_layout
from paged_ops.metadata import AttentionMetadataBuilder, Batch

MOST_POSITIONS = 2**24  # the most positions passed to a mask function


class NoArgumentsError(ValueError):
    """A module attends without the caches that were passed to the model's forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            "model: expected one that passes keyword arguments to attention, so that caches reach it, got"
            f" {type(module).__name__} without any"
        )
        self.module = module


class CacheSpec(NamedTuple):
    """The sizes of one layer's cache, and its window and chunk in tokens; 0 is off. A cache of index keys has no
    values: ``value_head_size`` 0."""

    num_kv_heads: int
    head_size: int
    value_head_size: int
    window: int
    chunk: int
    latent: bool = False  # rows of R + P (head_size) columns; the first R (value_head_size) are also the values


class Index(NamedTuple):
    """The result of an indexer for the tokens of a step: T tokens, Hi heads of size Di."""

    query: Tensor  # [T, Hi, Di]
    key: Tensor  # [T, Di]
    weights: Tensor | None  # [T, Hi], float32
    starts: tuple[Tensor, Tensor] | None = None  # cos, sin [T, P] of the first token of the window that ends with each


@dataclass(frozen=True)
class Attending:
    """How a module attends: its cache and its mask."""

    cache: int  # index into the step's caches
    place: int  # index among the caches of its decoder layer
    writes: bool  # otherwise it reads another module's keys and values (Gemma-3n)
    window: int
    chunk: int
    latent: bool = False
    selects: bool = False  # it sees selected keys alone
    index_cache: int | None = None  # of a module with an indexer: of its index keys, next to ``cache`` in its layer
    pool: int = 0  # index, in a cache with one pool per window or chunk
    context: Any = None  # the handle of a Context, with context parallelism
    batch_invariant: bool = False

    @property
    def caches(self) -> list[int]:
        return [self.cache] if self.index_cache is None else [self.cache, self.index_cache]

    @property
    def form(self) -> tuple[Any, ...]:
        """Modules of one form share compiled code."""
        return self.window, self.chunk, self.writes, self.pool, self.selects, len(self.caches)


@dataclass
class MaskRequest:
    """A model's request to the mask interface. The mask has it as the attribute ``request``."""

    mask_function: Callable[..., Tensor] | None
    device: torch.device
    reach: tuple[int, int] | None = None  # set at first use


def request_mask(
    *,
    q_length: Any,
    kv_length: int,
    mask_function: Callable[..., Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """A mask of zeros with its request as an attribute."""
    rows = q_length if isinstance(q_length, int) else len(q_length)
    mask: Any = torch.zeros(1, 1, rows, kv_length, dtype=dtype, device=device)
    mask.request = MaskRequest(mask_function, mask.device)
    return mask


@dataclass
class _Call:
    name: str
    key: Tensor  # kept alive, so that no later tensor has the same address
    value: Tensor
    cache: int
    writes: bool
    reach: tuple[int, int]
    selects: bool
    index_cache: int | None = None


@dataclass
class Probe:
    """The caches of the probe run, allocated when they are needed.

    Args:
        names: the names of the model's modules.
        length: the longest sequence; masks are examined up to it.
        num_blocks, block_size: the size of each cache.
        layout: the layout of the caches.
        states: the tensors of layers that keep state.
        masks_by_type: whether the model's masks, not its layers, decide which tokens see later ones.
        batch_invariant: how the model attends.
    """

    names: dict[nn.Module, str]
    length: int
    num_blocks: int
    block_size: int
    layout: Layout
    states: list[Tensor] = field(default_factory=list)
    masks_by_type: bool = False
    batch_invariant: bool = False
    caches: list[Tensor] = field(default_factory=list)
    specs: list[CacheSpec] = field(default_factory=list)
    calls: dict[nn.Module, _Call] = field(default_factory=dict)
    _called: set[nn.Module] = field(default_factory=set)

    def begin_step(self) -> None:
        self._called.clear()

    def attend(
        self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, selected: Any = None
    ) -> tuple[Attending, Tensor]:
        """How ``module`` attends, and its cache. ``selected``: the keys it sees, or the :class:`Index` of its indexer;
        None is all.

        Raises:
            ValueError: it attends twice in a step, its keys change their shape, or its mask is neither causal nor
                causal with a window or chunks.
        """
        name = self.names.get(module, type(module).__name__)
        if module in self._called:
            raise ValueError(
                f"a cache for each layer that attends, but {name} attends twice in one step: the second time would"
                " overwrite the keys and values of the first"
            )
        self._called.add(module)
        if module not in self.calls:
            self.calls[module] = self._first_call(name, module, key, value, mask, selected)
        call = self.calls[module]
        if self._sizes(module, key, value) != self.specs[call.cache][:3]:
            raise ValueError(f"keys and values of one shape in every step, but {name} changes them")
        return self.attending(call), self.caches[call.cache]

    def attending(self, call: _Call) -> Attending:
        return Attending(
            call.cache,
            call.cache,
            call.writes,
            *call.reach,
            latent=self.specs[call.cache].latent,
            selects=call.selects,
            index_cache=call.index_cache,
            batch_invariant=self.batch_invariant,
        )

    def reaches(self) -> list[tuple[int, int]]:
        """The window and the chunk of each cache; (0, 0) if the modules that read it differ."""
        of_caches: list[set[tuple[int, int]]] = [set() for _ in self.caches]
        for call in self.calls.values():
            of_caches[call.cache].add(call.reach)
        return [reaches.pop() if len(reaches) == 1 else (0, 0) for reaches in of_caches]

    @staticmethod
    def _sizes(module: nn.Module, key: Tensor, value: Tensor) -> tuple[int, int, int]:
        """Heads, head size and value head size of the cache."""
        K, D, Dv = key.shape[1], key.shape[3], value.shape[3]
        return (K, D + Dv, D) if is_latent(module) else (K, D, Dv)

    def _first_call(
        self, name: str, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, selected: Any
    ) -> _Call:
        reach, selects = self._reach(name, mask), selected is not None
        if selects and reach != (0, 0):
            raise ValueError(f"no window or chunk where keys are selected, but {name} has {reach}")
        whose = [other for other in self.calls.values() if _same(key, other.key) and _same(value, other.value)]
        if whose:
            call = _Call(name, key, value, whose[0].cache, False, reach, selects)
        else:
            sizes = self._sizes(module, key, value)
            cache = self._allocate(CacheSpec(*sizes, *reach, is_latent(module)), key)
            call = _Call(name, key, value, cache, True, reach, selects)
        if isinstance(selected, Index):
            call.index_cache = self._allocate(CacheSpec(1, selected.key.shape[1], 0, *reach), key)
        return call

    def _allocate(self, spec: CacheSpec, key: Tensor) -> int:
        """One more cache; returns its index."""
        layout = Layout.LATENT if spec.latent else self.layout
        sizes = self.num_blocks, self.block_size, spec.num_kv_heads, spec.head_size
        options: dict[str, Any] = {"value_head_size": spec.value_head_size}
        self.caches.append(allocate_kv_cache(layout, *sizes, key.dtype, key.device, **options))
        self.specs.append(spec)
        return len(self.caches) - 1

    def _reach(self, name: str, mask: Any) -> tuple[int, int]:
        if mask is None:
            raise ValueError(f"causal attention, but {name} attends without a mask, so to later tokens too")
        base = mask if mask._base is None else mask._base
        request: MaskRequest | None = getattr(mask, "request", None) or getattr(base, "request", None)
        if request is None or request.mask_function is None:
            raise ValueError(f"attention that masks by positions alone, but {name} makes its own mask or bias")
        if request.reach is None:
            request.reach = reach_of(request.mask_function, min(self.length, MOST_POSITIONS), request.device)
        if request.reach is None:
            raise ValueError(
                f"causal attention, with or without a window or chunks, but {name} asks for another mask: not causal,"
                " or with an overlay"
            )
        return request.reach


def _seen(mask_function: Callable[..., Tensor], queries: Tensor, keys: Tensor) -> Tensor:
    """The result of a mask function of transformers, ``(batch, head, query position, key position) -> visible``."""
    zero = torch.zeros((), dtype=torch.int64, device=queries.device)
    result = mask_function(zero, zero, queries, keys)
    return torch.as_tensor(result, device=queries.device).expand(torch.broadcast_shapes(queries.shape, keys.shape))


def ranges_of(
    mask_function: Callable[..., Tensor], reach: tuple[int, int], length: int, device: torch.device | str = "cpu"
) -> list[tuple[int, int]] | None:
    """The bidirectional ranges in the mask of a prompt of ``length`` tokens, where ``reach`` is the window and the
    chunk outside of the ranges. None if :func:`paged_ops.paged_attention` cannot express the mask."""
    positions = torch.arange(length, device=device)
    # only tokens of one range see the next token
    linked = _seen(mask_function, positions[:-1], positions[1:]).tolist()
    ranges, start = [], None
    for i, sees_next in enumerate([*linked, False]):
        if sees_next and start is None:
            start = i
        elif not sees_next and start is not None:
            ranges.append((start, i + 1))
            start = None
    edges = [0, length, *(edge for pair in ranges for edge in pair)]
    edges += [edge + distance for edge in edges for distance in reach if distance]
    around = torch.tensor(edges, device=device)[:, None] + torch.arange(-2, 3, device=device)
    chosen = around.flatten().clamp(0, length - 1).unique()
    window, chunk = reach
    kept = masks.keep(
        chosen, chosen, 1, 1, is_causal=True, ranges=ranges, sliding_window=window, attention_chunk=chunk
    )[0]  # fmt: skip
    return ranges if torch.equal(_seen(mask_function, chosen[:, None], chosen[None]), kept) else None


def reach_of(
    mask_function: Callable[..., Tensor], length: int, device: torch.device | str = "cpu"
) -> tuple[int, int] | None:
    """The window and the chunk (0 is off) of a mask function of transformers for positions below ``length``; None for
    any other mask."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen = functools.partial(_seen, mask_function)
    positions = torch.arange(length, device=device)
    try:
        from_start = seen(positions, zero)  # the first position that does not see position 0: the window or chunk
        size = length if bool(from_start.all()) else int(from_start.to(torch.int8).argmin())
        edges = torch.tensor([0, size, 2 * size, 3 * size, length // 2, length], device=device)
        queries = (edges[:, None] + torch.arange(-3, 4, device=device)).flatten()
        queries = torch.cat([queries, positions[:32]]).clamp(0, length - 1).unique()
        keys = torch.cat([queries, queries - size, queries - size + 1, positions[:: max(1, length // 256)]])
        keys = keys.clamp(0, length - 1).unique()[None]
        queries = queries[:, None]
        got = seen(queries, keys)
    except Exception:  # it does not only depend on positions
        return None
    causal = keys <= queries
    if size == length and torch.equal(got, causal):
        return 0, 0
    if torch.equal(got, causal & (queries - keys < size)):
        return size, 0
    if size and torch.equal(got, causal & (queries // size == keys // size)):
        return 0, size
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def masks_by_type(model: Any) -> bool:
    """Whether the masks depend on ``token_type_ids``, so tokens of a prompt may see later ones."""
    make_masks = getattr(model, "create_masks_for_generate", None)
    return make_masks is not None and "token_type_ids" in inspect.signature(make_masks).parameters


@torch.no_grad()
def run_probe(
    model: Any,
    step: Callable[..., Tensor],
    dense: DenseRun,
    max_model_len: int | None,
    states: StateLayers | None = None,
    batch_invariant: bool = False,
    block_size: int = 16,
) -> Probe:
    """Run ``step`` of ``model`` on the trial sequences with a probe as caches. Its logits must agree with ``dense``.

    Raises:
        ValueError: the model cannot be served, with the reason.
    """
    name = type(model).__name__
    names = {module: of for of, module in model.named_modules()}
    length = max(max_model_len or 0, 2**20)
    layout = get_default_layout(model.device)
    options: dict[str, Any] = {"masks_by_type": masks_by_type(model), "batch_invariant": batch_invariant}
    probe = Probe(names, length, len(LENGTHS), block_size, layout, **options)
    cache = None if states is None else StateCache(states.specs, len(LENGTHS), device=model.device)
    if cache is not None:
        probe.states = cache.tensors
        for seq_id in range(len(LENGTHS)):
            cache.admit(seq_id)
    builder = AttentionMetadataBuilder(
        block_size,
        len(LENGTHS),
        sum(CHUNKS[0]),
        1,
        "cpu",
        num_blocks=2,
        num_staging_buffers=0,
        num_state_rows=0 if cache is None else len(cache.tensors[0]),
    )
    computed = [0, 0]
    for chunks in CHUNKS:
        rows_of_states = None if cache is None else cache.rows(range(len(LENGTHS)))
        batch = Batch(list(chunks), list(computed), [[1], [0]], state_slots=rows_of_states)
        metadata = pytree.tree_map_only(Tensor, lambda each: each.to(model.device), builder.build(0, batch))
        tokens = torch.cat([ids[at : at + n] for ids, at, n in zip(trial_tokens(model), computed, chunks, strict=True)])
        rows = torch.arange(sum(chunks), device=model.device)
        probe.begin_step()
        try:
            logits = step(tokens, metadata, rows, probe)
        except (torch.OutOfMemoryError, NoArgumentsError):
            raise
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"model: {name} cannot be served: {kind}{error}") from error
        if not probe.calls and cache is None:
            raise ValueError(f"model: expected one that calls AttentionInterface of transformers, got {name}")
        want = torch.cat([each[at : at + n] for each, at, n in zip(dense.logits, computed, chunks, strict=True)])
        expect_alike(model, logits.float(), want, dense)
        computed = [at + n for at, n in zip(computed, chunks, strict=True)]
        if cache is not None:
            for seq_id in range(len(LENGTHS)):
                cache.commit(seq_id)
    return probe
