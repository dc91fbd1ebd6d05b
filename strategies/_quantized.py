"""Optimizers that keep their state in 8 or 4 bits, in blocks of each parameter."""

from __future__ import annotations

from typing import Any

__all__ = ["quantizes"]


def quantizes(kind: type[Any]) -> bool:
    """Whether an optimizer of this class quantizes blocks of its state, by its package."""
    return kind.__module__.startswith("torchao.") or (kind.__module__.startswith("bitsandbytes.") and "8bit" in kind.__name__)
