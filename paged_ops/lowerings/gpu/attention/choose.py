"""Which kernel serves a call: the modules of kernels in order of preference.

A module's ``serves(spec, target)`` gives the reasons against it for a kind of call. Its ``plan(spec, target, shapes)``
makes a hashable choice for one batch, or gives the reason why the next kernel should serve it. Its ``build(choice,
spec, target, shapes)`` makes the launches of a choice; it takes T and S from the choice only, so that batches of equal
choices share them. A new kernel is one more module here.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from paged_ops.lowerings.gpu.attention.triton import decode, invariant, latent, prefill, selected
from paged_ops.lowerings.gpu.launch import Choice, Launch, Launches
from paged_ops.lowerings.gpu.spec import Shapes, Spec
from paged_ops.lowerings.gpu.target import Target
from paged_ops.support import Explanation


def kernels_of(target: Target) -> tuple[ModuleType, ...]:
    """The modules of all kernels of a target; those in Gluon are imported only where they can run."""
    return (*(hopper_kernels() if target.has_hopper_gluon else ()), latent, decode, prefill, invariant, selected)


@functools.cache
def hopper_kernels() -> tuple[ModuleType, ...]:
    from paged_ops.lowerings.gpu.attention.hopper import (
        dense,
        few,
        fp8,
        latent_few,
        latent_fp8,
        mixed,
        one_sequence,
        shares,
    )
    from paged_ops.lowerings.gpu.attention.hopper import invariant as invariant_hopper
    from paged_ops.lowerings.gpu.attention.hopper import latent as latent_hopper
    from paged_ops.lowerings.gpu.attention.hopper import latent_fp8_wide as wide
    from paged_ops.lowerings.gpu.attention.hopper import selected as selected_hopper

    latents = latent_few, latent_hopper, wide, latent_fp8
    return one_sequence, few, shares, mixed, dense, fp8, *latents, selected_hopper, invariant_hopper


def choose(kernels: tuple[ModuleType, ...], spec: Spec, target: Target, shapes: Shapes) -> tuple[ModuleType, Choice]:
    """The first of the kernels that takes a batch, and its choice."""
    for kernel in kernels:
        choice = kernel.plan(spec, target, shapes)
        if not isinstance(choice, str):
            return kernel, choice
    raise AssertionError("prefill.py, invariant.py or selected.py serves whatever unsupported() lets through")


def launches_of(kernel: ModuleType, spec: Spec, target: Target, shapes: Shapes) -> Launches | str:
    """What a kernel would launch for a batch, or its reason against it."""
    choice = kernel.plan(spec, target, shapes)
    return choice if isinstance(choice, str) else kernel.build(choice, spec, target, shapes)


def explain(op: str, spec: Spec, target: Target, shapes: Shapes) -> Explanation:
    """The kernel that serves a batch, its launches, and the reasons against the others."""
    chosen, launches, others = "", Launches((), (0, 0, 0)), []
    for kernel in kernels_of(target):
        name = kernel.__name__.partition("attention.")[2]
        reasons = kernel.serves(spec, target)
        choice = None if reasons else kernel.plan(spec, target, shapes)
        if isinstance(choice, str):
            reasons = [choice]
        elif not reasons and chosen:
            reasons = [f"serves this call too, but {chosen} comes first"]
        if reasons:
            others.append((name, tuple(dict.fromkeys(reasons))))
        else:
            chosen, launches = name, kernel.build(choice, spec, target, shapes)
    described = tuple(_described(each, shapes) for each in launches.launches)
    return Explanation(op, target.name, chosen, described, tuple(others))


def _described(launch: Launch, shapes: Shapes) -> str:
    """A launch in words: its kernel, grid, tile, and how Triton compiles it."""
    name, constants = launch.kernel
    tile: Any = constants.get("SHAPE") or constants["TILE"]
    options = ", ".join(f"{each} = {constants[each]}" for each in ("num_warps", "num_stages") if each in constants)
    grid = " x ".join(map(str, launch.grid(shapes.numbers)))
    return f"{name}: grid {grid}, tile of {tile.M} query rows x {tile.N} keys, {options}"
