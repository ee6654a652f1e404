"""The sums over ranks in a sharded model of transformers, done together with the residual add and the norm behind them.

transformers sums each row-parallel product by itself: ``o_proj`` and ``down_proj`` of a layer. What follows such a sum
in most models is the residual add and an RMSNorm: that of the same layer, that of the next, or the last one. Here a
layer hands on the pair of residual stream and normed rows instead of their sum, and one op
(:meth:`paged_ops.parallel.all_reduce.AllReduce.add_norm`) makes both.

Nothing is taken from names alone. While the model runs on trial, each layer is watched: that a product is summed over
ranks and handed on as it is, what is added to what, which norm follows. Where anything differs, the layer is left
alone, and :class:`AllReduceReport` says why. All ranks decide alike.

Letters: T tokens, C hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paged_ops.integrations.transformers.fused_layers import (
    FusedAllReduceNorm,
    FusedLayer,
    RowParallel,
    ShardedEmbedding,
    rows_of,
    run_embedding,
    run_fused_layer,
    run_head,
    run_last_norm,
    run_row_parallel,
)
from paged_ops.layouts import MODEL_DTYPES as DTYPES
from paged_ops.parallel.all_reduce import AllReduce, prepare_all_reduce, rms_norm
from paged_ops.parallel.tensor import is_sharded, local_of

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_INNER = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # of layers that norm what they add
# The logits of so many rows are gathered in parts of so many columns.
_GATHERED_ROWS, _LEAST_COLUMNS, _MOST_COLUMNS = 64, 512, 8192
LAST_NORMS = ("norm", "final_norm", "final_layernorm", "norm_f", "ln_f")


class AllReduceReport(NamedTuple):
    """What became of a model's sums over ranks.

    Attributes:
        kind: "symmetric" or "plain", and ``reason`` for plain: see :class:`paged_ops.parallel.all_reduce.AllReduce`.
        fused: the products that are summed together with the add and the norm behind them.
        alone: products and look-ups that are summed by themselves, by the same kernel, and why.
        gathered: the last product, if its columns are brought together by the same way.
        left: modules whose parts transformers goes on to bring together, and why.
    """

    kind: str
    reason: str | None
    fused: tuple[str, ...]
    alone: dict[str, str]
    gathered: tuple[str, ...]
    left: dict[str, str]


class _Call(NamedTuple):
    """The last call of a module on trial."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def first(self) -> Any:
        return self.args[0] if self.args else None


