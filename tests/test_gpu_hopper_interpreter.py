"""How split_kernel and the Hopper kernel divide a batch, in Triton's interpreter: a stand-in serves the latter's share.

``TRITON_INTERPRET=1 pytest -m interpreter tests/test_gpu_hopper_interpreter.py``, as in test_gpu_interpreter.py.
"""

import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops import testing
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import target
from paged_ops.lowerings.gpu.attention import decode, tuning
from paged_ops.lowerings.gpu.attention import plan as attention

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
        tile_plan = tuning.plan_of(spec, target, shapes.T, shapes.S)
        if tile_plan.all_split and short < 0:
            return None
        division = tuning.division(tile_plan.split.block_m, shapes.S, short)

        class StandIn:
            def at(self, addresses, numbers):
                return False

            def __call__(self, tensors, numbers, addresses):
                prefill(tensors, numbers.scale, division.rows)

        return decode.plan_around((StandIn(),), spec, target, shapes, division, counted=True)

    hopper = SimpleNamespace(serves=lambda *_: [], plan=plan)
    here = torch.device("cpu")
    monkeypatch.setattr(attention, "target_of", lambda _: OnHopper(here, target.DEFAULT, "interpreter", 0, 0, 0))
    monkeypatch.setattr(attention, "_hopper", lambda: (hopper,))
    attention.forget()
    try:
        case = testing.case_named("paged_attention_with_lse", name)
        testing.check("paged_attention_with_lse", case, "cpu", call)
    finally:
        attention.forget()
    assert served
