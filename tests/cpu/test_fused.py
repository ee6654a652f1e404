"""The C++ of attention on the CPU: every case through it, every width of vectors, every code of a format, the matrix
unit; how it is compiled, and what happens where it cannot be."""

import _ctypes
import ctypes
import grp
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import paged_ops
from paged_ops import cpp, testing
from paged_ops.features import Features
from paged_ops.layouts import paged_kv
from paged_ops.lowerings.cpu import attention as cpu
from paged_ops.lowerings.cpu import fused, prepared

OP = "paged_attention_with_lse"
DENSE = [case for case in testing.CASES[OP] if "block_sparse" not in dict(case.features)]
WIDTHS = {"DEFAULT": (), "AVX2": fused.FLAGS["AVX2"], "AVX512": fused.FLAGS["AVX512"]}
CAPABILITY = torch.backends.cpu.get_cpu_capability()


@pytest.fixture(autouse=True)
def compiler():
    assert fused.compiled() is not None, "no C++ compiler"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    return lambda flags: fused.load([cpp_extension.get_cxx_compiler()], flags, folder)


@pytest.mark.parametrize("case", DENSE[::2], ids=lambda case: case.name)
def test_long_rows_go_where_a_matrix_unit_is_used(monkeypatch, case):
    monkeypatch.setattr(cpu.processor, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(fused, "has_matrix_unit", lambda: False)
    monkeypatch.setattr(prepared, "MATRIX_ROWS", 3)
    monkeypatch.setattr(prepared, "_prepared", {})
    testing.check(OP, case)


def test_a_matrix_unit_that_only_the_flash_kernel_uses_serves_bfloat16(monkeypatch):
    served = []
    attend = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *args: (served.append(list(args[6])), attend(*args)))
    alone = prepared.Prepared.attend
    monkeypatch.setattr(prepared.Prepared, "attend", lambda *args: (served.append("all"), alone(*args))[1])
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(cpu.processor, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(fused, "has_matrix_unit", lambda: False)
    for dtype, features in ((torch.bfloat16, ()), (torch.bfloat16, ("cap",)), (torch.float32, ())):
        inputs = call(((1, 40), (40, 40)), features, dtype).inputs()
        paged_ops.paged_attention(*inputs.args, **inputs.kwargs)
    assert served == [[0], "all", "all"]


def test_ranges_are_read_from_a_copy():
    """Another thread may write the caller's tensor while C++ divides the work by them."""
    ranges = torch.tensor([[[0, 4]], [[2, 9]]], dtype=torch.int32)
    for given in (ranges, ranges.expand(2, 1, 2), ranges.transpose(0, 1)):
        copied = fused.vectors_of(Features(bidirectional_ranges=given), 2)["ranges"]
        assert copied.data_ptr() != given.data_ptr()
        assert copied.is_contiguous()
        assert copied.equal(given)


@pytest.mark.parametrize("case", testing.CASES[OP][::2], ids=lambda case: case.name)
def test_torch_ops_serve_everything_without_a_compiler(monkeypatch, case):
    monkeypatch.setattr(fused, "compiled", lambda: None)
    testing.check(OP, case)


@pytest.mark.slow
@pytest.mark.skipif(CAPABILITY not in WIDTHS, reason="vectors of one width only")
@pytest.mark.parametrize("width", WIDTHS)
def test_vectors_of_each_width(monkeypatch, libraries, width):
    if list(WIDTHS).index(width) >= list(WIDTHS).index(CAPABILITY):
        pytest.skip("not on this processor, or its own, which all other tests use")
    function = libraries(WIDTHS[width])
    monkeypatch.setattr(fused, "compiled", lambda: function)
    for case in DENSE[::3]:
        testing.check(OP, case)


def call(seqs, features=(), dtype=torch.float32):
    """A decode case of long sequences: several pieces each."""
    spec = testing.CacheSpec(dtype=dtype, block_size=16)
    named = tuple(testing.FEATURES[name] for name in features)
    return testing.AttentionCase("long", seqs, spec, features=named)


@pytest.mark.parametrize(
    "features", [(), ("sinks", "alibi"), ("cap", "window"), ("noncausal",), ("ranges", "window")], ids="-".join
)
def test_pieces_of_long_sequences_merge(features):
    testing.check(OP, call(((1, 1300), (5, 700), (3, 2), (2, 1024)), features))


@pytest.mark.parametrize("features", [(), ("first",)], ids="-".join)
def test_the_largest_window_is_none(features):
    """Rows before the start of their sequence share a span with others: positions minus such a window overflow."""
    inputs = call(((5, 2), (40, 300), (1, 20)), features).inputs()
    args, kwargs = inputs.args, inputs.kwargs
    plain = paged_ops.paged_attention_with_lse(*args, **kwargs)
    windowed = paged_ops.paged_attention_with_lse(*args, **{**kwargs, "sliding_window": 2**63 - 1})
    torch.testing.assert_close(windowed, plain)


def test_a_long_batch_has_few_pieces():
    """More pieces than the least length would need: their length grows with the batch."""
    testing.check(OP, call(((8, 20000), (4, 9000)), dtype=torch.bfloat16))


@pytest.mark.parametrize("seqs", [((1, 1300), (5, 700), (1, 257)), ((1, 1200),), ((2, 1000),)])
def test_bits_do_not_depend_on_the_number_of_threads(seqs):
    """A single short sequence is divided by heads, too."""
    inputs = call(seqs, ("sinks",)).inputs()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5, 7):
            torch.set_num_threads(threads)
            results.append(paged_ops.paged_attention_with_lse(*inputs.args, **inputs.kwargs))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        testing.assert_same_bytes("out", out, results[0][0])
        testing.assert_same_bytes("lse", lse, results[0][1])


