"""Cache writes on the CPU: one C++ function, and torch ops without a compiler, with the same bytes."""

import pytest
import torch

import paged_ops
from paged_ops import testing
from paged_ops.lowerings.cpu import write

OPS = ("reshape_and_cache", "latent_cache_write")
CASES = [(op, case) for op in OPS for case in testing.CASES[op]]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    assert write.compiled() is not None, "no C++ compiler"


@pytest.fixture
def written(monkeypatch):
    """What the C++ function returned: 0 for each write that it made."""
    results, function = [], write.compiled()
    monkeypatch.setattr(write, "_prepared", {})

    def noted(*args):
        results.append(function(*args))
        return results[-1]

    monkeypatch.setattr(write, "compiled", lambda: noted)
    return results


def of_one(dtype=torch.float32):
    """Two rows for a cache of four blocks of eight tokens."""
    return torch.randn(2, 2, 2, 16, dtype=dtype).unbind(), torch.full((4, 2, 8, 2, 16), torch.nan, dtype=dtype)


@pytest.mark.parametrize(("op", "case"), CASES, ids=lambda each: getattr(each, "name", each))
def test_torch_ops_serve_everything_without_a_compiler(monkeypatch, op, case):
    monkeypatch.setattr(write, "compiled", lambda: None)
    testing.check(op, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_and_later_writes_are_one_call(written, dtype):
    (key, value), cache = of_one(dtype)
    for slots in ([0, 9], [31, -1]):
        paged_ops.reshape_and_cache(key, value, cache, torch.tensor(slots))
    assert written == [0, 0]
    cells = cache.transpose(1, 2).flatten(0, 1)  # [slots, 2, K, D]
    expected = torch.full_like(cells, torch.nan)
    expected[[0, 9]] = torch.stack((key, value), 1)
    expected[31] = torch.stack((key[0], value[0]))
    torch.testing.assert_close(cells, expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_is_left_to_torch_ops(written):
    (key, value), cache = of_one()
    cache = cache.to(torch.float8_e4m3fn)
    paged_ops.reshape_and_cache(key, value, cache, torch.tensor([0, 1]))
    assert written == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("T", [3, 700])
def test_of_rows_with_one_slot_the_last_stays(written, T, dtype):
    key, value = torch.randn(2, T, 4, 128).unbind()
    cache = torch.zeros(4, 2, 8, 4, 128)
    paged_ops.reshape_and_cache(key, value, cache, torch.arange(T, dtype=dtype) % 32)
    assert written == [0]
    for slot in range(min(T, 32)):
        row = max(range(slot, T, 32))
        assert cache[slot // 8, 0, slot % 8].equal(key[row])
        assert cache[slot // 8, 1, slot % 8].equal(value[row])


def test_rows_of_one_fused_projection(written):
    fused = torch.randn(5, 3, 2, 16)  # queries, keys, values of each token
    cache = torch.zeros(1, 2, 8, 2, 16)
    paged_ops.reshape_and_cache(fused[:, 1], fused[:, 2], cache, torch.arange(5))
    assert written == [0]
    assert cache[0, :, :5].equal(fused[:, 1:].transpose(0, 1))


@pytest.mark.parametrize("slot", [32, 2**31 - 1, 2**40])
def test_a_wrong_slot_is_refused_and_nothing_is_written(slot):
    (key, value), cache = of_one()
    paged_ops.reshape_and_cache(key, value, cache.clone(), torch.tensor([0, 1]))  # the signature is known
    with pytest.raises(ValueError, match="slot_mapping"):
        paged_ops.reshape_and_cache(key, value, cache, torch.tensor([0, slot]))
    assert cache.isnan().all()
