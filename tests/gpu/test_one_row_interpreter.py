"""The kernel for one or two rows in Triton's interpreter: ``TRITON_INTERPRET=1 pytest -m interpreter`` on this file."""

import itertools
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops import reference
from paged_ops.lowerings.gpu import one_row

pytestmark = pytest.mark.interpreter

# The interpreter rounds to bfloat16 toward zero.
WITHIN = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize(("T", "C"), [(1, 1536), (2, 1024), (4, 512)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_every_part(dtype, T, C, ahead):
    O = 32
    x, weight, scale = torch.randn(T, C).to(dtype), (torch.randn(O, C) / C**0.5).to(dtype), torch.randn(C).to(dtype)
    for norm, adds, gated in itertools.product((None, scale), (False, True), (False, True)):
        out = torch.full((T, O // 2 if gated else O), float("nan"), dtype=dtype)
        residual = torch.randn_like(out, dtype=torch.float32).to(dtype) if adds else None
        packed = (None if each is None else each.view(torch.int32) for each in (x, weight, norm))
        sizes = dict(C=C, T=T, GATED=gated, ROWS=8, BC=512, AHEAD=ahead, EARLY=True, PDL=False)
        one_row.one_row_kernel[(O // 8,)](*packed, residual, out, out.shape[1], 1e-5, **sizes)
        want = reference.few_row_linear(x, weight, norm, residual, 1e-5, gated)
        assert (out.double() - want.double()).norm() <= WITHIN[dtype] * want.double().norm(), (norm, adds, gated)


def test_tiles_divide_their_weights():
    for T, O, C in itertools.product((1, 2, 3), (64, 4096, 128256), (512, 1024, 2048, 4096, 5120, 14336)):
        tile = one_row.tile_of(T, O, C)
        if tile is not None:
            assert O % tile["ROWS"] == C % tile["BC"] == 0
            assert tile["AHEAD"] * tile["BC"] <= C
    assert one_row.tile_of(1, 6144, 4096) and one_row.tile_of(1, 4096, 14336)
    assert one_row.tile_of(0, 64, 4096) is one_row.tile_of(one_row.MOST_ROWS + 1, 64, 4096) is None
