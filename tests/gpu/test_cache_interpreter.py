"""What the suite's cases leave open of the GPU cache ops, in Triton's interpreter: fp8 code by code, the routes of
swaps, odd strides, caches of different shapes in one launch, addresses past 2^31.

``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_cache_interpreter.py``. bfloat16 takes part where bits are
only moved: the interpreter's bfloat16 arithmetic is wrong.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from paged_ops import reference, testing
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import blocks, cache, fp8, target

pytestmark = pytest.mark.interpreter

FP8_TORCH = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
MOVED = [
    (op, case)
    for op in ("reshape_and_cache", "latent_cache_write", "gather_kv", "copy_blocks", "swap_blocks")
    for case in testing.CASES[op]
    if "bf16" in case.name and not (op == "gather_kv" and ("e4m3" in case.name or "e5m2" in case.name))
    if case.name != "to-bf16" and not (op == "gather_kv" and "rows" in case.name)
]


@pytest.mark.parametrize(("op", "case"), MOVED, ids=[f"{op}-{case.name}" for op, case in MOVED])
def test_bfloat16_is_moved(op, case):
    testing.check(op, case, "cpu", getattr(gpu, op))


def test_scales_of_latent_rows():
    """Groups of zeros, of infinities, of NaN, of the smallest and largest numbers, and every e4m3 code: as on a CPU."""
    latent, rotated = torch.randn(9, 512) * 2.0 ** torch.arange(-140, 112, 28)[:, None], torch.randn(9, 64)
    latent[1, :128], latent[2, 5], latent[3, 200], latent[4, 300] = 0.0, torch.inf, -torch.inf, torch.nan
    latent[5, 128:256] = torch.nan
    latent[6, :256] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rotated[0, :3] = torch.tensor([1 + 2**-8, 3e38, -(2.0**-133)])
    slots = torch.tensor([8, 0, 1, 2, -1, 3, 7, 5, 4])
    got, want = (torch.full((3, 3, 656), 0xFF, dtype=torch.uint8) for _ in range(2))
    gpu.latent_cache_write(latent, rotated, got, slots, kv_cache_dtype="fp8_ds_mla")
    reference.latent_cache_write(latent, rotated, want, slots, kv_cache_dtype="fp8_ds_mla")
    nan = (want[..., :512] & 0x7F) == 0x7F  # all codes of NaN are one
    assert torch.equal(nan, (got[..., :512] & 0x7F) == 0x7F)
    got[..., :512][nan], want[..., :512][nan] = 0, 0
    assert torch.equal(got, want)


# fp8 -----------------------------------------------------------------------------------------------------------------


@triton.jit
def encode_kernel(real, bits, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(bits + n, fp8.encode_fp8(tl.load(real + n), FORMAT, False))


@triton.jit
def decode_kernel(bits, real, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    tl.store(real + n, fp8.decode_fp8(tl.load(bits + n), FORMAT).to(tl.float32))


@pytest.mark.parametrize("dtype", FP8_TORCH, ids=str)
def test_every_code_is_decoded(dtype):
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    real = torch.full((256,), torch.nan)
    decode_kernel[(1,)](bits, real, fp8.FP8_FORMATS[dtype], 256)
    torch.testing.assert_close(real, bits.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


def telling_numbers(dtype):
    """Every bfloat16; every fp8 number, the halves between them, one ulp of float32 around both; and the edges."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    sorted_codes = codes[codes.isfinite()].sort().values
    halves = ((sorted_codes[1:].double() + sorted_codes[:-1].double()) / 2).float()
    edges = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 1e38, 447.9, 448.1, 464.0, 465.0, 239.9, 247.9, 248.0, 61440.0, 65536.0]
    )
    exact = torch.cat([sorted_codes, halves, edges])
    up, down = (exact.nextafter(torch.full_like(exact, side)) for side in (torch.inf, -torch.inf))
    return torch.cat([every, exact, up, down])


