"""Metadata of several pools: each pool's tables and slots are those that a builder of that pool alone would make."""

import copy
import io
import random
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import paged_ops
from paged_ops import graphs
from paged_ops.cache import HybridCache, KVCache
from paged_ops.graphs import DecodeGraphs, build_inputs, step_builder
from paged_ops.inspection import CompileReport
from paged_ops.metadata import AttentionMetadata, AttentionMetadataBuilder, Batch, advance_decodes
from paged_ops.metadata.buffers import Sizes
from tests.graphs.imitated import ImitatedGraph, ImitatedSession
from tests.graphs.walk import LAYERS, B, D, H, K, Toy, Walk

POOLS = (40, 12, 25)  # blocks
POISON = 10**6


def builder_of(num_blocks: Any = POOLS, **options: Any) -> AttentionMetadataBuilder:
    return AttentionMetadataBuilder(4, 6, 30, 5, num_blocks=num_blocks, **options)


def random_batch(chooser: random.Random, as_tensors: bool) -> tuple[list[int], list[int], list[Any]]:
    n = chooser.randint(0, 5)
    query_lens = [chooser.choice([1, chooser.randint(0, 5)]) for _ in range(n)]
    computed = [chooser.randint(0, 14) for _ in range(n)]
    tables: list[Any] = []
    for num_blocks in POOLS:
        rows = [[chooser.randrange(num_blocks) for _ in range(5)] for _ in range(n)]
        tables.append(torch.tensor(rows, dtype=torch.int32).view(n, 5) if as_tensors else rows)
    return query_lens, computed, tables


@pytest.mark.parametrize("unused_block_id", [None, POISON])
@pytest.mark.parametrize("num_staging_buffers", [0, 1, 3])
def test_pools_equal_builders_of_one(num_staging_buffers: int, unused_block_id: int | None) -> None:
    chooser = random.Random(0)
    options: dict[str, Any] = {"num_staging_buffers": num_staging_buffers, "unused_block_id": unused_block_id}
    builder, alone = builder_of(**options), [builder_of(num_blocks, **options) for num_blocks in POOLS]
    addresses = [each.data_ptr() for each in tensors(builder.build_for_capture(6, 5))]
    for turn in range(60):
        query_lens, computed, tables = random_batch(chooser, turn % 2 == 0)
        S, T = chooser.randint(max(len(query_lens), 1), 6), chooser.randint(max(sum(query_lens), 1), 30)
        metadata = builder.build(
            0, Batch(query_lens, computed, tables[0], other_block_ids=tables[1:]), num_reqs=S, num_tokens=T
        )
        assert [each.data_ptr() for each in tensors(metadata)] == addresses
        for i, (single, table) in enumerate(zip(alone, tables, strict=True)):
            want = single.build(0, Batch(query_lens, computed, table), num_reqs=S, num_tokens=T)
            assert torch.equal(metadata.pool(i).slot_mapping, want.slot_mapping)
            if unused_block_id is None:
                for s, (q, c) in enumerate(zip(query_lens, computed, strict=True)):
                    need = -(-(q + c) // 4)
                    assert metadata.pool(i).block_tables[s, :need].tolist() == want.block_tables[s, :need].tolist()
            else:
                assert torch.equal(metadata.pool(i).block_tables, want.block_tables)
            for name in ("query_start_loc", "seq_lens", "positions"):
                assert torch.equal(getattr(metadata, name), getattr(want, name))


def tensors(metadata: AttentionMetadata) -> list[torch.Tensor]:
    assert metadata.other_pools is not None
    assert len(metadata.other_pools) == 2
    pools = [metadata.pool(i) for i in range(3)]
    return [each for pool in pools for each in (pool.block_tables, pool.slot_mapping)]


def test_a_step_of_capture_and_one_copy() -> None:
    builder = builder_of(num_staging_buffers=1)
    builder._buffers.storage.fill_(0x7F)
    metadata = builder.build_for_capture(4, 2)
    assert all(metadata.pool(i).slot_mapping.tolist() == [-1] * 8 for i in range(3))
    assert metadata.seq_lens.tolist() == [0] * 4
    assert len(builder._buffers.used(Sizes(8, 4, 4, None, False))) == 1, "one copy carries all pools"
    metadata.pool(2).block_tables.zero_()
    again = builder.build_for_capture(4, 2)
    assert again.pool(2).block_tables is metadata.pool(2).block_tables


@pytest.mark.slow
def test_advancing_writes_each_pool() -> None:
    chooser = random.Random(1)
    builder, next_builder = builder_of(), builder_of()
    rows = [[[chooser.randrange(num_blocks) for _ in range(5)] for _ in range(3)] for num_blocks in POOLS]
    for compiled in (False, True):
        torch._dynamo.reset()
        advance = torch.compile(advance_decodes, fullgraph=True, dynamic=True) if compiled else advance_decodes
        computed = [2, 7, 11]
        metadata = builder.build(
            0, Batch([1] * 3, computed, rows[0], other_block_ids=rows[1:]), num_reqs=5, num_tokens=5, lookahead=6
        )
        for step in range(1, 7):
            advance(metadata, 4)
            later = Batch([1] * 3, [c + step for c in computed], rows[0], other_block_ids=rows[1:])
            want = next_builder.build(0, later, num_reqs=5, num_tokens=5)
            for i in range(3):
                assert torch.equal(metadata.pool(i).slot_mapping, want.pool(i).slot_mapping)
            assert torch.equal(metadata.seq_lens, want.seq_lens)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: Batch([1], [0], [[1]]), "other_block_ids: expected block ids of 2 further pools, got 0"),
        (lambda: Batch([1], [0], [[1]], other_block_ids=[[[1]]]), "block ids of 2 further pools, got 1"),
        (
            lambda: Batch([1], [0], [[1]], other_block_ids=[[[1]], []]),
            "other_block_ids: expected one for each of the",
        ),
        (
            lambda: Batch([1], [0], [[1]], other_block_ids=[[[12]], [[0]]]),
            r"other_block_ids: expected ids in \[0, 12\) for all 1 blocks that request 0 needs, got 12 at \[0, 0\]",
        ),
        (
            lambda: Batch([1], [4], [[1, 2]], other_block_ids=[[[1]], [[0, 1]]]),
            "other_block_ids: expected 2 blocks for the 5 tokens",
        ),
    ],
)
def test_wrong_pools_write_nothing(batch: Any, message: str) -> None:
    builder = builder_of()
    before = builder._buffers.storage.clone()
    with pytest.raises(ValueError, match=message):
        builder.build(0, batch())
    assert torch.equal(builder._buffers.storage, before)
    with pytest.raises(ValueError, match="num_blocks: expected at least 0, got -1"):
        builder_of((4, -1))
    with pytest.raises(ValueError, match="num_blocks: expected a number for each pool"):
        builder_of(())


