"""Run the tests of SGLang's backend (tests/integrations/sglang) on a machine without a GPU.

    .venv-sglang/bin/python scripts/test_sglang.py [arguments of pytest]

``make test-sglang`` calls it in an environment of its own. sglang-kernel is linked with the CUDA driver, and its import
fails without one. Where the driver is missing, a library of the same name is compiled whose functions only fail.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def write_driver(folder: Path) -> None:
    """``libcuda.so.1`` with the functions that sglang-kernel names; each returns an error."""
    found = importlib.util.find_spec("sgl_kernel")
    assert found is not None
    assert found.origin is not None
    names: set[str] = set()
    for library in Path(found.origin).parent.rglob("*.so"):
        names |= {name.decode() for name in re.findall(rb"\0(cu[A-Z][A-Za-z0-9_]+)(?=\0)", library.read_bytes())}
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names))
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)


def main(arguments: list[str]) -> int:
    """pytest's exit status."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if not has_driver():
            write_driver(Path(folder))
            others = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = folder if not others else f"{folder}:{others}"
        command = [sys.executable, "-m", "pytest", "-q", "tests/integrations/sglang", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
