"""The kernels that merge ranks' parts of attention, in Triton's interpreter: ranks are processes, and their memory is
shared, so they truly wait.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_merge_ranks_interpreter.py``. Sizes are small; the tokens
change from call to call, so that places are at different turns.
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

from paged_ops.lowerings.gpu import merge_ranks
from paged_ops.parallel.exchange import merged

pytestmark = pytest.mark.interpreter

H, R, SECONDS = 3, 16, 60
TOKENS = 3, 1, 5, 2, 4  # of each call


def inputs(call, W, Dv, dtype, heads):
    """All ranks' parts, some of them of no keys, with NaN as output."""
    generator = torch.Generator().manual_seed(call)
    parts = torch.randn(W, TOKENS[call], heads, Dv, generator=generator, dtype=torch.float32).to(dtype)
    lses = torch.randn(W, TOKENS[call], heads, generator=generator, dtype=torch.float32) * 4
    lses[0, 0, 0], lses[:, 0, 1], lses[W - 1, 0, 2] = -torch.inf, -torch.inf, torch.inf
    parts[0, 0, 0], parts[:, 0, 1] = torch.nan, torch.nan
    return parts, lses


def truth_of(parts, lses):
    lses = torch.where(lses == torch.inf, -torch.inf, lses.double())
    total = torch.logsumexp(lses, 0)
    shares = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - total))[..., None]
    return (torch.where(shares == 0, 0.0, parts.double()) * shares).sum(0), total


def run(rank, places, W, Dv, dtype, heads, tile, pipe):
    try:
        results = []
        for call, tokens in enumerate(TOKENS):
            parts, lses = inputs(call, W, Dv, dtype, heads)
            out, lse = torch.full((tokens, H, Dv), torch.nan, dtype=dtype), torch.full((tokens, H), torch.nan)
            time.sleep(0.02 * ((rank + call) % 2))  # now one is late, now another
            merge_ranks.exchange(parts[rank], lses[rank], out, lse, places, rows=tile)
            results.append((out.tolist(), lse.tolist()))
        pipe.send(results)
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize(
    ("W", "dtype", "Dv", "is_scattered", "tile"),
    [(2, torch.float16, 8, False, 2), (2, torch.float32, 6, True, 1), (4, torch.float16, 8, True, 4)],
)
def test_ranks_merge_what_they_send_each_other(W, dtype, Dv, is_scattered, tile):
    heads = H * W if is_scattered else H
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    outs = tuple(torch.full((2, R, W, 8), -1, dtype=integers).share_memory_() for _ in range(W))
    lses = tuple(torch.full((2, R, W), -1, dtype=torch.int32).share_memory_() for _ in range(W))
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(W):
        places = merge_ranks.Places(outs, lses, *torch.zeros(2, R, dtype=torch.int32), rank)
        mine, theirs = context.Pipe()
        arguments = rank, places, W, Dv, dtype, heads, tile, theirs
        processes.append(context.Process(target=run, args=arguments, daemon=True))
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
    close = dict(atol=2e-3, rtol=2e-3) if dtype == torch.float16 else dict(atol=1e-5, rtol=1e-5)
    for call in range(len(TOKENS)):
        want, total = truth_of(*inputs(call, W, Dv, dtype, heads))
        for rank in range(W):
            assert not isinstance(told[rank], str), told[rank]
            own = slice(rank * H, rank * H + H) if is_scattered else slice(0, H)
            out, lse = (torch.tensor(each, dtype=torch.float64) for each in told[rank][call])
            torch.testing.assert_close(out, want[:, own], **close)
            torch.testing.assert_close(lse, total[:, own], atol=1e-5, rtol=1e-5)
            if not is_scattered:
                assert told[rank][call] == told[0][call], "the same bits on all ranks"
    assert all((each == -1).all() for each in (*outs, *lses)), "the sentinel is back everywhere"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parts_that_a_collective_has_brought(dtype):
    parts, lses = inputs(2, 3, 6, dtype, H)
    packed = torch.cat([parts.view(torch.uint8), lses[..., None].view(torch.uint8)], -1)
    out, lse = torch.empty(5, H, 6, dtype=dtype), torch.empty(5, H)
    merge_ranks.merge_gathered(packed, out, lse)
    want, total = merged(packed, dtype)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, total, atol=1e-5, rtol=1e-5)


def test_an_abort_ends_the_wait():
    outs = tuple(torch.full((2, R, 2, 8), -1, dtype=torch.int32) for _ in range(2))
    lses = tuple(torch.full((2, R, 2), -1, dtype=torch.int32) for _ in range(2))
    places = merge_ranks.Places(outs, lses, torch.zeros(R, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 0)
    part, lse = torch.ones(2, H, 8), torch.zeros(2, H)
    merge_ranks.exchange(part, lse, torch.empty_like(part), torch.empty_like(lse), places)
    assert (outs[1][0, : 2 * H, 0].view(torch.float32) == 1).all()
