"""The matrices of shapes on which other projects test their paged kernels: `pytest -m gpu tests/gpu/test_peers.py`.

Whatever must not be read is NaN or an id out of range, results are written into tensors full of NaN, and the truth is
the reference in float64 on the same device.
"""

import random

import pytest
import torch

from paged_ops import BlockSparse, layouts, reference, testing
from paged_ops.registry import OPS
from tests.helpers.gpu import GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cache_of(tables, lens, B, K, D, N, dtype, stored, form, generator):
    """A cache of N blocks, NaN but for the tokens that the tables give to sequences; and its keyword arguments."""
    named = {}
    if form == "x_packed":
        x = 16 // stored.itemsize
        kv_cache = torch.empty(N, K, D // x, B, x, dtype=stored, device=GPU)
        named["value_cache"] = torch.empty(N, K, D, B, dtype=stored, device=GPU)
    else:
        kv_cache = torch.empty(N, 2, B, K, D, dtype=stored, device=GPU)
    for tensor in (kv_cache, *named.values()):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    if stored.itemsize == 1:
        scale = torch.rand(1, device=GPU, generator=generator) * 0.02 + 0.01
        named |= {"k_scale": scale, "v_scale": scale * 1.5}
    j = torch.arange(max(lens), device=GPU)
    paged, largest = layouts.paged_kv(kv_cache, named.get("value_cache")), 0.0
    for s, n in enumerate(lens):
        block, offset = tables[s, j[:n] // B].long(), j[:n] % B
        for view, scale in ((paged.key, named.get("k_scale")), (paged.value, named.get("v_scale"))):
            real = torch.randn(n, K, D, device=GPU, generator=generator)
            largest = max(largest, float(real.abs().max()))
            cells = reference.quantise(real, scale, stored) if stored.itemsize == 1 else real.to(stored)
            cells = cells.view(torch.uint8) if stored.itemsize == 1 else cells
            target = view.view(torch.uint8) if stored.itemsize == 1 else view
            target[block, offset] = cells.view(n, *view.shape[2:])
    return kv_cache, named, largest


def compare(seqs, heads, D, *, B=16, N=2048, dtype=torch.bfloat16, stored=None, form="nhd", features=(), seed=0):
    """One batch of (q_len, seq_len) through paged_attention_with_lse.out, against the reference."""
    (H, K), rng = heads, random.Random(seed)
    generator = torch.Generator(GPU).manual_seed(seed)
    lens = [n for _, n in seqs]
    needed = [-(-n // B) for n in lens]
    N = max(N, sum(needed))
    ids = torch.tensor(rng.sample(range(N), sum(needed)), dtype=torch.int32)
    tables = torch.full((len(seqs), max(needed) + 1), 2**30, dtype=torch.int32)
    for s, (blocks, mine) in enumerate(zip(needed, ids.split(needed), strict=True)):
        tables[s, :blocks] = mine
    tables = tables.to(GPU)
    kv_cache, named, largest = cache_of(tables, lens, B, K, D, N, dtype, stored or dtype, form, generator)
    starts = torch.tensor([0, *(q for q, _ in seqs)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(GPU)
    query = torch.randn(int(starts[-1]), H, D, device=GPU, generator=generator).to(dtype)
    for name, value in features:
        if value is torch.randn:
            value = torch.randn(H, device=GPU, generator=generator).abs().neg().exp()
        named[name] = value
    args = (kv_cache, tables, torch.tensor(lens, dtype=torch.int32, device=GPU), starts, D**-0.5)
    out = torch.full((len(query), H, D), torch.nan, dtype=dtype, device=GPU)
    lse = torch.full((len(query), H), torch.nan, device=GPU)
    torch.ops.paged_ops.paged_attention_with_lse.out(query, *args, **named, out=out, lse=lse)
    plain = reference.paged_attention_with_lse(query, *args, **named)
    truth = reference.paged_attention_with_lse(query.double(), *args, **named)
    for name, got, near, exact in zip(("out", "lse"), (out, lse), plain, truth, strict=True):
        testing.assert_close(name, got, near, exact, largest)


@pytest.mark.parametrize("seqs", [((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011))])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("window", [0, 64, 128, 256])
@pytest.mark.parametrize("cap", [0.0, 50.0])
@pytest.mark.parametrize("N", [2048, 32768])
def test_unified_attention(seqs, heads, D, window, cap, N):
    compare(seqs, heads, D, N=N, features=(("sliding_window", window), ("soft_cap", cap)))


def prefixes(seed, count=10, longest=1024):
    rng = random.Random(seed)
    queries = [rng.randint(16, longest) for _ in range(count)]
    return tuple((q, q + rng.randint(16, longest)) for q in queries)


@pytest.mark.parametrize("heads", [(64, 64), (64, 1)])
@pytest.mark.parametrize("D", [24, 128])
@pytest.mark.parametrize("stored", [None, E4M3, E5M2])
@pytest.mark.parametrize("window", [0, 16, 2048])
@pytest.mark.parametrize("B", [32, 544, 1040, 1056])
def test_prefix_prefill(heads, D, stored, window, B):
    if B != 32 and (window == 16 or heads[1] == 64):
        count, longest = 3, 256
    else:
        count, longest = 4, 512
    compare(
        prefixes(B, count, longest),
        heads,
        D,
        B=B,
        N=64,
        dtype=torch.float16,
        stored=stored,
        features=(("sliding_window", window),),
    )


@pytest.mark.parametrize("heads", [(32, 8), (40, 40), (64, 8)])
@pytest.mark.parametrize("D", [32, 64, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(("stored", "B"), [(None, 16), (None, 32), (E4M3, 16)])
def test_paged_attention_x_packed(heads, D, alibi, stored, B):
    if stored is not None and D % 16:
        D = 128  # an x-packed fp8 cache holds multiples of 16
    rng = random.Random(D)
    seqs = tuple((1, rng.randint(1, 4096)) for _ in range(7))
    features = (("alibi_slopes", torch.randn),) if alibi else ()
    compare(seqs, heads, D, B=B, N=4, dtype=torch.float16, stored=stored, form="x_packed", features=features)


@pytest.mark.parametrize("D", [64, 112])
@pytest.mark.parametrize("heads", [(40, 40), (40, 10)])
@pytest.mark.parametrize("slide", ["query heads", "kv heads", "homogeneous"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "chunked"])
def test_block_sparse(D, heads, slide, kind):
    rng = random.Random(D)
    lens = [rng.randint(1, 4096) for _ in range(5)]
    seqs = tuple((1 if kind == "decode" else n if kind == "prefill" else min(n, 200), n) for n in lens)
    if kind == "prefill":
        seqs = seqs[:2]
    sparse = BlockSparse(64, 16, 8, homo_head=slide == "homogeneous", homo_head_group=slide == "kv heads")
    compare(seqs, heads, D, dtype=torch.bfloat16, features=(("block_sparse", list(sparse)),))


@pytest.mark.parametrize("D", [96, 128, 200, 256, 512])
@pytest.mark.parametrize(
    "features",
    [
        (),
        (("sliding_window", 100), ("soft_cap", 50.0), ("alibi_slopes", torch.randn)),
        (("block_sparse", list(BlockSparse(64, 16, 8))),),
    ],
    ids=["plain", "window-cap-alibi", "block_sparse"],
)
def test_prompts_in_float32(D, features):
    compare(((300, 300), (129, 463), (1, 1328)), (8, 2), D, dtype=torch.float32, features=features)


@pytest.mark.parametrize("D", [64, 80, 256])
@pytest.mark.parametrize("B", [8, 16, 32])
@pytest.mark.parametrize(("stored", "scales"), [(None, None), (E4M3, "tensor"), (E4M3, "head")])
@pytest.mark.parametrize("form", ["nhd", "hnd", "separate", "x_packed"])
@pytest.mark.parametrize("N", [1024, 10000])
def test_cache_write(D, B, stored, scales, form, N):
    if N == 10000 and (D, B) != (64, 8):
        N = 64  # the large cache once a form
    spec = testing.CacheSpec(form, 8, D, None, B, torch.bfloat16, stored, scales=scales)
    testing.check("reshape_and_cache", testing.WriteCase("peers", spec, tokens=42, num_blocks=N), GPU)


@pytest.mark.parametrize("direction", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize(("D", "B"), [(64, 8), (80, 16), (256, 32)])
def test_swap_blocks(direction, D, B):
    def caches(device):
        made = torch.randn(512, 2, B, 8, D, dtype=torch.bfloat16)
        return made.pin_memory() if device == "cpu" else made.to(GPU)

    src, dst = ([caches(device) for _ in range(2)] for device in direction)
    want = [each.cpu().clone() for each in dst]
    rng = random.Random(0)
    mapping = torch.tensor(list(zip(rng.sample(range(512), 256), rng.sample(range(512), 256), strict=True)))
    for a, b in zip(src, want, strict=True):
        b[mapping[:, 1]] = a.cpu()[mapping[:, 0]]
    OPS["swap_blocks"](src, dst, mapping)
    torch.cuda.synchronize(GPU)
    for got, expected in zip(dst, want, strict=True):
        testing.assert_same_bytes("dst_caches", got, expected)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("D", "B"), [(64, 8), (80, 16), (256, 32)])
def test_copy_blocks(D, B, on_device):
    caches = [torch.randn(1024, B, 8, D, dtype=torch.bfloat16, device=GPU) for _ in range(4)]
    ids = random.Random(0).sample(range(1024), 768)
    pairs = [(src, dst) for n, src in enumerate(ids[:256]) for dst in (ids[256 + 2 * n], ids[257 + 2 * n])]
    mapping = torch.tensor(pairs)
    want = [cache.clone() for cache in caches]
    for each in want:
        each[mapping[:, 1].to(GPU)] = each[mapping[:, 0].to(GPU)]
    OPS["copy_blocks"](caches, mapping.to(GPU) if on_device else mapping)
    for got, expected in zip(caches, want, strict=True):
        testing.assert_same_bytes("kv_caches", got, expected)


@pytest.mark.parametrize("tokens", [256, 512, 613, 1024, 1536, 4096])
@pytest.mark.parametrize(("H", "D"), [(4, 32), (8, 48), (16, 64), (32, 96), (64, 128), (4, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge(tokens, H, D, dtype):
    case = testing.MergeCase("peers", tokens, H, D, dtype, empty=0.33)  # both sides are empty in a ninth of the rows
    testing.check("merge_attention_states", case, GPU)
