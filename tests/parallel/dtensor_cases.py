"""What each rank runs in the tests of DTensors: every case of every op, its heads spread over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import paged_ops
from paged_ops import registry, testing
from paged_ops.parallel import dtensor

LISTS = ("kv_caches", "src_caches", "dst_caches")


def gathered(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """All ranks' parts, whatever the dtype."""
    data = local.contiguous().flatten().view(torch.uint8)
    parts = [torch.empty_like(data) for _ in range(size)]
    dist.all_gather(parts, data)
    return torch.cat([part.view(local.dtype).view(local.shape) for part in parts], dim)


def spread_by(mesh: Any, value: torch.Tensor, dim: int | None) -> DTensor:
    if dim is None:
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    local = value.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def head_dims(given: dict[str, Any], size: int) -> dict[str, int]:
    """The dimension of the heads of each tensor that has any; none where the ranks do not divide them."""
    dims = {name: dtensor._head_dim(name, given) for name, value in given.items() if isinstance(value, torch.Tensor)}
    dims = {name: dim for name, dim in dims.items() if dim is not None}
    counts = {name: given[name].shape[dim] for name, dim in dims.items()}
    cache = given.get("kv_cache")
    if cache is not None and cache.dim() == 4 and given.get("value_cache") is None:
        counts["kv_cache"] //= 2  # a key and a value of each head
    of_a_rank = given.get("block_sparse") is not None and given["block_sparse"][-1] != 1
    return {} if of_a_rank or any(count % size for count in counts.values()) else dims


def has_heads(given: dict[str, Any]) -> bool:
    """Whether there are heads at all; latents alone have none."""
    return any(name in LISTS or dtensor._head_dim(name, given) is not None for name in given)


def call_spread(op: str, mesh: Any, counts: Counter[str], given: dict[str, Any]) -> Any:
    """Calls an op on DTensors; its results, and what it writes, whole again."""
    size, dims = mesh.size(), head_dims(given, mesh.size())
    arguments = dict(given)
    for name, value in given.items():
        if name in LISTS:
            arguments[name] = [spread_by(mesh, each, 2 if each.shape[2] % size == 0 else None) for each in value]
        elif name in dims or name == "seq_lens":
            arguments[name] = spread_by(mesh, value, dims.get(name))
    placed = [each for value in arguments.values() for each in (value if isinstance(value, list) else [value])]
    placed = [each for each in placed if isinstance(each, DTensor)]
    counts["calls"] += has_heads(given)
    counts["spread"] += any(each.placements[0].is_shard() for each in placed)
    result = registry.OPS[op](**arguments)
    for name in testing.compare.mutated_arguments(op):
        values, parts = given.get(name), arguments.get(name)
        if name not in LISTS:
            values, parts = [values], [parts]
        for value, part in zip(values, parts, strict=True):
            if isinstance(part, DTensor) and part.placements[0].is_shard():
                value.copy_(gathered(part.to_local(), part.placements[0].dim, size))
    if result is None or not placed:
        return result
    expected = Shard(1) if dims else Replicate()
    results = result if isinstance(result, tuple) else (result,)
    assert all(isinstance(each, DTensor) and each.placements == (expected,) for each in results)
    whole = [gathered(each.to_local(), 1, size) if dims else each.to_local() for each in results]
    return tuple(whole) if isinstance(result, tuple) else whole[0]


def every_case(rank: int, size: int, op: str) -> tuple[int, int]:
    """How many calls with heads there were, and how many of them with heads spread."""
    mesh, counts = dist.init_device_mesh("cpu", (size,)), Counter()
    names = [argument.name for argument in getattr(torch.ops.paged_ops, op).default._schema.arguments]

    def function(*args: Any, **kwargs: Any) -> Any:
        return call_spread(op, mesh, counts, {**dict(zip(names, args, strict=False)), **kwargs})

    cases = testing.CASES[op]
    for case in cases if len(cases) < 200 else cases[::4]:
        testing.check(op, case, "cpu", function)
    return counts["calls"], counts["spread"]


def decode() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A decode of two sequences: queries of four heads, two key/value heads; and what all ranks have of it."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        "query": torch.randn(2, 4, 8, generator=generator),
        "key": torch.randn(2, 2, 8, generator=generator),
        "kv_cache": torch.randn(8, 2, 4, 2, 8, generator=generator),
    }
    batch = {
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 7], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
    }
    return whole, batch


def compiled(rank: int, size: int) -> bool:
    """A write and attention in one compiled graph."""
    mesh = dist.init_device_mesh("cpu", (size,))
    whole, batch = decode()

    def step(query, key, kv_cache, slots, block_tables, seq_lens, query_start_loc):
        paged_ops.reshape_and_cache(key, key, kv_cache, slots)
        return paged_ops.paged_attention(query * 2, kv_cache, block_tables, seq_lens, query_start_loc, 0.3) + 1

    tensors = [torch.tensor([4, 14]), *batch.values()]
    cache = whole["kv_cache"].clone()
    expected = step(whole["query"], whole["key"], cache, *tensors)
    parts = [spread_by(mesh, whole[name], dim) for name, dim in (("query", 1), ("key", 1), ("kv_cache", 3))]
    out = torch.compile(step, fullgraph=True)(*parts, *tensors)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.to_local(), expected.chunk(size, 1)[rank])
    return torch.equal(parts[2].to_local(), cache.chunk(size, 3)[rank])


def refused(rank: int, size: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (size,))
    whole, batch = decode()
    query, cache, tensors = whole["query"], whole["kv_cache"], list(batch.values())
    heads, by_heads, replicate = spread_by(mesh, query, 1), spread_by(mesh, cache, 3), spread_by(mesh, cache, None)
    partial = DTensor.from_local(query, mesh, [Partial()], run_check=False)
    odd = dict(run_check=False, shape=torch.Size([2, 3, 8]), stride=(24, 8, 1))
    three = DTensor.from_local(query[:, : 2 - rank], mesh, [Shard(1)], **odd)
    tables, pairs = spread_by(mesh, tensors[0], 0), torch.tensor([[0, 5]])
    calls = [
        lambda: paged_ops.paged_attention(spread_by(mesh, query, 0), cache, *tensors, 0.3),
        lambda: paged_ops.paged_attention(partial, cache, *tensors, 0.3),
        lambda: paged_ops.paged_attention(heads, cache, *tensors, 0.3),
        lambda: paged_ops.paged_attention(heads, replicate, *tensors, 0.3),
        lambda: paged_ops.paged_attention(heads, spread_by(mesh, cache, 0), *tensors, 0.3),
        lambda: paged_ops.paged_attention(heads, by_heads, tables, *tensors[1:], 0.3),
        lambda: paged_ops.paged_attention(three, by_heads, *tensors, 0.3),
        lambda: paged_ops.copy_blocks([spread_by(mesh, cache, 0)], pairs),
        lambda: paged_ops.copy_blocks([by_heads, replicate], pairs),
    ]
    return [told_by(call) for call in calls]


def told_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"
