"""`lazily`: import the names of a package when they are first used."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from trainkit.errors import nearest

__all__ = ["absent", "lazily"]


def lazily(package: dict[str, Any], files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: The `globals()` of the package.
        files: Public name → its module in the package; a module that begins with a dot is in the parent package.
    """

    def get(name: str) -> Any:
        if name not in files:
            raise absent(package["__name__"], name, files)
        value = getattr(import_module(f".{files[name]}", package["__name__"]), name)
        package[name] = value  # __getattr__ is not called again
        return value

    def names() -> list[str]:
        return sorted({*package, *files})

    return get, names


def absent(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """The error for a missing name of a module, with the nearest name, for the module's `__getattr__`.

    For `from module import name` it is an `ImportError`, because Python would replace an `AttributeError` by an `ImportError`
    without the nearest name. Otherwise it is an `AttributeError`, which `hasattr` and `getattr` need.

    Args:
        module: The full name of the module.
        name: The missing name.
        known: The names that exist.
    """
    hint = nearest(name, known)
    frame = inspect.currentframe()
    for _ in range(2):  # the frames of this function and of __getattr__
        frame = None if frame is None else frame.f_back
    if frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
        return ImportError(f"cannot import name {name!r} from {module!r}.{hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}.{hint}")
