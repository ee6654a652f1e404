"""The step that one C++ function writes is the one that the torch ops write, and it writes nothing that they refuse."""

import functools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged_ops.metadata import AttentionMetadataBuilder, Batch
from paged_ops.metadata import builder as builders
from paged_ops.metadata.buffers import Staging
from paged_ops.metadata.fill import compiled

B, M, N = 16, 12, 50


@pytest.fixture(autouse=True)
def _compiler():
    assert compiled() is not None, "no C++ compiler"


def made(fills, pools=1):
    made = AttentionMetadataBuilder(B, 24, 600, M, num_blocks=[N + each for each in range(pools)], with_inputs=True)
    made._fills = made._fills and fills
    made._buffers.storage.fill_(0x77)
    return made


def random_batch(rng, pools):
    n, wide = rng.randrange(9), rng.choice([torch.int32, torch.int64])
    decodes = rng.random() < 0.5
    query_lens = [1 if decodes else rng.randrange(70) for _ in range(n)]
    computed = [rng.randrange(M * B - 75) for _ in range(n)]
    tables = []
    for pool in range(pools):
        table = torch.randint(-9, 1 << 20, (n, M + rng.randrange(3)), dtype=rng.choice([torch.int32, torch.int64]))
        for s in range(n):
            need = -(-(query_lens[s] + computed[s] + 4) // B)
            table[s, :need] = torch.randint(0, N + pool, (need,))
        tables.append(table.t().contiguous().t() if rng.random() < 0.3 else table)
    if rng.random() < 0.3:
        return Batch(query_lens, computed, tables[0], other_block_ids=tables[1:])
    lens = torch.tensor(query_lens, dtype=wide), torch.tensor(computed, dtype=rng.choice([torch.int32, torch.int64]))
    return Batch(*lens, tables[0], other_block_ids=tables[1:])


def values(metadata):
    tensors = [each for each in vars(metadata).values() if isinstance(each, torch.Tensor)]
    numbers = metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len
    return numbers, [(each.dtype, each.tolist()) for each in tensors if each.dim() == 1]


@pytest.mark.parametrize("pools", [1, 3])
def test_both_write_the_same(pools):
    rng = random.Random(pools)
    torch.manual_seed(pools)
    one, other = made(True, pools), made(False, pools)
    served = 0
    for _ in range(150):
        batch = random_batch(rng, pools)
        S = rng.choice([None, batch.num_reqs, 24])
        T = rng.choice([None, batch.num_tokens, 600])
        lookahead = rng.randrange(5)
        ids = torch.randint(1, 1000, (batch.num_tokens,)) if rng.random() < 0.5 else None
        served += one._build_at_once(batch, ids, S, T, lookahead) is not None
        options = {"num_reqs": S, "num_tokens": T, "lookahead": lookahead, "input_ids": ids}
        got, want = (builder.build(0, batch, **options) for builder in (one, other))
        assert values(got) == values(want)
        assert torch.equal(one._buffers.storage, other._buffers.storage)  # block tables, and what nobody wrote
    assert served == 150


def good():
    return {
        "query_lens": [1, 3],
        "computed": [40, 0],
        "blocks": torch.full((2, M), 7, dtype=torch.int32),
        "S": 4,
        "T": 8,
    }


BAD = {
    "a negative query": {"query_lens": [1, -3]},
    "a negative length": {"computed": [-40, 0]},
    "a length that wraps": {"computed": [2**63 - 1, 0]},
    "too long": {"computed": [M * B, 0]},
    "too long with what follows": {"computed": [M * B - 1, 0], "lookahead": 1},
    "a negative lookahead": {"lookahead": -1},
    "too many tokens": {"query_lens": [1, 601], "T": None},
    "more sequences than padded": {"S": 1},
    "more tokens than padded": {"T": 3},
    "padded too far": {"S": 25},
    "padded with too many tokens": {"T": 601},
    "a block that is needed and does not exist": {"blocks": torch.tensor([[7, 7, N], [7, 0, 0]], dtype=torch.int32)},
    "a negative block": {"blocks": torch.tensor([[7, -1, 7], [7, 0, 0]])},
    "too few blocks": {"blocks": torch.tensor([[7, 7], [7, 0]])},
    "too few ids": {"input_ids": torch.zeros(3, dtype=torch.int64)},
    "too many requests": {"query_lens": [1] * 25, "computed": [0] * 25, "blocks": torch.zeros(25, 1).int(), "S": None},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_not_written(name):
    given = {"lookahead": 0, "input_ids": None, **good(), **BAD[name]}
    batch = Batch(given["query_lens"], given["computed"], given["blocks"])
    ids, sizes = given["input_ids"], {"num_reqs": given["S"], "num_tokens": given["T"], "lookahead": given["lookahead"]}
    both = []
    for fills in (True, False):
        builder = made(fills)
        assert builder._build_at_once(batch, ids, *sizes.values()) is None
        with pytest.raises(ValueError) as error:
            builder.build(0, batch, input_ids=ids, **sizes)
        assert (builder._buffers.storage == 0x77).all()
        both.append(str(error.value))
    assert both[0] == both[1]
    assert made(True)._build_at_once(Batch([1], [5], torch.full((1, M), 7)), None, None, None, 0) is not None


@pytest.mark.parametrize(
    ("name", "number"), [("num_reqs", 4.0), ("num_tokens", "8"), ("num_tokens", True), ("lookahead", None)]
)
@pytest.mark.parametrize("fills", [True, False])
def test_numbers_that_are_no_integers(name, number, fills):
    builder = made(fills)
    batch = Batch([1, 3], [40, 0], torch.full((2, M), 7))
    with pytest.raises(ValueError, match=f"{name}: expected an integer, got '?{number}"):
        builder.build(0, batch, **{name: number})
    assert (builder._buffers.storage == 0x77).all()


def test_entries_that_no_length_needs_may_hold_anything():
    table = torch.full((2, M), 2**40)
    table[0, :3], table[1, :1] = 7, 8
    builder = made(True)
    metadata = builder.build(0, Batch([1, 3], [40, 0], table))
    assert metadata.slot_mapping.tolist() == [7 * B + 8, 8 * B, 8 * B + 1, 8 * B + 2]


def test_without_a_compiler_torch_ops_serve(monkeypatch):
    monkeypatch.setattr(builders, "compiled", lambda: None)
    builder = made(True)
    batch = Batch([1], [5], torch.full((1, M), 7))
    assert builder.build(0, batch).positions.tolist() == [5]
    assert not builder._fills


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("computed", [40, 5000])
def test_a_step_is_sent_in_one_copy(fills, computed):
    """With its token ids, and with tables of which few columns are in use, which the device spreads."""
    builder = AttentionMetadataBuilder(B, 20, 20, 8192, num_blocks=N, num_staging_buffers=2, with_inputs=True)
    builder._fills = builder._fills and fills
    n, ids = 17, torch.arange(17) + 3
    blocks = torch.randint(0, N, (n, 500), dtype=torch.int32)
    for _ in range(3):
        metadata = builder.build(0, Batch([1] * n, [computed] * n, blocks), num_reqs=20, num_tokens=20, input_ids=ids)
        input_ids, last_rows = builder.inputs(20, 20)
        assert input_ids.tolist() == [*ids.tolist(), 0, 0, 0]
        assert last_rows.tolist() == [*range(n), 16, 16, 16]
        need = -(-(computed + 1) // B)
        assert torch.equal(metadata.block_tables[:n, :need], blocks[:, :need])
    sent = [parts for staging in builder._staging for parts in staging._parts.values()]
    assert [len(parts) for parts in sent] == [2, 2], "a copy to the device, and one on it"


class LateDevice:
    """Does work later than it is told to, in its order: a copy reads what its source holds by then."""

    def __init__(self, monkeypatch):
        self.work = []
        copy = torch.Tensor.copy_

        def copy_later(target, source, non_blocking=False):
            return self.work.append(lambda: copy(target, source)) if non_blocking else copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
        monkeypatch.setattr(Staging, "sent", lambda staging, device: setattr(staging, "event", LateEvent(self)))

    def step(self):
        self.work.pop(0)()


class LateEvent:
    def __init__(self, device):
        self.device, self.is_over = device, False
        device.work.append(self.end)

    def end(self):
        self.is_over = True

    def synchronize(self):
        while not self.is_over:
            self.device.step()


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_host_that_runs_ahead_of_the_device(fills, count, monkeypatch):
    """Each step finds its own numbers on the device, however late that copies them."""
    rng, pools = random.Random(count), 2
    torch.manual_seed(count)
    sizes = {"num_blocks": [N, N + 1], "with_inputs": True, "num_staging_buffers": count}
    builder, right = AttentionMetadataBuilder(B, 24, 600, 16384, **sizes), made(False, pools)
    builder._fills = builder._fills and fills
    device, compared = LateDevice(monkeypatch), []

    def compare(metadata, inputs, wanted, tables):
        assert values(metadata) == wanted[0]
        assert [each.tolist() for each in inputs] == wanted[1]
        assert metadata.other_pools[0].slot_mapping.tolist() == wanted[2]
        for pool, given in enumerate(tables):
            for got, blocks in zip(metadata.pool(pool).block_tables.tolist(), given, strict=False):
                assert got[: len(blocks)] == blocks
        compared.append(metadata)

    for _ in range(120):
        batch = random_batch(rng, pools)
        ids = torch.randint(1, 1000, (batch.num_tokens,))
        options = {"num_reqs": rng.choice([None, 24]), "num_tokens": rng.choice([None, 600]), "input_ids": ids}
        if rng.random() < 0.1:
            with pytest.raises(ValueError, match="query_lens"):
                builder.build(0, Batch([-1], [0], [[1]], other_block_ids=[[[1]]]))
        metadata, true = builder.build(0, batch, **options), right.build(0, batch, **options)
        S, T = len(true.seq_lens), len(true.positions)
        wanted = values(true), [each.tolist() for each in right.inputs(S, T)], true.other_pools[0].slot_mapping.tolist()
        need = [-(-n // B) for n in (batch.query_lens + batch.num_computed_tokens).tolist()]
        tables = [
            [row[:blocks] for row, blocks in zip(each.tolist(), need, strict=True)]
            for each in (batch.block_ids, *batch.other_block_ids)
        ]
        device.work.append(functools.partial(compare, metadata, builder.inputs(S, T), wanted, tables))
        for _ in range(min(rng.choice([0, 0, 1, 5, 99]), len(device.work))):
            device.step()
    while device.work:
        device.step()
    assert len(compared) == 120
    compact = {sizes.width is not None for staging in builder._staging for sizes in staging._parts}
    assert compact == {True, False}


def test_a_builder_without_inputs_takes_no_ids():
    builder = AttentionMetadataBuilder(B, 24, 600, M, num_blocks=N)
    with pytest.raises(ValueError, match="input_ids"):
        builder.build(0, Batch([1], [5], torch.full((1, M), 7)), input_ids=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    "ids",
    [
        torch.ones(3, dtype=torch.int32),
        torch.ones(3),
        torch.ones(3, 2, dtype=torch.int64),
        torch.ones(6, dtype=torch.int64)[::2],
        torch.ones(3, dtype=torch.int64, device="meta"),
        torch.tensor(3),
        [1, 2, 3],
    ],
    ids=["int32", "float", "pairs", "apart", "device", "number", "list"],
)
def test_ids_that_would_be_read_wrongly(ids):
    """They are read by their address, as int64."""
    for fills in (True, False):
        builder = made(fills)
        with pytest.raises(ValueError, match="input_ids: expected a contiguous int64 tensor"):
            builder.build(0, Batch([3], [5], torch.full((1, M), 7)), input_ids=ids)
        assert (builder._buffers.storage == 0x77).all()


class Counted(TorchDispatchMode):
    """Counts the ops that are called."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_needs_few_torch_ops():
    """Each takes the host a microsecond or more: a step is some 10 µs, and 60 by torch ops."""
    counts = {}
    for fills in (True, False):
        builder = made(fills)
        batch = Batch([1] * 20, [100] * 20, torch.full((20, M), 7, dtype=torch.int32))
        builder.build(0, batch)
        with Counted() as counted:
            builder.build(0, batch, num_reqs=24, num_tokens=24)
        counts[fills] = counted.count
    assert counts[True] <= 20 and counts[False] > 40


def test_one_row_whose_stride_is_not_its_size(monkeypatch):
    """As torch 2.9 gives it: tensors of one sequence are sent whole."""
    own = torch.from_dlpack

    def with_strides_of_one(tensor):
        strides = [1 if size < 2 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        return own(tensor).as_strided(tensor.shape, strides)

    monkeypatch.setattr(torch, "from_dlpack", with_strides_of_one)
    builder = AttentionMetadataBuilder(B, 1, 20, M, num_blocks=N, num_staging_buffers=2, max_bidirectional_ranges=2)
    batch = Batch([3], [30], torch.tensor([[7, 8, 9]]), bidirectional_ranges=[[(30, 32), (32, 33)]])
    metadata = builder.build(0, batch)
    assert metadata.block_tables[0, :3].tolist() == [7, 8, 9]
    assert metadata.bidirectional_ranges.tolist() == [[[30, 32], [32, 33]]]
