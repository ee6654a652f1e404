"""Every kernel variant that ships compiles for every target, with the instructions that make it fast, without spills.

One subprocess per target, because a compiler that aborts ends its process. ``make test-aot-versions`` runs those of
cuda:90 under an older Triton.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from paged_ops.cli import support
from paged_ops.lowerings.gpu.target import TRITON
from tests.aot import compiler, variants

pytestmark = pytest.mark.aot

ROOT = Path(__file__).parents[2]
MOST_VARIANTS = 82
# One target is divided, so that two workers end at about the same time; the longest come first.
# Without Gluon no variant is named ^hopper.
OF_GLUON = ("^hopper(?!-prefill)", "^hopper-prefill") * variants.HAS_GLUON
NAMES = {"cuda:90": (*OF_GLUON, "^attention", "^(?!hopper|attention)")}
ORDER = ("cuda:90", "hip:gfx942", *compiler.TARGETS)
PARTS = [(target, names) for target in ORDER for names in NAMES.get(target, ("",))]
PARTS = list(dict.fromkeys(PARTS))


def test_the_list_is_short_and_its_names_are_unique():
    listed = variants.variants(None)
    names = [variant.name for variant in listed]
    assert len(names) == len(set(names))
    assert 20 < len(names) <= MOST_VARIANTS


def test_support_page_says_what_is_compiled_for_amd():
    compiled = {
        target.partition(":")[2]: variants.variants(target) for target in compiler.TARGETS if target.startswith("hip:")
    }
    assert {arch: len(listed) for arch, listed in compiled.items()} == support._COMPILED_FOR_AMD
    names = {arch: {variant.name for variant in listed} for arch, listed in compiled.items()}
    assert all(each <= names["gfx942"] for each in names.values())


def test_lost_descriptors_are_found():
    load, use = "ULDC.64 UR14, c[0x0][0x208]", "LDG.E R2, desc[UR14][R4.64]"
    copied = (
        "MOV R8, UR14",
        "IMAD.U32 R9, RZ, RZ, UR15",
        "ULDC.64 UR14, c[0x0][0x218]",
        "R2UR UR14, R8",
        "R2UR UR15, R9",
    )
    kept = (*copied[:3], "STL.64 [R1+0x30], R8", "MOV R8, R4", "MOV R9, R5", "LDL.64 R8, [R1+0x30]", *copied[3:])
    over, label = "UMOV UR14, 0x4", "LABEL .L_x_0"
    jump = 'BRX R1 -0x9 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    apart = load, "@P0 BRA `(.L_x_0)", over, "EXIT", label  # one way leads there, with what was loaded
    for before, lost in [
        (apart, []), ((load, "BRA.U UP0, `(.L_x_0)", over, label), [use]), ((*apart[:3], label), [use]),
        ((load, "@P0 BRA `(.L_x_0)", over, "BRA `(.L_x_0)", label), [use]), ((load, "EXIT", label), [use]),
        ((load, over, jump, load, label), [use]), ((load, jump, over, label), []),
        ((load, label, use, over, "@P1 BRA `(.L_x_0)", load), [use]),
        ((load, label, use, "BRA `(.L_x_0)", over), [use]),
        ((load, *kept), []), ((load, *kept[:3], "STL [R1], R8", *kept[4:]), [use]),
        ((), [use]), ((load,), []), ((load, *copied), []), ((load, *copied[:-1]), [use]),
        ((load, "UIADD3 UR14, UR6, 0x80, URZ"), [use]), ((load, "UIADD3.64 UR12, UR6, 0x2, URZ"), []),
        ((load, "UMOV UR15, 0x40000040"), [use]), ((load, "IMAD.MOV.U32 R14, RZ, RZ, R3"), []),
    ]:  # fmt: skip
        split = [(each, *re.sub(r"^@\w+ ", "", each).partition(" ")) for each in (*before, use)]
        listed = [(name, rest.split(", "), rest if name == "LABEL" else each) for each, name, _, rest in split]
        assert compiler.lost_descriptors(listed) == lost, before


def test_registers_that_nothing_has_set_are_found():
    save, restore = ("MOV R8, UR5", "IMAD.U32 R9, RZ, RZ, UR5"), ("R2UR UR5, R8", "UMOV UR7, UR5")
    for code, found in [
        (("UMOV UR5, 0x4", "UIADD3 UR6, UR5, 0x2, URZ"), []), (("UIADD3 UR6, UR5, 0x2, URZ",), [0]),
        (("ULDC.64 UR4, c[0x0][0x210]", "IADD3 R2, R3, UR5, RZ"), []), (("IADD3 R2, R3, UR5, RZ",), [0]),
        (("R2UR UR4, R2", "ULOP3.LUT UP0, UR6, UR4, 0x2, URZ, 0xc0, !UPT", "IADD3 R2, R3, UR6, RZ"), []),
        (("ULOP3.LUT UP0, UR6, UR4, 0x2, URZ, 0xc0, !UPT",), [0]),
        ((*save, *restore, "UMOV UR7, 0x1", "UIADD3 UR6, UR7, 0x2, URZ"), []),
        ((*save, *restore, "UIADD3 UR6, UR7, 0x2, URZ"), [4]), ((*save, "IADD3 R2, R9, 0x1, RZ"), [2]),
        ((*save, "LDG.E.64 R8, desc[UR4][R2.64]", "IADD3 R2, R9, 0x1, RZ"), []),
    ]:  # fmt: skip
        listed = [(line.split()[0], line.partition(" ")[2].split(", "), line) for line in code]
        assert compiler.unset_registers(listed) == [code[n] for n in found], code


@pytest.mark.parametrize(("target", "names"), PARTS)
def test_target(target, names):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.aot", target, names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    results = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    listed = {variant.name: variant for variant in variants.variants(target) if re.search(names, variant.name)}
    assert listed
    assert done.returncode == 0, f"{target}: {list(listed)[len(results)]!r} ended the process: {done.stderr[-2000:]}"
    assert list(results) == list(listed)
    problems = [problem for name, row in results.items() for problem in found_wrong(row, listed[name], target)]
    assert not problems, f"{target}:\n" + "\n".join(problems)


def found_wrong(row, variant, target):
    refused = [pattern for prefix, pattern in variant.refused.items() if target.startswith(prefix)]
    if refused:
        if not re.search(rf"ValueError.*{refused[0]}", row["error"] or ""):
            yield f"{row['name']}: expected to be refused with {refused[0]!r}, got {row['error']}"
        return
    if row["error"]:
        yield f"{row['name']}: {row['error']}"
        return
    if not row["kernels"]:
        yield f"{row['name']}: launched nothing"
    for kernel, shared in row["shared"].items():
        if shared > row["space"]:
            yield f"{row['name']}: {kernel} needs {shared} bytes of shared memory, {row['space']} are there"
    for kernel, unset in row["unset"].items():
        if unset:
            yield f"{row['name']}: {kernel} reads registers that nothing has set: {unset}"
    for kernel, lost in row["lost"].items():
        if lost:
            yield f"{row['name']}: {kernel} addresses global memory by registers that hold something else: {lost}"
    for kernel, said in row["serialized"].items():
        if said:
            yield f"{row['name']}: {kernel}: {said}"
    for pattern in row["missing"]:
        yield f"{row['name']}: no {pattern} in its assembly"
    known = variant.spills.get(TRITON, 0) if target == "cuda:90" else 0
    for kernel, spilled in row["kernels"].items():
        if spilled is None:
            yield f"{row['name']}: the tools do not tell what {kernel} spills"
        elif spilled > known and not target.startswith(variant.may_spill):
            yield f"{row['name']}: {kernel} spills {spilled}"
