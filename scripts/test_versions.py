"""A short suite under every torch that the package claims, each in an environment of its own: ``make test-versions``.

``python scripts/test_versions.py [2.9 2.15 ...]`` makes ``.venv-versions/<version>``, runs the suite there, replaces
its line in benchmarks/data/versions.jsonl, writes docs/versions.md, and deletes the environment (``--keep``
leaves it). With ``--markdown`` it only writes the page from what is recorded. It exits with 1 if a test failed.

PyTorch's wheels for CUDA cannot be imported without CUDA's libraries. Without a GPU hardly any of their functions is
called. So three small libraries are installed, and stubs take the place of the others, which saves 6 GB per version.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
DATA = ROOT / "benchmarks/data/versions.jsonl"
PAGE = ROOT / "docs/versions.md"

# Version: torch, the Triton that belongs to it, and the NumPy that this Triton's interpreter works with.
VERSIONS = {
    "2.9": ("2.9.1", "3.5.1", "numpy<2.4"),
    "2.10": ("2.10.0", "3.6.0", "numpy<2.4"),
    "2.11": ("2.11.0", "3.6.0", "numpy<2.4"),
    "2.12": ("2.12.0", "3.7.0", "numpy"),
    "2.13": ("2.13.0", "3.7.1", "numpy"),
    "2.14": ("2.14.1", "3.8.0", "numpy"),
    "2.15": ("2.15.0", "3.9.0", "numpy"),
}
NEEDS = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")  # torch's own
TOOLS = ("typer>=0.15", "rich>=13", "pytest>=9", "hypothesis>=6.150", "expecttest>=0.3", "packaging")
MODELS = ("transformers==5.23.*", "accelerate>=1.15")
REAL_LIBRARIES = ("cuda-runtime", "cuda-cupti", "nvshmem")  # their symbols are looked up at the import
OFF = "not (gpu or interpreter or aot or xla or tpu)"
# Column of the table: a file of tests, and which of them (an expression of pytest's -k). These run in one process,
ON_CPU = {
    "ops": (
        "tests/test_ops.py",
        "schemas or declared or _overload or refused or lse-mixed or cache-nhd or opcheck-decode",
    ),
    "compile": (
        "tests/test_compile.py",
        "no_cache_copy or lint or never_lost or export or symbolic or aot or lse-mixed-fp32",
    ),
    "cache": ("tests/cache/test_kv_cache.py", "not random_walk"),
    "metadata": ("tests/metadata/test_metadata.py", "not a_bad_step_writes_nothing"),
    "graphs": ("tests/graphs/test_runner.py", "pieces or capture or advancing or replays"),
    "versions": ("tests/gpu/test_triton_versions.py", "test"),
    "models": ("tests/integrations/transformers/test_indexers.py", "compiled"),
}
# and these in one each.
APART = {
    "interpreter": (
        "tests/gpu/test_interpreter.py",
        "test_matches_reference and (lse-mixed-fp32 or sparse-homo_head-decode or kv-nhd-fp32 or states-fp32-d32)",
    ),
    "aot": ("tests/aot/test_aot.py", "cuda:90"),
}
PARTS = {**ON_CPU, **APART}


def run(*command: str | Path, **environment: str) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run(
        [str(each) for each in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}")


def make(version: str, place: Path) -> Path:
    """An environment with that torch, its Triton and what the suite needs; its Python."""
    torch, triton, numpy = VERSIONS[version]
    shutil.rmtree(place, ignore_errors=True)
    run(sys.executable, "-m", "venv", place)
    python = place / "bin/python"
    pins = place / "pins.txt"
    pins.write_text(f"torch=={torch}\ntriton=={triton}\n")
    # In place of a constraint that this machine may have: it would refuse other versions.
    ours = {"PIP_CONSTRAINT": str(pins), "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = (python, "-m", "pip", "install", "-q", "--no-compile")
    run(*pip, "--no-deps", f"torch=={torch}", f"triton=={triton}", **ours)
    run(*pip, *NEEDS, *TOOLS, *MODELS, numpy, **ours)
    libraries = wanted(python)
    if libraries:
        run(*pip, *libraries, **ours)
        stand_in(place)
    return python


def wanted(python: Path) -> list[str]:
    """The requirements of an installed torch for CUDA that are installed for real; none of a torch for the CPU."""
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    listed = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    names = [re.split(r"[;\s]", each)[0] for each in listed if "extra ==" not in each]
    found = [name for name in names if any(f"nvidia-{library}" in name for library in REAL_LIBRARIES)]
    # From CUDA 13 on some are extras of one package.
    toolkit = [re.sub(r"\[.*\]", "[cudart,cupti]", name) for name in names if name.startswith("cuda-toolkit")]
    return found + toolkit


def stand_in(place: Path) -> None:
    """Stub libraries next to torch's for the missing ones that it links; a call of a stub ends the process."""
    (packages,) = place.glob("lib/python*/site-packages")
    libraries = sorted(packages.glob("torch/lib/lib*.so*"))
    real = [each for each in packages.glob("nvidia/**/*.so*") if not each.is_symlink()]
    missing = {
        line.split()[0] for library in libraries for line in lines("ldd", library) if line.endswith("=> not found")
    }
    wanted = set(symbols("--undefined-only", *libraries))
    there = {name for name, _ in symbols("--defined-only", *real)}
    source, versions = place / "stand_in.c", place / "stand_in.map"
    for name in missing:
        # Most symbols have their library's name as version, which the loader insists on; the others have none.
        named = [symbol for symbol, version in wanted if version == name]
        plain = [symbol for symbol, version in wanted if not version and symbol not in there]
        source.write_text("".join(f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in (*named, *plain)))
        versions.write_text(f"{name} {{ global: {'; '.join((*named, ''))} }};" if named else "{ };")
        linked = libraries[0].parent / name
        run("cc", "-shared", "-fPIC", "-w", "-o", linked, f"-Wl,-soname,{name},--version-script,{versions}", source)


