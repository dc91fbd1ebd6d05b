"""Which methods of a user's class are called by the user's code, as far as the code names them.

A file of its own because it reads byte code, which nothing else here does.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from trainkit.console import is_library_frame

__all__ = ["callers_elsewhere", "find_self_calls"]

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_RECEIVERS = ("self", "cls", "trainer", ".trainer")  # a trainer has `val_dataloaders`; `find_self_calls` reads `self`
_INNER = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func")  # Static and decorated methods and properties have these.


def find_self_calls(members: Iterable[Mapping[str, Any]], names: Collection[str]) -> set[str]:
    """Those of the methods that other methods of the class name, as `self.name`, `super().name` or with `getattr`.

    Args:
        members: The attributes of the user's classes and of the object.
        names: The methods. One that only another of them names counts only if that one is called.
    """
    named: dict[str, set[str]] = {}  # method → the methods that its code names
    for namespace in members:
        for method, member in namespace.items():
            for code in _codes_of(member):
                receiver = code.co_varnames[0] if code.co_argcount else ""
                named.setdefault(method, set()).update(_find_names_on(code, receiver))
    called: set[str] = set()
    callers = set(named) - set(names)
    while callers:
        new = set().union(*(named.get(caller, set()) for caller in callers)) & set(names) - called
        called |= new
        callers = new
    return called


def callers_elsewhere(classes: Iterable[type], names: Collection[str]) -> dict[str, str]:
    """Those of the methods that other code of the user's names, with the place.

    That is the code of the functions that are running, and of the modules in the folders of the classes and of the script.

    Args:
        classes: The user's classes.
        names: The methods.
    """
    callers: dict[str, str] = {}
    if not names:
        return callers
    for code in (*_running(), *_modules_near([cls.__module__ for cls in classes])):
        for inner in _walk_code(code):
            if inner.co_name not in names and set(names) & set(inner.co_names):
                for of, name in _attributes(inner):
                    if name in names and of not in _RECEIVERS:
                        callers.setdefault(name, f"{inner.co_name} in {os.path.basename(inner.co_filename)}")
    return callers


def _codes_of(member: Any) -> Iterator[CodeType]:
    """The code of a method, also of one that is decorated, and of the parts of a property."""
    waiting, seen = [member], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        code = getattr(part, "__code__", None)
        if isinstance(code, CodeType):
            yield code
            waiting += [cell.cell_contents for cell in part.__closure__ or () if _is_filled(cell)]
        if code is not None or isinstance(part, staticmethod | classmethod | property) or hasattr(type(part), "__get__"):
            waiting += [inner for name in _INNER if (inner := getattr(part, name, None)) is not None]


def _is_filled(cell: Any) -> bool:
    try:
        return hasattr(cell.cell_contents, "__code__")
    except ValueError:  # a name that is not assigned yet
        return False


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    """A code and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_code(constant)


def _find_names_on(code: CodeType, receiver: str) -> set[str]:
    """The attributes of `receiver`, the first argument, that a function and what is defined in it name."""
    names = {name for of, name in _attributes(code) if of == "super()" or (receiver and of == receiver)}
    if "getattr" in code.co_names:
        names |= {constant for constant in code.co_consts if isinstance(constant, str)}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _find_names_on(inner, receiver if receiver in inner.co_freevars else "")
    return names


def _attributes(code: CodeType) -> Iterator[tuple[str, str]]:
    """The attributes that a code reads, as (what it reads them from, name).

    The first is the name of a variable, `".name"` for an attribute, `"super()"`, or `""` for anything else.
    """
    before: Any = None
    for one in dis.get_instructions(code):
        if one.opname == "EXTENDED_ARG":  # a part of the next instruction, where a code has many names
            continue
        if one.opname == "LOAD_SUPER_ATTR":  # Python 3.12 and newer
            yield "super()", one.argval
        elif one.opname in _ATTRIBUTES:
            called = before is not None and before.opname.startswith("CALL")
            yield "super()" if called and "super" in code.co_names else _read_load(before), one.argval
        before = one


def _read_load(instruction: Any) -> str:
    """What an instruction loads, as `_attributes` names it; the last one if it loads two, or stores one and loads one."""
    if instruction is None or "LOAD_" not in instruction.opname or instruction.opname == "LOAD_CONST":
        return ""
    value = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
    if not isinstance(value, str):
        return ""
    return f".{value}" if instruction.opname in _ATTRIBUTES else value


def _running() -> Iterator[CodeType]:
    """The code of the user's functions, modules and cells that are running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if not is_library_frame(frame):
            yield frame.f_code


def _modules_near(names: Iterable[str]) -> Iterator[CodeType]:
    """The code of the loaded modules in the folders of these modules and of the script, without installed packages."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in {"__main__", *names}]
    folders = tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in files if file)
    installed = tuple(os.path.join(path, "") for path in sysconfig.get_paths().values())
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in ("trainkit", "torch"):
            continue
        path = os.path.abspath(file)
        if path.startswith(folders) and not path.startswith(installed) and "site-packages" not in path:
            yield from _codes_in(name, module)


def _codes_in(name: str, module: Any) -> Iterator[CodeType]:
    """The code of a module; that of its functions and classes if its loader has no other."""
    try:
        code = module.__loader__.get_code(name)
    except Exception:  # whatever a loader of another program does
        code = None
    if isinstance(code, CodeType):
        yield code
        return
    for member in list(vars(module).values()):
        for part in [*vars(member).values()] if isinstance(member, type) else [member]:
            yield from _codes_of(part)
