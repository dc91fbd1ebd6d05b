"""Files on disks and at URLs, through fsspec."""

from __future__ import annotations

import os
from typing import Any

from trainkit.names import absent

__all__ = ["get_filesystem"]


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The file system of a path or URL: an `fsspec.AbstractFileSystem`.

    Args:
        path: A path, or a URL such as `s3://bucket/runs`.
        **kwargs: Options of the file system.

    Example:
        ```python
        with get_filesystem("memory://notes.txt").open("memory://notes.txt", "w") as file:
            file.write("loss 0.1")
        ```
    """
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
