"""Rings: places in shared memory that one role of a kernel fills and others read, in turn.

The n-th filling uses place ``n % stages``. Each role counts fillings by itself; a ring has the barriers, and derives
phases from n. A role that fills waits until the place is empty, one that reads until it is full.

A ring is a NamedTuple with functions, which Triton 3.5 to 3.9 take. Gluon's ``@aggregate`` would allow methods, but its
fields cannot be None or tuples without a type of their own, and it reads annotations as types, which
``from __future__ import annotations`` makes strings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Ring(NamedTuple):
    """The barriers of a ring, one per place."""

    full: Any  # the place has its contents
    empty: Any  # the place may be filled again


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """``number`` barriers; each waits for ``arrivals``."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(number):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit
def ring_of(stages: gl.constexpr, fills: gl.constexpr, releases: gl.constexpr):
    """A ring whose places are full after ``fills`` arrivals, and empty after ``releases``."""
    return Ring(barriers(stages, fills), barriers(stages, releases))


@gluon.jit
def signal_of(stages: gl.constexpr):
    """A ring that is only filled: another ring's releases order its fillings."""
    full = barriers(stages, 1)
    return Ring(full, full)


@gluon.jit
def stage_of(ring, n):
    """The place of the n-th filling."""
    return n % ring.full.shape[0]


@gluon.jit
def full_of(ring, n):
    """The barrier at which the n-th filling arrives."""
    return ring.full.index(n % ring.full.shape[0])


@gluon.jit
def wait_full(ring, n):
    """Wait for the n-th filling."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(ring, n):
    """Wait until the place of the n-th filling may be filled."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def expect(ring, n, bytes):
    """Arrive once for the n-th filling, which is full when copies have also brought this many bytes."""
    mbarrier.expect(full_of(ring, n), bytes)


@gluon.jit
def fill(ring, n):
    """Arrive once for the n-th filling."""
    mbarrier.arrive(ring.full.index(n % ring.full.shape[0]), count=1)


@gluon.jit
def release(ring, n):
    """Arrive once to say that the n-th filling is no longer read."""
    mbarrier.arrive(ring.empty.index(n % ring.full.shape[0]), count=1)


@gluon.jit
def release_each(ring, n):
    """The same by every thread, so that no warp waits for another. What a thread read must be in its registers, or the
    matmul that read it must have been waited for."""
    async_copy.mbarrier_arrive(ring.empty.index(n % ring.full.shape[0]), increment_count=False)


@gluon.jit
def begin_kernel(PDL: gl.constexpr):
    """Make new barriers visible to all warps and to copies. PDL (programmatic dependent launch): this kernel was
    launched before the previous one had ended, so wait for that, and let the next one be launched."""
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
