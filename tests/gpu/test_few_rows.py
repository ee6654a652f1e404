"""Linear layers of one or two rows on a GPU: every part against float64, and what the previous kernel wrote."""

import itertools

import pytest
import torch

from paged_ops import reference
from tests.helpers.gpu import GPU

OP = torch.ops.paged_ops_models.few_row_linear.default
SIZES = ((6144, 4096), (4096, 14336), (128, 1024), (64, 5120), (128, 512))  # the last has no kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_every_part(dtype, rows, outputs, inputs):
    make = dict(device=GPU, dtype=dtype)
    weight, norm = torch.randn(outputs, inputs, **make) * inputs**-0.5, torch.randn(inputs, **make)
    x = torch.randn(2, rows, 2 * inputs, **make)[0, :, :inputs]
    for scale, adds, gated, constant in itertools.product((None, norm), *[(False, True)] * 3):
        residual = torch.randn(rows, outputs // 2 if gated else outputs, **make) if adds else None
        args = x, weight, scale, residual, 1e-5, gated
        got, want = OP(*args, constant), reference.few_row_linear(*args)
        within = (2 if rows <= 2 else 8) * torch.finfo(dtype).eps
        assert (got.double() - want.double()).norm() <= within * want.double().norm(), (args[2:], constant)
        assert torch.equal(got, OP(*args, constant))


def test_a_weight_that_was_just_written():
    weight, x = torch.zeros(28672, 4096, device=GPU, dtype=torch.bfloat16), torch.ones(1, 4096, device=GPU).bfloat16()
    for value in range(20):
        weight.fill_(value)
        assert OP(x, weight).eq(4096.0 * value).all()
