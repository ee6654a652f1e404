"""The Hopper kernel (dense.py): which calls it takes, where its copies read; mixed batches, on a GPU."""

import dataclasses
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import paged_ops
from paged_ops import layouts, masks
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec, target
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import choose, tuning
from paged_ops.lowerings.gpu.attention.hopper import consumer, dense, head_chunks, work
from paged_ops.lowerings.gpu.attention.hopper.launch import HopperLaunch, aligned_rows, contiguous_rows
from paged_ops.lowerings.gpu.attention.hopper.work import Work
from paged_ops.lowerings.gpu.attention.shared import masks as masks_of_kernels
from paged_ops.lowerings.gpu.attention.triton import prefill
from tests.gpu.batches import batch
from tests.gpu.pointers import Pointer, as_torch

N, H = 5, 8
CACHES = [
    ("NHD", 16, 2, 128), ("NHD", 128, 2, 64), ("NHD", 16, 1, 64), ("HND", 8, 4, 128), ("HND", 48, 1, 256),
    ("NHD", 16, 3, 192), ("NHD", 8, 4, 80), ("HND", 16, 3, 112), ("NHD", 64, 5, 96), ("HND", 64, 1, 80),
]  # fmt: skip


def split_cache(layout: str, B: int, K: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``key [N, B, K, 1, D]`` and ``value [N, B, K, D]`` of a cache with different numbers everywhere."""
    shape = layouts.kv_cache_shape(layout, N, B, K, D)
    numbers = torch.arange(N * 2 * B * K * D).to(torch.int16).view(torch.float16).view(shape)
    kv_cache = layouts.kv_cache_view(layout, numbers)
    paged = layouts.paged_kv(kv_cache)
    return paged.key, paged.value


def spec_of(key: torch.Tensor, value: torch.Tensor, query: torch.Tensor | None = None, **features) -> spec.Spec:
    if query is None:
        query = torch.zeros(64, H, value.shape[3], dtype=key.dtype)
    f, tables = Features(**features), torch.zeros(4, 2, dtype=torch.int32)
    sparse = None if f.block_sparse is None else masks.check_block_sparse(f.block_sparse, key.shape[1])
    out = query.dtype if f.output_scale is None else torch.float8_e4m3fn
    return spec.spec_of(query, key, value, 0, tables, sparse, f, out, True)


def takes(*cache: torch.Tensor, **given) -> bool:
    return not dense.serves(spec_of(*cache, **given), None)


def test_kernels_that_zero_counters_have_launchers_of_their_own():
    """The same split_kernel stands before this kernel, which counts its items, and before that of prefill.py."""
    of_call, T, S = spec_of(*split_cache("NHD", 16, 2, 128)), 2048, 2
    shapes = spec.Shapes(T, S, N, 2, True, spec.numbers_of(Features(), 0.1, 2, S, T))
    of_gpu = target.Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 132, 227 << 10)
    first, other = (choose.launches_of(module, of_call, of_gpu, shapes).launches[0] for module in (dense, prefill))
    assert first._launcher._kernel is other._launcher._kernel and first._launcher is not other._launcher
    assert "taken" in other._without and "taken" not in first._without


@pytest.mark.parametrize(("layout", "B", "K", "D"), CACHES)
def test_copies_read_the_blocks(layout, B, K, D):
    key, value = split_cache(layout, B, K, D)
    assert takes(key, value)
    check_copies(key, value)


def test_copies_read_keys_and_values_that_lie_apart():
    """Keys head by head, as a concatenation of their parts gives them; values beside keys' parts that are not used."""
    numbers = torch.arange(64 * N * 3 * 320).to(torch.int16).view(torch.float16)
    key = numbers[: 64 * N * 3 * 192].view(3, N * 64, 192).transpose(0, 1).unflatten(0, (N, 64)).unsqueeze(3)
    value = numbers[: 64 * N * 3 * 320].view(N, 64, 3, 320)[..., 192:]
    assert takes(key, value, query=torch.zeros(64, 3, 192, dtype=torch.float16))
    check_copies(key, value)


def check_copies(key: torch.Tensor, value: torch.Tensor) -> None:
    """Of each part of the columns, what a copy brings, by the strides of its descriptor."""
    call = spec_of(key, value, torch.zeros(64, key.shape[2], key.shape[4], dtype=key.dtype))
    shape, B, K = dense.shape_of(call, 227 << 10), key.shape[1], key.shape[2]
    page, sides = shape.page, ((key.squeeze(3), call.k_side, shape.k.parts), (value, call.v_side, shape.v.parts))
    for cache, side, parts in sides:
        rows_n, rows_head, columns_head = dense.matrix_of(side, call)
        for n, part in enumerate(parts):
            first = head_chunks.first_of(parts, n, side.size)
            descriptor = dense.describe(side, call, page, part, cache)
            box, strides = descriptor.block_shape, descriptor.strides
            assert box == [page // 8, max(part // 64, 1), 8, min(part, 64)]
            for block, kh, j in [(0, 0, 0), (N - 1, K - 1, B - page), (2, K // 2, B // page // 2 * page)]:
                at = (block * rows_n + kh * rows_head + j) // 8, 0, 0, kh * columns_head + first
                assert all(a + size <= most for a, size, most in zip(at, box, descriptor.shape, strict=True))
                offset = sum(a * stride for a, stride in zip(at, strides, strict=True))
                brought = descriptor.base.as_strided(box, strides, cache.storage_offset() + offset)
                copied = brought.transpose(1, 2).reshape(page, part).view(torch.int16)
                wanted = cache[block, j : j + page, kh, first : first + part]
                assert torch.equal(copied, wanted.contiguous().view(torch.int16))
        assert first + part == side.size


@pytest.mark.parametrize(
    ("D", "Dv", "shape"),
    [
        (64, 64, (128, 4, 2)), (128, 128, (128, 2, 2)), (256, 256, (64, 2, 1)),
        (192, 128, (128, 2, 1)), (192, 192, (64, 2, 2)), (96, 96, (128, 3, 2)), (80, 80, (128, 4, 2)),
        (112, 112, (128, 2, 2)), (256, 64, (128, 2, 1)), (512, 512, (32, 2, 1)), (512, 64, (32, 2, 1)),
    ],
)  # fmt: skip
def test_tiles_fit_shared_memory(D, Dv, shape, monkeypatch):
    """Keys of a tile, tiles of keys and values, tiles of query rows."""
    monkeypatch.setattr(dense, "TRITON", (3, 6))
    key, value = (torch.zeros(N, 16, 2, size, dtype=torch.float16) for size in (D, Dv))
    chosen = dense.shape_of(spec_of(key.unsqueeze(3), value, torch.zeros(1, H, D, dtype=torch.float16)), 227 << 10)
    assert (chosen.N, chosen.stages, chosen.slots) == shape
    used = chosen.slots * chosen.M * D + chosen.stages * chosen.N * (D + sum(chosen.v.parts))
    assert 2 * used + dense.OTHERS <= 227 << 10


@pytest.mark.parametrize(
    ("D", "H", "T", "consumers"),
    [
        (64, 32, 8192, 3),
        (64, 32, 4096, 2),
        (64, 32, 3000, 3),
        (64, 32, 700, 3),
        (64, 32, 512, 2),
        (64, 8, 8192, 2),
        (80, 32, 8192, 2),
    ],
)
def test_three_consumers_multiply_narrow_heads_where_items_fill_the_programs(D, H, T, consumers):
    key, value = (torch.zeros(N, 16, 4, D, dtype=torch.bfloat16) for _ in range(2))
    call = spec_of(key.unsqueeze(3), value, torch.zeros(1, H, D, dtype=torch.bfloat16))
    chosen = consumers if target.TRITON < (3, 9) else 2
    assert dense.consumers_of(call, SimpleNamespace(processors=132), T) == chosen
    shape = dense.shape_of(call, 227 << 10, consumers)
    assert shape.M == 64 * consumers
    assert 2 * (shape.slots * shape.M * D + shape.stages * shape.N * 2 * D) + dense.OTHERS <= 227 << 10
    # Of all threads: those of the first role have what the others leave of the 65536 registers.
    assert len(shape.registers) == (4 if consumers == 3 else 3)


@pytest.mark.parametrize(
    ("features", "short"),
    [
        ({}, False),
        ({"sliding_window": 128}, True),
        ({"sliding_window": 4096}, False),
        ({"attention_chunk": 512}, True),
        ({"attention_chunk": 8192, "sliding_window": 128}, True),
    ],
    ids=str,
)
def test_short_windows_take_two_consumers(features, short):
    key, value = (torch.zeros(N, 16, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    call = spec_of(key.unsqueeze(3), value, torch.zeros(1, 32, 64, dtype=torch.bfloat16), **features)
    numbers = spec.numbers_of(Features(**features), 0.1, 2, 1, 8192)
    assert dense.has_short_spans(call, numbers) == short


@pytest.mark.parametrize(
    ("causal", "sequences"),
    [
        (True, [(600, 600)] + [(1, 4000)] * 50 + [(3000, 3000)]),
        (True, [(1, 4000)] * 50 + [(3000, 3500)]),
        (True, [(3000, 3000), (1, 9000)]),
        (True, [(3000, 1)] + [(1, 1)] * 50),
        (False, [(3000, 3000)] + [(1, 4000)] * 50),
        (False, [(3000, 0)] + [(1, 4000)] * 50),
        (False, [(1, 4000)] * 50 + [(3000, 1400)]),
    ],
)
def test_no_item_is_passed_over(causal, sequences, monkeypatch):
    """By the code of the kernel: the programs that begin at an end of the items take its first ones, and later items
    follow these. Without causality sequences may have fewer keys than rows: a context that is spread over ranks."""
    call = spec_of(*split_cache("NHD", 16, 8, 128), torch.zeros(1, 32, 128, dtype=torch.float16), causal=causal)
    of_gpu = target.Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 132, 227 << 10)
    starts, P = [0, *itertools.accumulate(q for q, _ in sequences)], of_gpu.processors
    T, S = starts[-1], len(sequences)
    shapes = spec.Shapes(T, S, N, 2, True, spec.numbers_of(Features(causal=causal), 0.1, 2, S, T))
    _, launch, _ = choose.launches_of(dense, call, of_gpu, shapes).launches
    constants, (short,) = launch._launcher._constants, launch._more
    division = constants["DIVISION"]
    as_torch(monkeypatch)
    tensors = SimpleNamespace(
        seq_lens=Pointer(torch.tensor([n for _, n in sequences], dtype=torch.int32)),
        query_start_loc=Pointer(torch.tensor(starts, dtype=torch.int32)),
    )
    batch = SimpleNamespace(tensors=tensors, numbers=SimpleNamespace(S=S))
    few = work.light_programs(batch, short, P, call.G, division, division.rows, constants["SHAPE"].M, 4)
    begun: dict[bool, list[int]] = {False: [], True: []}
    followed = {}
    for program in range(P):
        work.gl.program_id = lambda axis, program=program: program
        reverse, start, item = work.first_item(few, P)
        begun[bool(reverse)].append(int(item))
        followed[bool(reverse)] = int(start)
    assert launch.grid(shapes.numbers) == (P, 1, 1)
    for end, start in followed.items():
        assert begun[end] == list(range(start))
    assert short == dense.SHORT


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512])
def test_tiles_are_swizzled_as_copies_are(size):
    """TMA exchanges the pieces of 16 bytes of a line of 128 by the line's number: bits 4 to 6 of an address by 7 to 9,
    or fewer of both if rows are shorter."""
    rows, group = 32, min(size, 64)
    bases = head_chunks.tile_layout(rows, size).offset_bases
    assert len(bases) == (rows * size).bit_length() - 1
    lanes = {64: 7, 32: 3, 16: 1}[group]
    for offset in range(rows * size):
        row = column = 0
        for n, (of_row, of_column) in enumerate(bases):
            if offset >> n & 1:
                row, column = row ^ of_row, column ^ of_column
        # As a box lies without exchange: groups of 8 rows, all columns of these in groups, rows, columns.
        place = 2 * (((row // 8 * (size // group) + column // group) * 8 + row % 8) * group + column % group)
        assert place ^ ((place >> 7 & lanes) << 4) == 2 * offset


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": False},
        {"sliding_window": 64},
        {"sliding_window": 64, "num_first_tokens": 4},
        {"attention_chunk": 64},
        {"soft_cap": 30.0},
        {"sinks": torch.zeros(H)},
        {"bidirectional_ranges": torch.zeros(4, 1, 2, dtype=torch.int32)},
    ],
    ids=str,
)
def test_serves(features):
    assert takes(*split_cache("NHD", 16, 2, 128), **features)


@pytest.mark.parametrize(
    "features",
    [
        {"alibi_slopes": torch.zeros(H)},
        {"block_sparse": [64, 2, 4, 0, 0, 0, 1]},
        {"output_scale": torch.ones(1)},
        {"sliding_window": 64, "num_first_tokens": 4, "attention_chunk": 64},
    ],
    ids=str,
)
def test_leaves_to_triton(features):
    assert not takes(*split_cache("NHD", 16, 2, 128), **features)


@pytest.mark.parametrize(
    ("D", "Dv", "is_served"),
    [
        *((192, 128, True), (64, 256, True), (208, 112, True), (240, 64, False), (48, 48, False), (128, 120, False)),
        *((512, 512, True), (64, 512, True), (512, 128, True), (384, 384, False)),
    ],
)
def test_head_sizes_that_are_served(D, Dv, is_served):
    key, value = torch.zeros(N, 16, 2, 1, D).half(), torch.zeros(N, 16, 2, Dv).half()
    assert takes(key, value, query=torch.zeros(64, H, D).half()) == is_served


def test_leaves_what_tma_cannot_address_to_triton():
    key, value = split_cache("NHD", 16, 2, 128)
    assert not takes(key[:, :12], value[:, :12])  # blocks of 12
    assert not takes(*(each[..., :72] for each in (key, value)))  # heads of 72, no multiple of 16
    assert not takes(key, value, query=torch.zeros(64, H, 256, dtype=key.dtype)[..., ::2])
    assert not takes(key.float(), value.float())


class Launched:
    """In place of a launcher: what Triton was asked to launch."""

    def __init__(self):
        self.by_triton = []

    def __call__(self, grid, tensors, numbers, short, *descriptors, addresses):
        assert len(descriptors) == 2 * dense.MOST_PARTS
        self.by_triton.append((tensors, addresses, [each for each in descriptors if each is not None]))


def addresses_of(tensors):
    return tuple(0 if each is None else each.data_ptr() for each in tensors)


def call_of(query, kv_cache):
    """The pointers of a call, of which only the query and the cache matter here."""
    paged = layouts.paged_kv(kv_cache)
    none = dict.fromkeys(spec.Pointers._fields)
    return spec.Pointers(**{**none, "query": query, "key_cache": paged.key, "value_cache": paged.value})


def test_later_launches_describe_the_cache_that_they_are_given():
    """A layer after the first has another cache; nothing else of a descriptor is made anew."""
    caches = [torch.zeros(N, 2, 16, 2, 128, dtype=torch.float16) for _ in range(2)]
    first, second = (call_of(torch.zeros(64, H, 128, dtype=torch.float16), each) for each in caches)
    launched = Launched()
    described = dense.descriptors(spec_of(first.key_cache, first.value_cache), 16)
    launch = HopperLaunch(launched, (1, 1, 1), (), described, more=(-1,))
    assert launch.more(addresses_of(first)) is None  # Triton looks at the first
    launch(first, spec.Numbers(*range(7)), addresses_of(first))
    (tensors, _, described), (short, *moved) = launched.by_triton[0], launch.more(addresses_of(second))
    moved = [each for each in moved if each is not None]
    bases = [each.base.data_ptr() for each in moved]
    assert short == -1
    assert [each is None for each in tensors] == [name != "query" for name in spec.Pointers._fields]
    assert bases == [second.key_cache.data_ptr(), second.value_cache.data_ptr()]
    for before, after in zip(described, moved, strict=True):
        assert {**vars(before), "base": None} == {**vars(after), "base": None}
    memory = weakref.ref(first.key_cache.untyped_storage())
    del first, caches, tensors, described, before
    launched.by_triton.clear()
    assert memory() is None  # a launch that is remembered keeps no cache alive


@pytest.mark.parametrize(("shift", "copied"), [(0, True), (1, False)], ids=["strides", "address"])
def test_query_rows_between_multiples_of_16_bytes_are_copied(shift, copied):
    kv_cache = torch.zeros(N, 2, 16, 2, 128, dtype=torch.float16)
    memory = torch.randn(64, H + 1, 136).half()
    query = (
        memory[:, :H, shift : shift + 128]
        if shift
        else memory.flatten(1)[:, 4 : H * 132 + 4].view(64, H, 132)[..., :128]
    )
    given = call_of(query, kv_cache)
    launched = Launched()
    of_call = spec_of(given.key_cache, given.value_cache, query)
    rows = contiguous_rows if copied else aligned_rows
    launch = HopperLaunch(launched, (1, 1, 1), (), dense.descriptors(of_call, 16), rows, (-1,))
    for _ in range(2):
        assert launch.more(addresses_of(given)) is None
        launch(given, spec.Numbers(*range(7)), addresses_of(given))
        tensors, addresses, _ = launched.by_triton[-1]
        assert torch.equal(tensors.query, query)
        assert tensors.query.data_ptr() % 16 == 0
        assert addresses[spec.Pointers._fields.index("query")] == tensors.query.data_ptr()
        assert tensors.query.stride() == ((H * 128, 128, 1) if copied else query.stride())


@pytest.mark.parametrize(
    "reach", [(0, 0, 0), (50, 0, 0), (0, 96, 0), (70, 64, 0), (50, 0, 5), (30, 0, 40), (3, 0, 16)], ids=str
)
@pytest.mark.parametrize(("R", "heads"), [(0, 1), (1, 2), (5, 2)])
def test_tiles_and_masks_show_what_is_seen(R, heads, reach, monkeypatch):
    """Of each tile of query rows, by the code of the kernel: which key tiles it visits, which of them without a mask,
    and what the mask keeps."""
    as_torch(monkeypatch)
    window, chunk, first = reach
    G, K, BLOCK_N, TOKENS = 4, 2, 16, 8
    sequences = [(1, 40), (100, 260), (64, 64), (0, 9), (7, 100), (150, 150), (20, 5)]
    generator = torch.Generator().manual_seed(R)
    starts = torch.tensor([0, *itertools.accumulate(q for q, _ in sequences)], dtype=torch.int32)
    lens = torch.tensor([n for _, n in sequences], dtype=torch.int32)
    ranges = torch.randint(-30, 270, (len(sequences), R, 2), generator=generator, dtype=torch.int32)
    num_tiles = int(starts[-1]) // TOKENS + len(sequences)
    done = torch.zeros(int(starts[-1]), dtype=torch.bool)
    seen = spec.Masks(True, window > 0, chunk > 0, R, first=first)
    constants = (
        SimpleNamespace(masks=seen, K=K, G=G, logits=SimpleNamespace(soft_cap=False)),
        tuning.division(0, 64),
        SimpleNamespace(M=32, N=BLOCK_N, heads=heads, warps=4),
    )
    tensors = SimpleNamespace(
        seq_lens=Pointer(lens), query_start_loc=Pointer(starts), bidirectional_ranges=Pointer(ranges)
    )
    numbers = SimpleNamespace(window=window, chunk=chunk, S=len(sequences))
    batch = SimpleNamespace(tensors=tensors, numbers=numbers)
    for at in range(num_tiles * K):
        item = work.work_item(at, Work(num_tiles, 0, 1, None, -1), batch, *constants)
        kh, s, row_start, q_len, n, first_token, count, end_tile, full_start, full_end, oldest = map(int, item)
        if count == 0 or kh:
            continue
        tokens = torch.arange(first_token, min(first_token + TOKENS, q_len))
        i = (n - q_len + tokens).int()
        want = masks.keep(
            i, torch.arange(n), 1, 1, is_causal=True, ranges=ranges[s].tolist(), sliding_window=window,
            attention_chunk=chunk, num_first_tokens=first,
        )[0]  # fmt: skip
        if (window or chunk) and want[:, first:].any():
            assert max(first, oldest) == want[:, first:].any(0).nonzero()[0] + first
        got = torch.zeros(len(i), end_tile * BLOCK_N, dtype=torch.bool)
        low, last = consumer.keys_of_rows(i, torch.tensor(s), tensors.bidirectional_ranges, numbers, seen)
        tiles = [masks_of_kernels.place_at(n, 1, oldest, seen, BLOCK_N) for n in range(end_tile - count, end_tile)]
        assert len({*map(int, tiles)}) == count
        for tile in map(int, tiles):
            j = torch.arange(tile * BLOCK_N, (tile + 1) * BLOCK_N)
            bounded = bool(window or chunk)
            masked = tile == end_tile - 1 or tile >= full_end or (bounded and tile < full_start)
            scores = torch.zeros(len(i), BLOCK_N)
            if masked:
                scores = consumer.hide(scores, low, last, j, n, seen)
            got[:, j] = scores == 0
        assert torch.equal(got[:, :n], want[:, : got.shape[1]]) and not want[:, got.shape[1] :].any()
        assert not got[:, n:].any()
        done[row_start + tokens] = True
    assert done.all()


@pytest.mark.parametrize(("K", "heads"), [(6, 6), (6, 2), (7, 1)])
def test_items_are_each_tile_of_each_head_once(K, heads, monkeypatch):
    """Some heads at a time, and of these the last tiles first."""
    as_torch(monkeypatch)
    starts, lens = (torch.tensor(each, dtype=torch.int32) for each in ([0, 40, 41, 57], [90, 9, 16]))
    tensors = SimpleNamespace(seq_lens=Pointer(lens), query_start_loc=Pointer(starts), bidirectional_ranges=None)
    constants = SimpleNamespace(masks=spec.Masks(), K=K, G=4), tuning.division(0, 64)
    num_tiles = 57 // 8 + 3
    found = []
    for item in range(num_tiles * K):
        shape, numbers = SimpleNamespace(M=32, N=16, heads=heads, warps=4), SimpleNamespace(window=0, chunk=0, S=3)
        batch = SimpleNamespace(tensors=tensors, numbers=numbers)
        given = work.work_item(item, Work(num_tiles, 0, 1, None, -1), batch, *constants, shape)
        if int(given.tiles):
            found.append((int(given.kh), int(given.s), int(given.first_token)))
    tiles = [(s, first) for s, q_len in enumerate((40, 1, 16)) for first in range(0, q_len, 8)]
    groups = [range(first, first + heads) for first in range(0, K, heads)]
    assert found == [(kh, *tile) for group in groups for tile in reversed(tiles) for kh in group]


LONG, SHORT = [(1500, 2500), (700, 700)], [(1, 4096), (2, 1), (1, 900), (3, 4000), (1, 6000), (0, 0)] * 4
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability(GPU) != (9, 0),
    reason="needs an sm_90",
)


def take_three_consumers(monkeypatch):
    """Also where two would be chosen."""
    monkeypatch.setattr(dense, "consumers_of", lambda *_: 3)
    monkeypatch.setattr(dense, "SPAN_OF_THREE", 0)


def check_against_triton(sequences, H, K, short, monkeypatch, D=128, Dv=None, **options):
    """Pairs (q_len, seq_len): the Hopper kernel has those of at most ``short`` keys; and what Triton's kernels say.

    With ``Dv`` keys and values are two caches.
    """
    blocks = [-(-n // 16) for _, n in sequences]
    tables = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
    ids = iter(torch.randperm(sum(blocks), dtype=torch.int32).tolist())
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = torch.tensor(list(itertools.islice(ids, count)), dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(q for q, _ in sequences)], dtype=torch.int32)
    lens = torch.tensor([n for _, n in sequences], dtype=torch.int32)
    kv_cache = torch.randn(sum(blocks), 2, 16, K, D, dtype=torch.bfloat16, device=GPU)
    if Dv is not None:
        kv_cache, options["value_cache"] = kv_cache[:, 0], kv_cache[:, 1, :, :, :Dv].contiguous()
    query = torch.randn(int(starts[-1]), H, D, dtype=torch.bfloat16, device=GPU)
    call = (query, kv_cache, tables.to(GPU), lens.to(GPU), starts.to(GPU), 0.1)
    bounds = []

    def noted(*given):
        bounds.extend(given[5])
        return HopperLaunch(*given)

    monkeypatch.setattr(dense, "HopperLaunch", noted)
    attention.forget()
    got, got_lse = paged_ops.paged_attention_with_lse(*call, **options)
    assert bounds == [short]
    other = dataclasses.replace(target.target_of(query.device), arch=89)  # which has no such kernel
    monkeypatch.setattr(attention, "target_of", lambda _: other)
    attention.forget()
    want, want_lse = paged_ops.paged_attention_with_lse(*call, **options)
    attention.forget()
    assert len(bounds) == 1
    assert (got.double() - want.double()).norm() <= 5e-3 * want.double().norm()
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "sequences", [LONG + SHORT, SHORT + LONG, SHORT[:9] + LONG + SHORT[9:]], ids=["last", "first", "around"]
)
def test_short_sequences_beside_long_ones(sequences, monkeypatch):
    check_against_triton(sequences, 32, 8, dense.SHORT, monkeypatch)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("sequences", "heads"),
    [
        ([(1, 4096), (2, 9000), (1, 1), (0, 0), (3, 8192)] * 12, (64, 1)),
        ([(1, 300), (1, 20000), (0, 5), (3, 77)] * 12, (71, 1)),
    ],
    ids=["64-heads", "71-heads"],
)
def test_sequences_of_many_rows(sequences, heads, monkeypatch):
    check_against_triton(sequences, *heads, dense.SHORT_OF_MANY_ROWS, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "masks",
    [
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"attention_chunk": 90},
        {"sliding_window": 100, "num_first_tokens": 20},
        {"sliding_window": 9, "num_first_tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (64, torch.float16),
        (80, torch.float16),
        (128, torch.bfloat16),
        (192, torch.bfloat16),
        (256, torch.bfloat16),
        (512, torch.bfloat16),
    ],
    ids=str,
)
def test_what_lies_before_all_rows_windows_reaches_none(D, dtype, masks, monkeypatch):
    """Blocks that a sequence gave back, say, which others fill with what they like."""
    if D == 64:
        take_three_consumers(monkeypatch)
    attention.forget()
    sequences, B = [(200, 200), (64, 500), (130, 131), (1, 300), (3, 9), (90, 180)] * 9, 16
    tables, starts, free = torch.zeros(len(sequences), 32, dtype=torch.int32), [0], 0
    hidden = []
    for row, (q, n) in zip(tables, sequences, strict=True):
        count = -(-n // B)
        row[:count] = torch.arange(free, free + count, dtype=torch.int32)
        first, chunk = n - q, masks.get("attention_chunk", 0)
        oldest = first // chunk * chunk if chunk else max(0, first - masks["sliding_window"] + 1)
        hidden.append(torch.arange(free * B + min(masks.get("num_first_tokens", 0), oldest), free * B + oldest))
        free += count
        starts.append(starts[-1] + q)
    kv_cache = torch.randn(free, B, 2, 2, D).to(dtype)
    lens = torch.tensor([n for _, n in sequences], dtype=torch.int32)
    query = torch.randn(starts[-1], 8, D).to(dtype)
    results = []
    for filling in (0.0, torch.nan, torch.inf):
        kv_cache.flatten(0, 1)[torch.cat(hidden)] = filling
        call = (query, kv_cache.transpose(1, 2), tables, lens, torch.tensor(starts, dtype=torch.int32))
        result = paged_ops.paged_attention_with_lse(*(each.to(GPU) for each in call), D**-0.5, **masks)
        results.append([each.cpu() for each in result])
    for other in results[1:]:
        assert torch.equal(results[0][0].view(torch.int16), other[0].view(torch.int16))
        assert torch.equal(results[0][1], other[1])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 300},
        {"sliding_window": 300, "num_first_tokens": 4},
        {"causal": False, "soft_cap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sizes",
    [
        (192, 128),
        (128, 64),
        (96, 64),
        (256, 128),
        (224, 208),
        *((D, None) for D in (80, 96, 112, 160, 192, 256)),
        (512, None),
        (512, 128),
        (64, 512),
    ],
    ids=str,
)
def test_head_sizes(sizes, options, monkeypatch):
    D, Dv = sizes
    check_against_triton(LONG + SHORT, 32, 8, dense.SHORT, monkeypatch, D, Dv, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 300},
        {"attention_chunk": 500},
        {"causal": False, "soft_cap": 20.0},
        {"soft_cap": 20.0},
        {"sinks": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (71, 1), (10, 2)], ids=str)
def test_three_consumers(heads, options, monkeypatch):
    if "sinks" in options:
        options = {"sinks": options["sinks"] * torch.randn(heads[0], device=GPU)}
    take_three_consumers(monkeypatch)
    short = dense.short_keys(16, 26, sum(q for q, _ in LONG + SHORT) * heads[0] // heads[1] // 128 * heads[1], 132)
    check_against_triton(LONG + SHORT, *heads, short, monkeypatch, 64, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [(48, 48), (64, 32)], ids=str)
def test_heads_in_groups(heads, monkeypatch):
    """More key/value heads than are served at a time."""
    check_against_triton([(900, 1500), (300, 300)], *heads, dense.SHORT, monkeypatch, 192, 128)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("lens", [(512, 16384), (130, 3000), (4096, 4096)], ids=str)
def test_about_one_item_a_program(lens, monkeypatch):
    """Who takes the last items: each is taken once."""
    check_against_triton([lens], 32, 8, -1 if lens[0] < 4096 else dense.SHORT, monkeypatch)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "reach", [{}, {"sliding_window": 512}, {"sliding_window": 512, "num_first_tokens": 70}], ids=str
)
@pytest.mark.parametrize(
    ("D", "heads", "short"), [(64, (8, 8), -1), (128, (32, 8), dense.SHORT), (256, (8, 4), -1)], ids=str
)
def test_ranges(D, heads, short, reach, monkeypatch):
    """Images in long prompts, padding that would open more, sequences without any."""
    if D == 64:
        take_three_consumers(monkeypatch)
    sequences = [(900, 2500), (700, 700), (1, 900), (300, 300), (64, 3000)]
    ranges = torch.zeros(len(sequences), 3, 2, dtype=torch.int32)
    ranges[0] = torch.tensor([(1700, 1956), (2200, 2456), (0, 1602)])
    ranges[1] = torch.tensor([(0, 700), (-1, 700), (300, 299)])
    ranges[2] = torch.tensor([(100, 900), (899, 2000), (0, 0)])
    ranges[4] = torch.tensor([(2000, 2960), (2990, 2999), (2950, 2970)])
    check_against_triton(sequences, *heads, short, monkeypatch, D, **reach, bidirectional_ranges=ranges.to(GPU))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("slope", [0.01, 0.06, 0.13, 2.0, -0.06], ids=str)
@pytest.mark.parametrize(
    ("D", "dtype", "options"),
    [
        (64, torch.float16, {"sinks": True}),
        (128, torch.bfloat16, {}),
        (128, torch.float16, {"sliding_window": 500}),
        (192, torch.bfloat16, {}),
        (256, torch.bfloat16, {"sinks": True}),
    ],
    ids=str,
)
def test_maxima_that_grow_from_tile_to_tile(D, dtype, options, slope, monkeypatch):
    """By less than what changes those in use, or more; of some rows of a warp, of others not."""
    if D == 64:
        take_three_consumers(monkeypatch)
    attention.forget()
    call, features, (want, want_lse) = batch(
        (32, 8), [300, 500, 1, 200], [1500, 500, 900, 1990], D, dtype=dtype, slope=slope, **options
    )
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    attention.forget()
    assert (out.double() - want).norm() <= 5e-3 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)


def test_which_sequences_are_short():
    assert dense.short_keys(16, 512, 0, 132) == -1  # a decode batch
    assert dense.short_keys(16, 512, 395, 132) == -1
    assert dense.short_keys(16, 512, 396, 132) == dense.SHORT
    assert dense.short_keys(64, 44, 0, 132) == dense.SHORT_OF_MANY_ROWS
    assert dense.short_keys(64, 43, 0, 132) == -1
