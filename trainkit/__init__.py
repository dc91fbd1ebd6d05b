"""trainkit trains PyTorch models: subclass ``TrainModule`` and call ``Trainer(...).fit(...)``, or keep your loop.

Who keeps his loop uses ``Accelerator``; it is the same engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import trainkit.started  # noqa: F401 - before a script goes to another folder
from trainkit._version import __version__

if TYPE_CHECKING:
    from trainkit import errors
    from trainkit.accelerator import Accelerator
    from trainkit.callback import Callback
    from trainkit.data.combined import CombinedLoader
    from trainkit.datamodule import DataModule
    from trainkit.module import TrainModule
    from trainkit.precision import Precision
    from trainkit.rng import seed_everything, set_seed
    from trainkit.strategy import Strategy
    from trainkit.trainer import Trainer

__all__ = [
    "Accelerator",
    "Callback",
    "CombinedLoader",
    "DataModule",
    "Precision",
    "Strategy",
    "TrainModule",
    "Trainer",
    "__version__",
    "errors",
    "seed_everything",
    "set_seed",
]

_PLACES = {
    "Accelerator": "trainkit.accelerator",
    "Callback": "trainkit.callback",
    "CombinedLoader": "trainkit.data.combined",
    "DataModule": "trainkit.datamodule",
    "Precision": "trainkit.precision",
    "Strategy": "trainkit.strategy",
    "TrainModule": "trainkit.module",
    "Trainer": "trainkit.trainer",
    "seed_everything": "trainkit.rng",
    "set_seed": "trainkit.rng",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing trainkit costs next to nothing."""
    if name == "errors":
        return import_module("trainkit.errors")
    if name in _PLACES:
        value = globals()[name] = getattr(import_module(_PLACES[name]), name)
        return value
    from trainkit.errors import nearest

    raise AttributeError(f"module 'trainkit' has no attribute {name!r}.{nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
