"""Checks that DeepSpeed's C++ extensions can be compiled, and compiles them once per machine."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainkit.console import notice
from trainkit.errors import MissingPackageError
from trainkit.strategies.zero.deepspeed_api import quiet, variable

__all__ = ["load", "require_async_io", "require_compiler"]

_ABANDONED = 600.0  # seconds without a new file after which a compilation counts as abandoned
_MARK = "trainkit"  # file next to PyTorch's lock while a process of trainkit holds the lock
_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def require_async_io() -> None:
    """Check that DeepSpeed's extension for offload to NVMe can be compiled.

    Raises:
        MissingPackageError: a system package is missing; the message names it.
    """
    if _prebuilt("async_io"):
        return
    if not _links(require_compiler("offload to NVMe")):
        raise MissingPackageError(
            "offload to NVMe needs libaio with its headers, which is not installed. "
            "Install it: apt install libaio-dev   (Debian, Ubuntu), dnf install libaio-devel   (Fedora)"
        )


def require_compiler(what: str, otherwise: str = "set CXX") -> str:
    """Returns the command of the C++ compiler.

    Args:
        what: the feature that needs it, for the message.
        otherwise: another fix for the message.

    Raises:
        MissingPackageError: there is no compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise MissingPackageError(
            f"{what} needs a C++ compiler, and {compiler!r} is not installed. "
            f"Install one: apt install g++   (Debian, Ubuntu), dnf install gcc-c++   (Fedora); or {otherwise}."
        )
    return compiler


def _links(compiler: str) -> bool:
    """Whether a program that uses libaio compiles and links."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(compiler), "-x", "c++", "-", "-o", f"{folder}/program", *flags[0], *flags[1], "-laio"]
        done = subprocess.run(command, input=_PROGRAM, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _prebuilt(name: str) -> bool:
    """Whether the extension was compiled when DeepSpeed was installed."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    return any(Path(found.origin).parent.glob(f"ops/*/{name}_op*.so"))


def load(builder: str, *names: str) -> None:
    """Compile and load an extension of DeepSpeed. The first process of the machine compiles; the others wait.

    Args:
        builder: name of a class in `deepspeed.ops.op_builder`.
        *names: names of the extensions that it compiles.
    """
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    tools: Any = importlib.import_module("torch.utils.cpp_extension")
    with variable("PATH", os.pathsep.join([*_ninja(), os.environ.get("PATH", "")])), quiet():
        folders = [] if _prebuilt(names[-1]) else [Path(tools._get_build_directory(name, False)) for name in names]
        with _exclusive(folders[-1].parent / "trainkit.lock" if folders else None):
            for folder in folders:
                _clear(folder)
                (folder / _MARK).touch()
            if folders and not any(folders[-1].glob("*.so")):
                notice(f"compiling DeepSpeed's {names[-1]}. This takes minutes, once; the result is in {folders[-1]}", True)
            try:
                getattr(builders, builder)().load(verbose=False)
            finally:
                for folder in folders:
                    (folder / _MARK).unlink(missing_ok=True)


def _ninja() -> list[str]:
    """Folders with DeepSpeed's ninja, so that the user does not have to activate the virtual environment."""
    with suppress(ImportError):
        return [importlib.import_module("ninja").BIN_DIR]
    return [str(Path(sys.executable).parent)]


@contextmanager
def _exclusive(path: Path | None) -> Iterator[None]:
    """Context manager that holds a lock, so that no other process of trainkit compiles."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        with suppress(OSError):  # a file system without locks; PyTorch has its own lock
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear(folder: Path) -> None:
    """Remove the lock of a killed process, for which PyTorch would wait forever.

    If another program holds the lock, wait as long as it writes new files.
    """
    lock, noticed, newest = folder / "lock", False, time.time()
    while lock.exists():
        with suppress(FileNotFoundError):
            newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        if (folder / _MARK).exists() or time.time() - newest > _ABANDONED:
            lock.unlink(missing_ok=True)
        elif not noticed:
            notice(f"waiting for another program that compiles in {folder}. If there is none, run: rm {lock}", True)
            noticed = True
        time.sleep(0.1)
