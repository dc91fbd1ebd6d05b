"""Checks of constructor arguments that several callbacks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainkit.errors import ConfigurationError, nearest

__all__: list[str] = []


def check_choice(owner: str, name: str, value: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    """``value`` is one of ``choices`` (or None where that is allowed)."""
    if value in choices or (optional and value is None):
        return
    known = ", ".join(repr(choice) for choice in choices) + (" or None" if optional else "")
    raise ConfigurationError(
        f"{owner}({name}=...) expected one of {known}, got {value!r}.{nearest(str(value), choices)} "
        f"Write: {owner}({name}={choices[0]!r})"
    )


def check_int(owner: str, name: str, value: Any, minimum: int, *, optional: bool = False) -> None:
    """``value`` is an integer of at least ``minimum`` (or None where that is allowed)."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(
            f"{owner}({name}=...) expected an integer of at least {minimum}{' or None' if optional else ''}, "
            f"got {value!r}. Write, for example: {owner}({name}={max(minimum, 1)})"
        )


def check_number(owner: str, name: str, value: Any, example: float, *, optional: bool = False) -> None:
    """``value`` is a number and not NaN (or None where that is allowed)."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigurationError(
            f"{owner}({name}=...) expected a number{' or None' if optional else ''}, got {value!r}. "
            f"Write, for example: {owner}({name}={example})"
        )


def check_callable(owner: str, name: str, value: Any, example: str) -> None:
    """``value`` can be called, or is None."""
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"{owner}({name}=...) expected a function or None, got {value!r}. Write, for example: {owner}({name}={example})"
        )
