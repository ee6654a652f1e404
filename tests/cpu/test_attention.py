"""The CPU lowering where the registry's cases are too small to go: several chunks and tiles, bounded memory."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged_ops
from paged_ops import BlockSparse, reference, testing
from paged_ops.lowerings.cpu import attention as cpu
from paged_ops.lowerings.cpu import fused, prepared

OP = "paged_attention_with_lse"
FEATURES = {
    "plain": {},
    "noncausal": {"causal": False},
    "window": {"sliding_window": 50},
    "window-ranges": {"sliding_window": 50, "bidirectional_ranges": torch.tensor([[(100, 300), (700, 720)]]).int()},
    "chunk": {"attention_chunk": 96},
    "cap": {"soft_cap": 5.0},
    "sparse": {"block_sparse": [*BlockSparse(32, 2, 4)]},
    "sparse-homo": {"block_sparse": [*BlockSparse(32, 1, 4, homo_head=True)]},
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Torch ops for all; three blocks of 16 tokens, two heads and 64 numbers a chunk; a few rows a tile."""
    monkeypatch.setattr(fused, "compiled", lambda: None)
    monkeypatch.setattr(cpu, "SCRATCH_BYTES", 3 * 16 * 2 * 64 * 4)
    monkeypatch.setattr(cpu, "PREFILL_BYTES", 3 * 16 * 2 * 64 * 4)
    monkeypatch.setattr(prepared.Prompts, "serves", lambda *args: False)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 8 * 48 * 5)
    monkeypatch.setattr(cpu, "MASKED_ROWS", 7)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", [case for case in testing.CASES[OP] if case.seed == 0], ids=lambda case: case.name)
def test_chunks_and_tiles_merge(case):
    testing.check(OP, case)


@pytest.fixture(params=["cpp", "torch"])
def way(request, monkeypatch):
    """Attention through the C++ function, and through torch ops."""
    if request.param == "torch":
        monkeypatch.setattr(fused, "compiled", lambda: None)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def prompt(tokens, dtype=torch.float32, H=8, K=2, D=32, B=16):
    N = -(-tokens // B)
    kv_cache = torch.randn(N, 2, B, K, D).to(dtype)
    query = torch.randn(tokens, H, D).to(dtype)
    lens, starts = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    return query, kv_cache, torch.randperm(N, dtype=torch.int32)[None], lens, starts, D**-0.5


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FEATURES)
def test_long_prompts_need_no_logits_of_all_pairs(monkeypatch, name):
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 1 << 17)
    query, *rest = prompt(1024)
    with Largest() as largest:
        cpu.paged_attention(query, *rest, **FEATURES[name])
    assert largest.elements <= max(1 << 17, query.numel())  # all pairs: 8 * 1024 * 1024


