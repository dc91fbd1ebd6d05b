"""Folders that users name: ``~`` is expanded, and an address is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainkit.errors import ConfigurationError

__all__ = ["local_path"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # of two letters at least, unlike a drive; Path("s3://x") has one slash


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """A folder of a local or mounted file system, with ``~`` expanded.

    Args:
        path: as the user gave it.
        argument: its name, for the message.

    Raises:
        ConfigurationError: it is an address such as ``s3://bucket/run``.
    """
    text = os.fsdecode(path)
    if _ADDRESS.match(text):
        raise ConfigurationError(
            f"{argument}: expected a local folder, got the address {text!r}. Only local or mounted folders are supported. Fix: "
            f"use a local folder, {argument}='runs', and copy it when the run has ended; or mount the remote folder and give "
            "its mount point."
        )
    return Path(os.path.expanduser(text))
