"""What each rank runs in the tests of sums over ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from paged_ops import reference
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.lowerings.collectives import rms_norm
from paged_ops.parallel import symmetric
from paged_ops.parallel.all_reduce import prepare_all_reduce
from tests.parallel.model_cases import load, make

KINDS: tuple[dict[str, Any], ...] = (
    dict(eps=1e-5, rounds_first=True),
    dict(eps=1e-6, weight_offset=1.0),
    dict(eps=1e-6),
)


def told(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def tensors(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def device_of(rank: int, size: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= size else torch.device("cpu")


def ops(rank: int, size: int, dtype: torch.dtype, columns: int = 64) -> Any:
    """The largest errors against float64, in units of the dtype, and whether compiled and plain steps agree."""
    device, errors, same = device_of(rank, size), [0.0, 0.0], True
    sums = prepare_all_reduce(dist.group.WORLD, columns, dtype, device)
    assert sums is prepare_all_reduce(dist.group.WORLD, columns, dtype, device)
    for seed, kind in enumerate(KINDS):

        def step(x: Any, left: Any, weight: Any, kind: dict[str, Any] = kind) -> Any:
            summed, normed = sums.add_norm(x, left, weight, **kind)
            return summed, sums.sum(normed), sums.gather(normed)

        compiled = torch.compile(step, fullgraph=True, dynamic=True)
        for rows in (0, 1, 5, 33):
            generator = torch.Generator().manual_seed(100 * seed + rows)
            made = torch.randn(size + 1, 1, rows, columns, generator=generator, dtype=torch.float32).to(device, dtype)
            weight = torch.randn(columns, generator=generator, dtype=torch.float32).to(device, dtype)
            parts, residual = made[:-1], made[-1]
            summed, normed = sums.add_norm(parts[rank], residual, weight, **kind)
            exact = residual.double() + parts.double().sum(0)
            scale = kind.get("weight_offset", 0.0) + weight.double()
            exact_normed = exact / (exact.square().mean(-1, keepdim=True) + kind["eps"]).sqrt() * scale
            for i, (got, want) in enumerate(((summed, exact), (normed, exact_normed))):
                if rows:
                    error = ((got.double() - want).abs() / (1 + want.abs())).max().item()
                    errors[i] = max(errors[i], error / torch.finfo(dtype).eps)
            wide = made.expand(size + 1, 2, rows, columns).transpose(1, 2).flatten(2)  # two of its rows in each
            same &= torch.equal(sums.gather(wide[rank]), torch.cat(list(wide[:-1]), -1))
            total = parts[rank].clone()
            dist.all_reduce(total)
            plain = residual + total
            inner, _ = sums.add_norm(parts[rank], residual, weight, **kind, inner_weight=weight.flip(0), inner_eps=1e-3)
            added = rms_norm(total, weight.flip(0), **kind | {"eps": 1e-3})
            same &= torch.allclose(inner.float(), (residual + added).float(), rtol=2e-2, atol=2e-2)
            same &= device.type != "cpu" or torch.equal(summed, plain)
            same &= torch.allclose(normed.float(), rms_norm(summed, weight, **kind).float(), rtol=2e-2, atol=2e-2)
            for op, arguments in (
                ("all_reduce", (parts[rank], sums.name)),
                ("all_gather_columns", (parts[rank], sums.name)),
                ("all_reduce_add_norm", (parts[rank], residual, weight, kind["eps"], sums.name)),
            ):
                options = {name: value for name, value in kind.items() if op.endswith("norm") and name != "eps"}
                got = getattr(torch.ops.paged_ops_parallel, op)(*arguments, **options)
                want = getattr(reference, op)(*arguments, **options)
                same &= op != "all_gather_columns" or torch.equal(got, want)
                for one, other in zip(tensors(got), tensors(want), strict=True):
                    same &= torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)
            if seed == 0:
                again, twice, wide = compiled(parts[rank], residual, weight)
                same &= torch.equal(again, summed) and torch.equal(twice, sums.sum(normed))
                same &= torch.equal(wide, sums.gather(normed))
    return sums.kind, sums.reason, errors, bool(same)


def refusals(rank: int, size: int) -> Any:
    device = device_of(rank, size)
    sums = prepare_all_reduce(dist.group.WORLD, 8, torch.float32, device)
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    add = torch.ops.paged_ops_parallel.all_reduce_add_norm
    results = [
        told(lambda: prepare_all_reduce(dist.group.WORLD, 0, torch.float32, device)),
        told(lambda: prepare_all_reduce(dist.group.WORLD, 8, torch.int32, device)),
        told(lambda: sums.sum(x.half())),
        told(lambda: sums.sum(torch.ones(2, 7, device=device))),
        told(lambda: sums.add_norm(x, x[:1], weight, 1e-5)),
        told(lambda: sums.add_norm(x, x, weight[:7], 1e-5)),
        told(lambda: sums.add_norm(x, x, weight.half(), 1e-5, rounds_first=True)),
        told(lambda: sums.add_norm(x, x, weight, -1.0)),
        told(lambda: sums.gather(x[:, :7])),
        told(lambda: sums.add_norm(x, x, weight, 1e-5, inner_weight=weight[:7])),
    ]
    sums.close()
    return [*results, told(lambda: add(x, x, weight, 1e-5, sums.name))]


def of_model(rank: int, size: int, name: str, folder: str, **changes: Any) -> Any:
    """What became of a model's sums, and whether unwrapping brings them back."""
    model = load(make(name, folder, rank, **changes), size)
    before = {each: vars(module).get("forward") for each, module in model.named_modules()}
    paged = PagedCausalLM(model)
    sums = paged.sums
    paged.unwrap()
    same = {each: vars(module).get("forward") for each, module in model.named_modules()} == before
    assert not any(
        getattr(module, "paged_fusion", None) or getattr(module, "paged_part", None) for module in model.modules()
    )
    return tuple(sums), same


