"""``merge_kernel`` in Triton's interpreter: the parts of units of equal length, which are cut into equal pieces.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_merge_interpreter.py``.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

from paged_ops.lowerings.gpu import spec as specs
from paged_ops.lowerings.gpu.attention.triton import merge

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=["parts in float32", "rounded parts"])
@pytest.mark.parametrize(("S", "K", "G", "pieces"), [(2, 2, 17, 1), (2, 2, 17, 3), (3, 1, 4, 2), (1, 1, 17, 66)])
def test_all_programs_of_equal_pieces_merge_them(monkeypatch, S, K, G, pieces, out_dtype):
    """S sequences of equal length with K groups of G heads; each unit has a program per piece. Where units are whole,
    one program waits for the kernel before, and nothing is merged. Rounded parts are summed in float32, too."""
    waits: list[None] = []
    monkeypatch.setattr(merge, "gdc_wait", lambda: waits.append(None))
    monkeypatch.setattr(merge, "gdc_launch_dependents", lambda: None)
    M, N, Dv, P = 32, 64, 512, S * K * pieces + pieces // 33
    units, tiles = S * K, 2 * pieces
    torch.manual_seed(0)
    out, lse = torch.full((S, K * G, Dv), math.nan, dtype=out_dtype), torch.full((S, K * G), math.nan)
    rounded = out_dtype != torch.float32
    to_lse, _, floats = merge.workspace(P, M, Dv, out_dtype.itemsize)
    workspace = torch.full((floats,), math.nan)
    parts = workspace[:to_lse].view(out_dtype).fill_(math.nan).view(P, 2, M, Dv)
    part_lse = workspace[to_lse : to_lse + P * 2 * M].view(P, 2, M)
    for unit in range(units * (pieces > 1)):
        for piece in range(pieces):
            program, place = unit * pieces + piece, int(piece == 0)
            parts[program, place, :G], part_lse[program, place, :G] = torch.randn(G, Dv), torch.randn(G)
    tensors = specs.Pointers(*[None] * len(specs.Pointers._fields))._replace(
        out=out, lse=lse, parts=workspace, part_lse=part_lse,
        seq_lens=torch.full((S,), N * tiles, dtype=torch.int32), query_start_loc=torch.arange(S + 1, dtype=torch.int32),
    )  # fmt: skip
    numbers = specs.Numbers(*[0] * len(specs.Numbers._fields))._replace(S=S, T=S)
    side = specs.Side(Dv, 1, 1, 0, 0, 0, 0, 1, None)
    masks, logits = specs.Masks(True, False, False, 0, False), specs.Logits(False, False, False)
    storage = specs.Storage(torch.float32, 0, False)
    spec = specs.Spec(
        masks, logits, storage, torch.float32, out_dtype, True, K, G, 16, side, side, (), 1, K * G, None
    )  # fmt: skip
    division = specs.Division(M, True, -1, 8, 1, aligned=1 << 20)
    tile = specs.TileShape(M, N, 0, Dv, 0, False, rounded=rounded)
    helpers = merge.HELPERS_OF_WIDE if G > merge.FEW_HEADS else merge.HELPERS_OF_FEW
    merge.merge_kernel[(P, helpers, 1)](tensors, *numbers, SPEC=spec, DIVISION=division, TILE=tile, PDL=True)
    assert len(waits) == (1 if pieces == 1 else units * pieces * helpers)
    if pieces == 1:
        assert out.isnan().all()
        return
    for unit in range(units):
        s, kh = divmod(unit, K)
        mine = slice(unit * pieces, unit * pieces + pieces)
        values, logs = (torch.stack([each[mine][0, 1], *each[mine][1:, 0]])[:, :G] for each in (parts, part_lse))
        weights = (logs.double() * math.log(2)).softmax(0)
        wanted, wanted_lse = (weights[..., None] * values.double()).sum(0), (logs.double() * math.log(2)).logsumexp(0)
        heads = slice(kh * G, kh * G + G)
        rtol = 2**-10 if rounded else 1e-5  # rounding to float16 changes a number by at most 2^-11
        torch.testing.assert_close(out[s, heads].double(), wanted, rtol=rtol, atol=1e-6)
        torch.testing.assert_close(lse[s, heads].double(), wanted_lse, rtol=1e-5, atol=1e-6)
