"""The ops on DTensors: importing this module registers how heads are sharded over ranks.

Queries, keys, values, caches, sinks and slopes are sharded by heads. The batch's tensors (block tables, lengths, slots)
are replicated, or plain tensors. Each op then runs on the rank's shard without communication, and its results are
sharded by heads too. Errors name the argument: a sharding of tokens, blocks or head sizes, partial sums, heads sharded
in one argument and replicated in another, uneven heads.

Rules are registered by ``torch.library.register_torch_dispatch``, not by DTensor's ``register_sharding``: it may
redistribute arguments to save cost, but a cache that an op writes must never be a copy.

Letters: H query heads, K key/value heads, D head size, N blocks, B tokens per block, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paged_ops.registry import OPS

# The dimension of the heads, where all cache layouts agree
_HEADS = {
    **dict.fromkeys(("query", "key", "value", "out", "lse", "out_a", "lse_a", "out_b", "lse_b"), 1),
    **dict.fromkeys(("alibi_slopes", "sinks"), 0),
}
_SCALES = ("k_scale", "v_scale")
_CACHES = ("kv_cache", "value_cache")
_LISTS = ("kv_caches", "src_caches", "dst_caches")


def _dispatch(cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """Runs one op on the rank's shards."""
    name = func._schema.name.removeprefix("paged_ops::")
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    mesh = _mesh_of(given)
    placements = [_placement(name, given, i, mesh.size(i)) for i in range(mesh.ndim)]
    local = {argument: _local(value) for argument, value in given.items()}
    if local.get("block_sparse") is not None:
        local["block_sparse"] = _of_rank(local["block_sparse"], mesh, placements)
    positional = [local.pop(argument) for argument in names[: len(args)]]
    result = func(*positional, **local)
    if isinstance(result, Tensor):
        return DTensor.from_local(result, mesh, placements, run_check=False)
    if isinstance(result, (tuple, list)):
        return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in result)
    return result


def _placement(op: str, given: dict[str, Any], i: int, size: int) -> Placement:
    """How results are placed on dimension ``i`` of the mesh: sharded by heads, or replicated."""
    sharded: dict[str, bool] = {}
    for argument, value in given.items():
        if argument in _LISTS:
            for j, each in enumerate(value):
                _check_block_list(
                    f"{argument}[{j}]", each, value[0] if op == "copy_blocks" else given["src_caches"][j], i
                )
            continue
        if not isinstance(value, Tensor):
            continue
        at = _head_dim(argument, given)
        placed = value.placements[i] if isinstance(value, DTensor) else None
        if at is None:
            if placed is not None and not placed.is_replicate():
                raise ValueError(
                    f"{argument}: expected Replicate(), because every rank has the whole batch, got {placed!r}"
                )
            continue
        if placed is not None and placed.is_shard():
            if placed.dim % value.dim() != at:  # type: ignore[attr-defined]
                raise ValueError(f"{argument}: expected Shard({at}), by heads, or Replicate(), got {placed!r}")
            if value.shape[at] % size or (value.dim() == 4 and _pairs(argument, given) and value.shape[at] // 2 % size):
                raise ValueError(
                    f"{argument}: expected a number of heads divisible by {size} ranks, got {value.shape[at]}"
                )
            sharded[argument] = True
        elif placed is None or placed.is_replicate():
            sharded[argument] = False
        else:
            raise ValueError(f"{argument}: expected Shard({at}), by heads, or Replicate(), got {placed!r}")
    first = next(iter(sharded), None)
    if first is None or not any(sharded.values()):
        return Replicate()
    for argument, is_sharded in sharded.items():
        if not is_sharded:
            of = next(each for each, yes in sharded.items() if yes)
            raise ValueError(
                f"{argument}: expected a DTensor sharded by heads, Shard({_head_dim(argument, given)}), as {of} is, got"
                f" {'Replicate()' if isinstance(given[argument], DTensor) else 'a plain tensor'}"
            )
    return Shard(1)


def _head_dim(argument: str, given: dict[str, Any]) -> int | None:
    """The dimension of an argument's heads; None if it is replicated."""
    value = given[argument]
    if argument in _SCALES:
        return None if value.numel() == 1 else 0
    if argument == "selected_keys":  # one list for all heads, or one per key/value head
        return None if value.shape[1] == 1 else 1
    if argument == "index_query":  # one list for all heads needs all of them
        return 1 if given.get("per_head") else None
    if argument in _CACHES:
        if given["kv_cache"].dim() == 3:  # latents: all heads share them
            return None
        if given.get("value_cache") is not None:
            return 1 if given["kv_cache"].dim() == 5 else 2
        return 3 if value.dim() == 5 else 2
    if argument in ("key", "value") and value.dim() != 3:
        return None
    return _HEADS.get(argument)


def _pairs(argument: str, given: dict[str, Any]) -> bool:
    """Whether keys and values of all heads share one dimension of the cache."""
    return argument == "kv_cache" and given.get("value_cache") is None


def _check_block_list(argument: str, cache: Tensor, like: Tensor, i: int) -> None:
    """A rank copies its shard of each block: all caches must be sharded alike, and none by blocks."""
    placed = [each.placements[i] if isinstance(each, DTensor) else Replicate() for each in (cache, like)]
    if placed[0].is_partial() or placed[0].is_shard(0):
        raise ValueError(
            f"{argument}: expected all blocks on every rank, Replicate() or Shard() by heads, got {placed[0]!r}"
        )
    if placed[0] != placed[1]:
        raise ValueError(f"{argument}: expected {placed[1]!r}, like the other caches, got {placed[0]!r}")


def _of_rank(block_sparse: Sequence[int], mesh: Any, placements: Sequence[Placement]) -> list[int]:
    """The block-sparse pattern of this rank's heads."""
    *pattern, rank, world = block_sparse
    for i, placement in enumerate(placements):
        if placement.is_shard():
            if world != 1:
                raise ValueError(
                    f"block_sparse: expected rank 0 of 1, because its heads are sharded, got {rank} of {world}"
                )
            rank, world = mesh.get_local_rank(i), mesh.size(i)
    return [*pattern, rank, world]


def _mesh_of(given: dict[str, Any]) -> Any:
    """The mesh of all DTensors among the arguments."""
    found: dict[str, Any] = {}
    for argument, value in given.items():
        for each in value if argument in _LISTS else (value,):
            if isinstance(each, DTensor):
                found[argument] = each.device_mesh
    (first, mesh), *others = found.items()
    for argument, other in others:
        if other != mesh:
            raise ValueError(f"{argument}: expected the mesh of {first}, {mesh}, got {other}")
    return mesh


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        with torch.no_grad():  # gives the tensor itself, so it can be written
            return value.to_local()
    if isinstance(value, (list, tuple)):
        return [_local(each) for each in value]
    return value


def _register() -> None:
    rule: Callable[..., Any] = _dispatch
    for name in OPS:
        packet = getattr(torch.ops.paged_ops, name)
        for overload in packet.overloads():
            torch.library.register_torch_dispatch(getattr(packet, overload), DTensor, rule)


_register()
