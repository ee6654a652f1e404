"""Kernels compiled before their first launch: what is noted, what the other process compiles, and what fails."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import paged_ops
from paged_ops.lowerings import gpu, warm_up
from paged_ops.lowerings.gpu import launch, precompile
from paged_ops.lowerings.gpu import merge as merge_states
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.triton import decode, merge
from paged_ops.lowerings.gpu.target import settled
from tests.gpu.step import H200, step

ROOT = Path(__file__).parents[2]

# Run as a process of its own, which believes in an sm_90. Prints what became of calls before and after warming up.
PROGRAM = """
import functools, json, os, sys
import torch
from tests.aot import compiler as aot
aot.install("cuda:90")
import paged_ops
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import precompile
from paged_ops.lowerings.warm_up import Ahead

precompile.can_precompile = lambda: True
kv_cache, key, query = aot.gpu(64, 2, 16, 8, 128), aot.gpu(7, 8, 128), aot.gpu(7, 32, 128)
tables, lens, starts = (aot.gpu(*shape, dtype=torch.int32) for shape in ((3, 64), (3,), (4,)))
write = functools.partial(gpu.reshape_and_cache, key, key, kv_cache, aot.gpu(7, dtype=torch.int64))
attend = functools.partial(gpu.paged_attention, query, kv_cache, tables, lens, starts, 0.1)
more = aot.gpu(16, 32, 128), kv_cache, *(aot.gpu(*s, dtype=torch.int32) for s in ((16, 64), (16,), (17,))), 0.1
folder = os.environ["TRITON_CACHE_DIR"]
ahead = Ahead([write, attend], sizes=[(16, 16)])
os.environ["TRITON_PTXAS_PATH"] = sys.argv[1]
precompile.wait_for(ahead._states, 150)
before = sorted(os.listdir(folder))
assert not aot.launched
report = ahead.finish()
loaded = [kernel.metadata.name for kernel in aot.launched]
again = paged_ops.warm_up([write, attend])
aot.launched.clear()
write(), attend(), gpu.paged_attention(*more)
print(json.dumps({
    "report": [report.kernels, report.compiled, report.errors], "again": [again.kernels, again.compiled],
    "jobs": sorted(job.name for job in precompile._compiler.states),
    "loaded": loaded,
    "launched": [kernel.metadata.name for kernel in aot.launched],
    "folders": len(before), "new": len(set(os.listdir(folder)) - set(before)),
}))
"""


@pytest.mark.aot
def test_first_launches_find_what_was_compiled(tmp_path):
    """Also if torch.compile has meanwhile chosen the ptxas of torch's wheel, of another version than Triton's."""
    ptxas = tmp_path / "ptxas"
    own = launch.triton.knobs.nvidia.ptxas.path
    ptxas.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo another one\nexec {own} "$@"\n')
    ptxas.chmod(0o755)
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", PROGRAM, str(ptxas)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"write_kernel", "split_kernel", "dense_kernel"} <= set(found["jobs"])
    assert sorted(found["loaded"]) == sorted(found["launched"]) == found["jobs"]
    assert found["report"] == [len(found["jobs"]), len(found["jobs"]), []]
    assert 0 < found["again"][0] < len(found["jobs"])
    assert found["again"][1] == 0
    assert found["folders"] >= len(found["jobs"])
    assert found["new"] == 0, "compiled again"


@pytest.fixture
def on_cuda(launched, monkeypatch):
    """Launches are noted as for an sm_90."""
    chip = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = SimpleNamespace(get_current_stream=lambda index: 0, get_current_target=lambda: chip)
    monkeypatch.setattr(launch.triton.runtime.driver, "_active", active)
    return launched


def call(T=100, S=9):
    write, attend = step(T, S)
    gpu.reshape_and_cache(*write)
    return gpu.paged_attention(*attend)


def test_noting_launches_nothing_and_gives_zeros(on_cuda):
    with precompile.noting([(16, 16), (40, 40)]) as jobs:
        out = call()
        assert not on_cuda
        assert out.shape == (100, 32, 128)
        assert not out.any()
        kinds = set(jobs)
        call(200, 19)  # the sizes were noted
        assert set(jobs) == kinds
        thread = threading.Thread(target=call)  # which notes nothing
        thread.start()
        thread.join()
        assert on_cuda
    with precompile.noting() as of_their_own:
        for sizes in ((100, 9), (16, 16), (40, 40)):
            call(*sizes)
    assert kinds == set(of_their_own)
    on_cuda.clear()
    assert {job.target for job in kinds} == {("cuda", 90, 32)}
    on_cuda.clear()
    call()
    assert {name for name, *_ in on_cuda} == {job.name for job in kinds} >= {"write_kernel", "dense_kernel"}


def test_merges_are_noted_like_attention(on_cuda, monkeypatch):
    monkeypatch.setattr(merge_states, "target_of", lambda device: H200)
    out, lse = torch.ones(3, 4, 8), torch.ones(3, 4)
    results = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    with precompile.noting() as jobs:
        gpu.merge_attention_states(out, lse, out, lse, out=results)
    merge_states._launcher.cache_clear()
    assert [job.name for job in jobs] == ["merge_states_kernel"]
    assert not on_cuda
    assert not any(each.any() for each in results)


def test_the_kernels_of_a_call_are_compiled_at_the_same_time(on_cuda, monkeypatch):
    submitted = []
    idle = SimpleNamespace(lives=True, submit=submitted.extend, states={})
    monkeypatch.setattr(precompile, "_compiler", idle)
    call()
    names = [name for name, *_ in on_cuda]
    [*kernels] = dict.fromkeys(submitted)
    assert [job.name for job in kernels] == names[2:]  # the write, and the first of attention, are not
    assert len(names) > 2
    assert precompile.notes() is None


def test_without_kernels_a_step_runs(on_cuda, monkeypatch):
    monkeypatch.setattr(warm_up, "prepare", lambda: True)
    with warm_up.without_kernels():
        assert not call().any()
    assert not on_cuda
    monkeypatch.setattr(warm_up, "prepare", lambda: False)
    with warm_up.without_kernels():
        call()
    assert on_cuda


@pytest.mark.parametrize(("tokens", "sequences", "most"), [(8192, 256, 33), (2048, 64, 19), (16, 16, 14)])
def test_the_kernels_of_all_batches_are_few(on_cuda, tokens, sequences, most):
    """What a loop of a model with one kind of layer may have to compile; docs/graphs.md tells the numbers."""
    batches = tuning.covering_batches(tokens, sequences, equal_lengths=False)
    with precompile.noting([(T, S) for T, S in batches if T >= S]) as jobs:
        call()
    assert 3 < len(set(jobs)) <= most


@pytest.mark.parametrize(
    ("masks", "stored"),
    [({}, torch.bfloat16), ({"sliding_window": 100}, torch.bfloat16), ({}, torch.float8_e4m3fn)],
    ids=["gluon", "triton", "fp8"],
)
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize(("tokens", "sequences"), [(8192, 256), (2048, 1024), (512, 8)])
def test_no_batch_invariant_call_waits_for_a_compiler_after_warm_up(on_cuda, tokens, sequences, heads, masks, stored):
    """Of any tokens and sequences, also of equal lengths, such as a short prompt alone."""
    H, K = heads
    query, kv_cache = torch.empty(tokens, H, 128, dtype=torch.bfloat16), torch.empty(64, 2, 16, K, 128).to(stored)
    tables, starts = (torch.zeros(sequences + 1, *more, dtype=torch.int32) for more in ((32,), ()))

    def attend(T, S):
        attention = query[:T], kv_cache, tables[:S], starts[:S], starts[: S + 1], 0.1
        gpu.paged_attention_with_lse(*attention, batch_invariant=True, **masks)

    batches = tuning.covering_batches(tokens, sequences, equal_lengths=False)
    with precompile.noting([(T, S) for T, S in batches if T >= S]) as jobs:
        attend(7, 3)
    kinds = set(jobs)
    assert {job.name for job in kinds} & {"invariant_few_kernel", "invariant_decode_kernel"}
    draw = random.Random(0)
    few = [(draw.randint(1, 64), 1) for _ in range(10)]
    for T, S in [*few, *((draw.choice((S, 5 * S, draw.randint(S, tokens))), S) for S in range(1, sequences, 7))]:
        with precompile.noting() as of_call:
            attend(min(T, tokens), S)
        assert {*of_call} <= kinds, (T, S, [job.name for job in {*of_call} - kinds])


@pytest.mark.parametrize(("T", "S"), [(64, 4), (16, 1), (5, 1), (32, 2)])
def test_short_prompts_of_equal_lengths_are_compiled_ahead_if_asked_for(on_cuda, monkeypatch, T, S):
    monkeypatch.setattr(warm_up, "has_gpu", lambda: True)
    monkeypatch.setattr(precompile, "can_precompile", lambda: False)
    most = {"max_num_tokens": 8192, "max_num_seqs": 256}
    with precompile.noting() as of_the_step:
        call(T, S)
    assert len(of_the_step) > 1
    assert not of_the_step.keys() <= warm_up.Ahead([call], **most)._loads.keys()
    assert of_the_step.keys() <= warm_up.Ahead([call], **most, equal_lengths=True)._loads.keys()


def test_noting_ends_with_an_error(on_cuda):
    query, kv_cache, tables, lens, starts, scale = step(100, 10)[1]
    with pytest.raises(ValueError, match="query_start_loc"), precompile.noting():
        gpu.paged_attention(query, kv_cache, tables, lens, starts[:3], scale)
    assert precompile.notes() is None
    call()
    assert on_cuda


def test_alignment_and_absence_are_part_of_a_job(on_cuda):
    (_, value, kv_cache, slots), _ = step(8, 8)
    storage = torch.empty(8 * 8 * 128 + 1, dtype=torch.bfloat16)
    odd = storage[1:].view(8, 8, 128)
    with precompile.noting() as jobs:
        gpu.reshape_and_cache(odd, value.contiguous(), kv_cache, slots)
        gpu.reshape_and_cache(odd.clone(), value.contiguous(), kv_cache, slots)
    first, second = jobs
    assert [None if each is None else each.aligned for each in first.places] == [False, *[True] * 4, None, None]
    assert first._replace(places=second.places) == second


def test_a_launcher_without_a_constant_is_refused():
    with pytest.raises(TypeError, match="merge_kernel: constants must name DIVISION, PDL, got SPEC, TILE"):
        launch.Launcher(merge.merge_kernel, {"SPEC": 0, "TILE": 0}, torch.device("cpu", 0))


def test_a_kernel_is_loaded_on_each_device_and_if_another_process_has_left_it(on_cuda, monkeypatch):
    compiler = precompile.Compiler(0)  # begins nothing
    monkeypatch.setattr(warm_up, "has_gpu", lambda: True)
    monkeypatch.setattr(precompile, "can_precompile", lambda: True)
    monkeypatch.setattr(precompile, "compiler", lambda: compiler)
    constants = dict.fromkeys(["SPEC", "DIVISION", "TILE", "PDL"], 0)
    launchers = [
        launch.Launcher(merge.merge_kernel, constants, torch.device("cpu", i), can_wait=True) for i in range(2)
    ]
    try:
        ahead = warm_up.Ahead([lambda i=i: launchers[i]((1, 1, 1), (torch.zeros(1),)) for i in range(2)])
        assert not on_cuda
        for state in ahead._states:
            assert compiler.wait(next(iter(ahead._loads))) is None, "as at a launch"
            assert state.done.is_set()
        report = ahead.finish()
        assert (report.kernels, report.errors) == (1, ())
        assert [grid for _, grid, *_ in on_cuda] == [launch.NO_PROGRAMS] * 2
    finally:
        compiler.end()


@pytest.mark.parametrize("order", ["merge split prefill", "prefill merge split"])
def test_keys_do_not_depend_on_the_order_of_calls(order):
    """Else a process would not find what another one compiled."""
    program = f"""
