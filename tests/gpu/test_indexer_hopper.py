"""The Hopper kernel of the indexer's scores: which calls take it; on a GPU, batches against the reference."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from paged_ops import testing
from paged_ops.features import IndexOptions
from paged_ops.lowerings.gpu import indexer, indexer_hopper, selection_cluster

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
TARGET = SimpleNamespace(has_hopper_gluon=True, has_fp8_cvt=True, fp8_is_fnuz=False)
WITH_SCALES = {"stored": torch.uint8, "kv_cache_dtype": "fp8_ds_index"}
DSA = {"weights": torch.float32, "relu": True}
SERVED = {
    "64 heads": {**DSA},
    "16 heads, float16, block 128": {"heads": 16, "dtype": FP16, "B": 128, **DSA},
    "32 heads, padded": {"heads": 32, "form": "latent_padded", **DSA},
    "128 heads, weights in bfloat16": {"heads": 128, "weights": BF16},
    "sums, not causal": {"heads": 32, "causal": False},
    "a negative scale": {"scale": -0.5, **DSA},
    "fp8_ds_index": {**WITH_SCALES, **DSA},
    "fp8_ds_index, 32 heads, float16, block 128": {"heads": 32, "dtype": FP16, "B": 128, **WITH_SCALES, **DSA},
    "fp8_ds_index, 128 heads, sums": {"heads": 128, **WITH_SCALES},
    "e4m3, one scale": {"stored": E4M3, "scales": "tensor", **DSA},
    "e5m2, float16": {"stored": E5M2, "scales": "tensor", "dtype": FP16, "heads": 16, **DSA},
    "e4m3 in bytes, block 192": {"stored": torch.uint8, "kv_cache_dtype": "fp8", "B": 192, **DSA},
}
REFUSED = {
    "a number of heads": {"heads": 48},
    "a head size": {"size": 64},
    "float32": {"dtype": torch.float32},
    "float32 over fp8": {"dtype": torch.float32, "stored": E4M3},
    "a block size": {"B": 48},
    "scores per head": {"per_head": True},
    "pools": {"pool": "max", "block_size": 8},
    "local blocks": {"local_blocks": 2},
    "blocks of fp8_ds_index 12 bytes apart": {"form": "latent_padded", **WITH_SCALES},
}
# Sequences with one token and with several; tiles that are whole, and that are not; more tiles than are loaded ahead.
SEQS = {
    "decode": ((1, 1), (1, 63), (1, 64), (0, 70), (1, 65), (1, 500), (1, 1300), (1, 2), (1, 129), (1, 192), (1, 3000)),
    "one": ((1, 9000),),
    "drafts": ((3, 400), (2, 2), (4, 70), (1, 640)),
}


def case_of(name, seqs, exact=False, heads=64, size=128, dtype=BF16, stored=None, scales=None, B=64, **options):
    form, kv_cache_dtype = options.pop("form", "latent"), options.pop("kv_cache_dtype", "auto")
    cache = testing.CacheSpec(form, 1, size, size, B, dtype, stored, kv_cache_dtype, scales)
    return testing.IndexCase(name, seqs, cache, heads, tuple(options.items()), k=40, exact=exact)


def spec_of(case):
    inputs = case.inputs()
    return indexer.spec_of(*inputs.args[:3], IndexOptions(**inputs.kwargs), TARGET)


@pytest.mark.parametrize("name", SERVED)
def test_served(name):
    assert spec_of(case_of(name, SEQS["drafts"], **SERVED[name])).by_tma


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """The Triton kernel serves them."""
    assert not spec_of(case_of(name, SEQS["drafts"], **REFUSED[name])).by_tma


def test_refused_by_what_tma_cannot_address():
    inputs = case_of("", SEQS["drafts"]).inputs()
    query, cache, tables = inputs.args[:3]
    options = IndexOptions(**inputs.kwargs)

    def served(cache):
        return indexer.spec_of(query, cache, tables, options, TARGET).by_tma

    N, B, D = cache.shape
    assert served(cache)
    assert not served(cache.new_zeros(N * B * D + 1)[1:].view(N, B, D)), "an address"
    assert not served(cache.new_zeros(N, B, D + 4)[..., :D]), "rows apart"
    assert not served(cache.new_zeros(N, B * D + 8)[:, : B * D].unflatten(1, (B, D))), "blocks apart"
    assert not served(cache.new_zeros(N, B, 2 * D)[..., ::2]), "columns apart"


def test_refused_by_an_option_that_does_not_exist_yet():
    query, cache, tables = case_of("", SEQS["drafts"]).inputs().args[:3]
    spec = indexer.spec_of(query, cache, tables, IndexOptions(), TARGET)
    made_up = namedtuple(
        "Options", [*IndexOptions._fields, "later"], defaults=[*IndexOptions()._asdict().values(), 1.0]
    )
    assert indexer_hopper.applies_to(made_up(), spec, cache)
    assert not indexer_hopper.applies_to(made_up(later=0.5), spec, cache)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were asked for."""
    names, launcher_of = [], indexer.launcher_of

    def noting(kernel, *others, **options):
        names.append(kernel.__name__)
        return launcher_of(kernel, *others, **options)

    monkeypatch.setattr(indexer, "launcher_of", noting)
    return names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("name", SERVED)
