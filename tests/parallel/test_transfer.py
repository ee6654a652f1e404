"""Blocks that go from one process to another, by gloo."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_ops.parallel.transfer import memory_regions
from tests.parallel.transfer_cases import FORMS, cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated.py"


@pytest.mark.parametrize("form", FORMS)
def test_blocks_arrive(run_on, form):
    assert run_on("transfer_cases.moves", 2, 30, form=form) == [True, True]


@pytest.mark.parametrize("staging", [1, 2 * 2 * 3 * 1024])
def test_in_several_messages(run_on, staging):
    assert run_on("transfer_cases.moves", 2, 30, form="nhd", staging=staging) == [True, True]


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ({}, {"cache": {"block_size": 8}}, ["kv_cache.block_size: expected 8 as on rank 1, got 4"]),
        ({}, {"cache": {"layout": "HND"}}, ["kv_cache.layout: expected HND as on rank 1, got NHD"]),
        ({}, {"cache": {"dtype": torch.bfloat16}}, ["kv_cache.dtype: expected torch.bfloat16 as on rank 1"]),
        ({"cache": {"num_kv_heads": 1}}, {}, ["kv_cache.num_kv_heads: expected [2, 2, 2] as on rank 1, got [1, 1, 1]"]),
        ({"block_ids": [1, 2, 3]}, {}, ["block_ids: expected 2 blocks as on rank 1, got 3"]),
        (
            {"block_ids": [1, 8]},
            {},
            ["block_ids: expected blocks from 0 to 7, got 8", "on rank 0: block_ids: expected"],
        ),
        ({}, {"block_ids": [3, 3]}, ["on rank 1: block_ids: expected", "each block to receive once, got 3 twice"]),
        (
            {"block_ids": {1, 2}},
            {},
            ["block_ids: expected an ordered sequence of blocks, such as a list, got {1, 2}"],
        ),
        ({}, {"block_ids": None}, ["on rank 1: block_ids: expected an ordered sequence of blocks", "got None"]),
        ({"no_cache": True}, {}, ["on rank 0: kv_cache: expected a KVCache", "got None"]),
        ({}, {"no_cache": True}, ["on rank 1: kv_cache: expected a KVCache", "got None"]),
        ({}, {"call": "send"}, ["dst: expected a rank that receives blocks, got 1, which called send_blocks too"]),
    ],
    ids=[
        *("block size", "layout", "dtype", "heads", "count", "no such block", "twice"),
        *("a set", "no blocks", "no cache here", "no cache there", "both send"),
    ],
)
def test_what_differs_is_an_error_on_both_ranks(run_on, here, there, told):
    results = run_on("transfer_cases.refused", 2, 30, here=here, there=there)
    messages = [message for message, _, _ in results]
    assert None not in messages
    for part in told:
        assert any(part in message for message in messages), messages
    assert [rest for _, *rest in results] == [[True, True]] * 2  # nothing was written, and the next call goes through


def test_errors_of_one_rank_alone(run_on):
    for rank, messages in enumerate(run_on("transfer_cases.alone", 2, 30)):
        assert [message.partition(":")[0] for message in messages] == ["dst", "dst", "kv_cache"], rank


def test_no_blocks_and_queued_copies(run_on):
    assert run_on("transfer_cases.nothing", 2, 30) == [True, True]
    assert run_on("transfer_cases.copies_first", 2, 30) == [True, True]


@pytest.mark.parametrize("form", FORMS)
def test_regions_name_the_memory(form):
    """What an engine would copy by addresses alone is the block."""
    kv_cache = cache(0, **FORMS[form])
    regions = memory_regions(kv_cache)
    assert sum(region.num_blocks * region.nbytes for region in regions) == kv_cache.nbytes
    for region in regions:
        for block in (0, 5):
            read = ctypes.string_at(region.address + block * region.stride, region.nbytes)
            assert read == bytes(region.bytes_of_blocks[block].tolist())


def test_prompts_here_and_decodes_there():
    """The example prints what its docstring says."""
    pytest.importorskip("transformers", reason="transformers is the extra 'hf'")
    text = re.search(r'"""(.*?)"""', EXAMPLE.read_text(), re.DOTALL)[1]
    expected = re.search(r"prints::\n\n(.*?)\n\n", text, re.DOTALL)[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected.split()
