"""Mutating ops on a device whose compiler only has values: functional twins, and the registration that uses them.

XLA traces values. An op that writes its arguments would run outside of the trace, or be refused by it, so where
torch_xla is loaded every mutating op gets

* a **twin**, the overload ``.functional``: the same arguments, but it returns the new values of what the op mutates;
* a kernel under the dispatcher's ``Functionalize`` key, which in eager (lazy) mode and in every compiled graph puts
  ``argument.copy_(twin(arguments))`` in the op's place and first marks the argument's buffer as donated. XLA then
  writes the result into that buffer: no copy of the cache.

A ``Functionalize`` kernel serves all devices of a process. So in a process that has loaded torch_xla, compiled graphs
for other devices work in the same way, but without donation: their results are right, but each step copies the cache.

:func:`functionalized` is the third piece: inside a kernel of the XLA key functionalization is off, where a view is
rebuilt from its strides (of a square tensor even transposed) and a write into a view is lost. It turns it on, so that
lowerings are ordinary torch code.
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

# Devices whose compilers need values: XLA's, and that of the experimental successor of torch_xla for TPUs.
VALUE_DEVICES = ("xla", "tpu")

_installed: set[str] = set()


def install(library: torch.library.Library, name: str, lowering: Callable[[str], Callable[..., Any]], key: str) -> None:
    """Register the twins of one op's mutating overloads, with ``lowering(name)`` under ``key``, and the kernels that
    call them.

    A second call changes nothing. ``lowering`` is called at the first call of an op.
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
    """A kernel for a device's own key that runs with functionalization on, so that views and writes work as usual.

    Writes into its arguments are lost; it returns results. If there are tensors on a device, those on the host (the
    source of a swap, a block mapping) are passed as they are.
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
    """A call's arguments with ``function`` of each tensor; of tensors on the host only if there are no others. A tensor
    that is two arguments still is one."""
    tensors = {id(each): each for each in pytree.tree_leaves(call) if isinstance(each, Tensor)}
    on_host = all(each.device.type == "cpu" for each in tensors.values())
    mapped = {n: function(each) if on_host or each.device.type != "cpu" else each for n, each in tensors.items()}
    return pytree.tree_map_only(Tensor, lambda each: mapped[id(each)], call)


def _of_this_mode(tensor: Tensor) -> Tensor:
    """A tensor of the current mode, inference mode or not. The functional form of any other has no views and cannot be
    written. A clone is the same value to XLA."""
    return tensor if tensor.is_inference() == torch.is_inference_mode_enabled() else tensor.clone()


def _value(tensor: Tensor) -> Tensor:
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def _mutated(overload: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _by_name(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, without those left at their defaults."""
    return {**dict(zip((a.name for a in overload._schema.arguments), args, strict=False)), **kwargs}


def _tensors(overload: torch._ops.OpOverload, arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call mutates, with lists flattened, in the order of the schema."""
    return [t for name in _mutated(overload) for t in pytree.tree_leaves(arguments.get(name)) if isinstance(t, Tensor)]


def _twin_schema(overload: torch._ops.OpOverload) -> str:
    """The schema without its alias annotations, and lists of tensors as the result."""
    arguments, _, _ = str(overload._schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"\(\w+!\)", "", arguments)
    return f"({arguments}) -> Tensor[]"


def _twin(overload: torch._ops.OpOverload, lowering: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """The op's lowering, run on functional stand-ins of its arguments, whose new values are the result."""
    name = overload._schema.name.partition("::")[2]

    @functionalized
    def twin(*args: Any, **kwargs: Any) -> list[Tensor]:
        lowering(name)(*args, **kwargs)
        return _tensors(overload, _by_name(overload, args, kwargs))

    return twin


def _cloning_twin(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """The twin on other devices: the op itself, on clones."""

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
    """The kernel of the Functionalize key: new values by the twin (of an .out overload: by the op), copied over."""
    packet = getattr(torch.ops.paged_ops, overload._schema.name.partition("::")[2])

    def kernel(*args: Any, **kwargs: Any) -> None:
        arguments = _by_name(overload, args, kwargs)
        kinds = {t.device.type for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)}
        targets = _tensors(overload, arguments)
        # Values have no addresses: that the same tensor is written twice is all that can be seen of shared memory.
        once = len({id(each) for each in targets}) == len(targets)
        checks.expect(once, " and ".join(_mutated(overload)), "memory of its own for each tensor", "one tensor twice")
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
    """Let XLA reuse the buffer of a tensor that is about to be overwritten. It must be a whole tensor, not a view.

    On other devices the mark would make the compiler lose the write.
    """
    if tensor.device.type == "xla" and torch._is_functional_tensor_base(tensor) and tensor.is_contiguous():
        torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
