"""The caches of a ragged step for layers of transformers that keep state, in place of transformers' cache.

Letters: T tokens of the batch, S sequences, n sequences of one call, R rows of a tensor of states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from paged_ops.cache.states import PADDING_ROW
from paged_ops.metadata import AttentionMetadata


class StateKey(NamedTuple):
    """One tensor of a layer's state in transformers' cache."""

    kind: str  # "conv" or "recurrent"
    number: int  # its index in the layer


class Rows(NamedTuple):
    """The tokens of one call of a layer, and the rows of their states."""

    tokens: Tensor | slice  # int64 [n], one token per sequence; or a slice of one sequence's tokens
    read: Tensor  # int64 [n]
    write: Tensor  # int64 [n]
    is_first: bool = False  # no token came before, so there is no state to read


def sequence_of(tokens: Tensor, ends: Tensor) -> Tensor:
    """The sequence of each token: how many sequences end before it. Padding belongs to the last one.

    ``torch.searchsorted`` would do, but compiled by inductor of torch 2.11 for a GPU it ignores where in its tensor the
    slice ``ends`` begins (2.13 does not).
    """
    return (ends <= tokens[:, None]).sum(1).clamp(max=len(ends) - 1)


class StepStates(Cache):
    """The states of one step; a model passes it to its layers in place of transformers' cache.

    Layers with attention get their new keys and values back, because the attention function writes them to the cache.
    Layers that keep state read it from ``groups``.

    Attributes:
        groups: the tensors ``[R, ...]`` of each module that keeps state, in order.
        num_tokens: T, padding included.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        num_tokens: int,
        calls: list[Rows],
        sequence_of_token: Tensor | None,
        of_one_layer: bool = False,
    ) -> None:
        # Cache.__init__ is not called: it would make layers
        self.layers: Any = _NoLayers()
        self.groups, self.num_tokens = groups, num_tokens
        self.calls, self.sequence_of_token = calls, sequence_of_token
        self.of_one_layer = of_one_layer

    @staticmethod
    def of(metadata: AttentionMetadata, num_tokens: int, groups: Sequence[Sequence[Tensor]]) -> StepStates:
        """The states of the step that ``metadata`` describes, with ``num_tokens`` tokens including padding.

        A step with one token per sequence, none of them a sequence's first, is a *decode*. Compiled code treats any
        step without a longer chunk as a decode, because it cannot read the lengths on the host.
        """
        assert metadata.state_slots is not None, "the cache has states"
        begins, ends = metadata.query_start_loc[:-1], metadata.query_start_loc[1:]
        # a sequence without tokens in this step uses the padding rows
        read = torch.where(ends > begins, metadata.state_slots, PADDING_ROW).to(torch.int64)
        write = read ^ 1
        first_tokens = begins.clamp(max=num_tokens - 1).to(torch.int64)
        if metadata.max_query_len <= 1 and (torch.compiler.is_compiling() or not metadata.begins_any):
            tokens = torch.arange(num_tokens, device=ends.device, dtype=ends.dtype)
            sequence_of_token = sequence_of(tokens, ends)
            return StepStates(groups, num_tokens, [Rows(first_tokens, read, write)], sequence_of_token)
        bounds, lengths = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu.tolist()
        calls: list[Rows] = []
        singles: list[int] = []
        for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
            is_first = lengths[s] == end - begin
            if end - begin == 1 and not is_first:
                singles.append(s)
            elif end > begin:
                here = slice(s, s + 1)
                calls.append(Rows(slice(begin, end), read[here], write[here], is_first))
        if singles:
            chosen = torch.tensor(singles, dtype=torch.int64, device=read.device)
            calls.append(Rows(first_tokens[chosen], read[chosen], write[chosen]))
        return StepStates(groups, num_tokens, calls, None)

    @property
    def is_decode(self) -> bool:
        """One token per sequence, none of them a sequence's first: such a step may be compiled."""
        return self.sequence_of_token is not None

    def of_layer(self, groups: Sequence[Sequence[Tensor]]) -> StepStates:
        """The same step for one decoder layer with these tensors."""
        return StepStates(groups, self.num_tokens, self.calls, self.sequence_of_token, True)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # the positions are an argument

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False  # models ask this for their mask, and there is none


class _Same:
    """A list with the same layer at every index, so that one compiled code serves all layers."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, layer_idx: int) -> Any:
        return self.layer


class _NoLayers:
    """A list of no layers. At any index, an indexer of transformers finds no earlier positions, as those that it needs
    are an argument."""

    indexer_position_ids: Tensor | None = None

    def __len__(self) -> int:
        return 0

    def __getitem__(self, layer_idx: int) -> _NoLayers:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class LayerCache(Cache):
    """A cache of transformers with one layer, for any layer index.

    The methods are like those of transformers, but ignore the index, so that one compiled code serves all layers.
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self.layer = layer
        self.layers: Any = _Same(layer)

    @staticmethod
    def of(keys: Sequence[StateKey], states: Sequence[Tensor], is_first: bool) -> LayerCache:
        """A cache with the states of one call's sequences, ``[n, ...]``, which the layer overwrites. If ``is_first``,
        there are no earlier tokens, and the states are only memory to write to."""
        count = max(key.number for key in keys) + 1
        layer = LinearAttentionLayer(number_of_states=count)
        layer.device, layer.dtype = states[0].device, states[0].dtype
        for index in range(count):
            layer.has_previous_state[index] = not is_first
        for key, state in zip(keys, states, strict=True):
            if key.kind == "conv":
                layer.conv_states[key.number] = state
                layer.is_conv_states_initialized[key.number] = True
                layer.conv_kernel_size[key.number] = state.shape[-1]
            else:
                layer.recurrent_states[key.number] = state
                layer.is_recurrent_states_initialized[key.number] = True
        return LayerCache(layer)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.layer.has_previous_state[0 if state_idx is None else state_idx])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layer.conv_states[state_idx] if self.layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layer.recurrent_states[state_idx] if self.layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        full: Tensor = self.layer.update_conv_state(conv_states, state_idx, **kwargs)
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        newest: Tensor = self.layer.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return newest

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def state(self, key: StateKey) -> Tensor:
        states = self.layer.conv_states if key.kind == "conv" else self.layer.recurrent_states
        state: Tensor = states[key.number]
        return state