@pytest.mark.parametrize("dtype", fused.CELLS, ids=str)
def test_each_code_of_a_format_is_read_right(dtype):
    """Attention to one token is its value."""
    K, D = 2, 64
    codes = torch.arange(1 << min(8 * dtype.itemsize, 16), dtype=torch.int32)
    if dtype.itemsize == 4:
        values = codes.mul(65537).view(torch.float32)
    else:
        values = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    S = len(codes) // (K * D)
    cache = torch.zeros(S, 2, 1, K, D, dtype=dtype)
    cache[:, 1] = values.view(S, 1, K, D)
    out, lse = torch.empty(S, K, D), torch.empty(S, K)
    table, query = torch.arange(S, dtype=torch.int32)[:, None], torch.zeros(S, K, D, dtype=torch.float32)
    batch = table, [1] * S, range(S + 1), range(S)
    fused.attend(query, paged_kv(cache), dtype, *batch, 1.0, Features(), out, lse)
    torch.testing.assert_close(out.flatten(), values.float(), rtol=0, atol=0, equal_nan=True)
    assert not lse.any()


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_results_round_as_those_of_torch(dtype, out_dtype):
    """Ties, denormals, infinity, NaN, and a size that is no whole number of vectors."""
    K, D, S = 2, 72, 500
    if dtype == torch.float32:
        values = torch.randint(-(1 << 31), 1 << 31, (S * K * D,)).int()
        values[::3] &= -(1 << 12)  # ties of both
        values[::5] = values[::5] % (24 << 23) + (100 << 23)  # about the least float16
        values = values.view(torch.float32)
    else:
        values = torch.randint(0, 256, (S * K * D,), dtype=torch.uint8).view(dtype)
    cache = torch.zeros(S, 2, 1, K, D, dtype=dtype)
    cache[:, 1] = values.view(S, 1, K, D)
    out, lse = torch.empty(S, K, D, dtype=out_dtype), torch.empty(S, K)
    table, query = torch.arange(S, dtype=torch.int32)[:, None], torch.zeros(S, K, D, dtype=out_dtype)
    fused.attend(query, paged_kv(cache), dtype, table, [1] * S, range(S + 1), range(S), 1.0, Features(), out, lse)
    torch.testing.assert_close(out.flatten(), values.float().to(out_dtype), rtol=0, atol=0, equal_nan=True)


