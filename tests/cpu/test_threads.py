"""Another thread writes the small tensors of a call while it runs: an error or finite numbers, never a crash."""

import subprocess
import sys

import pytest

PROGRAM = """if True:
    import sys
    import threading
    import torch
    import paged_ops
    from paged_ops.lowerings.cpu import fused, write

    torch.manual_seed(0)
    sys.setswitchinterval(1e-5)
    if {way!r} == "torch":
        fused.compiled = write.compiled = lambda: None
    S, n, B, K, D = 4, 512, 4, 1, 16
    blocks = n // B
    N = S * blocks
    cache = torch.randn(N, 2, B, K, D)
    query = torch.randn(S, 2, D)
    good = dict(
        tables=torch.randperm(N).view(S, blocks).int(),
        lens=torch.full((S,), n, dtype=torch.int32),
        starts=torch.arange(S + 1, dtype=torch.int32),
        slots=torch.arange(S),
        pairs=torch.tensor([[0, 1], [2, 3]]),
    )
    far = lambda like: torch.where(torch.rand(like.shape) < 0.5, 2**30, -(2**30)).to(like.dtype)
    bad = {{name: far(each) for name, each in good.items()}}
    shared = {{name: each.clone() for name, each in good.items()}}
    stop = threading.Event()

    def scribble():
        while not stop.is_set():
            for name in {written!r}:
                shared[name].copy_(bad[name])
            for name in {written!r}:
                shared[name].copy_(good[name])

    writer = threading.Thread(target=scribble)
    writer.start()
    done = refused = 0
    try:
        with torch.inference_mode():
            for call in range({calls}):
                try:
                    op = call % {ops}
                    if op == 0:
                        batch = shared["tables"], shared["lens"], shared["starts"]
                        assert paged_ops.paged_attention(query, cache, *batch, 0.25).isfinite().all()
                    elif op == 1:
                        key, _ = paged_ops.gather_kv(cache, shared["tables"], shared["lens"], S * n)
                        assert key.isfinite().all()
                    elif op == 2:
                        new = query[:, :1]
                        paged_ops.reshape_and_cache(new, new, cache, shared["slots"])
                    else:
                        paged_ops.copy_blocks([cache], shared["pairs"])
                    done += 1
                except ValueError:
                    refused += 1
    finally:
        stop.set()
        writer.join()
    print(done, refused)
"""


@pytest.mark.parametrize(
    ("way", "written", "ops", "calls"),
    [("fused", ("tables",), 1, 4000), ("fused", ("lens", "starts"), 1, 2000), ("torch", ("tables",), 1, 500),
     ("fused", ("tables", "lens", "starts", "slots", "pairs"), 4, 4000)],
    ids=["tables", "lengths", "torch", "all"],
)  # fmt: skip
def test_written_while_it_is_read(way, written, ops, calls):
    program = PROGRAM.format(way=way, written=written, ops=ops, calls=calls)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])
    done, refused = map(int, run.stdout.split())
    assert done > calls // 100, "hardly a call was let through"
    assert refused > calls // 100, "nothing was written in between"