def test_batches(name, seqs, exact, launched):
    """With exact numbers every entry is the reference's."""
    testing.check("select_keys", case_of(name, SEQS[seqs], exact, **SERVED[name]), GPU)
    assert "scores_hopper_kernel" in launched


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["64 heads", "fp8_ds_index"])
def test_several_groups_of_rows(name, launched, monkeypatch):
    """Rows that a workspace has no room for are scored by further launches."""
    monkeypatch.setattr(indexer, "WORKSPACE", 1 << 16)
    testing.check("select_keys", case_of(name, SEQS["decode"], True, **SERVED[name]), GPU)
    assert "scores_hopper_kernel" in launched


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("programs", [1, 3, 100])
@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("name", ["64 heads", "fp8_ds_index"])
def test_shares(name, seqs, programs, monkeypatch):
    """Programs that score the tiles of several tokens, or only a part of one."""
    monkeypatch.setattr(indexer_hopper, "programs", lambda heads, tiles, processors: programs)
    testing.check("select_keys", case_of(name, SEQS[seqs], True, **SERVED[name]), GPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shares_of_many_sequences():
    """More sequences than a program looks at together."""
    seqs = tuple((int(n % 3 != 1), 1 + n * 37 % 300) for n in range(300))
    testing.check("select_keys", case_of("", seqs, True, **SERVED["fp8_ds_index"]), GPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("programs", [2, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seqs", ["decode", "one"])
def test_selection_by_a_cluster(seqs, exact, programs, launched, monkeypatch):
    monkeypatch.setattr(selection_cluster, "MOST_PROGRAMS", programs)
    testing.check("select_keys", case_of("", SEQS[seqs], exact, **SERVED["fp8_ds_index"]), GPU)
    assert "select_in_cluster_kernel" in launched


def test_programs_of_a_list():
    """As many as have a multiprocessor each; one, where select_kernel serves."""
    target = SimpleNamespace(backend="cuda", processors=132, has_hopper_gluon=True)
    other = SimpleNamespace(backend="cuda", processors=132, has_hopper_gluon=False)
    numbers = {
        lists: selection_cluster.programs(lists, 16, True, target) for lists in (1, 16, 17, 33, 34, 66, 67, 1000)
    }
    assert numbers == {1: 8, 16: 8, 17: 4, 33: 4, 34: 2, 66: 2, 67: 1, 1000: 1}
    assert selection_cluster.programs(1, 2, True, target) == 1, "chunks of two entries"
    assert selection_cluster.programs(1, 16, False, target) == 1, "no list has more than k chunks"
    assert selection_cluster.programs(1, 16, True, other) == 1
