"""C++ functions, compiled at their first use by the compiler that torch uses for extensions.

A library is kept in the user's own subfolder of torch's extensions folder. Its name has a hash of source, compiler,
flags and machine, and a hash of its own bytes; later processes load it if both match.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The exceptions that load raises.
FAILURES = (OSError, subprocess.SubprocessError, AttributeError)
# The time limit of a compiler, and the number of lines of its output in a warning.
MOST_SECONDS, LINES_SAID = 300, 5


class Source(NamedTuple):
    """A file with one function, which takes a pointer to a structure. It may include the headers of its folder."""

    path: Path
    function: str
    argument: type[ctypes.Structure]
    result: Any  # its type, None: nothing
    stem: str  # of the library's name
    what: str  # for the warning that it cannot be compiled
    flags: tuple[str, ...] = ()
    keeps_lock: bool = False  # whether it holds the GIL, as short functions should
    more: tuple[Any, ...] = ()  # types of further arguments


def built(source: Source, processor: Sequence[str] = ()) -> Callable[..., Any] | None:
    """The C++ function, or None if no compiler can make it. If there is a compiler, a warning says why it failed."""
    if sys.platform == "win32":
        return None  # MSVC does not have the vector types of the source
    try:
        # Torch finds the compiler (CXX) and the folder (TORCH_EXTENSIONS_DIR); the import needs setuptools.
        from torch.utils import cpp_extension

        named = cpp_extension.get_cxx_compiler()
        compiler = shlex.split(named)
        if not compiler:
            raise ValueError(f"expected the name of a compiler in CXX, got {named!r}")
    except (ImportError, ValueError) as error:
        _warn(source, error)
        return None
    if shutil.which(compiler[0]) is None:
        return None
    try:
        shared = Path(cpp_extension._get_build_directory("paged_ops", False))
        return load(source, compiler, processor, own_folder(shared))
    except FAILURES:
        pass
    try:  # the folder may be read-only, full or unsafe: then a library for this process only
        with tempfile.TemporaryDirectory() as folder:
            return load(source, compiler, processor, Path(folder))
    except FAILURES as error:
        _warn(source, error)
        return None


def _warn(source: Source, why: Exception) -> None:
    lines = str(getattr(why, "stderr", None) or why).strip().splitlines()
    said = "\n".join(lines[:LINES_SAID])
    warnings.warn(f"paged_ops: {source.what} is not compiled, and slower: {said}", stacklevel=4)


def own_folder(shared: Path) -> Path:
    """A subfolder of ``shared`` that only this user can write and no other user can replace, so that no library of
    another user is ever loaded.

    Raises OSError if there is no such folder.
    """
    folder = shared.resolve() / f"user-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"expected a folder that only this user can write, got {folder}")
    for parent in folder.parents:
        if _others_can_rename_in(parent.lstat()):
            raise PermissionError(f"expected a folder where no other user can rename {folder}, got {parent}")
    return folder


def _others_can_rename_in(folder: os.stat_result) -> bool:
    """Whether a user other than root and this one can rename this user's files in a folder."""
    if folder.st_uid not in (0, os.geteuid()):
        return True
    if folder.st_mode & stat.S_ISVTX:  # sticky: only owners rename
        return False
    shared_by_group = folder.st_mode & stat.S_IWGRP and not _is_private(folder.st_gid)
    return bool(folder.st_mode & stat.S_IWOTH or shared_by_group)


def _is_private(group: int) -> bool:
    """Whether a group is this user's own: of the same name, and without other members. Where users have such groups,
    the folders that they make are writable for the group."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def load(source: Source, compiler: Sequence[str], processor: Sequence[str], folder: Path) -> Callable[..., Any]:
    """The function, from a library in ``folder``. It is compiled unless a complete, unchanged library is there.

    Raises OSError, subprocess.SubprocessError or AttributeError (the compiled library has no such function).
    """
    command = [*compiler, "-O3", "-std=c++17", "-shared", "-fPIC", *source.flags, *processor]
    made_of = (_text(source), command, shutil.which(compiler[0]), platform.machine(), platform.libc_ver())
    stem = f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
    for library in folder.glob(f"{stem}-*.so"):
        if library == _named_by_content(library, stem):
            return _function(source, library)
        library.unlink(missing_ok=True)  # damaged: loading it could crash the process
    # Compiled under another name, so that no process loads an unfinished library.
    handle, path = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    unfinished = Path(path)
    try:
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=MOST_SECONDS)
        run([*command, str(source.path), "-o", path])
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # a full disk may raise only here
        function = _function(source, unfinished)
        unfinished.replace(_named_by_content(unfinished, stem))
    finally:
        unfinished.unlink(missing_ok=True)
    return function


def _text(source: Source) -> str:
    return "".join(path.read_text() for path in (source.path, *sorted(source.path.parent.glob("*.h"))))


def _named_by_content(library: Path, stem: str) -> Path:
    return library.with_name(f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so")


def _function(source: Source, library: Path) -> Callable[..., Any]:
    loaded = (ctypes.PyDLL if source.keeps_lock else ctypes.CDLL)(str(library))
    function = getattr(loaded, source.function)
    function.argtypes, function.restype = [ctypes.POINTER(source.argument), *source.more], source.result
    return function
