"""Checks of arguments: values that pass, and the error messages for others."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from trainkit.checks import (
    accepts,
    argument,
    argument_texts,
    arguments_of,
    check_arguments,
    choice,
    describe_arguments,
    function,
    is_number,
    is_whole,
    optional,
    real_number,
    switch,
    whole,
    whole_number,
)
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.trainer.arguments import TrainerArguments


def refused(check: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(options.get("error", ConfigurationError)) as caught:
        check(*given, **options)
    return str(caught.value)


def test_kinds_of_numbers() -> None:
    """A bool is neither an integer nor a number."""
    assert [is_whole(value) for value in (0, -3, True, 1.0, "1", None)] == [True, True, False, False, False, False]
    assert [is_number(value) for value in (0, 0.5, True, "1", None)] == [True, True, False, False, False]


@pytest.mark.parametrize("value, least, most", [(0, 0, None), (-1, -1, None), (3, 1, 3), (2**70, 0, None), (np.int64(4), 0, 5)])
def test_whole_numbers_in_their_range_pass_as_int(value: Any, least: int, most: int | None) -> None:
    found = whole_number(value, "n", least, most)
    assert (type(found), found) == (int, int(value))


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, -1, 6, np.bool_(True)])
def test_what_is_no_whole_number_in_the_range_is_refused(value: Any) -> None:
    assert refused(whole_number, value, "n", 0, 5) == f"n must be an integer from 0 to 5, not {value!r}. For example: n=1"


def test_the_fix_is_code() -> None:
    text = refused(whole_number, 0, "EarlyStopping(patience=)", 2)
    assert text == "EarlyStopping(patience=) must be an integer ≥ 2, not 0. For example: EarlyStopping(patience=2)"
    text = refused(whole_number, 0, "n", 1, expected="a number of steps", fix="fit(n=3)", error=OptimizerError)
    assert text == "n must be a number of steps, not 0. For example: fit(n=3)"


@pytest.mark.parametrize("value", [0, 0.5, math.inf, np.float64(2.0)])
def test_real_numbers_pass_as_they_are(value: Any) -> None:
    assert real_number(value, "x", least=0) is value


@pytest.mark.parametrize("value", [True, math.nan, "1", None, -0.1])
def test_what_is_no_real_number_in_the_range_is_refused(value: Any) -> None:
    assert (
        refused(real_number, value, "x", least=0, example=0.1) == f"x must be a number ≥ 0, not {value!r}. For example: x=0.1"
    )


def test_none_where_it_is_allowed() -> None:
    assert whole_number(None, "n", optional=True) is None
    assert real_number(None, "x", optional=True) is None
    assert refused(whole_number, 0.5, "n", optional=True) == "n must be an integer ≥ 0 or None, not 0.5. For example: n=1"
    assert refused(real_number, "a", "x", optional=True) == "x must be a number or None, not 'a'. For example: x=1"


def test_a_bound_that_is_not_reached() -> None:
    """`above=0` excludes 0."""
    assert real_number(1e-9, "f(x=)", above=0) == 1e-9
    assert refused(real_number, 0, "f(x=)", above=0, example=25) == "f(x=) must be a number > 0, not 0. For example: f(x=25)"
    assert refused(real_number, math.nan, "x", fix="f(2)") == "x must be a number, not nan. For example: f(2)"


def test_choices_name_the_nearest() -> None:
    assert choice("min", "mode", ("min", "max")) == "min"
    assert choice(None, "mode", ("min", "max"), optional=True) is None
    text = refused(choice, "mim", "E(mode=)", ("min", "max"))
    assert text == "E(mode=) must be one of 'min', 'max', not 'mim'. Did you mean 'min'? For example: E(mode='min')"
    assert "'min' or None, not 3." in refused(choice, 3, "mode", ("min",), optional=True)


def test_functions() -> None:
    assert function(None, "f", "len") is None
    assert function(len, "f", "len") is len
    assert refused(function, 3, "E(f=)", "len") == "E(f=) must be a function or None, not 3. For example: E(f=len)"


# ---------------------------------------------------------------------------------------------------- arguments as fields


@dataclass(kw_only=True)
class Options:
    """What a `Machine` can be given.

    Args: Speed
        steps: Number of steps,
            or -1.
        fast: No pauses.

    Args: Size
        size: In meters.
    """

    steps: int = argument(-1, whole(-1))
    fast: bool | None = argument(None, optional(switch))
    size: float = argument(1.0, kept=False)
    other: int = 3


class Machine:
    """Runs.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    @accepts(Options)
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


def test_fields_carry_their_arguments() -> None:
    stated = arguments_of(Options)
    assert (list(stated), stated["size"].check, stated["size"].kept) == (["steps", "fast", "size"], None, False)
    assert argument_texts(Options) == {"steps": "Number of steps, or -1.", "fast": "No pauses.", "size": "In meters."}
    assert check_arguments(Options, {"steps": 2, "fast": None, "size": "?"}) == {"steps": 2, "fast": None, "size": "?"}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"steps": -2}, r"steps must be an integer ≥ -1 \(-1: no limit\), not -2"),
        ({"fast": 2}, "fast must be True or False, not 2"),
        ({"fast": "True"}, "fast must be True or False, not 'True'"),
    ],
)
def test_values_are_checked_by_their_fields(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_arguments(Options, values)


def test_a_class_that_accepts_them_shows_them() -> None:
    parameters = inspect.signature(Machine).parameters
    assert list(parameters) == ["steps", "fast", "size", "other", "unknown"]
    assert (parameters["steps"].default, parameters["steps"].annotation) == (-1, "int")
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    assert Machine(steps=3).arguments == {"steps": 3}
    text = describe_arguments(Machine.__doc__, Options)
    sections = ["Runs.", "Args: Speed", "Args: Size", "Raises:"]
    assert [line for line in text.splitlines() if line and line[0] != " "] == sections


def test_each_argument_of_the_trainer_has_a_text() -> None:
    assert list(argument_texts(TrainerArguments)) == list(arguments_of(TrainerArguments))
