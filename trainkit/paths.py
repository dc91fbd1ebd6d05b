"""Local folders: `~` is expanded, and a URL raises an error."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainkit.errors import ConfigurationError

__all__ = ["local_path"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # at least two letters, unlike a Windows drive; Path("s3://x") has one slash


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """A folder of a local or mounted file system, with `~` expanded.

    Args:
        path: The path of the user.
        argument: The name of the argument, for the message.

    Raises:
        ConfigurationError: A URL such as `s3://bucket/run`.
    """
    text = os.fsdecode(path)
    if _URL.match(text):
        raise ConfigurationError(
            f"{argument}: expected a local folder, got the URL {text!r}. Only local or mounted folders are supported. Fix: "
            f"use a local folder, {argument}='runs', and copy it after the run; or mount the remote folder and pass its "
            "mount point."
        )
    return Path(os.path.expanduser(text))