def symbols(which: str, *libraries: Path) -> list[tuple[str, str]]:
    """CUDA's functions that libraries define, or want of others, with their versions or ""."""
    names = [line.split()[-1] for line in lines("nm", "-D", which, *libraries) if line]
    return [
        (name, version.lstrip("@"))
        for name, _, version in (each.partition("@") for each in names)
        if re.match("cu|nv|nccl", name)
    ]


def lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def measure(version: str, python: Path) -> dict[str, Any]:
    """What became of each part."""
    torch, triton, _ = VERSIONS[version]
    code = (
        "import torch, numpy, triton, paged_ops; "
        "print(torch.__version__, triton.__version__, numpy.__version__, paged_ops.__file__)"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TRITON_CACHE_DIR": str(python.parents[1] / "triton"),
    }
    # Before anything else: this is the torch and the source that are meant.
    seen = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if seen.returncode:
        raise SystemExit(f"torch {torch} does not import:\n{seen.stderr[-4000:]}")
    torch_, triton_, numpy, source = seen.stdout.split()
    assert torch_.startswith(torch), (torch_, torch)
    assert triton_ == triton, (triton_, triton)
    assert Path(source).is_relative_to(ROOT), source
    parts = {}
    for group in (list(ON_CPU), *([part] for part in APART)):
        report = python.parents[1] / f"{group[0]}.xml"
        files = [PARTS[part][0] for part in group]
        wanted = " or ".join(f"({Path(PARTS[part][0]).name} and ({PARTS[part][1]}))" for part in group)
        marked = ["-m", OFF] if group[0] in ON_CPU else []
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "-k",
            wanted,
            *marked,
        ]
        interpret = {"TRITON_INTERPRET": "1"} if group == ["interpreter"] else {}
        done = subprocess.run(
            [*command, *files], cwd=ROOT, env=environment | interpret, capture_output=True, text=True, check=False
        )
        results = read(report, group)
        print(f"torch {torch}: {results}", flush=True)
        if done.returncode:
            print(done.stdout[-6000:], flush=True)
        parts |= results
    return {
        "version": version,
        "torch": torch_,
        "triton": triton,
        "numpy": numpy,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "parts": parts,
    }


def read(report: Path, parts: list[str]) -> dict[str, Any]:
    """The counts in a report of pytest and the names of what failed, by part. A part without tests failed."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    results = {}
    for part in parts:
        module = PARTS[part][0].removesuffix(".py").replace("/", ".")
        # What failed to be imported has its file as name.
        mine = [case for case in cases if (case.get("classname") or case.get("name")) == module]
        failed = [
            case.get("name") for case in mine if case.find("failure") is not None or case.find("error") is not None
        ]
        skipped = sum(case.find("skipped") is not None for case in mine)
        passed = len(mine) - skipped - len(failed)
        results[part] = {"passed": passed, "skipped": skipped, "failed": failed or ["no test ran"] * (passed == 0)}
    return results


def commit() -> str:
    """The commit that ran, with a plus if files differed from it."""
    git = ("git", "-C", str(ROOT))
    name = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "diff", "HEAD", "--quiet", "--", "paged_ops", "tests"], check=False).returncode
    return name.strip() + "+" * bool(changed)


def record(row: dict[str, Any]) -> None:
    """Replace the version's line."""
    rows = {each["version"]: each for each in recorded()} | {row["version"]: row}
    DATA.write_text("".join(json.dumps(rows[version]) + "\n" for version in VERSIONS if version in rows))


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


def markdown() -> str:
    """The page of the results."""
    rows = {row["version"]: row for row in recorded()}
    lines = [
        "# Supported versions of torch",
        "",
        "torch 2.9 to 2.15 are supported. The table has the last run of a short suite with each, on a CPU: the number",
        "of tests that passed. Failed tests are named below the table. `make test-versions` writes this page from",
        "[versions.jsonl](../benchmarks/data/versions.jsonl); `make test-versions VERSIONS=2.15` runs one",
        "version again.",
        "",
        "| torch | triton | numpy | Python | " + " | ".join(PARTS) + " | date | commit |",
        "|" + "---|" * (len(PARTS) + 6),
    ]
    failures = []
    for version in VERSIONS:
        if version not in rows:
            lines.append(f"| {version} | {VERSIONS[version][1]} | | | " + "| " * len(PARTS) + "not run | |")
            continue
        row = rows[version]
        cells = []
        for part in PARTS:
            result = row["parts"].get(part)
            if result is None:
                cells.append("not run")
                continue
            failed = len(result["failed"])
            cells.append(f"{result['passed']}" + f", **{failed} failed**" * bool(failed))
            failures += [f"* torch {row['torch']}, {part}: `{name}`" for name in result["failed"]]
        known = (row["torch"], row["triton"], row["numpy"], row["python"])
        lines.append(f"| {' | '.join((*known, *cells, row['date'], row['commit']))} |")
    lines += ["", *failures] if failures else []
    return "\n".join(lines) + "\n\n" + NOTES


NOTES = """\
| column | tests |
|---|---|
| ops | the ops against their references; opcheck; schemas |
| compile | compiled calls against eager ones; no copy of the cache; exports and packages |
| cache, metadata | the allocator, the cache, the metadata builder |
| graphs | captured steps, on a CPU |
| versions | the code paths of each Triton |
| models | compiled models of transformers with an indexer |
| interpreter | some Triton kernels, in Triton's interpreter |
| aot | every variant of the kernels, compiled ahead of time for sm_90: its instructions and spills |

`make test-aot-versions` repeats the last part with Triton 3.6 alone, in CI.

The GPU kernels were run and tuned with torch 2.11 and Triton 3.6. The same source compiles with Triton
3.5, 3.6, 3.7.1, 3.8 and 3.9; its speed there has not been measured. Known differences, all for sm_90:

* Triton 3.5 (torch 2.9) does not have the parts of Gluon that the Hopper kernels need: all calls take
  the Triton kernels.
* Triton 3.8 and 3.9 need more registers. Where decode would spill, its tiles are smaller or have one key/value head
  rather than two, or fewer programs share a multiprocessor
  (`triton` in `paged_ops/lowerings/gpu/configs/attention_nvidia_h200.json`).
* The Hopper kernels spill with Triton 3.9: 40 to 48 bytes for head size 128, 152 to 184 for 256, up to 256 in mixed
  batches and 1024 in the batch-invariant kernel (464 with Triton 3.8); heads of 64 have two consumers there rather than
  three. `spills` in `tests/aot/` keeps it from becoming more.
* A Triton newer than 3.9 gets the plain Triton kernels and Triton's own launches until its Gluon is known
  (`NEWEST_KNOWN` in `paged_ops/lowerings/gpu/target.py`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {' '.join(VERSIONS)}; default: all")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--markdown", action="store_true", help="only write the page, from what is recorded")
    options = parser.parse_args()
    unknown = sorted(set(options.versions) - set(VERSIONS))
    if unknown:
        parser.error(f"VERSION: expected of {', '.join(VERSIONS)}, got {', '.join(unknown)}")
    if options.markdown:
        PAGE.write_text(markdown())
        return
    failed = False
    for version in options.versions or VERSIONS:
        place = ENVIRONMENTS / version
        try:
            row = measure(version, make(version, place))
        finally:
            if not options.keep:
                shutil.rmtree(place, ignore_errors=True)
        record(row)
        PAGE.write_text(markdown())
        failed |= any(part["failed"] for part in row["parts"].values())
    sys.exit(failed)


if __name__ == "__main__":
    main()
