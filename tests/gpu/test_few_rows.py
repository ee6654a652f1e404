"""Linear layers of one or two rows on a GPU: every part against float64, and what the previous kernel wrote."""

import pytest
import torch

from paged_ops import reference
from tests.helpers.gpu import GPU

OP = torch.ops.paged_ops_models.few_row_linear.default
SIZES = (  # outputs, inputs and dtype; the last has no kernel
    (6144, 4096, torch.bfloat16), (4096, 14336, torch.bfloat16), (64, 5120, torch.float16), (128, 512, torch.bfloat16)
)  # fmt: skip
# Whether there is a norm, a residual and a gate, and whether the weight is constant.
PARTS = ((False, False, False, True), (True, False, True, True), (False, True, False, True), (True, True, True, False))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs", "dtype"), SIZES)
def test_every_part(dtype, rows, outputs, inputs):
    make = dict(device=GPU, dtype=dtype)
    weight, norm = torch.randn(outputs, inputs, **make) * inputs**-0.5, torch.randn(inputs, **make)
    x = torch.randn(2, rows, 2 * inputs, **make)[0, :, :inputs]
    for norms, adds, gated, constant in PARTS:
        residual = torch.randn(rows, outputs // 2 if gated else outputs, **make) if adds else None
        args = x, weight, norm if norms else None, residual, 1e-5, gated
        got, want = OP(*args, constant), reference.few_row_linear(*args)
        within = (2 if rows <= 2 else 8) * torch.finfo(dtype).eps
        assert (got.double() - want.double()).norm() <= within * want.double().norm(), (norms, adds, gated, constant)
        assert torch.equal(got, OP(*args, constant))


def test_a_weight_that_was_just_written():
    weight, x = torch.zeros(28672, 4096, device=GPU, dtype=torch.bfloat16), torch.ones(1, 4096, device=GPU).bfloat16()
    for value in range(20):
        weight.fill_(value)
        assert OP(x, weight).eq(4096.0 * value).all()
