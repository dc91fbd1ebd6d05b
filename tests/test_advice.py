"""Whatever messages advise must exist: pages of the documentation, classes and their arguments, methods and commands."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import house

from trainkit.cli.main import SUBCOMMANDS

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')  # of a line of JSON
MODULES = (
    "",
    ".callbacks",
    ".errors",
    ".loggers",
    ".precision",
    ".registry",
    ".strategies",
    ".strategy",
    ".tracking",
    ".utils",
)


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string except docstrings. The values in an f-string become `{}`."""
    nodes = list(ast.walk(tree))
    skipped = {id(node.body[0].value) for node in nodes if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node)}  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


@pytest.fixture(scope="module")
def messages() -> list[tuple[str, str]]:
    """The place and text of each string in the sources of the package."""
    files = [file for folder in house.PACKAGES for file in house.python_files(house.ROOT / folder)]
    found = [
        (f"{file.relative_to(house.ROOT)}:{line}", text)
        for file in files
        for line, text in texts(ast.parse(file.read_text("utf-8")))
    ]
    for file in (house.ROOT / "trainkit" / "names").glob("*.json"):
        for line, text in enumerate(file.read_text("utf-8").splitlines(), 1):
            found += [(f"{file.relative_to(house.ROOT)}:{line}", json.loads(quoted)) for quoted in _STRINGS.findall(text)]
    return found


def test_pages_and_headings_exist(messages: list[tuple[str, str]]) -> None:
    named = [(place, *found) for place, text in messages for found in re.findall(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?", text)]
    assert named
    wrong = []
    for place, page, anchor in named:
        path = house.ROOT / "docs" / page
        if not path.is_file() or (anchor and anchor not in anchors(path.read_text("utf-8"))):
            wrong.append(f"{place}: docs/{page}" + f"#{anchor}" * bool(anchor))
    assert wrong == []


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the documentation site creates them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_classes_accept_the_arguments_that_are_advised(messages: list[tuple[str, str]]) -> None:
    public: dict[str, Any] = {}
    for module in map(importlib.import_module, (f"trainkit{name}" for name in MODULES)):
        public |= {name: getattr(module, name) for name in module.__all__}
    found, wrong = 0, []
    for place, text in messages:
        for name, arguments in re.findall(r"\b([A-Z]\w+)\(([^()]*)", text):
            if inspect.isclass(public.get(name)):
                found += 1
                wrong += [
                    f"{place}: {name}({key}=)" for key in re.findall(r"(\w+)=", arguments) if not accepts(public[name], key)
                ]
    assert found > 100
    assert wrong == []


def accepts(kind: type, key: str) -> bool:
    return key in inspect.signature(kind).parameters


def test_methods_that_are_advised_exist(messages: list[tuple[str, str]]) -> None:
    import trainkit

    owners = {"trainer": trainkit.Trainer, "accelerator": trainkit.Accelerator}
    called = {(place, *call) for place, text in messages for call in re.findall(r"\b(trainer|accelerator)\.([a-z]\w*)\(", text)}
    assert called
    assert [call for call in called if not hasattr(owners[call[1]], call[2])] == []


def test_commands_that_are_advised_exist(messages: list[tuple[str, str]]) -> None:
    """`trainkit NAME`, at the start or after a colon and before an option or a capital word, is an existing command."""
    pattern = r"(?:^|: |\n *)trainkit ([a-z-]+)(?= (?:--|[A-Z]))"
    named = {(place, name) for place, text in messages for name in re.findall(pattern, text)}
    assert named
    assert [(place, name) for place, name in named if name not in SUBCOMMANDS] == []
