"""The parameters of trainkit's public functions and methods: `for call in public_calls(PUBLIC): call.options`."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from trainkit.module.hook_table import HOOKS

__all__ = ["Call", "documented", "public_calls", "unread"]


class Call(NamedTuple):
    """A function, a method or a constructor, with its public name.

    Attributes:
        name: `"set_seed"`, `"Trainer"` (its constructor) or `"Trainer.fit"`.
        function: The Python function.
        owner: The class, or None.
    """

    name: str
    function: Callable[..., Any]
    owner: type | None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return [p for name, p in inspect.signature(self.function).parameters.items() if name not in ("self", "cls")]

    @property
    def options(self) -> list[str]:
        """The optional parameters, with `*args` and `**kwargs`."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in self.parameters if p.default is not p.empty or p.kind in variable]

    @property
    def is_abstract(self) -> bool:
        """Whether the body does nothing or raises: users write the method, and trainkit calls it."""
        return "<string>" not in self.function.__code__.co_filename and not _body(self.function)


def public_calls(packages: Mapping[str, Sequence[str]]) -> list[Call]:
    """Each public function, method and constructor once, sorted by name; `packages`: package → its public names.

    This omits hooks and other methods that users write and trainkit calls, overrides of methods of other trainkit classes, and
    methods of exceptions and enumerations.
    """
    found: dict[Any, Call] = {}
    for package, names in packages.items():
        for name in names:
            item = getattr(importlib.import_module(package), name)
            calls = _methods(item) if inspect.isclass(item) else [Call(name, item, None)] if inspect.isfunction(item) else []
            for call in calls:
                if call.is_abstract:
                    continue
                known = found.get(call.function)
                if known is None or call.owner in getattr(known.owner, "__mro__", ())[1:]:  # prefer the base class
                    found[call.function] = call
    return sorted(found.values())


def _methods(kind: type) -> Iterator[Call]:
    if issubclass(kind, BaseException | Enum):
        return
    for name in dir(kind):
        if name in HOOKS or (name.startswith("_") and name not in ("__init__", "__call__")):
            continue
        homes = [base for base in kind.__mro__ if name in vars(base)]
        function = inspect.getattr_static(kind, name)
        function = getattr(function, "__func__", function)
        ours = [home for home in homes if home.__module__.startswith("trainkit")]
        overrides = name != "__init__" and len(ours) > 1
        if inspect.isfunction(function) and homes[0] in ours and not overrides:
            yield Call(kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}", function, kind)


def unread(call: Call) -> list[str]:
    """The parameters that neither the body of the function nor an override in a subclass ever reads."""
    bodies = [_body(call.function)]
    if call.owner is not None:
        kinds = [kind for kind in _subclasses(call.owner) if call.function.__name__ in vars(kind)]
        bodies += [_body(vars(kind)[call.function.__name__]) for kind in kinds]
    if not any(bodies):  # for users to override
        return []
    read = {node.id for body in bodies for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
    methods = {node.attr for body in bodies for part in body for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    if "locals" in read or "save_hyperparameters" in methods:  # these read all arguments
        return []
    names = [p.name for p in call.parameters]
    code = call.function.__code__
    position = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    keywords = code.co_varnames[position] if code.co_flags & inspect.CO_VARKEYWORDS else ""
    if keywords not in names and keywords in read:  # the fields of a dataclass, which `trainkit.checks.accepts` shows
        return []
    return [name for name in names if name not in read]


def _body(function: Any) -> list[ast.stmt]:
    """The statements of a function except docstring, `pass` and `raise`; none for methods that `dataclass` has generated."""
    function = getattr(function, "__func__", function)
    if "<string>" in function.__code__.co_filename:
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    doc = ast.get_docstring(tree) is not None
    return [part for part in tree.body[doc:] if not isinstance(part, ast.Pass | ast.Raise)]


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("trainkit"):
            yield sub
            yield from _subclasses(sub)


def documented(call: Call, parameter: str) -> str:
    """What the docstring says about a parameter, in one line; the docstring of a constructor is that of its class."""
    doc = (call.owner if call.owner is not None and call.function.__name__ == "__init__" else call.function).__doc__ or ""
    lines = inspect.cleandoc(doc).splitlines()
    for number, line in enumerate(lines):
        if line.strip().lstrip("*").startswith(f"{parameter}:"):
            indent = len(line) - len(line.lstrip())
            more = lines[number + 1 :]
            end = next((n for n, later in enumerate(more) if len(later) - len(later.lstrip()) <= indent), len(more))
            return " ".join(part.strip() for part in [line, *more[:end]])
    return ""
