"""Mutating ops on XLA: functional twins, and their registration.

XLA traces values. It would run an op that writes its arguments outside of the trace, or refuse it. So if torch_xla is
loaded, every mutating op gets

* a **twin**, the overload ``.functional``: the same arguments, but it returns new values of mutated ones;
* a kernel under the dispatcher's ``Functionalize`` key. In eager (lazy) mode and in every compiled graph it replaces
  the op by ``argument.copy_(twin(arguments))``, after marking the argument's buffer as donated. XLA then writes the
  result into that buffer, without a copy of the cache.

A ``Functionalize`` kernel serves all devices of a process. So if torch_xla is loaded, compiled graphs for other devices
use the twins too, but without donation: results are correct, but each step copies the cache.

Inside a kernel of the XLA key, functionalization is off: a view is rebuilt from its strides (a square tensor may come
out transposed), and a write to a view is lost. :func:`functionalized` turns it on, so that lowerings are ordinary torch
code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paged_ops import checks

# Devices that use twins: XLA, and the device of TorchTPU, torch_xla's announced successor.
VALUE_DEVICES = ("xla", "tpu")

_installed: set[str] = set()


def install(library: torch.library.Library, name: str, lowering: Callable[[str], Callable[..., Any]], key: str) -> None:
    """Register the twins of an op's mutating overloads, with ``lowering(name)`` under ``key``, and kernels that call
    them.

    A second call does nothing. ``lowering`` is called at the first call of an op.
    """
    packet = getattr(torch.ops.paged_ops, name)
    for overload in (getattr(packet, each) for each in packet.overloads()):
        qualified = overload._schema.name + "." + overload._schema.overload_name
        if not overload._schema.is_mutable or qualified in _installed:
            continue
        _installed.add(qualified)
        if overload is packet.default:
            library.define(f"{name}.functional{_twin_schema(overload)}")
            library.impl(f"{name}.functional", _twin(overload, lowering), key)
            library.impl(f"{name}.functional", _cloning_twin(overload), "CompositeExplicitAutograd")
            torch.library.register_fake(f"paged_ops::{name}.functional", _twin_fake(overload), lib=library)
        library.impl(overload.name().removeprefix("paged_ops::"), _functionalize(overload, lowering), "Functionalize")


def mutates(name: str) -> bool:
    """Whether an op writes its arguments."""
    return getattr(torch.ops.paged_ops, name).default._schema.is_mutable


def functionalized(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel of a device's key to run with functionalization on, so that views and writes work as usual.

    Writes to its arguments are lost; it returns results. If any argument is on a device, host tensors (the source of a
    swap, a block mapping) are passed unchanged.
    """

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKey.Functionalize
        args, kwargs = _map_tensors(_of_this_mode, (args, kwargs))
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded.remove(key)):
            args, kwargs = _map_tensors(torch._to_functional_tensor, (args, kwargs))
            return pytree.tree_map_only(Tensor, _value, kernel(*args, **kwargs))

    return run


def _map_tensors(function: Callable[[Tensor], Tensor], call: Any) -> Any:
    """Applies ``function`` to each tensor of a call, but to host tensors only if all tensors are on the host. A tensor
    that is passed twice is mapped once."""
    tensors = {id(each): each for each in pytree.tree_leaves(call) if isinstance(each, Tensor)}
    on_host = all(each.device.type == "cpu" for each in tensors.values())
    mapped = {n: function(each) if on_host or each.device.type != "cpu" else each for n, each in tensors.items()}
    return pytree.tree_map_only(Tensor, lambda each: mapped[id(each)], call)


def _of_this_mode(tensor: Tensor) -> Tensor:
    """A tensor of the current mode (inference mode or not): a functional tensor of the other mode has no views and
    cannot be written. To XLA a clone is the same value."""
    return tensor if tensor.is_inference() == torch.is_inference_mode_enabled() else tensor.clone()


def _value(tensor: Tensor) -> Tensor:
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def _mutated(overload: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _by_name(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The passed arguments of a call by name."""
    return {**dict(zip((a.name for a in overload._schema.arguments), args, strict=False)), **kwargs}


def _tensors(overload: torch._ops.OpOverload, arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call mutates, with lists flattened, in the order of the schema."""
    return [t for name in _mutated(overload) for t in pytree.tree_leaves(arguments.get(name)) if isinstance(t, Tensor)]


def _twin_schema(overload: torch._ops.OpOverload) -> str:
    """The op's schema without alias annotations, returning a list of tensors."""
    arguments, _, _ = str(overload._schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"\(\w+!\)", "", arguments)
    return f"({arguments}) -> Tensor[]"


def _twin(overload: torch._ops.OpOverload, lowering: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """Runs the op's lowering on functional copies of its arguments and returns their new values."""
    name = overload._schema.name.partition("::")[2]

    @functionalized
    def twin(*args: Any, **kwargs: Any) -> list[Tensor]:
        lowering(name)(*args, **kwargs)
        return _tensors(overload, _by_name(overload, args, kwargs))

    return twin


def _cloning_twin(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """The twin on other devices: runs the op on clones."""

    def twin(*args: Any, **kwargs: Any) -> list[Tensor]:
        arguments = _by_name(overload, args, kwargs)
        clones = {name: pytree.tree_map_only(Tensor, torch.clone, arguments.get(name)) for name in _mutated(overload)}
        overload(**{**arguments, **clones})
        return _tensors(overload, clones)

    return twin


def _twin_fake(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    from paged_ops import fake

    check = getattr(fake, overload._schema.name.partition("::")[2])

    def twin(*args: Any, **kwargs: Any) -> list[Tensor]:
        check(*args, **kwargs)
        return [torch.empty_like(t) for t in _tensors(overload, _by_name(overload, args, kwargs))]

    return twin


def _functionalize(
    overload: torch._ops.OpOverload, lowering: Callable[[str], Callable[..., Any]]
) -> Callable[..., Any]:
    """The kernel of the Functionalize key: copies the results of the twin (of the op, for .out) to arguments."""
    packet = getattr(torch.ops.paged_ops, overload._schema.name.partition("::")[2])

    def kernel(*args: Any, **kwargs: Any) -> None:
        arguments = _by_name(overload, args, kwargs)
        kinds = {t.device.type for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)}
        targets = _tensors(overload, arguments)
        # Values have no addresses: the only overlap that can be detected is one tensor passed twice.
        once = len({id(each) for each in targets}) == len(targets)
        checks.expect(once, " and ".join(_mutated(overload)), "a separate tensor for each argument", "one tensor twice")
        if overload is packet.default and kinds & set(VALUE_DEVICES) and "cpu" in {t.device.type for t in targets}:
            lowering(packet.__name__)(*args, **kwargs)  # swap_blocks to the host: eager, and never in a graph
            return
        if overload is packet.default:
            results = packet.functional(*args, **kwargs)
            for target in targets:
                donate(target)
        else:  # an .out overload
            outs = _mutated(overload)
            results = packet.default(*args, **{name: value for name, value in kwargs.items() if name not in outs})
        for target, result in zip(targets, pytree.tree_leaves(results), strict=True):
            target.copy_(result)

    return kernel


def donate(tensor: Tensor) -> None:
    """Let XLA reuse the buffer of a tensor (not a view) that is about to be overwritten.

    On other devices this does nothing: there the compiler would lose the write.
    """
    if tensor.device.type == "xla" and torch._is_functional_tensor_base(tensor) and tensor.is_contiguous():
        torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
