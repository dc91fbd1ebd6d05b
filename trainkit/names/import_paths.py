"""Finders of modules that are not files of trainkit: those of Lightning, and everything below `trainkit.pytorch`."""

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

__all__ = ["LightningModules", "PytorchAlias"]


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
                if (found := submodule(vars(module), name)) is not None:
                    return found
                raise absent(where, name, ())
            return getattr(import_module(home), name)

        vars(module)["__getattr__"] = get


class PytorchAlias(MetaPathFinder, Loader):
    """Makes `trainkit.pytorch` the same module as `trainkit`, and so on below: after a search and replace of `lightning`.

    Python asks this finder first: otherwise it would load the files a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if its name begins with `trainkit.pytorch` and it exists without that."""
        if not fullname.startswith("trainkit.pytorch") or find_spec(_without_pytorch(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python creates a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of trainkit in its place."""
        sys.modules[module.__name__] = import_module(_without_pytorch(module.__name__))


def _without_pytorch(module: str) -> str:
    return ".".join(["trainkit", *module.split(".")[2:]])
