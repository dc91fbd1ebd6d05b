"""``lazily``: the names of a package, each of which is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trainkit.errors import nearest

__all__ = ["lazily"]


def lazily(package: dict[str, Any], files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        package: its ``globals()``.
        files: of each public name the module of the package that has it.
    """

    def get(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}.{nearest(name, files)}")
        value = getattr(import_module(f"{package['__name__']}.{files[name]}"), name)
        package[name] = value  # the next look-up does not come here
        return value

    def names() -> list[str]:
        return sorted({*package, *files})

    return get, names
