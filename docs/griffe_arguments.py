"""Arguments that a class takes from the fields of a dataclass, for the reference: griffe reads the source and sees none."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe


class ArgumentsOfFields(griffe.Extension):
    """Documents classes whose `__init__` has the decorator `trainkit.checks.accepts`, and their `ArgumentView`s."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the classes of a package that has been read."""
        for found in list(_classes(pkg)):
            constructor: Any = found.members.get("__init__")
            decorators = [] if constructor is None or constructor.is_alias else constructor.decorators
            for decorator in decorators:
                if decorator.callable_path == "trainkit.checks.accepts":
                    fields = pkg.modules_collection[decorator.value.arguments[0].canonical_path].all_members
                    _complete(found, constructor, fields)


def _classes(owner: Any) -> Iterator[Any]:
    for member in owner.members.values():
        if not member.is_alias and member.is_class:
            yield member
        elif not member.is_alias and member.is_module:
            yield from _classes(member)


def _complete(found: Any, constructor: Any, fields: dict[str, Any]) -> None:
    kind = getattr(import_module(found.module.path), found.name)
    found.docstring = griffe.Docstring(inspect.getdoc(kind) or "", parent=found)
    stated = {
        name: field
        for name, field in fields.items()
        if getattr(getattr(field, "value", None), "canonical_path", "") == "trainkit.checks.argument"
    }
    self_, *named, rest = constructor.parameters
    kinds = dict.fromkeys(stated, griffe.ParameterKind.keyword_only) | {one.name: one.kind for one in named}
    stated = {one.name: stated[one.name] for one in named} | stated
    constructor.parameters = griffe.Parameters(
        self_,
        *(
            griffe.Parameter(name, annotation=field.annotation, kind=kinds[name], default=field.value.arguments[0])
            for name, field in stated.items()
        ),
        rest,
    )
    for name in stated.keys() & vars(kind).keys():  # not those that the class sets in its constructor
        member = found.members[name]
        if member.is_attribute and member.docstring is None:
            member.docstring = griffe.Docstring(vars(kind)[name].__doc__, parent=member)
            member.annotation = member.value.function.slice
