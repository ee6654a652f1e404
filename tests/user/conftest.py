"""The package as a user has it: a wheel, installed with its extras, called by fresh processes from an empty folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import test_wheel  # noqa: E402

# A process that asks the hub for a model fails at once.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class User:
    """Runs commands of the installed package in an empty folder."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.bin, self.folder = venv / "bin", folder

    def run(self, command: str, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command of the environment: python, paged-ops, torchrun. Another exit code than expected is a failure."""
        names = ("PYTHONPATH", "TRITON_INTERPRET")
        environment = {name: value for name, value in os.environ.items() if name not in names} | OFFLINE
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            [self.bin / command, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == exit_code, f"{command} {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The environment, made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    place = (base if worker_id == "master" else base.parent) / "installed"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ready").exists():
            test_wheel.install(test_wheel.build(place, "--wheel"), place / "venv", "cli", "hf", "gpu")
            (place / "ready").touch()
    return place / "venv"


@pytest.fixture
def user(installed: Path, tmp_path: Path) -> User:
    return User(installed, tmp_path)
