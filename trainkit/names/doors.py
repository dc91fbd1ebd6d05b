"""Doors: once one is open, `import lightning` or `import accelerate` gives trainkit's names.

`trainkit.compat.lightning` and `trainkit.compat.accelerate` open them. The packages themselves are modules made here, which
have the version that trainkit follows; the modules below `lightning.pytorch` are trainkit's own. Those of Accelerate are made
here too, because other libraries import names from them that trainkit does not have: placeholders, which raise with advice.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, invalidate_caches
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from trainkit.errors import ConfigurationError, nearest
from trainkit.names import PACKAGES, absent, advice, behind_door, submodule, table, use_instead

__all__ = ["VARIABLE", "Door", "is_open", "open_door", "variables"]

VARIABLE = "TRAINKIT_AS"
"""The environment variable that tells a new process which doors to open."""

# Packages of Lightning that are made here → the module of trainkit with their names.
_LIGHTNING = {
    "lightning": "trainkit",
    "lightning.pytorch": "trainkit",
    "pytorch_lightning": "trainkit",
    "lightning.fabric": "trainkit.fabric",
    "lightning_fabric": "trainkit.fabric",
}

_VENDORS = "trainkit.compat.lightning_vendors"

_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}

# Python runs the sitecustomize.py of this folder in each new process whose PYTHONPATH has it.
_AT_START = str(Path(__file__).with_name("at_start"))


def open_door(framework: str) -> None:
    """Let imports of a framework find trainkit, here and in processes that are started from now on.

    Opening it again does nothing.

    Args:
        framework: "lightning" or "accelerate".

    Raises:
        ConfigurationError: There is no such door, or the real package is imported already.
    """
    if framework not in PACKAGES:
        raise ConfigurationError(f"{VARIABLE} must be lightning or accelerate, or both with a comma, not {framework!r}.")
    if is_open(framework):
        return
    loaded = next((name for name in PACKAGES[framework] if name in sys.modules), None)
    if loaded is not None:
        raise ConfigurationError(
            f"the real {loaded} is imported already, so that a part of this program would use it and another part trainkit. "
            f"Write `import trainkit.compat.{framework}` before all other imports, or start the script with: "
            f"trainkit launch --as {framework} script.py"
        )
    sys.meta_path.insert(0, Door(framework))
    invalidate_caches()
    os.environ.update(variables(framework, os.environ))


def is_open(framework: str) -> bool:
    """Whether imports of a framework find trainkit."""
    return any(isinstance(finder, Door) and finder.framework == framework for finder in sys.meta_path)


def variables(framework: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which a new Python opens a door before its script begins.

    Args:
        framework: "lightning" or "accelerate".
        env: The variables without it.
    """
    doors = {framework, *_frameworks(env.get(VARIABLE, ""))}
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != _AT_START]
    return {VARIABLE: ",".join(sorted(doors)), "PYTHONPATH": os.pathsep.join([_AT_START, *paths])}


