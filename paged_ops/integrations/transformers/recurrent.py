"""Layers of transformers that keep state instead of keys, in a ragged batch: linear attention, convolutions, Mamba.

Such a layer reads the state of each row of its batch from transformers' cache, and writes the new state to it. In a
paged step all sequences are in one row. So the layer runs once for all sequences with one token, as a batch
``[S, 1, ...]``, and once for each longer chunk. Each time it gets a cache of transformers' class with the sequences'
rows of :class:`paged_ops.cache.states.StateCache`.

A run on a few tokens, not module names, decides which modules these are, which states they keep, and whether they can
continue from a state in the middle of a prompt: :meth:`StateLayers.find`.

Letters: T tokens of the batch, S sequences, n sequences of one call, R rows of a tensor of states.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from paged_ops.cache.states import StateCache, StateSpec
from paged_ops.checks import at_least, expect
from paged_ops.integrations.transformers.state_steps import LayerCache, Rows, StateKey, StepStates
from paged_ops.integrations.transformers.subclasses import with_forward
from paged_ops.metadata import AttentionMetadata

_NUM_OBSERVED = 11  # tokens of the observed run: a number that is unlikely to equal another size
_NUM_BEFORE = 6  # tokens in the first chunk
_OURS = ("kv_caches", "attention_metadata")  # arguments for the attention function only


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name of a forward's argument for transformers' cache, if it has one: from 5.24 on ``cache``."""
    given = inspect.signature(forward).parameters
    return next((name for name in ("cache", "cache_params", "past_key_values") if name in given), None)


class StateLayer:
    """A module that keeps state, and its forward for a step of many sequences.

    With any other cache, or none, it runs the module's own forward.

    Attributes:
        name: within the model.
        keys, specs: its states, and their shapes and dtypes for one sequence.
        index: position among the modules that keep state; ``position``: among those of its decoder layer.
        continues: whether it continues from a state with several tokens. If not, later chunks go token by token.
    """

    def __init__(self, module: nn.Module, name: str, keys: Sequence[StateKey], specs: Sequence[StateSpec]) -> None:
        self.module, self.name = module, name
        self.keys, self.specs = tuple(keys), tuple(specs)
        self.index = self.position = 0
        self.continues = False
        self._kind: Any = type(module)
        self._replaced: Callable[..., Any] | None = vars(module).get("forward")

    def install(self) -> None:
        """Become the module's forward."""
        vars(self.module).pop("forward", None)
        self.module.__class__ = _keeping_state(self._kind)
        vars(self.module)["paged_state"] = self

    def remove(self) -> None:
        del self.module.paged_state
        self.module.__class__ = self._kind
        if self._replaced is not None:
            self.module.__dict__["forward"] = self._replaced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return self._kind.forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = next((each for each in (*args, *kwargs.values()) if isinstance(each, StepStates)), None)
        if step is None:
            return self.forward(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OURS}
        tensors = step.groups[self.position if step.of_one_layer else self.index]
        if step.sequence_of_token is not None:
            (rows,) = step.calls
            out = self._call(args, kwargs, step, rows, tensors)
            return _map(lambda x: x[:, 0].index_select(0, step.sequence_of_token)[None], out)
        merged: Any = None
        for rows in step.calls:
            out = self._call(args, kwargs, step, rows, tensors)
            if merged is None:  # padding rows stay zero
                merged = _map(lambda x: x.new_zeros(1, step.num_tokens, *x.shape[2:]), out)
            _place(merged, out, rows.tokens)
        return merged

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepStates, rows: Rows, tensors: Sequence[Tensor]
    ) -> Any:
        """Run the module on some tokens of a step, with the states of their sequences."""
        if rows.is_first:
            states = [tensor.new_zeros(1, *tensor.shape[1:]) for tensor in tensors]
        else:
            states = [tensor.index_select(0, rows.read) for tensor in tensors]
        cache = LayerCache.of(self.keys, states, rows.is_first)

        def run(select: Callable[[Tensor], Tensor]) -> Any:
            chosen = _choose((args, kwargs), step, cache, step.num_tokens, select)
            return self.forward(*chosen[0], **chosen[1])

        tokens = rows.tokens
        if isinstance(tokens, Tensor):
            out = run(lambda x: x[0].index_select(0, tokens)[:, None])
        elif rows.is_first or self.continues:
            out = run(_part(tokens.start, tokens.stop))
        else:
            out = _cat([run(_part(t, t + 1)) for t in range(tokens.start, tokens.stop)])
        for key, tensor in zip(self.keys, tensors, strict=True):
            tensor.index_copy_(0, rows.write, cache.state(key))
        return out


