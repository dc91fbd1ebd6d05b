"""Runs a page of the documentation in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from helpers.docs.pages import blocks
from helpers.support import ROOT, run_python

__all__ = ["name_of", "pages_in", "runs_in_order", "with_code"]


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def with_code(*pages: Path) -> list[Path]:
    """The pages with blocks that run."""
    return [page for page in pages if any(one.language in ("python", "bash") for one in blocks(page.read_text("utf-8")))]


def pages_in(folder: str) -> list[Path]:
    """The pages of a folder of the documentation with blocks that run."""
    return with_code(*sorted((ROOT / "docs" / folder).glob("*.md")))


def runs_in_order(page: Path, folder: Path) -> None:
    """Run the blocks of a page in order, in one process, in this folder."""
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # `python` and `trainkit` of this environment
    done = run_python(str(ROOT / "tests/helpers/docs/pages.py"), str(page), "", cwd=folder, env={"PATH": path}, timeout=400)
    assert done.returncode == 0, f"{name_of(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
