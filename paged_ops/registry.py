"""The mechanism: an op is declared once, everything else is found by its name.

A declaration in :mod:`paged_ops.ops` is a Python signature with a docstring and no body. From it :func:`op` infers the
schema and defines ``torch.ops.paged_ops.<name>``; then it looks for a function of the same name in

* ``paged_ops.fake`` - static checks, and the result as an empty tensor (the meta kernel);
* one module per dispatch key (:data:`LOWERINGS`) - how it runs there, imported at the first call.

A functional op also gets an ``.out`` overload that takes the same arguments and the preallocated results and returns
nothing: a plain mutating op to every torch version. Its fake and its lowerings take the results as ``out``. If it
returns one tensor, it gets a ``.list`` overload too, which compiled graphs call: see :func:`_stay_in_place`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from paged_ops import checks

P = ParamSpec("P")
R = TypeVar("R")

# Dispatch key -> the module that lowers every op for it. ROCm is CUDA to the dispatcher.
LOWERINGS = {
    "CPU": "paged_ops.lowerings.cpu",
    "CUDA": "paged_ops.lowerings.gpu",
    "XLA": "paged_ops.lowerings.tpu",
}
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "CUDA", "xla": "XLA"}

LIBRARY = torch.library.Library("paged_ops", "DEF")
OPS: dict[str, Callable[..., Any]] = {}  # of this library


def op(
    *,
    mutates: Sequence[str] = (),
    out: Sequence[str] = (),
    in_place: bool = False,
    library: torch.library.Library = LIBRARY,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an op: ``mutates`` names the tensors it writes, ``out`` the results of a functional one.

    Ops of another ``library`` serve whole models: they write nothing, and :data:`OPS` does not list them.

    A written tensor shares no memory with any other argument. With ``in_place`` it may be another argument itself, as
    each element is read before it is written.
    """

    def declare(signature: Callable[P, R]) -> Callable[P, R]:
        name = signature.__name__
        schema = torch.library.infer_schema(signature, mutates_args=mutates)
        _define(name, schema, mutates, in_place=in_place, library=library)
        if out:
            _define(f"{name}.out", _out_schema(schema, out), out, out, in_place)
        default = getattr(getattr(torch.ops, library.ns), name).default
        if library is LIBRARY:
            if "torch_xla" in sys.modules:
                _install_twins(name)
            if schema.endswith("-> Tensor"):
                _stay_in_place(default, schema)

        names = tuple(each.name for each in default._schema.arguments)
        flags = tuple(each.name for each in default._schema.arguments if str(each.type) == "bool")

        @functools.wraps(signature)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.is_grad_enabled():
                _refuse_grad(name, zip(names, args, strict=False))
                if kwargs:
                    _refuse_grad(name, kwargs.items())
            for flag in flags:
                if kwargs.get(flag, False) is None:  # the dispatcher would take it for False
                    raise ValueError(f"{flag}: expected True or False, got None")
            if _transforming():
                _refuse_transforms(name, mutates, args, kwargs)
            return default(*args, **kwargs)

        if library is LIBRARY:
            OPS[name] = call
        return call

    return declare


def lowering(name: str, key: str) -> Callable[..., Any]:
    """The function that runs op ``name`` under a dispatch key; NotImplementedError names both if there is none."""
    module = module_of(key)
    if isinstance(module, str):
        raise NotImplementedError(f"paged_ops.{name}: no lowering for {key} yet: {module}")
    found = getattr(module, name, None)
    if found is None:
        raise NotImplementedError(f"paged_ops.{name}: no lowering for {key} yet: {LOWERINGS[key]} does not have it")
    return found


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function with autocast off on all devices, also for all that it calls."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return call


