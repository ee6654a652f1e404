"""Indexers of transformers' models: small attention heads that select the keys each token attends to.

An indexer computes queries and one key per token. A key's score is the sum of its products with the queries of the
token, or their maximum in a block of keys; attention sees the best keys or blocks alone. Served are three kinds:

- DSA, over latents (DeepSeek-V3.2, GLM-MoE-DSA): ``sum_h w[h] relu(q[h] . k)``, the ``index_topk`` best keys for all
  heads. Layers without an indexer use the keys of the layer before.
- MSA, over keys and values (MiniMax-M3): ``max_j q[h] . k[j]`` per block of keys, the best blocks per key/value head,
  the last ones always.
- QSA, over keys and values (Qwen4): ``sum_h relu(q[h] . k)`` with one key per window of tokens, the best windows and
  the tokens of the last one: :mod:`paged_ops.integrations.transformers.index_windows`.

While a model is wrapped, its indexers return their queries and keys (:class:`Index`) in place of selected keys. The
model passes these to the attention function, which writes the keys into a cache ``[N, B, Di]`` with the block table
of the layer, selects (:func:`paged_ops.select_keys`), and attends. Where every token would be selected, there is no
such cache, and attention is dense.

What a model's own indexer does is not taken from its name: :func:`install` compares its choice for random numbers.

Letters: T tokens of the batch, Hi heads of the indexer, Di their size. Source: DeepSeek-V3.2 (arXiv:2512.02556).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_ops.integrations.transformers import index_windows
from paged_ops.integrations.transformers.probe import Index
from paged_ops.integrations.transformers.trial import LENGTHS
from paged_ops.integrations.transformers.wrapping import Wrapping
from paged_ops.metadata import AttentionMetadata, PoolMetadata
from paged_ops.ops import latent_cache_write, select_keys

_DSA = ("wq_b", "wk", "k_norm", "weights_proj", "index_topk", "qk_rope_head_dim")
_MSA = ("q_proj", "k_proj", "q_norm", "k_norm", "topk_blocks", "local_blocks", "block_size")
# Other kinds, and why they are refused.
_REFUSED = {
    "Glm5NextTextIndexer": "it keeps one key per several tokens, their weighted mean",
    "DeepseekV4Indexer": "it keeps one compressed key per several tokens, as do the layers themselves",
    "MistralLarge4TextIndexer": "its queries depend on positions and on other inputs",
}
_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")  # functions of a model's module
_TOKENS, _SELECTED, _BLOCK = 48, 8, 2  # of the comparison: tokens, selected keys or blocks, keys per block
_TOLERANCE = 1e-3  # of the largest score: the two sums round differently


def has_indexer(module: Any) -> bool:
    return isinstance(getattr(module, "indexer", None), nn.Module)


def budget(indexer: Any) -> int:
    """How many keys it selects for each token."""
    if index_windows.is_known(indexer):
        return index_windows.budget(indexer)
    return int(indexer.index_topk if _is_dsa(indexer) else indexer.topk_blocks * indexer.block_size)


def install(wrapping: Wrapping, model: PreTrainedModel, length: int | None) -> bool:
    """Let the model's indexers return an :class:`Index`, or select everything if no sequence of ``length`` tokens is
    longer than their budget. Returns whether there are any.

    Raises:
        ValueError: an indexer selects in another way.
    """
    of_model = [module for module in model.modules() if has_indexer(module)]
    for module in of_model:
        indexer: Any = module.indexer
        kind: Any = type(indexer)
        selects_all = _is_known(indexer) and length is not None and max(length, *LENGTHS) <= budget(indexer)
        if not selects_all:
            wrapping.set_attribute(indexer, "paged_form", _form_of(indexer, model))
        if index_windows.is_known(indexer):
            wrapping.retype(indexer, _retyped(kind, index_windows.no_mask))
            of_windows: Any = type(module)
            wrapping.retype(module, index_windows.attending(of_windows))
        elif selects_all:
            wrapping.retype(indexer, _retyped(kind, _select_all))
        else:
            wrapping.retype(indexer, _retyped(kind, _dsa if _is_dsa(indexer) else _msa))
    for module in model.modules() if of_model else ():
        if hasattr(module, "skip_topk"):  # it returns what it selected, for the layers after it
            of_attention: Any = type(module)
            wrapping.retype(module, _sharing(of_attention))
    return bool(of_model)


def select(module: Any, index: Index, index_cache: Tensor, pool: PoolMetadata, metadata: AttentionMetadata) -> Tensor:
    """Write the step's index keys, and select: int32 ``[T, G, k]``, as ``selected_keys`` of attention."""
    key, query = index.key, index.query
    if index_cache.dtype.itemsize > 1:  # latents may be stored in another format than index keys
        key, query = key.to(index_cache.dtype), query.to(index_cache.dtype)
    if index.starts is not None:
        return index_windows.select(module.indexer, index._replace(key=key, query=query), index_cache, pool, metadata)
    latent_cache_write(key, key[:, :0], index_cache, pool.slot_mapping)
    batch = index_cache, pool.block_tables, metadata.seq_lens, metadata.query_start_loc
    indexer = module.indexer
    if index.weights is not None:
        options = {"weights": index.weights, "scale": indexer.softmax_scale, "relu": True}
        return select_keys(query, *batch, indexer.index_topk, **options)
    blocks = {"block_size": indexer.block_size, "local_blocks": indexer.local_blocks}
    return select_keys(query, *batch, indexer.topk_blocks, per_head=True, pool="max", **blocks)


