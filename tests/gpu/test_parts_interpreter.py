"""Who merges the parts of divided units, in Triton's interpreter: whatever the order in which programs end.

The interpreter runs one program after another, so the order of the programs is the order in which they count.
``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_parts_interpreter.py``.
"""

import os
import random
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from triton.runtime import interpreter

from paged_ops.lowerings import cpu, gpu
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.lowerings.gpu.attention.shared.split_merge import UNIT
from paged_ops.lowerings.gpu.attention.triton import latent

pytestmark = pytest.mark.interpreter
FAN_OF = tuning.fan_of


@pytest.fixture(autouse=True)
def one_launch(monkeypatch):
    monkeypatch.setattr(tuning, "fan_of", lambda *args: tuning.FAN)
    attention.forget()
    yield
    attention.forget()


def a_call(heads, lens, tokens=1, idle=0, D=24):
    """float32; each sequence has ``tokens`` new tokens, but for the first ``idle``; so many rows of padding follow."""
    (H, K), B, S = heads, 8, len(lens)
    torch.manual_seed(sum(lens))
    blocks = -(-max(lens) // B)
    tables = torch.randperm(S * blocks).view(S, blocks)
    query, kv_cache = torch.randn(S * tokens, H, D), torch.randn(S * blocks, 2, B, K, D)
    ints = tables, torch.tensor(lens), (torch.arange(S + 1) - idle).clamp(min=0) * tokens
    return query, kv_cache, *(each.to(torch.int32) for each in ints), D**-0.5


# One part of a unit, two, some, more than FAN; shares that hold several units, and units that are not divided.
CALLS = {
    "many": (36, a_call((2, 1), [590])),
    "some": (12, a_call((8, 2), [5, 130, 1, 77, 0, 300, 16], idle=1)),
    "groups and single ones": (23, a_call((4, 1), [5, 700, 16, 40], tokens=2)),
}


def in_order(monkeypatch, order, programs):
    """Run the programs of split_kernel in this order."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def permuted(x, y, z):
        set_grid_idx(order[x] if builder.grid_dim[0] == programs else x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", permuted, raising=False)


def counting(monkeypatch, made):
    """Keep the counters that calls get."""

    def counters_of(workspace, number):
        made.append(torch.zeros(number, dtype=torch.int32))
        workspace.fill_(torch.nan)
        return made[-1]

    monkeypatch.setattr(attention, "counters_of", counters_of)


@pytest.mark.parametrize("name", CALLS)
def test_the_order_of_programs_does_not_show(name, monkeypatch):
    programs, call = CALLS[name]
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
    shuffled = random.Random(1).sample(range(programs), programs)
    results, made = [], []
    counting(monkeypatch, made)
    attention.forget()
    try:
        for order in (range(programs), range(programs)[::-1], shuffled):
            with monkeypatch.context() as patch:
                in_order(patch, order, programs)
                results.append(gpu.paged_attention_with_lse(*call))
    finally:
        attention.forget()
    assert len(made) == 3
    for integers in made:
        assert not integers.view(programs, -1)[:, : UNIT.value + 1].any()  # counters are as they were before
    for got in results[1:]:
        assert all(map(torch.equal, got, results[0]))
    for got, want in zip(results[0], cpu.paged_attention_with_lse(*call), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_without_counters_another_kernel_merges(monkeypatch):
    programs, call = CALLS["some"]
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
    monkeypatch.setattr(attention, "counters_of", lambda workspace, number: None)
    attention.forget()
    try:
        got = gpu.paged_attention_with_lse(*call)
    finally:
        attention.forget()
    for mine, want in zip(got, cpu.paged_attention_with_lse(*call), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("S", "sliced", "fan"), [(4, True, 16), (8, True, 16), (16, True, 16), (17, True, 0), (3, True, 0), (8, False, 0)]
)
def test_which_calls_are_one_launch(S, sliced, fan):
    """With 8 key/value heads and 396 programs; a unit has three parts or more, and few."""
    spec = SimpleNamespace(K=8, storage=SimpleNamespace(dtype=torch.bfloat16))
    tiles = SimpleNamespace(slices=4 if sliced else 0, heads=1, programs=396)
    assert FAN_OF(tiles, spec, SimpleNamespace(is_hopper=True), S) == fan
    assert FAN_OF(tiles, spec, SimpleNamespace(is_hopper=False), S) == 0


@pytest.mark.parametrize("without_counters", [False, True])
@pytest.mark.parametrize(
    ("lens", "tokens", "whole"),
    [
        ([200, 208, 197, 205], [1, 1, 1, 1], True),
        ([200, 208, 197, 90], [1, 1, 1, 1], False),
        ([200, 0, 208, 205], [1, 1, 1, 1], False),
        ([96, 192, 192, 192], [2, 1, 1, 0], False),  # as many tiles of each sequence, but of two units
    ],
)
def test_units_that_are_about_equal_stay_whole(lens, tokens, whole, without_counters, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", 10)
    monkeypatch.setattr(tuning, "whole_units", lambda T, S, K, programs, target: 8)
    workspaces = []

    def counters_of(workspace, number):
        workspaces.append(workspace.fill_(torch.nan))
        return None if without_counters else torch.zeros(number, dtype=torch.int32)

    monkeypatch.setattr(attention, "counters_of", counters_of)
    query, kv_cache, tables, seq_lens, _, scale = a_call((20, 2), lens, D=16)
    starts = torch.tensor([0, *torch.tensor(tokens).cumsum(0)], dtype=torch.int32)
    call = query, kv_cache, tables, seq_lens, starts, scale
    got = gpu.paged_attention_with_lse(*call)
    for mine, want in zip(got, cpu.paged_attention_with_lse(*call), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)
    assert workspaces[0].isnan().all() == whole  # no parts


@pytest.mark.parametrize(
    ("batch", "programs"),
    [
        ((64, 64, 4), 264),
        ((256, 256, 1), 264),
        ((32, 32, 12), 396),
        ((48, 48, 8), 0),
        ((64, 64, 8), 0),
        ((65, 64, 4), 0),
        ((32, 32, 4), 0),
    ],
)
def test_how_many_programs_take_a_unit_each(batch, programs):
    target = SimpleNamespace(processors=132, is_hopper=True)
    assert tuning.whole_units(*batch, 396, target) == programs


@pytest.mark.parametrize(
    ("heads", "lens", "programs", "most", "start", "tiles"),
    [
        (64, [400], 5, 26, 0, [5] * 5),
        (64, [400], 26, 26, 0, [1] * 25 + [0]),
        (128, [320, 320], 12, 26, 0, [7, 7, 6] * 4),
        (64, [320, 320], 6, 2, 0, [7] * 4 + [6] * 2),  # three pieces are too many
        (64, [256, 256], 4, 26, 3, [8, 11] * 2),  # the empty tiles are in the last piece
        (64, [160, 160, 160], 4, 26, 0, [8, 8, 7, 7]),  # whole ones would take a third longer
        (64, [160, 150], 4, 26, 0, [5] * 4),
        (64, [160, 140], 4, 26, 0, [5, 5, 5, 4]),
        (64, [160, 0], 5, 26, 0, [3, 2, 2, 2, 2]),
    ],
)
def test_units_of_equal_length_are_cut_into_equal_pieces(heads, lens, programs, most, start, tiles, monkeypatch):
    """By the division of the Hopper kernels, in the kernel for any GPU."""
    plan, shares, taken = latent.plan, latent.shares, []

    def aligned(*args):
        tile, programs, division = plan(*args)
        return tile, programs, division._replace(aligned=most, start=start, heads_apart=heads > 64)

    def recorded(*args):
        share = shares(*args)
        taken.append(int((share[1] - share[0]).handle.data.item()))
        return share

    monkeypatch.setattr(latent, "plan", aligned)
    monkeypatch.setattr(latent, "shares", recorded)
    monkeypatch.setattr(tuning, "INTERPRETER_PROGRAMS", programs)
    torch.manual_seed(0)
    S, B, R, D = len(lens), 8, 16, 24
    tables = torch.randperm(S * 50, dtype=torch.int32).view(S, 50)
    query, cache = torch.randn(S, heads, D), torch.randn(S * 50, B, D)
    call = query, cache, tables, torch.tensor(lens, dtype=torch.int32), torch.arange(S + 1, dtype=torch.int32), 0.2
    got = gpu.paged_attention_with_lse(*call, value_head_size=R)
    assert taken == tiles
    for mine, want in zip(got, cpu.paged_attention_with_lse(*call, value_head_size=R), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)
