"""The matrices that other projects test their cache kernels on, on a GPU: writes, copies, swaps, merges, odd blocks.

``pytest -m gpu tests/gpu/test_peers_cache.py``. The shapes are those of vLLM's and FlashInfer's kernel tests; what is
compared is the bytes of whole caches, between guard regions. Also here is what only a GPU can show of these ops: CUDA
graphs, streams, pinned and pageable memory, two devices, the conversion instructions of fp8, caches over 2^31 elements.
"""

import itertools

import pytest
import torch

import paged_ops
from paged_ops import reference, testing
from tests.helpers.gpu import GPU, captured_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_TOKENS, NUM_HEADS = 42, 8
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


def unused(cache):
    """Fill a cache with NaN, whatever it holds."""
    cache.view(torch.uint8).fill_(testing.NAN_BYTE) if cache.itemsize == 1 else cache.fill_(torch.nan)
    return cache


def equal_bits(got, want):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    return torch.equal(got.view(kind), want.view(kind))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("form", ["nhd", "hnd", "x_packed"])
@pytest.mark.parametrize("num_blocks", [1024, 10000])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=testing.short)
def test_write_matrix(dtype, head_size, block_size, num_blocks, form, kv_cache_dtype):
    memory = testing.Memory(GPU)
    stored = None if kv_cache_dtype == "auto" else torch.uint8
    scales = None if kv_cache_dtype == "auto" else "tensor"
    spec = testing.CacheSpec(form, NUM_HEADS, head_size, None, block_size, dtype, stored, kv_cache_dtype, scales)
    kv_cache, value_cache = spec.allocate(memory, num_blocks)
    named = spec.scale_arguments(memory, torch.Generator().manual_seed(0))
    qkv = torch.randn(NUM_TOKENS, 3, NUM_HEADS, head_size, device=GPU, dtype=dtype)
    _, key, value = qkv.unbind(1)
    slots = torch.randperm(num_blocks * block_size, device=GPU)[:NUM_TOKENS]
    paged_ops.reshape_and_cache(key, value, kv_cache, slots, value_cache=value_cache, **named)
    memory.check()

    block, offset = slots // block_size, slots % block_size
    paged = paged_ops.layouts.paged_kv(kv_cache, value_cache)
    for cache, real, scale in ((paged.key, key, "k_scale"), (paged.value, value, "v_scale")):
        want = reference.quantise(real, named.get(scale), FP8.get(kv_cache_dtype, dtype))
        cells = cache[block, offset].reshape(want.shape)
        assert torch.equal(cells.view(torch.uint8), want.view(torch.uint8))
        cache[block, offset] = torch.nan if cache.is_floating_point() else testing.NAN_BYTE
    for each in (kv_cache, value_cache):  # nothing else was written
        assert each is None or equal_bits(each, unused(torch.empty_like(each)))


@pytest.mark.parametrize("block_size", [544, 1040, 1056])
@pytest.mark.parametrize("form", testing.FORMS)
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=["auto", "fp8"])
def test_blocks_that_are_no_power_of_two(stored, form, block_size):
    spec = testing.CacheSpec(form, 2, 128, None, block_size, torch.bfloat16, stored, "auto", stored and "head")
    case = testing.WriteCase("odd", spec, tokens=2100, num_blocks=4, strided=True, extra=5)
    testing.check("reshape_and_cache", case, GPU)
    seqs = ((1, 1300), (1, 0), (1, block_size), (1, 3))
    case = testing.GatherCase("odd", seqs, spec, out_dtype=torch.bfloat16)
    testing.check("gather_kv", case, GPU)
    pairs = ((0, 5), (0, 6), (3, 1), (7, 8))
    testing.check("copy_blocks", testing.BlocksCase("odd", False, spec, pairs=pairs, mapping_on_host=False), GPU)


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("num_blocks", [1024, 10000])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=testing.short)
def test_copy_matrix(dtype, head_size, block_size, num_blocks, layers):
    """256 sources, two destinations each."""
    shape = (num_blocks, 2, block_size, NUM_HEADS, head_size)
    caches = [torch.randint(0, 100, shape, device=GPU, dtype=torch.uint8).to(dtype) for _ in range(layers)]
    ids = torch.randperm(num_blocks)[: 3 * 256].view(3, 256)
    mapping = torch.stack([torch.cat([ids[0], ids[0]]), torch.cat([ids[1], ids[2]])], 1)
    for where in ("cpu", GPU):
        got = [each.clone() for each in caches]
        paged_ops.copy_blocks(got, mapping.to(where))
        for each, before in zip(got, caches, strict=True):
            want = before.clone()
            want[mapping[:, 1].to(GPU)] = before[mapping[:, 0].to(GPU)]
            assert torch.equal(each, want)


