"""Where the process was when trainkit was imported: a script may go elsewhere before it uses anything of it."""

from __future__ import annotations

import os

__all__ = ["FOLDER"]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


FOLDER = _folder()
