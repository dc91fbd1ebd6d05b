"""What DeepSpeed compiles on a machine when it is first used there: whether that can be done, and doing it once."""

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

_ABANDONED = 600.0  # seconds without a new file after which nobody is compiling any more
_MARK = "trainkit"  # a file beside torch's lock while that is held by one of our processes
_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def require_async_io() -> None:
    """Refuse at once where DeepSpeed's reads and writes of offloaded tensors cannot be compiled.

    Raises:
        MissingPackageError: names the system's package that is missing.
    """
    if _comes_compiled("async_io"):
        return
    if not _links(require_compiler("offload to NVMe")):
        raise MissingPackageError(
            "offload to NVMe works with libaio, which is not installed with its headers. "
            "Install it: apt install libaio-dev   (Debian, Ubuntu), dnf install libaio-devel   (Fedora)"
        )


def require_compiler(what: str, otherwise: str = "set CXX") -> str:
    """The C++ compiler, for what is compiled.

    Args:
        what: needs it, for the message.
        otherwise: what else the user may do.

    Raises:
        MissingPackageError: there is none.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise MissingPackageError(
            f"{what} compiles a part of DeepSpeed, and there is no compiler {compiler!r}. "
            f"Install one: apt install g++   (Debian, Ubuntu), dnf install gcc-c++   (Fedora); or {otherwise}."
        )
    return compiler


def _links(compiler: str) -> bool:
    """Whether a program with libaio compiles."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(compiler), "-x", "c++", "-", "-o", f"{folder}/program", *flags[0], *flags[1], "-laio"]
        done = subprocess.run(command, input=_PROGRAM, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _comes_compiled(name: str) -> bool:
    """Whether DeepSpeed has been installed with it."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    return any(Path(found.origin).parent.glob(f"ops/*/{name}_op*.so"))


def load(builder: str, *names: str) -> None:
    """Compile and load what DeepSpeed will ask for; other processes of the machine wait for the first one.

    Args:
        builder: a name out of ``deepspeed.ops.op_builder``.
        *names: what is compiled for it.
    """
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    tools: Any = importlib.import_module("torch.utils.cpp_extension")
    with variable("PATH", os.pathsep.join([*_ninja(), os.environ.get("PATH", "")])), quiet():
        folders = [] if _comes_compiled(names[-1]) else [Path(tools._get_build_directory(name, False)) for name in names]
        with _alone(folders[-1].parent / "trainkit.lock" if folders else None):
            for folder in folders:
                _clear(folder)
                (folder / _MARK).touch()
            if folders and not any(folders[-1].glob("*.so")):
                notice(f"compiling DeepSpeed's {names[-1]}. That takes minutes, once: it is kept in {folders[-1]}", True)
            try:
                getattr(builders, builder)().load(verbose=False)
            finally:
                for folder in folders:
                    (folder / _MARK).unlink(missing_ok=True)


def _ninja() -> list[str]:
    """Where the ninja is that came with DeepSpeed: nobody has to activate an environment for it."""
    with suppress(ImportError):
        return [importlib.import_module("ninja").BIN_DIR]
    return [str(Path(sys.executable).parent)]


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Within it no other process of ours compiles."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        with suppress(OSError):  # a file system without locks: torch has one of its own
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear(folder: Path) -> None:
    """Take away the lock that a killed process has left: torch would wait for it for ever.

    One that another program holds is waited for, as long as new files come.
    """
    lock, told, newest = folder / "lock", False, time.time()
    while lock.exists():
        with suppress(FileNotFoundError):
            newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        if (folder / _MARK).exists() or time.time() - newest > _ABANDONED:
            lock.unlink(missing_ok=True)
        elif not told:
            notice(f"waiting for another program that compiles in {folder}; if there is none, delete {lock}", True)
            told = True
        time.sleep(0.1)
