"""What only a TPU can show: its kernels' numbers and the example, on the device itself. Elsewhere reported as not run.

On a TPU VM: `PJRT_DEVICE=TPU python -m pytest tests/xla/test_tpu.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_xla.runtime

from paged_ops import testing

if torch_xla.runtime.device_type() != "TPU":
    pytest.skip("not run: needs a TPU", allow_module_level=True)
from tests.xla.cases import ATTENTION, WRITES

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(case):
    with torch.no_grad():
        testing.check("paged_attention", case, "xla")


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_write(case):
    with torch.no_grad():
        testing.check("reshape_and_cache", case, "xla")


def test_example():
    example = Path(__file__).parent.parent.parent / "examples/tpu_decode.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True)
    assert ran.stdout.count("the same as on the CPU: True") == 2
