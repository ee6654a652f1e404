"""Gluon's functions under one name each, for every Triton that :func:`has_hopper_gluon` lets in.

Gluon is experimental: Triton renames its functions without notice. What a newer one renames is added here, and then
``NEWEST_KNOWN`` of target.py.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from paged_ops.lowerings.gpu.target import TRITON

if TRITON >= (3, 8):  # torch 2.14
    load_rows = async_copy.async_load
    load_box = tma.async_load
else:
    load_rows = async_copy.async_copy_global_to_shared
    load_box = tma.async_copy_global_to_shared

if TRITON >= (3, 9):  # torch 2.15
    reinterpret = gl.shared_memory_descriptor.reinterpret
else:
    reinterpret = gl.shared_memory_descriptor._reinterpret
