"""Indexers that score windows of tokens: QSA (Qwen4).

A window is r adjacent tokens. Its key is the mean of their keys, normalised, and rotated by the position of the first.
A token sees the best of the windows that end at it or before, and the tokens of its own window up to itself.

**Cache.** ``[N, B, Di]``, with the block table of the layer, r a divisor of B. It has the key of each token, until the
last token of a window is written: from then on that token's place has the key of the window. So a token's place is
written in its own step alone, and blocks can be shared, copied and swapped after any token. The view of every r-th
place is a cache of windows, with B / r of them per block and the same block table.

**Rows.** :func:`paged_ops.select_keys` takes rows that see one key more each. Here a row sees one window more than the
r-th row before it, so each sequence is passed as r sequences, of every r-th row each.

Letters: T tokens of the batch, S sequences, M columns of the block table, Hi heads of the indexer, Di their size, P
rotated columns, r tokens per window (``compress_ratio``).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_ops.integrations.transformers.probe import Index
from paged_ops.integrations.transformers.state_steps import sequence_of
from paged_ops.metadata import AttentionMetadata, PoolMetadata
from paged_ops.ops import latent_cache_write, select_keys

_PARTS = ("index_qk_proj", "q_layernorm", "k_layernorm", "compress_ratio", "block_topk", "token_budget")


def is_known(indexer: Any) -> bool:
    return all(hasattr(indexer, name) for name in _PARTS)


def budget(indexer: Any) -> int:
    """The longest sequence of which every token is selected."""
    return int(indexer.token_budget + indexer.compress_ratio - 1)


def window_of(model: nn.Module) -> int:
    """The tokens per window of the model's indexers; 1 if they score tokens, or select all."""
    found: list[Any] = [each for each in model.modules() if "paged_form" in vars(each) and is_known(each)]
    return int(found[0].compress_ratio) if found else 1


def whole_windows(window: int) -> int:
    """The default size of blocks: 16 tokens, or the next size of whole windows."""
    return math.lcm(16, window)


def positions_for(positions: Tensor, window: int) -> Tensor:
    """``[1, 2 T]``: of the first tokens of the windows that end with the step's tokens, then of the tokens, as such a
    model takes the positions of keys, those of the step last. Without windows ``[1, T]``."""
    if window == 1:
        return positions[None]
    return torch.cat([(positions - (window - 1)).clamp(min=0), positions])[None]


def unread_mask(input_ids: Tensor, window: int) -> Tensor:
    """The mask that a model without states is called with. Without one, transformers looks for packed sequences, which
    synchronises. Models with windows look for padding in a mask of two dimensions, for layers of linear attention they
    may have, which synchronises, too: they get an empty one of four, which means none to attention."""
    if window > 1:
        return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=input_ids.device)
    return torch.ones_like(input_ids[None], dtype=torch.bool)


