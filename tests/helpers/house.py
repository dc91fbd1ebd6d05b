"""The rules for the code of this repository that no tool has, as functions: each takes a file and returns complaints.

`test_house.py` applies them to the repository, and to small bad examples to prove that each rule can fail. import-linter checks
layers; pickle, printing, optional packages and the order of `__all__` by ruff: see pyproject.toml.

A room is a module or package directly below `trainkit`, for example `trainkit.data`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]

# Folder → its package name. Links in trainkit/ are not followed, so that each file is read once.
PACKAGES = {"trainkit": "trainkit", "callbacks": "trainkit.callbacks", "strategies": "trainkit.strategies"}

OWN_FILE = "A file of its own because"
SMALL = 60  # lines of code

# Prefixes of DeepSpeed's keys and attributes that no `StrategyInfo` lists.
PREFIXES = ("zero_stage", "zero_opt", "ds_")

FILE_LINES = 700  # of code
FUNCTION_LINES = 60
COMPLEXITY = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


class Source(NamedTuple):
    """One file: its path in the repository, its module name, and its text."""

    path: str
    module: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, line: int, complaint: str) -> str:
        return f"{self.path}:{line} {complaint}"


class Import(NamedTuple):
    line: int
    module: str
    name: str | None  # of `from module import name`
    place: str  # "module", "function" or "typing"

    @property
    def full(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


# --------------------------------------------------------------------------------------------------------- reading


def python_files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder; links are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not Path(parent, f).is_symlink())
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))


def package_sources() -> list[Source]:
    """Every module of the three source folders."""
    return [
        Source(path.relative_to(ROOT).as_posix(), module_name(path.relative_to(ROOT)), path.read_text("utf-8"))
        for folder in PACKAGES
        for path in python_files(ROOT / folder)
    ]


def module_name(path: Path) -> str:
    """The module name of a file in one of the three source folders."""
    parts = [PACKAGES[path.parts[0]], *path.with_suffix("").parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def user_sources(*where: str) -> list[Source]:
    """Code as users write it: the Python files and the Python blocks of Markdown files in these folders and files."""
    sources = []
    for path in (ROOT / name for name in where):
        for file in python_files(path):
            sources.append(Source(file.relative_to(ROOT).as_posix(), "", file.read_text("utf-8")))
        for file in [path] if path.is_file() else sorted(path.rglob("*.md")):
            sources += python_blocks(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    return sources


def python_blocks(path: str, text: str) -> list[Source]:
    """The Python code blocks of a Markdown file; line numbers are those of the file."""
    blocks = []
    for match in re.finditer(r"^( *)```python[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(2))
        blocks.append(Source(path, "", "\n" * line + textwrap.dedent(match[2])))
    return blocks


def imports(tree: ast.AST) -> list[Import]:
    """Every import, and whether it runs at import of the module, in a function, or only for type checkers."""
    found: list[Import] = []

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, alias.name, None, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.extend(Import(node.lineno, module, alias.name, place) for alias in node.names)
        elif isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, "typing")
            for child in node.orelse:
                visit(child, place)
        else:
            inside = "function" if isinstance(node, Function) and place == "module" else place
            for child in ast.iter_child_nodes(node):
                visit(child, inside)

    visit(tree, "module")
    return found


def room_of(module: str) -> str:
    """The room of a module, or an empty string for `trainkit` itself and `trainkit.__main__`."""
    room = module.partition(".")[2].partition(".")[0]
    return "" if room == "__main__" else room


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a name or a chain of attributes, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    return ""


def constant(node: ast.AST) -> object:
    """The value of a literal, or None."""
    return node.value if isinstance(node, ast.Constant) else None


def under(name: str, package: str) -> bool:
    """Whether a dotted name is the package or is in it."""
    return name == package or name.startswith(f"{package}.")


def all_of(tree: ast.AST, kind: type[Node]) -> Iterator[Node]:
    """Every node of a kind."""
    return (node for node in ast.walk(tree) if isinstance(node, kind))


# ----------------------------------------------------------------------------------------------------------- rules


def private_imports(source: Source, public: Mapping[str, Collection[str]]) -> list[str]:
    """Uses of private names of trainkit in `source`; `public` is the public modules and their public names."""
    try:
        tree = source.tree
    except SyntaxError as error:
        return [source.at(error.lineno or 0, f"does not parse: {error.msg}")]
    complaints = []
    for item in imports(tree):
        if not under(item.module, "trainkit"):
            continue
        if item.module not in public:
            complaints.append(source.at(item.line, f"imports {item.module}, which is not public"))
        elif item.name is not None and not _is_public(item.full, public):
            complaints.append(source.at(item.line, f"imports {item.full}, which is not in {item.module}.__all__"))
    if any(item.name is None and under(item.module, "trainkit") for item in imports(tree)):
        for node in ast.walk(tree):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if name.count(".") <= 2 and under(name, "trainkit") and not _is_public(name, public):
                complaints.append(source.at(node.lineno, f"uses {name}, which is not public"))
    return complaints


def _is_public(name: str, public: Mapping[str, Collection[str]]) -> bool:
    """Whether a dotted name is a public module, a name in one, or an attribute of such a name."""
    if name in public:
        return True
    module, _, last = name.rpartition(".")
    if module in public:
        return last in public[module]
    return bool(module) and _is_public(module, public)


def branches_on_strategy(source: Source) -> list[str]:
    """Conditions on the class of a strategy. Use its capabilities, which are attributes; see `trainkit.strategy`."""
    return [
        source.at(node.lineno, "asks for the class of a strategy")
        for node in ast.walk(source.tree)
        if any(name.endswith("Strategy") for name in _classes_asked_for(node))
    ]


def _classes_asked_for(node: ast.AST) -> list[str]:
    """The classes that an expression or a `case` compares something with."""
    if isinstance(node, ast.MatchClass):
        return _class_names(node.cls)
    if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
        names = _class_names(node.args[1])
        # an argument called strategy may be tested for being a short name (str), or a class instead of an object (type)
        is_strategy = dotted(node.args[0]).split(".")[-1].lstrip("_") == "strategy"
        return ["Strategy"] if is_strategy and names not in (["str"], ["type"]) else names
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(_is_class_of(side) for side in sides):
            return [name for side in sides for name in _class_names(side)]
    return []


def _is_class_of(node: ast.AST) -> bool:
    """Whether an expression is `type(x)` or `x.__class__`."""
    return (isinstance(node, ast.Call) and dotted(node.func) == "type") or dotted(node).endswith(".__class__")


def _class_names(node: ast.AST) -> list[str]:
    """The last names in a class, a tuple of classes, or a union of them."""
    if isinstance(node, ast.Tuple):
        return [name for item in node.elts for name in _class_names(item)]
    if isinstance(node, ast.BinOp):
        return _class_names(node.left) + _class_names(node.right)
    name = dotted(node).split(".")[-1]
    return [name] if name else []


def strategy_names(infos: Iterable[Any]) -> frozenset[str]:
    """All names that the `StrategyInfo`s declare: short names, packages, classes and attributes."""
    found: set[str] = set()
    for info in infos:
        found |= {*info.names, *info.packages, *info.parameter_marks, *info.adam_classes, *info.host_optimizers}
        found |= {info.path.partition(":")[2], info.shape_attribute or "", info.distributed_type or ""}
    return frozenset(found - {""})


def names_of_strategies(source: Source, names: Collection[str]) -> dict[str, str]:
    """Names, attributes, arguments, imports and one-word strings that contain the name of a strategy, with complaints.

    Human-readable texts are exempt: docstrings, f-strings, and every string with a space in it.
    """
    # must not match: "xla" in "set_xlabel", "ds_" in "shards_state"
    parts = [rf"(?i:{re.escape(name)})(?![a-z])" for name in names] + [f"(?<![a-z]){prefix}" for prefix in PREFIXES]
    pattern = re.compile("|".join(parts))
    found: dict[str, str] = {}
    tree = source.tree
    texts = {id(part) for text in all_of(tree, ast.JoinedStr) for part in text.values}
    for node in ast.walk(tree):
        if id(node) in texts:
            continue
        for token in _tokens(node):
            if pattern.search(token):
                complaint = f"names a strategy: {token}. Ask its StrategyInfo or a capability of Strategy"
                found.setdefault(token, source.at(getattr(node, "lineno", 1), complaint))
    return found


def undeclared_attributes(source: Source, declared: Collection[str]) -> list[str]:
    """Attributes of objects called `strategy` that `trainkit.Strategy` does not declare."""
    complaints = []
    for node in ast.walk(source.tree):
        name = None
        if isinstance(node, ast.Attribute) and _is_strategy(node.value):
            name = node.attr
        elif (
            isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr") and _is_strategy(node.args[0])
        ):
            name = str(constant(node.args[1]))
        elif isinstance(node, ast.AnnAssign) and dotted(node.annotation) == "Any" and node.value and _is_strategy(node.value):
            complaints.append(source.at(node.lineno, "looks at a strategy through Any"))
        if name is not None and name not in declared:
            complaints.append(source.at(node.lineno, f"uses strategy.{name}, which trainkit.Strategy does not declare"))
    return complaints


def _is_strategy(node: ast.AST) -> bool:
    """Whether the last name of an expression is `strategy` or `_strategy`, as in `trainer.strategy`."""
    return dotted(node).split(".")[-1].lstrip("_") == "strategy"


def _tokens(node: ast.AST) -> list[str]:
    """The names in a node of a syntax tree (without its child nodes); or the string, if it has no spaces."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias(name=name, asname=other):
            return [name, *([other] if other else [])]
        case ast.ImportFrom(module=str(name)):
            return [name]
        case ast.Constant(value=str(text)) if text and not any(letter.isspace() for letter in text):
            return [text]
    return []