def test_swap_moves_the_rows_of_all_pools() -> None:
    batch = Batch([1, 2], [3, 4], [[1, 1], [2, 2]], other_block_ids=[[[3, 3], [4, 4]]])
    batch.swap(0, 1)
    assert batch.block_ids.tolist() == [[2, 2], [1, 1]]
    assert batch.other_block_ids[0].tolist() == [[4, 4], [3, 3]]


def test_metadata_of_pools_is_a_pytree_and_is_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            return x[metadata.pool(1).slot_mapping] + metadata.pool(0).slot_mapping + metadata.pool(2).slot_mapping

    batch = Batch([1, 2], [3, 4], [[1], [2, 3]], other_block_ids=[[[5], [4, 1]], [[0], [9, 8]]])
    metadata = copy.deepcopy(builder_of().build(0, batch))
    leaves, spec = pytree.tree_flatten(metadata)
    again = pytree.tree_unflatten(leaves, spec)
    assert torch.equal(again.pool(2).slot_mapping, metadata.pool(2).slot_mapping)
    x = torch.arange(100)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x, metadata)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x, metadata), Model()(x, metadata))


class ToyOfPools(Toy):
    """Its layers see 6 and 9 tokens, or one of them all."""

    def __init__(self, windows: tuple[int, ...], pool_of_layer: tuple[int, ...]) -> None:
        super().__init__()
        self.windows, self.pool_of_layer, self.turn = windows, pool_of_layer, 0

    def forward(self, input_ids, metadata, last_rows, kv_caches):
        hidden = self.embed[input_ids] + self.position[metadata.positions % len(self.position)]
        for layer in range(LAYERS):
            self.features = {"sliding_window": self.windows[layer]}
            pool = metadata.pool(self.pool_of_layer[layer])
            view = copy.copy(metadata)
            view.block_tables, view.slot_mapping = pool.block_tables, pool.slot_mapping
            hidden = hidden + self.layer(hidden, self.qkv[layer], self.out[layer], kv_caches[layer], view)
        return hidden[last_rows] @ self.head


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("windows", [(0, 6), (9, 6)])
def test_captured_steps_over_pools(windows: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random walk over pools of NaN, against the same walk on one cache that keeps everything."""
    monkeypatch.setattr(graphs.runner, "Graph", ImitatedGraph)
    monkeypatch.setattr(graphs.runner, "CaptureSession", ImitatedSession)
    sizes_of_layers = (LAYERS, 160, B, K, D)
    pools = HybridCache.for_layers(
        *sizes_of_layers, sliding_window=list(windows), num_window_blocks=64, num_host_blocks=160
    )
    keeps = KVCache(*sizes_of_layers, num_host_blocks=160)
    for layer in (*pools.layers, *keeps.layers):
        layer.fill_(torch.nan)
    sizes: dict[str, int] = dict(max_num_seqs=8, max_num_tokens=40, max_model_len=64)
    run = DecodeGraphs(ToyOfPools(windows, pools.pool_of_layer), pools, mode=mode, **sizes)
    run.capture()
    plain, inputs = ToyOfPools(windows, (0,) * LAYERS), step_builder(keeps, 8, 40, 64)
    walks = [WalkOfPools(cache, 8, 40, seed=2, longest=60) for cache in (pools, keeps)]
    results: list[torch.Tensor] = []

    def on_pools(batch: Batch, ids: torch.Tensor) -> None:
        results.append(run.replay(batch, ids).clone())

    @torch.no_grad()
    def on_one(batch: Batch, ids: torch.Tensor) -> None:
        step = build_inputs(inputs, batch, ids, batch.num_reqs, batch.num_tokens)
        results.append(plain(step.input_ids, step.metadata, step.last_rows, keeps.layers))

    most = 0
    for _ in range(120):
        results.clear()
        walks[0].step(on_pools)
        walks[1].step(on_one)
        assert walks[0].events == walks[1].events, "both caches have room for the same"
        if results:
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        most = max(most, keeps.num_used_blocks - pools.pools[-1].num_used_blocks)
    assert most > 8, "the windowed pool is smaller"
    for event in ("admit", "fork", "free", "swap_out", "swap_in", "decode", "mixed"):
        assert walks[0].events[event] > 3, walks[0].events


class WalkOfPools(Walk):
    """Prefixes are not shared, as pools find others than one cache."""

    def admit(self) -> None:
        real = self.kv_cache.admit
        self.kv_cache.admit = lambda *args: real(*args, max_cached=0)
        try:
            super().admit()
        finally:
            del self.kv_cache.admit


def test_one_compilation_serves_all_batches_over_pools() -> None:
    torch._dynamo.reset()
    windows = (0, 6)
    pools = HybridCache.for_layers(LAYERS, 64, B, K, D, sliding_window=list(windows))
    model = ToyOfPools(windows, pools.pool_of_layer)

    def step(input_ids, metadata, last_rows, kv_caches):
        hidden = model.embed[input_ids] + model.position[metadata.positions % len(model.position)]
        for layer in range(LAYERS):
            hidden = hidden + attend(model, hidden, layer, kv_caches[layer], metadata)
        return hidden[last_rows] @ model.head

    run = DecodeGraphs(
        torch.compile(step, fullgraph=True), pools, max_num_seqs=8, max_num_tokens=40, max_model_len=64, mode="NONE"
    )
    eager = DecodeGraphs(model, pools, max_num_seqs=8, max_num_tokens=40, max_model_len=64, mode="NONE")
    walk = Walk(pools, 8, 40, seed=5, longest=60)
    with CompileReport(pools.layers) as report:
        run.capture()

        def both(batch: Batch, ids: torch.Tensor) -> None:
            torch.testing.assert_close(run.replay(batch, ids), eager.replay(batch, ids), rtol=1e-4, atol=1e-4)

        for _ in range(40):
            walk.step(both)
    assert (report.graphs, report.recompiles, report.cache_copies) == (1, 0, 0), report.recompile_reasons


def attend(model: ToyOfPools, hidden: torch.Tensor, layer: int, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
    pool = metadata.pool(model.pool_of_layer[layer])
    query, key, value = (hidden @ model.qkv[layer]).view(-1, H + 2 * K, D).split([H, K, K], dim=1)
    paged_ops.reshape_and_cache(key, value, kv_cache, pool.slot_mapping)
    rows = paged_ops.paged_attention(
        query,
        kv_cache,
        pool.block_tables,
        metadata.seq_lens,
        metadata.query_start_loc,
        D**-0.5,
        sliding_window=model.windows[layer],
    )
    return rows.reshape(-1, H * D) @ model.out[layer]
