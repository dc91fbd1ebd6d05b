"""`LambdaCallback`: a callback made of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainkit.callback import Callback
from trainkit.errors import ConfigurationError, HookError, UnknownNameError, nearest
from trainkit.module.hook_table import HOOKS

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """Runs functions as hooks, without a class of your own.

    Args:
        **hooks: Name of a hook → a function that gets the arguments of the hook, `(trainer, module, ...)`.

    Raises:
        UnknownNameError: There is no hook of this name.
        HookError: A function cannot be called with its hook's arguments.
        ConfigurationError: An argument is not a function.

    Example:
        ```python
        announce = LambdaCallback(on_train_epoch_end=lambda trainer, module: print("epoch", trainer.current_epoch))
        trainer = Trainer(callbacks=[announce])
        ```
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        for name, function in hooks.items():
            if name not in HOOKS:
                raise UnknownNameError(
                    f"LambdaCallback({name}=...): no hook has that name.{nearest(name, HOOKS)} Known hooks: {', '.join(HOOKS)}."
                )
            _check_callable_as(name, function)
            setattr(self, name, function)  # the hook table asks the instance, so this is the hook


def _check_callable_as(name: str, function: Any) -> None:
    names = ["trainer", "module", *HOOKS[name]]
    expected = ", ".join(names)
    if not callable(function):
        raise ConfigurationError(
            f"LambdaCallback({name}=...) expected a function, got {function!r}. "
            f"Fix: LambdaCallback({name}=lambda {expected}: ...)"
        )
    if _accepts(function, names) or (names[-1] == "dataloader_idx" and _accepts(function, names[:-1])):
        return
    raise HookError(
        f"LambdaCallback({name}=...) cannot be called as that hook: expected ({expected}), received "
        f"{inspect.signature(function)}. Fix: LambdaCallback({name}=lambda {expected}: ...)"
    )


def _accepts(function: Callable[..., Any], arguments: list[str]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in without a readable signature
        return True
    return True