def block_size_of(module: Any) -> int:
    """The tokens per selected block of a module; 1 if it selects keys."""
    indexer = getattr(module, "indexer", None)
    return int(getattr(indexer, "block_size", getattr(indexer, "compress_ratio", 1)))


def _is_dsa(indexer: Any) -> bool:
    return all(hasattr(indexer, name) for name in _DSA)


def _is_known(indexer: Any) -> bool:
    return _is_dsa(indexer) or index_windows.is_known(indexer) or all(hasattr(indexer, name) for name in _MSA)


# In place of an indexer's forward


def _dsa(self: Any, hidden_states: Tensor, q_resid: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> Index:
    rotate, is_last = self.paged_form
    P = self.qk_rope_head_dim
    query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, -1))  # [1, T, Hi, Di]
    key = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    sizes = [query.shape[-1] - P, P] if is_last else [P, query.shape[-1] - P]
    of_query, of_key = query.split(sizes, -1), key.split(sizes, -1)
    part = 1 if is_last else 0  # dynamo of torch 2.11 does not index by a bool
    rotated = rotate(of_query[part], of_key[part], *position_embeddings, unsqueeze_dim=2)
    query, key = (
        torch.cat((parts[0], turned) if is_last else (turned, parts[1]), -1)
        for parts, turned in zip((of_query, of_key), rotated, strict=True)
    )
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
    return Index(query[0], key[0, :, 0], weights[0])


