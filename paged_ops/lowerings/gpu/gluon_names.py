"""Gluon's functions under one name each, for every Triton that ``Target.has_hopper_gluon`` allows.

Gluon is experimental: Triton renames its functions without notice. Add here what a newer Triton renames, and then raise
``NEWEST_KNOWN`` of target.py.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from paged_ops.lowerings.gpu.target import TRITON

if TRITON >= (3, 7):  # torch 2.13
    barrier = gl.barrier
else:
    barrier = gl.thread_barrier

if TRITON >= (3, 8):  # torch 2.14
    load_async = async_copy.async_load
    load_box = tma.async_load
else:
    load_async = async_copy.async_copy_global_to_shared
    load_box = tma.async_copy_global_to_shared

if TRITON >= (3, 9):  # torch 2.15
    reinterpret = gl.shared_memory_descriptor.reinterpret
else:
    reinterpret = gl.shared_memory_descriptor._reinterpret
