"""Models whose heads are sharded over ranks (tensor parallelism), and the shard of each rank.

The weight of a sharded linear layer is a DTensor. Sharded by rows (column-parallel: each rank computes some outputs, so
some heads), a rank multiplies by its own rows without communication. Sharded by columns (row-parallel), a hook set by
the library that sharded the model all-reduces the results. Only the first kind is changed here.

Letters: W ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops.checks import expect


def is_sharded(module: nn.Module) -> bool:
    """Whether any weight of the module itself is a DTensor."""
    return any(_is_dtensor(each) for each in module.parameters(recurse=False))


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of ranks over which a model is sharded; None if it is not sharded.

    Raises:
        ValueError: it is sharded over several groups, or over a mesh of several dimensions without one named "tp".
    """
    groups: dict[str, dist.ProcessGroup] = {}
    parameters: Any = model.parameters()
    for parameter in parameters:
        if _is_dtensor(parameter):
            mesh: Any = parameter.device_mesh
            names = mesh.mesh_dim_names or ()
            expect(mesh.ndim == 1 or "tp" in names, "model", 'a mesh of one dimension, or with one named "tp"', mesh)
            group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
            groups[group.group_name] = group
    expect(len(groups) <= 1, "model", "one group of ranks over which it is sharded", sorted(groups))
    return next(iter(groups.values()), None)


def local_of(parameter: Any) -> Tensor:
    """This rank's shard of a parameter, or the whole parameter if it is not sharded."""
    local: Tensor = parameter.to_local() if _is_dtensor(parameter) else parameter
    return local.detach()


def like(parameter: Any, local: Tensor) -> nn.Parameter:
    """A parameter sharded like the given one; ``local`` is this rank's shard."""
    if _is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        place = parameter.device_mesh, parameter.placements
        local = DTensor.from_local(local, *place, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(local, parameter.requires_grad)


def gives_own_rows(linear: nn.Linear) -> bool:
    """Whether each rank's output of a linear layer is the matmul with its own rows, or the layer is not sharded.

    A probe with a row of zeros and a row of ones decides, because a hook may change the result. Call it on all ranks.
    """
    if not is_sharded(linear):
        return "forward" not in vars(linear)
    parameters: Any = linear.parameters(recurse=False)
    for each in parameters:
        if not (_is_dtensor(each) and len(each.placements) == 1 and each.placements[0].is_shard(0)):
            return False
    weight = local_of(linear.weight)
    bias = local_of(linear.bias) if "bias" in dict(linear.named_parameters(recurse=False)) else None
    x = torch.ones(2, linear.in_features, dtype=weight.dtype, device=weight.device)
    x[0] = 0
    with torch.no_grad():
        out = linear(x[None])
    return not _is_dtensor(out) and torch.equal(out[0], F.linear(x, weight, bias))


def repeated_heads(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Linear], int]]:
    """Attention layers with fewer key/value heads than ranks, where sharding by rows would cut through a head.

    Yields the layer, projections for the whole head that this rank's queries attend to, and the number of query heads
    that share it. Where W is a multiple of K, rank r has head ``r·K // W``. All ranks call it together.

    Raises:
        ValueError: heads cannot be divided evenly; names the layer.
    """
    names = {module: name for name, module in model.named_modules()}
    modules: Any = list(model.modules())
    for module in modules:
        projections: list[Any] = [getattr(module, f"{name}_proj", None) for name in ("q", "k", "v")]
        D = getattr(module, "head_dim", None)
        if not (isinstance(D, int) and all(isinstance(each, nn.Linear) and is_sharded(each) for each in projections)):
            continue
        query, key, value = projections
        mesh: Any = query.weight.device_mesh
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        W, rank = group.size(), group.rank()
        H, K = query.weight.shape[0] // D, key.weight.shape[0] // D
        even = H % W == 0 and (K % W == 0 or W % K == 0)
        expect(
            even,
            "model",
            f"query heads in a multiple of the {W} ranks, and key/value heads in a multiple or a divisor of it"
            f" (use another number of ranks, or a plan without {names[module]}'s projections)",
            f"{H} and {K} heads in {names[module]}",
        )
        if K % W == 0:
            continue
        whole = {}
        for name, linear in (("k_proj", key), ("v_proj", value)):
            size = linear.weight.shape[0] // K
            start = rank * K // W * size
            whole[name] = _rows_of(linear, start, start + size)
        yield module, whole, H // W


def _rows_of(linear: Any, start: int, stop: int) -> nn.Linear:
    """A linear layer with some rows of a sharded one, gathered from their ranks."""
    has_bias = linear.bias is not None
    kept = nn.Linear(linear.in_features, stop - start, has_bias, device="meta", dtype=linear.weight.dtype)
    for name in ("weight", "bias")[: 1 + has_bias]:
        parameter = getattr(linear, name)
        whole = parameter.full_tensor() if _is_dtensor(parameter) else parameter
        setattr(kept, name, nn.Parameter(whole.detach()[start:stop].clone(), parameter.requires_grad))
    return kept.train(linear.training)


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")
