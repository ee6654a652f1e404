"""How split_kernel and the Hopper kernel divide a batch, in Triton's interpreter: a stand-in serves the latter's share.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_hopper_interpreter.py``, as in test_gpu_interpreter.py.
"""

import os
from types import ModuleType

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from paged_ops import testing
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import spec as specs
from paged_ops.lowerings.gpu import target
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import choose, tuning
from paged_ops.lowerings.gpu.attention.shared.tile import Batch
from paged_ops.lowerings.gpu.attention.shared.work_split import locate, sequence, shares, unit_after
from paged_ops.lowerings.gpu.attention.triton import decode
from paged_ops.lowerings.gpu.launch import Launch

pytestmark = pytest.mark.interpreter


class OnHopper(target.Target):
    """The interpreter, with the kernel that it cannot run: a stand-in serves."""

    has_hopper_gluon = True


@pytest.mark.parametrize("name", ["mixed-fp32", "holes-fp32"])
@pytest.mark.parametrize("short", [-1, 0, 20, 1 << 20])
def test_every_sequence_has_one_kernel(name, short, monkeypatch):
    """Long ones and those of at most ``short`` keys are hopper.py's, and nobody else writes their rows."""
    served = []

    def prefill(tensors, scale, split_m):
        out, lse, query, key, value = tensors.out, tensors.lse, tensors.query, tensors.key_cache, tensors.value_cache
        block_tables, seq_lens, query_start_loc = tensors.block_tables, tensors.seq_lens, tensors.query_start_loc
        assert not tensors.taken.any()  # by split_kernel
        tensors.taken.fill_(7)
        group = query.shape[1] // key.shape[2]
        for s, n in enumerate(seq_lens.tolist()):
            start, end = query_start_loc[s : s + 2].tolist()
            if not end > start or not ((end - start) * group > split_m or n <= short):
                continue
            served.append(s)
            assert out[start:end].isnan().all()
            table = block_tables[s, : -(-n // value.shape[1])].long()
            k, v = (each[table].flatten(0, 1)[:n].double() for each in (key.flatten(3), value))
            scores = torch.einsum("thd,nhd->htn", query[start:end].double(), k.repeat_interleave(group, 1)) * scale
            i, j = torch.arange(n - (end - start), n)[:, None], torch.arange(n)
            scores = scores.masked_fill(j > i, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[start:end] = torch.einsum("htn,nhd->thd", weights, v.repeat_interleave(group, 1)).to(out.dtype)
            if lse is not None:
                lse[start:end] = scores.logsumexp(-1).T.float()

    def call(query, *args, **kwargs):
        nan = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
        return gpu.paged_attention_with_lse(query, *args, **kwargs, out=nan)

    def plan(spec, target, shapes):
        assert spec.masks.causal
        tiles = tuning.tiles_of(spec, target, shapes.T, shapes.S)
        if tiles.all_split and short < 0:
            return "no longer sequences"
        return tiles, tuning.division(tiles.split.block_m, shapes.S, short)

    def build(choice, spec, target, shapes):
        tiles, division = choice

        class StandIn(Launch):
            def more(self, addresses):
                return None

            def __call__(self, tensors, numbers, addresses):
                prefill(tensors, numbers.scale, division.rows)

        return decode.build_around((StandIn(None, (1, 1, 1)),), spec, target, tiles, division, counted=True)

    hopper = ModuleType("hopper")
    vars(hopper).update(serves=lambda *_: [], plan=plan, build=build)
    here = torch.device("cpu")
    monkeypatch.setattr(attention, "target_of", lambda _: OnHopper(here, target.DEFAULT, "interpreter", 0, 0, 0))
    monkeypatch.setattr(choose, "hopper_kernels", lambda: (hopper,))
    attention.forget()
    try:
        case = testing.case_named("paged_attention_with_lse", name)
        testing.check("paged_attention_with_lse", case, "cpu", call)
    finally:
        attention.forget()
    assert served


@triton.jit
def tiles_kernel(
    tensors, numbers, located, walked, P, SPEC: tl.constexpr, DIVISION: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """For every key tile of all shares its program, sequence, unit and number, by locate and by a walk of the share."""
    batch = Batch(tensors, numbers, None, tl.arange(0, DIVISION.at_once))
    TOKENS: tl.constexpr = TILE.M // SPEC.G
    for p in range(P):
        start, end, _, _ = shares(p, P, batch, SPEC, DIVISION, TILE)
        s, unit, tile = locate(start, batch, SPEC, DIVISION, TILE)
        kh, first_token = unit % SPEC.K, unit // SPEC.K * TOKENS
        for position in range(start, end):
            s_, unit_, tile_ = locate(position, batch, SPEC, DIVISION, TILE)
            _, q_len, _, first_tile, end_tile = sequence(s, batch, SPEC, DIVISION, TILE.N)
            tl.store(located + position * 4, p)
            tl.store(located + position * 4 + 1, s_)
            tl.store(located + position * 4 + 2, unit_)
            tl.store(located + position * 4 + 3, tile_)
            tl.store(walked + position * 4, p)
            tl.store(walked + position * 4 + 1, s)
            tl.store(walked + position * 4 + 2, first_token // TOKENS * SPEC.K + kh)
            tl.store(walked + position * 4 + 3, tile)
            tile += 1
            if tile == end_tile - first_tile:
                tile = 0
                s, kh, first_token = unit_after(s, kh, first_token, q_len, numbers.S, SPEC, DIVISION, TOKENS)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("lengths", ["ragged", "long", "equal, parts", "equal, whole"])
def test_tiles_of_all_units_stand_in_one_row(apart, start, lengths):
    """Every tile once, in equal shares; with heads apart, those of a head side by side for all sequences. Units that
    are equally long stay whole if that makes shares little longer: 21 units by 11 programs, not by 5. Long sequences
    may have more rows than others. Each unit has ``start`` tiles more, for its beginning."""
    q_lens, seq_lens, K, P, N, M = [1, 0, 3, 1, 2], [100, 30, 65, 1, 640], 3, 7, 64, 2
    if "equal" in lengths:
        q_lens, seq_lens, K, P = [1, 2, 1], [128] * 3, 7, 11 if "whole" in lengths else 5
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32)
    if lengths == "long":
        q_lens = [n if n == 1 or keys > 65 else 0 for n, keys in zip(q_lens, seq_lens, strict=True)]
    units = [(-(-n // M) if n else 1) for n in q_lens]
    tiles = [start + (max(1, -(-n // N)) if q else 1) for q, n in zip(q_lens, seq_lens, strict=True)]
    if apart:
        wanted = [
            (s, unit * K + kh, tile) for kh in range(K) for s in range(len(q_lens)) for unit in range(units[s])
            for tile in range(tiles[s])
        ]  # fmt: skip
    else:
        heads = [K if n else 1 for n in q_lens]
        wanted = [
            (s, u, tile) for s in range(len(q_lens)) for u in range(units[s] * heads[s]) for tile in range(tiles[s])
        ]
    tensors = specs.Pointers(*[None] * len(specs.Pointers._fields))._replace(
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32), query_start_loc=starts
    )
    numbers = specs.Numbers(*[0] * len(specs.Numbers._fields))._replace(S=len(q_lens))
    side = specs.Side(64, 64, 1, 0, 0, 0, 0, 1, None)
    masks = specs.Masks(True, False, False, 0, False)
    logits, storage = specs.Logits(False, False, False), specs.Storage(torch.float32, 0, False)
    spec = specs.Spec(
        masks, logits, storage, torch.float32, torch.float32, False, K, 1, 16, side, side, (), 1, K, None
    )  # fmt: skip
    located, walked = (torch.full((len(wanted), 4), -1, dtype=torch.int32) for _ in range(2))
    division = specs.Division(M, True, -1, 8, 1, apart, aligned=1, start=start)
    if lengths == "long":
        division = division._replace(rows=1, everyone=False, long=65, long_rows=M)
    shape = specs.TileShape(M, N, 64, 64, 0, False)
    tiles_kernel[(1,)](tensors, numbers, located, walked, P, SPEC=spec, DIVISION=division, TILE=shape)
    assert located.tolist() == walked.tolist()
    assert [tuple(each[1:]) for each in located.tolist()] == wanted
    counts = torch.bincount(located[:, 0], minlength=P)
    assert located[:, 0].diff().min() >= 0
    if "whole" in lengths:
        assert counts.tolist() == [2 * tiles[0]] * 10 + tiles[:1]
    else:
        assert counts.max() - counts.min() <= 1
