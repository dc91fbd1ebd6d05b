"""Checks of arguments: integers, numbers, one of several values, functions, and the names of keywords.

`name` is the argument as in messages: `max_epochs`, or with its class `EarlyStopping(patience=)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, overload

from trainkit.errors import ConfigurationError, UnknownNameError, nearest

__all__ = ["KnownKeywords", "choice", "function", "is_number", "is_whole", "real_number", "whole_number"]


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether this is an `int`, other than `True` and `False`."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is an `int` or a `float`, other than `True` and `False`."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@overload
def whole_number(
    value: Any,
    name: str,
    least: int = 0,
    most: int | None = None,
    *,
    expected: str = "",
    fix: str = "",
    error: type[Exception] = ...,
) -> int:
    """Never returns None."""


@overload
def whole_number(value: Any, name: str, least: int = 0, most: int | None = None, *, optional: Literal[True]) -> int | None:
    """Returns None if `value` is None."""


def whole_number(
    value: Any,
    name: str,
    least: int = 0,
    most: int | None = None,
    *,
    optional: bool = False,
    expected: str = "",
    fix: str = "",
    error: type[Exception] = ConfigurationError,
) -> int | None:
    """`value` as an `int` from `least` to `most`; numpy's integers are accepted too.

    Args:
        value: The value of the user.
        name: The argument.
        least: The smallest value.
        most: The largest value; None: no limit.
        optional: Accept and return None.
        expected: Replaces "an integer ≥ 1" in the message.
        fix: Code that works; default: the argument with the smallest number from 1 on.
        error: The class of the error.

    Raises:
        ConfigurationError: An invalid value; `error` replaces the class.
    """
    if optional and value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    bounds = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"
    wanted = f"{expected or bounds}{' or None' if optional else ''}"
    raise error(f"{name} must be {wanted}, not {value!r}. For example: {fix or _as_code(name, max(least, 1))}")


def real_number(
    value: Any,
    name: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    optional: bool = False,
    example: float = 1.0,
    fix: str = "",
) -> Any:
    """`value`, an `int` or a `float` other than NaN.

    Args:
        value: The value of the user.
        name: The argument.
        least: The smallest value.
        above: The value must be larger than this.
        optional: Accept and return None.
        example: A number that works.
        fix: Code that works; default: the argument with `example`.

    Raises:
        ConfigurationError: An invalid value.
    """
    if optional and value is None:
        return None
    if is_number(value) and not math.isnan(value) and least <= value and (value > above or above == -math.inf):
        return value
    bound = f" ≥ {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else ""
    wanted = f"a number{bound}{' or None' if optional else ''}"
    raise ConfigurationError(f"{name} must be {wanted}, not {value!r}. For example: {fix or _as_code(name, f'{example:g}')}")


def choice(value: Any, name: str, choices: Sequence[str], *, optional: bool = False) -> Any:
    """`value`, one of `choices`, or None where it is `optional`; else a `ConfigurationError`."""
    if value in choices or (optional and value is None):
        return value
    known = ", ".join(repr(one) for one in choices) + (" or None" if optional else "")
    hint = nearest(str(value), choices)
    raise ConfigurationError(
        f"{name} must be one of {known}, not {value!r}.{hint} For example: {_as_code(name, repr(choices[0]))}"
    )


def function(value: Any, name: str, example: str) -> Any:
    """`value`, a function or None; else a `ConfigurationError`."""
    if value is None or callable(value):
        return value
    raise ConfigurationError(f"{name} must be a function or None, not {value!r}. For example: {_as_code(name, example)}")


def _as_code(name: str, value: Any) -> str:
    return f"{name[:-1]}{value})" if name.endswith("=)") else f"{name}={value}"


class KnownKeywords:
    """Raises an error with the nearest name for a keyword that `__init__` of a trainkit class does not accept."""

    if not TYPE_CHECKING:  # for a type checker the arguments are those of __init__

        def __new__(cls, *args, **kwargs):
            if args or kwargs:
                _check_keywords(cls, kwargs)
            return super().__new__(cls)


def _check_keywords(kind: type, keywords: dict[str, Any]) -> None:
    init: Any = inspect.getattr_static(kind, "__init__")
    if init is object.__init__:  # Python does not check this where there is a __new__
        raise TypeError(f"{kind.__name__}() takes no arguments")
    if not keywords or not getattr(init, "__module__", "").startswith("trainkit."):
        return
    parameters = list(inspect.signature(init).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for name in keywords:
        if name not in known:
            raise UnknownNameError(
                f"{kind.__name__} has no argument {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )
