"""What a call of a GPU's lowering costs the host, as far as that needs no GPU: what is checked, planned and kept."""

import random

import pytest
import torch

pytest.importorskip("triton")

import triton

from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import cache, launch
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import choose
from tests.gpu.step import H200, D, H, step


def random_sizes(count):
    """Mixed batches: some decodes, and chunks of prompts."""
    rng = random.Random(0)
    for _ in range(count):
        decodes, chunks = rng.randrange(40), [rng.randint(1, 700) for _ in range(rng.randrange(4))]
        yield max(decodes + sum(chunks), 2), max(decodes + len(chunks), 2)


def test_steps_of_any_size_are_checked_and_described_once(launched, monkeypatch):
    described, planned, writes = [], [], []
    for module, name, noted in (
        (attention, "describe", described),
        (cache, "_plan_write", writes),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, noted=noted: noted.append(1) or real(*args))
    for kernel in choose.kernels_of(H200):
        monkeypatch.setattr(kernel, "build", lambda *args, real=kernel.build: planned.append(1) or real(*args))
    sizes = list(random_sizes(1000))
    for T, S in sizes:
        write, attend = step(T, S)
        gpu.reshape_and_cache(*write)
        gpu.paged_attention(*attend)
    assert len(set(sizes)) > 700
    assert (len(described), len(writes)) == (1, 1)
    assert len(planned) <= 20  # kinds of tiles and kernels, not sizes
    assert len(launch._launchers) <= 20  # some of them only for calls without counters


def test_a_plan_that_is_shared_launches_what_a_plan_of_its_own_would(launched):
    sizes = [*random_sizes(60), (1, 1), (64, 64), (64, 16), (200, 100), (4000, 1), (3000, 200), (65, 65), (512, 256)]
    for T, S in sizes:
        gpu.paged_attention(*step(T, S)[1])
        gpu.reshape_and_cache(*step(T, S)[0])
    shared = list(launched)
    launched.clear()
    for T, S in sizes:
        attention.forget()
        cache.forget()
        gpu.paged_attention(*step(T, S)[1])
        gpu.reshape_and_cache(*step(T, S)[0])
    assert shared == launched
    assert len({(name, grid) for name, grid, *_ in shared}) > 20


def test_a_scale_that_is_0_in_float32_is_planned_as_0(launched):
    """The Hopper kernels take the maximum before they scale, and 0 times their -inf would be NaN."""

    def kernels(scale):
        launched.clear()
        gpu.paged_attention(*step(4000, 1)[1][:-1], scale)
        return [name for name, *_ in launched]

    assert kernels(1e-50) == kernels(0.0) != kernels(1e-40)


@pytest.mark.parametrize("S", [2, 6, 200])
def test_programs_fold_the_states_of_every_sequence_of_one_query_head(launched, S):
    """A state is one row of 64 values, less than what a program folds at once."""
    query, kv_cache, *batch = step(S, S)[1]
    query, kv_cache = query[:, :8, :64].contiguous(), kv_cache[..., :64].contiguous()
    gpu.paged_attention(query, kv_cache, *batch, batch_invariant=True)
    grids = {name: grid for name, grid, *_ in launched}
    assert grids["invariant_states_kernel"][0] >= S * kv_cache.shape[3]


@pytest.mark.parametrize("wrong", ["block_tables", "query_start_loc", "seq_lens", "out"])
def test_sizes_that_disagree_are_refused_after_a_thousand_that_agree(launched, wrong):
    for T, S in random_sizes(20):
        gpu.paged_attention(*step(T, S)[1])
    launched.clear()
    query, kv_cache, tables, lens, starts, scale = step(100, 10)[1]
    bad = {
        "block_tables": (query, kv_cache, tables[:9], lens, starts, scale),
        "query_start_loc": (query, kv_cache, tables, lens, starts[:10], scale),
        "seq_lens": (query, kv_cache, tables, lens[:, None], starts, scale),
        "out": (query, kv_cache, tables, lens, starts, scale),
    }[wrong]
    out = {"out": query.new_empty(99, H, D)} if wrong == "out" else {}
    with pytest.raises(ValueError, match=wrong):
        gpu.paged_attention(*bad, **out)
    key, value, _, slots = step(100, 10)[0]
    for args in ((key, value[:99], slots), (key, value, torch.cat([slots, slots]))):
        with pytest.raises(ValueError, match=r"value|slot_mapping"):
            gpu.reshape_and_cache(args[0], args[1], kv_cache, args[2])
    assert not launched


def test_powers_of_two():
    from paged_ops.lowerings.gpu.attention.tuning import power_of_2

    assert [power_of_2(n) for n in range(10)] == [triton.next_power_of_2(n) or 1 for n in range(10)]
