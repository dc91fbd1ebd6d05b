"""Everything that trainkit raises on purpose.

::

    TrainkitError
    ├── ConfigurationError (ValueError)      an argument is wrong, or contradicts another
    │   ├── UnknownNameError                 a name nobody knows; the message has the nearest known one
    │   └── UnsupportedArgumentError         an argument of Lightning's that we do not have; names the replacement
    ├── ModuleError                          the user's TrainModule, DataModule or Callback
    │   ├── MissingMethodError               a method that the run needs is not there
    │   ├── HookError                        a hook that is misspelt, removed, or cannot be called
    │   ├── LossError                        what training_step returned cannot be trained on
    │   └── OptimizerError                   what configure_optimizers returned cannot be used
    ├── DataError                            a loader or a batch
    │   └── EmptyLoaderError
    ├── MetricError (ValueError)             a value given to ``log`` that is no metric
    │   └── MissingMetricError               a monitored metric that was never logged
    ├── NonFiniteError (ArithmeticError)     a loss or gradient that is not finite
    └── MissingPackageError (ImportError)    an optional package is not installed

Every message says what was expected, what came, and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigurationError",
    "DataError",
    "EmptyLoaderError",
    "HookError",
    "LossError",
    "MetricError",
    "MissingMethodError",
    "MissingMetricError",
    "MissingPackageError",
    "ModuleError",
    "NonFiniteError",
    "OptimizerError",
    "TrainkitError",
    "UnknownNameError",
    "UnsupportedArgumentError",
]


class TrainkitError(Exception):
    """The root: ``except TrainkitError`` catches whatever trainkit raises on purpose."""


class ConfigurationError(TrainkitError, ValueError):
    """An argument is wrong by itself or contradicts another one."""


class UnknownNameError(ConfigurationError):
    """A strategy, precision, hook or argument of a name that nobody knows."""


class UnsupportedArgumentError(ConfigurationError):
    """An argument of Lightning's that trainkit does not have; the message names what to use."""


class ModuleError(TrainkitError):
    """Something in the user's ``TrainModule``, ``DataModule`` or ``Callback`` cannot work."""


class MissingMethodError(ModuleError):
    """A method that this run needs is not defined."""


class HookError(ModuleError):
    """A hook that is misspelt, that Lightning removed, or that cannot be called with its arguments."""


class LossError(ModuleError):
    """``training_step`` returned something that cannot be trained on."""


class OptimizerError(ModuleError):
    """``configure_optimizers`` returned something that cannot be used."""


class DataError(TrainkitError):
    """A loader or a batch cannot be used."""


class EmptyLoaderError(DataError):
    """A loader that gives no batch."""


class MetricError(TrainkitError, ValueError):
    """A value given to ``log`` is not a metric, or is logged where that is not possible."""


class MissingMetricError(MetricError):
    """A metric that something monitors was never logged."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class MissingPackageError(TrainkitError, ImportError):
    """A package that is optional for trainkit, but needed for what was asked, is not installed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name nearest to ``name``, or an empty string if none is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """The error for an optional package that is needed now; ``extra`` is the one of ``trainkit-torch`` that brings it."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        f"   (or the extra: pip install 'trainkit-torch[{extra}]')"
    )
