"""Fused QKV projections (also of latents) and fused gate and up projections; linear layers by an overlapping kernel.

A decode step is bound by loading weights, and one matmul loads them faster than three. Works on any model whose modules
name their projections like Llama, compiled or not. Serving engines call the fused layers ``qkv_proj`` and
``gate_up_proj``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops.checks import expect
from paged_ops.parallel.tensor import gives_own_rows, is_sharded, like, local_of

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    # latent attention, which has one of these
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def fuse_projections(model: nn.Module) -> int:
    """Fuse the projections of a model, in place, and return the number of matmuls saved per pass.

    The results are the same: the weights are concatenated by rows, for one matmul. Call it after weights are loaded, on
    their final device (one layer's weights exist twice for a moment), and before compiling. ``state_dict`` and
    ``load_state_dict``, and so ``save_pretrained``, keep the original names and weights; ``named_parameters`` change.
    :func:`split_projections` undoes it. Projections that are not plain ``nn.Linear`` of one input size, dtype and
    device, all with a bias or all without, are not changed.

    Each rank of a sharded model fuses its own rows. All ranks call it together, after
    :class:`paged_ops.integrations.transformers.PagedCausalLM` if there are fewer key/value heads than ranks.

    Raises:
        ValueError: the sharding cuts through heads.
    """
    saved = 0
    for module in _modules(model):
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            linears = [part for part in parts if type(part) is nn.Linear]
            if len(linears) == len(parts) and all(map(gives_own_rows, linears)) and _alike(linears):
                _refuse_cut_heads(module, linears)
                fused = FusedLinear(linears)
                for name, part in zip(names, fused.parts(), strict=True):
                    setattr(module, name, part.train(module.training))
                saved += len(parts) - 1
    return saved


def split_projections(model: nn.Module) -> int:
    """Undo :func:`fuse_projections`, in place: ``nn.Linear`` as before, with the present weights; returns their
    number."""
    split = 0
    for module in _modules(model):
        for name, part in list(module.named_children()):
            if isinstance(part, FusedPart):
                setattr(module, name, part.linear())
                split += 1
    return split


def use_overlapping_products(model: nn.Module) -> int:
    """Let the linear layers of a model use the few-row kernel of Hopper GPUs, in place; returns how many of them can.

    These are layers without a bias, in bfloat16 or float16, also fused ones (:func:`fuse_projections`). The kernel
    takes calls of few rows (``lowerings/gpu/linear.py``) and ``torch.nn.functional.linear`` all others. Results differ
    only by rounding. Call it before compiling.

    Raises:
        ImportError: Triton is not installed.
    """
    try:
        from paged_ops.lowerings.gpu.linear import serves_weight
    except ModuleNotFoundError as error:
        expected = "use_overlapping_products: expected Triton, in which its kernel is written (the extra gpu)"
        raise ImportError(f"{expected}, got none: {error}") from None

    found = 0
    for module in _modules(model):
        part: Any = getattr(module, "paged_part", None)  # of a row-parallel layer
        if hasattr(part, "matmul") and (part.bias is None or part.reducer is not None) and serves_weight(part.weight):
            part.matmul = _overlapping_linear
            found += 1
            continue
        # A sharded layer has a forward of its own, which calls the original one. Batch-invariant layers stay.
        is_plain = type(module) is nn.Linear and "forward" not in vars(module)
        is_linear = is_plain or (isinstance(module, FusedLinear) and module.matmul in (F.linear, _overlapping_linear))
        if not (is_linear and module.bias is None and serves_weight(module.weight)):
            continue
        found += 1
        if isinstance(module, FusedLinear):
            module.matmul = _overlapping_linear
        else:
            module.__class__ = OverlappingLinear
    return found


class OverlappingLinear(nn.Linear):
    """``nn.Linear`` without a bias, by ``paged_ops.ops.few_row_linear``. Its next result is added to ``residual``."""

    residual: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        out: Tensor = torch.ops.paged_ops_models.few_row_linear.default(x, self.weight, None, residual, constant=True)
        return out


def is_overlapping(fused: FusedLinear) -> bool:
    """Whether a fused layer runs by the few-row kernel."""
    return fused.matmul is _overlapping_linear


def _overlapping_linear(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    assert bias is None
    out: Tensor = torch.ops.paged_ops_models.few_row_linear.default(x, weight, constant=True)
    return out


class FusedLinear(nn.Module):
    """Several linear layers with the same input as one. Keeps the result until the last part has read it."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weights = [local_of(linear.weight) for linear in linears]
        self.sizes = [len(weight) for weight in weights]
        trains = linears[0].weight.requires_grad
        self.weight = nn.Parameter(torch.cat(weights), trains)
        self.bias: nn.Parameter | None = None
        if linears[0].bias is not None:
            self.bias = nn.Parameter(torch.cat([local_of(linear.bias) for linear in linears]), trains)
        self._sharded = [linear if is_sharded(linear) else None for linear in linears]
        self.matmul: Callable[..., Tensor] = F.linear
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.left = 0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves nothing: its parts save their rows."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads nothing: its parts load their rows."""

    def parts(self) -> list[FusedPart]:
        each = zip(self.sizes, itertools.accumulate(self.sizes), self._sharded, strict=True)
        return [FusedPart(self, end - size, end, sharded) for size, end, sharded in each]

    def keep(self, x: Tensor, output: Tensor) -> None:
        """The output of the next calls with x."""
        self.input, self.output, self.left = x, output, len(self.sizes)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.output is None or self.input is not x:
            self.keep(x, self.matmul(x, self.weight, self.bias))
        assert self.output is not None
        result = self.output[..., start:stop]
        self.left -= 1
        if self.left == 0:
            self.input = self.output = None
        return result


class FusedPart(nn.Module):
    """The layer that a model calls: rows ``start : stop`` of a :class:`FusedLinear`.

    In place of a sharded layer it has this rank's rows. It keeps the original layer, because :meth:`linear` restores
    it with its hook; until then its weight is a view of the fused weight.
    """

    def __init__(self, fused: FusedLinear, start: int, stop: int, sharded: nn.Linear | None = None) -> None:
        super().__init__()
        self.fused, self.start, self.stop = fused, start, stop
        self.in_features, self.out_features = fused.weight.shape[1], stop - start
        self._sharded = () if sharded is None else (sharded,)  # a tuple, so that it is no submodule
        for layer in self._sharded:
            for name, rows in self._named_rows():
                setattr(layer, name, like(getattr(layer, name), rows.detach()))

    @property
    def weight(self) -> Tensor:
        return self.fused.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        return None if self.fused.bias is None else self.fused.bias[self.start : self.stop]

    def _named_rows(self) -> list[tuple[str, Tensor]]:
        return [(name, rows) for name in ("weight", "bias") if (rows := getattr(self, name)) is not None]

    def linear(self) -> nn.Linear:
        """The original layer, with its own weights."""
        for layer in self._sharded:
            for name, rows in self._named_rows():
                setattr(layer, name, like(getattr(layer, name), rows.detach().clone()))
            return layer
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta", dtype=self.weight.dtype)
        for name in ("weight", "bias")[: 1 + has_bias]:
            rows = getattr(self, name).detach().clone()
            setattr(linear, name, nn.Parameter(rows, self.fused.weight.requires_grad))
        return linear.train(self.training)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, rows in self._named_rows():
            for layer in self._sharded:
                rows = getattr(layer, name)
            destination[prefix + name] = rows if keep_vars else rows.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in ("weight", "bias"):
            rows, given = getattr(self, name), state_dict.get(prefix + name)
            if rows is None:
                if given is not None and strict:
                    unexpected_keys.append(prefix + name)
            elif given is None:
                if strict:
                    missing_keys.append(prefix + name)
            elif self._sharded and getattr(self._sharded[0], name).shape == given.shape:
                with torch.no_grad():
                    getattr(self._sharded[0], name).copy_(given)
            elif given.shape != rows.shape:
                error_msgs.append(f"{prefix + name}: expected shape {list(rows.shape)}, got {list(given.shape)}")
            else:
                with torch.no_grad():
                    rows.copy_(given)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.rows(x, self.start, self.stop)


def _modules(model: nn.Module) -> list[nn.Module]:
    own = "a model of transformers or another nn.Module; of a PagedCausalLM its .model"
    expect(isinstance(model, nn.Module), "model", own, type(model).__name__)
    return list(model.modules())


def _refuse_cut_heads(module: Any, linears: list[nn.Linear]) -> None:
    D = getattr(module, "head_dim", 1)
    if len(linears) == 3 and any(is_sharded(linear) and len(local_of(linear.weight)) % D for linear in linears):
        raise ValueError(
            f"model: expected whole heads on each rank, got {[len(local_of(each.weight)) for each in linears]} rows of"
            f" heads of {D}; wrap it by PagedCausalLM first, which repeats key/value heads"
        )


def _alike(linears: list[nn.Linear]) -> bool:
    kinds = {
        (each.in_features, each.weight.dtype, each.weight.device, each.bias is None, each.weight.requires_grad)
        for each in linears
    }
    return len(kinds) == 1