matrix_unit = pytest.mark.skipif(not fused.has_matrix_unit(), reason="no matrix unit")
FORMATS = {"bfloat16": None, "e4m3": testing.F8_E4M3, "e5m2": testing.F8_E5M2}


@matrix_unit
@pytest.mark.parametrize(
    "features", [(), ("sinks", "alibi"), ("cap", "window"), ("noncausal",), ("ranges", "window")], ids="-".join
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [64, 40])
def test_prompts_by_the_matrix_unit(name, size, features):
    scales = None if FORMATS[name] is None else "head"
    spec = testing.CacheSpec(dtype=torch.bfloat16, head_size=size, cache_dtype=FORMATS[name], scales=scales)
    seqs = (70, 300), (33, 33), (1, 80), (9, 700)
    testing.check(OP, testing.AttentionCase("prompts", seqs, spec, features=tuple(map(testing.FEATURES.get, features))))


@matrix_unit
def test_latents_by_the_matrix_unit():
    spec = testing.CacheSpec("latent", num_kv_heads=1, head_size=72, value_head_size=64, dtype=torch.bfloat16)
    testing.check(OP, testing.AttentionCase("latents", ((1, 300), (70, 90)), spec, num_heads=24))


@matrix_unit
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("plane", ["key", "value"])
def test_numbers_that_are_not_finite_reach_no_row_before_them(plane, number):
    """Also among rows that the matrix unit computes together."""
    inputs = call(((100, 100),), (), torch.bfloat16).inputs()
    _, cache, tables, *_ = inputs.args
    before = paged_ops.paged_attention(*inputs.args)
    cache[tables[0, 70 // 16], ("key", "value").index(plane), 70 % 16] = number
    after = paged_ops.paged_attention(*inputs.args)
    torch.testing.assert_close(after[:70], before[:70], rtol=0.02, atol=0.01)
    assert not after[70:100].isfinite().all(-1).any()


@matrix_unit
def test_the_unit_is_left_as_it_was():
    """PyTorch's products between two calls, on the same threads, find it as they need it."""
    inputs, a = call(((100, 100),), (), torch.bfloat16).inputs(), torch.randn(256, 256).to(torch.bfloat16)
    attention, product = paged_ops.paged_attention(*inputs.args), a @ a
    for _ in range(3):
        assert torch.equal(paged_ops.paged_attention(*inputs.args), attention)
        assert torch.equal(a @ a, product)


def test_nan_reaches_the_rows_that_see_it():
    inputs = testing.case_named(OP, "decode-fp32").inputs()
    _, cache, tables, lens, *_ = inputs.args
    cache[tables[1, 0], 0, int(lens[1]) // 2, 0, 3] = torch.nan
    out, lse = paged_ops.paged_attention_with_lse(*inputs.args, **inputs.kwargs)
    heads = torch.zeros_like(lse, dtype=torch.bool)
    heads[1, :4] = True  # of sequence 1, what shares key/value head 0
    assert torch.equal(lse.isnan(), heads)
    assert torch.equal(out.isnan(), heads[..., None].expand_as(out))


def test_which_calls_it_serves(monkeypatch):
    assert fused.serves(torch.bfloat16, Features(sliding_window=3, soft_cap=1.0))
    assert not fused.serves(torch.float8_e4m3fnuz, Features())
    assert not fused.serves(torch.float32, Features(block_sparse=[*paged_ops.BlockSparse(16, 1, 1)]))
    monkeypatch.setattr(fused, "compiled", lambda: None)
    assert not fused.serves(torch.float32, Features())


def test_a_feature_that_it_does_not_know_turns_it_off(monkeypatch):
    monkeypatch.setattr(fused, "APPLIES", fused.APPLIES - {"soft_cap", "sinks"})
    assert fused.serves(torch.float32, Features(soft_cap=float("0"), sinks=None))
    assert not fused.serves(torch.float32, Features(soft_cap=2.0))
    assert not fused.serves(torch.float32, Features(sinks=torch.zeros(2)))


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    compile_in(folder)
    return next(folder.iterdir())


def copying(made: Path, script: Path) -> str:
    """What stands for a compiler, and copies what one has made."""
    script.write_text(f"#!/bin/sh\nfor last; do :; done\ncp {made} $last\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def quick_compiler(library, tmp_path_factory):
    return copying(library, tmp_path_factory.mktemp("quick") / "compiler")


def compile_in(folder: Path):
    return fused.load([cpp_extension.get_cxx_compiler()], (), folder)


def test_compiled_once(quick_compiler, tmp_path, monkeypatch):
    fused.load([quick_compiler], (), tmp_path)
    (library,) = tmp_path.iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    fused.load([quick_compiler], (), tmp_path)
    assert list(tmp_path.iterdir()) == [library]


def test_a_changed_header_is_compiled(tmp_path):
    source, header = tmp_path / "a.cpp", tmp_path / "a.h"
    source.write_text('#include "a.h"\nextern "C" long number(void*) { return NUMBER; }\n')
    made = cpp.Source(source, "number", fused.Call, ctypes.c_long, "number", "a number")
    for number in (3, 5):
        header.write_text(f"#define NUMBER {number}\n")
        assert cpp.load(made, [cpp_extension.get_cxx_compiler()], (), tmp_path)(None) == number


@pytest.mark.slow
def test_a_library_that_is_not_what_was_compiled_is_compiled_again(quick_compiler, tmp_path):
    """In a process of its own, as such libraries can kill one."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    program = f"""if True:
        import _ctypes
        from pathlib import Path
        from paged_ops import testing
        from paged_ops.lowerings.cpu import fused
        folder = Path({str(folder)!r})
        load = lambda: fused.load([{quick_compiler!r}], (), folder)
        load()
        (library,) = folder.iterdir()
        whole = library.read_bytes()
        foreign = Path(_ctypes.__file__).read_bytes()
        for damaged in (b"", whole[:5000], whole[:-1000], foreign, whole[:9000] + bytes(64) + whole[9064:]):
            library.unlink()
            library.write_bytes(damaged)
            function = load()
            assert [path.read_bytes() for path in folder.iterdir()] == [whole]
            fused.compiled = lambda: function
            testing.check({OP!r}, testing.case_named({OP!r}, "decode-fp32"))
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, (run.returncode, run.stderr[-1000:])


def test_two_processes_compile_at_once(quick_compiler, tmp_path):
    program = f"""if True:
        from pathlib import Path
        from paged_ops import testing
        from paged_ops.lowerings.cpu import fused
        from torch.utils import cpp_extension
        cpp_extension._get_build_directory = lambda name, verbose: {str(tmp_path)!r}
        cpp_extension.get_cxx_compiler = lambda: {quick_compiler!r}
        testing.check({OP!r}, testing.case_named({OP!r}, "decode-fp32"))
        assert fused.compiled() is not None
    """
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [path.name.partition("-")[0] for path in tmp_path.rglob("*.so")] == ["attention"]


@pytest.fixture
def recompiled(monkeypatch, tmp_path):
    """compiled() without its memory, with a compiler of this name."""

    def compiled(compiler):
        monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: compiler)
        monkeypatch.setattr(cpp_extension, "_get_build_directory", lambda name, verbose: str(tmp_path))
        return fused.compiled.__wrapped__()

    return compiled


def test_no_compiler(recompiled, recwarn):
    assert recompiled("there-is-no-such-compiler") is None
    assert not recwarn.list


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("false", "returned non-zero exit status 1"),
        ("true", "too short"),
        ("", "expected the name of a compiler in CXX, got ''"),
        ("c++ 'an open quotation", "No closing quotation"),
        ("c++ --no-such-option", "no-such-option"),
    ],
)
def test_a_compiler_that_fails_is_named(recompiled, tmp_path, recwarn, compiler, why):
    assert recompiled(compiler) is None
    (warning,) = recwarn.list
    assert "paged_ops: attention on the CPU is not compiled, and slower: " in str(warning.message)
    assert why in str(warning.message)
    assert len(str(warning.message).splitlines()) <= 5
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_without_the_function(recompiled, tmp_path):
    compiler = copying(Path(_ctypes.__file__), tmp_path / "compiler")
    with pytest.warns(UserWarning, match="undefined symbol: paged_attention"):
        assert recompiled(compiler) is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_with_arguments(recompiled, quick_compiler, tmp_path):
    assert recompiled(f"env {quick_compiler} -DANY") is not None
    assert len(list(tmp_path.rglob("*.so"))) == 1


def test_only_this_user_can_write_what_is_loaded(tmp_path):
    folder = fused.own_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert fused.own_folder(tmp_path) == folder
    folder.chmod(0o775)
    with pytest.raises(PermissionError, match="only this user can write"):
        fused.own_folder(tmp_path)
    folder.chmod(0o755)
    assert fused.own_folder(tmp_path) == folder
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="only this user can write"):
        fused.own_folder(tmp_path)
    folder.unlink()
    folder.write_text("a file")
    with pytest.raises(FileExistsError):
        fused.own_folder(tmp_path)


