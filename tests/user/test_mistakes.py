"""What users do wrong: each mistake is an error that names the argument, what was expected and what came."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import paged_ops
from paged_ops import HybridCache, KVCache, StateCache
from paged_ops.cache.states import StateSpec
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.graphs import DecodeGraphs
from paged_ops.layouts import min_tpu_block_size, preferred_tpu_block_size
from paged_ops.metadata import make_local_attention_virtual_batches, swaps_to_split_decodes_and_prefills
from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, B, D, K, make_loop, toy_step

a_layer = paged_ops.allocate_kv_cache
SPECS = [StateSpec((3, 4), torch.float32)]


def a_cache(num_blocks: Any = 8, **options: Any) -> KVCache:
    return KVCache(1, num_blocks, B, K, D, **options)


def a_builder(*sizes: Any, **options: Any) -> paged_ops.AttentionMetadataBuilder:
    return paged_ops.AttentionMetadataBuilder(*sizes, num_blocks=8, **options)


def admitted() -> KVCache:
    cache = a_cache()
    cache.admit("a", [1, 2, 3])
    return cache


def ends_with(*tokens: int) -> SamplingParams:
    return SamplingParams(stop_token_ids=tokens)


def in_vocabulary() -> GenerationLoop:
    def step(*args: Any) -> Any:
        return toy_step(*args)

    step.vocab_size = 64  # type: ignore[attr-defined]
    return GenerationLoop(step, a_cache())


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
    (lambda: a_cache(device="tpu"), "device: expected a device of torch, .*, or xla for a TPU, got 'tpu'"),
    (lambda: a_cache(device="xla"), "device: expected torch_xla to be imported, before paged_ops, for xla; it is not"),
    (lambda: a_cache(device=None), "device: expected a device of torch, .*, got None"),
    (lambda: StateCache(SPECS, 2, device="tpu"), "device: expected a device of torch, .*, got 'tpu'"),
    (lambda: a_builder(4, 2, 16, 4, device="gpu"), "device: expected a device of torch, .*, got 'gpu'"),
    (lambda: a_layer("NHD", 8, B, K, D, torch.half, "tpu"), "device: expected a device of torch, .*, got 'tpu'"),
    (lambda: paged_ops.get_default_layout("tpu"), "device: expected a device of torch, .*, got 'tpu'"),
    (lambda: paged_ops.set_default_layout("HND", "tpu"), "device: expected a device of torch, .*, got 'tpu'"),
    (lambda: a_layer("NHD", 8.0, B, K, D, torch.float32), "num_blocks: expected an integer of at least 0, got 8.0"),
    (lambda: a_layer("NHD", 8, B, K, -D, torch.float32), "head_size: expected at least 1, got -8"),
    (lambda: a_layer("NHD", 8, B, K, D, torch.int32), "dtype: expected float32, .*, got torch.int32"),
    (lambda: a_layer("NHD", 8, B, K, D, "float32"), "dtype: expected float32, .*, got 'float32'"),
    (lambda: paged_ops.supports("paged_attention", "cpu", layout="nhd"), "layout: expected one of NHD, .*, got 'nhd'"),
    (lambda: a_builder(4, 2, 16, 4, graph_support="ALWAYS"), "graph_support: expected a GraphSupport, got 'ALWAYS'"),
    (lambda: paged_ops.Batch([1], [2], [0]), r"block_ids: expected a list of blocks for each request, got \[0\]"),
    (lambda: paged_ops.Batch([1], ["a"], [[0]]), r"num_computed_tokens: expected integers, got \['a'\]"),
    (lambda: paged_ops.Batch(None, [2], [[0]]), "query_lens: expected integers, got None"),
    (lambda: StateCache([((3, 4), torch.float32)], 2), r"specs: expected a list of StateSpec, got \[\(\(3, 4\)"),
    (lambda: StateCache(SPECS[0], 2), r"specs: expected a list of StateSpec, got StateSpec\("),
    (lambda: preferred_tpu_block_size("4096"), "max_model_len: expected an integer of at least 1, got '4096'"),
    (lambda: min_tpu_block_size(4096, 0), "max_num_seqs: expected at least 1, got 0"),
    (
        lambda: make_local_attention_virtual_batches(4, [4], [6], [[0, 1, 2]], 2),
        r"block_tables: expected a tensor, got \[\[0, 1, 2\]\]",
    ),
    (
        lambda: paged_ops.Batch([1], [2], [[0]], bidirectional_ranges=[[(0.5, 2)]]),
        r"bidirectional_ranges: expected pairs \(start, end\) of integers, got \(0.5, 2\)",
    ),
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
    (lambda: make_loop(seed="a"), "seed: expected an integer from -2.63 to below 2.64, got 'a'"),
    (lambda: make_loop(seed=2**64), "seed: expected an integer from -2.63 to below 2.64, got 18446744073709551616"),
    (lambda: make_loop(rank_time_limit=-1), "rank_time_limit: expected seconds, more than 0, got -1"),
    (lambda: make_loop(group="gloo"), "group: expected a process group of torch.distributed, got gloo"),
    (lambda: make_loop().generate([[1]], on_token=3), "on_token: expected a function, or None, got 3"),
    (lambda: make_loop().run("print"), "on_token: expected a function, or None, got 'print'"),
    (lambda: make_loop().warm_up(3), "on_capture: expected a function, or None, got 3"),
    (lambda: make_loop().abort(True), "request_id: expected an id that submit returned, got True"),
    (lambda: make_loop().submit(b"hello"), "prompt: expected token ids, got a string"),
    (lambda: make_loop().submit({1, 2}), "prompt: expected token ids, in order, got {1, 2}"),
    (
        lambda: in_vocabulary().submit([1], ends_with(64)),
        r"stop_token_ids: expected token ids in 0..63, .*, got \[64\]",
    ),
    (lambda: SamplingParams(temperature=True), "temperature: expected a finite number, 0 .* or more, got True"),
    (lambda: make_loop(generation_config={"do_sample": "no"}), "generation_config.do_sample: .*, got 'no'"),
    (lambda: make_loop(generation_config={"eos_token_id": "</s>"}), "generation_config.eos_token_id: .*, got </s>"),
    (lambda: make_loop(generation_config={"max_length": True}), "generation_config.max_length: .*, got True"),
    (lambda: a_cache().admit("a", {1, 2}), "token_ids: expected integers, a list or a tensor .*, got {1, 2}"),
    (lambda: a_cache().admit("a", [1], max_cached=-1), "max_cached: expected at least 0, got -1"),
    (lambda: admitted().commit("a", 1.5), "num_written: expected 0..3 .*, got 1.5"),
    (lambda: admitted().commit("a", 1, [1.5]), r"token_ids: expected integers, .*, got \[1.5\]"),
    (lambda: KVCache.num_blocks_for("1GB", 1, B, K, D, torch.float32), "num_bytes: expected a number, .*, got '1GB'"),
    (lambda: KVCache.num_blocks_for(1, 1, B, K, D, "half"), "dtype: expected float32, float16, .*, got 'half'"),
    (lambda: KVCache.num_blocks_for(1, 1, B, K, D, torch.half, layout="nhd"), "layout: expected one of .* got 'nhd'"),
    (lambda: HybridCache.for_layers(1, 8, B, K, D, num_window_blocks=4), "num_window_blocks: expected None, .* got 4"),
    (lambda: HybridCache.for_layers(1, 8, B, K, D, sliding_window=None), "sliding_window: .* of at least 0, got None"),
    (lambda: a_builder(4, 2, 16, 4, num_state_rows=2.5), "num_state_rows: expected an integer .*, got 2.5"),
    (lambda: a_builder(4, 2, 16, 4).build(paged_ops.Batch([1], [2], [[0]]), 0), "batch: expected a Batch, .* got 0"),
    (lambda: DecodeGraphs(3, a_cache(), max_num_seqs=2), r"step: expected a function \(input_ids, .*, got 3"),
    (lambda: DecodeGraphs(toy_step, a_cache(), max_num_seqs=2, sample=3), "sample: expected a function, .*, got 3"),
    (lambda: DecodeGraphs(toy_step, a_cache(), max_num_seqs=2, seq_sizes=4), r"seq_sizes: .* in 1..2, got \[4\]"),
    (lambda: HybridCache.for_layers(3, 8, 4, [2, 2], 8), "num_kv_heads: expected one for each of 3 layers, got 2"),
    (lambda: swaps_to_split_decodes_and_prefills([1, 2], 1.5), "decode_threshold: expected an integer of .*, got 1.5"),
    (lambda: paged_ops.supports("paged_attention", "cpu", head_size="64"), "head_size: .*, got '64'"),
    (lambda: paged_ops.set_debug_checks("no"), "enabled: expected True or False, got 'no'"),
    (lambda: SamplingParams(max_new_tokens="3"), "max_new_tokens: expected an integer of at least 1, got '3'"),
    (lambda: SamplingParams(logprobs=True), "logprobs: expected a count, got True"),
    (
        lambda: GenerationLoop(toy_step, a_cache().layers),
        "kv_cache: .*, got 1 tensors, the first a",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message.partition(" ")[0] for _, message in MISTAKES])
def test_the_message(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        mistake()


def test_integers_may_be_of_numpy() -> None:
    two = numpy.int64(2)
    loop = make_loop(max_num_seqs=two, max_num_tokens=numpy.int64(64), max_model_len=numpy.int64(40), seed=two)
    assert loop.generate([[1]], SamplingParams(max_new_tokens=two)) == loop.generate([[1]], SamplingParams(2))
    DecodeGraphs(toy_step, a_cache(numpy.int64(8)), max_num_seqs=two, max_model_len=numpy.int64(16))
    assert KVCache.num_blocks_for(0.9 * 4096, 1, 1, 1, 1, torch.float32) == 460
    assert SamplingParams(top_p=numpy.float64(0.5)).top_p == 0.5
    assert paged_ops.use_cascade_attention(
        numpy.int64(1024), [1] * 64, numpy.int64(32), numpy.int64(8), False, False, 132
    )
    lens = numpy.array([4, 10, 5]), numpy.array([6, 17, 9])
    tables = torch.arange(30).view(3, 10)
    local = make_local_attention_virtual_batches(numpy.int64(4), *lens, tables, two)
    assert local.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert preferred_tpu_block_size(numpy.int64(4096)) == 256 and min_tpu_block_size(numpy.int64(4096), two) == 1
    assert (
        paged_ops.Batch([1], [2], [[0]], bidirectional_ranges=[numpy.array([[0, 3]])]).bidirectional_ranges is not None
    )
    pattern = numpy.array(paged_ops.BlockSparse(16, 1, 2))
    assert not paged_ops.supports("paged_attention", "cpu", block_sparse=pattern, block_size=two)
    reasons = paged_ops.supports("paged_attention", "cpu", causal=numpy.False_, sliding_window=two)
    assert reasons == ["causal=False cannot be combined with sliding_window"]


def test_a_criterion_that_returns_nothing_is_refused() -> None:
    loop = make_loop()
    with pytest.raises(ValueError, match=r"^stopping_criteria: expected a bool, or a tensor of one, from .*, got None"):
        loop.generate([[1]], SamplingParams(2, stopping_criteria=lambda input_ids, scores: None))


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