def _msa(self: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> Index:
    (rotate, _) = self.paged_form
    query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
    cos, sin = (each[..., : self.head_dim] for each in position_embeddings)
    query, key = rotate(query, key, cos, sin)
    return Index(query[0].transpose(0, 1), key[0, 0], None)


def _select_all(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty(1, 0, 0, dtype=torch.int32, device=hidden_states.device)


@functools.cache
def _retyped(kind: Any, forward: Callable[..., Any]) -> type:
    """The indexer with another forward. It keeps its weights, for ``state_dict``."""
    return type(f"Paged{kind.__name__}", (kind,), {"forward": forward})


@functools.cache
def _sharing(kind: Any) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out, selected, given = kind.forward(self, *args, **kwargs)
        return out, None, given if selected is None else selected

    return type(f"Paged{kind.__name__}", (kind,), {"forward": forward})


# Which form an indexer has: the one whose scores agree with its choice


def _form_of(indexer: Any, model: PreTrainedModel) -> tuple[Callable[..., Any], bool]:
    """The function that rotates queries and keys, and whether it rotates their last columns (or the first)."""
    kind: Any = type(indexer)
    if not _is_known(indexer) or kind.__name__ in _REFUSED:
        raise _refusal(indexer, model, _REFUSED.get(kind.__name__, "it has other parts"))
    family: Any = sys.modules[kind.__module__]
    rotations = [getattr(family, name) for name in _ROTATIONS if hasattr(family, name)]
    try:
        inputs, chosen = _own_choice(indexer, model.device, model.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it takes other arguments
        raise _refusal(indexer, model, f"{type(error).__name__}: {error}") from error
    for form in itertools.product(rotations, (False, True) if _is_dsa(indexer) else (False,)):
        if _agrees(indexer, form, inputs, chosen):
            return form
    raise _refusal(indexer, model, "it selects other keys")


def _refusal(indexer: Any, model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        "model: expected indexers as those of DeepSeek-V3.2, MiniMax-M3 or Qwen4, got"
        f" {type(indexer).__name__} in {type(model).__name__}: {reason}"
    )


@contextmanager
def _changed(module: Any, **attributes: Any) -> Iterator[None]:
    """The module with other attributes, for a while."""
    of_module = vars(module)
    before = {name: of_module[name] for name in attributes if name in of_module}
    of_module.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del of_module[name]
        of_module.update(before)


class _Inputs(NamedTuple):
    hidden_states: Tensor  # [1, T, E]
    q_resid: Tensor | None  # [1, T, Rq]
    position_embeddings: tuple[Tensor, Tensor]  # [1, T, P] each


@torch.no_grad()
def _own_choice(indexer: Any, device: torch.device, dtype: torch.dtype) -> tuple[_Inputs, Tensor]:
    """Random inputs, and which keys or blocks the indexer's own code selects for them with a small budget: bool
    ``[G, T, n]``."""
    of_windows = index_windows.is_known(indexer)
    projection = "wk" if _is_dsa(indexer) else "index_qk_proj" if of_windows else "k_proj"
    generator = torch.Generator("cpu").manual_seed(0)

    def random(columns: int) -> Tensor:
        shape = 1, _TOKENS, columns
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    size = indexer.index_head_dim if of_windows else getattr(indexer, "head_dim", 0)
    P = indexer.qk_rope_head_dim if _is_dsa(indexer) else size // 4 * 2
    angles = random(P // 2).float().repeat(1, 1, 2)
    embeddings = angles.cos().to(dtype), angles.sin().to(dtype)
    hidden_states = random(getattr(indexer, projection).in_features)
    positions = torch.arange(_TOKENS, device=device)
    visible = positions <= positions[:, None]
    if of_windows:
        small = dict(token_budget=_SELECTED * _BLOCK, block_topk=_SELECTED, compress_ratio=_BLOCK)
        with _changed(indexer, **small):
            mask = indexer(hidden_states, embeddings, visible[None, None], None)[0]
        whole = (mask | ~visible).unflatten(-1, (-1, _BLOCK)).all(-1)  # windows of which it selects all visible tokens
        return _Inputs(hidden_states, None, embeddings), whole & visible[:, ::_BLOCK]
    if _is_dsa(indexer):
        inputs, n = _Inputs(hidden_states, random(indexer.wq_b.in_features), embeddings), _TOKENS
        with _changed(indexer, index_topk=_SELECTED):
            chosen = indexer(*inputs, visible[None], positions[None], None)
    else:
        inputs, n = _Inputs(hidden_states, None, embeddings), _TOKENS // _BLOCK
        with _changed(indexer, topk_blocks=_SELECTED, block_size=_BLOCK):
            chosen = indexer(hidden_states, embeddings, None, positions[None])
    lists = chosen.flatten(0, -3).long()  # [G, T, k], -1 is padding
    with_padding = torch.zeros((*lists.shape[:2], n + 1), dtype=torch.bool, device=device)
    return inputs, with_padding.scatter(-1, torch.where(lists < 0, n, lists), True)[..., :n]


@torch.no_grad()
def _agrees(indexer: Any, form: tuple[Callable[..., Any], bool], inputs: _Inputs, is_chosen: Tensor) -> bool:
    """Whether no key or block that the indexer left out has a higher score, computed in this form, than a chosen
    one."""
    with _changed(indexer, paged_form=form):
        scores = _scores(indexer, inputs)
    most = scores.masked_fill(scores.isinf(), 0.0).abs().max()
    worst = scores.masked_fill(~is_chosen, float("inf")).amin(-1)
    others = scores.masked_fill(is_chosen, float("-inf")).amax(-1)
    return bool((others <= worst + _TOLERANCE * most).all())


def _scores(indexer: Any, inputs: _Inputs) -> Tensor:
    """The scores of keys or blocks ``[G, T, n]``: -inf where none is visible, inf where one is always selected."""
    positions = torch.arange(_TOKENS, device=inputs.hidden_states.device)
    blocks, own = positions[: _TOKENS // _BLOCK], positions[:, None] // _BLOCK
    if index_windows.is_known(indexer):
        scores = index_windows.scores(indexer, inputs.hidden_states, inputs.position_embeddings, _BLOCK)
        complete = (positions[:, None] + 1) // _BLOCK
        scores = scores.masked_fill(blocks >= complete, float("inf"))
        return scores.masked_fill(blocks > own, float("-inf"))
    index = (_dsa if _is_dsa(indexer) else _msa)(indexer, **inputs._asdict())
    scores = torch.einsum("thd,jd->htj", index.query.float(), index.key.float())
    if index.weights is not None:
        scores = (torch.relu(scores) * index.weights.T[:, :, None]).sum(0, keepdim=True)
    scores = scores.masked_fill(positions > positions[:, None], float("-inf"))
    if index.weights is not None:
        return scores
    scores = scores.unflatten(-1, (-1, _BLOCK)).amax(-1)
    behind = own - blocks
    return scores.masked_fill((behind >= 0) & (behind < indexer.local_blocks), float("inf"))
