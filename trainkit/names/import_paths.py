"""Finders of modules that are not files of trainkit: those of Lightning, and other paths of modules that are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trainkit.names import absent, home_of, submodule, table

__all__ = ["Aliases", "LightningModules"]


class LightningModules(MetaPathFinder, Loader):
    """Finds modules of Lightning that trainkit does not have, so that only the package's name changes in an import.

    `from trainkit.callbacks.lr_monitor import LearningRateMonitor` finds the class where trainkit has it; a name that
    trainkit does not have is an `ImportError` that says what to use. Python asks this finder after all others, so that
    modules of trainkit come first.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if it is one of Lightning's."""
        if not fullname.startswith("trainkit.") or fullname.removeprefix("trainkit.") not in table("lightning")["modules"]:
            return None
        return ModuleSpec(fullname, self, origin="a module of Lightning", is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        where = module.__name__

        def get(name: str) -> Any:
            home = None if name.startswith("__") else home_of(where, name)
            if home is None or home == where:
                if (child := submodule(vars(module), name)) is not None:
                    return child
                raise absent(where, name, ())
            return getattr(import_module(home), name)

        vars(module)["__getattr__"] = get


# Modules whose names moved to their package, for `from trainkit.utils.operations import gather`.
_MOVED = {
    f"{package}.{module}": package
    for package, modules in {
        "trainkit.utilities": "apply_func grads seed throughput",
        "trainkit.utils": "available basic_config choices main_process_tqdm memory modeling models objects operations seeding",
    }.items()
    for module in modules.split()
}


class Aliases(MetaPathFinder, Loader):
    """Makes a path the same module as another one: those in `_MOVED`, and `trainkit.pytorch`, which is `trainkit`.

    With the latter a search and replace of `lightning` by `trainkit` is enough. Python asks this finder first: otherwise it
    would load the files below `trainkit.pytorch` a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if it is an alias of one that exists."""
        other = _other_name(fullname)
        return None if other == fullname or find_spec(other) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python creates a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of trainkit in its place."""
        sys.modules[module.__name__] = import_module(_other_name(module.__name__))


def _other_name(module: str) -> str:
    if module == "trainkit.pytorch" or module.startswith("trainkit.pytorch."):
        return ".".join(["trainkit", *module.split(".")[2:]])
    return _MOVED.get(module, module)