def place(where, shape, dtype):
    cache = torch.randint(0, 100, shape, dtype=torch.uint8).to(dtype)
    if where == "pinned":
        return cache.pin_memory()
    return cache if where == "pageable" else cache.to(GPU)


DIRECTIONS = [("cuda", "pinned"), ("pinned", "cuda"), ("cuda", "cuda"), ("cuda", "pageable"), ("pageable", "cuda")]


@pytest.mark.parametrize("direction", DIRECTIONS, ids="-".join)
@pytest.mark.parametrize(
    ("head_size", "block_size", "num_blocks"), [(64, 8, 1024), (80, 16, 1024), (256, 32, 1024), (64, 16, 10000)]
)
@pytest.mark.parametrize("order", ["random", "dense on the host", "runs"])
def test_swap_matrix(order, head_size, block_size, num_blocks, direction):
    """256 mappings."""
    shape = (num_blocks, 2, block_size, NUM_HEADS, head_size)
    sources, targets = ([place(where, shape, torch.bfloat16) for _ in range(2)] for where in direction)
    mapping = torch.stack([torch.randperm(num_blocks)[:256] for _ in range(2)], 1)
    if order != "random":
        mapping[:, 1] = torch.arange(256)
    if order == "runs":
        mapping[:, 0] = torch.arange(256) + 17
        mapping = mapping[torch.randperm(256)]
    before = [each.clone() for each in targets]
    paged_ops.swap_blocks(sources, targets, mapping)
    torch.cuda.synchronize(GPU)
    for src, dst, want in zip(sources, targets, before, strict=True):
        want[mapping[:, 1]] = src[mapping[:, 0]].to(want.device)
        assert torch.equal(dst, want)


@pytest.mark.parametrize("staging_bytes", [1 << 16, 1 << 26])
@pytest.mark.parametrize("direction", DIRECTIONS[:2], ids="-".join)
@pytest.mark.parametrize("route", ["direct", "staged", "mapped"])
@pytest.mark.parametrize("form", ["nhd", "hnd", "plane_first", "x_packed"])
def test_swap_routes(form, route, direction, staging_bytes, monkeypatch):
    from paged_ops.lowerings.gpu import target

    numbers = target.target_of(GPU).numbers["swap_blocks"]
    monkeypatch.setitem(numbers, "staging_bytes", staging_bytes)
    monkeypatch.setitem(numbers, "direct_bytes", 0 if route == "direct" else 1 << 40)
    monkeypatch.setitem(numbers, "staged_bytes", 0 if route == "staged" else 1 << 40)
    spec = testing.CacheSpec(form, 2, 64, None, 16, torch.float16)

    def caches(where, num_blocks):
        memory = testing.Memory("cpu")
        views = [each for _ in range(3) for each in spec.allocate(memory, num_blocks) if each is not None]
        made = []
        for view in views:
            storage = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, pin_memory=where == "pinned")
            storage.copy_(torch.randint(0, 100, view.shape))
            made.append(storage if where == "pinned" else torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=GPU).copy_(storage))  # fmt: skip
        return made

    sources, targets = caches(direction[0], 80), caches(direction[1], 90)
    want = [each.cpu().clone() for each in targets]
    together = torch.arange(20)[:, None] + torch.tensor([3, 7])
    apart = torch.arange(30)[:, None] * torch.tensor([1, 2]) + torch.tensor([40, 29])
    mapping = torch.cat([together, apart])[torch.randperm(50)]
    reference.swap_blocks([each.cpu() for each in sources], want, mapping)
    paged_ops.swap_blocks(sources, targets, mapping)
    torch.cuda.synchronize(GPU)
    for got, expected in zip(targets, want, strict=True):
        assert torch.equal(got.cpu(), expected)


