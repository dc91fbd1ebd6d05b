"""The errors of a command line: which argument is wrong, and the nearest name, without what is inside jsonargparse."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from trainkit.errors import TrainkitError, nearest

__all__ = ["readable", "reported"]

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"')
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |Key '|does not accept option ')(?P<name>[^\s'=]+)")
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\w+)")
_UNKNOWN_OF_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s+Option '(?P<name>[^']+)' is not accepted")
_UNKNOWN_PATH = re.compile(
    r"Problem with given class_path '(?P<module>[^']+)\.(?P<name>\w+)':\s+(?:No module named|module '[^']+' has no attribute)"
)
_REQUIRED = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\s+the following arguments are required: (?P<names>\w+(?:, \w+)*)"
)
_NESTED_TYPE = re.compile(r"^ *Given value type: .*NestedArg'>\n", re.MULTILINE)
_NESTED = re.compile(r"NestedArg\(key='(?P<name>[^']+)', val='?(?P<value>.*?)'?\)$", re.MULTILINE)


class _Parser(Protocol):
    """The part of a parser that is needed here."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with code 2."""


@contextmanager
def reported(parser: _Parser, kind: type[TrainkitError]) -> Iterator[None]:
    """Report a wrong value that only creating an object or starting a run shows, as the parser reports others.

    One of several processes raises it, so that the report names its rank. `JSONARGPARSE_DEBUG=1` shows the traceback.

    Args:
        parser: The parser of the subcommand.
        kind: The kind of error that a wrong value raises.
    """
    try:
        yield
    except (kind, ValueError) as error:
        wrong = error if isinstance(error, kind) else error.__cause__  # of the constructor that jsonargparse called
        if not isinstance(wrong, kind) or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise
        parser.error(str(wrong), wrong)


def readable(message: str, options: Iterable[str], classes: Iterable[str]) -> str:
    """A message of jsonargparse for a user.

    Args:
        message: The message.
        options: The options of the parser.
        classes: The names of classes that need no path.
    """
    key = found["key"] if (found := _KEY.search(message)) else "the argument"
    if (found := _UNKNOWN_OF_CLASS.search(message)) is not None:
        path, name = found["path"], found["name"]
        known = nearest(name, _arguments_of(path))
        return f"{key}: {path.rpartition('.')[2]} has no argument {name!r}.{known} All of them: --{key}.help={path}"
    if (found := _REQUIRED.search(message)) is not None:
        kind, names = found["path"].rpartition(".")[2], found["names"].split(", ")
        rest = " ".join(f"--{key}.{name}=…" for name in names)
        return f"{key}: {kind} has no default for {', '.join(names)}. Fix: --{key}={kind} {rest}"
    if (found := _UNKNOWN_PATH.search(message)) is not None:
        module, name = found["module"], found["name"]
        return f"{key}: There is no class {module}.{name}.{nearest(name, dir(sys.modules.get(module)))}"
    if (found := _UNKNOWN_CLASS.search(message)) is not None:
        name = found["name"]
        return (
            f"{key}: There is no class {name!r}.{nearest(name, classes)} Expected the name of a class of trainkit or torch, "
            "or the path of your own: mypackage.MyClass"
        )
    if (found := _UNKNOWN.search(message)) is not None:
        return f"{message}.{nearest(found['name'], options)}"
    return _NESTED.sub(r"\g<name>=\g<value>", _NESTED_TYPE.sub("", message))


def _arguments_of(path: str) -> list[str]:
    """The names of the arguments of a class that is imported; with those of its base classes if it passes them on."""
    module, _, name = path.rpartition(".")
    names: list[str] = []
    for kind in getattr(getattr(sys.modules.get(module), name, None), "__mro__", ()):
        parameters = inspect.signature(kind.__init__).parameters.values()
        names += [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            break
    return names