def test_no_other_user_can_replace_the_folder(tmp_path, monkeypatch):
    """Whoever can rename a folder above can put a library of theirs in the place of ours."""
    above = tmp_path / "above"
    shared = above / "shared"
    shared.mkdir(parents=True)
    folder = fused.own_folder(shared)
    for mode, safe in ((0o777, False), (0o1777, True), (0o757, False), (0o755, True)):
        above.chmod(mode)
        if safe:
            assert fused.own_folder(shared) == folder
        else:
            with pytest.raises(PermissionError, match=f"no other user can rename .*, got {above}$"):
                fused.own_folder(shared)
    link = tmp_path / "link"
    link.symlink_to(above)
    assert fused.own_folder(link / "shared") == folder, "without the link, which may change"
    above.chmod(0o775)
    for own, safe in ((True, True), (False, False)):
        monkeypatch.setattr(cpp, "_is_private", lambda group, own=own: own)
        if safe:
            assert fused.own_folder(shared) == folder
        else:
            with pytest.raises(PermissionError, match="no other user can rename"):
                fused.own_folder(shared)


def test_a_group_of_one_user(monkeypatch):
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getegid())
    for name, members, private in (
        (user.pw_name, [], True),
        (user.pw_name, [user.pw_name], True),
        (user.pw_name, ["other"], False),
        ("staff", [], False),
    ):
        found = type(group)((name, "x", group.gr_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, found=found: found)
        assert cpp._is_private(group.gr_gid) == private
    monkeypatch.undo()
    assert not cpp._is_private(2**31 - 2), "no such group"


def test_what_another_user_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="only this user can write"):
        fused.own_folder(tmp_path)


