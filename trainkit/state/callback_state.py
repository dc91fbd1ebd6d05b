"""The state of callbacks and loggers in a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainkit.console import notice
from trainkit.errors import CorruptCheckpointError, TrainkitError
from trainkit.state.saved_values import kind_mismatch

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.loggers.base import Logger

__all__ = [
    "callbacks_by_key",
    "check_callbacks",
    "explain_load_errors",
    "logger_states",
    "readable_key",
    "report_callbacks",
    "restore_callbacks",
    "restore_loggers",
]


def logger_states(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """The state of each logger, such as the position in its files; if it is not known, the error for `plan_checkpoint`."""
    return [{"kind": type(logger).__name__, "state": _state_or_error(logger)} for logger in loggers]


def _state_or_error(logger: Logger) -> dict[str, Any] | OSError:
    try:
        return logger.state_dict()
    except OSError as error:  # It may fail on one rank only: too many open files, a disk that fails.
        return error


def callbacks_by_key(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by the key of their state; a second one with the same key gets a number."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        key = name = callback.state_key
        number = 1
        while key in by_key:
            number += 1
            key = f"{name}#{number}"
        by_key[key] = callback
    return by_key


def readable_key(key: str) -> str:
    """The `state_key` of a callback as code: `EarlyStopping{'monitor': 'x'}` → `EarlyStopping(monitor='x')`.

    Options that are off (`None` or 0) are skipped, and so is the mode if there is no monitor. Other keys stay as they are.
    """
    name, brace, _ = key.partition("{")
    try:
        options = ast.parse(key[len(name) :], mode="eval").body
    except (SyntaxError, ValueError):
        return key
    if not (brace and name.isidentifier() and isinstance(options, ast.Dict)):
        return key
    values = {ast.unparse(k): ast.unparse(v) for k, v in zip(options.keys, options.values, strict=True) if k is not None}
    on = {option.strip("'"): value for option, value in values.items() if value not in ("None", "0")}
    if "'monitor'" in values and "monitor" not in on:
        on.pop("mode", None)
    return f"{name}({', '.join(f'{option}={value}' for option, value in on.items())})"


@contextmanager
def explain_load_errors(owner: Any, key: str, what: str) -> Iterator[None]:
    """Raise an error that names the key in the state of the checkpoint if the owner of a state cannot load it.

    Raises:
        CorruptCheckpointError: It cannot.
    """
    try:
        yield
    except TrainkitError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{what}: {key} cannot be loaded: {type(owner).__name__}.load_state_dict raised {type(error).__name__}: {error}. "
            "Expected what its state_dict returned. Fix: use another checkpoint, or the class as it was when it was saved."
        ) from error


def check_callbacks(callbacks: Sequence[Callback], saved: Mapping[str, Any], what: str) -> None:
    """Check the kinds of the values in the states of trainkit's callbacks; arguments as for `restore_callbacks`.

    Raises:
        CorruptCheckpointError: One has another kind than in the present state.
    """
    for key, callback in callbacks_by_key(callbacks).items():
        if saved.get(key) and _is_ours(callback):
            present = dict(callback.state_dict())
            if (problem := kind_mismatch(saved[key], present, f"callbacks[{key!r}]", may_be_none=True)) is not None:
                raise CorruptCheckpointError(f"{what}: {problem}. Fix: use another checkpoint.")


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.partition(".")[0] == "trainkit"


def restore_callbacks(
    callbacks: Sequence[Callback], saved: Mapping[str, Any], what: str = "the checkpoint", of_trainkit: bool | None = None
) -> None:
    """Restore the callbacks.

    Args:
        callbacks: The callbacks of the run.
        saved: Key → saved state.
        what: The checkpoint, for messages.
        of_trainkit: Only those of trainkit, or only others, which may rely on the restored model; `None`: all.

    Raises:
        CorruptCheckpointError: A callback cannot load its state.
    """
    for key, callback in callbacks_by_key(callbacks).items():
        if saved.get(key) and of_trainkit in (None, _is_ours(callback)):
            with explain_load_errors(callback, f"callbacks[{key!r}]", what):
                callback.load_state_dict(saved[key])


def report_callbacks(callbacks: Sequence[Callback], saved: Mapping[str, Any]) -> None:
    """List callbacks without saved state and saved states without a callback."""
    present = callbacks_by_key(callbacks)
    fresh = [readable_key(key) for key, callback in present.items() if key not in saved and callback.state_dict()]
    if fresh:
        notice(f"the checkpoint has no state for these callbacks, which start without it: {', '.join(fresh)}.")
    gone = [readable_key(key) for key, state in saved.items() if key not in present and state]
    if gone:
        notice(f"the checkpoint has state for callbacks that this run does not have: {', '.join(gone)}.")


def restore_loggers(loggers: Iterable[Logger], saved: Sequence[Mapping[str, Any]], what: str = "the checkpoint") -> None:
    """Restore each logger from the first remaining state of its class; raises like `restore_callbacks`."""
    left = list(saved)
    for logger in loggers:
        match = next((entry for entry in left if entry["kind"] == type(logger).__name__), None)
        if match is not None:
            left = [entry for entry in left if entry is not match]
            with explain_load_errors(logger, f"loggers[{saved.index(match)}].state", what):
                logger.load_state_dict(match["state"])
