"""The packages whose classes and functions a checkpoint may name: `trust=` of `load_from_checkpoint`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trainkit.errors import CheckpointError, ConfigurationError

__all__ = ["Trust"]


class Trust:
    """Finds the classes and functions that a checkpoint names, in the packages that the user has named.

    Without packages it finds nothing, and imports nothing.

    Args:
        prefixes: What a path must begin with, each with a dot at its end: `"mypackage."`.
        where: The argument that they are of, for messages.

    Raises:
        ConfigurationError: It is no list of such prefixes.
    """

    def __init__(self, prefixes: Iterable[str] = (), where: str = "load_from_checkpoint(trust=...)") -> None:
        given = prefixes if isinstance(prefixes, str) else list(prefixes)
        if isinstance(given, str) or not all(map(_is_prefix, given)):
            raise ConfigurationError(
                f"{where}: expected prefixes of import paths, each with a dot at its end, got {given!r}. "
                "Fix: trust=['mypackage.']; on the command line: --trust mypackage."
            )
        self._prefixes = tuple(given)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def find(self, path: object) -> Any:
        """The class or function with an import path, or `None` if the path or what it leads to is not trusted.

        The path and the module that defines the object begin with the same prefix, and the object has its name there. So
        `mypackage.utils.os.system` is not found: `os` is an attribute of `mypackage.utils` and no module of the package.

        Raises:
            CheckpointError: A module of a trusted package cannot be imported.
        """
        prefixes = [prefix for prefix in self._prefixes if isinstance(path, str) and path.startswith(prefix)]
        if not isinstance(path, str) or not prefixes or not all(map(str.isidentifier, names := path.split("."))):
            return None
        try:
            module, rest = _module(names)
        except ImportError as error:
            raise CheckpointError(
                f"the checkpoint names {path:.200}, which trust= covers, and its module cannot be imported: {error}. Expected "
                "an installed package. Fix: install it, or pass the argument to load_from_checkpoint"
            ) from error
        found = _attribute(module, rest)
        home = getattr(found, "__module__", None)
        if not (inspect.isclass(found) or inspect.isroutine(found)) or not isinstance(home, str):
            return None
        defined = _attribute(sys.modules.get(home), found.__qualname__.split("."))
        return found if defined is found and any(f"{home}.".startswith(prefix) for prefix in prefixes) else None


def _is_prefix(value: object) -> bool:
    return isinstance(value, str) and value[-1:] == "." and all(map(str.isidentifier, value[:-1].split(".")))


def _module(names: list[str]) -> tuple[ModuleType, list[str]]:
    """The module that a path begins with, and the names of the attributes that follow: at least the last name."""
    module, count = import_module(names[0]), 1
    while count < len(names) - 1 and hasattr(module, "__path__") and not inspect.isclass(vars(module).get(names[count])):
        name = ".".join(names[: count + 1])
        if find_spec(name) is None:
            break
        module, count = import_module(name), count + 1
    return module, names[count:]


def _attribute(owner: Any, names: list[str]) -> Any:
    """An attribute of a module, or of a class in it, of a class in that, and so on; `None` if it does not exist."""
    for name in names:
        if not isinstance(owner, ModuleType | type) or (owner := getattr(owner, name, None)) is None:
            return None
        if isinstance(owner, ModuleType):
            return None
    return owner
