"""Triton's interpreter without the work whose result it drops: two thirds of its time."""

import dataclasses
from types import SimpleNamespace

from triton import language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_NOTHING = SimpleNamespace(restore=lambda: None)


def _patch_once(function):
    """A launch replaces the functions of ``triton.language``; each jit function that is called would do so again."""
    modules = [each for each in function.__globals__.values() if each is tl or each is tl.core]
    done = all(each.static_print is print for each in modules) and not tl.core.is_builtin(tl.tensor.__add__)
    return _NOTHING if modules and done else _patch(function)


def quicken() -> None:
    """Make the interpreter of this process fast. It computes the same numbers."""
    interpreter._patch_lang = _patch_once
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # the limits of integers are computed, but only debug mode compares with them
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