class Door(DistributionFinder, Loader):
    """Finds the modules of a framework, and the metadata of its distributions, for `sys.meta_path`.

    Args:
        framework: "lightning" or "accelerate".
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if it is one of the framework's.

        Raises:
            ModuleNotFoundError: Neither this module nor a counterpart exists, and a statement imports it.
        """
        if fullname.partition(".")[0] not in PACKAGES[self.framework]:
            return None
        if self._is_made_here(fullname):
            return ModuleSpec(fullname, self, origin="trainkit", is_package=True)
        ours = None if self.framework == "accelerate" else _module_of_ours(fullname)
        if ours is not None and (find_spec(ours) is not None or _names_for_vendors(ours) or _placeholders(ours)):
            return ModuleSpec(fullname, self)
        if _is_statement():  # importlib.util.find_spec only asks.
            meant = nearest(fullname.rpartition(".")[2], self._siblings(fullname))
            use = meant or (
                f" Import the name from {fullname.partition('.')[0]} itself: if there is a counterpart, "
                "it is found or the error says what to use."
            )
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: trainkit takes the place of {self.framework} in this process and has no such "
                f"module.{use} See docs/moving-over/{self.framework}.md.",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Python creates a module, which `exec_module` fills or replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, or put the module of trainkit in its place."""
        where = module.__name__
        if not self._is_made_here(where):
            home = str(_module_of_ours(where))
            ours = sys.modules[where] = module if find_spec(home) is None else import_module(home)
            for name in _names_for_vendors(home):
                vars(ours)[name] = getattr(import_module(_VENDORS), name)
            for name in _placeholders(home):
                use = use_instead(home, name) or "the names in docs/moving-over/fabric.md"
                vars(ours)[name] = _placeholder(self.framework, where, name, use)
            behind_door[home] = where
            vars(ours).setdefault("__getattr__", _refuse_unknown(ours))  # Python's own error does not say what to use.
            return
        if "." not in where or where in _LIGHTNING:
            vars(module)["__version__"] = table(self.framework)["version"]
        if where in _LIGHTNING:  # It sets the rank of lightning_utilities, as Lightning does when it is imported.
            import_module("trainkit.utilities.rank_zero")
        make = _names_of_accelerate if self.framework == "accelerate" else _names_of_lightning
        vars(module)["__getattr__"], vars(module)["__dir__"] = make(where)

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterator[Distribution]:  # noqa: B008 - the signature of the base class
        """The distributions of the framework, with the version that trainkit follows, for `importlib.metadata`."""
        if "path" in vars(context):  # The caller searches folders that it has given.
            return
        wanted = None if context.name is None else context.name.lower().replace("_", "-")
        for package in PACKAGES[self.framework]:
            if wanted in (None, package.replace("_", "-")):
                yield _Followed(package, table(self.framework)["version"])

    def _siblings(self, module: str) -> list[str]:
        """The modules of its package, without the name of that."""
        package, home = module.rpartition(".")[0], (_module_of_ours(module) or "").rpartition(".")[0]
        modules = table(self.framework)["modules"]
        if self.framework == "lightning":
            path = getattr(import_module(home), "__path__", ()) if home else ()
            files = (found.name for found in iter_modules(path, f"{home}.") if not found.name.startswith(f"{home}._"))
            modules = [*_LIGHTNING, *(f"trainkit.{name}" for name in modules), *files]
        return [name.rpartition(".")[2] for name in modules if name.rpartition(".")[0] in (package, home)]

    def _is_made_here(self, module: str) -> bool:
        return module in (_LIGHTNING if self.framework == "lightning" else table("accelerate")["modules"])


class _Followed(Distribution):
    """The metadata of a package whose place trainkit takes."""

    def __init__(self, package: str, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """The text of a file of the metadata; `None` if there is none."""
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """The path that a file of the distribution would have."""
        return Path(__file__).parent / path


def _module_of_ours(module: str) -> str | None:
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        if module.startswith(f"{package}."):
            return _LIGHTNING[package] + module.removeprefix(package)
    return None


def _names_for_vendors(module: str) -> list[str]:
    """The names that a module of trainkit, or of Lightning by its name there, has behind the door only."""
    names: list[str] = table("lightning")["vendors"].get(module.removeprefix("trainkit."), [])
    return names


def _placeholders(module: str) -> list[str]:
    """The names that a module of trainkit, or of Lightning by its name there, has behind the door so that imports work."""
    names: list[str] = table("lightning")["placeholders"].get(module.removeprefix("trainkit."), [])
    return names


def _refuse_unknown(module: ModuleType) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if not name.startswith("__") and (child := submodule(vars(module), name)) is not None:
            return child
        raise absent(module.__name__, name, vars(module))

    return get


def _is_statement() -> bool:
    """Whether a statement imports the module for which Python has called the finder that calls this."""
    caller = sys._getframe(2).f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


_Pair = tuple[Callable[[str], Any], Callable[[], list[str]]]


def _names_of_lightning(where: str) -> _Pair:
    """`__getattr__` and `__dir__` of a package of Lightning."""
    home = _LIGHTNING[where]
    exported = [*(table("lightning")["same"][""]["trainkit"] if home == "trainkit" else import_module(home).__all__)]
    exported += ["Fabric", "__version__"] if where == "lightning" else []

    def get(name: str) -> Any:
        module = import_module(home)
        if name == "__all__":  # for `import *`: the names of trainkit would replace those of a script
            return exported
        if not name.startswith("__"):
            if where == "lightning" and name == "Fabric":
                module = import_module("trainkit.fabric")
            elif find_spec(f"{where}.{name}") is not None:
                return import_module(f"{where}.{name}")
            if hasattr(module, name):
                return getattr(module, name)
            raise absent(home, name, names(), where)
        raise AttributeError(f"module {where!r} has no attribute {name!r}", name=name, obj=None)

    def names() -> list[str]:
        return [name for name in getattr(import_module(home), "__all__", []) if not name.startswith("__")]

    return get, names


def _names_of_accelerate(where: str) -> _Pair:
    """`__getattr__` and `__dir__` of a module of Accelerate: a name is found in each of them, wherever trainkit has it."""
    homes, modules = table("accelerate")["homes"], table("accelerate")["modules"]

    def get(name: str) -> Any:
        if name == "__all__":
            return names()
        if name.startswith("__"):
            raise AttributeError(f"module {where!r} has no attribute {name!r}", name=name, obj=None)
        if f"{where}.{name}" in modules:
            return import_module(f"{where}.{name}")
        for home in homes:
            module = import_module(home)
            if name in getattr(module, "__all__", ()):
                return getattr(module, name)
        if name == "is_torch_version":
            return _is_torch_version
        if name in table("accelerate")["unavailable"]:  # libraries call these when they are imported
            return _is_unavailable
        if name in table("accelerate")["placeholders"]:
            use = (
                advice("trainkit", name)
                or "Accelerator(strategy='fsdp') or 'zero3', which shard a model larger than one device"
            )
            value = vars(sys.modules[where])[name] = _placeholder("accelerate", where, name, use)
            return value
        raise absent("trainkit.utils", name, names(), where)

    def names() -> list[str]:
        return sorted({name for home in homes for name in getattr(import_module(home), "__all__", ()) if name[0] != "_"})

    return get, names


def _is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version, without a suffix such as `+cpu`, is `>=`, `<` and so on than another one."""
    import torch

    release = re.match(r"\d+(\.\d+)*", torch.__version__)
    return bool(_COMPARISONS[operation](torch.torch_version.TorchVersion(release[0] if release else ""), version))


def _is_unavailable() -> bool:
    """Whether a kind of device can be used on which trainkit does not run."""
    return False


_made: dict[str, Any] = {}


def _placeholder(framework: str, where: str, name: str, use: str) -> Any:
    """A class or function that other packages import and that raises when it is called; the same one in each module."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConfigurationError(f"{where}.{name} cannot be called: trainkit takes the place of {framework}. Use: {use}")

    if name not in _made:
        is_class = name.lstrip("_")[0].isupper()
        made: Any = type(name, (), {"__init__": refuse, "__module__": where}) if is_class else refuse
        made.__name__ = made.__qualname__ = name
        made.__doc__ = f"A placeholder. Use: {use}"
        _made[name] = made
    return _made[name]


def open_all(frameworks: str) -> None:
    """Open the doors that `TRAINKIT_AS` names, with commas, in a process that was started with it."""
    for framework in _frameworks(frameworks):
        open_door(framework)


def _frameworks(text: str) -> list[str]:
    return [name for one in text.split(",") if (name := one.strip())]
