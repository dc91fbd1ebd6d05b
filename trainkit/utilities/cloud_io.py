"""Files on disks and at URLs, through fsspec."""

from __future__ import annotations

from typing import Any

from trainkit.compat.lightning_names import get_filesystem
from trainkit.names import absent

__all__ = ["get_filesystem"]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
