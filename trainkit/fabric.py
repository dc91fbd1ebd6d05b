"""What scripts written for `lightning.fabric` import from it: `Fabric`, and its modules, which the finder of trainkit has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkit.names import absent, home_of, submodule

if TYPE_CHECKING:
    from trainkit.compat.fabric_names import Fabric
    from trainkit.rng import seed_everything

__all__ = ["Fabric", "seed_everything"]

__path__: list[str] = []  # It has no files, but Python looks for `trainkit.fabric.utilities` in packages only.

_PLACES = {"Fabric": "trainkit.compat.fabric_names", "seed_everything": "trainkit.rng"}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used; others as Lightning has them, see `trainkit.names.import_paths`."""
    home = None if name.startswith("__") else _PLACES.get(name) or home_of(__name__, name)
    if home is not None:
        return getattr(import_module(home), name)
    if (child := submodule(globals(), name)) is not None:
        return child
    raise absent(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
