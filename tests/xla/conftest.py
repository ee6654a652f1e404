"""Tests of the XLA lowering: `make test-xla` runs them in an environment of their own, on XLA's CPU device.

The variables are read when torch_xla, jax and libtpu are loaded, so they are set before: jax stays on the CPU, and
libtpu, which only compiles here, does not look for the machine that it would run on.
"""

import importlib.util
import os

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_xla_*.py", "test_tpu.py"]
else:
    if os.environ.setdefault("PJRT_DEVICE", "CPU") == "CPU":
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "TPU_LOG_DIR": "disabled",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    import torch_xla  # noqa: F401 - before paged_ops, which then installs its functional twins