def apart_from_caller(function: Callable[P, R]) -> Callable[P, R]:
    """The function without gradients and autocast, and outside of inference mode, whatever the calling thread has: its
    result is the same for every caller, and any thread can write the tensors that it makes."""
    plainly = without_autocast(torch.no_grad()(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return plainly(*args, **kwargs)
        with torch.inference_mode(False):
            return plainly(*args, **kwargs)

    return call


def _define(
    name: str,
    schema: str,
    written: Sequence[str],
    out: Sequence[str] = (),
    in_place: bool = False,
    library: torch.library.Library = LIBRARY,
) -> None:
    base, _, overload = name.partition(".")
    # Not tagged torch.Tag.out: inductor 2.13 passes keyword-only scalars twice to an .out overload it picks by tag.
    library.define(name + schema)
    # Without a kernel under Autograd a cache written in grad mode could not be written again in place.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload = overload or "default"
    run = getattr(getattr(getattr(torch.ops, library.ns), base), overload)
    for key in LOWERINGS:
        kernel = _late(functools.partial(lowering, base, key), schema, out)
        if (written or out) and key != "XLA":  # XLA's tensors have no addresses
            kernel = _disjoint(kernel, run, in_place)
        if key == "CPU":
            kernel = _repeated(kernel, functools.partial(lowering, base, key), schema, out)
        library.impl(name, kernel, key)
    for key in (*LOWERINGS, "PrivateUse1"):  # the dispatcher calls these only under autocast: else they cost nothing
        library.impl(name, without_autocast(run), f"Autocast{key}")
    if written:
        for key in ("Negative", "Conjugate"):
            library.impl(name, _resolve(base, overload, written), key)
    fake = _late(functools.partial(_fake, base), schema, out)
    if written or out:
        fake = _disjoint(fake, run, in_place, traced=True)
    if written:
        fake = _counted(fake, run, written)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def _stay_in_place(default: torch._ops.OpOverload, schema: str) -> None:
    """Make compiled graphs call an overload that returns a list of one tensor, ``.list``.

    Inductor moves an op that returns one tensor to the first use of its result. So it may move a read of a cache past a
    later write, and that write then copies the whole cache. An op that returns a list stays in place. The overload
    replaces the op when a graph is functionalized, before inductor runs; an exported program keeps the op.
    """
    name = default._schema.name.partition("::")[2]
    _define(f"{name}.list", f"{schema}[]", ())
    LIBRARY.impl(f"{name}.list", lambda *args, **kwargs: [default(*args, **kwargs)], "CompositeExplicitAutograd")
    listed = getattr(torch.ops.paged_ops, name).list

    @default.py_impl(FunctionalTensorMode)
    def call(mode: FunctionalTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return listed(*args, **kwargs)[0]


def _late(find: Callable[[], Callable[..., Any]], schema: str, out: Sequence[str]) -> Callable[..., Any]:
    """A kernel that finds its function at the first call.

    For an ``.out`` overload it passes the results as ``out``; for a ``.list`` overload it returns the result in a list.
    """
    function: Callable[..., Any] | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal function
        if function is None:
            function = find()
        return function(*args, **kwargs)

    def kernel_out(*args: Any, **kwargs: Any) -> None:
        results = tuple(kwargs.pop(name) for name in out)
        kernel(*args, **kwargs, out=results[0] if len(out) == 1 else results)

    def kernel_list(*args: Any, **kwargs: Any) -> list[Any]:
        return [kernel(*args, **kwargs)]

    return kernel_out if out else kernel_list if schema.endswith("[]") else kernel


def _repeated(
    kernel: Callable[..., Any], find: Callable[[], Callable[..., Any]], schema: str, out: Sequence[str]
) -> Callable[..., Any]:
    """The kernel, after an attempt by the attribute ``repeat`` of the op's lowering, if it has one.

    ``repeat(args, kwargs, results)`` serves a call whose checks depend on nothing that differs from an earlier call:
    it returns what the op returns, or None if the kernel must check the call. ``results``: those of an ``.out``
    overload, which are not in kwargs.
    """
    is_list, returns = schema.endswith("[]"), not (out or schema.endswith("()"))
    repeat: Callable[..., Any]

    def at_first(*args: Any) -> Any:
        nonlocal repeat
        repeat = getattr(find(), "repeat", None) or (lambda *args: None)
        return repeat(*args)

    repeat = at_first

    def kernel_repeated(*args: Any, **kwargs: Any) -> Any:
        results = tuple([kwargs.pop(name) for name in out]) if out else ()
        done = repeat(args, kwargs, results)
        if done is None:
            kwargs.update(zip(out, results, strict=True))
            return kernel(*args, **kwargs)
        return ([done] if is_list else done) if returns else None

    return kernel_repeated


def _disjoint(kernel: Callable[..., Any], run: Any, in_place: bool, traced: bool = False) -> Callable[..., Any]:
    """The kernel of an op that writes, after a check by :func:`paged_ops.checks.disjoint`."""
    names = [each.name for each in run._schema.arguments]
    written = {each.name for each in run._schema.arguments if each.alias_info is not None and each.alias_info.is_write}

    def kernel_disjoint(*args: Any, **kwargs: Any) -> Any:
        arguments = itertools.chain(zip(names, args, strict=False), kwargs.items())
        checks.disjoint(arguments, written, in_place=in_place, traced=traced)
        return kernel(*args, **kwargs)

    return kernel_disjoint


def _resolve(name: str, overload: str, written: Sequence[str]) -> Callable[..., Any]:
    """The kernel for lazily negated or conjugated arguments, whose memory does not hold their values."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        run = getattr(getattr(torch.ops.paged_ops, name), overload)

        def resolved(argument: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [resolved(f"{argument}[{n}]", each) for n, each in enumerate(value)]
            if not isinstance(value, Tensor) or not (value.is_neg() or value.is_conj()):
                return value
            reads = argument.partition("[")[0] not in written
            checks.expect(reads, argument, "a tensor that can be written", "a negated or conjugated view: resolve it")
            return value.resolve_neg().resolve_conj()

        names = (each.name for each in run._schema.arguments)
        args = tuple(resolved(argument, value) for argument, value in zip(names, args, strict=False))
        return run(*args, **{argument: resolved(argument, value) for argument, value in kwargs.items()})

    return kernel


def _counted(fake: Callable[..., Any], run: torch._ops.OpOverload, written: Sequence[str]) -> Callable[..., Any]:
    """The fake, which also increments the versions of written tensors: torch 2.9 finds writes in branches and loops by
    these versions."""

    def kernel(*args: Any, **kwargs: Any) -> None:
        fake(*args, **kwargs)
        named = kwargs | {each.name: value for each, value in zip(run._schema.arguments, args, strict=False)}
        for tensor in pytree.tree_leaves([named.get(argument) for argument in written]):
            if isinstance(tensor, Tensor) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    return kernel


def _install_twins(name: str) -> None:
    """XLA has no in-place writes: the op's functional twin returns the tensors that the op writes."""
    importlib.import_module(LOWERINGS["XLA"]).install_twins(LIBRARY, name)


def _fake(name: str) -> Callable[..., Any]:
    from paged_ops import fake

    return getattr(fake, name)


def _out_schema(schema: str, names: Sequence[str]) -> str:
    arguments = re.fullmatch(r"\((.*)\) -> .*", schema)
    assert arguments is not None, schema
    star = "" if "*" in arguments[1] else ", *"
    results = ", ".join(f"Tensor(out{i}!) {name}" for i, name in enumerate(names))
    return f"({arguments[1]}{star}, {results}) -> ()"


@functools.cache
def module_of(key: str) -> ModuleType | str:
    """The module of lowerings for a dispatch key, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(LOWERINGS[key])
    except ImportError as error:
        return str(error)


def _refuse_grad(name: str, arguments: Iterable[tuple[str, Any]]) -> None:
    for argument, value in arguments:
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise RuntimeError(
                    f"paged_ops.{name} has no backward, but {argument} of shape {list(value.shape)} requires grad: "
                    "call it under torch.no_grad(), or detach the tensor"
                )
        elif isinstance(value, (list, tuple)):
            _refuse_grad(name, [(argument, each) for each in value])


def _transforming() -> bool:
    """Whether dual numbers or transforms of torch.func are in use. Dynamo can trace this function."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _refuse_transforms(name: str, mutates: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a result would need a derivative, or if vmap would have to split a tensor that the op writes."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    batched = any(functorch.is_batchedtensor(each) for each in tensors)
    if batched and mutates:
        raise RuntimeError(
            f"paged_ops.{name} writes {' and '.join(mutates)}, which torch.vmap cannot split: call it once for all rows"
        )
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot inspect the tensors
        differentiated = not batched
    else:
        differentiated = any(_differentiated(each) for each in tensors)
    if differentiated:
        raise RuntimeError(
            f"paged_ops.{name} has no derivatives, but an argument is differentiated (by torch.func.grad, jvp or "
            "jacfwd, or dual numbers): detach it"
        )


def _differentiated(tensor: Tensor) -> bool:
    if not functorch.is_batchedtensor(tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
        return True
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return functorch.is_functorch_wrapped_tensor(tensor) and _differentiated(functorch.get_unwrapped(tensor))
