"""The working directory when trainkit was imported: a script may change it before it uses trainkit."""

from __future__ import annotations

import os

__all__ = ["FOLDER"]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


FOLDER = _folder()