def index_of(indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Index:
    """Queries and keys of the tokens ``hidden_states [1, T, E]``; with ``position_embeddings`` of ``[1, 2 T, P]``."""
    rotate, _ = indexer.paged_form
    (_, T, _), Di = hidden_states.shape, indexer.index_head_dim
    query, key = indexer.index_qk_proj(hidden_states).split([indexer.index_n_heads * Di, Di], -1)
    cos, sin = position_embeddings
    query = indexer.q_layernorm(query.unflatten(-1, (-1, Di)))
    query = rotate(query, cos=cos[:, -T:], sin=sin[:, -T:], unsqueeze_dim=2)
    return Index(query[0], key[0], None, (cos[0, :T], sin[0, :T]))


def window_keys(indexer: Any, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The keys ``[n, Di]`` of windows with the keys ``[n, r, Di]``, rotated by ``cos`` and ``sin`` ``[n, P]``."""
    rotate, _ = indexer.paged_form
    means = indexer.k_layernorm(keys.float().mean(1).to(cos.dtype))
    return rotate(means[None, :, None], cos=cos[None], sin=sin[None], unsqueeze_dim=2)[0, :, 0]


def scores(indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], r: int) -> Tensor:
    """The scores ``[1, T, T / r]`` of the windows of one sequence, all of them for each token."""
    index = index_of(indexer, hidden_states, position_embeddings)
    cos, sin = (each[0, ::r] for each in position_embeddings)
    keys = window_keys(indexer, index.key.unflatten(0, (-1, r)), cos, sin)
    return torch.relu(torch.einsum("thd,jd->htj", index.query.float(), keys.float())).sum(0, keepdim=True)


def select(indexer: Any, index: Index, index_cache: Tensor, pool: PoolMetadata, metadata: AttentionMetadata) -> Tensor:
    """Write the step's keys, and select windows: int32 ``[T, 1, k + 1]``."""
    (_, B, Di), r, slots, count = index_cache.shape, indexer.compress_ratio, pool.slot_mapping, metadata.positions + 1
    if B % r:
        raise ValueError(f"block_size: expected a multiple of {r}, as an indexer scores windows of {r} tokens, got {B}")
    latent_cache_write(index.key, index.key[:, :0], index_cache, slots)
    assert index.starts is not None, "index_of gives them"
    offsets = torch.arange(1 - r, 1, device=slots.device)
    places = (slots[:, None] + offsets).clamp(min=0)  # of the window that ends with each token: they are in one block
    keys = window_keys(indexer, index_cache[places // B, places % B].to(index.starts[0].dtype), *index.starts)
    keys = keys.to(index.key.dtype)
    latent_cache_write(keys, keys[:, :0], index_cache, torch.where(count % r == 0, slots, -1))
    rows = _apart(metadata, len(index.query), r)
    query = torch.empty_like(index.query).index_copy_(0, rows.place, index.query)
    tables = pool.block_tables.repeat_interleave(r, 0)
    batch = index_cache[:, r - 1 :: r], tables, rows.num_windows, rows.starts
    selected = select_keys(query, *batch, indexer.block_topk, scale=Di**-0.5, relu=True)[rows.place]
    # Entries, then padding: the window that is not complete comes after the last entry.
    own = torch.where(count % r > 0, count // r, -1).to(torch.int32)[:, None, None]
    end = (selected >= 0).sum(2, keepdim=True)
    return nn.functional.pad(selected, (0, 1), value=-1).scatter(2, end, own)


class _Apart(NamedTuple):
    """The rows of a step as r sequences for each of its own."""

    place: Tensor  # int64 [T]: of each row, among the rows of these sequences
    starts: Tensor  # int32 [S r + 1]
    num_windows: Tensor  # int32 [S r]: the windows that the last row of each sees


def _apart(metadata: AttentionMetadata, T: int, r: int) -> _Apart:
    begins, lens = metadata.query_start_loc[:-1], metadata.query_start_loc.diff()
    each = torch.arange(r, device=begins.device, dtype=begins.dtype)
    starts = begins[:, None] + each * (lens // r)[:, None] + torch.minimum(each, (lens % r)[:, None])  # [S, r]
    seen_by_first = (metadata.seq_lens - lens)[:, None] + each + 1
    rows_after_first = (lens[:, None] - each - 1).div(r, rounding_mode="floor")
    num_windows = (seen_by_first // r + rows_after_first).clamp(min=0)
    rows = torch.arange(T, device=begins.device, dtype=begins.dtype)
    of = sequence_of(rows, metadata.query_start_loc[1:])
    away = rows - begins[of]
    place = torch.where(rows < metadata.query_start_loc[-1], starts[of, away % r] + away // r, rows)
    starts = torch.cat([starts.flatten(), metadata.query_start_loc[-1:]])
    return _Apart(place.long(), starts, num_windows.flatten().to(torch.int32))


# While a model is wrapped


def no_mask(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """In place of the indexer's forward: a mask that changes none."""
    return torch.ones((), dtype=torch.bool, device=hidden_states.device)


@functools.cache
def attending(kind: Any) -> type:
    """The attention module, passing what its indexer computes to the attention function, and the mask as it got it."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if "paged_form" in vars(self.indexer):
            kwargs["indices"] = index_of(self.indexer, hidden_states, position_embeddings)
        given = hidden_states, position_embeddings, attention_mask, *args
        return kind.forward(self, *given, given_mask=attention_mask, **kwargs)

    return type(f"Paged{kind.__name__}", (kind,), {"forward": forward})