class _Layer:
    """What one decoder layer did on trial, and what speaks against fusing its two sums."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.layer: Any = layer
        self.norms_first = all(isinstance(getattr(layer, name, None), nn.Module) for name in _INNER)
        # behind the attention; and the norms of what is added
        self.second: Any = (
            self.layer.pre_feedforward_layernorm if self.norms_first else self.layer.post_attention_layernorm
        )
        self.inner: dict[str, Any] = {"self_attn": None, "mlp": None}
        if self.norms_first:
            self.inner = {"self_attn": layer.post_attention_layernorm, "mlp": layer.post_feedforward_layernorm}
        self.matmuls = {"self_attn": _row_parallel(layer, "self_attn"), "mlp": _row_parallel(layer, "mlp")}
        self.against: dict[str, str] = {}
        self.extras: dict[str, Any] = {}
        self.input: Any = None
        self.output: Any = None
        self.ran = False

    def refuse(self, part: str, reason: str) -> None:
        self.against.setdefault(part, reason)

    def ended(self, calls: dict[nn.Module, _Call]) -> None:
        """Checks what the layer did, from the calls of its parts."""
        self.ran, layer = True, self.layer
        own = calls[layer]
        if len(own.args) != 1:
            self.refuse("layer", "gets more by position than its hidden states")
            return
        self.input, self.output = own.args[0], own.output
        for name in _PARTS + _INNER * self.norms_first:
            if getattr(layer, name) not in calls:
                self.refuse("layer", f"did not call its {name}")
                return
        first, attention, second, mlp = (
            calls[each] for each in (layer.input_layernorm, layer.self_attn, self.second, layer.mlp)
        )
        given = dict(attention.kwargs)
        normed = given.pop("hidden_states", None)
        self.extras = {name: value for name, value in given.items() if name not in own.kwargs}
        passed = all(given.get(name, given) is value for name, value in own.kwargs.items())
        attended = attention.output[0] if isinstance(attention.output, tuple) else attention.output
        if not (_is_called_with(first, self.input) and normed is first.output and not attention.args):
            self.refuse("layer", "its attention does not get its input's norm, by name")
        elif not passed or any(value not in (None, False) for value in self.extras.values()):
            self.refuse("layer", "its attention gets other arguments than the layer")
        elif not (
            len(second.args) == 1 and _equal(second.args[0], self.input, self._added("self_attn", attended, calls))
        ):
            self.refuse("layer", "its second norm is not that of its input and the attention's output")
        elif not (len(mlp.args) == 1 and not mlp.kwargs and mlp.args[0] is second.output):
            self.refuse("layer", "its mlp does not get the second norm")
        elif not _equal(self.output, second.first, self._added("mlp", mlp.output, calls)):
            self.refuse("layer", "its output is not the residual stream and the mlp's output")
        for part, made in (("self_attn", attended), ("mlp", mlp.output)):
            linear = self.matmuls[part]
            call = None if linear is None else calls.get(linear)
            if call is None or call.output is not made:
                self.refuse(part, "its last product is not row-parallel, or not its output")

    def _added(self, part: str, made: Any, calls: dict[nn.Module, _Call]) -> Any:
        """What is added to the residual stream for what a part made; None if something else is normed."""
        inner = self.inner[part]
        if inner is None:
            return made
        return calls[inner].output if _is_called_with(calls[inner], made) else None


class _Plan(NamedTuple):
    """A sum that may be fused with the norm behind it."""

    layer: _Layer
    part: str  # "self_attn" or "mlp"
    linear: Any
    norm: Any
    kind: Any  # of the norm
    inner_eps: float


class Watch:
    """Watches a model on trial (``with``), and then fuses its sums. All ranks together."""

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._calls: dict[nn.Module, _Call] = {}
        self._hooks: list[Any] = []
        self._layers = [
            _Layer(self._names[layer], layer)
            for layers in self._names
            if isinstance(layers, nn.ModuleList)
            for layer in layers
            if all(isinstance(getattr(layer, name, None), nn.Module) for name in _PARTS)
        ]
        self._lookups = {module for module in self._names if _is_lookup(module)}
        self._summing = {module: "" for module in self._names if _is_row_parallel(module) or module in self._lookups}
        self._last: list[nn.Module] = []
        head = model.get_output_embeddings()
        is_split = type(head) is nn.Linear and _is_split(head, 0) and not head.weight.shape[0] % group.size()
        is_split = is_split and head.weight.dtype == model.dtype in DTYPES
        is_split = is_split and columns_of_parts(len(local_of(head.weight))) is not None
        self._heads: dict[nn.Module, bool] = {head: False} if is_split else {}  # whether they give all columns

    def __enter__(self) -> Watch:
        by_layer = {each.layer: each for each in self._layers}
        watched = {*self._summing, *by_layer, *self._heads}
        for layer in by_layer:
            watched |= {getattr(layer, name) for name in _PARTS + _INNER if hasattr(layer, name)}
        watched |= {module for module, name in self._names.items() if name.rpartition(".")[2] in LAST_NORMS}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls[module] = _Call(args, kwargs, output)
            if module in self._summing:
                self._check(module)
            if module in self._heads:
                self._check_head(module)
            if module in by_layer:
                by_layer[module].ended(self._calls)

        self._hooks = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _check(self, linear: Any) -> None:
        """Whether the product is this rank's part summed over ranks. A collective: the same on all ranks."""
        x, output = self._calls[linear].first, self._calls[linear].output
        if self._summing[linear]:
            return
        if not isinstance(x, Tensor):
            self._summing[linear] = "its input is no tensor, or given by name"
            return
        weight, is_lookup = local_of(linear.weight), linear in self._lookups
        if not is_lookup and x.shape[-1] != weight.shape[1]:
            self._summing[linear] = "its input is not this rank's part"
            return
        want = rows_of(self._lookup(linear, ""), x) if is_lookup else F.linear(x, weight)
        dist.all_reduce(want, group=self._group)
        if not is_lookup and linear.bias is not None:
            want = want + local_of(linear.bias)
        if not torch.allclose(want.float(), output.float(), rtol=0.02, atol=1e-3 * float(want.abs().max())):
            self._summing[linear] = "its output is not the sum of the ranks' parts"

    def _check_head(self, linear: Any) -> None:
        """Whether the product is that of all ranks' rows. A collective: the same on all ranks."""
        x, output = self._calls[linear].first, self._calls[linear].output
        if not isinstance(x, Tensor):
            return
        bias = None if linear.bias is None else local_of(linear.bias)
        own = F.linear(x, local_of(linear.weight), bias)
        every = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(every, own, group=self._group)
        self._heads[linear] = isinstance(output, Tensor) and torch.equal(torch.cat(every, -1), output)

    def fuse(self, wrapping: Any) -> AllReduceReport:
        """Changes the model, as a :class:`paged_ops.integrations.transformers.wrapping.Wrapping` then undoes."""
        plans = self._plans()
        fit, alone_fit, heads_fit = self._agreed(
            [not (plan.layer.against.get("layer") or plan.layer.against.get(plan.part)) for plan in plans],
            [not why for why in self._summing.values()],
            list(self._heads.values()),
        )
        for plan, fits in zip(plans, fit, strict=True):
            if not fits:
                plan.layer.refuse(plan.part, plan.layer.against.get("layer", "another rank cannot"))
        made: dict[int, AllReduce] = {}
        fused = self._fuse_layers(wrapping, [plan for plan, fits in zip(plans, fit, strict=True) if fits], made)
        alone, left = self._sum_others(wrapping, set(fused), alone_fit, made)
        gathered = []
        for head, fits in zip(self._heads, heads_fit, strict=True):
            if fits:
                self._replace(wrapping, head, run_head, RowParallel(head, self._gathers(made, head).name))
                gathered.append(self._names[head])
        sums = next(iter(made.values()), None)
        told = ("plain", "there are none") if sums is None else (sums.kind, sums.reason)
        return AllReduceReport(*told, tuple(fused), alone, tuple(gathered), left)

    def _plans(self) -> list[_Plan]:
        """What could be fused; what speaks against it is noted at the layers."""
        dtype, device = self._model.dtype, self._model.device
        for linear in self._summing:
            if linear not in self._calls:
                self._summing[linear] = "did not run on trial"
            elif dtype not in DTYPES or linear.weight.dtype != dtype:
                self._summing[linear] = f"is of {linear.weight.dtype}"
        kind_of = functools.cache(functools.partial(norm_kind, dtype=dtype, device=device))
        plans = []
        for each, after in zip(self._layers, self._following(), strict=True):
            for part, norm in (("self_attn", each.second), ("mlp", after)):
                linear, inner = each.matmuls[part], each.inner[part]
                if linear is not None and self._summing[linear]:
                    each.refuse(part, self._summing[linear])
                if linear is not None and linear.bias is not None:
                    each.refuse(part, "its last product has a bias")
                kind = None if norm is None else kind_of(norm)
                inner_kind = None if inner is None else kind_of(inner)
                if norm is None:
                    each.refuse(part, "what follows is not a layer or a norm that gets its output as it is")
                elif kind is None:
                    each.refuse(part, "the norm behind it is not an RMSNorm of a known kind")
                elif inner is not None and (inner_kind or {}) | {"eps": 0} != kind | {"eps": 0}:
                    each.refuse(part, "the norms before and behind the add are of two kinds")
                if not each.ran or linear is None:
                    each.refuse(part, "did not run on trial")
                plans.append(_Plan(each, part, linear, norm, kind, 0.0 if inner_kind is None else inner_kind["eps"]))
        return plans

    def _fuse_layers(self, wrapping: Any, plans: list[_Plan], made: dict[int, AllReduce]) -> list[str]:
        """The names of the products whose sums are fused."""
        fused: list[str] = []
        for each in self._layers:
            done: dict[str, FusedAllReduceNorm | None] = {"self_attn": None, "mlp": None}
            for plan in plans:
                if plan.layer is each:
                    sums = self._sums(made, plan.linear).name
                    done[plan.part] = FusedAllReduceNorm(
                        plan.norm, plan.kind, sums, each.inner[plan.part], plan.inner_eps
                    )
                    self._replace(wrapping, plan.linear, run_row_parallel, RowParallel(plan.linear, None))
                    fused.append(self._names[plan.linear])
            if plans and "layer" not in each.against:  # then it takes the pair that another gives
                of_layer = FusedLayer(done["self_attn"], done["mlp"], each.norms_first, each.extras)
                wrapping.set_attribute(each.layer, "paged_fusion", of_layer)
                wrapping.replace_forward(each.layer, _bound(run_fused_layer, each.layer))
        for norm in self._last:
            wrapping.replace_forward(norm, _bound(run_last_norm, norm))
        return fused

    def _sum_others(
        self, wrapping: Any, fused: set[str], fit: list[bool], made: dict[int, AllReduce]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """What is summed alone, and what is left to transformers, with the reasons."""
        alone: dict[str, str] = {}
        left: dict[str, str] = {}
        reasons = {
            each.matmuls[part]: why for each in self._layers for part, why in each.against.items() if part != "layer"
        }
        for (module, why), fits in zip(self._summing.items(), fit, strict=True):
            name = self._names[module]
            if name in fused:
                continue
            if not fits:
                left[name] = why or "another rank cannot"
            elif module in self._lookups:
                self._replace(wrapping, module, run_embedding, self._lookup(module, self._sums(made, module).name))
                alone[name] = "it looks up a part of the vocabulary"
            else:
                self._replace(wrapping, module, run_row_parallel, RowParallel(module, self._sums(made, module).name))
                alone[name] = reasons.get(module, "it is not the last product of a layer that is known")
        for module, name in self._names.items():
            has_forward = "forward" in vars(module) and module not in self._summing
            if is_sharded(module) and has_forward and not isinstance(module, nn.Linear):
                left[name] = f"it is no linear layer but {type(module).__name__}"
        return alone, left

    def _following(self) -> list[Any]:
        """For each layer the norm behind it: the next layer's first, or the last one."""
        found: list[Any] = [None] * len(self._layers)
        has_images = getattr(self._model.config, "vision_config", None) is not None  # which are added between layers
        for i, each in enumerate(self._layers):
            if has_images or not isinstance(each.output, Tensor):
                continue
            later = self._layers[i + 1] if i + 1 < len(self._layers) else None
            if later is not None and later.input is each.output and not later.against.get("layer"):
                found[i] = later.layer.input_layernorm
            elif later is None:
                for module, call in self._calls.items():
                    name = self._names[module].rpartition(".")[2]
                    if name in LAST_NORMS and len(call.args) == 1 and call.args[0] is each.output:
                        found[i] = module
                        self._last = [module]
        return found

    def _lookup(self, embedding: Any, sums: str) -> ShardedEmbedding:
        return ShardedEmbedding(embedding, self._group.rank(), self._group.size(), sums)

    def _sums(self, made: dict[int, AllReduce], linear: Any) -> AllReduce:
        columns = linear.weight.shape[1 if linear in self._lookups else 0]
        if columns not in made:
            made[columns] = prepare_all_reduce(self._group, columns, self._model.dtype, self._model.device)
        return made[columns]

    def _gathers(self, made: dict[int, AllReduce], head: Any) -> AllReduce:
        """For the logits of so many rows; more go through the backend."""
        rows = len(local_of(head.weight))
        columns = columns_of_parts(rows)
        assert columns is not None
        most = _GATHERED_ROWS * (rows // columns)
        made[-1] = prepare_all_reduce(self._group, columns, self._model.dtype, self._model.device, max_rows=most)
        return made[-1]

    def _replace(
        self, wrapping: Any, module: nn.Module, run: Callable[..., Any], part: RowParallel | ShardedEmbedding
    ) -> None:
        wrapping.set_attribute(module, "paged_part", part)
        wrapping.replace_forward(module, _bound(run, module))

    def _agreed(self, *lists: Sequence[bool]) -> list[list[bool]]:
        """What holds on all ranks."""
        flat = torch.tensor([each for some in lists for each in some] + [True], device=self._model.device).int()
        dist.all_reduce(flat, op=dist.ReduceOp.MIN, group=self._group)
        told = iter(flat.bool().tolist())
        return [[next(told) for _ in some] for some in lists]


@torch.no_grad()
def norm_kind(norm: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """How an RMSNorm rounds and what it adds to its weight, as :func:`paged_ops.parallel.all_reduce.rms_norm` takes it;
    None if it is none of these. It is tried on a few rows, so all that counts is what it computes."""
    weight = getattr(norm, "weight", None)
    eps = next((e for e in (getattr(norm, n, None) for n in ("variance_epsilon", "eps")) if isinstance(e, float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or is_sharded(norm):
        return None
    on_host: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    rows = torch.randn(4, len(weight), generator=torch.Generator("cpu").manual_seed(0), **on_host)
    x = (rows * torch.tensor([3.0, 1.0, 0.1, 1e-3], **on_host)[:, None]).to(device, dtype)
    got = norm(x[None])[0]
    if not isinstance(got, Tensor) or got.dtype != dtype:
        return None
    best, fewest = None, 0.01  # the part of elements that a sum in another order may round otherwise
    for weight_offset in (0.0, 1.0):
        for rounds_first in (True, False):
            if rounds_first and weight.dtype != dtype:
                continue
            kind: dict[str, Any] = dict(eps=eps, weight_offset=weight_offset, rounds_first=rounds_first)
            want = rms_norm(x, weight, **kind)
            near = torch.isclose(got, want, rtol=1e-5, atol=0) if dtype == torch.float32 else got == want
            wrong = 1 - float(near.float().mean())
            if wrong < fewest:
                best, fewest = kind, wrong
    return best


def columns_of_parts(columns: int) -> int | None:
    """The width of the equal parts in which rows of so many columns are gathered, a multiple of 8 if possible; None if
    there is no such width that is neither small nor too large."""
    widths = [n for n in range(min(columns, _MOST_COLUMNS), 0, -1) if columns % n == 0]
    fitting = [n for n in widths if n >= min(columns, _LEAST_COLUMNS)]
    return next((n for n in fitting if n % 8 == 0), fitting[0] if fitting else None)


def _row_parallel(layer: Any, part: str) -> Any:
    """The only row-parallel linear layer of a part, if there is one."""
    found = [module for module in getattr(layer, part).modules() if _is_row_parallel(module)]
    return found[0] if len(found) == 1 else None


def _is_row_parallel(module: Any) -> bool:
    """Whether it is a linear layer whose weight is sharded by columns, and whose forward the library has replaced."""
    return type(module) is nn.Linear and (_is_split(module, 1) or _is_split(module, -1))


def _is_lookup(module: Any) -> bool:
    """Whether it is an embedding whose rows are sharded, and whose forward the library has replaced."""
    return type(module) is nn.Embedding and module.max_norm is None and _is_split(module, 0)


def _is_split(module: Any, dim: int) -> bool:
    placements: tuple[Any, ...] = getattr(module.weight, "placements", ())
    is_replaced = "forward" in vars(module) and not module._forward_hooks
    return is_replaced and len(placements) == 1 and placements[0].is_shard(dim)


def _bound(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """As a method. A closure is what compilers follow best."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return forward


def _is_called_with(call: _Call, value: Any) -> bool:
    return len(call.args) == 1 and call.args[0] is value and not call.kwargs


def _equal(got: Any, a: Any, b: Any) -> bool:
    if not all(isinstance(each, Tensor) for each in (got, a, b)):
        return False
    return got.shape == a.shape == b.shape and torch.equal(got, a + b)
