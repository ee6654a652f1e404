"""The lowering's TPU branch on XLA's CPU device: its kernels run in Pallas' interpret mode."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from torch import Tensor
from torch_xla.core import xla_builder
from torch_xla.experimental.pallas_kernels import ragged_paged_attention_v2 as kernels

from paged_ops.lowerings.tpu import ragged, runtime, write


def ragged_paged_attention(*args: Tensor, **static: Any) -> Tensor:
    """torch_xla's kernel, embedded into the graph as what the interpreter makes of it."""
    interpreted = functools.partial(kernels.ragged_paged_attention.__wrapped__, **static)
    return xla_builder.call_jax(interpreted, args, override_hash=repr(sorted(static.items())))


def while_loop(condition: Any, body: Any, start: Any, loop: Any = lax.while_loop) -> Any:
    """The interpreter allows no reads of memory in a loop's condition: here it is computed at the end of the body."""

    def next_(state: Any) -> Any:
        new = body(state[1])
        return condition(new), new

    return loop(lambda state: state[0], next_, (condition(start), start))[1]


def store(ref: Any, idx: Any, val: Any, mask: Any) -> None:
    """The interpreter loses what part of an array a masked store is to."""
    ref[idx] = jnp.where(mask, val, ref[idx])


@contextlib.contextmanager
def pretending_a_tpu() -> Iterator[None]:
    jax.clear_caches()
    with contextlib.ExitStack() as patches:
        for where, name, value in (
            (runtime, "on_tpu", lambda: True),
            (ragged, "ragged_paged_attention", ragged_paged_attention),
            (write, "write_runs", functools.partial(write.write_runs, interpret=True)),
            (pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True)),
            (lax, "while_loop", while_loop),
            (pl, "store", store),
            (kernels, "get_tpu_version", lambda: 5),
            (kernels, "get_device_name", lambda n=None: "TPU v5"),
        ):
            patches.enter_context(mock.patch.object(where, name, value))
        yield
