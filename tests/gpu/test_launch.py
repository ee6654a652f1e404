"""Kernels launched past Triton's look-up: the right one for each alignment, device, stream and profiler."""

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton")

import triton
import triton.language as tl

from paged_ops.lowerings.gpu.launch import Launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@triton.jit(do_not_specialize=["n"])
def add_kernel(tensors, n, scale, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    x, y, out = tensors
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + i, mask=i < n) * scale + SHIFT
    if y is not None:
        total += tl.load(y + i, mask=i < n)
    tl.store(out + i, total, mask=i < n)


def launcher(shift=3, device=GPU):
    return Launcher(add_kernel, {"SHIFT": shift, "SIZE": 1024, "num_warps": 4}, torch.device(device))


def call(launch, x, y, out, n, scale):
    launch((triton.cdiv(n, 1024), 1, 1), (x, y, out), (n, scale))


@pytest.fixture
def triton_launches(monkeypatch):
    """What Triton's own look-up is asked for."""
    run, seen = triton.JITFunction.run, []

    def counted(self, *args, **kwargs):
        seen.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", counted)
    return seen


def test_addresses_numbers_and_grid_vary(triton_launches):
    launch = launcher()
    for n in (1000, 1, 16, 5000, 123_457):
        x, y = torch.randn(2, 4 * n, device=GPU).unbind(0)
        out = torch.full((4 * n,), torch.nan, device=GPU)
        call(launch, x, y.clone(), out, n, n / 7)
        torch.testing.assert_close(out[:n], x[:n] * (n / 7) + 3 + y[:n])
        assert out[n:].isnan().all()
    assert len(triton_launches) == 1


def test_each_alignment_has_its_kernel(triton_launches):
    """An address that is no multiple of 16 bytes never meets a kernel compiled for those that are."""
    launch, memory = launcher(), torch.randn(3, 5000, device=GPU)
    for _ in range(2):
        for shifts in ((0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 3), (1, 1, 1), (4, 8, 12)):
            x, y, out = (row[shift : shift + 4096] for row, shift in zip(memory, shifts, strict=True))
            want = x * 2.5 + 3 + y
            call(launch, x, y, out, 4096, 2.5)
            torch.testing.assert_close(out, want)
    assert len(triton_launches) == 5  # the first and the last are of one kind


def test_absent_tensors(triton_launches):
    launch, x, out = launcher(7), torch.randn(512, device=GPU), torch.empty(512, device=GPU)
    for _ in range(3):
        out.fill_(torch.nan)
        call(launch, x, None, out, 512, 1.0)
        torch.testing.assert_close(out, x + 7)
    assert len(triton_launches) == 1


def test_on_the_current_stream():
    launch, x = launcher(), torch.ones(1 << 20, device=GPU)
    out, want = torch.zeros_like(x), torch.full_like(x, 11.0)
    call(launch, x, x, out, 10, 1.0)
    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        torch.cuda._sleep(50_000_000)
        x.fill_(4.0)
        call(launch, x, x, out, x.numel(), 1.0)  # waits for nothing but its own stream
        got = out.clone()
    torch.cuda.synchronize(GPU)
    assert torch.equal(got, want)


def test_profilers_see_every_launch():
    launch, x, names = launcher(), torch.ones(16, device=GPU), []
    call(launch, x, x, x, 16, 1.0)

    def hook(metadata):
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        call(launch, x, x, x, 16, 1.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    call(launch, x, x, x, 16, 1.0)
    assert names == ["add_kernel"]


def test_in_a_captured_graph():
    launch, x, out = launcher(), torch.ones(16, device=GPU), torch.zeros(16, device=GPU)
    call(launch, x, x, out, 16, 1.0)
    torch.cuda.synchronize(GPU)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        call(launch, x, x, out, 16, 1.0)
    x.fill_(2.0)
    graph.replay()
    assert (out == 7.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one(triton_launches):
    launch, x = launcher(device="cuda:1"), torch.randn(512, device="cuda:1")
    for current in (0, 1, 0, 1):
        with torch.cuda.device(current):
            out = torch.full_like(x, torch.nan)
            call(launch, x, x, out, 512, 1.0)
            torch.testing.assert_close(out, x + x + 3)
            assert torch.cuda.current_device() == current
    assert len(triton_launches) == 1