def agrees(rank: int, size: int) -> Any:
    """What all are told if all can, if one rank cannot, and if one is on another host."""
    device, group = device_of(rank, size), dist.group.WORLD
    results = [
        symmetric._agreed_reason(group, device, 0),
        symmetric._agreed_reason(group, device, 2 if rank == 1 else 0),
    ]
    host = symmetric._host
    symmetric._host = lambda: host() + rank
    try:
        return [*results, symmetric._agreed_reason(group, device, 0)]
    finally:
        symmetric._host = host


def replays(rank: int, size: int, count: int) -> Any:
    """How many numbers differ from the steps one by one, in replays of captured calls with new inputs each time."""
    device, dtype, C, norm = device_of(rank, size), torch.bfloat16, 4096, KINDS[0]
    sums = prepare_all_reduce(dist.group.WORLD, C, dtype, device)
    generator = torch.Generator(device).manual_seed(3)  # the same numbers on all ranks
    weight = torch.randn(C, generator=generator, device=device, dtype=torch.float32).to(dtype)
    inputs = [torch.zeros(size + 1, rows, C, dtype=dtype, device=device) for rows in (1, 17, 64)]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    def step() -> list[Any]:
        outputs = []
        for made in inputs:
            summed, normed = sums.add_norm(made[rank], made[size], weight, **norm)
            outputs += [summed, *sums.add_norm(normed, summed, weight, **norm)]
        return outputs

    step()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for i in range(count):
        for made in inputs:
            made.normal_(generator=generator)
        if i % 16 == rank:
            torch.cuda._sleep(20_000)
        graph.replay()
        for n, made in enumerate(inputs):
            summed, again, normed = outputs[3 * n : 3 * n + 3]
            want = made[size] + made[:size].float().sum(0).to(dtype)
            one = rms_norm(summed, weight, **norm)
            wrong[0] += (want != summed).sum()
            for got, exact in ((again, summed + size * one), (normed, rms_norm(again, weight, **norm))):
                wrong[1] += ((got.float() - exact.float()).abs() > 0.05 * (1 + exact.float().abs())).sum()
    return sums.kind, wrong.tolist()


def ends(rank: int, size: int) -> Any:
    """Rank 0 waits for a sum to which the others do not come, and ends it; seconds until then."""
    device = device_of(rank, size)
    sums = prepare_all_reduce(dist.group.WORLD, 1024, torch.bfloat16, device)
    x = torch.ones(300, 1024, dtype=torch.bfloat16, device=device)
    assert sums.sum(x).eq(size).all()
    dist.barrier()
    if rank:
        time.sleep(3)
        return None
    sums.sum(x)
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.5)
    waited = not done.query()
    began = time.monotonic()
    symmetric.abort(dist.group.WORLD)
    torch.cuda.synchronize(device)
    return waited, time.monotonic() - began
