"""The compile report finds what it exists to find."""

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops.inspection import CompileReport, find_cache_copies

N, B, K, D = 16, 4, 2, 8


@pytest.fixture(autouse=True)
def _no_graphs_from_before() -> None:
    torch._dynamo.reset()


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    key, value = torch.randn(2, count, K, D, generator=generator)
    return key, value, torch.arange(count)


def write_combined(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    paged_ops.reshape_and_cache(key * 2, value, kv_cache, slots)
    return key + 1


def write_pair(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
    paged_ops.reshape_and_cache(key * 2, value, key_cache, slots, value_cache=value_cache)
    return key + 1


def write_by_index(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    kv_cache[:, 0][slots, slots % B] = key
    return key + 1


def write_viewed_as_fp8(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
    paged_ops.reshape_and_cache(key, value, kv_cache.view(torch.float8_e4m3fn), slots)
    return key + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_cache_in_one_argument_is_not_copied(dynamic: bool) -> None:
    key, value, slots = rows(5)
    kv_cache = torch.zeros(N, 2, B, K, D)
    with CompileReport([kv_cache]) as report:
        torch.compile(write_combined, fullgraph=True, dynamic=dynamic)(key, value, kv_cache, slots)
    assert (report.graphs, report.graph_breaks, report.recompiles, report.cache_copies) == (1, 0, 0, 0)
    assert "reshape_and_cache" in report.code[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_two_slices_of_one_arena_as_two_inputs_are_copied(dynamic: bool, named: bool) -> None:
    key, value, slots = rows(5)
    arena = torch.zeros(2, N, B, K, D)
    with CompileReport([arena[0], arena[1]] if named else []) as report:
        torch.compile(write_pair, fullgraph=True, dynamic=dynamic)(key, value, arena[0], arena[1], slots)
    assert report.cache_copies == 1
    assert "value_cache of reshape_and_cache" in report.copies[0] or "size of a cache" in report.copies[0]


def test_two_storages_are_not_copied() -> None:
    key, value, slots = rows(5)
    caches = [torch.zeros(N, B, K, D), torch.zeros(N, B, K, D)]
    with CompileReport(caches) as report:
        torch.compile(write_pair, fullgraph=True)(key, value, *caches, slots)
    assert report.graphs == 1
    assert report.cache_copies == 0, report.copies


def test_a_copy_that_no_op_of_ours_takes_is_found_by_its_size() -> None:
    key, value, slots = rows(4)
    kv_cache = torch.zeros(N, 2, B, K, D)
    with CompileReport([kv_cache]) as report:
        torch.compile(write_by_index, fullgraph=True)(key, value, kv_cache, slots)
    assert report.cache_copies == 1
    assert "has the size of a cache" in report.copies[0]


def test_a_result_that_happens_to_have_the_size_of_a_cache_is_no_copy() -> None:
    """Logits of a number of sequences that varies, over a cache whose size does not."""

    def step(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, head: Tensor) -> Tensor:
        paged_ops.reshape_and_cache(key, value, kv_cache, slots)
        return key.flatten(1) @ head

    key, value, slots = rows(4)
    kv_cache, head = torch.zeros(N, 2, B, K, D), torch.zeros(K * D, N * 2 * B * K * D // 4)
    for tensor in (key, value, slots):
        torch._dynamo.mark_dynamic(tensor, 0)
    with CompileReport([kv_cache]) as report:
        logits = torch.compile(step, fullgraph=True)(key, value, kv_cache, slots, head)
    assert logits.numel() == kv_cache.numel()
    assert (report.graphs, report.cache_copies) == (1, 0), report.copies


def test_a_copy_of_a_cache_of_open_size_is_found_by_its_size() -> None:
    key, value, slots = rows(4)
    kv_cache = torch.zeros(N, 2, B, K, D)
    with CompileReport([kv_cache]) as report:
        torch.compile(write_by_index, fullgraph=True, dynamic=True)(key, value, kv_cache, slots)
    assert report.cache_copies == 1
    assert "has the size of a cache" in report.copies[0]


def test_a_copy_that_only_the_counters_see() -> None:
    key, value, slots = rows(4)
    kv_cache = torch.zeros(N, 2, B, K, D, dtype=torch.uint8)
    with CompileReport([kv_cache]) as report:
        torch.compile(write_viewed_as_fp8, fullgraph=True)(key, value, kv_cache, slots)
    assert report.cache_copies == 1


def test_recompiles_and_graph_breaks_are_counted() -> None:
    @torch.compile(dynamic=False)
    def breaks(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with CompileReport() as report:
        breaks(torch.zeros(3))
    assert (report.graphs, report.graph_breaks, report.recompiles) == (2, 1, 0)
    with CompileReport() as again:
        breaks(torch.zeros(3))
    assert (again.graphs, again.graph_breaks, again.recompiles) == (0, 0, 0)
    with CompileReport() as another_shape:
        breaks(torch.zeros(4))
    assert another_shape.recompiles == 2
    assert all("size mismatch" in reason for reason in another_shape.recompile_reasons)
    assert report.graphs == 2


def test_views_renames_and_lists_are_followed() -> None:
    code = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        buf0 = empty_strided_cpu((4, 2, 8), (16, 8, 1), torch.float32)
        buf1 = reinterpret_tensor(buf0, (64, ), (1, ), 0)
        buf2 = buf1; del buf1  # reuse
        torch.ops.paged_ops.copy_blocks.default([arg0_1, reinterpret_tensor(buf2, (4, 16), (16, 1), 0)], arg1_1)
        torch.ops.paged_ops.copy_blocks.default([arg0_1, reinterpret_tensor(arg0_1, (4, 16), (16, 1), 0)], arg1_1)
        with torch.cuda._DeviceGuard(0):
            buf3 = torch.ops.aten.clone.default(arg0_1)
            torch.ops.paged_ops.gather_kv.default(buf3, arg1_1, arg1_1, 4)
        return (buf2, )
"""
    copies = find_cache_copies(code)
    assert [copy.partition(" = ")[0] for copy in copies] == ["buf0", "buf3"]
    assert copies[0].endswith("is kv_caches of copy_blocks")
    assert copies[1].endswith("is kv_cache of gather_kv")