def writes_to_trainer(source: Source) -> list[str]:
    """Assignments to attributes of a Trainer, or of objects that it holds.

    `trainer.should_stop` is allowed: hooks set it to request a stop.
    """
    complaints = []
    for node in ast.walk(source.tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in [one for each in targets for one in getattr(each, "elts", [each])]:
            name = dotted(target) if isinstance(target, ast.Attribute) else ""
            owner, *path = name.removeprefix("self.").removeprefix("_").split(".")
            if owner == "trainer" and path and path != ["should_stop"]:
                complaints.append(source.at(target.lineno, f"writes {name}"))
    return complaints


def repeated_names(sources: Iterable[Source]) -> list[str]:
    """Names of files and classes that occur in several modules, except `__init__.py`.

    `Checkpoint` is what reads a checkpoint, and Lightning's name of the base class of callbacks that save them.
    """
    places: dict[str, list[str]] = {}
    for source in sources:
        file = source.path.rpartition("/")[2]
        classes = [node.name for node in all_of(source.tree, ast.ClassDef)]
        for name in {file, *classes} - {"__init__.py", "Checkpoint"}:
            places.setdefault(name, []).append(source.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def exported(tree: ast.Module) -> list[str] | None:
    """The names in a module's `__all__`; None where there is none or it is not a literal."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if target is not None and dotted(target) == "__all__" and isinstance(value, ast.List | ast.Tuple):
            names = [constant(item) for item in value.elts]
            return [str(name) for name in names] if all(isinstance(name, str) for name in names) else None
    return None


def is_public(module: str) -> bool:
    """Whether no part of a module's name starts with an underscore."""
    return not any(part.startswith("_") for part in module.split("."))


def undocumented(source: Source, module: ModuleType) -> list[str]:
    """Public functions, classes and methods without a docstring; an override may inherit the docstring."""
    complaints = []
    for node in _statements(source.tree):
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            complaints.append(source.at(node.lineno, f"{node.name} has no docstring"))
        if isinstance(node, ast.ClassDef):
            bases = vars(module)[node.name].__mro__[1:]
            complaints += [
                source.at(method.lineno, f"{node.name}.{method.name} has no docstring")
                for method in _statements(node)
                if isinstance(method, Function)
                and not method.name.startswith("_")
                and not ast.get_docstring(method)
                and not any(_adds_to_another(decorator) for decorator in method.decorator_list)
                and not any(getattr(vars(base).get(method.name), "__doc__", None) for base in bases)
            ]
    return complaints


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or class, with those in `if`, `try` and `with` blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _statements(child)
        else:
            yield child


def _adds_to_another(decorator: ast.AST) -> bool:
    """Whether a decorator makes a function part of another one, which has the docstring."""
    return dotted(decorator).split(".")[-1] in ("setter", "deleter", "overload")


def too_long(source: Source) -> dict[str, str]:
    """Complaints about files and functions that are too long, by the key that a table of exceptions uses."""
    complaints = {}
    tree = source.tree
    if (lines := code_lines(source)) > FILE_LINES:
        complaints[source.path] = source.at(1, f"has {lines} lines, more than {FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, Function) and (lines := function_lines(node)) > FUNCTION_LINES:
            complaint = source.at(node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES}")
            complaints[f"{source.path}:{node.name}"] = complaint
    return complaints


_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.AsyncWith,
    ast.Assert,
    ast.match_case,
)


def complexity(function: Function) -> int:
    """The cyclomatic complexity (McCabe, 1976) of a function without nested functions, counted like radon.

    One, and one more for each branch, loop, handler, context, assertion, comprehension and boolean operator.
    """
    count = 1
    nodes: list[ast.AST] = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        count += isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        nodes += ast.iter_child_nodes(node)
    return count


def too_complex(source: Source) -> list[str]:
    """Functions whose cyclomatic complexity is too high."""
    return [
        source.at(node.lineno, f"{node.name} has a cyclomatic complexity of {found}, more than {COMPLEXITY}")
        for node in ast.walk(source.tree)
        if isinstance(node, Function) and (found := complexity(node)) > COMPLEXITY
    ]


def code_lines(source: Source) -> int:
    """Number of lines with code: without empty lines, comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    return len(lines) - sum(map(docstring_lines, ast.walk(source.tree)))


def fragments(sources: Sequence[Source]) -> list[str]:
    """Small modules with one importer, which is in the same room: parts of that module, unless a sentence says why not."""
    importers: dict[str, set[Source]] = {}
    for source in sources:
        for item in imports(source.tree):
            importers.setdefault(item.module, set()).add(source)
            importers.setdefault(item.full, set()).add(source)
    return [
        source.at(1, f"has {lines} lines and one importer, {importer.path}: merge them, or write '{OWN_FILE} …'")
        for source in sources
        if not source.path.endswith(("__init__.py", "__main__.py"))
        for importer in importers.get(source.module, ())
        if len(importers[source.module]) == 1
        and room_of(importer.module) == room_of(source.module)
        and not importer.path.endswith("__init__.py")
        and (lines := code_lines(source)) < SMALL
        and OWN_FILE not in source.text
    ]


def function_lines(node: Function) -> int:
    """Number of lines of a function without its docstring and decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)


def docstring_lines(node: ast.AST) -> int:
    """Number of lines of the docstring of a module, class or function; 0 without one."""
    if not isinstance(node, ast.Module | ast.ClassDef | Function) or ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1
