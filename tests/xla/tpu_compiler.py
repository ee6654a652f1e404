"""Compiles what the XLA lowering traces for TPUs that are not here: libtpu's own compiler, its errors and its memory.

The graph is traced on XLA's CPU device with the lowering's TPU branch taken, and its HLO handed to a compile-only
client of a TPU topology.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import torch
import torch_xla
from jax._src.lib import xla_client
from jax.experimental import (
    pallas,  # noqa: F401 - before torch_xla.s kernels import its parts
    topologies,
)
from torch import Tensor
from torch_xla.experimental import custom_kernel
from torch_xla.experimental.pallas_kernels import ragged_paged_attention_v2

from paged_ops.lowerings.tpu import runtime


class Target(NamedTuple):
    """A TPU: the topology that libtpu knows, and what the ragged kernel's tables of block sizes ask of jax."""

    topology: str
    version: int
    device_name: str


TARGETS = {
    "v4": Target("v4:2x2x1", 4, "TPU v4"),
    "v5e": Target("v5e:2x2", 5, "TPU v5"),
    "v5p": Target("v5p:2x2x1", 5, "TPU v5"),
    "v6e": Target("v6e:2x2", 6, "TPU v6"),
}


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """The lowering takes its TPU branch, and Pallas kernels are lowered for a TPU of this kind."""

    def trace_pallas(kernel: Any, *args: Any, static_argnums: Any = None, static_argnames: Any = None, **kwargs: Any):
        shapes = [custom_kernel.to_jax_shape_dtype_struct(a) if torch.is_tensor(a) else a for a in args]
        jitted = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames)
        lowered = jitted.trace(*shapes, **kwargs).lower(lowering_platforms=("tpu",))
        return custom_kernel._extract_backend_config(lowered.compiler_ir()), [a for a in args if torch.is_tensor(a)]

    jax.clear_caches()  # block sizes are chosen while tracing, and jax would remember those of another TPU
    with contextlib.ExitStack() as patches:
        for where, name, value in (
            (runtime, "on_tpu", lambda: True),
            (custom_kernel, "trace_pallas", trace_pallas),
            (ragged_paged_attention_v2, "get_tpu_version", lambda: target.version),
            (ragged_paged_attention_v2, "get_device_name", lambda n=None: target.device_name),
        ):
            patches.enter_context(mock.patch.object(where, name, value))
        yield


def traced(outputs: Sequence[Tensor]) -> str:
    """The pending computation of XLA tensors as an MLIR module."""
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(list(outputs))
    module = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    return module if isinstance(module, str) else module.decode()


def donating(module: str, shape: Sequence[int]) -> str:
    """The module with its parameters of this shape donated, in their order, to the first results: the caches."""
    main = next(line for line in module.splitlines() if "func.func @main" in line)
    arguments, arrow, results = main.partition("->")
    dims = "x".join(map(str, shape))
    count = iter(range(len(arguments)))
    arguments = re.sub(
        rf"(tensor<{dims}x\w+>)", lambda found: f"{found[1]} {{tf.aliasing_output = {next(count)} : i32}}", arguments
    )
    return module.replace(main, arguments + arrow + results)


def compile_for(target: Target, module: str) -> Any:
    """The executable (``get_compiled_memory_stats()``, ``hlo_modules()``) of a module, for one chip."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]], dtype=np.int32))
    return device.client.compile(module.encode(), xla_client._xla.DeviceList((device,)), options)