@functools.cache
def _keeping_state(kind: Any) -> type:
    return with_forward("Paged", _forward, _keeping_state, kind)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.paged_state(*args, **kwargs)


class StateLayers:
    """All modules of a model that keep state instead of keys.

    Attributes:
        layers: in the order that the model runs them.
        specs: the specs of their states, in order, for :class:`paged_ops.cache.states.StateCache`.
        argument: the name of the model's argument for the cache.
    """

    def __init__(self, layers: Sequence[StateLayer], argument: str) -> None:
        self.layers, self.argument = tuple(layers), argument
        for index, layer in enumerate(self.layers):
            layer.index = index
        self.specs = tuple(spec for layer in self.layers for spec in layer.specs)

    @staticmethod
    def find(model: PreTrainedModel) -> StateLayers | None:
        """Run a few tokens through the unchanged model, and observe which modules keep state. None if none does.

        Raises:
            ValueError: a module keeps state outside of transformers' cache, or shares it with another.
        """
        try:
            cache = DynamicCache(config=model.config)
        except KeyError:  # the cache does not know such layers
            return None
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            return None
        argument = cache_argument(model.forward)
        observed = [] if argument is None else _observe(model, cache, argument)
        if argument is None or not observed:
            return None
        layers = []
        for call in observed:
            layer = StateLayer(call.module, call.name, call.keys, call.specs)
            _check(layer, call, model)
            layers.append(layer)
        return StateLayers(layers, argument)

    def install(self) -> None:
        """Give the modules a forward that serves steps of many sequences."""
        for layer in self.layers:
            layer.install()

    def remove(self) -> None:
        """Give the modules their own forward again."""
        for layer in self.layers:
            layer.remove()

    def groups(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The tensors of ``StateCache``, grouped by module."""
        groups, start = [], 0
        for layer in self.layers:
            groups.append(tensors[start : start + len(layer.keys)])
            start += len(layer.keys)
        return groups

    def step(self, metadata: AttentionMetadata, num_tokens: int, tensors: Sequence[Tensor]) -> StepStates:
        """The value for the model's argument for the cache, for one step."""
        return StepStates.of(metadata, num_tokens, self.groups(tensors))


def allocate_states(
    layers: StateLayers | None,
    num_state_slots: int,
    num_host_state_slots: int | None,
    num_host_blocks: int,
    device: torch.device,
) -> StateCache | None:
    """The slots of a model's layers that keep state; None if there are none."""
    if layers is None:
        expected = "None, as no layer of the model keeps state"
        expect(num_host_state_slots is None, "num_host_state_slots", expected, num_host_state_slots)
        return None
    if num_host_state_slots is None:
        num_host_state_slots = num_state_slots if num_host_blocks else 0
    at_least(0, num_state_slots=num_state_slots, num_host_state_slots=num_host_state_slots)
    return StateCache(layers.specs, num_state_slots, device=device, num_host_slots=num_host_state_slots)


class _Observed:
    """One call of a module that updated states."""

    def __init__(
        self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], within: tuple[_Observed, ...]
    ) -> None:
        self.module, self.name, self.args, self.kwargs, self.within = module, name, args, kwargs, within
        self.states: dict[tuple[int, StateKey], Tensor] = {}

    @property
    def layer_idx(self) -> int:
        return next(iter(self.states))[0]

    @property
    def keys(self) -> list[StateKey]:
        return [key for _, key in self.states]

    @property
    def specs(self) -> list[StateSpec]:
        return [StateSpec(tuple(state.shape[1:]), state.dtype) for state in self.states.values()]


