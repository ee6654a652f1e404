"""What users do wrong: each mistake is an error that names the argument, what was expected and what came."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_ops
from paged_ops import KVCache, StateCache
from paged_ops.cache.states import StateSpec
from paged_ops.generation import SamplingParams
from paged_ops.graphs import DecodeGraphs
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, B, D, K, make_loop, toy_step

a_layer = paged_ops.allocate_kv_cache
SPECS = [StateSpec((3, 4), torch.float32)]


def a_cache(num_blocks: Any = 8, **options: Any) -> KVCache:
    return KVCache(1, num_blocks, B, K, D, **options)


def a_builder(*sizes: Any, **options: Any) -> paged_ops.AttentionMetadataBuilder:
    return paged_ops.AttentionMetadataBuilder(*sizes, num_blocks=8, **options)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: a_cache("8"), "num_blocks: expected an integer of at least 0, got '8'"),
    (lambda: a_cache(None), "num_blocks: expected an integer of at least 0, got None"),
    (lambda: a_cache(8.0), "num_blocks: expected an integer of at least 0, got 8.0"),
    (lambda: a_cache(True), "num_blocks: expected an integer of at least 0, got True"),
    (lambda: a_cache(dtype="bfloat16"), "dtype: expected float32, float16, .*, got 'bfloat16'"),
    (lambda: KVCache(1, 8, B, 2.0, D), "num_kv_heads: expected an integer of at least 1, got 2.0"),
    (lambda: a_cache().admit("a", "hello"), "token_ids: expected integers, a list or a tensor .*, got 'hello'"),
    (lambda: a_cache().admit("a", [1.5]), r"token_ids: expected integers, a list or a tensor .*, got \[1.5\]"),
    (lambda: a_cache().admit("a", torch.ones(1, 3, dtype=torch.long)), "token_ids: .* got a int64 tensor of shape"),
    (lambda: a_layer("NHD", 8.0, B, K, D, torch.float32), "num_blocks: expected an integer of at least 0, got 8.0"),
    (lambda: a_layer("NHD", 8, B, K, -D, torch.float32), "head_size: expected at least 1, got -8"),
    (lambda: a_layer("NHD", 8, B, K, D, torch.int32), "dtype: expected float32, .*, got torch.int32"),
    (lambda: a_layer("NHD", 8, B, K, D, "float32"), "dtype: expected float32, .*, got 'float32'"),
    (lambda: paged_ops.supports("paged_attention", "cpu", layout="nhd"), "layout: expected one of NHD, .*, got 'nhd'"),
    (lambda: a_builder(4, 2, 16, 4, graph_support="ALWAYS"), "graph_support: expected a GraphSupport, got 'ALWAYS'"),
    (lambda: paged_ops.Batch([1], [2], [0]), r"block_ids: expected a list of blocks for each request, got \[0\]"),
    (lambda: paged_ops.Batch([1], ["a"], [[0]]), r"num_computed_tokens: expected integers, got \['a'\]"),
    (lambda: paged_ops.Batch(None, [2], [[0]]), "query_lens: expected integers, got None"),
    (lambda: StateCache(SPECS, "2"), "num_slots: expected an integer of at least 0, got '2'"),
    (lambda: a_builder(4, 2.0, 16, 4), "max_num_seqs: expected an integer of at least 1, got 2.0"),
    (lambda: a_builder(4, 2, 16, "4"), "max_blocks_per_seq: expected an integer of at least 1, got '4'"),
    (lambda: make_loop(max_num_tokens="64"), "max_num_tokens: expected an integer of at least 1, got '64'"),
    (lambda: make_loop(graph_mode="full"), "graph_mode: expected one of NONE, PIECEWISE, FULL, .*, got 'full'"),
    (lambda: make_loop(graph_mode="FULL"), "graph_mode: expected NONE, as cpu has no graphs, got FULL"),
    (lambda: make_loop(tokenizer="gpt2"), "tokenizer: expected a tokenizer, as AutoTokenizer.* returns, got 'gpt2'"),
    (lambda: make_loop().generate([[1]], 3), "params: expected SamplingParams, got 3"),
    (lambda: make_loop().generate(None), "prompts: expected a list of prompts, or a tensor .*, got None"),
    (lambda: make_loop(overlap="no"), "overlap: expected True or False, got 'no'"),
    (lambda: make_loop(compile="no"), "compile: expected True or False, got 'no'"),
    (lambda: make_loop().generate(torch.ones(3, dtype=torch.long)), "prompts: expected a list of prompts, .* got a"),
    (lambda: make_loop().abort("a"), "request_id: expected an id that submit returned, got a"),
    (lambda: make_loop().output(None), "request_id: expected an id that submit returned, got None"),
    (lambda: DecodeGraphs(toy_step, a_cache(), max_num_seqs=2, mode="all"), "mode: expected one of NONE, .* got 'all'"),
    (lambda: SamplingParams(max_new_tokens="3"), "max_new_tokens: expected an integer of at least 1, got '3'"),
    (lambda: SamplingParams(logprobs=True), "logprobs: expected a count, got True"),
    (
        lambda: paged_ops.generation.GenerationLoop(toy_step, a_cache().layers),
        "kv_cache: .*, got 1 tensors, the first a",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message.partition(" ")[0] for _, message in MISTAKES])
def test_the_message(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        mistake()


COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("copied", COPIES, ids=lambda copied: copied.__name__)
def test_what_owns_requests_or_buffers_is_not_copied(copied: Callable[[Any], Any]) -> None:
    loop = make_loop()
    stream = loop.stream(PROMPTS[3], GREEDY)
    next(stream)
    graphs = DecodeGraphs(toy_step, a_cache(), max_num_seqs=2)
    for each in (loop, stream, graphs, graphs.builder):
        with pytest.raises(TypeError, match=f"^{type(each).__name__}: cannot be copied or pickled; make another"):
            copied(each)
    gc.collect()  # nothing half made is left to abort the request
    assert [new.token for new in stream] == EXPECTED[3][1:]


def test_a_state_cache_is_copied_with_its_tensors() -> None:
    states = StateCache(SPECS, 2)
    states.admit("a")
    with pytest.raises(TypeError, match=r"StateCache: a shallow copy would own the same slots .* copy.deepcopy"):
        copy.copy(states)
    other = copy.deepcopy(states)
    other.tensors[0].fill_(1)
    assert "a" in other and not states.tensors[0].any()
