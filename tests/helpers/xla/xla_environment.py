"""Make the environment of `make test-xla`, or bring it up to date: `python tests/helpers/xla/xla_environment.py FOLDER`.

torch_xla loads with the torch of its own version only, so its tests have an environment of their own: the versions of
`constraints.txt`, but for those in `constraints-xla.txt`. It lies outside of the tree, since it is large and serves every
checkout; so trainkit itself is not installed there. Checkouts have files of all ages, so what was installed is written down in
the environment, and compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

__all__ = ["constraints", "make", "requirements"]

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = ("xla", "deepspeed", "tensorboard", "dev")
DONE, BEGUN = "made-of.txt", "being-made-of.txt"


def requirements() -> list[str]:
    """What `setup.py` asks for."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    return [*given["install_requires"], *(line for extra in EXTRAS for line in given["extras_require"][extra])]


def constraints() -> list[str]:
    """The lines of both files; of what both name, that of `constraints-xla.txt`."""
    own = _lines("constraints-xla.txt")
    names = {_name(line) for line in own}
    return [*own, *(line for line in _lines("constraints.txt") if _name(line) not in names)]


def _lines(file: str) -> list[str]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _name(line: str) -> str:
    return re.split(r"[=;<>\[ ]", line)[0].lower().replace("-", "_")


def make(folder: Path) -> None:
    """Make it, unless it is there as it should be.

    An environment whose making was interrupted is removed and made again: pip takes for whole what it had half installed.
    """
    wanted = "\n".join([f"Python {sys.version_info.major}.{sys.version_info.minor}", *requirements(), *constraints(), ""])
    with _alone(folder):
        done, begun, python = folder / DONE, folder / BEGUN, folder / "bin" / "python"
        there = done.read_text("utf-8") if done.exists() else ""
        if there == wanted and os.access(python, os.X_OK):
            return
        if folder.exists() and any(folder.iterdir()) and not done.exists() and not begun.exists():
            sys.exit(f"{folder} was not made by `make test-xla`. Name a folder that is empty or not there: XLA_VENV=...")
        kept = there.split("\n")[0] == wanted.split("\n")[0] and os.access(python, os.X_OK)
        folder.mkdir(exist_ok=True)
        begun.write_text(wanted, "utf-8")
        done.unlink(missing_ok=True)
        if not kept:
            for old in folder.iterdir():
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                elif old != begun:  # which says whose folder this is
                    old.unlink()
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        limits = folder / "constraints.txt"
        limits.write_text("\n".join([*constraints(), ""]), "utf-8")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(limits)]
        subprocess.run([*pip, *requirements()], check=True)
        begun.replace(done)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other checkout makes the environment at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]).expanduser().absolute())
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment of `make test-xla` could not be made: {error}")
