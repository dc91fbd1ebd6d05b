"""Functions that act on the main process only, under Lightning's names."""

from __future__ import annotations

from typing import Any

from trainkit.compat.lightning_names import (
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainkit.names import absent

__all__ = [
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
