"""Run a documentation page in a new process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from helpers.docs.pages import blocks, write
from helpers.support import ROOT, run_python

__all__ = ["name_of", "pages_in", "run_files_of", "runs_in_order", "with_code"]


def name_of(page: Path) -> str:
    """The path of a page, relative to the repository."""
    return page.relative_to(ROOT).as_posix()


def with_code(*pages: Path) -> list[Path]:
    """Those of the pages that have Python or bash blocks."""
    return [page for page in pages if any(one.language in ("python", "bash") for one in blocks(page.read_text("utf-8")))]


def pages_in(folder: str) -> list[Path]:
    """The pages with Python or bash blocks in a folder of the documentation."""
    return with_code(*sorted((ROOT / "docs" / folder).glob("*.md")))


def runs_in_order(page: Path, folder: Path) -> None:
    """Run the blocks of a page in order, in one new process with `folder` as working directory; all must succeed."""
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # `python` and `trainkit` of this environment
    done = run_python(str(ROOT / "tests/helpers/docs/pages.py"), str(page), "", cwd=folder, env={"PATH": path}, timeout=400)
    assert done.returncode == 0, f"{name_of(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def run_files_of(page: str, folder: Path, *command: str) -> str:
    """Write the files of a how-to page to a folder, and run Python there; returns what it prints.

    A new interpreter runs it, because such a page opens a door, which stays open until a process ends. Ray would give its
    workers a niceness of 15: on a busy machine they would not finish.
    """
    for block in blocks((ROOT / "docs" / "how-to" / page).read_text("utf-8")):
        if "." in block.title:
            write(block, folder)
    env = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "PYTHONWARNINGS": ""}
    done = run_python("-u", *command, cwd=folder, bare=True, env=env, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
