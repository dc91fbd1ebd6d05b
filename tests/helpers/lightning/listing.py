"""The public names of the installed Lightning, as lines `place: name name …`.

    python tests/helpers/lightning/listing.py > tests/helpers/lightning/names_2.6.6.txt

A place is a module, `Trainer(` for the arguments of a class, or `Trainer.` for its attributes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["NAMES", "listing"]

NAMES = Path(__file__).with_name("names_2.6.6.txt")

# What Lightning keeps for itself: no script imports from there.
_INTERNAL = re.compile(
    r"\._|\.(loops|migration|testing|overrides|connectors|launchers|mnist_datamodule)\b|configuration_validator|\.call$"
)
_LINE = 128


def listing() -> str:
    """All lines; needs Lightning."""
    warnings.simplefilter("ignore")
    top = importlib.import_module("lightning.pytorch")
    found = pkgutil.walk_packages(top.__path__, "lightning.pytorch.", onerror=lambda name: None)
    modules = ["lightning", "lightning.pytorch", *(one.name for one in found if not _INTERNAL.search(one.name))]
    places = {name: _names(importlib.import_module(name)) for name in modules}
    places |= {f"{place}": names for place, names in _members(top)}
    return "".join(_lines(place, sorted(names)) for place, names in places.items() if names)


def _names(module: ModuleType) -> set[str]:
    """Those of `__all__`; without it, what the module defines, or imports only to pass it on."""
    if hasattr(module, "__all__"):
        return {name for name in module.__all__ if not name.startswith("_")}
    source = inspect.getsource(module)
    lines, names = source.splitlines(), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (
            hasattr(module, "__path__") or "F401" in "".join(lines[node.lineno - 1 : node.end_lineno])
        ):
            names |= {alias.asname or alias.name for alias in node.names if (node.module or "").startswith("lightning")}
    # the loggers of modules, and variables for types
    return {name for name in names if not name.startswith("_") and name not in ("log", "warning_cache") and len(name) > 2}


def _members(top: Any) -> Iterator[tuple[str, set[str]]]:
    from torch import nn

    def public(owner: Any, base: type = object) -> set[str]:
        return {name for name in dir(owner) if not name.startswith("_") and not hasattr(base, name)}

    trainer = top.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    yield "Trainer(", {*inspect.signature(top.Trainer.__init__).parameters} - {"self"}
    yield "Trainer.", public(top.Trainer) | {name for name in vars(trainer) if not name.startswith("_")}
    yield "LightningModule.", public(top.LightningModule, nn.Module)
    yield "LightningDataModule.", public(top.LightningDataModule)
    yield "Callback.", public(top.Callback)
    yield "Strategy.", public(top.strategies.Strategy)


def _lines(place: str, names: list[str]) -> str:
    lines = [f"{place}:"]
    for name in names:
        if len(lines[-1]) + len(name) >= _LINE:
            lines.append(f"{place}:")
        lines[-1] += f" {name}"
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(listing())
