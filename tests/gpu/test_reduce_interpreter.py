"""The all-reduce kernel in Triton's interpreter: ranks are processes, and their memory is shared, so they truly wait.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_reduce_interpreter.py``. Sizes are small; rows change from
call to call, so that places are at different turns.
"""

import multiprocessing
import os
import time
import traceback

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops.lowerings.collectives import rms_norm
from paged_ops.lowerings.gpu import fused_allreduce

pytestmark = pytest.mark.interpreter

C, R, SECONDS = 24, 6, 60
ROWS = 5, 1, 6, 3, 4  # of each call
KINDS = {
    "sum": dict(),
    "llama": dict(eps=1e-5, rounds_first=True),
    "gemma": dict(eps=1e-6, weight_offset=1.0),
    "gemma2": dict(eps=1e-6, weight_offset=1.0, inner_eps=1e-4),  # what is added is normed, by the reversed weight
}


def inputs(call, dtype):
    """All ranks' parts, the residual and the weight of a call."""
    generator = torch.Generator().manual_seed(call)
    parts = torch.randn(4, ROWS[call], C, generator=generator, dtype=torch.float32).to(dtype)
    parts[1, 0, 3] = float("nan")
    parts[0, 0, 5:7].view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[:] = -1  # the sentinel, as data
    residual, weight = (torch.randn(n, C, generator=generator, dtype=torch.float32).to(dtype) for n in (ROWS[call], 1))
    return parts, residual, weight[0]


def run(rank, places, dtype, kind, two_shot, pipe):
    try:
        norms, results = kind != "sum", []
        for call, rows in enumerate(ROWS):
            parts, residual, weight = inputs(call, dtype)
            summed, normed = torch.empty(2, rows, C, dtype=dtype)
            inner = {"inner_weight": weight.flip(0).contiguous()} if "inner_eps" in KINDS[kind] else {}
            time.sleep(0.02 * ((rank + call) % 2))  # now one is late, now another
            fused_allreduce.reduce_rows(
                parts[rank],
                residual if norms else None,
                weight if norms else None,
                summed,
                normed if norms else None,
                places,
                two_shot=two_shot,
                **KINDS[kind],
                **inner,
            )
            wide = torch.empty(rows, len(places.by_rank) * C, dtype=dtype)
            fused_allreduce.gather_columns(parts[rank], wide, places)  # the same places, at other turns
            results.append((summed.tolist(), normed.tolist() if norms else None, wide.tolist()))
        pipe.send(results)
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize(
    ("W", "dtype", "kind", "two_shot"),
    [
        (2, torch.float16, "llama", False),
        (2, torch.float32, "gemma", True),
        (2, torch.float32, "gemma2", False),
        (4, torch.float16, "sum", True),
        (4, torch.float32, "llama", False),
    ],
)
def test_ranks_sum_what_they_send_each_other(W, dtype, kind, two_shot):
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    by_rank = tuple(torch.full((2, R, W, C), -1, dtype=integers).share_memory_() for _ in range(W))
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(W):
        places = fused_allreduce.Places(by_rank, *torch.zeros(2, R, dtype=torch.int32), rank)
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(rank, places, dtype, kind, two_shot, theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    try:
        until, told = time.monotonic() + SECONDS, []
        for pipe in pipes:
            assert pipe.poll(max(0, until - time.monotonic())), "a rank waits for ever"
            told.append(pipe.recv())
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    for call in range(len(ROWS)):
        parts, residual, weight = inputs(call, dtype)
        total = parts[0].float()
        for part in parts[1:W]:
            total = total + part.float()
        summed = total.to(dtype)
        norm = dict(KINDS[kind])
        inner_eps = norm.pop("inner_eps", None)
        want = [summed, None]
        if inner_eps is not None:
            summed = rms_norm(summed, weight.flip(0), **norm | {"eps": inner_eps})
        if kind != "sum":
            summed = residual + summed
            want = [summed, rms_norm(summed, weight, **norm)]
        assert summed.isnan().sum() == (3 if inner_eps is None else C)  # of a row
        for rank in range(W):
            assert not isinstance(told[rank], str), told[rank]
            got = [None if each is None else torch.tensor(each, dtype=dtype) for each in told[rank][call]]
            assert torch.equal(got[2].nan_to_num(7), torch.cat(list(parts[:W]), -1).nan_to_num(7))
            error = dict(rtol=0, atol=0) if inner_eps is None else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[0], want[0], **error, equal_nan=True)
            if want[1] is not None:
                torch.testing.assert_close(
                    got[1], want[1], rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5, equal_nan=True
                )
    assert all((each == -1).all() for each in by_rank), "the sentinel is back everywhere"


def test_an_abort_ends_the_wait():
    by_rank = tuple(torch.full((2, R, 2, C), -1, dtype=torch.int32) for _ in range(2))
    places = fused_allreduce.Places(by_rank, torch.zeros(R, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 0)
    x = torch.ones(2, C)
    fused_allreduce.reduce_rows(x, None, None, torch.empty_like(x), None, places)
    assert (by_rank[1][0, :2, 0].view(torch.float32) == 1).all()