def test_swaps_are_in_order_of_the_stream():
    """Out, the device blocks overwritten, and in again, without a wait in between: nothing overtakes."""
    shape = (256, 2, 16, 8, 128)
    cache, host = torch.randn(shape, device=GPU), torch.zeros(shape).pin_memory()
    want = cache.clone()
    for pairs in (torch.randperm(256).view(-1, 2), torch.arange(256).view(2, 128).T.contiguous()):
        back = pairs.flip(1)
        for _ in range(5):
            paged_ops.swap_blocks([cache], [host], pairs)
            cache[pairs[:, 0].to(GPU)] = torch.nan
            paged_ops.swap_blocks([host], [cache], back)
        torch.cuda.synchronize(GPU)
        assert torch.equal(cache, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("peers", [True, False], ids=["peers", "through a copy"])
@pytest.mark.parametrize(("source", "target"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_swap_between_two_gpus(source, target, peers, monkeypatch):
    """In order on streams of both that are busy: after what wrote the blocks, and before what reads them."""
    from paged_ops.lowerings.gpu import blocks

    if peers:
        assert blocks._reaches(torch.device(source), torch.device(target))
    else:
        monkeypatch.setattr(blocks, "_reaches", lambda *devices: False)
    shape = (300, 2, 16, 8, 64)
    content = [torch.randn(shape) for _ in range(3)]
    want = [torch.randn(shape) for _ in range(3)]
    sources, given = [torch.full(shape, torch.nan, device=source) for _ in range(3)], [c.to(source) for c in content]
    targets, before = [torch.full(shape, torch.nan, device=target) for _ in range(3)], [w.to(target) for w in want]
    mapping = torch.stack([torch.randperm(300)[:200] for _ in range(2)], 1)
    reference.swap_blocks(content, want, mapping)
    streams = [torch.cuda.Stream(source), torch.cuda.Stream(target)]
    for device in (source, target):
        torch.cuda.synchronize(device)
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        for cache, wrote, stream in ((sources, given, streams[0]), (targets, before, streams[1])):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)  # the host is long past the swap when the writes begin
                for each, value in zip(cache, wrote, strict=True):
                    each.copy_(value)
        with torch.cuda.device(0):
            paged_ops.swap_blocks(sources, targets, mapping)
        with torch.cuda.stream(streams[0]):
            for each in sources:
                each.fill_(torch.nan)
        with torch.cuda.stream(streams[1]):
            got = [each.clone() for each in targets]
    torch.cuda.synchronize(target)
    for each, expected in zip(got, want, strict=True):
        assert torch.equal(each.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_run_where_their_tensors_are():
    for op in ("reshape_and_cache", "gather_kv", "copy_blocks", "merge_attention_states"):
        testing.check(op, testing.CASES[op][0], "cuda:1")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("head_size", [32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("num_heads", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [256, 512, 613, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=testing.short)
def test_merge_matrix(dtype, tokens, num_heads, head_size):
    """A tenth of either side infinite, of both signs; some rows empty on both."""
    outs = [torch.randn(tokens, num_heads, head_size, device=GPU).to(dtype) for _ in range(2)]
    lses = [torch.randn(tokens, num_heads, device=GPU) for _ in range(2)]
    for n, infinity in itertools.product(range(2), (torch.inf, -torch.inf)):
        gone = torch.rand(tokens, num_heads, device=GPU) < 0.05
        gone[:3] |= infinity < 0
        lses[n][gone], outs[n][gone] = infinity, torch.nan
    got, got_lse = paged_ops.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    plain, _ = reference.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    truth, truth_lse = reference.merge_attention_states(outs[0].double(), lses[0], outs[1].double(), lses[1])
    largest = max(float(each.nan_to_num(0.0).abs().max()) for each in outs)
    testing.assert_close("out", got, plain, truth, largest)
    testing.assert_close("lse", got_lse, truth_lse.float(), truth_lse, largest)
    assert not got[:3].any()
    assert (got_lse[:3] == -torch.inf).all()


# What only a GPU shows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8.values(), ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.0123, 3.7, 1e-3, 2.0**-130, 2.0**120, 1e-30])
def test_every_rounding_of_the_instructions(scale, dtype):
    """Every bfloat16 and a million float32 numbers, among them all ties: the bits of the reference, any NaN for NaN."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2 * (scale or 1.0)
    near = torch.cat([ties, codes * (scale or 1.0)]).float()
    near = torch.cat([near, *(near.nextafter(torch.full_like(near, side)) for side in (torch.inf, -torch.inf))])
    drawn = torch.randn(1 << 20) * torch.exp2(torch.randint(-20, 20, (1 << 20,))) * (scale or 1.0)
    real = torch.cat([every, near, drawn.float()])
    real = torch.cat([real, real.new_zeros(-len(real) % 256)]).view(-1, 2, 128)
    T = len(real)
    cache = torch.full((-(-T // 16), 2, 16, 2, 128), 0x55, dtype=torch.uint8, device=GPU)
    named = {} if scale is None else {"k_scale": torch.tensor([scale]), "v_scale": torch.tensor([scale, scale])}
    moved = {name: value.to(GPU) for name, value in named.items()}
    name = next(name for name, each in FP8.items() if each == dtype)
    slots = torch.arange(T, device=GPU)
    paged_ops.reshape_and_cache(real.to(GPU), real.to(GPU), cache, slots, kv_cache_dtype=name, **moved)
    want = reference.quantise(real, named.get("k_scale"), dtype)
    for plane in range(2):
        got = cache[:, plane].reshape(-1, 2, 128)[:T].cpu()
        nan = want.float().isnan()
        assert torch.equal(got.view(dtype).float().isnan(), nan)
        wrong = ((got != want.view(torch.uint8)) & ~nan).nonzero()
        assert not len(wrong), [(real[tuple(n)].item(), int(got[tuple(n)])) for n in wrong[:5]]


def test_graphs_serve_any_slots_and_pairs():
    """One graph of a write, a copy and a gather, replayed with other slots, padding and blocks."""
    N, B, K, D, T = 32, 16, 2, 64, 40
    caches = [torch.zeros(N, 2, B, K, D, device=GPU) for _ in range(3)]
    key, value = torch.zeros(2, T, K, D, device=GPU).unbind(0)
    slots = torch.full((T,), -1, device=GPU)
    pairs = torch.tensor([[0, 1], [2, 3]], device=GPU)
    tables, lens = torch.zeros(2, 4, dtype=torch.int32, device=GPU), torch.zeros(2, dtype=torch.int32, device=GPU)

    def step():
        paged_ops.reshape_and_cache(key, value, caches[0], slots)
        paged_ops.copy_blocks(caches, pairs)
        return paged_ops.gather_kv(caches[0], tables, lens, 100)

    step()
    torch.cuda.synchronize(GPU)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        out = step()
    for _ in range(4):
        for cache in caches:
            cache.normal_()
        key.normal_()
        value.normal_()
        slots.copy_(torch.randperm(N * B)[:T])
        slots[::3] = -1
        pairs.copy_(torch.randperm(N)[:4].view(2, 2))
        tables.copy_(torch.randperm(N)[:8].view(2, 4))
        lens.copy_(torch.randint(0, 60, (2,)))
        want = [cache.cpu() for cache in caches]
        reference.reshape_and_cache(key.cpu(), value.cpu(), want[0], slots.cpu())
        reference.copy_blocks(want, pairs.cpu())
        gathered = reference.gather_kv(want[0], tables.cpu(), lens.cpu(), 100)
        graph.replay()
        torch.cuda.synchronize(GPU)
        for got, expected in zip((*caches, *out), (*want, *gathered), strict=True):
            assert torch.equal(got.cpu(), expected)


def test_graphs_refuse_what_a_replay_could_not_read():
    cache, host = torch.zeros(4, 1234, device=GPU), torch.zeros(4, 1234).pin_memory()
    known = torch.zeros(4, 555, device=GPU)
    mapping = torch.tensor([[0, 1]], device=GPU)
    paged_ops.copy_blocks([known], mapping)
    torch.cuda.synchronize(GPU)
    stream, graph = torch.cuda.Stream(GPU), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            with pytest.raises(ValueError, match="kv_caches: expected a call before the capture"):
                paged_ops.copy_blocks([cache], mapping)
            with pytest.raises(ValueError, match="block_mapping: expected a tensor on cuda"):
                paged_ops.copy_blocks([known], torch.tensor([[0, 1]]))
            with pytest.raises(ValueError, match="outside of a CUDA graph"):
                paged_ops.swap_blocks([cache], [host], torch.tensor([[0, 1]]))
            paged_ops.copy_blocks([known], mapping)
        finally:
            graph.capture_end()
    known[0] = 7
    graph.replay()
    assert (known[1] == 7).all()


def test_a_table_made_on_one_stream_is_ready_on_another():
    caches = [torch.randn(64, 1024, device=GPU) for _ in range(8)]
    want = [each.clone() for each in caches]
    first, second = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(first):
        torch.cuda._sleep(10_000_000)
        paged_ops.copy_blocks(caches, torch.tensor([[0, 1]]))
    with torch.cuda.stream(second):
        paged_ops.copy_blocks(caches, torch.tensor([[2, 3]]))
    torch.cuda.synchronize(GPU)
    reference.copy_blocks(want, torch.tensor([[0, 1], [2, 3]]))
    for got, expected in zip(caches, want, strict=True):
        assert torch.equal(got, expected)


def test_caches_over_2_to_31_elements():
    N, B, K, D = 70_000, 16, 8, 128
    cache = torch.zeros(N, 2, B, K, D, dtype=torch.bfloat16, device=GPU)
    assert cache.numel() > 2**31
    key, value = torch.randn(2, 64, K, D, dtype=torch.bfloat16, device=GPU).unbind(0)
    slots = torch.cat([torch.arange(32), torch.arange(N * B - 32, N * B)]).to(GPU)
    paged_ops.reshape_and_cache(key, value, cache, slots)
    paged_ops.copy_blocks([cache], torch.tensor([[N - 1, 1000], [N - 2, N - 9]]))
    tables = torch.tensor([[0, 1], [N - 2, N - 1], [N - 9, 1000]], dtype=torch.int32, device=GPU)
    lens = torch.full((3,), 32, dtype=torch.int32, device=GPU)
    got_key, got_value = paged_ops.gather_kv(cache, tables, lens, 100)
    for got, real in ((got_key, key), (got_value, value)):
        assert torch.equal(got[:64], real)
        assert torch.equal(got[64:96], real[32:])
        assert not got[96:].any()
    host = torch.zeros(4, 2, B, K, D, dtype=torch.bfloat16).pin_memory()
    paged_ops.swap_blocks([cache], [host], torch.tensor([[N - 1, 0], [0, 2]]))
    torch.cuda.synchronize(GPU)
    assert torch.equal(host[0].to(GPU), cache[N - 1])
    assert torch.equal(host[2].to(GPU), cache[0])


def test_no_sync_and_deterministic():
    T = 300
    key, value = torch.randn(2, T, 8, 128, device=GPU, dtype=torch.bfloat16).unbind(0)
    cache = torch.zeros(64, 2, 16, 8, 128, device=GPU, dtype=torch.bfloat16)
    slots, pairs = torch.randperm(1024, device=GPU)[:T], torch.randperm(64, device=GPU).view(-1, 2)
    out, lse = torch.randn(T, 8, 128, device=GPU), torch.randn(T, 8, device=GPU)
    tables = torch.arange(64, dtype=torch.int32, device=GPU).view(4, 16)
    lens = torch.full((4,), 200, dtype=torch.int32, device=GPU)
    host = torch.zeros_like(cache, device="cpu").pin_memory()

    start = torch.randn_like(cache)

    def run():
        cache.copy_(start)
        paged_ops.reshape_and_cache(key, value, cache, slots)
        paged_ops.copy_blocks([cache], pairs)
        paged_ops.copy_blocks([cache], torch.tensor([[1, 2], [3, 4]]))
        paged_ops.swap_blocks([cache], [host], torch.tensor([[1, 2], [3, 4]]))
        merged = paged_ops.merge_attention_states(out, lse, out.flip(0), lse.flip(0))
        return *paged_ops.gather_kv(cache, tables, lens, 900), *merged

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            slots[0].item()  # what a kernel's host side must not do would be seen
        for _ in range(20):
            again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(first, again, strict=True):
        assert equal_bits(a, b)
