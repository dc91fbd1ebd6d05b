"""The arguments of a constructor, from its frame."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from trainkit.module.hparams import AttributeDict
from trainkit.names import absent

__all__ = ["AttributeDict", "get_init_args"]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """The arguments that a running `__init__` got, by name, without `self` and with the content of its `**kwargs`.

    In a class of your own call `self.save_hyperparameters()`, which also stores them in checkpoints.

    Args:
        frame: The frame of `__init__`: in it, `inspect.currentframe()`.
    """
    arguments = inspect.getargvalues(frame)
    found = {name: arguments.locals[name] for name in arguments.args[1:]}
    return found | (arguments.locals[arguments.keywords] if arguments.keywords else {})


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