from paged_ops.lowerings.gpu.attention.triton import decode, merge, prefill
from paged_ops.lowerings.gpu.target import settled
kernels = dict(merge=merge.merge_kernel, split=decode.split_kernel, prefill=prefill.prefill_kernel)
keys = {{name: settled(kernels[name]).cache_key for name in {order.split()}}}
print(sorted(keys.items()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kernels = {"merge": merge.merge_kernel, "split": decode.split_kernel}
    keys = {name: settled(kernel).cache_key for name, kernel in kernels.items()}
    for name, key in keys.items():
        assert repr((name, key)) in done.stdout


def job(name):
    return precompile.Job("paged_ops.lowerings.gpu.cache", name, ("cuda", 90, 32), "", tuple, (), (), (), ())


def test_a_kernel_that_does_not_compile_is_left_to_its_launch():
    compiler = precompile.Compiler(1)
    try:
        states = compiler.submit([job("no_such_kernel")])
        precompile.wait_for(states, 60)
        assert "no_such_kernel: AttributeError" in states[0].error
        assert compiler.wait(job("no_such_kernel")) is None
        assert compiler.wait(job("never_asked_for")) is None
    finally:
        compiler.end()


def test_when_the_other_process_ends_nothing_waits():
    compiler = precompile.Compiler(1)
    states = compiler.submit([job("first"), job("second")])
    os.killpg(compiler._server.pid, signal.SIGKILL)
    started = time.monotonic()
    precompile.wait_for(states, 60)
    assert [(state.done.is_set(), state.error) for state in states] == [(True, None)] * 2
    assert [compiler.wait(job(name)) for name in ("first", "second")] == [None, None]
    assert time.monotonic() - started < 30
    compiler._server.wait()
    assert not compiler.lives


def test_what_has_not_begun_is_compiled_by_its_launch():
    compiler = precompile.Compiler(0)  # begins nothing
    try:
        compiler.submit([job("first")])
        assert compiler.wait(job("first")) is None
        (state,) = compiler.submit([job("first")])
        assert state.done.is_set() and state.error is None
        assert compiler.wait(job("first")) is None
    finally:
        compiler.end()


def test_without_a_gpu_nothing_is_run():
    report = paged_ops.warm_up([lambda: 1 / 0], max_num_tokens=8, max_num_seqs=2)
    assert (report.kernels, report.compiled, report.errors) == (0, 0, ())
    assert "0 kernels" in str(report)


@pytest.mark.parametrize("bad", [{"max_num_tokens": 8}, {"sizes": [(0, 1)]}, {"max_num_tokens": 0, "max_num_seqs": 1}])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match=r"sizes|max_num_seqs"):
        paged_ops.warm_up([], **bad)
