"""``LambdaCallback``: a callback out of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainkit.callback import Callback
from trainkit.errors import ConfigurationError, HookError, UnknownNameError, nearest
from trainkit.hooks import HOOKS

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """Calls the given functions as hooks.

    Args:
        **hooks: hook name = function; it is called with ``(trainer, module, ...)`` and the hook's other arguments, as
            a method of a :class:`trainkit.Callback` would be.

    Raises:
        UnknownNameError: no hook has that name.
        HookError: a function cannot be called with its hook's arguments.
        ConfigurationError: what was given is no function.

    Example::

        trainer = Trainer(callbacks=[LambdaCallback(on_train_start=lambda trainer, module: print("off we go"))])
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        for name, function in hooks.items():
            if name not in HOOKS:
                raise UnknownNameError(
                    f"LambdaCallback({name}=...): no hook has that name.{nearest(name, HOOKS)} "
                    f"Known hooks: {', '.join(HOOKS)}."
                )
            _check_callable_as(name, function)
            setattr(self, name, function)  # the hook table asks the instance, so this is the hook


def _check_callable_as(name: str, function: Any) -> None:
    expected = ", ".join(("trainer", "module", *HOOKS[name]))
    if not callable(function):
        raise ConfigurationError(
            f"LambdaCallback({name}=...) expected a function, got {function!r}. "
            f"Write: LambdaCallback({name}=lambda {expected}: ...)"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in without a readable signature
        return
    try:
        signature.bind(*expected.split(", "))
    except TypeError as error:
        raise HookError(
            f"LambdaCallback({name}=...) cannot be called as that hook: expected ({expected}), received {signature}. "
            f"Write: LambdaCallback({name}=lambda {expected}: ...)"
        ) from error
