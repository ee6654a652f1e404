"""The metadata of a step, its builder, and the batch helpers, against brute force."""

import copy
import io
import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from paged_ops import Layout, allocate_kv_cache, kv_cache_shape, reference
from paged_ops.layouts import split_kv_cache
from paged_ops.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    Batch,
    GraphSupport,
    LayerHyperparameters,
    advance_decodes,
    block_ids_from_addresses,
    collect_layer_hyperparameters,
    common_layer_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    swaps_to_split_decodes_and_prefills,
    use_cascade_attention,
)
from tests.helpers.gpu import GPU

DEVICES = ["cpu", str(GPU)] if torch.cuda.is_available() else ["cpu"]
TENSORS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")
POISON = -77

B, MAX_SEQS, MAX_TOKENS, M, N = 4, 6, 40, 8, 64


def builder_of(**changes) -> AttentionMetadataBuilder:
    sizes = dict(block_size=B, max_num_seqs=MAX_SEQS, max_num_tokens=MAX_TOKENS, max_blocks_per_seq=M, num_blocks=N)
    return AttentionMetadataBuilder(**(sizes | changes))


def blocks_for(query_lens: list[int], computed: list[int], block_size: int = B) -> list[list[int]]:
    """As many blocks as each request needs, all different, in no particular order."""
    fresh = iter(torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist())
    return [[next(fresh) for _ in range(-(-(q + c) // block_size))] for q, c in zip(query_lens, computed, strict=True)]


def batch_of(query_lens: list[int], computed: list[int] | None = None) -> Batch:
    computed = [0] * len(query_lens) if computed is None else computed
    return Batch(query_lens, computed, blocks_for(query_lens, computed))


@st.composite
def steps(draw) -> tuple[list[int], list[int], list[list[int]], int, int]:
    """query_lens, num_computed_tokens, block_ids (exactly the needed ones) and the sizes to pad to."""
    n = draw(st.integers(0, MAX_SEQS))
    kind = draw(st.sampled_from(["decode", "uniform", "mixed"]))
    longest = {"decode": 1, "uniform": draw(st.integers(1, 5)), "mixed": MAX_TOKENS // MAX_SEQS}[kind]
    query_lens = [draw(st.integers(0, longest)) if kind == "mixed" else longest for _ in range(n)]
    computed = [draw(st.integers(0, M * B - q)) for q in query_lens]
    ids = st.integers(0, N - 1)
    blocks = [
        draw(st.lists(ids, min_size=need, max_size=need))
        for need in (-(-(q + c) // B) for q, c in zip(query_lens, computed, strict=True))
    ]
    return (
        query_lens,
        computed,
        blocks,
        draw(st.integers(n, MAX_SEQS)),
        draw(st.integers(sum(query_lens), MAX_TOKENS)),
    )


def padded(blocks: list[list[int]], junk: int) -> Tensor:
    table = torch.full((len(blocks), M + 1), junk, dtype=torch.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table


def assert_is_step(metadata: AttentionMetadata, query_lens, computed, blocks, S: int, T: int) -> None:
    """Every number of the metadata, by loops over requests and tokens."""
    query_start_loc, slots, positions = [0], [], []
    for q, c, ids in zip(query_lens, computed, blocks, strict=True):
        for position in range(c, c + q):
            slots.append(ids[position // B] * B + position % B)
            positions.append(position)
        query_start_loc.append(len(slots))
    seq_lens = [q + c for q, c in zip(query_lens, computed, strict=True)]
    n, t = len(query_lens), len(slots)

    assert metadata.query_start_loc.tolist() == query_start_loc + [t] * (S - n)
    assert metadata.seq_lens.tolist() == seq_lens + [0] * (S - n)
    assert metadata.slot_mapping.tolist() == slots + [-1] * (T - t)
    assert metadata.positions.tolist() == positions + [0] * (T - t)
    assert metadata.block_tables.shape == (S, M)
    for row, ids in zip(metadata.block_tables.tolist(), blocks, strict=False):
        assert row[: len(ids)] == ids
    assert metadata.query_start_loc_cpu.tolist() == metadata.query_start_loc.tolist()
    assert metadata.seq_lens_cpu.tolist() == metadata.seq_lens.tolist()
    assert metadata.num_computed_tokens_cpu.tolist() == list(computed) + [0] * (S - n)
    numbers = (metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len)
    assert numbers == (n, t, max(query_lens, default=0), max(seq_lens, default=0))
    assert all(type(number) is int for number in numbers)
    dtypes = [getattr(metadata, name).dtype for name in TENSORS]
    assert dtypes == [torch.int32, torch.int32, torch.int32, torch.int64, torch.int64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_staging_buffers", [None, 1, 3])
@given(sequence=st.lists(steps(), min_size=1, max_size=4), as_tensor=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_builder_equals_loops(device, num_staging_buffers, sequence, as_tensor, data):
    """Steps after each other in one builder: each finds the content of the ones before, larger ones too."""
    builder = builder_of(device=device, num_staging_buffers=num_staging_buffers)
    where = [getattr(builder.build(0, batch_of([])), name).data_ptr() for name in TENSORS]
    for query_lens, computed, blocks, S, T in sequence:
        junk = data.draw(st.sampled_from([-1, POISON, N, 2**31 - 1, 0]))
        batch = Batch(query_lens, computed, padded(blocks, junk) if as_tensor else blocks)
        metadata = builder.build(0, batch, num_reqs=S, num_tokens=T)
        assert_is_step(metadata, query_lens, computed, blocks, S, T)
        tensors = [getattr(metadata, name) for name in TENSORS]
        assert all(tensor.device == torch.device(device) for tensor in tensors)
        # A tensor without elements has no address.
        assert all(tensor.data_ptr() == at for tensor, at in zip(tensors, where, strict=True) if tensor.numel() and at)
        assert_is_step(builder.build(0, batch), query_lens, computed, blocks, len(query_lens), sum(query_lens))


@pytest.mark.parametrize("num_staging_buffers", [0, 2])
@given(step=steps(), before=steps())
@settings(max_examples=60, deadline=None)
def test_builder_poisons_what_is_not_needed(num_staging_buffers, step, before):
    builder = builder_of(unused_block_id=POISON, num_staging_buffers=num_staging_buffers)
    for query_lens, computed, blocks, S, T in (before, step):
        metadata = builder.build(0, Batch(query_lens, computed, blocks), num_reqs=S, num_tokens=T)
        assert_is_step(metadata, query_lens, computed, blocks, S, T)
        for row, ids in itertools.zip_longest(metadata.block_tables.tolist(), blocks, fillvalue=[]):
            assert row[len(ids) :] == [POISON] * (M - len(ids))


def test_same_sizes_give_the_same_tensors():
    builder = builder_of()
    first = builder.build(0, batch_of([1, 1, 1], [3, 9, 0]), num_reqs=4, num_tokens=4)
    builder.build(0, batch_of([7, 2], [3, 9]))
    captured = builder.build_for_capture(4)
    again = builder.build(0, batch_of([1, 1], [30, 1]), num_reqs=4, num_tokens=4)
    for name in TENSORS:
        assert getattr(first, name) is getattr(again, name) is getattr(captured, name)
    for name in ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"):
        assert getattr(first, name).data_ptr() != getattr(again, name).data_ptr()
    assert first.seq_lens_cpu.tolist() == [4, 10, 1, 0]


def test_parts_are_aligned_and_apart():
    metadata = builder_of().build_for_capture(MAX_SEQS)
    tensors = [getattr(metadata, name) for name in TENSORS]
    assert all((tensor.data_ptr() - tensors[3].data_ptr()) % 256 == 0 for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("computed", [5, 4000, 30000])
def test_large_tables_are_sent_in_part(device, computed):
    """Tables of many columns take the packed way when few are in use, the rows when many are; gaps are not sent."""
    builder = AttentionMetadataBuilder(
        B, 20, 30000, 8192, device, num_blocks=200_000, num_staging_buffers=2, unused_block_id=None
    )
    blocks = torch.randint(0, 200_000, (17, 8192), dtype=torch.int32)
    for n in (17, 3):
        builder._buffers.storage.fill_(0xFF)
        metadata = builder.build(0, Batch([1] * n, [computed] * n, blocks[:n]), num_reqs=20, num_tokens=20)
        need = -(-(computed + 1) // B)
        assert metadata.block_tables[:n, :need].tolist() == blocks[:n, :need].tolist()
        assert metadata.slot_mapping[:n].tolist() == [int(row[computed // B]) * B + computed % B for row in blocks[:n]]
        assert metadata.positions.tolist() == [computed] * n + [0] * (20 - n)
        assert metadata.seq_lens.tolist() == [computed + 1] * n + [0] * (20 - n)
        assert (builder._buffers.slot_mapping[20:] == -1).all()  # 0xFF
        assert (builder._buffers.block_tables[n:] == -1).all()
        if n == 17 and computed == 5:
            assert (builder._buffers.block_tables[:, need:] == -1).all()


def test_builds_under_other_defaults():
    """Another default device, and inference mode, change nothing."""
    with torch.inference_mode():
        builder = builder_of()
        query_lens, computed = [3, 1, 0], [8, 30, 8]
        blocks = blocks_for(query_lens, computed)
        for row in blocks:
            row[:2] = blocks[0][:2]
        assert builder.build(4, Batch(query_lens, computed, blocks)).cascade is not None
    with torch.device("meta"):
        batch = Batch(query_lens, computed, blocks)
        assert not swaps_to_split_decodes_and_prefills([1, 2]) and reorder_batch_to_split_decodes_and_prefills(batch)
        batch = Batch(query_lens, computed, blocks)
        metadata = builder.build(8, batch, num_reqs=5, num_tokens=6)
        virtual = make_local_attention_virtual_batches(
            4, [3], [5], torch.zeros(1, 4, dtype=torch.int32, device="cpu"), 2
        )
        builder.build_for_capture(2, 2)
        fresh = builder_of(num_staging_buffers=1, unused_block_id=0).build(0, batch)
    assert_is_step(fresh, query_lens, computed, blocks, 3, 4)
    assert metadata.seq_lens_cpu.tolist() == [11, 31, 8, 0, 0] and virtual.seq_lens.tolist() == [4, 1]
    assert metadata.cascade is not None and metadata.cascade.suffix_lens.tolist() == [3, 23, 0, 0, 0]


def test_empty_and_all_padding():
    builder = builder_of()
    builder.build(0, batch_of([6, 6, 6], [20, 20, 20]))
    assert_is_step(builder.build(0, Batch([], [], [])), [], [], [], 0, 0)
    assert_is_step(builder.build(0, Batch([], [], []), num_reqs=5, num_tokens=11), [], [], [], 5, 11)
    assert_is_step(builder.build(0, Batch([0, 0], [0, 0], [[], []]), num_reqs=3), [0, 0], [0, 0], [[], []], 3, 0)
    no_columns = Batch(torch.zeros(2, dtype=torch.int32), torch.zeros(2).int(), torch.zeros(2, 0, dtype=torch.int64))
    assert_is_step(builder.build(0, no_columns), [0, 0], [0, 0], [[], []], 2, 0)


def test_builder_before_the_cache_exists():
    builder = builder_of(num_blocks=0)
    assert_is_step(builder.build(0, Batch([], [], []), num_reqs=2, num_tokens=2), [], [], [], 2, 2)
    assert builder.build_for_capture(6).slot_mapping.tolist() == [-1] * 6
    with pytest.raises(ValueError, match=r"block_ids: expected ids in \[0, 0\)"):
        builder.build(0, batch_of([1]))


def test_build_for_capture():
    builder = builder_of()
    builder.build(0, batch_of([6] * 6, [20] * 6))
    metadata = builder.build_for_capture(4, 3)
    assert metadata.query_start_loc.tolist() == metadata.query_start_loc_cpu.tolist() == [0, 3, 6, 9, 12]
    assert metadata.seq_lens.tolist() == metadata.seq_lens_cpu.tolist() == [0] * 4
    assert metadata.slot_mapping.tolist() == [-1] * 12 and metadata.positions.tolist() == [0] * 12
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (4, 12)
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, M * B)
    assert metadata.num_computed_tokens_cpu.tolist() == [0] * 4
    # What it leads to: nothing is read, though the cache is all NaN.
    cache = torch.full((N, 2, B, 1, 8), torch.nan)
    out = reference.paged_attention(
        torch.ones(12, 2, 8), cache, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, 1.0
    )
    assert (out == 0).all()


def test_build_for_capture_with_cascade():
    builder = builder_of()
    cascade = builder.build_for_capture(4, cascade=True).cascade
    assert cascade.prefix_len.tolist() == [0] and cascade.suffix_lens.tolist() == [0] * 4
    shared = [0, 1]
    blocks = [[*shared, 2 + s] for s in range(3)]
    step = builder.build(8, Batch([1] * 3, [8] * 3, blocks), num_reqs=4, num_tokens=4).cascade
    for name in ("prefix_block_table", "prefix_len", "suffix_block_tables", "suffix_lens"):
        assert getattr(step, name).data_ptr() == getattr(cascade, name).data_ptr(), name


@pytest.mark.parametrize("prefix_blocks", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
@given(computed=st.lists(st.integers(B, 20), min_size=1, max_size=MAX_SEQS), padding=st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_advanced_on_the_device_as_built_anew(device, prefix_blocks, computed, padding):
    n, steps = len(computed), 9
    S = min(n + padding, MAX_SEQS)
    blocks = [[0, *(1 + s * M + b for b in range(M - 1))] for s in range(n)]  # the first is shared, for cascade
    sizes = dict(device=device, num_blocks=MAX_SEQS * M)
    advanced, anew = builder_of(**sizes, unused_block_id=POISON), builder_of(**sizes)
    prefix = prefix_blocks * B
    metadata = advanced.build(prefix, Batch([1] * n, computed, blocks), num_reqs=S, num_tokens=S, lookahead=steps)
    for step in range(1, steps + 1):
        advance_decodes(metadata, B)
        expected = anew.build(prefix, Batch([1] * n, [c + step for c in computed], blocks), num_reqs=S, num_tokens=S)
        for name in ("seq_lens", "positions", "slot_mapping", "query_start_loc"):
            assert torch.equal(getattr(metadata, name), getattr(expected, name)), name
        if prefix:
            assert torch.equal(metadata.cascade.suffix_lens, expected.cascade.suffix_lens)


def test_lookahead_sends_the_blocks_to_come():
    builder = builder_of(unused_block_id=POISON)
    tables = builder.build(0, Batch([1, 1], [3, 2], [[5, 6, 7], [8, 9, 10]]), lookahead=1).block_tables
    assert tables[:, :3].tolist() == [[5, 6, POISON], [8, POISON, POISON]]
    with pytest.raises(ValueError, match=r"block_ids: expected 3 blocks for the 9 tokens"):
        builder.build(0, Batch([1], [3], [[5, 6]]), lookahead=5)
    with pytest.raises(ValueError, match=r"at most 32 tokens"):
        builder.build(0, Batch([1], [30], [list(range(M))]), lookahead=2)
    with pytest.raises(ValueError, match=r"lookahead: expected 0 or more, got -1"):
        builder.build(0, batch_of([1]), lookahead=-1)
    with pytest.raises(ValueError, match=r"metadata: expected one token for each request.*S = 2, T = 4"):
        advance_decodes(builder.build(0, batch_of([3, 1])), B)


LEVELS = {
    GraphSupport.NEVER: [],
    GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: [[], [1], [1, 1, 1]],
    GraphSupport.UNIFORM_BATCH: [[], [1], [1, 1, 1], [3], [3, 3]],
    GraphSupport.ALWAYS: [[], [1], [1, 1, 1], [3], [3, 3], [1, 3], [0, 1]],
}


@pytest.mark.parametrize("level", GraphSupport)
def test_graph_support(level):
    builder = builder_of(graph_support=level)
    for query_lens in LEVELS[GraphSupport.ALWAYS]:
        assert builder.can_run_in_cuda_graph(batch_of(query_lens)) == (query_lens in LEVELS[level])
    assert not builder.can_run_in_cuda_graph(batch_of([1] * (MAX_SEQS + 1)))
    assert not builder.can_run_in_cuda_graph(batch_of([MAX_TOKENS + 1]))
    for query_len in (1, 3):
        if [query_len] in LEVELS[level]:
            assert builder.build_for_capture(2, query_len).num_actual_tokens == 2 * query_len
        else:
            with pytest.raises(ValueError, match=f"query_len: expected a graph that .*{level.name}.* got {query_len}"):
                builder.build_for_capture(2, query_len)


def test_graph_support_is_ordered():
    assert min(GraphSupport.ALWAYS, GraphSupport.UNIFORM_BATCH) is GraphSupport.UNIFORM_BATCH
    assert sorted(GraphSupport, reverse=True) == [
        GraphSupport.ALWAYS,
        GraphSupport.UNIFORM_BATCH,
        GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        GraphSupport.NEVER,
    ]


SHARED = [[5, 6, 7], [5, 6, 8], [5, 6, 9]]

BAD_STEPS = {
    "too many requests": (lambda b: b.build(0, batch_of([1] * 7)), r"query_lens: .* max_num_seqs = 6 .* got 7"),
    "too many tokens": (lambda b: b.build(0, batch_of([20, 21])), r"query_lens: .* max_num_tokens = 40 .* got 41"),
    "negative query": (
        lambda b: b.build(0, Batch([1, -1], [0, 2], [[0], [1]])),
        r"query_lens: .* got -1 for request 1",
    ),
    "negative history": (
        lambda b: b.build(0, Batch([1], [-1], [[0]])),
        r"num_computed_tokens: .* got -1 for request 0",
    ),
    "too long": (
        lambda b: b.build(0, Batch([1], [M * B], [list(range(9))])),
        r"num_computed_tokens \+ query_lens: .* at most 32 tokens \(8 blocks of 4\) .* got 33",
    ),
    "past int64": (
        lambda b: b.build(0, Batch([1], [2**63 - 1], [[0]])),
        r"num_computed_tokens \+ query_lens: .* got -9223372036854775808",
    ),
    "too few blocks": (
        lambda b: b.build(0, Batch([1], [4], torch.zeros(1, 1, dtype=torch.int32))),
        r"block_ids: expected 2 blocks for the 5 tokens .* got 1",
    ),
    "a ragged row too short": (
        lambda b: b.build(0, Batch([1, 1], [4, 4], [[0, 1], [2]])),
        r"block_ids: .* all 2 blocks that request 1 needs, got -1 at \[1, 1\]",
    ),
    "negative block": (
        lambda b: b.build(0, Batch([5], [0], [[0, -3]])),
        r"block_ids: expected ids in \[0, 64\) .* got -3 at \[0, 1\]",
    ),
    "block past the cache": (
        lambda b: b.build(0, Batch([1, 5], [0, 0], [[0], [63, 64]])),
        r"block_ids: expected ids in \[0, 64\) .* got 64 at \[1, 1\]",
    ),
    "first block past the cache": (
        lambda b: b.build(0, Batch([5], [0], [[0, 64]])),
        r"block_ids: expected ids in \[0, 64\) .* got 64 at \[0, 1\]",
    ),
    "padding below the batch": (
        lambda b: b.build(0, batch_of([1, 1]), num_reqs=1),
        r"num_reqs: expected 2 \(of the batch\) to max_num_seqs = 6, got 1",
    ),
    "padding above the capacity": (lambda b: b.build(0, batch_of([1]), num_reqs=7), r"num_reqs: .* got 7"),
    "token padding below": (lambda b: b.build(0, batch_of([9]), num_tokens=8), r"num_tokens: expected 9 .* got 8"),
    "token padding above": (lambda b: b.build(0, batch_of([9]), num_tokens=41), r"num_tokens: .* = 40, got 41"),
    "prefix not of whole blocks": (
        lambda b: b.build(6, Batch([1] * 3, [8] * 3, SHARED)),
        r"common_prefix_len: expected a multiple of block_size = 4, .* got 6",
    ),
    "prefix beyond the history": (
        lambda b: b.build(8, Batch([1] * 3, [8, 7, 8], SHARED)),
        r"common_prefix_len: .* least num_computed_tokens = 7, got 8",
    ),
    "negative prefix": (lambda b: b.build(-4, Batch([1] * 3, [8] * 3, SHARED)), r"common_prefix_len: .* got -4"),
    "prefix without requests": (lambda b: b.build(4, Batch([], [], [])), r"common_prefix_len: .* got 4"),
    "prefix that differs": (
        lambda b: b.build(12, Batch([1] * 3, [12] * 3, [[*row, 1] for row in SHARED]), fast_build=True),
        r"common_prefix_len: .* prefix of 3 blocks .* other blocks for request 1",
    ),
    "capture without requests": (lambda b: b.build_for_capture(0), r"num_reqs: expected 1 to .* got 0"),
    "capture of too many requests": (lambda b: b.build_for_capture(7), r"num_reqs: .* got 7"),
    "capture of too many tokens": (lambda b: b.build_for_capture(6, 7), r"query_len: expected 1 to 6 .* got 7"),
    "capture of no tokens": (lambda b: b.build_for_capture(1, 0), r"query_len: .* got 0"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
@pytest.mark.parametrize("num_staging_buffers", [0, 2])
def test_a_bad_step_writes_nothing(name, num_staging_buffers):
    call, message = BAD_STEPS[name]
    builder = builder_of(num_staging_buffers=num_staging_buffers)
    good = Batch([2] * 3, [8] * 3, SHARED)
    kept = [good, builder.build(8, good)]
    staging = [each.buffers.storage for each in builder._staging]
    before = copy.deepcopy([kept, builder._buffers.storage, staging])
    with pytest.raises(ValueError, match=message):
        call(builder)
    after = [kept, builder._buffers.storage, staging]
    leaves = [pytree.tree_leaves([vars(each[0][0]), *each[0][1:], *each[1:]]) for each in (before, after)]
    for old, new in zip(*leaves, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


BAD_BATCHES = {
    "floats": (lambda: Batch([1.0], [0], [[0]]), r"query_lens: expected int32 or int64, got a float32"),
    "booleans": (lambda: Batch(torch.ones(1, dtype=torch.bool), [0], [[0]]), r"query_lens: .* got a bool"),
    "rank": (lambda: Batch([[1]], [0], [[0]]), r"query_lens: expected 1 dimension, got .* \[1, 1\]"),
    "rank of blocks": (lambda: Batch([1], [0], torch.zeros(1, dtype=torch.int32)), r"block_ids: expected 2 dimensions"),
    "device": (
        lambda: Batch([1], torch.zeros(1, dtype=torch.int32, device="meta"), [[0]]),
        r"num_computed_tokens: .* meta",
    ),
    "history missing": (lambda: Batch([1, 1], [0], [[0], [0]]), r"num_computed_tokens: .* the 2 requests, got 1"),
    "blocks missing": (lambda: Batch([1, 1], [0, 0], [[0]]), r"block_ids: .* the 2 requests, got 1"),
    "device of the builder": (lambda: builder_of(device="meta"), r"device: expected cpu or cuda .* got meta"),
    "block size": (lambda: builder_of(block_size=0), r"block_size: expected at least 1, got 0"),
    "no sequences": (lambda: builder_of(max_num_seqs=0), r"max_num_seqs: .* got 0"),
    "no tokens": (lambda: builder_of(max_num_tokens=0), r"max_num_tokens: .* got 0"),
    "no columns": (lambda: builder_of(max_blocks_per_seq=0), r"max_blocks_per_seq: .* got 0"),
    "lengths past int32": (
        lambda: builder_of(max_blocks_per_seq=2**29),
        r"max_blocks_per_seq: expected 1 to 536870911",
    ),
    "negative cache": (lambda: builder_of(num_blocks=-1), r"num_blocks: .* got -1"),
    "negative staging": (lambda: builder_of(num_staging_buffers=-1), r"num_staging_buffers: .* got -1"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_and_builders(name):
    call, message = BAD_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_batch_swaps_rows_of_the_tensors_it_was_given():
    query_lens, computed, blocks = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.arange(6).view(3, 2)
    batch = Batch(query_lens, computed, blocks)
    batch.swap(0, 2)
    assert query_lens.tolist() == [3, 2, 1] and computed.tolist() == [6, 5, 4]
    assert blocks.tolist() == [[4, 5], [2, 3], [0, 1]]
    assert (batch.num_reqs, batch.num_tokens) == (3, 6)


@given(
    n=st.integers(1, MAX_SEQS),
    prefix_blocks=st.integers(0, 3),
    fast_build=st.booleans(),
    extra=st.lists(st.integers(0, 9), min_size=MAX_SEQS, max_size=MAX_SEQS),
    query_lens=st.lists(st.integers(0, 5), min_size=MAX_SEQS, max_size=MAX_SEQS),
    padding=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_cascade_metadata(n, prefix_blocks, fast_build, extra, query_lens, padding):
    """Attention by way of the cascade equals attention over whole sequences, which are there in any case."""
    P, query_lens, S = prefix_blocks * B, query_lens[:n], min(n + padding, MAX_SEQS)
    computed = [P + e for e in extra[:n]]
    blocks = blocks_for(query_lens, computed)
    blocks = [blocks[0][:prefix_blocks] + row[prefix_blocks:] for row in blocks]
    builder = builder_of(unused_block_id=0)
    builder.build(4, Batch([6, 6], [20, 20], [[1, *range(2, 8)], [1, *range(8, 14)]]))  # leaves something behind
    T = sum(query_lens) + padding
    metadata = builder.build(P, Batch(query_lens, computed, blocks), fast_build, num_reqs=S, num_tokens=T)
    assert_is_step(metadata, query_lens, computed, blocks, S, T)
    if P == 0 or fast_build:
        assert metadata.cascade is None
        return
    cascade = metadata.cascade
    assert cascade is not None and cascade.common_prefix_len == P and cascade.prefix_len.tolist() == [P]
    assert cascade.suffix_lens.tolist() == [q + c - P for q, c in zip(query_lens, computed, strict=True)] + [0] * (
        S - n
    )
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(N, 2, B, 1, 4, generator=generator)
    query = torch.randn(T, 2, 4, generator=generator, dtype=torch.float64)
    whole = reference.paged_attention(
        query, cache, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, 0.5
    )
    in_parts = reference.cascade_attention(
        query,
        cache,
        cascade.prefix_block_table,
        cascade.prefix_len,
        cascade.suffix_block_tables,
        cascade.suffix_lens,
        metadata.query_start_loc,
        0.5,
    )
    torch.testing.assert_close(in_parts, whole)


def test_cascade_tensors_stay_where_they_are():
    builder = builder_of()
    batch = Batch([2] * 3, [8] * 3, SHARED)
    first, second = (builder.build(P, batch, num_reqs=4).cascade for P in (8, 4))
    assert first is not None and second is not None
    for name in ("prefix_block_table", "prefix_len", "suffix_block_tables", "suffix_lens"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
        assert getattr(first, name).shape == getattr(second, name).shape


def test_use_cascade_attention():
    def use(prefix=4096, n=64, q=1, H=32, K=8, alibi=False, window=False, sms=132):
        return use_cascade_attention(prefix, [q] * n, H, K, alibi, window, sms)

    assert use()
    assert not use(alibi=True) and not use(window=True)
    assert not use(prefix=0) and not use(prefix=255) and not use(n=7, prefix=10**6, sms=1)
    # Worked: 64 sequences read 8 * 64 * 4096 / 132 = 15887 keys a SM; 8 * ceil(64 * 4 / 128) = 16 tiles are one wave of
    # 4096 keys, the merge is 1.5 * 64 * 32 / 132 = 23 and the launches 700. They meet at P = (723) / (3.88 - 1) = 251.
    assert use(prefix=256)
    # 40 sequences read 2.42 P, one wave is P, merge and launches are 715: they meet at 502.
    assert use(n=40, prefix=512)
    assert not use(n=40, prefix=496)
    # 16 sequences read 0.97 P a SM, but one wave takes P: splitting the plain decode over all SMs wins.
    assert not use(n=16, prefix=10**6) and use(n=16, prefix=10**6, sms=66)
    # One long prefill fills its tiles already: there is nothing to share.
    assert not use_cascade_attention(4096, [4096] + [0] * 20, 32, 8, False, False, 132)
    # More sequences never turn it down.
    answers = [use(n=n) for n in range(8, 300, 4)]
    assert answers == sorted(answers) and True in answers and False in answers
    for bad, name in (
        (dict(H=30), "H"),
        (dict(K=0), "H"),
        (dict(sms=0), "num_sms"),
        (dict(prefix=-1), "common_prefix_len"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            use(**bad)
    with pytest.raises(ValueError, match=r"^query_lens: expected"):
        use(q=-1)


def model(x: Tensor, metadata: AttentionMetadata) -> Tensor:
    x = x[metadata.positions] + metadata.slot_mapping[:, None] + metadata.block_tables[0, 0]
    return x * metadata.seq_lens.sum() + metadata.query_start_loc[-1]


def reads_an_integer(x: Tensor, metadata: AttentionMetadata) -> Tensor:
    return model(x, metadata) * metadata.max_seq_len


def bucketed_steps(builder: AttentionMetadataBuilder):
    for n, q, c in [(3, 1, 5), (6, 5, 7), (0, 1, 1), (1, 1, 0), (5, 3, 20), (1, 30, 2)]:
        yield builder.build(0, batch_of([q] * n, [c] * n), num_reqs=MAX_SEQS, num_tokens=MAX_TOKENS)


@pytest.mark.parametrize(("function", "compiles"), [(model, 1), (reads_an_integer, 6)])
@pytest.mark.parametrize("num_staging_buffers", [0, 2])
def test_metadata_does_not_recompile_within_a_bucket(function, compiles, num_staging_buffers):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
    x = torch.randn(64, 3)
    for metadata in bucketed_steps(builder_of(unused_block_id=0, num_staging_buffers=num_staging_buffers)):
        assert torch.equal(compiled(x, metadata), function(x, metadata))
    assert counter.frame_count == compiles


def test_metadata_is_a_pytree_of_leaves():
    builder = builder_of()
    metadata = builder.build(8, Batch([2] * 3, [8] * 3, SHARED))
    leaves, spec = pytree.tree_flatten(metadata)
    assert [leaf for leaf in leaves if not isinstance(leaf, Tensor)] == [3, 6, 2, 10, 8]
    assert len(leaves) == 17  # 13 fields, the last of which has 5
    other = pytree.tree_flatten(builder.build(4, Batch([1] * 2, [9] * 2, SHARED[:2])))[1]
    assert spec == other
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is AttentionMetadata and vars(again.cascade) == vars(metadata.cascade)
    assert {name: id(value) for name, value in vars(again).items() if name != "cascade"} == {
        name: id(value) for name, value in vars(metadata).items() if name != "cascade"
    }


def test_metadata_is_exported_saved_and_loaded():
    class Model(nn.Module):
        def forward(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
            return model(x, metadata)

    first, *others = bucketed_steps_copied()
    dynamic = [torch.export.Dim.DYNAMIC if isinstance(leaf, int) else None for leaf in pytree.tree_leaves(first)]
    x = torch.randn(64, 3)
    exported = torch.export.export(Model(), (x, first), dynamic_shapes=(None, dynamic))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for metadata in others:
        assert torch.equal(loaded(x, metadata), model(x, metadata))


def bucketed_steps_copied() -> list[AttentionMetadata]:
    """Steps that outlive the next build, with the very tensors of the builder in the first."""
    steps = [copy.deepcopy(metadata) for metadata in bucketed_steps(builder_of(unused_block_id=0))]
    return [next(bucketed_steps(builder_of(unused_block_id=0))), *steps]


@given(
    query_lens=st.lists(st.integers(0, 6), max_size=MAX_SEQS), threshold=st.integers(0, 4), padding=st.integers(0, 3)
)
@settings(max_examples=150, deadline=None)
def test_split_and_reorder(query_lens, threshold, padding):
    batch = batch_of(query_lens, list(range(len(query_lens))))
    builder = builder_of()
    is_decode = [q <= threshold for q in query_lens]
    ordered = is_decode == sorted(is_decode, reverse=True)
    S = min(len(query_lens) + padding, MAX_SEQS)
    metadata = builder.build(0, batch, num_reqs=S)
    if ordered:
        decodes, prefills = ([q for q in query_lens if (q <= threshold) is side] for side in (True, False))
        expected = len(decodes), len(prefills), sum(decodes), sum(prefills)
        assert split_decodes_and_prefills(metadata, threshold) == expected
    else:
        with pytest.raises(ValueError, match=r"metadata: expected requests of at most decode_threshold"):
            split_decodes_and_prefills(metadata, threshold)

    rows = list(zip(query_lens, batch.num_computed_tokens.tolist(), batch.block_ids.tolist(), strict=True))
    assert reorder_batch_to_split_decodes_and_prefills(batch, threshold) is not ordered
    reordered = zip(
        batch.query_lens.tolist(), batch.num_computed_tokens.tolist(), batch.block_ids.tolist(), strict=True
    )
    assert sorted(reordered) == sorted(rows)
    metadata = builder.build(0, batch, num_reqs=S)
    assert split_decodes_and_prefills(metadata, threshold)[0] == sum(is_decode)
    assert not reorder_batch_to_split_decodes_and_prefills(batch, threshold)


def fewest_swaps(is_decode: tuple[bool, ...]) -> int:
    """By breadth-first search over all arrangements."""
    goal = tuple(sorted(is_decode, reverse=True))
    seen, reached = {is_decode}, 0
    frontier = seen
    while goal not in seen:
        following = set()
        for each in frontier:
            for i, j in itertools.combinations(range(len(each)), 2):
                swapped = list(each)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                following.add(tuple(swapped))
        frontier = following - seen
        seen = seen | frontier
        reached += 1
    return reached


@pytest.mark.parametrize("n", range(7))
def test_reordering_takes_the_fewest_swaps(n):
    for is_decode in itertools.product([False, True], repeat=n):
        swaps = swaps_to_split_decodes_and_prefills([1 if each else 5 for each in is_decode])
        assert len(swaps) == fewest_swaps(is_decode)
        arranged = list(is_decode)
        for i, j in swaps:
            assert i < j
            arranged[i], arranged[j] = arranged[j], arranged[i]
        assert arranged == sorted(arranged, reverse=True)


def test_reordering_moves_any_object_that_can_swap():
    class Engine:
        def __init__(self):
            self.names, self.query_lens = ["long", "a", "longer", "b"], [9, 1, 10, 1]

        def swap(self, i: int, j: int) -> None:
            for rows in (self.names, self.query_lens):
                rows[i], rows[j] = rows[j], rows[i]

    engine = Engine()
    assert reorder_batch_to_split_decodes_and_prefills(engine)
    assert engine.names == ["b", "a", "longer", "long"] and engine.query_lens == [1, 1, 10, 9]


def test_virtual_batches_worked_example():
    virtual = make_local_attention_virtual_batches(4, [4, 10, 5], [6, 17, 9], torch.arange(30).view(3, 10), 2)
    assert virtual.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert virtual.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    expected = [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    assert virtual.block_tables.tolist() == expected
    assert {virtual.query_lens.dtype, virtual.seq_lens.dtype} == {torch.int32}


@pytest.mark.parametrize("device", DEVICES)
@given(
    data=st.data(),
    n=st.integers(0, 4),
    block_size=st.sampled_from([1, 2, 3]),
    blocks_per_chunk=st.integers(1, 4),
    padding=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_virtual_batches_equal_attention_chunk(device, data, n, block_size, blocks_per_chunk, padding):
    chunk = block_size * blocks_per_chunk
    seq_lens = [data.draw(st.integers(0, 20)) for _ in range(n)]
    query_lens = [data.draw(st.integers(0, length)) for length in seq_lens]
    columns = -(-max(seq_lens, default=0) // block_size) + data.draw(st.integers(0, 1))
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm((n + padding) * columns, generator=generator).view(n + padding, columns).int()
    for row, length in zip(tables, seq_lens, strict=False):
        row[-(-length // block_size) :] = 10**9  # must not be read
    T = sum(query_lens)
    cache = torch.randn(max(tables.numel(), 1), 2, block_size, 1, 4, generator=generator)
    query = torch.randn(T, 2, 4, generator=generator, dtype=torch.float64)

    def starts(lens: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)

    expected = reference.paged_attention(
        query, cache, tables[:n], torch.tensor(seq_lens), starts(query_lens), 0.5, attention_chunk=chunk
    )
    lens = torch.tensor(seq_lens + [99] * padding, dtype=torch.int64)
    virtual = make_local_attention_virtual_batches(chunk, query_lens, lens, tables.to(device), block_size)
    assert virtual.block_tables.shape == (len(virtual.seq_lens), blocks_per_chunk)
    assert (virtual.block_tables.dtype, virtual.block_tables.device) == (torch.int32, torch.device(device))
    assert all(0 < q <= length <= chunk for q, length in zip(virtual.query_lens, virtual.seq_lens, strict=True))
    got = reference.paged_attention(
        query, cache, virtual.block_tables.cpu(), virtual.seq_lens, starts(virtual.query_lens.tolist()), 0.5
    )
    torch.testing.assert_close(got, expected)


BAD_CHUNKS = {
    "chunk": ((3, [1], [1], torch.zeros(1, 4), 2), r"^chunk: expected a positive multiple of block_size = 2, got 3"),
    "no chunk": ((0, [1], [1], torch.zeros(1, 4), 2), r"^chunk: .* got 0"),
    "block size": ((4, [1], [1], torch.zeros(1, 4), 0), r"^block_size: .* got 0"),
    "short sequence": ((4, [1, 3], [1, 2], torch.zeros(2, 4), 2), r"^seq_lens: .* 3 query tokens of request 1, got 2"),
    "missing length": ((4, [1, 3], [1], torch.zeros(2, 4), 2), r"^seq_lens: .* the 2 requests .* got 1"),
    "negative": ((4, [-1], [1], torch.zeros(2, 4), 2), r"^query_lens: .* got -1 for request 0"),
    "missing row": ((4, [1, 3], [1, 3], torch.zeros(1, 4), 2), r"^block_tables: expected \[S >= 2, M\]"),
    "missing columns": ((4, [1], [9], torch.zeros(1, 4), 2), r"^block_tables: expected 5 columns .* 9 tokens, got 4"),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_chunks(name):
    arguments, message = BAD_CHUNKS[name]
    with pytest.raises(ValueError, match=message):
        make_local_attention_virtual_batches(*arguments)


def caches() -> dict[str, tuple[Tensor, Tensor | None]]:
    K, D, blocks = 3, 8, 16
    forms = {
        str(layout): (allocate_kv_cache(layout, blocks, B, K, D, torch.float16), None)
        for layout in (Layout.NHD, Layout.HND, Layout.INTERLEAVED)
    }
    forms["plane first"] = torch.zeros(2, blocks, B, K, D).transpose(0, 1), None
    forms["separate"] = torch.zeros(blocks, B, K, D), torch.zeros(blocks, B, K, 16)
    flat = torch.zeros(kv_cache_shape(Layout.X_PACKED, blocks, B, K, D), dtype=torch.bfloat16)
    forms["x-packed"] = split_kv_cache(flat, K, D)
    forms["a slice"] = torch.zeros(blocks + 5, 2, B, K, D, dtype=torch.uint8)[5:], None
    return forms


@pytest.mark.parametrize("form", caches())
@given(lens=st.lists(st.integers(0, 5 * B), max_size=4), padding=st.integers(0, 2), data=st.data())
@settings(max_examples=25, deadline=None)
def test_block_ids_from_addresses(form, lens, padding, data):
    kv_cache, value_cache = caches()[form]
    junk = st.sampled_from([0, -1, 2**63 - 1, -(2**63), kv_cache.data_ptr() + 1])
    addresses = [[data.draw(junk) for _ in range(5)] for _ in range(len(lens) + padding)]
    expected = [[0] * 5 for _ in addresses]
    for s, length in enumerate(lens):
        for column in range(-(-length // B)):
            block = data.draw(st.integers(0, 15))
            addresses[s][column] = kv_cache[block].data_ptr()
            expected[s][column] = block
    table = torch.tensor(addresses, dtype=torch.int64).view(len(addresses), 5)
    got = block_ids_from_addresses(table, lens, kv_cache, value_cache=value_cache)
    assert got.tolist() == expected and got.dtype == torch.int32

    needed = [(s, column) for s, length in enumerate(lens) for column in range(-(-length // B))]
    if needed:
        s, column = data.draw(st.sampled_from(needed))
        size = kv_cache.stride(0) * kv_cache.element_size()
        off = data.draw(st.sampled_from([1, -1, kv_cache.element_size(), 16 * size, -16 * size, size // 2]))
        table[s, column] += off
        with pytest.raises(
            ValueError, match=rf"block_tables: expected the start of .* 16 blocks .* at \[{s}, {column}\]"
        ):
            block_ids_from_addresses(table, lens, kv_cache, value_cache=value_cache)


def test_bad_addresses():
    cache = torch.zeros(4, 2, B, 1, 8)
    table = torch.full((2, 2), cache.data_ptr())
    with pytest.raises(ValueError, match=r"seq_lens: expected at most one for each of the 2 rows, got 3"):
        block_ids_from_addresses(table, [1, 1, 1], cache)
    with pytest.raises(ValueError, match=r"block_tables: expected 3 columns .* 9 tokens, got 2"):
        block_ids_from_addresses(table, [9], cache)
    with pytest.raises(ValueError, match=r"seq_lens: .* got -1 for request 0"):
        block_ids_from_addresses(table, [-1], cache)
    with pytest.raises(ValueError, match=r"kv_cache: expected 3, 4 or 5 dimensions"):
        block_ids_from_addresses(table, [1], cache[0, 0, 0])
    with pytest.raises(ValueError, match=r"block_tables: expected the start of one of the cache's 0 blocks"):
        block_ids_from_addresses(table, [1], cache[:0])


class Attention(nn.Module):
    def __init__(self, scaling: float, **attributes):
        super().__init__()
        self.scaling = scaling
        for name, value in attributes.items():
            setattr(self, name, value)


def test_layer_hyperparameters_of_mappings_and_modules():
    model = nn.ModuleDict({"first": Attention(0.5, sliding_window=None), "norm": nn.LayerNorm(2)})
    model["second"] = Attention(0.25, sliding_window=128, attn_logit_softcapping=50.0)
    assert collect_layer_hyperparameters(model) == {
        "first": LayerHyperparameters(0, 0.0, 0.5),
        "second": LayerHyperparameters(128, 50.0, 0.25),
    }
    layers = {
        "a": {"scale": 0.5},
        "b": Attention(0.5, softcap=0.0),
        "c": {"scale": 1, "soft_cap": 30, "sliding_window": 4},
    }
    assert collect_layer_hyperparameters(layers) == {
        "a": LayerHyperparameters(0, 0.0, 0.5),
        "b": LayerHyperparameters(0, 0.0, 0.5),
        "c": LayerHyperparameters(4, 30.0, 1.0),
    }
    with pytest.raises(ValueError, match=r"layers\['b'\].scale: expected a number, got None"):
        collect_layer_hyperparameters({"a": {"scale": 1.0}, "b": {"soft_cap": 1.0}})
    with pytest.raises(ValueError, match=r"layers\['a'\].sliding_window: expected a number, got \(1, 2\)"):
        collect_layer_hyperparameters({"a": {"scale": 1.0, "sliding_window": (1, 2)}})


def test_common_layer_hyperparameters():
    same = LayerHyperparameters(0, 0.0, 0.5)
    assert common_layer_hyperparameters({"a": same, "b": LayerHyperparameters(0, 0.0, 0.5)}) == same
    layers = {"a": same, "b": LayerHyperparameters(128, 0.0, 0.5), "c": same}
    with pytest.raises(ValueError, match=r"per_layer: .* got a, c: \(0, 0.0, 0.5\); b: \(128, 0.0, 0.5\)"):
        common_layer_hyperparameters(layers)
    with pytest.raises(ValueError, match=r"per_layer: expected one layer or more, got none"):
        common_layer_hyperparameters({})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="waits only exist between a host and a device")
def test_builder_never_waits_for_the_device():
    builder = builder_of(device=GPU)
    batch = batch_of([3, 1], [9, 20])
    builder.build(0, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            metadata = builder.build(0, batch, num_reqs=4, num_tokens=8)
            builder.build_for_capture(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metadata.num_reqs == 2