@pytest.mark.parametrize("dtype", FP8_TORCH, ids=str)
def test_every_rounding(dtype):
    real = telling_numbers(dtype)
    real = torch.cat([real, real.new_zeros(-len(real) % 4096)])
    bits = torch.full((len(real),), 0x55, dtype=torch.uint8)
    encode_kernel[(len(real) // 4096,)](real, bits, fp8.FP8_FORMATS[dtype], 4096)
    want = reference.quantise(real, None, dtype).view(torch.uint8)
    wrong = (bits != want).nonzero()[:5, 0]
    assert not len(wrong), [(real[n].item(), int(bits[n]), int(want[n])) for n in wrong]


@pytest.mark.parametrize("dtype", FP8_TORCH[2:], ids=str)
def test_fnuz_cache(dtype):
    """What gfx94x calls fp8: written with scales, gathered again."""
    key, value = torch.randn(9, 2, 32, dtype=torch.float16) * 3, torch.randn(9, 2, 32, dtype=torch.float16)
    key.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -1e-8, -0.0])
    scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.01, 0.03])}
    got = torch.full((2, 2, 8, 2, 32), 0x7F, dtype=torch.uint8).view(dtype)
    want = got.clone()
    slots = torch.tensor([3, -1, 0, 9, 15, 4, -7, 8, 1])
    gpu.reshape_and_cache(key, value, got, slots, **scales)
    reference.reshape_and_cache(key, value, want, slots, **scales)
    testing.assert_same_bytes("kv_cache", got, want)
    batch = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32), 10
    for a, b in zip(
        gpu.gather_kv(got, *batch, dtype=torch.float32, **scales),
        reference.gather_kv(want, *batch, dtype=torch.float32, **scales),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_uint8_is_fnuz_on_gfx94x(monkeypatch):
    key = torch.randn(4, 1, 16)
    slots = torch.arange(4)
    got, want = torch.zeros(1, 2, 4, 1, 16, dtype=torch.uint8), torch.zeros(1, 2, 4, 1, 16, dtype=torch.float8_e4m3fnuz)
    gfx942 = target.Target(key.device, target.DEFAULT, "hip", "gfx942", 304, 64 << 10)
    monkeypatch.setattr(cache, "target_of", lambda _: gfx942)
    gpu.reshape_and_cache(key, key, got, slots, kv_cache_dtype="fp8")
    reference.reshape_and_cache(key, key, want, slots)
    assert torch.equal(got, want.view(torch.uint8))


# Writes with odd strides ---------------------------------------------------------------------------------------------


def strided(memory, shape, order, dtype, step=1):
    """NaN in this shape, whose dimensions lie in memory in the given order with gaps of ``step`` elements."""
    storage = memory.nan((*(shape[n] for n in order), step), dtype)[..., 0]
    return storage.permute([order.index(n) for n in range(len(shape))])


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("dense_order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 1, 2, 4), (4, 1, 0, 3, 2), (1, 2, 4, 0, 3)])
def test_any_strides(order, dense_order, step):
    memory = testing.Memory("cpu")
    N, B, K, D, T = 3, 5, 2, 24, 11
    key, value = (
        strided(memory, (T, K, D), dense_order, torch.float16, step).copy_(torch.randn(T, K, D)) for _ in range(2)
    )
    got = strided(memory, (N, 2, B, K, D), order, torch.float16, step)
    want = torch.full((N, 2, B, K, D), torch.nan, dtype=torch.float16)
    slots = torch.randperm(N * B)[:T].to(torch.int32)
    gpu.reshape_and_cache(key, value, got, slots)
    reference.reshape_and_cache(key, value, want, slots)
    memory.check()
    testing.assert_same_bytes("kv_cache", got, want)
    tables, lens = torch.tensor([[2, 0], [1, 99]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    for a, b in zip(gpu.gather_kv(got, tables, lens, 12), reference.gather_kv(want, tables, lens, 12), strict=True):
        testing.assert_same_bytes("gathered", a, b)


def test_calls_of_a_kind_are_checked_as_the_first():
    """Shapes but for the tokens are looked at once; what varies inside a kind is looked at always."""
    for T in (5, 6, 9, 5):
        key, value = torch.randn(2, T + 3, 2, 16)
        got, slots = torch.zeros(9, 2, 4, 2, 16), torch.randperm(36)[:T]
        want = got.clone()
        gpu.reshape_and_cache(key, value, got, slots)
        reference.reshape_and_cache(key, value, want, slots)
        assert torch.equal(got, want)
    for arguments, message in (
        ((key, value[:-1], got, slots), "value: expected 8 in dimension 0"),
        ((key[:3], value[:3], got, slots), "slot_mapping: expected at most the 3 rows of key"),
        ((key, value, got, torch.tensor(3)), "slot_mapping: expected 1 dimensions"),
        ((key, value, got, slots[None]), "slot_mapping: expected 1 dimensions"),
        ((key, value, got, slots.short()), "slot_mapping: expected int64 or int32"),
        ((key, value, got.half(), slots), "kv_cache: expected the model's"),
    ):
        with pytest.raises(ValueError, match=message):
            gpu.reshape_and_cache(*arguments)
    assert torch.equal(got, want)


def test_merge_any_strides():
    memory = testing.Memory("cpu")
    shapes = (5, 3, 24), (5, 3)
    args = []
    for order in ((1, 0, 2), (2, 1, 0)):
        args.append(strided(memory, shapes[0], order, torch.float32).copy_(torch.randn(shapes[0])))
        args.append(strided(memory, shapes[1], order[:2] if max(order[:2]) < 2 else (1, 0), torch.float32))
        args[-1].copy_(torch.randn(shapes[1]))
    out, lse = gpu.merge_attention_states(*args)
    want, want_lse = reference.merge_attention_states(*(each.double() if each.dim() == 3 else each for each in args))
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_addresses_past_2_to_31(monkeypatch):
    """A cache whose last block starts beyond 2^31 elements; only the pages that are touched exist."""
    N, B, K, D = 66_000, 16, 8, 128
    kv_cache = torch.empty(N, 2, B, K, D, dtype=torch.uint8)
    assert kv_cache[-1].storage_offset() > 2**31
    key, value = torch.randn(5, K, D), torch.randn(5, K, D)
    slots = torch.tensor([N * B - 1, 0, N * B - 16, N * B - 15, N * B - 30])
    gpu.reshape_and_cache(key, value, kv_cache, slots, kv_cache_dtype="fp8")
    stored = kv_cache.view(torch.float8_e4m3fn)
    for t, slot in enumerate(slots.tolist()):
        cells = stored[slot // B, :, slot % B]
        assert torch.equal(
            cells.view(torch.uint8),
            reference.quantise(torch.stack([key[t], value[t]]), None, stored.dtype).view(torch.uint8),
        )
    tables, lens = torch.tensor([[N - 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    gathered, _ = gpu.gather_kv(kv_cache, tables, lens, 2, kv_cache_dtype="fp8", dtype=torch.float32)
    assert torch.equal(gathered, stored[N - 1, 0, :2].float())
    gpu.copy_blocks([kv_cache], torch.tensor([[N - 1, 7], [0, N - 2]]))
    assert torch.equal(kv_cache[7], kv_cache[N - 1])
    assert torch.equal(kv_cache[N - 2], kv_cache[0])


def test_a_token_that_spans_2_to_31():
    """Heads so far apart that the offset inside a token needs 64 bits."""
    N, B, K, D = 2, 4, 3, 16
    storage = torch.empty(K, 1 << 30, dtype=torch.uint8)
    kv_cache = storage[:, : N * 2 * B * D].view(K, N, 2, B, D).permute(1, 2, 3, 0, 4)
    kv_cache.fill_(0x7F)
    key, value = torch.randn(5, K, D), torch.randn(5, K, D)
    slots = torch.tensor([7, 0, -1, 5, 2])
    gpu.reshape_and_cache(key, value, kv_cache, slots, kv_cache_dtype="fp8")
    want = torch.full((N, 2, B, K, D), 0x7F, dtype=torch.uint8)
    reference.reshape_and_cache(key, value, want, slots, kv_cache_dtype="fp8")
    assert torch.equal(kv_cache, want)


# Blocks --------------------------------------------------------------------------------------------------------------


def test_caches_of_different_shapes_in_one_launch(monkeypatch):
    launches = []
    launch = blocks._launch
    monkeypatch.setattr(blocks, "_launch", lambda *args, **kwargs: launches.append(args) or launch(*args, **kwargs))
    memory = testing.Memory("cpu")
    shapes = [(9, 2, 16, 2, 32), (9, 3), (12, 5, 7), (9, 2, 8, 4, 16)]
    dtypes = [torch.float16, torch.uint8, torch.float32, torch.bfloat16]
    got = [memory.put(torch.randint(0, 99, shape).to(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    wide = memory.put(torch.randn(9, 8, 10))
    got += [wide[:, 2:5, 1::2], got[0].new_zeros(9, 0), memory.put(torch.randn(2, 9, 6)).transpose(0, 1)]
    want = [each.clone() for each in got]
    mapping = torch.tensor([[0, 5], [0, 6], [8, 1], [3, 2]])
    gpu.copy_blocks(got, mapping)
    reference.copy_blocks(want, mapping)
    memory.check()
    assert len(launches) == 1
    for a, b in zip(got, want, strict=True):
        testing.assert_same_bytes("cache", a, b)


def test_an_address_that_is_used_again():
    """Tables are kept by address, shape, stride and dtype: another tensor at an address never takes its old table."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    for shape, dtype in (
        ((8, 64), torch.uint8),
        ((16, 32), torch.uint8),
        ((8, 16), torch.float32),
        ((8, 64), torch.uint8),
    ):
        view = buffer[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
        view.copy_(torch.randint(0, 99, shape))
        want = view.clone()
        gpu.copy_blocks([view], torch.tensor([[1, 6], [0, 3]]))
        reference.copy_blocks([want], torch.tensor([[1, 6], [0, 3]]))
        assert torch.equal(view, want)


def test_runs_cover_a_block_once():
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(200):
        shape = tuple(draw(1, 5) for _ in range(draw(1, 5)))
        ends = []
        for _ in range(2):
            order = torch.randperm(len(shape), generator=generator).tolist()
            padded = [shape[n] + draw(0, 2) for n in order]
            grid = torch.arange(torch.tensor(padded).prod()).view(padded)
            ends.append(
                grid[tuple(slice(shape[n]) for n in order)].permute([order.index(n) for n in range(len(shape))])
            )
        length, starts = blocks.block_runs(shape, ends[0].stride(), ends[1].stride())
        pairs = sorted((a + n, b + n) for a, b in starts for n in range(length))
        assert pairs == sorted(zip(ends[0].flatten().tolist(), ends[1].flatten().tolist(), strict=True))


def swap_inputs(layout, dtype, num_layers=3):
    memory, spec = testing.Memory("cpu"), testing.CacheSpec(layout, 2, 16, None, 4, torch.float32, dtype)
    sides = []
    for num_blocks in (23, 17):
        caches = [each for _ in range(num_layers) for each in spec.allocate(memory, num_blocks) if each is not None]
        for each in caches:
            blocks._bits(each).random_(0, 100)
        sides.append(caches)
    runs = [(3, 0), (4, 1), (5, 2), (9, 3), (10, 5), (11, 6), (22, 16), (0, 9), (1, 8), (2, 7)]
    mapping = torch.tensor(runs)[torch.randperm(len(runs))]
    return memory, *sides, mapping


@pytest.mark.parametrize("route", ["direct", "staged to the host", "staged from the host", "mapped", "pageable"])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "plane_first", "x_packed"])
@pytest.mark.parametrize("staging_bytes", [1, 1200, 1 << 20])
def test_routes_of_swaps(route, layout, staging_bytes, monkeypatch):
    if staging_bytes != 1200 and route in ("direct", "mapped"):
        staging_bytes = 1 << 20
    memory, sources, targets, mapping = swap_inputs(layout, torch.float16)
    monkeypatch.setitem(target.target_of(torch.device("cpu")).numbers["swap_blocks"], "staging_bytes", staging_bytes)
    want = [each.clone() for each in targets]
    reference.swap_blocks(sources, want, mapping)
    here = torch.device("cpu")
    if route == "pageable":
        blocks._swap_pageable(sources, targets, mapping)
    elif route in ("direct", "mapped"):
        most = 0 if route == "direct" else 1 << 40
        monkeypatch.setitem(target.target_of(torch.device("cpu")).numbers["swap_blocks"], "direct_bytes", most)
        monkeypatch.setitem(target.target_of(torch.device("cpu")).numbers["swap_blocks"], "staged_bytes", 1 << 40)
        blocks._swap_pinned(sources, targets, mapping, here)
    else:
        to_host = route == "staged to the host"
        mapping = mapping[mapping[:, int(to_host)].argsort()]
        adjacent = mapping.diff(dim=0)[:, int(to_host)] == 1
        blocks._swap_staged(blocks._table(sources, targets, here), sources, targets, mapping, adjacent, to_host, here)
    memory.check()
    for a, b in zip(targets, want, strict=True):
        testing.assert_same_bytes("cache", a, b)


@pytest.mark.parametrize(
    ("pairs", "route"),
    [
        ([(n, n) for n in range(16)], "direct"),
        ([(15 - n, (5 * n) % 16) for n in range(16)], "staged"),
        ([(n, 2 * n) for n in range(8)], "mapped"),
    ],
)
def test_choice_of_the_route(pairs, route, monkeypatch):
    took = []
    monkeypatch.setattr(blocks, "_swap_direct", lambda *args: took.append("direct"))
    monkeypatch.setattr(blocks, "_swap_staged", lambda *args: took.append("staged"))
    monkeypatch.setattr(blocks, "_launch", lambda *args: took.append("mapped"))
    caches = torch.zeros(16, 1024), torch.zeros(16, 1024)
    for name in ("direct_bytes", "staged_bytes"):
        monkeypatch.setitem(target.target_of(torch.device("cpu")).numbers["swap_blocks"], name, 4 * 4096)
    blocks._swap_pinned([caches[0]], [caches[1]], torch.tensor(pairs), torch.device("cpu"))
    assert took == [route]


def test_values_of_a_mapping_on_the_host_are_checked():
    caches = [torch.zeros(4, 8), torch.zeros(6, 8)]
    for pairs in ([[0, 1], [2, 1]], [[0, 1], [1, 2]], [[0, 4]], [[-1, 0]]):
        with pytest.raises(ValueError, match="block_mapping"):
            gpu.copy_blocks(caches, torch.tensor(pairs))
    for pairs in ([[0, 1], [2, 1]], [[0, 6]], [[4, 0]]):
        with pytest.raises(ValueError, match="block_mapping"):
            gpu.swap_blocks(caches[:1], caches[1:], torch.tensor(pairs))
    with pytest.raises(ValueError, match="both source and destination"):
        gpu.swap_blocks(caches[:1], caches[:1], torch.tensor([[0, 1], [1, 2]]))
    assert not any(each.any() for each in caches)


def test_captures_refuse_what_a_replay_could_not_read(monkeypatch):
    monkeypatch.setattr(blocks, "capturing", lambda device: True)
    fresh = [torch.zeros(4, 77)]
    with pytest.raises(ValueError, match="kv_caches: expected a call before the capture"):
        gpu.copy_blocks(fresh, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="block_mapping: expected a call outside of a CUDA graph"):
        gpu.swap_blocks(fresh, [torch.zeros(4, 77)], torch.tensor([[0, 1]]))


def test_empty_calls():
    empty = torch.zeros(0, 2, 4, 2, 8)
    gpu.copy_blocks([], torch.zeros(0, 2, dtype=torch.int64))
    gpu.copy_blocks([empty], torch.tensor([[0, 1]]))
    gpu.swap_blocks([empty], [torch.zeros(3, 2, 4, 2, 8)], torch.tensor([[0, 1]]))
    gpu.reshape_and_cache(torch.randn(3, 2, 8), torch.randn(3, 2, 8), empty, torch.tensor([0, 1, 2]))
    key, value = gpu.gather_kv(empty, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32), 3)
    assert not key.any()
    assert not value.any()
    out, lse = gpu.merge_attention_states(*[torch.zeros(0, 4, 8), torch.zeros(0, 4)] * 2)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


def test_config_of_a_device_must_be_known(tmp_path, monkeypatch):
    (tmp_path / "cache_default.json").write_text('{"copy_blocks": {"chunk_bytes": 1}}')
    (tmp_path / "cache_some_gpu.json").write_text('{"copy_blocks": {"chunk_byte": 2}}')
    monkeypatch.setattr(target, "CONFIGS", tmp_path)
    with pytest.raises(ValueError, match=r"cache_some_gpu\.json: expected \['chunk_bytes'\] for copy_blocks"):
        target.read_numbers("Some GPU")
    (tmp_path / "cache_some_gpu.json").write_text('{"copy_blocks": {"chunk_bytes": 2}}')
    assert target.read_numbers("Some GPU") == {"copy_blocks": {"chunk_bytes": 2}}
    assert target.read_numbers("Another GPU") == {"copy_blocks": {"chunk_bytes": 1}}
