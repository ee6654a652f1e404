"""few_row_linear by torch's ops, as on the CPU and wherever there is no kernel."""

import pytest
import torch

from paged_ops import reference

OP = torch.ops.paged_ops_models.few_row_linear.default


def case(dtype, norm, adds, gated):
    generator = torch.Generator().manual_seed(0)
    x, weight, scale, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 64), (48, 64), (64,), (2, 3, 48))
    )
    return x, weight, scale if norm else None, residual[..., : 24 if gated else 48] if adds else None, 1e-5, gated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parts", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)], ids=str)
def test_parts(dtype, parts):
    args = case(dtype, *map(bool, parts))
    want = reference.few_row_linear(*args)
    got = OP(*args)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want.double()).norm() <= 4 * torch.finfo(dtype).eps * want.double().norm()
    torch.library.opcheck(OP, args)


@pytest.mark.parametrize("name", ["norm", "residual", "weight"])
def test_errors_name_the_argument(name):
    x, weight, norm, residual, eps, gated = case(torch.float32, True, True, True)
    if name == "norm":
        norm = norm[1:]
    elif name == "residual":
        residual = residual.double()
    else:
        weight = weight[1:]
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        OP(x, weight, norm, residual, eps, gated)