def _observe(model: PreTrainedModel, cache: Cache, argument: str) -> list[_Observed]:
    """The calls that update states in a forward of a few tokens."""
    running: list[_Observed] = []  # the modules being called with the cache, the innermost last
    found: dict[int, _Observed] = {}
    name = type(model).__name__

    def update(layer_idx: int, layer: Any, kind: str) -> Callable[..., Tensor]:
        own = getattr(layer, f"update_{kind}_state")

        def recorded(states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            result: Tensor = own(states, state_idx, **kwargs)
            call, key = running[-1], (layer_idx, StateKey(kind, state_idx))
            if any(key in other.states for other in found.values()):
                raise ValueError(f"expected each state to be written once per step, but {key} is written twice")
            found.setdefault(id(call), call).states[key] = getattr(layer, f"{kind}_states")[state_idx]
            return result

        return recorded

    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in ("conv", "recurrent"):
                setattr(layer, f"update_{kind}_state", update(layer_idx, layer, kind))
    ids = torch.arange(1, _NUM_OBSERVED + 1, device=model.get_input_embeddings().weight.device)
    ids = ids % model.get_input_embeddings().weight.shape[0]
    more: dict[str, Any] = {argument: cache}
    if (
        "position_ids" in inspect.signature(model.forward).parameters
    ):  # some models compute positions from a cache with attention
        more["position_ids"] = torch.arange(_NUM_OBSERVED, device=ids.device)[None]
    try:
        with _calls_with(model, cache, running), torch.no_grad():
            model(input_ids=ids[None], use_cache=True, **more)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"model: {name} fails on a few tokens with a cache: {error}") from error
    for key, call in list(found.items()):  # a module within another that keeps state gets its cache from that one
        outer = next((each for each in call.within if id(each) in found), None)
        if outer is not None:
            outer.states.update(found.pop(key).states)
    calls = list(found.values())
    if len({call.module for call in calls}) < len(calls) or any(len({i for i, _ in c.states}) > 1 for c in calls):
        raise ValueError(
            f"model: expected a module to keep the states of one layer, got a module with several layers' in {name}"
        )
    for call in calls:
        call.states = {key: state.clone() for key, state in call.states.items()}
    return calls


