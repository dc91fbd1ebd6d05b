"""Create or update the virtual environment of `make test-xla`: `python tests/helpers/xla/xla_environment.py FOLDER`.

torch_xla needs the torch of its own version, so its tests have a separate environment, with the versions of `constraints.txt`
and `constraints-xla.txt`. It is outside of the repository, because it is large and all checkouts use it; trainkit is not
installed in it. As checkouts may need different versions, the environment contains a list of what was installed. If that
differs from what this checkout needs, the environment is updated.
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
    """The requirements of `setup.py`, with those of the extras."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    return [*given["install_requires"], *(line for extra in EXTRAS for line in given["extras_require"][extra])]


def constraints() -> list[str]:
    """The lines of both constraints files; `constraints-xla.txt` overrides `constraints.txt`."""
    own = _lines("constraints-xla.txt")
    names = {_name(line) for line in own}
    return [*own, *(line for line in _lines("constraints.txt") if _name(line) not in names)]


def _lines(file: str) -> list[str]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _name(line: str) -> str:
    return re.split(r"[=;<>\[ ]", line)[0].lower().replace("-", "_")


def make(folder: Path) -> None:
    """Create or update the environment, unless it is up to date.

    If this was interrupted before, the environment is removed and created again: pip does not notice packages that are only
    partly installed.
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
                elif old != begun:  # it marks the folder as one of `make test-xla`
                    old.unlink()
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        limits = folder / "constraints.txt"
        limits.write_text("\n".join([*constraints(), ""]), "utf-8")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(limits)]
        subprocess.run([*pip, *requirements()], check=True)
        begun.replace(done)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock, so that only one checkout changes the environment at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]).expanduser().absolute())
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment of `make test-xla` could not be made: {error}")