@pytest.mark.parametrize("trouble", ["unsafe", "a file", "no home"])
def test_without_a_folder_the_library_is_this_process_s(
    recompiled, quick_compiler, tmp_path, monkeypatch, recwarn, trouble
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    if trouble == "unsafe":
        fused.own_folder(tmp_path).chmod(0o777)
    if trouble == "a file":
        (tmp_path / f"user-{os.geteuid()}").write_text("a file")
    made = recompiled(quick_compiler)
    if trouble == "no home":

        def no_home(name, verbose):
            raise PermissionError("read-only file system")

        monkeypatch.setattr(cpp_extension, "_get_build_directory", no_home)
        made = fused.compiled.__wrapped__()
    assert made is not None
    assert not recwarn.list
    assert not list((tmp_path / "temporary").iterdir())
    monkeypatch.setattr(fused, "compiled", lambda: made)
    testing.check(OP, testing.case_named(OP, "decode-fp32"))


def test_a_full_disk(tmp_path):
    """Files of some bytes at most: the compiler fails, attention works."""
    program = f"""if True:
        import resource, warnings
        from paged_ops import testing
        from paged_ops.lowerings.cpu import fused
        from torch.utils import cpp_extension
        cpp_extension._get_build_directory = lambda name, verbose: {str(tmp_path)!r}
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            testing.check({OP!r}, testing.case_named({OP!r}, "decode-fp32"))
        assert fused.compiled() is None
        (warning,) = caught
        assert "not compiled, and slower" in str(warning.message), warning
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert not list(tmp_path.rglob("*.so"))
