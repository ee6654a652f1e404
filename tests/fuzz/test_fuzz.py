"""The harness of tests/fuzz for a short time: some cases of each campaign, and that it would find what is wrong.

Takes about a minute of one core.
"""

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paged_ops
from tests.fuzz import (
    allocator,
    ambient,
    graphs,
    invariant,
    invariant_batches,
    lifecycle,
    loop,
    metadata,
    ops,
    programs,
    runner,
    threads,
)

pytestmark = pytest.mark.fuzz

CAMPAIGNS = {
    "ops": (ops, range(24)),
    "allocator": (allocator, range(40)),
    "metadata": (metadata, range(20)),
    "loop": (loop, range(12)),
    "lifecycle": (lifecycle, range(10)),
    "graphs": (graphs, range(5)),
    "ambient": (ambient, range(0, 1500, 150)),
    "programs": (programs, range(2)),
    "threads": (threads, range(8)),
    "invariant": (invariant, range(12)),
    "invariant_batches": (invariant_batches, range(1, 4)),
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_finds_nothing(name):
    module, numbers = CAMPAIGNS[name]
    results = runner.run_cases(name, module.run, numbers, runner.Options(seed=1), seconds=30)
    assert not results.findings, results.findings[0]["what"]
    assert results.counts["cases"] >= 1


def test_a_case_runs_again_exactly():
    first, second = (runner.run_cases("ops", ops.run, [7], runner.Options(seed=3)) for _ in range(2))
    other = runner.run_cases("ops", ops.run, [8], runner.Options(seed=3))
    assert first == second != other


def broken(name, change):
    """The op with other arguments or another result."""
    original = getattr(paged_ops, name)

    def call(*args, **kwargs):
        return change(original, *args, **kwargs)

    return call


def one_key_less(original, query, cache, tables, lens, *args, **kwargs):
    return original(query, cache, tables, torch.where(lens > 1, lens - 1, lens), *args, **kwargs)


WRONG = {
    "paged_attention": one_key_less,
    "paged_attention_with_lse": one_key_less,
    "reshape_and_cache": lambda original, k, v, cache, slots, **f: original(k, v, cache, slots[:-1], **f),
    "merge_attention_states": lambda original, a, la, b, lb: original(a, la, b, lb + 1e-3),
    "copy_blocks": lambda original, caches, mapping: original(caches[:1], mapping[:-1]),
    "gather_kv": lambda original, *args, **f: original(*args, **f)[::-1],
    "select_keys": lambda original, q, c, tables, lens, *args, **f: original(
        q, c, tables, (lens - 1).clamp(0), *args, **f
    ),
    "cascade_attention": lambda original, q, c, table, n, *args, **f: original(
        q, c, table, (n - 1).clamp(0), *args, **f
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_finds_what_is_wrong(name, monkeypatch):
    monkeypatch.setattr(paged_ops, name, broken(name, WRONG[name]))
    results = runner.run_cases("ops", ops.run, range(5), runner.Options(seed=0))
    what = "attention " if name.startswith("paged") else {"copy_blocks": "memory after copy_blocks"}.get(name, name)
    assert any(line.startswith(what) for each in results.findings for line in each["what"].splitlines())


def lost_copies(cache):
    """Copy-on-write that copies nothing."""
    cache.take_copies()


def test_finds_tokens_of_another_sequence(monkeypatch):
    monkeypatch.setattr(paged_ops.KVCache, "flush_copies", lost_copies)
    results = runner.run_cases("loop", loop.run, range(12), runner.Options(seed=1))
    assert any("worse" in each["what"] for each in results.findings), results.counts


def test_finds_a_block_that_is_not_given_back(monkeypatch):
    release = paged_ops.cache.allocator.BlockPool.release
    monkeypatch.setattr(
        paged_ops.cache.allocator.BlockPool, "release", lambda pool, block: block != 3 and release(pool, block)
    )
    results = runner.run_cases("allocator", allocator.run, range(3), runner.Options(seed=1))
    assert any("blocks in use" in each["what"] for each in results.findings), results.counts


def test_finds_a_slot_that_is_wrong(monkeypatch):
    monkeypatch.setattr(paged_ops.metadata.validation, "blocks_for", lambda tokens, size: tokens // size)
    results = runner.run_cases("metadata", metadata.run, range(2), runner.Options(seed=1))
    assert results.findings


def test_a_long_run_says_how_to_run_a_case_again(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.fuzz", "ops", "--seconds", "4", "--processes", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    found = json.loads(out.read_text())
    assert found["counts"]["calls"] > 10 and found["seed"] == 0 and found["device"] == "cpu"
    assert done.returncode == bool(found["findings"])


def test_cases_are_prepared_ahead_and_others_run_until_their_kernels_are_compiled(tmp_path):
    """Each case runs once; what preparing raises is a finding of its case."""
    did = []

    class Kind:
        def __init__(self, case):
            self.case, self.asked = case, 0
            did.append(f"prepare {case.number}")
            if case.number == 5:
                raise KeyError("five")

        def ready(self):
            self.asked += 1
            return self.asked > (0 if self.case.number == 3 else 4)

        def run(self):
            did.append(f"run {self.case.number}")
            self.case.counts["runs"] += 1
            time.sleep(0.05)

    state, until = tmp_path / "state.json", time.time() + 1
    assert runner.work("any", None, runner.Options(variants=8), 1, 2, until, state, Kind) == 0
    found = runner.Results.from_json(state.read_text())
    numbers = [int(each.split()[1]) for each in did if each.startswith("run")]
    assert did[:5] == ["prepare 1", "prepare 3", "prepare 5", "prepare 7", "run 3"]
    assert numbers[:4] == [3, 11, 13, 1] and 7 in numbers and len({*numbers}) == len(numbers), did
    assert found.counts["runs"] == len(numbers) == found.counts["cases"] - 1
    assert [(each["case"], "five" in each["what"]) for each in found.findings] == [(5, True)]


def test_an_interrupted_append_keeps_the_copy_of_a_shared_block():
    """Ctrl-C between any two lines of an append: a block with a pending copy is not lost."""
    for lines in range(1, 60):
        cache = allocator.Contents(8, 4, 0)
        cache.admit(0, [1, 2, 3, 4, 5, 6])
        for slot in cache.slots(0):
            cache.device[slot // 4][slot % 4] = slot
        cache.commit(0, 6)
        cache.fork(0, 1)
        held = [list(cache.device[block]) for block in cache.block_ids(1)]
        with contextlib.suppress(allocator.Interrupted):
            allocator.interrupted(functools.partial(cache.append, 1, [7]), lines)
        cache.recover()
        cache.flush_copies()
        assert [cache.device[block] for block in cache.block_ids(1)][:2] == held, lines


@pytest.mark.parametrize("path", ["fused", "torch"])
def test_finds_a_moved_cut(path, monkeypatch):
    monkeypatch.setattr(invariant, "PLANTED", 1)
    drawn = invariant.Setting.draw
    monkeypatch.setattr(
        invariant.Setting, "draw", lambda *args: dataclasses.replace(drawn(*args), path=path, features={})
    )
    results = runner.run_cases("invariant", invariant.run, [3], runner.Options(seed=1))
    assert results.counts["planted"] == 1 and not results.findings, results.findings
    monkeypatch.setattr(invariant, "moved_cut", lambda *_: contextlib.nullcontext())
    results = runner.run_cases("invariant", invariant.run, [3], runner.Options(seed=1))
    assert "a cut was moved and no bit changed" in results.findings[0]["what"]


@pytest.mark.parametrize("moves", [True, False])
def test_batches_begin_with_a_moved_cut(moves, monkeypatch):
    drawn = invariant_batches.setting_of
    on_torch = {"path": "torch", "dtype": torch.float32, "kind": torch.float32}
    monkeypatch.setattr(invariant_batches, "setting_of", lambda *args: dataclasses.replace(drawn(*args), **on_torch))
    monkeypatch.setattr(invariant_batches, "BATCHES", 40)
    if not moves:
        monkeypatch.setattr(invariant_batches, "moved_cut", lambda *_: contextlib.nullcontext())
    results = runner.run_cases("invariant_batches", invariant_batches.run, [0], runner.Options(seed=1))
    assert results.counts["planted"] == 1
    assert [each["what"].partition(":")[0] for each in results.findings] == (
        [] if moves else ["a cut was moved and no bit changed"]
    )
