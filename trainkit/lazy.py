"""`lazily`: import the names of a package when they are first used. `LightningModules`: import paths of Lightning."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trainkit.errors import nearest

__all__ = ["LightningModules", "PytorchAlias", "absent", "lazily", "submodule"]


def lazily(package: dict[str, Any], files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: The `globals()` of the package.
        files: Public name → its module in the package; a module that begins with a dot is in the parent package.
    """

    def get(name: str) -> Any:
        if name not in files:
            if (module := submodule(package, name)) is not None:
                return module
            raise absent(package["__name__"], name, files)
        value = getattr(import_module(f".{files[name]}", package["__name__"]), name)
        package[name] = value  # __getattr__ is not called again
        return value

    def names() -> list[str]:
        return sorted({*package, *files})

    return get, names


def submodule(package: Mapping[str, Any], name: str) -> ModuleType | None:
    """The module of this name in a package, for `package.module.name` without an import of the module, as in Lightning.

    Args:
        package: The `globals()` of the package.
        name: The attribute that it does not have.
    """
    full = f"{package['__name__']}.{name}"
    return import_module(full) if "__path__" in package and name[0] != "_" and find_spec(full) is not None else None


def absent(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """The error for a missing name of a module, for the module's `__getattr__`.

    It says what to use instead of a name of Lightning or Accelerate, and otherwise the nearest name. For
    `from module import name` it is an `ImportError`, because Python would replace an `AttributeError` by an `ImportError`
    without that text. Otherwise it is an `AttributeError`, which `hasattr` and `getattr` need.

    Args:
        module: The full name of the module.
        name: The missing name.
        known: The names that exist.
    """
    from trainkit.unsupported import use_instead

    use = use_instead(module, name)
    frame = inspect.currentframe()
    for _ in range(2):  # the frames of this function and of __getattr__
        frame = None if frame is None else frame.f_back
    importing = frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
    if use is not None:
        text = f"{module} has no {name}. Use: {use}"
    elif importing:
        text = f"cannot import name {name!r} from {module!r}.{nearest(name, known)}"
    else:
        text = f"module {module!r} has no attribute {name!r}.{nearest(name, known)}"
    # without a name Python would add a "Did you mean" of its own
    return ImportError(text, name=module) if importing else AttributeError(text, name=name, obj=None)


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
        if not fullname.startswith("trainkit."):
            return None
        from trainkit.unsupported.lightning_names import MODULES

        if fullname.removeprefix("trainkit.") not in MODULES:
            return None
        return ModuleSpec(fullname, self, origin="a module of Lightning", is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        where = module.__name__

        def get(name: str) -> Any:
            from trainkit.unsupported import home_of

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
