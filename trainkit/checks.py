"""Checks of arguments: integers, numbers, one of several values, functions, keywords; and fields that carry their checks.

`name` is the argument as in messages: `max_epochs`, or with its class `EarlyStopping(patience=)`.

A class with many arguments states each once, as a field of a dataclass: `max_steps: int = argument(-1, whole(-1))`, whose text
is in the docstring of that class. From it come the checks (`check_arguments`), the signature (`accepts`) and the docstring
(`describe_arguments`) of the class with the arguments.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, cleandoc, signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeGuard, overload

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.names import advice

__all__ = [
    "Argument",
    "KnownKeywords",
    "accepts",
    "argument",
    "argument_texts",
    "arguments_of",
    "check_arguments",
    "choice",
    "describe_arguments",
    "function",
    "is_number",
    "is_whole",
    "optional",
    "real_number",
    "switch",
    "whole",
    "whole_number",
]

P = ParamSpec("P")
Check = Callable[[Any, str], Any]
"""Called with a value and the name of its argument; returns the value, or raises a `ConfigurationError`."""


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
    description = f"{expected or bounds}{' or None' if optional else ''}"
    raise error(f"{name} must be {description}, not {value!r}. For example: {fix or _as_code(name, max(least, 1))}")


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
    description = f"a number{bound}{' or None' if optional else ''}"
    raise ConfigurationError(
        f"{name} must be {description}, not {value!r}. For example: {fix or _as_code(name, f'{example:g}')}"
    )


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


def switch(value: Any, name: str) -> Any:
    """`value`, True or False; else a `ConfigurationError`."""
    if isinstance(value, str) or value not in (True, False):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}.")
    return value


def whole(least: int) -> Check:
    """The check `whole_number` with a smallest value; of -1 it says that this is no limit."""
    return partial(whole_number, least=least, expected=f"an integer ≥ {least}" + (" (-1: no limit)" if least == -1 else ""))


def optional(check: Check) -> Check:
    """A check that also accepts None."""
    return lambda value, name: None if value is None else check(value, name)


# ---------------------------------------------------------------------------------------------------- arguments as fields


@dataclass(frozen=True)
class Argument:
    """What a field that `argument` makes carries in its metadata.

    Attributes:
        check: checks a value, and may replace it by one that means the same; `None`: each value is accepted.
        kept: the object keeps the value; otherwise what the constructor makes of it counts.
    """

    check: Check | None
    kept: bool


def argument(default: Any, check: Check | None = None, *, kept: bool = True) -> Any:
    """The field of a dataclass that states an argument; see `Argument`."""
    return field(default=default, metadata={"argument": Argument(check, kept)})


def arguments_of(kind: type) -> dict[str, Argument]:
    """The arguments that the fields of a dataclass state, by name."""
    return {one.name: one.metadata["argument"] for one in fields(kind) if "argument" in one.metadata}


def argument_texts(kind: type) -> dict[str, str]:
    """The text of each argument, from the sections `Args: <title>` of a docstring."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", cleandoc(kind.__doc__ or ""), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def check_arguments(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of arguments, checked by the fields that state them.

    Raises:
        ConfigurationError: A value is wrong.
    """
    stated = arguments_of(kind)
    return {name: value if (check := stated[name].check) is None else check(value, name) for name, value in values.items()}


def accepts(kind: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__(self, **arguments)` the signature of a dataclass; it must refuse unknown arguments itself.

    It may name arguments of the dataclass before `**arguments`, such as one that may be positional.
    """

    def with_signature(function: Any) -> Any:
        original = signature(function)
        first, *_, rest = original.parameters.values()
        parameters: list[Parameter] = [first, *signature(kind).parameters.values(), rest.replace(name="unknown")]
        function.__signature__ = original.replace(parameters=parameters)
        function.__annotations__ = {one.name: one.annotation for one in parameters[1:]} | {"return": "None"}
        function.__module__ = kind.__module__  # These annotations can be resolved in that module.
        return function

    return with_signature


def describe_arguments(text: str | None, kind: type) -> str:
    """The docstring of a class with the sections `Args: <title>` of its arguments, before its section `Raises:`."""
    before, raises, after = cleandoc(text or "").partition("Raises:")
    _, args, sections = cleandoc(kind.__doc__ or "").partition("Args:")
    return f"{before}{args}{sections}\n\n{raises}{after}"


class KnownKeywords:
    """Raises an error with the nearest name for a keyword that `__init__` of a trainkit class does not accept."""

    if not TYPE_CHECKING:  # A type checker reads the arguments from __init__.

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
            fix = advice(kind.__name__, name)
            if fix is not None:
                raise UnsupportedArgumentError(f"{kind.__name__}({name}=...): {fix}.")
            raise UnknownNameError(
                f"{kind.__name__} has no argument {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )
