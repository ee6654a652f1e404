"""Build the sdist and the wheel, install the wheel in an environment of its own, and use it there.

``python scripts/test_wheel.py [FOLDER]``, about half a minute; both are copied to FOLDER if they pass. The environment
has only torch and its requirements, linked from the Python that runs this script; for the command line also those of
the extra cli.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NEXT_TO_THE_PACKAGE = ("LICENSE", "README.md", "pyproject.toml")
USE = """
import importlib.metadata, torch, paged_ops
from pathlib import Path
assert Path(paged_ops.__file__).is_relative_to({site!r}), paged_ops.__file__
assert importlib.metadata.version("paged-ops") == paged_ops.__version__ == {version!r}
cache = paged_ops.allocate_kv_cache("NHD", 8, 16, 2, 64, torch.float32)
query, key, value = (torch.randn(3, heads, 64) for heads in (8, 2, 2))
batch = [torch.tensor(each, dtype=torch.int32) for each in ([[5]], [3], [0, 3])]
paged_ops.reshape_and_cache(key, value, cache, torch.arange(80, 83))
output = paged_ops.paged_attention(query, cache, *batch, scale=0.125)
dense = (each.transpose(0, 1)[None] for each in (query, key, value))
expected = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, scale=0.125, enable_gqa=True)
torch.testing.assert_close(output, expected[0].transpose(0, 1))
"""


def run(*command: str | Path, expect: int = 0) -> str:
    """A command's output. An unexpected exit code ends this script and shows it."""
    # Outside the checkout and without PYTHONPATH, so imports find the installed package.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=tempfile.gettempdir(),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != expect:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def requirements(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The named distributions and, recursively, their requirements."""
    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        required = [Requirement(each) for each in found[name].requires or []]
        names += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link(names: list[str], site: Path) -> None:
    """Link distributions of this Python and their requirements into another's site-packages."""
    for distribution in requirements(names).values():
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."} - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def extra(wheel: Path, name: str) -> list[str]:
    """The names of the requirements that an extra of the wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    listed = [Requirement(each) for each in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)]
    alone = [each for each in listed if each.marker is None or each.marker.evaluate({"extra": name})]
    return [each.name for each in alone]


def tracked_files() -> list[str]:
    """The files of the checkout that git tracks or would add: nothing from an earlier build."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


def build(place: Path, *options: str) -> Path:
    """Build the wheel from the tracked files in ``place/dist``, through an sdist unless ``--wheel`` is given."""
    for name in tracked_files():
        (place / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", *options, "--outdir", place / "dist", place / "source")
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path, *extras: str) -> Path:
    """A new environment with the wheel and the linked requirements of these extras; returns its site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    (site,) = venv.glob("lib/python*/site-packages")
    for name in ("", *extras):
        link(extra(wheel, name), site)
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "-q", "--no-deps", wheel)
    return site


def main(folder: Path | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        wheel = build(place)
        (sdist,) = (place / "dist").glob("*.tar.gz")
        version = wheel.name.split("-")[1]

        package = {name for name in tracked_files() if name.startswith("paged_ops/")}
        with zipfile.ZipFile(wheel) as archive:
            inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        if inside != package:
            raise SystemExit(f"the wheel differs from the package's files: {sorted(inside ^ package)}")
        with tarfile.open(sdist) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames()}
        if missing := (package | set(NEXT_TO_THE_PACKAGE)) - inside:
            raise SystemExit(f"not in the sdist: {sorted(missing)}")

        site = install(wheel, place / "venv")
        python, command = place / "venv/bin/python", place / "venv/bin/paged-ops"
        run(python, "-c", USE.format(site=str(site), version=version))
        print(f"{wheel.name}: {len(package)} files; imported, written to and attended with torch alone", flush=True)
        said = run(command, expect=1)
        if "Traceback" in said or "pip install '.[cli]'" not in said:
            raise SystemExit(f"paged-ops without the extra cli: expected an error that names the extra, got\n{said}")

        link(extra(wheel, "cli"), site)
        if "paged_attention" not in (said := run(command, "support")):
            raise SystemExit(f"paged-ops support: expected the table of ops, got\n{said}")
        print("paged-ops support: runs with the extra cli", flush=True)
        if folder:
            shutil.copytree(place / "dist", folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
