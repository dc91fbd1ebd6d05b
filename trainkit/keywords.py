"""`KnownKeywords`: a base class that suggests the nearest argument for a misspelled one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from trainkit.errors import UnknownNameError, nearest

__all__ = ["KnownKeywords"]


class KnownKeywords:
    """Raises an error with the nearest name for a keyword that `__init__` of a trainkit class does not accept."""

    if not TYPE_CHECKING:  # for a type checker the arguments are those of __init__

        def __new__(cls, *args, **kwargs):
            if args or kwargs:
                _check(cls, kwargs)
            return super().__new__(cls)


def _check(kind: type, keywords: dict[str, Any]) -> None:
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