@pytest.mark.parametrize("q", [1024, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_needs_no_logits_of_all_pairs(monkeypatch, dtype, q):
    """What the flash kernel cannot tell apart is computed again, by few rows at once."""
    monkeypatch.setattr(fused, "compiled", lambda: None)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 1 << 17)
    query, kv_cache, tables, lens, _, scale = prompt(1024, dtype)
    batch = tables, lens, torch.tensor([0, q], dtype=torch.int32), scale
    before = cpu.paged_attention(query[-q:], kv_cache, *batch)
    kv_cache[tables[0, 1000 // 16], 1, 1000 % 16, 0, 3] = torch.nan
    with Largest() as largest:
        after = cpu.paged_attention(query[-q:], kv_cache, *batch)
    assert largest.elements <= max(1 << 17, query.numel(), kv_cache.numel())  # all pairs: 8 * 1024 * 1024
    torch.testing.assert_close(after[:-24], before[:-24], rtol=0.02, atol=0.01)
    assert after[-24:, :4, 3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q", [1, 30, 80])
def test_results_of_a_single_sequence(monkeypatch, dtype, q):
    """They may be the flash kernel's own: contiguous like others, and with the same bytes as in the caller's memory."""
    monkeypatch.setattr(fused, "compiled", lambda: None)
    query, kv_cache, tables, lens, _, scale = prompt(80, dtype)
    args = query[:q], kv_cache, tables, lens, torch.tensor([0, q], dtype=torch.int32), scale
    out, lse = paged_ops.paged_attention_with_lse(*args)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    given = torch.empty_like(out), torch.empty_like(lse)
    torch.ops.paged_ops.paged_attention_with_lse.out(*args, out=given[0], lse=given[1])
    for name, got, want in zip(("out", "lse"), given, (out, lse), strict=True):
        testing.assert_same_bytes(name, got, want)


@pytest.mark.parametrize("name", ["latent-long-fp16", "latent-sparse-long"])
def test_latents_are_gathered_once(monkeypatch, name):
    gathered = []
    take = cpu.take
    monkeypatch.setattr(fused, "compiled", lambda: None)
    monkeypatch.setattr(cpu, "take", lambda cells, *rest, **out: gathered.append(cells) or take(cells, *rest, **out))
    testing.check(OP, testing.case_named(OP, name))
    assert gathered
    assert all(cells.shape[-1] == 40 for cells in gathered)  # R + P: keys, and never values


def test_rows_of_one_slot_do_not_mix():
    kv_cache = torch.zeros(2, 2, 4, 2, 8)
    rows = torch.arange(64.0)[:, None, None].expand(64, 2, 8)
    paged_ops.reshape_and_cache(rows, rows, kv_cache, torch.full((64,), 5))
    assert kv_cache[1, :, 1].unique().tolist() == [63]
    assert int(kv_cache.count_nonzero()) == 2 * 2 * 8


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_negative_scale_hides_no_less(dtype):
    query, *rest, scale = prompt(100, dtype)
    mirrored = paged_ops.paged_attention_with_lse(-query, *rest, scale)
    for got, want in zip(paged_ops.paged_attention_with_lse(query, *rest, -scale), mirrored, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "case", [each for each in testing.CASES[OP] if "scale" in each.name], ids=lambda case: case.name
)
def test_a_scale_of_any_sign_and_size(case):
    testing.check(OP, case)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [1, 80])
def test_query_of_any_strides(rows):
    query, *rest = prompt(80)
    rest[3] = torch.tensor([0, rows], dtype=torch.int32)
    across = query[:rows].transpose(1, 2).contiguous().transpose(1, 2)  # the stride of D is not 1
    assert across.stride(2) != 1
    torch.testing.assert_close(paged_ops.paged_attention(across, *rest), paged_ops.paged_attention(query[:rows], *rest))


@pytest.mark.usefixtures("way")
def test_a_cache_without_blocks_is_no_keys():
    rest = torch.full((2, 3), 7, dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
    for kv_cache in (torch.empty(0, 2, 16, 2, 8), torch.empty(0, 2, 0, 2, 8)):
        call = (torch.randn(3, 4, 8), kv_cache, *rest, torch.tensor([0, 1, 3], dtype=torch.int32), 1.0)
        out, lse = paged_ops.paged_attention_with_lse(*call, sinks=torch.ones(4))
        assert not out.any()
        assert (lse == 1).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_far_inside_the_error_budget(dtype):
    query, kv_cache, *rest = prompt(80, dtype, D=64)
    for start, end in itertools.pairwise((0, 1, 5, 80)):
        call = (query[start:end], kv_cache, *rest[:2], torch.tensor([0, end - start], dtype=torch.int32), rest[3])
        got = paged_ops.paged_attention(*call).double()
        truth = reference.paged_attention(call[0].double(), *call[1:])
        plain = reference.paged_attention(*call).double()
        assert (got - truth).abs().max() <= 0.75 * (plain - truth).abs().max()


def selected_call(q_len, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    K, D, B = 2, 16, 16
    cache, query = (torch.randn(*shape, generator=generator) for shape in ((8, 2, B, K, D), (q_len, 8, D)))
    tables = torch.randperm(8, generator=generator, dtype=torch.int32)[None, : -(-n // B)]
    entries = torch.rand(q_len, K, n, generator=generator).argsort(-1)[..., :70].to(torch.int32)
    vectors = torch.tensor([n], dtype=torch.int32), torch.tensor([0, q_len], dtype=torch.int32)
    return query, cache, tables, *vectors, 0.25, entries


def test_selected_keys_have_the_same_bits_in_any_call():
    """With batch_invariant: rows one by one, and together."""
    *call, entries = selected_call(9, 100)
    whole = paged_ops.paged_attention_with_lse(*call, selected_keys=entries, batch_invariant=True)
    for row in range(9):
        query, cache, tables, _, _, scale = call
        one = (
            query[row : row + 1],
            cache,
            tables,
            *(torch.tensor(each, dtype=torch.int32) for each in ([92 + row], [0, 1])),
        )
        alone = paged_ops.paged_attention_with_lse(
            *one, scale, selected_keys=entries[row : row + 1], batch_invariant=True
        )
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))


def test_repeated_entries_are_refused_before_anything_is_written():
    *call, entries = selected_call(3, 40)
    entries[1, 1, 5] = entries[1, 1, 0]
    out = torch.full((3, 8, 16), 7.0)
    with pytest.raises(ValueError, match=r"selected_keys: expected distinct entries, .* got entry \d+ twice in row 1"):
        torch.ops.paged_ops.paged_attention.out(*call, selected_keys=entries, out=out)
    assert (out == 7).all()