@contextmanager
def _calls_with(model: nn.Module, cache: Cache, running: list[_Observed]) -> Iterator[None]:
    """Keep ``running`` up to date: the modules being called with ``cache`` among their arguments."""

    def begin(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(each is cache for each in (*args, *kwargs.values())):
                running.append(_Observed(module, name, args, kwargs, tuple(running)))

        return hook

    def end(module: nn.Module, args: Any, out: Any) -> None:
        if running and running[-1].module is module:
            running.pop()

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
            handles.append(module.register_forward_hook(end, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _check(layer: StateLayer, call: _Observed, model: PreTrainedModel) -> None:
    """Check that the layer's output equals that with transformers' cache, and detect whether it can continue from a
    state with several tokens."""
    cache = next(each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Cache))
    tables = [state.new_zeros(2, *state.shape[1:]) for state in call.states.values()]
    device = tables[0].device
    rows = [torch.tensor([row], device=device) for row in (0, 1)]

    def run(begin: int, end: int, states: Sequence[Tensor] | None, at_once: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The output of some tokens, and the states after them."""
        step = StepStates([tables], _NUM_OBSERVED, [], None)
        args, kwargs = _choose((call.args, call.kwargs), cache, step, 0, lambda x: x)
        for table, state in zip(tables, states or (), strict=bool(states)):
            table[0].copy_(state[0])
        layer.continues = at_once
        out = layer._call(args, kwargs, step, Rows(slice(begin, end), rows[0], rows[1], states is None), tables)
        return _tensors(out), [table[1:].clone() for table in tables]

    # a prompt and then token by token, as transformers generates
    own = LayerCache(DynamicCache(config=model.config).layers[call.layer_idx])
    bounds = [0, *range(_NUM_BEFORE, _NUM_OBSERVED + 1)]
    out, state = run(0, _NUM_BEFORE, None, at_once=False)
    before = state
    for begin, end in itertools.pairwise(bounds):
        if begin:
            out, state = run(begin, end, state, at_once=False)
        args, kwargs = _choose((call.args, call.kwargs), cache, own, _NUM_OBSERVED, _part(begin, end))
        expected = _tensors(layer.forward(*args, **kwargs))
        for a, b in zip(out, expected, strict=True):
            if a.shape != b.shape or not _distance(a, b) <= 1e-2 * float(b.abs().max()):
                raise ValueError(
                    f"model: expected layers whose state is all in transformers' cache, got {layer.name},"
                    f" a {type(layer.module).__name__}, of {type(model).__name__}"
                )
    layer.continues = all(_takes_up(run, before, i) for i in range(len(tables)))


def _takes_up(
    run: Callable[[int, int, Sequence[Tensor], bool], tuple[list[Tensor], list[Tensor]]],
    before: Sequence[Tensor],
    index: int,
) -> bool:
    """Whether a state has the same effect on later tokens in one call as one by one.

    The state is scaled up until its effect is large, so that a missing effect cannot be mistaken for rounding.
    """
    begin, end = _NUM_BEFORE, _NUM_BEFORE + 3
    zeros = [torch.zeros_like(state) for state in before]
    without, _ = run(begin, end, zeros, False)
    for power in range(0, 10, 2):
        states = list(zeros)
        states[index] = before[index] * 10**power
        one_by_one, last = run(begin, end, states, False)
        if any(_distance(a, b) > 0.5 * float(a.abs().max()) for a, b in zip(one_by_one, without, strict=True)):
            at_once, last_at_once = run(begin, end, states, True)
            effects = [_distance(a, b) for a, b in zip(one_by_one, without, strict=True)]
            sizes = effects + [float(state.abs().max()) for state in last]
            pairs = zip(one_by_one + last, at_once + last_at_once, sizes, strict=True)
            # token ids in a state are exact
            return all(
                _distance(a, b) <= (0.1 * size + _rounding(a) if a.is_floating_point() else 0.0) for a, b, size in pairs
            )
    return False


def _rounding(a: Tensor) -> float:
    """The rounding difference of sums in another order, also where a state has no effect."""
    return 1e-6 + 8 * torch.finfo(a.dtype).eps * float(a.abs().max())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _choose(value: Any, step: Cache, cache: Cache, num_tokens: int, select: Callable[[Tensor], Tensor]) -> Any:
    """A layer's arguments for some of ``num_tokens`` tokens: ``select`` of each tensor ``[1, T, ...]``, and ``cache``
    instead of ``step``."""

    def choose(each: Any) -> Any:
        if each is step:
            return cache
        if isinstance(each, Tensor) and each.dim() >= 2 and each.shape[0] == 1 and each.shape[1] == num_tokens:
            return select(each)
        return each

    return _map(choose, value)


def _part(begin: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:, begin:end]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to every leaf of nested tuples, lists and dictionaries."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_map(function, each) for each in value)
    if isinstance(value, dict):
        return {key: _map(function, each) for key, each in value.items()}
    return function(value)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda each: found.append(each) if isinstance(each, Tensor) else None, value)
    return found


def _cat(outs: Sequence[Any]) -> Any:
    """One result from the results of successive tokens."""
    parts = iter(zip(*(_tensors(out) for out in outs), strict=True))
    return _map(lambda each: torch.cat(next(parts), 1) if isinstance(each, Tensor) else each, outs[0])


def _place(whole: Any, part: Any, tokens: Tensor | slice) -> None:
    """Write the result of some tokens into the result of all, ``[1, T, ...]``."""
    for target, source in zip(_tensors(whole), _tensors(part), strict=True):
        target[0, tokens] = source[:, 0] if isinstance(tokens, Tensor) else source[0]
