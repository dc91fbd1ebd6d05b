"""``lazily``: the names of a package, each of which is imported when it is first used."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from trainkit.errors import nearest

__all__ = ["absent", "lazily"]


def lazily(package: dict[str, Any], files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        package: its ``globals()``.
        files: of each public name the module of the package that has it; one that begins with a dot is a module
            of the package around it.
    """

    def get(name: str) -> Any:
        if name not in files:
            raise absent(package["__name__"], name, files)
        value = getattr(import_module(f".{files[name]}", package["__name__"]), name)
        package[name] = value  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted({*package, *files})

    return get, names


def absent(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """The error for a name that a module does not have, with the nearest one; to be raised by the module's ``__getattr__``.

    ``from module import name`` replaces an ``AttributeError`` by an ``ImportError`` of its own, without the nearest name. So
    there it is an ``ImportError``, and an ``AttributeError`` everywhere else: ``hasattr`` and ``getattr`` with a default count
    on it.

    Args:
        module: its full name.
        name: what was asked for.
        known: what there is.
    """
    hint = nearest(name, known)
    frame = inspect.currentframe()
    for _ in range(2):  # of this function, of __getattr__
        frame = None if frame is None else frame.f_back
    if frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
        return ImportError(f"cannot import name {name!r} from {module!r}.{hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}.{hint}")
